"""Measures whole trainings: the time that hidden communication saves, and the accuracy that it costs.

    python benchmarks/benchmark_delay.py --tasks=digits --seeds=0 --link=1e8 --kinds=auto,dts_auto,ddp,ddp:powersgd
    python benchmarks/benchmark_delay.py --tasks=perceptron,cnn --link=loopback --kinds=pipe,pipe:4,dts,canary,shat
    python benchmarks/benchmark_delay.py --link=1e7 --round_trip=0.277 --step_seconds=0.05 --world_size=2 \
        --kinds=auto,dts_auto,diloco:20:6:2

Ranks are real processes that call `fit`, on loopback or on hosts of an emulated network (which needs root). All kinds
of training make the same number of steps, with the same learning rate, which is tuned for none and falls to 0. They
begin with the same weights, and see the same global batches, of which each rank takes its contiguous part.

Shown are for all seeds: the seconds in all; those to 98 % of the final accuracy of synchronous training of the same
seed; the final accuracy of the model that `strategy.synchronize(model)` gives all ranks; and the points that this is
above synchronous training. The first step, which traces, does not count, nor does evaluation: rank 0 keeps the weights
with which it computes every five steps, and evaluates them afterwards. A training that fails is named at the end.

Tasks
  digits       784-512-256-10 on scikit-learn's digits, which need no download
  perceptron   the same on Fashion-MNIST
  cnn          two convolutions and two dense layers on it
Kinds, --kinds: labels of a strategy with, behind colons, arguments of its constructor, that is `pipe:3` or
  `pipe:pipeline_width=3`, `dts:20:12`, `canary:bsp`, `hop:ring`, `shat:mixing=0.33`, `pipe:2:compensation=none`.
  synchronous  PipeSGDStrategy(pipeline_width=1, codec=None, algorithm="mesh"), the reference, always takes part
  auto         PipeSGDStrategy()
  dts_auto     DTSStrategy()
  hop, pipe, dts, canary, shat   the strategies (shat with one server more, on a host of its own); pipe and dts are
                                 lossless over a mesh, unless others are given, with K = 2, or D = 4 and p = 4
  ddp, mirrored                  PyTorch's over gloo, and tf_keras's MultiWorkerMirroredStrategy
  ddp:fp16, ddp:powersgd:4:2     DDP's hooks: 16 bits; PowerSGD of rank 4 after 2 steps without
  diloco:p:D:P                   torchft's DiLoCo: P fragments, each sent every p steps, D steps early
  hivemind:p                     local SGD, averaged by hivemind every p steps
  Other libraries take part if they are installed.
Ranks, --ranks: with "slow" or "slow:10" the last rank is ten times slower than the others, with "random" or "random:6"
  every rank is six times slower in one of n steps. Computation is then emulated: asleep. With "link:10" the last
  rank's link has a tenth of the others' rate.
Shards, --shards: with "skewed" each rank has its own classes, and draws from them only.
"""

from __future__ import annotations

import itertools
import sys

import delay_peers
import delay_ranks
import delay_tasks
import peers
import ranks
import results
import turns
from absl import app, flags
from delay_ranks import SYNCHRONOUS, Trained

from hop_tf.tools.emulation import ComputeEmulation, Slowdown

_TASKS = flags.DEFINE_list("tasks", ["digits"], "digits, perceptron, cnn.")
_KINDS = flags.DEFINE_list("kinds", ["auto", "dts_auto", "ddp"], "Kinds of training.")
_RANKS = flags.DEFINE_list("ranks", ["alike"], "alike, slow:10, random:6, link:10.")
_SHARDS = flags.DEFINE_enum("shards", delay_tasks.IDENTICAL, delay_tasks.SHARDS, "The ranks' data.")
_OPTIMIZER = flags.DEFINE_enum("optimizer", "SGD", delay_ranks.OPTIMIZERS, "SGD has momentum 0.9.")
_SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2"], "Seeds; each is a training of each kind.")
_WORLD_SIZE = flags.DEFINE_integer("world_size", 3, "Ranks.", lower_bound=2)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 96, "Rows of a step, of all ranks together.", lower_bound=2)
_EPOCHS = flags.DEFINE_integer("epochs", None, "Epochs of a training. Default: the task's.", lower_bound=1)
_NUM_ROWS = flags.DEFINE_integer("num_rows", None, "Rows to train with, at most. Default: the task's.", lower_bound=2)
_STEP_SECONDS = flags.DEFINE_float(
    "step_seconds", None, "Emulated computation of a step. Default: 0.05 if ranks are slow, otherwise none."
)
_LINK = flags.DEFINE_string("link", "1e8", "loopback, or bits per second of each host's link.")
_ROUND_TRIP = flags.DEFINE_float("round_trip", 0.0, "Seconds there and back between any two hosts.", 0.0)

_SLOW_STEP_SECONDS = 0.05
_TARGET = 0.98
_TIMEOUT_SECONDS = 3600.0
_failures: list[str] = []  # The kinds of trainings that have failed.


def _train(task_name: str, ranks_label: str, kind: str, seed: int) -> Trained:
    """Trains; returns the results of rank 0. If a rank fails, prints that, and returns no values."""
    world_size, task = _WORLD_SIZE.value, delay_tasks.TASKS[task_name]
    uneven, factor = delay_ranks.parse_ranks(ranks_label)
    case = {
        "task": task_name,
        "num_rows": _NUM_ROWS.value or task.num_rows,
        "epochs": _EPOCHS.value or task.epochs,
        "batch_size": _BATCH_SIZE.value,
        "shards": _SHARDS.value,
        "optimizer": _OPTIMIZER.value,
        "kind": kind,
        "seed": seed,
        "world_size": world_size,
    }
    slow_rank = {"slow": world_size - 1, "random": None}
    slowdowns = (Slowdown(slow_rank[uneven], factor),) if uneven in slow_rank else ()
    step_seconds = _STEP_SECONDS.value if _STEP_SECONDS.value is not None else _SLOW_STEP_SECONDS * len(slowdowns)
    compute = ComputeEmulation(step_seconds=step_seconds, slowdowns=slowdowns, seed=seed) if step_seconds else None
    is_peer = delay_peers.package_of(kind) is not None
    peers.preload(delay_peers.package_of(kind))
    num_hosts = world_size + (0 if is_peer else turns.num_servers(delay_ranks.call_of(kind)))
    emulation = {"round_trip_seconds": _ROUND_TRIP.value}
    if uneven == "link":
        rates = [float(_LINK.value)] * num_hosts
        rates[world_size - 1] /= factor
        emulation["bandwidth_bits_per_second"] = rates
    try:
        return ranks.run(
            (delay_peers if is_peer else delay_ranks).train,
            case,
            num_hosts,
            _LINK.value,
            num_ports=2,  # Some libraries meet at one more.
            environment=compute.to_environment() if compute else None,
            timeout_seconds=_TIMEOUT_SECONDS,
            **emulation,
        )[0]
    except RuntimeError as error:  # Keeps the results of the hours before.
        print(f"{kind}, seed {seed}, has failed: {error}", flush=True)
        _failures.append(kind)
        return Trained()


def _kinds() -> list[str]:
    """Returns the kinds with synchronous training, which sets the target, first; and only with installed libraries."""
    packages = {kind: delay_peers.package_of(kind) or "hop_tf" for kind in _KINDS.value}
    for kind, package in packages.items():
        if not peers.is_installed(package):
            print(f"{kind} is left out: {package} is not installed.")
    return list(dict.fromkeys([SYNCHRONOUS, *(kind for kind in packages if peers.is_installed(packages[kind]))]))


def _compare(task: str, ranks_label: str) -> None:
    """Shows all kinds, each as soon as all of its seeds have trained."""
    references: list[Trained] = []
    for kind in _kinds():
        all_trained = [_train(task, ranks_label, kind, int(seed)) for seed in _SEEDS.value]
        references = references or all_trained
        pairs = list(zip(all_trained, references, strict=True))
        values = {
            "ms a step": [1e3 * each.seconds / max(each.steps - 1, 1) for each in all_trained],
            "seconds": [each.seconds for each in all_trained],
            "seconds to target": [each.seconds_to(_TARGET * reference.accuracy) for each, reference in pairs],
            "accuracy": [each.accuracy for each in all_trained],
            "points": [100 * (each.accuracy - reference.accuracy) for each, reference in pairs],
        }
        results.show(f"{task}, {ranks_label}, {kind}", values)


def _check_flags() -> None:
    """Checks the flags before hours are spent."""
    for name, allowed in {"tasks": delay_tasks.TASKS, "ranks": delay_ranks.FACTORS}.items():
        if unknown := {value.partition(":")[0] for value in flags.FLAGS[name].value}.difference(allowed):
            raise app.UsageError(f"--{name} must be among {', '.join(allowed)}. Received: {sorted(unknown)}.")
    if _LINK.value == ranks.LOOPBACK and any(text.startswith("link") for text in _RANKS.value):
        raise app.UsageError("--ranks=link needs a --link in bits per second.")
    if _BATCH_SIZE.value % _WORLD_SIZE.value:
        raise app.UsageError(
            f"--batch_size must be a multiple of --world_size={_WORLD_SIZE.value}. Received: {_BATCH_SIZE.value}."
        )
    for kind in _KINDS.value:
        if delay_peers.package_of(kind) is None:
            try:
                delay_ranks.call_of(kind)
            except ValueError as error:
                raise app.UsageError(str(error)) from error


def main(argv: list[str]) -> None:
    """Runs all trainings."""
    if len(argv) > 1:
        raise app.UsageError(f"Unknown arguments: {argv[1:]}.")
    _check_flags()
    for task, ranks_label in itertools.product(_TASKS.value, _RANKS.value):
        _compare(task, ranks_label)
    if _failures:
        sys.exit(f"These trainings have failed: {', '.join(_failures)}.")


if __name__ == "__main__":
    app.run(main)

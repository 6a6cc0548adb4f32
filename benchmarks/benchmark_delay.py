"""Measures the accuracy that hidden communication costs at equal numbers of steps, and the time that it saves.

    python benchmarks/benchmark_delay.py --tasks=perceptron --output=results
    python benchmarks/benchmark_delay.py --tasks=resnet,transformer --cifar10=cifar10.npz --optimizers=sgd,adamw
    python benchmarks/benchmark_delay.py --tasks=perceptron --ranks=alike,slow --shards=identical,skewed
    python benchmarks/benchmark_delay.py --experiments=time --tasks=perceptron,cnn --seeds=0 --output=results
    python benchmarks/benchmark_delay.py --experiments=time --link=1e7 --round_trip=0.277 --step_seconds=0.05 \
        --world_size=2 --kinds=auto,dts_auto,diloco:20:6:2

accuracy    Accuracy on held-out data for every strategy, with its default settings and some others. All make as many
            steps as synchronous training, with the same, untuned learning rate and momentum. Shown are means over
            seeds, and the difference to synchronous training of the same seed in points, with its standard error. With
            a constant rate, accuracy varies by about a point from step to step; --schedule=cosine prevents that.
time        Seconds to --target times the final accuracy of synchronous training (of the same seed), on an emulated
            network with --link bits per second and --round_trip seconds (which needs root). PyTorch's
            DistributedDataParallel over gloo, tf_keras's MultiWorkerMirroredStrategy, torchft's DiLoCo and hivemind are
            compared, if they are installed. The first step, which traces, does not count, nor does evaluation: rank 0
            keeps the weights with which it computes every --evaluate_every steps, and evaluates them afterwards.

Ranks are real processes that call `fit`; nothing is simulated. In accuracy they are on loopback. All kinds of training
begin with the same weights and see the same global batches, of which each rank takes its contiguous part. When `fit`
has ended, `strategy.synchronize(model)` gives all ranks the model that rank 0 evaluates.

Tasks
  perceptron   784-512-256-10 on Fashion-MNIST
  digits       the same on scikit-learn's digits, which need no download
  cnn          two convolutions and two dense layers on it
  resnet       a small residual network with batch normalization on CIFAR-10, images mirrored and moved at random
  transformer  two causal blocks on the bytes of Python's standard library's sources; accuracy is that of the next byte
Kinds, --kinds: labels of a strategy with, behind colons, arguments of its constructor, that is `pipe:3` or
  `pipe:pipeline_width=3`, `dts:20:12`, `canary:bsp`, `hop:ring`, `shat:mixing=0.33`, `pipe:2:compensation=none`.
  synchronous  PipeSGDStrategy(pipeline_width=1, codec=None, algorithm="mesh"), the reference for all others
  auto         PipeSGDStrategy()
  dts_auto     DTSStrategy()
  hop, pipe, dts, canary, shat   the strategies (shat with one server more, on a host of its own); pipe and dts are
                                 lossless over a mesh, unless others are given, with K = 2, or D = 4 and p = 4
  ddp, mirrored                  PyTorch and tf_keras, in time only
  ddp:fp16, ddp:powersgd:4:2     DDP's hooks, in time only: 16 bits; PowerSGD of rank 4 after 2 steps without
  diloco:p:D:P                   torchft's DiLoCo, in time only: P fragments, each sent every p steps, D steps early
  hivemind:p                     local SGD, averaged by hivemind every p steps, in time only
Ranks, --ranks: with "slow" or "slow:10" the last rank is ten times slower than the others, with "random" or "random:6"
  every rank is six times slower in one of n steps. Computation is then emulated: asleep. With "link:10" the last
  rank's link has a tenth of the others' rate.
Shards, --shards: with "skewed" each rank has its own classes (files, in transformer), and draws from them only.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Callable, Sequence

import delay_peers
import delay_ranks
import delay_tasks
import numpy as np
import peers
import ranks
import results
from absl import app, flags
from delay_ranks import SYNCHRONOUS, Trained

from hop_tf.tools.emulation import ComputeEmulation, Slowdown
from hop_tf.tools.testing import network

_KINDS = [
    SYNCHRONOUS,
    "hop",
    "auto",
    "pipe",
    "pipe:3",
    "pipe:4",
    "dts",
    "dts_auto",
    "dts:1:1",
    "dts:2:1",
    "dts:8:8",
    "dts:20:12",
    "canary",
    "canary:bsp",
    "shat",
]

_EXPERIMENTS = flags.DEFINE_list("experiments", ["accuracy"], "What to run: accuracy, time.")
_TASKS = flags.DEFINE_list("tasks", ["perceptron", "cnn", "resnet", "transformer"], "What is trained.")
_KINDS_USED = flags.DEFINE_list("kinds", None, f"How. Default: {','.join(_KINDS)}; in time ddp and mirrored, too.")
_OPTIMIZERS = flags.DEFINE_list("optimizers", ["sgd"], "sgd (momentum 0.9), adamw, muon.")
_RANKS = flags.DEFINE_list("ranks", ["alike"], "alike, slow:10, random:6, link:10.")
_SHARDS = flags.DEFINE_list("shards", [delay_tasks.IDENTICAL], "identical, skewed.")
_SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2"], "Seeds; each is a training of each kind.")
_WORLD_SIZE = flags.DEFINE_integer("world_size", 3, "Ranks.", lower_bound=2)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 96, "Rows of a step, of all ranks together.", lower_bound=2)
_EPOCHS = flags.DEFINE_integer("epochs", None, "Epochs of a training. Default: the task's.", lower_bound=1)
_NUM_ROWS = flags.DEFINE_integer("num_rows", None, "Rows to train with, at most. Default: the task's.", lower_bound=2)
_TEST_ROWS = flags.DEFINE_integer(
    "test_rows", None, "Rows to test with, at most. Default: the task's, 2000 in time.", lower_bound=1
)
_LEARNING_RATE = flags.DEFINE_float("learning_rate", None, "Default: the task's for sgd, 0.001 for others.")
_SCHEDULE = flags.DEFINE_enum(
    "schedule", delay_ranks.CONSTANT, delay_ranks.SCHEDULES, "Of the learning rate; a cosine ends at 0."
)
_STEP_SECONDS = flags.DEFINE_float(
    "step_seconds", None, "Emulated computation of a step. Default: 0.05 if ranks are slow, else none."
)
_CIFAR10 = flags.DEFINE_string(
    "cifar10", None, "An .npz file with x_train, y_train, x_test, y_test; else Keras's data."
)
_LINK = flags.DEFINE_string("link", "1e8", "Of time: bits per second of each host's link.")
_ROUND_TRIP = flags.DEFINE_float("round_trip", 0.0, "Of time: seconds there and back between any two hosts.", 0.0)
_TARGET = flags.DEFINE_float("target", 0.98, "Of time: the share of synchronous training's accuracy.", 0.0, 1.0)
_EVALUATE_EVERY = flags.DEFINE_integer("evaluate_every", 5, "Of time: steps between evaluations.", lower_bound=1)
_TIMEOUT_SECONDS = flags.DEFINE_float("timeout_seconds", 3600.0, "How long a training may take.")

_SLOW_STEP_SECONDS = 0.05
_TIME_TEST_ROWS = 2000  # Each training is evaluated dozens of times there.
_FAILED = Trained(accuracy=np.nan, loss=np.nan, seconds=np.nan)


@dataclasses.dataclass(frozen=True)
class Setting:
    """The conditions of a comparison.

    Attributes:
      task: Name of the task.
      optimizer: "sgd", "adamw" or "muon".
      ranks: As --ranks has them.
      shards: "identical" or "skewed".
    """

    task: str
    optimizer: str
    ranks: str
    shards: str

    def __str__(self) -> str:
        return f"{self.task}, {self.optimizer}, ranks {self.ranks}, shards {self.shards}"


_Key = tuple[Setting, str, int]  # The kind and the seed of a training, beside the setting.
_failures: list[str] = []  # The kinds of trainings that have failed.
_Found = dict[_Key, list[Trained | None]]


def _serve(case: dict, rank: int) -> Trained | None:
    return (delay_peers if delay_peers.package_of(case["kind"]) else delay_ranks).train(case, rank)


# In the parent.


def _train(setting: Setting, kind: str, seed: int, link: str, evaluate_every: int | None) -> list[Trained | None]:
    """Trains; returns the results of the ranks. If a rank fails, prints that, and returns an empty list."""
    world_size, task = _WORLD_SIZE.value, delay_tasks.TASKS[setting.task]
    step_seconds, (uneven, factor) = _step_seconds(setting), delay_ranks.parse_ranks(setting.ranks)
    case = {
        "task": setting.task,
        "cifar10": _CIFAR10.value,
        "num_rows": _NUM_ROWS.value or task.num_rows,
        "test_rows": _TEST_ROWS.value or (_TIME_TEST_ROWS if evaluate_every else task.test_rows),
        "epochs": _EPOCHS.value or task.epochs,
        "batch_size": _BATCH_SIZE.value,
        "shards": setting.shards,
        "optimizer": setting.optimizer,
        "learning_rate": _learning_rate(setting),
        "schedule": _SCHEDULE.value,
        "kind": kind,
        "seed": seed,
        "world_size": world_size,
        "evaluate_every": evaluate_every,
    }
    environment = {}
    if step_seconds:
        slow_rank = {"slow": world_size - 1, "random": None}
        slowdowns = (Slowdown(slow_rank[uneven], factor),) if uneven in slow_rank else ()
        environment = ComputeEmulation(step_seconds=step_seconds, slowdowns=slowdowns, seed=seed).to_environment()
    num_servers = 0 if delay_peers.package_of(kind) else delay_ranks.parse_kind(kind).num_servers
    network_of = {"round_trip_seconds": _ROUND_TRIP.value}
    if uneven == "link":
        rates = [float(link)] * (world_size + num_servers)
        rates[world_size - 1] /= factor
        network_of["bandwidth_bits_per_second"] = rates
    try:
        return ranks.run(
            __file__,
            case,
            world_size + num_servers,
            link,
            num_ports=delay_peers.num_ports_of(kind),
            environment=environment,
            timeout_seconds=_TIMEOUT_SECONDS.value,
            **network_of,
        )[:world_size]
    except RuntimeError as error:  # Keeps the results of the hours before.
        print(f"  {kind}, seed {seed}, has failed: {error}", flush=True)
        _failures.append(kind)
        return []


def _learning_rate(setting: Setting) -> float:
    if _LEARNING_RATE.value is not None:
        return _LEARNING_RATE.value
    return delay_tasks.TASKS[setting.task].learning_rate if setting.optimizer == "sgd" else delay_ranks.KERAS_RATE


def _step_seconds(setting: Setting) -> float:
    if _STEP_SECONDS.value is not None:
        return _STEP_SECONDS.value
    return _SLOW_STEP_SECONDS if delay_ranks.parse_ranks(setting.ranks)[0] in ("slow", "random") else 0.0


def _settings(tasks: Sequence[str], all_ranks: Sequence[str]) -> list[Setting]:
    return [Setting(*each) for each in itertools.product(tasks, _OPTIMIZERS.value, all_ranks, _SHARDS.value)]


def _title(setting: Setting) -> str:
    task = delay_tasks.TASKS[setting.task]
    num_rows, epochs = _NUM_ROWS.value or task.num_rows, _EPOCHS.value or task.epochs
    rate = f"{_SCHEDULE.value} rate {_learning_rate(setting):g}"
    return f"{setting}; {_WORLD_SIZE.value} ranks, {rate}, {num_rows} rows at most, {epochs} epochs"


def _accuracy(found: _Found, key: _Key) -> float:
    """Returns the accuracy of a training, or nan if the training has failed or is missing."""
    of_ranks = found.get(key)
    return of_ranks[0].accuracy if of_ranks else np.nan


def _accuracies(found: _Found, setting: Setting, kind: str) -> np.ndarray:
    return np.array([_accuracy(found, (setting, kind, seed)) for seed in _seeds()])


def _points(found: _Found, setting: Setting, kind: str) -> np.ndarray:
    """Returns the points above synchronous training of the same seeds."""
    return 100 * (_accuracies(found, setting, kind) - _accuracies(found, setting, SYNCHRONOUS))


def _seeds() -> list[int]:
    return list(map(int, _SEEDS.value))


def _run_accuracy() -> None:
    found: _Found = {}
    settings, kinds = _settings(_TASKS.value, _RANKS.value), _kinds(_KINDS_USED.value or _KINDS)
    for setting in settings:
        print(f"\naccuracy: {_title(setting)}")
        print(f"  {'':24} {'mean':>8} {'points':>8} {'std. error':>11} {'seconds':>8}  of each seed", flush=True)
        for kind in kinds:
            for seed in _seeds():
                found[setting, kind, seed] = _train(setting, kind, seed, ranks.LOOPBACK, None)
            _print_accuracy(found, setting, kind)


def _kinds(labels: Sequence[str]) -> list[str]:
    """Returns each label once. The reference for all others is the first."""
    return sorted(dict.fromkeys(labels), key=lambda label: label != SYNCHRONOUS)


def _print_accuracy(found: _Found, setting: Setting, kind: str) -> None:
    accuracies, points = _accuracies(found, setting, kind), _points(found, setting, kind)
    all_seconds = [_first(found, setting, kind, seed).seconds for seed in _seeds()]
    of_seeds = " ".join(f"{each:.4f}" for each in accuracies)
    print(
        f"  {kind:24} {np.mean(accuracies):8.4f} {np.mean(points):+8.2f} {results.standard_error(points):11.2f} "
        f"{np.mean(all_seconds):8.1f}  {of_seeds}",
        flush=True,
    )
    steps = [_first(found, setting, kind, seed).steps for seed in _seeds()]
    noted = {"accuracy": accuracies, "points": points, "seconds": all_seconds, "steps": steps}
    for quantity, values in noted.items():
        results.note(quantity, f"{setting}, {kind}", values)


def _first(found: _Found, setting: Setting, kind: str, seed: int) -> Trained:
    """Returns the result of rank 0."""
    of_ranks = found[setting, kind, seed]
    return of_ranks[0] if of_ranks else _FAILED


def _run_time() -> None:
    reason = network.available()
    if _LINK.value != ranks.LOOPBACK and reason is not None:
        print(f"\ntime: left out, as it needs an emulated network ({reason})")
        return
    found: _Found = {}
    tasks = [name for name in _TASKS.value if delay_tasks.TASKS[name].has_peers]
    settings, kinds = _settings(tasks, _RANKS.value), _kinds_of_time()
    for setting in settings:
        print(f"\ntime: {_title(setting)}, link: {_LINK.value}")
        titles = f"{'step ms':>8} {'s in all':>9} {'accuracy':>9} {'s to it':>8} {'std. error':>11} {'times':>6}"
        print(f"  {'':24} {titles}  of each seed", flush=True)
        for kind in kinds:
            for seed in _seeds():
                found[setting, kind, seed] = _train(setting, kind, seed, _LINK.value, _EVALUATE_EVERY.value)
            _print_time(found, setting, kind)


def _kinds_of_time() -> list[str]:
    """Returns the kinds with synchronous training, which sets the target, and only with installed libraries."""
    kinds = []
    for kind in _KINDS_USED.value or [*_KINDS, *delay_peers.KINDS]:
        package = delay_peers.package_of(kind)
        if package is None or peers.is_installed(package):
            kinds.append(kind)
        else:
            print(f"{kind} is left out: {package} is not installed.")
    return _kinds([SYNCHRONOUS, *kinds])


def _seconds_to_target(found: _Found, setting: Setting, kind: str) -> list[float]:
    """Returns the seconds for each seed: infinity if the target was not reached, nan if the training has failed."""
    all_seconds = []
    for seed in _seeds():
        target = _TARGET.value * _accuracy(found, (setting, SYNCHRONOUS, seed))
        trained = _first(found, setting, kind, seed)
        not_reached = np.nan if trained is _FAILED else np.inf
        all_seconds.append(next((seconds for seconds, accuracy in trained.reached if accuracy >= target), not_reached))
    return all_seconds


def _print_time(found: _Found, setting: Setting, kind: str) -> None:
    """Prints times. `times` is synchronous training's time to the target over that of this kind."""
    to_target = _seconds_to_target(found, setting, kind)
    of_synchronous = _seconds_to_target(found, setting, SYNCHRONOUS)
    firsts = [_first(found, setting, kind, seed) for seed in _seeds()]
    in_all = [first.seconds for first in firsts]
    step = np.mean([first.seconds / max(first.steps - 1, 1) for first in firsts])
    accuracies = [first.accuracy for first in firsts]
    print(
        f"  {kind:24} {1e3 * step:8.1f} {np.mean(in_all):9.1f} {np.mean(accuracies):9.4f} {np.mean(to_target):8.1f} "
        f"{results.standard_error(to_target):11.2f} {np.mean(of_synchronous) / np.mean(to_target):6.2f}  "
        + " ".join(f"{seconds:.1f}" for seconds in to_target),
        flush=True,
    )
    noted = {"seconds": in_all, "seconds to target": to_target, "accuracy": accuracies}
    for quantity, values in noted.items():
        results.note(quantity, f"{setting.task}, {setting.ranks}, {kind}", values)


_RUN: dict[str, Callable[[], None]] = {"accuracy": _run_accuracy, "time": _run_time}


def _check_flags() -> None:
    """Checks the flags before hours are spent."""
    allowed = {
        "experiments": _RUN,
        "tasks": delay_tasks.TASKS,
        "optimizers": delay_ranks.OPTIMIZERS,
        "ranks": delay_ranks.FACTORS,
        "shards": (delay_tasks.IDENTICAL, delay_tasks.SKEWED),
    }
    for name, values in allowed.items():
        unknown = {value.partition(":")[0] for value in flags.FLAGS[name].value} - set(values)
        if unknown:
            raise app.UsageError(f"--{name} must be among {', '.join(values)}. Received: {sorted(unknown)}.")
    has_rate = _LINK.value != ranks.LOOPBACK and "accuracy" not in _EXPERIMENTS.value
    if not has_rate and any(text.startswith("link") for text in _RANKS.value):
        raise app.UsageError("--ranks=link needs --experiments=time, and a --link in bits per second.")
    if _BATCH_SIZE.value % _WORLD_SIZE.value:
        raise app.UsageError(
            f"--batch_size must be a multiple of --world_size={_WORLD_SIZE.value}. Received: {_BATCH_SIZE.value}."
        )
    for kind in _KINDS_USED.value or ():
        if delay_peers.package_of(kind) and "accuracy" not in _EXPERIMENTS.value:
            continue
        try:
            delay_ranks.parse_kind(kind)
        except ValueError as error:
            raise app.UsageError(str(error)) from error


def main(argv: list[str]) -> None:
    """Runs the requested experiments."""
    if len(argv) > 1:
        raise app.UsageError(f"Unknown arguments: {argv[1:]}.")
    _check_flags()
    for name in _EXPERIMENTS.value:
        _RUN[name]()
    if _failures:
        sys.exit(f"These trainings have failed: {', '.join(_failures)}.")


if __name__ == "__main__":
    ranks.serve(_serve)
    app.run(main)

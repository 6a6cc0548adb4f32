"""Measures a training step under each strategy with its defaults, beside plain Keras and other libraries.

    python benchmarks/benchmark_step.py

All cases run in turns, `--rounds` times each: ranks are processes of this machine, each with `fit` of its own on the
same batch again and again. Shown are medians over the rounds, of rank 0:

- step: the median time of a step;
- processor: the processor time of a process for a step, which hardly depends on other work and on the number of cores;
- added: the processor time above that of the same library in one process without a strategy, which trains the batch of
  one rank;
- switches: how often a thread of the process gives up its core, or loses it, in a step;
- bytes: what a rank sends in a step, with the headers of TCP and IP (of all that crosses its interface; on loopback,
  which all have in common, its part of that);
- threads of the process;
- first: the time until the first step has ended, without imports. Most of it goes into tracing.

Peers are PyTorch's DistributedDataParallel over gloo (`torch`) and MultiWorkerMirroredStrategy (`tf_keras`), where
these packages are installed. Libraries alone run in one process. `--against` names another checkout of hop_tf, with its
kernels built: its strategies run in turns with those of this one, which shows what a change costs.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import peers
import psutil
import ranks
import results
import tensorflow as tf
import turns
from absl import app, flags

KERAS, TORCH, DDP, TF_KERAS, MIRRORED = "keras", "torch", "ddp", "tf_keras", "mirrored"
_PLAIN = "codec=None, algorithm='mesh'"
_STRATEGIES = {
    "pipe_sgd": "PipeSGDStrategy()",
    "pipe_sgd_k1": f"PipeSGDStrategy(pipeline_width=1, {_PLAIN})",
    "pipe_sgd_k1_continue": f"PipeSGDStrategy(pipeline_width=1, on_peer_loss='continue', {_PLAIN})",
    "pipe_sgd_k2": f"PipeSGDStrategy(pipeline_width=2, {_PLAIN})",
    "dts": "DTSStrategy()",
    "dts_4_4": f"DTSStrategy(delay=4, interval=4, {_PLAIN})",
    "hop": "HopStrategy()",
    "canary": "CanaryStrategy()",
    "shat": "SHATParameterServerStrategy()",  # A further process is the server.
}
# By what is distributed: the same without.
_ALONE = {**dict.fromkeys(_STRATEGIES, KERAS), DDP: TORCH, MIRRORED: TF_KERAS}
_PACKAGES = {TORCH: "torch", DDP: "torch", TF_KERAS: "tf_keras", MIRRORED: "tf_keras"}
_KINDS = [KERAS, *_STRATEGIES, TORCH, DDP, TF_KERAS, MIRRORED]
_PERCEPTRON, _DEEP, _WIDE = "perceptron", "deep", "wide"
_ROWS = {_PERCEPTRON: 48, _DEEP: 16, _WIDE: 4096}  # Of a rank.
_SHAPES = {_PERCEPTRON: (784,), _DEEP: (8, 8, 3), _WIDE: (2048,)}
_NUM_BLOCKS, _NUM_FILTERS = 50, 32
_NUM_UNITS, _NUM_REPEATS = 4096, 16
_NUM_CLASSES = 10

_CHOSEN = flags.DEFINE_list("kinds", _KINDS, f"Which ones: {', '.join(_KINDS)}.")
_MODELS = flags.DEFINE_list(
    "models",
    [_PERCEPTRON, _DEEP],
    "perceptron (2 MB), deep (152 small variables), wide (101 MB, and computation for a GPU; without peers).",
)
_WORLDS = flags.DEFINE_list("worlds", ["1", "2", "4"], "Numbers of ranks.")
_LINK = flags.DEFINE_string("link", ranks.LOOPBACK, "loopback, or the rate of each host's link in bits per second.")
_ROUNDS = flags.DEFINE_integer("rounds", 3, "How often each case runs.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 300, "Steps that are measured.", lower_bound=10)
_AGAINST = flags.DEFINE_string("against", None, "Another checkout of hop_tf to measure in turns with this one.")


class Clock:
    """Notes the ends of steps. The cost is without `warmup` steps. `num_sharing` ranks have the same interface."""

    def __init__(self, num_sharing: int, warmup: int):
        self._num_sharing = num_sharing
        self._warmup = warmup
        self._times = [time.perf_counter()]
        self._begin: np.ndarray | None = None

    def step(self) -> None:
        self._times.append(time.perf_counter())
        if len(self._times) == self._warmup + 1:
            self._begin = _used()

    def cost(self) -> dict[str, float]:
        """Returns the columns in the module's docstring. Call this right after the last step."""
        times = self._times[self._warmup :]
        processor, switches, sent = (_used() - self._begin) / (len(times) - 1)
        return {
            "step_ms": 1e3 * statistics.median(np.diff(times)),
            "processor_ms": 1e3 * processor,
            "switches": switches,
            "kB": sent / self._num_sharing / 1e3,
            "threads": psutil.Process().num_threads(),
            "first_seconds": self._times[1] - self._times[0],
        }


def _used() -> np.ndarray:
    """Returns processor seconds, context switches, and bytes sent by all interfaces."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return np.array([time.process_time(), usage.ru_nvcsw + usage.ru_nivcsw, psutil.net_io_counters().bytes_sent])


# In the processes of the ranks.


def _measure(case: Mapping, rank: int) -> dict[str, float] | None:
    """Returns the cost at a rank; None for a server."""
    clock = Clock(case["num_sharing"], case["warmup"])
    train = _train_torch if case["kind"] in (TORCH, DDP) else _train_keras
    return clock.cost() if train(case, rank, *case["addresses"], clock) else None


def _batch(case: Mapping, rank: int, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(rank)
    x = rng.normal(size=(num_rows, *_SHAPES[case["model"]])).astype("float32")
    return x, rng.integers(0, _NUM_CLASSES, num_rows)


def _train_keras(case: Mapping, rank: int, addresses: Sequence[str], clock: Clock) -> bool:
    """Trains with Keras or tf_keras. Returns False for a server, when it has served."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    library, strategy = _library_and_strategy(case, rank, addresses)
    if strategy is None:
        return False
    with strategy.scope():
        model = _keras_model(library, case["model"])
        optimizers = library.optimizers
        optimizer = optimizers.AdamW(1e-3) if case["model"] == _DEEP else optimizers.SGD(0.01, momentum=0.9)
        model.compile(optimizer, library.losses.SparseCategoricalCrossentropy(from_logits=True))
    rows = tf.data.Dataset.from_tensors(_batch(case, rank, _ROWS[case["model"]] * strategy.num_replicas_in_sync))
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    note = library.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: clock.step())
    num_steps = case["warmup"] + case["steps"]
    model.fit(rows.repeat().with_options(options), steps_per_epoch=num_steps, epochs=1, verbose=0, callbacks=[note])
    if case["num_servers"]:
        strategy.shutdown()
    return True


def _library_and_strategy(case: Mapping, rank: int, addresses: Sequence[str]) -> tuple[Any, Any]:
    """Returns Keras or tf_keras, and a strategy, which is made before TensorFlow has done anything."""
    kind = case["kind"]
    if kind in (TF_KERAS, MIRRORED):
        strategy = peers.mirrored_strategy(rank, addresses) if kind == MIRRORED else tf.distribute.get_strategy()
        import tf_keras

        return tf_keras, strategy
    if kind == KERAS:
        return keras, tf.distribute.get_strategy()
    return keras, turns.join(_STRATEGIES[kind], rank, addresses, case["num_workers"])


def _keras_model(library: Any, name: str) -> Any:
    layers, x = library.layers, library.Input(_SHAPES[name])
    if name == _PERCEPTRON:
        inner = [layers.Dense(512, activation="relu"), layers.Dense(256, activation="relu")]
    elif name == _WIDE:  # One layer many times: more computation for each byte that ranks exchange.
        first, repeated = (layers.Dense(_NUM_UNITS, activation="relu") for _ in range(2))
        inner = [first, *[repeated] * _NUM_REPEATS]
    else:
        inner = []
        for _ in range(_NUM_BLOCKS):
            inner += [layers.Conv2D(_NUM_FILTERS, 1, use_bias=False), layers.BatchNormalization(), layers.ReLU()]
        inner.append(layers.GlobalAveragePooling2D())
    inputs = x
    for layer in [*inner, layers.Dense(_NUM_CLASSES)]:
        x = layer(x)
    return library.Model(inputs, x)


def _train_torch(case: Mapping, rank: int, addresses: Sequence[str], clock: Clock) -> bool:
    import torch

    if case["kind"] == DDP:
        peers.join_gloo(rank, addresses)
    torch.set_num_threads(1)
    is_deep = case["model"] == _DEEP
    model = _deep_in_torch(torch) if is_deep else peers.dense(torch, 784, 512, 256, _NUM_CLASSES)
    if case["kind"] == DDP:
        model = torch.nn.parallel.DistributedDataParallel(model)
    values = model.parameters()
    optimizer = torch.optim.AdamW(values, 1e-3) if is_deep else torch.optim.SGD(values, 0.01, momentum=0.9)
    x, y = map(torch.from_numpy, _batch(case, rank, _ROWS[case["model"]]))
    x = x.movedim(-1, 1).contiguous() if x.ndim > 2 else x
    peers.train_torch(model, optimizer, itertools.repeat((x, y), case["warmup"] + case["steps"]), clock.step)
    return True


def _deep_in_torch(torch: Any) -> Any:
    nn = torch.nn
    widths = [_SHAPES[_DEEP][-1], *[_NUM_FILTERS] * _NUM_BLOCKS]
    blocks = [
        nn.Sequential(nn.Conv2d(before, after, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU())
        for before, after in itertools.pairwise(widths)
    ]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(_NUM_FILTERS, _NUM_CLASSES))


# In the parent.


@dataclasses.dataclass(frozen=True)
class _Case:
    model: str
    world_size: int
    kind: str
    checkout: str | None = None  # None: this one.

    @property
    def name(self) -> str:
        kind = self.kind if self.checkout is None else f"{self.kind}, {pathlib.Path(self.checkout).name}"
        return f"{self.model} {kind} {self.world_size}"

    @property
    def alone(self) -> _Case:
        return _Case(self.model, 1, _ALONE.get(self.kind, self.kind))


def _cases() -> Iterator[_Case]:
    for model, kind in itertools.product(_MODELS.value, _CHOSEN.value):
        package = _PACKAGES.get(kind)
        if package is not None and (model == _WIDE or not peers.is_installed(package)):
            print(f"{kind} is left out of {model}, or the package `{package}` is not installed.")
            continue
        peers.preload(package)
        for world in map(int, _WORLDS.value) if kind in _ALONE else [1]:
            yield _Case(model, world, kind)
            if _AGAINST.value is not None and kind in _STRATEGIES:
                yield _Case(model, world, kind, _AGAINST.value)


def _run(case: _Case) -> dict[str, float]:
    if case.checkout is not None:
        return _run_elsewhere(case)
    link = _LINK.value if case.world_size > 1 else ranks.LOOPBACK
    num_servers = int(case.kind == "shat")
    arguments = {
        "model": case.model,
        "kind": case.kind,
        "num_workers": case.world_size,
        "num_servers": num_servers,
        "num_sharing": case.world_size if link == ranks.LOOPBACK else 1,
        "warmup": _STEPS.value // 5,
        "steps": _STEPS.value,
    }
    return ranks.run(_measure, arguments, case.world_size + num_servers, link, num_ports=1)[0]


def _run_elsewhere(case: _Case) -> dict[str, float]:
    """Runs this file with another checkout of hop_tf."""
    about = {"models": case.model, "kinds": case.kind, "worlds": case.world_size, "steps": _STEPS.value}
    with tempfile.TemporaryDirectory() as folder:
        about |= {"link": _LINK.value, "rounds": 1, "output": folder}
        command = [sys.executable, __file__, *(f"--{name}={value}" for name, value in about.items())]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([case.checkout, os.environ.get("PYTHONPATH", "")])}
        subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
        return {quantity: value for quantity, _, (value,) in results.kept(folder)}


def main(_: list[str]) -> None:
    costs = collections.defaultdict(lambda: collections.defaultdict(list))
    cases = list(_cases())
    for round_, case in itertools.product(range(_ROUNDS.value), cases):
        for name, value in _run(case).items():
            costs[case][name].append(value)
        print(f"round {round_ + 1}: {case.name}", flush=True)
    for case in cases:
        if case.alone in costs:
            both = (costs[each]["processor_ms"] for each in (case, case.alone))
            costs[case]["added_ms"] = np.subtract(*both)
        results.show(case.name, costs[case])


if __name__ == "__main__":
    app.run(main)

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
- first: the time until the first step has ended, most of which goes into tracing.

Peers are PyTorch's DistributedDataParallel over gloo (`torch`) and MultiWorkerMirroredStrategy (`tf_keras`), where
these packages are installed. `--against` names another checkout of hop_tf, with its kernels built: its strategies run
in turns with those of this one, which shows what a change costs.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import os
import pathlib
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import peers
import psutil
import ranks
import results
from absl import app, flags

KERAS, TORCH, DDP, TF_KERAS, MIRRORED = "keras", "torch", "ddp", "tf_keras", "mirrored"
_PLAIN = {"codec": None, "algorithm": "mesh"}
SHAT = "shat"  # A further process is the server.
_STRATEGIES: Mapping[str, Callable] = {
    "pipe_sgd": lambda hop_tf: hop_tf.PipeSGDStrategy(),
    "pipe_sgd_k1": lambda hop_tf: hop_tf.PipeSGDStrategy(pipeline_width=1, **_PLAIN),
    "pipe_sgd_k1_continue": lambda hop_tf: hop_tf.PipeSGDStrategy(pipeline_width=1, on_peer_loss="continue", **_PLAIN),
    "pipe_sgd_k2": lambda hop_tf: hop_tf.PipeSGDStrategy(pipeline_width=2, **_PLAIN),
    "dts": lambda hop_tf: hop_tf.DTSStrategy(),
    "dts_4_4": lambda hop_tf: hop_tf.DTSStrategy(delay=4, interval=4, **_PLAIN),
    "hop": lambda hop_tf: hop_tf.HopStrategy(),
    "canary": lambda hop_tf: hop_tf.CanaryStrategy(),
    SHAT: lambda hop_tf: hop_tf.SHATParameterServerStrategy(),
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


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of a step of rank 0. The fields are the columns in the module's docstring."""

    step_ms: float
    processor_ms: float
    switches: float
    kilobytes: float
    threads: float
    first_seconds: float


class Clock:
    """Notes the ends of steps. The cost is without `warmup` steps. `num_sharing` ranks have the same interface."""

    def __init__(self, num_sharing: int, warmup: int):
        self._num_sharing = num_sharing
        self._warmup = warmup
        self._times = [time.perf_counter()]
        self._begin: tuple[float, int, int] | None = None

    def step(self) -> None:
        self._times.append(time.perf_counter())
        if len(self._times) == self._warmup + 1:
            self._begin = _used()

    def cost(self) -> Cost:
        """Returns the cost. Call this right after the last step."""
        times = self._times[self._warmup :]
        num_steps = len(times) - 1
        processor, switches, sent = (now - then for now, then in zip(_used(), self._begin, strict=True))
        return Cost(
            step_ms=1e3 * statistics.median(later - earlier for earlier, later in itertools.pairwise(times)),
            processor_ms=1e3 * processor / num_steps,
            switches=switches / num_steps,
            kilobytes=sent / num_steps / self._num_sharing / 1e3,
            threads=psutil.Process().num_threads(),
            first_seconds=self._times[1] - self._times[0],
        )


def _used() -> tuple[float, int, int]:
    """Returns processor seconds, context switches, and bytes sent by all interfaces."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return time.process_time(), usage.ru_nvcsw + usage.ru_nivcsw, psutil.net_io_counters().bytes_sent


# In the processes of the ranks.


def _measure(case: Mapping, rank: int) -> Cost | None:
    """Returns the cost at a rank; None for a server."""
    (addresses,) = case["addresses"]
    clock = Clock(case["num_sharing"], case["warmup"])
    if case["kind"] in (TORCH, DDP):
        _train_torch(case, rank, addresses, clock)
    else:
        _train_keras(case, rank, addresses, clock)
    return clock.cost() if rank < case["num_workers"] else None


def _batch(case: Mapping, rank: int, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(rank)
    x = rng.normal(size=(num_rows, *_SHAPES[case["model"]])).astype("float32")
    return x, rng.integers(0, _NUM_CLASSES, num_rows)


def _train_keras(case: Mapping, rank: int, addresses: Sequence[str], clock: Clock) -> None:
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    try:
        keras, strategy = _library_and_strategy(case, rank, addresses)
    except SystemExit:  # A server has served.
        return
    with strategy.scope():
        model = _keras_model(keras, case["model"])
        model.compile(_optimizer(keras, case["model"]), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    rows = tf.data.Dataset.from_tensors(_batch(case, rank, _ROWS[case["model"]] * strategy.num_replicas_in_sync))
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: clock.step())
    num_steps = case["warmup"] + case["steps"]
    model.fit(rows.repeat().with_options(options), steps_per_epoch=num_steps, epochs=1, verbose=0, callbacks=[note])
    if case["kind"] == SHAT:
        strategy.shutdown()


def _library_and_strategy(case: Mapping, rank: int, addresses: Sequence[str]) -> tuple[Any, Any]:
    """Returns Keras or tf_keras, and a strategy, which is made before TensorFlow has done anything."""
    import tensorflow as tf

    kind, num_workers = case["kind"], case["num_workers"]
    if kind in (TF_KERAS, MIRRORED):
        strategy = peers.mirrored_strategy(rank, addresses) if kind == MIRRORED else tf.distribute.get_strategy()
        import tf_keras

        return tf_keras, strategy
    import keras

    if kind == KERAS:
        return keras, tf.distribute.get_strategy()
    import hop_tf

    peers.set_cluster(rank, addresses[:num_workers], addresses[num_workers:])
    return keras, _STRATEGIES[kind](hop_tf)


def _keras_model(keras: Any, name: str) -> Any:
    layers = keras.layers
    if name == _WIDE:
        return _wide_model(keras)
    inner = [layers.Dense(512, activation="relu"), layers.Dense(256, activation="relu")]
    if name == _DEEP:
        block = lambda: [  # noqa: E731
            layers.Conv2D(_NUM_FILTERS, 1, use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(),
        ]
        inner = [layer for _ in range(_NUM_BLOCKS) for layer in block()] + [layers.GlobalAveragePooling2D()]
    return keras.Sequential([keras.Input(_SHAPES[name]), *inner, layers.Dense(_NUM_CLASSES)])


def _wide_model(keras: Any) -> Any:
    """Returns a model that applies one layer many times: more computation for each byte that ranks exchange."""
    x = inputs = keras.Input(_SHAPES[_WIDE])
    x = keras.layers.Dense(_NUM_UNITS, activation="relu")(x)
    repeated = keras.layers.Dense(_NUM_UNITS, activation="relu")
    for _ in range(_NUM_REPEATS):
        x = repeated(x)
    return keras.Model(inputs, keras.layers.Dense(_NUM_CLASSES)(x))


def _optimizer(keras: Any, model: str) -> Any:
    return keras.optimizers.AdamW(1e-3) if model == _DEEP else keras.optimizers.SGD(0.01, momentum=0.9)


def _train_torch(case: Mapping, rank: int, addresses: Sequence[str], clock: Clock) -> None:
    import torch

    if case["kind"] == DDP:
        peers.join_gloo(rank, addresses)
    torch.set_num_threads(1)
    model = _torch_model(torch, case["model"])
    if case["kind"] == DDP:
        model = torch.nn.parallel.DistributedDataParallel(model)
    if case["model"] == _PERCEPTRON:
        optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    loss_of = torch.nn.CrossEntropyLoss()
    x, y = map(torch.from_numpy, _batch(case, rank, _ROWS[case["model"]]))
    x = x.movedim(-1, 1).contiguous() if x.ndim > 2 else x
    for _ in range(case["warmup"] + case["steps"]):
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()
        clock.step()


def _torch_model(torch: Any, name: str) -> Any:
    nn = torch.nn
    if name == _PERCEPTRON:
        return nn.Sequential(
            *(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, _NUM_CLASSES))
        )
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
        return self.kind if self.checkout is None else f"{self.kind}, {pathlib.Path(self.checkout).name}"

    @property
    def alone(self) -> _Case:
        return _Case(self.model, 1, _ALONE.get(self.kind, self.kind))


def _cases() -> Iterator[_Case]:
    for model, world in itertools.product(_MODELS.value, map(int, _WORLDS.value)):
        for kind in _CHOSEN.value:
            if kind in _PACKAGES and model == _WIDE:
                continue
            if kind in _PACKAGES and not peers.is_installed(_PACKAGES[kind]):
                print(f"{kind}: the package `{_PACKAGES[kind]}` is not installed.")
            elif kind in _ALONE or world == 1:
                yield _Case(model, world, kind)
                if _AGAINST.value is not None and kind in _STRATEGIES:
                    yield _Case(model, world, kind, _AGAINST.value)


def _run(case: _Case) -> Cost:
    path = filter(None, (case.checkout, os.environ.get("PYTHONPATH")))
    environment = {"PYTHONPATH": os.pathsep.join(path)} if case.checkout is not None else {}
    if case.kind in (TF_KERAS, MIRRORED):
        environment["TF_USE_LEGACY_KERAS"] = "1"
    link = _LINK.value if case.world_size > 1 else ranks.LOOPBACK
    arguments = {
        "model": case.model,
        "kind": case.kind,
        "num_workers": case.world_size,
        "num_sharing": case.world_size if link == ranks.LOOPBACK else 1,
        "warmup": _STEPS.value // 5,
        "steps": _STEPS.value,
    }
    num_processes = case.world_size + (case.kind == SHAT)
    return ranks.run(__file__, arguments, num_processes, link, num_ports=1, environment=environment)[0]


def _median(costs: Sequence[Cost]) -> Cost:
    return Cost(*(statistics.median(column) for column in zip(*map(dataclasses.astuple, costs), strict=True)))


def main(argv: Sequence[str]) -> None:
    del argv  # Unused.
    costs = collections.defaultdict(list)
    cases = list(_cases())
    for round_, case in itertools.product(range(_ROUNDS.value), cases):
        costs[case].append(_run(case))
        print(f"round {round_ + 1}: {case.model}, {case.world_size}, {case.name}: {costs[case][-1]}", flush=True)
    titles = ["model", "ranks", "kind", "step ms", "processor ms", "added ms", "switches", "kB", "threads", "first s"]
    print("".join(f"{title:>13}" for title in titles))
    for case in cases:
        cost = _median(costs[case])
        added = cost.processor_ms - _median(costs[case.alone]).processor_ms if case.alone in costs else float("nan")
        step, processor, *rest = dataclasses.astuple(cost)
        values = [f"{value:.2f}" for value in (step, processor, added, *rest)]
        print("".join(f"{value:>13}" for value in [case.model, case.world_size, case.name, *values]), flush=True)
        for name in ("step_ms", "processor_ms", "first_seconds", "threads"):
            of_rounds = [getattr(each, name) for each in costs[case]]
            results.note(name, f"{case.model} {case.name} {case.world_size}", of_rounds)


if __name__ == "__main__":
    ranks.serve(_measure)
    app.run(main)

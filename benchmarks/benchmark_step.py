"""Measures a step of a perceptron (2 MB) under each strategy, beside plain Keras and other libraries.

    python benchmarks/benchmark_step.py

All cases run in turns, `--rounds` times each: ranks are processes of this machine, each with `fit` of its own on the
same batch again and again. Shown are medians over the rounds, of rank 0:

- step: the median time of a step;
- processor: the processor time of a process for a step, which hardly depends on other work and on the number of cores;
- added: the processor time above that of the same library in one process without a strategy, which trains the batch of
  one rank;
- threads of the process;
- first: the time until the first step has ended, most of which goes into tracing.

Peers are PyTorch's DistributedDataParallel over gloo (`torch`) and MultiWorkerMirroredStrategy (`tf_keras`), where
these packages are installed.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
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
    "pipe_sgd_k1": lambda hop_tf: hop_tf.PipeSGDStrategy(pipeline_width=1, **_PLAIN),
    "dts_4_4": lambda hop_tf: hop_tf.DTSStrategy(delay=4, interval=4, **_PLAIN),
    "hop": lambda hop_tf: hop_tf.HopStrategy(),
    "canary": lambda hop_tf: hop_tf.CanaryStrategy(),
    SHAT: lambda hop_tf: hop_tf.SHATParameterServerStrategy(),
}
# By what is distributed: the same without.
_ALONE = {**dict.fromkeys(_STRATEGIES, KERAS), DDP: TORCH, MIRRORED: TF_KERAS}
_PACKAGES = {TORCH: "torch", DDP: "torch", TF_KERAS: "tf_keras", MIRRORED: "tf_keras"}
_KINDS = [KERAS, *_STRATEGIES, TORCH, DDP, TF_KERAS, MIRRORED]
_NUM_ROWS = 48  # Of a rank.
_SIZES = 784, 512, 256, 10  # Of the perceptron.

_CHOSEN = flags.DEFINE_list("kinds", _KINDS, f"Which ones: {', '.join(_KINDS)}.")
_WORLDS = flags.DEFINE_list("worlds", ["1", "2"], "Numbers of ranks.")
_LINK = flags.DEFINE_string("link", ranks.LOOPBACK, "loopback, or the rate of each host's link in bits per second.")
_ROUNDS = flags.DEFINE_integer("rounds", 3, "How often each case runs.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 300, "Steps that are measured.", lower_bound=10)


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of a step of rank 0. The fields are the columns in the module's docstring."""

    step_ms: float
    processor_ms: float
    threads: float
    first_seconds: float


class Clock:
    """Notes the ends of steps. The cost is without `warmup` steps."""

    def __init__(self, warmup: int):
        self._warmup = warmup
        self._times = [time.perf_counter()]
        self._begin = 0.0

    def step(self) -> None:
        self._times.append(time.perf_counter())
        if len(self._times) == self._warmup + 1:
            self._begin = time.process_time()

    def cost(self) -> Cost:
        """Returns the cost. Call this right after the last step."""
        times = self._times[self._warmup :]
        return Cost(
            step_ms=1e3 * statistics.median(np.diff(times)),
            processor_ms=1e3 * (time.process_time() - self._begin) / (len(times) - 1),
            threads=psutil.Process().num_threads(),
            first_seconds=self._times[1] - self._times[0],
        )


# In the processes of the ranks.


def _measure(case: Mapping, rank: int) -> Cost | None:
    """Returns the cost at a rank; None for a server."""
    (addresses,) = case["addresses"]
    clock = Clock(case["warmup"])
    if case["kind"] in (TORCH, DDP):
        _train_torch(case, rank, addresses, clock)
    else:
        _train_keras(case, rank, addresses, clock)
    return clock.cost() if rank < case["num_workers"] else None


def _batch(rank: int, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(rank)
    return rng.normal(size=(num_rows, _SIZES[0])).astype("float32"), rng.integers(0, _SIZES[-1], num_rows)


def _train_keras(case: Mapping, rank: int, addresses: Sequence[str], clock: Clock) -> None:
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    try:
        keras, strategy = _library_and_strategy(case, rank, addresses)
    except SystemExit:  # A server has served.
        return
    with strategy.scope():
        hidden = [keras.layers.Dense(size, activation="relu") for size in _SIZES[1:-1]]
        model = keras.Sequential([keras.Input(_SIZES[:1]), *hidden, keras.layers.Dense(_SIZES[-1])])
        optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    rows = tf.data.Dataset.from_tensors(_batch(rank, _NUM_ROWS * strategy.num_replicas_in_sync))
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


def _train_torch(case: Mapping, rank: int, addresses: Sequence[str], clock: Clock) -> None:
    import torch

    if case["kind"] == DDP:
        peers.join_gloo(rank, addresses)
    torch.set_num_threads(1)
    nn = torch.nn
    layers = [layer for sizes in itertools.pairwise(_SIZES) for layer in (nn.Linear(*sizes), nn.ReLU())]
    model = nn.Sequential(*layers[:-1])
    if case["kind"] == DDP:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    loss_of = nn.CrossEntropyLoss()
    x, y = map(torch.from_numpy, _batch(rank, _NUM_ROWS))
    for _ in range(case["warmup"] + case["steps"]):
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()
        clock.step()


# In the parent.


def _cases() -> Iterator[tuple[int, str]]:
    """Yields numbers of ranks, and kinds."""
    for world, kind in itertools.product(map(int, _WORLDS.value), _CHOSEN.value):
        if kind in _PACKAGES and not peers.is_installed(_PACKAGES[kind]):
            print(f"{kind}: the package `{_PACKAGES[kind]}` is not installed.")
        elif kind in _ALONE or world == 1:
            yield world, kind


def _run(world: int, kind: str) -> Cost:
    link = _LINK.value if world > 1 else ranks.LOOPBACK
    case = {"kind": kind, "num_workers": world, "warmup": _STEPS.value // 5, "steps": _STEPS.value}
    environment = {"TF_USE_LEGACY_KERAS": "1"} if kind in (TF_KERAS, MIRRORED) else {}
    return ranks.run(__file__, case, world + (kind == SHAT), link, num_ports=1, environment=environment)[0]


def _median(costs: Sequence[Cost]) -> Cost:
    return Cost(*(statistics.median(column) for column in zip(*map(dataclasses.astuple, costs), strict=True)))


def main(argv: Sequence[str]) -> None:
    del argv  # Unused.
    costs = collections.defaultdict(list)
    cases = list(_cases())
    for round_, case in itertools.product(range(_ROUNDS.value), cases):
        costs[case].append(_run(*case))
        print(f"round {round_ + 1}: {case}: {costs[case][-1]}", flush=True)
    titles = ["ranks", "kind", "step ms", "processor ms", "added ms", "threads", "first s"]
    print("".join(f"{title:>13}" for title in titles))
    for world, kind in cases:
        cost, alone = _median(costs[world, kind]), costs.get((1, _ALONE.get(kind, kind)))
        added = cost.processor_ms - _median(alone).processor_ms if alone else float("nan")
        step, processor, *rest = dataclasses.astuple(cost)
        values = [f"{value:.2f}" for value in (step, processor, added, *rest)]
        print("".join(f"{value:>13}" for value in [world, kind, *values]), flush=True)
        for field in dataclasses.fields(Cost):
            of_rounds = [getattr(each, field.name) for each in costs[world, kind]]
            results.note(field.name, f"perceptron {kind} {world}", of_rounds)


if __name__ == "__main__":
    ranks.serve(_measure)
    app.run(main)

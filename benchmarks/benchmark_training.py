"""Whole training with `fit`: hop_tf's synchronous strategies beside MultiWorkerMirroredStrategy under tf_keras.

    python benchmarks/benchmark_training.py --world_sizes=2,4 --links=loopback,1e9

The same multi-layer perceptron (784-500-500-10 by default) with the same global batches. Keras 3 has no
MultiWorkerMirroredStrategy any more: it trains under tf_keras (the package `tf_keras`, which has to be installed), with
CommunicationImplementation.RING. Ways to train take turns in every round; a figure is the median of all rounds' median
steps, at the slowest rank. Ranks are processes, on loopback or on hosts of an emulated network (which needs root).
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping

import numpy as np
import peers
import ranks
import tensorflow as tf
from absl import app, flags

_WORLD_SIZES = flags.DEFINE_list("world_sizes", ["2", "4"], "Numbers of ranks.")
_LINKS = flags.DEFINE_list("links", ["loopback", "1e9"], "loopback, or bits per second.")
_WIDTH = flags.DEFINE_integer("width", 500, "Units of each of the two hidden layers.", lower_bound=1)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 100, "Samples of a step, of all ranks together.", lower_bound=1)
_NUM_STEPS = flags.DEFINE_integer("num_steps", 50, "Steps of a round.", lower_bound=2)
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Rounds, after one to warm up.", lower_bound=1)

_MIRRORED = "MultiWorkerMirroredStrategy"
_OURS = {
    "without arguments": {},
    "D-Sync": {"pipeline_width": 1, "codec": None, "algorithm": "mesh"},
    "Pipe-SGD": {"pipeline_width": 2, "codec": None, "algorithm": "mesh"},
    "Pipe-SGD int8": {"pipeline_width": 2, "codec": "int8", "algorithm": "mesh"},
}


# In each rank.


def _measure(case: Mapping, rank: int) -> dict[str, list[float]]:
    """Returns the seconds of a step, in each round, for each way to train."""
    addresses = iter(case["addresses"])
    ways: dict[str, Callable[[], float]] = {}
    if case["mirrored"]:  # Must be made before TensorFlow has done anything.
        ways[_MIRRORED] = _mirrored(case, rank, next(addresses))
    for name, settings in _OURS.items():
        ways[name] = lambda settings=settings: _train_ours(case, rank, next(addresses), settings)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(case["rounds"] + 1):
        for name, train in ways.items():
            seconds[name].append(train())
    return {name: each[1:] for name, each in seconds.items()}


def _mirrored(case: Mapping, rank: int, workers: list[str]) -> Callable[[], float]:
    import tf_keras

    strategy = peers.mirrored_strategy(rank, workers)
    with strategy.scope():
        model = _perceptron(tf_keras, case["width"])
    return lambda: _step_seconds(tf_keras, model, case)


def _train_ours(case: Mapping, rank: int, workers: list[str], settings: Mapping) -> float:
    """Times one round of a strategy, made anew and traced before, because a process uses one strategy at a time."""
    import keras

    import hop_tf

    peers.set_cluster(rank, workers)
    strategy = hop_tf.PipeSGDStrategy(**settings)
    with strategy.scope():
        model = _perceptron(keras, case["width"])
    seconds = _step_seconds(keras, model, case)
    strategy.shutdown()
    return seconds


def _perceptron(keras, width: int):
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((784,)),
            layers.Dense(width, activation="relu"),
            layers.Dense(width, activation="relu"),
            layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(keras.optimizers.SGD(0.01), "sparse_categorical_crossentropy")
    return model


def _step_seconds(keras, model, case: Mapping) -> float:
    """Returns the median time between the ends of steps, without the first half, which traces and fills pipes."""
    random = np.random.default_rng(0)
    num_samples = case["num_steps"] * case["batch_size"]
    x = random.normal(size=(num_samples, 784)).astype(np.float32)
    y = random.integers(0, 10, num_samples)
    ends: list[float] = []
    record = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: ends.append(time.monotonic()))
    model.fit(
        tf.data.Dataset.from_tensor_slices((x, y)).batch(case["batch_size"]), epochs=1, verbose=0, callbacks=[record]
    )
    return statistics.median(np.diff(ends)[len(ends) // 2 :])


# In the parent.


def main(argv) -> None:
    del argv
    has_mirrored = peers.is_installed("tf_keras")
    if not has_mirrored:
        print(f"{_MIRRORED} is left out: tf_keras is not installed.")
    for link, world_size in itertools.product(_LINKS.value, map(int, _WORLD_SIZES.value)):
        case = {
            "mirrored": has_mirrored,
            "rounds": _ROUNDS.value,
            "num_steps": _NUM_STEPS.value,
            "batch_size": _BATCH_SIZE.value,
            "width": _WIDTH.value,
        }
        num_ports = 1 + len(_OURS) * (_ROUNDS.value + 1)
        _print(link, world_size, ranks.run(__file__, case, world_size, link, num_ports=num_ports))


def _print(link: str, world_size: int, results: list[Mapping[str, list[float]]]) -> None:
    medians = {
        name: statistics.median(map(max, zip(*(result[name] for result in results), strict=True)))
        for name in results[0]
    }
    print(f"\n{link}, {world_size} ranks, {_WIDTH.value} units")
    print(f"  {'':28s} {'step ms':>8s} {'mirrored / it':>14s}")
    for name, seconds in medians.items():
        ratio = f"{medians[_MIRRORED] / seconds:14.2f}" if _MIRRORED in medians else ""
        print(f"  {name:28s} {seconds * 1e3:8.2f} {ratio}", flush=True)


if __name__ == "__main__":
    ranks.serve(_measure)
    app.run(main)

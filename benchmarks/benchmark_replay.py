"""What the replay of Pipe-SGD costs: time of a step, and memory, beside the same pipeline without compensation.

    python benchmarks/benchmark_replay.py

time     Two ranks train a perceptron, really computed; all settings in turn, round after round, in the same processes.
         Milliseconds per step (medians over the rounds), and of an update of the optimizer by itself, in a tf.function
         of its own, in the same rounds. A replay makes K - 1 updates more than the pipeline without it: the ratio is
         that of its step to the other one's with so many updates added.
memory   Each setting in processes of its own: the highest resident memory of a rank, above that of K = 1, in copies of
         the weights. A replay should take K - 1 gradients, and one copy of the weights and of the optimizer's slots.
"""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Mapping

import keras
import numpy as np
import peers
import ranks
import tensorflow as tf
from absl import app, flags

import hop_tf

_EXPERIMENTS = flags.DEFINE_list("experiments", ["time", "memory"], "What to run.")
_WIDTHS = flags.DEFINE_list("pipeline_widths", ["2", "3", "4"], "K.")
_OPTIMIZERS = flags.DEFINE_list("optimizers", ["momentum", "adam"], "momentum, adam.")
_UNITS = flags.DEFINE_integer("units", 1024, "Of each of two hidden layers.", lower_bound=1)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 256, "Of a rank.", lower_bound=1)
_NUM_STEPS = flags.DEFINE_integer("num_steps", 20, "Of a round.", lower_bound=6)
_NUM_ROUNDS = flags.DEFINE_integer("num_rounds", 7, "Rounds.", lower_bound=1)

_WORLD_SIZE = 2
_NUM_FEATURES = 784
_SKIPPED_STEPS = 4  # At the begin of each round: the pipe fills.
_MAKE_OPTIMIZER = {
    "momentum": lambda: keras.optimizers.SGD(0.01, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(1e-3),
}


# In each rank.


class _Training:
    """A model under one setting."""

    def __init__(self, case: Mapping, rank: int, turn: int):
        peers.set_cluster(rank, case["addresses"][turn])
        self._batch_size, self._num_steps = case["batch_size"], case["num_steps"]
        with hop_tf.PipeSGDStrategy(**case["settings"][turn]).scope():
            hidden = [keras.layers.Dense(case["units"], activation="relu") for _ in range(2)]
            self.model = keras.Sequential([keras.Input((_NUM_FEATURES,)), *hidden, keras.layers.Dense(10)])
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            self.model.compile(_MAKE_OPTIMIZER[case["optimizer"]](), loss)
        num_rows = self._num_steps * self._batch_size * _WORLD_SIZE
        self._x = np.random.default_rng(rank).normal(size=(num_rows, _NUM_FEATURES)).astype(np.float32)
        self._y = np.arange(num_rows) % 10

    def seconds_of_steps(self) -> list[float]:
        """Trains for a round."""
        ends: list[float] = []
        note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: ends.append(time.perf_counter()))
        batch_size = self._batch_size * _WORLD_SIZE
        self.model.fit(self._x, self._y, batch_size=batch_size, verbose=0, callbacks=[note])
        return list(np.diff(ends)[_SKIPPED_STEPS:])


class _Update:
    """The optimizer's update of such a model, by itself."""

    def __init__(self, optimizer: str, model: keras.Model):
        self._variables = [tf.Variable(weight.value) for weight in model.trainable_weights]
        self._gradients = [tf.ones_like(variable) for variable in self._variables]
        optimizer = _MAKE_OPTIMIZER[optimizer]()
        optimizer.build(self._variables)
        self._apply = tf.function(lambda gradients: optimizer.apply(gradients, self._variables))
        self._apply(self._gradients)

    def seconds(self) -> float:
        """Of one update, in the mean of ten."""
        start = time.perf_counter()
        for _ in range(10):
            self._apply(self._gradients)
        return (time.perf_counter() - start) / 10


def _run_rank(case: Mapping, rank: int) -> Mapping:
    tf.config.threading.set_intra_op_parallelism_threads(1)
    trainings = [_Training(case, rank, turn) for turn in range(len(case["settings"]))]
    for training in trainings:
        training.seconds_of_steps()  # Compiles.
    update = _Update(case["optimizer"], trainings[0].model) if case["experiment"] == "time" else None
    steps: list[list[float]] = [[] for _ in trainings]
    updates: list[float] = []
    for _ in range(case["num_rounds"]):
        for times, training in zip(steps, trainings, strict=True):
            times.extend(training.seconds_of_steps())
        if update is not None:
            updates.append(update.seconds())
    return {
        "steps": [statistics.median(times) for times in steps],
        "update": statistics.median(updates) if updates else None,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "num_bytes": sum(weight.numpy().nbytes for weight in trainings[0].model.trainable_weights),
    }


# In the parent.


def _run(experiment: str, optimizer: str, settings: list[Mapping], num_rounds: int) -> list[Mapping]:
    case = {
        "experiment": experiment,
        "optimizer": optimizer,
        "settings": settings,
        "units": _UNITS.value,
        "batch_size": _BATCH_SIZE.value,
        "num_steps": _NUM_STEPS.value,
        "num_rounds": num_rounds,
    }
    return ranks.run(__file__, case, _WORLD_SIZE, ranks.LOOPBACK, num_ports=len(settings), timeout_seconds=3600)


def _settings(width: int, compensation: str) -> Mapping:
    return {"pipeline_width": width, "compensation": compensation}


def _print_times(optimizer: str) -> None:
    widths = [int(width) for width in _WIDTHS.value]
    settings = [_settings(width, each) for width in widths for each in ("none", "replay")]
    of_ranks = _run("time", optimizer, settings, _NUM_ROUNDS.value)
    steps = np.max([each["steps"] for each in of_ranks], axis=0).reshape(-1, 2)
    update = max(each["update"] for each in of_ranks)
    print(f"\ntime, {optimizer}: ms per step; an update by itself takes {update * 1e3:.2f} ms")
    print(f"  {'':6} {'none':>8} {'replay':>8} {'replay / (none + (K - 1) updates)':>34}")
    for width, (none, replay) in zip(widths, steps, strict=True):
        ratio = replay / (none + (width - 1) * update)
        print(f"  K = {width:<2} {none * 1e3:8.2f} {replay * 1e3:8.2f} {ratio:34.3f}", flush=True)


def _print_memory(optimizer: str) -> None:
    def peak(settings: Mapping) -> float:
        return max(each["peak_bytes"] / each["num_bytes"] for each in _run("memory", optimizer, [settings], 1))

    num_slots = {"momentum": 1, "adam": 2}[optimizer]
    print(f"\nmemory, {optimizer}: copies of the weights above those of the same pipeline without compensation")
    for width in map(int, _WIDTHS.value):
        more = peak(_settings(width, "replay")) - peak(_settings(width, "none"))
        print(f"  K = {width:<2} {more:6.2f}, expected {width - 1 + 1 + num_slots}", flush=True)


def main(argv) -> None:
    del argv
    for experiment, show in (("time", _print_times), ("memory", _print_memory)):
        for optimizer in _OPTIMIZERS.value if experiment in _EXPERIMENTS.value else []:
            show(optimizer)


if __name__ == "__main__":
    ranks.serve(_run_rank)
    app.run(main)

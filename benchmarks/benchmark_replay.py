"""Measures the cost of Pipe-SGD's replay, in step time and memory, against the same pipeline without compensation.

    python benchmarks/benchmark_replay.py

time     Two ranks train a perceptron, really computed; all settings in turn, round after round, in the same processes.
         Milliseconds per step (medians over the rounds). A replay makes K - 1 updates more than the pipeline without
         a replay. So its step is compared with a step without replay whose optimizer makes each update K times.
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
import results
import tensorflow as tf
from absl import app, flags

import hop_tf
from hop_tf.keras_hook import updates

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
# Freed memory goes back to the system at once, so that the peak shows used memory only.
_EXACT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
_OPTIMIZER_CLASSES = {
    "momentum": (keras.optimizers.SGD, {"learning_rate": 0.01, "momentum": 0.9}),
    "adam": (keras.optimizers.Adam, {"learning_rate": 1e-3}),
}


# In each rank.


def _make_optimizer(name: str, num_updates: int) -> keras.optimizers.Optimizer:
    """Returns an optimizer that makes `num_updates` updates, one after the other, with different gradients."""
    base, arguments = _OPTIMIZER_CLASSES[name]

    class Repeated(base):
        def build(self, variables):
            super().build(variables)
            self.further = [
                [tf.random.normal(each.shape, 0, 1e-4) for each in variables] for _ in range(1, num_updates)
            ]

        def apply(self, grads, trainable_variables=None):
            super().apply(grads, trainable_variables)
            variables = [each.value for each in self._trainable_variables]
            for gradients in self.further:
                updates.update(self, gradients, variables)

    return Repeated(**arguments)


class _Training:
    """A model under one setting."""

    def __init__(self, case: Mapping, rank: int, turn: int):
        peers.set_cluster(rank, case["addresses"][turn])
        self._batch_size, self._num_steps = case["batch_size"], case["num_steps"]
        settings, num_updates = case["settings"][turn]
        with hop_tf.PipeSGDStrategy(**settings).scope():
            hidden = [keras.layers.Dense(case["units"], activation="relu") for _ in range(2)]
            self.model = keras.Sequential([keras.Input((_NUM_FEATURES,)), *hidden, keras.layers.Dense(10)])
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            self.model.compile(_make_optimizer(case["optimizer"], num_updates), loss)
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


def _run_rank(case: Mapping, rank: int) -> Mapping:
    tf.config.threading.set_intra_op_parallelism_threads(1)
    trainings = [_Training(case, rank, turn) for turn in range(len(case["settings"]))]
    for training in trainings:
        training.seconds_of_steps()  # Compiles.
    steps: list[list[float]] = [[] for _ in trainings]
    for _ in range(case["num_rounds"]):
        for times, training in zip(steps, trainings, strict=True):
            times.extend(training.seconds_of_steps())
    return {
        "steps": [statistics.median(times) for times in steps],
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "num_bytes": sum(weight.numpy().nbytes for weight in trainings[0].model.trainable_weights),
    }


# In the parent.


def _run(
    optimizer: str, settings: list[tuple[Mapping, int]], num_rounds: int, environment: Mapping[str, str] | None = None
) -> list[Mapping]:
    case = {
        "optimizer": optimizer,
        "settings": settings,
        "units": _UNITS.value,
        "batch_size": _BATCH_SIZE.value,
        "num_steps": _NUM_STEPS.value,
        "num_rounds": num_rounds,
    }
    return ranks.run(
        __file__,
        case,
        _WORLD_SIZE,
        ranks.LOOPBACK,
        num_ports=len(settings),
        timeout_seconds=3600,
        environment=environment,
    )


def _setting(width: int, compensation: str, num_updates: int = 1) -> tuple[Mapping, int]:
    settings = {"pipeline_width": width, "compensation": compensation, "codec": None, "algorithm": "mesh"}
    return settings, num_updates


def _print_times(optimizer: str) -> None:
    widths = [int(width) for width in _WIDTHS.value]
    settings = [
        setting
        for width in widths
        for setting in (_setting(width, "none"), _setting(width, "none", width), _setting(width, "replay"))
    ]
    steps = np.max([each["steps"] for each in _run(optimizer, settings, _NUM_ROUNDS.value)], axis=0).reshape(-1, 3)
    print(f"\ntime, {optimizer}: ms per step")
    print(f"  {'':6} {'none':>8} {'none, K updates':>16} {'replay':>8} {'ratio of these two':>20}")
    for width, (none, repeated, replay) in zip(widths, steps * 1e3, strict=True):
        print(f"  K = {width:<2} {none:8.2f} {repeated:16.2f} {replay:8.2f} {replay / repeated:20.3f}", flush=True)
        results.note("replay over K updates", f"{optimizer}, K = {width}", replay / repeated)


def _print_memory(optimizer: str) -> None:
    def peak(setting: tuple[Mapping, int]) -> float:
        return max(each["peak_bytes"] / each["num_bytes"] for each in _run(optimizer, [setting], 1, _EXACT_MEMORY))

    num_slots = {"momentum": 1, "adam": 2}[optimizer]
    print(f"\nmemory, {optimizer}: copies of the weights above those of the same pipeline without compensation")
    for width in map(int, _WIDTHS.value):
        more = peak(_setting(width, "replay")) - peak(_setting(width, "none"))
        print(f"  K = {width:<2} {more:6.2f}, expected {width - 1 + 1 + num_slots}", flush=True)
        results.note("copies of the weights", f"{optimizer}, K = {width}", more)


def main(argv) -> None:
    del argv
    for experiment, show in (("time", _print_times), ("memory", _print_memory)):
        for optimizer in _OPTIMIZERS.value if experiment in _EXPERIMENTS.value else []:
            show(optimizer)


if __name__ == "__main__":
    ranks.serve(_run_rank)
    app.run(main)

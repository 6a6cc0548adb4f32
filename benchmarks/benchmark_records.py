"""Measures the cost of recording: steps of 5 ms with `log_dir` and without, in turns.

    python benchmarks/benchmark_records.py --runs=24

Two clusters of two ranks each live in this process under HopStrategy, one with `CommunicationOptions(log_dir=...)` and
one without. They train in turns of 25 steps, within a `fit`. So two turns that are compared are a fraction of a second
apart, and a machine that is slower for a while disturbs both. Even equal clusters differ by the places of their threads
and memory. So each of `--runs` has new clusters, and the mean over the runs is shown, with its standard error. All
steps are recorded, unlike those of a long job. A step takes at least 5 ms, without using the processor (`hop_tf launch
--step_seconds` does the same).

Shown is the cost of recording per step: in duration, and in processor time of all threads of a rank. With one core
only, a step would be longer by the processor time at most. The thread that writes is measured separately, because it
writes every other second, in any cluster's turn. Required: at most 1 % of 5 ms, 50 microseconds.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import threading
import time

import keras
import numpy as np
import results
import tensorflow as tf
from absl import app, flags

import hop_tf
from hop_tf.records import sampling
from hop_tf.tools.emulation import ComputeEmulation
from hop_tf.tools.testing import InProcessCluster

_RUNS = flags.DEFINE_integer("runs", 20, "Runs, each with new clusters.", lower_bound=1)
_STEP_SECONDS = 0.005
_NUM_RANKS = 2
_NUM_STEPS = 25  # Of a turn.
_NUM_TURNS = sampling.FULL_STEPS // _NUM_STEPS  # Of a `fit`, all of whose steps are recorded.
_NUM_FITS = 2
_NAMES = ("without", "with")


class _Clocks:
    """Called when a turn ends. Records seconds, processor seconds without writers, and those of writers."""

    def __init__(self):
        self.read: list[np.ndarray] = []

    def __call__(self) -> None:
        writers = [thread.ident for thread in threading.enumerate() if thread.name == "hop_tf records"]
        writing = sum(time.clock_gettime(time.pthread_getcpuclockid(each)) for each in writers)
        self.read.append(np.array([time.perf_counter(), time.process_time() - writing, writing]))


class _Turns(keras.callbacks.Callback):
    """Lets the clusters train in turns, whose order is reversed in the next round.

    The first round of each `fit` is not measured, because ranks meet in it.
    """

    def __init__(self, name: str, barrier: threading.Barrier):
        super().__init__()
        self._name, self.barrier = name, barrier

    def on_train_batch_begin(self, batch, logs=None):
        number, steps = divmod(batch, _NUM_STEPS)
        if steps == 0 and _order(number).index(self._name):
            self.barrier.wait()

    def on_train_batch_end(self, batch, logs=None):
        number, steps = divmod(batch + 1, _NUM_STEPS)
        if steps == 0:
            self.barrier.wait()
            if not _order(number - 1).index(self._name):
                self.barrier.wait()


def _order(number: int) -> tuple[str, ...]:
    return _NAMES if number % 2 else _NAMES[::-1]


def _train(strategy: hop_tf.strategy.ExchangeStrategy, turns: _Turns) -> None:
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((64,)), keras.layers.Dense(64), keras.layers.Dense(8)])
        model.compile("sgd", "mse", jit_compile=False)
    data = strategy.distribute_datasets_from_function(lambda _: _batches())
    for _ in range(_NUM_FITS):
        model.fit(data, steps_per_epoch=_NUM_TURNS * _NUM_STEPS, verbose=0, callbacks=[turns])


def _batches() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensors((np.ones((8, 64), "float32"), np.ones((8, 8), "float32"))).repeat()


def main(argv: list[str]) -> None:
    del argv
    sampling.FULL_SESSIONS = 2 * _NUM_FITS + 2  # Each `fit` is a session.
    os.environ.update(ComputeEmulation(step_seconds=_STEP_SECONDS).to_environment())
    _show([_measure(number) for number in range(_RUNS.value)])


def _measure(number: int) -> dict[str, np.ndarray]:
    """Runs two new clusters; returns the result of `_per_step`."""
    clocks = _Clocks()
    barrier = threading.Barrier(_NUM_RANKS * len(_NAMES), clocks)
    with tempfile.TemporaryDirectory() as directory:
        with_records = hop_tf.CommunicationOptions(log_dir=directory, report_interval_seconds=3600)
        options = {"without": hop_tf.CommunicationOptions(), "with": with_records}
        # The clusters start in another order each time.
        names = _order(number)
        threads = [threading.Thread(target=_run, args=(options[each], _Turns(each, barrier))) for each in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return _per_step(clocks.read)


def _run(options: hop_tf.CommunicationOptions, turns: _Turns) -> None:
    def make(cluster_resolver):
        return hop_tf.HopStrategy(topology="ring", cluster_resolver=cluster_resolver, communication_options=options)

    try:
        InProcessCluster(_NUM_RANKS, make, timeout_seconds=3600.0).run(lambda strategy: _train(strategy, turns))
    except BaseException:
        turns.barrier.abort()
        raise


def _per_step(read: list[np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the seconds and the processor seconds of a rank per step, for each cluster and turn."""
    steps = {name: [] for name in _NAMES}
    per_fit = len(_NAMES) * _NUM_TURNS
    for first in range(0, len(read), per_fit):
        for turn, (before, after) in enumerate(itertools.pairwise(read[first : first + per_fit]), 1):
            number, place = divmod(turn, len(_NAMES))
            if number:
                steps[_order(number)[place]].append((after - before) / _NUM_STEPS)
    return {name: np.array(each) / (1, _NUM_RANKS, _NUM_RANKS) for name, each in steps.items()}


def _show(runs: list[dict[str, np.ndarray]]) -> None:
    of_names = {name: np.mean([np.median(run[name], axis=0) for run in runs], axis=0) for name in _NAMES}
    for name, (seconds, processor, _) in of_names.items():
        print(f"{name:>8}: {seconds * 1e3:.3f} ms a step, {processor * 1e6:.0f} us of a processor per rank")
    differences = np.array([np.median(run["with"] - run["without"], axis=0) for run in runs])
    differences[:, 2] = [sum(run[name][:, 2].sum() for name in _NAMES) / len(run["with"]) for run in runs]
    longer, added, writing = differences.T * 1e6
    told = {
        "a step is longer": longer,
        "threads of training": added,
        "the thread that writes": writing,
        "in all": added + writing,
    }
    for name, microseconds in told.items():
        print(f"{name:>24}: {microseconds.mean():.0f} +- {results.standard_error(microseconds):.0f} us")
    results.note("microseconds of a processor", "in all", added + writing)


if __name__ == "__main__":
    app.run(main)

"""What recording costs: steps of 5 ms with `log_dir` and without, in turns.

    python benchmarks/benchmark_records.py --rounds=20

Two clusters of two ranks each live in this process, one with `CommunicationOptions(log_dir=...)` and one without, under
the strategy that `--strategy` names. They train in turns, `--steps` steps at a time. All of these are recorded, which
those of a long job are not. A step takes at least 5 ms, without using the processor (`hop_tf launch --step_seconds`
does the same), so that the machine's other programs disturb it little.

Shown are medians over the rounds: of the step, and of the processor time that all threads of a rank use in it. What
recording adds to the latter is what it would add to a step at most if there were one core only. At most 1 % of 5 ms is
required, 50 microseconds.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import threading
import time

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags

import hop_tf
from hop_tf.emulation import ComputeEmulation
from hop_tf.records import sampling
from hop_tf.testing import InProcessCluster

_ROUNDS = flags.DEFINE_integer("rounds", 20, "Rounds; medians over them are shown.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 100, "Steps of a cluster in a round.", lower_bound=20)
_STRATEGY = flags.DEFINE_string("strategy", "HopStrategy", "Name of the strategy, without parameter servers.")

_STEP_SECONDS = 0.005
_NUM_RANKS = 2
# Of a `fit`, that are not measured: ranks meet in the first one.
_FIRST_STEPS = 10


class _Meter(keras.callbacks.Callback):
    """Seconds, and processor seconds, of a step."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == _FIRST_STEPS:
            self._start = time.perf_counter(), time.process_time()
        self.num_steps = batch - _FIRST_STEPS

    def per_step(self):
        seconds = time.perf_counter() - self._start[0], time.process_time() - self._start[1]
        return [each / self.num_steps for each in seconds]

    def on_train_end(self, logs=None):
        self.measured = self.per_step()


class _Turns:
    """Lets the clusters train one after the other, the first one last in the next round."""

    def __init__(self, names: list[str]):
        self._names = names
        self._barrier = threading.Barrier(_NUM_RANKS * len(names))

    def take(self, name: str, number: int, run) -> None:
        for each in self._names if number % 2 else self._names[::-1]:
            self._barrier.wait()
            if each == name:
                run()
        self._barrier.wait()


def _train(strategy: hop_tf.strategy.ExchangeStrategy, name: str, turns: _Turns, measured: dict) -> None:
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((64,)), keras.layers.Dense(64), keras.layers.Dense(8)])
        model.compile("sgd", "mse", jit_compile=False)
    x, y = np.ones((8, 64), "float32"), np.ones((8, 8), "float32")
    meter = _Meter()

    def fit():
        data = strategy.distribute_datasets_from_function(lambda _: _batches(x, y))
        model.fit(data, steps_per_epoch=_STEPS.value, verbose=0, callbacks=[meter])

    for number in range(_ROUNDS.value + 1):
        turns.take(name, number, fit)
        if number and strategy.is_chief:  # The first round is tracing.
            measured[name].append(meter.measured)


def _batches(x, y):

    return tf.data.Dataset.from_tensors((x, y)).repeat()


def main(argv: list[str]) -> None:
    del argv
    sampling.FULL_SESSIONS = 2 * _ROUNDS.value + 8  # Each `fit` is one.
    os.environ.update(ComputeEmulation(step_seconds=_STEP_SECONDS).to_environment())
    with tempfile.TemporaryDirectory() as directory:
        options = {
            "without": hop_tf.CommunicationOptions(),
            "with": hop_tf.CommunicationOptions(log_dir=directory, report_interval_seconds=3600),
        }
        turns, measured = _Turns(list(options)), {name: [] for name in options}
        threads = [threading.Thread(target=_run, args=(name, each, turns, measured)) for name, each in options.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    _show(measured)


def _run(name: str, options: hop_tf.CommunicationOptions, turns: _Turns, measured: dict) -> None:
    kind = getattr(hop_tf, _STRATEGY.value)
    settings = {"topology": "ring"} if kind is hop_tf.HopStrategy else {}

    def make(cluster_resolver):
        return kind(cluster_resolver=cluster_resolver, communication_options=options, **settings)

    cluster = InProcessCluster(_NUM_RANKS, make, timeout_seconds=3600.0)
    cluster.run(lambda strategy: _train(strategy, name, turns, measured))


def _show(measured: dict) -> None:
    medians = {
        name: [statistics.median(column) for column in zip(*rows, strict=True)] for name, rows in measured.items()
    }
    for name, (seconds, processor) in medians.items():
        print(
            f"{name:>8}: {seconds * 1e3:.3f} ms a step, {processor / _NUM_RANKS * 1e6:.0f} us of a processor per rank"
        )
    differences = [
        (recorded - plain) / _NUM_RANKS
        for (_, recorded), (_, plain) in zip(measured["with"], measured["without"], strict=True)
    ]
    added, longer = statistics.median(differences), medians["with"][0] - medians["without"][0]
    error = statistics.stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else float("nan")
    print(
        f"recording adds {added * 1e6:.0f} +- {error * 1e6:.0f} us of a processor, {added / _STEP_SECONDS:.2%} of 5 ms"
    )
    print(f"a step takes {longer * 1e6:.0f} us longer, {longer / medians['without'][0]:.2%}")


if __name__ == "__main__":
    app.run(main)

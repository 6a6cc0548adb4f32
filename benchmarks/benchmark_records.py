"""Measures the cost of recording: steps of 5 ms with `log_dir` and without, in turns.

    python benchmarks/benchmark_records.py --rounds=15

Two ranks train under HopStrategy. In each round they do so once with `CommunicationOptions(log_dir=...)` and once
without, in turns, whose order is reversed in the next round. Even equal strategies differ by the places of their
threads and memory, so each turn has a new strategy, and there are many rounds. All steps are recorded, unlike those of
a long job. A step takes at least 5 ms, without using the processor (`hop_tf launch --step_seconds` does the same).

Shown is what recording adds to a step: in duration, and in processor time of all threads of a rank, of which one writes
every other second. With one core only, a step would be longer by the processor time at most. Required: at most 1 % of
5 ms, 50 microseconds.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping

import keras
import numpy as np
import results
import turns
from absl import app, flags

import hop_tf
from hop_tf.records import sampling
from hop_tf.tools.emulation import ComputeEmulation

_ROUNDS = flags.DEFINE_integer("rounds", 20, "Rounds.", lower_bound=1)

_STEP_SECONDS, _BATCH_SIZE = 0.005, 8
_NUM_STEPS = sampling.FULL_STEPS  # All steps of a `fit` are recorded.


def _measure(turn: Mapping, strategy: hop_tf.HopStrategy) -> tuple[float, float]:
    """Returns the microseconds of a step, and those of a processor."""
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((64,)), keras.layers.Dense(64), keras.layers.Dense(8)])
        model.compile("sgd", "mse", jit_compile=False)
    turns.fit(strategy, model, 1, warmup=20, batch_size=_BATCH_SIZE)  # Traces, and meets the other rank.
    begin = time.process_time()
    steps = turns.fit(strategy, model, _NUM_STEPS - 20, warmup=20, batch_size=_BATCH_SIZE)
    return 1e6 * float(steps.seconds.mean()), 1e6 * (time.process_time() - begin) / _NUM_STEPS


def main(_: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        settings = ("", f"log_dir={folder!r}, report_interval_seconds=3600")
        calls = [
            f"HopStrategy(topology='ring', communication_options=hop_tf.CommunicationOptions({each}))"
            for each in settings
        ]
        in_order = [call for number in range(_ROUNDS.value) for call in (calls if number % 2 else calls[::-1])]
        compute = ComputeEmulation(step_seconds=_STEP_SECONDS)
        found = turns.run(_measure, [{"call": call} for call in in_order], 2, compute=compute)
    means = np.array(found).mean(axis=1)  # Of both ranks.
    without, recorded = (means[[call == each for each in in_order]] for call in calls)
    for name, values in {"without records": without, "recording adds": recorded - without}.items():
        results.show(name, {"microseconds of a step": values[:, 0], "microseconds of a processor": values[:, 1]})


if __name__ == "__main__":
    app.run(main)

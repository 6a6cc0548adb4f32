"""Measures the memory of a rank under HopStrategy, in vectors of the model's 25 million parameters.

    python benchmarks/benchmark_memory.py

Shown is the peak resident memory of each rank, less that of the same `fit` in a world of one. In lock step with one
neighbor at most 6 vectors are allowed. On a directed ring of three ranks with a slow one, that rank's neighbor gets
ahead by `max_iteration_gap` = 2, and may need (1 + max_iteration_gap) * |N_in| = 3 vectors more.
"""

from __future__ import annotations

from collections.abc import Mapping

import keras
import numpy as np
import results
import turns
from absl import app

import hop_tf
from hop_tf.tools.emulation import ComputeEmulation, Slowdown

_SIDE = 5000  # A dense layer of that many inputs and outputs has 25 million parameters.
_RING = [[0.5, 0.5, 0.0], [0.0, 0.5, 0.5], [0.5, 0.0, 0.5]]  # 0 -> 1 -> 2 -> 0


def _measure(turn: Mapping, strategy: hop_tf.HopStrategy) -> float:
    """Returns the peak of resident memory during a fit, in vectors."""
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((_SIDE,)), keras.layers.Dense(_SIDE, use_bias=False)])
        model.compile("sgd", "mse")
    turns.fit(strategy, model, turn["num_steps"], warmup=1)
    with open("/proc/self/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith("VmHWM")) / (4 * _SIDE**2)


def _peaks(num_ranks: int, topology: str, num_steps: int, compute: ComputeEmulation | None = None) -> np.ndarray:
    """Returns each rank's peak, in vectors."""
    turn = {"call": f"HopStrategy(topology={topology}, max_iteration_gap=2)", "num_steps": num_steps}
    return np.array(turns.run(_measure, [turn], num_ranks, compute=compute)[0])


def main(_: list[str]) -> None:
    (alone,) = _peaks(1, "'complete'", 12)
    slow = ComputeEmulation(step_seconds=0.1, slowdowns=(Slowdown(1, 40.0),))
    results.show("lock step", {"vectors": _peaks(2, "'complete'", 12) - alone})
    results.show("directed ring, rank 1 is slow", {"vectors": _peaks(3, f"numpy.array({_RING})", 8, slow) - alone})


if __name__ == "__main__":
    app.run(main)

"""Measures the memory of a rank under HopStrategy, in vectors of the model's 25 million parameters.

    python benchmarks/benchmark_memory.py

Shown is the peak resident memory of each rank, less that of the same `fit` in a world of one. In lock step with one
neighbor at most 6 vectors are allowed. On a directed ring of three ranks with a slow one, that rank's neighbor gets
ahead by `max_iteration_gap` = 2, and may need (1 + max_iteration_gap) * |N_in| = 3 vectors more.
"""

from __future__ import annotations

import keras
import numpy as np
import results
import tensorflow as tf
from absl import app

import hop_tf
from hop_tf.tools.emulation import ComputeEmulation, Slowdown
from hop_tf.tools.testing import MultiProcessRunner

_TIMEOUT_SECONDS = 1800.0
_SIDE = 5000  # A dense layer of that many inputs and outputs has 25 million parameters.
_MAX_ITERATION_GAP = 2
_MAX_VECTORS = 6.0


def _measure(topology: str | np.ndarray, num_steps: int) -> int:
    """Returns the peak of resident bytes during a fit; runs on every rank."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # Forgets the peak so far.
    strategy = hop_tf.HopStrategy(topology=topology, max_iteration_gap=_MAX_ITERATION_GAP)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((_SIDE,)), keras.layers.Dense(_SIDE, use_bias=False)])
        model.compile("sgd", "mse")
    x = np.ones((strategy.world_size, _SIDE), "float32")
    model.fit(tf.data.Dataset.from_tensors((x, x)).repeat(num_steps), verbose=0)
    strategy.shutdown()
    with open("/proc/self/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith("VmHWM"))


def _peaks(num_ranks: int, topology: str | np.ndarray, num_steps: int, env: dict[str, str] | None = None) -> np.ndarray:
    """Returns each rank's peak, in vectors."""
    arguments = {"args": (topology, num_steps), "env": env, "timeout_seconds": _TIMEOUT_SECONDS}
    with MultiProcessRunner(_measure, num_ranks, **arguments) as runner:
        return np.array(runner.join().raise_for_errors().values) / (4 * _SIDE**2)


def _show(name: str, peaks: np.ndarray, limit: float) -> None:
    results.note("vectors", name, peaks)
    print(f"{name:32} " + " ".join(f"{peak:6.2f}" for peak in peaks) + f"   at most {limit:g}", flush=True)


def main(argv: list[str]) -> None:
    """Measures, prints and keeps."""
    del argv
    (alone,) = _peaks(1, "complete", 12)
    _show("lock step", _peaks(2, "complete", 12) - alone, _MAX_VECTORS)
    ring = np.eye(3) / 2 + np.roll(np.eye(3), 1, axis=1) / 2  # 0 -> 1 -> 2 -> 0
    slow = ComputeEmulation(step_seconds=0.1, slowdowns=(Slowdown(1, 40.0),)).to_environment()
    _show("directed ring, rank 1 is slow", _peaks(3, ring, 8, slow) - alone, _MAX_VECTORS + 1 + _MAX_ITERATION_GAP)


if __name__ == "__main__":
    app.run(main)

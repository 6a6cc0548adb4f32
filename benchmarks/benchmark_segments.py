"""Measures the gain of L gradient segments with K = 1: communication behind back-propagation (Figure 2 (b)).

    python benchmarks/benchmark_segments.py --links=1e9,500e6

Two ranks train a multi-layer perceptron, really computed, because TensorFlow's scheduling decides if a segment's
gradients leave before back-propagation has ended. In interleaved rounds run D-Sync with L = 1, 2, 4, ..., Pipe-SGD
(K = 2, L = 1), and a rank that is alone. Shown are milliseconds per step (medians), and the share of a step's
communication that L segments hide: (step of L = 1 - step) / communication of L = 1. At most the communication during
back-propagation can be hidden: about two thirds of the computation.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Mapping

import keras
import numpy as np
import ranks
import results
import tensorflow as tf
from absl import app, flags

import hop_tf

_LINKS = flags.DEFINE_list("links", ["1e9", "500e6"], "Bits per second; needs root. Or loopback.")
_SEGMENTS = flags.DEFINE_list("segments", ["1", "2", "4", "8"], "Values of L.")
_WIDTH = flags.DEFINE_integer("width", 1024, "Units of each of the 8 layers.")
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 512, "Of a rank.")
_NUM_STEPS = flags.DEFINE_integer("num_steps", 20, "Timed steps of a round.", lower_bound=4)
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Interleaved rounds.")

_WORLD_SIZE = 2
_NUM_LAYERS = 8
_WARMUP_STEPS = 4


def _run_rank(case: Mapping, rank: int) -> list[dict]:
    tf.config.threading.set_intra_op_parallelism_threads(1)
    return [_time(case, rank, turn, **settings) for turn, settings in enumerate(case["settings"])]


def _time(case: Mapping, rank: int, turn: int, *, is_alone: bool, **settings) -> dict:
    """Returns the median duration of a step, and its mean time in all-reduce."""
    workers = [case["addresses"][turn][rank]] if is_alone else case["addresses"][turn]
    task = {"type": "worker", "index": 0 if is_alone else rank}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})
    strategy = hop_tf.PipeSGDStrategy(codec=None, algorithm="mesh", **settings)
    with strategy.scope():
        layers = [keras.layers.Dense(case["width"], activation="relu") for _ in range(_NUM_LAYERS)]
        model = keras.Sequential([keras.Input((case["width"],)), *layers])
        model.compile(keras.optimizers.SGD(1e-3), "mse")
    times: list[float] = []
    note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: times.append(time.monotonic()))
    num_steps = _WARMUP_STEPS + case["num_steps"]
    x = np.zeros((1, case["width"]), np.float32)
    data = tf.data.Dataset.from_tensors((x, x)).repeat(num_steps * case["batch_size"] * strategy.world_size).unbatch()
    data = data.batch(case["batch_size"] * strategy.world_size)
    model.fit(data, verbose=0, callbacks=[note])
    report = strategy.report()
    strategy.shutdown()
    return {
        "step": statistics.median(np.diff(times)[_WARMUP_STEPS:]),
        "communicate": 0.0 if is_alone else report["communicate_seconds"] / report["steps"],
    }


def _measure(link: str) -> None:
    kinds = {"alone": {"is_alone": True}}
    kinds |= {f"K = 1, L = {n}": {"pipeline_width": 1, "num_segments": int(n)} for n in _SEGMENTS.value}
    kinds["K = 2, L = 1"] = {"pipeline_width": 2}
    settings = [{"is_alone": False, **kind} for kind in kinds.values()] * _ROUNDS.value
    case = {
        "settings": settings,
        "width": _WIDTH.value,
        "batch_size": _BATCH_SIZE.value,
        "num_steps": _NUM_STEPS.value,
    }
    of_ranks = ranks.run(__file__, case, _WORLD_SIZE, link, num_ports=len(settings))

    def median(kind: int, name: str) -> float:
        """Returns the median over the rounds of the slowest rank's value."""
        turns = range(kind, len(settings), len(kinds))
        return statistics.median(max(rank[turn][name] for rank in of_ranks) for turn in turns)

    steps = {label: median(kind, "step") for kind, label in enumerate(kinds)}
    first = f"K = 1, L = {_SEGMENTS.value[0]}"
    communicate = median(list(kinds).index(first), "communicate")
    print(f"\n{link}, {_NUM_LAYERS * _WIDTH.value * (_WIDTH.value + 1) / 1e6:.1f} million parameters")
    print(
        f"  {'':14s} {'step ms':>8s} {'hidden':>7s}    (all-reduce of a step, with L = 1: {communicate * 1e3:.0f} ms)"
    )
    for label, step in steps.items():
        hidden = "" if label == "alone" else f"{(steps[first] - step) / communicate:7.0%}"
        print(f"  {label:14s} {step * 1e3:8.1f} {hidden}", flush=True)
        results.note("step seconds", f"{label}, {link}", step)


def main(argv) -> None:
    del argv
    for link in _LINKS.value:
        _measure(link)


if __name__ == "__main__":
    ranks.serve(_run_rank)
    app.run(main)

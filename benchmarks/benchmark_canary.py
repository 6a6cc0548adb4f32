"""Measures Canary: traffic, a slow rank, and the time to an accuracy.

    python benchmarks/benchmark_canary.py --experiments=traffic,straggler
    python benchmarks/benchmark_canary.py --experiments=accuracy --link=50e6 --seeds=3

traffic     Bytes that a rank sends in a step, headers and bucket values included, and their share of the bytes of
            float32. The model has two dense layers, with 10.6 million parameters. Computation is emulated, because
            ranks that share processors fall out of step. Required: 27 %.
straggler   One rank is ten times slower: steps a second of the others, over those without a slow rank. Required: 95 %.
accuracy    Real training with an emulated computation: accuracy on the test data, and the seconds until `--target` was
            reached, also over those of Canary. Required at a --link that is slow enough: 1.6 times for BML, 2.8 times
            for PS.

"SSP sketch" is asynchronous training with the sketch, Canary's default. BML, the baseline of the paper, is synchronous
in float32 on a BCube. PS is a parameter server, one more process: each step waits for all workers' gradients. Steps are
those that a rank has made, without skipped ones.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping

import images
import keras
import numpy as np
import ranks
import results
import turns
from absl import app, flags

import hop_tf
from hop_tf.tools.emulation import ComputeEmulation, Slowdown

_EXPERIMENTS = flags.DEFINE_list("experiments", ["traffic", "straggler"], "What to run.")
_LINK = flags.DEFINE_string("link", ranks.LOOPBACK, "Bits per second of a host's link, in `accuracy`; needs root.")
_NUM_STEPS = flags.DEFINE_integer("num_steps", 60, "Steps of `straggler`; a quarter is not timed.", lower_bound=8)
_EPOCHS = flags.DEFINE_integer("epochs", 5, "Epochs of `accuracy`.", lower_bound=1)
_ACCURACY_ROWS = flags.DEFINE_integer("accuracy_rows", None, "Images of `accuracy`. Default: all.", 1)
_TARGET = flags.DEFINE_float("target", 0.85, "Accuracy whose time is taken.")
_SEEDS = flags.DEFINE_integer("seeds", 1, "Trainings of each kind.")

_WORLD_SIZE = 4
_WIDTH = 2300  # Of the two dense layers of `traffic`.
_STEP_SECONDS = 0.05  # Emulated computation.
_TRAFFIC_STEPS, _TRAFFIC_STEP_SECONDS = 16, 0.3
_BATCH_SIZE = 128  # Of all ranks together.
_LEARNING_RATE, _MOMENTUM = 0.02, 0.9
_EVALUATIONS = 4  # In each epoch of `accuracy`.
_CANARY = "SSP sketch"
_KINDS = {
    "PS": "SHATParameterServerStrategy(consistency='bsp', mixing=1.0)",
    "BML bcube:2,2": "CanaryStrategy(consistency='bsp', codec=None, algorithm='bcube:2,2')",
    _CANARY: "CanaryStrategy(consistency='ssp', max_in_flight=4)",
}


# In each rank.


def _time(turn: Mapping, strategy: hop_tf.CanaryStrategy) -> tuple[float, float, int]:
    """Returns the steps a second, the bytes that the rank sends in a step, and the number of parameters."""
    width, num_steps = turn["width"], turn["num_steps"]
    with strategy.scope():
        model = keras.Sequential([keras.Input((width,)), keras.layers.Dense(width), keras.layers.Dense(width)])
        model.compile(keras.optimizers.SGD(1e-3), "mse")
    steps = turns.fit(strategy, model, num_steps - num_steps // 4, warmup=num_steps // 4)
    return steps.per_second, steps.per_step("bytes_sent"), model.count_params()


def _train(turn: Mapping, strategy: hop_tf.ExchangeStrategy) -> list[tuple[float, float]]:
    """Returns seconds and test accuracy, some times in each epoch."""
    keras.utils.set_random_seed(turn["seed"])
    (x, y), test = [(x / 255, y) for x, y in keras.datasets.fashion_mnist.load_data()]
    x, y = x[: turn["num_rows"]], y[: turn["num_rows"]]
    layers = keras.layers
    with strategy.scope():
        hidden = [layers.Flatten(), layers.Dense(300, activation="relu"), layers.Dense(100, activation="relu")]
        model = keras.Sequential([keras.Input(x.shape[1:]), *hidden, layers.Dense(10, activation="softmax")])
        model.compile(keras.optimizers.SGD(_LEARNING_RATE, momentum=_MOMENTUM), "sparse_categorical_crossentropy")
    clock = images.Clock(evaluate_every=max(1, len(x) // _BATCH_SIZE // _EVALUATIONS))
    note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: clock.step(model.get_weights))
    model.fit(x, y, batch_size=_BATCH_SIZE, epochs=turn["epochs"], verbose=0, callbacks=[note])
    return list(clock.evaluate(model, test))


# In the parent.


def _traffic() -> None:
    turn = {"call": _KINDS[_CANARY], "width": _WIDTH, "num_steps": _TRAFFIC_STEPS}
    (of_ranks,) = turns.run(_time, [turn], _WORLD_SIZE, compute=ComputeEmulation(step_seconds=_TRAFFIC_STEP_SECONDS))
    sent = statistics.mean(each for _, each, _ in of_ranks)
    of_float32 = 2 * (_WORLD_SIZE - 1) / _WORLD_SIZE * 4 * of_ranks[0][2]  # By an all-reduce.
    results.show(_CANARY, {"MB a step": sent / 1e6, "share of float32": sent / of_float32})


def _straggler() -> None:
    rates = []
    for slowdowns in ((), (Slowdown(rank=_WORLD_SIZE - 1, factor=10),)):
        turn = {"call": _KINDS[_CANARY], "width": 256, "num_steps": _NUM_STEPS.value}
        compute = ComputeEmulation(step_seconds=_STEP_SECONDS, slowdowns=slowdowns)
        (of_ranks,) = turns.run(_time, [turn], _WORLD_SIZE, compute=compute)
        rates.append(statistics.mean(rate for rate, *_ in of_ranks[:-1]))
    alike, beside = rates
    results.show(_CANARY, {"steps a second, alike": alike, "beside a slow rank": beside, "ratio": beside / alike})


def _accuracy() -> None:
    seconds = {label: [] for label in _KINDS}
    for seed, (label, call) in itertools.product(range(_SEEDS.value), _KINDS.items()):
        turn = {"call": call, "seed": seed, "epochs": _EPOCHS.value, "num_rows": _ACCURACY_ROWS.value}
        compute = ComputeEmulation(step_seconds=_STEP_SECONDS)
        ((reached, *_),) = turns.run(_train, [turn], _WORLD_SIZE, _LINK.value, compute=compute)
        print(f"{label}, seed {seed}:", *(f"{100 * got:.1f}% {each:.0f} s" for each, got in reached), flush=True)
        seconds[label].append(next((each for each, got in reached if got >= _TARGET.value), math.inf))
    for label, of_seeds in seconds.items():
        over = np.mean(of_seeds) / np.mean(seconds[_CANARY])
        results.show(label, {"seconds to target": of_seeds, "over SSP sketch": over})


_RUN = {"traffic": _traffic, "straggler": _straggler, "accuracy": _accuracy}


def main(_: list[str]) -> None:
    for name in _EXPERIMENTS.value:
        _RUN[name]()


if __name__ == "__main__":
    app.run(main)

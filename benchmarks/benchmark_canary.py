"""Measures Canary: traffic, a slow rank, an all-reduce over two interfaces, and the time to an accuracy.

    python benchmarks/benchmark_canary.py --experiments=traffic,straggler,interfaces
    python benchmarks/benchmark_canary.py --experiments=accuracy --link=50e6 --seeds=3

traffic     Bytes that a rank sends in a step, headers and bucket values included, and their share of the bytes of
            float32. The model has two dense layers of --width, by default 10.6 million parameters. Required: 27 %.
straggler   One rank is ten times slower: steps a second of the others, over those without a slow rank. Required: 95 %.
interfaces  All-reduces of synchronous training, with as many values of float32 as the model of `traffic` has: on a
            BCube(2,2) over two interfaces, beside a mesh over one, of 500 Mbit/s each (an emulated network: root).
            Required: 1.8 times the rate.
accuracy    Real training with an emulated computation: accuracy on the test data, and the seconds until `--target` was
            reached, also over those of Canary. Required at a --link that is slow enough: 1.6 times for BML, 2.8 times
            for PS.

"SSP sketch" is asynchronous training with the sketch, Canary's default. BML, the baseline of the paper, is synchronous
in float32 on a BCube. PS is a parameter server, one more process: each step waits for all workers' gradients. Steps are
those that a rank has made, without skipped ones.
"""

from __future__ import annotations

import math
import statistics
import time
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
_WIDTH = flags.DEFINE_integer("width", 2300, "Of two dense layers.")
_NUM_STEPS = flags.DEFINE_integer("num_steps", 60, "Steps of `straggler`; a quarter is not timed.", lower_bound=8)
_EPOCHS = flags.DEFINE_integer("epochs", 5, "Epochs of `accuracy`.", lower_bound=1)
_ACCURACY_ROWS = flags.DEFINE_integer("accuracy_rows", None, "Images of `accuracy`. Default: all.", 1)
_TARGET = flags.DEFINE_float("target", 0.85, "Accuracy whose time is taken.")
_SEEDS = flags.DEFINE_integer("seeds", 1, "Trainings of each kind.")

_WORLD_SIZE = 4
_STEP_SECONDS = 0.05  # Emulated computation.
_TRAFFIC_STEPS = 16
_BATCH_SIZE = 128  # Of all ranks together.
_LEARNING_RATE, _MOMENTUM = 0.02, 0.9
_NUM_REDUCTIONS = 7
_INTERFACE_LINK = "500e6"
_CANARY, _BML = "SSP sketch", "BML bcube:2,2"
_FLOAT32 = "CanaryStrategy(consistency='bsp', codec=None, algorithm={!r}, interfaces={})"
_KINDS = {
    "PS": "SHATParameterServerStrategy(consistency='bsp', mixing=1.0)",
    _BML: _FLOAT32.format("bcube:2,2", None),
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


def _reduce(turn: Mapping, strategy: hop_tf.CanaryStrategy) -> float:
    """Returns the duration of an all-reduce."""
    values, seconds = np.ones(turn["num_values"], np.float32), []
    reduction = strategy.make_all_reduce(turn["algorithm"], values.size)
    for step in range(1 + _NUM_REDUCTIONS):
        start = time.monotonic()
        reduction.mean(step, [values], lambda rank, step: True)
        seconds.append(time.monotonic() - start)
    reduction.close()
    return statistics.median(seconds[1:])


class _Weights(keras.callbacks.Callback):
    """Records weights after each epoch, and the seconds since the first step, which traces.

    The weights are evaluated after training, because other ranks may go on training while one rank evaluates.
    """

    def __init__(self):
        super().__init__()
        self.reached: list[tuple[float, list[np.ndarray]]] = []
        self._start: float | None = None

    def on_train_batch_end(self, batch, logs=None):
        self._start = self._start or time.monotonic()

    def on_epoch_end(self, epoch, logs=None):
        self.reached.append((time.monotonic() - self._start, self.model.get_weights()))


def _train(turn: Mapping, strategy: hop_tf.ExchangeStrategy) -> list[tuple[float, float]]:
    """Returns seconds and test accuracy after each epoch."""
    keras.utils.set_random_seed(turn["seed"])
    (x, y), test = [(x / 255, y) for x, y in keras.datasets.fashion_mnist.load_data()]
    x, y = x[: turn["num_rows"]], y[: turn["num_rows"]]
    layers = keras.layers
    with strategy.scope():
        hidden = [layers.Flatten(), layers.Dense(300, activation="relu"), layers.Dense(100, activation="relu")]
        model = keras.Sequential([keras.Input(x.shape[1:]), *hidden, layers.Dense(10, activation="softmax")])
        model.compile(keras.optimizers.SGD(_LEARNING_RATE, momentum=_MOMENTUM), "sparse_categorical_crossentropy")
    weights = _Weights()
    model.fit(x, y, batch_size=_BATCH_SIZE, epochs=turn["epochs"], verbose=0, callbacks=[weights])
    reached = []
    for seconds, values in weights.reached:
        model.set_weights(values)
        reached.append((seconds, images.accuracy(model, test)))
    return reached


_MEASURES = {"time": _time, "reduce": _reduce, "train": _train}


# In the parent.


def _show(case: str, **values: float) -> None:
    print(f"  {case:14}" + "".join(f"   {name.partition(': ')[2]} {value:.4g}" for name, value in values.items()))
    for name, value in values.items():
        results.note(name, case, value)


def _run(call: str, measure: str, link: str = ranks.LOOPBACK, **arguments) -> list:
    """Returns the results of all ranks. `turn` is among the arguments of `turns.run`."""
    turn = {"call": call, "measure": measure, **arguments.pop("turn")}
    (of_ranks,) = turns.run(__file__, [turn], _WORLD_SIZE, link, **arguments)
    return of_ranks


def _sends(num_values: int) -> float:
    """Returns the bytes that a rank sends in an all-reduce of float32."""
    return 2 * (_WORLD_SIZE - 1) / _WORLD_SIZE * 4 * num_values


def _traffic() -> None:
    of_ranks = _run(_KINDS[_CANARY], "time", turn={"width": _WIDTH.value, "num_steps": _TRAFFIC_STEPS})
    sent = statistics.mean(each for _, each, _ in of_ranks)
    share = sent / _sends(of_ranks[0][2])
    _show(_CANARY, **{"traffic: MB a step": sent / 1e6, "traffic: share of float32": share})


def _straggler() -> None:
    rates = []
    for slowdowns in ((), (Slowdown(rank=_WORLD_SIZE - 1, factor=10),)):
        compute = ComputeEmulation(step_seconds=_STEP_SECONDS, slowdowns=slowdowns)
        of_ranks = _run(_KINDS[_CANARY], "time", turn={"width": 256, "num_steps": _NUM_STEPS.value}, compute=compute)
        rates.append(statistics.mean(rate for rate, *_ in of_ranks[:-1]))
    alike, beside = rates
    _show(_CANARY, **{"straggler: alike": alike, "straggler: one slow": beside, "straggler: ratio": beside / alike})


def _interfaces() -> None:
    num_values = 2 * (_WIDTH.value + 1) * _WIDTH.value
    rates = {}
    for algorithm, number in {"mesh": 1, "bcube:2,2": 2}.items():
        call, turn = _FLOAT32.format(algorithm, f"interfaces[:{number}]"), {"num_values": num_values}
        of_ranks = _run(call, "reduce", _INTERFACE_LINK, turn=turn | {"algorithm": algorithm}, num_interfaces=2)
        rates[algorithm] = _sends(num_values) / max(of_ranks) / 1e6
        _show(algorithm, **{"interfaces: MB / s": rates[algorithm]})
    _show("bcube:2,2", **{"interfaces: over one": rates["bcube:2,2"] / rates["mesh"]})


def _accuracy() -> None:
    seconds = {label: [] for label in _KINDS}
    for label, call in _KINDS.items():
        for seed in range(_SEEDS.value):
            turn = {"seed": seed, "epochs": _EPOCHS.value, "num_rows": _ACCURACY_ROWS.value}
            compute = ComputeEmulation(step_seconds=_STEP_SECONDS)
            reached = _run(call, "train", _LINK.value, turn=turn, compute=compute)[0]
            epochs = ", ".join(f"{100 * accuracy:.1f}% {each:.0f} s" for each, accuracy in reached)
            print(f"{label}, seed {seed}: {epochs}", flush=True)
            seconds[label].append(next((each for each, got in reached if got >= _TARGET.value), math.inf))
    for label, of_seeds in seconds.items():
        mean = statistics.mean(of_seeds)
        over = mean / statistics.mean(seconds[_CANARY])
        _show(label, **{f"accuracy: s to {_TARGET.value}": mean, "accuracy: over SSP sketch": over})


_RUN = {"traffic": _traffic, "straggler": _straggler, "interfaces": _interfaces, "accuracy": _accuracy}


def main(argv) -> None:
    del argv
    for name in _EXPERIMENTS.value:
        print(f"\n{name}")
        _RUN[name]()


if __name__ == "__main__":
    turns.serve(lambda turn, strategy: _MEASURES[turn["measure"]](turn, strategy))
    app.run(main)

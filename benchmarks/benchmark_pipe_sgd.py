"""Measures steps of Pipe-SGD: beside synchronous training, in segments, and with own steps that stand in.

    python benchmarks/benchmark_pipe_sgd.py --experiments=timing --links=1e9,100e6

timing    Beside synchronous training by all-reduce (D-Sync) and by a server (PS-Sync): Figure 4 in the small.
          Computation is emulated, asleep, so that four ranks do not take the processor from each other. `predicted`
          is the prediction by `hop_tf.timing` from one measurement, made under D-Sync.
segments  The gain of L gradient segments with K = 1: communication behind back-propagation (Figure 2 (b)). Two ranks
          train a perceptron, really computed, because TensorFlow's scheduling decides if a segment's gradients leave
          before back-propagation has ended.
replay    The time that own steps add, which stand in for means that have not come. Two ranks train a perceptron on
          loopback. A replay makes K - 1 updates more. So its step is compared with a step without replay whose
          optimizer makes K updates.

Shown are seconds per step: medians, at the slowest rank. Settings take turns in every one of --rounds rounds.

PS-Sync has a server on a host of its own, as in the paper, and no codec: it waits for the gradients of all ranks, and
sends the new weights to all.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping

import keras
import ranks
import results
import tensorflow as tf
import turns
from absl import app, flags

import hop_tf
from hop_tf.keras_hook import updates
from hop_tf.tools import timing
from hop_tf.tools.emulation import ComputeEmulation

_EXPERIMENTS = flags.DEFINE_list("experiments", ["timing", "segments", "replay"], "What to run.")
_LINKS = flags.DEFINE_list("links", ["1e9"], "Bits per second; needs root. Or loopback. Not of `replay`.")
_STEP_SECONDS = flags.DEFINE_list("step_seconds", ["0.2"], "Emulated computation of a step, of `timing`.")
_NUM_VALUES = flags.DEFINE_integer("num_values", 5_000_000, "Parameters, of `timing`.")
_CODECS = flags.DEFINE_list("codecs", ["truncate16", "int8"], "Codecs, beside none, of `timing`.")
_ALGORITHM = flags.DEFINE_enum("algorithm", "mesh", ["mesh", "ring"], "The all-reduce of all but PS-Sync.")
_WIDTHS = flags.DEFINE_list("pipeline_widths", ["2"], "Values of K, of `replay`.")
_NUM_STEPS = flags.DEFINE_integer("num_steps", 20, "Timed steps of a round.", lower_bound=4)
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Rounds of `segments` and `replay`.", lower_bound=1)

_WORLD_SIZE, _FEW = 4, 2
_WARMUP_STEPS = 4
_WIDTH = 1024  # Units of a layer, of `segments` and `replay`.
_SEGMENTS = (1, 2, 4, 8)  # Values of L.
_SERVER = "SHATParameterServerStrategy(consistency='bsp', mixing=1.0, codec=None)"


class Repeated(keras.optimizers.SGD):
    """Makes `num_updates` updates, one after the other, with different gradients."""

    def __init__(self, num_updates: int):
        super().__init__(0.01, momentum=0.9)
        self._num_updates = num_updates

    def build(self, variables):
        super().build(variables)
        self.further = [
            [tf.random.normal(each.shape, 0, 1e-4) for each in variables] for _ in range(1, self._num_updates)
        ]

    def apply(self, grads, trainable_variables=None):
        super().apply(grads, trainable_variables)
        variables = [each.value for each in self._trainable_variables]
        for gradients in self.further:
            updates.update(self, gradients, variables)


# In each rank.


def _time(turn: Mapping, strategy: hop_tf.ExchangeStrategy) -> tuple[float, timing.Measurement | None]:
    """Returns the seconds of a step, and the measurement if the turn asks for it."""
    steps = turns.fit_vector(turn, strategy)
    return statistics.median(steps.seconds), timing.measure(strategy) if turn["is_measured"] else None


def _train(turn: Mapping, strategy: hop_tf.PipeSGDStrategy) -> float:
    """Returns the seconds of a step of a perceptron."""
    with strategy.scope():
        layers = [keras.layers.Dense(size, activation="relu") for size in turn["sizes"]]
        model = keras.Sequential([keras.Input((_WIDTH,)), *layers])
        model.compile(Repeated(turn["num_updates"]), "mse")
    about = {"warmup": _WARMUP_STEPS, "batch_size": turn["batch_size"]}
    return statistics.median(turns.fit(strategy, model, turn["num_steps"], **about).seconds)


# In the parent.


def _call(width: int, algorithm: str = "mesh", codec: str | None = None, **settings) -> str:
    settings = {"pipeline_width": width, "algorithm": algorithm, "codec": codec, **settings}
    return f"PipeSGDStrategy({', '.join(f'{name}={value!r}' for name, value in settings.items())})"


def _time_systems(link: str, step_seconds: float) -> None:
    algorithm, codecs = _ALGORITHM.value, [None, *_CODECS.value]
    systems = {"D-Sync": 1, "Pipe-SGD": 2}
    kinds = [(label, width, codec) for label, width in systems.items() for codec in codecs]
    calls = [*(_call(width, algorithm, codec) for _, width, codec in kinds), _SERVER]
    about = {"num_values": _NUM_VALUES.value, "num_steps": _NUM_STEPS.value, "warmup": _WARMUP_STEPS}
    members = [{**about, "call": call, "is_measured": call == calls[0]} for call in calls]
    compute = ComputeEmulation(step_seconds=step_seconds)
    found = turns.run(_time, members, _WORLD_SIZE, link, compute=compute)
    slowest = [max(seconds for seconds, _ in of_ranks) for of_ranks in found]
    _, measurement = found[0][0]
    results.show(f"PS-Sync, {link}, {step_seconds:g}", {"step seconds": slowest.pop()})
    for (label, width, codec), seconds in zip(kinds, slowest, strict=True):
        plan = measurement.predict(pipeline_width=width, codec=codec, algorithm=algorithm)
        name = f"{label} {codec}" if codec else label
        values = {"step seconds": seconds, "predicted seconds": plan.step_seconds}
        results.show(f"{name}, {link}, {step_seconds:g}", values)


def _time_perceptrons(kinds: Mapping[str, tuple[str, int]], link: str, **about) -> None:
    """Trains with each call and its number of updates, in turns, and shows the seconds of a step."""
    about["num_steps"] = _NUM_STEPS.value
    members = [{**about, "call": call, "num_updates": number} for call, number in kinds.values()] * _ROUNDS.value
    slowest = [max(of_ranks) for of_ranks in turns.run(_train, members, _FEW, link)]
    for number, label in enumerate(kinds):
        results.show(label, {"step seconds": slowest[number :: len(kinds)]})


def _time_segments(link: str) -> None:
    kinds = {f"K = 1, L = {number}, {link}": (_call(1, num_segments=number), 1) for number in _SEGMENTS}
    kinds[f"K = 2, L = 1, {link}"] = (_call(2), 1)
    _time_perceptrons(kinds, link, sizes=[_WIDTH] * 8, batch_size=512)


def _time_replay() -> None:
    kinds = {}
    for width in map(int, _WIDTHS.value):
        kinds[f"momentum, K = {width}, K updates"] = (_call(width, compensation="none"), width)
        kinds[f"momentum, K = {width}, replay"] = (_call(width, compensation="replay"), 1)
    _time_perceptrons(kinds, ranks.LOOPBACK, sizes=[_WIDTH, _WIDTH, 10], batch_size=256)


def main(_: list[str]) -> None:
    if "timing" in _EXPERIMENTS.value:
        for link, step_seconds in itertools.product(_LINKS.value, map(float, _STEP_SECONDS.value)):
            _time_systems(link, step_seconds)
    for link in _LINKS.value if "segments" in _EXPERIMENTS.value else ():
        _time_segments(link)
    if "replay" in _EXPERIMENTS.value:
        _time_replay()


if __name__ == "__main__":
    app.run(main)

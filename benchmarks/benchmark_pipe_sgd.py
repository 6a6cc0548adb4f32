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

Shown are milliseconds per step: medians, at the slowest rank. Settings take turns in every one of --rounds rounds.

PS-Sync is a plain server loop on a host of its own, as in the paper: it receives all gradients, and sends their mean to
all. (It is one more rank; that its own gradient is part of the mean changes no time.)
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping

import keras
import models
import ranks
import results
import tensorflow as tf
import turns
from absl import app, flags

import hop_tf
from hop_tf import collectives
from hop_tf.collectives import AllReduce
from hop_tf.keras_hook import updates
from hop_tf.tools import timing
from hop_tf.tools.emulation import ComputeEmulation

_EXPERIMENTS = flags.DEFINE_list("experiments", ["timing", "segments", "replay"], "What to run.")
_LINKS = flags.DEFINE_list("links", ["1e9"], "Bits per second; needs root. Or loopback. Not of `replay`.")
_STEP_SECONDS = flags.DEFINE_list("step_seconds", ["0.2"], "Emulated computation of a step, of `timing`.")
_NUM_VALUES = flags.DEFINE_integer("num_values", 5_000_000, "Parameters, of `timing`.")
_CODECS = flags.DEFINE_list("codecs", ["truncate16", "int8"], "Codecs, beside none, of `timing`.")
_ALGORITHM = flags.DEFINE_enum("algorithm", "mesh", ["mesh", "ring"], "The all-reduce of all but PS-Sync.")
_SEGMENTS = flags.DEFINE_list("segments", ["1", "2", "4", "8"], "Values of L.")
_WIDTHS = flags.DEFINE_list("pipeline_widths", ["2"], "Values of K, of `replay`.")
_WIDTH = flags.DEFINE_integer("width", 1024, "Units of a layer, of `segments` and `replay`.")
_NUM_STEPS = flags.DEFINE_integer("num_steps", 20, "Timed steps of a round.", lower_bound=4)
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Rounds of `segments` and `replay`.", lower_bound=1)

_WORLD_SIZE, _FEW = 4, 2
_WARMUP_STEPS = 4
_NUM_LAYERS = 8  # Of the perceptron of `segments`; that of `replay` has two.
_BATCH_SIZES = {"segments": 512, "replay": 256}
_SYSTEMS = {"D-Sync": 1, "Pipe-SGD": 2}


class StarAllReduce(AllReduce):
    """PS-Sync: the last rank receives all vectors, and sends their mean to all ranks."""

    def _reduce(self, operation, vector, values, result) -> None:
        ranks_, chunks = operation.ranks, vector.pieces(1)[0]
        *others, server = ranks_
        if ranks_[operation.index] != server:
            for chunk, where in enumerate(chunks):
                operation.send(server, 0, chunk, vector.encode(values, where))
            for chunk, where in enumerate(chunks):
                (data,) = operation.receive([server], 1, chunk)
                vector.decode(data, result, where)
            return
        for chunk, where in enumerate(chunks):
            data = vector.encode_mean(values, where, operation.receive(others, 0, chunk), len(ranks_))
            operation.commit()
            for other in others:
                operation.send(other, 1, chunk, data)
            vector.decode(data, result, where)


collectives.ALGORITHMS["star"] = StarAllReduce


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


def _measure(turn: Mapping, strategy: hop_tf.PipeSGDStrategy) -> dict:
    experiment = turn["experiment"]
    with strategy.scope():
        if experiment == "timing":
            model = keras.Sequential([keras.Input((1,)), models.Vector(turn["num_values"])])
            optimizer = keras.optimizers.SGD(0.0)
        else:
            sizes = [turn["width"]] * _NUM_LAYERS if experiment == "segments" else [turn["width"]] * 2 + [10]
            layers = [keras.layers.Dense(size, activation="relu") for size in sizes]
            model = keras.Sequential([keras.Input((turn["width"],)), *layers])
            optimizer = Repeated(turn["num_updates"]) if experiment == "replay" else keras.optimizers.SGD(1e-3)
        model.compile(optimizer, "mse")
    batch_size = _BATCH_SIZES.get(experiment, 1)
    steps = turns.fit(strategy, model, turn["num_steps"], warmup=_WARMUP_STEPS, batch_size=batch_size)
    return {
        "step": statistics.median(steps.seconds),
        "update": steps.after["compute_seconds"] - turn.get("step_seconds", 0.0),
        "communicate": steps.per_step("communicate_seconds"),
        "codec": steps.per_step("codec_seconds"),
        "measurement": timing.measure(strategy) if turn.get("is_measured") else None,
    }


# In the parent.


def _call(width: int, algorithm: str = "mesh", codec: str | None = None, **settings) -> str:
    settings = {"pipeline_width": width, "algorithm": algorithm, "codec": codec, **settings}
    return f"PipeSGDStrategy({', '.join(f'{name}={value!r}' for name, value in settings.items())})"


def _time_systems(link: str, step_seconds: float) -> None:
    """Prints the times of all systems on a link."""
    about = {"experiment": "timing", "num_values": _NUM_VALUES.value, "num_steps": _NUM_STEPS.value}
    about["step_seconds"] = step_seconds
    codecs, compute = [None, *_CODECS.value], ComputeEmulation(step_seconds=step_seconds)
    kinds = [(label, width, codec) for label, width in _SYSTEMS.items() for codec in codecs]
    peers = [{**about, "call": _call(width, _ALGORITHM.value, codec)} for _, width, codec in kinds]
    peers[0]["is_measured"] = True
    servers = [{**about, "call": _call(1, "star", codec)} for codec in codecs]
    found = [
        *turns.run(__file__, servers, _WORLD_SIZE + 1, link, compute=compute),
        *turns.run(__file__, peers, _WORLD_SIZE, link, compute=compute),
    ]
    measurement = found[len(servers)][0]["measurement"]
    print(f"\n{link}, {_NUM_VALUES.value / 1e6:g} million parameters, computation {step_seconds * 1e3:.0f} ms")
    titles = ("step ms", "predicted", "update", "communicate", "codec")
    print(f"  {'':22}" + "".join(f"{title:>12}" for title in titles))
    for (label, width, codec), of_ranks in zip([("PS-Sync", 1, codec) for codec in codecs] + kinds, found, strict=True):
        name = f"{label} {codec or ''}".strip()
        step, *others = (max(each[of] for each in of_ranks) for of in ("step", "update", "communicate", "codec"))
        predicted = float("nan")
        if label in _SYSTEMS:
            plan = measurement.predict(pipeline_width=width, codec=codec, algorithm=_ALGORITHM.value)
            predicted = plan.step_seconds
            results.note("predicted seconds", f"{name}, {link}, {step_seconds:g}", predicted)
        results.note("step seconds", f"{name}, {link}, {step_seconds:g}", step)
        print(f"  {name:22}" + "".join(f"{each * 1e3:12.1f}" for each in (step, predicted, *others)), flush=True)


def _rounds(calls: Iterable[tuple[str, int]], link: str, experiment: str) -> list[float]:
    """Returns the seconds of a step for each call with its number of updates."""
    about = {"experiment": experiment, "width": _WIDTH.value, "num_steps": _NUM_STEPS.value}
    kinds = [{**about, "call": call, "num_updates": num_updates} for call, num_updates in calls]
    found = turns.run(__file__, kinds * _ROUNDS.value, _FEW, link)
    slowest = [max(each["step"] for each in of_ranks) for of_ranks in found]
    return [statistics.median(slowest[number :: len(kinds)]) for number in range(len(kinds))]


def _time_segments(link: str) -> None:
    calls = {f"K = 1, L = {n}": _call(1, num_segments=int(n)) for n in _SEGMENTS.value} | {"K = 2, L = 1": _call(2)}
    print(f"\nsegments, {link}, {_NUM_LAYERS * _WIDTH.value * (_WIDTH.value + 1) / 1e6:.1f} million parameters, ms")
    seconds = _rounds([(call, 1) for call in calls.values()], link, "segments")
    for label, step in zip(calls, seconds, strict=True):
        print(f"  {label:14} {step * 1e3:8.1f}", flush=True)
        results.note("step seconds", f"{label}, {link}", step)


def _time_replay() -> None:
    widths = [int(width) for width in _WIDTHS.value]
    calls = [
        (_call(width, compensation=compensation), 1 if compensation == "replay" else width)
        for width in widths
        for compensation in ("none", "replay")
    ]
    print(f"\nreplay, momentum: ms per step\n  {'':6} {'K updates':>10} {'replay':>8} {'ratio':>6}")
    seconds = iter(_rounds(calls, ranks.LOOPBACK, "replay"))
    for width, repeated, replay in zip(widths, seconds, seconds, strict=True):
        print(f"  K = {width:<2} {repeated * 1e3:10.2f} {replay * 1e3:8.2f} {replay / repeated:6.3f}", flush=True)
        results.note("replay over K updates", f"momentum, K = {width}", replay / repeated)


def main(argv) -> None:
    del argv
    if "timing" in _EXPERIMENTS.value:
        for link, step_seconds in itertools.product(_LINKS.value, map(float, _STEP_SECONDS.value)):
            _time_systems(link, step_seconds)
    for link in _LINKS.value if "segments" in _EXPERIMENTS.value else ():
        _time_segments(link)
    if "replay" in _EXPERIMENTS.value:
        _time_replay()


if __name__ == "__main__":
    turns.serve(_measure)
    app.run(main)

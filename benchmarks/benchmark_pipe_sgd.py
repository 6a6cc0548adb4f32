"""Pipe-SGD beside synchronous training, by all-reduce (D-Sync) and by a server (PS-Sync): Figure 4 in the small.

    python benchmarks/benchmark_pipe_sgd.py --experiments=timing --links=1e9,100e6
    python benchmarks/benchmark_pipe_sgd.py --experiments=accuracy --tasks=mnist,cifar --cifar10=cifar10.npz

timing     A vector of parameters as large as a model's, and a computation that is emulated, asleep, so that four ranks
           do not take the processor from each other: from settings in which computation takes longer to those in which
           communication does. Milliseconds per step (medians), the part of it that is neither waiting nor the emulated
           computation (update), the communication thread's own time in all-reduce and in codecs, and the step time
           that `hop_tf.timing` predicts from what it has measured once, after D-Sync without a codec. Ratios to D-Sync
           and PS-Sync without a codec, as in the paper, to D-Sync with the same codec, and of Pipe-SGD's step to the
           longer one of computation with update, and communication: both as they are in D-Sync with the same codec,
           where neither disturbs the other.
accuracy   Real training on loopback, with each codec: accuracy on the test data, and seconds from begin to end.

PS-Sync is a plain server loop on a host of its own, as in the paper: it receives all gradients, and sends their mean to
all. (It is one more rank; that its own gradient is part of the mean changes no time.)

Task mnist: 784-500-500-10, global batch 100. cifar: three convolutions, two dense layers. convex: the same, of which
only the last layer is trained. (AlexNet's size in the timings: --num_values=61000000.)
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping

import images
import keras
import models
import numpy as np
import ranks
import results
import tensorflow as tf
from absl import app, flags

import hop_tf
from hop_tf import collectives
from hop_tf.collectives import AllReduce
from hop_tf.tools import timing
from hop_tf.tools.emulation import ComputeEmulation

_EXPERIMENTS = flags.DEFINE_list("experiments", ["timing", "accuracy"], "What to run.")
_LINKS = flags.DEFINE_list("links", ["1e9", "100e6"], "Bits per second; needs root. Or loopback.")
_WORLD_SIZE = flags.DEFINE_integer("world_size", 4, "Ranks.", lower_bound=2)
_STEP_SECONDS = flags.DEFINE_list("step_seconds", ["0.05", "0.2", "0.8"], "Emulated computation of a step.")
_NUM_VALUES = flags.DEFINE_list("num_values", ["648010", "5000000"], "Parameters of the timed models.")
_CODECS = flags.DEFINE_list("codecs", ["truncate16", "int8"], "Codecs, beside none.")
_ALGORITHM = flags.DEFINE_enum("algorithm", "mesh", ["mesh", "ring"], "The all-reduce of all but PS-Sync, timed.")
_NUM_STEPS = flags.DEFINE_integer("num_steps", 24, "Timed steps.", lower_bound=8)
_TASKS = flags.DEFINE_list("tasks", ["mnist", "cifar", "convex"], "What is trained for accuracy.")
_EPOCHS = flags.DEFINE_integer("epochs", 20, "Epochs of the training for accuracy.", lower_bound=2)
_LEARNING_RATE = flags.DEFINE_float("learning_rate", 0.1, "At its highest: a warm-up comes first, then a cosine.")
_WARMUP_EPOCHS = flags.DEFINE_integer("warmup_epochs", 5, "Epochs without a delay of Pipe-SGD, as in the paper.")
_MOMENTUM = flags.DEFINE_float("momentum", 0.0, "Of the training for accuracy; Algorithm 1 has none.")
_SEEDS = flags.DEFINE_integer("seeds", 1, "Trainings of each kind.")
_CIFAR10 = flags.DEFINE_string(
    "cifar10", None, "An .npz file with x_train, y_train, x_test, y_test; else Keras's data."
)

_WIDTHS = {"D-Sync": 1, "Pipe-SGD": 2}
_WARMUP_STEPS = 4
_STEPS_OF_A_MEASUREMENT = 20
_BATCH_SIZE = 100


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


# In each rank.


def _strategy(case: Mapping, rank: int, turn: int, **settings) -> hop_tf.PipeSGDStrategy:
    workers = case["addresses"][turn]  # New ones for each turn: no strategy meets an earlier one of another rank.
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}})
    return hop_tf.PipeSGDStrategy(**settings)


def _run_rank(case: Mapping, rank: int) -> list:
    """Runs all settings in a rank; returns their results."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    run = _time if case["experiment"] == "timing" else _train
    return [
        run(case, functools.partial(_strategy, case, rank, turn, **each)) for turn, each in enumerate(case["settings"])
    ]


def _time(case: Mapping, make_strategy: Callable[..., hop_tf.PipeSGDStrategy]) -> dict:
    strategy = make_strategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), models.Vector(case["num_values"])])
        model.compile(keras.optimizers.SGD(0.0), "mse")
    times, reports = [], []

    def note(batch, logs):
        times.append(time.monotonic())
        if batch == _WARMUP_STEPS:
            reports.append(strategy.report())

    record = keras.callbacks.LambdaCallback(on_train_batch_end=note)
    num_steps = _WARMUP_STEPS + case["num_steps"]
    x = np.zeros((num_steps * strategy.world_size, 1), np.float32)
    model.fit(x, x, batch_size=strategy.world_size, verbose=0, callbacks=[record])
    reports.append(strategy.report())
    measurement = timing.measure(strategy)
    strategy.shutdown()

    def per_step(name: str) -> float:
        before, after = reports
        return (after[name] - before[name]) / (after["steps"] - before["steps"])

    return {
        "step": statistics.median(np.diff(times)[_WARMUP_STEPS:]),
        "compute": reports[-1]["compute_seconds"],
        "communicate": per_step("communicate_seconds"),
        "codec": per_step("codec_seconds"),
        "measurement": measurement,
    }


def _train(case: Mapping, make_strategy: Callable[..., hop_tf.PipeSGDStrategy]) -> tuple[float, float]:
    """Trains; returns the accuracy, and the duration of the training."""
    keras.utils.set_random_seed(case["seed"])
    (x, y), test = images.load("mnist" if case["task"] == "mnist" else "cifar10", case["cifar10"])
    steps = len(x) // _BATCH_SIZE
    strategy = make_strategy(compensation="none", warmup_steps=case["warmup_epochs"] * steps)  # As in the paper.
    with strategy.scope():
        model = _MODELS[case["task"]]()
        rate = keras.optimizers.schedules.CosineDecay(
            0.0, steps * (case["epochs"] - 1), warmup_target=case["learning_rate"], warmup_steps=steps
        )
        optimizer = keras.optimizers.SGD(rate, momentum=case["momentum"])
        model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    start = time.monotonic()
    model.fit(x, y, batch_size=_BATCH_SIZE, epochs=case["epochs"], verbose=0)
    seconds = time.monotonic() - start
    accuracy = model.evaluate(*test, batch_size=500, verbose=0)[1] if strategy.is_chief else 0.0
    strategy.shutdown()
    return accuracy, seconds


def _mnist() -> keras.Model:
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Flatten(),
            layers.Dense(500, activation="relu"),
            layers.Dense(500, activation="relu"),
            layers.Dense(10, activation="softmax"),
        ]
    )


def _cifar(trains_features: bool = True) -> keras.Model:
    layers = keras.layers
    features = [
        layers.Conv2D(16, 5, activation="relu"),
        layers.MaxPooling2D(),
        layers.Conv2D(32, 3, activation="relu"),
        layers.MaxPooling2D(),
        layers.Conv2D(32, 3, activation="relu"),
        layers.Flatten(),
        layers.Dense(64, activation="relu"),
    ]
    for layer in features:
        layer.trainable = trains_features
    return keras.Sequential([keras.Input((32, 32, 3)), *features, layers.Dense(10, activation="softmax")])


_MODELS = {"mnist": _mnist, "cifar": _cifar, "convex": lambda: _cifar(trains_features=False)}


# In the parent.


@dataclasses.dataclass(frozen=True)
class Timed:
    """The times of a way to train.

    Attributes:
      label: Name of the way.
      codec: Name of the codec, or None.
      step: Median duration of a step, at the slowest rank.
      compute: Median duration of a step without waiting: computation and update.
      communicate: Mean time of the communication thread in all-reduce, per step.
      codec_seconds: The part of `communicate` in codecs.
      predicted: Duration of a step by the model, or None.
    """

    label: str
    codec: str | None
    step: float
    compute: float
    communicate: float
    codec_seconds: float
    predicted: float | None


def _codecs() -> list[str | None]:
    return [None, *_CODECS.value]


def _time_case(link: str, num_values: int, step_seconds: float) -> list[Timed]:
    server = [("PS-Sync", 1, "star", codec) for codec in _codecs()]
    peers = [(label, width, _ALGORITHM.value, codec) for label, width in _WIDTHS.items() for codec in _codecs()]
    environment = ComputeEmulation(step_seconds=step_seconds).to_environment()
    of_kinds = []
    for kinds, world_size in ((server, _WORLD_SIZE.value + 1), (peers, _WORLD_SIZE.value)):
        case = {
            "experiment": "timing",
            "settings": [{"pipeline_width": w, "algorithm": a, "codec": c} for _, w, a, c in kinds],
            "num_values": num_values,
            "num_steps": _NUM_STEPS.value,
        }
        num_ports = len(kinds)
        timeout = _timeout_seconds(link, num_values, step_seconds, num_ports)
        of_ranks = ranks.run(
            __file__, case, world_size, link, num_ports=num_ports, environment=environment, timeout_seconds=timeout
        )
        of_kinds.extend(zip(kinds, zip(*of_ranks, strict=True), strict=True))
    timed = []
    measurement = next(of_ranks[0]["measurement"] for (label, *_), of_ranks in of_kinds if label == "D-Sync")
    for (label, width, algorithm, codec), of_ranks in of_kinds:
        predicted = None
        if label != "PS-Sync":
            predicted = measurement.predict(pipeline_width=width, codec=codec, algorithm=algorithm).step_seconds
        slowest = {name: max(each[name] for each in of_ranks) for name in ("step", "compute", "communicate", "codec")}
        timed.append(Timed(label, codec, *slowest.values(), predicted))
    return timed


def _timeout_seconds(link: str, num_values: int, step_seconds: float, num_settings: int) -> float:
    """Returns the limit for the settings: the start, and four times the time of float32 at a server, both ways."""
    at_best = 0.0 if link == ranks.LOOPBACK else 2 * _WORLD_SIZE.value * 4 * num_values * 8 / float(link)
    num_steps = _WARMUP_STEPS + _NUM_STEPS.value + _STEPS_OF_A_MEASUREMENT
    return 300 + 4 * num_settings * num_steps * (step_seconds + at_best)


def _print_timed(link: str, num_values: int, step_seconds: float, timed: list[Timed]) -> None:
    of = {(each.label, each.codec): each for each in timed}
    print(f"\n{link}, {num_values / 1e6:.2f} million parameters, computation {step_seconds * 1e3:.0f} ms")
    print(
        f"  {'':22s} {'step ms':>8s} {'predicted':>10s} {'update':>7s} {'communicate':>12s} {'codec':>7s} "
        f"{'PS-Sync / it':>13s} {'D-Sync / it':>12s} {'same codec':>11s} {'it / longest':>13s}"
    )
    for each in timed:
        d_sync = of["D-Sync", each.codec]
        predicted = f"{each.predicted * 1e3:10.1f}" if each.predicted else f"{'':10s}"
        ratios = [of["PS-Sync", None].step, of["D-Sync", None].step, d_sync.step]
        columns = "".join(f"{r / each.step:{w}.2f}" for r, w in zip(ratios, (14, 13, 12), strict=True))
        if each.label == "Pipe-SGD":
            columns += f"{each.step / max(d_sync.compute, d_sync.communicate):14.2f}"
        label = f"{each.label} {each.codec or ''}"
        print(
            f"  {label:22s} {each.step * 1e3:8.1f} {predicted} {(each.compute - step_seconds) * 1e3:7.1f} "
            f"{each.communicate * 1e3:12.1f} {each.codec_seconds * 1e3:7.1f}{columns}",
            flush=True,
        )
        results.note("step seconds", f"{label.strip()}, {link}, {step_seconds:g}", each.step)
        if each.predicted:
            results.note("predicted seconds", f"{label.strip()}, {link}, {step_seconds:g}", each.predicted)


def _print_accuracies(task: str) -> None:
    print(f"\naccuracy, {task}, {_EPOCHS.value} epochs, {_SEEDS.value} seeds")
    kinds = [(label, width, codec) for label, width in _WIDTHS.items() for codec in _codecs()]
    of_seeds = []
    for seed in range(_SEEDS.value):
        case = {
            "experiment": "accuracy",
            "settings": [{"pipeline_width": width, "codec": codec, "algorithm": "mesh"} for _, width, codec in kinds],
            "task": task,
            "warmup_epochs": _WARMUP_EPOCHS.value,
            "cifar10": _CIFAR10.value,
            "epochs": _EPOCHS.value,
            "learning_rate": _LEARNING_RATE.value,
            "momentum": _MOMENTUM.value,
            "seed": seed,
        }
        of_seeds.append(ranks.run(__file__, case, 2, ranks.LOOPBACK, num_ports=len(kinds), timeout_seconds=3600)[0])
    for (label, _, codec), of_kind in zip(kinds, zip(*of_seeds, strict=True), strict=True):
        accuracies, seconds = zip(*of_kind, strict=True)
        shown = " ".join(f"{accuracy:.4f}" for accuracy in accuracies)
        print(
            f"  {label:9s} {codec or '':11s} {np.mean(accuracies):.4f}  ({shown})  {np.mean(seconds):6.0f} s",
            flush=True,
        )
        results.note("accuracy", f"{task}, {label} {codec or ''}".strip(), accuracies)


def main(argv) -> None:
    del argv
    if "timing" in _EXPERIMENTS.value:
        for link in _LINKS.value:
            for num_values in map(int, _NUM_VALUES.value):
                for step_seconds in map(float, _STEP_SECONDS.value):
                    _print_timed(link, num_values, step_seconds, _time_case(link, num_values, step_seconds))
    if "accuracy" in _EXPERIMENTS.value:
        for task in _TASKS.value:
            _print_accuracies(task)


if __name__ == "__main__":
    ranks.serve(_run_rank)
    app.run(main)

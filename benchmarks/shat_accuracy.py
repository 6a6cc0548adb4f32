"""The experiments `accuracy` and `stragglers` of `benchmark_shat.py`: the effect of mixing weights on accuracy.

Time is virtual: steps have given durations, from which the order of pushes follows. So one core is enough for 16
workers, and a slow worker costs nothing. The server and the mixing weight are those of hop_tf (`ServedGroup`, with
Keras's optimizer). A worker is its model, and Algorithm 1.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import images
import keras
import numpy as np
import results
import tensorflow as tf
from absl import flags

from hop_tf.keras_hook.optimizers import serialized_for_server
from hop_tf.runtime.replica_state import spec_of
from hop_tf.strategies.shat.server.consistency import Asynchronous
from hop_tf.strategies.shat.server.group import Gradient, ServedGroup
from hop_tf.strategies.shat.server.shard import Shard
from hop_tf.strategies.shat.server.state import ShardState
from hop_tf.strategies.shat.settings import ShatSettings
from hop_tf.tensors.packing import Packing

_DATASET = flags.DEFINE_enum("dataset", "fashion_mnist", ["fashion_mnist", "cifar10"], "What is trained.")
_CIFAR10 = flags.DEFINE_string(
    "cifar10", None, "An .npz file with x_train, y_train, x_test, y_test; else Keras's data."
)
_NUM_SAMPLES = flags.DEFINE_integer("num_samples", None, "So many of the data, at most. Default: all.")
_MODELS_USED = flags.DEFINE_list("models", ["residual", "vgg"], "What is trained: residual, vgg, small.")
_METHODS_USED = flags.DEFINE_list(
    "methods", ["ensemble", "asp", "shat_root", "shat"], "Or inverse (1 / n), or a number."
)
WORLD_SIZES = flags.DEFINE_list("world_sizes", ["2", "4", "8", "16"], "Numbers of workers.")
_SLOWDOWNS = flags.DEFINE_list("slowdowns", ["1", "2", "10", "100"], "How much slower one worker is in `stragglers`.")
_STRAGGLER_WORKERS = flags.DEFINE_integer("straggler_workers", None, "Of `stragglers`. Default: the most.", 1)
EPOCHS = flags.DEFINE_float("epochs", 5.0, "So many times as many samples as there are, of all workers.")
SEEDS = flags.DEFINE_integer("seeds", 3, "Trainings of each kind.", lower_bound=1)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 32, "Samples of a push.", lower_bound=1)
_LEARNING_RATES = flags.DEFINE_list("learning_rates", ["0.05"], "Each method has that which suits it best.")
_DECAY = flags.DEFINE_enum("decay", "none", ["none", "cosine"], "How learning rates fall, to 0, over the training.")
_NUM_HELD_OUT = flags.DEFINE_integer("num_held_out", 2000, "Of the data, to choose learning rates by.", lower_bound=1)
_MOMENTUM = flags.DEFINE_float("momentum", 0.0, "Of the server's optimizer.")
_MIN_MIXING = flags.DEFINE_float("min_mixing", None, "Least weight of shat and shat_root. Default: 1 / n.")

# Relative differences of steps between workers, and over time.
_JITTER = 0.1
_NUM_EVALUATIONS = 8
_EVALUATION_BATCH = 500
# A learning rate is stable if it reaches at least this part of the best one's accuracy.
_STABLE_SHARE = 0.9


class _Data(NamedTuple):
    train: images.Part
    held_out: images.Part
    test: images.Part


@dataclasses.dataclass(frozen=True)
class Case:
    """A training and its settings."""

    model: str
    method: str
    num_workers: int
    rate: float
    seed: int
    slowdown: float = 1.0


@dataclasses.dataclass(frozen=True)
class Trained:
    """The results of a training.

    Attributes:
      case: The training.
      times: Times at which the server's model was evaluated, in steps of a worker.
      accuracies: Test accuracies of the server's model at these times.
      workers: Mean final accuracy of the workers' own models, or None if it was not measured.
      held_out: Accuracy on held-out data of the model or models that `accuracy` is about.
    """

    case: Case
    times: Sequence[float]
    accuracies: Sequence[float]
    workers: float | None
    held_out: float

    @property
    def accuracy(self) -> float:
        """The method's final test accuracy: of the server's model, or of the workers' models if they were measured."""
        return self.accuracies[-1] if self.workers is None else self.workers


def run_accuracy() -> None:
    """Runs Table 2, and Figure 4."""
    data, trained = _load(), []
    print(f"\naccuracy, {_about(data)}; mean over {SEEDS.value} seeds [learning rate; largest stable one]")
    print(f"  {'model':10} {'workers':>7} " + " ".join(f"{method:>22}" for method in _METHODS_USED.value))
    for model, num_workers in itertools.product(_MODELS_USED.value, map(int, WORLD_SIZES.value)):
        shown, over_time = [], []
        for method in _METHODS_USED.value:
            for rate, seed in itertools.product(map(float, _LEARNING_RATES.value), range(SEEDS.value)):
                found = _train(Case(model, method, num_workers, rate, seed), data)
                trained.append(found)
            chosen, largest = _chosen(trained, model, method, num_workers)
            accuracies, rate = [each.accuracy for each in chosen], chosen[0].case.rate
            results.note("accuracy", f"{model}, {num_workers} workers, {method}", accuracies)
            shown.append(f"{np.mean(accuracies):10.4f} [{rate:g}; {largest:g}]".rjust(22))
            if method != "ensemble":
                over_time.append(f"    {method:>10}, each eighth: " + _shown_over_time(chosen))
        print(f"  {model:10} {num_workers:7} " + " ".join(shown), *over_time, sep="\n", flush=True)


def _shown_over_time(chosen: Sequence[Trained]) -> str:
    return " ".join(f"{accuracy:.4f}" for accuracy in np.mean([each.accuracies for each in chosen], axis=0))


def run_stragglers() -> None:
    """Runs Figure 5."""
    data = _load()
    num_workers = _STRAGGLER_WORKERS.value or max(map(int, WORLD_SIZES.value))
    print(f"\none slow worker of {num_workers}, {_about(data)}; accuracy after as many pushes, and the time of these")
    print(f"  {'model':10} {'method':>10} " + " ".join(f"{'x' + text:>18}" for text in _SLOWDOWNS.value))
    methods = [method for method in _METHODS_USED.value if method != "ensemble"]
    rate = float(_LEARNING_RATES.value[0])
    for model, method in itertools.product(_MODELS_USED.value, methods):
        shown = []
        for slowdown in map(float, _SLOWDOWNS.value):
            found = []
            for seed in range(SEEDS.value):
                found.append(_train(Case(model, method, num_workers, rate, seed, slowdown), data))
            accuracy = np.mean([t.accuracy for t in found])
            results.note("stragglers: accuracy", f"{model}, {method}, x{slowdown:g}", [t.accuracy for t in found])
            seconds = np.mean([t.times[-1] for t in found])
            shown.append(f"{accuracy:.4f} {seconds:8.0f}".rjust(18))
        print(f"  {model:10} {method:>10} " + " ".join(shown), flush=True)


def _chosen(trained: Sequence[Trained], model: str, method: str, num_workers: int) -> tuple[Sequence[Trained], float]:
    """Returns the trainings with the best learning rate on held-out data, and the largest stable rate."""
    by_rate: dict[float, list[Trained]] = {}
    for each in trained:
        case = each.case
        if (case.model, case.method, case.num_workers) == (model, method, num_workers):
            by_rate.setdefault(case.rate, []).append(each)
    held_out = {rate: np.mean([each.held_out for each in of_rate]) for rate, of_rate in by_rate.items()}
    best = max(held_out, key=held_out.get)
    largest = max(rate for rate in held_out if held_out[rate] >= _STABLE_SHARE * held_out[best])
    return by_rate[best], largest


def _about(data: _Data) -> str:
    what = f"{_DATASET.value}, {len(data.train[0])} samples, {EPOCHS.value:g} epochs"
    return f"{what}, momentum {_MOMENTUM.value:g}, decay {_DECAY.value}"


# A training on a virtual clock.


def _train(case: Case, data: _Data) -> Trained:
    shape = data.train[0].shape[1:]
    problem = _problem(case.model, shape)
    keras.utils.set_random_seed(case.seed)
    initial = problem.values_of(_MODELS[case.model](shape))
    group = problem.make_group(case.num_workers, initial)
    settings = _settings(case)
    num_pushes = int(EPOCHS.value * len(data.train[0]) / _BATCH_SIZE.value)
    evaluations = {num_pushes * (k + 1) // _NUM_EVALUATIONS for k in range(_NUM_EVALUATIONS)}
    batches = [_batches(data.train, rank, case) for rank in range(case.num_workers)]
    weights = [initial] * case.num_workers
    sequences = [0] * case.num_workers
    times, accuracies = [], []
    for number, (now, rank) in zip(range(1, num_pushes + 1), _turns(case), strict=False):
        gradient = problem.gradient(weights[rank], *next(batches[rank]))
        sequences[rank] += 1
        rate = case.rate * _share_of_rate((number - 1) / num_pushes)
        (answer,) = group.push(rank, Gradient(sequences[rank], [gradient], rate))
        alpha = settings.weight(answer.num_others, answer.num_workers)
        local = weights[rank] - np.float32(rate / (1 - _MOMENTUM.value)) * gradient
        weights[rank] = np.float32(1 - alpha) * local + np.float32(alpha) * answer.buckets[0]
        if number in evaluations:
            times.append(now)
            accuracies.append(problem.accuracy(answer.buckets[0], data.test))
    workers, shown = None, [answer.buckets[0]]
    if case.method == "ensemble":
        workers, shown = float(np.mean([problem.accuracy(each, data.test) for each in weights])), weights
    held_out = float(np.mean([problem.accuracy(each, data.held_out) for each in shown]))
    return Trained(case, times, accuracies, workers, held_out)


def _share_of_rate(progress: float) -> float:
    """Returns the factor of the learning rate when the share `progress` of all pushes is done."""
    return 1.0 if _DECAY.value == "none" else (1 + math.cos(math.pi * progress)) / 2


def _turns(case: Case) -> Iterator[tuple[float, int]]:
    """Yields the time of each push and the worker that pushes."""
    generator = np.random.default_rng([case.seed, case.num_workers])
    speeds = 1 + _JITTER * generator.random(case.num_workers)
    speeds[0] *= case.slowdown
    queue = [(speed, rank) for rank, speed in enumerate(speeds)]
    heapq.heapify(queue)
    while True:
        now, rank = queue[0]
        yield now, rank
        heapq.heapreplace(queue, (now + speeds[rank] * (1 + _JITTER * generator.normal()), rank))


def _batches(part: images.Part, rank: int, case: Case) -> Iterator[images.Part]:
    """Yields batches of a worker's share of the data of each epoch."""
    x, y = part
    for epoch in itertools.count():
        order = np.random.default_rng([case.seed, epoch]).permutation(len(x))[rank :: case.num_workers]
        for start in range(0, max(1, len(order) - _BATCH_SIZE.value + 1), _BATCH_SIZE.value):
            chosen = order[start : start + _BATCH_SIZE.value]
            yield x[chosen], y[chosen]


def _settings(case: Case) -> ShatSettings:
    mixing = 1 / case.num_workers if case.method == "inverse" else case.method
    if case.method.replace(".", "", 1).isdigit():
        mixing = float(case.method)
    return ShatSettings(
        mixing=mixing,
        pushes="gradients",
        sharding="none",
        consistency="async",
        max_staleness=16,
        min_mixing=_MIN_MIXING.value,
        log_base=math.e,
        codec=None,
    )


@functools.cache
def _problem(model: str, shape: Sequence[int]) -> _Problem:
    """Returns the problem of a model, traced once for all trainings."""
    return _Problem(_MODELS[model](shape))


class _Problem:
    """A model as functions of one vector."""

    def __init__(self, model: keras.Model):
        self._model = model
        self._packing = Packing([spec_of(variable.value) for variable in model.trainable_variables])
        self._loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self._gradient = tf.function(self._emit_gradient, reduce_retracing=True)
        self._predict = tf.function(self._emit_predict, reduce_retracing=True)

    def values_of(self, model: keras.Model) -> np.ndarray:
        """Returns the present values of a model of that kind."""
        return self._packing.pack([variable.value.read_value() for variable in model.trainable_variables])[0].numpy()

    def make_group(self, num_workers: int, initial: np.ndarray) -> ServedGroup:
        """Makes a server that begins with these values."""
        optimizer = serialized_for_server(keras.optimizers.SGD(0.1, momentum=_MOMENTUM.value))
        shard = Shard(self._packing, optimizer, [True] * len(self._packing.specs))
        group = ServedGroup(shard, self._packing, Asynchronous())
        group.assign(ShardState([initial]))
        group.begin_session(range(num_workers))
        return group

    def gradient(self, weights: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Returns the gradient of the mean loss of a batch."""
        return self._gradient(tf.constant(weights), x, y).numpy()

    def accuracy(self, weights: np.ndarray, test: images.Part) -> float:
        """Returns the accuracy on the test data."""
        x, y = test
        parts = range(0, len(x), _EVALUATION_BATCH)
        found = [self._predict(tf.constant(weights), x[i : i + _EVALUATION_BATCH]).numpy() for i in parts]
        return float(np.mean(np.concatenate(found) == y.ravel()))

    def _call(self, weights: tf.Tensor, x: tf.Tensor, training: bool) -> tf.Tensor:
        return self._model.stateless_call(self._packing.unpack([weights]), [], x, training=training)[0]

    def _emit_gradient(self, weights: tf.Tensor, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(weights)
            loss = self._loss(y, self._call(weights, x, True))
        return tape.gradient(loss, weights)

    def _emit_predict(self, weights: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
        return tf.argmax(self._call(weights, x, False), axis=-1)


# Small versions of models. They normalize over groups instead of batches: there are no moving statistics.


def _residual(shape: Sequence[int]) -> keras.Model:
    layers = keras.layers

    def convolution(x, filters: int, size: int, strides: int = 1):
        x = layers.Conv2D(filters, size, strides, "same", use_bias=False, kernel_initializer="he_normal")(x)
        return layers.GroupNormalization(groups=4)(x)

    inputs = keras.Input(shape)
    x = layers.MaxPooling2D()(layers.ReLU()(convolution(inputs, 16, 3)))
    for filters, strides in ((16, 1), (32, 2), (64, 2)):
        inner = convolution(layers.ReLU()(convolution(x, filters, 3, strides)), filters, 3)
        x = layers.ReLU()(inner + (x if strides == 1 else convolution(x, filters, 1, strides)))
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))


def _vgg(shape: Sequence[int]) -> keras.Model:
    """Convolutions, and dense layers that hold nine tenths of the parameters."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input(shape),
            *(
                layer
                for filters in (16, 32)
                for layer in (
                    layers.Conv2D(filters, 3, padding="same", activation="relu", kernel_initializer="he_normal"),
                    layers.Conv2D(filters, 3, padding="same", activation="relu", kernel_initializer="he_normal"),
                    layers.MaxPooling2D(),
                )
            ),
            layers.Flatten(),
            layers.Dense(128, "relu", kernel_initializer="he_normal"),
            layers.Dense(10),
        ]
    )


def _small(shape: Sequence[int]) -> keras.Model:
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input(shape),
            layers.Conv2D(8, 3, 2, activation="relu"),
            layers.Conv2D(16, 3, 2, activation="relu"),
            layers.Flatten(),
            layers.Dense(64, "relu"),
            layers.Dense(10),
        ]
    )


_MODELS: Mapping[str, Callable] = {"residual": _residual, "vgg": _vgg, "small": _small}


def _load() -> _Data:
    (x, y), test = images.load(_DATASET.value, _CIFAR10.value)
    end = len(x) - _NUM_HELD_OUT.value
    train = slice(min(_NUM_SAMPLES.value or end, end))
    return _Data((x[train], y[train]), (x[end:], y[end:]), test)

"""Measures the effect of SHAT's mixing of weights on accuracy: the paper's Table 2 in the small, ASP beside SHAT.

    python benchmarks/benchmark_shat.py --world_sizes=16 --learning_rates=0.025,0.05,0.1

A small convolutional network is trained on Fashion-MNIST with plain SGD, whose learning rate falls to 0. Time is
virtual: steps have given durations, from which the order of pushes follows. So one core is enough for 16 workers. The
server and the mixing weight are those of hop_tf (`ServedGroup`, with Keras's optimizer). A worker is its model, and
Algorithm 1. Shown are the accuracy of the server's model with that learning rate which is best on held-out data, and
the largest stable rate: one that reaches nine tenths of the best one's accuracy.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator

import images
import keras
import numpy as np
import results
import tensorflow as tf
from absl import app, flags, logging

from hop_tf.keras_hook.optimizers import serialized_for_server
from hop_tf.runtime.replica_state import spec_of
from hop_tf.strategies.shat.server.consistency import Asynchronous
from hop_tf.strategies.shat.server.group import Gradient, ServedGroup
from hop_tf.strategies.shat.server.shard import Shard
from hop_tf.strategies.shat.server.state import ShardState
from hop_tf.strategies.shat.settings import ShatSettings
from hop_tf.tensors.packing import Packing

_NUM_SAMPLES = flags.DEFINE_integer("num_samples", 60_000, "Images, at most: to train with, and held out.")
_WORLD_SIZES = flags.DEFINE_list("world_sizes", ["16"], "Numbers of workers.")
_EPOCHS = flags.DEFINE_float("epochs", 5.0, "Times that all workers together see as many images as there are.")
_SEEDS = flags.DEFINE_integer("seeds", 3, "Trainings of each kind.", lower_bound=1)
_LEARNING_RATES = flags.DEFINE_list("learning_rates", ["0.025", "0.05"], "Learning rates to choose from.")

_METHODS = ("asp", "shat")
_SETTINGS = {"pushes": "gradients", "sharding": "none", "consistency": "async", "codec": None}
_SETTINGS |= {"max_staleness": 16, "min_mixing": None, "log_base": math.e}
_NUM_HELD_OUT = 2000
_BATCH_SIZE = 32  # Of a push.
_JITTER = 0.1  # Relative differences of steps between workers, and over time.
_STABLE_SHARE = 0.9


class _Problem:
    """A model as functions of one vector."""

    def __init__(self, shape: tuple[int, ...]):
        self._model = _model(shape)
        self._packing = Packing([spec_of(variable.value) for variable in self._model.trainable_variables])
        self._loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self._gradient = tf.function(self._emit_gradient, reduce_retracing=True)
        self._shape = shape

    def initial(self, seed: int) -> np.ndarray:
        """Returns the initial values of a new model."""
        keras.utils.set_random_seed(seed)
        variables = _model(self._shape).trainable_variables
        return self._packing.pack([variable.value.read_value() for variable in variables])[0].numpy()

    def make_group(self, num_workers: int, initial: np.ndarray) -> ServedGroup:
        """Makes a server that begins with these values."""
        optimizer = serialized_for_server(keras.optimizers.SGD(0.1))
        shard = Shard(self._packing, optimizer, [True] * len(self._packing.specs))
        group = ServedGroup(shard, self._packing, Asynchronous())
        group.assign(ShardState([initial]))
        group.begin_session(range(num_workers))
        return group

    def gradient(self, weights: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Returns the gradient of the mean loss of a batch."""
        return self._gradient(tf.constant(weights), x, y).numpy()

    def accuracy(self, weights: np.ndarray, part: images.Part) -> float:
        """Returns the accuracy on some data."""
        for variable, value in zip(self._model.trainable_variables, self._packing.unpack([weights]), strict=True):
            variable.assign(value)
        return images.accuracy(self._model, part)

    def _emit_gradient(self, weights: tf.Tensor, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(weights)
            values = self._packing.unpack([weights])
            loss = self._loss(y, self._model.stateless_call(values, [], x, training=True)[0])
        return tape.gradient(loss, weights)


def _model(shape: tuple[int, ...]) -> keras.Model:
    layers = keras.layers
    convolutions = [layers.Conv2D(filters, 3, 2, activation="relu") for filters in (8, 16)]
    return keras.Sequential(
        [keras.Input(shape), *convolutions, layers.Flatten(), layers.Dense(64, "relu"), layers.Dense(10)]
    )


def _train(
    problem: _Problem, method: str, num_workers: int, top_rate: float, seed: int, train: images.Part
) -> np.ndarray:
    """Returns the weights of the server after a training on the virtual clock."""
    initial = problem.initial(seed)
    group = problem.make_group(num_workers, initial)
    settings = ShatSettings(mixing=method, **_SETTINGS)
    num_pushes = int(_EPOCHS.value * len(train[0]) / _BATCH_SIZE)
    batches = [_batches(train, rank, num_workers, seed) for rank in range(num_workers)]
    weights, sequences = [initial] * num_workers, [0] * num_workers
    model = initial
    for number, rank in enumerate(itertools.islice(_turns(num_workers, seed), num_pushes)):
        gradient = problem.gradient(weights[rank], *next(batches[rank]))
        sequences[rank] += 1
        rate = top_rate * (1 + math.cos(math.pi * number / num_pushes)) / 2
        (answer,) = group.push(rank, Gradient(sequences[rank], [gradient], rate))
        alpha, model = settings.weight(answer.num_others, answer.num_workers), answer.buckets[0]
        local = weights[rank] - np.float32(rate) * gradient
        weights[rank] = np.float32(1 - alpha) * local + np.float32(alpha) * model
    return model


def _turns(num_workers: int, seed: int) -> Iterator[int]:
    """Yields the worker that pushes next."""
    generator = np.random.default_rng([seed, num_workers])
    speeds = 1 + _JITTER * generator.random(num_workers)
    queue = [(speed, rank) for rank, speed in enumerate(speeds)]
    heapq.heapify(queue)
    while True:
        now, rank = queue[0]
        yield rank
        heapq.heapreplace(queue, (now + speeds[rank] * (1 + _JITTER * generator.normal()), rank))


def _batches(part: images.Part, rank: int, num_workers: int, seed: int) -> Iterator[images.Part]:
    """Yields batches of a worker's share of the data of each epoch."""
    x, y = part
    for epoch in itertools.count():
        order = np.random.default_rng([seed, epoch]).permutation(len(x))[rank::num_workers]
        for start in range(0, max(1, len(order) - _BATCH_SIZE + 1), _BATCH_SIZE):
            chosen = order[start : start + _BATCH_SIZE]
            yield x[chosen], y[chosen]


def main(_: list[str]) -> None:
    logging.set_verbosity(logging.ERROR)
    (x, y), test = images.load("fashion_mnist")
    end = len(x) - _NUM_HELD_OUT
    used = slice(min(_NUM_SAMPLES.value, end))
    train, held_out = (x[used], y[used]), (x[end:], y[end:])
    problem = _Problem(x.shape[1:])
    for num_workers, method in itertools.product(map(int, _WORLD_SIZES.value), _METHODS):
        found = {}
        for rate in map(float, _LEARNING_RATES.value):
            models = [_train(problem, method, num_workers, rate, seed, train) for seed in range(_SEEDS.value)]
            own, of_test = ([problem.accuracy(each, part) for each in models] for part in (held_out, test))
            found[rate] = np.mean(own), of_test
        best = max(found, key=lambda rate: found[rate][0])
        largest = max(rate for rate, (own, _) in found.items() if own >= _STABLE_SHARE * found[best][0])
        rates = {"learning rate": best, "largest stable rate": largest}
        results.show(f"{num_workers} workers, {method}", {"accuracy": found[best][1], **rates})


if __name__ == "__main__":
    app.run(main)

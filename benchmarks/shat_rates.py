"""The experiment `rates` of `benchmark_shat.py`: the learning rate and momentum that synchronous training stands.

Time is virtual, as in `shat_accuracy.py`: the server and the mixing weight are those of hop_tf. A worker is its model,
its Keras optimizer, and Algorithm 1. Each batch is divided among the workers, as in `fit`, so that all trainings see
the same number of images.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

import images
import keras
import numpy as np
import results
import tensorflow as tf
from absl import flags
from shat_accuracy import EPOCHS, SEEDS, WORLD_SIZES

from hop_tf.keras_hook.optimizers import serialized_for_server
from hop_tf.runtime.replica_state import spec_of
from hop_tf.strategies.shat.server.consistency import Asynchronous
from hop_tf.strategies.shat.server.group import Gradient, ServedGroup
from hop_tf.strategies.shat.server.shard import Shard
from hop_tf.strategies.shat.server.state import ShardState
from hop_tf.strategies.shat.settings import ShatSettings
from hop_tf.tensors.packing import Packing

_OPTIMIZERS_USED = flags.DEFINE_list("optimizers", ["momentum", "sgd", "adam"], "What `rates` trains with.")
_PUSHES = flags.DEFINE_list("pushes", ["gradients", "steps"], "What workers push in `rates`.")
_GLOBAL_BATCH = flags.DEFINE_integer("global_batch", 96, "Images of a step of all workers in `rates`.", lower_bound=16)
_RATE_SAMPLES = flags.DEFINE_integer("rate_samples", 6000, "Images that `rates` trains with.", lower_bound=1000)

_OPTIMIZERS: dict[str, Callable[[], keras.optimizers.Optimizer]] = {
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "sgd": lambda: keras.optimizers.SGD(0.3),
    "adam": lambda: keras.optimizers.Adam(0.001),
}
_JITTER = 0.1
_NUM_TESTED = 2000


def run_rates() -> None:
    """Trains with each optimizer alone, and with each number of workers and kind of push; prints accuracies."""
    world_sizes, num_epochs, num_seeds = [int(n) for n in WORLD_SIZES.value], int(EPOCHS.value), SEEDS.value
    (x, y), (x_test, y_test) = images.load("fashion_mnist", num_rows=_RATE_SAMPLES.value)
    part = x.reshape(len(x), -1), y
    test = x_test[:_NUM_TESTED].reshape(_NUM_TESTED, -1), y_test[:_NUM_TESTED]
    print(f"\naccuracy, {len(x)} images of Fashion-MNIST, {num_epochs} epochs, batches of {_GLOBAL_BATCH.value}")
    for name in _OPTIMIZERS_USED.value:
        for pushes, num_workers in [("alone", 1), *((p, n) for p in _PUSHES.value for n in world_sizes)]:
            found = []
            for seed in range(num_seeds):
                training = _Training(_OPTIMIZERS[name], pushes, num_workers, seed)
                found.append(training.run(part, test, num_epochs))
            results.note("rates: accuracy", f"{name}, {pushes}, {num_workers}", found)
            each = " ".join(f"{accuracy:.3f}" for accuracy in found)
            print(f"  {name:10} {pushes:10} {num_workers:3}  mean {np.mean(found):.3f}  ({each})", flush=True)


class _Training:
    """Workers and a server on a virtual clock. `pushes` "alone" is one process with Keras's optimizer."""

    def __init__(self, make_optimizer: Callable, pushes: str, num_workers: int, seed: int):
        self._seed, self._num_workers, self._pushes = seed, num_workers, pushes
        self._settings = ShatSettings(
            mixing="shat",
            pushes="steps" if pushes == "alone" else pushes,
            sharding="none",
            consistency="async",
            max_staleness=16,
            min_mixing=None,
            log_base=np.e,
            codec=None,
        )
        keras.utils.set_random_seed(seed)
        layers = [keras.layers.Dense(512, "relu"), keras.layers.Dense(256, "relu"), keras.layers.Dense(10)]
        self._model = keras.Sequential([keras.Input((784,)), *layers])
        variables = [variable.value for variable in self._model.trainable_variables]
        self._packing = Packing([spec_of(variable) for variable in variables])
        self._loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self._gradient = tf.function(self._emit_gradient, reduce_retracing=True)
        self._initial = self._packing.pack([variable.read_value() for variable in variables])[0].numpy()
        self._workers = [_Worker(make_optimizer(), self._initial) for _ in range(num_workers)]
        served = keras.optimizers.SGD() if self._settings.pushes == "steps" else make_optimizer()
        shard = Shard(self._packing, serialized_for_server(served), [False] * len(variables))
        self._server = ServedGroup(shard, self._packing, Asynchronous())
        self._server.assign(ShardState([self._initial]))
        self._server.begin_session(range(num_workers))

    def run(self, part: images.Part, test: images.Part, num_epochs: int) -> float:
        """Trains; returns the accuracy of the server's model."""
        batches = [self._batches(part, rank, num_epochs) for rank in range(self._num_workers)]
        num_rounds = len(part[0]) // _GLOBAL_BATCH.value * num_epochs
        answer, turns = None, self._turns()
        for _ in range(num_rounds * self._num_workers):
            worker = self._workers[rank := next(turns)]
            answer = self._push(rank, worker, *next(batches[rank]))
        x, y = test
        return float(np.mean(np.argmax(self._logits(tf.constant(answer), x, False), axis=1) == y.ravel()))

    def _push(self, rank: int, worker: _Worker, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Makes a step of a worker; returns the server's model after the step."""
        before = worker.weights
        gradient = self._gradient(tf.constant(before), x, y).numpy()
        local = worker.step(gradient)
        worker.number += 1
        if self._settings.pushes == "steps":
            push = Gradient(worker.number, [before - local], self._settings.share(self._num_workers))
        else:
            rate = float(worker.optimizer.learning_rate)
            push = Gradient(worker.number, [gradient], rate)
            local = before - rate / (1 - getattr(worker.optimizer, "momentum", 0.0)) * gradient
        (answer,) = self._server.push(rank, push)
        weight = self._settings.weight(answer.num_others, answer.num_workers)
        model = answer.buckets[0]
        worker.weights = ((1 - weight) * local + weight * model).astype(np.float32)
        return model

    def _batches(self, part: images.Part, rank: int, num_epochs: int) -> Iterator[images.Part]:
        """Yields a worker's rows of each batch."""
        size = _GLOBAL_BATCH.value
        for epoch in range(num_epochs + 1):  # In the end a fast worker is in a further epoch.
            order = np.random.default_rng([self._seed, epoch]).permutation(len(part[0]))
            for start in range(0, len(order) - size + 1, size):
                rows = np.array_split(order[start : start + size], self._num_workers)[rank]
                yield part[0][rows], part[1][rows]

    def _turns(self) -> Iterator[int]:
        """Yields the worker that pushes next."""
        generator = np.random.default_rng([self._seed, self._num_workers])
        queue = [(1 + _JITTER * generator.normal(), rank) for rank in range(self._num_workers)]
        heapq.heapify(queue)
        while True:
            now, rank = queue[0]
            yield rank
            heapq.heapreplace(queue, (now + max(0.2, 1 + _JITTER * generator.normal()), rank))

    def _logits(self, weights: tf.Tensor, x: np.ndarray, training: bool) -> tf.Tensor:
        return self._model.stateless_call(self._packing.unpack([weights]), [], x, training=training)[0]

    def _emit_gradient(self, weights: tf.Tensor, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(weights)
            loss = self._loss(y, self._logits(weights, x, True))
        return tape.gradient(loss, weights)


class _Worker:
    """A worker's model, as one vector, and its optimizer.

    Attributes:
      weights: The model.
      optimizer: The optimizer.
      number: Number of the last push.
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer, initial: np.ndarray):
        self.weights, self.optimizer, self.number = initial.copy(), optimizer, 0
        self._variable = keras.Variable(initial)
        optimizer.build([self._variable])
        self._apply = tf.function(lambda gradient: optimizer.apply([gradient], [self._variable]))

    def step(self, gradient: np.ndarray) -> np.ndarray:
        """Applies the optimizer to the weights; returns the new weights."""
        self._variable.assign(self.weights)
        self._apply(tf.constant(gradient))
        return self._variable.numpy()

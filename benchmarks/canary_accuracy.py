"""The experiment `convergence` of `benchmark_canary.py`: the effect of the sketch on accuracy (Figure 22).

Ranks are simulated: all train with the same weights, each on its part of a batch. The mean of their gradients equals
that of an all-reduce over a mesh. In a share of the steps its codec is the sketch, otherwise none. Nothing is timed.
"""

from __future__ import annotations

from collections.abc import Sequence

import images
import keras
import numpy as np
import results
import tensorflow as tf
from absl import flags

from hop_tf import codecs
from hop_tf.tensors.buffers import BufferPool

_DATASET = flags.DEFINE_enum("dataset", "fashion_mnist", ["fashion_mnist", "cifar10"], "Of `convergence`.")
CIFAR10 = flags.DEFINE_string("cifar10", None, "An .npz file with x_train, y_train, x_test, y_test; else Keras's data.")
_SHARES = flags.DEFINE_list("shares", ["0", "0.5", "1"], "Shares of the steps in which gradients are sketched.")
_NUM_ROWS = flags.DEFINE_integer("num_rows", 20_000, "Images to train with in `convergence`, at most.", lower_bound=1)
BATCH_SIZE = flags.DEFINE_integer(
    "batch_size", 128, "Of all ranks together, where accuracy is measured.", lower_bound=1
)

_MOMENTUM = 0.9


def run(world_size: int, epochs: int, learning_rate: float, num_seeds: int) -> None:
    """Prints and keeps the accuracies.

    Args:
      world_size: Number of ranks.
      epochs: Number of epochs of each training.
      learning_rate: The initial learning rate, which falls to 0 along a cosine.
      num_seeds: Number of trainings of each kind.
    """
    data = images.load(_DATASET.value, CIFAR10.value, _NUM_ROWS.value)
    print(
        f"\nconvergence, {_DATASET.value}, {len(data[0][0])} rows, {epochs} epochs, {world_size} ranks; sketched steps"
    )
    of_first = None
    for share in map(float, _SHARES.value):
        accuracies = []
        for seed in range(num_seeds):
            model = _train(data[0], world_size, epochs, learning_rate, share, seed)
            accuracies.append(images.accuracy(model, data[1]))
        of_first = np.array(accuracies) if of_first is None else of_first
        results.note("convergence: accuracy", f"{share:.0%} sketched", accuracies)
        _print(share, accuracies, np.subtract(accuracies, of_first))


def _print(share: float, accuracies: Sequence[float], differences: np.ndarray) -> None:
    error = results.standard_error(differences)
    of_seeds = " ".join(f"{each:.4f}" for each in accuracies)
    print(f"  {share:4.0%} {np.mean(accuracies):8.4f} {differences.mean():+8.4f} ±{error:.4f}   {of_seeds}", flush=True)


def _train(
    part: images.Part, world_size: int, epochs: int, learning_rate: float, share: float, seed: int
) -> keras.Model:
    """Returns the trained model."""
    keras.utils.set_random_seed(seed)
    x, y = part
    model = _model(x.shape[1:])
    num_batches = len(x) // BATCH_SIZE.value
    rate = keras.optimizers.schedules.CosineDecay(learning_rate, epochs * num_batches)
    optimizer = keras.optimizers.SGD(rate, momentum=_MOMENTUM)
    weights = model.trainable_variables
    optimizer.build(weights)
    sizes = [int(np.prod(weight.shape)) for weight in weights]

    @tf.function
    def gradient_of(rows: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(labels, model(rows, training=True)))
        gradients = tape.gradient(loss, [weight.value for weight in weights])
        return tf.concat([tf.reshape(gradient, [-1]) for gradient in gradients], 0)

    @tf.function
    def apply(mean: tf.Tensor) -> None:
        parts = tf.split(mean, sizes)
        optimizer.apply([tf.reshape(part, weight.shape) for part, weight in zip(parts, weights, strict=True)], weights)

    generator = np.random.default_rng(seed)
    all_reduce = AllReduce(world_size)
    for _ in range(epochs):
        for rows in np.array_split(generator.permutation(len(x))[: num_batches * BATCH_SIZE.value], num_batches):
            gradients = [gradient_of(x[own], y[own]).numpy() for own in np.array_split(rows, world_size)]
            apply(tf.constant(all_reduce.mean(gradients, is_sketched=generator.random() < share)))
    return model


class AllReduce:
    """Computes the mean of a mesh of ranks, each of which sums up a piece. Pieces are encoded both ways."""

    def __init__(self, world_size: int):
        self._world_size = world_size
        self._codec = codecs.get("sketch")
        self._pool = BufferPool()

    def mean(self, vectors: Sequence[np.ndarray], is_sketched: bool) -> np.ndarray:
        if not is_sketched:
            return np.mean(vectors, axis=0)
        result = np.empty_like(vectors[0])
        bounds = np.linspace(0, result.size, self._world_size + 1).astype(int)
        for owner, piece in enumerate(map(slice, bounds[:-1], bounds[1:])):
            total = vectors[owner][piece].copy()
            for rank, vector in enumerate(vectors):
                if rank != owner:
                    self._codec.accumulate(self._codec.encode(vector[piece], self._pool), total)
            self._codec.decode(self._codec.encode(total / np.float32(self._world_size), self._pool), result[piece])
        return result


def _model(shape: Sequence[int]) -> keras.Model:
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input(shape),
            layers.Conv2D(16, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(10, activation="softmax"),
        ]
    )

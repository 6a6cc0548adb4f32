"""The tasks of `benchmark_delay.py`: data, models, and the order in which every kind of training sees the data."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import images
import numpy as np
import tensorflow as tf

SHARDS = IDENTICAL, SKEWED = "identical", "skewed"


@dataclasses.dataclass(frozen=True)
class Task:
    """A task and its default sizes.

    Attributes:
      data: Name of the images.
      make_hidden: Called with the layers of Keras or of tf_keras. Returns the layers before the last one.
      num_rows: Number of rows to train with.
      epochs: Number of epochs of a training.
    """

    data: str
    make_hidden: Callable[[Any], list]
    num_rows: int
    epochs: int

    def make_model(self, library: Any, seed: int) -> Any:
        """Returns a model of Keras or tf_keras, which ends in probabilities."""
        library.utils.set_random_seed(seed)
        layers = library.layers
        last = layers.Dense(10, activation="softmax")
        return library.Sequential([layers.InputLayer((28, 28, 1)), *self.make_hidden(layers), last])


def order(labels: np.ndarray, *, epochs: int, batch_size: int, world_size: int, shards: str, seed: int) -> np.ndarray:
    """Returns the rows of every global batch, whose r-th contiguous part belongs to rank r.

    Args:
      labels: The label of each row.
      epochs: Number of passes over the data.
      batch_size: Rows of a global batch, a multiple of `world_size`.
      world_size: Number of ranks.
      shards: "identical": every rank draws from all rows. "skewed": rows in the order of their labels are cut into as
        many parts as there are ranks, equally long, and a rank draws from its own.
      seed: Seed of the draws.

    Returns:
      Integers [steps, batch_size]. In each epoch the rows that fill no batch are left out.
    """
    generator = np.random.default_rng(seed)
    parts, per_rank = [np.arange(len(labels))], batch_size
    if shards == SKEWED:
        whole = len(labels) // world_size * world_size
        parts, per_rank = np.split(np.argsort(labels, kind="stable")[:whole], world_size), batch_size // world_size
    num_steps = len(parts[0]) // per_rank

    def draw(part: np.ndarray) -> np.ndarray:
        return generator.permutation(part)[: num_steps * per_rank].reshape(num_steps, per_rank)

    return np.concatenate([np.concatenate([draw(part) for part in parts], axis=1) for _ in range(epochs)])


def batches(part: images.Part, rows: np.ndarray) -> tf.data.Dataset:
    """Returns batches of the `rows` from `order`."""
    x, y = map(tf.constant, part)
    return tf.data.Dataset.from_tensor_slices(rows).map(lambda chosen: (tf.gather(x, chosen), tf.gather(y, chosen)))


def _perceptron(layers: Any) -> list:
    return [layers.Flatten(), layers.Dense(512, activation="relu"), layers.Dense(256, activation="relu")]


def _cnn(layers: Any) -> list:
    convolutions = [[layers.Conv2D(filters, 3, activation="relu"), layers.MaxPooling2D()] for filters in (32, 64)]
    return [*itertools.chain(*convolutions), layers.Flatten(), layers.Dense(128, activation="relu")]


TASKS = {
    "digits": Task("digits", _perceptron, 1440, 8),
    "perceptron": Task("fashion_mnist", _perceptron, 6000, 4),
    "cnn": Task("fashion_mnist", _cnn, 6000, 4),
}

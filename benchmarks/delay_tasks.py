"""The tasks of `benchmark_delay.py`: data, models, and the order in which every kind of training sees the data."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import sysconfig
from collections.abc import Callable
from typing import Any

import images
import keras
import models
import numpy as np
import tensorflow as tf

IDENTICAL, SKEWED = "identical", "skewed"

_NUM_BYTES = 128  # Size of the transformer's vocabulary. Larger bytes are rare in sources.
_CONTEXT = 64
_HELD_OUT_FILES = 5  # One of five files is held out.


@dataclasses.dataclass(frozen=True)
class Data:
    """The data of a task.

    Attributes:
      train: Inputs and labels.
      test: Held-out inputs and labels.
      groups: [rows] of integers: the class of each row of `train`, or its file. Skewed shards are made of groups.
    """

    train: images.Part
    test: images.Part
    groups: np.ndarray


@dataclasses.dataclass(frozen=True)
class Task:
    """A task and its default sizes.

    Attributes:
      load: Called with the numbers of rows to train and to test with (None: all), and the file of `--cifar10`.
      make_model: Called with Keras, or tf_keras if `has_peers`, and a seed. The model ends in probabilities.
      learning_rate: A stable learning rate for synchronous SGD with momentum 0.9.
      num_rows: Number of rows to train with.
      test_rows: Number of rows to test with; None for all.
      epochs: Number of epochs of a training.
      augments: True if images are mirrored and moved at random.
      has_peers: True if other libraries train the same model.
    """

    load: Callable[[int, int | None, str | None], Data]
    make_model: Callable[[Any, int], Any]
    learning_rate: float
    num_rows: int
    test_rows: int | None
    epochs: int
    augments: bool = False
    has_peers: bool = False


def order(data: Data, *, epochs: int, batch_size: int, world_size: int, shards: str, seed: int) -> np.ndarray:
    """Returns the rows of every global batch, whose r-th contiguous part belongs to rank r.

    Args:
      data: The data.
      epochs: Number of passes over the data.
      batch_size: Rows of a global batch, a multiple of `world_size`.
      world_size: Number of ranks.
      shards: "identical": every rank draws from all rows. "skewed": rows in the order of their groups are cut into as
        many parts as there are ranks, equally long, and a rank draws from its own.
      seed: Seed of the draws.

    Returns:
      Integers [steps, batch_size]. In each epoch the rows that fill no batch are left out.
    """
    generator = np.random.default_rng(seed)
    num_rows, per_rank = len(data.groups), batch_size // world_size
    if shards == IDENTICAL:
        num_steps = num_rows // batch_size
        drawn = [generator.permutation(num_rows)[: num_steps * batch_size] for _ in range(epochs)]
        return np.concatenate(drawn).reshape(-1, batch_size)
    parts = np.split(np.argsort(data.groups, kind="stable")[: num_rows // world_size * world_size], world_size)
    num_steps = len(parts[0]) // per_rank
    drawn = [
        np.concatenate(
            [generator.permutation(part)[: num_steps * per_rank].reshape(num_steps, per_rank) for part in parts], axis=1
        )
        for _ in range(epochs)
    ]
    return np.concatenate(drawn)


def batches(data: Data, rows: np.ndarray, augments: bool, seed: int) -> tf.data.Dataset:
    """Returns global batches of the `rows` from `order`. Augmentation depends on `seed` and the step."""
    x, y = map(tf.constant, data.train)

    def pick(step: tf.Tensor, chosen: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        inputs = tf.gather(x, chosen)
        if augments:
            inputs = _augmented(inputs, tf.stack([tf.constant(seed, tf.int64), step]))
        return inputs, tf.gather(y, chosen)

    return tf.data.Dataset.from_tensor_slices((np.arange(len(rows)), rows)).map(pick)


def _augmented(x: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """Mirrors half of the images, and moves all by up to an eighth. Zeros fill the gap."""
    mirrored, down, right = (seed + tf.constant([1000 * part, 0], tf.int64) for part in (1, 2, 3))
    num_images = tf.shape(x)[0]
    height, width = x.shape[1] // 8, x.shape[2] // 8
    is_mirrored = tf.random.stateless_uniform([num_images, 1, 1, 1], mirrored) < 0.5
    x = tf.where(is_mirrored, tf.reverse(x, [2]), x)
    for axis, margin, part in ((1, height, down), (2, width, right)):
        size = x.shape[axis]
        first = tf.random.stateless_uniform([num_images, 1], part, maxval=2 * margin + 1, dtype=tf.int32)
        paddings = [[margin, margin] if each == axis else [0, 0] for each in range(4)]
        chosen = first + tf.range(size)
        if axis == 1:
            x = tf.gather(tf.pad(x, paddings), chosen, batch_dims=1)
        else:
            x = tf.transpose(x, [0, 2, 1, 3])
            x = tf.gather(tf.pad(x, [paddings[0], paddings[2], paddings[1], paddings[3]]), chosen, batch_dims=1)
            x = tf.transpose(x, [0, 2, 1, 3])
    return x


# Images.


def _load_images(name: str, num_rows: int, test_rows: int | None, cifar10: str | None) -> Data:
    (x, y), (x_test, y_test) = images.load(name, cifar10, num_rows)
    y, y_test = (np.ravel(part).astype(np.int32) for part in (y, y_test))
    return Data((x, y), (x_test[:test_rows], y_test[:test_rows]), y)


def _perceptron(library: Any, seed: int) -> Any:
    library.utils.set_random_seed(seed)
    layers = library.layers
    hidden = [layers.Dense(units, activation="relu") for units in (512, 256)]
    return library.Sequential(
        [layers.InputLayer((28, 28, 1)), layers.Flatten(), *hidden, layers.Dense(10, activation="softmax")]
    )


def _cnn(library: Any, seed: int) -> Any:
    library.utils.set_random_seed(seed)
    layers = library.layers
    convolutions = [
        layer for filters in (32, 64) for layer in (layers.Conv2D(filters, 3, activation="relu"), layers.MaxPooling2D())
    ]
    dense = [layers.Dense(128, activation="relu"), layers.Dense(10, activation="softmax")]
    return library.Sequential([layers.InputLayer((28, 28, 1)), *convolutions, layers.Flatten(), *dense])


def _resnet(library: Any, seed: int) -> keras.Model:
    library.utils.set_random_seed(seed)
    return models.residual_network((32, 32, 3), seed)


# Text.


def _load_text(num_rows: int, test_rows: int | None, cifar10: str | None) -> Data:
    """Returns bytes of Python's standard library with the next bytes as labels. Every fifth file is held out."""
    del cifar10
    folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(folder.glob("*.py"))
    if len(paths) < _HELD_OUT_FILES:
        raise FileNotFoundError(f"the task needs the sources of Python's standard library. Received: {folder}.")
    held_out = paths[_HELD_OUT_FILES - 1 :: _HELD_OUT_FILES]
    rows, groups = _rows_of([path for path in paths if path not in held_out], num_rows)
    test, _ = _rows_of(held_out, test_rows)
    return Data((rows[:, :-1], rows[:, 1:]), (test[:, :-1], test[:, 1:]), groups)


def _rows_of(paths: list[pathlib.Path], num_rows: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Returns up to `num_rows` pieces, evenly spread over the files, in order; and the number of each piece's file."""
    pieces = []
    for path in paths:
        values = np.minimum(np.frombuffer(path.read_bytes(), np.uint8), _NUM_BYTES - 1).astype(np.int32)
        num_pieces = len(values) // (_CONTEXT + 1)
        pieces.append(values[: num_pieces * (_CONTEXT + 1)].reshape(num_pieces, _CONTEXT + 1))
    rows = np.concatenate(pieces)
    groups = np.repeat(np.arange(len(pieces)), [len(each) for each in pieces])
    chosen = np.linspace(0, len(rows) - 1, min(num_rows or len(rows), len(rows))).astype(int)
    return rows[chosen], groups[chosen]


class _Positions(keras.layers.Layer):
    """Adds a vector for each position."""

    def build(self, input_shape):
        self.vectors = self.add_weight(shape=input_shape[1:], initializer="uniform", name="vectors")

    def call(self, x):
        return x + self.vectors


def _transformer(library: Any, seed: int, width: int = 64, num_blocks: int = 2) -> keras.Model:
    """Returns a causal transformer, with normalization before each part, for probabilities of the next byte."""
    library.utils.set_random_seed(seed)
    layers = keras.layers
    inputs = keras.Input((_CONTEXT,), dtype="int32")
    x = _Positions()(layers.Embedding(_NUM_BYTES, width)(inputs))
    for _ in range(num_blocks):
        normal = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(4, width // 4)(normal, normal, use_causal_mask=True)
        inner = layers.Dense(4 * width, activation="gelu")(layers.LayerNormalization()(x))
        x = x + layers.Dense(width)(inner)
    outputs = layers.Dense(_NUM_BYTES, activation="softmax")(layers.LayerNormalization()(x))
    return keras.Model(inputs, outputs)


_load_fashion = functools.partial(_load_images, "fashion_mnist")

TASKS = {
    "perceptron": Task(_load_fashion, _perceptron, 0.05, 6000, None, 4, has_peers=True),
    "digits": Task(functools.partial(_load_images, "digits"), _perceptron, 0.05, 1440, None, 8, has_peers=True),
    "cnn": Task(_load_fashion, _cnn, 0.05, 6000, None, 4, has_peers=True),
    "resnet": Task(functools.partial(_load_images, "cifar10"), _resnet, 0.05, 8000, None, 8, augments=True),
    "transformer": Task(_load_text, _transformer, 0.05, 6000, 1000, 6),
}

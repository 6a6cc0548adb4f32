"""Models that several benchmarks train."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import keras
import tensorflow as tf


def residual_network(shape: Sequence[int], seed: int) -> keras.Model:
    """Returns a model for ten classes: a convolution and three residual blocks, with batch normalization.

    Args:
      shape: Shape of an image: height, width, channels.
      seed: Seed of the initial weights.
    """
    layers, seeds = keras.layers, itertools.count(1000 * seed)

    def convolution(x, filters: int, size: int, strides: int = 1):
        initializer = keras.initializers.HeNormal(seed=next(seeds))
        layer = layers.Conv2D(filters, size, strides, "same", use_bias=False, kernel_initializer=initializer)
        return layers.BatchNormalization(momentum=0.9)(layer(x))

    inputs = keras.Input(shape)
    x = layers.MaxPooling2D()(layers.ReLU()(convolution(inputs, 16, 3)))
    for filters, strides in ((16, 1), (32, 2), (64, 2)):
        inner = layers.ReLU()(convolution(x, filters, 3, strides))
        inner = convolution(inner, filters, 3)
        x = layers.ReLU()(inner + (x if strides == 1 else convolution(x, filters, 1, strides)))
    initializer = keras.initializers.GlorotUniform(seed=next(seeds))
    outputs = layers.Dense(10, activation="softmax", kernel_initializer=initializer)(layers.GlobalAveragePooling2D()(x))
    return keras.Model(inputs, outputs)


class Vector(keras.layers.Layer):
    """Parameters in four parts, whose gradient costs next to nothing."""

    def __init__(self, num_values: int):
        super().__init__()
        self.num_values = num_values

    def build(self, input_shape):
        size = self.num_values // 4
        self.parts = [self.add_weight(shape=(size,), initializer="zeros", name=f"part{i}") for i in range(4)]

    def call(self, x):
        return x + tf.add_n([tf.reduce_sum(part) for part in self.parts])

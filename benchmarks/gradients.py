"""Gradients at any weights, for ranks that are simulated in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import keras
import numpy as np
import tensorflow as tf

from hop_tf.tensors.packing import Packing


def flat_gradient(model: keras.Model, weights: Sequence[keras.Variable], packing: Packing) -> Callable:
    """Makes `gradient_at(values, x, y)`, which computes a loss and its gradient at any weights, for simulated ranks.

    Args:
      model: A compiled model. Its weights become `values`.
      weights: The trained weights, float32, in the order of the packing.
      packing: Places of the weights in one vector.

    Returns:
      The function: it takes and returns arrays, the gradient laid out as `values`.
    """

    @tf.function
    def compute(values: tf.Tensor, x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        for weight, value in zip(weights, packing.unpack([values]), strict=True):
            weight.assign(value)
        with tf.GradientTape() as tape:
            loss = model.compute_loss(x, y, model(x, training=True))
        (gradient,) = packing.pack(tape.gradient(loss, [weight.value for weight in weights]))
        return loss, gradient

    def gradient_at(values: np.ndarray, x: np.ndarray, y: np.ndarray) -> tuple[float, np.ndarray]:
        loss, gradient = compute(*map(tf.constant, (values, x, y)))
        return float(loss), gradient.numpy()

    return gradient_at

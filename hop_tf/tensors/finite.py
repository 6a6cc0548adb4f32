"""Checks that values are finite."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf


def are_finite(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Emits the ops that compute a bool scalar: true if all values of all tensors are finite. Integers always are."""
    floats = [tensor for tensor in tensors if tensor.dtype.is_floating]
    return tf.reduce_all([tf.reduce_all(tf.math.is_finite(tensor)) for tensor in floats])

"""`with_dtype`: the bytes of a tensor as values of another type."""

from __future__ import annotations

import tensorflow as tf


def with_dtype(tensor: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Emits the op that views the bytes of a 1-D tensor as values of another type. They are not copied.

    Args:
      tensor: 1-D tensor. Its bytes are whole values of `dtype`.
      dtype: The type.

    Returns:
      1-D tensor.
    """
    if dtype.size > tensor.dtype.size:
        return tf.bitcast(tf.reshape(tensor, [-1, dtype.size // tensor.dtype.size]), dtype)
    return tf.reshape(tf.bitcast(tensor, dtype), [-1])

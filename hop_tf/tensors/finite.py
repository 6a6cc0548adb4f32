"""Whether values are numbers."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf


def are_finite(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Emits the ops that tell whether no tensor has a NaN or an infinity; those of integers have none. Bool scalar."""
    floats = [tensor for tensor in tensors if tensor.dtype.is_floating]
    return tf.reduce_all([tf.reduce_all(tf.math.is_finite(tensor)) for tensor in floats])

"""`StepLengths`: makes the changes of adaptive optimizers longer, because noise cancels in their mean.

Adaptive optimizers such as Adam divide a gradient by its usual size. So a noisy gradient and a mean of many gradients
give steps of about the same length. In the mean of the ranks' steps, noise cancels, so the mean is shorter by up to
sqrt(n). Synchronous training would make a step of full length for the mean gradient. So each rank makes its change
longer at the end of a window:

    change  <-  f change        f = |own change| / |mean change|  of the window that was merged last, from 1 to sqrt(n)

The own change and the mean change of that window were made longer by about the same factor, so their ratio f hardly
depends on it. Each rank has its own f. It is 1 until the rank has merged a window, also after a restart. A change
includes weight decay, and assignments by `train_step`.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf


class StepLengths:
    """Measures the factor f of a rank's changes.

    Args:
      num_windows: Largest number of windows in flight at a time.
      world_size: n, including lost ranks.
    """

    def __init__(self, num_windows: int, world_size: int):
        self._longest = world_size**0.5
        with tf.init_scope(), tf.device("/cpu:0"):
            squares = tf.zeros([num_windows])  # |own change|^2, by window.
            self._squares = tf.Variable(squares, trainable=False, name="hop_tf_squared_lengths")
            self._factor = tf.Variable(1.0, trainable=False, name="hop_tf_length_factor")

    def factor(self, assigned: tf.Tensor) -> tf.Tensor:
        """Emits the ops that compute f of a window at its end: 1 if the program has `assigned` a variable in it."""
        with tf.device("/cpu:0"):
            return tf.where(tf.reduce_any(assigned), 1.0, self._factor)

    def submit(self, window: tf.Tensor, changes: Sequence[tf.Tensor], assigned: tf.Tensor) -> None:
        """Emits the ops that record the length of a window's changes, as sent. `assigned`: as for `factor`."""
        square = _squared_length(changes)
        with tf.device("/cpu:0"):
            square = tf.where(tf.reduce_any(assigned), 0.0, square)  # Assignments are not steps.
            self._squares.scatter_nd_update([[window % self._squares.shape[0]]], [square])

    def merge(self, window: tf.Tensor, means: Sequence[tf.Tensor]) -> None:
        """Emits the ops that compute f when a window is merged."""
        square = _squared_length(means)
        with tf.device("/cpu:0"):
            ratio = self._squares[window % self._squares.shape[0]] / square
            is_known = (ratio > 0) & tf.math.is_finite(ratio)  # False without steps, or with nan in them.
            factor = tf.clip_by_value(tf.sqrt(ratio), 1.0, self._longest)
            self._factor.assign(tf.where(is_known, factor, self._factor))


def _squared_length(values: Sequence[tf.Tensor]) -> tf.Tensor:
    return 2 * tf.add_n([tf.nn.l2_loss(tf.cast(value, tf.float32)) for value in values])

"""`StepLengths`: changes of adaptive optimizers, as much longer as their mean is shorter.

Adam and its like divide a gradient by its usual size. So a step is about as long for a gradient with noise as for the
mean of many. In the mean of ranks' steps their noise cancels: it is shorter, by up to sqrt(n). Synchronous training
would make a step for the mean gradient, of full length. So a rank makes its change in a window longer when the window
ends:

    change  <-  f change        f = |own change| / |mean change|  of the window that was merged last, from 1 to sqrt(n)

Own and mean changes were made longer by much the same factor, so that hardly changes f. Each rank has its own f. It is
1 until a window was merged: also on a rank that is started again. A change is all that a step changes: weight decay,
and weights that `train_step` itself assigns, too.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf


class StepLengths:
    """Measures what a rank multiplies its changes by.

    Args:
      num_windows: Most windows that are in flight at a time.
      world_size: n; ranks that are lost count.
    """

    def __init__(self, num_windows: int, world_size: int):
        self._longest = world_size**0.5
        with tf.init_scope(), tf.device("/cpu:0"):
            squares = tf.zeros([num_windows])  # |own change|^2, by window.
            self._squares = tf.Variable(squares, trainable=False, name="hop_tf_squared_lengths")
            self._factor = tf.Variable(1.0, trainable=False, name="hop_tf_length_factor")

    def factor(self, assigned: tf.Tensor) -> tf.Tensor:
        """Emits the ops that give f of a window that ends: 1 if the program has `assigned` a variable in it."""
        with tf.device("/cpu:0"):
            return tf.where(tf.reduce_any(assigned), 1.0, self._factor)

    def submit(self, window: tf.Tensor, changes: Sequence[tf.Tensor], assigned: tf.Tensor) -> None:
        """Emits the ops that note a window's changes by this rank, as they are sent. `assigned`: as of `factor`."""
        square = _squared_length(changes)
        with tf.device("/cpu:0"):
            square = tf.where(tf.reduce_any(assigned), 0.0, square)  # That is not the length of steps.
            self._squares.scatter_nd_update([[window % self._squares.shape[0]]], [square])

    def merge(self, window: tf.Tensor, means: Sequence[tf.Tensor]) -> None:
        """Emits the ops that compute f when a window is merged."""
        square = _squared_length(means)
        with tf.device("/cpu:0"):
            ratio = self._squares[window % self._squares.shape[0]] / square
            is_known = (ratio > 0) & tf.math.is_finite(ratio)  # Else there were no steps, or some that are no numbers.
            factor = tf.clip_by_value(tf.sqrt(ratio), 1.0, self._longest)
            self._factor.assign(tf.where(is_known, factor, self._factor))


def _squared_length(values: Sequence[tf.Tensor]) -> tf.Tensor:
    return 2 * tf.add_n([tf.nn.l2_loss(tf.cast(value, tf.float32)) for value in values])

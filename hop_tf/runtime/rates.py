"""`CommonRate`: the learning rate of ranks that make the same updates is that of the first of them.

Callbacks may change a rank's learning rate by what they see there, as `ReduceLROnPlateau` does with a rank's own loss.
Where ranks apply the same gradients, different rates would drive their weights apart, in silence. So every rank's rate
travels beside its gradients, as a float64, which no codec changes, and each update is made with the first rank's. A
rate that cannot be replaced, such as that of a schedule, must be the first rank's: else it is an error.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import tensorflow as tf

from hop_tf.errors import HopError
from hop_tf.keras_hook.optimizers import assign_learning_rate, learning_rate
from hop_tf.tensors.packing import TensorSpec

# Processors may compute a schedule a little differently.
_TOLERANCE = 1e-5


class CommonRate:
    """Brings all ranks' learning rates to each of them, beside a step's gradients.

    What a rank hands out has a column for each rank, and zeros in those of the others: its rate, and 1. In the mean
    over the ranks, however many take part, the first divided by the second is a rank's rate.

    Args:
      rank: This rank.
      world_size: n.
      adopts: Whether a rank takes the first rank's rate; otherwise another one is an error.
    """

    def __init__(self, rank: int, world_size: int, *, adopts: bool):
        self._rank = rank
        self._adopts = adopts
        self._world_size = world_size
        self._has_warned = False
        self._checked = b""  # What came last, and was in order.

    @staticmethod
    def spec(world_size: int) -> TensorSpec:
        """What travels."""
        return TensorSpec("hop_tf_learning_rate", (2, world_size), tf.float64, on_host=True)

    def own(self, optimizer: Any) -> tf.Tensor:
        """Emits the ops that make what this rank hands out."""
        column = tf.one_hot(self._rank, self._world_size, dtype=tf.float64)
        return tf.stack([tf.cast(learning_rate(optimizer), tf.float64) * column, column])

    def adopt(self, optimizer: Any, mean: tf.Tensor) -> tf.Tensor:
        """Emits the ops that give `optimizer` the first rank's rate, where its own was another one in that step.

        Args:
          optimizer: The optimizer.
          mean: The mean over the ranks of `own`.

        Returns:
          The first rank's rate in that step; the optimizer's of now where nobody's came.
        """
        with tf.device("/cpu:0"):
            rates, present = mean[0] / mean[1], mean[1] > 0
            has_come = tf.reduce_any(present)
            now = tf.cast(learning_rate(optimizer), tf.float64)
            first = tf.where(has_come, rates[tf.argmax(present)], now)
            differs = tf.logical_and(present[self._rank], tf.not_equal(rates[self._rank], first))
        tf.cond(differs, lambda: assign_learning_rate(optimizer, first), lambda: None)
        return first

    def check(self, mean: np.ndarray, step: int) -> None:
        """Looks at the rates of a step, on a communication thread.

        Raises:
          HopError: If this rank's rate is not that of the first rank, and may not be replaced. Otherwise a warning says
            so, once.
        """
        if (data := mean.tobytes()) == self._checked:  # As nearly always.
            return
        rates, present = mean.reshape(2, self._world_size)
        ranks = np.flatnonzero(present)
        if self._rank not in ranks or self._has_warned:
            return
        first = ranks[0]
        own, theirs = (rates[rank] / present[rank] for rank in (self._rank, first))
        difference = (
            f"the learning rate of rank {self._rank} in step {step} is {own:g}, that of rank {first} is {theirs:g}"
        )
        if not self._adopts and abs(own - theirs) > _TOLERANCE * abs(theirs):
            raise HopError(
                f"{difference}: all ranks must train with the same one here. Let callbacks look at what is equal on "
                "all ranks, as `val_loss` is; and after a `fit` that has ended earlier on some ranks, which have "
                "counted fewer steps, call `strategy.synchronize(model)` on all."
            )
        if self._adopts and own != theirs:
            self._has_warned = True
            logging.warning(
                "%s: a callback has changed it by what it sees on one rank. From now on rank %d takes that of rank %d.",
                difference,
                self._rank,
                first,
            )
        self._checked = data

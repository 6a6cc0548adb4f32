"""`CommonRate`: ranks that make the same updates use the first rank's learning rate.

A callback may change a rank's learning rate based on that rank's own values, as `ReduceLROnPlateau` does with the loss.
If ranks apply the same gradients, different rates would silently drive their weights apart. So every rank's rate
travels with its gradients, as a float64, which no codec changes. Each update uses the first rank's rate. A rate that
cannot be replaced, such as that of a schedule, must equal the first rank's. Otherwise the rank raises an error.
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
    """Brings the learning rates of all ranks to every rank, together with a step's gradients.

    A rank's tensor has a column for each rank. The rank's own column holds its rate and 1. The other columns hold
    zeros. In the mean over the ranks, however many take part, the first row divided by the second gives each rank's
    rate.

    Args:
      rank: This rank.
      world_size: n.
      adopts: True if a rank takes the first rank's rate. Otherwise a different rate is an error.
    """

    def __init__(self, rank: int, world_size: int, *, adopts: bool):
        self._rank = rank
        self._adopts = adopts
        self._world_size = world_size
        self._has_warned = False
        self._checked = b""  # The latest mean without a problem.

    @staticmethod
    def spec(world_size: int) -> TensorSpec:
        """The tensor that travels with a step's gradients."""
        return TensorSpec("hop_tf_learning_rate", (2, world_size), tf.float64, on_host=True)

    def own(self, optimizer: Any) -> tf.Tensor:
        """Emits the ops that make this rank's tensor."""
        column = tf.one_hot(self._rank, self._world_size, dtype=tf.float64)
        return tf.stack([tf.cast(learning_rate(optimizer), tf.float64) * column, column])

    def adopt(self, optimizer: Any, mean: tf.Tensor) -> tf.Tensor:
        """Emits the ops that give `optimizer` the first rank's rate, if the optimizer's own rate differed in that step.

        Args:
          optimizer: The optimizer.
          mean: The mean over the ranks of `own`.

        Returns:
          The first rank's rate in that step; the optimizer's present rate if no rank's rate has come.
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
        """Checks the rates of a step, on a communication thread. Warns, once, if a rate is about to be replaced.

        Raises:
          HopError: If this rank's rate differs from the first rank's rate and cannot be replaced.
        """
        if (data := mean.tobytes()) == self._checked:  # The common case.
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
                f"{difference}: all ranks must use the same learning rate. Let callbacks decide by values that are "
                "equal on all ranks, such as `val_loss`. If `fit` has ended earlier on some ranks, these have counted "
                "fewer steps. Call `strategy.synchronize(model)` on all ranks after such a `fit`."
            )
        if self._adopts and own != theirs:
            self._has_warned = True
            logging.warning(
                "%s. A callback has changed it by values of one rank only. From now on, rank %d uses the learning rate "
                "of rank %d.",
                difference,
                self._rank,
                first,
            )
        self._checked = data

"""`HopAlgorithm`: the part of Hop that runs in the training graph, lines 11 to 15 of `hop_tf.strategies.hop`."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from hop_tf.keras_hook.branches import on_device, when
from hop_tf.keras_hook.shares import BatchShares
from hop_tf.runtime.algorithm import Algorithm
from hop_tf.runtime.deltas import read_all
from hop_tf.runtime.group import Group
from hop_tf.runtime.velocities import add_to_velocities
from hop_tf.strategies.hop.exchange import REDUCTION, RENEWAL, STEP
from hop_tf.strategies.hop.settings import HopSettings


class HopAlgorithm(Algorithm):
    """Averages parameters with the neighbors', before or after the optimizer's step.

    Args:
      group: The group.
      settings: The settings of the strategy.
      shares: The part of a batch that each rank takes. Default: all parts are equal.
    """

    def __init__(self, group: Group, settings: HopSettings, shares: BatchShares | None = None):
        super().__init__(group)
        self._settings, self._shares = settings, shares
        # Between `before_update` and `after_update`: the trained variables, their changes by averaging if velocities
        # need these, and the number of steps to skip.
        self._before: list[tf.Tensor] = []
        self._moves: list[tf.Tensor] = []
        self._num_skipped: tf.Tensor | None = None

    def before_update(self, values: Sequence[tf.Tensor], gradients: list) -> list:
        if self._settings.update_order == "parallel":
            self._moves, self._num_skipped = self._average_if_due(values, gradients)
        self._before = [] if self._shares is None else read_all(self.group.trained)
        return gradients

    def after_update(self) -> tf.Tensor:
        before, moves, num_skipped = self._before, self._moves, self._num_skipped
        self._before, self._moves, self._num_skipped = [], [], None
        if self._shares is not None:
            self._weigh_step(before, self._shares.times_mean - 1)
        if self._settings.skewed_shards:
            # As if the change were made in the previous step, in equal parts over the steps of the iteration.
            add_to_velocities(self.group, moves, lambda momentum: momentum / self._settings.interval)
        if self._settings.update_order == "serial":
            values = read_all(self.group.variables)
            _, num_skipped = self._average(values, values)
        if self._settings.skip is not None:
            when(num_skipped > 0, self._renew)
        return num_skipped

    def _weigh_step(self, before: Sequence[tf.Tensor], more: tf.Tensor) -> None:
        """Multiplies the optimizer's step by n times this rank's part of a batch, with n present ranks."""
        for variable, value in zip(self.group.trained, before, strict=True):
            variable.assign_add((variable - value) * tf.cast(more, variable.dtype))

    def _average_if_due(self, values: Sequence[tf.Tensor], computed: Sequence) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Averages in an iteration's first step. Returns the changes, if needed, and the number of steps to skip."""
        settings = self._settings
        if settings.interval == 1:
            return self._average(values, computed)

        def take() -> tuple[list[tf.Tensor], tf.Tensor]:
            moves, num_skipped = self._take_average(computed)
            return (moves if settings.skewed_shards else []), num_skipped

        def nothing() -> tuple[list[tf.Tensor], tf.Tensor]:
            moves = [tf.zeros_like(value) for value in values] if settings.skewed_shards else []
            return moves, tf.constant(0, tf.int64)

        with tf.device("/cpu:0"):
            is_due = self.group.read_step() % settings.interval == 0
        # Two conditionals: the one that changes variables waits for all earlier reads. Sending need not wait.
        when(is_due, lambda: self.group.submit(values, step=self._iteration()))
        moves, num_skipped = tf.cond(on_device(is_due), take, nothing)
        # A constant, so that the host need not wait for the device.
        return moves, tf.constant(0, tf.int64) if settings.skip is None else num_skipped

    def _iteration(self) -> tf.Tensor | None:
        """k, the number of the step's iteration; None if it is the step's own number."""
        if self._settings.interval == 1:
            return None
        with tf.device("/cpu:0"):
            return self.group.read_step() // self._settings.interval

    def _average(self, values: Sequence[tf.Tensor], computed: Sequence) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Lines 11, 13, 14: adds (reduced - sent), which keeps the optimizer's earlier changes, such as decay."""
        self.group.submit(values, step=self._iteration())
        return self._take_average(computed)

    def _take_average(self, computed: Sequence) -> tuple[list[tf.Tensor], tf.Tensor]:
        k, segment = self._iteration(), STEP
        if self._settings.tolerates_stragglers:
            segment = REDUCTION
            self.group.signal(segment, computed, step=k)
        changes, num_skipped = self.group.collect(computed, segment, step=k)
        self.group.add(changes)
        return changes, num_skipped

    def _renew(self) -> None:
        """Before a jump: averages the parameters with newer ones (section 5)."""
        k, values = self._iteration(), read_all(self.group.variables)
        self.group.submit(values, RENEWAL, step=k)
        changes, _ = self.group.collect(values, RENEWAL, step=k)
        self.group.add(changes)

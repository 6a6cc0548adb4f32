"""`CanaryAlgorithm`: the part of Canary that runs in the training graph, unless consistency is "bsp"."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hop_tf.keras_hook.branches import when
from hop_tf.keras_hook.optimizers import ema_overwrite_frequency
from hop_tf.runtime.algorithm import Algorithm
from hop_tf.runtime.deltas import DeltaTracker
from hop_tf.runtime.group import Group
from hop_tf.strategies.canary.exchange import CanaryExchange
from hop_tf.strategies.canary.slots import SlotsBefore


class CanaryAlgorithm(Algorithm):
    """Submits the optimizer's step colayer by colayer, and takes the merged weights.

    Args:
      group: The group, whose exchange is a `CanaryExchange`.
      drops: True if an overtime worker drops colayers. Its optimizer then forgets their step.
    """

    def __init__(self, group: Group, *, drops: bool):
        super().__init__(group)
        self._drops = drops
        variables, values, order = group.variables, group.context.values(), self.exchange.order
        self._changes = DeltaTracker([variables[index] for index in order], [values[index] for index in order])
        with tf.init_scope(), tf.device("/cpu:0"):
            self._start_step = tf.Variable(0, dtype=tf.int64, trainable=False, name="hop_tf_start_step")
        self._slots: SlotsBefore | None = None  # Between `before_update` and `after_update`.

    @property
    def exchange(self) -> CanaryExchange:
        """The part of Canary that communicates."""
        return self.group.exchange

    def begin_session(self) -> None:
        self.begin_at(0)

    def begin_at(self, step: int) -> None:
        self._start_step.assign(step)
        self._changes.reset()

    def begin_training(self) -> None:
        self._changes.reset()  # Weights that callbacks have loaded are the start, not a change to submit.

    def before_update(self, values: Sequence[tf.Tensor], gradients: list) -> list:
        _check_averages(self.group.optimizer())
        self._slots = SlotsBefore(self.group.optimizer(), self.group.trained) if self._drops else None
        return gradients

    def after_update(self) -> tf.Tensor:
        group, exchange = self.group, self.exchange

        def start() -> None:
            group.submit(self._changes.known(), exchange.start_segment)

        with tf.device("/cpu:0"):
            is_first = tf.equal(group.step, self._start_step)
        when(is_first, start)
        changes = dict(zip(exchange.order, self._changes.take(), strict=True))
        for colayer, members in enumerate(exchange.members):
            group.submit([changes[index] for index in members], colayer)
        weights, num_skipped = group.collect(list(changes.values()), exchange.merge_segment, self._take)
        self._changes.replace(weights)
        return num_skipped

    def _take(self, step: tf.Tensor, segment: int) -> tuple[list[tf.Tensor], tf.Tensor]:
        buckets, num_skipped, num_dropped = self.group.take_with_drops(step, segment)
        slots, self._slots = self._slots, None
        if slots is not None:
            with tf.device("/cpu:0"), tf.control_dependencies([num_skipped]):  # The value fails if the exchange failed.
                num_left = len(self.exchange.members) - num_dropped
            slots.restore(self.exchange.colayers, num_left)
        return buckets, num_skipped

    def finish(self) -> None:
        group, exchange, step = self.group, self.exchange, int(self.group.step)
        if not step:
            return
        if step == exchange.start_step:  # This rank was started again so late that it has made no step.
            group.submit(self._changes.known(), exchange.start_segment)
        segment = exchange.finish_segment
        group.submit(self._changes.take(), segment)  # The changes that callbacks made since the last step.
        buckets, _ = group.take(group.read_step(), segment)
        self._changes.replace(exchange.parts[segment].unpack(buckets))
        group.constrain()


def _check_averages(optimizer: Any) -> None:
    """Raises ValueError if `ema_overwrite_frequency` is set: merging handles steps, not replaced weights."""
    frequency = ema_overwrite_frequency(optimizer)
    if frequency is not None:
        raise ValueError(
            "the optimizer's `ema_overwrite_frequency` must be None unless consistency='bsp': weights are the sum of "
            f"all ranks' steps, and no rank can replace them by its own average. Received: {frequency}."
        )

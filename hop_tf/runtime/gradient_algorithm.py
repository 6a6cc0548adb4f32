"""`GradientAlgorithm`: synchronous training, whose ranks apply the same mean gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from hop_tf.keras_hook.optimizers import scaled, slots_of, unscaled
from hop_tf.keras_hook.shares import BatchShares
from hop_tf.runtime.admissions import find_spec
from hop_tf.runtime.algorithm import Algorithm
from hop_tf.runtime.autotuning import Autotuner
from hop_tf.runtime.gradients import GradientExchange
from hop_tf.runtime.group import Group
from hop_tf.runtime.meeting import Meeting


class GradientAlgorithm(Algorithm):
    """Submits a step's gradients and applies their mean over all ranks in the same step.

    Args:
      group: The group, whose exchange is a `GradientExchange`.
      shares: The part of a batch that each rank takes, if gradients count by rows. Default: they count equally.
    """

    def __init__(self, group: Group, shares: BatchShares | None = None):
        super().__init__(group)
        self._shares = shares
        self._carried = group.context.carried
        self._meeting = Meeting(group)

    @property
    def exchange(self) -> GradientExchange:
        """The other half."""
        return self.group.exchange

    def begin_session(self) -> None:
        self._carried.reset()
        self._meeting.begin_session()

    def begin_at(self, step: int) -> None:
        self._carried.reset()

    def before_update(self, values: Sequence[tf.Tensor], gradients: list) -> list:
        outgoing = self._submit(gradients)
        means, _ = self._take_means(self.group.read_step(), lambda segment: self.group.collect(outgoing, segment)[0])
        return scaled(self.group.optimizer(), means)

    def end_step(self) -> None:
        self._meeting.meet_if_due()

    def makes_way(self) -> bool:
        return True  # There is no second copy.

    def common_optimizers(self) -> Sequence[tuple]:
        optimizer = self.group.optimizer()
        return [(optimizer, list(slots_of(optimizer, self.group.trained).values()))]

    def _submit(self, gradients: Sequence) -> list[tf.Tensor]:
        """Emits the operations that submit a step's gradients.

        Returns:
          This rank's own values: gradients without the loss scale, changes of the carried variables, and the learning
          rate.
        """
        group, optimizer = self.group, self.group.optimizer()
        outgoing = [*unscaled(optimizer, gradients), *self._carried.take()]
        sent = outgoing.copy()
        if self.exchange.weighs_rows:
            rows = self._shares.rows
            sent = [tensor * tf.cast(rows, tensor.dtype) for tensor in outgoing]
            outgoing.append(tf.reshape(tf.cast(rows, tf.float64), [1]))
        specs = group.packing.specs
        for place in (find_spec(specs), Autotuner.find_spec(specs)):
            if place is not None:  # The exchange fills in the values.
                outgoing.append(tf.zeros(specs[place].shape, tf.float64))
        outgoing.append(self.exchange.rate.own(optimizer))
        sent += outgoing[len(sent) :]
        for segment, members in enumerate(self.exchange.members):
            group.submit([sent[index] for index in members], segment)
        return outgoing

    def _take_means(
        self, step: tf.Tensor, take: Callable[[int], Sequence[tf.Tensor]]
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Emits the operations that take a step's means, and add the changes of carried variables.

        Args:
          step: The step.
          take: Takes the tensors of a segment.

        Returns:
          The mean gradients, without loss scale, and the learning rate to apply them with.
        """
        group, exchange, roster = self.group, self.exchange, self.group.context.roster
        means: list = [None] * sum(map(len, exchange.members))
        for segment, members in enumerate(exchange.members):
            for index, mean in zip(members, take(segment), strict=True):
                means[index] = mean
        *means, rates = means
        if exchange.tuner is not None:
            *means, _ = means
        if exchange.admissions is not None:
            *means, decided = means
            with tf.device("/cpu:0"):
                self._meeting.note(decided[0], step)
        if self.exchange.weighs_rows:
            *means, rows = means
            with tf.device("/cpu:0"):
                factor = tf.math.divide_no_nan(tf.constant(1.0, rows.dtype), rows[0])  # 0 rows while a pipe fills.
            means = [mean * tf.cast(factor, mean.dtype) for mean in means]
        self._carried.add(means[group.num_trained :])
        if roster is not None:
            with tf.device("/cpu:0"):
                roster.follow(rates[1] > 0)
        return means[: group.num_trained], exchange.rate.adopt(group.optimizer(), rates)

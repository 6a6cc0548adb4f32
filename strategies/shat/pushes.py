"""The pushes of a SHAT worker: its gradients, or the steps that its own optimizer makes of them."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from hop_tf.keras_hook.optimizers import clipped, descent_of, learning_rate, loss_scale, unscaled, weight_decays
from hop_tf.keras_hook.shares import BatchShares
from hop_tf.runtime.group import ExchangeContext, Group
from hop_tf.runtime.outer_optimizer import dtype_of_sums
from hop_tf.strategies.shat.settings import ShatSettings
from hop_tf.tensors.finite import are_finite

# The metadata of a push: the learning rate, 1 if gradients are applied, and with batch shares the number of rows. The
# metadata of an answer: the weight alpha of each server.
NUM_BESIDE = 2


def num_beside(num_servers: int, *, weighs_rows: bool) -> int:
    """The number of values in the metadata of pushes and answers."""
    return max(NUM_BESIDE + weighs_rows, num_servers)


@dataclasses.dataclass(frozen=True)
class PushedStep:
    """The tensors of a step from before its update.

    Attributes:
      before: The values of the trained variables.
      is_applied: bool scalar: True if the gradients are used.
      gradients: The gradients, if these are pushed.
      rate: The learning rate, if gradients are pushed.
      outgoing: The tensors that were submitted, if gradients are pushed.
    """

    before: Sequence[tf.Tensor]
    is_applied: tf.Tensor
    gradients: Sequence[tf.Tensor] = ()
    rate: tf.Tensor | None = None
    outgoing: Sequence[tf.Tensor] = ()


class Pushes(abc.ABC):
    """A worker's part of the training graph, up to the mixture.

    Args:
      num_servers: Number of parameter servers.
      shares: The part of a batch that each worker takes. Default: all parts are equal.
      takes_mean: True if servers take the mean of all workers' pushes, weighted by rows. Default False: servers apply
        each push.
    """

    def __init__(self, num_servers: int, shares: BatchShares | None = None, *, takes_mean: bool = False):
        self._shares = shares
        self._takes_mean = takes_mean
        self._num_beside = num_beside(num_servers, weighs_rows=shares is not None)

    @abc.abstractmethod
    def begin(self, group: Group, values: Sequence[tf.Tensor], gradients: list) -> PushedStep:
        """Emits the ops before the optimizer's update. See `Algorithm.before_update`."""

    @abc.abstractmethod
    def finish(self, group: Group, step: PushedStep) -> tuple[list[tf.Tensor], Sequence[tf.Tensor]]:
        """Emits the ops after the update.

        Returns:
          The worker's model after its own step (Equation 2), and the tensors that were submitted.
        """

    def _submit(
        self,
        group: Group,
        pushed: Sequence[tf.Tensor],
        rate: tf.Tensor,
        is_applied: tf.Tensor,
        number: tf.Tensor | None = None,
    ) -> list[tf.Tensor]:
        beside = tf.stack([tf.cast(each, tf.float32) for each in self._beside(rate, is_applied)])
        beside = tf.pad(beside, [[0, self._num_beside - beside.shape[0]]])
        outgoing = [*pushed, *(variable.read_value() for variable in group.carried), beside]
        group.submit(outgoing, step=number)  # Line 5.
        return outgoing

    def _beside(self, rate: tf.Tensor, is_applied: tf.Tensor) -> Sequence[tf.Tensor]:
        if self._shares is None:
            return rate, is_applied
        times = 1.0 if self._takes_mean else self._shares.times_equal
        return tf.cast(rate, tf.float64) * times, is_applied, self._shares.rows


class GradientPushes(Pushes):
    """Algorithm 1: the worker pushes its gradients, and the servers make a step of the optimizer with them."""

    def begin(self, group: Group, values: Sequence[tf.Tensor], gradients: list) -> PushedStep:
        optimizer = group.optimizer()
        del values
        own = unscaled(optimizer, gradients)
        is_applied = tf.constant(True)
        if loss_scale(optimizer) is not None:
            is_applied = are_finite(own)
            own = clipped(optimizer, own)  # Without loss scaling they are clipped already.
        rate = learning_rate(optimizer)
        outgoing = self._submit(group, own, rate, is_applied)
        before = [variable.read_value() for variable in group.trained]  # After weight decay.
        return PushedStep(before, is_applied, own, rate, outgoing)

    def finish(self, group: Group, step: PushedStep) -> tuple[list[tf.Tensor], Sequence[tf.Tensor]]:
        return self._local_model(group, step), step.outgoing

    def _local_model(self, group: Group, step: PushedStep) -> list[tf.Tensor]:
        optimizer = group.optimizer()
        descent = descent_of(optimizer, group.trained)
        if descent is None or not descent.momentum:
            return [variable.read_value() for variable in group.trained]
        # The effect of a gradient on the server's weights in the long run: lr / (1 - momentum).
        rate = tf.cast(step.rate, tf.float32)
        scales = [tf.cast(rate / (1.0 - descent.momentum), before.dtype) for before in step.before]
        # Under loss scaling, weight decay comes after the exchange.
        decays = weight_decays(optimizer, group.trained) if loss_scale(optimizer) is not None else [0.0] * len(scales)
        return [
            tf.where(step.is_applied, before * tf.cast(1 - rate * decay, before.dtype) - scale * gradient, before)
            for before, decay, scale, gradient in zip(step.before, decays, scales, step.gradients, strict=True)
        ]


class StepPushes(Pushes):
    """The worker pushes its own optimizer's step, and the servers add it, divided by the number of workers.

    In the time of one step, n workers then move the servers' model as far as synchronous training does. This holds for
    any optimizer, because sums of momentum are sums of gradients. Each worker keeps its own slots.
    """

    def begin(self, group: Group, values: Sequence[tf.Tensor], gradients: list) -> PushedStep:
        optimizer, before = group.optimizer(), values[: group.num_trained]
        if loss_scale(optimizer) is not None:  # Then weight decay, a part of the step, comes with the update.
            return PushedStep(before, are_finite(unscaled(optimizer, gradients)))
        rate = learning_rate(optimizer)  # Weight decay came before: undo it to get the values before the step.
        before = [
            value / (1 - tf.cast(rate * decay, value.dtype)) if decay else value
            for value, decay in zip(before, weight_decays(optimizer, group.trained), strict=True)
        ]
        return PushedStep(before, tf.constant(True))

    def finish(self, group: Group, step: PushedStep) -> tuple[list[tf.Tensor], Sequence[tf.Tensor]]:
        local = [variable.read_value() for variable in group.trained]
        descents = [before - after for before, after in zip(step.before, local, strict=True)]
        return local, self._submit(group, descents, tf.constant(1.0), step.is_applied)


class WindowPushes(StepPushes):
    """The worker pushes the sum of the steps of a window.

    Args:
      num_servers: As for `Pushes`.
      shares: As for `Pushes`.
      trained: The trained variables.
    """

    def __init__(self, num_servers: int, shares: BatchShares | None, trained: Sequence[tf.Variable]):
        super().__init__(num_servers, shares)
        with tf.init_scope(), tf.name_scope(""):
            self._sums = [_zeros(variable) for variable in trained]
            with tf.device("/cpu:0"):
                self._rows = tf.Variable(0.0, trainable=False, name="hop_tf_unsent_rows")

    def begin_window(self) -> None:
        """Emits the ops that forget the steps of an unfinished window."""
        for each in (*self._sums, self._rows):
            each.assign(tf.zeros_like(each))

    def add(self, group: Group, step: PushedStep) -> None:
        """Emits the ops that add a step to the window. A step that is not applied has changed nothing."""
        weight = 1.0
        if self._shares is not None:  # Parts may change within a window.
            weight = self._shares.times_equal
            self._rows.assign_add(tf.cast(self._shares.rows, tf.float32))
        for total, variable, before in zip(self._sums, group.trained, step.before, strict=True):
            total.assign_add(tf.cast(weight, total.dtype) * tf.cast(before - variable, total.dtype))

    def push(self, group: Group, number: tf.Tensor) -> tuple[list[tf.Tensor], Sequence[tf.Tensor]]:
        """Emits the ops that push the window with this number, and begin the next one. Returns as `finish` does."""
        local = [variable.read_value() for variable in group.trained]
        sums = [tf.cast(total.read_value(), each.dtype) for total, each in zip(self._sums, local, strict=True)]
        outgoing = self._submit(group, sums, tf.constant(1.0), tf.constant(True), number)
        self.begin_window()
        return local, outgoing

    def _beside(self, rate: tf.Tensor, is_applied: tf.Tensor) -> Sequence[tf.Tensor]:
        if self._shares is None:
            return rate, is_applied
        return rate, is_applied, self._rows.read_value()  # Moving statistics count by rows.


def make_pushes(context: ExchangeContext, settings: ShatSettings, shares: BatchShares | None) -> Pushes:
    """Makes the pushes of a worker.

    Args:
      context: The group's variables and servers.
      settings: The settings of the strategy.
      shares: The part of a batch that each worker takes. None: all parts are equal.
    """
    num_servers = len(context.membership.servers)
    if settings.interval > 1:
        return WindowPushes(num_servers, shares, context.trained)
    kind = StepPushes if settings.pushes_steps_of(context.optimizer()) else GradientPushes
    return kind(num_servers, shares, takes_mean=settings.consistency == "bsp")


def _zeros(variable: tf.Variable) -> tf.Variable:
    with tf.device(variable.device):
        return tf.Variable(tf.zeros(variable.shape, dtype_of_sums(variable)), trainable=False, name="hop_tf_unsent")

"""What a worker of SHAT pushes in a step: its gradients, or what its own optimizer has made of them."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from hop_tf.keras_hook.optimizers import clipped, descent_of, learning_rate, loss_scale, unscaled, weight_decays
from hop_tf.keras_hook.shares import BatchShares
from hop_tf.runtime.group import Group
from hop_tf.tensors.finite import are_finite

# What travels beside the variables: to the servers, the learning rate, whether gradients are applied, and where workers
# weigh them the rows that they are of; from them, the weight alpha of each.
NUM_BESIDE = 2


def num_beside(num_servers: int, *, weighs_rows: bool) -> int:
    """How many numbers travel beside."""
    return max(NUM_BESIDE + weighs_rows, num_servers)


@dataclasses.dataclass(frozen=True)
class PushedStep:
    """What is known of a step before its update.

    Attributes:
      before: The variables that are trained.
      is_applied: bool scalar: whether the gradients are used.
      gradients: Theirs, where these are pushed.
      rate: The learning rate, where gradients are pushed.
      outgoing: What was handed out, where gradients are pushed.
    """

    before: Sequence[tf.Tensor]
    is_applied: tf.Tensor
    gradients: Sequence[tf.Tensor] = ()
    rate: tf.Tensor | None = None
    outgoing: Sequence[tf.Tensor] = ()


class Pushes(abc.ABC):
    """A worker's half of the training graph, up to the mixture.

    Args:
      num_servers: Number of parameter servers.
      shares: What part of a batch each worker takes. Default: all parts are equal.
      takes_mean: Whether servers take the mean of all workers' pushes, weighed by rows. Default False: each counts.
    """

    def __init__(self, num_servers: int, shares: BatchShares | None = None, *, takes_mean: bool = False):
        self._shares = shares
        self._takes_mean = takes_mean
        self._num_beside = num_beside(num_servers, weighs_rows=shares is not None)

    @abc.abstractmethod
    def begin(self, group: Group, values: Sequence[tf.Tensor], gradients: list) -> PushedStep:
        """Emits what comes before the optimizer's update; see `Scheme.before_update`."""

    @abc.abstractmethod
    def finish(self, group: Group, step: PushedStep) -> tuple[list[tf.Tensor], Sequence[tf.Tensor]]:
        """Emits what comes after it: the worker's model after its own step (Equation 2), and what was handed out."""

    def _submit(
        self, group: Group, pushed: Sequence[tf.Tensor], rate: tf.Tensor, is_applied: tf.Tensor
    ) -> list[tf.Tensor]:
        beside = [rate, is_applied]
        if self._shares is not None:
            times = 1.0 if self._takes_mean else self._shares.times_equal
            beside = [tf.cast(rate, tf.float64) * times, is_applied, self._shares.rows]
        beside = tf.stack([tf.cast(each, tf.float32) for each in beside])
        beside = tf.pad(beside, [[0, self._num_beside - beside.shape[0]]])
        outgoing = [*pushed, *(variable.read_value() for variable in group.carried), beside]
        group.submit(outgoing)  # Line 5.
        return outgoing


class GradientPushes(Pushes):
    """Algorithm 1: the worker pushes its gradients, and the servers make the optimizer's step of them."""

    def begin(self, group: Group, values: Sequence[tf.Tensor], gradients: list) -> PushedStep:
        optimizer = group.optimizer()
        del values
        own = unscaled(optimizer, gradients)
        is_applied = tf.constant(True)
        if loss_scale(optimizer) is not None:
            is_applied = are_finite(own)
            own = clipped(optimizer, own)  # Else they have been clipped.
        rate = learning_rate(optimizer)
        outgoing = self._submit(group, own, rate, is_applied)
        before = [variable.read_value() for variable in group.trained]  # Weight decay was there.
        return PushedStep(before, is_applied, own, rate, outgoing)

    def finish(self, group: Group, step: PushedStep) -> tuple[list[tf.Tensor], Sequence[tf.Tensor]]:
        return self._local_model(group, step), step.outgoing

    def _local_model(self, group: Group, step: PushedStep) -> list[tf.Tensor]:
        optimizer = group.optimizer()
        descent = descent_of(optimizer, group.trained)
        if descent is None or not descent.momentum:
            return [variable.read_value() for variable in group.trained]
        # In the long run, what a gradient does to the server's weights.
        rate = tf.cast(step.rate, tf.float32)
        scales = [tf.cast(rate / (1.0 - descent.momentum), before.dtype) for before in step.before]
        # Under loss scaling, weight decay comes after the exchange.
        decays = weight_decays(optimizer, group.trained) if loss_scale(optimizer) is not None else [0.0] * len(scales)
        return [
            tf.where(step.is_applied, before * tf.cast(1 - rate * decay, before.dtype) - scale * gradient, before)
            for before, decay, scale, gradient in zip(step.before, decays, scales, step.gradients, strict=True)
        ]


class StepPushes(Pushes):
    """The worker pushes what its own optimizer has changed, and the servers add it, divided by the number of workers.

    n workers then move the servers' model in the time of a step as far as synchronous training does, whatever the
    optimizer: sums of momentum are sums of gradients. Slots stay each worker's own.
    """

    def begin(self, group: Group, values: Sequence[tf.Tensor], gradients: list) -> PushedStep:
        optimizer, before = group.optimizer(), values[: group.num_trained]
        if loss_scale(optimizer) is not None:  # Weight decay, a part of the step, comes with the update.
            return PushedStep(before, are_finite(unscaled(optimizer, gradients)))
        rate = learning_rate(optimizer)  # It was there already.
        before = [
            value / (1 - tf.cast(rate * decay, value.dtype)) if decay else value
            for value, decay in zip(before, weight_decays(optimizer, group.trained), strict=True)
        ]
        return PushedStep(before, tf.constant(True))

    def finish(self, group: Group, step: PushedStep) -> tuple[list[tf.Tensor], Sequence[tf.Tensor]]:
        local = [variable.read_value() for variable in group.trained]
        descents = [before - after for before, after in zip(step.before, local, strict=True)]
        return local, self._submit(group, descents, tf.constant(1.0), step.is_applied)

"""`ShatAlgorithm`: a worker's half of the training graph, lines 3 to 8 of `hop_tf.strategies.shat`."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from hop_tf.keras_hook.branches import when
from hop_tf.keras_hook.optimizers import averages_of, ema_overwrite_frequency
from hop_tf.keras_hook.shares import BatchShares
from hop_tf.runtime.algorithm import Algorithm
from hop_tf.runtime.group import Group
from hop_tf.runtime.rank_runtime import RankRuntime
from hop_tf.strategies.shat.pushes import PushedStep, make_pushes
from hop_tf.strategies.shat.settings import ShatSettings
from hop_tf.strategies.shat.state import GroupState


class ShatAlgorithm(Algorithm):
    """Pushes a step or gradients, and mixes the servers' model into the worker's.

    Args:
      group: The group, whose exchange is a `ShatExchange`.
      settings: The settings of the strategy.
      runtime: This rank among the others.
      shares: The part of a batch that each worker takes. Default: all parts are equal.
    """

    def __init__(self, group: Group, settings: ShatSettings, runtime: RankRuntime, shares: BatchShares | None = None):
        super().__init__(group)
        self._settings, self._runtime = settings, runtime
        self._pushes = make_pushes(group.context, settings, shares)
        self._step: PushedStep | None = None  # Between `before_update` and `after_update`.

    @property
    def served(self) -> GroupState:
        """The model and slots that the servers keep."""
        return self.group.exchange.state

    @property
    def last_session(self) -> int:
        """The session of the latest push; 0 before the first push."""
        return self.group.exchange.last_session

    @property
    def is_configured(self) -> bool:
        """True if the servers keep the group."""
        return self.group.exchange.is_configured

    def begin(self) -> None:
        joins = self._runtime.joining
        self.served.configure(joins=joins)
        if joins:
            self._runtime.join_at_once(self.group)

    def before_update(self, values: Sequence[tf.Tensor], gradients: list) -> list:
        self._step = self._pushes.begin(self.group, values, gradients)
        return gradients

    def after_update(self) -> tf.Tensor:
        group, interval = self.group, self._settings.interval
        step, self._step = self._step, None
        if interval == 1:
            self._take(*self._pushes.finish(group, step))
        else:
            self._pushes.add(group, step)
            with tf.device("/cpu:0"):
                window, place = group.read_step() // interval, group.read_step() % interval
            when(place == interval - 1, lambda: self._push_window(window))
        if ema_overwrite_frequency(group.optimizer()):
            # The servers have replaced weights by averages. This makes the same step of the worker's optimizer a no-op.
            for average, variable in zip(averages_of(group.optimizer(), group.trained), group.trained, strict=True):
                average.assign(variable)
        return super().after_update()

    def _push_window(self, number: tf.Tensor) -> None:
        self._take(*self._pushes.push(self.group, number), number)

    def _take(self, local: Sequence[tf.Tensor], outgoing: Sequence[tf.Tensor], number: tf.Tensor | None = None) -> None:
        """Emits the ops that mix the answer to a push into the worker's model."""
        group, exchange = self.group, self.group.exchange
        received, _ = group.collect(outgoing, step=number)  # Line 6.
        weights = received[-1]
        for index, variable in enumerate(group.trained):
            variable.assign(_mix(local[index], received[index], exchange.spread(weights, index)))  # Line 8.
        for variable, change in zip(group.carried, received[group.num_trained : -1], strict=True):
            variable.assign_add(change)

    def begin_session(self) -> None:
        if self._settings.interval > 1:
            self._pushes.begin_window()

    def abort(self) -> None:
        if int(self.group.step):
            self.served.keep_model()  # The model has unsent steps, and parts of others' pushes: servers do not take it.

    def finish(self) -> None:
        window, num_unsent = divmod(int(self.group.step), self._settings.interval)
        if num_unsent:
            self._push_window(tf.constant(window, tf.int64))
        if not self.group.exchange.sent_rounds:  # Without pushes, the servers may have older values of these variables.
            return
        if self._settings.keeps_own_models:
            self.served.keep_model()
        else:
            self.served.pull()


def _mix(local: tf.Tensor, server: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
    """Equation 3. With weight 1 the result is the server's model, to the bit."""
    dtype = tf.float64 if local.dtype == tf.float64 else tf.float32
    weight = tf.cast(weight, dtype)
    return tf.cast((1 - weight) * tf.cast(local, dtype) + weight * tf.cast(server, dtype), local.dtype)

"""DTS with all ranks in one process and one thread, without time.

A rank's steps use the real code: Keras's optimizer, `OuterOptimizer` and `MomentumOuterOptimizer`. Only the mean over
ranks is in NumPy instead. D = 0, p = 1 is synchronous training, with SGD of any kind.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import keras
import numpy as np
import tensorflow as tf

from hop_tf.codecs import TopK
from hop_tf.runtime.outer_optimizer import OuterOptimizer
from hop_tf.strategies.dts.exchange import DTSSettings
from hop_tf.strategies.dts.momentum import MomentumOuterOptimizer, checked_descent
from hop_tf.strategies.dts.windows import Schedule, largest


class Rank:
    """A rank's model, with the parts that `DTSStrategy` adds to its step.

    Args:
      model: The model, built.
      optimizer: The optimizer of the model.
      loss: `loss(y, y_pred)` of each row.
      settings: Those of the strategy.
      outer_optimizer: The outer optimizer, not built, or None.

    Attributes:
      model: The model.
      optimizer: The optimizer of the model.
      outer: The merged weights.
      step: `step(x, y)` trains with this rank's rows, and returns the loss.
      submit: `submit(window, everything)` ends a window, and returns the changes to be averaged.
      merge: `merge(means, num_newer, share, num_steps)` merges a window of so many steps.
      approach: `approach(num_in_flight)`: as of `OuterOptimizer`; called at the end of a window.
      settle: As of `OuterOptimizer`.
    """

    def __init__(
        self,
        model: keras.Model,
        optimizer: keras.optimizers.Optimizer,
        loss: Callable,
        settings: DTSSettings,
        outer_optimizer: keras.optimizers.Optimizer | None = None,
    ):
        self.model = model
        self.optimizer = optimizer
        self._loss = loss
        self._settings = settings
        optimizer.build(model.trainable_variables)
        self._trained = [variable.value for variable in model.trainable_variables]
        carried = [variable.value for variable in model.non_trainable_variables if variable.value.dtype.is_floating]
        variables = [*self._trained, *carried]
        self.outer = self._make_outer(variables, [variable.read_value() for variable in variables], outer_optimizer)
        methods = self._step, self._submit, self._merge, self._approach, self.outer.settle
        self.step, self.submit, self.merge, self.approach, self.settle = map(tf.function, methods)

    def _make_outer(self, variables, values, outer_optimizer) -> OuterOptimizer:
        return OuterOptimizer(
            variables,
            values,
            num_trained=len(self._trained),
            max_newer=self._settings.num_slots - 1,
            optimizer=outer_optimizer,
            gently=self._settings.may_merge_gently,
        )

    def _step(self, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self._loss(y, self.model(x, training=True)))
        self.optimizer.apply(tape.gradient(loss, self._trained), self.model.trainable_variables)
        return loss

    def _submit(self, window: tf.Tensor, everything: bool) -> list[tf.Tensor]:
        selection = None if everything else self._settings.selection
        return self.outer.take(functools.partial(largest, selection, window) if selection else None)

    def _merge(self, means: list[tf.Tensor], num_newer: int, share: tf.Tensor, num_steps: int) -> None:
        del num_steps
        means = self.outer.merge(means, share)
        if self._settings.may_merge_gently:
            self.outer.follow(means, num_newer)
        else:
            self.outer.give(num_newer)

    def _approach(self, num_in_flight: int) -> None:
        if self._settings.may_merge_gently:
            self.outer.approach(num_in_flight, interval=self._settings.interval)


class MomentumRank(Rank):
    """A rank with `compensation="momentum"`."""

    def _make_outer(self, variables, values, outer_optimizer) -> MomentumOuterOptimizer:
        del outer_optimizer
        descent = checked_descent(self.optimizer, self._trained)
        max_newer = self._settings.num_slots - 1
        return MomentumOuterOptimizer(descent, variables, values, num_trained=len(self._trained), max_newer=max_newer)

    def _step(self, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        loss = super()._step(x, y)
        self.outer.count_step()
        return loss

    def _merge(self, means: list[tf.Tensor], num_newer: int, share: tf.Tensor, num_steps: int) -> None:
        self.outer.let_merged_coast(num_steps)
        self.outer.correct(self.outer.merge(means, share), num_newer, self._settings.delay)


class Job:
    """Ranks that make their steps together.

    Args:
      ranks: The ranks, with equal weights.
      schedule: The schedule of windows.

    Attributes:
      ranks: The ranks.
    """

    def __init__(self, ranks: Sequence[Rank], schedule: Schedule):
        self.ranks = ranks
        self._schedule = schedule
        self._num_steps = 0
        self._means: dict[int, list] = {}

    def step(self, x: np.ndarray, y: np.ndarray) -> float:
        """Trains with a global batch, of which each rank takes an equal part, in order. Returns the mean loss."""
        shares = zip(self.ranks, np.split(x, len(self.ranks)), np.split(y, len(self.ranks)), strict=True)
        losses = [rank.step(tf.constant(x), tf.constant(y)) for rank, x, y in shares]
        self._num_steps += 1
        has_ended, ended = self._schedule.ended(self._num_steps)
        if has_ended:
            self._average(ended)
        is_due, due = self._schedule.due(self._num_steps)
        if is_due:
            self._merge(due, self._schedule.interval)
        if has_ended:
            for rank in self.ranks:
                rank.approach(len(self._means))
        return float(np.mean(losses))

    def finish(self) -> None:
        """Merges the windows in flight, as the end of `fit` does."""
        in_flight = self._schedule.in_flight(self._num_steps)
        self._average(in_flight.stop, everything=True)
        for window in in_flight:
            self._merge(window, self._schedule.interval)
        self._merge(in_flight.stop, self._num_steps % self._schedule.interval)
        for rank in self.ranks:
            rank.settle()
        self._num_steps = 0

    def _average(self, window: int, everything: bool = False) -> None:
        number = tf.constant(window, tf.int64)
        given = [[each.numpy() for each in rank.submit(number, everything)] for rank in self.ranks]
        self._means[window] = [np.mean(parts, axis=0) for parts in zip(*given, strict=True)]

    def _merge(self, window: int, num_steps: int) -> None:
        means = [tf.constant(mean) for mean in self._means.pop(window)]
        for rank in self.ranks:
            rank.merge(means, len(self._means), tf.constant(float(num_steps > 0)), num_steps)


def make_job(
    world_size: int,
    make_model: Callable[[], keras.Model],
    make_optimizer: Callable[[], keras.optimizers.Optimizer],
    loss: Callable,
    *,
    delay: int,
    interval: int,
    selection: TopK | None = None,
    compensation: str = "gentle",
    make_outer_optimizer: Callable[[], keras.optimizers.Optimizer | None] = lambda: None,
) -> Job:
    """Makes a job.

    Args:
      world_size: Number of ranks.
      make_model: Makes a rank's model, equal on all ranks.
      make_optimizer: Makes a rank's optimizer.
      loss: `loss(y, y_pred)` of each row.
      delay: D.
      interval: p.
      selection: Selects the changes of a window that are sent. None: all.
      compensation: As of `DTSStrategy`.
      make_outer_optimizer: Makes a rank's outer optimizer. Default: none.

    Returns:
      The job. All ranks have the first one's weights.
    """
    settings = DTSSettings(
        delay=delay,
        interval=interval,
        codec=selection,
        algorithm="mesh",
        outer_optimizer=str(make_outer_optimizer()),
        compensation=compensation,
    )
    rank = MomentumRank if settings.corrects_momentum else Rank
    ranks = [rank(make_model(), make_optimizer(), loss, settings, make_outer_optimizer()) for _ in range(world_size)]
    for each in ranks:
        each.model.set_weights(ranks[0].model.get_weights())
        each.outer.begin()
    return Job(ranks, Schedule(delay, interval))

"""DTS with all ranks in one process and one thread, without time.

A rank's steps use the real code: Keras's optimizer and `OuterSteps`. Only the mean over ranks is in NumPy instead.
D = 0, p = 1 is synchronous training, with SGD of any kind.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import keras
import numpy as np
import tensorflow as tf

from hop_tf.codecs import TopK
from hop_tf.runtime.outer import OuterSteps
from hop_tf.strategies.dts.exchange import DTSSettings
from hop_tf.strategies.dts.windows import Schedule, largest


class Rank:
    """A rank's model, with the parts that `DTSStrategy` adds to its step.

    Args:
      model: The model, built.
      optimizer: The optimizer of the model.
      loss: `loss(y, y_pred)` of each row.
      schedule: The schedule of windows.
      selection: Selects the changes of a window that are sent. None: all.
      outer_optimizer: The outer optimizer, not built, or None.
      gently: True if means are merged gently.

    Attributes:
      model: The model.
      optimizer: The optimizer of the model.
      outer: The merged weights.
      step: `step(x, y)` trains with this rank's rows, and returns the loss.
      hand_out: `hand_out(window, everything)` ends a window, and returns the changes to be averaged.
      merge: `merge(means, num_newer, share)` merges a window.
      approach: `approach(num_under_way)`: as of `OuterSteps`; called at the end of a window if merging is gentle.
      settle: As of `OuterSteps`.
    """

    def __init__(
        self,
        model: keras.Model,
        optimizer: keras.optimizers.Optimizer,
        loss: Callable,
        schedule: Schedule,
        selection: TopK | None,
        outer_optimizer: keras.optimizers.Optimizer | None = None,
        gently: bool = False,
    ):
        self.model = model
        self.optimizer = optimizer
        self._loss = loss
        self._selection, self._gently = selection, gently
        optimizer.build(model.trainable_variables)
        self._trained = [variable.value for variable in model.trainable_variables]
        carried = [variable.value for variable in model.non_trainable_variables if variable.value.dtype.is_floating]
        variables = [*self._trained, *carried]
        self.outer = OuterSteps(
            variables,
            [variable.read_value() for variable in variables],
            num_trained=len(self._trained),
            max_newer=schedule.num_slots - 1,
            optimizer=outer_optimizer,
            gently=gently,
        )
        approach = functools.partial(self.outer.approach, interval=schedule.interval)
        methods = self._step, self._hand_out, self._merge, approach, self.outer.settle
        self.step, self.hand_out, self.merge, self.approach, self.settle = map(tf.function, methods)

    def _step(self, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self._loss(y, self.model(x, training=True)))
        self.optimizer.apply(tape.gradient(loss, self._trained), self.model.trainable_variables)
        return loss

    def _hand_out(self, window: tf.Tensor, everything: bool) -> list[tf.Tensor]:
        choose = functools.partial(largest, self._selection, window) if self._selection and not everything else None
        return self.outer.take(choose)

    def _merge(self, means: list[tf.Tensor], num_newer: int, share: tf.Tensor) -> None:
        means = self.outer.merge(means, share)
        if self._gently:
            self.outer.follow(means, num_newer)
        else:
            self.outer.give(num_newer)


class Job:
    """Ranks that make their steps together.

    Args:
      ranks: The ranks, with equal weights.
      schedule: The schedule of windows.
      gently: True if means are merged gently.

    Attributes:
      ranks: The ranks.
    """

    def __init__(self, ranks: Sequence[Rank], schedule: Schedule, gently: bool = False):
        self.ranks = ranks
        self._schedule, self._gently = schedule, gently
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
            self._merge(due)
        if has_ended and self._gently:
            for rank in self.ranks:
                rank.approach(len(self._means))
        return float(np.mean(losses))

    def finish(self) -> None:
        """Merges the windows in flight, as the end of `fit` does."""
        under_way = self._schedule.under_way(self._num_steps)
        self._average(under_way.stop, everything=True)
        for window in under_way:
            self._merge(window)
        self._merge(under_way.stop, has_steps=self._num_steps % self._schedule.interval > 0)
        for rank in self.ranks:
            rank.settle()
        self._num_steps = 0

    def _average(self, window: int, everything: bool = False) -> None:
        number = tf.constant(window, tf.int64)
        given = [[each.numpy() for each in rank.hand_out(number, everything)] for rank in self.ranks]
        self._means[window] = [np.mean(parts, axis=0) for parts in zip(*given, strict=True)]

    def _merge(self, window: int, *, has_steps: bool = True) -> None:
        means = [tf.constant(mean) for mean in self._means.pop(window)]
        for rank in self.ranks:
            rank.merge(means, len(self._means), tf.constant(float(has_steps)))


def make_job(
    world_size: int,
    make_model: Callable[[], keras.Model],
    make_optimizer: Callable[[], keras.optimizers.Optimizer],
    loss: Callable,
    *,
    delay: int,
    interval: int,
    selection: TopK | None = None,
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
      make_outer_optimizer: Makes a rank's outer optimizer. Default: none.

    Returns:
      The job. All ranks have the first one's weights.
    """
    schedule = Schedule(delay, interval)
    outer = make_outer_optimizer()
    settings = DTSSettings(delay=delay, interval=interval, codec=None, algorithm="mesh", outer_optimizer=str(outer))
    gently = settings.may_merge_gently
    ranks = [
        Rank(make_model(), make_optimizer(), loss, schedule, selection, make_outer_optimizer(), gently)
        for _ in range(world_size)
    ]
    for rank in ranks:
        rank.model.set_weights(ranks[0].model.get_weights())
        rank.outer.begin()
    return Job(ranks, schedule, gently)

"""DTS with all ranks in one process and one thread, where time does not matter.

What a rank does is the product's own: Keras's optimizer, `Windows`, `LateChanges`. What all do together is a mean in
NumPy. D = 0, p = 1 is synchronous training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import keras
import numpy as np
import tensorflow as tf

from hop_tf.averaging import LateChanges
from hop_tf.codecs import TopK
from hop_tf.strategies.dts_windows import Schedule, Windows


class Rank:
    """A rank's model, and what `DTSStrategy` adds to its step.

    Args:
      model: The model. It is built.
      optimizer: Its optimizer.
      loss: `loss(y, y_pred)` of each row.
      schedule: When windows end.
      selection: Which part of a window is handed out; None: all of it.

    Attributes:
      model: The model.
      optimizer: Its optimizer.
      windows: What it accumulates.
      step: Trains with this rank's rows, `step(x, y)`; returns the loss.
      hand_out: Ends a window, `hand_out(window, everything)`; returns what is to be averaged of it.
      correct: `correct(window, differences)`, replaces what this rank has done in a window by what all have done.
    """

    def __init__(
        self,
        model: keras.Model,
        optimizer: keras.optimizers.Optimizer,
        loss: Callable,
        schedule: Schedule,
        selection: TopK | None,
    ):
        self.model = model
        self.optimizer = optimizer
        self._loss = loss
        optimizer.build(model.trainable_variables)
        self._trained = [variable.value for variable in model.trainable_variables]
        carried = [variable.value for variable in model.non_trainable_variables if variable.value.dtype.is_floating]
        self._carried = LateChanges(carried, [variable.read_value() for variable in carried])
        self.windows = Windows(
            optimizer,
            self._trained,
            interval=schedule.interval,
            num_slots=schedule.num_slots,
            compensation="exact",
            selection=selection,
        )
        self.step, self.hand_out, self.correct = map(tf.function, (self._step, self._hand_out, self._correct))

    def _step(self, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        before, rate = [variable.read_value() for variable in self._trained], self.optimizer.learning_rate
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self._loss(y, self.model(x, training=True)))
        gradients = tape.gradient(loss, self._trained)
        self.optimizer.apply(gradients, self.model.trainable_variables)
        self.windows.accumulate(before, gradients, rate)
        return loss

    def _hand_out(self, window: tf.Tensor, everything: bool) -> list[tf.Tensor]:
        return [*self.windows.hand_out(window, everything), *self._carried.take()]

    def _correct(self, window: tf.Tensor, differences: Sequence[tf.Tensor]) -> None:
        num_windowed = self.windows.num_vectors * len(self._trained)
        self.windows.correct(window, differences[:num_windowed])
        self._carried.add(differences[num_windowed:])


class Job:
    """Ranks in step.

    Args:
      ranks: The ranks, with equal weights.
      schedule: When windows end.
      selects: Whether ranks hand out parts of their windows only.

    Attributes:
      ranks: The same.
    """

    def __init__(self, ranks: Sequence[Rank], schedule: Schedule, selects: bool):
        self.ranks = ranks
        self._schedule = schedule
        self._selects = selects
        self._num_steps = 0
        self._differences: dict[int, list] = {}

    def step(self, x: np.ndarray, y: np.ndarray) -> float:
        """Trains with a global batch, of which ranks take equal parts after each other; returns the mean loss."""
        shares = zip(self.ranks, np.split(x, len(self.ranks)), np.split(y, len(self.ranks)), strict=True)
        losses = [rank.step(tf.constant(x), tf.constant(y)) for rank, x, y in shares]
        self._num_steps += 1
        has_ended, ended = self._schedule.ended(self._num_steps)
        if has_ended:
            self._average(ended)
        is_due, due = self._schedule.due(self._num_steps)
        if is_due:
            self._correct(due)
        return float(np.mean(losses))

    def finish(self) -> None:
        """Applies what is under way, as the end of `fit` does. Nothing comes after it."""
        if self._num_steps % self._schedule.interval or self._selects:
            self._average(self._schedule.under_way(self._num_steps).stop, everything=True)
        for window in sorted(self._differences):
            self._correct(window)

    def _average(self, window: int, everything: bool = False) -> None:
        number = tf.constant(window, tf.int64)
        given = [[each.numpy() for each in rank.hand_out(number, everything)] for rank in self.ranks]
        means = [np.mean(parts, axis=0) for parts in zip(*given, strict=True)]
        self._differences[window] = [
            [mean - own for mean, own in zip(means, of_rank, strict=True)] for of_rank in given
        ]

    def _correct(self, window: int) -> None:
        for rank, differences in zip(self.ranks, self._differences.pop(window), strict=True):
            rank.correct(tf.constant(window, tf.int64), [tf.constant(difference) for difference in differences])


def make_job(
    world_size: int,
    make_model: Callable[[], keras.Model],
    make_optimizer: Callable[[], keras.optimizers.Optimizer],
    loss: Callable,
    *,
    delay: int,
    interval: int,
    selection: TopK | None = None,
) -> Job:
    """Makes a job.

    Args:
      world_size: Number of ranks.
      make_model: Makes a rank's model; equal on all ranks.
      make_optimizer: Makes its optimizer.
      loss: `loss(y, y_pred)` of each row.
      delay: D.
      interval: p.
      selection: Which part of a window is handed out; None: all of it.

    Returns:
      The job. All ranks have the first one's weights.
    """
    schedule = Schedule(delay, interval)
    ranks = [Rank(make_model(), make_optimizer(), loss, schedule, selection) for _ in range(world_size)]
    for rank in ranks:
        rank.model.set_weights(ranks[0].model.get_weights())
    return Job(ranks, schedule, selects=selection is not None)

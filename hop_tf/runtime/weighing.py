"""`RowWeighing`: the weights of a rank's steps in means over the ranks, if ranks take unequal parts of a batch."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from hop_tf.keras_hook.shares import BatchShares
from hop_tf.keras_hook.trace import StepTrace
from hop_tf.membership.rounds import Rounds
from hop_tf.runtime.shares import WARMUP_STEPS, RowStatistics, agree_on_shares


class RowWeighing:
    """Counts and times the rows of a rank's steps, and lets ranks agree on their shares of a batch.

    Args:
      shares: The part of a batch that each rank takes.
    """

    def __init__(self, shares: BatchShares):
        self._shares = shares
        self._rounds: Rounds | None = None
        self._rows_before = 0.0  # Rows before the running epoch.
        self._num_epochs, self._has_warmed_up = 0, False  # Epochs that have begun in the running `fit`.

    @functools.cached_property
    def _statistics(self) -> RowStatistics:
        """The counts. Not created in the constructor: programs may still choose their devices."""
        return RowStatistics()

    def begin_fit(self, rounds: Rounds | None) -> None:
        """Called when a `fit` begins. `rounds` is None if shares do not change."""
        self._num_epochs, self._has_warmed_up = 0, False
        self._rows_before = float(self._statistics.total)
        self._rounds = rounds

    def begin_epoch(self, *, agrees: bool) -> None:
        """Called when an epoch begins. Lets ranks agree on shares first, except in the first epoch."""
        if self._num_epochs and agrees:
            self._agree(2 * self._num_epochs)
        self._num_epochs += 1

    def end_batch(self, num_steps: int, *, agrees: bool) -> None:
        """Called with the epoch's number of steps so far. Ranks agree on shares after the first steps of a `fit`."""
        if self._num_epochs == 1 and not self._has_warmed_up and num_steps >= WARMUP_STEPS:
            self._has_warmed_up = True
            if agrees:
                self._agree(1)

    def _agree(self, position: int) -> None:
        if self._rounds is not None:
            agree_on_shares(self._rounds, position, self._shares, self._statistics.take_seconds_per_row())

    def end_fit(self) -> None:
        """Called when this rank has made its last step of a `fit`."""
        if self._rounds is not None:
            self._rounds.end()

    def take_weight(self) -> float:
        """This rank's weight in the means of an epoch's metrics: the rows that it has trained on, at least 1."""
        before, self._rows_before = self._rows_before, float(self._statistics.total)
        return max(1.0, self._rows_before - before)

    def begin_step(self, trace: StepTrace) -> None:
        """Emits the ops that count the rows of a model's step. In a custom loop, the rows are not known."""
        rows = None if trace.model is None else trace.num_rows()
        self._shares.begin_step(rows)
        if rows is None:
            return
        with trace.when_data_is_here():
            self._statistics.count(rows)
            if self._shares.is_automatic:
                trace.comes_first.append(self._statistics.begin_step())

    def end_step(self, trace: StepTrace, gradients: Sequence) -> None:
        """Emits the ops that record the time of a model's step until these gradients are there."""
        if self._shares.is_automatic and trace.model is not None:
            self._statistics.end_step(self._shares.rows, gradients)

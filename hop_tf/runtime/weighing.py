"""`RowWeighing`: what a rank's steps weigh among those of others, where ranks take unequal parts of a batch."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from hop_tf.keras_hook.shares import BatchShares
from hop_tf.keras_hook.trace import StepTrace
from hop_tf.runtime.shares import WARMUP_STEPS, RowStatistics, ShareAgreement


class RowWeighing:
    """Counts and times the rows of a rank's steps, and lets ranks agree on their shares of a batch by that.

    Args:
      shares: What part of a batch each rank takes.
    """

    def __init__(self, shares: BatchShares):
        self._shares = shares
        self._agreement: ShareAgreement | None = None
        self._rows_before = 0.0  # The epoch that is under way.
        self._num_epochs, self._has_warmed_up = 0, False  # That have begun in the running `fit`.

    @functools.cached_property
    def _statistics(self) -> RowStatistics:
        """Not made in the constructor: programs may still choose their devices."""
        return RowStatistics()

    def begin_fit(self, agreement: ShareAgreement | None, *, takes_part: bool) -> None:
        """A `fit` begins; `agreement` is None where shares do not change, and `takes_part` is that of it."""
        self._num_epochs, self._has_warmed_up = 0, False
        self._rows_before = float(self._statistics.total)
        self._agreement = agreement
        if agreement is not None:
            agreement.takes_part = takes_part

    def begin_epoch(self, *, agrees: bool) -> None:
        """An epoch begins; ranks agree on shares before, but for the first one."""
        if self._num_epochs and agrees:
            self._agree(2 * self._num_epochs)
        self._num_epochs += 1

    def end_batch(self, num_steps: int, *, agrees: bool) -> None:
        """An epoch has made so many steps; ranks agree on shares after the first ones of a `fit`."""
        if self._num_epochs == 1 and not self._has_warmed_up and num_steps >= WARMUP_STEPS:
            self._has_warmed_up = True
            if agrees:
                self._agree(1)

    def _agree(self, position: int) -> None:
        if self._agreement is not None:
            self._agreement.agree(position, self._statistics.take_seconds_per_row())

    def end_fit(self) -> None:
        """This rank has made its last step of a `fit`."""
        if self._agreement is not None:
            self._agreement.end()

    def take_weight(self) -> float:
        """What this rank weighs in the means of an epoch's metrics: the rows that it has trained on in it."""
        before, self._rows_before = self._rows_before, float(self._statistics.total)
        return max(1.0, self._rows_before - before)

    def begin_step(self, trace: StepTrace) -> None:
        """Emits the ops that count the rows of a model's step; a custom loop does not tell them."""
        rows = None if trace.model is None else trace.num_rows()
        self._shares.begin_step(rows)
        if rows is None:
            return
        with trace.when_data_is_here():
            self._statistics.count(rows)
            if self._shares.is_automatic:
                trace.comes_first.append(self._statistics.begin_step())

    def end_step(self, trace: StepTrace, gradients: Sequence) -> None:
        """Emits the ops that note how long a model's step took until these gradients were there."""
        if self._shares.is_automatic and trace.model is not None:
            self._statistics.end_step(self._shares.rows, gradients)

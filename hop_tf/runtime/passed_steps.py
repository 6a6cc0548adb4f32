"""`PassedSteps`: the steps that a rank passes over."""

from __future__ import annotations

from collections.abc import Callable

import keras
import tensorflow as tf

from hop_tf.keras_hook.skipping import StepSkipping


class PassedSteps:
    """Passes over steps where the scheme wants that, and in a process that was started again, to catch up with others.

    Args:
      rank: This rank.
      why: Why the scheme passes over steps, for errors (see `StepSkipping`); empty: it does not.
      takes_count: Whether a rank that has caught up counts its optimizer's steps as the others do.
      must_catch_up: Whether this process was started again, and has to catch up before it trains.
      may_fall_behind: True if the others may go on without this rank, and let it join them again.
      catch_up: Given the optimizer, emits what brings a rank that was started again to where the others are; see
        `StepSkipping.begin_by_skipping`.
    """

    def __init__(
        self,
        *,
        rank: int,
        why: str,
        takes_count: bool,
        must_catch_up: Callable[[], bool],
        may_fall_behind: bool,
        catch_up: Callable[[object], tf.Tensor],
    ):
        self._rank = rank
        self._takes_count = takes_count
        self._must_catch_up = must_catch_up
        self.may_fall_behind = may_fall_behind
        self._catch_up = catch_up
        self._is_catching_up = False
        self._skipping = StepSkipping(why) if why else None

    def begin_session(self) -> None:
        """Forgets what was left to be passed over when the last session ended."""
        if self._skipping is not None:
            self._skipping.begin_session()

    @property
    def is_behind(self) -> bool:
        """Whether this rank was started again, and is not yet where the others are."""
        return self._must_catch_up() or (self._is_catching_up and self._skipping.is_behind)

    def fall_behind(self) -> None:
        """The others have gone on without this rank: it passes over steps until it is where they are."""
        self._skipping.fall_behind()

    @property
    def has_no_metrics(self) -> bool:
        """True if all steps since the metrics were reset were passed over."""
        return self._skipping is not None and self._skipping.has_no_metrics

    def around_step(self, step: Callable[[], object], arguments: object, model: keras.Model) -> object:
        """Emits the step, unless it is to be passed over."""
        return self._skipping.run(step, arguments, model) if self._are_possible() else step()

    def note_update(self, optimizer: object, *, in_fit: bool) -> None:
        """Refuses a step that cannot be passed over, if some are; see `StepSkipping.note`."""
        if self._are_possible():
            self._skipping.note(optimizer, in_fit=in_fit)

    def skip(self, num_updates: tf.Tensor) -> None:
        """Emits the op that passes over the steps of the next `num_updates` updates."""
        if self._skipping is not None:
            self._skipping.skip(num_updates)

    def _are_possible(self) -> bool:
        if self._must_catch_up() and not self._is_catching_up:
            self._is_catching_up = True
            self._skipping = self._skipping or StepSkipping(
                f"rank {self._rank} was started again: to join the running job, it passes over the steps it has missed."
            )
            self._skipping.begin_by_skipping(self._catch_up, takes_count=self._takes_count)
        elif self.may_fall_behind and not self._is_catching_up:
            self._is_catching_up = True
            self._skipping = self._skipping or StepSkipping(
                f"rank {self._rank} has `patience_seconds`: should the others go on without it, it passes over the "
                "steps it has missed, and joins them."
            )
            self._skipping.let_catch_up(self._catch_up, takes_count=self._takes_count)
        return self._skipping is not None

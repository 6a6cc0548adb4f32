"""`PassedSteps`: the steps that a rank skips."""

from __future__ import annotations

from collections.abc import Callable

import keras
import tensorflow as tf

from hop_tf.keras_hook.skipping import StepSkipping


class PassedSteps:
    """Skips steps if the scheme says so, or if a process that was started again has to catch up with the others.

    Args:
      rank: This rank.
      why: The scheme's reason to skip steps, for error texts (see `StepSkipping`); empty if it never does.
      takes_count: True if a rank that has caught up takes over the others' count of optimizer steps. Otherwise it
        counts the steps that it has skipped.
      must_catch_up: Returns True if this process was started again, and has to catch up before it trains.
      may_fall_behind: True if the others may continue without this rank, and let it join them again.
      catch_up: Given the optimizer, emits the ops that bring a restarted rank to the others' position; see
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
        """Forgets the steps that were left to skip when the last session ended."""
        if self._skipping is not None:
            self._skipping.begin_session()

    @property
    def is_behind(self) -> bool:
        """True if this rank was started again, or left behind, and has yet to catch up with the others."""
        return self._must_catch_up() or (self._is_catching_up and self._skipping.is_behind)

    def fall_behind(self) -> None:
        """Called when the others have continued without this rank. The rank skips steps until it has caught up."""
        self._skipping.fall_behind()

    @property
    def has_no_metrics(self) -> bool:
        """True if all steps since the metrics were reset were skipped."""
        return self._skipping is not None and self._skipping.has_no_metrics

    def around_step(self, step: Callable[[], object], arguments: object, model: keras.Model) -> object:
        """Emits the step, unless it is to be skipped."""
        return self._skipping.run(step, arguments, model) if self._are_possible() else step()

    def note_update(self, optimizer: object, *, in_fit: bool) -> None:
        """Refuses a step that cannot be skipped, if this rank may have to skip steps; see `StepSkipping.note`."""
        if self._are_possible():
            self._skipping.note(optimizer, in_fit=in_fit)

    def skip(self, num_updates: tf.Tensor) -> None:
        """Emits the op that skips the steps of the next `num_updates` updates."""
        if self._skipping is not None:
            self._skipping.skip(num_updates)

    def _are_possible(self) -> bool:
        if self._must_catch_up() and not self._is_catching_up:
            self._is_catching_up = True
            self._skipping = self._skipping or StepSkipping(
                f"rank {self._rank} was restarted. To join the running job, it skips the steps that it has missed."
            )
            self._skipping.begin_by_skipping(self._catch_up, takes_count=self._takes_count)
        elif self.may_fall_behind and not self._is_catching_up:
            self._is_catching_up = True
            self._skipping = self._skipping or StepSkipping(
                f"rank {self._rank} has `patience_seconds`. If the others continue without it, it skips the steps that "
                "it has missed, and rejoins them."
            )
            self._skipping.let_catch_up(self._catch_up, takes_count=self._takes_count)
        return self._skipping is not None

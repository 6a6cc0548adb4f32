"""`MissedSteps`: the batches of steps that others have made without this rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hop_tf.keras_hook.optimizers import gradient_accumulation_steps, iterations_variable
from hop_tf.runtime.group import Group


class MissedSteps:
    """Skips batches whose steps others have made while they did not hear from this rank (`Exchange.step_offset`).

    This happens between two steps of `fit`, so it costs the graph nothing. The optimizer's count, and schedules of
    learning rates, continue as if the steps had been made. The optimizer's slots stay as they are. With several steps
    per execution, only whole executions are skipped.
    """

    def __init__(self):
        self.begin_training()

    def begin_training(self) -> None:
        """Called when `fit` is about to make its first step."""
        self._num_made = self._num_passed = self._num_left = 0  # Batches.
        self._offsets: dict[Group, int] = {}  # The latest offsets other than 0.
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """Called when an epoch begins."""
        self._has_made_any = False
        self.num_at_end = 0  # Batches of the epoch that were skipped since its last step.

    @property
    def are_all(self) -> bool:
        """True if the epoch had batches, and all were skipped."""
        return bool(self.num_at_end) and not self._has_made_any

    def pass_over(self, groups: Sequence[Group], number: int, take: Callable[[], object]) -> bool:
        """Takes the next `number` batches if they are to be skipped. Returns False if they are to be trained on."""
        offsets = {group: group.exchange.step_offset for group in groups if group.exchange.step_offset}
        if offsets != self._offsets:
            self._note(offsets)
        if self._num_left < number:
            self._num_made += number
            self._has_made_any, self.num_at_end = True, 0
            return False
        for _ in range(number):
            take()
            self._num_left -= 1
            self._num_passed += 1
            self.num_at_end += 1
        return True

    def _note(self, offsets: dict[Group, int]) -> None:
        missed = [self._num_batches(group, offset) for group, offset in offsets.items()]
        self._num_left = max(0, min(missed, default=0) - self._num_passed)
        for group, offset in offsets.items():
            optimizer = group.optimizer()
            num_updates = offset - self._offsets.get(group, 0)
            iterations_variable(optimizer).assign_add(num_updates * gradient_accumulation_steps(optimizer))
        self._offsets = offsets

    def _num_batches(self, group: Group, num_updates: int) -> int:
        """The number of batches in `num_updates` updates. A batch may make several, or several batches make one."""
        size = gradient_accumulation_steps(group.optimizer())
        num_made = self._num_made // size * size  # Without batches whose accumulated gradients await an update.
        return num_updates * num_made // max(1, int(group.step))

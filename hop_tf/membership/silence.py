"""`Silence`: silent ranks, which others need not wait for."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection

from absl import logging

from hop_tf.membership.patience import Questions
from hop_tf.membership.waiting import Waiting

# The transport's threads answer a question within this time plus 8 round trips, even while the rank computes.
_ANSWER_SECONDS = 0.2
# A waiting rank wakes up for each message. It checks less often, because checking takes time.
_LOOK_SECONDS = 0.1
# A process that has not checked for this long was stopped itself, and has yet to read messages that came meanwhile.
_STANDSTILL_SECONDS = 1.0


class Silence:
    """The ranks that are silent: frozen or cut off, but not lost yet.

    Only awaited ranks are checked, so that ordinary steps cost nothing. A rank that was not heard for some tenths of a
    second gets an empty message, which its transport acknowledges. If no answer comes, the rank is silent. Its silence
    ends when it is heard again, is lost or has left. A lost rank is not among the silent ones: a rank that waits for it
    detects the loss, and tells the others. Methods are called with the monitor held.

    Args:
      membership: Knows when a rank was last heard.
      name: Name of the queue of empty messages, equal on all ranks.
      on_heard: Called with a rank that is no longer silent.

    Attributes:
      ranks: The silent ranks. The set is replaced instead of changed, so that it can be read without the monitor.
      num_passed_by: Number of times that a rank was found to be silent.
    """

    def __init__(self, membership: Waiting, name: str, on_heard: Callable[[int], None] = lambda rank: None):
        self._membership = membership
        self._transport = membership.transport
        self._questions = Questions(membership.transport, membership.monitor, name)
        self._on_heard = on_heard
        self.num_passed_by = 0
        self.reset()

    def close(self) -> None:
        """Stops taking messages."""
        self._questions.close()

    def reset(self) -> None:
        """Forgets the last session."""
        self.ranks: frozenset[int] = frozenset()
        self._found_at: dict[int, float] = {}
        self.begin()

    def begin(self) -> None:
        """Called when this rank begins to wait."""
        self._looked_at = math.inf
        self._questions.forget()

    def look(self, awaited: Collection[int]) -> bool:
        """Checks the awaited ranks for silence. Returns True if it finds a new silent one. Called at each wake-up."""
        now = self._membership.monitor.now()
        if 0 <= now - self._looked_at < _LOOK_SECONDS:
            return False
        if now > self._looked_at + _STANDSTILL_SECONDS:
            self._questions.forget()
        self._looked_at = now
        new = [rank for rank in awaited if rank not in self.ranks and self._has_not_answered(rank)]
        for rank in new:
            logging.info("rank %d: rank %d is silent. This rank does not wait for it.", self._membership.rank, rank)
            self._found_at[rank] = now
        self.num_passed_by += len(new)
        self.ranks |= {*new}
        return bool(new)

    def _has_not_answered(self, rank: int) -> bool:
        status = self._transport.status(rank)
        if status.silent_seconds <= _ANSWER_SECONDS or self._membership.is_past_hope(rank):
            return False
        waited = self._questions.seconds_unanswered(rank, status.silent_seconds)
        return dataclasses.replace(status, silent_seconds=waited).was_silent_for(_ANSWER_SECONDS)

    def look_again(self) -> None:
        """Checks if silent ranks are heard again."""
        for rank in self.ranks:
            since = self._membership.monitor.now() - self._found_at[rank]
            if self._transport.status(rank).silent_seconds < since:
                self.hear(rank)
            elif self._membership.is_past_hope(rank) or self._membership.departure(rank) is not None:
                self.ranks -= {rank}

    def hear(self, rank: int) -> None:
        """Called when a rank was heard."""
        if rank in self.ranks:
            self.ranks -= {rank}
            self._on_heard(rank)

    def wait(self, missing: Callable[[], Collection[int]], **arguments) -> None:
        """Waits as `Membership.wait` does. `missing` should leave out ranks that become silent meanwhile."""

        def awaited() -> Collection[int]:
            self.look_again()
            ranks = missing()
            while ranks and self.look(ranks):
                ranks = missing()
            return ranks

        with self._membership.monitor:
            self.begin()
        self._membership.wait(awaited, **arguments)

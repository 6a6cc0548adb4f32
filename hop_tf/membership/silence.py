"""`Silence`: ranks of which nothing is heard, so that others need not wait for them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection

from absl import logging

from hop_tf.membership.questions import Questions
from hop_tf.membership.waiting import Waiting

# A question is answered within that time and 8 round trips: by the transport's threads, whatever the rank computes.
_ANSWER_SECONDS = 0.2
# A waiting rank wakes up for each message. It looks less often, because looking takes time.
_LOOK_SECONDS = 0.1
# A process that has not looked for so long has stood still itself: what has come meanwhile is not read yet.
_STANDSTILL_SECONDS = 1.0


class Silence:
    """The ranks that are silent: frozen, or cut off, and not lost yet.

    Only a rank that is waited for is found to be silent, so that ordinary steps do not look. If it was not heard for
    some tenths of a second, it is sent an empty message, which its transport acknowledges. It is silent if nothing
    comes back, and no longer when something is heard of it, or it is lost, or has left: a rank that is lost has to be
    waited for, so that the others hear of that. Methods are called with the monitor held.

    Args:
      membership: Knows when a rank was heard.
      name: Names the queue of empty messages, on all ranks alike.
      on_heard: Called with a rank that is silent no longer.

    Attributes:
      ranks: Those that are silent. It is replaced, and not changed: it can be read without the monitor.
      num_passed_by: How many times a rank was found to be silent.
    """

    def __init__(self, membership: Waiting, name: str, on_heard: Callable[[int], None] = lambda rank: None):
        self._membership = membership
        self._transport = membership.transport
        self._questions = Questions(membership.transport, membership.monitor, name)
        self._on_heard = on_heard
        self.num_passed_by = 0
        self.reset()

    def close(self) -> None:
        """Takes no more messages."""
        self._questions.close()

    def reset(self) -> None:
        """Forgets the session that was."""
        self.ranks: frozenset[int] = frozenset()
        self._found_at: dict[int, float] = {}
        self.begin()

    def begin(self) -> None:
        """This rank begins to wait."""
        self._looked_at = math.inf
        self._questions.forget()

    def look(self, awaited: Collection[int]) -> bool:
        """Looks which of the awaited ranks are silent; True if one is that was not before. Called at each wake-up."""
        now = self._membership.monitor.now()
        if 0 <= now - self._looked_at < _LOOK_SECONDS:
            return False
        if now > self._looked_at + _STANDSTILL_SECONDS:
            self._questions.forget()
        self._looked_at = now
        new = [rank for rank in awaited if rank not in self.ranks and self._has_not_answered(rank)]
        for rank in new:
            logging.info("rank %d: rank %d is silent, and is not waited for.", self._membership.rank, rank)
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
        """Looks which of those that were silent are no longer."""
        for rank in self.ranks:
            since = self._membership.monitor.now() - self._found_at[rank]
            if self._transport.status(rank).silent_seconds < since:
                self.hear(rank)
            elif self._membership.is_past_hope(rank) or self._membership.departure(rank) is not None:
                self.ranks -= {rank}

    def hear(self, rank: int) -> None:
        """A rank was heard."""
        if rank in self.ranks:
            self.ranks -= {rank}
            self._on_heard(rank)

    def wait(self, missing: Callable[[], Collection[int]], **arguments) -> None:
        """Waits as `Membership.wait` does, though `missing` leaves out ranks that are found to be silent meanwhile."""

        def awaited() -> Collection[int]:
            self.look_again()
            ranks = missing()
            while ranks and self.look(ranks):
                ranks = missing()
            return ranks

        with self._membership.monitor:
            self.begin()
        self._membership.wait(awaited, **arguments)

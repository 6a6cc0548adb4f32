"""`Silence`: ranks of which nothing is heard, so that others need not wait for them."""

from __future__ import annotations

from collections.abc import Callable, Collection

from absl import logging

from hop_tf.membership.waiting import Waiting

# Longer than a rank that trains is not heard: messages and acknowledgements count.
_SILENT_SECONDS = 0.25
# A process that has not looked for so long has stood still itself: what has come meanwhile is not read yet.
_STANDSTILL_SECONDS = 1.0


class Silence:
    """The ranks that are silent: frozen, or cut off, and not lost yet.

    A rank is found to be silent only while it is waited for, so that ordinary steps do not look. It is no longer silent
    when something is heard of it, or when it has left. Methods are called with the monitor held.

    Args:
      membership: Knows when a rank was heard.
      on_heard: Called with a rank that is silent no longer.

    Attributes:
      ranks: Those that are silent. It is replaced, and not changed: it can be read without the monitor.
      num_passed_by: How many times a rank was found to be silent.
    """

    def __init__(self, membership: Waiting, on_heard: Callable[[int], None] = lambda rank: None):
        self._membership = membership
        self._on_heard = on_heard
        self.num_passed_by = 0
        self.reset()

    def reset(self) -> None:
        """Forgets the session that was."""
        self.ranks: frozenset[int] = frozenset()
        self.begin()

    def begin(self) -> None:
        """This rank begins to wait."""
        self._waits_since: float | None = None

    def look(self, awaited: Collection[int]) -> bool:
        """Looks which of the awaited ranks are silent; True if one is that was not before. Called while it waits."""
        now = self._membership.monitor.now()
        if self._waits_since is None or now > self._looked_at + _STANDSTILL_SECONDS:
            self._waits_since = now
        self._looked_at = now
        if now < self._waits_since + _SILENT_SECONDS:
            return False
        new = {rank for rank in awaited if rank not in self.ranks and self._is_silent(rank)}
        for rank in new:
            logging.info("rank %d: rank %d is silent, and is not waited for.", self._membership.rank, rank)
        self.num_passed_by += len(new)
        self.ranks |= new
        return bool(new)

    def look_again(self) -> None:
        """Looks which of those that were silent are no longer."""
        for rank in self.ranks:
            if not self._is_silent(rank) or self._membership.departure(rank) is not None:
                self.hear(rank)

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

    def _is_silent(self, rank: int) -> bool:
        return self._membership.transport.status(rank).was_silent_for(_SILENT_SECONDS)

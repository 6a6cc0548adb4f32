"""Which neighbors a rank of Hop does not wait for: those that are frozen or cut off, until they are back.

A token queue bounds how far a rank is ahead of an out-neighbor, and with that the memory there. A neighbor of which
nothing is heard computes nothing, and what is sent to it gives way to newer messages: its memory needs no bound. So
where stragglers are tolerated, ranks go on without its tokens and updates, and owe the tokens. When it is back, it
finds that its in-neighbors are further than its tokens allow. Then it takes their newest parameters, and goes on where
its out-neighbors are (`HopExchange`), as a straggler does that jumps (section 5). Until then it is not waited for.

References:
  Luo, Lin, Zhuo, Qian. Hop: Heterogeneity-aware Decentralized Training. ASPLOS 2019. Of Table 1, the bounds on the gap
  to a rank do not hold while nothing is heard of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from hop_tf.membership import Membership, Silence
from hop_tf.strategies.hop.settings import HopSettings


class Absence:
    """The neighbors of one rank that are absent. Methods are called with the monitor held, but for `wait`.

    Args:
      membership: Waiting.
      group: The group's name.
      settings: Which ranks do without others.
    """

    def __init__(self, membership: Membership, group: str, settings: HopSettings):
        self._membership = membership
        self._settings = settings
        self._returning: set[int] = set()
        self._silence = Silence(membership, group, lambda rank: self._returning.add(rank))

    @property
    def num_passed_by(self) -> int:
        """The number of times that a neighbor was found to be silent."""
        return self._silence.num_passed_by

    def close(self) -> None:
        """Takes no more messages."""
        self._silence.close()

    def reset(self) -> None:
        """Forgets the session that was."""
        self._silence.reset()
        self._returning.clear()

    def is_any(self) -> bool:
        """True if some neighbor is absent: mostly none is."""
        return bool(self._silence.ranks or self._returning)

    def includes(self, rank: int) -> bool:
        """True if a neighbor is silent, or is not back where this rank is."""
        return rank in self._silence.ranks or rank in self._returning

    def owes_tokens(self, rank: int) -> bool:
        """True if this rank goes on without tokens of an out-neighbor: an absent one that can do without updates."""
        return self.includes(rank) and self._settings.is_tolerated_by(rank)

    def owes_updates(self, rank: int) -> bool:
        """True if this rank does without updates of an in-neighbor."""
        return self.includes(rank) and self._settings.is_tolerated_by(self._membership.rank)

    def hear(self, rank: int, *, is_near: bool) -> None:
        """A neighbor has told where it is, and whether that is near enough to count."""
        self._silence.hear(rank)
        if is_near:
            self._returning.discard(rank)

    def forget(self, rank: int) -> None:
        """Another process has taken the neighbor's place."""
        self.hear(rank, is_near=True)

    def wait(self, missing: Callable[[], Collection[int]], **arguments) -> None:
        """Waits as `Membership.wait` does. `missing` leaves out those that are absent, if stragglers are tolerated."""
        if not self._settings.tolerates_stragglers:
            self._membership.wait(missing, **arguments)
            return

        def awaited() -> Collection[int]:
            if self._returning:  # One that is lost has to be waited for, so that all hear of it.
                self._returning -= {rank for rank in self._returning if self._membership.is_past_hope(rank)}
            return missing()

        self._silence.wait(awaited, **arguments)

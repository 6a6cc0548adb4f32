"""`Absence`: the neighbors that a rank of Hop does not wait for, because they are or were frozen or cut off.

A token queue bounds how far a rank is ahead of an out-neighbor. So it also bounds the memory that the rank's updates
need at the neighbor. A silent neighbor computes nothing, and newer messages to it replace older ones, so its memory
needs no bound. If stragglers are tolerated, ranks go on without its tokens and updates, and owe the tokens. When the
neighbor is back, it finds that its in-neighbors are further ahead than its tokens allow. It then takes their newest
parameters, and goes on at the iteration of its out-neighbors (`HopExchange`), like a straggler that jumps (section 5).
Until then no rank waits for it.

References:
  Luo, Lin, Zhuo, Qian. Hop: Heterogeneity-aware Decentralized Training. ASPLOS 2019. The bounds of Table 1 on the gap
  to a rank do not hold while the rank is silent.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from hop_tf.membership.session import Membership
from hop_tf.membership.silence import Silence
from hop_tf.strategies.hop.settings import HopSettings


class Absence:
    """The neighbors of one rank that are absent. Callers must hold the monitor, except for `wait`.

    Args:
      membership: Waits for ranks.
      group: The group's name.
      settings: Tells which ranks tolerate stragglers.
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
        """Stops taking messages."""
        self._silence.close()

    def reset(self) -> None:
        """Forgets the previous session."""
        self._silence.reset()
        self._returning.clear()

    def is_any(self) -> bool:
        """True if some neighbor is absent. Usually False."""
        return bool(self._silence.ranks or self._returning)

    def includes(self, rank: int) -> bool:
        """True if a neighbor is silent, or was silent and is still far from this rank's iteration."""
        return rank in self._silence.ranks or rank in self._returning

    def owes_tokens(self, rank: int) -> bool:
        """True if this rank goes on without an out-neighbor's tokens: the neighbor is absent, and may miss updates."""
        return self.includes(rank) and self._settings.is_tolerated_by(rank)

    def owes_updates(self, rank: int) -> bool:
        """True if this rank goes on without an in-neighbor's updates."""
        return self.includes(rank) and self._settings.is_tolerated_by(self._membership.rank)

    def hear(self, rank: int, *, is_near: bool) -> None:
        """Records a message of a neighbor. If `is_near`, the neighbor's iteration shows that it is no longer absent."""
        self._silence.hear(rank)
        if is_near:
            self._returning.discard(rank)

    def forget(self, rank: int) -> None:
        """Forgets a neighbor's absence, because another process has taken its place."""
        self.hear(rank, is_near=True)

    def wait(self, missing: Callable[[], Collection[int]], **arguments) -> None:
        """Waits as `Membership.wait` does. If stragglers are tolerated, `missing` must leave out absent neighbors."""
        if not self._settings.tolerates_stragglers:
            self._membership.wait(missing, **arguments)
            return

        def awaited() -> Collection[int]:
            if self._returning:  # Lost ranks must be waited for, so that all ranks learn of the loss.
                self._returning -= {rank for rank in self._returning if self._membership.is_past_hope(rank)}
            return missing()

        self._silence.wait(awaited, **arguments)

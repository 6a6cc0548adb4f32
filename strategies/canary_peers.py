"""Which ranks take part under Canary, and how far they are known to be."""

from __future__ import annotations

from hop_tf.membership import Membership
from hop_tf.strategies.canary_layout import Layout
from hop_tf.strategies.canary_messages import Kind, Note

_LARGEST_LIFE = 254
_MERGED = (Kind.UP, Kind.DOWN, Kind.MARKED_DOWN)


class Peers:
    """What a rank knows of the others. Guarded by the rank's monitor.

    Args:
      membership: Who takes part.

    Attributes:
      done: The messages of those that have made their last step, this rank itself included.
    """

    def __init__(self, membership: Membership):
        self._membership = membership
        self.reset()

    def reset(self) -> None:
        """Forgets the session that was."""
        self.done: dict[int, Note] = {}
        self._iterations: dict[int, int] = {}

    def is_present(self, rank: int) -> bool:
        """Whether a rank takes part still."""
        return self._membership.departure(rank) is None

    def is_expected(self, rank: int) -> bool:
        """Whether a rank may contribute again."""
        return self.is_present(rank) and rank not in self.done

    def present(self) -> list[int]:
        """The other ranks that take part, in order."""
        ranks = range(self._membership.world_size)
        return [rank for rank in ranks if rank != self._membership.rank and self.is_present(rank)]

    def present_key(self) -> bytes:
        """The key of the layout among those that take part. See `Layout`."""
        return bytes(self.key_of(rank) for rank in range(self._membership.world_size))

    def key_of(self, rank: int) -> int:
        """A rank's byte in that key: which of its lives it is in, from 1; 0 where it takes no part."""
        membership = self._membership
        if rank == membership.rank:
            return 1 + min(membership.life, _LARGEST_LIFE)
        return 1 + min(membership.life_of(rank), _LARGEST_LIFE) if self.is_present(rank) else 0

    def are_all_in(self, layout: Layout) -> bool:
        """Whether the ranks of a layout are those that take part, in the same life."""
        return layout.key == self.present_key()

    def learn(self, note: Note) -> None:
        """A message tells of iterations that ranks have made."""
        if note.kind in _MERGED:
            for rank, iteration in note.contributions:
                self.is_in(rank, iteration)

    def is_in(self, rank: int, iteration: int) -> None:
        """A rank has started an iteration."""
        self._iterations[rank] = max(iteration, self._iterations.get(rank, iteration))

    def fastest(self) -> int | None:
        """The other rank that is furthest; None where none is known."""
        others = {rank: self._iterations[rank] for rank in self.present() if rank in self._iterations}
        return max(others, key=others.get, default=None)

    def begin_life(self, rank: int) -> None:
        """Another process has taken a rank's place: what is known of the one before does not count."""
        self.done.pop(rank, None)
        self._iterations.pop(rank, None)

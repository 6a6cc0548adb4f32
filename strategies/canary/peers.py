"""The ranks that take part under Canary, and their progress as far as it is known."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from hop_tf.membership.session import Membership
from hop_tf.strategies.canary.layout import Layout, Piece
from hop_tf.strategies.canary.messages import Header, MessageKind

_LARGEST_INCARNATION = 126
_MERGED = (MessageKind.UP, MessageKind.DOWN, MessageKind.MARKED_DOWN)


class Peers:
    """The state of the other ranks, as far as a rank knows it. Guarded by the rank's monitor.

    Args:
      membership: The ranks that take part.

    Attributes:
      done: The ranks that have made their last step, including this rank.
      full: Pairs of a rank and the index of its thread, for threads that have received more than they may keep.
      ending: For each rank that is about to end, the incarnations that it has announced.
    """

    def __init__(self, membership: Membership):
        self._membership = membership
        self._key, self._key_version = b"", None
        self.reset()

    def reset(self) -> None:
        """Forgets the previous session."""
        self.done: set[int] = set()
        self.full: set[tuple[int, int]] = set()
        self.ending: dict[int, bytes] = {}
        self._iterations: dict[int, int] = {}
        self._counts: dict[tuple[int, bytes], Sequence[int]] = {}
        self._present: dict[int, bytes] = {}

    def is_present(self, rank: int) -> bool:
        """True if a rank still takes part."""
        return self._membership.departure(rank) is None

    def is_expected(self, layout: Layout, rank: int) -> bool:
        """True if a rank may contribute to a layout again."""
        return self.takes_part(layout, rank) and self.contributed(rank, layout) is None

    def present(self) -> list[int]:
        """The other ranks that take part, in order."""
        ranks = range(self._membership.world_size)
        return [rank for rank in ranks if rank != self._membership.rank and self.is_present(rank)]

    def present_key(self) -> bytes:
        """The key of the layout of the ranks that take part. See `Layout`."""
        membership = self._membership
        with membership.monitor:
            version = membership.version, membership.incarnation
            if version != self._key_version:
                self._key_version = version
                self._key = bytes(map(self.key_of, range(membership.world_size)))
            return self._key

    def key_of(self, rank: int) -> int:
        """A rank's byte in `present_key`: 1 in its first incarnation, 2 after its end, 3 in its second, and so on."""
        return self._incarnation_byte(rank) + (rank != self._membership.rank and not self.is_present(rank))

    def _incarnation_byte(self, rank: int) -> int:
        membership = self._membership
        incarnation = membership.incarnation if rank == membership.rank else membership.incarnation_of(rank)
        return 1 + 2 * min(incarnation, _LARGEST_INCARNATION)

    def incarnations(self) -> bytes:
        """The bytes of `present_key` as if no rank had left. They tell which ranks have joined."""
        return bytes(map(self._incarnation_byte, range(self._membership.world_size)))

    def is_incarnation(self, rank: int, incarnations: bytes) -> bool:
        """True if `incarnations` has the rank's present incarnation, or its last one if the rank has left."""
        return incarnations[rank] == self._incarnation_byte(rank)

    def is_ahead(self, incarnations: bytes) -> bool:
        """True if `incarnations` has a later incarnation of some rank than this rank knows: a rank has joined."""
        if max(incarnations) <= 2:  # No rank has joined again, as in most jobs.
            return False
        return any(there > 1 + here for there, here in zip(incarnations, self.incarnations(), strict=True))

    def alive(self, incarnations: bytes) -> list[int]:
        """The other ranks that take part in these incarnations."""
        return [rank for rank in self.present() if self.is_incarnation(rank, incarnations)]

    def are_all_in(self, layout: Layout) -> bool:
        """True if the ranks of a layout are those that take part, in the same incarnations."""
        return layout.key == self.present_key()

    def learn(self, header: Header) -> None:
        """Learns the iterations of ranks from a message."""
        if header.kind in _MERGED:
            for rank, iteration in header.contributions:
                self.is_in(rank, iteration)

    def is_in(self, rank: int, iteration: int) -> None:
        """Records that a rank has started an iteration. An iteration of -1 means none yet."""
        self._iterations[rank] = max(iteration, self._iterations.get(rank, iteration))

    def fastest(self, except_for: Collection[int] = (), among: Collection[int] | None = None) -> int | None:
        """The fastest other rank in `among` but not in `except_for`, or None. Default of `among`: all known ranks."""
        among = self._iterations if among is None else among
        ranks = [rank for rank in self.present() if rank in among and rank not in except_for]
        return max(ranks, key=lambda rank: self._iterations.get(rank, -1), default=None)

    def without_room(self) -> list[int]:
        """The other ranks that have received more than they may keep."""
        ranks = {rank for rank, _ in self.full}
        return [rank for rank in self.present() if rank in ranks]

    def begin_incarnation(self, rank: int) -> None:
        """Forgets a rank's previous incarnation, because another process has taken its place."""
        self.done.discard(rank)
        self.ending.pop(rank, None)
        self._iterations.pop(rank, None)
        self._present.pop(rank, None)
        self.full = {where for where in self.full if where[0] != rank}

    # Contributions that may still come.

    def takes_part(self, layout: Layout, rank: int) -> bool:
        """True if a rank still takes part, in the incarnation that is in the layout."""
        return layout.key[rank] == self.key_of(rank) and self.is_present(rank)

    def roots_that_take_part(self, pieces: Iterable[tuple[Layout, Piece]]) -> set[int]:
        """The roots of pieces, except roots that have left."""
        return {piece.root for layout, piece in pieces if self.takes_part(layout, piece.root)}

    def is_connected(self, layout: Layout, piece: Piece, rank: int) -> bool:
        """True if a rank and the root of a piece can reach each other: the ranks up to the root still take part."""
        return all(self.takes_part(layout, each) for each in layout.path(piece, rank))

    def is_settled(self, layout: Layout, piece: Piece) -> bool:
        """True if nothing more of a piece comes here: its root has said so, or a rank on the path to it has left.

        Also true while this rank does not know that a rank on the path has joined.
        """
        return piece.index in layout.ended or not self.is_connected(layout, piece, self._membership.rank)

    def has_moved(self, rank: int, key: bytes) -> None:
        """Records that a rank now contributes to this layout, and to no earlier one."""
        self._present[rank] = key

    def has_contributed(self, rank: int, key: bytes, counts: Sequence[int]) -> None:
        """Records how often a rank has contributed to each colayer of a layout. It will not contribute again."""
        self._counts[rank, key] = counts

    def contributed(self, rank: int, layout: Layout) -> Sequence[int] | None:
        """The number of a rank's contributions to each colayer of a layout; None while it may contribute again."""
        counts = self._counts.get((rank, layout.key))
        if counts is None and (rank in self.done or is_past(layout.key, self._present.get(rank, b""))):
            return [0] * len(layout.by_colayer)
        return counts

    def has_all_come(self, layout: Layout, piece: Piece) -> bool:
        """True if this rank, the root of the piece, has merged all contributions that can still arrive."""
        if self.is_ahead(layout.key):
            return False
        for rank in layout.ranks:
            counts = self.contributed(rank, layout) if self.takes_part(layout, rank) else [0] * len(layout.by_colayer)
            if counts is None:
                return False
            num_merged = layout.ledger.merged[piece.index, rank]
            if num_merged < counts[piece.colayer] and self.is_connected(layout, piece, rank):
                return False
        return True

    def forget(self, key: bytes) -> None:
        """Forgets a layout that was freed."""
        self._counts = {where: counts for where, counts in self._counts.items() if where[1] != key}


def is_past(key: bytes, present: bytes) -> bool:
    """True if a rank whose layout is now `present` does not return to the layout `key`."""
    return any(then < now for then, now in zip(key, present, strict=False))

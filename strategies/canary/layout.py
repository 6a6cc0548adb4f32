"""Layouts, which cut Canary's colayers into pieces, and ledgers of the merged messages of each piece."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from hop_tf.collectives.networks import Network, Route
from hop_tf.errors import ProtocolError


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of a colayer, as one rank sees it.

    Attributes:
      index: The piece's number in the layout.
      colayer: z, the index of the piece's colayer.
      bucket: The index of the vector that the piece is a part of.
      where: The piece's slice of that vector.
      thread: The index of the network's thread for the piece.
      root: The rank that sums the piece up.
      parent: The rank to which this rank sends its sums; None at the root.
      parent_level: The interface of the edge to the parent.
      children: The ranks that send to this rank, each with the interface of the edge.
    """

    index: int
    colayer: int
    bucket: int
    where: slice
    thread: int
    root: int
    parent: int | None
    parent_level: int
    children: tuple[tuple[int, int], ...]


class Layout:
    """The pieces of all colayers among certain ranks.

    The layout changes when ranks come and go. Each message names its layout, so that ranks need not learn of a change
    at the same time. The name is a *key* with a byte for every rank. The byte is odd if the rank takes part. It grows
    each time the rank ends or joins again (see `Departures`). So keys do not repeat, up to 126 new incarnations of a
    rank.

    Args:
      key: The key of the layout.
      network: The network whose routes pieces take.
      rank: The rank whose view this is.
      sizes: For each colayer, the number of values in each of the vectors. In a vector, the colayers follow each other.
      granularity: Vectors should be cut at multiples of this number of values.

    Attributes:
      key: The key of the layout.
      ranks: The ranks that take part, in order.
      pieces: All pieces, none empty.
      colayers: int array: z of each piece.
      by_colayer: The pieces of each colayer. The first ones have the rank after this one as root, so that ranks do not
        all send to the same root at once.
      ledger: The record of merged messages of each piece on this rank. See `Ledger`.
      ended: The indices of pieces whose root sends nothing more. Guarded by the rank's monitor.
    """

    def __init__(self, key: bytes, network: Network, rank: int, sizes: Sequence[Sequence[int]], granularity: int):
        self.key = key
        self.ranks = tuple(each for each, incarnation in enumerate(key) if incarnation % 2)
        self._rank = rank
        self._granularity = granularity
        routes = network.routes_among(len(self.ranks))
        self.pieces: list[Piece] = []
        self._routes: list[Route] = []  # The route of each piece.
        self.ended: set[int] = set()
        starts = [0] * len(sizes[0])
        for colayer, of_buckets in enumerate(sizes):
            for bucket, size in enumerate(of_buckets):
                self._cut(colayer, bucket, starts[bucket], size, routes)
                starts[bucket] += size
        self.colayers = np.array([piece.colayer for piece in self.pieces], int)
        place = self.ranks.index(rank) if rank in self.ranks else 0
        self.by_colayer = [
            sorted(
                (piece for piece in self.pieces if piece.colayer == colayer),
                key=lambda piece: (self.ranks.index(piece.root) - place - 1) % len(self.ranks),
            )
            for colayer in range(len(sizes))
        ]
        self.ledger = Ledger(len(self.pieces), len(key))

    def path(self, piece: Piece, rank: int) -> list[int]:
        """The ranks on the way from a rank of the layout to the root of a piece, without the rank itself."""
        return [self.ranks[each] for each in self._routes[piece.index].path(self.ranks.index(rank))]

    def _cut(self, colayer: int, bucket: int, start: int, size: int, routes: Sequence[Route]) -> None:
        num_blocks = -(-size // self._granularity)
        bounds = [min(size, num_blocks * i // len(routes) * self._granularity) for i in range(len(routes) + 1)]
        for route, begin, end in zip(routes, bounds[:-1], bounds[1:], strict=True):
            if begin < end:
                self._routes.append(route)
                self.pieces.append(self._piece(colayer, bucket, slice(start + begin, start + end), route))

    def _piece(self, colayer: int, bucket: int, where: slice, route: Route) -> Piece:
        place = self.ranks.index(self._rank) if self._rank in self.ranks else None
        parent = None if place is None else route.parents[place]
        children = () if place is None else route.children[place]
        return Piece(
            index=len(self.pieces),
            colayer=colayer,
            bucket=bucket,
            where=where,
            thread=route.thread,
            root=self.ranks[route.root],
            parent=None if parent is None else self.ranks[parent],
            parent_level=0 if place is None else route.levels[place],
            children=tuple((self.ranks[child], route.levels[child]) for child in children),
        )


class Ledger:
    """The record of merged messages of each piece of a layout.

    Roots number the messages that they send out. A message is merged only if its number is new, so each contribution
    counts once. Two replicas that have merged the first s messages of a root have merged the same contributions. So
    ledgers identify the content of the weights, and show which of two replicas is ahead.

    Attributes:
      table: int64 array [pieces, 2 + n]. A row has the number of messages merged, the number of the latest resync (see
        `hop_tf.strategies.canary.resync`), and then, for each rank, the number of contributions merged.
    """

    _SEQUENCE, _RESYNCS, _FIRST = 0, 1, 2

    def __init__(self, num_pieces: int, world_size: int):
        self.table = np.zeros((num_pieces, self.num_columns(world_size)), np.int64)

    @classmethod
    def of(cls, table: np.ndarray) -> Ledger:
        """Returns a ledger with a copy of a table."""
        ledger = cls(len(table), table.shape[1] - cls._FIRST)
        np.copyto(ledger.table, table)
        return ledger

    @classmethod
    def num_columns(cls, world_size: int) -> int:
        """The number of columns of a table for `world_size` ranks."""
        return cls._FIRST + world_size

    @property
    def sequences(self) -> np.ndarray:
        """The number of merged messages of each piece."""
        return self.table[:, self._SEQUENCE]

    @property
    def resyncs(self) -> np.ndarray:
        """The number of the latest resync of each piece."""
        return self.table[:, self._RESYNCS]

    @property
    def merged(self) -> np.ndarray:
        """The number of merged contributions of each piece and rank."""
        return self.table[:, self._FIRST :]

    def header(self, piece: int, sequence: int, contributions: Sequence[tuple[int, int]]) -> None:
        """Records that a message was merged.

        Args:
          piece: The index of the message's piece.
          sequence: The number of the message.
          contributions: The ranks and iterations of the contributions that the message sums up.
        """
        self.sequences[piece] = sequence
        for rank, _ in contributions:
            self.merged[piece, rank] += 1

    def check(self, other: np.ndarray) -> None:
        """Raises ProtocolError if another table has other pieces or ranks."""
        if other.shape != self.table.shape:
            raise ProtocolError(f"expected a ledger of {len(self.table)} pieces. Received: {len(other)} pieces.")

    def is_ahead(self, other: np.ndarray) -> np.ndarray:
        """For each piece, True if this table has more messages, or as many messages and more resyncs."""
        is_equal = self.sequences == other[:, self._SEQUENCE]
        return (self.sequences > other[:, self._SEQUENCE]) | (is_equal & (self.resyncs > other[:, self._RESYNCS]))

    def is_within(self, other: np.ndarray | None) -> bool:
        """True if another table has all messages and resyncs of this one. None stands for a table of zeros."""
        columns = [self._SEQUENCE, self._RESYNCS]
        return bool(np.all(self.table[:, columns] <= (0 if other is None else other[:, columns])))

"""The weights of one rank under Canary, and the record of merged contributions.

    weights of the graph  =  merged weights  +  own contributions in flight, at their full size

See `hop_tf.runtime.deltas`. The contributions of a rank to a piece are merged in order. So the ledgers show which ones
are in flight.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from hop_tf.collectives.networks import Network
from hop_tf.errors import ProtocolError
from hop_tf.strategies.canary.encoding import PieceEncoding
from hop_tf.strategies.canary.gei import GEIMatrix
from hop_tf.strategies.canary.layout import Layout, Ledger, Piece
from hop_tf.strategies.canary.messages import Header, MessageKind
from hop_tf.strategies.canary.state import (
    join_index,
    join_snapshots,
    join_tables,
    split_index,
    split_snapshots,
    split_tables,
)
from hop_tf.tensors.buffers import BufferPool
from hop_tf.tensors.payloads import join, split


@dataclasses.dataclass
class _Own:
    """The contributions of this rank to a piece.

    Attributes:
      num_sent: The number of all contributions.
      latest: The latest contributions at their full size. Each entry is a number of contributions, and either the
        bucket from the graph or the sum of several contributions that are merged together. `add_to` drops the entries
        that are merged.
      num_kept: The number of contributions in `latest`.
    """

    num_sent: int = 0
    latest: collections.deque[tuple[int, np.ndarray]] = dataclasses.field(default_factory=collections.deque)
    num_kept: int = 0

    def add(self, encoding: PieceEncoding, piece: Piece, bucket: np.ndarray, joins_last: bool) -> None:
        """Records a contribution that is about to be sent, or kept back together with the last one."""
        number = 1
        if joins_last:
            number, last = self.latest.pop()
            total = _added(encoding, piece, number, last, encoding.zeros(piece))
            number, bucket = number + 1, _added(encoding, piece, 1, bucket, total)
        self.latest.append((number, bucket))
        self.num_sent += 1
        self.num_kept += 1

    def add_to(self, encoding: PieceEncoding, piece: Piece, num_merged: int, total: np.ndarray) -> None:
        """Adds all contributions to `total`, except the first `num_merged` ones, which are merged already."""
        while self.num_kept > self.num_sent - num_merged:
            self.num_kept -= self.latest.popleft()[0]
        for number, values in self.latest:
            _added(encoding, piece, number, values, total)


def _added(encoding: PieceEncoding, piece: Piece, number: int, values: np.ndarray, total: np.ndarray) -> np.ndarray:
    """Adds a contribution, or the sum of `number` contributions, to `total`, and returns `total`."""
    if number > 1:
        total += values
    else:
        encoding.add_own(piece, values, total)
    return total


class Replica:
    """The weights into which the communication threads merge, and from which the graph gets the weights of a step.

    A message is merged as a whole or not at all: a thread that holds the lock sees weights and ledgers that agree.

    Args:
      rank: This rank.
      world_size: n.
      network: The network whose routes pieces take.
      encoding: The encoding and the places of pieces.
      pool: The source of large arrays.

    Attributes:
      rank: This rank.
      encoding: The encoding and the places of pieces.
      lock: Guards weights and ledgers.
      weights: The merged weights: one vector for each bucket, in which colayers follow each other. None before `begin`.
      is_complete: True if the ledgers list all messages that the weights contain. Otherwise no other replica can take
        the state.
      snapshots: By layout and piece, the piece's values after the marked message of the resync that is in progress.
      gei: The gradient exchange index: the contributions that were merged.
      gaps: By layout and piece, the number of the latest message that is missing here. Other ranks' states contain it.
      num_duplicates: The number of messages that had been merged before.
      num_late: The number of contributions to freed layouts that came after a gap: the state that was taken lacked
        earlier messages of the same root.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        network: Network,
        encoding: PieceEncoding,
        pool: BufferPool,
    ):
        self.rank = rank
        self._world_size = world_size
        self._network = network
        self.encoding = encoding
        self._pool = pool
        self.lock = threading.RLock()
        self.num_duplicates = self.num_late = 0
        self.reset()

    def reset(self) -> None:
        """Forgets the previous session."""
        with self.lock:
            self.weights: list[np.ndarray] | None = None
            self.is_complete = False
            self.gei = GEIMatrix(self._world_size, len(self.encoding.sizes))
            self.snapshots: dict[tuple[bytes, int], np.ndarray] = {}
            self.gaps: dict[tuple[bytes, int], int] = {}
            # `_layouts` and `_past` are replaced, never changed, because threads that handle messages read them without
            # the lock.
            self._layouts: dict[bytes, Layout] = {}
            self._own: dict[tuple[bytes, int], _Own] = {}  # By layout and piece.
            # The ledgers of layouts that were freed, and of those that this rank takes no part in.
            self._past: dict[bytes, Ledger] = {}

    def begin(self, weights: Sequence[np.ndarray]) -> None:
        """Takes the weights that the session begins with."""
        with self.lock:
            self.weights = [np.array(values) for values in weights]
            self.is_complete = True
            self._own = {}

    def layout(self, key: bytes) -> Layout:
        """Returns the layout of a key, and creates it if it is new.

        Raises:
          ProtocolError: If this rank takes no part in the layout, or the layout was freed.
        """
        if (known := self._layouts.get(key)) is not None:
            return known
        with self.lock:
            if key not in self._layouts:
                if not key[self.rank] % 2 or self.is_freed(key):
                    raise ProtocolError(f"rank {self.rank} is not a part of the layout, or no longer: {key.hex()}.")
                encoding = self.encoding
                layout = Layout(key, self._network, self.rank, encoding.sizes, encoding.granularity)
                self._layouts = {**self._layouts, key: layout}
            return self._layouts[key]

    def layouts(self) -> list[Layout]:
        """The layouts that are known and were not freed."""
        return list(self._layouts.values())

    def known_keys(self) -> list[bytes]:
        """The keys of all layouts that have a ledger here."""
        return [*self._layouts, *self._past]

    def free(self, layout: Layout) -> None:
        """Frees a layout. Only messages already in an inbox are still merged. The ledger is kept: see `adopt`."""
        with self.lock:
            # Before the removal from `_layouts`, so that at any moment the layout is known or freed.
            self._past = {**self._past, layout.key: layout.ledger}
            self._layouts = {key: each for key, each in self._layouts.items() if key != layout.key}
            self.snapshots = {where: values for where, values in self.snapshots.items() if where[0] != layout.key}
            self.gaps = {where: number for where, number in self.gaps.items() if where[0] != layout.key}
            self._own = {where: own for where, own in self._own.items() if where[0] != layout.key}

    def is_known(self, key: bytes) -> bool:
        """True if a layout exists here and was not freed, so that further messages of it may come."""
        return key in self._layouts

    def is_freed(self, key: bytes) -> bool:
        """True if this rank accepts no further messages of a layout. Also true if it took no part in the layout."""
        return key in self._past

    def read(self) -> tuple[np.ndarray, ...]:
        """The weights that the graph is to compute with: the merged weights plus own contributions in flight.

        Blocks: while a piece is merged, or a state is copied or taken.
        """
        with self.lock:
            copies = self.merged()
            for layout in self.layouts():
                for piece in layout.pieces:
                    if (own := self._own.get((layout.key, piece.index))) is not None:
                        num_merged = layout.ledger.merged[piece.index, self.rank]
                        own.add_to(self.encoding, piece, num_merged, copies[piece.bucket][piece.where])
            return copies

    def merged(self) -> tuple[np.ndarray, ...]:
        """A copy of the merged weights. Blocks: as `read` does."""
        with self.lock:
            copies = []
            for values in self.weights:
                copies.append(self._pool.take(values.nbytes).view(values.dtype))
                np.copyto(copies[-1], values)
            return tuple(copies)

    # Own contributions.

    def stand_in(self, layout: Layout, piece: Piece, bucket: np.ndarray, *, joins_last: bool = False) -> None:
        """Records a contribution of this rank, which stands in for the mean until it is merged.

        Args:
          layout: The layout.
          piece: The piece.
          bucket: The bucket of the piece's colayer from the graph. The caller must not write to it any longer.
          joins_last: True if the contribution is kept back and sent together with the last one.
        """
        with self.lock:
            self._own.setdefault((layout.key, piece.index), _Own()).add(self.encoding, piece, bucket, joins_last)

    # Merging.

    def merge(self, layout: Layout, piece: Piece, header: Header, data: np.ndarray) -> bool:
        """Adds a root's message to the weights. Returns False if it was merged before, or an earlier one is missing."""
        with self.lock:
            next_one = layout.ledger.sequences[piece.index] + 1
            if header.sequence < next_one:
                self.num_duplicates += 1
                return False
            if header.sequence > next_one:
                if self.is_freed(layout.key):  # The state that was taken lacks an earlier message.
                    self.num_late += len(header.contributions)
                self.miss(layout, piece, header.sequence)
                return False
            self.encoding.accumulate(piece, data, self.slice_of(piece))
            layout.ledger.header(piece.index, header.sequence, header.contributions)
            if header.kind is MessageKind.MARKED_DOWN:
                self.snapshots[layout.key, piece.index] = self.slice_of(piece).copy()
            num_pieces = len(layout.by_colayer[piece.colayer])
            for rank, iteration in header.contributions:
                self.gei.merge(rank, iteration, piece.colayer, num_pieces)
            return True

    def miss(self, layout: Layout, piece: Piece, sequence: int) -> None:
        """Records a gap: some messages of a root, up to number `sequence`, were not sent to this rank."""
        with self.lock:
            if sequence > layout.ledger.sequences[piece.index] and not self.is_freed(layout.key):
                where = layout.key, piece.index
                self.gaps[where] = max(sequence, self.gaps.get(where, 0))

    def pieces_with_gaps(self) -> list[tuple[Layout, Piece]]:
        """The pieces of which this rank lacks messages. Their roots have merged these messages."""
        with self.lock:
            return [(self._layouts[key], self._layouts[key].pieces[index]) for key, index in self.gaps]

    def slice_of(self, piece: Piece) -> np.ndarray:
        """A view of the piece's part of the weights. The lock must be held."""
        return self.weights[piece.bucket][piece.where]

    # The state of another replica.

    def state(self, rank: int, incarnation: int) -> list[np.ndarray]:
        """The ledgers, the index, snapshots and weights, copied at the same moment, for another rank.

        Args:
          rank: The other rank.
          incarnation: The rank's byte in the keys of its layouts. The state has snapshots of only these layouts.
        """
        with self.lock:
            tables = join_tables({key: ledger.table.copy() for key, ledger in self._ledgers().items()}, self._past)
            index = join_index(self.gei.snapshot())
            snapshots = join_snapshots(
                {where: values for where, values in self.snapshots.items() if where[0][rank] == incarnation}
            )
            return join([*map(np.concatenate, (tables, index, snapshots)), *self.merged()])

    def adopt(self, payload: np.ndarray, giver: int, incarnations: bytes, *, may_drop: bool = False) -> bool:
        """Takes another replica's state, unless that replica lacks a message that is merged here.

        The weights hold the merged messages of all layouts, including past layouts and those of other ranks. So all
        ledgers are compared and taken. This rank also keeps ledgers of layouts that it takes no part in, for ranks that
        will take its state.

        In a past layout, two replicas may differ for ever. A root may have died after sending a message to only one of
        them, or may have sent it before the other one joined. Dropping such a message is better than never taking the
        state.

        A rank with gaps may be a root that is ahead of all others in its own pieces. It keeps these pieces, and takes
        the others.

        Args:
          payload: The result of `state` on the other rank, as bytes.
          giver: The rank that has given the state.
          incarnations: For each rank, its byte in the keys of the layouts that it takes part in.
          may_drop: True to take the state even if it lacks messages that were merged here, which are then lost. They
            must be of past layouts, which both ranks have freed or take no part in.

        Returns:
          True if the state was taken.

        Raises:
          ProtocolError: If the state is of other weights or pieces.
        """
        if len(parts := split(payload)) < 3:
            raise ProtocolError(f"expected a state of at least 3 parts. Received: {len(parts)} parts.")
        tables, freed = split_tables(parts[0], self._world_size, Ledger.num_columns(self._world_size))
        index, weights = split_index(parts[1], self._world_size, len(self.encoding.sizes)), parts[3:]
        snapshots = split_snapshots(parts[2], self._world_size)
        with self.lock:
            if [values.nbytes for values in weights] != [values.nbytes for values in self.weights]:
                raise ProtocolError(f"received the state of other weights than this rank's, in {payload.nbytes} bytes.")
            for key in tables:
                if key[self.rank] == incarnations[self.rank] and not self.is_freed(key):
                    self.layout(key)
            ledgers = self._ledgers()
            for key in tables.keys() & ledgers.keys():
                ledgers[key].check(tables[key])
            snapshots = {
                where: self._checked(where, values)
                for where, values in snapshots.items()
                if not self.is_freed(where[0])  # No further message of a resync comes in a freed layout.
            }
            is_past = {key: key in freed or key[giver] != incarnations[giver] for key in self._past}
            compared = [key for key in ledgers if not (may_drop and is_past.get(key))]
            kept = self._pieces_ahead(tables, compared)
            if not kept and not all(ledgers[key].is_within(tables.get(key)) for key in compared):
                return False
            own = [self._read_piece(*each) for each in kept]
            self._past = {**self._past, **{key: Ledger.of(tables[key]) for key in tables.keys() - ledgers.keys()}}
            for key, ledger in ledgers.items():
                np.copyto(ledger.table, tables.get(key, 0))
            self.gei.absorb(index)
            self.snapshots = snapshots
            for values, part in zip(self.weights, weights, strict=True):
                np.copyto(values, part.view(values.dtype))
            for (layout, piece), state in zip(kept, own, strict=True):
                self._write_piece(layout, piece, *state)
            self.gaps = {where: number for where, number in self.gaps.items() if self._lacks(*where, number)}
            self.is_complete = True
            return True

    def _pieces_ahead(
        self, tables: Mapping[bytes, np.ndarray], compared: Collection[bytes]
    ) -> list[tuple[Layout, Piece]]:
        """The pieces in which this rank is ahead of a state. Empty if this rank has no gaps in other pieces.

        Also empty if this rank and the state differ in several of the compared layouts, because pieces of different
        layouts overlap.
        """
        if not self.gaps:
            return []
        ledgers = self._ledgers()
        unlike = [key for key in compared if not np.array_equal(ledgers[key].table, tables.get(key))]
        unlike += tables.keys() - ledgers.keys()
        if len(unlike) != 1 or unlike[0] not in self._layouts or unlike[0] not in tables:
            return []
        layout = self._layouts[unlike[0]]
        ahead = layout.ledger.is_ahead(tables[layout.key])
        return [(layout, piece) for piece in layout.pieces if ahead[piece.index]]

    def _read_piece(self, layout: Layout, piece: Piece) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Returns copies of a piece's values and of its row of the ledger, and its snapshot."""
        row = layout.ledger.table[piece.index].copy()
        return self.slice_of(piece).copy(), row, self.snapshots.get((layout.key, piece.index))

    def _write_piece(
        self, layout: Layout, piece: Piece, values: np.ndarray, row: np.ndarray, snapshot: np.ndarray | None
    ) -> None:
        np.copyto(self.slice_of(piece), values)
        np.copyto(layout.ledger.table[piece.index], row)
        self.snapshots.pop((layout.key, piece.index), None)
        if snapshot is not None:
            self.snapshots[layout.key, piece.index] = snapshot

    def _lacks(self, key: bytes, index: int, number: int) -> bool:
        """True if a known layout's piece lacks the message of that number."""
        return key in self._layouts and self._layouts[key].ledger.sequences[index] < number

    def _ledgers(self) -> dict[bytes, Ledger]:
        return {**self._past, **{key: layout.ledger for key, layout in self._layouts.items()}}

    def _checked(self, where: tuple[bytes, int], data: np.ndarray) -> np.ndarray:
        """A copy of the values of a piece that came as bytes."""
        pieces = self.layout(where[0]).pieces
        piece = pieces[where[1]] if 0 <= where[1] < len(pieces) else None
        if piece is None or data.nbytes != self.slice_of(piece).nbytes:
            raise ProtocolError(f"received a state with {data.nbytes} bytes of piece {where[1]} of {len(pieces)}.")
        return data.view(self.encoding.dtype_of(piece)).copy()

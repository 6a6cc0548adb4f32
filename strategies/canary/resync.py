"""Makes Canary's replicas equal again: now and then, each piece becomes the mean of its values on all ranks.

Replicas that have merged the same messages differ by rounding only. The exceptions are lost messages, and changes to
the weights of one rank. But at no moment have all ranks merged the same messages. So the root marks one of its
messages. Each rank takes a snapshot of the piece right after this message, and reports it to the root. The root sends
out the mean of the snapshots, and each rank adds the difference between the mean and its own snapshot. Ranks report
digests first, because the snapshots are usually equal to the bit. No rank waits. A rank that takes another rank's
weights meanwhile also takes that rank's snapshot, because the difference must fit the weights.

When ranks leave or join, messages of the previous layout have no order relative to those of the next one. A rank that
may merge both takes no part in a resync, and begins none if it is a root.
"""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Callable, Collection

import numpy as np

from hop_tf.errors import ProtocolError
from hop_tf.strategies.canary.layout import Layout, Piece
from hop_tf.strategies.canary.messages import Header, MessageKind
from hop_tf.strategies.canary.replica import Replica

_Key = tuple[bytes, int]
_DIGEST_BYTES = 16
_NOTHING = np.empty(0, np.uint8)


class Resync:
    """The resyncs of the pieces of one of the network's threads.

    Args:
      replica: The replica whose pieces are resynced.
      rank: This rank.
      interval: Iterations between two resyncs of a piece, or None for no resyncs.
      takes_part: `takes_part(layout, rank)` returns True if a rank of a layout still takes part.
      send: `send(rank, level, kind, layout, piece, sequence, values)` sends values of a piece to a rank, on the lane of
        an interface.
    """

    def __init__(
        self,
        replica: Replica,
        rank: int,
        interval: int | None,
        takes_part: Callable[[Layout, int], bool],
        send: Callable[[int, int, MessageKind, Layout, Piece, int, np.ndarray], None],
    ):
        self._replica = replica
        self._rank = rank
        self._interval = interval
        self._takes_part = takes_part
        self._send = send
        self.num_resyncs = 0
        self.reset()

    def reset(self) -> None:
        """Forgets the resyncs in progress."""
        self._begun: dict[_Key, int] = {}  # At the root: the interval in which the latest resync began.
        # At the root: each rank's digest, or its values after the root has asked for these.
        self._received: dict[_Key, dict[int, np.ndarray]] = {}
        self._asked: set[_Key] = set()
        self._numbers: collections.Counter[_Key] = collections.Counter()  # At the root: the number of the latest mean.

    def is_due(self, layout: Layout, piece: Piece, iteration: int) -> bool:
        """True if the root is to mark the message of `iteration` that it is about to send. Then a resync begins."""
        key = layout.key, piece.index
        if self._interval is None or key in self._received or not self._is_alone(layout):
            return False
        number = (iteration + 1) // self._interval
        if number <= self._begun.get(key, 0):
            return False
        self._begun[key] = number
        self._received[key] = {}
        return True

    def begin(self, layout: Layout, piece: Piece, *, takes_part: bool = True) -> None:
        """Reports this rank's digest to the root, after the marked message has come.

        Args:
          layout: The layout.
          piece: The piece.
          takes_part: True if the message was merged just now. False if it may be part of a pulled state. Then the rank
            that gave the state reports, if it takes part. This rank only tells the root not to wait.
        """
        with self._replica.lock:
            if takes_part and not self._is_alone(layout):
                self._replica.snapshots.pop((layout.key, piece.index), None)
        self._tell(
            layout, piece, MessageKind.DIGEST, _digest(self._snapshot(layout, piece) if takes_part else _NOTHING)
        )

    def _snapshot(self, layout: Layout, piece: Piece) -> np.ndarray:
        """The piece's values right after the marked message. Empty if they are unknown or of no use."""
        with self._replica.lock:
            return self._replica.snapshots.get((layout.key, piece.index), _NOTHING)

    def _tell(self, layout: Layout, piece: Piece, kind: MessageKind, values: np.ndarray) -> None:
        """Sends a digest or values to the piece's root, which may be this rank."""
        if piece.root == self._rank:
            self._collect(layout, piece, self._rank, kind, values)
        else:
            self._send(piece.root, piece.thread, kind, layout, piece, 0, values)

    def _is_alone(self, layout: Layout) -> bool:
        """True if this layout is the only one not freed, so that no messages of other layouts mix with its own."""
        return [each.key for each in self._replica.layouts()] == [layout.key]

    def receive(self, layout: Layout, piece: Piece, header: Header, sender: int, payload: np.ndarray) -> None:
        """Takes a message of a resync."""
        if header.kind is MessageKind.VALUES:
            self._tell(layout, piece, MessageKind.SNAPSHOT, self._snapshot(layout, piece))
        elif header.kind is MessageKind.DIGEST:
            self._collect(layout, piece, sender, header.kind, payload)
        else:
            values = payload.view(self._replica.encoding.dtype_of(piece))
            if values.size and values.size != piece.where.stop - piece.where.start:
                raise ProtocolError(
                    f"rank {sender} sent {values.size} values of a piece. Expected: "
                    f"{piece.where.stop - piece.where.start} values."
                )
            if header.kind is MessageKind.SNAPSHOT:
                self._collect(layout, piece, sender, header.kind, values)
            else:
                self._go_down(layout, piece, header.sequence, values)

    def end(self, layout: Layout, piece: Piece) -> None:
        """Gives up a piece's resync, if there is one, because nothing more of the piece comes. All ranks do so."""
        where = layout.key, piece.index
        self._received.pop(where, None)
        self._asked.discard(where)
        self._begun.pop(where, None)
        self._numbers.pop(where, None)
        with self._replica.lock:
            self._replica.snapshots.pop(where, None)

    def forget(self, key: bytes) -> None:
        """Forgets a layout that was freed."""
        for of_pieces in (self._begun, self._received, self._numbers):
            for where in [where for where in of_pieces if where[0] == key]:
                del of_pieces[where]
        self._asked = {where for where in self._asked if where[0] != key}

    def recheck(self) -> None:
        """Stops waiting for ranks that have left."""
        for key, index in list(self._received):
            layout = self._replica.layout(key)
            self._finish_if_complete(layout, layout.pieces[index])

    def _collect(self, layout: Layout, piece: Piece, sender: int, kind: MessageKind, values: np.ndarray) -> None:
        key = layout.key, piece.index
        received = self._received.get(key)
        if received is not None and (kind is MessageKind.SNAPSHOT) == (key in self._asked):
            received[sender] = values
            self._finish_if_complete(layout, piece)

    def _finish_if_complete(self, layout: Layout, piece: Piece) -> None:
        key = layout.key, piece.index
        received = self._received[key]
        if not received or any(rank not in received and self._takes_part(layout, rank) for rank in layout.ranks):
            return
        known = [rank for rank in sorted(received) if received[rank].size]
        snapshots = [received[rank] for rank in known]
        are_alike = all(np.array_equal(snapshots[0], other) for other in snapshots[1:])
        if key not in self._asked and not are_alike:
            self._ask(layout, piece, known)
            return
        del self._received[key]
        self._asked.discard(key)
        if not snapshots:
            return
        mean = np.empty(0, self._replica.encoding.dtype_of(piece))
        if not are_alike:
            mean = np.mean(snapshots, axis=0, dtype=np.float64).astype(mean.dtype)
        self._numbers[key] += 1  # Not the ledger's number, which omits resyncs in which the root takes no part.
        self._go_down(layout, piece, self._numbers[key], mean)

    def _ask(self, layout: Layout, piece: Piece, ranks: Collection[int]) -> None:
        """Asks the ranks that have sent digests for their values, because digests differ. The others have no values."""
        key = layout.key, piece.index
        self._asked.add(key)
        self._received[key] = {rank: _NOTHING for rank in self._received[key] if rank not in ranks}
        for rank in ranks:
            if rank != self._rank:
                self._send(rank, piece.thread, MessageKind.VALUES, layout, piece, 0, _NOTHING)
        own = self._snapshot(layout, piece) if self._rank in ranks else _NOTHING
        self._collect(layout, piece, self._rank, MessageKind.SNAPSHOT, own)

    def _go_down(self, layout: Layout, piece: Piece, sequence: int, mean: np.ndarray) -> None:
        """Spreads a mean on the route of the root's other messages, so that it comes before the next marked message.

        If all replicas are alike, which they are unless something was lost, the mean is empty. Then nothing is added.
        """
        for child, level in piece.children:
            if self._takes_part(layout, child):
                self._send(child, level, MessageKind.MEAN, layout, piece, sequence, mean)
        self._apply(layout, piece, sequence, mean)

    def _apply(self, layout: Layout, piece: Piece, sequence: int, mean: np.ndarray) -> None:
        with self._replica.lock:
            if sequence <= layout.ledger.resyncs[piece.index]:
                return  # A state that was pulled meanwhile contains this resync.
            own = self._replica.snapshots.pop((layout.key, piece.index), None)
            if own is not None:
                layout.ledger.resyncs[piece.index] = sequence
                if mean.size:
                    values = self._replica.slice_of(piece)
                    values += mean - own
                self.num_resyncs += 1


def _digest(values: np.ndarray) -> np.ndarray:
    """A short digest of the values. Empty input gives an empty digest."""
    digest = hashlib.blake2b(values.view(np.uint8), digest_size=_DIGEST_BYTES).digest() if values.size else b""
    return np.frombuffer(digest, np.uint8)

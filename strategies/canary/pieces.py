"""`PieceThread`: sums contributions up on their way to the roots, and spreads the sums. One for each network level.

No rank waits for a computation. A rank that receives contributions to a piece forwards their sum

    as soon as all regular senders have sent (the senders in both of its last two sums, itself included);
    or when a rank sends again, before its previous contribution was forwarded;
    or at once, if the ranks that take part have changed, because ranks that know of the change send elsewhere.

So in a cluster of equal ranks each message holds the contributions of all. A rank that falls behind delays no other:
its contribution goes with the others' next sum. Being in a single sum does not make a sender regular. A slow rank is in
a sum now and then, and after each such sum all others would wait for it in vain.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np

from hop_tf.errors import ProtocolError
from hop_tf.membership.session import Membership
from hop_tf.membership.silence import Silence
from hop_tf.records import Kind, recorded
from hop_tf.strategies.canary.layout import Layout, Piece
from hop_tf.strategies.canary.messages import Channel, Header, MessageKind
from hop_tf.strategies.canary.peers import Peers
from hop_tf.strategies.canary.replica import Replica
from hop_tf.strategies.canary.resync import Resync

_PERIOD_SECONDS = 0.25
# A rank that was in this many sums in a row is waited for.
_NUM_IN_A_ROW = 2


@dataclasses.dataclass
class _Sum:
    """The contributions to a piece that have come and were not forwarded yet.

    Attributes:
      layout: The layout.
      piece: The piece.
      in_a_row: For each sender, the number of consecutive forwarded sums that it was in, up to the last one.
      total: The sum, or None if nothing has come.
      senders: The ranks whose messages are in the sum.
      contributions: The ranks and iterations of the contributions in the sum.
    """

    layout: Layout
    piece: Piece
    in_a_row: dict[int, int]
    total: np.ndarray | None = None
    senders: set[int] = dataclasses.field(default_factory=set)
    contributions: list[tuple[int, int]] = dataclasses.field(default_factory=list)

    def regulars(self) -> list[int]:
        """The ranks that are waited for."""
        return [rank for rank, number in self.in_a_row.items() if number >= _NUM_IN_A_ROW]

    def begin_next(self) -> None:
        """Begins the next sum, after this one was forwarded."""
        self.in_a_row = {rank: number + 1 if rank in self.senders else 0 for rank, number in self.in_a_row.items()}
        self.senders, self.contributions, self.total = set(), [], None


class PieceThread:
    """Sums, sends and merges the pieces of one of the network's threads.

    The transport's threads and the thread that makes steps put work into an inbox. `run` does this work.

    Args:
      index: The index of the thread.
      membership: Waits, and ends the job on errors.
      replica: The replica that sums are merged into.
      channel: Sends messages.
      peers: The state of the other ranks.
      resync: The resyncs of the thread's pieces.
      silence: The silent ranks, to which nothing is sent.
      max_bytes: If the inbox holds more bytes than this, this rank tells the others to wait. When at most half of this
        is left, it tells them to go on.
    """

    def __init__(
        self,
        index: int,
        membership: Membership,
        replica: Replica,
        channel: Channel,
        peers: Peers,
        resync: Resync,
        silence: Silence,
        max_bytes: int,
    ):
        self._index = index
        self._membership = membership
        self._monitor = membership.monitor
        self._replica = replica
        self._channel = channel
        self._peers = peers
        self._resync = resync
        self._silence = silence
        # For each silent rank, the pieces whose sums were not sent to it.
        self._missed: dict[int, dict[tuple[bytes, int], tuple[Layout, Piece]]] = {}
        self._inbox: collections.deque[tuple[Callable[[], None], int]] = collections.deque()
        self._questions: collections.deque[Callable[[bool], None]] = collections.deque()
        self._max_bytes = max_bytes
        self._is_full = False
        self.num_bytes = 0
        self._sums: dict[tuple[bytes, int], _Sum] = {}
        self._early: list[tuple[Layout, Piece, Header, int, np.ndarray]] = []
        self._is_open = False
        self._is_busy = False
        self._closed = False
        self.num_messages = self.num_late = 0

    # From other threads.

    def pause(self) -> None:
        """Stops taking work until `open`. Blocks until the present work is done."""
        with self._monitor:
            self._is_open = False
            while self._is_busy:
                self._monitor.wait(_PERIOD_SECONDS)

    def reset(self) -> None:
        """Forgets everything. The thread must be paused."""
        with self._monitor:
            self._inbox.clear()
            self._questions.clear()
            self.num_bytes = 0
            self._is_full = False
            self._sums.clear()
            self._early.clear()
            self._missed.clear()
            self._resync.reset()

    def open(self) -> None:
        """Begins to take work, because the replica has its first weights."""
        with self._monitor:
            self._is_open = True
            self._monitor.notify_all()

    def put(self, work: Callable[[], None], num_bytes: int = 0) -> None:
        """Adds work that holds `num_bytes` bytes of memory to the inbox. Never blocks, so that receiving goes on."""
        with self._monitor:
            self._inbox.append((work, num_bytes))
            self.num_bytes += num_bytes
            self._monitor.notify_all()

    def answer(self, work: Callable[[bool], None]) -> None:
        """Adds work to be done next, even before `open`. Its argument: True if the replica is usable. Never blocks."""
        with self._monitor:
            self._questions.append(work)
            self._monitor.notify_all()

    @property
    def has_room(self) -> bool:
        """True if the inbox holds no more bytes than it may."""
        return self.num_bytes <= self._max_bytes

    def contribute(
        self,
        layout: Layout,
        piece: Piece,
        contributions: Sequence[tuple[int, int]],
        *,
        values: np.ndarray | None = None,
        data: np.ndarray | None = None,
    ) -> None:
        """Adds this rank's own contributions, as values or encoded, to a piece that others also send here."""
        rank, num_bytes = self._membership.rank, (data if values is None else values).nbytes
        self.put(lambda: self._add(layout, piece, rank, contributions, values=values, data=data), num_bytes)

    def receive(self, layout: Layout, piece: Piece, header: Header, sender: int, payload: np.ndarray) -> None:
        """Takes a message about a piece."""
        self.put(lambda: self._receive(layout, piece, header, sender, payload), payload.nbytes)

    def recheck(self) -> None:
        """Checks again which sums are due, after a rank has left, changed its layout or made its last step."""
        self.put(self._pass_on_what_is_due)

    def tell_missed(self, rank: int) -> None:
        """Tells a rank that is no longer silent which sums were not sent to it."""
        self.put(lambda: self._tell_missed(rank))

    def leave_resync(self, layout: Layout, piece: Piece) -> None:
        """Tells a piece's root not to wait for this rank in a resync.

        Called after this rank has taken a state in place of some sums. One of these may be the marked message that
        begins a resync.
        """
        self.put(lambda: self._resync.begin(layout, piece, takes_part=False))

    def forget(self, key: bytes) -> None:
        """Forgets a layout that was freed."""
        self.put(lambda: self._forget(key))

    def close(self) -> None:
        """Ends `run`."""
        with self._monitor:
            self._closed = True
            self._monitor.notify_all()

    # On the thread.

    def run(self) -> None:
        """Works until `close`. An error ends the job."""
        try:
            while (work := self._take()) is not None:
                work()
                del work  # Frees its memory, which may be large, before the wait for the next work.
        except BaseException as error:
            self._membership.fail(error)
        finally:
            self._rest()

    def _take(self) -> Callable[[], None] | None:
        with self._monitor:
            self._rest()
            while not (self._closed or (self._is_open and self._inbox) or self._questions or self._is_to_tell()):
                self._monitor.wait(_PERIOD_SECONDS)
            if self._closed:
                return None
            self._is_busy = True
            if self._is_to_tell():
                return self._tell
            if self._questions:
                return functools.partial(self._questions.popleft(), self._is_open)
            work, num_bytes = self._inbox.popleft()
            self.num_bytes -= num_bytes
            return work

    def _is_to_tell(self) -> bool:
        """True if the others must hear that they have to wait, or that there is room again."""
        most = self._max_bytes // 2 if self._is_full else self._max_bytes
        return (self.num_bytes > most) != self._is_full

    def _tell(self) -> None:
        """Tells the others to wait, or that there is room again.

        Only this thread sends these messages, so that they keep their order. Receivers accept them even if their
        inboxes are full.
        """
        with self._monitor:
            self._is_full = not self._is_full
            kind, others = MessageKind.FULL if self._is_full else MessageKind.ROOM, self._peers.present()
            header = self._channel.header(kind, self._peers.present_key(), self._index)
        for rank in others:
            self._channel.send(rank, header)

    def _rest(self) -> None:
        with self._monitor:
            if self._is_busy:
                self._is_busy = False
                self._monitor.notify_all()

    def _receive(self, layout: Layout, piece: Piece, header: Header, sender: int, payload: np.ndarray) -> None:
        self._take_early()
        self._handle(layout, piece, header, sender, payload)

    def _take_early(self) -> None:
        """Handles the messages that were kept, in their order."""
        early, self._early = self._early, []
        for each in early:
            self._handle(*each)

    def _handle(self, layout: Layout, piece: Piece, header: Header, sender: int, payload: np.ndarray) -> None:
        """Handles a message, or keeps it while its layout has a new rank that this rank does not know yet.

        Messages that are forwarded to such a rank would be lost.
        """
        if self._peers.is_ahead(layout.key):
            self._early.append((layout, piece, header, sender, payload))
        elif header.kind is MessageKind.UP:
            self._add(layout, piece, sender, header.contributions, data=payload)
        elif header.kind in (MessageKind.DOWN, MessageKind.MARKED_DOWN):
            self._go_down(layout, piece, header, payload)
        elif header.kind is MessageKind.END:
            self._end(layout, piece, header)
        elif header.kind is MessageKind.MISSED:
            self._miss(layout, piece, header)
        else:
            self._resync.receive(layout, piece, header, sender, payload)

    def _add(
        self,
        layout: Layout,
        piece: Piece,
        sender: int,
        contributions: Sequence[tuple[int, int]],
        *,
        values: np.ndarray | None = None,
        data: np.ndarray | None = None,
    ) -> None:
        if piece.index in layout.ended:
            self.num_late += len(contributions)  # The sender has left: a piece ends after all other contributions.
            return
        pending = self._sum_of(layout, piece)
        if sender in pending.senders:
            self._forward(layout, piece, pending)
        pending.total = self._replica.encoding.add(piece, pending.total, values=values, data=data)
        pending.senders.add(sender)
        pending.contributions.extend(contributions)
        self._pass_on_if_due(layout, piece, pending)
        self._end_if_due(layout, piece)

    def _sum_of(self, layout: Layout, piece: Piece) -> _Sum:
        key = layout.key, piece.index
        if key not in self._sums:
            senders = (self._membership.rank, *(child for child, _ in piece.children))
            self._sums[key] = _Sum(layout, piece, dict.fromkeys(senders, _NUM_IN_A_ROW))
        return self._sums[key]

    @property
    def num_resyncs(self) -> int:
        """The number of pieces that were resynced."""
        return self._resync.num_resyncs

    def _pass_on_what_is_due(self) -> None:
        self._take_early()
        self._resync.recheck()
        for pending in list(self._sums.values()):
            self._pass_on_if_due(pending.layout, pending.piece, pending)
        for layout in self._replica.layouts():
            for piece in layout.pieces:
                if piece.thread == self._index:
                    self._end_if_due(layout, piece)

    def _pass_on_if_due(self, layout: Layout, piece: Piece, pending: _Sum) -> None:
        if not pending.senders:
            return
        is_whole, is_expected = self._peers.are_all_in(layout), self._peers.is_expected
        expected = [rank for rank in pending.regulars() if is_expected(layout, rank)] if is_whole else []
        if pending.senders.issuperset(expected):
            self._forward(layout, piece, pending)

    def _forward(self, layout: Layout, piece: Piece, pending: _Sum) -> None:
        contributions, total = tuple(pending.contributions), pending.total
        pending.begin_next()
        with recorded(self._membership.recorder, Kind.ENCODE):
            data = self._replica.encoding.encode(piece, total)
        if piece.parent is not None:
            header = self._channel.header(MessageKind.UP, layout.key, piece.index, contributions=contributions)
            self._channel.send(piece.parent, header, [data], piece.parent_level)
            return
        sequence = int(layout.ledger.sequences[piece.index]) + 1
        newest = max(iteration for _, iteration in contributions)
        kind = MessageKind.MARKED_DOWN if self._resync.is_due(layout, piece, newest) else MessageKind.DOWN
        self._go_down(layout, piece, self._channel.header(kind, layout.key, piece.index, sequence, contributions), data)

    def _go_down(self, layout: Layout, piece: Piece, header: Header, data: np.ndarray) -> None:
        for child, level in piece.children:
            if child in self._silence.ranks:
                self._missed.setdefault(child, {})[layout.key, piece.index] = layout, piece
            else:
                self._channel.send(child, header, [data], level)
        is_merged = self._replica.merge(layout, piece, header, data)
        if header.kind is MessageKind.MARKED_DOWN:
            self._resync.begin(layout, piece, takes_part=is_merged)
        self.num_messages += is_merged
        with self._monitor:
            self._monitor.notify_all()

    def _tell_missed(self, rank: int) -> None:
        for layout, piece in self._missed.pop(rank, {}).values():
            sequence = int(layout.ledger.sequences[piece.index])
            header = self._channel.header(MessageKind.MISSED, layout.key, piece.index, sequence)
            self._channel.send(rank, header, level=dict(piece.children)[rank])

    def _miss(self, layout: Layout, piece: Piece, header: Header) -> None:
        """Records that some sums of a piece were not sent to this rank. Tells its children, which also lack them."""
        for child, level in piece.children:
            self._channel.send(child, header, level=level)
        self._replica.miss(layout, piece, header.sequence)
        with self._monitor:
            self._monitor.notify_all()

    def _end_if_due(self, layout: Layout, piece: Piece) -> None:
        """At the root: if a piece is complete, tells all ranks, and accepts no further contributions to it."""
        if piece.root != self._membership.rank or piece.index in layout.ended:
            return
        pending = self._sums.get((layout.key, piece.index))
        with self._monitor:
            is_due = not (pending and pending.senders) and self._peers.has_all_come(layout, piece)
        if is_due:
            number = int(layout.ledger.sequences[piece.index])
            self._end(layout, piece, self._channel.header(MessageKind.END, layout.key, piece.index, number))

    def _end(self, layout: Layout, piece: Piece, header: Header) -> None:
        for child, level in piece.children:
            self._channel.send(child, header, level=level)
        self._replica.miss(layout, piece, header.sequence)  # A MISSED message may come after this END.
        self._resync.end(layout, piece)
        self._sums.pop((layout.key, piece.index), None)
        with self._monitor:
            layout.ended.add(piece.index)
            self._monitor.notify_all()

    def _forget(self, key: bytes) -> None:
        for pieces in self._missed.values():
            for where in [where for where in pieces if where[0] == key]:
                del pieces[where]
        self._sums = {where: pending for where, pending in self._sums.items() if where[0] != key}
        self._resync.forget(key)


def checked_piece(layout: Layout, header: Header, sender: int) -> Piece:
    """Returns a message's piece. Raises ProtocolError if there is none, or if the sender may not send this kind."""
    if header.piece >= len(layout.pieces):
        raise ProtocolError(f"rank {sender} sent a message about piece {header.piece} of {len(layout.pieces)}.")
    piece = layout.pieces[header.piece]
    expected = {
        MessageKind.UP: [child for child, _ in piece.children],
        MessageKind.DOWN: [piece.parent],
        MessageKind.MARKED_DOWN: [piece.parent],
        MessageKind.VALUES: [piece.root],
        MessageKind.MEAN: [piece.parent],
        MessageKind.END: [piece.parent],
        MessageKind.MISSED: [piece.parent],
    }.get(header.kind, layout.ranks)
    if sender not in expected:
        raise ProtocolError(f"rank {sender} sent {header.kind.name} of a piece that it has no part in.")
    if any(rank not in layout.ranks or iteration < 0 for rank, iteration in header.contributions):
        raise ProtocolError(f"rank {sender} sent contributions of unknown ranks: {header.contributions}.")
    return piece

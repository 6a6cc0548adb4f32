"""The asynchronous communication of Canary at one rank. See `hop_tf.strategies.canary`, whose steps are cited here."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tensorflow as tf

from hop_tf.codecs import Codec, Identity
from hop_tf.collectives import Network
from hop_tf.errors import ProtocolError
from hop_tf.exchange import Exchange, Incoming, Outgoing
from hop_tf.gei import Thresholds
from hop_tf.joining import Joiner
from hop_tf.packing import Packing
from hop_tf.strategies.canary_blend import Blending
from hop_tf.strategies.canary_layout import Layout, Piece
from hop_tf.strategies.canary_messages import Kind, Note
from hop_tf.strategies.canary_peers import Peers, is_past
from hop_tf.strategies.canary_pieces import PieceThread, checked_piece, send
from hop_tf.strategies.canary_pull import Pulling
from hop_tf.strategies.canary_replica import Replica
from hop_tf.transport.base import Message
from hop_tf.worker import ExchangeContext

# Own iterations that may be under way, beside one for each message that follows another.
_WINDOW = 4
_JOIN_SECONDS = 5.0
_OWN_SECONDS = 1.0
_MIN_INBOX_BYTES = 64 * 2**20
_INBOX_REPLICAS = 8
# So many iterations after a rank has left, what it has sent before, and is under way, can be summed up.
_LINGER = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class AsyncSettings:
    """What an asynchronous exchange is told.

    Attributes:
      network: Whose routes pieces take.
      thresholds: s and p.
      codec: What contributions are encoded with.
      sync_interval: Iterations between two blends; None: there are none.
      inbox_bytes: The most that is received and not merged on each of the network's threads before others wait.
        Default None: eight times the bytes of the weights, at least 64 MiB.
    """

    network: Network
    thresholds: Thresholds
    codec: Codec
    sync_interval: int | None
    inbox_bytes: int | None = None


class CanaryExchange(Exchange, Joiner):
    """Sends out contributions, and merges those of all ranks, without waiting for anybody's computation.

    The segments of a step are its colayers, and then `merge_segment`: what that gives back are the weights. Step
    `start_step` begins with `start_segment`, which hands out the weights as they are; and after the last one comes
    `finish_segment`.

    Args:
      context: Membership, packing and buffers of the group.
      members: For each colayer, the indices of its variables.
      settings: The rest.

    Attributes:
      members: For each colayer, the indices of its variables.
      order: The variables of `merge_segment`, in order: colayer by colayer.
      start_step: int64 variable: the first step that this rank makes.
      replica: The weights and what was merged into them.
    """

    def __init__(self, context: ExchangeContext, members: Sequence[Sequence[int]], settings: AsyncSettings):
        self._group = context.group
        self._membership = membership = context.membership
        self._monitor = membership.monitor
        self._settings = settings
        self._queue = f"canary/{self._group}"
        self._depth = max(route.depth for route in settings.network.routes(membership.world_size))
        self.members = members
        self.order = [index for colayer in members for index in colayer]
        colayers, whole = [context.packing.part(each) for each in members], context.packing.part(self.order)
        self.merge_segment, self.start_segment, self.finish_segment = (len(members) + i for i in range(3))
        self.parts: list[Packing] = [*colayers, whole, whole, whole]
        self.max_in_flight = len(self.parts)
        self.replica = Replica(
            membership.rank, membership.world_size, settings.network, colayers, settings.codec, context.pool
        )
        self._peers = Peers(membership)
        self._pulling = Pulling(membership, self.replica, self._peers, self._send)
        self._final = context.make_all_reduce("final", whole, Identity(), "mesh")
        self._num_dropped = self._num_lost = self._num_late = self._num_waits = 0
        self._threads = [self._make_thread(index) for index in range(settings.network.num_levels)]
        with tf.init_scope(), tf.device("/cpu:0"):
            self.start_step = tf.Variable(0, dtype=tf.int64, trainable=False, name="hop_tf_start_step")
        self._begin(context.session)
        membership.transport.register(self._queue, self._on_message)
        self._running = [
            context.start_thread(f"pieces {self._group}/{index}", thread.run)
            for index, thread in enumerate(self._threads)
        ]

    def _make_thread(self, index: int) -> PieceThread:
        membership = self._membership

        def send_values(
            rank: int, level: int, kind: Kind, layout: Layout, piece: Piece, sequence: int, values: np.ndarray
        ) -> None:
            note = self._note(kind, layout.key, piece=piece.index, sequence=sequence)
            send(membership, rank, self._queue, note, [values], level)

        interval = self._settings.sync_interval
        blending = Blending(self.replica, membership.rank, interval, self._peers.is_present, send_values)
        num_bytes = sum(s * d.size for s, d in zip(self.parts[-1].sizes, self.parts[-1].dtypes, strict=True))
        max_bytes = self._settings.inbox_bytes or max(_MIN_INBOX_BYTES, _INBOX_REPLICAS * num_bytes)
        return PieceThread(index, membership, self.replica, self._queue, self._peers, blending, max_bytes)

    def reset(self, session: int, start: int = 0) -> None:
        with self._monitor:
            for thread in self._threads:
                thread.reset(session)
            self.replica.reset()
            self._final.reset(session)
            self._begin(session)
            self.start_step.assign(start)

    def _begin(self, session: int) -> None:
        self._session = session
        self._peers.reset()
        self._layout: Layout | None = None
        self._known_departed: set[int] = set()
        self._moves: collections.deque[tuple[int, bytes | None, bytes]] = collections.deque()  # Not told yet.
        # By layout and colayer, until the layout is settled.
        self._sent: collections.defaultdict[bytes, list[int]] = collections.defaultdict(lambda: [0] * len(self.members))
        self._iteration = -1
        self._is_dropping = False
        self._has_joined = False
        self._num_left = 0
        self._sent_steps = 0

    # Steps.

    def step(self, outgoing: Outgoing) -> Incoming | None:
        k, segment = outgoing.step, outgoing.segment
        if segment == self.merge_segment:
            return self._end_iteration(k)
        if segment == self.finish_segment:
            return Incoming(k, segment, self._finish(k))
        if segment == self.start_segment:
            self._start(outgoing.buckets)
            return None
        if segment == 0:
            self._enter(k)
        self._send_colayer(k, segment, outgoing.buckets)
        return None

    def neutral(self, outgoing: Outgoing) -> Incoming | None:
        if outgoing.segment == self.start_segment:
            self.replica.begin(outgoing.buckets)
        if outgoing.segment in (self.merge_segment, self.finish_segment):
            return self._weights(outgoing.step, outgoing.segment)
        return None

    def _weights(self, k: int, segment: int, num_skipped: int = 0) -> Incoming:
        return Incoming(k, segment, self.replica.read(), num_skipped)

    def _start(self, weights: Sequence[np.ndarray]) -> None:
        self.replica.begin(weights)
        if self._has_joined:  # What the others have merged since they gave these weights is missing.
            self._pulling.pull(self._present_layout(int(self.start_step)), int(self.start_step))
        for thread in self._threads:
            thread.open()

    def _enter(self, k: int) -> None:
        """Begins to send what iteration k has computed."""
        self._look_at_departures()
        self._wait_for_window(k)
        self._wait_for_room(k)
        with self.replica.lock:
            self.replica.gei.start(k)
        self._present_layout(k)
        self._tell_moves(before_step=k - _LINGER)
        self._free_layouts()
        self._iteration, self._is_dropping, self._num_left = k, False, 0

    def _send_colayer(self, k: int, colayer: int, buckets: Sequence[np.ndarray]) -> None:
        """Steps 3 and 4: a colayer leaves, unless this rank is overtime."""
        with self.replica.lock:
            staleness = self.replica.gei.staleness(k)
        if self._is_dropping or self._settings.thresholds.is_overtime(staleness, self._num_left):
            self._is_dropping = True
            self._num_dropped += 1
            return
        share = 1 / len(self._layout.ranks)
        for piece in self._layout.by_colayer[colayer]:
            start = self.replica.starts[colayer][piece.bucket]
            values = buckets[piece.bucket][piece.where.start - start : piece.where.stop - start]
            self._contribute(piece, values * values.dtype.type(share), k)
        self._sent[self._layout.key][colayer] += 1
        self._num_left += 1

    def _contribute(self, piece: Piece, values: np.ndarray, k: int) -> None:
        if piece.parent is None or piece.children:
            self._threads[piece.thread].contribute(self._layout, piece, values, k)
            return
        contributions = ((self._membership.rank, k),)
        note = self._note(Kind.UP, self._layout.key, piece=piece.index, contributions=contributions)
        data = self.replica.encode(piece, values)
        send(self._membership, piece.parent, self._queue, note, [data], piece.parent_level)

    def _end_iteration(self, k: int) -> Incoming:
        """Steps 5 and 6: the weights as they are, and how far ahead others are."""
        if self._is_dropping:
            self._pulling.pull(self._layout, k)
        with self.replica.lock:
            target = max(k + 1, self.replica.gei.newest)
            self.replica.gei.start(target)
        return self._weights(k, self.merge_segment, target - (k + 1))

    def _wait_for_window(self, k: int) -> None:
        """Bounds what is under way: waits for communication, though for nobody's computation."""
        rank, most = self._membership.rank, _WINDOW + self._depth

        def missing() -> list[int]:
            layout = self._layout
            if layout is None or not self._peers.are_all_in(layout):
                return []
            with self.replica.lock:
                merged = layout.ledger.merged[:, rank]
                sent = self._sent[layout.key]
                late = [piece for piece in layout.pieces if sent[piece.colayer] - merged[piece.index] >= most]
            return sorted({piece.root for piece in late} - {rank})

        self._membership.wait(missing, operation="receive what was merged", step=k)

    def _wait_for_room(self, k: int) -> None:
        """Waits while a rank, or this one, has received more than it may keep: its threads wait for no computation."""
        with self._monitor:
            self._num_waits += bool(self._peers.without_room()) or not self._has_room()
        self._membership.wait(self._peers.without_room, operation="have merged what it has received", step=k)
        self._wait_for_own_threads(self._has_room)

    def _wait_for_own_threads(self, condition: Callable[[], bool]) -> None:
        """Waits for what this rank's own threads bring about, however long that takes."""
        while not self._membership.wait_until(condition, _OWN_SECONDS):
            pass

    def _has_room(self) -> bool:
        return all(thread.has_room for thread in self._threads)

    # Ranks that leave, or join late. To newcomers what is under way then may be lost, until the next blend.

    def _present_layout(self, k: int) -> Layout:
        before = self._layout
        if before is None or not self._peers.are_all_in(before):
            self._layout = self.replica.layout(self._peers.present_key())
            self._look_again()
            if max(self._layout.key) > 1:  # Else nobody can have been in an earlier one.
                self._moves.append((k, None if before is None else before.key, self._layout.key))
        return self._layout

    def _tell_moves(self, before_step: int | None = None) -> None:
        while self._moves and (before_step is None or self._moves[0][0] < before_step):
            self._tell_move(*self._moves.popleft()[1:])

    def _tell_move(self, before: bytes | None, key: bytes) -> None:
        """Tells how often this rank has contributed to the layout before, and that it contributes to no other one."""
        rank = self._membership.rank
        with self._monitor:
            if before is not None:
                self._peers.has_contributed(rank, before, tuple(self._sent[before]))
            self._peers.has_moved(rank, key)
            others = self._peers.present()
        note = self._note(Kind.MOVED, key, contributions=() if before is None else self._counts(before))
        payload = [] if before is None else [np.frombuffer(before, np.uint8)]
        for other in others:
            send(self._membership, other, self._queue, note, payload)
        self._look_again()

    def _free_layouts(self) -> None:
        """Layouts that this rank has left, and of which no more comes here."""
        with self._monitor:
            present = self._layout.key
            for layout in self.replica.layouts():
                if is_past(layout.key, present) and all(self._is_settled(layout, piece) for piece in layout.pieces):
                    self._settle(layout)
                    self.replica.free(layout)
                    self._peers.forget(layout.key)
                    for thread in self._threads:
                        thread.forget(layout.key)

    def _settle(self, layout: Layout) -> None:
        """Counts what this rank has contributed to a layout, and nobody has sent out, or not to here."""
        sent, merged = self._sent.pop(layout.key, None), layout.ledger.merged[:, self._membership.rank]
        if sent is not None:
            self._num_lost += sum(sent[piece.colayer] - int(merged[piece.index]) for piece in layout.pieces)

    def _counts(self, key: bytes) -> tuple[tuple[int, int], ...]:
        return tuple((count, colayer) for colayer, count in enumerate(self._sent[key]))

    def _look_at_departures(self) -> None:
        departed = self._membership.departed()
        if departed != self._known_departed:
            self._known_departed = set(departed)
            with self.replica.lock:
                for rank in departed:
                    self.replica.gei.exclude(rank)
            self._look_again()

    def _look_again(self) -> None:
        for thread in self._threads:
            thread.look_again()

    def begin_at(self, step: int) -> None:
        self.reset(self._session, step)
        self._has_joined = True

    def meet(self, rank: int, step: int) -> None:
        self._peers.is_in(rank, step)

    def admit(self, rank: int, step: int) -> int:
        self._peers.begin_life(rank)
        if self._membership.rank in self._peers.done:  # Those that were told were others.
            self._threads[0].put(functools.partial(self._tell_done, rank))
        return self._iteration

    # The end.

    def _finish(self, k: int) -> tuple[np.ndarray, ...]:
        """Waits until all have made their last step, and all that was sent is merged; then evens out what is left.

        Returns:
          The weights, equal on all ranks.
        """
        self._look_at_departures()
        key, rank = self._present_layout(k).key, self._membership.rank
        self._tell_moves()
        note = self._note(Kind.DONE, key, contributions=self._counts(key))
        with self._monitor:
            self._peers.has_contributed(rank, key, tuple(self._sent[key]))
            self._peers.done.add(rank)
            others = self._peers.present()
        for other in others:
            send(self._membership, other, self._queue, note, [])
        self._look_again()
        self._wait_for_others(k)
        for layout in self.replica.layouts():
            self._settle(layout)
        means = self._final.mean(
            0,
            self.replica.read(),
            lambda rank, _: self._membership.delivers(rank, self._group, 0),
            before_commit=self._commit,
        )
        self.replica.begin(means)
        return tuple(means)

    def _tell_done(self, newcomer: int) -> None:
        """This rank has made its last step before another one has joined: it has not contributed to what they share."""
        nothing = tuple((0, colayer) for colayer in range(len(self.members)))
        note = self._note(Kind.DONE, self._peers.present_key(), contributions=nothing)
        send(self._membership, newcomer, self._queue, note, [])

    def _commit(self) -> None:
        self._sent_steps = 1

    def _wait_for_others(self, k: int) -> None:
        def missing() -> list[int]:
            self._look_at_departures()  # Nobody waits for their contributions any more.
            late = [rank for rank in self._peers.present() if rank not in self._peers.done]
            return late or sorted(self._unsettled_roots() - {self._membership.rank})

        is_waiting = True
        while is_waiting:  # For as long as others get on: they may have many steps before them.
            num_before = self._num_messages()

            def missing_without_progress(num_before: int = num_before) -> list[int]:
                return missing() if self._num_messages() == num_before else []

            self._membership.wait(missing_without_progress, operation="receive the last contributions", step=k)
            with self._monitor:
                is_waiting = bool(missing())
        self._wait_for_own_threads(lambda: not self._unsettled_roots())

    def _num_messages(self) -> int:
        return sum(thread.num_messages for thread in self._threads)

    def _unsettled_roots(self) -> set[int]:
        """The roots of pieces of which more may come here; the monitor is held."""
        return {
            piece.root
            for layout in self.replica.layouts()
            for piece in layout.pieces
            if not self._is_settled(layout, piece)
        }

    def _is_settled(self, layout: Layout, piece: Piece) -> bool:
        """Whether no more of a piece comes here: its root has said so, or a rank on the way from there has left."""
        is_connected = self._peers.is_connected(layout, piece, self._membership.rank)
        return piece.index in layout.ended or not is_connected

    # Messages.

    def _note(self, kind: Kind, key: bytes, **fields) -> Note:
        return Note(self._session, kind, key, self.replica.gei.newest, **fields)

    def _send(self, rank: int, kind: Kind, key: bytes, payload: Sequence[np.ndarray]) -> None:
        send(self._membership, rank, self._queue, self._note(kind, key), payload)

    def _on_message(self, message: Message) -> None:
        note = Note.unpack(message, self._membership.world_size)
        with self._monitor:
            rank = self._membership.rank
            if note.session != self._session or note.key[rank] != self._peers.key_of(rank):
                return  # What was meant for an earlier life of this rank is in the state that it has taken.
            with self.replica.lock:
                self.replica.gei.start(note.newest)
            self._peers.learn(note)
            self._handle(note, message)
            self._monitor.notify_all()

    def _handle(self, note: Note, message: Message) -> None:
        if note.kind in (Kind.DONE, Kind.MOVED):
            self._note_contributions(note, message)
            self._look_again()
        elif note.kind is Kind.FULL:
            self._peers.full.add((message.sender, note.piece))
        elif note.kind is Kind.ROOM:
            self._peers.full.discard((message.sender, note.piece))
        elif note.kind is Kind.STATE:
            self._pulling.receive(message.payload)
        elif note.kind is Kind.PULL:
            self._threads[0].put(functools.partial(self._pulling.answer, message.sender, note.key))
        elif self.replica.is_freed(note.key):
            self._num_late += len(note.contributions)
        else:
            layout = self.replica.layout(note.key)
            piece = checked_piece(layout, note, message.sender)
            self._threads[piece.thread].receive(layout, note, message.sender, message.payload)

    def _note_contributions(self, note: Note, message: Message) -> None:
        """Another rank has told how often it has contributed to a layout."""
        key = note.key if note.kind is Kind.DONE else message.payload.tobytes()
        if len(key) not in (0, len(note.key)) or len(note.contributions) != (len(self.members) if key else 0):
            raise ProtocolError(f"rank {message.sender} tells of {len(note.contributions)} colayers.")
        rank = self._membership.rank
        # Of others nothing comes here.
        if key and key[rank] == self._peers.key_of(rank) and not self.replica.is_freed(key):
            self.replica.layout(key)
            self._peers.has_contributed(message.sender, key, [count for count, _ in note.contributions])
        if note.kind is Kind.DONE:
            self._peers.done.add(message.sender)
        else:
            self._peers.has_moved(message.sender, note.key)

    # Records.

    @property
    def sent_steps(self) -> int:
        return self._sent_steps

    def counters(self) -> Mapping[str, float]:
        """What became of contributions.

        Returns:
          `staleness`: how many iterations the present one of this rank is behind; `proportion`: how many of its
          colayers have left; `overtime_drops`: colayers of this rank that were dropped; `contributions_lost`: pieces of
          this rank's colayers that were sent on ways through ranks that have left, and have not come back, counted when
          no more can come; `contributions_late`: pieces that ranks which have left had sent, and that came when nobody
          waited for them any more; `pulls` of another rank's state, and `pulls_in_vain`; `messages_merged`, and
          `duplicates`, which were not; `blends` of pieces; `gei_rows` and `layouts` that are kept; `inbox_bytes` that
          are to be merged; and `inbox_waits`: iterations that began late as such an inbox was full, here or elsewhere.
        """
        with self.replica.lock:
            gei, num_duplicates = self.replica.gei, self.replica.num_duplicates
            staleness = max(0, gei.staleness(self._iteration)) if self._iteration >= 0 else 0
            num_rows = len(gei)
        return {
            "staleness": staleness,
            "proportion": self._num_left,
            "overtime_drops": self._num_dropped,
            "contributions_lost": self._num_lost,
            "contributions_late": self._num_late + sum(thread.num_late for thread in self._threads),
            "pulls": self._pulling.num_pulls,
            "pulls_in_vain": self._pulling.num_in_vain,
            "messages_merged": self._num_messages(),
            "duplicates": num_duplicates,
            "blends": sum(thread.num_blends for thread in self._threads),
            "gei_rows": num_rows,
            "layouts": len(self.replica.layouts()),
            "inbox_bytes": sum(thread.num_bytes for thread in self._threads),
            "inbox_waits": self._num_waits,
        }

    def close(self) -> None:
        self._membership.transport.unregister(self._queue)
        for thread in self._threads:
            thread.close()
        for running in self._running:
            running.join(_JOIN_SECONDS)
        self._final.close()

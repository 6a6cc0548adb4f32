"""The asynchronous communication of Canary at one rank. See `hop_tf.strategies.canary`, whose steps are cited here."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Mapping, Sequence

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
from hop_tf.strategies.canary_peers import Peers
from hop_tf.strategies.canary_pieces import PieceThread, checked_piece, send
from hop_tf.strategies.canary_pull import Pulling
from hop_tf.strategies.canary_replica import Replica
from hop_tf.transport.base import Message
from hop_tf.worker import ExchangeContext

# Own iterations that may be under way, beside one for each message that follows another.
_WINDOW = 4
_JOIN_SECONDS = 5.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class AsyncSettings:
    """What an asynchronous exchange is told.

    Attributes:
      network: Whose routes pieces take.
      thresholds: s and p.
      codec: What contributions are encoded with.
      sync_interval: Iterations between two blends; None: there are none.
    """

    network: Network
    thresholds: Thresholds
    codec: Codec
    sync_interval: int | None


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
        self._num_dropped = 0
        self._threads = [self._make_thread() for _ in range(settings.network.num_levels)]
        with tf.init_scope(), tf.device("/cpu:0"):
            self.start_step = tf.Variable(0, dtype=tf.int64, trainable=False, name="hop_tf_start_step")
        self._begin(context.session)
        membership.transport.register(self._queue, self._on_message)
        self._running = [
            context.start_thread(f"pieces {self._group}/{index}", thread.run)
            for index, thread in enumerate(self._threads)
        ]

    def _make_thread(self) -> PieceThread:
        membership = self._membership

        def send_values(
            rank: int, level: int, kind: Kind, layout: Layout, piece: Piece, sequence: int, values: np.ndarray
        ) -> None:
            note = self._note(kind, layout.key, piece=piece.index, sequence=sequence)
            send(membership, rank, self._queue, note, [values], level)

        interval = self._settings.sync_interval
        blending = Blending(self.replica, membership.rank, interval, self._peers.is_present, send_values)
        peers = self._peers
        return PieceThread(membership, self.replica, self._queue, peers.are_all_in, peers.is_expected, blending)

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
        self._sent: collections.Counter[int] = collections.Counter()  # By colayer, in the present layout.
        self._iteration = -1
        self._is_dropping = False
        self._has_joined = False
        self._num_left = 0
        self._sent_steps = 0

    # Steps.

    def step(self, outgoing: Outgoing) -> Incoming:
        k, segment = outgoing.step, outgoing.segment
        if segment == self.start_segment:
            self._start(outgoing.buckets)
        elif segment == self.merge_segment:
            return self._end_iteration(k)
        elif segment == self.finish_segment:
            return Incoming(k, segment, self._finish(k))
        else:
            if segment == 0:
                self._enter(k)
            self._send_colayer(k, segment, outgoing.buckets)
        return self._nothing(outgoing)

    def neutral(self, outgoing: Outgoing) -> Incoming:
        if outgoing.segment == self.start_segment:
            self.replica.begin(outgoing.buckets)
        if outgoing.segment in (self.merge_segment, self.finish_segment):
            return self._weights(outgoing.step, outgoing.segment)
        return self._nothing(outgoing)

    def _nothing(self, outgoing: Outgoing) -> Incoming:
        return Incoming(outgoing.step, outgoing.segment, tuple(np.empty(0, each.dtype) for each in outgoing.buckets))

    def _weights(self, k: int, segment: int, num_skipped: int = 0) -> Incoming:
        return Incoming(k, segment, self.replica.read(), num_skipped)

    def _start(self, weights: Sequence[np.ndarray]) -> None:
        self.replica.begin(weights)
        if self._has_joined:  # What the others have merged since they gave these weights is missing.
            self._layout = self._present_layout()
            self._pulling.pull(self._layout, int(self.start_step))
        for thread in self._threads:
            thread.open()

    def _enter(self, k: int) -> None:
        """Begins to send what iteration k has computed."""
        self._look_at_departures()
        self._wait_for_window(k)
        with self.replica.lock:
            self.replica.gei.start(k)
        self._layout = self._present_layout()
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
        self._sent[colayer] += 1
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
                late = [piece for piece in layout.pieces if self._sent[piece.colayer] - merged[piece.index] >= most]
            return sorted({piece.root for piece in late} - {rank})

        self._membership.wait(missing, operation="receive what was merged", step=k)

    # Ranks that leave, or join late. To newcomers what is under way then may be lost, until the next blend.

    def _present_layout(self) -> Layout:
        if self._layout is None or not self._peers.are_all_in(self._layout):
            self._sent.clear()
            return self.replica.layout(self._peers.present_key())
        return self._layout

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
          The weights, equal on all ranks. The replica may change still, by a blend that is under way.
        """
        self._look_at_departures()
        layout = self._layout = self._present_layout()
        counts = tuple((self._sent[colayer], colayer) for colayer in range(len(self.members)))
        note = self._note(Kind.DONE, layout.key, contributions=counts)
        with self._monitor:
            self._peers.done[self._membership.rank] = note
            others = self._peers.present()
        for rank in others:
            send(self._membership, rank, self._queue, note, [])
        self._look_again()
        self._wait_for_others(k)
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
            return [rank for rank in self._peers.present() if not self._is_merged(rank)]

        is_waiting = True
        while is_waiting:  # For as long as others get on: they may have many steps before them.
            num_before = self._num_messages()

            def missing_without_progress(num_before: int = num_before) -> list[int]:
                return missing() if self._num_messages() == num_before else []

            self._membership.wait(missing_without_progress, operation="receive the last contributions", step=k)
            with self._monitor:
                is_waiting = bool(missing())

    def _num_messages(self) -> int:
        return sum(thread.num_messages for thread in self._threads)

    def _is_merged(self, rank: int) -> bool:
        """Whether a rank has made its last step, and its contributions, and this rank's own, are merged."""
        done = self._peers.done
        return rank in done and all(self._is_all_merged(each) for each in (rank, self._membership.rank))

    def _is_all_merged(self, rank: int) -> bool:
        note = self._peers.done[rank]
        with self.replica.lock:
            layout = self.replica.layout(note.key)
            if not self._peers.are_all_in(layout):
                return True  # What was under way through one that has left may be lost.
            sent = [count for count, _ in note.contributions]
            return all(layout.ledger.merged[piece.index, rank] >= sent[piece.colayer] for piece in layout.pieces)

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
                layout = self.replica.layout(note.key)
            self._peers.learn(note)
            self._handle(layout, note, message)
            self._monitor.notify_all()

    def _handle(self, layout: Layout, note: Note, message: Message) -> None:
        if note.kind is Kind.DONE:
            if len(note.contributions) != len(self.members):
                raise ProtocolError(f"rank {message.sender} tells of {len(note.contributions)} colayers.")
            self._peers.done[message.sender] = note
            self._look_again()
        elif note.kind is Kind.STATE:
            self._pulling.receive(message.payload)
        elif note.kind is Kind.PULL:
            self._threads[0].put(functools.partial(self._pulling.answer, message.sender, note.key))
        else:
            piece = checked_piece(layout, note, message.sender)
            self._threads[piece.thread].receive(layout, note, message.sender, message.payload)

    # Records.

    @property
    def sent_steps(self) -> int:
        return self._sent_steps

    def counters(self) -> Mapping[str, float]:
        """What became of contributions.

        Returns:
          `staleness`: how many iterations the present one of this rank is behind; `proportion`: how many of its
          colayers have left; `overtime_drops`: colayers of this rank that were dropped; `pulls` of another rank's
          state, and `pulls_in_vain`; `messages_merged`, and `duplicates`, which were not; `blends` of pieces; and
          `gei_rows` that are kept.
        """
        with self.replica.lock:
            gei, num_duplicates = self.replica.gei, self.replica.num_duplicates
            staleness = max(0, gei.staleness(self._iteration)) if self._iteration >= 0 else 0
            num_rows = len(gei)
        return {
            "staleness": staleness,
            "proportion": self._num_left,
            "overtime_drops": self._num_dropped,
            "pulls": self._pulling.num_pulls,
            "pulls_in_vain": self._pulling.num_in_vain,
            "messages_merged": self._num_messages(),
            "duplicates": num_duplicates,
            "blends": sum(thread.num_blends for thread in self._threads),
            "gei_rows": num_rows,
        }

    def close(self) -> None:
        self._membership.transport.unregister(self._queue)
        for thread in self._threads:
            thread.close()
        for running in self._running:
            running.join(_JOIN_SECONDS)
        self._final.close()

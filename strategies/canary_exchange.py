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
from hop_tf.exchange import Exchange, Incoming, Outgoing
from hop_tf.gei import Thresholds
from hop_tf.joining import Joiner
from hop_tf.packing import Packing
from hop_tf.strategies.canary_blend import Blending
from hop_tf.strategies.canary_layout import Layout, Piece
from hop_tf.strategies.canary_messages import Kind, Note
from hop_tf.strategies.canary_pieces import PieceThread, checked_piece, send
from hop_tf.strategies.canary_replica import Replica
from hop_tf.transport.base import Message
from hop_tf.worker import ExchangeContext

# Own iterations that may be under way, beside one for each message that follows another.
_WINDOW = 4
_MAX_PULLS = 3
_LARGEST_LIFE = 254


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
    """

    def __init__(self, context: ExchangeContext, members: Sequence[Sequence[int]], settings: AsyncSettings):
        self._group = context.group
        self._membership = context.membership
        self._monitor = context.membership.monitor
        self._settings = settings
        self._num_colayers = len(members)
        self._queue = f"canary/{self._group}"
        self._depth = max(route.depth for route in settings.network.routes(self._membership.world_size))
        self.members = members
        self.order = [index for colayer in members for index in colayer]
        colayers, whole = [context.packing.part(each) for each in members], context.packing.part(self.order)
        self.merge_segment, self.start_segment, self.finish_segment = (self._num_colayers + i for i in range(3))
        self.parts: list[Packing] = [*colayers, whole, whole, whole]
        self.max_in_flight = len(self.parts)
        membership = self._membership
        self._replica = Replica(
            membership.rank, membership.world_size, settings.network, colayers, settings.codec, context.pool
        )
        self._final = context.make_all_reduce("final", whole, Identity(), "mesh")
        self._counts = collections.Counter(dict.fromkeys(("overtime_drops", "pulls", "pulls_in_vain"), 0))
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

        blending = Blending(self._replica, membership.rank, self._settings.sync_interval, self._is_present, send_values)
        return PieceThread(membership, self._replica, self._queue, self._is_expected, blending)

    def reset(self, session: int, start: int = 0) -> None:
        with self._monitor:
            self._replica.reset()
            self._final.reset(session)
            self._begin(session)
            self.start_step.assign(start)

    def _begin(self, session: int) -> None:
        self._session = session
        self._layout: Layout | None = None
        self._known_departed: set[int] = set()
        self._iterations: dict[int, int] = {}  # The newest one that a rank is known to have started.
        self._sent: collections.Counter[int] = collections.Counter()  # By colayer, in the present layout.
        self._done: dict[int, Note] = {}
        self._state: tuple[bytes, np.ndarray] | None = None
        self._iteration = -1
        self._is_dropping = False
        self._has_joined = False
        self._num_left = 0
        self._sent_steps = 0
        for thread in self._threads:
            thread.reset(session)

    # Steps.

    def step(self, outgoing: Outgoing) -> Incoming:
        k, segment = outgoing.step, outgoing.segment
        if segment == self.start_segment:
            self._start(outgoing.buckets)
        elif segment == self.merge_segment:
            return self._end_iteration(k)
        elif segment == self.finish_segment:
            self._finish()
            return self._weights(k, segment)
        else:
            if segment == 0:
                self._enter(k)
            self._send_colayer(k, segment, outgoing.buckets)
        return self._nothing(outgoing)

    def neutral(self, outgoing: Outgoing) -> Incoming:
        if outgoing.segment == self.start_segment:
            self._start(outgoing.buckets)
        if outgoing.segment in (self.merge_segment, self.finish_segment):
            return self._weights(outgoing.step, outgoing.segment)
        return self._nothing(outgoing)

    def _nothing(self, outgoing: Outgoing) -> Incoming:
        return Incoming(outgoing.step, outgoing.segment, tuple(np.empty(0, each.dtype) for each in outgoing.buckets))

    def _weights(self, k: int, segment: int, num_skipped: int = 0) -> Incoming:
        return Incoming(k, segment, self._replica.read(), num_skipped)

    def _start(self, weights: Sequence[np.ndarray]) -> None:
        self._replica.begin(weights)
        if self._has_joined:  # What the others have merged since they gave these weights is missing.
            self._layout = self._present_layout()
            self._pull(int(self.start_step))
        for thread in self._threads:
            thread.open()

    def _enter(self, k: int) -> None:
        """Begins to send what iteration k has computed."""
        self._look_at_departures()
        self._wait_for_window(k)
        with self._replica.lock:
            self._replica.gei.start(k)
        self._layout = self._present_layout()
        self._iteration, self._is_dropping, self._num_left = k, False, 0

    def _send_colayer(self, k: int, colayer: int, buckets: Sequence[np.ndarray]) -> None:
        """Steps 3 and 4: a colayer leaves, unless this rank is overtime."""
        with self._replica.lock:
            staleness = self._replica.gei.staleness(k)
        if self._is_dropping or self._settings.thresholds.is_overtime(staleness, self._num_left):
            self._is_dropping = True
            self._counts["overtime_drops"] += 1
            return
        share = 1 / len(self._layout.ranks)
        for piece in self._layout.by_colayer[colayer]:
            start = self._replica.starts[colayer][piece.bucket]
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
        data = self._replica.encode(piece, values)
        send(self._membership, piece.parent, self._queue, note, [data], piece.parent_level)

    def _end_iteration(self, k: int) -> Incoming:
        """Steps 5 and 6: the weights as they are, and how far ahead others are."""
        if self._is_dropping:
            self._pull(k)
        with self._replica.lock:
            target = max(k + 1, self._replica.gei.newest)
            self._replica.gei.start(target)
        return self._weights(k, self.merge_segment, target - (k + 1))

    def _wait_for_window(self, k: int) -> None:
        """Bounds what is under way: waits for communication, though for nobody's computation."""
        rank = self._membership.rank

        def missing() -> list[int]:
            layout = self._layout
            if layout is None or not self._is_whole(layout):
                return []
            with self._replica.lock:
                merged = layout.ledger.merged[:, rank]
                late = [
                    piece
                    for piece in layout.pieces
                    if self._sent[piece.colayer] - merged[piece.index] >= _WINDOW + self._depth
                ]
            return sorted({piece.root for piece in late} - {rank})

        self._membership.wait(missing, operation="receive what was merged", step=k)

    # Who is there.

    def _is_present(self, rank: int) -> bool:
        return self._membership.departure(rank) is None

    def _is_expected(self, rank: int) -> bool:
        return self._is_present(rank) and rank not in self._done

    def _is_whole(self, layout: Layout) -> bool:
        """Whether all ranks of a layout are there still, in the same life."""
        return layout.key == self._present_key()

    def _present_key(self) -> bytes:
        membership = self._membership
        lives = [
            1 + (membership.life if rank == membership.rank else membership.life_of(rank))
            if rank == membership.rank or self._is_present(rank)
            else 0
            for rank in range(membership.world_size)
        ]
        return bytes(min(life, _LARGEST_LIFE + 1) for life in lives)

    def _present_layout(self) -> Layout:
        if self._layout is None or not self._is_whole(self._layout):
            self._sent.clear()
            return self._replica.layout(self._present_key())
        return self._layout

    def _look_at_departures(self) -> None:
        departed = self._membership.departed()
        if departed != self._known_departed:
            self._known_departed = set(departed)
            with self._replica.lock:
                for rank in departed:
                    self._replica.gei.exclude(rank)
            self._look_again()

    def _look_again(self) -> None:
        for thread in self._threads:
            thread.look_again()

    # Ranks that join late. What is under way to those that were there before may be lost to them, until the next blend.

    def begin_at(self, step: int) -> None:
        self.reset(self._session, step)
        self._has_joined = True

    def meet(self, rank: int, step: int) -> None:
        self._iterations[rank] = max(step, self._iterations.get(rank, -1))

    def admit(self, rank: int, step: int) -> int:
        self._done.pop(rank, None)
        self._iterations.pop(rank, None)
        return self._iteration

    # Pulls.

    def _pull(self, k: int) -> None:
        """Takes the state of the fastest rank, if it has merged all that this one has; else merges on."""
        for _ in range(_MAX_PULLS):
            others = {rank: i for rank, i in self._iterations.items() if self._is_present(rank)}
            if not others or self._layout is None:
                return
            fastest = max(others, key=others.get)
            with self._monitor:
                self._state = None
            send(self._membership, fastest, self._queue, self._note(Kind.PULL, self._layout.key), [])
            self._membership.wait(
                lambda fastest=fastest: [fastest] if self._state is None and self._is_present(fastest) else [],
                operation="pull the state",
                step=k,
            )
            with self._monitor:
                state, self._state = self._state, None
            if state is not None and self._replica.adopt(*state):
                self._counts["pulls"] += 1
                return
        self._counts["pulls_in_vain"] += 1

    # The end.

    def _finish(self) -> None:
        """Waits until all have made their last step, and all that was sent is merged; then evens out what is left."""
        self._look_at_departures()
        layout = self._layout = self._present_layout()
        counts = tuple((self._sent[z], z) for z in range(self._num_colayers))
        note = self._note(Kind.DONE, layout.key, contributions=counts)
        with self._monitor:
            self._done[self._membership.rank] = note
        for rank in layout.ranks:
            if rank != self._membership.rank and self._is_present(rank):
                send(self._membership, rank, self._queue, note, [])
        self._look_again()
        self._wait_for_others()
        means = self._final.mean(
            0,
            self._replica.read(),
            lambda rank, _: self._membership.delivers(rank, self._group, 0),
            before_commit=self._commit,
        )
        with self._replica.lock:
            self._replica.begin(means)

    def _commit(self) -> None:
        self._sent_steps = 1

    def _wait_for_others(self) -> None:
        known = None

        def missing() -> list[int]:
            nonlocal known
            departed = self._membership.departed()
            if departed != known:  # Nobody waits for their contributions any more.
                known = set(departed)
                self._look_again()
            ranks = [r for r in range(self._membership.world_size) if self._is_present(r)]
            return [r for r in ranks if r != self._membership.rank and not self._is_merged(r)]

        self._membership.wait(missing, operation="receive the last contributions", step=0)

    def _is_merged(self, rank: int) -> bool:
        """Whether a rank has made its last step, and its contributions, and this rank's own, are merged."""
        note = self._done.get(rank)
        return note is not None and self._is_all_merged(rank, note) and self._is_own_merged()

    def _is_own_merged(self) -> bool:
        return self._is_all_merged(self._membership.rank, self._done[self._membership.rank])

    def _is_all_merged(self, rank: int, note: Note) -> bool:
        with self._replica.lock:
            layout = self._replica.layout(note.key)
            if not self._is_whole(layout):
                return True  # What was under way through one that has left may be lost.
            sent = [count for count, _ in note.contributions]
            return all(layout.ledger.merged[piece.index, rank] >= sent[piece.colayer] for piece in layout.pieces)

    # Messages.

    def _note(self, kind: Kind, key: bytes, **fields) -> Note:
        return Note(self._session, kind, key, self._replica.gei.newest, **fields)

    def _on_message(self, message: Message) -> None:
        note = Note.unpack(message, self._membership.world_size)
        with self._monitor:
            if note.session != self._session:
                return
            with self._replica.lock:
                self._replica.gei.start(note.newest)
                layout = self._replica.layout(note.key)
            self._learn(message.sender, note)
            if note.kind is Kind.DONE:
                self._done[message.sender] = note
                self._look_again()
            elif note.kind is Kind.STATE:
                self._state = note.key, message.payload
            elif note.kind is Kind.PULL:
                self._threads[0].put(functools.partial(self._send_state, message.sender, note.key))
            else:
                piece = checked_piece(layout, note, message.sender)
                self._threads[piece.thread].receive(layout, note, message.sender, message.payload)
            self._monitor.notify_all()

    def _learn(self, sender: int, note: Note) -> None:
        if note.kind in (Kind.UP, Kind.DOWN, Kind.MARKED_DOWN):
            for rank, iteration in note.contributions:
                if rank != self._membership.rank:
                    self._iterations[rank] = max(iteration, self._iterations.get(rank, -1))

    def _send_state(self, rank: int, key: bytes) -> None:
        note = self._note(Kind.STATE, key)
        send(self._membership, rank, self._queue, note, self._replica.state(key))

    # Records.

    @property
    def replica(self) -> Replica:
        """The weights and what was merged into them."""
        return self._replica

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
        replica = self._replica
        with replica.lock:
            staleness = max(0, replica.gei.staleness(self._iteration)) if self._iteration >= 0 else 0
            counts = {**self._counts, "gei_rows": len(replica.gei), "staleness": staleness, **replica.counters()}
        counts["proportion"] = self._num_left
        counts["messages_merged"] = sum(thread.num_messages for thread in self._threads)
        counts["blends"] = sum(thread.num_blends for thread in self._threads)
        return counts

    def close(self) -> None:
        self._membership.transport.unregister(self._queue)
        for thread in self._threads:
            thread.close()
        for running in self._running:
            running.join()
        self._final.close()

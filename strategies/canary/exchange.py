"""The asynchronous communication of Canary at one rank. See `hop_tf.strategies.canary`, whose steps are cited here."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
import tensorflow as tf

from hop_tf.codecs import Codec, Identity
from hop_tf.collectives.networks import Network
from hop_tf.errors import HopError
from hop_tf.membership.session_queue import SessionQueue
from hop_tf.membership.silence import Silence
from hop_tf.runtime.exchange import Exchange, Request, Result
from hop_tf.runtime.group import ExchangeContext
from hop_tf.runtime.joiner import Joiner
from hop_tf.strategies.canary.contributions import Contributions
from hop_tf.strategies.canary.encoding import PieceEncoding
from hop_tf.strategies.canary.ending import Ending
from hop_tf.strategies.canary.flow_control import FlowControl
from hop_tf.strategies.canary.gei import Thresholds
from hop_tf.strategies.canary.held import Held
from hop_tf.strategies.canary.layout import Layout, Piece
from hop_tf.strategies.canary.messages import COUNTING, Channel, Header, MessageKind
from hop_tf.strategies.canary.peers import Peers
from hop_tf.strategies.canary.pieces import PieceThread, checked_piece
from hop_tf.strategies.canary.pull import Pulling
from hop_tf.strategies.canary.replica import Replica
from hop_tf.strategies.canary.resync import Resync
from hop_tf.tensors.packing import Packing
from hop_tf.transport.base import Message

_JOIN_SECONDS = 5.0
# Two ranks may each lack sums that the other one has, in layouts that overlap. After this many pulls without success, a
# rank gives up the past layouts.
_MAX_IN_VAIN = 8
# At the end, a pull is repeated, because messages to the rank that is asked may still be in flight.
_MAX_PULLS, _PULL_PAUSE_SECONDS = 100, 0.1
_MIN_INBOX_BYTES = 64 * 2**20
_INBOX_REPLICAS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class AsyncSettings:
    """The settings of an asynchronous exchange.

    Attributes:
      network: The network whose routes pieces take.
      thresholds: s and p.
      codec: Encodes contributions.
      sync_interval: Iterations between two resyncs, or None for no resyncs.
      max_in_flight: See `hop_tf.CanaryStrategy`.
      inbox_bytes: The most bytes that each of the network's threads may hold, received but not yet merged. With more,
        the other ranks wait. Default None: eight times the bytes of the weights, at least 64 MiB.
    """

    network: Network
    thresholds: Thresholds
    codec: Codec
    sync_interval: int | None
    max_in_flight: int
    inbox_bytes: int | None = None


class CanaryExchange(Exchange, Joiner):
    """Sends contributions, and merges those of all ranks, without waiting for any rank's computation.

    The segments of a step are its colayers. The weights come back as `merge_segment`, after the graph has submitted
    the last colayer. Step `start_step` begins with `start_segment`, in which the graph submits its weights. After the
    last step comes `finish_segment`.

    Args:
      context: Membership, packing and buffers of the group.
      members: For each colayer, the indices of its variables.
      settings: The other settings.
      part_of: `part_of(ranks)` returns the factor of this rank's step if it is sent to `ranks`, including this rank.
        The ranks' factors add up to 1, except in steps in which measured shares change. Default: 1 / len(ranks).

    Attributes:
      members: For each colayer, the indices of its variables.
      order: The variables of `merge_segment`, in order: colayer by colayer.
      colayers: The colayer of each variable.
      start_step: The first step that this rank makes in the running session.
      replica: The weights and the record of merged contributions.
    """

    def __init__(
        self,
        context: ExchangeContext,
        members: Sequence[Sequence[int]],
        settings: AsyncSettings,
        part_of: Callable[[Collection[int]], float] = lambda ranks: 1 / len(ranks),
    ):
        self._part_of = part_of
        self._group = context.group
        self._membership = membership = context.membership
        self._monitor = membership.monitor
        self._settings = settings
        self._queue = SessionQueue(membership, f"canary/{self._group}", context.session)
        self.members = members
        self.order = [index for colayer in members for index in colayer]
        self.colayers = {index: colayer for colayer, indices in enumerate(members) for index in indices}
        colayers, whole = [context.packing.part(each) for each in members], context.packing.part(self.order)
        self._last_colayer = len(members) - 1
        self.merge_segment, self.start_segment, self.finish_segment = (len(members) + i for i in range(3))
        self.parts: list[Packing] = [*colayers, whole, whole, whole]
        self.max_in_flight = len(self.parts)
        network, pool, world_size = settings.network, context.pool, membership.world_size
        encoding = PieceEncoding(network, world_size, colayers, settings.codec, pool)
        self.replica = Replica(membership.rank, world_size, network, encoding, pool)
        self._peers = Peers(membership)
        self._channel = Channel(self._queue, lambda: self.replica.gei.newest)
        self._silence = Silence(membership, self._group, self._tell_missed)
        self._pulling = Pulling(membership, self.replica, self._peers, self._channel, self._silence)
        self._threads = [self._make_thread(index) for index in range(settings.network.num_levels)]
        self._held = Held(membership, self.replica.encoding, self._silence, self._send_own)
        self._contributions = Contributions(
            membership, self.replica, self._peers, self._channel, self._threads, self._held, len(members)
        )
        # On each edge of a route, one message may wait for a slow rank's message, until the waiting message's sender
        # sends the next one.
        depth = max(route.depth for route in settings.network.routes(membership.world_size))
        window = settings.max_in_flight + depth - 1
        self._flow_control = FlowControl(
            membership, self._peers, self._contributions, self._threads, self._held, self._silence, window
        )
        self._ending = Ending(
            membership,
            self._peers,
            self._contributions,
            self._channel,
            self._flow_control.wait_for_others,
            self._fill_gaps,
        )
        # Ranks may join meanwhile, so `Ending` decides which ranks take part.
        self._final = context.make_all_reduce("final", whole, Identity(), "mesh", recovers=False)
        self._num_dropped = self._num_late = 0
        self.start_step = 0
        self._begin()
        self._queue.start(self._on_message)
        self._running = [
            context.start_thread(f"pieces {self._group}/{index}", thread.run)
            for index, thread in enumerate(self._threads)
        ]

    def _make_thread(self, index: int) -> PieceThread:
        membership, settings = self._membership, self._settings

        def send_values(
            rank: int, level: int, kind: MessageKind, layout: Layout, piece: Piece, sequence: int, values: np.ndarray
        ) -> None:
            self._channel.send(rank, self._channel.header(kind, layout.key, piece.index, sequence), [values], level)

        resync = Resync(self.replica, membership.rank, settings.sync_interval, self._peers.takes_part, send_values)
        max_bytes = settings.inbox_bytes or max(_MIN_INBOX_BYTES, _INBOX_REPLICAS * self.parts[-1].num_bytes)
        return PieceThread(
            index, membership, self.replica, self._channel, self._peers, resync, self._silence, max_bytes
        )

    def _tell_missed(self, rank: int) -> None:
        for thread in self._threads:
            thread.tell_missed(rank)

    def reset(self, session: int, start: int = 0) -> None:
        with self._monitor:
            for thread in self._threads:
                thread.pause()
            # From here on nothing of the previous session is sent, and nothing arrives while the monitor is held.
            for thread in self._threads:
                thread.reset()
            self.replica.reset()
            self._final.reset(session)
            self._queue.session = session
            self._begin()
            self.start_step = start

    def _begin(self) -> None:
        self._peers.reset()
        self._silence.reset()
        self._held.reset()
        self._contributions.reset()
        self._iteration = -1
        self._is_dropping = False
        self._has_joined = False
        self._num_left = self._num_in_vain = 0
        self._sent_rounds = 0

    # Steps.

    def emit_encode(self, segment: int, buckets: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
        """Step 4: sketches colayers on the device that computes them. Codecs without an op encode piece by piece."""
        return self.replica.encoding.emit_encode(segment, buckets) if segment < len(self.members) else buckets

    def step(self, request: Request) -> Result | None:
        k, segment = request.step, request.segment
        if segment == self.finish_segment:
            return Result(k, segment, self._finish(k, request.buckets))
        if segment == self.start_segment:
            self._start(request.buckets)
            return None
        if segment == 0:
            self._enter(k)
        self._send_colayer(k, segment, request.buckets)
        return self._end_iteration(k) if segment == self._last_colayer else None

    def no_op(self, request: Request) -> Result | None:
        if request.segment == self.start_segment:
            self.replica.begin(request.buckets)
        segment_back = {self._last_colayer: self.merge_segment, self.finish_segment: self.finish_segment}
        if request.segment not in segment_back:
            return None
        return Result(request.step, segment_back[request.segment], self.replica.read())

    def _start(self, weights: Sequence[np.ndarray]) -> None:
        self.replica.begin(weights)
        if self._has_joined:
            self.replica.is_complete = False  # The replica lacks messages that the others have merged.
            k = self.start_step
            self._contributions.move(k)
            self._pull(k)
        for thread in self._threads:
            thread.open()

    def _enter(self, k: int) -> None:
        """Begins to send the colayers of iteration k."""
        self._contributions.look_at_departures()
        if self._silence.ranks:
            with self._monitor:
                self._silence.look_again()
        self._held.send()
        self._flow_control.wait_for_window(k)
        self._flow_control.wait_for_room(k)
        with self.replica.lock:
            self.replica.gei.start(k)
        self._contributions.move(k)
        self._contributions.tell_old_moves(k)
        self._contributions.free_layouts()
        self._iteration, self._is_dropping, self._num_left = k, False, 0

    def _send_colayer(self, k: int, colayer: int, buckets: Sequence[np.ndarray]) -> None:
        """Steps 2 to 4: sends a colayer, unless this rank is overtime."""
        with self.replica.lock:
            staleness = self.replica.gei.staleness(k)
        if self._is_dropping or self._settings.thresholds.is_overtime(staleness, self._num_left):
            self._is_dropping = True
            self._num_dropped += 1
            return
        layout = self._contributions.layout
        part = self._part_of(layout.ranks)
        for piece in layout.by_colayer[colayer]:
            self._contribute(layout, piece, buckets[piece.bucket], k, part)
        self._contributions.add(colayer)
        self._num_left += 1

    def _contribute(self, layout: Layout, piece: Piece, bucket: np.ndarray, k: int, part: float) -> None:
        """Contributes a piece of a colayer, or keeps it back. Until it is merged, it stands in for the mean here."""
        is_held = self._held.takes(layout, piece)
        joins_last = is_held and self._held.num_iterations(layout, piece) > 0
        self.replica.stand_in(layout, piece, bucket, joins_last=joins_last)
        values, data = self.replica.encoding.cut(piece, bucket, part)
        if is_held:
            self._held.add(layout, piece, k, values=values, data=data)
            return
        self._send_own(layout, piece, [k], values, data)

    def _send_own(
        self,
        layout: Layout,
        piece: Piece,
        iterations: Sequence[int],
        values: np.ndarray | None,
        data: np.ndarray | None,
    ) -> None:
        """Sends this rank's contribution of some iterations, or adds it to those that other ranks send here."""
        contributions = tuple((self._membership.rank, iteration) for iteration in iterations)
        if piece.parent is None or piece.children:
            self._threads[piece.thread].contribute(layout, piece, contributions, values=values, data=data)
            return
        if data is None:
            data = self.replica.encoding.encode(piece, values)
        header = self._channel.header(MessageKind.UP, layout.key, piece.index, contributions=contributions)
        self._channel.send(piece.parent, header, [data], piece.parent_level)

    def _end_iteration(self, k: int) -> Result:
        """Steps 5 and 6: returns the present weights, and the numbers of iterations to skip and of dropped colayers."""
        if self._is_dropping or self.replica.gaps:
            self._pull(k)
        with self.replica.lock:
            target = max(k + 1, self.replica.gei.newest)
            self.replica.gei.start(target)
        return Result(
            k,
            self.merge_segment,
            self.replica.read(),
            num_skipped=target - (k + 1),
            num_dropped=len(self.members) - self._num_left,
        )

    def _pull(self, k: int, *, waits_for_silent: bool = False) -> None:
        """Takes the state of a faster rank, and with it the layouts that the other rank knows."""
        self._contributions.free_layouts(gives_up=self._num_in_vain >= _MAX_IN_VAIN)
        gaps = set(self.replica.gaps)
        self._pulling.pull(k, waits_for_silent=waits_for_silent)
        filled = gaps - self.replica.gaps.keys()
        for key, index in filled:
            if self.replica.is_known(key):
                layout = self.replica.layout(key)
                self._threads[layout.pieces[index].thread].leave_resync(layout, layout.pieces[index])
        is_in_vain = not filled and not self._pulling.roots_of_gaps() <= self._silence.ranks
        self._num_in_vain = self._num_in_vain + 1 if is_in_vain else 0
        self._contributions.recheck()

    def _fill_gaps(self, k: int) -> None:
        """Takes the sums that this rank has missed from the roots, which have made their last step.

        The sums of a root that has left may be lost.

        Raises:
          HopError: As `Membership.wait` does, or if the roots' states cannot be taken.
        """
        for _ in range(_MAX_PULLS + self._membership.world_size):
            if self.replica.gaps:
                self._pull(k, waits_for_silent=True)
            if not (roots := self._pulling.roots_of_gaps()):
                return
            self._membership.wait_until(lambda: not self.replica.gaps, _PULL_PAUSE_SECONDS)
        raise HopError(
            f"rank {self._membership.rank}: steps that ranks {sorted(roots)} have summed did not arrive here. This "
            "rank cannot copy the state of one of these ranks, because each of them lacks other steps."
        )

    def _finish(self, k: int, changes: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
        """Waits until all ranks have made their last step and everything sent is merged. Then averages the replicas.

        Args:
          k: The number of steps that this rank has made.
          changes: This rank's changes since its last step, or empty arrays if there are none. Their mean over the ranks
            is added to the weights.

        Returns:
          The weights, equal on all ranks.

        Raises:
          PeerLostError: If others have ended without this rank, because it joined too late or a rank died at the end.
          HopError: As `Membership.wait` does.
        """
        self._contributions.look_at_departures()
        self._contributions.move(k)
        self._flow_control.wait_to_send(k)
        self._held.send()
        self._contributions.tell_end()
        incarnations, peers, membership = self._ending.agree(k), self._peers, self._membership
        means = self._final.mean(
            0,
            [_added(*each) for each in zip(self.replica.merged(), changes, strict=True)],
            lambda rank, _: peers.is_incarnation(rank, incarnations) and membership.delivers(rank, self._group, 0),
            before_commit=self._commit,
            training_step=k,
        )
        self._commit()  # Also if this rank is alone: a rank that joins from now on is too late.
        self.replica.begin(means)
        return tuple(means)

    def _commit(self) -> None:
        self._sent_rounds = 1

    # Ranks that join late.

    def begin_at(self, step: int) -> None:
        self.reset(self._queue.session, step)
        self._has_joined = True

    def meet(self, rank: int, step: int) -> None:
        self._peers.is_in(rank, step)

    def admit(self, rank: int, step: int) -> int:
        self._peers.begin_incarnation(rank)
        self._contributions.admit(rank)
        if self._membership.rank in self._peers.done:  # This rank announced its end before the new one joined.
            self._threads[0].put(functools.partial(self._contributions.tell_newcomer_of_end, rank))
        return self._iteration

    # Messages.

    def _on_message(self, message: Message) -> None:
        header, rank = Header.unpack(message, self._membership.world_size), self._membership.rank
        # Layouts outlast their ranks: a rank that knows the present incarnation may send messages for an earlier one.
        if header.key[rank] != self._peers.key_of(rank):
            return  # The state that this rank has taken contains the message.
        if header.newest > self.replica.gei.newest:  # Rarely true. The lock may block, and the monitor is held.
            with self.replica.lock:
                self.replica.gei.start(header.newest)
        if self._silence.ranks:
            self._silence.hear(message.sender)
        self._peers.learn(header)
        self._handle(header, message)

    def _handle(self, header: Header, message: Message) -> None:
        if header.kind in COUNTING:
            self._contributions.receive(header, message)
        elif header.kind is MessageKind.FULL:
            self._peers.full.add((message.sender, header.piece))
        elif header.kind is MessageKind.ROOM:
            self._peers.full.discard((message.sender, header.piece))
        elif header.kind is MessageKind.STATE:
            self._pulling.receive(message.sender, message.payload)
        elif header.kind is MessageKind.PULL:
            self._contributions.free_layouts()  # The state tells which layouts were freed.
            sender, key = message.sender, header.key
            self._threads[0].answer(lambda has_state: self._pulling.answer(sender, key, has_state=has_state))
        elif header.kind is MessageKind.ENDING:
            self._peers.ending[message.sender] = header.key
        elif self.replica.is_freed(header.key):
            self._num_late += len(header.contributions)
        elif header.kind is MessageKind.HEARD:
            self._contributions.hear_of(header.key)
        else:
            layout = self._contributions.hear_of(header.key)
            piece = checked_piece(layout, header, message.sender)
            self._threads[piece.thread].receive(layout, piece, header, message.sender, message.payload)

    # Records.

    @property
    def sent_rounds(self) -> int:
        return self._sent_rounds

    def outcomes(self) -> Mapping[str, int]:
        late = self._num_late + self.replica.num_late + sum(thread.num_late for thread in self._threads)
        return {
            "late": late,
            "dropped": self._num_dropped + self._contributions.num_lost,
            "merged": sum(thread.num_messages for thread in self._threads),
        }

    def counters(self) -> Mapping[str, float]:
        """The counts of contributions, messages and waits.

        Returns:
          `overtime_drops`: colayers of this rank that were dropped.
          `contributions_lost`: pieces of this rank's colayers that were sent via ranks that have left, and did not come
          back. Pieces in a state that was taken later do not count. A piece counts only when no further message of its
          layout can come.
          `contributions_late`: pieces from ranks that have left, which came too late to be merged. A state that this
          rank has taken already contained them, or lacked earlier messages.
          `pulls` and `pulls_rejected`: states of other ranks that were taken, and attempts without success.
          `messages_merged`, and `duplicates`: messages that were ignored, because they had been merged before.
          `resyncs`: pieces that were resynced.
          `inbox_waits`: iterations that began late because an inbox was full, here or on another rank.
          `window_waits`: iterations that began late because too many own iterations were in flight (`max_in_flight`).
          `silences`: the number of times that a rank was found silent and not waited for.
        """
        outcomes = self.outcomes()
        return {
            "overtime_drops": self._num_dropped,
            "contributions_lost": self._contributions.num_lost,
            "contributions_late": outcomes["late"],
            "pulls": self._pulling.num_pulls,
            "pulls_rejected": self._pulling.num_rejected,
            "messages_merged": outcomes["merged"],
            "duplicates": self.replica.num_duplicates,
            "resyncs": sum(thread.num_resyncs for thread in self._threads),
            "inbox_waits": self._flow_control.num_waits,
            "window_waits": self._flow_control.num_window_waits,
            "silences": self._silence.num_passed_by,
        }

    def gauges(self) -> Mapping[str, float]:
        """The progress of this rank, and the sizes of its state.

        Returns:
          `staleness`: the number of iterations that the present one is behind the newest.
          `proportion`: the number of colayers of the present iteration that were sent.
          `gei_rows`, `layouts`: the numbers of rows and layouts that are kept. `inbox_bytes`: bytes not merged yet.
        """
        with self.replica.lock:
            gei = self.replica.gei
            staleness = max(0, gei.staleness(self._iteration)) if self._iteration >= 0 else 0
            num_rows = len(gei)
        return {
            "staleness": staleness,
            "proportion": self._num_left,
            "gei_rows": num_rows,
            "layouts": len(self.replica.layouts()),
            "inbox_bytes": sum(thread.num_bytes for thread in self._threads),
        }

    def close(self) -> None:
        self._queue.close()
        self._silence.close()
        for thread in self._threads:
            thread.close()
        for running in self._running:
            running.join(_JOIN_SECONDS)
        self._final.close()


def _added(values: np.ndarray, change: np.ndarray) -> np.ndarray:
    return np.add(values, change, out=values) if change.size else values

"""`QueueTransport`: the common part of all transports between real threads."""

from __future__ import annotations

import abc
import collections
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from absl import logging

from hop_tf.errors import HopError
from hop_tf.options import CommunicationOptions
from hop_tf.records import Recorder
from hop_tf.transport.base import BULK_LANE, Handler, PeerStatus, Transport
from hop_tf.transport.deadlines import problem_of
from hop_tf.transport.handshake import OtherStrategyError
from hop_tf.transport.inbox import Dispatcher
from hop_tf.transport.lanes import LinkShares
from hop_tf.transport.outbox import Outbox, check_message, flatten
from hop_tf.transport.peer import Peer, process_name

# Time that `close` waits for threads. They end at once, unless a handler does not return.
CLOSE_TIMEOUT_SECONDS = 5.0
_LOG_PERIOD_SECONDS = 1.0


class QueueTransport(Transport):
    """A transport with an outbox for every (peer, lane), an inbox for every (sender, lane), and links in between.

    Args:
      rank: This rank.
      addresses: "host:port" of every rank.
      options: Deadlines.
      on_error: Called, on any thread, with an exception that a handler, or a thread of the transport, has raised. The
        error is also logged, and every later `send` raises it.
      on_restart: Called, on any thread, with a rank when another process has greeted in its place. No message of the
        new process is delivered before the call returns. Messages in flight to the old process, or from it, are
        forgotten. None: a peer that was restarted counts as failed. Transports whose ranks are not processes never call
        this.
      recorder: Records messages and clocks, or None.
      num_ranks: Number of ranks. The first processes are the ranks, the others are parameter servers. Default: all are
        ranks.
    """

    def __init__(
        self,
        rank: int,
        addresses: Sequence[str],
        *,
        options: CommunicationOptions,
        on_error: Callable[[BaseException], None] | None = None,
        on_restart: Callable[[int], None] | None = None,
        recorder: Recorder | None = None,
        num_ranks: int | None = None,
    ):
        if not 0 <= rank < len(addresses):
            raise ValueError(f"`rank` must be in [0, {len(addresses)}). Received: rank={rank}.")
        self._rank = rank
        self._options = options
        self._on_error = on_error
        self._on_restart = on_restart
        names = [process_name(number, num_ranks) for number in range(len(addresses))]
        self._name = names[rank]
        self._peers = {peer: Peer(peer, addresses[peer], name) for peer, name in enumerate(names) if peer != rank}
        self.recorder = recorder
        self._dispatcher = Dispatcher(on_error=self._thread_failed, recorder=recorder)
        self._lock = threading.Lock()
        self._outboxes: dict[tuple[int, int], Outbox] = {}
        self._watched: set[int] = set()
        self._shares = LinkShares(options.bandwidth_bits_per_second)
        self._failure: HopError | None = None
        self._closed = False
        self._bytes_sent = 0
        self._bytes_by_lane: collections.Counter[int] = collections.Counter()
        self._messages_sent = 0
        self._connections_refused = 0
        self._quiet_until = 0.0

    @property
    def rank(self) -> int:
        return self._rank

    def connect(self, peer: int) -> None:
        link = self._peer(peer)
        with self._lock:
            self._check_open()
            if peer in self._watched:
                return
            self._watched.add(peer)
            link.watch()
            self._watch(link)

    def register(self, queue: str, handler: Handler) -> None:
        self._dispatcher.register(queue, handler)

    def unregister(self, queue: str) -> None:
        self._dispatcher.unregister(queue)

    def send(
        self,
        peer: int,
        queue: str,
        header: bytes = b"",
        payload: Sequence[np.ndarray] = (),
        lane: int | None = 0,
        *,
        check: Callable[[], None] | None = None,
        supersedes: bool = False,
    ) -> bool:
        arrays, num_bytes = flatten(payload)
        name = queue.encode()
        if peer not in self._watched:
            self.connect(peer)
        lane = self._emptiest_lane(peer, num_bytes) if lane is None else lane
        check_message(name, header, num_bytes, lane)
        num_bytes += len(header)
        self._check_can_send(peer, 0.0)

        def check_all(waited_seconds: float) -> None:
            if check is not None:  # The caller may know more about the peer, and may act on it.
                check()
            self._check_can_send(peer, waited_seconds)

        outbox = self._outbox(peer, lane)
        has_superseded = outbox.put(name, header, arrays, num_bytes, check_all, supersedes=supersedes)
        if has_superseded:
            return True
        self._count_sent(lane, num_bytes)
        return False

    def flush(self, peer: int, timeout_seconds: float) -> bool:
        deadline = time.monotonic() + timeout_seconds
        with self._lock:
            outboxes = [outbox for (receiver, _), outbox in self._outboxes.items() if receiver == peer]
        return all(outbox.wait_empty(deadline) for outbox in outboxes)

    def status(self, peer: int) -> PeerStatus:
        return self._peer(peer).status(self._failure)

    def expect_return(self, peer: int) -> None:
        self._peer(peer).may_return = True

    def counters(self) -> Mapping[str, int]:
        with self._lock, self._dispatcher.condition:
            return {
                "bytes_sent": self._bytes_sent,
                "bytes_received": self._dispatcher.num_bytes,
                "messages_sent": self._messages_sent,
                "messages_received": self._dispatcher.num_messages,
                "connections_refused": self._connections_refused,
            }

    def bytes_by_lane(self) -> Mapping[int, int]:
        with self._lock:
            return dict(self._bytes_by_lane)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            outboxes = list(self._outboxes.values())
        deadline = time.monotonic() + CLOSE_TIMEOUT_SECONDS
        for outbox in outboxes:
            outbox.close()
        self._close_links(deadline)
        self._dispatcher.close(deadline)

    # For subclasses to define.

    @abc.abstractmethod
    def _watch(self, peer: Peer) -> None:
        """Begins to connect to `peer` and to exchange heartbeats. The lock is held."""

    @abc.abstractmethod
    def _open_lane(self, peer: Peer, lane: int, outbox: Outbox) -> None:
        """Begins to carry the messages in `outbox`. The lock is held."""

    @abc.abstractmethod
    def _close_links(self, deadline: float) -> None:
        """Ends all links and joins their threads (until `deadline`, `time.monotonic`)."""

    # For subclasses to call.

    def _count_sent(self, lane: int, num_bytes: int) -> None:
        with self._lock:
            self._messages_sent += 1
            self._bytes_sent += num_bytes
            self._bytes_by_lane[lane] += num_bytes

    def _refused(self, address: str, reason: HopError) -> None:
        """Counts a refused connection. Logs at most one of them per `_LOG_PERIOD_SECONDS`."""
        with self._lock:
            now = time.monotonic()
            logged = now >= self._quiet_until
            if logged:
                self._quiet_until = now + _LOG_PERIOD_SECONDS
        if logged:
            level = logging.INFO if isinstance(reason, OtherStrategyError) else logging.WARNING
            logging.log(level, "%s: a connection from %s was refused: %s", self._name, address, reason)
        with self._lock:
            self._connections_refused += 1

    def _restarted(self, peer: Peer) -> None:
        logging.warning("%s: %s was restarted.", self._name, peer)
        with self._lock:
            outboxes = [outbox for (receiver, _), outbox in self._outboxes.items() if receiver == peer.rank]
        self._dispatcher.begin_again(peer.rank)
        for outbox in outboxes:
            outbox.begin_again()
        self._on_restart(peer.rank)

    def _join(self, threads: Sequence[threading.Thread], deadline: float) -> None:
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
                if thread.is_alive():
                    logging.warning("rank %d: %s does not end: a handler does not return.", self._rank, thread.name)

    def _peer(self, peer: int) -> Peer:
        if peer not in self._peers:
            raise ValueError(f"`peer` must be another rank of {len(self._peers) + 1}. Received: peer={peer}.")
        return self._peers[peer]

    def _outbox(self, peer: int, lane: int) -> Outbox:
        with self._lock:
            self._check_open()
            if (peer, lane) not in self._outboxes:
                outbox = self._outboxes[peer, lane] = Outbox(recorder=self.recorder, peer=peer, lane=lane)
                self._open_lane(self._peers[peer], lane, outbox)
            return self._outboxes[peer, lane]

    def _emptiest_lane(self, peer: int, num_bytes: int) -> int:
        """The lane with the fewest bytes in flight, among the lanes that unordered messages are spread over."""
        round_trip_seconds = self._peers[peer].least_round_trip_seconds
        with self._lock:
            share = self._shares.of(peer, round_trip_seconds, num_bytes)
            lanes = range(BULK_LANE, BULK_LANE + share.num_lanes)
            outboxes = [self._outboxes.get((peer, lane)) for lane in lanes]
        for outbox in outboxes:
            if outbox is not None:
                outbox.max_bytes_per_second = share.bytes_per_second
        if share.num_lanes == 1:
            return BULK_LANE
        return min(lanes, key=lambda lane: (0, 0) if (outbox := outboxes[lane - BULK_LANE]) is None else outbox.load)

    def _check_open(self) -> None:
        if self._closed:
            raise HopError(f"rank {self._rank}: the transport is closed.")

    def _check_can_send(self, peer: int, waited_seconds: float) -> None:
        """Raises if the peer has failed, or if waiting longer for room is of no use."""
        failure = self._peers[peer].failure or self._failure
        if failure is None and waited_seconds:
            failure = problem_of(
                self.status(peer),
                None,
                waited_seconds,
                self._options,
                rank=self._rank,
                peer=f"rank {peer}",
                operation="send",
                step=None,
            )
        if failure is not None:
            raise failure

    def _thread_failed(self, error: BaseException) -> None:
        """Called when a handler, or the transport itself, has raised on a thread of the transport."""
        logging.error("rank %d: a thread of the transport failed.", self._rank, exc_info=error)
        with self._lock:
            if self._failure is None:
                self._failure = error if isinstance(error, HopError) else self._wrap(error)
        if self._on_error is not None:
            self._on_error(error)

    def _wrap(self, error: BaseException) -> HopError:
        failure = HopError(f"rank {self._rank}: a message handler failed: {type(error).__name__}: {error}")
        failure.__cause__ = error
        return failure

"""`Transport`: named queues between ranks, the only way in which ranks communicate.

A transport moves messages. It knows nothing of training: no steps, no scheme. Every implementation (gRPC and sockets
between processes, threads of one process for tests, simulated time) passes the same contract tests.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from hop_tf.errors import ProtocolError

# The lane of arrays, which would delay the small messages of lane 0.
BULK_LANE = 1
# A slow link is not a dead link: lost data is sent again a few round trips after the link recovers.
_SPARE_ROUND_TRIPS = 8


class Message(NamedTuple):
    """A message, as a handler receives it.

    Attributes:
      sender: Rank that sent the message.
      queue: Name of the queue that the message was sent to.
      header: A few bytes that the scheme defines (at most 64 KiB).
      payload: 1-D uint8 array, read-only, 64-byte aligned (so that TensorFlow can adopt it without a copy); empty
        if the message has none. The memory is recycled when the last reference to the array, or to a view, is gone.
    """

    sender: int
    queue: str
    header: bytes
    payload: np.ndarray

    def unexpected(self) -> ProtocolError:
        """The error to raise in a handler that does not expect this message."""
        return ProtocolError(f"rank {self.sender} sent an unexpected message to {self.queue!r}.")


@dataclasses.dataclass(frozen=True)
class PeerStatus:
    """The state of a peer, as a transport sees it.

    Attributes:
      address: The peer's address, "host:port".
      connected: True if a link to or from the peer is up now.
      silent_seconds: Time since anything came from the peer; time since `connect` if nothing ever came.
      incarnation: Incarnation of the peer's transport that messages go to now; None if the peer was never met.
      failure: An error that waiting cannot mend (the peer disagrees with this rank, or was restarted); otherwise None.
      last_problem: The latest connection problem in words ("connection refused"), for error messages; otherwise "".
      refused_seconds: Time for which the peer's address has refused connections, without any sign of life meanwhile:
        then the process has died. Otherwise 0.0.
      round_trip_seconds: Time until a heartbeat is answered, smoothed; 0.0 while it is unknown.
      unreached_seconds: Time for which this rank has tried in vain to open a connection to the peer. Messages from the
        peer may still arrive meanwhile.
      unreached_by_seconds: Time for which the peer, as it reports, has tried in vain to open a connection to this rank.
      problem_there: The peer's reason for `unreached_by_seconds`, in its words.
      may_return: True if another process may take the peer's place: see `Transport.expect_return`.
    """

    address: str
    connected: bool
    silent_seconds: float
    incarnation: str | None
    failure: Exception | None = None
    last_problem: str = ""
    refused_seconds: float = 0.0
    round_trip_seconds: float = 0.0
    unreached_seconds: float = 0.0
    unreached_by_seconds: float = 0.0
    problem_there: str = ""
    may_return: bool = False

    @property
    def ever_connected(self) -> bool:
        """True if a handshake with the peer has ever succeeded."""
        return self.incarnation is not None

    def was_silent_for(self, seconds: float) -> bool:
        """True if nothing came from the peer for `seconds` plus 8 round trips, but at most 2 * `seconds`."""
        return self.silent_seconds > self._allow(seconds)

    def was_refused_for(self, seconds: float) -> bool:
        """True if the address has refused connections for `seconds` plus 8 round trips, but at most 2 * `seconds`."""
        return self.refused_seconds > self._allow(seconds)

    def was_unreached_for(self, seconds: float) -> bool:
        """True if this rank has not reached the peer for `seconds` plus 8 round trips, but at most 2 * `seconds`."""
        return self.unreached_seconds > self._allow(seconds)

    def has_not_reached_this_for(self, seconds: float) -> bool:
        """True if the peer has not reached this rank for `seconds` plus 8 round trips, but at most 2 * `seconds`."""
        return self.unreached_by_seconds > self._allow(seconds)

    def _allow(self, seconds: float) -> float:
        return seconds + min(seconds, _SPARE_ROUND_TRIPS * self.round_trip_seconds)


@dataclasses.dataclass(slots=True)
class Expected:
    """A message that a rank expects: everything but its contents is known.

    Attributes:
      sender: Rank that sends the message.
      header: Its header.
      num_bytes: Length of its payload.
    """

    sender: int
    header: bytes
    num_bytes: int


@dataclasses.dataclass(slots=True)
class ToSend:
    """A message to send.

    Attributes:
      peer: The receiver.
      header: Its header.
      payload: Its payload.
    """

    peer: int
    header: bytes
    payload: Sequence[np.ndarray]


Handler = Callable[[Message], None]


class Transport(abc.ABC):
    """Sends messages to named queues of other ranks, in order, at most once, and watches over the peers.

    Threads: `send` may be called from any thread. Handlers run on the transport's threads, one at a time per
    (sender, lane). A handler that blocks stops only that sender's lane (back-pressure), never the server.
    """

    @property
    @abc.abstractmethod
    def rank(self) -> int:
        """The rank of this process."""

    @property
    @abc.abstractmethod
    def incarnation(self) -> str:
        """A name that no other transport of this rank has, in this process or another."""

    @abc.abstractmethod
    def start(self) -> None:
        """Begins to serve on this rank's own address.

        Raises:
          HopError: If the address cannot be bound. The message names the address.
        """

    @abc.abstractmethod
    def connect(self, peer: int) -> None:
        """Begins to connect to `peer`, keeps trying in the background, and watches over the peer. Does not block."""

    @abc.abstractmethod
    def register(self, queue: str, handler: Handler) -> None:
        """Delivers messages for `queue` to `handler`, starting with those that came before there was a handler."""

    @abc.abstractmethod
    def unregister(self, queue: str) -> None:
        """Forgets the handler of `queue`. Drops messages that are held for the queue or that still come."""

    @abc.abstractmethod
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
        """Queues one message for `peer`. Connects first if there is no link yet.

        Messages to one peer on one lane arrive in the order of sending, each at most once. This holds even if the
        connection breaks and is restored in between. With `lane=None`, messages may arrive in any order: if one
        connection cannot fill a long link, messages are spread over several. The payload is the concatenation of the
        arrays' bytes. The arrays are read after `send` has returned. Do not modify them.

        With `supersedes`, the message replaces a message to the same queue on this lane whose sending has not begun. So
        at most one such message waits, besides those in flight, however slow the peer is.

        Returns:
          True if an older message was replaced. That message is never sent.

        Blocks: while too much is queued for this lane. The wait ends when the peer takes messages, when the peer is
        lost, at `close`, or when `check` raises. `check` is called repeatedly meanwhile. With `supersedes`, the call
        never blocks.

        Raises:
          HopError: If the transport is closed or the peer has failed for good.
        """

    @property
    def can_swap(self) -> bool:
        """True if `swap` may receive messages, too."""
        return False

    def swap(
        self,
        queue: str,
        to_send: Sequence[ToSend],
        expected: Sequence[Expected],
        lane: int | None,
        send: Callable[[ToSend], object],
    ) -> list[np.ndarray | None]:
        """Sends messages, and meanwhile receives expected messages on the calling thread if they come soon.

        Args:
          queue: The queue of all messages. Its handler does not get the messages that are received here.
          to_send: The messages to send, each to a different peer.
          expected: The messages to receive, each from a different sender, and each the sender's next message on the
            lane.
          lane: The lane, or None as for `send`.
          send: Called with a message that cannot be written at once, to send it.

        Returns:
          The payload of each expected message, as a handler gets it, or None if the handler gets the message. The base
          class returns None for all.

        Blocks: until all messages have come, nothing has come for 0.05 s, or 0.25 s are over. Also blocks as `send`
        does.
        """
        del queue, lane
        for message in to_send:
            send(message)
        return [None] * len(expected)

    def waiting_for(self, senders: Collection[int], lane: int | None) -> contextlib.AbstractContextManager[None]:
        """A context in which a thread waits until handlers get messages. Later, `swap` may receive such messages."""
        del senders, lane
        return contextlib.nullcontext()

    @abc.abstractmethod
    def flush(self, peer: int, timeout_seconds: float) -> bool:
        """Waits until `peer` has received everything sent to it. Returns False if that takes too long."""

    @abc.abstractmethod
    def status(self, peer: int) -> PeerStatus:
        """The present state of `peer`."""

    def expect_return(self, peer: int) -> None:
        """Says that the process of `peer` may die and be started again. Only a long silence then counts as a loss.

        Refused connections are then no reason to give the peer up. In the base class, this has no effect.
        """
        del peer

    @abc.abstractmethod
    def counters(self) -> Mapping[str, int]:
        """Totals: `bytes_sent`, `bytes_received`, `messages_sent`, `messages_received`, `connections_refused`."""

    def bytes_by_lane(self) -> Mapping[int, int]:
        """The part of `bytes_sent` on each lane that was used."""
        return {}

    def serve_reports(self, report: Callable[[], Mapping[str, object]]) -> None:
        """Lets clients that know the cluster token ask for `report()`. Has no effect unless ranks are processes."""
        del report

    @abc.abstractmethod
    def close(self) -> None:
        """Stops serving, closes all links, unblocks every call and joins the threads. Idempotent."""

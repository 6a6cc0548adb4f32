"""`Transport`: named queues between ranks, the one way in which ranks talk.

A transport moves messages. It knows nothing of training: no steps, no scheme. Every member (gRPC between processes,
in-process for tests, simulated time) passes the same contract suite.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from hop_tf.errors import ProtocolError
from hop_tf.records import Recorder

# Where arrays travel: they would delay the small messages of lane 0.
BULK_LANE = 1
# A slow link is not a dead one: what was lost while it failed is sent again a few round trips later.
_SPARE_ROUND_TRIPS = 8


class Message(NamedTuple):
    """A message, as a handler receives it.

    Attributes:
      sender: Rank that sent it.
      queue: Name of the queue it was sent to.
      header: A few bytes that the scheme defines (at most 64 KiB).
      payload: 1-D uint8 array, read-only, 64-byte aligned (so that TensorFlow can adopt it without a copy); empty
        where the message has none. The memory is recycled when the last reference to it, or to a view, is gone.
    """

    sender: int
    queue: str
    header: bytes
    payload: np.ndarray

    def unexpected(self) -> ProtocolError:
        """The error of a handler to which such a message should not come."""
        return ProtocolError(f"rank {self.sender} sent an unexpected message to {self.queue!r}.")


@dataclasses.dataclass(frozen=True)
class PeerStatus:
    """What a transport knows of a peer.

    Attributes:
      address: Where it is, "host:port".
      connected: Whether a link to or from it is up now.
      silent_seconds: Time since anything was heard of it; since `connect` was called, if nothing ever was.
      incarnation: That of the transport that what is sent now is for. None if none was ever met.
      failure: An error that no waiting can mend (it disagrees with us, or it is a restarted process), else None.
      last_problem: The latest connection problem in words ("connection refused"), for error messages; else "".
      refused_seconds: For how long nobody has listened where the process did, without a sign of it meanwhile: it has
        died. 0.0 otherwise.
      round_trip_seconds: How long it takes until a heartbeat is answered, smoothed; 0.0 while that is unknown.
      unreached_seconds: For how long this rank has tried in vain to open a connection to it. It may be heard meanwhile.
      unreached_by_seconds: For how long it has tried in vain to open one to this rank, by what it says.
      problem_there: Why, in its words.
      may_return: Whether another process may take its place: see `Transport.expect_return`.
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
        """Whether the handshake with it has ever succeeded."""
        return self.incarnation is not None

    def was_silent_for(self, seconds: float) -> bool:
        """Whether nothing was heard of it for that long and 8 round trips, though at most twice as long."""
        return self.silent_seconds > self._allow(seconds)

    def was_refused_for(self, seconds: float) -> bool:
        """Whether nobody has listened there for that long and 8 round trips, though at most twice as long."""
        return self.refused_seconds > self._allow(seconds)

    def was_unreached_for(self, seconds: float) -> bool:
        """Whether this rank has not reached it for that long and 8 round trips, though at most twice as long."""
        return self.unreached_seconds > self._allow(seconds)

    def has_not_reached_this_for(self, seconds: float) -> bool:
        """Whether it has not reached this rank for that long and 8 round trips, though at most twice as long."""
        return self.unreached_by_seconds > self._allow(seconds)

    def _allow(self, seconds: float) -> float:
        return seconds + min(seconds, _SPARE_ROUND_TRIPS * self.round_trip_seconds)


@dataclasses.dataclass(slots=True)
class Expected:
    """A message that a rank expects: all but its contents is known.

    Attributes:
      sender: Rank that sends it.
      header: Its header.
      num_bytes: Length of its payload.
    """

    sender: int
    header: bytes
    num_bytes: int


@dataclasses.dataclass(slots=True)
class ToSend:
    """A message that is to be sent.

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
    (sender, lane); a handler that blocks stops only that sender's lane (back-pressure), never the server.

    Attributes:
      recorder: Told of what happens on this rank; None: nobody is.
    """

    recorder: Recorder | None = None

    @property
    @abc.abstractmethod
    def rank(self) -> int:
        """The rank of this process."""

    @property
    @abc.abstractmethod
    def incarnation(self) -> str:
        """A name of this transport that no other one of its rank has, of this process or another."""

    @abc.abstractmethod
    def start(self) -> None:
        """Begins to serve on this rank's own address.

        Raises:
          HopError: If the address cannot be bound; the message names it.
        """

    @abc.abstractmethod
    def connect(self, peer: int) -> None:
        """Begins to connect to `peer`, keeps at it in the background, and watches over it. Does not block."""

    @abc.abstractmethod
    def register(self, queue: str, handler: Handler) -> None:
        """Delivers messages for `queue` to `handler`, those first that came before there was one."""

    @abc.abstractmethod
    def unregister(self, queue: str) -> None:
        """Forgets the handler of `queue` for good: what is held for it, and what still comes, is dropped."""

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
        """Queues one message for `peer`; connects first where there is no link yet.

        Messages to one peer on one lane arrive in the order in which they were sent, each at most once, also when
        the connection breaks and is restored in between. With `lane=None` they may arrive in any order: where the way
        is so long that one connection does not fill it, they are spread over several. The payload is the concatenation
        of the arrays' bytes; it is read after `send` has returned, so the arrays must never be written to again.

        A message that `supersedes` takes the place, on this lane, of one to the same queue whose sending has not begun.
        So one waits at most, beside what is on its way, however slow the peer is.

        Returns:
          Whether an older message has given way to this one, and is never sent.

        Blocks: while too much is queued for this lane (until the peer takes it, the peer is lost, `close`, or `check`,
        which is called now and then meanwhile, raises). A message that `supersedes` never blocks.

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
        """Sends messages, and receives expected ones meanwhile, all on the calling thread, if they come soon.

        Args:
          queue: The queue of all. Its handler does not get the messages that are received here.
          to_send: The messages that are sent, each to another peer.
          expected: Those that are received, each from another sender and the next one from it on the lane.
          lane: The lane; None: as for `send`.
          send: Called with a message that cannot be written at once, to send it.

        Returns:
          The payload of each expected message, as a handler gets it. None if the handler gets the message. Default: all
          None.

        Blocks: until all messages have come, nothing has come for 0.05 s, or 0.25 s are over; and as `send` does.
        """
        del queue, lane
        for message in to_send:
            send(message)
        return [None] * len(expected)

    def waiting_for(self, senders: Collection[int], lane: int | None) -> contextlib.AbstractContextManager[None]:
        """A context in which a thread waits for handlers to get messages. Next time, `swap` may take them."""
        del senders, lane
        return contextlib.nullcontext()

    @abc.abstractmethod
    def flush(self, peer: int, timeout_seconds: float) -> bool:
        """Waits until all that was sent to `peer` has been received there; False if that took too long."""

    @abc.abstractmethod
    def status(self, peer: int) -> PeerStatus:
        """What is known of `peer` now."""

    def expect_return(self, peer: int) -> None:
        """The process of `peer` may die and be started again: until it was silent for long, it is not lost.

        That nobody listens where it did, is no reason then to give it up. Default: it has no effect.
        """
        del peer

    @abc.abstractmethod
    def counters(self) -> Mapping[str, int]:
        """Totals: `bytes_sent`, `bytes_received`, `messages_sent`, `messages_received`, `connections_refused`."""

    def bytes_by_lane(self) -> Mapping[int, int]:
        """Of `bytes_sent`, those on each lane that was used."""
        return {}

    def serve_reports(self, report: Callable[[], Mapping[str, object]]) -> None:
        """Lets whoever knows the cluster token ask for `report()`; where ranks are processes."""
        del report

    @abc.abstractmethod
    def close(self) -> None:
        """Stops serving, closes all links, unblocks every call and joins the threads. Idempotent."""

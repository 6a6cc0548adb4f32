"""`GrpcLink`: a link that is a gRPC stream."""

from __future__ import annotations

import collections
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import grpc

from hop_tf.errors import ProtocolError
from hop_tf.records import Recorder
from hop_tf.records.clocks import offset_of
from hop_tf.transport.checksum import Checksums, NoChecksums
from hop_tf.transport.connection import IDLE_SECONDS
from hop_tf.transport.framing import Frame, FrameKind, decode, decode_checked, encode, encode_message
from hop_tf.transport.link import OVERDUE, Link
from hop_tf.transport.outbox import Outbox
from hop_tf.transport.peer import Peer
from hop_tf.transport.proof import Session

METHOD = "/hop_tf.Transport/Stream"
# An answer to a heartbeat begins with `time.time()` of the peer.
CLOCK = struct.Struct("<d")
_PROBE_SECONDS, _PROBE_ROUND_TRIPS = 1.0, 3
# The first heartbeats follow each other quickly, to measure the round trip early. There are several, because one of
# them may be delayed on this machine.
_FIRST_PAUSES_SECONDS = (0.0, 0.02, 0.05)
# A heartbeat or its answer counts as lost after this time. The time is long because a process may be busy, or stopped
# for a while.
_MAX_PONG_SECONDS = 2 * IDLE_SECONDS
# Up to this many heartbeats in a row are skipped if the peer was heard anyway. Skipping more would miss changes of the
# round trip.
_MAX_SPARED = 4


class GrpcLink(Link):
    """A link over gRPC, for messages or for heartbeats.

    The link has a channel, that is a connection, of its own, so that bulk data on one lane does not delay other lanes.

    Args:
      open_channel: Opens a channel to a peer.
      heartbeat_seconds: Interval of heartbeats. Some are skipped if the peer was heard within the last half of the
        interval. None on lanes that carry messages.
      recorder: Records the offset of the peer's clock, or None.
      **arguments: See `Link`.
    """

    def __init__(
        self,
        *,
        open_channel: Callable[[Peer], grpc.Channel],
        heartbeat_seconds: float | None = None,
        recorder: Recorder | None = None,
        **arguments,
    ):
        super().__init__(**arguments)
        self._recorder = recorder
        self._open_channel = open_channel
        self._heartbeat_seconds = heartbeat_seconds
        self._was_unavailable = False

    def _wait_needed(self) -> bool:
        return self._heartbeat_seconds is not None or super()._wait_needed()

    def _try_stream(self) -> str:
        if self._was_unavailable and self._nobody_listens():  # Much cheaper than an attempt by gRPC.
            if self._peer.incarnation is not None:
                self._peer.refused()
            return "connection refused"
        self._was_unavailable = False
        connection = _Connection(self._outbox)
        try:
            with self._open_channel(self._peer) as channel:
                call = channel.stream_stream(METHOD)(self._requests(connection))
                self._stream_begins(call.cancel)
                self._read(call, connection)
        except grpc.RpcError as error:
            # The error is the call itself, and frames of its traceback refer to it. No call may be left to the garbage
            # collector: at the interpreter's exit, collecting one might wait for the lock of a thread that is gone.
            error.__traceback__ = None
            self._was_unavailable = error.code() is grpc.StatusCode.UNAVAILABLE
            if connection.is_overdue:
                return OVERDUE
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                return "it is busy with connections that do not greet"  # See `StreamHandler.service`.
            return str(error.details())
        finally:
            call = None  # Tracebacks of other errors are kept, and would keep the call.
            connection.end()
        return "it closed the connection"

    def _nobody_listens(self) -> bool:
        """True if a connection is refused, which gRPC does not distinguish from other problems."""
        host, _, port = self._peer.address.rpartition(":")
        timeout_seconds = _PROBE_SECONDS + _PROBE_ROUND_TRIPS * self._peer.round_trip_seconds
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout_seconds).close()
        except ConnectionRefusedError:
            return True
        except OSError:
            pass  # The peer is unreachable or slow: it may be alive.
        return False

    # Sending. gRPC calls the generator from a thread of its own.

    def _requests(self, connection: _Connection) -> Iterator[bytes]:
        hello = connection.wait_hello()
        if hello is None:
            return
        yield encode(FrameKind.HELLO, body=hello)
        if not connection.wait_accepted():
            return
        if self._heartbeat_seconds is None:
            yield from self._messages(connection)
        else:
            yield from self._heartbeats(connection, self._heartbeat_seconds)

    def _messages(self, connection: _Connection) -> Iterator[bytes]:
        while self._outbox.is_current(connection.epoch):
            message = self._outbox.take(connection.epoch, IDLE_SECONDS)
            if message is not None:
                yield from encode_message(message, connection.sent)
                del message  # Frees it before the wait for the next message.
            elif self._patience.is_over(self._outbox.num_unacknowledged):
                self._doubt(connection)

    def _heartbeats(self, connection: _Connection, interval_seconds: float) -> Iterator[bytes]:
        for pause in _FIRST_PAUSES_SECONDS:
            if connection.wait_ended(pause):
                return
            yield connection.ping()
        # A heartbeat costs two milliseconds of processor time on both sides together, and a rank may have 100 peers.
        num_spared = 0
        while not connection.wait_ended(interval_seconds):
            if num_spared < _MAX_SPARED and self._peer.was_heard_within(interval_seconds / 2):
                num_spared += 1
                continue
            num_spared = 0
            if connection.pinged_at and time.monotonic() - connection.pinged_at[0] > _MAX_PONG_SECONDS:
                self._doubt(connection)
            yield connection.ping()

    def _doubt(self, connection: _Connection) -> None:
        """Ends the stream, because messages or their answers do not arrive."""
        connection.is_overdue = True
        connection.end()
        with self._lock:
            self._end_running_stream()

    # Receiving.

    def _read(self, call: Iterator[bytes], connection: _Connection) -> None:
        try:
            for data in call:
                self._take_answer(data, connection)
        finally:
            call.cancel()
            call = None  # As in `_try_stream`.
            if connection.accepted:
                self._peer.link_down()

    def _take_answer(self, data: bytes, connection: _Connection) -> None:
        if not connection.accepted:
            self._take_greeting(decode(data), connection)
            return
        frame = decode_checked(data, connection.received)
        if frame.kind == FrameKind.ACKNOWLEDGE:
            self._outbox.acknowledge(connection.epoch, frame.sequence)
        elif frame.kind == FrameKind.PONG and connection.pinged_at:
            self._take_pong(frame.header, time.monotonic() - connection.pinged_at.popleft())
        else:
            raise ProtocolError(f"{self._peer} answered with an unexpected {frame.kind.name}.")
        self._peer.heard()

    def _take_pong(self, answer: bytes, round_trip_seconds: float) -> None:
        if len(answer) < CLOCK.size:
            raise ProtocolError(f"{self._peer} answered to a heartbeat with {answer!r}.")
        self._peer.record_round_trip(round_trip_seconds)
        self._peer.record_complaint(answer[CLOCK.size :].decode(errors="replace"))
        if self._recorder is not None:
            (clock,) = CLOCK.unpack_from(answer)
            offset = offset_of(clock, time.time(), round_trip_seconds)
            self._recorder.note_clock(self._peer.rank, offset, round_trip_seconds)

    def _take_greeting(self, frame: Frame, connection: _Connection) -> None:
        if frame.kind == FrameKind.CHALLENGE and connection.session is None:
            connection.greet(*self._hello(frame.header))
        elif frame.kind == FrameKind.HELLO_REPLY and connection.session is not None:
            connection.accept(self._accepted(frame.header, connection.session)[0])
        else:
            raise ProtocolError(f"{self._peer} greeted with an unexpected {frame.kind.name}.")


class _Connection:
    """The state that a stream's reader and its writer share.

    Attributes:
      session: The greeting; None before the peer's challenge has come.
      accepted: True if the peer has accepted the greeting.
      sent: Checksums of frames that this side sends, once it is accepted.
      received: Checksums of frames that the peer sends.
      epoch: Number of the connection, see `Outbox`.
      is_overdue: True if the stream was ended because an answer is overdue.
      pinged_at: The times of the heartbeats that have no answer yet.
    """

    def __init__(self, outbox: Outbox):
        self._outbox = outbox
        self._changed = threading.Condition()
        self._ended = False
        self._hello: bytes | None = None
        self.session: Session | None = None
        self.accepted = self.is_overdue = False
        self.sent: Checksums | NoChecksums = NoChecksums()
        self.received: Checksums | NoChecksums = NoChecksums()
        self.epoch = -1
        self.pinged_at: collections.deque[float] = collections.deque()

    def greet(self, hello: bytes, session: Session) -> None:
        """Called with the answer to the peer's challenge. The writer then sends this hello."""
        with self._changed:
            self.session = session
            self._hello = hello
            self._changed.notify_all()

    def accept(self, epoch: int) -> None:
        """Called when the peer has accepted the greeting."""
        self.sent, self.received = self.session.checksums("client"), self.session.checksums("server")
        with self._changed:
            self.accepted = True
            self.epoch = epoch
            self._changed.notify_all()

    def ping(self) -> bytes:
        """A heartbeat, sent now."""
        self.pinged_at.append(time.monotonic())
        frame = encode(FrameKind.PING)
        return frame + self.sent.of(frame)

    def end(self) -> None:
        """Called when the stream is over. Ends the writer."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self._outbox.interrupt()

    def wait_hello(self) -> bytes | None:
        """Waits for the hello. Returns None if the stream ends first."""
        with self._changed:
            self._changed.wait_for(lambda: self._hello is not None or self._ended)
            return None if self._ended else self._hello

    def wait_accepted(self) -> bool:
        """Waits until the greeting is accepted. Returns False if the stream ends first."""
        with self._changed:
            self._changed.wait_for(lambda: self.accepted or self._ended)
            return not self._ended

    def wait_ended(self, timeout_seconds: float) -> bool:
        """Waits until the stream is over. Returns False if that takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: self._ended, timeout_seconds)

"""`Connection`: frames over a plain socket."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import math
import select
import socket
import struct
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from absl import logging

from hop_tf.errors import ProtocolError
from hop_tf.transport import control_pb2
from hop_tf.transport.checksum import Checksum, Checksums, NoChecksums, check_equal
from hop_tf.transport.framing import HEAD_BYTES, Frame, Head, Outgoing, decode_head, encode_start
from hop_tf.transport.shared_memory import MIN_PAYLOAD_BYTES, PLACE_BYTES, PeerMemory, SharedMemory

# Packets come in bundles of 64 KiB at most. Letting the kernel gather many costs less than waking Python for each. On a
# slow connection the kernel gathers fewer: each read is also a sign of life.
_READ_BYTES, _SLOW_READ_BYTES = 1 << 21, 1 << 17
_SLOW_READ_SECONDS = 0.25
# Small enough that a piece of a large array, read for its checksum, is still in the processor's cache when it is sent.
_WRITE_BYTES = 1 << 19
# Up to `_SMALL_MESSAGE_BYTES`, one copy costs less than a system call with many pieces. Such a call takes at most
# `_MAX_PIECES` pieces.
_SMALL_MESSAGE_BYTES = 1 << 16
_MAX_PIECES = 1000
# If no further byte of a frame comes within this time, the connection is opened again. A thread that waits for a frame
# checks at this interval if waiting is in vain.
IDLE_SECONDS = 10.0
# If several connections begin together, BBR sends on each as if it were the only one, and a switch drops the excess. An
# all-reduce with three others at 100 Mbit/s then takes three times as long as with CUBIC. If the round trip is longer
# than `_NEAR_SECONDS`, packets are lost at random, and BBR is better.
_NEAR_SECONDS = 0.01
_MIN_RTT = struct.Struct("@148xI")  # The microseconds of `tcpi_min_rtt` in Linux's `struct tcp_info`.
# The option's number in Linux, which Python lacks. `_NO_LIMIT` is Linux's value for an unlimited rate.
SO_MAX_PACING_RATE = 47
_INT = struct.Struct("@i")
_NO_LIMIT = struct.pack("@L", 2 ** (8 * struct.calcsize("@L")) - 1)


def _do_nothing() -> None:
    pass


def behind(pieces: Sequence[memoryview], num_bytes: int) -> Sequence[memoryview]:
    """Returns the pieces without their first `num_bytes` bytes."""
    for index, piece in enumerate(pieces):
        if num_bytes < piece.nbytes:
            return [piece[num_bytes:], *pieces[index + 1 :]]
        num_bytes -= piece.nbytes
    return ()


def _stalled() -> TimeoutError:
    return TimeoutError(f"the rest of a frame did not come for {IDLE_SECONDS:.0f} s")


class Connection:
    """A socket for frames. One thread may read while another thread writes.

    Args:
      connected: The socket. `close` closes it.

    Attributes:
      sent: The checksums of written frames.
      received: The checksums of read frames.
      way_out: The `Way` that `swapping.py` keeps for writing, or None if it has not used the connection yet.
      way_in: The `Way` for reading, or None.
      unread_bytes: Bytes that `unread` has put back.
      peer_memory: Memory with the large payloads of incoming messages. None: payloads are in their frames.
    """

    def __init__(self, connected: socket.socket):
        self._socket = connected
        self._memory: SharedMemory | None = None
        self.peer_memory: PeerMemory | None = None
        self.way_out: Any = None
        self.way_in: Any = None
        self._bytes_per_second = math.inf
        self._num_written = 0
        self._read_bytes = _READ_BYTES
        self.unread_bytes = memoryview(b"")
        self.sent: Checksums | NoChecksums = NoChecksums()
        self.received: Checksums | NoChecksums = NoChecksums()
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # This ends an idle connection within 25 s after a firewall has forgotten it or the other end has lost its
        # power. While data is in flight, TCP's own limit of retransmissions applies, about 15 minutes. TCP_USER_TIMEOUT
        # is not set, because it would also end connections to peers that are only slow.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)

    def fit_congestion_control(self) -> None:
        """Replaces BBR, of any version, by CUBIC or Reno if the peer is near, for all data written from now on.

        Does nothing if the system does not support that, as in some sandboxes.
        """
        try:
            name = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
            info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _MIN_RTT.size)
            if name.startswith(b"bbr") and _MIN_RTT.unpack(info)[0] < 1e6 * _NEAR_SECONDS:
                self._use_cubic_or_reno()
        except (OSError, struct.error) as error:
            logging.log_first_n(logging.INFO, "Connections keep the system's congestion control: %s.", 1, error)

    def _use_cubic_or_reno(self) -> None:
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
        except OSError:  # If BBR is the default, processes without privileges may choose only BBR or Reno.
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")

    def set_timeout(self, timeout_seconds: float | None) -> None:
        """Limits the time for which reading and writing may block."""
        self._socket.settimeout(timeout_seconds)

    def end_greeting(self, sent: Checksums | NoChecksums, received: Checksums | NoChecksums) -> None:
        """Adds a checksum to every frame from now on. Then only reads in the middle of a frame have a time limit."""
        self.sent, self.received = sent, received
        self._socket.settimeout(None)
        # The kernel's own limit, because with Python's a call does not fill the whole buffer.
        seconds, rest = divmod(IDLE_SECONDS, 1.0)
        limit = struct.pack("@ll", int(seconds), int(rest * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)

    @contextlib.contextmanager
    def offering_memory(self) -> Iterator[control_pb2.SharedMemory | None]:
        """A context in which the peer can open memory for payloads. Yields the offer, or None if there is no memory."""
        self._memory = SharedMemory.make(self._socket)
        try:
            yield None if self._memory is None else self._memory.offer(self._socket)
        finally:
            if self._memory is not None:
                self._memory.close_file()

    def end_offer(self, *, is_taken: bool) -> None:
        """Forgets the offered memory unless the peer has opened it."""
        if not is_taken:
            self._memory = None

    def open_memory(self, offer: control_pb2.SharedMemory | None) -> bool:
        """Opens the memory that the peer offers. Returns False if there is none, or if it cannot be opened here."""
        if offer is not None:
            self.peer_memory = PeerMemory.open(offer, self._socket)
        return self.peer_memory is not None

    def num_received_there(self) -> int:
        """The number of bytes that the other machine has received. Its process may not have read all of them yet."""
        try:
            (num_in_flight,) = _INT.unpack(fcntl.ioctl(self._socket, termios.TIOCOUTQ, bytes(_INT.size)))
        except OSError:  # As in some sandboxes.
            num_in_flight = 0
        return self._num_written - num_in_flight

    def limit_rate(self, bytes_per_second: float) -> None:
        """Limits the rate of written data from now on, packet headers included; `math.inf` ends the limit.

        Does nothing if the system does not support that, as in some sandboxes.
        """
        if bytes_per_second == self._bytes_per_second:
            return
        self._bytes_per_second = bytes_per_second
        limit = _NO_LIMIT if bytes_per_second == math.inf else struct.pack("@L", math.ceil(bytes_per_second))
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, limit)
        except OSError as error:
            logging.log_first_n(logging.INFO, "Connections are not paced: %s.", 1, error)

    def write(self, frame: bytes) -> None:
        """Writes a frame that carries no message."""
        self._socket.sendall(frame + self.sent.of(frame))

    def write_message(self, message: Outgoing) -> None:
        """Writes a message. A large one is written straight from its arrays."""
        frame = self._frame_in_memory(message)
        if frame or message.num_bytes <= _WRITE_BYTES:
            self.write_rest(frame or self._pieces_of(message))
            return
        start, checksum = self._begin_message(message)
        before = memoryview(start)
        for array in message.payload:
            for begin in range(0, array.size, _WRITE_BYTES):
                self._socket.sendall(before, socket.MSG_MORE)
                before = memoryview(array[begin : begin + _WRITE_BYTES])
                checksum.add(array[begin : begin + _WRITE_BYTES])
        # One call for both: sending the checksum alone would wake the peer once more.
        self.write_rest([before, memoryview(checksum.value())])

    def try_write_message(self, message: Outgoing) -> Sequence[memoryview]:
        """Writes as much of a message as the socket takes without blocking. Returns the rest of its frame."""
        pieces = self._frame_in_memory(message) or self._pieces_of(message)
        try:
            num_sent = self._socket.sendmsg(pieces, (), socket.MSG_DONTWAIT)
        except BlockingIOError:
            num_sent = 0
        return behind(pieces, num_sent)

    def write_rest(self, pieces: Sequence[memoryview]) -> None:
        """Writes the rest of a frame."""
        while pieces:
            pieces = behind(pieces, self._socket.sendmsg(pieces[:_MAX_PIECES]))

    def _frame_in_memory(self, message: Outgoing) -> Sequence[memoryview]:
        """The frame of a message whose payload goes to shared memory; empty if the payload must travel in the frame."""
        place = self._place_of(message)
        if place is None:
            return ()
        frame = encode_start(message, in_shared_memory=True) + place
        self._num_written += len(frame)
        return (memoryview(frame + self.sent.of(frame)),)

    def _place_of(self, message: Outgoing) -> bytes | None:
        """Puts a message's payload into shared memory. Returns its place, or None if it must travel in the frame."""
        num_bytes = message.num_bytes - len(message.header)
        if self._memory is None or num_bytes < MIN_PAYLOAD_BYTES or self._bytes_per_second != math.inf:
            return None
        return self._memory.put(message.payload, num_bytes)

    def _pieces_of(self, message: Outgoing) -> Sequence[memoryview]:
        """The frame of a message, with its payload."""
        start, checksum = self._begin_message(message)
        for array in message.payload:
            checksum.add(array)
        payload = message.payload
        if (len(payload) > 1 and message.num_bytes <= _SMALL_MESSAGE_BYTES) or len(payload) > _MAX_PIECES:
            payload = [b"".join(payload)]
        return [memoryview(piece) for piece in (start, *payload, checksum.value()) if len(piece)]

    def _begin_message(self, message: Outgoing) -> tuple[bytes, Checksum | NoChecksums]:
        """The start of a message's frame, and the running checksum."""
        start = encode_start(message)
        self._num_written += len(start) + message.num_bytes
        return start, self.sent.begin(start)

    def read_frame(self, while_idle: Callable[[], object] = _do_nothing) -> Frame | None:
        """Reads a frame without a payload. Returns None at the end of the stream.

        Args:
          while_idle: Called every `IDLE_SECONDS` while no frame comes, once the greeting is over.

        Raises:
          ProtocolError: If the data is no frame, or was changed in flight.
          OSError: If the connection is broken.
        """
        head = self._read_head(while_idle)
        if head is None:
            return None
        parsed = decode_head(head)
        if parsed.payload_bytes:
            raise ProtocolError(f"a frame of kind {parsed.kind.name} has a payload.")
        return self._read_text(head, parsed)

    def read_message(
        self, take_buffer: Callable[[int], np.ndarray], heard: Callable[[], object]
    ) -> tuple[Frame, np.ndarray] | None:
        """Reads a frame and its payload. Returns None at the end of the stream.

        Args:
          take_buffer: Returns memory of the given number of bytes for the payload.
          heard: Called each time that some bytes have come.

        Raises:
          ProtocolError: If the data is no frame, or was changed in flight.
          OSError: If the connection is broken.
        """
        head = self._read_head()
        if head is None:
            return None
        heard()
        parsed = decode_head(head)
        if not parsed.payload_bytes:
            return self._read_text(head, parsed), take_buffer(0)
        text = bytearray(parsed.queue_bytes + parsed.header_bytes)
        buffer = take_buffer(parsed.payload_bytes)
        self._fill(head, text, buffer, heard)
        if parsed.in_shared_memory:
            buffer = self._payload_at(buffer)
        return parsed.frame(bytes(text)), buffer

    def _payload_at(self, place: np.ndarray) -> np.ndarray:
        if self.peer_memory is None:
            raise ProtocolError("a frame refers to shared memory, but the connection has none.")
        return self.peer_memory.payload(place)

    def _read_head(self, while_idle: Callable[[], object] = _do_nothing) -> bytes | None:
        while True:
            try:
                first = self._receive(HEAD_BYTES)
            except BlockingIOError:
                while_idle()
            else:
                return first + self._read(HEAD_BYTES - len(first)) if first else None

    def _read_text(self, head: bytes, parsed: Head) -> Frame:
        """The frame that begins with `head` and has no payload."""
        num_bytes = parsed.queue_bytes + parsed.header_bytes
        data = self._read(num_bytes + self.received.num_bytes)
        check_equal(data[num_bytes:], self.received.of(head + data[:num_bytes]))
        return parsed.frame(data[:num_bytes])

    def _fill(self, head: bytes, text: bytearray, buffer: np.ndarray, heard: Callable[[], object]) -> None:
        """Reads the rest of a frame after `head`: text, payload, and checksum, in as few calls as possible."""
        tail, filled, checksum = memoryview(bytearray(self.received.num_bytes)), 0, None
        before = [memoryview(text)]
        while filled < buffer.size:
            piece = buffer[filled : filled + self._read_bytes]
            behind = [tail] if filled + piece.size == buffer.size else []
            count = self._receive_into([*before, piece, *behind])
            num_before = before[0].nbytes if before else 0
            if count < num_before:
                before = [before[0][count:]]
                continue
            if checksum is None:
                checksum, before = self.received.begin(head + text), []
            count -= num_before
            checksum.add(piece[:count])
            filled += min(count, piece.size)
            tail = tail[max(0, count - piece.size) :]
            heard()
        received = tail.obj
        while tail.nbytes:
            tail = tail[self._receive_into([tail]) :]
        check_equal(bytes(received), checksum.value())

    def is_idle_for(self, seconds: float) -> bool:
        """Waits up to `seconds` for data to read. Returns True if none comes."""
        return not self.unread_bytes and not self._readable.poll(1000 * seconds)

    @functools.cached_property
    def _readable(self) -> select.poll:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return poll

    # For threads that write or read frames themselves: see `swapping.py`.

    def begin_frame(self, message: Outgoing, bytes_per_second: float) -> bytes | None:
        """Prepares a message whose frame `swapping.py` writes: sets the rate, and shares the payload.

        Args:
          message: The message.
          bytes_per_second: See `limit_rate`.

        Returns:
          The place of the payload in shared memory, or None if the payload travels in the frame.
        """
        if bytes_per_second != self._bytes_per_second:
            self.limit_rate(bytes_per_second)
        place = None if self._memory is None else self._place_of(message)
        num_bytes = message.num_bytes if place is None else len(message.header) + PLACE_BYTES
        self._num_written += HEAD_BYTES + len(message.queue) + num_bytes
        return place

    @property
    def file_number(self) -> int:
        """The file descriptor of the socket."""
        return self._socket.fileno()

    def unread(self, data: bytes) -> None:
        """Puts back bytes that another thread has read from the socket. The next read returns them."""
        self.unread_bytes = memoryview(data)

    def _receive(self, max_bytes: int) -> bytes:
        if not self.unread_bytes:
            return self._socket.recv(max_bytes)
        data, self.unread_bytes = bytes(self.unread_bytes[:max_bytes]), self.unread_bytes[max_bytes:]
        return data

    def _receive_again_into(self, pieces: Sequence[memoryview | np.ndarray]) -> int:
        """Does the same as `_receive_into`, from the bytes that were put back."""
        count = 0
        for piece in map(memoryview, pieces):
            data = self._receive(piece.nbytes) if self.unread_bytes else b""
            piece[: len(data)] = data
            count += len(data)
        return count

    def _receive_into(self, pieces: Sequence[memoryview | np.ndarray]) -> int:
        """Reads bytes of a frame that has begun, at most as many as fit into the pieces. Returns their number."""
        if self.unread_bytes:
            return self._receive_again_into(pieces)
        begin = time.monotonic()
        try:
            count = self._socket.recvmsg_into(pieces, 0, socket.MSG_WAITALL)[0]
        except BlockingIOError:
            raise _stalled() from None
        if not count:
            raise ConnectionResetError("the connection was closed within a message")
        if time.monotonic() - begin > _SLOW_READ_SECONDS:
            self._read_bytes = _SLOW_READ_BYTES
        elif count >= _SLOW_READ_BYTES:
            self._read_bytes = _READ_BYTES
        return count

    def end(self) -> None:
        """Ends reading and writing, and wakes threads that are blocked in them."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the socket and drops the memory. No thread may use the connection any longer."""
        self._socket.close()
        self._memory = self.peer_memory = None

    def _read(self, num_bytes: int) -> bytes:
        """Reads exactly `num_bytes` bytes of a frame that has begun."""
        data = b""
        while len(data) < num_bytes:
            try:
                piece = self._receive(num_bytes - len(data))
            except BlockingIOError:
                raise _stalled() from None
            if not piece:
                raise ConnectionResetError("the connection was closed within a frame")
            data += piece
        return data

"""`Connection`: frames over a plain socket."""

from __future__ import annotations

import contextlib
import math
import socket
import struct
from collections.abc import Iterator

import numpy as np
from absl import logging

from hop_tf.errors import ProtocolError
from hop_tf.transport.framing import HEAD_BYTES, MAX_HEADER_BYTES, Frame, Outgoing, decode_head, encode_start

# Packets come in bundles of 64 KiB at most: the kernel gathers several, which costs less than to wake Python for each.
_READ_BYTES = 1 << 18
# Up to here one copy costs less than a second system call.
_SMALL_MESSAGE_BYTES = 1 << 16
# Linux's number, which Python does not tell, and its word for no limit.
SO_MAX_PACING_RATE = 47
_NO_LIMIT = struct.pack("@L", 2 ** (8 * struct.calcsize("@L")) - 1)


class Connection:
    """A socket that frames are read from and written to. One thread may read while another one writes.

    Args:
      connected: The socket; it is closed with this.
    """

    def __init__(self, connected: socket.socket):
        self._socket = connected
        self._bytes_per_second = math.inf
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # An idle connection that a firewall has forgotten, or whose other end lost its power, is found within 25 s.
        # While data is on its way TCP's own limit of retransmissions counts, some 15 minutes: TCP_USER_TIMEOUT would
        # also end connections to peers that only take their time.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)

    def set_timeout(self, timeout_seconds: float | None) -> None:
        """Limits how long reading and writing may block."""
        self._socket.settimeout(timeout_seconds)

    def limit_rate(self, bytes_per_second: float) -> None:
        """What is written leaves no faster than that from now on, headers of packets included; `math.inf`: no limit.

        Nothing where the system cannot do it, as in some sandboxes.
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
        self._socket.sendall(frame)

    def write_message(self, message: Outgoing) -> None:
        """Writes a message, straight from its arrays where it is large."""
        start = encode_start(message)
        if message.num_bytes <= _SMALL_MESSAGE_BYTES:
            self._socket.sendall(b"".join((start, *message.payload)))
            return
        self._socket.sendall(start, socket.MSG_MORE)
        for array in message.payload:
            self._socket.sendall(array)

    def read_frame(self, max_text_bytes: int = 2 * MAX_HEADER_BYTES) -> Frame | None:
        """Reads a frame up to its payload; None at the end of the stream.

        Raises:
          ProtocolError: If it is none.
          OSError: If the connection is broken.
        """
        data = self._read(HEAD_BYTES)
        if not data:
            return None
        head = decode_head(data)
        num_bytes = head.queue_bytes + head.header_bytes
        if num_bytes > max_text_bytes:
            raise ProtocolError(f"a frame holds {num_bytes} bytes before its payload.")
        return head.frame(self._read(num_bytes))

    def read_payload(self, buffer: np.ndarray) -> Iterator[int]:
        """Fills a buffer; yields the number of bytes each time that some have come.

        Raises:
          OSError: If the connection is broken.
        """
        view = memoryview(buffer)
        while view.nbytes:
            count = self._socket.recv_into(view[:_READ_BYTES], 0, socket.MSG_WAITALL)
            if not count:
                raise ConnectionResetError("the connection was closed within a message")
            view = view[count:]
            yield count

    def end(self) -> None:
        """Ends reading and writing, also where a thread is blocked in it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Gives the socket back. No thread may use it any more."""
        self._socket.close()

    def _read(self, num_bytes: int) -> bytes:
        data = bytearray()
        while len(data) < num_bytes:
            piece = self._socket.recv(num_bytes - len(data))
            if not piece:
                if data:
                    raise ConnectionResetError("the connection was closed within a frame")
                return b""
            data += piece
        return bytes(data)

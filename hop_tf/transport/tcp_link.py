"""`TcpLink`: a link over a plain socket where the peer has announced one, else over gRPC."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import numpy as np
from absl import logging

from hop_tf.errors import HopError, ProtocolError
from hop_tf.transport.framing import (
    HEAD_BYTES,
    MAX_HEADER_BYTES,
    Frame,
    Kind,
    Outgoing,
    decode_head,
    encode,
    encode_start,
)
from hop_tf.transport.grpc_link import GrpcLink

# Packets come in bundles of 64 KiB at most: the kernel gathers several, which costs less than to wake Python for each.
_READ_BYTES = 1 << 18
_CONNECT_TIMEOUT_SECONDS = 5.0
# A peer that has accepted the connection answers at once, unless it is frozen.
_GREETING_TIMEOUT_SECONDS = 10.0
# Lanes from this one on have interfaces of their own: see `CommunicationOptions.interfaces`.
FIRST_INTERFACE_LANE = 1
# Up to here one copy costs less than a second system call.
_SMALL_MESSAGE_BYTES = 1 << 16


class Connection:
    """A socket that frames are read from and written to. One thread may read while another one writes.

    Args:
      connected: The socket; it is closed with this.
    """

    def __init__(self, connected: socket.socket):
        self._socket = connected
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


class TcpLink(GrpcLink):
    """A link for messages. It waits for the peer's heartbeat link, which tells the port of its sockets.

    Where the port cannot be reached the link takes turns between gRPC and another attempt.

    Args:
      interface: Address of this machine that connections come from; None: the system chooses one. Where the peer has
        told of interfaces of its own, they go to the one of this lane.
      **arguments: See `GrpcLink`.
    """

    def __init__(self, *, interface: str | None = None, **arguments):
        super().__init__(**arguments)
        self._interface = interface
        # What kept the last attempt from making a socket, until gRPC was tried.
        self._problem: str | None = None

    def close(self) -> None:
        """See `Link`."""
        super().close()
        self._peer.wake()

    def _try_stream(self) -> str:
        port = self._peer.wait_socket_port(self._closed.is_set)
        if port is None:
            return "it has not answered"
        if port == 0 or self._problem is not None:
            try:
                return super()._try_stream()
            finally:
                self._problem = None
        host, port = self._target(port)
        try:
            connection = self._connect(host, port)
        except OSError as error:
            if isinstance(error, ConnectionRefusedError):
                self._peer.refused()
            self._problem = f"port {port}: {error}"
            return str(error)
        try:
            self._use(connection)
        except OSError as error:
            return str(error)
        finally:
            connection.close()
        return "it closed the connection"

    def _accepted(self, reply: bytes) -> int:
        # Now it is known that the peer is there, and only its sockets cannot be reached.
        if self._problem is not None and self._interface is None:
            logging.info("No socket to %s, %s. Lane %d goes over gRPC.", self._peer, self._problem, self._lane)
        elif self._problem is not None:  # All works on, though not as fast as it was meant to be.
            logging.warning(
                "No socket from interface %s to %s: %s. Lane %d goes over gRPC, on the address of the cluster.",
                self._interface,
                self._peer,
                self._problem,
                self._lane,
            )
        return super()._accepted(reply)

    def _target(self, port: int) -> tuple[str, int]:
        """Where the connection goes: to that port of the peer, or to its interface of this lane."""
        host = self._peer.address.rpartition(":")[0]
        number = self._lane - FIRST_INTERFACE_LANE
        if self._interface is not None and 0 <= number < len(self._peer.interface_addresses):
            host, _, port = self._peer.interface_addresses[number].rpartition(":")
        return host.strip("[]"), int(port)

    def _connect(self, host: str, port: int) -> Connection:
        source = None if self._interface is None else (self._interface, 0)
        return Connection(socket.create_connection((host, port), _CONNECT_TIMEOUT_SECONDS, source_address=source))

    def _use(self, connection: Connection) -> None:
        self._stream_begins(connection.end)
        connection.set_timeout(_GREETING_TIMEOUT_SECONDS)
        connection.write(encode(Kind.HELLO, body=self._hello()))
        reply = connection.read_frame()
        if reply is None or reply.kind != Kind.HELLO_REPLY:
            raise ProtocolError(f"{self._peer} did not answer a greeting.")
        epoch = self._accepted(reply.header)
        try:
            connection.set_timeout(None)
            self._exchange(connection, epoch)
        finally:
            self._peer.link_down()

    def _exchange(self, connection: Connection, epoch: int) -> None:
        problems: list[Exception] = []
        reader = threading.Thread(
            target=self._read_acknowledgements,
            args=(connection, epoch, problems),
            name=f"hop_tf acknowledgements of {self._peer}",
            daemon=True,
        )
        reader.start()
        try:
            while (message := self._outbox.take(epoch)) is not None:
                connection.write_message(message)
                del message  # Not kept alive while the next one is awaited.
        finally:
            connection.end()
            reader.join()
        if problems:
            raise problems[0]

    def _read_acknowledgements(self, connection: Connection, epoch: int, problems: list[Exception]) -> None:
        try:
            while (frame := connection.read_frame()) is not None:
                if frame.kind != Kind.ACKNOWLEDGE:
                    raise ProtocolError(f"{self._peer} answered with an unexpected {frame.kind.name}.")
                self._peer.heard()
                self._outbox.acknowledge(epoch, frame.sequence)
        except (OSError, HopError) as error:
            problems.append(error)
        finally:
            connection.end()
            self._outbox.interrupt()

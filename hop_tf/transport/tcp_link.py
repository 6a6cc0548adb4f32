"""`TcpLink`: a link over a plain socket if the peer has announced one, otherwise over gRPC."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Sequence

from absl import logging

from hop_tf.errors import HopError, ProtocolError
from hop_tf.transport import control_pb2
from hop_tf.transport.connection import Connection
from hop_tf.transport.framing import FrameKind, Outgoing, encode
from hop_tf.transport.grpc_link import GrpcLink
from hop_tf.transport.link import OVERDUE
from hop_tf.transport.proof import Session

_CONNECT_TIMEOUT_SECONDS = 5.0
# A peer that has accepted the connection answers at once, unless it is frozen.
_GREETING_TIMEOUT_SECONDS = 10.0
# Interval at which a link over gRPC tries to make a socket. A refused attempt costs next to nothing.
_RETRY_SECONDS = 10.0
# This lane and higher lanes have interfaces of their own: see `CommunicationOptions.interfaces`.
FIRST_INTERFACE_LANE = 1


class TcpLink(GrpcLink):
    """A link for messages. It waits for the peer's heartbeat link, which announces the port of the peer's sockets.

    If the port cannot be reached, the link alternates between gRPC and further attempts. While gRPC works, attempts
    continue in the background: after an outage the link returns to a socket.

    Args:
      interface: Address of this machine that connections come from; None lets the system choose one. If the peer has
        announced interfaces of its own, connections go to its interface for this lane.
      shares_memory: False to send payloads through the socket even to a process of this machine. Default True.
      **arguments: See `GrpcLink`.
    """

    def __init__(self, *, interface: str | None = None, shares_memory: bool = True, **arguments):
        super().__init__(**arguments)
        self._shares_memory = shares_memory
        self._interface = interface
        # The problem of the last attempt to make a socket, until gRPC was tried.
        self._problem: str | None = None
        # A socket that was made while the link went over gRPC.
        self._made: Connection | None = None

    def close(self) -> None:
        """See `Link`."""
        super().close()
        self._peer.wake()

    def _run(self) -> None:
        super()._run()
        if (made := self._take_made()) is not None:
            made.close()

    def _wait_needed(self) -> bool:
        return self._made is not None or super()._wait_needed()  # The peer soon closes a socket without a greeting.

    def _try_stream(self) -> str:
        port = self._peer.wait_socket_port(self._closed.is_set)
        if port is None:
            return "it has not answered"
        if port == 0:
            return super()._try_stream()
        host, port = self._target(port)
        if self._problem is not None:
            return self._try_grpc(host, port)
        try:
            connection = self._take_made() or self._connect(host, port)
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

    def _try_grpc(self, host: str, port: int) -> str:
        """Uses gRPC until that ends, or a socket can be made."""
        ended = threading.Event()
        maker = threading.Thread(
            target=self._make_socket, args=(host, port, ended), name=f"hop_tf socket to {self._peer}", daemon=True
        )
        maker.start()
        try:
            return super()._try_stream()
        finally:
            with self._lock:
                ended.set()
            maker.join()  # It may be connecting, for `_CONNECT_TIMEOUT_SECONDS` at most.
            self._problem = None

    def _make_socket(self, host: str, port: int, ended: threading.Event) -> None:
        while not ended.wait(_RETRY_SECONDS):
            try:
                connection = self._connect(host, port)
            except OSError:
                continue
            with self._lock:
                if ended.is_set():
                    connection.close()
                    return
                self._made = connection
                self._end_running_stream()
            return

    def _stream_begins(self, end_stream: Callable[[], object]) -> None:
        super()._stream_begins(end_stream)
        with self._lock:
            if self._made is not None:
                end_stream()

    def _take_made(self) -> Connection | None:
        with self._lock:
            made, self._made = self._made, None
            return made

    def _accepted(self, data: bytes, session: Session) -> tuple[int, control_pb2.HelloReply]:
        # The answer shows that the peer is there, and that only its sockets cannot be reached.
        if self._problem is not None and self._interface is None:
            logging.info("No socket to %s, %s. Lane %d goes over gRPC.", self._peer, self._problem, self._lane)
        elif self._problem is not None:  # Everything works, but slower than intended.
            logging.warning(
                "No socket from interface %s to %s: %s. Lane %d goes over gRPC, on the address of the cluster.",
                self._interface,
                self._peer,
                self._problem,
                self._lane,
            )
        return super()._accepted(data, session)

    def _target(self, port: int) -> tuple[str, int]:
        """The address to connect to: that port of the peer, or the peer's interface for this lane."""
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
        challenge = self._read_greeting(connection, FrameKind.CHALLENGE)
        with connection.offering_memory() if self._shares_memory else contextlib.nullcontext() as offer:
            hello, session = self._hello(challenge, offer)
            connection.write(encode(FrameKind.HELLO, body=hello))
            epoch, reply = self._accepted(self._read_greeting(connection, FrameKind.HELLO_REPLY), session)
        try:
            connection.end_offer(is_taken=reply.shares_memory)
            connection.fit_congestion_control()
            connection.end_greeting(sent=session.checksums("client"), received=session.checksums("server"))
            self._exchange(connection, epoch)
        finally:
            self._peer.link_down()

    def _read_greeting(self, connection: Connection, kind: FrameKind) -> bytes:
        frame = connection.read_frame()
        if frame is None or frame.kind != kind:
            raise ProtocolError(f"{self._peer} did not greet.")
        return frame.header

    def _exchange(self, connection: Connection, epoch: int) -> None:
        problems: list[Exception] = []
        reader = threading.Thread(
            target=self._read_acknowledgements,
            args=(connection, epoch, problems),
            name=f"hop_tf acknowledgements of {self._peer}",
            daemon=True,
        )
        reader.start()

        def write(message: Outgoing) -> Sequence[memoryview]:
            connection.limit_rate(self._outbox.max_bytes_per_second)
            return connection.try_write_message(message)

        self._outbox.write_at_once(epoch, write, connection)
        try:
            while (message := self._outbox.take(epoch)) is not None:
                if message.rest:
                    connection.write_rest(message.rest)
                else:
                    connection.limit_rate(self._outbox.max_bytes_per_second)
                    connection.write_message(message)
                del message  # Frees it before the wait for the next message.
        finally:
            connection.end()
            self._outbox.end_writing()
            reader.join()
        if problems:
            raise problems[0]

    def _read_acknowledgements(self, connection: Connection, epoch: int, problems: list[Exception]) -> None:
        def doubt() -> None:
            if self._patience.is_over(self._outbox.num_unacknowledged, connection.num_received_there()):
                raise TimeoutError(OVERDUE)

        try:
            while (frame := connection.read_frame(while_idle=doubt)) is not None:
                if frame.kind != FrameKind.ACKNOWLEDGE:
                    raise ProtocolError(f"{self._peer} answered with an unexpected {frame.kind.name}.")
                self._peer.heard()
                self._outbox.acknowledge(epoch, frame.sequence)
        except (OSError, HopError) as error:
            problems.append(error)
        finally:
            connection.end()
            self._outbox.interrupt()

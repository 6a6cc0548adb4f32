"""`TcpServer`: accepts the sockets of peers and hands their messages over."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

import numpy as np
from absl import logging

from hop_tf.errors import HopError, ProtocolError
from hop_tf.tensors.buffers import BufferPool
from hop_tf.transport.connection import Connection
from hop_tf.transport.framing import FrameKind, encode, take_buffer
from hop_tf.transport.grpc_server import DaemonExecutor
from hop_tf.transport.handshake import CONTROL_LANE, Greeting, Handshake, HelloRefusedError
from hop_tf.transport.inbox import Dispatcher, Inbox, make_message
from hop_tf.transport.peer import Peer

_HELLO_TIMEOUT_SECONDS = 10.0
# Connections that have not said hello; each costs a thread.
_MAX_STRANGERS = 64


class TcpServer:
    """Serves messages on a port of its own.

    Args:
      host: Address to serve on; the operating system chooses the port.
      executor: Runs a thread for every connection.
      handshake: Judges greetings.
      dispatcher: Where messages go.
      pool: Where payloads are put.
      on_refused: Called with where it came from and the reason, for every connection that is refused.
      on_error: Called with an exception that nobody has foreseen.
    """

    def __init__(
        self,
        host: str,
        *,
        executor: DaemonExecutor,
        handshake: Handshake,
        dispatcher: Dispatcher,
        pool: BufferPool,
        on_refused: Callable[[str, HopError], None],
        on_error: Callable[[BaseException], None],
    ):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family)
        self.port = self._socket.getsockname()[1]
        self._executor = executor
        self._handshake = handshake
        self._dispatcher = dispatcher
        self._pool = pool
        self._on_refused = on_refused
        self._on_error = on_error
        self._lock = threading.Lock()
        self._closed = False
        self._connections: set[Connection] = set()
        self._lanes: dict[tuple[int, int], Connection] = {}
        self._num_strangers = 0
        executor.submit(self._accept)

    def close(self) -> None:
        """Gives the port back and ends all connections."""
        with self._lock:
            self._closed = True
            connections = list(self._connections)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # Ends `accept`; `close` alone does not.
        self._socket.close()
        for connection in connections:
            connection.end()

    def _accept(self) -> None:
        try:
            while True:
                with contextlib.suppress(ConnectionAbortedError):
                    self._welcome(*self._socket.accept())
        except Exception as error:
            if not self._closed:
                self._on_error(error)

    def _welcome(self, accepted: socket.socket, address: tuple) -> None:
        try:
            connection = Connection(accepted)
        except OSError:  # It is broken already.
            accepted.close()
            return
        with self._lock:
            welcome = not self._closed and self._num_strangers < _MAX_STRANGERS
            if welcome:
                self._connections.add(connection)
                self._num_strangers += 1
        if welcome:
            self._executor.submit(self._serve, connection, f"{address[0]}:{address[1]}")
        else:
            connection.close()

    def _serve(self, connection: Connection, address: str) -> None:
        try:
            greeting = self._greet(connection)
            self._receive(connection, greeting)
        except HelloRefusedError as error:
            self._on_refused(address, error)
            with contextlib.suppress(OSError):
                connection.write(encode(FrameKind.HELLO_REPLY, body=error.reply))
        except ProtocolError as error:
            self._on_refused(address, error)
        except OSError as error:
            logging.debug("A connection from %s ended: %s", address, error)
        except Exception as error:
            self._on_error(error)
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def _greet(self, connection: Connection) -> Greeting:
        try:
            connection.set_timeout(_HELLO_TIMEOUT_SECONDS)
            frame = connection.read_frame()
            if frame is None:
                raise ConnectionAbortedError("it was closed before a greeting")  # As by a rank that leaves just then.
            if frame.kind != FrameKind.HELLO:
                raise ProtocolError("a connection must begin with HELLO.")
            greeting = self._handshake.check_hello(frame.header)
        except TimeoutError as error:
            raise ProtocolError("no hello came in time.") from error
        finally:
            with self._lock:
                self._num_strangers -= 1
        if greeting.lane == CONTROL_LANE:
            raise ProtocolError(f"{greeting.peer} opened the control lane on a socket.")
        return greeting

    def _receive(self, connection: Connection, greeting: Greeting) -> None:
        inbox = self._dispatcher.inbox(greeting.peer.rank, greeting.lane)
        epoch, received_sequence = inbox.begin(greeting.first_sequence)
        self._replace_earlier(connection, greeting)
        greeting.peer.link_up()
        try:
            connection.write(encode(FrameKind.HELLO_REPLY, body=self._handshake.accept(received_sequence)))
            connection.set_timeout(None)
            lane = _Lane(connection, greeting.peer, inbox, epoch, self._pool)
            while lane.take_message():
                pass
        finally:
            greeting.peer.link_down()

    def _replace_earlier(self, connection: Connection, greeting: Greeting) -> None:
        with self._lock:
            earlier = self._lanes.get((greeting.peer.rank, greeting.lane))
            self._lanes[greeting.peer.rank, greeting.lane] = connection
        if earlier is not None:
            earlier.end()


class _Lane:
    """Messages of one connection."""

    def __init__(self, connection: Connection, peer: Peer, inbox: Inbox, epoch: int, pool: BufferPool):
        self._connection = connection
        self._peer = peer
        self._inbox = inbox
        self._epoch = epoch
        self._pool = pool

    def take_message(self) -> bool:
        """Reads, delivers and acknowledges one message; False at the end of the stream."""
        frame = self._connection.read_frame()
        if frame is None:
            return False
        self._peer.heard()
        message = make_message(self._peer, frame, self._read_payload(frame.payload_bytes))
        if not self._inbox.accept(self._epoch, frame.sequence, message):
            return False
        if frame.ack_requested:
            self._connection.write(encode(FrameKind.ACKNOWLEDGE, sequence=frame.sequence))
        return True

    def _read_payload(self, num_bytes: int) -> np.ndarray:
        buffer = take_buffer(self._pool, num_bytes)
        for _ in self._connection.read_payload(buffer):
            self._peer.heard()
        buffer.flags.writeable = False
        return buffer

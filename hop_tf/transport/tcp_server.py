"""`TcpServer`: accepts the sockets of peers and delivers their messages."""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
from collections.abc import Callable

import numpy as np
from absl import logging

from hop_tf.errors import HopError, ProtocolError
from hop_tf.tensors.buffers import BufferPool
from hop_tf.transport.connection import Connection
from hop_tf.transport.daemon_executor import DaemonExecutor
from hop_tf.transport.framing import FrameKind, encode, take_buffer
from hop_tf.transport.handshake import CONTROL_LANE, Greeting, Handshake, HelloRefusedError
from hop_tf.transport.inbox import Dispatcher, Inbox, make_message
from hop_tf.transport.lending import Lending
from hop_tf.transport.peer import Peer
from hop_tf.transport.unauthenticated_peers import (
    GREETING_SECONDS,
    UnauthenticatedPeer,
    UnauthenticatedPeers,
    source_of,
)

# Errors of `accept` that are temporary: a lack of resources, or an earlier error of the network.
_PASSING_ERRORS = frozenset(
    getattr(errno, name)
    for name in (
        *("EMFILE", "ENFILE", "ENOBUFS", "ENOMEM", "ECONNABORTED", "EINTR", "EAGAIN", "EPERM", "EPROTO", "ENOPROTOOPT"),
        *("ENETDOWN", "EHOSTDOWN", "ENONET", "EHOSTUNREACH", "EOPNOTSUPP", "ENETUNREACH", "ETIMEDOUT"),
    )
)
_ACCEPT_PAUSE_SECONDS = 0.1
_LOG_PERIOD_SECONDS = 10
# One acknowledgement covers up to this many messages and bytes. It is sent earlier if the lane is idle for this time.
_OWED_MESSAGES = 16
_OWED_BYTES = 1 << 22
_OWED_SECONDS = 0.02


class TcpServer:
    """Serves messages on a port of its own.

    Args:
      host: Address to serve on. The operating system chooses the port.
      executor: Runs a thread for every connection.
      unauthenticated: The connections that have not greeted yet.
      handshake: Judges greetings.
      dispatcher: Delivers messages.
      pool: Provides memory for payloads.
      on_refused: Called with the origin and the reason, for every connection that is refused.
      on_error: Called with an unexpected exception.
    """

    def __init__(
        self,
        host: str,
        *,
        executor: DaemonExecutor,
        unauthenticated: UnauthenticatedPeers,
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
        self._unauthenticated = unauthenticated
        self._handshake = handshake
        self._dispatcher = dispatcher
        self._pool = pool
        self._on_refused = on_refused
        self._on_error = on_error
        self._lock = threading.Lock()
        self._closed = False
        self._connections: set[Connection] = set()
        self._lanes: dict[tuple[int, int], Lane] = {}
        self._ended = threading.Event()
        executor.submit(self._accept)

    def close(self) -> None:
        """Frees the port and ends all connections."""
        with self._lock:
            self._closed = True
            self._ended.set()
            connections, lanes = list(self._connections), list(self._lanes.values())
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # Ends `accept`; `close` alone does not.
        self._socket.close()
        for connection in connections:
            connection.end()
        for lane in lanes:
            lane.lending.end()

    def lane(self, sender: int, number: int) -> Lane | None:
        """The running connection of a lane, or None."""
        return self._lanes.get((sender, number))

    def _accept(self) -> None:
        try:
            while not self._closed:
                try:
                    accepted, address = self._socket.accept()
                except OSError as error:
                    if self._closed or error.errno not in _PASSING_ERRORS:
                        raise
                    self._pause(str(error))
                else:
                    self._welcome(accepted, address)
        except Exception as error:
            if not self._closed:
                self._on_error(error)

    def _pause(self, problem: str) -> None:
        logging.log_every_n_seconds(
            logging.WARNING, "Port %d accepts no connection for now: %s.", _LOG_PERIOD_SECONDS, self.port, problem
        )
        self._ended.wait(_ACCEPT_PAUSE_SECONDS)

    def _welcome(self, accepted: socket.socket, address: tuple) -> None:
        try:
            connection = Connection(accepted)
        except OSError:  # The connection is broken already.
            accepted.close()
            return
        if not self._unauthenticated.expect():
            connection.close()
            return
        if not self._executor.try_reserve():
            self._unauthenticated.expect_less()
            connection.close()
            self._pause("the system allows no more threads")
            return
        name = f"{address[0]}:{address[1]}"
        caller = self._unauthenticated.enter(source_of(name), connection.end)
        with self._lock:
            self._connections.add(connection)
        if self._closed:
            connection.end()
        self._executor.submit(self._serve, connection, caller, name)

    def _serve(self, connection: Connection, caller: UnauthenticatedPeer, address: str) -> None:
        try:
            greeting = self._greet(connection, caller)
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

    def _greet(self, connection: Connection, caller: UnauthenticatedPeer) -> Greeting:
        challenge, session = self._handshake.challenge()
        try:
            connection.set_timeout(GREETING_SECONDS)
            connection.write(encode(FrameKind.CHALLENGE, body=challenge))
            frame = connection.read_frame()
        except OSError as error:
            if caller.problem:
                raise ProtocolError(caller.problem) from error
            raise
        finally:
            self._unauthenticated.leave(caller)
        if caller.problem:
            raise ProtocolError(caller.problem)
        if frame is None:
            raise ConnectionAbortedError("it was closed before a greeting")  # As by a rank that exits just then.
        if frame.kind != FrameKind.HELLO:
            raise ProtocolError("a connection must begin with HELLO.")
        greeting = self._handshake.check_hello(frame.header, session, caller.source, None)
        if greeting.lane == CONTROL_LANE:
            raise ProtocolError(f"{greeting.peer} opened the control lane on a socket.")
        return greeting

    def _receive(self, connection: Connection, greeting: Greeting) -> None:
        inbox = self._dispatcher.inbox(greeting.peer.rank, greeting.lane)
        epoch, received_sequence = inbox.begin(greeting.first_sequence)
        lane = Lane(connection, greeting.peer, inbox, epoch, self._pool)
        self._replace_earlier(lane, greeting)
        greeting.peer.link_up()
        try:
            shares_memory = connection.open_memory(greeting.shared_memory)
            reply = self._handshake.accept(greeting, received_sequence, shares_memory=shares_memory)
            connection.write(encode(FrameKind.HELLO_REPLY, body=reply))
            session = greeting.session
            connection.end_greeting(sent=session.checksums("server"), received=session.checksums("client"))
            while lane.take_message():
                lane.lend()
        finally:
            greeting.peer.link_down()
            with self._lock:
                if self._lanes[greeting.peer.rank, greeting.lane] is lane:
                    del self._lanes[greeting.peer.rank, greeting.lane]

    def _replace_earlier(self, lane: Lane, greeting: Greeting) -> None:
        with self._lock:
            earlier = self._lanes.get((greeting.peer.rank, greeting.lane))
            self._lanes[greeting.peer.rank, greeting.lane] = lane
        if earlier is not None:
            earlier.end()


class Lane:
    """Messages of one connection.

    Attributes:
      connection: The connection.
      lending: Decides which thread reads the messages.
    """

    def __init__(self, connection: Connection, peer: Peer, inbox: Inbox, epoch: int, pool: BufferPool):
        self.connection = connection
        self._peer = peer
        self._inbox = inbox
        self._epoch = epoch
        self._pool = pool
        self.lending = Lending()
        self._owed_sequence = self._num_owed = self._owed_bytes = 0

    def lend(self) -> None:
        """Lends the connection to a thread that wants to read the next messages. Blocks: until it is given back."""
        if not self.connection.unread_bytes:
            self.lending.lend()

    def end(self) -> None:
        """Ends the connection."""
        self.connection.end()
        self.lending.end()

    def take_message(self) -> bool:
        """Reads and delivers one message. Returns False at the end of the stream, or if the connection was replaced."""
        if self._num_owed and self.connection.is_idle_for(_OWED_SECONDS):
            self._acknowledge(self._owed_sequence)
        received = self.connection.read_message(self.take_buffer, self._peer.heard)
        if received is None:
            return False
        frame, payload = received
        payload.flags.writeable = False
        message = make_message(self._peer, frame, payload)
        if not self._inbox.accept(self._epoch, frame.sequence, message, frame.is_recorded):
            return False
        self._owe(frame.sequence, payload.nbytes, ack_requested=frame.ack_requested)
        return True

    def next_sequence(self) -> int | None:
        """The number of the next message; None if a thread that has borrowed the lane cannot read it."""
        return None if self.connection.unread_bytes else self._inbox.next_sequence(self._epoch)

    def note(self, sequence: int, num_bytes: int, *, ack_requested: bool) -> bool:
        """Counts a message that a borrower has read. Returns False if a new connection will deliver it again."""
        self._peer.heard()
        if not self._inbox.note(self._epoch, sequence, num_bytes):
            return False
        with contextlib.suppress(OSError):  # The next read fails, too.
            self._owe(sequence, num_bytes, ack_requested=ack_requested)
        return True

    def _owe(self, sequence: int, num_bytes: int, *, ack_requested: bool) -> None:
        """Delays and merges acknowledgements, because each of them wakes a thread of the sender."""
        self._owed_bytes += num_bytes
        if not ack_requested:
            return
        self._owed_sequence = sequence
        self._num_owed += 1
        if self._num_owed >= _OWED_MESSAGES or self._owed_bytes >= _OWED_BYTES:
            self._acknowledge(sequence)

    def _acknowledge(self, sequence: int) -> None:
        self._num_owed = self._owed_bytes = 0
        self.connection.write(encode(FrameKind.ACKNOWLEDGE, sequence=sequence))

    def take_buffer(self, num_bytes: int) -> np.ndarray:
        """Memory for a payload."""
        return take_buffer(self._pool, num_bytes)

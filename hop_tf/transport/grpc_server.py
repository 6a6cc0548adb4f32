"""`StreamHandler`: the gRPC server's side. Accepts the streams of peers and delivers their messages."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator

import grpc

from hop_tf.errors import HopError, ProtocolError
from hop_tf.tensors.buffers import BufferPool
from hop_tf.transport.certificates import certificate_names
from hop_tf.transport.checksum import Checksums, NoChecksums
from hop_tf.transport.daemon_executor import DaemonExecutor
from hop_tf.transport.framing import Assembler, Frame, FrameKind, decode, decode_checked, encode
from hop_tf.transport.grpc_link import CLOCK, METHOD
from hop_tf.transport.handshake import CONTROL_LANE, Greeting, Handshake, HelloRefusedError
from hop_tf.transport.inbox import Dispatcher, Inbox, make_message
from hop_tf.transport.peer import Peer
from hop_tf.transport.proof import Session
from hop_tf.transport.unauthenticated_peers import UnauthenticatedPeers, source_of


class StreamHandler(grpc.GenericRpcHandler):
    """Serves the streams that peers open: greeting, messages, acknowledgements.

    Args:
      rank: This rank.
      handshake: Judges greetings.
      dispatcher: Delivers messages.
      pool: Provides memory for payloads.
      executor: Runs the thread of each stream.
      encrypted: True under TLS.
      unauthenticated: The connections that have not greeted yet.
      on_refused: Called with the origin and the reason, for every stream that is refused.
      on_error: Called with an unexpected exception.
    """

    def __init__(
        self,
        *,
        rank: int,
        handshake: Handshake,
        dispatcher: Dispatcher,
        pool: BufferPool,
        executor: DaemonExecutor,
        encrypted: bool,
        unauthenticated: UnauthenticatedPeers,
        on_refused: Callable[[str, HopError], None],
        on_error: Callable[[BaseException], None],
    ):
        self._rank = rank
        self._handshake = handshake
        self._dispatcher = dispatcher
        self._pool = pool
        self._executor = executor
        self._encrypted = encrypted
        self._unauthenticated = unauthenticated
        self._on_refused = on_refused
        self._on_error = on_error
        self._lock = threading.Lock()
        self._contexts: dict[tuple[int, int], grpc.ServicerContext] = {}
        self._rpc = grpc.stream_stream_rpc_method_handler(self._serve)

    def service(self, handler_call_details):
        """The stream's handler. If it is None, gRPC refuses the stream with UNIMPLEMENTED, without a thread."""
        is_admitted = handler_call_details.method == METHOD and self._unauthenticated.admit(self._executor.try_reserve)
        return self._rpc if is_admitted else None

    def close(self) -> None:
        """Ends all streams."""
        with self._lock:
            contexts = list(self._contexts.values())
        for context in contexts:
            context.cancel()

    def _serve(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        try:
            greeting = yield from self._greet(requests, context)
            yield from self._receive(greeting, requests, context)
        except HelloRefusedError as error:
            self._on_refused(context.peer(), error)
            yield encode(FrameKind.HELLO_REPLY, body=error.reply)
        except ProtocolError as error:
            self._on_refused(context.peer(), error)
            context.set_code(grpc.StatusCode.INVALID_ARGUMENT)
            context.set_details(str(error))
        except grpc.RpcError:
            pass  # The peer, or `close`, has ended the stream. The peer may open another one.
        except Exception as error:
            self._on_error(error)

    # Greeting.

    def _greet(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Generator[bytes, None, Greeting]:
        source = source_of(context.peer())
        caller = self._unauthenticated.enter(source, context.cancel)
        try:
            challenge, session = self._handshake.challenge()
            yield encode(FrameKind.CHALLENGE, body=challenge)
            data = next(requests, b"")
        except grpc.RpcError:
            if not caller.problem:
                raise
        finally:
            # From here on, `close` does not stop the answer: without a refusal, a peer would wait for a rank that is
            # gone.
            self._unauthenticated.leave(caller)
        if caller.problem:
            raise ProtocolError(caller.problem)
        return self._check_hello(data, session, source, context)

    def _check_hello(self, data: bytes, session: Session, source: str, context: grpc.ServicerContext) -> Greeting:
        frame = decode(data)
        if frame.kind != FrameKind.HELLO:
            raise ProtocolError(f"a stream must begin with HELLO. Received: {frame.kind.name}.")
        names = certificate_names(context.auth_context()) if self._encrypted else None
        greeting = self._handshake.check_hello(frame.header, session, source, names)
        with self._lock:
            earlier = self._contexts.pop((greeting.peer.rank, greeting.lane), None)
            self._contexts[greeting.peer.rank, greeting.lane] = context
        if earlier is not None:
            earlier.cancel()
        return greeting

    # Messages.

    def _receive(self, greeting: Greeting, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        inbox = self._dispatcher.inbox(greeting.peer.rank, greeting.lane)
        epoch, received_sequence = inbox.begin(greeting.first_sequence)
        greeting.peer.link_up()
        if not context.add_callback(greeting.peer.link_down):
            greeting.peer.link_down()
            return
        yield encode(FrameKind.HELLO_REPLY, body=self._handshake.accept(greeting, received_sequence))
        sent, received = greeting.session.checksums("server"), greeting.session.checksums("client")
        if greeting.lane == CONTROL_LANE:
            answers = _answer_heartbeats(greeting.peer, requests, received)
        else:
            answers = _take_messages(_Stream(inbox, epoch, greeting.peer, self._pool, received), requests)
        for frame in answers:
            yield frame + sent.of(frame)


def _take_messages(stream: _Stream, requests: Iterator[bytes]) -> Iterator[bytes]:
    for data in requests:
        frame = stream.feed(data)
        del data
        if frame is None:
            continue
        if not stream.deliver(frame):
            return
        if frame.ack_requested:
            yield encode(FrameKind.ACKNOWLEDGE, sequence=frame.sequence)


def _answer_heartbeats(peer: Peer, requests: Iterator[bytes], checksums: Checksums | NoChecksums) -> Iterator[bytes]:
    for data in requests:
        if decode_checked(data, checksums).kind != FrameKind.PING:
            raise ProtocolError(f"{peer} sent something other than PING on the control lane.")
        peer.heard()
        yield encode(FrameKind.PONG, body=CLOCK.pack(time.time()) + peer.complaint().encode())


class _Stream:
    """Messages of one connection on one lane."""

    def __init__(self, inbox: Inbox, epoch: int, peer: Peer, pool: BufferPool, checksums: Checksums | NoChecksums):
        self._inbox = inbox
        self._epoch = epoch
        self._peer = peer
        self._pool = pool
        self._checksums = checksums
        self._assembler: Assembler | None = None

    def feed(self, data: bytes) -> Frame | None:
        """Takes a frame or chunk. Returns the frame of the message that is complete now, or None."""
        self._peer.heard()
        if self._assembler is not None:
            self._assembler.add(data)
        else:
            self._assembler = Assembler(self._pool, data, self._checksums)
        return self._assembler.frame if self._assembler.complete else None

    def deliver(self, frame: Frame) -> bool:
        """Delivers the complete message. Returns False if this connection has been replaced."""
        payload = self._assembler.payload()
        self._assembler = None
        message = make_message(self._peer, frame, payload)
        return self._inbox.accept(self._epoch, frame.sequence, message, frame.is_recorded)

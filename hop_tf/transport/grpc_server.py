"""`GrpcServer`: accepts the streams of peers and hands their messages over."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Callable, Iterator

import grpc

from hop_tf.errors import HopError, ProtocolError
from hop_tf.tensors.buffers import BufferPool
from hop_tf.transport.framing import Assembler, Frame, FrameKind, decode, encode
from hop_tf.transport.grpc_link import METHOD
from hop_tf.transport.handshake import CONTROL_LANE, Greeting, Handshake, HelloRefusedError
from hop_tf.transport.inbox import Dispatcher, Inbox, make_message
from hop_tf.transport.peer import Peer

# A stream that has not said hello by then is closed when the next one comes.
_HELLO_TIMEOUT_SECONDS = 10.0
# Streams that have not said hello; each costs a thread.
_MAX_STRANGERS = 64


class DaemonExecutor(concurrent.futures.Executor):
    """Runs each call on a daemon thread of its own.

    The interpreter joins the threads of `ThreadPoolExecutor` before it exits. Those of a server sit in streams that
    last as long as the process, and it would never exit.

    Args:
      name: Name of the threads.
    """

    def __init__(self, name: str):
        self._name = name
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()

    @property
    def threads(self) -> list[threading.Thread]:
        """The threads that run."""
        with self._lock:
            return list(self._threads)

    def submit(self, fn, /, *args, **kwargs):
        future = concurrent.futures.Future()
        thread = threading.Thread(target=self._run, args=(future, fn, args, kwargs), name=self._name, daemon=True)
        with self._lock:  # Whoever sees a thread may join it.
            self._threads.add(thread)
            thread.start()
        return future

    def _run(self, future: concurrent.futures.Future, fn: Callable, args: tuple, kwargs: dict) -> None:
        try:
            if future.set_running_or_notify_cancel():
                future.set_result(fn(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())


class StreamHandler(grpc.GenericRpcHandler):
    """What happens on a stream that a peer has opened: greeting, messages, acknowledgements.

    Args:
      rank: This rank.
      handshake: Judges greetings.
      dispatcher: Where messages go.
      pool: Where payloads are put together.
      on_refused: Called with where it came from and the reason, for every stream that is refused.
      on_error: Called with an exception that nobody has foreseen.
    """

    def __init__(
        self,
        *,
        rank: int,
        handshake: Handshake,
        dispatcher: Dispatcher,
        pool: BufferPool,
        on_refused: Callable[[str, HopError], None],
        on_error: Callable[[BaseException], None],
    ):
        self._rank = rank
        self._handshake = handshake
        self._dispatcher = dispatcher
        self._pool = pool
        self._on_refused = on_refused
        self._on_error = on_error
        self._lock = threading.Lock()
        self._strangers: dict[grpc.ServicerContext, float] = {}
        self._contexts: dict[tuple[int, int], grpc.ServicerContext] = {}
        self._rpc = grpc.stream_stream_rpc_method_handler(self._serve)

    def service(self, handler_call_details):
        return self._rpc if handler_call_details.method == METHOD else None

    def close(self) -> None:
        """Ends all streams."""
        with self._lock:
            contexts = [*self._strangers, *self._contexts.values()]
        for context in contexts:
            context.cancel()

    def _serve(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        try:
            self._admit(context)
            greeting = self._greet(requests, context)
            yield from self._receive(greeting, requests, context)
        except HelloRefusedError as error:
            self._on_refused(context.peer(), error)
            yield encode(FrameKind.HELLO_REPLY, body=error.reply)
        except ProtocolError as error:
            self._on_refused(context.peer(), error)
            context.set_code(grpc.StatusCode.INVALID_ARGUMENT)
            context.set_details(str(error))
        except grpc.RpcError:
            pass  # The peer, or `close`, has ended the stream; the peer comes back if it wants to.
        except Exception as error:
            self._on_error(error)

    # Greeting.

    def _admit(self, context: grpc.ServicerContext) -> None:
        """Makes sure that streams which say nothing do not pile up."""
        now = time.monotonic()
        with self._lock:
            for stranger, since in list(self._strangers.items()):
                if now - since > _HELLO_TIMEOUT_SECONDS:
                    stranger.cancel()
            full = len(self._strangers) >= _MAX_STRANGERS
            if not full:
                self._strangers[context] = now
        if full or not context.add_callback(lambda: self._forget(context)):
            self._forget(context)
            raise ProtocolError("too many streams have not said hello.")

    def _forget(self, context: grpc.ServicerContext) -> None:
        with self._lock:
            self._strangers.pop(context, None)

    def _greet(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Greeting:
        frame = decode(next(requests, b""))
        if frame.kind != FrameKind.HELLO:
            raise ProtocolError(f"a stream must begin with HELLO. Received: {frame.kind.name}.")
        # From here on `close` lets the answer out: who is refused, and not told, would wait for a rank that is gone.
        self._forget(context)
        greeting = self._handshake.check_hello(frame.header)
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
        yield encode(FrameKind.HELLO_REPLY, body=self._handshake.accept(received_sequence))
        if greeting.lane == CONTROL_LANE:
            yield from _answer_heartbeats(greeting.peer, requests)
        else:
            yield from self._take_messages(_Stream(inbox, epoch, greeting.peer, self._pool), requests)

    def _take_messages(self, stream: _Stream, requests: Iterator[bytes]) -> Iterator[bytes]:
        for data in requests:
            frame = stream.feed(data)
            del data
            if frame is None:
                continue
            if not stream.deliver(frame):
                return
            if frame.ack_requested:
                yield encode(FrameKind.ACKNOWLEDGE, sequence=frame.sequence)


def _answer_heartbeats(peer: Peer, requests: Iterator[bytes]) -> Iterator[bytes]:
    for data in requests:
        if decode(data).kind != FrameKind.PING:
            raise ProtocolError(f"{peer} sent something other than PING on the control lane.")
        peer.heard()
        yield encode(FrameKind.PONG, body=peer.complaint().encode())


class _Stream:
    """Messages of one connection on one lane."""

    def __init__(self, inbox: Inbox, epoch: int, peer: Peer, pool: BufferPool):
        self._inbox = inbox
        self._epoch = epoch
        self._peer = peer
        self._pool = pool
        self._assembler: Assembler | None = None

    def feed(self, data: bytes) -> Frame | None:
        """Takes a frame or chunk; returns the frame of the message that it completes, if it does."""
        self._peer.heard()
        if self._assembler is not None:
            self._assembler.add(data)
        else:
            self._assembler = Assembler(self._pool, decode(data))
        return self._assembler.frame if self._assembler.complete else None

    def deliver(self, frame: Frame) -> bool:
        """Delivers the completed message; False if this connection has been replaced."""
        payload = self._assembler.payload()
        self._assembler = None
        return self._inbox.accept(self._epoch, frame.sequence, make_message(self._peer, frame, payload))

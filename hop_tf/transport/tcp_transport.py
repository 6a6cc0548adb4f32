"""`TcpTransport`: the transport between processes, with messages over plain sockets."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Collection, Iterator, Sequence
from types import ModuleType

import numpy as np

from hop_tf.errors import HopError
from hop_tf.transport import lending
from hop_tf.transport.base import BULK_LANE, Expected, ToSend
from hop_tf.transport.grpc_link import GrpcLink
from hop_tf.transport.grpc_transport import GrpcTransport
from hop_tf.transport.outbox import Outbox, check_message, flatten
from hop_tf.transport.peer import Peer
from hop_tf.transport.tcp_link import FIRST_INTERFACE_LANE, TcpLink
from hop_tf.transport.tcp_server import Lane, TcpServer


@functools.cache
def _swapping() -> ModuleType | None:
    # Imported only when there are connections: the module imports TensorFlow, which takes seconds.
    is_native = importlib.import_module("hop_tf.ops.frames").exchanges_frames()
    return importlib.import_module("hop_tf.transport.swapping") if is_native else None


class TcpTransport(GrpcTransport):
    """A `GrpcTransport` that sends messages over plain sockets, at a third of gRPC's processor time.

    Greetings and heartbeats go over gRPC, on the address of the cluster. The greetings announce the port of a rank's
    sockets, which the operating system chooses. The sockets demand the same greeting with the same token. With TLS, or
    while that port cannot be reached, messages go over gRPC, too. With `CommunicationOptions.interfaces`, there are
    sockets on each interface, and each interface carries a lane of its own.

    Between processes of one machine, large payloads go through shared memory: see `shared_memory.py`.

    Args:
      *args: See `GrpcTransport`.
      shares_memory: False to send all payloads through sockets. Default True.
      **kwargs: See `GrpcTransport`.
    """

    def __init__(self, *args, shares_memory: bool = True, **kwargs):
        super().__init__(*args, **kwargs)
        self._shares_memory = shares_memory
        self._sockets: list[TcpServer] = []

    def start(self) -> None:
        self._check_open()
        if self._tls is None and not self._sockets:
            self._handshake.socket_port = self._serve(self._hosts()[0])
            self._handshake.interface_addresses = tuple(
                f"[{host}]:{self._serve(host)}" if ":" in host else f"{host}:{self._serve(host)}"
                for host in self._options.interfaces or ()
            )
        super().start()

    def _serve(self, host: str) -> int:
        try:
            server = TcpServer(
                host,
                executor=self._executor,
                unauthenticated=self._unauthenticated,
                handshake=self._handshake,
                dispatcher=self._dispatcher,
                pool=self._pool,
                on_refused=self._refused,
                on_error=self._thread_failed,
            )
        except OSError as error:
            raise HopError(
                f"rank {self._rank}: cannot serve on interface {host}: {error.strerror}. Check that this machine has "
                "that address (see CommunicationOptions.interfaces)."
            ) from error
        self._sockets.append(server)
        return server.port

    def _open_lane(self, peer: Peer, lane: int, outbox: Outbox) -> None:
        arguments = self._arguments(peer, lane, outbox)
        if self._tls is not None:
            self._add_link(GrpcLink(**arguments))
            return
        interfaces, number = self._options.interfaces or (), lane - FIRST_INTERFACE_LANE
        interface = interfaces[number] if 0 <= number < len(interfaces) else None
        self._add_link(TcpLink(interface=interface, shares_memory=self._shares_memory, **arguments))

    @property
    def can_swap(self) -> bool:
        return self._swapping is not None

    def swap(
        self,
        queue: str,
        to_send: Sequence[ToSend],
        expected: Sequence[Expected],
        lane: int | None,
        send: Callable[[ToSend], object],
    ) -> list[np.ndarray | None]:
        lanes, swapping = self._incoming([each.sender for each in expected], lane), self._swapping
        lendings = [each.lending for each in lanes]
        if swapping is None or len(lanes) < len(expected) or not lending.borrow_all(lendings):
            return super().swap(queue, to_send, expected, lane, send)
        try:
            return self._swap(swapping, queue.encode(), to_send, lanes, expected, lane, send)
        finally:
            lending.give_back_all(lendings)

    def _swap(self, swapping, queue: bytes, to_send, lanes: Sequence[Lane], expected, lane: int | None, send):
        awaited, letters = swapping.await_all(lanes, queue, expected), []
        try:
            others = self._begin_letters(swapping, queue, to_send, lane, letters)
        except BaseException:
            swapping.write(letters, ())
            raise
        swapping.write(letters, () if others else awaited)
        for message in others:
            send(message)
        return swapping.read(awaited, lanes)

    def _begin_letters(self, swapping, queue: bytes, to_send, lane: int | None, letters: list) -> list[ToSend]:
        """Begins messages, as `letters`, if their connections are idle. Returns the other messages."""
        others, payload, arrays, num_bytes, pieces = [], None, (), 0, None
        for message in to_send:
            if message.payload is not payload:  # Often all peers get the same payload.
                payload = message.payload
                arrays, num_bytes = flatten(payload)
                check_message(queue, message.header, num_bytes, lane or 0)
                pieces = swapping.pieces_of(arrays)
            outbox, header = self._outbox_for(message.peer, num_bytes, lane), message.header
            begun = outbox and outbox.begin_message(queue, header, arrays, len(header) + num_bytes)
            if begun is None:
                others.append(message)
                continue
            letters.append(swapping.Letter(outbox, *begun, pieces))
            self._count_sent(outbox.lane, len(header) + num_bytes)
        return others

    def _outbox_for(self, peer: int, num_bytes: int, lane: int | None) -> Outbox | None:
        """The outbox for a message that can be written at once; None if only `send` can handle it."""
        lane = self._emptiest_lane(peer, num_bytes) if lane is None else lane
        has_failed = self._failure is not None or self._peers[peer].failure is not None
        return None if has_failed else self._outboxes.get((peer, lane))

    @contextlib.contextmanager
    def waiting_for(self, senders: Collection[int], lane: int | None) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if self._swapping is not None:
                for each in self._incoming(senders, lane):
                    stack.enter_context(each.lending.waiting())
            yield

    @property
    def _swapping(self) -> ModuleType | None:
        """The `swapping` module; None without native code or sockets, and while messages are recorded."""
        is_recorded = self.recorder is not None and self.recorder.is_on
        return None if is_recorded or not self._sockets else _swapping()

    def _incoming(self, senders: Collection[int], lane: int | None) -> list[Lane]:
        """The connections from these ranks, at most one for each. A rank without a socket has none."""
        number = BULK_LANE if lane is None else lane
        found = {}
        for server in self._sockets:
            for sender in senders:
                if (incoming := server.lane(sender, number)) is not None:
                    found.setdefault(sender, incoming)
        return [found[sender] for sender in senders if sender in found]

    def _close_links(self, deadline: float) -> None:
        for server in self._sockets:
            server.close()
        super()._close_links(deadline)

"""`TcpTransport`: the transport between processes, with messages over plain sockets."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Collection, Iterator, Sequence
from types import ModuleType

import numpy as np

from hop_tf.errors import HopError
from hop_tf.transport import lending
from hop_tf.transport.base import BULK_LANE, Expected
from hop_tf.transport.grpc_link import GrpcLink
from hop_tf.transport.grpc_transport import GrpcTransport
from hop_tf.transport.outbox import Outbox
from hop_tf.transport.peer import Peer
from hop_tf.transport.tcp_link import FIRST_INTERFACE_LANE, TcpLink
from hop_tf.transport.tcp_server import Lane, TcpServer


@functools.cache
def _borrowing() -> ModuleType | None:
    # Not before there are connections: it brings TensorFlow, which takes seconds to import.
    is_native = importlib.import_module("hop_tf.ops.frames").receives_frames()
    return importlib.import_module("hop_tf.transport.borrowed") if is_native else None


class TcpTransport(GrpcTransport):
    """A `GrpcTransport` that sends messages over plain sockets, at a third of gRPC's processor time.

    Greetings and heartbeats go over gRPC, on the address of the cluster. There every rank tells the port of its
    sockets, which the operating system chooses. They demand the same greeting with the same token. Where TLS is on, or
    while that port cannot be reached, messages go over gRPC as well. With `CommunicationOptions.interfaces` there are
    such sockets on each interface, for a lane of its own.

    Between processes of one machine large payloads go through memory that they share: see `shared_memory.py`.

    Args:
      *args: See `GrpcTransport`.
      shares_memory: False: those that this rank sends go through sockets there, too.
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
                strangers=self._strangers,
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
    def can_receive_now(self) -> bool:
        return self._borrowing is not None

    def receive_now(self, queue: str, expected: Sequence[Expected], lane: int | None) -> list[np.ndarray | None]:
        lanes, borrowing = self._incoming([each.sender for each in expected], lane), self._borrowing
        lendings = [each.lending for each in lanes]
        if borrowing is None or len(lanes) < len(expected) or not lending.borrow_all(lendings):
            return super().receive_now(queue, expected, lane)
        try:
            return borrowing.receive(lanes, queue.encode(), expected)
        finally:
            lending.give_back_all(lendings)

    @contextlib.contextmanager
    def waiting_for(self, senders: Collection[int], lane: int | None) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if self._borrowing is not None:
                for each in self._incoming(senders, lane):
                    stack.enter_context(each.lending.waiting())
            yield

    @property
    def _borrowing(self) -> ModuleType | None:
        """The module that reads from borrowed connections. None while messages are recorded: their threads do that."""
        is_recorded = self.recorder is not None and self.recorder.is_on
        return None if is_recorded or not self._sockets else _borrowing()

    def _incoming(self, senders: Collection[int], lane: int | None) -> list[Lane]:
        """The connections from these ranks, at most one each. A rank without a socket has none."""
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

"""`TcpTransport`: the transport between processes, with messages over plain sockets."""

from __future__ import annotations

from hop_tf.errors import HopError
from hop_tf.transport.grpc_link import GrpcLink
from hop_tf.transport.grpc_transport import GrpcTransport
from hop_tf.transport.outbox import Outbox
from hop_tf.transport.peer import Peer
from hop_tf.transport.tcp_link import FIRST_INTERFACE_LANE, TcpLink
from hop_tf.transport.tcp_server import TcpServer


class TcpTransport(GrpcTransport):
    """A `GrpcTransport` that sends messages over plain sockets, at a third of gRPC's processor time.

    Greetings and heartbeats go over gRPC, on the address of the cluster. There every rank tells the port of its
    sockets, which the operating system chooses. They demand the same greeting with the same token. Where TLS is on, or
    while that port cannot be reached, messages go over gRPC as well. With `CommunicationOptions.interfaces` there are
    such sockets on each interface, for a lane of its own.

    Args:
      *args: See `GrpcTransport`.
      **kwargs: See `GrpcTransport`.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
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
        self._add_link(TcpLink(interface=interface, **arguments))

    def _close_links(self, deadline: float) -> None:
        for server in self._sockets:
            server.close()
        super()._close_links(deadline)

"""`TcpTransport`: the transport between processes, with messages over plain sockets."""

from __future__ import annotations

from hop_tf.transport.grpc_link import GrpcLink
from hop_tf.transport.grpc_transport import GrpcTransport
from hop_tf.transport.outbox import Outbox
from hop_tf.transport.peer import Peer
from hop_tf.transport.tcp_link import TcpLink
from hop_tf.transport.tcp_server import TcpServer


class TcpTransport(GrpcTransport):
    """A `GrpcTransport` that sends messages over plain sockets, at a third of gRPC's processor time.

    Greetings and heartbeats go over gRPC, on the address of the cluster. There every rank tells the port of its
    sockets, which the operating system chooses. They demand the same greeting with the same token. Where that port
    cannot be reached, or TLS is on, messages go over gRPC as well.

    Args:
      *args: See `GrpcTransport`.
      **kwargs: See `GrpcTransport`.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._sockets: TcpServer | None = None

    def start(self) -> None:
        self._check_open()
        if self._tls is None and self._sockets is None:
            self._sockets = TcpServer(
                self._hosts()[0],
                executor=self._executor,
                handshake=self._handshake,
                dispatcher=self._dispatcher,
                pool=self._pool,
                on_refused=self._refused,
                on_error=self._thread_failed,
            )
            self._handshake.socket_port = self._sockets.port
        super().start()

    def _open_lane(self, peer: Peer, lane: int, outbox: Outbox) -> None:
        link = GrpcLink if self._tls is not None else TcpLink
        self._add_link(link(**self._arguments(peer, lane, outbox)))

    def _close_links(self, deadline: float) -> None:
        if self._sockets is not None:
            self._sockets.close()
        super()._close_links(deadline)

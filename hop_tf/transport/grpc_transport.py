"""`GrpcTransport`: the transport between processes."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence

import grpc
from absl import logging

from hop_tf.errors import HopError
from hop_tf.options import CommunicationOptions
from hop_tf.records import Recorder
from hop_tf.tensors.buffers import BufferPool
from hop_tf.transport import descriptors
from hop_tf.transport.certificates import Certificates
from hop_tf.transport.daemon_executor import DaemonExecutor
from hop_tf.transport.framing import CHUNK_BYTES
from hop_tf.transport.grpc_link import GrpcLink
from hop_tf.transport.grpc_server import StreamHandler
from hop_tf.transport.handshake import CONTROL_LANE, Handshake
from hop_tf.transport.incarnation import new_incarnation
from hop_tf.transport.link import Link
from hop_tf.transport.outbox import Outbox
from hop_tf.transport.peer import Peer
from hop_tf.transport.proof import Secret
from hop_tf.transport.queue_transport import QueueTransport
from hop_tf.transport.reports import ReportHandler
from hop_tf.transport.unauthenticated_peers import GREETING_SECONDS, GuessRateLimiter, UnauthenticatedPeers

_COMMON_OPTIONS = (
    ("grpc.max_send_message_length", CHUNK_BYTES),
    ("grpc.max_receive_message_length", CHUNK_BYTES),
    # gRPC's own pings find half-open connections (which a firewall has forgotten), however busy the lane is. The
    # timeout is long because a link that fails for some seconds is not half-open: TCP may take twice the time of the
    # failure until it tries again.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
_SERVER_OPTIONS = (
    *_COMMON_OPTIONS,
    ("grpc.so_reuseport", 0),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),
    # Closes idle connections. Each connection of a peer carries a stream, and each stream takes a thread.
    ("grpc.server_handshake_timeout_ms", int(GREETING_SECONDS * 1000)),
    ("grpc.max_connection_idle_ms", int(GREETING_SECONDS * 1000)),
    ("grpc.max_concurrent_streams", 8),
)
_CHANNEL_OPTIONS = (
    *_COMMON_OPTIONS,
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5000),  # also the time that one attempt to connect may take
    ("grpc.max_reconnect_backoff_ms", 5000),
)
_MANY_CONNECTIONS = 1 << 16
# Streams that `close` has ended are gone long before this time is over.
_GRACE_SECONDS = 2.0

# Transports of this process that serve.
_serving: weakref.WeakSet[GrpcTransport] = weakref.WeakSet()
_serving_lock = threading.Lock()


class GrpcTransport(QueueTransport):
    """Named queues over gRPC streams, one for each (peer, lane), and one for heartbeats.

    Args:
      rank: This rank.
      addresses: "host:port" of every rank. This rank serves on `addresses[rank]`.
      identity: Fields that must be equal on all ranks. If two ranks differ, `status(peer).failure` says so on both.
      incarnation: Name of this transport, see `new_incarnation`. Default: a new one.
      options: Deadlines and credentials.
      pool: Provides memory for received payloads. Default: a pool of its own.
      on_error: See `QueueTransport`.
      on_restart: See `QueueTransport`.
      recorder: See `QueueTransport`.
      num_ranks: See `QueueTransport`.
      in_turn: True if all ranks create transports in the same order. A transport's index then identifies it on every
        rank. Default True.
    """

    def __init__(
        self,
        rank: int,
        addresses: Sequence[str],
        *,
        identity: Mapping[str, str],
        incarnation: str | None = None,
        options: CommunicationOptions | None = None,
        pool: BufferPool | None = None,
        on_error: Callable[[BaseException], None] | None = None,
        on_restart: Callable[[int], None] | None = None,
        recorder: Recorder | None = None,
        num_ranks: int | None = None,
        in_turn: bool = True,
    ):
        options = options or CommunicationOptions()
        super().__init__(
            rank,
            addresses,
            options=options,
            on_error=on_error,
            on_restart=on_restart,
            recorder=recorder,
            num_ranks=num_ranks,
        )
        self._address = addresses[rank]
        self._incarnation = incarnation or new_incarnation()
        self._tls = Certificates(options) if options.uses_tls else None
        secret, guesses = Secret(options.cluster_token), GuessRateLimiter()
        self._handshake = Handshake(
            rank=rank,
            addresses=addresses,
            peers=self._peers,
            incarnation=self._incarnation,
            identity=identity,
            secret=secret,
            guesses=guesses,
            encrypted=self._tls is not None,
            on_doubt=self._ask,
            on_restart=None if on_restart is None else self._restarted,
            in_turn=in_turn,
        )
        self._heartbeat_seconds = min(options.timeout_seconds / 5, 1.0)
        self._executor = DaemonExecutor(f"hop_tf serve rank {rank}")
        self._unauthenticated = UnauthenticatedPeers()
        self._pool = pool or BufferPool()
        self._streams = StreamHandler(
            rank=rank,
            handshake=self._handshake,
            dispatcher=self._dispatcher,
            pool=self._pool,
            executor=self._executor,
            encrypted=self._tls is not None,
            unauthenticated=self._unauthenticated,
            on_refused=self._refused,
            on_error=self._thread_failed,
        )
        self._reports = ReportHandler(
            rank, secret, unauthenticated=self._unauthenticated, guesses=guesses, executor=self._executor
        )
        self._server: grpc.Server | None = None
        self._sockaddrs: frozenset[tuple] = frozenset()
        self._links: list[Link] = []
        self._lacks_descriptors = False

    @property
    def incarnation(self) -> str:
        return self._incarnation

    def start(self) -> None:
        self._check_open()
        if self._server is not None:
            raise HopError(f"rank {self._rank}: the transport was started before.")
        descriptors.raise_limit(len(self._peers))
        options = (*_SERVER_OPTIONS, ("grpc.max_allowed_incoming_connections", _max_connections()))
        server = grpc.server(self._executor, handlers=[self._streams, self._reports], options=options)
        port = self._address.rpartition(":")[2]
        for host in self._hosts():
            self._bind(server, f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
        self._handshake.begin()
        self._executor.submit(self._unauthenticated.watch)
        server.start()
        self._server = server
        with _serving_lock:
            _serving.add(self)

    def serve_reports(self, report: Callable[[], Mapping[str, object]]) -> None:
        self._reports.report = report

    def _watch(self, peer: Peer) -> None:
        if not self._lacks_descriptors:  # Warns once.
            self._lacks_descriptors = descriptors.warn_of_limit(self._name, len(self._watched), len(self._peers))
        outbox = Outbox()  # Stays empty.
        self._add_link(
            GrpcLink(
                heartbeat_seconds=self._heartbeat_seconds,
                recorder=self.recorder,
                **self._arguments(peer, CONTROL_LANE, outbox),
            )
        )

    def _open_lane(self, peer: Peer, lane: int, outbox: Outbox) -> None:
        self._add_link(GrpcLink(**self._arguments(peer, lane, outbox)))

    def _arguments(self, peer: Peer, lane: int, outbox: Outbox) -> dict[str, object]:
        return {
            "peer": peer,
            "lane": lane,
            "outbox": outbox,
            "handshake": self._handshake,
            "open_channel": self._open_channel,
            "on_error": self._thread_failed,
        }

    def _ask(self, peer: Peer) -> None:
        """Connects to `peer` to verify a greeting in its name: the process at the peer's address is the real one."""
        try:
            self.connect(peer.rank)
        except HopError as error:
            logging.debug("rank %d cannot connect to %s to verify a greeting: %s", self._rank, peer, error)

    def _add_link(self, link: Link) -> None:
        self._links.append(link)
        link.start()

    def _close_links(self, deadline: float) -> None:
        for link in self._links:
            link.close()
        # Without a grace period, gRPC would make each peer's library print a line.
        stopped = None if self._server is None else self._server.stop(grace=_GRACE_SECONDS)
        self._streams.close()
        self._unauthenticated.close()
        self._executor.close()
        self._dispatcher.close(deadline)
        self._join([link.thread for link in self._links] + self._executor.threads, deadline)
        if stopped is not None:
            stopped.wait(max(0.0, deadline - time.monotonic()))
        self._server = None  # gRPC frees the port when the server is destroyed.
        with _serving_lock:
            _serving.discard(self)

    def _open_channel(self, peer: Peer) -> grpc.Channel:
        if self._tls is None:
            return grpc.insecure_channel(peer.address, _CHANNEL_OPTIONS)
        return grpc.secure_channel(peer.address, self._tls.for_channel(), _CHANNEL_OPTIONS)

    # Binding.

    def _bind(self, server: grpc.Server, address: str) -> None:
        try:
            if self._tls is None:
                server.add_insecure_port(address)
            else:
                server.add_secure_port(address, self._tls.for_server())
        except RuntimeError as error:
            # gRPC has one message for all problems.
            tls = "" if self._tls is None else " (or gRPC does not accept the TLS files)"
            raise self._cannot_serve(f"{error}{tls}") from error

    def _hosts(self) -> list[str]:
        """The numeric addresses of this rank's name that belong to this machine.

        gRPC itself reports success if it can bind any one of them. Another process could then listen on the others.
        """
        host, _, port = self._address.rpartition(":")
        try:
            found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        except OSError as error:
            raise self._cannot_serve(error.strerror) from error
        problems = {sockaddr: _try_bind(family, sockaddr) for family, _, _, _, sockaddr in found}
        usable = [sockaddr for sockaddr, problem in problems.items() if problem is None]
        in_use = {sockaddr for sockaddr, problem in problems.items() if problem == errno.EADDRINUSE}
        if in_use and _is_served_here(in_use):
            raise self._served_here()
        if not usable or in_use:
            reasons = {os.strerror(problem) for problem in problems.values() if problem is not None}
            raise self._cannot_serve(", ".join(sorted(reasons)))
        self._sockaddrs = frozenset(usable)
        return [sockaddr[0] for sockaddr in usable]

    def _cannot_serve(self, reason: str) -> HopError:
        return HopError(
            f"rank {self._rank}: cannot serve on {self._address}: {reason}. Check that this machine has that address "
            "(the `cluster` entry of TF_CONFIG) and that no other process uses the port."
        )

    def _served_here(self) -> HopError:
        return HopError(
            f"rank {self._rank}: cannot serve on {self._address}: this process serves there already. An earlier "
            "strategy keeps the address until its `shutdown()`. Call `shutdown()` before you create another strategy."
        )


def _max_connections() -> int:
    """The limit on the server's connections. It leaves descriptors for training, however many processes connect."""
    return int(min(descriptors.limit() * 0.75, _MANY_CONNECTIONS))


def _is_served_here(sockaddrs: set[tuple]) -> bool:
    """True if another transport of this process serves on one of the addresses."""
    with _serving_lock:
        return any(not sockaddrs.isdisjoint(transport._sockaddrs) for transport in _serving)


def _try_bind(family: int, sockaddr: tuple) -> int | None:
    """Returns the error number if a socket cannot be bound, otherwise None."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(sockaddr)
            probe.listen()
    except OSError as error:
        return error.errno
    return None

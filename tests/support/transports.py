"""Help for tests of transports and the layers above: ranks, handlers, and a proxy that breaks connections."""

from __future__ import annotations

import contextlib
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

from hop_tf.tools.processes.local_cluster import PortReservation
from hop_tf.transport import control_pb2
from hop_tf.transport.base import Message, Transport
from hop_tf.transport.framing import PROTOCOL_VERSION, FrameKind, encode
from hop_tf.transport.in_process import InProcessNetwork, InProcessTransport
from hop_tf.transport.proof import Secret, Session
from hop_tf.transport.tcp_transport import TcpTransport

# Longer than anything takes that works.
DEADLINE_SECONDS = 180.0


@contextlib.contextmanager
def reserved_addresses(count: int) -> Iterator[tuple[str, ...]]:
    """Yields free addresses on this machine. No other reservation gets them meanwhile."""
    with PortReservation(count) as reservation:
        reservation.release()
        yield tuple(f"127.0.0.1:{port}" for port in reservation.ports)


def wait_until(condition: Callable[[], object]) -> None:
    """Polls until a condition holds that no notification announces.

    Raises:
      AssertionError: If the condition does not hold within `DEADLINE_SECONDS`.
    """
    deadline = time.monotonic() + DEADLINE_SECONDS
    pause = threading.Event()
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError("what was awaited did not happen.")
        pause.wait(0.005)


class Collector:
    """A handler that keeps its messages.

    Attributes:
      messages: The messages so far.
    """

    def __init__(self):
        self.messages: list = []
        self._changed = threading.Condition()

    def __call__(self, message) -> None:
        with self._changed:
            self.messages.append(message)
            self._changed.notify_all()

    def wait(self, num_messages: int) -> list:
        """Returns the messages when there are at least `num_messages`.

        Raises:
          AssertionError: If they do not come within `DEADLINE_SECONDS`.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: len(self.messages) >= num_messages, DEADLINE_SECONDS):
                raise AssertionError(f"only {len(self.messages)} of {num_messages} messages came.")
            return list(self.messages)


class Gate:
    """A handler that blocks until it is opened.

    Attributes:
      entered: Set when a message has come.
      opened: Set it to let the handler return.
    """

    def __init__(self):
        self.entered = threading.Event()
        self.opened = threading.Event()

    def __call__(self, message: Message) -> None:
        self.entered.set()
        if not self.opened.wait(DEADLINE_SECONDS):
            raise AssertionError("the gate stayed closed.")


class Proxy:
    """Stands before an address, and breaks or stops the connections to it on demand.

    Args:
      target: "host:port" to pass connections on to.
      change: Called with each piece of data to the target. Returns the data to pass on instead.
      change_back: As `change`, for data from the target.

    Attributes:
      address: "host:port" of the proxy.
      num_bytes: The number of bytes that it has passed on.
    """

    def __init__(
        self,
        target: str,
        change: Callable[[bytes], bytes] = lambda data: data,
        change_back: Callable[[bytes], bytes] = lambda data: data,
    ):
        self._target = split_address(target)
        self._change, self._change_back = change, change_back
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self.num_bytes = 0
        self._flowing = threading.Event()
        self._flowing.set()
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    @classmethod
    def before_socket(cls, transport: TcpTransport) -> Proxy:
        """Returns a proxy before the plain sockets of a transport, which then tells its peers the proxy's port."""
        proxy = cls(f"127.0.0.1:{transport._handshake.socket_port}")
        transport._handshake.socket_port = split_address(proxy.address)[1]
        return proxy

    def cut(self) -> None:
        """Resets all connections."""
        with self._lock:
            for end in self._sockets:
                with contextlib.suppress(OSError):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    end.shutdown(socket.SHUT_RDWR)

    def pause(self) -> None:
        """Stops all data until `resume`. The connections stay open."""
        self._flowing.clear()

    def resume(self) -> None:
        """Ends a `pause`."""
        self._flowing.set()

    def close(self) -> None:
        """Closes all connections, and ends all threads."""
        self._flowing.set()
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # Ends `accept`; `close` alone does not.
        self._server.close()
        self._threads[0].join(DEADLINE_SECONDS)
        self.cut()
        for thread in self._threads:
            thread.join(DEADLINE_SECONDS)

    def _start(self, target: Callable, *args) -> None:
        thread = threading.Thread(target=target, args=args, name="hop_tf proxy", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._server.accept()
                try:
                    far = socket.create_connection(self._target)
                except OSError:
                    near.close()
                    continue
                with self._lock:
                    self._sockets |= {near, far}
                self._start(self._forward, near, far, self._change)
                self._start(self._forward, far, near, self._change_back)

    def _forward(self, source: socket.socket, sink: socket.socket, change: Callable[[bytes], bytes]) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self._flowing.wait()
                self.num_bytes += len(data)
                sink.sendall(change(data))
        with self._lock:
            self._sockets.discard(source)
            for end in (source, sink):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
            source.close()


def split_address(address: str) -> tuple[str, int]:
    """The host and the port of "host:port"."""
    host, _, port = address.rpartition(":")
    return host, int(port)


def make_hello(challenge: bytes, token: str | None = None, **fields) -> tuple[bytes, Session]:
    """Returns the frame of a hello from rank 1 to rank 0, for tests, and the session that it begins.

    Args:
      challenge: The challenge of the other side.
      token: The cluster token.
      **fields: Fields of the `Hello` in `control.proto`, in place of those of a hello that is accepted.
    """
    session = Session(Secret(token), challenge, encrypted=False)
    hello = {
        "protocol_version": PROTOCOL_VERSION,
        "sender": 1,
        "receiver": 0,
        "incarnation": "known",
        "first_sequence": 1,
        "identity": {**TransportTestMixin.identity, "transport.protocol": str(PROTOCOL_VERSION)},
        **fields,
    }
    sealed = session.seal_hello(control_pb2.Hello(**hello).SerializeToString())
    return encode(FrameKind.HELLO, body=sealed), session


def parse_reply(data: bytes) -> control_pb2.HelloReply:
    """Parses the answer to a hello, without checking the signature."""
    return control_pb2.HelloReply.FromString(control_pb2.Signed.FromString(data).body)


class TransportTestMixin:
    """Makes transports for the test methods of a `TestCase`, and closes them.

    Attributes:
      member: The class of transports.
      identity: The config fingerprint that processes compare in greetings.
    """

    member: type[Transport] = InProcessTransport
    identity = {"protocol": "1", "strategy": "HopStrategy", "option.max_iteration_gap": "2"}  # noqa: RUF012

    def make(self, num_ranks: int = 2, **arguments) -> list[Transport]:
        """Makes transports that are not started. `arguments` go to their constructors."""
        if self.member is InProcessTransport:
            self.network = InProcessNetwork(num_ranks)
            transports = [InProcessTransport(rank, self.network, **arguments) for rank in range(num_ranks)]
        else:
            addresses = self.addresses(num_ranks)
            arguments = {"identity": self.identity, **arguments}
            transports = [self.member(rank, addresses, **arguments) for rank in range(num_ranks)]
        for transport in transports:
            self.addCleanup(transport.close)
        return transports

    def start(self, num_ranks: int = 2, **arguments) -> list[Transport]:
        """Makes and starts transports."""
        transports = self.make(num_ranks, **arguments)
        for transport in transports:
            transport.start()
        return transports

    def addresses(self, count: int) -> tuple[str, ...]:
        """Returns addresses that are free until the test ends."""
        return self.enterContext(reserved_addresses(count))

    def start_at(self, rank: int, addresses: tuple[str, ...], **arguments) -> Transport:
        """Starts a transport between processes. By default it acts as a new process."""
        arguments = {"identity": self.identity, "incarnation": secrets.token_hex(8), **arguments}
        transport = self.member(rank, addresses, **arguments)
        self.addCleanup(transport.close)
        transport.start()
        return transport

    def silence(self, transport: Transport) -> None:
        """Makes a transport silent for its peers."""
        if self.member is InProcessTransport:
            self.network.kill(transport.rank)
        else:
            transport.close()

    def register(self, transport: Transport, queue: str = "queue") -> Collector:
        """Registers and returns a handler that collects the messages of a queue."""
        collector = Collector()
        transport.register(queue, collector)
        return collector

    def make_gate(self) -> Gate:
        """Returns a gate that is opened when the test ends."""
        gate = Gate()
        self.addCleanup(gate.opened.set)
        return gate

    def check_works(self, sender: Transport, receiver: Transport) -> None:
        """Checks that a message arrives."""
        collector = self.register(receiver, "check")
        sender.send(receiver.rank, "check", b"hello")
        self.assertEqual(collector.wait(1)[0].header, b"hello")
        receiver.unregister("check")

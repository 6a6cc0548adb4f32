"""Measures the round trips and the rate of a TCP connection in a network."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

from .namespaced import EmulatedNetwork
from .proxy import Proxy


@contextlib.contextmanager
def connected(
    net: EmulatedNetwork | Proxy, near: int = 0, far: int = 1
) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Connects host `near` to host `far` by TCP. Yields both ends, which this process holds."""
    with contextlib.ExitStack() as stack:
        with net.inside(far):
            server = stack.enter_context(socket.create_server((net.addresses[far], 0)))
        address, port = net.address(far, near, server.getsockname()[1]).split(":")
        with net.inside(near):
            near_end = stack.enter_context(socket.create_connection((address, int(port))))
        far_end = stack.enter_context(server.accept()[0])
        for end in (near_end, far_end):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield near_end, far_end


def measure_round_trips(near: socket.socket, far: socket.socket, count: int) -> list[float]:
    """Returns the seconds that a byte takes there and back over a connection, `count` times."""

    def echo() -> None:
        for _ in range(count):
            far.send(far.recv(1))

    seconds = []
    with _running(echo):
        for _ in range(count):
            start = time.perf_counter()
            near.send(b".")
            near.recv(1)
            seconds.append(time.perf_counter() - start)
    return seconds


def measure_rate(near: socket.socket, far: socket.socket, seconds: float) -> float:
    """Returns the rate of a connection in the second half of `seconds`, in bits per second. Then shuts it down."""
    now, num_bytes = time.perf_counter(), 0
    middle, end = now + seconds / 2, now + seconds

    def send() -> None:
        payload = bytes(1 << 20)
        with contextlib.suppress(OSError):
            while True:
                near.sendall(payload)

    with _running(send):
        buffer = bytearray(1 << 20)
        while now < end:
            num_received = far.recv_into(buffer)
            now = time.perf_counter()
            if now > middle:
                num_bytes += num_received
        near.shutdown(socket.SHUT_RDWR)
    return 8 * num_bytes / (now - middle)


@contextlib.contextmanager
def _running(function: Callable[[], None]) -> Iterator[None]:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    yield
    thread.join()

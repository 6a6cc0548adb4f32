"""`Proxy`: a substitute for an emulated network, without root."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import time
from collections.abc import Iterator

from .hosts import Hosts
from .links import MAX_BUNDLE_BYTES, Links
from .paths import TokenBucket, make_paths

# A proxy reads bytes this long before they are due, so that it loses no time if it wakes up late.
_AHEAD_SECONDS = 0.01
START_SECONDS = 30.0


class Proxy(Hosts):
    """A substitute for an `EmulatedNetwork` without root: TCP proxies on the loopback interface.

    Every host is this machine. A program listens at its own port at 127.0.0.1. Others must connect to the result of
    `address`, which differs for each pair. The proxy needs this to know the host of a connection.

    It differs from a network:

    - Only bytes are delayed. Connecting takes no time. A connection that should be refused is accepted and closed.
    - Nothing is lost: a full queue stops its sender. So TCP's congestion control plays no part, `cut` is a stall
      without an end, and `reorder` has no effect.
    - Connections to other addresses than a proxy's are neither delayed nor limited.
    - It runs in a thread of this process: delays are a millisecond or so longer, and more if the process is busy.
    - Closing kills only processes that `popen` has started.

    Args:
      num_hosts: Number of hosts.
      **links: The arguments of `Links`.

    Attributes:
      addresses: 127.0.0.1 for each host.

    Raises:
      ValueError: If a value is out of range.
    """

    def __init__(self, num_hosts: int, **links):
        super().__init__(Links(num_hosts, **links))
        self.addresses = ("127.0.0.1",) * num_hosts
        self._uplinks = [TokenBucket(rate) for rate in self.links.rates]
        self._downlinks = [TokenBucket(rate) for rate in self.links.rates]
        self._paths = make_paths(self.links)
        self._ports: dict[tuple[int, int, int], int] = {}
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def address(self, of: int, seen_from: int, port: int) -> str:
        """The "host:port" at which host `seen_from` reaches 127.0.0.1:`port` of host `of`, which may listen later."""
        self._check_hosts(of, seen_from)
        if self._loop is None:
            raise RuntimeError("The proxies exist only within their `with` statement.")
        with self._lock:
            if (of, seen_from, port) not in self._ports:
                listening = asyncio.run_coroutine_threadsafe(self._listen(of, seen_from, port), self._loop)
                self._ports[of, seen_from, port] = listening.result(START_SECONDS)
            return f"127.0.0.1:{self._ports[of, seen_from, port]}"

    def _start(self) -> None:
        started = threading.Event()
        self._thread = threading.Thread(target=asyncio.run, args=(self._serve(started),), name="proxy", daemon=True)
        self._thread.start()
        started.wait()

    def _stop(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join()

    def _fail(self, kind: str, pairs: list[tuple[int, int]], seconds: float) -> None:
        now = time.monotonic()
        for sender, receiver in pairs:
            self._paths[sender][receiver].fail(kind, now + seconds)

    async def _serve(self, started: threading.Event) -> None:
        """Runs until `_stop`. Then `asyncio.run` cancels every connection."""
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        async with contextlib.AsyncExitStack() as self._servers:
            started.set()
            await self._stopping.wait()

    async def _listen(self, of: int, seen_from: int, port: int) -> int:
        forward = functools.partial(self._forward, of, seen_from, port)
        server = await asyncio.start_server(forward, "127.0.0.1", 0, limit=MAX_BUNDLE_BYTES)
        self._servers.callback(server.close)
        return server.sockets[0].getsockname()[1]

    async def _forward(self, of: int, seen_from: int, port: int, reader, writer) -> None:
        try:
            with _closing(writer):
                far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port, limit=MAX_BUNDLE_BYTES)
                with _closing(far_writer):
                    async with asyncio.TaskGroup() as tasks:
                        self._carry(tasks, reader, far_writer, seen_from, of)
                        self._carry(tasks, far_reader, writer, of, seen_from)
        except* (OSError, asyncio.CancelledError):
            pass  # The connection broke, no program listens there, or the network is closed.

    def _carry(self, tasks: asyncio.TaskGroup, reader, writer, source: int, target: int) -> None:
        """Carries one direction of a connection."""
        pieces = asyncio.Queue(self.links.queue_limit(source) // self.links.bundle_limit(source))
        tasks.create_task(self._take(reader, pieces, source, target))
        tasks.create_task(self._deliver(pieces, writer, source, target))

    async def _take(self, reader, pieces: asyncio.Queue, source: int, target: int) -> None:
        """Takes the bytes that a host sends, at the rate of its link. An empty piece marks the end."""
        path, uplink, piece = self._paths[source][target], self._uplinks[source], None
        while piece != b"":
            piece = await reader.read(self.links.bundle_limit(source))
            sent = uplink.pass_time(time.monotonic(), len(piece))
            await pieces.put((path.arrival(sent), piece))
            await _sleep_until(sent - _AHEAD_SECONDS)

    async def _deliver(self, pieces: asyncio.Queue, writer, source: int, target: int) -> None:
        path, downlink, piece = self._paths[source][target], self._downlinks[target], None
        while piece != b"":
            arrival, piece = await pieces.get()
            await _sleep_until(arrival)
            while path.cut or path.stalled_until > time.monotonic():
                await asyncio.sleep(0.002)
                arrival = time.monotonic()
            await _sleep_until(downlink.pass_time(arrival, len(piece)))
            writer.write(piece)
            await writer.drain()
        writer.write_eof()


@contextlib.contextmanager
def _closing(writer: asyncio.StreamWriter) -> Iterator[None]:
    """Closes a connection after everything is written, or at once after an error."""
    try:
        yield
    except BaseException:
        writer.transport.abort()
        raise
    writer.close()


async def _sleep_until(due: float) -> None:
    seconds = due - time.monotonic()
    if seconds > 0:
        await asyncio.sleep(seconds)

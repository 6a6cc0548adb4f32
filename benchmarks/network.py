"""An emulated network on one Linux machine: hosts of their own, limited rates, delays, and failures.

    with network.Network(4, bandwidth_bits_per_second=1e9, round_trip_seconds=0.1) as net:
        process = net.popen(2, [sys.executable, "train.py"])  # may listen at net.addresses[2]
        with net.inside(0):
            connection = socket.create_connection((net.addresses[2], 5000))
        net.stall(2, 3.0)

Every host is a network namespace with one link to a switch. A link has a rate in each direction, a pair of hosts has a
delay in each direction. Who carries the packets:

- Without delays, the kernel: a pair of virtual Ethernet devices for each host, a bridge, and `tbf` for the rates.
- With delays, a relay: a process that reads packets from a TUN device of each host, keeps them as long as the network
  would, and writes them to the device of the host they are for. Segments of a TCP stream come in bundles of up to
  64 KiB, as they do to a network card. So it needs no `netem`, which many kernels lack, and links can fail as well. It
  has one core: enough for a few Gbit/s of TCP, or for some 50,000 small packets per second.

In both, a link is a token bucket behind a queue that drops what does not fit. A rate counts Ethernet frames of up to
1514 bytes: a TCP stream gets 95.6% of it. TCP is the machine's own, with its congestion control and its limits.

Nothing is visible outside. The namespaces have no names and last as long as the one process that holds them. That
process ends with the one that made the network, however that ends, and takes along every process inside of them.

Requires root. Without it, `Proxy` is a network of sorts for TCP; `emulate` takes what there is.

`python benchmarks/network.py` measures some networks beside what was asked for.
"""

from __future__ import annotations

import argparse
import asyncio
import atexit
import collections
import contextlib
import ctypes
import dataclasses
import fcntl
import functools
import gc
import heapq
import json
import logging
import math
import os
import random
import select
import shutil
import signal
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

_MAX_HOSTS = 250
_FRAME_BYTES = 1514
_ETHERNET_HEADER_BYTES = 14
_TCP_HEADERS_BYTES = 52  # IPv4 and TCP with timestamps
_TCP_SHARE = (_FRAME_BYTES - _ETHERNET_HEADER_BYTES - _TCP_HEADERS_BYTES) / _FRAME_BYTES
_MAX_BUNDLE_BYTES = 65536
_MIN_QUEUE_BYTES = 65536
_MAX_QUEUE_BYTES = 64 << 20
# A link may send that long at full speed after it was idle, and a queue that is sized by itself lasts that much longer
# than a round trip.
_BURST_SECONDS = 0.001
_SPARE_QUEUE_SECONDS = 0.01
# A proxy takes bytes that long before their time, so that it loses no time where it wakes up late.
_AHEAD_SECONDS = 0.01

_START_SECONDS = 30.0
_CLOSE_SECONDS = 10.0
_BATCH_PACKETS = 64
_KEEPER = "keeper"

_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_TUNSETOFFLOAD = 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4, _TUN_F_TSO6 = 0x01, 0x02, 0x04
_SYSTEM_PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])

_libc = ctypes.CDLL(None, use_errno=True)


def available() -> str | None:
    """Returns why there can be no `Network` here, or None where it can."""
    for program, package in (("ip", "iproute2"), ("nsenter", "util-linux"), ("unshare", "util-linux")):
        if shutil.which(program, path=_SYSTEM_PATH) is None:
            return f"the command {program} is missing (package {package})"
    # Into a new namespace, back, which not every sandbox permits, and into another, to make a device.
    unshare, back = [_program("unshare"), "--net"], [_program("nsenter"), f"--net=/proc/{os.getpid()}/ns/net"]
    trial = [*unshare, *back, *unshare, _program("ip"), "tuntap", "add", "dev", "tun0", "mode", "tun"]
    result = subprocess.run(trial, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if result.returncode:
        said = result.stderr.strip() or f"exit status {result.returncode}"
        return f"network namespaces and TUN devices need root and a kernel that has them: {said}"
    return None


def emulate(
    num_hosts: int, *, max_socket_bytes: int | None = None, relay: bool | None = None, **links
) -> Network | Proxy:
    """Returns a `Network`, or a `Proxy` where there can be none, which is logged. Not started yet.

    Args:
      num_hosts: Number of hosts.
      max_socket_bytes: As `Network` takes it. No matter to a proxy.
      relay: As `Network` takes it. No matter to a proxy.
      **links: As `Links` takes them.
    """
    reason = available()
    if reason is None:
        return Network(num_hosts, max_socket_bytes=max_socket_bytes, relay=relay, **links)
    logging.warning("The network is emulated by proxies: %s.", reason)
    return Proxy(num_hosts, **links)


def ring_delays(num_hosts: int, one_way_seconds: float) -> list[list[float]]:
    """Delays between sites on a ring: `one_way_seconds` for each hop of the shorter way around."""
    hosts = range(num_hosts)
    return [[one_way_seconds * min((b - a) % num_hosts, (a - b) % num_hosts) for b in hosts] for a in hosts]


# The sites of a training across three continents, in the order of their ring. The paper prints the largest round trip,
# 277 ms, and the ring's sum, 479 ms, and shows the rest in a picture only: those here are about as long as between such
# places, and give that sum. That the largest is the one between Tokyo and London is taken from section 4.4, too.
#   Distributed Training across the World. 2019. Section 4.4, Figure 2.
SITES = ("Tokyo", "Oregon", "London", "Ohio")
_SITE_ROUND_TRIPS = {
    ("Tokyo", "Oregon"): 0.097,
    ("Oregon", "London"): 0.137,
    ("London", "Ohio"): 0.086,
    ("Ohio", "Tokyo"): 0.159,
    ("Tokyo", "London"): 0.277,
    ("Oregon", "Ohio"): 0.050,
}


def site_delays() -> list[list[float]]:
    """Delays between the `SITES`, half of a round trip each way: `one_way_seconds` for hosts in their order."""
    round_trips = {frozenset(pair): seconds for pair, seconds in _SITE_ROUND_TRIPS.items()}
    return [[round_trips.get(frozenset((a, b)), 0.0) / 2 for b in SITES] for a in SITES]


@dataclasses.dataclass(frozen=True)
class Links:
    """What the links of a network are like.

    Attributes:
      num_hosts: 1 to 250.
      bandwidth_bits_per_second: Rate of each host's link, in each direction. One for all or one for each host; infinite
        for as fast as the machine is.
      round_trip_seconds: Delay there and back between any two hosts, half of it each way.
      one_way_seconds: Instead of that, a matrix: `one_way_seconds[a][b]` is the delay from host a to host b.
      jitter_seconds: Every packet is delayed further, by up to that long (uniformly).
      reorder: Whether jitter lets a packet overtake another. By default it waits for those before it.
      queue_bytes: How much waits in front of a link, or in a stalled one, before packets are dropped. None: what a link
        sends within the host's longest round trip and 10 ms, at least 64 KiB, at most 64 MiB.

    Raises:
      ValueError: If a value is out of range, or both `round_trip_seconds` and `one_way_seconds` are given.
    """

    num_hosts: int
    bandwidth_bits_per_second: float | Sequence[float] = math.inf
    round_trip_seconds: float = 0.0
    one_way_seconds: Sequence[Sequence[float]] | None = None
    jitter_seconds: float = 0.0
    reorder: bool = False
    queue_bytes: int | None = None

    def __post_init__(self):
        if not 1 <= self.num_hosts <= _MAX_HOSTS:
            raise ValueError(f"`num_hosts` must be 1 to {_MAX_HOSTS}. Received: num_hosts={self.num_hosts}.")
        if len(self.rates) != self.num_hosts or not all(rate > 0 for rate in self.rates):
            self._refuse("bandwidth_bits_per_second", "must be positive: one value, or one for each host")
        for name in ("round_trip_seconds", "jitter_seconds"):
            if not 0 <= getattr(self, name) < math.inf:
                self._refuse(name, "must be finite and not negative")
        if self.one_way_seconds is not None:
            self._check_matrix()
        if self.queue_bytes is not None and self.queue_bytes < _MIN_QUEUE_BYTES:
            self._refuse("queue_bytes", f"must be at least {_MIN_QUEUE_BYTES}")

    @functools.cached_property
    def rates(self) -> list[float]:
        """Bits per second of each host's link."""
        bandwidth = self.bandwidth_bits_per_second
        return [*map(float, bandwidth)] if isinstance(bandwidth, Iterable) else [float(bandwidth)] * self.num_hosts

    @functools.cached_property
    def delays(self) -> list[list[float]]:
        """Seconds from host a (row) to host b (column)."""
        if self.one_way_seconds is not None:
            return [[*map(float, row)] for row in self.one_way_seconds]
        return [[self.round_trip_seconds / 2] * self.num_hosts for _ in range(self.num_hosts)]

    @property
    def delayed(self) -> bool:
        """Whether any packet takes longer than the link's rate requires."""
        return self.jitter_seconds > 0 or any(map(any, self.delays))

    def queue_limit(self, host: int) -> int:
        """Bytes that wait in front of a host's link, in either direction."""
        if self.queue_bytes is not None:
            return self.queue_bytes
        others = [other for other in range(self.num_hosts) if other != host]
        longest = max((self.delays[host][other] + self.delays[other][host] for other in others), default=0.0)
        size = self.rates[host] / 8 * (longest + 2 * self.jitter_seconds + _SPARE_QUEUE_SECONDS)
        return round(min(max(size, _MIN_QUEUE_BYTES), _MAX_QUEUE_BYTES))

    def bundle_limit(self, host: int) -> int:
        """Largest number of bytes that TCP hands to a host's link at once."""
        burst = self.rates[host] / 8 * _BURST_SECONDS
        return int(min(max(burst, 2 * _FRAME_BYTES), _MAX_BUNDLE_BYTES))

    def _check_matrix(self) -> None:
        if self.round_trip_seconds:
            self._refuse("round_trip_seconds", "must be left out where `one_way_seconds` is given")
        square = [len(row) for row in self.delays] == [self.num_hosts] * self.num_hosts
        if not square or not all(0 <= delay < math.inf for row in self.delays for delay in row):
            self._refuse("one_way_seconds", "must be one row for each host with a delay to each host, none negative")

    def _refuse(self, name: str, rule: str) -> None:
        raise ValueError(f"`{name}` {rule}. Received: {name}={getattr(self, name)}.")


@dataclasses.dataclass(frozen=True)
class RelayStatistics:
    """What a relay has done so far.

    Attributes:
      num_packets: Packets that it delivered; a bundle counts as one.
      num_dropped: Packets that found a queue full.
      max_late_seconds: Longest time by which it delivered a packet later than the network would have. More than a few
        milliseconds mean that the machine was too busy for what was asked.
      processor_seconds: Processor time that it took.
    """

    num_packets: int
    num_dropped: int
    max_late_seconds: float
    processor_seconds: float


class _Hosts:
    """What a network and its replacement have in common: hosts, their processes, and links that fail.

    A context manager: entering starts it, leaving closes it. May be used from any thread.
    """

    addresses: tuple[str, ...]

    def __init__(self, links: Links):
        self.links = links
        self._processes: list[subprocess.Popen] = []

    @property
    def num_hosts(self) -> int:
        """Number of hosts."""
        return self.links.num_hosts

    def address(self, of: int, seen_from: int, port: int) -> str:
        """Where host `seen_from` reaches what listens at a port of host `of`, as "host:port"."""
        self._check_hosts(of, seen_from)
        return f"{self.addresses[of]}:{port}"

    def command(self, host: int, argv: Sequence[str]) -> list[str]:
        """Returns a command that runs `argv` inside of a host. Its process id is that of the program."""
        self._check_hosts(host)
        return list(argv)

    def popen(self, host: int, argv: Sequence[str], **kwargs) -> subprocess.Popen:
        """Starts a program inside of a host, killed at the latest when the network is closed.

        Args:
          host: The host.
          argv: The program and its arguments.
          **kwargs: As `subprocess.Popen` takes them.
        """
        process = subprocess.Popen(self.command(host, argv), **kwargs)
        self._processes.append(process)
        return process

    @contextlib.contextmanager
    def inside(self, host: int) -> Iterator[None]:
        """Moves the calling thread into a host for a while.

        A socket that it creates there, and a process that it starts, belong to that host for good. Other threads, also
        those that a library starts later on its own, do not.
        """
        self._check_hosts(host)
        yield

    def stall(self, host: int, seconds: float, other: int | None = None) -> None:
        """Holds everything back that is on the way from or to a host, for that long from now.

        What fits into the queue arrives afterwards, in order.

        Args:
          host: The host.
          seconds: How long.
          other: Only what is on the way from or to this one.

        Raises:
          ValueError: If a host does not exist or `seconds` is negative.
          RuntimeError: If the network has no relay.
        """
        if not 0 <= seconds < math.inf:
            raise ValueError(f"`seconds` must be finite and not negative. Received: seconds={seconds}.")
        self._order("stall", host, other, seconds)

    def cut(self, host: int, other: int | None = None) -> None:
        """Drops everything that is on the way from or to a host (or between two), until `restore`. See `stall`."""
        self._order("cut", host, other)

    def restore(self, host: int, other: int | None = None) -> None:
        """Undoes `cut`."""
        self._order("restore", host, other)

    def close(self) -> None:
        """Kills every process of every host and removes the network. May be called twice."""
        atexit.unregister(self.close)
        for process in self._processes:
            process.kill()
        self._stop()
        for process in self._processes:
            process.wait()
        self._processes.clear()

    def __enter__(self):
        atexit.register(self.close)
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()

    def _start(self) -> None:
        raise NotImplementedError

    def _stop(self) -> None:
        raise NotImplementedError

    def _fail(self, kind: str, pairs: list[tuple[int, int]], seconds: float) -> None:
        """Does what `_Path.fail` does, to directed pairs of hosts."""
        raise NotImplementedError

    def _order(self, kind: str, host: int, other: int | None, seconds: float = 0.0) -> None:
        self._check_hosts(host, *([] if other is None else [other]))
        others = range(self.num_hosts) if other is None else [other]
        self._fail(kind, [pair for b in others for pair in {(host, b), (b, host)}], seconds)

    def _check_hosts(self, *hosts: int) -> None:
        for host in hosts:
            if not 0 <= host < self.num_hosts:
                raise ValueError(f"A host must be 0 to {self.num_hosts - 1}. Received: host={host}.")


class Network(_Hosts):
    """Hosts that are network namespaces, with links between them.

    A context manager: entering makes it, leaving removes it and kills what still runs inside of it.

    Args:
      num_hosts: Number of hosts.
      max_socket_bytes: How far the buffers of a TCP connection may grow; the machine's default by default, often 4 to 6
        MiB. One connection has at most that much on the way: it needs twice the rate times the round trip.
      relay: Whether a relay carries the packets; by default only where links have delays. Failures need it. Where the
        kernel lacks what it takes without, there is a relay in any case.
      **links: As `Links` takes them.

    Attributes:
      addresses: IPv4 address of each host; there is no other protocol.

    Raises:
      ValueError: If a value is out of range, or if the links have delays and `relay` is False.
      RuntimeError: On entering, if this machine cannot do it. Nothing is left behind.
    """

    def __init__(self, num_hosts: int, *, max_socket_bytes: int | None = None, relay: bool | None = None, **links):
        super().__init__(Links(num_hosts, **links))
        if max_socket_bytes is not None and max_socket_bytes < 65536:
            raise ValueError(
                f"`max_socket_bytes` must be at least 65536. Received: max_socket_bytes={max_socket_bytes}."
            )
        if relay is False and self.links.delayed:
            raise ValueError(f"`relay` must not be False where links have delays. Received: relay={relay}.")
        self.addresses = tuple(f"10.0.0.{host + 1}" for host in range(num_hosts))
        self._max_socket_bytes = max_socket_bytes
        self._wants_relay = self.links.delayed if relay is None else relay
        self._has_relay = False
        self._namespaces: list[str] = []
        self._keeper: subprocess.Popen | None = None
        self._lock = threading.Lock()

    @property
    def relayed(self) -> bool:
        """Whether a relay carries the packets, not the kernel alone."""
        return self._has_relay

    def command(self, host: int, argv: Sequence[str]) -> list[str]:
        return [_program("nsenter"), f"--net={self._namespace(host)}", "--", *argv]

    @contextlib.contextmanager
    def inside(self, host: int) -> Iterator[None]:
        with open("/proc/thread-self/ns/net") as home, open(self._namespace(host)) as namespace:
            _enter(namespace.fileno())
            try:
                yield
            finally:
                _enter(home.fileno())

    def statistics(self) -> RelayStatistics:
        """Returns what the relay has done so far.

        Raises:
          RuntimeError: If the network has none.
        """
        return RelayStatistics(**self._ask_relay({"order": "statistics"}))

    def _start(self) -> None:
        reason = available()
        if reason is not None:
            raise RuntimeError(f"There can be no network here: {reason}.")
        # A session of its own: Ctrl-C reaches this process, which then ends the keeper in an orderly manner.
        argv = [sys.executable, "-P", os.path.abspath(__file__), _KEEPER]
        pipe = subprocess.PIPE
        self._keeper = subprocess.Popen(argv, stdin=pipe, stdout=pipe, bufsize=0, start_new_session=True)
        delays = {"round_trip_seconds": 0.0, "one_way_seconds": self.links.delays}
        links = dataclasses.replace(self.links, bandwidth_bits_per_second=self.links.rates, **delays)
        plan = {"relay": self._wants_relay, "max_socket_bytes": self._max_socket_bytes, "addresses": self.addresses}
        made = self._ask({**plan, "links": dataclasses.asdict(links)})
        self._has_relay = made["relay"]
        self._namespaces = [f"/proc/{self._keeper.pid}/fd/{descriptor}" for descriptor in made["namespaces"]]

    def _stop(self) -> None:
        keeper, self._keeper, self._namespaces = self._keeper, None, []
        if keeper is None:
            return
        # A process that was forked from this one may hold the pipe open: its end alone might not be noticed.
        with contextlib.suppress(OSError), keeper.stdin:
            keeper.stdin.write(json.dumps({"order": "close"}).encode() + b"\n")
        try:
            keeper.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            keeper.kill()
            keeper.wait()
        keeper.stdout.close()

    def _fail(self, kind: str, pairs: list[tuple[int, int]], seconds: float) -> None:
        self._ask_relay({"order": kind, "pairs": pairs, "seconds": seconds})

    def _namespace(self, host: int) -> str:
        self._check_hosts(host)
        if not self._namespaces:
            raise RuntimeError("The network is there only between entering and leaving its `with` statement.")
        return self._namespaces[host]

    def _ask_relay(self, order: dict) -> dict:
        if not self._has_relay:
            raise RuntimeError("The kernel carries this network's packets. Give it `relay=True` for what a relay does.")
        return self._ask(order)

    def _ask(self, order: dict) -> dict:
        """Has the keeper obey. Blocks until it has."""
        with self._lock:
            if self._keeper is None:
                raise RuntimeError("The network is closed.")
            with contextlib.suppress(BrokenPipeError):
                self._keeper.stdin.write(json.dumps(order).encode() + b"\n")
            answer = self._keeper.stdout.readline()
        if not answer:
            raise RuntimeError("The process that holds the network has ended.")
        value = json.loads(answer)
        if "error" in value:
            raise RuntimeError(f"The network cannot be made: {value['error']}")
        return value


class Proxy(_Hosts):
    """What comes closest to a `Network` without root: TCP proxies on the loopback interface.

    Every host is this machine. A program listens at a port of its own at 127.0.0.1, and others must connect to what
    `address` returns, which differs for each pair: the proxy cannot tell otherwise where a connection comes from.

    It differs from a network:

    - Only bytes are delayed. To connect, and to be refused, takes no time: a refused connection is closed instead.
    - Nothing is lost: a full queue stops its sender. So TCP's congestion control plays no part, `cut` is a stall
      without an end, and `reorder` has no effect.
    - What does not go through a proxy's address is neither delayed nor limited.
    - It runs in a thread of this process: delays are a millisecond or so longer, more where the process is busy.
    - Only processes that `popen` started are killed when it is closed.

    Args:
      num_hosts: Number of hosts.
      **links: As `Links` takes them.

    Attributes:
      addresses: 127.0.0.1 for each host.

    Raises:
      ValueError: If a value is out of range.
    """

    def __init__(self, num_hosts: int, **links):
        super().__init__(Links(num_hosts, **links))
        self.addresses = ("127.0.0.1",) * num_hosts
        self._uplinks = [_Link(rate) for rate in self.links.rates]
        self._downlinks = [_Link(rate) for rate in self.links.rates]
        self._paths = _make_paths(self.links)
        self._ports: dict[tuple[int, int, int], int] = {}
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def address(self, of: int, seen_from: int, port: int) -> str:
        """Where host `seen_from` reaches what listens, now or later, at 127.0.0.1:`port` on behalf of host `of`."""
        self._check_hosts(of, seen_from)
        if self._loop is None:
            raise RuntimeError("The proxies are there only between entering and leaving their `with` statement.")
        with self._lock:
            if (of, seen_from, port) not in self._ports:
                listening = asyncio.run_coroutine_threadsafe(self._listen(of, seen_from, port), self._loop)
                self._ports[of, seen_from, port] = listening.result(_START_SECONDS)
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
        """Runs until it is told to stop; then `asyncio.run` cancels every connection."""
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        async with contextlib.AsyncExitStack() as self._servers:
            started.set()
            await self._stopping.wait()

    async def _listen(self, of: int, seen_from: int, port: int) -> int:
        forward = functools.partial(self._forward, of, seen_from, port)
        server = await asyncio.start_server(forward, "127.0.0.1", 0, limit=_MAX_BUNDLE_BYTES)
        self._servers.callback(server.close)
        return server.sockets[0].getsockname()[1]

    async def _forward(self, of: int, seen_from: int, port: int, reader, writer) -> None:
        try:
            with _closing(writer):
                far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port, limit=_MAX_BUNDLE_BYTES)
                with _closing(far_writer):
                    async with asyncio.TaskGroup() as tasks:
                        self._carry(tasks, reader, far_writer, seen_from, of)
                        self._carry(tasks, far_reader, writer, of, seen_from)
        except* (OSError, asyncio.CancelledError):
            pass  # the connection broke, nobody listens there, or the network is closed

    def _carry(self, tasks: asyncio.TaskGroup, reader, writer, source: int, target: int) -> None:
        """Carries one direction of a connection."""
        pieces = asyncio.Queue(self.links.queue_limit(source) // self.links.bundle_limit(source))
        tasks.create_task(self._take(reader, pieces, source, target))
        tasks.create_task(self._deliver(pieces, writer, source, target))

    async def _take(self, reader, pieces: asyncio.Queue, source: int, target: int) -> None:
        """Takes what a host sends, at the rate of its link. Its end is an empty piece."""
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
    """Closes a connection once everything is written, or at once if something went wrong."""
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


class _Link:
    """One direction of a host's link: a token bucket, and a bounded queue in front of it.

    The bucket holds one bundle. With rate r, a bundle of n bytes that comes at time t leaves at

        t' = max(t, t'_before + n / r)
    """

    def __init__(self, bits_per_second: float, queue_bytes: float = math.inf):
        self._seconds_per_byte = 8 / bits_per_second
        self._queue_seconds = math.inf if math.isinf(bits_per_second) else queue_bytes * self._seconds_per_byte
        self._last = 0.0

    def pass_time(self, now: float, num_bytes: int) -> float | None:
        """Returns when that many bytes that come now have passed; None, and nothing changes, if the queue is full."""
        passed = max(now, self._last + num_bytes * self._seconds_per_byte)
        if passed - now > self._queue_seconds:
            return None
        self._last = passed
        return passed


class _Path:
    """The way from one host to another, between their links: a delay, and failures."""

    def __init__(self, links: Links, source: int, target: int, generator: random.Random):
        self.target = target
        self.cut = False
        self.stalled_until = 0.0
        self.held: collections.deque[tuple[bytes, int]] = collections.deque()  # packets and their sizes
        self.held_bytes = 0
        self._delay = links.delays[source][target]
        self._jitter = links.jitter_seconds
        self._reorder = links.reorder
        self._generator = generator
        self._last_arrival = 0.0

    def arrival(self, sent: float) -> float:
        """Returns when something arrives that was sent at that time."""
        if not self._jitter:
            return sent + self._delay
        arrival = sent + self._delay + self._generator.uniform(0, self._jitter)
        if not self._reorder:
            arrival = self._last_arrival = max(arrival, self._last_arrival)
        return arrival

    def fail(self, kind: str, until: float) -> None:
        """Stalls the path until a time, cuts it, or restores it."""
        if kind == "stall":
            self.stalled_until = max(self.stalled_until, until)
        else:
            self.cut = kind == "cut"


def _make_paths(links: Links) -> list[list[_Path]]:
    generator, hosts = random.Random(0), range(links.num_hosts)
    return [[_Path(links, source, target, generator) for target in hosts] for source in hosts]


class _Relay:
    """Carries packets between devices, and obeys the owner of the network.

    Without devices it only waits for orders.

    Args:
      links: The links.
      devices: The hosts' TUN devices; none where the kernel carries the packets.
    """

    def __init__(self, links: Links, devices: Sequence[int]):
        self._devices = {device: host for host, device in enumerate(devices)}
        self._outputs = list(devices)
        self._queue_limits = [links.queue_limit(host) for host in range(links.num_hosts)]
        self._uplinks = [_Link(*each) for each in zip(links.rates, self._queue_limits, strict=True)]
        self._downlinks = [_Link(*each) for each in zip(links.rates, self._queue_limits, strict=True)]
        self._paths = _make_paths(links)
        # Time, a number that orders what is due at the same time, what to do, and with what.
        self._events: list[tuple[float, int, Callable, tuple]] = []
        self._num_events = 0
        self._num_packets = 0
        self._num_dropped = 0
        self._max_late_seconds = 0.0
        self._start_processor_seconds = time.process_time()

    def run(self) -> None:
        """Runs until the owner closes the network or is gone."""
        while True:
            timeout = max(0.0, self._events[0][0] - time.monotonic()) if self._events else None
            # Unlike epoll, select can wait for less than a millisecond.
            readable, _, _ = select.select([0, *self._outputs], [], [], timeout)
            for descriptor in readable:
                if descriptor:
                    self._take(descriptor)
                elif not self._obey(_receive()):
                    return
            self._do_what_is_due()

    def _obey(self, order: dict | None) -> bool:
        """Obeys an order. False if it was the last one."""
        if order is None or order["order"] == "close":
            return False
        if order["order"] == "statistics":
            _send(dataclasses.asdict(self._statistics()))
            return True
        until = time.monotonic() + order["seconds"]
        for source, target in order["pairs"]:
            path = self._paths[source][target]
            path.fail(order["order"], until)
            self._schedule(path.stalled_until, self._release, path)
        _send({})
        return True

    def _statistics(self) -> RelayStatistics:
        return RelayStatistics(
            num_packets=self._num_packets,
            num_dropped=self._num_dropped,
            max_late_seconds=self._max_late_seconds,
            processor_seconds=time.process_time() - self._start_processor_seconds,
        )

    def _schedule(self, due: float, action: Callable, *arguments) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (due, self._num_events, action, arguments))

    def _do_what_is_due(self) -> None:
        now, events = time.monotonic(), self._events
        while events and events[0][0] <= now:
            due, _, action, arguments = heapq.heappop(events)
            action(due, *arguments)

    def _take(self, device: int) -> None:
        """Takes what a host has sent."""
        source = self._devices[device]
        with contextlib.suppress(BlockingIOError):
            for _ in range(_BATCH_PACKETS):
                packet = os.read(device, _MAX_BUNDLE_BYTES + 1024)
                path = self._find_path(source, packet)
                if path is not None:
                    self._send_up(source, path, packet)

    def _find_path(self, source: int, packet: bytes) -> _Path | None:
        """Finds the way by the last byte of the IPv4 address; none for what is for nobody, as multicast is."""
        header = _BUNDLE.size
        if packet[header] >> 4 != 4 or packet[header + 16 : header + 19] != b"\x0a\x00\x00":
            return None
        target = packet[header + 19] - 1
        return self._paths[source][target] if 0 <= target < len(self._outputs) else None

    def _send_up(self, source: int, path: _Path, packet: bytes) -> None:
        size = _num_wire_bytes(packet)
        sent = self._uplinks[source].pass_time(time.monotonic(), size)
        if sent is None:
            self._num_dropped += 1
        else:
            self._schedule(path.arrival(sent), self._arrive, path, packet, size)

    def _arrive(self, now: float, path: _Path, packet: bytes, size: int) -> None:
        """A packet comes to the link of the host that it is for."""
        if path.cut:
            return
        if path.stalled_until > now:
            return self._hold(path, packet, size)
        passed = self._downlinks[path.target].pass_time(now, size)
        if passed is None:
            self._num_dropped += 1
        else:
            self._schedule(passed, self._deliver, path, packet)

    def _hold(self, path: _Path, packet: bytes, size: int) -> None:
        if path.held_bytes + size > self._queue_limits[path.target]:
            self._num_dropped += 1
        else:
            path.held.append((packet, size))
            path.held_bytes += size

    def _release(self, now: float, path: _Path) -> None:
        """Lets go what a stall has held, unless it goes on."""
        if path.stalled_until <= now:
            held, path.held, path.held_bytes = path.held, collections.deque(), 0
            for packet, size in held:
                self._arrive(now, path, packet, size)

    def _deliver(self, due: float, path: _Path, packet: bytes) -> None:
        if path.cut:
            return
        self._max_late_seconds = max(self._max_late_seconds, time.monotonic() - due)
        self._num_packets += 1
        # The host's device may be full or, when the host is being removed, down: then a packet is lost, as anywhere.
        with contextlib.suppress(OSError):
            os.write(self._outputs[path.target], packet)


# What the kernel puts in front of a packet (struct virtio_net_hdr): flags, kind of bundle, length of the headers,
# bytes of each segment, and which checksum is still to be filled in.
_BUNDLE = struct.Struct("=BBHHHH")


def _num_wire_bytes(packet: bytes) -> int:
    """Returns the bytes of the Ethernet frames that a packet, or a bundle of segments, is sent in."""
    _, kind, _, segment, _, _ = _BUNDLE.unpack_from(packet)
    size = len(packet) - _BUNDLE.size
    num_frames = 1
    if kind and segment:
        num_frames = -(-max(1, size - _TCP_HEADERS_BYTES) // segment)
    return size + num_frames * _ETHERNET_HEADER_BYTES + (num_frames - 1) * _TCP_HEADERS_BYTES


def _keep() -> None:
    """Makes a network, holds it until the owner is gone, and takes along whatever runs inside of it.

    Runs as a program of its own. The namespaces have no names: they are there as long as this process has them open.
    """
    owner = os.getppid()
    plan = _receive()
    if plan is None:
        return
    links = Links(**plan["links"])
    try:
        namespaces, devices = _make_namespaces(plan, links)
    except (OSError, RuntimeError) as error:
        _send({"error": str(error)})
        return
    _go_first()
    gc.freeze()
    gc.disable()
    try:
        _send({"namespaces": namespaces, "relay": bool(devices)})
        _Relay(links, devices).run()
    finally:
        _kill_inside(namespaces, spared={os.getpid(), owner})


def _go_first() -> None:
    """Lets this process run whenever it has something to do, however busy the hosts keep the machine."""
    try:
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    except OSError:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, -20)


def _make_namespaces(plan: dict, links: Links) -> tuple[list[int], list[int]]:
    """Returns the hosts' namespaces, and their TUN devices if a relay has to carry the packets."""
    with open("/proc/self/ns/net") as home:
        try:
            if plan["relay"] or not _kernel_can(links):
                made = _make_relayed(plan["addresses"], links)
            else:
                made = _make_bridged(plan["addresses"], links), []
            for namespace in made[0]:
                _enter(namespace)
                _set_socket_bytes(plan["max_socket_bytes"])
            return made
        finally:
            _enter(home.fileno())


def _kernel_can(links: Links) -> bool:
    """Whether the kernel has what `_make_bridged` takes: tried out where it leaves no trace."""
    os.close(_new_namespace())
    try:
        _ip("link add switch type bridge", "link add port0 type veth peer name eth0")
        _limit("port0", links, links.rates.index(min(links.rates)))
    except RuntimeError:
        return False
    return True


def _make_bridged(addresses: Sequence[str], links: Links) -> list[int]:
    """Makes a namespace for each host, and one for the bridge between them; returns the hosts'."""
    switch = _new_namespace()
    _ip("link add switch type bridge", "link set switch up")
    namespaces = []
    for host, address in enumerate(addresses):
        namespaces.append(_new_namespace())
        _ip("link set lo up")
        _enter(switch)
        there = f"/proc/{os.getpid()}/fd/{namespaces[-1]}"
        bundle = f"gso_max_size {links.bundle_limit(host)}"
        _ip(f"link add port{host} type veth peer name eth0 netns {there}")
        _ip(f"link set port{host} {bundle} master switch up")
        _limit(f"port{host}", links, host)
        _enter(namespaces[-1])
        _ip(f"address add {address}/24 dev eth0", f"link set eth0 {bundle} up")
        _limit("eth0", links, host)
    return namespaces


def _make_relayed(addresses: Sequence[str], links: Links) -> tuple[list[int], list[int]]:
    namespaces, devices = [], []
    for host, address in enumerate(addresses):
        namespaces.append(_new_namespace())
        devices.append(_make_device("eth0"))
        _ip(
            "link set lo up",
            f"address add {address}/24 dev eth0",
            f"link set eth0 gso_max_size {links.bundle_limit(host)} txqueuelen 10000 up",
        )
    return namespaces, devices


def _make_device(name: str) -> int:
    """Makes a TUN device in this process's namespace that hands out and takes bundles of segments."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR))
    fcntl.ioctl(device, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4 | _TUN_F_TSO6)
    return device


def _limit(device: str, links: Links, host: int) -> None:
    rate = links.rates[host]
    if math.isfinite(rate):
        burst = max(links.bundle_limit(host), int(rate / 8 * _BURST_SECONDS)) + _FRAME_BYTES
        limit = f"rate {int(rate)}bit burst {burst} limit {links.queue_limit(host)}"
        _execute(["tc", "qdisc", "add", "dev", device, "root", "tbf", *limit.split()])


def _set_socket_bytes(max_socket_bytes: int | None) -> None:
    if max_socket_bytes is not None:
        for name in ("rmem", "wmem"):
            path = f"/proc/sys/net/ipv4/tcp_{name}"
            with open(path) as file:
                smallest, first, _ = file.read().split()
            with open(path, "w") as file:
                file.write(f"{smallest} {min(int(first), max_socket_bytes)} {max_socket_bytes}")


def _new_namespace() -> int:
    """Moves this process into a new network namespace, and returns what keeps that open."""
    if _libc.unshare(_CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"no new network namespace: {os.strerror(ctypes.get_errno())}")
    return os.open("/proc/self/ns/net", os.O_RDONLY)


def _enter(namespace: int) -> None:
    """Moves this thread into a network namespace."""
    if _libc.setns(namespace, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"no way into a network namespace: {os.strerror(ctypes.get_errno())}")


def _program(name: str) -> str:
    return shutil.which(name, path=_SYSTEM_PATH) or name


def _ip(*lines: str) -> None:
    _execute(["ip", "-batch", "-"], "\n".join(lines))


def _execute(argv: Sequence[str], text: str = "") -> None:
    try:
        result = subprocess.run([_program(argv[0]), *argv[1:]], input=text, capture_output=True, text=True)
    except OSError as error:
        raise RuntimeError(f"cannot run {argv[0]}: {error}") from error
    if result.returncode:
        raise RuntimeError(f"{' '.join(argv)}: {result.stderr.strip()} {text}")


def _kill_inside(namespaces: Iterable[int], spared: set[int]) -> None:
    """Kills processes until none is left whose network namespace is one of these."""
    inside = {(os.fstat(namespace).st_dev, os.fstat(namespace).st_ino) for namespace in namespaces}
    deadline = time.monotonic() + _CLOSE_SECONDS / 2
    while _kill_once(inside, spared) and time.monotonic() < deadline:
        time.sleep(0.005)


def _kill_once(inside: set[tuple[int, int]], spared: set[int]) -> int:
    num_killed = 0
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        # It may end at any moment; held by a descriptor, its id cannot come to be another's.
        with contextlib.suppress(OSError), open(os.pidfd_open(pid)) as process:
            namespace = os.stat(f"/proc/{pid}/ns/net")
            if (namespace.st_dev, namespace.st_ino) in inside and pid not in spared:
                signal.pidfd_send_signal(process.fileno(), signal.SIGKILL)
                num_killed += 1
    return num_killed


def _send(value: dict) -> None:
    os.write(1, json.dumps(value).encode() + b"\n")


def _receive() -> dict | None:
    """Receives the next order; None if the owner is gone."""
    with open(0, "rb", buffering=0, closefd=False) as orders:
        line = orders.readline()
    return json.loads(line) if line.endswith(b"\n") else None


@contextlib.contextmanager
def connected(net: Network | Proxy, near: int = 0, far: int = 1) -> Iterator[tuple[socket.socket, socket.socket]]:
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
    """Returns the bits per second that a connection carries in the second half of that time. Breaks it off then."""
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


_CHECKS = (
    # bits per second, round trip in seconds, relay
    (math.inf, 0.0, False),
    (10e9, 0.0, False),
    (1e9, 0.0, False),
    (100e6, 0.0, False),
    (10e6, 0.0, False),
    (math.inf, 0.0, True),
    (1e9, 0.0, True),
    (1e9, 0.001, True),
    (1e9, 0.02, True),
    (100e6, 0.1, True),
    (10e6, 0.3, True),
    (10e6, 1.0, True),
)


def _check(seconds: float) -> None:
    """Prints what was asked for beside what is measured."""
    titles = [
        "",
        "Mbit/s asked",
        "TCP at most",
        "measured",
        "ms asked",
        "measured",
        "relay CPU %",
        "late ms",
        "dropped",
    ]
    print(" ".join(f"{title:>12}" for title in titles))
    for rate, round_trip, relay in _CHECKS:
        window = None if math.isinf(rate) else max(4 << 20, int(4 * rate / 8 * round_trip))
        links = {"bandwidth_bits_per_second": rate, "round_trip_seconds": round_trip}
        with Network(2, relay=relay, max_socket_bytes=window, **links) as net:
            print(" ".join(_check_network(net, rate, round_trip, seconds)), flush=True)


def _check_network(net: Network, rate: float, round_trip: float, seconds: float) -> list[str]:
    start = time.perf_counter()
    with connected(net) as ends:
        round_trips = measure_round_trips(*ends, count=int(max(3, min(200, 1 / (round_trip + 1e-9)))))
    with connected(net) as ends:
        found = measure_rate(*ends, seconds=seconds + 8 * round_trip)
    elapsed = time.perf_counter() - start
    values = [rate / 1e6, _TCP_SHARE * rate / 1e6, found / 1e6]
    values += [round_trip * 1e3, statistics.median(round_trips) * 1e3]
    if net.relayed:
        did = net.statistics()
        values += [100 * did.processor_seconds / elapsed, did.max_late_seconds * 1e3, did.num_dropped]
    return [f"{'relay' if net.relayed else 'kernel':>12}", *(f"{value:>12.2f}" for value in values)]


def main() -> None:
    """Checks a few networks; or, for a network that starts this file as a program, keeps one."""
    parser = argparse.ArgumentParser(description="Measures emulated networks.")
    parser.add_argument("role", nargs="?", choices=(_KEEPER,), help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=1.0, help="Seconds for each rate, besides 8 round trips.")
    arguments = parser.parse_args()
    if arguments.role == _KEEPER:
        return _keep()
    reason = available()
    if reason is not None:
        sys.exit(f"There can be no network here: {reason}.")
    _check(arguments.seconds)


if __name__ == "__main__":
    main()

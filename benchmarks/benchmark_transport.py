"""Measures how fast two ranks exchange messages, compared with plain sockets.

    python benchmarks/benchmark_transport.py --sizes=4096,1048576,104857600 --rounds=5
    python benchmarks/benchmark_transport.py --members=tcp,tcp_unchecked  # what checksums cost
    python benchmarks/benchmark_transport.py --links=1e8:0.277,1e8:0.277:0.05,1e8:1 --sizes=2000000 \
        --bytes_per_round=300000000 --members=spread,ordered

Ranks are processes: on loopback, or on hosts of an emulated network (`network`, which needs root). A link is then given
as bits per second, round trip in seconds and optionally jitter in seconds, which lets packets overtake each other.

For each size: one way (rank 0 to rank 1) and both ways at once. GB/s counts the payload of one direction. Processor
seconds are those of both processes together, for each GB that was moved in either direction. Latency is half of a
round trip. The members take turns within every round, so that a busy machine slows all of them; medians are shown.
One more round comes first, to warm up.

    memory         payloads of ranks of one machine go through shared memory
    tcp            payloads go through sockets
    tcp_unchecked  the same without checksums
    ordered        chunks as of an all-reduce, which travel in order on one lane
    spread         the same over as many lanes as the transport chooses
    grpc           the transport without a bulk connection
    socket         a plain TCP connection
"""

from __future__ import annotations

import contextlib
import socket
import statistics
import struct
import threading
import time
from collections.abc import Mapping, Sequence

import numpy as np
import ranks
import results
from absl import app, flags

from hop_tf.options import CommunicationOptions
from hop_tf.transport.base import BULK_LANE
from hop_tf.transport.grpc_transport import GrpcTransport
from hop_tf.transport.tcp_transport import TcpTransport

_SIZES = flags.DEFINE_list("sizes", ["4096", "65536", "1048576", "16777216", "104857600"], "Payload sizes in bytes.")
_LINKS = flags.DEFINE_list("links", [ranks.LOOPBACK], "loopback, or such as 1e8:0.277.")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Rounds; medians over them are shown.", lower_bound=1)
_MEMBERS = flags.DEFINE_list("members", ["memory", "tcp", "grpc", "socket"], "What to measure.")
_BYTES_PER_ROUND = flags.DEFINE_integer("bytes_per_round", 400 << 20, "About how much to move in each measurement.")

_TIMEOUT_SECONDS = 120.0
_MAX_MESSAGES = 2000
_NUM_ROUND_TRIPS = 50
_LENGTH = struct.Struct("<Q")


class Member:
    """One end of a pair. Counts the messages that arrive."""

    def __init__(self):
        self._arrived = threading.Semaphore(0)

    def wait(self, num_messages: int) -> None:
        """Waits for messages, and takes them off the count."""
        for _ in range(num_messages):
            if not self._arrived.acquire(timeout=_TIMEOUT_SECONDS):
                raise TimeoutError("a message is missing.")


class TransportMember(Member):
    """A transport of hop_tf."""

    def __init__(self, name: str, rank: int, addresses: Sequence[str], rate: float | None):
        super().__init__()
        link = {"bandwidth_bits_per_second": rate} if rate else {}
        about = {"identity": {}, "options": CommunicationOptions(timeout_seconds=_TIMEOUT_SECONDS, **link)}
        if name == "grpc":
            self._transport = GrpcTransport(rank, addresses, **about)
        else:
            self._transport = TcpTransport(rank, addresses, shares_memory=name == "memory", **about)
        if name == "tcp_unchecked":
            self._transport._handshake._encrypted = True  # As where the connection has checksums of its own.
        self._lane = {"ordered": BULK_LANE, "spread": None}.get(name, 0)
        self._peer = 1 - rank
        self._transport.register("benchmark", lambda message: self._arrived.release())
        self._transport.start()
        self._transport.connect(self._peer)

    def send(self, payload: np.ndarray) -> None:
        self._transport.send(self._peer, "benchmark", b"", [payload], self._lane)

    def close(self) -> None:
        self._transport.flush(self._peer, 5.0)
        self._transport.close()


class SocketMember(Member):
    """A plain TCP connection, for comparison."""

    def __init__(self, name: str, rank: int, addresses: Sequence[str], rate: float | None):
        super().__init__()
        host, _, port = addresses[0].rpartition(":")
        address = host, int(port)
        if rank == 0:
            with socket.create_server(address) as server:
                self._socket, _ = server.accept()
        else:
            self._socket = _connect(address)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._thread = threading.Thread(target=self._receive, daemon=True)
        self._thread.start()

    def send(self, payload: np.ndarray) -> None:
        self._socket.sendall(_LENGTH.pack(payload.nbytes))
        self._socket.sendall(payload)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(_TIMEOUT_SECONDS)
        self._socket.close()

    def _receive(self) -> None:
        length, buffer = bytearray(_LENGTH.size), bytearray()
        with contextlib.suppress(ConnectionError):
            while self._fill(memoryview(length)):
                (size,) = _LENGTH.unpack(length)
                if size > len(buffer):
                    buffer = bytearray(size)
                if not self._fill(memoryview(buffer)[:size]):
                    return
                self._arrived.release()

    def _fill(self, view: memoryview) -> bool:
        return self._socket.recv_into(view, 0, socket.MSG_WAITALL) == view.nbytes


def _connect(address: tuple[str, int]) -> socket.socket:
    deadline = time.monotonic() + _TIMEOUT_SECONDS
    while True:
        try:
            return socket.create_connection(address)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


# In each rank.


def _ping(member: Member, rank: int, payload: np.ndarray) -> float:
    """Sends a message from rank 0 to rank 1 and back. Returns the seconds of the round trip, at rank 0."""
    start = time.perf_counter()
    if rank == 1:
        member.wait(1)
    member.send(payload)
    if rank == 0:
        member.wait(1)
    return time.perf_counter() - start


def _transfer(member: Member, rank: int, payload: np.ndarray, num_messages: int, num_back: int) -> tuple[float, float]:
    """Sends messages to rank 1 and back, at once. Returns rank 0's seconds, and processor seconds of this rank."""
    num_sent, num_received = (num_messages, num_back) if rank == 0 else (num_back, num_messages)
    _ping(member, rank, payload[:1])
    start, processor_start = time.perf_counter(), time.process_time()
    for _ in range(num_sent):
        member.send(payload)
    member.wait(num_received + (rank == 0))
    if rank == 1:
        member.send(payload[:1])
    return time.perf_counter() - start, time.process_time() - processor_start


def _measure(case: Mapping, rank: int) -> list[np.ndarray]:
    """Returns for each size and member, in turn, the values of all rounds: seconds, and processor seconds."""
    pairs = zip(case["members"], case["addresses"], strict=True)
    classes = {"socket": SocketMember}
    members = [classes.get(name, TransportMember)(name, rank, addresses, case["rate"]) for name, addresses in pairs]
    found = []
    for size, num_messages in case["sizes"]:
        payload = np.ones(size, np.uint8)
        of_members = [[] for _ in members]
        for _ in range(1 + case["rounds"]):
            for member, of_rounds in zip(members, of_members, strict=True):
                one_way = _transfer(member, rank, payload, num_messages, 0)
                both_ways = _transfer(member, rank, payload, num_messages, num_messages)
                pings = [_ping(member, rank, payload) for _ in range(min(num_messages, _NUM_ROUND_TRIPS))]
                of_rounds.append((*one_way, *both_ways, statistics.median(pings)))
        found += [np.array(of_rounds[1:]).T for of_rounds in of_members]
    for member in members:
        _ping(member, rank, payload[:1])
        member.close()
    return found


# In the parent.


def _compare(link: str) -> None:
    """Shows all members on a link."""
    sizes = [(size, max(1, min(_MAX_MESSAGES, _BYTES_PER_ROUND.value // size))) for size in map(int, _SIZES.value)]
    case = {"members": _MEMBERS.value, "sizes": sizes, "rounds": _ROUNDS.value, "rate": None}
    rate, emulation = link, {}
    if link != ranks.LOOPBACK:
        rate, round_trip, jitter = [*link.split(":"), "0", "0"][:3]
        case["rate"], jitter = float(rate), float(jitter)
        emulation = {"round_trip_seconds": float(round_trip), "jitter_seconds": jitter, "reorder": jitter > 0}
    found = ranks.run(_measure, case, 2, rate, num_ports=len(_MEMBERS.value), timeout_seconds=3600, **emulation)
    kinds = [(*size, name) for size in sizes for name in _MEMBERS.value]
    for (size, num_messages, name), ours, theirs in zip(kinds, *found, strict=True):
        gigabytes = size * num_messages / 1e9
        one_way, processor, both_ways, processor_both, ping = ours
        values = {
            "GB/s one way": gigabytes / one_way,
            "CPU s/GB one way": (processor + theirs[1]) / gigabytes,
            "GB/s each way": gigabytes / both_ways,
            "CPU s/GB each way": (processor_both + theirs[3]) / (2 * gigabytes),
            "latency ms": ping / 2 * 1e3,
        }
        results.show(f"{link} {size} {name}", values)


def main(_: list[str]) -> None:
    for link in _LINKS.value:
        _compare(link)


if __name__ == "__main__":
    app.run(main)

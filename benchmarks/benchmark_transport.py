"""Measures how fast two processes on this machine exchange messages, compared with its sockets.

    python benchmarks/benchmark_transport.py --sizes=4096,1048576,104857600 --rounds=5
    python benchmarks/benchmark_transport.py --members=tcp,tcp_unchecked  # what checksums cost

For each size: one way (rank 0 to rank 1) and both ways at once. GB/s counts the payload of one direction. Processor
seconds are those of both processes together, for each GB that was moved in either direction. Latency is half of a
round trip. The members take turns within every round, so that a busy machine slows all of them; medians are shown.
One more round comes first, to warm up.
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
from hop_tf.transport.base import Transport
from hop_tf.transport.grpc_transport import GrpcTransport
from hop_tf.transport.tcp_transport import TcpTransport

_SIZES = flags.DEFINE_list("sizes", ["4096", "65536", "1048576", "16777216", "104857600"], "Payload sizes in bytes.")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Rounds; medians over them are shown.", lower_bound=1)
_MEMBERS = flags.DEFINE_list("members", ["memory", "tcp", "grpc", "socket"], "What to measure; also tcp_unchecked.")
_BYTES_PER_ROUND = flags.DEFINE_integer("bytes_per_round", 400 << 20, "About how much to move in each measurement.")

_COLUMNS = ("GB/s one way", "CPU s/GB one way", "GB/s each way", "CPU s/GB each way", "latency ms")


class SocketTransport(TcpTransport):
    """A transport as between two machines: payloads go through sockets instead of shared memory."""

    def __init__(self, *arguments, **keywords):
        super().__init__(*arguments, shares_memory=False, **keywords)


class UncheckedTcpTransport(SocketTransport):
    """A transport of frames without checksums, to measure their cost."""

    def __init__(self, *arguments, **keywords):
        super().__init__(*arguments, **keywords)
        self._handshake._encrypted = True  # As where the connection has checksums of its own.


_TRANSPORTS = {
    "memory": TcpTransport,
    "tcp": SocketTransport,
    "grpc": GrpcTransport,
    "tcp_unchecked": UncheckedTcpTransport,
}
_TIMEOUT_SECONDS = 120.0
_MAX_MESSAGES = 2000
_NUM_ROUND_TRIPS = 200
_LENGTH = struct.Struct("<Q")


class Member:
    """One end of a pair. Counts the messages that arrive."""

    def __init__(self):
        self._arrived = 0
        self._changed = threading.Condition()

    def send(self, payload: np.ndarray) -> None:
        """Sends one message."""
        raise NotImplementedError

    def close(self) -> None:
        """Releases the member's resources."""
        raise NotImplementedError

    def arrived(self) -> None:
        """Counts a message."""
        with self._changed:
            self._arrived += 1
            self._changed.notify_all()

    def wait(self, num_messages: int) -> None:
        """Waits for messages, and takes them off the count."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._arrived >= num_messages, _TIMEOUT_SECONDS):
                raise TimeoutError(f"only {self._arrived} of {num_messages} messages arrived.")
            self._arrived -= num_messages


class TransportMember(Member):
    """A `Transport`."""

    def __init__(self, transport: Transport):
        super().__init__()
        self._transport = transport
        self._peer = 1 - transport.rank
        transport.register("benchmark", lambda message: self.arrived())
        transport.start()
        transport.connect(self._peer)

    def send(self, payload: np.ndarray) -> None:
        self._transport.send(self._peer, "benchmark", b"", [payload])

    def close(self) -> None:
        self._transport.flush(self._peer, 5.0)
        self._transport.close()


class SocketMember(Member):
    """A plain TCP connection, for comparison."""

    def __init__(self, rank: int, address: tuple[str, int]):
        super().__init__()
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
                self.arrived()

    def _fill(self, view: memoryview) -> bool:
        while view.nbytes:
            received = self._socket.recv_into(view)
            if not received:
                return False
            view = view[received:]
        return True


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


def _make_member(name: str, rank: int, addresses: Sequence[str]) -> Member:
    if name == "socket":
        host, _, port = addresses[0].rpartition(":")
        return SocketMember(rank, (host, int(port)))
    options = CommunicationOptions(timeout_seconds=_TIMEOUT_SECONDS)
    return TransportMember(_TRANSPORTS[name](rank, addresses, identity={}, options=options))


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


def _measure(case: Mapping, rank: int) -> list[list[tuple[float, ...]]]:
    """Returns for each size and member, in turn, the values of all rounds: seconds, and processor seconds."""
    members = [
        _make_member(name, rank, addresses) for name, addresses in zip(case["members"], case["addresses"], strict=True)
    ]
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
        found += [of_rounds[1:] for of_rounds in of_members]
    for member in members:
        _ping(member, rank, payload[:1])
        member.close()
    return found


# In the parent.


def main(argv: list[str]) -> None:
    """Prints a table."""
    del argv
    print(f"{'bytes':>10} {'member':>8} " + " ".join(f"{column:>13}" for column in _COLUMNS))
    sizes = [(size, max(1, min(_MAX_MESSAGES, _BYTES_PER_ROUND.value // size))) for size in map(int, _SIZES.value)]
    case = {"members": _MEMBERS.value, "sizes": sizes, "rounds": _ROUNDS.value}
    found = ranks.run(__file__, case, 2, ranks.LOOPBACK, num_ports=len(_MEMBERS.value), timeout_seconds=3600)
    kinds = [(*size, name) for size in sizes for name in _MEMBERS.value]
    for (size, num_messages, name), ours, theirs in zip(kinds, *found, strict=True):
        gigabytes = size * num_messages / 1e9
        one_way, processor, both_ways, processor_both, ping = np.median(ours, axis=0)
        _, of_peer, _, of_peer_both, _ = np.median(theirs, axis=0)
        values = (
            gigabytes / one_way,
            (processor + of_peer) / gigabytes,
            gigabytes / both_ways,
            (processor_both + of_peer_both) / (2 * gigabytes),
            ping / 2 * 1e3,
        )
        for column, value in zip(_COLUMNS, values, strict=True):
            results.note(column, f"{size} {name}", value)
        print(f"{size:>10} {name:>8} " + " ".join(f"{value:>13.3f}" for value in values), flush=True)


if __name__ == "__main__":
    ranks.serve(_measure)
    app.run(main)

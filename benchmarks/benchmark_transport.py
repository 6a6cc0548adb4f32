"""Measures how fast two processes on this machine exchange messages, compared with its sockets.

    python benchmarks/benchmark_transport.py --sizes=4096,1048576,104857600 --rounds=5
    python benchmarks/benchmark_transport.py --members=tcp,tcp_unchecked  # what checksums cost

For each size: one way (rank 0 to rank 1) and both ways at once. GB/s counts the payload of one direction. Processor
seconds are those of both processes together, for each GB that was moved in either direction. Latency is half of a
round trip. The members take turns within every round, so that a busy machine slows all of them; medians are shown.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import socket
import statistics
import struct
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import results
from absl import app, flags

from hop_tf.options import CommunicationOptions
from hop_tf.transport import GrpcTransport, TcpTransport, Transport

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

    def __init__(self, rank: int, addresses: list[tuple[str, int]]):
        super().__init__()
        if rank == 0:
            with socket.create_server(addresses[0]) as server:
                self._socket, _ = server.accept()
        else:
            self._socket = _connect(addresses[0])
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


def _make_member(name: str, rank: int, ports: list[int]) -> Member:
    if name == "socket":
        return SocketMember(rank, [("127.0.0.1", port) for port in ports])
    addresses = [f"127.0.0.1:{port}" for port in ports]
    options = CommunicationOptions(timeout_seconds=_TIMEOUT_SECONDS)
    return TransportMember(_TRANSPORTS[name](rank, addresses, identity={}, options=options))


@dataclasses.dataclass(frozen=True)
class Task:
    """The messages that one process sends and receives in a measurement."""

    member: str
    size: int
    num_sent: int
    num_received: int
    echo: bool = False


def _perform(member: Member, task: Task) -> float:
    """Runs a task; returns the processor seconds it took."""
    payload = np.ones(task.size, np.uint8)
    start = time.process_time()
    if task.echo:
        for _ in range(task.num_received):
            member.wait(1)
            member.send(payload)
    else:
        for _ in range(task.num_sent):
            member.send(payload)
        member.wait(task.num_received)
    return time.process_time() - start


def _child(pipe, members: dict[str, list[int]]) -> None:
    ends = {name: _make_member(name, 1, ports) for name, ports in members.items()}
    while (task := pipe.recv()) is not None:
        pipe.send(None)
        pipe.send(_perform(ends[task.member], task))
    for end in ends.values():
        end.close()


class Pair:
    """Both processes, seen from rank 0."""

    def __init__(self, names: list[str]):
        ports = {name: [_free_port(), _free_port()] for name in names}
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_child, args=(other, ports), daemon=True)
        self._process.start()
        self._ends = {name: _make_member(name, 0, ports[name]) for name in names}

    def transfer(self, name: str, size: int, num_messages: int, both_ways: bool) -> tuple[float, float]:
        """Returns seconds and processor seconds of moving messages to rank 1, or both ways."""
        back = num_messages if both_ways else 0
        return self._measure(Task(name, size, back, num_messages), Task(name, size, num_messages, back))

    def round_trips(self, name: str, size: int, num_round_trips: int) -> list[float]:
        """Returns the seconds of each round trip."""
        self._begin(Task(name, size, 0, num_round_trips, echo=True))
        payload, seconds = np.ones(size, np.uint8), []
        for _ in range(num_round_trips):
            start = time.perf_counter()
            self._ends[name].send(payload)
            self._ends[name].wait(1)
            seconds.append(time.perf_counter() - start)
        self._pipe.recv()
        return seconds

    def close(self) -> None:
        """Ends the other process."""
        self._pipe.send(None)
        for end in self._ends.values():
            end.close()
        self._process.join(_TIMEOUT_SECONDS)

    def _begin(self, task: Task) -> None:
        self._pipe.send(task)
        self._pipe.recv()

    def _measure(self, theirs: Task, ours: Task) -> tuple[float, float]:
        self._begin(theirs)
        start = time.perf_counter()
        processor = _perform(self._ends[ours.member], ours) + self._pipe.recv()
        return time.perf_counter() - start, processor


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@contextlib.contextmanager
def _pair(names: list[str]) -> Iterator[Pair]:
    pair = Pair(names)
    try:
        yield pair
    finally:
        pair.close()


def _medians(rounds: int, names: list[str], measure: Callable[[str], tuple[float, ...]]) -> dict[str, list[float]]:
    """Medians of what `measure` returns, with the members taking turns; one more round comes first to warm up."""
    results = {name: [] for name in names}
    for index in range(rounds + 1):
        for name in names:
            result = measure(name)
            if index:
                results[name].append(result)
    return {name: [statistics.median(values) for values in zip(*found, strict=True)] for name, found in results.items()}


def _measure_size(pair: Pair, names: list[str], size: int) -> None:
    num_messages = max(1, min(_MAX_MESSAGES, _BYTES_PER_ROUND.value // size))
    num_round_trips = max(1, min(_NUM_ROUND_TRIPS, _BYTES_PER_ROUND.value // size))

    def measure(name: str) -> tuple[float, ...]:
        one_way, processor = pair.transfer(name, size, num_messages, both_ways=False)
        both_ways, processor_both = pair.transfer(name, size, num_messages, both_ways=True)
        latency = statistics.median(pair.round_trips(name, size, num_round_trips)) / 2
        gigabytes = size * num_messages / 1e9
        return (
            gigabytes / one_way,
            processor / gigabytes,
            gigabytes / both_ways,
            processor_both / (2 * gigabytes),
            latency * 1e3,
        )

    for name, values in _medians(_ROUNDS.value, names, measure).items():
        for column, value in zip(_COLUMNS, values, strict=True):
            results.note(column, f"{size} {name}", value)
        print(f"{size:>10} {name:>8} " + " ".join(f"{value:>13.3f}" for value in values), flush=True)


def main(argv: list[str]) -> None:
    """Prints a table."""
    del argv
    print(f"{'bytes':>10} {'member':>8} " + " ".join(f"{column:>13}" for column in _COLUMNS))
    with _pair(_MEMBERS.value) as pair:
        for size in _SIZES.value:
            _measure_size(pair, _MEMBERS.value, int(size))


if __name__ == "__main__":
    app.run(main)

"""Measures the costs of the core: step overhead, queue throughput, memory. Prints a table; `--csv=FILE` writes it, too.

    python benchmarks/benchmark_core.py --csv=core.csv
    python benchmarks/benchmark_core.py --parts=queues --rounds=9

All runs are under `model.fit` in fresh processes on this machine, which should have nothing else to do. Both sides of
a comparison take turns within every round, so that a busy moment meets both. The table shows medians over the rounds.

overhead  HopStrategy in a world of one against the same model without a strategy, for a tiny model and for one whose
          batch is chosen so that a step takes about 20 ms. Both run the same kind of graph: Keras turns XLA off under
          any strategy, so it is off on both sides ("plain, XLA" is Keras's own default). Required: at most 3% of
          20 ms, and 0.6 ms of a tiny step.
two_ranks The same tiny model on two ranks that average in every step, against two processes that train alone.
queues    Two processes; a float32 vector of 100 MiB goes through transport and UpdateQueue until it is dequeued, one
          way at a time and both ways at once. GB/s of one direction, compared with a plain socket and a memcpy in the
          same processes. Required: at least 0.8 GB/s.
memory    Peak resident memory of a rank above that of the same fit in a world of one, in parameter vectors. In lock
          step with one neighbor: at most 6. On a directed ring of three with a slow rank, the slow rank's neighbor
          gets ahead by `max_iteration_gap` = 2: at most (1 + max_iteration_gap) * |N_in| = 3 vectors more.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import socket
import statistics
import threading
import time
from collections.abc import Callable, Sequence

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags

import hop_tf
from hop_tf.cluster import Cluster
from hop_tf.collectives import BULK_LANE
from hop_tf.membership import Membership
from hop_tf.membership.monitor import ThreadMonitor
from hop_tf.options import CommunicationOptions
from hop_tf.tensors.buffers import BufferPool
from hop_tf.tensors.fifo import Update, UpdateQueue
from hop_tf.tools.emulation import ComputeEmulation, Slowdown
from hop_tf.tools.processes.local_cluster import PortReservation
from hop_tf.tools.testing import MultiProcessRunner
from hop_tf.transport import TcpTransport

_PARTS = flags.DEFINE_list("parts", ["overhead", "two_ranks", "queues", "memory"], "What to measure.")
_ROUNDS = flags.DEFINE_integer("rounds", 7, "Rounds; medians over them are shown.", lower_bound=1)
_CSV = flags.DEFINE_string("csv", None, "File for the same figures as CSV.")

_TIMEOUT_SECONDS = 1800.0
_VECTOR_BYTES = 100 << 20
_MESSAGES_PER_ROUND = 6
_SIDE = 5000  # A Dense layer of that many inputs and outputs has 25 million parameters.
_MAX_ITERATION_GAP = 2


@dataclasses.dataclass(frozen=True)
class Figure:
    """A line of the table. `limit` is in `unit`. A positive limit is the largest value, a negative one the least."""

    part: str
    name: str
    value: float
    unit: str
    limit: float | None = None

    @property
    def verdict(self) -> str:
        if self.limit is None:
            return ""
        met = self.value <= self.limit if self.limit > 0 else self.value >= -self.limit
        return "met" if met else "MISSED"

    @property
    def target(self) -> str:
        if self.limit is None:
            return ""
        return f"{'<=' if self.limit > 0 else '>='} {abs(self.limit):g}"


def _run(function: Callable, num_workers: int, *args, env: dict[str, str] | None = None) -> list:
    """Runs a function in fresh processes; returns each rank's value."""
    with MultiProcessRunner(function, num_workers, args=args, env=env, timeout_seconds=_TIMEOUT_SECONDS) as runner:
        return runner.join().raise_for_errors().values


# Step times.


class _StepTimer(keras.callbacks.Callback):
    """Records the seconds from the end of each batch to the end of the next."""

    def __init__(self):
        super().__init__()
        self.seconds: list[float] = []
        self._last: float | None = None

    def on_train_batch_end(self, batch, logs=None):
        now = time.perf_counter()
        if self._last is not None:
            self.seconds.append(now - self._last)
        self._last = now


def _make_tiny() -> keras.Model:
    return keras.Sequential([keras.layers.Input((16,)), keras.layers.Dense(16), keras.layers.Dense(1)])


def _make_medium() -> keras.Model:
    hidden = [keras.layers.Dense(512, activation="relu") for _ in range(3)]
    return keras.Sequential([keras.layers.Input((512,)), *hidden, keras.layers.Dense(1)])


_MODELS = {"tiny": _make_tiny, "20 ms": _make_medium}


class _Trainer:
    """A model, compiled with or without a strategy, and its data."""

    def __init__(self, model_name: str, batch_size: int, strategy: tf.distribute.Strategy | None, jit_compile):
        keras.utils.set_random_seed(0)
        with strategy.scope() if strategy is not None else contextlib.nullcontext():
            self._model = _MODELS[model_name]()
            self._model.compile("sgd", "mse", jit_compile=jit_compile)
        global_batch = batch_size * getattr(strategy, "world_size", 1)
        x = np.random.normal(size=(global_batch, self._model.input_shape[1])).astype("float32")
        self._data = tf.data.Dataset.from_tensors((x, x[:, :1])).cache()

    def median_step_seconds(self, num_steps: int) -> float:
        timer = _StepTimer()
        self._model.fit(self._data.repeat(num_steps), verbose=0, callbacks=[timer])
        return statistics.median(timer.seconds)


def _measure_steps(model_name: str, num_rounds: int, num_steps: int, target_seconds: float | None):
    """Returns the median step seconds of every round, by variant; runs on every rank."""
    batch_size = 16
    if target_seconds is not None:
        for _ in range(3):  # The time is not quite proportional to the batch.
            seconds = _Trainer(model_name, batch_size, None, False).median_step_seconds(30)
            batch_size = max(1, round(batch_size * target_seconds / seconds))
    hop = hop_tf.HopStrategy(topology="complete")
    trainers = {
        "plain": _Trainer(model_name, batch_size, None, False),
        "plain, XLA": _Trainer(model_name, batch_size, None, "auto"),
        "OneDeviceStrategy": _Trainer(model_name, batch_size, tf.distribute.OneDeviceStrategy("/cpu:0"), "auto"),
        "HopStrategy": _Trainer(model_name, batch_size, hop, "auto"),
    }
    results = {variant: [] for variant in trainers}
    for round_index in range(num_rounds + 1):  # The first round traces.
        for variant, trainer in trainers.items():
            seconds = trainer.median_step_seconds(num_steps)
            if round_index:
                results[variant].append(seconds)
    hop.shutdown()
    return results


def _step_figures(part: str, model_name: str, results: dict, limit_ms=None, limit_percent=None) -> list[Figure]:
    figures = [
        Figure(part, f"{model_name}: step, {variant}", 1e3 * statistics.median(seconds), "ms")
        for variant, seconds in results.items()
    ]
    pairs = list(zip(results["HopStrategy"], results["plain"], strict=True))
    added_ms = 1e3 * statistics.median(hop - plain for hop, plain in pairs)
    added_percent = 100 * statistics.median(hop / plain - 1 for hop, plain in pairs)
    return [
        *figures,
        Figure(part, f"{model_name}: HopStrategy adds", added_ms, "ms", limit_ms),
        Figure(part, f"{model_name}: HopStrategy adds", added_percent, "%", limit_percent),
    ]


def _overhead(num_rounds: int) -> list[Figure]:
    (tiny,) = _run(_measure_steps, 1, "tiny", num_rounds, 300, None)
    (medium,) = _run(_measure_steps, 1, "20 ms", num_rounds, 60, 0.02)
    return [
        *_step_figures("overhead", "tiny", tiny, limit_ms=0.6),
        *_step_figures("overhead", "20 ms", medium, limit_percent=3.0),
    ]


def _two_ranks(num_rounds: int) -> list[Figure]:
    first, _ = _run(_measure_steps, 2, "tiny", num_rounds, 300, None)
    return _step_figures("two_ranks", "tiny", first)


# Queues.


class _QueueEnd:
    """One of two ranks, with an update queue that the other rank fills."""

    def __init__(self, num_bytes: int, num_messages: int):
        cluster = Cluster.from_resolver()
        options = CommunicationOptions()
        self.rank, self._peer, self._num_messages = cluster.rank, 1 - cluster.rank, num_messages
        self._vector = BufferPool().take(num_bytes).view(np.float32)
        self._vector[:] = 1
        self._transport = TcpTransport(cluster.rank, cluster.addresses, identity={}, options=options)
        self.membership = Membership(
            transport=self._transport, monitor=ThreadMonitor(), options=options, world_size=2, peers=[self._peer]
        )
        self._updates = UpdateQueue(dtypes=[tf.float32], num_senders=1, max_iteration_gap=num_messages)
        self._transport.register("updates", self._on_update)
        self._transport.start()

    def transfer(self, senders: Sequence[int]) -> None:
        """Sends, receives, or both; keeps one message more in flight than it has received."""
        for k in range(self._num_messages + 1):
            if self.rank in senders and k < self._num_messages:
                self._transport.send(self._peer, "updates", bytes([k]), [self._vector], lane=BULK_LANE)
            if self._peer in senders and k > 0:
                self._receive(k - 1)

    def close(self) -> None:
        self._transport.flush(self._peer, 5.0)
        self._transport.close()

    def _receive(self, k: int) -> None:
        monitor = self.membership.monitor
        self.membership.wait(lambda: [] if self._updates.senders(k) else [self._peer], operation="receive")
        with monitor:
            self._updates.dequeue(k)

    def _on_update(self, message) -> None:
        with self.membership.monitor:
            update = Update(message.header[0], message.sender, (message.payload.view(np.float32),))
            self._updates.enqueue(update)
            self.membership.monitor.notify_all()


class _SocketEnd:
    """A plain TCP connection between the same processes."""

    def __init__(self, rank: int, port: int, num_bytes: int, num_messages: int):
        self._rank, self._num_messages = rank, num_messages
        self._outgoing, self._incoming = np.ones(num_bytes, np.uint8), np.ones(num_bytes, np.uint8)
        if rank == 0:
            with socket.create_server(("127.0.0.1", port)) as server:
                self._socket, _ = server.accept()
        else:
            self._socket = _connect(("127.0.0.1", port))

    def transfer(self, senders: Sequence[int]) -> None:
        sender = threading.Thread(target=self._send)
        if self._rank in senders:
            sender.start()
        if 1 - self._rank in senders:
            self._receive()
        if self._rank in senders:
            sender.join()

    def close(self) -> None:
        self._socket.close()

    def _send(self) -> None:
        for _ in range(self._num_messages):
            self._socket.sendall(self._outgoing)

    def _receive(self) -> None:
        for _ in range(self._num_messages):
            view = memoryview(self._incoming)
            while view:
                view = view[self._socket.recv_into(view) :]


def _connect(address: tuple[str, int]) -> socket.socket:
    deadline = time.monotonic() + 60.0
    while True:
        try:
            return socket.create_connection(address)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _measure_queues(port: int, num_rounds: int) -> dict[tuple[str, tuple[int, ...]], list[float]]:
    """Returns the GB/s that this rank received, by (path, senders); runs on both ranks.

    A session before each transfer serves as the barrier.
    """
    queues = _QueueEnd(_VECTOR_BYTES, _MESSAGES_PER_ROUND)
    plain = _SocketEnd(queues.rank, port, _VECTOR_BYTES, _MESSAGES_PER_ROUND)
    rates = {}
    for round_index in range(num_rounds + 1):  # The first round gets memory pages from the system.
        for name, end in (("queues", queues), ("socket", plain)):
            for senders in ((0,), (1,), (0, 1)):
                queues.membership.begin_session()
                start = time.perf_counter()
                end.transfer(senders)
                rate = _VECTOR_BYTES * _MESSAGES_PER_ROUND / (time.perf_counter() - start) / 1e9
                queues.membership.leave(sent_rounds={}, reason="")
                if round_index and 1 - queues.rank in senders:
                    rates.setdefault((name, senders), []).append(rate)
        queues.membership.begin_session()
        if queues.rank == 0:
            rates.setdefault(("memcpy", ()), []).append(_copy_rate())
        queues.membership.leave(sent_rounds={}, reason="")
    queues.membership.begin_session()
    plain.close()
    queues.close()
    return rates


def _copy_rate() -> float:
    source, target = np.ones(_VECTOR_BYTES, np.uint8), np.ones(_VECTOR_BYTES, np.uint8)
    start = time.perf_counter()
    np.copyto(target, source)
    return _VECTOR_BYTES / (time.perf_counter() - start) / 1e9


def _queues(num_rounds: int) -> list[Figure]:
    with contextlib.closing(PortReservation(1)) as reservation:
        reservation.release()
        first, second = _run(_measure_queues, 2, reservation.ports[0], num_rounds)
    figures = []
    for path, limit in (("queues", -0.8), ("socket", None)):
        ways = {
            "rank 0 to 1 alone": second[path, (0,)],
            "rank 1 to 0 alone": first[path, (1,)],
            "both at once, rank 0 to 1": second[path, (0, 1)],
            "both at once, rank 1 to 0": first[path, (0, 1)],
        }
        figures += [Figure("queues", f"{path}: {w}", statistics.median(r), "GB/s", limit) for w, r in ways.items()]
    return [*figures, Figure("queues", "memcpy", statistics.median(first["memcpy", ()]), "GB/s")]


# Memory.


def _measure_memory(topology, num_steps: int) -> int:
    """Returns the peak of resident bytes during a fit; runs on every rank."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # Forgets the peak so far.
    strategy = hop_tf.HopStrategy(topology=topology, max_iteration_gap=_MAX_ITERATION_GAP)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((_SIDE,)), keras.layers.Dense(_SIDE, use_bias=False)])
        model.compile("sgd", "mse")
    x = np.ones((strategy.world_size, _SIDE), "float32")
    model.fit(tf.data.Dataset.from_tensors((x, x)).repeat(num_steps), verbose=0)
    strategy.shutdown()
    with open("/proc/self/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith("VmHWM"))


def _memory(num_rounds: int) -> list[Figure]:
    del num_rounds
    vector_bytes = 4 * _SIDE**2
    ring = np.eye(3) / 2 + np.roll(np.eye(3), 1, axis=1) / 2  # 0 -> 1 -> 2 -> 0
    slow = ComputeEmulation(step_seconds=0.1, slowdowns=(Slowdown(1, 40.0),)).to_environment()
    (alone,) = _run(_measure_memory, 1, "complete", 12)
    pair = _run(_measure_memory, 2, "complete", 12)
    behind = _run(_measure_memory, 3, ring, 8, env=slow)
    figures = [Figure("memory", "world of one", alone / vector_bytes, "vectors")]
    for rank, peak in enumerate(pair):
        figures.append(Figure("memory", f"lock step: rank {rank} more", (peak - alone) / vector_bytes, "vectors", 6.0))
    for rank, peak in enumerate(behind):
        name = f"directed ring, rank 1 slow: rank {rank} more"
        limit = 6.0 + (1 + _MAX_ITERATION_GAP)
        figures.append(Figure("memory", name, (peak - alone) / vector_bytes, "vectors", limit))
    return figures


def _write_csv(path: str, figures: Sequence[Figure]) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["part", "name", "value", "unit", "target", "verdict"])
        for figure in figures:
            row = [figure.part, figure.name, f"{figure.value:.4g}", figure.unit, figure.target, figure.verdict]
            writer.writerow(row)


def main(argv: list[str]) -> None:
    """Measures, prints and writes."""
    del argv
    measure = {"overhead": _overhead, "two_ranks": _two_ranks, "queues": _queues, "memory": _memory}
    figures = []
    for part in _PARTS.value:
        for figure in measure[part](_ROUNDS.value):
            figures.append(figure)
            line = f"{figure.part:<10} {figure.name:<42} {figure.value:>9.3f} {figure.unit:<8}"
            print(f"{line} {figure.target:<8} {figure.verdict}".rstrip(), flush=True)
    if _CSV.value is not None:
        _write_csv(_CSV.value, figures)


if __name__ == "__main__":
    app.run(main)

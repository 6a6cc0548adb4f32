"""The cost of each strategy with 4, 8, 16, ... ranks: messages, bytes, connections and time.

    python benchmarks/benchmark_scale.py
    python benchmarks/benchmark_scale.py --series=hop:ring_based --largest=4096 --noleaves --output=results
    python benchmarks/benchmark_scale.py --real=2,4,8

The strategies' own protocols run in one process on a virtual clock (see `hop_tf.tools.simulate`). A rank computes for
one second in each step, and a message takes a millisecond. Vectors are short. A series doubles the number of ranks up
to --largest. It ends earlier if the next point would take longer than --max_seconds of real time. SHAT has one server,
with rows of its own. Columns show, for the rank with the most:

step ms    virtual time that communication adds to a step;
messages   messages sent in a step, and beside them the closed form ("law");
KiB        bytes sent in a step;
start      messages of `Membership.begin_session`, in which all ranks gather;
leave      messages about ranks that leave the session at the end of `fit`; none with --noleaves, which is faster;
peers      ranks that a rank exchanges messages with;
fds        estimated descriptors of a `TcpTransport`: ten for each peer, and as many threads;
buffers    the most KiB of message buffers at one time, of all ranks together, divided by their number;
real s     time of the simulation.

The row "growth" has the exponent p of n^p between the last two points. The last line tells how many ranks fit into
1,024 descriptors, a usual limit, which the transport raises only as far as the system allows. Heartbeats are not
counted: each second, a rank sends one to each peer, and answers one of each peer.

--real trains in that many processes on this machine. It shows the messages of a step beside the closed form, and the
threads and descriptors of rank 0. Required, of the measured messages: equal to the closed form for Hop, Pipe-SGD and
SHAT, and within a twentieth for DTS, whose windows are in flight when the count begins and ends. Ranks of Canary pass
over steps on a busy machine, and send fewer.
"""

from __future__ import annotations

import collections
import functools
import itertools
import os
import time
from collections.abc import Mapping, Sequence

import keras
import numpy as np
import results
import scale_ranks
import tensorflow as tf
from absl import app, flags

import hop_tf
from hop_tf import codecs
from hop_tf.strategies.dts.windows import Schedule
from hop_tf.strategies.hop.settings import HopSettings
from hop_tf.strategies.shat.server.server import ParameterServer
from hop_tf.tensors.packing import Packing, TensorSpec
from hop_tf.tools.simulate import VirtualCluster
from hop_tf.tools.simulate.rank_loops import GROUP, AveragingTraining, HopTraining, OwnSeconds
from hop_tf.tools.testing import MultiProcessRunner, stop_fork_server
from hop_tf.topology import resolve

_ALL = ["hop:ring_based", "hop:exponential", "pipe_sgd:mesh", "pipe_sgd:ring", "dts:mesh", "canary:mesh", "canary:tree"]
_SERIES = flags.DEFINE_list("series", [*_ALL, "shat"], "Strategies, each with its topology or algorithm.")
_LARGEST = flags.DEFINE_integer("largest", 1024, "The largest number of ranks.", lower_bound=2)
_SMALLEST = flags.DEFINE_integer("smallest", 4, "The smallest number of ranks.", lower_bound=2)
_MAX_SECONDS = flags.DEFINE_float("max_seconds", 60.0, "Real seconds of a point, at most.")
_NUM_VALUES = flags.DEFINE_integer("num_values", 4096, "Values of float32 that are exchanged.", lower_bound=1)
_NUM_STEPS = flags.DEFINE_integer("num_steps", 4, "Measured steps.", lower_bound=4)
_LEAVES = flags.DEFINE_bool("leaves", True, "Whether ranks tell each other at the end that they leave.")
_REAL = flags.DEFINE_list("real", [], "Numbers of processes to train in, instead of the simulation.")

_COMPUTE_SECONDS, _LINK_SECONDS = 1.0, 0.001
# Descriptors of a rank with `TcpTransport`, measured with --real.
_OF_A_PEER, _OTHERS, _USUAL_LIMIT = 10, 12, 1024
_INTERVAL = 2  # Of DTS.
_TITLES = ("ranks", "step ms", "messages", "law", "KiB", "start", "leave", "peers", "fds", "buffers", "real s")


def _closed_form(series: str, n: int) -> float:
    """The messages that a rank sends in a step; of a server for "shat server"."""
    kind, _, name = series.partition(":")
    if kind == "hop":
        topology = resolve(name, n)
        # The tokens of a directed edge are messages of their own. Between neighbors both ways, updates carry them.
        return max(len({*topology.out_neighbors(r), *topology.in_neighbors(r)} - {r}) for r in range(n))
    if kind in ("shat", "shat server"):
        return 1 if kind == "shat" else n
    is_single = n == 2 and kind != "canary" and name != "ring"  # See `MeshAllReduce`.
    return (1 if is_single else 2 * (n - 1)) / (_INTERVAL if kind == "dts" else 1)


class _Job:
    """A training on the virtual clock.

    Args:
      series: The strategy, with its topology or algorithm.
      num_ranks: n.
    """

    def __init__(self, series: str, num_ranks: int):
        self._series, self._num_ranks, self._begun_at = series, num_ranks, time.perf_counter()
        kind, _, name = series.partition(":")
        arguments: dict = {"num_servers": int(kind == "shat"), "continue_without_lost": kind == "shat"}
        if kind == "hop":
            topology = resolve(name, num_ranks)
            arguments["peers"] = lambda rank: {*topology.in_neighbors(rank), *topology.out_neighbors(rank)}
            make = functools.partial(HopTraining, topology=topology, settings=HopSettings())
        elif kind == "shat":
            arguments["peers"] = lambda rank: ()
            make = scale_ranks.ShatTraining
        elif kind == "canary":
            make = functools.partial(scale_ranks.CanaryTraining, network=name)
        else:
            schedule = Schedule(_INTERVAL, _INTERVAL) if kind == "dts" else Schedule(0, 1)
            about = {"schedule": schedule, "num_threads": schedule.num_slots if kind == "dts" else 1, "num_segments": 1}
            make = functools.partial(AveragingTraining, codec=codecs.get(None), algorithm=name, **about)
        self._cluster = VirtualCluster(num_ranks, lambda *message: _LINK_SECONDS, **arguments)
        self._servers = [ParameterServer(transport=each, num_workers=num_ranks) for each in self._cluster.servers]
        self._tally = scale_ranks.Tally(self._cluster, num_ranks)
        packing, own = Packing([TensorSpec("x", (_NUM_VALUES.value,), tf.float32)]), OwnSeconds(_COMPUTE_SECONDS)
        self._ranks = [
            make(self._cluster, rank, packing, itertools.repeat(own), self._is_over) for rank in range(num_ranks)
        ]
        self._times = np.zeros((2, num_ranks))  # Begin and end of the measured steps.
        self._num_ended = 0

    def run(self) -> dict[str, list[float]]:
        """Trains. Returns the values of `_TITLES` for the ranks, and for the servers if there are any."""
        self._cluster.run(self._train)
        n = self._num_ranks
        kinds = {self._series: slice(n)} | ({f"{self._series} server": slice(n, None)} if self._servers else {})
        step = 1e3 * (np.mean(self._times[1] - self._times[0]) / _NUM_STEPS.value - _COMPUTE_SECONDS)
        rows = {}
        for series, where in kinds.items():
            most = {phase: int(numbers[where].max()) for phase, numbers in self._tally.messages.items()}
            kib = float(self._tally.num_bytes["steps"][where].max()) / _NUM_STEPS.value / 1024
            peers, buffered = max(map(len, self._tally.peers[where])), self._tally.most_buffered / n / 1024
            messages = most["steps"] / _NUM_STEPS.value, _closed_form(series, n)
            ends = most.get("start", 0), most.get("leave", 0)
            real_seconds = time.perf_counter() - self._begun_at
            rows[series] = [n, step, *messages, kib, *ends, peers, _OTHERS + _OF_A_PEER * peers, buffered, real_seconds]
        return rows

    def _train(self, rank: int) -> None:
        loop, membership = self._ranks[rank], self._cluster.memberships[rank]
        loop.train()
        if _LEAVES.value:
            membership.leave(sent_rounds={GROUP: loop.exchange.sent_rounds}, reason="")
        self._num_ended += 1
        if self._num_ended == self._num_ranks:
            for each in self._ranks if isinstance(loop, scale_ranks.CanaryTraining) else ():  # Ends their threads.
                each.exchange.close()
            # Threads of `AveragingTraining` do not end.
            self._cluster.scheduler.call_at(self._cluster.scheduler.now + 1.0, self._cluster.scheduler.stop)

    def _is_over(self, rank: int, step: int) -> bool:
        if step in (1, 1 + _NUM_STEPS.value):  # Neither the first step nor the last one is measured.
            self._times[int(step > 1), rank] = self._cluster.scheduler.now
            self._tally.phases[rank] = "end" if step > 1 else "steps"
        return step > 1 + _NUM_STEPS.value


def _run_series(series: str) -> None:
    """Measures and prints a series."""
    tables: Mapping[str, list] = collections.defaultdict(list)
    print(f"\n{'':>20}" + "".join(f"{title:>10}" for title in _TITLES))
    n, seconds, factor = _SMALLEST.value, 0.0, 1.0
    while n <= _LARGEST.value and seconds * factor <= _MAX_SECONDS.value:
        for name, row in _Job(series, n).run().items():
            tables[name].append(row)
            _print_row(name, row)
            for title, value in zip(_TITLES, row, strict=True):
                results.note(title, f"{name}, {n}", value)
        factor, seconds = min(max(2.0, row[-1] / (seconds or row[-1])), 5.0), row[-1]
        n *= 2
    for name, rows in tables.items():
        if len(rows) > 1:
            before, last = (np.maximum(row, 1e-9) for row in rows[-2:])
            _print_row(f"{name}, growth", np.round(np.log2(last / before), 2))
        print(
            f"{name}, limit".rjust(20)
            + _describe_limit(*(rows[-1][_TITLES.index(each)] for each in ("ranks", "peers")))
        )


def _print_row(name: str, values: Sequence[float]) -> None:
    shown = (f"{value:10.4g}" if abs(value) < 1e4 else f"{value:10.0f}" for value in values)
    print(f"{name:>20}" + "".join(shown), flush=True)


def _describe_limit(num_ranks: int, num_peers: int) -> str:
    """Tells when descriptors run out. If all processes are peers, each further rank is one more."""
    most = (_USUAL_LIMIT - _OTHERS) // _OF_A_PEER
    what = f"  {_USUAL_LIMIT} descriptors suffice for {most} peers"
    return what + (f": n = {most + num_ranks - num_peers}" if num_peers >= num_ranks - 1 else "")


# In processes.


def _make_real(series: str) -> hop_tf.ExchangeStrategy:
    kind, _, name = series.partition(":")
    return {
        "hop": lambda: hop_tf.HopStrategy(topology=name),
        "pipe_sgd": lambda: hop_tf.PipeSGDStrategy(algorithm=name, codec=None),
        "dts": lambda: hop_tf.DTSStrategy(delay=_INTERVAL, interval=_INTERVAL, algorithm=name, codec=None),
        "canary": lambda: hop_tf.CanaryStrategy(algorithm=name, consistency="async", codec=None),
        "shat": hop_tf.SHATParameterServerStrategy,
    }[kind]()


def _train_real(series: str, num_ranks: int, first: int, num_steps: int) -> tuple[float, int, int]:
    """Trains a rank; returns the messages of a step, and the threads and descriptors at the end."""
    strategy, sent, resources = _make_real(series), [], []

    def note(step: int, logs: Mapping) -> None:
        if step in (first, first + num_steps):
            sent.append(strategy.report()["messages_sent"])
            resources[:] = (len(os.listdir(f"/proc/self/{kind}")) for kind in ("task", "fd"))

    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(32)])
        model.compile("sgd", "mse")
    x = np.zeros(((first + num_steps + 2) * num_ranks, 4), np.float32)
    y, callback = np.zeros((len(x), 32), np.float32), keras.callbacks.LambdaCallback(on_train_batch_end=note)
    model.fit(x, y, batch_size=num_ranks, verbose=0, callbacks=[callback])
    strategy.shutdown()
    return (sent[1] - sent[0]) / num_steps, *resources


def _run_real(series: str) -> None:
    """Trains in processes, and prints rank 0's numbers."""
    for n in map(int, _REAL.value):
        arguments = {"args": (series, n, 10, 40), "num_ps": int(series == "shat")}
        with MultiProcessRunner(_train_real, n, **arguments) as runner:
            messages, threads, descriptors = runner.join().raise_for_errors().values[0]
        _print_row(series, (n, messages, _closed_form(series, n), threads, descriptors))


def main(_) -> None:
    if _REAL.value:
        titles = ("processes", "messages", "law", "threads", "fds")
        print(f"{'':>20}" + "".join(f"{title:>10}" for title in titles))
        for series in _SERIES.value:
            _run_real(series)
        stop_fork_server()
        return
    for series in _SERIES.value:
        _run_series(series)


if __name__ == "__main__":
    app.run(main)

"""The messages of each strategy with 4, 8, 16, ... ranks.

    python benchmarks/benchmark_scale.py
    python benchmarks/benchmark_scale.py --series=hop:ring_based --largest=4096

The strategies' own protocols run in one process on a virtual clock (see `hop_tf.tools.simulate`). A rank computes for
one second in each step, and a message takes a millisecond. A series doubles the number of ranks up to --largest. It
ends earlier if the next point would take longer than --max_seconds of real time. SHAT has one server, with rows of its
own. Shown are, for the rank with the most:

messages   messages sent in a step, and beside them the closed form ("law");
start      messages of `Membership.begin_session`, in which all ranks gather;
leave      messages about ranks that leave the session at the end of `fit`;
peers      ranks that a rank exchanges messages with.

Heartbeats are not counted: each second, a rank sends one to each peer, and answers one of each peer.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
import time
import weakref
from collections.abc import Callable

import keras
import numpy as np
import results
import tensorflow as tf
from absl import app, flags

from hop_tf import codecs
from hop_tf.runtime.exchange import Request
from hop_tf.strategies.dts.windows import Schedule
from hop_tf.strategies.hop.settings import HopSettings
from hop_tf.strategies.shat.exchange import ShatExchange
from hop_tf.strategies.shat.server.server import ParameterServer
from hop_tf.strategies.shat.settings import ShatSettings
from hop_tf.tensors.packing import Packing, TensorSpec
from hop_tf.tools.simulate import VirtualCluster
from hop_tf.tools.simulate.rank_loops import GROUP, AveragingTraining, HopTraining, OwnSeconds, Training
from hop_tf.topology import resolve

_ALL = ["hop:ring_based", "hop:exponential", "pipe_sgd:mesh", "pipe_sgd:ring", "dts:mesh", "shat"]
_SERIES = flags.DEFINE_list("series", _ALL, "Strategies, each with its topology or algorithm.")
_LARGEST = flags.DEFINE_integer("largest", 1024, "The largest number of ranks.", lower_bound=2)
_SMALLEST = flags.DEFINE_integer("smallest", 4, "The smallest number of ranks.", lower_bound=2)
_MAX_SECONDS = flags.DEFINE_float("max_seconds", 60.0, "Real seconds of a point, at most.")

_NUM_STEPS = 4
_COMPUTE_SECONDS, _LINK_SECONDS = 1.0, 0.001
_INTERVAL = 2  # Of DTS.
_MOST_GROWTH = 5.0  # How much longer twice the ranks may take.
_NUM_VALUES = 4096  # Of float32, which are exchanged.


def _closed_form(series: str, n: int) -> float:
    """The messages that a rank sends in a step; of a server for "shat server"."""
    kind, _, name = series.partition(":")
    if kind == "hop":
        topology = resolve(name, n)
        # The tokens of a directed edge are messages of their own. Between neighbors both ways, updates carry them.
        return max(len({*topology.out_neighbors(r), *topology.in_neighbors(r)} - {r}) for r in range(n))
    if kind in ("shat", "shat server"):
        return 1 if kind == "shat" else n
    is_single = n == 2 and name != "ring"  # See `MeshAllReduce`.
    return (1 if is_single else 2 * (n - 1)) / (_INTERVAL if kind == "dts" else 1)


class _Tally:
    """Counts the messages of all ranks and servers by phase.

    The phases of a rank are "start" and "leave", for messages of its membership, and those that the caller sets.

    Args:
      cluster: The cluster.
      num_ranks: Number of ranks. Messages of a server belong to the phase of the receiver.

    Attributes:
      messages: By phase, an array with the number of messages that each rank and server has sent.
      peers: The peers of each rank and server.
      phases: The present phase of each rank.
    """

    def __init__(self, cluster: VirtualCluster, num_ranks: int):
        self._num_ranks = num_ranks
        transports = [*(membership.transport for membership in cluster.memberships), *cluster.servers]
        self.messages = collections.defaultdict(lambda: np.zeros(len(transports), int))
        self.peers: list[set[int]] = [set() for _ in transports]
        self.phases = ["first"] * num_ranks
        for transport in transports:
            transport.send = functools.partial(self._send, transport.rank, transport.send)

    def _send(self, rank: int, send: Callable[..., bool], peer: int, queue: str, *message, **how):
        has_superseded = send(peer, queue, *message, **how)
        if not has_superseded:
            phase = self.phases[rank if rank < self._num_ranks else peer]
            phase = {"membership/leave": "leave"}.get(queue, "start" if queue.startswith("membership/") else phase)
            self.messages[phase][rank] += 1
            self.peers[rank].add(peer)
            self.peers[peer].add(rank)
        return has_superseded


class _ShatTraining(Training):
    """A worker under SHAT."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        variable = keras.Variable(np.zeros(self.packing.specs[0].shape, np.float32), name="x")
        self._optimizer = keras.optimizers.SGD(0.1)
        self._optimizer.build([variable])
        self.packing = Packing([*self.packing.specs, TensorSpec("beside", (2,), tf.float32, exact=True)])
        about = {"optimizer": weakref.ref(self._optimizer), "trained": [variable.value], "packing": self.packing}
        self.context = dataclasses.replace(self.context, **about)

    def make_exchange(self) -> ShatExchange:
        """See `Training`."""
        settings = {"mixing": "shat", "pushes": "gradients", "sharding": "memory", "codec": None, "min_mixing": 0.0}
        settings |= {"consistency": "async", "max_staleness": 16, "log_base": math.e}
        exchange = ShatExchange(self.context, ShatSettings(**settings))
        exchange.state.configure(joins=False)
        return exchange

    def take_step(self, step: int, compute_seconds: float) -> int:
        """See `Training`."""
        self.clock.sleep(compute_seconds)
        self.exchange.step(Request(step, 0, tuple(self.packing.zeros())))
        return 0


class _Job:
    """A training on the virtual clock.

    Args:
      series: The strategy, with its topology or algorithm.
      num_ranks: n.
    """

    def __init__(self, series: str, num_ranks: int):
        self._series, self._num_ranks = series, num_ranks
        kind, _, name = series.partition(":")
        arguments: dict = {"num_servers": int(kind == "shat"), "continue_without_lost": kind == "shat"}
        if kind == "hop":
            topology = resolve(name, num_ranks)
            arguments["peers"] = lambda rank: {*topology.in_neighbors(rank), *topology.out_neighbors(rank)}
            make = functools.partial(HopTraining, topology=topology, settings=HopSettings())
        elif kind == "shat":
            arguments["peers"] = lambda rank: ()
            make = _ShatTraining
        else:
            schedule = Schedule(_INTERVAL, _INTERVAL) if kind == "dts" else Schedule(0, 1)
            about = {"schedule": schedule, "num_threads": schedule.num_slots if kind == "dts" else 1, "num_segments": 1}
            make = functools.partial(AveragingTraining, codec=codecs.get(None), algorithm=name, **about)
        self._cluster = VirtualCluster(num_ranks, lambda *message: _LINK_SECONDS, **arguments)
        self._servers = [ParameterServer(transport=each, num_workers=num_ranks) for each in self._cluster.servers]
        self._tally = _Tally(self._cluster, num_ranks)
        packing, own = Packing([TensorSpec("x", (_NUM_VALUES,), tf.float32)]), OwnSeconds(_COMPUTE_SECONDS)
        self._ranks = [
            make(self._cluster, rank, packing, itertools.repeat(own), self._is_over) for rank in range(num_ranks)
        ]
        self._num_ended = 0

    def run(self) -> dict[str, dict[str, float]]:
        """Trains. Returns the values for the ranks, and for the servers if there are any, by the names of the rows."""
        self._cluster.run(self._train)
        n = self._num_ranks
        kinds = {self._series: slice(n)} | ({f"{self._series} server": slice(n, None)} if self._servers else {})
        rows = {}
        for series, where in kinds.items():
            most = {phase: int(numbers[where].max()) for phase, numbers in self._tally.messages.items()}
            rows[f"{series}, {n}"] = {
                "messages": most["steps"] / _NUM_STEPS,
                "law": _closed_form(series, n),
                "start": most.get("start", 0),
                "leave": most.get("leave", 0),
                "peers": max(map(len, self._tally.peers[where])),
            }
        return rows

    def _train(self, rank: int) -> None:
        loop, membership = self._ranks[rank], self._cluster.memberships[rank]
        loop.train()
        membership.leave(sent_rounds={GROUP: loop.exchange.sent_rounds}, reason="")
        self._num_ended += 1
        if self._num_ended == self._num_ranks:
            # Threads of `AveragingTraining` do not end.
            self._cluster.scheduler.call_at(self._cluster.scheduler.now + 1.0, self._cluster.scheduler.stop)

    def _is_over(self, rank: int, step: int) -> bool:
        if step in (1, 1 + _NUM_STEPS):  # Neither the first step nor the last one is measured.
            self._tally.phases[rank] = "end" if step > 1 else "steps"
        return step > 1 + _NUM_STEPS


def main(_) -> None:
    for series in _SERIES.value:
        n, seconds = _SMALLEST.value, 0.0
        while n <= _LARGEST.value and _MOST_GROWTH * seconds <= _MAX_SECONDS.value:
            begin = time.perf_counter()
            for name, values in _Job(series, n).run().items():
                results.show(name, values)
            seconds = time.perf_counter() - begin
            n *= 2


if __name__ == "__main__":
    app.run(main)

"""The simulated ranks of `benchmark_scale.py`, and the count of their messages."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import weakref
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

from hop_tf import codecs
from hop_tf.collectives import get_network
from hop_tf.runtime.exchange import Request
from hop_tf.strategies.canary.exchange import AsyncSettings, CanaryExchange
from hop_tf.strategies.canary.gei import Thresholds
from hop_tf.strategies.shat.exchange import ShatExchange
from hop_tf.strategies.shat.settings import ShatSettings
from hop_tf.tensors.packing import Packing, TensorSpec
from hop_tf.tools.simulate import VirtualCluster
from hop_tf.tools.simulate.rank_loops import Training


class Tally:
    """Counts the messages of all ranks and servers by phase.

    The phases of a rank are "start" and "leave", for messages of its membership, and those that the caller sets.

    Args:
      cluster: The cluster.
      num_ranks: Number of ranks. Messages of a server belong to the phase of the receiver.

    Attributes:
      messages: By phase, an array with the number of messages that each rank and server has sent.
      num_bytes: By phase, the bytes of these messages.
      peers: The peers of each rank and server.
      phases: The present phase of each rank.
      most_buffered: The most bytes in the cluster's buffers so far.
    """

    def __init__(self, cluster: VirtualCluster, num_ranks: int):
        self._cluster, self._num_ranks = cluster, num_ranks
        transports = [*(membership.transport for membership in cluster.memberships), *cluster.servers]
        self.messages = collections.defaultdict(lambda: np.zeros(len(transports), int))
        self.num_bytes = collections.defaultdict(lambda: np.zeros(len(transports), int))
        self.peers: list[set[int]] = [set() for _ in transports]
        self.phases = ["first"] * num_ranks
        self.most_buffered = 0
        for transport in transports:
            transport.send = functools.partial(self._send, transport.rank, transport.send)

    def _send(
        self, rank: int, send: Callable[..., bool], peer: int, queue: str, header=b"", payload=(), *others, **how
    ):
        has_superseded = send(peer, queue, header, payload, *others, **how)
        if not has_superseded:
            phase = self.phases[rank if rank < self._num_ranks else peer]
            phase = {"membership/leave": "leave"}.get(queue, "start" if queue.startswith("membership/") else phase)
            self.messages[phase][rank] += 1
            self.num_bytes[phase][rank] += len(header) + sum(array.nbytes for array in payload)
            self.peers[rank].add(peer)
            self.peers[peer].add(rank)
            self.most_buffered = max(self.most_buffered, self._cluster.pool.live_bytes)
        return has_superseded


class CanaryTraining(Training):
    """A rank under asynchronous Canary, with one colayer."""

    def __init__(self, *arguments, network: str):
        super().__init__(*arguments)
        self._step = 0
        variable = tf.Variable(tf.zeros(self.packing.specs[0].shape))
        self.context = dataclasses.replace(self.context, start_thread=self.start_thread, trained=[variable])
        self._network = network

    def make_exchange(self) -> CanaryExchange:
        """See `Training`."""
        settings = {"thresholds": Thresholds(16, 1), "codec": codecs.get(None), "sync_interval": None}
        settings = AsyncSettings(network=get_network(self._network), max_in_flight=4, **settings)
        return CanaryExchange(self.context, ((0,),), settings)

    def begin(self) -> int:
        """See `Training`."""
        step = super().begin()
        self.exchange.step(Request(0, self.exchange.start_segment, tuple(self.exchange.parts[0].zeros())))
        return step

    def take_step(self, step: int, compute_seconds: float) -> int:
        """See `Training`."""
        self.clock.sleep(compute_seconds)
        result = self.exchange.step(Request(step, 0, tuple(self.exchange.parts[0].zeros())))
        self._step = step + 1 + result.num_skipped
        return result.num_skipped

    def finish(self) -> None:
        """Merges what is in flight. See `Training`."""
        self.exchange.step(Request(self._step, self.exchange.finish_segment, (np.empty(0, np.float32),)))


class ShatTraining(Training):
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

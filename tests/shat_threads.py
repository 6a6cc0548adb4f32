"""SHAT's workers and servers in the threads of this process, for tests without training."""

import contextlib
import dataclasses
import threading
import time
import weakref

import keras
import numpy as np
import tensorflow as tf

from hop_tf.membership.monitor import ThreadMonitor
from hop_tf.membership.session import Membership
from hop_tf.options import CommunicationOptions
from hop_tf.runtime.deltas import DeltaTracker
from hop_tf.runtime.exchange import Request
from hop_tf.runtime.group import ExchangeContext
from hop_tf.runtime.replica_state import spec_of
from hop_tf.strategies.shat.exchange import ShatExchange
from hop_tf.strategies.shat.server.server import ParameterServer
from hop_tf.strategies.shat.server.snapshots import Snapshots
from hop_tf.strategies.shat.settings import ShatSettings
from hop_tf.tensors.buffers import BufferPool
from hop_tf.tensors.packing import Packing, TensorSpec
from hop_tf.transport.in_process import InProcessNetwork, InProcessTransport

NUM_VALUES = 100
RATE = 0.5
GROUP = "0-group"
OPTIONS = CommunicationOptions(timeout_seconds=30)
SETTINGS = ShatSettings(
    mixing="shat",
    pushes="gradients",
    sharding="memory",
    consistency="async",
    max_staleness=16,
    min_mixing=0.0,
    log_base=np.e,
    codec=None,
)


class ShatWorker:
    """A rank's variable and exchange."""

    def __init__(
        self,
        membership,
        settings=SETTINGS,
        make_optimizer=lambda: keras.optimizers.SGD(RATE),
        carried=(),
        group=GROUP,
    ):
        self.variable = keras.Variable(np.ones(NUM_VALUES, "float32"), name="w")
        self.optimizer = make_optimizer()
        self.optimizer.build([self.variable])
        trained, carried = [self.variable.value], list(carried)
        self.packing = Packing(
            [
                *map(spec_of, trained),
                *(dataclasses.replace(spec_of(variable), exact=True) for variable in carried),
                TensorSpec("beside", (max(2, len(membership.servers)),), tf.float32, exact=True),
            ]
        )
        context = ExchangeContext(
            group,
            1,
            self.packing,
            membership,
            BufferPool(),
            optimizer=weakref.ref(self.optimizer),
            trained=trained,
            carried=DeltaTracker(carried, [variable.read_value() for variable in carried]),
        )
        self.exchange = ShatExchange(context, settings)

    def push(self, step, value, rate=RATE, is_applied=True):
        """Pushes a constant gradient; returns the servers' model, and the mixing weight of each server."""
        buckets = self.packing.zeros()
        buckets[0][:NUM_VALUES] = value
        bucket, where = self.packing.place(len(self.packing.specs) - 1)
        buckets[bucket][where][:2] = rate, is_applied
        result = self.exchange.step(Request(step, 0, tuple(buckets)))
        return result.buckets[0][:NUM_VALUES], result.buckets[bucket][where.start :]


class ShatThreads(contextlib.ExitStack):
    """Workers and servers in the threads of this process.

    Args:
      num_workers: Number of workers.
      num_servers: Number of servers.
      transport: Class of the transports.
      settings: A list with the settings of each worker. Default: `SETTINGS` for all.
      options: Deadlines. Default: `OPTIONS`.
      snapshots: A `SnapshotOptions` for the servers, or None.
      worker_arguments: Further arguments of `ShatWorker`.
    """

    def __init__(
        self,
        num_workers,
        num_servers,
        transport=InProcessTransport,
        settings=None,
        options=None,
        snapshots=None,
        **worker_arguments,
    ):
        super().__init__()
        self._options = options or OPTIONS
        self._snapshots = snapshots
        self.network = InProcessNetwork(num_workers + num_servers)
        self.errors, self.servers = [], []
        transports = [
            transport(rank, self.network, options=self._options, on_error=self.errors.append)
            for rank in range(num_workers + num_servers)
        ]
        for each in transports:
            self.callback(each.close)
            each.start()
        self._transports, self._num_workers = transports, num_workers
        self.servers = [self._serve(index) for index in range(num_servers)]
        memberships = [self._membership(each, num_workers, num_servers) for each in transports[:num_workers]]
        settings = settings or [SETTINGS] * num_workers
        self.workers = [ShatWorker(m, each, **worker_arguments) for m, each in zip(memberships, settings, strict=True)]

    def _membership(self, transport, num_workers, num_servers):
        return Membership(
            transport=transport,
            monitor=ThreadMonitor(),
            options=self._options,
            world_size=num_workers,
            peers=(),
            continue_without_lost=True,
            servers=range(num_workers, num_workers + num_servers),
        )

    def _serve(self, index):
        return ParameterServer(
            transport=self._transports[self._num_workers + index],
            num_workers=self._num_workers,
            snapshots=self._snapshots and Snapshots(self._snapshots, index),
        )

    def restart_server(self, index, snapshots=None):
        """Replaces a server as if its process were restarted; returns for each worker if it goes on.

        Args:
          index: The server's index.
          snapshots: Options of the new server. Default: those of the former one.
        """
        self._snapshots = snapshots or self._snapshots
        former = self.servers[index]
        former._send = lambda *args, **kwargs: None  # The former server no longer has any effect.
        if former._snapshots is not None:
            with former._snapshots._writing:
                former._snapshots._write = former._send
        self.servers[index] = self._serve(index)
        return [worker.exchange.goes_on_with(self._num_workers + index) for worker in self.workers]

    def run(self, body):
        """Calls `body(rank, worker)` for each worker on a thread of its own; raises the first error of a thread."""
        failures = []

        def call(rank, worker):
            try:
                body(rank, worker)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=call, args=each, daemon=True) for each in enumerate(self.workers)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 200
        while any(thread.is_alive() for thread in threads):
            if failures or self.errors:
                break
            if time.monotonic() > deadline:
                raise AssertionError("a worker hangs")
            time.sleep(0.01)
        if failures or self.errors:
            raise (failures or self.errors)[0]

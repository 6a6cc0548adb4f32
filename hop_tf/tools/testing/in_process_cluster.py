"""`InProcessCluster`: trains with several ranks in the threads of one process, for tests of models."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hop_tf.arguments import check_integer
from hop_tf.errors import DeadlineExceededError
from hop_tf.keras_hook.adapted import become_rank
from hop_tf.strategy import ExchangeStrategy
from hop_tf.transport.in_process import InProcessNetwork, InProcessTransport

# The time that a parameter server may take to begin serving, and to end after the last rank.
_SERVER_SECONDS = 30.0


class InProcessCluster:
    """Runs a function on every rank of a cluster, each in a thread of this process.

    It needs no ports and starts no processes, so that a test of a model takes little longer than its training. Ranks
    exchange the same messages as between processes. For processes that die, use `MultiProcessRunner`.

        def make_strategy(cluster_resolver):
            return hop_tf.HopStrategy(topology="ring", cluster_resolver=cluster_resolver)

        def train(strategy):
            with strategy.scope():
                model = make_model()
            return model.fit(x, y, batch_size=32, verbose=0).history

        histories = InProcessCluster(4, make_strategy).run(train)

    Ranks share the global state of the process: environment variables, devices, and global random seeds
    (`keras.utils.set_random_seed`). Ranks draw random numbers in any order, so give each layer a seed of its own.

    Args:
      num_workers: Number of ranks, at least 1.
      make_strategy: `make_strategy(cluster_resolver)` makes the strategy of a rank. It is also called for each
        parameter server, and serves there.
      num_ps: Number of parameter servers. Default 0.
      timeout_seconds: The longest time of `run`. Default 300.

    Raises:
      ValueError: If `num_workers` is not a positive integer, or `num_ps` is negative.
    """

    def __init__(
        self,
        num_workers: int,
        make_strategy: Callable[[tf.distribute.cluster_resolver.ClusterResolver], ExchangeStrategy],
        *,
        num_ps: int = 0,
        timeout_seconds: float = 300.0,
    ):
        if not isinstance(num_workers, int) or isinstance(num_workers, bool) or num_workers < 1:
            raise ValueError(f"`num_workers` must be a positive integer. Received: num_workers={num_workers!r}.")
        check_integer("num_ps", num_ps, at_least=0)
        self._num_workers = num_workers
        self._num_ps = num_ps
        self._make_strategy = make_strategy
        self._timeout_seconds = timeout_seconds

    def run(self, fn: Callable[[ExchangeStrategy], Any]) -> list:
        """Calls `fn(strategy)` for every rank and shuts the strategies down. May be called again.

        Args:
          fn: The function of a rank.

        Returns:
          The values of `fn`, in the order of the ranks.

        Blocks: until all ranks have returned, at most `timeout_seconds`.

        Raises:
          Exception: The exception of `fn`. If several ranks raise, the first one in time.
          DeadlineExceededError: If a rank has not returned in time. The message shows its stack.
        """
        network = InProcessNetwork(self._num_workers + self._num_ps)
        strategies: list[ExchangeStrategy] = []
        servers = [_Server(self._make_strategy, self._resolver(network, "ps", i)) for i in range(self._num_ps)]
        try:
            for rank in range(self._num_workers):
                strategies.append(self._make_strategy(self._resolver(network, "worker", rank)))
            for index, server in enumerate(servers):
                server.wait_until_it_serves(lambda number=self._num_workers + index: network.serves(number))
            return self._run(fn, strategies)
        finally:
            for strategy in strategies:
                strategy.shutdown()
            for server in servers:
                server.join()

    def _resolver(self, network: InProcessNetwork, task_type: str, task_id: int) -> _Resolver:
        # The addresses are only names. Ports begin with 1, because 0 is not a port.
        addresses = [f"in-process:{1 + number}" for number in range(len(network.addresses))]
        tasks = {"worker": addresses[: self._num_workers], "ps": addresses[self._num_workers :]}
        return _Resolver(network, {name: task for name, task in tasks.items() if task}, task_type, task_id)

    def _run(self, fn: Callable[[ExchangeStrategy], Any], strategies: list[ExchangeStrategy]) -> list:
        failures: list[BaseException] = []
        ranks = [_Rank(fn, strategy, failures) for strategy in strategies]
        deadline = time.monotonic() + self._timeout_seconds
        for rank in ranks:
            rank.thread.start()
        for rank in ranks:
            rank.thread.join(max(0.0, deadline - time.monotonic()))
        if failures:
            raise failures[0]
        stacks = [rank.stack() for rank in ranks if rank.thread.is_alive()]
        if stacks:
            raise DeadlineExceededError(f"still running after {self._timeout_seconds:g} s:\n" + "\n".join(stacks))
        return [rank.value for rank in ranks]


class _Server:
    """A parameter server's thread."""

    def __init__(self, make_strategy: Callable[[_Resolver], ExchangeStrategy], resolver: _Resolver):
        self._make_strategy = make_strategy
        self._resolver = resolver
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"hop_tf ps {resolver.task_id}", daemon=True)
        self._thread.start()

    def wait_until_it_serves(self, serves: Callable[[], bool]) -> None:
        """Waits until the server serves, has failed, or is late. Otherwise ranks could end before it hears of them."""
        deadline = time.monotonic() + _SERVER_SECONDS
        while self._thread.is_alive() and not serves() and time.monotonic() < deadline:
            time.sleep(0.005)

    def join(self) -> None:
        """Waits until the server has ended. Raises its exception, if there is one."""
        self._thread.join(_SERVER_SECONDS)
        if self._thread.is_alive():
            raise DeadlineExceededError(f"{self._thread.name} still serves, {_SERVER_SECONDS:g} s after all ranks.")
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            self._make_strategy(self._resolver)
        except SystemExit:
            pass  # The script of a parameter server ends in this way.
        except BaseException as error:
            self._failure = error


class _Rank:
    """One rank's thread.

    Attributes:
      thread: The thread.
      value: The value of the function.
    """

    def __init__(
        self, fn: Callable[[ExchangeStrategy], Any], strategy: ExchangeStrategy, failures: list[BaseException]
    ):
        self.value = None
        self._fn = fn
        self._strategy = strategy
        self._failures = failures
        self.thread = threading.Thread(target=self._run, name=f"hop_tf rank {strategy.rank}", daemon=True)

    def stack(self) -> str:
        """The thread's present stack, as text."""
        frame = sys._current_frames().get(self.thread.ident)
        return f"{self.thread.name}:\n{''.join(traceback.format_stack(frame)) if frame else ''}"

    def _run(self) -> None:
        become_rank()
        try:
            self.value = self._fn(self._strategy)
        except BaseException as error:
            error.add_note(f"Raised by rank {self._strategy.rank} of an InProcessCluster.")
            self._failures.append(error)
        finally:
            self._strategy.shutdown()  # Others do not wait for this rank any longer.


class _Resolver(tf.distribute.cluster_resolver.SimpleClusterResolver):
    """A task's place in the cluster, and the transport that reaches the others."""

    def __init__(self, network: InProcessNetwork, tasks: dict[str, list[str]], task_type: str, task_id: int):
        super().__init__(tf.train.ClusterSpec(tasks), task_type=task_type, task_id=task_id)
        self._network = network

    def make_transport(self, rank: int, addresses, *, identity, in_turn=True, **arguments) -> InProcessTransport:
        """See `Cluster.make_transport`."""
        del addresses, identity, in_turn  # In one program, versions, settings and clusters cannot differ.
        return InProcessTransport(rank, self._network, **arguments)

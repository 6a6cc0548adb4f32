"""`hop_tf.simulate.hop`: training under HopStrategy on a virtual clock."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import tensorflow as tf

from hop_tf.emulation import ComputeEmulation
from hop_tf.exchange import Outgoing
from hop_tf.packing import Packing, TensorSpec
from hop_tf.queues import SimulatedFifo
from hop_tf.simulate.virtual import VirtualCluster
from hop_tf.strategies.hop_exchange import RENEWAL, STEP, HopExchange
from hop_tf.strategies.hop_settings import HopSettings
from hop_tf.topology import resolve
from hop_tf.worker import ExchangeContext

_GROUP, _SESSION = "simulated", 1


@dataclasses.dataclass(frozen=True)
class Problem:
    """What simulated ranks train.

    Attributes:
      initial: float32 array [d], where all ranks start.
      change: `change(rank, step, x)` is what the optimizer's step adds at `rank` in iteration `step`, computed at `x`:
        for plain gradient descent minus learning rate times gradient. Array [d].
    """

    initial: np.ndarray
    change: Callable[[int, int, np.ndarray], np.ndarray]


_NOTHING_TO_LEARN = Problem(np.zeros(1, np.float32), lambda rank, step, x: np.zeros(1, np.float32))


@dataclasses.dataclass(frozen=True)
class HopSimulation:
    """What happened at n ranks.

    Attributes:
      num_steps: Array [n]: how many iterations each rank made or jumped over.
      entered_seconds: Array [n, max(num_steps)]: when each rank entered each iteration; nan where it jumped over it.
      finished_seconds: Array [n]: when each rank ended its last iteration.
      largest_gap: Array [n, n]: the largest Iter(i) - Iter(j) while both trained.
      most_updates: Array [n]: the most updates that each rank had in memory.
      parameters: float32 array [n, d]: where each rank ended.
      counters: Each rank's counters, as in `HopStrategy.report()`.
    """

    num_steps: np.ndarray
    entered_seconds: np.ndarray
    finished_seconds: np.ndarray
    largest_gap: np.ndarray
    most_updates: np.ndarray
    parameters: np.ndarray
    counters: Sequence[Mapping[str, float]]

    @property
    def iterations_per_second(self) -> np.ndarray:
        """Each rank's iteration speed, array [n]. Iterations that were jumped over count."""
        return self.num_steps / self.finished_seconds


def simulate_hop(
    *,
    topology: object,
    world_size: int,
    num_steps: int | Sequence[int],
    compute: ComputeEmulation | Callable[[int], Iterator[float]],
    link_seconds: Callable[[int, int, int], float] | None = None,
    problem: Problem | None = None,
    hosts: Sequence[str] | None = None,
    **settings,
) -> HopSimulation:
    """Trains under `HopStrategy`'s own protocol on a virtual clock.

    Args:
      topology: As for `HopStrategy`.
      world_size: Number of ranks.
      num_steps: Iterations of each rank; or a list with one number for each rank, as where ranks end early.
      compute: How long each training step takes: the launcher's emulation, or `compute(rank)`, which gives an iterator
        of seconds. Iterations that are jumped over take none.
      link_seconds: `link_seconds(sender, receiver, num_bytes)` is how long a message takes. Default: no time.
      problem: What is trained. Default: nothing, as where only speed matters.
      hosts: The host of each rank, for a hierarchical topology.
      **settings: Further arguments of `HopStrategy`: max_iteration_gap, num_backup_workers, max_staleness, skip,
        update_order, synchronization.

    Returns:
      The record.

    Raises:
      ValueError: If an argument is out of range.
      DeadlockError: If ranks wait for each other for ever. That would be an error in hop_tf.
      HopError: What training would raise.
    """
    topology = resolve(topology, world_size, hosts)
    checked = HopSettings(**settings)
    checked.check_topology(topology)
    durations = compute
    if isinstance(compute, ComputeEmulation):

        def durations(rank):
            return compute.step_durations(rank, world_size)

    steps = [num_steps] * world_size if isinstance(num_steps, int) else list(num_steps)
    cluster = VirtualCluster(
        world_size, link_seconds, lambda rank: {*topology.in_neighbors(rank), *topology.out_neighbors(rank)}
    )
    record = _Record(world_size, max(steps))
    ranks = [
        _Rank(
            rank,
            cluster=cluster,
            record=record,
            make_exchange=lambda context: HopExchange(context, topology=topology, settings=checked),
            serial=checked.update_order == "serial",
            durations=durations(rank),
            num_steps=steps[rank],
            problem=problem or _NOTHING_TO_LEARN,
        )
        for rank in range(world_size)
    ]
    cluster.run(lambda rank: ranks[rank].train())
    return HopSimulation(
        num_steps=np.array(steps),
        entered_seconds=record.entered,
        finished_seconds=record.finished,
        largest_gap=record.largest_gap,
        most_updates=record.most_updates,
        parameters=np.stack([rank.x for rank in ranks]),
        counters=[rank.exchange.counters() for rank in ranks],
    )


class _Record:
    """Where all ranks are, and were."""

    def __init__(self, world_size: int, num_steps: int):
        self.entered = np.full((world_size, num_steps), np.nan)
        self.finished = np.zeros(world_size)
        self.largest_gap = np.zeros((world_size, world_size), int)
        self.most_updates = np.zeros(world_size, int)
        self._iterations = np.zeros(world_size, int)
        self._trains = np.ones(world_size, bool)

    def enter(self, rank: int, step: int, now: float, num_updates: int) -> None:
        self.entered[rank, step] = now
        self._iterations[rank] = step
        self.most_updates[rank] = max(self.most_updates[rank], num_updates)
        gaps = np.where(self._trains, step - self._iterations, 0)
        np.maximum(self.largest_gap[rank], gaps, out=self.largest_gap[rank])

    def finish(self, rank: int, now: float) -> None:
        self.finished[rank] = now
        self._trains[rank] = False


class _Rank:
    """One rank's training loop: what the training graph does around an exchange."""

    def __init__(
        self,
        rank: int,
        *,
        cluster: VirtualCluster,
        record: _Record,
        make_exchange: Callable[[ExchangeContext], HopExchange],
        serial: bool,
        durations: Iterator[float],
        num_steps: int,
        problem: Problem,
    ):
        self._rank = rank
        self._clock = cluster.scheduler
        self._membership = cluster.memberships[rank]
        self._record = record
        self._serial = serial
        self._durations = durations
        self._num_steps = num_steps
        self._problem = problem
        self.x = problem.initial.astype(np.float32)
        self._packing = Packing([TensorSpec("x", self.x.shape, tf.float32)])
        self.exchange = make_exchange(
            ExchangeContext(_GROUP, _SESSION, self._packing, self._membership, cluster.pool, SimulatedFifo)
        )

    def train(self) -> None:
        self._membership.begin_session()
        step = 0
        while step < self._num_steps:
            self._record.enter(self._rank, step, self._clock.now, self.exchange.num_updates_in_memory)
            step += 1 + self._take_step(step)
        self._record.finish(self._rank, self._clock.now)
        self._membership.leave(sent_steps={_GROUP: self.exchange.sent_steps}, reason="done")

    def _take_step(self, step: int) -> int:
        """One iteration; returns how many are jumped over."""
        start = self._clock.now
        change = self._problem.change(self._rank, step, self.x)
        if self._serial:
            self._compute_until(start + next(self._durations))
            self._apply(change)
        num_skipped = self._average(step, STEP)
        if not self._serial:
            self._compute_until(start + next(self._durations))
            self._apply(change)
        if num_skipped:
            self._average(step, RENEWAL)
        return num_skipped

    def _compute_until(self, time: float) -> None:
        if time > self._clock.now:
            self._clock.sleep(time - self._clock.now)

    def _apply(self, change: np.ndarray) -> None:
        self.x = self.x + np.asarray(change, np.float32)

    def _average(self, step: int, segment: int) -> int:
        bucket = np.zeros(self._packing.sizes[0], np.float32)
        bucket[: self.x.size] = self.x
        incoming = self.exchange.step(Outgoing(step, segment, (bucket,)))
        self.x = self.x + incoming.buckets[0][: self.x.size]
        return incoming.num_skipped

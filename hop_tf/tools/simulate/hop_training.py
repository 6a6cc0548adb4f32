"""`hop_tf.simulate.hop`: training under HopStrategy on a virtual clock."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import numpy as np
import tensorflow as tf

from hop_tf.arguments import check_integer, check_seconds
from hop_tf.errors import DeadlineExceededError, PeerLostError
from hop_tf.runtime.exchange import Result
from hop_tf.runtime.joiner import State
from hop_tf.runtime.joining import Joining
from hop_tf.runtime.replica_state import sign
from hop_tf.strategies.hop.exchange import HopExchange
from hop_tf.strategies.hop.settings import HopSettings
from hop_tf.tensors.packing import Packing, TensorSpec
from hop_tf.tools.emulation import ComputeEmulation
from hop_tf.tools.simulate.rank_loops import HopTraining, OwnSeconds
from hop_tf.tools.simulate.rejoining import catch_up
from hop_tf.tools.simulate.virtual import VirtualCluster
from hop_tf.topology import Topology, resolve

# The time in which a real process detects a death without further waiting.
_DETECTION_SECONDS = 2.0


@dataclasses.dataclass(frozen=True)
class Problem:
    """The problem that simulated ranks train.

    Attributes:
      initial: float32 array [d], the parameters with which all ranks start.
      change: `change(rank, step, x)` is the change that the optimizer of `rank` makes in iteration `step`, computed at
        the parameters `x`. Array [d]. For plain gradient descent, it is minus the learning rate times the gradient.
    """

    initial: np.ndarray
    change: Callable[[int, int, np.ndarray], np.ndarray]


_NOTHING_TO_LEARN = Problem(np.zeros(1, np.float32), lambda rank, step, x: np.zeros(1, np.float32))


@dataclasses.dataclass(frozen=True)
class Fault:
    """The death of a rank.

    Attributes:
      rank: The rank.
      seconds: The virtual time at which its process is killed.
      restart_seconds: The time from the death to the restart, or None for no restart.
      reaches: The ranks that receive the messages that are in flight at the rank's death. None: all.

    Raises:
      ValueError: If a time is negative or not finite.
    """

    rank: int
    seconds: float
    restart_seconds: float | None = None
    reaches: Collection[int] | None = None

    def __post_init__(self):
        check_seconds("seconds", self.seconds)
        if self.restart_seconds is not None:
            check_seconds("restart_seconds", self.restart_seconds)


@dataclasses.dataclass(frozen=True)
class HopSimulation:
    """The record of a simulation with n ranks.

    Attributes:
      num_steps: Array [n]: the number of iterations that each rank was to make or skip.
      entered_seconds: Array [n, max(num_steps)]: the time at which each rank entered each iteration; nan if the rank
        skipped the iteration.
      finished_seconds: Array [n]: the time at which each rank ended its last iteration; nan if the rank died and did
        not come back in time.
      largest_gap: Array [n, n]: the largest Iter(i) - Iter(j) while both trained.
      most_updates: Array [n]: the most updates that each rank had in memory.
      parameters: float32 array [n, d]: the last parameters of each rank.
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
        """Each rank's iteration speed, array [n]. Skipped iterations count, too."""
        return self.num_steps / self.finished_seconds


def simulate_hop(
    *,
    topology: object,
    world_size: int,
    num_steps: int | Sequence[int],
    compute: ComputeEmulation | Callable[[int], Iterator[float]],
    link_seconds: Callable[[int, int, int], float] | None = None,
    sending_seconds: Callable[[int, int, int], float] | None = None,
    problem: Problem | None = None,
    hosts: Sequence[str] | None = None,
    faults: Sequence[Fault] = (),
    **settings,
) -> HopSimulation:
    """Trains under `HopStrategy`'s own protocol on a virtual clock.

    Args:
      topology: As for `HopStrategy`.
      world_size: Number of ranks.
      num_steps: The number of iterations of each rank, or a list with one number for each rank.
      compute: The durations of training steps: the launcher's emulation, or `compute(rank)`, which returns an iterator
        of seconds, one for each step that the rank makes. Skipped iterations use none of these seconds.
      link_seconds: `link_seconds(sender, receiver, num_bytes)` is the latency of a message. Default: no time.
      sending_seconds: `sending_seconds(sender, receiver, num_bytes)` is the time for which a message keeps its link
        busy before its latency begins: bytes divided by bandwidth. Meanwhile other messages to the same rank wait.
        Tokens in messages of their own do not wait behind updates. Simulated models are small, so use the bytes of your
        own model in place of `num_bytes`. Default: no time.
      problem: The problem to train. Default: nothing is learned, for runs that measure only speed.
      hosts: The host of each rank, for a hierarchical topology.
      faults: Ranks that die, and are started again. The others notice a death after two seconds, or through the
        restart.
      **settings: Further arguments of `HopStrategy`: max_iteration_gap, num_backup_workers, max_staleness, skip,
        interval, update_order, synchronization, on_peer_loss.

    Returns:
      The record.

    Raises:
      ValueError: If an argument is out of range.
      DeadlockError: If ranks wait for each other for ever. That would be an error in hop_tf.
      HopError: As training does, for instance if a rank dies and `on_peer_loss` is "raise".
    """
    job = Job(
        topology=resolve(topology, world_size, hosts),
        settings=HopSettings(**settings),
        num_steps=_steps_of_each(num_steps, world_size),
        compute=compute,
        link_seconds=link_seconds,
        sending_seconds=sending_seconds,
        problem=problem or _NOTHING_TO_LEARN,
    )
    for fault in faults:
        if fault.rank not in range(world_size):
            raise ValueError(f"`faults` must be of ranks in [0, {world_size}). Received: faults with {fault}.")
        job.schedule(fault)
    return job.run()


def _steps_of_each(num_steps: int | Sequence[int], world_size: int) -> list[int]:
    each = [num_steps] * world_size if np.ndim(num_steps) == 0 else list(num_steps)
    if len(each) != world_size:
        raise ValueError(
            f"`num_steps` must be one number, or a list with one for each of {world_size} ranks. "
            f"Received: num_steps={num_steps!r}."
        )
    for number in each:
        check_integer("num_steps", number, at_least=0)
    return each


class Job:
    """A simulated job, whose ranks can be killed. For the other arguments see `simulate_hop`.

    Args:
      tracing_seconds: `tracing_seconds(rank)` is the time that a process takes to trace its first step. Default: 0.
      limit_seconds: See `VirtualCluster`.

    Attributes:
      cluster: The ranks' memberships and the clock.
    """

    def __init__(
        self,
        *,
        topology: Topology,
        settings: HopSettings,
        num_steps: Sequence[int],
        compute: ComputeEmulation | Callable[[int], Iterator[float]],
        link_seconds: Callable[[int, int, int], float] | None,
        problem: Problem,
        tracing_seconds: Callable[[int], float] | None = None,
        sending_seconds: Callable[[int, int, int], float] | None = None,
        limit_seconds: float | None = None,
    ):
        settings.check_topology(topology)
        self._topology = topology
        self._settings = settings
        self._num_steps = num_steps
        self._compute = compute
        self._problem = problem
        self._tracing_seconds = tracing_seconds
        self._record = _Record(topology.world_size, max(num_steps))
        self.cluster = VirtualCluster(
            topology.world_size,
            link_seconds,
            lambda rank: {*topology.in_neighbors(rank), *topology.out_neighbors(rank)},
            continue_without_lost=settings.continues_without_lost,
            detection_seconds=_DETECTION_SECONDS,
            sending_seconds=sending_seconds,
            limit_seconds=limit_seconds,
        )
        self._ranks = [self._make_rank(rank) for rank in range(topology.world_size)]

    def run(self) -> HopSimulation:
        """Runs the training."""
        self.cluster.run(lambda rank: self._ranks[rank].train())
        record = self._record
        for rank, process in enumerate(self._ranks):
            record.end(rank, process.exchange)
        return HopSimulation(
            num_steps=np.array(self._num_steps),
            entered_seconds=record.entered,
            finished_seconds=record.finished,
            largest_gap=record.largest_gap,
            most_updates=record.most_updates,
            parameters=np.stack([rank.x for rank in self._ranks]),
            counters=[rank.exchange.counters() if rank.exchange else {} for rank in self._ranks],
        )

    def schedule(self, fault: Fault) -> None:
        """Schedules the death of a rank."""
        self.cluster.scheduler.call_at(
            fault.seconds, lambda: self.kill(fault.rank, fault.restart_seconds, fault.reaches)
        )

    def kill(self, rank: int, restart_seconds: float | None = None, reaches: Collection[int] | None = None) -> None:
        """Ends the process of a rank that trains, as a `Fault` does. Call it by `Scheduler.call_at`."""
        if self.cluster.kill(rank, reaches):
            self._record.leave(rank)
            if restart_seconds is not None:
                scheduler = self.cluster.scheduler
                scheduler.call_at(scheduler.now + restart_seconds, lambda: self._restart(rank))

    def _restart(self, rank: int) -> None:
        self.cluster.restart(rank)
        self._record.end(rank, self._ranks[rank].exchange)
        self._ranks[rank] = self._make_rank(rank, was_restarted=True)
        self.cluster.start(rank, self._ranks[rank].train)

    def _make_rank(self, rank: int, was_restarted: bool = False) -> _Rank:
        return _Rank(
            self.cluster,
            rank,
            Packing([TensorSpec("x", self._problem.initial.shape, tf.float32)]),
            self._durations(rank),
            topology=self._topology,
            settings=self._settings,
            record=self._record,
            close=lambda: self.cluster.close(rank),
            num_steps=self._num_steps[rank],
            problem=self._problem,
            tracing_seconds=self._tracing_seconds(rank) if self._tracing_seconds else 0.0,
            was_restarted=was_restarted,
        )

    def _durations(self, rank: int) -> Iterator[float]:
        if isinstance(self._compute, ComputeEmulation):
            return self._compute.step_durations(rank, self._topology.world_size)
        return self._compute(rank)


class _Record:
    """The current and past iterations of all ranks."""

    def __init__(self, world_size: int, num_steps: int):
        self.entered = np.full((world_size, num_steps), np.nan)
        self.finished = np.full(world_size, np.nan)
        self.largest_gap = np.zeros((world_size, world_size), int)
        self.most_updates = np.zeros(world_size, int)
        self._iterations = np.zeros(world_size, int)
        self._trains = np.ones(world_size, bool)

    def end(self, rank: int, exchange: HopExchange | None) -> None:
        """Records the final numbers of a process's exchange, which is None if the process has not made one."""
        if exchange is not None:
            self.most_updates[rank] = max(self.most_updates[rank], exchange.most_updates_in_memory)

    def enter(self, rank: int, step: int, now: float) -> None:
        self.entered[rank, step] = now
        self._iterations[rank] = step
        self._trains[rank] = True
        gaps = np.where(self._trains, step - self._iterations, 0)
        np.maximum(self.largest_gap[rank], gaps, out=self.largest_gap[rank])

    def finish(self, rank: int, now: float) -> None:
        self.finished[rank] = now
        self.leave(rank)

    def leave(self, rank: int) -> None:
        self._trains[rank] = False


class _Rank(HopTraining, State):
    """One process of a rank."""

    def __init__(
        self,
        *arguments,
        record: _Record,
        close: Callable[[], None],
        num_steps: int,
        problem: Problem,
        tracing_seconds: float,
        was_restarted: bool,
        **settings,
    ):
        super().__init__(*arguments, **settings)
        self._record, self._close = record, close
        self._num_steps = num_steps
        self._problem = problem
        self._tracing_seconds = tracing_seconds
        self._was_restarted = was_restarted
        self.x = problem.initial.astype(np.float32)
        self._change = np.zeros_like(self.x)
        self._joining = Joining(self.membership, self, timeout_seconds=0.0)

    # State for other ranks.

    def signature(self, groups: str) -> bytes:
        return sign(groups, "", self.packing.specs)

    def read(self) -> list[np.ndarray]:
        return [self.x]

    def write(self, payload: np.ndarray) -> None:
        self.x = payload.view(np.float32).copy()

    # The life of the process.

    def train(self) -> None:
        try:
            step = self.begin()
        except (PeerLostError, DeadlineExceededError) as error:
            if not self._was_restarted:
                raise
            self._give_up(error)  # All others have ended.
            return
        self.train_from(step)

    def begin(self) -> int:
        self.membership.begin_session()
        self.sleep_until(self.clock.now + self._tracing_seconds)
        self.exchange = self._joining.attach(self.context.group, self.make_exchange)
        return catch_up(self.membership, self._joining, self.context.group, self.clock)

    def _give_up(self, error: Exception) -> None:
        """Ends the process, as an error in `fit` does."""
        self.membership.leave(sent_rounds={}, reason=str(error), abort=True)
        self._close()

    def is_through(self, step: int) -> bool:
        step += self.exchange.step_offset
        if step < self._num_steps:
            self._record.enter(self.rank, step, self.clock.now)
        return step >= self._num_steps

    def finish(self) -> None:
        self._record.finish(self.rank, self.clock.now)
        self.membership.leave(sent_rounds={self.context.group: self.exchange.sent_rounds}, reason="")

    def next_own(self, step: int) -> OwnSeconds:
        seconds = next(self._own, None)
        if seconds is None:
            raise ValueError(
                f"`compute` must last as long as a rank trains. Received: none for step {step} of rank {self.rank}."
            )
        check_seconds("compute", seconds, f" for step {step} of rank {self.rank}")
        return OwnSeconds(seconds)

    # Learning.

    def parameters(self) -> tuple[np.ndarray, ...]:
        (bucket,) = self.packing.zeros()
        bucket[: self.x.size] = self.x
        return (bucket,)

    def compute(self, step: int) -> None:
        self._change = np.asarray(self._problem.change(self.rank, step, self.x), np.float32)

    def apply(self) -> None:
        self.x = self.x + self._change

    def add(self, result: Result) -> None:
        self.x = self.x + result.buckets[0][: self.x.size]

    def before_exchange(self, step: int) -> None:
        last = self.exchange.steps_of(step // self._settings.interval)[-1]
        self._joining.at_step(last + self.exchange.step_offset)

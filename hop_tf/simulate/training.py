"""How long steps take under a strategy, on given ranks and links: its own protocol on a virtual clock.

What a rank does on its own is given, step by step, and so is what a message takes. All that is sent and waited for is
the strategy's code: `HopExchange`, and the all-reduce of `AveragingExchange`, with the times at which Pipe-SGD and DTS
hand out and merge. Nothing is learned: vectors are always the same.
"""

from __future__ import annotations

import abc
import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import tensorflow as tf

from hop_tf import codecs
from hop_tf.arguments import check_choice, check_integer
from hop_tf.records import Kind, Recorder
from hop_tf.runtime.averaging_exchange import AveragingExchange
from hop_tf.runtime.exchange import Exchange, Incoming, Outgoing
from hop_tf.runtime.group import ExchangeContext
from hop_tf.simulate.scheduler import Scheduler
from hop_tf.simulate.virtual import VirtualCluster
from hop_tf.strategies.dts.windows import Schedule
from hop_tf.strategies.hop.exchange import REDUCTION, RENEWAL, STEP, HopExchange
from hop_tf.strategies.hop.settings import HopSettings
from hop_tf.tensors.fifo import SimulatedFifo
from hop_tf.tensors.packing import Packing, TensorSpec
from hop_tf.timing.costs import FORWARD_SHARE
from hop_tf.topology import Topology, resolve

GROUP, SESSION = "simulated", 1
# What is no longer is a header.
_HEADER_BYTES = 64
# Of longer vectors a part is sent, whose bytes stand for more: of an all-reduce so many values for each rank; of sparse
# ones more, as few of them are sent, behind a header; under Hop few will do.
_VALUES_OF_RANK, _SPARSE_VALUES, _HOP_VALUES = 2048, 1 << 16, 64
_FIRST_STEPS = 3
# In so many delays ranks have used up what a delay gives them once; but for windows that are hardly too slow.
_TIMES_DELAY = 4


@dataclasses.dataclass(frozen=True)
class OwnSeconds:
    """What a rank does on its own in a step. Seconds.

    Attributes:
      compute: From the batch to its gradients.
      input: Until the batch is there.
      update: Behind the gradients, and what came of them.
      callbacks: Between this step and the next one.
    """

    compute: float
    input: float = 0.0
    update: float = 0.0
    callbacks: float = 0.0


@dataclasses.dataclass(frozen=True)
class Links:
    """What messages take.

    Attributes:
      latency_seconds: Until the first byte is there, array [n, n] by sender and receiver.
      bytes_per_second: Array [n, n]; likewise, of one message that has its link and its sender's card to itself.
      card_bytes_per_second: Of all that a rank sends at the same time, array [n]; None: whatever its links carry.
    """

    latency_seconds: np.ndarray
    bytes_per_second: np.ndarray
    card_bytes_per_second: np.ndarray | None = None

    def latency(self, sender: int, receiver: int, num_bytes: int) -> float:
        """As `link_seconds` of `VirtualCluster`."""
        return float(self.latency_seconds[sender, receiver])

    def sending_seconds(self, sender: int, receiver: int, num_bytes: int) -> float:
        """Likewise. Headers alone go between what others send."""
        return num_bytes / float(self.bytes_per_second[sender, receiver]) if num_bytes > _HEADER_BYTES else 0.0

    def card_seconds(self, sender: int, num_bytes: int) -> float:
        """Likewise."""
        if self.card_bytes_per_second is None or num_bytes <= _HEADER_BYTES:
            return 0.0
        return num_bytes / float(self.card_bytes_per_second[sender])


@dataclasses.dataclass(frozen=True)
class Simulation:
    """What a simulated training has taken.

    Attributes:
      rank_seconds: Of a step of each rank, array [n]. Steps that were jumped over count.
      made_share: The share of all steps that were made; the others were jumped over.
      most_updates: The most updates that a rank of Hop had in memory; 0 elsewhere.
    """

    rank_seconds: np.ndarray
    made_share: float
    most_updates: int = 0

    @property
    def step_seconds(self) -> float:
        """The mean over the ranks."""
        return float(np.mean(self.rank_seconds))


Own = Callable[[int], Iterator[OwnSeconds]]
MakeRecorder = Callable[[int, Scheduler], Recorder | None]


def simulate_training(
    strategy: str,
    settings: Mapping[str, object],
    *,
    world_size: int,
    num_steps: int,
    own: Own,
    links: Links,
    num_values: int,
    recorders: MakeRecorder = lambda rank, scheduler: None,
) -> Simulation:
    """Trains on a virtual clock, until all ranks have made their steps. Who has trains on meanwhile.

    Args:
      strategy: "PipeSGDStrategy", "DTSStrategy" or "HopStrategy".
      settings: Arguments of the strategy; those that do not change what is sent, or when, are passed over.
      world_size: Number of ranks.
      num_steps: Steps of each that are looked at, at least 2, in whole windows of DTS. Those that Hop jumps over count.
        Before them a few are made, until ranks wait for each other as they do later on.
      own: `own(rank)` yields, without an end, what that rank does on its own in each step that it makes.
      links: What messages take.
      num_values: Values of float32 that are exchanged.
      recorders: As of `VirtualCluster`. Ranks record what real ones do, until the last one has made its steps.

    Returns:
      What it took.

    Raises:
      ValueError: If a setting is out of range, or the strategy another one.
    """
    check_choice("strategy", strategy, tuple(_SETUPS))
    check_integer("num_steps", num_steps, at_least=2)
    setup = _SETUPS[strategy](settings, world_size)
    sent_values = min(num_values, setup.num_values)
    cluster = VirtualCluster(
        world_size,
        links.latency,
        sending_seconds=links.sending_seconds,
        card_seconds=links.card_seconds,
        recorders=recorders,
        payload_scale=num_values / sent_values,
        **setup.cluster_arguments,
    )
    packing = Packing([TensorSpec("x", (sent_values,), tf.float32)])
    goal = _Goal(cluster, setup.num_first_steps, math.ceil(num_steps / setup.period) * setup.period)
    ranks = [setup.make(cluster, rank, packing, own(rank), goal) for rank in range(world_size)]
    for rank in ranks:
        if rank.recorder is not None:
            rank.recorder.add_line("group", name=GROUP, num_bytes=4 * num_values, num_values=num_values)
    cluster.run(lambda rank: ranks[rank].train())
    return goal.simulation(ranks)


class _Goal:
    """How many steps all are to make, and when each rank began each step.

    Args:
      cluster: The ranks.
      num_first: Steps that are made before the others, and not looked at.
      num_steps: The others.
    """

    def __init__(self, cluster: VirtualCluster, num_first: int, num_steps: int):
        self._scheduler = cluster.scheduler
        self._first, self._end = num_first, num_first + num_steps
        self._begins: list[dict[int, float]] = [{} for _ in cluster.memberships]
        self._through: set[int] = set()

    def is_reached(self, rank: int, step: int) -> bool:
        """Whether all ranks have made their steps, now that `rank` is about to begin this one."""
        self._begins[rank][step] = self._scheduler.now
        if step > self._end:  # With one more, records tell when the last one ended.
            self._through.add(rank)
            if len(self._through) == len(self._begins):
                self._scheduler.stop()
        return len(self._through) == len(self._begins)

    def simulation(self, ranks: Sequence[Training]) -> Simulation:
        """Of all but the first steps. A rank of Hop may jump over their end, or over the last step."""
        seconds, num_made, num_steps = [], 0, 0
        for begins in self._begins:
            first = max(step for step in begins if step <= self._first)
            end = min(step for step in begins if step >= self._end)
            seconds.append((begins[end] - begins[first]) / (end - first))
            num_made += sum(first <= step < end for step in begins)
            num_steps += end - first
        most_updates = max(getattr(rank.exchange, "most_updates_in_memory", 0) for rank in ranks)
        return Simulation(np.array(seconds), num_made / num_steps, most_updates)


class Training(abc.ABC):
    """A rank's loop: what Keras and the graph do around an exchange.

    Args:
      cluster: Where it trains.
      rank: Its rank.
      packing: What is exchanged.
      own: What it does on its own in each step.
      goal: How long it trains. Default: a subclass knows.

    Attributes:
      recorder: The rank's.
    """

    def __init__(
        self,
        cluster: VirtualCluster,
        rank: int,
        packing: Packing,
        own: Iterator[OwnSeconds],
        goal: _Goal | None = None,
    ):
        self.rank = rank
        self.clock = cluster.scheduler
        self.membership = cluster.memberships[rank]
        self.recorder = self.membership.recorder
        self.start_thread = functools.partial(cluster.start_thread, rank)
        self.exchange: Exchange | None = None
        self.packing = packing
        self._own, self._goal = own, goal
        self.context = ExchangeContext(GROUP, SESSION, packing, self.membership, cluster.pool, SimulatedFifo)

    @abc.abstractmethod
    def make_exchange(self) -> Exchange:
        """Makes it."""

    @abc.abstractmethod
    def take_step(self, step: int, compute_seconds: float) -> int:
        """Computes and communicates; returns how many steps are jumped over."""

    def train(self) -> None:
        """All of it."""
        self.train_from(self.begin())

    def train_from(self, step: int) -> None:
        """Makes this step, and those behind it."""
        while not self.is_through(step):
            step += 1 + self._make_step(step)
        self.finish()

    def begin(self) -> int:
        """Enters the session; returns the first step."""
        if self.recorder is not None:
            self.recorder.begin_session(SESSION)
        self.membership.begin_session()
        self.exchange = self.make_exchange()
        return 0

    def is_through(self, step: int) -> bool:
        """Whether no further step is to be made, now that this one would begin."""
        return self._goal.is_reached(self.rank, step)

    def finish(self) -> None:
        """Called then."""

    def next_own(self, step: int) -> OwnSeconds:
        """What it does on its own in this step."""
        del step
        return next(self._own)

    def _make_step(self, step: int) -> int:
        own, called = self.next_own(step), self.clock.now
        self.sleep_until(called + own.input)
        num_skipped = self.take_step(step, own.compute)
        self.sleep_until(self.clock.now + own.update)
        self.record(Kind.STEP, called, step)
        self.sleep_until(self.clock.now + own.callbacks)
        return num_skipped

    def sleep_until(self, time: float) -> None:
        """Lets time pass."""
        if time > self.clock.now:
            self.clock.sleep(time - self.clock.now)

    def begin_to_compute(self, step: int, seconds: float) -> float:
        """Computes now, and for so long; returns the time when that ends."""
        self.record(Kind.COMPUTE, self.clock.now, step, seconds)
        return self.clock.now + seconds

    def have_result(self, step: int, ready: float) -> None:
        """What the step waited for since its gradients were there has come."""
        if self.clock.now > ready:
            self.record(Kind.RESULT, ready, step)

    def record(self, kind: Kind, begin: float, step: int, seconds: float | None = None) -> None:
        """Records what began then, and lasted for so long; default: until now."""
        if self.recorder is not None and self.recorder.records(step):
            now = self.clock.now
            seconds = now - begin if seconds is None else seconds
            self.recorder.add(kind, self.recorder.now() - now + begin, seconds, step=step)


class _Averaging(Training):
    """Ranks that average windows of steps: Pipe-SGD, whose windows are of one step, and DTS."""

    def __init__(
        self, *arguments, schedule: Schedule, num_threads: int, codec: codecs.Codec, algorithm: str, num_segments: int
    ):
        super().__init__(*arguments)
        self._schedule, self._codec, self._algorithm = schedule, codec, algorithm
        self._num_threads, self._num_segments = num_threads, num_segments
        generator = np.random.default_rng(0)
        sizes = [len(part) for part in np.array_split(np.empty(self.packing.sizes[0]), num_segments)]
        self._values = [(generator.standard_normal(size, np.float32),) for size in sizes]
        self._num_out = 0  # Segments of windows.
        self._num_come: collections.Counter[int] = collections.Counter()  # Segments, by window.

    def make_exchange(self) -> AveragingExchange:
        reductions = [
            self.context.make_all_reduce(
                f"{thread}/{segment}",
                Packing([TensorSpec("x", values.shape, tf.float32)]),
                self._codec,
                self._algorithm,
            )
            for thread in range(self._num_threads)
            for segment, (values,) in enumerate(self._values)
        ]
        exchange = AveragingExchange(self.context, reductions)
        for thread in range(self._num_threads):
            self.start_thread(f"slot {thread}", functools.partial(self._communicate, thread))
        return exchange

    def _communicate(self, thread: int) -> None:
        for window in itertools.count(thread, self._num_threads):
            for segment in range(self._num_segments):
                number = window * self._num_segments + segment
                self._wait(lambda number=number: self._num_out > number)
                self._mean(window, segment)
                self._num_come[window] += 1
                self.membership.monitor.notify_all()

    def _mean(self, window: int, segment: int) -> None:
        begin, first_step = self.clock.now, window * self._schedule.interval
        if self.recorder is not None:
            self.recorder.begin_step(first_step)
        turn, thread = divmod(window, self._num_threads)
        self.exchange.mean(
            window * self._num_segments + segment,
            self._values[segment],
            turn=turn,
            reduction=thread * self._num_segments + segment,
        )
        self.record(Kind.EXCHANGE, begin, first_step)

    def _wait(self, condition: Callable[[], bool]) -> None:
        with self.membership.monitor:
            while not condition():
                self.membership.monitor.wait(math.inf)

    def take_step(self, step: int, compute_seconds: float) -> int:
        begin, ready = self.clock.now, self.begin_to_compute(step, compute_seconds)
        has_ended, _ = self._schedule.ended(step + 1)
        for segment in range(self._num_segments if has_ended else 0):
            # Gradients come in the backward pass, the last layers' first.
            left = (1 - FORWARD_SHARE) * (1 - (segment + 1) / self._num_segments)
            self.sleep_until(begin + compute_seconds * (1 - left))
            self._num_out += 1
            self.membership.monitor.notify_all()
        self.sleep_until(ready)
        is_due, window = self._schedule.due(step + 1)
        if is_due:
            self._wait(lambda: self._num_come[window] == self._num_segments)
        self.have_result(step, ready)
        return 0


class HopTraining(Training):
    """See `hop_tf.strategies.hop`. What is learned, and who joins late, is a subclass's.

    Args:
      *arguments: As of `Training`.
      topology: The graph.
      settings: The mechanisms.
    """

    def __init__(self, *arguments, topology: Topology, settings: HopSettings):
        super().__init__(*arguments)
        self._topology, self._settings = topology, settings
        self._zeros = tuple(self.packing.zeros())
        for bucket in self._zeros:
            bucket.flags.writeable = False  # So nobody copies it.

    def make_exchange(self) -> HopExchange:
        return HopExchange(self.context, topology=self._topology, settings=self._settings)

    def parameters(self) -> tuple[np.ndarray, ...]:
        """What is sent: as buckets."""
        return self._zeros

    def compute(self, step: int) -> None:
        """Computes what `apply` adds, with the parameters that there are when the step begins."""

    def apply(self) -> None:
        """The optimizer's step."""

    def add(self, incoming: Incoming) -> None:
        """Adds what came of the others' parameters."""

    def before_exchange(self, step: int) -> None:
        """Called before the rank hands this step's parameters out."""

    def take_step(self, step: int, compute_seconds: float) -> int:
        is_serial = self._settings.update_order == "serial"
        self.compute(step)
        ready = self.begin_to_compute(step, compute_seconds)
        if is_serial:
            self.sleep_until(ready)
            self.apply()
        self.before_exchange(step)
        # The communication thread waits while the rank computes: what comes first is waited for first.
        incoming = self._exchange_step(step, STEP, self.parameters())
        self.sleep_until(ready)
        incoming = incoming or self._exchange_step(step, REDUCTION, ())
        self.add(incoming)
        if not is_serial:
            self.apply()
        if incoming.num_skipped:
            self.add(self._exchange_step(step, RENEWAL, self.parameters()))
        self.have_result(step, ready)
        return incoming.num_skipped

    def _exchange_step(self, step: int, segment: int, buckets: tuple) -> Incoming | None:
        """One step of the exchange, as `ExchangeRunner` makes it."""
        outgoing = Outgoing(step, segment, buckets)
        if self.recorder is None:
            return self.exchange.step(outgoing)
        begin, before = self.clock.now, dict(self.exchange.outcomes())
        self.recorder.begin_step(step)
        incoming = self.exchange.step(outgoing)
        self.record(Kind.EXCHANGE, begin, step)
        outcomes = {name: count - before.get(name, 0) for name, count in self.exchange.outcomes().items()}
        if incoming is not None:
            outcomes |= {"skipped": incoming.num_skipped}
        for name, number in outcomes.items():
            if number:
                self.recorder.add(Kind.OUTCOME, self.recorder.now(), step=step, name=name, number=number)
        return incoming


@dataclasses.dataclass(frozen=True)
class _Setup:
    """What is simulated.

    Attributes:
      make: Makes a rank's `Training`; arguments as there.
      num_values: Values of float32 that are sent, if there are as many.
      cluster_arguments: Of `VirtualCluster`.
      num_first_steps: After how many steps a rank waits as long as it does later on.
      period: After how many steps it waits again.
    """

    make: Callable[..., Training]
    num_values: int
    cluster_arguments: Mapping[str, object] = dataclasses.field(default_factory=dict)
    num_first_steps: int = _FIRST_STEPS
    period: int = 1


def _pipe_sgd(settings: Mapping, world_size: int) -> _Setup:
    schedule = Schedule(settings.get("pipeline_width", 2) - 1, 1)
    return _averaging(settings, world_size, schedule, num_segments=settings.get("num_segments", 1))


def _dts(settings: Mapping, world_size: int) -> _Setup:
    schedule = Schedule(settings.get("delay", 4), settings.get("interval", 4))
    return _averaging(settings, world_size, schedule, num_threads=schedule.num_slots)


def _averaging(
    settings: Mapping, world_size: int, schedule: Schedule, *, num_threads: int = 1, num_segments: int = 1
) -> _Setup:
    codec = codecs.get(settings.get("codec"))
    make = functools.partial(
        _Averaging,
        schedule=schedule,
        num_threads=num_threads,
        codec=codec,
        algorithm=settings.get("algorithm", "mesh"),
        num_segments=num_segments,
    )
    return _Setup(
        make,
        _SPARSE_VALUES if isinstance(codec, codecs.Sparse) else _VALUES_OF_RANK * world_size,
        # A delay is time that ranks have at first, and lose from window to window where these come too slowly.
        num_first_steps=max(_FIRST_STEPS, schedule.interval + _TIMES_DELAY * schedule.delay),
        period=schedule.interval,
    )


def _hop(settings: Mapping, world_size: int) -> _Setup:
    topology = resolve(settings.get("topology", "ring_based"), world_size)
    known = {field.name for field in dataclasses.fields(HopSettings)}
    checked = HopSettings(**{name: value for name, value in settings.items() if name in known})
    checked.check_topology(topology)
    arguments = {
        "peers": lambda rank: {*topology.in_neighbors(rank), *topology.out_neighbors(rank)},
        "continue_without_lost": checked.continues_without_lost,
    }
    return _Setup(functools.partial(HopTraining, topology=topology, settings=checked), _HOP_VALUES, arguments)


_SETUPS = {"PipeSGDStrategy": _pipe_sgd, "DTSStrategy": _dts, "HopStrategy": _hop}

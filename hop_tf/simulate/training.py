"""How long steps take under a strategy, on given ranks and links: its own protocol on a virtual clock.

What a rank does on its own is given, step by step, and so is what a message takes. All that is sent and waited for is
the strategy's code: `HopExchange`, and the all-reduce of `AveragingExchange`, with the times at which Pipe-SGD and DTS
hand out and merge. Nothing is learned: vectors are always the same.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import tensorflow as tf

from hop_tf import codecs
from hop_tf.arguments import check_choice
from hop_tf.records import Kind, Recorder
from hop_tf.runtime.averaging_exchange import AveragingExchange
from hop_tf.runtime.exchange import Exchange, Outgoing
from hop_tf.runtime.group import ExchangeContext
from hop_tf.simulate.scheduler import Scheduler
from hop_tf.simulate.virtual import VirtualCluster
from hop_tf.strategies.dts.windows import Schedule
from hop_tf.strategies.hop.exchange import REDUCTION, RENEWAL, STEP, HopExchange
from hop_tf.strategies.hop.settings import HopSettings
from hop_tf.tensors.fifo import SimulatedFifo
from hop_tf.tensors.packing import Packing, TensorSpec
from hop_tf.topology import resolve

_GROUP, _SESSION = "simulated", 1
# Of longer vectors a part is sent, whose bytes stand for more: so many values for each rank.
_VALUES_OF_RANK = 2048
_FIRST_STEPS = 3
# Messages with more bytes have values.
_CONTROL_BYTES = 256


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
      bytes_per_second: Array [n, n]; likewise. What goes to several ranks at the same time goes as fast to each.
    """

    latency_seconds: np.ndarray
    bytes_per_second: np.ndarray


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
) -> float:
    """Trains on a virtual clock.

    Args:
      strategy: "PipeSGDStrategy", "DTSStrategy" or "HopStrategy".
      settings: Arguments of the strategy; those that do not change what is sent, or when, are passed over.
      world_size: Number of ranks.
      num_steps: Steps of each. Those that Hop jumps over count.
      own: `own(rank)` yields what that rank does on its own in each step that it makes.
      links: What messages take.
      num_values: Values of float32 that are exchanged.
      recorders: As of `VirtualCluster`. Ranks record what real ones do.

    Returns:
      Seconds of a step, the mean over ranks.

    Raises:
      ValueError: If a setting is out of range, or the strategy another one.
    """
    check_choice("strategy", strategy, tuple(_TRAININGS))
    sent_values = min(num_values, _VALUES_OF_RANK * world_size)
    scale = num_values / sent_values

    make, cluster_arguments = _TRAININGS[strategy](settings, world_size)
    cluster = VirtualCluster(
        world_size,
        lambda sender, receiver, num_bytes: float(links.latency_seconds[sender, receiver]),
        sending_seconds=lambda sender, receiver, num_bytes: num_bytes / links.bytes_per_second[sender, receiver],
        recorders=recorders,
        wire_bytes=lambda num_bytes: round(num_bytes * scale) if num_bytes > _CONTROL_BYTES else num_bytes,
        **cluster_arguments,
    )
    packing = Packing([TensorSpec("x", (sent_values,), tf.float32)])
    ranks = [make(cluster, rank, packing, num_steps, own(rank)) for rank in range(world_size)]
    for rank in ranks:
        if rank.recorder is not None:
            rank.recorder.add_line("group", name=_GROUP, num_bytes=4 * num_values, num_values=num_values)
    cluster.run(lambda rank: ranks[rank].train())
    return float(np.mean([rank.step_seconds() for rank in ranks]))


class _Training(abc.ABC):
    """A rank's loop: what Keras and the graph do around an exchange.

    Attributes:
      recorder: The rank's.
    """

    def __init__(self, cluster: VirtualCluster, rank: int, packing: Packing, num_steps: int, own: Iterator[OwnSeconds]):
        self.clock = cluster.scheduler
        self.membership = cluster.memberships[rank]
        self.recorder = self.membership.recorder
        self.num_steps = num_steps
        self._begins: dict[int, float] = {}  # Of each step.
        self.start_thread = functools.partial(cluster.start_thread, rank)
        self.values = (np.random.default_rng(0).standard_normal(packing.sizes[0], np.float32),)
        self.exchange = None
        self._own = own
        self._context = ExchangeContext(_GROUP, _SESSION, packing, self.membership, cluster.pool, SimulatedFifo)

    @abc.abstractmethod
    def make_exchange(self, context: ExchangeContext) -> Exchange:
        """Makes it."""

    @abc.abstractmethod
    def take_step(self, step: int, compute_seconds: float) -> int:
        """Computes and communicates; returns how many steps are jumped over."""

    def finish(self) -> None:
        """Ends what is under way."""

    def train(self) -> None:
        if self.recorder is not None:
            self.recorder.begin_session(_SESSION)
        self.membership.begin_session()
        self.exchange = self.make_exchange(self._context)
        step = 0
        while step < self.num_steps:
            own, called = next(self._own), self.clock.now
            self._begins[step] = called
            self.clock.sleep(own.input)
            num_skipped = self.take_step(step, own.compute)
            self.clock.sleep(own.update)
            self.record(Kind.STEP, called, step)
            self.clock.sleep(own.callbacks)
            step += 1 + num_skipped
        self.finish()
        self.membership.leave(sent_rounds={_GROUP: self.exchange.sent_rounds}, reason="")

    def step_seconds(self) -> float:
        """Of those behind the first ones, which have no older one to wait for."""
        steps = sorted(self._begins)
        first = steps[min(_FIRST_STEPS, len(steps) // 4)]
        return (self._begins[steps[-1]] - self._begins[first]) / max(1, steps[-1] - first)

    def compute(self, step: int, seconds: float) -> float:
        """Computes now, and for so long; returns the time when that ends."""
        self.record(Kind.COMPUTE, self.clock.now, step, seconds)
        return self.clock.now + seconds

    def sleep_until(self, time: float) -> None:
        self.clock.sleep(max(0.0, time - self.clock.now))

    def exchange_step(self, step: int, segment: int, buckets: tuple) -> object:
        """One step of the exchange, as `ExchangeRunner` makes it."""
        begin = self.clock.now
        first_step = step * self.steps_per_round
        if self.recorder is not None:
            self.recorder.begin_step(first_step)
        before = dict(self.exchange.outcomes())
        incoming = self.exchange.step(Outgoing(step, segment, buckets))
        self.record(Kind.EXCHANGE, begin, first_step)
        outcomes = {name: count - before.get(name, 0) for name, count in self.exchange.outcomes().items()}
        if incoming is not None:
            outcomes |= {"skipped": incoming.num_skipped}
        for name, number in outcomes.items():
            if number and self.recorder is not None:
                self.recorder.add(Kind.OUTCOME, self.recorder.now(), step=first_step, name=name, number=number)
        return incoming

    steps_per_round = 1

    def record(self, kind: Kind, begin: float, step: int, seconds: float | None = None) -> None:
        """Records what began then, and lasted for so long; default: until now."""
        if self.recorder is not None and self.recorder.records(step):
            now = self.clock.now
            seconds = now - begin if seconds is None else seconds
            self.recorder.add(kind, self.recorder.now() - now + begin, seconds, step=step)


class _Averaging(_Training):
    """Ranks that average windows of steps: Pipe-SGD, whose windows are of one step, and DTS."""

    def __init__(self, *arguments, schedule: Schedule, num_threads: int, codec: object, algorithm: str):
        super().__init__(*arguments)
        self._schedule, self._codec, self._algorithm = schedule, codecs.get(codec), algorithm
        self._num_threads = num_threads
        self._num_out = self._num_in = 0
        self._has_come: set[int] = set()
        self.steps_per_round = schedule.interval

    def make_exchange(self, context: ExchangeContext) -> AveragingExchange:
        reductions = [
            context.make_all_reduce(str(slot), context.packing, self._codec, self._algorithm)
            for slot in range(self._num_threads)
        ]
        exchange = AveragingExchange(context, reductions)
        for slot in range(self._num_threads):
            self.start_thread(f"slot {slot}", functools.partial(self._communicate, slot))
        return exchange

    def _communicate(self, slot: int) -> None:
        for window in range(slot, self.num_steps // self._schedule.interval, self._num_threads):
            self._wait(lambda window=window: self._num_out > window)
            self._mean(window)
            with self.membership.monitor:
                self._has_come.add(window)
                self.membership.monitor.notify_all()

    def _mean(self, window: int) -> None:
        begin, first_step = self.clock.now, window * self._schedule.interval
        if self.recorder is not None:
            self.recorder.begin_step(first_step)
        turn, slot = divmod(window, self._num_threads)
        self.exchange.mean(window, self.values, turn=turn, reduction=slot)
        self.record(Kind.EXCHANGE, begin, first_step)

    def _wait(self, condition: Callable[[], bool]) -> None:
        with self.membership.monitor:
            while not condition():
                self.membership.monitor.wait(math.inf)

    def take_step(self, step: int, compute_seconds: float) -> int:
        self.sleep_until(ready := self.compute(step, compute_seconds))
        has_ended, _ = self._schedule.ended(step + 1)
        if has_ended:
            with self.membership.monitor:
                self._num_out += 1
                self.membership.monitor.notify_all()
        is_due, window = self._schedule.due(step + 1)
        if is_due:
            self._wait(lambda: window in self._has_come)
        if self.clock.now > ready:
            self.record(Kind.RESULT, ready, step)
        return 0

    def finish(self) -> None:
        self._wait(lambda: len(self._has_come) == self._num_out)


class _Hop(_Training):
    """See `hop_tf.strategies.hop`."""

    def __init__(self, *arguments, topology: object, settings: HopSettings):
        super().__init__(*arguments)
        self._topology, self._settings = topology, settings

    def make_exchange(self, context: ExchangeContext) -> HopExchange:
        return HopExchange(context, topology=self._topology, settings=self._settings)

    def take_step(self, step: int, compute_seconds: float) -> int:
        ready, incoming = self.compute(step, compute_seconds), None
        if self._settings.update_order == "parallel":
            # The communication thread waits while the rank computes: what comes first is waited for first.
            incoming = self.exchange_step(step, STEP, self.values)
        self.sleep_until(ready)
        if self._settings.update_order == "serial":
            incoming = self.exchange_step(step, STEP, self.values)
        if incoming is None:
            incoming = self.exchange_step(step, REDUCTION, ())
        if incoming.num_skipped:
            self.exchange_step(step, RENEWAL, self.values)
        if self.clock.now > ready:
            self.record(Kind.RESULT, ready, step)
        return incoming.num_skipped


def _pipe_sgd(settings: Mapping, world_size: int) -> tuple[Callable[..., _Training], dict]:
    del world_size
    return _averaging(settings, Schedule(settings.get("pipeline_width", 2) - 1, 1), 1)


def _dts(settings: Mapping, world_size: int) -> tuple[Callable[..., _Training], dict]:
    del world_size
    schedule = Schedule(settings.get("delay", 4), settings.get("interval", 4))
    return _averaging(settings, schedule, schedule.num_slots)


def _averaging(settings: Mapping, schedule: Schedule, num_threads: int) -> tuple[Callable[..., _Training], dict]:
    codec, algorithm = settings.get("codec"), settings.get("algorithm", "mesh")
    arguments = {"schedule": schedule, "num_threads": num_threads, "codec": codec, "algorithm": algorithm}
    return functools.partial(_Averaging, **arguments), {}


def _hop(settings: Mapping, world_size: int) -> tuple[Callable[..., _Training], dict]:
    topology = resolve(settings.get("topology", "ring_based"), world_size)
    known = {field.name for field in dataclasses.fields(HopSettings)}
    checked = HopSettings(**{name: value for name, value in settings.items() if name in known})
    checked.check_topology(topology)
    arguments = {
        "peers": lambda rank: {*topology.in_neighbors(rank), *topology.out_neighbors(rank)},
        "continue_without_lost": checked.continues_without_lost,
    }
    return functools.partial(_Hop, topology=topology, settings=checked), arguments


_TRAININGS = {"PipeSGDStrategy": _pipe_sgd, "DTSStrategy": _dts, "HopStrategy": _hop}

"""The loop of a simulated rank, in place of Keras and the graph around a strategy's exchange."""

from __future__ import annotations

import abc
import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator

import numpy as np
import tensorflow as tf

from hop_tf import codecs
from hop_tf.collectives.routed import get_algorithm
from hop_tf.records import Kind
from hop_tf.runtime.averaging_exchange import AveragingExchange
from hop_tf.runtime.exchange import Exchange, Request, Result
from hop_tf.runtime.group import ExchangeContext
from hop_tf.strategies.dts.windows import Schedule
from hop_tf.strategies.hop.exchange import REDUCTION, RENEWAL, STEP, HopExchange
from hop_tf.strategies.hop.settings import HopSettings
from hop_tf.tensors.fifo import SimulatedFifo
from hop_tf.tensors.packing import Packing, TensorSpec
from hop_tf.tools.simulate.virtual import VirtualCluster
from hop_tf.tools.timing.costs import FORWARD_SHARE
from hop_tf.topology import Topology

GROUP, SESSION = "simulated", 1


@dataclasses.dataclass(frozen=True)
class OwnSeconds:
    """The seconds of a rank's own work in a step.

    Attributes:
      compute: From the batch to its gradients.
      input: Until the batch is available.
      update: After the gradients and the result of the exchange.
      callbacks: Between this step and the next one.
    """

    compute: float
    input: float = 0.0
    update: float = 0.0
    callbacks: float = 0.0


class Training(abc.ABC):
    """A rank's loop, in place of Keras and the graph around an exchange.

    Args:
      cluster: The cluster in which the rank trains.
      rank: The rank.
      packing: The packing of the vectors that are exchanged.
      own: The seconds of the rank's own work in each step.
      is_over: `is_over(rank, step)` returns True if the rank is to make neither this step nor further ones. It is
        called when the step is about to begin. Default: a subclass overrides `is_through`.

    Attributes:
      recorder: The recorder of the rank, or None.
    """

    def __init__(
        self,
        cluster: VirtualCluster,
        rank: int,
        packing: Packing,
        own: Iterator[OwnSeconds],
        is_over: Callable[[int, int], bool] | None = None,
    ):
        self.rank = rank
        self.clock = cluster.scheduler
        self.membership = cluster.memberships[rank]
        self.recorder = self.membership.recorder
        self.start_thread = functools.partial(cluster.start_thread, rank)
        self.exchange: Exchange | None = None
        self.packing = packing
        self._own, self._is_over = own, is_over
        self.context = ExchangeContext(
            GROUP, SESSION, packing, self.membership, cluster.pool, SimulatedFifo, get_algorithm=get_algorithm
        )

    @abc.abstractmethod
    def make_exchange(self) -> Exchange:
        """Makes the rank's exchange."""

    @abc.abstractmethod
    def take_step(self, step: int, compute_seconds: float) -> int:
        """Computes and communicates. Returns the number of skipped steps."""

    def train(self) -> None:
        """Makes all steps."""
        self.train_from(self.begin())

    def train_from(self, step: int) -> None:
        """Makes all steps from `step` on."""
        while not self.is_through(step):
            step += 1 + self._make_step(step)
        self.finish()

    def begin(self) -> int:
        """Enters the session. Returns the first step."""
        if self.recorder is not None:
            self.recorder.begin_session(SESSION)
        self.membership.begin_session()
        self.exchange = self.make_exchange()
        return 0

    def is_through(self, step: int) -> bool:
        """True if the rank is to make neither this step nor further ones. Called when the step is about to begin."""
        return self._is_over(self.rank, step)

    def finish(self) -> None:
        """Called after the last step."""

    def next_own(self, step: int) -> OwnSeconds:
        """The seconds of the rank's own work in this step."""
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
        """Lets virtual time pass until `time`."""
        if time > self.clock.now:
            self.clock.sleep(time - self.clock.now)

    def begin_to_compute(self, step: int, seconds: float) -> float:
        """Records a computation of `seconds` that begins now. Returns the time at which it ends."""
        self.record(Kind.COMPUTE, self.clock.now, step, seconds)
        return self.clock.now + seconds

    def have_result(self, step: int, ready: float) -> None:
        """Records the wait for the exchange, if any: from `ready`, when the gradients were computed, until now."""
        if self.clock.now > ready:
            self.record(Kind.RESULT, ready, step)

    def record(self, kind: Kind, begin: float, step: int, seconds: float | None = None) -> None:
        """Records an interval from `begin` that lasted `seconds`. Default: until now."""
        if self.recorder is not None and self.recorder.records(step):
            now = self.clock.now
            seconds = now - begin if seconds is None else seconds
            self.recorder.add(kind, self.recorder.now() - now + begin, seconds, step=step)


class AveragingTraining(Training):
    """Ranks that average over windows of steps: DTS, and Pipe-SGD with windows of one step."""

    def __init__(
        self, *arguments, schedule: Schedule, num_threads: int, codec: codecs.Codec, algorithm: str, num_segments: int
    ):
        super().__init__(*arguments)
        self._schedule, self._codec, self._algorithm = schedule, codec, algorithm
        self._num_threads, self._num_segments = num_threads, num_segments
        generator = np.random.default_rng(0)
        sizes = [len(part) for part in np.array_split(np.empty(self.packing.sizes[0]), num_segments)]
        self._values = [(generator.standard_normal(size, np.float32),) for size in sizes]
        self._num_out = 0  # Segments of windows that were submitted.
        self._num_come: collections.Counter[int] = collections.Counter()  # Segments that were averaged, by window.

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
            # Gradients are computed in the backward pass, those of the last layers first.
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
    """A rank under Hop. See `hop_tf.strategies.hop`. A subclass may add learning, and ranks that join late.

    Args:
      *arguments: The arguments of `Training`.
      topology: The graph.
      settings: The mechanisms.
    """

    def __init__(self, *arguments, topology: Topology, settings: HopSettings):
        super().__init__(*arguments)
        self._topology, self._settings = topology, settings
        self._zeros = tuple(self.packing.zeros())
        for bucket in self._zeros:
            bucket.flags.writeable = False  # Messages then need no copy.

    def make_exchange(self) -> HopExchange:
        return HopExchange(self.context, topology=self._topology, settings=self._settings)

    def parameters(self) -> tuple[np.ndarray, ...]:
        """The buckets that the rank sends."""
        return self._zeros

    def compute(self, step: int) -> None:
        """Computes the change for `apply`, at the parameters with which the step begins."""

    def apply(self) -> None:
        """Makes the optimizer's step."""

    def add(self, result: Result) -> None:
        """Adds the exchange's change to the parameters."""

    def before_exchange(self, step: int) -> None:
        """Called before the rank submits this step's parameters."""

    def take_step(self, step: int, compute_seconds: float) -> int:
        is_serial, interval = self._settings.update_order == "serial", self._settings.interval
        self.compute(step)
        ready = self.begin_to_compute(step, compute_seconds)
        if step % interval:
            self.sleep_until(ready)
            self.apply()
            return 0
        k = step // interval
        if is_serial:
            self.sleep_until(ready)
            self.apply()
        self.before_exchange(step)
        # In reality the communication thread waits while the rank computes, so its wait comes first here.
        result = self._exchange_step(k, STEP, self.parameters())
        self.sleep_until(ready)
        result = result or self._exchange_step(k, REDUCTION, ())
        self.add(result)
        if not is_serial:
            self.apply()
        if result.num_skipped:
            self.add(self._exchange_step(k, RENEWAL, self.parameters()))
        self.have_result(step, ready)
        return result.num_skipped

    def _exchange_step(self, k: int, segment: int, buckets: tuple) -> Result | None:
        """Makes a step of the exchange, as `ExchangeRunner` does."""
        request, step = Request(k, segment, buckets), self.exchange.steps_of(k).start
        if self.recorder is None:
            return self.exchange.step(request)
        begin, before = self.clock.now, dict(self.exchange.outcomes())
        self.recorder.begin_step(step)
        result = self.exchange.step(request)
        self.record(Kind.EXCHANGE, begin, step)
        outcomes = {name: count - before.get(name, 0) for name, count in self.exchange.outcomes().items()}
        if result is not None:
            outcomes |= {"skipped": result.num_skipped}
        for name, number in outcomes.items():
            if number:
                self.recorder.add(Kind.OUTCOME, self.recorder.now(), step=step, name=name, number=number)
        return result

"""`Group`: the variables that one optimizer's steps exchange. `ExchangeContext`: a scheme's tools for a group."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable, Sequence

import tensorflow as tf

from hop_tf.codecs import Codec, Identity, LowRank
from hop_tf.collectives.all_reduce import ALGORITHMS, AllReduce
from hop_tf.collectives.alternatives import Alternatives
from hop_tf.collectives.low_rank import LowRankMean
from hop_tf.collectives.mean import Mean
from hop_tf.keras_hook.optimizers import constrain
from hop_tf.keras_hook.roster import Roster
from hop_tf.membership.session import Membership
from hop_tf.runtime.deltas import DeltaTracker
from hop_tf.runtime.exchange import Exchange
from hop_tf.runtime.exchange_runner import CATCH_UP, MEETING, ExchangeRunner
from hop_tf.runtime.report import StepStatistics
from hop_tf.runtime.ways import Way
from hop_tf.tensors.buffers import BufferPool
from hop_tf.tensors.fifo import Fifo, MakeFifo
from hop_tf.tensors.finite import are_finite
from hop_tf.tensors.host import runs_on_host
from hop_tf.tensors.joined import JoinedGroup
from hop_tf.tensors.packing import Packing


def _start_thread(name: str, body: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=runs_on_host(body), name=f"hop_tf {name}", daemon=True)
    thread.start()
    return thread


@dataclasses.dataclass(frozen=True)
class ExchangeContext:
    """The tools that a scheme gets for a group.

    Attributes:
      group: Name of the exchange group, equal on all ranks; part of its queues' names.
      session: The running session, in which the group makes its step 0.
      packing: The buckets.
      membership: Waiting, departures, and the transport.
      pool: Provides large arrays.
      make_fifo: Makes a scheme's queues.
      start_thread: Runs a scheme's further threads: `start_thread(name, body)` returns a thread to join.
      optimizer: Weak reference to the group's optimizer.
      trained: The variables that the optimizer updates.
      carried: This rank's changes of the variables that are exchanged together with the trained ones.
      roster: The ranks that share each batch; None if all ranks share it, even lost ones.
      get_algorithm: Returns the constructor of the all-reduce with the given name. Default: knows a ring and a mesh.
    """

    group: str
    session: int
    packing: Packing
    membership: Membership
    pool: BufferPool
    make_fifo: MakeFifo = Fifo
    start_thread: Callable[[str, Callable[[], None]], threading.Thread] = _start_thread
    optimizer: weakref.ref = lambda: None
    trained: Sequence[tf.Variable] = ()
    carried: DeltaTracker = dataclasses.field(default_factory=lambda: DeltaTracker((), ()))
    roster: Roster | None = None
    get_algorithm: Callable[[str], Callable[..., AllReduce]] = ALGORITHMS.__getitem__

    @property
    def variables(self) -> Sequence[tf.Variable]:
        """All variables that are exchanged. Trained variables come first."""
        return [*self.trained, *self.carried.variables]

    def values(self) -> list[tf.Tensor]:
        """The values of `variables` when the group's first step is about to change them."""
        return [*(variable.read_value() for variable in self.trained), *self.carried.known()]

    def make_mean(self, name: str, packing: Packing, ways: Sequence[Way], *, in_graph: bool = False) -> Mean:
        """Makes an all-reduce for one way, or an `Alternatives` for several.

        Args:
          name: See `make_all_reduce`.
          packing: The buckets.
          ways: The ways.
          in_graph: See `make_all_reduce`.
        """
        if len(ways) == 1:
            return self.make_all_reduce(name, packing, ways[0].codec, ways[0].algorithm, in_graph=in_graph)
        return Alternatives(
            [self.make_mean(f"{name}/{number}", packing, [way], in_graph=in_graph) for number, way in enumerate(ways)]
        )

    def make_all_reduce(
        self,
        name: str,
        packing: Packing,
        codec: Codec | LowRank,
        algorithm: str,
        *,
        recovers: bool | None = None,
        in_graph: bool = False,
    ) -> Mean:
        """Makes an all-reduce of buckets. Exact buckets, and buckets of float64, do not pass through `codec`.

        Args:
          name: Distinguishes this all-reduce from the group's others; equal on all ranks.
          packing: The buckets.
          codec: The codec for float32, bfloat16 and float16; or a `LowRank`, also for packings without large kernels.
          algorithm: See `hop_tf.collectives.get_algorithm`.
          recovers: See `AllReduce`. Default: True if ranks continue without a lost rank.
          in_graph: True if the graph passes the buckets through `codec`: see `AllReduce`. Default False.
        """
        if isinstance(codec, LowRank) and not any(map(codec.factorizes, packing.specs)):
            codec = codec.codec
        if isinstance(codec, LowRank):

            def make(part_name: str, part: Packing, codec_of_part: Codec) -> Mean:
                return self.make_all_reduce(f"{name}/{part_name}", part, codec_of_part, algorithm, recovers=recovers)

            return LowRankMean(packing, codec, self.pool, make)
        encodes = codec != Identity()
        codecs = [
            codec if encodes and takes_codec else Identity(dtype=dtype.as_numpy_dtype)
            for dtype, takes_codec in zip(packing.dtypes, packing.takes_codec, strict=True)
        ]
        return self.get_algorithm(algorithm)(
            self.membership,
            f"{self.group}/{name}",
            sizes=packing.sizes,
            codecs=codecs,
            pool=self.pool,
            recovers=self.membership.continue_without_lost if recovers is None else recovers,
            in_graph=packing.takes_codec if in_graph else None,
        )


@dataclasses.dataclass(eq=False)
class Group:
    """The variables that one optimizer's steps exchange, and the runner of the exchange.

    Attributes:
      context: The tools that the exchange was made with.
      exchange: The scheme's communication.
      runner: The threads and queues of the exchange.
      step: int64 variable: the present step of the running session.
      statistics: Counts the time that steps wait.
    """

    context: ExchangeContext
    exchange: Exchange
    runner: ExchangeRunner
    step: tf.Variable
    statistics: StepStatistics

    @property
    def name(self) -> str:
        """See `ExchangeContext.group`."""
        return self.context.group

    @property
    def optimizer(self) -> weakref.ref:
        """Weak reference to the optimizer."""
        return self.context.optimizer

    @property
    def packing(self) -> Packing:
        """The buckets of the variables, and of the tensors that travel with them."""
        return self.context.packing

    @property
    def variables(self) -> Sequence[tf.Variable]:
        """The variables, in the order of the packing. Trained variables come first."""
        return self.context.variables

    @property
    def num_trained(self) -> int:
        """Number of trained variables."""
        return len(self.context.trained)

    def read_step(self) -> tf.Tensor:
        """Emits the op that reads the step, on the variable's device. `read_value` would copy it to a GPU."""
        return self.step.value()

    def submit(
        self,
        values: Sequence[tf.Tensor],
        segment: int = 0,
        step: tf.Tensor | None = None,
        packing: Packing | None = None,
    ) -> None:
        """Emits the op that hands `values`, one tensor per variable (of the segment), to the scheme.

        Args:
          values: The tensors.
          segment: The segment.
          step: The number to submit the values with. Default: the group's step.
          packing: Another packing of the same buckets, for other tensors. Default: that of the segment.
        """
        step = self.read_step() if step is None else step
        buckets = (packing or self._packing_of(segment)).pack(values)
        self.runner.submit(step, segment, self.exchange.emit_encode(segment, buckets), are_finite(buckets))

    def signal(self, segment: int, computed: Sequence = (), step: tf.Tensor | None = None) -> None:
        """Emits the op that hands a segment without values to the scheme, as soon as `computed` is there.

        Args:
          segment: The segment.
          computed: The tensors.
          step: As for `submit`.
        """
        with tf.control_dependencies(_joined(computed)):
            nothing = [tf.zeros([0], dtype) for dtype in self.packing.dtypes]
            self.runner.submit(self.read_step() if step is None else step, segment, nothing)

    def collect(
        self,
        computed: Sequence,
        segment: int = 0,
        take: Callable[[tf.Tensor, int], tuple] | None = None,
        step: tf.Tensor | None = None,
        packing: Packing | None = None,
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Emits the ops that take the scheme's result for this step.

        Args:
          computed: The tensors that the step computes meanwhile. The result is taken after these, so that a step whose
            batch never comes takes no result. Only the time after these tensors counts as waiting.
          segment: The segment that was submitted.
          take: `take(step, segment)` emits the ops that take the result of a step. Default: `self.take`.
          step: The number that was submitted. Default: the step.
          packing: As for `submit`.

        Returns:
          One tensor per variable (of the segment), and int64 scalar: the number of training steps to skip after this
          one.
        """
        ready = _joined(computed)
        with tf.control_dependencies(ready):
            buckets, num_skipped = (take or self.take)(self.read_step() if step is None else step, segment)
        self.statistics.count_wait(ready, buckets)
        return self.unpack(buckets, segment, packing), num_skipped

    def take(self, step: tf.Tensor, segment: int) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Emits the ops that take the scheme's result for a step.

        Returns:
          One flat tensor per bucket, to `unpack`, and int64 scalar: the number of training steps to skip after this
          one.
        """
        buckets, num_skipped, _ = self.take_with_drops(step, segment)
        return buckets, num_skipped

    def take_with_drops(self, step: tf.Tensor, segment: int) -> tuple[list[tf.Tensor], tf.Tensor, tf.Tensor]:
        """As `take`, and the number of the step's last segments that were dropped: see `ExchangeRunner.collect`."""
        return self.runner.collect(step, segment, self.result_sizes(segment))

    def result_sizes(self, segment: int) -> Sequence[int]:
        """The number of elements of each bucket that `take` returns."""
        return self.exchange.result_sizes(segment, self._packing_of(segment).sizes)

    def unpack(self, buckets: Sequence[tf.Tensor], segment: int = 0, packing: Packing | None = None) -> list[tf.Tensor]:
        """Emits the ops that decode and divide the buckets of `take`. For the packing, see `submit`."""
        return (packing or self._packing_of(segment)).unpack(self.exchange.emit_decode(segment, buckets))

    def _packing_of(self, segment: int) -> Packing:
        return self.exchange.parts[segment] if self.exchange.parts else self.packing

    def operands(self, *, joined: bool) -> JoinedGroup:
        """The variables as operands of an update rule: small ones joined, or each by itself."""
        how = {} if joined else {"max_values": None}
        return JoinedGroup(self.variables, self.num_trained, self.packing, **how)

    @property
    def packing_of_variables(self) -> Packing:
        """The buckets with the variables only, without further tensors."""
        return self.packing.part(range(len(self.variables)))

    @property
    def trained(self) -> Sequence[tf.Variable]:
        """The variables that the optimizer updates."""
        return self.context.trained

    @property
    def carried(self) -> Sequence[tf.Variable]:
        """The variables that are exchanged and not trained."""
        return self.context.carried.variables

    def add(self, changes: Sequence[tf.Tensor]) -> None:
        """Emits the ops that add a change to each variable."""
        for variable, change in zip(self.variables, changes, strict=True):
            variable.assign_add(change)

    def constrain(self) -> None:
        """Emits the ops that apply the constraints of layers to weights.

        The optimizer applies them after each update, when the scheme's part of the update is done. At the end of `fit`,
        the scheme has to apply them, because a mean may violate a constraint that each rank's weights satisfy.
        """
        constrain(self.optimizer(), self.trained)

    def catch_up(self) -> tf.Tensor:
        """Emits the ops with which a restarted rank asks for the others' position, and joins them.

        Returns:
          int64 scalar: the number of further steps to skip; see `Joining.catch_up`.
        """
        num_skipped = self._ask(CATCH_UP)
        self.step.assign_add(num_skipped)
        return num_skipped

    def meet(self, state: Sequence[tf.Tensor]) -> tf.Tensor:
        """Emits the ops with which a rank meets, between two steps, the ranks that take part from the next step on.

        Args:
          state: The values of all variables after the previous step, which the newcomers get.

        Returns:
          int64 scalar, without a meaning.
        """
        return self._ask(MEETING, state)

    def _ask(self, segment: int, computed: Sequence = ()) -> tf.Tensor:
        self.signal(segment, computed)
        _, answer, _ = self.runner.collect(self.read_step(), segment, [0] * len(self.packing.sizes))
        return answer

    def end_step(self, num_skipped: tf.Tensor | int = 0) -> None:
        """Emits the op that ends this step, and skips the next `num_skipped` of the scheme's steps."""
        with tf.device("/cpu:0"):
            self.step.assign_add(1 + num_skipped)

    def close(self) -> None:
        """Ends the thread and stops taking messages."""
        self.exchange.close()
        self.runner.close()


def _joined(computed: Sequence) -> list[tf.Operation]:
    """An op that runs after all tensors, on their device, so that the host waits for one GPU event instead of many."""
    tensors = tensors_of(computed)
    return [tf.group(*tensors)] if tensors else []


def tensors_of(computed: Sequence) -> list[tf.Tensor]:
    """The tensors in a structure in which some may be None."""
    return [each for each in tf.nest.flatten(computed, expand_composites=True) if each is not None]

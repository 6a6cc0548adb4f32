"""The one file that knows private parts of TensorFlow and Keras: the strategy base and its hooks.

Under an unmodified `fit`, one training step runs through these hooks, in this order:

    Strategy.run(model.train_step)           -> _Extended._call_for_each_replica: notes the model and the start of the step
      forward, backward, clipping, decay
      ReplicaContext.all_reduce(gradients)   -> identity: there is one replica a process
      ReplicaContext.merge_call(update)      -> _before_update: the scheme's half of the graph
        optimizer update

Hooks run while the step is traced and emit operations; with `run_eagerly=True` they run in every step. What is made
once for an optimizer (its exchange group) is found again when the step is traced again.

Private names used here are listed in `tests/private_api_test.py`, which fails where they change.
"""

from __future__ import annotations

import abc
import atexit
import contextlib
import functools
import inspect
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import keras
import tensorflow as tf
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer
from tensorflow.python.distribute import input_util, one_device_strategy
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from hop_tf.cluster import Cluster
from hop_tf.data import slice_global_batches
from hop_tf.emulated_compute import EmulatedCompute
from hop_tf.errors import HopError
from hop_tf.interrupts import on_keyboard_interrupt
from hop_tf.options import CommunicationOptions
from hop_tf.report import ReportWriter, StepStatistics, static_identity
from hop_tf.worker import ExchangeContext, Group, Worker

# Optimizer methods that Keras passes to `merge_call`, by the end of their qualified names.
_UPDATE = "_distributed_tf_update_step"
_LOSS_SCALED_UPDATE = "LossScaleOptimizer._tf_apply.<locals>._handle_cross_replica"
# Operations that only look at a variable.
_READ_ONLY_OPS = frozenset({"ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VarIsInitializedOp", "VariableShape"})
_SHARDED_BY_TENSORFLOW = (
    tf.data.experimental.AutoShardPolicy.OFF,
    tf.data.experimental.AutoShardPolicy.FILE,
    tf.data.experimental.AutoShardPolicy.DATA,
    tf.data.experimental.AutoShardPolicy.HINT,
)


class ExchangeStrategy(tf.distribute.Strategy, abc.ABC):
    """Base of the strategies: one replica in this process, which exchanges with other processes' replicas.

    Subclasses give an `Exchange` (`_make_exchange`) and its half of the training graph (`_before_update`).

    Use as any `tf.distribute.Strategy`: build and compile the model in `scope()`, then call `fit`. In a world of one
    (no `TF_CONFIG`), models train as they do without a strategy.

    Args:
      cluster: The cluster.
      cluster_resolver: The resolver it was read from, for `Strategy.cluster_resolver`.
      communication_options: Deadlines, credentials, records.
      identity: The scheme's settings; must be equal on all ranks.
      neighbors: Ranks that the scheme exchanges messages with.

    Raises:
      HopError: If this rank's address cannot be bound.
      RuntimeError: If Keras does not run on TensorFlow.
    """

    def __init__(
        self,
        *,
        cluster: Cluster,
        cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver | None,
        communication_options: CommunicationOptions | None,
        identity: Mapping[str, str],
        neighbors: Iterable[int],
    ):
        if keras.backend.backend() != "tensorflow":
            raise RuntimeError(
                f"hop_tf needs Keras on the TensorFlow backend. Received: KERAS_BACKEND={keras.backend.backend()}."
            )
        _wrap_trainer()
        device = "/gpu:0" if tf.config.list_physical_devices("GPU") else "/cpu:0"
        super().__init__(_Extended(self, device))
        self._cluster = cluster
        self._resolver = cluster_resolver or tf.distribute.cluster_resolver.TFConfigClusterResolver()
        self._options = communication_options or CommunicationOptions()
        self._statistics = StepStatistics()
        self._emulated_compute = EmulatedCompute.from_environment(cluster.rank, cluster.world_size)
        self._groups: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        self._carried: dict[int, weakref.ref] = {}
        self._training_data_is_next = False
        self._inside_keras = 0
        self._worker = None
        if cluster.world_size > 1:
            self._worker = Worker(
                cluster=cluster,
                options=self._options,
                identity=static_identity(type(self).__name__, cluster, identity),
                neighbors=neighbors,
                make_exchange=self._make_exchange,
            )
        self._writer = ReportWriter(self.report, self._options, self.rank)
        atexit.register(_call_weakly, weakref.WeakMethod(self.shutdown))

    # What subclasses give.

    @abc.abstractmethod
    def _make_exchange(self, context: ExchangeContext):
        """Makes the scheme's `Exchange` for a new group."""

    @abc.abstractmethod
    def _before_update(self, group: Group, values: Sequence[tf.Tensor], gradients: list) -> list:
        """Emits the scheme's half of the graph, before the optimizer updates the variables.

        Args:
          group: The exchange group of the optimizer.
          values: What each of `group.variables` was when the step began.
          gradients: The local gradients, as the optimizer got them.

        Returns:
          The gradients that the optimizer is to apply.
        """

    # What users call.

    @property
    def cluster_resolver(self):
        """The resolver that the cluster was read from."""
        return self._resolver

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self._cluster.rank

    @property
    def world_size(self) -> int:
        """Number of ranks that train together. (`num_replicas_in_sync` is 1: see the README.)"""
        return self._cluster.world_size

    @property
    def is_chief(self) -> bool:
        """Whether this is rank 0, which writes what only one rank should write."""
        return self.rank == 0

    def synchronize(self, model: keras.Model) -> None:
        """Averages the floating-point weights of `model` over all ranks; equal to the bit afterwards.

        A collective: every rank calls it, between calls of `fit`. Optimizer slots are not touched.

        Args:
          model: The built model.

        Blocks: until all ranks call it.

        Raises:
          HopError: If a rank was lost or has ended.
        """
        if self._worker is not None:
            self._worker.average([weight.value for weight in model.weights])

    def report(self) -> dict[str, float]:
        """Counters of this rank since the strategy was made.

        Returns:
          `rank`, `steps` (optimizer updates), `wait_seconds` (time for which steps had their gradients and still
          waited for other ranks), `bytes_sent`, `bytes_received`, `messages_sent`, `messages_received`,
          `connections_refused`, and the scheme's own.
        """
        totals = {"rank": self.rank, **self._statistics.counters()}
        return {**totals, **(self._worker.counters() if self._worker else {})}

    def gather_reports(self, **extra) -> list[dict] | None:
        """Brings every rank's `report()` to rank 0.

        A collective: every rank calls it, between calls of `fit`.

        Args:
          **extra: Further entries of this rank's report; anything that JSON can hold.

        Returns:
          On rank 0 the reports in the order of the ranks; elsewhere None.

        Blocks: until all ranks call it.

        Raises:
          HopError: If a rank was lost or has ended.
        """
        report = {**self.report(), **extra}
        if self._worker is None:
            return [report]
        return self._worker.gather(report)

    def shutdown(self) -> None:
        """Leaves the cluster for good and releases the port and all threads. Idempotent; also runs at exit."""
        self._writer.close()
        if self._emulated_compute is not None:
            self._emulated_compute.close()
        if self._worker is not None:
            self._worker.close("its process ended")

    # Sessions.

    @contextlib.contextmanager
    def _fit_session(self, model: keras.Model) -> Iterator[None]:
        """What surrounds `model.fit`: enter the session, leave it in any case, raise what really happened."""
        del model
        self._training_data_is_next = True
        if self._worker is None:
            yield
            return
        try:
            with on_keyboard_interrupt(self._worker.membership.interrupt):
                if self._worker.in_session:  # Of a custom loop, which has no end of its own.
                    self._worker.end_session(None)
                self._worker.begin_session()
                yield
        except BaseException as error:
            failure = self._worker.membership.failure
            cause = failure if failure is not None and isinstance(error, tf.errors.OpError) else error
            self._worker.end_session(cause)
            if cause is not error:
                raise cause from error
            raise
        else:
            self._worker.end_session(None)
        finally:
            self._training_data_is_next = False
            self._writer.write()

    @contextlib.contextmanager
    def _keras_call(self) -> Iterator[None]:
        """Inside Keras's own calls data is shared out by `fit` alone."""
        self._inside_keras += 1
        try:
            yield
        finally:
            self._inside_keras -= 1

    # Data.

    def _shard(self, dataset: tf.data.Dataset, options: tf.distribute.InputOptions | None):
        """This rank's part of the training data; everything, where the data is for validation or prediction."""
        is_training_data = self._training_data_is_next or not self._inside_keras
        self._training_data_is_next = False
        if self.world_size == 1 or not is_training_data:
            return dataset, {}
        if dataset.options().experimental_distribute.auto_shard_policy in _SHARDED_BY_TENSORFLOW:
            return dataset, {"num_replicas_in_sync": self.world_size, "input_context": self._input_context()}
        return slice_global_batches(dataset, self.rank, self.world_size), {}

    def _input_context(self) -> tf.distribute.InputContext:
        return tf.distribute.InputContext(
            num_input_pipelines=self.world_size, input_pipeline_id=self.rank, num_replicas_in_sync=self.world_size
        )

    # One training step.

    def _enter_step(self, fn: Callable) -> _StepTrace:
        """Called when `run(fn)` begins: notes what `fn` trains, and gives it rank 0's initial values."""
        model = getattr(fn, "__self__", None) if getattr(fn, "__name__", "") == "train_step" else None
        trace = _StepTrace(model if isinstance(model, keras.Model) else None)
        if self._worker is not None and trace.model is not None and trace.model.built:
            with tf.init_scope():
                self._require_session()
                optimizers = _optimizers(trace.model)
                self._worker.broadcast_initial_values(
                    _tf_variables(trace.model.weights, *(optimizer.variables for optimizer in optimizers))
                )
            trace.read_candidates()
        if self._emulated_compute is not None:
            trace.started_at = tf.timestamp()
        return trace

    def _leave_step(self, trace: _StepTrace) -> None:
        if trace.model is not None and trace.model.trainable_weights and not trace.num_updates:
            raise HopError(
                "a training step was run, but hop_tf saw no optimizer update in it, so nothing would be exchanged. "
                f"Check that train_step calls optimizer.apply. Keras {keras.__version__}, TensorFlow {tf.__version__}."
            )

    def _exchange(self, optimizer, trace: _StepTrace, gradients: list, variables: list[tf.Variable]) -> list:
        """Runs the scheme's half of the graph; returns the gradients to apply."""
        _refuse_xla()
        if trace.num_updates == 0:  # With several optimizers, one step has several updates.
            self._statistics.count_step()
        trace.num_updates += 1
        gradients = self._emulate_compute(trace, gradients)
        if self._worker is None:
            return gradients
        group = self._group_of(optimizer, trace, variables)
        values = [trace.value_at_start(variable) for variable in group.variables]
        return self._before_update(group, values, gradients)

    def _emulate_compute(self, trace: _StepTrace, gradients: list) -> list:
        if self._emulated_compute is None or trace.started_at is None:
            return gradients
        return self._emulated_compute.delay(trace.started_at, gradients)

    def _group_of(self, optimizer, trace: _StepTrace, variables: list[tf.Variable]) -> Group:
        group = self._groups.get(optimizer)
        if group is None:
            carried = [v for v in trace.assigned_candidates() if id(v) not in self._carried]
            self._carried.update((id(v), weakref.ref(v)) for v in carried)
            with tf.init_scope():
                self._require_session()
                self._worker.broadcast_initial_values([*variables, *_tf_variables(optimizer.variables)])
                group = self._worker.add_group(
                    optimizer=optimizer,
                    variables=[*variables, *carried],
                    statistics=self._statistics,
                )
            self._groups[optimizer] = group
        return group

    def _require_session(self) -> None:
        """A custom loop enters its session at its first step."""
        if not self._worker.in_session:
            self._worker.begin_session()


class _StepTrace:
    """What is known of one call of `run` while it is traced (or, run eagerly, executed)."""

    def __init__(self, model: keras.Model | None):
        self.model = model
        self.started_at: tf.Tensor | None = None
        self.num_updates = 0
        self.inside_loss_scaling = False
        self._graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        self._at_start: dict[int, tuple[tf.Variable, tf.Tensor]] = {}

    def read_candidates(self) -> None:
        """Reads the untrained float variables now, before the step assigns them."""
        for layer in self.model._flatten_layers():
            # In graphs, `assigned_candidates` looks closer. Eagerly, a layer that trains counts as assigning.
            if self._graph is None and not layer.trainable:
                continue
            for weight in layer._non_trainable_variables:
                variable = weight.value
                if variable.dtype.is_floating and _is_weight(weight, self.model):
                    self._at_start[id(variable)] = (variable, variable.read_value())

    def value_at_start(self, variable: tf.Variable) -> tf.Tensor:
        """The variable's value at the start of the step; trained variables do not change before the hook."""
        known = self._at_start.get(id(variable))
        return known[1] if known is not None else variable.read_value()

    def assigned_candidates(self) -> list[tf.Variable]:
        """The variables among the candidates that the step, as far as it is traced, assigns."""
        variables = [variable for variable, _ in self._at_start.values()]
        if self._graph is None:
            return variables
        return [variable for variable in variables if _is_assigned(variable, self._graph)]


def _is_weight(weight, model: keras.Model) -> bool:
    """Whether Keras counts the variable as a weight (metrics' state and random seeds are none)."""
    return any(weight is candidate for candidate in model.non_trainable_weights)


def _is_assigned(variable: tf.Variable, graph: tf.Graph) -> bool:
    """Whether an operation of `graph` does more than look at the variable."""
    for handle, placeholder in graph.captures:
        if handle is variable.handle:
            return any(op.type not in _READ_ONLY_OPS for op in placeholder.consumers())
    return False


def _optimizers(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    optimizer = getattr(model, "optimizer", None)
    return [optimizer] if optimizer is not None and optimizer.built else []


def _tf_variables(*lists: Iterable) -> list[tf.Variable]:
    """The TensorFlow variables behind Keras variables; those that hold numbers."""
    variables = (getattr(variable, "value", variable) for variable in itertools.chain(*lists))
    return [v for v in variables if isinstance(v, tf.Variable) and (v.dtype.is_floating or v.dtype.is_integer)]


def _refuse_xla() -> None:
    if not tf.executing_eagerly() and GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise ValueError(
            "`jit_compile` must be False or 'auto' under hop_tf: queue operations cannot be compiled by XLA. "
            "Received: jit_compile=True in model.compile or in the tf.function around strategy.run."
        )


class _ReplicaContext(one_device_strategy._OneDeviceReplicaContext):
    """The replica context of a training step: sees the optimizer's update."""

    def __init__(self, strategy: ExchangeStrategy, trace: _StepTrace):
        super().__init__(strategy)
        self._exchange_strategy = strategy
        self._trace = trace

    def all_reduce(self, reduce_op, value, options=None):
        """Returns `value`: there is one replica in this process.

        TensorFlow's own joins all gradients in one operation, so that none could leave before the last is there.
        """
        del reduce_op, options
        return value

    def merge_call(self, merge_fn, args=(), kwargs=None):
        name = getattr(merge_fn, "__qualname__", "")
        if name.endswith(_LOSS_SCALED_UPDATE):
            return self._loss_scaled_update(merge_fn, args, kwargs)
        if name.endswith(_UPDATE) and not self._trace.inside_loss_scaling:
            (grads_and_vars, *rest) = args
            grads_and_vars = list(grads_and_vars)
            variables = [variable for _, variable in grads_and_vars]
            gradients = self._exchange_strategy._exchange(
                merge_fn.__self__, self._trace, [gradient for gradient, _ in grads_and_vars], variables
            )
            args = (list(zip(gradients, variables, strict=True)), *rest)
        return super().merge_call(merge_fn, args, kwargs)

    def _loss_scaled_update(self, merge_fn, args, kwargs):
        """Exchanges before the optimizer asks whether all gradients are finite.

        The update comes in a branch of that condition. A rank whose gradients overflow does not run it; were the
        exchange in there, others would wait for that rank.
        """
        grads, trainable_variables = args
        optimizer = inspect.getclosurevars(merge_fn).nonlocals["self"]
        variables = _tf_variables(trainable_variables or optimizer._trainable_variables)
        gradients = self._exchange_strategy._exchange(optimizer, self._trace, list(grads), variables)
        self._trace.inside_loss_scaling = True
        try:
            return super().merge_call(merge_fn, (gradients, trainable_variables), kwargs)
        finally:
            self._trace.inside_loss_scaling = False


class _Extended(one_device_strategy.OneDeviceExtended):
    """One replica on one device, with hooks around training steps and training data."""

    # The trace of the step that is being traced: Keras re-enters the replica context within a step.
    _trace: _StepTrace | None = None

    def _call_for_each_replica(self, fn, args, kwargs):
        strategy = self._container_strategy()
        outermost = self._trace is None
        if outermost:
            self._trace = strategy._enter_step(fn)
        try:
            with tf.device(self._device), _ReplicaContext(strategy, self._trace):
                result = fn(*args, **kwargs)
            if outermost:
                strategy._leave_step(self._trace)
            return result
        finally:
            if outermost:
                self._trace = None

    def _experimental_distribute_dataset(self, dataset, options):
        strategy = self._container_strategy()
        dataset, sharding = strategy._shard(dataset, options)
        return input_util.get_distributed_dataset(
            dataset, self._input_workers_with_options(options), strategy, options=options, **sharding
        )

    def _distribute_datasets_from_function(self, dataset_fn, options):
        strategy = self._container_strategy()
        strategy._training_data_is_next = False
        return input_util.get_distributed_datasets_from_function(
            dataset_fn,
            self._input_workers_with_options(options),
            [strategy._input_context()],
            strategy,
            options=options,
        )


def _call_weakly(method: weakref.WeakMethod) -> None:
    bound = method()
    if bound is not None:
        bound()


@functools.cache
def _wrap_trainer() -> None:
    """Wraps Keras's `fit`, `evaluate` and `predict` once; they change only for models under an `ExchangeStrategy`."""
    for name in ("fit", "evaluate", "predict"):
        setattr(TensorFlowTrainer, name, _wrapped(getattr(TensorFlowTrainer, name), is_fit=name == "fit"))


def _wrapped(method: Callable, is_fit: bool) -> Callable:
    @functools.wraps(method)
    def call(self, *args, **kwargs):
        strategy = self.distribute_strategy
        if not isinstance(strategy, ExchangeStrategy):
            return method(self, *args, **kwargs)
        with strategy._keras_call(), strategy._fit_session(self) if is_fit else contextlib.nullcontext():
            return method(self, *args, **kwargs)

    return call

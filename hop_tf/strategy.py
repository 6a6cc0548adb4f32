"""`ExchangeStrategy`: the base of the strategies."""

from __future__ import annotations

import abc
import atexit
import contextlib
import json
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from hop_tf.cluster import Cluster
from hop_tf.collectives import AllReduce
from hop_tf.commands import plan
from hop_tf.errors import ClusterConfigError, HopError
from hop_tf.keras_hook.context import Extended, refuse_xla
from hop_tf.keras_hook.data import DataSharding
from hop_tf.keras_hook.emulated_compute import EmulatedCompute
from hop_tf.keras_hook.hooks import TrainingHooks
from hop_tf.keras_hook.interrupts import on_keyboard_interrupt
from hop_tf.keras_hook.optimizers import gradient_accumulation_steps, iterations_variable, tf_variables
from hop_tf.keras_hook.skipping import StepSkipping
from hop_tf.keras_hook.trace import StepTrace
from hop_tf.keras_hook.trainer import forget_cluster, note_cluster, wrap_trainer
from hop_tf.options import CommunicationOptions, checked_options
from hop_tf.runtime.group import ExchangeContext, Group
from hop_tf.runtime.report import ReportWriter, StepStatistics, static_identity
from hop_tf.runtime.worker import Worker
from hop_tf.tensors.packing import TensorSpec


class ExchangeStrategy(tf.distribute.Strategy, TrainingHooks):
    """Base of the strategies: one replica in this process, which exchanges with other processes' replicas.

    Subclasses give an `Exchange` (`_make_exchange`) and its half of the training graph (`_before_update` and
    `_after_update`).

    Use as any `tf.distribute.Strategy`: build and compile the model in `scope()`, then call `fit`. In a world of one
    (no `TF_CONFIG`), models train as they do without a strategy.

    Args:
      cluster: The cluster.
      cluster_resolver: The resolver it was read from, for `Strategy.cluster_resolver`.
      communication_options: Deadlines, credentials, records.
      identity: The scheme's settings; must be equal on all ranks.
      neighbors: Ranks that the scheme exchanges messages with.
      skips_steps: Whether the scheme may pass over training steps (`Incoming.num_skipped`).
      continue_without_lost: Whether ranks train on when one is lost.
      servers: The parameter servers, by their places in the cluster.
      joins_at_once: Whether a rank that was started again trains from its first step on, with what `_begin_group` gives
        it. Otherwise it passes over the steps that the others have made, and takes the state of one of them.

    Raises:
      HopError: If this rank's address cannot be bound.
      RuntimeError: If Keras does not run on TensorFlow.
    """

    # Whether `synchronize` merges what is under way in a custom loop, as the end of `fit` does.
    _settles_loops = False

    def __init__(
        self,
        *,
        cluster: Cluster,
        cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver | None,
        communication_options: CommunicationOptions | None,
        identity: Mapping[str, str],
        neighbors: Iterable[int],
        skips_steps: bool = False,
        continue_without_lost: bool = False,
        servers: Sequence[int] = (),
        joins_at_once: bool = False,
    ):
        if keras.backend.backend() != "tensorflow":
            raise RuntimeError(
                f"hop_tf needs Keras on the TensorFlow backend. Received: KERAS_BACKEND={keras.backend.backend()}."
            )
        wrap_trainer()
        device = "/gpu:0" if tf.config.list_physical_devices("GPU") else "/cpu:0"
        super().__init__(Extended(self, device))
        self._cluster = cluster
        self._resolver = cluster_resolver or tf.distribute.cluster_resolver.TFConfigClusterResolver()
        self._options = checked_options(communication_options)
        self._statistics = StepStatistics()
        self._emulated_compute = EmulatedCompute.from_environment(cluster.rank, cluster.world_size)
        # For each optimizer, by the identities of the variables that it updates together.
        self._groups: weakref.WeakKeyDictionary[object, dict[tuple[int, ...], Group]] = weakref.WeakKeyDictionary()
        self._data = DataSharding(cluster.rank, cluster.world_size)
        self._in_fit = False
        self._skipping = StepSkipping() if skips_steps and cluster.world_size > 1 else None
        self._is_catching_up = False
        self._has_finished = False
        self._shows_plan = plan.is_asked_for()
        self._joins_at_once = joins_at_once
        self._worker = None
        self._writer = ReportWriter(self.report, self._options, self.rank)
        if cluster.world_size > 1 or servers:
            try:
                self._worker = Worker(
                    cluster=cluster,
                    options=self._options,
                    identity=static_identity(type(self).__name__, cluster, identity),
                    neighbors=neighbors,
                    make_exchange=self._make_exchange,
                    continue_without_lost=continue_without_lost,
                    servers=servers,
                )
            except BaseException:
                self._writer.close()
                raise
            note_cluster(self)
            report = weakref.WeakMethod(self.report)
            self._worker.serve_reports(lambda: _call_weakly(report) or {})
        atexit.register(_call_weakly, weakref.WeakMethod(self.shutdown))

    # What subclasses give.

    @abc.abstractmethod
    def _make_exchange(self, context: ExchangeContext):
        """Makes the scheme's `Exchange` for a new group."""

    @abc.abstractmethod
    def _before_update(self, group: Group, values: Sequence[tf.Tensor], gradients: list) -> tuple[list, Any]:
        """Emits what the scheme does before the optimizer updates the variables.

        Args:
          group: The exchange group of the optimizer.
          values: What each of `group.variables` was when the step began.
          gradients: The local gradients, as the optimizer got them.

        Returns:
          The gradients that the optimizer is to apply, and what `_after_update` is to know.
        """

    @abc.abstractmethod
    def _after_update(self, group: Group, state: Any) -> tf.Tensor:
        """Emits what the scheme does after the update.

        Args:
          group: The exchange group of the optimizer.
          state: What `_before_update` has returned.

        Returns:
          int64 scalar: how many training steps are to be passed over (see `Incoming.num_skipped`).
        """

    def _specs_beside(self) -> Sequence[TensorSpec]:
        """What travels beside a group's variables."""
        return ()

    def _common_slots(self, group: Group) -> Sequence[tf.Variable] | None:
        """What the group's optimizer remembers alike on all ranks; None where ranks make different updates."""
        return None

    def _check_new_group(self) -> None:
        """Raises ValueError where a group cannot be made now: before others are asked for anything."""

    def _begin_group(self, group: Group) -> None:
        """Does, eagerly, what a new group needs before its first step."""

    def _check_further_group(self, group: Group) -> None:
        """Raises ValueError where a group cannot be one of several that an optimizer updates in the same step."""

    def _begin_training(self, group: Group) -> None:
        """Does, eagerly, what a group that is there needs before the first step of a `fit`."""

    def _begin_epoch(self, group: Group) -> None:
        """Does, eagerly, what a group that is there needs before the first step of an epoch of `fit`."""

    def _end_epoch(self, group: Group) -> None:
        """Does, eagerly, what validation and callbacks at the end of an epoch of `fit` count on."""

    def _finish_training(self, group: Group) -> None:
        """Does, eagerly, what is left when `fit` has made its last step."""

    def _break_off(self, group: Group) -> None:
        """Does, eagerly, what is left when `fit` has failed; nothing of other ranks may be waited for."""

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

        A collective: every rank calls it, between calls of `fit`. Under strategies whose ranks make the same updates
        (Pipe-SGD, synchronous Canary) what the model's optimizers remember of these is averaged along, and their
        numbers of steps: else the next `fit` would go on differently on a rank that has ended the last one early.
        Elsewhere optimizers are not touched.

        Args:
          model: The built model.

        Blocks: until all ranks call it.

        Raises:
          RuntimeError: If it is called within `fit`, as in a callback.
          ValueError: If the model is not built.
          MismatchError: If rank 0 has another model.
          HopError: If a rank was lost or has ended.
        """
        if not model.built:
            raise ValueError(
                "`model` must be built: train it first, or call `model.build(input_shape)`. "
                f"Received: model={model.name!r}, which has no weights yet."
            )
        if self._worker is not None:
            self._require_outside_fit("synchronize")
            with self._outside_loop():
                self._average_over_ranks([weight.value for weight in model.weights])

    def _average_over_ranks(self, weights: Sequence[tf.Variable]) -> None:
        known = {weight.ref() for weight in weights}
        groups = [group for group in self._all_groups() if any(v.ref() in known for v in group.trained)]
        common = [(group, slots) for group in groups if (slots := self._common_slots(group)) is not None]
        counts = [iterations_variable(group.optimizer()) for group, _ in common]
        means = [tf.Variable(tf.cast(count, tf.float64)) for count in counts]
        self._worker.average([*weights, *(slot for _, slots in common for slot in slots), *means])
        for count, mean in zip(counts, means, strict=True):
            count.assign(tf.cast(tf.round(mean), count.dtype))

    def report(self) -> dict[str, float]:
        """Counters of this rank since the strategy was made.

        Returns:
          `rank`, `steps` (optimizer updates), `iteration` (the scheme's, in the running or last `fit`), `wait_seconds`
          (time for which steps had their gradients and still waited for other ranks), `compute_seconds` (the median of
          the latest steps' durations, without what they waited; both stay 0 with `run_eagerly`), `bytes_sent`,
          `bytes_received`, `messages_sent`, `messages_received`, `connections_refused`, `bytes_sent_on_lane_<k>` (small
          messages are on lane 0, arrays on lane 1, and on one more for each further interface), and the scheme's own.
        """
        totals = {"rank": self.rank, **self._statistics.counters()}
        return {**totals, **(self._worker.counters() if self._worker else {})}

    def gather_reports(self, **extra) -> list[dict] | None:
        """Brings every rank's `report()` to rank 0.

        A collective: every rank calls it, between calls of `fit`.

        Args:
          **extra: Further entries of this rank's report; anything that JSON can hold (`float(x)`, not a NumPy scalar).

        Returns:
          On rank 0 the reports in the order of the ranks; elsewhere None.

        Blocks: until all ranks call it.

        Raises:
          RuntimeError: If it is called within `fit`, as in a callback.
          TypeError: If JSON cannot hold an entry.
          HopError: If a rank was lost or has ended.
        """
        for name, value in extra.items():
            _check_json(name, value)
        report = {**self.report(), **extra}
        if self._worker is None:
            return [report]
        self._require_outside_fit("gather_reports")
        return self._worker.gather(report)

    def all_reduce_for_measurement(self, algorithm: str, num_values: int) -> AllReduce:
        """Makes an all-reduce of a float32 vector over the live links, for `hop_tf.timing.measure`. A collective.

        Args:
          algorithm: As for `hop_tf.collectives.get_algorithm`.
          num_values: Length of the vector.

        Returns:
          The all-reduce. The caller closes it.

        Raises:
          RuntimeError: If it is called within `fit`, or there is one rank only.
          HopError: If a rank was lost or has ended.
        """
        if self._worker is None:
            raise RuntimeError("there is nothing to measure in a world of one. Start the script once for each rank.")
        self._require_outside_fit("measure")
        return self._worker.make_all_reduce(algorithm, num_values)

    @property
    def num_exchanged_bytes(self) -> int:
        """Bytes of the variables that are exchanged in a step: those of all optimizers that are still there."""
        return self._worker.num_bytes if self._worker else 0

    @property
    def num_exchanged_values(self) -> int:
        """How many values these bytes are."""
        return self._worker.num_values if self._worker else 0

    def _require_outside_fit(self, what: str) -> None:
        if self._in_fit:
            raise RuntimeError(
                f"`{what}` was called while a `fit` under this strategy runs, as in a callback. Other ranks are at "
                "other steps of that `fit` and cannot take part. Call it afterwards; a model that is to be trained on "
                "this rank alone belongs in the scope of another strategy, such as tf.distribute.OneDeviceStrategy."
            )

    def shutdown(self) -> None:
        """Leaves the cluster for good and releases the port and all threads. Idempotent; also runs at exit.

        Another strategy can then be made on the same addresses. It trains when all ranks have made theirs.

        Blocks: until what was sent, and in a custom loop what others count on, has arrived at the ranks that still
          listen. What takes longer than `progress_timeout_seconds` is given up.
        """
        self._writer.close()
        if self._emulated_compute is not None:
            self._emulated_compute.close()
        if self._worker is not None:
            forget_cluster(self)
            self._worker.close("its process ended")

    # Hooks: sessions.

    @contextlib.contextmanager
    def fit_session(self, x, callbacks=None) -> Iterator[None]:
        """What surrounds `model.fit`: enter the session, leave it in any case, raise what really happened."""
        if self._worker is None:
            yield
        else:
            yield from self._fit_session(x, callbacks)
        if self._shows_plan:
            self._shows_plan = False
            plan.show(self)

    def _fit_session(self, x, callbacks) -> Iterator[None]:
        self._require_outside_fit("fit")
        self._data.begin_fit(x)
        self._in_fit = True
        try:
            with self._naming_causes(), on_keyboard_interrupt(self._worker.membership.interrupt):
                self._end_loop()
                self._worker.begin_session()
                if self._skipping is not None:
                    self._skipping.begin_session()
                if self._worker.joining and not self._joins_at_once:
                    _refuse_to_restore(callbacks)
                self._has_finished = False
                yield
                self.finish_training()  # Without an optimizer of its own, a model does not tell of its last step.
                if self._worker.joining:
                    raise HopError(
                        f"rank {self.rank} was started again, and its `fit` has ended before it was where the others "
                        "are: it has not trained. Give all ranks the same number of epochs and steps."
                    )
        except BaseException as error:
            for group in self._all_groups():
                self._break_off(group)
            self._worker.end_session(error)
            raise
        else:
            self._worker.end_session(None)
        finally:
            self._in_fit = False
            self._data.end_fit()
            self._writer.write()

    @contextlib.contextmanager
    def _naming_causes(self) -> Iterator[None]:
        """Raises what really happened where an operation fails because the job is broken."""
        try:
            yield
        except tf.errors.OpError as error:
            failure = self._worker.membership.failure
            if failure is None:
                raise
            raise failure from error

    def _end_loop(self) -> None:
        """Ends the session of a custom loop, if one is under way: it has no end of its own."""
        if self._worker.in_session:
            if self._settles_loops:
                with self._naming_causes():
                    for group in self._all_groups():
                        self._finish_training(group)
            self._worker.end_session(None)

    @contextlib.contextmanager
    def _outside_loop(self) -> Iterator[None]:
        """Surrounds what all ranks do together between two steps of a custom loop."""
        loops = self._worker.in_session and self._settles_loops
        if loops:
            self._end_loop()
        yield
        if loops:
            self._worker.begin_session()
            self.begin_training()

    def keras_call(self) -> contextlib.AbstractContextManager:
        """See `DataSharding`."""
        return self._data.keras_call()

    # Hooks: data.

    def shard(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """This rank's part of the training data; everything, where the data is for validation or prediction."""
        return self._data.part_of(dataset)

    @property
    def input_context(self) -> tf.distribute.InputContext:
        """This rank among the input pipelines of `distribute_datasets_from_function`."""
        return tf.distribute.InputContext(
            num_input_pipelines=self.world_size, input_pipeline_id=self.rank, num_replicas_in_sync=self.world_size
        )

    def distribute_datasets_from_function(self, dataset_fn, options=None):
        """Returns the dataset that `dataset_fn(input_context)` makes for this rank; `fit` uses it as it is.

        Args:
          dataset_fn: Takes a `tf.distribute.InputContext`, which knows the number of ranks, this rank, and the batch
            size of a rank (`get_per_replica_batch_size(global_batch_size)`).
          options: Ignored: there is one device.

        Returns:
          The dataset.
        """
        dataset = super().distribute_datasets_from_function(dataset_fn, options)
        self._data.take_whole(dataset)
        return dataset

    # Hooks: one training step.

    def enter_step(self, trace: StepTrace) -> None:
        """Gives the model rank 0's initial values, before its first step."""
        if self._worker is not None and trace.model is not None and trace.model.built:
            refuse_xla()  # Before other ranks are asked for anything.
            optimizer = getattr(trace.model, "optimizer", None)
            slots = optimizer.variables if optimizer is not None and optimizer.built else ()
            with tf.init_scope():
                self._require_session()
                self._worker.broadcast_initial_values(tf_variables(trace.model.weights, slots))
            trace.read_untrained()
            with trace.when_data_is_here():
                self._statistics.count_start()
        if self._emulated_compute is not None:
            with trace.when_data_is_here():
                trace.started_at = tf.timestamp()

    def leave_step(self, trace: StepTrace) -> None:
        """Raises if a step trained a model and no update was seen: nothing would be exchanged, silently."""
        trains = self._worker is not None and trace.model is not None and trace.model.trainable_weights
        optimizer = getattr(trace.model, "optimizer", None)
        if tf.executing_eagerly() and optimizer is not None and gradient_accumulation_steps(optimizer) > 1:
            return  # Its batch may be one of those that make no update; in a graph there is one for the others.
        if trains and not trace.num_updates:
            raise HopError(
                "a training step was run, but hop_tf saw no optimizer update in it, so nothing would be exchanged. "
                f"Check that train_step calls optimizer.apply. Keras {keras.__version__}, TensorFlow {tf.__version__}."
            )

    def exchange(self, optimizer, trace: StepTrace, gradients: list, variables: list[tf.Variable]) -> list:
        """Runs the scheme's half of the graph; returns the gradients to apply."""
        if self._worker is not None or self._emulated_compute is not None:
            refuse_xla()
        trace.refuse_nested_function()
        with trace.when_data_is_here():
            return self._exchange(optimizer, trace, gradients, variables)

    def _exchange(self, optimizer, trace: StepTrace, gradients: list, variables: list[tf.Variable]) -> list:
        if trace.num_updates == 0:  # With several optimizers, one step has several updates.
            self._statistics.count_step()
        trace.num_updates += 1
        gradients = self._emulate_compute(trace, gradients)
        if self._worker is None:
            return gradients
        if self._passes_over_steps():
            self._skipping.note(optimizer, in_fit=self._in_fit and trace.model is not None)
        group = self._group_of(optimizer, trace, variables)
        if any(other.name in trace.states for other in self._groups[optimizer].values()):
            self._check_further_group(group)
        trace.claim(group.variables)
        values = [trace.value_at_start(variable) for variable in group.variables]
        gradients, trace.states[group.name] = self._before_update(group, values, gradients)
        return gradients

    def after_update(self, optimizer, trace: StepTrace, variables: list[tf.Variable]) -> None:
        """Runs what the scheme does after the update, and ends the group's step."""
        if self._worker is None:
            return
        group = self._groups[optimizer][_key(variables)]
        with trace.when_data_is_here():
            num_skipped = self._after_update(group, trace.states[group.name])
            group.end_step(num_skipped)
            if self._skipping is not None:
                self._skipping.skip(num_skipped)

    def begin_training(self) -> None:
        """Lets the scheme look at what has changed between two fits, and by callbacks."""
        for group in self._all_groups():
            self._begin_training(group)

    def begin_epoch(self) -> None:
        """Lets the scheme look at what callbacks have changed since the last epoch."""
        for group in self._all_groups():
            self._begin_epoch(group)

    def end_epoch(self) -> None:
        """Lets the scheme do what validation and callbacks count on."""
        for group in self._all_groups():
            self._end_epoch(group)

    def finish_training(self) -> None:
        """Lets the scheme do, once in a `fit`, what is left when the last step has been made."""
        if self._has_finished:
            return
        self._has_finished = True
        for group in self._all_groups():
            self._finish_training(group)

    def _all_groups(self) -> list[Group]:
        return [group for groups in self._groups.values() for group in groups.values()]

    def around_step(self, step: Callable[[], object], arguments: object, model: keras.Model) -> object:
        """Runs the step, unless it is to be passed over."""
        return self._skipping.run(step, arguments, model) if self._passes_over_steps() else step()

    def _passes_over_steps(self) -> bool:
        """Whether steps can be passed over: the scheme may want that, or this process was started again."""
        joins = self._worker is not None and self._worker.joining and not self._joins_at_once
        if joins and not self._is_catching_up:
            self._is_catching_up = True
            self._skipping = self._skipping or StepSkipping()
            self._skipping.begin_by_skipping(self._catch_up)
        return self._skipping is not None

    def _catch_up(self, optimizer) -> tf.Tensor:
        (group,) = self._groups[optimizer].values()
        return group.catch_up()

    def _emulate_compute(self, trace: StepTrace, gradients: list) -> list:
        if self._emulated_compute is None or trace.started_at is None:
            return gradients
        return self._emulated_compute.delay(trace.started_at, gradients)

    def _group_of(self, optimizer, trace: StepTrace, variables: list[tf.Variable]) -> Group:
        groups = self._groups.setdefault(optimizer, {})
        key = _key(variables)
        if key not in groups:
            self._check_new_group()
            carried = trace.unclaimed_assigned()
            begun = tf.executing_eagerly()  # Else the step is only traced.
            with tf.init_scope():
                values = [trace.value_at_start(each) if begun else each.read_value() for each in carried]
                self._require_session()
                self._worker.broadcast_initial_values([*variables, *tf_variables(optimizer.variables)])
                groups[key] = self._worker.add_group(
                    optimizer=optimizer,
                    trained=variables,
                    carried=carried,
                    carried_values=values,
                    statistics=self._statistics,
                    beside=self._specs_beside(),
                )
                self._begin_group(groups[key])
        return groups[key]

    def _require_session(self) -> None:
        """A custom loop enters its session at its first step."""
        if not self._worker.in_session:
            self._worker.begin_session()


def training_cluster(resolver: tf.distribute.cluster_resolver.ClusterResolver | None, strategy: str) -> Cluster:
    """Returns the cluster of a strategy that has no parameter servers.

    Args:
      resolver: Where the cluster is described; None: `TF_CONFIG`.
      strategy: Name of the strategy, for the error.

    Raises:
      ClusterConfigError: If the description is not valid, or this task is no rank.
    """
    cluster = Cluster.from_resolver(resolver)
    if cluster.rank is None:
        raise ClusterConfigError(
            f"{strategy} runs in tasks of type 'chief' and 'worker'; it has no parameter servers. "
            "Received: a task of another type in TF_CONFIG (or --num_ps of the launcher)."
        )
    return cluster


def _refuse_to_restore(callbacks) -> None:
    """Raises ValueError where a callback would begin at a later epoch: then steps would not be the others'."""
    for callback in tf.nest.flatten(getattr(callbacks, "callbacks", callbacks)):  # There may be a CallbackList.
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            raise ValueError(
                "a rank that was started again takes its state from the others, and passes over the steps that it has "
                "missed: `BackupAndRestore` would begin at another step. Leave it out, or start all ranks again. "
                f"Received: callbacks={callbacks!r}."
            )


def _key(variables: Sequence[tf.Variable]) -> tuple[int, ...]:
    return tuple(id(variable) for variable in variables)


def _check_json(name: str, value: object) -> None:
    try:
        json.dumps(value)
    except TypeError as error:
        raise TypeError(
            f"`{name}` must be something that JSON can hold, such as float(x). Received: {name}={value!r}."
        ) from error


def _call_weakly(method: weakref.WeakMethod) -> Any:
    bound = method()
    return None if bound is None else bound()

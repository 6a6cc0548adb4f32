"""The replica context of a training step, which sees the optimizer's update."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import distribute_lib, one_device_strategy
from tensorflow.python.ops import summary_ops_v2
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from hop_tf.keras_hook.hooks import TrainingHooks
from hop_tf.keras_hook.optimizers import learning_rate, tf_variables
from hop_tf.keras_hook.trace import StepTrace, trained_model
from hop_tf.keras_hook.updates import out_of_place, own_updates
from hop_tf.keras_hook.variables import is_own, made_beside_the_trace

# Optimizer methods that Keras passes to `merge_call`, by the end of their qualified names.
_UPDATE = "_distributed_tf_update_step"
_LOSS_SCALED_UPDATE = "LossScaleOptimizer._tf_apply.<locals>._handle_cross_replica"


def refuse_xla() -> None:
    """Raises ValueError if XLA is to compile the step."""
    if not tf.executing_eagerly() and GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise ValueError(
            "`jit_compile` must be False or 'auto' under hop_tf: queue operations cannot be compiled by XLA. "
            "Received: jit_compile=True in model.compile or in the tf.function around strategy.run."
        )


def _refuse_keras_2(merge_fn: Callable) -> None:
    """Raises ValueError if an optimizer of Keras 2 is about to update: ranks would begin with different models."""
    function = getattr(merge_fn, "func", merge_fn)  # Within a functools.partial.
    if (getattr(function, "__module__", None) or "").partition(".")[0] == "tf_keras":
        raise ValueError(
            "models and optimizers under hop_tf must be of Keras 3. Unset TF_USE_LEGACY_KERAS, which makes tf.keras "
            "Keras 2, or `import keras`, which is Keras 3 in any case. "
            f"Received: an update that calls {function.__qualname__} of {function.__module__}."
        )


def record_summaries(are_recorded: bool = True) -> None:
    """Turns `tf.summary` on or off in this context. TensorFlow itself records only on the replica with number 0."""
    summary_ops_v2._summary_state.is_recording_distribution_strategy = are_recorded


class ReplicaContext(one_device_strategy._OneDeviceReplicaContext):
    """The replica context of a training step. It intercepts the optimizer's update."""

    def __init__(self, strategy: tf.distribute.Strategy, hooks: TrainingHooks, trace: StepTrace):
        # Bypasses the base class, whose replica id is 0 in all processes.
        distribute_lib.ReplicaContext.__init__(self, strategy, strategy.extended._get_replica_id_in_sync_group(0))
        self._hooks = hooks
        self._trace = trace

    def __enter__(self):
        super().__enter__()
        record_summaries()

    def merge_call(self, merge_fn, args=(), kwargs=None):
        _refuse_keras_2(merge_fn)
        name = getattr(merge_fn, "__qualname__", "")
        if name.endswith(_LOSS_SCALED_UPDATE):
            return self._loss_scaled_update(merge_fn, args, kwargs)
        if not name.endswith(_UPDATE):
            return super().merge_call(merge_fn, args, kwargs)
        if own_updates.is_left_out:
            return None
        if self._trace.inside_loss_scaling or own_updates.runs:
            return self._update(merge_fn, args, kwargs)
        with self._trace.updating():
            return self._exchange_and_update(merge_fn, args, kwargs)

    def _exchange_and_update(self, merge_fn, args, kwargs):
        (grads_and_vars, *rest) = args
        grads_and_vars = list(grads_and_vars)
        variables = [variable for _, variable in grads_and_vars]
        gradients = self._exchange(merge_fn.__self__, [gradient for gradient, _ in grads_and_vars], variables)
        if rest:  # The exchange may have changed the learning rate.
            rest = [learning_rate(merge_fn.__self__)]
        result = self._update(merge_fn, (list(zip(gradients, variables, strict=True)), *rest), kwargs)
        self._hooks.after_update(merge_fn.__self__, self._trace, variables)
        return result

    def all_reduce(self, reduce_op, value, options=None):
        rows = None if self._trace.model is None else self._hooks.num_rows  # In a custom loop, losses add up.
        if rows is None or any(isinstance(each, tf.IndexedSlices) for each in tf.nest.flatten(value)):
            return super().all_reduce(reduce_op, value, options)
        # This rank's value changes the losses of other ranks. Each of these losses is weighted by the rows of its rank.
        # The gradient that comes back is divided by this rank's rows, because the exchange multiplies this rank's whole
        # gradient by its number of rows.
        reduce = super().all_reduce

        @tf.custom_gradient
        def weighted(*values):
            def gradient(*of_results):
                of_results = [each * tf.cast(rows, each.dtype) for each in of_results]
                return [each / tf.cast(rows, each.dtype) for each in reduce(reduce_op, of_results, options)]

            return reduce(reduce_op, list(values), options), gradient

        results = weighted(*tf.nest.flatten(value))
        return tf.nest.pack_sequence_as(value, tf.nest.flatten(results))

    def _exchange(self, optimizer, gradients: list, variables: list[tf.Variable]) -> list:
        """Exchanges this replica's gradients.

        In a custom loop, they are the gradients of this replica's part of the loss. They are multiplied by the number
        of parts and divided by the weight of this part. That makes them gradients of a loss over this replica's rows,
        as in a model's step.
        """
        num_parts, weight = self._hooks.num_loss_parts, self._hooks.num_rows
        if num_parts > 1 and self.strategy.num_replicas_in_sync > 1:
            scale = num_parts if weight is None else num_parts / weight
            gradients = [tf.math.scalar_mul(tf.cast(scale, gradient.dtype), gradient) for gradient in gradients]
        with self._trace.updating():
            return self._hooks.exchange(optimizer, self._trace, gradients, variables)

    def _update(self, merge_fn, args, kwargs):
        with out_of_place(merge_fn.__self__):
            return super().merge_call(merge_fn, args, kwargs)

    def _loss_scaled_update(self, merge_fn, args, kwargs):
        """Exchanges gradients before the optimizer checks that all of them are finite.

        The optimizer updates in a branch that runs only if all are. A rank whose gradients overflow does not run the
        branch. If the exchange were in the branch, other ranks would wait for that rank.
        """
        grads, trainable_variables = args
        optimizer = inspect.getclosurevars(merge_fn).nonlocals["self"]
        given = list(grads)
        used = [index for index, gradient in enumerate(given) if gradient is not None]
        variables = tf_variables(trainable_variables or optimizer._trainable_variables)
        variables = [variables[index] for index in used]
        gradients = self._exchange(optimizer, [given[index] for index in used], variables)
        for index, gradient in zip(used, gradients, strict=True):
            given[index] = gradient
        self._trace.inside_loss_scaling = True
        try:
            with self._trace.updating():
                result = super().merge_call(merge_fn, (given, trainable_variables), kwargs)
        finally:
            self._trace.inside_loss_scaling = False
        self._hooks.after_update(optimizer, self._trace, variables)
        return result


class Extended:
    """Hooks around training steps and training data, common to strategies of one device and of several.

    Args:
      strategy: The strategy.
      hooks: The hooks to call.
      *arguments: The arguments of the next base class, which is TensorFlow's.
    """

    def __init__(self, strategy: tf.distribute.Strategy, hooks: TrainingHooks, *arguments: Any):
        super().__init__(strategy, *arguments)
        self.hooks = hooks
        # Kept here because Keras re-enters the replica context within a step.
        self._trace: StepTrace | None = None

    @property
    def stream(self) -> int:
        """The number of the random stream to draw from: this replica's in a training step, otherwise 0."""
        if self._trace is None or not self._trace.draws_apart:
            return 0
        context = tf.distribute.get_replica_context()
        return self.hooks.replicas.stream(0 if context is None else context._replica_id)

    @property
    def in_step(self) -> bool:
        """True if a training step is being traced, or run eagerly."""
        return self._trace is not None

    def note_created(self, variable: tf.Variable) -> tf.Variable:
        """Records a variable that was created in the scope, and returns it."""
        if variable.trainable:
            self.hooks.note_created(variable)
        return variable

    def note_update(self) -> None:
        """Called when an optimizer has applied gradients, constraints, and averages of weights."""
        if self._trace is not None:
            self._trace.note_update()

    @contextlib.contextmanager
    def decaying(self, variables: Sequence) -> Iterator[None]:
        """A context for the weight decay of variables. Assignments in it are a part of the optimizer's update."""
        if self._trace is None:
            yield
            return
        self._trace.note_decay(tf_variables(variables))
        with self._trace.updating():
            yield

    def apply_once(self, apply: Callable[[Sequence], None], gradients: Sequence, values: Collection[int] = ()) -> None:
        """Calls `apply(gradients)` once for this process, with the sums of its devices' gradients.

        Args:
          apply: Makes the optimizer apply gradients.
          gradients: The gradients of this device.
          values: The indices of entries that are new values instead of gradients, such as scales of float8.
        """
        apply(gradients)

    def of_process(self, fn: Callable[[], Any]) -> Any:
        """Returns `fn()`, called once when all devices of this process have reached this point of the traced step."""
        return fn()

    @property
    def _num_replicas_in_sync(self) -> int:
        trains_model = self._trace is not None and self._trace.model is not None  # Also by `train_on_batch`.
        return 1 if trains_model else self.hooks.num_loss_parts * len(self.worker_devices)

    # TensorFlow calls these to convert a replica's number in this process to its number among all replicas, and back.

    def _get_replica_id_in_sync_group(self, replica_id):
        return self.hooks.replicas.first + replica_id

    def _get_local_replica_id(self, replica_id_in_sync_group):
        return replica_id_in_sync_group - self.hooks.replicas.first

    def _value_contexts(self) -> list[tf.distribute.experimental.ValueContext]:
        """The arguments for the function of `experimental_distribute_values_from_function`, one per device."""
        replicas = self.hooks.replicas
        ids = range(replicas.first, replicas.first + len(self.worker_devices))
        return [tf.distribute.experimental.ValueContext(each, replicas.number) for each in ids]

    def _call_for_each_replica(self, fn, args, kwargs):
        if self._trace is not None:
            return self._as_one(fn, args, kwargs)
        model = trained_model(fn)
        step = functools.partial(self._run_step, fn, args, kwargs, is_training=model is not None)
        with made_beside_the_trace():
            return step() if model is None else self.hooks.around_step(step, (args, kwargs), model)

    def _run_step(self, fn, args, kwargs, is_training: bool):
        if is_training:
            args, kwargs = self.hooks.own_rows((args, kwargs))
        self._trace = trace = StepTrace(fn, (args, kwargs))
        try:
            self.hooks.enter_step(trace)
            with tf.control_dependencies(trace.comes_first):
                result = self._run(fn, args, kwargs)
            self.hooks.leave_step(trace)
            return result
        finally:
            trace.has_ended, self._trace = True, None

    def _run(self, fn, args, kwargs):
        """Runs a step on this process's devices."""
        return self._as_one(fn, args, kwargs)

    def _as_one(self, fn, args, kwargs):
        """Calls `fn` once for this process, on its first device, whatever the number of devices."""
        with tf.device(self.worker_devices[0]), ReplicaContext(self._container_strategy(), self.hooks, self._trace):
            return fn(*args, **kwargs)

    # Datasets stay plain `tf.data.Dataset`s, as without a strategy. TensorFlow's distributed datasets iterate through a
    # MultiDeviceIterator. Its background thread was seen to use a deleted iterator, and crash.

    def _experimental_distribute_dataset(self, dataset, options):
        del options
        return self.hooks.shard(dataset)

    def _distribute_datasets_from_function(self, dataset_fn, options):
        del options
        return dataset_fn(self.hooks.input_context)


class OneDevice(Extended, one_device_strategy.OneDeviceExtended):
    """One replica on one device."""

    def _create_variable(self, next_creator, **kwargs):
        if is_own(kwargs.get("name")):  # The strategy places its own variables.
            return next_creator(**kwargs)
        return self.note_created(super()._create_variable(next_creator, **kwargs))

    def _reduce_to(self, reduce_op, value, destinations, options):
        del destinations, options
        return self.hooks.reduce(reduce_op, value)

    def _gather_to_implementation(self, value, destinations, axis, options):
        del destinations, options
        return self.hooks.gather(value, axis)

    def _experimental_distribute_values_from_function(self, value_fn):
        (context,) = self._value_contexts()
        return value_fn(context)

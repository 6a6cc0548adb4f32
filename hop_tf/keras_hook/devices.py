"""Several devices of one process as one rank.

A training step runs on each device, with the device's part of the batch, as under `tf.distribute.MirroredStrategy`.
Each device has a copy of all variables. When the step applies its gradients, these are added up over the devices. From
there on the process does everything once, as if it had one device. That covers the optimizer's work before its update,
the exchange, and a strategy's work on weights. All copies of a variable are assigned together.
"""

from __future__ import annotations

import collections
import functools
import os
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.distribute import distribute_lib, mirrored_strategy, values
from tensorflow.python.ops import resource_variable_ops

from hop_tf.keras_hook.batch_rows import require_equal_rows, with_equal_rows
from hop_tf.keras_hook.context import Extended, OneDevice, ReplicaContext, record_summaries
from hop_tf.keras_hook.data import count_rows, divide, without_rows
from hop_tf.keras_hook.hooks import TrainingHooks
from hop_tf.keras_hook.trace import is_keras_step, is_predict_step
from hop_tf.keras_hook.variables import is_own
from hop_tf.options import DEVICES_VARIABLE, devices_per_worker

# The dtypes of gradients that TensorFlow's NCCL operation accepts. It does not accept bfloat16.
_NCCL_TYPES = (tf.float16, tf.float32, tf.float64)


class SeveralDevices(Extended, mirrored_strategy.MirroredExtended):
    """One rank with a copy of the model on each device.

    Args:
      strategy: The strategy.
      hooks: The hooks to call.
      devices: The names of the devices, at least two.
    """

    def __init__(self, strategy: tf.distribute.Strategy, hooks: TrainingHooks, devices: Sequence[str]):
        strategy._collective_key_base = 0  # The base class reads this attribute of a `MirroredStrategy`.
        # TensorFlow's default, collective operations, would no longer work in the process after a failed step.
        self._has_nccl = _have_nccl(devices)
        add_up = tf.distribute.NcclAllReduce() if self._has_nccl else tf.distribute.ReductionToOneDevice()
        super().__init__(strategy, hooks, devices, add_up)
        # The weight of each device's gradient in the step that is being traced; None adds gradients as they are.
        self._shares: Sequence | None = None
        # For each dataset of `PerReplica` values, the dataset before its batches were divided.
        self._undivided: weakref.WeakKeyDictionary[tf.data.Dataset, tf.data.Dataset] = weakref.WeakKeyDictionary()

    @property
    def worker_devices_by_replica(self):
        return [[]] * self.hooks.replicas.first + super().worker_devices_by_replica  # Indexed by replica id.

    # Variables.

    def _create_variable(self, next_creator, **kwargs):
        if is_own(kwargs.get("name")):  # The strategy has placed the single copy.
            return next_creator(**kwargs)
        colocate_with = kwargs.get("colocate_with")
        if isinstance(colocate_with, tf.Variable) and not _is_copied(colocate_with):
            del kwargs["colocate_with"]
            with tf.device(colocate_with.device):
                return next_creator(**kwargs)
        if self._trace is None or tf.executing_eagerly():
            variable = super()._create_variable(next_creator, **kwargs)
        else:
            # Creates a step's own variable, such as a slot in a custom loop, before the step runs. The initial value of
            # each further copy is the first copy's value, which `tf.function` cannot lift out of the step.
            with tf.init_scope():
                variable = super()._create_variable(_create, **kwargs)
        if type(variable) is values.MirroredVariable:
            variable.__class__ = _Copies
        return self.note_created(variable)

    def _validate_colocate_with_variable(self, colocate_with_variable):
        if _is_copied(colocate_with_variable):
            super()._validate_colocate_with_variable(colocate_with_variable)

    def _update(self, var, fn, args, kwargs, group):
        if _is_copied(var):
            return super()._update(var, fn, args, kwargs, group)
        with tf.device(var.device), distribute_lib.UpdateContext(0):  # A strategy's own, or made outside of the scope.
            result = fn(var, *args, **kwargs)
        return result if group else tf.nest.map_structure(self._local_results, result)

    # Steps.

    def _run(self, fn, args, kwargs):
        number, is_divided = len(self.worker_devices), _has_parts(args)
        if is_divided or not is_keras_step(fn):
            rows = _rows_of_parts(args) if is_divided and self._trace.model is not None else None
            return self._on_devices(fn, args, kwargs, rows and [each / sum(rows) for each in rows])
        num_rows, trains = count_rows(args), self._trace.model is not None
        is_known = not tf.is_symbolic_tensor(num_rows)
        if not trains and is_known and (num_rows or 0) < number:
            return self._as_one(fn, args, kwargs)

        def run_on_devices():
            with tf.device("/cpu:0"):
                parts, shares = divide(args, number)
            together = tf.nest.map_structure(lambda *each: _per_replica(each), *parts)
            return self._on_devices(fn, together, kwargs, shares if trains else None)

        if trains or is_known:
            return run_on_devices()
        # At least one row per device, because user code may not handle an empty batch.
        return tf.cond(
            num_rows >= number,
            lambda: tf.nest.map_structure(lambda each: self._with_rest(each, each), run_on_devices()),
            lambda: self._on_first_device(fn, args, kwargs),
        )

    def _on_first_device(self, fn, args, kwargs):
        """Runs a Keras step that does not train, on the first device only. The result has a value for each device."""
        result = self._as_one(fn, args, kwargs)
        rest = without_rows(result) if is_predict_step(fn) else result
        return tf.nest.map_structure(self._with_rest, result, rest)

    def _with_rest(self, first: Any, rest: Any) -> values.PerReplica:
        """A value for each device: `first` for the first one, `rest` for all others. A `PerReplica` stays as it is."""
        if isinstance(first, values.PerReplica):
            return first
        return values.PerReplica([first, *([rest] * (len(self.worker_devices) - 1))])

    def _on_devices(self, fn, args, kwargs, shares):
        """Runs a step on each device. `shares` are the weights of the gradients; None adds gradients as they are."""
        self._shares = shares
        first = self._trace.comes_first

        @tf.autograph.experimental.do_not_convert
        def on_device(*args, **kwargs):
            record_summaries(self._context_of_device()._replica_id == 0)
            with tf.control_dependencies(first):  # Each device has its own thread.
                return fn(*args, **kwargs)

        run = fn if isinstance(fn, tf.types.experimental.PolymorphicFunction) and not first else on_device
        try:
            result = mirrored_strategy.MirroredExtended._call_for_each_replica(self, run, args, kwargs)
            self._make_alike()
            return result
        except (TypeError, ValueError) as error:
            _explain_parts(error)
            raise
        finally:
            self._shares = None

    def apply_once(self, apply: Callable[[Sequence], None], gradients: Sequence, values: Collection[int] = ()) -> None:
        context = self._context_of_device()
        if context is None:  # The gradients are sums already, or this is no step.
            apply(gradients)
            return
        if self._shares is not None:
            share = self._shares[context._replica_id]
            gradients = [
                each if each is None or index in values else _scaled(each, share)
                for index, each in enumerate(gradients)
            ]

        def merge(strategy: tf.distribute.Strategy, gradients: list) -> None:
            self._make_alike()
            self._as_one(apply, (self._added_up(gradients, values),), {})
            self._trace.note_alike()

        context.merge_call(tf.autograph.experimental.do_not_convert(merge), args=(list(gradients),))

    def of_process(self, fn: Callable[[], Any]) -> Any:
        context = self._context_of_device()
        if context is None:
            return fn()
        return context.merge_call(tf.autograph.experimental.do_not_convert(lambda strategy: fn()))

    def _context_of_device(self) -> tf.distribute.ReplicaContext | None:
        """The context of the device that a step is traced for; None if the step is traced for the process."""
        context = tf.distribute.get_replica_context()
        return None if self._trace is None or isinstance(context, ReplicaContext) else context

    def _added_up(self, gradients: Sequence, maxima: Collection[int] = ()) -> list:
        """The sum of each gradient over the devices: on the first device, or on all devices if NCCL computes it.

        Entries with an index in `maxima` get the maximum over the devices instead of the sum.
        """
        sums, of_types = list(gradients), collections.defaultdict(list)
        with tf.device(self.worker_devices[0]):
            for index, each in enumerate(gradients):
                if each is None:
                    continue
                if index in maxima:
                    sums[index] = tf.reduce_max(tf.stack(each.values), axis=0)
                elif _is_sparse(each.values[0]):
                    sums[index] = _joined(each.values)
                elif self._has_nccl and each.values[0].dtype in _NCCL_TYPES:
                    of_types[each.values[0].dtype].append(index)
                else:
                    sums[index] = tf.add_n(each.values)
        for indices in of_types.values():
            for index, total in zip(indices, self._all_reduced([sums[index] for index in indices]), strict=True):
                sums[index] = total
        return sums

    def _all_reduced(self, gradients: Sequence[values.PerReplica]) -> list:
        """NCCL's sums of gradients of one dtype: on all devices, or on the first if `exchange` replaces them."""
        pairs = [(each, each) for each in gradients]
        totals = self._cross_device_ops.batch_reduce(tf.distribute.ReduceOp.SUM, pairs)
        # An all-reduce begins when all devices take part, but TensorFlow prunes operations whose sums are not used.
        all_take_part = tf.group(*(each for total in totals for each in total.values))
        with tf.control_dependencies([all_take_part]):
            if self.hooks.replaces_gradients:
                return [_kept(total.values[0]) for total in totals]
            return [values.Mirrored([_kept(each) for each in total.values]) for total in totals]

    def _make_alike(self) -> None:
        """Makes the copies of a state equal again after each device has assigned its own.

        If ranks average the state, each copy becomes the mean of the copies. Otherwise it becomes the first device's
        copy.
        """
        shares = self._shares or [1 / len(self.worker_devices)] * len(self.worker_devices)
        for variable in self._trace.assigned_on_devices():
            if not self._trace.is_averaged(variable):
                variable.assign(variable.values[0].read_value())
                continue
            with tf.device(self.worker_devices[0]):
                parts = [_scaled(each.read_value(), share) for each, share in zip(variable.values, shares, strict=True)]
                mean = tf.add_n(parts)
            variable.assign(mean)

    # Values of several replicas are combined within the process first, then over ranks.

    def _reduce(self, reduce_op, value):
        if isinstance(value, values.SyncOnReadVariable):  # This reads a metric, which belongs to this rank.
            return super()._reduce(reduce_op, value)
        return self.hooks.reduce(
            reduce_op, tf.nest.map_structure(lambda each: self._of_devices(reduce_op, each), value)
        )

    def _batch_reduce_to(self, reduce_op, value_destination_pairs, options):
        if self.hooks.num_rows is not None:
            raise ValueError(
                "`batch_shares` must be None if a step combines values of all ranks (`all_reduce`, or a layer with "
                "`synchronized=True`) and a rank has several devices. Such gradients are not weighted by rows. "
                f"Received: {len(self.worker_devices)} devices."
            )
        return [self._reduce(reduce_op, value) for value, _ in value_destination_pairs]

    def _of_devices(self, reduce_op, value):
        parts = self._local_results(value)
        if not isinstance(value, values.DistributedValues):  # Equal on all devices.
            parts = [value] * len(self.worker_devices)
        total = tf.add_n([tf.convert_to_tensor(part) for part in parts])
        return total if reduce_op is tf.distribute.ReduceOp.SUM else total / tf.cast(len(parts), total.dtype)

    def _gather_to_implementation(self, value, destinations, axis, options):
        del destinations, options
        return self.hooks.gather(tf.concat(self._local_results(value), axis), axis)

    # Datasets: Keras's batches are divided in the step, batches of a custom loop in the dataset.

    def _experimental_distribute_dataset(self, dataset, options):
        part = super()._experimental_distribute_dataset(self._undivided.get(dataset, dataset), options)
        return with_equal_rows(part) if self.hooks.is_inside_keras else self._with_parts(part)

    def _distribute_datasets_from_function(self, dataset_fn, options):
        return self._with_parts(super()._distribute_datasets_from_function(dataset_fn, options))

    def _with_parts(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        @tf.autograph.experimental.do_not_convert
        def divided(*batch):
            require_equal_rows(batch if isinstance(dataset.element_spec, tuple) else batch[0])
            parts, _ = divide(batch, len(self.worker_devices))
            result = tf.nest.map_structure(lambda *each: _per_replica(each), *parts)
            return result if isinstance(dataset.element_spec, tuple) else result[0]

        with_parts = dataset.map(divided, num_parallel_calls=tf.data.AUTOTUNE)
        self._undivided[with_parts] = dataset
        self.hooks.take_whole(with_parts)
        return with_parts

    def _experimental_distribute_values_from_function(self, value_fn):
        return values.PerReplica([value_fn(context) for context in self._value_contexts()])


class _Copies(values.MirroredVariable):
    """A variable with a copy on each device. Code that runs once for the process assigns all copies."""

    def _update_replica(self, update_fn, value, **kwargs):
        context = tf.distribute.get_replica_context()
        if not isinstance(context, ReplicaContext):
            return super()._update_replica(update_fn, value, **kwargs)

        def assign(strategy: tf.distribute.Strategy, value: tf.Tensor) -> object:
            return self._update_cross_replica(update_fn, value, **kwargs)

        return context.merge_call(assign, args=(value,))

    def __int__(self):
        return int(self.numpy())

    def __float__(self):
        return float(self.numpy())

    def __array__(self, dtype=None, copy=None):
        return np.array(self.numpy(), dtype=dtype, copy=copy)


_create = functools.partial(resource_variable_ops.default_variable_creator_v2, None)


def _is_copied(variable: tf.Variable) -> bool:
    return isinstance(variable, values.DistributedVariable)


def _has_parts(batch) -> bool:
    return any(isinstance(leaf, values.PerReplica) for leaf in tf.nest.flatten(batch))


def _explain_parts(error: Exception) -> None:
    """Raises ValueError if a step has failed because it read a batch itself: the batch has the parts of all devices."""
    if f"{values.PerReplica.__name__}:{{" in str(error):
        raise ValueError(
            "a step that runs on several devices must get its part of a batch as an argument: take the batch outside "
            "of `strategy.run`, as in `strategy.run(step, args=next(iterator))`. Received: a batch with the parts of "
            "all devices, within the step."
        ) from error


def _rows_of_parts(batch) -> list[tf.Tensor]:
    leaf = next(leaf for leaf in tf.nest.flatten(batch) if isinstance(leaf, values.PerReplica))
    return [count_rows(value) for value in leaf.values]


def _have_nccl(devices: Sequence[str]) -> bool:
    """True if NCCL can add up over these devices: all are GPUs, and no GPU is divided into logical devices."""
    num_logical, num_visible = (
        len(get("GPU")) for get in (tf.config.list_logical_devices, tf.config.get_visible_devices)
    )
    return all("GPU" in device for device in devices) and num_logical == num_visible


def _per_replica(parts: Sequence):
    return parts[0] if parts[0] is None or isinstance(parts[0], tf.experimental.Optional) else values.PerReplica(parts)


def _is_sparse(gradient) -> bool:
    return isinstance(gradient, tf.IndexedSlices)


def _kept(tensor: tf.Tensor) -> tf.Tensor:
    """The same tensor, on its device, after the control dependencies of the context."""
    with tf.device(tensor.device):
        return tf.identity(tensor)


def _joined(gradients: Sequence[tf.IndexedSlices]) -> tf.IndexedSlices:
    parts = [tf.concat([getattr(each, name) for each in gradients], 0) for name in ("values", "indices")]
    return tf.IndexedSlices(*parts, dense_shape=gradients[0].dense_shape)


def _scaled(gradient, share):
    dtype = gradient.dtype
    return tf.math.scalar_mul(tf.cast(share, dtype), gradient)


def find_devices(devices: Sequence[str] | None) -> list[str]:
    """The names of the devices of a process.

    Args:
      devices: Names from the user. Default: all GPUs that this process sees. Without a GPU, the default is one CPU, or
        as many logical CPUs as `DEVICES_VARIABLE` says.

    Raises:
      ValueError: If a device does not exist or is given twice, or if devices are of several kinds.
    """
    return _default_devices() if devices is None else _checked_devices(devices)


def make_extended(strategy: tf.distribute.Strategy, hooks: TrainingHooks, devices: Sequence[str]) -> Extended:
    """Makes the `Extended` of a strategy, which calls `hooks`, for the devices of its process."""
    return OneDevice(strategy, hooks, devices[0]) if len(devices) == 1 else SeveralDevices(strategy, hooks, devices)


def _default_devices() -> list[str]:
    num_gpus = len(tf.config.get_visible_devices("GPU"))  # A program may have hidden some, or all.
    if num_gpus > 1:
        return [device.name for device in tf.config.list_logical_devices("GPU")]
    if num_gpus == 1:
        return ["/gpu:0"]
    number = devices_per_worker(os.environ) or 1
    if number > 1:
        _make_logical_cpus(number)
    return [f"/cpu:{index}" for index in range(number)]


def _make_logical_cpus(number: int) -> None:
    """Makes several logical devices of the processor, which share its cores.

    Raises:
      ValueError: If the program has used TensorFlow before, because the devices are fixed then.
    """
    (cpu,) = tf.config.list_physical_devices("CPU")
    if len(tf.config.get_logical_device_configuration(cpu) or ()) >= number:
        return
    try:
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * number)
    except RuntimeError as error:
        raise ValueError(
            "cannot create logical devices, because the script has used TensorFlow before. Create the strategy at the "
            f"start of the script. ({DEVICES_VARIABLE}, which `hop_tf launch --devices_per_worker` sets, asks for "
            f"logical devices on a machine without GPUs.) Received: {DEVICES_VARIABLE}={number}. TensorFlow says: "
            f"{error}"
        ) from error


def _checked_devices(devices: Sequence[str]) -> list[str]:
    names = [] if isinstance(devices, str) else [getattr(device, "name", device) for device in devices]
    try:
        specs = [tf.DeviceSpec.from_string(name) for name in names]
    except (TypeError, ValueError, AttributeError):
        specs = []
    places = [(spec.device_type, spec.device_index or 0) for spec in specs]
    if not places or len(set(places)) < len(places) or len({kind for kind, _ in places}) > 1:
        raise ValueError(
            "`devices` must be a list of different devices of one kind, such as ['GPU:0', 'GPU:1']. "
            f"Received: devices={devices!r}."
        )
    known = [device.name for device in tf.config.list_logical_devices()]
    result = [f"/device:{kind}:{index}" for kind, index in places]
    if not set(result) <= set(known):
        raise ValueError(f"`devices` must be devices that this process sees: {known}. Received: devices={devices!r}.")
    return result

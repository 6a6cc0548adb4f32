"""`Shard`: a part of the model, and the user's optimizer that updates it."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf

from hop_tf.keras_hook.optimizers import slots_of
from hop_tf.keras_hook.updates import as_own_updates
from hop_tf.tensors.buffers import BufferPool
from hop_tf.tensors.packing import Packing

# Optimizers that update each value of a tensor on its own. Their tensors may be divided.
_ELEMENTWISE = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "Ftrl", "Lion", "Nadam", "RMSprop", "SGD")
# GPUs belong to the workers. On a GPU, a server would take memory from a worker, and copy all data there and back.
_DEVICE = "/cpu:0"


def _on_processor(method: Callable) -> Callable:
    """Places the operations of `method`, run or traced, on the processor."""

    @functools.wraps(method)
    def call(*args, **kwargs):
        with tf.device(_DEVICE):
            return method(*args, **kwargs)

    return call


def is_elementwise(optimizer_class: type) -> bool:
    """True if an optimizer is known to update each value of a tensor from that value and its gradient alone."""
    return any(optimizer_class is getattr(keras.optimizers, name, None) for name in _ELEMENTWISE)


class Shard:
    """The trained buckets of a shard, with their optimizer, on the processor. Used by one thread at a time.

    TensorFlow keeps memory that it has once allocated. So it holds only the model, the slots, and the temporary memory
    of an update. Messages are in other memory, which is reused.

    Args:
      packing: The shard's buckets. Exact buckets are not trained.
      optimizer: The optimizer, in JSON, as `hop_tf.keras_hook.optimizers.serialized_for_server` writes it.
      decays: For each piece, True if the optimizer's weight decay applies to the piece.
      pool: The memory for buckets that are read. Default: a pool of its own.

    Raises:
      ValueError: If Keras knows no such optimizer here.
      TypeError: If Keras cannot make the optimizer.
    """

    @_on_processor
    def __init__(self, packing: Packing, optimizer: str, decays: Sequence[bool], pool: BufferPool | None = None):
        self._packing = packing
        self._pool = pool or BufferPool()
        self._trained = [index for index, spec in enumerate(packing.specs) if not spec.exact]
        self._optimizer = _deserialized(optimizer)
        self._variables = [self._make_variable(index) for index in self._trained]
        excluded = [v for v, index in zip(self._variables, self._trained, strict=True) if not decays[index]]
        self._optimizer.exclude_from_weight_decay(var_list=excluded)
        self._optimizer.build(self._variables)
        self._optimizer.update_step = functools.partial(self._update_in_order, self._optimizer.update_step)
        self._updated: list[tf.Tensor] = []
        buckets = [tf.TensorSpec([size], dtype) for size, dtype in zip(packing.sizes, packing.dtypes, strict=True)]
        self._apply = _traced(self._emit_apply, buckets, tf.TensorSpec([], tf.float64))
        self._values = _traced(self._emit_values)

    def _make_variable(self, index: int) -> keras.Variable:
        spec = self._packing.specs[index]
        # The optimizer may treat variables by name. A name must not have slashes.
        name = spec.name.replace("/", ".")
        return keras.Variable("zeros", shape=spec.shape, dtype=spec.dtype.name, name=name)

    @_on_processor
    def apply(self, gradients: Sequence[np.ndarray], rate: float) -> None:
        """Makes one update.

        Args:
          gradients: The shard's buckets. Exact buckets are ignored.
          rate: The learning rate.
        """
        if self._variables:
            self._apply([_adopted(bucket) for bucket in gradients], tf.constant(rate, tf.float64))

    @_on_processor
    def read(self) -> list[np.ndarray]:
        """Returns the present buckets, with zeros in exact ones. The shard does not write to them afterwards."""
        buckets = self._packing.take(self._pool)
        for bucket, exact in zip(buckets, self._packing.exact, strict=True):
            if exact:
                bucket.fill(0)
        for index, values in zip(self._trained, self._values(), strict=True):
            bucket, where = self._packing.place(index)
            buckets[bucket][where] = np.asarray(values).reshape(-1)
            buckets[bucket][where.stop : self._packing.end(index)] = 0
        return buckets

    @_on_processor
    def assign(self, buckets: Sequence[np.ndarray]) -> None:
        """Replaces the values of the trained variables."""
        for index, variable in zip(self._trained, self._variables, strict=True):
            bucket, where = self._packing.place(index)
            variable.assign(buckets[bucket][where].reshape(self._packing.specs[index].shape))

    @_on_processor
    def slots(self) -> dict[tuple[str, int | None], np.ndarray]:
        """The values of the optimizer's slots, by name and piece.

        They are not copied. If an update comes while a caller holds an array, TensorFlow copies that array first.
        """
        return {key: np.asarray(slot.read_value()) for key, slot in self._slots().items()}

    @_on_processor
    def assign_slots(self, slots: Mapping[tuple[str, int | None], np.ndarray]) -> None:
        """Replaces the values of the optimizer's slots. Ignores values of slots that it does not have."""
        own = self._slots()
        for key, value in slots.items():
            if key in own:
                own[key].assign(value)

    @property
    @_on_processor
    def iterations(self) -> int:
        """The number of updates."""
        return int(self._optimizer.iterations)

    @iterations.setter
    @_on_processor
    def iterations(self, iterations: int) -> None:
        self._optimizer.iterations.assign(iterations)

    def _slots(self) -> dict[tuple[str, int | None], tf.Variable]:
        slots = slots_of(self._optimizer, [variable.value for variable in self._variables])
        return {(name, None if i is None else self._trained[i]): slot for (name, i), slot in slots.items()}

    # In graphs.

    @_on_processor
    def _emit_apply(self, buckets: Sequence[tf.Tensor], rate: tf.Tensor) -> None:
        self._optimizer.learning_rate.assign(rate)
        pieces = self._packing.unpack(buckets)
        self._updated = []
        with as_own_updates():
            self._optimizer.apply([pieces[index] for index in self._trained])

    def _update_in_order(
        self, update: Callable[..., None], gradient: tf.Tensor, variable: tf.Variable, rate: tf.Tensor
    ) -> None:
        """Calls `Optimizer.update_step` for one piece after the other, which limits temporary memory to one piece."""
        with tf.control_dependencies(self._updated):
            update(gradient, variable, rate)
            self._updated = [tf.convert_to_tensor(variable)]

    @_on_processor
    def _emit_values(self) -> list[tf.Tensor]:
        return [variable.value.read_value() for variable in self._variables]


def _traced(function: Callable, *specs) -> Callable:
    """Returns a graph of a function, for arguments of these specs. A call takes half the time of a `tf.function`."""
    return tf.function(function, autograph=False).get_concrete_function(*specs)


def _adopted(array: np.ndarray) -> tf.Tensor:
    """Returns a tensor that shares the memory of an array, if that is aligned. `tf.constant` would copy the array."""
    return tf.raw_ops.Identity(input=array)


def _deserialized(text: str) -> keras.optimizers.Optimizer:
    optimizer = keras.saving.deserialize_keras_object(json.loads(text))  # `optimizers.deserialize` knows no Lamb.
    if not isinstance(optimizer, keras.optimizers.Optimizer):  # Keras returns some unknown classes as text.
        raise ValueError(
            "the optimizer must be known to Keras on parameter servers: register its class with "
            f"keras.saving.register_keras_serializable, and start the same script there. Received: {text}."
        )
    return optimizer

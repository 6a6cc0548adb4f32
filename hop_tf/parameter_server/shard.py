"""`Shard`: a part of the model, and the user's optimizer that updates it."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf

from hop_tf.keras_hook import slots_of
from hop_tf.packing import Packing

# Optimizers that treat each value of a tensor alone, whose tensors may be divided.
_ELEMENTWISE = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "Ftrl", "Lion", "Nadam", "RMSprop", "SGD")
# GPUs are the workers': a server beside them would take a GPU's memory, and send all it gets there and back.
_DEVICE = "/cpu:0"


def _on_processor(method: Callable) -> Callable:
    """Places the operations of `method`, run or traced, on the processor."""

    @functools.wraps(method)
    def call(*args, **kwargs):
        with tf.device(_DEVICE):
            return method(*args, **kwargs)

    return call


def is_elementwise(optimizer_class: type) -> bool:
    """Whether an optimizer is known to update each value of a tensor by that value and its gradient alone."""
    return any(optimizer_class is getattr(keras.optimizers, name, None) for name in _ELEMENTWISE)


class Shard:
    """The buckets of a shard that are trained, with their optimizer, on the processor. Used by one thread at a time.

    Args:
      packing: The shard's buckets. Those that are exact are not trained.
      optimizer: The optimizer, in JSON, as `hop_tf.keras_hook.serialized_for_server` writes it.
      decays: For each piece, whether the optimizer's weight decay applies to it.

    Raises:
      ValueError: If Keras knows no such optimizer here.
      TypeError: If Keras cannot make it.
    """

    @_on_processor
    def __init__(self, packing: Packing, optimizer: str, decays: Sequence[bool]):
        self._packing = packing
        self._trained = [index for index, spec in enumerate(packing.specs) if not spec.exact]
        self._optimizer = _deserialized(optimizer)
        self._variables = [self._make_variable(index) for index in self._trained]
        excluded = [v for v, index in zip(self._variables, self._trained, strict=True) if not decays[index]]
        self._optimizer.exclude_from_weight_decay(var_list=excluded)
        self._optimizer.build(self._variables)
        self._apply = tf.function(self._emit_apply, autograph=False)
        self._read = tf.function(self._emit_read, autograph=False)
        self._assign = tf.function(self._emit_assign, autograph=False)

    def _make_variable(self, index: int) -> keras.Variable:
        spec = self._packing.specs[index]
        # The name may tell the optimizer how to treat it; slashes are not for names.
        name = spec.name.replace("/", ".")
        return keras.Variable(np.zeros(spec.shape), dtype=spec.dtype.name, name=name)

    @_on_processor
    def apply(self, gradients: Sequence[np.ndarray], rate: float) -> None:
        """Makes one update.

        Args:
          gradients: The shard's buckets; what those that are exact hold is ignored.
          rate: The learning rate.
        """
        if self._variables:
            self._apply(self._tensors(gradients), tf.constant(rate, tf.float64))

    @_on_processor
    def read(self) -> list[np.ndarray]:
        """The buckets now, with zeros in those that are exact. Nobody writes to them afterwards."""
        return [np.asarray(bucket) for bucket in self._read()]

    @_on_processor
    def assign(self, buckets: Sequence[np.ndarray]) -> None:
        """Replaces what is trained."""
        self._assign(self._tensors(buckets))

    def slots(self) -> dict[tuple[str, int | None], np.ndarray]:
        """What the optimizer remembers, by pieces; copies."""
        return {key: np.asarray(slot.numpy()) for key, slot in self._slots().items()}

    @_on_processor
    def assign_slots(self, slots: Mapping[tuple[str, int | None], np.ndarray]) -> None:
        """Replaces what the optimizer remembers, as far as it has such slots."""
        own = self._slots()
        for key, value in slots.items():
            if key in own:
                own[key].assign(value)

    @property
    def iterations(self) -> int:
        """Number of updates."""
        return int(self._optimizer.iterations)

    @iterations.setter
    @_on_processor
    def iterations(self, iterations: int) -> None:
        self._optimizer.iterations.assign(iterations)

    def _slots(self) -> dict[tuple[str, int | None], tf.Variable]:
        slots = slots_of(self._optimizer, [variable.value for variable in self._variables])
        return {(name, None if i is None else self._trained[i]): slot for (name, i), slot in slots.items()}

    def _tensors(self, buckets: Sequence[np.ndarray]) -> list[tf.Tensor]:
        return [tf.constant(bucket, dtype) for bucket, dtype in zip(buckets, self._packing.dtypes, strict=True)]

    # In graphs.

    def _pieces(self, buckets: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        pieces = self._packing.unpack(buckets)
        return [pieces[index] for index in self._trained]

    @_on_processor
    def _emit_apply(self, buckets: Sequence[tf.Tensor], rate: tf.Tensor) -> None:
        self._optimizer.learning_rate.assign(rate)
        self._optimizer.apply(self._pieces(buckets))

    @_on_processor
    def _emit_read(self) -> list[tf.Tensor]:
        pieces = [tf.zeros(spec.shape, spec.dtype) for spec in self._packing.specs]
        for index, variable in zip(self._trained, self._variables, strict=True):
            pieces[index] = variable.value.read_value()
        return self._packing.pack(pieces)

    @_on_processor
    def _emit_assign(self, buckets: Sequence[tf.Tensor]) -> None:
        for variable, piece in zip(self._variables, self._pieces(buckets), strict=True):
            variable.assign(piece)


def _deserialized(text: str) -> keras.optimizers.Optimizer:
    optimizer = keras.optimizers.deserialize(json.loads(text))
    if not isinstance(optimizer, keras.optimizers.Optimizer):  # Some classes that it cannot find it gives back as text.
        raise ValueError(
            "the optimizer must be known to Keras on parameter servers: register its class with "
            f"keras.saving.register_keras_serializable, and start the same script there. Received: {text}."
        )
    return optimizer

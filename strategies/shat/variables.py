"""`GroupVariables`: a worker's variables, and the slots of its optimizer, as arrays."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from hop_tf.keras_hook.optimizers import slots_of
from hop_tf.runtime.group import ExchangeContext
from hop_tf.strategies.shat.server.state import ShardState
from hop_tf.strategies.shat.shards import ShardView


class GroupVariables:
    """Reads the state for the servers from variables and slots, and assigns the servers' state to them.

    Args:
      context: The group's variables, packing and buffers.
      shards: The shard of each server that has one.
    """

    def __init__(self, context: ExchangeContext, shards: Sequence[ShardView]):
        self._context = context
        self._packing = context.packing
        self._variables = context.variables
        self._shards = shards

    def model(self) -> list[np.ndarray]:
        """The present values of the variables, packed into buckets, with zeros as metadata."""
        values = [variable.read_value() for variable in self._variables]
        beside = self._packing.specs[-1]
        return [np.asarray(b) for b in self._packing.pack([*values, tf.zeros(beside.shape, beside.dtype)])]

    def digest(self, buckets: Sequence[np.ndarray]) -> int:
        """A checksum that tells models apart. Non-trainable state is left out."""
        digest = 0
        for shard in self._shards:
            for is_exact, values in zip(shard.packing.exact, shard.cut(buckets), strict=True):
                if not is_exact:
                    digest = zlib.crc32(np.ascontiguousarray(values).view(np.uint8), digest)
        return digest

    def slots(self) -> dict[tuple[str, int | None], np.ndarray]:
        """The values of the optimizer's slots. See `hop_tf.keras_hook.optimizers.slots_of`."""
        # Slots that are created in the step being traced have no values yet. They start with equal values on all ranks
        # anyway.
        return {key: np.asarray(slot.read_value()) for key, slot in self._slots().items() if _has_value(slot)}

    def write(self, states: Sequence[ShardState]) -> list[np.ndarray]:
        """Assigns the servers' state.

        Args:
          states: The state of each shard.

        Returns:
          The buckets of the model.
        """
        buckets = self._packing.take(self._context.pool)
        for shard, state in zip(self._shards, states, strict=True):
            shard.put(state.buckets, buckets)
        tensors = self._packing.unpack([tf.constant(bucket) for bucket in buckets])
        for variable, tensor in zip(self._variables, tensors[:-1], strict=True):
            variable.assign(tensor)
        if any(state.slots for state in states):
            self._write_slots(states)
        return buckets

    def _write_slots(self, states: Sequence[ShardState]) -> None:
        slots = self._slots()
        values = {key: _copy_of(slot) for key, slot in slots.items()}
        for shard, state in zip(self._shards, states, strict=True):
            shard.put_slots(state.slots, values)
        for key, value in values.items():
            slots[key].assign(value)

    def _slots(self) -> dict[tuple[str, int | None], tf.Variable]:
        return slots_of(self._context.optimizer(), self._context.trained)


def _has_value(slot: tf.Variable) -> bool:
    return bool(tf.compat.v1.is_variable_initialized(slot))


def _copy_of(slot: tf.Variable) -> np.ndarray:
    """A copy of a slot, or zeros if it has no value yet. The servers' values replace all of it."""
    return slot.numpy() if _has_value(slot) else np.zeros(slot.shape, slot.dtype.as_numpy_dtype)

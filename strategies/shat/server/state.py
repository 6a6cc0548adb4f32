"""`ShardState`: a server's whole state of an exchange group, for a worker or a file."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tensorflow as tf
from google.protobuf.message import DecodeError

from hop_tf.errors import ProtocolError
from hop_tf.strategies.shat.server.parameter_server_pb2 import Slot, State
from hop_tf.strategies.shat.server.progress import Progress
from hop_tf.tensors import payloads
from hop_tf.tensors.packing import Packing

_OF_ALL = -1


@dataclasses.dataclass(frozen=True)
class ShardState:
    """The state of an exchange group at a server.

    Attributes:
      buckets: The shard's buckets: the model and, in exact ones, the means of the non-trainable state.
      slots: The optimizer's slots. See `hop_tf.keras_hook.optimizers.slots_of`, with indices of pieces.
      num_pushes: The number of pushes that were applied.
      num_steps: The most steps that one worker has pushed.
      iterations: The optimizer's count of updates.
      progress: The pushes that the state contains.
    """

    buckets: Sequence[np.ndarray]
    slots: Mapping[tuple[str, int | None], np.ndarray] = dataclasses.field(default_factory=dict)
    num_pushes: int = 0
    num_steps: int = 0
    iterations: int = 0
    progress: Progress = dataclasses.field(default_factory=Progress)

    def to_parts(self) -> list[np.ndarray]:
        """Returns the parts of a payload or file."""
        slots = [
            Slot(name=name, piece=_OF_ALL if piece is None else piece, dtype=array.dtype.name, shape=array.shape)
            for (name, piece), array in self.slots.items()
        ]
        manifest = State(
            slots=slots,
            num_pushes=self.num_pushes,
            num_steps=self.num_steps,
            iterations=self.iterations,
            progress=self.progress.to_message(),
        ).SerializeToString()
        return [np.frombuffer(manifest, np.uint8), *self.buckets, *self.slots.values()]

    @classmethod
    def from_parts(cls, parts: Sequence[np.ndarray], packing: Packing) -> ShardState:
        """Returns the state of parts from `to_parts`.

        Args:
          parts: The bytes of the parts. The state's arrays share their memory.
          packing: The packing of the shard.

        Raises:
          ProtocolError: If the parts are not a state of such a shard.
        """
        try:
            state = State.FromString(parts[0].tobytes())
        except (IndexError, DecodeError) as error:
            raise ProtocolError(f"a malformed state: {error}.") from error
        num_buckets = len(packing.sizes)
        buckets, slots = parts[1 : num_buckets + 1], parts[num_buckets + 1 :]
        if len(buckets) != num_buckets or len(slots) != len(state.slots):
            raise ProtocolError(f"expected {1 + num_buckets + len(state.slots)} parts. Received: {len(parts)} parts.")
        return cls(
            buckets=[
                payloads.view(part, dtype.as_numpy_dtype, (size,))
                for part, dtype, size in zip(buckets, packing.dtypes, packing.sizes, strict=True)
            ],
            slots={
                (slot.name, None if slot.piece == _OF_ALL else slot.piece): payloads.view(
                    part, tf.as_dtype(slot.dtype).as_numpy_dtype, slot.shape
                )
                for slot, part in zip(state.slots, slots, strict=True)
            },
            num_pushes=state.num_pushes,
            num_steps=state.num_steps,
            iterations=state.iterations,
            progress=Progress.from_message(state.progress),
        )


def weakly(arrays: Sequence[np.ndarray]) -> Callable[[], list[np.ndarray] | None]:
    """Returns a function that returns `arrays` while an owner, such as a message, holds their memory, and later None.

    Args:
      arrays: The arrays. None of them is a part of another one.
    """
    # A view refers to the array that owns the memory, even if it is a view of a view.
    owners = [array.base if isinstance(array.base, np.ndarray) else array for array in arrays]
    references = [(weakref.ref(owner), array.dtype) for owner, array in zip(owners, arrays, strict=True)]

    def get() -> list[np.ndarray] | None:
        held = [reference() for reference, _ in references]
        if any(owner is None for owner in held):
            return None
        return [owner.view(dtype) for owner, (_, dtype) in zip(held, references, strict=True)]

    return get

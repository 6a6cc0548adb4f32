"""`ShardState`: all that a server keeps of an exchange group, on its way to a worker or to a file."""

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
    """What a server keeps of an exchange group.

    Attributes:
      buckets: The shard's buckets: the model's, and, in those that are exact, means of what is carried.
      slots: What the optimizer remembers; see `hop_tf.keras_hook.optimizers.slots_of`, with indices of pieces.
      num_pushes: Pushes that were applied.
      num_steps: The most that one worker has sent.
      iterations: The optimizer's count of updates.
      progress: Which pushes it has seen.
    """

    buckets: Sequence[np.ndarray]
    slots: Mapping[tuple[str, int | None], np.ndarray] = dataclasses.field(default_factory=dict)
    num_pushes: int = 0
    num_steps: int = 0
    iterations: int = 0
    progress: Progress = dataclasses.field(default_factory=Progress)

    def to_parts(self) -> list[np.ndarray]:
        """The parts of a payload or file."""
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
        """What `to_parts` has described.

        Args:
          parts: The parts' bytes. The arrays share their memory.
          packing: The shard's.

        Raises:
          ProtocolError: If it is no state of such a shard.
        """
        try:
            state = State.FromString(parts[0].tobytes())
        except (IndexError, DecodeError) as error:
            raise ProtocolError(f"a malformed state: {error}.") from error
        num_buckets = len(packing.sizes)
        buckets, slots = parts[1 : num_buckets + 1], parts[num_buckets + 1 :]
        if len(buckets) != num_buckets or len(slots) != len(state.slots):
            raise ProtocolError(f"{len(parts)} parts came where {1 + num_buckets + len(state.slots)} were expected.")
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
    """What gives `arrays` back for as long as somebody, such as a message under way, holds their memory; then None.

    Args:
      arrays: None of them is a part of another one.
    """
    # Views refer to the array that has the memory, and not to what they are views of.
    owners = [array.base if isinstance(array.base, np.ndarray) else array for array in arrays]
    references = [(weakref.ref(owner), array.dtype) for owner, array in zip(owners, arrays, strict=True)]

    def get() -> list[np.ndarray] | None:
        held = [reference() for reference, _ in references]
        if any(owner is None for owner in held):
            return None
        return [owner.view(dtype) for owner, (_, dtype) in zip(held, references, strict=True)]

    return get

"""`Way`: one of several ways to average, of which ranks choose one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from hop_tf.codecs import Codec, Identity, Int8
from hop_tf.runtime.choosing import AUTO, algorithms_to_try
from hop_tf.runtime.group import takes_codec
from hop_tf.tensors.packing import TensorSpec

# Shorter values are not encoded, unless a codec is given: a message takes its time, however short it is.
_LEAST_BYTES = 1 << 14


@dataclasses.dataclass(frozen=True)
class Way:
    """How an all-reduce goes.

    Attributes:
      algorithm: See `hop_tf.collectives.get_algorithm`.
      codec: What values are encoded with.
    """

    algorithm: str
    codec: Codec

    def __str__(self) -> str:
        encoded = "lossless" if self.codec == Identity() else self.codec.name
        return f"{encoded} over a {self.algorithm}"


def list_ways(algorithm: str, codec: Codec | str, world_size: int, num_bytes: float = math.inf) -> list[Way]:
    """The ways that go with what a strategy was given; what changes training least comes first.

    Args:
      algorithm: The algorithm, or "auto".
      codec: The codec, or "auto".
      world_size: Number of ranks.
      num_bytes: Bytes of what a codec may shorten. Default: many.
    """
    algorithms = algorithms_to_try(algorithm, world_size)
    members = [codec]
    if codec == AUTO:
        members = [Identity(), *([Int8()] if num_bytes >= _LEAST_BYTES else [])]
    return [Way(algorithm, member) for member in members for algorithm in algorithms]


def num_encoded_bytes(specs: Sequence[TensorSpec]) -> int:
    """Bytes of the tensors that a codec may shorten."""
    return sum(spec.num_elements * spec.dtype.size for spec in specs if takes_codec(spec.dtype, spec.exact))

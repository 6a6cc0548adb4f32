"""`Way`: one of the ways to average that ranks choose from."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from hop_tf.codecs import Codec, Identity, Int8, LowRank
from hop_tf.runtime.choosing import AUTO, algorithms_to_try
from hop_tf.tensors.packing import TensorSpec, takes_codec

# Shorter values are encoded only if the program gives a codec: every message takes some time, however short it is.
_LEAST_BYTES = 1 << 14


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to run an all-reduce.

    Attributes:
      algorithm: See `hop_tf.collectives.get_algorithm`.
      codec: The codec for the values.
    """

    algorithm: str
    codec: Codec | LowRank

    def __str__(self) -> str:
        encoded = "lossless" if self.codec == Identity() else self.codec.name
        return f"{encoded} over a {self.algorithm}"


def list_ways(
    algorithm: str,
    codec: Codec | LowRank | str,
    world_size: int,
    specs: Sequence[TensorSpec] | None = None,
    *,
    factorizes: bool = False,
) -> list[Way]:
    """The ways that a strategy's arguments allow. Ways that change training least come first.

    Args:
      algorithm: The algorithm, or "auto".
      codec: The codec, or "auto".
      world_size: Number of ranks.
      specs: The tensors to send. Default: any tensors.
      factorizes: True if "auto" may be `LowRank`. Default False.
    """
    algorithms = algorithms_to_try(algorithm, world_size)
    members = [codec]
    if codec == AUTO:
        members = [Identity()]
        if specs is None or _num_encoded_bytes(specs) >= _LEAST_BYTES:
            members.append(Int8())
        if factorizes and (specs is None or _shortens(LowRank(), specs)):
            members.append(LowRank())
    return [Way(algorithm, member) for member in members for algorithm in algorithms]


def _num_encoded_bytes(specs: Sequence[TensorSpec]) -> int:
    """Bytes of the tensors that a codec may shorten."""
    return sum(spec.num_elements * spec.dtype.size for spec in specs if takes_codec(spec.dtype, spec.exact))


def _shortens(codec: LowRank, specs: Sequence[TensorSpec]) -> bool:
    """True if most bytes are those of kernels that travel as factors."""
    factorized = [spec for spec in specs if codec.factorizes(spec)]
    return 2 * _num_encoded_bytes(factorized) > _num_encoded_bytes(specs)

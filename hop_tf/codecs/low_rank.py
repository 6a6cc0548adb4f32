"""`LowRank`: large gradients as products of two narrow matrices.

References:
  Vogels, Karimireddy, Jaggi. PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization. NeurIPS
  2019.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import tensorflow as tf

from hop_tf.arguments import check_integer
from hop_tf.codecs.base import Codec, get
from hop_tf.tensors.packing import TensorSpec

# Kernels with fewer values, or for which factors reduce the number of values less than this, are not factorized.
_MIN_VALUES = 1 << 14
_MIN_REDUCTION = 4
# Rows and columns of the kernel that `bytes_per_value` describes.
_NOMINAL_SIZE = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class LowRank:
    """Sends a large kernel, m x k, as two factors, m x r and k x r. Other values pass through a codec.

    Ranks find the factors of their mean together: see `hop_tf.collectives.low_rank`. So `LowRank` is not a `Codec`: a
    `Codec` encodes any vector. Strategies accept it if their ranks average gradients, or changes, in rounds:
    `PipeSGDStrategy`, `DTSStrategy`, and `CanaryStrategy` with consistency="bsp". The part of a value that factors lose
    is added to the value of the next round.

    The compiled kernels of `hop_tf.ops` must be present on all ranks, or on none. In a mixed job, means may differ in
    the last bit.

    A mean takes two successive all-reduces instead of one, and matrix products on each rank. So `LowRank` is for slow
    links.

    Args:
      rank: r, the number of columns of a factor; at least 1. Default 4.
      codec: Encodes the factors, and all other values: a `Codec`, a name, or None for `Identity()`. Default None.

    Raises:
      TypeError: If `codec` is of another type.
      ValueError: If `rank` is out of range, there is no codec of that name, or `codec` selects values.
    """

    name: ClassVar[str] = "low_rank"

    rank: int = 4
    codec: Codec | str | None = None

    def __post_init__(self):
        check_integer("rank", self.rank, at_least=1)
        object.__setattr__(self, "codec", get(self.codec))
        if self.codec.selects_values:
            raise ValueError(f"`codec` must send something for every value. Received: codec={self.codec!r}.")

    @property
    def bytes_per_value(self) -> float:
        """Bytes per value of a kernel of 1,024 rows and columns."""
        return self.codec.bytes_per_value * 2 * self.rank / _NOMINAL_SIZE

    def factorizes(self, spec: TensorSpec) -> bool:
        """True if a tensor is sent as factors, because it is a large float32 matrix."""
        if spec.exact or len(spec.shape) != 2 or spec.dtype != tf.float32:
            return False
        return spec.num_elements >= max(_MIN_VALUES, _MIN_REDUCTION * self.rank * sum(spec.shape))


def get_for_means(codec: str | Codec | LowRank | None) -> Codec | LowRank:
    """The codec that an argument stands for, in a strategy whose ranks average whole kernels.

    Args:
      codec: As for `get`; or a `LowRank`, or "low_rank" for one with its defaults.

    Raises:
      TypeError, ValueError: As `get`.
    """
    if codec == LowRank.name:
        return LowRank()
    return codec if isinstance(codec, LowRank) else get(codec)

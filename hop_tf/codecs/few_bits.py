"""Codecs that send 4 or 2 bits for every value, and scales for small blocks of values."""

from __future__ import annotations

import abc
import dataclasses
from typing import ClassVar

import numpy as np

from hop_tf.codecs.base import Codec, checked
from hop_tf.ops import arrays
from hop_tf.ops.arguments import check_few_bits_block_size, few_bits_sizes
from hop_tf.tensors.buffers import BufferPool


@dataclasses.dataclass(frozen=True, kw_only=True)
class _FewBits(Codec, abc.ABC):
    """Sends the scales of all blocks, as bfloat16, and then a code for each value.

    The first value's code is in the lowest bits of the first byte. Bits after the last code are 0.
    """

    bits: ClassVar[int]

    block_size: int

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "block_size", check_few_bits_block_size(self.block_size))

    @property
    def bytes_per_value(self) -> float:
        return self.bits / 8 + 2 * (4 // self.bits) / self.block_size

    @property
    def granularity(self) -> int:
        return self.block_size

    def encode(self, values: np.ndarray, pool: BufferPool) -> np.ndarray:
        data = self._take(values.size, pool)
        arrays.few_bits_encode(values, self.block_size, self.bits, out=self._split(data, values.size))
        return data

    def decode(self, data: np.ndarray, out: np.ndarray) -> None:
        arrays.few_bits_decode(*self._received(data, out.size), out.size, self.block_size, self.bits, out=out)

    def accumulate(self, data: np.ndarray, accumulator: np.ndarray) -> None:
        parts = self._received(data, accumulator.size)
        arrays.few_bits_accumulate(*parts, accumulator, self.block_size, self.bits)

    def reduce(self, data: np.ndarray, values: np.ndarray, pool: BufferPool) -> np.ndarray:
        parts, result = self._received(data, values.size), self._take(values.size, pool)
        out = self._split(result, values.size)
        arrays.few_bits_reduce(*parts, values, self.block_size, self.bits, out=out)
        return result

    def _take(self, num_values: int, pool: BufferPool) -> np.ndarray:
        num_scales, num_bytes = few_bits_sizes(num_values, self.block_size, self.bits)
        return pool.take(2 * num_scales + num_bytes)

    def _received(self, data: np.ndarray, num_values: int) -> tuple[np.ndarray, np.ndarray]:
        """Does the same as `_split` for data to decode, and checks the bits after the last code."""
        scales, codes = self._split(data, num_values)
        num_in_last = num_values * self.bits % 8
        if num_in_last and codes[-1] >> num_in_last:  # Otherwise an encoding of one more value could be accepted.
            raise ValueError(
                f"`data` must be {num_values} values in the format of {self}. Received: {data.nbytes} bytes. The bits "
                "after the last code are not zero."
            )
        return scales, codes

    def _split(self, data: np.ndarray, num_values: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns scales and codes. In `data` the scales come first, so that they are aligned."""
        num_scales, num_bytes = few_bits_sizes(num_values, self.block_size, self.bits)
        checked(self, data, 2 * num_scales + num_bytes, num_values)
        return data[: 2 * num_scales].view(np.uint16), data[2 * num_scales :]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bits4(_FewBits):
    """Sends a scale for each block, and for each value the nearest of 16 levels.

    The scale is the block's value of largest magnitude, with its sign, as a bfloat16. Of two values that differ in sign
    only, it is the positive one. A value divided by scale / 64 is rounded to an integer, ties to even. The code is the
    index of the level nearest to that integer. No integer is equally near to two of the levels, which are

        -55 -42 -31 -22 -15 -8 -3 0 3 8 13 20 29 38 51 64

    A code decodes to level * scale / 64, which is exact in float32. So the loss is at most 15 % of the block's largest
    magnitude. On gradients and changes of weights it is 9 % of the values (root mean square).

    The levels minimize the squared error on gradients and changes of weights of perceptrons and convolutional networks.
    Such values crowd around zero. At equal numbers of bytes, that error is 44 % below that of 15 equidistant levels,
    and 29 % below that of E2M1. It is 72 % below that of E3M0, which Streaming DiLoCo sends.

    Bytes: 2 for the scale of each block, then half a byte for each value. The lower half of a byte holds the first
    value. Scales are rounded to the nearest bfloat16, ties to even, but never to infinity. A block whose magnitudes are
    all below 2^-119 decodes to zeros. A block with a value that is not finite decodes to nan.

    Args:
      block_size: Values per block: a multiple of 8 from 8 to 1024. Default 64.
      error_feedback: See `Codec`. Recommended for gradients: the loss is large.

    References:
      Douillard et al. Streaming DiLoCo with overlapping communication. arXiv 2501.18512: 4 bits for changes of weights.
      Blumenberg et al. Improving Block-Wise LLM Quantization by 4-bit Block-Wise Optimal Float (BOF4). arXiv
      2505.06653: signed scales, and levels of least squared error. Lloyd. Least Squares Quantization in PCM. IEEE
      Transactions on Information Theory 1982.
    """

    name: ClassVar[str] = "bits4"
    bits: ClassVar[int] = 4

    block_size: int = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bits2(_FewBits):
    """Sends each value's sign, and one bit for its magnitude: for the values of `TopK`, which are far from zero.

    A block has two magnitudes. Its values are split at their mean magnitude. Then they are split anew, in the middle
    between the mean magnitudes of the two parts. Each value decodes to the mean magnitude of its final part. So the sum
    of all magnitudes in a block stays the same, except for rounding, and the loss is at most the standard deviation of
    the magnitudes.

    There is no level for zero. In a dense vector, zeros decode to the smaller magnitude: use `error_feedback` there.

    To be split, magnitudes are rounded to multiples of 1/32768 of the block's largest magnitude, ties to even. A
    magnitude that equals the border, or exceeds it by less than such a unit, belongs to the lower part. Means are
    rounded to the nearest bfloat16, ties to even, but never to infinity. If a part is empty, or its mean is below
    2^-119, its mean is 0. A block whose magnitudes are all below 2^-119 decodes to zeros. A block with a value that is
    not finite decodes to nan.

    Bytes: 4 for both means of each block, the smaller first, then a quarter of a byte for each value. The lowest two
    bits of a byte hold the first value: 1 for the larger magnitude, plus 2 for a negative value.

    Args:
      block_size: Values per block: a multiple of 8 from 8 to 1024. Default 128.
      error_feedback: See `Codec`.

    References:
      Sarfi et al. Communication Efficient LLM Pre-training with SparseLoCo. arXiv 2508.15706: 2 bits for selected
      changes. Seide et al. 1-Bit Stochastic Gradient Descent. Interspeech 2014: decodes to means. Lloyd. Least Squares
      Quantization in PCM. IEEE Transactions on Information Theory 1982.
    """

    name: ClassVar[str] = "bits2"
    bits: ClassVar[int] = 2

    block_size: int = 128

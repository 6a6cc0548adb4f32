"""Codecs that send some values only, with their indices.

References:
  Lin, Han, Mao, Wang, Dally. Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed Training.
  ICLR 2018.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from typing import ClassVar

import numpy as np

from hop_tf.arguments import check_integer
from hop_tf.codecs.base import Codec, get
from hop_tf.codecs.few_bits import Bits2, Bits4
from hop_tf.ops import gaps
from hop_tf.ops.selection import magnitudes, reaching
from hop_tf.tensors.buffers import BufferPool

# Length of the vector, number of its values that are sent, bytes of their indices.
_HEADER_BYTES = 24
_ALIGNMENT_BYTES = 64

# Sampling stride used to estimate the largest magnitudes. A prime, so that a sample is not a column of a layer's
# kernel.
_SAMPLE_STRIDE = 61
# Number of standard deviations by which the estimate is lowered on purpose.
_MARGIN = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sparse(Codec):
    """Sends the values that are not zero, and their indices: for vectors in which a selection was made already.

    The length of the data depends on the number of such values:

        bytes                  type
        24                     uint64   length n of the vector; number m of values that are not zero; bytes b of indices
        b                      bits     the indices: see below
        to a multiple of 64    0
        the rest                        the m values, encoded with `values`

    Indices are Rice codes of the gaps between them. A remainder has s = floor(log2(0.96 n / m)) bits, but at least 0.
    First come all remainders, gap modulo 2^s, padded to whole bytes. Then come all quotients, gap divided by 2^s and
    rounded down: a quotient q is q zeros and a one. Bits fill a byte from the lowest bit on. Bits after the last one
    are 0. If one value in 100 is sent, an index takes 8.1 bits. See `hop_tf.ops.gaps`.

    In an all-reduce, each rank sends such data to all ranks. If it takes fewer bytes to average whole vectors, encoded
    with `values`, ranks do that instead. They also do so in a step in which the data of a single rank are too long. In
    whole vectors, `Bits4` takes the place of `Bits2`, which has no level for zero.

    Args:
      values: The codec for the values: one without error feedback that is not sparse itself, a name, or None for
        `Identity()`. Default None.
      ratio: The expected share of a vector's values that are not zero, above 0 and at most 1. Ranks use it to decide if
        they average whole vectors. It is not a limit. A vector with a larger share may cost a further message. Default
        1.
      warmup_steps: Number of steps at the start of each `fit` in which the share is larger. See `TopK`. Default 0.
      error_feedback: See `Codec`. Only if `values` is lossy.
    """

    name: ClassVar[str] = "sparse"
    selects_values: ClassVar[bool] = True

    values: Codec | str | None = None
    ratio: float = 1.0
    warmup_steps: int = 0

    def __post_init__(self):
        super().__post_init__()
        values = get(self.values, "values")
        if isinstance(values, Sparse) or values.error_feedback:
            raise ValueError(
                "`values` must be a codec without error feedback that is not sparse itself. "
                f"Received: values={self.values!r}."
            )
        is_number = isinstance(self.ratio, numbers.Real) and not isinstance(self.ratio, bool)
        if not is_number or not 0 < self.ratio <= 1:
            raise ValueError(f"`ratio` must be a number above 0 and at most 1. Received: ratio={self.ratio!r}.")
        check_integer("warmup_steps", self.warmup_steps, at_least=0)
        object.__setattr__(self, "values", values)
        if self.error_feedback and not self.is_lossy:
            raise ValueError("`error_feedback` must be False for a codec without loss. Received: error_feedback=True.")
        object.__setattr__(self, "ratio", float(self.ratio))
        object.__setattr__(self, "warmup_steps", int(self.warmup_steps))

    @property
    def is_lossy(self) -> bool:
        return self.values.is_lossy

    @property
    def bytes_per_value(self) -> float:
        return self.ratio * (gaps.bits_per_index(self.ratio) / 8 + self.values.bytes_per_value)

    @property
    def dense(self) -> Codec:
        """The codec for whole vectors: `values`, or `Bits4` for `Bits2`, with this codec's error feedback."""
        whole = Bits4() if isinstance(self.values, Bits2) else self.values
        return whole.with_error_feedback(self.error_feedback)

    def ratio_at(self, step: int) -> float:
        """The share of the values that is sent in a step, which counts from 0 in every `fit`. See `TopK`."""
        if step >= self.warmup_steps:
            return self.ratio
        return self.ratio ** ((step + 1) / (self.warmup_steps + 1))

    def at_step(self, step: int) -> Sparse:
        return dataclasses.replace(self, ratio=self.ratio_at(step), warmup_steps=0) if self.warmup_steps else self

    def share_of(self, values: np.ndarray) -> float:
        """The share of a vector's values that `encode` sends."""
        return np.count_nonzero(values) / max(1, values.size)

    def select(self, values: np.ndarray) -> np.ndarray:
        """The indices, in order, of the values that `encode` sends."""
        return reaching(values, 1)

    def encode(self, values: np.ndarray, pool: BufferPool) -> np.ndarray:
        indices = self.select(values)
        encoded = self.values.encode(values[indices], pool)
        most_bytes = sum(gaps.sizes(values.size, indices.size))
        data = pool.take(_start(most_bytes) + encoded.nbytes)
        num_bytes = gaps.encode(indices, values.size, data[_HEADER_BYTES:])
        start = _start(num_bytes)
        data[:_HEADER_BYTES].view(np.uint64)[:] = values.size, indices.size, num_bytes
        data[_HEADER_BYTES + num_bytes : start] = 0
        data = data[: start + encoded.nbytes]
        data[start:] = encoded
        return data

    def decode(self, data: np.ndarray, out: np.ndarray) -> None:
        indices, values = self.entries(data, out.size, out.dtype)
        out.fill(0)
        out[indices] = values

    def accumulate(self, data: np.ndarray, accumulator: np.ndarray) -> None:
        indices, values = self.entries(data, accumulator.size, accumulator.dtype)
        accumulator[indices] += values

    def entries(
        self, data: np.ndarray, num_values: int, dtype: np.dtype | type = np.float32
    ) -> tuple[np.ndarray, np.ndarray]:
        """Decodes those values of a vector that were sent, without the zeros.

        Args:
          data: See `decode`.
          num_values: Length of the vector.
          dtype: Type of the values.

        Returns:
          Indices, strictly increasing, and the values at these indices.

        Raises:
          ValueError: See `decode`.
        """
        indices, start = self._indices(data, num_values)
        values = np.empty(indices.size, dtype)
        self.values.decode(data[start:], values)
        return indices, values

    def _indices(self, data: np.ndarray, num_values: int) -> tuple[np.ndarray, int]:
        """The indices, and the offset of the encoded values."""
        self._check(data, num_values, data.nbytes >= _HEADER_BYTES, "header is cut off")
        length, count, num_bytes = map(int, data[:_HEADER_BYTES].view(np.uint64))
        start = _start(num_bytes)
        self._check(data, num_values, length == num_values, f"header announces {length} values")
        self._check(data, num_values, data.nbytes >= start, "indices are cut off")
        end = _HEADER_BYTES + num_bytes
        self._check(data, num_values, not data[end:start].any(), "padding is not zero")
        try:
            return gaps.decode(data[_HEADER_BYTES:end], count, num_values), start
        except ValueError as error:
            raise ValueError(self._problem(data, num_values, "indices are malformed")) from error

    def _check(self, data: np.ndarray, num_values: int, sound: bool, problem: str) -> None:
        if not sound:
            raise ValueError(self._problem(data, num_values, problem))

    def _problem(self, data: np.ndarray, num_values: int, problem: str) -> str:
        return (
            f"`data` must be {num_values} values in the format of {self}. Received: {data.nbytes} bytes, whose "
            f"{problem}."
        )


def _start(num_index_bytes: int) -> int:
    """The start of the encoded values, in bytes."""
    return -(-(_HEADER_BYTES + num_index_bytes) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopK(Sparse):
    """Sends, of n values, the ceil(ratio n) values of largest magnitude, as `Sparse` does.

    During warm-up more are sent, because early gradients change fast: the share of step t = 0, 1, ... is

        ratio^((t + 1) / (warmup_steps + 1))

    Without `error_feedback`, the other values are lost, unless the scheme itself keeps them.

    Args:
      values: See `Sparse`.
      ratio: The share of the values that is sent, above 0 and at most 1. Default 0.01.
      warmup_steps: Number of steps at the start of each `fit` in which the share is larger. Default 0.
      error_feedback: See `Codec`.

    References:
      Lin et al. Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed Training. ICLR 2018.
      Sections 3.1 and 3.3.
    """

    name: ClassVar[str] = "top_k"

    ratio: float = 0.01

    @property
    def is_lossy(self) -> bool:
        return True

    def selected(self) -> Sparse:
        """The codec for vectors in which the selection was made already: all other values are zero."""
        feedback = self.error_feedback and self.values.is_lossy
        return Sparse(values=self.values, ratio=self.ratio, warmup_steps=self.warmup_steps, error_feedback=feedback)

    def share_of(self, values: np.ndarray) -> float:
        return self.ratio

    def select(self, values: np.ndarray) -> np.ndarray:
        """The indices, in order, of the values that `encode` sends. Among equal magnitudes it sends the first."""
        return _largest(values, math.ceil(self.ratio * values.size))


def _largest(values: np.ndarray, count: int) -> np.ndarray:
    """The indices, in order, of the `count` values of largest magnitude, without zeros. NaN is the largest.

    Only values that reach an estimated magnitude are compared. If too few reach it, all are compared.

    References:
      Lin et al. Section 5: a threshold from a sample, then the exact threshold from the values above it.
    """
    for bound in (_guessed_magnitude(values, count), 1):
        indices = reaching(values, bound)
        if indices.size > count:
            break
        if indices.size == count or bound == 1:
            return indices
    found = magnitudes(values[indices])
    smallest = np.partition(found, -count)[-count]
    chosen = found > smallest
    num_missing = count - np.count_nonzero(chosen)
    chosen[np.flatnonzero(found == smallest)[:num_missing]] = True
    return indices[chosen]


def _guessed_magnitude(values: np.ndarray, count: int) -> int:
    """A magnitude that a few more than `count` values reach, estimated by a sample."""
    sample = magnitudes(values[::_SAMPLE_STRIDE])
    expected = count / _SAMPLE_STRIDE
    place = math.ceil(expected + _MARGIN * math.sqrt(expected))
    return max(1, int(np.partition(sample, -place)[-place])) if 0 < place <= sample.size else 1

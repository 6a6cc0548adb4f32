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
from hop_tf.tensors.buffers import BufferPool

# An index is sent as its place in a block, which fits into 16 bits.
_BLOCK_VALUES = 1 << 16
_INDEX_BYTES = 2
_HEADER_BYTES = 16
_COUNT_BYTES = 4
_ALIGNMENT_BYTES = 64

# Values whose magnitudes are compared at a time, so that they stay in a core's cache.
_SCAN_VALUES = 1 << 17
# Sampling stride used to estimate the largest magnitudes. A prime, so that a sample is no column of a layer's kernel.
_SAMPLE_STRIDE = 61
# Number of standard deviations by which the estimate is too low on purpose.
_MARGIN = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sparse(Codec):
    """Sends the values that are not zero, and their indices: for vectors in which a selection was made already.

    The length of the data depends on the number of such values:

        bytes                  type
        16                     uint64   length of the vector; number m of values that are not zero
        4 per block            uint32   their number in each block of 65536 values
        2 m                    uint16   the place of each in its block, in order
        to a multiple of 64    0
        the rest                        the m values, encoded with `values`

    In an all-reduce, each rank sends such data to all ranks. If whole vectors, encoded with `values`, are shorter to
    send, ranks average these instead. They also do so in a step in which the data of a single rank are too long.

    Args:
      values: The codec for the values: one without error feedback that is not sparse itself, a name, or None for
        `Identity()`. Default None.
      ratio: The expected share of a vector's values that are not zero, above 0 and at most 1. It decides which way is
        shorter, and limits nothing. A vector with a larger share may cost a further message. Default 1.
      warmup_steps: Number of first steps of each `fit` in which the share is larger. See `TopK`. Default 0.
      error_feedback: See `Codec`. Only if `values` is lossy.
    """

    name: ClassVar[str] = "sparse"

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
            raise ValueError("`error_feedback` must be False where nothing is lost. Received: error_feedback=True.")
        object.__setattr__(self, "ratio", float(self.ratio))
        object.__setattr__(self, "warmup_steps", int(self.warmup_steps))

    @property
    def is_lossy(self) -> bool:
        return self.values.is_lossy

    @property
    def bytes_per_value(self) -> float:
        return self.ratio * (_INDEX_BYTES + self.values.bytes_per_value)

    @property
    def dense(self) -> Codec:
        """The codec for vectors that are sent whole: `values`, with this codec's error feedback."""
        return self.values.with_error_feedback(self.error_feedback)

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
        return _reaching(values, 1)

    def encode(self, values: np.ndarray, pool: BufferPool) -> np.ndarray:
        indices = self.select(values)
        encoded = self.values.encode(values[indices], pool)
        num_blocks = -(-values.size // _BLOCK_VALUES)
        counts_end, indices_end, start = _layout(num_blocks, indices.size)
        data = pool.take(start + encoded.nbytes)
        data[:_HEADER_BYTES].view(np.uint64)[:] = values.size, indices.size
        ends = np.searchsorted(indices, np.arange(num_blocks + 1) * _BLOCK_VALUES)
        data[_HEADER_BYTES:counts_end].view(np.uint32)[:] = np.diff(ends)
        data[counts_end:indices_end].view(np.uint16)[:] = indices % _BLOCK_VALUES
        data[indices_end:start] = 0
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
        """Decodes the values that were sent of a vector, without the zeros.

        Args:
          data: See `decode`.
          num_values: Length of the vector.
          dtype: Type of the values.

        Returns:
          Indices, strictly increasing, and the values there.

        Raises:
          ValueError: See `decode`.
        """
        indices, start = self._indices(data, num_values)
        values = np.empty(indices.size, dtype)
        self.values.decode(data[start:], values)
        return indices, values

    def _indices(self, data: np.ndarray, num_values: int) -> tuple[np.ndarray, int]:
        """The indices, and the offset of the encoded values."""
        num_blocks = -(-num_values // _BLOCK_VALUES)
        counts_end, _, start = _layout(num_blocks, 0)
        self._check(data, num_values, data.nbytes >= start, "header is cut off")
        length, count = map(int, data[:_HEADER_BYTES].view(np.uint64))
        self._check(data, num_values, length == num_values, f"header tells of {length} values")
        counts = data[_HEADER_BYTES:counts_end].view(np.uint32)
        _, indices_end, start = _layout(num_blocks, count)
        self._check(data, num_values, data.nbytes >= start, "indices are cut off")
        self._check(data, num_values, counts.sum(dtype=np.uint64) == count, "blocks do not have as many indices")
        indices = np.repeat(np.arange(num_blocks) * _BLOCK_VALUES, counts)
        indices += data[counts_end:indices_end].view(np.uint16)
        in_order = not count or (indices[-1] < num_values and np.all(indices[1:] > indices[:-1]))
        self._check(data, num_values, in_order, "indices are out of order or range")
        self._check(data, num_values, not data[indices_end:start].any(), "padding is not zero")
        return indices, start

    def _check(self, data: np.ndarray, num_values: int, sound: bool, problem: str) -> None:
        if not sound:
            raise ValueError(
                f"`data` must be what {self} encodes {num_values} values to. "
                f"Received: {data.nbytes} bytes, whose {problem}."
            )


def _layout(num_blocks: int, num_indices: int) -> tuple[int, int, int]:
    """The end of the counts, the end of the indices, and the start of the encoded values, in bytes."""
    counts_end = _HEADER_BYTES + _COUNT_BYTES * num_blocks
    indices_end = counts_end + _INDEX_BYTES * num_indices
    return counts_end, indices_end, -(-indices_end // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopK(Sparse):
    """Sends the ceil(ratio n) values of largest magnitude of n, as `Sparse` does.

    During warm-up more are sent, because early gradients change fast: the share of step t = 0, 1, ... is

        ratio^((t + 1) / (warmup_steps + 1))

    Without `error_feedback`, the other values are lost: that is for schemes that keep them themselves.

    Args:
      values: See `Sparse`.
      ratio: The share of the values that is sent, above 0 and at most 1. Default 0.01.
      warmup_steps: Number of first steps of each `fit` in which the share is larger. Default 0.
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
        indices = _reaching(values, bound)
        if indices.size > count:
            break
        if indices.size == count or bound == 1:
            return indices
    magnitudes = _magnitudes(values[indices])
    smallest = np.partition(magnitudes, -count)[-count]
    chosen = magnitudes > smallest
    num_missing = count - np.count_nonzero(chosen)
    chosen[np.flatnonzero(magnitudes == smallest)[:num_missing]] = True
    return indices[chosen]


def _guessed_magnitude(values: np.ndarray, count: int) -> int:
    """A magnitude that a few more than `count` values reach, estimated by a sample."""
    sample = _magnitudes(values[::_SAMPLE_STRIDE])
    expected = count / _SAMPLE_STRIDE
    place = math.ceil(expected + _MARGIN * math.sqrt(expected))
    return max(1, int(np.partition(sample, -place)[-place])) if 0 < place <= sample.size else 1


def _reaching(values: np.ndarray, bound: int) -> np.ndarray:
    """The indices, in order, of the values whose magnitudes are at least `bound`."""
    starts = range(0, values.size, _SCAN_VALUES) or [0]
    return np.concatenate(
        [start + np.flatnonzero(_magnitudes(values[start : start + _SCAN_VALUES]) >= bound) for start in starts]
    )


def _magnitudes(values: np.ndarray) -> np.ndarray:
    """Integers in the order of the magnitudes: floating-point numbers without their signs. 0 is 0, NaN the largest."""
    integers = np.dtype(f"i{values.itemsize}")
    return values.view(integers) & integers.type(np.iinfo(integers).max)

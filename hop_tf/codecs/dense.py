"""Codecs that send data for every value."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import tensorflow as tf

from hop_tf.arguments import check_boolean
from hop_tf.codecs.base import Codec, checked, take_float32
from hop_tf.ops import arrays, encodings
from hop_tf.ops.arguments import DEFAULT_BLOCK_SIZE, NUM_CODES, check_block_size, check_spacing, num_blocks
from hop_tf.tensors.bits import with_dtype
from hop_tf.tensors.buffers import BufferPool

_BFLOAT16 = tf.bfloat16.as_numpy_dtype
# One block of each operand fits in the cache of a core.
_BLOCK_VALUES = 1 << 15
# Bytes of a sketch before its codes.
_BUCKETS_BYTES = 4 * NUM_CODES


@dataclasses.dataclass(frozen=True, kw_only=True)
class Identity(Codec):
    """Sends values as they are, or rounded to another type.

    Args:
      dtype: The type to send: any floating-point type. float32 is rounded to a type of 16 bits. `decode` and
        `accumulate` convert to the type of the array that they write to. Default "float32".
    """

    name: ClassVar[str] = "identity"

    dtype: np.dtype | type | str = "float32"

    def __post_init__(self):
        super().__post_init__()
        dtype = np.dtype(self.dtype)
        if not tf.as_dtype(dtype).is_floating:
            raise ValueError(f"`dtype` must be a floating-point type. Received: dtype={self.dtype!r}.")
        object.__setattr__(self, "dtype", dtype.name)
        if self.error_feedback and not self.is_lossy:
            raise ValueError("`error_feedback` must be False for a codec without loss. Received: error_feedback=True.")

    @property
    def is_lossy(self) -> bool:
        return self.bytes_per_value < 4

    @functools.cached_property
    def bytes_per_value(self) -> int:
        return np.dtype(self.dtype).itemsize

    @property
    def for_sums(self) -> Codec:
        # A sum may exceed the range of 16 bits, and must not be rounded again at every rank.
        return Identity() if self.is_lossy else self

    def encode(self, values: np.ndarray, pool: BufferPool) -> np.ndarray:
        return np.ascontiguousarray(values, self.dtype).view(np.uint8)

    def decode(self, data: np.ndarray, out: np.ndarray) -> None:
        out[...] = self._view(data, out.size)

    def accumulate(self, data: np.ndarray, accumulator: np.ndarray) -> None:
        np.add(accumulator, self._view(data, accumulator.size), out=accumulator)

    def add(self, data: np.ndarray, values: np.ndarray, pool: BufferPool) -> np.ndarray:
        total = take_float32(values, pool)
        return np.add(values, self._view(data, values.size), out=total, dtype=total.dtype)

    def total(self, parts: Sequence[np.ndarray], values: np.ndarray, factor: float, pool: BufferPool) -> np.ndarray:
        return _scaled_sum([values, *self._views(parts, values.size)], factor, take_float32(values, pool))

    def decode_sum(self, parts: Sequence[np.ndarray], factor: float, out: np.ndarray) -> None:
        _scaled_sum(self._views(parts, out.size), factor, out)

    def _views(self, parts: Sequence[np.ndarray], num_values: int) -> list[np.ndarray]:
        return [self._view(data, num_values) for data in parts]

    def _view(self, data: np.ndarray, num_values: int) -> np.ndarray:
        return checked(self, data, num_values * self.bytes_per_value, num_values).view(self.dtype)


def _scaled_sum(vectors: Sequence[np.ndarray], factor: float, out: np.ndarray) -> np.ndarray:
    """Writes the sum of two or more vectors, times a factor, to `out`, and returns `out`."""
    first, second, *others = vectors
    factor = out.dtype.type(factor)
    # Block by block, so that each value is read from memory once.
    for begin in range(0, out.size, _BLOCK_VALUES):
        block = slice(begin, begin + _BLOCK_VALUES)
        result = np.add(first[block], second[block], out=out[block], dtype=out.dtype)
        for other in others:
            result += other[block]
        if factor != 1:
            result *= factor
    return out


@dataclasses.dataclass(frozen=True, kw_only=True)
class Truncate16(Codec):
    """Drops the lower 16 bits of each value, which leaves a bfloat16.

    Args:
      round_to_nearest: True to round values to the nearest (ties to even) instead of towards zero. Default False, as in
        the paper. Rounding towards zero makes magnitudes smaller on average. This argument, or `error_feedback`,
        corrects that.

    References:
      Li et al. Pipe-SGD: A Decentralized Pipelined SGD Framework for Distributed Deep Net Training. NeurIPS 2018.
    """

    name: ClassVar[str] = "truncate16"

    round_to_nearest: bool = False

    def __post_init__(self):
        super().__post_init__()
        check_boolean("round_to_nearest", self.round_to_nearest)

    @property
    def bytes_per_value(self) -> float:
        return 2.0

    @property
    def is_divisible(self) -> bool:
        return True

    def encode(self, values: np.ndarray, pool: BufferPool) -> np.ndarray:
        data = pool.take(self.num_bytes(values.size))
        arrays.truncate16_encode(values, self.round_to_nearest, out=data.view(_BFLOAT16))
        return data

    def decode(self, data: np.ndarray, out: np.ndarray) -> None:
        arrays.truncate16_decode(self._halves(data, out.size), out=out)

    def accumulate(self, data: np.ndarray, accumulator: np.ndarray) -> None:
        arrays.truncate16_accumulate(self._halves(data, accumulator.size), accumulator)

    def emit_encode(self, values: tf.Tensor) -> tf.Tensor:
        return with_dtype(encodings.truncate16_encode(values, self.round_to_nearest), tf.uint8)

    def emit_decode(self, data: tf.Tensor, num_values: int) -> tf.Tensor:
        del num_values
        return encodings.truncate16_decode(with_dtype(data, tf.bfloat16))

    def num_bytes(self, num_values: int) -> int:
        return 2 * num_values

    def cut(self, data: np.ndarray, num_values: int, where: slice, pool: BufferPool) -> np.ndarray:
        del pool
        return self._halves(data, num_values)[where].view(np.uint8)

    def paste(self, part: np.ndarray, data: np.ndarray, num_values: int, where: slice) -> None:
        self._halves(data, num_values)[where] = self._halves(part, where.stop - where.start)

    def _halves(self, data: np.ndarray, num_values: int) -> np.ndarray:
        return checked(self, data, self.num_bytes(num_values), num_values).view(_BFLOAT16)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Int8(Codec):
    """Rounds the values of each block to multiples of 1/127 of the block's largest magnitude.

    Args:
      block_size: Values per block. None makes one block of each chunk that all-reduce cuts a vector into, as in the
        paper. On heavy-tailed gradients small blocks lose far less. Default 512.

    References:
      Li et al. Pipe-SGD: A Decentralized Pipelined SGD Framework for Distributed Deep Net Training. NeurIPS 2018.
    """

    name: ClassVar[str] = "int8"

    block_size: int | None = DEFAULT_BLOCK_SIZE

    def __post_init__(self):
        super().__post_init__()
        check_block_size(self.block_size)

    @property
    def bytes_per_value(self) -> float:
        return 1.0 + (4.0 / self.block_size if self.block_size else 0.0)

    @property
    def granularity(self) -> int:
        return self.block_size or 1

    @property
    def is_divisible(self) -> bool:
        return self.block_size is not None

    def encode(self, values: np.ndarray, pool: BufferPool) -> np.ndarray:
        data = pool.take(self.num_bytes(values.size))
        arrays.int8_encode(values, self.block_size, out=self._split(data, values.size))
        return data

    def decode(self, data: np.ndarray, out: np.ndarray) -> None:
        arrays.int8_decode(*self._split(data, out.size), self.block_size, out=out)

    def accumulate(self, data: np.ndarray, accumulator: np.ndarray) -> None:
        arrays.int8_accumulate(*self._split(data, accumulator.size), accumulator, self.block_size)

    def decode_sum(self, parts: Sequence[np.ndarray], factor: float, out: np.ndarray) -> None:
        split = [self._split(data, out.size) for data in parts]
        (codes, scales), *others = [(codes, scales * np.float32(factor)) for codes, scales in split]
        arrays.int8_decode(codes, scales, self.block_size, out=out)
        for codes, scales in others:
            arrays.int8_accumulate(codes, scales, out, self.block_size)

    def reduce(self, data: np.ndarray, values: np.ndarray, pool: BufferPool) -> np.ndarray:
        result = pool.take(self.num_bytes(values.size))
        codes, scales = self._split(data, values.size)
        out = self._split(result, values.size)
        arrays.int8_reduce(codes, scales, values, self.block_size, out=out)
        return result

    def emit_encode(self, values: tf.Tensor) -> tf.Tensor:
        codes, scales = encodings.int8_encode(values, self.block_size)
        return tf.concat([with_dtype(scales, tf.uint8), with_dtype(codes, tf.uint8)], axis=0)

    def emit_decode(self, data: tf.Tensor, num_values: int) -> tf.Tensor:
        return encodings.int8_decode(*self._emit_split(data, num_values), self.block_size)

    def emit_decode_sum(self, parts: Sequence[tf.Tensor], factor: float, num_values: int) -> tf.Tensor:
        split = [self._emit_split(data, num_values) for data in parts]
        (codes, scales), *others = [(codes, scales * factor) for codes, scales in split]
        total = encodings.int8_decode(codes, scales, self.block_size)
        for codes, scales in others:
            total = encodings.int8_accumulate(codes, scales, total, self.block_size)
        return total

    def _emit_split(self, data: tf.Tensor, num_values: int) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns codes and scales. `tf.split` has no kernel for bytes on a GPU."""
        end = 4 * num_blocks(num_values, self.block_size)
        return with_dtype(data[end:], tf.int8), with_dtype(data[:end], tf.float32)

    def num_bytes(self, num_values: int) -> int:
        return 4 * num_blocks(num_values, self.block_size) + num_values

    def cut(self, data: np.ndarray, num_values: int, where: slice, pool: BufferPool) -> np.ndarray:
        part = pool.take(self.num_bytes(where.stop - where.start))
        codes, scales = self._split(part, where.stop - where.start)
        codes_of_vector, scales_of_vector = self._split(data, num_values)
        np.copyto(codes, codes_of_vector[where])
        np.copyto(scales, scales_of_vector[self._blocks(where)])
        return part

    def paste(self, part: np.ndarray, data: np.ndarray, num_values: int, where: slice) -> None:
        codes, scales = self._split(part, where.stop - where.start)
        codes_of_vector, scales_of_vector = self._split(data, num_values)
        np.copyto(codes_of_vector[where], codes)
        np.copyto(scales_of_vector[self._blocks(where)], scales)

    def _blocks(self, where: slice) -> slice:
        return slice(where.start // self.block_size, num_blocks(where.stop, self.block_size))

    def _split(self, data: np.ndarray, num_values: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns codes and scales. In `data` the scales come first, so that they are aligned."""
        checked(self, data, self.num_bytes(num_values), num_values)
        end = 4 * num_blocks(num_values, self.block_size)
        return data[end:].view(np.int8), data[:end].view(np.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantileSketch(Codec):
    """Sorts the values of a chunk into 256 buckets, and sends each value's bucket number and each bucket's mean.

    Args:
      spacing: 1 makes buckets with equal numbers of values. The nearer to 0, the more equal are the widths of the
        buckets. Default 1/2.

    References:
      Zhou et al. Canary: Decentralized Distributed Deep Learning Via Gradient Sketch and Partition in Multi-Interface
      Networks. IEEE TPDS 2021.
    """

    name: ClassVar[str] = "sketch"

    spacing: float = 0.5

    def __post_init__(self):
        super().__post_init__()
        check_spacing(self.spacing)

    @property
    def bytes_per_value(self) -> float:
        return 1.0

    def encode(self, values: np.ndarray, pool: BufferPool) -> np.ndarray:
        data = pool.take(_BUCKETS_BYTES + values.size)
        arrays.quantile_sketch_encode(values, self.spacing, out=self._split(data, values.size))
        return data

    @property
    def encodes_in_graph(self) -> bool:
        return True

    def emit_encode(self, values: tf.Tensor) -> tf.Tensor:
        codes, bucket_values = encodings.quantile_sketch_encode(values, self.spacing)
        return tf.concat([with_dtype(bucket_values, tf.uint8), codes], axis=0)

    def part(self, data: np.ndarray, where: slice, factor: float, pool: BufferPool) -> np.ndarray:
        codes, bucket_values = self._split(data, data.size - _BUCKETS_BYTES)
        part = pool.take(_BUCKETS_BYTES + where.stop - where.start)
        part_codes, part_values = self._split(part, where.stop - where.start)
        np.multiply(bucket_values, np.float32(factor), out=part_values)
        np.copyto(part_codes, codes[where])
        return part

    def accumulate_part(self, data: np.ndarray, where: slice, accumulator: np.ndarray) -> None:
        codes, bucket_values = self._split(data, data.size - _BUCKETS_BYTES)
        arrays.quantile_sketch_accumulate(codes[where], bucket_values, accumulator)

    def decode(self, data: np.ndarray, out: np.ndarray) -> None:
        arrays.quantile_sketch_decode(*self._split(data, out.size), out=out)

    def accumulate(self, data: np.ndarray, accumulator: np.ndarray) -> None:
        arrays.quantile_sketch_accumulate(*self._split(data, accumulator.size), accumulator)

    def _split(self, data: np.ndarray, num_values: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns codes and bucket values. In `data` the bucket values come first, so that they are aligned."""
        checked(self, data, _BUCKETS_BYTES + num_values, num_values)
        return data[_BUCKETS_BYTES:], data[:_BUCKETS_BYTES].view(np.float32)

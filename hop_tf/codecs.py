"""Codecs: what shortens vectors on their way between ranks.

A codec turns a vector of float32 into bytes and back. It keeps nothing from one vector to the next, so that the same
bytes decode to the same values on every rank. What a lossy codec loses can be kept beside it and added to the next
vector (`ErrorFeedback`).

    Codec                      Bytes per value   Error
    Identity()                 4                 none
    Truncate16()               2                 below 2^-7 of each value (2^-8 with `round_to_nearest`)
    Int8(block_size=512)       1.008             at most 1/254 of the largest magnitude in each block
    QuantileSketch()           1 (*)             relative root mean square 0.8 % on normally distributed values

(*) and 1 KiB for every chunk that all-reduce cuts a vector into.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import ClassVar

import numpy as np
import tensorflow as tf

from hop_tf.buffers import BufferPool
from hop_tf.ops import arrays
from hop_tf.ops.arguments import DEFAULT_BLOCK_SIZE, check_block_size, check_sketch, num_blocks

_BFLOAT16 = tf.bfloat16.as_numpy_dtype


@dataclasses.dataclass(frozen=True, kw_only=True)
class Codec(abc.ABC):
    """Encodes vectors.

    Members are frozen dataclasses without state: equal settings make equal codecs, and ranks compare their `repr`.

    Args:
      error_feedback: Whether what is lost is kept, and added to the next vector before it is encoded. It costs another
        vector of memory and two passes over it. Default False. See `ErrorFeedback`.

    Attributes:
      name: What `get` knows it by.
    """

    name: ClassVar[str]

    error_feedback: bool = False

    @property
    @abc.abstractmethod
    def bytes_per_value(self) -> float:
        """Length of what `encode` gives, per value of a long vector."""

    @property
    def granularity(self) -> int:
        """A vector should be cut at multiples of so many values only."""
        return 1

    @abc.abstractmethod
    def encode(self, values: np.ndarray, pool: BufferPool) -> np.ndarray:
        """Encodes a vector.

        Args:
          values: 1-D array of float32, bfloat16 or float16. Nobody writes to it afterwards.
          pool: Where the result's memory comes from.

        Returns:
          1-D uint8 array; it may share the memory of `values`. Where a value is not finite, some of what it decodes to
          is not finite either.
        """

    @abc.abstractmethod
    def decode(self, data: np.ndarray, out: np.ndarray) -> None:
        """Decodes a vector.

        Args:
          data: What `encode` has given: 1-D uint8 array, 64-byte aligned.
          out: 1-D float32 array that takes the values.

        Raises:
          ValueError: If `data` has another length than so many values are encoded to.
        """

    def accumulate(self, data: np.ndarray, accumulator: np.ndarray) -> None:
        """Decodes a vector and adds it, in float32, to `accumulator`. Arguments and errors as of `decode`."""
        values = np.empty_like(accumulator)
        self.decode(data, values)
        accumulator += values

    def add(self, data: np.ndarray, values: np.ndarray, pool: BufferPool) -> np.ndarray:
        """Returns the sum, in float32 at least, of a decoded vector and another one; arguments as of `reduce`."""
        total = float32_copy(values, pool)
        self.accumulate(data, total)
        return total

    def reduce(self, data: np.ndarray, values: np.ndarray, pool: BufferPool) -> np.ndarray:
        """Encodes the sum, in float32, of a decoded vector and another one: a hop of a ring.

        Args:
          data: As of `decode`.
          values: As of `encode`.
          pool: As of `encode`.

        Returns:
          As of `encode`.
        """
        return self.encode(self.add(data, values, pool), pool)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Identity(Codec):
    """Leaves float32 as it is.

    Args:
      dtype: The type of the values: any floating-point type. `decode` and `accumulate` convert to that of their array.
    """

    name: ClassVar[str] = "identity"

    dtype: np.dtype | type | str = "float32"

    def __post_init__(self):
        if self.error_feedback:
            raise ValueError("`error_feedback` must be False where nothing is lost. Received: error_feedback=True.")
        dtype = np.dtype(self.dtype)
        if not tf.as_dtype(dtype).is_floating:
            raise ValueError(f"`dtype` must be a floating-point type. Received: dtype={self.dtype!r}.")
        object.__setattr__(self, "dtype", dtype.name)

    @property
    def bytes_per_value(self) -> int:
        return np.dtype(self.dtype).itemsize

    def encode(self, values: np.ndarray, pool: BufferPool) -> np.ndarray:
        return np.ascontiguousarray(values, self.dtype).view(np.uint8)

    def decode(self, data: np.ndarray, out: np.ndarray) -> None:
        np.copyto(out, self._view(data, out.size), casting="unsafe")

    def accumulate(self, data: np.ndarray, accumulator: np.ndarray) -> None:
        np.add(accumulator, self._view(data, accumulator.size), out=accumulator)

    def add(self, data: np.ndarray, values: np.ndarray, pool: BufferPool) -> np.ndarray:
        total = _take_float32(values, pool)
        return np.add(values, self._view(data, values.size), out=total, dtype=total.dtype)

    def _view(self, data: np.ndarray, num_values: int) -> np.ndarray:
        return _checked(self, data, num_values * self.bytes_per_value, num_values).view(self.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Truncate16(Codec):
    """Drops the lower 16 bits of each value: what is left is a bfloat16.

    Args:
      round_to_nearest: Whether values are rounded to the nearest (ties to even) instead of towards zero. Default False,
        as in the paper. What is dropped always points away from zero: `error_feedback` or rounding makes up for that.

    References:
      Li et al. Pipe-SGD: A Decentralized Pipelined SGD Framework for Distributed Deep Net Training. NeurIPS 2018.
    """

    name: ClassVar[str] = "truncate16"

    round_to_nearest: bool = False

    @property
    def bytes_per_value(self) -> float:
        return 2.0

    def encode(self, values: np.ndarray, pool: BufferPool) -> np.ndarray:
        data = pool.take(2 * values.size)
        arrays.truncate16_encode(values, self.round_to_nearest, out=data.view(_BFLOAT16))
        return data

    def decode(self, data: np.ndarray, out: np.ndarray) -> None:
        arrays.truncate16_decode(_checked(self, data, 2 * out.size, out.size).view(_BFLOAT16), out=out)

    def accumulate(self, data: np.ndarray, accumulator: np.ndarray) -> None:
        halves = _checked(self, data, 2 * accumulator.size, accumulator.size).view(_BFLOAT16)
        arrays.truncate16_accumulate(halves, accumulator)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Int8(Codec):
    """Rounds the values of each block to multiples of 1/127 of the block's largest magnitude.

    Args:
      block_size: Values per block; None for one block, as in the paper: that is a chunk of what all-reduce cuts a
        vector into. On heavy-tailed gradients small blocks lose far less. Default 512.

    References:
      Li et al. Pipe-SGD: A Decentralized Pipelined SGD Framework for Distributed Deep Net Training. NeurIPS 2018.
    """

    name: ClassVar[str] = "int8"

    block_size: int | None = DEFAULT_BLOCK_SIZE

    def __post_init__(self):
        check_block_size(self.block_size)

    @property
    def bytes_per_value(self) -> float:
        return 1.0 + (4.0 / self.block_size if self.block_size else 0.0)

    @property
    def granularity(self) -> int:
        return self.block_size or 1

    def encode(self, values: np.ndarray, pool: BufferPool) -> np.ndarray:
        data = pool.take(self._num_bytes(values.size))
        arrays.int8_encode(values, self.block_size, out=self._split(data, values.size))
        return data

    def decode(self, data: np.ndarray, out: np.ndarray) -> None:
        arrays.int8_decode(*self._split(data, out.size), self.block_size, out=out)

    def accumulate(self, data: np.ndarray, accumulator: np.ndarray) -> None:
        arrays.int8_accumulate(*self._split(data, accumulator.size), accumulator, self.block_size)

    def reduce(self, data: np.ndarray, values: np.ndarray, pool: BufferPool) -> np.ndarray:
        result = pool.take(self._num_bytes(values.size))
        codes, scales = self._split(data, values.size)
        out = self._split(result, values.size)
        arrays.int8_reduce(codes, scales, values, self.block_size, out=out)
        return result

    def _num_bytes(self, num_values: int) -> int:
        return 4 * num_blocks(num_values, self.block_size) + num_values

    def _split(self, data: np.ndarray, num_values: int) -> tuple[np.ndarray, np.ndarray]:
        """Codes and scales; the scales come first, where they are aligned."""
        _checked(self, data, self._num_bytes(num_values), num_values)
        end = 4 * num_blocks(num_values, self.block_size)
        return data[end:].view(np.int8), data[:end].view(np.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantileSketch(Codec):
    """Sorts the values of a chunk into buckets, and sends their numbers and each bucket's mean.

    Args:
      num_bits: Bits of a bucket's number, 1 to 8; a number takes a byte all the same. Default 8.
      spacing: How far the buckets hold equally many values (1), or are equally wide (towards 0). Default 1/2.

    References:
      Zhou et al. Canary: Decentralized Distributed Deep Learning Via Gradient Sketch and Partition in Multi-Interface
      Networks. IEEE TPDS 2021.
    """

    name: ClassVar[str] = "sketch"

    num_bits: int = 8
    spacing: float = 0.5

    def __post_init__(self):
        check_sketch(self.num_bits, self.spacing)

    @property
    def bytes_per_value(self) -> float:
        return 1.0

    def encode(self, values: np.ndarray, pool: BufferPool) -> np.ndarray:
        data = pool.take(self._header_bytes + values.size)
        arrays.quantile_sketch_encode(values, self.num_bits, self.spacing, out=self._split(data, values.size))
        return data

    def decode(self, data: np.ndarray, out: np.ndarray) -> None:
        arrays.quantile_sketch_decode(*self._split(data, out.size), out=out)

    def accumulate(self, data: np.ndarray, accumulator: np.ndarray) -> None:
        arrays.quantile_sketch_accumulate(*self._split(data, accumulator.size), accumulator)

    @property
    def _header_bytes(self) -> int:
        return 4 << self.num_bits

    def _split(self, data: np.ndarray, num_values: int) -> tuple[np.ndarray, np.ndarray]:
        """Codes and bucket values; the bucket values come first, where they are aligned."""
        _checked(self, data, self._header_bytes + num_values, num_values)
        return data[self._header_bytes :], data[: self._header_bytes].view(np.float32)


class ErrorFeedback:
    """Encodes the pieces of a vector, and adds what is lost to the same piece of the next vector.

    With residual e: v = values + e; what is sent is encode(v); e = v - decode(encode(v)). So the sum of all that was
    sent differs from the sum of all values by the last residual only. A piece with a value that is not finite is sent
    as it is, and its residual stays.

    Args:
      codec: The codec.
      num_values: Length of the vector.

    References:
      Seide et al. 1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training of Speech
      DNNs. Interspeech 2014. Karimireddy et al. Error Feedback Fixes SignSGD and other Gradient Compression Schemes.
      ICML 2019.
    """

    def __init__(self, codec: Codec, num_values: int):
        self._codec = codec
        self._residual = np.zeros(num_values, np.float32)

    def encode(self, values: np.ndarray, where: slice, pool: BufferPool) -> np.ndarray:
        """Encodes the piece `where` of a vector.

        Args:
          values: The piece.
          where: Where it lies in the vector.
          pool: Where the result's memory comes from.

        Returns:
          As `Codec.encode`.
        """
        residual = self._residual[where]
        corrected = float32_copy(values, pool)
        corrected += residual
        data = self._codec.encode(corrected, pool)
        decoded = pool.take(corrected.nbytes).view(np.float32)
        self._codec.decode(data, decoded)
        np.subtract(corrected, decoded, out=decoded)
        if np.isfinite(decoded).all():
            residual[:] = decoded
        return data


def float32_copy(values: np.ndarray, pool: BufferPool) -> np.ndarray:
    """A copy of `values`, in float32 at least."""
    copy = _take_float32(values, pool)
    np.copyto(copy, values)
    return copy


def _take_float32(like: np.ndarray, pool: BufferPool) -> np.ndarray:
    dtype = np.promote_types(like.dtype, np.float32)
    return pool.take(like.size * dtype.itemsize).view(dtype)


def _checked(codec: Codec, data: np.ndarray, num_bytes: int, num_values: int) -> np.ndarray:
    if data.nbytes != num_bytes:
        raise ValueError(
            f"`data` must have the {num_bytes} bytes that {codec} encodes {num_values} values to. "
            f"Received: {data.nbytes} bytes."
        )
    return data


def _registry(*members: type[Codec]) -> dict[str, type[Codec]]:
    """The codecs by name. Raises TypeError if one does not keep the rules, when this module is imported."""
    codecs = {}
    for member in members:
        sound = member() == member() and member().bytes_per_value > 0 and not member().error_feedback
        if not sound or member.name in codecs:
            raise TypeError(f"{member.__name__} is no codec that can be registered.")
        codecs[member.name] = member
    return codecs


_CODECS = _registry(Identity, Truncate16, Int8, QuantileSketch)


def get(codec: str | Codec | None) -> Codec:
    """The codec that an argument stands for.

    Args:
      codec: A codec, the name of one with its defaults ("identity", "truncate16", "int8", "sketch"), or None for
        `Identity()`.

    Returns:
      The codec.

    Raises:
      ValueError: If there is no codec of that name.
      TypeError: If it is something else.
    """
    if codec is None:
        return Identity()
    if isinstance(codec, Codec):
        return codec
    if not isinstance(codec, str):
        raise TypeError(f"`codec` must be a hop_tf.codecs.Codec, a name, or None. Received: codec={codec!r}.")
    if codec not in _CODECS:
        raise ValueError(f"`codec` must be one of {sorted(_CODECS)}. Received: codec={codec!r}.")
    return _CODECS[codec]()

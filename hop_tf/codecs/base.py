"""`Codec`: the base class of all codecs, and the table of codecs with a name."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import tensorflow as tf

from hop_tf.arguments import check_boolean
from hop_tf.tensors.buffers import BufferPool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Codec(abc.ABC):
    """Encodes vectors.

    Codecs are frozen dataclasses without state: equal settings make equal codecs, and ranks compare their `repr`.

    Args:
      error_feedback: True to keep the loss of each vector, and add it to the next vector before encoding. That costs
        two more vectors of memory and three passes over them. Default False. See `ErrorFeedback`.

    Attributes:
      name: The name for `get`.
      selects_values: True if the codec sends only some of the values.

    Raises:
      ValueError: If an argument is out of range.
    """

    name: ClassVar[str]
    selects_values: ClassVar[bool] = False

    error_feedback: bool = False

    def __post_init__(self):
        check_boolean("error_feedback", self.error_feedback)

    @property
    @abc.abstractmethod
    def bytes_per_value(self) -> float:
        """Length of the output of `encode`, per value of a long vector."""

    @property
    def granularity(self) -> int:
        """The number of values that belong together: a vector should be cut only at multiples of it."""
        return 1

    @property
    def is_lossy(self) -> bool:
        """True if decoded values may differ from the encoded values."""
        return True

    def with_error_feedback(self, error_feedback: bool) -> Codec:
        """The same codec with or without error feedback. A lossless codec never has any."""
        return dataclasses.replace(self, error_feedback=error_feedback and self.is_lossy)

    @property
    def for_sums(self) -> Codec:
        """The codec for partial sums over several ranks, which ranks pass on in an all-reduce."""
        return self

    @property
    def encodes_in_graph(self) -> bool:
        """True if the graph may encode a vector as a whole, and ranks then send parts of it, times factors.

        Such a codec has `emit_encode`, `part` and `accumulate_part`.
        """
        return False

    @property
    def is_divisible(self) -> bool:
        """True if the encoding of a vector can be put together from those of its parts, cut at `granularity`.

        Such a codec has `num_bytes`, `cut`, `paste`, `emit_encode` and `emit_decode`. Bytes of zeros decode to zeros.
        """
        return False

    def at_step(self, step: int) -> Codec:
        """The codec of a step: this codec, unless its settings change with time. Steps count from 0 in every `fit`."""
        del step
        return self

    @abc.abstractmethod
    def encode(self, values: np.ndarray, pool: BufferPool) -> np.ndarray:
        """Encodes a vector.

        Args:
          values: 1-D array of float32, bfloat16 or float16. Do not modify it afterwards.
          pool: Provides the result's memory.

        Returns:
          1-D uint8 array. It may share the memory of `values`. If a value is not finite, some decoded value is not
          finite either.
        """

    @abc.abstractmethod
    def decode(self, data: np.ndarray, out: np.ndarray) -> None:
        """Decodes a vector.

        Args:
          data: The output of `encode`: 1-D uint8 array. Decoding is faster if it is 64-byte aligned.
          out: 1-D array of float32 or float64 that takes the values.

        Raises:
          ValueError: If `data` does not encode `out.size` values: it has another length, or is malformed.
        """

    def emit_encode(self, values: tf.Tensor) -> tf.Tensor:
        """Emits the ops that encode a vector on the device that computes it, which may be a GPU.

        Args:
          values: 1-D tensor of float32, bfloat16 or float16.

        Returns:
          1-D uint8 tensor, as from `encode`.
        """
        raise NotImplementedError(f"{self} does not encode in the graph.")

    def emit_decode(self, data: tf.Tensor, num_values: int) -> tf.Tensor:
        """Emits the ops that decode a vector on the device that uses it, which may be a GPU.

        Args:
          data: 1-D uint8 tensor: see `decode`.
          num_values: Number of values.

        Returns:
          1-D float32 tensor.
        """
        raise NotImplementedError(f"{self} does not decode in the graph.")

    def emit_decode_sum(self, parts: Sequence[tf.Tensor], factor: float, num_values: int) -> tf.Tensor:
        """Emits the ops that decode vectors, and add them up as `decode_sum` does.

        Results are equal to the bit, except those that come from numbers below 2^-118: TensorFlow's operations take
        numbers below 2^-126 for zeros.

        Args:
          parts: Two or more encoded vectors: see `data` of `emit_decode`.
          factor: Multiplies the sum.
          num_values: Number of values.

        Returns:
          1-D float32 tensor.
        """
        total = self.emit_decode(parts[0], num_values)
        for data in parts[1:]:
            total += self.emit_decode(data, num_values)
        return total * factor

    def num_bytes(self, num_values: int) -> int:
        """The length of the encoding of so many values."""
        raise NotImplementedError(f"{self} is not divisible.")

    def cut(self, data: np.ndarray, num_values: int, where: slice, pool: BufferPool) -> np.ndarray:
        """Returns the encoding of some values of an encoded vector.

        Args:
          data: See `decode`.
          num_values: Number of values of the vector.
          where: The slice of the values. It begins at a multiple of `granularity`, and ends at one or with the vector.
          pool: See `encode`.

        Returns:
          See `encode`.
        """
        raise NotImplementedError(f"{self} is not divisible.")

    def paste(self, part: np.ndarray, data: np.ndarray, num_values: int, where: slice) -> None:
        """Writes the encoding of some values to that of a vector: the inverse of `cut`.

        Args:
          part: The encoding of the values at `where`.
          data: The encoding of the vector, to write to.
          num_values: See `cut`.
          where: See `cut`.

        Raises:
          ValueError: If `part` has another length.
        """
        raise NotImplementedError(f"{self} is not divisible.")

    def part(self, data: np.ndarray, where: slice, factor: float, pool: BufferPool) -> np.ndarray:
        """Returns the encoding of some values of an encoded vector, times a factor.

        Args:
          data: See `decode`.
          where: The slice of the values.
          factor: Multiplies the values.
          pool: See `encode`.

        Returns:
          See `encode`.
        """
        raise NotImplementedError(f"{self} does not encode in the graph.")

    def accumulate_part(self, data: np.ndarray, where: slice, accumulator: np.ndarray) -> None:
        """Decodes some values of a vector, chosen as for `part`, and adds them, in float32, to `accumulator`."""
        raise NotImplementedError(f"{self} does not encode in the graph.")

    def accumulate(self, data: np.ndarray, accumulator: np.ndarray) -> None:
        """Decodes a vector and adds it, in float32, to `accumulator`. For arguments and errors, see `decode`."""
        values = np.empty_like(accumulator)
        self.decode(data, values)
        accumulator += values

    def add(self, data: np.ndarray, values: np.ndarray, pool: BufferPool) -> np.ndarray:
        """Returns the sum, in float32 at least, of an encoded vector and `values`. For arguments, see `reduce`."""
        total = float32_copy(values, pool)
        self.accumulate(data, total)
        return total

    def total(self, parts: Sequence[np.ndarray], values: np.ndarray, factor: float, pool: BufferPool) -> np.ndarray:
        """Returns the sum, in float32 at least, of a vector and encoded vectors, times a factor.

        Args:
          parts: Encoded vectors, at least one. See `data` of `decode`.
          values: See `encode`.
          factor: Multiplies the sum.
          pool: See `encode`.
        """
        total = self.add(parts[0], values, pool)
        for data in parts[1:]:
            self.accumulate(data, total)
        if factor != 1:
            total *= total.dtype.type(factor)
        return total

    def decode_sum(self, parts: Sequence[np.ndarray], factor: float, out: np.ndarray) -> None:
        """Decodes vectors and writes their sum, times a factor, to `out`.

        Args:
          parts: Two or more encoded vectors. See `data` of `decode`.
          factor: Multiplies the sum.
          out: 1-D array of float32 or float64.
        """
        self.decode(parts[0], out)
        for data in parts[1:]:
            self.accumulate(data, out)
        out *= out.dtype.type(factor)

    def reduce(self, data: np.ndarray, values: np.ndarray, pool: BufferPool) -> np.ndarray:
        """Encodes the sum, in float32, of an encoded vector and `values`: one hop of a ring all-reduce.

        Args:
          data: See `decode`.
          values: See `encode`.
          pool: See `encode`.

        Returns:
          See `encode`.
        """
        return self.encode(self.add(data, values, pool), pool)


def float32_copy(values: np.ndarray, pool: BufferPool) -> np.ndarray:
    """A copy of `values`, in float32 at least."""
    copy = take_float32(values, pool)
    np.copyto(copy, values)
    return copy


def take_float32(like: np.ndarray, pool: BufferPool) -> np.ndarray:
    """An array to write to, in the shape of `like`, and in float32 at least."""
    dtype = np.promote_types(like.dtype, np.float32)
    return pool.take(like.size * dtype.itemsize).view(dtype)


def checked(codec: Codec, data: np.ndarray, num_bytes: int, num_values: int) -> np.ndarray:
    """Returns `data`. Raises ValueError if its length is not `num_bytes`."""
    if data.nbytes != num_bytes:
        raise ValueError(
            f"`data` must have the {num_bytes} bytes that {codec} encodes {num_values} values to. "
            f"Received: {data.nbytes} bytes."
        )
    return data


_CODECS: dict[str, type[Codec]] = {}


def register(member: type[Codec]) -> None:
    """Registers a codec under its name. Raises TypeError if it breaks the rules for codecs."""
    sound = member() == member() and member().bytes_per_value > 0 and not member().error_feedback
    if not sound or member.name in _CODECS:
        raise TypeError(
            f"{member.__name__} cannot be registered as a codec: it has error feedback, is not equal to itself, or has "
            "a known name."
        )
    _CODECS[member.name] = member


def get(codec: str | Codec | None, argument: str = "codec") -> Codec:
    """The codec that an argument stands for.

    Args:
      codec: A codec, the name of one with its defaults ("identity", "truncate16", "int8", "sketch", "bits4", "bits2",
        "sparse", "top_k"), or None for `Identity()`.
      argument: The argument's name in errors. Default "codec".

    Returns:
      The codec.

    Raises:
      ValueError: If there is no codec of that name.
      TypeError: If the argument has another type.
    """
    if codec is None:
        codec = "identity"
    if isinstance(codec, Codec):
        return codec
    if not isinstance(codec, str):
        raise TypeError(f"`{argument}` must be a hop_tf.codecs.Codec, a name, or None. Received: {argument}={codec!r}.")
    if codec not in _CODECS:
        raise ValueError(f"`{argument}` must be one of {sorted(_CODECS)}. Received: {argument}={codec!r}.")
    return _CODECS[codec]()

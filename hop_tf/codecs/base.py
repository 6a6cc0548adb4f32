"""`Codec`: what all codecs have in common, and the table of those that have a name."""

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

    Members are frozen dataclasses without state: equal settings make equal codecs, and ranks compare their `repr`.

    Args:
      error_feedback: Whether what is lost is kept, and added to the next vector before it is encoded. It costs two more
        vectors of memory and three passes over them. Default False. See `ErrorFeedback`.

    Attributes:
      name: What `get` knows it by.

    Raises:
      ValueError: If an argument is out of range.
    """

    name: ClassVar[str]

    error_feedback: bool = False

    def __post_init__(self):
        check_boolean("error_feedback", self.error_feedback)

    @property
    @abc.abstractmethod
    def bytes_per_value(self) -> float:
        """Length of what `encode` gives, per value of a long vector."""

    @property
    def granularity(self) -> int:
        """A vector should be cut at multiples of so many values only."""
        return 1

    @property
    def is_lossy(self) -> bool:
        """Whether what is decoded may differ from what was encoded."""
        return True

    def with_error_feedback(self, error_feedback: bool) -> Codec:
        """The same codec with error feedback, if it loses something, or without."""
        return dataclasses.replace(self, error_feedback=error_feedback and self.is_lossy)

    @property
    def for_sums(self) -> Codec:
        """What encodes sums of several ranks' values that are passed on."""
        return self

    @property
    def encodes_in_graph(self) -> bool:
        """True if it has `emit_encode`, `part` and `accumulate_part`."""
        return False

    def at_step(self, step: int) -> Codec:
        """The codec of a step: itself, unless its settings change with time. Steps count from 0 in every `fit`."""
        del step
        return self

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
          ValueError: If so many values cannot be encoded to `data`: it has another length, or is malformed.
        """

    def emit_encode(self, values: tf.Tensor) -> tf.Tensor:
        """Emits the ops that encode a vector on the device that it is computed on, be it a GPU.

        Args:
          values: 1-D tensor of float32, bfloat16 or float16.

        Returns:
          1-D uint8 tensor, as of `encode`.
        """
        raise NotImplementedError(f"{self} does not encode in the graph.")

    def part(self, data: np.ndarray, where: slice, factor: float, pool: BufferPool) -> np.ndarray:
        """Cuts out of what a vector is encoded to what some of its values, times a factor, are encoded to.

        Args:
          data: As of `decode`.
          where: Which values.
          factor: Multiplies them.
          pool: As of `encode`.

        Returns:
          As of `encode`.
        """
        raise NotImplementedError(f"{self} does not encode in the graph.")

    def accumulate_part(self, data: np.ndarray, where: slice, accumulator: np.ndarray) -> None:
        """Decodes some values of a vector, as `part` cuts them out, and adds them, in float32, to `accumulator`."""
        raise NotImplementedError(f"{self} does not encode in the graph.")

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

    def total(self, parts: Sequence[np.ndarray], values: np.ndarray, factor: float, pool: BufferPool) -> np.ndarray:
        """Returns the sum, in float32 at least, of a vector and decoded ones, times a factor.

        Args:
          parts: As `data` of `decode`; at least one.
          values: As of `encode`.
          factor: Multiplies the sum.
          pool: As of `encode`.
        """
        total = self.add(parts[0], values, pool)
        for data in parts[1:]:
            self.accumulate(data, total)
        if factor != 1:
            total *= total.dtype.type(factor)
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
    """`data`; raises ValueError if it has another length than that."""
    if data.nbytes != num_bytes:
        raise ValueError(
            f"`data` must have the {num_bytes} bytes that {codec} encodes {num_values} values to. "
            f"Received: {data.nbytes} bytes."
        )
    return data


_CODECS: dict[str, type[Codec]] = {}


def register(member: type[Codec]) -> None:
    """Makes a codec known by its name. Raises TypeError if it does not keep the rules."""
    sound = member() == member() and member().bytes_per_value > 0 and not member().error_feedback
    if not sound or member.name in _CODECS:
        raise TypeError(f"{member.__name__} is no codec that can be registered.")
    _CODECS[member.name] = member


def get(codec: str | Codec | None, argument: str = "codec") -> Codec:
    """The codec that an argument stands for.

    Args:
      codec: A codec, the name of one with its defaults ("identity", "truncate16", "int8", "sketch", "sparse", "top_k"),
        or None for `Identity()`.
      argument: What errors call it. Default "codec".

    Returns:
      The codec.

    Raises:
      ValueError: If there is no codec of that name.
      TypeError: If it is something else.
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

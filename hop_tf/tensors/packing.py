"""Packing: a list of tensors of any shapes <-> few flat vectors ("buckets"), one per dtype.

Tensors that must not pass through a lossy codec have buckets of their own.

Each tensor starts at a multiple of 64 bytes in its bucket. Large tensors usually have sizes that are multiples of 64
bytes, too. For them, TensorFlow's `Slice` shares memory with the bucket instead of copying. The padding is zero.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from hop_tf.errors import ProtocolError
from hop_tf.tensors.buffers import BufferPool

_ALIGNMENT_BYTES = 64


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """A packed tensor. Ranks compare names, shapes and dtypes before the first step.

    Attributes:
      name: Its name.
      shape: Its shape.
      dtype: Its type.
      exact: True if the tensor must not pass through a lossy codec.
      on_host: True if only operations on the host use the unpacked tensor.
    """

    name: str
    shape: tuple[int, ...]
    dtype: tf.DType
    exact: bool = False
    on_host: bool = False

    @property
    def num_elements(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))


def takes_codec(dtype: tf.DType, exact: bool) -> bool:
    """True if a codec encodes tensors of this kind."""
    return dtype != tf.float64 and not exact


@dataclasses.dataclass(frozen=True)
class _Slot:
    bucket: int
    offset: int


class Packing:
    """The layout of a fixed list of tensors in the buckets.

    Args:
      specs: The tensors, in order. Shapes are fully defined.
      whole: A larger packing, if this packing is a part of it. Both then have the same buckets. Default: none.

    Attributes:
      specs: The tensors.
      dtypes: dtype of each bucket, in the order of first appearance.
      exact: For each bucket, True if no lossy codec may change it.
      sizes: Elements of each bucket, padding included.
    """

    def __init__(self, specs: Sequence[TensorSpec], whole: Packing | None = None):
        self.specs = tuple(specs)
        if whole is None:
            kinds = list(dict.fromkeys(map(_kind, self.specs)))
        else:  # `whole` may be a part itself, so its tensors may lack some kinds.
            kinds = list(zip(whole.dtypes, whole.exact, strict=True))
        self.dtypes = tuple(dtype for dtype, _ in kinds)
        self.exact = tuple(exact for _, exact in kinds)
        sizes = [0] * len(kinds)
        slots = []
        for spec in self.specs:
            bucket = kinds.index(_kind(spec))
            slots.append(_Slot(bucket, sizes[bucket]))
            sizes[bucket] += _padded(spec.num_elements, spec.dtype)
        self.sizes = tuple(sizes)
        self._slots = tuple(slots)

    @property
    def takes_codec(self) -> list[bool]:
        """For each bucket, True if a codec encodes it."""
        return [takes_codec(*kind) for kind in zip(self.dtypes, self.exact, strict=True)]

    def part(self, indices: Sequence[int]) -> Packing:
        """The packing of some of the tensors, in the same buckets. Some buckets may be empty."""
        return Packing([self.specs[index] for index in indices], self)

    @property
    def num_bytes(self) -> int:
        """Bytes of all buckets together."""
        return sum(size * dtype.size for size, dtype in zip(self.sizes, self.dtypes, strict=True))

    def pack(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Joins tensors, in the order of `specs`, into one vector per bucket (one copy of the data)."""
        parts = [[] for _ in self.dtypes]
        for tensor, spec, slot in zip(tensors, self.specs, self._slots, strict=True):
            padding = _padded(spec.num_elements, spec.dtype) - spec.num_elements
            parts[slot.bucket].append(tf.reshape(tensor, [-1]))
            if padding:
                parts[slot.bucket].append(tf.zeros([padding], spec.dtype))
        buckets = zip(parts, self.dtypes, strict=True)
        return [tf.concat(pieces, axis=0) if pieces else tf.zeros([0], dtype) for pieces, dtype in buckets]

    def unpack(self, buckets: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Splits buckets into tensors of the original shapes, without a copy if TensorFlow shares slices."""
        return [_cut(buckets, spec, slot) for spec, slot in zip(self.specs, self._slots, strict=True)]

    def zeros(self) -> list[np.ndarray]:
        """Buckets of zeros, as arrays."""
        return [np.zeros(size, dtype.as_numpy_dtype) for size, dtype in zip(self.sizes, self.dtypes, strict=True)]

    def take(self, pool: BufferPool) -> list[np.ndarray]:
        """Buckets of undefined contents, as arrays in the memory of `pool`."""
        sizes = zip(self.sizes, self.dtypes, strict=True)
        return [pool.take(size * dtype.size).view(dtype.as_numpy_dtype) for size, dtype in sizes]

    def place(self, index: int) -> tuple[int, slice]:
        """The bucket of tensor number `index`, and the tensor's slice of the bucket, in elements."""
        slot = self._slots[index]
        return slot.bucket, slice(slot.offset, slot.offset + self.specs[index].num_elements)

    def end(self, index: int) -> int:
        """The end of tensor number `index` and its padding in its bucket, in elements."""
        spec = self.specs[index]
        return self._slots[index].offset + _padded(spec.num_elements, spec.dtype)

    def view(self, payload: np.ndarray) -> tuple[np.ndarray, ...]:
        """Views the bytes of all buckets, one after the other as on the wire, as one typed array per bucket.

        Args:
          payload: 1-D uint8 array of `num_bytes`; the views keep its memory alive.

        Returns:
          One 1-D array per bucket; no copy.

        Raises:
          ProtocolError: If there are more or fewer bytes.
        """
        if payload.nbytes != self.num_bytes:
            raise ProtocolError(f"expected {self.num_bytes} bytes. Received: {payload.nbytes} bytes.")
        views, start = [], 0
        for size, dtype in zip(self.sizes, self.dtypes, strict=True):
            views.append(payload[start : start + size * dtype.size].view(dtype.as_numpy_dtype))
            start += size * dtype.size
        return tuple(views)


def _cut(buckets: Sequence[tf.Tensor], spec: TensorSpec, slot: _Slot) -> tf.Tensor:
    with tf.device("/cpu:0") if spec.on_host else contextlib.nullcontext():
        return tf.reshape(tf.slice(buckets[slot.bucket], [slot.offset], [spec.num_elements]), spec.shape)


def _kind(spec: TensorSpec) -> tuple[tf.DType, bool]:
    return spec.dtype, spec.exact


def _padded(num_elements: int, dtype: tf.DType) -> int:
    step = max(1, _ALIGNMENT_BYTES // dtype.size)
    return -(-num_elements // step) * step

"""Packing: a list of tensors of any shapes <-> few flat vectors ("buckets"), one per dtype.

Each tensor starts at a multiple of 64 bytes in its bucket. Where its size is such a multiple too, as that of large
tensors mostly is, TensorFlow's `Slice` shares memory with the bucket instead of copying. The padding is zero.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from hop_tf.errors import ProtocolError

_ALIGNMENT_BYTES = 64


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """Name, shape and dtype of a packed tensor; what ranks compare before the first step."""

    name: str
    shape: tuple[int, ...]
    dtype: tf.DType

    @property
    def num_elements(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))


@dataclasses.dataclass(frozen=True)
class _Slot:
    bucket: int
    offset: int


class Packing:
    """Where each tensor of a fixed list lies in the buckets.

    Args:
      specs: The tensors, in order. Shapes are fully defined.

    Attributes:
      specs: The same.
      dtypes: dtype of each bucket, in the order of first appearance.
      sizes: Elements of each bucket, padding included.
    """

    def __init__(self, specs: Sequence[TensorSpec]):
        self.specs = tuple(specs)
        self.dtypes = tuple(dict.fromkeys(spec.dtype for spec in self.specs))
        sizes = [0] * len(self.dtypes)
        slots = []
        for spec in self.specs:
            bucket = self.dtypes.index(spec.dtype)
            slots.append(_Slot(bucket, sizes[bucket]))
            sizes[bucket] += _padded(spec.num_elements, spec.dtype)
        self.sizes = tuple(sizes)
        self._slots = tuple(slots)

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
        return [tf.concat(pieces, axis=0) for pieces in parts]

    def unpack(self, buckets: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Splits buckets into tensors of the original shapes, without a copy where TensorFlow shares slices."""
        return [
            tf.reshape(tf.slice(buckets[slot.bucket], [slot.offset], [spec.num_elements]), spec.shape)
            for spec, slot in zip(self.specs, self._slots, strict=True)
        ]

    def view(self, payload: np.ndarray) -> tuple[np.ndarray, ...]:
        """Sees the bytes of all buckets, one behind the other as on the wire, as one typed array per bucket.

        Args:
          payload: 1-D uint8 array of `num_bytes`; the views keep its memory alive.

        Returns:
          One 1-D array per bucket; no copy.

        Raises:
          ProtocolError: If there are more or fewer bytes.
        """
        if payload.nbytes != self.num_bytes:
            raise ProtocolError(f"{payload.nbytes} bytes came where {self.num_bytes} were expected.")
        views, start = [], 0
        for size, dtype in zip(self.sizes, self.dtypes, strict=True):
            views.append(payload[start : start + size * dtype.size].view(dtype.as_numpy_dtype))
            start += size * dtype.size
        return tuple(views)


def _padded(num_elements: int, dtype: tf.DType) -> int:
    step = max(1, _ALIGNMENT_BYTES // dtype.size)
    return -(-num_elements // step) * step

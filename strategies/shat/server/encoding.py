"""`Encoding`: a shard's buckets on the wire."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hop_tf.codecs import Codec, ErrorFeedback, Identity
from hop_tf.errors import ProtocolError
from hop_tf.tensors import payloads
from hop_tf.tensors.buffers import BufferPool
from hop_tf.tensors.packing import Packing


class Encoding:
    """Encodes and decodes the buckets of a shard. Exact buckets, and those of float64, bypass the codec.

    Args:
      packing: The buckets.
      codec: The codec.
      pool: The memory for buckets that are encoded or decoded. Default: a pool of its own.
    """

    def __init__(self, packing: Packing, codec: Codec, pool: BufferPool | None = None):
        self._packing = packing
        self._codec = codec
        self._pool = pool or BufferPool()
        is_lossy = codec != Identity()
        self._is_encoded = [
            is_lossy and not exact and dtype.size <= 4
            for dtype, exact in zip(packing.dtypes, packing.exact, strict=True)
        ]
        self._feedbacks = [
            ErrorFeedback(codec, size) if encoded and codec.error_feedback else None
            for size, encoded in zip(packing.sizes, self._is_encoded, strict=True)
        ]

    @classmethod
    def plain(cls, packing: Packing) -> Encoding:
        """Returns an encoding without a codec."""
        return cls(packing, Identity())

    def encode(self, buckets: Sequence[np.ndarray], *, is_applied: bool = True) -> list[np.ndarray]:
        """Encodes each bucket. If the push is not applied, error feedback stays as it is for the next one."""
        return [self._encode(index, bucket, is_applied) for index, bucket in enumerate(buckets)]

    def _encode(self, index: int, bucket: np.ndarray, is_applied: bool) -> np.ndarray:
        if not self._is_encoded[index]:
            return bucket
        feedback = self._feedbacks[index]
        if feedback is not None and is_applied:
            return feedback.encode(bucket, slice(0, bucket.size), self._pool)
        return self._codec.encode(bucket, self._pool)

    def decode(self, parts: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Decodes the buckets.

        Args:
          parts: The bytes of each bucket. Buckets that were not encoded share their memory.

        Raises:
          ProtocolError: If the number of parts, or the length of one that was not encoded, is wrong.
          ValueError: If a codec cannot decode a part.
        """
        if len(parts) != len(self._packing.sizes):
            raise ProtocolError(f"expected {len(self._packing.sizes)} buckets. Received: {len(parts)} buckets.")
        return [self._decode(index, part) for index, part in enumerate(parts)]

    def _decode(self, index: int, part: np.ndarray) -> np.ndarray:
        dtype, size = self._packing.dtypes[index].as_numpy_dtype, self._packing.sizes[index]
        if not self._is_encoded[index]:
            return payloads.view(part, dtype, (size,))
        values = self._pool.take(4 * size).view(np.float32)
        self._codec.decode(part, values)
        return values.astype(dtype, copy=False)

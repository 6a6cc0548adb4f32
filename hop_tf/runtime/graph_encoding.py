"""`GraphEncoding`: the training graph encodes gradients, and decodes their means, on a GPU.

Without it, values of full length cross to the host and back, and the host encodes and decodes them. With int8, a
quarter of the bytes crosses, and the host encodes sums only.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from hop_tf.codecs import Codec
from hop_tf.membership.session import Membership
from hop_tf.ops import build_info
from hop_tf.runtime.ways import Way
from hop_tf.tensors.host import sees_gpu
from hop_tf.tensors.packing import Packing, takes_codec


class GraphEncoding:
    """Encodes the buckets of segments for an all-reduce: see its argument `in_graph`.

    Encoded buckets keep their types, because TensorFlow's queues have fixed types. Buckets are padded to 64 bytes, so
    that encodings are whole values of these types.

    Args:
      codec: A divisible codec.
      parts: For each segment, the packing of its variables.
    """

    def __init__(self, codec: Codec, parts: Sequence[Packing]):
        self._codec = codec
        self._parts = parts

    def emit_encode(self, segment: int, buckets: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """See `Exchange.emit_encode`."""
        return [
            _typed(self._codec.emit_encode(values), values.dtype) if encodes else values
            for values, encodes in zip(buckets, self._encodes(segment), strict=True)
        ]

    def emit_decode(self, segment: int, buckets: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """See `Exchange.emit_decode`."""
        kinds = zip(buckets, self._parts[segment].sizes, self._encodes(segment), strict=True)
        return [
            tf.cast(self._codec.emit_decode(_typed(bucket, tf.uint8), size), bucket.dtype) if encodes else bucket
            for bucket, size, encodes in kinds
        ]

    def sizes(self, segment: int) -> list[int]:
        """See `Exchange.result_sizes`."""
        part = self._parts[segment]
        kinds = zip(part.sizes, part.dtypes, self._encodes(segment), strict=True)
        return [self._codec.num_bytes(size) // dtype.size if encodes else size for size, dtype, encodes in kinds]

    def _encodes(self, segment: int) -> list[bool]:
        part = self._parts[segment]
        kinds = zip(part.sizes, part.dtypes, part.exact, strict=True)
        return [size > 0 and takes_codec(dtype, exact) for size, dtype, exact in kinds]


def find_encoding(membership: Membership, parts: Sequence[Packing], ways: Sequence[Way]) -> GraphEncoding | None:
    """The encoding for an all-reduce of gradients, or None if the host encodes.

    The host encodes if no GPU can do so, and if ranks choose a codec as they go, or keep what it loses. It also does so
    in a world of two, whose mean is never encoded. And it does if a rank may need the means of another one, which may
    have no GPU.

    Args:
      membership: The ranks.
      parts: For each segment, the packing of its variables.
      ways: The ways to average.
    """
    codec = ways[0].codec
    if any(way.codec != codec for way in ways) or not isinstance(codec, Codec):
        return None
    if not codec.is_divisible or codec.error_feedback or not runs_on_gpu():
        return None
    if membership.world_size < 3 or membership.continue_without_lost:
        return None
    return GraphEncoding(codec, parts)


def runs_on_gpu() -> bool:
    """True if TensorFlow runs the operations of `hop_tf.ops` on a GPU."""
    return sees_gpu() and build_info()["cuda"]


def _typed(tensor: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """The bytes of a 1-D tensor, as values of another type."""
    if dtype.size > tensor.dtype.size:
        return tf.bitcast(tf.reshape(tensor, [-1, dtype.size // tensor.dtype.size]), dtype)
    return tf.reshape(tf.bitcast(tensor, dtype), [-1])

"""`GraphEncoding`: the training graph encodes gradients, and decodes their means, on a GPU.

Without it, values of full length cross to the host and back, and the host encodes and decodes them. With int8, a
quarter of the bytes crosses, or half of them on the way back to one of two ranks. The host encodes sums only.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from hop_tf.codecs import Codec
from hop_tf.ops import build_info
from hop_tf.ops.arguments import MAX_VALUES
from hop_tf.runtime.group import ExchangeContext
from hop_tf.runtime.ways import Way
from hop_tf.tensors.bits import with_dtype
from hop_tf.tensors.packing import Packing


class GraphEncoding:
    """Encodes the buckets of segments for an all-reduce: see its argument `in_graph`.

    Encoded buckets keep their types, because TensorFlow's queues have fixed types. Buckets are padded to 64 bytes, so
    that encodings are whole values of these types.

    Args:
      codec: A divisible codec.
      parts: For each segment, the packing of its variables.
      num_encodings: Number of encodings whose mean a result is: 2 in a mesh of two ranks, otherwise 1.
    """

    def __init__(self, codec: Codec, parts: Sequence[Packing], num_encodings: int):
        self._codec = codec
        self._parts = parts
        self._num_encodings = num_encodings

    def emit_encode(self, segment: int, buckets: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """See `Exchange.emit_encode`."""
        return [
            with_dtype(self._codec.emit_encode(values), values.dtype) if encodes else values
            for values, encodes in zip(buckets, self._parts[segment].takes_codec, strict=True)
        ]

    def emit_decode(self, segment: int, buckets: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """See `Exchange.emit_decode`."""
        part = self._parts[segment]
        return [
            self._emit_decode(bucket, size) if encodes else bucket
            for bucket, size, encodes in zip(buckets, part.sizes, part.takes_codec, strict=True)
        ]

    def result_sizes(self, segment: int) -> list[int]:
        """See `Exchange.result_sizes`."""
        part = self._parts[segment]
        return [
            self._num_encodings * self._codec.num_bytes(size) // dtype.size if encodes else size
            for size, dtype, encodes in zip(part.sizes, part.dtypes, part.takes_codec, strict=True)
        ]

    def _emit_decode(self, bucket: tf.Tensor, size: int) -> tf.Tensor:
        data, length = with_dtype(bucket, tf.uint8), self._codec.num_bytes(size)
        if self._num_encodings == 1:
            return tf.cast(self._codec.emit_decode(data, size), bucket.dtype)
        encodings = [data[i * length : (i + 1) * length] for i in range(self._num_encodings)]
        return tf.cast(self._codec.emit_decode_sum(encodings, 1 / self._num_encodings, size), bucket.dtype)


def find_encoding(context: ExchangeContext, parts: Sequence[Packing], ways: Sequence[Way]) -> GraphEncoding | None:
    """The encoding for an all-reduce of gradients, or None if the host encodes.

    The host encodes if the operations do not run on a GPU, and if ranks choose a codec as they go, or keep what it
    loses. It also does so if a rank may need the means of another one, which may have no GPU, and if a bucket is too
    large for one operation.

    Args:
      context: The tools of the exchange.
      parts: For each segment, the packing of its variables.
      ways: The ways to average.
    """
    codec, membership = ways[0].codec, context.membership
    if any(way.codec != codec for way in ways) or not isinstance(codec, Codec):
        return None
    if not codec.is_divisible or codec.error_feedback or not runs_on_gpu(context.trained):
        return None
    if membership.world_size == 1 or membership.continue_without_lost:
        return None
    if max(size for part in parts for size in part.sizes) > MAX_VALUES:
        return None
    is_pair = membership.world_size == 2 and ways[0].algorithm == "mesh"  # Two ranks do not choose an algorithm.
    return GraphEncoding(codec, parts, num_encodings=1 + is_pair)


def runs_on_gpu(variables: Sequence[tf.Variable]) -> bool:
    """True if the operations of `hop_tf.ops` run where these variables are, on a GPU."""
    return any("GPU" in variable.device for variable in variables) and build_info()["cuda"]

"""The encoding of Canary's pieces, in the training graph or outside of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np
import tensorflow as tf

from hop_tf.codecs import Codec, ErrorFeedback, Identity
from hop_tf.collectives.networks import Network
from hop_tf.strategies.canary.layout import Piece
from hop_tf.tensors.bits import with_dtype
from hop_tf.tensors.buffers import BufferPool
from hop_tf.tensors.packing import Packing

# With fewer values, a codec's metadata (such as bucket values) takes more bytes than the codec saves.
_MIN_ENCODED_VALUES = 512


class PieceEncoding:
    """Encodes contributions to pieces, adds them up, and decodes them.

    Args:
      network: The network whose routes pieces take.
      world_size: n.
      parts: The packing of each colayer.
      codec: Encodes float32 values, except values that must stay exact.
      pool: The source of large arrays.

    Attributes:
      sizes: For each colayer and bucket, the number of values.
      starts: For each colayer and bucket, the colayer's start in the vector of all colayers.
      granularity: Vectors should be cut at multiples of this number of values.
      is_encoded: For each colayer and bucket, True if the graph encodes the bucket.
    """

    def __init__(self, network: Network, world_size: int, parts: Sequence[Packing], codec: Codec, pool: BufferPool):
        self._pool = pool
        whole = parts[0]
        takes_codec = [dtype.as_numpy_dtype == np.float32 and not exact for dtype, exact in _kinds(whole)]
        self._dtypes = [dtype.as_numpy_dtype for dtype in whole.dtypes]
        self._identities = [Identity(dtype=dtype) for dtype in self._dtypes]
        self._codecs = [codec if takes else same for takes, same in zip(takes_codec, self._identities, strict=True)]
        self.granularity = max(each.granularity for each in self._codecs)
        self.sizes = [part.sizes for part in parts]
        ends = [list(itertools.accumulate(of_bucket, initial=0)) for of_bucket in zip(*self.sizes, strict=True)]
        *self.starts, totals = zip(*ends, strict=True)
        self._feedback = [
            ErrorFeedback(each, total) if each.error_feedback else None
            for each, total in zip(self._codecs, totals, strict=True)
        ]
        num_routes = len(network.routes(world_size))  # When ranks leave, there are fewer.
        self.is_encoded = [
            [
                each.encodes_in_graph and not each.error_feedback and size >= num_routes * _MIN_ENCODED_VALUES
                for each, size in zip(self._codecs, of_colayer, strict=True)
            ]
            for of_colayer in self.sizes
        ]

    def emit_encode(self, colayer: int, buckets: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Emits the ops that encode the buckets of a colayer for which `is_encoded` is True, each as a whole.

        Encoded buckets keep their types, because TensorFlow's queues have fixed types. The encoded bytes are padded to
        whole values.
        """
        return [
            with_dtype(codec.emit_encode(values), values.dtype) if encodes else values
            for codec, values, encodes in zip(self._codecs, buckets, self.is_encoded[colayer], strict=True)
        ]

    def cut(self, piece: Piece, bucket: np.ndarray, share: float) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Returns a piece of a colayer's bucket times a share: values and None, or None and the encoded bytes."""
        where = self._within(piece)
        if self.is_encoded[piece.colayer][piece.bucket]:
            return None, self._codecs[piece.bucket].part(bucket.view(np.uint8), where, share, self._pool)
        return bucket[where] * bucket.dtype.type(share), None

    def add_own(self, piece: Piece, bucket: np.ndarray, total: np.ndarray) -> None:
        """Adds a piece of a colayer's bucket to `total`, at full size.

        The piece stands in for the mean until the mean comes.
        """
        where = self._within(piece)
        if self.is_encoded[piece.colayer][piece.bucket]:
            self._codecs[piece.bucket].accumulate_part(bucket.view(np.uint8), where, total)
        else:
            np.add(total, bucket[where], out=total)

    def _within(self, piece: Piece) -> slice:
        """A piece's slice of its colayer's bucket."""
        start = self.starts[piece.colayer][piece.bucket]
        return slice(piece.where.start - start, piece.where.stop - start)

    def add(
        self,
        piece: Piece,
        total: np.ndarray | None,
        *,
        values: np.ndarray | None = None,
        data: np.ndarray | None = None,
    ) -> np.ndarray:
        """Adds a contribution, given as values or encoded, to the sum of a piece.

        Args:
          piece: The piece.
          total: The sum so far, which this call may modify. None if nothing has arrived.
          values: The contribution. The sum may reuse this array, so the caller must not write to it.
          data: The contribution, encoded.

        Returns:
          The new sum.
        """
        if values is None:
            total = self.zeros(piece) if total is None else total
            self._codec_of(piece).accumulate(data, total)
            return total
        return values if total is None else np.add(total, values, out=total)

    def encode(self, piece: Piece, values: np.ndarray) -> np.ndarray:
        """Encodes values of a piece."""
        codec, feedback = self._codec_of(piece), self._feedback[piece.bucket]
        if feedback is None or codec is self._identities[piece.bucket]:
            return codec.encode(values, self._pool)
        return feedback.encode(values, piece.where, self._pool)

    def accumulate(self, piece: Piece, data: np.ndarray, total: np.ndarray) -> None:
        """Decodes values of a piece and adds them to `total`."""
        self._codec_of(piece).accumulate(data, total)

    def zeros(self, piece: Piece) -> np.ndarray:
        """A new sum of a piece, filled with zeros."""
        size, dtype = piece.where.stop - piece.where.start, self.dtype_of(piece)
        total = self._pool.take(size * dtype.itemsize).view(dtype)
        total.fill(0)
        return total

    def dtype_of(self, piece: Piece) -> np.dtype:
        """The type of a piece's values."""
        return np.dtype(self._dtypes[piece.bucket])

    def _codec_of(self, piece: Piece) -> Codec:
        is_small = piece.where.stop - piece.where.start < _MIN_ENCODED_VALUES
        return (self._identities if is_small else self._codecs)[piece.bucket]


def _kinds(packing: Packing) -> Iterable:
    return zip(packing.dtypes, packing.exact, strict=True)

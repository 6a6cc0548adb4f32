"""Tests of the encoding of Canary's pieces."""

import numpy as np
import tensorflow as tf

from hop_tf import codecs
from hop_tf.collectives import get_network
from hop_tf.strategies.canary.encoding import PieceEncoding
from hop_tf.strategies.canary.layout import Layout
from hop_tf.tensors.buffers import BufferPool
from hop_tf.tensors.packing import Packing, TensorSpec

_WORLD_SIZE = 3
_SPECS = [
    TensorSpec("a", (3200,), tf.float32),
    TensorSpec("b", (3200,), tf.float32, exact=True),
    TensorSpec("c", (3200,), tf.float64),
    TensorSpec("d", (4800,), tf.float32),
    TensorSpec("e", (1600,), tf.float32, exact=True),
]


class PieceEncodingTest(tf.test.TestCase):
    def test_each_bucket_of_each_colayer(self):
        """Buckets that must stay exact, and buckets of other types than float32, are sent unencoded."""
        rng, packing, network = np.random.default_rng(0), Packing(_SPECS), get_network("mesh")
        parts = [packing.part(members) for members in ([0, 1], [2, 3, 4])]
        encoding = PieceEncoding(network, _WORLD_SIZE, parts, codecs.QuantileSketch(), BufferPool())
        self.assertEqual(encoding.is_encoded, [[True, False, False]] * 2)
        layout = Layout(b"\x01" * _WORLD_SIZE, network, 0, encoding.sizes, encoding.granularity)
        for colayer, part in enumerate(parts):
            dtypes = [dtype.as_numpy_dtype for dtype in part.dtypes]
            values = [rng.normal(size=size).astype(dtype) for size, dtype in zip(part.sizes, dtypes, strict=True)]
            buckets = [each.numpy() for each in encoding.emit_encode(colayer, list(map(tf.constant, values)))]
            for piece in layout.by_colayer[colayer]:
                start = encoding.starts[colayer][piece.bucket]
                expected = values[piece.bucket][piece.where.start - start : piece.where.stop - start] / 3
                found, data = encoding.cut(piece, buckets[piece.bucket], 1 / 3)
                total = encoding.add(piece, None, values=found, data=data)
                total = encoding.add(piece, total, values=found, data=data)
                sent = encoding.encode(piece, total)
                decoded = np.zeros(expected.size, encoding.dtype_of(piece))
                encoding.accumulate(piece, sent, decoded)
                lost = np.linalg.norm(decoded - 2 * expected) / np.linalg.norm(2 * expected)
                is_exact = expected.dtype != np.float32 or part.exact[piece.bucket]
                self.assertBetween(lost, 0 if is_exact else 1e-4, 1e-6 if is_exact else 3e-2)
                own = encoding.zeros(piece)
                encoding.add_own(piece, buckets[piece.bucket], own)
                lost = np.linalg.norm(own - 3 * expected) / np.linalg.norm(3 * expected)
                self.assertLess(lost, 1e-6 if is_exact else 3e-2)

    def test_error_feedback(self):
        """Each message also carries the error of the previous one."""
        parts, network = [Packing([TensorSpec("a", (3000,), tf.float32)])], get_network("mesh")
        values, found = np.random.default_rng(0).normal(size=1008).astype(np.float32), {}
        for feedback in (False, True):
            codec = codecs.QuantileSketch(error_feedback=feedback)
            encoding = PieceEncoding(network, _WORLD_SIZE, parts, codec, BufferPool())
            layout = Layout(b"\x01" * _WORLD_SIZE, network, 0, encoding.sizes, encoding.granularity)
            piece = layout.pieces[0]
            values, found[feedback] = values[: piece.where.stop], np.zeros(piece.where.stop, np.float32)
            for _ in range(50):
                encoding.accumulate(piece, encoding.encode(piece, values.copy()), found[feedback])
        lost = {feedback: np.linalg.norm(each / 50 - values) for feedback, each in found.items()}
        self.assertLess(lost[True], lost[False] / 3)


if __name__ == "__main__":
    tf.test.main()

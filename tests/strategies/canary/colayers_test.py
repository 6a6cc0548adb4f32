"""Tests of bundling variables into colayers."""

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from hop_tf.strategies.canary.colayers import bundle, num_bytes
from hop_tf.tensors.packing import TensorSpec


def _specs(*shapes, exact=()):
    return [TensorSpec(str(index), shape, tf.float32, exact=index in exact) for index, shape in enumerate(shapes)]


_CONVOLUTIONS = ((3, 3, 3, 64), (64,), (3, 3, 64, 64), (64,), (3, 3, 64, 128), (128,))
_DENSE = ((512, 4096), (4096,), (4096, 4096), (4096,), (4096, 10), (10,))


class BundleTest(tf.test.TestCase, parameterized.TestCase):
    def test_by_kind_the_last_layer_first(self):
        self.assertEqual(bundle(_specs(*_CONVOLUTIONS, *_DENSE), 2), [[11, 10, 9, 8, 7, 6], [5, 4, 3, 2, 1, 0]])

    def test_then_by_bytes(self):
        """The largest kernel is cut off from the rest, and the convolutions stay together."""
        self.assertEqual(bundle(_specs(*_CONVOLUTIONS, *_DENSE), 3)[-1], [5, 4, 3, 2, 1, 0])
        sizes = [num_bytes(_specs(*_DENSE), colayer) for colayer in bundle(_specs(*_DENSE), 3)]
        self.assertGreaterEqual(max(sizes), 4 * 4096 * 4096)
        self.assertLess(max(sizes), 1.01 * 4 * 4096 * 4096)

    def test_vectors_stay_with_their_kernel(self):
        """With any number of colayers, a bias never gets its own, because its message would carry too little."""
        specs = _specs((4,), (9, 4), (4,), (4, 2), (2,), (2,))
        self.assertEqual(bundle(specs, 10), [[5, 4, 3], [2, 1], [0]])

    def test_fewer_than_kinds(self):
        specs = _specs((3, 3, 1, 1), (4, 4), (3, 3, 1, 1), (4, 4), (100, 100))
        self.assertEqual(bundle(specs, 1), [[4, 3, 2, 1, 0]])
        self.assertEqual(bundle(specs, 2), [[4, 3], [2, 1, 0]])

    def test_by_default_none_is_small(self):
        """A message of few bytes costs more than it carries."""
        self.assertEqual(bundle(_specs((4, 4), (4,), (4, 4), (4,)), None), [[3, 2, 1, 0]])
        self.assertEqual(
            bundle(_specs((784, 512), (512,), (512, 256), (256,), (256, 10), (10,)), None), [[5, 4, 3, 2], [1, 0]]
        )
        self.assertLen(bundle(_specs(*[(256, 256)] * 9), None), 9)
        # Convolutions and dense layers stay apart, unless there is next to nothing of one kind.
        specs = _specs((3, 3, 1, 32), (32,), (3, 3, 32, 32), (32,), (800, 64), (64,), (64, 10), (10,))
        self.assertEqual(bundle(specs, None), [[7, 6, 5, 4], [3, 2, 1, 0]])
        self.assertEqual(bundle(specs[:4] + specs[6:], None), [[5, 4, 3, 2, 1, 0]])
        # Only the small colayer is joined, with the smaller of its neighbors.
        specs = _specs((512, 512), (512, 512), (8, 8), (1024, 1024), (1024, 1024))
        self.assertEqual(bundle(specs, None), [[4], [3], [2, 1], [0]])
        self.assertLen(bundle(_specs(*[(256, 256)] * 12), None), 10)
        self.assertLen(bundle(_specs(*[(256, 255)] * 8), None), 4)

    def test_what_is_carried_comes_last(self):
        self.assertEqual(bundle(_specs((4, 4), (4,), (4,), exact=(1, 2)), 2), [[0, 1, 2]])
        self.assertEqual(bundle(_specs((4,), (4, 4), (4,), exact=(0,)), 9), [[2, 1, 0]])
        self.assertEqual(bundle(_specs((4,), exact=(0,)), 9), [[0]])
        self.assertEqual(bundle(_specs((4, 4), (4,), (4, 4), (4,), exact=(1, 3)), 2), [[2], [0, 1, 3]])

    def test_invariants(self):
        rng = np.random.default_rng(0)
        for _ in range(100):
            shapes = [tuple(rng.integers(1, 9, size=rng.integers(1, 5))) for _ in range(rng.integers(1, 12))]
            specs, most = _specs(*shapes), int(rng.integers(1, 15))
            colayers = bundle(specs, most)
            num_kernels = sum(len(shape) > 1 for shape in shapes)
            self.assertLen(colayers, min(most, num_kernels + (len(shapes[0]) < 2)))
            self.assertEqual([index for colayer in colayers for index in colayer], list(range(len(specs)))[::-1])
            self.assertNotIn([], colayers)


if __name__ == "__main__":
    tf.test.main()

"""Products with a few vectors, with and without the native kernels, against NumPy in float64."""

import contextlib
from unittest import mock

import numpy as np
import tensorflow as tf
from absl.testing import absltest, parameterized

from hop_tf.ops import low_rank, native

_SIZES = ((1, 1), (5, 3), (16, 33), (131, 64), (300, 1000))


def _implementation(is_native):
    return contextlib.nullcontext() if is_native else mock.patch.object(native, "kernels", lambda: None)


class LowRankTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.product(is_native=(True, False), size=_SIZES, rank=(1, 4, 7))
    def test_products(self, is_native, size, rank):
        rng = np.random.default_rng(sum(size))
        matrix = rng.normal(size=size).astype(np.float32)
        left, right = (rng.normal(size=(rank, number)).astype(np.float32) for number in size)
        with _implementation(is_native):
            times, timed = low_rank.times_vectors(matrix, right), low_rank.vectors_times(left, matrix)
            total = matrix.copy()
            low_rank.add_product(left, right, total, scale=-0.5)
        exact = matrix.astype(np.float64)
        self.assertAllClose(times, right @ exact.T, rtol=1e-4, atol=1e-4)
        self.assertAllClose(timed, left @ exact, rtol=1e-4, atol=1e-4)
        self.assertAllClose(total, exact - 0.5 * left.T @ right, rtol=1e-4, atol=1e-4)
        self.assertEqual((times.dtype, timed.dtype, total.dtype), (np.float32,) * 3)

    @parameterized.product(is_native=(True, False), size=(4, 17, 1000))
    def test_orthonormal_vectors_span_the_same_space(self, is_native, size):
        vectors = np.random.default_rng(size).normal(size=(4, size)).astype(np.float32)
        vectors[1] += 1000 * vectors[0]  # Nearly parallel.
        found = vectors.copy()
        with _implementation(is_native):
            low_rank.orthonormalize(found)
        self.assertAllClose(found @ found.T, np.eye(4), atol=1e-5)
        self.assertAllClose((vectors @ found.T) @ found, vectors, rtol=1e-3, atol=1e-2)

    @parameterized.product(is_native=(True, False), scale=(1e-38, 1e-20, 1e18))
    def test_vectors_may_be_tiny_or_large(self, is_native, scale):
        vectors = scale * np.random.default_rng(0).normal(size=(3, 50)).astype(np.float32)
        with _implementation(is_native):
            low_rank.orthonormalize(vectors)
        self.assertAllClose(vectors @ vectors.T, np.eye(3), atol=1e-5)

    @parameterized.parameters(True, False)
    def test_others_take_the_place_of_vectors_that_depend_on_earlier_ones(self, is_native):
        """Zeros, multiples, and more vectors than dimensions."""
        vectors = np.array([[0, 0, 0], [3, 4, 0], [-6, -8, 0], [5, 6, 7]], np.float32)
        with _implementation(is_native):
            low_rank.orthonormalize(vectors)
        self.assertAllClose(vectors[:3] @ vectors[:3].T, np.eye(3), atol=1e-6)
        self.assertAllEqual(vectors[3], [0, 0, 0])


if __name__ == "__main__":
    absltest.main()

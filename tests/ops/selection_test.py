"""The selection of values of large magnitude, with and without the native kernels."""

from __future__ import annotations

from unittest import mock

import hypothesis
import numpy as np
import tensorflow as tf
from absl.testing import parameterized
from hypothesis import strategies as st

from hop_tf.ops import native, selection

_TYPES = (np.float32, np.float64, np.float16, tf.bfloat16.as_numpy_dtype)


def _in_numpy(values, bound):
    with mock.patch.object(native, "kernels", lambda: None):
        return selection.reaching(values, bound)


class SelectionTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.product(dtype=_TYPES, size=(0, 1, 15, 16, 17, 1000, 131_072, 131_073, 300_001))
    def test_selects_by_magnitude(self, dtype, size):
        values = np.random.default_rng(size).standard_normal(size).astype(dtype)
        values[7::11] = 0
        values[3::13] = -0.0
        for least in (0.001, 0.5, 2.6):
            bound = int(selection.magnitudes(np.array([least], dtype))[0])
            expected = np.flatnonzero(np.abs(values) >= dtype(least))
            for found in (selection.reaching(values, bound), _in_numpy(values, bound)):
                self.assertAllEqual(found, expected)
                self.assertEqual(found.dtype, np.int64)
        self.assertAllEqual(selection.reaching(values, 1), np.flatnonzero(values))

    @parameterized.parameters(*_TYPES)
    def test_nan_is_the_largest(self, dtype):
        values = np.array([1, np.nan, -np.inf, 2, -np.nan, np.inf] * 9, dtype)
        bound = int(selection.magnitudes(np.array([np.inf], dtype))[0])
        self.assertAllEqual(selection.reaching(values, bound + 1), np.flatnonzero(np.isnan(values)))
        self.assertAllEqual(selection.reaching(values, bound), np.flatnonzero(~np.isfinite(values)))

    @hypothesis.settings(deadline=None)
    @hypothesis.given(
        st.binary(max_size=800), st.sampled_from((np.float16, np.float32, np.float64)), st.integers(1, 2**15 - 1)
    )
    def test_native_and_numpy_agree(self, data, dtype, bound):
        values = np.frombuffer(data, dtype, len(data) // np.dtype(dtype).itemsize)
        bound <<= 8 * np.dtype(dtype).itemsize - 16  # From small magnitudes to nan.
        self.assertAllEqual(selection.reaching(values, bound), _in_numpy(values, bound))

    def test_strided(self):
        values = np.arange(-50, 50, dtype=np.float32)[::-3]
        bound = int(selection.magnitudes(np.array([20], np.float32))[0])
        self.assertAllEqual(selection.reaching(values, bound), np.flatnonzero(np.abs(values) >= 20))

    def test_refuses_bounds_out_of_range(self):
        for bound in (0, -1, 2**31):
            with self.assertRaises(ValueError):
                selection.reaching(np.ones(3, np.float32), bound)


if __name__ == "__main__":
    tf.test.main()

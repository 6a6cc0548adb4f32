"""Tests of `weighted_differences` against NumPy."""

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from hop_tf.strategies.hop import arithmetic
from hop_tf.strategies.hop.arithmetic import weighted_differences

_BLOCK = arithmetic._BLOCK_ELEMENTS
_BFLOAT16 = tf.bfloat16.as_numpy_dtype
_WEIGHTS = (0.5, 0.3, 0.125)


def _arrays(size, dtype, seed=0):
    """Returns an own array, and one for each weight."""
    rng = np.random.default_rng(seed)
    own, *others = rng.normal(size=(1 + len(_WEIGHTS), size)).astype(dtype)
    return own, others


def _reference(own, others, weights):
    """Returns the formula's result in float64."""
    own = own.astype(np.float64)
    return sum((w * (other.astype(np.float64) - own) for w, other in zip(weights, others, strict=True)), 0.0 * own)


class WeightedDifferencesTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.product(
        dtype_and_tolerance=((np.float32, 1e-6), (np.float64, 1e-14), (np.float16, 1e-3), (_BFLOAT16, 1e-2)),
        size=(0, 1, 17, _BLOCK - 1, _BLOCK, _BLOCK + 1, 3 * _BLOCK + 5),
    )
    def test_equals_the_formula(self, dtype_and_tolerance, size):
        dtype, tolerance = dtype_and_tolerance
        own, others = _arrays(size, dtype)
        out = np.full(size, np.nan, dtype)
        weighted_differences(own, others, _WEIGHTS, out=out)
        expected = _reference(own, others, _WEIGHTS)
        self.assertAllClose(out.astype(np.float64), expected, rtol=tolerance, atol=tolerance)

    @parameterized.named_parameters(("float16", np.float16, 2048), ("bfloat16", _BFLOAT16, 256))
    def test_narrow_types_are_summed_in_float32(self, dtype, large):
        """In the narrow type itself, large + 1 would be large again."""
        others = [np.full(4, value, dtype) for value in (large, 1, 1)]
        out = np.empty(4, dtype)
        weighted_differences(np.zeros(4, dtype), others, [1.0, 1.0, 1.0], out=out)
        self.assertAllEqual(out.astype(np.float64), np.full(4, large + 2.0))

    def test_nobody_else_means_no_change(self):
        out = np.full(5, np.nan, np.float32)
        weighted_differences(np.ones(5, np.float32), [], [], out=out)
        self.assertAllEqual(out, np.zeros(5))

    def test_equal_arrays_differ_by_exactly_nothing(self):
        """The rounding of the weights must not move a consensus: 3 * (1 / 3) x is not always x."""
        own, _ = _arrays(_BLOCK + 3, np.float32)
        out = np.empty_like(own)
        weighted_differences(own, [own, own.copy(), own.copy()], [1 / 3, 1 / 3, 1 / 3], out=out)
        self.assertAllEqual(out, np.zeros_like(own))

    def test_operands_are_only_read(self):
        own, others = _arrays(_BLOCK + 1, np.float32)
        for array in (own, *others):
            array.flags.writeable = False
        weighted_differences(own, others, _WEIGHTS, out=np.empty_like(own))

    def test_every_array_needs_a_weight(self):
        own, others = _arrays(4, np.float32)
        with self.assertRaises(ValueError):
            weighted_differences(own, others, _WEIGHTS[:-1], out=np.empty_like(own))


if __name__ == "__main__":
    tf.test.main()

"""Tests of the check for numbers."""

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from hop_tf.tensors.finite import are_finite


class FiniteTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        ([1.0, -3e38], True), ([1.0, np.nan], False), ([np.inf, 1.0], False), ([-np.inf, 1.0], False), ([], True)
    )
    def test_one_value_is_enough(self, values, expected):
        tensors = [tf.constant([7], tf.int32), tf.constant(values, tf.float32), tf.zeros([3], tf.float64)]
        self.assertEqual(bool(are_finite(tensors)), expected)
        self.assertEqual(bool(tf.function(are_finite)(tensors)), expected)

    def test_integers_are(self):
        self.assertTrue(are_finite([tf.constant([7])]))


if __name__ == "__main__":
    tf.test.main()

"""Tests of the descriptions of optimizers that ranks compare."""

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from hop_tf.runtime.replica_state import describe_optimizer


class _Custom(keras.optimizers.SGD):
    def __init__(self, weights):
        super().__init__(0.5)
        self._weights = weights

    def get_config(self):
        return {**super().get_config(), "weights": self._weights, "bounds": (0.25, 4)}


class DescribeOptimizerTest(tf.test.TestCase, parameterized.TestCase):
    def test_class_and_settings(self):
        description = describe_optimizer(keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=1.0))
        self.assertStartsWith(description, "SGD(clipnorm=1.0, ")
        for setting in ("learning_rate=0.1", "momentum=0.9", "nesterov=False"):
            self.assertIn(setting, description)
        self.assertNotIn("None", description)

    @parameterized.parameters(
        lambda: keras.optimizers.SGD(0.1),
        lambda: keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.1, 100)),
        lambda: keras.optimizers.Adam(lambda: 0.1),
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.AdamW(0.1)),
        lambda: _Custom(np.zeros(2)),
    )
    def test_of_one_that_is_made_alike(self, make):
        """Also if Keras gives the optimizer another name, and if a value in it has no description."""
        self.assertEqual(describe_optimizer(make()), describe_optimizer(make()))

    @parameterized.parameters(
        (keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.10001)),
        (keras.optimizers.SGD(0.1), keras.optimizers.Adam(0.1)),
        (keras.optimizers.SGD(0.1, nesterov=True), keras.optimizers.SGD(0.1)),
        (keras.optimizers.SGD(0.1, weight_decay=1e-4), keras.optimizers.SGD(0.1)),
        (
            keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 100)),
            keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 200)),
        ),
        (
            keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)),
            keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.2)),
        ),
    )
    def test_of_others(self, one, other):
        self.assertNotEqual(describe_optimizer(one), describe_optimizer(other))

    def test_numbers_of_any_kind(self):
        self.assertIn("bounds=[0.25, 4]", describe_optimizer(_Custom(None)))


if __name__ == "__main__":
    tf.test.main()

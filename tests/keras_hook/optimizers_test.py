"""Tests of what optimizers are told apart by."""

import keras
import tensorflow as tf
from absl.testing import parameterized

from hop_tf.keras_hook.optimizers import is_adaptive

_ADAPTIVE = ("Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Lamb", "Lion", "Muon", "Nadam", "RMSprop")


class _Derived(keras.optimizers.Adam):
    """An optimizer of a program."""


class AdaptiveTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(*_ADAPTIVE)
    def test_adaptive(self, name):
        if not hasattr(keras.optimizers, name):
            self.skipTest(f"Keras {keras.__version__} has no {name}.")
        self.assertTrue(is_adaptive(getattr(keras.optimizers, name)()))

    def test_derived_or_within_another(self):
        self.assertTrue(is_adaptive(_Derived()))
        self.assertTrue(is_adaptive(keras.optimizers.LossScaleOptimizer(keras.optimizers.AdamW())))

    @parameterized.parameters(keras.optimizers.SGD, keras.optimizers.Ftrl)
    def test_others(self, make_optimizer):
        self.assertFalse(is_adaptive(make_optimizer()))
        self.assertFalse(is_adaptive(keras.optimizers.LossScaleOptimizer(make_optimizer())))


if __name__ == "__main__":
    tf.test.main()

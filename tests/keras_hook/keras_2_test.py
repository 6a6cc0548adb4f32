"""Models of Keras 2, as `tf.keras` has them with TF_USE_LEGACY_KERAS=1, are refused: ranks would begin differently."""

import functools
import importlib.util
import unittest

import numpy as np
import tensorflow as tf
from absl.testing import absltest, parameterized

import hop_tf

_REFUSAL = "must be of Keras 3. Unset TF_USE_LEGACY_KERAS"


def _update(strategy, factor=1.0):
    return factor


class Keras2Test(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.strategy = hop_tf.PipeSGDStrategy()
        self.addCleanup(self.strategy.shutdown)

    @parameterized.parameters(_update, functools.partial(_update, factor=2.0))
    def test_an_update_from_its_module_is_refused(self, update):
        """Optimizers of Keras 2 call `merge_call` with such a function, or with a partial of one."""
        function = getattr(update, "func", update)
        module, function.__module__ = function.__module__, "tf_keras.src.optimizers.optimizer"
        self.addCleanup(setattr, function, "__module__", module)
        with self.assertRaisesRegex(ValueError, f"{_REFUSAL}.*Received: an update that calls _update of tf_keras"):
            self.strategy.run(lambda: tf.distribute.get_replica_context().merge_call(update))

    def test_other_merge_calls_are_not(self):
        self.assertEqual(self.strategy.run(lambda: tf.distribute.get_replica_context().merge_call(_update)), 1.0)

    @unittest.skipIf(importlib.util.find_spec("tf_keras") is None, "needs the package tf_keras")
    @parameterized.parameters("SGD", "legacy.SGD")
    def test_fit(self, name):
        import tf_keras

        with self.strategy.scope():
            model = tf_keras.Sequential([tf_keras.layers.Dense(1)])
            model.compile(functools.reduce(getattr, name.split("."), tf_keras.optimizers)(0.1), "mse")
        with self.assertRaisesRegex(ValueError, _REFUSAL):
            model.fit(np.ones((8, 2), "float32"), np.ones((8, 1), "float32"), verbose=0)


if __name__ == "__main__":
    absltest.main()

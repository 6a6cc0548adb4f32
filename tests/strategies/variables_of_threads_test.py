"""Tests that communication threads leave variables alone: these belong to the training graph."""

import threading
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import absltest, parameterized
from tensorflow.python.ops import resource_variable_ops

from support import MEMBERS

_VARIABLE = resource_variable_ops.ResourceVariable
_ACCESSES = ("assign", "assign_add", "assign_sub", "read_value", "value", "numpy")


def _noting(name, seen):
    """Returns a patch of a method of variables, which notes calls on communication threads."""
    method = getattr(_VARIABLE, name)

    def noting(self, *args, **kwargs):
        thread = threading.current_thread().name
        if thread.startswith("hop_tf exchange"):
            seen.add((name, self.name, thread))
        return method(self, *args, **kwargs)

    return mock.patch.object(_VARIABLE, name, noting)


def _fit(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.BatchNormalization()])
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
    rows = np.ones((48, 4), np.float32), np.ones((48, 3), np.float32)
    model.fit(*rows, batch_size=8, epochs=2, verbose=0)
    strategy.synchronize(model)


class VariablesOfThreadsTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(*MEMBERS)
    @pytest.mark.slow(after=1)
    def test_a_thread_touches_no_variable(self, name):
        seen = set()
        patches = [_noting(access, seen) for access in _ACCESSES]
        for patch in patches:
            patch.start()
            self.addCleanup(patch.stop)
        MEMBERS[name].run(_fit)
        self.assertEmpty(seen)

    def test_an_access_is_seen(self):
        variable, seen = tf.Variable(0.0), set()
        with _noting("assign", seen):
            thread = threading.Thread(target=lambda: variable.assign(1.0), name="hop_tf exchange test")
            thread.start()
            thread.join()
        self.assertLen(seen, 1)


if __name__ == "__main__":
    absltest.main()

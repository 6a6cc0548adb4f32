"""Tests that training warns if ranks train on different data."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from support import MEMBERS

_NUM_ROWS, _BATCH_SIZE = 32, 8
_WARNING = "rank 1 trains on other data than rank 0"
_X = np.arange(_NUM_ROWS, dtype=np.float32).reshape(-1, 1) / _NUM_ROWS


def _arrays(rank, *, is_alike):
    return {"x": _X, "y": _X if is_alike else _X + rank, "batch_size": _BATCH_SIZE}


def _shuffled(rank, *, is_alike):
    dataset = tf.data.Dataset.from_tensor_slices((_X, _X)).shuffle(_NUM_ROWS, seed=0 if is_alike else rank)
    return {"x": dataset.batch(_BATCH_SIZE)}


def _augmented(rank, *, is_alike):
    """Inputs differ by rank. The targets are alike with `is_alike`; otherwise there are none."""
    inputs = tf.data.Dataset.from_tensor_slices(_X + rank)
    dataset = tf.data.Dataset.zip(inputs, tf.data.Dataset.from_tensor_slices(_X)) if is_alike else inputs
    return {"x": dataset.batch(_BATCH_SIZE)}


class Model(keras.Sequential):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return tf.reduce_mean(tf.square(y_pred - x))


class FirstBatchesTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.product(make=[_arrays, _shuffled, _augmented], is_alike=[False, True])
    @pytest.mark.stress(after=1)
    @pytest.mark.slow(after=1)
    def test_other_data_are_noticed(self, make, is_alike):
        def run(strategy):
            with strategy.scope():
                model = Model([keras.Input((1,)), keras.layers.Dense(1)])
                model.compile("sgd")
            for _ in range(2):
                model.fit(**make(strategy.rank, is_alike=is_alike), epochs=2, verbose=0)

        with self.assertLogs(level="WARNING") as logs:
            tf.get_logger().warning("There is one warning at least.")
            MEMBERS["pipe_sgd"].run(run)
        # Once in each fit, and not in each epoch.
        self.assertEqual(sum(_WARNING in line for line in logs.output), 0 if is_alike else 2)


if __name__ == "__main__":
    tf.test.main()

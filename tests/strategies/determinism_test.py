"""Tests of op determinism: two runs of a program are equal to the bit, in whatever order ranks come to their steps."""

import os
import tempfile
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import absltest, parameterized
from tensorflow.python.framework import config

import hop_tf
from hop_tf.records import Kind
from hop_tf.records.log import read_job
from hop_tf.tools.emulation import ComputeEmulation
from hop_tf.tools.testing import InProcessCluster
from support import MEMBERS, TWO_DEVICES

_NUM_ROWS = 60
_BATCH_SIZE = 15  # Ranks have unequal numbers of rows.
_EPOCHS = 2

# Strategies whose ranks wait for each other, each with its number of ranks.
_CASES = {
    "pipe_sgd": (hop_tf.PipeSGDStrategy, {}, 3),
    "shat": (hop_tf.SHATParameterServerStrategy, {"consistency": "bsp"}, 3),
    "pipe_sgd_ring": (hop_tf.PipeSGDStrategy, {"pipeline_width": 1, "algorithm": "ring"}, 3),
    "pipe_sgd_devices": (hop_tf.PipeSGDStrategy, {"devices": TWO_DEVICES}, 2),
    "dts": (hop_tf.DTSStrategy, {}, 3),
    "canary_shares": (hop_tf.CanaryStrategy, {"consistency": "bsp", "batch_shares": [3, 1]}, 2),
    "canary_tree": (hop_tf.CanaryStrategy, {"consistency": "bsp", "algorithm": "tree:1"}, 3),
}


class Uneven(keras.callbacks.Callback):
    """Computes something before some steps, so that the order of ranks differs between runs."""

    def __init__(self, number):
        super().__init__()
        self._number = number

    def on_train_batch_begin(self, batch, logs=None):
        if (batch + self._number) % 3 == 0:
            np.linalg.svd(np.ones((150, 150)))


def _model():
    dense = keras.layers.Dense(16, kernel_initializer=keras.initializers.GlorotUniform(1))
    return keras.Sequential([dense, keras.layers.BatchNormalization(), keras.layers.Dropout(0.3, seed=3)])


def _rows():
    generator = np.random.default_rng(0)
    return generator.normal(size=(_NUM_ROWS, 24)).astype(np.float32), generator.normal(size=(_NUM_ROWS, 16))


def _train(strategy, run=0):
    with strategy.scope():
        model = _model()
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    callback = Uneven((run + 1) * strategy.rank)
    history = model.fit(*_rows(), batch_size=_BATCH_SIZE, epochs=_EPOCHS, callbacks=[callback], verbose=0).history
    return [weight.numpy() for weight in model.weights], history


class DeterminismTest(tf.test.TestCase, parameterized.TestCase):
    def setUp(self):
        super().setUp()
        tf.config.experimental.enable_op_determinism()
        self.addCleanup(config.disable_op_determinism)
        keras.utils.set_random_seed(0)  # Operations without a seed raise.

    @parameterized.parameters(sorted(_CASES, key=list(_CASES).index))
    @pytest.mark.slow
    @pytest.mark.stress(after=1)
    def test_two_runs_are_equal_to_the_bit(self, name):
        make, settings, num_ranks = _CASES[name]

        def make_strategy(cluster_resolver):
            return make(cluster_resolver=cluster_resolver, **settings)

        def run(number):
            keras.utils.set_random_seed(0)
            cluster = InProcessCluster(num_ranks, make_strategy, num_ps=int(name == "shat"))
            return cluster.run(lambda strategy: _train(strategy, number))

        first, second = run(0), run(1)
        tf.nest.map_structure(self.assertAllEqual, first, second)  # With History.

    @pytest.mark.slow
    def test_times_are_not_taken(self):
        folder = self.enterContext(tempfile.TemporaryDirectory())

        def run(strategy):
            _train(strategy)
            return strategy.report(), strategy.latest_step_seconds()

        num_steps = _EPOCHS * _NUM_ROWS // _BATCH_SIZE
        for report, seconds in MEMBERS["pipe_sgd"].run(run, hop_tf.CommunicationOptions(log_dir=folder)):
            self.assertEqual(report["steps"], num_steps)
            self.assertEqual((report["wait_seconds"], report["compute_seconds"], len(seconds)), (0.0, 0.0, 0))
        for rank in read_job(folder).ranks:
            self.assertLen(rank.of_kind(Kind.STEP), num_steps)
            self.assertEmpty(rank.of_kind(Kind.COMPUTE))

    def test_measured_shares_are_refused(self):
        with self.assertRaisesRegex(ValueError, "`batch_shares` must be None or a list with .*Received: .*'auto'"):
            MEMBERS["hop"].run(_train, batch_shares="auto")

    def test_emulated_compute_is_refused(self):
        with (
            mock.patch.dict(os.environ, ComputeEmulation(step_seconds=0.001).to_environment()),
            self.assertRaisesRegex(ValueError, "emulated compute .* must be off with"),
        ):
            MEMBERS["pipe_sgd"].run(_train)


if __name__ == "__main__":
    absltest.main()

"""Tests that the simulation for accuracies ends with the same weights as `fit` under `DTSStrategy`."""

import dts_simulation
import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import hop_tf
from hop_tf import codecs
from hop_tf.tools.testing import InProcessCluster

_WORLD_SIZE = 2
_BATCH_SIZE = 8
_NUM_STEPS = 21


def _data():
    random = np.random.default_rng(0)
    x = random.normal(size=(_BATCH_SIZE * _NUM_STEPS, 3)).astype(np.float32)
    return x + np.arange(_BATCH_SIZE * _NUM_STEPS, dtype=np.float32)[:, None] % _BATCH_SIZE, x @ np.ones((3, 2), "f")


def _model():
    layers = [
        keras.layers.BatchNormalization(momentum=0.9),
        keras.layers.Dense(4, activation="relu", kernel_initializer=keras.initializers.GlorotUniform(1)),
        keras.layers.Dense(2, kernel_initializer=keras.initializers.GlorotUniform(2)),
    ]
    return keras.Sequential([keras.Input((3,)), *layers])


def _optimizer():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.02, decay_steps=10, decay_rate=0.5)
    return keras.optimizers.SGD(schedule, momentum=0.9)


class SimulationTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        (2, 1, codecs.TopK(ratio=0.2)), (5, 3, None), (4, 4, None), (1, 1, None), (5, 3, None, "momentum")
    )
    @pytest.mark.stress
    def test_equals_fit(self, delay, interval, codec, compensation="gentle"):
        x, y = _data()

        def run(strategy):
            with strategy.scope():
                model = _model()
                model.compile(_optimizer(), "mse")
            model.fit(x, y, batch_size=_BATCH_SIZE, shuffle=False, verbose=0)
            return model.get_weights()

        def make_strategy(resolver):
            settings = {"delay": delay, "interval": interval, "codec": codec, "compensation": compensation}
            return hop_tf.DTSStrategy(**settings, cluster_resolver=resolver)

        job = dts_simulation.make_job(
            _WORLD_SIZE,
            _model,
            _optimizer,
            keras.losses.mean_squared_error,
            delay=delay,
            interval=interval,
            selection=codec,
            compensation=compensation,
        )
        for start in range(0, len(x), _BATCH_SIZE):
            job.step(x[start : start + _BATCH_SIZE], y[start : start + _BATCH_SIZE])
        job.finish()
        results = InProcessCluster(_WORLD_SIZE, make_strategy, timeout_seconds=120).run(run)
        for rank, weights in zip(job.ranks, results, strict=True):
            for simulated, trained in zip(rank.model.get_weights(), weights, strict=True):
                self.assertAllClose(simulated, trained, rtol=1e-5, atol=1e-5)


if __name__ == "__main__":
    tf.test.main()

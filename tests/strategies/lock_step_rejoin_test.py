"""Tests of lock-step strategies: a rank that is killed and restarted joins the others, and all end equal.

The step at which the rank dies is random: `HOP_TF_SCHEDULE_SEED` is the seed. `make stress` sets it, and runs all
cases.
"""

import os
import pathlib
import random
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import absltest, parameterized

import hop_tf
from hop_tf import codecs
from hop_tf.tools.testing import MultiProcessRunner
from support import TWO_DEVICES, make_two_devices

_SEED = int(os.environ.get("HOP_TF_SCHEDULE_SEED", "0"))
_NUM_RANKS = 3
_BATCH_SIZE = 6
_NUM_STEPS = 50  # Per epoch.
_NUM_EPOCHS = 5
_RATE = 0.02


def _dts_with_outer_momentum(**settings):
    """Makes the strategy only when called, because the process has to make its devices first."""
    return hop_tf.DTSStrategy(outer_optimizer=keras.optimizers.SGD(0.7, momentum=0.9), **settings)


_MEMBERS = {
    "pipe_sgd": (hop_tf.PipeSGDStrategy, {}),
    "canary": (hop_tf.CanaryStrategy, {"consistency": "bsp", "codec": None}),
    "dts": (hop_tf.DTSStrategy, {"delay": 5, "interval": 3}),
    "pipe_sgd_sync": (hop_tf.PipeSGDStrategy, {"pipeline_width": 1}),
    "pipe_sgd_ring": (
        hop_tf.PipeSGDStrategy,
        {"pipeline_width": 3, "algorithm": "ring", "codec": "int8", "num_segments": 2},
    ),
    "dts_outer": (_dts_with_outer_momentum, {"delay": 6, "interval": 2, "codec": "top_k"}),
    "dts_momentum": (
        hop_tf.DTSStrategy,
        {"delay": 5, "interval": 3, "compensation": "momentum", "warmup_steps": _NUM_STEPS},
    ),
    "pipe_sgd_shares": (hop_tf.PipeSGDStrategy, {"batch_shares": [3, 1, 2]}),
    "dts_measured_shares": (hop_tf.DTSStrategy, {"batch_shares": "auto"}),
    "pipe_sgd_on_two_devices": (hop_tf.PipeSGDStrategy, {"devices": TWO_DEVICES}),
    "canary_low_rank": (
        hop_tf.CanaryStrategy,
        {"consistency": "bsp", "algorithm": "tree", "codec": codecs.LowRank(rank=2, codec="sketch")},
    ),
    "pipe_sgd_low_rank": (hop_tf.PipeSGDStrategy, {"pipeline_width": 2, "codec": codecs.LowRank(rank=2)}),
}
# Strategies whose weights follow from plain SGD with the mean gradients at these weights.
_SYNCHRONOUS = ("canary", "pipe_sgd_sync")
# Strategies that need SGD with momentum.
_MOMENTUM = ("dts_momentum",)


class _Progress(keras.callbacks.Callback):
    """Prints each step for the test. Ranks go slowly while one is missing, so that it returns before the end."""

    def __init__(self, strategy, mark):
        super().__init__()
        self.num_steps = 0
        self._mark = mark
        self._was_restarted = False
        self._strategy = strategy

    def on_train_begin(self, logs=None):
        self._was_restarted = self._strategy.training.runtime.joining

    def on_train_batch_end(self, batch, logs=None):
        self.num_steps += 1
        print("step", self.num_steps, flush=True)
        if self._was_restarted:
            self._mark.touch()
        elif self.num_steps > _NUM_STEPS / 2 and not self._mark.exists():
            time.sleep(0.1)


def _data():
    x = np.random.default_rng(0).normal(size=(_BATCH_SIZE * _NUM_STEPS, 4)).astype("float32")
    return x, x @ np.arange(4, dtype="float32")[:, None]


def _large_model(optimizer):
    """Returns a model with all kinds of state for a newcomer: slots, moving statistics, and kernels sent as factors."""
    hidden = keras.layers.Dense(256, activation="relu")
    wide = keras.layers.Dense(256, activation="relu")
    layers = [keras.Input((4,)), wide, hidden, keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(optimizer, "mse")
    return model


def _small_model():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    model.compile(keras.optimizers.SGD(_RATE), "mse")
    return model


def _run(name, mark):
    """Trains twice; returns the number of steps of the first training, the state after each, and the report."""
    make, settings = _MEMBERS[name]
    if "devices" in settings:
        make_two_devices()
    options = hop_tf.CommunicationOptions(timeout_seconds=20)
    strategy = make(communication_options=options, on_peer_loss="continue", **settings)
    with strategy.scope():
        optimizer = keras.optimizers.SGD(0.001, 0.9) if name in _MOMENTUM else keras.optimizers.Adam(0.001)
        model = _small_model() if name in _SYNCHRONOUS else _large_model(optimizer)
    x, y = _data()
    progress = _Progress(strategy, pathlib.Path(mark))
    arguments = {"batch_size": _BATCH_SIZE, "shuffle": False, "verbose": 0}
    model.fit(x, y, epochs=_NUM_EPOCHS, callbacks=[progress], **arguments)
    first = _state(strategy, model)
    model.fit(x, y, epochs=1, **arguments)
    second = _state(strategy, model)
    report = strategy.report()
    strategy.shutdown()
    return progress.num_steps, first, second, report


def _state(strategy, model):
    """Returns the variables that are equal on all ranks, to the bit. Under DTS, most ranks have slots of their own."""
    if isinstance(strategy, hop_tf.DTSStrategy) and not isinstance(model.optimizer, keras.optimizers.SGD):
        outer = strategy.outer_optimizer
        return [weights.numpy() for weights in [*model.weights, *(outer.variables if outer else ())]]
    return [variable.numpy() for variable in [*model.trainable_variables, *model.optimizer.variables]]


class LockStepRejoinTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(*_MEMBERS)
    @pytest.mark.stress(after=1)
    @pytest.mark.slow
    def test_joins_and_all_are_equal(self, name):
        drawn = random.Random(f"{_SEED}/{name}")
        victim, last_step = drawn.randrange(_NUM_RANKS), drawn.randrange(3, _NUM_STEPS // 2)
        print("rank", victim, "is killed in step", last_step)
        mark = os.path.join(self.get_temp_dir(), f"{name}_is_back")
        with MultiProcessRunner(_run, _NUM_RANKS, args=(name, mark), timeout_seconds=150) as runner:
            runner.wait_for_output(victim, f"step {last_step}$")
            runner.kill(victim)
            runner.restart(victim)
            values = runner.join().raise_for_errors().values
        for num_steps, first, second, report in values:
            for mine, of_first in ((first, values[0][1]), (second, values[0][2])):
                for each, other in zip(mine, of_first, strict=True):
                    self.assertAllEqual(each, other)
            self.assertEqual(report["iteration"], _NUM_STEPS)
            if num_steps < _NUM_STEPS * _NUM_EPOCHS:
                continue
            self.assertEqual(report["ranks_lost"], 1)
        num_made = [value[0] for value in values]
        self.assertEqual(sorted(num_made)[1:], [_NUM_STEPS * _NUM_EPOCHS] * (_NUM_RANKS - 1))
        self.assertBetween(num_made[victim], 1, _NUM_STEPS * _NUM_EPOCHS - last_step)
        if name in _SYNCHRONOUS:
            self._check_means(victim, last_step, values[0][1][0])

    def _check_means(self, victim, last_step, weights):
        """Checks that each step's gradient is the mean over the ranks that were there, which share all rows.

        Only the step in which the victim was lost may lack its rows.
        """
        ways = [self._train(victim, gone) for gone in [None, *range(last_step, last_step + 20)]]
        self.assertTrue(any(np.allclose(weights, way, rtol=1e-4, atol=1e-6) for way in ways), (weights, ways))

    def _train(self, victim, step_of_loss):
        x, y = _data()
        w = np.zeros((4, 1))
        for step in range(_NUM_STEPS * _NUM_EPOCHS):
            start = step % _NUM_STEPS * _BATCH_SIZE
            gradients = []
            for rank in range(_NUM_RANKS):
                if rank == victim and step == step_of_loss:
                    continue
                rows = slice(start + rank * 2, start + rank * 2 + 2)
                gradients.append(2 * x[rows].T @ (x[rows] @ w - y[rows]) / 2)
            w -= _RATE * np.mean(gradients, axis=0)
        return w


if __name__ == "__main__":
    absltest.main()

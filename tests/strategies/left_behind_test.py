"""Tests of lock-step strategies with a patience: the others leave a stopped rank behind, and take it back.

The step at which the rank is stopped is random: `HOP_TF_SCHEDULE_SEED` is the seed. `make stress` sets it, and runs all
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
from hop_tf.tools.testing import MultiProcessRunner

_SEED = int(os.environ.get("HOP_TF_SCHEDULE_SEED", "0"))
_NUM_RANKS = 3
_BATCH_SIZE = 6
_NUM_STEPS = 60  # Per epoch.
_NUM_EPOCHS = 4
_NUM_STEPS_WITHOUT = 40  # Steps of the others while the rank is stopped.
_MEMBERS = {
    "pipe_sgd": (hop_tf.PipeSGDStrategy, {}, {}),
    "dts": (hop_tf.DTSStrategy, {"delay": 5, "interval": 3}, {}),
    "pipe_sgd_sync": (hop_tf.PipeSGDStrategy, {"pipeline_width": 1}, {"metrics": ["mae"]}),
    "pipe_sgd_ring": (
        hop_tf.PipeSGDStrategy,
        {"pipeline_width": 3, "algorithm": "ring", "codec": "int8", "num_segments": 2},
        {"steps_per_execution": 4},
    ),
    "canary": (hop_tf.CanaryStrategy, {"consistency": "bsp"}, {}),
    "dts_measured_shares": (hop_tf.DTSStrategy, {"batch_shares": "auto", "codec": "top_k"}, {"steps_per_execution": 7}),
}


class _Progress(keras.callbacks.Callback):
    """Prints each step for the test. The others go slowly until the rank is back, so that it returns before the end."""

    def __init__(self, strategy, mark):
        super().__init__()
        self.num_steps = 0
        self.num_epochs = 0
        self._strategy = strategy
        self._mark = mark

    def on_train_batch_end(self, batch, logs=None):
        self.num_steps += 1
        print("step", self.num_steps, flush=True)
        if self._strategy.report()["times_left_behind"] and not self._strategy.training.is_behind:
            self._mark.touch()
        elif self.num_steps > _NUM_STEPS / 2 and not self._mark.exists():
            time.sleep(0.05)

    def on_epoch_end(self, epoch, logs=None):
        self.num_epochs += 1


def _run(name, mark):
    """Trains twice; returns the steps that callbacks saw in the first training, the ranks' states, and the report."""
    make, settings, compile_settings = _MEMBERS[name]
    options = hop_tf.CommunicationOptions(timeout_seconds=600)
    strategy = make(communication_options=options, on_peer_loss="continue", patience_seconds=4, **settings)
    with strategy.scope():
        hidden = keras.layers.Dense(64, activation="relu")
        model = keras.Sequential([keras.Input((4,)), hidden, keras.layers.BatchNormalization(), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.001), "mse", **compile_settings)
    x = np.random.default_rng(0).normal(size=(_BATCH_SIZE * _NUM_STEPS, 4)).astype("float32")
    progress = _Progress(strategy, pathlib.Path(mark))
    states = []
    for num_epochs, callbacks in ((_NUM_EPOCHS, [progress]), (1, [])):
        model.fit(x, x[:, :1], batch_size=_BATCH_SIZE, epochs=num_epochs, callbacks=callbacks, shuffle=False, verbose=0)
        states.append(_state(strategy, model))
    report = strategy.report()
    strategy.shutdown()
    return progress.num_steps, states, report


def _state(strategy, model):
    """Returns the state that is equal on all ranks, to the bit. Under DTS, each rank has slots of its own."""
    is_dts = isinstance(strategy, hop_tf.DTSStrategy)
    variables = model.weights if is_dts else [*model.trainable_variables, *model.optimizer.variables]
    return [variable.numpy() for variable in variables]


class LeftBehindTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(*_MEMBERS)
    @pytest.mark.stress(after=1)
    @pytest.mark.slow
    def test_a_stopped_rank_is_left_behind_and_joins_again(self, name):
        size = _MEMBERS[name][2].get("steps_per_execution", 1)
        drawn = random.Random(f"{_SEED}/{name}")
        victim, last_step = drawn.randrange(_NUM_RANKS), drawn.randrange(2, max(3, _NUM_STEPS // size // 3))
        print("rank", victim, "is stopped after step", last_step)
        mark = os.path.join(self.get_temp_dir(), f"{name}_is_back")
        with MultiProcessRunner(_run, _NUM_RANKS, args=(name, mark), timeout_seconds=150) as runner:
            runner.wait_for_output(victim, f"step {last_step}$")
            runner.pause(victim)
            for rank in {*range(_NUM_RANKS)} - {victim}:
                runner.wait_for_output(rank, f"step {last_step + max(3, _NUM_STEPS_WITHOUT // size)}$")
            runner.resume(victim)
            values = runner.join().raise_for_errors().values
        for rank, (num_steps, states, report) in enumerate(values):
            for mine, of_first in zip(states, values[0][1], strict=True):
                for each, other in zip(mine, of_first, strict=True):
                    self.assertAllEqual(each, other)
            self.assertEqual(report["iteration"], _NUM_STEPS)
            is_victim = rank == victim
            self.assertEqual((report["ranks_lost"], report["times_left_behind"]), (int(not is_victim), int(is_victim)))
            if not is_victim:
                self.assertEqual(num_steps, values[(victim + 1) % _NUM_RANKS][0])
        self.assertLess(values[victim][0], values[(victim + 1) % _NUM_RANKS][0])


if __name__ == "__main__":
    absltest.main()

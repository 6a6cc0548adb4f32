"""Tests that a job goes on from backups, whichever each rank has, after all ranks were killed at a random moment.

`HOP_TF_SCHEDULE_SEED` is the seed of that moment. If it is set, as under `make stress`, all cases run, and each one is
killed 20 times.
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

_SEED = os.environ.get("HOP_TF_SCHEDULE_SEED")
_NUM_RANKS, _NUM_KILLS = 2, 3 if _SEED is None else 20
_NUM_STEPS, _NUM_EPOCHS = 20, 4 + 3 * _NUM_KILLS
_MEMBERS = {
    "dts": lambda: hop_tf.DTSStrategy(delay=20, interval=12),
    "pipe_sgd": lambda: hop_tf.PipeSGDStrategy(),
    "hop": lambda: hop_tf.HopStrategy(),
    "canary": lambda: hop_tf.CanaryStrategy(),
    "canary_bsp": lambda: hop_tf.CanaryStrategy(consistency="bsp"),
}


class _Progress(keras.callbacks.Callback):
    """Makes rank 0 slower. Under DTS, the other rank is some backups ahead."""

    def __init__(self, rank):
        super().__init__()
        self._rank = rank
        self.epochs = []

    def on_epoch_begin(self, epoch, logs=None):
        self.epochs.append(epoch)
        print("epoch", epoch, flush=True)

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.01 if self._rank == 0 else 0.0)


def _run(name, folder):
    strategy = _MEMBERS[name]()
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.001, momentum=0.9), "mse")
    x = np.random.default_rng(0).normal(size=(4 * _NUM_STEPS, 4)).astype("float32")
    progress = _Progress(strategy.rank)
    backup = hop_tf.callbacks.AtomicBackupAndRestore(os.path.join(folder, "backup"), save_freq=5)
    model.fit(x, x[:, :1], batch_size=4, epochs=_NUM_EPOCHS, callbacks=[backup, progress], verbose=0)
    strategy.shutdown()
    return progress.epochs


class BackupsAfterKillsTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(*_MEMBERS)
    @pytest.mark.slow
    @pytest.mark.stress(but=1)
    def test_all_are_killed_and_go_on(self, name):
        drawn = random.Random(f"{_SEED or 0}/{name}")
        folder = self.get_temp_dir()
        first = 0
        for _ in range(_NUM_KILLS):
            with MultiProcessRunner(_run, _NUM_RANKS, args=(name, folder), timeout_seconds=120) as runner:
                began = runner.wait_for_output(0, r"^epoch (\d+)$")
                self.assertGreaterEqual(int(began[1]), first - 1)
                first = int(began[1]) + drawn.randrange(1, 3)
                runner.wait_for_output(0, f"epoch {first}$")
                time.sleep(drawn.uniform(0.0, 0.3))
                for rank in drawn.sample(range(_NUM_RANKS), _NUM_RANKS):
                    runner.kill(rank)
            self.assertTrue(list(pathlib.Path(folder).glob("backup*/backup_*")))
        with MultiProcessRunner(_run, _NUM_RANKS, args=(name, folder), timeout_seconds=120) as runner:
            for epochs in runner.join().raise_for_errors().values:
                self.assertEqual(epochs, list(range(epochs[0], _NUM_EPOCHS)))
                self.assertGreaterEqual(epochs[0], first - 1)


if __name__ == "__main__":
    absltest.main()

"""Tests that a restarted rank joins the remaining ranks if another rank dies while it loads its data."""

import pathlib
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import absltest, parameterized

import hop_tf
from hop_tf.tools.testing import MultiProcessRunner

_NUM_RANKS = 5
_NEWCOMER, _VICTIM = 1, 2
_NUM_STEPS = 60
_MEMBERS = {
    "pipe_sgd": (hop_tf.PipeSGDStrategy, {"on_peer_loss": "continue"}),
    "hop": (hop_tf.HopStrategy, {"topology": "complete", "on_peer_loss": "continue"}),
    "canary": (hop_tf.CanaryStrategy, {}),
}


class _Progress(keras.callbacks.Callback):
    """Lets the others go slowly until the newcomer is there."""

    def __init__(self, strategy, is_back):
        super().__init__()
        self._strategy, self._is_back = strategy, is_back
        self.num_steps = 0

    def on_train_batch_end(self, batch, logs=None):
        self.num_steps += 1
        print("step", self.num_steps, "lost", int(self._strategy.report()["ranks_lost"]), flush=True)
        if not self._is_back.exists():
            time.sleep(0.1 if self.num_steps < _NUM_STEPS / 2 else 0.5)


def _run(name, directory):
    was_here, may_begin, is_back = (pathlib.Path(directory, each) for each in ("was_here", "may_begin", "is_back"))
    make, settings = _MEMBERS[name]
    strategy = make(communication_options=hop_tf.CommunicationOptions(timeout_seconds=30), **settings)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01), "mse")
    progress = _Progress(strategy, is_back)
    if strategy.rank == _NEWCOMER:
        if was_here.exists():
            print("loads its data", flush=True)
            while not may_begin.exists():
                time.sleep(0.05)
            progress.on_train_batch_begin = lambda batch, logs=None: is_back.touch()
        was_here.touch()
    x = np.random.default_rng(0).normal(size=(20 * _NUM_STEPS, 4))
    model.fit(x, x.sum(1), batch_size=20, callbacks=[progress], verbose=0)
    strategy.shutdown()
    return progress.num_steps


class LoadingNewcomerTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(*_MEMBERS)
    @pytest.mark.stress
    def test_another_one_is_killed_meanwhile(self, name):
        directory = self.get_temp_dir()
        with MultiProcessRunner(_run, _NUM_RANKS, args=(name, directory), timeout_seconds=180) as runner:
            runner.wait_for_output(_NEWCOMER, "step 3 ")
            runner.kill(_NEWCOMER)
            runner.restart(_NEWCOMER)
            runner.wait_for_output(_NEWCOMER, "loads its data")
            runner.kill(_VICTIM)
            for rank in (0, 3, 4):
                runner.wait_for_output(rank, "lost 2")
            pathlib.Path(directory, "may_begin").touch()
            results = runner.join().raise_for_errors(except_ranks=[_VICTIM])
        self.assertBetween(results.values[_NEWCOMER], 1, _NUM_STEPS - 4)
        self.assertEqual([results.values[rank] for rank in (0, 3, 4)], [_NUM_STEPS] * 3)


if __name__ == "__main__":
    absltest.main()

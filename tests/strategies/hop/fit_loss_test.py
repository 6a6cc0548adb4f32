"""Tests that ranks train on without a killed rank, if HopStrategy has that setting."""

import os
import signal

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import hop_tf
from hop_tf.tools.testing import MultiProcessRunner

_WORLD_SIZE = 4
_BATCH_SIZE = 8
_NUM_STEPS = 60
_LOST = 2
_LAST_STEP = 12  # The last step of the lost rank.
_SETTINGS = {
    "backup": {"num_backup_workers": 1},
    "staleness": {"max_staleness": 3},
    "standard": {"on_peer_loss": "continue"},
}


class _Fate(keras.callbacks.Callback):
    def __init__(self, sign):
        super().__init__()
        self._signal = sign

    def on_train_batch_end(self, batch, logs=None):
        if batch == _LAST_STEP:
            os.kill(os.getpid(), self._signal)


def _run(settings, sign):
    options = hop_tf.CommunicationOptions(timeout_seconds=4)
    strategy = hop_tf.HopStrategy(topology="complete", communication_options=options, **settings)
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.05), "mse")
    x = np.random.default_rng(0).normal(size=(_BATCH_SIZE * _NUM_STEPS, 4)).astype("float32")
    y = x @ np.arange(4, dtype="float32")[:, None]
    callbacks = [_Fate(sign)] if strategy.rank == _LOST else []
    model.fit(x, y, batch_size=_BATCH_SIZE, shuffle=False, verbose=0, callbacks=callbacks)
    try:
        strategy.synchronize(model)
        error = ""
    except hop_tf.errors.PeerLostError as lost:
        error = str(lost)
    print("done", flush=True)
    weights = model.get_weights()[0][:, 0]
    steps = strategy.report()["steps"]
    strategy.shutdown()
    return steps, weights, error


class HopFitLossTest(tf.test.TestCase, parameterized.TestCase):
    def _check_the_others(self, results, message=f"needs all ranks, and rank {_LOST} was lost"):
        results.raise_for_errors(except_ranks=[_LOST])
        for rank in set(range(_WORLD_SIZE)) - {_LOST}:
            steps, weights, error = results[rank].value
            self.assertEqual(steps, _NUM_STEPS)
            self.assertAllClose(weights, np.arange(4), atol=0.1)
            self.assertRegex(error, message)

    @pytest.mark.slow
    def test_goes_on_without_a_killed_rank(self):
        self._check_goes_on("standard")

    @parameterized.parameters("backup", "staleness")
    @pytest.mark.stress
    def test_goes_on_without_a_killed_rank_under_other_settings(self, name):
        self._check_goes_on(name)

    def _check_goes_on(self, name):
        arguments = (_SETTINGS[name], signal.SIGKILL)
        with MultiProcessRunner(_run, num_workers=_WORLD_SIZE, args=arguments, timeout_seconds=120) as runner:
            results = runner.join()
        self.assertEqual(results[_LOST].exit_code, -signal.SIGKILL)
        self._check_the_others(results)

    @pytest.mark.stress
    def test_a_frozen_rank_learns_that_the_others_went_on(self):
        arguments = (_SETTINGS["backup"], signal.SIGSTOP)
        with MultiProcessRunner(_run, num_workers=_WORLD_SIZE, args=arguments, timeout_seconds=120) as runner:
            for rank in set(range(_WORLD_SIZE)) - {_LOST}:
                runner.wait_for_output(rank, "done")
            runner.resume(_LOST)
            results = runner.join()
        self.assertEqual(results[_LOST].exit_code, 1)
        self.assertRegex(results[_LOST].output, "PeerLostError: rank 2")
        # No rank has waited for the victim before: `synchronize` is the first to find that it is lost.
        self._check_the_others(results, f"on rank {_LOST} at .* failed after .*silent for")


if __name__ == "__main__":
    tf.test.main()

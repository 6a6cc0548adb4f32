"""Tests of ranks stopped for ten seconds, under default deadlines: the others go on, then all train to the end."""

import json
import os
import signal

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import hop_tf
from hop_tf.tools.testing import MultiProcessRunner

_NUM_RANKS, _FROZEN = 4, 1
_BEGIN, _NUM_STEPS_FROZEN, _NUM_STEPS = 30, 100, 220
_STEP_SECONDS = "0.1"


class _Steps(keras.callbacks.Callback):
    """Prints the steps of a rank, and the time of each. One rank stops itself."""

    def __init__(self, rank):
        super().__init__()
        self.rank = rank
        self.ends = {}

    def on_train_batch_end(self, batch, logs=None):
        self.ends[batch] = float(tf.timestamp())
        if batch in (_BEGIN, _BEGIN + _NUM_STEPS_FROZEN):
            print("step", batch, flush=True)
        if self.rank == _FROZEN and batch == _BEGIN:
            os.kill(os.getpid(), signal.SIGSTOP)


def _run(name, settings):
    """Trains; returns the times at which steps ended, the final kernel, and the report."""
    rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    os.environ["HOP_TF_STEP_SECONDS"] = _STEP_SECONDS
    strategy = getattr(hop_tf, name)(**settings)
    x = np.random.default_rng(0).normal(size=(8 * _NUM_RANKS * _NUM_STEPS, 8)).astype("float32")
    y = x @ np.arange(8, dtype="float32")[:, None]
    with strategy.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1, kernel_initializer="zeros")])
        model.compile(keras.optimizers.SGD(0.02), "mse")
    steps = _Steps(rank)
    model.fit(x, y, batch_size=8 * _NUM_RANKS, shuffle=False, verbose=0, callbacks=[steps])
    report = strategy.report()
    weights = model.get_weights()[0]
    strategy.shutdown()
    return steps.ends, weights, report


class FrozenRanksTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        ("CanaryStrategy", {}),
        ("HopStrategy", {"num_backup_workers": 1}),
        ("HopStrategy", {"max_staleness": 4, "skip": hop_tf.SkipIterations()}),
    )
    @pytest.mark.slow
    @pytest.mark.stress(after=1)
    def test_the_others_make_their_steps(self, *args):
        with MultiProcessRunner(_run, num_workers=_NUM_RANKS, args=args, timeout_seconds=200) as runner:
            runner.wait_for_output(0, f"step {_BEGIN + _NUM_STEPS_FROZEN}$")
            runner.resume(_FROZEN)
            values = runner.join().raise_for_errors().values
        for rank, (ends, weights, report) in enumerate(values):
            self.assertAllClose(weights[:, 0], np.arange(8), atol=0.1)
            if rank == _FROZEN:
                self.assertBetween(report["steps"], 1, _NUM_STEPS - 0.8 * _NUM_STEPS_FROZEN)
                self.assertGreater(report.get("missed_iterations", np.inf), 0.8 * _NUM_STEPS_FROZEN)
                continue
            undisturbed = np.median(np.diff(list(ends.values()))) * _NUM_STEPS_FROZEN
            disturbed = ends[_BEGIN + _NUM_STEPS_FROZEN] - ends[_BEGIN]
            # Detecting the silence takes about a second, more on a busy machine. If ranks waited, the ratio would be 0.
            self.assertGreater(undisturbed / disturbed, 0.8)


if __name__ == "__main__":
    tf.test.main()

"""Tests that lock-step strategies go on without a rank that is killed or frozen, and the others stay equal."""

import os
import pathlib
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import absltest, parameterized

import hop_tf
from hop_tf import codecs
from hop_tf.tools.testing import InProcessCluster, MultiProcessRunner

_NUM_RANKS = 3
_VICTIM = 1
_BATCH_SIZE = 6
_NUM_STEPS = 20  # Per epoch.
_NUM_EPOCHS = 2
_LAST_STEP = 7
_MEETING = _NUM_STEPS + 5
_MEMBERS = {
    "pipe_sgd": (hop_tf.PipeSGDStrategy, {}),
    "dts": (hop_tf.DTSStrategy, {}),
    "canary": (hop_tf.CanaryStrategy, {"consistency": "bsp"}),
    "pipe_sgd_as_printed": (hop_tf.PipeSGDStrategy, {"compensation": "none"}),
    "pipe_sgd_ring": (hop_tf.PipeSGDStrategy, {"algorithm": "ring", "codec": "int8", "num_segments": 2}),
    "dts_outer": (
        hop_tf.DTSStrategy,
        {"delay": 6, "interval": 2, "codec": "top_k", "outer_optimizer": keras.optimizers.SGD(0.7, momentum=0.9)},
    ),
    "dts_momentum": (hop_tf.DTSStrategy, {"delay": 4, "interval": 2, "compensation": "momentum"}),
    "canary_low_rank": (
        hop_tf.CanaryStrategy,
        {"consistency": "bsp", "algorithm": "tree", "codec": codecs.LowRank(rank=2, codec="sketch")},
    ),
    "dts_low_rank": (hop_tf.DTSStrategy, {"delay": 4, "interval": 2, "codec": codecs.LowRank(rank=2)}),
}
_LETS_NOBODY_JOIN = ("pipe_sgd_as_printed",)


class _Progress(keras.callbacks.Callback):
    """Prints each step for the test. At the step at which all have to meet, ranks wait until a file is there."""

    def __init__(self, mark):
        super().__init__()
        self.num_steps = 0
        self._mark = mark

    def on_train_batch_end(self, batch, logs=None):
        self.num_steps += 1
        print("step", self.num_steps, flush=True)
        while self.num_steps == _MEETING and not self._mark.exists():
            time.sleep(0.05)


def _run(name, mark):
    """Trains twice.

    Returns:
      The error, the number of steps and the weights of the first training, the error of the second, and the report.
    """
    make, settings = _MEMBERS[name]
    options = hop_tf.CommunicationOptions(timeout_seconds=5)
    strategy = make(communication_options=options, on_peer_loss="continue", **settings)
    with strategy.scope():
        hidden = keras.layers.Dense(256, activation="relu", kernel_initializer="glorot_uniform")
        model = keras.Sequential([keras.Input((256,)), hidden, keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.001, momentum=0.9), "mse")
    x = np.random.default_rng(0).normal(size=(_BATCH_SIZE * _NUM_STEPS, 256)).astype("float32")
    progress = _Progress(pathlib.Path(mark))
    arguments = {"batch_size": _BATCH_SIZE, "shuffle": False, "verbose": 0}
    errors = []
    for num_epochs, callbacks in ((_NUM_EPOCHS, [progress]), (1, [])):
        try:
            model.fit(x, x[:, :1], epochs=num_epochs, callbacks=callbacks, **arguments)
            errors.append("")
        except hop_tf.errors.HopError as error:
            errors.append(f"{type(error).__name__}: {error}")
        print("ended:", errors[-1], flush=True)
    report = strategy.report()
    strategy.shutdown()
    return errors[0], progress.num_steps, model.get_weights(), errors[1], report


class PeerLossTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(*_MEMBERS)
    @pytest.mark.stress(after=1)
    @pytest.mark.slow
    def test_goes_on_without_a_rank_that_is_killed(self, name):
        """A second training takes all ranks. A restarted rank that cannot join says so."""
        with self._start(name) as runner:
            runner.wait_for_output(_VICTIM, f"step {_LAST_STEP}$")
            runner.kill(_VICTIM)
            if name in _LETS_NOBODY_JOIN:
                runner.restart(_VICTIM)
                match = runner.wait_for_output(_VICTIM, "ended: (.*)")
                self.assertRegex(match[1], "PeerLostError: rank 1 was restarted and cannot join")
            self._check_others(runner)

    @parameterized.parameters(*_MEMBERS)
    @pytest.mark.stress
    @pytest.mark.slow
    def test_goes_on_without_a_rank_that_is_frozen(self, name):
        """A frozen rank that wakes up learns that it is lost, or finds the others silent, and raises an error."""
        with self._start(name) as runner:
            runner.wait_for_output(_VICTIM, f"step {_LAST_STEP}$")
            runner.pause(_VICTIM)
            for rank in {*range(_NUM_RANKS)} - {_VICTIM}:
                runner.wait_for_output(rank, f"step {_MEETING}$")
            runner.resume(_VICTIM)
            match = runner.wait_for_output(_VICTIM, "ended: (.*)")
            cause = r"the other ranks continued without this rank|(ranks .* sent nothing .*)?1 of 3 ranks"
            self.assertRegex(match[1], f"PeerLostError: rank 1: ({cause})")
            self._check_others(runner)

    def _start(self, name):
        self._mark = pathlib.Path(self.get_temp_dir(), f"{self.id()}_over")
        return MultiProcessRunner(_run, _NUM_RANKS, args=(name, os.fspath(self._mark)), timeout_seconds=150)

    def _check_others(self, runner):
        self._mark.touch()
        results = runner.join().raise_for_errors(except_ranks=[_VICTIM])
        others = [results[rank].value for rank in range(_NUM_RANKS) if rank != _VICTIM]
        for error, num_steps, weights, second_error, report in others:
            self.assertEqual((error, num_steps, report["ranks_lost"]), ("", _NUM_EPOCHS * _NUM_STEPS, 1))
            self.assertRegex(second_error, "PeerLostError: .* needs all ranks, and rank 1 was lost")
            for mine, of_first in zip(weights, others[0][2], strict=True):
                self.assertTrue(np.isfinite(mine).all())
                self.assertAllEqual(mine, of_first)

    @parameterized.parameters(*_MEMBERS)
    def test_refuses_what_cannot_be(self, name):
        make, settings = _MEMBERS[name]
        for arguments, message in (
            ({"on_peer_loss": "wait"}, "`on_peer_loss` must be one of None, raise, continue"),
            ({"min_ranks": 2}, "`min_ranks` must be None unless on_peer_loss='continue'"),
            ({"on_peer_loss": "raise", "min_ranks": 2}, "`min_ranks` must be None unless on_peer_loss='continue'"),
            ({"on_peer_loss": "continue", "min_ranks": 3}, "`min_ranks` must be"),
        ):
            with self.assertRaisesRegex(ValueError, message):
                InProcessCluster(
                    2,
                    lambda cluster_resolver, arguments=arguments: make(
                        cluster_resolver=cluster_resolver, **settings, **arguments
                    ),
                ).run(lambda strategy: None)


if __name__ == "__main__":
    absltest.main()

"""Tests of `diagnose` with real jobs whose ranks emulate their steps."""

import tempfile
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import absltest, parameterized

import hop_tf
from hop_tf.records.log import read_job
from hop_tf.tools.diagnosis import diagnose
from hop_tf.tools.diagnosis.steps import steps_of
from hop_tf.tools.emulation import ComputeEmulation, Slowdown
from hop_tf.tools.testing import MultiProcessRunner

_NUM_RANKS = 3
# Long beside what other programs on the machine take of it.
_STEP_SECONDS = 0.2
_NUM_STEPS = 40
_SLOW_RANK = 1


class _SlowCallback(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        time.sleep(2 * _STEP_SECONDS)


def _train(log_dir, strategy_name, fault, settings):
    options = hop_tf.CommunicationOptions(log_dir=log_dir)
    strategy = getattr(hop_tf, strategy_name)(communication_options=options, **settings)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    is_slow = strategy.rank == _SLOW_RANK
    callbacks = [_SlowCallback()] if fault == "callbacks" and is_slow else []
    dataset = tf.data.Dataset.from_tensors((np.ones((4, 4), "float32"), np.ones((4, 1), "float32"))).repeat()
    if fault == "input" and is_slow:
        dataset = dataset.map(lambda x, y: (tf.py_function(_slowly, [x], tf.float32), y))
        dataset = dataset.map(lambda x, y: (tf.ensure_shape(x, (4, 4)), y))
    data = strategy.distribute_datasets_from_function(lambda _: dataset)
    model.fit(data, steps_per_epoch=_NUM_STEPS, verbose=0, callbacks=callbacks)
    strategy.shutdown()


def _slowly(x):
    time.sleep(3 * _STEP_SECONDS)
    return x


class EmulatedTest(parameterized.TestCase):
    def diagnose(self, strategy, fault, slowdowns=(), **settings):
        emulation = ComputeEmulation(step_seconds=_STEP_SECONDS, slowdowns=slowdowns)
        with tempfile.TemporaryDirectory() as directory:
            arguments = {"args": (directory, strategy, fault, settings), "env": emulation.to_environment()}
            with MultiProcessRunner(_train, _NUM_RANKS, **arguments) as runner:
                runner.join().raise_for_errors()
            job = read_job(directory)
        return diagnose(job), job

    @parameterized.product(fault=["compute", "input", "callbacks"], strategy=["PipeSGDStrategy", "HopStrategy"])
    @pytest.mark.stress(after=0)
    def test_a_slow_rank(self, fault, strategy):
        slowdowns = (Slowdown(_SLOW_RANK, 3.0),) if fault == "compute" else ()
        diagnosis, job = self.diagnose(strategy, fault, slowdowns)
        print("\n".join(diagnosis.lines))
        finding = diagnosis.findings[0]
        self.assertEqual((finding.kind, finding.where), (fault, f"rank {_SLOW_RANK}"))
        self.assertTrue(finding.is_always)
        # All take as long as the others do then, without waiting.
        usual = np.mean([np.mean(steps_of(each).own) for each in job.ranks if each.name != finding.where])
        self.assertAlmostEqual(finding.step_seconds / usual, 1.0, delta=0.15)

    @pytest.mark.stress(after=0)
    def test_what_is_expected_of_a_change_comes(self):
        """Without batch shares: an emulated step takes as long with whatever part of a batch."""
        slow = (Slowdown(_SLOW_RANK, 3.0),)
        diagnosis, _ = self.diagnose("PipeSGDStrategy", "compute", slow)
        (change,) = (each for each in diagnosis.changes if each.batch_shares is None)
        self.assertEqual(change.strategy, "HopStrategy")
        changed, _ = self.diagnose(change.strategy, "compute", slow, **change.settings)
        self.assertAlmostEqual(change.step_seconds / changed.step_seconds, 1.0, delta=0.15, msg=change.text)

    @pytest.mark.stress(after=0)
    def test_nothing_to_gain(self):
        diagnosis, _ = self.diagnose("PipeSGDStrategy", "")
        self.assertEmpty(diagnosis.findings, diagnosis.lines)


if __name__ == "__main__":
    absltest.main()

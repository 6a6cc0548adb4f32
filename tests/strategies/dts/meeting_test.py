"""All ranks meet those that join, in the middle of a `fit`: values that a program has assigned before stay."""

from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import absltest, parameterized

import hop_tf
from hop_tf.keras_hook.roster import Roster
from hop_tf.tools.testing import InProcessCluster

_NUM_RANKS, _NUM_STEPS, _MEETING = 2, 12, 6


class Counter(keras.Model):
    """Adds 1 to its only weight after each update; the updates themselves change nothing."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")

    def call(self, inputs):
        return self.dense(inputs)

    def train_step(self, data):
        logs = super().train_step(data)
        self.dense.kernel.assign_add(tf.ones_like(self.dense.kernel))
        return logs


def _count(strategy, meeting):
    def agree_to_meet(batch, logs):
        if batch == meeting - 1:
            for algorithm in strategy.training.algorithms:
                algorithm._meeting.note(tf.constant([1.0]), tf.constant(meeting - 1, tf.int64))

    with strategy.scope():
        model = Counter()
        model.compile(keras.optimizers.SGD(0.0, momentum=0.9), "mse")
    x = np.ones((4 * _NUM_STEPS, 1), np.float32)
    meet = keras.callbacks.LambdaCallback(on_train_batch_begin=agree_to_meet)
    model.fit(x, x, batch_size=4, verbose=0, callbacks=[meet])
    return float(model.dense.kernel.numpy()[0, 0])


class MeetingTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        (2, 2), (3, 2), (0, 1), (3, 2, "momentum"), (3, 2, "gentle", 9), (3, 2, "gentle", 2, _NUM_STEPS)
    )
    @pytest.mark.slow(after=1)
    def test_assignments_before_a_meeting_stay(
        self, delay, interval, compensation="gentle", warmup_steps=0, meeting=_MEETING
    ):
        def make(cluster_resolver):
            return hop_tf.DTSStrategy(
                delay=delay,
                interval=interval,
                compensation=compensation,
                warmup_steps=warmup_steps,
                codec=None,
                algorithm="mesh",
                on_peer_loss="continue",
                cluster_resolver=cluster_resolver,
            )

        admit = Roster.admit  # Here nobody joins.
        with mock.patch.object(Roster, "admit", lambda roster, ranks: admit(roster, ranks) if ranks else None):
            values = InProcessCluster(_NUM_RANKS, make).run(lambda strategy: _count(strategy, meeting))
        self.assertEqual(values, [_NUM_STEPS] * _NUM_RANKS)


if __name__ == "__main__":
    absltest.main()

"""Tests of strategies made one after the other on the same addresses, although ranks end at different times."""

import json
import os
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import hop_tf
from hop_tf.tools.testing import MultiProcessRunner

_NUM_WORKERS = 3
_TIMEOUT_SECONDS = 5
# By strategy and rank, seconds before a rank shuts the strategy down after its training, and before it makes the next.
_PAUSES = ({1: (2 + _TIMEOUT_SECONDS, 1)}, {0: (2, 1), 2: (1, 0)}, {2: (2, 0)}, {})


def _train(strategy):
    """Trains; returns the weights."""
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.05), "mse")
    x = np.random.default_rng(0).normal(size=(48, 4))
    model.fit(x, x.sum(axis=1), batch_size=12, verbose=0)
    return model.get_weights()[0]


def _run():
    """Returns the final weights under each strategy that trains."""
    rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    options = hop_tf.CommunicationOptions(timeout_seconds=_TIMEOUT_SECONDS)
    weights = []
    for (make, trains), pauses in zip(_STRATEGIES, _PAUSES, strict=True):
        before, after = pauses.get(rank, (0, 0))
        strategy = make(communication_options=options)
        if trains:
            weights.append(_train(strategy))
        time.sleep(before)
        strategy.shutdown()
        time.sleep(after)
    return weights


# Strategies, with True if they train. Without training, ranks do not meet.
_STRATEGIES = (
    (hop_tf.HopStrategy, True),  # It admits restarted processes. A process that has gone on is not one.
    (hop_tf.PipeSGDStrategy, True),
    (hop_tf.HopStrategy, False),
    (hop_tf.HopStrategy, True),
)


class SuccessionTest(tf.test.TestCase):
    @pytest.mark.stress
    def test_each_meets_its_like(self):
        with MultiProcessRunner(_run, num_workers=_NUM_WORKERS, timeout_seconds=120) as runner:
            values = runner.join().raise_for_errors().values
        for weights in values[1:]:
            self.assertAllClose(weights[1], values[0][1], rtol=0, atol=0)  # Pipe-SGD keeps ranks alike.
        for weights in values:
            self.assertAllEqual(np.isfinite(weights), np.ones_like(weights, bool))


if __name__ == "__main__":
    tf.test.main()

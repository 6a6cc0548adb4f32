"""StepSkipping under HopStrategy, in the threads of one process; `hop_fit_stragglers_test` has how stragglers jump."""

import dataclasses
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

import hop_tf
from hop_tf.strategies.hop_exchange import REDUCTION, HopExchange
from hop_tf.testing import InProcessCluster

_NUM_STEPS = 4
_STRAGGLER = 1


def _make_strategy(cluster_resolver):
    return hop_tf.HopStrategy(
        topology="complete", max_staleness=7, skip=hop_tf.SkipIterations(trigger=8), cluster_resolver=cluster_resolver
    )


def _step(self, outgoing, step=HopExchange.step):
    """The straggler jumps in its last step, beyond the end of `fit`; it is never behind enough to jump by itself."""
    incoming = step(self, outgoing)
    last = (1, _NUM_STEPS - 1, REDUCTION)
    jumps = self._rank == _STRAGGLER and (self._session, outgoing.step, outgoing.segment) == last
    return dataclasses.replace(incoming, num_skipped=2) if jumps else incoming


def _fit_twice(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
    x = np.ones((2 * _NUM_STEPS, 1), "float32")
    steps = []
    for _ in range(2):
        model.fit(x, x, batch_size=2, verbose=0)
        steps.append(strategy.report()["steps"])
    return steps


class SessionTest(tf.test.TestCase):
    def test_what_was_left_to_skip_is_forgotten_when_the_next_fit_begins(self):
        with mock.patch.object(HopExchange, "step", _step):
            steps = InProcessCluster(2, _make_strategy).run(_fit_twice)
        self.assertEqual(steps, [[_NUM_STEPS, 2 * _NUM_STEPS]] * 2)


if __name__ == "__main__":
    tf.test.main()

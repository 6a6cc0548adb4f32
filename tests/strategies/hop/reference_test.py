"""Tests of Hop's steps against NumPy: iterations of several steps, and velocities that take part in averaging."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import hop_tf
from support import REFUSALS, in_process
from support.least_squares import BATCH_SIZE, NUM_ROWS, gradient_in, problem, summed_square

_NUM_STEPS = NUM_ROWS // BATCH_SIZE
_RATE, _MOMENTUM = 0.0125, 0.9


def _reference(mixing, nesterov, interval=1, skewed=True):
    """x_k+1 = W x_k + step(gradient at x_k), and then v_k+1 += m / p (W x_k - x_k), if k begins an iteration."""
    num_ranks = len(mixing)
    gradient_of = gradient_in(num_ranks)
    weights = np.stack([problem()[2].astype(np.float64)] * num_ranks)
    velocities = np.zeros_like(weights)
    for step in range(_NUM_STEPS):
        moves = np.einsum("ji,jkl->ikl", mixing, weights) - weights if step % interval == 0 else 0 * weights
        for rank in range(num_ranks):
            gradient = gradient_of(rank, step, weights[rank])
            velocities[rank] = _MOMENTUM * velocities[rank] - _RATE * gradient
            update = _MOMENTUM * velocities[rank] - _RATE * gradient if nesterov else velocities[rank]
            weights[rank] += moves[rank] + update
            velocities[rank] += _MOMENTUM / interval * moves[rank] * skewed
    return weights


def _train(strategy, make_optimizer):
    x, y, start = problem()
    with strategy.scope():
        kernel = keras.layers.Dense(4, use_bias=False)
        model = keras.Sequential([keras.Input((3,)), kernel])
        kernel.set_weights([start])
        model.compile(make_optimizer(), summed_square)
    model.fit(x, y, batch_size=BATCH_SIZE, shuffle=False, verbose=0)
    return kernel.get_weights()[0]


def _trained(num_ranks, topology, nesterov, fit=_train, **settings):
    """Returns the weights of the ranks, and the mixing matrix."""
    optimizer = functools.partial(keras.optimizers.SGD, _RATE, momentum=_MOMENTUM, nesterov=nesterov)
    cluster = in_process(hop_tf.HopStrategy, num_ranks, topology=topology, **settings)
    of_ranks = cluster.run(lambda strategy: (fit(strategy, optimizer), strategy.topology.mixing_matrix))
    return [own for own, _ in of_ranks], of_ranks[0][1]


class IntervalTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        (2, "complete", False, 5, False),
        (3, "complete", True, 3, True),
        (4, "ring", False, 4, False),
        (4, "ring_based", True, 2, True),
    )
    @pytest.mark.slow(after=2)
    def test_equals_the_reference(self, num_ranks, topology, nesterov, interval, skewed):
        weights, mixing = _trained(num_ranks, topology, nesterov, interval=interval, skewed_shards=skewed)
        expected = _reference(mixing, nesterov, interval, skewed)
        self.assertAllClose(weights, expected, rtol=1e-5, atol=1e-5)

    def test_sends_less(self):
        def num_bytes(interval):
            def fit(strategy, make_optimizer):
                _train(strategy, make_optimizer)
                return strategy.report()["bytes_sent"]

            return sum(_trained(2, "complete", False, fit, interval=interval)[0])

        of_one, of_four, of_all = map(num_bytes, (1, 4, _NUM_STEPS))
        per_iteration = (of_one - of_all) / (_NUM_STEPS - 1)
        self.assertAllClose(of_four - of_all, per_iteration * (_NUM_STEPS / 4 - 1), rtol=0.1)

    def test_metrics_of_an_epoch_that_ends_within_an_iteration_are_averaged(self):
        x, y, _ = problem()

        def run(strategy):
            with strategy.scope():
                model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4)])
                model.compile(keras.optimizers.SGD(_RATE), "mse")
            fit = functools.partial(model.fit, batch_size=BATCH_SIZE, epochs=4, shuffle=False, verbose=0)
            return fit(x, y, callbacks=[hop_tf.callbacks.MetricAverage()]).history["loss"]

        first, second = in_process(hop_tf.HopStrategy, 2, interval=3).run(run)  # Epochs of eight steps.
        self.assertEqual(first, second)

    @parameterized.parameters(
        ({"interval": 0}, "`interval` must be an integer of at least 1 and at most 10000. Received: interval=0"),
        ({"interval": 2, "update_order": "serial"}, "must be 1 with update_order='serial'.* Received: interval=2"),
    )
    def test_refuses(self, settings, message):
        with self.assertRaisesRegex(ValueError, message):
            hop_tf.HopStrategy(**settings)


class SkewedShardsTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters((3, "complete", False), (4, "ring", True), (4, "ring_based", False))
    @pytest.mark.slow(after=1)
    def test_equals_the_reference(self, num_ranks, topology, nesterov):
        weights, mixing = _trained(num_ranks, topology, nesterov, skewed_shards=True)
        self.assertAllClose(weights, _reference(mixing, nesterov), rtol=1e-5, atol=1e-5)

    @parameterized.parameters(
        (hop_tf.HopStrategy, keras.optimizers.Adam),
        (hop_tf.HopStrategy, functools.partial(keras.optimizers.SGD, 0.1)),
        (functools.partial(hop_tf.DTSStrategy, delay=4), keras.optimizers.Adam),
    )
    def test_an_optimizer_without_velocity_is_refused(self, make, make_optimizer):
        cluster = in_process(make, 2, skewed_shards=True)
        with self.assertRaisesRegex(REFUSALS, "`skewed_shards` must be False unless the optimizer is .*Received"):
            cluster.run(lambda strategy: _train(strategy, make_optimizer))

    @parameterized.parameters(
        ({"update_order": "serial"}, "Received: .*update_order='serial'"),
        ({"num_backup_workers": 1}, "Received: .*num_backup_workers=1"),
        ({"max_staleness": 2}, "Received: .*max_staleness=2"),
        ({"batch_shares": "auto"}, "Received: batch_shares='auto'"),
        ({"skewed_shards": "yes"}, "Received: skewed_shards='yes'"),
    )
    def test_what_does_not_go_together_is_refused(self, settings, received):
        with self.assertRaisesRegex(ValueError, received):
            hop_tf.HopStrategy(**{"skewed_shards": True, **settings})


if __name__ == "__main__":
    tf.test.main()

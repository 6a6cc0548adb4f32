"""Tests of `skewed_shards` of Hop, against NumPy: velocities take part in what averaging changes."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import hop_tf
from support import REFUSALS, in_process

_BATCH_SIZE, _NUM_STEPS = 24, 12
_RATE, _MOMENTUM = 0.05, 0.9


@functools.cache
def _problem():
    """Returns inputs, targets and initial weights of least squares."""
    random = np.random.default_rng(0)
    x = random.normal(size=(_BATCH_SIZE * _NUM_STEPS, 3)).astype(np.float32)
    y = x @ random.normal(size=(3, 4)) + random.normal(size=(len(x), 4))
    return x, y.astype(np.float32), random.normal(size=(3, 4)).astype(np.float32)


def _reference(mixing, nesterov):
    """x_k+1 = W x_k + step(gradient at x_k), and then v_k+1 += m (W x_k - x_k)."""
    x, y, start = _problem()
    num_ranks = len(mixing)
    weights = np.stack([start.astype(np.float64)] * num_ranks)
    velocities, share = np.zeros_like(weights), _BATCH_SIZE // num_ranks
    for step in range(_NUM_STEPS):
        moves = np.einsum("ji,jkl->ikl", mixing, weights) - weights
        for rank in range(num_ranks):
            rows = slice(step * _BATCH_SIZE + rank * share, step * _BATCH_SIZE + (rank + 1) * share)
            gradient = 2 / (4 * share) * x[rows].T.astype(np.float64) @ (x[rows] @ weights[rank] - y[rows])
            velocities[rank] = _MOMENTUM * velocities[rank] - _RATE * gradient
            update = _MOMENTUM * velocities[rank] - _RATE * gradient if nesterov else velocities[rank]
            weights[rank] += moves[rank] + update
            velocities[rank] += _MOMENTUM * moves[rank]
    return weights


def _train(strategy, make_optimizer):
    x, y, start = _problem()
    with strategy.scope():
        kernel = keras.layers.Dense(4, use_bias=False)
        model = keras.Sequential([keras.Input((3,)), kernel])
        kernel.set_weights([start])
        model.compile(make_optimizer(), "mse")
    model.fit(x, y, batch_size=_BATCH_SIZE, shuffle=False, verbose=0)
    return kernel.get_weights()[0]


class SkewedShardsTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters((3, "complete", False), (4, "ring", True), (4, "ring_based", False))
    @pytest.mark.slow(after=1)
    def test_equals_the_reference(self, num_ranks, topology, nesterov):
        optimizer = functools.partial(keras.optimizers.SGD, _RATE, momentum=_MOMENTUM, nesterov=nesterov)
        cluster = in_process(hop_tf.HopStrategy, num_ranks, topology=topology, skewed_shards=True)
        weights = cluster.run(lambda strategy: (_train(strategy, optimizer), strategy.topology.mixing_matrix))
        self.assertAllClose([own for own, _ in weights], _reference(weights[0][1], nesterov), rtol=1e-5, atol=1e-5)

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

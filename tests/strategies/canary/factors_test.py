"""Low-rank factors where training is not synchronous: against NumPy, and that nothing is lost that is not kept."""

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import hop_tf
from hop_tf import codecs
from hop_tf.collectives import get_network
from hop_tf.errors import ProtocolError
from hop_tf.strategies.canary.factors import KernelFactors, gather, goes_as_factors, kernels_last
from hop_tf.strategies.canary.layout import Layout
from hop_tf.tensors.buffers import BufferPool
from hop_tf.tensors.packing import TensorSpec
from hop_tf.tensors.payloads import split
from hop_tf.testing import InProcessCluster

_M, _K = 128, 160
_KERNEL = TensorSpec("kernel", (_M, _K), tf.float32)


def _factors(rank, codec=None):
    return KernelFactors(_KERNEL, rank, codec or codecs.Identity(), 512, BufferPool())


def _decoded(factors, data, padding=0):
    values = np.zeros(_M * _K + padding, np.float32)
    factors.accumulate(data, values)
    assert not values[_M * _K :].any()
    return values[: _M * _K].reshape(_M, _K)


class KernelFactorsTest(tf.test.TestCase, parameterized.TestCase):
    def test_a_step_of_subspace_iteration(self):
        """Q of a step is where the next one begins, as is what was lost."""
        rng, factors = np.random.default_rng(0), _factors(rank=3)
        lost, basis = np.zeros((_M, _K)), None
        for _ in range(4):
            values = rng.normal(size=(_M, _K)) * np.geomspace(1, 1e-3, _K)
            found = _decoded(factors, factors.encode(values.astype(np.float32).ravel()))
            matrix = values + lost
            if basis is not None:
                p = np.linalg.qr(matrix @ basis)[0]
                self.assertAllClose(found, p @ (p.T @ matrix), atol=1e-4)
            basis, lost = found.T @ np.linalg.svd(found)[0][:, :3], matrix - found  # Q, up to a rotation.
            self.assertEqual(np.linalg.matrix_rank(found, tol=1e-3), 3)
            self.assertAllClose(factors.lost, lost, atol=1e-4)

    @parameterized.parameters(None, "sketch", "int8", "truncate16")
    def test_what_is_lost_goes_later(self, codec):
        """Also what the codec has changed."""
        rng, factors = np.random.default_rng(1), _factors(rank=8, codec=codecs.get(codec))
        values = [rng.normal(size=(_M, _K)).astype(np.float32) for _ in range(10)]
        sent = sum(_decoded(factors, factors.encode(each.ravel())) for each in values)
        self.assertAllClose(sent + factors.lost, sum(values), atol=1e-3)
        silence = np.zeros(_M * _K, np.float32)
        before = np.linalg.norm(factors.lost)
        for _ in range(40):  # 128 singular values, 8 at a time.
            factors.encode(silence)
        self.assertLess(np.linalg.norm(factors.lost), before / 4)

    def test_padding_is_left_alone(self):
        factors, values = _factors(rank=2), np.ones(_M * _K + 16, np.float32)
        self.assertAllClose(_decoded(factors, factors.encode(values), padding=16), np.ones((_M, _K)), atol=1e-4)

    @parameterized.parameters(None, "sketch")
    def test_factors_of_several_ranks_are_gathered(self, codec):
        rng = np.random.default_rng(2)
        several = [_factors(rank=4, codec=codecs.get(codec)) for _ in range(3)]
        encoded = [each.encode(rng.normal(size=_M * _K).astype(np.float32)) for each in several]
        parts = [part for data in encoded for part in split(data)]
        total = _decoded(several[0], gather(parts, BufferPool()))
        self.assertAllClose(total, sum(_decoded(several[0], each) for each in encoded), atol=1e-4)
        self.assertLess(gather(parts, BufferPool()).nbytes, 3 * 4 * (_M + _K) * (4 if codec is None else 4.7) + 128)

    @parameterized.product(codec=(None, "sketch", "int8"), value=(np.nan, 1e20, 1e38))
    def test_what_is_not_finite_is_not_kept(self, codec, value):
        """Training may go on with other weights: nothing of what was too large is left of it."""
        factors, rng = _factors(rank=2, codec=codecs.get(codec)), np.random.default_rng(0)
        for _ in range(2):
            factors.encode((value * rng.normal(size=_M * _K)).astype(np.float32))
        if not np.isfinite(value):
            self.assertAllEqual(factors.lost, np.zeros((_M, _K)))
        self.assertTrue(np.isfinite(factors.lost).all())
        for _ in range(60):
            found = _decoded(factors, factors.encode(np.ones(_M * _K, np.float32)))
        self.assertTrue(np.isfinite(found).all())

    def test_after_a_contribution_of_nothing(self):
        """As where the learning rate is 0: what comes then is found as well as before."""
        factors, values = _factors(rank=2), np.outer(np.linspace(1, 2, _M), np.linspace(-1, 1, _K)).astype(np.float32)
        for contribution in (values, np.zeros_like(values), values):
            self.assertAllClose(_decoded(factors, factors.encode(contribution.ravel())), contribution, atol=1e-4)

    def test_what_is_malformed(self):
        factors = _factors(rank=2)
        p, q = split(factors.encode(np.ones(_M * _K, np.float32)))
        with self.assertRaisesRegex(ProtocolError, "3 factors came, which are no pairs"):
            _decoded(factors, gather([p, q, p], BufferPool()))
        with self.assertRaisesRegex(ProtocolError, "0 factors came, which are no pairs"):
            _decoded(factors, gather([], BufferPool()))
        with self.assertRaisesRegex(ProtocolError, r"factors of a kernel of \(128, 160\) came that are none"):
            _decoded(factors, gather([q, p], BufferPool()))


class PlaceTest(tf.test.TestCase):
    def test_kernels_lie_last_and_are_whole(self):
        specs = [_KERNEL, *(TensorSpec(str(i), (8,), tf.float32) for i in range(2)), _KERNEL]
        self.assertEqual(kernels_last(specs, [3, 2, 0, 1], rank=2, world_size=3), [2, 1, 3, 0])
        self.assertEqual(kernels_last(specs, [3, 2, 0, 1], rank=None, world_size=3), [3, 2, 0, 1])

    def test_not_where_the_factors_of_all_are_longer_than_the_kernel(self):
        self.assertTrue(goes_as_factors(_KERNEL, 4, world_size=17))  # 128 * 160 = 17.8 * 4 * (128 + 160)
        self.assertFalse(goes_as_factors(_KERNEL, 4, world_size=18))

    def test_pieces(self):
        """Each value is in one; roots take turns."""
        for network, world_size in (("mesh", 3), ("bcube:2,2", 4), ("tree", 5)):
            key = b"\x01" * world_size
            uncut = {(0, 1): [700], (1, 1): [600, 500]}
            layout = Layout(key, get_network(network), 0, [[100, 900], [40, 1100]], 16, uncut)
            for bucket, size in ((0, 140), (1, 2000)):
                where = sorted((each.where.start, each.where.stop) for each in layout.pieces if each.bucket == bucket)
                self.assertEqual([0, *(stop for _, stop in where)], [*(start for start, _ in where), size])
            whole = {(each.where.start, each.where.stop): each for each in layout.pieces if each.bucket == 1}
            kernels = [whole[where] for where in ((200, 900), (900, 1500), (1500, 2000))]
            self.assertEqual([each.colayer for each in kernels], [0, 1, 1])
            self.assertLen({each.root for each in kernels}, 3)


class FitTest(tf.test.TestCase, parameterized.TestCase):
    def _fit(self, world_size, num_steps, width, **settings):
        """For each rank the changes of its weights, bytes sent in a step, and how many it has made.

        Gradients are of rank one, and always the same.
        """

        def make_strategy(cluster_resolver):
            return hop_tf.CanaryStrategy(cluster_resolver=cluster_resolver, **settings)

        def train(strategy):
            with strategy.scope():
                inputs = keras.Input((width,))
                initializers = [keras.initializers.GlorotUniform(seed) for seed in (1, 2)]
                layers = [keras.layers.Dense(width, kernel_initializer=each) for each in initializers]
                model = keras.Model(inputs, keras.layers.Add()([layer(inputs) for layer in layers]))
                model.compile(keras.optimizers.SGD(0.5), lambda y, prediction: tf.reduce_mean(prediction, axis=-1))
            before, sent = model.get_weights(), []
            x = np.tile(np.linspace(-1, 1, width, dtype=np.float32), (world_size * num_steps, 1))
            record = keras.callbacks.LambdaCallback(
                on_train_batch_end=lambda batch, logs: sent.append(strategy.report().get("bytes_sent", 0))
            )
            model.fit(x, x, batch_size=world_size, shuffle=False, verbose=0, callbacks=[record])
            changes = [after - start for after, start in zip(model.get_weights(), before, strict=True)]
            return changes, np.mean(np.diff(sent)), strategy.report()["steps"]

        return InProcessCluster(world_size, make_strategy).run(train)

    @parameterized.parameters(("mesh", 3, "sketch"), ("mesh", 2, None), ("bcube:2,2", 4, None), ("tree", 3, "int8"))
    def test_where_factors_are_exact(self, network, world_size, codec):
        """All that ranks have computed arrives, up to what the codec has changed, as a whole."""
        num_steps, width = 6, 144
        found = self._fit(world_size, num_steps, width, network=network, codec=codec, low_rank=2, sync_interval=None)
        ((alone, *_),) = self._fit(1, num_steps, width)
        share = sum(num_made for *_, num_made in found) / (world_size * num_steps)
        for changes, *_ in found:
            for values, expected in zip(changes, alone, strict=True):
                self.assertAllClose(values, share * expected, atol=0.01 * np.abs(expected).max() + 1e-6)

    def test_traffic(self):
        """At most a tenth of what float32 takes, headers and bucket values included."""
        width = 1000
        for _, sent, _ in self._fit(2, 4, width, low_rank=4):
            self.assertBetween(sent / (4 * 2 * width * width), 1e-4, 0.02)


if __name__ == "__main__":
    tf.test.main()

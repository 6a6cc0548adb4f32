"""Gradients as low-rank factors: against a NumPy reference, and what they save."""

import zlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import hop_tf
from hop_tf import codecs
from hop_tf.membership.waiting import Interrupted
from hop_tf.runtime.group import ExchangeContext
from hop_tf.tensors.buffers import BufferPool
from hop_tf.tensors.packing import Packing, TensorSpec
from hop_tf.tools.simulate.virtual import VirtualCluster
from hop_tf.tools.testing import InProcessCluster

_M, _K = 128, 160
_SPECS = [TensorSpec("bias", (_K,), tf.float32), TensorSpec("kernel", (_M, _K), tf.float32)]


class FactorizedTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        ((1024, 1024), {}, True),
        ((64, 64), {}, False),  # Too small.
        ((16384, 5), {}, False),  # Factors are no smaller.
        ((3, 3, 64, 64), {}, False),  # A convolution.
        ((1024, 1024), {"exact": True}, False),
        ((1024, 1024), {"dtype": tf.float64}, False),
    )
    def test_which(self, shape, arguments, expected):
        spec = TensorSpec("kernel", shape, **{"dtype": tf.float32, **arguments})
        self.assertEqual(codecs.LowRank(rank=4).factorizes(spec), expected)


class LowRankMeanTest(tf.test.TestCase, parameterized.TestCase):
    def _means(self, world_size, gradients, rank, codec=None):
        """Returns the mean of [bias, kernel] for each rank and step."""
        return self._run(world_size, gradients, rank, codec)[0]

    def _run(self, world_size, gradients, rank, codec=None, interrupted_at=None):
        """Returns means, the numbers of steps in which ranks took part, all events since ranks began, and residuals.

        Rank 1 is interrupted before event `interrupted_at`, unless that is None.
        """
        cluster, packing, means, residuals = VirtualCluster(world_size), Packing(_SPECS), {}, {}
        sent_steps, began_at = dict.fromkeys(range(world_size), 0), []
        if interrupted_at is not None:
            cluster.scheduler.call_before_event(interrupted_at, cluster.memberships[1].interrupt)

        def body(number):
            membership = cluster.memberships[number]
            context = ExchangeContext("group", 1, packing, membership, BufferPool())
            reduction = context.make_all_reduce("0", packing, codecs.LowRank(rank=rank, codec=codec), "mesh")
            reduction.reset(membership.session + 1)
            membership.begin_session()
            began_at.append(cluster.scheduler.num_events)
            try:
                for step, (bias, kernel) in enumerate(gradients[number]):
                    vector = np.zeros(packing.sizes[0], np.float32)
                    for index, values in enumerate((bias, kernel)):
                        vector[packing.place(index)[1]] = values.ravel()
                    (mean,) = reduction.mean(
                        step, [vector], lambda other, step: membership.delivers(other, "group", step)
                    )
                    means[number, step] = [mean[packing.place(index)[1]] for index in range(2)]
                    sent_steps[number] = step + 1
                (left,) = reduction.take_residuals()
                residuals[number] = [left[packing.place(index)[1]] for index in range(2)]
                self.assertFalse(np.any(reduction.take_residuals()))
            except Interrupted:
                pass
            membership.leave(sent_rounds={"group": sent_steps[number]}, reason="done")

        cluster.run(body)
        return means, sent_steps, range(max(began_at), cluster.scheduler.num_events), residuals

    def _draw(self, world_size, num_steps, true_rank):
        rng = np.random.default_rng(0)
        left, right = rng.normal(size=(_M, true_rank)), rng.normal(size=(true_rank, _K))
        return [
            [
                (
                    rng.normal(size=_K).astype(np.float32),
                    ((left * rng.normal(size=true_rank)) @ right).astype(np.float32),
                )
                for _ in range(num_steps)
            ]
            for _ in range(world_size)
        ]

    @parameterized.parameters(2, 3)
    def test_follows_power_sgd(self, world_size):
        """Vogels et al., Algorithms 1 and 2, with the average of the gradients as the only all-reduce."""
        gradients = self._draw(world_size, 5, true_rank=6)
        means = self._means(world_size, gradients, rank=2)
        memories = [np.zeros((_M, _K))] * world_size
        q = np.random.default_rng(zlib.crc32(b"kernel")).normal(size=(2, _K)).astype(np.float32).T
        for step in range(5):
            values = [gradients[rank][step][1] + memory for rank, memory in enumerate(memories)]
            p = np.linalg.qr(np.mean([each @ q for each in values], axis=0))[0]
            own = [each.T @ p for each in values]
            q = np.mean(own, axis=0)
            memories = [each - p @ factor.T for each, factor in zip(values, own, strict=True)]
            for rank in range(world_size):
                self.assertAllClose(means[rank, step][1].reshape(_M, _K), p @ q.T, atol=1e-4)

    @parameterized.parameters(None, codecs.Int8(error_feedback=True))
    def test_residuals_are_what_means_lack(self, codec):
        """All means times the number of ranks, and the residuals, are the sum of all gradients."""
        num_steps, gradients = 3, self._draw(2, 3, true_rank=6)
        means, _, _, residuals = self._run(2, gradients, 2, codec)
        for index in range(2):
            expected = sum(each[index] for of_rank in gradients for each in of_rank).ravel()
            total = sum(2 * means[0, step][index] for step in range(num_steps)) + sum(
                of_rank[index] for of_rank in residuals.values()
            )
            self.assertAllClose(total, expected, atol=1e-3)

    def test_exact_where_the_rank_suffices(self):
        """Gradients whose columns span at most r dimensions lose nothing. Means are equal on all ranks, to the bit."""
        gradients = self._draw(3, 3, true_rank=2)
        means = self._means(3, gradients, rank=2)
        for (_, step), (bias, kernel) in means.items():
            self.assertAllClose(bias, np.mean([each[step][0] for each in gradients], axis=0), atol=1e-6)
            expected = np.mean([each[step][1] for each in gradients], axis=0)
            self.assertAllClose(kernel.reshape(_M, _K), expected, atol=1e-4)
            self.assertAllEqual(kernel, means[0, step][1])

    @parameterized.parameters(None, "sketch")
    def test_what_is_lost_comes_later(self, codec):
        """Of a constant gradient of rank 6, nearly all has been applied after some steps."""
        kernel = self._draw(1, 1, true_rank=6)[0][0][1]
        gradients = [[(np.zeros(_K, np.float32), kernel)] * 40] * 2
        means = self._means(2, gradients, rank=2, codec=codec and codecs.get(codec))
        total = sum(means[0, step][1].astype(np.float64) for step in range(40)).reshape(_M, _K)
        error = np.linalg.norm(total / 40 - kernel) / np.linalg.norm(kernel)
        self.assertLess(error, 0.1)
        first = np.linalg.norm(means[0, 0][1].reshape(_M, _K) - kernel) / np.linalg.norm(kernel)
        self.assertGreater(first, 0.3)

    @parameterized.parameters(codecs.Int8(), codecs.Truncate16(), codecs.Int8(error_feedback=True))
    def test_what_the_codec_loses_comes_later(self, codec):
        """If factors suffice, only the losses of the last steps are missing, after any number of steps."""
        rng = np.random.default_rng(0)
        # All of one sign, so that the losses of steps would add up.
        kernel = (rng.random((_M, 2)) @ rng.random((2, _K))).astype(np.float32)
        left = {}
        for num_steps in 4, 64:
            gradients = [[(np.zeros(_K, np.float32), kernel)] * num_steps] * 2
            means = self._means(2, gradients, rank=2, codec=codec)
            total = sum(means[0, step][1].astype(np.float64) for step in range(num_steps)).reshape(_M, _K)
            left[num_steps] = np.linalg.norm(total - num_steps * kernel)
        self.assertLess(left[64], 2 * left[4])

    @pytest.mark.slow
    def test_goes_on_without_a_rank_that_is_interrupted(self):
        """A step's bias and kernel are means over the same ranks, whenever rank 1 is interrupted."""
        gradients = self._draw(3, 2, true_rank=2)
        num_taking_part = set()
        for event in self._run(3, gradients, rank=2)[2]:
            means, sent_steps, *_ = self._run(3, gradients, rank=2, interrupted_at=event)
            for step in range(2):
                present = [number for number in range(3) if step < sent_steps[number]]
                num_taking_part.add(len(present))
                expected = [np.mean([gradients[number][step][index] for number in present], axis=0) for index in (0, 1)]
                for number in present:
                    self.assertAllClose(means[number, step][0], expected[0], atol=1e-6)
                    self.assertAllClose(means[number, step][1].reshape(_M, _K), expected[1], atol=1e-4)
        self.assertEqual(num_taking_part, {2, 3})

    def test_a_kernel_that_is_no_longer_trained_stays_finite(self):
        """Its loss is sent until nothing is left."""
        kernel = self._draw(1, 1, true_rank=6)[0][0][1]
        zeros = np.zeros(_K, np.float32)
        gradients = [[(zeros, kernel)] + [(zeros, np.zeros_like(kernel))] * 150] * 2
        means = self._means(2, gradients, rank=2)
        for step in range(151):
            self.assertTrue(np.isfinite(means[0, step][1]).all())
        total = sum(means[0, step][1].astype(np.float64) for step in range(151)).reshape(_M, _K)
        self.assertAllClose(total, kernel, atol=1e-4)

    def test_a_step_that_is_not_finite_elsewhere_changes_nothing(self):
        """Its mean may be left out on all ranks, so the loss of the kernel must stay."""
        gradients = self._draw(2, 3, true_rank=6)
        for rank in range(2):
            bias, kernel = gradients[rank][1]
            gradients[rank][1] = bias * (np.nan if rank else 1), kernel
        with_step = self._means(2, gradients, rank=2)
        without_step = self._means(2, [[each[0], each[2]] for each in gradients], rank=2)
        self.assertAllClose(with_step[0, 2][1], without_step[0, 1][1], atol=1e-4)

    def test_refuses_codecs_that_select(self):
        with self.assertRaisesRegex(ValueError, "`codec` must send something for every value. Received: codec=TopK"):
            codecs.LowRank(codec="top_k")

    def test_a_step_that_is_not_finite_changes_nothing(self):
        gradients = self._draw(2, 3, true_rank=2)
        gradients[1][1][1][5, 5] = np.inf
        means = self._means(2, gradients, rank=2)
        self.assertFalse(np.isfinite(means[0, 1][1]).all())
        expected = np.mean([each[2][1] for each in gradients], axis=0)
        self.assertAllClose(means[0, 2][1].reshape(_M, _K), expected, atol=1e-4)


class FitTest(tf.test.TestCase):
    @pytest.mark.slow
    def test_beside_moving_statistics(self):
        """Colayers of large kernels have no part of the statistics' bucket. Factors are exact with few examples."""
        num_steps, width = 3, 256
        weights = {}
        for codec in (None, codecs.LowRank()):

            def make_strategy(cluster_resolver, codec=codec):
                return hop_tf.CanaryStrategy(cluster_resolver=cluster_resolver, consistency="bsp", codec=codec)

            def train(strategy):
                with strategy.scope():
                    first, last = (
                        keras.layers.Dense(width, kernel_initializer=keras.initializers.GlorotUniform(seed))
                        for seed in (1, 2)
                    )
                    layers = [keras.Input((width,)), first, keras.layers.BatchNormalization(), last]
                    model = keras.Sequential(layers)
                    model.compile(keras.optimizers.SGD(0.1), "mse")
                x = np.random.default_rng(0).normal(size=(4 * num_steps, width)).astype(np.float32)
                model.fit(x, x, batch_size=4, shuffle=False, verbose=0)
                return [variable.numpy() for variable in model.trainable_variables]

            weights[codec] = InProcessCluster(2, make_strategy).run(train)
        for rank in range(2):
            for values, expected in zip(weights[codecs.LowRank()][rank], weights[None][rank], strict=True):
                self.assertAllClose(values, expected, atol=1e-5)


class TrafficTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(({"codec": codecs.LowRank(codec="sketch")}, 0.10), ({}, 0.27))
    @pytest.mark.stress
    def test_against_float32(self, settings, share):
        """Compares bytes with those of 10 million float32 values, with headers and bucket values."""
        num_steps, width = 2, 2300

        def make_strategy(cluster_resolver):
            return hop_tf.CanaryStrategy(cluster_resolver=cluster_resolver, consistency="bsp", **settings)

        def train(strategy):
            with strategy.scope():
                layers = [keras.layers.Dense(width), keras.layers.Dense(width)]
                model = keras.Sequential([keras.Input((width,)), *layers])
                model.compile(keras.optimizers.SGD(0.01), "mse")
            sent = []
            x = np.random.default_rng(0).normal(size=(2 * num_steps, width)).astype(np.float32)
            record = keras.callbacks.LambdaCallback(
                on_train_batch_end=lambda batch, logs: sent.append(strategy.report()["bytes_sent"])
            )
            model.fit(x, x, batch_size=2, verbose=0, callbacks=[record])
            return np.diff(sent), model.count_params()

        for sent, num_values in InProcessCluster(2, make_strategy).run(train):
            self.assertGreater(num_values, 10_000_000)
            self.assertBetween(sent[0] / (4 * num_values), 1e-3, share)


if __name__ == "__main__":
    tf.test.main()

"""Several ranks in the threads of this process."""

from __future__ import annotations

import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import hop_tf
from hop_tf.errors import DeadlineExceededError
from hop_tf.tools.testing import InProcessCluster

_BATCH_SIZE = 8
_NUM_STEPS = 4
_LEARNING_RATE = 0.1


def _make_strategy(cluster_resolver):
    return hop_tf.HopStrategy(topology="ring", cluster_resolver=cluster_resolver)


def _make_model(strategy, **compile_arguments):
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1, use_bias=False)])
        model.compile(keras.optimizers.SGD(_LEARNING_RATE), "mse", **compile_arguments)
    return model


def _reference(topology, initial, x, y):
    """x_k+1,i = sum of W[j, i] x_k,j - learning rate * gradient at x_k,i, in NumPy; global batches in order."""
    world_size = topology.world_size
    values = np.repeat(initial[None], world_size, axis=0)
    for step in range(_NUM_STEPS):
        parts = np.arange(_BATCH_SIZE * world_size).reshape(world_size, -1) + step * _BATCH_SIZE * world_size
        gradients = [
            2 * x[part].T @ (x[part] @ w - y[part]) / _BATCH_SIZE for part, w in zip(parts, values, strict=True)
        ]
        values = np.einsum("ji,jab->iab", topology.mixing_matrix, values) - _LEARNING_RATE * np.array(gradients)
    return values


class InProcessClusterTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters((1, False), (2, False), (3, True), (5, False))
    @pytest.mark.stress(after=2)
    def test_ranks_train_as_figure_7_says(self, num_workers, run_eagerly):
        generator = np.random.default_rng(1)
        x = generator.normal(size=(_BATCH_SIZE * num_workers * _NUM_STEPS, 3)).astype(np.float32)
        y = x @ np.ones((3, 1), np.float32)

        def train(strategy):
            model = _make_model(strategy, run_eagerly=run_eagerly)
            model.set_weights([np.full((3, 1), strategy.rank, np.float32)])  # Rank 0's count.
            model.fit(x, y, batch_size=_BATCH_SIZE * num_workers, shuffle=False, verbose=0)
            local = model.get_weights()[0]
            strategy.synchronize(model)
            return local, model.get_weights()[0], strategy.topology

        local, mean, topologies = zip(*InProcessCluster(num_workers, _make_strategy).run(train), strict=True)
        expected = _reference(topologies[0], np.zeros((3, 1)), x, y)
        self.assertAllClose(local, expected, rtol=1e-4, atol=1e-5)
        self.assertAllClose(mean, [expected.mean(axis=0)] * num_workers, rtol=1e-4, atol=1e-5)

    def test_can_be_run_again(self):
        cluster = InProcessCluster(2, _make_strategy)
        for _ in range(2):
            self.assertEqual(cluster.run(lambda strategy: (strategy.rank, strategy.world_size)), [(0, 2), (1, 2)])

    def test_a_forgotten_scope_is_refused(self):
        def train(strategy):
            model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
            with strategy.scope():
                model.compile("sgd", "mse")
            with self.assertRaisesRegex(ValueError, "outside of the scope of the HopStrategy in use"):
                model.fit(np.ones((4, 3)), np.ones((4, 1)), verbose=0)
            with tf.distribute.OneDeviceStrategy("/cpu:0").scope():
                alone = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
                alone.compile("sgd", "mse")
            alone.fit(np.ones((4, 3)), np.ones((4, 1)), batch_size=2, verbose=0)
            return int(alone.optimizer.iterations), strategy.report()["steps"]

        self.assertEqual(InProcessCluster(2, _make_strategy).run(train), [(2, 0)] * 2)

    def test_a_finite_dataset_that_is_not_sharded_is_refused(self):
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
        rows = tf.data.Dataset.from_tensor_slices((np.ones((16, 3)), np.ones((16, 1))))
        finite = rows.batch(4).with_options(options)
        endless = rows.repeat().batch(4).with_options(options)

        def train(strategy):
            model = _make_model(strategy)
            with self.assertRaisesRegex(ValueError, r"Dataset.repeat\(\)`.* Received: a dataset of 4 batches"):
                model.fit(finite, verbose=0)
            model.fit(endless, steps_per_epoch=8, epochs=2, verbose=0)
            return strategy.report()["steps"]

        self.assertEqual(InProcessCluster(2, _make_strategy).run(train), [16, 16])

    def test_reports_that_json_cannot_hold_are_refused(self):
        def report(strategy):
            with self.assertRaisesRegex(TypeError, "`loss` must be a value that JSON can hold.* Received: loss="):
                strategy.gather_reports(loss=np.float32(1))
            return strategy.gather_reports(loss=1.0)

        reports, _ = InProcessCluster(2, _make_strategy).run(report)
        self.assertEqual([each["loss"] for each in reports], [1.0, 1.0])

    def test_no_thread_is_left(self):
        before = set(threading.enumerate())
        InProcessCluster(3, _make_strategy).run(lambda strategy: strategy.gather_reports())
        self.assertEmpty([thread for thread in threading.enumerate() if thread not in before])

    @pytest.mark.slow
    def test_raises_what_a_rank_raises_and_ends_the_others(self):
        def fail(strategy):
            if strategy.rank == 1:
                raise KeyError("rank 1 fails")
            strategy.gather_reports()

        with self.assertRaisesRegex(KeyError, "rank 1 fails") as caught:
            InProcessCluster(3, _make_strategy).run(fail)
        self.assertEqual(caught.exception.__notes__, ["Raised by rank 1 of an InProcessCluster."])

    def test_a_rank_that_does_not_return_is_shown(self):
        go_on = threading.Event()
        self.addCleanup(go_on.set)
        with self.assertRaisesRegex(DeadlineExceededError, r"(?s)still running after 0\.1 s:\nhop_tf rank 1:.*wait"):
            InProcessCluster(2, _make_strategy, timeout_seconds=0.1).run(
                lambda strategy: strategy.rank == 1 and go_on.wait()
            )

    def test_strategies_are_shut_down_where_one_cannot_be_made(self):
        made = []

        def make_strategy(cluster_resolver):
            if made:
                raise KeyError("no more")
            made.append(_make_strategy(cluster_resolver))
            return made[0]

        with self.assertRaisesRegex(KeyError, "no more"):
            InProcessCluster(2, make_strategy).run(lambda strategy: None)
        with self.assertRaisesRegex(hop_tf.errors.HopError, "shut down"):
            made[0].training.fit_session(None).__enter__()

    def test_parameter_servers(self):
        def make_strategy(cluster_resolver):
            tasks.append(cluster_resolver.task_type)
            return hop_tf.SHATParameterServerStrategy(cluster_resolver=cluster_resolver)

        tasks, before = [], set(threading.enumerate())
        ranks = InProcessCluster(2, make_strategy, num_ps=3).run(lambda strategy: strategy.rank)
        self.assertEqual(ranks, [0, 1])
        self.assertEqual(sorted(tasks), ["ps"] * 3 + ["worker"] * 2)
        self.assertEmpty([thread for thread in threading.enumerate() if thread not in before])

    def test_raises_what_a_parameter_server_raises(self):
        def make_strategy(cluster_resolver):
            if cluster_resolver.task_type == "ps":
                raise KeyError("no server")
            return _make_strategy(cluster_resolver)

        with self.assertRaisesRegex(KeyError, "no server"):
            InProcessCluster(2, make_strategy, num_ps=1).run(lambda strategy: None)

    @parameterized.parameters(0, -1, 1.0, True, "2", None)
    def test_refuses(self, num_workers):
        with self.assertRaisesRegex(ValueError, r"`num_workers` must be a positive integer\. Received: num_workers="):
            InProcessCluster(num_workers, _make_strategy)


if __name__ == "__main__":
    tf.test.main()

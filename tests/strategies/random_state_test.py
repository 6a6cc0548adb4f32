"""Tests of random numbers and replica ids: in training steps each replica draws its own numbers, and knows its id."""

import functools
import itertools
import os
import tempfile
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import absltest, parameterized
from tensorflow.python.eager import context as tensorflow_context

import hop_tf
from hop_tf.tools.testing import InProcessCluster
from support import MEMBERS, NUM_RANKS, ON_TWO_DEVICES, TWO_DEVICES

_ROWS = 16  # Per replica and step.
_STEPS = 2
_SHAPE = (4, 4, 2)  # Shape of a row.


class Watched(keras.Model):
    """Keeps the tensors of `draw(x, training)` in each training step, by replica.

    The loss does not depend on drawn values, so they do not change the weights.
    """

    def __init__(self, layers, draw, always=False):
        super().__init__()
        self.random_layers = layers
        self._draw = draw
        self._always = always
        self.dense = keras.layers.Dense(1, kernel_initializer="ones")
        self.dense.build((None, int(np.prod(_SHAPE))))
        self.seen = {}

    def call(self, x, training=False):
        if training or self._always:
            replica = tf.distribute.get_replica_context()
            drawn = self._draw(x, True)
            if replica is not None:  # Keras builds the model in the scope.
                tf.numpy_function(self._note, [replica.replica_id_in_sync_group, *drawn], [])
        return self.dense(tf.reshape(x, [-1, int(np.prod(_SHAPE))]))

    def _note(self, replica, *drawn):
        self.seen.setdefault(int(replica), []).append([np.array(each) for each in drawn])


def _nothing():
    return [], lambda x, training: []


def _dropout():
    layer = keras.layers.Dropout(0.5, seed=1)
    return [layer], lambda x, training: [layer(x, training=training)]


def _many():
    """Returns layers with a generator, and a function that draws with these and with TensorFlow's functions.

    Without a seed, `keras.random` would use a generator of the process, not of a rank.
    """
    layers = [
        keras.layers.Dropout(0.5, seed=1),
        keras.layers.GaussianNoise(1.0, seed=2),
        keras.layers.RandomFlip("horizontal", seed=3),
    ]
    settings = {"kernel_initializer": "ones", "dropout": 0.5, "seed": 1}
    recurrent = keras.layers.SimpleRNN(3, recurrent_initializer="ones", recurrent_dropout=0.5, **settings)
    attention = keras.layers.MultiHeadAttention(1, 2, **settings)
    shape = (None, 4, 8)
    recurrent.build(shape)
    attention.build(shape, shape)
    recurrent.trainable = attention.trainable = False
    generator = keras.random.SeedGenerator(5)

    def draw(x, training):
        sequence = tf.reshape(x, [-1, 4, 8])
        return [
            *(layer(x, training=training) for layer in layers),
            recurrent(sequence, training=training),
            attention(sequence, sequence, training=training),
            keras.random.uniform([8], seed=generator),
            tf.random.normal([8]),
            tf.cond(tf.size(x) > 0, lambda: tf.random.uniform([8]), lambda: tf.zeros([8])),
            tf.nn.dropout(x, 0.5),
        ]

    return [*layers, recurrent, attention, generator], draw


def _images(num_rows):
    return np.random.default_rng(0).uniform(size=(1, *_SHAPE)).astype(np.float32).repeat(num_rows, axis=0)


def _train(strategy, make_draw, num_replicas=NUM_RANKS, num_steps=_STEPS, **settings):
    """Trains; returns the values that each replica of the rank has drawn in each step, and states of generators."""
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = Watched(*make_draw())
        model.compile("sgd", "mse", **settings)
    num_rows = _ROWS * num_replicas
    x = _images(num_rows * num_steps)
    model.fit(x, np.zeros((len(x), 1)), batch_size=num_rows, shuffle=False, verbose=0)
    states = [variable.numpy() for variable in model.variables if "seed_generator" in variable.path]
    return model.seen, states


@functools.cache
def _plain(make_draw, num_steps=_STEPS):
    """Trains without a strategy, with a replica's rows; returns the drawn values and the states."""
    seen, states = _train(tf.distribute.get_strategy(), make_draw, num_replicas=1, num_steps=num_steps)
    return seen[0], states


def _are_equal(first, second):
    return [np.array_equal(a, b) for a, b in zip(first, second, strict=True)]


class DrawsTest(tf.test.TestCase, parameterized.TestCase):
    def _check(self, of_ranks, plain, states):
        """Checks that the first replica draws the same as without a strategy, and every other one something else."""
        seen = [of_rank[replica] for of_rank, _ in of_ranks for replica in sorted(of_rank)]
        for step in range(min(len(plain), *map(len, seen))):  # Canary may skip some.
            self.assertTrue(all(_are_equal(seen[0][step], plain[step])), step)
            for first, second in itertools.combinations(seen, 2):
                self.assertFalse(any(_are_equal(first[step], second[step])), step)
        self.assertNotEmpty(states)
        for of_rank, in_the_end in of_ranks:  # States of generators are saved, and restored on all ranks.
            if all(len(steps) == len(plain) for steps in of_rank.values()):
                tf.nest.map_structure(self.assertAllEqual, in_the_end, states)

    @parameterized.parameters("pipe_sgd", "hop", *sorted(MEMBERS.keys() - {"pipe_sgd", "hop"}))
    @pytest.mark.slow(after=2)
    @pytest.mark.stress(but=1)
    def test_ranks_draw_their_own(self, name):
        self._check(MEMBERS[name].run(lambda strategy: _train(strategy, _dropout)), *_plain(_dropout))

    @pytest.mark.stress
    def test_all_that_draws_in_a_graph(self):
        of_ranks = MEMBERS["pipe_sgd"].run(lambda strategy: _train(strategy, _many, num_steps=1))
        self._check(of_ranks, *_plain(_many, num_steps=1))

    @pytest.mark.slow
    def test_devices_draw_their_own(self):
        of_ranks = ON_TWO_DEVICES["pipe_sgd_on_two_devices"].run(
            lambda strategy: _train(strategy, _dropout, 2 * NUM_RANKS)
        )
        self.assertEqual([sorted(seen) for seen, _ in of_ranks], [[0, 1], [2, 3]])
        self._check(of_ranks, *_plain(_dropout))

    def test_all_that_draws_eagerly(self):
        """Tests eager operations, which would have the same seed on all ranks otherwise."""
        self.enterContext(mock.patch.object(tensorflow_context.context(), "_internal_operation_seed", lambda: 7))
        of_ranks = MEMBERS["hop"].run(lambda strategy: _train(strategy, _many, num_steps=1, run_eagerly=True))
        plain, states = _train(tf.distribute.get_strategy(), _many, 1, num_steps=1, run_eagerly=True)
        self._check(of_ranks, plain[0], states)

    def test_custom_loop(self):
        def run(strategy):
            tf.random.set_seed(0)
            with strategy.scope():
                dropout = keras.layers.Dropout(0.5, seed=1)

            def step():
                return dropout(tf.ones([32]), training=True), tf.random.normal([8])

            return [each.numpy() for each in tf.function(lambda: strategy.run(step))()]

        first, second = MEMBERS["pipe_sgd"].run(run)
        self.assertEqual(_are_equal(first, run(tf.distribute.get_strategy())), [True, True])
        self.assertEqual(_are_equal(first, second), [False, False])

    def test_seeds_that_are_given_are_obeyed(self):
        def make_draw():
            return [], lambda x, training: [
                keras.random.normal([8], seed=3),
                tf.random.normal([8], seed=3),
                tf.random.stateless_normal([8], seed=[3, 4]),
            ]

        (first, _), (second, _) = MEMBERS["pipe_sgd"].run(lambda strategy: _train(strategy, make_draw))
        self.assertEqual(_are_equal(first[0][0], second[1][0]), [True] * 3)

    def test_predictions_are_alike(self):
        """Layers that also draw in `predict`, as for estimates of uncertainty, draw the same on all ranks."""

        def run(strategy):
            with strategy.scope():
                model = Watched(*_dropout(), always=True)
            model.predict(_images(_ROWS), verbose=0)
            (steps,) = model.seen.values()
            return steps[-1]

        first, second = MEMBERS["hop"].run(run)
        self.assertEqual(_are_equal(first, second), [True] * len(first))

    @parameterized.parameters("hop", "pipe_sgd")
    @pytest.mark.slow(after=1)
    @pytest.mark.stress(but=1)
    def test_pipelines_are_alike(self, name):
        """`Dataset.map` computes whole batches on all ranks. Each rank takes its rows of them."""
        rows = _images(_ROWS * NUM_RANKS) * np.arange(1, _ROWS * NUM_RANKS + 1, dtype=np.float32)[:, None, None, None]

        def dataset():
            flip = keras.layers.RandomFlip("horizontal", seed=3)
            data = tf.data.Dataset.from_tensor_slices((rows, np.zeros(len(rows)))).batch(len(rows))
            return data.map(lambda x, y: (flip(x, training=True), y))

        def run(strategy):
            with strategy.scope():
                model = Watched([], lambda x, training: [x])
                model.compile("sgd", "mse")
            model.fit(dataset(), verbose=0)
            return model.seen[strategy.rank][0][0]

        data = dataset()
        list(data)  # As Keras does, to build the model.
        ((expected, _),) = data
        self.assertAllEqual(np.concatenate(MEMBERS[name].run(run)), expected)
        self.assertNotAllEqual(expected, rows)


class ReplicasTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters("pipe_sgd", "pipe_sgd_on_two_devices", "hop")
    def test_ids(self, name):
        """Tests replica ids in a loop, and in distributed values. For ids in a model's step see above."""
        members = MEMBERS | ON_TWO_DEVICES

        def run(strategy):
            def step():
                replica = tf.distribute.get_replica_context()
                return tf.stack([replica.replica_id_in_sync_group, replica.num_replicas_in_sync])

            of_loop = tf.function(lambda: strategy.run(step))()
            values = strategy.experimental_distribute_values_from_function(
                lambda value: tf.constant([value.replica_id_in_sync_group, value.num_replicas_in_sync])
            )
            return [
                [each.numpy().tolist() for each in strategy.experimental_local_results(v)] for v in (of_loop, values)
            ]

        number = members[name].num_devices
        for rank, (of_loop, values) in enumerate(members[name].run(run)):
            self.assertEqual(of_loop, [[rank * number + each, number * NUM_RANKS] for each in range(number)])
            self.assertEqual(values, of_loop)

    @pytest.mark.slow
    def test_ranks_with_different_numbers_of_devices(self):
        def make(cluster_resolver):
            devices = [TWO_DEVICES, TWO_DEVICES[:1], TWO_DEVICES][cluster_resolver.task_id]
            return hop_tf.HopStrategy(cluster_resolver=cluster_resolver, devices=devices)

        seen = InProcessCluster(3, make).run(lambda strategy: sorted(_train(strategy, _nothing, 6, num_steps=1)[0]))
        self.assertEqual(seen, [[0, 1], [2], [3, 4]])

    @parameterized.parameters("pipe_sgd", "pipe_sgd_on_two_devices")
    @pytest.mark.stress(but=2)
    def test_gradients_of_what_is_gathered(self, name):
        """TensorFlow finds a replica's rows by its id: those of replica k have the factors 2 k and 2 k + 1."""
        member = (MEMBERS | ON_TWO_DEVICES)[name]

        def run(strategy):
            def step():
                replica = tf.distribute.get_replica_context()
                x = tf.ones([2])
                with tf.GradientTape() as tape:
                    tape.watch(x)
                    rows = replica.all_gather(x, axis=0)
                    loss = tf.reduce_sum(rows * tf.range(tf.size(rows), dtype=tf.float32))
                return tape.gradient(loss, x)

            results = strategy.experimental_local_results(tf.function(lambda: strategy.run(step))())
            return [each.numpy() for each in results]

        number = member.num_devices * NUM_RANKS
        gradients = np.reshape(member.run(run), [number, 2])
        self.assertAllEqual(gradients, number * np.arange(2.0 * number).reshape(number, 2))

    def test_generators_of_the_scope(self):
        """TensorFlow gives each replica a stream of its own, and the state stays the same."""

        def run(strategy):
            with strategy.scope():
                generator = tf.random.Generator.from_seed(1)
            values = tf.function(lambda: strategy.run(lambda: generator.normal([8])))()
            return [each.numpy() for each in strategy.experimental_local_results(values)], generator.state.numpy()

        (first, state), (second, other) = ON_TWO_DEVICES["pipe_sgd_on_two_devices"].run(run)
        self.assertLen({each.tobytes() for each in [*first, *second]}, 4)
        self.assertAllEqual(state, other)

    @parameterized.parameters("pipe_sgd", "pipe_sgd_on_two_devices")
    def test_each_rank_records_summaries(self, name):
        """TensorFlow records only the summaries of replica 0. Here each rank's first device is replica 0 for that."""
        member = (MEMBERS | ON_TWO_DEVICES)[name]
        folder = self.enterContext(tempfile.TemporaryDirectory())

        def run(strategy):
            def step():
                return tf.summary.scalar("seen", 1.0, step=1)

            with tf.summary.create_file_writer(os.path.join(folder, str(strategy.rank))).as_default():
                are_written = tf.function(lambda: strategy.run(step))()
            return [bool(each) for each in strategy.experimental_local_results(are_written)]

        self.assertEqual(member.run(run), [[True, False][: member.num_devices]] * NUM_RANKS)

    def test_places(self):
        def run(strategy):
            places = []
            strategy.run(lambda: places.extend(tf.distribute.get_replica_context().devices))
            return [tf.DeviceSpec.from_string(np.ravel(each)[0]).device_index for each in places]

        self.assertEqual(ON_TWO_DEVICES["pipe_sgd_on_two_devices"].run(run), [[0, 1]] * NUM_RANKS)


if __name__ == "__main__":
    absltest.main()

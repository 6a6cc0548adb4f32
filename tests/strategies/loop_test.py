"""Tests of custom loops in the idiom of TensorFlow's tutorial: only the line that makes the strategy is changed.

Losses are scaled by the number of replicas, gradients add up, and `strategy.reduce` gives the whole batch's loss.
"""

import contextlib
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import absltest, parameterized

from support import MEMBERS, NUM_RANKS

_NUM_ROWS, _GLOBAL_BATCH_SIZE = 32, 8
_REFUSED = "Ranks would have to wait for the slowest rank"
_NO_LOOPS = "a custom loop and `train_on_batch` cannot"


def _rows():
    x = np.random.default_rng(0).normal(size=(_NUM_ROWS, 4)).astype(np.float32)
    return x, x[:, :1] * x[:, 1:2]


# Ways in which programs compute the loss of a replica.


def _average_loss(model, y, y_pred):
    loss = tf.nn.compute_average_loss(tf.reduce_sum(tf.square(y - y_pred), axis=-1))
    return loss + tf.nn.scale_regularization_loss(tf.add_n(model.losses))


def _average_loss_of_the_global_batch(model, y, y_pred):
    loss_object = keras.losses.MeanSquaredError(reduction="none")
    loss = tf.nn.compute_average_loss(loss_object(y, y_pred), global_batch_size=_GLOBAL_BATCH_SIZE)
    return loss + tf.nn.scale_regularization_loss(tf.add_n(model.losses))


def _loss_of_keras(model, y, y_pred):
    del model
    return keras.losses.MeanSquaredError()(y, y_pred)


_LOSSES = [_average_loss, _average_loss_of_the_global_batch, _loss_of_keras]


def _train(compute_loss, strategy, make_optimizer=None):
    """Trains; returns the losses that a program would print, and the final weights."""
    with strategy.scope():
        kernel = keras.layers.Dense(1, kernel_initializer="ones", kernel_regularizer=keras.regularizers.L2(0.1))
        model = keras.Sequential([keras.Input((4,)), kernel])
        optimizer = keras.optimizers.SGD(0.05)
    if make_optimizer is not None:
        optimizer = make_optimizer(model)

    def train_step(x, y):
        with tf.GradientTape() as tape:
            loss = compute_loss(model, y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def distributed_train_step(batch):
        return strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(train_step, args=batch), axis=None)

    dataset = tf.data.Dataset.from_tensor_slices(_rows()).batch(_GLOBAL_BATCH_SIZE)
    dataset = strategy.experimental_distribute_dataset(dataset)
    losses = [float(distributed_train_step(batch)) for _ in range(2) for batch in dataset]
    return losses, model.get_weights()


@functools.cache
def _trained_alone(compute_loss):
    return _train(compute_loss, tf.distribute.get_strategy())


class TutorialTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(*_LOSSES)
    @pytest.mark.slow(after=1)
    @pytest.mark.stress(but=1)
    def test_equals_one_process(self, compute_loss):
        expected = _trained_alone(compute_loss)
        for result in MEMBERS["pipe_sgd"].run(functools.partial(_train, compute_loss), pipeline_width=1):
            self.assertAllClose(result, expected, rtol=1e-5, atol=1e-5)

    @parameterized.product(is_built=[False, True], is_scaled=[False, True])
    @pytest.mark.slow(after=1)
    def test_an_optimizer_that_was_made_outside_of_the_scope(self, is_built, is_scaled):
        """Keras lets such an optimizer add up gradients by itself, which must not happen twice."""

        def make_optimizer(model):
            optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
            if is_scaled:
                optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=1.0)
            if is_built:
                optimizer.build(model.trainable_variables)
            return optimizer

        train = functools.partial(_train, _average_loss, make_optimizer=make_optimizer)
        expected = train(tf.distribute.get_strategy())
        for result in MEMBERS["pipe_sgd"].run(train, pipeline_width=1):
            self.assertAllClose(result, expected, rtol=1e-5, atol=1e-5)

    @parameterized.product(compute_loss=_LOSSES, name=list(MEMBERS))
    @pytest.mark.stress(but=1)
    @pytest.mark.slow(after=2)
    def test_tells_the_loss_of_the_whole_batch(self, name, compute_loss):
        run = functools.partial(MEMBERS[name].run, functools.partial(_train, compute_loss))
        if not MEMBERS[name].is_in_lock_step:
            with self.assertRaisesRegex(ValueError, _NO_LOOPS if name == "canary" else _REFUSED):
                run()
            return
        (first, _), (second, _) = run()
        self.assertAllEqual(first, second)
        self.assertAllClose(first[0], _trained_alone(compute_loss)[0][0], rtol=1e-5)

    @parameterized.parameters(*MEMBERS)
    @pytest.mark.stress(but=4)
    def test_world_of_one(self, name):
        result = _train(_average_loss, MEMBERS[name].make())
        self.assertAllClose(result, _trained_alone(_average_loss), rtol=1e-6, atol=1e-6)


class ReductionTest(tf.test.TestCase, parameterized.TestCase):
    def test_values_of_all_ranks(self):
        def run(strategy):
            own = tf.range(3 - strategy.rank)  # [0, 1, 2], and [0, 1].

            @tf.function
            def in_a_graph():
                return (
                    strategy.reduce("MEAN", tf.cast(own, tf.float32), axis=0),
                    strategy.reduce("SUM", own, axis=0),
                    strategy.gather(own, axis=0),
                )

            eagerly = (
                strategy.reduce("SUM", {"a": strategy.rank, "b": [tf.constant([1.5, strategy.rank])]}, axis=None),
                strategy.reduce("MEAN", tf.constant(strategy.rank, tf.bfloat16), axis=None),
            )
            return [each.numpy().tolist() for each in tf.nest.flatten((in_a_graph(), eagerly, in_a_graph()))]

        for values in MEMBERS["pipe_sgd"].run(run):
            self.assertEqual(values[:3], [np.float32(4 / 5), 4, [0, 1, 2, 0, 1]])
            self.assertEqual(values[3:6], [1, [3, 1], 0.5])
            self.assertEqual(values[6:], values[:3])

    def test_means_have_the_type_that_tensorflow_gives_them(self):
        """Means of integers are fractions, as under MirroredStrategy with the same values on its replicas."""
        types = (tf.int16, tf.int32, tf.int64, tf.bfloat16, tf.float32)

        def reduce(strategy, values):
            return [strategy.reduce("MEAN", each, axis=axis) for each in values for axis in (None, 0)]

        def run(strategy):
            return reduce(strategy, [tf.cast([3, 4 + strategy.rank], each) for each in types])

        def step():
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            return [tf.cast([3, 4 + replica], each) for each in types]

        mirrored = tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"])
        expected = reduce(mirrored, mirrored.run(step))
        for means in MEMBERS["pipe_sgd"].run(run):
            self.assertEqual([each.dtype for each in means], [each.dtype for each in expected])
            for mean, other in zip(means, expected, strict=True):
                self.assertAllEqual(mean, other)

    def test_in_a_step(self):
        """The gradient of a sum over ranks is the sum of the ranks' gradients."""

        def run(strategy):
            def step():
                context = tf.distribute.get_replica_context()
                x = tf.constant([1.0, 2.0])
                with tf.GradientTape() as tape:
                    tape.watch(x)
                    y = (strategy.rank + 1.0) * context.all_reduce("SUM", x * x)
                return y, tape.gradient(y, x), context.all_gather(x[: strategy.rank + 1], axis=0)

            return [each.numpy().tolist() for each in tf.function(lambda: strategy.run(step))()]

        for rank, values in enumerate(MEMBERS["pipe_sgd"].run(run)):
            total = [NUM_RANKS * 1.0, NUM_RANKS * 4.0]
            # Each x is in both ranks' sums. One sum counts once, the other twice.
            self.assertEqual(values, [[(rank + 1) * each for each in total], [3 * 2.0, 3 * 4.0], [1.0, 1.0, 2.0]])

    @parameterized.parameters("pipe_sgd", "hop")
    @pytest.mark.slow
    @pytest.mark.stress(but=1)
    def test_synchronized_batch_normalization(self, name):
        def run(strategy):
            with strategy.scope():
                normalization = keras.layers.BatchNormalization(momentum=0.5, synchronized=True)
                dense = keras.layers.Dense(1, kernel_initializer="ones")
                model = keras.Sequential([keras.Input((4,)), normalization, dense])
                model.compile(keras.optimizers.SGD(0.05), "mse")
            model.fit(*_rows(), batch_size=_GLOBAL_BATCH_SIZE, epochs=2, shuffle=False, verbose=0)
            return model.get_weights()

        if name == "hop":
            with self.assertRaisesRegex(ValueError, _REFUSED):
                MEMBERS[name].run(run)
            return
        expected = run(tf.distribute.get_strategy())
        for weights in MEMBERS[name].run(run, pipeline_width=1):
            self.assertAllClose(weights, expected, rtol=1e-4, atol=1e-4)

    def test_a_step_that_is_broken_off_leaves_nothing(self):
        """The next call does not use the value of the aborted step."""

        def run(strategy):
            @tf.function
            def fails(x):
                return strategy.reduce("SUM", x, axis=None) + tf.gather([1.0], tf.cast(x, tf.int32))

            with contextlib.suppress(tf.errors.InvalidArgumentError):
                fails(tf.constant(5.0 + strategy.rank))
            results = []
            for value in (100.0, 200.0):
                try:
                    results.append(float(strategy.reduce("SUM", value, axis=None)))
                except tf.errors.InvalidArgumentError as error:
                    results.append(error.message)
            return results

        for results in MEMBERS["pipe_sgd"].run(run):
            for result, expected in zip(results, (200.0, 400.0), strict=True):
                self.assertTrue(result == expected or "assertion failed" in str(result), result)

    @pytest.mark.slow
    def test_a_rank_has_left(self):
        def run(strategy):
            _train(_average_loss, strategy)
            if strategy.rank == 1:
                strategy.shutdown()
                return ""
            try:
                strategy.reduce("SUM", 1.0, axis=None)
            except tf.errors.InvalidArgumentError as error:
                return error.message
            return "none"

        first, _ = MEMBERS["pipe_sgd"].run(run)
        self.assertRegex(first, "PeerLostError.*rank 1")


if __name__ == "__main__":
    absltest.main()

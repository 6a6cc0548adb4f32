"""Tests of DTS in a custom loop: `synchronize` and `fit` merge windows in flight, and windows then begin anew."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import hop_tf
from hop_tf import codecs
from support import in_process, two_kernels

_NUM_STEPS = 13
_SHAPE = (3, 4)
_RATE, _MOMENTUM = 0.05, 0.9
_SGD = functools.partial(keras.optimizers.SGD, momentum=_MOMENTUM)
_ADAM = functools.partial(keras.optimizers.Adam, beta_1=0.0)


def _cluster(world_size, **settings):
    return in_process(hop_tf.DTSStrategy, world_size, **settings)


def _gradients():
    """Returns the gradients of each step and of up to three ranks. They do not depend on the weights."""
    return np.random.default_rng(0).normal(size=(_NUM_STEPS, 3, *_SHAPE)).astype(np.float32)


def _synchronous(gradients):
    """Returns weights and velocity after a step for each gradient. They begin with ones and zeros."""
    w, v = np.ones(_SHAPE), np.zeros(_SHAPE)
    for gradient in gradients.astype(np.float64):
        v = _MOMENTUM * v - _RATE * gradient
        w += v
    return w, v


class _Loop:
    """A model, its optimizer, and the steps of a custom loop."""

    def __init__(self, strategy, make_optimizer=_SGD):
        self._strategy = strategy
        with strategy.scope():
            kernel = keras.layers.Dense(_SHAPE[1], use_bias=False, kernel_initializer="ones")
            self.model = keras.Sequential([keras.Input(_SHAPE[:1]), kernel])
            self.optimizer = make_optimizer(_RATE)
            self.optimizer.build(self.model.trainable_variables)

    @tf.function
    def step(self, gradient):
        self._strategy.run(lambda: self.optimizer.apply([gradient], self.model.trainable_variables))

    def train(self, steps):
        for step in steps:
            part = _gradients()[step, self._strategy.rank] / self._strategy.num_replicas_in_sync
            self.step(tf.constant(part))

    def synchronize(self):
        """Synchronizes; returns weights and velocity."""
        self._strategy.synchronize(self.model)
        return self.model.get_weights()[0], *(velocity.numpy() for velocity in self.optimizer.momentums)


class LoopTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        {"delay": 2, "interval": 5, "codec": codecs.TopK(ratio=0.2, warmup_steps=1)},
        {"delay": 3, "interval": 2},
        {"delay": 4, "interval": 1},
        {"delay": 4, "interval": 2, "warmup_steps": 3},
    )
    @pytest.mark.stress(after=1)
    def test_synchronize_before_the_last_step(self, **settings):
        """With a linear loss weights end as with synchronous SGD, however often and when `synchronize` is called."""
        ends = (5, 6, 10, _NUM_STEPS)

        def run(strategy):
            loop = _Loop(strategy)
            seen = []
            for start, end in zip((0, *ends), ends, strict=False):
                loop.train(range(start, end))
                seen.append(loop.synchronize())
            return seen

        results = _cluster(2, **settings).run(run)
        means = _gradients()[:, :2].mean(1)
        for seen in results:
            for end, (weights, _) in zip(ends, seen, strict=True):
                self.assertAllClose(weights, _synchronous(means[:end])[0], rtol=1e-5, atol=1e-5)
        self.assertAllEqual([values[0] for values in results[0]], [values[0] for values in results[1]])
        velocities = [values[1] for of_rank in results for values in of_rank[-1:]]  # Each rank's own.
        self.assertAllClose(np.mean(velocities, axis=0), _synchronous(means)[1], rtol=1e-5, atol=1e-5)
        self.assertGreater(np.abs(np.subtract(*velocities)).max(), 0.01)

    @parameterized.parameters(("assign", 4, 4), ("assign", 5, 2), ("synchronize", 4, 4))
    @pytest.mark.slow(after=1)
    def test_weights_that_all_ranks_assign_stay(self, how, delay, interval):
        """Also right after `synchronize`, and in a window after one that was assigned to."""
        new = np.full(_SHAPE, 7.0, np.float32)

        def run(strategy):
            loop, seen = _Loop(strategy), []
            for step in range(3 * _NUM_STEPS):
                if step in (5, 20):
                    if how == "synchronize":
                        loop.synchronize()
                    loop.model.layers[0].kernel.assign(step * new)
                loop.step(tf.zeros(_SHAPE))
                seen.append(loop.model.get_weights()[0])
            return seen

        for seen in _cluster(2, delay=delay, interval=interval).run(run):
            self.assertAllClose(seen, [np.ones(_SHAPE)] * 5 + [5 * new] * 15 + [20 * new] * (len(seen) - 20))

    @parameterized.parameters((4, 4), (2, 2), (0, 3))
    @pytest.mark.slow(after=1)
    def test_assigned_weights_are_no_longer_steps(self, delay, interval):
        """Changes of an adaptive optimizer are made longer, but not the way to a value that the program assigns."""

        def run(strategy):
            loop = _Loop(strategy, make_optimizer=_ADAM)
            loop.train(range(_NUM_STEPS))
            loop.optimizer.learning_rate = 0.0
            loop.model.layers[0].kernel.assign(tf.fill(_SHAPE, 7.0))
            loop.train(range(_NUM_STEPS))
            loop.step(tf.zeros(_SHAPE))
            strategy.synchronize(loop.model)
            return loop.model.get_weights()[0]

        for weights in _cluster(3, delay=delay, interval=interval).run(run):
            self.assertAllClose(weights, np.full(_SHAPE, 7.0), rtol=1e-5, atol=1e-5)

    @parameterized.product(windows=[(4, 4), (5, 2)], step=[_NUM_STEPS, 2 * _NUM_STEPS], is_put_back=[False, True])
    @pytest.mark.slow(after=2)
    def test_variables_that_are_not_assigned_lose_nothing(self, windows, step, is_put_back):
        """Nor do those that get their value back."""
        delay, interval = windows

        def run(strategy):
            with strategy.scope():
                model, optimizer = two_kernels(*_SHAPE), keras.optimizers.SGD(_RATE)
            first, second = model.trainable_variables
            train = tf.function(
                lambda gradient: strategy.run(lambda: optimizer.apply([gradient, gradient], [first, second]))
            )

            def assign():
                before = first.numpy()
                first.assign(tf.fill(_SHAPE, 7.0))
                if is_put_back:
                    first.assign(before)

            for number in range(2 * _NUM_STEPS):
                if number == step:
                    assign()
                train(tf.constant(_gradients()[number % _NUM_STEPS, strategy.rank] / 2))
            if step == 2 * _NUM_STEPS:
                assign()
            strategy.synchronize(model)
            return first.numpy(), second.numpy()

        change = -_RATE * _gradients()[:, :2].mean(1).sum(0)
        for first, second in _cluster(2, delay=delay, interval=interval).run(run):
            self.assertAllClose(second, 1 + 2 * change, rtol=1e-5, atol=1e-5)
            later = change if step == _NUM_STEPS else np.zeros(_SHAPE)
            self.assertAllClose(first, 1 + 2 * change if is_put_back else 7 + later, rtol=1e-5, atol=1e-5)

    @parameterized.product(
        windows=[(4, 4), (2, 2)],
        make_optimizer=[_SGD, _ADAM],
        how=["synchronize", "fit"],
    )
    @pytest.mark.slow(after=2)
    def test_weights_that_are_assigned_after_the_last_step_stay(self, windows, make_optimizer, how):
        delay, interval = windows

        def run(strategy):
            loop = _Loop(strategy, make_optimizer=make_optimizer)
            loop.train(range(_NUM_STEPS))
            loop.model.layers[0].kernel.assign(tf.fill(_SHAPE, 7.0))
            if how == "synchronize":
                strategy.synchronize(loop.model)
            else:
                loop.model.compile(keras.optimizers.SGD(0.0), "mse")
                loop.model.fit(np.ones((4, 3)), np.ones((4, 4)), batch_size=4, verbose=0)
            return loop.model.get_weights()[0]

        for weights in _cluster(3, delay=delay, interval=interval).run(run):
            self.assertAllClose(weights, np.full(_SHAPE, 7.0), rtol=1e-5, atol=1e-5)

    def test_ranks_that_have_made_fewer_steps(self):
        """Such ranks wait for the others, have no part in their later windows, and get their weights."""

        def run(strategy):
            loop = _Loop(strategy, make_optimizer=keras.optimizers.SGD)
            loop.train(range(9 if strategy.rank == 0 else 5))
            loop.synchronize()
            loop.train(range(9, _NUM_STEPS))
            return loop.synchronize()

        first, second, _ = np.moveaxis(_gradients().astype(np.float64), 1, 0)
        alone = first[6:9].sum(0)
        both = (first[:6].sum(0) + second[:5].sum(0) + first[9:].sum(0) + second[9:].sum(0)) / 2
        for (last,) in _cluster(2, delay=2, interval=3).run(run):
            self.assertAllClose(last, 1 - _RATE * (both + alone), rtol=1e-5, atol=1e-5)

    @pytest.mark.slow
    def test_fit_after_a_loop(self):
        """`fit` begins with the weights of all ranks from the loop, without a call by the user."""
        rows = 2 * np.ones((4, *_SHAPE[:1]), np.float32)

        def run(strategy):
            loop = _Loop(strategy)
            loop.train(range(_NUM_STEPS))
            loop.model.compile(loop.optimizer, lambda y, y_pred: tf.reduce_sum(y_pred, axis=-1))
            loop.model.fit(rows, rows, batch_size=2, verbose=0)
            return loop.model.get_weights()[0]

        expected, _ = _synchronous(np.concatenate([_gradients()[:, :2].mean(1), 2 * np.ones((2, *_SHAPE), "f")]))
        for last in _cluster(2, delay=3, interval=2).run(run):
            self.assertAllClose(last, expected, rtol=1e-5, atol=1e-5)

    @pytest.mark.slow
    def test_moving_statistics_that_are_averaged_are_no_change(self):
        """Steps of `train_on_batch` exchange moving statistics, too."""
        random = np.random.default_rng(0)
        x = random.normal(size=(6, 2, 8, 3)).astype(np.float32)

        def run(strategy):
            with strategy.scope():
                model = keras.Sequential(
                    [keras.Input((3,)), keras.layers.BatchNormalization(momentum=0.5), keras.layers.Dense(1)]
                )
                model.compile(keras.optimizers.SGD(_RATE), "mse")
            for step, of_ranks in enumerate(x):
                model.train_on_batch(of_ranks[strategy.rank], np.ones(8))
                if step in (2, 5):
                    strategy.synchronize(model)
            return [weight.numpy() for weight in model.non_trainable_weights]

        mean, variance = np.zeros(3), np.ones(3)
        for of_ranks in x.astype(np.float64):
            mean = 0.5 * (mean + of_ranks.mean(1).mean(0))
            variance = 0.5 * (variance + of_ranks.var(1).mean(0))
        for statistics in _cluster(2, delay=2, interval=2).run(run):
            self.assertAllClose(statistics, [mean, variance], rtol=1e-5, atol=1e-5)

    @parameterized.parameters({"delay": 3, "interval": 2}, {"delay": 0, "interval": 1})
    @pytest.mark.stress(after=1)
    @pytest.mark.slow
    def test_a_loop_after_fit_with_the_same_optimizer(self, **settings):
        """The loop has no session, so each rank would go on alone."""

        def run(strategy):
            loop = _Loop(strategy)
            loop.model.compile(loop.optimizer, "mse")
            loop.model.fit(np.ones((4, 3)), np.ones((4, 4)), batch_size=2, verbose=0)
            with self.assertRaisesRegex(tf.errors.InvalidArgumentError, "was made after the end of `fit`"):
                loop.train(range(_NUM_STEPS))

        _cluster(2, **settings).run(run)

    @pytest.mark.slow
    def test_not_within_fit(self):
        def run(strategy):
            loop = _Loop(strategy)
            loop.model.compile(loop.optimizer, "mse")
            callback = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: loop.synchronize())
            with self.assertRaisesRegex(RuntimeError, "`synchronize` was called while a `fit`"):
                loop.model.fit(np.ones((4, 3)), np.ones((4, 4)), batch_size=2, verbose=0, callbacks=[callback])

        _cluster(2).run(run)


if __name__ == "__main__":
    tf.test.main()

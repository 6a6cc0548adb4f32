"""Tests of DTS with an outer optimizer, against NumPy. Its state is equal on all ranks, and can be stored."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import hop_tf
from hop_tf.arguments import identity_of
from support import REFUSALS, fewer_steps, in_process
from support.references import State, adam, late_windows, sgd

_BATCH_SIZE = 60
_NUM_ROWS = 600
_NUM_STEPS = _NUM_ROWS // _BATCH_SIZE
_RATE = 0.05
_OUTER = functools.partial(keras.optimizers.SGD, 0.7, momentum=0.9, nesterov=True)


def _cluster(world_size, make_outer=_OUTER, **settings):
    # Each rank has an optimizer of its own.
    return in_process(
        lambda **arguments: hop_tf.DTSStrategy(outer_optimizer=make_outer(), **arguments), world_size, **settings
    )


@functools.cache
def _problem():
    """Returns inputs, targets and initial weights."""
    random = np.random.default_rng(0)
    x = random.normal(size=(_NUM_ROWS, 3)).astype(np.float32)
    y = x @ random.normal(size=(3, 4)) + random.normal(size=(_NUM_ROWS, 4))
    return x, y.astype(np.float32), random.normal(size=(3, 4)).astype(np.float32)


def _gradient(world_size):
    x, y, _ = _problem()

    def gradient(rank, step, w):
        share = _BATCH_SIZE // world_size
        rows = slice(step * _BATCH_SIZE + rank * share, step * _BATCH_SIZE + (rank + 1) * share)
        return 2 / share * x[rows].T.astype(np.float64) @ (x[rows] @ w - y[rows])

    return gradient


def _diloco(world_size, interval, outer):
    """Computes Algorithm 1 of the paper, with SGD as the inner optimizer."""
    gradient, merged = _gradient(world_size), State.of(_problem()[2])
    for first in range(0, _NUM_STEPS, interval):
        ranks = [merged.w] * world_size
        for step in range(first, min(first + interval, _NUM_STEPS)):
            ranks = [w - _RATE * gradient(rank, step, w) for rank, w in enumerate(ranks)]
        merged = outer(merged, np.mean([merged.w - w for w in ranks], axis=0))
    return merged.w


def _summed_square(y_true, y_pred):
    return tf.reduce_sum(tf.square(y_true - y_pred), axis=-1)


def _model(strategy, layers=()):
    with strategy.scope():
        kernel = keras.layers.Dense(4, use_bias=False)
        model = keras.Sequential([keras.Input((3,)), *layers, kernel])
        kernel.set_weights([_problem()[2]])
        model.compile(keras.optimizers.SGD(_RATE), _summed_square)
    return model


def _fit(model, rows=slice(None), **arguments):
    x, y, _ = _problem()
    model.fit(x[rows], y[rows], batch_size=_BATCH_SIZE, shuffle=False, verbose=0, **arguments)


def _all_of(strategy, model):
    """Returns the weights and the outer optimizer's variables."""
    return [*model.get_weights(), *(variable.numpy() for variable in strategy.outer_optimizer.variables)]


class OuterTest(tf.test.TestCase, parameterized.TestCase):
    def check_equal(self, results):
        for of_rank in results:
            for mine, first in zip(of_rank, results[0], strict=True):
                self.assertAllEqual(mine, first)

    @parameterized.parameters((2, 5, "nesterov"), (3, 3, "adam"), (2, 1, "nesterov"))
    @pytest.mark.stress(after=1)
    def test_without_delay_it_is_diloco(self, world_size, interval, name):
        make_outer, outer = {
            "nesterov": (_OUTER, sgd(0.7, 0.9, nesterov=True)),
            "adam": (lambda: keras.optimizers.Adam(0.1, epsilon=0.01), adam(0.1, 0.01)),
        }[name]

        def run(strategy):
            model = _model(strategy)
            _fit(model)
            return _all_of(strategy, model)

        results = _cluster(world_size, make_outer, delay=0, interval=interval).run(run)
        self.assertAllClose(results[0][0], _diloco(world_size, interval, outer), rtol=1e-5, atol=1e-5)
        self.check_equal(results)

    @parameterized.parameters((2, 4, 4, {}), (3, 3, 2, {"codec": "truncate16"}), (2, 7, 3, {"run_eagerly": True}))
    @pytest.mark.stress(after=1)
    def test_own_changes_stand_in_during_a_delay(self, world_size, delay, interval, arguments):
        codec = arguments.get("codec")

        def run(strategy):
            model = _model(strategy)
            model.run_eagerly = "run_eagerly" in arguments
            _fit(model)
            return _all_of(strategy, model)

        _, expected = late_windows(
            _problem()[2],
            sgd(_RATE),
            _gradient(world_size),
            world_size=world_size,
            delay=delay,
            interval=interval,
            num_steps=_NUM_STEPS,
            outer=sgd(0.7, 0.9, nesterov=True),
        )
        results = _cluster(world_size, delay=delay, interval=interval, codec=codec).run(run)
        if codec is None:
            self.assertAllClose(results[0][0], expected, rtol=1e-5, atol=1e-5)
        self.check_equal(results)

    @pytest.mark.slow
    def test_moving_statistics_take_the_mean(self):
        x = _problem()[0]

        def run(strategy):
            model = _model(strategy, [keras.layers.BatchNormalization(momentum=0.5)])
            _fit(model)
            return [weight.numpy() for weight in model.non_trainable_weights]

        mean, variance = np.zeros(3), np.ones(3)
        for rows in x.reshape(_NUM_STEPS, 2, -1, 3).astype(np.float64):
            mean = 0.5 * (mean + rows.mean(1).mean(0))
            variance = 0.5 * (variance + rows.var(1).mean(0))
        for statistics in _cluster(2, delay=2, interval=3).run(run):
            self.assertAllClose(statistics, [mean, variance], rtol=1e-5, atol=1e-5)

    def test_clips(self):
        """The mean change is longer than the outer optimizer's limit."""

        def run(strategy):
            model = _model(strategy)
            _fit(model)
            return model.get_weights()[0]

        make_outer = functools.partial(keras.optimizers.SGD, 1.0, global_clipnorm=1e-3)
        for last in _cluster(2, make_outer, delay=0, interval=_NUM_STEPS).run(run):
            self.assertAllClose(np.linalg.norm(last - _problem()[2]), 1e-3, rtol=1e-3)

    @pytest.mark.stress
    def test_a_model_that_is_compiled_again_has_another_one(self):
        def run(strategy):
            model = _model(strategy)
            _fit(model)
            first = strategy.outer_optimizer
            with strategy.scope():
                model.compile(keras.optimizers.SGD(_RATE), _summed_square)
            _fit(model)
            assert strategy.outer_optimizer is not first
            return _all_of(strategy, model)

        self.check_equal(_cluster(3, delay=2, interval=2).run(run))

    @pytest.mark.slow
    def test_after_a_rank_that_ended_early(self):
        """`synchronize` averages the outer optimizer's variables, too."""

        def run(strategy):
            model = _model(strategy)
            _fit(model, **fewer_steps(strategy, 5))
            strategy.synchronize(model)
            synchronized = _all_of(strategy, model)
            _fit(model)
            return synchronized, _all_of(strategy, model)

        for results in zip(*_cluster(2, delay=2, interval=2).run(run), strict=True):
            self.check_equal(results)

    @parameterized.parameters("before the first step", "after a fit")
    @pytest.mark.stress(after=1)
    @pytest.mark.slow
    def test_goes_on_from_a_checkpoint(self, when):
        """Training continues as if it had never ended. All ranks begin with rank 0's checkpoint."""
        path = f"{self.get_temp_dir()}/{when}"
        first, second = slice(0, 4 * _BATCH_SIZE), slice(4 * _BATCH_SIZE, None)

        def checkpoint(strategy, model):
            return tf.train.Checkpoint(model=model, outer=strategy.outer_optimizer)

        def save(strategy):
            model = _model(strategy)
            _fit(model, first)
            if strategy.is_chief:
                checkpoint(strategy, model).write(path)
            _fit(model, second)
            return _all_of(strategy, model)

        def restore(strategy):
            model = _model(strategy)
            if when == "after a fit":
                _fit(model, second)
            checkpoint(strategy, model).read(path).expect_partial()
            _fit(model, second)
            return _all_of(strategy, model)

        saved = _cluster(2, delay=2, interval=2).run(save)
        restored = _cluster(2, delay=2, interval=2).run(restore)
        self.assertLen(restored[0], 4)  # Weights, steps, rate and velocity.
        self.check_equal([*saved, *restored])


class RefusedTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        (lambda: "sgd", "`outer_optimizer` must be a keras.optimizers.Optimizer .* Received: .*'sgd'"),
        (lambda: keras.optimizers.LossScaleOptimizer(_OUTER()), "`outer_optimizer` must be .* Received: .*LossScale"),
        (lambda: keras.optimizers.SGD(use_ema=True), "`use_ema` must not be set .* Received: use_ema=True in SGD"),
        (
            lambda: keras.optimizers.SGD(gradient_accumulation_steps=2),
            "`gradient_accumulation_steps` must not be set in `outer_optimizer`",
        ),
    )
    def test_what_makes_no_sense(self, make_outer, message):
        with self.assertRaisesRegex(ValueError, message):
            hop_tf.DTSStrategy(outer_optimizer=make_outer())

    @pytest.mark.slow
    def test_several_optimizers_in_a_step(self):
        def run(strategy):
            with strategy.scope():
                layers = [keras.layers.Dense(4, name=name) for name in ("first", "second")]
                model = keras.Sequential([keras.Input((3,)), *layers])
                optimizers = keras.optimizers.OptimizerMap(keras.optimizers.SGD(_RATE))
                optimizers[".*second.*"] = keras.optimizers.SGD(_RATE, momentum=0.9)
                model.compile(keras.optimizers.MultiOptimizer(optimizers), "mse")
            _fit(model)

        with self.assertRaisesRegex(REFUSALS, "`outer_optimizer` must be None if a step trains with several"):
            _cluster(2).run(run)

    def test_ranks_compare_it(self):
        def identity(outer_optimizer):
            return identity_of(hop_tf.DTSStrategy(outer_optimizer=outer_optimizer)._settings)["outer_optimizer"]

        self.assertEqual(identity(_OUTER()), identity(_OUTER()))
        self.assertLen({*map(identity, (_OUTER(), keras.optimizers.SGD(0.7), keras.optimizers.SGD(0.6), None))}, 4)


if __name__ == "__main__":
    tf.test.main()

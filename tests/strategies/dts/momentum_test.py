"""Tests of DTS with `compensation="momentum"`, the paper's rule, against NumPy and synchronous SGD."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import hop_tf
from hop_tf import codecs
from hop_tf.runtime.autotuning import Setting
from support import REFUSALS, fewer_steps, in_process, linear_loss, scripted_choices
from support.least_squares import BATCH_SIZE, NUM_ROWS, gradient_in, linear_gradient, problem, rows_of, summed_square
from support.references import int8, mesh_mean, momentum_windows, truncate16

_NUM_STEPS = 2 * NUM_ROWS // BATCH_SIZE
_RATE = 0.05
_MOMENTUM = 0.9


def _cluster(world_size, **settings):
    return in_process(functools.partial(hop_tf.DTSStrategy, compensation="momentum"), world_size, **settings)


def _reference(world_size, delay, interval, nesterov=False, num_outputs=4, **arguments):
    settings = {"world_size": world_size, "delay": delay, "interval": interval, "num_steps": _NUM_STEPS}
    gradient, w = gradient_in(world_size, num_outputs), problem(num_outputs)[2]
    return momentum_windows(
        w, lambda step: _RATE, gradient, momentum=_MOMENTUM, nesterov=nesterov, **settings, **arguments
    )


def _sgd(rate=_RATE, **arguments):
    return keras.optimizers.SGD(rate, momentum=_MOMENTUM, **arguments)


def _compiled(strategy, optimizer=None, loss=summed_square, num_outputs=4, layers=(), dtype=None, **compile_args):
    with strategy.scope():
        kernel = keras.layers.Dense(num_outputs, use_bias=False, dtype=dtype)
        model = keras.Sequential([keras.Input((3,)), *layers, kernel])
        kernel.set_weights([problem(num_outputs)[2]])
        model.compile(optimizer or _sgd(), loss, **compile_args)
    return model


def _fit(model, rows=slice(None), **arguments):
    x, y, _ = problem(model.output_shape[-1])
    return model.fit(x[rows], y[rows], batch_size=BATCH_SIZE, shuffle=False, verbose=0, **arguments)


def _steps(first, stop):
    return slice(first * BATCH_SIZE, stop * BATCH_SIZE)


def _state(model):
    return [*model.get_weights(), *(velocity.numpy() for velocity in model.optimizer.momentums)]


def _train(strategy, optimizer=None, **arguments):
    """Trains; returns the weights after each step, and the final state."""
    model, history = _compiled(strategy, optimizer, **arguments), []
    record = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: history.append(model.get_weights()[0])
    )
    _fit(model, epochs=2, callbacks=[record])
    return history, _state(model)


def _synchronous(make_optimizer, num_steps):
    """Returns weights and velocity after Keras's own SGD has applied mean gradients that do not depend on weights."""
    variable, optimizer = keras.Variable(problem()[2]), make_optimizer()
    for step in range(num_steps):
        optimizer.apply([tf.constant(linear_gradient(step), tf.float32)], [variable])
    return [variable.numpy(), optimizer.momentums[0].numpy()]


class MomentumTest(tf.test.TestCase, parameterized.TestCase):
    def assert_equal_states(self, states):
        for state in states:
            for mine, first in zip(state, states[0], strict=True):
                self.assertAllEqual(mine, first)  # To the bit.

    @parameterized.parameters(
        (2, 4, 4),
        (3, 7, 3, {"nesterov": True}),
        (2, 0, 1),
        (5, 5, 2),
        (3, 2, 5, {"nesterov": True}),
        (2, 5, 2, {"nesterov": True}, {}, 5),
        (2, 20, 12),
        (4, 1, 1),
        (2, 3, 2, {}, {"run_eagerly": True}),
        (2, 3, 2, {}, {"steps_per_execution": 5}),
    )
    @pytest.mark.stress(after=3)
    @pytest.mark.slow(after=2)
    def test_equals_the_reference_step_by_step(
        self, world_size, delay, interval, rule=(), compile_args=(), num_early=0
    ):
        rule = dict(rule)
        history, final = _reference(world_size, delay, interval, **rule, warmup_steps=num_early)
        results = _cluster(world_size, delay=delay, interval=interval, warmup_steps=num_early).run(
            lambda strategy: _train(strategy, _sgd(**rule), **dict(compile_args))
        )
        for rank, (of_rank, state) in enumerate(results):
            if "steps_per_execution" not in compile_args:
                self.assertAllClose(of_rank, [weights[rank] for weights in history], rtol=1e-5, atol=1e-5)
            self.assertAllClose(state[0], final, rtol=1e-5, atol=1e-5)
        self.assert_equal_states([state for _, state in results])

    @parameterized.parameters(
        (2, 3, 2, {}),
        (3, 5, 5, {"nesterov": True}),
        (2, 1, 4, {"nesterov": True}),
        (2, 4, 4, {}, {"batch_shares": [3, 1]}),
        (2, 3, 2, {"nesterov": True}, {}, "float64"),
        (2, 3, 2, {}, {"warmup_steps": 3}),
    )
    @pytest.mark.stress(after=1)
    @pytest.mark.slow
    def test_is_synchronous_where_gradients_do_not_depend_on_weights(
        self, world_size, delay, interval, rule, settings=(), dtype=None
    ):
        """Also in several parts, with a schedule of learning rates, and the velocity with it."""

        def make_optimizer():
            return _sgd(keras.optimizers.schedules.ExponentialDecay(_RATE, decay_steps=10, decay_rate=0.5), **rule)

        def run(strategy):
            model = _compiled(strategy, make_optimizer(), linear_loss, dtype=dtype)
            _fit(model, _steps(0, 3))
            _fit(model, _steps(3, 8))
            _fit(model)
            return _state(model)

        results = _cluster(world_size, delay=delay, interval=interval, **dict(settings)).run(run)
        expected = _synchronous(make_optimizer, _NUM_STEPS)
        for mine, synchronous in zip(results[0], expected, strict=True):
            self.assertAllClose(mine, synchronous, rtol=1e-5, atol=1e-5)
        self.assert_equal_states(results)

    @parameterized.parameters((3, "int8", int8), (2, "truncate16", truncate16), (5, "int8", int8))
    @pytest.mark.stress(after=1)
    @pytest.mark.slow
    def test_equals_the_reference_with_codec(self, world_size, codec, reference):
        """The first means are equal, except for values at the border of two codes, which may get either code."""
        arguments = {"world_size": world_size, "delay": 3, "interval": 2, "num_outputs": 1024}
        history, final = _reference(**arguments, mean=mesh_mean(reference))
        lossy = np.mean(np.abs(_reference(**arguments)[1] - final))
        results = _cluster(world_size, delay=3, interval=2, codec=codec).run(
            lambda strategy: _train(strategy, num_outputs=1024)
        )
        for rank, (of_rank, state) in enumerate(results):
            early = np.isclose(of_rank[:6], [weights[rank] for weights in history[:6]], rtol=1e-5, atol=1e-5)
            self.assertGreater(np.mean(early), 0.9)
            self.assertLess(np.mean(np.abs(state[0] - final)), 0.1 * lossy)
        self.assert_equal_states([state for _, state in results])

    @pytest.mark.slow
    def test_moving_statistics_are_averaged(self):
        def run(strategy):
            normalization = keras.layers.BatchNormalization(momentum=0.5)
            model = _compiled(strategy, layers=[normalization])
            x, y, _ = problem()
            model.fit(x + 3 * strategy.rank, y, batch_size=BATCH_SIZE, shuffle=False, verbose=0)
            return [*_state(model), *(weight.numpy() for weight in model.non_trainable_weights)]

        mean, variance, x = np.zeros(3), np.ones(3), problem()[0]
        for step in range(NUM_ROWS // BATCH_SIZE):
            of_ranks = [x[rows_of(step, rank, 2)] + 3 * rank for rank in range(2)]
            mean = 0.5 * (mean + np.mean([rows.mean(0) for rows in of_ranks], axis=0))
            variance = 0.5 * (variance + np.mean([rows.var(0) for rows in of_ranks], axis=0))
        results = _cluster(2, delay=2, interval=3).run(run)
        self.assertAllClose(results[0][-2:], [mean, variance], rtol=1e-5, atol=1e-5)
        self.assert_equal_states(results)

    def test_weights_that_all_assign_in_a_step_stay(self):
        new = np.full((3, 4), 7.0, np.float32)

        def run(strategy):
            model = _compiled(strategy, loss=linear_loss)
            assign = keras.callbacks.LambdaCallback(
                on_train_batch_end=lambda batch, logs: model.set_weights([new]) if batch == 3 else None
            )
            _fit(model, callbacks=[assign])
            return _state(model)

        # Later steps move the new weights by what the velocity is by then.
        at, after = (_synchronous(_sgd, num_steps)[0] for num_steps in (4, NUM_ROWS // BATCH_SIZE))
        results = _cluster(2, delay=2, interval=2).run(run)
        self.assertAllClose(results[0][0], new + after - at, rtol=1e-5, atol=1e-5)
        self.assert_equal_states(results)

    @pytest.mark.slow
    def test_after_a_rank_that_ended_early(self):
        """`synchronize` gives both the same weights and velocity, so the next `fit` ends with equal ones."""

        def run(strategy):
            model = _compiled(strategy)
            _fit(model, **fewer_steps(strategy, 5))
            before = _state(model)
            strategy.synchronize(model)
            _fit(model)
            return before, _state(model)

        (before, last), (before_there, last_there) = _cluster(2, delay=2, interval=3).run(run)
        self.assertNotAllClose(before[1], before_there[1])
        self.assert_equal_states([last, last_there])

    @parameterized.parameters({"gradient_accumulation_steps": 2}, {"clipnorm": 0.5})
    @pytest.mark.stress(after=1)
    @pytest.mark.slow
    def test_whatever_precedes_the_update(self, **arguments):
        def run(strategy):
            model = _compiled(strategy, _sgd(**arguments), linear_loss)
            _fit(model)
            return _state(model)

        results = _cluster(2, delay=2, interval=1).run(run)
        if "clipnorm" not in arguments:
            synchronous = _synchronous(functools.partial(_sgd, **arguments), NUM_ROWS // BATCH_SIZE)
            self.assertAllClose(results[0][0], synchronous[0], rtol=1e-5, atol=1e-5)
        self.assert_equal_states(results)

    @pytest.mark.slow
    def test_delays_that_ranks_choose(self):
        delays = set()

        def run(strategy):
            model = _compiled(strategy, loss=linear_loss)
            look = keras.callbacks.LambdaCallback(
                on_train_batch_end=lambda batch, logs: delays.add(strategy.report()["delay"])
            )
            _fit(model, epochs=6, callbacks=[look])
            return _state(model)

        with scripted_choices(lambda window: Setting(0, [1, 3, 6, 2][window // 4 % 4])):
            results = _cluster(2).run(run)
        expected = _synchronous(_sgd, 6 * NUM_ROWS // BATCH_SIZE)
        self.assertContainsSubset({0, 2, 5}, delays)
        for mine, synchronous in zip(results[0], expected, strict=True):
            self.assertAllClose(mine, synchronous, rtol=1e-5, atol=1e-5)
        self.assert_equal_states(results)

    @pytest.mark.slow
    def test_a_window_is_two_vectors(self):
        def run(strategy):
            model = _compiled(strategy, num_outputs=9000)
            _fit(model, _steps(0, 4))
            before = strategy.report()["bytes_sent"]
            _fit(model, epochs=2)
            return strategy.report()["bytes_sent"] - before

        expected = (_NUM_STEPS / 4 + 1) * 2 * (2 * 1 / 2 * 4 * 3 * 9000)
        for num_bytes in _cluster(2, delay=4, interval=4, codec=None).run(run):
            self.assertBetween(num_bytes, expected, 1.1 * expected)


class RefusalsTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        {"codec": codecs.TopK(ratio=0.1)},
        {"skewed_shards": True},
        {"outer_optimizer": keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)},
    )
    def test_arguments(self, **arguments):
        with self.assertRaisesRegex(ValueError, "`compensation` must not be 'momentum' with .* Received: .*momentum"):
            hop_tf.DTSStrategy(compensation="momentum", **arguments)

    @parameterized.parameters(
        (lambda: keras.optimizers.Adam(), "Adam, momentum=None"),
        (lambda: keras.optimizers.SGD(_RATE), "SGD, momentum=0.0"),
        (lambda: _sgd(weight_decay=0.1), "weight_decay=0.1"),
    )
    @pytest.mark.stress(after=1)
    def test_optimizers(self, make_optimizer, received):
        with self.assertRaisesRegex(REFUSALS, f"`compensation` must not be 'momentum' unless .*Received: .*{received}"):
            _cluster(2).run(lambda strategy: _fit(_compiled(strategy, make_optimizer())))

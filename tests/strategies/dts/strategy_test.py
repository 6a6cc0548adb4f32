"""Tests of DTS under `fit`, with ranks in one process, against a NumPy reference of windows of changes."""

import functools
import threading
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import hop_tf
from hop_tf import codecs
from hop_tf.strategies.dts.exchange import DTSExchange
from support import REFUSALS, OwnOptimizers, Unused, fewer_steps, in_process, linear_loss, two_kernels
from support.least_squares import BATCH_SIZE, NUM_ROWS, gradient_in, linear_gradient, problem, rows_of, summed_square
from support.references import adam, gentle_windows, int8, late_windows, mesh_mean, sgd, truncate16

_OPTIONS = hop_tf.CommunicationOptions(timeout_seconds=60)
_NUM_STEPS = 2 * NUM_ROWS // BATCH_SIZE
_RATE = 0.05
_EPSILON = 1e-2  # With Adam's default, rounding errors have as much effect as gradients.


def _cluster(world_size, **settings):
    return in_process(hop_tf.DTSStrategy, world_size, **settings)


def _reference(
    world_size, delay, interval, update, num_outputs=4, num_steps=_NUM_STEPS, rule=None, adaptive=False, **arguments
):
    gradient = gradient_in(world_size, num_outputs)
    settings = {"world_size": world_size, "delay": delay, "interval": interval, "num_steps": num_steps}
    if rule is None:
        rule = functools.partial(gentle_windows if 3 <= delay >= interval else late_windows, adaptive=adaptive)
    return rule(problem(num_outputs)[2], update, gradient, **settings, **arguments)


def _applied(make_optimizer, gradients):
    """Returns the initial weights after one of Keras's optimizers has applied the gradients."""
    variable, optimizer = keras.Variable(problem(4)[2]), make_optimizer()
    for gradient in gradients:
        optimizer.apply([tf.constant(gradient, tf.float32)], [variable])
    return variable.numpy()


def _linear_result(make_optimizer, steps=range(_NUM_STEPS)):
    return _applied(make_optimizer, [linear_gradient(step) for step in steps])


def _compiled(strategy, make_optimizer, loss=summed_square, num_outputs=4, dtype=None, **compile_args):
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(num_outputs, use_bias=False, dtype=dtype)])
        model.set_weights([problem(num_outputs)[2]])
        model.compile(make_optimizer(), loss, **compile_args)
    return model


def _fit(model, num_steps=None, first_step=0, **arguments):
    x, y, _ = problem(model.output_shape[-1])
    rows = slice(first_step * BATCH_SIZE, None if num_steps is None else (first_step + num_steps) * BATCH_SIZE)
    model.fit(x[rows], y[rows], batch_size=BATCH_SIZE, shuffle=False, verbose=0, **arguments)


def _weights(model):
    return model.get_weights()[0]


def _train(strategy, make_optimizer, callbacks=(), **arguments):
    """Trains; returns the weights after each step, the final weights, and the report."""
    model, history = _compiled(strategy, make_optimizer, **arguments), []
    record = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: history.append(_weights(model)))
    _fit(model, epochs=2, callbacks=[record, *callbacks])
    return history, _weights(model), strategy.report()


def _sgd(**arguments):
    return functools.partial(keras.optimizers.SGD, _RATE, **arguments)


def _decaying(**arguments):
    schedule = keras.optimizers.schedules.ExponentialDecay(_RATE, decay_steps=10, decay_rate=0.5)
    return functools.partial(keras.optimizers.SGD, schedule, **arguments)


def _on_batch(number, call):
    return keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: call() if batch == number else None)


def _at_step(number, call):
    """A callback that makes a call after so many steps of a `fit`."""
    steps = iter(range(1, number + 1))
    return keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: next(steps, 0) == number and call())


def _is_adaptive(name):
    return name.startswith("adam")


_OPTIMIZERS = {
    "sgd": (_sgd(), sgd(_RATE)),
    "momentum": (_sgd(momentum=0.9), sgd(_RATE, 0.9)),
    "nesterov": (_sgd(momentum=0.9, nesterov=True), sgd(_RATE, 0.9, nesterov=True)),
    "decay": (_sgd(momentum=0.9, weight_decay=0.5), sgd(_RATE, 0.9, decay=0.5)),
    "adam": (lambda: keras.optimizers.Adam(_RATE, epsilon=_EPSILON), adam(_RATE, _EPSILON)),
    "adamw": (lambda: keras.optimizers.AdamW(_RATE, 0.2, epsilon=_EPSILON), adam(_RATE, _EPSILON, 0.2)),
}


class WindowsTest(tf.test.TestCase, parameterized.TestCase):
    def check(self, results, expected):
        history, final = expected
        for rank, (of_rank, last, report) in enumerate(results):
            self.assertAllClose(of_rank, [weights[rank] for weights in history], rtol=1e-5, atol=1e-5)
            self.assertAllClose(last, final, rtol=1e-5, atol=1e-5)
            self.assertAllEqual(last, results[0][1])  # To the bit.
            self.assertEqual(report["steps"], len(history))

    @parameterized.parameters(
        (2, 4, 4, "momentum"),
        (2, 4, 4, "momentum", "eager"),
        (3, 3, 1, "sgd"),
        (2, 6, 4, "decay"),
        (3, 0, 3, "adamw"),
        (5, 5, 2, "nesterov"),
        (3, 5, 2, "nesterov", "eager"),
        (4, 20, 12, "adam"),
        (3, 20, 12, "adam", "eager"),
        (2, 0, 1, "momentum"),
        (3, 2, 5, "adam"),
        (2, 7, 1, "momentum"),
        (2, 7, 1, "momentum", "eager"),
        (5, 4, 4, "adamw"),
        (2, 1, 1, "adam"),
    )
    @pytest.mark.stress(after=2)
    @pytest.mark.slow(after=2)
    def test_equals_the_reference_step_by_step(self, world_size, delay, interval, name, compensation="gentle"):
        make_optimizer, update = _OPTIMIZERS[name]
        cluster = _cluster(world_size, delay=delay, interval=interval, compensation=compensation)
        results = cluster.run(lambda s: _train(s, make_optimizer))
        rule = late_windows if compensation == "eager" else None
        expected = _reference(world_size, delay, interval, update, rule=rule, adaptive=_is_adaptive(name))
        self.check(results, expected)

    @parameterized.parameters((2, 4, 4), (3, 7, 3), (2, 1, 1), (3, 0, 1), (5, 20, 12))
    @pytest.mark.stress(after=2)
    @pytest.mark.slow(after=1)
    def test_equals_the_reference_with_skewed_shards(self, world_size, delay, interval):
        make_optimizer, update = _OPTIMIZERS["nesterov"]
        results = _cluster(world_size, delay=delay, interval=interval, skewed_shards=True).run(
            lambda s: _train(s, make_optimizer)
        )
        gentleness = {"kappa": 0.5, "t_2": 40} if delay >= 3 else {"kappa": 1, "t_2": 1}
        reference = functools.partial(gentle_windows, **gentleness, t_1=1, momentum=0.9)
        self.check(results, _reference(world_size, delay, interval, update, rule=reference))

    @parameterized.parameters(
        (2, 4, 4, 5, "momentum"),
        (3, 5, 2, 3, "adam"),
        (2, 2, 2, 4, "nesterov"),
        (3, 3, 3, 6, "nesterov", {"skewed_shards": True}),
        (2, 4, 4, _NUM_STEPS + 1, "momentum"),
        (2, 0, 4, 3, "momentum"),
    )
    @pytest.mark.stress(after=2)
    @pytest.mark.slow(after=1)
    def test_equals_the_reference_after_a_warmup(self, world_size, delay, interval, num_early, name, rule=()):
        make_optimizer, update = _OPTIMIZERS[name]
        settings = {"delay": delay, "interval": interval, "warmup_steps": num_early, **dict(rule)}
        with self.assertLogs("absl", "INFO") as logs:
            results = _cluster(world_size, **settings).run(lambda s: _train(s, make_optimizer))
        self.assertLen([line for line in logs.output if f"The first {num_early} steps are synchronous" in line], 1)
        is_adaptive, skewed = _is_adaptive(name), {"t_1": 1, "momentum": 0.9} if rule else {}
        gentleness = {"kappa": 0.5} if delay >= 3 else {"kappa": 1, "t_1": 1, "t_2": 1}
        gentleness = {**gentleness, **skewed, "adaptive": is_adaptive}
        reference = functools.partial(gentle_windows, **gentleness, warmup_steps=num_early)
        self.check(results, _reference(world_size, delay, interval, update, rule=reference))

    @parameterized.parameters("gentle", "momentum")
    @pytest.mark.stress
    def test_only_the_first_fit_has_a_warmup(self, compensation):
        """A warm-up of six steps sends six windows, where the other fits send one, and an empty last one."""

        def run(strategy):
            model = _compiled(strategy, _sgd(momentum=0.9), linear_loss)
            counts = [strategy.report()["messages_sent"]]
            for _ in range(3):
                _fit(model, num_steps=6)
                counts.append(strategy.report()["messages_sent"])
            return _weights(model), np.diff(counts)

        settings = {"delay": 6, "interval": 6, "compensation": compensation}
        results = _cluster(2, **settings, warmup_steps=6).run(run)
        for last, counts in results:
            self.assertAllClose(last, _linear_result(_sgd(momentum=0.9), [0, 1, 2, 3, 4, 5] * 3), rtol=1e-5, atol=1e-5)
            self.assertGreater(counts[0], 1.5 * counts[1])
            self.assertAllClose(counts[1], counts[2], rtol=0.3)

    @parameterized.parameters(("momentum", 2), ("nesterov", 3))
    @pytest.mark.stress
    def test_without_delay_and_interval_it_is_synchronous_training(self, name, world_size):
        make_optimizer, update = _OPTIMIZERS[name]
        _, synchronous = _reference(1, 0, 1, update)
        for _, last, _ in _cluster(world_size, delay=0, interval=1).run(lambda s: _train(s, make_optimizer)):
            self.assertAllClose(last, synchronous, rtol=1e-5, atol=1e-5)

    @parameterized.parameters(
        ("int8", int8, "momentum"),
        ("truncate16", truncate16, "adam"),
        ("truncate16", truncate16, "momentum"),
        ("int8", int8, "adamw"),
        ("int8", int8, "adam", 2),
        ("int8", int8, "momentum", 5),
        ("int8", int8, "momentum", 3, True),
    )
    @pytest.mark.stress(after=1)
    @pytest.mark.slow
    def test_equals_the_reference_with_codec(self, codec, reference, name, world_size=3, skewed=False):
        """The first windows are equal, except for values at the border of two codes, which may get either code."""
        make_optimizer, update = _OPTIMIZERS[name]
        results = _cluster(world_size, delay=3, interval=2, codec=codec, skewed_shards=skewed).run(
            lambda s: _train(s, make_optimizer, num_outputs=900)
        )
        correction = {"t_1": 1, "momentum": 0.9} if skewed else {}
        rule = functools.partial(gentle_windows, adaptive=_is_adaptive(name), **correction)
        arguments = {"num_outputs": 900, "rule": rule}
        history, final = _reference(world_size, 3, 2, update, mean=mesh_mean(reference), **arguments)
        _, without = _reference(world_size, 3, 2, update, **arguments)
        lossy = np.mean(np.abs(without - final))
        for rank, (of_rank, last, _) in enumerate(results):
            early = np.isclose(of_rank[:6], [weights[rank] for weights in history[:6]], rtol=1e-5, atol=1e-5)
            self.assertGreater(np.mean(early), 0.9)
            self.assertLess(np.mean(np.abs(last - final)), 0.1 * lossy)
            self.assertAllEqual(last, results[0][1])

    @parameterized.parameters({"steps_per_execution": 5}, {"run_eagerly": True})
    @pytest.mark.stress(after=1)
    @pytest.mark.slow
    def test_however_keras_runs_steps(self, **compile_args):
        _, expected = _reference(2, 3, 2, sgd(_RATE, 0.9))
        for _, last, _ in _cluster(2, delay=3, interval=2).run(lambda s: _train(s, _sgd(momentum=0.9), **compile_args)):
            self.assertAllClose(last, expected, rtol=1e-5, atol=1e-5)

    @parameterized.parameters("filtered", "generated")
    @pytest.mark.stress(after=1)
    def test_data_of_unknown_length(self, kind):
        """At the end of each epoch a step begins whose batch never comes."""
        x, y, _ = problem(4)

        def generate():
            for step in range(NUM_ROWS // BATCH_SIZE):
                yield tuple(values[rows_of(step, 0, 1)] for values in (x, y))

        def run(strategy):
            if kind == "filtered":
                dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH_SIZE).filter(lambda x, y: True)
            else:
                specs = tuple(tf.TensorSpec((None, values.shape[1])) for values in (x, y))
                dataset = tf.data.Dataset.from_generator(generate, output_signature=specs)
            model = _compiled(strategy, _sgd(momentum=0.9))
            model.fit(dataset, epochs=3, verbose=0)
            return _weights(model), strategy.report()["steps"]

        num_steps = 3 * NUM_ROWS // BATCH_SIZE
        _, expected = _reference(2, 3, 5, sgd(_RATE, 0.9), num_steps=num_steps)
        for last, num_steps_of_rank in _cluster(2, delay=3, interval=5).run(run):
            self.assertAllClose(last, expected, rtol=1e-5, atol=1e-5)
            self.assertEqual(num_steps_of_rank, num_steps)

    @parameterized.parameters(codecs.TopK(ratio=0.25), None)
    @pytest.mark.stress(after=1)
    @pytest.mark.slow
    def test_in_several_parts(self, codec):
        """All is merged at the end of a `fit`, also without a whole window. The next `fit` keeps the velocity."""

        def run(strategy):
            model = _compiled(strategy, _decaying(momentum=0.9), linear_loss)
            _fit(model, num_steps=2)
            _fit(model, num_steps=5, first_step=2)
            _fit(model, num_steps=1, first_step=7)
            _fit(model)
            return _weights(model)

        results = _cluster(2, delay=3, interval=4, codec=codec).run(run)
        self.assertAllClose(results[0], _linear_result(_decaying(momentum=0.9)), rtol=1e-5, atol=1e-5)
        self.assertAllEqual(*results)

    @parameterized.parameters(({"momentum": 0.9, "nesterov": True}, 3, 2), ({}, 0, 1))
    @pytest.mark.stress(after=1)
    @pytest.mark.slow
    def test_gradient_accumulation(self, arguments, delay, interval):
        """A step of the scheme is an update."""
        make_optimizer = _sgd(gradient_accumulation_steps=2, **arguments)
        results = _cluster(2, delay=delay, interval=interval).run(lambda s: _train(s, make_optimizer, loss=linear_loss))
        for _, last, _ in results:
            self.assertAllClose(last, _linear_result(make_optimizer), rtol=1e-5, atol=1e-5)


def _network(strategy, make_optimizer):
    """Trains dense layers with batch normalization on rows that differ between ranks; returns all weights."""
    x, y, _ = problem(4)
    with strategy.scope():
        layers = [keras.layers.Dense(40, "relu"), keras.layers.BatchNormalization(momentum=0.9), keras.layers.Dense(4)]
        model = keras.Sequential([keras.Input((3,)), *layers])
        model.compile(make_optimizer(), "mse")
    for rows in (slice(0, 420), slice(0, 120)):
        model.fit(x[rows], y[rows], batch_size=BATCH_SIZE, shuffle=False, verbose=0)
    return model.get_weights()


class EqualTest(tf.test.TestCase, parameterized.TestCase):
    """Tests that after `fit` all ranks have the same weights and moving statistics, to the bit."""

    @parameterized.parameters(
        (2, "adam", {"delay": 5, "interval": 2, "codec": codecs.Int8(error_feedback=True), "algorithm": "ring"}),
        (2, "momentum", {}),
        (3, "adam", {"delay": 5, "interval": 2, "codec": "int8"}),
        (5, "nesterov", {"delay": 3, "interval": 1, "codec": codecs.Truncate16(round_to_nearest=True)}),
        (4, "adamw", {"delay": 2, "interval": 3, "codec": codecs.TopK(ratio=0.1), "algorithm": "ring"}),
        (3, "momentum", {"delay": 20, "interval": 12, "algorithm": "ring"}),
        (2, "adam", {"delay": 0, "interval": 4, "codec": "sketch"}),
        (5, "momentum", {"delay": 4, "interval": 4, "algorithm": "ring"}),
        (2, "decay", {"delay": 1, "interval": 1, "codec": "truncate16"}),
    )
    @pytest.mark.stress(after=1)
    @pytest.mark.slow
    def test_to_the_bit(self, world_size, name, settings):
        results = _cluster(world_size, **settings).run(lambda s: _network(s, _OPTIMIZERS[name][0]))
        self.check(results)

    def check(self, results):
        for weights in results:
            for mine, first in zip(weights, results[0], strict=True):
                self.assertAllEqual(mine, first)
                self.assertTrue(np.isfinite(mine).all())

    @parameterized.parameters(
        lambda: keras.optimizers.RMSprop(0.01),
        lambda: keras.optimizers.Lion(0.001),
        lambda: keras.optimizers.Muon(0.001),
        lambda: keras.optimizers.SGD(0.05, momentum=0.9, clipnorm=0.5),
        lambda: keras.optimizers.LossScaleOptimizer(
            keras.optimizers.AdamW(0.01, global_clipnorm=1.0, gradient_accumulation_steps=2), initial_scale=8.0
        ),
    )
    @pytest.mark.stress
    def test_whatever_the_optimizer(self, make_optimizer):
        self.check(_cluster(2, delay=3, interval=2).run(lambda s: _network(s, make_optimizer)))

    @pytest.mark.slow
    def test_learning_rates_that_differ(self):
        """Each rank's changes count as they are. The first step is made with the rate of rank 0."""

        def run(strategy):
            rate = _RATE * (1 + strategy.rank)
            return _train(strategy, lambda: keras.optimizers.SGD(rate), [_SetRate(rate)], loss=linear_loss)[1]

        expected = problem(4)[2].astype(np.float64)
        for step in range(_NUM_STEPS):
            rates = _RATE, _RATE * (2 if step else 1)
            expected -= sum(rate / 2 * linear_gradient(step, rank, 2) for rank, rate in enumerate(rates))
        results = _cluster(2, delay=3, interval=2).run(run)
        self.assertAllClose(results[0], expected, rtol=1e-5, atol=1e-5)
        self.assertAllEqual(*results)

    def test_a_mean_that_is_less_than_a_small_type_tells_apart(self):
        """Rank 0 adds one unit in the last place of bfloat16 in each step, rank 1 nothing: half a unit is merged."""
        unit = 2.0**-7

        def run(strategy):
            with strategy.scope():
                dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones", dtype="bfloat16")
                model = keras.Sequential([keras.Input((1,)), dense])
                model.compile(keras.optimizers.SGD(unit), lambda y, y_pred: -tf.reduce_sum(y * y_pred, axis=-1))
            x = np.ones((16, 1), np.float32)
            y = np.tile([[1.0], [0.0]], (8, 1))
            model.fit(x, y, batch_size=2, shuffle=False, verbose=0)
            return float(_weights(model)[0, 0])

        self.assertEqual(_cluster(2, delay=0, interval=1).run(run), [1 + 4 * unit] * 2)


class _SetRate(keras.callbacks.Callback):
    """Sets the learning rate of this rank, which begins with that of rank 0."""

    def __init__(self, rate):
        super().__init__()
        self._rate = rate

    def on_train_batch_end(self, batch, logs=None):
        self.model.optimizer.learning_rate = self._rate


class TrafficTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters("momentum", "adam")
    @pytest.mark.stress
    def test_a_window_is_one_vector(self, name):
        """A rank sends 2 (n - 1) / n of the weights for each window of four steps, and a last one."""

        def run(strategy):
            model = _compiled(strategy, _OPTIMIZERS[name][0], num_outputs=9000)
            _fit(model, num_steps=4)
            before = strategy.report()["bytes_sent"]
            _fit(model, epochs=2)
            return strategy.report()["bytes_sent"] - before

        expected = (_NUM_STEPS / 4 + 1) * 2 * 3 / 4 * 4 * 3 * 9000
        for num_bytes in _cluster(4, delay=4, interval=4).run(run):
            self.assertBetween(num_bytes, expected, 1.1 * expected)

    @parameterized.parameters((8, 6), (0, 1))
    @pytest.mark.stress
    def test_top_k(self, warmup_steps, num_steps):
        """In warm-up and in the end more values are sent: as whole vectors in pieces, if that takes fewer bytes."""
        codec = codecs.TopK(ratio=0.01, warmup_steps=warmup_steps)
        x = np.random.default_rng(0).normal(size=(8 * num_steps, 100)).astype(np.float32)

        def run(strategy):
            with strategy.scope():
                model = keras.Sequential([keras.Input((100,)), keras.layers.Dense(200, use_bias=False)])
                model.compile(keras.optimizers.SGD(1e-3, momentum=0.9), "mse")
            model.fit(x[:8], x[:8] @ np.ones((100, 200)), batch_size=8, verbose=0)
            before = strategy.report()["bytes_sent"]
            model.fit(x, x @ np.ones((100, 200)), batch_size=8, verbose=0)
            return strategy.report()["bytes_sent"] - before

        ratios = [codec.ratio_at(window) for window in range(num_steps // 2)] + [1.0]
        whole, of_a_value = 2 * 3 / 4 * 4, 3 * (2 + 4)
        expected = 20_000 * sum(min(whole, of_a_value * ratio) for ratio in ratios)
        for num_bytes in _cluster(4, delay=2, interval=2, codec=codec).run(run):
            self.assertBetween(num_bytes, 0.5 * expected, 1.15 * expected)


def _two_kernels():
    return two_kernels(3, 4, keras.initializers.Constant(problem(4)[2]))


class OptimizersTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters((codecs.TopK(ratio=0.25), "gentle"), (None, "eager"))
    @pytest.mark.stress(after=1)
    @pytest.mark.slow
    def test_adam_of_each_rank(self, codec, compensation):
        """If gradients do not depend on the weights, all ranks end with the mean of the weights of lone trainings."""

        def make_optimizer():
            return keras.optimizers.Adam(0.01)

        alone = [[linear_gradient(step, rank, 2) for step in range(_NUM_STEPS)] for rank in range(2)]
        expected = np.mean([_applied(make_optimizer, gradients) for gradients in alone], axis=0)
        for _, last, _ in _cluster(2, delay=3, interval=2, codec=codec, compensation=compensation).run(
            lambda s: _train(s, make_optimizer, loss=linear_loss)
        ):
            self.assertAllClose(last, expected, rtol=1e-5, atol=1e-5)

    @parameterized.parameters(None, "rmsprop")
    @pytest.mark.stress
    def test_optimizers_of_the_models_own(self, unused_optimizer):
        """The first update builds such optimizers. Windows in flight at the end are merged."""
        make_optimizers = _sgd(momentum=0.9), _sgd(weight_decay=0.5)

        def run(strategy):
            with strategy.scope():
                model = OwnOptimizers(_two_kernels(), [make() for make in make_optimizers])
                model.compile(unused_optimizer)
            _fit(model, epochs=2)
            return model.get_weights()

        for weights in _cluster(2, delay=3, interval=5, compensation="eager").run(run):
            self.assertAllClose(weights, [_linear_result(make) for make in make_optimizers], rtol=1e-5, atol=1e-5)

    @pytest.mark.slow
    def test_several_optimizers_in_one(self):
        """Windows in flight at the end are merged once, although each optimizer reports the end of training."""
        make_optimizers = _sgd(), _sgd(momentum=0.9, nesterov=True)

        def run(strategy):
            with strategy.scope():
                model = _two_kernels()
                optimizers = keras.optimizers.OptimizerMap(make_optimizers[0]())
                optimizers[".*second.*"] = make_optimizers[1]()
                model.compile(keras.optimizers.MultiOptimizer(optimizers), linear_loss)
            _fit(model, epochs=2)
            return model.get_weights()

        for weights in _cluster(2, delay=3, interval=5).run(run):
            self.assertAllClose(weights, [_linear_result(make) for make in make_optimizers], rtol=1e-5, atol=1e-5)

    def test_loss_scale_with_an_unused_variable(self):
        """The optimizer gets None for the gradient of that variable."""
        make_optimizer = _decaying(momentum=0.9)

        def run(strategy):
            with strategy.scope():
                model = keras.Sequential([keras.Input((3,)), Unused(), keras.layers.Dense(4, use_bias=False)])
                model.set_weights([np.ones(3), problem(4)[2]])
                optimizer = keras.optimizers.LossScaleOptimizer(make_optimizer(), initial_scale=8.0)
                model.compile(optimizer, linear_loss)
            _fit(model, epochs=2)
            return model.get_weights()

        for unused, last in _cluster(2, delay=3, interval=4).run(run):
            self.assertAllEqual(unused, np.ones(3))
            self.assertAllClose(last, _linear_result(make_optimizer), rtol=1e-5, atol=1e-5)

    @parameterized.parameters(0.9, 0.0)
    @pytest.mark.stress(after=1)
    def test_a_step_left_out_changes_nothing(self, momentum):
        """Rank 1's gradient overflows in step 3."""
        num_steps, bad = 9, 3

        def run(strategy):
            x = np.ones((2 * num_steps, 1), np.float32)
            x[1::2] = 3.0
            x[2 * bad + 1] = np.inf
            with strategy.scope():
                model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
                inner = keras.optimizers.SGD(0.1, momentum=momentum)
                optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=8.0)
                model.compile(optimizer, loss=lambda y, y_pred: tf.reduce_sum(y_pred, axis=-1))
            model.set_weights([np.ones((1, 1))])
            model.fit(x, x, batch_size=2, shuffle=False, verbose=0)
            return _weights(model)[0, 0], float(optimizer.dynamic_scale)

        changes = []
        for rank, gradient in enumerate((1.0, 3.0)):
            w, v = 0.0, 0.0
            for _ in range(num_steps - rank):
                v = momentum * v - 0.1 * gradient
                w += v
            changes.append(w)
        (first, first_scale), (second, second_scale) = _cluster(2, delay=2, interval=2).run(run)
        self.assertAllClose(first, 1 + np.mean(changes), rtol=1e-5)
        self.assertEqual(first, second)
        self.assertEqual((first_scale, second_scale), (8.0, 4.0))

    def test_refuses_a_selection_of_doubles(self):
        with self.assertRaisesRegex(REFUSALS, "must not be float64 with a codec that selects"):
            _cluster(2, codec="top_k").run(lambda s: _fit(_compiled(s, _sgd(), dtype="float64")))


class TopKTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        {"codec": codecs.TopK(ratio=0.1, warmup_steps=3), "compensation": "eager", "weight_decay": 0.5},
        {"codec": codecs.TopK(ratio=0.25), "compensation": "gentle"},
        {"codec": codecs.TopK(ratio=0.25), "compensation": "eager", "weight_decay": 0.5},
    )
    @pytest.mark.stress(after=1)
    @pytest.mark.slow
    def test_loses_nothing(self, codec, compensation, weight_decay=None):
        """However late a value was sent, the result is that of synchronous SGD."""
        make_optimizer = _decaying(momentum=0.9, weight_decay=weight_decay)
        results = _cluster(3, delay=4, interval=2, codec=codec, compensation=compensation).run(
            lambda s: _train(s, make_optimizer, loss=linear_loss)[1]
        )
        for last in results:
            self.assertAllClose(last, _linear_result(make_optimizer), rtol=1e-5, atol=1e-5)
            self.assertAllEqual(last, results[0])

    def test_a_rank_that_ends_early(self):
        """Rank 1 sends all values that it has held back, while rank 0 sends few and keeps the rest for later."""

        def run(strategy):
            model = _compiled(strategy, _sgd(), linear_loss)
            _fit(model, **fewer_steps(strategy, 5))
            return _weights(model)

        # Both ranks add half of all that both have sent. In the end rank 0 adds all the rest of its own.
        total = 2 * problem(4)[2].astype(np.float64)
        for rank, num_steps in ((0, NUM_ROWS // BATCH_SIZE), (1, 5)):
            total -= _RATE * np.sum([linear_gradient(step, rank, 2) for step in range(num_steps)], axis=0)
        last, early = _cluster(2, delay=2, interval=2, codec=codecs.TopK(ratio=0.1)).run(run)
        self.assertAllClose(last + early, total, rtol=1e-5, atol=1e-5)
        self.assertGreater(np.abs(last - early).max(), 0.01)


class FitTest(tf.test.TestCase, parameterized.TestCase):
    def test_world_of_one(self):
        ((history, last, _),) = _cluster(1).run(lambda s: _train(s, _sgd()))
        expected, _ = _reference(1, 0, 1, sgd(_RATE))
        self.assertAllClose(history, [weights[0] for weights in expected], rtol=1e-5, atol=1e-5)
        self.assertAllEqual(history[-1], last)

    @parameterized.parameters((6, 7), (5, 6))
    @pytest.mark.stress(after=1)
    def test_a_rank_that_ends_early(self, last_batch, num_early):
        """Rank 1 leaves in the middle of a window, or at the end of one. Rank 0 goes on, at last alone."""

        def run(strategy):
            model = _compiled(strategy, _sgd(), linear_loss)
            _fit(model, **{"epochs": 2, **fewer_steps(strategy, last_batch + 1)})
            return _weights(model), strategy.report()["steps"]

        def total(steps, rank):
            return np.sum([linear_gradient(step, rank, 2) for step in steps], axis=0)

        (last, num_steps), (early, _) = _cluster(2, delay=2, interval=3).run(run)
        self.assertEqual(num_steps, _NUM_STEPS)
        # Two windows of both. Rank 1's step 6, if there is one, joins rank 0's third window.
        both = (total(range(6), 0) + total(range(6), 1)) / 2
        third = total(range(6, 9), 0) if num_early == 6 else (total(range(6, 9), 0) + total([6], 1)) / 2
        expected = problem(4)[2] - _RATE * (both + third)
        self.assertAllClose(early, expected, rtol=1e-5, atol=1e-5)
        self.assertAllClose(last, expected - _RATE * total(range(9, _NUM_STEPS), 0), rtol=1e-5, atol=1e-5)

    @pytest.mark.slow
    def test_a_fit_after_one_that_ended_early_on_a_rank(self):
        """The rank gets the others' weights, and keeps its own slots and its own number of steps."""

        def run(strategy):
            model = _compiled(strategy, _sgd(momentum=0.9))
            _fit(model, **{"epochs": 2, **fewer_steps(strategy, 7)})
            before = _weights(model)
            strategy.synchronize(model)
            after, num_steps = _weights(model), int(model.optimizer.iterations)
            _fit(model)
            return before, after, num_steps, _weights(model)

        (before, after, num_steps, last), (before_there, after_there, num_steps_there, last_there) = _cluster(
            2, delay=2, interval=3
        ).run(run)
        self.assertNotAllClose(before, before_there)
        self.assertAllEqual(after, before)
        self.assertAllEqual(after, after_there)
        self.assertEqual((num_steps, num_steps_there), (_NUM_STEPS, 7))
        self.assertAllEqual(last, last_there)
        self.assertGreater(np.abs(last - after).max(), 0.01)

    @pytest.mark.slow
    def test_windows_that_overtake_each_other(self):
        """On rank 1 every other window begins when the next one waits for nothing but this one."""
        step, commit = DTSExchange.step, DTSExchange._commit
        waits = [threading.Event() for _ in range(_NUM_STEPS + 1)]

        def step_late(exchange, request):
            if exchange._membership.rank == 1 and request.step % 2 == 1:
                self.assertTrue(waits[request.step + 1].wait(_OPTIONS.timeout_seconds))
            return step(exchange, request)

        def noted_commit(exchange, window):
            self.assertLessEqual(exchange.sent_rounds, window)  # The next window does not count before this one.
            if exchange._membership.rank == 1:
                waits[window].set()
            commit(exchange, window)

        _, expected = _reference(2, 4, 1, sgd(_RATE, 0.9))
        with mock.patch.object(DTSExchange, "step", step_late), mock.patch.object(DTSExchange, "_commit", noted_commit):
            results = _cluster(2, delay=4, interval=1).run(lambda s: _train(s, _sgd(momentum=0.9)))
        for _, last, _ in results:
            self.assertAllClose(last, expected, rtol=1e-5, atol=1e-5)

    @parameterized.parameters(
        {"interval": 4, "gradient_accumulation_steps": 2, "num_batches": [_NUM_STEPS + 1]},
        {"interval": 1, "gradient_accumulation_steps": 2, "num_batches": [1, 2]},
        {"interval": 3},
        {"interval": 3, "gradient_accumulation_steps": 2},
    )
    @pytest.mark.stress(after=1)
    @pytest.mark.slow
    def test_moving_statistics_are_averaged(
        self, interval, gradient_accumulation_steps=None, num_batches=(_NUM_STEPS,)
    ):
        """Statistics follow the data of all ranks, also of steps without an update, even of a whole `fit`."""
        x, y, _ = problem(4)
        x, y = (np.concatenate([values] * 3) for values in (x, y))

        def run(strategy):
            with strategy.scope():
                model = keras.Sequential(
                    [keras.Input((3,)), keras.layers.BatchNormalization(momentum=0.5), keras.layers.Dense(4)]
                )
                model.compile(_sgd(momentum=0.9, gradient_accumulation_steps=gradient_accumulation_steps)(), "mse")
            for number in num_batches:
                rows = slice(number * BATCH_SIZE)
                model.fit(x[rows] + 3 * strategy.rank, y[rows], batch_size=BATCH_SIZE, shuffle=False, verbose=0)
            return [weight.numpy() for weight in model.non_trainable_weights]

        mean, variance = np.zeros(3), np.ones(3)
        for step in (step for number in num_batches for step in range(number)):
            of_ranks = [x[rows_of(step, rank, 2)] + 3 * rank for rank in range(2)]
            mean = 0.5 * (mean + np.mean([rows.mean(0) for rows in of_ranks], axis=0))
            variance = 0.5 * (variance + np.mean([rows.var(0) for rows in of_ranks], axis=0))
        results = _cluster(2, delay=2, interval=interval).run(run)
        for statistics in results:
            self.assertAllClose(statistics, [mean, variance], rtol=1e-5, atol=1e-5)
            self.assertAllEqual(statistics, results[0])

    @pytest.mark.slow
    def test_a_broken_fit_does_not_spoil_the_next(self):
        """The next `fit` forgets windows in flight, and the other ranks' steps."""

        def fail():
            raise KeyError("broken off")

        def run(strategy):
            model = _compiled(strategy, _sgd(momentum=0.9))
            with self.assertRaises(KeyError):
                _fit(model, callbacks=[_on_batch(4, fail)])
            model.set_weights([problem(4)[2]])
            for variable in (model.optimizer.iterations, *model.optimizer.momentums):
                variable.assign(tf.zeros_like(variable))
            _fit(model, epochs=2)
            return _weights(model)

        _, expected = _reference(2, 3, 2, sgd(_RATE, 0.9))
        for last in _cluster(2, delay=3, interval=2).run(run):
            self.assertAllClose(last, expected, rtol=1e-5, atol=1e-5)

    @parameterized.parameters("between two fits", "in a step", "when training begins", "in the last step")
    @pytest.mark.stress(after=1)
    @pytest.mark.slow
    def test_weights_that_others_assign(self, when):
        """Training begins with values that were assigned before. Values assigned in a step are this rank's change."""
        new = np.full((3, 4), 7.0, np.float32)

        def run(strategy):
            model = _compiled(strategy, _sgd(), linear_loss)
            _fit(model)
            callbacks = []
            if when == "between two fits":
                model.set_weights([new])
            elif when == "when training begins":
                callbacks = [keras.callbacks.LambdaCallback(on_train_begin=lambda logs: model.set_weights([new]))]
            elif strategy.rank == 1:
                callbacks = [_on_batch(2 if when == "in a step" else 7, lambda: model.layers[0].kernel.assign_add(new))]
            _fit(model, callbacks=callbacks)
            return _weights(model)

        steps = range(NUM_ROWS // BATCH_SIZE)
        change = -_RATE * np.sum([linear_gradient(step) for step in steps], axis=0)
        expected = problem(4)[2] + 2 * change + new / 2 if when.startswith("in") else new + change
        results = _cluster(2, delay=2, interval=2).run(run)
        self.assertAllClose(results[0], expected, rtol=1e-5, atol=1e-5)
        self.assertAllEqual(*results)


class AssignmentsTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        {"delay": 4, "interval": 4, "when": "on_train_batch_end"},
        {"delay": 5, "interval": 3, "when": "on_train_batch_begin"},
        {"delay": 3, "interval": 1, "when": "on_epoch_end"},
        {"delay": 4, "interval": 4, "when": "on_epoch_end", "warmup_steps": NUM_ROWS // BATCH_SIZE},
    )
    @pytest.mark.slow(after=1)
    def test_weights_that_all_ranks_assign_stay(self, delay, interval, when, warmup_steps=0):
        """Although means are merged gently, weights are neither halved nor pulled back."""
        new = np.full((3, 4), 7.0, np.float32)

        def run(strategy):
            model = _compiled(strategy, lambda: keras.optimizers.SGD(0.0), linear_loss)
            seen = []

            def assign(number, logs=None):
                if number == (0 if when == "on_epoch_end" else 2):
                    model.layers[0].kernel.assign(new)

            look = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(_weights(model)))
            _fit(model, epochs=3, callbacks=[keras.callbacks.LambdaCallback(**{when: assign}), look])
            return seen, _weights(model)

        for seen, last in _cluster(2, delay=delay, interval=interval, warmup_steps=warmup_steps).run(run):
            changed = [index for index, weights in enumerate(seen) if np.any(weights != problem(4)[2])]
            for weights in [*seen[changed[0] :], last]:
                self.assertAllClose(weights, new, rtol=1e-6, atol=1e-6)

    @parameterized.parameters((4, 4, 6), (7, 3, 6), (20, 12, 6), (4, 4, 2))
    @pytest.mark.stress(after=1)
    @pytest.mark.slow
    def test_what_is_left_to_approach_is_forgotten(self, delay, interval, epochs):
        """Weights that are assigned after some steps stay. Those that are not assigned lose nothing."""
        num_steps = 2 * NUM_ROWS // BATCH_SIZE

        def run(strategy):
            with strategy.scope():
                model = _two_kernels()
                model.compile(keras.optimizers.SGD(_RATE), linear_loss)
            first, seen = model.trainable_variables[0], []

            def assign():
                first.assign(tf.fill(first.shape, 7.0))
                model.optimizer.learning_rate = 0.0

            look = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(first.numpy()))
            _fit(model, epochs=epochs, callbacks=[look, _at_step(num_steps, assign)])
            return seen[num_steps + 1 :], [variable.numpy() for variable in model.trainable_variables]

        results = _cluster(2, delay=delay, interval=interval).run(run)
        expected = _cluster(2, delay=delay, interval=interval, compensation="eager").run(run)
        for (seen, (assigned, other)), (_, (_, other_eagerly)) in zip(results, expected, strict=True):
            self.assertAllClose(assigned, np.full_like(assigned, 7.0), rtol=1e-5, atol=1e-5)
            self.assertAllClose(seen, np.full_like(seen, 7.0), atol=0.25)  # They follow the slow ones.
            self.assertAllClose(other, other_eagerly, rtol=1e-5, atol=1e-5)

    @parameterized.parameters((4, 4, "in a step"), (20, 12, "between epochs"), (5, 2, "until the next epoch"))
    @pytest.mark.slow(after=1)
    def test_what_a_callback_puts_back_loses_nothing(self, delay, interval, when):
        """As one that evaluates other weights, or swaps them with averages, which leaves rounding errors behind."""

        def run(strategy):
            model = _compiled(strategy, _sgd(), linear_loss)
            kernel = model.layers[0].kernel

            def put_back(number, logs):
                kernel.assign_add(0.1 * tf.ones_like(kernel))
                kernel.assign_sub(0.1 * tf.ones_like(kernel))

            calls = {
                "in a step": {"on_train_batch_end": put_back},
                "between epochs": {"on_epoch_end": put_back},
                "until the next epoch": {
                    "on_epoch_end": lambda epoch, logs: epoch == 0 and kernel.assign_add(0.1 * tf.ones_like(kernel)),
                    "on_epoch_begin": lambda epoch, logs: epoch == 1 and kernel.assign_sub(0.1 * tf.ones_like(kernel)),
                },
            }
            _fit(model, epochs=2, callbacks=[keras.callbacks.LambdaCallback(**calls[when])])
            return _weights(model)

        for weights in _cluster(2, delay=delay, interval=interval).run(run):
            self.assertAllClose(weights, _linear_result(_sgd()), rtol=1e-5, atol=1e-5)

    @parameterized.parameters((4, 4), (2, 2), (0, 3))
    @pytest.mark.slow(after=1)
    def test_assigned_weights_are_no_longer_steps(self, delay, interval):
        """Changes of an adaptive optimizer are made longer, but not the way to a value that the program assigns."""

        def run(strategy):
            model = _compiled(strategy, lambda: keras.optimizers.Adam(_RATE, beta_1=0.0), linear_loss)

            def assign():
                model.layers[0].kernel.assign(tf.fill((3, 4), 7.0))
                model.optimizer.learning_rate = 0.0

            _fit(model, epochs=2, callbacks=[_at_step(10, assign)])
            return _weights(model)

        for weights in _cluster(3, delay=delay, interval=interval).run(run):
            self.assertAllClose(weights, np.full((3, 4), 7.0), rtol=1e-5, atol=1e-5)


class ArgumentsTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        ({"delay": -1}, "`delay` must be"),
        ({"interval": 0}, "`interval` must be"),
        ({"interval": 10**20}, "`interval` must be an integer of at least 1 and at most 2147483647. Received"),
        ({"algorithm": "star"}, "`algorithm` must be one of"),
        ({"compensation": "none"}, "`compensation` must be one of"),
        ({"warmup_steps": -1}, "`warmup_steps` must be"),
        ({"warmup_steps": 5}, "`warmup_steps` must be 0 unless a `delay` is given"),
        ({"warmup_steps": 5, "delay": 4, "codec": "top_k"}, "`warmup_steps` must be 0 .*codec=TopK"),
        ({"skewed_shards": "yes"}, "`skewed_shards` must be .* Received: skewed_shards='yes'"),
        ({"skewed_shards": True, "codec": "low_rank"}, "`skewed_shards` must be False with .* Received: .*LowRank"),
        ({"compensation": "momentum", "codec": "low_rank"}, "`compensation` must not be 'momentum' with .*LowRank"),
        ({"skewed_shards": True, "codec": "top_k"}, "`skewed_shards` must be False with .* Received: .*codec=TopK"),
        ({"skewed_shards": True, "batch_shares": "auto"}, "`skewed_shards` must be False with .*batch_shares='auto'"),
        ({"delay": 1000, "interval": 10}, "at most 100 windows .* which make 101"),
        ({"codec": "zip"}, "`codec` must be one of"),
    )
    def test_refused(self, settings, message):
        with self.assertRaisesRegex(ValueError, message):
            hop_tf.DTSStrategy(**settings)


if __name__ == "__main__":
    tf.test.main()

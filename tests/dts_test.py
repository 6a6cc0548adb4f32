"""DTS under `fit`, with ranks in one process, against NumPy references of the exactness rule and of Equation 13."""

import contextlib
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
from hop_tf.errors import HopError, PeerLostError
from hop_tf.strategies.dts_exchange import DTSExchange
from hop_tf.testing import InProcessCluster

_OPTIONS = hop_tf.CommunicationOptions(timeout_seconds=60)
_BATCH_SIZE = 12
_NUM_ROWS = 96
_NUM_EPOCHS = 2
_NUM_STEPS = _NUM_EPOCHS * _NUM_ROWS // _BATCH_SIZE
_NUM_OUTPUTS = 4
_RATE = 0.05


def _cluster(world_size, **settings):
    def make_strategy(cluster_resolver):
        return hop_tf.DTSStrategy(cluster_resolver=cluster_resolver, communication_options=_OPTIONS, **settings)

    return InProcessCluster(world_size, make_strategy, timeout_seconds=120)


@functools.cache
def _problem():
    random = np.random.default_rng(0)
    x = random.normal(size=(_NUM_ROWS, 3)).astype(np.float32)
    y = (x @ random.normal(size=(3, _NUM_OUTPUTS)) + random.normal(size=(_NUM_ROWS, _NUM_OUTPUTS))).astype(np.float32)
    return x, y, random.normal(size=(3, _NUM_OUTPUTS)).astype(np.float32)


def _batch_of(step, rank, world_size):
    start = step * _BATCH_SIZE % _NUM_ROWS
    share = _BATCH_SIZE // world_size
    return slice(start + rank * share, start + (rank + 1) * share)


def _gradient(w, step, rank, world_size):
    """Of the mean square, summed over outputs."""
    x, y, _ = _problem()
    rows = _batch_of(step, rank, world_size)
    x, y = x[rows].astype(np.float64), y[rows].astype(np.float64)
    return 2 / len(x) * x.T @ (x @ w - y)


def _rate_of(step):
    return _RATE * 0.5 ** (step / 10)


# The specification: each rank's weights are what its updates would have made, had the mean gradient been used in all
# steps whose window it has heard of.


def _replayed(gradients, momentum=0.0, nesterov=False, decay=0.0, rate_of=_rate_of):
    w, v = _problem()[2].astype(np.float64), 0.0
    for step, gradient in enumerate(gradients):
        rate = rate_of(step)
        w = w * (1 - rate * decay)
        v = momentum * v - rate * gradient
        w = w + (momentum * v - rate * gradient if nesterov else v)
    return w


def _exact(world_size, delay, interval, momentum=0.0, nesterov=False, decay=0.0, num_steps=_NUM_STEPS):
    """Each rank's weights after each step, and after the last one when all is known."""
    used = [[] for _ in range(world_size)]
    means, history = [], []
    weights = [_problem()[2].astype(np.float64)] * world_size
    for step in range(num_steps):
        gradients = [_gradient(weights[rank], step, rank, world_size) for rank in range(world_size)]
        means.append(np.mean(gradients, axis=0))
        num_known = max(0, step + 1 - delay) // interval * interval
        for rank in range(world_size):
            used[rank] = means[:num_known] + [*used[rank], gradients[rank]][num_known:]
            weights[rank] = _replayed(used[rank], momentum, nesterov, decay)
        history.append(list(weights))
    return history, _replayed(means, momentum, nesterov, decay)


def _equation_13(world_size, delay, interval, momentum, factor=None):
    """As printed, with the signs and the place of the learning rate as in Keras's SGD; a constant rate.

    With a `factor` that one stands in the place of m^t.
    """
    factor = momentum**delay if factor is None else factor
    u = [np.zeros((3, _NUM_OUTPUTS))] * world_size
    weights = [_problem()[2].astype(np.float64)] * world_size
    all_gradients, history = [], []
    for step in range(_NUM_STEPS):
        gradients = [_gradient(weights[rank], step, rank, world_size) for rank in range(world_size)]
        all_gradients.append(gradients)
        u = [momentum * velocity + gradient for velocity, gradient in zip(u, gradients, strict=True)]
        weights = [w - _RATE * velocity for w, velocity in zip(weights, u, strict=True)]
        end = step + 1 - delay
        if end > 0 and end % interval == 0:
            # S of each of the window's steps, and rank.
            s = [
                [
                    sum(momentum ** (i - k) * all_gradients[k][rank] for k in range(end - interval, i + 1))
                    for i in range(end - interval, end)
                ]
                for rank in range(world_size)
            ]
            mean = np.mean(s, axis=0)
            u = [u[rank] + factor * (mean[-1] - s[rank][-1]) for rank in range(world_size)]
            weights = [
                weights[rank] - _RATE * factor * (np.sum(mean, axis=0) - np.sum(s[rank], axis=0))
                for rank in range(world_size)
            ]
        history.append(list(weights))
    return history


# A linear loss: gradients do not depend on the weights, so that in the end they are those of synchronous training.


def _linear_loss(y, y_pred):
    return tf.reduce_sum(y * y_pred, axis=-1)


def _linear_gradient(step, rank=0, world_size=1):
    """By default that of all ranks."""
    x, y, _ = _problem()
    rows = _batch_of(step, rank, world_size)
    return x[rows].astype(np.float64).T @ y[rows] / len(x[rows])


def _linear_gradients(num_steps=_NUM_STEPS):
    return [_linear_gradient(step) for step in range(num_steps)]


def _train(strategy, optimizer=None, num_epochs=_NUM_EPOCHS, callbacks=(), dataset=None, **compile_args):
    """Weights after each step, in the end, and the report."""
    model = _compiled(strategy, optimizer, **compile_args)
    history = []
    record = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: history.append(_weights(model)))
    callbacks = [record, *callbacks]
    if dataset is None:
        _fit(model, epochs=num_epochs, callbacks=callbacks)
    else:
        model.fit(dataset, epochs=num_epochs, verbose=0, callbacks=callbacks)
    return history, _weights(model), strategy.report()


def _compiled(strategy, optimizer=None, loss=None, dtype=None, **compile_args):
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(_NUM_OUTPUTS, use_bias=False, dtype=dtype)])
        model.set_weights([_problem()[2]])
        optimizer = keras.optimizers.SGD(_RATE) if optimizer is None else optimizer()
        model.compile(optimizer, loss or _summed_square, **compile_args)
    return model


def _fit(model, num_steps=None, first_step=0, **arguments):
    x, y, _ = _problem()
    rows = slice(first_step * _BATCH_SIZE, None if num_steps is None else (first_step + num_steps) * _BATCH_SIZE)
    model.fit(x[rows], y[rows], batch_size=_BATCH_SIZE, shuffle=False, verbose=0, **arguments)


def _weights(model):
    return model.get_weights()[0]


def _summed_square(y_true, y_pred):
    return _NUM_OUTPUTS * tf.reduce_mean(tf.square(y_true - y_pred), axis=-1)


def _decaying(**arguments):
    schedule = keras.optimizers.schedules.ExponentialDecay(_RATE, decay_steps=10, decay_rate=0.5)
    return lambda: keras.optimizers.SGD(schedule, **arguments)


class ExactTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        {"world_size": 2, "delay": 4, "interval": 4, "momentum": 0.9},
        {"world_size": 3, "delay": 3, "interval": 1},
        {"world_size": 4, "delay": 5, "interval": 2, "momentum": 0.9, "nesterov": True, "decay": 0.5},
        {"world_size": 2, "delay": 0, "interval": 1, "momentum": 0.9},
        {"world_size": 2, "delay": 5, "interval": 1, "momentum": 0.9, "nesterov": True},
        {"world_size": 3, "delay": 0, "interval": 3, "momentum": 0.9, "nesterov": True},
        {"world_size": 2, "delay": 6, "interval": 4, "decay": 0.5},
        {"world_size": 2, "delay": 20, "interval": 12, "momentum": 0.9},
    )
    @pytest.mark.stress(after=3)
    def test_equals_the_specification_step_by_step(self, world_size, delay, interval, decay=0.0, **momentum):
        expected, in_the_end = _exact(world_size, delay, interval, decay=decay, **momentum)
        optimizer = _decaying(weight_decay=decay or None, **momentum)
        results = _cluster(world_size, delay=delay, interval=interval).run(lambda s: _train(s, optimizer))
        for rank, (history, last, report) in enumerate(results):
            self.assertAllClose(history, [weights[rank] for weights in expected], rtol=1e-5, atol=1e-5)
            self.assertAllClose(last, in_the_end, rtol=1e-5, atol=1e-5)
            self.assertEqual(report["steps"], _NUM_STEPS)

    @parameterized.parameters({"steps_per_execution": 5}, {"run_eagerly": True})
    @pytest.mark.stress(after=1)
    def test_however_keras_runs_steps(self, **compile_args):
        _, expected = _exact(2, 3, 2, momentum=0.9)
        for _, last, _ in _cluster(2, delay=3, interval=2).run(
            lambda s: _train(s, _decaying(momentum=0.9), **compile_args)
        ):
            self.assertAllClose(last, expected, rtol=1e-5, atol=1e-5)

    @parameterized.parameters("filtered", "generated")
    @pytest.mark.stress(after=1)
    def test_data_of_unknown_length(self, kind):
        """At the end of each epoch a step begins whose batch never comes."""
        x, y, _ = _problem()

        def generate():
            for step in range(_NUM_ROWS // _BATCH_SIZE):
                yield tuple(values[_batch_of(step, 0, 1)] for values in (x, y))

        def run(strategy):
            if kind == "filtered":
                dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(_BATCH_SIZE).filter(lambda x, y: True)
            else:
                specs = tuple(tf.TensorSpec((None, values.shape[1])) for values in (x, y))
                dataset = tf.data.Dataset.from_generator(generate, output_signature=specs)
            return _train(strategy, _decaying(momentum=0.9), num_epochs=3, dataset=dataset)

        num_steps = 3 * _NUM_ROWS // _BATCH_SIZE
        expected, in_the_end = _exact(2, 3, 5, momentum=0.9, num_steps=num_steps)
        for rank, (history, last, report) in enumerate(_cluster(2, delay=3, interval=5).run(run)):
            self.assertAllClose(history, [weights[rank] for weights in expected], rtol=1e-5, atol=1e-5)
            self.assertAllClose(last, in_the_end, rtol=1e-5, atol=1e-5)
            self.assertEqual(report["steps"], num_steps)

    @parameterized.parameters(codecs.TopK(ratio=0.25), None)
    @pytest.mark.stress(after=1)
    def test_in_several_parts(self, codec):
        """All is applied when `fit` ends, one without a whole window too; the next one goes on with the velocity."""

        def run(strategy):
            model = _compiled(strategy, _decaying(momentum=0.9), _linear_loss)
            _fit(model, num_steps=2)
            _fit(model, num_steps=5, first_step=2)
            _fit(model, num_steps=1, first_step=7)
            _fit(model)
            return _weights(model)

        expected = _replayed(_linear_gradients(), momentum=0.9)
        for last in _cluster(2, delay=3, interval=4, codec=codec).run(run):
            self.assertAllClose(last, expected, rtol=1e-5, atol=1e-5)

    def test_the_same_optimizer_with_another_momentum(self):
        """It counts when the model is compiled again."""

        def run(strategy):
            model = _compiled(strategy, lambda: keras.optimizers.SGD(_RATE, momentum=0.9), _linear_loss)
            _fit(model)
            with strategy.scope():
                model.optimizer.momentum = 0.5
                model.compile(model.optimizer, _linear_loss)
            _fit(model)
            return _weights(model)

        w, v = _problem()[2].astype(np.float64), 0.0
        for step, gradient in enumerate(_linear_gradients()):
            v = (0.9 if step < _NUM_STEPS // 2 else 0.5) * v - _RATE * gradient
            w = w + v
        for last in _cluster(2, delay=3, interval=4).run(run):
            self.assertAllClose(last, w, rtol=1e-5, atol=1e-5)

    @parameterized.parameters(
        {"delay": 3, "interval": 2, "momentum": 0.9, "nesterov": True}, {"delay": 0, "interval": 1}
    )
    def test_gradient_accumulation(self, delay, interval, **momentum):
        """A step of the scheme is an update."""

        def run(strategy):
            optimizer = functools.partial(keras.optimizers.SGD, _RATE, gradient_accumulation_steps=2, **momentum)
            return _train(strategy, optimizer, loss=_linear_loss)

        gradients = np.reshape(_linear_gradients(), (_NUM_STEPS // 2, 2, 3, _NUM_OUTPUTS)).mean(1)
        expected = _replayed(gradients, rate_of=lambda step: _RATE, **momentum)
        for _, last, _ in _cluster(2, delay=delay, interval=interval).run(run):
            self.assertAllClose(last, expected, rtol=1e-5, atol=1e-5)


class CompensationTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters((2, 4), (5, 3), (0, 1), (3, 1))
    @pytest.mark.stress(after=1)
    def test_equation_13(self, delay, interval):
        expected = _equation_13(2, delay, interval, 0.9)
        cluster = _cluster(2, delay=delay, interval=interval, compensation="paper")
        for rank, (history, _, _) in enumerate(
            cluster.run(lambda s: _train(s, lambda: keras.optimizers.SGD(_RATE, momentum=0.9)))
        ):
            self.assertAllClose(history, [weights[rank] for weights in expected], rtol=1e-5, atol=1e-5)

    @parameterized.parameters("paper", "none")
    @pytest.mark.stress(after=1)
    def test_without_momentum_all_are_the_same(self, compensation):
        """Equation 12."""
        _, expected = _exact(2, 3, 2)
        for _, last, _ in _cluster(2, delay=3, interval=2, compensation=compensation).run(
            lambda s: _train(s, _decaying())
        ):
            self.assertAllClose(last, expected, rtol=1e-5, atol=1e-5)

    @parameterized.parameters(
        (lambda: keras.optimizers.Adam(), "Adam"),
        (lambda: keras.optimizers.SGD(momentum=0.9, nesterov=True), "nesterov=True"),
        (lambda: keras.optimizers.SGD(weight_decay=0.1), "a weight decay"),
    )
    @pytest.mark.stress(after=1)
    def test_the_paper_says_nothing_of_it(self, make_optimizer, problem):
        with self.assertRaisesRegex(_REFUSALS, f"`compensation` must not be 'paper' .* {problem}"):
            _cluster(2, compensation="paper").run(lambda strategy: _fit(_compiled(strategy, make_optimizer)))

    @parameterized.parameters((4, 3), (0, 3))
    @pytest.mark.stress(after=1)
    def test_none(self, delay, interval):
        """A difference is applied as it is. At D = 0 nothing needs compensation."""
        expected = _equation_13(2, delay, interval, 0.9, factor=1.0)
        cluster = _cluster(2, delay=delay, interval=interval, compensation="none")
        for rank, (history, _, _) in enumerate(
            cluster.run(lambda s: _train(s, lambda: keras.optimizers.SGD(_RATE, momentum=0.9)))
        ):
            self.assertAllClose(history, [weights[rank] for weights in expected], rtol=1e-5, atol=1e-5)


def _averaged_changes(make_optimizer, world_size, delay, interval):
    """Keras's optimizers, one for each rank, and the weights' changes averaged: what each rank ends with."""
    variables = [keras.Variable(_problem()[2]) for _ in range(world_size)]
    optimizers = [make_optimizer() for _ in variables]
    changes, differences = np.zeros((world_size, 3, _NUM_OUTPUTS)), {}

    def correct(window):
        for variable, difference in zip(variables, differences.pop(window), strict=True):
            variable.assign_add(difference)

    for step in range(_NUM_STEPS):
        for rank, (variable, optimizer) in enumerate(zip(variables, optimizers, strict=True)):
            before = variable.numpy()
            optimizer.apply([tf.constant(_gradient(before, step, rank, world_size), tf.float32)], [variable])
            changes[rank] += variable.numpy() - before
        window = (step + 1) // interval - 1
        if (step + 1) % interval == 0:
            differences[window] = changes.mean(0) - changes
            changes[:] = 0
        due = step + 1 - delay
        if due > 0 and due % interval == 0:
            correct(due // interval - 1)
    differences[_NUM_STEPS] = changes.mean(0) - changes
    for window in sorted(differences):
        correct(window)
    return [variable.numpy() for variable in variables]


def _two_kernels():
    """The products of inputs and two kernels, added."""
    inputs = keras.Input((3,))
    layers = [keras.layers.Dense(_NUM_OUTPUTS, use_bias=False, name=name) for name in ("first", "second")]
    model = keras.Model(inputs, keras.layers.add([layer(inputs) for layer in layers]))
    model.set_weights([_problem()[2]] * 2)
    return model


class OwnOptimizers(keras.Model):
    """Has an optimizer for each kernel, and a linear loss. Optimizers get their variables in the first step."""

    def __init__(self, network, optimizers):
        super().__init__()
        self.network = network
        self.optimizers = optimizers

    def call(self, inputs):
        return self.network(inputs)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(_linear_loss(y, self.network(x)))
        kernels = self.network.trainable_variables
        for optimizer, gradient, kernel in zip(self.optimizers, tape.gradient(loss, kernels), kernels, strict=True):
            optimizer.apply([gradient], [kernel])
        return {"loss": loss}


def _adam_alone(rank):
    """What a rank's Adam makes of its own gradients, which do not depend on the weights."""
    variable, optimizer = keras.Variable(_problem()[2]), keras.optimizers.Adam(0.01)
    for step in range(_NUM_STEPS):
        optimizer.apply([tf.constant(_linear_gradient(step, rank, 2), tf.float32)], [variable])
    return variable.numpy()


class Unused(keras.layers.Layer):
    """Has a variable that gets no gradient."""

    def build(self, shape):
        self.unused = self.add_weight(shape=(3,), initializer="ones")

    def call(self, inputs):
        return inputs


# The error of a rank that refuses, or that of the other one where it hears of the first one's.
_REFUSALS = (ValueError, PeerLostError)


class OptimizersTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters((4, 3), (0, 1))
    @pytest.mark.stress(after=1)
    def test_adam(self, delay, interval):
        def make_optimizer():
            return keras.optimizers.Adam(0.01)

        expected = _averaged_changes(make_optimizer, 2, delay, interval)
        results = _cluster(2, delay=delay, interval=interval).run(lambda s: _train(s, make_optimizer))
        for (_, last, _), weights in zip(results, expected, strict=True):
            self.assertAllClose(last, weights, rtol=1e-4, atol=1e-4)
        self.assertAllClose(results[0][1], results[1][1], rtol=1e-5, atol=1e-5)

    def test_adam_with_top_k(self):
        """What is held back of the changes is not lost."""
        expected = np.mean([_adam_alone(rank) for rank in range(2)], axis=0)
        results = _cluster(2, delay=3, interval=2, codec=codecs.TopK(ratio=0.25)).run(
            lambda s: _train(s, lambda: keras.optimizers.Adam(0.01), loss=_linear_loss)
        )
        for _, last, _ in results:
            self.assertAllClose(last, expected, rtol=1e-5, atol=1e-5)

    @parameterized.parameters(
        lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
        lambda: keras.optimizers.RMSprop(0.01),
        lambda: keras.optimizers.Lion(0.001),
        lambda: keras.optimizers.SGD(0.05, momentum=0.9, clipnorm=0.5),
    )
    @pytest.mark.stress(after=1)
    def test_all_ranks_end_with_the_same(self, make_optimizer):
        (_, first, _), (_, second, _) = _cluster(2, delay=3, interval=2).run(lambda s: _train(s, make_optimizer))
        self.assertAllClose(first, second, rtol=1e-5, atol=1e-5)
        self.assertGreater(np.abs(first - _problem()[2]).max(), 0.01)

    def test_excluded_from_weight_decay(self):
        """The kernel shrinks, the bias does not: neither by a rank's own updates, nor by corrections."""
        _, y, w = _problem()

        def run(strategy):
            with strategy.scope():
                model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(_NUM_OUTPUTS)])
                model.set_weights([w, np.ones(_NUM_OUTPUTS)])
                optimizer = keras.optimizers.SGD(_RATE, momentum=0.9, weight_decay=2.0)
                optimizer.exclude_from_weight_decay(var_names=["bias"])
                model.compile(optimizer, _linear_loss)
            _fit(model)
            return model.get_weights()

        num_steps = _NUM_ROWS // _BATCH_SIZE
        kernel = _replayed(_linear_gradients(num_steps), momentum=0.9, decay=2.0, rate_of=lambda step: _RATE)
        bias, v = np.ones(_NUM_OUTPUTS), 0.0
        for step in range(num_steps):
            v = 0.9 * v - _RATE * y[_batch_of(step, 0, 1)].mean(0)
            bias = bias + v
        for weights in _cluster(2, delay=3, interval=2).run(run):
            self.assertAllClose(weights[0], kernel, rtol=1e-5, atol=1e-5)
            self.assertAllClose(weights[1], bias, rtol=1e-5, atol=1e-5)

    @parameterized.parameters(None, "rmsprop")
    @pytest.mark.stress(after=1)
    def test_optimizers_of_the_models_own(self, unused_optimizer):
        """They are SGD and Adam, and built by their first update. What is under way in the end is applied."""

        def run(strategy):
            with strategy.scope():
                optimizers = [keras.optimizers.SGD(_RATE, momentum=0.9), keras.optimizers.Adam(0.01)]
                model = OwnOptimizers(_two_kernels(), optimizers)
                model.compile(unused_optimizer)
            _fit(model, epochs=_NUM_EPOCHS)
            return model.get_weights()

        of_sgd = _replayed(_linear_gradients(), momentum=0.9, rate_of=lambda step: _RATE)
        of_adam = np.mean([_adam_alone(rank) for rank in range(2)], axis=0)
        for weights in _cluster(2, delay=3, interval=5).run(run):
            self.assertAllClose(weights, [of_sgd, of_adam], rtol=1e-5, atol=1e-5)

    def test_several_optimizers_in_one(self):
        """What is under way in the end is applied once, though each of them says that training has ended."""

        def run(strategy):
            with strategy.scope():
                model = _two_kernels()
                optimizers = keras.optimizers.OptimizerMap(keras.optimizers.SGD(_RATE))
                optimizers[".*second.*"] = keras.optimizers.SGD(_RATE, momentum=0.9, nesterov=True)
                model.compile(keras.optimizers.MultiOptimizer(optimizers), _linear_loss)
            _fit(model, epochs=_NUM_EPOCHS)
            return model.get_weights()

        expected = [
            _replayed(_linear_gradients(), rate_of=lambda step: _RATE, **arguments)
            for arguments in ({}, {"momentum": 0.9, "nesterov": True})
        ]
        for weights in _cluster(2, delay=3, interval=5).run(run):
            self.assertAllClose(weights, expected, rtol=1e-5, atol=1e-5)

    def test_loss_scale_with_an_unused_variable(self):
        """The optimizer is given None for its gradient."""

        def run(strategy):
            with strategy.scope():
                model = keras.Sequential(
                    [keras.Input((3,)), Unused(), keras.layers.Dense(_NUM_OUTPUTS, use_bias=False)]
                )
                model.set_weights([np.ones(3), _problem()[2]])
                optimizer = _decaying(momentum=0.9)()
                model.compile(keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=8.0), _linear_loss)
            _fit(model, epochs=_NUM_EPOCHS)
            return model.get_weights()

        expected = _replayed(_linear_gradients(), momentum=0.9)
        for unused, last in _cluster(2, delay=3, interval=4).run(run):
            self.assertAllEqual(unused, np.ones(3))
            self.assertAllClose(last, expected, rtol=1e-5, atol=1e-5)

    @parameterized.parameters(
        ("clipnorm", lambda: keras.optimizers.SGD(_RATE, clipnorm=1.0)),
        ("clipvalue", lambda: keras.optimizers.SGD(_RATE, clipvalue=1.0)),
        ("global_clipnorm", lambda: keras.optimizers.SGD(_RATE, global_clipnorm=1.0)),
        ("gradient_accumulation_steps", lambda: keras.optimizers.SGD(_RATE, gradient_accumulation_steps=2)),
        ("weight_decay", lambda: keras.optimizers.AdamW(0.01)),
    )
    @pytest.mark.stress(after=1)
    def test_refused_under_loss_scaling(self, name, make_inner):
        def run(strategy):
            _fit(_compiled(strategy, lambda: keras.optimizers.LossScaleOptimizer(make_inner())))

        with self.assertRaisesRegex(_REFUSALS, f"`{name}` must not be set .* LossScaleOptimizer"):
            _cluster(2).run(run)

    @parameterized.parameters("bfloat16", "float16")
    @pytest.mark.stress(after=1)
    def test_refused_types(self, dtype):
        with self.assertRaisesRegex(_REFUSALS, "must be float32 or float64"):
            _cluster(2).run(lambda strategy: _fit(_compiled(strategy, dtype=dtype)))

    def test_refuses_a_selection_of_doubles(self):
        with self.assertRaisesRegex(_REFUSALS, "must be float32 with a codec that selects"):
            _cluster(2, codec="top_k").run(lambda strategy: _fit(_compiled(strategy, dtype="float64")))

    @parameterized.parameters({"momentum": 0.9, "nesterov": True}, {"weight_decay": 0.5}, {"momentum": 0.9}, {})
    @pytest.mark.stress(after=1)
    def test_a_step_left_out_is_one_without_gradient(self, momentum=0.0, nesterov=False, weight_decay=0.0):
        """Rank 1's gradient overflows in step 3; both go on as if it had been zero."""
        num_steps, bad = 9, 3

        def run(strategy):
            x = np.ones((2 * num_steps, 1), np.float32)
            x[1::2] = 3.0
            x[2 * bad + 1] = np.inf
            with strategy.scope():
                model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
                inner = keras.optimizers.SGD(
                    0.1, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay or None
                )
                optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=8.0)
                model.compile(optimizer, loss=lambda y, y_pred: tf.reduce_sum(y_pred, axis=-1))
            model.set_weights([np.ones((1, 1))])
            model.fit(x, x, batch_size=2, shuffle=False, verbose=0)
            return _weights(model)[0, 0], float(optimizer.dynamic_scale)

        w, v = 1.0, 0.0
        for step in range(num_steps):
            gradient = (1.0 + (3.0 if step != bad else 0.0)) / 2
            w *= 1 - 0.1 * weight_decay
            v = momentum * v - 0.1 * gradient
            w += momentum * v - 0.1 * gradient if nesterov else v
        (first, first_scale), (second, second_scale) = _cluster(2, delay=2, interval=2).run(run)
        self.assertAllClose([first, second], [w, w], rtol=1e-5)
        self.assertEqual((first_scale, second_scale), (8.0, 4.0))


class CodecTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        ("int8", 0.02), (codecs.Truncate16(round_to_nearest=True), 0.01), ("sketch", 0.05), (None, 1e-5)
    )
    @pytest.mark.stress(after=1)
    def test_ranks_agree_on_what_they_have_heard(self, codec, tolerance):
        _, expected = _exact(3, 4, 2, momentum=0.9)
        results = _cluster(3, delay=4, interval=2, codec=codec).run(lambda s: _train(s, _decaying(momentum=0.9)))
        for _, last, _ in results:
            self.assertAllClose(last, expected, atol=tolerance)
            self.assertAllClose(last, results[0][1], rtol=1e-5, atol=1e-5)

    @parameterized.parameters(codecs.TopK(ratio=0.1, warmup_steps=3), codecs.TopK(ratio=0.25))
    @pytest.mark.stress(after=1)
    def test_top_k_loses_nothing(self, codec):
        """However late a value was sent, the result is that of synchronous SGD."""
        expected = _replayed(_linear_gradients(), momentum=0.9, decay=0.5)
        for _, last, _ in _cluster(3, delay=4, interval=2, codec=codec).run(
            lambda s: _train(s, _decaying(momentum=0.9, weight_decay=0.5), loss=_linear_loss)
        ):
            self.assertAllClose(last, expected, rtol=1e-5, atol=1e-5)

    @parameterized.parameters((0, 1), (8, 6))
    def test_traffic_of_top_k(self, warmup_steps, num_steps):
        """Where more is handed out, in warm-up and in the end, it goes as whole vectors in pieces if that is less."""
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
        expected = 2 * 20_000 * sum(min(whole, of_a_value * ratio) for ratio in ratios)
        for num_bytes in _cluster(4, delay=2, interval=2, codec=codec).run(run):
            self.assertBetween(num_bytes, 0.5 * expected, 1.1 * expected)

    def test_a_rank_that_ends_early_with_top_k(self):
        """It hands out all that it has held back while rank 0 hands out little: so much more stays for later."""

        class Stop(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                self.model.stop_training = batch == 4

        def run(strategy):
            callbacks = [Stop()] if strategy.rank == 1 else ()
            return _train(strategy, num_epochs=1, callbacks=callbacks, loss=_linear_loss)[1]

        # Both add half of what both have handed out, and in the end rank 0 all of the rest of its own.
        total = 2 * _problem()[2].astype(np.float64)
        for rank, num_steps in ((0, _NUM_ROWS // _BATCH_SIZE), (1, 5)):
            total -= _RATE * np.sum([_linear_gradient(step, rank, 2) for step in range(num_steps)], axis=0)
        last, early = _cluster(2, delay=2, interval=2, codec=codecs.TopK(ratio=0.1)).run(run)
        self.assertAllClose(last + early, total, rtol=1e-5, atol=1e-5)
        self.assertGreater(np.abs(last - early).max(), 0.01)


class _AbortOnRank1(keras.callbacks.Callback):
    """Ends the job on rank 1, while the others are between two steps and have heard of it when they go on."""

    def __init__(self, strategy):
        super().__init__()
        self._strategy = strategy

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            if self._strategy.rank == 1:
                raise HopError("broken on purpose")
            with contextlib.suppress(HopError):
                self._strategy._worker.membership.wait_until(lambda: False, _OPTIONS.timeout_seconds)


class FitTest(tf.test.TestCase, parameterized.TestCase):
    def test_world_of_one(self):
        ((history, last, _),) = _cluster(1).run(_train)
        w = _problem()[2].astype(np.float64)
        for step in range(_NUM_STEPS):
            w = w - _RATE * _gradient(w, step, 0, 1)
            self.assertAllClose(history[step], w, rtol=1e-5, atol=1e-5)
        self.assertAllEqual(history[-1], last)

    def test_a_rank_that_ends_early(self):
        """Rank 1 leaves in the middle of a window; rank 0 goes on, and alone in the end."""

        class Stop(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                self.model.stop_training = batch == 6

        def run(strategy):
            return _train(strategy, callbacks=[Stop()] if strategy.rank == 1 else (), loss=_linear_loss)

        def total(steps, rank):
            return np.sum([_linear_gradient(step, rank, 2) for step in steps], axis=0)

        (_, last, report), (_, early, _) = _cluster(2, delay=2, interval=3).run(run)
        self.assertEqual(report["steps"], _NUM_STEPS)
        # Two windows of both; rank 1's step 6 meets rank 0's third window.
        both = (total(range(9), 0) + total(range(7), 1)) / 2
        expected = _problem()[2] - _RATE * both
        self.assertAllClose(early, expected, rtol=1e-5, atol=1e-5)
        self.assertAllClose(last, expected - _RATE * total(range(9, _NUM_STEPS), 0), rtol=1e-5, atol=1e-5)

    def test_a_fit_after_one_that_ended_early_on_a_rank(self):
        """Velocities are averaged, too: what they differ by would spread into the weights, and stay there.

        And so are numbers of steps, by which learning rates go.
        """

        class Stop(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                self.model.stop_training = batch == 6

        def run(strategy):
            model = _compiled(strategy, _decaying(momentum=0.9), loss=_linear_loss)
            _fit(model, epochs=2, callbacks=[Stop()] if strategy.rank == 1 else [])
            strategy.synchronize(model)
            (velocity,) = model.optimizer.momentums
            start = _weights(model), velocity.numpy(), int(model.optimizer.iterations)
            _fit(model)
            return start, _weights(model)

        (start, first), (start_there, second) = _cluster(2, delay=2, interval=3).run(run)
        for own, other in zip(start, start_there, strict=True):
            self.assertAllEqual(own, other)
        w, v, num_steps = start
        self.assertGreater(np.abs(v).max(), 0.01)
        self.assertEqual(num_steps, (_NUM_STEPS + 7 + 1) // 2)  # 23 / 2, rounded.
        for step, gradient in enumerate(_linear_gradients(_NUM_ROWS // _BATCH_SIZE)):
            v = 0.9 * v - _rate_of(num_steps + step) * gradient
            w = w + v
        self.assertAllClose(first, w, rtol=1e-5, atol=1e-5)
        self.assertAllClose(second, w, rtol=1e-5, atol=1e-5)

    def test_windows_that_overtake_each_other(self):
        """On rank 1 every other window begins when the next one waits for nothing but this one."""
        step, commit = DTSExchange.step, DTSExchange._commit
        waits = [threading.Event() for _ in range(_NUM_STEPS)]

        def step_late(exchange, outgoing):
            if exchange._membership.rank == 1 and outgoing.step % 2 == 0:
                self.assertTrue(waits[outgoing.step + 1].wait(_OPTIONS.timeout_seconds))
            return step(exchange, outgoing)

        def noted_commit(exchange, window):
            self.assertLessEqual(exchange.sent_steps, window)  # Nor does the next one count before this one.
            if exchange._membership.rank == 1:
                waits[window].set()
            commit(exchange, window)

        _, expected = _exact(2, 4, 1, momentum=0.9)
        with mock.patch.object(DTSExchange, "step", step_late), mock.patch.object(DTSExchange, "_commit", noted_commit):
            results = _cluster(2, delay=4, interval=1).run(lambda s: _train(s, _decaying(momentum=0.9)))
        for _, last, _ in results:
            self.assertAllClose(last, expected, rtol=1e-5, atol=1e-5)

    @parameterized.parameters(
        {"interval": 4, "gradient_accumulation_steps": 2, "num_batches": [_NUM_STEPS + 1]},
        {"interval": 1, "gradient_accumulation_steps": 2, "num_batches": [1, 2]},
        {"interval": 3},
        {"interval": 3, "gradient_accumulation_steps": 2},
    )
    @pytest.mark.stress(after=2)
    def test_moving_statistics_are_averaged(
        self, interval, gradient_accumulation_steps=None, num_batches=(_NUM_STEPS,)
    ):
        """They follow the data of all ranks, those of steps without an update too, the last ones or all of a `fit`."""
        x, y, _ = _problem()
        x, y = (np.concatenate([values] * 3) for values in (x, y))

        def run(strategy):
            with strategy.scope():
                model = keras.Sequential(
                    [keras.Input((3,)), keras.layers.BatchNormalization(momentum=0.5), keras.layers.Dense(_NUM_OUTPUTS)]
                )
                model.compile(
                    keras.optimizers.SGD(_RATE, momentum=0.9, gradient_accumulation_steps=gradient_accumulation_steps),
                    "mse",
                )
            for number in num_batches:
                rows = slice(number * _BATCH_SIZE)
                model.fit(x[rows] + 3 * strategy.rank, y[rows], batch_size=_BATCH_SIZE, shuffle=False, verbose=0)
            return [weight.numpy() for weight in model.non_trainable_weights]

        mean, variance = np.zeros(3), np.ones(3)
        for step in (step for number in num_batches for step in range(number)):
            of_ranks = [x[_batch_of(step, rank, 2)] + 3 * rank for rank in range(2)]
            mean = 0.5 * (mean + np.mean([rows.mean(0) for rows in of_ranks], axis=0))
            variance = 0.5 * (variance + np.mean([rows.var(0) for rows in of_ranks], axis=0))
        for statistics in _cluster(2, delay=2, interval=interval).run(run):
            self.assertAllClose(statistics, [mean, variance], rtol=1e-5, atol=1e-5)

    def test_an_abort_is_heard_between_steps(self):
        """Who is alone afterwards waits for nobody, and must raise all the same."""

        def run(strategy):
            try:
                _train(strategy, callbacks=[_AbortOnRank1(strategy)])
            except Exception as error:
                return error
            return None

        errors = _cluster(2, delay=1, interval=1).run(run)
        self.assertIsInstance(errors[0], HopError)
        self.assertIn("broken on purpose", str(errors[0]))
        self.assertEqual(str(errors[1]), "broken on purpose")

    def test_a_broken_fit_does_not_spoil_the_next(self):
        """What was accumulated, and how far others were, is forgotten."""

        class Break(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                if batch == 4:
                    raise KeyError("broken off")

        def run(strategy):
            model = _compiled(strategy, _decaying(momentum=0.9))
            with self.assertRaises(KeyError):
                _fit(model, callbacks=[Break()])
            model.set_weights([_problem()[2]])
            for variable in (model.optimizer.iterations, *model.optimizer.momentums):
                variable.assign(tf.zeros_like(variable))
            _fit(model, epochs=_NUM_EPOCHS)
            return _weights(model)

        _, expected = _exact(2, 3, 2, momentum=0.9)
        for last in _cluster(2, delay=3, interval=2).run(run):
            self.assertAllClose(last, expected, rtol=1e-5, atol=1e-5)


class ArgumentsTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        ({"delay": -1}, "`delay` must be"),
        ({"interval": 0}, "`interval` must be"),
        ({"interval": 10**20}, "`interval` must be an integer of at least 1 and at most 2147483647. Received"),
        ({"compensation": "some"}, "`compensation` must be one of"),
        ({"algorithm": "star"}, "`algorithm` must be one of"),
        ({"delay": 1000, "interval": 10}, "at most 100 windows .* which make 101"),
        ({"codec": "zip"}, "`codec` must be one of"),
    )
    def test_refused(self, settings, message):
        with self.assertRaisesRegex(ValueError, message):
            hop_tf.DTSStrategy(**settings)


if __name__ == "__main__":
    tf.test.main()

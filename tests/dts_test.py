"""DTS under `fit`, with ranks in one process, against NumPy references of the exactness rule and of Equation 13."""

import functools

import keras
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import hop_tf
from hop_tf import codecs
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


def _replayed(gradients, momentum, nesterov, decay):
    w, v = _problem()[2].astype(np.float64), 0.0
    for step, gradient in enumerate(gradients):
        rate = _rate_of(step)
        w = w * (1 - rate * decay)
        v = momentum * v - rate * gradient
        w = w + (momentum * v - rate * gradient if nesterov else v)
    return w


def _exact(world_size, delay, interval, momentum=0.0, nesterov=False, decay=0.0):
    """Each rank's weights after each step, and after the last one when all is known."""
    used = [[] for _ in range(world_size)]
    means, history = [], []
    weights = [_problem()[2].astype(np.float64)] * world_size
    for step in range(_NUM_STEPS):
        gradients = [_gradient(weights[rank], step, rank, world_size) for rank in range(world_size)]
        means.append(np.mean(gradients, axis=0))
        num_known = max(0, step + 1 - delay) // interval * interval
        for rank in range(world_size):
            used[rank] = means[:num_known] + [*used[rank], gradients[rank]][num_known:]
            weights[rank] = _replayed(used[rank], momentum, nesterov, decay)
        history.append(list(weights))
    return history, _replayed(means, momentum, nesterov, decay)


def _equation_13(world_size, delay, interval, momentum):
    """As printed, with the signs and the place of the learning rate as in Keras's SGD; a constant rate."""
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
            factor = momentum**delay
            u = [u[rank] + factor * (mean[-1] - s[rank][-1]) for rank in range(world_size)]
            weights = [
                weights[rank] - _RATE * factor * (np.sum(mean, axis=0) - np.sum(s[rank], axis=0))
                for rank in range(world_size)
            ]
        history.append(list(weights))
    return history


def _train(strategy, optimizer=None, num_epochs=_NUM_EPOCHS, callbacks=(), **compile_args):
    """Weights after each step, in the end, and the report."""
    x, y, w = _problem()
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(_NUM_OUTPUTS, use_bias=False)])
        model.set_weights([w])
        optimizer = keras.optimizers.SGD(_RATE) if optimizer is None else optimizer()
        model.compile(optimizer, _summed_square, **compile_args)
    history = []
    record = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: history.append(_weights(model)))
    model.fit(x, y, batch_size=_BATCH_SIZE, epochs=num_epochs, shuffle=False, verbose=0, callbacks=[record, *callbacks])
    return history, _weights(model), strategy.report()


def _weights(model):
    return model.get_weights()[0]


def _summed_square(y_true, y_pred):
    return _NUM_OUTPUTS * tf.reduce_mean(tf.square(y_true - y_pred), axis=-1)


def _decaying(**arguments):
    schedule = keras.optimizers.schedules.ExponentialDecay(_RATE, decay_steps=10, decay_rate=0.5)
    return lambda: keras.optimizers.SGD(schedule, **arguments)


class ExactTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        {"world_size": 2, "delay": 0, "interval": 1, "momentum": 0.9},
        {"world_size": 2, "delay": 4, "interval": 4, "momentum": 0.9},
        {"world_size": 3, "delay": 3, "interval": 1},
        {"world_size": 2, "delay": 5, "interval": 1, "momentum": 0.9, "nesterov": True},
        {"world_size": 3, "delay": 0, "interval": 3, "momentum": 0.9, "nesterov": True},
        {"world_size": 4, "delay": 5, "interval": 2, "momentum": 0.9, "nesterov": True, "decay": 0.5},
        {"world_size": 2, "delay": 6, "interval": 4, "decay": 0.5},
        {"world_size": 2, "delay": 20, "interval": 12, "momentum": 0.9},
    )
    def test_equals_the_specification_step_by_step(self, world_size, delay, interval, decay=0.0, **momentum):
        expected, in_the_end = _exact(world_size, delay, interval, decay=decay, **momentum)
        optimizer = _decaying(weight_decay=decay or None, **momentum)
        results = _cluster(world_size, delay=delay, interval=interval).run(lambda s: _train(s, optimizer))
        for rank, (history, last, report) in enumerate(results):
            self.assertAllClose(history, [weights[rank] for weights in expected], rtol=1e-5, atol=1e-5)
            self.assertAllClose(last, in_the_end, rtol=1e-5, atol=1e-5)
            self.assertEqual(report["steps"], _NUM_STEPS)

    @parameterized.parameters({"steps_per_execution": 5}, {"run_eagerly": True})
    def test_however_keras_runs_steps(self, **compile_args):
        _, expected = _exact(2, 3, 2, momentum=0.9)
        for _, last, _ in _cluster(2, delay=3, interval=2).run(
            lambda s: _train(s, _decaying(momentum=0.9), **compile_args)
        ):
            self.assertAllClose(last, expected, rtol=1e-5, atol=1e-5)

    def test_in_two_parts(self):
        """All is applied when `fit` ends, and the next one goes on with weights and velocity."""

        def run(strategy):
            x, y, w = _problem()
            with strategy.scope():
                model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(_NUM_OUTPUTS, use_bias=False)])
                model.set_weights([w])
                model.compile(_decaying(momentum=0.9)(), _summed_square)
            for _ in range(_NUM_EPOCHS):
                model.fit(x, y, batch_size=_BATCH_SIZE, shuffle=False, verbose=0)
            return _weights(model)

        (first, second), (_, expected) = _cluster(2, delay=0, interval=3).run(run), _exact(2, 0, 3, momentum=0.9)
        self.assertAllClose(first, second, rtol=1e-5, atol=1e-5)
        # The first `fit` has ended with a window of 2 steps, so that the gradients of 6 later steps differ somewhat.
        self.assertAllClose(first, expected, atol=0.02)

    def test_gradient_accumulation(self):
        """A step of the scheme is an update."""

        def run(strategy):
            return _train(strategy, lambda: keras.optimizers.SGD(_RATE, gradient_accumulation_steps=2))

        w = _problem()[2].astype(np.float64)
        for update in range(_NUM_STEPS // 2):
            steps = (2 * update, 2 * update + 1)
            w = w - _RATE * np.mean([_gradient(w, step, rank, 2) for step in steps for rank in range(2)], axis=0)
        for _, last, _ in _cluster(2, delay=0, interval=1).run(run):
            self.assertAllClose(last, w, rtol=1e-5, atol=1e-5)


class CompensationTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters((0, 1), (3, 1), (2, 4), (5, 3))
    def test_equation_13(self, delay, interval):
        expected = _equation_13(2, delay, interval, 0.9)
        cluster = _cluster(2, delay=delay, interval=interval, compensation="paper")
        for rank, (history, _, _) in enumerate(
            cluster.run(lambda s: _train(s, lambda: keras.optimizers.SGD(_RATE, momentum=0.9)))
        ):
            self.assertAllClose(history, [weights[rank] for weights in expected], rtol=1e-5, atol=1e-5)

    @parameterized.parameters("paper", "none")
    def test_without_momentum_all_are_the_same(self, compensation):
        """Equation 12."""
        _, expected = _exact(2, 3, 2)
        for _, last, _ in _cluster(2, delay=3, interval=2, compensation=compensation).run(
            lambda s: _train(s, _decaying())
        ):
            self.assertAllClose(last, expected, rtol=1e-5, atol=1e-5)

    def test_none(self):
        """At D = 0 nothing needs compensation; later, a difference is applied as it is."""
        _, expected = _exact(2, 0, 3, momentum=0.9)
        run = functools.partial(_train, optimizer=_decaying(momentum=0.9))
        for _, last, _ in _cluster(2, delay=0, interval=3, compensation="none").run(run):
            # The last window is corrected at the step where it ends, as all others are.
            self.assertAllClose(last, expected, rtol=1e-5, atol=1e-5)
        _, expected = _exact(2, 4, 3, momentum=0.9)
        for _, last, _ in _cluster(2, delay=4, interval=3, compensation="none").run(run):
            self.assertGreater(np.abs(last - expected).max(), 1e-3)


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


class OptimizersTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters((0, 1), (4, 3))
    def test_adam(self, delay, interval):
        def make_optimizer():
            return keras.optimizers.Adam(0.01)

        expected = _averaged_changes(make_optimizer, 2, delay, interval)
        results = _cluster(2, delay=delay, interval=interval).run(lambda s: _train(s, make_optimizer))
        for (_, last, _), weights in zip(results, expected, strict=True):
            self.assertAllClose(last, weights, rtol=1e-4, atol=1e-4)
        self.assertAllClose(results[0][1], results[1][1], rtol=1e-5, atol=1e-5)

    @parameterized.parameters(
        lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
        lambda: keras.optimizers.RMSprop(0.01),
        lambda: keras.optimizers.Lion(0.001),
        lambda: keras.optimizers.SGD(0.05, momentum=0.9, clipnorm=0.5),
    )
    def test_all_ranks_end_with_the_same(self, make_optimizer):
        (_, first, _), (_, second, _) = _cluster(2, delay=3, interval=2).run(lambda s: _train(s, make_optimizer))
        self.assertAllClose(first, second, rtol=1e-5, atol=1e-5)
        self.assertGreater(np.abs(first - _problem()[2]).max(), 0.01)

    def test_excluded_from_weight_decay(self):
        """Gradients of zero: the kernel shrinks, the bias stays, on all ranks."""

        def run(strategy):
            with strategy.scope():
                model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, bias_initializer="ones")])
                optimizer = keras.optimizers.SGD(0.1, momentum=0.9, weight_decay=0.5)
                optimizer.exclude_from_weight_decay(var_names=["bias"])
                model.compile(optimizer, loss=lambda y, y_pred: 0.0 * tf.reduce_sum(y_pred, axis=-1))
            model.set_weights([np.ones((3, 2)), np.ones(2)])
            model.fit(np.ones((12, 3)), np.ones((12, 2)), batch_size=2, verbose=0)
            return model.get_weights()

        for kernel, bias in _cluster(2, delay=2, interval=2).run(run):
            self.assertAllClose(kernel, np.full((3, 2), 0.95**6), rtol=1e-6)
            self.assertAllEqual(bias, np.ones(2))

    @parameterized.parameters({"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, {"weight_decay": 0.5}, {})
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
        (codecs.Truncate16(round_to_nearest=True), 0.01), ("int8", 0.02), ("sketch", 0.05), (None, 1e-5)
    )
    def test_ranks_agree_on_what_they_have_heard(self, codec, tolerance):
        _, expected = _exact(3, 4, 2, momentum=0.9)
        results = _cluster(3, delay=4, interval=2, codec=codec).run(lambda s: _train(s, _decaying(momentum=0.9)))
        for _, last, _ in results:
            self.assertAllClose(last, expected, atol=tolerance)
            self.assertAllClose(last, results[0][1], rtol=1e-5, atol=1e-5)

    @parameterized.parameters(codecs.TopK(ratio=0.25), codecs.TopK(ratio=0.1, warmup_steps=3))
    def test_top_k_loses_nothing(self, codec):
        """A linear loss: however late a value was sent, the result is that of synchronous SGD."""

        def run(strategy):
            x, y, w = _problem()
            with strategy.scope():
                model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(_NUM_OUTPUTS, use_bias=False)])
                model.set_weights([w])
                model.compile(
                    _decaying(momentum=0.9, weight_decay=0.5)(), lambda y, y_pred: tf.reduce_sum(y * y_pred, axis=-1)
                )
            model.fit(x, y, batch_size=_BATCH_SIZE, epochs=_NUM_EPOCHS, shuffle=False, verbose=0)
            return _weights(model)

        x, y, w = (values.astype(np.float64) for values in _problem())
        v = 0.0
        for step in range(_NUM_STEPS):
            rows = _batch_of(step, 0, 1)
            rate = _rate_of(step)
            v = 0.9 * v - rate * x[rows].T @ y[rows] / _BATCH_SIZE
            w = w * (1 - 0.5 * rate) + v
        for last in _cluster(3, delay=4, interval=2, codec=codec).run(run):
            self.assertAllClose(last, w, rtol=1e-5, atol=1e-5)


class FitTest(tf.test.TestCase):
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
                self.model.stop_training = True

        def run(strategy):
            return _train(strategy, callbacks=[Stop()] if strategy.rank == 1 else ())

        (history, last, report), (_, early, _) = _cluster(2, delay=2, interval=3).run(run)
        self.assertEqual(report["steps"], _NUM_STEPS)
        self.assertTrue(np.isfinite(last).all() and np.isfinite(early).all())
        w = history[-7].astype(np.float64)
        for step in range(_NUM_STEPS - 6, _NUM_STEPS):
            w = w - _RATE * _gradient(w, step, 0, 2)
        self.assertAllClose(last, w, rtol=1e-5, atol=1e-5)

    def test_moving_statistics_are_averaged(self):
        def run(strategy):
            x, y, _ = _problem()
            with strategy.scope():
                model = keras.Sequential(
                    [keras.Input((3,)), keras.layers.BatchNormalization(momentum=0.5), keras.layers.Dense(_NUM_OUTPUTS)]
                )
                model.compile(keras.optimizers.SGD(_RATE, momentum=0.9), "mse")
            model.fit(x + 3 * strategy.rank, y, batch_size=_BATCH_SIZE, epochs=2, shuffle=False, verbose=0)
            return [weight.numpy() for weight in model.non_trainable_weights]

        first, second = _cluster(2, delay=2, interval=3).run(run)
        self.assertAllClose(first, second, rtol=1e-5, atol=1e-5)

    def test_a_broken_fit_does_not_spoil_the_next(self):
        """What was accumulated, and how far others were, is forgotten."""

        class Break(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                if batch == 4:
                    raise KeyError("broken off")

        def run(strategy):
            x, y, w = _problem()
            with strategy.scope():
                model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(_NUM_OUTPUTS, use_bias=False)])
                model.compile(_decaying(momentum=0.9)(), _summed_square)
            with self.assertRaises(KeyError):
                model.fit(x, y, batch_size=_BATCH_SIZE, shuffle=False, verbose=0, callbacks=[Break()])
            model.set_weights([w])
            for variable in (model.optimizer.iterations, *model.optimizer.momentums):
                variable.assign(tf.zeros_like(variable))
            model.fit(x, y, batch_size=_BATCH_SIZE, epochs=_NUM_EPOCHS, shuffle=False, verbose=0)
            return _weights(model)

        _, expected = _exact(2, 3, 2, momentum=0.9)
        for last in _cluster(2, delay=3, interval=2).run(run):
            self.assertAllClose(last, expected, rtol=1e-5, atol=1e-5)


class ArgumentsTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        ({"delay": -1}, "`delay` must be"),
        ({"interval": 0}, "`interval` must be"),
        ({"compensation": "some"}, "`compensation` must be one of"),
        ({"algorithm": "star"}, "`algorithm` must be one of"),
        ({"codec": "zip"}, "`codec` must be one of"),
    )
    def test_refused(self, settings, message):
        with self.assertRaisesRegex(ValueError, message):
            hop_tf.DTSStrategy(**settings)


if __name__ == "__main__":
    tf.test.main()

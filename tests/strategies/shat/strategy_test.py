"""Tests of SHAT under `fit`, with workers and servers in one process, against plain Keras and closed forms."""

import errno
import functools
import pathlib
import re
import tempfile
import threading
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import hop_tf
from hop_tf.errors import ClusterConfigError, HopError, MismatchError
from hop_tf.keras_hook.optimizers import slots_of
from hop_tf.strategies import shat
from hop_tf.strategies.shat.server import snapshots as snapshots_module
from hop_tf.strategies.shat.state import GroupState
from hop_tf.tools.testing import InProcessCluster
from support import in_process

_OPTIONS = hop_tf.CommunicationOptions(timeout_seconds=60)
_NUM_WORKERS = 2
_BATCH_SIZE = 12
_NUM_ROWS = 96
_NUM_STEPS = _NUM_ROWS // _BATCH_SIZE
_RATE = 0.05


def _cluster(num_workers=_NUM_WORKERS, num_ps=2, pushes="gradients", **settings):
    """Makes a cluster. Servers apply the optimizer unless `settings` say otherwise."""
    return in_process(hop_tf.SHATParameterServerStrategy, num_workers, num_ps, pushes=pushes, **settings)


@functools.cache
def _data():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(_NUM_ROWS, 3)).astype(np.float32)
    return x, generator.normal(size=(_NUM_ROWS, 4)).astype(np.float32)


def _make_model(optimizer, loss="mse", layers=(), **compile_arguments):
    initializer = keras.initializers.RandomNormal(seed=1)
    model = keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Dense(20, "tanh", kernel_initializer=initializer),
            *layers,
            keras.layers.Dense(4, kernel_initializer=initializer),
        ]
    )
    model.compile(optimizer, loss, **compile_arguments)
    return model


class _Recorder(keras.callbacks.Callback):
    """Records the weights after each step."""

    def __init__(self):
        super().__init__()
        self.weights = []

    def on_train_batch_end(self, batch, logs=None):
        self.weights.append(self.model.get_weights())


def _fit(model, data=None, num_epochs=1, callbacks=(), **arguments):
    recorder = _Recorder()
    model.fit(
        *(data or _data()),
        batch_size=_BATCH_SIZE,
        epochs=num_epochs,
        shuffle=False,
        verbose=0,
        callbacks=[recorder, *callbacks],
        **arguments,
    )
    return recorder.weights


def _trained(strategy, make_model, **arguments):
    """Trains; returns the weights after each step, and the model."""
    with strategy.scope():
        model = make_model()
    return _fit(model, **arguments), model


def _slots(model):
    slots = slots_of(model.optimizer, [weight.value for weight in model.trainable_weights])
    return {key: slot.numpy() for key, slot in slots.items()}


def _linear_loss(y, y_pred):
    """A loss whose gradient does not depend on the weights."""
    return tf.reduce_sum(y_pred, axis=-1)


def _make_linear(optimizer, **compile_arguments):
    model = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(4, use_bias=False, kernel_initializer="ones", **compile_arguments)]
    )
    model.compile(optimizer, _linear_loss)
    return model


class _TwoOptimizers(keras.Model):
    def __init__(self):
        super().__init__(name="two_optimizers")
        self.first, self.second = (keras.layers.Dense(4, kernel_initializer="ones") for _ in range(2))

    def build(self, shape):
        for layer in (self.first, self.second):
            layer.build(shape)

    def call(self, x):
        return self.first(x) + self.second(x)

    def compile(self):
        super().compile(keras.optimizers.SGD(_RATE))
        self.other = keras.optimizers.SGD(2 * _RATE)

    def train_step(self, data):
        x, _ = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.reduce_sum(self(x), -1))
        weights = [[w.value for w in layer.trainable_weights] for layer in (self.first, self.second)]
        gradients = tape.gradient(loss, weights)
        for optimizer, grads, layer in zip(
            (self.optimizer, self.other), gradients, (self.first, self.second), strict=True
        ):
            optimizer.apply(grads, layer.trainable_weights)
        return {"loss": loss}


class _Bias(keras.layers.Layer):
    """Adds a weight. Gradients pass through unchanged."""

    def build(self, shape):
        self.bias = self.add_weight(shape=shape[1:], initializer="zeros")

    def call(self, x):
        return x + self.bias


def _gradient(step, rank=0, num_workers=1):
    """Returns the gradient of the linear loss, by default that of the global batch."""
    share = _BATCH_SIZE // num_workers
    start = step * _BATCH_SIZE + rank * share
    return np.tile(_data()[0][start : start + share].astype(np.float64).mean(0)[:, np.newaxis], 4)


_OPTIMIZERS = {
    "SGD": lambda: keras.optimizers.SGD(_RATE, clipnorm=0.3),
    "Nesterov": lambda: keras.optimizers.SGD(
        keras.optimizers.schedules.ExponentialDecay(_RATE, 4, 0.5), momentum=0.9, nesterov=True
    ),
    "AdamW": lambda: keras.optimizers.AdamW(_RATE, weight_decay=0.1),
    "average": lambda: keras.optimizers.SGD(_RATE, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3),
}


class BulkSynchronousTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        ("Nesterov", {"sharding": "layer"}),
        ("AdamW", {"sharding": "memory", "mixing": "ensemble"}),
        ("average", {}),
    )
    @pytest.mark.stress(after=1)
    @pytest.mark.slow
    def test_equals_synchronous_training_step_by_step(self, name, settings):
        def make_model():
            optimizer = _OPTIMIZERS[name]()
            optimizer.exclude_from_weight_decay(var_names=["bias"])
            return _make_model(optimizer)

        def train(strategy):
            weights, model = _trained(strategy, make_model, num_epochs=2)
            path = f"{directory}/{strategy.rank}.keras"
            model.save(path)
            return weights, _slots(model), path, model.evaluate(*_data(), verbose=0)

        expected_model = make_model()
        expected = _fit(expected_model, num_epochs=2)
        directory = self.enterContext(tempfile.TemporaryDirectory())
        results = _cluster(consistency="bsp", **settings).run(train)
        for weights, slots, path, loss in results:
            for found, wanted in zip(weights, expected, strict=True):
                self.assertAllClose(found, wanted, rtol=2e-5, atol=2e-6)
            self.assertAllClose(slots, _slots(expected_model), rtol=2e-5, atol=2e-6)
            self.assertAllClose(loss, expected_model.evaluate(*_data(), verbose=0), rtol=1e-5)
            loaded = keras.saving.load_model(path)
            self.assertAllClose(loaded.get_weights(), expected_model.get_weights(), rtol=2e-5, atol=2e-6)
            self.assertAllClose(_slots(loaded), _slots(expected_model), rtol=2e-5, atol=2e-6)
        self.assertAllEqual(results[0][0][-1][0], results[1][0][-1][0])

    @pytest.mark.slow
    def test_moving_statistics_are_averaged(self):
        def make_model():
            return _make_model(keras.optimizers.SGD(0.0), layers=[keras.layers.BatchNormalization(momentum=0.8)])

        results = _cluster(consistency="bsp").run(lambda strategy: _trained(strategy, make_model)[0])
        expected = _fit(make_model())
        # Slices of equal size: the mean of their means is that of the batch. Variances are those of slices.
        for weights in results:
            for found, wanted in zip(weights, expected, strict=True):
                self.assertAllClose(found[4], wanted[4], rtol=1e-4, atol=1e-6)
        self.assertAllEqual(results[0][-1][5], results[1][-1][5])

    def test_codec_and_accumulation(self):
        def make_model():
            return _make_linear(keras.optimizers.SGD(_RATE, clipvalue=0.25, gradient_accumulation_steps=2))

        def train(strategy):
            _, model = _trained(strategy, make_model)
            return model.get_weights()[0], strategy.report()

        expected = np.ones((3, 4))
        for step in range(0, _NUM_STEPS, 2):
            pushed = []
            for rank in range(_NUM_WORKERS):
                gradient = (_gradient(step, rank, _NUM_WORKERS) + _gradient(step + 1, rank, _NUM_WORKERS)) / 2
                pushed.append(np.clip(gradient, -0.25, 0.25))
            expected -= _RATE * np.mean(pushed, axis=0)
        for weights, report in _cluster(consistency="bsp", codec="int8").run(train):
            self.assertAllClose(weights, expected, atol=_RATE * _NUM_STEPS / 2 * 0.25 / 127)
            self.assertEqual(report["steps"], _NUM_STEPS // 2)
            self.assertEqual(report["mixing_weight"], 1.0)
            self.assertEqual(report["pushes_by_others"], 1.0)

    def test_who_ends_early_is_not_waited_for(self):
        """The other rank takes the whole batch at some step. A step's rows are equal, so its gradient is the same."""
        x, y = _data()
        x = np.repeat(x[::_BATCH_SIZE], _BATCH_SIZE, axis=0)

        def train(strategy):
            make_model = lambda: _make_linear(keras.optimizers.SGD(_RATE))  # noqa: E731
            num_steps = 3 if strategy.rank == 1 else None
            _, model = _trained(strategy, make_model, data=(x, y), steps_per_epoch=num_steps)
            strategy.synchronize(model)
            return model.get_weights()[0]

        expected = 1 - _RATE * np.tile(x[::_BATCH_SIZE].sum(0)[:, np.newaxis], 4)
        for weights in _cluster(consistency="bsp").run(train):
            self.assertAllClose(weights, expected, rtol=1e-5)


class AsynchronousTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(False, True)
    @pytest.mark.stress(after=1)
    def test_linear_loss_has_one_result_for_any_schedule(self, run_eagerly):
        def make_model():
            model = _make_linear(keras.optimizers.SGD(_RATE))
            model.run_eagerly = run_eagerly
            return model

        def train(strategy):
            _, model = _trained(strategy, make_model, num_epochs=2)
            strategy.synchronize(model)
            return model.get_weights()[0], strategy.report()

        expected = 1 - _RATE * 2 * 3 * sum(_gradient(step) for step in range(_NUM_STEPS))
        results = _cluster(num_workers=3, num_ps=1).run(train)
        for weights, report in results:
            self.assertAllClose(weights, expected, rtol=1e-4, atol=1e-5)
            # The gradients, rounded up to 64 bytes, and a line that tells their length.
            self.assertEqual(report["shard_0_bytes_sent"], 2 * _NUM_STEPS * (64 + 64))
        self.assertAllEqual(results[0][0], results[2][0])

    def test_the_servers_keep_their_model_when_fit_is_broken_off(self):
        """The next `fit` goes on with the servers' model, and not with the mixture that rank 0 had made."""
        num_steps = 5

        class Break(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                if batch == num_steps - 1:
                    raise KeyError("broken off")

        def train(strategy):
            with strategy.scope():
                model = _make_linear(keras.optimizers.SGD(_RATE))
            with self.assertRaisesRegex(KeyError, "broken off"):
                _fit(model, callbacks=[Break()])
            _fit(model)
            strategy.synchronize(model)
            return model.get_weights()[0]

        steps = [*range(num_steps), *range(_NUM_STEPS)]
        expected = 1 - _RATE * 2 * sum(_gradient(step) for step in steps)
        for weights in _cluster(num_ps=1, mixing=0.5).run(train):
            self.assertAllClose(weights, expected, rtol=1e-4, atol=1e-5)

    @pytest.mark.slow
    def test_a_later_fit_begins_on_all_ranks_with_what_rank_0_has_changed(self):
        """Weights are replaced before the first step: no gradient is of older weights, and none is lost."""
        begun_with, barrier = {}, threading.Barrier(_NUM_WORKERS)

        def train(strategy):
            with strategy.scope():
                model = _make_linear(keras.optimizers.SGD(_RATE))
            _fit(model)

            def record_weights(epoch, logs):
                begun_with[strategy.rank] = model.get_weights()[0]
                barrier.wait(_OPTIONS.timeout_seconds)  # No worker pushes before all have begun.

            restore = keras.callbacks.LambdaCallback(
                on_train_begin=lambda logs: strategy.is_chief and model.set_weights([np.full((3, 4), 7.0)]),
                on_epoch_begin=record_weights,
            )
            _fit(model, callbacks=[restore])
            strategy.synchronize(model)
            return model.get_weights()[0]

        expected = 7 - _RATE * _NUM_WORKERS * sum(_gradient(step) for step in range(_NUM_STEPS))
        for rank, weights in enumerate(_cluster(mixing="ensemble").run(train)):
            self.assertAllEqual(begun_with[rank], np.full((3, 4), 7.0))
            self.assertAllClose(weights, expected, rtol=1e-4, atol=1e-5)

    @parameterized.parameters((True, 0.5), (False, 0.9))
    @pytest.mark.stress
    def test_momentum_under_a_constant_gradient(self, nesterov, momentum):
        """N pushes of g, by any worker, make v[k] = -lr g (1 + ... + m^(k - 1)). w is their sum."""
        data = np.ones((_NUM_ROWS, 3), np.float32), np.zeros((_NUM_ROWS, 4), np.float32)

        def train(strategy):
            def make_model():
                return _make_linear(keras.optimizers.SGD(_RATE, momentum=momentum, nesterov=nesterov))

            _, model = _trained(strategy, make_model, data=data)
            strategy.synchronize(model)
            return model.get_weights()[0], model.optimizer.momentums[0].numpy()

        w, v = 1.0, 0.0
        for _ in range(_NUM_WORKERS * _NUM_STEPS):
            v = momentum * v - _RATE
            w += momentum * v - _RATE if nesterov else v
        for weights, velocity in _cluster(num_ps=1).run(train):
            self.assertAllClose(weights, np.full((3, 4), w), rtol=1e-4)
            self.assertAllClose(velocity, np.full((3, 4), v), rtol=1e-4)

    @parameterized.parameters(0.75, 0.0)
    @pytest.mark.stress(after=1)
    def test_a_worker_s_own_step(self, momentum):
        """If alpha is 0, the worker's own step is lr g, and with momentum lr / (1 - m) g."""

        def train(strategy):
            return _trained(strategy, lambda: _make_linear(keras.optimizers.SGD(_RATE, momentum=momentum)))[0]

        for rank, weights in enumerate(_cluster(num_ps=1, mixing="ensemble").run(train)):
            w = np.ones((3, 4))
            for step, found in enumerate(weights):
                w = w - _RATE / (1 - momentum) * _gradient(step, rank, _NUM_WORKERS)
                self.assertAllClose(found[0], w, rtol=1e-4, atol=1e-5)

    def test_mixes_by_equation_3(self):
        """With one worker, and a fixed weight of 1/4: w = 3/4 (w - lr g) + 1/4 w_server."""

        def train(strategy):
            weights, model = _trained(strategy, lambda: _make_linear(keras.optimizers.SGD(_RATE, momentum=0.5)))
            return weights, model.get_weights()[0]

        ((weights, final),) = _cluster(num_workers=1, mixing=0.25).run(train)
        w = server = np.ones((3, 4))
        v = np.zeros((3, 4))
        for step, found in enumerate(weights):
            v = 0.5 * v - _RATE * _gradient(step)
            server = server + v
            w = 0.75 * (w - _RATE / 0.5 * _gradient(step)) + 0.25 * server
            self.assertAllClose(found[0], w, rtol=1e-4, atol=1e-5)
        self.assertAllClose(final, server, rtol=1e-4, atol=1e-5)

    @pytest.mark.stress
    def test_a_lone_worker_trains_as_plain_keras_over_several_fits(self):
        """Also if its weights were changed in between, and averages of weights are kept."""

        def train_model(model):
            weights = _fit(model)
            model.set_weights([weight + 0.1 for weight in model.get_weights()])
            restore = keras.callbacks.LambdaCallback(
                on_train_begin=lambda logs: model.layers[0].kernel.assign(model.layers[0].kernel * 0.5)
            )
            return [*weights, *_fit(model, callbacks=[restore]), model.get_weights()]

        def make_model():
            return _make_model(keras.optimizers.Adam(_RATE, use_ema=True, ema_momentum=0.9))

        def train(strategy):
            with strategy.scope():
                model = make_model()
            return train_model(model)

        (found,) = _cluster(num_workers=1).run(train)
        for weights, expected in zip(found, train_model(make_model()), strict=True):
            self.assertAllClose(weights, expected, rtol=1e-4, atol=1e-5)

    @parameterized.parameters(False, True)
    @pytest.mark.stress(after=1)
    def test_averages_of_weights_are_synchronized(self, scales_loss):
        """Averages are over the weights 1 - k lr after each push of both workers, as in plain Keras for one."""
        data = np.ones((_NUM_ROWS, 3), np.float32), np.zeros((_NUM_ROWS, 4), np.float32)

        def make_model():
            optimizer = keras.optimizers.SGD(_RATE, use_ema=True, ema_momentum=0.9)
            return _make_linear(keras.optimizers.LossScaleOptimizer(optimizer, 1.0) if scales_loss else optimizer)

        def train(strategy):
            with strategy.scope():
                untrained = make_model()
            strategy.synchronize(untrained)
            _, model = _trained(strategy, make_model, data=data)
            strategy.synchronize(model)
            return untrained.get_weights()[0], model.get_weights()[0]

        expected = make_model()
        _fit(expected, data, num_epochs=_NUM_WORKERS)
        for untrained, weights in _cluster(num_ps=1).run(train):
            self.assertAllEqual(untrained, np.ones((3, 4)))
            self.assertAllClose(weights, expected.get_weights()[0], rtol=1e-4)

    def test_constraints_hold_for_the_final_model(self):
        """The servers' model violates the constraints during training."""
        data = np.ones((_NUM_ROWS, 3), np.float32), np.zeros((_NUM_ROWS, 4), np.float32)

        def train(strategy):
            make_model = lambda: _make_linear(keras.optimizers.SGD(1.0), kernel_constraint="non_neg")  # noqa: E731
            _, model = _trained(strategy, make_model, data=data)
            after_fit = model.get_weights()[0]
            strategy.synchronize(model)
            return after_fit, model.get_weights()[0]

        for after_fit, synchronized in _cluster().run(train):
            self.assertAllEqual(after_fit, np.zeros((3, 4)))
            self.assertAllEqual(synchronized, np.zeros((3, 4)))

    @pytest.mark.slow
    def test_constraints_of_a_worker_take_nothing_from_the_servers(self):
        """Rank 1 makes its last steps after rank 0 has ended and constrained the model, which is not offered."""
        ended = threading.Event()

        class Wait(keras.callbacks.Callback):
            def on_train_batch_begin(self, batch, logs=None):
                if batch == 2:
                    ended.wait(_OPTIONS.timeout_seconds)

        def train(strategy):
            with strategy.scope():
                model = _make_linear(keras.optimizers.SGD(_RATE), kernel_constraint=keras.constraints.MaxNorm(0.5))
            _fit(model, callbacks=() if strategy.is_chief else [Wait()])
            ended.set()
            _fit(model)
            strategy.synchronize(model)
            return model.get_weights()[0]

        server = 1 - _RATE * 2 * _NUM_WORKERS * sum(_gradient(step) for step in range(_NUM_STEPS))
        expected = keras.constraints.MaxNorm(0.5)(server)
        for weights in _cluster(num_ps=1).run(train):
            self.assertAllClose(weights, expected, rtol=1e-4, atol=1e-5)

    @parameterized.parameters(0.5, 0.0)
    @pytest.mark.stress(after=1)
    def test_weight_decay_of_a_worker_s_own_step_under_loss_scaling(self, momentum):
        """Decay comes after the push, when gradients are known to be finite."""

        def train(strategy):
            def make_model():
                inner = keras.optimizers.SGD(_RATE, momentum=momentum, weight_decay=0.5)
                return _make_linear(keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0))

            return _trained(strategy, make_model)[0]

        for rank, weights in enumerate(_cluster(num_ps=1, mixing="ensemble").run(train)):
            w = np.ones((3, 4))
            for step, found in enumerate(weights):
                w = (1 - _RATE * 0.5) * w - _RATE / (1 - momentum) * _gradient(step, rank, _NUM_WORKERS)
                self.assertAllClose(found[0], w, rtol=1e-4, atol=1e-5)

    @parameterized.parameters(
        lambda: keras.optimizers.AdamW(_RATE, weight_decay=0.1, global_clipnorm=0.5),
        lambda: keras.optimizers.SGD(_RATE, momentum=0.9, weight_decay=0.1, clipnorm=0.5),
    )
    @pytest.mark.stress
    def test_loss_scaling_changes_nothing(self, make_inner):
        """Clipping and decay stay the same, on the worker (which trains alone here) and on the server."""
        for settings in ({"mixing": "ensemble"}, {"consistency": "bsp"}):
            results = []
            for make in (make_inner, lambda: keras.optimizers.LossScaleOptimizer(make_inner(), initial_scale=8.0)):
                cluster = _cluster(num_ps=1, **settings)
                results.append(cluster.run(lambda s, make=make: _trained(s, lambda: _make_linear(make()))[0]))
            for plain, scaled in zip(*results, strict=True):
                self.assertAllClose(scaled, plain, rtol=1e-5, atol=1e-5)

    def test_loss_scaling(self):
        """Gradients of 64 overflow until the scale is low enough. Overflowing steps are left out."""
        data = np.full((_NUM_ROWS, 3), 64, np.float32), np.zeros((_NUM_ROWS, 4), np.float32)

        def train(strategy):
            def make_model():
                inner = keras.optimizers.SGD(_RATE)
                return _make_linear(keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**127))

            _, model = _trained(strategy, make_model, data=data, num_epochs=2)
            return model.get_weights()[0], float(model.optimizer.dynamic_scale)

        ((weights, scale),) = _cluster(num_workers=1, num_ps=1).run(train)
        num_left_out = round(np.log2(2.0**127 / scale))
        self.assertBetween(num_left_out, 1, _NUM_STEPS)
        self.assertAllClose(weights, np.full((3, 4), 1 - _RATE * 64 * (2 * _NUM_STEPS - num_left_out)), rtol=1e-5)

    def test_a_custom_loop(self):
        num_steps = 4

        def train(strategy):
            with strategy.scope():
                model = _make_linear(keras.optimizers.SGD(_RATE))

            def update():
                with tf.GradientTape() as tape:
                    loss = tf.nn.compute_average_loss(model(tf.ones([1, 3])))
                weights = model.trainable_weights
                model.optimizer.apply(tape.gradient(loss, [weight.value for weight in weights]), weights)

            step = tf.function(lambda: strategy.run(update), autograph=False)
            for _ in range(num_steps):
                step()
            strategy.synchronize(model)
            return model.get_weights()[0]

        for weights in _cluster().run(train):
            self.assertAllClose(weights, np.full((3, 4), 1 - _NUM_WORKERS * num_steps * _RATE), rtol=1e-5)

    @pytest.mark.stress
    def test_two_optimizers(self):
        def train(strategy):
            with strategy.scope():
                model = _TwoOptimizers()
                model.build((None, 3))
                model.compile()
            _fit(model)
            strategy.synchronize(model)
            return [layer.kernel.numpy() for layer in (model.first, model.second)]

        total = sum(_gradient(step) for step in range(_NUM_STEPS))
        for first, second in _cluster().run(train):
            self.assertAllClose(first, 1 - _NUM_WORKERS * _RATE * total, rtol=1e-4, atol=1e-5)
            self.assertAllClose(second, 1 - 2 * _NUM_WORKERS * _RATE * total, rtol=1e-4, atol=1e-5)

    def test_who_joins_updates_by_one_optimizer(self):
        """The other ranks do not repeat the collective that makes the second optimizer equal on all ranks."""

        def train(strategy):
            make_algorithm = strategy.make_algorithm

            def make_algorithm_of_joined(group):  # As in a restarted process.
                strategy.training.runtime._joined_session = 1
                return make_algorithm(group)

            strategy.training.runtime._make_algorithm = make_algorithm_of_joined
            with strategy.scope():
                model = _TwoOptimizers()
                model.build((None, 3))
                model.compile()
            _fit(model)

        with self.assertRaisesRegex(ValueError, "to join a running job after a restart, a step must use one"):
            _cluster(num_workers=1, num_ps=1).run(train)

    @pytest.mark.slow
    def test_models_that_share_layers_are_trained_in_turn(self):
        """Each model goes on from the values that the other has learned, and nothing brings older values back."""

        def train(strategy):
            with strategy.scope():
                shared = keras.layers.Dense(4, use_bias=False, kernel_initializer="ones")
                models = [keras.Sequential([keras.Input((3,)), shared, layer]) for layer in (_Bias(), _Bias())]
                for model in models:
                    model.compile(keras.optimizers.SGD(_RATE), _linear_loss)
            kernels = []
            for model in (models[0], models[1], models[0]):
                _fit(model)
                kernels.append(shared.kernel.numpy())
            strategy.synchronize(models[1])
            return kernels, shared.kernel.numpy()

        total = _RATE * _NUM_WORKERS * sum(_gradient(step) for step in range(_NUM_STEPS))
        for kernels, final in _cluster(num_ps=1, consistency="bsp").run(train):
            for number, kernel in enumerate(kernels, 1):
                self.assertAllClose(kernel, 1 - number / _NUM_WORKERS * total, rtol=1e-4, atol=1e-5)
            self.assertAllClose(final, kernels[-1], rtol=1e-6)


class SettingsTest(tf.test.TestCase):
    def test_needs_servers(self):
        with self.assertRaisesRegex(ClusterConfigError, "needs tasks of type 'ps'.*2 workers and no 'ps'"):
            _cluster(num_ps=0).run(lambda strategy: None)

    def test_a_world_of_one_is_plain_keras(self):
        strategy = hop_tf.SHATParameterServerStrategy()
        self.addCleanup(strategy.shutdown)
        found, _ = _trained(strategy, lambda: _make_model(keras.optimizers.SGD(_RATE)))
        self.assertAllClose(found, _fit(_make_model(keras.optimizers.SGD(_RATE))), rtol=1e-6)

    def test_workers_that_differ_are_told(self):
        def make_strategy(cluster_resolver):
            mixing = "asp" if cluster_resolver.task_id else "shat"
            return hop_tf.SHATParameterServerStrategy(
                mixing=mixing, cluster_resolver=cluster_resolver, communication_options=_OPTIONS
            )

        with self.assertRaisesRegex(MismatchError, r"rank \d disagrees on option 'mixing': '\w+' there"):
            InProcessCluster(2, make_strategy, num_ps=1, timeout_seconds=100).run(
                lambda strategy: _trained(strategy, lambda: _make_model("sgd"))
            )

    @pytest.mark.slow
    def test_workers_and_saved_models_have_the_slots_of_a_snapshot(self):
        """A worker's own step uses its copy of the optimizer. Before the first step it has the servers' slots."""
        directory = self.enterContext(tempfile.TemporaryDirectory())
        snapshots = hop_tf.SnapshotOptions(directory=directory, every_seconds=1e6)
        data = np.ones((_NUM_ROWS, 3), np.float32), np.zeros((_NUM_ROWS, 4), np.float32)
        num_runs, beta = 2, 0.9

        def train(strategy):
            momentums = []
            record = keras.callbacks.LambdaCallback(
                on_train_batch_end=lambda batch, logs: momentums.append(model.optimizer._momentums[0].numpy())
            )
            with strategy.scope():
                model = _make_linear(keras.optimizers.Adam(_RATE, beta_1=beta))
            _fit(model, data, callbacks=[record])
            strategy.synchronize(model)
            model.save(f"{saved}/{strategy.rank}.keras")
            return momentums[0]

        for run in range(num_runs):
            saved = self.enterContext(tempfile.TemporaryDirectory())
            results = _cluster(snapshots=snapshots).run(train)
            before = run * _NUM_WORKERS * _NUM_STEPS
            after = before + _NUM_WORKERS * _NUM_STEPS
            for rank, momentum in enumerate(results):
                # After k equal gradients, m is 1 - beta^k. Another worker's may have come before this one's first.
                self.assertAllInRange(momentum, 1 - beta ** (before + 1) - 1e-5, 1 - beta ** (after - _NUM_STEPS + 1))
                loaded = keras.saving.load_model(f"{saved}/{rank}.keras", custom_objects={"_linear_loss": _linear_loss})
                self.assertAllClose(loaded.optimizer._momentums[0], np.full((3, 4), 1 - beta**after), rtol=1e-4)

    @pytest.mark.slow
    def test_snapshots_are_gone_on_from(self):
        directory = self.enterContext(tempfile.TemporaryDirectory())
        snapshots = hop_tf.SnapshotOptions(directory=directory, every_seconds=1e6)

        def train(strategy):
            _, model = _trained(strategy, lambda: _make_linear(keras.optimizers.SGD(_RATE)))
            strategy.synchronize(model)
            return model.get_weights()[0], int(model.optimizer.iterations)

        total = sum(_gradient(step) for step in range(_NUM_STEPS))
        for num_runs in (1, 2):
            for weights, num_steps in _cluster(num_ps=1, snapshots=snapshots).run(train):
                self.assertAllClose(weights, 1 - num_runs * _NUM_WORKERS * _RATE * total, rtol=1e-4, atol=1e-5)
                self.assertEqual(num_steps, num_runs * _NUM_STEPS)
        self.assertLen(list(pathlib.Path(directory).iterdir()), 1)

    @pytest.mark.slow
    def test_who_comes_late_to_a_snapshot_counts_its_own_steps(self):
        directory = self.enterContext(tempfile.TemporaryDirectory())
        snapshots = hop_tf.SnapshotOptions(directory=directory, every_seconds=1e6)
        is_under_way, configure = threading.Event(), GroupState.configure

        def configure_late(state, **arguments):
            if state._membership.rank == 1:
                self.assertTrue(is_under_way.wait(_OPTIONS.timeout_seconds))
            configure(state, **arguments)

        def train(strategy):
            def record(batch, logs):
                if batch == 4:
                    is_under_way.set()

            callbacks = [keras.callbacks.LambdaCallback(on_train_batch_end=record)]
            _, model = _trained(strategy, lambda: _make_linear(keras.optimizers.SGD(_RATE)), callbacks=callbacks)
            return int(model.optimizer.iterations)

        self.assertEqual(_cluster(num_ps=1, snapshots=snapshots).run(train), [_NUM_STEPS] * _NUM_WORKERS)
        is_under_way.clear()
        with mock.patch.object(GroupState, "configure", configure_late):
            num_steps = _cluster(num_ps=1, snapshots=snapshots).run(train)
        self.assertEqual(num_steps, [2 * _NUM_STEPS] * _NUM_WORKERS)

    @pytest.mark.stress
    def test_a_snapshot_that_one_server_lacks_is_an_error(self):
        directory = self.enterContext(tempfile.TemporaryDirectory())
        snapshots = hop_tf.SnapshotOptions(directory=directory, every_seconds=1e6)

        def train(strategy):
            return _trained(strategy, lambda: _make_model("sgd"))[0]

        _cluster(num_ps=3, snapshots=snapshots, sharding="none").run(train)  # Two of the servers have nothing to keep.
        (path,) = pathlib.Path(directory).iterdir()
        _cluster(num_ps=3, snapshots=snapshots, sharding="none").run(train)
        path.unlink()
        _cluster(snapshots=snapshots).run(train)
        next(pathlib.Path(directory).glob("ps_1_*")).unlink()
        with self.assertRaisesRegex(HopError, "rank .: ps 0 resumed from a snapshot, and ps 1 found none"):
            _cluster(snapshots=snapshots).run(train)

    def test_training_goes_on_when_snapshots_cannot_be_written_and_workers_tell_once(self):
        directory = self.enterContext(tempfile.TemporaryDirectory())
        snapshots = hop_tf.SnapshotOptions(directory=directory, every_pushes=1)

        def train(strategy):
            _, model = _trained(strategy, lambda: _make_linear(keras.optimizers.SGD(_RATE)))
            strategy.synchronize(model)
            return model.get_weights()[0], strategy.report()["snapshot_failures"]

        no_room = OSError(errno.ENOSPC, "No space left on device")
        with mock.patch.object(snapshots_module.os, "fsync", side_effect=no_room), self.assertLogs("absl") as logs:
            results = _cluster(num_ps=1, snapshots=snapshots).run(train)
        total = sum(_gradient(step) for step in range(_NUM_STEPS))
        for weights, num_failures in results:
            self.assertAllClose(weights, 1 - _NUM_WORKERS * _RATE * total, rtol=1e-4, atol=1e-5)
            self.assertGreater(num_failures, 0)
        warnings = [line for line in logs.output if line.startswith("WARNING") and "snapshot" in line]
        self.assertLen(warnings, _NUM_WORKERS)
        for rank in range(_NUM_WORKERS):
            path = rf"{directory}/ps_0_0-\S*"
            pattern = rf"rank {rank}: ps 0 at \S+ cannot write its snapshot {path}: No space left on device"
            self.assertLen([line for line in warnings if re.search(pattern, line)], 1)

    def test_a_place_for_snapshots_that_cannot_be_made_is_an_error_that_names_the_server(self):
        directory = self.enterContext(tempfile.TemporaryDirectory())
        path = pathlib.Path(directory) / "file"
        path.touch()
        snapshots = hop_tf.SnapshotOptions(directory=path / "snapshots")
        error = rf"rank \d: ps \d at \S+: cannot write snapshots to {path}/snapshots: Not a directory"
        with self.assertRaisesRegex(HopError, error):
            _cluster(snapshots=snapshots).run(lambda strategy: _trained(strategy, lambda: _make_model("sgd"))[0])

    @pytest.mark.slow
    def test_a_damaged_snapshot_is_an_error_that_names_the_server(self):
        directory = self.enterContext(tempfile.TemporaryDirectory())
        snapshots = hop_tf.SnapshotOptions(directory=directory)

        def train():
            _cluster(snapshots=snapshots).run(lambda strategy: _trained(strategy, lambda: _make_model("sgd"))[0])

        train()
        (path,) = pathlib.Path(directory).glob("ps_1_*")
        path.write_bytes(path.read_bytes()[:-100])
        with self.assertRaisesRegex(HopError, rf"rank \d: ps 1 at \S+: the snapshot {path} is damaged"):
            train()

    def test_a_snapshot_of_another_optimizer_is_refused(self):
        directory = self.enterContext(tempfile.TemporaryDirectory())
        snapshots = hop_tf.SnapshotOptions(directory=directory, every_seconds=1e6)

        def train(make_optimizer):
            cluster = _cluster(num_workers=1, num_ps=1, snapshots=snapshots)
            cluster.run(lambda strategy: _trained(strategy, lambda: _make_linear(make_optimizer()))[0])

        train(lambda: keras.optimizers.Lion(_RATE))
        with self.assertRaisesRegex(MismatchError, "snapshot is of another optimizer.*: '_momentums' .* '_velocities'"):
            train(lambda: keras.optimizers.Adam(_RATE))

    def test_a_snapshot_of_a_model_whose_names_have_changed_is_refused(self):
        directory = self.enterContext(tempfile.TemporaryDirectory())
        snapshots = hop_tf.SnapshotOptions(directory=directory, every_seconds=1e6)

        def train(name):
            cluster = _cluster(num_workers=1, num_ps=1, snapshots=snapshots)
            cluster.run(lambda strategy: _trained(strategy, lambda: _make_linear("sgd", name=name))[0])

        train("first")
        with self.assertRaisesRegex(MismatchError, f"snapshot {directory}/ps_0_0-.* of another model: .* other names"):
            train("second")
        self.assertLen(list(pathlib.Path(directory).iterdir()), 1)

    def test_snapshots_are_options(self):
        with self.assertRaisesRegex(TypeError, "`snapshots` must be a hop_tf.SnapshotOptions.*snapshots='/tmp'"):
            hop_tf.SHATParameterServerStrategy(snapshots="/tmp")

    def test_public_names(self):
        self.assertEqual(shat.mixing_weight(7, 1), 1.0)
        self.assertIs(hop_tf.SHATParameterServerStrategy, shat.SHATParameterServerStrategy)


if __name__ == "__main__":
    tf.test.main()

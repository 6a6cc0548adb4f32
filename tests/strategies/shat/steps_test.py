"""Tests of SHAT's default, in which workers push the changes of their own optimizer."""

import functools
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import hop_tf
from support import in_process

_NUM_STEPS, _BATCH_SIZE = 12, 8
_RATE, _MOMENTUM = 0.05, 0.9


def _run(train, num_workers, num_ps=1, **settings):
    return in_process(hop_tf.SHATParameterServerStrategy, num_workers, num_ps, **settings).run(train)


@functools.cache
def _data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(_NUM_STEPS * _BATCH_SIZE, 3)).astype("float32")
    return x, rng.normal(size=(len(x), 2)).astype("float32")


def _make_model(make_optimizer):
    layers = [
        keras.layers.Dense(5, "tanh", kernel_initializer=keras.initializers.RandomNormal(seed=1)),
        keras.layers.Dense(2, kernel_initializer=keras.initializers.RandomNormal(seed=2)),
    ]
    model = keras.Sequential([keras.Input((3,)), *layers])
    model.compile(make_optimizer(), "mse")
    return model


def _fit(model):
    x, y = _data()
    model.fit(x, y, batch_size=_BATCH_SIZE, shuffle=False, verbose=0)
    return model.get_weights()


def _train(make_optimizer, strategy):
    with strategy.scope():
        model = _make_model(make_optimizer)
    return _fit(model)


_OPTIMIZERS = {
    "momentum": lambda: keras.optimizers.SGD(_RATE, momentum=_MOMENTUM, nesterov=True, weight_decay=0.01),
    "adamw": lambda: keras.optimizers.AdamW(0.01, clipnorm=0.5),
    "lamb": lambda: keras.optimizers.Lamb(0.01),  # Lamb needs whole tensors, which servers divide.
    "schedule": lambda: keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.02, 4, 0.7)),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01, global_clipnorm=0.5)),
    "accumulated": lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=3),
}


class Sum(keras.Model):
    """A model whose loss is linear in its weight, so that gradients do not depend on the weight."""

    def __init__(self):
        super().__init__()
        self.weight = self.add_weight(shape=(3,), initializer="zeros")

    def call(self, x):
        return tf.reduce_sum(x * self.weight, axis=-1, keepdims=True)


def _mean_output(y, output):
    return tf.reduce_mean(output, axis=-1)


def _train_sum(synchronizes, strategy):
    with strategy.scope():
        model = Sum()
        model.compile(keras.optimizers.SGD(_RATE, momentum=_MOMENTUM), _mean_output)
    weights = _fit(model)
    if synchronizes:
        strategy.synchronize(model)
        weights = model.get_weights()
    return weights[0]


def _own_models(num_workers):
    """Returns each worker's final weights if it trains alone with momentum. Gradients are means of its rows."""
    rows = _data()[0].reshape(_NUM_STEPS, num_workers, _BATCH_SIZE // num_workers, 3).mean(axis=2)
    models = []
    for gradients in rows.transpose(1, 0, 2).astype("float64"):
        weight, velocity = np.zeros(3), np.zeros(3)
        for gradient in gradients:
            velocity = _MOMENTUM * velocity - _RATE * gradient
            weight = weight + velocity
        models.append(weight)
    return np.array(models)


class StepsTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(*_OPTIMIZERS)
    @pytest.mark.stress(after=1)
    @pytest.mark.slow(after=1)
    def test_a_lone_worker_trains_as_keras_does(self, name):
        expected = _fit(_make_model(_OPTIMIZERS[name]))
        (weights,) = _run(functools.partial(_train, _OPTIMIZERS[name]), 1, num_ps=2)
        self.assertAllClose(weights, expected, atol=1e-5)

    @pytest.mark.slow
    def test_steps_of_bsp_are_synchronous_training(self):
        """Steps of momentum are linear in gradients: their mean is the step of the mean gradient."""
        expected = _fit(_make_model(_OPTIMIZERS["momentum"]))
        for weights in _run(
            functools.partial(_train, _OPTIMIZERS["momentum"]), 2, num_ps=2, consistency="bsp", pushes="steps"
        ):
            self.assertAllClose(weights, expected, atol=1e-5)

    @parameterized.parameters(("async", None), ("ssp", "int8"))
    @pytest.mark.stress(but=1)
    def test_n_workers_go_as_far_as_one_does(self, consistency, codec):
        """In whatever order they push, the servers' model ends at the mean of all workers' sums."""
        own = _own_models(2)
        train = functools.partial(_train_sum, True)
        for weight in _run(train, 2, consistency=consistency, codec=codec):
            self.assertAllClose(weight, own.mean(axis=0), atol=1e-5 if codec is None else 2e-3)

    @pytest.mark.slow
    def test_an_ensemble_has_a_model_for_each_worker(self):
        own = _own_models(2)
        self.assertGreater(np.abs(own[0] - own[1]).max(), 0.05)
        for weight, expected in zip(_run(functools.partial(_train_sum, False), 2, mixing="ensemble"), own, strict=True):
            self.assertAllClose(weight, expected, atol=1e-5)
        for weight in _run(functools.partial(_train_sum, True), 2, mixing="ensemble"):
            self.assertAllClose(weight, own.mean(axis=0), atol=1e-5)

    @pytest.mark.slow
    def test_a_second_fit_of_an_ensemble_begins_with_the_servers_model(self):
        meet = threading.Barrier(2, timeout=60).wait

        def train(strategy):
            with strategy.scope():
                model = Sum()
                model.compile(keras.optimizers.SGD(_RATE), _mean_output)
            _fit(model)
            meet()  # All have made their steps, and then all have taken the servers' model.
            x, y = _data()
            begins = keras.callbacks.LambdaCallback(
                on_train_batch_begin=lambda batch, logs: (started.append(model.get_weights()), meet())
            )
            started = []
            model.fit(x[:_BATCH_SIZE], y[:_BATCH_SIZE], _BATCH_SIZE, shuffle=False, verbose=0, callbacks=[begins])
            return started[0][0]

        first, second = _run(train, 2, mixing="ensemble")
        self.assertAllClose(first, second, atol=1e-6)

    @pytest.mark.slow
    def test_averages_of_weights_are_the_servers(self):
        def make():
            return keras.optimizers.SGD(_RATE, use_ema=True)

        expected = _fit(_make_model(make))
        (weights,) = _run(functools.partial(_train, make), 1)
        self.assertAllClose(weights, expected, atol=1e-5)
        with self.assertRaisesRegex(ValueError, "`pushes` must be 'gradients' with `use_ema`"):
            _run(functools.partial(_train, make), 2, pushes="steps")


if __name__ == "__main__":
    tf.test.main()

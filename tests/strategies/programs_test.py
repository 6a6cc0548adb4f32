"""Tests of programs like Keras's own examples, under every strategy: parts without `call`, inputs without targets."""

import contextlib
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import absltest, parameterized

import hop_tf
from hop_tf.errors import HopError
from support import MEMBERS, TWO_DEVICES

_NUM_ROWS = 32
_BATCH_SIZE = 8
_BOUND = 1.2  # Bound of weights, which would be larger otherwise.


def _rows(num_columns):
    return np.random.default_rng(num_columns).normal(size=(_NUM_ROWS, num_columns)).astype(np.float32)


def _network(num_inputs, *sizes):
    inputs = outputs = keras.Input((num_inputs,))
    for seed, size in enumerate(sizes):
        outputs = keras.layers.Dense(size, kernel_initializer=keras.initializers.GlorotUniform(seed))(outputs)
    return keras.Model(inputs, outputs)


class Autoencoder(keras.Model):
    """Two networks, which the training step connects. The model has no `call`."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = _network(6, 3), _network(3, 6)
        self.distance = keras.metrics.Mean("loss")

    @property
    def metrics(self):
        return [self.distance]

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self.decoder(self.encoder(data)) - data))
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        self.distance.update_state(loss)
        return {"loss": self.distance.result()}


class Gan(keras.Model):
    """Two networks with an optimizer for each. The second gets the first one's output. The model has no `call`."""

    def __init__(self):
        super().__init__()
        self.generator, self.critic = _network(6, 6), _network(6, 4, 1)

    def compile(self, generator_optimizer, critic_optimizer):
        super().compile()
        self.generator_optimizer, self.critic_optimizer = generator_optimizer, critic_optimizer

    def train_step(self, data):
        with tf.GradientTape() as tape:
            critic_loss = tf.reduce_mean(self.critic(self.generator(data)) - self.critic(data))
        weights = self.critic.trainable_weights
        self.critic_optimizer.apply(tape.gradient(critic_loss, weights), weights)
        with tf.GradientTape() as tape:
            generator_loss = -tf.reduce_mean(self.critic(self.generator(data)))
        weights = self.generator.trainable_weights
        self.generator_optimizer.apply(tape.gradient(generator_loss, weights), weights)
        return {"loss": generator_loss}


class Distance(keras.layers.Layer):
    """A layer whose loss is the mean squared difference of two outputs."""

    def call(self, first, second):
        self.add_loss(tf.reduce_mean(tf.square(first - second)))
        return first


class Perturbed(keras.Sequential):
    """Takes the gradient at other weights, as in sharpness-aware minimization."""

    def train_step(self, data):
        x, y = data
        for weight in self.trainable_weights:
            weight.assign_add(0.05 * tf.ones_like(weight))
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x) - y))
        gradients = tape.gradient(loss, self.trainable_weights)
        for weight in self.trainable_weights:
            weight.assign_sub(0.05 * tf.ones_like(weight))
        self.optimizer.apply(gradients, self.trainable_weights)
        return {"loss": loss}


class Clipped(keras.Sequential):
    """Clips weights after each update, as in the first Wasserstein GANs."""

    def train_step(self, data):
        logs = super().train_step(data)
        for weight in self.trainable_weights:
            weight.assign(tf.clip_by_value(weight, -_BOUND, _BOUND))
        return logs


class Watched(keras.Sequential):
    """Reads weights after each update, also within conditions and functions."""

    def train_step(self, data):
        x, _ = data
        logs = super().train_step(data)
        read = tf.function(lambda: tf.reduce_mean(self(x)))
        return logs | {"mean": tf.cond(tf.reduce_sum(x) > 0, lambda: tf.reduce_mean(self(x)), read)}


def _regression(make_model, **arguments):
    model = make_model([keras.Input((4,)), keras.layers.Dense(1, kernel_initializer="ones", **arguments)])
    model.compile(keras.optimizers.SGD(0.05, momentum=0.5), "mse")
    x = _rows(4)
    return model, {"x": x, "y": 2 * x[:, :1] + x[:, 1:2], "batch_size": _BATCH_SIZE}


def _autoencoder():
    model = Autoencoder()
    model.compile(keras.optimizers.SGD(0.1))
    return model, {"x": _rows(6), "batch_size": _BATCH_SIZE}


def _gan():
    model = Gan()
    model.compile(keras.optimizers.SGD(0.01), keras.optimizers.SGD(0.01))
    return model, {"x": _rows(6), "batch_size": _BATCH_SIZE}


def _siamese():
    """Returns a model of pairs without targets. The second of a pair is no target."""
    inputs = keras.Input((4,)), keras.Input((4,))
    model = keras.Model(inputs, Distance()(_network(4, 3)(inputs[0]), _network(4, 5, 3)(inputs[1])))
    model.compile(keras.optimizers.SGD(0.1))
    pairs = tf.data.Dataset.from_tensor_slices(((_rows(4), _rows(4)[::-1]),))
    return model, {"x": pairs.batch(_BATCH_SIZE)}


_PROGRAMS = {
    "autoencoder": _autoencoder,
    "gan": _gan,
    "siamese": _siamese,
    "perturbed": lambda: _regression(Perturbed),
    "watched": lambda: _regression(Watched),
    "clipped": lambda: _regression(Clipped),
    "constrained": lambda: _regression(keras.Sequential, kernel_constraint=keras.constraints.UnitNorm()),
}
# Programs that a strategy refuses.
_REFUSED = {("gan", "canary"): "a step must use one optimizer only"} | {
    ("clipped", name): "Give the layer a constraint" for name in ("pipe_sgd", "canary", "shat")
}


def _train(program, strategy):
    """Trains; returns the weights before and after."""
    with strategy.scope() if strategy is not None else contextlib.nullcontext():
        model, arguments = _PROGRAMS[program]()
    before = [weight.numpy().copy() for weight in model.trainable_weights]
    model.fit(**arguments, epochs=3, shuffle=False, verbose=0)
    return before, [weight.numpy() for weight in model.trainable_weights]


@functools.cache
def _trained_alone(program):
    return _train(program, None)[1]


def _of_ranks(program, name, **settings):
    return MEMBERS[name].run(lambda strategy: _train(program, strategy), **settings)


class ProgramsTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.product(program=list(_PROGRAMS), name=list(MEMBERS))
    @pytest.mark.stress(but=1)
    @pytest.mark.slow(after=2)
    def test_trains(self, program, name):
        reason = _REFUSED.get((program, name))
        if reason is not None:
            with self.assertRaisesRegex((ValueError, HopError), reason):
                _of_ranks(program, name)
            return
        expected = _trained_alone(program)
        for before, after in _of_ranks(program, name):
            for one, other, of_one_process in zip(before, after, expected, strict=True):
                if one.ndim > 1:  # Some biases have no gradient.
                    self.assertNotAllClose(one, other, rtol=1e-4, atol=1e-4)
                self.assertAllClose(other, of_one_process, rtol=0.3, atol=0.3)
                if program == "clipped":
                    self.assertLessEqual(np.abs(other).max(), _BOUND)
                if program == "constrained" and one.ndim > 1:
                    self.assertAllClose(np.linalg.norm(other, axis=0), [1.0], rtol=1e-5)

    @parameterized.parameters(*_PROGRAMS)
    @pytest.mark.slow(after=2)
    @pytest.mark.stress(after=1)
    def test_two_ranks_train_as_one_process(self, program):
        for _, weights in _of_ranks(program, "pipe_sgd", pipeline_width=1):
            self.assertAllClose(weights, _trained_alone(program), rtol=1e-4, atol=1e-4)

    @parameterized.parameters(*_PROGRAMS)
    @pytest.mark.slow(after=3)
    @pytest.mark.stress(after=1)
    def test_a_world_of_one_trains_as_plain_keras(self, program):
        strategy = hop_tf.HopStrategy()
        self.addCleanup(strategy.shutdown)
        for mine, expected in zip(_train(program, strategy)[1], _trained_alone(program), strict=True):
            self.assertAllEqual(mine, expected)

    @parameterized.parameters(*_PROGRAMS)
    @pytest.mark.stress
    def test_a_rank_with_two_devices_trains_as_plain_keras(self, program):
        strategy = hop_tf.HopStrategy(devices=TWO_DEVICES)
        self.addCleanup(strategy.shutdown)
        for mine, expected in zip(_train(program, strategy)[1], _trained_alone(program), strict=True):
            self.assertAllClose(mine, expected, rtol=1e-5, atol=1e-5)


if __name__ == "__main__":
    absltest.main()

"""Tests kinds of models, losses and precision under HopStrategy's `fit` in two processes, against plain Keras.

The expected weights come from `_train`: models without a strategy, averaged by hand as in Figure 7.
"""

from __future__ import annotations

import copy
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import hop_tf
from hop_tf.tools.testing import MultiProcessRunner
from support.two_classes import NUM_ROWS, data

_WORLD_SIZE = 2
_BATCH_SIZE = 8
_NUM_EPOCHS = 2
_STEPS_PER_EPOCH = NUM_ROWS // _BATCH_SIZE


def _sequential(input_layer, *layers):
    return keras.Sequential([input_layer, *layers, keras.layers.Dense(2)])


class Case:
    """A model with its training settings and data, for `fit` and for the reference."""

    tolerance = 1e-5
    dtype_policy = "float32"

    def __init__(self, class_weight: dict[int, float] | None = None):
        self.class_weight = class_weight

    def build(self):
        return _sequential(keras.layers.Input((6,)), keras.layers.Dense(5))

    def optimizer(self):
        return keras.optimizers.SGD(0.1)

    def loss(self):
        return keras.losses.MeanSquaredError()

    def data(self):
        return data()


class BatchNorm(Case):
    def build(self):
        return _sequential(keras.layers.Input((6,)), keras.layers.Dense(5), keras.layers.BatchNormalization())


class Dropout(Case):
    def build(self):
        return _sequential(keras.layers.Input((6,)), keras.layers.Dense(8), keras.layers.Dropout(0.5))


class Embedding(Case):
    """A model whose gradients are IndexedSlices. Rows that are not in a batch are averaged, too."""

    def build(self):
        return _sequential(keras.layers.Input((3,)), keras.layers.Embedding(10, 4), keras.layers.Flatten())

    def data(self):
        return np.random.default_rng(0).integers(0, 10, size=(NUM_ROWS, 3)), data()[1]


class Classification(Case):
    def loss(self):
        return keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def data(self):
        x, y = data()
        return x, y[:, 0].astype("int32")


class MixedPrecision(Case):
    dtype_policy = "mixed_float16"
    tolerance = 1e-3  # float16 has 11 bits, and a graph may round differently.

    def optimizer(self):
        return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))


class OneRankOverflows(Case):
    """A case in which rank 1's second batch makes its gradients infinite."""

    def optimizer(self):
        return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01))

    def data(self):
        x, y = data()
        x[_BATCH_SIZE + _BATCH_SIZE // 2 : 2 * _BATCH_SIZE] = np.inf
        return x, y


_CASES = {
    "batch_norm": BatchNorm(),
    "dropout": Dropout(),
    "embedding": Embedding(),
    "class_weight": Classification(class_weight={0: 1.0, 1: 5.0}),
    "mixed_precision": MixedPrecision(),
    "one_rank_overflows": OneRankOverflows(),
}


def _build(case):
    """Returns the model, with the same initial weights on all ranks and in the reference."""
    keras.utils.set_random_seed(7)
    keras.mixed_precision.set_global_policy(case.dtype_policy)
    try:
        return case.build()
    finally:
        keras.mixed_precision.set_global_policy("float32")


# The reference.


def _train(case, *, exchange=True):
    """Returns the weights of both ranks by Figure 7: gradients at x_k, mean of the x_k, optimizer's step.

    Moving statistics are averaged with their values at the begin of the step. Each rank has its own random numbers.
    """
    models = [_build(case) for _ in range(_WORLD_SIZE)]
    optimizers = [case.optimizer() for _ in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        optimizer.build(model.trainable_variables)
    for step in range(_NUM_EPOCHS * _STEPS_PER_EPOCH):
        # Copies: an array of a variable may change with it.
        at_start = [copy.deepcopy(model.get_weights()) for model in models]
        gradients = [_gradients(case, models[rank], optimizers[rank], rank, step) for rank in range(_WORLD_SIZE)]
        for rank, model in enumerate(models):
            if exchange:
                _mix(model, at_start, rank)
            optimizers[rank].apply(gradients[rank], model.trainable_variables)
    return [model.get_weights() for model in models]


def _mix(model, at_start, rank):
    means = [np.mean(values, axis=0) for values in zip(*at_start, strict=True)]
    now = zip(model.get_weights(), means, at_start[rank], strict=True)
    model.set_weights([weight + mean - own for weight, mean, own in now])


def _gradients(case, model, optimizer, rank, step):
    half = _BATCH_SIZE // _WORLD_SIZE
    start = step % _STEPS_PER_EPOCH * _BATCH_SIZE + rank * half
    x, y = (array[start : start + half] for array in case.data())
    weights = None if case.class_weight is None else np.array([case.class_weight[label] for label in y], "float32")
    with _numbers_of(rank), tf.GradientTape() as tape:
        loss = optimizer.scale_loss(case.loss()(y, model(x, training=True), sample_weight=weights))
    return tape.gradient(loss, model.trainable_variables)


def _numbers_of(rank):
    """Lets Keras's generators draw as on rank `rank`, whose seeds have a constant of the rank added."""
    draw = keras.random.SeedGenerator.next
    constant = rank * 2654435761 % (2**31 - 2)
    return mock.patch.object(
        keras.random.SeedGenerator,
        "next",
        lambda self, *args, **kwargs: draw(self, *args, **kwargs) + np.array([constant, 0], "uint32"),
    )


# In the processes.


def _run(names):
    strategy = hop_tf.HopStrategy(
        topology="complete", communication_options=hop_tf.CommunicationOptions(timeout_seconds=60)
    )
    results = {name: _fit(strategy, _CASES[name]) for name in names}
    results["gan"] = _fit_gan(strategy)
    results["gan_built_late"] = _fit_gan(strategy, built=False)
    strategy.shutdown()
    return results


def _fit(strategy, case):
    with strategy.scope():
        model = _build(case)
        model.compile(case.optimizer(), case.loss())
    history = model.fit(
        *case.data(),
        batch_size=_BATCH_SIZE,
        epochs=_NUM_EPOCHS,
        shuffle=False,
        class_weight=case.class_weight,
        verbose=0,
    )
    result = {"weights": model.get_weights(), "iterations": int(model.optimizer.iterations), **history.history}
    strategy.synchronize(model)
    return {**result, "synchronized": model.get_weights()}


# Two networks, two optimizers.


class Gan(keras.Model):
    def __init__(self):
        super().__init__()
        keras.utils.set_random_seed(3)
        self.generator = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(6)])
        self.discriminator = keras.Sequential(
            [keras.layers.Input((6,)), keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)]
        )
        self.built = True

    def compile(self, generator_optimizer, discriminator_optimizer, **arguments):
        """Compiles. Other arguments are those of `keras.Model.compile`, whose optimizer may be a third one."""
        super().compile(**{"optimizer": discriminator_optimizer, **arguments})
        self.generator_optimizer = generator_optimizer
        self.discriminator_optimizer = discriminator_optimizer

    def gradients(self, x):
        """Returns the gradients of the discriminator and of the generator."""
        with tf.GradientTape(persistent=True) as tape:
            fake = self.discriminator(self.generator(x[:, :2]))
            discriminator_loss = tf.reduce_mean(fake) - tf.reduce_mean(self.discriminator(x))
            generator_loss = -tf.reduce_mean(fake)
        return (
            tape.gradient(discriminator_loss, self.discriminator.trainable_variables),
            tape.gradient(generator_loss, self.generator.trainable_variables),
        )

    def update(self, discriminator_gradients, generator_gradients):
        self.discriminator_optimizer.apply(discriminator_gradients, self.discriminator.trainable_variables)
        self.generator_optimizer.apply(generator_gradients, self.generator.trainable_variables)

    def train_step(self, data):
        self.update(*self.gradients(data[0]))
        return {"updates": self.discriminator_optimizer.iterations}


def _compiled_gan(built=True):
    """Returns a compiled GAN.

    Without `built` the first step builds the optimizers, and the model's own optimizer is none of them.
    """
    model = Gan()
    optimizers = keras.optimizers.SGD(0.1), keras.optimizers.Adam(0.01)
    if not built:
        model.compile(*optimizers, optimizer="rmsprop")
        return model
    model.compile(*optimizers)
    model.discriminator_optimizer.build(model.discriminator.trainable_variables)
    model.generator_optimizer.build(model.generator.trainable_variables)
    return model


def _networks(model):
    return {"generator": model.generator, "discriminator": model.discriminator}


def _weights_of_networks(model):
    return {name: network.get_weights() for name, network in _networks(model).items()}


def _fit_gan(strategy, built=True):
    with strategy.scope():
        model = _compiled_gan(built)
    before = strategy.report()["steps"]
    model.fit(*data(), batch_size=_BATCH_SIZE, shuffle=False, verbose=0)
    return {"steps": strategy.report()["steps"] - before, **_weights_of_networks(model)}


def _train_gan(exchanged=("generator", "discriminator")):
    """Returns both ranks' weights by Figure 7 if only the networks in `exchanged` are averaged."""
    models = [_compiled_gan() for _ in range(_WORLD_SIZE)]
    half = _BATCH_SIZE // _WORLD_SIZE
    for start in range(0, NUM_ROWS, _BATCH_SIZE):
        at_start = [copy.deepcopy(_weights_of_networks(model)) for model in models]
        slices = (data()[0][start + rank * half :][:half] for rank in range(_WORLD_SIZE))
        gradients = [model.gradients(x) for model, x in zip(models, slices, strict=True)]
        for rank, model in enumerate(models):
            for name in exchanged:
                _mix(_networks(model)[name], [weights[name] for weights in at_start], rank)
            model.update(*gradients[rank])
    return [_weights_of_networks(model) for model in models]


def _largest_difference(weights, others):
    return max(np.abs(a - b).max() for a, b in zip(weights, others, strict=True))


@pytest.mark.stress
class HopFitModelsTest(tf.test.TestCase, parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        with MultiProcessRunner(_run, num_workers=_WORLD_SIZE, args=(list(_CASES),), timeout_seconds=400) as runner:
            cls.values = runner.join().raise_for_errors().values

    def _results(self, name):
        return [values[name] for values in self.values]

    @parameterized.parameters(
        "batch_norm", "dropout", "embedding", "class_weight", "mixed_precision", "one_rank_overflows"
    )
    def test_equals_figure_7(self, name):
        case = _CASES[name]
        expected = _train(case)
        without_exchange = _train(case, exchange=False)
        for rank, result in enumerate(self._results(name)):
            for got, want in zip(result["weights"], expected[rank], strict=True):
                self.assertAllClose(got, want, rtol=case.tolerance, atol=case.tolerance)
            # Makes sure that the comparison can fail.
            self.assertGreater(_largest_difference(expected[rank], without_exchange[rank]), 5 * case.tolerance)

    def test_synchronize_averages_moving_statistics_too(self):
        first, second = self._results("batch_norm")
        means = [np.mean(weights, axis=0) for weights in zip(first["weights"], second["weights"], strict=True)]
        for got, other, mean in zip(first["synchronized"], second["synchronized"], means, strict=True):
            self.assertAllEqual(got, other)
            self.assertAllClose(got, mean, rtol=1e-6, atol=1e-6)

    def test_class_weight_matters(self):
        for result, weights in zip(self._results("class_weight"), _train(Classification()), strict=True):
            self.assertGreater(_largest_difference(result["weights"], weights), 0.01)

    def test_mixed_precision_trains(self):
        for result in self._results("mixed_precision"):
            self.assertLess(result["loss"][-1], result["loss"][0])

    def test_an_overflow_on_one_rank_skips_its_step_only(self):
        first, second = self._results("one_rank_overflows")
        num_steps = _NUM_EPOCHS * _STEPS_PER_EPOCH
        self.assertEqual((first["iterations"], second["iterations"]), (num_steps, num_steps - _NUM_EPOCHS))

    @parameterized.product(name=["gan", "gan_built_late"], network=["generator", "discriminator"])
    def test_two_optimizers(self, name, network):
        other = {"generator": "discriminator", "discriminator": "generator"}[network]
        expected, without_exchange = _train_gan(), _train_gan(exchanged=(other,))
        for rank, result in enumerate(self._results(name)):
            self.assertEqual(result["steps"], _STEPS_PER_EPOCH)
            self.assertLess(_largest_difference(result[network], expected[rank][network]), 1e-5)
            self.assertGreater(_largest_difference(result[network], without_exchange[rank][network]), 1e-4)


if __name__ == "__main__":
    tf.test.main()

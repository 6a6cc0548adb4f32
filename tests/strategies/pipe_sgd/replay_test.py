"""Tests of Pipe-SGD with a replay of a rank's own gradients, from `hop_tf.runtime.look_ahead`, against NumPy."""

import dataclasses
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import hop_tf
from hop_tf.errors import HopError
from hop_tf.runtime import graph_encoding, look_ahead
from support import OwnOptimizers, fewer_steps, in_process, linear_loss, two_kernels
from support.references import State, adam, int8, mesh_mean, plain_mean, sgd, truncate16

_BATCH_SIZE = 30
_NUM_ROWS = 150
_STEPS_PER_EPOCH = _NUM_ROWS // _BATCH_SIZE
_RATE = 0.1
_EPSILON = 1e-2  # With Adam's default, rounding errors have as much effect as gradients.


def _cluster(world_size, **settings):
    settings = {"pipeline_width": 2, "codec": None, "algorithm": "mesh", **settings}
    return in_process(hop_tf.PipeSGDStrategy, world_size, **settings)


# The reference: least squares, and Keras's optimizers, in NumPy.


def _problem():
    """Returns inputs, targets and initial weights. Weights fill several blocks of int8 on every rank."""
    random = np.random.default_rng(0)
    x = random.normal(size=(_NUM_ROWS, 3)).astype(np.float32)
    y = (x @ random.normal(size=(3, 900)) + random.normal(size=(_NUM_ROWS, 900))).astype(np.float32)
    return x, y, random.normal(size=(3, 900)).astype(np.float32)


def _gradient(x, y, w):
    return 2 / len(x) * x.T.astype(np.float64) @ (x @ w - y)


_OPTIMIZERS = {
    "sgd": (lambda: keras.optimizers.SGD(_RATE), sgd(_RATE)),
    "momentum": (lambda: keras.optimizers.SGD(_RATE, momentum=0.9), sgd(_RATE, 0.9)),
    "nesterov": (lambda: keras.optimizers.SGD(_RATE, momentum=0.9, nesterov=True), sgd(_RATE, 0.9, nesterov=True)),
    "decay": (lambda: keras.optimizers.SGD(_RATE, momentum=0.9, weight_decay=0.2), sgd(_RATE, 0.9, decay=0.2)),
    "adam": (lambda: keras.optimizers.Adam(_RATE, epsilon=_EPSILON), adam(_RATE, _EPSILON)),
    "adamw": (lambda: keras.optimizers.AdamW(_RATE, weight_decay=0.2, epsilon=_EPSILON), adam(_RATE, _EPSILON, 0.2)),
}


def _oldest(first, step, width):
    """Returns the first step that is in flight when `step` begins, in an epoch that has begun with step `first`."""
    return max(first, step - (width - 1))


def _oldest_eagerly(first, step, width):
    """Returns the same if step 0 is synchronous."""
    return max(first, min(step, 1), step - (width - 1))


def _replay(world_size, width, update, num_epochs, mean=plain_mean, state=None):
    """Returns the weights with which each rank computes after each step, and the merged weights after each epoch."""
    x, y, _ = _problem()
    merged = [state or State.of(_problem()[2])]  # By number of means.
    own = [[] for _ in range(world_size)]
    computed, ends = [[] for _ in range(world_size)], []

    def at(rank, step, oldest):
        """Returns the weights merged before step `oldest`, updated by this rank's gradients from then to `step`."""
        state = merged[oldest]
        for g in own[rank][oldest:step]:
            state = update(state, g)
        return state.w

    for epoch in range(num_epochs):
        first = epoch * _STEPS_PER_EPOCH
        for step in range(first, first + _STEPS_PER_EPOCH):
            rows = slice((step - first) * _BATCH_SIZE, (step - first + 1) * _BATCH_SIZE)
            oldest = _oldest(first, step, width)
            for rank in range(world_size):
                part = slice(_BATCH_SIZE * rank // world_size, _BATCH_SIZE * (rank + 1) // world_size)
                w = at(rank, step, oldest)
                own[rank].append(_gradient(x[rows][part], y[rows][part], w))
            merged.append(update(merged[-1], mean([gradients[step] for gradients in own])))
            for rank in range(world_size):
                computed[rank].append(at(rank, step + 1, _oldest(first, step + 1, width)))
        ends.append(merged[-1])
    return computed, ends


def _model(strategy, make_optimizer, **compile_args):
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(900, use_bias=False)])
        model.set_weights([_problem()[2]])
        model.compile(
            make_optimizer(),
            lambda y_true, y_pred: 900 * tf.reduce_mean(tf.square(y_true - y_pred), axis=-1),
            **compile_args,
        )
    return model


def _fit(model, epochs=2, callbacks=(), **arguments):
    x, y, _ = _problem()
    model.fit(x, y, batch_size=_BATCH_SIZE, epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks, **arguments)


def _train(strategy, name, epochs=2, **compile_args):
    """Trains; returns weights after each step and each epoch, and the final variables of the optimizer."""
    model = _model(strategy, _OPTIMIZERS[name][0], **compile_args)
    computed, ends = [], []
    record = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: computed.append(model.get_weights()[0]),
        on_epoch_end=lambda epoch, logs: ends.append(model.get_weights()[0]),
    )
    _fit(model, epochs, [record])
    return computed, ends, [*model.get_weights(), *(v.numpy() for v in model.optimizer.variables)]


# A linear loss: gradients do not depend on the weights, so that training is synchronous training.


def _small_data():
    random = np.random.default_rng(1)
    x = random.normal(size=(32, 6)).astype(np.float32)
    return x, (x @ random.normal(size=(6, 2)) > 0).astype(np.float32)


def _linear_gradients(num_steps):
    """Returns each step's mean gradient, of a kernel whose product with the inputs is added to the predictions."""
    x, y = _small_data()
    steps = [slice(step % 4 * 8, step % 4 * 8 + 8) for step in range(num_steps)]
    return [x[rows].T @ y[rows] / 8 for rows in steps]


def _applied(optimizer, gradients):
    """Returns ones after Keras's own optimizer has applied the gradients."""
    variable = keras.Variable(np.ones((6, 2), np.float32))
    for gradient in gradients:
        optimizer.apply([tf.constant(gradient)], [variable])
    return variable.numpy()


def _one_kernel():
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(2, use_bias=False, kernel_initializer="ones")])


def _linear_fit(strategy, make_optimizer, build=_one_kernel, epochs=2, callbacks=(), repeats=1, **compile_args):
    with strategy.scope():
        model = build()
        model.compile(make_optimizer(), linear_loss, **compile_args)
    data = [np.concatenate([part] * repeats) for part in _small_data()]
    model.fit(*data, batch_size=8, epochs=epochs, shuffle=False, verbose=0, callbacks=list(callbacks))
    return model


def _one_kernel_in(strategy):
    with strategy.scope():
        model = _one_kernel()
        model.compile(keras.optimizers.SGD(0.1), linear_loss)
    return model


def _nonneg():
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(
                2, use_bias=False, kernel_initializer="zeros", kernel_constraint=keras.constraints.NonNeg()
            ),
        ]
    )


# Optimizers with special updates.
_LINEAR = {
    "nadam": lambda: keras.optimizers.Nadam(0.01),
    "muon": lambda: keras.optimizers.Muon(0.01, weight_decay=0.1, adam_weight_decay=0.1),
    "schedule": lambda: keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.7)),
    "use_ema": lambda: keras.optimizers.SGD(0.1, momentum=0.9, use_ema=True, ema_momentum=0.8),
    "ema_overwrites": lambda: keras.optimizers.SGD(
        0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3, weight_decay=0.1
    ),
    "accumulation": lambda: keras.optimizers.Adam(0.1, gradient_accumulation_steps=3),
    "loss_scale": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.AdamW(0.1, global_clipnorm=0.5), initial_scale=1024.0
    ),
}


class ReplayTest(tf.test.TestCase, parameterized.TestCase):
    def check(self, results, expected, atol=1e-5):
        computed, ends = expected
        for rank, (of_rank, of_epochs, final) in enumerate(results):
            self.assertAllClose(of_rank, computed[rank], rtol=1e-5, atol=atol)
            self.assertAllClose(of_epochs, [state.w for state in ends], rtol=1e-5, atol=atol)
            for mine, first in zip([*of_epochs, *final], [*results[0][1], *results[0][2]], strict=True):
                self.assertAllEqual(mine, first)  # To the bit.

    # Each optimizer with one width first.
    @parameterized.parameters(
        *((name, 2 + (number + turn) % 3) for turn in range(3) for number, name in enumerate(sorted(_OPTIMIZERS)))
    )
    @pytest.mark.stress(after=1)
    @pytest.mark.slow(after=1)
    def test_equals_the_reference(self, name, width):
        world_size = {2: 2, 3: 3, 4: 2}[width]
        results = _cluster(world_size, pipeline_width=width).run(lambda strategy: _train(strategy, name))
        self.check(results, _replay(world_size, width, _OPTIMIZERS[name][1], 2))

    @parameterized.product(optimizer=("momentum", "adam"), width=(2, 3, 4))
    def test_what_is_kept(self, optimizer, width):
        """A replay keeps a copy of weights and slots, and K - 1 gradients, including the one in flight."""
        created = []

        def record(next_creator, **kwargs):
            created.append(next_creator(**kwargs))
            return created[-1]

        variable, optimizer = keras.Variable(np.ones([50, 20], "float32")), _OPTIMIZERS[optimizer][0]()
        optimizer.build([variable])
        num_slots = sum(each.shape == variable.shape for each in optimizer.variables)
        with tf.variable_creator_scope(record):
            look_ahead.make_look_ahead(optimizer, [variable.value], delay=width - 1)
        self.assertEqual(sum(each.shape == variable.shape for each in created), 1 + num_slots + width - 2)

    @parameterized.parameters({"world_size": 3, "num_segments": 3}, {"world_size": 5, "algorithm": "ring"})
    @pytest.mark.stress
    def test_equals_the_reference_however_gradients_travel(self, world_size, **settings):
        results = _cluster(world_size, pipeline_width=3, **settings).run(lambda s: _train(s, "momentum"))
        self.check(results, _replay(world_size, 3, _OPTIMIZERS["momentum"][1], 2))

    @parameterized.product(codec=(("int8", int8), ("truncate16", truncate16)), in_graph=(True, False))
    @pytest.mark.stress(after=1)
    @pytest.mark.slow
    def test_equals_the_reference_with_codec(self, codec, in_graph):
        """The first steps are equal, except for values at the border of two codes, which may get either code."""
        name, reference = codec
        with mock.patch.object(graph_encoding, "runs_on_gpu", lambda variables: in_graph):
            cluster = _cluster(3, pipeline_width=3, codec=name, num_segments=1 + in_graph)
            results = cluster.run(lambda strategy: _train(strategy, "momentum"))
        update = _OPTIMIZERS["momentum"][1]
        computed, ends = _replay(3, 3, update, 2, mesh_mean(reference, encodes_own=in_graph))
        without, _ = _replay(3, 3, update, 2)
        for rank, (of_rank, of_epochs, _) in enumerate(results):
            self.assertGreater(np.mean(np.isclose(of_rank[:4], computed[rank][:4], atol=1e-5)), 0.9)
            lossy = np.mean(np.abs(without[rank][-1] - computed[rank][-1]))
            self.assertLess(np.mean(np.abs(of_rank[-1] - computed[rank][-1])), 0.1 * lossy)
            self.assertAllClose(np.mean(np.abs(of_epochs[-1] - ends[-1].w)), 0.0, atol=0.1 * lossy)
            self.assertAllEqual(of_epochs, results[0][1])

    @parameterized.parameters("momentum", "adam")
    @pytest.mark.stress(after=1)
    @pytest.mark.slow
    def test_eagerly(self, name):
        """The first step of all is synchronous."""
        results = _cluster(2).run(lambda strategy: _train(strategy, name, run_eagerly=True))
        for computed, ends, final in results:
            self.assertAllClose(ends, self.eager_ends(name), rtol=1e-5, atol=1e-5)
            self.assertLen(computed, 2 * _STEPS_PER_EPOCH)
            for mine, first in zip(final, results[0][2], strict=True):
                self.assertAllEqual(mine, first)

    def eager_ends(self, name):
        """Returns the reference's weights at the ends of epochs, with a synchronous first step of the session."""
        with mock.patch(f"{__name__}._oldest", _oldest_eagerly):
            return [state.w for state in _replay(2, 2, _OPTIMIZERS[name][1], 2)[1]]

    @parameterized.parameters(False, True)
    @pytest.mark.slow
    def test_small_variables_that_are_updated_together(self, eagerly):
        """Results are as if the optimizer updated each variable separately."""

        def make_optimizer():
            optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.1, epsilon=_EPSILON)
            optimizer.exclude_from_weight_decay(var_names=["bias"])
            return optimizer

        def run(strategy):
            with strategy.scope():
                initial = [keras.initializers.GlorotUniform(seed=index) for index in range(3)]
                hidden = [keras.layers.Dense(5, "tanh", kernel_initializer=each) for each in initial[1:]]
                last = keras.layers.Dense(2, kernel_initializer=initial[0])
                model = keras.Sequential([keras.Input((6,)), *hidden, last])
                model.compile(make_optimizer(), "mse", run_eagerly=eagerly)
            model.fit(*_small_data(), batch_size=8, epochs=2, shuffle=False, verbose=0)
            return [*model.get_weights(), *(v.numpy() for v in model.optimizer.variables)]

        together = _cluster(2, pipeline_width=2).run(run)
        with mock.patch.object(look_ahead, "has_twin", lambda *arguments: False):
            alone = _cluster(2, pipeline_width=2).run(run)
        for of_rank in together:
            for mine, first, other in zip(of_rank, together[0], alone[0], strict=True):
                self.assertAllEqual(mine, first)
                self.assertAllClose(mine, other, rtol=1e-5, atol=1e-6)

    @parameterized.product(width=(2, 3), eagerly=(False, True), name=sorted({*_LINEAR} - {"accumulation"}))
    @pytest.mark.stress
    def test_optimizers(self, name, eagerly, width):
        """If gradients do not depend on weights, training with a replay equals synchronous training."""

        def run(strategy):
            model = _linear_fit(strategy, _LINEAR[name], run_eagerly=eagerly)
            return [*model.get_weights(), *(v.numpy() for v in model.optimizer.variables)]

        expected = run(tf.distribute.OneDeviceStrategy("/cpu:0"))
        results = _cluster(2, pipeline_width=width).run(run)
        for of_rank in results:
            self.assertAllClose(of_rank[0], expected[0], rtol=1e-5, atol=1e-5)
            for mine, first in zip(of_rank, results[0], strict=True):
                self.assertAllEqual(mine, first)

    @parameterized.parameters((1, 3), (5, 2))
    @pytest.mark.stress
    def test_gradient_accumulation(self, repeats, epochs):
        """Epochs end between two updates. The accumulated gradients there are incomplete, and no batch counts twice."""

        def run(strategy):
            model = _linear_fit(strategy, _LINEAR["accumulation"], epochs=epochs, repeats=repeats)
            return model.get_weights()[0], int(model.optimizer._iterations.value)

        expected, num_batches = run(tf.distribute.OneDeviceStrategy("/cpu:0"))
        for weights, iterations in _cluster(2, pipeline_width=3).run(run):
            self.assertAllClose(weights, expected, rtol=1e-5, atol=1e-5)
            self.assertEqual(iterations, num_batches)

    @pytest.mark.slow
    def test_constraints(self):
        results = _cluster(2, pipeline_width=2).run(
            lambda s: _linear_fit(s, lambda: keras.optimizers.SGD(0.1, momentum=0.9), _nonneg).get_weights()[0]
        )
        expected = _linear_fit(
            tf.distribute.OneDeviceStrategy("/cpu:0"), lambda: keras.optimizers.SGD(0.1, momentum=0.9), _nonneg
        ).get_weights()[0]
        for weights in results:
            self.assertAllClose(weights, expected, rtol=1e-5, atol=1e-5)

    @parameterized.parameters(None, "rmsprop")
    @pytest.mark.stress(after=1)
    @pytest.mark.slow
    def test_optimizers_of_the_models_own(self, unused_optimizer):
        """The optimizers are SGD and Adam. Their first update builds them."""

        def make_optimizers():
            return [keras.optimizers.SGD(0.1, momentum=0.9), keras.optimizers.Adam(0.01)]

        def run(strategy):
            with strategy.scope():
                model = OwnOptimizers(two_kernels(6, 2), make_optimizers())
                model.compile(unused_optimizer)
            model.fit(*_small_data(), batch_size=8, epochs=2, shuffle=False, verbose=0)
            return model.get_weights(), [int(optimizer.iterations) for optimizer in model.optimizers]

        expected = [_applied(optimizer, _linear_gradients(8)) for optimizer in make_optimizers()]
        for weights, iterations in _cluster(2, pipeline_width=3).run(run):
            self.assertAllClose(weights, expected, rtol=1e-5, atol=1e-5)
            self.assertEqual(iterations, [8, 8])

    @pytest.mark.slow
    def test_several_optimizers_in_one(self):
        def make_optimizer():
            optimizers = keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.1))
            optimizers[".*second.*"] = keras.optimizers.SGD(0.05, momentum=0.9)
            return keras.optimizers.MultiOptimizer(optimizers)

        gradients = _linear_gradients(8)
        expected = [
            _applied(keras.optimizers.SGD(0.1), gradients),
            _applied(keras.optimizers.SGD(0.05, momentum=0.9), gradients),
        ]
        run = _cluster(2, pipeline_width=3).run
        for weights in run(lambda s: _linear_fit(s, make_optimizer, lambda: two_kernels(6, 2)).get_weights()):
            self.assertAllClose(weights, expected, rtol=1e-5, atol=1e-5)

    def test_an_optimizer_that_is_applied_twice_is_refused(self):
        def run(strategy):
            with strategy.scope():
                optimizer = keras.optimizers.SGD(0.1)
                model = OwnOptimizers(two_kernels(6, 2), [])
                model.optimizers = [optimizer, optimizer]
                model.compile(None)
                optimizer.build(model.network.trainable_variables)
            model.fit(*_small_data(), batch_size=8, verbose=0)

        with self.assertRaisesRegex((ValueError, HopError), "`compensation` must be 'none' .* SGD, applied again"):
            _cluster(2).run(run)

    def test_accumulation_within_a_loss_scale_is_refused(self):
        def make_optimizer():
            return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2))

        with self.assertRaisesRegex((ValueError, HopError), "`compensation` must be .*gradient_accumulation_steps=2"):
            _cluster(2).run(lambda strategy: _linear_fit(strategy, make_optimizer))

    @parameterized.parameters(4, 2)
    @pytest.mark.stress(after=1)
    @pytest.mark.slow
    def test_overflow_on_one_rank(self, width):
        """All ranks leave the mean of that step out, and rank 1 its own step, too."""

        def run(strategy):
            x, y = _small_data()
            if strategy.rank == 1:
                x = x.copy()
                x[12:16] = np.inf  # Its rows of the second step.
            with strategy.scope():
                model = _one_kernel()
                optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
                model.compile(keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=1024.0), linear_loss)
            model.fit(x, y, batch_size=8, epochs=1, shuffle=False, verbose=0)
            return model.get_weights()[0], int(model.optimizer.iterations), float(model.optimizer.dynamic_scale.value)

        gradients = _linear_gradients(4)
        expected = _applied(keras.optimizers.SGD(0.1, momentum=0.9), [gradients[0], *gradients[2:]])
        results = _cluster(2, pipeline_width=width).run(run)
        for weights, iterations, _ in results:
            self.assertAllClose(weights, expected, rtol=1e-5, atol=1e-5)
            self.assertAllEqual(weights, results[0][0])
            self.assertEqual(iterations, 3)
        self.assertEqual([scale for *_, scale in results], [1024.0, 512.0])

    @pytest.mark.slow
    def test_callbacks_and_validation_see_what_is_merged(self):
        """Values that callbacks assign between two epochs count, also those of slots."""

        def run(strategy):
            seen = []

            def halve(epoch, logs):
                seen.append((logs["val_loss"], model.get_weights()[0]))
                model.set_weights([0.5 * model.get_weights()[0]])
                model.optimizer.momentums[0].assign(0.5 * model.optimizer.momentums[0])

            model = _model(strategy, lambda: keras.optimizers.SGD(_RATE, momentum=0.9))
            x, y, _ = _problem()
            callbacks = [keras.callbacks.LambdaCallback(on_epoch_end=halve)]
            _fit(model, 3, callbacks, validation_data=(x, y), validation_batch_size=_NUM_ROWS)
            return seen

        first, second = _cluster(2).run(run)
        for (loss, weights), (other_loss, other) in zip(first, second, strict=True):
            self.assertAllEqual(weights, other)
            self.assertEqual(loss, other_loss)
        x, y, _ = _problem()
        state = State.of(_problem()[2])
        for epoch in range(3):
            (state,) = _replay(2, 2, sgd(_RATE, 0.9), 1, state=state)[1]
            self.assertAllClose(first[epoch][1], state.w, rtol=1e-5, atol=1e-5)
            self.assertAllClose(first[epoch][0], 900 * np.mean((x @ state.w - y) ** 2), rtol=1e-4)
            state = dataclasses.replace(state, w=0.5 * state.w, m=0.5 * state.m)

    @pytest.mark.slow
    def test_a_second_fit_and_a_rank_that_ends_early(self):
        """`synchronize` makes weights, slots and numbers of steps equal again."""

        def run(strategy):
            model = _model(strategy, lambda: keras.optimizers.Adam(_RATE))
            _fit(model, **{"epochs": 1, **fewer_steps(strategy, 3)})
            strategy.synchronize(model)
            _fit(model, 2)
            return [*model.get_weights(), *(v.numpy() for v in model.optimizer.variables)]

        first, second, third = _cluster(3, pipeline_width=3).run(run)
        for mine, other, last in zip(first, second, third, strict=True):
            self.assertAllEqual(mine, other)
            self.assertAllEqual(mine, last)

    def test_a_fit_that_fails_leaves_what_is_merged(self):
        """All ranks raise after three steps. Two of the means were merged by then."""

        def run(strategy):
            def fail(batch, logs):
                if batch == 2:
                    raise RuntimeError("on purpose")

            model = _one_kernel_in(strategy)
            callback = keras.callbacks.LambdaCallback(on_train_batch_end=fail)
            with self.assertRaisesRegex(RuntimeError, "on purpose"):
                model.fit(*_small_data(), batch_size=8, shuffle=False, verbose=0, callbacks=[callback])
            return model.get_weights()[0]

        expected = _applied(keras.optimizers.SGD(0.1), _linear_gradients(2))
        for weights in _cluster(2).run(run):
            self.assertAllClose(weights, expected, rtol=1e-5, atol=1e-5)

    @parameterized.parameters(False, True)
    @pytest.mark.stress(after=1)
    @pytest.mark.slow
    def test_custom_loop(self, eagerly):
        """`synchronize` merges gradients in flight, and the loop goes on."""

        def run(strategy):
            with strategy.scope():
                model, optimizer = _one_kernel(), keras.optimizers.SGD(0.1, momentum=0.9)

            def step(x, y):
                with tf.GradientTape() as tape:
                    loss = tf.nn.compute_average_loss(linear_loss(y, model(x)))
                optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

            run_step = (lambda f: f) if eagerly else tf.function
            run_step = run_step(lambda *batch: strategy.run(step, batch))
            dataset = tf.data.Dataset.from_tensor_slices(_small_data()).batch(8)
            seen = []
            for _ in range(2):
                for batch in strategy.experimental_distribute_dataset(dataset):
                    run_step(*batch)
                strategy.synchronize(model)
                seen.append(model.get_weights()[0])
            return seen

        expected = [
            _applied(keras.optimizers.SGD(0.1, momentum=0.9), _linear_gradients(num_steps)) for num_steps in (4, 8)
        ]
        first, second = _cluster(2, pipeline_width=3).run(run)
        self.assertAllClose(first, expected, rtol=1e-5, atol=1e-5)
        self.assertAllEqual(first, second)


if __name__ == "__main__":
    tf.test.main()

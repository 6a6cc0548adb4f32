"""Tests of Pipe-SGD under `fit` against NumPy and Keras references of Algorithm 1, with ranks in one process.

`replay_test.py` tests the default compensation.
"""

import functools
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import hop_tf
from hop_tf import codecs
from hop_tf.collectives import all_reduce
from hop_tf.runtime import graph_encoding
from support import Unused, error_of, fewer_steps, in_process, linear_loss
from support.references import int8, mesh_mean, plain_mean, truncate16


def _cluster(world_size, **settings):
    settings = {"pipeline_width": 2, "codec": None, "algorithm": "mesh", "compensation": "none", **settings}
    return in_process(hop_tf.PipeSGDStrategy, world_size, **settings)


# Least squares in NumPy.

_BATCH_SIZE = 30
_LEARNING_RATE = 0.1


@functools.cache
def _problem():
    """Returns inputs, targets and initial weights. Weights fill several blocks of int8 on every rank."""
    random = np.random.default_rng(0)
    x = random.normal(size=(240, 3)).astype(np.float32)
    y = (x @ random.normal(size=(3, 900)) + random.normal(size=(240, 900))).astype(np.float32)
    return x, y, random.normal(size=(3, 900)).astype(np.float32)


def _gradient(x, y, w):
    x, y = x.astype(np.float64), y.astype(np.float64)
    return 2 / y.size * x.T @ (x @ w - y) * 900


def _algorithm_1(world_size, width, warmup_steps, num_epochs, mean=plain_mean):
    """Returns the weights after each step of Algorithm 1."""
    x, y, w = _problem()
    w = w.astype(np.float64)
    means, history = [], []
    for t in range(num_epochs * len(x) // _BATCH_SIZE):
        start = t * _BATCH_SIZE % len(x)
        ends = [start + _BATCH_SIZE * rank // world_size for rank in range(world_size + 1)]
        parts = [slice(*ends[rank : rank + 2]) for rank in range(world_size)]
        means.append(mean([_gradient(x[part], y[part], w) for part in parts]))
        if t < warmup_steps:
            w = w - _LEARNING_RATE * means[t]
        elif t - (width - 1) >= warmup_steps:
            w = w - _LEARNING_RATE * means[t - (width - 1)]
        history.append(w)
    return history


def _train_least_squares(strategy, num_epochs=2):
    """Trains; returns the weights after each step, and the report."""
    x, y, w = _problem()
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(900, use_bias=False)])
        model.set_weights([w])
        model.compile(
            keras.optimizers.SGD(_LEARNING_RATE),
            lambda y_true, y_pred: 900 * tf.reduce_mean(tf.square(y_true - y_pred), axis=-1),
        )
    history = []
    record = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: history.append(model.get_weights()[0])
    )
    model.fit(x, y, batch_size=_BATCH_SIZE, epochs=num_epochs, shuffle=False, verbose=0, callbacks=[record])
    return history, strategy.report()


# Any optimizer, in Keras.


def _small_data():
    random = np.random.default_rng(1)
    x = random.normal(size=(32, 6)).astype(np.float32)
    return x, (x @ random.normal(size=(6, 2)) > 0).astype(np.float32)


def _small_model():
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(5, activation="tanh", kernel_initializer=keras.initializers.GlorotUniform(seed=1)),
            keras.layers.Dense(2, kernel_initializer=keras.initializers.GlorotUniform(seed=2)),
        ]
    )


_OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "nesterov": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "clipnorm": lambda: keras.optimizers.SGD(0.1, clipnorm=0.05),
    "use_ema": lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.8),
    "accumulation": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
    "loss_scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=1024.0),
}


def _loss_gradient(model, x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
    return tape.gradient(loss, model.trainable_variables)


def _delayed_keras(name, num_epochs=2):
    """Trains two ranks with K = 2 by hand. Each of Keras's own optimizers gets the mean of the previous step."""
    x, y = _small_data()
    model = _small_model()
    optimizer = _OPTIMIZERS[name]()
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    clipnorm, every = inner.clipnorm, inner.gradient_accumulation_steps or 1
    inner.clipnorm = None  # Gradients are clipped before they are averaged.
    inner.gradient_accumulation_steps = None
    inner.build(model.trainable_variables)
    zeros = [np.zeros(v.shape, np.float32) for v in model.trainable_variables]
    due, sums = zeros, zeros
    for step in range(num_epochs * 4):
        start = step % 4 * 8
        gradients = [_loss_gradient(model, x[s : s + 4], y[s : s + 4]) for s in (start, start + 4)]
        if clipnorm:
            gradients = [[tf.clip_by_norm(g, clipnorm) for g in of_rank] for of_rank in gradients]
        sums = [s + (a + b) / 2 / every for s, a, b in zip(sums, *gradients, strict=True)]
        if (step + 1) % every == 0:
            inner.apply(due, model.trainable_variables)
            due, sums = sums, zeros
        else:
            inner.iterations.assign_add(1)
    inner.finalize_variable_values(model.trainable_variables)
    return model.get_weights()


def _compiled(strategy, build=_small_model, optimizer="sgd", **compile_args):
    with strategy.scope():
        model = build()
        model.compile(_OPTIMIZERS[optimizer](), "mse", **compile_args)
    return model


def _fit(model, epochs=2, **arguments):
    model.fit(*_small_data(), batch_size=8, epochs=epochs, shuffle=False, verbose=0, **arguments)
    return model.get_weights()


class PipeSGDTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        {"world_size": 3, "width": 3, "warmup_steps": 5, "algorithm": "ring", "num_segments": 3},
        {"world_size": 2, "width": 1},
        {"world_size": 3, "width": 2, "num_segments": 3},
        {"world_size": 2, "width": 3},
        {"world_size": 4, "width": 2, "algorithm": "ring"},
        {"world_size": 5, "width": 2, "warmup_steps": 3},
    )
    @pytest.mark.stress(after=1)
    @pytest.mark.slow
    def test_equals_algorithm_1(self, world_size, width, warmup_steps=0, **settings):
        cluster = _cluster(world_size, pipeline_width=width, warmup_steps=warmup_steps, **settings)
        expected = _algorithm_1(world_size, width, warmup_steps, 2)
        results = cluster.run(_train_least_squares)
        for history, report in results:
            self.assertAllClose(history, expected, rtol=1e-5, atol=1e-5)
            self.assertAllEqual(history, results[0][0])
            self.assertEqual(report["steps"], 16)

    @parameterized.product(codec=(("int8", int8), ("truncate16", truncate16)), in_graph=(True, False))
    @pytest.mark.stress(after=1)
    def test_equals_algorithm_1_with_codec(self, codec, in_graph):
        """The mean passes through a NumPy codec, too. A value at the border of two codes may get either code."""
        name, reference = codec
        with mock.patch.object(graph_encoding, "runs_on_gpu", lambda variables: in_graph):
            results = _cluster(3, codec=name).run(_train_least_squares)
        expected = _algorithm_1(3, 2, 0, 2, mesh_mean(reference, encodes_own=in_graph))
        without = _algorithm_1(3, 2, 0, 2)
        history = results[0][0]
        self.assertLess(np.mean(np.abs(history[-1] - expected[-1])), 0.1 * np.mean(np.abs(without[-1] - expected[-1])))
        self.assertGreater(np.mean(np.isclose(history[:4], expected[:4], atol=1e-5)), 0.9)
        for other, _ in results:
            self.assertAllEqual(other, history)

    @parameterized.product(codec=("int8", "truncate16"), algorithm=("mesh", "ring"))
    @pytest.mark.stress(after=1)
    @pytest.mark.slow
    def test_two_ranks_whose_gpus_encode(self, codec, algorithm):
        """Over a mesh, they get what their hosts would compute, to the bit."""
        histories = []
        for in_graph in (False, True):
            with mock.patch.object(graph_encoding, "runs_on_gpu", lambda variables, in_graph=in_graph: in_graph):
                results = _cluster(2, codec=codec, algorithm=algorithm).run(_train_least_squares)
            self.assertAllEqual(*(history for history, _ in results))
            histories.append(results[0][0])
        if algorithm == "mesh":
            self.assertAllEqual(*histories)
        self.assertAllClose(histories[1][-1], _algorithm_1(2, 2, 0, 2)[-1], atol=0.1)

    @parameterized.parameters(
        codecs.TopK(ratio=0.5, error_feedback=True),
        codecs.QuantileSketch(),
        codecs.Int8(error_feedback=True),
        codecs.Int8(block_size=None),
        codecs.Bits4(error_feedback=True),
        codecs.TopK(ratio=0.5, values="bits2", error_feedback=True),
        codecs.Truncate16(),
    )
    @pytest.mark.stress(after=1)
    @pytest.mark.slow
    def test_weights_are_the_same_everywhere(self, codec):
        results = _cluster(3, codec=codec, algorithm="ring").run(_train_least_squares)
        for history, _ in results:
            self.assertAllEqual(history, results[0][0])
        self.assertAllClose(results[0][0][-1], _algorithm_1(3, 2, 0, 2)[-1], atol=0.1)

    def test_world_of_one(self):
        """A single rank trains as Keras without a strategy."""
        ((history, report),) = _cluster(1).run(_train_least_squares)
        self.assertAllClose(history, _algorithm_1(1, 1, 0, 2), rtol=1e-5, atol=1e-5)
        self.assertEqual(report["steps"], 16)

    @parameterized.parameters((["clipnorm"],), (["sgd", "nesterov", "adamw", "use_ema", "accumulation", "loss_scale"],))
    @pytest.mark.stress
    def test_optimizers(self, names):
        """All under one strategy, one `fit` after the other."""
        of_ranks = _cluster(2).run(lambda s: {name: _fit(_compiled(s, optimizer=name)) for name in names})
        self._check_all_equal(of_ranks, {name: _delayed_keras(name) for name in names})

    @pytest.mark.stress
    def test_ways_to_fit(self):
        def run(strategy):
            results = {}
            results["steps_per_execution"] = _fit(_compiled(strategy, steps_per_execution=3))
            model = _compiled(strategy)
            dataset = tf.data.Dataset.from_tensor_slices(_small_data()).batch(8).filter(lambda x, y: True)
            model.fit(dataset, epochs=2, verbose=0)
            results["unknown_length"] = model.get_weights()
            return results

        of_ranks = _cluster(2).run(run)
        self._check_all_equal(of_ranks, dict.fromkeys(of_ranks[0], _delayed_keras("sgd")))

    def _check_all_equal(self, of_ranks, references):
        self.assertEqual(of_ranks[0].keys(), references.keys())
        for name, weights in of_ranks[0].items():
            with self.subTest(name):
                self.assertAllClose(weights, references[name], rtol=1e-5, atol=1e-5)
                for array, other in zip(weights, of_ranks[1][name], strict=True):
                    self.assertAllEqual(array, other)

    @pytest.mark.slow
    def test_a_second_fit_begins_with_an_empty_pipe(self):
        def run(strategy):
            model = _compiled(strategy)
            for _ in range(2):
                _fit(model, epochs=1, initial_epoch=0)
            return model.get_weights()

        x, y = _small_data()
        model = _small_model()
        optimizer = _OPTIMIZERS["sgd"]()
        for _ in range(2):
            gradients = []
            for start in range(0, 32, 8):
                gradients.append(_loss_gradient(model, x[start : start + 8], y[start : start + 8]))
                if len(gradients) > 1:
                    optimizer.apply(gradients[-2], model.trainable_variables)
        for weights in _cluster(2).run(run):
            self.assertAllClose(weights, model.get_weights(), rtol=1e-5, atol=1e-5)

    @pytest.mark.slow
    def test_warmup_is_not_repeated(self):
        """The first `fit` is shorter than the warm-up. The second one still begins with an empty pipe."""

        def run(strategy):
            model = _compiled(strategy)
            for _ in range(2):
                _fit(model, epochs=1)
            return model.get_weights()

        x, y = _small_data()
        model = _small_model()
        optimizer = _OPTIMIZERS["sgd"]()
        for warms_up in (True, False):
            due = None
            for start in range(0, 32, 8):
                gradients = _loss_gradient(model, x[start : start + 8], y[start : start + 8])
                if warms_up or due is not None:
                    optimizer.apply(gradients if warms_up else due, model.trainable_variables)
                due = gradients
        for weights in _cluster(2, warmup_steps=6).run(run):
            self.assertAllClose(weights, model.get_weights(), rtol=1e-5, atol=1e-5)

    @pytest.mark.slow
    def test_ranks_that_ended_unequally_go_on_alike(self):
        """The next `fit` has no warm-up, however many warm-up steps a rank has made."""

        def run(strategy):
            model = _compiled(strategy)
            _fit(model, **{"epochs": 1, **fewer_steps(strategy, 2)})
            strategy.synchronize(model)
            history = []
            record = keras.callbacks.LambdaCallback(
                on_train_batch_end=lambda batch, logs: history.append(model.get_weights())
            )
            _fit(model, epochs=2, callbacks=[record])
            return history

        first, second = _cluster(2, warmup_steps=10).run(run)
        self.assertLen(first, 8)
        for step, (weights, others) in enumerate(zip(first, second, strict=True)):
            for array, other in zip(weights, others, strict=True):
                self.assertAllEqual(array, other, msg=f"step {step}")

    @pytest.mark.stress
    def test_one_rank_ends_early(self):
        """The others go on with the mean of their gradients."""

        def run(strategy):
            model = _compiled(strategy)
            history = _fit(model, **fewer_steps(strategy, 1))
            return history, strategy.report()["steps"]

        results = _cluster(3, pipeline_width=1).run(run)
        self.assertEqual([steps for _, steps in results], [8, 1, 8])
        x, y = _small_data()
        model = _small_model()
        optimizer = _OPTIMIZERS["sgd"]()
        for step in range(8):
            ends = [step % 4 * 8 + 8 * rank // 3 for rank in range(4)]
            of_ranks = [
                _loss_gradient(model, x[slice(*ends[r : r + 2])], y[slice(*ends[r : r + 2])])
                for r in ((0, 1, 2) if step == 0 else (0, 2))
            ]
            means = [sum(parts) / len(parts) for parts in zip(*of_ranks, strict=True)]
            optimizer.apply(means, model.trainable_variables)
            if step == 0:
                self.assertAllClose(results[1][0], model.get_weights(), rtol=1e-5, atol=1e-5)
        for rank in (0, 2):
            self.assertAllClose(results[rank][0], model.get_weights(), rtol=1e-5, atol=1e-5)

    @parameterized.parameters("adamw", "nesterov")
    @pytest.mark.stress(after=1)
    @pytest.mark.slow
    def test_a_fit_after_one_that_ended_early_on_a_rank(self, optimizer):
        """Slots and numbers of steps are made equal. Otherwise updates would differ for good."""

        def run(strategy):
            model = _compiled(strategy, optimizer=optimizer)
            _fit(model, **fewer_steps(strategy, 1))
            strategy.synchronize(model)
            slots = [np.array(variable) for variable in model.optimizer.variables]
            return slots, _fit(model)

        (slots, weights), (slots_there, weights_there) = _cluster(2).run(run)
        for own, other in zip([*slots, *weights], [*slots_there, *weights_there], strict=True):
            self.assertAllEqual(own, other)

    @parameterized.parameters((2, "replay"), (3, "none"))
    @pytest.mark.stress(after=1)
    @pytest.mark.slow
    def test_one_rank_ends_early_with_means_in_flight(self, width, compensation):
        """The rank's last gradients count on all ranks. The others go on without that rank."""
        num_steps = 3

        def run(strategy):
            with strategy.scope():
                kernel = keras.layers.Dense(2, use_bias=False, kernel_initializer="zeros")
                model = keras.Sequential([keras.Input((6,)), kernel])
                model.compile(keras.optimizers.SGD(0.1), linear_loss)
            return _fit(model, **fewer_steps(strategy, num_steps))[0]

        x, y = _small_data()
        means = []
        for step in range(8):
            ends = [step % 4 * 8 + 8 * rank // 3 for rank in range(4)]
            parts = [slice(*ends[rank : rank + 2]) for rank in ((0, 1, 2) if step < num_steps else (0, 2))]
            means.append(np.mean([x[part].T @ y[part] / len(x[part]) for part in parts], axis=0))
        num_dropped = width - 1 if compensation == "none" else 0
        for rank, kernel in enumerate(_cluster(3, pipeline_width=width, compensation=compensation).run(run)):
            num_means = (num_steps if rank == 1 else 8) - num_dropped
            self.assertAllClose(kernel, -0.1 * sum(means[:num_means]), rtol=1e-5, atol=1e-5)

    @pytest.mark.slow
    def test_moving_statistics(self):
        """Moving statistics are averaged, exactly with any codec, and follow the data of all ranks."""

        def build():
            return keras.Sequential(
                [keras.Input((6,)), keras.layers.BatchNormalization(momentum=0.5), keras.layers.Dense(2)]
            )

        def run(strategy):
            model = _compiled(strategy, build=build)
            _fit(model, epochs=4)
            return [w.numpy() for w in model.layers[0].non_trainable_weights]

        for statistics in _cluster(2, codec="int8", pipeline_width=4, num_segments=3).run(run):
            self.assertAllClose(statistics[0], self._moving_means(4), rtol=1e-5, atol=1e-5)

    def _moving_means(self, width):
        """Returns the expected moving means: the ranks' changes are averaged, and known width - 1 steps later."""
        x, _ = _small_data()
        means, changes = np.zeros((2, 6)), []
        for step in range(16):
            batches = x[step % 4 * 8 :][:8].reshape(2, 4, 6).mean(1)
            changes.append(0.5 * (batches - means))
            means = means + changes[-1]
            if step >= width - 1:
                means = means + changes[step - width + 1].mean(0) - changes[step - width + 1]
        means = means + sum(late.mean(0) - late for late in changes[len(changes) - width + 1 :])
        self.assertAllClose(means[0], means[1])
        return means[0]

    @pytest.mark.slow
    def test_moving_statistics_with_gradient_accumulation(self):
        """Moving statistics also follow the data of steps without an update."""

        def build():
            return keras.Sequential(
                [keras.Input((6,)), keras.layers.BatchNormalization(momentum=0.5), keras.layers.Dense(2)]
            )

        def run(strategy):
            model = _compiled(strategy, build=build, optimizer="accumulation")
            _fit(model)
            return [w.numpy() for w in model.layers[0].non_trainable_weights]

        x, _ = _small_data()
        mean, variance = np.zeros(6), np.ones(6)
        for step in range(8):
            of_ranks = x[step % 4 * 8 :][:8].reshape(2, 4, 6)
            mean = 0.5 * (mean + of_ranks.mean((0, 1)))
            variance = 0.5 * (variance + of_ranks.var(1).mean(0))
        for statistics in _cluster(2, pipeline_width=3).run(run):
            self.assertAllClose(statistics, [mean, variance], rtol=1e-5, atol=1e-5)

    @pytest.mark.slow
    def test_overflow_on_one_rank(self):
        """All ranks leave the same update out, and go on with the same weights and loss scale."""

        def run(strategy):
            x, y = _small_data()
            if strategy.rank == 1:
                x = x.copy()
                x[12:16] = np.inf  # Its rows of the second step.
            model = _compiled(strategy, optimizer="loss_scale")
            model.fit(x, y, batch_size=8, epochs=1, shuffle=False, verbose=0)
            return model.get_weights(), float(model.optimizer.dynamic_scale.value)

        (weights, scale), (others, other_scale) = _cluster(2, codec="int8").run(run)
        self.assertEqual((scale, other_scale), (512.0, 512.0))
        for array, other in zip(weights, others, strict=True):
            self.assertTrue(np.isfinite(array).all())
            self.assertAllEqual(array, other)

    @parameterized.parameters(("float16", 0.01), ("float32", 1e-5))
    @pytest.mark.stress
    def test_loss_scale_with_an_unused_variable(self, dtype, tolerance):
        """The optimizer gets None for the gradient of that variable."""

        def build():
            return keras.Sequential(
                [
                    keras.Input((6,), dtype=dtype),
                    Unused(dtype=dtype),
                    keras.layers.Dense(2, kernel_initializer="zeros", dtype=dtype),
                ]
            )

        def run(strategy):
            return _fit(_compiled(strategy, build=build, optimizer="loss_scale"))

        plain = build()
        plain.compile(_OPTIMIZERS["sgd"](), "mse")
        expected = _fit(plain)
        self.assertAllEqual(expected[0], np.ones(3))
        self.assertGreater(np.abs(expected[1]).max(), 10 * tolerance)
        for weights in _cluster(2, pipeline_width=1).run(run):
            for array, other in zip(weights, expected, strict=True):
                self.assertEqual(array.dtype, dtype)
                self.assertAllClose(array, other, rtol=tolerance, atol=tolerance)

    @parameterized.parameters("mesh", "ring")
    @pytest.mark.stress(after=1)
    @pytest.mark.slow
    def test_a_thread_that_fails_in_an_all_reduce_ends_the_job(self, algorithm):
        """Rank 1 has sent a mean to only one of the others. These must not go on with different weights."""
        send, num_sent = all_reduce.Operation.send, []

        def fail_once(operation, rank, turn, chunk, data, lane=None):
            if operation._membership.rank == 1 and operation.step == 2 and operation.is_committed:
                num_sent.append(rank)
                if len(num_sent) == 2:
                    raise OSError("no buffer space on purpose")
            return send(operation, rank, turn, chunk, data, lane)

        with mock.patch.object(all_reduce.Operation, "send", fail_once):
            cluster = _cluster(3, pipeline_width=1, algorithm=algorithm)
            errors = cluster.run(lambda strategy: error_of(lambda: _fit(_compiled(strategy))))
        for error in errors:
            self.assertIsNotNone(error)
            self.assertIn("no buffer space on purpose", str(error))

    @parameterized.parameters(("float64", 1e-12), ("bfloat16", 0.05))
    @pytest.mark.stress
    def test_other_types(self, dtype, tolerance):
        """Codecs encode bfloat16, and send float64 as it is."""

        def build():
            return keras.Sequential(
                [keras.Input((6,), dtype=dtype), keras.layers.Dense(2, kernel_initializer="zeros", dtype=dtype)]
            )

        def run(strategy):
            return [weight.astype(np.float64) for weight in _fit(_compiled(strategy, build=build))]

        plain = build()
        plain.compile(_OPTIMIZERS["sgd"](), "mse")
        expected = [weight.astype(np.float64) for weight in _fit(plain)]
        for weights in _cluster(2, pipeline_width=1, codec="int8").run(run):
            self.assertAllClose(weights, expected, rtol=tolerance, atol=tolerance)

    @pytest.mark.stress
    def test_travels_as_another_type(self):
        def run(strategy):
            weights = _fit(_compiled(strategy))
            return weights, strategy.report()["bytes_sent"]

        (weights, num_bytes), (others, _) = _cluster(2, codec=codecs.Identity(dtype="bfloat16")).run(run)
        self.assertAllEqual(weights[0], others[0])
        ((expected, most_bytes), _) = _cluster(2).run(run)
        self.assertNotAllEqual(weights[0], expected[0])
        self.assertAllClose(weights[0], expected[0], atol=0.02)
        self.assertLess(num_bytes, most_bytes)

    @pytest.mark.slow
    def test_sparse_gradients(self):
        def build():
            return keras.Sequential(
                [
                    keras.Input((3,), dtype="int32"),
                    keras.layers.Embedding(7, 4, embeddings_initializer=keras.initializers.RandomUniform(seed=3)),
                    keras.layers.Flatten(),
                    keras.layers.Dense(1, kernel_initializer=keras.initializers.GlorotUniform(seed=4)),
                ]
            )

        x = np.random.default_rng(2).integers(0, 7, (16, 3))
        y = x.sum(1, keepdims=True).astype(np.float32)

        def run(strategy):
            model = _compiled(strategy, build=build)
            model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
            return model.get_weights()

        plain = build()
        plain.compile(_OPTIMIZERS["sgd"](), "mse")
        plain.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
        for weights in _cluster(2, pipeline_width=1).run(run):
            self.assertAllClose(weights, plain.get_weights(), rtol=1e-5, atol=1e-5)

    @parameterized.parameters(
        ({"pipeline_width": 0}, ValueError, "`pipeline_width` must be an integer of at least 1. Received:.*=0"),
        ({"num_segments": 0}, ValueError, "`num_segments` must be an integer of at least 1"),
        ({"warmup_steps": -1}, ValueError, "`warmup_steps` must be an integer of at least 0"),
        ({"algorithm": "tree"}, ValueError, "`algorithm` must be one of auto, mesh, ring. Received: algorithm='tree'"),
        ({"compensation": "keep"}, ValueError, "`compensation` must be one of replay, none. Received: .*='keep'"),
        ({"warmup_steps": 5}, ValueError, "`warmup_steps` must be 0 unless compensation='none'.* Received: .*=5"),
        ({"codec": "int4"}, ValueError, "`codec` must be one of"),
        ({"codec": "top_k"}, ValueError, r"use hop_tf.codecs.TopK\(error_feedback=True\).* all but 0.01 of"),
        ({"codec": 8}, TypeError, "`codec` must be a hop_tf.codecs.Codec"),
    )
    def test_refuses(self, arguments, error, message):
        with self.assertRaisesRegex(error, message):
            hop_tf.PipeSGDStrategy(**arguments)


if __name__ == "__main__":
    tf.test.main()

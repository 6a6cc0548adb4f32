"""Tests Hop's mechanisms against stragglers, the serial order and NOTIFY-ACK under `fit`, in three processes.

`simulation_test` tests each mechanism event by event. Here they run in Keras's training graph.
"""

import functools
import os
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import hop_tf
from hop_tf.tools.testing import MultiProcessRunner
from support import OneWeight

_WORLD_SIZE = 3
_BATCH_SIZE = 6
_NUM_STEPS = 20
_NUM_ROWS = _BATCH_SIZE * _NUM_STEPS
_LEARNING_RATE = 0.1
_STRAGGLER = 2
_OPTIONS = hop_tf.CommunicationOptions(timeout_seconds=60)

_SERIAL = {"update_order": "serial"}
_NOTIFY_ACK = {"synchronization": "notify_ack"}
_BACKUP = {"num_backup_workers": 1}
_BACKUP_AND_SKIP = {"num_backup_workers": 1, "skip": hop_tf.SkipIterations()}
_STALENESS_AND_SKIP = {"max_staleness": 3, "skip": hop_tf.SkipIterations(max_jump=3)}

_SGD = functools.partial(keras.optimizers.SGD, _LEARNING_RATE)
_OPTIMIZERS = {"sgd": _SGD, "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1)}

# Ways in which Keras runs steps, some of which a straggler skips.
_MODES = {
    "graph": {},
    "steps_per_execution": {"steps_per_execution": 5},
    "eagerly": {"run_eagerly": True},
    "accumulation": {"optimizer": lambda: _SGD(gradient_accumulation_steps=2)},
    "loss_scaling": {"optimizer": lambda: keras.optimizers.LossScaleOptimizer(_SGD())},
}


def _data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(_NUM_ROWS, 4)).astype("float32")
    return x, (x @ rng.normal(size=(4, 1))).astype("float32")


def _model():
    keras.utils.set_random_seed(3)
    return keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3, activation="tanh"), keras.layers.Dense(1)])


def _batches(rank):
    x, y = _data()
    size = _BATCH_SIZE // _WORLD_SIZE
    for start in range(rank * size, _NUM_ROWS, _BATCH_SIZE):
        yield x[start : start + size], y[start : start + size]


def _reference(order, make_optimizer):
    """Returns the weights of synchronous ranks in plain Keras, averaged before or after each update."""
    models = [_model() for _ in range(_WORLD_SIZE)]
    optimizers = [make_optimizer() for _ in models]
    for batches in zip(*(_batches(rank) for rank in range(_WORLD_SIZE)), strict=True):
        gradients = [_gradient(model, *batch) for model, batch in zip(models, batches, strict=True)]
        if order == "parallel":
            _average(models)
        for model, optimizer, gradient in zip(models, optimizers, gradients, strict=True):
            optimizer.apply(gradient, model.trainable_variables)
        if order == "serial":
            _average(models)
    return [model.get_weights() for model in models]


def _average(models):
    means = [np.mean(values, axis=0) for values in zip(*(model.get_weights() for model in models), strict=True)]
    for model in models:
        model.set_weights(means)


def _gradient(model, x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
    return tape.gradient(loss, model.trainable_variables)


# In the processes.


def _strategy(settings):
    options = hop_tf.CommunicationOptions(timeout_seconds=60)
    return hop_tf.HopStrategy(topology="complete", communication_options=options, **settings)


def _run_in_step(settings, optimizers):
    strategy = _strategy(settings)
    results = {}
    for name in optimizers:
        with strategy.scope():
            model = _model()
            model.compile(_OPTIMIZERS[name](), "mse")
        model.fit(*_data(), batch_size=_BATCH_SIZE, shuffle=False, verbose=0)
        results[name] = model.get_weights()
    strategy.shutdown()
    return results


def _run_backup():
    """Trains with a backup worker and a slow rank; returns the weight after each epoch. Gradients are 1, 2 and 3."""
    os.environ.update(HOP_TF_STEP_SECONDS="0.02", HOP_TF_SLOWDOWN=f"{_STRAGGLER}:12x")
    strategy = _strategy(_BACKUP)
    with strategy.scope():
        model = OneWeight()
        model.compile(keras.optimizers.SGD(_LEARNING_RATE), loss=lambda y, y_pred: y_pred)
    x = np.tile(np.repeat([1.0, 2.0, 3.0], _BATCH_SIZE // _WORLD_SIZE), _NUM_STEPS).astype("float32")[:, None]
    model.fit(x, x, batch_size=_BATCH_SIZE, shuffle=False, verbose=0)
    weight = float(model.w[0])
    strategy.synchronize(model)
    report = strategy.report()
    strategy.shutdown()
    return weight, float(model.w[0]), report


def _run_skipping(settings, modes):
    os.environ.update(HOP_TF_STEP_SECONDS="0.02", HOP_TF_SLOWDOWN=f"{_STRAGGLER}:12x")
    strategy = _strategy(settings)
    results = {mode: _fit_skipping(strategy, **_MODES[mode]) for mode in modes}
    strategy.shutdown()
    return results


def _fit_skipping(strategy, optimizer=_SGD, **compile_args):
    with strategy.scope():
        model = keras.Sequential([*_model().layers, keras.layers.BatchNormalization()])
        optimizer = optimizer()
        model.compile(optimizer, "mse", metrics=["mae"], **compile_args)
    before = strategy.report()
    num_batches = []
    count = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: num_batches.append(sorted(logs)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        history = model.fit(
            *_data(), batch_size=_BATCH_SIZE, epochs=2, shuffle=False, verbose=0, callbacks=[count]
        ).history
    return {
        "report": {name: value - before.get(name, 0) for name, value in strategy.report().items()},
        "iterations": int(getattr(optimizer, "inner_optimizer", optimizer)._iterations.numpy()),
        "history": history,
        "logs": num_batches[-1],
        "warnings": [str(each.message) for each in caught if issubclass(each.category, UserWarning)],
        "finite": all(np.isfinite(weight).all() for weight in model.get_weights()),
    }


def _run_refused():
    strategy = _strategy(_BACKUP_AND_SKIP)
    with strategy.scope():
        model = _model()
        optimizer = keras.optimizers.SGD(_LEARNING_RATE)
        optimizer.build(model.trainable_variables)

    def step(x, y):
        optimizer.apply(_gradient(model, x, y), model.trainable_variables)

    try:
        strategy.run(step, next(_batches(0)))
    except ValueError as error:
        return str(error)
    finally:
        strategy.shutdown()
    return None


def _join(function, *args):
    with MultiProcessRunner(function, num_workers=_WORLD_SIZE, args=args, timeout_seconds=240) as runner:
        return runner.join().raise_for_errors().values


class InStepTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.named_parameters(
        ("serial", _SERIAL, "serial", ["adamw"]),
        ("notify_ack", _NOTIFY_ACK, "parallel", ["sgd"]),
        ("serial_and_sgd", _SERIAL, "serial", ["sgd"]),
        ("notify_ack_and_adamw", _NOTIFY_ACK, "parallel", ["adamw"]),
    )
    @pytest.mark.stress(after=1)
    @pytest.mark.slow
    def test_equals_the_reference(self, settings, order, optimizers):
        values = _join(_run_in_step, settings, optimizers)
        for name in optimizers:
            expected = _reference(order, _OPTIMIZERS[name])
            for weights, expected_weights in zip(values, expected, strict=True):
                self.assertAllClose(weights[name], expected_weights, rtol=1e-5, atol=1e-5)


class BackupTest(tf.test.TestCase):
    @pytest.mark.stress
    def test_every_rank_learns_from_others(self):
        """Each update of the weight is -0.1 times some weighted mean of 1, 2 and 3."""
        values = _join(_run_backup)
        least, most = -_LEARNING_RATE * 3 * _NUM_STEPS, -_LEARNING_RATE * 1 * _NUM_STEPS
        for weight, consensus, report in values:
            self.assertBetween(weight, least, most)
            self.assertAllClose(consensus, np.mean([weight for weight, _, _ in values]))
            self.assertEqual(report["steps"], _NUM_STEPS)
        self.assertLess(values[0][0], most)  # The weight of a rank that trained alone.
        self.assertGreater(values[2][0], least)
        # Others have gone on without the slow rank's updates.
        self.assertGreater(sum(report["late_updates"] + report["withheld_updates"] for *_, report in values), 0)


class SkippingTest(tf.test.TestCase, parameterized.TestCase):
    @pytest.mark.slow
    @pytest.mark.stress
    def test_a_straggler_passes_over_steps(self):
        self._check_passes_over(_BACKUP_AND_SKIP, ["graph", "loss_scaling"])

    @parameterized.named_parameters(
        ("modes", _BACKUP_AND_SKIP, ["eagerly", "accumulation", "steps_per_execution"]),
        ("staleness", _STALENESS_AND_SKIP, ["graph"]),
        ("serial", {**_BACKUP_AND_SKIP, **_SERIAL}, ["graph"]),
        ("interval", {**_BACKUP_AND_SKIP, "interval": 2}, ["graph", "steps_per_execution"]),
    )
    @pytest.mark.stress
    def test_a_straggler_passes_over_steps_otherwise(self, settings, modes):
        self._check_passes_over(settings, modes)

    def _check_passes_over(self, settings, modes):
        values = _join(_run_skipping, settings, modes)
        for mode in modes:
            num_updates = 2 * _NUM_STEPS // (2 if mode == "accumulation" else 1)
            with self.subTest(mode=mode):
                straggler = values[_STRAGGLER][mode]["report"]
                self.assertGreater(straggler["jumps"], 0)
                self.assertLess(straggler["steps"], num_updates / 2)
                for results in values:
                    self._check_epochs_are_whole(results[mode], num_updates, settings.get("interval", 1))

    def _check_epochs_are_whole(self, result, num_updates, interval):
        report = result["report"]
        # A jump leaves the iteration that it begins in after its first step.
        num_skipped = report["skipped_iterations"] * interval + report["jumps"] * (interval - 1)
        self.assertEqual(report["steps"] + num_skipped, num_updates)
        self.assertEqual(result["iterations"], 2 * _NUM_STEPS)
        self.assertEqual(sorted(result["history"]), ["loss", "mae"])
        self.assertLen(result["history"]["loss"], 2)
        self.assertAllInRange(result["history"]["mae"], 1e-6, 1e3)
        self.assertEqual(result["logs"], ["loss", "mae"])
        self.assertEqual(result["warnings"], [])
        self.assertTrue(result["finite"])


class RefusedTest(tf.test.TestCase):
    @pytest.mark.stress
    def test_a_custom_loop_cannot_skip(self):
        for message in _join(_run_refused):
            self.assertIn(
                "HopStrategy skips iterations unless skip=None. Only `fit` can skip steps; a custom loop",
                message,
            )


if __name__ == "__main__":
    tf.test.main()

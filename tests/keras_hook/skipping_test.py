"""StepSkipping under HopStrategy, in the threads of one process; `hop_fit_stragglers_test` has how stragglers jump."""

import dataclasses
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import hop_tf
from hop_tf.keras_hook.skipping import StepSkipping
from hop_tf.strategies.hop.exchange import REDUCTION, HopExchange
from hop_tf.tools.testing import InProcessCluster

_NUM_STEPS = 4
_STRAGGLER = 1


def _make_strategy(cluster_resolver):
    return hop_tf.HopStrategy(
        topology="complete", max_staleness=7, skip=hop_tf.SkipIterations(trigger=8), cluster_resolver=cluster_resolver
    )


def _step(self, request, step=HopExchange.step):
    """The straggler jumps in its last step, beyond the end of `fit`; it is never behind enough to jump by itself."""
    result = step(self, request)
    last = (1, _NUM_STEPS - 1, REDUCTION)
    jumps = self._rank == _STRAGGLER and (self._queue.session, request.step, request.segment) == last
    return dataclasses.replace(result, num_skipped=2) if jumps else result


def _fit_twice(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
    x = np.ones((2 * _NUM_STEPS, 1), "float32")
    steps = []
    for _ in range(2):
        model.fit(x, x, batch_size=2, verbose=0)
        steps.append(strategy.report()["steps"])
    return steps


class SessionTest(tf.test.TestCase):
    @pytest.mark.slow
    def test_what_was_left_to_skip_is_forgotten_when_the_next_fit_begins(self):
        with mock.patch.object(HopExchange, "step", _step):
            steps = InProcessCluster(2, _make_strategy).run(_fit_twice)
        self.assertEqual(steps, [[_NUM_STEPS, 2 * _NUM_STEPS]] * 2)


class _Rows(keras.metrics.Metric):
    """The number of rows, as an integer."""

    def __init__(self):
        super().__init__(name="rows", dtype="int32")
        self.number = self.add_weight(initializer="zeros", dtype="int32")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.number.assign_add(tf.shape(y_true)[0])

    def result(self):
        return tf.identity(self.number)


def _pass_over_an_epoch(self, request, step=HopExchange.step):
    """The straggler jumps over the second epoch."""
    result = step(self, request)
    jumps = self._rank == _STRAGGLER and (request.step, request.segment) == (_NUM_STEPS - 1, REDUCTION)
    return dataclasses.replace(result, num_skipped=_NUM_STEPS) if jumps else result


class EpochTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(False, True)
    @pytest.mark.slow(after=1)
    @pytest.mark.stress(but=1)
    def test_an_epoch_without_a_step(self, averages):
        """All metrics of training are nan, integers too. In means over ranks it counts for nothing."""

        def run(strategy):
            with strategy.scope():
                model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
                model.compile(keras.optimizers.SGD(0.1), "mse", metrics=[hop_tf.state(_Rows(), "sum")])
            x = np.ones((4 * _NUM_STEPS, 1), "float32")
            callbacks = [hop_tf.callbacks.MetricAverage()] if averages else []
            return model.fit(
                x, x, batch_size=4, epochs=3, validation_data=(x, x), callbacks=callbacks, verbose=0
            ).history

        with mock.patch.object(HopExchange, "step", _pass_over_an_epoch):
            first, straggler = InProcessCluster(2, _make_strategy).run(run)
        own = 2.0 * _NUM_STEPS
        self.assertEqual(first["rows"], [2 * own, own, 2 * own] if averages else [own] * 3)
        self.assertAllEqual(straggler["rows"], first["rows"] if averages else [own, np.nan, own])
        self.assertAllEqual(np.isnan(straggler["loss"]), [False, not averages, False])
        self.assertEqual(straggler["val_rows"], [4 * _NUM_STEPS] * 3)


class RefusedTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.product(fits_before=(True, False), make_strategy=(_make_strategy, hop_tf.CanaryStrategy))
    @pytest.mark.stress(after=1)
    @pytest.mark.slow(after=1)
    def test_steps_of_train_on_batch(self, make_strategy, fits_before):
        """Otherwise such steps would be skipped silently."""

        def train(strategy):
            with strategy.scope():
                model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
                model.compile(keras.optimizers.SGD(0.1), "mse")
            x = np.ones((4, 1), "float32")
            if fits_before:
                model.fit(x, x, batch_size=4, verbose=0)
            with self.assertRaisesRegex(ValueError, "and `train_on_batch` cannot|outside of any session"):
                model.train_on_batch(x[:2], x[:2])

        InProcessCluster(2, lambda cluster_resolver: make_strategy(cluster_resolver=cluster_resolver)).run(train)


class MetricsTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(True, False)
    def test_those_of_an_epoch_that_is_passed_over_are_nan(self, in_graph):
        """None is no loss of 0, which nothing improves on; the first step of an epoch begins anew, as ever."""
        model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        model.optimizer.build(model.trainable_variables)
        (loss,), skipping = model.metrics, StepSkipping("")

        def step(value):
            skipping.note(model.optimizer, in_fit=True)
            loss.update_state(value)
            return loss.result()

        def run(value):
            return skipping.run(lambda: step(value), value, model)

        run = tf.function(run) if in_graph else run

        def pass_over(num_steps):
            skipping.skip(tf.constant(num_steps, tf.int64))
            for _ in range(num_steps):
                run(tf.constant(7.0))

        run(tf.constant(2.0))
        pass_over(2)
        self.assertEqual(float(loss.result()), 2.0)
        for values in ((), (3.0, 5.0), (), ()):
            model.reset_metrics()
            pass_over(2)
            for value in values:
                run(tf.constant(value))
            self.assertAllEqual(loss.result(), np.mean(values) if values else np.nan)


if __name__ == "__main__":
    tf.test.main()

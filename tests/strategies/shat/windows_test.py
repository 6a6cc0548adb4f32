"""Tests of SHAT's windows, in which workers push the sum of several steps."""

import dataclasses
import functools
import math
import threading
import time
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import absltest, parameterized

import hop_tf
from hop_tf.strategies.shat.exchange import ShatExchange
from hop_tf.strategies.shat.server.group import ServedGroup
from shat_threads import SETTINGS
from support import in_process, linear, linear_loss
from support.least_squares import BATCH_SIZE, NUM_ROWS, gradient_in, problem, summed_square
from support.references import int8

_NUM_EPOCHS = 3
_NUM_STEPS = _NUM_EPOCHS * NUM_ROWS // BATCH_SIZE
_RATE, _MOMENTUM = 0.0125, 0.9


def _order_of_steps(num_workers):
    """The workers in the order of their steps, at random. First, each makes a step, and takes rank 0's model before."""
    later = np.repeat(np.arange(num_workers), _NUM_STEPS - 1)
    np.random.default_rng(num_workers).shuffle(later)
    return [*range(num_workers), *later.tolist()]


class _Turns(keras.callbacks.Callback):
    """A worker begins a step when all steps before, in a common order, have ended."""

    def __init__(self, rank, order, condition, ended, meet):
        super().__init__()
        self.weights_after, self._meet = [], meet
        self._rank, self._order, self._condition, self._ended = rank, order, condition, ended

    def on_train_batch_begin(self, batch, logs=None):
        with self._condition:
            assert self._condition.wait_for(lambda: self._order[len(self._ended)] == self._rank, timeout=60)

    def on_train_batch_end(self, batch, logs=None):
        self.weights_after.append(self.model.get_weights()[0])
        with self._condition:
            self._ended.append(self._rank)
            self._condition.notify_all()

    def on_train_end(self, logs=None):
        self._meet()  # Servers do not count workers in n whose `fit` has ended.


def _trained(num_workers, num_servers, **settings):
    """Returns the weights of each worker after each of its steps."""
    meet = threading.Barrier(num_workers, timeout=60).wait
    shared = (_order_of_steps(num_workers), threading.Condition(), [], meet)

    def run(strategy):
        x, y, start = problem()
        with strategy.scope():
            kernel = keras.layers.Dense(4, use_bias=False)
            model = keras.Sequential([keras.Input((3,)), kernel])
            kernel.set_weights([start])
            model.compile(keras.optimizers.SGD(_RATE, momentum=_MOMENTUM), summed_square)
        turns = _Turns(strategy.rank, *shared)
        model.fit(x, y, batch_size=BATCH_SIZE, epochs=_NUM_EPOCHS, shuffle=False, verbose=0, callbacks=[turns])
        return turns.weights_after

    return in_process(hop_tf.SHATParameterServerStrategy, num_workers, num_servers, **settings).run(run)


def _reference(num_workers, interval, mixing_of, codec=np.asarray):
    """Algorithm 1 with the sums of `interval` steps of momentum as pushes, which the server divides by n.

    Args:
      num_workers: n.
      interval: As the strategy's.
      mixing_of: Returns alpha, from c.
      codec: Encodes and decodes a push, as a vector.
    """
    gradient_of = gradient_in(num_workers)
    start = problem()[2].astype(np.float64)
    server, workers, velocities = start.copy(), [start] * num_workers, [0 * start] * num_workers
    unsent, counts, after = [0 * start] * num_workers, [0] * num_workers, [[] for _ in range(num_workers)]
    for rank in _order_of_steps(num_workers):
        step = len(after[rank])
        velocities[rank] = _MOMENTUM * velocities[rank] - _RATE * gradient_of(rank, step, workers[rank])
        workers[rank] = workers[rank] + velocities[rank]
        unsent[rank] = unsent[rank] + velocities[rank]
        if step % interval == interval - 1:
            pushed = codec(unsent[rank].ravel()).reshape(start.shape)
            server, unsent[rank] = server + pushed / num_workers, 0 * start
            stays = (1 - mixing_of(counts[rank])) ** interval
            workers[rank] = stays * workers[rank] + (1 - stays) * server
            counts = [0 if other == rank else count + 1 for other, count in enumerate(counts)]
        after[rank].append(workers[rank])
    return after


class WindowsTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        (2, 1, 4), (3, 2, 6), (3, 1, 2), (5, 2, 3), (2, 1, 4, "int8"), (3, 1, 2, "int8"), (5, 1, 3, "int8")
    )
    @pytest.mark.slow(after=1)
    def test_equals_the_reference(self, num_workers, num_servers, interval, codec=None):
        """In each step of each worker. Steps come in any order, so that workers' c differ (Section 4.1.2)."""

        def weight(count):
            return max(0.05, 1 - num_workers / count / math.sqrt(num_workers)) if count else 0.05

        settings = {"mixing": "shat_root", "min_mixing": 0.05, "codec": codec}
        found = _trained(num_workers, num_servers, interval=interval, **settings)
        reference = functools.partial(_reference, num_workers, interval, weight)
        if codec is None:
            self.assertAllClose(found, reference(), rtol=1e-5, atol=1e-5)
            return
        # Values at the border of two codes may get either, and later values follow them.
        expected, without = reference(codec=int8), reference()
        self.assertGreater(np.mean(np.isclose(found, expected, rtol=1e-5, atol=1e-5)), 0.9)
        self.assertLess(
            np.abs(np.subtract(found, expected)).mean(), 0.1 * np.abs(np.subtract(without, expected)).mean()
        )

    @parameterized.parameters(
        ({},),
        ({"run_eagerly": True},),
        ({"steps_per_execution": 7},),
    )
    @pytest.mark.slow(after=1)
    def test_no_step_is_lost(self, arguments):
        """Of 12 steps an epoch, the last ones of a `fit` are no whole window. A second `fit` begins another one."""

        def make_optimizer():
            return keras.optimizers.SGD(0.05, momentum=0.9)

        def run(strategy):
            model = linear.fit_in(strategy, make_optimizer, num_fits=2, **arguments)
            strategy.synchronize(model)
            return model.get_weights()

        expected = linear.weights_alone(make_optimizer, num_fits=2)
        for weights in in_process(hop_tf.SHATParameterServerStrategy, 2, 1, interval=5, codec=None).run(run):
            self.assertAllClose(weights, expected, rtol=1e-4, atol=1e-4)

    @pytest.mark.slow
    def test_no_step_of_a_custom_loop_is_lost(self):
        def run(strategy):
            with strategy.scope():
                model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones")])
                optimizer = keras.optimizers.SGD(0.0625)
                optimizer.build(model.trainable_variables)
            ones = [tf.ones(each.shape) for each in model.trainable_variables]
            step = tf.function(lambda: strategy.run(lambda: optimizer.apply(ones, model.trainable_variables)))
            weights = []
            for _ in range(2):
                for _ in range(8):
                    step()
                time.sleep(0.5 * strategy.rank)  # Rank 0 takes a model without rank 1's last steps.
                strategy.synchronize(model)
                weights.append(float(model.get_weights()[0][0, 0]))
            return weights

        # A custom loop divides by the number of ranks: the mean here is of sums.
        for weights in in_process(hop_tf.SHATParameterServerStrategy, 2, 1, interval=5).run(run):
            self.assertEqual(weights, [1 - 8 * 0.125, 1 - 16 * 0.125])

    @pytest.mark.slow
    def test_a_fit_that_is_broken_off_leaves_the_servers_model(self):
        """Its steps since the last push are no part of it, and the next `fit` does not push them."""

        def run(strategy, num_steps):
            class Break(keras.callbacks.Callback):
                def on_train_batch_end(self, batch, logs=None):
                    if batch == num_steps - 1:
                        raise KeyError("broken off")

            with strategy.scope():
                model = linear.make_model()
                model.compile(keras.optimizers.SGD(0.05), linear_loss)
            x, y = linear.data()
            fit = functools.partial(model.fit, x, y, batch_size=linear.BATCH_SIZE, shuffle=False, verbose=0)
            with self.assertRaisesRegex(KeyError, "broken off"):
                fit(callbacks=[Break()])
            fit()
            strategy.synchronize(model)
            return model.get_weights()

        for num_steps in (3, 7):
            model = linear.make_model()
            model.compile(keras.optimizers.SGD(0.05), linear_loss)
            x, y = linear.data()
            num_rows = num_steps // 4 * 4 * linear.BATCH_SIZE
            for rows in filter(None, (num_rows, len(x))):
                model.fit(x[:rows], y[:rows], batch_size=linear.BATCH_SIZE, shuffle=False, verbose=0)
            cluster = in_process(hop_tf.SHATParameterServerStrategy, 2, 1, interval=4, codec=None)
            for weights in cluster.run(functools.partial(run, num_steps=num_steps)):
                self.assertAllClose(weights, model.get_weights(), rtol=1e-4, atol=1e-4)

    @parameterized.parameters(("int8", None, 0.03), (None, [2, 1], 1e-4))
    @pytest.mark.slow
    def test_codecs_and_uneven_batches(self, codec, batch_shares, tolerance):
        """The gradients of the linear loss are means over rows: in proportion, they add up to that of all rows."""

        def make_optimizer():
            return keras.optimizers.SGD(0.05)

        def run(strategy):
            model = linear.fit_in(strategy, make_optimizer)
            strategy.synchronize(model)
            return model.get_weights()

        settings = {"codec": codec, "batch_shares": batch_shares, "interval": 4}
        for weights in in_process(hop_tf.SHATParameterServerStrategy, 2, 1, **settings).run(run):
            self.assertAllClose(weights, linear.weights_alone(make_optimizer), rtol=tolerance, atol=tolerance)

    @pytest.mark.slow
    def test_the_moving_statistics_of_a_window_count_by_its_rows(self):
        weights, make_push = set(), ShatExchange._make_push

        def note(exchange, window, rate, is_applied, weight, is_plain):
            weights.add((exchange._membership.rank, weight))
            return make_push(exchange, window, rate, is_applied, weight, is_plain)

        cluster = in_process(hop_tf.SHATParameterServerStrategy, 2, 1, batch_shares=[2, 1], interval=5)
        with mock.patch.object(ShatExchange, "_make_push", note):
            cluster.run(
                lambda strategy: linear.fit_in(strategy, functools.partial(keras.optimizers.SGD, 0.05)) and None
            )
        # Of 24 steps of 12 rows, the last four are a window of their own.
        self.assertEqual(weights, {(0, 5 * 8), (0, 4 * 8), (1, 5 * 4), (1, 4 * 4)})

    @parameterized.parameters(1, 5)
    @pytest.mark.slow
    def test_servers_count_steps(self, interval):
        """The schedule of a worker that is started again goes on after them."""

        def run(strategy):
            linear.fit_in(strategy, functools.partial(keras.optimizers.SGD, 0.05), num_fits=2)

        num_steps, count = [], ServedGroup._count_steps

        def note(group, known):
            count(group, known)
            num_steps.append(group._num_steps)

        with mock.patch.object(ServedGroup, "_count_steps", note):
            in_process(hop_tf.SHATParameterServerStrategy, 2, 1, interval=interval).run(run)
        # A window that is not whole counts as one.
        self.assertEqual(num_steps[-1], 2 * math.ceil(linear.NUM_STEPS / interval) * interval)

    @parameterized.parameters(
        lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01), initial_scale=2.0**127),
        lambda: keras.optimizers.AdamW(0.01, gradient_accumulation_steps=3),
    )
    @pytest.mark.slow(after=1)
    def test_a_lone_worker_trains_as_keras_does(self, make_optimizer):
        (weights,) = in_process(hop_tf.SHATParameterServerStrategy, 1, 2, interval=5).run(
            lambda strategy: linear.fit_in(strategy, make_optimizer).get_weights()
        )
        self.assertAllClose(weights, linear.fit(make_optimizer).get_weights(), atol=1e-5)

    def test_sends_less(self):
        def num_bytes(interval):
            make_optimizer = functools.partial(keras.optimizers.SGD, 0.05)

            def run(strategy):
                linear.fit_in(strategy, make_optimizer)
                return strategy.report()["shard_0_bytes_sent"]

            return in_process(hop_tf.SHATParameterServerStrategy, 2, 1, interval=interval, codec=None).run(run)

        for of_one, of_five in zip(num_bytes(1), num_bytes(5), strict=True):
            self.assertEqual(of_five * linear.NUM_STEPS, of_one * math.ceil(linear.NUM_STEPS / 5))


_SETTINGS = dataclasses.replace(SETTINGS, pushes=None, min_mixing=None)


class SettingsTest(parameterized.TestCase):
    @parameterized.parameters(
        ({"interval": 0}, "`interval` must be"),
        ({"interval": 2, "pushes": "gradients"}, "`interval` must be 1 with pushes='gradients'"),
        ({"interval": 2, "consistency": "bsp"}, r"see DTSStrategy\(delay=0, interval=2\)"),
    )
    def test_what_is_refused(self, given, message):
        with self.assertRaisesRegex(ValueError, message):
            dataclasses.replace(_SETTINGS, **given)

    def test_averages_of_weights(self):
        settings = dataclasses.replace(_SETTINGS, interval=3)
        with self.assertRaisesRegex(ValueError, "`interval` must be 1 with `use_ema`"):
            settings.check_optimizer(keras.optimizers.SGD(0.1, use_ema=True))

    @parameterized.parameters(("asp", 1.0), ("ensemble", 0.0), (0.3, 0.3), ("shat", 1 - (1 - 1 / 4) ** 3))
    def test_a_rule_takes_over_as_much_as_in_single_steps(self, mixing, expected):
        settings = dataclasses.replace(_SETTINGS, mixing=mixing, interval=3)
        self.assertAlmostEqual(settings.weight(c=3, n=4), expected)


if __name__ == "__main__":
    absltest.main()

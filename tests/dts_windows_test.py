"""What DTS makes of a linear loss equals synchronous SGD, for every delay and interval: the graph's half alone.

A linear loss has gradients that do not depend on the weights, so that synchronous training can be written down, and all
ranks must end with its result. `make stress` tries all settings, `make test` every 41st.
"""

import functools
import itertools
import os

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from dts_simulation import Job, Rank, make_job

from hop_tf import codecs
from hop_tf.strategies.dts_windows import Schedule, Windows

_WORLD_SIZE = 2
_NUM_STEPS = 41
_NUM_VALUES = 5
_NUM_DEVIATIONS = 300
_MAX_DELAY, _MAX_INTERVAL = 20, 12
_EVERY = 1 if "HOP_TF_SCHEDULE_SEED" in os.environ else 41

_MOMENTA = {"plain": {}, "momentum": {"momentum": 0.9}, "nesterov": {"momentum": 0.9, "nesterov": True}}
_RATES = {
    "constant": lambda: 0.1,
    "decaying": lambda: keras.optimizers.schedules.ExponentialDecay(0.1, decay_steps=10, decay_rate=0.5),
}


def _gradients():
    """Of each step and rank."""
    return np.random.default_rng(0).normal(size=(_NUM_STEPS, _WORLD_SIZE, _NUM_VALUES)).astype(np.float32)


def _rate(name, step):
    return 0.1 if name == "constant" else 0.1 * 0.5 ** (step / 10)


def _synchronous(name, rate, decay=0.0, momentum=0.0, nesterov=False):
    """Weights and velocity after all steps, by the update rules that Keras documents."""
    w, v = np.ones(_NUM_VALUES), np.zeros(_NUM_VALUES)
    for step, gradient in enumerate(_gradients().astype(np.float64).mean(1)):
        eta = _rate(rate, step)
        w *= 1 - eta * decay
        v = momentum * v - eta * gradient
        w += momentum * v - eta * gradient if nesterov else v
    return w, v


def _make_rank(momentum, rate, decay=0.0, selection=None, schedule=None):
    """A rank whose gradients do not depend on its weights: they are the rows that it is given, and there is no y."""
    kernel = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
    model = keras.Sequential([keras.Input((_NUM_VALUES,)), kernel])
    optimizer = keras.optimizers.SGD(_RATES[rate](), weight_decay=decay or None, **_MOMENTA[momentum])
    return Rank(model, optimizer, lambda y, y_pred: y_pred[:, 0], schedule or Schedule(0, 1), selection)


class _Jobs:
    """Trains with any delay and interval. Ranks are made, and their steps traced, once for all that need the same."""

    def __init__(self, momentum, rate, decay=0.0, selection=None):
        self._make_rank = functools.partial(_make_rank, momentum, rate, decay, selection)
        self._ranks = {}
        self._selects = selection is not None

    def train(self, delay, interval):
        """Weights and velocity of each rank in the end."""
        schedule = Schedule(delay, interval)
        key = min(2, interval), schedule.num_slots  # Steps make a difference where they are more than one.
        if key not in self._ranks:
            self._ranks[key] = [self._make_rank(schedule) for _ in range(_WORLD_SIZE)]
        ranks = self._ranks[key]
        for rank in ranks:
            rank.model.set_weights([np.ones((_NUM_VALUES, 1))])
            for variable in (rank.optimizer.iterations, *rank.optimizer.momentums):
                variable.assign(tf.zeros_like(variable))
            rank.windows.reset()
        job = Job(ranks, schedule, self._selects)
        for gradients in _gradients():
            job.step(gradients, np.zeros(_WORLD_SIZE))
        job.finish()
        velocities = [rank.optimizer.momentums for rank in ranks]
        return [
            [w.numpy()[:, 0] for w in (rank.model.weights[0], *v)] for rank, v in zip(ranks, velocities, strict=True)
        ]


class ScheduleTest(tf.test.TestCase):
    def test_windows_are_applied_in_order_and_their_slots_are_free(self):
        for delay, interval in itertools.product(range(30), range(1, 20)):
            schedule, under_way, num_applied = Schedule(delay, interval), [], 0
            for num_steps in range(1, 90):
                has_ended, window = schedule.ended(num_steps)
                if has_ended:
                    self.assertEqual((window + 1) * interval, num_steps)
                    under_way.append(window)
                # The last one of a `fit`, which may be shorter, comes on top wherever that ends.
                self.assertLessEqual(len(under_way) + (num_steps % interval > 0), schedule.num_slots)
                is_due, window = schedule.due(num_steps)
                if is_due:
                    self.assertEqual((window, under_way.pop(0)), (num_applied, num_applied))
                    self.assertEqual((window + 1) * interval + delay, num_steps)
                    num_applied += 1
                self.assertEqual([*schedule.under_way(num_steps)], under_way)
                # One that hands out what was held back needs a slot even after a whole window.
                self.assertLessEqual(len(under_way) + 1, schedule.num_slots)


class WindowsTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.product(momentum=list(_MOMENTA), rate=list(_RATES))
    def test_equals_synchronous_sgd(self, momentum, rate):
        jobs = _Jobs(momentum, rate)
        settings = list(itertools.product(range(_MAX_DELAY + 1), range(1, _MAX_INTERVAL + 1)))
        for delay, interval in settings[::_EVERY]:
            with self.subTest(delay=delay, interval=interval):
                self._check(jobs.train(delay, interval), _synchronous(momentum, rate, **_MOMENTA[momentum]))

    @parameterized.parameters(*_MOMENTA)
    @pytest.mark.stress(after=1)
    def test_equals_synchronous_sgd_with_weight_decay(self, momentum):
        jobs = _Jobs(momentum, "decaying", decay=0.3)
        for delay, interval in ((0, 1), (0, 4), (5, 1), (3, 4), (4, 4), (20, 12)):
            with self.subTest(delay=delay, interval=interval):
                self._check(jobs.train(delay, interval), _synchronous(momentum, "decaying", 0.3, **_MOMENTA[momentum]))

    @parameterized.parameters(*_MOMENTA)
    @pytest.mark.stress(after=1)
    def test_what_is_not_among_the_largest_is_not_lost(self, momentum):
        jobs = _Jobs(momentum, "decaying", decay=0.3, selection=codecs.TopK(ratio=0.2, warmup_steps=3))
        for delay, interval in ((0, 1), (5, 1), (3, 4), (20, 12)):
            with self.subTest(delay=delay, interval=interval):
                self._check(jobs.train(delay, interval), _synchronous(momentum, "decaying", 0.3, **_MOMENTA[momentum]))

    def _check(self, of_ranks, expected):
        for values in of_ranks:
            self.assertAllClose(values, expected[: len(values)], rtol=1e-5, atol=1e-5)


class DeviationTest(tf.test.TestCase, parameterized.TestCase):
    """A rank's deviation from the mean, d, feeds back through its own gradients until they are corrected.

    Of a quadratic with curvature h, and windows of one step, d[n] = -lr h sum(c[j] d[n - j - 1] for j < D), where
    c[j] = 1 + m + ... + m^j is how far a gradient moves the weights in j + 1 steps.
    """

    @parameterized.parameters((0.0, 20, 1.0), (0.9, 4, 0.2), (0.9, 8, 0.069), (0.9, 20, 0.019))
    def test_how_large_learning_rates_can_be(self, momentum, delay, limit):
        effects = np.cumsum(momentum ** np.arange(delay))
        of_limit = np.array([0.9, 1.1])
        for each in of_limit:
            roots = np.roots([1.0, *(each * limit * effects)])
            self.assertEqual(np.abs(roots).max() < 1, each < 1)
        deviations = self._deviations(momentum, delay, limit * of_limit)
        early, late = (np.abs(part).max(axis=0) for part in np.split(deviations, 2))
        self.assertAllEqual(late < early, of_limit < 1)

    def _deviations(self, momentum, delay, curvatures):
        """Of half of two ranks' distance, for each curvature, after each step, with a learning rate of 1."""
        inputs = np.diag(np.sqrt(curvatures)).astype(np.float32)

        def make_model():
            kernel = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
            return keras.Sequential([keras.Input((len(curvatures),)), kernel])

        job = make_job(
            2,
            make_model,
            lambda: keras.optimizers.SGD(1.0, momentum),
            lambda y, y_pred: len(curvatures) / 2 * tf.square(y_pred[:, 0] - y),
            delay=delay,
            interval=1,
        )
        x, nothing = np.concatenate([inputs, inputs]), np.zeros(len(curvatures), np.float32)
        deviations = []
        for step in range(_NUM_DEVIATIONS):
            job.step(x, np.concatenate([nothing + float(step == 0), nothing]))
            first, second = (rank.model.get_weights()[0][:, 0] for rank in job.ranks)
            deviations.append((first - second) / 2)
        return np.array(deviations)


def _step_and_hand_out(rank, window, gradient):
    rank.step(tf.constant([gradient]), tf.zeros(1))
    return [values[:, 0] for values in rank.hand_out(tf.constant(window, tf.int64), False)]


class SelectionTest(tf.test.TestCase):
    def test_the_largest_are_handed_out(self):
        rank = _make_rank("momentum", "constant", selection=codecs.TopK(ratio=0.4))
        a, s = _step_and_hand_out(rank, 0, [1.0, -5.0, 2.0, 0.5, -3.0])
        self.assertAllClose(a, [0.0, 0.5, 0.0, 0.0, 0.3])
        self.assertAllClose(s, a)
        # The window of the others has gone on: -S = 0.9 * 0.1 + 0.1, -A = 0.1 - S; and 0.2 + 0.18.
        a, s = _step_and_hand_out(rank, 1, [1.0, 0.0, 0.0, 0.0, 0.0])
        self.assertAllClose(a, [-0.29, 0.0, -0.38, 0.0, 0.0])
        self.assertAllClose(s, [-0.19, 0.0, -0.18, 0.0, 0.0])

    def test_the_threshold_is_not_that_of_one_column(self):
        """The sample meets all columns of a kernel, one without gradients among others."""
        shape, ratio = (1 << 17, 64), 0.01
        variable = keras.Variable(np.zeros(shape, np.float32))
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build([variable])
        selection = codecs.TopK(ratio=ratio)
        windows = Windows(
            optimizer, [variable.value], interval=1, num_slots=1, compensation="exact", selection=selection
        )
        gradient = np.random.default_rng(0).normal(size=shape).astype(np.float32)
        gradient[:, 0] = 0.0
        windows.accumulate([variable.value.read_value()], [tf.constant(gradient)], tf.constant(1.0))
        (a,) = windows.hand_out(tf.constant(0, tf.int64), everything=False)
        # About 1250 values of the sample pass: their share is a few percent off.
        self.assertAllClose(np.count_nonzero(a) / gradient.size, ratio, rtol=0.15)

    def test_a_value_that_is_no_number_is_handed_out(self):
        rank = _make_rank("plain", "constant", selection=codecs.TopK(ratio=0.2))
        (a,) = _step_and_hand_out(rank, 0, [1.0, float("nan"), 2.0, 0.5, -3.0])
        self.assertTrue(np.isnan(a[1]))


if __name__ == "__main__":
    tf.test.main()

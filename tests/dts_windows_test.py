"""What DTS makes of a linear loss equals synchronous SGD, for every delay and interval: the graph's half alone.

A linear loss has gradients that do not depend on the weights, so that synchronous training can be written down, and all
ranks must end with its result. `make stress` tries all settings, `make test` every 41st.
"""

import itertools
import os

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from hop_tf import codecs
from hop_tf.strategies.dts_windows import Schedule, Windows

_WORLD_SIZE = 2
_NUM_STEPS = 41
_NUM_VALUES = 5
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


class _Rank:
    """A rank's variable, its optimizer and windows, and the step as one function, as `fit` would compile it."""

    def __init__(self, momentum, rate, decay, selection, interval, num_slots=1):
        self.variable = keras.Variable(np.ones(_NUM_VALUES, np.float32))
        self.optimizer = keras.optimizers.SGD(_RATES[rate](), weight_decay=decay or None, **_MOMENTA[momentum])
        self.optimizer.build([self.variable])
        self.windows = Windows(
            self.optimizer,
            [self.variable.value],
            interval=interval,
            num_slots=num_slots,
            compensation="exact",
            selection=selection,
        )

    @tf.function
    def step(self, gradient):
        rate, before = self.optimizer.learning_rate, self.variable.value.read_value()
        self.optimizer.apply([gradient], [self.variable])
        self.windows.accumulate([before], [gradient], rate)

    @tf.function
    def hand_out(self, window):
        return self.windows.hand_out(window, everything=False)

    @tf.function
    def hand_out_everything(self, window):
        return self.windows.hand_out(window, everything=True)

    @tf.function
    def correct(self, window, differences):
        self.windows.correct(window, differences)

    def restart(self):
        self.variable.assign(np.ones(_NUM_VALUES))
        for variable in (self.optimizer.iterations, *self.optimizer.momentums):
            variable.assign(tf.zeros_like(variable))
        self.windows.reset()


class _Job:
    """All ranks in step, and the mean between them."""

    def __init__(self, momentum, rate, decay=0.0, selection=None):
        self._make_rank = lambda *arguments: _Rank(momentum, rate, decay, selection, *arguments)
        self._ranks_of = {}
        self._selects = selection is not None

    def train(self, delay, interval):
        """Weights and velocity of each rank in the end."""
        schedule = Schedule(delay, interval)
        key = min(2, interval), schedule.num_slots  # Steps make a difference where they are more than one.
        if key not in self._ranks_of:
            self._ranks_of[key] = [self._make_rank(*key) for _ in range(_WORLD_SIZE)]
        self._ranks = self._ranks_of[key]
        self._differences = {}
        for rank in self._ranks:
            rank.restart()
        for step, gradients in enumerate(_gradients()):
            for rank, gradient in zip(self._ranks, gradients, strict=True):
                rank.step(gradient)
            has_ended, window = schedule.ended(step + 1)
            if has_ended:
                self._average(window, [rank.hand_out for rank in self._ranks])
            is_due, window = schedule.due(step + 1)
            if is_due:
                self._correct(window)
        windows = schedule.under_way(_NUM_STEPS)
        if _NUM_STEPS % interval or self._selects:
            self._average(windows.stop, [rank.hand_out_everything for rank in self._ranks])
        for window in sorted(self._differences):
            self._correct(window)
        return [[rank.variable.numpy(), *(v.numpy() for v in rank.optimizer.momentums)] for rank in self._ranks]

    def _average(self, window, hand_outs):
        given = np.array([hand_out(tf.constant(window, tf.int64)) for hand_out in hand_outs])
        self._differences[window] = given.mean(0) - given

    def _correct(self, window):
        for rank, differences in zip(self._ranks, self._differences.pop(window), strict=True):
            rank.correct(tf.constant(window, tf.int64), [tf.constant(difference) for difference in differences])


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
        job = _Job(momentum, rate)
        settings = list(itertools.product(range(_MAX_DELAY + 1), range(1, _MAX_INTERVAL + 1)))
        for delay, interval in settings[::_EVERY]:
            with self.subTest(delay=delay, interval=interval):
                self._check(job.train(delay, interval), _synchronous(momentum, rate, **_MOMENTA[momentum]))

    @parameterized.parameters(*_MOMENTA)
    @pytest.mark.stress(after=1)
    def test_equals_synchronous_sgd_with_weight_decay(self, momentum):
        job = _Job(momentum, "decaying", decay=0.3)
        for delay, interval in ((0, 1), (0, 4), (5, 1), (3, 4), (4, 4), (20, 12)):
            with self.subTest(delay=delay, interval=interval):
                self._check(job.train(delay, interval), _synchronous(momentum, "decaying", 0.3, **_MOMENTA[momentum]))

    @parameterized.parameters(*_MOMENTA)
    @pytest.mark.stress(after=1)
    def test_what_is_not_among_the_largest_is_not_lost(self, momentum):
        job = _Job(momentum, "decaying", decay=0.3, selection=codecs.TopK(ratio=0.2, warmup_steps=3))
        for delay, interval in ((0, 1), (5, 1), (3, 4), (20, 12)):
            with self.subTest(delay=delay, interval=interval):
                self._check(job.train(delay, interval), _synchronous(momentum, "decaying", 0.3, **_MOMENTA[momentum]))

    def _check(self, of_ranks, expected):
        for values in of_ranks:
            self.assertAllClose(values, expected[: len(values)], rtol=1e-5, atol=1e-5)


class SelectionTest(tf.test.TestCase):
    def test_the_largest_are_handed_out(self):
        rank = _Rank("momentum", "constant", 0.0, codecs.TopK(ratio=0.4), 1)
        rank.step(tf.constant([1.0, -5.0, 2.0, 0.5, -3.0]))
        a, s = rank.hand_out(tf.constant(0, tf.int64))
        self.assertAllClose(a, [0.0, 0.5, 0.0, 0.0, 0.3])
        self.assertAllClose(s, a)
        rank.step(tf.constant([1.0, 0.0, 0.0, 0.0, 0.0]))
        # The window of the others has gone on: -S = 0.9 * 0.1 + 0.1, -A = 0.1 - S; and 0.2 + 0.18.
        a, s = rank.hand_out(tf.constant(1, tf.int64))
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
        rank = _Rank("plain", "constant", 0.0, codecs.TopK(ratio=0.2), 1)
        rank.step(tf.constant([1.0, float("nan"), 2.0, 0.5, -3.0]))
        (a,) = rank.hand_out(tf.constant(0, tf.int64))
        self.assertTrue(np.isnan(a[1]))


if __name__ == "__main__":
    tf.test.main()

"""Tests of DTS that chooses its settings: changes of the schedule and algorithm during training lose nothing."""

import contextlib
import io
import time
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import absltest, parameterized

import hop_tf
from hop_tf import codecs
from hop_tf.collectives import AllReduce
from hop_tf.runtime import choices, ways
from hop_tf.runtime.admissions import Admissions
from hop_tf.runtime.autotuning import Autotuner, Pace, Setting
from hop_tf.runtime.joining import Joining
from hop_tf.strategies.dts.exchange import DTSExchange, DTSSettings
from hop_tf.strategies.dts.windows import WARMUP, Courses
from support import in_process, linear, scripted_choices, train_with_late_determinism

_OPTIMIZERS = {
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "decay": lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.9)),
    "accumulates": lambda: keras.optimizers.SGD(0.05, momentum=0.9, gradient_accumulation_steps=2),
}
# D + 1, as in the means of windows.
_WIDTHS = [1, 3, 3, 3, 2, 2, 5, 1, 1, 4, 1, 2, 2, 1, 3, 6, 1]


def _cluster(world_size=2, **settings):
    return in_process(hop_tf.DTSStrategy, world_size, **settings)


def _by_widths(widths=_WIDTHS):
    return scripted_choices(lambda window: Setting(0, widths[window % len(widths)]))


def _fit_in(strategy, optimizer="momentum", callbacks=(), **arguments):
    return linear.fit_in(strategy, _OPTIMIZERS[optimizer], callbacks, **arguments)


def _weights_alone(optimizer="momentum", **arguments):
    return linear.weights_alone(_OPTIMIZERS[optimizer], **arguments)


def _note_delays(strategy, delays):
    def note(batch, logs):
        delays.append(strategy.training.algorithms[0].known_schedule(0).delay)

    return keras.callbacks.LambdaCallback(on_train_batch_end=note)


def _means_take(lossless, encoded):
    """Patches `AllReduce.mean`: means come so many seconds later."""
    mean = AllReduce.mean

    def slow(self, *arguments, **keywords):
        is_encoded = "/1" in self._name.partition("/")[2]  # Of two ranks, the second way.
        time.sleep(encoded if is_encoded else lossless)
        return mean(self, *arguments, **keywords)

    return mock.patch.object(AllReduce, "mean", slow)


class ChangesTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        *((name, {}, {}) for name in _OPTIMIZERS),
        ("momentum", {"steps_per_execution": 5}, {}),
        ("momentum", {"run_eagerly": True}, {}),
        ("momentum", {}, {"on_peer_loss": "continue"}),
        ("momentum", {}, {"batch_shares": [2, 1]}),
        ("momentum", {}, {"codec": codecs.TopK(ratio=0.3)}),
    )
    @pytest.mark.slow(after=1)
    def test_a_change_of_the_schedule_loses_no_change(self, optimizer, arguments, settings):
        def run(strategy):
            delays = []
            model = _fit_in(strategy, optimizer, [_note_delays(strategy, delays)], num_fits=2, **arguments)
            return model.get_weights(), delays

        with _by_widths():
            results = _cluster(**{"codec": None, **settings}).run(run)
        expected = _weights_alone(optimizer, num_fits=2)
        for weights, delays in results:
            self.assertAllClose(weights, expected, rtol=1e-4, atol=1e-4)
            self.assertGreater(len(set(delays)), 2)
            self.assertEqual(delays, results[0][1])
            for mine, first in zip(weights, results[0][0], strict=True):
                self.assertAllEqual(mine, first)

    @pytest.mark.slow
    def test_an_interval_that_is_given_is_kept(self):
        """Windows are merged at once, or when the next one ends."""

        def run(strategy):
            delays = []
            return _fit_in(strategy, callbacks=[_note_delays(strategy, delays)]).get_weights(), delays

        with _by_widths([1, 4, 4, 1]):
            results = _cluster(codec=None, interval=3).run(run)
        for weights, delays in results:
            self.assertAllClose(weights, _weights_alone(), rtol=1e-4, atol=1e-4)
            self.assertEqual(set(delays), {0, 3})

    @pytest.mark.slow
    def test_a_change_of_the_way_loses_no_change(self):
        """The way changes between mesh and ring, with and without int8, and the schedule changes, too."""

        def run(strategy):
            return _fit_in(strategy).get_weights()

        script = scripted_choices(lambda window: Setting(window // 2 % 4, _WIDTHS[window % len(_WIDTHS)]))
        with script, mock.patch.object(ways, "_LEAST_BYTES", 0):
            results = _cluster(3).run(run)
        for weights in results:
            self.assertAllClose(weights, _weights_alone(), rtol=0.02, atol=0.2)
            for mine, first in zip(weights, results[0], strict=True):
                self.assertAllEqual(mine, first)

    @parameterized.parameters({}, {"interval": 2}, {"delay": 3, "interval": 2}, {"delay": 0, "interval": 1})
    @pytest.mark.slow(after=1)
    def test_meetings_lose_no_change(self, **settings):
        """At a meeting, as with a rank that joins, windows begin anew with any delay."""
        decide = Admissions.decide

        def decide_to_meet(self, mean, step, first_step):
            decided = decide(self, mean, step, first_step)
            if step in (4, 5, 12, 13):
                decided[0, 0] = first_step() - step
            return decided

        def run(strategy):
            return _fit_in(strategy).get_weights()

        widths = _by_widths([1, 1, 1, 1, 1, 1, 3, 3, 2, 3, 3, 3, 1])
        # No rank joins.
        meets = mock.patch.object(Joining, "meet", lambda self, group, step: None)
        with widths, meets, mock.patch.object(Admissions, "decide", decide_to_meet):
            results = _cluster(codec=None, on_peer_loss="continue", **settings).run(run)
        for weights in results:
            self.assertAllClose(weights, _weights_alone(), rtol=1e-4, atol=1e-4)
            for mine, first in zip(weights, results[0], strict=True):
                self.assertAllEqual(mine, first)

    @pytest.mark.slow
    def test_a_custom_loop(self):
        """A custom loop changes schedules, too. `synchronize` merges all windows, and begins anew."""
        num_steps = 20
        gradients = np.random.default_rng(0).normal(size=(2 * num_steps, 2, 4)).astype(np.float32)

        def run(strategy):
            with strategy.scope():
                dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
                model = keras.Sequential([keras.Input((4,)), dense])
                optimizer = keras.optimizers.SGD(0.1, momentum=0.5)
                optimizer.build(model.trainable_variables)

            @tf.function
            def step(gradient):
                strategy.run(lambda: optimizer.apply([gradient], model.trainable_variables))

            delays = set()
            for number in range(2 * num_steps):
                # A custom loop divides by the number of ranks: the mean here is of sums.
                step(tf.constant(gradients[number, strategy.rank][:, None]))
                delays.add(strategy.training.algorithms[0].known_schedule(0).delay)
                if number % num_steps == num_steps - 1:
                    strategy.synchronize(model)
            return model.get_weights()[0][:, 0], delays

        def momentum(rate):
            weights, velocity = np.ones(4), np.zeros(4)
            for gradient in gradients:
                velocity = 0.5 * velocity - rate * gradient.sum(axis=0)
                weights = weights + velocity
            return weights

        with _by_widths():
            for weights, delays in _cluster(codec=None).run(run):
                self.assertAllClose(weights, momentum(0.1), rtol=1e-4, atol=1e-4)
                self.assertGreater(len(delays), 2)


class ChoicesTest(tf.test.TestCase, parameterized.TestCase):
    def _train(self, seconds, **settings):
        """Trains; returns the printed text, and the reports.

        A step computes for at least 20 ms. Means come `seconds` late, or a tenth of that if they are encoded.
        """

        def run(strategy):
            compute = keras.callbacks.LambdaCallback(on_train_batch_begin=lambda batch, logs: time.sleep(0.02))
            _fit_in(strategy, callbacks=[compute], num_fits=2, num_repeats=6)
            return strategy.report()

        # The first choice stays: on a busy machine, times change.
        first_stays = mock.patch.object(DTSExchange, "pace", Pace(block=1 << 30))
        with _means_take(seconds, seconds / 10), first_stays, contextlib.redirect_stderr(io.StringIO()) as stderr:
            reports = _cluster(**settings).run(run)
        return [line for line in stderr.getvalue().splitlines() if line.startswith("hop_tf: ")], reports

    @pytest.mark.slow
    def test_a_delay_as_long_as_means_take(self):
        """Only rank 0 prints the chosen delay, once. The second `fit` begins with the same delay."""
        said, reports = self._train(0.1)
        self.assertRegex(
            said[0], r"hop_tf: lossless over a mesh, D = (\d+), p = \1: .* ms a step; lossless over a mesh"
        )
        self.assertIn("To keep these settings, pass delay=", said[0])
        for report in reports:
            self.assertBetween(report["delay"], 2, 8)
            self.assertEqual(report["interval"], report["delay"])

    @parameterized.parameters((1, 1), (4, 1), (5, 2), (0, 1), (4, 4), (1, 10))
    @pytest.mark.stress(after=2)
    @pytest.mark.slow
    def test_a_codec_with_a_schedule_that_is_given(self, delay, interval):
        """Measured times belong to the way that was used, however late its means are merged."""
        seconds = 0.1 * max(2, delay, interval)  # Longer than a step on a busy machine.
        with mock.patch.object(ways, "_LEAST_BYTES", 0):
            said, reports = self._train(seconds, delay=delay, interval=interval, algorithm="mesh")
        self.assertIn("int8 over a mesh", said[-1])
        for report in reports:
            self.assertEqual((report["delay"], report["interval"]), (delay, interval))
            self.assertEqual(report["encoded_bytes_per_value"], codecs.Int8().bytes_per_value)

    @pytest.mark.slow
    def test_times_are_those_of_the_setting_that_they_are_heard_of(self):
        """Windows are in flight when another setting begins, and their times come later."""
        seconds, heard = 0.1, []

        def hear(self, values, setting):
            self._num_steps += 1
            heard.append((values[2], setting))  # Of rank 0, divided by two.
            self.setting = Setting(self._num_steps // 5 % 2, [1, 4, 6, 1, 1, 3][self._num_steps // 5 % 6])

        hears, encodes = mock.patch.object(Autotuner, "hear", hear), mock.patch.object(ways, "_LEAST_BYTES", 0)
        with _means_take(seconds, 0.001), hears, encodes:
            _cluster(algorithm="mesh").run(lambda strategy: _fit_in(strategy, num_repeats=8) and None)
        told = [(2 * exchange, setting) for exchange, setting in heard if setting is not None]
        self.assertGreater(len(told), 40)
        self.assertLen({setting for _, setting in told}, 5)
        for exchange, setting in told:
            self.assertEqual(exchange >= seconds, setting.way == 0, msg=(exchange, setting))

    @pytest.mark.slow
    def test_gradients_that_are_computed_for_longer_than_means_take(self):
        _, reports = self._train(0.0, codec=None, algorithm="mesh")
        self.assertIn(reports[0]["delay"], (0, 1, 2))


class SettingsTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        ({}, [(0, 1), (1, 1), (2, 2), (3, 3)]),
        ({"interval": 8}, [(0, 8), (8, 8)]),
        ({"delay": 3}, [(3, 3)]),
        ({"delay": 0}, [(0, 1)]),
        ({"delay": 5, "interval": 2}, [(5, 2)]),
    )
    def test_schedules_that_go_with_what_is_given(self, given, expected):
        settings = DTSSettings(**{"delay": "auto", "interval": "auto", "codec": "auto", "algorithm": "auto", **given})
        schedules = [settings.schedule_of(delay + 1) for delay in settings.delays]
        self.assertEqual([(each.delay, each.interval) for each in schedules[:4]], expected)

    def test_nothing_is_chosen_by_times_if_operations_are_deterministic(self):
        with mock.patch.object(choices, "is_deterministic", return_value=True):
            with contextlib.redirect_stderr(io.StringIO()) as stderr:
                strategy = hop_tf.DTSStrategy()
            self.assertEqual(
                strategy._settings, DTSSettings(delay=4, interval=4, codec=codecs.Identity(), algorithm="mesh")
            )
            self.assertIn(
                "ranks choose nothing by measured times. To keep these settings, pass "
                "delay=4, interval=4, codec=None, algorithm='mesh'.",
                stderr.getvalue(),
            )

    def test_operations_that_become_deterministic_too_late(self):
        with self.assertRaisesRegex(ValueError, "Call it before you create the strategy"):
            train_with_late_determinism(_cluster(), 2, _fit_in)

    def test_an_outer_optimizer_takes_windows_of_a_fixed_length(self):
        outer = keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)
        settings = hop_tf.DTSStrategy(outer_optimizer=outer)._settings
        self.assertEqual((settings.delay, settings.interval, settings.codec), (4, 4, "auto"))
        for given, expected in (
            ({"interval": 50}, (4, 50)),
            ({"delay": 0, "interval": 50}, (0, 50)),
            ({"delay": 3}, (3, 3)),
        ):
            settings = hop_tf.DTSStrategy(outer_optimizer=outer, **given)._settings
            self.assertEqual((settings.delay, settings.interval), expected)


class WarmupTest(absltest.TestCase):
    def test_its_times_are_not_heard(self):
        """They are those of windows that ranks wait for. So they say nothing of windows in flight."""
        heard = []

        def run(strategy):
            with strategy.scope():
                model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
                model.compile(keras.optimizers.SGD(0.01), "mse")
            x = np.ones((16 * 4, 3), np.float32)
            model.fit(x, x[:, :1], batch_size=4, verbose=0)

        with mock.patch.object(Autotuner, "hear", lambda tuner, mean, setting: heard.append(mean)):
            in_process(hop_tf.DTSStrategy, 2, delay=2, interval=2, warmup_steps=6).run(run)
        num_later = (16 - 6) / 2 + 1  # With the last, empty one.
        self.assertLen(heard, 2 * num_later)


class CoursesTest(parameterized.TestCase):
    @parameterized.parameters(("auto", "auto", 0), (5, 3, 0), (5, 3, 7), (4, 4, 30))
    def test_the_graph_and_exchanges_have_the_same_windows(self, delay, interval, warmup_steps):
        """Settings change all the time, and ranks meet now and then. The graph follows the windows' means."""
        settings = DTSSettings(delay=delay, interval=interval, codec=codecs.Identity(), algorithm="auto")
        first, widths = (1, [1, 1, 2, 3, 6]) if delay == "auto" else (delay + 1, [delay + 1])
        for seed in range(100):
            random = np.random.default_rng(seed)
            courses = Courses(settings.schedule_of, Setting(0, first), warmup_steps)
            schedule, told, meetings, merged = settings.schedule_of(first, warmup_steps, warmup_steps), {}, set(), 0

            def end(window, courses=courses, told=told, meetings=meetings, random=random):
                """Ends a window. All exchanges know its mean at once: no choice can come earlier."""
                meets = random.random() < 0.1
                if meets and not any(
                    meeting >= courses.of(window).schedule.steps_of(window).stop for meeting in meetings
                ):
                    meetings.add(courses.meet(window))
                courses.choose(window, Setting(int(random.integers(2)), int(random.choice(widths))))
                following = window + 1 + courses.of(window).schedule.num_newer
                told[window] = courses.of(following).setting.width

            for num_steps in range(1, 200):
                present = schedule if num_steps > schedule.first_step else WARMUP
                has_ended, ended = present.ended(num_steps)
                if has_ended:
                    self.assertEqual(courses.of(ended).schedule.steps_of(ended), present.steps_of(ended))
                    self.assertEqual(courses.at(num_steps - 1).schedule.num_ended(num_steps), ended + 1)
                    end(ended)
                is_due, due = present.due(num_steps)
                if is_due:
                    self.assertEqual(due, merged)
                    merged += 1
                    if told[due] != schedule.delay + 1:
                        merged = ended + 1
                        schedule = settings.schedule_of(told[ended], num_steps, merged)
                if num_steps in meetings:
                    self.assertTrue(has_ended)
                    merged = ended + 1
                    schedule = settings.schedule_of(first, num_steps, merged)
            self.assertGreater(merged, 20)


if __name__ == "__main__":
    absltest.main()

"""Synchronous Canary that chooses its algorithm, with ranks in one process."""

import contextlib
import functools
import io
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import hop_tf
from hop_tf import codecs
from hop_tf.collectives import Mesh
from hop_tf.runtime import choices
from hop_tf.runtime.autotuning import Autotuner, Setting, Times
from hop_tf.runtime.ways import Way
from support import in_process, scripted_choices, train_with_late_determinism

_NUM_STEPS, _BATCH_SIZE = 24, 12
_INTERFACES = ["127.0.0.1", "127.0.0.2"]  # Ranks in one process have no connections, and only count them.


def _cluster(world_size, **settings):
    settings = {"consistency": "bsp", "codec": None, "num_colayers": 2, **settings}
    return in_process(hop_tf.CanaryStrategy, world_size, **settings)


def _fit():
    random = np.random.default_rng(1)
    x = random.normal(size=(_NUM_STEPS // 2 * _BATCH_SIZE, 6)).astype(np.float32)
    layers = [keras.layers.Dense(units, kernel_initializer="ones", activation="tanh") for units in (5, 2)]
    model = keras.Sequential([keras.Input((6,)), *layers])
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    model.fit(x, x[:, :2], batch_size=_BATCH_SIZE, epochs=2, shuffle=False, verbose=0)
    return model.get_weights()


@functools.cache
def _expected():
    """Returns the weights after training in one process."""
    return _fit()


def _fit_in(strategy):
    with strategy.scope():
        return _fit()


def _exchange(strategy):
    (group,) = strategy.training.groups
    return group.exchange


def _with_times(seconds):
    """Patches `Autotuner.own` so that an exchange takes `seconds` of each way instead of measured times."""
    own = Autotuner.own

    def own_of_ways(self, times, is_late=False):
        exchange = seconds[vars(self).get("way_before", 0)]
        self.way_before = self.setting.way
        return own(self, Times(0.01 + exchange, exchange), is_late)

    return mock.patch.object(Autotuner, "own", own_of_ways)


class ChoiceTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        (3, (0.1, 0.05), "ring"),
        (3, (0.1, 0.099), "mesh"),
        (4, (0.1, 0.2, 0.05), "bcube:2,2"),
    )
    @pytest.mark.slow(after=1)
    def test_all_ranks_take_the_fastest_one(self, world_size, seconds, expected):
        def run(strategy):
            strategy._recorder = mock.Mock()
            weights = _fit_in(strategy)
            tuner = _exchange(strategy).tuner
            return weights, tuner.ways[tuner.setting.way].algorithm, strategy.report(), strategy._recorder

        settings = {"interfaces": _INTERFACES} if world_size == 4 else {}
        with _with_times(seconds), contextlib.redirect_stderr(io.StringIO()) as stderr:
            results = _cluster(world_size, **settings).run(run)
        expected_weights = _expected()
        for weights, algorithm, report, recorder in results:
            self.assertEqual(algorithm, expected)
            self.assertEqual(report["uses_ring"], expected == "ring")
            self.assertEqual(report.get("uses_bcube", 0), expected == "bcube:2,2")
            line = {"codec": str(codecs.Identity()), "algorithm": expected}
            recorder.add_line.assert_called_once_with("chosen", **line)
            self.assertAllClose(weights, expected_weights, rtol=1e-4, atol=1e-5)
            for mine, first in zip(weights, results[0][0], strict=True):
                self.assertAllEqual(mine, first)
        self.assertEqual(stderr.getvalue().count("To keep these settings"), 1)
        self.assertIn(f"To keep these settings, pass algorithm='{expected}'.\n", stderr.getvalue())

    @parameterized.parameters((3, 2, {}), (4, 3, {"interfaces": _INTERFACES}))
    @pytest.mark.slow(after=1)
    def test_a_change_of_algorithm_loses_no_gradient(self, world_size, num_ways, settings):
        with scripted_choices(lambda step: Setting(step // 2 % num_ways, 1)):
            results = _cluster(world_size, **settings).run(lambda strategy: (_fit_in(strategy), _exchange(strategy)))
        expected = _expected()
        for weights, exchange in results:
            self.assertLen(exchange.tuner.ways, num_ways)
            self.assertAllClose(weights, expected, rtol=1e-4, atol=1e-5)
            for mine, first in zip(weights, results[0][0], strict=True):
                self.assertAllEqual(mine, first)

    @pytest.mark.slow
    def test_what_a_codec_has_lost_goes_along(self):
        """Ranks with error feedback stay equal to the bit when the algorithm changes."""
        codec = codecs.Int8(error_feedback=True)
        with scripted_choices(lambda step: Setting(step // 2 % 2, 1)):
            results = _cluster(3, codec=codec).run(_fit_in)
        expected = _expected()
        for weights in results:
            self.assertAllClose(weights, expected, atol=0.02)
            for mine, first in zip(weights, results[0], strict=True):
                self.assertAllEqual(mine, first)

    @parameterized.parameters((2, {}), (3, {"algorithm": "ring"}))
    @pytest.mark.slow(after=1)
    def test_nothing_is_measured_where_nothing_can_be_chosen(self, world_size, settings):
        def run(strategy):
            weights, exchange = _fit_in(strategy), _exchange(strategy)
            self.assertIsNone(exchange.tuner)
            self.assertNotIn("uses_ring", strategy.report())
            return weights

        expected = _expected()
        for weights in _cluster(world_size, **settings).run(run):
            self.assertAllClose(weights, expected, rtol=1e-4, atol=1e-5)


class SettingsTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        ({}, 2, 0, ["mesh"]),
        ({}, 3, 0, ["mesh", "ring"]),
        ({}, 3, 1, ["mesh", "ring"]),
        ({}, 4, 2, ["mesh", "ring", "bcube:2,2"]),
        ({}, 27, 3, ["mesh", "ring", "bcube:3,3"]),
        ({}, 5, 2, ["mesh", "ring"]),
        ({"codec": "low_rank"}, 4, 2, ["mesh"]),
        ({"algorithm": "mesh"}, 4, 2, ["mesh"]),
        ({"algorithm": "ring"}, 4, 2, ["ring"]),
        ({"algorithm": "tree:3"}, 4, 2, ["tree:3"]),
        ({"algorithm": "bcube:2,2"}, 4, 2, ["bcube:2,2"]),
    )
    def test_what_ranks_choose_from(self, settings, world_size, num_interfaces, algorithms):
        """Ranks keep a given algorithm, and the codec."""
        codec = codecs.get_for_means(settings.get("codec", "sketch"))
        settings = hop_tf.CanaryStrategy(consistency="bsp", **settings)._settings
        ways = [Way(algorithm, codec) for algorithm in algorithms]
        self.assertEqual(settings.ways(world_size, num_interfaces), ways)
        self.assertEqual(settings.chooses(world_size, num_interfaces), len(ways) > 1)

    @parameterized.parameters("ssp", "async")
    def test_ranks_that_do_not_wait_choose_nothing(self, consistency):
        settings = hop_tf.CanaryStrategy(consistency=consistency)._settings
        self.assertFalse(settings.chooses(4, 2))
        self.assertEqual(settings.asynchronous(1).network, Mesh())

    def test_what_is_told_keeps_the_settings(self):
        """Several interfaces are for a BCube. Any other algorithm uses only the first one."""
        for interfaces, algorithm, more in (
            (None, "ring", ""),
            (_INTERFACES, "ring", ", interfaces=['127.0.0.1']"),
            (_INTERFACES, "bcube:2,2", ""),
        ):
            strategy = hop_tf.CanaryStrategy(consistency="bsp", interfaces=interfaces)
            with contextlib.redirect_stderr(io.StringIO()) as stderr:
                strategy._tell(Way(algorithm, codecs.get("sketch")), 1, "text")
            arguments = f"algorithm='{algorithm}'{more}"
            self.assertEqual(stderr.getvalue(), f"hop_tf: text. To keep these settings, pass {arguments}.\n")

    @pytest.mark.slow
    def test_nothing_is_chosen_by_times_if_operations_are_deterministic(self):
        def run(strategy):
            return _fit_in(strategy), strategy._settings.ways(3), _exchange(strategy).tuner

        deterministic = mock.patch.object(choices, "is_deterministic", return_value=True)
        with deterministic, contextlib.redirect_stderr(io.StringIO()) as stderr:
            results = _cluster(3).run(run)
        for weights, ways, tuner in results:
            self.assertAllClose(weights, _expected(), rtol=1e-4, atol=1e-5)
            self.assertEqual((ways, tuner), ([Way("mesh", codecs.Identity())], None))
        self.assertRegex(
            stderr.getvalue(),
            "operations are deterministic, so ranks choose nothing by measured times. To keep these settings, pass "
            r"algorithm='mesh'\.",
        )

    @parameterized.parameters({"algorithm": "ring"}, {"consistency": "ssp"}, {"codec": "low_rank"})
    def test_deterministic_operations_change_no_settings_that_are_not_chosen(self, **settings):
        deterministic = mock.patch.object(choices, "is_deterministic", return_value=True)
        with deterministic, contextlib.redirect_stderr(io.StringIO()) as stderr:
            strategy = hop_tf.CanaryStrategy(**{"consistency": "bsp", **settings})
        self.assertEqual(strategy._settings, hop_tf.CanaryStrategy(**{"consistency": "bsp", **settings})._settings)
        self.assertEmpty(stderr.getvalue())

    def test_operations_that_become_deterministic_too_late(self):
        with self.assertRaisesRegex(ValueError, "Call it before you create the strategy"):
            train_with_late_determinism(_cluster(3), 3, _fit_in)


if __name__ == "__main__":
    tf.test.main()

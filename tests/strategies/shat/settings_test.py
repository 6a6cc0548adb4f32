"""Tests of Equation 4, of SHAT's settings, and of a server's decisions when to apply and to answer."""

import math

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from hop_tf import codecs
from hop_tf.strategies.shat.server.consistency import Consistency
from hop_tf.strategies.shat.settings import ShatSettings, mixing_weight
from hop_tf.tensors.packing import TensorSpec


def _settings(**changes):
    defaults = {
        "mixing": "shat",
        "pushes": None,
        "sharding": "memory",
        "consistency": "async",
        "max_staleness": 16,
        "min_mixing": None,
        "log_base": math.e,
        "codec": None,
    }
    return ShatSettings(**{**defaults, **changes})


class MixingWeightTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.product(base=(math.e, 2.0, 10.0), floor=(0.0, 0.25))
    def test_is_equation_4_within_its_limits(self, base, floor):
        n, c = np.meshgrid(np.arange(2, 65), np.arange(1, 201), indexing="ij")
        scales = {"shat": np.emath.logn(base, n), "shat_root": n**0.5}
        for rule, scale in scales.items():
            expected = np.clip(1 - n / (c * scale), floor, 1)
            found = [
                [mixing_weight(int(j), int(i), rule, base, floor) for i, j in zip(*row, strict=True)]
                for row in zip(n, c, strict=True)
            ]
            self.assertAllClose(found, expected, rtol=1e-12, atol=1e-12)

    @parameterized.parameters("shat", "shat_root")
    def test_a_lone_worker_takes_the_server_s_model_and_one_whom_nobody_follows_keeps_its_own(self, rule):
        self.assertEqual({mixing_weight(c, 1, rule) for c in range(201)}, {1.0})
        self.assertEqual({mixing_weight(0, n, rule) for n in range(2, 65)}, {0.0})
        self.assertEqual(mixing_weight(0, 4, rule, min_mixing=0.25), 0.25)

    def test_workers_that_are_equally_fast(self):
        found = [mixing_weight(n - 1, n) for n in (2, 4, 8, 16)]
        self.assertAllClose(found, [0.0, 0.038, 0.450, 0.615], atol=5e-4)

    def test_with_base_2_the_rules_agree_for_4_and_16_workers(self):
        for n in (4, 16):
            self.assertAlmostEqual(mixing_weight(n, n, log_base=2.0), mixing_weight(n, n, "shat_root"))

    @parameterized.parameters(
        ({"c": -1}, "`c` must be an integer of at least 0"),
        ({"n": 0}, "`n` must be an integer of at least 1"),
        ({"rule": "asp"}, "`rule` must be one of shat, shat_root"),
        ({"log_base": 1.0}, "`log_base` must be a finite number above 1"),
        ({"min_mixing": 1.5}, "`min_mixing` must be a number from 0 to 1"),
    )
    def test_refuses(self, arguments, message):
        with self.assertRaisesRegex(ValueError, message + ".*Received: " + next(iter(arguments))):
            mixing_weight(**{"c": 1, "n": 2, **arguments})


class ShatSettingsTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        ({"mixing": "asp"}, 1.0),
        ({"mixing": "ensemble"}, 0.0),
        ({"mixing": 0.125}, 0.125),
        ({"mixing": 1}, 1.0),
        ({}, 1 - 8 / (7 * math.log(8))),
        ({"mixing": "shat_root"}, 1 - 8 / (7 * math.sqrt(8))),
        ({"mixing": "shat", "log_base": 10.0}, 0.125),  # Equation 4 is negative there: the floor is 1 / n.
        ({"mixing": "shat", "log_base": 10.0, "min_mixing": 0.0}, 0.0),
        ({"mixing": "ensemble", "consistency": "bsp"}, 1.0),
        ({"mixing": "ensemble", "consistency": "ssp"}, 0.0),
    )
    def test_weight_of_eight_equal_workers(self, settings, expected):
        self.assertAlmostEqual(_settings(**settings).weight(7, 8), expected, places=12)

    @parameterized.parameters(
        ({"mixing": "mean"}, "`mixing` must be one of shat, shat_root, asp, ensemble"),
        ({"mixing": -0.1}, "`mixing` must be a number from 0 to 1"),
        ({"mixing": True}, "`mixing` must be a number from 0 to 1"),
        ({"sharding": "rows"}, "`sharding` must be one of memory, layer, none"),
        ({"consistency": "ssp:3"}, "`consistency` must be one of async, ssp, bsp"),
        ({"consistency": None}, "`consistency` must be"),
        ({"consistency": "ssp", "max_staleness": -1}, "`max_staleness` must be an integer of at least 0"),
        ({"min_mixing": 2}, "`min_mixing` must be a number from 0 to 1"),
        ({"log_base": math.inf}, "`log_base` must be a finite number above 1"),
        ({"codec": "top_k"}, "`codec` must be one that sends something for every value"),
        ({"codec": "zip"}, "`codec` must be one of"),
    )
    def test_refuses(self, settings, message):
        with self.assertRaisesRegex(ValueError, message):
            _settings(**settings)

    def test_a_codec_that_is_given_is_kept(self):
        for codec, num_bytes in (None, 4), ("truncate16", 2):
            settings = _settings(codec=codec)
            self.assertFalse(settings.chooses)
            self.assertEqual(settings.lossiest.bytes_per_value, num_bytes)

    def test_few_values_are_not_encoded(self):
        settings = _settings(codec="auto")
        for num_values, num_ways in (25, 1), (25_000, 2):
            self.assertLen(settings.ways([TensorSpec("values", (num_values,), tf.float32)]), num_ways)

    def test_codecs_have_names(self):
        self.assertEqual(_settings(codec="int8").codec, codecs.Int8())


class ConsistencyTest(tf.test.TestCase):
    def test_asynchronous_never_waits(self):
        policy = Consistency.make("async", 0)
        self.assertEqual(policy.to_apply({1}, {0: 3, 1: 9, 2: 3}), {1})
        self.assertEmpty(policy.to_apply((), {0: 1}))
        self.assertTrue(policy.may_answer(1, {0: 0, 1: 1000}))

    def test_stale_synchronous_holds_who_is_further_ahead(self):
        policy = Consistency.make("ssp", 2)
        self.assertEqual(policy.to_apply({1}, {0: 3, 1: 9}), {1})
        answered = [policy.may_answer(1, {0: 3, 1: clock}) for clock in range(3, 8)]
        self.assertEqual(answered, [True, True, True, False, False])
        self.assertTrue(policy.may_answer(0, {0: 3, 1: 7}))
        self.assertTrue(policy.may_answer(1, {1: 100}))

    def test_bulk_synchronous_waits_for_all_that_take_part(self):
        policy = Consistency.make("bsp", 0)
        self.assertEmpty(policy.to_apply({0, 2}, {0: 5, 1: 5, 2: 5}))
        self.assertEqual(policy.to_apply({0, 2, 1}, {0: 5, 1: 5, 2: 5}), {0, 1, 2})
        self.assertEqual(policy.to_apply({0, 2}, {0: 5, 2: 5}), {0, 2})
        self.assertEmpty(policy.to_apply((), {}))

    def test_bulk_synchronous_applies_first_what_others_repeat(self):
        """A server has gone on from a snapshot that lacks an update, which it had answered to rank 1."""
        policy = Consistency.make("bsp", 0)
        self.assertEmpty(policy.to_apply({1}, {0: 4, 1: 5}))
        self.assertEqual(policy.to_apply({0, 1}, {0: 4, 1: 5}), {0})


if __name__ == "__main__":
    tf.test.main()

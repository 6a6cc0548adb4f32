"""Tests that `compare` uses models and simulations correctly, and finds the best settings."""

import dataclasses
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import hop_tf
from hop_tf.tools import planning, timing
from hop_tf.tools.planning import outcomes

_MEASUREMENT = timing.Measurement(
    world_size=4,
    num_bytes=100_000_000,
    network=timing.NetworkCosts(latency_seconds=1e-3, seconds_per_byte=8e-9),
    step=timing.Step(forward_seconds=0.1, backward_seconds=0.2),
    codec_seconds_per_byte=dict.fromkeys(timing.MEASURED_CODECS, 0.0),
)
# Rank 3 takes 4 times as long.
_SLOW = dataclasses.replace(_MEASUREMENT, rank_seconds=((0.3,) * 8,) * 3 + ((1.2,) * 8,))


def _predict(name, measurement):
    candidate = next(each for each in planning.candidates(measurement) if each.name == name)
    return planning.predict(candidate, measurement)


def _made(strategy, name, step_seconds, trained_share=1.0):
    return planning.Prediction(
        name=name,
        strategy=strategy,
        call=name,
        step_seconds=step_seconds,
        trained_share=trained_share,
        alike_seconds=step_seconds,
        bytes_per_step=0.0,
        memory_bytes=0.0,
        changes=None,
        is_simulated=False,
        needs="",
    )


class PredictTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(1, 2)
    def test_pipe_sgd_is_what_its_model_says(self, width):
        for codec in (None, "int8"):
            name = f"pipe:{width}" + (f":{codec}" if codec else "")
            plans = [
                _MEASUREMENT.predict(pipeline_width=width, codec=codec, num_segments=number) for number in (1, 2, 4)
            ]
            found = _predict(name, _MEASUREMENT)
            self.assertAllClose(found.step_seconds, min(plan.step_seconds for plan in plans), rtol=0.021)
            self.assertEqual(found.step_seconds, found.alike_seconds)

    def test_dts_is_what_its_model_says(self):
        for delay, interval in ((4, 4), (20, 12)):
            plan = _MEASUREMENT.predict_dts(delay=delay, interval=interval)
            found = _predict(f"dts:{delay}:{interval}", _MEASUREMENT)
            self.assertAllClose(found.step_seconds, plan.step_seconds, rtol=0.02)
            self.assertAllClose(found.bytes_per_step, 1.5 * 1e8 / interval)

    def test_hop_sends_to_its_neighbors(self):
        """Its link carries a model for each of three neighbors, 0.8 s each, which hides the computation."""
        found = _predict("hop", _MEASUREMENT)
        self.assertAllClose(found.step_seconds, 3 * 0.8 + 1e-3, rtol=0.01)
        self.assertAllClose(found.bytes_per_step, 3e8)
        self.assertTrue(found.is_simulated)

    @parameterized.parameters("hop", "hop:backup", "hop:staleness", "hop:ring")
    @pytest.mark.stress(but=1)
    def test_a_few_ranks_tell_what_many_that_are_alike_take(self, name):
        """In rings each does what the others do: the same protocol, of all ranks, is the reference."""
        world_size, seconds = 21, 0.3
        many = dataclasses.replace(_MEASUREMENT, world_size=world_size)
        candidate = next(each for each in planning.candidates(many) if each.name == name)
        alike = np.full((world_size, 40), seconds)
        with mock.patch.object(outcomes, "_FEW_RANKS", world_size):
            expected = candidate.outcome(alike)
        with mock.patch.object(outcomes, "simulate_training", wraps=outcomes.simulate_training) as simulated:
            found = candidate.outcome(alike)
        self.assertAllClose(found.step_seconds, expected.step_seconds, rtol=1e-4)  # They begin together a bit sooner.
        self.assertEqual((found.memory, found.trained_share), (expected.memory, expected.trained_share))
        self.assertEqual(simulated.call_args.kwargs["world_size"], 9)  # However many there are.

    def test_who_waits_for_a_slow_rank(self):
        for name in ("pipe:2:int8", "dts:4:4"):
            found = _predict(name, _SLOW)
            self.assertAllClose((found.step_seconds, found.trained_share), (1.2, 1.0), rtol=0.01)
            self.assertLess(found.alike_seconds, 0.35)
        found = _predict("canary", _SLOW)  # It makes a step while the others make four.
        self.assertAllClose((found.step_seconds, found.trained_share), (0.3, 3.25 / 4), rtol=0.05)
        self.assertAllClose(found.batch_seconds, found.step_seconds / found.trained_share)

    @pytest.mark.slow
    def test_hop_jumps_over_what_a_slow_rank_misses(self):
        quick = dataclasses.replace(_SLOW, num_bytes=1_000_000)
        waiting, jumping = (_predict(name, quick) for name in ("hop", "hop:skip"))
        self.assertAllClose(waiting.step_seconds, 1.2, rtol=0.05)
        self.assertLess(jumping.step_seconds, 0.4)
        self.assertBetween(jumping.trained_share, 3 / 4, 3.5 / 4)

    def test_a_typical_step_is_that_of_most(self):
        self.assertAllClose(_predict("pipe:1", _SLOW).alike_seconds, _predict("pipe:1", _MEASUREMENT).step_seconds)

    @pytest.mark.slow
    def test_calls_make_strategies(self):
        """Also in a world that is small."""
        for each in planning.candidates(dataclasses.replace(_MEASUREMENT, world_size=2)):
            strategy = eval(f"hop_tf.{each.call.split(' with ')[0]}", {"hop_tf": hop_tf})
            self.assertIn(each.strategy.replace("-", ""), type(strategy).__name__)
            strategy.shutdown()

    @pytest.mark.slow
    def test_compares_all_strategies(self):
        found = planning.compare(dataclasses.replace(_SLOW, num_bytes=1_000_000))
        self.assertEqual({each.strategy for each in found}, {"Pipe-SGD", "DTS", "Hop", "Canary", "SHAT"})
        self.assertEqual(found[0].name, "pipe:1")
        for each in found:
            self.assertGreaterEqual(each.batch_seconds, 0.29, each.name)
            self.assertTrue(np.isfinite([each.bytes_per_step, each.memory_bytes]).all())

    def test_refuses(self):
        with self.assertRaisesRegex(ValueError, "`world_size` must be at least 2. Received: world_size=1"):
            planning.compare(dataclasses.replace(_MEASUREMENT, world_size=1))
        with self.assertRaisesRegex(ValueError, "`step` must take some time"):
            planning.compare(dataclasses.replace(_MEASUREMENT, step=timing.Step()))


class BestTest(tf.test.TestCase):
    def test_the_fastest_of_each_strategy(self):
        predictions = [
            _made("a", "plain", 1.0),
            _made("a", "fast", 0.5),
            _made("b", "plain", 0.4),
            _made("b", "hardly faster", 0.37),
            _made("c", "slow", 2.0),
            _made("d", "passes over", 0.3, trained_share=0.5),
        ]
        best = planning.best(predictions)
        self.assertEqual(
            [(each.strategy, each.name) for each in best], [("b", "plain"), ("a", "fast"), ("d", "passes over")]
        )

    def test_their_order_decides_between_equals(self):
        predictions = [_made("a", "1", 1.01), _made("b", "2", 1.0), _made("c", "3", 1.03), _made("d", "4", 0.999)]
        self.assertEqual([each.name for each in planning.best(predictions, 4)], ["1", "2", "4", "3"])


if __name__ == "__main__":
    tf.test.main()

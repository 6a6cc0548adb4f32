"""The timing model against the paper's equations written out, and against an event-by-event schedule."""

import itertools

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from hop_tf import timing

_NETWORK = timing.Network(
    latency_seconds=1e-3, seconds_per_byte=1e-9, reduce_seconds_per_byte=1e-10, synchronization_seconds=2e-3
)
_STEP = timing.Step(update_seconds=0.01, forward_seconds=0.1, backward_seconds=0.2)


class TimingTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(*itertools.product((2, 3, 8), (1, 4)))
    def test_equations_5_and_6(self, p, num_segments):
        alpha, beta, gamma, s, n = 1e-3, 1e-9, 1e-10, 2e-3, 1e8
        expected = (
            2 * (p - 1) * num_segments * alpha + 2 * (p - 1) / p * n * beta + (p - 1) / p * n * gamma + num_segments * s
        )
        self.assertAllClose(
            timing.communication_seconds(_NETWORK, world_size=p, num_bytes=n, num_segments=num_segments), expected
        )
        mesh = timing.communication_seconds(
            _NETWORK, world_size=p, num_bytes=n, num_segments=num_segments, algorithm="mesh"
        )
        self.assertAllClose(mesh, expected - (2 * (p - 1) - 2) * num_segments * alpha)

    def test_equations_2_3_4_and_7(self):
        self.assertAllClose(timing.synchronous_step_seconds(_STEP, 0.5), 0.01 + 0.1 + 0.2 + 0.5)
        self.assertAllClose(timing.unlimited_step_seconds(_STEP, 0.5, 3), 0.81 / 3)
        self.assertAllClose(timing.pipelined_step_seconds(_STEP, 0.5), 0.5)
        self.assertAllClose(timing.pipelined_step_seconds(_STEP, 0.2), 0.31)
        self.assertAllClose(timing.scaling_efficiency(_STEP, 0.5), 0.31 / 0.5)
        self.assertEqual(timing.scaling_efficiency(_STEP, 0.31), 1.0)

    def test_codec(self):
        """It shortens the travel, and counts where it takes longer than that."""

        def seconds(**arguments):
            return timing.communication_seconds(
                timing.Network(latency_seconds=0.0, seconds_per_byte=1e-9), world_size=4, num_bytes=1e8, **arguments
            )

        self.assertAllClose(seconds(), 0.15)
        self.assertAllClose(seconds(bytes_per_byte=0.25, codec_seconds_per_byte=1e-10), 0.15 / 4)
        self.assertAllClose(seconds(bytes_per_byte=0.25, codec_seconds_per_byte=1e-9), 0.1)

    @parameterized.parameters(*itertools.product((1, 2), (1, 2, 4), (0.01, 0.1, 0.4, 1.0)))
    def test_predicts_a_schedule(self, width, num_segments, communication):
        """One thread computes, one communicates: segments in order, as soon as they are there."""
        network = timing.Network(latency_seconds=0.0, seconds_per_byte=communication / 1e8)
        plan = timing.predict(
            network, _STEP, world_size=2, num_bytes=1e8, pipeline_width=width, num_segments=num_segments
        )
        self.assertAllClose(plan.communication_seconds, communication)
        ends, now, link_free = [], 0.0, 0.0
        for t in range(50):
            forward_end = now + _STEP.forward_seconds
            for segment in range(num_segments):
                there = forward_end + _STEP.backward_seconds * (segment + 1) / num_segments
                link_free = max(link_free, there) + communication / num_segments
            ends.append(link_free)
            due = ends[t - (width - 1)] if t >= width - 1 else 0.0
            now = max(forward_end + _STEP.backward_seconds, due) + _STEP.update_seconds
            if t == 29:
                at_30 = now
        self.assertAllClose(plan.step_seconds, (now - at_30) / 20, rtol=0.02)

    def test_recommends_no_change_where_communication_is_fast(self):
        network = timing.Network(latency_seconds=1e-6, seconds_per_byte=1e-12)
        plan = timing.recommend(network, _STEP, world_size=4, num_bytes=1e8)
        self.assertEqual((plan.pipeline_width, plan.codec, plan.num_segments), (1, "identity", 1))
        self.assertIn("next to no time", plan.reason)

    def test_recommends_to_hide_what_can_be_hidden(self):
        network = timing.Network(latency_seconds=1e-4, seconds_per_byte=1.5e-9)  # 0.225 s.
        plan = timing.recommend(network, _STEP, world_size=4, num_bytes=1e8)
        self.assertEqual((plan.pipeline_width, plan.codec), (2, "identity"))
        self.assertAllClose(plan.scaling_efficiency, 1.0, atol=0.02)
        self.assertIn("as long as computation", plan.reason)

    def test_recommends_a_codec_where_links_are_slow(self):
        network = timing.Network(latency_seconds=1e-4, seconds_per_byte=8e-9)  # 1 Gbit/s: 1.2 s.
        plan = timing.recommend(network, _STEP, world_size=4, num_bytes=1e8)
        self.assertEqual((plan.pipeline_width, plan.codec, plan.num_segments), (2, "int8", 1))
        slow_codec = timing.recommend(
            network, _STEP, world_size=4, num_bytes=1e8, codec_seconds_per_byte={"int8": 1e-7}
        )
        self.assertEqual(slow_codec.codec, "truncate16")

    def test_recommendation_is_the_best(self):
        random = np.random.default_rng(0)
        for _ in range(200):
            network = timing.Network(
                latency_seconds=10.0 ** random.uniform(-5, -1), seconds_per_byte=10.0 ** random.uniform(-11, -7)
            )
            world_size = int(random.integers(2, 17))
            best = timing.recommend(network, _STEP, world_size=world_size, num_bytes=1e8)
            for width, codec, algorithm in itertools.product((1, 2), ("identity", "int8"), ("mesh", "ring")):
                other = timing.predict(
                    network,
                    _STEP,
                    world_size=world_size,
                    num_bytes=1e8,
                    pipeline_width=width,
                    codec=codec,
                    algorithm=algorithm,
                )
                self.assertLessEqual(best.step_seconds, 1.021 * other.step_seconds)

    def test_world_of_one(self):
        self.assertEqual(timing.communication_seconds(_NETWORK, world_size=1, num_bytes=1e8), 0.0)

    @parameterized.parameters(
        (lambda: timing.Network(latency_seconds=-1.0, seconds_per_byte=0.0), "`latency_seconds` must not be negative"),
        (lambda: timing.Step(forward_seconds=float("nan")), "`forward_seconds` must not be negative. Received:.*nan"),
        (lambda: timing.communication_seconds(_NETWORK, world_size=0, num_bytes=1), "`world_size` must be an integer"),
        (lambda: timing.predict(_NETWORK, _STEP, world_size=2, num_bytes=1, algorithm="bus"), "`algorithm` must be"),
        (lambda: timing.unlimited_step_seconds(_STEP, 1.0, 0), "`pipeline_width` must be an integer of at least 1"),
    )
    def test_refuses(self, call, message):
        with self.assertRaisesRegex(ValueError, message):
            call()


if __name__ == "__main__":
    tf.test.main()

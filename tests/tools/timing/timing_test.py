"""The timing models against the papers' equations written out. `schedules_test` compares them with schedules."""

import itertools

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import hop_tf
from hop_tf import codecs
from hop_tf.runtime.choosing import WORTHWHILE
from hop_tf.tools import timing

_NETWORK = timing.NetworkCosts(
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
        if p == 2:  # A single message with the whole vector, which each rank adds to its own.
            self.assertAllClose(mesh, num_segments * (alpha + s) + n * beta + n * gamma)
        else:
            self.assertAllClose(mesh, expected - (2 * (p - 1) - 2) * num_segments * alpha)

    @parameterized.product(communication=(0.05, 0.2, 0.5), num_segments=(1, 4))
    def test_equations_2_to_7(self, communication, num_segments):
        """Equation 6 is extended: a step is not shorter than its own computation."""
        up, forward, back = 0.01, 0.1, 0.2
        network = timing.NetworkCosts(latency_seconds=0.0, seconds_per_byte=communication / 1e8)
        plans = [
            timing.predict(network, _STEP, world_size=2, num_bytes=1e8, pipeline_width=k, num_segments=num_segments)
            for k in (1, 2, 3)
        ]
        synchronous = up + forward + back + communication
        if num_segments == 1:
            self.assertAllClose(plans[0].step_seconds, synchronous)
        segmented = max(up + forward + back / num_segments, communication)
        for plan, width in zip(plans[1:], (2, 3), strict=True):
            self.assertAllClose(plan.step_seconds, max(up + forward + back, segmented))
            self.assertGreaterEqual(plan.step_seconds, synchronous / width)
            self.assertAllClose(plan.scaling_efficiency, (up + forward + back) / plan.step_seconds)

    def test_codec(self):
        """It shortens the travel, and counts where it takes longer than that."""

        def seconds(**arguments):
            return timing.communication_seconds(
                timing.NetworkCosts(latency_seconds=0.0, seconds_per_byte=1e-9),
                world_size=4,
                num_bytes=1e8,
                **arguments,
            )

        self.assertAllClose(seconds(), 0.15)
        self.assertAllClose(seconds(bytes_per_byte=0.25, codec_seconds_per_byte=1e-10), 0.15 / 4)
        self.assertAllClose(seconds(bytes_per_byte=0.25, codec_seconds_per_byte=1e-9), 0.1)

    def test_links_that_a_mesh_does_not_suit(self):
        network = timing.NetworkCosts(latency_seconds=0.0, seconds_per_byte=1e-9, mesh_slowdown=3.0)
        arguments = {"world_size": 4, "num_bytes": 1e8}
        of_ring, of_mesh = (
            timing.communication_seconds(network, algorithm=name, **arguments) for name in ("ring", "mesh")
        )
        self.assertAllClose([of_ring, of_mesh], [0.15, 0.45])
        plan = timing.recommend(network, _STEP, **arguments)
        # With segments a step takes 0.34 s, and with a wide pipe 0.3.
        self.assertEqual((plan.algorithm, plan.codec, plan.pipeline_width), ("ring", "identity", 1))
        self.assertIn("codec 0.45 s. That is in a mesh; in a ring it takes 0.15 s.", plan.reason)
        plan = timing.recommend(network, timing.Step(forward_seconds=0.01), **arguments)
        self.assertEqual((plan.algorithm, plan.codec), ("ring", "int8"))
        self.assertIn("communication without a codec 0.45 s. int8 in a ring shortens it to 0.03779 s.", plan.reason)

    def test_recommends_no_change_where_communication_is_fast(self):
        network = timing.NetworkCosts(latency_seconds=1e-6, seconds_per_byte=1e-12)
        plan = timing.recommend(network, _STEP, world_size=4, num_bytes=1e8)
        self.assertEqual((plan.pipeline_width, plan.codec, plan.num_segments), (1, "identity", 1))
        self.assertIn("next to no time: synchronous training without a codec is as fast as any.", plan.reason)

    def test_names_the_codec_that_there_is_no_choice_without(self):
        network = timing.NetworkCosts(latency_seconds=1e-6, seconds_per_byte=1e-12)
        plan = timing.recommend(network, _STEP, world_size=4, num_bytes=1e8, codec_names=("int8",))
        self.assertIn("synchronous training with int8 is as fast as any", plan.reason)
        network = timing.NetworkCosts(latency_seconds=0.0, seconds_per_byte=8e-9)
        plan = timing.recommend(network, _STEP, world_size=4, num_bytes=1e8, codec_names=("truncate16", "int8"))
        self.assertIn("and communication with truncate16 0.6 s. int8 shortens it to 0.3023 s.", plan.reason)

    def test_recommends_to_hide_what_can_be_hidden(self):
        network = timing.NetworkCosts(latency_seconds=1e-4, seconds_per_byte=1.5e-9)  # 0.225 s.
        plan = timing.recommend(network, _STEP, world_size=4, num_bytes=1e8, codec_names=("identity",))
        self.assertEqual((plan.pipeline_width, plan.codec), (2, "identity"))
        self.assertAllClose(plan.scaling_efficiency, 1.0, atol=0.02)
        self.assertIn("as long as computation", plan.reason)

    def test_prefers_a_codec_to_a_delay(self):
        network = timing.NetworkCosts(latency_seconds=1e-4, seconds_per_byte=1.5e-9)
        plan = timing.recommend(network, _STEP, world_size=4, num_bytes=1e8)
        self.assertEqual((plan.pipeline_width, plan.codec), (1, "int8"))

    def test_recommends_a_codec_where_links_are_slow(self):
        network = timing.NetworkCosts(latency_seconds=1e-4, seconds_per_byte=8e-9)  # 1 Gbit/s: 1.2 s.
        plan = timing.recommend(network, _STEP, world_size=4, num_bytes=1e8)
        self.assertEqual((plan.pipeline_width, plan.codec, plan.num_segments), (2, "int8", 1))
        slow_codec = timing.recommend(
            network, _STEP, world_size=4, num_bytes=1e8, codec_seconds_per_byte={"int8": 1e-7}
        )
        self.assertEqual(slow_codec.codec, "truncate16")

    def test_no_other_setting_is_worth_a_change(self):
        random = np.random.default_rng(0)
        for _ in range(200):
            network = timing.NetworkCosts(
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
                self.assertLessEqual((1 - WORTHWHILE) * best.step_seconds, 1.001 * other.step_seconds)

    def test_sparse_vectors_go_by_all_gather(self):
        """All-gather is chosen if it takes fewer bytes: a rank sends one message to three others and adds theirs."""

        def seconds(codec):
            return timing.predict(_NETWORK, _STEP, world_size=4, num_bytes=1e8, codec=codec).communication_seconds

        # 1 % of the values at 5.01 bytes, or 30 % at 4.37: 3 * 1.31 bytes for each value. In a mesh it is 2 * 3/4 * 4.
        for ratio in (0.01, 0.3):
            codec = codecs.TopK(ratio=ratio)
            num_bytes = codec.bytes_per_value / 4 * 1e8
            self.assertAllClose(seconds(codec), 1e-3 + 3 * num_bytes * (1e-9 + 1e-10) + 2e-3)
        # 50 % of the values: 3 * 2.13 bytes are more.
        self.assertEqual(seconds(codecs.TopK(ratio=0.5)), seconds(None))
        self.assertEqual(seconds(codecs.TopK(ratio=0.5, values="int8")), seconds("int8"))

    def test_world_of_one(self):
        self.assertEqual(timing.communication_seconds(_NETWORK, world_size=1, num_bytes=1e8), 0.0)

    @parameterized.parameters(
        (
            lambda: timing.NetworkCosts(latency_seconds=-1.0, seconds_per_byte=0.0),
            "`latency_seconds` must not be negative",
        ),
        (lambda: timing.Step(forward_seconds=float("nan")), "`forward_seconds` must not be negative. Received:.*nan"),
        (lambda: timing.communication_seconds(_NETWORK, world_size=0, num_bytes=1), "`world_size` must be an integer"),
        (lambda: timing.predict(_NETWORK, _STEP, world_size=2, num_bytes=1, algorithm="bus"), "`algorithm` must be"),
        (
            lambda: timing.predict(_NETWORK, _STEP, world_size=2, num_bytes=1, pipeline_width=0),
            "`pipeline_width` must be an integer of at least 1",
        ),
    )
    def test_refuses(self, call, message):
        with self.assertRaisesRegex(ValueError, message):
            call()

    @parameterized.parameters(
        (lambda: timing.communication_seconds(_NETWORK, world_size=2, num_bytes=-1.0), "`num_bytes`"),
        (lambda: timing.sent_bytes(-1.0, world_size=2), "`num_bytes`"),
        (
            lambda: timing.communication_seconds(_NETWORK, world_size=2, num_bytes=1, bytes_per_byte=-1),
            "`bytes_per_byte`",
        ),
        (
            lambda: timing.communication_seconds(_NETWORK, world_size=2, num_bytes=1, codec_seconds_per_byte=-1),
            "`codec_seconds_per_byte`",
        ),
        (lambda: timing.predict(_NETWORK, _STEP, world_size=2, num_bytes=1, bytes_per_value=-2), "`bytes_per_value`"),
        (lambda: timing.predict(_NETWORK, _STEP, world_size=1, num_bytes=float("nan")), "`num_bytes`"),
    )
    def test_refuses_what_is_negative(self, call, name):
        with self.assertRaisesRegex(ValueError, f"{name} must not be negative. Received: "):
            call()

    @parameterized.parameters("all_gather", "bus")
    def test_refuses_what_is_no_all_reduce(self, algorithm):
        for predict, codec in itertools.product((timing.predict, timing.predict_dts), (None, "int8", "top_k")):
            with self.assertRaisesRegex(ValueError, f"`algorithm` must be one of mesh, ring. Received: .*{algorithm}"):
                predict(_NETWORK, _STEP, world_size=4, num_bytes=1e8, codec=codec, algorithm=algorithm)

    def test_refuses_to_recommend_none(self):
        for recommend in (timing.recommend, timing.recommend_dts):
            with self.assertRaisesRegex(ValueError, "`codec_names` must name at least one codec. Received: "):
                recommend(_NETWORK, _STEP, world_size=4, num_bytes=1e8, codec_names=iter(()))


class DTSTest(tf.test.TestCase, parameterized.TestCase):
    def test_bytes_of_table_1(self):
        """For many ranks 2 |w| / p: the paper's, or half of it where p > 1, for a window is one vector."""

        def bytes_per_step(world_size=1_000_000, interval=1, **arguments):
            found = timing.predict_dts(
                _NETWORK, _STEP, world_size=world_size, num_bytes=1e8, interval=interval, **arguments
            )
            return found.bytes_per_step

        self.assertAllClose(bytes_per_step(delay=0), 2e8)  # Synchronous, or delayed.
        self.assertAllClose(bytes_per_step(delay=4), 2e8)
        self.assertAllClose(bytes_per_step(interval=5), 2e8 / 5)
        self.assertAllClose(bytes_per_step(world_size=4), 2 * 3 / 4 * 1e8)
        self.assertAllClose(bytes_per_step(world_size=4, interval=3, codec="truncate16"), 2 * 3 / 4 * 0.5e8 / 3)
        self.assertAllClose(bytes_per_step(world_size=4, interval=3, codec="top_k"), 3 * 0.01253372e8 / 3)
        self.assertEqual(bytes_per_step(world_size=1), 0.0)

    @parameterized.parameters(
        (0, 1, 1.4),
        (3, 1, 0.5 / 4),  # Once in four steps: the three windows behind it have waited, too.
        (1, 1, 1.1 / 2),
        (0, 4, 1.4 / 4),
        (4, 4, 0.2 / 8),
        (2, 8, 0.8 / 8),
        (5, 4, 0.0),
        (20, 12, 0.0),
    )
    def test_times_of_table_1(self, delay, interval, expected):
        """T_communicate is 1.5 s, T_overlap 0.1 s, T_compute 0.3 s."""
        seconds = timing.non_computing_seconds(
            compute_seconds=0.3, window_seconds=1.5, overlap_seconds=0.1, delay=delay, interval=interval
        )
        self.assertAllClose(seconds, expected)

    def test_bandwidth_binds_whatever_the_delay(self):
        """Links that are occupied for 2 s by what four steps of 0.3 s bring: 0.5 s a step."""
        for delay in (7, 20, 1000):
            seconds = timing.non_computing_seconds(
                compute_seconds=0.3, window_seconds=2.1, sending_seconds=2.0, delay=delay, interval=4
            )
            self.assertAllClose(seconds, 0.2)

    def test_tolerates_what_the_paper_says(self):
        """Section 3.1: 20 steps of 300 ms cover a latency of 6 s."""
        arguments = {"compute_seconds": 0.3, "delay": 20}
        self.assertAllClose(timing.non_computing_seconds(window_seconds=6.0, **arguments), 0.0)
        self.assertAllClose(timing.non_computing_seconds(window_seconds=6.21, **arguments), 0.01)

    def test_predicts_with_a_codec(self):
        network = timing.NetworkCosts(latency_seconds=0.1, seconds_per_byte=1e-8)
        plan = timing.predict_dts(network, _STEP, world_size=4, num_bytes=1e8, delay=5, interval=8, codec="int8")
        bytes_of_window = 2 * 3 / 4 * 1e8 * (1 + 4 / 512) / 4
        self.assertAllClose(plan.bytes_per_step, bytes_of_window / 8)
        self.assertAllClose(plan.sending_seconds, bytes_of_window * 1e-8)
        self.assertAllClose(plan.window_seconds, bytes_of_window * 1e-8 + 0.2)
        self.assertEqual((plan.delay, plan.interval, plan.codec, plan.algorithm), (5, 8, "int8", "mesh"))
        slow = timing.predict_dts(
            network, _STEP, world_size=4, num_bytes=1e8, codec="int8", codec_seconds_per_byte=1e-7
        )
        self.assertAllClose(slow.sending_seconds, 10.0)

    def test_a_selection_is_made_within_the_step(self):
        """Once in four steps: 1e8 bytes take 0.1 s, which no delay hides."""
        network = timing.NetworkCosts(latency_seconds=0.0, seconds_per_byte=1e-9)
        arguments = {"world_size": 4, "num_bytes": 1e8, "delay": 20, "interval": 4, "codec_seconds_per_byte": 1e-9}
        plan = timing.predict_dts(network, _STEP, codec="top_k", **arguments)
        self.assertAllClose(plan.step_seconds, _STEP.seconds + 0.1 / 4)
        self.assertAllClose(plan.scaling_efficiency, 0.31 / 0.335)
        self.assertAllClose(timing.predict_dts(network, _STEP, codec="int8", **arguments).step_seconds, _STEP.seconds)

    def test_recommends_no_delay_where_communication_is_fast(self):
        network = timing.NetworkCosts(latency_seconds=1e-4, seconds_per_byte=1e-10)  # 0.0152 s.
        plan = timing.recommend_dts(network, _STEP, world_size=4, num_bytes=1e8)
        self.assertEqual((plan.delay, plan.interval, plan.codec), (0, 1, "identity"))
        self.assertAllClose(plan.bytes_per_step, 1.5e8)
        self.assertIn("it needs no delay", plan.reason)

    def test_recommends_a_delay_against_latency(self):
        """1.04 s are 3.5 steps of 0.3 s; two steps' delay, and intervals up to 12, would leave 0.035 s to wait for."""
        network = timing.NetworkCosts(latency_seconds=0.52, seconds_per_byte=0.0)
        step = timing.Step(forward_seconds=0.3)
        plan = timing.recommend_dts(network, step, world_size=4, num_bytes=1e7)
        self.assertEqual((plan.delay, plan.interval, plan.codec), (4, 1, "identity"))
        self.assertIn("computes for 0.3 s a step, and waits for 1.04 s", plan.reason)
        self.assertIn("its mean is there after 1.04 s, and due after 1.2 s", plan.reason)

    def test_recommends_windows_against_bandwidth(self):
        """A window takes 2.5 s: longer than seven steps of 0.3 s and all that the target leaves to wait for."""
        network = timing.NetworkCosts(latency_seconds=0.0, seconds_per_byte=2.5 / 1.5e7)
        step = timing.Step(forward_seconds=0.3)
        plan = timing.recommend_dts(network, step, world_size=4, num_bytes=1e7)
        self.assertEqual((plan.delay, plan.interval, plan.codec), (8, 8, "identity"))
        self.assertAllClose(plan.step_seconds, 2.5 / 8)
        self.assertIn("its bytes occupy the links for 2.5 s", plan.reason)

    def test_prefers_a_codec_to_a_delay(self):
        network = timing.NetworkCosts(latency_seconds=1e-4, seconds_per_byte=1.5e-9)
        plan = timing.recommend(network, _STEP, world_size=4, num_bytes=1e8)
        self.assertEqual((plan.pipeline_width, plan.codec), (1, "int8"))

    def test_recommends_a_codec_where_links_are_slow(self):
        """5 Mbit/s: windows of 12 steps are 24 s of bytes with float32, 6.05 s with int8, 0.60 s with the largest 1 %.

        After two steps' delay 1.6 ms are left, once in two steps.
        """
        network = timing.NetworkCosts(latency_seconds=0.0, seconds_per_byte=1.6e-6)
        arguments = {"world_size": 4, "num_bytes": 1e7}
        step = timing.Step(forward_seconds=0.3)
        plan = timing.recommend_dts(network, step, **arguments)
        self.assertEqual((plan.delay, plan.interval, plan.codec), (2, 2, "top_k"))
        self.assertAllClose(plan.step_seconds, 0.3008, rtol=1e-4)
        self.assertIn("top_k shortens the data that a rank sends in a step from 7.5 MB to 0.188 MB", plan.reason)
        larger = timing.recommend_dts(network, step, max_delay=20, max_interval=20, **arguments)
        self.assertEqual((larger.delay, larger.interval, larger.codec), (18, 20, "int8"))

    def test_recommends_a_ring_where_a_mesh_loses_packets(self):
        """Before a codec, and before a longer delay."""
        network = timing.NetworkCosts(latency_seconds=0.0, seconds_per_byte=2.5 / 1.5e7, mesh_slowdown=4.0)
        step = timing.Step(forward_seconds=0.3)
        plan = timing.recommend_dts(network, step, world_size=4, num_bytes=1e7)
        self.assertEqual((plan.delay, plan.interval, plan.codec, plan.algorithm), (8, 8, "identity", "ring"))

    def test_recommends_the_best_where_nothing_is_good(self):
        """The bytes take 2 s a step at p = 12. A delay of ten steps would leave 21 of 24 s a window to wait for."""
        network = timing.NetworkCosts(latency_seconds=0.0, seconds_per_byte=1.6e-6)
        step = timing.Step(forward_seconds=0.3)
        plan = timing.recommend_dts(network, step, world_size=4, num_bytes=1e7, codec_names=("identity",))
        self.assertEqual((plan.delay, plan.interval), (11, 12))
        self.assertAllClose(plan.scaling_efficiency, 0.3 / (0.3 + 1.725))
        self.assertIn("No settings reach 90%", plan.reason)

    @parameterized.parameters((300, 12, 180, 2), (150, 1, 98, 1))
    def test_recommends_what_the_strategy_accepts(self, max_delay, max_interval, delay, interval):
        """Against a latency of 200 steps: at p = 1, D = 180 would be enough, with too many windows in flight."""
        network = timing.NetworkCosts(latency_seconds=100 * 0.31, seconds_per_byte=0.0)
        limits = {"max_delay": max_delay, "max_interval": max_interval, "codec_names": ("identity",)}
        plan = timing.recommend_dts(network, _STEP, world_size=4, num_bytes=1e7, **limits)
        self.assertEqual((plan.delay, plan.interval), (delay, interval))
        hop_tf.DTSStrategy(delay=plan.delay, interval=plan.interval)

    def test_no_smaller_settings_reach_the_target(self):
        random = np.random.default_rng(0)
        for _ in range(20):
            network = timing.NetworkCosts(
                latency_seconds=10.0 ** random.uniform(-3, 0), seconds_per_byte=10.0 ** random.uniform(-10, -7)
            )
            arguments = {"world_size": int(random.integers(2, 17)), "num_bytes": 1e7}
            best = timing.recommend_dts(network, _STEP, target_efficiency=0.8, **arguments)
            names = ["identity", "int8", "top_k"]
            earlier = names[: names.index(best.codec)]
            smaller = [
                (delay, interval)
                for delay, interval in itertools.product(range(21), range(1, 13))
                if delay + interval < best.delay + best.interval
            ]
            others = [*itertools.product(earlier, [(20, 12)]), *itertools.product([best.codec], smaller)]
            for codec, (delay, interval) in others:
                other = timing.predict_dts(network, _STEP, codec=codec, delay=delay, interval=interval, **arguments)
                self.assertLess(other.scaling_efficiency, 0.8)

    @parameterized.parameters(
        (
            lambda: timing.predict_dts(_NETWORK, _STEP, world_size=2, num_bytes=1, interval=0),
            "`interval` must be an integer of at least 1",
        ),
        (
            lambda: timing.non_computing_seconds(compute_seconds=1.0, window_seconds=1.0, delay=-1),
            "`delay` must be an integer of at least 0",
        ),
        (
            lambda: timing.non_computing_seconds(compute_seconds=1.0, window_seconds=-1.0),
            "`window_seconds` must not be negative. Received: window_seconds=-1.0.",
        ),
        (
            lambda: timing.recommend_dts(_NETWORK, _STEP, world_size=2, num_bytes=1, target_efficiency=1.5),
            "`target_efficiency` must be above 0 and at most 1. Received: target_efficiency=1.5.",
        ),
        (
            lambda: timing.recommend_dts(_NETWORK, _STEP, world_size=2, num_bytes=1, max_interval=0),
            "`max_interval` must be an integer of at least 1",
        ),
    )
    def test_refuses(self, call, message):
        with self.assertRaisesRegex(ValueError, message):
            call()


if __name__ == "__main__":
    tf.test.main()

"""Schedules of ranks that are not alike: closed forms, and the papers' equations where they are alike."""

import itertools

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from hop_tf.tools import timing

_ALIKE = np.full((4, 96), 0.3)
_LINKS = timing.NetworkCosts(latency_seconds=0.05, seconds_per_byte=1e-7)
_STEP = timing.Step(forward_seconds=0.1, backward_seconds=0.2)


class LockStepTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.product(
        communication=(0.1, 0.3, 0.9), width=(1, 2, 4), num_segments=(1, 2, 4), algorithm=("mesh", "ring")
    )
    def test_pipe_sgd_in_closed_form(self, communication, width, num_segments, algorithm):
        links = timing.NetworkCosts(latency_seconds=0.0, seconds_per_byte=communication / 1.5e8)
        plan, scheduled = (
            timing.predict(
                links,
                _STEP,
                world_size=4,
                num_bytes=1e8,
                pipeline_width=width,
                num_segments=num_segments,
                algorithm=algorithm,
                durations=durations,
            )
            for durations in (None, _ALIKE)
        )
        self.assertAllClose(plan.communication_seconds, communication)
        self.assertAllClose(scheduled.step_seconds, plan.step_seconds, rtol=1e-6)

    @parameterized.parameters(*itertools.product((0, 1, 2, 4, 5, 20), (1, 4, 12)))
    def test_table_1(self, delay, interval):
        """In the long run. A schedule that has settled repeats itself after 840 steps with any of these settings."""
        for latency, sending in itertools.product((0.0, 0.25, 2.0), (0.0, 0.2, 1.0, 2.5, 6.0)):
            links = timing.NetworkCosts(latency_seconds=latency, seconds_per_byte=sending / 1e8)
            plan = timing.predict_dts(
                links, _STEP, world_size=2, num_bytes=1e8, delay=delay, interval=interval, quick=True
            )
            self.assertAllClose(plan.window_seconds, latency + sending)
            self.assertAllClose(plan.scaling_efficiency, _STEP.seconds / plan.step_seconds)
            found = timing.lock_step_seconds(
                np.full((1, 1680), _STEP.seconds),
                delay=delay,
                interval=interval,
                sending_seconds=sending,
                latency_seconds=latency,
            )
            self.assertAllClose(found, plan.step_seconds, rtol=1e-6)

    def test_one_that_is_always_slow_decides(self):
        durations = _ALIKE * np.array([1, 1, 1, 4])[:, np.newaxis]
        for delay, interval in ((0, 1), (1, 1), (4, 4)):
            found = timing.lock_step_seconds(durations, delay=delay, interval=interval)
            self.assertAllClose(found, 1.2)

    def test_the_slowest_of_each_step_decides(self):
        durations = np.random.default_rng(0).exponential(size=(4, 100))
        expected = durations.max(axis=0)[50:].mean() + 0.1
        self.assertAllClose(timing.lock_step_seconds(durations, sending_seconds=0.1), expected)

    @parameterized.product(num_steps=(1, 2, 3), interval=(1, 4))
    def test_few_steps(self, num_steps, interval):
        self.assertAllClose(timing.lock_step_seconds(_ALIKE[:, :num_steps], interval=interval), 0.3)

    def test_delays_smooth_what_is_slow_now_and_then(self):
        durations = np.random.default_rng(0).exponential(size=(4, 400))
        found = [timing.lock_step_seconds(durations, delay=delay) for delay in (0, 1, 4, 20)]
        self.assertAllEqual(found, sorted(found, reverse=True))
        self.assertGreater(found[-1], durations[:, 200:].mean() * 0.95)
        self.assertLess(found[-1], 0.75 * found[0])


class FreeRunningTest(tf.test.TestCase, parameterized.TestCase):
    def test_nobody_waits_for_a_slow_rank(self):
        """Three ranks make all steps, and the slow one every fourth one."""
        durations = _ALIKE * np.array([1, 1, 1, 4])[:, np.newaxis]
        step, share = timing.free_running_seconds(durations)
        self.assertAllClose((step, share), (0.3, (3 + 1 / 4) / 4), rtol=0.01)

    def test_all_train_on_all_where_they_are_alike(self):
        found = timing.free_running_seconds(_ALIKE, latency_seconds=0.2, pushing_seconds=0.1, sum_seconds=0.1)
        self.assertAllClose(found, (0.3, 1.0))

    @parameterized.parameters(2, 4)
    def test_links_bind(self, max_in_flight):
        """Bytes leave one after the other. Merges take long, and `max_in_flight` iterations are in flight."""
        links = {"pushing_seconds": 0.3, "sum_seconds": 0.4}
        found = timing.free_running_seconds(_ALIKE, max_in_flight=max_in_flight, **links)
        self.assertAllClose(found, (0.7, 1.0), rtol=0.02)
        found = timing.free_running_seconds(_ALIKE, max_in_flight=max_in_flight, latency_seconds=1.5)
        self.assertAllClose(found, (3.0 / max_in_flight, 1.0), rtol=0.02)


def _exact_cycle(num_workers, apart, demands):
    """Mean value analysis of workers that are alike, worker by worker."""
    queues = np.zeros(len(demands))
    for number in range(1, num_workers + 1):
        waits = np.array(demands) * (1 + queues)
        cycle = apart + waits.sum()
        queues = number * waits / cycle
    return cycle


class ServerTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters((1, 1), (2, 1), (4, 1), (4, 2), (16, 1), (16, 8))
    def test_workers_share_the_servers(self, num_workers, num_servers):
        found = timing.server_seconds(
            np.full((num_workers, 5), 0.3),
            num_servers=num_servers,
            pushing_seconds=0.2,
            answering_seconds=0.3,
            round_trip_seconds=0.05,
        )
        apart = 0.35 + 0.5 * (1 - 1 / num_servers)
        expected = _exact_cycle(num_workers, apart, (0.2 / num_servers, 0.3 / num_servers))
        self.assertAllClose(found, expected, rtol=0.05)
        # Neither faster than a server's busiest link, nor slower than if all pushed together.
        at_least, at_most = max(0.85, 0.3 * num_workers / num_servers), 0.35 + 0.5 * num_workers
        self.assertBetween(found, 0.999 * at_least, 1.001 * at_most)

    def test_a_slow_worker_pushes_less(self):
        durations = _ALIKE * np.array([1, 1, 1, 4])[:, np.newaxis]
        found = timing.server_seconds(durations, num_servers=4, pushing_seconds=0, answering_seconds=0)
        self.assertAllClose(found, 4 / (3 / 0.3 + 1 / 1.2))


class MeasurementTest(tf.test.TestCase):
    def _make(self, rank_seconds):
        return timing.Measurement(
            world_size=2,
            num_bytes=1000,
            network=_LINKS,
            step=_STEP,
            codec_seconds_per_byte={},
            rank_seconds=rank_seconds,
        )

    def test_draws_what_was_measured_together(self):
        durations = self._make(((1.0, 2.0, 3.0), (10.0, 20.0, 30.0))).durations(7)
        self.assertAllEqual(durations[1], 10 * durations[0])
        self.assertEqual(sorted(durations[0, :3]), [1, 2, 3])
        self.assertEqual(sorted(durations[0, 3:6]), [1, 2, 3])

    def test_a_typical_step(self):
        """Of two ranks the faster one's; its median step takes twice as long as the step that is scaled."""
        uneven = self._make(((0.5, 0.6, 9.0), (1.2, 0.9, 1.2)))
        self.assertAllClose(uneven.slowness, (1, 2))
        step = uneven.typical_step
        self.assertAllClose((step.forward_seconds, step.backward_seconds), (0.2, 0.4))
        self.assertEqual(self._make(()).typical_step, _STEP)
        self.assertAllEqual(self._make(()).durations(3), np.full((2, 3), _STEP.seconds))

    def test_refuses(self):
        for rank_seconds in (((1.0,),), ((1.0,), (1.0, 2.0)), ((), ())):
            with self.assertRaisesRegex(ValueError, "`rank_seconds` must be as many steps of each"):
                self._make(rank_seconds)


class RefusalTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        (timing.lock_step_seconds, {"delay": -1}, "`delay` must"),
        (timing.lock_step_seconds, {"interval": 0}, "`interval` must"),
        (timing.lock_step_seconds, {"sending_seconds": -1.0}, "`sending_seconds` must"),
        (timing.lock_step_seconds, {"num_turns": 0}, "`num_turns` must"),
        (timing.free_running_seconds, {"max_in_flight": 0}, "`max_in_flight` must"),
        (timing.free_running_seconds, {"sum_seconds": -1.0}, "`sum_seconds` must"),
        (timing.server_seconds, {"num_servers": 0, "pushing_seconds": 0, "answering_seconds": 0}, "`num_servers` must"),
    )
    def test_refuses(self, function, arguments, message):
        with self.assertRaisesRegex(ValueError, message):
            function(_ALIKE, **arguments)

    @parameterized.parameters(
        (timing.lock_step_seconds, {}),
        (timing.free_running_seconds, {}),
        (timing.server_seconds, {"num_servers": 1, "pushing_seconds": 0, "answering_seconds": 0}),
    )
    def test_refuses_no_steps(self, function, arguments):
        with self.assertRaisesRegex(ValueError, r"at least one rank and one step. Received: .* shape \(4, 0\)"):
            function(_ALIKE[:, :0], **arguments)


if __name__ == "__main__":
    tf.test.main()

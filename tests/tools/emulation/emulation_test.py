"""Tests of emulated compute."""

from __future__ import annotations

import itertools
import os
import random
import tempfile

from absl.testing import absltest, parameterized

from hop_tf.tools.emulation import ComputeEmulation, Slowdown, StepTimes, read_step_times


class SlowdownTest(parameterized.TestCase):
    @parameterized.parameters(
        ("3:4x", Slowdown(3, 4.0), "3:4x"),
        ("0:1.5x", Slowdown(0, 1.5), "0:1.5x"),
        ("random:6x", Slowdown(None, 6.0), "random:6x"),
    )
    def test_parses_and_formats(self, text, slowdown, formatted):
        self.assertEqual(Slowdown.parse(text), slowdown)
        self.assertEqual(str(slowdown), formatted)

    @parameterized.parameters("", "3", "3:4", "3:x", "-1:4x", "some:4x", "3:4x,", "3:nanx", " 3:4x")
    def test_refuses_other_text(self, text):
        with self.assertRaisesRegex(ValueError, "`slowdown` must be .* Received: slowdown="):
            Slowdown.parse(text)

    @parameterized.parameters("3:0.5x", "random:0x", f"1:{'9' * 400}x")
    def test_refuses_factors_out_of_range(self, text):
        with self.assertRaisesRegex(ValueError, "`factor` must be"):
            Slowdown.parse(text)


class ComputeEmulationTest(parameterized.TestCase):
    def test_slow_rank(self):
        emulation = ComputeEmulation(step_seconds=0.1, slowdowns=(Slowdown(3, 4.0),))
        self.assertEqual(_first(emulation.step_durations(3, 4), 3), [0.4, 0.4, 0.4])
        self.assertEqual(_first(emulation.step_durations(2, 4), 3), [0.1, 0.1, 0.1])

    def test_random_slowdown_has_probability_one_in_world_size(self):
        emulation = ComputeEmulation(step_seconds=1.0, slowdowns=(Slowdown(None, 6.0),), seed=1)
        steps = [step for rank in range(16) for step in _first(emulation.step_durations(rank, 16), 10_000)]
        self.assertEqual(set(steps), {1.0, 6.0})
        # 160,000 draws: the standard deviation of the frequency is 0.0006.
        self.assertAlmostEqual(steps.count(6.0) / len(steps), 1 / 16, delta=0.004)

    def test_slow_rank_and_random_slowdown_multiply(self):
        emulation = ComputeEmulation(step_seconds=1.0, slowdowns=(Slowdown(1, 4.0), Slowdown(None, 6.0)))
        self.assertEqual(set(_first(emulation.step_durations(1, 2), 100)), {4.0, 24.0})

    def test_draws_depend_on_seed_and_rank_only(self):
        def draw(seed, rank):
            emulation = ComputeEmulation(step_seconds=1.0, slowdowns=(Slowdown(None, 6.0),), seed=seed)
            return _first(emulation.step_durations(rank, 2), 100)

        expected = draw(7, 0)
        random.seed(123)
        self.assertEqual(draw(7, 0), expected)
        self.assertNotEqual(draw(8, 0), expected)
        self.assertNotEqual(draw(7, 1), expected)

    def test_goes_through_the_environment(self):
        emulation = ComputeEmulation(
            step_seconds=0.1 + 0.2, slowdowns=(Slowdown(3, 1 / 0.3), Slowdown(None, 6.0)), seed=-5
        )
        environment = emulation.to_environment()
        self.assertEqual(ComputeEmulation.from_environment(environment), emulation)

    def test_empty_environment_means_no_emulation(self):
        self.assertIsNone(ComputeEmulation.from_environment({}))

    @parameterized.parameters(0.0, -1.0, float("nan"), float("inf"))
    def test_refuses_step_seconds(self, step_seconds):
        with self.assertRaisesRegex(ValueError, "`step_seconds` must be a positive number"):
            ComputeEmulation(step_seconds=step_seconds)

    @parameterized.parameters((("3:4x", "3:5x"),), (("random:4x", "random:5x"),))
    def test_refuses_a_slowdown_given_twice(self, texts):
        with self.assertRaisesRegex(ValueError, "once per rank"):
            ComputeEmulation(step_seconds=1.0, slowdowns=tuple(map(Slowdown.parse, texts)))

    def test_refuses_ranks_that_do_not_exist(self):
        emulation = ComputeEmulation(step_seconds=1.0, slowdowns=(Slowdown(4, 2.0),))
        with self.assertRaisesRegex(ValueError, "below the number of workers, 4. Received: slowdown=4:2x"):
            emulation.step_durations(0, 4)
        with self.assertRaisesRegex(ValueError, r"`rank` must be in \[0, 5\). Received: rank=5"):
            emulation.step_durations(5, 5)


class StepTimesTest(absltest.TestCase):
    def test_reads_the_first_and_the_last_step_of_all_processes(self):
        directory = self.enter_context(tempfile.TemporaryDirectory())
        paths = [os.path.join(directory, name) for name in ("a", "b", "empty", "missing")]
        records = [StepTimes(path) for path in paths[:3]]
        for record in (records[0], records[1], records[0], records[1]):
            record.mark()
        for record in records:
            record.close()
        (first_a, _), (first_b, last_b) = read_step_times(paths[:1]), read_step_times(paths[1:2])
        self.assertLessEqual(first_a, first_b)
        self.assertLess(first_b, last_b)
        self.assertEqual(read_step_times(paths), (first_a, last_b))

    def test_without_steps_there_are_no_times(self):
        self.assertIsNone(read_step_times(["/nowhere"]))

    def test_environment_asks_for_it(self):
        path = os.path.join(self.enter_context(tempfile.TemporaryDirectory()), "times")
        self.assertIsNone(StepTimes.from_environment({}))
        record = StepTimes.from_environment({"HOP_TF_STEP_TIMES_PATH": path})
        record.mark()
        record.close()
        self.assertIsNotNone(read_step_times([path]))


def _first(durations, count):
    return list(itertools.islice(durations, count))


if __name__ == "__main__":
    absltest.main()

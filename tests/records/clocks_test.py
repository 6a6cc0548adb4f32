"""Tests of converting the times of several clocks to those of one."""

import math

import numpy as np
from absl.testing import absltest

from hop_tf.records.clocks import Clocks, Sample, offset_of


class ClocksTest(absltest.TestCase):
    def test_the_middle_of_a_round_trip(self):
        """There it is 5 s later; the heartbeat took 0.1 s, and so did its answer: sent at 10, read at 15.1 there."""
        self.assertAlmostEqual(offset_of(15.1, received_at=10.2, round_trip_seconds=0.2), 5.0)

    def test_an_uneven_way_is_wrong_by_half_of_the_round_trip_at_most(self):
        for there in (0.0, 0.05, 0.2):
            self.assertLessEqual(abs(offset_of(15.0 + there, 10.2, 0.2) - 5.0), 0.1 + 1e-9)

    def test_one_clock_needs_no_samples(self):
        clocks = Clocks({0: "a", 1: "a"}, {(0, 1): [Sample(0.0, 3.0, 0.1)]})  # A heartbeat's estimate is worse.
        np.testing.assert_array_equal(clocks.align(1, np.array([7.0])), [7.0])
        self.assertEqual(clocks.errors, {"a": 0.0})

    def test_the_shortest_round_trips_count(self):
        samples = [Sample(10.0, 5.0, 0.1), Sample(20.0, 9.0, 0.9), Sample(30.0, 5.2, 0.11)]
        clocks = Clocks({0: "a", 1: "b"}, {(0, 1): samples})
        # At a's 20 s, b is 5.1 s ahead.
        np.testing.assert_allclose(clocks.align(1, np.array([25.1])), [20.0], atol=0.02)
        self.assertAlmostEqual(clocks.errors["b"], 0.05)

    def test_clocks_that_drift(self):
        """The other clock runs 100 millionths fast; both sides have sent heartbeats."""
        there = [Sample(t, 1e-4 * t, 0.001) for t in (0.0, 1000.0)]
        back = [Sample(500.05, -0.05, 0.001)]
        clocks = Clocks({0: "a", 1: "b"}, {(0, 1): there, (1, 0): back})
        times = np.array([0.0, 250.0, 500.0, 1000.0])
        np.testing.assert_allclose(clocks.align(1, times * (1 + 1e-4)), times, atol=1e-4)

    def test_a_clock_that_others_know(self):
        names = {0: "a", 1: "b", 2: "c"}
        samples = {(0, 1): [Sample(0.0, 1.0, 0.2)], (1, 2): [Sample(0.0, 10.0, 0.4)]}
        clocks = Clocks(names, samples)
        np.testing.assert_allclose(clocks.align(2, np.array([111.0])), [100.0])
        self.assertAlmostEqual(clocks.errors["c"], 0.3)

    def test_a_clock_that_nobody_knows_is_as_it_is(self):
        clocks = Clocks({0: "a", 1: "b"}, {})
        np.testing.assert_array_equal(clocks.align(1, np.array([7.0])), [7.0])
        self.assertEqual(clocks.errors["b"], math.inf)


if __name__ == "__main__":
    absltest.main()

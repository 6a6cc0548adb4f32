"""The gradient exchange index: the paper's example, and its invariants in random schedules.

`HOP_TF_NUM_SCHEDULES` is the number of random schedules.
"""

import itertools
import os

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from hop_tf.strategies.canary import gei

_NUM_SCHEDULES = int(os.environ.get("HOP_TF_NUM_SCHEDULES", "200"))


class RowVectorTest(tf.test.TestCase, parameterized.TestCase):
    def test_figure_16(self):
        """r[6] of worker 4 is 233: workers 1, 4, 6, 7 and 8 have exchanged it."""
        self.assertEqual(sum(gei.bit_of(worker - 1) for worker in (1, 4, 6, 7, 8)), 0b11101001)
        matrix = gei.GEIMatrix(world_size=8, num_colayers=7)
        for worker in (7, 1, 8, 4, 6):
            matrix.merge(worker - 1, iteration=0, colayer=6)
        self.assertEqual(matrix.row_vector(0), (0, 0, 0, 0, 0, 0, 233))
        self.assertEqual(matrix.proportion(0, rank=3), 1)
        self.assertEqual(matrix.proportion(0, rank=1), 0)

    def test_a_bit_takes_all_pieces(self):
        matrix = gei.GEIMatrix(world_size=2, num_colayers=1)
        for _ in range(3):
            self.assertEqual(matrix.row_vector(0), (0,))
            matrix.merge(1, 0, colayer=0, num_pieces=3)
        self.assertEqual(matrix.row_vector(0), (0b10,))

    def test_rows_are_freed_when_all_have_completed_a_later_one(self):
        matrix = gei.GEIMatrix(world_size=2, num_colayers=1)
        for iteration in range(4):
            matrix.merge(0, iteration, 0)
        self.assertEqual(list(matrix.matrix()), [0, 1, 2, 3])
        matrix.merge(1, 2, 0)  # Rank 1 has skipped two iterations.
        self.assertEqual(matrix.matrix(), {2: (0b11,), 3: (0b01,)})
        self.assertEqual(matrix.row_vector(1), (0,))
        matrix.exclude(1)
        self.assertEqual(matrix.matrix(), {3: (0b01,)})

    def test_a_rank_that_is_stuck_keeps_no_more_rows_than_there_may_be(self):
        matrix = gei.GEIMatrix(world_size=2, num_colayers=2, max_rows=5)
        for iteration in range(100):
            matrix.start(iteration)
            self.assertLessEqual(len(matrix), 5)
        self.assertEqual(matrix.newest, 99)
        matrix.merge(1, 3, 0)  # The row of iteration 3 was freed.
        self.assertEqual(matrix.row_vector(3), (0, 0))
        matrix.start(10**18)  # Makes no rows that would be freed at once.
        self.assertLen(matrix, 5)


class AbsorbTest(tf.test.TestCase):
    def test_who_has_completed_what(self):
        """Completed iterations free the same rows in both matrices, also after `absorb`."""
        own, other = (gei.GEIMatrix(2, 1) for _ in range(2))
        for iteration in range(6):
            for rank in range(2):
                other.merge(rank, iteration, 0)
        own.merge(0, 0, 0)
        own.absorb(other.snapshot())
        self.assertEqual([own.completed(rank) for rank in range(2)], [5, 5])
        self.assertEqual(own.matrix(), other.matrix())
        own.merge(0, 7, 0)
        other.merge(0, 7, 0)
        self.assertEqual(own.matrix(), other.matrix())


class ThresholdsTest(tf.test.TestCase, parameterized.TestCase):
    def test_pseudocode_1(self):
        self.assertEqual(gei.calc_staleness(newest=20, iteration=3), 17)
        self.assertEqual(gei.calc_proportion([0b11, 0b10, 0b01], rank=1), 2)
        self.assertTrue(gei.check_staleness(16, 16))
        self.assertFalse(gei.check_staleness(17, 16))
        self.assertTrue(gei.check_proportion(2, 2))
        self.assertFalse(gei.check_proportion(1, 2))

    @parameterized.parameters(
        (16, 0, 10, False), (17, 0, 10, True), (17, 9, 10, True), (17, 10, 10, False), (1000, 0, 0, False)
    )
    def test_overtime(self, staleness, proportion, min_colayers, expected):
        thresholds = gei.Thresholds(max_staleness=16, min_colayers=min_colayers)
        self.assertEqual(thresholds.is_overtime(staleness, proportion), expected)

    @parameterized.parameters(("max_staleness", -1), ("min_colayers", 1.5))
    def test_invalid(self, name, value):
        arguments = {"max_staleness": 1, "min_colayers": 1, name: value}
        with self.assertRaisesRegex(ValueError, f"`{name}` must be an integer of at least 0. Received: {name}="):
            gei.Thresholds(**arguments)


class InvariantsTest(tf.test.TestCase):
    def test_random_schedules(self):
        """Pieces of one rank and place come in order, all others in any order. Ranks skip iterations.

        Ranks end, also before their last pieces have come, and join again.
        """
        for seed in range(_NUM_SCHEDULES):
            self._check(np.random.default_rng([9, seed]), f"seed {seed}")

    def _check(self, rng, seed):
        n, k, num_places, max_rows = (int(rng.integers(low, 5)) for low in (1, 1, 1, 2))
        matrix = gei.GEIMatrix(n, k, max_rows)
        lanes = {}
        for rank in range(n):
            made = np.flatnonzero(rng.random(8) < 0.8)
            for place in range(num_places):
                lanes[rank, place] = [(int(i), z) for i in made for z in range(k)]
        merged, counting = set(), set(range(n))
        while lanes:
            if rng.random() < 0.1:
                ends = rng.random() < 0.6
                changed = int(rng.integers(n))
                (matrix.exclude if ends else matrix.include)(changed)
                (counting.discard if ends else counting.add)(changed)
            rank, place = key = list(lanes)[rng.integers(len(lanes))]
            if not lanes[key]:
                del lanes[key]
                continue
            iteration, colayer = lanes[key].pop(0)
            matrix.merge(rank, iteration, colayer, num_places)
            merged.add((rank, iteration, colayer, place))
            assert len(matrix) <= max_rows, seed
            slowest = min((matrix.completed(each) for each in counting), default=matrix.newest)
            assert all(row >= slowest for row in matrix.matrix()), seed
            # Checks the row of the latest bit each time, and all rows only now and then, because that takes long.
            rows = matrix.matrix() if rng.random() < 0.1 else {iteration: matrix.row_vector(iteration)}
            for row, elements in rows.items():
                for r, z in itertools.product(range(n), range(k)) if row in matrix.matrix() else ():
                    is_whole = all((r, row, z, p) in merged for p in range(num_places))
                    assert bool(elements[z] & gei.bit_of(r)) == is_whole, seed
        assert matrix.newest == max((i for _, i, _, _ in merged), default=-1), seed


if __name__ == "__main__":
    tf.test.main()

"""Tests of dividing a global batch in proportion to shares."""

import fractions

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from hop_tf.arguments import checked_batch_shares, describe_batch_shares
from hop_tf.keras_hook.data import shard_by_policy, slice_global_batches
from hop_tf.keras_hook.shares import AUTO, BatchShares


def _slices(num_rows, shares):
    """The slice of each rank."""
    world_size = len(shares)
    num_rows = tf.constant(num_rows, tf.int64)
    return [tuple(map(int, BatchShares(shares, rank, world_size).slice_of(num_rows))) for rank in range(world_size)]


class BatchSharesTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        (100, [3, 1], [75, 25]),
        (37, [3, 1], [27, 10]),
        (10, [7, 3], [7, 3]),
        (4, [100, 1, 1, 1], [1, 1, 1, 1]),  # Each has one at least.
        (6, [1, 1, 1000], [1, 1, 4]),
        (6, [1000, 1, 1], [4, 1, 1]),
        (9, [1, 500, 1, 500], [1, 3, 1, 4]),
        (1 << 30, [(1 << 31) - 1, 1], [(1 << 30) - 1, 1]),
    )
    def test_number_of_rows(self, num_rows, shares, expected):
        self.assertEqual([end - start for start, end in _slices(num_rows, shares)], expected)

    def test_every_row_is_in_one_slice_that_is_in_proportion(self):
        random = np.random.default_rng(0)
        for _ in range(40):
            shares = random.integers(1, random.choice([3, 30, 1000]), random.integers(1, 6)).tolist()
            num_rows = int(random.integers(len(shares), 60))
            slices = _slices(num_rows, shares)
            self.assertEqual([start for start, _ in slices] + [num_rows], [0] + [end for _, end in slices])
            for (start, end), share in zip(slices, shares, strict=True):
                self.assertGreaterEqual(end - start, 1)
                exact = fractions.Fraction(num_rows * share, sum(shares))
                self.assertLess(abs(end - start - exact), len(shares))
                if num_rows * min(shares) >= sum(shares):  # No rank gets another rank's row.
                    self.assertLess(abs(end - start - exact), 1)

    @parameterized.parameters(2, 8)
    @pytest.mark.stress(but=2)
    def test_equal_shares_are_the_slices_without_shares(self, num_rows):
        dataset = tf.data.Dataset.range(num_rows).batch(num_rows)
        for rank in range(3):
            (expected,) = slice_global_batches(dataset, rank, 3)
            (found,) = slice_global_batches(dataset, rank, 3, shares=BatchShares([1, 1, 1], rank, 3))
            self.assertAllEqual(found, expected)

    def test_shares_that_change_count_for_the_next_batch(self):
        """Also where the user's dataset runs ahead, and TensorFlow may want to."""
        options = tf.data.Options()
        options.autotune.enabled = True
        dataset = tf.data.Dataset.range(80).map(lambda x: x, num_parallel_calls=4).batch(8).prefetch(4)
        dataset = dataset.with_options(options)
        shares = [BatchShares(AUTO, rank, 2) for rank in range(2)]
        ranks = [iter(slice_global_batches(dataset, rank, 2, shares=shares[rank])) for rank in range(2)]
        sizes = []
        for step in range(10):
            if step == 4:
                for each in shares:
                    each.assign([3, 1])
            parts = [next(rank) for rank in ranks]
            sizes.append([len(part) for part in parts])
            self.assertAllEqual(tf.concat(parts, axis=0), np.arange(8 * step, 8 * step + 8))
        self.assertEqual(sizes, [[4, 4]] * 4 + [[6, 2]] * 6)

    def test_batches_of_one_size_where_ranks_read_everything(self):
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
        dataset = tf.data.Dataset.range(30).batch(10).with_options(options)
        parts = list(shard_by_policy(dataset, 0, 2, BatchShares([4, 1], 0, 2)))
        self.assertEqual([len(part) for part in parts], [8, 8, 8, 6])

    @parameterized.parameters(("FILE", [3, 1]), ("FILE", AUTO), ("OFF", AUTO))
    def test_ranks_that_read_parts_of_their_own_are_refused(self, policy, given):
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = getattr(tf.data.experimental.AutoShardPolicy, policy)
        dataset = tf.data.Dataset.range(30).batch(10).with_options(options)
        with self.assertRaisesRegex(ValueError, "`batch_shares` must be None with this AutoShardPolicy"):
            shard_by_policy(dataset, 0, 2, BatchShares(given, 0, 2))

    def test_parts(self):
        shares = BatchShares([3, 2, 1], 1, 3)
        self.assertEqual(shares.part_of(range(3)), 1 / 3)
        self.assertEqual(shares.part_of([1, 2]), 2 / 3)
        self.assertEqual(shares.total_part([0, 2]), 2 / 3)


class ArgumentTest(parameterized.TestCase):
    @parameterized.parameters(
        (None, None),
        ("auto", "auto"),
        ([6, 2], (3, 1)),
        ((0.7, 0.3), (7, 3)),
        (np.array([0.5, 1.5]), (1, 3)),
        ([np.float32(1), 1], (1, 1)),
        ([fractions.Fraction(1, 2), 0.25], (2, 1)),
    )
    def test_whole_numbers(self, value, expected):
        self.assertEqual(checked_batch_shares(value, 2), expected)

    def test_any_proportions_fit_an_integer(self):
        small, large = checked_batch_shares([1e-300, 1e300], 2)
        self.assertEqual(small, 1)
        self.assertLess(large, 1 << 31)
        first, second = checked_batch_shares([np.pi, np.e], 2)
        self.assertAlmostEqual(first / second, np.pi / np.e, places=8)

    @parameterized.parameters(
        ([1, -1],),
        ([0, 1],),
        ([float("nan"), 1],),
        ([float("inf"), 1],),
        ([True, 1],),
        ([1, "2"],),
        ([[3, 1], [1, 3]],),
        (np.ones((2, 2)),),
        ("fast",),
        ("31",),
        (3,),
        ([],),
        ({0: 3, 1: 1},),
    )
    def test_what_is_no_list_of_shares(self, value):
        with self.assertRaisesRegex(ValueError, r"`batch_shares` must be a list with a positive, finite number .*Rec"):
            checked_batch_shares(value, 2)

    @parameterized.parameters(([1],), ([1, 2, 3],))
    def test_a_list_for_another_number_of_ranks(self, value):
        with self.assertRaisesRegex(ValueError, r"must have one number for each of the 2 ranks.*Received"):
            checked_batch_shares(value, 2)
        self.assertEqual(checked_batch_shares(value, 1), (1,))  # A script that is tried out alone.

    def test_what_ranks_compare_is_short(self):
        many = checked_batch_shares(range(1, 1001), 1000)
        self.assertLess(len(describe_batch_shares(many)), 100)
        self.assertNotEqual(describe_batch_shares(many), describe_batch_shares(many[::-1]))
        self.assertEqual(describe_batch_shares((3, 1)), "(3, 1)")


if __name__ == "__main__":
    tf.test.main()

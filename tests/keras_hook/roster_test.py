"""Tests of the rows that a rank takes, for any set of ranks that share a batch."""

import itertools

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from hop_tf.keras_hook.data import DataSharding, slice_global_batches
from hop_tf.keras_hook.roster import Roster
from hop_tf.keras_hook.shares import AUTO, BatchShares

_NUM_RANKS = 4
_EVERYBODY = set(range(_NUM_RANKS))


def _roster(rank, shares=None):
    roster = Roster(rank, _NUM_RANKS, None if shares is None else BatchShares(shares, rank, _NUM_RANKS))
    roster.use(True)
    return roster


def _sharding(roster, rank, slices_in_step=True):
    return DataSharding(
        rank, _NUM_RANKS, lambda digest: None, roster._shares, roster=roster, slices_in_step=slices_in_step
    )


def _subsets():
    ranks = range(_NUM_RANKS)
    return [set(each) for size in range(1, _NUM_RANKS + 1) for each in itertools.combinations(ranks, size)]


class RosterTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(None, [[5, 1, 2, 40]], [[1, 1, 1, 1]])
    @pytest.mark.stress(but=3)
    def test_each_row_is_in_one_slice_of_the_ranks_that_are_there(self, shares):
        """Whichever these are, and however many rows there are: contiguous slices, in proportion to the shares."""
        rosters = [_roster(rank, shares) for rank in range(_NUM_RANKS)]
        slice_of = [tf.function(roster.slice_of) for roster in rosters]
        of_ranks = np.array(shares or [1] * _NUM_RANKS)
        for present in _subsets():
            for roster in rosters:
                roster.note_missing(_EVERYBODY - present)
            there = sorted(present)
            parts = of_ranks[there] / of_ranks[there].sum()
            for num_rows in (1, 2, 3, 4, 5, 7, 12, 97):
                slices = [tuple(map(int, slice_of[rank](tf.constant(num_rows, tf.int64)))) for rank in there]
                sizes = np.array([end - start for start, end in slices])
                self.assertAllGreaterEqual(sizes, 1)
                if num_rows < len(there):  # Some rows are in two slices.
                    self.assertEqual({row for each in slices for row in range(*each)}, set(range(num_rows)))
                    continue
                self.assertEqual([start for start, _ in slices] + [num_rows], [0] + [end for _, end in slices])
                self.assertAllLess(np.abs(sizes - num_rows * parts), len(there))

    def test_shares_that_are_equal_are_no_shares(self):
        for present, rank in itertools.product(_subsets(), range(_NUM_RANKS)):
            if rank in present:
                slices = []
                for shares in (None, [3] * _NUM_RANKS):
                    roster = _roster(rank, shares)
                    roster.note_missing(_EVERYBODY - present)
                    slices.append([int(each) for each in roster.slice_of(tf.constant(11, tf.int64))])
                self.assertEqual(*slices)

    def test_shares_that_change_count_among_those_that_are_there(self):
        shares = BatchShares(AUTO, 0, _NUM_RANKS)
        roster = Roster(0, _NUM_RANKS, shares)
        roster.use(True)
        shares.assign([1, 100, 2, 1])
        roster.note_missing({1})
        self.assertAllEqual(roster.slice_of(tf.constant(8, tf.int64)), (0, 2))
        self.assertAllClose(roster.growth(), 104 / 4)

    def test_follows_a_mean_unless_it_is_nobodys(self):
        roster = _roster(2)
        roster.follow(tf.constant([False, True, True, False]))
        self.assertEqual(roster.present, [0, 1, 1, 0])
        roster.follow(tf.constant([False] * 4))
        self.assertEqual(roster.present, [0, 1, 1, 0])
        self.assertAllEqual(roster.slice_of(tf.constant(8, tf.int64)), (4, 8))
        self.assertAllClose(roster.growth(), 2)
        roster.admit([0, 3])
        self.assertEqual(roster.present, [1, 1, 1, 1])
        roster.note_missing({1})
        roster.begin_session()
        self.assertEqual(roster.present, [1, 1, 1, 1])


class OwnRowsTest(tf.test.TestCase, parameterized.TestCase):
    def test_what_is_sliced_in_the_step_is_what_tf_data_would_slice(self):
        """Also sparse and ragged tensors. What has no rows stays."""
        batch = {
            "dense": tf.reshape(tf.range(28), [7, 4]),
            "sparse": tf.sparse.from_dense(tf.linalg.diag(tf.range(1, 8))),
            "ragged": tf.RaggedTensor.from_row_lengths(tf.range(28), range(1, 8)),
        }
        dataset = tf.data.Dataset.from_tensors(batch)
        for rank in range(_NUM_RANKS):
            roster = Roster(rank, _NUM_RANKS)
            data = _sharding(roster, rank)
            data.begin_fit([])
            with data.keras_call():
                (whole,) = data.part_of(dataset)
            self.assertTrue(roster.is_in_use)
            self.assertAllEqual(whole["dense"], batch["dense"])
            (expected,) = slice_global_batches(dataset, rank, _NUM_RANKS)
            own, *others = data.own_rows((whole, None, tf.constant(3), "text"))
            self.assertEqual(others, [None, 3, "text"])
            self._check_equal(own, expected)

    def _check_equal(self, batch, expected):
        self.assertAllEqual(batch["dense"], expected["dense"])
        self.assertAllEqual(tf.sparse.to_dense(batch["sparse"]), tf.sparse.to_dense(expected["sparse"]))
        self.assertAllEqual(batch["ragged"], expected["ragged"])

    def test_data_that_are_a_rank_s_own_are_left_as_they_are(self):
        """Also where parts of a batch have other numbers of rows."""
        roster = Roster(1, _NUM_RANKS)
        data = _sharding(roster, 1)
        batch = {
            "dense": tf.range(3),
            "sparse": tf.sparse.from_dense(tf.linalg.diag(tf.range(1, 8))),
            "ragged": tf.RaggedTensor.from_row_lengths(tf.range(28), range(1, 8)),
        }
        dataset = tf.data.Dataset.from_tensors(batch)
        data.take_whole(dataset)
        data.begin_fit(dataset)
        with data.keras_call():
            (whole,) = data.part_of(dataset)
        self.assertFalse(roster.is_in_use)
        self._check_equal(data.own_rows(whole), batch)

    def test_a_fit_that_has_ended_leaves_batches_whole(self):
        roster = Roster(1, _NUM_RANKS)
        data = _sharding(roster, 1)
        data.begin_fit([])
        with data.keras_call():
            data.part_of(tf.data.Dataset.range(8).batch(8))
        self.assertLen(data.own_rows(tf.range(8)), 2)
        data.end_fit()
        self.assertLen(data.own_rows(tf.range(8)), 8)


class ReadAheadTest(tf.test.TestCase, parameterized.TestCase):
    """If each rank decides by its own knowledge, tf.data slices batches and the step takes them as they are."""

    def _sharded(self, roster, dataset, slices_in_step=False):
        data = _sharding(roster, 1, slices_in_step)
        data.begin_fit([])
        with data.keras_call():
            return data, data.part_of(dataset)

    @parameterized.parameters(None, [[1, 2, 1, 4]])
    def test_tf_data_slices_and_the_step_takes_what_it_gets(self, shares):
        roster = _roster(1, shares)
        data, part = self._sharded(roster, tf.data.Dataset.range(16).batch(8))
        own = next(iter(part))
        self.assertAllEqual(own, [2, 3] if shares is None else [1, 2])
        batch = (own, None)
        self.assertIs(data.own_rows(batch), batch)

    @parameterized.parameters(None, [[1, 2, 1, 4]])
    def test_a_change_counts_for_what_is_not_read_ahead(self, shares):
        """Only the few batches that are read ahead keep the old slice. Those sliced during the change have either."""
        roster = _roster(1, shares)
        _, part = self._sharded(roster, tf.data.Dataset.range(8 * 1000).batch(8))
        iterator = iter(part)
        places = [tuple(next(iterator).numpy() % 8)]
        roster.note_missing({0, 3})
        places += [tuple(each.numpy() % 8) for each in iterator]
        self.assertLen(places, 1000)
        old, new = ((2, 3), (0, 1, 2, 3)) if shares is None else ((1, 2), (0, 1, 2, 3, 4))
        self.assertEqual(places[0], old)
        self.assertEqual(set(places), {old, new})
        self.assertEqual(set(places[500:]), {new})

    def test_a_generator_and_automatic_shares_are_not_read_ahead(self):
        def generate():
            for _ in range(20):
                yield np.arange(8)

        generated = tf.data.Dataset.from_generator(generate, output_signature=tf.TensorSpec([8], tf.int64))
        for shares, dataset in ((AUTO, tf.data.Dataset.range(8 * 20).batch(8)), (None, generated)):
            roster = _roster(1, shares)
            iterator = iter(self._sharded(roster, dataset)[1])
            self.assertLen(next(iterator), 2)
            roster.note_missing({0, 3})
            self.assertLen(next(iterator), 4)

    @parameterized.parameters(False, True)
    def test_a_step_of_ranks_that_agree_slices(self, slices_in_step):
        _, part = self._sharded(_roster(1), tf.data.Dataset.range(8).batch(8), slices_in_step)
        self.assertLen(next(iter(part)), 8 if slices_in_step else 2)


if __name__ == "__main__":
    tf.test.main()

"""Tests that sums hold all that ranks have added, when ranks miss agreements, are lost, or join."""

import threading
from concurrent import futures

import numpy as np
import tensorflow as tf
from absl.testing import absltest, parameterized

import hop_tf
from hop_tf.errors import MismatchError
from hop_tf.keras_hook.ownership import states_of
from hop_tf.runtime.agreed_states import AgreedStates


class _Rank:
    """A process with a sum that begins at `start`."""

    def __init__(self, rank, start=0, dtype=tf.int64, joins=False):
        self.variable = hop_tf.state(tf.Variable(start, dtype=dtype), "sum")
        self._states = AgreedStates(rank)
        self.states = [each for each in states_of(None) if each.variable is self.variable]
        self._states.begin(self.states, joins=joins)

    def add(self, number):
        self.variable.assign_add(number)
        return self

    def take_over(self, other):
        self.variable.assign(other.variable)
        self._states.begin_here()

    def assign(self, value):
        """Assigns between two steps: earlier additions count before."""
        self._states.count_own()
        self.variable.assign(value)
        self._states.begin_anew()
        return self

    def agree(self, share):
        self._states.agree(self.states, share)


def _agree(*ranks):
    """Lets these ranks agree without the others; returns their values and the number of rounds."""
    barrier, told, num_rounds = threading.Barrier(len(ranks), timeout=30), {}, [0] * len(ranks)

    def run(index):
        def share(data):
            told[num_rounds[index], index] = data
            barrier.wait()
            num_rounds[index] += 1
            return [told[num_rounds[index] - 1, each] for each in range(len(ranks))]

        ranks[index].agree(share)

    with futures.ThreadPoolExecutor(len(ranks)) as pool:
        list(pool.map(run, range(len(ranks))))
    return [each.variable.numpy().tolist() for each in ranks], max(num_rounds)


class SumsTest(parameterized.TestCase):
    @parameterized.parameters(tf.int64, tf.uint8, tf.float32)
    def test_a_rank_misses_an_agreement(self, dtype):
        first, second, third = ranks = [_Rank(rank, 3, dtype).add(10 * 2**rank) for rank in range(3)]
        self.assertEqual(_agree(first, second), ([33, 33], 1))
        self.assertEqual(_agree(*ranks), ([73] * 3, 1))
        first.add(1), third.add(1)
        self.assertEqual(_agree(first, second), ([74, 74], 1))
        self.assertEqual(_agree(*ranks), ([75] * 3, 1))

    def test_ranks_know_different_contributions_of_one_that_is_away_or_lost(self):
        first, second, third = (_Rank(rank).add(2**rank) for rank in range(3))
        _agree(first, third)
        self.assertEqual(_agree(first, second), ([7, 7], 2))
        self.assertEqual(_agree(first, second), ([7, 7], 1))
        third.add(8)
        _agree(second, third)
        self.assertEqual(_agree(first, second), ([15, 15], 2))

    def test_random_agreements_of_floats_are_equal_to_the_bit(self):
        random = np.random.default_rng(0)
        for _ in range(10):
            ranks, added = [_Rank(rank, 0.0, tf.float64) for rank in range(4)], 0.0
            for _ in range(6):
                for each in ranks:
                    number = random.normal()
                    each.add(number)
                    added += number
                values, _ = _agree(*random.permutation(ranks)[: random.integers(1, 5)])
                self.assertLen(set(values), 1)
            values, _ = _agree(*ranks)
            self.assertLen(set(values), 1)
            np.testing.assert_allclose(values[0], added)

    def test_a_process_joins_in_place_of_a_lost_one(self):
        first, second, lost = (_Rank(rank, 100).add(1) for rank in range(3))
        self.assertEqual(_agree(first, second, lost), ([103] * 3, 1))
        first.add(1)
        newcomer = _Rank(2, 0, joins=True)
        newcomer.take_over(first)
        newcomer.add(5)
        self.assertEqual(_agree(first, second, newcomer), ([109] * 3, 2))
        self.assertEqual(_agree(first, second, newcomer), ([109] * 3, 1))

    def test_an_assignment_where_no_step_runs_is_what_all_begin_with(self):
        ranks = [_Rank(rank, 3).add(10).assign(5).add(2**rank) for rank in range(3)]
        self.assertEqual(_agree(*ranks), ([12] * 3, 2))
        self.assertEqual(_agree(*ranks), ([12] * 3, 1))
        for each in ranks:
            each.assign(0).assign(12)  # Back to what it was.
        self.assertEqual(_agree(*ranks), ([12] * 3, 2))
        for each in ranks:
            each.assign(0).add(1)
        self.assertEqual(_agree(*ranks[1:])[0], [2, 2])
        self.assertEqual(_agree(*ranks)[0], [3] * 3)

    @parameterized.parameters(tf.uint8, tf.float32)
    def test_unsigned_numbers_and_nan(self, dtype):
        value = float("nan") if dtype.is_floating else 200
        first, second = ranks = [_Rank(rank, 7, dtype).assign(value) for rank in range(2)]
        _agree(*ranks)
        self.assertEqual(_agree(first.assign(1).add(1), second.assign(1).add(2))[0], [4, 4])

    def test_different_assignments(self):
        """The newest generation of assignments counts, and in one generation that of the lowest rank."""
        first, second, third = ranks = [_Rank(rank) for rank in range(3)]
        first.assign(100).add(1), second.assign(200).add(2), third.assign(100).add(4)
        with self.assertLogs(level="WARNING") as logs:
            self.assertEqual(_agree(*ranks)[0], [107] * 3)
        self.assertLen(logs.output, 1)
        self.assertIn("rank 1: ranks have assigned different values", logs.output[0])
        second.assign(50).add(1), first.add(3)
        with self.assertLogs(level="WARNING") as logs:
            self.assertEqual(_agree(*ranks)[0], [51] * 3)
        self.assertLen(logs.output, 2)
        first.add(1), second.add(1), third.add(1)
        self.assertEqual(_agree(*ranks)[0], [54] * 3)

    def test_a_lost_rank_and_one_that_joins_after_an_assignment(self):
        first, second, lost = ranks = [_Rank(rank, 100).add(1) for rank in range(3)]
        _agree(*ranks)
        for each in ranks:
            each.assign(10).add(1)
        self.assertEqual(_agree(first, lost)[0], [12, 12])
        newcomer = _Rank(2, 0, joins=True)
        newcomer.take_over(second)
        newcomer.add(7).assign(0).add(5)  # Its additions count since its own callback's assignment.
        with self.assertNoLogs(level="WARNING"):
            self.assertEqual(_agree(first, second, newcomer), ([18] * 3, 2))
        self.assertEqual(_agree(first, second, newcomer), ([18] * 3, 1))

    def test_random_assignments_are_those_of_one_process(self):
        random = np.random.default_rng(1)
        for _ in range(10):
            ranks, expected = [_Rank(rank, 3) for rank in range(3)], 3
            for _ in range(8):
                if random.random() < 0.4:
                    expected = int(random.integers(100))
                    for each in ranks:
                        each.assign(expected)
                for each in ranks:
                    number = int(random.integers(5))
                    each.add(number)
                    expected += number
                if random.random() < 0.5:
                    _agree(*random.permutation(ranks)[:2])
            self.assertEqual(_agree(*ranks)[0], [expected] * 3)

    def test_another_model(self):
        first, second = _Rank(0), _Rank(1, [0, 0])
        with self.assertRaisesRegex(MismatchError, "states have different sizes"):
            _agree(first, second)


if __name__ == "__main__":
    absltest.main()

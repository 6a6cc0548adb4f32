"""The numbers of replicas, where ranks have equally many devices or not."""

import itertools

import tensorflow as tf
from absl.testing import absltest, parameterized

from hop_tf.keras_hook.replicas import Replicas


def _of_ranks(numbers):
    return [Replicas(rank, len(numbers), number) for rank, number in enumerate(numbers)]


def _meet(of_ranks):
    claims = ["a path", *itertools.chain(*(replicas.claims for replicas in of_ranks))]
    for replicas in of_ranks:
        replicas.learn(claims)


class ReplicasTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(([1, 1, 1],), ([2, 2],), ([4, 1, 2],), ([1, 3],))
    def test_ids_and_streams(self, numbers):
        of_ranks = _of_ranks(numbers)
        _meet(of_ranks)
        self.assertEqual([replicas.first for replicas in of_ranks], [0, *itertools.accumulate(numbers)][:-1])
        self.assertEqual([replicas.number for replicas in of_ranks], [sum(numbers)] * len(numbers))
        streams = [r.stream(device) for r, number in zip(of_ranks, numbers, strict=True) for device in range(number)]
        self.assertEqual(streams[0], 0)
        self.assertLen(set(streams), sum(numbers))

    def test_before_ranks_have_met(self):
        """A rank takes it that all are like itself, and warns where they are not."""
        for numbers, num_warnings in (([2, 2], 0), ([2, 1], 2)):
            of_ranks = _of_ranks(numbers)
            self.assertEqual([replicas.first for replicas in of_ranks], [0, numbers[1]])
            with self.assertLogs(level="WARNING") if num_warnings else self.assertNoLogs(level="WARNING") as logs:
                _meet(of_ranks)
                _meet(of_ranks)
            if num_warnings:
                self.assertLen(logs.output, num_warnings)
                self.assertIn("ranks have [2, 1] devices", logs.output[0])

    def test_no_warning_where_nobody_has_asked(self):
        with self.assertNoLogs(level="WARNING"):
            _meet(_of_ranks([2, 1]))


if __name__ == "__main__":
    absltest.main()

"""Tests that ranks that measure their speeds agree on shares of a batch."""

import time

import tensorflow as tf
from absl.testing import absltest, parameterized

from hop_tf.keras_hook.shares import AUTO, BatchShares
from hop_tf.membership.rounds import Rounds
from hop_tf.runtime.shares import RowStatistics, agree_on_shares, shares_of
from hop_tf.tools.simulate import VirtualCluster


def _run(world_size, body, **arguments):
    """Calls `body(rounds, agree, shares, rank, cluster)` on each rank in a session; returns the results."""
    cluster = VirtualCluster(world_size, **arguments)
    results = [None] * world_size

    def run(rank):
        membership, shares = cluster.memberships[rank], BatchShares(AUTO, rank, world_size)
        rounds = Rounds(membership, "shares", root=0)
        rounds.reset(membership.session + 1)
        membership.begin_session()

        def agree(position, seconds_per_row):
            agree_on_shares(rounds, position, shares, seconds_per_row)

        results[rank] = body(rounds, agree, shares, rank, cluster)
        membership.leave(sent_rounds={rounds.name: rounds.sent_rounds}, reason="")  # Unless it was killed.

    cluster.run(run)
    return results


class SharesOfTest(parameterized.TestCase):
    @parameterized.parameters(
        ({0: 1.0, 1: 3.0}, [1, 1], [0.75, 0.25]),
        ({0: 1.0, 1: 2.0, 2: 4.0}, [1, 1, 1], [4 / 7, 2 / 7, 1 / 7]),
        ({0: 1.0, 1: 0.0}, [3, 1], [0.75, 0.25]),  # One speed is unknown.
        ({0: 1.0, 1: 1.01}, [1, 1], [0.5, 0.5]),  # The difference is not worth a change.
        ({0: 1.0, 2: 3.0}, [1, 2, 1], [0.375, 0.5, 0.125]),  # Rank 1 has gone.
        ({0: 1.0, 1: 1e9}, [1, 1], [1.0, 0.0]),
    )
    def test_shares(self, seconds_per_row, before, expected):
        shares = shares_of(seconds_per_row, before)
        for share, part in zip(shares, expected, strict=True):
            self.assertGreaterEqual(share, 1)
            self.assertAlmostEqual(share / sum(shares), part, places=4)


class AgreeOnSharesTest(parameterized.TestCase):
    @parameterized.parameters(2, 5)
    def test_all_get_the_same(self, world_size):
        def body(rounds, agree, shares, rank, cluster):
            seen = []
            for position, factor in ((1, 1.0), (2, 2.0), (4, 1.0)):
                cluster.scheduler.sleep(rank * factor)
                agree(position, 1.0 + rank * factor)
                seen.append(shares.of_ranks)
            return seen

        for of_rank in _run(world_size, body):
            for shares, factor in zip(of_rank, (1.0, 2.0, 1.0), strict=True):
                speeds = [1 / (1 + rank * factor) for rank in range(world_size)]
                for share, speed in zip(shares, speeds, strict=True):
                    self.assertAlmostEqual(share / sum(shares), speed / sum(speeds), places=4)

    @parameterized.parameters(0, 1)
    def test_first_epochs_of_other_lengths(self, shorter):
        """One rank begins its second epoch before it has made the steps after which others agree."""

        def body(rounds, agree, shares, rank, cluster):
            for position in (2, 4) if rank == shorter else (1, 2, 4):
                agree(position, 1.0 + rank)
            return shares.of_ranks

        first, *others = _run(3, body)
        self.assertEqual(others, [first, first])
        self.assertAlmostEqual(first[0] / first[2], 3.0, places=3)

    def test_a_rank_that_has_left_is_not_waited_for(self):
        def body(rounds, agree, shares, rank, cluster):
            agree(1, 1.0 + rank)
            if rank == 1:
                return shares.of_ranks
            agree(2, 1.0 if rank else 2.0)
            return shares.of_ranks

        first, left, third = _run(3, body)
        self.assertEqual(first, third)
        self.assertEqual(first[1], left[1])  # The share of the rank that has left stays.
        self.assertAlmostEqual(first[2] / first[0], 2.0, places=3)

    @parameterized.parameters(0, 1)
    def test_a_rank_that_has_ended_may_wait_for_the_others(self, ended):
        """A rank that has ended waits for others that still have to merge its last window."""

        def body(rounds, agree, shares, rank, cluster):
            agree(1, 1.0 + rank)
            if rank == ended:
                rounds.end()
                cluster.memberships[rank].wait_until(lambda: len(done) == 2, 1e9)
                return shares.of_ranks
            agree(2, 2.0)
            agree(4, 2.0)
            done.add(rank)
            with cluster.memberships[ended].monitor:
                cluster.memberships[ended].monitor.notify_all()
            return shares.of_ranks

        done = set()
        results = _run(3, body)
        left = [shares for rank, shares in enumerate(results) if rank != ended]
        self.assertEqual(left[0], left[1])
        self.assertEqual(results[ended] == left[0], ended == 0)

    @parameterized.parameters(0, 1)
    def test_a_lost_rank_is_not_waited_for(self, lost):
        def body(rounds, agree, shares, rank, cluster):
            agree(1, 1.0 + rank)
            if rank == lost:
                cluster.scheduler.call_at(cluster.scheduler.now + 1.0, lambda: cluster.kill(rank))
                cluster.scheduler.sleep(10.0)
            agree(2, 1.0)
            return shares.of_ranks

        results = _run(3, body, continue_without_lost=True, detection_seconds=1.0)
        left = [shares for rank, shares in enumerate(results) if rank != lost]
        self.assertEqual(left[0], left[1])
        parts = [share / sum(left[0]) for share in left[0]]
        # Without rank 0 no rank decides on new shares.
        expected = [6 / 11, 3 / 11, 2 / 11] if lost == 0 else [4 / 11, 3 / 11, 4 / 11]
        for part, each in zip(parts, expected, strict=True):
            self.assertAlmostEqual(part, each, places=4)

    def test_a_rank_that_was_started_again_takes_what_comes(self):
        def body(rounds, agree, shares, rank, cluster):
            if rank == 1:  # As a restarted rank.
                rounds._own_incarnation = None
                cluster.scheduler.sleep(5.0)
                agree(2, 1.0)
            elif rank == 0:
                rounds._incarnations[1] = -1
                agree(2, 1.0)
            else:
                agree(2, 3.0)
            return shares.of_ranks

        first, *others = _run(3, body)
        self.assertEqual(others, [first, first])
        self.assertAlmostEqual(first[0] / first[2], 3.0, places=3)


class RowStatisticsTest(tf.test.TestCase):
    def test_seconds_for_a_row(self):
        statistics = RowStatistics()

        @tf.function
        def step(rows):
            statistics.count(rows)
            with tf.control_dependencies([statistics.begin_step()]):
                waited = tf.numpy_function(lambda: time.sleep(0.02) or 1.0, [], tf.float64)
            statistics.end_step(rows, [waited, None, tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]))])

        for _ in range(3):
            step(tf.constant(4, tf.int64))
        self.assertEqual(statistics.take_seconds_per_row(), 0.0)  # Too few steps.
        step(tf.constant(4, tf.int64))
        self.assertGreater(statistics.take_seconds_per_row(), 0.0049)
        self.assertEqual(statistics.take_seconds_per_row(), 0.0)  # The previous call has taken them.
        self.assertEqual(float(statistics.total), 16.0)


if __name__ == "__main__":
    absltest.main()

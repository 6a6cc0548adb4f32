"""Tests that collective calls fail with an error that names the lost rank."""

import collections
from unittest import mock

import tensorflow as tf
from absl.testing import parameterized

from hop_tf.errors import PeerLostError
from hop_tf.runtime.rank_collectives import RankCollectives
from hop_tf.runtime.replica_state import ReplicaState
from hop_tf.tools.simulate import VirtualCluster

_NUM_RANKS = 7  # Rank 6 is the child of rank 2, and that of rank 0.
_CALLS = {
    "synchronize": lambda ranks: ranks.average([tf.Variable([1.0])]),
    "gather_reports": lambda ranks: ranks.gather({}),
}


class LostRankTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        *(("synchronize", lost) for lost in (6, 2, 0)), *(("gather_reports", lost) for lost in (6, 2))
    )
    def test_all_name_the_rank_that_was_lost(self, call, lost):
        cluster = VirtualCluster(_NUM_RANKS)
        errors = {}

        def body(rank):
            membership = cluster.memberships[rank]
            membership.begin_session()
            membership.leave(sent_rounds={}, reason="")
            cluster.scheduler.sleep(1.0)  # Until all ranks have been in the session.
            if rank == lost:
                cluster.scheduler.call_at(cluster.scheduler.now, lambda: cluster.kill(rank))
                cluster.scheduler.sleep(1.0)
            joining = mock.Mock(counts=collections.Counter())
            ranks = RankCollectives(membership, joining, ReplicaState(lambda: None), cluster.pool)
            try:
                _CALLS[call](ranks)
            except PeerLostError as error:
                errors[rank] = str(error)
            ranks.close()

        cluster.run(body)
        if call == "synchronize":  # In `gather`, a rank ends without an error after sending its own part.
            self.assertCountEqual(errors, {*range(_NUM_RANKS)} - {lost})
        self.assertNotEmpty(errors)
        for error in errors.values():
            self.assertIn(f"rank {lost} at virtual:{lost}", error)


if __name__ == "__main__":
    tf.test.main()

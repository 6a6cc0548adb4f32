"""Tests of a rank's knowledge of the others under Canary."""

from unittest import mock

import tensorflow as tf

from hop_tf.membership.session import Membership
from hop_tf.strategies.canary.peers import Peers


class FastestTest(tf.test.TestCase):
    def setUp(self):
        super().setUp()
        self.gone = set()
        membership = mock.create_autospec(Membership, instance=True)
        membership.rank, membership.world_size = 0, 4
        membership.departure.side_effect = lambda rank: "gone" if rank in self.gone else None
        self.peers = Peers(membership)

    def test_whom_is_known_to_have_started_the_latest_iteration(self):
        self.assertIsNone(self.peers.fastest())
        for rank, iteration in ((1, 5), (2, 9), (3, 7), (2, 4)):  # A late message changes nothing.
            self.peers.is_in(rank, iteration)
        self.assertEqual(self.peers.fastest(), 2)
        self.assertEqual(self.peers.fastest({2}), 3)
        self.assertEqual(self.peers.fastest({2, 3}), 1)
        self.assertIsNone(self.peers.fastest({1, 2, 3}))

    def test_not_this_rank_and_none_that_has_left(self):
        for rank, iteration in ((0, 99), (1, 5), (2, 9)):
            self.peers.is_in(rank, iteration)
        self.gone.add(2)
        self.assertEqual(self.peers.fastest(), 1)

    def test_what_the_process_before_has_done_does_not_count(self):
        self.peers.is_in(1, 5)
        self.peers.is_in(2, 9)
        self.peers.begin_incarnation(2)
        self.assertEqual(self.peers.fastest(), 1)


if __name__ == "__main__":
    tf.test.main()

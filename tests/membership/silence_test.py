"""Tests of detecting silent ranks, on the virtual clock."""

from unittest import mock

import tensorflow as tf

from hop_tf.errors import DeadlineExceededError
from hop_tf.membership.silence import Silence
from hop_tf.options import CommunicationOptions
from hop_tf.tools.simulate.virtual import VirtualCluster


class SilenceTest(tf.test.TestCase):
    def setUp(self):
        super().setUp()
        self.cluster = VirtualCluster(3, limit_seconds=1000.0, options=CommunicationOptions())
        self.now = lambda: self.cluster.scheduler.now
        self.heard = []

    def _run(self, body):
        """Rank 0 does that, while rank 1 stands still from second 10 to second 20; it may be awaited until then."""

        def run(rank):
            if rank == 0:
                self.sent = []
                self.silence = Silence(self.cluster.memberships[0], "test", self.heard.append)
                body()

        self.cluster.scheduler.call_at(10.0, lambda: self.cluster.freeze(1, 10.0))
        self.cluster.run(run)

    def _wait(self, ranks, until=21.0):
        self.silence.wait(
            lambda: [] if self.now() >= until else [rank for rank in ranks if rank not in self.silence.ranks],
            operation="test",
        )

    def test_waiting_ends_when_nothing_is_heard(self):
        def body():
            self._wait([1])
            self.assertBetween(self.now(), 10.2, 11.0)
            self.assertEqual(self.silence.ranks, {1})
            begin = self.now()
            self._wait([1])
            self.assertEqual((self.now(), self.silence.num_passed_by), (begin, 1))

        self._run(body)

    def test_a_rank_that_is_heard_is_waited_for(self):
        self._run(lambda: self._wait([2]))
        self.assertGreaterEqual(self.now(), 21.0)
        self.assertEmpty(self.silence.ranks)

    def test_looks_less_often_than_the_rank_wakes_up(self):
        """Reading the state of the transport at each wake-up would slow down ordinary steps."""

        def body():
            transport = self.cluster.memberships[0].transport
            with mock.patch.object(transport, "status", wraps=transport.status) as status:
                self.silence.begin()
                for _ in range(100):
                    self.assertFalse(self.silence.look([1, 2]))
                    self.cluster.scheduler.sleep(0.01)
            self.assertBetween(status.call_count, 2 * 9, 2 * 11)

        self._run(body)

    def test_a_rank_that_has_died_is_waited_for(self):
        """Otherwise no rank would report the loss."""

        def body():
            self.cluster.scheduler.sleep(2.0)
            self._wait([1])
            self.assertEqual(self.silence.ranks, {1})
            self.cluster.close(1)
            with self.assertRaises(DeadlineExceededError):
                self._wait([1], until=30.0)

        self.cluster.scheduler.call_at(1.0, lambda: self.cluster.freeze(1, 500.0))
        self._run(body)

    def test_a_rank_that_is_silent_for_too_long_is_lost(self):
        def body():
            self._wait([1], until=900.0)
            self.cluster.scheduler.sleep(100.0)
            with self.assertRaises(DeadlineExceededError):
                self._wait([1], until=900.0)

        self.cluster.scheduler.call_at(1.0, lambda: self.cluster.freeze(1, 500.0))
        self._run(body)

    def test_it_is_told_when_a_rank_is_heard_again(self):
        def body():
            self._wait([1])
            self.assertEqual(self.heard, [])
            self._wait([2], until=19.0)
            self.assertEqual(self.heard, [])
            self._wait([2])
            self.assertEqual(self.heard, [1])
            self.assertEmpty(self.silence.ranks)

        self._run(body)

    def test_who_has_stood_still_itself_does_not_take_others_for_silent(self):
        """It has not read yet what they have sent meanwhile."""

        def body():
            self.silence.begin()
            self.assertFalse(self.silence.look([1]))
            self.cluster.scheduler.sleep(12.0)  # Rank 1 is silent then; if it was, is not known.
            self.assertFalse(self.silence.look([1]))
            self.cluster.scheduler.sleep(0.3)  # It was asked then.
            self.assertTrue(self.silence.look([1]))

        self._run(body)


if __name__ == "__main__":
    tf.test.main()

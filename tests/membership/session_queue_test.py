"""Tests of the messages that a queue of one session takes."""

from absl.testing import absltest

from hop_tf.errors import ProtocolError
from hop_tf.membership.session_queue import SessionQueue
from hop_tf.tools.simulate import VirtualCluster


class SessionQueueTest(absltest.TestCase):
    def _run(self, body):
        """Runs `body(sender, queue of the sender, queue of the receiver)`, the memberships of two ranks.

        Returns:
          The headers that the receiver's handler got, and how many messages were dropped.
        """
        cluster, received = VirtualCluster(2), []
        queues = [SessionQueue(membership, "queue", 1) for membership in cluster.memberships]
        queues[1].start(lambda message: received.append((message.sender, message.header, message.payload.tobytes())))
        cluster.start(0, lambda: body(*cluster.memberships, *queues))
        cluster.scheduler.run()
        return received, queues[1].num_dropped

    def test_takes_messages_of_its_session(self):
        def body(sender, receiver, out, into):
            out.send(1, b"old", step=0)
            sender.wait_until(lambda: False, 1)  # Until it has arrived.
            out.session = into.session = 2
            out.send(1, b"new", step=0)

        self.assertEqual(self._run(body), ([(0, b"old", b""), (0, b"new", b"")], 0))

    def test_drops_messages_of_other_sessions(self):
        def body(sender, receiver, out, into):
            into.session = 2
            out.send(1, b"old", step=0)

        self.assertEqual(self._run(body), ([], 1))

    def test_drops_messages_for_another_incarnation_of_the_rank(self):
        def body(sender, receiver, out, into):
            receiver.incarnation = 1
            out.send(1, b"for the former one, as far as is known", step=0)
            sender._departures.begin_incarnation(1, 1)
            out.send(1, b"for this one", step=0)
            out.send(1, b"for the former one", incarnation=0, step=0)

        self.assertEqual(self._run(body), ([(0, b"for this one", b"")], 2))

    def test_refuses_what_has_no_session(self):
        def body(sender, receiver, out, into):
            sender.send(1, "queue", b"short")

        with self.assertRaisesRegex(ProtocolError, "rank 0 sent an unexpected message to 'queue'"):
            self._run(body)


if __name__ == "__main__":
    absltest.main()

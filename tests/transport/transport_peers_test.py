"""The contract of `Transport`, which every member passes: peers, counters and the end."""

import threading

import numpy as np
from absl.testing import absltest

from hop_tf.errors import DeadlineExceededError, HopError, PeerLostError
from hop_tf.options import CommunicationOptions
from hop_tf.transport.grpc_transport import GrpcTransport
from hop_tf.transport.in_process import InProcessNetwork, InProcessTransport
from hop_tf.transport.outbox import MAX_MESSAGES
from hop_tf.transport.tcp_transport import TcpTransport
from support.transports import DEADLINE_SECONDS, Collector, TransportTestMixin, wait_until


def number(index):
    return index.to_bytes(4, "little")


class PeerContract(TransportTestMixin):
    """Tests of the promises of `Transport` about peers, counters, `flush` and `close`."""

    # Counters, flush and close.

    def test_counters(self):
        sender, receiver = self.start()
        collector = self.register(receiver)
        sender.send(1, "queue", b"12345", [np.zeros(10, np.float32)])
        sender.send(1, "queue", b"", [np.zeros(3_000_000, np.uint8)], lane=3)
        collector.wait(2)
        expected = {"bytes_sent": 3_000_045, "bytes_received": 0, "messages_sent": 2, "messages_received": 0}
        self.assertEqual(dict(sender.counters()), {**expected, "connections_refused": 0})
        expected = {"bytes_sent": 0, "bytes_received": 3_000_045, "messages_sent": 0, "messages_received": 2}
        self.assertEqual(dict(receiver.counters()), {**expected, "connections_refused": 0})

    def test_flush(self):
        sender, receiver = self.start()
        gate = self.make_gate()
        receiver.register("queue", gate)
        self.assertTrue(sender.flush(1, 0.0))
        sender.send(1, "queue")
        sender.send(1, "queue")
        self.assertFalse(sender.flush(1, 0.05))
        gate.opened.set()
        self.assertTrue(sender.flush(1, DEADLINE_SECONDS))

    def test_close_ends_a_blocked_send(self):
        (sender, _) = self.make()
        sender.start()
        errors = Collector()

        def send():
            try:
                while True:
                    sender.send(1, "queue")
            except HopError as error:
                errors(error)

        thread = threading.Thread(target=send)
        thread.start()
        wait_until(lambda: sender.counters()["messages_sent"] == MAX_MESSAGES)
        sender.close()
        self.assertIn("closed", str(errors.wait(1)[0]))
        thread.join(DEADLINE_SECONDS)

    def test_close_ends_a_flush_and_held_messages(self):
        sender, receiver = self.start()
        for index in range(MAX_MESSAGES):
            sender.send(1, "late", number(index))
        wait_until(lambda: receiver.counters()["messages_received"] == MAX_MESSAGES)
        sender.send(1, "late")
        results = Collector()
        thread = threading.Thread(target=lambda: results(sender.flush(1, DEADLINE_SECONDS)))
        thread.start()
        receiver.close()
        sender.close()
        self.assertEqual(results.wait(1), [False])
        thread.join(DEADLINE_SECONDS)

    def test_close_is_idempotent_and_final(self):
        sender, receiver = self.start()
        collector = self.register(receiver)
        sender.send(1, "queue")
        collector.wait(1)
        sender.close()
        sender.close()
        for call in (lambda: sender.send(1, "queue"), lambda: sender.connect(1), sender.start):
            with self.assertRaisesRegex(HopError, "closed"):
                call()
        self.assertEqual(sender.counters()["messages_sent"], 1)

    def test_close_leaves_no_thread(self):
        before = set(threading.enumerate())
        transports = self.start(num_ranks=3)
        collector = self.register(transports[0])
        for transport in transports[1:]:
            transport.send(0, "queue", lane=1)
            transport.send(0, "late", lane=2)
        collector.wait(2)
        for transport in transports:
            transport.close()
        left = [thread.name for thread in set(threading.enumerate()) - before if thread.name.startswith("hop_tf")]
        self.assertEmpty(left)

    # Peers.

    def test_one_link_tells_both_ends_of_each_other(self):
        transports = self.start()
        self.assertFalse(transports[0].status(1).connected)
        self.assertFalse(transports[0].status(1).ever_connected)
        transports[0].connect(1)
        for rank in (0, 1):
            wait_until(lambda rank=rank: transports[rank].status(1 - rank).connected)
            status = transports[rank].status(1 - rank)
            self.assertTrue(status.ever_connected)
            self.assertIsNone(status.failure)
            self.assertEqual(status.last_problem, "")

    def test_a_living_peer_is_not_silent(self):
        transports = self.start(options=CommunicationOptions(timeout_seconds=0.5))
        transports[0].connect(1)
        wait_until(lambda: transports[0].status(1).connected and transports[1].status(0).connected)
        for rank in (0, 1):
            for _ in range(3):
                # Silence would only grow: that it becomes short again shows that something was heard.
                wait_until(lambda rank=rank: transports[rank].status(1 - rank).silent_seconds > 0.0)
                wait_until(lambda rank=rank: transports[rank].status(1 - rank).silent_seconds < 0.2)

    def test_messages_wait_for_a_peer_that_comes_late(self):
        sender, receiver = self.make()
        sender.start()
        for index in range(10):
            sender.send(1, "queue", number(index))
        self.assertFalse(sender.status(1).connected)
        collector = self.register(receiver)
        receiver.start()
        self.assertEqual([message.header for message in collector.wait(10)], [number(i) for i in range(10)])

    def test_a_peer_that_was_never_there(self):
        sender, _ = self.make(options=CommunicationOptions(timeout_seconds=0.3))
        sender.start()
        self.assertEqual(sender.status(1).silent_seconds, 0.0)
        with self.assertRaisesRegex(DeadlineExceededError, "send on rank 1 at .*never appeared"):
            for _ in range(MAX_MESSAGES + 1):
                sender.send(1, "queue")
        self.assertEqual(sender.counters()["messages_sent"], MAX_MESSAGES)
        status = sender.status(1)
        self.assertGreater(status.silent_seconds, 0.3)
        self.assertFalse(status.ever_connected)
        self.assertNotEmpty(status.last_problem)

    def test_a_lost_peer(self):
        sender, receiver = self.start(options=CommunicationOptions(timeout_seconds=0.3))
        collector = self.register(receiver)
        sender.send(1, "queue")
        collector.wait(1)
        self.silence(receiver)
        wait_until(lambda: not sender.status(1).connected)
        with self.assertRaisesRegex(PeerLostError, "send on rank 1 at .*(silent for|no process listens there)"):
            while True:
                sender.send(1, "queue")
        self.assertTrue(sender.status(1).ever_connected)

    def test_a_peer_that_takes_nothing(self):
        options = CommunicationOptions(timeout_seconds=30, progress_timeout_seconds=0.3)
        sender, receiver = self.start(options=options)
        gate = self.make_gate()
        receiver.register("queue", gate)
        with self.assertRaisesRegex(DeadlineExceededError, "send on rank 1 at .*it is alive"):
            for _ in range(2 * MAX_MESSAGES):
                sender.send(1, "queue")

    def test_refuses_ranks_that_are_none(self):
        sender, _ = self.start()
        for call in (sender.connect, sender.status):
            for peer in (-1, 0, 2):
                with self.assertRaisesRegex(ValueError, "Received: peer="):
                    call(peer)


class InProcessTransportPeerTest(PeerContract, absltest.TestCase):
    member = InProcessTransport

    def test_messages_wait_while_disconnected(self):
        sender, receiver = self.start()
        collector = self.register(receiver)
        for index in range(30):
            if index % 10 == 5:
                self.network.disconnect(0, 1)
            if index % 10 == 9:
                self.assertFalse(sender.status(1).connected)
                self.network.reconnect(0, 1)
            sender.send(1, "queue", number(index))
        self.assertEqual([message.header for message in collector.wait(30)], [number(i) for i in range(30)])

    def test_disconnect_is_seen_on_both_sides_only(self):
        transports = self.start(num_ranks=3)
        for rank, peer in ((0, 1), (1, 2), (2, 0)):
            transports[rank].connect(peer)
        self.network.disconnect(0, 1)
        self.assertFalse(transports[0].status(1).connected)
        self.assertFalse(transports[1].status(0).connected)
        self.assertTrue(transports[2].status(0).connected)
        self.assertTrue(transports[1].status(2).connected)

    def test_an_address_is_used_once(self):
        network = InProcessNetwork(2)
        first, second = InProcessTransport(0, network), InProcessTransport(0, network)
        self.addCleanup(first.close)
        self.addCleanup(second.close)
        first.start()
        with self.assertRaisesRegex(HopError, "rank 0: cannot serve on in-process:0"):
            second.start()
        first.close()
        second.start()


class GrpcTransportPeerTest(PeerContract, absltest.TestCase):
    member = GrpcTransport


class TcpTransportPeerTest(PeerContract, absltest.TestCase):
    member = TcpTransport


if __name__ == "__main__":
    absltest.main()

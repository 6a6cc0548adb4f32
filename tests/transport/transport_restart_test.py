"""A process that takes the place of another one, where the transport is told to accept that."""

import numpy as np
from absl.testing import absltest, parameterized

from hop_tf.errors import PeerLostError
from hop_tf.transport.grpc_transport import GrpcTransport
from hop_tf.transport.tcp_transport import TcpTransport
from support.transports import TransportTestMixin, wait_until


class RestartTest(TransportTestMixin, parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.restarts = []

    def start_pair(self, member):
        self.member = member
        self.all_addresses = self.addresses(3)
        first = self.start_at(0, self.all_addresses[:2], on_restart=self.restarts.append)
        second = self.start_at(1, self.all_addresses[:2])
        self.check_works(first, second)
        self.check_works(second, first)
        return first, second

    @parameterized.parameters(GrpcTransport, TcpTransport)
    def test_nothing_of_the_former_process_is_left(self, member):
        first, former = self.start_pair(member)
        former.close()
        for index in range(5):
            first.send(1, "old", bytes([index]), [np.zeros(100_000, np.uint8)], lane=1)
        wait_until(lambda: first.status(1).unreached_seconds > 0)
        latter = self.start_at(1, self.all_addresses[:2])
        old, new = self.register(latter, "old"), self.register(latter, "new")
        received = self.register(first, "new")
        latter.send(0, "new", b"hello")
        self.assertEqual(received.wait(1)[0].header, b"hello")
        self.assertEqual(self.restarts, [1])
        first.send(1, "new", b"welcome")
        self.assertEqual(new.wait(1)[0].header, b"welcome")
        self.assertEmpty(old.messages)
        self.assertIsNone(first.status(1).failure)
        self.assertLen(received.messages, 1)
        # Lane 1 has nothing to bring to the new one: nothing is tried in vain.
        wait_until(lambda: first.status(1).unreached_seconds == 0)
        wait_until(lambda: latter.status(0).unreached_by_seconds == 0)

    def test_a_parameter_server_is_called_so(self):
        self.member = TcpTransport
        addresses = self.addresses(2)
        worker = self.start_at(0, addresses, on_restart=self.restarts.append, num_ranks=1)
        self.start_at(1, addresses, num_ranks=1).connect(0)
        wait_until(lambda: worker.status(1).incarnation)
        with self.assertLogs("absl", "WARNING") as logs:
            self.start_at(1, [addresses[0], *self.addresses(1)], num_ranks=1).connect(0)
            wait_until(lambda: worker.counters()["connections_refused"])
        self.assertRegex(" ".join(logs.output), "rank 0: a connection from .* claims to be another process of ps 0 at")

    @parameterized.parameters(GrpcTransport, TcpTransport)
    def test_the_former_process_cannot_come_back(self, member):
        self.member = member
        addresses = self.addresses(3)
        first = self.start_at(0, addresses[:2], on_restart=self.restarts.append)
        # It believes to be at another address, where the latter does not disturb it.
        former = self.start_at(1, [addresses[0], addresses[2]])
        received = self.register(first)
        former.send(0, "queue", b"former")
        received.wait(1)
        latter = self.start_at(1, addresses[:2])
        latter.send(0, "queue", b"latter")
        received.wait(2)
        wait_until(lambda: former.status(0).failure is not None)
        self.assertIsInstance(former.status(0).failure, PeerLostError)
        self.assertRegex(str(former.status(0).failure), "another process of rank 1: this process was .* replaced")
        latter.send(0, "queue", b"latter")
        self.assertEqual([message.header for message in received.wait(3)], [b"former", b"latter", b"latter"])
        self.assertEqual(self.restarts, [1])
        self.assertIsNone(first.status(1).failure)


if __name__ == "__main__":
    absltest.main()

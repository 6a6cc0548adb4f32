"""Tests of attackers of clusters with and without a token: they pose as a rank, listen, or change sent data."""

import socket
import unittest.mock

import numpy as np
from absl.testing import absltest

from hop_tf.options import CommunicationOptions
from hop_tf.transport import control_pb2, framing
from hop_tf.transport.connection import Connection
from hop_tf.transport.framing import FrameKind
from hop_tf.transport.proof import parse
from hop_tf.transport.tcp_transport import TcpTransport
from support.transports import (
    DEADLINE_SECONDS,
    Proxy,
    TransportTestMixin,
    make_hello,
    parse_reply,
    split_address,
    wait_until,
)

_TOKEN = "correct horse battery staple"
_WITH_TOKEN = CommunicationOptions(cluster_token=_TOKEN)


class ImpostorTestCase(TransportTestMixin, absltest.TestCase):
    member = TcpTransport

    def greet(self, transport, token=None, hello=None, **fields):
        """A stranger's greeting; returns the answer."""
        with socket.create_connection(("127.0.0.1", transport._handshake.socket_port), DEADLINE_SECONDS) as end:
            challenge = Connection(end).read_frame().header
            end.sendall(hello or make_hello(challenge, token, **fields)[0])
            return parse_reply(Connection(end).read_frame().header)

    def put_before_sockets(self, transport, change):
        """Changes what peers send to a transport's sockets."""
        proxy = Proxy(f"127.0.0.1:{transport._handshake.socket_port}", change)
        self.addCleanup(proxy.close)
        transport._handshake.socket_port = split_address(proxy.address)[1]


class GreetingTest(ImpostorTestCase):
    def test_a_stranger_does_not_end_a_job(self):
        """No token keeps the stranger out. It ends no job, neither with a mismatch nor as a restarted process."""
        for on_restart in (None, lambda rank: self.fail(f"rank {rank} was not restarted")):
            addresses = self.addresses(2)
            first, second = (self.start_at(rank, addresses, on_restart=on_restart) for rank in range(2))
            self.check_works(first, second)
            self.check_works(second, first)
            met = first.status(1).incarnation
            for fields in ({"identity": {"strategy": "junk"}}, {"incarnation": "other"}, {"protocol_version": 77}):
                reply = self.greet(first, **fields)
                self.assertEqual(reply.refusal, control_pb2.UNCONFIRMED)
                self.assertEqual((reply.field, reply.value), ("", ""))
                self.assertIsNone(first.status(1).failure)
                self.assertEqual(first.status(1).incarnation, met)
                self.check_works(first, second)
                self.check_works(second, first)

    def test_a_process_that_was_started_again_is_met_at_its_address(self):
        """Also by a rank that has never connected to it."""
        addresses, restarts = self.addresses(2), []
        first = self.start_at(0, addresses, on_restart=restarts.append)
        second = self.start_at(1, addresses)
        self.check_works(second, first)
        second.close()
        again = self.start_at(1, addresses)
        self.check_works(again, first)
        self.assertEqual(restarts, [1])

    def test_with_a_token_a_process_that_was_started_again_needs_no_proof_of_its_address(self):
        addresses, restarts = self.addresses(2), []
        first = self.start_at(0, addresses, on_restart=restarts.append, options=_WITH_TOKEN)
        self.check_works(self.start_at(1, addresses, options=_WITH_TOKEN), first)
        self.assertEqual(self.greet(first, _TOKEN, incarnation="again").refusal, control_pb2.ACCEPTED)
        self.assertEqual(restarts, [1])


class TokenTest(ImpostorTestCase):
    def test_it_does_not_travel_and_what_was_overheard_is_of_no_use(self):
        overheard = []

        def listen(data):
            overheard.append(data)
            return data

        addresses = self.addresses(2)
        first = self.start_at(0, addresses, options=_WITH_TOKEN)
        proxy = Proxy(addresses[0], listen)
        self.addCleanup(proxy.close)
        self.put_before_sockets(first, listen)
        second = self.start_at(1, (proxy.address, addresses[1]), options=_WITH_TOKEN)
        self.check_works(second, first)
        hello = next(data for data in overheard if data.startswith(_hello_start()))
        self.assertGreater(len(overheard), 3)
        self.assertNotIn(_TOKEN.encode(), b"".join(overheard))
        self.assertEqual(self.greet(first, hello=hello), control_pb2.HelloReply(refusal=control_pb2.BAD_TOKEN))

    def test_who_does_not_know_it_cannot_accept(self):
        """One who holds a rank's port learns nothing, and gets no message."""
        addresses = self.addresses(2)
        impostor = self.start_at(1, addresses)
        collector = self.register(impostor)
        with unittest.mock.patch.object(impostor._handshake, "_authenticate", _believe):
            first = self.start_at(0, addresses, options=_WITH_TOKEN)
            first.send(1, "queue", b"secret")
            wait_until(lambda: "did not prove that it knows the cluster token" in first.status(1).last_problem)
        self.assertFalse(first.status(1).ever_connected)
        self.assertIsNone(first.status(1).failure)
        self.assertEmpty(collector.messages)

    def test_a_refusal_without_a_proof_ends_nothing(self):
        """One who holds a rank's port may say anything."""
        addresses = self.addresses(2)
        impostor = self.start_at(1, addresses, identity={"strategy": "another"})
        with unittest.mock.patch.object(impostor._handshake, "_authenticate", _believe):
            first = self.start_at(0, addresses, options=_WITH_TOKEN)
            first.connect(1)
            wait_until(lambda: "did not prove" in first.status(1).last_problem)
        self.assertIsNone(first.status(1).failure)

    def test_guesses_are_limited(self):
        first, second = self.start(options=_WITH_TOKEN)
        self.check_works(second, first)
        refusals = {self.greet(first, f"guess {number}").refusal for number in range(40)}
        self.assertEqual(refusals, {control_pb2.BAD_TOKEN, control_pb2.TOO_MANY_GUESSES})
        self.check_works(second, first)
        self.check_works(first, second)


class TamperingTest(ImpostorTestCase):
    """Someone writes into the stream between two ranks."""

    def check_all_arrive(self, change, options=_WITH_TOKEN):
        """Whatever `change` does to what goes to rank 1, once or more often: all messages arrive, once, in order."""
        addresses = self.addresses(2)
        receiver = self.start_at(1, addresses, options=options)
        self.put_before_sockets(receiver, change)
        collector = self.register(receiver)
        sender = self.start_at(0, addresses, options=options)
        payloads = [np.full(size, number, np.uint8) for number, size in enumerate((0, 10, 100_000, 1_000_000, 3))]
        with self.assertLogs("absl", "WARNING") as logs:
            for number, payload in enumerate(payloads):
                sender.send(1, "queue", bytes([number]), [payload], lane=1)
                self.assertTrue(sender.flush(1, DEADLINE_SECONDS))
        for number, message in enumerate(collector.wait(len(payloads))):
            self.assertEqual(message.header, bytes([number]))
            np.testing.assert_array_equal(message.payload, payloads[number])
        self.assertLen(collector.messages, len(payloads))
        self.assertIn("a frame has a wrong checksum", "\n".join(logs.output))
        for transport, peer in ((sender, 1), (receiver, 0)):
            self.assertIsNone(transport.status(peer).failure)

    def test_messages_that_are_inserted_take_no_numbers(self):
        """They would be taken for the next two, and those for what was received before."""
        inserted = []

        def insert(data):
            if data.startswith(b"hopT") and data[5] == FrameKind.MESSAGE and not inserted:
                sequence = int.from_bytes(data[8:16], "little")
                for number in range(2):
                    message = framing.Outgoing(sequence + number, b"queue", b"forged", [], len(b"forged"))
                    inserted.append(framing.encode_start(message) + bytes(8))
                return b"".join(inserted) + data
            return data

        for options in (_WITH_TOKEN, None):
            inserted.clear()
            self.check_all_arrive(insert, options)
            self.assertLen(inserted, 2)

    def test_bits_that_are_changed(self):
        changed = []

        def change(data):
            if len(data) > 60_000 and len(changed) < 3:
                changed.append(len(data))
                return data[:50_000] + bytes([data[50_000] ^ 4]) + data[50_001:]
            return data

        self.check_all_arrive(change)
        self.assertLen(changed, 3)

    def test_a_message_that_is_repeated(self):
        repeated = []

        def repeat(data):
            if data.startswith(b"hopT") and data[5] == FrameKind.MESSAGE and len(data) < 200 and not repeated:
                repeated.append(data)
                return data + data
            return data

        self.check_all_arrive(repeat)
        self.assertLen(repeated, 1)


def _believe(data, session, source):
    """`Handshake._authenticate` of one who does not know the token and lets everyone in."""
    del source
    signed = parse(control_pb2.Signed, data)
    session._said += [signed.nonce, signed.body]
    return parse(control_pb2.Hello, signed.body)


def _hello_start():
    return framing.encode(FrameKind.HELLO)[:16]


if __name__ == "__main__":
    absltest.main()

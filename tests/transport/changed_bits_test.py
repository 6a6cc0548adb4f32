"""A bit that changes on the way: each one, of every kind of frame and greeting, is found; no message is lost."""

import contextlib
import copy
import os
import random
import socket
import unittest.mock

import numpy as np
import pytest
from absl.testing import absltest, parameterized

from hop_tf.errors import HopError, ProtocolError
from hop_tf.tensors.buffers import BufferPool
from hop_tf.transport import connection, control_pb2, framing, grpc_link
from hop_tf.transport.checksum import Checksums
from hop_tf.transport.connection import Connection
from hop_tf.transport.framing import Assembler, FrameKind, Outgoing
from hop_tf.transport.grpc_transport import GrpcTransport
from hop_tf.transport.link import Patience
from hop_tf.transport.proof import Secret, Session, seal_refusal
from hop_tf.transport.tcp_transport import TcpTransport
from support.transports import DEADLINE_SECONDS, Proxy, TransportTestMixin, split_address

_SEED = os.environ.get("HOP_TF_SCHEDULE_SEED", "0")
_NUM_CHANGES = 100 if "HOP_TF_SCHEDULE_SEED" in os.environ else 8
_KEY = bytes(range(32))
_PAYLOADS = ((), (np.arange(20, dtype=np.uint8), np.arange(7, dtype=np.uint8)))


def _changed(data, number):
    """The data with one of its bits changed."""
    changed = bytearray(data)
    changed[number // 8] ^= 1 << number % 8
    return bytes(changed)


def _changes(data):
    return (_changed(data, number) for number in range(8 * len(data)))


def _frames_of(kind):
    """Frames of a kind after the greeting."""
    if kind != FrameKind.MESSAGE:
        frame = framing.encode(kind, sequence=3, body=b"body")
        return [frame + Checksums(_KEY).of(frame)]
    messages = [Outgoing(1, b"queue", b"header", payload, 6 + sum(map(len, payload)), True) for payload in _PAYLOADS]
    return [b"".join(framing.encode_message(message, Checksums(_KEY))) for message in messages]


class FrameTest(parameterized.TestCase):
    """No byte comes after the frame: who believed a length would wait."""

    @contextlib.contextmanager
    def _reader(self, data):
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as far:
            near = Connection(server.accept()[0])
            near.end_greeting(Checksums(_KEY), Checksums(_KEY))
            far.sendall(data)
            try:
                yield near
            finally:
                near.close()

    @parameterized.parameters(FrameKind.MESSAGE, FrameKind.ACKNOWLEDGE)
    def test_on_a_socket(self, kind):
        pool = BufferPool()

        def read(near):
            if kind == FrameKind.MESSAGE:
                return near.read_message(pool.take, lambda: None)
            return near.read_frame()

        for frame in _frames_of(kind):
            with self._reader(frame) as near:
                self.assertIsNotNone(read(near))
            for changed in _changes(frame):
                with self._reader(changed) as near, self.assertRaises(ProtocolError):
                    read(near)

    @parameterized.parameters(FrameKind.MESSAGE, FrameKind.ACKNOWLEDGE, FrameKind.PING, FrameKind.PONG)
    def test_on_a_stream_of_grpc(self, kind):
        pool = BufferPool()

        def parse(data):
            if kind == FrameKind.MESSAGE:
                return Assembler(pool, data, Checksums(_KEY)).complete
            return framing.decode_checked(data, Checksums(_KEY))

        for frame in _frames_of(kind):
            self.assertTrue(parse(frame))
            for changed in _changes(frame):
                with self.assertRaises(ProtocolError):
                    parse(changed)

    def test_a_frame_that_does_not_go_on(self):
        (frame, *_) = _frames_of(FrameKind.MESSAGE)
        pool = BufferPool()
        with unittest.mock.patch.object(connection, "IDLE_SECONDS", 0.05):
            for num_bytes in (1, framing.HEAD_BYTES, len(frame) - 1):
                with (
                    self._reader(frame[:num_bytes]) as near,
                    self.assertRaisesRegex(TimeoutError, "the rest of a frame did not come"),
                ):
                    near.read_message(pool.take, lambda: None)

    def test_between_two_frames_there_is_no_time_limit(self):
        with unittest.mock.patch.object(connection, "IDLE_SECONDS", 0.05), self._reader(b"") as near:
            asked = []

            def ask():
                asked.append(None)
                if len(asked) == 3:
                    near.end()

            self.assertIsNone(near.read_frame(while_idle=ask))


class PatienceTest(absltest.TestCase):
    def test_doubles(self):
        patience = Patience()
        self.assertEqual([patience.is_over(1) for _ in range(9)], [False, True] + [False, False, True] + [False] * 4)
        self.assertTrue(patience.is_over(1))

    def test_progress_begins_it_anew(self):
        patience = Patience()
        self.assertFalse(any(patience.is_over(1, progress) for progress in range(5)))
        self.assertFalse(patience.is_over(2, 4))
        self.assertFalse(any(patience.is_over(0) for _ in range(5)))
        self.assertFalse(patience.is_over(2, 4))
        self.assertTrue(patience.is_over(2, 4))


class GreetingTest(TransportTestMixin, absltest.TestCase):
    """A changed greeting is refused. A refused rank may try again, and no rank has failed."""

    member = GrpcTransport

    def setUp(self):
        super().setUp()
        self.transport, *_ = self.make(incarnation="p.0", in_turn=False)
        self.handshake, self.peer = self.transport._handshake, self.transport._peers[1]
        identity = {**self.identity, "transport.protocol": str(framing.PROTOCOL_VERSION)}
        self.hello = control_pb2.Hello(
            protocol_version=framing.PROTOCOL_VERSION, sender=1, incarnation="q.0", identity=identity, first_sequence=1
        ).SerializeToString()

    def _check_refused(self, accept, frame):
        """`accept` is called with the body of a frame that is believed."""
        with self.assertRaises(HopError):
            accept(framing.decode(frame).header)
        self.assertIsNone(self.peer.failure)

    def _accept_hello(self, data, session):
        with unittest.mock.patch.object(self.handshake._guesses, "take", return_value=True):
            return self.handshake.check_hello(data, session, "somewhere", None)

    def test_challenge(self):
        def accept(challenge):
            theirs = Session(Secret(None), challenge, encrypted=False)
            return self._accept_hello(theirs.seal_hello(self.hello), session)

        challenge, session = self.handshake.challenge()
        self.assertEqual(accept(challenge).peer, self.peer)
        for number in range(8 * len(framing.encode(FrameKind.CHALLENGE, body=challenge))):
            challenge, session = self.handshake.challenge()
            self._check_refused(accept, _changed(framing.encode(FrameKind.CHALLENGE, body=challenge), number))

    def test_hello(self):
        challenge, _ = self.handshake.challenge()
        hello = Session(Secret(None), challenge, encrypted=False).seal_hello(self.hello)

        def accept(data):
            return self._accept_hello(data, Session(Secret(None), challenge, encrypted=False))

        self.assertEqual(accept(hello).peer, self.peer)
        for frame in _changes(framing.encode(FrameKind.HELLO, body=hello)):
            self._check_refused(accept, frame)

    def test_answer(self):
        for refusal in (control_pb2.ACCEPTED, control_pb2.BAD_TOKEN, control_pb2.MISMATCH):
            challenge, session = self.handshake.challenge()
            hello, asking = self.handshake.hello(self.peer, 0, 1, challenge)
            session.open_hello(hello)
            body = control_pb2.HelloReply(
                refusal=refusal, incarnation="q.0", socket_port=7, received_sequence=5
            ).SerializeToString()
            reply = seal_refusal(body) if refusal == control_pb2.BAD_TOKEN else session.seal_reply(body)

            def accept(data, asking=asking):
                return self.handshake.check_reply(self.peer, data, copy.deepcopy(asking))

            for frame in _changes(framing.encode(FrameKind.HELLO_REPLY, body=reply)):
                self._check_refused(accept, frame)
            if refusal == control_pb2.ACCEPTED:
                self.assertEqual(accept(reply).received_sequence, 5)


class TransportTest(TransportTestMixin, parameterized.TestCase):
    """Connections on which one bit changes: all messages arrive, as they were sent."""

    def setUp(self):
        super().setUp()
        for module in (connection, grpc_link):
            self.enter_context(unittest.mock.patch.object(module, "IDLE_SECONDS", 0.2))
        self.enter_context(unittest.mock.patch.object(grpc_link, "_MAX_PONG_SECONDS", 0.4))

    @parameterized.product(member=[TcpTransport, GrpcTransport], answers=[False, True])
    @pytest.mark.stress(but=1)
    def test_every_message_arrives(self, member, answers):
        self.member = member
        generator = random.Random(f"{member.__name__} {answers} {_SEED}")
        for _ in range(_NUM_CHANGES):
            self._check(generator.randrange(8 * (1000 if answers else 4000)), answers)

    @parameterized.parameters(TcpTransport, GrpcTransport)
    def test_a_message_that_was_swallowed_is_sent_again(self, member):
        """The sender sends a lost message again, although no later message shows the receiver that one is missing."""
        self.member = member
        num_swallowed = 0

        def change(data):
            nonlocal num_swallowed
            if num_swallowed or b"to be swallowed" not in data:
                return data
            num_swallowed += 1
            return b""

        first, second = self._start_behind_proxy(change=change)
        collector = self.register(first)
        for header in (b"first", b"to be swallowed"):
            second.send(0, "queue", header)
            self.assertTrue(second.flush(0, DEADLINE_SECONDS))
        self.assertEqual([message.header for message in collector.wait(2)], [b"first", b"to be swallowed"])
        self.assertEqual(num_swallowed, 1)

    def _check(self, number, answers):
        num_left = number

        def change(data):
            nonlocal num_left
            number, num_left = num_left, num_left - 8 * len(data)
            return _changed(data, number) if 0 <= number < 8 * len(data) else data

        first, second = self._start_behind_proxy(**{"change_back" if answers else "change": change})
        collector = self.register(first)
        payload = np.arange(1500, dtype=np.uint16).view(np.uint8)
        for header in (b"0", b"1", b"2"):
            second.send(0, "queue", header, [payload])
        messages = collector.wait(3)
        self.assertEqual([message.header for message in messages], [b"0", b"1", b"2"])
        for message in messages:
            np.testing.assert_array_equal(message.payload, payload)
        self.assertTrue(second.flush(0, DEADLINE_SECONDS))
        second.close()
        first.close()

    def _start_behind_proxy(self, **changes):
        """Rank 0, whose messages come through a proxy, and rank 1."""
        addresses = self.addresses(2)
        first = self.start_at(0, addresses)
        is_socket = self.member is TcpTransport
        proxy = Proxy(f"127.0.0.1:{first._handshake.socket_port}" if is_socket else addresses[0], **changes)
        self.addCleanup(proxy.close)
        if is_socket:
            first._handshake.socket_port = split_address(proxy.address)[1]
        return first, self.start_at(1, addresses if is_socket else (proxy.address, addresses[1]))


if __name__ == "__main__":
    absltest.main()

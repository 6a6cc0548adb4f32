"""Whatever bytes come, from whomever: frames, greetings and control messages are taken, or refused in words.

Half of what is tried are real messages in which something was changed. `make stress` tries more.
"""

import contextlib
import os
import zlib

import hypothesis
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import absltest
from hypothesis import strategies as st

from hop_tf.errors import HopError, ProtocolError
from hop_tf.membership import membership_pb2
from hop_tf.tensors.buffers import BufferPool
from hop_tf.tools.simulate import VirtualCluster
from hop_tf.transport import control_pb2
from hop_tf.transport.base import Message
from hop_tf.transport.checksum import NoChecksums
from hop_tf.transport.framing import (
    HEAD_BYTES,
    PROTOCOL_VERSION,
    Assembler,
    FrameKind,
    Outgoing,
    decode,
    decode_checked,
    encode,
    encode_message,
)
from hop_tf.transport.grpc_transport import GrpcTransport
from hop_tf.transport.handshake import HelloRefusedError, RefusedError
from hop_tf.transport.proof import Secret, Session

_NUM_EXAMPLES = int(os.environ.get("HOP_TF_NUM_SCHEDULES", "200"))
_HELLO = control_pb2.Hello(
    protocol_version=PROTOCOL_VERSION, sender=1, receiver=0, incarnation="q.0", identity={"strategy": "x"}
).SerializeToString()
_ADDRESSES = ("localhost:1", "localhost:2", "localhost:3")

fuzzed = hypothesis.settings(max_examples=_NUM_EXAMPLES, deadline=None)


def _changed(real: bytes) -> st.SearchStrategy[bytes]:
    """Any bytes, or the real ones with a piece of them changed, left out, or more put in."""

    def change(where: int, length: int, put_in: bytes) -> bytes:
        start = where % (len(real) + 1)
        return real[:start] + put_in + real[start + length :]

    changes = st.builds(change, st.integers(0, 1 << 16), st.integers(0, 8), st.binary(max_size=8))
    return st.one_of(st.binary(max_size=300), changes)


def _with_crc(data: bytes) -> bytes:
    """The frame with the right CRC in its head."""
    end = HEAD_BYTES - 4
    return data[:end] + zlib.crc32(data[:end]).to_bytes(4, "little") + data[HEAD_BYTES:]


def _frames() -> list[bytes]:
    payload = np.arange(100, dtype=np.uint8)
    message = Outgoing(1, b"queue", b"header", [payload], 106)
    return [*encode_message(message, NoChecksums()), *(encode(kind, sequence=7, body=b"body") for kind in FrameKind)]


class FramingTest(tf.test.TestCase):
    @fuzzed
    @hypothesis.given(
        st.sampled_from(_frames()).flatmap(_changed), st.lists(st.binary(max_size=60), max_size=5), st.booleans()
    )
    @pytest.mark.slow
    def test_frames(self, data, chunks, is_head_right):
        if is_head_right:  # Otherwise its CRC alone would find almost every change.
            data = _with_crc(data)
        for parse in (decode, lambda data: decode_checked(data, NoChecksums())):
            with contextlib.suppress(ProtocolError):
                parse(data)
        try:
            assembler = Assembler(BufferPool(), data, NoChecksums())
            for chunk in chunks:
                assembler.add(chunk)
        except ProtocolError:
            return
        if assembler.complete:
            self.assertEqual(assembler.payload().nbytes, assembler.frame.payload_bytes)


class GreetingTest(tf.test.TestCase):
    def setUp(self):
        super().setUp()
        self.transport = GrpcTransport(0, _ADDRESSES, identity={"strategy": "x"}, incarnation="p.0", in_turn=False)
        self.addCleanup(self.transport.close)
        self.handshake = self.transport._handshake

    @fuzzed
    @hypothesis.given(st.data())
    def test_a_hello(self, data):
        challenge, session = self.handshake.challenge()
        real = Session(Secret(None), challenge, encrypted=False).seal_hello(_HELLO)
        try:
            self.handshake.check_hello(data.draw(_changed(real)), session, "somewhere", None)
        except HelloRefusedError as error:
            self.assertNotEmpty(error.reply)
        except ProtocolError:
            pass

    @fuzzed
    @hypothesis.given(st.data())
    def test_a_hello_of_one_who_knows_the_token(self, data):
        """The hello is sealed with the right token after its contents were changed: the handshake checks them, too."""
        challenge, session = self.handshake.challenge()
        theirs = Session(Secret(None), challenge, encrypted=False)
        hello = theirs.seal_hello(data.draw(_changed(_HELLO)))
        try:
            greeting = self.handshake.check_hello(hello, session, "somewhere", None)
            self.assertIn(greeting.peer.rank, (1, 2))
        except HelloRefusedError as error:
            theirs.open_reply(error.reply)
        except ProtocolError:
            pass

    @fuzzed
    @hypothesis.given(st.data())
    def test_an_answer(self, data):
        challenge, session = self.handshake.challenge()
        hello, asking = self.handshake.hello(self.transport._peers[1], 0, 1, challenge)
        self.assertNotEmpty(session.open_hello(hello))
        real = session.seal_reply(control_pb2.HelloReply(incarnation="q.0", socket_port=7).SerializeToString())
        try:
            self.handshake.check_reply(self.transport._peers[1], data.draw(_changed(real)), asking)
        except RefusedError as error:
            self.assertNotEmpty(str(error))
        except HopError:
            pass

    @fuzzed
    @hypothesis.given(st.binary(max_size=100))
    def test_a_challenge(self, challenge):
        with contextlib.suppress(ProtocolError):
            self.handshake.hello(self.transport._peers[1], 0, 1, challenge)


_CONTROL_MESSAGES = {
    "membership/ready": membership_pb2.Ready(session=1, under_way=True, incarnations={2: 1}, owners={"x": 1}),
    "membership/gathered": membership_pb2.Gathered(session=1, seed=3, owners={"x": 1}),
    "membership/leave": membership_pb2.Leave(rank=2, session=1, sent_rounds={"g": 3}, reason="why", num_rounds=4),
}


class ControlTest(tf.test.TestCase):
    @fuzzed
    @hypothesis.given(st.data())
    def test_what_peers_tell(self, data):
        """A peer that sends what is none of these is an error in words; nothing else becomes of it."""
        membership = VirtualCluster(3, continue_without_lost=True).memberships[0]
        handlers = {
            "membership/ready": membership._on_ready,
            "membership/gathered": membership._on_gathered,
            "membership/leave": membership._on_leave,
        }
        for queue in data.draw(st.lists(st.sampled_from(sorted(handlers)), max_size=4)):
            header = data.draw(_changed(_CONTROL_MESSAGES[queue].SerializeToString()))
            sender = data.draw(st.integers(1, 2))
            with contextlib.suppress(ProtocolError):
                handlers[queue](Message(sender, queue, header, np.empty(0, np.uint8)))
        membership.leave(sent_rounds={}, reason="the end")
        self.assertLessEqual(membership.departed(), {1, 2})


if __name__ == "__main__":
    absltest.main()

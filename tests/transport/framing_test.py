import zlib

import numpy as np
from absl.testing import absltest
from hypothesis import given, settings
from hypothesis import strategies as st

from hop_tf.errors import ProtocolError
from hop_tf.tensors.buffers import BufferPool
from hop_tf.transport import framing
from hop_tf.transport.checksum import CHECKSUM_BYTES, Checksums, NoChecksums
from hop_tf.transport.framing import Assembler, FrameKind, Outgoing

KEY = bytes(range(32))


def encode(*, sequence=1, queue=b"queue", header=b"", payload=(), ack_requested=False):
    num_bytes = len(header) + sum(part.nbytes for part in payload)
    message = Outgoing(sequence, queue, header, payload, num_bytes, ack_requested)
    return list(framing.encode_message(message, Checksums(KEY)))


def head(**fields):
    """The first bytes of a frame that carries nothing, with some fields replaced."""
    values = {
        "magic": b"hopT",
        "version": framing._HEAD_VERSION,
        "kind": FrameKind.MESSAGE,
        "flags": 0,
        "sequence": 1,
        "payload": 0,
        "header": 0,
        "queue": 0,
    }
    data = framing._FIELDS.pack(*{**values, **fields}.values())
    return data + zlib.crc32(data).to_bytes(4, "little")


class FramingTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        self.pool = BufferPool()

    @given(
        sequence=st.integers(0, 2**64 - 1),
        queue=st.binary(min_size=1, max_size=255),
        header=st.binary(max_size=300),
        sizes=st.lists(st.integers(1, 2_500_000), max_size=3),
        ack_requested=st.booleans(),
    )
    @settings(max_examples=50, deadline=None)
    def test_a_message_survives(self, sequence, queue, header, sizes, ack_requested):
        payload = [np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8) for size in sizes]
        first, *chunks = encode(
            sequence=sequence, queue=queue, header=header, payload=payload, ack_requested=ack_requested
        )
        assembler = Assembler(self.pool, first, Checksums(KEY))
        frame = assembler.frame
        for chunk in chunks:
            self.assertFalse(assembler.complete)
            self.assertLessEqual(len(chunk), framing.CHUNK_BYTES)
            assembler.add(chunk)
        self.assertTrue(assembler.complete)
        self.assertEqual(frame.kind, FrameKind.MESSAGE)
        self.assertEqual((frame.sequence, frame.queue, frame.header), (sequence, queue, header))
        self.assertEqual(frame.ack_requested, ack_requested)
        self.assertEqual(assembler.payload().tobytes(), b"".join(part.tobytes() for part in payload))

    def test_a_small_message_is_one_frame(self):
        self.assertLen(encode(payload=[np.zeros(1000, np.uint8)] * 10), 1)
        self.assertLen(encode(), 1)

    @given(st.binary(max_size=100), st.booleans())
    def test_random_bytes_are_refused(self, data, with_magic):
        if with_magic:
            data = b"hopT" + bytes([framing._HEAD_VERSION]) + data
        try:
            frame = framing.decode(data)
        except ProtocolError:
            return
        self.assertLessEqual(len(frame.header) + len(frame.queue) + len(frame.inline), len(data))
        self.assertLessEqual(frame.payload_bytes, framing.MAX_PAYLOAD_BYTES)

    def test_impossible_frames_are_refused(self):
        self.assertEqual(framing.decode(head()).kind, FrameKind.MESSAGE)
        for name, data in {
            "empty": b"",
            "short": head()[:-1],
            "magic": head(magic=b"HTTP"),
            "version": head(version=framing._HEAD_VERSION + 1),
            "length that was changed": head()[:16] + b"\1" + head()[17:],
            "kind": head(kind=77),
            "flags": head(flags=0x80),
            "shared memory, which a gRPC stream has none of": head(flags=4, payload=16) + bytes(16),
            "a place of another length": head(flags=4, payload=17),
            "queue beyond the frame": head(queue=10),
            "header beyond the frame": head(header=10),
            "header beyond its limit": head(header=2**32 - 1),
            "payload beyond its limit": head(payload=2**63),
            "more than the payload": head(payload=1) + b"ab",
            "too long": head(payload=2**30) + bytes(framing.CHUNK_BYTES),
        }.items():
            with self.subTest(name), self.assertRaises(ProtocolError):
                framing.decode(data)

    def test_chunks_that_do_not_fit_are_refused(self):
        assembler = Assembler(self.pool, head(payload=10) + b"1234", NoChecksums())
        for chunk in (b"", b"1234567"):
            with self.assertRaisesRegex(ProtocolError, "only 6 bytes of the message are missing"):
                assembler.add(chunk)
        assembler.add(b"567890")
        self.assertEqual(assembler.payload().tobytes(), b"1234567890")

    def test_a_payload_without_memory_is_refused(self):
        class Exhausted(BufferPool):
            def take(self, num_bytes):
                raise OSError("Cannot allocate memory")

        with self.assertRaisesRegex(ProtocolError, "no memory for a message of 10 bytes: Cannot allocate memory"):
            Assembler(Exhausted(), head(payload=10), NoChecksums())

    @given(st.integers(0, 3 * framing.CHUNK_BYTES), st.data())
    @settings(max_examples=30, deadline=None)
    def test_a_message_that_was_changed_is_refused(self, size, data):
        frames = encode(header=b"header", payload=[np.zeros(size, np.uint8)])
        which = data.draw(st.integers(0, len(frames) - 1))
        where = data.draw(st.integers(0, len(frames[which]) - 1))
        changed = bytearray(frames[which])
        changed[where] ^= 1 << data.draw(st.integers(0, 7))
        frames[which] = bytes(changed)
        with self.assertRaises(ProtocolError):
            assembler = Assembler(self.pool, frames[0], Checksums(KEY))
            for chunk in frames[1:]:
                assembler.add(chunk)
            self.assertFalse(assembler.complete)  # Its length was changed.
            raise ProtocolError("more would have to come")

    def test_the_checksum_may_fall_into_a_chunk_of_its_own(self):
        start = len(encode()[0]) - CHECKSUM_BYTES
        for missing in range(CHECKSUM_BYTES + 2):
            first, *chunks = encode(payload=[np.ones(framing.CHUNK_BYTES - start - missing, np.uint8)])
            assembler = Assembler(self.pool, first, Checksums(KEY))
            for chunk in chunks:
                assembler.add(chunk)
            self.assertTrue(assembler.complete)
            self.assertLen(chunks, int(missing < CHECKSUM_BYTES))


if __name__ == "__main__":
    absltest.main()

"""Checksums of frames: the same however the payload comes, and another one for everything that differs."""

from unittest import mock

import numpy as np
from absl.testing import absltest
from hypothesis import given, settings
from hypothesis import strategies as st

from hop_tf.ops import native
from hop_tf.transport.checksum import CHECKSUM_BYTES, Checksums

KEY = bytes(range(32))


def checksum(payload, cuts=(), *, start=b"start", key=KEY, num_frames_before=0):
    checksums = Checksums(key)
    for _ in range(num_frames_before):
        checksums.of(b"")
    running = checksums.begin(start)
    for piece in np.split(payload, cuts):
        running.add(piece)
    return running.value()


class ChecksumTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        self.payload = np.random.default_rng(1).integers(0, 256, 50_000, dtype=np.uint8)

    @given(st.integers(0, 50_000), st.lists(st.integers(0, 50_000), max_size=20))
    @settings(max_examples=100, deadline=None)
    def test_pieces_do_not_matter(self, size, cuts):
        payload = self.payload[:size]
        self.assertEqual(checksum(payload, sorted(min(cut, size) for cut in cuts)), checksum(payload))

    def test_everything_counts(self):
        found = {
            checksum(self.payload),
            checksum(self.payload[:-1]),
            checksum(self.payload, start=b"other"),
            checksum(self.payload, key=bytes(32)),
            checksum(self.payload, num_frames_before=1),
        }
        for where in (0, 1, 31, 32, 4095, 4096, 49_151, 49_152, 49_999):  # In blocks, and in what is left over.
            changed = self.payload.copy()
            changed[where] ^= 1
            found.add(checksum(changed))
        self.assertLen(found, 5 + 9)
        self.assertEqual({len(each) for each in found}, {CHECKSUM_BYTES})

    def test_ranks_may_differ_in_the_native_library(self):
        expected = checksum(self.payload)
        with mock.patch.object(native, "quick_kernels", lambda: None):
            self.assertEqual(checksum(self.payload), expected)

    def test_frames_without_a_payload(self):
        self.assertEqual(Checksums(KEY).of(b"start"), Checksums(KEY).begin(b"start").value())


if __name__ == "__main__":
    absltest.main()

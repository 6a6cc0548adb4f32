"""The hash of blocks against its definition, with and without the native library."""

from unittest import mock

import numpy as np
from absl.testing import absltest, parameterized

from hop_tf.ops import native
from hop_tf.ops.hashing import BLOCK_BYTES, KEY_BYTES, BlockHash


def reference(block, key):
    """As `HopTfBlockHash` defines it, in Python's integers."""
    words, keys = ([int(word) for word in np.frombuffer(data, "<u4")] for data in (block, key))
    sums = [(word + each) % 2**32 for word, each in zip(words, keys, strict=True)]
    return sum(sums[i] * sums[i + 8] for i in range(len(sums)) if i % 16 < 8) % 2**64


class BlockHashTest(parameterized.TestCase):
    @parameterized.parameters("native", "numpy")
    def test_digests(self, which):
        if which == "numpy":
            self.enter_context(mock.patch.object(native, "quick_kernels", lambda: None))
        elif native.quick_kernels() is None:
            self.skipTest("the native library was not built")
        generator = np.random.default_rng(1)
        key = generator.bytes(KEY_BYTES)
        blocks = [generator.bytes(BLOCK_BYTES) for _ in range(35)]
        blocks += [bytes(BLOCK_BYTES), b"\xff" * BLOCK_BYTES]
        for count in (0, 1, len(blocks)):
            data = np.frombuffer(b"?" + b"".join(blocks[:count]), np.uint8)[1:]  # Not aligned.
            digests = BlockHash(key).digests(data)
            self.assertEqual([int(digest) for digest in digests], [reference(block, key) for block in blocks[:count]])

    def test_sizes(self):
        with self.assertRaisesRegex(ValueError, "`key` must have 4096 bytes. Received: 4095"):
            BlockHash(bytes(4095))
        with self.assertRaisesRegex(ValueError, "`data` must be blocks of 4096 bytes. Received: 4097"):
            BlockHash(bytes(KEY_BYTES)).digests(np.zeros(4097, np.uint8))


if __name__ == "__main__":
    absltest.main()

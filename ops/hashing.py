"""A keyed hash of blocks of bytes, for checksums of messages."""

from __future__ import annotations

import numpy as np

from hop_tf.ops import native

BLOCK_BYTES = 4096
KEY_BYTES = BLOCK_BYTES
_PAIRS = 8
# The number of blocks that are hashed at a time: few enough to stay in the processor's cache.
_NUMPY_BLOCKS = 16


class BlockHash:
    """64-bit digests of blocks of 4096 bytes. `HopTfBlockHash` describes the computation and the guarantees.

    Digests are the same with and without the native library. The library takes only 20 microseconds for a MB, so it
    keeps the GIL: releasing and taking the GIL would take longer. One thread may use a hash at a time.

    Args:
      key: 4096 random bytes.

    Attributes:
      block_bytes: Length of a block.
      key_address: Address of the key, for native code.

    Raises:
      ValueError: If the key has another length.
    """

    block_bytes = BLOCK_BYTES

    def __init__(self, key: bytes):
        if len(key) != KEY_BYTES:
            raise ValueError(f"`key` must have {KEY_BYTES} bytes. Received: {len(key)} bytes.")
        self._key = np.frombuffer(key, "<u4").astype(np.uint32)
        self.key_address = self._key.ctypes.data
        self._library = native.quick_kernels()
        self._scratch = np.empty(0, np.uint64)
        self._scratch_address = 0

    def digests(self, data: np.ndarray) -> np.ndarray:
        """Returns the digest of each block: a uint64 array whose memory the next call reuses.

        Args:
          data: Flat uint8 array, C-contiguous, of whole blocks.

        Raises:
          ValueError: If `data` does not consist of whole blocks.
        """
        if data.nbytes % BLOCK_BYTES:
            raise ValueError(f"`data` must be blocks of {BLOCK_BYTES} bytes. Received: {data.nbytes} bytes.")
        digests = self._take(data.nbytes // BLOCK_BYTES)
        if self._library is None:
            words = data.view("<u4").reshape(-1, BLOCK_BYTES // 4)
            for begin in range(0, len(words), _NUMPY_BLOCKS):
                digests[begin : begin + _NUMPY_BLOCKS] = self._hash(words[begin : begin + _NUMPY_BLOCKS])
        else:
            self._library.HopTfBlockHash(data.ctypes.data, len(digests), self.key_address, self._scratch_address)
        return digests

    def _take(self, num_blocks: int) -> np.ndarray:
        if num_blocks > len(self._scratch):
            self._scratch = np.empty(num_blocks, np.uint64)
            self._scratch_address = self._scratch.ctypes.data
        return self._scratch[:num_blocks]

    def _hash(self, words: np.ndarray) -> np.ndarray:
        sums = (words + self._key).reshape(len(words), -1, 2, _PAIRS)
        return np.multiply(sums[:, :, 0], sums[:, :, 1], dtype=np.uint64).sum(axis=(1, 2), dtype=np.uint64)

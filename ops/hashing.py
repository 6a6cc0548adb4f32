"""A keyed hash of blocks of bytes, for checksums of messages: the interpreter's lock is free while it computes."""

from __future__ import annotations

import numpy as np

from hop_tf.ops import native

BLOCK_BYTES = 4096
KEY_BYTES = 2 * BLOCK_BYTES
_HALF_WORDS = BLOCK_BYTES // 8
# So many blocks at a time stay in the processor's cache.
_NUMPY_BLOCKS = 16


def hash_blocks(data: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Two 64-bit digests of each block; `HopTfBlockHash` says how they are computed, and what they are good for.

    Args:
      data: Flat uint8 array, C-contiguous, of a multiple of 4096 bytes.
      key: 2048 random words, '<u4', C-contiguous.

    Returns:
      uint64 array [number of blocks, 2], the same with and without the native library.

    Raises:
      ValueError: If an argument has another size.
    """
    if data.nbytes % BLOCK_BYTES or key.nbytes != KEY_BYTES:
        raise ValueError(
            f"`data` must have a multiple of {BLOCK_BYTES} bytes and `key` {KEY_BYTES}. "
            f"Received: data of {data.nbytes} bytes, key of {key.nbytes} bytes."
        )
    digests = np.empty((data.nbytes // BLOCK_BYTES, 2), np.uint64)
    if native.kernels() is None:
        words = data.view("<u4").reshape(-1, 2, _HALF_WORDS)
        for begin in range(0, len(words), _NUMPY_BLOCKS):
            digests[begin : begin + _NUMPY_BLOCKS] = _hash_words(words[begin : begin + _NUMPY_BLOCKS], key)
    else:
        native.call("BlockHash", data.ctypes.data, len(digests), key.ctypes.data, digests.ctypes.data)
    return digests


def _hash_words(words: np.ndarray, key: np.ndarray) -> np.ndarray:
    digests = []
    for first, second in key.reshape(2, 2, _HALF_WORDS):
        products = np.multiply(words[:, 0] + first, words[:, 1] + second, dtype=np.uint64)
        digests.append(products.sum(axis=1, dtype=np.uint64))
    return np.stack(digests, axis=1)

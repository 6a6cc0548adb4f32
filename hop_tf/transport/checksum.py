"""`Checksums`: verify that frames come from the peer of a connection, whole and in order.

A checksum is a keyed BLAKE2b of 64 bits over the frame's number, its beginning, and its payload. BLAKE2b takes a second
for each GB. So it does not hash the payload itself, but a fast keyed hash of each full block (`BlockHash`), and the
rest of the payload. An attacker without the key guesses a frame's checksum with a probability of 2^-64. Changing the
blocks of a sent frame without changing its checksum succeeds with a probability of 2^-32. Each attempt ends the
connection and its key.
"""

from __future__ import annotations

import hashlib
import importlib
from typing import TYPE_CHECKING

import numpy as np

from hop_tf.errors import ProtocolError

if TYPE_CHECKING:
    from hop_tf.ops.hashing import BlockHash

CHECKSUM_BYTES = 8


class Checksums:
    """The checksums of the frames that one side of a connection sends.

    Args:
      key: 32 bytes that both sides of the connection know, for this direction only.

    Attributes:
      num_bytes: Length of a checksum.
      num_frames: Number of frames so far. Code that writes or reads a frame by other means counts it here.
    """

    num_bytes = CHECKSUM_BYTES

    def __init__(self, key: bytes):
        self._key = key
        self._keyed = hashlib.blake2b(key=key, digest_size=CHECKSUM_BYTES)
        # Imported only when there is a connection: the module imports TensorFlow, which takes seconds.
        hashing = importlib.import_module("hop_tf.ops.hashing")
        self._blocks = hashing.BlockHash(hashlib.shake_128(key).digest(hashing.KEY_BYTES))
        self.num_frames = 0

    def begin(self, start: bytes) -> Checksum:
        """Begins the checksum of the next frame, which begins with `start`. The caller then adds its payload."""
        return Checksum(self._begin(start), self._blocks)

    def of(self, frame: bytes) -> bytes:
        """The checksum of the next frame, which has no payload."""
        return self._begin(frame).digest()

    def keys_for_native(self) -> tuple[bytes | None, int | None]:
        """For `HopTfFrame`: the key, and the address of the key for blocks."""
        return self._key, self._blocks.key_address

    def _begin(self, start: bytes):
        running = self._keyed.copy()
        running.update(self.num_frames.to_bytes(8, "little") + start)
        self.num_frames += 1
        return running


class Checksum:
    """The running checksum of one frame."""

    def __init__(self, running, blocks: BlockHash):
        self._running = running
        self._blocks = blocks
        self._rest = bytearray()

    def add(self, data: np.ndarray) -> None:
        """Adds bytes of the payload: a flat uint8 array."""
        if self._rest:
            missing = self._blocks.block_bytes - len(self._rest)
            self._rest += data[:missing].tobytes()
            data = data[missing:]
            if len(self._rest) < self._blocks.block_bytes:
                return
            block, self._rest = self._rest, bytearray()
            self._running.update(self._blocks.digests(np.frombuffer(block, np.uint8)))
        num_full = data.size - data.size % self._blocks.block_bytes
        if num_full:
            self._running.update(self._blocks.digests(data[:num_full]))
        if num_full < data.size:
            self._rest += data[num_full:].tobytes()

    def value(self) -> bytes:
        """The checksum. `add` must not be called afterwards."""
        self._running.update(self._rest)
        return self._running.digest()


class NoChecksums:
    """Empty checksums, for a connection that protects its data itself, as with TLS.

    Attributes:
      num_bytes: See `Checksums`.
      num_frames: Not used.
    """

    num_bytes = 0
    num_frames = 0

    def keys_for_native(self) -> tuple[bytes | None, int | None]:
        """See `Checksums`."""
        return None, None

    def begin(self, start: bytes) -> NoChecksums:
        """See `Checksums`."""
        del start
        return self

    def of(self, frame: bytes) -> bytes:
        """See `Checksums`."""
        del frame
        return b""

    def add(self, data: np.ndarray) -> None:
        """See `Checksum`."""

    def value(self) -> bytes:
        """See `Checksum`."""
        return b""


def check_equal(received: bytes, expected: bytes) -> None:
    """Raises ProtocolError if a frame's checksum is wrong."""
    if received != expected:
        raise ProtocolError(
            "a frame has a wrong checksum: it was changed or inserted on its way. The rank connects again."
        )

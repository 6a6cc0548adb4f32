"""Joins several arrays into the payload of one message, or of a file, and splits them again."""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence

import numpy as np

from hop_tf.errors import ProtocolError

_ALIGNMENT_BYTES = 64
_WORD = struct.Struct("<q")
_PADDING = np.zeros(_ALIGNMENT_BYTES, np.uint8)


def join(parts: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The payload of a message, or the contents of a file, that `split` divides again. No array is copied.

    Args:
      parts: Contiguous arrays.

    Returns:
      The number of parts and their lengths, then the parts' bytes. Each part starts at a multiple of 64 bytes, so that
      codecs and TensorFlow use it without a copy.
    """
    flat = [np.ascontiguousarray(part).reshape(-1).view(np.uint8) for part in parts]
    payload = []
    for part in (_lengths(*[part.size for part in flat]), *flat):
        payload.append(part)
        if num_padding := -part.size % _ALIGNMENT_BYTES:
            payload.append(_PADDING[:num_padding])
    return payload


def joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    """The result of `join` as one array of bytes, which is a copy."""
    return np.concatenate(join(parts))


@functools.lru_cache(maxsize=256)
def _lengths(*sizes: int) -> np.ndarray:
    """Returns the number of parts and their sizes, as bytes. Cached, because each step has parts of the same sizes."""
    return np.frombuffer(struct.pack(f"<{1 + len(sizes)}q", len(sizes), *sizes), np.uint8)


def split(payload: np.ndarray) -> list[np.ndarray]:
    """The bytes of each part of a payload from `join`. The parts share memory with `payload`.

    Raises:
      ProtocolError: If the payload is malformed.
    """
    count = _WORD.unpack_from(payload)[0] if payload.size >= _WORD.size else -1
    if not 0 <= count < payload.size // _WORD.size:
        raise ProtocolError(f"a payload of {payload.size} bytes has no valid list of parts.")
    parts, start = [], _padded((1 + count) * _WORD.size)
    for size in struct.unpack_from(f"<{count}q", payload, _WORD.size):
        if not 0 <= size <= payload.size - start:
            raise ProtocolError(f"a payload of {payload.size} bytes has no part of {size} bytes at {start}.")
        parts.append(payload[start : start + size])
        start += size + -size % _ALIGNMENT_BYTES
    return parts


def view(part: np.ndarray, dtype: np.dtype, shape: Sequence[int]) -> np.ndarray:
    """A part's bytes as an array of that type and shape.

    Raises:
      ProtocolError: If the part has another length.
    """
    expected = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    if part.size != expected:
        raise ProtocolError(f"expected {expected} bytes. Received: {part.size} bytes.")
    return part.view(dtype).reshape(shape)


def _padded(size: int) -> int:
    return size + -size % _ALIGNMENT_BYTES

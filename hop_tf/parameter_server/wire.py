"""How several arrays, and a codec, become bytes and come back."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

import numpy as np
from google.protobuf.message import DecodeError

from hop_tf import codecs
from hop_tf.errors import ProtocolError
from hop_tf.parameter_server.parameter_server_pb2 import Parts

_ALIGNMENT_BYTES = 64
_LENGTH = np.dtype("<u8")


def join(parts: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The payload of a message, or the contents of a file, that `split` divides again; no array is copied.

    Args:
      parts: Contiguous arrays.

    Returns:
      The lengths, then the parts' bytes, each at a multiple of 64 bytes, so that codecs and TensorFlow take them as
      they are.
    """
    flat = [np.ascontiguousarray(part).reshape(-1).view(np.uint8) for part in parts]
    lengths = Parts(num_bytes=[part.size for part in flat]).SerializeToString()
    head = np.array([len(lengths)], _LENGTH).view(np.uint8)
    payload = []
    for part in (np.concatenate([head, np.frombuffer(lengths, np.uint8)]), *flat):
        payload += [part, np.zeros(-part.size % _ALIGNMENT_BYTES, np.uint8)]
    return payload


def split(payload: np.ndarray) -> list[np.ndarray]:
    """The bytes of each part of what `join` has made, which share memory with `payload`.

    Raises:
      ProtocolError: If it is malformed.
    """
    try:
        length = int(payload[: _LENGTH.itemsize].view(_LENGTH)[0])
        if not 0 <= length <= payload.size - _LENGTH.itemsize:
            raise ValueError(f"it would have {length} bytes")
        sizes = Parts.FromString(payload[_LENGTH.itemsize : _LENGTH.itemsize + length].tobytes()).num_bytes
    except (ValueError, IndexError, DecodeError) as error:
        raise ProtocolError(f"a payload of {payload.size} bytes has no valid list of parts: {error}.") from error
    parts, start = [], _padded(_LENGTH.itemsize + length)
    for size in sizes:
        if not 0 <= size <= payload.size - start:
            raise ProtocolError(f"a payload of {payload.size} bytes has no part of {size} bytes at {start}.")
        parts.append(payload[start : start + size])
        start += _padded(size)
    return parts


def view(part: np.ndarray, dtype: np.dtype, shape: Sequence[int]) -> np.ndarray:
    """A part's bytes as an array of that type and shape.

    Raises:
      ProtocolError: If it has another length.
    """
    expected = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    if part.size != expected:
        raise ProtocolError(f"{part.size} bytes came where {expected} were expected.")
    return part.view(dtype).reshape(shape)


def codec_to_json(codec: codecs.Codec) -> str:
    """Describes a codec, whose settings JSON can hold."""
    return json.dumps({"name": codec.name, "settings": dataclasses.asdict(codec)})


def codec_from_json(text: str) -> codecs.Codec:
    """The codec that `codec_to_json` has described.

    Raises:
      ProtocolError: If there is no such codec here.
    """
    try:
        description = json.loads(text)
        return dataclasses.replace(codecs.get(description["name"]), **description["settings"])
    except (ValueError, TypeError, KeyError) as error:
        raise ProtocolError(f"no codec is described by {text!r}: {error}.") from error


def _padded(size: int) -> int:
    return size + -size % _ALIGNMENT_BYTES

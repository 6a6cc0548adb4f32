"""Frames that are awaited on sockets, read by the native library: see `HopTfReceiveFrames`."""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Sequence

from hop_tf.ops import native


class FrameState(enum.IntEnum):
    """What has become of a frame."""

    AWAITED = 0
    COMPLETE = 1
    OTHER = 2
    CORRUPT = 3
    ENDED = 4


class Frame(ctypes.Structure):
    """A frame that is awaited: `HopTfFrame`, whose fields are told there."""

    _fields_ = (
        ("socket", ctypes.c_int32),
        ("start_bytes", ctypes.c_int32),
        ("starts", ctypes.c_char_p * 2),
        ("start", ctypes.c_void_p),
        ("payload", ctypes.c_void_p),
        ("payload_bytes", ctypes.c_int64),
        ("checksum", ctypes.c_void_p),
        ("checksum_bytes", ctypes.c_int32),
        ("state", ctypes.c_int32),
        ("number", ctypes.c_int64),
        ("key", ctypes.c_char_p),
        ("block_key", ctypes.c_void_p),
        ("num_read", ctypes.c_int64),
    )


def receives_frames() -> bool:
    """Whether there is a native library to do it."""
    return native.kernels() is not None


def receive_frames(frames: Sequence[Frame], idle_seconds: float, total_seconds: float) -> list[Frame]:
    """Reads frames, each on a socket of its own, in whichever order they come.

    Args:
      frames: The frames; the memory that they tell of is there for so long.
      idle_seconds: It ends when nothing has come for that time.
      total_seconds: It ends after that time.

    Returns:
      The frames, as they are now: all are complete, or one can never be, or time was over.

    Blocks: as said, without the interpreter's lock.
    """
    array = (Frame * len(frames))(*frames)
    milliseconds = (int(1000 * seconds) for seconds in (idle_seconds, total_seconds))
    native.call("ReceiveFrames", array, len(frames), *milliseconds)
    return list(array)

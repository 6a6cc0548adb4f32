"""Frames that are awaited on sockets, read by the native library: see `HopTfReceiveFrames`."""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Sequence

from hop_tf.ops import native


class FrameState(enum.IntEnum):
    """The state of an awaited frame."""

    AWAITED = 0
    COMPLETE = 1
    OTHER = 2
    CORRUPT = 3
    ENDED = 4


class Frame(ctypes.Structure):
    """An awaited frame: see `HopTfFrame` for the fields."""

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
    """True if the native library is there."""
    return native.kernels() is not None


def receive_frames(frames: Sequence[Frame], idle_milliseconds: int, total_milliseconds: int) -> Sequence[Frame]:
    """Reads frames, each on a socket of its own, in whichever order they come.

    Args:
      frames: The frames. The caller keeps alive the memory that they point to.
      idle_milliseconds: The call returns if nothing comes for this time.
      total_milliseconds: The call returns after this time.

    Returns:
      The frames with their new states.

    Blocks: until all frames are complete, one can no longer be completed, or the time is over. Other Python threads run
      meanwhile.
    """
    array = (Frame * len(frames))(*frames)
    native.call("ReceiveFrames", array, len(frames), idle_milliseconds, total_milliseconds)
    return array

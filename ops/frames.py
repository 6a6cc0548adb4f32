"""Frames that the native library sends and receives on sockets. See `HopTfExchangeFrames`."""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Sequence

import numpy as np

from hop_tf.ops import native


class FrameState(enum.IntEnum):
    """The state of a frame."""

    BEGUN = 0
    COMPLETE = 1
    OTHER = 2
    CORRUPT = 3
    ENDED = 4


class Piece(ctypes.Structure):
    """A piece of memory: see `HopTfPiece`."""

    _fields_ = (("data", ctypes.c_void_p), ("num_bytes", ctypes.c_int64))


class Frame(ctypes.Structure):
    """A frame: see `HopTfFrame` for the fields."""

    _fields_ = (
        ("socket", ctypes.c_int32),
        ("is_outgoing", ctypes.c_int32),
        ("flags", ctypes.c_int32),
        ("queue_bytes", ctypes.c_int32),
        ("header_bytes", ctypes.c_int32),
        ("checksum_bytes", ctypes.c_int32),
        ("sequence", ctypes.c_int64),
        ("text", ctypes.c_char_p),
        ("payload", ctypes.POINTER(Piece)),
        ("num_pieces", ctypes.c_int64),
        ("start", ctypes.c_void_p),
        ("checksum", ctypes.c_void_p),
        ("number", ctypes.c_int64),
        ("key", ctypes.c_char_p),
        ("block_key", ctypes.c_void_p),
        ("state", ctypes.c_int32),
        ("num_done", ctypes.c_int64),
    )


def exchanges_frames() -> bool:
    """True if the native library is available."""
    return native.kernels() is not None


def pieces_of(arrays: Sequence[np.ndarray]) -> ctypes.Array[Piece]:
    """The memory of contiguous uint8 arrays. The caller must keep the arrays alive."""
    # Not `array.ctypes`, which takes three times as long.
    return (Piece * len(arrays))(*[(array.__array_interface__["data"][0], array.size) for array in arrays])


def exchange_frames(addresses: Sequence[int], idle_milliseconds: int, total_milliseconds: int) -> None:
    """Sends frames, and receives other frames meanwhile, each on a socket of its own.

    Awaited frames that are not complete may be passed again to a later call.

    Args:
      addresses: Addresses of the frames. The caller must keep the frames alive, and the memory that they point to.
      idle_milliseconds: The call returns if no bytes are sent or received for this time.
      total_milliseconds: The call returns after this time.

    Blocks: until all outgoing frames are complete or, without outgoing frames, all awaited ones; until a frame can no
      longer be completed; or until the time is over. When all awaited frames are complete, the call waits at most 2 ms
      for a socket whose send buffer is full. Other Python threads run meanwhile.
    """
    num_frames = len(addresses)
    frames = (ctypes.c_void_p * num_frames)(*addresses)
    native.call("ExchangeFrames", frames, num_frames, idle_milliseconds, total_milliseconds)

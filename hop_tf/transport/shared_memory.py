"""Memory that two processes of one machine share, for large payloads of a connection's messages.

The sender copies a payload into the memory, and the frame holds the payload's place. The receiver reads the payload
there. The payload does not pass through the kernel, and needs no checksum. A block is free again when the receiver's
last view of it is gone. A payload that no free block can hold travels in its frame.

The memory has no name: the receiver opens the sender's file descriptor. The memory disappears with the two processes,
however they end. Connections between machines, or through a proxy, do not use shared memory.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
import socket
import stat
import struct
import sys
import weakref
from collections.abc import Sequence

import numpy as np

from hop_tf.errors import ProtocolError
from hop_tf.transport import control_pb2

# Smaller payloads cost less in their frames.
MIN_PAYLOAD_BYTES = 1 << 17
PLACE_BYTES = 16
# Untouched pages take no memory.
_NUM_BYTES = 1 << 26
_NAME = "hop_tf payloads"
_NONCE_BYTES = 32
_ALIGNMENT = 64
# A word before each payload tells if the receiver may still read the payload.
_BEFORE_BYTES = _ALIGNMENT
_WORD_BYTES = 8
# Pages are reserved in units of 1 MiB, by a `madvise` whose number Python does not define.
_RESERVED_BYTES = 1 << 20
_MADV_POPULATE_WRITE = 23
# Before Python 3.13, a mapping always keeps a descriptor open.
_MAPPING = {"trackfd": False} if sys.version_info >= (3, 13) else {}
_FREE, _IN_USE = 0, 1
_PLACE = struct.Struct("<QQ")  # Offset and length of a payload.


class SharedMemory:
    """The sender's side. One thread may use it at a time.

    Args:
      num_bytes: Size of the memory. Default: 64 MiB.

    Raises:
      OSError: If the system cannot provide the memory.
    """

    def __init__(self, num_bytes: int = _NUM_BYTES):
        self._num_bytes = num_bytes
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        self._file: int | None = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._file, num_bytes)
            # Otherwise the sender could shrink the memory while the receiver reads it.
            fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            self._mapped = mmap.mmap(self._file, num_bytes, **_MAPPING)
        except OSError:
            self.close_file()
            raise
        self._num_reserved = 0
        self._bytes = np.frombuffer(self._mapped, np.uint8)
        self._words = self._bytes.view(np.int64)
        self._bytes[:_NONCE_BYTES] = np.frombuffer(self._nonce, np.uint8)
        self._blocks: list[tuple[int, int]] = []  # First byte and end of each block in use, in order.

    @classmethod
    def make(cls, connected: socket.socket) -> SharedMemory | None:
        """Makes memory for a connection. Returns None if the peer is on another machine, or there is no memory."""
        if not _stays_here(connected) or not hasattr(os, "memfd_create") or not hasattr(fcntl, "F_ADD_SEALS"):
            return None
        try:
            return cls()
        except OSError:
            return None

    def offer(self, connected: socket.socket) -> control_pb2.SharedMemory:
        """The message that tells the receiver how to open the memory. Valid until `close_file`."""
        return control_pb2.SharedMemory(
            process=os.getpid(),
            file=self._file,
            num_bytes=self._num_bytes,
            nonce=self._nonce,
            sender_address=str(connected.getsockname()),
            receiver_address=str(connected.getpeername()),
        )

    def close_file(self) -> None:
        """Called when the receiver has opened the memory, or never will."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def put(self, payload: Sequence[np.ndarray], num_bytes: int) -> bytes | None:
        """Copies a payload into a free block.

        Args:
          payload: Flat uint8 arrays.
          num_bytes: The sum of their lengths.

        Returns:
          The place of the payload, for the receiver's `PeerMemory.payload`; None if there is no room.
        """
        begin = self._take(_BEFORE_BYTES + num_bytes)
        if begin is None:
            return None
        self._words[begin // _WORD_BYTES] = _IN_USE
        at = begin + _BEFORE_BYTES
        place = _PLACE.pack(at, num_bytes)
        for array in payload:
            np.copyto(self._bytes[at : at + array.size], array)
            at += array.size
        return place

    def _take(self, num_bytes: int) -> int | None:
        """Takes the first free block of that length, because recently used memory is still in the processor's cache."""
        self._blocks = [block for block in self._blocks if self._words[block[0] // _WORD_BYTES] == _IN_USE]
        begin = _ALIGNMENT  # Behind the nonce.
        for index, (next_begin, next_end) in enumerate([*self._blocks, (self._num_bytes, 0)]):
            end = begin + num_bytes
            if end <= next_begin:
                if not self._reserve(end):
                    return None
                self._blocks.insert(index, (begin, end))
                return begin
            begin = -(-next_end // _ALIGNMENT) * _ALIGNMENT
        return None

    def _reserve(self, end: int) -> bool:
        """Reserves the pages up to `end`: writing to a page that the system cannot provide would end the process."""
        if end <= self._num_reserved:
            return True
        new_end = min(-(-end // _RESERVED_BYTES) * _RESERVED_BYTES, self._num_bytes)
        try:
            self._mapped.madvise(_MADV_POPULATE_WRITE, self._num_reserved, new_end - self._num_reserved)
        except OSError as error:
            if error.errno != errno.EINVAL:  # Linux before 5.14 does not know this advice.
                return False
        self._num_reserved = new_end
        return True


class PeerMemory:
    """The receiver's side.

    Args:
      offer: The sender's offer.

    Raises:
      OSError: If the memory cannot be opened here.
    """

    def __init__(self, offer: control_pb2.SharedMemory):
        # With these flags, opening does not block, even if the path leads to something else.
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
        file = os.open(_checked_path(offer), flags)
        try:
            _check_file(file, offer)
            self._mapped = mmap.mmap(file, offer.num_bytes, **_MAPPING)
        finally:
            os.close(file)
        self._num_bytes = offer.num_bytes
        self._words = np.frombuffer(self._mapped, np.int64, offer.num_bytes // _WORD_BYTES)
        if bytes(self._mapped[:_NONCE_BYTES]) != offer.nonce:
            raise OSError("this memory is not that of the sender.")

    @classmethod
    def open(cls, offer: control_pb2.SharedMemory, connected: socket.socket) -> PeerMemory | None:
        """Opens the memory of a connection's sender. Returns None if it is on another machine, or cannot be opened."""
        ends = str(connected.getpeername()), str(connected.getsockname())
        if not hasattr(fcntl, "F_GET_SEALS") or ends != (offer.sender_address, offer.receiver_address):
            return None
        try:
            return cls(offer)
        except (OSError, ValueError):
            return None

    def payload(self, place: bytes) -> np.ndarray:
        """The read-only payload at a place that the sender has named. The place is free when the last view is gone.

        Raises:
          ProtocolError: If there can be no payload at that place.
        """
        begin, num_bytes = _PLACE.unpack(place)
        is_aligned = begin % _ALIGNMENT == 0
        if not (is_aligned and 2 * _ALIGNMENT <= begin <= self._num_bytes and num_bytes <= self._num_bytes - begin):
            raise ProtocolError(f"{num_bytes} bytes at {begin} cannot be in a memory of {self._num_bytes} bytes.")
        payload = np.frombuffer(self._mapped, np.uint8, num_bytes, begin)
        payload.flags.writeable = False
        # Views of an array refer to the array's base, not to the array. The base lives as long as the last view.
        word = (begin - _BEFORE_BYTES) // _WORD_BYTES
        finalizer = weakref.finalize(payload.base, _free, self._words, word, os.getpid())
        finalizer.atexit = False
        return payload


def _free(words: np.ndarray, word: int, process: int) -> None:
    if os.getpid() == process:  # A fork's copy of a payload does not count.
        words[word] = _FREE


def _stays_here(connected: socket.socket) -> bool:
    """True if the connection does not leave the machine."""
    here, there = connected.getsockname()[0], connected.getpeername()[0]
    return here == there or (here.startswith("127.") and there.startswith("127."))


def _checked_path(offer: control_pb2.SharedMemory) -> str:
    path = f"/proc/{offer.process}/fd/{offer.file}"
    if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
        raise OSError(f"{path} is not a memory for payloads.")
    return path


def _check_file(file: int, offer: control_pb2.SharedMemory) -> None:
    """Raises OSError if reading the memory could fail later."""
    status = os.fstat(file)
    is_fixed = stat.S_ISREG(status.st_mode) and fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    if not is_fixed or offer.num_bytes != status.st_size or offer.num_bytes < 2 * _ALIGNMENT:
        raise OSError("the memory has another size than announced, or may shrink.")

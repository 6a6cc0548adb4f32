"""Encodes messages as bytes, and decodes them.

The two ends of a stream exchange *frames*. A frame begins with a fixed little-endian head, followed by the queue's
name, the message's header, and the payload. After the greeting, each frame ends with a checksum (`checksum.py`). On a
gRPC stream a frame holds only the first bytes of a large payload. The next *chunks* on the stream are the remaining
bytes and nothing else, so that bulk data is neither parsed nor wrapped.

The head ends with a CRC of its own, so that a length is verified before it is used. A receiver that believed a wrong
length would wait for bytes that never come, or take the next frame for a payload. All lengths are then compared with
limits, before memory is allocated.

The head and the greeting (`control.proto`) are the same in every version, so that two versions can tell each other that
they differ. `PROTOCOL_VERSION` is the version of the protocol after the greeting.
"""

from __future__ import annotations

import dataclasses
import enum
import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from hop_tf.errors import ProtocolError
from hop_tf.tensors.buffers import BufferPool
from hop_tf.transport.checksum import Checksums, NoChecksums, check_equal
from hop_tf.transport.shared_memory import PLACE_BYTES

PROTOCOL_VERSION = 4
CHUNK_BYTES = 1 << 20
MAX_QUEUE_BYTES = 255
MAX_HEADER_BYTES = 1 << 16
MAX_PAYLOAD_BYTES = 1 << 36
MAX_LANES = 16

_MAGIC = b"hopT"
_HEAD_VERSION = 4  # Of the head and the greeting.
# magic, version, kind, flags, sequence, payload length, header length, queue length.
_FIELDS = struct.Struct("<4sBBHQQIH")
_CRC = struct.Struct("<I")
HEAD_BYTES = _FIELDS.size + _CRC.size
ACK_REQUESTED = 1
_RECORDED = 2
IN_SHARED_MEMORY = 4
_NOTHING = BufferPool().take(0)


class FrameKind(enum.IntEnum):
    """The purposes of frames."""

    CHALLENGE = 1
    HELLO = 2
    HELLO_REPLY = 3
    MESSAGE = 4
    ACKNOWLEDGE = 5
    PING = 6
    PONG = 7


_KINDS = {kind.value: kind for kind in FrameKind}


@dataclasses.dataclass(slots=True)
class Outgoing:
    """An outgoing message.

    Attributes:
      sequence: Its number on the lane, from 1.
      queue: Name of the queue, UTF-8.
      header: The header.
      payload: Flat uint8 arrays.
      num_bytes: Length of header and payload.
      ack_requested: True if the sender asks for an acknowledgement.
      was_taken: True if a connection has begun to send the message: the peer may have received it.
      is_recorded: True if the sender records the message. The receiver then records it, too.
      step: The step that the message was enqueued in; for records.
      put_at: The time when it was enqueued, `time.time()`; for records.
      rest: The rest of the frame of a partly written message.
    """

    sequence: int
    queue: bytes
    header: bytes
    payload: Sequence[np.ndarray]
    num_bytes: int
    ack_requested: bool = False
    was_taken: bool = False
    is_recorded: bool = False
    step: int = -1
    put_at: float = 0.0
    rest: Sequence[memoryview] = ()


class Frame(NamedTuple):
    """A parsed frame.

    Attributes:
      kind: Its purpose.
      sequence: Number of a message on its lane, from 1; in an acknowledgement, number of the last message received.
      queue: Name of the queue, UTF-8.
      header: The message's header; in a greeting, its protobuf message.
      payload_bytes: Length of the whole payload.
      inline: On a gRPC stream, the bytes after the header: the part of the payload and the checksum that this frame
        holds.
      ack_requested: True if the sender asks for an acknowledgement of the message.
      is_recorded: True if the sender records the message.
    """

    kind: FrameKind
    sequence: int = 0
    queue: bytes = b""
    header: bytes = b""
    payload_bytes: int = 0
    inline: memoryview | bytes = b""
    ack_requested: bool = False
    is_recorded: bool = False


def encode_head(
    kind: int, *, flags: int = 0, sequence: int = 0, payload: int = 0, header: int = 0, queue: int = 0
) -> bytes:
    """The first `HEAD_BYTES` bytes of a frame.

    Args:
      kind: The frame's purpose.
      flags: The flags, such as `ACK_REQUESTED`.
      sequence: See `Frame`.
      payload: Length of the payload.
      header: Length of the header.
      queue: Length of the queue's name.
    """
    fields = _FIELDS.pack(_MAGIC, _HEAD_VERSION, kind, flags, sequence, payload, header, queue)
    return fields + _CRC.pack(zlib.crc32(fields))


def encode(kind: FrameKind, *, sequence: int = 0, body: bytes = b"") -> bytes:
    """A frame that carries no message.

    Args:
      kind: Its purpose.
      sequence: See `Frame`.
      body: A greeting's protobuf message.
    """
    return encode_head(kind, sequence=sequence, header=len(body)) + body


def encode_start(message: Outgoing, *, in_shared_memory: bool = False) -> bytes:
    """The beginning of a message's frame, up to the payload, or up to the place of a payload in shared memory."""
    flags = ACK_REQUESTED * message.ack_requested | _RECORDED * message.is_recorded
    head = encode_head(
        FrameKind.MESSAGE,
        flags=flags | IN_SHARED_MEMORY * in_shared_memory,
        sequence=message.sequence,
        payload=PLACE_BYTES if in_shared_memory else message.num_bytes - len(message.header),
        header=len(message.header),
        queue=len(message.queue),
    )
    return b"".join((head, message.queue, message.header))


def encode_message(message: Outgoing, checksums: Checksums | NoChecksums) -> Iterator[bytes]:
    """Yields a message's frame, then the chunks with the rest of its payload. The last part ends with the checksum."""
    start = encode_start(message)
    checksum = checksums.begin(start)
    pieces, room = [start], CHUNK_BYTES - len(start)
    for array in message.payload:
        part = array
        while part.nbytes:
            if not room:
                yield b"".join(pieces)
                pieces, room = [], CHUNK_BYTES
            piece, part = part[:room], part[room:]
            checksum.add(piece)
            pieces.append(memoryview(piece))
            room -= piece.nbytes
    if room < checksums.num_bytes:
        yield b"".join(pieces)
        pieces = []
    yield b"".join((*pieces, checksum.value()))


class Head(NamedTuple):
    """A parsed head. See `Frame` for the fields, and `shared_memory.py` for payloads in shared memory."""

    kind: FrameKind
    ack_requested: bool
    is_recorded: bool
    in_shared_memory: bool
    sequence: int
    payload_bytes: int
    header_bytes: int
    queue_bytes: int

    def frame(self, text: bytes, inline: memoryview | bytes = b"") -> Frame:
        """The frame with this head. `text` is the queue's name followed by the header."""
        return Frame(
            kind=self.kind,
            sequence=self.sequence,
            queue=text[: self.queue_bytes],
            header=text[self.queue_bytes :],
            payload_bytes=self.payload_bytes,
            inline=inline,
            ack_requested=self.ack_requested,
            is_recorded=self.is_recorded,
        )


def decode_head(data: bytes) -> Head:
    """Parses the first `HEAD_BYTES` bytes of a frame.

    Raises:
      ProtocolError: If the data is no head, was changed in flight, or has a length beyond its limit.
    """
    if len(data) < HEAD_BYTES:
        raise ProtocolError(f"{len(data)} bytes are not a frame.")
    magic, version, kind, flags, sequence, payload_bytes, header_bytes, queue_bytes = _FIELDS.unpack_from(data)
    if magic != _MAGIC or version != _HEAD_VERSION:
        raise ProtocolError(f"a frame must begin with {_MAGIC!r}, version {_HEAD_VERSION}. Received: {data[:5]!r}.")
    if _CRC.unpack_from(data, _FIELDS.size) != (zlib.crc32(data[: _FIELDS.size]),):
        raise ProtocolError("the head of a frame has a wrong CRC: it was changed on its way.")
    if kind not in _KINDS or flags & ~(ACK_REQUESTED | _RECORDED | IN_SHARED_MEMORY):
        raise ProtocolError(f"a frame has unknown kind {kind} or flags {flags}.")
    if queue_bytes > MAX_QUEUE_BYTES or header_bytes > MAX_HEADER_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
        lengths = f"queue {queue_bytes}, header {header_bytes}, payload {payload_bytes}"
        raise ProtocolError(f"a frame has lengths beyond the limits: {lengths}.")
    in_memory = flags & IN_SHARED_MEMORY != 0
    if in_memory and payload_bytes != PLACE_BYTES:
        raise ProtocolError(f"a frame refers to shared memory by {payload_bytes} bytes. Expected: {PLACE_BYTES} bytes.")
    return Head(
        kind=_KINDS[kind],
        ack_requested=flags & ACK_REQUESTED != 0,
        is_recorded=flags & _RECORDED != 0,
        in_shared_memory=in_memory,
        sequence=sequence,
        payload_bytes=payload_bytes,
        header_bytes=header_bytes,
        queue_bytes=queue_bytes,
    )


def decode(data: bytes, checksum_bytes: int = 0) -> Frame:
    """Parses a frame of a gRPC stream.

    Args:
      data: The frame.
      checksum_bytes: Length of the checksum at its end.

    Raises:
      ProtocolError: If the data is no frame, or has a length beyond its limit.
    """
    head = decode_head(data)
    if head.in_shared_memory:
        raise ProtocolError("a frame of a gRPC stream refers to shared memory, which streams do not have.")
    end = HEAD_BYTES + head.queue_bytes + head.header_bytes
    if not end <= len(data) <= min(CHUNK_BYTES, end + head.payload_bytes + checksum_bytes):
        raise ProtocolError(f"a frame of {len(data)} bytes cannot hold what its head says: {head}.")
    return head.frame(data[HEAD_BYTES:end], memoryview(data)[end:])


def decode_checked(data: bytes, checksums: Checksums | NoChecksums) -> Frame:
    """Parses a frame that came after the greeting and has no payload.

    Raises:
      ProtocolError: If the data is no frame, has a length beyond its limit, or has a wrong checksum.
    """
    frame = decode(data, checksums.num_bytes)
    check_equal(bytes(frame.inline), checksums.of(data[: len(data) - len(frame.inline)]))
    return frame


def take_buffer(pool: BufferPool, num_bytes: int) -> np.ndarray:
    """Memory for a payload.

    Raises:
      ProtocolError: If there is not enough memory.
    """
    try:
        return pool.take(num_bytes) if num_bytes else _NOTHING
    except (OSError, MemoryError) as error:
        raise ProtocolError(f"no memory for a message of {num_bytes} bytes: {error}.") from error


class Assembler:
    """Puts a payload together from a message's frame and the chunks that follow it.

    Args:
      pool: The pool that the payload's memory comes from.
      data: The message's frame.
      checksums: The checksums of the connection's frames.

    Raises:
      ProtocolError: If `data` is no frame, there is no memory for the payload, or the checksum is wrong.
    """

    def __init__(self, pool: BufferPool, data: bytes, checksums: Checksums | NoChecksums):
        self.frame = decode(data, checksums.num_bytes)
        self._buffer = take_buffer(pool, self.frame.payload_bytes)
        self._filled = 0
        self._num_missing = self.frame.payload_bytes + checksums.num_bytes
        self._checksum = checksums.begin(data[: len(data) - len(self.frame.inline)])
        self._received_checksum = b""
        if self.frame.inline:
            self._add(self.frame.inline)

    @property
    def complete(self) -> bool:
        """True if the whole payload and its checksum have come, and the checksum is right."""
        return not self._num_missing

    def add(self, chunk: bytes) -> None:
        """Appends the bytes of a chunk.

        Raises:
          ProtocolError: If the chunk is empty or too long, or if the checksum at the end is wrong.
        """
        if not 0 < len(chunk) <= self._num_missing:
            raise ProtocolError(
                f"a chunk has {len(chunk)} bytes, but only {self._num_missing} bytes of the message are missing."
            )
        self._add(chunk)

    def _add(self, chunk: bytes | memoryview) -> None:
        piece = np.frombuffer(chunk, np.uint8)[: self.frame.payload_bytes - self._filled]
        if piece.size:  # An empty payload is shared and read-only.
            self._checksum.add(piece)
            # NumPy, unlike a memoryview, lets other threads run while it copies.
            np.copyto(self._buffer[self._filled : self._filled + piece.size], piece)
            self._filled += piece.size
        self._received_checksum += bytes(chunk[piece.size :])
        self._num_missing -= len(chunk)
        if self.complete:
            check_equal(self._received_checksum, self._checksum.value())

    def payload(self) -> np.ndarray:
        """The payload, read-only."""
        self._buffer.flags.writeable = False
        return self._buffer

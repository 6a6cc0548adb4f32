"""Writes messages and reads expected ones at the same time, by one call of native code.

The calling thread has borrowed the connections of the incoming messages (`lending.py`), and has begun the messages that
it writes (`Outbox.begin_message`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from hop_tf.errors import ProtocolError
from hop_tf.ops.frames import Frame, FrameState, Piece, exchange_frames, pieces_of
from hop_tf.transport.base import Expected
from hop_tf.transport.checksum import Checksums, NoChecksums
from hop_tf.transport.connection import Connection, behind
from hop_tf.transport.framing import ACK_REQUESTED, HEAD_BYTES, IN_SHARED_MEMORY, Outgoing
from hop_tf.transport.outbox import Outbox
from hop_tf.transport.shared_memory import MIN_PAYLOAD_BYTES, PLACE_BYTES

if TYPE_CHECKING:
    from hop_tf.transport.tcp_server import Lane

# Longer waits happen in `Membership.wait` and the connections' threads. They also notice other messages and failures.
_IDLE_MILLISECONDS = 50
_TOTAL_MILLISECONDS = 250


class Way:
    """The frames of a connection in one direction, one at a time.

    Args:
      connection: The connection, after the greeting.
      checksums: The checksums of the direction.
      is_outgoing: True if frames are written, False if they are read.

    Attributes:
      frame: The present frame.
      checksums: The checksums of the direction. A frame is counted when it is complete, or when it is left to another
        thread.
      start: The bytes before the payload.
      checksum: The bytes after the payload.
      place: Memory for the place of a payload in shared memory.
    """

    def __init__(self, connection: Connection, checksums: Checksums | NoChecksums, *, is_outgoing: bool):
        key, block_key = checksums.keys_for_native()
        self.frame = Frame(
            socket=connection.file_number,
            is_outgoing=is_outgoing,
            checksum_bytes=checksums.num_bytes,
            key=key,
            block_key=block_key,
        )
        self.address = ctypes.addressof(self.frame)
        self.place = np.empty(PLACE_BYTES, np.uint8)
        self._place_pieces = pieces_of([self.place])
        self.checksums = checksums
        self.start = self.checksum = np.empty(0, np.uint8)

    def begin(
        self, sequence: int, queue: bytes, header: bytes, payload: ctypes.Array[Piece] | None, *, ack_requested: bool
    ) -> None:
        """Prepares the next frame. A payload of None is in shared memory."""
        frame = self.frame
        text = queue + header
        if self.start.size != HEAD_BYTES + len(text):
            self._make_room(len(text))
        frame.state = FrameState.BEGUN
        frame.num_done = 0
        frame.number = self.checksums.num_frames
        frame.sequence = sequence
        frame.flags = ACK_REQUESTED * ack_requested | IN_SHARED_MEMORY * (payload is None)
        frame.text, frame.queue_bytes, frame.header_bytes = text, len(queue), len(header)
        frame.payload = payload = self._place_pieces if payload is None else payload
        frame.num_pieces = len(payload)

    def _make_room(self, num_text_bytes: int) -> None:
        end = HEAD_BYTES + num_text_bytes
        memory = np.empty(end + self.frame.checksum_bytes, np.uint8)
        self.start, self.checksum = memory[:end], memory[end:]
        self.frame.start = memory.ctypes.data
        self.frame.checksum = memory.ctypes.data + end


class Letter:
    """A message that this thread writes.

    Args:
      outbox: The outbox that has begun the message.
      message: The message.
      connection: The connection to write to.
      pieces: The message's payload.

    Attributes:
      way: The connection's `Way` for writing.
    """

    def __init__(self, outbox: Outbox, message: Outgoing, connection: Connection, pieces: ctypes.Array[Piece]):
        self._outbox = outbox
        self._message = message
        try:
            if connection.way_out is None:
                connection.way_out = Way(connection, connection.sent, is_outgoing=True)
            self.way = way = connection.way_out
            place = connection.begin_frame(message, outbox.max_bytes_per_second)
            if place is not None:
                way.place[:] = np.frombuffer(place, np.uint8)
                pieces = None
            way.begin(message.sequence, message.queue, message.header, pieces, ack_requested=message.ack_requested)
        except BaseException:  # Such as a lack of memory.
            outbox.end_message(message, None)
            raise

    def end(self) -> None:
        """Ends the message. The connection's thread writes the rest."""
        way, frame = self.way, self.way.frame
        if frame.state == FrameState.ENDED:
            self._outbox.end_message(self._message, None)
            return
        way.checksums.num_frames += 1
        rest = ()
        if frame.state != FrameState.COMPLETE:
            payload = [way.place.copy()] if frame.flags & IN_SHARED_MEMORY else self._message.payload
            pieces = way.start.copy(), *payload, way.checksum.copy()
            rest = behind([memoryview(piece) for piece in pieces if piece.size], frame.num_done)
        self._outbox.end_message(self._message, rest)


class Awaited:
    """A message that is expected to be the next one on its lane.

    Attributes:
      way: The connection's `Way` for reading.
    """

    def __init__(self, lane: Lane, sequence: int, queue: bytes, expected: Expected):
        connection = lane.connection
        self._lane = lane
        self._sequence = sequence
        self._num_bytes = len(expected.header) + expected.num_bytes
        if connection.way_in is None:
            connection.way_in = Way(connection, connection.received, is_outgoing=False)
        self.way = connection.way_in
        self._payload = None
        if connection.peer_memory is None or expected.num_bytes < MIN_PAYLOAD_BYTES:
            self._payload = lane.take_buffer(expected.num_bytes)
        pieces = None if self._payload is None else pieces_of([self._payload])
        self.way.begin(sequence, queue, expected.header, pieces, ack_requested=False)

    def take(self) -> np.ndarray | None:
        """Counts the message and returns its payload. If it is not complete, puts its bytes back and returns None."""
        lane, way, frame, payload = self._lane, self.way, self.way.frame, self._payload
        if not frame.num_done:
            return None
        if frame.state != FrameState.COMPLETE:
            pieces = way.start, way.place if payload is None else payload, way.checksum
            lane.connection.unread(b"".join(pieces)[: frame.num_done])
            return None
        way.checksums.num_frames += 1
        if payload is None:
            try:
                payload = lane.connection.peer_memory.payload(way.place)
            except ProtocolError:
                lane.end()  # As the lane's own thread would. The message comes again on the next connection.
                return None
        payload.flags.writeable = False
        ack_requested = bool(frame.flags & ACK_REQUESTED)
        return payload if lane.note(self._sequence, self._num_bytes, ack_requested=ack_requested) else None


def await_all(lanes: Sequence[Lane], queue: bytes, expected: Sequence[Expected]) -> list[Awaited]:
    """Prepares to read the next message of each of these borrowed lanes. Returns [] if one of them cannot be read."""
    messages = []
    for lane, each in zip(lanes, expected, strict=True):
        sequence = lane.next_sequence()
        if sequence is None:
            return []
        messages.append(Awaited(lane, sequence, queue, each))
    return messages


def write(letters: Sequence[Letter], awaited: Sequence[Awaited]) -> None:
    """Writes letters, and ends them. Reads awaited messages meanwhile, and leaves their payloads to `read`.

    Blocks: until all letters are written, or one makes no progress for 0.05 s (0.002 s if all awaited messages have
    come).
    """
    if not letters:
        return
    try:
        _exchange([*letters, *awaited])
    except BaseException:
        for letter in letters:
            letter.way.frame.state = FrameState.ENDED  # The number of written bytes is unknown.
        raise
    finally:
        for letter in letters:
            letter.end()


def read(awaited: Sequence[Awaited], lanes: Sequence[Lane]) -> list[np.ndarray | None]:
    """Reads awaited messages.

    Args:
      awaited: The messages that `await_all` has returned for the lanes.
      lanes: The lanes.

    Returns:
      The payload of each message, read-only. None if the message has not come: the lane's thread will deliver it.

    Blocks: until all messages have come, nothing has come for 0.05 s, or 0.25 s are over.
    """
    if not all(message.way.frame.state for message in awaited):
        _exchange(awaited)
    payloads = [message.take() for message in awaited] or [None] * len(lanes)
    was_of_use = all(payload is not None for payload in payloads)
    for lane in lanes:
        if not was_of_use or lane.lending.pause_seconds:
            lane.lending.note_use(was_of_use)
    return payloads


def _exchange(moving: Sequence[Letter | Awaited]) -> None:
    exchange_frames([each.way.address for each in moving], _IDLE_MILLISECONDS, _TOTAL_MILLISECONDS)

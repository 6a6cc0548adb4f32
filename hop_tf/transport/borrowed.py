"""Reads expected messages from borrowed connections: see `lending.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from hop_tf.ops.frames import Frame, FrameState, receive_frames
from hop_tf.transport.base import Expected
from hop_tf.transport.framing import encode_starts
from hop_tf.transport.shared_memory import MIN_PAYLOAD_BYTES, PLACE_BYTES

if TYPE_CHECKING:
    from hop_tf.transport.tcp_server import Lane

# A longer wait is left to `Membership.wait` and the connections' threads. They also notice other messages and failures.
_IDLE_SECONDS = 0.05
_TOTAL_SECONDS = 0.25


def receive(lanes: Sequence[Lane], queue: bytes, expected: Sequence[Expected]) -> list[np.ndarray | None]:
    """Reads expected messages from borrowed lanes.

    Args:
      lanes: The lane of each message.
      queue: The queue of all.
      expected: The messages.

    Returns:
      The payload of each message, read-only. None if it has not come: then the lane's thread delivers it.

    Blocks: until all messages have come, or nothing has come for 0.05 s.
    """
    messages = [_Message(lane, queue, each) for lane, each in zip(lanes, expected, strict=True)]
    has_come = [False] * len(messages)
    if all(message.can_come for message in messages):
        frames = receive_frames([message.frame() for message in messages], _IDLE_SECONDS, _TOTAL_SECONDS)
        has_come = [message.take(frame) for message, frame in zip(messages, frames, strict=True)]
    for lane in lanes:
        lane.lending.note_use(all(has_come))
    return [message.payload if come else None for message, come in zip(messages, has_come, strict=True)]


class _Message:
    """A message that is expected to be the next one on its lane.

    Attributes:
      payload: Its payload.
    """

    def __init__(self, lane: Lane, queue: bytes, expected: Expected):
        self._lane = lane
        self._sequence = lane.next_sequence()
        self._num_bytes = len(expected.header) + expected.num_bytes
        self._in_shared_memory = lane.connection.peer_memory is not None and expected.num_bytes >= MIN_PAYLOAD_BYTES
        self.payload = lane.take_buffer(PLACE_BYTES if self._in_shared_memory else expected.num_bytes)
        self._starts = encode_starts(
            self._sequence or 0,
            queue,
            expected.header,
            expected.num_bytes,
            in_shared_memory=self._in_shared_memory,
        )
        self._num_start_bytes = len(self._starts[0])
        # Receives the start of the frame, and the checksum that follows the payload.
        self._around = np.empty(self._num_start_bytes + lane.connection.received.num_bytes, np.uint8)

    @property
    def can_come(self) -> bool:
        """True if a borrower can read the message."""
        return self._sequence is not None

    def frame(self) -> Frame:
        """The frame to read."""
        connection = self._lane.connection
        around = self._around.ctypes.data
        number, key, block_key = connection.received.for_native()
        return Frame(
            connection.file_number,
            self._num_start_bytes,
            self._starts,
            around,
            self.payload.ctypes.data,
            self.payload.nbytes,
            around + self._num_start_bytes,
            self._around.size - self._num_start_bytes,
            FrameState.AWAITED,
            number,
            key,
            block_key,
        )

    def take(self, frame: Frame) -> bool:
        """Counts the message if it has come, and otherwise puts its bytes back. True if it has come."""
        connection = self._lane.connection
        if frame.state != FrameState.COMPLETE:
            start, checksum = np.split(self._around, [self._num_start_bytes])
            parts = (start, self.payload, checksum)
            connection.unread(b"".join(part.tobytes() for part in parts)[: frame.num_read] if frame.num_read else b"")
            return False
        connection.received.skip_frame()
        if self._in_shared_memory:
            self.payload = connection.peer_memory.payload(self.payload)
        self.payload.flags.writeable = False
        ack_requested = self._around[: self._num_start_bytes].tobytes() == self._starts[True]
        return self._lane.note(self._sequence, self._num_bytes, ack_requested=ack_requested)

"""Reads expected messages from borrowed connections: see `lending.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from hop_tf.errors import ProtocolError
from hop_tf.ops.frames import Frame, FrameState, receive_frames
from hop_tf.transport.base import Expected
from hop_tf.transport.framing import encode_starts
from hop_tf.transport.shared_memory import MIN_PAYLOAD_BYTES, PLACE_BYTES

if TYPE_CHECKING:
    from hop_tf.transport.tcp_server import Lane

# A longer wait is left to `Membership.wait` and the connections' threads. They also notice other messages and failures.
_IDLE_MILLISECONDS = 50
_TOTAL_MILLISECONDS = 250


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
    messages = []
    for lane, each in zip(lanes, expected, strict=True):
        sequence = lane.next_sequence()
        if sequence is None:
            break
        messages.append(_Message(lane, sequence, queue, each))
    payloads: list[np.ndarray | None] = [None] * len(lanes)
    if len(messages) == len(lanes):
        frames = receive_frames([message.frame for message in messages], _IDLE_MILLISECONDS, _TOTAL_MILLISECONDS)
        payloads = [message.take(frame) for message, frame in zip(messages, frames, strict=True)]
    was_of_use = all(payload is not None for payload in payloads)
    for lane in lanes:
        lane.lending.note_use(was_of_use)
    return payloads


class _Message:
    """A message that is expected to be the next one on its lane.

    Attributes:
      frame: Its frame, as it is read.
    """

    def __init__(self, lane: Lane, sequence: int, queue: bytes, expected: Expected):
        connection = lane.connection
        self._lane = lane
        self._sequence = sequence
        self._num_bytes = len(expected.header) + expected.num_bytes
        in_memory = connection.peer_memory is not None and expected.num_bytes >= MIN_PAYLOAD_BYTES
        self._starts = encode_starts(sequence, queue, expected.header, expected.num_bytes, in_shared_memory=in_memory)
        num_start_bytes, num_payload_bytes = len(self._starts[0]), PLACE_BYTES if in_memory else expected.num_bytes
        num_checksum_bytes = connection.received.num_bytes
        # The start of the frame, and the checksum that follows the payload; between them its place, if it has one.
        self._around, address = lane.scratch(num_start_bytes + PLACE_BYTES + num_checksum_bytes)
        self._place = slice(num_start_bytes, num_start_bytes + PLACE_BYTES)
        self._payload = None if in_memory else lane.take_buffer(num_payload_bytes)
        number, key, block_key = connection.received.for_native()
        self.frame = Frame(
            connection.file_number,
            num_start_bytes,
            self._starts,
            address,
            address + num_start_bytes if in_memory else self._payload.ctypes.data,
            num_payload_bytes,
            address + self._place.stop,
            num_checksum_bytes,
            FrameState.AWAITED,
            number,
            key,
            block_key,
        )

    def take(self, frame: Frame) -> np.ndarray | None:
        """Counts the message and returns its payload; if it has not come, puts its bytes back and returns None."""
        lane = self._lane
        if not frame.num_read:
            return None
        start = bytes(self._around[: self._place.start])
        if frame.state != FrameState.COMPLETE:
            payload = self._around[self._place] if self._payload is None else self._payload
            read = start + bytes(payload) + bytes(self._around[self._place.stop :])
            lane.connection.unread(read[: frame.num_read])
            return None
        lane.connection.received.skip_frame()
        payload = self._payload
        if payload is None:
            try:
                payload = lane.connection.peer_memory.payload(self._around[self._place])
            except ProtocolError:
                lane.end()  # As its own thread would. The message comes again on the next connection.
                return None
        payload.flags.writeable = False
        is_new = lane.note(self._sequence, self._num_bytes, ack_requested=start == self._starts[True])
        return payload if is_new else None

"""`Outbox`: what was sent to a peer on one lane and is not yet known to have been received."""

from __future__ import annotations

import collections
import math
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from hop_tf.errors import HopError, ProtocolError
from hop_tf.records import Kind, Recorder
from hop_tf.transport.framing import MAX_HEADER_BYTES, MAX_LANES, MAX_PAYLOAD_BYTES, MAX_QUEUE_BYTES, Outgoing

MAX_MESSAGES = 1024
MAX_BYTES = 256 << 20
# The peer's silence wakes nobody: how often a blocked sender looks at it.
_CHECK_PERIOD_SECONDS = 0.25
# In a burst, so many small messages are acknowledged at once.
_MESSAGES_PER_ACK = 16
_BYTES_PER_ACK = 1 << 18


def flatten(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Flat uint8 views of the arrays' bytes (copies where an array is not contiguous), without the empty ones."""
    flat = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays]
    return [array for array in flat if array.size]


def check_message(queue: bytes, header: bytes, payload: Sequence[np.ndarray], lane: int) -> None:
    """Raises ValueError where a message cannot be sent."""
    if not 0 <= lane < MAX_LANES:
        raise ValueError(f"`lane` must be in [0, {MAX_LANES}). Received: lane={lane}.")
    if not 0 < len(queue) <= MAX_QUEUE_BYTES:
        raise ValueError(f"`queue` must have 1 to {MAX_QUEUE_BYTES} bytes. Received: queue={queue!r}.")
    if len(header) > MAX_HEADER_BYTES:
        raise ValueError(f"`header` must have at most {MAX_HEADER_BYTES} bytes. Received: len(header)={len(header)}.")
    num_bytes = sum(array.nbytes for array in payload)
    if num_bytes > MAX_PAYLOAD_BYTES:
        raise ValueError(f"`payload` must have at most {MAX_PAYLOAD_BYTES} bytes. Received: {num_bytes} bytes.")


class Outbox:
    """A bounded queue that forgets a message only when the peer has acknowledged it.

    A connection begins with `resume` and then takes messages with `take`. When it breaks, the next one resumes after
    the last message that was received: nothing is lost, and nothing arrives twice.

    Args:
      max_messages: Most messages that are kept.
      max_bytes: Most bytes that are kept; beside them one message of any size, and one to each queue where messages
        supersede each other.
      recorder: Told of each message that was sent; None: nobody is.
      peer: The receiver, for records; so is the lane.
      lane: The lane.

    Attributes:
      max_bytes_per_second: How fast messages should leave at most. Default infinite.
    """

    def __init__(
        self,
        *,
        max_messages: int = MAX_MESSAGES,
        max_bytes: int = MAX_BYTES,
        recorder: Recorder | None = None,
        peer: int = -1,
        lane: int = 0,
    ):
        self.max_bytes_per_second = math.inf
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._condition = threading.Condition()
        self._kept: collections.deque[Outgoing] = collections.deque()
        self._kept_bytes = 0
        self._last_sequence = 0
        self._num_taken = 0
        self._epoch = 0
        self._closed = False
        self._dropped = False
        self._recorder = recorder
        self._peer = peer
        self._lane = lane
        # What the running connection is sending, if that is recorded, and since when.
        self._sending: tuple[Outgoing, float] | None = None

    @property
    def first_sequence(self) -> int:
        """Number of the oldest message that is kept, or of the next one."""
        with self._condition:
            return self._first_sequence()

    @property
    def is_empty(self) -> bool:
        """Whether nothing is kept."""
        with self._condition:
            return not self._kept

    @property
    def num_unacknowledged(self) -> int:
        """The number of messages that the running connection has taken, and that are not acknowledged."""
        with self._condition:
            return self._num_taken

    @property
    def load(self) -> tuple[int, int]:
        """How many bytes are kept, and the number of the last message."""
        with self._condition:
            return self._kept_bytes, self._last_sequence

    def put(
        self,
        queue: bytes,
        header: bytes,
        payload: Sequence[np.ndarray],
        check: Callable[[float], None],
        *,
        supersedes: bool = False,
    ) -> bool:
        """Adds a message.

        Args:
          queue: Name of its queue, UTF-8.
          header: Its header.
          payload: Flat uint8 arrays.
          check: Called with the seconds waited so far; raises when it is no use to wait longer.
          supersedes: Whether one to the same queue that nobody has begun to send gives way to it. There is room for it
            then: of such messages one waits at most.

        Returns:
          Whether another one has given way.

        Blocks: while too much is kept; `acknowledge`, `close` or `check` end that. Not where it `supersedes`.

        Raises:
          HopError: If the outbox is closed, or what `check` raises.
        """
        num_bytes = len(header) + sum(array.nbytes for array in payload)
        start = time.monotonic()
        with self._condition:
            older = self._find_waiting(queue) if supersedes else None
            while not supersedes and not self._has_room(num_bytes):
                check(time.monotonic() - start)
                self._condition.wait(_CHECK_PERIOD_SECONDS)
            if self._closed:
                raise HopError("the transport is closed.")
            if older is None:
                self._last_sequence += 1
                message = Outgoing(self._last_sequence, queue, header, payload, num_bytes)
                self._kept.append(message)
            else:
                message = older
                self._kept_bytes -= message.num_bytes
                message.header, message.payload, message.num_bytes = header, payload, num_bytes
            if self._recorder is not None:
                self._note_put(message)
            self._kept_bytes += num_bytes
            self._condition.notify_all()
            return older is not None

    def resume(self, received_sequence: int) -> int:
        """Begins a new connection to a peer that has received everything up to `received_sequence`.

        Returns:
          The connection's number, for `take`.

        Raises:
          ProtocolError: If the peer cannot have received that.
        """
        with self._condition:
            if received_sequence < self._first_sequence() - 1:
                raise ProtocolError("the peer has forgotten messages that it had acknowledged.")
            self._drop(received_sequence)
            self._sending = None
            self._num_taken = 0
            self._epoch += 1
            self._condition.notify_all()
            return self._epoch

    def take(self, epoch: int, timeout_seconds: float | None = None) -> Outgoing | None:
        """Returns the next message of connection `epoch`.

        Returns None once another connection has begun, or the outbox was closed, or the time is over.

        Blocks: until there is one.
        """
        with self._condition:
            if self._sending is not None:
                self._note_sent()
            self._condition.wait_for(lambda: self._ended(epoch) or self._num_taken < len(self._kept), timeout_seconds)
            if self._ended(epoch) or self._num_taken == len(self._kept):
                return None
            message = self._kept[self._num_taken]
            message.was_taken = True
            self._num_taken += 1
            message.ack_requested = (
                self._num_taken == len(self._kept)
                or message.num_bytes >= _BYTES_PER_ACK
                or message.sequence % _MESSAGES_PER_ACK == 0
            )
            if message.is_recorded:
                self._sending = (message, time.time())
            return message

    def is_current(self, epoch: int) -> bool:
        """True if connection `epoch` is the running one."""
        with self._condition:
            return not self._ended(epoch)

    def wait_message(self) -> bool:
        """Waits until there is a message; False if the outbox was closed."""
        with self._condition:
            self._condition.wait_for(lambda: self._closed or self._kept)
            return not self._closed

    def interrupt(self) -> None:
        """Ends the running connection: its `take` returns None."""
        with self._condition:
            self._epoch += 1
            self._condition.notify_all()

    def acknowledge(self, epoch: int, sequence: int) -> None:
        """Forgets the messages up to `sequence`, which connection `epoch` has brought; nothing if that one has ended.

        Raises:
          ProtocolError: If no such message was sent.
        """
        with self._condition:
            if self._epoch == epoch:
                self._drop(sequence)
                self._condition.notify_all()

    def begin_again(self) -> None:
        """Drops everything: the peer's process was replaced by one that has never received anything."""
        with self._condition:
            self._kept.clear()
            self._kept_bytes = self._last_sequence = self._num_taken = 0
            self._epoch += 1
            self._condition.notify_all()

    def wait_empty(self, deadline: float) -> bool:
        """Waits until everything has been acknowledged; False where `deadline` (`time.monotonic`) is earlier."""
        with self._condition:
            self._condition.wait_for(lambda: self._closed or not self._kept, max(0.0, deadline - time.monotonic()))
            return not self._kept and not self._dropped

    def close(self) -> None:
        """Drops everything and ends all waiting."""
        with self._condition:
            self._closed = True
            self._dropped = bool(self._kept)
            self._kept.clear()
            self._condition.notify_all()

    def _has_room(self, num_bytes: int) -> bool:
        if self._closed or not self._kept:
            return True
        return len(self._kept) < self._max_messages and self._kept_bytes + num_bytes <= self._max_bytes

    def _find_waiting(self, queue: bytes) -> Outgoing | None:
        """The message to `queue` that no connection has taken. There is one at most where all of them supersede."""
        for message in reversed(self._kept):
            if message.was_taken:
                return None
            if message.queue == queue:
                return message
        return None

    def _first_sequence(self) -> int:
        return self._kept[0].sequence if self._kept else self._last_sequence + 1

    def _note_put(self, message: Outgoing) -> None:
        message.is_recorded, message.step = self._recorder.is_on, self._recorder.step
        message.put_at = time.time() if message.is_recorded else 0.0

    def _note_sent(self) -> None:
        """Who takes the next message has sent the one before, and so has who is told that it was received."""
        message, begin = self._sending
        self._sending = None
        self._recorder.add(
            Kind.SEND,
            begin,
            time.time() - begin,
            step=message.step,
            peer=self._peer,
            lane=self._lane,
            name=message.queue,
            num_bytes=message.num_bytes,
            number=message.sequence,
            queued=begin - message.put_at,
        )

    def _ended(self, epoch: int) -> bool:
        return self._closed or self._epoch != epoch

    def _drop(self, sequence: int) -> None:
        if sequence > self._last_sequence:
            raise ProtocolError(f"message {sequence} was acknowledged, but only {self._last_sequence} were sent.")
        if self._sending is not None and self._sending[0].sequence <= sequence:
            self._note_sent()
        while self._kept and self._kept[0].sequence <= sequence:
            self._kept_bytes -= self._kept.popleft().num_bytes
            self._num_taken = max(0, self._num_taken - 1)

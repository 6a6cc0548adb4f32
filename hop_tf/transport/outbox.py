"""`Outbox`: messages to a peer on one lane that the peer has not acknowledged yet."""

from __future__ import annotations

import collections
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from hop_tf.errors import HopError, ProtocolError
from hop_tf.records import Kind, Recorder
from hop_tf.transport.framing import MAX_HEADER_BYTES, MAX_LANES, MAX_PAYLOAD_BYTES, MAX_QUEUE_BYTES, Outgoing

if TYPE_CHECKING:
    from hop_tf.transport.connection import Connection

MAX_MESSAGES = 1024
MAX_BYTES = 256 << 20
# Interval at which a blocked sender checks the peer, whose silence wakes no thread.
_CHECK_PERIOD_SECONDS = 0.25
# In a burst, this many small messages, or this many bytes, are acknowledged together.
_MESSAGES_PER_ACK = 16
_BYTES_PER_ACK = 1 << 18
# The connection's thread writes larger messages: they do not fit into a socket's buffer.
_MAX_AT_ONCE_BYTES = (1 << 22) + MAX_HEADER_BYTES


def flatten(arrays: Sequence[np.ndarray]) -> tuple[list[np.ndarray], int]:
    """Returns flat uint8 views of the arrays' bytes, without empty arrays, and the number of bytes.

    An array that is not contiguous is copied.
    """
    flat, num_bytes = [], 0
    for array in arrays:
        if array.dtype != np.uint8 or array.ndim != 1 or not array.flags.c_contiguous:
            array = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        if array.size:
            flat.append(array)
            num_bytes += array.size
    return flat, num_bytes


def check_message(queue: bytes, header: bytes, num_bytes: int, lane: int) -> None:
    """Raises ValueError if a message with a payload of `num_bytes` bytes cannot be sent."""
    if not 0 <= lane < MAX_LANES:
        raise ValueError(f"`lane` must be in [0, {MAX_LANES}). Received: lane={lane}.")
    if not 0 < len(queue) <= MAX_QUEUE_BYTES:
        raise ValueError(f"`queue` must have 1 to {MAX_QUEUE_BYTES} bytes. Received: queue={queue!r}.")
    if len(header) > MAX_HEADER_BYTES:
        raise ValueError(f"`header` must have at most {MAX_HEADER_BYTES} bytes. Received: len(header)={len(header)}.")
    if num_bytes > MAX_PAYLOAD_BYTES:
        raise ValueError(f"`payload` must have at most {MAX_PAYLOAD_BYTES} bytes. Received: {num_bytes} bytes.")


class Outbox:
    """A bounded queue that forgets a message only when the peer has acknowledged it.

    A connection begins with `resume` and then takes messages with `take`. When the connection breaks, the next one
    resumes after the last message that was received. So every message arrives exactly once.

    While the connection is idle, the thread that sends a message also writes it (`write_at_once`): waking the
    connection's thread would take longer.

    Args:
      max_bytes: Limit on the bytes kept. An empty outbox takes a message of any size. Messages that supersede each
        other are not limited, but at most one waits for each queue.
      recorder: Records each message that was sent, or None.
      peer: The receiver, for records.
      lane: The lane, for records.

    Attributes:
      lane: The lane.
      max_bytes_per_second: Limit on the rate of messages. Default infinite.
    """

    def __init__(
        self,
        *,
        max_bytes: int = MAX_BYTES,
        recorder: Recorder | None = None,
        peer: int = -1,
        lane: int = 0,
    ):
        self.max_bytes_per_second = math.inf
        self._max_bytes = max_bytes
        self._lock = threading.RLock()
        # The connection's thread waits for messages. Senders wait for room, and `wait_empty` for acknowledgements.
        self._message_came = threading.Condition(self._lock)
        self._message_went = threading.Condition(self._lock)
        self._kept: collections.deque[Outgoing] = collections.deque()
        self._kept_bytes = 0
        self._last_sequence = 0
        self._num_taken = 0
        self._epoch = 0
        self._write: Callable[[Outgoing], Sequence[memoryview]] | None = None
        self._connection: Connection | None = None
        self._is_writing = False  # A sending thread writes to the connection.
        self._is_at_work = False  # The connection's own thread writes to it.
        self._unfinished: Outgoing | None = None
        self._closed = False
        self._dropped = False
        self._recorder = recorder
        self._peer = peer
        self.lane = lane
        # The message that the running connection is sending, if it is recorded, and the time of its start.
        self._sending: tuple[Outgoing, float] | None = None

    @property
    def first_sequence(self) -> int:
        """Number of the oldest message that is kept; number of the next message if none is kept."""
        with self._lock:
            return self._first_sequence()

    @property
    def is_empty(self) -> bool:
        """True if no message is kept."""
        with self._lock:
            return not self._kept

    @property
    def num_unacknowledged(self) -> int:
        """The number of messages that the running connection has taken and the peer has not acknowledged."""
        with self._lock:
            return self._num_taken

    @property
    def load(self) -> tuple[int, int]:
        """The number of bytes kept, and the sequence number of the last message."""
        with self._lock:
            return self._kept_bytes, self._last_sequence

    def put(
        self,
        queue: bytes,
        header: bytes,
        payload: Sequence[np.ndarray],
        num_bytes: int,
        check: Callable[[float], None],
        *,
        supersedes: bool = False,
    ) -> bool:
        """Adds a message.

        Args:
          queue: Name of its queue, UTF-8.
          header: Its header.
          payload: Flat uint8 arrays.
          num_bytes: Length of header and payload.
          check: Called with the seconds waited so far. Raises if waiting longer is of no use.
          supersedes: True if the message replaces a message to the same queue whose sending has not begun. Such a
            message always has room, because at most one of them waits.

        Returns:
          True if another message was replaced.

        Blocks: while too much is kept. `acknowledge`, `close` or `check` ends the wait. With `supersedes`, the call
        never blocks.

        Raises:
          HopError: If the outbox is closed, or what `check` raises.
        """
        with self._lock:
            older = self._find_waiting(queue) if supersedes else None
            if not supersedes and not self._has_room(num_bytes):
                self._wait_room(num_bytes, check)
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
            write = self._begin_to_write(message)
            if write is None:
                self._message_came.notify_all()
        if write is not None:
            self._write_now(message, write)
        return older is not None

    def _wait_room(self, num_bytes: int, check: Callable[[float], None]) -> None:
        start = time.monotonic()
        while not self._has_room(num_bytes):
            check(time.monotonic() - start)
            self._message_went.wait(_CHECK_PERIOD_SECONDS)

    def _begin_to_write(self, message: Outgoing) -> Callable[[Outgoing], Sequence[memoryview]] | None:
        """Takes the message if the connection is idle, and returns the function that writes it. Otherwise None."""
        is_next = self._num_taken == len(self._kept) - 1 and self._kept[-1] is message
        if self._is_busy() or not is_next or message.num_bytes > _MAX_AT_ONCE_BYTES:
            return None
        self._is_writing = True
        self._take_next()
        return self._write

    def _is_busy(self) -> bool:
        """True if only the connection's thread may write to it."""
        return self._write is None or self._is_writing or self._is_at_work or self._unfinished is not None

    def _write_now(self, message: Outgoing, write: Callable[[Outgoing], Sequence[memoryview]]) -> None:
        rest: Sequence[memoryview] | None = None
        try:
            rest = write(message)
        except OSError:
            pass  # The next connection begins with this message.
        finally:
            self.end_message(message, rest)

    def begin_message(
        self, queue: bytes, header: bytes, payload: Sequence[np.ndarray], num_bytes: int
    ) -> tuple[Outgoing, Connection] | None:
        """Adds a message if the connection is idle. The caller writes the message, and calls `end_message`.

        Args:
          queue: See `put`.
          header: See `put`.
          payload: See `put`.
          num_bytes: See `put`.

        Returns:
          The message, and the connection to write it to. None if the connection is not idle: the message was not added.
        """
        with self._lock:
            is_idle = self._num_taken == len(self._kept) and not self._is_busy()
            if not is_idle or self._connection is None or self._closed or not self._has_room(num_bytes):
                return None
            self._last_sequence += 1
            message = Outgoing(self._last_sequence, queue, header, payload, num_bytes)
            self._kept.append(message)
            self._kept_bytes += num_bytes
            self._is_writing = True
            return self._take_next(), self._connection

    def end_message(self, message: Outgoing, rest: Sequence[memoryview] | None) -> None:
        """Called when a sending thread has written a message up to `rest` (None: the connection is broken)."""
        with self._lock:
            self._is_writing = False
            message.rest = rest or ()
            self._unfinished = message if rest else None
            if self._sending is not None and not rest:
                self._note_sent()
            if rest is None and self._write is not None:
                self._end_connection()
            # The connection's thread has work left, or waits in `end_writing`.
            if rest or self._num_taken < len(self._kept) or self._write is None:
                self._message_came.notify_all()

    def resume(self, received_sequence: int) -> int:
        """Begins a new connection to a peer that has received everything up to `received_sequence`.

        Returns:
          The connection's number, for `take`.

        Raises:
          ProtocolError: If the peer has forgotten messages that it had acknowledged, or reports messages that were not
            sent.
        """
        with self._lock:
            if received_sequence < self._first_sequence() - 1:
                raise ProtocolError("the peer has forgotten messages that it had acknowledged.")
            self._drop(received_sequence)
            self._sending = None
            self._num_taken = 0
            self._end_connection()
            return self._epoch

    def write_at_once(
        self, epoch: int, write: Callable[[Outgoing], Sequence[memoryview]], connection: Connection | None = None
    ) -> None:
        """Lets threads that send messages write them to connection `epoch` themselves.

        Args:
          epoch: The connection's number.
          write: Writes as much of a message as it can without blocking, on the thread that sends it. Returns the rest,
            which becomes `Outgoing.rest`. Raises OSError if the connection is broken.
          connection: The connection that `begin_message` returns. Default None: `begin_message` adds no message.
        """
        with self._lock:
            if self._epoch == epoch:
                self._write, self._connection, self._is_at_work = write, connection, False

    def end_writing(self) -> None:
        """Ends `write_at_once`. Blocks: until no thread writes."""
        with self._lock:
            self._write = self._connection = None
            self._message_came.wait_for(lambda: not self._is_writing)
            self._unfinished = None

    def take(self, epoch: int, timeout_seconds: float | None = None) -> Outgoing | None:
        """Returns the next message of connection `epoch`.

        Returns None if another connection has begun, the outbox was closed, or the time is over.

        Blocks: until there is a message.
        """
        with self._lock:
            self._is_at_work = False
            if self._sending is not None and self._unfinished is None and not self._is_writing:
                self._note_sent()
            self._message_came.wait_for(lambda: self._ended(epoch) or self._has_work(), timeout_seconds)
            if self._ended(epoch) or not self._has_work():
                return None
            self._is_at_work = True
            if self._unfinished is not None:
                message, self._unfinished = self._unfinished, None
                return message
            return self._take_next()

    def _has_work(self) -> bool:
        """True if the connection's thread has something to write."""
        return not self._is_writing and (self._unfinished is not None or self._num_taken < len(self._kept))

    def _take_next(self) -> Outgoing:
        message = self._kept[self._num_taken]
        message.was_taken, message.rest = True, ()
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
        """True if connection `epoch` is the running connection."""
        with self._lock:
            return not self._ended(epoch)

    def wait_message(self) -> bool:
        """Waits until there is a message. Returns False if the outbox was closed."""
        with self._lock:
            self._message_came.wait_for(lambda: self._closed or self._kept)
            return not self._closed

    def interrupt(self) -> None:
        """Ends the running connection: its `take` returns None."""
        with self._lock:
            self._end_connection()

    def _end_connection(self) -> None:
        self._epoch += 1
        self._write = self._connection = None
        self._notify_all()

    def _notify_all(self) -> None:
        self._message_came.notify_all()
        self._message_went.notify_all()

    def acknowledge(self, epoch: int, sequence: int) -> None:
        """Forgets the messages up to `sequence`, which connection `epoch` has delivered, unless `epoch` has ended.

        Raises:
          ProtocolError: If no such message was sent.
        """
        with self._lock:
            if self._epoch == epoch:
                self._drop(sequence)
                self._message_went.notify_all()

    def begin_again(self) -> None:
        """Drops everything, because a new process has taken the peer's place, and has received nothing yet."""
        with self._lock:
            self._kept.clear()
            self._kept_bytes = self._last_sequence = self._num_taken = 0
            self._end_connection()

    def wait_empty(self, deadline: float) -> bool:
        """Waits until everything is acknowledged. Returns False after `deadline` (`time.monotonic`)."""
        with self._lock:
            self._message_went.wait_for(lambda: self._closed or not self._kept, max(0.0, deadline - time.monotonic()))
            return not self._kept and not self._dropped

    def close(self) -> None:
        """Drops everything and ends all waiting."""
        with self._lock:
            self._closed = True
            self._dropped = bool(self._kept)
            self._kept.clear()
            self._notify_all()

    def _has_room(self, num_bytes: int) -> bool:
        if self._closed or not self._kept:
            return True
        return len(self._kept) < MAX_MESSAGES and self._kept_bytes + num_bytes <= self._max_bytes

    def _find_waiting(self, queue: bytes) -> Outgoing | None:
        """The last message to `queue` that no connection has taken, or None. If all supersede, there is at most one."""
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
        """Records that the message in `_sending` was sent: its acknowledgement or the next `take` shows this."""
        message, begin = self._sending
        self._sending = None
        self._recorder.add(
            Kind.SEND,
            begin,
            time.time() - begin,
            step=message.step,
            peer=self._peer,
            lane=self.lane,
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

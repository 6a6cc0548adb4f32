"""`Dispatcher` and `Inbox`: deliver received messages to the handlers of their queues."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable

import numpy as np

from hop_tf.errors import HopError, ProtocolError
from hop_tf.records import Kind, Recorder
from hop_tf.transport.base import Handler, Message
from hop_tf.transport.framing import Frame, FrameKind
from hop_tf.transport.peer import Peer

# Limit on the messages of one sender and lane that are held for queues without a handler.
_MAX_HELD_MESSAGES = 1024


def make_message(peer: Peer, frame: Frame, payload: np.ndarray) -> Message:
    """Makes the message that a handler gets from a frame and its payload.

    Raises:
      ProtocolError: If the frame is no message to a queue.
    """
    if frame.kind != FrameKind.MESSAGE or not frame.queue:
        raise ProtocolError(f"{peer} sent {frame.kind.name} to queue {frame.queue!r} on a message lane.")
    try:
        return Message(peer.rank, frame.queue.decode(), frame.header, payload)
    except UnicodeDecodeError as error:
        raise ProtocolError(f"{peer} sent to a queue whose name is not UTF-8: {frame.queue!r}.") from error


class Dispatcher:
    """The handlers of one rank, and the inboxes that feed them.

    Args:
      on_error: Called with an exception that a handler raised.
      recorder: Records the messages that their senders record, or None.
    """

    def __init__(
        self,
        *,
        on_error: Callable[[BaseException], None],
        recorder: Recorder | None = None,
    ):
        self.lock = threading.RLock()  # The condition's lock.
        self.condition = threading.Condition(self.lock)
        self.recorder = recorder
        self.closed = False
        self.num_messages = 0
        self.num_bytes = 0
        self._on_error = on_error
        self._handlers: dict[str, Handler] = {}
        self._retired: set[str] = set()
        self._inboxes: dict[tuple[int, int], Inbox] = {}
        self._threads: set[threading.Thread] = set()

    def inbox(self, sender: int, lane: int) -> Inbox:
        """The inbox for messages of `sender` on `lane`."""
        with self.condition:
            return self._inboxes.setdefault((sender, lane), Inbox(self, sender, lane))

    def begin_again(self, sender: int) -> None:
        """Called when a new process has taken the sender's place. Drops held messages of the old process."""
        with self.condition:
            for (rank, _), inbox in self._inboxes.items():
                if rank == sender:
                    inbox.begin_again()

    def register(self, queue: str, handler: Handler) -> None:
        """See `Transport.register`. Messages that were held are delivered from threads of their own."""
        with self.condition:
            if self.closed:
                raise HopError("the transport is closed.")
            self._handlers[queue] = handler
            self._retired.discard(queue)
            self._threads = {thread for thread in self._threads if thread.is_alive()}
            for inbox in self._inboxes.values():
                if inbox.holds(queue):
                    thread = threading.Thread(target=inbox.drain, args=(queue,), name="hop_tf deliver", daemon=True)
                    self._threads.add(thread)
                    thread.start()

    def unregister(self, queue: str) -> None:
        """See `Transport.unregister`."""
        with self.condition:
            self._handlers.pop(queue, None)
            self._retired.add(queue)
            for inbox in self._inboxes.values():
                inbox.drop(queue)

    def is_retired(self, queue: str) -> bool:
        """True if messages for `queue` are dropped, because the queue was unregistered."""
        return queue in self._retired

    def handler(self, queue: str) -> Handler | None:
        """The handler of `queue`, if there is one."""
        return None if self.closed else self._handlers.get(queue)

    def run(self, handler: Handler, message: Message) -> None:
        """Calls a handler. An exception is reported, and the stream and the server go on."""
        try:
            handler(message)
        except BaseException as error:
            self._on_error(error)

    def close(self, deadline: float) -> None:
        """Ends all delivery and waiting, and joins the threads (until `deadline`, `time.monotonic`)."""
        with self.condition:
            self.closed = True
            self.condition.notify_all()
            threads = set(self._threads)
        for thread in threads - {threading.current_thread()}:
            thread.join(max(0.0, deadline - time.monotonic()))


class Inbox:
    """Takes the messages of one sender and lane, in order and each once, and delivers them one at a time.

    Several threads meet here: a connection's thread, and a thread that `register` starts for held messages. The thread
    of an earlier connection may still be in a handler. Each of them delivers the oldest message first.
    """

    def __init__(self, dispatcher: Dispatcher, sender: int, lane: int):
        self._dispatcher = dispatcher
        self._sender = sender
        self._lane = lane
        self._condition = dispatcher.condition
        self._lock = dispatcher.lock
        self._delivering = threading.Lock()
        self._held: dict[str, collections.deque[Message]] = {}
        self._num_held = 0
        self._received_sequence = 0
        self._epoch = 0

    def begin(self, first_sequence: int) -> tuple[int, int]:
        """Begins a connection, and ends the previous one.

        Args:
          first_sequence: Sequence number of the oldest message that the sender still has.

        Returns:
          The connection's number, for `accept`, and the sequence number of the last message received.

        Raises:
          ProtocolError: If the sender no longer has a message that was not received.
        """
        with self._condition:
            if first_sequence > self._received_sequence + 1:
                raise ProtocolError(
                    f"the oldest message at the peer is {first_sequence}, but the last one received is "
                    f"{self._received_sequence}."
                )
            self._epoch += 1
            self._condition.notify_all()
            return self._epoch, self._received_sequence

    def begin_again(self) -> None:
        """See `Dispatcher.begin_again`. The dispatcher's condition must be held."""
        self._held.clear()
        self._num_held = self._received_sequence = 0
        self._epoch += 1
        self._condition.notify_all()

    def accept(self, epoch: int, sequence: int, message: Message, is_recorded: bool = False) -> bool:
        """Takes the next message of connection `epoch` and delivers it. A message that was received before is dropped.

        Args:
          epoch: As returned by `begin`.
          sequence: Number of the message.
          message: The message.
          is_recorded: True if its sender records it.

        Returns:
          False if another connection has begun or the transport was closed. The message was not taken then.

        Blocks: while the handler runs, and while too many messages are held for queues without a handler.

        Raises:
          ProtocolError: If messages before this message are missing.
        """
        with self._condition:
            while self._num_held >= _MAX_HELD_MESSAGES and not self._ended(epoch):
                self._condition.wait()
            if self._ended(epoch):
                return False
            if sequence <= self._received_sequence:
                return True
            if sequence != self._received_sequence + 1:
                raise ProtocolError(f"message {sequence} came after message {self._received_sequence}.")
            self._count(sequence, len(message.header) + message.payload.nbytes)
            if self._dispatcher.is_retired(message.queue):
                return True
            handler = None if message.queue in self._held else self._dispatcher.handler(message.queue)
            # Usually no thread is delivering at this moment, and the message need not be held.
            if handler is None or not self._delivering.acquire(blocking=False):
                handler = None
                self._held.setdefault(message.queue, collections.deque()).append(message)
                self._num_held += 1
        recorder = self._dispatcher.recorder
        if recorder is None:
            self._deliver(handler, message)
        else:
            self._deliver_recorded(recorder, handler, message, sequence, is_recorded)
        return True

    def _deliver(self, handler: Handler | None, message: Message) -> None:
        """Delivers a message and releases `_delivering`. Without a handler, delivers the queue's held messages."""
        if handler is None:
            self.drain(message.queue)
            return
        try:
            self._dispatcher.run(handler, message)
        finally:
            self._delivering.release()

    def next_sequence(self, epoch: int) -> int | None:
        """Number of the next message of connection `epoch`; None if another connection has begun."""
        with self._lock:
            return None if self._ended(epoch) else self._received_sequence + 1

    def note(self, epoch: int, sequence: int, num_bytes: int) -> bool:
        """Counts a message of connection `epoch` that was delivered in another way.

        Args:
          epoch: As returned by `begin`.
          sequence: As returned by `next_sequence`.
          num_bytes: Length of its header and payload.

        Returns:
          False if another connection has begun. The message was not counted then.
        """
        with self._lock:
            if self._ended(epoch):
                return False
            self._count(sequence, num_bytes)
            return True

    def _count(self, sequence: int, num_bytes: int) -> None:
        self._received_sequence = sequence
        self._dispatcher.num_messages += 1
        self._dispatcher.num_bytes += num_bytes

    def _deliver_recorded(
        self, recorder: Recorder, handler: Handler | None, message: Message, sequence: int, is_recorded: bool
    ) -> None:
        recorder.follow(is_recorded)
        begin = time.time()
        self._deliver(handler, message)
        if is_recorded:
            recorder.add(
                Kind.RECEIVE,
                begin,
                time.time() - begin,
                peer=self._sender,
                lane=self._lane,
                name=message.queue,
                num_bytes=len(message.header) + message.payload.nbytes,
                number=sequence,
            )

    def holds(self, queue: str) -> bool:
        """True if messages for `queue` are held here. The dispatcher's condition must be held."""
        return queue in self._held

    def drop(self, queue: str) -> None:
        """Drops the held messages for `queue`. The dispatcher's condition must be held."""
        self._num_held -= len(self._held.pop(queue, ()))
        self._condition.notify_all()

    def drain(self, queue: str) -> None:
        """Delivers the held messages for `queue`, if it has a handler."""
        with self._delivering:
            while (delivery := self._next(queue)) is not None:
                self._dispatcher.run(*delivery)
                del delivery

    def _next(self, queue: str) -> tuple[Handler, Message] | None:
        with self._condition:
            handler, held = self._dispatcher.handler(queue), self._held.get(queue)
            if handler is None or not held:
                return None
            message = held.popleft()
            if not held:
                del self._held[queue]
            self._num_held -= 1
            self._condition.notify_all()
            return handler, message

    def _ended(self, epoch: int) -> bool:
        return self._dispatcher.closed or self._epoch != epoch

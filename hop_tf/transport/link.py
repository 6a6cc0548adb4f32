"""`Link`: a stream to a peer that is opened again when it breaks."""

from __future__ import annotations

import abc
import threading
from collections.abc import Callable

from absl import logging

from hop_tf.errors import HopError
from hop_tf.transport import control_pb2
from hop_tf.transport.handshake import Handshake
from hop_tf.transport.outbox import Outbox
from hop_tf.transport.peer import Peer
from hop_tf.transport.proof import Session

# The reason to open a stream again although nothing has failed.
OVERDUE = "an acknowledgement is overdue"
_FIRST_BACKOFF_SECONDS = 0.02
_MAX_BACKOFF_SECONDS = 0.5


class Patience:
    """Decides when to open a stream again because nothing that was sent on it arrives.

    The receiver or the link may just be slow. Then a new stream is of no use, but does no harm. So each new stream gets
    twice the time of the previous one.
    """

    def __init__(self):
        self._limit = 1  # Number of calls without progress before the stream is opened again.
        self._begin()

    def _begin(self) -> None:
        self._progress: object = None
        self._num_in_vain = 0

    def is_over(self, num_awaited: int, progress: object = None) -> bool:
        """True if the stream is to be opened again. Called at equal intervals while no answer comes.

        Args:
          num_awaited: Number of awaited answers.
          progress: Any value that changes while sent data still makes progress.
        """
        if num_awaited and (num_awaited, progress) == self._progress:
            self._num_in_vain += 1
        else:
            self._num_in_vain = 0
        self._progress = num_awaited, progress
        if self._num_in_vain < self._limit:
            return False
        self._limit *= 2
        self._begin()
        return True


class Link(abc.ABC):
    """Carries the messages in an outbox to a peer, on one lane.

    When the stream breaks, the link opens it again as soon as there is a message to send. The stream continues after
    the last message that was received. The link ends at `close`, or when the peer fails for good.

    Args:
      peer: The peer.
      lane: The lane. The greeting announces it to the peer.
      outbox: The messages to send.
      handshake: Makes and checks greetings.
      on_error: Called with an unexpected exception, which has ended the link.
    """

    def __init__(
        self, *, peer: Peer, lane: int, outbox: Outbox, handshake: Handshake, on_error: Callable[[BaseException], None]
    ):
        self._peer = peer
        self._lane = lane
        self._outbox = outbox
        self._handshake = handshake
        self._on_error = on_error
        self._patience = Patience()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._end_stream: Callable[[], object] | None = None
        self._backoff_seconds = _FIRST_BACKOFF_SECONDS
        self.thread = threading.Thread(target=self._run, name=f"hop_tf link to {peer} lane {lane}", daemon=True)

    def start(self) -> None:
        """Begins to connect."""
        self.thread.start()

    def close(self) -> None:
        """Ends the link. Its thread ends soon after."""
        with self._lock:
            self._closed.set()
            self._end_running_stream()

    def _end_running_stream(self) -> None:
        """Ends the stream, if there is one. The lock is held."""
        if self._end_stream is not None:
            self._end_stream()

    @abc.abstractmethod
    def _try_stream(self) -> str:
        """Makes one connection and uses it until it ends. Returns the reason for the end.

        Raises:
          HopError: If the connection ended for a reason that hop_tf itself detected.
        """

    def _run(self) -> None:
        try:
            while self._wait_needed() and not self._closed.is_set() and self._peer.failure is None:
                self._peer.try_to_reach(self._lane)
                try:
                    problem = self._try_stream()
                except HopError as error:
                    problem = str(error)
                finally:
                    with self._lock:
                        self._end_stream = None
                self._pause(problem)
        except Exception as error:
            self._on_error(error)

    def _wait_needed(self) -> bool:
        """Waits until there is something to send. Returns False if the link has ended."""
        if self._outbox.is_empty:
            self._peer.reached(self._lane)  # Without messages, no connection is needed.
        return self._outbox.wait_message()

    def _pause(self, problem: str) -> None:
        if not self._closed.is_set():
            self._peer.record_problem(problem)
            logging.log_every_n_seconds(logging.INFO, "No link to %s: %s", 10, self._peer, problem)
            self._closed.wait(self._backoff_seconds)
            self._backoff_seconds = min(2 * self._backoff_seconds, _MAX_BACKOFF_SECONDS)

    def _stream_begins(self, end_stream: Callable[[], object]) -> None:
        """Lets `close` end the stream, by calling `end_stream`."""
        with self._lock:
            self._end_stream = end_stream
            if self._closed.is_set():
                end_stream()

    def _hello(self, challenge: bytes, shared_memory: control_pb2.SharedMemory | None = None) -> tuple[bytes, Session]:
        return self._handshake.hello(self._peer, self._lane, self._outbox.first_sequence, challenge, shared_memory)

    def _accepted(self, data: bytes, session: Session) -> tuple[int, control_pb2.HelloReply]:
        """Called with the answer to the greeting. Returns the outbox's epoch, and the parsed answer.

        A `Peer.link_down` must follow.
        """
        reply = self._handshake.check_reply(self._peer, data, session)
        epoch = self._outbox.resume(reply.received_sequence)
        self._peer.link_up()
        self._peer.reached(self._lane)
        self._backoff_seconds = _FIRST_BACKOFF_SECONDS
        return epoch, reply

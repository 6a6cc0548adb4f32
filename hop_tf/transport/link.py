"""`Link`: a stream to a peer that comes back when it breaks."""

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

# Why a link makes its stream anew, though nothing has failed.
OVERDUE = "an acknowledgement is overdue"
_FIRST_BACKOFF_SECONDS = 0.02
_MAX_BACKOFF_SECONDS = 0.5


class Patience:
    """Decides when a stream is made anew, because nothing of what was sent on it arrives.

    A receiver or a slow link may only take its time. Then a new stream is of no use, but does no harm. So each new
    stream gets twice the time of the one before.
    """

    def __init__(self):
        self._limit = 1  # Questions.
        self._begin()

    def _begin(self) -> None:
        self._progress: object = None
        self._num_in_vain = 0

    def is_over(self, num_awaited: int, progress: object = None) -> bool:
        """True if the stream is to be made anew. Called at equal intervals while no answer comes.

        Args:
          num_awaited: How many answers are awaited.
          progress: Something that changes while what was sent is still on its way.
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
    """Carries what is in an outbox to a peer, on one lane.

    When the stream breaks it begins anew, after the last message that was received, as soon as there is one to send; so
    it goes on until `close`, or until the peer fails for good.

    Args:
      peer: The peer.
      lane: The lane that is announced to it.
      outbox: What to send.
      handshake: Makes and checks greetings.
      on_error: Called with an exception that nobody has foreseen; the link has ended then.
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
        """Ends the link; its thread ends soon after."""
        with self._lock:
            self._closed.set()
            self._end_running_stream()

    def _end_running_stream(self) -> None:
        """Ends the stream, if there is one. The lock is held."""
        if self._end_stream is not None:
            self._end_stream()

    @abc.abstractmethod
    def _try_stream(self) -> str:
        """Makes one connection and uses it until it ends; returns why it has ended.

        Raises:
          HopError: If it ended for a reason of ours.
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
        """Waits until there is something to send; False if there never will be."""
        if self._outbox.is_empty:
            self._peer.reached(self._lane)  # Nothing is tried in vain any more.
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
        """The answer to the greeting has come: returns the outbox's epoch, and the answer.

        A `Peer.link_down` must follow.
        """
        reply = self._handshake.check_reply(self._peer, data, session)
        epoch = self._outbox.resume(reply.received_sequence)
        self._peer.link_up()
        self._peer.reached(self._lane)
        self._backoff_seconds = _FIRST_BACKOFF_SECONDS
        return epoch, reply

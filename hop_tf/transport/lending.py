"""`Lending`: decides which thread reads the messages of a connection.

Each connection has a thread that reads messages and delivers them. Waking the thread that waits for a message takes
longer than reading the message. So a thread that knows the next message borrows the connection and reads it itself,
step after step. If nobody borrows the connection for a while, its own thread goes on. That thread also reads every
message that the borrower did not expect.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence

# A connection that no thread has borrowed for this long goes back to its own thread.
KEEP_SECONDS = 0.05
# After a message, the connection's thread waits up to this long to see if another thread was waiting for that message.
_HANDOVER_SECONDS = 0.005
# After borrowing in vain, a thread pauses before it borrows again: each time twice as long, up to this limit.
_MAX_PAUSE_SECONDS = 10.0


class Lending:
    """The state shared by a connection's thread and the thread that borrows the connection.

    Attributes:
      pause_seconds: Time that a thread pauses after it has borrowed the connection in vain.
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._is_wanted = False
        self._num_waiting = 0
        self._is_lent = False
        self._is_borrowed = False
        self._used_at = 0.0
        self.pause_seconds = 0.0
        self._paused_until = 0.0

    # The connection's thread.

    def lend(self) -> None:
        """Lends the connection, between two messages, to a thread that wants it.

        Blocks: until the connection is back.
        """
        if not self._is_wanted:
            return
        with self._lock:
            self._changed.wait_for(lambda: not self._num_waiting, _HANDOVER_SECONDS)
            self._is_lent = self._is_wanted and not self._num_waiting
            if self._is_lent:
                self._is_wanted = False
            while self._is_borrowed or (self._is_lent and self._kept_seconds() > 0):
                self._changed.wait(KEEP_SECONDS if self._is_borrowed else self._kept_seconds())
            self._is_lent = False

    def _kept_seconds(self) -> float:
        """The time for which the connection stays lent if no thread borrows it."""
        return self._used_at + KEEP_SECONDS - time.monotonic()

    def end(self) -> None:
        """Lets the connection's thread go on, so that it can end."""
        with self._lock:
            self._is_lent = self._is_wanted = False
            self._paused_until = float("inf")
            self._changed.notify_all()

    # The thread that waits for a message.

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """A context in which a thread waits for the connection's thread to deliver. The thread may borrow it next."""
        with self._lock:
            self._num_waiting += 1
            self._is_lent = False
            self._is_wanted = time.monotonic() >= self._paused_until
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._lock:
                self._num_waiting -= 1
                self._used_at = time.monotonic()
                self._changed.notify_all()

    def borrow(self) -> bool:
        """Takes the connection if it is lent. Returns True if `give_back` must follow."""
        with self._lock:
            if self._is_lent and not self._is_borrowed:
                self._is_borrowed = True
                return True
            return False

    def give_back(self) -> None:
        """Ends borrowing."""
        with self._lock:
            self._is_borrowed = False
            self._used_at = time.monotonic()
            if not self._is_lent:  # Lending was ended meanwhile. Otherwise the connection's thread stays asleep.
                self._changed.notify_all()

    def note_use(self, was_of_use: bool) -> None:
        """Records if borrowing was of use. If it was not, the connection's thread goes on reading."""
        if was_of_use:
            self.pause_seconds /= 2
            return
        with self._lock:
            self._is_lent = self._is_wanted = False
            self.pause_seconds = min(max(KEEP_SECONDS, 2 * self.pause_seconds), _MAX_PAUSE_SECONDS)
            self._paused_until = max(self._paused_until, time.monotonic() + self.pause_seconds)
            self._changed.notify_all()


def borrow_all(lendings: Sequence[Lending]) -> bool:
    """Takes all of these connections, or none. Returns True if it has taken them: `give_back_all` must follow."""
    for number, lending in enumerate(lendings):
        if not lending.borrow():
            give_back_all(lendings[:number])
            return False
    return True


def give_back_all(lendings: Sequence[Lending]) -> None:
    """Ends borrowing."""
    for lending in lendings:
        lending.give_back()

"""`Strangers`: connections whose other side has not greeted yet. `GuessLimit`: how often one may guess the token.

Whoever reaches a port can connect to it. Until it has greeted it gets little: a thread, for a short time, and if others
want that place, it is first taken from the source that has the most.
"""

from __future__ import annotations

import collections
import dataclasses
import ipaddress
import threading
import time
import urllib.parse
from collections.abc import Callable

# For the whole greeting, however the bytes of it trickle in.
GREETING_SECONDS = 10.0
# Connections that have not greeted yet; each costs a thread.
MAX_STRANGERS = 64
# Those that were told to end need a moment: at most so many threads are there at a time.
_MAX_THREADS = 2 * MAX_STRANGERS
# Wrong proofs that a source may have at once, and how many more it may have every second.
_MAX_GUESSES, _GUESSES_PER_SECOND = 20.0, 5.0
# Sources that are remembered; a forgotten one begins anew.
_MAX_SOURCES = 1024


@dataclasses.dataclass(eq=False)
class Stranger:
    """A connection that has not greeted yet.

    Attributes:
      source: Where it comes from, see `source_of`.
      end: Ends it.
      deadline: When it is ended (`time.monotonic`).
      problem: Why it was ended, if that is worth a word; else "".
    """

    source: str
    end: Callable[[], object]
    deadline: float
    problem: str = ""


class Strangers:
    """Bounds how many connections have not greeted yet, and for how long. May be used from any thread."""

    def __init__(self):
        self._changed = threading.Condition()
        self._waiting: dict[Stranger, None] = {}  # Those that were not ended, the oldest first.
        self._num_present = 0
        self._num_expected = 0
        self._closed = False

    def __len__(self) -> int:
        """How many have not greeted yet and were not ended."""
        with self._changed:
            return len(self._waiting)

    def expect(self) -> bool:
        """Keeps a place for a connection that enters soon; False if too many threads are busy with others."""
        with self._changed:
            if self._closed or self._num_present + self._num_expected >= _MAX_THREADS:
                return False
            self._num_expected += 1
            return True

    def admit(self, try_reserve: Callable[[], bool]) -> bool:
        """Keeps a place for a connection that enters soon, and a thread; False where one of the two is missing.

        Args:
          try_reserve: Reserves the thread; tells whether there is one.
        """
        if not self.expect():
            return False
        if try_reserve():
            return True
        self.expect_less()
        return False

    def expect_less(self) -> None:
        """One that was expected does not come."""
        with self._changed:
            self._num_expected -= 1

    def enter(self, source: str, end: Callable[[], object]) -> Stranger:
        """A connection that was expected is there. `leave` follows. Another one is ended where there are too many.

        Args:
          source: Where it comes from, see `source_of`.
          end: Ends it; does not block.
        """
        stranger = Stranger(source, end, time.monotonic() + GREETING_SECONDS)
        with self._changed:
            self._num_expected -= 1
            self._num_present += 1
            self._waiting[stranger] = None
            if self._closed:
                self._end(stranger)
            elif len(self._waiting) > MAX_STRANGERS:
                self._end(self._in_the_way(), "too many connections have not greeted yet")
            self._changed.notify_all()
        return stranger

    def leave(self, stranger: Stranger) -> None:
        """It has greeted, or is gone."""
        with self._changed:
            self._waiting.pop(stranger, None)
            self._num_present -= 1

    def watch(self) -> None:
        """Ends those that take too long. Blocks: until `close`."""
        with self._changed:
            while not self._closed:
                oldest = next(iter(self._waiting), None)
                seconds_left = None if oldest is None else oldest.deadline - time.monotonic()
                if oldest is not None and seconds_left <= 0:
                    self._end(oldest, "no greeting came in time")
                else:
                    self._changed.wait(seconds_left)

    def close(self) -> None:
        """Ends all, and everyone that still comes."""
        with self._changed:
            self._closed = True
            for stranger in list(self._waiting):
                self._end(stranger)
            self._changed.notify_all()

    def _in_the_way(self) -> Stranger:
        """The oldest of the source that has most: who comes alone from elsewhere is not crowded out."""
        counts = collections.Counter(stranger.source for stranger in self._waiting)
        return max(self._waiting, key=lambda stranger: counts[stranger.source])  # The first of those that are alike.

    def _end(self, stranger: Stranger, problem: str = "") -> None:
        del self._waiting[stranger]
        stranger.problem = problem
        stranger.end()


class GuessLimit:
    """How often a source may prove that it knows the cluster token and fail. May be used from any thread.

    Only failures count: who knows the token is never kept out, unless others at the same address guess all the time.
    """

    def __init__(self):
        self._lock = threading.Lock()
        # By source: how many guesses it has left, and when that was so.
        self._left: collections.OrderedDict[str, tuple[float, float]] = collections.OrderedDict()

    def take(self, source: str) -> bool:
        """Whether `source` may try now. Counts as a failure until `give_back`."""
        with self._lock:
            left = self._now_left(source)
            if left < 1:
                return False
            self._set(source, left - 1)
            return True

    def give_back(self, source: str) -> None:
        """It was no guess."""
        with self._lock:
            self._set(source, self._now_left(source) + 1)

    def _now_left(self, source: str) -> float:
        if source not in self._left:
            return _MAX_GUESSES
        left, since = self._left[source]
        return min(_MAX_GUESSES, left + (time.monotonic() - since) * _GUESSES_PER_SECOND)

    def _set(self, source: str, left: float) -> None:
        self._left.pop(source, None)
        if left < _MAX_GUESSES:
            self._left[source] = left, time.monotonic()
        if len(self._left) > _MAX_SOURCES:
            self._left.popitem(last=False)


def source_of(peer: str) -> str:
    """Where a connection comes from: the host of "host:port", or of what gRPC calls a peer, such as "ipv4:host:port".

    Of an IPv6 address it is the network of 64 bits: whoever has one address there has them all.
    """
    host = urllib.parse.unquote(peer.removeprefix("ipv4:").removeprefix("ipv6:")).rpartition(":")[0].strip("[]")
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if address.version == 4 or address.ipv4_mapped is not None:
        return str(getattr(address, "ipv4_mapped", None) or address)
    return str(ipaddress.ip_network((int(address) >> 64 << 64, 64)))

"""`UnauthenticatedPeers`: connections whose peer has not greeted yet. `GuessRateLimiter`: limits guesses of the token.

Any process that reaches a port can connect to it. Before the greeting, a connection gets little: a thread, for a short
time. If there are too many connections, the source with the most connections loses one first.
"""

from __future__ import annotations

import collections
import dataclasses
import ipaddress
import threading
import time
import urllib.parse
from collections.abc import Callable

# Limit for the whole greeting, however slowly its bytes come in.
GREETING_SECONDS = 10.0
# Connections that have not greeted yet. Each costs a thread.
MAX_UNAUTHENTICATED = 64
# Limit on the threads of these connections, including ended ones, which need a moment to close.
_MAX_THREADS = 2 * MAX_UNAUTHENTICATED
# Wrong proofs that a source may send at once, and how many more per second.
_MAX_GUESSES, _GUESSES_PER_SECOND = 20.0, 5.0
# Sources that are remembered. A forgotten source begins anew.
_MAX_SOURCES = 1024


@dataclasses.dataclass(eq=False)
class UnauthenticatedPeer:
    """A connection that has not greeted yet.

    Attributes:
      source: The connection's source, see `source_of`.
      end: Ends the connection.
      deadline: Time when the connection is ended (`time.monotonic`).
      problem: Reason why the connection was ended, if it should be reported; otherwise "".
    """

    source: str
    end: Callable[[], object]
    deadline: float
    problem: str = ""


class UnauthenticatedPeers:
    """Limits the connections that have not greeted yet, in number and time. May be used from any thread."""

    def __init__(self):
        self._changed = threading.Condition()
        self._waiting: dict[UnauthenticatedPeer, None] = {}  # Without those that were ended; the oldest first.
        self._num_present = 0
        self._num_expected = 0
        self._closed = False

    def __len__(self) -> int:
        """The number of connections that have not greeted yet and were not ended."""
        with self._changed:
            return len(self._waiting)

    def expect(self) -> bool:
        """Reserves a place for a connection that enters soon. Returns False if too many threads are busy."""
        with self._changed:
            if self._closed or self._num_present + self._num_expected >= _MAX_THREADS:
                return False
            self._num_expected += 1
            return True

    def admit(self, try_reserve: Callable[[], bool]) -> bool:
        """Reserves a place and a thread for a connection that enters soon. Returns False if either is missing.

        Args:
          try_reserve: Reserves the thread. Returns True if there is one.
        """
        if not self.expect():
            return False
        if try_reserve():
            return True
        self.expect_less()
        return False

    def expect_less(self) -> None:
        """Called when an expected connection does not come."""
        with self._changed:
            self._num_expected -= 1

    def enter(self, source: str, end: Callable[[], object]) -> UnauthenticatedPeer:
        """Called when an expected connection has come. `leave` must follow. If there are too many, one is ended.

        Args:
          source: The connection's source, see `source_of`.
          end: Ends the connection. Must not block.
        """
        caller = UnauthenticatedPeer(source, end, time.monotonic() + GREETING_SECONDS)
        with self._changed:
            self._num_expected -= 1
            self._num_present += 1
            self._waiting[caller] = None
            if self._closed:
                self._end(caller)
            elif len(self._waiting) > MAX_UNAUTHENTICATED:
                self._end(self._in_the_way(), "too many connections have not greeted yet")
            self._changed.notify_all()
        return caller

    def leave(self, caller: UnauthenticatedPeer) -> None:
        """Called when a connection has greeted, or is gone."""
        with self._changed:
            self._waiting.pop(caller, None)
            self._num_present -= 1

    def watch(self) -> None:
        """Ends connections that take too long to greet. Blocks: until `close`."""
        with self._changed:
            while not self._closed:
                oldest = next(iter(self._waiting), None)
                seconds_left = None if oldest is None else oldest.deadline - time.monotonic()
                if oldest is not None and seconds_left <= 0:
                    self._end(oldest, "no greeting came in time")
                else:
                    self._changed.wait(seconds_left)

    def close(self) -> None:
        """Ends all connections that have not greeted, and all later ones."""
        with self._changed:
            self._closed = True
            for caller in list(self._waiting):
                self._end(caller)
            self._changed.notify_all()

    def _in_the_way(self) -> UnauthenticatedPeer:
        """The oldest connection of the source with the most connections. Single connections of others then stay."""
        counts = collections.Counter(caller.source for caller in self._waiting)
        return max(self._waiting, key=lambda caller: counts[caller.source])  # Of equals, the oldest.

    def _end(self, caller: UnauthenticatedPeer, problem: str = "") -> None:
        del self._waiting[caller]
        caller.problem = problem
        caller.end()


class GuessRateLimiter:
    """Limits the failed proofs of the cluster token from each source. May be used from any thread.

    Only failures count. A peer that knows the token always gets in, unless others at its address guess all the time.
    """

    def __init__(self):
        self._lock = threading.Lock()
        # By source: the number of guesses left, and the time of that count.
        self._left: collections.OrderedDict[str, tuple[float, float]] = collections.OrderedDict()

    def take(self, source: str) -> bool:
        """Returns True if `source` may try now. The attempt counts as a failure until `give_back`."""
        with self._lock:
            left = self._now_left(source)
            if left < 1:
                return False
            self._set(source, left - 1)
            return True

    def give_back(self, source: str) -> None:
        """Called when an attempt has succeeded: it does not count as a failure."""
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
    """The source of a connection: the host of "host:port", or of gRPC's name of a peer, such as "ipv4:host:port".

    For an IPv6 address, the source is its /64 network: a machine with one address there can have all of them.
    """
    host = urllib.parse.unquote(peer.removeprefix("ipv4:").removeprefix("ipv6:")).rpartition(":")[0].strip("[]")
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if address.version == 4 or address.ipv4_mapped is not None:
        return str(getattr(address, "ipv4_mapped", None) or address)
    return str(ipaddress.ip_network((int(address) >> 64 << 64, 64)))

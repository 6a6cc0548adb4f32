"""`Peer`: the state of another rank, as a transport sees it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from absl import logging

from hop_tf.errors import ProtocolError
from hop_tf.transport.addresses import host_of
from hop_tf.transport.base import PeerStatus

# Weight of a new measurement in the smoothed round trip, as in TCP.
_SMOOTHING = 1 / 8
# The most characters of a problem in a report to the peer.
_MAX_COMPLAINT = 500


def process_name(number: int, num_ranks: int | None) -> str:
    """The name of a process in messages: "rank 2", or "ps 0" for the first process after the ranks."""
    return f"rank {number}" if num_ranks is None or number < num_ranks else f"ps {number - num_ranks}"


class Peer:
    """Another rank, or a parameter server: its address, its signs of life, and its problems.

    Args:
      rank: Its rank.
      address: "host:port".
      name: Its name in messages. Default: "rank" and its rank.

    Attributes:
      failure: See `PeerStatus`.
      may_return: See `Transport.expect_return`.
    """

    def __init__(self, rank: int, address: str, name: str | None = None):
        self.rank = rank
        self.address = address
        self._name = name or process_name(rank, None)
        self._lock = threading.Condition()
        self._num_links = 0
        self._watched_since: float | None = None
        self._heard_at: float | None = None
        self._refused_since: float | None = None
        self._incarnation: str | None = None
        self._introduced: str | None = None
        self._former_incarnations: set[str] = set()
        self.failure: Exception | None = None
        self._last_problem = ""
        # By lane, the time when this rank began to try to connect. The next two are the peer's report of its own
        # attempts.
        self._trying_since: dict[int, float] = {}
        self._unreached_by_seconds = 0.0
        self._problem_there = ""
        self.may_return = False
        self._socket_port: int | None = None
        self._round_trip_seconds: float | None = None
        self._least_round_trip_seconds: float | None = None
        # "host:port" of its sockets on further interfaces: see `CommunicationOptions.interfaces`.
        self.interface_addresses: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self._name} at {self.address}"

    @property
    def host(self) -> str:
        """The name or IP address in `address`."""
        return host_of(self.address)

    def watch(self) -> None:
        """Begins to measure the peer's silence, unless that has begun."""
        with self._lock:
            if self._watched_since is None:
                self._watched_since = time.monotonic()

    def heard(self) -> None:
        """Called when something has come from this peer."""
        self._heard_at = time.monotonic()
        self._refused_since = None

    def was_heard_within(self, seconds: float) -> bool:
        """True if something has come from this peer in the last `seconds`."""
        return self._heard_at is not None and time.monotonic() - self._heard_at < seconds

    def refused(self) -> None:
        """Called when this peer's address refuses connections."""
        with self._lock:
            if self._refused_since is None:
                self._refused_since = time.monotonic()

    def record_round_trip(self, seconds: float) -> None:
        """Called when a heartbeat was answered after `seconds`."""
        with self._lock:
            previous = seconds if self._round_trip_seconds is None else self._round_trip_seconds
            self._round_trip_seconds = previous + _SMOOTHING * (seconds - previous)
            self._least_round_trip_seconds = min(seconds, self._least_round_trip_seconds or seconds)

    @property
    def round_trip_seconds(self) -> float:
        """See `PeerStatus`."""
        return self._round_trip_seconds or 0.0

    @property
    def least_round_trip_seconds(self) -> float:
        """The least round trip so far, close to that of the network alone; 0.0 while it is unknown."""
        return self._least_round_trip_seconds or 0.0

    @property
    def incarnation(self) -> str | None:
        """The incarnation that was met last; None if none was met."""
        return self._incarnation

    def is_incarnation(self, incarnation: str) -> bool:
        """True if the peer is `incarnation`. The first incarnation is remembered."""
        with self._lock:
            if self._incarnation is None:
                self._incarnation = self._introduced = incarnation
            return self._incarnation == incarnation

    def has_been(self, incarnation: str) -> bool:
        """True if the peer is or was `incarnation`, or if none was met."""
        with self._lock:
            return self._incarnation in (None, incarnation) or incarnation in self._former_incarnations

    def replace(self, incarnation: str) -> bool:
        """Accepts a new process as this peer. Returns False if that was replaced before. `introduce` must follow."""
        with self._lock:
            if incarnation in self._former_incarnations:
                return False
            self._former_incarnations.add(self._incarnation)
            self._incarnation = incarnation
            self._socket_port = None
            self._trying_since.clear()
            self._unreached_by_seconds, self._problem_there = 0.0, ""
            return True

    def introduce(self) -> None:
        """Called when messages in flight to the old process are forgotten. New messages are for the new process."""
        self._introduced = self._incarnation

    def link_up(self) -> None:
        """Called when a handshake has succeeded, in either direction."""
        with self._lock:
            self._num_links += 1
            self._last_problem = ""
        self.heard()

    def link_down(self) -> None:
        """Called when a link is gone, once for every `link_up`."""
        with self._lock:
            self._num_links -= 1

    def try_to_reach(self, lane: int) -> None:
        """Called when this rank begins to open a connection."""
        with self._lock:
            self._trying_since.setdefault(lane, time.monotonic())

    def reached(self, lane: int | None = None) -> None:
        """Called when the peer has answered the greeting of a lane. None: the answer counts for all lanes."""
        with self._lock:
            if lane is None:
                self._trying_since.clear()
            else:
                self._trying_since.pop(lane, None)

    def complaint(self) -> str:
        """This rank's report to the peer on its attempts to reach the peer; "" if the peer is reached."""
        with self._lock:
            seconds = self._unreached_seconds()
            return f"{seconds:.1f} {self._last_problem[:_MAX_COMPLAINT]}" if seconds else ""

    def record_complaint(self, complaint: str) -> None:
        """Records the peer's `complaint` about this rank. Raises ProtocolError if it is malformed."""
        seconds, _, problem = complaint.partition(" ")
        try:
            unreached_by_seconds = float(seconds or 0.0)
        except ValueError as error:
            raise ProtocolError(f"{self} answered to a heartbeat with {complaint[:_MAX_COMPLAINT]!r}.") from error
        with self._lock:
            self._unreached_by_seconds, self._problem_there = unreached_by_seconds, problem

    def _unreached_seconds(self) -> float:
        return time.monotonic() - min(self._trying_since.values()) if self._trying_since else 0.0

    def record_problem(self, problem: str) -> None:
        """Remembers the problem of a connection."""
        with self._lock:
            self._last_problem = problem

    def record_socket_port(self, port: int) -> None:
        """Records the port of the peer's plain sockets; 0 means that the peer has none."""
        with self._lock:
            self._socket_port = port
            self._lock.notify_all()

    def wait_socket_port(self, ended: Callable[[], bool]) -> int | None:
        """Waits for the port of the peer's plain sockets. Returns None if `ended()` is true or the peer fails first."""
        with self._lock:
            self._lock.wait_for(lambda: ended() or self._socket_port is not None or self.failure is not None)
            return None if ended() or self.failure is not None else self._socket_port

    def wake(self) -> None:
        """Makes `wait_socket_port` check its `ended` again."""
        with self._lock:
            self._lock.notify_all()

    def fail(self, error: Exception) -> None:
        """Remembers an error that waiting cannot mend. Only the first such error is kept."""
        with self._lock:
            if self.failure is not None:
                return
            self.failure = error
            self._lock.notify_all()
        logging.error("%s", error)

    def status(self, own_failure: Exception | None = None) -> PeerStatus:
        """See `PeerStatus`. If this peer has no failure, the status has `own_failure`."""
        with self._lock:
            now = time.monotonic()
            since = self._heard_at if self._heard_at is not None else self._watched_since
            refused_since = self._refused_since  # `heard` may clear it meanwhile.
            return PeerStatus(
                address=self.address,
                connected=self._num_links > 0,
                silent_seconds=0.0 if since is None else now - since,
                incarnation=self._introduced,
                failure=self.failure or own_failure,
                last_problem=self._last_problem,
                refused_seconds=0.0 if refused_since is None else now - refused_since,
                round_trip_seconds=self.round_trip_seconds,
                unreached_seconds=self._unreached_seconds(),
                unreached_by_seconds=self._unreached_by_seconds,
                problem_there=self._problem_there,
                may_return=self.may_return,
            )

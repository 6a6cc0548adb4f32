"""`Links`: the properties of the links of an emulated network."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence

_MAX_HOSTS = 250
FRAME_BYTES = 1514
ETHERNET_HEADER_BYTES = 14
TCP_HEADERS_BYTES = 52  # IPv4 and TCP with timestamps
TCP_SHARE = (FRAME_BYTES - ETHERNET_HEADER_BYTES - TCP_HEADERS_BYTES) / FRAME_BYTES
MAX_BUNDLE_BYTES = 65536
_MIN_QUEUE_BYTES = 65536
_MAX_QUEUE_BYTES = 64 << 20
# The time for which a link may send at full speed after it was idle.
BURST_SECONDS = 0.001
# A queue of the default size holds the bytes of a round trip and of this time.
_SPARE_QUEUE_SECONDS = 0.01


@dataclasses.dataclass(frozen=True)
class Links:
    """The properties of the links of a network.

    Attributes:
      num_hosts: The number of hosts, 1 to 250.
      bandwidth_bits_per_second: The rate of each host's link, in each direction. One for all or one for each host;
        infinite for the speed of the machine.
      round_trip_seconds: The delay there and back between any two hosts, half of it each way.
      one_way_seconds: Instead of `round_trip_seconds`, a matrix: `one_way_seconds[a][b]` is the delay from host a to b.
      jitter_seconds: The largest additional delay of a packet. Each packet's additional delay is drawn uniformly.
      reorder: True if jitter lets a packet overtake another. By default a packet waits for earlier ones.
      queue_bytes: The bytes that wait in front of a link, or in a stalled one, before packets are dropped. None: the
        bytes that the link sends in the host's longest round trip, with jitter, and 10 ms; at least 64 KiB, at most 64
        MiB.

    Raises:
      ValueError: If a value is out of range, or both `round_trip_seconds` and `one_way_seconds` are given.
    """

    num_hosts: int
    bandwidth_bits_per_second: float | Sequence[float] = math.inf
    round_trip_seconds: float = 0.0
    one_way_seconds: Sequence[Sequence[float]] | None = None
    jitter_seconds: float = 0.0
    reorder: bool = False
    queue_bytes: int | None = None

    def __post_init__(self):
        if not 1 <= self.num_hosts <= _MAX_HOSTS:
            raise ValueError(f"`num_hosts` must be 1 to {_MAX_HOSTS}. Received: num_hosts={self.num_hosts}.")
        if len(self.rates) != self.num_hosts or not all(rate > 0 for rate in self.rates):
            self._refuse("bandwidth_bits_per_second", "must be positive: one value, or one for each host")
        for name in ("round_trip_seconds", "jitter_seconds"):
            if not 0 <= getattr(self, name) < math.inf:
                self._refuse(name, "must be finite and not negative")
        if self.one_way_seconds is not None:
            self._check_matrix()
        if self.queue_bytes is not None and self.queue_bytes < _MIN_QUEUE_BYTES:
            self._refuse("queue_bytes", f"must be at least {_MIN_QUEUE_BYTES}")

    @functools.cached_property
    def rates(self) -> list[float]:
        """The rate of each host's link, in bits per second."""
        bandwidth = self.bandwidth_bits_per_second
        return [*map(float, bandwidth)] if isinstance(bandwidth, Iterable) else [float(bandwidth)] * self.num_hosts

    @functools.cached_property
    def delays(self) -> list[list[float]]:
        """The delay from host a (row) to host b (column), in seconds."""
        if self.one_way_seconds is not None:
            return [[*map(float, row)] for row in self.one_way_seconds]
        return [[self.round_trip_seconds / 2] * self.num_hosts for _ in range(self.num_hosts)]

    @property
    def delayed(self) -> bool:
        """True if links have delays or jitter."""
        return self.jitter_seconds > 0 or any(map(any, self.delays))

    def queue_limit(self, host: int) -> int:
        """The most bytes that wait in front of a host's link, in either direction."""
        if self.queue_bytes is not None:
            return self.queue_bytes
        others = [other for other in range(self.num_hosts) if other != host]
        longest = max((self.delays[host][other] + self.delays[other][host] for other in others), default=0.0)
        size = self.rates[host] / 8 * (longest + 2 * self.jitter_seconds + _SPARE_QUEUE_SECONDS)
        return round(min(max(size, _MIN_QUEUE_BYTES), _MAX_QUEUE_BYTES))

    def bundle_limit(self, host: int) -> int:
        """The most bytes that TCP hands to a host's link at once."""
        burst = self.rates[host] / 8 * BURST_SECONDS
        return int(min(max(burst, 2 * FRAME_BYTES), MAX_BUNDLE_BYTES))

    def bucket_bytes(self, host: int) -> int:
        """The bytes that a host's link may send at full speed after it was idle: at least a bundle, and one frame more.

        A bundle counts with the headers that its frames would have. The kernel cuts a bundle that is larger than the
        bucket into frames, and each frame costs as much processor time as a bundle.
        """
        bundle = math.ceil(self.bundle_limit(host) / TCP_SHARE)
        return max(bundle, int(self.rates[host] / 8 * BURST_SECONDS)) + FRAME_BYTES

    def _check_matrix(self) -> None:
        if self.round_trip_seconds:
            self._refuse("round_trip_seconds", "must be left out if `one_way_seconds` is given")
        square = [len(row) for row in self.delays] == [self.num_hosts] * self.num_hosts
        if not square or not all(0 <= delay < math.inf for row in self.delays for delay in row):
            self._refuse("one_way_seconds", "must be one row for each host with a delay to each host, none negative")

    def _refuse(self, name: str, rule: str) -> None:
        raise ValueError(f"`{name}` {rule}. Received: {name}={getattr(self, name)}.")


def ring_delays(num_hosts: int, one_way_seconds: float) -> list[list[float]]:
    """Delays between sites on a ring: `one_way_seconds` for each hop of the shorter way around."""
    hosts = range(num_hosts)
    return [[one_way_seconds * min((b - a) % num_hosts, (a - b) % num_hosts) for b in hosts] for a in hosts]


# The sites of a training across three continents, in the order of their ring. The paper prints only the largest round
# trip, 277 ms, and the ring's sum, 479 ms, and shows the others in a picture. The other values here are typical for
# such distances, and give that sum. The largest round trip is between Tokyo and London, according to section 4.4.
#   Distributed Training across the World. 2019. Section 4.4, Figure 2.
SITES = ("Tokyo", "Oregon", "London", "Ohio")
_SITE_ROUND_TRIPS = {
    ("Tokyo", "Oregon"): 0.097,
    ("Oregon", "London"): 0.137,
    ("London", "Ohio"): 0.086,
    ("Ohio", "Tokyo"): 0.159,
    ("Tokyo", "London"): 0.277,
    ("Oregon", "Ohio"): 0.050,
}


def site_delays() -> list[list[float]]:
    """Delays between the `SITES`, half of a round trip each way: `one_way_seconds` for hosts in the order of sites."""
    round_trips = {frozenset(pair): seconds for pair, seconds in _SITE_ROUND_TRIPS.items()}
    return [[round_trips.get(frozenset((a, b)), 0.0) / 2 for b in SITES] for a in SITES]

"""Times and failures of an emulated network, common to its relay and its proxies."""

from __future__ import annotations

import collections
import math
import random

from .links import Links


class TokenBucket:
    """One direction of a host's link: a token bucket, and a bounded queue in front of it.

    The bucket holds one bundle. With rate r, a bundle of n bytes that comes at time t leaves at

        t' = max(t, t'_before + n / r)
    """

    def __init__(self, bits_per_second: float, queue_bytes: float = math.inf):
        self._seconds_per_byte = 8 / bits_per_second
        self._queue_seconds = math.inf if math.isinf(bits_per_second) else queue_bytes * self._seconds_per_byte
        self._last = 0.0

    def pass_time(self, now: float, num_bytes: int) -> float | None:
        """Passes bytes that come now. Returns the time at which they have passed, or None if the queue is full."""
        passed = max(now, self._last + num_bytes * self._seconds_per_byte)
        if passed - now > self._queue_seconds:
            return None
        self._last = passed
        return passed


class Path:
    """The way from one host to another, between their links: a delay, and failures."""

    def __init__(self, links: Links, source: int, target: int, generator: random.Random):
        self.target = target
        self.cut = False
        self.stalled_until = 0.0
        self.held: collections.deque[tuple[bytes, int]] = collections.deque()  # Packets and their sizes.
        self.held_bytes = 0
        self._delay = links.delays[source][target]
        self._jitter = links.jitter_seconds
        self._reorder = links.reorder
        self._generator = generator
        self._last_arrival = 0.0

    def arrival(self, sent: float) -> float:
        """Returns the arrival time of a packet that was sent at the time `sent`."""
        if not self._jitter:
            return sent + self._delay
        arrival = sent + self._delay + self._generator.uniform(0, self._jitter)
        if not self._reorder:
            arrival = self._last_arrival = max(arrival, self._last_arrival)
        return arrival

    def fail(self, kind: str, until: float) -> None:
        """Stalls the path until a time, cuts it, or restores it."""
        if kind == "stall":
            self.stalled_until = max(self.stalled_until, until)
        else:
            self.cut = kind == "cut"


def make_paths(links: Links) -> list[list[Path]]:
    """Makes the path from each host (row) to each host (column)."""
    generator, hosts = random.Random(0), range(links.num_hosts)
    return [[Path(links, source, target, generator) for target in hosts] for source in hosts]

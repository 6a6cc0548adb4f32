"""The number of lanes for unordered messages, and the rate of each lane."""

from __future__ import annotations

import collections
import dataclasses
import math

# The most bytes that one connection has in flight, if its buffers may grow to 4 MiB, Linux's default.
_BYTES_IN_FLIGHT = 3 << 20
_MAX_LANES = 8
_LARGE_BYTES = 1 << 16


def num_lanes(round_trip_seconds: float, bits_per_second: float, num_peers: int) -> int:
    """The number of lanes that the unordered messages to a peer are spread over.

    The size of a connection's buffers limits its bytes in flight. If a round trip takes a second, a connection carries
    25 Mbit/s, however fast the link is. Only an administrator can allow larger buffers, and a size set here would turn
    off the system's automatic tuning. So messages are spread over n = ceil(T * R / N / 3 MiB) lanes, at least 1 and at
    most 8. More lanes would have more bytes in flight than the link and the queues before it hold, and would lose
    packets.

    Args:
      round_trip_seconds: T.
      bits_per_second: R, the rate of this rank's link.
      num_peers: N, the number of peers that share the link.
    """
    bytes_in_flight = round_trip_seconds * bits_per_second / 8 / num_peers
    return min(max(1, math.ceil(bytes_in_flight / _BYTES_IN_FLIGHT)), _MAX_LANES)


@dataclasses.dataclass(frozen=True)
class Share:
    """A peer's share of this rank's link.

    Attributes:
      num_lanes: n, the number of lanes that messages are spread over.
      bytes_per_second: The limit of each lane: R / (8 N n), so that all peers together get what the link carries.
        Without a limit, several connections find their rates by filling the queues before the link. That takes many
        round trips, which is slow if a round trip takes a second. A single lane is not limited.
    """

    num_lanes: int
    bytes_per_second: float


_ONE_LANE = Share(1, math.inf)


class LinkShares:
    """The peers that share this rank's link. Not thread-safe.

    Args:
      bits_per_second: R, the rate of the link.
    """

    def __init__(self, bits_per_second: float):
        self._bits_per_second = bits_per_second
        # The numbers of the last two large messages to each peer; -1 before the first one.
        self._large_messages: dict[int, collections.deque[int]] = {}
        self._num_large_messages = 0

    def of(self, peer: int, round_trip_seconds: float, num_bytes: int) -> Share:
        """The present share of a peer, for a message of `num_bytes` bytes to it. Records a large message."""
        is_near = num_lanes(round_trip_seconds, self._bits_per_second, 1) == 1
        num_peers = 1 if is_near else self._num_sharing_with(peer)
        if num_bytes >= _LARGE_BYTES:
            self._note_large_message(peer)
        if is_near:  # The common case: one lane fills the link, even if no other peer shares it.
            return _ONE_LANE
        count = num_lanes(round_trip_seconds, self._bits_per_second, num_peers)
        return Share(count, self._bits_per_second / 8 / num_peers / count if count > 1 else math.inf)

    def _note_large_message(self, peer: int) -> None:
        if peer not in self._large_messages:
            self._large_messages[peer] = collections.deque([-1], maxlen=2)
        self._large_messages[peer].append(self._num_large_messages)
        self._num_large_messages += 1

    def _num_sharing_with(self, peer: int) -> int:
        """The number of peers that share the link: `peer`, and those that took turns with it.

        Only the order of messages counts, not their times. After a pause the same peers share the link again. Lanes
        that were added in the pause would begin slowly, as new connections do.
        """
        since = self._large_messages[peer][0] if peer in self._large_messages else -1
        others = {other for other, numbers in self._large_messages.items() if numbers[-1] > since}
        return len(others | {peer})

"""Over how many lanes messages without an order are spread, and how fast each of these sends."""

from __future__ import annotations

import collections
import dataclasses
import math

# What one connection has under way at most, where its buffers may grow to 4 MiB, Linux's default.
_BYTES_UNDER_WAY = 3 << 20
_MAX_LANES = 8
_LARGE_BYTES = 1 << 16


def num_lanes(round_trip_seconds: float, bits_per_second: float, num_peers: int) -> int:
    """Over how many lanes the unordered messages to a peer are spread.

    A connection has no more bytes under way than the system lets its buffers grow: where a round trip takes a second it
    carries 25 Mbit/s, however fast the link is. Only an administrator can allow larger ones, and a size of our own
    would end the system's tuning. So it takes n = ceil(T * R / N / 3 MiB) of them, at least 1 and at most 8. More than
    that would have more under way than the link and the queues before it hold, and lose packets.

    Args:
      round_trip_seconds: T.
      bits_per_second: R, the rate of this rank's link.
      num_peers: N, how many peers share it.
    """
    bytes_under_way = round_trip_seconds * bits_per_second / 8 / num_peers
    return min(max(1, math.ceil(bytes_under_way / _BYTES_UNDER_WAY)), _MAX_LANES)


@dataclasses.dataclass(frozen=True)
class Share:
    """A peer's share of this rank's link.

    Attributes:
      num_lanes: n, over how many lanes messages are spread.
      bytes_per_second: What each of them sends at most: R / (8 N n), so that all peers together are sent what the link
        carries. Left to themselves, several connections find out by filling the queues before it, which where round
        trips take a second costs many of them. A single lane is not limited.
    """

    num_lanes: int
    bytes_per_second: float


_ONE_LANE = Share(1, math.inf)


class LinkShares:
    """Who shares this rank's link. Not safe for several threads at a time.

    Args:
      bits_per_second: R, the rate of the link.
    """

    def __init__(self, bits_per_second: float):
        self._bits_per_second = bits_per_second
        # The numbers of the last two large messages to each peer; -1 before the first one.
        self._large_messages: dict[int, collections.deque[int]] = {}
        self._num_large_messages = 0

    def of(self, peer: int, round_trip_seconds: float, num_bytes: int) -> Share:
        """The share of a peer that a message of so many bytes is for now."""
        is_near = num_lanes(round_trip_seconds, self._bits_per_second, 1) == 1
        num_peers = 1 if is_near else self._num_sharing_with(peer)
        if num_bytes >= _LARGE_BYTES:
            self._note_large_message(peer)
        if is_near:  # As nearly always: one lane fills the link, even if the peer has it to itself.
            return _ONE_LANE
        count = num_lanes(round_trip_seconds, self._bits_per_second, num_peers)
        return Share(count, self._bits_per_second / 8 / num_peers / count if count > 1 else math.inf)

    def _note_large_message(self, peer: int) -> None:
        self._large_messages.setdefault(peer, collections.deque([-1], maxlen=2)).append(self._num_large_messages)
        self._num_large_messages += 1

    def _num_sharing_with(self, peer: int) -> int:
        """How many peers share the link, this one among them: those that took turns with it.

        Times do not matter. After a pause the same peers share it, and another connection would begin slowly.
        """
        since = self._large_messages[peer][0] if peer in self._large_messages else -1
        others = {other for other, numbers in self._large_messages.items() if numbers[-1] > since}
        return len(others | {peer})

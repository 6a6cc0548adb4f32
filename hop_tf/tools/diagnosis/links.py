"""`Link`: the speed of messages between two processes."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from hop_tf.records.log import JobLog, Transfer

# Messages up to the first size measure the latency. Messages of at least the second size measure the bandwidth.
_SMALL_BYTES = 4 << 10
LARGE_BYTES = 64 << 10
# Threads may be late, so the latency is this percentile of the messages' times.
_FAST_PERCENT = 10


# A TCP connection that was idle sends this many bytes at once, and twice as many after each round trip.
_FIRST_WINDOW_BYTES = 14_600


@dataclasses.dataclass(frozen=True)
class Link:
    """The link between two processes, both directions.

    Attributes:
      ends: The indices of the processes in `JobLog.processes`.
      round_trip_seconds: The time of a small message there and one back, or of a heartbeat; nan if there was none.
      message_bytes: The mean length of large messages, in the slower direction; nan if there was none.
      message_seconds: The mean time of these messages.
    """

    ends: tuple[int, int]
    round_trip_seconds: float
    message_bytes: float
    message_seconds: float

    @property
    def bytes_per_second(self) -> float:
        """The rate of large messages; nan if there was none."""
        return self.message_bytes / self.message_seconds

    @property
    def start_seconds(self) -> float:
        """The time until TCP's slow start has sent a whole large message, if the link's rate does not limit it."""
        return self.round_trip_seconds * math.log2(1 + self.message_bytes / _FIRST_WINDOW_BYTES)


def measure_links(job: JobLog) -> dict[tuple[int, int], Link]:
    """The links that messages have taken, by their ends, the lower one first."""
    ways, known_latencies = _ways(job), latencies(job)
    messages = {way: _large_message(transfers, known_latencies.get(way, 0.0)) for way, transfers in ways.items()}
    heartbeats = _heartbeats(job)
    links = {}
    for ends in sorted({(min(way), max(way)) for way in ways}):
        there, back = (known_latencies.get(way, math.nan) for way in (ends, ends[::-1]))
        round_trips = [each for each in (there + back, heartbeats.get(ends, math.nan)) if not math.isnan(each)]
        known = [messages[way] for way in (ends, ends[::-1]) if messages.get(way) is not None]
        slower = min(known, key=lambda message: message[0] / message[1], default=(math.nan, math.nan))
        links[ends] = Link(ends, min(round_trips, default=math.nan), *slower)
    return links


def latencies(job: JobLog) -> dict[tuple[int, int], float]:
    """The times of small messages, by sender and receiver. Pairs without small messages are left out.

    Clocks may differ. The difference cancels in a round trip, and in a comparison with other messages in the same
    direction.
    """
    seconds = {
        way: [each.come_at - each.sent_at for each in transfers if each.num_bytes <= _SMALL_BYTES]
        for way, transfers in _ways(job).items()
    }
    return {way: float(np.percentile(known, _FAST_PERCENT)) for way, known in seconds.items() if known}


def _ways(job: JobLog) -> Mapping[tuple[int, int], Sequence[Transfer]]:
    """All messages, by sender and receiver, in the order in which they came."""
    ways = collections.defaultdict(list)
    for transfer in job.transfers:
        ways[transfer.sender, transfer.receiver].append(transfer)
    return ways


def _heartbeats(job: JobLog) -> dict[tuple[int, int], float]:
    """The shortest round trips of heartbeats, by ends. Heartbeats do not wait behind other messages."""
    place = {process.number: index for index, process in enumerate(job.processes)}
    shortest: dict[tuple[int, int], float] = {}
    for index, process in enumerate(job.processes):
        for line in process.lines:
            if line["kind"] == "clock" and line["peer"] in place:
                ends = (min(index, place[line["peer"]]), max(index, place[line["peer"]]))
                shortest[ends] = min(line["round_trip"], shortest.get(ends, math.inf))
    return shortest


def _large_message(transfers: Sequence[Transfer], latency: float) -> tuple[float, float] | None:
    """The mean length and seconds of a large message. Returns None if there was none.

    A lane carries messages one after the other, so a message may have waited for the previous one:

        seconds of message i  =  come(i) - max(sent(i) + latency, come(i - 1))
    """
    lengths, durations, last = [], [], {}
    for each in transfers:  # In the order in which they came.
        begin = max(each.sent_at + latency, last.get(each.lane, -math.inf))
        last[each.lane] = each.come_at
        if each.num_bytes >= LARGE_BYTES and each.come_at > begin:
            lengths.append(each.num_bytes)
            durations.append(each.come_at - begin)
    return (float(np.mean(lengths)), float(np.mean(durations))) if lengths else None

"""`Link`: how fast messages went from one process to another one."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from hop_tf.records.log import JobLog, Transfer

# What a message of so many bytes takes says how long the way is; of so many, how wide.
_SMALL_BYTES = 4 << 10
LARGE_BYTES = 64 << 10
# Threads may be late: the way is as long as the fastest tenth of the messages say.
_FAST_PERCENT = 10


@dataclasses.dataclass(frozen=True)
class Link:
    """The way between two processes, both directions.

    Attributes:
      ends: Their places in `JobLog.processes`.
      round_trip_seconds: Of a small message there and one back; nan where none went.
      bytes_per_second: Of large messages, in the slower direction; nan where none went.
    """

    ends: tuple[int, int]
    round_trip_seconds: float
    bytes_per_second: float


def measure_links(job: JobLog) -> dict[tuple[int, int], Link]:
    """The links that messages have taken, by their ends, the lower one first."""
    ways = collections.defaultdict(list)
    for transfer in job.transfers:
        ways[transfer.sender, transfer.receiver].append(transfer)
    latencies = {way: _latency(transfers) for way, transfers in ways.items()}
    rates = {way: _rate(transfers, latencies[way]) for way, transfers in ways.items()}
    ends = sorted({(min(way), max(way)) for way in ways})
    return {each: Link(each, _round_trip(each, latencies), _slower(each, rates)) for each in ends}


def _latency(transfers: Sequence[Transfer]) -> float:
    """How long small messages take one way; clocks may be apart, which is gone in a round trip."""
    seconds = [each.come_at - each.sent_at for each in transfers if each.num_bytes <= _SMALL_BYTES]
    return float(np.percentile(seconds, _FAST_PERCENT)) if seconds else math.nan


def _rate(transfers: Sequence[Transfer], latency: float) -> float:
    """Of large messages: a lane carries one after the other, so that one may have waited for the one before it.

    seconds of message i  =  come(i) - max(sent(i) + latency, come(i - 1))
    """
    num_bytes, seconds, last = 0, 0.0, {}
    for each in transfers:  # In the order in which they came.
        begin = max(each.sent_at + (0.0 if math.isnan(latency) else latency), last.get(each.lane, -math.inf))
        last[each.lane] = each.come_at
        if each.num_bytes >= LARGE_BYTES and each.come_at > begin:
            num_bytes, seconds = num_bytes + each.num_bytes, seconds + each.come_at - begin
    return num_bytes / seconds if seconds else math.nan


def _round_trip(ends: tuple[int, int], latencies: Mapping[tuple[int, int], float]) -> float:
    there, back = (latencies.get(way, math.nan) for way in (ends, ends[::-1]))
    return there + back


def _slower(ends: tuple[int, int], rates: Mapping[tuple[int, int], float]) -> float:
    known = [rates[way] for way in (ends, ends[::-1]) if not math.isnan(rates.get(way, math.nan))]
    return min(known, default=math.nan)

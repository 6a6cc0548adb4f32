"""The rates at which processes have sent large messages: alone, and to several others at once over a network card.

A link or card may be faster than recorded, but its recorded rate is assumed. A link's rate is measured with the
messages that had the fewest others at the same time. A card's rate is the total rate of messages that left at the same
time.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping

import numpy as np

from hop_tf.records.log import JobLog
from hop_tf.tools.diagnosis.links import LARGE_BYTES, Link, latencies

# The rate of messages that leave at the same time is that of their fastest part. The part must have at least this share
# of the bytes, because a single message may seem fast by chance.
_LEAST_PART = 0.25
# Longer runs of messages are divided into parts of this size.
_MOST_MESSAGES = 64
# A link's rate is measured with this share of its messages: those with the fewest others at the same time.
_LEAST_OF_LINK = 0.1


@dataclasses.dataclass(frozen=True)
class _Sent:
    """Large messages that a process has sent, in the order in which they left. Arrays."""

    receiver: np.ndarray
    num_bytes: np.ndarray
    begin: np.ndarray
    end: np.ndarray


def sending_rates(job: JobLog, links: Mapping[tuple[int, int], Link]) -> dict[int, float]:
    """The typical rate at which each process has sent to all others together, in bytes per second.

    For messages that leave at the same time, the rate is that of the fastest part with at least a quarter of the bytes:

        rate  =  max over t, u of  (sum of bytes of all that left after t and had come by u) / (u - t)

    So a message that takes long over a slow link does not count. The result is the median, weighted by bytes.

    Args:
      job: The records.
      links: The links from `measure_links`.
    """
    rates = {}
    for sender, sent in _sent(job, links).items():
        found = [(_rate(part), float(part.num_bytes.sum())) for part in _at_once(sent)]
        rates[sender] = _weighted_median(*np.array(found).T)
    return rates


def lone_rates(job: JobLog, links: Mapping[tuple[int, int], Link]) -> dict[tuple[int, int], float]:
    """The rate of messages on each link, in bytes per second, by sender and receiver.

    Other messages that the sender sends at the same time may slow a message down. So only messages with the fewest
    others at the same time count: at least a tenth of a link's messages. The arguments are those of `sending_rates`.
    """
    rates = {}
    for sender, sent in _sent(job, links).items():
        company = _company(sent)
        for receiver in np.unique(sent.receiver):
            of_link = sent.receiver == receiver
            most = np.quantile(company[of_link], _LEAST_OF_LINK, method="higher")
            chosen = of_link & (company <= most)
            seconds = _alone_on_link(sent, of_link)[chosen[of_link]]
            rates[sender, int(receiver)] = float(np.sum(sent.num_bytes[chosen]) / np.sum(seconds))
    return rates


def _sent(job: JobLog, links: Mapping[tuple[int, int], Link]) -> Mapping[int, _Sent]:
    of_sender = collections.defaultdict(list)
    known = {way: link.round_trip_seconds / 2 for ends, link in links.items() for way in (ends, ends[::-1])}
    known |= latencies(job)
    for each in job.transfers:
        begin = each.sent_at + np.nan_to_num(known[each.sender, each.receiver])
        if each.num_bytes >= LARGE_BYTES and each.come_at > begin:
            of_sender[each.sender].append((begin, each.come_at, each.num_bytes, each.receiver))
    found = {}
    for sender, rows in of_sender.items():
        begin, end, num_bytes, receiver = np.array(sorted(rows)).T
        found[sender] = _Sent(receiver.astype(int), num_bytes, begin, end)
    return found


def _at_once(sent: _Sent) -> Iterator[_Sent]:
    """Divides messages into runs in which each message leaves before all earlier ones have come."""
    ended = np.maximum.accumulate(sent.end)
    gaps = np.flatnonzero(sent.begin[1:] >= ended[:-1]) + 1
    for part in np.split(np.arange(len(sent.begin)), gaps):
        for first in range(0, len(part), _MOST_MESSAGES):
            chosen = part[first : first + _MOST_MESSAGES]
            yield _Sent(*(getattr(sent, field.name)[chosen] for field in dataclasses.fields(_Sent)))


def _rate(part: _Sent) -> float:
    order = np.argsort(part.end)
    begin, end, num_bytes = part.begin[order], part.end[order], part.num_bytes[order]
    since = np.unique(begin)[:, None]
    total = np.cumsum(np.where(begin >= since, num_bytes, 0.0), axis=1)
    counts = (total >= _LEAST_PART * num_bytes.sum()) & (end > since)
    return float(np.max(total / np.where(counts, end - since, np.inf)))


def _company(sent: _Sent) -> np.ndarray:
    """For each message, the mean number of others in flight on the sender's other links during its time."""
    company = np.zeros(len(sent.begin))
    # A message cannot overlap with messages that began more than the longest duration before it.
    longest = float(np.max(sent.end - sent.begin))
    first = np.searchsorted(sent.begin, sent.begin - longest)
    last = np.searchsorted(sent.begin, sent.end)
    for place, (begin, end) in enumerate(zip(sent.begin, sent.end, strict=True)):
        near = slice(first[place], last[place])
        overlap = np.minimum(sent.end[near], end) - np.maximum(sent.begin[near], begin)
        others = sent.receiver[near] != sent.receiver[place]
        company[place] = np.sum(np.maximum(overlap, 0.0), where=others) / (end - begin)
    return company


def _alone_on_link(sent: _Sent, of_link: np.ndarray) -> np.ndarray:
    """The time that each message of a link took after all earlier ones had come."""
    begin, end = sent.begin[of_link], sent.end[of_link]
    before = np.concatenate([[-np.inf], np.maximum.accumulate(end)[:-1]])
    return np.maximum(end - np.maximum(begin, before), 0.0)


def _weighted_median(values: np.ndarray, weights: np.ndarray) -> float:
    order = np.argsort(values)
    reached = np.cumsum(weights[order]) >= weights.sum() / 2
    return float(values[order][np.argmax(reached)])

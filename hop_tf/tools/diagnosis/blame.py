"""`Blame`: the causes of the ranks' waits.

A rank waits until a message comes. Until the message was sent, the rank waited for the sender; after that, for the
link. If the sender waited itself meanwhile, the cause of the sender's wait is found in the same way. So each part of a
wait is caused by a rank's own work, or by a link. (This follows the critical path backwards.)
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
from collections.abc import Mapping

import numpy as np

from hop_tf.records.events import Kind
from hop_tf.records.log import JobLog
from hop_tf.tools.diagnosis.steps import Steps

# The maximum number of a rank's steps that are analyzed, evenly spread.
_MAX_STEPS = 400
# Tolerance for times, because durations are stored as float32. It must be short: a message that came after a wait's end
# did not cause that end. If two ranks wait for each other, the peer's next message comes only a latency later.
_TOLERANCE_SECONDS = 1e-4


@dataclasses.dataclass
class Blame:
    """The causes of a rank's waits, in the steps that were looked at.

    Attributes:
      num_steps: The number of these steps.
      own: Seconds of waiting for each process's own work. Keys are indices into `JobLog.processes`.
      links: Seconds of waiting for messages in flight on each link. Keys are the link's ends, the lower one first.
    """

    num_steps: int = 0
    own: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    links: collections.Counter = dataclasses.field(default_factory=collections.Counter)


@dataclasses.dataclass(frozen=True)
class _Wait:
    begin: float
    end: float
    peer: int


class _Walk:
    """Follows waits back to their causes."""

    def __init__(self, job: JobLog):
        self._waits: list[list[_Wait]] = []
        for process in job.processes:
            events = process.of_kind(Kind.WAIT)
            waits = [_Wait(float(e["begin"]), float(e["begin"] + e["seconds"]), int(e["peer"])) for e in events]
            self._waits.append(sorted(waits, key=lambda each: each.end))
        self._ends = [[wait.end for wait in waits] for waits in self._waits]
        self._come = collections.defaultdict(list)
        for transfer in job.transfers:
            self._come[transfer.receiver, job.processes[transfer.sender].number].append(transfer)
        self._come_at = {key: [each.come_at for each in transfers] for key, transfers in self._come.items()}
        self._by_number = {process.number: index for index, process in enumerate(job.processes)}
        self._max_depth = 2 * len(job.processes)

    def follow(self, process: int, begin: float, end: float, blame: Blame, depth: int = 0) -> None:
        """Adds a process's own work in an interval, and the causes of its waits, to `blame`."""
        now = end
        place = bisect.bisect_right(self._ends[process], begin)
        for wait in self._waits[process][place:][::-1]:
            if wait.begin >= now:
                continue
            until = min(wait.end, now)
            blame.own[process] += now - until
            now = max(wait.begin, begin)
            self._follow_wait(process, wait, now, until, blame, depth)
            if now <= begin:
                return
        blame.own[process] += now - begin

    def _follow_wait(self, process: int, wait: _Wait, begin: float, until: float, blame: Blame, depth: int) -> None:
        sender = self._by_number.get(wait.peer)
        key = (process, wait.peer)
        place = bisect.bisect_right(self._come_at.get(key, ()), wait.end + _TOLERANCE_SECONDS) - 1
        transfer = self._come[key][place] if place >= 0 else None
        if sender is None or transfer is None or transfer.come_at < wait.begin - _TOLERANCE_SECONDS:
            # The sender has left, or the message is not recorded.
            blame.own[process if sender is None else sender] += until - begin
            return
        put_at = min(max(transfer.put_at, begin), until)
        blame.links[min(sender, process), max(sender, process)] += until - put_at
        if put_at > begin:
            if depth < self._max_depth:
                self.follow(sender, begin, put_at, blame, depth + 1)
            else:
                blame.own[sender] += put_at - begin


def find_blame(job: JobLog, steps: Mapping[int, Steps]) -> dict[int, Blame]:
    """Finds the causes of the ranks' waits.

    Args:
      job: The records.
      steps: The steps of the ranks, by index in `JobLog.processes`.
    """
    walk = _Walk(job)
    return {index: _blame_of(walk, index, of_rank) for index, of_rank in steps.items()}


def _blame_of(walk: _Walk, index: int, steps: Steps) -> Blame:
    blame = Blame()
    for number in np.unique(np.linspace(0, len(steps.begin) - 1, _MAX_STEPS).astype(int)):
        blame.num_steps += 1
        if steps.result[number] > 0:
            begin = steps.begin[number] + steps.compute[number]
            walk.follow(index, begin, begin + steps.result[number], blame)
    return blame

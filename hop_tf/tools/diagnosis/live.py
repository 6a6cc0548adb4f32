"""Diagnosis of a running job's speed from its reports.

It tells less than a diagnosis from records, but needs no records.
Each rank counts its steps and their waiting time. Two reports, some time apart, tell what the rank did in between.
"""

from __future__ import annotations

import collections
import functools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence

from hop_tf.records.events import process_name
from hop_tf.tools.diagnosis.findings import ALWAYS, LEAST_SHARE, duration, rate

_MISSING = (
    "Links, input, callbacks and what a change would bring need records: CommunicationOptions(log_dir=...), and then "
    "`hop_tf diagnose LOG_DIR`, also while the job runs."
)
# Counters of reports, and their texts.
_OUTCOMES = {
    "late_updates": "updates came too late",
    "withheld_updates": "updates were not sent, as too late",
    "overtime_drops": "updates were dropped",
    "skipped_iterations": "steps were skipped",
    "ranks_lost": "times another rank was lost",
    "times_left_behind": "times the others continued without this rank",
}


def diagnose_reports(
    before: Sequence[Mapping], after: Sequence[Mapping], seconds: float, awaited: Mapping[int, collections.Counter]
) -> list[str]:
    """Says where the time of a running job goes. Each line has a sentence or two.

    Args:
      before: The reports of ranks and parameter servers. Reports of processes that did not answer have a `problem`.
      after: Later reports of the same processes.
      seconds: The time between the earlier and the later reports.
      awaited: For each rank, the number of times that it was seen waiting for each other process in that time.
    """
    # A process that does not answer cannot say if it is a rank or a server.
    num_ranks = max((int(each["num_ranks"]) for each in after if "num_ranks" in each), default=math.inf)
    pairs = [(one, other) for one, other in zip(before, after, strict=True) if not {"problem"} & (one.keys() | other)]
    silent = [other for other in after if "problem" in other]
    lines = [f"{process_name(each['rank'], num_ranks)} does not answer: {each['problem']}" for each in silent]
    processes = [_Process(one, other, seconds, num_ranks) for one, other in pairs]
    ranks = [each for each in processes if each.number < num_ranks]
    moving = [rank for rank in ranks if rank.num_steps > 0]
    if not moving:
        return [*lines, *_standing_still(ranks, seconds, awaited)]
    step_seconds = statistics.mean(rank.step_seconds for rank in moving)
    num_steps = sum(rank.num_steps for rank in moving)
    lines.append(f"A step takes {duration(step_seconds)}, the mean of {num_steps} steps in {seconds:.3g} s.")
    for process in processes:
        lines.append(process.describe(awaited.get(process.number, collections.Counter())))
    lines += _slow_ranks(moving)
    lines += _outcomes(pairs)
    return [*lines, _MISSING]


class _Process:
    """The work of a rank, or a parameter server, between two reports.

    Attributes:
      number: The number in the cluster, which counts ranks first, and then parameter servers.
      name: The name for people.
      name_of: `name_of(number)` is the name of another process.
      is_server: True if the process is a parameter server.
      num_steps: The number of steps made.
      step_seconds: The mean time of a step; infinity if there was none.
      own: The mean time of a step without waits.
      usual: The median time without waits, of the rank's latest steps.
      waited: The share of the time that was spent waiting.
      bytes_per_second: The rate of sent bytes.
    """

    def __init__(self, before: Mapping, after: Mapping, seconds: float, num_ranks: float):
        self.number = int(after["rank"])
        self.name_of = functools.partial(process_name, num_ranks=num_ranks)
        self.name = self.name_of(self.number)
        self.is_server = self.number >= num_ranks
        self.num_steps = int(_increase(before, after, "steps"))
        self.step_seconds = seconds / self.num_steps if self.num_steps else float("inf")
        self.waited = min(1.0, _increase(before, after, "wait_seconds") / seconds)
        self.own = self.step_seconds * (1 - self.waited)
        self.usual = float(after.get("compute_seconds", 0.0))
        self.bytes_per_second = _increase(before, after, "bytes_sent") / seconds

    def describe(self, awaited: collections.Counter) -> str:
        if self.is_server:
            return f"{self.name} sends {rate(self.bytes_per_second)}."
        if not self.num_steps:
            return f"{self.name}: no step has ended meanwhile."
        whom = ""
        if awaited and self.waited >= LEAST_SHARE:
            whom = f", most often for {self.name_of(awaited.most_common(1)[0][0])}"
        return (
            f"{self.name}: {1 - self.waited:.0%} computing and other work of its own, {self.waited:.0%} waiting for "
            f"others{whom}. It sends {rate(self.bytes_per_second)}."
        )


def _increase(before: Mapping, after: Mapping, name: str) -> float:
    return max(0.0, float(after.get(name, 0)) - float(before.get(name, 0)))


def _standing_still(ranks: Sequence[_Process], seconds: float, awaited: Mapping) -> Iterator[str]:
    yield f"No rank that answers has ended a step in {seconds:.3g} s: look for longer (`--seconds`)."
    for rank in ranks:
        if awaited.get(rank.number):
            others = ", ".join(rank.name_of(other) for other, _ in awaited[rank.number].most_common(3))
            yield f"{rank.name} waits for {others}."


def _slow_ranks(ranks: Sequence[_Process]) -> Iterator[str]:
    """Names the rank whose own work takes longest, by the same thresholds as for records."""
    if len(ranks) < 2:
        return
    slowest = max(ranks, key=lambda rank: rank.own)
    others = [rank for rank in ranks if rank is not slowest]
    typical = statistics.median(rank.own for rank in others)
    if slowest.own - typical < LEAST_SHARE * slowest.step_seconds:
        yield "All ranks take about as long on their own."
        return
    is_always = slowest.usual > ALWAYS * statistics.median(rank.usual for rank in others)
    when = "in most of its latest steps" if is_always else "now and then: in most of its latest steps it is not"
    yield (
        f"{slowest.name} is the slowest: on its own, a step takes {duration(slowest.own)}, of the others "
        f"{duration(typical)}. It is slow {when}."
    )


def _outcomes(pairs: Sequence[tuple[Mapping, Mapping]]) -> Iterator[str]:
    num_steps = sum(_increase(before, after, "steps") for before, after in pairs)
    for name, text in _OUTCOMES.items():
        count = sum(_increase(before, after, name) for before, after in pairs)
        if count:
            yield f"{count:.0f} {text}, {count / max(1, num_steps):.2g} for each step of a rank."

"""`diagnose`: the rules, and their results in plain sentences with numbers."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from hop_tf.records.events import Kind, process_name
from hop_tf.records.log import JobLog, join_restarts
from hop_tf.tools.diagnosis.blame import find_blame
from hop_tf.tools.diagnosis.calls import kept_settings, tell_call
from hop_tf.tools.diagnosis.links import Link, measure_links
from hop_tf.tools.diagnosis.steps import PARTS, Steps, steps_of
from hop_tf.tools.diagnosis.what_if import LEAST_GAIN, OF_LINKS, Change, WhatIf
from hop_tf.tools.timing import lock_step_seconds

# Steps of one rank differ by some 10 % (standard deviation). That is normal, and all thresholds lie above it. Means and
# medians of 60 such steps are off by 1 or 2 %.
#
# A loss below this share of a step is no reason to change anything.
LEAST_SHARE = LEAST_GAIN
# A rank is slow in every step if its median is this many times that of the others. Otherwise it is slow now and then.
ALWAYS = 1.15
# A step is slow if it takes this many times as long as steps of the others. By chance, one in 40,000 does.
SLOW_STEP = 1.5
# A link is slow if its rate, or round trip, is this many times worse than that of good ones. Flows that share a network
# differ by less.
_SLOW_LINK = 3.0
# A message over a long link may take this many times the sum of TCP's slow start and the message's usual time.
_SPARE = 1.5
# Shorter round trips measure threads, not a link.
_LEAST_ROUND_TRIP_SECONDS = 2e-3
# The two kinds of waiting: for the work of others, and for messages that others had already sent (communication that is
# not hidden).
FOR_OTHERS, ON_ITS_WAY = "waiting for others", "waiting for data in flight"
# The maximum number of findings, because users would not try more changes at once.
_MOST_FINDINGS = 2
# The most ranks without records that are named.
_MOST_NAMED = 8
_ADVICE = {
    "compute": "Give that rank less to compute (`batch_shares`) or a faster machine, or take a strategy that waits for "
    "no single rank: HopStrategy with `num_backup_workers` or `skip`, asynchronous CanaryStrategy, or "
    "SHATParameterServerStrategy.",
    "compute now and then": "Look for what else runs on that machine, or take a strategy that waits for no single "
    "rank: HopStrategy with `num_backup_workers` or `max_staleness`, asynchronous CanaryStrategy, or "
    "SHATParameterServerStrategy.",
    "input": "Speed its input pipeline up: `prefetch`, `cache`, `num_parallel_calls` of `map`, or a faster disk.",
    "callbacks": "Make its callbacks cheaper, or call them more rarely.",
    "validation": "Validate on fewer batches, or more rarely: `validation_steps`, `validation_freq`, on all ranks.",
    "other": "Look at its timeline for what it does between steps.",
}


@dataclasses.dataclass(frozen=True)
class Finding:
    """A cause of lost time.

    Attributes:
      kind: "compute", "input", "callbacks", "validation" or "other", of a rank; "bandwidth" or "latency" of a link; or
        "communication", of all links alike.
      where: The rank or link, as "rank 3", "rank 0 - rank 2", "all links of rank 3" or "all ranks".
      is_always: True if the cause is present in every step. False: now and then.
      share: The share of all ranks' time that it costs.
      step_seconds: The time of a step if the rank or link were like the others; nan if not known.
      text: A sentence that states the cause, and one with advice.
    """

    kind: str
    where: str
    is_always: bool
    share: float
    step_seconds: float
    text: str


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """The diagnosis of a job.

    Attributes:
      step_seconds: The time of a step, the mean over steps and ranks.
      findings: The causes of lost time, the worst first. Empty if there is nothing to gain on the ranks that have
        records.
      changes: The one or two changes that are expected to help most, the best first. Empty if no change helps, or the
        job cannot be simulated.
      facts: Sentences about where the time went, one or two in a line.
      conclusions: Sentences about causes of lost time and changes that would help, one or two in a line.
      shares: The shares of a rank's time, by name of the rank and name of the part.
    """

    step_seconds: float
    findings: Sequence[Finding]
    changes: Sequence[Change]
    facts: Sequence[str]
    conclusions: Sequence[str]
    shares: Mapping[str, Mapping[str, float]]

    @property
    def lines(self) -> list[str]:
        """All sentences: facts, then conclusions."""
        return [*self.facts, *self.conclusions]


def diagnose(job: JobLog) -> Diagnosis:
    """Diagnoses a job from its records. Steps of a rank before and after restarts count together.

    Raises:
      ValueError: If too few steps are recorded.
    """
    job = join_restarts(job)
    steps = {index: steps_of(process) for index, process in enumerate(job.processes) if not process.is_server}
    steps = {index: each for index, each in steps.items() if len(each.begin)}
    if not steps:
        raise ValueError(
            "too few steps are recorded: `fit` must make several, and not with `run_eagerly` or op determinism. "
            f"Received: records of {', '.join(process.name for process in job.processes)}."
        )
    return _Job(job, steps).diagnosis()


class _Job:
    """The analysis of a job that has recorded steps."""

    def __init__(self, job: JobLog, steps: Mapping[int, Steps]):
        self._job = job
        self._steps = steps
        self._blame = find_blame(job, steps)
        self._links = measure_links(job)
        self._seconds = {index: float(np.mean(each.seconds)) for index, each in steps.items()}
        self._step_seconds = float(np.mean([np.sum(each.seconds) / np.sum(each.advance) for each in steps.values()]))

    @functools.cached_property
    def _what_if(self) -> WhatIf:
        return WhatIf(self._job, self._steps, self._links, self._step_seconds)

    def diagnosis(self) -> Diagnosis:
        slow_ranks = list(self._slow_ranks())
        findings = [each for each in (*slow_ranks, *self._slow_links()) if each.share >= LEAST_SHARE]
        findings.sort(key=lambda each: -each.share)
        if not findings:
            findings = [each for each in self._communication() if each.share >= 2 * LEAST_SHARE]
        findings = findings[:_MOST_FINDINGS]
        changes = self._what_if.changes([(each.kind, each.is_always) for each in findings])
        tolerated = [each.text for each in slow_ranks if each.share == 0.0]
        facts = [*self._summary(), *tolerated, *self._link_lines(), *self._outcome_lines()]
        if findings:
            helps = [self._tell_change(each) for each in changes] or self._without_simulation(findings)
            conclusions = [*(each.text for each in findings), *helps]
        else:
            conclusions = [self._nothing_found(bool(tolerated))]
        shares = {self._name(index): self._shares(index) for index in self._steps}
        return Diagnosis(self._step_seconds, findings, changes, facts, conclusions, shares)

    def _nothing_found(self, is_uneven: bool) -> str:
        computing = np.mean([np.sum(each.compute) / np.sum(each.seconds) for each in self._steps.values()])
        told = f"{computing:.0%} of a step is computing"
        if self._missing():
            return f"On the ranks whose steps are recorded, nothing is found: {told}."
        return f"There is nothing to gain: {told}{'' if is_uneven else ', alike on all ranks'}."

    def _missing(self) -> list[str]:
        """The ranks of the job without records, or with too few recorded steps."""
        num_ranks = int(self._job.processes[0].about["num_ranks"])
        known = {self._job.processes[index].number for index in self._steps}
        return [process_name(number, num_ranks) for number in range(num_ranks) if number not in known]

    # Shares of time.

    def _summary(self) -> Iterator[str]:
        yield f"A step takes {duration(self._step_seconds)}, the mean of {self._num_steps()} recorded steps."
        if missing := self._missing():
            more = f" and {len(missing) - _MOST_NAMED} others" if len(missing) > _MOST_NAMED else ""
            yield (
                f"No steps, or too few, are recorded of {', '.join(missing[:_MOST_NAMED])}{more}: whether others wait "
                "for them is not known. Copy the folders of all ranks into one directory."
            )
        for index, each in self._steps.items():
            shares = self._shares(index)
            waited = shares.pop(FOR_OTHERS) + shares.pop(ON_ITS_WAY)
            told = [
                f"{share:.0%} {text}" for text, share in shares.items() if text == PARTS["compute"] or share >= 0.01
            ]
            hidden = max(float(np.sum(each.exchange - each.result) / np.sum(each.seconds)), 0.0)
            yield (
                f"{self._name(index)}: {', '.join(told)}, {waited:.0%} waiting for others"
                f"{self._for_what(index, waited)}. Communication hides behind {min(hidden, 1.0):.0%} of the step."
            )

    def _shares(self, index: int) -> dict[str, float]:
        """The shares of a rank's time: the parts of its own work, and the two kinds of waiting."""
        steps = self._steps[index]
        total = float(np.sum(steps.seconds))
        waited = float(np.sum(steps.result)) / total
        on_its_way = min(waited, self._on_its_way(index))
        parts = {text: float(np.sum(steps.part(name))) / total for name, text in PARTS.items()}
        return {**parts, FOR_OTHERS: waited - on_its_way, ON_ITS_WAY: on_its_way}

    def _on_its_way(self, index: int) -> float:
        blame = self._blame[index]
        return sum(blame.links.values()) / blame.num_steps / self._seconds[index]

    def _for_what(self, index: int, waited: float) -> str:
        """Names the process that a rank waits for most, and the rank's wait for messages in flight (not hidden)."""
        blame, seconds = self._blame[index], self._seconds[index]
        shares = {cause: each / blame.num_steps / seconds for cause, each in blame.own.items() if cause != index}
        on_its_way = self._on_its_way(index)
        told = []
        if shares and max(shares.values()) >= 0.01:
            worst = max(shares, key=shares.get)
            told.append(f"{shares[worst]:.0%} for {self._name(worst)}")
        if on_its_way >= 0.01:
            told.append(f"{on_its_way:.0%} for data in flight")
        return f" ({', '.join(told)})" if told and waited >= 0.01 else ""

    def _link_lines(self) -> Iterator[str]:
        if (slowest := self._slowest(lambda link: 1 / link.bytes_per_second)) is not None:
            yield f"The slowest link is {self._way(slowest)}, {rate(slowest.bytes_per_second)}."
        if (longest := self._slowest(lambda link: link.round_trip_seconds)) is not None:
            yield f"The longest round trip is {self._way(longest)}, {duration(longest.round_trip_seconds)}."

    def _slowest(self, badness) -> Link | None:
        known = [link for link in self._links.values() if not math.isnan(badness(link))]
        return max(known, key=badness, default=None)

    def _outcome_lines(self) -> Iterator[str]:
        counts: collections.Counter[str] = collections.Counter()
        num_sent = 0
        for index in self._steps:
            process = self._job.processes[index]
            num_sent += np.count_nonzero(process.of_kind(Kind.SEND)["lane"])  # Lane 0 carries no arrays.
            for event in process.of_kind(Kind.OUTCOME):
                counts[process.text(event)] += int(event["number"])
        if counts["skipped"]:
            share = counts["skipped"] / (counts["skipped"] + self._num_steps())
            yield f"{counts['skipped']} steps were skipped, {share:.0%} of all."
        for name, what in (("late", "came too late"), ("dropped", "were dropped"), ("retried", "were sent again")):
            if counts[name]:
                share = counts[name] / max(1, num_sent + (counts[name] if name == "dropped" else 0))
                yield f"{counts[name]} updates {what}: {share:.1%} of those that were to be sent."

    # Causes of lost time.

    def _slow_ranks(self) -> Iterator[Finding]:
        own = {index: float(np.mean(each.own)) for index, each in self._steps.items()}
        for index, seconds in own.items():
            others = [each for other, each in own.items() if other != index]
            if not others:
                return
            typical = float(np.median(others))
            excess = (seconds - typical) / self._step_seconds
            if excess >= LEAST_SHARE:
                yield self._slow_rank(index, seconds, typical, excess)

    def _slow_rank(self, index: int, seconds: float, typical: float, share: float) -> Finding:
        steps, others = self._steps[index], [each for other, each in self._steps.items() if other != index]
        excesses = {
            name: float(np.mean(steps.part(name)) - np.median([np.mean(other.part(name)) for other in others]))
            for name in PARTS
        }
        kind = max(excesses, key=excesses.get)
        usual = float(np.median(np.concatenate([other.own for other in others])))
        is_always = float(np.median(steps.own)) > ALWAYS * usual
        slow = steps.own > SLOW_STEP * usual
        if is_always:
            times = (
                f"takes {seconds / typical:.1f} times as long as the others for its own part of a step, in every step"
            )
        else:
            longer = float(np.mean(steps.own[slow])) / usual if slow.any() else 1.0
            times = f"is slow now and then: in {np.mean(slow):.0%} of its steps it takes {longer:.1f} times as long"
        name, expected = self._name(index), self._without_slowness(index)
        if expected > (1 - LEAST_SHARE) * (self._what_if.present if self._what_if.is_trusted else self._step_seconds):
            text = f"{name} {times}. Without that, a step would hardly be shorter."
            return Finding(kind, name, is_always, 0.0, expected, text)
        gain = "" if math.isnan(expected) else f" As fast as the others, a step would take {duration(expected)}."
        cause = f"The cause is {PARTS[kind]}, {duration(excesses[kind])} more in the mean."
        advice = _ADVICE[kind if is_always or kind != "compute" else "compute now and then"]
        text = f"{name} {times}. {cause}{gain} {advice}"
        return Finding(kind, name, is_always, share, expected, text)

    def _without_slowness(self, index: int) -> float:
        """The time of a step if a rank were like the others; nan if unknown.

        Without a trusted simulation, all ranks are assumed to wait for each other.
        """
        if self._what_if.is_trusted:
            return self._what_if.like_others(index)
        common = _common(self._steps)
        if common is None:
            return math.nan
        own, result = common
        place = list(self._steps).index(index)
        others = np.delete(own, place, axis=0)
        # In each step, the rank gets the time of one of the others, each in turn.
        own[place] = others[np.arange(others.shape[1]) % len(others), np.arange(others.shape[1])]
        # The schedule counts only the second half of its steps, so all steps are passed twice.
        return lock_step_seconds(np.tile(own, 2), latency_seconds=float(np.mean(result.min(axis=0))))

    def _slow_links(self) -> Iterator[Finding]:
        # The usual values are those of most links. If all links of a rank are slow, the usual values are those of links
        # between the other ranks.
        usual = _quantile([each.bytes_per_second for each in self._links.values()], 75, "higher")
        round_trip = _quantile([each.round_trip_seconds for each in self._links.values()], 25, "lower")
        least = max(_SLOW_LINK * round_trip, _LEAST_ROUND_TRIP_SECONDS)
        long = [each for each in self._links.values() if each.round_trip_seconds > least]
        narrow = [each for each in self._links.values() if each.bytes_per_second * _SLOW_LINK < usual]
        # A connection over a long link is slow at first. This is not a lack of bandwidth.
        narrow = [
            each
            for each in narrow
            if each not in long or each.message_seconds > _SPARE * (each.start_seconds + each.message_bytes / usual)
        ]
        long = [each for each in long if each not in narrow]
        for links in self._by_process(narrow):
            slowest = min(each.bytes_per_second for each in links)
            what = f"{rate(slowest)} go over {self._ways(links)}, over the others {rate(usual)}."
            advice = "Send less over it: a codec, such as `codec='int8'`, or a topology that leaves it out."
            yield self._slow_link("bandwidth", links, what, usual / slowest, advice, bytes_per_second=usual)
        for links in self._by_process(long):
            longest = max(each.round_trip_seconds for each in links)
            what = (
                f"A round trip of {self._ways(links)} takes {duration(longest)}, of the others {duration(round_trip)}."
            )
            advice = "Wait less often for it: DTSStrategy, a wider pipeline of PipeSGDStrategy, or HopStrategy."
            yield self._slow_link("latency", links, what, longest / round_trip, advice, round_trip_seconds=round_trip)

    def _by_process(self, slow: Sequence[Link]) -> Iterator[Sequence[Link]]:
        """Groups slow links: all links of a process if all are slow, because of its machine, or single links."""
        left = list(slow)
        for index in range(len(self._job.processes)):
            of_process = [link for ends, link in self._links.items() if index in ends]
            if len(of_process) > 1 and all(link in left for link in of_process):
                left = [link for link in left if link not in of_process]
                yield of_process
        yield from ([link] for link in left)

    def _slow_link(
        self, kind: str, links: Sequence[Link], what: str, factor: float, advice: str, **others: float
    ) -> Finding:
        # Other ranks wait for the ranks at the link's ends, which begin their steps later. So the cost is the wait of
        # the rank that waits for the link most.
        share = max(sum(self._share_of_link(each.ends, index) for each in links) for index in self._blame)
        expected = self._what_if.with_links(links, **others) if share >= LEAST_SHARE else math.nan
        at_most = ""
        if math.isnan(expected):
            at_most = " or less"
            expected = self._step_seconds * (1 - share * (1 - 1 / factor))
        text = (
            f"{what} Ranks wait {share:.0%} of a step for data in flight there. Like the others, a step would take "
            f"{duration(expected)}{at_most}. {advice}"
        )
        return Finding(kind, self._ways(links), True, share, expected, text)

    def _ways(self, links: Sequence[Link]) -> str:
        if len(links) == 1:
            return self._way(links[0])
        (common,) = set.intersection(*(set(each.ends) for each in links))
        return f"all links of {self._name(common)}"

    def _communication(self) -> Iterator[Finding]:
        """The finding for messages in flight, if all links are alike."""
        shares = [sum(self._share_of_link(ends, index) for ends in self._links) for index in self._blame]
        share = float(np.mean(shares))
        text = (
            f"Ranks wait {share:.0%} of a step for data in flight, on all links alike. Send less, as with "
            "`codec='int8'`, or hide it: a wider pipeline of PipeSGDStrategy, or DTSStrategy. `hop_tf plan` measures "
            "the links and predicts the step of each setting."
        )
        yield Finding("communication", "all ranks", True, share, self._step_seconds * (1 - share), text)

    def _tell_change(self, change: Change) -> str:
        """Describes a change in one sentence."""
        skips = [settings.get("skip") is not None for settings in (self._what_if.settings, change.settings)]
        skipping = "; the slow rank then skips steps" if skips == [False, True] else ""
        return (
            f"By simulation, {change.text} would take {duration(change.step_seconds)} a step, now "
            f"{duration(self._step_seconds)}{skipping}."
        )

    def _without_simulation(self, findings: Sequence[Finding]) -> Iterator[str]:
        """The sentences if no change was found."""
        if self._what_if.problem:
            yield f"What changes would bring is not simulated: {self._what_if.problem}."
        if any(each.kind in OF_LINKS for each in findings):
            yield from self._prediction()

    def _prediction(self) -> Iterator[str]:
        plan = self._what_if.recommend()
        if plan is not None and plan.step_seconds < (1 - LEAST_SHARE) * self._step_seconds:
            settings = {"codec": plan.codec, "pipeline_width": plan.pipeline_width, "algorithm": plan.algorithm}
            what_if, strategy = self._what_if, "PipeSGDStrategy"
            kept = kept_settings(what_if.strategy, what_if.given, strategy) if what_if.given else {}
            call = tell_call(strategy, kept | settings)
            yield (
                f"By the timing model, {call} would take {duration(plan.step_seconds)} a step where encoding costs "
                f"little, now {duration(self._step_seconds)}."
            )

    def _share_of_link(self, ends: tuple[int, int], index: int) -> float:
        blame = self._blame[index]
        return blame.links[ends] / blame.num_steps / self._step_seconds

    def _num_steps(self) -> int:
        return sum(len(each.begin) for each in self._steps.values())

    def _name(self, index: int) -> str:
        return self._job.processes[index].name

    def _way(self, link: Link) -> str:
        return " - ".join(self._name(end) for end in link.ends)


def _common(steps: Mapping[int, Steps]) -> tuple[np.ndarray, np.ndarray] | None:
    """Own and waiting seconds, [ranks, steps], of steps that all ranks have. None if few, or ranks differ in speed."""
    tables = [{tuple(key): place for place, key in enumerate(each.keys.tolist())} for each in steps.values()]
    keys = sorted(set(tables[0]).intersection(*tables[1:]))
    means = [float(np.mean(each.seconds)) for each in steps.values()]
    if len(keys) < 5 or max(means) > 1.1 * min(means):
        return None
    places = [[table[key] for key in keys] for table in tables]
    own = np.stack([each.own[place] for each, place in zip(steps.values(), places, strict=True)])
    result = np.stack([each.result[place] for each, place in zip(steps.values(), places, strict=True)])
    return own, result


def _quantile(values: Sequence[float], percent: float, method: str) -> float:
    known = [value for value in values if not math.isnan(value)]
    return float(np.percentile(known, percent, method=method)) if known else math.nan


def duration(seconds: float) -> str:
    """Formats a duration for people, such as "12.3 ms"."""
    if 0 < seconds < 1e-3:
        return f"{seconds * 1e6:.3g} us"
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def rate(bytes_per_second: float) -> str:
    """Formats a rate for people, such as "940 Mbit/s"."""
    bits = bytes_per_second * 8
    return f"{bits * 1e-9:.3g} Gbit/s" if bits >= 1e9 else f"{bits * 1e-6:.3g} Mbit/s"

"""`diagnose`: the rules, and what they say in plain sentences, each with its number."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from hop_tf.diagnosis.blame import find_blame
from hop_tf.diagnosis.links import Link, measure_links
from hop_tf.diagnosis.predictions import best_plan
from hop_tf.diagnosis.steps import PARTS, Steps, steps_of
from hop_tf.records.events import Kind
from hop_tf.records.log import JobLog

# What costs less than this share of a step is no reason to change anything.
_LEAST_SHARE = 0.05
# A rank is slow in every step if its median is so many times that of the others; else it is now and then.
_ALWAYS = 1.15
# A step is a slow one if it takes so many times what steps of the others do.
_SLOW_STEP = 1.5
# A link is slow if its rate, or round trip, is so many times worse than those of the others.
_SLOW_LINK = 3.0
# What a message may take longer than connections need to become fast.
_SPARE = 1.5
# Shorter round trips are those of threads, not of a link.
_LEAST_ROUND_TRIP_SECONDS = 2e-3
_ADVICE = {
    "compute": "Give that rank less to compute (`batch_shares`) or a faster machine, or take a strategy that waits for "
    "no single rank: HopStrategy with `num_backup_workers` or `skip`, asynchronous CanaryStrategy, or "
    "SHATParameterServerStrategy.",
    "input": "Speed its input pipeline up: `prefetch`, `cache`, `num_parallel_calls` of `map`, or a faster disk.",
    "callbacks": "Make its callbacks cheaper, or call them more rarely.",
    "validation": "Validate on fewer batches, or more rarely: `validation_steps`, `validation_freq`, on all ranks.",
    "other": "Look at its timeline for what it does between steps.",
}


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something that costs time.

    Attributes:
      kind: "compute", "input", "callbacks", "validation" or "other", of a rank; "bandwidth" or "latency" of a link; or
        "communication", of all links alike.
      where: The rank or link, as "rank 3", "rank 0 - rank 2", "all links of rank 3" or "all ranks".
      is_always: Whether in every step; False: now and then.
      share: The share of all ranks' time that it costs.
      step_seconds: How long a step would take if that were as it is elsewhere; nan where that is not known.
      text: A sentence that says so, and one that says what to do.
    """

    kind: str
    where: str
    is_always: bool
    share: float
    step_seconds: float
    text: str


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """What the records of a job say.

    Attributes:
      step_seconds: How long a step takes, the mean over steps and ranks.
      findings: What costs time, the worst first. Empty: there is nothing to gain.
      lines: All that there is to say, a sentence or two in a line.
    """

    step_seconds: float
    findings: Sequence[Finding]
    lines: Sequence[str]


def diagnose(job: JobLog) -> Diagnosis:
    """Says where the time of a job went.

    Raises:
      ValueError: If too few steps are recorded.
    """
    steps = {index: steps_of(process) for index, process in enumerate(job.processes) if not process.is_server}
    steps = {index: each for index, each in steps.items() if len(each.begin)}
    if not steps:
        raise ValueError(
            "too few steps are recorded: `fit` must make several, and not with `run_eagerly`. "
            f"Received: records of {', '.join(process.name for process in job.processes)}."
        )
    return _Job(job, steps).diagnosis()


class _Job:
    """The numbers of a job that has steps."""

    def __init__(self, job: JobLog, steps: Mapping[int, Steps]):
        self._job = job
        self._steps = steps
        self._blame = find_blame(job, steps)
        self._links = measure_links(job)
        self._seconds = {index: float(np.mean(each.seconds)) for index, each in steps.items()}
        self._step_seconds = float(np.mean(list(self._seconds.values())))

    def diagnosis(self) -> Diagnosis:
        findings = [each for each in (*self._slow_ranks(), *self._slow_links()) if each.share >= _LEAST_SHARE]
        findings.sort(key=lambda each: -each.share)
        if not findings:
            findings = [each for each in self._communication() if each.share >= 2 * _LEAST_SHARE]
        lines = [*self._summary(), *self._link_lines(), *self._outcome_lines()]
        if findings:
            lines += [each.text for each in findings[:2]]
            if any(each.kind in ("bandwidth", "latency", "communication") for each in findings[:2]):
                lines += self._prediction()
        else:
            computing = np.mean([np.sum(each.compute) / np.sum(each.seconds) for each in self._steps.values()])
            lines.append(f"There is nothing to gain: {computing:.0%} of a step is computing, alike on all ranks.")
        return Diagnosis(self._step_seconds, findings[:2], lines)

    # Where the time went.

    def _summary(self) -> Iterator[str]:
        yield f"A step takes {_duration(self._step_seconds)}, the mean of {self._num_steps()} recorded steps."
        for index, each in self._steps.items():
            total = float(np.sum(each.seconds))
            parts = {text: float(np.sum(each.part(name))) / total for name, text in PARTS.items()}
            told = [f"{share:.0%} {text}" for text, share in parts.items() if text == PARTS["compute"] or share >= 0.01]
            waited = float(np.sum(each.result)) / total
            hidden = max(float(np.sum(each.exchange - each.result)), 0.0) / total
            yield (
                f"{self._name(index)}: {', '.join(told)}, {waited:.0%} waiting for others"
                f"{self._for_whom(index, waited)}. Communication hides behind {min(hidden, 1.0):.0%} of the step."
            )

    def _for_whom(self, index: int, waited: float) -> str:
        blame = self._blame[index]
        others = {cause: seconds for cause, seconds in blame.own.items() if cause != index}
        if waited < 0.01 or not others:
            return ""
        worst = max(others, key=others.get)
        share = others[worst] / blame.num_steps / self._seconds[index]
        return f" ({share:.0%} for {self._name(worst)})" if share >= 0.01 else ""

    def _link_lines(self) -> Iterator[str]:
        if (slowest := self._slowest(lambda link: 1 / link.bytes_per_second)) is not None:
            yield f"The slowest link is {self._way(slowest)}, {slowest.bytes_per_second * 8e-6:.3g} Mbit/s."
        if (longest := self._slowest(lambda link: link.round_trip_seconds)) is not None:
            yield f"The longest round trip is {self._way(longest)}, {_duration(longest.round_trip_seconds)}."

    def _slowest(self, badness) -> Link | None:
        known = [link for link in self._links.values() if not math.isnan(badness(link))]
        return max(known, key=badness, default=None)

    def _outcome_lines(self) -> Iterator[str]:
        counts: dict[str, int] = {}
        for index in self._steps:
            process = self._job.processes[index]
            for event in process.of_kind(Kind.OUTCOME):
                counts[process.text(event)] = counts.get(process.text(event), 0) + int(event["number"])
        num_steps = self._num_steps()
        for name in ("late", "dropped", "skipped", "retried"):
            if counts.get(name):
                what = "steps were" if name == "skipped" else "updates were"
                yield f"{counts[name]} {what} {name}: {counts[name] / num_steps:.2g} for each recorded step of a rank."

    # What costs time.

    def _slow_ranks(self) -> Iterator[Finding]:
        own = {index: float(np.mean(each.own)) for index, each in self._steps.items()}
        for index, seconds in own.items():
            others = [each for other, each in own.items() if other != index]
            if not others:
                return
            typical = float(np.median(others))
            excess = seconds - typical
            if excess > 0:
                yield self._slow_rank(index, seconds, typical, excess / self._step_seconds)

    def _slow_rank(self, index: int, seconds: float, typical: float, share: float) -> Finding:
        steps, others = self._steps[index], [each for other, each in self._steps.items() if other != index]
        excesses = {
            name: float(np.mean(steps.part(name)) - np.median([np.mean(other.part(name)) for other in others]))
            for name in PARTS
        }
        kind = max(excesses, key=excesses.get)
        usual = float(np.median(np.concatenate([other.own for other in others])))
        is_always = float(np.median(steps.own)) > _ALWAYS * usual
        slow = steps.own > _SLOW_STEP * usual
        if is_always:
            times = (
                f"takes {seconds / typical:.1f} times as long as the others for its own part of a step, in every step"
            )
        else:
            longer = float(np.mean(steps.own[slow])) / usual if slow.any() else 1.0
            times = f"is slow now and then: in {np.mean(slow):.0%} of its steps it takes {longer:.1f} times as long"
        expected = self._without_slowness(index)
        gain = "" if math.isnan(expected) else f" As fast as the others, a step would take {_duration(expected)}."
        name = self._name(index)
        cause = f"The cause is {PARTS[kind]}, {_duration(excesses[kind])} more in the mean."
        text = f"{name} {times}. {cause}{gain} {_ADVICE[kind]}"
        return Finding(kind, name, is_always, share, expected, text)

    def _without_slowness(self, index: int) -> float:
        """A step if a rank were like the others: where all wait for each other, the slowest one decides.

        mean over steps k of  max over ranks r of own(r, k)  +  mean of  min over r of result(r, k)
        """
        common = _common(self._steps)
        if common is None:
            return math.nan
        own, result = common
        place = list(self._steps).index(index)
        others = np.delete(own, place, axis=0)
        # Like the others: what one of them, taken in turn, has done in that step.
        like = others[np.arange(others.shape[1]) % len(others), np.arange(others.shape[1])]
        slowest = np.maximum(others.max(axis=0), like)
        return float(np.mean(slowest) + np.mean(result.min(axis=0)))

    def _slow_links(self) -> Iterator[Finding]:
        # What most links, or those between others where all of a rank are slow, are like.
        rate = _quantile([each.bytes_per_second for each in self._links.values()], 75, "higher")
        round_trip = _quantile([each.round_trip_seconds for each in self._links.values()], 25, "lower")
        least = max(_SLOW_LINK * round_trip, _LEAST_ROUND_TRIP_SECONDS)
        long = [each for each in self._links.values() if each.round_trip_seconds > least]
        narrow = [each for each in self._links.values() if each.bytes_per_second * _SLOW_LINK < rate]
        # Over a long link, connections take their time until they are fast: that is no want of bandwidth.
        narrow = [
            each
            for each in narrow
            if each not in long or each.message_seconds > _SPARE * (each.start_seconds + each.message_bytes / rate)
        ]
        long = [each for each in long if each not in narrow]
        for links in self._by_process(narrow):
            slowest = min(each.bytes_per_second for each in links)
            what = f"{slowest * 8e-6:.3g} Mbit/s go over {self._ways(links)}, over the others {rate * 8e-6:.3g}."
            advice = "Send less over it: a codec, such as `codec='int8'`, or a topology that leaves it out."
            yield self._slow_link("bandwidth", links, what, rate / slowest, advice)
        for links in self._by_process(long):
            longest = max(each.round_trip_seconds for each in links)
            usual = _duration(round_trip)
            what = f"A round trip of {self._ways(links)} takes {_duration(longest)}, of the others {usual}."
            advice = "Wait less often for it: DTSStrategy, a wider pipeline of PipeSGDStrategy, or HopStrategy."
            yield self._slow_link("latency", links, what, longest / round_trip, advice)

    def _by_process(self, slow: Sequence[Link]) -> Iterator[Sequence[Link]]:
        """Slow links by their cause: all of a process together, whose machine may have one, and others one by one."""
        left = list(slow)
        for index in range(len(self._job.processes)):
            of_process = [link for ends, link in self._links.items() if index in ends]
            if len(of_process) > 1 and all(link in left for link in of_process):
                left = [link for link in left if link not in of_process]
                yield of_process
        yield from ([link] for link in left)

    def _slow_link(self, kind: str, links: Sequence[Link], what: str, factor: float, advice: str) -> Finding:
        # Others wait for the ranks at its ends, which begin their steps later: it costs what those wait for it.
        share = max(sum(self._share_of_link(each.ends, index) for each in links) for index in self._blame)
        expected = self._step_seconds * (1 - share * (1 - 1 / factor))
        text = (
            f"{what} Ranks wait {share:.0%} of a step for what is on its way there. Like the others, a step would take "
            f"{_duration(expected)} or less. {advice}"
        )
        return Finding(kind, self._ways(links), True, share, expected, text)

    def _ways(self, links: Sequence[Link]) -> str:
        if len(links) == 1:
            return self._way(links[0])
        (common,) = set.intersection(*(set(each.ends) for each in links))
        return f"all links of {self._name(common)}"

    def _communication(self) -> Iterator[Finding]:
        """What is on its way where all links are alike."""
        shares = [sum(self._share_of_link(ends, index) for ends in self._links) for index in self._blame]
        share = float(np.mean(shares))
        text = (
            f"Ranks wait {share:.0%} of a step for what is on its way, on all links alike. Send less, as with "
            "`codec='int8'`, or hide it: a wider pipeline of PipeSGDStrategy, or DTSStrategy. `hop_tf plan` measures "
            "the links and predicts the step of each setting."
        )
        yield Finding("communication", "all ranks", True, share, self._step_seconds * (1 - share), text)

    def _prediction(self) -> Iterator[str]:
        plan = best_plan(self._job, self._steps, self._links)
        if plan is not None and plan.step_seconds < (1 - _LEAST_SHARE) * self._step_seconds:
            settings = f"codec={plan.codec!r}, pipeline_width={plan.pipeline_width}, algorithm={plan.algorithm!r}"
            yield (
                f"By the timing model, PipeSGDStrategy({settings}) would take {_duration(plan.step_seconds)} a step "
                f"where encoding costs little, now {_duration(self._step_seconds)}."
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
    """Own and waiting seconds, [ranks, steps], of the common steps; None where ranks do not keep the same pace."""
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


def _duration(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} us"
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"

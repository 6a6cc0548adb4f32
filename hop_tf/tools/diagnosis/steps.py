"""`Steps`: the durations of the parts of a rank's steps."""

from __future__ import annotations

import dataclasses

import numpy as np

from hop_tf.records.events import NONE, Kind
from hop_tf.records.log import ProcessLog
from hop_tf.records.sampling import is_recorded

# The first steps of a process in a session are left out, because they include tracing of graphs and the ranks' first
# contact.
_FIRST_STEPS = 3
# The parts of a step, and their names for people.
PARTS = {
    "compute": "computing",
    "input": "the input pipeline",
    "callbacks": "callbacks",
    "validation": "validation",
    "other": "the update and other work between steps",
}


@dataclasses.dataclass(frozen=True)
class Steps:
    """The steps of a rank, each from its begin to the begin of the next step. Each array has one element per step.

        seconds  =  compute + result + validation + callbacks + input + other

    Attributes:
      keys: Session and step; int array [steps, 2].
      begin: The times at which they began.
      seconds: Their durations.
      advance: The number of iterations to the next step: more than 1 if iterations were skipped.
      compute: The time until the gradients were computed.
      result: The time that the step then waited for other ranks.
      input: The time that Keras waited for the next step's batch.
      callbacks: The time between Keras's steps, without validation.
      validation: The time in `evaluate` between Keras's steps.
      other: The rest: the update and, without Keras's loop, everything between steps.
      exchange: The time of the step's communication, hidden or not.
    """

    keys: np.ndarray
    begin: np.ndarray
    seconds: np.ndarray
    advance: np.ndarray
    compute: np.ndarray
    result: np.ndarray
    input: np.ndarray
    callbacks: np.ndarray
    validation: np.ndarray
    other: np.ndarray
    exchange: np.ndarray

    @property
    def own(self) -> np.ndarray:
        """The time of each step without waits for other ranks."""
        return self.seconds - self.result

    def part(self, name: str) -> np.ndarray:
        """The times of one of `PARTS`."""
        return getattr(self, name)


def steps_of(process: ProcessLog) -> Steps:
    """The steps of a rank, except its first ones and those whose next step is not recorded."""
    computed = process.of_kind(Kind.COMPUTE)
    computed = computed[computed["step"] != NONE]
    first, following = computed[:-1], computed[1:]
    begins = _begins(process, computed)
    is_followed = ~begins[1:] & np.array([is_recorded(int(k) + 1) for k in first["step"]], bool)
    first_steps = computed["step"][np.maximum.accumulate(np.where(begins, np.arange(len(computed)), 0))]
    is_warm = (computed["step"] - first_steps)[:-1] >= min(_FIRST_STEPS, len(computed) // 4)
    first, following = first[is_followed & is_warm], following[is_followed & is_warm]
    seconds = following["begin"] - first["begin"]
    called, ended, is_first = _calls(process, computed)
    place = np.searchsorted(computed["begin"], first["begin"])
    is_gap = is_first[place + 1] if place.size else np.zeros(0, bool)
    gap_begin, gap_end = ended[place], called[place + 1] if place.size else np.zeros(0)
    validation = np.where(is_gap, _overlaps(process.of_kind(Kind.VALIDATION), gap_begin, gap_end), 0.0)
    callbacks = np.where(is_gap, np.maximum(gap_end - gap_begin - validation, 0.0), 0.0)
    waited = np.where(is_gap, following["begin"] - gap_end, 0.0)
    result = _of_steps(process.of_kind(Kind.RESULT), first)
    known = first["seconds"] + result + validation + callbacks + waited
    return Steps(
        keys=np.stack([first["session"], first["step"]], axis=1).astype(np.int64),
        begin=first["begin"],
        seconds=seconds,
        advance=np.maximum(following["step"].astype(np.int64) - first["step"], 1),
        compute=first["seconds"].astype(np.float64),
        result=result,
        input=waited,
        callbacks=callbacks,
        validation=validation,
        other=np.maximum(seconds - known, 0.0),
        exchange=_of_steps(process.of_kind(Kind.EXCHANGE), first),
    )


def _begins(process: ProcessLog, computed: np.ndarray) -> np.ndarray:
    """True for each step that is the first one of a session, or of a process that was started again."""
    starts = np.searchsorted(process.starts, computed["begin"], side="right")
    return (np.diff(computed["session"], prepend=-1) != 0) | (np.diff(starts, prepend=-1) != 0)


def _calls(process: ProcessLog, computed: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The begin and end of the Keras call that each step was in, and True if the step was the call's first one."""
    calls = process.of_kind(Kind.STEP)
    if not calls.size:
        return computed["begin"], computed["begin"], np.zeros(len(computed), bool)
    place = np.searchsorted(calls["begin"], computed["begin"], side="right") - 1
    ends = calls["begin"] + calls["seconds"]
    is_within = (place >= 0) & (computed["begin"] <= ends[place])
    is_first = is_within & (np.diff(place, prepend=-1) > 0)
    return calls["begin"][place], ends[place], is_first


def _of_steps(events: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """The seconds of events, summed up for each step."""
    sums: dict[tuple[int, int], float] = {}
    for session, step, seconds in zip(events["session"], events["step"], events["seconds"], strict=True):
        sums[session, step] = sums.get((session, step), 0.0) + float(seconds)
    return np.array([sums.get((s, k), 0.0) for s, k in zip(steps["session"], steps["step"], strict=True)], np.float64)


def _overlaps(events: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """The part of each interval that events cover, in seconds."""
    total = np.zeros(len(begins))
    for event in events:
        begin, end = event["begin"], event["begin"] + event["seconds"]
        total += np.clip(np.minimum(ends, end) - np.maximum(begins, begin), 0.0, None)
    return total

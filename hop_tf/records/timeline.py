"""Writes a job's records as a trace that Perfetto and chrome://tracing open.

Each process of the job is a process of the trace, with a group of tracks for each `_Track`. An arrow leads from the
sending of a message to its arrival. Times are microseconds since the first event.

Reference: "Trace Event Format", Google, 2016 (complete events "X", flows "s" and "f", counters "C", metadata "M").
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterator

import numpy as np

from hop_tf.records.events import NONE, Kind, process_name
from hop_tf.records.log import JobLog, ProcessLog

# The key of a message's slice: process, kind, peer, lane, number and begin.
_Key = tuple[int, Kind, int, int, int, float]
# Shorter events cannot be seen, and cannot have an arrow.
_LEAST_MICROSECONDS = 1.0
# Limit on the tracks of a group (overlapping events need several), and the distance between the tracks of one lane.
_MAX_TRACKS, _MAX_LANES = 1024, 16


class _Track(enum.IntEnum):
    """The groups of tracks, from top to bottom."""

    STEPS = 1
    COMPUTE = 2
    WAITING = 3
    COMMUNICATION = 4
    SENDING = 5
    RECEIVING = 6


_TRACKS = {
    Kind.STEP: _Track.STEPS,
    Kind.VALIDATION: _Track.STEPS,
    Kind.COMPUTE: _Track.COMPUTE,
    Kind.RESULT: _Track.COMPUTE,
    Kind.WAIT: _Track.WAITING,
    Kind.EXCHANGE: _Track.COMMUNICATION,
    Kind.ENCODE: _Track.COMMUNICATION,
    Kind.SEND: _Track.SENDING,
    Kind.RECEIVE: _Track.RECEIVING,
}
_OF_LANES = (_Track.SENDING, _Track.RECEIVING)
_INSTANTS = (Kind.SESSION, Kind.LOSS, Kind.LEAVE, Kind.JOIN)
# The counters of a report that are drawn as curves.
_COUNTERS = ("steps", "wait_seconds", "bytes_sent", "bytes_received")


def to_trace(job: JobLog) -> dict[str, object]:
    """The trace of a job, in a form for JSON."""
    starts = [float(process.events["begin"][0]) for process in job.processes if process.events.size]
    starts += [float(line["time"]) for process in job.processes for line in process.lines if "time" in line]
    origin = min(starts, default=0.0)
    slices: dict[_Key, dict] = {}
    events = [event for index in range(len(job.processes)) for event in _events_of(job, index, origin, slices)]
    events += _arrows(job, slices)
    metadata = [event for index, process in enumerate(job.processes) for event in _metadata(index, process)]
    events.sort(key=lambda event: (event["ts"], -event.get("dur", 0.0)))
    tracks = sorted({(event["pid"], event["tid"]) for event in events if "tid" in event})
    names = [_track_name(pid, tid) for pid, tid in tracks]
    errors = {process.name: process.clock_error_seconds for process in job.processes}
    return {
        "traceEvents": [*metadata, *itertools.chain.from_iterable(names), *events],
        "displayTimeUnit": "ms",
        "otherData": {
            "begin": origin,
            "messages with both ends": len(job.transfers),
            "messages with one end": job.num_unmatched,
            "clock error in seconds": {
                name: error if np.isfinite(error) else "unknown" for name, error in errors.items()
            },
        },
    }


def _microseconds(seconds: float) -> float:
    """Microseconds, rounded to nanoseconds. If Perfetto had to round the times, events might overlap afterwards."""
    return round(seconds * 1e6, 3)


def _metadata(index: int, process: ProcessLog) -> Iterator[dict]:
    name = f"{process.name} on {process.about.get('host', '?')}"
    yield {"ph": "M", "pid": index, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "pid": index, "name": "process_sort_index", "args": {"sort_index": index}}


def _track_name(pid: int, tid: int) -> list[dict]:
    group, place = divmod(tid, _MAX_TRACKS)
    name = _Track(group).name.lower()
    if group in _OF_LANES:
        name += f", lane {place % _MAX_LANES}"
    return [
        {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": name}},
        {"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}},
    ]


def _events_of(job: JobLog, index: int, origin: float, slices: dict[_Key, dict]) -> Iterator[dict]:
    """The events of a process. Events of messages are also put into `slices`."""
    process = job.processes[index]
    placed = _Tracks()
    order = np.lexsort((-process.events["seconds"], process.events["begin"]))  # Enclosing events come first.
    for event in process.events[order]:
        kind = Kind(int(event["kind"]))
        begin = _microseconds(float(event["begin"]) - origin)
        common = {"pid": index, "ts": begin, "cat": kind.name.lower()}
        if kind in _TRACKS:
            duration = max(_microseconds(float(event["seconds"])), _LEAST_MICROSECONDS)
            tid = placed.find(_TRACKS[kind], begin, round(begin + duration, 3), int(event["lane"]))
            name, arguments = _describe(process, kind, event)
            piece = {"ph": "X", "tid": tid, "dur": duration, "name": name, "args": arguments, **common}
            if kind in (Kind.SEND, Kind.RECEIVE):
                of_message = (int(event[field]) for field in ("peer", "lane", "number"))
                slices[index, kind, *of_message, float(event["begin"])] = piece
            yield piece
        elif kind in _INSTANTS:
            name, arguments = _describe(process, kind, event)
            tid = _Track.STEPS * _MAX_TRACKS
            yield {"ph": "i", "tid": tid, "s": "p", "name": name, "args": arguments, **common}
    yield from _counters(process, index, origin)


def _describe(process: ProcessLog, kind: Kind, event: np.void) -> tuple[str, dict]:
    """The name of an event, and the arguments to show."""
    text, step, peer = process.text(event), int(event["step"]), int(event["peer"])
    arguments: dict[str, object] = {}
    if step != NONE:
        arguments["step"] = step
    if peer != NONE:
        arguments["peer"] = _name_of(process, peer)
    if kind in (Kind.SEND, Kind.RECEIVE):
        arguments |= {"queue": text, "bytes": int(event["num_bytes"]), "lane": int(event["lane"])}
        arguments["number"] = int(event["number"])
        if kind is Kind.SEND:
            arguments["queued ms"] = float(event["queued"]) * 1e3
        return f"{'to' if kind is Kind.SEND else 'from'} {_name_of(process, peer)}", arguments
    if kind is Kind.WAIT:
        return f"{text}: {_name_of(process, peer)}", arguments
    if kind is Kind.EXCHANGE:
        arguments |= {"group": text, "segment": int(np.int32(event["number"]))}
        return f"exchange {step}", arguments
    names = {Kind.STEP: "step", Kind.COMPUTE: f"compute {step}", Kind.RESULT: f"wait for result {step}"}
    return names.get(kind, kind.name.lower()), arguments


def _name_of(process: ProcessLog, number: int) -> str:
    return process_name(number, int(process.about["num_ranks"]))


class _Tracks:
    """Puts the events of a process on tracks. Two events of a track are either disjoint, or one contains the other."""

    def __init__(self):
        # For each track, the ends of the running events, the innermost last.
        self._ends: dict[int, list[float]] = {}

    def find(self, group: _Track, begin: float, end: float, lane: int) -> int:
        """The track of the next event. Call it in the order of begins. Messages of a lane share a track if they can."""
        for place in range(lane, _MAX_TRACKS, _MAX_LANES) if group in _OF_LANES else range(_MAX_TRACKS):
            tid = group * _MAX_TRACKS + place
            ends = self._ends.setdefault(tid, [])
            while ends and ends[-1] <= begin:
                ends.pop()
            if not ends or end <= ends[-1]:
                break
        self._ends[tid].append(end)
        return tid


def _counters(process: ProcessLog, index: int, origin: float) -> Iterator[dict]:
    for line in process.lines:
        if line["kind"] == "report":
            ts = _microseconds(line["time"] - origin)
            for name in (name for name in _COUNTERS if name in line):
                yield {"ph": "C", "pid": index, "ts": ts, "name": name, "args": {name: line[name]}}
    totals: dict[str, int] = {}
    for event in process.of_kind(Kind.OUTCOME):
        name = process.text(event)
        totals[name] = totals.get(name, 0) + int(event["number"])
        ts = _microseconds(float(event["begin"]) - origin)
        yield {"ph": "C", "pid": index, "ts": ts, "name": f"{name} (recorded)", "args": {name: totals[name]}}


def _arrows(job: JobLog, slices: dict[_Key, dict]) -> Iterator[dict]:
    """Both ends of each message's arrow. They lie within the slices of its sending and its arrival."""
    for number, each in enumerate(job.transfers, start=1):
        sender, receiver = job.processes[each.sender].number, job.processes[each.receiver].number
        ends = {
            "s": slices[each.sender, Kind.SEND, receiver, each.lane, each.number, each.sent_at],
            "f": slices[each.receiver, Kind.RECEIVE, sender, each.lane, each.number, each.come_at],
        }
        for phase, piece in ends.items():
            where = {name: piece[name] for name in ("pid", "tid", "ts")}
            binding = {"bp": "e"} if phase == "f" else {}  # Binds to the enclosing slice instead of the next one.
            yield {"ph": phase, "id": number, "name": "message", "cat": "message", **where, **binding}

"""Reads the files of a job: the events of each process, on one clock, and the messages between processes."""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from hop_tf.records.clocks import Clocks, Sample
from hop_tf.records.events import EVENT, FORMAT, Kind, process_name

# A message may seem to have come this long before it was sent, because different threads read the clock.
_LEAST_TOLERANCE_SECONDS = 1e-3


@dataclasses.dataclass(frozen=True)
class ProcessLog:
    """The records of one process.

    Attributes:
      number: Its index in the cluster: first ranks, then parameter servers.
      about: The file's description: `rank`, `num_ranks`, `num_servers`, `strategy`, `host`, `pid` and others.
      events: Rows of `EVENT`, in the order of their begins, on the clock of the job's first process.
      names: For each number in the field `name` of an event, its text.
      lines: The other lines of text, in order. Their `time` is on that clock, too.
      clock_error_seconds: The largest possible error of the times.
      starts: The time of its start, on that clock; after `join_restarts`, the start times of all joined processes.
      num_restarts: Number of earlier restarts of the rank, or server.
    """

    number: int
    about: Mapping[str, object]
    events: np.ndarray
    names: Mapping[int, str]
    lines: Sequence[Mapping]
    clock_error_seconds: float
    starts: Sequence[float]
    num_restarts: int

    @property
    def is_server(self) -> bool:
        """True for a parameter server."""
        return self.number >= int(self.about["num_ranks"])

    @property
    def name(self) -> str:
        """The process's readable name."""
        times = {0: "", 1: " (restarted)"}.get(self.num_restarts, f" (restarted {self.num_restarts} times)")
        return process_name(self.number, int(self.about["num_ranks"])) + times

    def of_kind(self, kind: Kind) -> np.ndarray:
        """The events of a kind."""
        return self.events[self.events["kind"] == kind]

    def text(self, event: np.void) -> str:
        """The name in an event."""
        return self.names.get(int(event["name"]), "")


@dataclasses.dataclass(frozen=True)
class Transfer:
    """A message that was sent and has arrived. Times are in seconds on the clock of the job's first process.

    Attributes:
      sender: The sender's index in `JobLog.processes`.
      receiver: The receiver's index there.
      lane: The lane.
      number: Number of the message on its lane.
      queue: Name of its queue, without numbers.
      num_bytes: Bytes of header and payload.
      session: The sender's session.
      step: The sender's step; NONE if it makes no steps.
      put_at: Time when the transport got the message.
      sent_at: Time when its connection began to send it.
      come_at: Time when it had arrived completely.
    """

    sender: int
    receiver: int
    lane: int
    number: int
    queue: str
    num_bytes: int
    session: int
    step: int
    put_at: float
    sent_at: float
    come_at: float


@dataclasses.dataclass(frozen=True)
class JobLog:
    """The records of all processes of a job.

    Attributes:
      processes: The processes that have left files, in the order of their numbers. A restarted rank is listed several
        times.
      transfers: The messages with records of both ends, in the order in which they arrived.
      num_unmatched: Number of messages with a record of one end only: the files ended before the message arrived, or a
        process died.
    """

    processes: Sequence[ProcessLog]
    transfers: Sequence[Transfer]
    num_unmatched: int

    @property
    def ranks(self) -> list[ProcessLog]:
        """The processes that train."""
        return [process for process in self.processes if not process.is_server]


def read_job(log_dir: str | os.PathLike) -> JobLog:
    """Reads the records of a job.

    Args:
      log_dir: `CommunicationOptions.log_dir` of the job. If several jobs have used it, the last job is read.

    Raises:
      ValueError: If there are no records.
    """
    paths = sorted(pathlib.Path(log_dir).glob("*/events.*.jsonl"))
    raw = [each for each in map(_read_process, paths) if each is not None]
    if not raw:
        raise ValueError(
            "`log_dir` must be a directory in which ranks have recorded events, as with "
            f"CommunicationOptions(log_dir=...). Received: {os.fspath(log_dir)!r}, which has no records."
        )
    raw = sorted(_last_job(raw), key=lambda each: (each.number, each.start))
    clocks = Clocks({index: str(each.about["clock"]) for index, each in enumerate(raw)}, dict(_clock_samples(raw)))
    numbers = [each.number for each in raw]
    processes = [each.aligned(clocks, index, numbers[:index].count(each.number)) for index, each in enumerate(raw)]
    return JobLog(processes, *_match(processes))


def join_restarts(job: JobLog) -> JobLog:
    """The same job with one process for each rank and server: records after a restart follow those before it."""
    of_number: dict[int, list[ProcessLog]] = {}
    for process in job.processes:
        of_number.setdefault(process.number, []).append(process)
    places = {number: place for place, number in enumerate(of_number)}
    place_of = [places[process.number] for process in job.processes]
    transfers = [
        dataclasses.replace(each, sender=place_of[each.sender], receiver=place_of[each.receiver])
        for each in job.transfers
    ]
    return JobLog([_joined(processes) for processes in of_number.values()], transfers, job.num_unmatched)


def _joined(processes: Sequence[ProcessLog]) -> ProcessLog:
    """Joins the processes of a rank, given in order."""
    first, last = processes[0], processes[-1]
    if first is last:
        return first
    numbers: dict[str, int] = {}
    lines: dict[object, Mapping] = {}
    events = [process.events.copy() for process in processes]
    for process, of_process in zip(processes, events, strict=True):
        table = np.zeros(1 << 16, np.uint16)
        for number, text in process.names.items():
            table[number] = numbers.setdefault(text, len(numbers))
        of_process["name"] = table[of_process["name"]]
        for line in process.lines:  # A restarted process makes the same groups of variables again.
            lines[line.get("name", "") if line["kind"] == "group" else id(line)] = line
    together = np.concatenate(events)
    return dataclasses.replace(
        last,
        about=first.about,
        events=together[np.argsort(together["begin"], kind="stable")],
        names={number: text for text, number in numbers.items()},
        lines=list(lines.values()),
        clock_error_seconds=max(process.clock_error_seconds for process in processes),
        starts=[start for process in processes for start in process.starts],
    )


@dataclasses.dataclass
class _Raw:
    """The contents of a process's files."""

    about: dict
    lines: list[dict]
    events: np.ndarray

    @property
    def number(self) -> int:
        return int(self.about["number"])

    @property
    def start(self) -> float:
        return float(self.about["time"])

    @property
    def end(self) -> float:
        times = [line["time"] for line in self.lines if "time" in line]
        last = float((self.events["begin"] + self.events["seconds"]).max()) if self.events.size else self.start
        return max([self.start, last, *times])

    def aligned(self, clocks: Clocks, key: int, num_restarts: int) -> ProcessLog:
        events = self.events.copy()
        events["begin"] = clocks.align(key, events["begin"])
        lines = [
            {**line, "time": float(clocks.align(key, np.array(line["time"])))} if "time" in line else line
            for line in self.lines
        ]
        names = {0: "", **{line["number"]: line["text"] for line in self.lines if line["kind"] == "name"}}
        error = clocks.errors[str(self.about["clock"])]
        events = events[np.argsort(events["begin"], kind="stable")]
        starts = [float(clocks.align(key, np.array(self.start)))]
        return ProcessLog(self.number, self.about, events, names, lines, error, starts, num_restarts)


def _read_process(path: pathlib.Path) -> _Raw | None:
    """Reads the records of a process; None if it has not written any yet."""
    lines = list(_read_lines(path))
    if not lines or lines[0].get("kind") != "process":
        return None
    about = lines[0]
    if about.get("format") != FORMAT:
        raise ValueError(f"{path} has format {about.get('format')}, and this hop_tf reads format {FORMAT}.")
    rows = path.with_suffix(".bin")
    data = rows.read_bytes() if rows.exists() else b""
    # A process that was killed may have written a part of its last row.
    events = np.frombuffer(data[: len(data) // EVENT.itemsize * EVENT.itemsize], EVENT)
    return _Raw(about, lines[1:], events)


def _read_lines(path: pathlib.Path) -> Iterator[dict]:
    for line in path.read_text(errors="replace").splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            return  # The last line of a process that was killed.


def _last_job(processes: Sequence[_Raw]) -> list[_Raw]:
    """The last of several jobs. A process belongs to a new job if all earlier processes have ended before its start."""
    job: list[_Raw] = []
    for process in sorted(processes, key=lambda each: each.start):
        if job and process.start > max(each.end for each in job):
            job = []
        job.append(process)
    return job


def _clock_samples(processes: Sequence[_Raw]) -> Iterator[tuple[tuple[int, int], list[Sample]]]:
    for index, process in enumerate(processes):
        samples = collections.defaultdict(list)
        for line in process.lines:
            if line["kind"] == "clock":
                sample = Sample(line["time"], line["offset"], line["round_trip"])
                peers = [other for other, each in enumerate(processes) if each.number == line["peer"]]
                # The peer may have been started again, on another machine, before it answered.
                begun = [other for other in peers if processes[other].start <= sample.there]
                if peers:
                    samples[index, (begun or peers[:1])[-1]].append(sample)
        yield from samples.items()


def _match(processes: Sequence[ProcessLog]) -> tuple[list[Transfer], int]:
    """The messages with records of both ends, and the number of messages with only one.

    A restarted process uses the same numbers again, and a message is sent again when a connection breaks. So a received
    message belongs to the last send before its arrival.
    """
    sent = collections.defaultdict(list)
    for index, process in enumerate(processes):
        for event in process.of_kind(Kind.SEND):
            sent[process.number, int(event["peer"]), int(event["lane"]), int(event["number"])].append((index, event))
    transfers = []
    num_ends = sum(map(len, sent.values()))
    for index, process in enumerate(processes):
        for event in process.of_kind(Kind.RECEIVE):
            num_ends += 1
            key = (int(event["peer"]), process.number, int(event["lane"]), int(event["number"]))
            transfer = _take_sent(processes, sent[key], index, event)
            if transfer is not None:
                transfers.append(transfer)
    return sorted(transfers, key=lambda each: each.come_at), num_ends - 2 * len(transfers)


def _take_sent(
    processes: Sequence[ProcessLog], sent: list[tuple[int, np.void]], receiver: int, come: np.void
) -> Transfer | None:
    for place, (sender, event) in reversed(list(enumerate(sent))):
        errors = processes[sender].clock_error_seconds + processes[receiver].clock_error_seconds
        is_before = event["begin"] <= come["begin"] + max(errors, _LEAST_TOLERANCE_SECONDS)
        if is_before and event["num_bytes"] == come["num_bytes"]:
            del sent[: place + 1]
            return Transfer(
                sender=sender,
                receiver=receiver,
                lane=int(event["lane"]),
                number=int(event["number"]),
                queue=processes[sender].text(event),
                num_bytes=int(event["num_bytes"]),
                session=int(event["session"]),
                step=int(event["step"]),
                put_at=float(event["begin"] - event["queued"]),
                sent_at=float(event["begin"]),
                come_at=float(come["begin"]),
            )
    return None

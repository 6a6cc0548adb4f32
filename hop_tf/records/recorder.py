"""`Recorder`: writes a rank's events to its files.

A rank has two files for each of its processes: `events.<n>.bin`, rows of `EVENT`, for frequent events; and
`events.<n>.jsonl`, a JSON object per line, for rare events and texts. Files can be read even after the process was
killed.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
import os
import pathlib
import platform
import re
import threading
import time
from collections.abc import Callable, Mapping

import numpy as np
from absl import logging

from hop_tf.records.events import EVENT, FORMAT, NONE, PACKER, Kind
from hop_tf.records.sampling import is_recorded, is_recorded_session

# Events take some 100 bytes of memory each: 7 MB.
MAX_BUFFERED = 1 << 16
# Limit on all bytes that a process writes, in addition to the rule of `sampling`.
MAX_BYTES = 64 << 20
# Limit on the time for which a hanging disk delays `close`.
CLOSE_SECONDS = 5.0
_PERIOD_SECONDS = 2.0
# Numbers in names are left out, so that there are few names. Names beyond this limit share one entry.
_MAX_NAMES = 256
_OTHER = "(other)"
_MAX_CACHED = 4096
# Occasional lines become rarer the longer a job runs, so that a file grows with the logarithm of the time.
_FIRST_PERIOD_SECONDS = 5.0
_SHARE_OF_ELAPSED = 1 / 64
# `recorded` leaves out shorter times: events of small vectors would outnumber all others.
_LEAST_SECONDS = 2e-5

# An event as `PACKER` takes it.
Event = tuple


def make_recorder(
    folder: pathlib.Path | None, *, now: Callable[[], float] = time.time, **about: object
) -> Recorder | None:
    """Makes the recorder of this process; None without a folder, or if the folder cannot be written to.

    Args:
      folder: See `Recorder`.
      now: See `Recorder`.
      **about: See `Recorder`.
    """
    if folder is None:
        return None
    try:
        return Recorder(folder, now=now, **about)
    except OSError as error:
        _warn(folder, error)
        return None


def _warn(path: pathlib.Path, error: OSError) -> None:
    logging.warning(
        "Cannot write to the files in %s (`log_dir`): %s. Training continues, without recording events.",
        path,
        error.strerror or error,
    )


def recorded(recorder: Recorder | None, kind: int) -> contextlib.AbstractContextManager[None]:
    """A context that records its duration if the recorder is on. Durations below 20 us are left out."""
    return _NOT_RECORDED if recorder is None or not recorder.is_on else _Recorded(recorder, kind)


class _Recorded(contextlib.AbstractContextManager):
    """The context of `recorded`, which is much cheaper than a generator."""

    __slots__ = ("_begin", "_kind", "_recorder")

    def __init__(self, recorder: Recorder, kind: int):
        self._recorder, self._kind = recorder, kind

    def __enter__(self) -> None:
        self._begin = self._recorder.now()

    def __exit__(self, error_type: type[BaseException] | None, *_) -> None:
        seconds = self._recorder.now() - self._begin
        if seconds >= _LEAST_SECONDS and error_type is None:
            self._recorder.add(self._kind, self._begin, seconds)


_NOT_RECORDED = contextlib.nullcontext()


class Recorder:
    """Takes events from any thread, and writes them on a thread of its own.

    `add` appends to a buffer and takes a microsecond. When the buffer is full, events are dropped, and their number is
    written. A disk that is full, read-only or gone ends the records, with one warning. Training continues. Only `close`
    waits for a hanging disk.

    Args:
      folder: Directory of the rank's files. It is created if it does not exist.
      now: The clock of the events: seconds since 1970. Default: the machine's. A simulation has a clock of its own.
      **about: Description of the process for readers, such as `rank`; JSON.

    Attributes:
      now: The clock.
      is_on: True if events of the present step are recorded. Check this before costly work, such as reading the clock.
      step: The step of the session that the rank is in.
      session: The running session.
      follows: True to record a message's events if its sender records them: for a server, which makes no steps.

    Raises:
      OSError: If the files cannot be made.
    """

    def __init__(self, folder: pathlib.Path, *, now: Callable[[], float] = time.time, **about: object):
        self.now = now
        self.is_on = True
        self.step = NONE
        self.session = 0
        self.follows = False
        self._folder = folder
        self._buffer: collections.deque[Event] = collections.deque()
        self._num_dropped = self._num_dropped_before = 0  # In total, and reported so far.
        self._sources: list[Callable[[bool], np.ndarray]] = []
        self._names: dict[str | bytes, int] = {"": 0}
        self._name_numbers: dict[str, int] = {"": 0}
        self._new_lines: collections.deque[dict] = collections.deque()
        self._clocks: dict[int, tuple[float, float, float]] = {}
        self._started_at = now()
        self._due: dict[str, float] = {}
        self._num_bytes = 0
        self._is_session_recorded = True
        self._is_over = self._is_closed = False
        # Rows and lines that were taken from the buffers, and are not written yet.
        self._pending: collections.deque[tuple[bytes, bytes]] = collections.deque()
        # Communication waits for the first two locks. No thread holds them during a write, because a disk may hang.
        self._lock = threading.RLock()  # For names, clocks and sources.
        self._taking = threading.Lock()  # For taking from the buffers.
        self._writing = threading.Lock()  # For the files.
        self._stop = threading.Event()
        folder.mkdir(parents=True, exist_ok=True)
        self._rows, self._lines = _open_new(folder)
        self._new_lines.append({"kind": "process", "format": FORMAT, **_describe_process(now()), **about})
        self._thread = threading.Thread(target=self._run, name="hop_tf records", daemon=True)
        self._thread.start()

    # The rank's position.

    def begin_session(self, session: int) -> None:
        """Called when the rank is about to enter a session, whose steps count from 0."""
        self._collect(is_final=True)  # Events so far belong to the previous session.
        self.step = NONE - 1  # No step of a session.
        self.session, self._is_session_recorded = session & 0xFFFF, is_recorded_session(session)
        self.begin_step(NONE)
        self.add(Kind.SESSION, self.now(), number=session)

    def begin_step(self, step: int) -> None:
        """Called when the rank's communication begins a step."""
        if step != self.step:
            self.step, self.is_on = step, self.records(step)

    def follow(self, is_recorded: bool) -> None:
        """Called when a message has arrived. `is_recorded` is True if its sender records it: see `follows`."""
        if self.follows:
            self.is_on = is_recorded and not self._is_over

    def records(self, step: int) -> bool:
        """True if a step of the running session is recorded."""
        return self._is_session_recorded and not self._is_over and is_recorded(step)

    # Adding records.

    def add(
        self,
        kind: int,
        begin: float,
        seconds: float = 0.0,
        *,
        step: int | None = None,
        peer: int = NONE,
        lane: int = 0,
        name: str | bytes = "",
        num_bytes: int = 0,
        number: int = 0,
        queued: float = 0.0,
    ) -> None:
        """Adds an event, regardless of `is_on`, unless the records have ended.

        Args:
          kind: Its kind. See `Kind` for the meaning of the other arguments.
          begin: Time of its begin, on the clock `now`.
          seconds: Its duration.
          step: The step that it belongs to. Default: the step that the rank is in.
          peer: The other rank.
          lane: Lane of a message.
          name: Name of the queue or of the awaited operation. Numbers in it are left out, so that there are few names.
          num_bytes: Bytes of a message.
          number: Number of a message on its lane, or as the kind says.
          queued: Seconds that a message has waited for its turn.
        """
        buffer = self._buffer
        if self._is_over:
            return
        if len(buffer) >= MAX_BUFFERED:
            self.drop(1)
            return
        try:
            place = self._names[name]
        except KeyError:
            place = self._place_of(name)
        if step is None:
            step = self.step
        number &= 0xFFFFFFFF
        buffer.append((begin, num_bytes, seconds, step, number, queued, place, peer, kind, lane, self.session))

    def drop(self, count: int) -> None:
        """Counts lost events. Their number is written."""
        self._num_dropped += count

    def make_events(self, count: int, kind: int = 0) -> np.ndarray:
        """An array of `count` events of the running session, to be filled: rows of `EVENT`."""
        events = np.zeros(count, EVENT)
        events["kind"], events["peer"], events["session"] = kind, NONE, self.session
        return events

    def add_line(self, kind: str, **values: object) -> None:
        """Adds a line of JSON, for rare events."""
        if self._is_over:
            return
        self._new_lines.append({"kind": kind, "time": self.now(), **values})

    def add_now_and_then(self, kind: str, values: Mapping[str, object]) -> None:
        """Adds a line of JSON, unless one of that kind came recently: at most 64 while a job's age doubles."""
        if self._is_due(kind):
            self.add_line(kind, **values)

    def note_clock(self, peer: int, offset_seconds: float, round_trip_seconds: float) -> None:
        """Takes a heartbeat's measurement of the peer's clock. Only the one with the shortest round trip is written.

        Args:
          peer: The peer that has answered.
          offset_seconds: The peer's clock minus this clock, from `clocks.offset_of`.
          round_trip_seconds: Time until the answer came. Half of that is the largest error.
        """
        with self._lock:
            known = self._clocks.get(peer)
            if known is None or round_trip_seconds <= known[2]:
                self._clocks[peer] = (self.now(), offset_seconds, round_trip_seconds)

    def add_source(self, source: Callable[[bool], np.ndarray]) -> None:
        """Adds a source of events, such as the graph. `source(is_final)` is called before each write.

        It returns an array from `make_events`. `is_final` is True if no step is running.
        """
        with self._lock:
            self._sources.append(source)

    def _place_of(self, name: str | bytes) -> int:
        with self._lock:
            text = re.sub(r"\d+-[0-9a-f]{8}|\d+", "#", name if isinstance(name, str) else name.decode(errors="replace"))
            place = self._name_numbers.get(text)
            if place is None:
                text = text if len(self._name_numbers) < _MAX_NAMES else _OTHER
                place = self._name_numbers.setdefault(text, len(self._name_numbers))
                self._new_lines.append({"kind": "name", "number": place, "text": text})
            if len(self._names) >= _MAX_CACHED:
                self._names.clear()
            self._names[name] = place
            return place

    def _is_due(self, kind: str) -> bool:
        now = self.now()
        if now < self._due.get(kind, 0.0):
            return False
        self._due[kind] = now + max(_FIRST_PERIOD_SECONDS, (now - self._started_at) * _SHARE_OF_ELAPSED)
        return True

    # Writing.

    def flush(self, is_final: bool = False) -> None:
        """Writes all records so far. For `is_final`, see `add_source`.

        Blocks: as long as the disk does.
        """
        self._collect(is_final)
        try:
            with self._writing:
                while self._pending:
                    if not self._is_over:
                        self._write(*self._pending[0])
                    self._pending.popleft()
        except OSError as error:
            if not self._is_over:
                _warn(self._folder, error)
            self._end()

    def _collect(self, is_final: bool) -> None:
        """Takes all records so far from the buffers, to be written later."""
        with self._taking:
            if self._is_over:
                self._buffer.clear()
                self._new_lines.clear()
                return
            try:
                rows, text = self._take(is_final)
            except Exception:  # An error in the records must not end the training.
                self._end()
                logging.exception("Events are not recorded from now on.")
                return
            if self._num_pending() > MAX_BUFFERED:
                self._num_dropped += len(rows) // EVENT.itemsize
                rows = b""
            self._pending.append((rows, text))

    def _num_pending(self) -> int:
        return sum(len(rows) for rows, _ in list(self._pending)) // EVENT.itemsize

    def _take(self, is_final: bool) -> tuple[bytes, bytes]:
        """Takes the rows and the lines that were added."""
        with self._lock:
            sources, clocks = tuple(self._sources), {}
            if self._clocks and (is_final or self._is_due("clock")):
                clocks, self._clocks = self._clocks, clocks
        from_sources = b"".join(source(is_final).tobytes() for source in sources)
        for peer, (when, offset, round_trip) in clocks.items():
            line = {"kind": "clock", "time": when, "peer": peer, "offset": offset, "round_trip": round_trip}
            self._new_lines.append(line)
        num_dropped = self._num_dropped
        if num_dropped > self._num_dropped_before:
            dropped = num_dropped - self._num_dropped_before
            self._new_lines.append({"kind": "dropped", "time": self.now(), "events": dropped})
            self._num_dropped_before = num_dropped
        buffered = itertools.starmap(PACKER.pack, [self._buffer.popleft() for _ in range(len(self._buffer))])
        rows = b"".join((from_sources, *buffered))
        lines = [json.dumps(self._new_lines.popleft(), default=float) for _ in range(len(self._new_lines))]
        return rows, "".join(f"{line}\n" for line in lines).encode()

    def _write(self, rows: bytes, text: bytes) -> None:
        if self._num_bytes + len(rows) + len(text) <= MAX_BYTES:
            self._write_bytes(rows, text)
            return
        text = json.dumps({"kind": "full", "time": self.now(), "bytes": self._num_bytes}).encode() + b"\n"
        self._write_bytes(b"", text)
        self._end()

    def _write_bytes(self, rows: bytes, text: bytes) -> None:
        # Names are written before the rows that refer to them.
        for file, data in ((self._lines, text), (self._rows, rows)):
            self._num_bytes += len(data)
            while data:  # A write may stop in the middle if a disk is nearly full.
                data = data[file.write(data) :]

    def _end(self) -> None:
        """Ends recording. The thread then closes the files."""
        self._is_over, self.is_on = True, False
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.wait(_PERIOD_SECONDS):
            self.flush()
        if not self._is_over:
            self._new_lines.append({"kind": "end", "time": self.now()})
            self.flush(is_final=True)
        self._end()
        for waiting in (self._buffer, self._new_lines, self._pending):
            waiting.clear()
        with self._writing:
            for file in (self._rows, self._lines):
                with contextlib.suppress(OSError):
                    file.close()

    def close(self) -> None:
        """Writes all remaining records, and ends the thread. Idempotent.

        Blocks: until they are written, at most `CLOSE_SECONDS`. If that is too short, a warning gives the number of
          lost events.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._stop.set()
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive() and not self._is_over:
            self._end()
            logging.warning(
                "Could not write to the files in %s (`log_dir`) for %g s: %d events are lost.",
                self._folder,
                CLOSE_SECONDS,
                self._num_dropped + len(self._buffer) + self._num_pending(),
            )


def _open_new(folder: pathlib.Path):
    """Opens files with the first free number: a rank may have had several processes."""
    number = 0
    while True:
        try:
            rows = open(folder / f"events.{number}.bin", "xb", buffering=0)  # noqa: SIM115
        except FileExistsError:
            number += 1
        else:
            break
    try:
        return rows, open(folder / f"events.{number}.jsonl", "xb", buffering=0)
    except OSError:
        rows.close()
        raise


def _describe_process(now: float) -> dict[str, object]:
    return {"time": now, "pid": os.getpid(), "host": platform.node(), "clock": _clock_name()}


def _clock_name() -> str:
    """The name of the clock, equal for processes of one system. Processes with the same clock need no alignment."""
    try:
        return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()

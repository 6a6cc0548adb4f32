"""`Recorder`: a rank's events on their way to its files.

A rank has two files for each process that it was: `events.<n>.bin`, rows of `EVENT`, for what is frequent; and
`events.<n>.jsonl`, a JSON object a line, for what is rare or has text. Whatever was written can be read, also when the
process was killed.
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

# Some 100 bytes of memory each: 7 MB.
MAX_BUFFERED = 1 << 16
# All that a process writes, whatever the rule of `sampling` allows.
MAX_BYTES = 64 << 20
# How long a disk that hangs holds up `close`.
CLOSE_SECONDS = 5.0
_PERIOD_SECONDS = 2.0
# A name is one of a few, but for numbers in it. Others share a place.
_MAX_NAMES = 256
_OTHER = "(other)"
_MAX_CACHED = 4096
# What is written now and then is written more rarely the longer a job runs: so a file grows with the logarithm.
_FIRST_PERIOD_SECONDS = 5.0
_SHARE_OF_ELAPSED = 1 / 64
# What `recorded` leaves out: of small vectors there would be more events than of all else.
_LEAST_SECONDS = 2e-5

# An event as `PACKER` takes it.
Event = tuple


def make_recorder(
    folder: pathlib.Path | None, *, now: Callable[[], float] = time.time, **about: object
) -> Recorder | None:
    """Makes the recorder of this process; None without a folder, or where that cannot be written to.

    Args:
      folder: As of `Recorder`; so are the others.
      now: The clock.
      **about: What readers are to know.
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
        "No events are recorded from now on: the files in %s (`log_dir`) cannot be written to: %s. Training goes on.",
        path,
        error.strerror or error,
    )


def recorded(recorder: Recorder | None, kind: int) -> contextlib.AbstractContextManager[None]:
    """Records how long what it surrounds takes, where events are recorded; what takes less than 20 us is left out."""
    return _NOT_RECORDED if recorder is None or not recorder.is_on else _Recorded(recorder, kind)


class _Recorded(contextlib.AbstractContextManager):
    """Much cheaper than a generator."""

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
    written. A disk that is full, read-only or gone ends the records, with one warning, and not the training. One that
    hangs is waited for by nobody but `close`.

    Args:
      folder: Directory of the rank's files. It is made where it does not exist.
      now: The clock of the events: seconds since 1970. Default: the machine's. A simulation has one of its own.
      **about: What readers are to know of the process, such as `rank`; JSON.

    Attributes:
      now: The clock.
      is_on: Whether events of the present step are recorded. Ask it before what costs something, such as the time.
      step: The step of the session that the rank is in.
      session: The running session.
      follows: Whether it records what belongs to messages that others record: for a server, which makes no steps.

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
        self._num_dropped = self._num_dropped_before = 0  # Until the last line that says so.
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
        # What was taken from the buffers, and is not written yet: rows and lines.
        self._pending: collections.deque[tuple[bytes, bytes]] = collections.deque()
        # Communication waits for these two, which nobody holds during a write: a disk may hang.
        self._lock = threading.RLock()  # Of names, clocks and sources.
        self._taking = threading.Lock()  # Of who takes from the buffers.
        self._writing = threading.Lock()  # Of the files.
        self._stop = threading.Event()
        folder.mkdir(parents=True, exist_ok=True)
        self._rows, self._lines = _open_new(folder)
        self._new_lines.append({"kind": "process", "format": FORMAT, **_describe_process(now()), **about})
        self._thread = threading.Thread(target=self._run, name="hop_tf records", daemon=True)
        self._thread.start()

    # Where the rank is.

    def begin_session(self, session: int) -> None:
        """The rank is about to enter a session, whose steps count from 0."""
        self._collect(is_final=True)  # What is on its way belongs to the one before.
        self.step = NONE - 1  # None of a session.
        self.session, self._is_session_recorded = session & 0xFFFF, is_recorded_session(session)
        self.begin_step(NONE)
        self.add(Kind.SESSION, self.now(), number=session)

    def begin_step(self, step: int) -> None:
        """The rank's communication begins a step."""
        if step != self.step:
            self.step, self.is_on = step, self.records(step)

    def follow(self, is_recorded: bool) -> None:
        """A message has come, which its sender records or not: see `follows`."""
        if self.follows:
            self.is_on = is_recorded and not self._is_over

    def records(self, step: int) -> bool:
        """Whether a step of the running session is recorded."""
        return self._is_session_recorded and not self._is_over and is_recorded(step)

    # What is recorded.

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
        """Adds an event, whether `is_on` or not, unless the records have ended.

        Args:
          kind: What it is; here, too, what the others mean.
          begin: When it began, on the clock `now`.
          seconds: How long it took.
          step: The step that it belongs to. Default: the one that the rank is in.
          peer: The other rank.
          lane: Of a message.
          name: Of the queue, or what is awaited. Numbers in it are left out: names are few.
          num_bytes: Of a message.
          number: Of a message on its lane, or as the kind says.
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
        """So many events are lost: their number is written."""
        self._num_dropped += count

    def make_events(self, count: int, kind: int = 0) -> np.ndarray:
        """So many events of the running session, to be filled: an array of `EVENT`."""
        events = np.zeros(count, EVENT)
        events["kind"], events["peer"], events["session"] = kind, NONE, self.session
        return events

    def add_line(self, kind: str, **values: object) -> None:
        """Adds a line of JSON: for what is rare."""
        if self._is_over:
            return
        self._new_lines.append({"kind": kind, "time": self.now(), **values})

    def add_now_and_then(self, kind: str, values: Mapping[str, object]) -> None:
        """Adds a line of JSON, unless one of that kind came lately: at most 64 while a job's age doubles."""
        if self._is_due(kind):
            self.add_line(kind, **values)

    def note_clock(self, peer: int, offset_seconds: float, round_trip_seconds: float) -> None:
        """A heartbeat was answered, with the peer's clock. Of several, that with the shortest round trip is written.

        Args:
          peer: Who has answered.
          offset_seconds: The peer's clock less this one's, by `clocks.offset_of`.
          round_trip_seconds: Until the answer had come: half of that is the largest error.
        """
        with self._lock:
            known = self._clocks.get(peer)
            if known is None or round_trip_seconds <= known[2]:
                self._clocks[peer] = (self.now(), offset_seconds, round_trip_seconds)

    def add_source(self, source: Callable[[bool], np.ndarray]) -> None:
        """Asks `source(is_final)` for further events whenever it writes: for what counts by itself, such as the graph.

        `is_final` says that no step is under way. It returns what `make_events` has made.
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
        """Writes all that was added before; `is_final` as in `add_source`.

        Blocks: as the disk does.
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
        """Takes what was added before, to be written later."""
        with self._taking:
            if self._is_over:
                self._buffer.clear()
                self._new_lines.clear()
                return
            try:
                rows, text = self._take(is_final)
            except Exception:  # Records are not worth a training.
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
        """The rows and the lines that were added."""
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
        # Names before the rows that refer to them.
        for file, data in ((self._lines, text), (self._rows, rows)):
            self._num_bytes += len(data)
            while data:  # A write may stop in the middle, where a disk is about to be full.
                data = data[file.write(data) :]

    def _end(self) -> None:
        """Nothing is recorded any more. The thread closes the files."""
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
        """Writes what is left and ends the thread. Idempotent.

        Blocks: until that is written, for `CLOSE_SECONDS` at most. Then a warning says what is lost.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._stop.set()
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive() and not self._is_over:
            self._end()
            logging.warning(
                "The files in %s (`log_dir`) have taken nothing for %g s: %d events are lost.",
                self._folder,
                CLOSE_SECONDS,
                self._num_dropped + len(self._buffer) + self._num_pending(),
            )


def _open_new(folder: pathlib.Path):
    """Files with the first number that is free: a rank may have been several processes."""
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
    """Names the clock: processes with the same one need not be aligned. Those of one system have the same."""
    try:
        return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()

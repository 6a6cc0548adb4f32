"""A virtual clock, and processes that take turns on it."""

from __future__ import annotations

import heapq
import itertools
import math
import threading
from collections.abc import Callable


class DeadlockError(RuntimeError):
    """Raised if simulated ranks wait, and no event is left."""


class Scheduler:
    """A virtual clock with events, and processes of which one runs at a time.

    Args:
      limit_seconds: The virtual time by which all processes must have ended. Default: no limit.

    Attributes:
      now: Virtual time in seconds.
      num_events: The number of events that have happened.
    """

    def __init__(self, limit_seconds: float = math.inf):
        self.now = 0.0
        self._limit_seconds = limit_seconds
        self.num_events = 0
        self._before_events: dict[int, Callable[[], None]] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = itertools.count()
        self._processes: list[Process] = []
        self._running: Process | None = None
        self._is_stopped = False

    def call_at(self, time: float, callback: Callable[[], None]) -> None:
        """Calls `callback` when the clock reaches `time`. Events of the same time run in the order of these calls."""
        heapq.heappush(self._events, (max(time, self.now), next(self._sequence), callback))

    def call_before_event(self, number: int, callback: Callable[[], None]) -> None:
        """Calls `callback` when `number` events have happened, before the next one."""
        self._before_events[number] = callback

    def spawn(self, name: str, body: Callable[[], None]) -> Process:
        """Starts a process at the current time."""
        process = Process(name, body)
        self._processes.append(process)
        self.resume_at(self.now, process)
        return process

    def resume_at(self, time: float, process: Process) -> None:
        """Lets `process` go on when the clock reaches `time`."""
        self.call_at(time, lambda: self._resume(process))

    def _resume(self, process: Process) -> None:
        if process.frozen_until > self.now:
            self.resume_at(process.frozen_until, process)
            return
        self._running = process
        process.resume()
        self._running = None
        if process.error is not None:
            raise process.error

    def sleep(self, seconds: float) -> None:
        """Lets virtual time pass for the calling process."""
        process = self.current()
        self.resume_at(self.now + seconds, process)
        process.park()

    def current(self) -> Process:
        """The process that runs now."""
        return self._running

    def stop(self) -> None:
        """Ends the simulation: `run` abandons the processes that have not ended, and returns."""
        self._is_stopped = True

    def run(self) -> None:
        """Runs until every process has ended, or `stop` is called.

        Raises:
          DeadlockError: If processes wait and no event is left, or processes still run at `limit_seconds`.
          BaseException: The first exception that a process raised.
        """
        try:
            while self._events and not self._is_stopped:
                if self.num_events in self._before_events:
                    self._before_events.pop(self.num_events)()
                self.now, _, callback = heapq.heappop(self._events)
                if self.now > self._limit_seconds and (running := self._running_processes()):
                    raise DeadlockError(f"at {self.now:.6f} s these have not ended: {running}.")
                self.num_events += 1
                callback()
            if not self._is_stopped and (waiting := self._running_processes()):
                raise DeadlockError(f"at {self.now:.6f} s all processes wait forever. Waiting: {waiting}.")
        finally:
            for process in self._processes:
                process.abandon()

    def _running_processes(self) -> list[str]:
        return [process.name for process in self._processes if not process.ended]


class _Abandoned(BaseException):
    """Unwinds a process that will never be resumed."""


class Process:
    """A thread that runs only between `resume` and its next `park`.

    Attributes:
      frozen_until: The process is not resumed before this time.
    """

    frozen_until = -math.inf

    def __init__(self, name: str, body: Callable[[], None]):
        self.name = name
        self.error: BaseException | None = None
        self.ended = False
        self._body: Callable[[], None] | None = body
        self._abandoned = False
        # Two locks. Each is held until the turn of this process, or of the scheduler, comes. Locks are fast, and a run
        # may have 100,000 turns.
        self._turn, self._parked = threading.Lock(), threading.Lock()
        self._turn.acquire()
        self._parked.acquire()
        self.thread = threading.Thread(target=self._run, name=f"hop_tf simulated {name}", daemon=True)
        self.thread.start()

    def resume(self) -> None:
        """Runs the process until it parks or ends. Called by the scheduler."""
        if not self.ended:
            self._turn.release()
            self._parked.acquire()

    def park(self) -> None:
        """Gives the turn back. Called by the process."""
        self._parked.release()
        self._turn.acquire()
        if self._abandoned:
            raise _Abandoned

    def abandon(self) -> None:
        """Ends the thread wherever it is parked. A process must not call this."""
        self._abandoned = True
        self.resume()
        self.thread.join()

    def _run(self) -> None:
        self._turn.acquire()
        try:
            body, self._body = self._body, None  # So that the body's memory is freed when the body has ended.
            if not self._abandoned:
                body()
        except _Abandoned:
            pass
        except BaseException as error:
            self.error = error
        finally:
            self.ended = True
            self._parked.release()

"""Supervises a job's processes: starts failed ones again, finds the job's outcome, and ends running processes."""

from __future__ import annotations

import dataclasses
import signal
import time
from collections.abc import Callable, Mapping

from hop_tf.tools.commands.launch_report import Outcome
from hop_tf.tools.processes.group import Process, ProcessServer
from hop_tf.tools.processes.local_cluster import Task

# After a failure, the other processes have this time to notice and report the failure themselves.
_REPORT_SECONDS = 5.0
# The time that a process gets to end after it was asked to.
_TERMINATION_SECONDS = 8.0
_KILL_SECONDS = 5.0
_POLL_SECONDS = 0.1
# The pause before a process is started again. It doubles with each restart, up to the longest one. After a process has
# worked for `_GOOD_WORK_SECONDS`, its next pause is the first one again.
_FIRST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 30.0
_GOOD_WORK_SECONDS = 60.0
_NOBODY_LEFT = "the other workers have done their part: it would train alone"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """The conditions under which a job is ended.

    Attributes:
      timeout_seconds: Time after which the whole job is ended, or None for no limit.
      keep_going: True if the other processes run on when one has failed for good.
    """

    timeout_seconds: float | None
    keep_going: bool


class Restarts:
    """Starts failed processes again.

    A parameter server ends by itself when all workers have ended. It is started again if a running worker was started
    later. This restart does not count as a failure. A killed worker does not count as a failure, either, if the other
    workers have done their part without it. The exception is worker 0, because it saves the model.

    Args:
      limit: The number of times that each process is started again after it has failed.
      processes: The processes of the job.
      start: Starts a task's process again.
      describe: Returns a text that says how a task's process ended.
      say: Prints a line.
    """

    def __init__(
        self,
        limit: int,
        processes: Mapping[Task, Process],
        start: Callable[[Task], None],
        describe: Callable[[Task], str],
        say: Callable[[str], None],
    ):
        self._limit = limit
        self._processes = processes
        self._start = start
        self._describe = describe
        self._say = say
        self._num_failures = dict.fromkeys(processes, 0)  # Failures that led, or will lead, to a restart.
        self._num_quick = dict.fromkeys(processes, 0)  # Of these, the ones since the last long run.
        self._due: dict[Task, float] = {}
        self._killed: set[Task] = set()
        self._given_up: set[Task] = set()

    def awaits(self, task: Task) -> bool:
        """True if a task's process has failed and will be started again."""
        has_failed = bool(self._processes[task].exit_code)
        return has_failed and (task in self._due or not self._reason_to_give_up(task))

    def is_unneeded(self, task: Task) -> bool:
        """True if a task's process was killed, but the job does not need it, because the others are done."""
        exit_code = self._processes[task].exit_code or 0
        was_killed = exit_code < 0 or (exit_code and task in self._killed)
        return bool(self._limit and task.index and was_killed) and self._would_train_alone(task)

    def poll(self) -> None:
        """Checks all processes. Must be called repeatedly. Blocks while a process is started again."""
        if not self._limit:
            return
        for task, process in self._processes.items():
            if process.running:
                continue
            if task in self._due:
                if time.monotonic() >= self._due[task]:
                    del self._due[task]
                    self._start_again(task)
            elif process.exit_code:
                self._note_failure(task)
            elif self._lacks(task):
                self._say(f"{task} is started again for the workers that were")
                self._start(task)

    def _note_failure(self, task: Task) -> None:
        if task in self._given_up:
            return
        how = self._describe(task)
        process = self._processes[task]
        if process.exit_code < 0:
            self._killed.add(task)
        if reason := self._reason_to_give_up(task):
            self._give_up(task, f"{reason} ({how})")
            return
        if process.seconds > _GOOD_WORK_SECONDS:
            self._num_quick[task] = 0
        pause_seconds = min(_FIRST_PAUSE_SECONDS * 2 ** self._num_quick[task], _LONGEST_PAUSE_SECONDS)
        self._num_failures[task] += 1
        self._num_quick[task] += 1
        self._due[task] = time.monotonic() + pause_seconds
        number = f"{self._num_failures[task]} of {self._limit}"
        self._say(f"{task} failed, and is started again in {pause_seconds:g} s, for time {number} ({how})")

    def _reason_to_give_up(self, task: Task) -> str:
        """The reason not to start a failed process again, or "" if there is none."""
        if self._num_failures[task] >= self._limit:
            return f"it was {self._limit} times"
        return _NOBODY_LEFT if self._would_train_alone(task) else ""

    def _would_train_alone(self, task: Task) -> bool:
        """True if no other worker runs, and at least one has succeeded, so that it is not started again."""
        others = [process for other, process in self._processes.items() if other.type == "worker" and other != task]
        is_done = any(process.exit_code == 0 for process in others)
        return task.type == "worker" and is_done and not any(process.running for process in others)

    def _start_again(self, task: Task) -> None:
        if self._would_train_alone(task):  # The others have ended meanwhile.
            self._give_up(task, _NOBODY_LEFT)
        else:
            self._start(task)

    def _give_up(self, task: Task, reason: str) -> None:
        self._given_up.add(task)
        self._say(f"{task} failed, and is not started again, as {reason}")

    def _lacks(self, task: Task) -> bool:
        """True for a server that has ended, if a running worker was started after it."""
        if task.type != "ps":
            return False
        workers = [process for other, process in self._processes.items() if other.type == "worker" and process.running]
        return any(worker.start_time > self._processes[task].start_time for worker in workers)


class Supervisor:
    """Waits for a job's outcome, and starts failed processes again meanwhile. Then ends the running processes.

    Args:
      server: The server that has started the processes.
      processes: The processes of the job. A task's new process replaces its earlier one in this mapping.
      limits: The conditions under which the job is ended.
      restarts: Starts failed processes again.
      signals: The signals that have asked this process to end, in order. The caller appends to the list.
      say: Prints a line.

    Attributes:
      outcome: The outcome of the job.
      ended: The tasks that ended after the launcher had signalled them.
      restarts: Starts failed processes again.
    """

    def __init__(
        self,
        server: ProcessServer,
        processes: dict[Task, Process],
        limits: Limits,
        restarts: Restarts,
        signals: list[int],
        say: Callable[[str], None],
    ):
        self._server = server
        self._processes = processes
        self._limits = limits
        self.restarts = restarts
        self._deadline = time.monotonic() + (limits.timeout_seconds or float("inf"))
        self._signals = signals
        self._say = say
        self.outcome: Outcome | None = None
        self.ended: set[Task] = set()

    def run(self, on_poll: Callable[[], None]) -> None:
        """Runs until all processes have ended. Calls `on_poll` ten times a second until the outcome is known."""
        while self.outcome is None:
            on_poll()
            self._server.wait_until(self._find_outcome, _POLL_SECONDS)
            self.outcome = self._find_outcome()
            if self.outcome not in (Outcome.INTERRUPTED, Outcome.TIMED_OUT):
                self.restarts.poll()
        self._announce()
        for signum, patience_seconds in self._ending():
            self._signal_running(signum)
            num_signals = len(self._signals)
            deadline = time.monotonic() + patience_seconds
            while self._running() and time.monotonic() < deadline and len(self._signals) == num_signals:
                self._server.wait_until(lambda: not self._running(), _POLL_SECONDS)

    def _find_outcome(self) -> Outcome | None:
        if self._signals:
            return Outcome.INTERRUPTED
        going_on = [task for task, process in self._processes.items() if process.running or self.restarts.awaits(task)]
        ended = self._processes.keys() - {*going_on}
        has_failed = any(self._processes[task].exit_code and not self.restarts.is_unneeded(task) for task in ended)
        is_done = not any(task.type == "worker" for task in going_on)
        if has_failed and (is_done or not self._limits.keep_going):
            return Outcome.FAILED
        if is_done:
            return Outcome.COMPLETED
        return Outcome.TIMED_OUT if time.monotonic() > self._deadline else None

    def _ending(self) -> list[tuple[int | None, float]]:
        """The signals to send, each with the seconds to wait for its effect."""
        forced = [(signal.SIGTERM, _TERMINATION_SECONDS), (signal.SIGKILL, _KILL_SECONDS)]
        match self.outcome:
            case Outcome.INTERRUPTED:
                return [(self._signals[0], _TERMINATION_SECONDS), *forced]
            case Outcome.TIMED_OUT:
                return forced
        return [(None, _REPORT_SECONDS), *forced]

    def _announce(self) -> None:
        running = ", ".join(map(str, self._running()))
        if not running:
            return
        match self.outcome:
            case Outcome.INTERRUPTED:
                self._say(f"{signal.Signals(self._signals[0]).name}: passed on to {running}; once more to end them")
            case Outcome.TIMED_OUT:
                self._say(f"not done after {self._limits.timeout_seconds:g} s; ending {running}")
            case Outcome.FAILED:
                failed = next(task for task, process in self._processes.items() if process.exit_code)
                self._say(f"{failed} failed; {running} will be ended in {_REPORT_SECONDS:.0f} s")

    def _running(self) -> list[Task]:
        return [task for task, process in self._processes.items() if process.running]

    def _signal_running(self, signum: int | None) -> None:
        if signum is not None:
            for task in self._running():
                self.ended.add(task)
                self._processes[task].send_signal(signum)

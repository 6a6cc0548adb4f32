"""The launcher's report at the end: each process, the first failure, and the use of the cores."""

from __future__ import annotations

import bisect
import dataclasses
import enum
import json
import os
import signal
import time
from collections.abc import Iterable

import psutil

from hop_tf.tools.emulation import ComputeEmulation, read_step_times
from hop_tf.tools.processes.local_cluster import Task

TIMEOUT_EXIT_CODE = 124

# If cores are busier, emulated compute, which sleeps, no longer determines the duration of a step.
MAX_BUSY_PERCENT = 70.0

_SAMPLE_SECONDS = 0.5


class Outcome(enum.Enum):
    """The outcome of a job."""

    COMPLETED = "completed"  # All workers ended with exit code 0.
    FAILED = "failed"
    TIMED_OUT = "timed out"
    INTERRUPTED = "interrupted"  # By a signal to the launcher.


@dataclasses.dataclass(frozen=True)
class ProcessorUse:
    """The use of the cores.

    Attributes:
      busy_percent: The percentage of time in which the cores available to this process were busy, with any program. The
        mean over the cores.
      period: "steps", from the first to the last training step of any worker, or "job" if no steps were recorded.
    """

    busy_percent: float
    period: str


class ProcessorMeter:
    """Records the cores' accumulated times, so that their use in any period can be found afterwards."""

    def __init__(self):
        self._cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
        self._times: list[float] = []
        self._busy_and_total: list[tuple[float, float]] = []

    def sample(self) -> None:
        """Takes a reading, unless the last one is less than `_SAMPLE_SECONDS` old."""
        if not self._times or time.monotonic() - self._times[-1] >= _SAMPLE_SECONDS:
            self._take()

    def measure(self, step_times_paths: Iterable[str]) -> ProcessorUse | None:
        """Returns the use of the cores between the first and the last step, or over the whole job; None if unknown."""
        self._take()
        steps = read_step_times(step_times_paths)
        first, last = steps or (self._times[0], self._times[-1])
        end = min(len(self._times) - 1, bisect.bisect_left(self._times, last))
        # The system's counters tick slowly, and may not move between two readings that are close together.
        first = min(first, self._times[end] - _SAMPLE_SECONDS)
        begin = max(0, bisect.bisect_right(self._times, first) - 1)
        busy, total = (self._busy_and_total[end][part] - self._busy_and_total[begin][part] for part in (0, 1))
        if total <= 0:
            return None
        # The kernel's counters are not exact, and its counter of waiting for input may even go back.
        busy_percent = min(max(100 * busy / total, 0.0), 100.0)
        return ProcessorUse(busy_percent=busy_percent, period="steps" if steps else "job")

    def _take(self) -> None:
        self._times.append(time.monotonic())
        self._busy_and_total.append(self._read())

    def _read(self) -> tuple[float, float]:
        per_core = psutil.cpu_times(percpu=True)
        cores = [per_core[core] for core in self._cores if core < len(per_core)] if self._cores else per_core
        total = sum(sum(_disjoint_times(core).values()) for core in cores)
        idle = sum(core.idle + getattr(core, "iowait", 0.0) for core in cores)
        return total - idle, total


def _disjoint_times(core) -> dict[str, float]:
    """The times of a core that add up to its total time. Guest times are left out, because user times contain them."""
    return {name: value for name, value in core._asdict().items() if not name.startswith("guest")}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskReport:
    """The end of one process.

    Attributes:
      task: The task of the process.
      exit_code: The exit code, or minus the number of the signal that ended the process.
      seconds: The time for which it ran.
      end_time: The time at which it ended, on `time.monotonic`'s clock.
      ended_by_launcher: True if it ended only after the launcher had signalled it.
      log_path: The path of its log file.
      last_words: The exception that ended it, or otherwise the last line that it printed. One line, which may be empty.
      stacks_path: The path of a file with the stacks of its threads. None if it did not wait long for others.
      earlier: The reports of its earlier processes, if it was started again.
      was_needed: False if it was killed, and the others have done their part without it.
    """

    task: Task
    exit_code: int
    seconds: float
    end_time: float
    ended_by_launcher: bool
    log_path: str
    last_words: str
    stacks_path: str | None = None
    earlier: tuple[TaskReport, ...] = ()
    was_needed: bool = True

    @property
    def how(self) -> str:
        """The end of the process, in words."""
        text = f"exit code {self.exit_code}" if self.exit_code >= 0 else _signal_name(-self.exit_code)
        if not self.was_needed:
            return f"{text} (the others have done their part)"
        return f"{text} (ended by the launcher)" if self.ended_by_launcher else text

    def saying(self, words: str) -> str:
        """The text with the last words, to append to `how`, or to a line that ends with `how`."""
        # The last line before a signal is not the cause of the signal.
        return f", printed last: {words}" if self.exit_code < 0 else f": {words}"

    @property
    def failed(self) -> bool:
        """True if the process failed, and the launcher did not end it."""
        return self.exit_code != 0 and not self.ended_by_launcher and self.was_needed


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobReport:
    """The end of a job.

    Attributes:
      tasks: The reports of all tasks, each with its last process.
      seconds: The duration of the job.
      outcome: The outcome of the job.
      signum: The signal that interrupted the job, or None.
      emulation: The emulated compute, or None.
      processor_use: The use of the cores, or None if unknown.
    """

    tasks: list[TaskReport]
    seconds: float
    outcome: Outcome
    signum: int | None
    emulation: ComputeEmulation | None
    processor_use: ProcessorUse | None

    @property
    def first_failure(self) -> TaskReport | None:
        """The process that failed first, except those that the launcher ended."""
        return min((task for task in self.tasks if task.failed), key=lambda task: task.end_time, default=None)

    @property
    def exit_code(self) -> int:
        """The launcher's exit code: 128 + a signal's number if the signal ended the job or the first failed process."""
        if self.outcome is Outcome.INTERRUPTED:
            return 128 + self.signum
        if self.outcome is Outcome.TIMED_OUT:
            return TIMEOUT_EXIT_CODE
        code = self.first_failure.exit_code if self.first_failure else 0
        return code if code >= 0 else 128 - code

    @property
    def valid(self) -> bool | None:
        """True if emulated compute kept its pace, or compute is real. False if the cores were too busy.

        None if compute is emulated and the use of the cores is unknown.
        """
        if self.emulation is None:
            return True
        if self.processor_use is None:
            return None
        return self.processor_use.busy_percent <= MAX_BUSY_PERCENT

    def lines(self) -> list[str]:
        """The report as text."""
        lines = [self._format_task(task) for task in self.tasks]
        lines += self._processor_lines()
        if (first := self.first_failure) and self.outcome in (Outcome.FAILED, Outcome.COMPLETED):
            lines.append(f"first failure: {first.task}, {first.how}; its log is {first.log_path}")
        if self.outcome is not Outcome.COMPLETED:
            stacks = [report.stacks_path for report in self.tasks if report.stacks_path is not None]
            lines += [f"waited for others for long; the stacks of threads are in {', '.join(stacks)}"] if stacks else []
        validity = {True: "", False: " (INVALID)", None: " (validity unknown)"}[self.valid]
        lines.append(f"{self.outcome.value} after {self.seconds:.1f} s, exit code {self.exit_code}{validity}")
        return lines

    def write(self, path: str) -> None:
        """Writes the report as JSON."""
        summary = {
            "outcome": self.outcome.value,
            "exit_code": self.exit_code,
            "seconds": round(self.seconds, 3),
            "valid": self.valid,  # null: unknown
            "cpu_busy_percent": self.processor_use and round(self.processor_use.busy_percent, 1),
            "cpu_busy_period": self.processor_use and self.processor_use.period,
            "first_failure": self.first_failure and str(self.first_failure.task),
            "emulation": self.emulation and self._describe_emulation(),
            "tasks": [_describe_task(task) for task in self.tasks],
        }
        with open(path, "w") as file:
            json.dump(summary, file, indent=2)
            file.write("\n")

    def _format_task(self, report: TaskReport) -> str:
        line = f"{report.task!s:<10} {report.seconds:8.1f} s  {report.how}"
        if report.earlier:
            line += f" (started again after {', '.join(each.how for each in report.earlier)})"
        if report.exit_code == 0 or not report.last_words:
            return line
        # A process that fails because of another one may be the first to end. The last words tell them apart.
        same = next(task for task in self.tasks if task.exit_code != 0 and task.last_words == report.last_words)
        said = report.last_words if same is report else f"the same as {same.task}"
        return f"{line}{report.saying(said)}"

    def _processor_lines(self) -> list[str]:
        if self.valid is None:
            return ["VALIDITY UNKNOWN: how busy the cores were is not known. Emulated compute may have lost its pace."]
        if self.processor_use is None:
            return []
        percent = f"{self.processor_use.busy_percent:.0f}%"
        when = {"steps": "from the first to the last step", "job": "over the whole job"}[self.processor_use.period]
        line = f"cores {percent} busy {when}"
        if self.valid:
            return [line]
        return [f"INVALID: {line}. Above {MAX_BUSY_PERCENT:.0f}% emulated compute does not keep its pace."]

    def _describe_emulation(self) -> dict:
        return {
            "step_seconds": self.emulation.step_seconds,
            "slowdowns": [str(slowdown) for slowdown in self.emulation.slowdowns],
            "seed": self.emulation.seed,
        }


def _describe_task(report: TaskReport) -> dict:
    return {
        "type": report.task.type,
        "index": report.task.index,
        **_describe_process(report),
        "restarts": len(report.earlier),
        "earlier": [_describe_process(each) for each in report.earlier],
    }


def _describe_process(report: TaskReport) -> dict:
    return {
        "exit_code": report.exit_code,
        "signal": _signal_name(-report.exit_code) if report.exit_code < 0 else None,
        "ended_by_launcher": report.ended_by_launcher,
        "seconds": round(report.seconds, 3),
        "log_path": report.log_path,
        "stacks_path": report.stacks_path,
    }


def _signal_name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"

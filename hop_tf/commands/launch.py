"""`hop_tf launch`: starts a training script once per worker on this machine and sees the job through."""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence

from hop_tf.commands import launch_report
from hop_tf.commands.launch_report import Outcome
from hop_tf.emulation import STEP_TIMES_PATH, ComputeEmulation, Slowdown
from hop_tf.processes.group import Process, ProcessServer
from hop_tf.processes.local_cluster import PortReservation, ProcessError, Task, make_tasks, task_environments
from hop_tf.processes.output import Console, OutputReader, TaskOutput
from hop_tf.processes.output_filter import OutputFilter

# After a failure the others get this long to notice it by themselves and say so.
_REPORT_SECONDS = 5.0
# How long a process may take to end after it was asked to.
_TERMINATION_SECONDS = 8.0
_KILL_SECONDS = 5.0
_POLL_SECONDS = 0.1
# Python's exit code then.
_UNCAUGHT_EXCEPTION = 1

_DESCRIPTION = """\
Starts a training script once per worker on this machine, each with its own TF_CONFIG, and sees the job through.

Lines of all processes are printed with the process's name, and written to a log file each. The first process that
fails is named at the end, its exit code (128 + signal number if a signal ended it) becomes the launcher's, and the
others are ended, unless --keep_going is given. The job is done when all workers are: parameter servers are ended
then. Ctrl-C is passed on to all processes; a second one ends them. No process survives the launcher.
"""
_EPILOG = """\
Each worker is given its share of the cores (OMP_NUM_THREADS, TF_NUM_INTRAOP_THREADS, TF_NUM_INTEROP_THREADS) and,
where there are several GPUs, one of them in turn (CUDA_VISIBLE_DEVICES). What is set already is respected. Parameter
servers get no GPU.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """What to launch.

    Attributes:
      script: Path of the training script.
      script_arguments: Its arguments.
      num_workers: Number of workers, at least 1.
      num_ps: Number of parameter servers, which run the same script.
      log_dir: Directory for logs and `launch.json`; None for a new temporary one.
      timeout_seconds: Time after which the whole job is ended; None for no limit.
      python: The Python interpreter.
      emulation: Emulated compute, or None.
      keep_going: Whether the other processes run on when one fails.

    Raises:
      ValueError: If a value is out of range, the script is missing, or a slowdown names a rank that does not exist.
    """

    script: str
    script_arguments: tuple[str, ...] = ()
    num_workers: int
    num_ps: int = 0
    log_dir: str | None = None
    timeout_seconds: float | None = None
    python: str = sys.executable
    emulation: ComputeEmulation | None = None
    keep_going: bool = False

    def __post_init__(self):
        make_tasks(num_workers=self.num_workers, num_ps=self.num_ps)
        if self.timeout_seconds is not None and not self.timeout_seconds > 0:
            raise ValueError(f"`timeout_seconds` must be positive. Received: timeout_seconds={self.timeout_seconds}.")
        if not os.path.isfile(self.script):
            raise ValueError(f"`script` must be a file. Received: script={self.script!r}.")
        if self.emulation is not None:
            self.emulation.check_world_size(self.num_workers)


def main(argv: Sequence[str], command: str = "launch") -> int:
    """Runs `hop_tf launch` with the arguments `argv`, for `command`; returns the exit code."""
    parser = _make_parser(command)
    arguments = parser.parse_args(argv)
    try:
        options = _read_options(arguments)
    except ValueError as error:
        parser.error(str(error))
    try:
        return _Launcher(options).run()
    except (ProcessError, OSError) as error:
        print(f"hop_tf {command}: {error}", file=sys.stderr)
        return 1


def _make_parser(command: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"hop_tf {command}",
        usage=f"hop_tf {command} [flags] script.py [script arguments]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--num_workers", type=int, required=True, help="number of workers")
    add("--num_ps", type=int, default=0, help="number of parameter servers (default: %(default)s)")
    add("--log_dir", help="directory for logs and launch.json (default: a new temporary one)")
    add(
        "--keep_going",
        action="store_true",
        help="let the other processes run on when one fails, as for ranks that train on without a lost one",
    )
    add("--timeout_seconds", type=float, help="end the whole job after this time, with exit code 124")
    add("--python", default=sys.executable, help="Python interpreter of the processes (default: this one)")
    add("--step_seconds", type=float, help="emulate compute: a training step takes at least this long, asleep")
    add(
        "--slowdown",
        action="append",
        default=[],
        metavar="3:4x|random:6x",
        help="emulated steps of rank 3 take 4 times as long; any step 6 times with probability 1/num_workers",
    )
    add("--seed", type=int, default=0, help="seed of the random slowdown (default: %(default)s)")
    add("script", help="the training script")
    add("script_arguments", nargs=argparse.REMAINDER, help="its arguments")
    return parser


def _read_options(arguments: argparse.Namespace) -> LaunchOptions:
    return LaunchOptions(
        script=arguments.script,
        script_arguments=tuple(arguments.script_arguments),
        num_workers=arguments.num_workers,
        num_ps=arguments.num_ps,
        log_dir=arguments.log_dir,
        timeout_seconds=arguments.timeout_seconds,
        python=arguments.python,
        emulation=_read_emulation(arguments),
        keep_going=arguments.keep_going,
    )


def _read_emulation(arguments: argparse.Namespace) -> ComputeEmulation | None:
    if arguments.step_seconds is None:
        if arguments.slowdown:
            raise ValueError(f"`slowdown` must go with `step_seconds`. Received: slowdown={arguments.slowdown[0]}.")
        return None
    slowdowns = [Slowdown.parse(text) for texts in arguments.slowdown for text in texts.split(",")]
    return ComputeEmulation(step_seconds=arguments.step_seconds, slowdowns=tuple(slowdowns), seed=arguments.seed)


class _Launcher:
    """One job, from its first process to the report."""

    def __init__(self, options: LaunchOptions):
        self._options = options
        self._tasks = make_tasks(num_workers=options.num_workers, num_ps=options.num_ps)
        self._log_dir = _make_log_dir(options.log_dir)
        self._meter = launch_report.ProcessorMeter()
        self._console = Console(sys.stdout)
        self._filter = OutputFilter()
        self._processes: dict[Task, Process] = {}

    def run(self) -> int:
        """Runs the job. Returns the exit code.

        Blocks: until all processes have ended; the user's signals, a failure and the timeout end them.
        """
        started = time.monotonic()
        self._meter.sample()
        with contextlib.closing(self._console):
            self._say(f"{_count(self._tasks)}; logs in {self._log_dir}")
            outputs = {task: self._open_output(task) for task in self._tasks}
            self._remove_step_times()  # of an earlier job with this directory
            with _received_signals() as signals:
                supervisor = self._run_processes(outputs, signals)
            report = launch_report.JobReport(
                tasks=[self._report_task(task, outputs[task], supervisor) for task in self._tasks],
                seconds=time.monotonic() - started,
                outcome=supervisor.outcome,
                signum=signals[0] if signals else None,
                emulation=self._options.emulation,
                processor_use=self._meter.measure(map(self._step_times_path, self._tasks)),
            )
            self._remove_step_times()
            self._write_summary(report)
            for line in report.lines():
                self._say(line)
            self._say(f"logs in {self._log_dir}")
        return report.exit_code

    def _write_summary(self, report: launch_report.JobReport) -> None:
        path = os.path.join(self._log_dir, "launch.json")
        try:
            report.write(path)
        except OSError as error:  # A full disk says nothing about the job.
            self._say(f"cannot write {path}: {error}")

    def _run_processes(self, outputs: dict[Task, TaskOutput], signals: list[int]) -> _Supervisor:
        with contextlib.ExitStack() as stack:
            reader = OutputReader(list(outputs.values()), show=self._show)
            stack.callback(reader.close)
            server = stack.enter_context(contextlib.closing(ProcessServer()))
            ports = stack.enter_context(PortReservation(len(self._tasks)))
            self._start(server, outputs, ports)
            supervisor = _Supervisor(server, self._processes, self._options, signals, self._say)
            supervisor.run(self._meter.sample)
        for output in outputs.values():
            for line in self._filter.flush(output.name):
                self._console.write(output.name, line)
        return supervisor

    def _start(self, server: ProcessServer, outputs: dict[Task, TaskOutput], ports: PortReservation) -> None:
        environments = task_environments(self._tasks, ports.ports, self._base_environment())
        command = [self._options.python, self._options.script, *self._options.script_arguments]
        ports.release()
        for task in self._tasks:
            environment = {**environments[task], **self._emulation_environment(task)}
            self._processes[task] = server.start(argv=command, environment=environment, output=outputs[task].write_end)
            outputs[task].close_write_end()

    def _base_environment(self) -> dict[str, str]:
        # Lines are to be seen when they are printed, and a crash in native code is to tell where.
        return {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", **os.environ}

    def _emulation_environment(self, task: Task) -> dict[str, str]:
        if self._options.emulation is None or task.type != "worker":
            return {}
        return {**self._options.emulation.to_environment(), STEP_TIMES_PATH: self._step_times_path(task)}

    def _open_output(self, task: Task) -> TaskOutput:
        path = os.path.join(self._log_dir, f"{task.file_stem}.log")
        return TaskOutput(name=str(task), log_path=path, num_kept_lines=1)

    def _step_times_path(self, task: Task) -> str:
        return os.path.join(self._log_dir, f"{task.file_stem}.step_times")

    def _remove_step_times(self) -> None:
        for task in self._tasks:
            with contextlib.suppress(FileNotFoundError):
                os.remove(self._step_times_path(task))

    def _report_task(self, task: Task, output: TaskOutput, supervisor: _Supervisor) -> launch_report.TaskReport:
        process = self._processes[task]
        return launch_report.TaskReport(
            task=task,
            exit_code=-signal.SIGKILL if process.running else process.exit_code,  # the system is slow to end it
            seconds=process.seconds,
            end_time=process.end_time,
            ended_by_launcher=task in supervisor.ended,
            log_path=output.log_path,
            last_words=self._last_words(output, process.exit_code),
        )

    def _last_words(self, output: TaskOutput, exit_code: int) -> str:
        """The exception that ended a process, else what it has printed last."""
        exception = self._filter.last_exception(output.name) if exit_code == _UNCAUGHT_EXCEPTION else None
        return exception or next(iter(output.lines()[-1:]), "")

    def _show(self, output: TaskOutput, line: str) -> None:
        for shown in self._filter.feed(output.name, line):
            self._console.write(output.name, shown)

    def _say(self, line: str) -> None:
        self._console.write("launch", line, may_be_left_out=False)


class _Supervisor:
    """Waits for a job's outcome, then ends what still runs.

    Attributes:
      outcome: How the job came to its end.
      ended: The tasks that ended after the launcher had signalled them.
    """

    def __init__(
        self,
        server: ProcessServer,
        processes: dict[Task, Process],
        options: LaunchOptions,
        signals: list[int],
        say: Callable[[str], None],
    ):
        self._server = server
        self._processes = processes
        self._options = options
        self._deadline = time.monotonic() + (options.timeout_seconds or float("inf"))
        self._signals = signals
        self._say = say
        self.outcome: Outcome | None = None
        self.ended: set[Task] = set()

    def run(self, on_poll: Callable[[], None]) -> None:
        """Blocks until all processes have ended; calls `on_poll` ten times a second."""
        while self.outcome is None:
            on_poll()
            self._server.wait_until(self._find_outcome, _POLL_SECONDS)
            self.outcome = self._find_outcome()
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
        has_failed = any(process.exit_code for process in self._processes.values())
        is_done = not any(task.type == "worker" for task in self._running())
        if has_failed and (is_done or not self._options.keep_going):
            return Outcome.FAILED
        if is_done:
            return Outcome.COMPLETED
        return Outcome.TIMED_OUT if time.monotonic() > self._deadline else None

    def _ending(self) -> list[tuple[int | None, float]]:
        """The signals to send, each with how long to wait for its effect."""
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
                self._say(f"not done after {self._options.timeout_seconds:g} s; ending {running}")
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


@contextlib.contextmanager
def _received_signals() -> Iterator[list[int]]:
    """Collects the signals that ask this process to end, instead of following them."""
    received: list[int] = []
    signums = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
        signums.append(signal.SIGHUP)
    previous = {signum: signal.signal(signum, lambda number, _: received.append(number)) for signum in signums}
    try:
        yield received
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


def _make_log_dir(path: str | None) -> str:
    if path is None:
        return tempfile.mkdtemp(prefix="hop_tf_")
    os.makedirs(path, exist_ok=True)
    return os.path.abspath(path)


def _count(tasks: Sequence[Task]) -> str:
    numbers = collections.Counter(task.type for task in tasks)
    names = {"worker": "worker", "ps": "parameter server"}
    return ", ".join(f"{number} {names[name]}{'s' * (number > 1)}" for name, number in numbers.items())

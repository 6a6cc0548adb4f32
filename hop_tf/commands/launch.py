"""`hop_tf launch`: starts a training script once per worker on this machine and sees the job through."""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import glob
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence

from hop_tf.commands import launch_report
from hop_tf.commands.launch_supervisor import Limits, Restarts, Supervisor
from hop_tf.emulation import STEP_TIMES_PATH, ComputeEmulation, Slowdown
from hop_tf.processes.group import Process, ProcessServer
from hop_tf.processes.local_cluster import PortReservation, ProcessError, Task, make_tasks, task_environments
from hop_tf.processes.output import Console, OutputReader, TaskOutput
from hop_tf.processes.output_filter import OutputFilter, is_left_out

# Python's exit code then.
_UNCAUGHT_EXCEPTION = 1
# How long the last lines of a process may take to be read after its end.
_OUTPUT_SECONDS = 0.5
_NOTHING = re.compile(r"(?!)")
# What the names of files have in between, of processes that were started again.
_RESTARTS = ".restart*"

_DESCRIPTION = """\
Starts a training script once per worker on this machine, each with its own TF_CONFIG, and sees the job through.

Lines of all processes are printed with the process's name, and written to a log file each. The first process that
fails is named at the end, its exit code (128 + signal number if a signal ended it) becomes the launcher's, and the
others are ended, unless --keep_going or --restart is given. The job is done when all workers are: parameter servers
are ended then. Ctrl-C is passed on to all processes; a second one ends them. No process survives the launcher.
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
      restart: How many times each process is started again after it has failed; the others run on.

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
    restart: int = 0

    def __post_init__(self):
        if self.restart < 0:
            raise ValueError(f"`restart` must not be negative. Received: restart={self.restart}.")
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
    add(
        "--restart",
        type=int,
        default=0,
        metavar="TIMES",
        help="start each process again that fails, so many times, while the others run on (default: %(default)s)",
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
        restart=arguments.restart,
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
        self._filtering = threading.Lock()
        self._environments: dict[Task, dict[str, str]] = {}
        # Of each task, its process and that one's output, and how former ones have ended.
        self._processes: dict[Task, Process] = {}
        self._outputs: dict[Task, TaskOutput] = {}
        self._earlier: dict[Task, list[launch_report.TaskReport]] = {task: [] for task in self._tasks}

    def run(self) -> int:
        """Runs the job. Returns the exit code.

        Blocks: until all processes have ended; the user's signals, a failure and the timeout end them.
        """
        started = time.monotonic()
        self._meter.sample()
        with contextlib.closing(self._console):
            self._say(f"{_count(self._tasks)}; logs in {self._log_dir}")
            self._remove_former_files()
            with _received_signals() as signals:
                supervisor = self._run_processes(signals)
            report = launch_report.JobReport(
                tasks=[self._report_task(task, task in supervisor.ended) for task in self._tasks],
                seconds=time.monotonic() - started,
                outcome=supervisor.outcome,
                signum=signals[0] if signals else None,
                emulation=self._options.emulation,
                processor_use=self._meter.measure(self._paths("step_times")),
            )
            for path in self._paths("step_times"):
                os.remove(path)
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

    def _run_processes(self, signals: list[int]) -> Supervisor:
        with contextlib.ExitStack() as stack:
            readers = stack.enter_context(contextlib.ExitStack())
            server = stack.enter_context(contextlib.closing(ProcessServer()))
            ports = stack.enter_context(PortReservation(len(self._tasks)))
            self._environments = task_environments(self._tasks, ports.ports, self._base_environment())
            ports.release()
            self._start(self._tasks, server, readers)
            options = self._options
            restarts = Restarts(
                options.restart,
                self._processes,
                start=lambda task: self._start_again(task, server, readers),
                describe=self._describe_end,
                say=self._say,
            )
            limits = Limits(
                timeout_seconds=options.timeout_seconds, keep_going=options.keep_going or options.restart > 0
            )
            supervisor = Supervisor(server, self._processes, limits, restarts, signals, self._say)
            supervisor.run(self._meter.sample)
        for output in self._outputs.values():
            self._flush(output)
        return supervisor

    def _start(self, tasks: Sequence[Task], server: ProcessServer, readers: contextlib.ExitStack) -> None:
        """Starts a process for each task; what reads their output is closed with `readers`."""
        self._outputs.update({task: self._open_output(task) for task in tasks})
        outputs = [self._outputs[task] for task in tasks]
        readers.callback(OutputReader(outputs, show=self._show).close)
        command = [self._options.python, self._options.script, *self._options.script_arguments]
        for task, output in zip(tasks, outputs, strict=True):
            environment = {**self._environments[task], **self._emulation_environment(task)}
            self._processes[task] = server.start(argv=command, environment=environment, output=output.write_end)
            output.close_write_end()

    def _start_again(self, task: Task, server: ProcessServer, readers: contextlib.ExitStack) -> None:
        server.remove([self._processes[task]])  # What it has left behind may hold its port.
        self._wait_for_output(task)
        self._flush(self._outputs[task])
        self._earlier[task].append(self._report_task(task, ended_by_launcher=False))
        self._filter.forget(str(task))
        self._start([task], server, readers)

    def _describe_end(self, task: Task) -> str:
        self._wait_for_output(task)
        report = self._report_task(task, ended_by_launcher=False)
        return f"{report.how}: {report.last_words}" if report.last_words else report.how

    def _wait_for_output(self, task: Task) -> None:
        """Waits for a moment until all is read that an ended process has printed."""
        self._outputs[task].wait_for(_NOTHING, _OUTPUT_SECONDS)

    def _base_environment(self) -> dict[str, str]:
        # Lines are to be seen when they are printed, and a crash in native code is to tell where.
        return {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", **os.environ}

    def _emulation_environment(self, task: Task) -> dict[str, str]:
        if self._options.emulation is None or task.type != "worker":
            return {}
        return {**self._options.emulation.to_environment(), STEP_TIMES_PATH: self._path(task, "step_times")}

    def _open_output(self, task: Task) -> TaskOutput:
        return TaskOutput(name=str(task), log_path=self._path(task, "log"), num_kept_lines=1)

    def _path(self, task: Task, suffix: str) -> str:
        """A file of a task's process that is about to start."""
        number = len(self._earlier[task])
        return os.path.join(self._log_dir, f"{task.file_stem}{f'.restart{number}' if number else ''}.{suffix}")

    def _paths(self, suffix: str, of: Sequence[str] = ("", _RESTARTS)) -> list[str]:
        """Those files of all tasks' processes that are there."""
        stems = [os.path.join(glob.escape(self._log_dir), task.file_stem) for task in self._tasks]
        return [path for stem in stems for each in of for path in glob.glob(f"{stem}{each}.{suffix}")]

    def _remove_former_files(self) -> None:
        """Those of an earlier job with this directory that this one may not overwrite."""
        for path in (*self._paths("step_times"), *self._paths("log", [_RESTARTS])):
            os.remove(path)

    def _report_task(self, task: Task, ended_by_launcher: bool) -> launch_report.TaskReport:
        process, output = self._processes[task], self._outputs[task]
        return launch_report.TaskReport(
            task=task,
            exit_code=-signal.SIGKILL if process.running else process.exit_code,  # the system is slow to end it
            seconds=process.seconds,
            end_time=process.end_time,
            ended_by_launcher=ended_by_launcher,
            log_path=output.log_path,
            last_words=self._last_words(output, process.exit_code),
            earlier=tuple(self._earlier[task]),
        )

    def _last_words(self, output: TaskOutput, exit_code: int) -> str:
        """The exception that ended a process, else what it has printed last."""
        exception = self._filter.last_exception(output.name) if exit_code == _UNCAUGHT_EXCEPTION else None
        last = next(iter(output.lines()[-1:]), "")
        return exception or ("" if is_left_out(last) else last)

    def _show(self, output: TaskOutput, line: str) -> None:
        with self._filtering:
            for shown in self._filter.feed(output.name, line):
                self._console.write(output.name, shown)

    def _flush(self, output: TaskOutput) -> None:
        with self._filtering:
            for line in self._filter.flush(output.name):
                self._console.write(output.name, line)

    def _say(self, line: str) -> None:
        self._console.write("launch", line, may_be_left_out=False)


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

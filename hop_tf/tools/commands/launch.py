"""`hop_tf launch`: starts a training script once per worker, here or on other machines, and supervises the job."""

from __future__ import annotations

import collections
import contextlib
import glob
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TextIO

from hop_tf.options import STACKS_VARIABLE
from hop_tf.tools.commands import launch_report
from hop_tf.tools.commands.launch_options import LaunchOptions, make_parser, read_options
from hop_tf.tools.commands.launch_progress import TableConsole, WaitWatch
from hop_tf.tools.commands.launch_supervisor import Limits, Restarts, Supervisor
from hop_tf.tools.emulation import STEP_TIMES_PATH
from hop_tf.tools.processes.group import Process, ProcessServer
from hop_tf.tools.processes.hosts import Command, host_commands
from hop_tf.tools.processes.local_cluster import PortReservation, ProcessError, Task, make_tasks, task_environments
from hop_tf.tools.processes.output import Console, OutputReader, TaskOutput
from hop_tf.tools.processes.output_filter import OutputFilter, is_left_out

# Python's exit code after an uncaught exception.
_UNCAUGHT_EXCEPTION = 1
# The time for reading the last lines of a process after its end.
_OUTPUT_SECONDS = 0.5
_NOTHING = re.compile(r"(?!)")
# Pattern of the part of a file name that marks the files of restarted processes.
_RESTARTS = ".restart*"


def main(argv: Sequence[str], command: str = "launch") -> int:
    """Runs `hop_tf launch` with the arguments `argv`, or another `command` ("plan"). Returns the exit code."""
    parser = make_parser(command)
    arguments = parser.parse_args(argv)
    try:
        options = read_options(arguments)
    except ValueError as error:
        parser.error(str(error))
    try:
        return _Launcher(options).run()
    except (ProcessError, OSError) as error:
        print(f"hop_tf {command}: {error}", file=sys.stderr)
        return 1


class _Launcher:
    """One job, from its first process to the report."""

    def __init__(self, options: LaunchOptions):
        self._options = options
        self._tasks = make_tasks(num_workers=options.num_workers, num_ps=options.num_ps)
        self._log_dir = _make_log_dir(options.log_dir)
        self._meter = launch_report.ProcessorMeter()
        self._filter = OutputFilter()
        self._filtering = threading.Lock()
        self._commands: dict[Task, Command] = {}
        # Each task's process, the output of that process, and the reports of its earlier processes.
        self._processes: dict[Task, Process] = {}
        self._outputs: dict[Task, TaskOutput] = {}
        self._earlier: dict[Task, list[launch_report.TaskReport]] = {task: [] for task in self._tasks}
        self._console = self._make_console(sys.stdout)

    def run(self) -> int:
        """Runs the job. Returns the exit code.

        Blocks: until all processes have ended. The user's signals, a failure and the timeout end them.
        """
        started = time.monotonic()
        self._meter.sample()
        with contextlib.closing(self._console):
            self._say(f"{_count(self._tasks)}{_describe_hosts(self._options)}; logs in {self._log_dir}")
            self._remove_former_files()
            with _received_signals() as signals:
                supervisor = self._run_processes(signals)
            report = launch_report.JobReport(
                tasks=[
                    self._report_task(task, task in supervisor.ended, not supervisor.restarts.is_unneeded(task))
                    for task in self._tasks
                ],
                seconds=time.monotonic() - started,
                outcome=supervisor.outcome,
                signum=signals[0] if signals else None,
                emulation=self._options.emulation,
                processor_use=self._meter.measure(self._paths("step_times")) if self._options.is_local else None,
            )
            for path in self._paths("step_times"):
                os.remove(path)
            self._write_summary(report)
            for line in report.lines():
                self._say(line)
            self._say(f"logs in {self._log_dir}")
        return report.exit_code

    def _make_console(self, stream: TextIO) -> Console:
        """Makes a console, with a live table on a terminal if `rich` is installed."""
        if not self._options.is_verbose and stream.isatty():
            with contextlib.suppress(ImportError):
                return TableConsole(
                    stream,
                    names=map(str, self._tasks),
                    unfinished=lambda: {output.name: output.unfinished for output in list(self._outputs.values())},
                )
        return Console(stream)

    def _write_summary(self, report: launch_report.JobReport) -> None:
        path = os.path.join(self._log_dir, "launch.json")
        try:
            report.write(path)
        except OSError as error:  # A full disk does not make the job fail.
            self._say(f"cannot write {path}: {error}")

    def _run_processes(self, signals: list[int]) -> Supervisor:
        with contextlib.ExitStack() as stack:
            readers = stack.enter_context(contextlib.ExitStack())
            server = stack.enter_context(contextlib.closing(ProcessServer()))
            self._commands = self._make_commands(stack)
            self._start(self._tasks, server, readers)
            if isinstance(self._console, TableConsole) and self._options.is_local:
                configs = {task: command.environment["TF_CONFIG"] for task, command in self._commands.items()}
                stack.enter_context(WaitWatch(configs, self._console.progress))
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
        """Starts a process for each task. The reader of the processes' output is closed with `readers`."""
        self._outputs.update({task: self._open_output(task) for task in tasks})
        outputs = [self._outputs[task] for task in tasks]
        readers.callback(OutputReader(outputs, show=self._show).close)
        for task, output in zip(tasks, outputs, strict=True):
            command = self._commands[task]
            environment = {**command.environment, **self._file_environment(task)}
            self._processes[task] = server.start(argv=command.argv, environment=environment, output=output.write_end)
            output.close_write_end()

    def _start_again(self, task: Task, server: ProcessServer, readers: contextlib.ExitStack) -> None:
        server.remove([self._processes[task]])  # A stray child process may hold the task's port.
        self._wait_for_output(task)
        self._flush(self._outputs[task])
        self._earlier[task].append(self._report_task(task, ended_by_launcher=False))
        self._filter.forget(str(task))
        self._start([task], server, readers)

    def _describe_end(self, task: Task) -> str:
        self._wait_for_output(task)
        report = self._report_task(task, ended_by_launcher=False)
        return report.how + (report.saying(report.last_words) if report.last_words else "")

    def _wait_for_output(self, task: Task) -> None:
        """Waits for the rest of an ended process's output, at most `_OUTPUT_SECONDS`."""
        self._outputs[task].wait_for(_NOTHING, _OUTPUT_SECONDS)

    def _make_commands(self, stack: contextlib.ExitStack) -> dict[Task, Command]:
        """Makes the commands that start the tasks. On this machine, ports are reserved until `stack` is closed."""
        options = self._options
        # With these variables, lines appear as soon as they are printed, and a crash in native code prints a traceback.
        defaults = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
        if options.hosts is not None:
            return host_commands(
                self._tasks,
                options.hosts,
                python=options.python,
                script=options.script,
                arguments=options.script_arguments,
                environment={**defaults, **options.environment},
            )
        ports = stack.enter_context(PortReservation(len(self._tasks)))
        base = {**defaults, **os.environ, **options.environment}
        environments = task_environments(self._tasks, ports.ports, base)
        ports.release()
        argv = [options.python, options.script, *options.script_arguments]
        return {task: Command(argv, environment) for task, environment in environments.items()}

    def _file_environment(self, task: Task) -> dict[str, str]:
        """The variables with the paths of the files that a process on this machine writes for the report."""
        if not self._options.is_local or task.type != "worker":
            return {}
        paths = {STACKS_VARIABLE: self._path(task, "stacks")}
        if self._options.emulation is None:
            return paths
        return {**paths, **self._options.emulation.to_environment(), STEP_TIMES_PATH: self._path(task, "step_times")}

    def _open_output(self, task: Task) -> TaskOutput:
        return TaskOutput(name=str(task), log_path=self._path(task, "log"), num_kept_lines=1)

    def _path(self, task: Task, suffix: str) -> str:
        """The path of a file that a task's current or next process writes."""
        number = len(self._earlier[task])
        return os.path.join(self._log_dir, f"{task.file_stem}{f'.restart{number}' if number else ''}.{suffix}")

    def _paths(self, suffix: str, of: Sequence[str] = ("", _RESTARTS)) -> list[str]:
        """The existing files with this suffix, of all processes of all tasks."""
        stems = [os.path.join(glob.escape(self._log_dir), task.file_stem) for task in self._tasks]
        return [path for stem in stems for each in of for path in glob.glob(f"{stem}{each}.{suffix}")]

    def _remove_former_files(self) -> None:
        """Removes files that an earlier job left in this directory, and that this job might not overwrite."""
        former = (*self._paths("step_times"), *self._paths("stacks"), *self._paths("log", [_RESTARTS]))
        for path in former:
            os.remove(path)

    def _report_task(self, task: Task, ended_by_launcher: bool, was_needed: bool = True) -> launch_report.TaskReport:
        process, output = self._processes[task], self._outputs[task]
        return launch_report.TaskReport(
            task=task,
            exit_code=-signal.SIGKILL if process.running else process.exit_code,  # Killed, but not yet ended.
            seconds=process.seconds,
            end_time=process.end_time,
            ended_by_launcher=ended_by_launcher,
            log_path=output.log_path,
            stacks_path=path if os.path.exists(path := self._path(task, "stacks")) else None,
            last_words=self._last_words(output, process.exit_code),
            earlier=tuple(self._earlier[task]),
            was_needed=was_needed,
        )

    def _last_words(self, output: TaskOutput, exit_code: int) -> str:
        """The exception that ended a process, or otherwise the last line that it printed."""
        exception = self._filter.last_exception(output.name) if exit_code == _UNCAUGHT_EXCEPTION else None
        last = next(iter(output.lines()[-1:]), "")
        return exception or ("" if is_left_out(last) else last)

    def _show(self, output: TaskOutput, line: str) -> None:
        if self._options.is_verbose:
            self._console.write(output.name, line)
            return
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
    """Collects the signals that ask this process to end. They do not end the process."""
    received: list[int] = []
    signums = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # `nohup` makes processes ignore it.
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


def _describe_hosts(options: LaunchOptions) -> str:
    return "" if options.hosts is None else f" on {', '.join(host.name for host in options.hosts.hosts)}"

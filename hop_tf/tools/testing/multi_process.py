"""`MultiProcessRunner`: runs a function in the processes of a cluster on this machine, for tests."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import os
import pickle
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from absl import logging

from hop_tf.errors import HopError
from hop_tf.tools.processes.group import Process, ProcessServer
from hop_tf.tools.processes.local_cluster import PortReservation, Task, make_tasks, task_environments
from hop_tf.tools.processes.output import OutputReader, TaskOutput
from hop_tf.tools.processes.server import STACKS_SIGNAL
from hop_tf.tools.testing import child

DEFAULT_PRELOAD = (
    *("tensorflow", "keras", "grpc", "hop_tf.tools.testing"),
    *(f"hop_tf.strategies.{name}" for name in ("canary", "dts", "hop", "pipe_sgd", "shat")),
)

_NUM_TAIL_LINES = 100
_STACKS_SECONDS = 1.0
_KILL_SECONDS = 10.0

_fork_servers: dict[tuple[str, ...], ProcessServer] = {}
_fork_servers_lock = threading.Lock()


class MultiProcessError(HopError, AssertionError):
    """Raised if a process of a multi-process test failed, hung, or did not print an awaited line.

    The message ends with the last lines of every process's log.
    """


@dataclasses.dataclass(frozen=True)
class ProcessResult:
    """The result of one process.

    Attributes:
      task: The task of the process, for instance `Task("worker", 2)`.
      exit_code: The exit code, or minus the number of the signal that ended the process.
      value: The value of the function. None if it did not return, and for scripts.
      output: The whole output of the process, including standard error.
    """

    task: Task
    exit_code: int
    value: Any
    output: str


@dataclasses.dataclass(frozen=True)
class Results:
    """The results of all processes. `results[rank]` is the result of a worker.

    Attributes:
      workers: The workers' results, in the order of their ranks.
      ps: The parameter servers' results.
    """

    workers: tuple[ProcessResult, ...]
    ps: tuple[ProcessResult, ...] = ()

    def __getitem__(self, rank: int) -> ProcessResult:
        return self.workers[rank]

    @property
    def values(self) -> list[Any]:
        """The value of the function in each worker."""
        return [result.value for result in self.workers]

    def raise_for_errors(self, *, except_ranks: Sequence[int] = ()) -> Results:
        """Raises MultiProcessError if a process did not end with exit code 0. Otherwise returns these results.

        Args:
          except_ranks: Workers that may end with any exit code, for instance because the test killed them.
        """
        failed = [
            result
            for result in self.workers + self.ps
            if result.exit_code != 0 and not (result.task.type == "worker" and result.task.index in except_ranks)
        ]
        if failed:
            codes = ", ".join(f"{result.task} ended with exit code {result.exit_code}" for result in failed)
            tails = [_format_tail(result.task, result.output.splitlines()) for result in self.workers + self.ps]
            raise MultiProcessError("\n".join([codes, *tails]))
        return self


class MultiProcessRunner:
    """Runs a function, or a script, in every process of a cluster on this machine.

    Each process has its `TF_CONFIG`, its share of the cores, and a process group of its own. No process outlives the
    runner, the test, or the interpreter that runs the test, even if the interpreter is killed.

        def train(num_epochs):
            strategy = hop_tf.HopStrategy()
            ...
            return model.get_weights()

        with MultiProcessRunner(train, num_workers=4, args=(2,)) as runner:
            results = runner.join().raise_for_errors()
        weights = results.values  # one list per rank

    Unless `preload` is empty the processes are forked from a server that has only imported those modules. This is safe
    because the server has a single thread. The server is started once per interpreter. So a process starts in a
    fraction of a second instead of the seconds that TensorFlow takes to import. Environment variables that a preloaded
    module reads when it is imported must be set before the first runner starts.

    Args:
      target: A function of a module's top level, or the path of a Python script. The file of a function's module is
        loaded in every process, and need not be importable by name. The value of a function must be picklable.
      num_workers: Number of workers, at least 1.
      args: Arguments of the function (picklable), or of the script (strings).
      env: Environment variables, in addition to this process's.
      timeout_seconds: Time from the start after which everything is killed and `join` raises. Default 120.
      num_ps: Number of parameter servers, which run the same target.
      log_dir: Directory for the logs, `worker_0.log` and so on, or None for one that is removed at the end.
      preload: Modules to import once, or empty for a fresh interpreter per process.

    Raises:
      ValueError: If an argument is out of range.
      TypeError: If `target` is neither a function of a module's top level nor a path.
    """

    def __init__(
        self,
        target: Callable[..., Any] | str | os.PathLike,
        num_workers: int,
        *,
        args: Sequence[Any] = (),
        env: Mapping[str, str] | None = None,
        timeout_seconds: float = 120.0,
        num_ps: int = 0,
        log_dir: str | os.PathLike | None = None,
        preload: Sequence[str] = DEFAULT_PRELOAD,
    ):
        if not timeout_seconds > 0:
            raise ValueError(f"`timeout_seconds` must be positive. Received: timeout_seconds={timeout_seconds}.")
        self._specification = _specify(target, args)
        self._tasks = make_tasks(num_workers=num_workers, num_ps=num_ps)
        self._env = dict(env or {})
        self._timeout_seconds = timeout_seconds
        self._log_dir = None if log_dir is None else os.path.abspath(log_dir)
        self._preload = tuple(preload)
        self._readers = contextlib.ExitStack()
        self._resources = contextlib.ExitStack()
        self._server: ProcessServer | None = None
        self._directory: str | None = None
        self._outputs: dict[Task, TaskOutput] = {}
        self._processes: dict[Task, Process] = {}
        self._environments: dict[Task, dict[str, str]] = {}
        self._num_restarts = 0
        self._deadline = float("inf")

    def start(self) -> MultiProcessRunner:
        """Starts all processes. Returns this runner.

        Raises:
          RuntimeError: If the runner has been started before.
          ProcessError: If a process or the server cannot be started.
        """
        if self._directory is not None:
            raise RuntimeError("A MultiProcessRunner can be started only once.")
        self._directory = tempfile.mkdtemp(prefix="hop_tf_test_")
        self._resources.callback(shutil.rmtree, self._directory)
        with self._close_on_error():
            self._server = self._find_server()
            self._start_processes()
        return self

    @property
    def addresses(self) -> list[str]:
        """The "host:port" of each worker, after the start."""
        environment = next(iter(self._environments.values()))
        return json.loads(environment["TF_CONFIG"])["cluster"]["worker"]

    def join(self) -> Results:
        """Waits for all processes to end.

        Returns:
          Their results.

        Raises:
          RuntimeError: If the processes have not been started.
          MultiProcessError: If some processes still run at the deadline. The stacks of their threads are in the
            message, and all processes are killed.

        Blocks: until all have ended, at most until the deadline.
        """
        if self._server is None:
            raise RuntimeError("A MultiProcessRunner must be started before `join`.")
        with self._close_on_error():
            remaining_seconds = max(0.0, self._deadline - time.monotonic())
            if not self._server.wait_until(lambda: not self._running(), remaining_seconds):
                running = ", ".join(map(str, self._running()))
                self._print_stacks()
                raise MultiProcessError(self._describe(f"{running} still ran after {self._timeout_seconds:g} s."))
            self._stop_processes()
            results = [self._result(task) for task in self._tasks]
        self.close()
        return Results(
            workers=tuple(result for result in results if result.task.type == "worker"),
            ps=tuple(result for result in results if result.task.type == "ps"),
        )

    def wait_for_output(
        self, rank: int, pattern: str, timeout_seconds: float | None = None, *, task_type: str = "worker"
    ) -> re.Match:
        """Waits until a process has printed a line in which `pattern` is found. Earlier lines count, too.

        So a test acts at a known point of the program, not after some time.

        Args:
          rank: The worker's rank, or the index of another task.
          pattern: A regular expression.
          timeout_seconds: Longest time to wait; until the deadline by default.
          task_type: "worker" or "ps".

        Returns:
          The match.

        Raises:
          MultiProcessError: If the process or the time ends before such a line.
        """
        task = self._find_task(rank, task_type)
        remaining_seconds = max(0.0, self._deadline - time.monotonic())
        seconds = remaining_seconds if timeout_seconds is None else min(timeout_seconds, remaining_seconds)
        output = self._outputs[task]
        match = output.wait_for(re.compile(pattern), seconds)
        if match is None:
            state = "ended without printing" if output.at_end else f"did not within {seconds:.1f} s print"
            self._print_stacks()
            raise MultiProcessError(self._describe(f"{task} {state} a line like {pattern!r}."))
        return match

    def send_signal(self, rank: int, signum: int, *, task_type: str = "worker") -> None:
        """Sends a signal to a process and to the processes that it started."""
        self._processes[self._find_task(rank, task_type)].send_signal(signum)

    def kill(self, rank: int, *, task_type: str = "worker") -> None:
        """Kills a process (SIGKILL). Blocks until it is dead."""
        process = self._processes[self._find_task(rank, task_type)]
        process.send_signal(signal.SIGKILL)
        self._server.wait_until(lambda: not process.running, _KILL_SECONDS)

    def restart(self, rank: int, *, task_type: str = "worker") -> None:
        """Starts an ended process again, with the same environment, as a supervisor would.

        From now on, output and result are those of the new process.

        Raises:
          RuntimeError: If the process still runs.
        """
        task = self._find_task(rank, task_type)
        if self._processes[task].running:
            raise RuntimeError(f"{task} must have ended before it is started again; see `kill`.")
        self._server.remove([self._processes[task]])
        self._num_restarts += 1
        self._open_outputs([task], f".restart_{self._num_restarts}")
        self._start_process(task)

    def interrupt(self, rank: int, *, task_type: str = "worker") -> None:
        """Sends SIGINT, as Ctrl-C does."""
        self.send_signal(rank, signal.SIGINT, task_type=task_type)

    def pause(self, rank: int, *, task_type: str = "worker") -> None:
        """Freezes a process (SIGSTOP) until `resume`."""
        self.send_signal(rank, signal.SIGSTOP, task_type=task_type)

    def resume(self, rank: int, *, task_type: str = "worker") -> None:
        """Lets a frozen process go on (SIGCONT)."""
        self.send_signal(rank, signal.SIGCONT, task_type=task_type)

    def close(self) -> None:
        """Kills running processes and removes temporary files. May be called twice; `join` does it, too."""
        self._stop_processes()
        self._resources.close()

    def __enter__(self) -> MultiProcessRunner:
        return self if self._directory is not None else self.start()

    def __exit__(self, exc_type, *exc_info) -> None:
        if exc_type is not None and not issubclass(exc_type, MultiProcessError) and self._outputs:
            logging.error("%s", self._describe("The test failed while its processes were there."))
        self.close()

    @contextlib.contextmanager
    def _close_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _find_task(self, rank: int, task_type: str) -> Task:
        task = Task(task_type, rank)
        if task not in self._processes:
            raise ValueError(f"`rank` must be that of a process that was started. Received: {task_type} {rank}.")
        return task

    def _find_server(self) -> ProcessServer:
        if self._preload:
            return start_fork_server(preload=self._preload)
        return self._resources.enter_context(contextlib.closing(ProcessServer()))

    def _start_processes(self) -> None:
        if self._preload and not self._can_fork:
            logging.warning("Importing %s started threads: processes are not forked.", self._preload)
        with open(self._specification_path, "wb") as file:
            pickle.dump(self._specification, file)
        ports = self._resources.enter_context(PortReservation(len(self._tasks)))
        base = {"PYTHONUNBUFFERED": "1", **os.environ, **self._env}
        self._environments = task_environments(self._tasks, ports.ports, base)
        self._open_outputs(self._tasks)
        self._deadline = time.monotonic() + self._timeout_seconds
        ports.release()
        for task in self._tasks:
            self._start_process(task)

    @property
    def _can_fork(self) -> bool:
        return bool(self._preload) and self._server.can_fork

    @property
    def _specification_path(self) -> str:
        return os.path.join(self._directory, "specification")

    def _open_outputs(self, tasks: Sequence[Task], suffix: str = "") -> None:
        log_dir = self._log_dir or self._directory
        os.makedirs(log_dir, exist_ok=True)
        outputs = {
            task: TaskOutput(name=str(task), log_path=os.path.join(log_dir, f"{task.file_stem}{suffix}.log"))
            for task in tasks
        }
        self._outputs.update(outputs)
        self._readers.callback(OutputReader(list(outputs.values())).close)

    def _start_process(self, task: Task) -> None:
        arguments = (self._specification_path, self._value_path(task))
        fork = self._can_fork
        self._processes[task] = self._server.start(
            output=self._outputs[task].write_end,
            environment=self._environments[task],
            call=(child.__name__, "main", arguments) if fork else None,
            argv=None if fork else [sys.executable, "-P", child.__file__, *arguments],
        )
        self._outputs[task].close_write_end()

    def _stop_processes(self) -> None:
        if self._server is not None:
            self._server.remove(list(self._processes.values()))
        self._readers.close()

    def _running(self) -> list[Task]:
        return [task for task, process in self._processes.items() if process.running]

    def _print_stacks(self) -> None:
        """Lets the running processes print the stacks of all their threads."""
        for task in self._running():
            self._processes[task].send_signal(STACKS_SIGNAL)
        self._server.wait_until(lambda: not self._running(), _STACKS_SECONDS)

    def _describe(self, problem: str) -> str:
        return "\n".join([problem, *(_format_tail(task, output.lines()) for task, output in self._outputs.items())])

    def _value_path(self, task: Task) -> str:
        return os.path.join(self._directory, f"{task.file_stem}.value")

    def _result(self, task: Task) -> ProcessResult:
        value = None
        if os.path.exists(self._value_path(task)):
            with open(self._value_path(task), "rb") as file:
                value = pickle.load(file)
        output = "\n".join(self._outputs[task].lines())
        return ProcessResult(task=task, exit_code=self._processes[task].exit_code, value=value, output=output)


def start_fork_server(*, preload: Sequence[str] = DEFAULT_PRELOAD) -> ProcessServer:
    """Starts the server that runners with this `preload` share, unless it runs already. Returns at once.

    Runners call this themselves. If it is called early, for instance while tests are collected, the server imports its
    modules meanwhile.
    """
    preload = tuple(preload)
    with _fork_servers_lock:
        server = _fork_servers.get(preload)
        if server is None or not server.alive:
            server = _fork_servers[preload] = ProcessServer(preload=preload)
        return server


def stop_fork_server(*, preload: Sequence[str] = DEFAULT_PRELOAD) -> None:
    """Ends the server that runners with this `preload` share. Without this call, it ends with the interpreter."""
    with _fork_servers_lock:
        server = _fork_servers.pop(tuple(preload), None)
        if server is not None:
            server.close()


def _specify(target: Callable[..., Any] | str | os.PathLike, args: Sequence[Any]) -> dict[str, Any]:
    """Describes the target, in builtin types only, because a process reads it before it can import anything else."""
    sys_path = [os.path.abspath(path) for path in sys.path]
    if isinstance(target, (str, os.PathLike)):
        if not os.path.isfile(target):
            raise ValueError(f"`target` must be a file or a function. Received: target={os.fspath(target)!r}.")
        path = os.path.abspath(target)
        return {"path": path, "function": None, "arguments": [str(value) for value in args], "sys_path": sys_path}
    module = inspect.getmodule(target)
    if not inspect.isfunction(target) or getattr(module, target.__name__, None) is not target:
        raise TypeError(f"`target` must be a function of a module's top level, or a path. Received: target={target!r}.")
    return {
        "path": os.path.abspath(module.__file__),
        "module": module.__name__,
        "function": target.__name__,
        "arguments": pickle.dumps(tuple(args)),
        "sys_path": sys_path,
    }


def _format_tail(task: Task, lines: Sequence[str]) -> str:
    tail = lines[-_NUM_TAIL_LINES:]
    return "\n".join([f"---- {task}, last {len(tail)} of {len(lines)} lines ----", *tail])

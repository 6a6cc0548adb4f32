"""Starting processes that cannot outlive their owner, watching them, and ending them."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from absl import logging

from hop_tf.tools.processes import server as process_server
from hop_tf.tools.processes.local_cluster import ProcessError

_START_SECONDS = 30.0
_CLOSE_SECONDS = 10.0


class Process:
    """A process started by a `ProcessServer`: the leader of a process group of its own.

    Attributes:
      pid: The id of the process and of its group.
      exit_code: None while the process runs. Then its exit code, or minus the number of the signal that ended it.
    """

    def __init__(self, order_id: int, condition: threading.Condition):
        self.order_id = order_id
        self._condition = condition
        self._started = time.monotonic()
        self._ended: float | None = None
        self._error: str | None = None
        self._released = False
        self.pid: int | None = None
        self.exit_code: int | None = None

    @property
    def running(self) -> bool:
        """True if the process has not ended."""
        return self.exit_code is None

    @property
    def start_time(self) -> float:
        """The time at which the process was started, on `time.monotonic`'s clock."""
        return self._started

    @property
    def end_time(self) -> float | None:
        """The time at which the process's end was noticed, on `time.monotonic`'s clock, or None."""
        return self._ended

    @property
    def seconds(self) -> float:
        """The seconds for which the process ran, or has run so far."""
        return (self._ended or time.monotonic()) - self._started

    def send_signal(self, signum: int) -> None:
        """Signals the whole group, as a terminal does. Does nothing after the process was released."""
        with self._condition:
            if not self._released:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.pid, signum)

    def _set_started(self, pid: int | None, error: str | None = None) -> None:
        with self._condition:
            self.pid, self._error = pid, error
            self._condition.notify_all()

    def _set_ended(self, exit_code: int) -> None:
        with self._condition:
            if self.exit_code is None:
                self.exit_code, self._ended = exit_code, time.monotonic()
                self._condition.notify_all()


class ProcessServer:
    """Starts processes that cannot outlive this one. `hop_tf.tools.processes.server` explains the mechanism.

    Args:
      preload: Modules to import in the server. `start(call=...)` then forks processes that already have them. That is
        safe only if `can_fork` is True.
      timeout_seconds: The longest time for the server to come up, including imports. The constructor does not wait.
    """

    def __init__(self, *, preload: Sequence[str] = (), timeout_seconds: float = 180.0):
        self.condition = threading.Condition()
        self._sending = threading.Lock()
        self._order_ids = itertools.count()
        self._processes: dict[int, Process] = {}  # By the id of the order that started the process.
        self._num_threads: int | None = None
        self._error: str | None = None
        self._connected = True
        self._closing = False
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed in `close`)
        self._control, theirs = socket.socketpair()
        with theirs:
            self._server = self._run(theirs.fileno())
        self._listener = threading.Thread(target=self._listen, name="hop_tf_process_server", daemon=True)
        self._listener.start()
        atexit.register(self.close)
        self._preload = list(preload)
        self._ready_by = time.monotonic() + timeout_seconds
        self._send({"sys_path": [os.path.abspath(path) for path in sys.path], "preload": self._preload})

    def _run(self, file_descriptor: int) -> subprocess.Popen:
        # One thread per numeric library: a forked process inherits the locks that other threads hold, but not these
        # threads.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        return subprocess.Popen(
            [sys.executable, "-u", "-P", process_server.__file__, str(file_descriptor)],
            env=environment,
            pass_fds=[file_descriptor],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )

    @property
    def alive(self) -> bool:
        """True if the server is still connected, and has reported no error."""
        return self._connected and self._error is None

    @property
    def can_fork(self) -> bool:
        """True if the server has only one thread, so that forking it is safe. Blocks until the server is ready."""
        self.wait_until_ready()
        return self._num_threads == 1

    def wait_until_ready(self) -> None:
        """Waits until the server has imported its modules.

        Raises:
          ProcessError: If the server does not come up, for instance because a module cannot be imported.

        Blocks: for at most the constructor's `timeout_seconds`.
        """
        remaining_seconds = max(0.0, self._ready_by - time.monotonic())
        self.wait_until(lambda: self._num_threads is not None or not self.alive, remaining_seconds)
        if self._num_threads is None:
            cause = self._error or ("it is not ready in time" if self.alive else "it ended")
            self._log.seek(0)
            printed = self._log.read().decode(errors="replace")[-2000:]
            self.close()
            raise ProcessError(f"The process server for {self._preload} did not start: {cause}. It printed:\n{printed}")

    def start(
        self,
        *,
        output: int,
        environment: Mapping[str, str],
        argv: Sequence[str] | None = None,
        call: tuple[str, str, tuple] | None = None,
    ) -> Process:
        """Starts a process with a group of its own, without a terminal and with an empty standard input.

        Args:
          output: File descriptor for standard output and standard error of the process. The caller must close its own
            copy.
          environment: All environment variables of the process.
          argv: The program and its arguments. Give either `argv` or `call`.
          call: (module, function, JSON-able arguments) to run in a fork of the server. `can_fork` must be True.

        Returns:
          The running process.

        Raises:
          ProcessError: If the process cannot be started, or the server is not up.

        Blocks: until the server is up and the process exists, which takes a few milliseconds.
        """
        self.wait_until_ready()
        process = Process(next(self._order_ids), self.condition)
        with self.condition:
            self._processes[process.order_id] = process
        order = {
            "order": "start",
            "id": process.order_id,
            "argv": None if argv is None else list(argv),
            "call": call,
            "environment": dict(environment),
            "directory": os.getcwd(),
        }
        self._send(order, output)
        self.wait_until(lambda: process.pid or process._error or not self.alive, _START_SECONDS)
        if process.pid is None:
            raise ProcessError(
                f"Cannot start {argv or call}: {process._error or 'the process server does not answer'}."
            )
        return process

    def wait_until(self, predicate: Callable[[], object], timeout_seconds: float) -> bool:
        """Waits until `predicate()` holds. It is called whenever a process starts or ends. Returns True if it holds."""
        with self.condition:
            return bool(self.condition.wait_for(predicate, timeout_seconds))

    def remove(self, processes: Sequence[Process]) -> None:
        """Kills those of `processes` that still run, and all processes that are left in their groups.

        Blocks: until the processes have ended; at most ten seconds.
        """
        for process in processes:
            if process.running:
                process.send_signal(signal.SIGKILL)
        self.wait_until(lambda: all(not process.running for process in processes), _CLOSE_SECONDS)
        for process in processes:
            self._release(process)

    def close(self) -> None:
        """Removes all processes and ends the server. May be called twice."""
        with self.condition:
            if self._closing:
                return
            self._closing = True
            processes = [process for process in self._processes.values() if process.pid is not None]
        self.remove(processes)
        atexit.unregister(self.close)
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_WR)  # The server carries out its orders, then ends.
        if self._num_threads is None:
            self._server.kill()  # It is still importing modules, and has no children.
        self._end_server()
        self._listener.join(_CLOSE_SECONDS)
        self._control.close()
        self._log.close()

    def _end_server(self) -> None:
        try:
            self._server.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            logging.error("The process server did not end by itself after %.0f s.", _CLOSE_SECONDS)
            self._server.kill()
            self._server.wait()

    def _release(self, process: Process) -> None:
        with self.condition:
            if process.running or process._released:
                return
            process._released = True
            self._processes.pop(process.order_id, None)
        if self._connected:
            self._send({"order": "release", "pid": process.pid})

    def _send(self, message: dict, *file_descriptors: int) -> None:
        try:
            with self._sending:
                process_server.send_message(self._control, message, file_descriptors)
        except OSError as error:
            if not self._closing:
                raise ProcessError(f"The process server is gone: {error}.") from error

    def _listen(self) -> None:
        while (received := process_server.receive_message(self._control)) is not None:
            self._note(received[0])
        with self.condition:
            self._connected = False
            abandoned = [process for process in self._processes.values() if process.running and process.pid]
            self.condition.notify_all()
        if abandoned and not self._closing:
            logging.error("The process server is gone. Killing the processes that it had started.")
        for process in abandoned:
            process.send_signal(signal.SIGKILL)
            process._set_ended(-signal.SIGKILL)

    def _note(self, event: dict) -> None:
        process = self._processes.get(event.get("id"))
        match event["event"]:
            case "ready":
                with self.condition:
                    self._num_threads = event["num_threads"]
                    self.condition.notify_all()
            case "failed":
                with self.condition:
                    self._error = event["error"]
                    self.condition.notify_all()
            case "started":
                process._set_started(event["pid"])
            case "refused":
                process._set_started(None, event["error"])
            case "ended":
                process._set_ended(event["exit_code"])

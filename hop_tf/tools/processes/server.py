"""A single-threaded process that starts all processes of a job, and kills them when the job's owner dies.

`hop_tf.tools.processes.group.ProcessServer` runs this file as a program, and talks to it over a socket. The program
imports only the standard library, so that it starts at once.

The reasons for a separate process, instead of children of the launcher:

- If the owner ends in any way (also by SIGKILL), the kernel closes its end of the socket. The server then kills every
  process group that it started. The server is the parent, so it knows every process from its first moment on.
  (Linux's parent-death signal is tied to the *thread* that forked, and is not passed on to grandchildren.)
- Ended processes stay unreaped until the owner releases them. So their ids, which are also the ids of their groups, are
  not given to other processes: a signal never reaches an unrelated process.
- With a single thread it is safe to fork without exec. Every child then has the imported modules at once.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable

# Asks a process of `hop_tf.testing` for the stacks of its threads. Until a process has installed its handler, it
# ignores the signal.
STACKS_SIGNAL = signal.SIGUSR1

_LENGTH = struct.Struct("<I")


def send_message(channel: socket.socket, message: dict, file_descriptors: tuple[int, ...] = ()) -> None:
    """Sends a JSON message, and the file descriptors that go with it, over a Unix socket."""
    body = json.dumps(message).encode()
    socket.send_fds(channel, [_LENGTH.pack(len(body))], list(file_descriptors))
    channel.sendall(body)


def receive_message(channel: socket.socket) -> tuple[dict, list[int]] | None:
    """Receives a message of `send_message`. Returns None if the other side is gone. Blocks until either happens."""
    with contextlib.suppress(ConnectionError):
        header, file_descriptors, _, _ = socket.recv_fds(channel, _LENGTH.size, 8)
        header += _receive_exactly(channel, _LENGTH.size - len(header)) if header else b""
        if len(header) == _LENGTH.size:
            size = _LENGTH.unpack(header)[0]
            body = _receive_exactly(channel, size)
            if len(body) == size:
                return json.loads(body), file_descriptors
    return None


def _receive_exactly(channel: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = channel.recv(size - len(parts))
        if not part:
            break
        parts += part
    return bytes(parts)


def num_threads() -> int:
    """The number of threads of this process, including native ones; 0 if the system does not tell."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return 0


class _Server:
    """Starts processes on request and reports their ends, until the owner is gone."""

    def __init__(self, control: socket.socket):
        self._control = control
        self._running: dict[int, int] = {}  # By pid, the id of the order.
        self._ended: dict[int, int] = {}  # By pid, the id of the order, of processes that are not reaped yet.
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._control, selectors.EVENT_READ)
        self._selector.register(self._wake_receiver, selectors.EVENT_READ)

    def serve(self) -> Callable[[], None] | None:
        """Serves until the owner is gone, and then returns None. In a forked child, returns the function to run."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_sender.fileno(), warn_on_full_buffer=False)
        while True:
            readable = {key.fileobj for key, _ in self._selector.select()}
            if self._wake_receiver in readable:
                self._report_ended()
            if self._control in readable:
                received = receive_message(self._control)
                if received is None:
                    self._kill_all()
                    return None
                function = self._obey(*received)
                if function is not None:
                    return function

    def _obey(self, order: dict, file_descriptors: list[int]) -> Callable[[], None] | None:
        if order["order"] == "start":
            return self._start(order, *file_descriptors)
        self._release(order["pid"])
        return None

    def _start(self, order: dict, output: int) -> Callable[[], None] | None:
        try:
            pid = os.fork()
        except OSError as error:
            os.close(output)
            send_message(self._control, {"event": "refused", "id": order["id"], "error": str(error)})
            return None
        if pid == 0:
            return self._become_child(order, output)
        # Both sides of the fork do this, so that the group exists at once on either side. After the child's exec the
        # system refuses it here, but then the child has already done it.
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        os.close(output)
        self._running[pid] = order["id"]
        send_message(self._control, {"event": "started", "id": order["id"], "pid": pid})
        return None

    def _become_child(self, order: dict, output: int) -> Callable[[], None] | None:
        """Turns a fresh fork into the process of the order. Does not return if that process runs another program."""
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        for opened in (self._selector, self._control, self._wake_receiver, self._wake_sender):
            opened.close()
        # The program that started the owner may have ignored some signals, as shells do for background jobs.
        for signum in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(STACKS_SIGNAL, signal.SIG_IGN)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        os.chdir(order["directory"])
        if order["argv"] is None:
            return _adopt(order)
        _execute(order["argv"], order["environment"])

    def _report_ended(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_receiver.recv(4096):
                pass
        for pid, owner_id in list(self._running.items()):
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                continue
            exit_code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
            self._ended[pid] = self._running.pop(pid)
            with contextlib.suppress(ConnectionError):
                send_message(self._control, {"event": "ended", "id": owner_id, "exit_code": exit_code})

    def _release(self, pid: int) -> None:
        """Kills the processes that are left in an ended process's group, and gives its id back to the system."""
        if self._ended.pop(pid, None) is not None:
            _kill_group(pid)
            os.waitpid(pid, 0)

    def _kill_all(self) -> None:
        for pid in [*self._running, *self._ended]:
            _kill_group(pid)


def _adopt(order: dict) -> Callable[[], None]:
    """Gives a forked child its environment. Returns the function that the child has to run."""
    os.environ.clear()
    os.environ.update(order["environment"])
    # As in a new interpreter: a broken pipe is an exception, not a silent end.
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # `random` does so by itself after a fork.
    module, function, arguments = order["call"]
    return lambda: getattr(importlib.import_module(module), function)(*arguments)


def _execute(argv: list[str], environment: dict[str, str]) -> None:
    try:
        os.execvpe(argv[0], argv, environment)
    except OSError as error:
        os.write(2, f"cannot run {argv[0]}: {error}\n".encode())
    finally:
        os._exit(127)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _import_preloaded(control: socket.socket, names: list[str]) -> bool:
    try:
        for name in names:
            importlib.import_module(name)
    except Exception as error:
        traceback.print_exc()
        send_message(control, {"event": "failed", "error": f"{type(error).__name__}: {error}"})
        return False
    # This keeps children from copying memory pages when their garbage collector visits objects from before the fork.
    gc.collect()
    gc.freeze()
    return True


def main() -> None:
    """Runs a server. In a child that is forked from it, runs the child's function."""
    control = socket.socket(fileno=int(sys.argv[1]))
    received = receive_message(control)
    if received is None:
        return
    greeting, _ = received
    sys.path[:] = greeting["sys_path"]
    if not _import_preloaded(control, greeting["preload"]):
        return
    server = _Server(control)
    send_message(control, {"event": "ready", "num_threads": num_threads()})
    function = server.serve()
    # Called from here, so that a forked child ends as any program does, with exceptions, threads and exit handlers.
    if function is not None:
        del server, control
        function()


if __name__ == "__main__":
    main()

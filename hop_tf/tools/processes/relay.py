"""A process that represents one on another machine: it runs `ssh`, and passes on signals, output and the exit code.

It is run as a program, with the `ssh` command as its arguments. The order describes the process that
`hop_tf.tools.processes.remote` starts on the other side. It is in an environment variable, because all users can see
command lines. The program imports only the standard library, so that it starts at once.

Signals go as lines to the other side, because `ssh` does not pass them on. If this process ends in any way, the other
side sees the end of its input, or silence. It then ends the process that it has started.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time

ORDER_VARIABLE = "HOP_TF_REMOTE_ORDER"

# A line is sent at least this often. The other side treats silence of `SILENCE_SECONDS` as the end.
_HEARTBEAT_SECONDS = 5.0
SILENCE_SECONDS = 60.0

_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# The signals that end a process. Exit codes of 128 and more stand for signals, as in a shell.
_ENDING = {
    getattr(signal, f"SIG{name}")
    for name in ("HUP", "INT", "QUIT", "ILL", "TRAP", "ABRT", "BUS", "FPE", "KILL", "SEGV", "PIPE", "ALRM", "TERM")
}
# The exit code of shells for a program that cannot be started.
_CANNOT_START = 127
# The exit code of `ssh` if `ssh` itself has failed.
_SSH_FAILED = 255
# Part of `ssh`'s message if the server closes the connection at once, as servers do if many clients log in at the same
# time (MaxStartups).
_TURNED_AWAY = b"exchange_identification"
_MAX_RETRIES = 10
_PAUSE_SECONDS = (0.5, 1.5)
_MAX_SAID = 4096
_ERRORS_SECONDS = 1.0


def main() -> None:
    """Runs `ssh`, and ends as the process on the other side has ended. Blocks until then."""
    order = os.environ.pop(ORDER_VARIABLE).encode() + b"\n"
    program = _Ssh(sys.argv[1:])
    for signum in _PASSED_ON:
        signal.signal(signum, lambda number, _: program.pass_on(number))
    exit_code = program.run(order)
    for _ in range(_MAX_RETRIES):
        if exit_code != _SSH_FAILED or not program.was_turned_away or program.signals:
            break
        pause_seconds = random.uniform(*_PAUSE_SECONDS)
        print(f"hop_tf launch: that machine is busy; tries again in {pause_seconds:.1f} s", file=sys.stderr)
        time.sleep(pause_seconds)
        exit_code = program.run(order)
    _end_like(exit_code, sys.argv[1])


class _Ssh:
    """The program `ssh`, which may be run several times.

    Attributes:
      signals: The signals that this process has received.
    """

    def __init__(self, command: list[str]):
        self.signals: list[int] = []
        self._unsent: list[int] = []
        self._command = command
        self._channel: int | None = None
        self._said = b""

    @property
    def was_turned_away(self) -> bool:
        """True if the server has ended the last connection before authentication, so that nothing was started."""
        return _TURNED_AWAY in self._said

    def run(self, order: bytes) -> int:
        """Runs `ssh` once. Returns its exit code. Blocks until it has ended."""
        self._said = b""
        try:
            ssh = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=_ignore_signals
            )
        except OSError as error:
            print(f"hop_tf launch: cannot run {self._command[0]}: {error.strerror}", file=sys.stderr)
            return _CANNOT_START
        errors = threading.Thread(target=self._copy_errors, args=(ssh.stderr.fileno(),), daemon=True)
        errors.start()
        with contextlib.suppress(BrokenPipeError):
            ssh.stdin.write(order)
            ssh.stdin.flush()
        self._channel = ssh.stdin.fileno()
        os.set_blocking(self._channel, False)
        self._send_signals()
        while True:
            try:
                exit_code = ssh.wait(_HEARTBEAT_SECONDS)
                break
            except subprocess.TimeoutExpired:
                self._send(b"\n")
        self._channel = None
        errors.join(_ERRORS_SECONDS)  # A connection that ssh shares with others may keep the pipe open.
        return exit_code

    def pass_on(self, signum: int) -> None:
        """Sends a signal to the other side, as soon as there is a connection."""
        self.signals.append(signum)
        self._unsent.append(signum)
        if self._channel is not None:
            self._send_signals()

    def _send_signals(self) -> None:
        """Sends each signal once, even if another signal interrupts this method."""
        while self._unsent:
            self._send(b"signal %d\n" % self._unsent.pop(0))

    def _send(self, line: bytes) -> None:
        # A connection that accepts no data is dead, or the other side will treat it as dead.
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(self._channel, line)

    def _copy_errors(self, read_end: int) -> None:
        while data := os.read(read_end, 65536):
            self._said = (self._said + data)[:_MAX_SAID]
            while data:
                data = data[os.write(2, data) :]


def _ignore_signals() -> None:
    """Lets `ssh` ignore the signals for this process. `ssh` is in the same group, and would end the connection."""
    for signum in _PASSED_ON:
        signal.signal(signum, signal.SIG_IGN)


def _end_like(exit_code: int, program: str) -> None:
    if exit_code == _SSH_FAILED:
        print(f"hop_tf launch: {program} has failed, or lost the connection (exit code 255)", file=sys.stderr)
    elif exit_code - 128 in _ENDING:
        signum = exit_code - 128
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if signum != signal.SIGKILL:
            signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)
    sys.exit(exit_code if exit_code >= 0 else 128 - exit_code)


if __name__ == "__main__":
    main()

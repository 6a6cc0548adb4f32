"""A process that stands for one on another machine: it runs `ssh`, and passes on signals, output and the exit code.

It is run as a program, with the `ssh` command as its arguments. What is to be started (see `hop_tf.processes.remote`,
which runs on the other side) is in an environment variable, as all users see command lines. It imports nothing but the
standard library, so that it starts at once.

Signals go as lines to the other side, as `ssh` does not pass them on. However this process ends, the other side sees
the end of its input, or that it stays silent, and ends what it has started.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys

ORDER_VARIABLE = "HOP_TF_REMOTE_ORDER"

# A line is sent that often, whatever happens, and the other side takes silence of that time for the end.
_HEARTBEAT_SECONDS = 5.0
SILENCE_SECONDS = 60.0

_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Exit codes of 128 and more are those of signals, as in a shell. These end a process.
_ENDING = {
    getattr(signal, f"SIG{name}")
    for name in ("HUP", "INT", "QUIT", "ILL", "TRAP", "ABRT", "BUS", "FPE", "KILL", "SEGV", "PIPE", "ALRM", "TERM")
}
# As shells have it, of what cannot be started.
_CANNOT_START = 127
# With this, `ssh` tells that it has failed by itself.
_SSH_FAILED = 255


def main() -> None:
    """Runs `ssh`, and ends as the process on the other side has ended. Blocks until then."""
    order = os.environ.pop(ORDER_VARIABLE).encode() + b"\n"
    pending: list[int] = []
    for signum in _PASSED_ON:
        signal.signal(signum, lambda number, _: pending.append(number))
    try:
        ssh = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, preexec_fn=_ignore_signals)
    except OSError as error:
        print(f"hop_tf launch: cannot run {sys.argv[1]}: {error.strerror}", file=sys.stderr)
        sys.exit(_CANNOT_START)
    with contextlib.suppress(BrokenPipeError):
        ssh.stdin.write(order)
        ssh.stdin.flush()
    channel = ssh.stdin.fileno()
    os.set_blocking(channel, False)
    for signum in _PASSED_ON:
        signal.signal(signum, lambda number, _: _send(channel, b"signal %d\n" % number))
    for signum in pending:
        _send(channel, b"signal %d\n" % signum)
    while True:
        try:
            exit_code = ssh.wait(_HEARTBEAT_SECONDS)
            break
        except subprocess.TimeoutExpired:
            _send(channel, b"\n")
    _end_like(exit_code)


def _ignore_signals() -> None:
    """They are for this process: `ssh` is in its group, and would end the connection."""
    for signum in _PASSED_ON:
        signal.signal(signum, signal.SIG_IGN)


def _send(channel: int, line: bytes) -> None:
    # A connection that takes nothing is dead, or will be taken for dead on the other side.
    with contextlib.suppress(BlockingIOError, BrokenPipeError):
        os.write(channel, line)


def _end_like(exit_code: int) -> None:
    if exit_code == _SSH_FAILED:
        print(f"hop_tf launch: {sys.argv[1]} has failed, or lost the connection (exit code 255)", file=sys.stderr)
    elif exit_code - 128 in _ENDING:
        signum = exit_code - 128
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if signum != signal.SIGKILL:
            signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)
    sys.exit(exit_code if exit_code >= 0 else 128 - exit_code)


if __name__ == "__main__":
    main()

"""The other side of `hop_tf.tools.processes.relay`: runs a process on this machine for a launcher on another one.

It is run as a program by `ssh`. The first line of its input is the order: the command to start the process. The next
lines are signals, and empty lines as heartbeats of the launcher. When the input ends, or is silent for a minute, the
process is killed with all of its group. If this program is killed, its `ProcessServer` kills the process in the same
way.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from io import FileIO

from hop_tf.tools.processes.group import Process, ProcessServer
from hop_tf.tools.processes.local_cluster import ProcessError, share_of_machine
from hop_tf.tools.processes.relay import SILENCE_SECONDS

# The exit code of shells for a program that cannot be started.
_CANNOT_START = 127
_POLL_SECONDS = 1.0
# If nothing comes for this long after the process has ended, only stray processes still hold its output.
_OUTPUT_SECONDS = 2.0


def make_order(
    *,
    host: str,
    script: str,
    arguments: list[str],
    environment: Mapping[str, str],
    num_workers: int,
    index: int | None,
) -> str:
    """Returns the order, which tells the other side to start a process, as one line of JSON.

    Args:
      host: Name of the other machine, for errors.
      script: Path of the script there, relative to the working directory of this process.
      arguments: Arguments of the script.
      environment: Variables that are set in addition to those of the other machine.
      num_workers: Number of workers there.
      index: The worker's number among these, or None for a parameter server.
    """
    return json.dumps(
        {
            "host": host,
            "directory": os.getcwd(),
            "script": script,
            "arguments": arguments,
            "environment": dict(environment),
            "num_workers": num_workers,
            "index": index,
        }
    )


def main() -> int:
    """Runs the process that the first line of the input describes. Returns its exit code. Blocks until it has ended."""
    owner = FileIO(0, "rb", closefd=False)
    line = owner.readline()
    if not line.endswith(b"\n"):
        return _CANNOT_START
    order = json.loads(line)
    try:
        _enter_directory(order)
        return _run(order, owner)
    except (ProcessError, OSError) as error:
        print(f"hop_tf launch: host {order['host']}: {error}", file=sys.stderr)
        return _CANNOT_START


def _enter_directory(order: dict) -> None:
    """Changes to the launcher's working directory. Raises ProcessError if it, or the script, is missing."""
    advice = "The launcher copies nothing: this machine must have the same paths as the machine of the launcher."
    try:
        os.chdir(order["directory"])
    except OSError as error:
        raise ProcessError(f"there is no directory {order['directory']} ({error.strerror}). {advice}") from error
    if not os.path.isfile(order["script"]):
        raise ProcessError(f"there is no script {os.path.abspath(order['script'])}. {advice}")


def _run(order: dict, owner: FileIO) -> int:
    base = {**os.environ, **order["environment"]}
    environment = share_of_machine(base, num_workers=order["num_workers"], index=order["index"])
    read_end, write_end = os.pipe()
    with contextlib.closing(ProcessServer()) as server:
        process = server.start(
            argv=[sys.executable, order["script"], *order["arguments"]], environment=environment, output=write_end
        )
        os.close(write_end)
        # The output is copied, so that a stray process cannot keep the connection open.
        output = _Copy(read_end)
        output.start()
        watch = _Watch(owner, process, server)
        while process.running and not watch.owner_is_gone:
            server.wait_until(lambda: not process.running or watch.owner_is_gone, _POLL_SECONDS)
        server.remove([process])
        output.finish(lambda: watch.owner_is_gone)
    if process.exit_code is None:  # The system has not ended the killed process in time.
        return _CANNOT_START
    return process.exit_code if process.exit_code >= 0 else 128 - process.exit_code


class _Copy(threading.Thread):
    """Copies the output of the process to this one's output."""

    def __init__(self, read_end: int):
        super().__init__(name="hop_tf_copy", daemon=True)
        self._read_end = read_end
        self._num_reads = 0
        self._is_writing = False

    def run(self) -> None:
        with contextlib.suppress(OSError):  # If there is no reader, the input has ended, too.
            while data := os.read(self._read_end, 65536):
                self._num_reads += 1
                self._is_writing = True
                while data:
                    data = data[os.write(1, data) :]
                self._is_writing = False

    def finish(self, is_gone: Callable[[], bool]) -> None:
        """Waits for the last output, also over a slow link, but not for the output of a stray process."""
        while self.is_alive() and not is_gone():
            num_reads = self._num_reads
            self.join(_OUTPUT_SECONDS)
            if not self._is_writing and self._num_reads == num_reads:
                return


class _Watch:
    """Passes on the launcher's signals, and notices when the launcher is gone."""

    def __init__(self, owner: FileIO, process: Process, server: ProcessServer):
        self._owner = owner
        self._process = process
        self._server = server
        self._heard = time.monotonic()
        self._at_end = False
        threading.Thread(target=self._run, name="hop_tf_owner", daemon=True).start()

    @property
    def owner_is_gone(self) -> bool:
        """True if the input has ended, or was silent for too long."""
        return self._at_end or time.monotonic() - self._heard > SILENCE_SECONDS

    def _run(self) -> None:
        while line := self._owner.readline():
            self._heard = time.monotonic()
            word, _, number = line.decode().strip().partition(" ")
            if word == "signal":
                self._process.send_signal(int(number))
        with self._server.condition:
            self._at_end = True
            self._server.condition.notify_all()


if __name__ == "__main__":
    sys.exit(main())

"""Both sides of a process on another machine: without another machine, and without ssh."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from io import FileIO
from unittest import mock

from absl.testing import absltest, parameterized

import hop_tf
from hop_tf.tools.processes import relay, remote
from hop_tf.tools.processes.group import ProcessServer  # noqa: F401  (tells that processes are started)

_DEADLINE_SECONDS = 60.0
_RELAY = "from hop_tf.tools.processes import relay; relay._HEARTBEAT_SECONDS = 0.05; relay.main()"


def _relay(shell, order="the order"):
    """Runs a relay with a shell command in the place of ssh."""
    root = os.path.dirname(os.path.abspath(hop_tf.__path__[0]))
    return subprocess.run(
        [sys.executable, "-c", _RELAY, "sh", "-c", shell],
        env={**os.environ, "PYTHONPATH": root, relay.ORDER_VARIABLE: order},
        capture_output=True,
        text=True,
        timeout=_DEADLINE_SECONDS,
    )


class RelayTest(parameterized.TestCase):
    @parameterized.parameters((0, 0), (5, 5), (127, 127), (130, -2), (137, -9), (143, -15), (147, 147), (200, 200))
    def test_ends_as_the_other_side(self, exit_code, expected):
        self.assertEqual(_relay(f"exit {exit_code}").returncode, expected)

    def test_a_connection_that_failed_is_told(self):
        done = _relay("exit 255")
        self.assertEqual(done.returncode, 255)
        self.assertEqual(done.stderr, "hop_tf launch: sh has failed, or lost the connection (exit code 255)\n")

    def test_who_is_turned_away_comes_again(self):
        path = os.path.join(self.enter_context(tempfile.TemporaryDirectory()), "mark")
        turned_away = "echo 'kex_exchange_identification: Connection closed by remote host' >&2; exit 255"
        done = _relay(f"if [ -e {path} ]; then head -n 1; exit 4; fi; touch {path}; {turned_away}")
        self.assertEqual((done.returncode, done.stdout), (4, "the order\n"))
        self.assertIn("hop_tf launch: that machine is busy; tries again in", done.stderr)

    def test_an_ssh_that_is_killed(self):
        self.assertEqual(_relay("kill -9 $$").returncode, 137)

    def test_sends_the_order_and_then_signs_of_life(self):
        done = _relay("head -n 4")
        self.assertEqual((done.returncode, done.stdout), (0, "the order\n\n\n\n"))

    def test_a_long_order_that_nobody_reads(self):
        self.assertEqual(_relay("exit 3", order="x" * 100_000).returncode, 3)

    def test_the_order_is_no_part_of_the_environment_of_ssh(self):
        done = _relay(f"echo ${relay.ORDER_VARIABLE}")
        self.assertEqual(done.stdout, "\n")


class RemoteTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        self.directory = self.enter_context(tempfile.TemporaryDirectory())
        self.enter_context(contextlib.chdir(self.directory))

    def order(self, code):
        with open("script.py", "w") as file:
            file.write(code)
        text = remote.make_order(
            host="a", script="script.py", arguments=[], environment={"X": "1"}, num_workers=1, index=0
        )
        return json.loads(text)

    def owner(self):
        """Returns the input that a launcher would write to, and the descriptor of its writing end."""
        read_end, write_end = os.pipe()
        owner = FileIO(read_end)
        self.addCleanup(self._close, owner, write_end)
        return owner, write_end

    @staticmethod
    def _close(owner, write_end):
        os.close(write_end)
        for thread in threading.enumerate():
            if thread.name == "hop_tf_owner":
                thread.join(_DEADLINE_SECONDS)
        owner.close()

    def test_silence_is_the_end(self):
        owner, write_end = self.owner()
        order = self.order("import time; time.sleep(3600)")
        with mock.patch.object(remote, "SILENCE_SECONDS", 0.5), mock.patch.object(remote, "_POLL_SECONDS", 0.1):
            self.assertEqual(remote._run(order, owner), 137)
        os.write(write_end, b"\n")  # The input was open all the time.

    def test_a_process_that_was_left_over_does_not_keep_the_connection(self):
        order = self.order("""
import subprocess
print(subprocess.Popen(["sleep", "3600"], start_new_session=True).pid)
""")
        program = f"exec {shlex.quote(sys.executable)} -m hop_tf.tools.processes.remote"
        done = _relay(program, json.dumps(order))  # Ends when no process holds its output.
        os.kill(int(done.stdout), signal.SIGKILL)
        self.assertEqual(done.returncode, 0)


if __name__ == "__main__":
    absltest.main()

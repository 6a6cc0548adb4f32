"""Tests of starting, watching and ending processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time

import psutil
from absl.testing import absltest, parameterized

import hop_tf
from hop_tf.tools.processes.group import ProcessServer
from hop_tf.tools.processes.local_cluster import ProcessError

_DEADLINE_SECONDS = 30.0


class ProcessServerTest(parameterized.TestCase):
    @parameterized.parameters(
        ("pass", 0),
        ("raise SystemExit(7)", 7),
        ("raise ValueError", 1),
        ("import os; os.kill(os.getpid(), 9)", -9),
    )
    def test_reports_how_a_process_ended(self, code, exit_code):
        process, _ = self._run(code)
        self.assertEqual(process.exit_code, exit_code)

    def test_process_has_its_environment_directory_and_group(self):
        code = (
            "import os, sys; print(os.environ['A'], os.getcwd(), os.getpgrp() == os.getpid(), sys.stdin.read() == '')"
        )
        _, output = self._run(code, environment={"A": "1"})
        self.assertEqual(output, f"1 {os.getcwd()} True True\n")

    def test_signals_have_their_default_effect_even_if_ignored_here(self):
        previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            _, output = self._run("import signal; print(signal.getsignal(2) is signal.default_int_handler)")
        finally:
            signal.signal(signal.SIGINT, previous)
        self.assertEqual(output, "True\n")

    def test_a_program_that_does_not_exist(self):
        process, output = self._run(argv=["/nowhere/python"])
        self.assertEqual(process.exit_code, 127)
        self.assertIn("cannot run /nowhere/python", output)

    def test_signal_reaches_the_group_until_the_process_is_removed(self):
        server = self._make_server()
        process, reader = self._start(server, _PARENT_AND_CHILD)
        child = psutil.Process(int(reader.readline()))
        process.send_signal(signal.SIGTERM)
        self._wait(server, process)
        self.assertEqual(process.exit_code, -signal.SIGTERM)
        self._wait_until_dead(child)
        server.remove([process])
        process.send_signal(signal.SIGTERM)

    def test_remove_ends_what_an_ended_process_left_behind(self):
        server = self._make_server()
        process, reader = self._start(server, _CHILD_LEFT_BEHIND)
        child = psutil.Process(int(reader.readline()))
        self._wait(server, process)
        self.assertTrue(child.is_running())
        server.remove([process])
        self.assertEqual(reader.read(), "")  # End of file: no process holds the other end.
        self._wait_until_dead(child)

    def test_close_ends_running_processes(self):
        server = self._make_server()
        process, _ = self._start(server, "import time; time.sleep(3600)")
        server.close()
        self.assertEqual(process.exit_code, -signal.SIGKILL)
        self.assertFalse(server.alive)

    def test_nothing_survives_the_owner(self):
        owner = subprocess.Popen([sys.executable, "-c", _OWNER], stdout=subprocess.PIPE, text=True, env=_environment())
        with owner:
            processes = [psutil.Process(int(pid)) for pid in owner.stdout.readline().split()]
            owner.kill()
        self.assertLen(processes, 3)
        for process in processes:
            self._wait_until_dead(process)

    def test_nothing_survives_the_server(self):
        server = self._make_server()
        process, reader = self._start(server, "print('up'); import time; time.sleep(3600)")
        reader.readline()
        with self.assertLogs("absl", "ERROR"):
            psutil.Process(process.pid).parent().kill()
            self._wait(server, process)
        self.assertEqual(process.exit_code, -signal.SIGKILL)
        with self.assertRaisesRegex(ProcessError, "process server"):
            self._start(server, "pass")

    def _run(self, code=None, **kwargs):
        server = self._make_server()
        process, reader = self._start(server, code, **kwargs)
        self._wait(server, process)
        return process, reader.read()

    def _make_server(self, **kwargs):
        server = ProcessServer(**kwargs)
        self.addCleanup(server.close)
        return server

    def _start(self, server, code, *, argv=None, environment=None):
        read_end, write_end = os.pipe()
        reader = self.enter_context(os.fdopen(read_end))
        try:
            process = server.start(
                argv=argv or [sys.executable, "-u", "-c", textwrap.dedent(code)],
                environment=os.environ if environment is None else environment,
                output=write_end,
            )
        finally:
            os.close(write_end)
        return process, reader

    def _wait_until_dead(self, process):
        """Waits for the end of a process that is not a child; whether anyone reaps it is another matter."""
        deadline = time.monotonic() + _DEADLINE_SECONDS
        with contextlib.suppress(psutil.NoSuchProcess):
            while process.status() != psutil.STATUS_ZOMBIE:
                self.assertLess(time.monotonic(), deadline, f"{process} still runs.")

    def _wait(self, server, process):
        self.assertTrue(server.wait_until(lambda: not process.running, _DEADLINE_SECONDS))


class ForkTest(parameterized.TestCase):
    def test_forks_find_preloaded_modules_and_end_as_programs_do(self):
        directory = self._make_module("preloaded", "import os; OWNER = os.getpid()")
        self._make_module(
            "called",
            """
            import atexit, os, sys, threading
            def main(text):
                atexit.register(print, "exit handler")
                print(text, sys.modules["preloaded"].OWNER == os.getppid())
                threading.Thread(target=print, args=("thread",)).start()
                raise SystemExit(3)
            """,
            directory,
        )
        server = ProcessServer(preload=["preloaded"])
        self.addCleanup(server.close)
        self.assertTrue(server.can_fork)
        read_end, write_end = os.pipe()
        with os.fdopen(read_end) as reader:
            process = server.start(call=("called", "main", ("hello",)), environment=os.environ, output=write_end)
            os.close(write_end)
            self.assertEqual(reader.read(), "hello True\nthread\nexit handler\n")
        self.assertTrue(server.wait_until(lambda: not process.running, _DEADLINE_SECONDS))
        self.assertEqual(process.exit_code, 3)

    def test_a_server_with_threads_must_not_fork(self):
        code = "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"
        self._make_module("with_thread", code)
        server = ProcessServer(preload=["with_thread"])
        self.addCleanup(server.close)
        self.assertFalse(server.can_fork)

    def test_a_module_that_cannot_be_imported(self):
        self._make_module("broken", "print('about to fail'); raise ValueError('broken on purpose')")
        server = ProcessServer(preload=["broken"])
        with self.assertRaisesRegex(ProcessError, r"(?s)\['broken'\].*ValueError: broken on purpose.*about to fail"):
            server.wait_until_ready()

    def test_a_module_that_ends_the_server(self):
        self._make_module("ending", "import os; os._exit(5)")
        server = ProcessServer(preload=["ending"])
        with self.assertRaisesRegex(ProcessError, "did not start: it ended"):
            server.wait_until_ready()

    def test_closing_does_not_wait_for_imports(self):
        self._make_module("endless", "import threading; threading.Event().wait()")
        server = ProcessServer(preload=["endless"], timeout_seconds=0.01)
        with self.assertRaisesRegex(ProcessError, "did not start: it is not ready in time"):
            server.wait_until_ready()

    def _make_module(self, name, code, directory=None):
        if directory is None:
            directory = self.enter_context(tempfile.TemporaryDirectory())
            sys.path.insert(0, directory)
            self.addCleanup(sys.path.remove, directory)
        with open(os.path.join(directory, f"{name}.py"), "w") as file:
            file.write(textwrap.dedent(code))
        return directory


_CHILD_LEFT_BEHIND = """
import subprocess
print(subprocess.Popen(["sleep", "3600"]).pid)
"""

_PARENT_AND_CHILD = """
import signal, subprocess
print(subprocess.Popen(["sleep", "3600"]).pid)
signal.pause()
"""

_OWNER = """
import os, signal, sys
from hop_tf.tools.processes.group import ProcessServer
server = ProcessServer()
pids = [server.start(argv=["sleep", "3600"], environment=os.environ, output=1).pid for _ in range(2)]
print(*pids, server._server.pid, flush=True)
signal.pause()
"""


def _environment():
    return {**os.environ, "PYTHONPATH": os.path.dirname(os.path.abspath(hop_tf.__path__[0]))}


if __name__ == "__main__":
    absltest.main()

"""`hop_tf launch --hosts`: over a local sshd, where there is one, and over a program that stands for ssh."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import sys
import tempfile
import textwrap
import time
import unittest
from unittest import mock

import psutil
import pytest
from absl.testing import absltest, parameterized

import hop_tf
from hop_tf import __main__ as command_line
from hop_tf.tools.commands import launch, launch_supervisor  # noqa: F401  (tells that processes are started)
from hop_tf.tools.processes.local_cluster import PortReservation
from sshd import MAX_LOGINS, Sshd
from support import start_program

_DEADLINE_SECONDS = 120.0
# Less than the silence after which a launcher counts as gone: its end is noticed before.
_END_SECONDS = 45.0
_HOSTS = "--hosts=127.0.0.1,127.0.0.2"
# Takes the arguments of ssh, and runs the command here, as sshd does: from another directory, in a session of its own.
_FAKE_SSH = """\
#!/bin/sh
while [ $# -gt 0 ]; do
    case "$1" in
        -o) shift 2 ;;
        -*) shift ;;
        *) break ;;
    esac
done
shift
cd /
exec setsid env -u TF_CONFIG -u HOP_TF_HERE sh -c "$*"
"""

_TRAIN = """
    import keras
    import numpy as np
    import hop_tf

    options = hop_tf.CommunicationOptions(timeout_seconds=100, cluster_token=os.environ["HOP_TF_CLUSTER_TOKEN"])
    strategy = hop_tf.PipeSGDStrategy(
        cluster_resolver=hop_tf.cluster_from_environment(), communication_options=options
    )
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
    x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
    model.fit(x, x[:, :1], batch_size=16, epochs=2, verbose=0)
    print("weights", strategy.world_size, model.get_weights()[0].ravel().tolist())
"""


class _HostsTestCase(parameterized.TestCase):
    """A directory, a script and flags for launches with `ssh`."""

    ssh: str

    def setUp(self):
        super().setUp()
        self.directory = self.enter_context(tempfile.TemporaryDirectory())
        self.log_dir = os.path.join(self.directory, "logs")
        self.work_dir = os.path.join(self.directory, "work")
        os.mkdir(self.work_dir)
        root = os.path.dirname(os.path.abspath(hop_tf.__path__[0]))
        self.enter_context(mock.patch.dict(os.environ, PYTHONPATH=root, TF_CPP_MIN_LOG_LEVEL="3"))
        reservation = self.enter_context(PortReservation(1))
        reservation.release()
        self.first_port = f"--first_port={reservation.ports[0]}"

    def write_script(self, code):
        header = 'import json, os, signal, sys, time\ntask = json.loads(os.environ["TF_CONFIG"])["task"]\n'
        with open(os.path.join(self.work_dir, "script.py"), "w") as file:
            file.write(header + textwrap.dedent(code))
        return "script.py"

    def arguments(self, flags):
        hosts = [] if any(flag.startswith("--hosts") for flag in flags) else [_HOSTS]
        ssh = [] if any(flag.startswith("--ssh") for flag in flags) else [f"--ssh={self.ssh}"]
        fixed = [f"--log_dir={self.log_dir}", f"--timeout_seconds={_DEADLINE_SECONDS}", self.first_port]
        return ["launch", *fixed, *hosts, *ssh, *flags]

    def launch(self, *flags):
        """Runs the launcher here; its exit code and output."""
        stream = io.StringIO()
        with contextlib.redirect_stdout(stream), contextlib.chdir(self.work_dir):
            exit_code = command_line.main(self.arguments(flags))
        return exit_code, stream.getvalue()

    def start(self, *flags):
        """Starts the launcher as a program."""
        return start_program(self, [sys.executable, "-m", "hop_tf", *self.arguments(flags)], cwd=self.work_dir)

    def summary(self):
        with open(os.path.join(self.log_dir, "launch.json")) as file:
            return json.load(file)

    def processes(self, count):
        """Waits until `count` processes have written their ids; returns those that still exist."""
        deadline = time.monotonic() + _DEADLINE_SECONDS
        while len(names := [name for name in os.listdir(self.work_dir) if name.startswith("pid_")]) < count:
            self.assertLess(time.monotonic(), deadline, names)
            time.sleep(0.02)
        pids = [int(name.removeprefix("pid_")) for name in names]
        return [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]

    def wait_until_gone(self, processes):
        deadline = time.monotonic() + _END_SECONDS
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                while process.status() != psutil.STATUS_ZOMBIE:
                    self.assertLess(time.monotonic(), deadline, process)
                    time.sleep(0.02)

    def test_trains(self):
        with mock.patch.dict(os.environ, HOP_TF_CLUSTER_TOKEN="a secret"):
            exit_code, output = self.launch("--env=HOP_TF_CLUSTER_TOKEN", self.write_script(_TRAIN))
        self.assertEqual(exit_code, 0, output)
        said = {line.partition("] weights ")[2] for line in output.splitlines() if "weights" in line}
        self.assertLen(said, 1)
        self.assertStartsWith(said.pop(), "2 [")

    def test_what_processes_get(self):
        script = self.write_script("""
            names = ("HOP_TF_HERE", "GIVEN", "PASSED", "HOP_TF_PLAN", "OMP_NUM_THREADS", "PYTHONUNBUFFERED")
            cluster = json.loads(os.environ["TF_CONFIG"])["cluster"]
            print(json.dumps([os.getcwd(), sys.argv[1:], [os.environ.get(name) for name in names], cluster]))
        """)
        odd = ["--flag", "two words", 'it\'s "$HOME" `x` \\ *', "ü"]
        with mock.patch.dict(os.environ, HOP_TF_HERE="1", PASSED="the 'same'", HOP_TF_PLAN="1"):
            exit_code, output = self.launch("--num_ps=1", "--env", "GIVEN=x=y", "-x", "PASSED", script, *odd)
        self.assertEqual(exit_code, 0, output)
        port = int(self.first_port.partition("=")[2])
        cluster = {"worker": [f"127.0.0.1:{port}", f"127.0.0.2:{port}"], "ps": [f"127.0.0.1:{port + 1}"]}
        for name in ("worker_0", "worker_1", "ps_0"):
            with open(os.path.join(self.log_dir, f"{name}.log")) as log:
                last = log.read().splitlines()[-1]  # Before it, sshd may have turned the connection away.
            directory, arguments, variables, found = json.loads(last)
            self.assertEqual((directory, arguments, found), (os.path.realpath(self.work_dir), odd, cluster))
            self.assertEqual(variables[:4], [None, "x=y", "the 'same'", "1"])
            self.assertEqual(variables[4:], [str(_num_cores()), "1"])
        self.assertIn("[launch] 2 workers, 1 parameter server on 127.0.0.1, 127.0.0.2; logs in", output)
        self.assertNotIn("cores", output)

    def test_all_end_when_one_fails(self):
        script = self.write_script("""
            import subprocess
            if task["index"] == 1:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                open(f"pid_{subprocess.Popen(['sleep', '3600']).pid}", "w").close()
                open(f"pid_{os.getpid()}", "w").close()
                time.sleep(3600)
            while len([name for name in os.listdir() if name.startswith("pid_")]) < 2:
                time.sleep(0.01)
            print("last words")
            sys.exit(5)
        """)
        with (
            mock.patch.object(launch_supervisor, "_REPORT_SECONDS", 0.2),
            mock.patch.object(launch_supervisor, "_TERMINATION_SECONDS", 0.5),
        ):
            exit_code, output = self.launch(script)
        self.assertEqual(exit_code, 5, output)
        self.assertIn("[worker 0] last words", output)
        self.assertIn("first failure: worker 0, exit code 5", output)
        self.assertTrue(self.summary()["tasks"][1]["ended_by_launcher"])
        self.wait_until_gone(self.processes(2))

    def test_termination_is_passed_on(self):
        script = self.write_script("""
            if task["index"] == 1:
                signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
                open("ready", "w").close()
                time.sleep(3600)
            while not os.path.exists("ready"):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        """)
        with mock.patch.object(launch_supervisor, "_REPORT_SECONDS", 0.2):
            exit_code, output = self.launch(script)
        self.assertEqual(exit_code, 137, output)
        self.assertIn("[worker 1] terminated", output)
        first, second = self.summary()["tasks"]
        self.assertEqual((first["signal"], second["exit_code"]), ("SIGKILL", 1))

    def test_interrupt_ends_all(self):
        script = self.write_script("""
            try:
                open(f"pid_{os.getpid()}", "w").close()
                time.sleep(3600)
            except KeyboardInterrupt:
                print("interrupted")
        """)
        launcher = self.start(script)
        processes = self.processes(2)
        launcher.send_signal(signal.SIGINT)
        output, _ = launcher.communicate(timeout=_DEADLINE_SECONDS)
        self.assertEqual(launcher.returncode, 130, output)
        for rank in range(2):
            self.assertIn(f"[worker {rank}] interrupted", output)
        self.wait_until_gone(processes)

    @parameterized.parameters("launcher", "far side")
    @pytest.mark.stress(but=1)
    def test_nothing_survives_what_is_killed(self, who):
        script = self.write_script("""
            if os.environ["KILLED"] == "launcher":
                for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                    signal.signal(number, signal.SIG_IGN)
            open(f"pid_{os.getpid()}", "w").close()
            time.sleep(3600)
        """)
        launcher = self.start(f"--env=KILLED={who}", script)
        processes = self.processes(2)
        if who == "launcher":
            launcher.kill()
        else:  # A rank's parent is the process server, and that one's is the program that ssh has started.
            processes[0].parent().parent().kill()
        self.wait_until_gone(processes)
        launcher.communicate(timeout=_DEADLINE_SECONDS)

    @pytest.mark.stress
    def test_a_lost_connection_ends_all(self):
        script = self.write_script("""
            open(f"pid_{os.getpid()}", "w").close()
            time.sleep(3600)
        """)
        launcher = self.start(script)
        processes = self.processes(2)
        relays = [child for child in psutil.Process(launcher.pid).children(True) if "relay.py" in str(child.cmdline())]
        connection = relays[0].children()[0]
        connection.kill()
        output, _ = launcher.communicate(timeout=_DEADLINE_SECONDS)
        self.assertNotEqual(launcher.returncode, 0, output)
        self.wait_until_gone(processes)

    def test_starts_again(self):
        script = self.write_script("""
            if task["index"] == 1 and not os.path.exists("failed"):
                open("failed", "w").close()
                sys.exit(3)
            if task["index"] == 1:
                open("again", "w").close()
            while not os.path.exists("again"):
                time.sleep(0.01)
        """)
        with mock.patch.object(launch_supervisor, "_FIRST_PAUSE_SECONDS", 0.1):
            exit_code, output = self.launch("--restart=1", script)
        self.assertEqual(exit_code, 0, output)
        self.assertEqual([task["restarts"] for task in self.summary()["tasks"]], [0, 1])

    @parameterized.parameters(
        ("rm script.py", "host 127.0.0.1: there is no script .*work/script.py. The launcher copies nothing"),
        ("mv ../work ../elsewhere", "host 127.0.0.1: there is no directory .*work .*The launcher copies nothing"),
    )
    def test_paths_that_are_not_there(self, before, message):
        path = os.path.join(self.directory, "ssh_after_all")
        with open(path, "w") as file:
            file.write(f'#!/bin/sh\n{before}\nexec {self.ssh} "$@"\n')
        os.chmod(path, 0o755)
        exit_code, output = self.launch("--hosts=127.0.0.1", f"--ssh={path}", self.write_script("pass"))
        self.assertEqual(exit_code, 127, output)
        self.assertRegex(output, message)

    def test_a_python_that_is_not_there(self):
        exit_code, output = self.launch("--hosts=127.0.0.1", "--python=/no/where", self.write_script("pass"))
        self.assertEqual(exit_code, 127, output)
        self.assertIn("host 127.0.0.1: there is no Python interpreter /no/where.", output)


class FakeSshTest(_HostsTestCase):
    def setUp(self):
        super().setUp()
        self.ssh = os.path.join(self.directory, "ssh")
        with open(self.ssh, "w") as file:
            file.write(_FAKE_SSH)
        os.chmod(self.ssh, 0o755)

    @pytest.mark.stress  # sshd shows it, too.
    def test_trains(self):
        super().test_trains()

    def test_an_ssh_that_fails(self):
        exit_code, output = self.launch("--ssh=sh -c 'echo no route >&2; exit 255'", self.write_script("pass"))
        self.assertEqual(exit_code, 255, output)
        self.assertIn("no route", output)
        self.assertIn("hop_tf launch: sh has failed, or lost the connection (exit code 255)", output)

    def test_an_ssh_that_is_not_there(self):
        exit_code, output = self.launch("--ssh=/no/where/ssh", self.write_script("pass"))
        self.assertEqual(exit_code, 127, output)
        self.assertIn("hop_tf launch: cannot run /no/where/ssh: No such file or directory", output)

    def test_local_hosts_need_no_ssh(self):
        exit_code, output = self.launch("--hosts=localhost:2", "--ssh=false", self.write_script("print('here')"))
        self.assertEqual(exit_code, 0, output)
        self.assertIn("[worker 1] here", output)
        self.assertIn("cores", output)

    @parameterized.parameters(
        (["--hosts=a,a"], "`hosts` must list each host once"),
        (["--hosts="], "`hosts` must be names or addresses"),
        (["--hosts=a:2,b", "--num_workers=4"], "num_workers=4, and 3 on the hosts"),
        (["--hosts=a", "--step_seconds=1"], "`step_seconds` must not go with `hosts`"),
        (["--hosts=a", "--first_port=65536"], "`first_port` must be from 1 to 65535"),
        (["--hosts=a", "--ssh="], "`ssh` must be a command"),
        (["--hosts=a", "--ssh='"], "`ssh` must be a command: No closing quotation"),
        (["--num_workers=1", "--ssh=x"], "`ssh` must go with `hosts`"),
        (["--num_workers=1", "--first_port=5"], "`first_port` must go with `hosts`"),
        (["--hosts=localhost,b.invalid"], "'localhost' is a loopback address here"),
        (["--num_workers=1", "--env=HOP_TF_NOT_SET"], "`env` must name a variable that is set"),
        (["--num_workers=1", "--env=TF_CONFIG=x"], "and not TF_CONFIG"),
        (["--num_workers=1", "--env==x"], "`env` must be NAME or NAME=value"),
    )
    @pytest.mark.stress(but=12)
    def test_refuses(self, flags, message):
        stream = io.StringIO()
        script = os.path.join(self.work_dir, self.write_script("pass"))
        with contextlib.redirect_stderr(stream), self.assertRaises(SystemExit) as raised:
            command_line.main(["launch", *flags, script])
        self.assertEqual(raised.exception.code, 2)
        self.assertIn(message, stream.getvalue())

    def test_variables_on_this_machine(self):
        script = self.write_script('print("given:", os.environ["GIVEN"])')
        stream = io.StringIO()
        flags = ["--num_workers=1", f"--log_dir={self.log_dir}", "--env=GIVEN=5"]
        with contextlib.redirect_stdout(stream), contextlib.chdir(self.work_dir):
            self.assertEqual(command_line.main(["launch", *flags, script]), 0)
        self.assertIn("given: 5", stream.getvalue())


class SshdTest(_HostsTestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        if missing := Sshd.missing():
            raise unittest.SkipTest(missing)
        directory = tempfile.TemporaryDirectory()
        cls.addClassCleanup(directory.cleanup)
        sshd = Sshd(directory.name)
        cls.addClassCleanup(sshd.close)
        cls.ssh = sshd.command

    def test_more_ranks_than_may_log_in_at_a_time(self):
        exit_code, output = self.launch(f"--hosts=127.0.0.1:{2 * MAX_LOGINS}", self.write_script("pass"))
        self.assertEqual(exit_code, 0, output)

    def test_a_login_that_is_refused(self):
        ssh = self.ssh.replace("/user ", "/host ")
        exit_code, output = self.launch(
            "--hosts=127.0.0.1", f"--ssh={ssh} -o IdentitiesOnly=yes", self.write_script("pass")
        )
        self.assertEqual(exit_code, 255, output)
        self.assertIn("Permission denied", output)
        self.assertIn("hop_tf launch: ssh has failed", output)


del _HostsTestCase  # It has no ssh.


def _num_cores():
    """Threads of each pool of a process that is alone on its machine."""
    return len(os.sched_getaffinity(0))


if __name__ == "__main__":
    absltest.main()

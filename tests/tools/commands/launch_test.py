"""Tests of `hop_tf launch`."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from unittest import mock

import psutil
from absl.testing import absltest, parameterized

import hop_tf
from disks import fill, mounted_disk
from hop_tf import __main__ as command_line
from hop_tf.tools.commands import launch, launch_supervisor
from hop_tf.tools.processes.local_cluster import ProcessError, Task

_DEADLINE_SECONDS = 60.0
# Any launcher that a test starts ends by itself, so that no test waits for ever.
_TIMEOUT_FLAG = f"--timeout_seconds={_DEADLINE_SECONDS}"


class _LaunchTestCase(parameterized.TestCase):
    """A directory, scripts and launches for tests of the launcher."""

    def setUp(self):
        super().setUp()
        self.directory = self.enter_context(tempfile.TemporaryDirectory())
        self.log_dir = os.path.join(self.directory, "logs")

    def write_script(self, code):
        """Writes a training script that knows its task; returns its path."""
        path = os.path.join(self.directory, "script.py")
        header = 'import json, os, signal, sys, time\ntask = json.loads(os.environ["TF_CONFIG"])["task"]\n'
        with open(path, "w") as file:
            file.write(header + textwrap.dedent(code))
        return path

    def log(self, name):
        with open(os.path.join(self.log_dir, f"{name}.log")) as file:
            return file.read()

    def launch(self, *arguments):
        """Runs the launcher; returns its exit code and the lines that it printed."""
        stream = io.StringIO()
        flags = [f"--log_dir={self.log_dir}"]
        if not any(argument.startswith("--timeout_seconds") for argument in arguments):
            flags.append(_TIMEOUT_FLAG)
        with contextlib.redirect_stdout(stream):
            exit_code = command_line.main(["launch", *flags, *arguments])
        return exit_code, stream.getvalue().splitlines()

    def summary(self):
        with open(os.path.join(self.log_dir, "launch.json")) as file:
            return json.load(file)


class LaunchTest(_LaunchTestCase):
    """Runs the launcher in this process."""

    def test_every_process_runs_the_script_with_its_task(self):
        script = self.write_script("""
            print(os.environ["TF_CONFIG"])
            print(sys.argv[1:], os.environ["HOP_TF_DEVICES_PER_WORKER"])
        """)
        flags = ["--num_workers=3", "--num_ps=1", "--devices_per_worker=2"]
        exit_code, lines = self.launch(*flags, script, "--num_workers=8", "data")
        self.assertEqual(exit_code, 0)
        names = ["worker 0", "worker 1", "worker 2", "ps 0"]
        for name in names:
            self.assertIn(f"[{name}] ['--num_workers=8', 'data'] 2", lines)
        configs = [json.loads(self.log(name.replace(" ", "_")).splitlines()[0]) for name in names]
        self.assertEqual([f"{config['task']['type']} {config['task']['index']}" for config in configs], names)
        cluster = configs[0]["cluster"]
        self.assertLen(set(cluster["worker"] + cluster["ps"]), 4)
        self.assertTrue(all(config["cluster"] == cluster for config in configs))

    def test_reports_success(self):
        exit_code, lines = self.launch("--num_workers=2", "--num_ps=1", self.write_script("pass"))
        self.assertEqual(exit_code, 0)
        self.assertEqual(lines[0], f"[launch] 2 workers, 1 parameter server; logs in {self.log_dir}")
        self.assertContainsSubset({f"[launch] logs in {self.log_dir}"}, lines)
        self.assertRegex("\n".join(lines), r"\[launch\] worker 1 +[\d.]+ s  exit code 0\n")
        summary = self.summary()
        self.assertEqual([task["exit_code"] for task in summary["tasks"]], [0, 0, 0])
        self.assertEqual((summary["outcome"], summary["exit_code"], summary["valid"]), ("completed", 0, True))
        self.assertIsNone(summary["first_failure"])

    def test_names_the_first_failure(self):
        script = self.write_script("""
            if task["index"] == 1:
                print("it broke", file=sys.stderr)
                sys.exit(3)
        """)
        exit_code, lines = self.launch("--num_workers=2", script)
        self.assertEqual(exit_code, 3)
        text = "\n".join(lines)
        self.assertRegex(text, r"\[launch\] worker 1 .* exit code 3: it broke\n")
        path = os.path.join(self.log_dir, "worker_1.log")
        self.assertIn(f"[launch] first failure: worker 1, exit code 3; its log is {path}", lines)
        self.assertEqual(self.summary()["first_failure"], "worker 1")

    def test_says_where_the_stacks_of_those_are_that_waited_for_long(self):
        """The launcher names stacks only if a task has failed, and never the stacks of an earlier job."""
        script = self.write_script("""
            if task["index"] != 1 and len(sys.argv) > 1:
                open(os.environ["HOP_TF_STACKS"], "w").close()
            sys.exit(sys.argv[1] if len(sys.argv) > 1 else 0)
        """)
        for arguments, are_named in ((["3"], True), ([], False)):
            _, lines = self.launch("--num_workers=3", script, *arguments)
            paths = [os.path.join(self.log_dir, f"worker_{rank}.stacks") for rank in (0, 2)]
            line = f"[launch] waited for others for long; the stacks of threads are in {', '.join(paths)}"
            self.assertEqual(line in lines, are_named)
            self.assertEqual(self.summary()["tasks"][2]["stacks_path"], paths[1] if are_named else None)

    def test_shows_a_failure_that_ranks_share_once(self):
        script = self.write_script("""
            print("I0000 00:00:1795629139.897575    2246 port.cc:153] oneDNN custom operations are on.")
            raise ValueError("no such optimizer")
        """)
        exit_code, lines = self.launch("--num_workers=3", script)
        self.assertEqual(exit_code, 1)
        text = "\n".join(lines)
        self.assertEqual(text.count("Traceback (most recent call last):"), 1)
        self.assertEqual(text.count("(the same traceback as that of worker"), 2)
        self.assertRegex(text, r"worker 0 .* exit code 1: ValueError: no such optimizer\n")
        self.assertRegex(text, r"worker 1 .* exit code 1: the same as worker 0\n")
        self.assertNotIn("oneDNN", text)
        for rank in range(3):
            with open(os.path.join(self.log_dir, f"worker_{rank}.log")) as log:
                self.assertRegex(log.read(), r"(?s)oneDNN.*Traceback.*ValueError: no such optimizer")

    def test_shows_a_traceback_that_was_broken_off(self):
        script = self.write_script("""
            print("Traceback (most recent call last):")
            print('  File "x.py", line 1', end="", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        """)
        _, lines = self.launch("--num_workers=1", script)
        self.assertContainsSubsequence(
            lines, ["[worker 0] Traceback (most recent call last):", '[worker 0]   File "x.py", line 1']
        )

    def test_a_signal_is_a_failure(self):
        exit_code, lines = self.launch("--num_workers=1", self.write_script("os.kill(os.getpid(), signal.SIGKILL)"))
        self.assertEqual(exit_code, 137)
        self.assertIn("first failure: worker 0, SIGKILL;", "\n".join(lines))

    def test_others_may_report_a_failure_themselves(self):
        script = self.write_script("""
            import psutil
            if task["index"] == 0:
                with open("pid.part", "w") as file:
                    file.write(str(os.getpid()))
                os.rename("pid.part", "pid")
                sys.exit(5)
            while not os.path.exists("pid"):
                pass
            with open("pid") as file:
                peer = psutil.Process(int(file.read()))
            while peer.status() != psutil.STATUS_ZOMBIE:
                pass
            sys.exit("worker 0 is lost")
        """)
        with contextlib.chdir(self.directory):
            exit_code, lines = self.launch("--num_workers=2", script)
        self.assertEqual(exit_code, 5)
        self.assertIn("[worker 1] worker 0 is lost", lines)
        self.assertFalse(self.summary()["tasks"][1]["ended_by_launcher"])
        self.assertIn("exit code 1: worker 0 is lost", "\n".join(lines))

    def test_others_are_ended_after_a_failure(self):
        mark = os.path.join(self.directory, "mark")
        script = self.write_script(f"""
            if task["index"] == 1:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                open({mark!r}, "w").close()
            while task["index"] == 0:
                if os.path.exists({mark!r}):
                    sys.exit(5)
                time.sleep(0.01)
            while True:
                signal.pause()
        """)
        with _patience(0.5):
            exit_code, lines = self.launch("--num_workers=3", script)
        self.assertEqual(exit_code, 5)
        tasks = self.summary()["tasks"]
        self.assertEqual([task["signal"] for task in tasks], [None, "SIGKILL", "SIGTERM"])
        self.assertEqual([task["ended_by_launcher"] for task in tasks], [False, True, True])
        self.assertIn("first failure: worker 0, exit code 5", "\n".join(lines))

    def test_others_go_on_after_a_failure_where_they_are_to(self):
        mark = os.path.join(self.directory, "mark")
        script = self.write_script(f"""
            if task["index"] == 0:
                open({mark!r}, "w").close()
                sys.exit(7)
            while not os.path.exists({mark!r}):
                time.sleep(0.01)
            time.sleep(1)  # By now it would have been ended.
            print("done")
        """)
        with _patience(0.1):
            exit_code, _ = self.launch("--num_workers=2", "--keep_going", script)
        self.assertEqual(exit_code, 7)
        self.assertEqual(self.summary()["outcome"], "failed")
        self.assertEqual([task["exit_code"] for task in self.summary()["tasks"]], [7, 0])
        self.assertIn("done", self.log("worker_1"))

    def test_timeout_ends_the_job(self):
        script = self.write_script('print("waiting"); signal.pause()')
        exit_code, lines = self.launch("--num_workers=2", "--timeout_seconds=1.5", script)
        self.assertEqual(exit_code, 124)
        self.assertIn("[launch] not done after 1.5 s; ending worker 0, worker 1", lines)
        self.assertEqual(self.summary()["outcome"], "timed out")

    def test_job_is_done_when_all_workers_are(self):
        script = self.write_script("""
            while task["type"] == "ps":
                signal.pause()
        """)
        with _patience(0.5):
            exit_code, _ = self.launch("--num_workers=1", "--num_ps=1", script)
        self.assertEqual(exit_code, 0)
        self.assertTrue(self.summary()["tasks"][1]["ended_by_launcher"])

    def test_a_server_that_fails_fails_the_job(self):
        script = self.write_script("""
            if task["type"] == "ps":
                sys.exit(9)
            signal.pause()
        """)
        with _patience(0.5):
            exit_code, _ = self.launch("--num_workers=1", "--num_ps=1", script)
        self.assertEqual(exit_code, 9)

    def test_children_that_a_worker_leaves_behind_are_ended(self):
        script = self.write_script('import subprocess; print(subprocess.Popen(["sleep", "3600"]).pid)')
        exit_code, _ = self.launch("--num_workers=1", script)
        self.assertEqual(exit_code, 0)
        pid = int(self.log("worker_0"))
        self.assertTrue(not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)

    def test_emulation_is_passed_on_and_steps_are_measured(self):
        script = self.write_script("""
            from hop_tf.tools.emulation import ComputeEmulation, StepTimes
            if task["type"] == "worker":
                times = StepTimes.from_environment(os.environ)
                times.mark()
                times.mark()
            print(ComputeEmulation.from_environment(os.environ))
        """)
        flags = ["--step_seconds=0.25", "--slowdown=1:4x", "--slowdown=random:6x", "--seed=7"]
        with mock.patch.dict(os.environ, PYTHONPATH=_source_root()):
            exit_code, _ = self.launch("--num_workers=2", "--num_ps=1", *flags, script)
        self.assertEqual(exit_code, 0)
        self.assertIn("step_seconds=0.25", self.log("worker_1"))
        self.assertIn("rank=1, factor=4.0), Slowdown(rank=None, factor=6.0)), seed=7", self.log("worker_1"))
        self.assertEqual(self.log("ps_0"), "None\n")
        summary = self.summary()
        self.assertEqual(summary["cpu_busy_period"], "steps")
        self.assertNotIn("worker_0.step_times", os.listdir(self.log_dir))
        self.assertEqual(summary["emulation"], {"step_seconds": 0.25, "slowdowns": ["1:4x", "random:6x"], "seed": 7})

    def test_a_busy_run_of_emulated_compute_is_invalid(self):
        use = launch.launch_report.ProcessorUse(90.0, "steps")
        with mock.patch.object(launch.launch_report.ProcessorMeter, "measure", return_value=use):
            exit_code, lines = self.launch("--num_workers=1", "--step_seconds=1", self.write_script("pass"))
        self.assertEqual(exit_code, 0)
        self.assertIn("[launch] INVALID: cores 90% busy from the first to the last step.", "\n".join(lines))
        self.assertFalse(self.summary()["valid"])

    def test_default_log_dir_is_named(self):
        stream = io.StringIO()
        directory = self.enter_context(tempfile.TemporaryDirectory())
        with (
            contextlib.redirect_stdout(stream),
            mock.patch.object(launch.tempfile, "mkdtemp", return_value=directory),
        ):
            launch.main(["--num_workers=1", _TIMEOUT_FLAG, self.write_script("pass")])
        self.assertIn(f"[launch] logs in {directory}\n", stream.getvalue())

    def test_a_python_that_does_not_exist(self):
        exit_code, lines = self.launch("--num_workers=1", "--python=/nowhere/python", self.write_script("pass"))
        self.assertEqual(exit_code, 127)
        self.assertIn("cannot run /nowhere/python", "\n".join(lines))

    def test_a_full_disk_of_logs_is_no_failure_of_the_job(self):
        os.mkdir(self.log_dir)
        self.enter_context(mounted_disk(self.log_dir))
        fill(self.log_dir)
        with self.assertLogs("absl", "ERROR") as logs:
            exit_code, lines = self.launch("--num_workers=1", self.write_script('print("x" * 20_000); print("done")'))
        self.assertEqual(exit_code, 0)
        self.assertRegex(logs.output[0], r"Cannot write to .*worker_0.log: .*No space left on device")
        text = "\n".join(lines)
        self.assertIn("[worker 0] done", text)
        self.assertRegex(text, r"\[launch\] cannot write .*launch.json: .*No space left on device\n")
        self.assertRegex(text, r"\[launch\] completed after .*, exit code 0")

    def test_what_prevents_the_start_is_told(self):
        error = io.StringIO()
        with (
            mock.patch.object(launch, "PortReservation", side_effect=ProcessError("no ports")),
            contextlib.redirect_stderr(error),
        ):
            exit_code, _ = self.launch("--num_workers=1", self.write_script("pass"))
        self.assertEqual(exit_code, 1)
        self.assertEqual(error.getvalue(), "hop_tf launch: no ports\n")


class RestartTest(_LaunchTestCase):
    """Tests of processes that are restarted after a failure."""

    def setUp(self):
        super().setUp()
        self.enter_context(mock.patch.object(launch_supervisor, "_FIRST_PAUSE_SECONDS", 0.1))

    def write_script(self, code):
        """A script that knows how many times its task was started before."""
        header = """
            path = f"count_{task['type']}_{task['index']}"
            number = int(open(path).read()) if os.path.exists(path) else 0
            open(path, "w").write(str(number + 1))
        """
        return super().write_script(textwrap.dedent(header) + textwrap.dedent(code))

    def launch(self, *arguments):
        with contextlib.chdir(self.directory):
            return super().launch(*arguments)

    def test_a_failed_process_is_started_again_while_the_others_run_on(self):
        script = self.write_script("""
            print("config", os.environ["TF_CONFIG"])
            if task["index"] == 1 and number < 2:
                print("fails for time", number)
                if number == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                sys.exit(3)
            while not (os.path.exists("count_worker_1") and open("count_worker_1").read() == "3"):
                time.sleep(0.01)
            print("done")
        """)
        exit_code, lines = self.launch("--num_workers=2", "--restart=2", script)
        self.assertEqual(exit_code, 0)
        said = "[launch] worker 1 failed, and is started again in {} s, for time {} of 2 ({})"
        self.assertContainsSubsequence(
            lines,
            [
                "[worker 1] fails for time 0",
                said.format(0.1, 1, "SIGKILL, printed last: fails for time 0"),
                "[worker 1] fails for time 1",
                said.format(0.2, 2, "exit code 3: fails for time 1"),
                "[worker 1] done",
            ],
        )
        self.assertRegex("\n".join(lines), r"worker 1 .* exit code 0 \(started again after SIGKILL, exit code 3\)\n")
        names = ["worker_1", "worker_1.restart1", "worker_1.restart2"]
        self.assertLen({self.log(name).splitlines()[0] for name in names}, 1)  # The same task, ports and peers.
        self.assertIn("fails for time 0", self.log(names[0]))
        self.assertIn("done", self.log(names[2]))
        summary = self.summary()
        self.assertEqual((summary["outcome"], summary["exit_code"]), ("completed", 0))
        self.assertIsNone(summary["first_failure"])
        first, second = summary["tasks"]
        self.assertEqual((first["restarts"], first["earlier"]), (0, []))
        self.assertEqual((second["exit_code"], second["restarts"]), (0, 2))
        self.assertEqual(
            [(each["exit_code"], each["signal"]) for each in second["earlier"]], [(-9, "SIGKILL"), (3, None)]
        )
        paths = [os.path.join(self.log_dir, f"{name}.log") for name in names]
        self.assertEqual([each["log_path"] for each in (*second["earlier"], second)], paths)

    def test_who_fails_again_and_again_is_given_up_and_the_others_run_on(self):
        script = self.write_script("""
            if task["index"] == 0:
                sys.exit(number + 5)
            while not (os.path.exists("count_worker_0") and open("count_worker_0").read() == "3"):
                time.sleep(0.01)
            time.sleep(1)  # By now it would have been ended.
        """)
        with _patience(0.1):
            exit_code, lines = self.launch("--num_workers=2", "--restart=2", script)
        self.assertEqual(exit_code, 7)
        self.assertIn("[launch] worker 0 failed, and is not started again, as it was 2 times (exit code 7)", lines)
        summary = self.summary()
        self.assertEqual([task["exit_code"] for task in summary["tasks"]], [7, 0])
        self.assertEqual([each["exit_code"] for each in summary["tasks"][0]["earlier"]], [5, 6])
        self.assertEqual(summary["first_failure"], "worker 0")

    def test_a_worker_without_others_to_train_with_is_not_started_again(self):
        script = self.write_script("""
            if task["index"] == 0:
                sys.exit(0)
            import psutil
            siblings = psutil.Process().parent().children()
            while any(each.status() != psutil.STATUS_ZOMBIE for each in siblings if each.pid != os.getpid()):
                time.sleep(0.01)
            sys.exit(3)
        """)
        exit_code, lines = self.launch("--num_workers=2", "--restart=5", script)
        self.assertEqual(exit_code, 3)
        reason = "the other workers have done their part: it would train alone"
        self.assertIn(f"[launch] worker 1 failed, and is not started again, as {reason} (exit code 3)", lines)

    def test_workers_that_are_killed_when_the_others_are_done_are_no_failure(self):
        """Neither killed worker is restarted. Worker 0 saves files, and is one of them."""
        script = self.write_script("""
            import contextlib, psutil
            open(f"pid_{task['index']}.part", "w").write(str(os.getpid()))
            os.rename(f"pid_{task['index']}.part", f"pid_{task['index']}")
            if task["index"] in (0, 1):
                sys.exit(0)
            while not all(os.path.exists(f"pid_{index}") for index in range(4)):
                time.sleep(0.01)
            for index in (0, 1):
                pid = int(open(f"pid_{index}").read())
                with contextlib.suppress(psutil.NoSuchProcess):
                    while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                        time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        """)
        exit_code, lines = self.launch("--num_workers=4", "--restart=5", script)
        self.assertEqual(exit_code, 0)
        self.assertRegex("\n".join(lines), r"worker 3 .* SIGKILL \(the others have done their part\)")
        self.assertEqual(sum(task["restarts"] for task in self.summary()["tasks"]), 0)
        self.assertIsNone(self.summary()["first_failure"])

        script = self.write_script("os.kill(os.getpid(), signal.SIGKILL) if task['index'] == 0 else None")
        with mock.patch.object(launch_supervisor, "_FIRST_PAUSE_SECONDS", 1.0):
            exit_code, lines = self.launch("--num_workers=2", "--restart=5", script)
        self.assertEqual(exit_code, 128 + signal.SIGKILL)

    def test_who_has_worked_for_long_begins_with_the_first_pause(self):
        task, lines = Task("worker", 0), []
        process = mock.Mock(running=False, exit_code=1)
        restarts = launch_supervisor.Restarts(
            9, {task: process}, start=lambda task: None, describe=lambda task: "", say=lines.append
        )
        with mock.patch.object(launch_supervisor, "_FIRST_PAUSE_SECONDS", 1e-9):
            for process.seconds in (0.0, 59.0, 61.0, 0.0):
                restarts.poll()  # Notes the failure.
                restarts.poll()  # The pause is over.
        pauses = re.findall(r"started again in (\S+) s", "\n".join(lines))
        self.assertEqual(pauses, ["1e-09", "2e-09", "1e-09", "2e-09"])

    def test_pauses_grow(self):
        with mock.patch.object(launch_supervisor, "_LONGEST_PAUSE_SECONDS", 0.3):
            _, lines = self.launch("--num_workers=1", "--restart=4", self.write_script("sys.exit(1)"))
        pauses = re.findall(r"started again in (\S+) s", "\n".join(lines))
        self.assertEqual(pauses, ["0.1", "0.2", "0.3", "0.3"])

    def test_the_last_words_are_those_of_the_last_process(self):
        script = self.write_script("""
            if number == 0:
                raise ValueError("at first")
            print("at last")
            sys.exit(1)
        """)
        _, lines = self.launch("--num_workers=1", "--restart=1", script)
        text = "\n".join(lines)
        self.assertRegex(text, r"worker 0 failed, and is started again .* \(exit code 1: ValueError: at first\)\n")
        self.assertRegex(text, r"worker 0 .* exit code 1 \(started again after exit code 1\): at last\n")

    def test_a_server_that_has_ended_is_started_again_for_workers_that_were(self):
        script = self.write_script("""
            if task["type"] == "ps":  # As one does that sees that all workers have ended.
                while not os.path.exists("ended"):
                    time.sleep(0.01)
                os.remove("ended")
                sys.exit(0)
            if number == 0:
                open("ended", "w").close()
                while os.path.exists("ended"):
                    time.sleep(0.01)
                sys.exit(1)
            while not (os.path.exists("count_ps_0") and open("count_ps_0").read() == "2"):
                time.sleep(0.01)
        """)
        with _patience(0.5):
            exit_code, lines = self.launch("--num_workers=1", "--num_ps=1", "--restart=1", script)
        self.assertEqual(exit_code, 0)
        self.assertIn("[launch] ps 0 is started again for the workers that were", lines)
        self.assertEqual([task["restarts"] for task in self.summary()["tasks"]], [1, 1])

    def test_a_server_that_fails_is_started_again(self):
        script = self.write_script("""
            if task["type"] == "ps":
                while number == 1:
                    signal.pause()
                sys.exit(9)
            while not (os.path.exists("count_ps_0") and open("count_ps_0").read() == "2"):
                time.sleep(0.01)
        """)
        with _patience(0.5):
            exit_code, _ = self.launch("--num_workers=1", "--num_ps=1", "--restart=1", script)
        self.assertEqual(exit_code, 0)
        self.assertEqual(self.summary()["tasks"][1]["earlier"][0]["exit_code"], 9)

    def test_children_that_a_failed_process_has_left_are_ended_before_it_is_started_again(self):
        script = self.write_script("""
            import psutil, subprocess
            if number == 0:
                child = subprocess.Popen(["sleep", "3600"])
                open("child", "w").write(str(child.pid))
                sys.exit(1)
            pid = int(open("child").read())
            while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.01)
        """)
        exit_code, _ = self.launch("--num_workers=1", "--restart=1", script)
        self.assertEqual(exit_code, 0)

    def test_the_timeout_ends_a_job_that_waits_to_start_a_process_again(self):
        self.enter_context(mock.patch.object(launch_supervisor, "_FIRST_PAUSE_SECONDS", 1000.0))
        self.enter_context(mock.patch.object(launch_supervisor, "_LONGEST_PAUSE_SECONDS", 1000.0))
        exit_code, lines = self.launch(
            "--num_workers=1", "--restart=1", "--timeout_seconds=2", self.write_script("sys.exit(4)")
        )
        self.assertEqual(exit_code, 124)
        said = "[launch] worker 0 failed, and is started again in 1000 s, for time 1 of 1 (exit code 4)"
        self.assertIn(said, lines)
        self.assertEqual(self.summary()["outcome"], "timed out")

    def test_logs_of_an_earlier_job_are_removed(self):
        os.mkdir(self.log_dir)
        former = os.path.join(self.log_dir, "worker_0.restart3.log")
        open(former, "w").close()
        self.launch("--num_workers=1", "--restart=1", self.write_script("pass"))
        self.assertFalse(os.path.exists(former))


class SignalsTest(_LaunchTestCase):
    """Runs the launcher as a program and sends it signals."""

    def test_interrupt_is_passed_on_once(self):
        script = self.write_script("""
            interrupts = []
            signal.signal(signal.SIGINT, lambda number, _: interrupts.append(number))
            print("ready")
            while not interrupts:
                time.sleep(0.01)
            print("interrupts:", len(interrupts))
        """)
        with self.start("--num_workers=2", script) as launcher:
            self.wait_for_lines(launcher, "ready", 2)
            launcher.send_signal(signal.SIGINT)
            output = launcher.stdout.read()
        self.assertEqual(launcher.returncode, 130)
        for rank in range(2):
            self.assertIn(f"[worker {rank}] interrupts: 1\n", output)
        self.assertEqual(self.summary()["outcome"], "interrupted")

    def test_a_second_interrupt_ends_those_that_ignore_the_first(self):
        script = self.write_script("""
            signal.signal(signal.SIGINT, lambda *_: print("ready again"))
            print("ready")
            while True:
                signal.pause()
        """)
        with self.start("--num_workers=2", script) as launcher:
            self.wait_for_lines(launcher, "ready$", 2)
            launcher.send_signal(signal.SIGINT)
            self.wait_for_lines(launcher, "ready again", 2)
            launcher.send_signal(signal.SIGINT)
            launcher.stdout.read()
        self.assertEqual(launcher.returncode, 130)
        self.assertEqual([task["signal"] for task in self.summary()["tasks"]], ["SIGTERM", "SIGTERM"])

    def test_an_interrupt_while_a_process_waits_to_be_started_again(self):
        script = self.write_script("""
            if task["index"] == 0:
                sys.exit(3)
            signal.signal(signal.SIGINT, lambda *_: sys.exit("interrupted"))
            print("ready")
            while True:
                signal.pause()
        """)
        with self.start("--num_workers=2", "--restart=100", script) as launcher:
            self.wait_for_lines(launcher, "started again in 2 s", 1)
            launcher.send_signal(signal.SIGINT)
            launcher.stdout.read()
        self.assertEqual(launcher.returncode, 130)
        first, second = self.summary()["tasks"]
        self.assertEqual((first["exit_code"], first["ended_by_launcher"]), (3, False))
        self.assertEqual((second["exit_code"], second["ended_by_launcher"]), (1, True))

    def test_termination_is_passed_on(self):
        script = self.write_script("""
            signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
            print("ready")
            signal.pause()
        """)
        with self.start("--num_workers=2", script) as launcher:
            self.wait_for_lines(launcher, "ready", 2)
            launcher.terminate()
            output = launcher.stdout.read()
        self.assertEqual(launcher.returncode, 143)
        self.assertIn("[worker 1] terminated\n", output)

    def test_no_process_survives_a_killed_launcher(self):
        script = self.write_script("""
            import subprocess
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            print("pids", os.getpid(), subprocess.Popen(["sleep", "3600"]).pid)
            signal.pause()
        """)
        with self.start("--num_workers=2", script) as launcher:
            matches = self.wait_for_lines(launcher, r"pids (\d+) (\d+)", 2)
            processes = [psutil.Process(int(pid)) for match in matches for pid in match.groups()]
            launcher.kill()
        for process in processes:
            self.wait_until_dead(process)

    def test_a_reader_that_leaves_stops_nothing(self):
        script = self.write_script('print("x" * 100_000); print("done")')
        with self.start("--num_workers=2", script) as launcher:
            launcher.stdout.close()
            self.assertEqual(launcher.wait(_DEADLINE_SECONDS), 0)
        self.assertTrue(self.log("worker_0").endswith("done\n"))

    def start(self, *arguments):
        return subprocess.Popen(
            [sys.executable, "-m", "hop_tf", "launch", _TIMEOUT_FLAG, f"--log_dir={self.log_dir}", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": _source_root()},
        )

    def wait_until_dead(self, process):
        """Waits for the end of a process that is not a child; whether anyone reaps it is another matter."""
        deadline = time.monotonic() + _DEADLINE_SECONDS
        with contextlib.suppress(psutil.NoSuchProcess):
            while process.status() != psutil.STATUS_ZOMBIE:
                self.assertLess(time.monotonic(), deadline, f"{process} still runs.")

    def wait_for_lines(self, launcher, pattern, count):
        """Reads the launcher's output up to the line that matches for the `count`-th time."""
        matches = []
        while len(matches) < count:
            line = launcher.stdout.readline()
            self.assertNotEmpty(line, "The launcher ended.")
            matches += [match for match in [re.search(pattern, line.rstrip("\n"))] if match]
        return matches


class ArgumentsTest(_LaunchTestCase):
    @parameterized.parameters(
        (["--num_workers=0"], "`num_workers` must be at least 1. Received: num_workers=0."),
        (["--num_workers=two"], "--num_workers: invalid int value: 'two'"),
        ([], "--num_workers is required, or --hosts."),
        (["--num_workers=1", "--num_ps=-1"], "`num_ps` must not be negative. Received: num_ps=-1."),
        (["--num_workers=1", "--devices_per_worker=0"], "`devices_per_worker` must be a positive integer."),
        (["--num_workers=1", "--restart=-1"], "`restart` must not be negative. Received: restart=-1."),
        (["--num_workers=1", "--timeout_seconds=0"], "`timeout_seconds` must be positive."),
        (["--num_workers=1", "--step_seconds=0"], "`step_seconds` must be a positive number."),
        (["--num_workers=1", "--slowdown=0:4x"], "`slowdown` must go with `step_seconds`."),
        (["--num_workers=1", "--step_seconds=1", "--slowdown=fast"], "`slowdown` must be '<rank>:<factor>x' or"),
        (["--num_workers=4", "--step_seconds=1", "--slowdown=4:2x"], "a rank below the number of workers, 4."),
        (["--num_workers=4", "--step_seconds=1", "--slowdown=1:2x,1:3x"], "once per rank"),
        (["--num_workers=1", "--num_work=1"], "unrecognized arguments: --num_work=1"),
    )
    def test_refuses(self, flags, message):
        self.assertIn(message, self.error(["launch", *flags, self.write_script("pass")]))

    def test_refuses_a_script_that_does_not_exist(self):
        error = self.error(["launch", "--num_workers=1", "/nowhere/script.py"])
        self.assertIn("`script` must be a file. Received: script='/nowhere/script.py'.", error)

    def test_refuses_a_command_that_does_not_exist(self):
        self.assertIn("invalid choice: 'lunch'", self.error(["lunch"]))

    @parameterized.parameters((["--help"], "start a training script"), (["launch", "--help"], "--slowdown"))
    def test_help(self, arguments, text):
        stream = io.StringIO()
        with contextlib.redirect_stdout(stream), self.assertRaises(SystemExit) as raised:
            command_line.main(arguments)
        self.assertEqual(raised.exception.code, 0)
        self.assertIn(text, stream.getvalue())

    def error(self, arguments):
        stream = io.StringIO()
        with contextlib.redirect_stderr(stream), self.assertRaises(SystemExit) as raised:
            command_line.main(arguments)
        self.assertEqual(raised.exception.code, 2)
        return stream.getvalue()


@contextlib.contextmanager
def _patience(seconds):
    """Has the launcher wait for less long before it goes on to the next signal."""
    with (
        mock.patch.object(launch_supervisor, "_REPORT_SECONDS", seconds),
        mock.patch.object(launch_supervisor, "_TERMINATION_SECONDS", seconds),
    ):
        yield


def _source_root():
    return os.path.dirname(os.path.abspath(hop_tf.__path__[0]))


if __name__ == "__main__":
    absltest.main()

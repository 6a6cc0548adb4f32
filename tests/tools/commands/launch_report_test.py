"""Tests of the launcher's report."""

from __future__ import annotations

import collections
import json
import os
import tempfile
from unittest import mock

from absl.testing import absltest, parameterized

from hop_tf.tools import emulation
from hop_tf.tools.commands import launch_report
from hop_tf.tools.commands.launch_report import JobReport, Outcome, ProcessorMeter, ProcessorUse, TaskReport
from hop_tf.tools.emulation import ComputeEmulation
from hop_tf.tools.processes.local_cluster import Task

_CpuTimes = collections.namedtuple("_CpuTimes", ["user", "system", "idle", "iowait", "guest"])


class JobReportTest(parameterized.TestCase):
    @parameterized.parameters(
        (Outcome.COMPLETED, [0, 0], 0),
        (Outcome.FAILED, [0, 3], 3),
        (Outcome.FAILED, [0, -9], 137),
        (Outcome.TIMED_OUT, [0, 0], 124),
        (Outcome.INTERRUPTED, [0, 1], 130),
    )
    def test_exit_code(self, outcome, exit_codes, expected):
        tasks = [_task(rank, exit_code=code) for rank, code in enumerate(exit_codes)]
        self.assertEqual(_report(tasks=tasks, outcome=outcome, signum=2).exit_code, expected)

    def test_first_failure_is_the_earliest_that_the_launcher_did_not_cause(self):
        tasks = [
            _task(0, exit_code=-15, end_time=1.0, ended_by_launcher=True),
            _task(1, exit_code=1, end_time=3.0, last_words="two"),
            _task(2, exit_code=-11, end_time=2.0, last_words="two"),
            _task(3, exit_code=0, end_time=0.5, last_words="fine"),
        ]
        report = _report(tasks=tasks, outcome=Outcome.FAILED)
        self.assertEqual(report.first_failure, tasks[2])
        self.assertContainsSubsequence(
            report.lines(),
            [
                "worker 0        4.0 s  SIGTERM (ended by the launcher)",
                "worker 1        4.0 s  exit code 1: two",
                "worker 2        4.0 s  SIGSEGV, printed last: the same as worker 1",
                "worker 3        4.0 s  exit code 0",
                "first failure: worker 2, SIGSEGV; its log is /logs/worker_2.log",
                "failed after 5.0 s, exit code 139",
            ],
        )

    @parameterized.parameters((70.0, True), (70.1, False))
    def test_emulated_compute_is_invalid_on_busy_cores(self, busy_percent, valid):
        report = _report(
            emulation=ComputeEmulation(step_seconds=0.1), processor_use=ProcessorUse(busy_percent, "steps")
        )
        self.assertEqual(report.valid, valid)
        self.assertEqual(report.exit_code, 0)
        self.assertEqual(any(line.startswith("INVALID: cores 70% busy") for line in report.lines()), not valid)
        last = "completed after 5.0 s, exit code 0"
        self.assertEqual(report.lines()[-1], last if valid else f"{last} (INVALID)")
        self.assertEqual(self._summary(report)["valid"], valid)

    def test_the_validity_of_emulated_compute_is_unknown_if_the_use_of_the_cores_is(self):
        report = _report(emulation=ComputeEmulation(step_seconds=0.1))
        self.assertIsNone(report.valid)
        self.assertStartsWith(report.lines()[-2], "VALIDITY UNKNOWN: how busy the cores were is not known.")
        self.assertEqual(report.lines()[-1], "completed after 5.0 s, exit code 0 (validity unknown)")
        self.assertIsNone(self._summary(report)["valid"])

    def test_real_compute_is_valid_whatever_is_known(self):
        report = _report()
        self.assertTrue(report.valid)
        self.assertEqual(report.lines(), ["completed after 5.0 s, exit code 0"])

    def test_real_compute_may_use_the_cores(self):
        self.assertTrue(_report(processor_use=ProcessorUse(100.0, "job")).valid)

    def test_writes_json(self):
        report = _report(
            tasks=[_task(0, exit_code=-9, earlier=(_task(0, exit_code=3, ended_by_launcher=False),))],
            outcome=Outcome.FAILED,
            emulation=ComputeEmulation(step_seconds=0.1, slowdowns=(emulation.Slowdown(0, 4.0),), seed=3),
            processor_use=ProcessorUse(71.24, "steps"),
        )
        self.assertEqual(
            self._summary(report),
            {
                "outcome": "failed",
                "exit_code": 137,
                "seconds": 5.0,
                "valid": False,
                "cpu_busy_percent": 71.2,
                "cpu_busy_period": "steps",
                "first_failure": "worker 0",
                "emulation": {"step_seconds": 0.1, "slowdowns": ["0:4x"], "seed": 3},
                "tasks": [
                    {
                        "type": "worker",
                        "index": 0,
                        "exit_code": -9,
                        "signal": "SIGKILL",
                        "ended_by_launcher": False,
                        "seconds": 4.0,
                        "log_path": "/logs/worker_0.log",
                        "stacks_path": None,
                        "restarts": 1,
                        "earlier": [
                            {
                                "exit_code": 3,
                                "signal": None,
                                "ended_by_launcher": False,
                                "seconds": 4.0,
                                "log_path": "/logs/worker_0.log",
                                "stacks_path": None,
                            }
                        ],
                    }
                ],
            },
        )

    def _summary(self, report):
        """Writes the report and returns its JSON."""
        path = os.path.join(self.enter_context(tempfile.TemporaryDirectory()), "launch.json")
        report.write(path)
        with open(path) as file:
            return json.load(file)


class ProcessorMeterTest(absltest.TestCase):
    def test_measures_between_the_first_and_the_last_step(self):
        # Busy while processes start (0 to 10 s), half busy while they train (10 to 20 s), idle afterwards.
        meter = self._record([(0, 0), (10, 10), (20, 15), (30, 15)])
        with mock.patch.object(launch_report, "read_step_times", return_value=(10.0, 20.0)):
            self.assertEqual(self._measure(meter), ProcessorUse(50.0, "steps"))

    def test_steps_between_two_samples_count_both(self):
        meter = self._record([(0, 0), (10, 10), (20, 15), (30, 15)])
        with mock.patch.object(launch_report, "read_step_times", return_value=(12.0, 13.0)):
            self.assertEqual(self._measure(meter), ProcessorUse(50.0, "steps"))

    def test_steps_just_before_the_end_count_with_what_came_before(self):
        meter = self._record([(0, 0), (10, 5)])
        self._clock.return_value = 10.004  # Too soon for the system's counters to have moved.
        with mock.patch.object(launch_report, "read_step_times", return_value=(10.001, 10.002)):
            self.assertEqual(self._measure(meter), ProcessorUse(50.0, "steps"))

    def test_without_steps_the_whole_job_counts(self):
        meter = self._record([(0, 0), (10, 10), (20, 10), (30, 15)])
        self.assertEqual(self._measure(meter), ProcessorUse(50.0, "job"))

    def test_measures_this_machine(self):
        meter = ProcessorMeter()
        meter.sample()
        while (use := meter.measure([])) is None:  # the system's clock has not ticked yet
            pass
        self.assertBetween(use.busy_percent, 0, 100)

    def _record(self, samples):
        """Makes a meter that has read (seconds, busy seconds of each of two cores)."""
        self._clock = self.enter_context(mock.patch.object(launch_report.time, "monotonic"))
        cpu_times = self.enter_context(mock.patch.object(launch_report.psutil, "cpu_times"))
        self.enter_context(mock.patch.object(launch_report.os, "sched_getaffinity", return_value={0, 1}))
        meter = ProcessorMeter()
        for now, busy in samples:
            self._clock.return_value = float(now)
            cpu_times.return_value = [_CpuTimes(busy, 0, (now - busy) / 2, (now - busy) / 2, busy)] * 2
            meter.sample()
        return meter

    def _measure(self, meter):
        return meter.measure([])


def _task(rank, *, exit_code=0, end_time=0.0, ended_by_launcher=False, last_words="", earlier=()):
    return TaskReport(
        task=Task("worker", rank),
        exit_code=exit_code,
        seconds=4.0,
        end_time=end_time,
        ended_by_launcher=ended_by_launcher,
        log_path=f"/logs/worker_{rank}.log",
        last_words=last_words,
        earlier=earlier,
    )


def _report(*, tasks=(), outcome=Outcome.COMPLETED, signum=None, emulation=None, processor_use=None):
    return JobReport(
        tasks=list(tasks),
        seconds=5.0,
        outcome=outcome,
        signum=signum,
        emulation=emulation,
        processor_use=processor_use,
    )


if __name__ == "__main__":
    absltest.main()

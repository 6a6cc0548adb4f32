"""`benchmarks/gpu_check.sh` and `benchmark_cuda.py` without a device: a dry run, and runs on a simulated device."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import stat
import subprocess
import sys
import tempfile
import unittest

import pytest
from absl.testing import absltest, parameterized

from support import host_device

_TIMEOUT_SECONDS = 300

# Stands in for nvcc. With -DBAD the library cannot be loaded.
_NVCC = """\
#!/bin/bash
[[ " $* " == *" -DBAD "* ]] && HOST_DEVICE=$0
while (($#)); do [[ $1 == -o ]] && cp "$HOST_DEVICE" "$2"; shift; done
exit 0
"""
# Stands in for a tool that runs a program: drops the tool's own options.
_TOOL = """\
#!/bin/bash
while [[ $1 != python* && $1 != */python* ]]; do [[ $1 == --log-file ]] && touch "$2"; shift; done
exec "$@"
"""


def _write_tools(folder, **tools):
    for name, text in tools.items():
        path = folder / name.replace("_", "-")
        path.write_text(text)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)


class _ScriptTestCase(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
        self.tools, self.results = self.folder / "tools", self.folder / "results"
        self.tools.mkdir()
        self.environment = {
            "CUDA_HOME": str(self.folder / "no_cuda"),
            "HOME": str(self.folder),
            "OUT": str(self.results),
            "PATH": f"{self.tools}:/usr/bin:/bin",
            "PROCESSOR_LIBRARY": str(host_device.KERNELS),
            "PYTHON": sys.executable,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }

    def run_script(self, **environment):
        command = ["bash", str(host_device.ROOT / "benchmarks" / "gpu_check.sh")]
        return self.run_command(command, **environment)

    def run_command(self, command, **environment):
        return subprocess.run(
            command,
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=self.environment | environment,
            text=True,
            timeout=_TIMEOUT_SECONDS,
        )

    def result_files(self):
        return {path.name for path in self.results.iterdir()}


class DryRunTest(_ScriptTestCase):
    def setUp(self):
        super().setUp()
        self.environment["LD_LIBRARY_PATH"] = str(self.folder)
        (self.folder / "libcuda.so.1").write_text("This driver cannot be loaded.")

    def test_says_that_there_is_no_device(self):
        done = self.run_script(STEPS="0 1 2 3 4 7 8")
        self.assertEqual(done.returncode, 0, done.stdout)
        self.assertRegex(done.stdout, r"no device: there is no CUDA driver")
        self.assertRegex(done.stdout, r"left out: build for CUDA, because there is no nvcc")
        self.assertRegex(done.stdout, r"0 failed, \d+ s, results in .*\nno device\n\Z")
        self.assertLessEqual(self.result_files(), {"build.txt", "checks.txt", "table.md"})
        self.assertIn("NumPy", (self.results / "build.txt").read_text())

    def test_counts_what_fails(self):
        _write_tools(self.tools, nvcc="#!/bin/bash\necho It is out of order. >&2\nexit 2\n")
        done = self.run_script(STEPS="1")
        self.assertEqual(done.returncode, 1, done.stdout)
        self.assertRegex(done.stdout, r"FAILED   build today: exit code 2: It is out of order\.")
        self.assertRegex(done.stdout, r"1 failed, .*\nno device\n\Z")

    def test_says_what_it_has_no_time_for(self):
        _write_tools(self.tools, nvcc=_NVCC)
        done = self.run_script(STEPS="0 1", BUDGET="0")
        self.assertEqual(done.returncode, 1, done.stdout)
        self.assertRegex(done.stdout, r"FAILED   python: skipped, no time is left")
        self.assertRegex(done.stdout, r"FAILED   build today: skipped, no time is left")


@unittest.skipUnless(host_device.can_build(), "needs a C++ compiler and the kernels for processors")
class HostDeviceTest(_ScriptTestCase):
    """On a driver and kernels that use this machine's memory."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.driver = host_device.build_driver(folder.name)
        cls.library = shutil.copy(cls.driver, pathlib.Path(folder.name, "libhop_tf_cuda.so"))

    def setUp(self):
        super().setUp()
        self.environment |= {"LD_LIBRARY_PATH": str(self.driver.parent), "HOST_DEVICE": str(self.library)}

    def run_benchmark(self, *arguments, **environment):
        script = str(host_device.ROOT / "benchmarks" / "benchmark_cuda.py")
        libraries = [f"--library=today={self.library}", f"--processor={host_device.KERNELS}"]
        options = [*libraries, f"--json={self.folder / 'run.json'}"]
        done = self.run_command([sys.executable, script, *options, *arguments], **environment)
        return done, json.loads((self.folder / "run.json").read_text())

    def test_measures_versions_in_the_same_rounds(self):
        done, results = self.run_benchmark(
            f"--library=base={self.library}",
            "--checks=none",
            "--sizes=1K,64K",
            "--data=narrow,fp16",
            "--seconds=1",
            "--rounds=4",
        )
        self.assertEqual(done.returncode, 0, done.stdout)
        rows = results["rows"]
        self.assertLen(rows, 2 * 2 * (2 * 9 + 1))  # One row for the copy.
        self.assertEqual({row["version"] for row in rows}, {"today", "base"})
        self.assertTrue(all(3 <= row["rounds"] <= 4 and row["rounds_ahead"] == row["rounds"] for row in rows))
        copies = [row for row in rows if row["kernel"] == "copy"]
        self.assertEqual({row["share"] for row in copies}, {1.0})
        sketches = {row["data"]: row["bytes_per_value"] for row in rows if row["kernel"] == "sketch encode"}
        self.assertEqual(sketches, {"narrow": 3 * 4 + 1, "fp16": 2 * 2 + 1})  # Bins of float32 take a third pass.
        self.assertIn("sketch encode", done.stdout)
        self.assertIn("base", done.stdout)
        self.assertEqual(self.run_command([*done.args[:2], f"--show={self.folder / 'run.json'}"]).stdout, done.stdout)

    def test_marks_what_was_measured_with_the_host_late(self):
        arguments = "--checks=none", "--sizes=1K", "--data=gaussian", "--rounds=3"
        done, results = self.run_benchmark(*arguments, HOST_DEVICE_FAULT="late")
        self.assertEqual(done.returncode, 0, done.stdout)
        self.assertEqual({row["rounds_ahead"] for row in results["rows"]}, {0})
        self.assertRegex(done.stdout, r"sketch encode +[\d.]+\? ")

    @parameterized.parameters(
        ("unwritten", "truncate16_encode"), ("behind", "sketch_encode: a kernel wrote behind an array")
    )
    def test_checks_find_faults(self, fault, message):
        arguments = "--checks=quick", "--check_sizes=1025", "--check_data=gaussian", "--sizes="
        done, results = self.run_benchmark(*arguments, HOST_DEVICE_FAULT=fault)
        self.assertEqual(done.returncode, 1, done.stdout)
        self.assertRegex(done.stdout, f"DIFFERS: today, gaussian, 1025 .*: {message}")
        self.assertNotEmpty(results["differences"])

    def test_measurements_find_unwritten_results(self):
        arguments = "--checks=none", "--sizes=64K", "--data=gaussian", "--rounds=3"
        done, results = self.run_benchmark(*arguments, HOST_DEVICE_FAULT="unwritten")
        self.assertEqual(done.returncode, 1, done.stdout)
        self.assertIn("gaussian, 64K: truncate16 encode: a part of the result was not written", results["differences"])

    @pytest.mark.stress
    def test_whole_script(self):
        _write_tools(self.tools, nvcc=_NVCC, compute_sanitizer=_TOOL, ncu=_TOOL)
        done = self.run_script(
            BASE_CUDA=str(host_device.ROOT / "ops" / "cuda"),
            BUDGET="250",
            DATA="gaussian,half_equal",
            SIZES="1K,64K",
            STEPS="0 1 2 3 7 8",
            TIMING_SECONDS="2",
            VARIANTS="-DBAD;-DB=2 -DC=3",
        )
        self.assertEqual(done.returncode, 1, done.stdout)
        self.assertRegex(done.stdout, r"\n1 failed, \d+ s, results in ")
        self.assertRegex(done.stdout, r"FAILED   quick checks v1: exit code 1: .*(ELF header|file too short)")
        self.assertNotIn("no device", done.stdout)
        self.assertRegex(done.stdout, r"version v2: -DB=2 -DC=3")
        files = {"build.txt", "checks.txt", "ncu.csv", "run.json", "sanitizer.txt", "table.md"}
        self.assertEqual(self.result_files(), files)
        libraries = json.loads((self.results / "run.json").read_text())["libraries"]
        self.assertEqual(list(libraries), ["today", "base", "v2"])


if __name__ == "__main__":
    absltest.main()

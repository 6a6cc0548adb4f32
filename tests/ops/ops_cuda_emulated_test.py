"""The CUDA kernels on the processor: `emulated_cuda` runs their threads, one after another, in many orders."""

import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

import pytest
from absl.testing import absltest, parameterized

from support import host_device

_CUDA = host_device.ROOT / "ops" / "cuda"
_EMULATOR = pathlib.Path(__file__).with_name("emulated_cuda")
_TIMEOUT_SECONDS = 600


def _build(folder):
    """Compiles the kernels for CUDA as C++, and returns their library."""
    sources, library = pathlib.Path(folder, "ops", "cuda"), pathlib.Path(folder, "libhop_tf_cuda.so")
    sources.mkdir(parents=True)
    sources.with_name("kernels").symlink_to(_CUDA.with_name("kernels").resolve())
    for path in (*_CUDA.glob("*.cu"), *_CUDA.glob("*.cuh"), *_CUDA.glob("*.h")):
        pattern = r"extern __shared__ (.+) (\w+)\[\];"
        pointer = r"auto* const \2 = reinterpret_cast<\1*>(emulated::dynamic_shared_memory);"
        (sources / path.name).write_text(re.sub(pattern, pointer, path.read_text()))
    options = ["-O1", "-std=c++17", "-fPIC", "-shared", "-fvisibility=hidden", "-ffp-contract=off"]
    options += [f"-I{_EMULATOR}", "-include", "cuda_runtime.h", "-x", "c++", "-o", library]
    subprocess.run([host_device.COMPILER, *options, *sorted(sources.glob("*.cu"))], check=True)
    return library


@unittest.skipUnless(host_device.can_build(), "needs a C++ compiler and the kernels for processors")
class EmulatedKernelsTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        host_device.build_driver(folder.name)
        cls.library = _build(folder.name)

    def check(self, sizes, data, **environment):
        """Compares with the kernels for processors, as `benchmark_cuda.py` does on a device."""
        script = host_device.ROOT / "benchmarks" / "benchmark_cuda.py"
        kernels = f"--library=emulated={self.library}", f"--processor={host_device.KERNELS}"
        cases = "--checks=quick", f"--check_sizes={sizes}", f"--check_data={data}", "--sizes="
        done = subprocess.run(
            [sys.executable, script, *kernels, *cases],
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | {"LD_LIBRARY_PATH": str(self.library.parent)} | environment,
            text=True,
            timeout=_TIMEOUT_SECONDS,
        )
        self.assertEqual(done.returncode, 0, done.stdout)

    def test_where_a_count_is_too_large_for_its_word(self):
        self.check("300000", "some_equal", EMULATED_SEED="1")

    @parameterized.parameters("gaussian,sparse", "half_equal,narrow", "many_bins,tiny", "all_equal,patterns,some_equal")
    @pytest.mark.slow
    @pytest.mark.stress(but=1)
    def test_in_any_order(self, data):
        self.check("3,5001", data, EMULATED_SEED="2")

    @parameterized.parameters("half_equal,narrow", "many_bins,gaussian")
    @pytest.mark.stress
    def test_many_values(self, data):
        self.check("300000", data, EMULATED_SEED="3")

    @parameterized.parameters((64, "narrow,half_equal"), (99, "many_bins,sparse"))
    @pytest.mark.slow
    @pytest.mark.stress(but=1)
    def test_on_a_device_with_less_shared_memory(self, num_kilobytes, data):
        self.check("20000", data, EMULATED_SHARED_BYTES=str(num_kilobytes << 10))


if __name__ == "__main__":
    absltest.main()

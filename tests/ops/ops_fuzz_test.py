"""Builds the kernels with sanitizers (addresses, undefined behavior, threads) and calls them with random arguments."""

import os
import pathlib
import shutil
import subprocess
import tempfile
import unittest

import pytest
from absl.testing import absltest, parameterized

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_KERNELS = _ROOT / "ops" / "kernels"
_COMPILER = os.environ.get("CXX", "g++")
_SEED = os.environ.get("HOP_TF_SCHEDULE_SEED", "1")
_NUM_ROUNDS = 50

_OPTIONS = [
    *("-std=c++17", "-g1", "-ffp-contract=off", "-pthread", "-Wall", "-Wextra", "-Werror"),
    *("-fno-sanitize-recover=all", "-DHOP_TF_SINGLE_VERSION"),
]
_ADDRESSES, _THREADS = "address,undefined", "thread"  # No program can have both.
# What Linux calls the instructions that a set has beyond x86-64, or those of v3.
_FLAGS = {
    "x86-64-v3": {"avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"},
    "x86-64": set(),
    "x86-64-v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
}


def _compile(sanitizer, *arguments):
    subprocess.run([_COMPILER, *_OPTIONS, f"-fsanitize={sanitizer}", *map(str, arguments)], check=True, timeout=300)


def _flags():
    """Of this machine's processor."""
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next((set(line.split(":")[1].split()) for line in lines if line.startswith("flags")), set())


@unittest.skipIf(shutil.which(_COMPILER) is None, f"needs the C++ compiler {_COMPILER}")
@unittest.skipIf(os.uname().machine != "x86_64", "needs an x86-64 processor")
class FuzzTest(parameterized.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = pathlib.Path(folder.name)

    def _objects(self, sanitizer):
        """Compiles what has one version only, as it is shipped: for any processor, with all optimizations."""
        folder = self.folder / sanitizer
        if not folder.exists():
            folder.mkdir()
            _compile(sanitizer, "-O1", "-c", _ROOT / "tests" / "ops" / "ops_fuzz.cc", "-o", folder / "ops_fuzz.o")
            for source in set(_KERNELS.glob("*.cc")) - {_KERNELS / "tiles.cc"}:
                _compile(sanitizer, "-O3", "-c", source, "-o", folder / f"{source.stem}.o")
        return folder.glob("*.o")

    # Sanitizers do not work with functions of several versions: for each instruction set these are built by themselves.
    @parameterized.parameters(*((_ADDRESSES, machine) for machine in _FLAGS), (_THREADS, "x86-64"))
    @pytest.mark.stress
    def test_random_calls(self, sanitizer, machine):
        if not _FLAGS[machine] <= _flags():
            self.skipTest(f"needs a processor with {machine}")
        program = self.folder / f"{sanitizer} {machine}"
        tiles = _KERNELS / "tiles.cc"
        _compile(sanitizer, "-O3", f"-march={machine}", *self._objects(sanitizer), tiles, "-o", program)
        result = subprocess.run(
            [program, _SEED, str(_NUM_ROUNDS)], capture_output=True, text=True, timeout=300, check=False
        )
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        self.assertEqual(result.stdout, f"{_NUM_ROUNDS} rounds\n")


if __name__ == "__main__":
    absltest.main()

"""Builds the kernels with AddressSanitizer and UndefinedBehaviorSanitizer and calls them with random arguments."""

import os
import pathlib
import shutil
import subprocess
import tempfile
import unittest

from absl.testing import absltest, parameterized

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_COMPILER = os.environ.get("CXX", "g++")
_NUM_ROUNDS = 25


@unittest.skipIf(shutil.which(_COMPILER) is None, f"needs the C++ compiler {_COMPILER}")
class FuzzTest(parameterized.TestCase):
    # Sanitizers do not work with functions of several versions: each instruction set is built by itself.
    @parameterized.parameters("-march=x86-64", "-march=x86-64-v3")
    def test_random_calls(self, machine):
        if os.uname().machine != "x86_64":
            self.skipTest("needs an x86-64 processor")
        program = os.path.join(self.enter_context(tempfile.TemporaryDirectory()), "ops_fuzz")
        sources = [_ROOT / "tests" / "ops_fuzz.cc", *sorted((_ROOT / "ops" / "kernels").glob("*.cc"))]
        options = ["-std=c++17", "-O1", "-g", "-ffp-contract=off", "-pthread", "-Wall", "-Wextra", "-Werror", machine]
        sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-DHOP_TF_SINGLE_VERSION"]
        subprocess.run([_COMPILER, *options, *sanitizers, *map(str, sources), "-o", program], check=True, timeout=300)
        for seed in (1, 2):
            result = subprocess.run(
                [program, str(seed), str(_NUM_ROUNDS)], capture_output=True, text=True, timeout=300, check=False
            )
            self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
            self.assertEqual(result.stdout, f"{_NUM_ROUNDS} rounds\n")


if __name__ == "__main__":
    absltest.main()

"""Runs the registered operations on a stand-in for TensorFlow: see the folder stand_in.

`python3 tests/ops/tensorflow_stand_in_test.py` needs NumPy, absl and g++, and uses a CUDA device if there is one. Then
it needs nvcc, too, and HOP_TF_CUDA_LIBRARY may name a libhop_tf_cuda.so that is built already.
"""

import os
import pathlib
import shutil
import subprocess
import sys
import unittest

import pytest
from absl.testing import absltest

_FOLDER = pathlib.Path(__file__).resolve().parent / "stand_in"
_COMPILER = os.environ.get("CXX", "g++").split()[0]


@unittest.skipIf(shutil.which(_COMPILER) is None, f"needs the C++ compiler {_COMPILER}")
class TensorFlowStandInTest(absltest.TestCase):
    def run_program(self, name):
        """In a process of its own, because this one may have loaded TensorFlow."""
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("TEST_", "XML_"))}
        command = [sys.executable, str(_FOLDER / name)]
        result = subprocess.run(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
            check=False,
        )
        print(result.stdout)
        self.assertEqual(result.returncode, 0, f"{name} failed; its output is above.")

    @pytest.mark.slow
    def test_operations(self):
        self.run_program("operations.py")


if __name__ == "__main__":
    absltest.main()

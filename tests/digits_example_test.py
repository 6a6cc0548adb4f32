"""The example `digits.py`, started as its documentation says."""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

from absl.testing import absltest

from hop_tf.commands import launch  # noqa: F401  (marks this module as one that starts processes)

_EXAMPLE = pathlib.Path(__file__).parents[1] / "examples" / "digits.py"
_MISSING = [name for name in ("sklearn", "rich") if importlib.util.find_spec(name) is None]
_NUM_WORKERS = 2
_NUM_TRAINING_ROWS = 1347  # Three quarters of 1797.
_BATCH_SIZE = 64


@unittest.skipIf(_MISSING, f"needs the extra `examples`: {', '.join(_MISSING)} cannot be imported")
class DigitsExampleTest(absltest.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        with tempfile.TemporaryDirectory() as log_dir:
            launcher = [sys.executable, "-m", "hop_tf", "launch", f"--num_workers={_NUM_WORKERS}"]
            flags = [f"--log_dir={log_dir}/logs", "--timeout_seconds=240"]
            cls.completed = subprocess.run(
                [*launcher, *flags, str(_EXAMPLE), "--epochs=1", f"--batch_size={_BATCH_SIZE}"],
                capture_output=True,
                cwd=log_dir,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                text=True,
                timeout=300,
            )

    def test_succeeds(self):
        self.assertEqual(self.completed.returncode, 0, self.completed.stdout + self.completed.stderr)

    def test_prints_a_row_for_every_rank(self):
        num_steps = -(-_NUM_TRAINING_ROWS // _BATCH_SIZE)
        rows = re.findall(r"│ (\d+) +│ (\d+) +│ [\d.]+ +│ ([\d.]+) +│ ([\d.]+) +│ [\d.]+ +│", self.completed.stdout)
        self.assertEqual(
            [(int(rank), int(steps)) for rank, steps, _, _ in rows], [(r, num_steps) for r in range(_NUM_WORKERS)]
        )
        for _, _, accuracy, megabytes in rows:
            self.assertBetween(float(accuracy), 0.0, 1.0)
            self.assertGreater(float(megabytes), 0.0)

    def test_consensus_model_has_learned(self):
        (accuracy,) = re.findall(r"accuracy of the consensus model: ([\d.]+)", self.completed.stdout)
        self.assertGreater(float(accuracy), 0.3)  # Chance is 0.1.


if __name__ == "__main__":
    absltest.main()

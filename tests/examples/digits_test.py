"""The example `digits.py`, which is the demo: what it prints."""

import importlib.util
import pathlib
import re
import unittest

import pytest
from absl.testing import absltest

from hop_tf.tools.testing import MultiProcessRunner

_EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "digits.py"
_MISSING = [name for name in ("sklearn", "rich") if importlib.util.find_spec(name) is None]
_NUM_WORKERS = 2
_NUM_TRAINING_ROWS = 1347  # Three quarters of 1797.
_BATCH_SIZE = 64


@unittest.skipIf(_MISSING, f"needs the extra `examples`: {', '.join(_MISSING)} cannot be imported")
@pytest.mark.slow
class DigitsExampleTest(absltest.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        arguments = ["--epochs=1", f"--batch_size={_BATCH_SIZE}"]
        with MultiProcessRunner(_EXAMPLE, _NUM_WORKERS, args=arguments, timeout_seconds=240) as runner:
            cls.output = runner.join().raise_for_errors()[0].output

    def test_prints_a_row_for_every_rank(self):
        num_steps = -(-_NUM_TRAINING_ROWS // _BATCH_SIZE)
        rows = re.findall(r"│ (\d+) +│ (\d+) +│ [\d.]+ +│ ([\d.]+) +│ ([\d.]+) +│ [\d.]+ +│", self.output)
        self.assertEqual(
            [(int(rank), int(steps)) for rank, steps, _, _ in rows], [(r, num_steps) for r in range(_NUM_WORKERS)]
        )
        for _, _, accuracy, megabytes in rows:
            self.assertBetween(float(accuracy), 0.0, 1.0)
            self.assertGreater(float(megabytes), 0.0)

    def test_consensus_model_has_learned(self):
        (accuracy,) = re.findall(r"accuracy of the consensus model: ([\d.]+)", self.output)
        self.assertGreater(float(accuracy), 0.3)  # Chance is 0.1.


if __name__ == "__main__":
    absltest.main()

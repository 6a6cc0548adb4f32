"""Tests the pages in docs/migration/: a known tutorial runs with one line changed, and the pages' programs train."""

import os
import pathlib
import re
import runpy
import sys
import tempfile

import keras
import numpy as np
import pytest
from absl.testing import absltest, parameterized

from hop_tf.tools.testing import MultiProcessRunner

_TUTORIAL = pathlib.Path(__file__).parent / "tutorial.py"
_PAGES = pathlib.Path(__file__).parents[2] / "docs" / "migration"
_LINE = re.compile(r"^\| `(strategy = .+)` \| `(strategy = .+)` \|$", re.MULTILINE)
_PROGRAM = re.compile(r"^## A whole program\n.*?^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NUM_WORKERS = 2
_NUM_STEPS = 3 * 16  # Of each of the programs.


def _run(programs, arguments=()):
    """Runs the programs one after the other and returns their results."""
    return [_run_program(program, arguments) for program in programs]


def _run_program(program, arguments):
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        path = os.path.join(folder, "program.py")
        pathlib.Path(path).write_text(program)
        sys.argv[:] = [path, *arguments]
        names = runpy.run_path(path, run_name="__main__")
        strategy = names["strategy"]
        model = names["model"] if "model" in names else names["multi_worker_model"]
        result = {"history": names["history"].history, "weights": model.get_weights(), "files": os.listdir(folder)}
        strategy.shutdown()
        os.chdir("/")
    return {**result, "steps": strategy.report()["steps"]}


def _train(programs, *arguments, num_ps=0):
    """For each program, what each rank has come to; and what rank 0 has printed."""
    args = (programs, arguments)
    with MultiProcessRunner(_run, _NUM_WORKERS, num_ps=num_ps, args=args, timeout_seconds=240) as runner:
        results = runner.join().raise_for_errors()
    return [*zip(*results.values, strict=True)], results[0].output


class MigrationTest(parameterized.TestCase):
    @pytest.mark.slow
    def test_tutorial(self):
        """One line of it changes: the one that the page names."""
        ((before, after),) = _LINE.findall((_PAGES / "multi_worker_mirrored.md").read_text())
        program = _TUTORIAL.read_text()
        self.assertEqual(program.splitlines().count(before), 1)
        program = "import hop_tf\n" + program.replace(before, after)
        with tempfile.TemporaryDirectory() as folder:
            (ranks,), output = _train([program], folder)
            self.assertCountEqual(os.listdir(folder), ["model.keras", "checkpoint"])
            saved = keras.models.load_model(os.path.join(folder, "model.keras"))
            self.assertNotEmpty(os.listdir(os.path.join(folder, "checkpoint")))
        self._check_learned(ranks)
        for rank in ranks:
            self.assertGreater(rank["history"]["accuracy"][-1], 0.5)  # Chance is 0.1.
            np.testing.assert_array_equal(rank["weights"][0], saved.get_weights()[0])
        self.assertNotIn(
            "trains on other data", output
        )  # Its shuffle has no seed: ranks have one order, as the page says.

    @parameterized.parameters((["multi_worker_mirrored", "horovod", "single_gpu"], 0), (["parameter_server"], 1))
    @pytest.mark.stress
    def test_programs_of_the_pages(self, names, num_ps):
        programs = [program for name in names for program in _PROGRAM.findall((_PAGES / f"{name}.md").read_text())]
        self.assertLen(programs, len(names))
        results, output = _train(programs, num_ps=num_ps)
        for ranks in results:
            self._check_learned(ranks)
            self.assertEqual(["model.keras" in rank["files"] for rank in ranks], [True, False])
        self.assertNotIn("trains on other data", output)

    def test_finds_the_pages(self):
        self.assertLen(list(_PAGES.glob("*.md")), 4)

    def _check_learned(self, ranks):
        """All steps were made, losses have fallen, and weights are equal to the bit."""
        for rank in ranks:
            self.assertEqual(rank["steps"], _NUM_STEPS)
            self.assertLess(rank["history"]["loss"][-1], rank["history"]["loss"][0])
            for mine, other in zip(rank["weights"], ranks[0]["weights"], strict=True):
                self.assertEqual(mine.tobytes(), other.tobytes())


if __name__ == "__main__":
    absltest.main()

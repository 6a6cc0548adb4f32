"""What the pages in docs/migration/ say: a known tutorial runs with one other line, and the pages' programs train."""

import os
import pathlib
import re
import runpy
import sys
import tempfile

import keras
import numpy as np
from absl.testing import absltest, parameterized

from hop_tf.testing import MultiProcessRunner

_TUTORIAL = pathlib.Path(__file__).parent / "tutorial.py"
_PAGES = pathlib.Path(__file__).parents[2] / "docs" / "migration"
_LINE = re.compile(r"^\| `(strategy = .+)` \| `(strategy = .+)` \|$", re.MULTILINE)
_PROGRAM = re.compile(r"^## A whole program\n.*?^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NUM_WORKERS = 2


def _run(program, arguments=()):
    """What a program has come to, which is run in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        path = os.path.join(folder, "program.py")
        pathlib.Path(path).write_text(program)
        sys.argv[:] = [path, *arguments]
        names = runpy.run_path(path, run_name="__main__")
        strategy, model = (
            names["strategy"],
            next(names[name] for name in ("multi_worker_model", "model") if name in names),
        )
        history, weights, files = names["history"].history, model.get_weights(), os.listdir(folder)
        strategy.shutdown()
        os.chdir("/")
    return {"history": history, "weights": weights, "files": files, "steps": strategy.report()["steps"]}


def _train(program, *arguments, num_ps=0):
    args = (program, arguments)
    with MultiProcessRunner(_run, _NUM_WORKERS, num_ps=num_ps, args=args, timeout_seconds=240) as runner:
        return runner.join().raise_for_errors()


class MigrationTest(parameterized.TestCase):
    def test_tutorial(self):
        """One line of it changes: the one that the page names."""
        ((before, after),) = _LINE.findall((_PAGES / "multi_worker_mirrored.md").read_text())
        program = _TUTORIAL.read_text()
        self.assertEqual(program.splitlines().count(before), 1)
        program = "import hop_tf\n" + program.replace(before, after)
        with tempfile.TemporaryDirectory() as folder:
            results = _train(program, folder)
            self.assertCountEqual(os.listdir(folder), ["model.keras", "checkpoint"])
            saved = keras.models.load_model(os.path.join(folder, "model.keras"))
            self.assertNotEmpty(os.listdir(os.path.join(folder, "checkpoint")))
        for value in results.values:
            self.assertEqual(value["steps"], 3 * 16)
            self._check_learned(value, results[0].value)
            self.assertGreater(value["history"]["accuracy"][-1], 0.5)  # Chance is 0.1.
            np.testing.assert_array_equal(value["weights"][0], saved.get_weights()[0])
        self.assertIn("rank 1 trains on other data than rank 0", results[0].output)  # As the page says.

    @parameterized.parameters("multi_worker_mirrored", "horovod", "single_gpu", "parameter_server")
    def test_program_of_the_page(self, name):
        (program,) = _PROGRAM.findall((_PAGES / f"{name}.md").read_text())
        results = _train(program, num_ps=name == "parameter_server")
        for rank, value in enumerate(results.values):
            self.assertEqual(value["steps"], 3 * 16)
            self._check_learned(value, results[0].value)
            self.assertEqual("model.keras" in value["files"], rank == 0)
            self.assertNotIn("trains on other data", results[rank].output)

    def test_finds_the_pages(self):
        self.assertLen(list(_PAGES.glob("*.md")), 4)

    def _check_learned(self, value, of_rank_0):
        """Losses have fallen, and weights are equal to the bit."""
        self.assertLess(value["history"]["loss"][-1], value["history"]["loss"][0])
        for mine, other in zip(value["weights"], of_rank_0["weights"], strict=True):
            self.assertEqual(mine.tobytes(), other.tobytes())


if __name__ == "__main__":
    absltest.main()

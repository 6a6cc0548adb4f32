"""The notebook in examples/: its cells run one after the other, and do what they say. Jupyter is not needed."""

import contextlib
import io
import json
import os
import pathlib
import shlex
import subprocess
import sys
import tempfile

import pytest
from absl.testing import absltest

from hop_tf.tools.testing import MultiProcessRunner

_NOTEBOOK = pathlib.Path(__file__).parents[2] / "examples" / "from_a_notebook.ipynb"
_WRITE, _COMMAND = "%%writefile ", "!"


def _run_cells(cells, folder):
    """Runs the cells and returns the output of each."""
    os.chdir(folder)
    names, outputs = {}, []
    for cell in cells:
        if cell.startswith(_WRITE):
            first, _, text = cell.partition("\n")
            pathlib.Path(first.removeprefix(_WRITE)).write_text(text)
            outputs.append("")
        elif cell.startswith(_COMMAND):
            outputs.append(_run_command(cell.removeprefix(_COMMAND)))
        else:
            with contextlib.redirect_stdout(io.StringIO()) as output:
                exec(compile(cell, "cell", "exec"), names)
            outputs.append(output.getvalue())
    return outputs


def _run_command(command):
    python, *arguments = shlex.split(command)
    assert python == "python", command
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    completed = subprocess.run([sys.executable, *arguments], env=environment, timeout=240, **pipes)
    if completed.returncode != 0:
        raise RuntimeError(f"{command} ended with exit code {completed.returncode}:\n{completed.stdout}")
    return completed.stdout


class NotebookTest(absltest.TestCase):
    @pytest.mark.stress
    def test_cells(self):
        notebook = json.loads(_NOTEBOOK.read_text())
        code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        for cell in code:
            self.assertEmpty(cell["outputs"])  # They would be those of somebody's machine.
        with tempfile.TemporaryDirectory() as folder:
            arguments = (["".join(cell["source"]) for cell in code], folder)
            # In a process of its own, as the kernel of a notebook is one.
            with MultiProcessRunner(_run_cells, 1, args=arguments, timeout_seconds=300) as runner:
                (outputs,) = runner.join().raise_for_errors().values
        _, launched, history, evaluated = outputs
        for rank in range(2):
            self.assertIn(f"rank {rank} of 2 has made 160 steps", launched)
        self.assertRegex(history, "epoch 4: loss [0-9.]+, accuracy 0?[.1]")
        self.assertRegex(evaluated, r"accuracy on new points: (0\.[89]|1)")


if __name__ == "__main__":
    absltest.main()

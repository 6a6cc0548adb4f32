"""The programs in examples/, each on real ranks: they learn, exchange what they should, and end as they say."""

import ast
import dataclasses
import hashlib
import importlib.util
import os
import pathlib
import runpy
import sys
import tempfile
import unittest
from collections.abc import Mapping

import pytest
from absl.testing import absltest, parameterized

from hop_tf.tools.testing import MultiProcessRunner

_EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


@dataclasses.dataclass(frozen=True)
class Case:
    """The start of an example, and the results that its ranks must have.

    Attributes:
      arguments: The program's arguments.
      num_workers: Number of ranks.
      num_ps: Number of parameter servers.
      environment: Environment variables of the processes.
      loss: Name in the history of the loss that must fall.
      metric: Name in the history of the metric whose last value is bounded.
      above: Lower bound of the metric.
      below: Upper bound of the metric.
      is_equal: True if all ranks must end with the same trainable variables, to the bit.
      saves: A file that only rank 0 leaves.
      prints: A regular expression that the output of rank 0 must match.
    """

    arguments: tuple[str, ...] = ("--synthetic", "--epochs=2")
    num_workers: int = 2
    num_ps: int = 0
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    loss: str = "loss"
    metric: str = "val_accuracy"
    above: float = 0.5
    below: float = 1.0
    is_equal: bool = True
    saves: str | None = None
    prints: str = "."


_CASES = {
    "image_classification": Case(
        ("--synthetic", "--epochs=2", "--batch_size=32"),
        metric="accuracy",
        above=0.3,  # Chance is 0.1.
        saves="image_classification.keras",
    ),
    "text_classification": Case(above=0.75),  # Chance is 0.5.
    "gan": Case(loss="d_loss", metric="d_loss", above=0, below=1.3, saves="gan_15.png"),  # By chance: 1.39.
    "custom_loop": Case(("--epochs=3",), metric="loss", above=0, below=0.5, prints=r"on new points: 0\.[89]"),
    "fine_tuning": Case(
        prints=r"exchanged 4880 of the model's 271370 values",
        saves="fine_tuning.keras",
    ),
    "time_series": Case(("--days=60", "--epochs=2"), metric="val_mae", above=0, below=0.7, prints="mean error: "),
    "tune": Case(("--trials=2", "--epochs=3"), metric="loss", above=0, below=0.7, prints="best of 2 trials: .*units"),
    "recommender": Case(
        ("--synthetic", "--epochs=4"), num_ps=1, metric="val_loss", above=0, below=0.05, prints=r"error: 0\.0"
    ),
    "slow_worker": Case(
        ("--epochs=2",),
        num_workers=3,
        environment={"HOP_TF_STEP_SECONDS": "0.02", "HOP_TF_SLOWDOWN": "1:4x"},
        prints=r"accuracy of the averaged model: (0\.[5-9]|1)",
    ),
    "find_the_slow_worker": Case(
        ("--epochs=3", "--batch_shares=auto"),
        num_workers=3,
        environment={"HOP_TF_STEP_SECONDS": "0.05", "HOP_TF_SLOWDOWN": "1:3x"},
        metric="accuracy",
        prints=r"parts of a batch: rank 0 0\.[345].*, rank 1 0\.[012]",  # 3/7 and 1/7, on a quiet machine.
    ),
    "several_interfaces": Case(
        ("--epochs=2",),
        num_workers=4,
        environment={"HOP_TF_INTERFACES": "127.0.0.1,127.0.0.2"},
        loss="val_loss",  # A rank that skips an epoch has no loss of it.
        prints="bytes_sent_on_lane_2",
    ),
}


def _run(path, arguments, folder):
    """Runs the program and returns a rank's result. On a parameter server the process ends inside the program."""
    os.chdir(tempfile.mkdtemp(dir=folder))  # Where it saves.
    sys.argv[:] = [path, *arguments]
    names = runpy.run_path(path, run_name="__main__")
    strategy, model = names["strategy"], names["model"]
    result = {
        "history": names["history"].history if "history" in names else {"loss": names["losses"]},
        "trained": hashlib.sha256(b"".join(v.numpy().tobytes() for v in model.trainable_variables)).hexdigest(),
        "report": strategy.report(),
        "files": os.listdir(),
    }
    strategy.shutdown()
    return result


def _results(name):
    case = _CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        runner = MultiProcessRunner(
            _run,
            case.num_workers,
            num_ps=case.num_ps,
            args=(str(_EXAMPLES / f"{name}.py"), case.arguments, folder),
            env=case.environment,
            timeout_seconds=240,
        )
        with runner:
            return runner.join().raise_for_errors()


class ExamplesTest(parameterized.TestCase):
    @parameterized.parameters(*_CASES, "digits", "own_strategy", "two_sites")
    def test_says_how_to_start_it(self, name):
        description = ast.get_docstring(ast.parse((_EXAMPLES / f"{name}.py").read_text()))
        self.assertRegex(description, rf"python .*examples/{name}\.py")
        self.assertRegex(description, rf"(?s)(--hosts=|TF_CONFIG=).*examples/{name}\.py")

    # The larger ones are run by `make stress`.
    @parameterized.parameters(
        *(
            name
            for name in reversed(_CASES)
            if name not in ("tune", "slow_worker", "find_the_slow_worker", "several_interfaces")
        )
    )
    @pytest.mark.stress(after=1)
    @pytest.mark.slow
    def test_example(self, name):
        self._check(name)

    @unittest.skipUnless(importlib.util.find_spec("keras_tuner"), "needs keras-tuner")
    @pytest.mark.slow
    def test_tune(self):
        self._check("tune")

    @pytest.mark.stress
    def test_slow_worker(self):
        """It makes fewer steps than the others, which do not wait for it."""
        steps = [report["steps"] for report in self._check("slow_worker")]
        self.assertLess(steps[1], min(steps[0], steps[2]))

    @pytest.mark.stress
    def test_find_the_slow_worker(self):
        """Ranks agree on a smaller part for it."""
        self._check("find_the_slow_worker")

    @pytest.mark.stress
    def test_several_interfaces(self):
        """Both carry about the same. What is sent once, at the start, is on the first one."""
        for report in self._check("several_interfaces"):
            first, second = (report[f"bytes_sent_on_lane_{lane}"] for lane in (1, 2))
            self.assertBetween(second, 0.5 * first, 1.5 * first)

    def _check(self, name):
        """Runs an example, and returns the ranks' reports."""
        case, results = _CASES[name], _results(name)
        for rank, value in enumerate(results.values):
            history = value["history"]
            self.assertLess(history[case.loss][-1], history[case.loss][0])
            self.assertBetween(history[case.metric][-1], case.above, case.below)
            self.assertGreater(value["report"]["steps"], 0)
            self.assertGreater(value["report"]["bytes_sent"], 0)
            self.assertEqual(case.saves in value["files"], case.saves is not None and rank == 0)
        self.assertEqual(len({value["trained"] for value in results.values}) == 1, case.is_equal)
        self.assertRegex(results[0].output, case.prints)
        return [value["report"] for value in results.values]


if __name__ == "__main__":
    absltest.main()

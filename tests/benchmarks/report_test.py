"""`benchmarks/report.py`: what it runs again, what it calls reached and worse, and its page."""

import json
import pathlib
import sys
import tempfile
from unittest import mock

import numpy as np
import report
import report_page
import report_table
import results
from absl import flags
from absl.testing import absltest, flagsaver, parameterized
from report_page import Measurements, Report, Value
from report_table import Experiment, Row

_SCRIPT = """
import argparse, json, pathlib, sys, time
parser = argparse.ArgumentParser()
parser.add_argument("--output")
parser.add_argument("--values", default="1")
parser.add_argument("--fails", action="store_true")
parser.add_argument("--sleeps", action="store_true")
arguments = parser.parse_args()
if arguments.sleeps:
    time.sleep(100)
line = {"quantity": "seconds", "case": "it", "values": list(map(float, arguments.values.split(",")))}
pathlib.Path(arguments.output, "measurements.jsonl").write_text(json.dumps(line) + "\\n")
with open(pathlib.Path(__file__).with_name("runs"), "a") as file:
    file.write("run ")
sys.exit(7 if arguments.fails else 0)
"""


def _row(**arguments):
    return Row("it", "one", "Seconds of it", "seconds[it]", **arguments)


class ReportTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
        (self.folder / "script.py").write_text(_SCRIPT)
        self.docs = self.folder / "docs"
        if not flags.FLAGS.is_parsed():
            flags.FLAGS.mark_as_parsed()
        self.enter_context(mock.patch.object(report, "_BENCHMARKS", self.folder))
        self.enter_context(mock.patch.object(report, "_commit", lambda: "a commit"))
        self.enter_context(mock.patch.object(report_table, "ROWS", [_row(at_least=1.0)]))
        self.enter_context(mock.patch.object(report_table, "PICTURES", []))

    def run_report(self, *arguments, size="small", timeout_minutes=1.0, **of_experiment):
        experiment = Experiment("one", "One", " ".join(["script.py", *arguments]), quick="", **of_experiment)
        with (
            mock.patch.object(report_table, "EXPERIMENTS", [experiment]),
            flagsaver.flagsaver(
                (report._SIZE, size),
                (report._TIMEOUT_MINUTES, timeout_minutes),
                (report._DOCS, str(self.docs)),
                (results.OUTPUT, str(self.folder / "output")),
            ),
        ):
            report.main([])
        return (self.docs / "results.md").read_text()

    @property
    def num_runs(self):
        return len((self.folder / "runs").read_text().split())

    def test_page_and_raw_data(self):
        page = self.run_report("--values=1,3,2")
        self.assertIn("of commit a commit, size small", page)
        self.assertIn("| Seconds of it | 2.00 ± 1.00 | at least 1 |  |  |", page)
        self.assertIn("1 of 1 measured values are as required.", page)
        self.assertIn("`python benchmarks/script.py --values=1,3,2`", page)
        self.assertNotIn("Worse", page)
        raw = json.loads((self.docs / "results.json").read_text())
        self.assertEqual(raw["rows"], {"it": {"median": 2.0, "spread": 1.0}})
        self.assertEqual(
            raw["measurements"], [{"experiment": "one", "quantity": "seconds", "case": "it", "values": [1.0, 3.0, 2.0]}]
        )

    def test_marks_what_is_missed(self):
        page = self.run_report("--values=0.5")
        self.assertIn("0 of 1 measured", page)
        self.assertIn("| 0.50 ± 0.10 | at least 1 |  | **missed** |", page)

    def test_goes_on_after_an_interruption(self):
        self.run_report()
        self.run_report()
        self.assertEqual(self.num_runs, 1)
        self.run_report("--values=2")
        self.assertEqual(self.num_runs, 2)
        with mock.patch.object(report, "_commit", lambda: "another commit"):
            self.run_report("--values=2")
        self.assertEqual(self.num_runs, 3)

    def test_changed_files_are_measured_again(self):
        with mock.patch.object(report, "_commit", lambda: "a commit with changes"):
            self.run_report()
            self.run_report()
        self.assertEqual(self.num_runs, 2)

    def test_what_has_failed_runs_again(self):
        page = self.run_report("--fails")
        self.assertIn("It ended with exit code 7", page)
        self.run_report("--fails")
        self.assertEqual(self.num_runs, 2)

    def test_what_takes_too_long_is_ended(self):
        page = self.run_report("--sleeps", timeout_minutes=0.01)
        self.assertIn("It took more than 0.01 minutes.", page)
        self.assertIn("| Seconds of it | not measured | at least 1 |  | |", page)

    def test_says_which_data_is_missing(self):
        with mock.patch.dict("os.environ", {"KERAS_HOME": str(self.folder)}):
            page = self.run_report(data="numbers")
        self.assertIn(f"It needs data that is not here: {self.folder / 'datasets' / 'numbers'}.", page)

    def test_names_what_is_worse_than_before(self):
        self.run_report("--values=2,2.1")
        page = self.run_report("--values=1.5,1.6")
        self.assertIn("- Seconds of it: 1.55 ± 0.05, before 2.05 ± 0.05", page)

    def test_quick_fails_if_a_row_is_worse(self):
        self.run_report("--values=2,2.1")
        self.run_report("--values=1.95,2.05", size="quick")
        with self.assertRaises(SystemExit) as caught:
            self.run_report("--values=1.5,1.6", size="quick")
        self.assertEqual(caught.exception.code, 1)

    def test_quick_fails_with_an_experiment(self):
        self.run_report()
        with self.assertRaises(SystemExit):
            self.run_report("--fails", size="quick")

    def test_quick_needs_a_page(self):
        with self.assertRaisesRegex(SystemExit, "run `make report` first"):
            self.run_report(size="quick")

    def test_what_was_never_reached_is_missed(self):
        self.run_report()
        with mock.patch.object(report_table, "ROWS", [_row(at_most=1.0)]):
            page = self.run_report("--values=inf")
        self.assertIn("| Seconds of it | inf ± 0.00 | at most 1 |  | **missed** |", page)
        self.assertIn("- Seconds of it: inf ± 0.00, before 1.00", page)

    def test_names_what_is_no_longer_measured(self):
        self.run_report()
        page = self.run_report("--fails")
        self.assertIn("Measured in the report before, but not now:\n\n- Seconds of it\n", page)

    def test_an_unknown_experiment_is_an_error(self):
        with (
            flagsaver.flagsaver((report._ONLY, ["two"])),
            self.assertRaisesRegex(report.app.UsageError, r"Received: \['two'\]"),
        ):
            self.run_report()

    @parameterized.parameters(
        ({"at_least": 1.0}, 0.5, 1.0, True),
        ({"at_least": 1.0}, 0.9, 1.0, False),  # Within the spread.
        ({"at_least": 1.0}, 2.0, 1.0, False),
        ({"at_most": 1.0}, 2.0, 1.0, True),
        ({"at_most": 1.0}, 0.5, 1.0, False),
    )
    def test_worse(self, required, now, before, expected):
        row = _row(**required)
        of_rows = ({"it": Value(value, 0.1)} for value in (now, before))
        worse = Report("small", [], [row], *of_rows, {}).worse
        self.assertEqual(worse, [row] if expected else [])

    def test_what_was_not_a_number_was_not_measured(self):
        (self.folder / "one").mkdir()
        with flagsaver.flagsaver((results.OUTPUT, str(self.folder / "one"))):
            results.show("it", {"seconds": [1.0, np.nan]})
        self.assertIsNone(Measurements({"one": self.folder / "one"}).value(_row(at_least=1.0)))


class HeadlinesTest(absltest.TestCase):
    """Experiments, rows and pictures refer to each other."""

    def test_names_occur_once(self):
        for each in (report_table.EXPERIMENTS, report_table.ROWS, report_table.PICTURES):
            names = [item.name for item in each]
            self.assertLen(set(names), len(names))

    def test_sections_are_experiments(self):
        names = {experiment.name for experiment in report_table.EXPERIMENTS}
        self.assertLessEqual({item.section for item in (*report_table.ROWS, *report_table.PICTURES)}, names)
        self.assertEqual({row.section for row in report_table.ROWS}, names)

    def test_rows_require_something(self):
        for row in report_table.ROWS:
            self.assertNotEqual(row.at_least is None, row.at_most is None, row.name)

    def test_scripts_exist_and_know_the_flags(self):
        for experiment in report_table.EXPERIMENTS:
            for size in report_table.SIZES:
                script, *arguments = experiment.words(size) or [experiment.command.split()[0]]
                path = pathlib.Path(report_page.__file__).with_name(script)
                self.assertTrue(path.exists(), script)
                text = path.read_text() + path.with_name("results.py").read_text()
                for argument in arguments:
                    flag = argument.removeprefix("--").partition("=")[0]
                    self.assertRegex(text, rf'DEFINE_\w+\(\s*"{flag}"', f"{experiment.name}: {argument}")

    def test_values_are_expressions_of_quantities(self):
        for row in report_table.ROWS:
            asked = []

            def measured(*key, asked=asked):
                asked.append(key)
                return np.ones(2)

            self.assertTrue(np.all(np.isfinite(row.values(measured)) | (row.name == "step: time")), row.name)
            self.assertEqual({section for section, *_ in asked}, {row.section}, row.name)

    def test_time_of_the_small_report(self):
        minutes = dict.fromkeys(report_table.SIZES, 0.0)
        for experiment in report_table.EXPERIMENTS:
            for size in report_table.SIZES:
                minutes[size] += experiment.minutes * (experiment.words(size) is not None)
        self.assertLessEqual(minutes["small"], 30)


if __name__ == "__main__":
    sys.argv = sys.argv[:1]
    absltest.main()

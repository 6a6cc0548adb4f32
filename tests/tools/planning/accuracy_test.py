"""Tests that the plan's accuracies are those of the tables in `docs/measurements.md`."""

import pathlib
import re

from absl.testing import absltest

from hop_tf.tools.planning import accuracy, candidates
from hop_tf.tools.timing import MEASURED_CODECS, Measurement, NetworkCosts, Step

_PAGE = pathlib.Path(__file__).parents[3] / "docs" / "measurements.md"


def _tables(section):
    """The tables of a section, each a list of rows of cells."""
    text = _PAGE.read_text().split(f"\n## {section}\n")[1].split("\n## ")[0]
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in block.splitlines()]
        yield [row for row in rows if not set("".join(row)) <= set("- ")]


def _points(section, row, task):
    """Yields the tables' values for a row, from the column to the right of a task's column."""
    for titles, *rows in _tables(section):
        for column, title in enumerate(titles[:-1]):
            if title.startswith(task):
                for cells in rows:
                    if cells[column and 0] == row and len(cells) > column + 1 and cells[column + 1]:
                        yield float(cells[column + 1].split("±")[0])


class AccuracyTest(absltest.TestCase):
    def test_is_that_of_the_tables(self):
        num_found = 0
        for section in (accuracy._DELAY, accuracy._PIPE_SGD):
            for row, points in accuracy._TABLES[section].items():
                for task, expected in points.items():
                    self.assertIn(expected, _points(section, row, task), (section, row, task))
                    num_found += 1
        self.assertGreater(num_found, 30)

    def test_is_complete(self):
        """Whatever the tables have for a row and one of the tasks is there."""
        tasks = {task for points in accuracy._TABLES[accuracy._DELAY].values() for task in points}
        for row, points in accuracy._TABLES[accuracy._DELAY].items():
            self.assertEqual({task for task in tasks if list(_points(accuracy._DELAY, row, task))}, set(points), row)

    def test_tables_of_another_form(self):
        hop = [row for table in _tables(accuracy._HOP) for row in table]
        for row, points in accuracy._TABLES[accuracy._HOP].items():
            for place, task in ((0, accuracy._RANDOM), (3, accuracy._SLOW)):
                if task in points:
                    cells = [cells for cells in hop if len(cells) == 6 and cells[place] == row and "." in cells[1]]
                    self.assertIn(points[task], [float(each[place + 2]) for each in cells if each[place + 2]])
        dts = [row for table in _tables(accuracy._DTS) for row in table]
        for row, points in accuracy._TABLES[accuracy._DTS].items():
            self.assertIn([row, f"{points[accuracy._SHORT]:.2f}"], [cells[2:4] for cells in dts])

    def test_all_names_are_those_of_candidates(self):
        measurement = Measurement(
            world_size=8,
            num_bytes=4000,
            network=NetworkCosts(latency_seconds=1e-3, seconds_per_byte=1e-8),
            step=Step(forward_seconds=0.1),
            codec_seconds_per_byte=dict.fromkeys(MEASURED_CODECS, 0.0),
        )
        names = [each.name for each in candidates(measurement)]
        self.assertContainsSubset(accuracy.CHANGES, names)


if __name__ == "__main__":
    absltest.main()

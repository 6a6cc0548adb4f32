"""The report's experiments, rows and pictures, which `report.toml` lists. See `report.py`."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np

SIZES = QUICK, SMALL, FULL = "quick", "small", "full"


@dataclasses.dataclass(frozen=True)
class Experiment:
    """A run of a benchmark.

    Attributes:
      name: Name of the experiment.
      title: Title of its section on the page.
      command: The benchmark's file, and its arguments in the small report.
      full: Further arguments in the full report. A flag that comes twice counts as it comes last.
      quick: Further arguments in the quick report, or None if the experiment is not in it.
      is_small: True if it is in the small report.
      data: Name of the data in `keras.datasets`' folder, or None if it needs none.
      minutes: About how long it takes in the small report, on two cores.
    """

    name: str
    title: str
    command: str
    full: str = ""
    quick: str | None = None
    is_small: bool = True
    data: str | None = None
    minutes: float = 2.0

    def words(self, size: str) -> list[str] | None:
        """Returns file and arguments in a report of that size, or None if the experiment is not in it."""
        further = {QUICK: self.quick, SMALL: "" if self.is_small else None, FULL: self.full}[size]
        return None if further is None else [*self.command.split(), *further.split()]

    @property
    def missing_data(self) -> pathlib.Path | None:
        """The folder of data that is missing, or None."""
        if self.data is None:
            return None
        home = os.environ.get("KERAS_HOME") or pathlib.Path.home() / ".keras"
        folder = pathlib.Path(home, "datasets", self.data)
        return None if folder.exists() else folder


class Measured(Protocol):
    """The values that experiments have measured. See `report_page.Measurements`."""

    def __call__(self, experiment: str, quantity: str, case: str) -> np.ndarray: ...


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of the page.

    Attributes:
      name: Name of the row, which the next report finds it by.
      section: The experiment whose section has the row.
      text: The quantity, in words.
      value: An expression. `quantity[case]` has the values of all rounds.
      at_least: Required value of a quantity that should be large.
      at_most: Required value of a quantity that should be small.
      paper: The paper's value, or the published one.
      why: A sentence for the page if the required value is missed.
      spread_of_one: Spread of a value that was measured once; 0 for exact ones. None: a fifth of it.
    """

    name: str
    section: str
    text: str
    value: str
    at_least: float | None = None
    at_most: float | None = None
    paper: str = ""
    why: str = ""
    spread_of_one: float | None = None

    @property
    def is_better_high(self) -> bool:
        return self.at_most is None

    def is_reached(self, median: float) -> bool:
        """True if a value is as required."""
        return median >= self.at_least if self.at_most is None else median <= self.at_most

    def values(self, measured: Measured) -> np.ndarray:
        """Returns the values of all rounds."""
        code = re.sub(r"([A-Za-z][\w /]*)\[([^\]]*)\]", r"at('\1', '\2')", self.value)
        names = {"abs": np.abs, "best": _best, "max": np.max, "sum": np.sum}
        return np.atleast_1d(eval(code, {**names, "at": lambda *key: measured(self.section, *key)}))


def _best(*values: np.ndarray) -> np.ndarray:
    return min(values, key=np.median)


@dataclasses.dataclass(frozen=True)
class Picture:
    """Bars, in groups.

    Attributes:
      name: Name of the file, without its ending.
      section: The section that shows it.
      title: The title, with the unit.
      quantity: The quantity.
      groups: The experiment of each group, by the group's name.
      bars: The case of each bar, by its label.
    """

    name: str
    section: str
    title: str
    quantity: str
    groups: Mapping[str, str]
    bars: Mapping[str, str]


def _each(entry: Mapping[str, Any], *names: str) -> Iterator[dict[str, Any]]:
    """Yields the entry for each key of its `each`: key and value replace the names in braces."""
    fields = json.dumps({name: value for name, value in entry.items() if name != "each"})
    for words in entry.get("each", {"": ""}).items():
        text = fields
        for name, word in zip(names, words, strict=True):
            text = text.replace(f"{{{name}}}", word)
        yield json.loads(text)


_TABLE = tomllib.loads(pathlib.Path(__file__).with_name("report.toml").read_text())
EXPERIMENTS, ROWS = [], []
for _fields in (each for entry in _TABLE["experiments"] for each in _each(entry, "key", "text")):
    for _row in (each for entry in _fields.pop("rows") for each in _each(entry, "kind", "name")):
        ROWS.append(Row(section=_fields["name"], **_row))
    EXPERIMENTS.append(Experiment(**_fields))
PICTURES = [Picture(**fields) for fields in _TABLE["pictures"]]

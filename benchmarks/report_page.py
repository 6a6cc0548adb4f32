"""Makes the page of the report, its pictures, and the comparison with the report before."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import pathlib
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import report_table
import results
from report_table import Experiment, Picture, Row

# The spread of a value that was measured once, and the largest spread that is compared with, as parts of it.
_SPREAD_OF_ONE, _MOST = 0.2, 0.25
_TITLES = "| | measured | required | the paper's | |\n| --- | --- | --- | --- | --- |"


@dataclasses.dataclass(frozen=True)
class Value:
    """The value of a row.

    Attributes:
      median: Median over rounds.
      spread: Half the distance between the largest and the smallest value. Of a value that was measured once: a fifth,
        or what the row says.
    """

    median: float
    spread: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ± {self.spread:.2f}"

    @classmethod
    def of(cls, row: Row, values: Sequence[float]) -> Value:
        """Returns the value of these rounds."""
        median = float(np.median(values))
        if not np.all(np.isfinite(values)):
            return cls(median, 0.0)
        if len(values) > 1:
            return cls(median, float(np.ptp(values) / 2))
        return cls(median, _SPREAD_OF_ONE * abs(median) if row.spread_of_one is None else row.spread_of_one)


class Measurements:
    """The values that experiments have noted.

    Args:
      folders: The folder of each experiment, by its name.
    """

    def __init__(self, folders: Mapping[str, pathlib.Path]):
        self._found = {
            (name, quantity, case): np.array(values)
            for name, folder in folders.items()
            for quantity, case, values in results.kept(folder)
        }

    def __call__(self, experiment: str, quantity: str, case: str) -> np.ndarray:
        """Returns the values of all rounds, and for the case "*" those of all cases.

        Raises:
          KeyError: If it was not measured.
        """
        if case != "*":
            return self._found[experiment, quantity, case]
        found = [values for key, values in self._found.items() if key[:2] == (experiment, quantity)]
        if not found:
            raise KeyError(experiment, quantity)
        return np.concatenate(found)

    def value(self, row: Row) -> Value | None:
        """Returns the value of a row, or None if a part of it was not measured, or has failed."""
        try:
            values = row.values(self)
        except KeyError:
            return None
        return None if np.any(np.isnan(values)) else Value.of(row, values)

    def to_json(self) -> list[dict[str, Any]]:
        """Returns all measurements, for the raw data beside the page."""
        names = ("experiment", "quantity", "case")
        return [{**dict(zip(names, key, strict=True)), "values": list(found)} for key, found in self._found.items()]


def is_worse(row: Row, value: Value, before: Value) -> bool:
    """True if a value is worse than before by more than both spreads, or by half."""
    gain = value.median - before.median if row.is_better_high else before.median - value.median
    return gain < -sum(min(each.spread, _MOST * abs(each.median)) for each in (value, before))


@dataclasses.dataclass(frozen=True)
class Report:
    """The values of this report, beside those of the report before.

    Attributes:
      size: Size of the report.
      experiments: The experiments, in order.
      rows: Their rows.
      values: The value of each row that was measured, by its name.
      before: The same of the report before.
      problems: For experiments that did not run or failed, the reason, by their names.
    """

    size: str
    experiments: Sequence[Experiment]
    rows: Sequence[Row]
    values: Mapping[str, Value]
    before: Mapping[str, Value]
    problems: Mapping[str, str]

    @property
    def worse(self) -> list[Row]:
        """The rows that have become worse by more than the spread."""
        common = [row for row in self.rows if row.name in self.values and row.name in self.before]
        return [row for row in common if is_worse(row, self.values[row.name], self.before[row.name])]

    @property
    def lost(self) -> list[Row]:
        """The rows that were measured before. The quick report leaves out some on purpose, and has none."""
        if self.size == report_table.QUICK:
            return []
        return [row for row in self.rows if row.name in self.before and row.name not in self.values]

    def page(self, facts: Sequence[str], drawn: Collection[str]) -> str:
        """Returns the page, in Markdown.

        Args:
          facts: Machine, versions, commit.
          drawn: Names of the pictures that were drawn.
        """
        measured = [row for row in self.rows if row.name in self.values]
        missed = [row for row in measured if not row.is_reached(self.values[row.name].median)]
        lines = ["# Results", "", *facts, ""]
        lines += [f"{len(measured) - len(missed)} of {len(measured)} measured values are as required.", ""]
        if self.worse:
            lines += ["Worse than in the report before, by more than the spread:", ""]
            lines += [f"- {row.text}: {self.values[row.name]}, before {self.before[row.name]}" for row in self.worse]
            lines.append("")
        if self.lost:
            lines += ["Measured in the report before, but not now:", "", *(f"- {row.text}" for row in self.lost), ""]
        for experiment in self.experiments:
            lines += self._section(experiment, drawn)
        return "\n".join(lines).rstrip() + "\n"

    def _section(self, experiment: Experiment, drawn: Collection[str]) -> Iterator[str]:
        yield from (f"## {experiment.title}", "")
        if experiment.name in self.problems:
            yield from (self.problems[experiment.name], "")
        rows = [row for row in self.rows if row.section == experiment.name]
        if rows:
            yield _TITLES
            yield from (_line(row, self.values.get(row.name)) for row in rows)
            yield ""
        missed = [row for row in rows if row.name in self.values and not row.is_reached(self.values[row.name].median)]
        for why in dict.fromkeys(row.why for row in missed if row.why):
            yield from (why, "")
        for picture in report_table.PICTURES:
            if picture.section == experiment.name and picture.name in drawn:
                yield from (f"![{picture.title}](pictures/{picture.name}.png)", "")
        yield from (f"`python benchmarks/{shlex.join(experiment.words(self.size))}`", "")


def _line(row: Row, value: Value | None) -> str:
    required = f"at least {row.at_least:g}" if row.at_least is not None else f"at most {row.at_most:g}"
    if value is None:
        return f"| {row.text} | not measured | {required} | {row.paper} | |"
    return (
        f"| {row.text} | {value} | {required} | {row.paper} | {'' if row.is_reached(value.median) else '**missed**'} |"
    )


def draw(picture: Picture, measurements: Measurements, folder: pathlib.Path) -> bool:
    """Draws a picture of the bars that were measured. Returns False if there are none. Needs Matplotlib."""
    groups: dict[str, dict[str, float]] = {}
    for (group, experiment), (label, case) in itertools.product(picture.groups.items(), picture.bars.items()):
        with contextlib.suppress(KeyError):
            groups.setdefault(group, {})[label] = np.median(measurements(experiment, picture.quantity, case))
    if not groups:
        return False
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    size = (1.5 + 3.2 * len(groups), 2.6)
    figure, all_axes = pyplot.subplots(1, len(groups), figsize=size, sharey=True, squeeze=False)
    labels = list(dict.fromkeys(label for found in groups.values() for label in found))
    for axes, (group, found) in zip(all_axes[0], groups.items(), strict=True):
        bars = axes.barh(labels, [found.get(label, np.nan) for label in labels], color=list(map(_color, labels)))
        axes.bar_label(bars, fmt="%.3g", padding=2, fontsize=8)
        axes.set(title=group)
        axes.margins(x=0.2)
    all_axes[0][0].set_ylim(len(labels) - 0.5, -0.5)
    figure.suptitle(picture.title, fontsize=10)
    figure.tight_layout()
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / f"{picture.name}.png", dpi=110)
    pyplot.close(figure)
    return True


def _color(label: str) -> str:
    is_peer = any(word in label for word in ("DDP", "Mirrored", "Keras", "PyTorch", "synchronous"))
    return "tab:gray" if is_peer else "tab:blue"

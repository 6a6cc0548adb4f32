"""Writes the results of benchmarks, as tables and figures, into a folder."""

from __future__ import annotations

import contextlib
import csv
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np


def standard_error(values: Sequence[float]) -> float:
    """Returns the standard error of the mean of `values`; nan if there is only one value."""
    return float(np.std(values, ddof=1) / np.sqrt(len(values))) if len(values) > 1 else np.nan


def write_table(folder: str, name: str, titles: Sequence[str], rows: Iterable[Sequence]) -> None:
    """Writes `<name>.csv`.

    Args:
      folder: Folder of the file; made if it does not exist.
      name: Name of the file, without its ending.
      titles: Titles of the columns.
      rows: The rows.
    """
    with open(_path(folder, f"{name}.csv"), "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(titles)
        writer.writerows(rows)


@contextlib.contextmanager
def table(folder: str | None, name: str, titles: Sequence[str]) -> Iterator[Callable[[Sequence], None]]:
    """Yields `add(row)`, which writes a row to `<name>.csv` at once, because long benchmarks may be aborted.

    Args:
      folder: Folder of the file, as in `write_table`; None to write nothing.
      name: Name of the file, as in `write_table`.
      titles: Titles of the columns.
    """
    if folder is None:
        yield lambda row: None
        return
    with open(_path(folder, f"{name}.csv"), "w", newline="") as file:
        writer = csv.writer(file)

        def add(row: Sequence) -> None:
            writer.writerow(row)
            file.flush()

        add(titles)
        yield add


@contextlib.contextmanager
def figure(folder: str, name: str, num_axes: int = 1) -> Iterator[Sequence]:
    """Yields the axes of a figure, side by side, and writes it as `<name>.png`. Needs Matplotlib."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    shown, axes = pyplot.subplots(1, num_axes, figsize=(5.5 * num_axes, 4), squeeze=False)
    try:
        yield axes[0]
        shown.savefig(_path(folder, f"{name}.png"), bbox_inches="tight")
    finally:
        pyplot.close(shown)


def _path(folder: str, name: str) -> pathlib.Path:
    path = pathlib.Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    return path / name

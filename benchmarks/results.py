"""Keeps what benchmarks measure, so that the report can be made from it."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator, Sequence

import numpy as np
from absl import flags

OUTPUT = flags.DEFINE_string("output", None, "A folder that keeps what was measured. Default: nothing is kept.")

_FILE = "measurements.jsonl"


def standard_error(values: Sequence[float]) -> float:
    """Returns the standard error of the mean of `values`; nan if there is only one value."""
    return float(np.std(values, ddof=1) / np.sqrt(len(values))) if len(values) > 1 else np.nan


def note(quantity: str, case: str, values: float | Sequence[float]) -> None:
    """Adds a measurement to `measurements.jsonl` in --output, at once: a long benchmark may be aborted.

    Args:
      quantity: Name of the quantity, with its unit.
      case: Name of what was measured.
      values: The values, one for each round or seed. Members that take turns have the rounds in common.
    """
    if OUTPUT.value is None:
        return
    folder = pathlib.Path(OUTPUT.value)
    folder.mkdir(parents=True, exist_ok=True)
    line = {"quantity": quantity, "case": case, "values": np.atleast_1d(values).astype(float).tolist()}
    with open(folder / _FILE, "a") as file:
        file.write(json.dumps(line) + "\n")


def noted(folder: pathlib.Path) -> Iterator[tuple[str, str, list[float]]]:
    """Yields quantity, case and values of each measurement in a folder."""
    path = folder / _FILE
    for line in path.read_text().splitlines() if path.exists() else ():
        entry = json.loads(line)
        yield entry["quantity"], entry["case"], entry["values"]

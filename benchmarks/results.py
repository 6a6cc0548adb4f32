"""Prints what benchmarks measure, and keeps it, so that the report can be made from it."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from absl import flags

OUTPUT = flags.DEFINE_string("output", None, "A folder that keeps what was measured. Default: nothing is kept.")

_FILE = "measurements.jsonl"


def show(case: str, quantities: Mapping[str, float | Sequence[float]]) -> None:
    """Prints the medians of a case, with half the distance between the extremes, and keeps all values in --output.

    Values are kept at once, because a long benchmark may be aborted.

    Args:
      case: Name of what was measured.
      quantities: By the name of each quantity, with its unit: the values, one for each round or seed. Members that
        take turns have the rounds in common.
    """
    values = {name: np.atleast_1d(each).astype(float) for name, each in quantities.items()}
    shown = (
        f"{name} {np.median(each):.4g}" + f" ± {np.ptp(each) / 2:.2g}" * (each.size > 1)
        for name, each in values.items()
    )
    print(f"{case:40}  {',  '.join(shown)}", flush=True)
    if OUTPUT.value is None:
        return
    folder = pathlib.Path(OUTPUT.value)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / _FILE, "a") as file:
        for name, each in values.items():
            file.write(json.dumps({"quantity": name, "case": case, "values": each.tolist()}) + "\n")


def kept(folder: str | pathlib.Path) -> Iterator[tuple[str, str, list[float]]]:
    """Yields quantity, case and values of each measurement in a folder."""
    path = pathlib.Path(folder, _FILE)
    for line in path.read_text().splitlines() if path.exists() else ():
        entry = json.loads(line)
        yield entry["quantity"], entry["case"], entry["values"]

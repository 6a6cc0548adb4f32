"""The results of `benchmark_cuda.py` as a short table."""

from __future__ import annotations

import math
from collections.abc import Iterator

_REQUIRED_SHARE = 0.5
_WIDTH = 27
_NOTABLE_RATIO = 0.05
_HEADER = """\
ms, and the share of a copy's bandwidth by bytes moved / by the fewest bytes possible. PASS: both are at least 0.5.
moved: only the first is. x1.20: another version's time over the first version's. ?: the host was late."""


def table(results: dict) -> str:
    """Returns the table: all kernels for the first data, and for other data the sketch and whatever is too slow."""
    lines = [f"{results['device']}, first version: {next(iter(results['libraries']), '')}"]
    cases = {}
    for row in results["rows"]:
        cases.setdefault(row["data"], {}).setdefault(row["kernel"], {}).setdefault(row["size"], []).append(row)
    lines += _HEADER.splitlines() if cases else []
    for number, (data, kernels) in enumerate(cases.items()):
        sizes = list(dict.fromkeys(size for of_kernel in kernels.values() for size in of_kernel))
        lines.append(f"{data:24}" + "".join(f"{size:>10}{'':17}" for size in sizes))
        for name, of_kernel in kernels.items():
            if number == 0 or name == "sketch encode" or (name != "copy" and _is_slow(of_kernel, sizes[-1])):
                lines.append(f"  {name:22}" + "".join(_cell(of_kernel.get(size, [])) for size in sizes))
                lines += _others(of_kernel, always=name == "sketch encode")
    lines += [f"WRONG: {difference}" for difference in results["differences"][:20]]
    hidden = len(results["differences"]) - 20
    lines += [f"WRONG: {hidden} more"] if hidden > 0 else []
    return "\n".join(line.rstrip() for line in lines)


def verdict(row: dict) -> str:
    """Says if a kernel is as fast as required."""
    if row["share"] < _REQUIRED_SHARE:
        return "FAIL"
    return "PASS" if row["share_of_minimum"] >= _REQUIRED_SHARE else "moved"


def _is_slow(of_kernel: dict, largest: str) -> bool:
    return any(verdict(row) == "FAIL" for row in of_kernel.get(largest, [])[:1])


def _cell(rows: list[dict]) -> str:
    if not rows:
        return " " * _WIDTH
    row = rows[0]
    late = "" if row["rounds_ahead"] == row["rounds"] else "?"
    shares = f"{row['share']:.2f}/{row['share_of_minimum']:.2f}"
    return f"{row['milliseconds']:10.3f}{late:1} {shares} {verdict(row)}".ljust(_WIDTH)


def _others(of_kernel: dict, always: bool) -> Iterator[str]:
    """Other versions relative to the first one; those that are as fast only on demand."""
    for version in dict.fromkeys(row["version"] for rows in of_kernel.values() for row in rows[1:]):
        ratios = []
        for rows in of_kernel.values():
            times = {row["version"]: row["milliseconds"] for row in rows}
            ratios.append(times.get(version, math.nan) / rows[0]["milliseconds"])
        if always or any(abs(ratio - 1) > _NOTABLE_RATIO for ratio in ratios):
            yield f"    {version:20}" + "".join(f"{f'x{ratio:.2f}':>10}".ljust(_WIDTH) for ratio in ratios)

"""`python -m hop_tf supervise`: the progress of the ranks of a running job, under any strategy.

Every rank reports its counters (`strategy.report()`) to any client with the cluster's token. The command changes
nothing in the job, and no message of the training passes through it.

The distance of a rank behind the others is its `staleness` if its strategy reports one, like asynchronous Canary.
Otherwise it is the largest iteration among the ranks that have answered, minus the rank's own.
"""

from __future__ import annotations

import argparse
import atexit
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from hop_tf.records.events import process_name
from hop_tf.tools.commands import running_ranks
from hop_tf.transport.reports import ReportReader

# The job counts as ended when no rank has answered for this time. All ranks may be too busy to answer for a shorter
# time.
_END_SECONDS = 5.0
_WIDTH = 140  # The width of a table that is not shown on a terminal.
_LANE = "bytes_sent_on_lane_"
# The titles of columns, and functions that fill them from a rank's report.
_COLUMNS: tuple[tuple[str, Callable[[Mapping], str]], ...] = (
    ("rank", lambda report: _short_name(report, report["rank"])),
    ("steps", lambda report: _count(report, "steps")),
    ("iteration", lambda report: _count(report, "iteration")),
    ("behind", lambda report: _count(report, "behind")),
    ("colayers sent", lambda report: _count(report, "proportion")),
    ("overtime drops", lambda report: _count(report, "overtime_drops")),
    ("waited", lambda report: f"{report.get('wait_seconds', 0.0):.1f} s"),
    ("waits for", lambda report: ", ".join(_short_name(report, each) for each in report.get("waits_for", ())) or "-"),
    ("sent by lane", lambda report: " ".join(f"{value / 1e6:.1f}" for value in _lanes(report)) + " MB"),
    ("received", lambda report: f"{report.get('bytes_received', 0) / 1e6:.1f} MB"),
)


def main(argv: Sequence[str]) -> int:
    """Runs `hop_tf supervise` with the arguments `argv`. Returns the exit code."""
    arguments = _parse(argv)
    try:
        return _watch(arguments.readers, arguments)
    except (KeyboardInterrupt, BrokenPipeError):  # A broken pipe means that the reader has seen enough.
        return 0
    finally:
        for reader in arguments.readers:
            reader.close()


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="hop_tf supervise",
        description="Show the steps, waiting and messages of the ranks of a running job, until no rank answers.",
    )
    parser.add_argument(
        "addresses",
        nargs="*",
        type=running_ranks.address,
        help="host:port of the ranks, in order; default: those of TF_CONFIG",
    )
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between two looks (default 1)")
    parser.add_argument("--count", type=int, default=0, help="number of looks; default 0: until the job has ended")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds to wait for the first rank (default 60)")
    parser.add_argument("--json", action="store_true", help="print a line of JSON at each look instead of a table")
    running_ranks.add_arguments(parser)
    arguments = parser.parse_args(argv)
    try:
        arguments.addresses = arguments.addresses or running_ranks.addresses_of_cluster()
        arguments.readers = running_ranks.make_readers(arguments.addresses, arguments)
    except (argparse.ArgumentTypeError, TypeError, ValueError) as error:
        parser.error(str(error))
    if not arguments.addresses:
        parser.error("name the ranks' addresses, or set TF_CONFIG.")
    if not 0 < arguments.interval < math.inf or arguments.count < 0 or not arguments.timeout > 0:
        parser.error("--interval and --timeout must be positive, --count at least 0.")
    return arguments


def _watch(readers: Sequence[ReportReader], arguments: argparse.Namespace) -> int:
    show = _show_json if arguments.json else _make_table_printer()
    num_looks, seen, silent_since = 0, False, time.monotonic()
    while True:
        reports = _with_distances([running_ranks.read(reader, rank) for rank, reader in enumerate(readers)])
        answered = any("problem" not in report for report in reports)
        if answered:
            seen, silent_since = True, math.inf
        else:  # A look can take long by itself, so the time begins after the first look without an answer.
            silent_since = min(silent_since, time.monotonic())
        silent_seconds = time.monotonic() - silent_since
        if seen and silent_seconds > _END_SECONDS:
            return 0
        if not seen and silent_seconds > arguments.timeout:
            problems = "; ".join(f"{r.address}: {each['problem']}" for r, each in zip(readers, reports, strict=True))
            print(f"hop_tf supervise: no rank answers. {problems}", file=sys.stderr)
            return 1
        if answered:
            show(reports)
            num_looks += 1
            if num_looks == arguments.count:
                return 0
        time.sleep(arguments.interval)


def _with_distances(reports: Sequence[Mapping]) -> list[dict[str, object]]:
    """Adds the distance of each rank, as `behind`, to reports that have an iteration."""
    newest = max((report["iteration"] for report in reports if "iteration" in report), default=0)
    return [
        {**report, "behind": report.get("staleness", newest - report["iteration"])} if "iteration" in report else report
        for report in reports
    ]


def _show_json(reports: Sequence[Mapping]) -> None:
    print(json.dumps({"seconds": time.time(), "ranks": reports}), flush=True)


def _make_table_printer() -> Callable[[Sequence[Mapping]], None]:
    """Returns a function that draws a table: in place on a terminal, or as plain text if `rich` is missing."""
    try:
        from rich.console import Console
        from rich.live import Live
        from rich.table import Table
    except ImportError:
        return lambda reports: print("\n".join(_plain(reports)), flush=True)

    def draw(reports: Sequence[Mapping]) -> Table:
        table = Table(*(title for title, _ in _COLUMNS))
        for row in _rows(reports):
            table.add_row(*row)
        return table

    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
        return lambda reports: console.print(draw(reports))
    live = Live(console=console, auto_refresh=False)
    atexit.register(live.stop)
    live.start()
    return lambda reports: live.update(draw(reports), refresh=True)


def _rows(reports: Sequence[Mapping]) -> list[list[str]]:
    rows = []
    for report in reports:
        if "problem" in report:
            rows.append([str(report["rank"]), str(report["problem"])[:40], *[""] * (len(_COLUMNS) - 2)])
        else:
            rows.append([fill(report) for _, fill in _COLUMNS])
    return rows


def _plain(reports: Sequence[Mapping]) -> list[str]:
    rows = [[title for title, _ in _COLUMNS], *_rows(reports)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _short_name(report: Mapping, number: int) -> str:
    """The number of a rank, or the name of a parameter server."""
    return process_name(number, report.get("num_ranks", math.inf)).removeprefix("rank ")


def _count(report: Mapping, name: str) -> str:
    return f"{report[name]:.0f}" if name in report else "-"


def _lanes(report: Mapping) -> list[float]:
    """The bytes sent on each lane for arrays, or all bytes sent if there are no lanes."""
    lanes = sorted(name for name in report if name.startswith(_LANE) and name != f"{_LANE}0")
    return [report[name] for name in lanes] or [report.get("bytes_sent", 0)]

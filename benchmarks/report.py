"""Measures the headlines, and writes docs/results.md with its pictures: `make report`.

    python benchmarks/report.py                  # 30 minutes on two cores, which do nothing else
    python benchmarks/report.py --size=full      # hours
    python benchmarks/report.py --size=quick     # some minutes; writes no page, fails if a row is worse than on it

Every experiment is a benchmark of this folder, in a process of its own. `report.toml` has the list. What was
measured stays in --output (by default build/report). After an interruption, the next call with the same commit, and
without changes, goes on with the next experiment.

A value is the median over rounds, and its spread half the distance between the largest and the smallest one. A value
that was measured once counts as 20 % wide. The page marks what misses its required value, and names what is worse than
in the report before by more than both spreads. Other libraries take part if they are installed, and data if it is
there (KERAS_HOME names its folder); otherwise their rows say "not measured". Emulated networks need root.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence

import peers
import psutil
import report_page
import report_table
import results
from absl import app, flags
from report_page import Measurements, Report, Value
from report_table import Experiment

from hop_tf.tools.testing import network

_SIZE = flags.DEFINE_enum("size", report_table.SMALL, report_table.SIZES, "How much is measured.")
_ONLY = flags.DEFINE_list("only", None, "Measures only these experiments, and writes no page.")
_DOCS = flags.DEFINE_string("docs", None, "The folder of the page. Default: docs of this checkout.")
_TIMEOUT_MINUTES = flags.DEFINE_float("timeout_minutes", 15.0, "Limit of an experiment of the small report.")

_BENCHMARKS = pathlib.Path(__file__).parent
_PEERS = ("torch", "torchft", "tf_keras", "hivemind")
_PACKAGES = ("tensorflow_cpu", "keras", "numpy", *_PEERS)
_CHANGED = " with changes"
_WIDTH = 120
_FULL_TIMES = 20  # How much longer an experiment of the full report may take.


def _commit() -> str:
    """Returns the commit, and if there are changes, except of the report's own files."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", _BENCHMARKS, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        has_changes = git("status", "--porcelain", "..", ":!../docs")
    except (OSError, subprocess.CalledProcessError):
        return f"an unknown commit{_CHANGED}"
    return git("rev-parse", "--short=12", "HEAD") + (_CHANGED if has_changes else "")


def _run(experiment: Experiment, folder: pathlib.Path, commit: str) -> str | None:
    """Runs an experiment, unless it has ended before. Returns the reason if it has failed."""
    done, command = folder / "done.json", experiment.words(_SIZE.value)
    # These decide which rows can be measured.
    surroundings = [*_versions(), os.environ.get("KERAS_HOME", ""), str(network.available())]
    key = {"commit": commit, "command": command, "surroundings": surroundings}
    if not commit.endswith(_CHANGED) and done.exists() and json.loads(done.read_text()) == key:
        print(f"{experiment.name}: measured before", flush=True)
        return None
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    script, *arguments = command
    minutes = _TIMEOUT_MINUTES.value * (_FULL_TIMES if _SIZE.value == report_table.FULL else 1)
    with open(folder / "log.txt", "w") as log:
        command = [sys.executable, _BENCHMARKS / script, *arguments, f"--output={folder}"]
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code = process.wait(60 * minutes)
        except subprocess.TimeoutExpired:
            return f"It took more than {minutes:g} minutes."
        finally:
            _end(process)
    if code:
        return f"It ended with exit code {code}; {folder}/log.txt has its output."
    done.write_text(json.dumps(key))
    return None


def _end(process: subprocess.Popen) -> None:
    """Ends a process, if it still runs, and the children that it has left."""
    if process.poll() is None:
        for each in psutil.Process(process.pid).children(recursive=True):  # Some have sessions of their own.
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _measure(experiments: Sequence[Experiment], commit: str) -> tuple[Measurements, dict[str, str]]:
    """Runs all experiments. Returns what they measured, and the problems by the experiments' names."""
    output = results.OUTPUT.value or _BENCHMARKS.parent / "build" / "report"
    problems: dict[str, str] = {}
    folders = {}
    begin = time.monotonic()
    for number, experiment in enumerate(experiments, start=1):
        folder = pathlib.Path(output, _SIZE.value, experiment.name.replace(" ", "_")).resolve()
        minutes = (time.monotonic() - begin) / 60
        print(f"[{number}/{len(experiments)}, {minutes:.0f} min] {experiment.name}", flush=True)
        if experiment.missing_data is not None:
            problem = f"It needs data that is not here: {experiment.missing_data}."
        else:
            problem = _run(experiment, folder, commit)
        if problem is None:
            folders[experiment.name] = folder
        else:
            print(f"  {problem}", flush=True)
            problems[experiment.name] = problem
    return Measurements(folders), problems


def _versions() -> list[str]:
    versions = []
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{package} {importlib.metadata.version(package)}")
    return versions


def _facts(commit: str) -> list[str]:
    memory = psutil.virtual_memory().total / 2**30
    missing = [package for package in _PEERS if not peers.is_installed(package)]
    machine = (
        f"{psutil.cpu_count()} processors ({platform.machine()}), {memory:.0f} GiB, {platform.system()}, Python "
        f"{platform.python_version()}, {', '.join(_versions())}."
    )
    return [
        f"Made by `make report` on {datetime.date.today()}, of commit {commit}, size {_SIZE.value}.",
        *textwrap.wrap(machine, _WIDTH),
        *([f"Not installed, so that their rows are empty: {', '.join(missing)}."] if missing else []),
        "",
        "A value is the median over rounds. The spread is half the distance between the largest and the smallest one,",
        "or 20 % of a value that was measured once. `results.json` beside this page has all values.",
    ]


def main(_: Sequence[str]) -> None:
    commit = _commit()
    names = [experiment.name for experiment in report_table.EXPERIMENTS]
    if unknown := set(_ONLY.value or ()).difference(names):
        raise app.UsageError(f"--only must be among {', '.join(names)}. Received: {sorted(unknown)}.")
    docs = pathlib.Path(_DOCS.value) if _DOCS.value else _BENCHMARKS.parent / "docs"
    experiments = [
        each
        for each in report_table.EXPERIMENTS
        if each.words(_SIZE.value) is not None and (_ONLY.value is None or each.name in _ONLY.value)
    ]
    measurements, problems = _measure(experiments, commit)
    measured = {experiment.name for experiment in experiments}
    rows = [row for row in report_table.ROWS if row.section in measured]
    values = {row.name: value for row in rows if (value := measurements.value(row)) is not None}
    path = docs / "results.json"
    raw = json.loads(path.read_text())["rows"] if path.exists() else {}
    before = {name: Value(**each) for name, each in raw.items()}
    report = Report(_SIZE.value, experiments, rows, values, before, problems)
    if _SIZE.value == report_table.QUICK or _ONLY.value is not None:
        _compare(report)
    else:
        _write(report, measurements, commit, docs)


def _write(report: Report, measurements: Measurements, commit: str, docs: pathlib.Path) -> None:
    docs.mkdir(parents=True, exist_ok=True)
    drawn = [each.name for each in report_table.PICTURES if report_page.draw(each, measurements, docs / "pictures")]
    (docs / "results.md").write_text(report.page(_facts(commit), drawn))
    raw = {
        "commit": commit,
        "size": report.size,
        "rows": {name: vars(value) for name, value in report.values.items()},
        "measurements": measurements.to_json(),
    }
    (docs / "results.json").write_text(json.dumps(raw, indent=1) + "\n")
    print(docs / "results.md")


def _compare(report: Report) -> None:
    """Prints the rows beside those of the page. Exits with 1 if one is worse, or if an experiment has failed."""
    if not report.before:
        sys.exit("There is no page to compare with: run `make report` first.")
    worse = {row.name for row in report.worse} | {row.name for row in report.lost}
    for row in report.rows:
        now, before = (each.get(row.name, "") for each in (report.values, report.before))
        print(f"{now!s:>16}   before {before!s:>16}   {'WORSE ' if row.name in worse else ''}{row.text}", flush=True)
    if worse or report.problems:
        sys.exit(1)


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    app.run(main)

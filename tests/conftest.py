"""Marks the tests that start processes, deselects cases, and fails a test that leaves something behind.

`make test` deselects slow tests, `make test TESTS=all` runs them, and `make test TESTS=2/6` the second of six parts of
them. `.ci/run` takes a part that depends on the commit. All deselect the cases of `make stress`. A skipped test needs
something that is missing on the machine: a GPU, Slurm, Ray, or data.

A test must not leave behind threads, processes, or changed environment variables. A test class or module may hold such
things in `setUpClass` and release them in `tearDownClass`: the check runs around every test, and once more around every
module.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import math
import os
import re
import statistics
import threading
import zlib
from collections.abc import Iterator, Set
from unittest import mock

import keras  # noqa: F401  (keras and tensorflow set environment variables when they are first imported)
import psutil
import pytest
import tensorflow

from hop_tf.tools.simulate.scheduler import DeadlockError, Scheduler
from hop_tf.tools.testing import start_fork_server, stop_fork_server

# Two devices, before TensorFlow is used: see `strategies/devices_test.py`.
tensorflow.config.set_logical_device_configuration(
    tensorflow.config.list_physical_devices("CPU")[0], [tensorflow.config.LogicalDeviceConfiguration()] * 2
)

# A traced step is a hundred thousand objects that live on: looking through all of them takes a tenth of the time.
gc.set_threshold(50_000, 50, 50)

# What ends by itself (a joined pool's worker, a terminated process) gets this long to do so.
_GRACE_SECONDS = 5.0

# A module that has one of these starts processes.
_PROCESS_STARTERS = frozenset({"MultiProcessRunner", "ProcessServer", "launch"})


@pytest.hookimpl(tryfirst=True)  # before `-m` selects by the marker
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items[:] = [item for item in items if item.name != "test_session"]  # a method of tf.test.TestCase, not a test
    for item in items:
        if _PROCESS_STARTERS & vars(item.module).keys():
            item.add_marker("multi_process")
    # Their files take longest for the number of their tests: where several files run at a time, none of them is last.
    items.sort(key=lambda item: item.get_closest_marker("multi_process") is None)
    if "HOP_TF_SCHEDULE_SEED" not in os.environ:
        _deselect(config, items, "stress")
    if (tests := os.environ.get("HOP_TF_TESTS", "all")) != "all":
        _deselect(config, items, "slow", but=set() if tests == "quick" else _part(items, tests))


def _part(items: list[pytest.Item], tests: str) -> set[pytest.Item]:
    """Returns a part of the items, such as "2/6", the second of six. It depends on their names alone."""
    if (match := re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", tests)) is None or int(match[1]) > int(match[2]):
        raise pytest.UsageError(f"TESTS must be quick, all, or a part such as 2/6. Received: {tests!r}.")
    number, num_parts = map(int, match.groups())
    return {item for item in items if zlib.crc32(_inseparable(item).encode()) % num_parts == number - 1}


def _inseparable(item: pytest.Item) -> str:
    """The name of a test, or that of its class if its tests share what they look at."""
    shares = item.cls is not None and "setUpClass" in vars(item.cls)
    return item.nodeid.rpartition("::")[0] if shares else item.nodeid


def _deselect(config: pytest.Config, items: list[pytest.Item], name: str, but: Set[pytest.Item] = frozenset()) -> None:
    """Removes the cases that a marker leaves out, and keeps the order: all workers of xdist need the same list."""
    cases = collections.defaultdict(list)  # By marker: the cases of a test share theirs.
    for item in items:
        marker = item.get_closest_marker(name)
        if marker is not None:
            cases[id(marker)].append(item)
    left_out = set()
    for of_test in cases.values():
        of_test.sort(key=_number)
        left_out.update(_left_out(of_test, **of_test[0].get_closest_marker(name).kwargs))
    left_out -= but
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


def _left_out(cases: list[pytest.Item], after: int = 0, but: int = 0) -> list[pytest.Item]:
    """Returns the cases after the first `after`; or all except `but` cases, which differ by test, so all get a turn."""
    first = zlib.crc32(cases[0].originalname.encode()) % len(cases) if but else 0
    return (cases[first:] + cases[:first])[after + but :]


def _number(item: pytest.Item) -> int:
    """Returns the number of a parameterized test's case: pytest collects cases by name, 10 before 2."""
    digits = item.name[len(item.name.rstrip("0123456789")) :]
    return int(digits or 0)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Notes how many schedules a test ran on the virtual clock, and in how many somebody waited for ever."""
    num_schedules = num_hangs = 0
    run = Scheduler.run

    def counted(scheduler):
        nonlocal num_schedules, num_hangs
        num_schedules += 1
        try:
            run(scheduler)
        except DeadlockError:
            num_hangs += 1
            raise

    with mock.patch.object(Scheduler, "run", counted):
        yield
    if num_schedules:
        item.user_properties.append(("schedules", (num_schedules, num_hangs)))


def pytest_terminal_summary(terminalreporter) -> None:
    """Two tables, of what ran: schedules on the virtual clock, and random faults of processes."""
    schedules, faults = collections.defaultdict(list), collections.defaultdict(list)
    reports = [each for of_kind in terminalreporter.stats.values() for each in of_kind]
    reports = [each for each in reports if getattr(each, "when", None) == "call"]  # With those of subtests.
    failed = {report.nodeid for report in reports if report.failed}
    for report in reports:
        for name, seen in report.user_properties:
            if name == "schedules":
                num_schedules, num_hangs = seen
                has_failed = report.nodeid in failed
                counts = num_schedules, num_hangs * has_failed, has_failed  # A test may want to see a hang.
                schedules[report.nodeid.partition("::")[0]].append(counts)
            elif name == "fault":
                faults[seen["kind"]].append(seen)
    if schedules:
        _write_schedules(terminalreporter, schedules)
    if faults:
        _write_faults(terminalreporter, faults)


def _write_schedules(terminalreporter, by_file: dict[str, list[tuple[int, int, bool]]]) -> None:
    """Writes a table of schedules per file: run, never ended, and the number of tests that found a wrong result."""
    terminalreporter.section("schedules on the virtual clock")
    width = max(map(len, by_file))
    terminalreporter.line(f"{'file':<{width}}{'schedules':>11}{'hangs':>7}{'failed tests':>14}")
    rows = {file: [sum(column) for column in zip(*seen, strict=True)] for file, seen in sorted(by_file.items())}
    rows["all"] = [sum(column) for column in zip(*rows.values(), strict=True)]
    for file, (num_schedules, num_hangs, num_failed) in rows.items():
        terminalreporter.line(f"{file:<{width}}{num_schedules:>11}{num_hangs:>7}{num_failed:>14}")


def _write_faults(terminalreporter, by_kind: dict[str, list[dict]]) -> None:
    """Writes a table of faults per kind: failures, how long ranks stood still, and when restarted ranks made a step."""
    terminalreporter.section("random faults")
    counts = ("hangs", "wrong", "leaks")
    header = "".join(f"{name:>7}" for name in ("cases", *counts))
    terminalreporter.line(f"{'kind':<12}{header}{'stop, s: median':>18}{'longest':>9}{'back after, s: longest':>24}")
    for kind, cases in sorted(by_kind.items()):
        numbers = "".join(f"{number:>7}" for number in (len(cases), *(sum(case[c] for case in cases) for c in counts)))
        stops = [case["stop"] for case in cases if "stop" in case] or [math.nan]
        back = max((case["return"] for case in cases if "return" in case), default=None)
        seconds = f"{statistics.median(stops):>18.2f}{max(stops):>9.2f}{'' if back is None else f'{back:.2f}':>24}"
        terminalreporter.line(f"{kind:<12}{numbers}{seconds}")


@pytest.fixture(autouse=True, scope="session")
def _fork_server(request: pytest.FixtureRequest) -> Iterator[None]:
    """The process that the tests' runners fork from: no single test leaves it behind."""
    if any("MultiProcessRunner" in vars(item.module) for item in request.session.items):
        start_fork_server()
        yield
        stop_fork_server()
    else:
        yield


@pytest.fixture(autouse=True)
def _test_leaves_nothing_behind() -> Iterator[None]:
    with _leaves_nothing_behind():
        yield


@pytest.fixture(autouse=True, scope="module")
def _module_leaves_nothing_behind() -> Iterator[None]:
    with _leaves_nothing_behind():
        yield


@contextlib.contextmanager
def _leaves_nothing_behind() -> Iterator[None]:
    threads, processes, environment = set(_threads()), set(_child_processes()), _environment()
    yield
    found = [*_left_threads(threads), *_left_processes(processes), *_restore_environment(environment)]
    if found:
        pytest.fail("Left behind:\n" + "\n".join(found), pytrace=False)


def _left_threads(before: set[threading.Thread]) -> list[str]:
    new = [thread for thread in _threads() if thread not in before]
    for thread in new:
        thread.join(_GRACE_SECONDS)
    return [f"thread {thread.name!r}" for thread in new if thread.is_alive()]


def _left_processes(before: set[psutil.Process]) -> list[str]:
    """Describes new child processes, and ends them: they must not fail the tests that follow."""
    new = [process for process in _child_processes() if process not in before]
    _, left = psutil.wait_procs(new, timeout=_GRACE_SECONDS)
    descriptions = [f"process {process.pid}: {_command_line(process)}" for process in left]
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=_GRACE_SECONDS)
    return descriptions


def _restore_environment(before: dict[str, str]) -> list[str]:
    """Describes changed environment variables, and undoes the changes."""
    after = _environment()
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    for name in changed:
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    return [f"environment variable {name}: {before.get(name)!r} became {after.get(name)!r}" for name in changed]


def _threads() -> list[threading.Thread]:
    """The threads that would keep the interpreter alive, and those of hop_tf: it joins even its daemons."""
    threads = [thread for thread in threading.enumerate() if not thread.name.startswith("pytest_timeout")]
    return [thread for thread in threads if not thread.daemon or thread.name.startswith("hop_tf")]


def _environment() -> dict[str, str]:
    """The environment without what pytest itself changes around each phase of a test."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}


def _child_processes() -> list[psutil.Process]:
    """All descendants, but for the helper that Python's multiprocessing keeps until the interpreter exits."""
    children = psutil.Process().children(recursive=True)
    return [process for process in children if "multiprocessing.resource_tracker" not in _command_line(process)]


def _command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return "(ended)"

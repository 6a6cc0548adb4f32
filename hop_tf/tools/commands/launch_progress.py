"""The launcher's live table, on a terminal: the progress of each process, below the lines that all of them print.

A progress bar of Keras rewrites its line. The bars of several processes would scroll each other away, so their values
go into the table. The ranks that a rank waits for come from its report, as in `hop_tf supervise`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TextIO

from hop_tf.tools.processes.local_cluster import Task
from hop_tf.tools.processes.output import Console

if TYPE_CHECKING:
    from hop_tf.transport.reports import ReportReader

_EPOCH = re.compile(r"Epoch (\d+(?:/\d+)?)$")
# Step, bar (none with `verbose=2`), seconds that are left or have passed, time of a step, metrics.
_STEP = re.compile(r" *(\d+/(?:\d+|Unknown)) *(?:━*|-) *\S+ (?:- )?(\d+)(s|ms|us)/step((?: - .+)?)$")
_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_TITLES = ("", "epoch", "step", "steps/s", "metrics", "waits for")
_REFRESHES_PER_SECOND = 2
_REPORT_SECONDS = 1.0


@dataclasses.dataclass
class Progress:
    """The latest progress of a process, in texts as Keras prints them.

    Attributes:
      epoch: The epoch, as "2/5".
      step: The step, as "40/468".
      steps_per_second: The rate of steps in this epoch.
      metrics: The metrics, as "accuracy: 0.9 - loss: 0.2".
      waits_for: The names of processes that the process waits for.
    """

    epoch: str = ""
    step: str = ""
    steps_per_second: str = ""
    metrics: str = ""
    waits_for: Sequence[str] = ()

    def take(self, line: str) -> bool:
        """Reads the progress from a line. Returns True if the line is about progress."""
        if match := _EPOCH.match(line):
            self.epoch, self.step = match[1], ""
        elif match := _STEP.match(line):
            self.step, self.metrics = match[1], match[4].removeprefix(" - ")
            seconds = int(match[2]) * _UNITS[match[3]]
            self.steps_per_second = f"{1 / seconds:.3g}" if seconds else ""
        return match is not None

    @property
    def cells(self) -> tuple[str, ...]:
        """The cells of the process's row, except its name."""
        return self.epoch, self.step, self.steps_per_second, self.metrics, ", ".join(self.waits_for)


class TableConsole(Console):
    """A console that ends with a live table of the processes.

    Args:
      stream: A terminal.
      names: The names of the processes.
      unfinished: Returns the unfinished lines of processes, by their names.

    Raises:
      ImportError: If `rich` is not installed.
    """

    def __init__(self, stream: TextIO, names: Iterable[str], unfinished: Callable[[], Mapping[str, str]]):
        from rich import console, live, table, text

        self._make_table, self._make_text = table.Table, text.Text.from_ansi
        self._unfinished = unfinished
        self.progress = {name: Progress() for name in names}
        self._live = live.Live(
            console=console.Console(file=stream),
            get_renderable=self._draw,
            refresh_per_second=_REFRESHES_PER_SECOND,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        super().__init__(stream)

    def write(self, name: str, line: str, *, may_be_left_out: bool = True) -> None:
        if name not in self.progress or not self.progress[name].take(line):
            super().write(name, line, may_be_left_out=may_be_left_out)

    def _run(self) -> None:
        with contextlib.suppress(OSError, ValueError), self._live:  # `Console._run` logs these errors.
            super()._run()

    def _write(self, line: str) -> None:
        self._live.console.print(self._make_text(line), soft_wrap=True)

    def _draw(self):
        for name, line in self._unfinished().items():
            self.progress[name].take(line)
        if not any(any(progress.cells) for progress in self.progress.values()):
            return ""
        table = self._make_table(*_TITLES)
        for name, progress in self.progress.items():
            table.add_row(name, *progress.cells)
        return table


class WaitWatch:
    """Asks the ranks of a job, now and then, which ranks they wait for. Use as a context manager.

    A rank that refuses to answer is not asked again, for instance if `HOP_TF_CLUSTER_TOKEN` is not the cluster token. A
    rank that only takes too long to answer is asked again.

    Args:
      configs: The `TF_CONFIG` of each process.
      progress: The progress of each process, by its name.
    """

    def __init__(self, configs: Mapping[Task, str], progress: Mapping[str, Progress]):
        self._progress = progress
        self._addresses = {
            str(task): json.loads(config)["cluster"]["worker"][task.index]
            for task, config in configs.items()
            if task.type == "worker"
        }
        self._readers: dict[str, ReportReader] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hop_tf_waits", daemon=True)

    def __enter__(self) -> WaitWatch:
        self._thread.start()
        return self

    def __exit__(self, *exc_info) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._watch()
        finally:
            for reader in self._readers.values():
                reader.close()

    def _watch(self) -> None:
        while not self._over.wait(_REPORT_SECONDS):
            # A rank that shows progress listens to requests.
            for name in [name for name in self._addresses if self._progress[name].step]:
                if not self._over.is_set() and not self._ask(name):
                    del self._addresses[name]
                    self._progress[name].waits_for = ()

    def _ask(self, name: str) -> bool:
        import grpc

        from hop_tf.records.events import process_name
        from hop_tf.transport.reports import ReportReader

        if name not in self._readers:
            self._readers[name] = ReportReader(self._addresses[name], os.environ.get("HOP_TF_CLUSTER_TOKEN"))
        try:
            report = self._readers[name].read(_REPORT_SECONDS)
        except grpc.RpcError as error:
            return error.code() is grpc.StatusCode.DEADLINE_EXCEEDED  # Then the rank is only busy.
        except ValueError:
            return False
        num_ranks = report.get("num_ranks", math.inf)
        self._progress[name].waits_for = [process_name(each, num_ranks) for each in report.get("waits_for", ())]
        return True

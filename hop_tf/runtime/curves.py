"""The curves that TensorBoard shows of a rank's reports: names, units and descriptions.

A report holds counters that only rise. People look at what happens in a step. So most curves show a *rate*: the
increase of a counter since the last report, divided by the steps made since then.

TensorBoard groups curves by the tag up to the first slash, and sorts the groups by name. The names of the groups sort
in the order in which people look at them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

_TIME = "hop_tf milliseconds of a step"
_NETWORK = "hop_tf network"
_OUTCOMES = "hop_tf outcomes"
_PICKED = "hop_tf picked settings"
_PROCESSES = "hop_tf processes"
_OTHER = "hop_tf other"

_MILLISECONDS = 1000.0
# Not curves, but the number of the run, and the step of a point.
_NO_CURVES = frozenset({"rank", "steps"})
# Names that `Curves` adds to those of a report.
_STEP_SECONDS, _HIDDEN_SECONDS = "step_seconds", "hidden_seconds"


class Point(NamedTuple):
    """A value of a curve at the step of a report."""

    tag: str
    value: float
    description: str


@dataclasses.dataclass(frozen=True)
class Curve:
    """A curve of TensorBoard.

    Attributes:
      counter: The name in a report. "#" stands for a number.
      tag: Group and name of the curve, with a slash between them. "#" stands for the same number.
      description: The text behind the info icon of the card.
      is_rate: True for the increase per step. False for the value as the report holds it.
      scale: Factor from the counter's unit to that of the curve.
    """

    counter: str
    tag: str
    description: str
    is_rate: bool = True
    scale: float = 1.0

    def point(self, value: float) -> Point:
        """Returns the point of a value in the counter's unit."""
        return Point(self.tag, self.scale * value, self.description)


def _time(counter: str, name: str, description: str, *, is_rate: bool = True) -> Curve:
    return Curve(counter, f"{_TIME}/{name}", description, is_rate, _MILLISECONDS)


def _rate(group: str, counter: str, name: str, description: str) -> Curve:
    return Curve(counter, f"{group}/{name} per step", description)


def _level(group: str, counter: str, name: str, description: str) -> Curve:
    return Curve(counter, f"{group}/{name}", description, is_rate=False)


CURVES = (
    _time(_STEP_SECONDS, "all", "The whole step: computing and waiting."),
    _time(
        "compute_seconds",
        "computing",
        "A step without waiting: input, gradients, the update and callbacks. The median of the latest 64 steps.",
        is_rate=False,
    ),
    _time(
        "wait_seconds",
        "waiting",
        "The step has its gradients and waits for other ranks. This is the communication that computing does not hide.",
    ),
    _time(
        "communicate_seconds",
        "communicating",
        "All communication of a step, hidden or not. Averages that run at the same time add up.",
    ),
    _time(
        _HIDDEN_SECONDS,
        "communicating, hidden",
        "Communication that runs while the rank computes: communicating less waiting, at least 0.",
    ),
    _time(
        "codec_seconds",
        "communicating, coding",
        "The part of communicating in which the processor encodes, decodes and adds values.",
    ),
    _time(
        "wait_seconds_for_rank_#",
        "communicating, waiting for rank #",
        "Communication waits for rank #. Computing may hide a part of this. If several ranks are missing, each counts "
        "for an equal part. Waits of up to 250 ms within a transfer by native code are left out.",
    ),
    _time(
        "wait_seconds_for_ps_#",
        "communicating, waiting for ps #",
        "Communication waits for the answer of parameter server #. Computing may hide a part of this.",
    ),
    _rate(_NETWORK, "bytes_sent", "bytes sent", "Bytes of the messages that this rank sends: headers and values."),
    _rate(
        _NETWORK,
        "bytes_received",
        "bytes received",
        "Bytes of the messages that this rank receives: headers and values.",
    ),
    _rate(
        _NETWORK,
        "bytes_sent_on_lane_#",
        "bytes sent on lane #",
        "The part of the bytes sent that leaves on lane #. Lane 0 carries small messages, lane 1 carries arrays. Each "
        "further interface has a further lane.",
    ),
    _rate(_NETWORK, "messages_sent", "messages sent", "Messages that this rank sends."),
    _rate(_NETWORK, "messages_received", "messages received", "Messages that this rank receives."),
    _rate(
        _NETWORK, "shard_#_bytes_sent", "bytes sent to shard #", "Bytes of values pushed to server #, without headers."
    ),
    _rate(
        _NETWORK,
        "shard_#_bytes_received",
        "bytes received from shard #",
        "Bytes of values in the answers of server #, without headers.",
    ),
    _rate(_NETWORK, "inbox_waits", "waits for a full inbox", "Steps that begin late because an inbox is full."),
    _rate(
        _NETWORK,
        "window_waits",
        "waits for a full window",
        "Steps that begin late because `max_in_flight` contributions of this rank are not merged yet.",
    ),
    _level(_NETWORK, "inbox_bytes", "bytes in the inbox", "Bytes received and not merged yet, at this moment."),
    _level(
        _OUTCOMES,
        "staleness",
        "staleness",
        "Number of iterations that this rank is behind the fastest one that it knows of, at this moment.",
    ),
    _level(
        _OUTCOMES,
        "pushes_by_others",
        "pushes by others",
        "Staleness: pushes of other workers between this worker's latest two. The mean over the shards.",
    ),
    _level(
        _OUTCOMES,
        "mixing_weight",
        "mixing weight",
        "Alpha: the share of the servers' values in this worker's after its latest push. The mean over the shards.",
    ),
    _rate(_OUTCOMES, "skipped_iterations", "skipped iterations", "Iterations that this rank skips to catch up."),
    _rate(_OUTCOMES, "jumps", "jumps", "Number of times that this rank skips iterations. A jump skips one or several."),
    _rate(
        _OUTCOMES,
        "missed_iterations",
        "missed iterations",
        "Iterations that the others make while they do not hear from this rank.",
    ),
    _rate(
        _OUTCOMES,
        "late_updates",
        "late updates",
        "Updates of other ranks that come too late, or are superseded unused.",
    ),
    _rate(
        _OUTCOMES,
        "withheld_updates",
        "withheld updates",
        "Updates that this rank does not send: they would come too late, or a newer one is there.",
    ),
    _rate(
        _OUTCOMES,
        "overtime_drops",
        "dropped colayers",
        "Colayers (groups of variables) that this rank drops, because it is too far behind.",
    ),
    _rate(
        _OUTCOMES,
        "contributions_lost",
        "lost contributions",
        "Pieces of this rank's colayers that are lost with a rank on their way.",
    ),
    _rate(
        _OUTCOMES,
        "contributions_late",
        "late contributions",
        "Pieces from ranks that have left, which come when no rank waits for them any longer.",
    ),
    _rate(_OUTCOMES, "messages_merged", "merged messages", "Messages whose values this rank merges."),
    _rate(_OUTCOMES, "duplicates", "duplicates", "Messages that come again after this rank has merged their values."),
    _rate(_OUTCOMES, "pulls", "pulls", "Number of times that this rank copies another rank's state."),
    _rate(
        _OUTCOMES,
        "pulls_rejected",
        "rejected pulls",
        "Number of times that this rank keeps its own state, because no other state holds all of it.",
    ),
    _rate(
        _OUTCOMES,
        "resyncs",
        "resyncs",
        "Number of times that a piece of the weights becomes the mean over the ranks: see `sync_interval`.",
    ),
    _rate(_OUTCOMES, "pushes_lost", "lost pushes", "Pushes, of all workers, that a restarted server has lost."),
    _rate(
        _OUTCOMES,
        "silences",
        "silences",
        "Number of times that another rank is silent, so that this rank stops waiting for it.",
    ),
    _rate(
        _OUTCOMES,
        "nonfinite_steps",
        "steps with NaN or infinity",
        "Steps whose values to send hold NaN or infinity: see `CommunicationOptions.on_nonfinite`.",
    ),
    _level(
        _OUTCOMES,
        "proportion",
        "sent colayers",
        "Colayers of the present iteration that this rank has sent, at this moment.",
    ),
    _level(_OUTCOMES, "gei_rows", "GEI rows", "Iterations of which this rank remembers whose gradients it has merged."),
    _level(_OUTCOMES, "layouts", "layouts", "Layouts of ranks that this rank keeps. More than one while ranks change."),
    _level(_PICKED, "pipeline_width", "pipeline width", "K: the number of steps in flight at a time."),
    _level(_PICKED, "delay", "delay", "D: the number of steps between the end of a window and the merge of its mean."),
    _level(_PICKED, "interval", "interval", "p: the number of steps of a window."),
    _level(_PICKED, "uses_bcube", "uses a BCube", "1 if the all-reduce runs over a BCube, else 0."),
    _level(_PICKED, "uses_ring", "uses a ring", "1 if the all-reduce runs over a ring, else 0."),
    _level(
        _PICKED,
        "encoded_bytes_per_value",
        "encoded bytes per value",
        "Bytes that the codec sends for a value. 4 is a float32 without a codec.",
    ),
    _level(_PICKED, "batch_share", "batch share", "The part of each batch that this rank takes."),
    _level(_PROCESSES, "iteration", "iteration", "The step within the running or the last `fit`."),
    _level(
        _PROCESSES,
        "ranks_lost",
        "ranks lost",
        "Number of times that another rank was lost, and this rank continued. In total.",
    ),
    _level(
        _PROCESSES,
        "ranks_left",
        "ranks left",
        "Number of times that another rank left by an exception, and this rank continued. In total.",
    ),
    _level(
        _PROCESSES,
        "ranks_joined",
        "ranks joined",
        "Number of times that another rank rejoined during training. In total.",
    ),
    _level(
        _PROCESSES,
        "times_left_behind",
        "times left behind",
        "Number of times that the others continued without this rank, because it was silent. In total.",
    ),
    _level(
        _PROCESSES,
        "connections_refused",
        "connections refused",
        "Connections that this rank refused: without the cluster token, or of another job. In total.",
    ),
    _level(
        _PROCESSES,
        "server_restarts",
        "server restarts",
        "Number of times that a parameter server was restarted and resumed from a snapshot. In total.",
    ),
    _level(
        _PROCESSES,
        "snapshot_failures",
        "snapshot failures",
        "Number of times that a parameter server could not write a snapshot. In total.",
    ),
)

_BY_COUNTER = {curve.counter: curve for curve in CURVES}
_NUMBER = re.compile(r"\d+")


def find_curve(counter: str) -> Curve | None:
    """Returns the curve of a counter.

    Args:
      counter: The name in a report.

    Returns:
      The curve with the number of the counter in place of each "#"; None if the table does not know the counter.
    """
    curve = _BY_COUNTER.get(_NUMBER.sub("#", counter))
    if curve is None or (number := _NUMBER.search(counter)) is None:
        return curve
    tag, description = (text.replace("#", number.group()) for text in (curve.tag, curve.description))
    return dataclasses.replace(curve, counter=counter, tag=tag, description=description)


class Curves:
    """Turns the reports of a rank, one after the other, into points of curves."""

    def __init__(self):
        self._last: Mapping[str, float] = {}  # The report that rates are relative to.

    def points(self, report: Mapping[str, float]) -> list[Point]:
        """Returns the points of the next report.

        Args:
          report: A report of `ExchangeStrategy.report`.

        Returns:
          A point for each curve. The first report is relative to zero. If no step was made since the last report, there
          are no rates. The rates of the next report then cover both intervals.
        """
        values = dict(self._values(report))
        if report["steps"] != self._last.get("steps", 0):
            values.update(_derived(values))
            self._last = dict(report)
        return [_curve_of(counter).point(value) for counter, value in values.items()]

    def _values(self, report: Mapping[str, float]) -> Iterator[tuple[str, float]]:
        num_steps = report["steps"] - self._last.get("steps", 0)
        for counter, value in report.items():
            if counter in _NO_CURVES:
                continue
            if not _curve_of(counter).is_rate:
                yield counter, value
            elif num_steps:
                yield counter, (value - self._last.get(counter, 0)) / num_steps


def _curve_of(counter: str) -> Curve:
    """The curve of a counter. A counter of a user's own strategy is a rate in a group of its own."""
    return find_curve(counter) or Curve(counter, f"{_OTHER}/{counter}", "A counter of the strategy, per step.")


def _derived(values: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    """The values that follow from several counters; nothing if the graph may not read the clock."""
    if not values.get("compute_seconds"):
        return
    waiting = values["wait_seconds"]
    yield _STEP_SECONDS, values["compute_seconds"] + waiting
    if "communicate_seconds" in values:
        yield _HIDDEN_SECONDS, max(0.0, values["communicate_seconds"] - waiting)

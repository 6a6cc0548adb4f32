"""What Pipe-SGD's timing model expects of other settings, on the links and steps that a job has recorded."""

from __future__ import annotations

import collections
import math
from collections.abc import Mapping

import numpy as np

from hop_tf.diagnosis.links import LARGE_BYTES, Link
from hop_tf.diagnosis.steps import Steps
from hop_tf.records.log import JobLog
from hop_tf.timing import NetworkCosts, Plan, Step, recommend

_BYTES_PER_VALUE = 4


def best_plan(job: JobLog, steps: Mapping[int, Steps], links: Mapping[tuple[int, int], Link]) -> Plan | None:
    """The settings of `PipeSGDStrategy` with the shortest step, by its model; None where too little is recorded.

    Ranks are taken to be alike, encoding to cost nothing, and no link to be shared.

    Args:
      job: The records.
      steps: By place in `JobLog.processes`, the steps of the ranks.
      links: Those that `measure_links` has found.
    """
    num_values = sum(line["num_values"] for line in job.ranks[0].lines if line["kind"] == "group")
    round_trips = [each.round_trip_seconds for each in links.values() if not math.isnan(each.round_trip_seconds)]
    rates = sending_rates(job)
    if not num_values or not round_trips or not rates:
        return None
    computing = float(np.median([np.mean(each.compute) for each in steps.values()]))
    between = float(np.median([np.mean(each.own - each.compute) for each in steps.values()]))
    rate = float(np.median(list(rates.values())))
    return recommend(
        NetworkCosts(latency_seconds=float(np.median(round_trips)) / 2, seconds_per_byte=1 / rate),
        # A third of what a step computes is the forward pass, as a rule.
        Step(update_seconds=between, forward_seconds=computing / 3, backward_seconds=computing * 2 / 3),
        world_size=len({process.number for process in job.ranks}),
        num_bytes=num_values * _BYTES_PER_VALUE,
    )


def sending_rates(job: JobLog) -> dict[int, float]:
    """By process, the bytes that it sends in a second while large messages of its own are on their way.

    What goes to several others at the same time counts together: they may share a link.
    """
    of_sender = collections.defaultdict(list)
    for each in job.transfers:
        if each.num_bytes >= LARGE_BYTES and each.come_at > each.sent_at:
            of_sender[each.sender].append(each)
    rates = {}
    for sender, transfers in of_sender.items():
        seconds, until = 0.0, -math.inf
        for each in sorted(transfers, key=lambda each: each.sent_at):
            seconds += max(0.0, each.come_at - max(each.sent_at, until))
            until = max(until, each.come_at)
        rates[sender] = sum(each.num_bytes for each in transfers) / seconds
    return rates

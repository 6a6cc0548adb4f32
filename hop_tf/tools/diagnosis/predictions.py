"""The step times of other settings by Pipe-SGD's timing model, with the links and steps that a job has recorded."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from hop_tf.records.log import JobLog
from hop_tf.tools.diagnosis.links import Link
from hop_tf.tools.diagnosis.sending import sending_rates
from hop_tf.tools.diagnosis.steps import Steps
from hop_tf.tools.timing import NetworkCosts, Plan, Step, recommend

_BYTES_PER_VALUE = 4


def best_plan(job: JobLog, steps: Mapping[int, Steps], links: Mapping[tuple[int, int], Link]) -> Plan | None:
    """The settings of `PipeSGDStrategy` with the shortest step, by its model. Returns None if too little is recorded.

    The model assumes that ranks are alike, encoding costs nothing, and no link is shared.

    Args:
      job: The records.
      steps: The steps of the ranks, by place in `JobLog.processes`.
      links: The links from `measure_links`.
    """
    num_values = sum(line["num_values"] for line in job.ranks[0].lines if line["kind"] == "group")
    round_trips = [each.round_trip_seconds for each in links.values() if not math.isnan(each.round_trip_seconds)]
    rates = sending_rates(job, links)
    if not num_values or not round_trips or not rates:
        return None
    computing = float(np.median([np.mean(each.compute) for each in steps.values()]))
    between = float(np.median([np.mean(each.own - each.compute) for each in steps.values()]))
    rate = float(np.median(list(rates.values())))
    return recommend(
        NetworkCosts(latency_seconds=float(np.median(round_trips)) / 2, seconds_per_byte=1 / rate),
        Step.of_computing(computing, update_seconds=between),
        world_size=len({process.number for process in job.ranks}),
        num_bytes=num_values * _BYTES_PER_VALUE,
    )

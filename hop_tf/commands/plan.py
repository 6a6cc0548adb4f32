"""`python -m hop_tf plan`: which settings of Pipe-SGD and DTS a script, its model and its links ask for.

The script is started as by `hop_tf launch`. When its first `fit` has ended, the ranks measure their links and print,
on rank 0, what the timing models (`hop_tf.timing`) say of settings, the recommended ones first. On a cluster, setting
the environment variable HOP_TF_PLAN=1 for every rank does the same.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hop_tf.options import PLAN_VARIABLE

if TYPE_CHECKING:
    from hop_tf.strategy import ExchangeStrategy
    from hop_tf.timing import DTSPlan, Measurement, Plan

# Delays and intervals of DTS that are shown beside the recommended ones: the default, and the paper's largest.
_DELAYS = ((4, 4), (20, 12))


def main(argv: Sequence[str]) -> int:
    """Runs `hop_tf plan` with the arguments `argv`, those of `hop_tf launch`; returns the exit code."""
    from hop_tf.commands import launch

    os.environ[PLAN_VARIABLE] = "1"
    return launch.main(argv, command="plan")


def show(strategy: ExchangeStrategy) -> None:
    """Measures, and prints the plan on rank 0. A collective; see `hop_tf.timing.measure`."""
    from hop_tf import timing

    measurement = timing.measure(strategy)
    if strategy.is_chief:
        print(describe(measurement), flush=True)


def describe(measurement: Measurement) -> str:
    """The plan as text: what was measured, and for each scheme a table and the reason."""
    network = measurement.network
    rate = 8e-6 / network.seconds_per_byte if network.seconds_per_byte else float("inf")
    lines = [
        f"{measurement.world_size} ranks, {measurement.num_bytes / 1e6:.1f} MB of gradients; a step computes for "
        f"{measurement.step.seconds * 1e3:.1f} ms",
        f"links: {rate:.0f} Mbit/s, latency {network.latency_seconds * 1e3:.2f} ms, synchronization "
        f"{network.synchronization_seconds * 1e3:.2f} ms",
        "",
        *_pipe_sgd(measurement),
        "",
        *_dts(measurement),
    ]
    return "\n".join(lines)


def _pipe_sgd(measurement: Measurement) -> list[str]:
    from hop_tf.timing import pipe_sgd

    best = measurement.recommend()
    others = [
        measurement.predict(pipeline_width=width, codec=codec)
        for width, codec in itertools.product((1, 2), pipe_sgd.CODECS)
    ]
    return [
        f"{'Pipe-SGD':12s}{'width':>6s}{'codec':>12s}{'segments':>10s}{'algorithm':>11s}{'communicate':>13s}{'step':>11s}"
        f"{'efficiency':>12s}",
        _row("recommended", best),
        *(_row("", plan) for plan in others),
        "",
        best.reason,
    ]


def _row(label: str, plan: Plan) -> str:
    return (
        f"{label:12s}{plan.pipeline_width:6d}{plan.codec:>12s}{plan.num_segments:10d}{plan.algorithm:>11s}"
        f"{plan.communication_seconds * 1e3:10.1f} ms{plan.step_seconds * 1e3:8.1f} ms{plan.scaling_efficiency:12.0%}"
    )


def _dts(measurement: Measurement) -> list[str]:
    from hop_tf.timing import dts

    best = measurement.recommend_dts()
    others = [
        measurement.predict_dts(delay=delay, interval=interval, codec=codec)
        for (delay, interval), codec in itertools.product(_DELAYS, dts.CODECS)
    ]
    return [
        f"{'DTS':12s}{'delay':>6s}{'interval':>9s}{'codec':>12s}{'algorithm':>11s}{'sent a step':>14s}{'window':>13s}"
        f"{'step':>11s}{'efficiency':>12s}",
        _dts_row("recommended", best),
        *(_dts_row("", plan) for plan in others),
        "",
        best.reason,
    ]


def _dts_row(label: str, plan: DTSPlan) -> str:
    return (
        f"{label:12s}{plan.delay:6d}{plan.interval:9d}{plan.codec:>12s}{plan.algorithm:>11s}"
        f"{plan.bytes_per_step / 1e6:11.3f} MB{plan.window_seconds * 1e3:10.1f} ms{plan.step_seconds * 1e3:8.1f} ms"
        f"{plan.scaling_efficiency:12.0%}"
    )

"""`python -m hop_tf plan`: which settings of Pipe-SGD a script, its model and its links ask for.

The script is started as by `hop_tf launch`. When its first `fit` has ended, the ranks measure their links and print,
on rank 0, what the timing model (`hop_tf.timing`) says of settings, the recommended ones first. On a cluster, setting
the environment variable HOP_TF_PLAN=1 for every rank does the same.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hop_tf.strategy import ExchangeStrategy
    from hop_tf.timing import Measurement, Plan

_ASKED_FOR = "HOP_TF_PLAN"


def main(argv: Sequence[str]) -> int:
    """Runs `hop_tf plan` with the arguments `argv`, those of `hop_tf launch`; returns the exit code."""
    from hop_tf import launch

    os.environ[_ASKED_FOR] = "1"
    return launch.main(argv, command="plan")


def is_asked_for() -> bool:
    """Whether this process is to print a plan when its first `fit` has ended."""
    return os.environ.get(_ASKED_FOR) == "1"


def show(strategy: ExchangeStrategy) -> None:
    """Measures, and prints the plan on rank 0. A collective; see `hop_tf.timing.measure`."""
    from hop_tf import timing

    measurement = timing.measure(strategy)
    if strategy.is_chief:
        print(describe(measurement), flush=True)


def describe(measurement: Measurement) -> str:
    """The plan as text: what was measured, a table, and the reason."""
    network, best = measurement.network, measurement.recommend()
    others = [
        measurement.predict(pipeline_width=width, codec=codec)
        for width, codec in itertools.product((1, 2), measurement.codec_seconds_per_byte)
    ]
    rate = 8e-6 / network.seconds_per_byte if network.seconds_per_byte else float("inf")
    lines = [
        f"{measurement.world_size} ranks, {measurement.num_bytes / 1e6:.1f} MB of gradients; a step computes for "
        f"{measurement.step.seconds * 1e3:.1f} ms",
        f"links: {rate:.0f} Mbit/s, latency {network.latency_seconds * 1e3:.2f} ms, synchronization "
        f"{network.synchronization_seconds * 1e3:.2f} ms",
        "",
        f"{'':12s}{'width':>6s}{'codec':>12s}{'segments':>10s}{'algorithm':>11s}{'communicate':>13s}{'step':>11s}"
        f"{'efficiency':>12s}",
        _row("recommended", best),
        *(_row("", plan) for plan in others),
        "",
        best.reason,
    ]
    return "\n".join(lines)


def _row(label: str, plan: Plan) -> str:
    return (
        f"{label:12s}{plan.pipeline_width:6d}{plan.codec:>12s}{plan.num_segments:10d}{plan.algorithm:>11s}"
        f"{plan.communication_seconds * 1e3:10.1f} ms{plan.step_seconds * 1e3:8.1f} ms{plan.scaling_efficiency:12.0%}"
    )

"""Measures the scaling efficiency of DTS and of synchronous training, for round-trip times (the paper's Figure 1).

    python benchmarks/benchmark_dts.py --links=100e6,10e6 --round_trips=0.277,1

The efficiency is the speed of n ranks over n times that of one rank. Ranks are hosts of an emulated network (`network`,
which needs root). Computation is emulated, asleep. The one rank is timed before and after each row: the shorter of its
steps counts. `synchronous int8` is `PipeSGDStrategy(pipeline_width=1)`, and `both` DTS with a delay and an interval.
Both have optimizers with momentum. Required of `both` at 100 Mbit/s: 0.9 at 277 ms and 0.85 at 1000 ms.

A schedule repeats itself after floor(D / p) + 1 windows of p steps. The first two of these cycles are left out. The
mean over the others counts, at the slowest rank. `flush` is the time that `fit` takes after its last step, to apply
what is in flight.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import ranks
import results
import turns
from absl import app, flags

import hop_tf
from hop_tf.tools.emulation import ComputeEmulation

_LINKS = flags.DEFINE_list("links", ["100e6"], "Rates of the links, in bits per second.")
_ROUND_TRIPS = flags.DEFINE_list("round_trips", ["0.277"], "Round-trip times, in seconds.")
_NUM_VALUES = flags.DEFINE_integer("num_values", 2_500_000, "Parameters of the model.", lower_bound=1000)
_NUM_CYCLES = flags.DEFINE_integer("num_cycles", 3, "Timed cycles.", lower_bound=1)

_WORLD_SIZE, _STEP_SECONDS = 4, 0.3
_DELAY, _INTERVAL = 20, 12
_SKIPPED_CYCLES = 2
# For each member, its call, and the number of steps of a cycle.
_MEMBERS = {
    "synchronous int8": ("PipeSGDStrategy(pipeline_width=1, codec='int8', algorithm='mesh')", 4),
    "both": (
        f"DTSStrategy(delay={_DELAY}, interval={_INTERVAL}, codec=None, algorithm='mesh')",
        (_DELAY // _INTERVAL + 1) * _INTERVAL,
    ),
}
_ALONE = {"call": "PipeSGDStrategy(pipeline_width=1, codec=None)", "num_steps": 40, "warmup": 8}


def _measure(turn: Mapping, strategy: hop_tf.ExchangeStrategy) -> dict[str, float]:
    steps = turns.fit_vector(turn, strategy)
    num_bytes = steps.per_step("bytes_sent") if strategy.world_size > 1 else 0.0
    return {"step seconds": steps.seconds.mean(), "MB a step": num_bytes / 1e6, "flush seconds": steps.flush_seconds}


def _run(members: list[Mapping], world_size: int, link: str, **about) -> list[dict[str, float]]:
    """Returns the largest values of all ranks, for each member."""
    turns_ = [{"num_values": _NUM_VALUES.value, "momentum": 0.9, **member} for member in members]
    compute = ComputeEmulation(step_seconds=_STEP_SECONDS)
    measured = turns.run(_measure, turns_, world_size, link, compute=compute, **about)
    return [{name: max(each[name] for each in of_ranks) for name in of_ranks[0]} for of_ranks in measured]


def _compare(link: str, round_trip: float) -> None:
    members = [
        {"call": call, "num_steps": _NUM_CYCLES.value * cycle, "warmup": _SKIPPED_CYCLES * cycle}
        for call, cycle in _MEMBERS.values()
    ]
    options = {"bandwidth_bits_per_second": float(link)}
    (before,) = _run([_ALONE], 1, ranks.LOOPBACK)
    measured = _run(members, _WORLD_SIZE, link, options=options, round_trip_seconds=round_trip)
    (after,) = _run([_ALONE], 1, ranks.LOOPBACK)
    alone = min(before["step seconds"], after["step seconds"])
    for label, found in zip(_MEMBERS, measured, strict=True):
        ratios = {"seconds alone": alone, "efficiency": alone / found["step seconds"]}
        results.show(f"{label}, {link}, {round_trip:g}", {**found, **ratios})


def main(_: list[str]) -> None:
    for link, round_trip in itertools.product(_LINKS.value, map(float, _ROUND_TRIPS.value)):
        _compare(link, round_trip)


if __name__ == "__main__":
    app.run(main)

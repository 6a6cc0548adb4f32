"""Compares the predictions of `hop_tf plan` with the step times of real jobs.

    python benchmarks/benchmark_plan.py --slowdowns=none,2:3x,random:4x

Ranks are hosts of an emulated network (`network`, which needs root). Their computation is emulated, asleep, so that
ranks do not take the processor from each other. Ranks train synchronously first, and measure links and steps as `plan`
does. All predictions use that measurement alone. Then each of --candidates trains. Shown are seconds per step, at the
slowest rank (SHAT: the time in which each worker trains a batch), and predicted over measured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import results
import turns
from absl import app, flags

import hop_tf
from hop_tf.tools import planning, timing
from hop_tf.tools.emulation import ComputeEmulation, Slowdown

_NUM_STEPS = flags.DEFINE_integer("num_steps", 40, "Timed steps.", lower_bound=8)
_SLOWDOWNS = flags.DEFINE_list("slowdowns", ["none", "2:3x", "random:4x"], "Slowdowns, in a run each.")
_CANDIDATES = flags.DEFINE_list(
    "candidates", ["pipe:1", "pipe:2:int8", "hop", "hop:skip", "canary", "shat", "dts:4:4"], "Names of settings."
)

_WORLD_SIZE, _LINK = 3, "100e6"
_STEP_SECONDS, _NUM_VALUES = 0.3, 1_000_000
_QUEUE_BYTES = 512_000  # Buffer in front of each link, as small switches have.
# Ranks begin at different times. A rank that need not wait for others is affected for as many steps as it may be ahead.
_WARMUP_STEPS = 16
_SYNCHRONOUS = "PipeSGDStrategy(pipeline_width=1, codec=None, algorithm='mesh')"


def _measure(turn: Mapping, strategy: hop_tf.ExchangeStrategy) -> tuple[float, timing.Measurement | None]:
    """Returns the seconds of a step, and the measurement of synchronous training."""
    steps = turns.fit_vector(turn, strategy)
    return float(steps.seconds.mean()), timing.measure(strategy) if turn["call"] == _SYNCHRONOUS else None


def _job(emulation: ComputeEmulation, calls: list[str]) -> list[tuple[float, timing.Measurement]]:
    """Returns for each call the seconds of a step, and rank 0's measurement."""
    about = {"num_values": _NUM_VALUES, "num_steps": _NUM_STEPS.value, "warmup": _WARMUP_STEPS}
    turns_ = [{"call": call, **about} for call in calls]
    measured = turns.run(_measure, turns_, _WORLD_SIZE, _LINK, compute=emulation, queue_bytes=_QUEUE_BYTES)
    found = []
    for call, of_workers in zip(calls, measured, strict=True):
        seconds = [each for each, _ in of_workers]
        # Workers that wait for servers alone make as many steps each, but not in the same time.
        step = 1 / np.mean(1 / np.array(seconds)) if turns.num_servers(call) else max(seconds)
        found.append((float(step), of_workers[0][1]))
    return found


def _compare(slowdown: str) -> None:
    slowdowns = () if slowdown == "none" else (Slowdown.parse(slowdown),)
    emulation = ComputeEmulation(step_seconds=_STEP_SECONDS, slowdowns=slowdowns)
    ((_, measurement),) = _job(emulation, [_SYNCHRONOUS])
    # Emulated computation gives all gradients at its end: nothing hides behind a backward pass.
    whole_step = timing.Step(forward_seconds=measurement.step.seconds)
    measurement = dataclasses.replace(measurement, step=whole_step)
    predictions = {each.name: each for each in reversed(planning.compare(measurement))}  # SHAT with one server.
    chosen = [predictions[name] for name in _CANDIDATES.value]
    for each, (seconds, _) in zip(chosen, _job(emulation, [each.call for each in chosen]), strict=True):
        found = {"step seconds": seconds, "predicted over measured": each.step_seconds / seconds}
        results.show(f"{each.name}, {slowdown}", found)


def main(_: list[str]) -> None:
    for slowdown in _SLOWDOWNS.value:
        _compare(slowdown)


if __name__ == "__main__":
    app.run(main)

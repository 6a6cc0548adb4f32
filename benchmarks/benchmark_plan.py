"""Compares the predictions of `hop_tf plan` with the step times of real jobs.

    python benchmarks/benchmark_plan.py --slowdowns=none,2:3x,random:4x

Ranks are hosts of an emulated network (`network`, which needs root). Their computation is emulated, asleep, so that
ranks do not take the processor from each other. Ranks train synchronously first, and measure links and steps as `plan`
does. All predictions use that measurement alone. Then each of --candidates trains. Shown are milliseconds per step, at
the slowest rank (SHAT: the time in which each worker trains a batch), and predicted over measured.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import sys
import time
from collections.abc import Mapping

import keras
import models
import numpy as np
import ranks
import results
import tensorflow as tf
from absl import app, flags

import hop_tf
from hop_tf.tools import planning, timing
from hop_tf.tools.emulation import ComputeEmulation, Slowdown

_LINK = flags.DEFINE_string("link", "100e6", "Bits per second of a host's link.")
_QUEUE_BYTES = flags.DEFINE_integer("queue_bytes", 512_000, "Buffer in front of each link, as small switches have.")
_WORLD_SIZE = flags.DEFINE_integer("world_size", 3, "Ranks.", lower_bound=2)
_STEP_SECONDS = flags.DEFINE_float("step_seconds", 0.3, "Emulated computation of a step.")
_NUM_VALUES = flags.DEFINE_integer("num_values", 1_000_000, "Parameters.")
_NUM_STEPS = flags.DEFINE_integer("num_steps", 40, "Timed steps.", lower_bound=8)
_SLOWDOWNS = flags.DEFINE_list("slowdowns", ["none", "2:3x", "random:4x"], "Who is slow, in a run each.")
_CANDIDATES = flags.DEFINE_list(
    "candidates", ["pipe:1", "pipe:2:int8", "hop", "hop:skip", "canary", "shat", "dts:4:4"], "Names of settings."
)

# Ranks begin at different times. A rank that need not wait for others is affected for as many steps as it may be ahead.
_WARMUP_STEPS = 16
_SYNCHRONOUS = "PipeSGDStrategy(pipeline_width=1, codec=None, algorithm='mesh')"
# A server waits for workers that are still at earlier candidates.
_OPTIONS = hop_tf.CommunicationOptions(timeout_seconds=900)
_STRATEGIES = {
    name: functools.partial(getattr(hop_tf, name), communication_options=_OPTIONS)
    for name in hop_tf.__all__
    if name.endswith("Strategy")
}


# In each process. The last host is the parameter server, if there is one.


def _run(case: Mapping, number: int) -> list:
    tf.config.threading.set_intra_op_parallelism_threads(1)
    return [_train(case, turn, call, number) for turn, call in enumerate(case["calls"])]


def _train(case: Mapping, turn: int, call: str, number: int) -> tuple[float, timing.Measurement | None]:
    """Returns the seconds of a step, and for the first of `calls` also the measurement."""
    *workers, server = case["addresses"][turn]
    call, *servers = call.split(" with ")
    cluster = {"worker": workers, **({"ps": [server]} if servers else {})}
    is_server = number == len(workers)
    if is_server and not servers:
        return np.nan, None
    task = {"type": "ps", "index": 0} if is_server else {"type": "worker", "index": number}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": task})
    try:
        strategy = eval(call, {"hop_tf": hop_tf, **_STRATEGIES})
    except SystemExit:  # The server's, when the workers are done.
        return np.nan, None
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), models.Vector(case["num_values"])])
        model.compile(keras.optimizers.SGD(0.0), "mse")
    times = []
    record = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: times.append(time.monotonic()))
    x = np.zeros(((_WARMUP_STEPS + case["num_steps"]) * strategy.world_size, 1), np.float32)
    model.fit(x, x, batch_size=strategy.world_size, verbose=0, callbacks=[record])
    measurement = timing.measure(strategy) if turn == 0 else None
    strategy.shutdown()
    return (times[-1] - times[_WARMUP_STEPS - 1]) / (len(times) - _WARMUP_STEPS), measurement


# In the parent.


def _compare(slowdown: str) -> None:
    world_size = _WORLD_SIZE.value
    slowdowns = () if slowdown == "none" else (Slowdown.parse(slowdown),)
    emulation = ComputeEmulation(step_seconds=_STEP_SECONDS.value, slowdowns=slowdowns)
    print(f"\n{slowdown}: {world_size} ranks, {_NUM_VALUES.value / 1e6:g} million parameters, {_LINK.value} bit/s")
    ((_, measurement),) = _job(emulation, [_SYNCHRONOUS])
    print(measurement, file=sys.stderr, flush=True)
    # Emulated computation gives all gradients at its end: nothing hides behind a backward pass.
    whole_step = timing.Step(forward_seconds=measurement.step.seconds)
    measurement = dataclasses.replace(measurement, step=whole_step)
    predictions = {each.name: each for each in reversed(planning.compare(measurement))}  # SHAT with one server.
    chosen = [predictions[name] for name in _CANDIDATES.value]
    for each, (seconds, _) in zip(chosen, _job(emulation, [each.call for each in chosen]), strict=True):
        ratio = each.step_seconds / seconds
        results.note("predicted over measured", f"{each.name}, {slowdown}", ratio)
        print(f"  {each.call:82s} {seconds * 1e3:8.0f} ms {each.step_seconds * 1e3:8.0f} {ratio:6.2f}", flush=True)


def _job(emulation: ComputeEmulation, calls: list[str]) -> list[tuple[float, timing.Measurement]]:
    """Returns for each call the seconds of a step, and rank 0's measurement."""
    case = {"calls": calls, "num_values": _NUM_VALUES.value, "num_steps": _NUM_STEPS.value}
    of_processes = ranks.run(
        __file__,
        case,
        _WORLD_SIZE.value + 1,
        _LINK.value,
        num_ports=len(calls),
        environment=emulation.to_environment(),
        queue_bytes=_QUEUE_BYTES.value,
    )
    found = []
    for call, (*of_workers, _) in zip(calls, zip(*of_processes, strict=True), strict=True):
        seconds = [each for each, _ in of_workers]
        # Workers that wait for servers alone make as many steps each, but not in the same time.
        step = 1 / np.mean(1 / np.array(seconds)) if call.startswith("SHAT") else max(seconds)
        found.append((float(step), of_workers[0][1]))
    return found


def main(argv) -> None:
    del argv
    for slowdown in _SLOWDOWNS.value:
        _compare(slowdown)


if __name__ == "__main__":
    ranks.serve(_run)
    app.run(main)

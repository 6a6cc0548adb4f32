"""The output of `hop_tf plan`: the measurement, the best settings with their costs, and tables of all settings."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator, Sequence

import numpy as np

from hop_tf.options import PLAN_KINDS
from hop_tf.tools import planning
from hop_tf.tools.diagnosis.findings import ALWAYS, SLOW_STEP
from hop_tf.tools.planning import Prediction
from hop_tf.tools.timing import DTSPlan, Measurement, Plan, dts, pipe_sgd

# Delays and intervals of DTS that are shown in addition to the recommended ones: the default, and the paper's largest.
_DELAYS = ((4, 4), (20, 12))
_NUM_BEST = 3
# Of two durations that differ by less than this share, only one is printed.
_ALIKE = 0.05


def describe(measurement: Measurement, kind: str = PLAN_KINDS[0]) -> str:
    """Returns the plan as text.

    Args:
      measurement: The links and steps, measured or assumed.
      kind: One of `PLAN_KINDS`: "1", the three best; "all", also a table of all settings, and of further settings of
        Pipe-SGD and DTS; "json", everything in one line.
    """
    predictions = planning.compare(measurement)
    best = planning.best(predictions, _NUM_BEST)
    if kind == "json":
        return json.dumps(_as_json(measurement, predictions, best))
    lines = [*_measured(measurement), "", *_best(predictions, best)]
    if kind == "all":
        lines += ["", *_table(predictions), "", *_pipe_sgd(measurement.typical), "", *_dts(measurement.typical)]
    else:
        lines += ["", "`--all` (HOP_TF_PLAN=all) shows all settings that were compared."]
    return "\n".join(lines)


# The measurement.


def _measured(measurement: Measurement) -> Iterator[str]:
    network = measurement.network
    rate = 8e-6 / network.seconds_per_byte if network.seconds_per_byte else float("inf")
    yield (
        f"{measurement.world_size} ranks, {measurement.num_bytes / 1e6:.1f} MB of gradients; a step computes for "
        f"{measurement.typical_step.seconds * 1e3:.1f} ms"
    )
    yield (
        f"links: {rate:.0f} Mbit/s, latency {network.latency_seconds * 1e3:.2f} ms, synchronization "
        f"{network.synchronization_seconds * 1e3:.2f} ms"
    )
    yield from _slow_ranks(measurement)


def _slow_ranks(measurement: Measurement) -> Iterator[str]:
    if not measurement.rank_seconds:
        return
    steps, times = np.array(measurement.rank_seconds), measurement.slowness
    for rank in np.flatnonzero(times > ALWAYS):
        yield f"rank {rank} takes {times[rank]:.1f} times as long for a step as most others"
    usual = np.median(steps, axis=1, keepdims=True)
    is_slow = steps > SLOW_STEP * usual
    if is_slow.any():
        longer = np.mean((steps / usual)[is_slow])
        yield f"now and then a step takes longer: {is_slow.mean():.0%} of all steps take {longer:.1f} times as long"


# The best.


def _best(predictions: Sequence[Prediction], best: Sequence[Prediction]) -> Iterator[str]:
    synchronous = predictions[0]
    strategies = len({each.strategy for each in predictions})
    yield (
        f"The {len(best)} best of {len(predictions)} settings of {strategies} strategies, the best of each strategy. "
        f"Synchronous training takes {_milliseconds(synchronous)} a step."
    )
    for place, each in enumerate(best, start=1):
        yield ""
        yield f"{place}. {each.call}"
        yield f"   {_time(each, synchronous)}"
        yield (
            f"   A rank sends {_megabytes(each.bytes_per_step)} a step, and keeps some {_megabytes(each.memory_bytes)} "
            "more than without a strategy."
        )
        yield f"   {_source(each)}"
        yield from (f"   {line}" for line in _accuracy(each))


def _time(each: Prediction, synchronous: Prediction) -> str:
    text = f"A step takes {_milliseconds(each)}"
    if abs(each.step_seconds / each.alike_seconds - 1) > _ALIKE:
        text += f" ({each.alike_seconds * 1e3:.1f} ms if all ranks were alike)"
    if each.trained_share < 1 - _ALIKE:
        text += f", and {each.trained_share:.0%} of all batches are trained on"
    times = synchronous.batch_seconds / each.batch_seconds
    return f"{text}: {times:.1f} times as fast as synchronous training."


def _source(each: Prediction) -> str:
    source = "Simulated with the strategy's own protocol." if each.is_simulated else "By a model."
    return f"{source} It needs {each.needs}." if each.needs else source


def _accuracy(each: Prediction) -> Iterator[str]:
    if each.changes is None:
        yield "Accuracy: not measured."
    elif not each.changes:
        yield "Accuracy: this is synchronous training."
    else:
        first = each.changes[0]
        yield f'Accuracy, in points above {first.reference} (docs/measurements.md, "{first.section}"):'
        yield f"  {', '.join(f'{change.task} {change.points:+.2f}' for change in each.changes)}."


def _milliseconds(each: Prediction) -> str:
    return f"{each.step_seconds * 1e3:.1f} ms"


def _megabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:.1f} MB"


# All settings.


def _table(predictions: Sequence[Prediction]) -> Iterator[str]:
    width = max(len(each.call) for each in predictions) + 2
    titles = f"{'step':>11s}{'if alike':>11s}{'trained on':>12s}{'sent a step':>12s}{'memory':>12s}{'accuracy':>16s}"
    yield f"{'':{width}s}{titles}"
    for each in predictions:
        yield (
            f"{each.call:{width}s}{each.step_seconds * 1e3:8.1f} ms{each.alike_seconds * 1e3:8.1f} ms"
            f"{each.trained_share:12.0%}{_megabytes(each.bytes_per_step):>12s}{_megabytes(each.memory_bytes):>12s}"
            f"{_range(each):>16s}"
        )


def _range(each: Prediction) -> str:
    if not each.changes:
        return "not measured" if each.changes is None else "0"
    shown = [f"{change.points:+.2f}" for change in sorted(each.changes, key=lambda change: change.points)]
    return shown[0] if len(set(shown)) == 1 else f"{shown[0]} to {shown[-1]}"


def _as_json(measurement: Measurement, predictions: Sequence[Prediction], best: Sequence[Prediction]) -> dict:
    return {
        "measurement": dataclasses.asdict(measurement),
        "predictions": [dataclasses.asdict(each) for each in predictions],
        "best": [each.call for each in best],
    }


# Further settings of Pipe-SGD and DTS.


def _pipe_sgd(measurement: Measurement) -> list[str]:
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

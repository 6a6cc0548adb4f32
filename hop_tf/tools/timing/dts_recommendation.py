"""The settings of DTS that the model recommends. See `hop_tf.timing.dts`."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping

from hop_tf.arguments import check_integer
from hop_tf.strategies.dts.windows import MAX_WINDOWS, num_windows
from hop_tf.tools.timing.costs import (
    ALGORITHMS,
    FLOAT32_BYTES,
    RESOLUTION,
    NetworkCosts,
    Step,
    check_codec_names,
)
from hop_tf.tools.timing.dts import CODECS, DTSPlan, predict_dts

# The largest values of the paper's Table 2 (a).
_MAX_DELAY, _MAX_INTERVAL = 20, 12
_SYNCHRONOUS = (0, 1)


def recommend_dts(
    network: NetworkCosts,
    step: Step,
    *,
    world_size: int,
    num_bytes: float,
    target_efficiency: float = 0.9,
    max_delay: int = _MAX_DELAY,
    max_interval: int = _MAX_INTERVAL,
    codec_seconds_per_byte: Mapping[str, float] | None = None,
    codec_names: Iterable[str] = CODECS,
    bytes_per_value: float = FLOAT32_BYTES,
) -> DTSPlan:
    """Returns the settings that reach the target efficiency and change training least. `DTSStrategy` accepts them.

    The order of preference is: the first codec with which delays and intervals within the limits reach the target, the
    smallest D + p, the smallest D, and the mesh. D + p is the largest number of steps by which other ranks' gradients
    are late. If no settings reach the target, all settings within 2 % of the most efficient ones count, in the same
    order. D = 0, p = 1 stands for synchronous SGD by `PipeSGDStrategy(pipeline_width=1)`.

    The closed form finds the settings that may reach the target. The schedule of all messages then decides: see
    `predict_dts`.

    Args:
      network: The costs of communication.
      step: The computation of a step.
      world_size: Number of ranks.
      num_bytes: Size of the gradients as float32.
      target_efficiency: The scaling efficiency to reach, above 0 and at most 1. Default 0.9.
      max_delay: Largest D. Default 20, as in the paper's experiments.
      max_interval: Largest p. Default 12, as in the paper's experiments.
      codec_seconds_per_byte: By name of a codec, the time for which a rank encodes and decodes, per byte of the
        vectors. Default: no time.
      codec_names: Codecs to choose from, those that lose least first.
      bytes_per_value: Bytes of a value that does not pass through a codec; 2 for bfloat16. Default 4.

    Returns:
      The settings, with the reason.

    Raises:
      ValueError: If an argument is out of range.
    """
    if not 0 < target_efficiency <= 1:
        raise ValueError(
            f"`target_efficiency` must be above 0 and at most 1. Received: target_efficiency={target_efficiency!r}."
        )
    check_integer("max_delay", max_delay, at_least=0)
    check_integer("max_interval", max_interval, at_least=1)
    codec_names = check_codec_names(codec_names)
    costs = codec_seconds_per_byte or {}
    sizes = {"world_size": world_size, "num_bytes": num_bytes, "bytes_per_value": bytes_per_value}

    def predict(codec: str, delays: tuple[int, int], algorithm: str, quick: bool = False) -> DTSPlan:
        return predict_dts(
            network,
            step,
            delay=delays[0],
            interval=delays[1],
            codec=codec,
            algorithm=algorithm,
            codec_seconds_per_byte=costs.get(codec, 0.0),
            quick=quick,
            **sizes,
        )

    delays = itertools.product(range(max_delay + 1), range(1, max_interval + 1))
    delays = sorted((each for each in delays if num_windows(*each) <= MAX_WINDOWS), key=lambda each: (sum(each), each))
    plans = [predict(*settings, quick=True) for settings in itertools.product(codec_names, delays, ALGORITHMS)]
    highest = max(plan.scaling_efficiency for plan in plans)
    enough = target_efficiency if highest >= target_efficiency else highest / (1 + RESOLUTION)
    good = [plan for plan in plans if plan.scaling_efficiency >= enough]
    exact = (predict(plan.codec, (plan.delay, plan.interval), plan.algorithm) for plan in good)
    best = _first(exact, enough)
    return dataclasses.replace(best, reason=_reason(step, plans, best, target_efficiency))


def _first(plans: Iterable[DTSPlan], enough: float) -> DTSPlan:
    """The first plan that is efficient enough, or otherwise the most efficient one. Reads no more plans than needed."""
    seen = []
    for plan in plans:
        if plan.scaling_efficiency >= enough:
            return plan
        seen.append(plan)
    return max(seen, key=lambda plan: plan.scaling_efficiency)


def _reason(step: Step, plans: list[DTSPlan], best: DTSPlan, target_efficiency: float) -> str:
    """Explains the best plan. `plans` must begin with all plans of one codec, synchronous SGD first."""
    synchronous = plans[0]
    reached = best.scaling_efficiency >= target_efficiency
    if (best.delay, best.interval, best.codec) == (*_SYNCHRONOUS, synchronous.codec) and reached:
        return f"Synchronous SGD reaches {best.scaling_efficiency:.0%}: it needs no delay."
    waiting = synchronous.step_seconds - step.seconds
    parts = [f"Synchronous SGD computes for {step.seconds:.4g} s a step, and waits for {waiting:.4g} s."]
    if best.codec != synchronous.codec:
        plain = next(plan for plan in plans if (plan.delay, plan.interval) == (best.delay, best.interval))
        sizes = [f"{plan.bytes_per_step / 1e6:.3g} MB" for plan in (plain, best)]
        parts.append(f"{best.codec} shortens the data that a rank sends in a step from {sizes[0]} to {sizes[1]}.")
    parts.append(
        f"A window takes {best.interval * step.seconds:.4g} s, and its bytes occupy the links for "
        f"{best.sending_seconds:.4g} s; its mean is there after {best.window_seconds:.4g} s, and due after "
        f"{best.delay * step.seconds:.4g} s."
    )
    if not reached:
        parts.append(f"No settings reach {target_efficiency:.0%}; these are the best.")
    return " ".join(parts)

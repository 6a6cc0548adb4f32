"""The paper's model of a step under Pipe-SGD, and the settings that the model recommends.

References:
  Li, Yu, Li, Avestimehr, Kim, Schwing. Pipe-SGD: A Decentralized Pipelined SGD Framework for Distributed Deep Net
  Training. NeurIPS 2018. Equations 2 to 7.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping

import numpy as np

from hop_tf import codecs
from hop_tf.arguments import check_integer
from hop_tf.runtime.choosing import choose
from hop_tf.tools.timing.costs import (
    ALGORITHMS,
    FLOAT32_BYTES,
    RESOLUTION,
    NetworkCosts,
    Step,
    all_reduce,
    check_codec_names,
    scaling_efficiency,
)
from hop_tf.tools.timing.schedules import lock_step_seconds, non_computing_seconds

CODECS = ("identity", "truncate16", "int8")
_SEGMENTS = (1, 2, 4)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Settings of `PipeSGDStrategy`, with the model's predictions.

    Attributes:
      pipeline_width: K.
      codec: Name of the codec.
      num_segments: L.
      algorithm: "mesh" or "ring".
      bytes_per_step: The bytes that a rank sends per step.
      communication_seconds: Duration of an all-reduce.
      step_seconds: Duration of a step.
      scaling_efficiency: See `scaling_efficiency`.
      reason: The reason for a recommendation, in some sentences. Otherwise empty.
    """

    pipeline_width: int
    codec: str
    num_segments: int
    algorithm: str
    bytes_per_step: float
    communication_seconds: float
    step_seconds: float
    scaling_efficiency: float
    reason: str = ""


def predict(
    network: NetworkCosts,
    step: Step,
    *,
    world_size: int,
    num_bytes: float,
    pipeline_width: int = 2,
    codec: str | codecs.Codec | None = None,
    num_segments: int = 1,
    algorithm: str = "mesh",
    codec_seconds_per_byte: float = 0.0,
    bytes_per_value: float = FLOAT32_BYTES,
    durations: np.ndarray | None = None,
) -> Plan:
    """Predicts the times of settings.

    With K = 1 and L segments the first segments travel during the backward pass. The step then takes the longer of two:
    all computation and the last segment's all-reduce, or the computation up to the first segment and all communication.
    With K >= 2 a step takes the longer of computation and communication [Equations 4 and 5], and segments only add
    costs. (Equation 6 has less computation: the paper leaves out that a step cannot be shorter than all of its own
    computation.)

    Args:
      network: The costs of communication.
      step: The computation of a step.
      world_size: Number of ranks.
      num_bytes: Size of the gradients as float32.
      pipeline_width: K.
      codec: As for `PipeSGDStrategy`.
      num_segments: L.
      algorithm: "mesh" or "ring".
      codec_seconds_per_byte: Time for which a rank encodes and decodes, per byte of the gradients.
      bytes_per_value: Bytes of a value that does not pass through a codec; 2 for bfloat16. Default 4.
      durations: Array [n, T], the seconds for which each rank computes in each step. See `lock_step_seconds`. Default:
        all steps of all ranks are `step`, and the times are those in the long run.

    Returns:
      The settings with their times.

    Raises:
      ValueError: If an argument is out of range.
    """
    check_integer("pipeline_width", pipeline_width, at_least=1)
    codec, delay = codecs.get(codec), pipeline_width - 1
    vector = all_reduce(
        network,
        codec,
        world_size=world_size,
        num_bytes=num_bytes,
        num_segments=num_segments,
        algorithm=algorithm,
        codec_seconds_per_byte=codec_seconds_per_byte,
        bytes_per_value=bytes_per_value,
    )
    backward_share = step.backward_seconds / step.seconds if step.seconds else 0.0
    shares_left = [backward_share * (1 - number / num_segments) for number in range(1, num_segments + 1)]
    if durations is None:
        step_seconds = step.seconds + non_computing_seconds(
            compute_seconds=step.seconds,
            window_seconds=vector.seconds,
            sending_seconds=vector.seconds,
            overlap_seconds=min(shares_left[0] * step.seconds, vector.seconds * (1 - 1 / num_segments)),
            delay=delay,
        )
    else:
        step_seconds = lock_step_seconds(
            durations, delay=delay, sending_seconds=vector.seconds, shares_left=shares_left
        )
    return Plan(
        pipeline_width=pipeline_width,
        codec=codec.name,
        num_segments=num_segments,
        algorithm=algorithm,
        bytes_per_step=vector.sent_bytes,
        communication_seconds=vector.seconds,
        step_seconds=step_seconds,
        scaling_efficiency=scaling_efficiency(step, step_seconds),
    )


def recommend(
    network: NetworkCosts,
    step: Step,
    *,
    world_size: int,
    num_bytes: float,
    codec_seconds_per_byte: Mapping[str, float] | None = None,
    codec_names: Iterable[str] = CODECS,
    bytes_per_value: float = FLOAT32_BYTES,
) -> Plan:
    """Returns the settings with the shortest step, if the gain is worth the change of training.

    Ranks that choose by measured times use the same rule (`hop_tf.runtime.choosing`): another codec, or a larger width,
    must save 15 % of a step. Training changes least with, in this order: the smaller width, the codec that comes first
    in `codec_names`, fewer segments, the mesh.

    Args:
      network: The costs of communication.
      step: The computation of a step.
      world_size: Number of ranks.
      num_bytes: Size of the gradients as float32.
      codec_seconds_per_byte: By name of a codec, the time for which a rank encodes and decodes, per byte of the
        gradients. Default: no time.
      codec_names: Codecs to choose from, those that lose least first.
      bytes_per_value: Bytes of a value that does not pass through a codec; 2 for bfloat16. Default 4.

    Returns:
      The settings, with the reason.

    Raises:
      ValueError: If an argument is out of range.
    """
    codec_names = check_codec_names(codec_names)
    costs = codec_seconds_per_byte or {}
    plans = [
        predict(
            network,
            step,
            world_size=world_size,
            num_bytes=num_bytes,
            pipeline_width=width,
            codec=codec,
            num_segments=num_segments,
            algorithm=algorithm,
            codec_seconds_per_byte=costs.get(codec, 0.0),
            bytes_per_value=bytes_per_value,
        )
        for width, codec, num_segments, algorithm in itertools.product((1, 2), codec_names, _SEGMENTS, ALGORITHMS)
    ]
    best = choose(plans, lambda plan: plan.step_seconds, lambda plan: (plan.codec, plan.pipeline_width))
    plain = plans[0]
    return dataclasses.replace(best, reason=_reason(step, plain, best))


def _reason(step: Step, plain: Plan, best: Plan) -> str:
    with_codec = "without a codec" if plain.codec == "identity" else f"with {plain.codec}"
    if plain.communication_seconds <= RESOLUTION * step.seconds:
        return f"Communication takes next to no time: synchronous training {with_codec} is as fast as any."
    parts = [
        f"Computation takes {step.seconds:.4g} s, and communication {with_codec} {plain.communication_seconds:.4g} s."
    ]
    way = " in a ring" if best.algorithm != plain.algorithm else ""
    if best.codec != plain.codec:
        parts.append(f"{best.codec}{way} shortens it to {best.communication_seconds:.4g} s.")
    elif way:
        parts.append(f"That is in a mesh;{way} it takes {best.communication_seconds:.4g} s.")
    if best.pipeline_width > 1:
        longer = "computation" if step.seconds >= best.communication_seconds else "communication"
        parts.append(f"Width 2 hides one behind the other, so that a step takes as long as {longer}.")
    elif best.num_segments > 1:
        parts.append("In segments it is hidden behind the backward pass, without a delay.")
    return " ".join(parts)

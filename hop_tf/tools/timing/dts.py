"""The paper's model of a step under DTS.

The mean of a window of p steps is due D steps (the paper's t) after the window's last step. Table 1, without the
overlap:

                            bytes per step    non-computing time per step
    Synchronous SGD         2 |w|             T_communicate
    Delayed (D)             2 |w|             max(0, T_communicate - D T_compute)
    Temporally sparse (p)   2 |w| / p         T_communicate / p
    Both (D, p)             2 |w| / p         max(0, T_communicate - D T_compute) / p

The bytes are those that a rank of a large ring sends: 2 (n - 1) / n for each byte of a vector among n ranks. (The paper
prints them per second, divided by the duration of a step. It prints 4 instead of 2 for p > 1, because its windows are
two vectors. Ours are one, also with momentum.)

The table's times hold for D < p. Otherwise several windows are in flight at a time. They share the wait for the first
one. They also share the links, which must have sent a window's bytes by the time at which the next window comes.

References:
  Distributed Training across the World. 2019. Table 1, section 3.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from hop_tf import codecs
from hop_tf.arguments import check_integer
from hop_tf.tools.timing.costs import FLOAT32_BYTES, NetworkCosts, Step, all_reduce, scaling_efficiency
from hop_tf.tools.timing.schedules import lock_step_seconds, non_computing_seconds

CODECS = ("identity", "int8", "top_k")
# A schedule repeats itself after a cycle. It settles in the first half of this number of cycles.
_CYCLES = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class DTSPlan:
    """Settings of `DTSStrategy`, with the model's predictions.

    Attributes:
      delay: D.
      interval: p.
      codec: Name of the codec.
      algorithm: "mesh" or "ring".
      bytes_per_step: The bytes that a rank sends per step.
      window_seconds: Time from a window's end until its mean arrives, with idle links.
      sending_seconds: The part of `window_seconds` in which the links, or the codec, are occupied.
      compute_seconds: Duration of a step without any waiting.
      step_seconds: Duration of a step.
      scaling_efficiency: See `scaling_efficiency`.
      reason: The reason for a recommendation, in some sentences. Otherwise empty.
    """

    delay: int
    interval: int
    codec: str
    algorithm: str
    bytes_per_step: float
    window_seconds: float
    sending_seconds: float
    compute_seconds: float
    step_seconds: float
    scaling_efficiency: float
    reason: str = ""


def predict_dts(
    network: NetworkCosts,
    step: Step,
    *,
    world_size: int,
    num_bytes: float,
    delay: int = 4,
    interval: int = 4,
    codec: str | codecs.Codec | None = None,
    algorithm: str = "mesh",
    codec_seconds_per_byte: float = 0.0,
    bytes_per_value: float = FLOAT32_BYTES,
    durations: np.ndarray | None = None,
    quick: bool = False,
) -> DTSPlan:
    """Predicts the times of settings. A window leaves when its last step has ended: nothing overlaps.

    With `codecs.TopK`, a rank selects changes in the window's last step itself. The model assumes that this takes as
    long as encoding and decoding.

    Args:
      network: The costs of communication.
      step: The computation of a step.
      world_size: Number of ranks.
      num_bytes: Size of the gradients as float32.
      delay: D.
      interval: p.
      codec: As for `DTSStrategy`.
      algorithm: "mesh" or "ring".
      codec_seconds_per_byte: Time for which a rank encodes and decodes, per byte of the vectors.
      bytes_per_value: Bytes of a value that does not pass through a codec; 2 for bfloat16. Default 4.
      durations: Array [n, T], the seconds for which each rank computes in each step. See `lock_step_seconds`. Default:
        all steps of all ranks are `step`, and the times are those in the long run.
      quick: True to use the closed form if all steps are `step`. It ignores that links are idle between the messages of
        windows in flight. Default False.

    Returns:
      The settings with their times.

    Raises:
      ValueError: If an argument is out of range.
    """
    check_integer("delay", delay, at_least=0)
    check_integer("interval", interval, at_least=1)
    codec = codecs.get(codec)
    vector = all_reduce(
        network,
        codec,
        world_size=world_size,
        num_bytes=num_bytes,
        algorithm=algorithm,
        codec_seconds_per_byte=codec_seconds_per_byte,
        bytes_per_value=bytes_per_value,
    )
    windows = {"delay": delay, "interval": interval, "sending_seconds": vector.sending_seconds}
    selecting = num_bytes * codec_seconds_per_byte / interval if isinstance(codec, codecs.TopK) else 0.0
    compute_seconds = step.seconds + selecting
    if durations is None and (quick or delay < interval):  # With D < p, the closed form leaves nothing out.
        step_seconds = compute_seconds + non_computing_seconds(
            compute_seconds=compute_seconds, window_seconds=vector.seconds, **windows
        )
    else:
        if durations is None:
            durations = np.full((1, _CYCLES * (delay // interval + 1) * interval), step.seconds)
        latency = vector.seconds - vector.sending_seconds
        step_seconds = lock_step_seconds(
            durations + selecting, latency_seconds=latency, num_turns=vector.num_turns, **windows
        )
    return DTSPlan(
        delay=delay,
        interval=interval,
        codec=codec.name,
        algorithm=algorithm,
        bytes_per_step=vector.sent_bytes / interval,
        window_seconds=vector.seconds,
        sending_seconds=vector.sending_seconds,
        compute_seconds=compute_seconds,
        step_seconds=step_seconds,
        scaling_efficiency=scaling_efficiency(step, step_seconds),
    )

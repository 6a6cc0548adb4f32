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
one. They also share the links, which must be through with a window's bytes when the next window comes.

References:
  Distributed Training across the World. 2019. Table 1, section 3.
"""

from __future__ import annotations

import dataclasses

from hop_tf import codecs
from hop_tf.arguments import check_integer
from hop_tf.tools.timing.costs import (
    FLOAT32_BYTES,
    NetworkCosts,
    Step,
    check_not_negative,
    communication_seconds,
    scaling_efficiency,
    sent_bytes,
    way_of,
)

CODECS = ("identity", "int8", "top_k")


def bytes_per_step(
    num_bytes: float,
    *,
    world_size: int,
    interval: int = 1,
    algorithm: str = "mesh",
    bytes_per_byte: float = 1.0,
) -> float:
    """The bytes that a rank sends, and receives, per step [Table 1, first column, times T_training].

    They are 2 (n - 1) / n |w| r / p, or (n - 1) |w| r / p by an all-gather. The delay does not matter.

    Args:
      num_bytes: Size of the gradients as float32 [|w|].
      world_size: Number of ranks [n].
      interval: Steps of a window [p]; 1 for synchronous SGD.
      algorithm: "mesh", "ring" or "all_gather".
      bytes_per_byte: Encoded bytes per byte of float32 [r].

    Returns:
      Bytes without headers of messages; 0 in a world of one.

    Raises:
      ValueError: If an argument is out of range.
    """
    check_integer("interval", interval, at_least=1)
    return sent_bytes(num_bytes, world_size=world_size, algorithm=algorithm, bytes_per_byte=bytes_per_byte) / interval


def non_computing_seconds(
    *,
    compute_seconds: float,
    window_seconds: float,
    sending_seconds: float = 0.0,
    overlap_seconds: float = 0.0,
    delay: int = 0,
    interval: int = 1,
) -> float:
    """The time per step in which a rank does not compute, in the long run [Table 1, second column].

    The larger of two terms, for latency and bandwidth:

        max(0, T_communicate - T_overlap - D T_compute) / (p q)     with q = floor(D / p) + 1
        max(0, T_send / p - T_compute)

    q is the number of windows in flight: while a rank waits for one window, the following ones come closer, too. With
    D < p the first line is the paper's. The paper leaves out the second line: with any delay, a window's bytes must
    leave while the next window's p steps are computed.

    Args:
      compute_seconds: Duration of a step without any waiting [T_compute].
      window_seconds: Time from a window's end until its mean is there, with idle links [T_communicate].
      sending_seconds: The part of `window_seconds` in which the links, or the codec, are occupied [T_send].
      overlap_seconds: The part of `window_seconds` during the last step's back-propagation [T_overlap].
      delay: Steps from a window's end until its mean is due [D, the paper's t].
      interval: Steps of a window [p].

    Returns:
      Seconds.

    Raises:
      ValueError: If an argument is out of range.
    """
    check_not_negative("compute_seconds", compute_seconds)
    check_not_negative("window_seconds", window_seconds)
    check_not_negative("sending_seconds", sending_seconds)
    check_not_negative("overlap_seconds", overlap_seconds)
    check_integer("delay", delay, at_least=0)
    check_integer("interval", interval, at_least=1)
    num_under_way = delay // interval + 1
    latency = (window_seconds - overlap_seconds - delay * compute_seconds) / (interval * num_under_way)
    return max(0.0, latency, sending_seconds / interval - compute_seconds)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DTSPlan:
    """Settings of `DTSStrategy`, with the model's predictions.

    Attributes:
      delay: D.
      interval: p.
      codec: Name of the codec.
      algorithm: "mesh" or "ring".
      bytes_per_step: The bytes that a rank sends per step.
      window_seconds: Time from a window's end until its mean is there, with idle links.
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
) -> DTSPlan:
    """Predicts the times of settings. A window leaves when its last step has ended: nothing overlaps.

    With `codecs.TopK` a rank selects changes in that step itself. The model assumes that this takes as long as encoding
    and decoding.

    Args:
      network: The costs of communication.
      step: The computation of a step.
      world_size: Number of ranks.
      num_bytes: Size of the gradients as float32.
      delay: D.
      interval: p.
      codec: As of `DTSStrategy`.
      algorithm: "mesh" or "ring".
      codec_seconds_per_byte: Time that a rank encodes and decodes for, per byte of the vectors.
      bytes_per_value: Bytes of a value that does not pass through a codec; 2 for bfloat16. Default 4.

    Returns:
      The settings with their times.

    Raises:
      ValueError: If an argument is out of range.
    """
    codec = codecs.get(codec)
    way, bytes_per_byte = way_of(codec, algorithm, world_size, bytes_per_value)

    def seconds(network: NetworkCosts) -> float:
        return communication_seconds(
            network,
            world_size=world_size,
            num_bytes=num_bytes,
            algorithm=way,
            bytes_per_byte=bytes_per_byte,
            codec_seconds_per_byte=codec_seconds_per_byte,
        )

    compute_seconds = step.seconds
    if isinstance(codec, codecs.TopK):
        compute_seconds += num_bytes * codec_seconds_per_byte / interval
    window_seconds = seconds(network)
    sending_seconds = seconds(dataclasses.replace(network, latency_seconds=0.0, synchronization_seconds=0.0))
    step_seconds = compute_seconds + non_computing_seconds(
        compute_seconds=compute_seconds,
        window_seconds=window_seconds,
        sending_seconds=sending_seconds,
        delay=delay,
        interval=interval,
    )
    return DTSPlan(
        delay=delay,
        interval=interval,
        codec=codec.name,
        algorithm=algorithm,
        bytes_per_step=bytes_per_step(
            num_bytes,
            world_size=world_size,
            interval=interval,
            algorithm=way,
            bytes_per_byte=bytes_per_byte,
        ),
        window_seconds=window_seconds,
        sending_seconds=sending_seconds,
        compute_seconds=compute_seconds,
        step_seconds=step_seconds,
        scaling_efficiency=scaling_efficiency(step, step_seconds),
    )

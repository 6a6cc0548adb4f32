"""How long a step takes under Pipe-SGD, by the paper's model, and which settings it recommends.

All times are in seconds and all sizes in bytes. Symbols of the paper in brackets.

References:
  Li, Yu, Li, Avestimehr, Kim, Schwing. Pipe-SGD: A Decentralized Pipelined SGD Framework for Distributed Deep Net
  Training. NeurIPS 2018. Equations 2 to 7.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from hop_tf import codecs
from hop_tf.arguments import check_choice, check_integer
from hop_tf.buffers import BufferPool

if TYPE_CHECKING:
    from hop_tf.strategy import ExchangeStrategy

_FLOAT32_BYTES = 4
# Predictions are not finer than this: of settings that differ by less, the one that changes training less is taken.
_RESOLUTION = 0.02
_SEGMENTS = (1, 2, 4)
_CODECS = ("identity", "truncate16", "int8")
_ALGORITHMS = ("mesh", "ring")  # Those that the model knows.

# Measurements. A vector is long enough when its all-reduce takes so long, or has so many values.
_LONG_SECONDS = 0.2
_MAX_VALUES = 1 << 24
_NUM_SHORT, _NUM_LONG = 20, 3
_CODEC_VALUES = 1 << 18
# A backward pass takes about twice as long as a forward pass.
_FORWARD_SHARE = 1 / 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Network:
    """What communication costs.

    Attributes:
      latency_seconds: Time until the first byte of a message is there [alpha].
      seconds_per_byte: Time that a rank takes to send a byte, while it receives one [beta].
      reduce_seconds_per_byte: Time to add a byte of float32 [gamma].
      synchronization_seconds: Time until all ranks have begun an all-reduce [S].

    Raises:
      ValueError: If one is negative.
    """

    latency_seconds: float
    seconds_per_byte: float
    reduce_seconds_per_byte: float = 0.0
    synchronization_seconds: float = 0.0

    def __post_init__(self):
        _check_times(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """What a step computes.

    Attributes:
      update_seconds: Duration of the optimizer's update [l_up].
      forward_seconds: Duration of the forward pass [l_for].
      backward_seconds: Duration of the backward pass [l_back].

    Raises:
      ValueError: If one is negative.
    """

    update_seconds: float = 0.0
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0

    def __post_init__(self):
        _check_times(self)

    @property
    def seconds(self) -> float:
        """All three together [l_up + l_comp]."""
        return self.update_seconds + self.forward_seconds + self.backward_seconds


def communication_seconds(
    network: Network,
    *,
    world_size: int,
    num_bytes: float,
    num_segments: int = 1,
    algorithm: str = "ring",
    bytes_per_byte: float = 1.0,
    codec_seconds_per_byte: float = 0.0,
) -> float:
    """Duration of the all-reduce of a step [l_comm; the second arguments of Equations 5 and 6].

    A ring takes R = 2 (p - 1) messages one after the other, a mesh R = 2:

        L R alpha  +  max(2 (p - 1) / p n beta r, c n)  +  (p - 1) / p n gamma  +  L S

    Without a codec (r = 1, c = 0) and with a ring that is the paper's. A codec works while earlier chunks travel
    (Figure 3 (b)): what takes longer counts.

    Args:
      network: What communication costs.
      world_size: Number of ranks [p].
      num_bytes: Size of the gradients as float32 [n].
      num_segments: Parts that are reduced one after the other [L].
      algorithm: "ring" or "mesh".
      bytes_per_byte: Encoded bytes per byte of float32 [r].
      codec_seconds_per_byte: Time that a rank encodes and decodes for, per byte of the gradients [c].

    Returns:
      Seconds; 0 in a world of one.

    Raises:
      ValueError: If an argument is out of range.
    """
    check_integer("world_size", world_size, at_least=1)
    check_integer("num_segments", num_segments, at_least=1)
    check_choice("algorithm", algorithm, _ALGORITHMS)
    if world_size == 1:
        return 0.0
    num_messages = 2 * (world_size - 1) if algorithm == "ring" else 2
    share = (world_size - 1) / world_size
    travel = 2 * share * num_bytes * network.seconds_per_byte * bytes_per_byte
    return (
        num_segments * (num_messages * network.latency_seconds + network.synchronization_seconds)
        + max(travel, codec_seconds_per_byte * num_bytes)
        + share * num_bytes * network.reduce_seconds_per_byte
    )


def synchronous_step_seconds(step: Step, communication: float) -> float:
    """Equation 2, for one step: update, computation and communication one after the other (D-Sync)."""
    return step.seconds + communication


def unlimited_step_seconds(step: Step, communication: float, pipeline_width: int) -> float:
    """Equation 3, for one step: as if computers and links could do K steps at once."""
    check_integer("pipeline_width", pipeline_width, at_least=1)
    return (step.seconds + communication) / pipeline_width


def pipelined_step_seconds(step: Step, communication: float) -> float:
    """Equations 4 and 5, for one step: what takes longer hides the other, whatever the width K >= 2."""
    return max(step.seconds, communication)


def segmented_step_seconds(step: Step, communication: float, num_segments: int) -> float:
    """Equation 6, for one step with K >= 2: computation up to the first segment's gradients, or communication.

    The first of L equal segments is there after 1/L of the backward pass [l_b]. The rest of that pass and the
    communication use different resources; but the step cannot be shorter than its own computation, which the paper's
    equation leaves out: we take the largest of the three.

    Args:
      step: What a step computes.
      communication: Duration of its all-reduce in so many segments.
      num_segments: L.

    Returns:
      Seconds.
    """
    check_integer("num_segments", num_segments, at_least=1)
    until_first = step.update_seconds + step.forward_seconds + step.backward_seconds / num_segments
    return max(until_first, communication, step.seconds)


def scaling_efficiency(step: Step, step_seconds: float) -> float:
    """Equation 7: the share of p times one rank's speed that p ranks have: (l_up + l_comp) / duration of a step."""
    return step.seconds / step_seconds if step_seconds > 0 else 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Settings of `PipeSGDStrategy`, and what the model says of them.

    Attributes:
      pipeline_width: K.
      codec: Name of the codec.
      num_segments: L.
      algorithm: "mesh" or "ring".
      communication_seconds: Duration of an all-reduce.
      step_seconds: Duration of a step.
      scaling_efficiency: See `scaling_efficiency`.
      reason: Why, in a sentence. Empty but for the recommended one.
    """

    pipeline_width: int
    codec: str
    num_segments: int
    algorithm: str
    communication_seconds: float
    step_seconds: float
    scaling_efficiency: float
    reason: str = ""


def predict(
    network: Network,
    step: Step,
    *,
    world_size: int,
    num_bytes: float,
    pipeline_width: int = 2,
    codec: str | codecs.Codec | None = None,
    num_segments: int = 1,
    algorithm: str = "mesh",
    codec_seconds_per_byte: float = 0.0,
) -> Plan:
    """What the model says of settings.

    With K = 1 and L segments the first of them travel during the backward pass: the step takes until the last gradient
    is there, and the last segment's all-reduce; or as long as forward pass, first segment and all of communication.

    Args:
      network: What communication costs.
      step: What a step computes.
      world_size: Number of ranks.
      num_bytes: Size of the gradients as float32.
      pipeline_width: K.
      codec: As of `PipeSGDStrategy`.
      num_segments: L.
      algorithm: "mesh" or "ring".
      codec_seconds_per_byte: Time that a rank encodes and decodes for, per byte of the gradients.

    Returns:
      The settings with their times.

    Raises:
      ValueError: If an argument is out of range.
    """
    check_integer("pipeline_width", pipeline_width, at_least=1)
    codec = codecs.get(codec)
    communication = communication_seconds(
        network,
        world_size=world_size,
        num_bytes=num_bytes,
        num_segments=num_segments,
        algorithm=algorithm,
        bytes_per_byte=codec.bytes_per_value / _FLOAT32_BYTES,
        codec_seconds_per_byte=codec_seconds_per_byte,
    )
    if pipeline_width == 1:
        hidden = step.backward_seconds * (1 - 1 / num_segments)
        step_seconds = max(
            step.seconds + communication / num_segments, synchronous_step_seconds(step, communication) - hidden
        )
    else:
        step_seconds = segmented_step_seconds(step, communication, num_segments)
    return Plan(
        pipeline_width=pipeline_width,
        codec=codec.name,
        num_segments=num_segments,
        algorithm=algorithm,
        communication_seconds=communication,
        step_seconds=step_seconds,
        scaling_efficiency=scaling_efficiency(step, step_seconds),
    )


def recommend(
    network: Network,
    step: Step,
    *,
    world_size: int,
    num_bytes: float,
    codec_seconds_per_byte: Mapping[str, float] | None = None,
    codec_names: Iterable[str] = _CODECS,
) -> Plan:
    """The settings with the shortest step; of those within 2 %, the one that changes training least.

    That is, in this order: the codec that comes first in `codec_names`, the smaller width, fewer segments, the mesh.

    Args:
      network: What communication costs.
      step: What a step computes.
      world_size: Number of ranks.
      num_bytes: Size of the gradients as float32.
      codec_seconds_per_byte: For codecs by name, the time that a rank encodes and decodes for, per byte of the
        gradients. Default: none.
      codec_names: Codecs to choose from, those that lose least first.

    Returns:
      The settings, with the reason.

    Raises:
      ValueError: If an argument is out of range.
    """
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
        )
        for codec, width, num_segments, algorithm in itertools.product(codec_names, (1, 2), _SEGMENTS, _ALGORITHMS)
    ]
    shortest = min(plan.step_seconds for plan in plans)
    best = next(plan for plan in plans if plan.step_seconds <= shortest * (1 + _RESOLUTION))
    plain = plans[0]
    return dataclasses.replace(best, reason=_reason(step, plain, best))


def _reason(step: Step, plain: Plan, best: Plan) -> str:
    if plain.communication_seconds <= _RESOLUTION * step.seconds:
        return "Communication takes next to no time: synchronous training without a codec is as fast as any."
    parts = [
        f"Computation takes {step.seconds:.4g} s and uncompressed communication {plain.communication_seconds:.4g} s."
    ]
    if best.codec != plain.codec:
        parts.append(f"{best.codec} shortens it to {best.communication_seconds:.4g} s.")
    if best.pipeline_width > 1:
        longer = "computation" if step.seconds >= best.communication_seconds else "communication"
        parts.append(f"Width 2 hides one behind the other, so that a step takes as long as {longer}.")
    elif best.num_segments > 1:
        parts.append("In segments it is hidden behind the backward pass, without a delay.")
    return " ".join(parts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """What `measure` has found; equal on all ranks.

    Attributes:
      world_size: Number of ranks.
      num_bytes: Bytes of the variables that are exchanged in a step.
      network: What communication costs.
      step: What a step computes. A step without its waiting counts as computation, one third of it as forward pass.
      codec_seconds_per_byte: For each codec, the time that a rank encodes, decodes and adds for, per byte of float32.
    """

    world_size: int
    num_bytes: int
    network: Network
    step: Step
    codec_seconds_per_byte: Mapping[str, float]

    def predict(self, **settings) -> Plan:
        """What the model says of `settings`; see `hop_tf.timing.predict`."""
        codec = codecs.get(settings.get("codec")).name
        return predict(
            self.network,
            self.step,
            world_size=self.world_size,
            num_bytes=self.num_bytes,
            codec_seconds_per_byte=self.codec_seconds_per_byte.get(codec, 0.0),
            **settings,
        )

    def recommend(self) -> Plan:
        """The settings to take; see `hop_tf.timing.recommend`."""
        return recommend(
            self.network,
            self.step,
            world_size=self.world_size,
            num_bytes=self.num_bytes,
            codec_seconds_per_byte=self.codec_seconds_per_byte,
        )


def measure(strategy: ExchangeStrategy) -> Measurement:
    """Measures the live links, this machine's codecs, and the steps of the last `fit`.

    A collective: every rank calls it, after a `fit`. It takes some seconds: all-reduces of two lengths, by ring and by
    mesh, whose durations give alpha, beta and S; gamma and the codecs are timed on each rank. Means over the ranks are
    taken.

    Args:
      strategy: The strategy, of any scheme.

    Returns:
      The measurement; equal on all ranks.

    Blocks: until all ranks call it.

    Raises:
      RuntimeError: If it is called within `fit`, before the first one, or in a world of one.
      HopError: If a rank was lost or has ended.
    """
    compute_seconds = strategy.report().get("compute_seconds", 0.0)
    if strategy.world_size > 1 and not compute_seconds:
        raise RuntimeError("`measure` needs the durations of some steps. Call it after a `fit`.")
    costs = {name: _codec_seconds_per_byte(codecs.get(name)) for name in _CODECS}
    mesh, ring = (_all_reduce_seconds(strategy, name, 1, _NUM_SHORT) for name in _ALGORITHMS)
    num_values, long = _long_all_reduce(strategy)
    numbers = [compute_seconds, _reduce_seconds_per_byte(), mesh, ring, long, *costs.values()]
    compute_seconds, gamma, mesh, ring, long, *costs_of_all = _mean(strategy, numbers)
    # Two messages follow each other in a mesh, 2 (p - 1) in a ring. With two ranks these are the same.
    p = strategy.world_size
    latency = max(0.0, (ring - mesh) / (2 * p - 4)) if p > 2 else mesh / 2
    share = (p - 1) / p
    travel = max(0.0, long - mesh - share * _FLOAT32_BYTES * num_values * gamma)
    return Measurement(
        world_size=p,
        num_bytes=strategy.num_exchanged_bytes,
        network=Network(
            latency_seconds=min(latency, mesh / 2),
            seconds_per_byte=travel / (2 * share * _FLOAT32_BYTES * num_values),
            reduce_seconds_per_byte=gamma,
            synchronization_seconds=max(0.0, mesh - 2 * latency),
        ),
        step=Step(
            forward_seconds=_FORWARD_SHARE * compute_seconds, backward_seconds=(1 - _FORWARD_SHARE) * compute_seconds
        ),
        codec_seconds_per_byte=dict(zip(costs, costs_of_all, strict=True)),
    )


def _long_all_reduce(strategy: ExchangeStrategy) -> tuple[int, float]:
    """Number of values, and median duration, of an all-reduce that takes long enough to tell the rate."""
    num_values = _CODEC_VALUES
    while True:
        seconds = _all_reduce_seconds(strategy, "mesh", num_values, _NUM_LONG)
        (of_all,) = _mean(strategy, [seconds])
        if of_all >= _LONG_SECONDS or num_values >= _MAX_VALUES:
            return num_values, seconds
        num_values *= 4


def _all_reduce_seconds(strategy: ExchangeStrategy, algorithm: str, num_values: int, num_times: int) -> float:
    reduction = strategy.all_reduce_for_measurement(algorithm, num_values)
    values = np.ones(num_values, np.float32)
    steps = iter(range(num_times + 1))
    try:
        return _median_seconds(lambda: reduction.mean(next(steps), [values], _everybody), num_times)
    finally:
        reduction.close()


def _mean(strategy: ExchangeStrategy, numbers: Iterable[float]) -> list[float]:
    values = np.array(list(numbers), np.float32)
    reduction = strategy.all_reduce_for_measurement("mesh", values.size)
    try:
        return [float(value) for value in reduction.mean(0, [values], _everybody)[0]]
    finally:
        reduction.close()


def _everybody(rank: int, step: int) -> bool:
    return True


def _codec_seconds_per_byte(codec: codecs.Codec) -> float:
    """A rank encodes and decodes every value once, and adds what others have sent."""
    pool = BufferPool()
    values = np.random.default_rng(0).normal(size=_CODEC_VALUES).astype(np.float32)
    out = np.zeros_like(values)

    def run() -> None:
        data = codec.encode(values, pool)
        codec.accumulate(data, out)
        codec.decode(data, out)

    return _median_seconds(run, 9) / values.nbytes


def _reduce_seconds_per_byte() -> float:
    values, total = np.ones((2, _CODEC_VALUES), np.float32)
    return _median_seconds(lambda: np.add(total, values, out=total), 9) / values.nbytes


def _median_seconds(run: Callable[[], object], num_times: int) -> float:
    """Median duration, after one time to warm up."""
    durations = []
    for _ in range(num_times + 1):
        start = time.perf_counter()
        run()
        durations.append(time.perf_counter() - start)
    return statistics.median(durations[1:])


def _check_times(times: Network | Step) -> None:
    for field in dataclasses.fields(times):
        value = getattr(times, field.name)
        if not value >= 0:
            raise ValueError(f"`{field.name}` must not be negative. Received: {field.name}={value!r}.")

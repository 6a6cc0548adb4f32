"""Measures the inputs of the models on a live cluster."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from hop_tf import codecs
from hop_tf.arguments import check_choice
from hop_tf.tensors.buffers import BufferPool
from hop_tf.tools.timing import dts, dts_recommendation, pipe_sgd
from hop_tf.tools.timing.costs import ALGORITHMS, FLOAT32_BYTES, NetworkCosts, Step, route

if TYPE_CHECKING:
    from hop_tf.strategy import ExchangeStrategy

# The codecs whose costs are measured.
MEASURED_CODECS = tuple(dict.fromkeys((*pipe_sgd.CODECS, *dts.CODECS, "sketch", "bits4")))

# A vector is long enough if sending its bytes takes at least this time, and at least the latencies of its messages.
# Shorter vectors mislead, because connections send slowly at first. The longest vector has `_MAX_VALUES` values.
_LONG_SECONDS = 0.2
_MIN_VALUES, _MAX_VALUES = 1 << 18, 1 << 24
_NUM_SHORT, _NUM_LONG, _NUM_MESH = 20, 3, 5
_MANY_SECONDS = 2.0  # If many short all-reduces would take longer than this, only a few are made.
_CODEC_VALUES = 1 << 20  # More than fit into a cache.
_SHARED_SECONDS = 0.05  # Enough for many turns of ranks that share a processor.
# The least share of a long all-reduce that counts as sending. It keeps noise on a busy machine from making a rate
# infinite.
_MIN_SENDING_SHARE = 0.1
# The number of latest steps of each rank that are used.
_MAX_STEPS = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """The result of `measure`, equal on all ranks.

    Attributes:
      world_size: Number of ranks.
      num_bytes: Bytes of the variables that are exchanged in a step. Predictions assume that a codec encodes all of
        them, although float64 and non-trainable variables never pass through one.
      network: The costs of communication.
      step: The computation of a step. A step without waits counts as computation, one third of it as forward pass.
      codec_seconds_per_byte: For each codec, with its defaults, the time for which a rank encodes and decodes, per byte
        of float32. Predictions for other settings of a codec use the same time.
      bytes_per_value: Bytes of a value of these variables: 2 for bfloat16. With mixed types, the mean.
      rank_seconds: For each rank, the durations of its latest steps without waits, equally many for each rank. The
        steps of a column were made at the same time. Empty if all steps of all ranks take `step.seconds`.

    Raises:
      ValueError: If `rank_seconds` does not have equally many steps of `world_size` ranks.
    """

    world_size: int
    num_bytes: int
    network: NetworkCosts
    step: Step
    codec_seconds_per_byte: Mapping[str, float]
    bytes_per_value: float = FLOAT32_BYTES
    rank_seconds: Sequence[Sequence[float]] = ()

    def __post_init__(self):
        lengths = [len(each) for each in self.rank_seconds]
        if lengths and (len(lengths) != self.world_size or min(lengths) == 0 or len(set(lengths)) > 1):
            raise ValueError(
                f"`rank_seconds` must be as many steps of each of world_size={self.world_size} ranks. "
                f"Received: rank_seconds with {lengths} steps."
            )

    @property
    def slowness(self) -> np.ndarray:
        """The median step of each rank, divided by the usual one: array [world_size].

        The usual step is the median over the ranks; for an even number of ranks, the lower of the two middle ones.
        """
        if not self.rank_seconds:
            return np.ones(self.world_size)
        usual = np.median(self.rank_seconds, axis=1)
        return usual / np.sort(usual)[(self.world_size - 1) // 2]

    @property
    def typical_step(self) -> Step:
        """The step of a rank like most others. See `slowness`."""
        if not self.rank_seconds or not self.step.seconds:
            return self.step
        times = float(np.median(self.rank_seconds[0])) / self.slowness[0] / self.step.seconds
        return Step(**{name: times * seconds for name, seconds in dataclasses.asdict(self.step).items()})

    @property
    def typical(self) -> Measurement:
        """The measurement with the step of a rank like most others."""
        return dataclasses.replace(self, step=self.typical_step)

    @property
    def num_float32_bytes(self) -> float:
        """Bytes of the variables that are exchanged in a step, as float32."""
        return FLOAT32_BYTES * self.num_bytes / self.bytes_per_value

    def durations(self, num_steps: int) -> np.ndarray:
        """Steps of all ranks, drawn from the measured ones: array [world_size, num_steps], equal in all calls.

        Steps that were made at the same time stay together. All steps are drawn once before any is drawn again.
        """
        if not self.rank_seconds:
            return np.full((self.world_size, num_steps), self.step.seconds)
        measured, generator = np.array(self.rank_seconds, float), np.random.default_rng(0)
        num_rounds = -(-num_steps // measured.shape[1])
        order = np.concatenate([generator.permutation(measured.shape[1]) for _ in range(num_rounds)])
        return measured[:, order[:num_steps]]

    def predict(self, **settings) -> pipe_sgd.Plan:
        """The model's prediction for `settings` of Pipe-SGD. See `hop_tf.timing.predict`.

        Raises:
          ValueError: If an argument is out of range, or the codec was not measured.
        """
        return self._predict(pipe_sgd.predict, settings)

    def recommend(self, **arguments) -> pipe_sgd.Plan:
        """The recommended settings of Pipe-SGD. See `hop_tf.timing.recommend`."""
        return self._recommend(pipe_sgd.recommend, arguments)

    def predict_dts(self, **settings) -> dts.DTSPlan:
        """The model's prediction for `settings` of DTS. See `hop_tf.timing.predict_dts`."""
        return self._predict(dts.predict_dts, settings)

    def recommend_dts(self, **arguments) -> dts.DTSPlan:
        """The recommended settings of DTS. See `hop_tf.timing.recommend_dts`."""
        return self._recommend(dts_recommendation.recommend_dts, arguments)

    def _predict(self, predict: Callable, settings: Mapping):
        name = codecs.get(settings.get("codec")).name
        self._check_measured("codec", name)
        return self._call(predict, codec_seconds_per_byte=self.codec_seconds_per_byte[name], **settings)

    def _recommend(self, recommend: Callable, arguments: Mapping):
        if "codec_names" in arguments:
            arguments = {**arguments, "codec_names": list(arguments["codec_names"])}
            for name in arguments["codec_names"]:
                self._check_measured("codec_names", name)
        return self._call(recommend, codec_seconds_per_byte=self.codec_seconds_per_byte, **arguments)

    def _check_measured(self, argument: str, name: str) -> None:
        check_choice(argument, name, list(self.codec_seconds_per_byte))

    def _call(self, function: Callable, **arguments):
        return function(
            self.network,
            self.step,
            world_size=self.world_size,
            num_bytes=self.num_float32_bytes,
            bytes_per_value=self.bytes_per_value,
            **arguments,
        )


def measure(strategy: ExchangeStrategy) -> Measurement:
    """Measures the live links, this machine's codecs, and the steps of the last `fit`.

    A collective operation: every rank must call it, after a `fit`. It takes some seconds, and more if round trips are
    long. It makes all-reduces of two lengths, by ring and by mesh. The medians of the short ones give alpha and S. The
    fastest long ring, and the median of the long meshes, which differ more, give beta. gamma and the codecs are timed
    on all ranks at once. The results are means over the ranks.

    Args:
      strategy: The strategy, with any algorithm.

    Returns:
      The measurement, equal on all ranks.

    Blocks: until all ranks call it.

    Raises:
      RuntimeError: If it is called within `fit`, or in a world of one. Also, on all ranks, if a rank has not timed any
        steps.
      HopError: If a rank was lost or has ended.
    """
    compute_seconds = _compute_seconds(strategy)
    rank_seconds = _rank_seconds(strategy)
    costs = {name: _codec_seconds_per_byte(strategy, codecs.get(name)) for name in MEASURED_CODECS}
    mesh, ring = (_short_all_reduce(strategy, name) for name in ALGORITHMS)
    num_values, long_ring = _long_all_reduce(strategy, ring)
    # The median, not the minimum: a mesh may drop packets, and a typical step is slower than the best one.
    long_mesh = statistics.median(_all_reduce_seconds(strategy, "mesh", num_values, _NUM_MESH))
    numbers = [_reduce_seconds_per_byte(strategy), mesh, ring, long_mesh, long_ring, *costs.values()]
    gamma, mesh, ring, long_mesh, long_ring, *costs_of_all = _mean(strategy, numbers)
    p = strategy.world_size
    of_mesh, of_ring = (route(name, p) for name in ALGORITHMS)
    latency = max(0.0, ring - mesh) / (of_ring.num_messages - of_mesh.num_messages)
    num_bytes = FLOAT32_BYTES * num_values
    in_mesh, in_ring = (
        max(_MIN_SENDING_SHARE * long, long - short - each.added * num_bytes * gamma)
        for each, long, short in ((of_mesh, long_mesh, mesh), (of_ring, long_ring, ring))
    )
    num_exchanged = strategy.num_exchanged_bytes
    return Measurement(
        world_size=p,
        num_bytes=num_exchanged,
        bytes_per_value=num_exchanged / strategy.num_exchanged_values if num_exchanged else FLOAT32_BYTES,
        network=NetworkCosts(
            latency_seconds=min(latency, mesh / of_mesh.num_messages),
            seconds_per_byte=in_ring / (of_ring.sent * num_bytes),
            reduce_seconds_per_byte=gamma,
            synchronization_seconds=max(0.0, mesh - of_mesh.num_messages * latency),
            mesh_slowdown=in_mesh / in_ring,
        ),
        step=Step.of_computing(compute_seconds),
        # gamma already includes the cost of adding.
        codec_seconds_per_byte={name: max(0.0, cost - gamma) for name, cost in zip(costs, costs_of_all, strict=True)},
        rank_seconds=rank_seconds,
    )


def _compute_seconds(strategy: ExchangeStrategy) -> float:
    """The duration of a step. If a rank does not know it, all ranks raise, so that none waits for the others."""
    seconds = strategy.report()["compute_seconds"]
    seconds, share_without = _mean(strategy, [seconds, float(not seconds)])
    if share_without:
        raise RuntimeError(
            "`measure` needs the durations of some steps of every rank. Call it after a `fit` of several steps, "
            "without `run_eagerly` and op determinism."
        )
    return seconds


def _rank_seconds(strategy: ExchangeStrategy) -> tuple[tuple[float, ...], ...]:
    """The latest steps of all ranks, equally many of each.

    Each rank contributes its own row, with zeros for the others, to a mean over the ranks.
    """
    own = np.maximum(strategy.latest_step_seconds()[-_MAX_STEPS:], 0).astype(np.float32)
    rows = np.zeros((strategy.world_size, 1 + _MAX_STEPS), np.float32)
    rows[strategy.rank, 0] = own.size
    rows[strategy.rank, rows.shape[1] - own.size :] = own
    of_all = strategy.world_size * np.reshape(_mean(strategy, rows.reshape(-1)), rows.shape)
    num_steps = round(float(of_all[:, 0].min()))
    return tuple(tuple(map(float, row)) for row in of_all[:, rows.shape[1] - num_steps :]) if num_steps else ()


def _short_all_reduce(strategy: ExchangeStrategy, algorithm: str) -> float:
    """The median duration of an all-reduce of one value."""
    seconds = statistics.median(_all_reduce_seconds(strategy, algorithm, 1, _NUM_LONG))
    if _mean(strategy, [seconds])[0] * _NUM_SHORT > _MANY_SECONDS:
        return seconds
    return statistics.median(_all_reduce_seconds(strategy, algorithm, 1, _NUM_SHORT))


def _long_all_reduce(strategy: ExchangeStrategy, short: float) -> tuple[int, float]:
    """The number of values, and the least duration, of a ring that takes long enough to measure the rate.

    Args:
      strategy: The strategy.
      short: The duration of a ring of one value.
    """
    num_values = _MIN_VALUES
    while True:
        long = min(_all_reduce_seconds(strategy, "ring", num_values, _NUM_LONG))
        long_of_all, short_of_all = _mean(strategy, [long, short])
        is_long = long_of_all - short_of_all >= max(_LONG_SECONDS, short_of_all)
        if is_long or num_values >= _MAX_VALUES:
            return num_values, long
        num_values *= 4


def _all_reduce_seconds(strategy: ExchangeStrategy, algorithm: str, num_values: int, num_times: int) -> list[float]:
    """The durations of `num_times` all-reduces, after one to warm up."""
    reduction = strategy.make_all_reduce(algorithm, num_values)
    values = np.ones(num_values, np.float32)
    steps = iter(range(num_times + 1))
    try:
        return [_seconds(lambda: reduction.mean(next(steps), [values], _everybody)) for _ in range(num_times + 1)][1:]
    finally:
        reduction.close()


def _mean(strategy: ExchangeStrategy, numbers: Iterable[float]) -> list[float]:
    values = np.array(list(numbers), np.float32)
    reduction = strategy.make_all_reduce("mesh", values.size)
    try:
        return [float(value) for value in reduction.mean(0, [values], _everybody)[0]]
    finally:
        reduction.close()


def _everybody(rank: int, step: int) -> bool:
    return True


def _codec_seconds_per_byte(strategy: ExchangeStrategy, codec: codecs.Codec) -> float:
    """The time per byte in which a rank encodes and decodes every value once, and adds the values of others."""
    pool = BufferPool()
    values = np.random.default_rng(0).normal(size=_CODEC_VALUES).astype(np.float32)
    out = np.zeros_like(values)

    def run() -> None:
        data = codec.encode(values, pool)
        codec.accumulate(data, out)
        codec.decode(data, out)

    return _seconds_on_all_ranks(strategy, run) / values.nbytes


def _reduce_seconds_per_byte(strategy: ExchangeStrategy) -> float:
    values, total = np.ones((2, _CODEC_VALUES), np.float32)
    return _seconds_on_all_ranks(strategy, lambda: np.add(total, values, out=total)) / values.nbytes


def _seconds_on_all_ranks(strategy: ExchangeStrategy, run: Callable[[], object]) -> float:
    """The mean duration while all ranks do the same, as in an all-reduce. Ranks may share their processors."""
    run()
    _mean(strategy, [0.0])  # So that all ranks begin together.
    start = time.perf_counter()
    num_times = 0
    while (seconds := time.perf_counter() - start) < _SHARED_SECONDS or num_times < _NUM_LONG:
        run()
        num_times += 1
    return seconds / num_times


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start

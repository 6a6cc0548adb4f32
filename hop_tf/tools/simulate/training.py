"""The duration of steps under a strategy, on given ranks and links: the strategy's own protocol on a virtual clock.

The durations of a rank's own work in each step, and of messages, are given. All sending and waiting is the strategy's
code: `HopExchange`, and the all-reduce of `AveragingExchange`, with the times at which Pipe-SGD and DTS submit and
merge. Nothing is learned: vectors are always the same.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import tensorflow as tf

from hop_tf import codecs
from hop_tf.arguments import check_choice, check_integer
from hop_tf.records import Recorder
from hop_tf.strategies.dts.windows import Schedule
from hop_tf.strategies.hop.settings import HopSettings
from hop_tf.tensors.packing import Packing, TensorSpec
from hop_tf.tools.simulate.rank_loops import GROUP, AveragingTraining, HopTraining, OwnSeconds, Training
from hop_tf.tools.simulate.scheduler import Scheduler
from hop_tf.tools.simulate.virtual import VirtualCluster
from hop_tf.topology import resolve

# A message of at most this many bytes is a header.
_HEADER_BYTES = 64
# Only a part of a longer vector is sent, and its bytes count for the whole vector. The part's number of values: for
# each rank of an all-reduce, for sparse vectors (more, because few of them are sent, behind a header), and under Hop.
_VALUES_OF_RANK, _SPARSE_VALUES, _HOP_VALUES = 2048, 1 << 16, 64
_FIRST_STEPS = 3
# The first delay gives ranks spare time. After this many delays they have used it up, unless windows are only slightly
# too slow.
_TIMES_DELAY = 4


@dataclasses.dataclass(frozen=True)
class Links:
    """The speed of messages.

    Attributes:
      latency_seconds: Array [n, n] by sender and receiver: the time until the first byte arrives.
      bytes_per_second: Array [n, n] by sender and receiver: the rate of a message that has its link and its sender's
        card to itself.
      card_bytes_per_second: Array [n]: the rate of all messages together that a rank sends at the same time. None: the
        card does not limit the rate.
    """

    latency_seconds: np.ndarray
    bytes_per_second: np.ndarray
    card_bytes_per_second: np.ndarray | None = None

    @classmethod
    def alike(cls, world_size: int, latency_seconds: float, seconds_per_byte: float) -> Links:
        """The links of ranks with equal cards. Only the cards limit the rate."""
        rate = 1 / seconds_per_byte if seconds_per_byte else math.inf
        shape = (world_size, world_size)
        return cls(np.full(shape, latency_seconds), np.full(shape, math.inf), np.full(world_size, rate))

    def latency(self, sender: int, receiver: int, num_bytes: int) -> float:
        """The latency of a message, as `link_seconds` of `VirtualCluster`."""
        return float(self.latency_seconds[sender, receiver])

    def sending_seconds(self, sender: int, receiver: int, num_bytes: int) -> float:
        """The time of a message on its link, as `sending_seconds` of `VirtualCluster`. 0 for a header alone."""
        return num_bytes / float(self.bytes_per_second[sender, receiver]) if num_bytes > _HEADER_BYTES else 0.0

    def card_seconds(self, sender: int, num_bytes: int) -> float:
        """The time of a message on the sender's card, as `card_seconds` of `VirtualCluster`. 0 for a header alone."""
        if self.card_bytes_per_second is None or num_bytes <= _HEADER_BYTES:
            return 0.0
        return num_bytes / float(self.card_bytes_per_second[sender])


@dataclasses.dataclass(frozen=True)
class Simulation:
    """The result of a simulated training.

    Attributes:
      rank_seconds: Array [n]: the seconds of a step of each rank. Skipped steps count, too.
      made_share: The share of all steps that were made. The others were skipped.
      most_updates: The most updates that a rank of Hop had in memory; 0 for other strategies.
    """

    rank_seconds: np.ndarray
    made_share: float
    most_updates: int = 0

    @property
    def step_seconds(self) -> float:
        """The mean of a step's seconds over the ranks."""
        return float(np.mean(self.rank_seconds))


Own = Callable[[int], Iterator[OwnSeconds]]
MakeRecorder = Callable[[int, Scheduler], Recorder | None]


def simulate_training(
    strategy: str,
    settings: Mapping[str, object],
    *,
    world_size: int,
    num_steps: int,
    own: Own,
    links: Links,
    num_values: int,
    recorders: MakeRecorder = lambda rank, scheduler: None,
) -> Simulation:
    """Trains on a virtual clock until all ranks have made their steps. Ranks that finish early continue until then.

    Args:
      strategy: "PipeSGDStrategy", "DTSStrategy" or "HopStrategy".
      settings: Arguments of the strategy. Those that do not affect messages or their times are ignored.
      world_size: Number of ranks.
      num_steps: The number of steps of each rank that are measured, at least 2, rounded up to whole windows of DTS.
        Steps that Hop skips count, too. A few steps that are not measured come first, until waits have reached their
        usual length.
      own: `own(rank)` yields, without an end, the seconds of the rank's own work in each step that it makes.
      links: The speed of messages.
      num_values: The number of float32 values that are exchanged.
      recorders: As for `VirtualCluster`. Ranks record what real ones do, until the last one has made its steps.

    Returns:
      The durations.

    Raises:
      ValueError: If a setting is out of range, or the strategy is another one.
    """
    check_choice("strategy", strategy, tuple(_SETUPS))
    check_integer("num_steps", num_steps, at_least=2)
    setup = _SETUPS[strategy](settings, world_size)
    sent_values = min(num_values, setup.num_values)
    cluster = VirtualCluster(
        world_size,
        links.latency,
        sending_seconds=links.sending_seconds,
        card_seconds=links.card_seconds,
        recorders=recorders,
        payload_scale=num_values / sent_values,
        **setup.cluster_arguments,
    )
    packing = Packing([TensorSpec("x", (sent_values,), tf.float32)])
    goal = _Goal(cluster, setup.num_first_steps, math.ceil(num_steps / setup.period) * setup.period)
    ranks = [setup.make(cluster, rank, packing, own(rank), goal.is_reached) for rank in range(world_size)]
    for rank in ranks:
        if rank.recorder is not None:
            rank.recorder.add_line("group", name=GROUP, num_bytes=4 * num_values, num_values=num_values)
    cluster.run(lambda rank: ranks[rank].train())
    return goal.simulation(ranks)


class _Goal:
    """The number of steps that all ranks are to make, and the time at which each rank began each step.

    Args:
      cluster: The ranks.
      num_first: The number of first steps, which are not measured.
      num_steps: The number of steps after them, which are measured.
    """

    def __init__(self, cluster: VirtualCluster, num_first: int, num_steps: int):
        self._scheduler = cluster.scheduler
        self._first, self._end = num_first, num_first + num_steps
        self._begins: list[dict[int, float]] = [{} for _ in cluster.memberships]
        self._through: set[int] = set()

    def is_reached(self, rank: int, step: int) -> bool:
        """True if all ranks have made their steps. Called when `rank` is about to begin this step."""
        self._begins[rank][step] = self._scheduler.now
        if step > self._end:  # One step more, so that records tell when the last one ended.
            self._through.add(rank)
            if len(self._through) == len(self._begins):
                self._scheduler.stop()
        return len(self._through) == len(self._begins)

    def simulation(self, ranks: Sequence[Training]) -> Simulation:
        """The result of all steps except the first ones. A rank of Hop may skip the first or last of them."""
        seconds, num_made, num_steps = [], 0, 0
        for begins in self._begins:
            first = max(step for step in begins if step <= self._first)
            end = min(step for step in begins if step >= self._end)
            seconds.append((begins[end] - begins[first]) / (end - first))
            num_made += sum(first <= step < end for step in begins)
            num_steps += end - first
        most_updates = max(getattr(rank.exchange, "most_updates_in_memory", 0) for rank in ranks)
        return Simulation(np.array(seconds), num_made / num_steps, most_updates)


@dataclasses.dataclass(frozen=True)
class _Setup:
    """The setup of a simulation.

    Attributes:
      make: Makes a rank's `Training`, with the arguments of `Training`.
      num_values: The largest number of float32 values that are sent.
      cluster_arguments: Arguments of `VirtualCluster`.
      num_first_steps: The number of steps after which waits have reached their usual length.
      period: The number of steps from one wait to the next.
    """

    make: Callable[..., Training]
    num_values: int
    cluster_arguments: Mapping[str, object] = dataclasses.field(default_factory=dict)
    num_first_steps: int = _FIRST_STEPS
    period: int = 1


def _pipe_sgd(settings: Mapping, world_size: int) -> _Setup:
    schedule = Schedule(settings.get("pipeline_width", 1) - 1, 1)
    return _averaging(settings, world_size, schedule, num_segments=settings.get("num_segments", 1))


def _dts(settings: Mapping, world_size: int) -> _Setup:
    schedule = Schedule(settings.get("delay", 4), settings.get("interval", 4))
    return _averaging(settings, world_size, schedule, num_threads=schedule.num_slots)


def _averaging(
    settings: Mapping, world_size: int, schedule: Schedule, *, num_threads: int = 1, num_segments: int = 1
) -> _Setup:
    codec = codecs.get(settings.get("codec"))
    make = functools.partial(
        AveragingTraining,
        schedule=schedule,
        num_threads=num_threads,
        codec=codec,
        algorithm=settings.get("algorithm", "mesh"),
        num_segments=num_segments,
    )
    return _Setup(
        make,
        _SPARSE_VALUES if isinstance(codec, codecs.Sparse) else _VALUES_OF_RANK * world_size,
        # At first, a delay gives ranks spare time. If windows are too slow, ranks lose this time from window to window.
        num_first_steps=max(_FIRST_STEPS, schedule.interval + _TIMES_DELAY * schedule.delay),
        period=schedule.interval,
    )


def _hop(settings: Mapping, world_size: int) -> _Setup:
    topology = resolve(settings.get("topology", "ring_based"), world_size)
    known = {field.name for field in dataclasses.fields(HopSettings)}
    checked = HopSettings(**{name: value for name, value in settings.items() if name in known})
    checked.check_topology(topology)
    arguments = {
        "peers": lambda rank: {*topology.in_neighbors(rank), *topology.out_neighbors(rank)},
        "continue_without_lost": checked.continues_without_lost,
    }
    return _Setup(functools.partial(HopTraining, topology=topology, settings=checked), _HOP_VALUES, arguments)


_SETUPS = {"PipeSGDStrategy": _pipe_sgd, "DTSStrategy": _dts, "HopStrategy": _hop}

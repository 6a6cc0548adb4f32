"""How long steps take under a strategy, on given ranks and links: its own protocol on a virtual clock.

What a rank does on its own is given, step by step, and so is what a message takes. All that is sent and waited for is
the strategy's code: `HopExchange`, and the all-reduce of `AveragingExchange`, with the times at which Pipe-SGD and DTS
hand out and merge. Nothing is learned: vectors are always the same.
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

# What is no longer is a header.
_HEADER_BYTES = 64
# Of longer vectors a part is sent, whose bytes stand for more: of an all-reduce so many values for each rank; of sparse
# ones more, as few of them are sent, behind a header; under Hop few will do.
_VALUES_OF_RANK, _SPARSE_VALUES, _HOP_VALUES = 2048, 1 << 16, 64
_FIRST_STEPS = 3
# In so many delays ranks have used up what a delay gives them once; but for windows that are hardly too slow.
_TIMES_DELAY = 4


@dataclasses.dataclass(frozen=True)
class Links:
    """What messages take.

    Attributes:
      latency_seconds: Until the first byte is there, array [n, n] by sender and receiver.
      bytes_per_second: Array [n, n]; likewise, of one message that has its link and its sender's card to itself.
      card_bytes_per_second: Of all that a rank sends at the same time, array [n]; None: whatever its links carry.
    """

    latency_seconds: np.ndarray
    bytes_per_second: np.ndarray
    card_bytes_per_second: np.ndarray | None = None

    def latency(self, sender: int, receiver: int, num_bytes: int) -> float:
        """As `link_seconds` of `VirtualCluster`."""
        return float(self.latency_seconds[sender, receiver])

    def sending_seconds(self, sender: int, receiver: int, num_bytes: int) -> float:
        """Likewise. Headers alone go between what others send."""
        return num_bytes / float(self.bytes_per_second[sender, receiver]) if num_bytes > _HEADER_BYTES else 0.0

    def card_seconds(self, sender: int, num_bytes: int) -> float:
        """Likewise."""
        if self.card_bytes_per_second is None or num_bytes <= _HEADER_BYTES:
            return 0.0
        return num_bytes / float(self.card_bytes_per_second[sender])


@dataclasses.dataclass(frozen=True)
class Simulation:
    """What a simulated training has taken.

    Attributes:
      rank_seconds: Of a step of each rank, array [n]. Steps that were jumped over count.
      made_share: The share of all steps that were made; the others were jumped over.
      most_updates: The most updates that a rank of Hop had in memory; 0 elsewhere.
    """

    rank_seconds: np.ndarray
    made_share: float
    most_updates: int = 0

    @property
    def step_seconds(self) -> float:
        """The mean over the ranks."""
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
    """Trains on a virtual clock, until all ranks have made their steps. Who has trains on meanwhile.

    Args:
      strategy: "PipeSGDStrategy", "DTSStrategy" or "HopStrategy".
      settings: Arguments of the strategy; those that do not change what is sent, or when, are passed over.
      world_size: Number of ranks.
      num_steps: Steps of each that are looked at, at least 2, in whole windows of DTS. Those that Hop jumps over count.
        Before them a few are made, until ranks wait for each other as they do later on.
      own: `own(rank)` yields, without an end, what that rank does on its own in each step that it makes.
      links: What messages take.
      num_values: Values of float32 that are exchanged.
      recorders: As of `VirtualCluster`. Ranks record what real ones do, until the last one has made its steps.

    Returns:
      What it took.

    Raises:
      ValueError: If a setting is out of range, or the strategy another one.
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
    """How many steps all are to make, and when each rank began each step.

    Args:
      cluster: The ranks.
      num_first: Steps that are made before the others, and not looked at.
      num_steps: The others.
    """

    def __init__(self, cluster: VirtualCluster, num_first: int, num_steps: int):
        self._scheduler = cluster.scheduler
        self._first, self._end = num_first, num_first + num_steps
        self._begins: list[dict[int, float]] = [{} for _ in cluster.memberships]
        self._through: set[int] = set()

    def is_reached(self, rank: int, step: int) -> bool:
        """Whether all ranks have made their steps, now that `rank` is about to begin this one."""
        self._begins[rank][step] = self._scheduler.now
        if step > self._end:  # With one more, records tell when the last one ended.
            self._through.add(rank)
            if len(self._through) == len(self._begins):
                self._scheduler.stop()
        return len(self._through) == len(self._begins)

    def simulation(self, ranks: Sequence[Training]) -> Simulation:
        """Of all but the first steps. A rank of Hop may jump over their end, or over the last step."""
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
    """What is simulated.

    Attributes:
      make: Makes a rank's `Training`; arguments as there.
      num_values: Values of float32 that are sent, if there are as many.
      cluster_arguments: Of `VirtualCluster`.
      num_first_steps: After how many steps a rank waits as long as it does later on.
      period: After how many steps it waits again.
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
        # A delay is time that ranks have at first, and lose from window to window where these come too slowly.
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

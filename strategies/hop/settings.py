"""The settings of Hop: the mechanisms that are on, and the checks that they go together."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from absl import logging

from hop_tf.arguments import check_boolean, check_choice, check_integer, check_on_peer_loss, is_integer
from hop_tf.topology import Topology

_UPDATE_ORDERS = ("parallel", "serial")
_SYNCHRONIZATIONS = ("queues", "notify_ack")
# The most iterations that a rank can be ahead of an out-neighbor with NOTIFY-ACK (section 3.3).
_NOTIFY_ACK_GAP = 2
# Each iteration of the gap needs a queue, and creating a queue takes half a millisecond.
_LARGEST_GAP = 1000
_LARGEST_INTERVAL = 10_000
# Weights that differ by no more than this are equal.
_WEIGHT_TOLERANCE = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class SkipIterations:
    """Lets a straggler jump over iterations (section 5).

    At the end of an iteration rank i knows from its token queues how far each out-neighbor j is ahead:
    TokenQ(j -> i).size() - max_ig = Iter(j) - Iter(i). If the smallest of these numbers is at least `trigger`, the rank
    jumps by that many iterations, at most `max_jump`, including the ordinary advance by one. Before a jump it averages
    its parameters with those that its in-neighbors have in the iteration before the jump's target. A jump never takes
    the rank ahead of an out-neighbor. In directed graphs, in-neighbors may wait for the rank at an earlier iteration.
    The rank gets at most one iteration ahead of these in-neighbors.

    Attributes:
      max_jump: Most iterations in one jump, at least 2. Default 10.
      trigger: A rank jumps if it is at least this number of iterations behind every out-neighbor. At least 2. At most
        max_iteration_gap, and without backup workers at most max_staleness + 1, because no rank falls further behind.
        Default 2.

    Raises:
      ValueError: If a value is out of range.
    """

    max_jump: int = 10
    trigger: int = 2

    def __post_init__(self):
        for name in ("max_jump", "trigger"):
            check_integer(name, getattr(self, name), at_least=2)

    def jump(self, num_behind: int) -> int:
        """The number of iterations by which to advance: 1 if the rank is less than `trigger` behind."""
        return min(self.max_jump, num_behind) if num_behind >= self.trigger else 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class HopSettings:
    """The arguments of `HopStrategy` that select its mechanisms, checked. See there.

    Raises:
      ValueError: If a value is out of range, or mechanisms are combined that cannot work together.
    """

    max_iteration_gap: int = 8
    num_backup_workers: int | Sequence[int] = 0
    max_staleness: int = 0
    skip: SkipIterations | None = None
    interval: int = 1
    update_order: str = "parallel"
    synchronization: str = "queues"
    skewed_shards: bool = False
    on_peer_loss: str | None = None

    def __post_init__(self):
        self._check_gap()
        self._check_backup_workers()
        check_integer("max_staleness", self.max_staleness, at_least=0)
        check_integer("interval", self.interval, at_least=1, at_most=_LARGEST_INTERVAL)
        check_choice("update_order", self.update_order, _UPDATE_ORDERS)
        check_choice("synchronization", self.synchronization, _SYNCHRONIZATIONS)
        check_on_peer_loss(self.on_peer_loss)
        if self.skip is not None:
            self._check_skip()
        if self.uses_notify_ack and self.tolerates_stragglers:
            raise ValueError(
                "`synchronization` must be 'queues' with backup workers or staleness: with 'notify_ack' no rank gets "
                f"more than {_NOTIFY_ACK_GAP} iterations ahead of another, so they would have no effect. Received: "
                f"synchronization={self.synchronization!r}, num_backup_workers={self.num_backup_workers}, "
                f"max_staleness={self.max_staleness}."
            )
        if self.interval > 1 and self.update_order == "serial":
            raise ValueError(
                "`interval` must be 1 with update_order='serial', which averages the result of every update. "
                f"Received: interval={self.interval}."
            )
        self._check_skewed_shards()
        if self.max_iteration_gap <= self.max_staleness:
            logging.warning(
                "max_iteration_gap=%d is not above max_staleness=%d: ranks wait for tokens before staleness matters.",
                self.max_iteration_gap,
                self.max_staleness,
            )

    def _check_gap(self) -> None:
        if not is_integer(self.max_iteration_gap) or not 1 <= self.max_iteration_gap <= _LARGEST_GAP:
            raise ValueError(
                f"`max_iteration_gap` must be an integer from 1 to {_LARGEST_GAP}. There is no unlimited gap, because "
                "a rank keeps room for (1 + max_iteration_gap) updates of every in-neighbor. Received: "
                f"max_iteration_gap={self.max_iteration_gap!r}."
            )

    def _check_backup_workers(self) -> None:
        number = self.num_backup_workers
        of_ranks = list(number) if isinstance(number, Sequence) and not isinstance(number, str) else [number]
        if not of_ranks or not all(is_integer(each) and each >= 0 for each in of_ranks):
            raise ValueError(
                "`num_backup_workers` must be an integer of at least 0, or a list of these, one for each rank. "
                f"Received: num_backup_workers={number!r}."
            )
        if isinstance(number, Sequence):
            object.__setattr__(self, "num_backup_workers", tuple(number))

    def _check_skewed_shards(self) -> None:
        check_boolean("skewed_shards", self.skewed_shards)
        if self.skewed_shards and (self.update_order != "parallel" or self.tolerates_stragglers):
            raise ValueError(
                "`skewed_shards` must be False with update_order='serial', backup workers or staleness: on some graphs "
                f"velocities would oscillate and grow. Received: skewed_shards=True, update_order={self.update_order!r}"
                f", num_backup_workers={self.num_backup_workers}, max_staleness={self.max_staleness}."
            )

    def _check_skip(self) -> None:
        if not isinstance(self.skip, SkipIterations):
            raise ValueError(f"`skip` must be a hop_tf.SkipIterations or None. Received: skip={self.skip!r}.")
        if not self.tolerates_stragglers:
            raise ValueError(
                "`skip` needs backup workers or staleness. Without them, a straggler's neighbors wait for each of its "
                f"updates, so it never falls behind far enough to skip. Received: skip={self.skip}, "
                f"num_backup_workers={self.num_backup_workers}, max_staleness=0."
            )
        if self.skip.trigger > self.max_iteration_gap:
            raise ValueError(
                "`trigger` of `skip` must be at most max_iteration_gap: no rank falls further behind, so none would "
                f"ever skip. Received: skip={self.skip}, max_iteration_gap={self.max_iteration_gap}."
            )
        if not self.has_backup_workers and self.skip.trigger > self.max_staleness + 1:
            raise ValueError(
                "`trigger` of `skip` must be at most max_staleness + 1 without backup workers: a neighbor that is "
                "further ahead waits for the straggler, so the straggler would never skip. Received: "
                f"skip={self.skip}, max_staleness={self.max_staleness}, num_backup_workers={self.num_backup_workers}."
            )

    def num_backup_workers_of(self, rank: int) -> int:
        """N_buw(i): the number of in-neighbors that a rank need not wait for."""
        return self.num_backup_workers if is_integer(self.num_backup_workers) else self.num_backup_workers[rank]

    @property
    def has_backup_workers(self) -> bool:
        """True if some rank has backup workers."""
        return bool(np.any(self.num_backup_workers))

    @property
    def tolerates_stragglers(self) -> bool:
        """True if some rank can go on before it has an update of every neighbor."""
        return bool(self.has_backup_workers or self.max_staleness)

    def is_tolerated_by(self, rank: int) -> bool:
        """True if this rank can go on before it has an update of every neighbor."""
        return bool(self.num_backup_workers_of(rank) or self.max_staleness)

    @property
    def uses_notify_ack(self) -> bool:
        """True if NOTIFY-ACK bounds the distance of ranks, instead of token queues."""
        return self.synchronization == "notify_ack"

    @property
    def continues_without_lost(self) -> bool:
        """True if ranks train on when one is lost."""
        return self.on_peer_loss == "continue" or (self.on_peer_loss is None and self.tolerates_stragglers)

    @property
    def gap(self) -> int:
        """The most iterations that a rank can be ahead of an out-neighbor."""
        return _NOTIFY_ACK_GAP if self.uses_notify_ack else self.max_iteration_gap

    def check_topology(self, topology: Topology) -> None:
        """Raises ValueError if the mechanisms do not fit the graph. Warns if they ignore its unequal weights."""
        if topology.world_size == 1:
            return
        ranks = range(topology.world_size)
        if not is_integer(self.num_backup_workers) and len(self.num_backup_workers) != len(ranks):
            raise ValueError(
                f"`num_backup_workers` must be one number, or one for each of the {len(ranks)} ranks. "
                f"Received: num_backup_workers={self.num_backup_workers}."
            )
        num_in = [len(topology.in_neighbors(rank)) + 1 for rank in ranks]
        too_many = [rank for rank in ranks if self.num_backup_workers_of(rank) >= num_in[rank]]
        if too_many:
            rank = min(too_many, key=lambda rank: num_in[rank])
            raise ValueError(
                "`num_backup_workers` must be less than a rank's number of in-neighbors, itself included "
                "(N_buw(i) < |N_in(i)|, Figure 8). "
                f"Received: num_backup_workers={self.num_backup_workers}, where rank {rank} has {num_in[rank]} in "
                f"{topology!r}."
            )
        if self.tolerates_stragglers and any(_has_weights_of_its_own(topology, rank) for rank in ranks):
            logging.warning(
                "%r has unequal weights, but backup workers and staleness ignore them: all updates of an iteration "
                "count equally. So ranks with more neighbors contribute more to the common model.",
                topology,
            )


def _has_weights_of_its_own(topology: Topology, rank: int) -> bool:
    return np.ptp(list(topology.weights(rank).values())) > _WEIGHT_TOLERANCE

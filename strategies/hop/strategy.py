"""Hop: decentralized training over a graph, synchronized by update and token queues.

Luo, Lin, Zhuo, Qian. Hop: Heterogeneity-aware Decentralized Training. ASPLOS 2019. Figure 7, for worker i:

     2  x_0,i = p_0
     5  TokenQ(i -> j).enqueue([0] * (max_ig - 1))      for j in N_in(i)
     7  for k = 0 to max_iter:
    10      TokenQ(i -> j).enqueue([k])                 for j in N_in(i)
    11      Send(x_k,i, k, i)                           1. to N_out(i)
    12      grads = Compute(x_k,i)                      2.
    13      x_recv = Recv(k, i)                         3. from N_in(i), x_k,i itself included
    14      temp = Reduce(x_recv)                       4. mean with the weights of the topology
    15      x_k+1,i = temp + grads                      5. Apply
    17      TokenQ(j -> i).dequeue(1)                   for j in N_out(i), before entering k + 1

In the serial order (Figure 2, a) Compute and Apply come first, and Send, Recv and Reduce work on what they give.

Lines 12 and 15 run in the training graph, by the user's optimizer whatever it is; the others in `HopExchange`, on the
communication thread: while line 12 computes, or, where stragglers are tolerated, from line 13 on when it has.
TokenQ(j -> i) is kept at i and filled by what j sends, so that no remote dequeue is needed. Recv and Reduce have
variants for backup workers (Figure 8) and staleness (Figure 9): see `reception`. Line 17 takes more tokens where a
straggler jumps (section 5): see `pacing`, also for NOTIFY-ACK.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from hop_tf.arguments import identity_of
from hop_tf.options import CommunicationOptions
from hop_tf.runtime.group import ExchangeContext, Group
from hop_tf.strategies.hop.exchange import REDUCTION, RENEWAL, STEP, HopExchange
from hop_tf.strategies.hop.settings import HopSettings, SkipIterations
from hop_tf.strategy import ExchangeStrategy, training_cluster
from hop_tf.topology import Topology, resolve


class HopStrategy(ExchangeStrategy):
    """Decentralized training: each rank averages its parameters with its neighbors' in every step.

    It costs less than a point of accuracy against synchronous training, at the same learning rate and momentum; some 2
    points where each rank has data of other classes.

    In step k, rank i sends its parameters x_k,i to its out-neighbors, computes the gradient at x_k,i meanwhile, and
    then applies it to the weighted mean of its own and its in-neighbors' x_k:

        x_k+1,i = sum over j of W[j, i] x_k,j  +  the optimizer's step for the gradient at x_k,i

    No rank waits for more than its neighbors. Token queues keep a rank at most `max_iteration_gap` steps ahead of its
    out-neighbors; of any two ranks i is at most min(length(Path j->i), max_iteration_gap * length(Path i->j)) steps
    ahead of j (Theorem 2). Replicas differ slightly during training; `synchronize(model)` averages them at the end.

    What to do about slow ranks:

    - Ranks that are slow now and then: `num_backup_workers` or `max_staleness`, or both. A rank then is up to
      max_iteration_gap * length(Path i->j) ahead of another, with staleness alone also at most
      (max_staleness + 1) * length(Path j->i) (Table 1).
    - A rank that is slow all the time: these and `skip`. It leaves out iterations, so that the others need not wait.
    - A rank of which nothing is heard: with backup workers or staleness it is not waited for, and none of these bounds
      holds for it. When it is back, it goes on where its out-neighbors are, with the mean of its in-neighbors' newest
      parameters. `fit` passes over the batches of the steps that it has missed; a custom loop makes them in the end.

    Floating-point variables that are not trained but assigned in the training step before its update (moving
    statistics) are averaged along. Optimizer slots stay local.

    `report()` counts beside what is common to all strategies: `late_updates`, which came too late or were superseded
    unused; `withheld_updates`, which were not sent: they would have come too late, or, with backup workers or
    staleness, a newer one was there before the link was free; `jumps`, and the `skipped_iterations` in them;
    `silences`: how many times a neighbor was found to be silent; and `missed_iterations`: those that the others made
    while they did not hear of this rank.

    Args:
      topology: The communication graph: a name ("ring", "ring_based", "double_ring", "complete", "hierarchical",
        "exponential"), a `hop_tf.Topology`, a mixing matrix (array) or a networkx graph. Default "ring_based". In a
        world of one it does not matter. Its weights count without backup workers and staleness only. With them the
        updates of an iteration count alike, so that ranks with more neighbors contribute more to what all agree on: on
        an undirected graph, in proportion to the number of neighbors plus one.
      max_iteration_gap: Most steps a rank may be ahead of an out-neighbor (the paper's max_ig), from 1 to 1000. A
        rank keeps up to `(1 + max_iteration_gap) * |N_in|` updates in memory. NOTIFY-ACK does not use it. Default 8.
      num_backup_workers: A rank waits for the updates of all in-neighbors but so many, and averages what it has got
        with equal weights (Figure 8). One number for all ranks, or a list with one for each (the paper's N_buw(i)): a
        rank of a fast machine whose neighbors are slow may have more. Less than a rank's number of in-neighbors plus
        one. Default 0: it waits for all, and weights are those of the topology.
      max_staleness: Iterations by which an update that is used may be older than the rank's own (Figure 9). A rank
        waits only for neighbors of which it has nothing so new, and averages the newest updates that came since it last
        did, weighted by iteration (Equation 2). With backup workers it waits for all such neighbors but so many.
        Should be less than `max_iteration_gap`. Default 0: updates are those of the rank's own iteration.
      skip: `SkipIterations`: lets stragglers jump over iterations. Needs backup workers or staleness, `fit`, and one
        optimizer. The batches of skipped iterations are consumed and not trained on. Default None.
      update_order: "parallel": a step sends what it begins with, and computes meanwhile. "serial": it sends the result
        of its own update, and averages that (Figure 2, a): nothing is hidden behind the computation, and what was
        learned travels one step earlier. Default "parallel".
      synchronization: "queues", or "notify_ack", the earlier protocol that the paper compares with: an update is sent
        when the receiver has used the one before. Default "queues".
      on_peer_loss: "raise": when a rank dies or cannot be reached, all ranks raise `PeerLostError`. "continue": from
        the first step on, the others train on without it, as without one that has ended, unless the graph falls apart;
        they share its rows of each batch. What it had learned and not sent is lost. A second `fit`, `synchronize` and
        `gather_reports` take all ranks, and raise; so does everything before the first step. If the same script is
        started again as that rank, its first `fit` passes over the steps that it has missed, takes weights and
        optimizer slots from the rank that is furthest of those it deals with, and goes on from there; that takes one
        optimizer, and no `run_eagerly`. A rank takes the place of an in-neighbor that has gone in its own mean: in a
        directed graph the mean over all ranks then changes by that. Backup workers are as many as before: where all
        others are, a rank waits for nobody's updates. Default None: "continue" with backup workers or staleness, else
        "raise".
      min_ranks: Where others go on: how many ranks must be left, neither lost nor failed. With fewer, a rank raises
        `PeerLostError`, since others may train on, on the other side of a cut. Default None: more than half of the
        ranks; 1 where there are two.
      batch_shares: What part of each global batch a rank takes: a list with a positive number for each rank, such as
        [3, 1], or "auto": in proportion to speeds, which ranks measure and agree on (see `docs/data.md`). Parameters
        are averaged with the weights of the topology, which keep their mean over the ranks. That mean then is to move
        by the steps of the ranks, each in proportion to its rows; so what a rank's optimizer adds is multiplied by n
        times its part, n for the number of ranks. Where some have left or are lost, n and the part are those among the
        others. Weight decay, and moving statistics, are not multiplied. Default None: all parts are equal.
      devices: Names of this process's devices, as of `tf.distribute.MirroredStrategy`: a rank's batch is divided among
        them. Ranks may have different numbers of them. Default: all GPUs that the process sees, or one CPU.
      cluster_resolver: Where the cluster is described. Default: `TF_CONFIG`.
      communication_options: Deadlines, credentials, records. Default: `CommunicationOptions()`.

    Raises:
      ValueError: If an argument is out of range, mechanisms are combined that cannot work together, or the topology
        does not fit the cluster.
      ClusterConfigError: If the cluster description is not valid.
      HopError: If this rank's address cannot be bound.

    References:
      Luo, Lin, Zhuo, Qian. Hop: Heterogeneity-aware Decentralized Training. ASPLOS 2019. Figures 7 to 10,
      Theorem 2, Table 1.
    """

    def __init__(
        self,
        *,
        topology: str | Topology | np.ndarray | object = "ring_based",
        max_iteration_gap: int = 8,
        num_backup_workers: int | Sequence[int] = 0,
        max_staleness: int = 0,
        skip: SkipIterations | None = None,
        update_order: str = "parallel",
        synchronization: str = "queues",
        on_peer_loss: str | None = None,
        min_ranks: int | None = None,
        batch_shares: Sequence[float] | str | None = None,
        devices: Sequence[str] | None = None,
        cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
    ):
        self._settings = HopSettings(
            max_iteration_gap=max_iteration_gap,
            num_backup_workers=num_backup_workers,
            max_staleness=max_staleness,
            skip=skip,
            update_order=update_order,
            synchronization=synchronization,
            on_peer_loss=on_peer_loss,
        )
        cluster = training_cluster(cluster_resolver, "HopStrategy")
        # Alone, a graph or matrix of any size will do.
        is_name = isinstance(topology, str)
        topology = topology if cluster.world_size > 1 or is_name else "complete"
        self._topology = resolve(topology, cluster.world_size, cluster.hosts)
        self._settings.check_topology(self._topology)
        super().__init__(
            cluster=cluster,
            devices=devices,
            cluster_resolver=cluster_resolver,
            communication_options=communication_options,
            batch_shares=batch_shares,
            identity={**identity_of(self._settings), "topology": _describe(topology, self._topology)},
            neighbors={*self._topology.in_neighbors(cluster.rank), *self._topology.out_neighbors(cluster.rank)},
            skips_steps="" if skip is None else "HopStrategy, unless skip=None, passes over iterations.",
            continue_without_lost=self._settings.continues_without_lost,
            min_ranks=min_ranks,
        )

    @property
    def topology(self) -> Topology:
        """The communication graph."""
        return self._topology

    def make_exchange(self, context: ExchangeContext) -> HopExchange:
        return HopExchange(context, topology=self._topology, settings=self._settings)

    def before_update(self, group: Group, values: Sequence[tf.Tensor], gradients: list) -> tuple[list, tuple]:
        num_skipped = tf.constant(0, tf.int64)
        if self._settings.update_order == "parallel":
            num_skipped = self._average(group, values, gradients)
        before = [] if self.training.shares is None else _read(group.trained)
        return gradients, (num_skipped, before)

    def after_update(self, group: Group, state: tuple[tf.Tensor, Sequence[tf.Tensor]]) -> tf.Tensor:
        num_skipped, before = state
        if before:
            self._weigh_step(group, before)
        if self._settings.update_order == "serial":
            values = _read(group.variables)
            num_skipped = self._average(group, values, values)
        if self._settings.skip is not None:
            tf.cond(num_skipped > 0, lambda: self._renew(group), lambda: num_skipped)
        return num_skipped

    def _weigh_step(self, group: Group, before: Sequence[tf.Tensor]) -> None:
        """Multiplies what the optimizer has added by n times this rank's part of a batch; of n ranks that are there."""
        more = self.training.shares.times_mean - 1
        for variable, value in zip(group.trained, before, strict=True):
            variable.assign_add((variable - value) * tf.cast(more, variable.dtype))

    def _average(self, group: Group, values: Sequence[tf.Tensor], computed: Sequence) -> tf.Tensor:
        """Lines 11, 13, 14: adds (reduced - sent), so that what the optimizer did before, such as decay, stays."""
        group.submit(values)
        segment = STEP
        if self._settings.tolerates_stragglers:
            segment = REDUCTION
            group.signal(segment, computed)
        changes, num_skipped = group.collect(computed, segment)
        group.add(changes)
        return num_skipped

    def _renew(self, group: Group) -> tf.Tensor:
        """Before a jump: averages the parameters with newer ones (section 5)."""
        values = _read(group.variables)
        group.submit(values, RENEWAL)
        changes, num_skipped = group.collect(values, RENEWAL)
        group.add(changes)
        return num_skipped


def _read(variables: Sequence[tf.Variable]) -> list[tf.Tensor]:
    return [variable.read_value() for variable in variables]


def _describe(argument: object, topology: Topology) -> str:
    """What ranks compare: short, however many they are."""
    digest = hashlib.sha256(np.round(topology.mixing_matrix, 6).tobytes()).hexdigest()[:16]
    return f"{argument if isinstance(argument, str) else 'mixing matrix'} {digest}"

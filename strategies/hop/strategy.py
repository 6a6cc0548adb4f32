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

In the serial order (Figure 2, a) Compute and Apply come first, and Send, Recv and Reduce work on their result.

Lines 12 and 15 run in the training graph, with any optimizer of the user. The other lines run in `HopExchange`, on the
communication thread, while line 12 computes. If stragglers are tolerated, line 13 and the following lines wait for line
12. TokenQ(j -> i) is kept at i and filled by messages from j, so that no remote dequeue is needed. Recv and Reduce have
variants for backup workers (Figure 8) and staleness (Figure 9): see `reception`. Line 17 takes more tokens when a
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
from hop_tf.strategies.hop.algorithm import HopAlgorithm
from hop_tf.strategies.hop.exchange import HopExchange
from hop_tf.strategies.hop.settings import HopSettings, SkipIterations
from hop_tf.strategy import ExchangeStrategy, training_cluster
from hop_tf.topology import Topology, resolve


class HopStrategy(ExchangeStrategy):
    """Decentralized training: each rank averages its parameters with its neighbors' in every step, or every p steps.

    At the same learning rate and momentum, accuracy is less than a point below synchronous training. If the ranks' data
    have different classes, accuracy is about 2 points below with three ranks, and less than a point with
    `skewed_shards=True`.

    In step k, rank i sends its parameters x_k,i to its out-neighbors, and computes the gradient at x_k,i meanwhile.
    Then it applies the gradient to the weighted mean of its own and its in-neighbors' x_k:

        x_k+1,i = sum over j of W[j, i] x_k,j  +  the optimizer's step for the gradient at x_k,i

    A rank waits only for its neighbors. Token queues keep a rank at most `max_iteration_gap` steps ahead of its
    out-neighbors. For any two ranks i and j, i is at most min(length(Path j->i), max_iteration_gap * length(Path i->j))
    steps ahead of j (Theorem 2). Replicas differ slightly during training. `synchronize(model)` averages them at the
    end.

    Settings for slow ranks:

    - Ranks that are slow now and then: `num_backup_workers` or `max_staleness`, or both. Rank i is then at most
      max_iteration_gap * length(Path i->j) ahead of rank j. With staleness alone, it is also at most
      (max_staleness + 1) * length(Path j->i) ahead (Table 1).
    - A rank that is slow all the time: one of these, and `skip`. The rank then leaves out iterations, so that the
      others need not wait.
    - A silent rank: with backup workers or staleness, no rank waits for it, and these bounds do not hold for it. When
      it is back, it goes on at the iteration of its out-neighbors, with the mean of its in-neighbors' newest
      parameters. `fit` skips the batches of the steps that it has missed. A custom loop makes these steps at the end.

    Non-trainable floating-point variables that are assigned in the training step before the optimizer's update (moving
    statistics) are averaged, too. Optimizer slots stay local.

    `report()` has these counts in addition to those of all strategies:

    - `late_updates`: updates that came too late or were superseded unused.
    - `withheld_updates`: updates that were not sent, because they would have come too late. With backup workers or
      staleness, also updates that newer ones replaced before the link was free.
    - `jumps`, and the `skipped_iterations` in them.
    - `silences`: the number of times that a neighbor was found to be silent.
    - `missed_iterations`: iterations that the others made while this rank was silent.

    Args:
      topology: The communication graph: a name ("ring", "ring_based", "double_ring", "complete", "hierarchical",
        "exponential"), a `hop_tf.Topology`, a mixing matrix (array) or a networkx graph. Default "ring_based". With a
        single rank it does not matter. Its weights are used only without backup workers and staleness. With these, all
        updates of an iteration count equally, so that ranks with more neighbors contribute more to the consensus. On an
        undirected graph, they do so in proportion to the number of neighbors plus one.
      max_iteration_gap: Most iterations a rank may be ahead of an out-neighbor (the paper's max_ig), from 1 to 1000. A
        rank keeps up to `(1 + max_iteration_gap) * |N_in|` updates in memory. NOTIFY-ACK does not use it. Default 8.
      num_backup_workers: The number of in-neighbors whose updates a rank does not wait for. It gives equal weights to
        the updates that it has (Figure 8). One number for all ranks, or a list with one for each (the paper's
        N_buw(i)): a rank on a fast machine with slow neighbors may have more. Less than a rank's number of in-neighbors
        plus one. Default 0: a rank waits for all, and weights are those of the topology.
      max_staleness: The number of iterations by which an update may be behind the rank's own iteration (Figure 9). A
        rank waits only for neighbors whose newest update here is too old. It averages the newest updates that came
        since its last average, weighted by iteration (Equation 2). With backup workers, it waits only while there are
        more than `num_backup_workers` such neighbors. Should be less than `max_iteration_gap`. Default 0: updates are
        those of the rank's own iteration.
      skip: `SkipIterations`: lets stragglers jump over iterations. Needs backup workers or staleness, `fit`, and one
        optimizer. The batches of skipped iterations are consumed and not trained on. Default None.
      interval: The number of steps of an iteration, p. With more than one, a rank averages with its neighbors in the
        first step of an iteration only, and trains on its own in the others (local SGD over a graph). It sends p times
        less, and waits p times less often. The unit of the arguments above, of error messages, and of the counts of
        `report()` (except `steps`) is an iteration. A jump also leaves out the rest of the iteration that it begins in.
        Needs update_order="parallel". In 248 steps of three ranks, p = 4 cost 0.3 points of accuracy, and p = 12 cost
        0.7. Default 1.
      update_order: "parallel": a step sends the parameters that it begins with, and computes meanwhile. "serial": a
        step sends the result of its own update, and averages that (Figure 2, a). Communication is then not hidden
        behind the computation, but a step's gradient travels one step earlier. Default "parallel".
      synchronization: "queues", or "notify_ack", the earlier protocol that the paper compares with: a rank sends an
        update only after the receiver has used the previous one. Default "queues".
      skewed_shards: True: for ranks whose data differ in kind, such as different classes. The change that averaging
        makes to the parameters, times the momentum and divided by `interval`, is added to the optimizer's velocity. So
        a rank moves on in the common direction, and not in its own. This sends no additional bytes. It needs
        `keras.optimizers.SGD` with momentum, update_order="parallel", no `batch_shares`, no backup workers and no
        staleness. Default False.
      on_peer_loss: "raise": when a rank dies or cannot be reached, all ranks raise `PeerLostError`. "continue": from
        the first step on, the others train on without the rank, as they do when a rank has ended. They raise `HopError`
        if their graph is no longer connected. They share the lost rank's rows of each batch. Changes that the lost rank
        had not sent are lost, too. A second `fit`, `synchronize` and `gather_reports` need all ranks, and raise. So
        does everything that ranks do together before the first step. If the same script is started again as that rank,
        its first `fit` skips the steps that it has missed. The rank takes weights and optimizer slots from the neighbor
        that is furthest ahead, and goes on from there. That needs one optimizer, and no `run_eagerly`. In a rank's
        mean, its own parameters replace those of an in-neighbor that has gone. In a directed graph this changes the
        mean over all ranks. The number of backup workers stays as it is: if it covers all remaining in-neighbors, a
        rank waits for no updates. Default None: "continue" with backup workers or staleness, otherwise "raise".
      min_ranks: With on_peer_loss="continue": the number of ranks that must remain, neither lost nor failed. With
        fewer, a rank raises `PeerLostError`, because other ranks may still train on the other side of a network
        partition. Default None: more than half of the ranks; 1 if there are two.
      batch_shares: The part of each global batch that a rank takes: a list with a positive number for each rank, such
        as [3, 1], or "auto": in proportion to speeds, which ranks measure and agree on (see `docs/data.md`). Averaging
        with the topology's weights preserves the mean of the parameters over the ranks. This mean must move by each
        rank's step in proportion to its rows. So the optimizer's step is multiplied by n times the rank's part, with n
        ranks. If ranks have left or are lost, only the remaining ranks count for n and the part. Weight decay and
        moving statistics are not multiplied. Default None: all parts are equal.
      devices: Names of this process's devices, as for `tf.distribute.MirroredStrategy`: a rank's batch is divided among
        them. Ranks may have different numbers of devices. Default: all GPUs that the process sees, or one CPU.
      cluster_resolver: The description of the cluster. Default: `TF_CONFIG`.
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
        interval: int = 1,
        update_order: str = "parallel",
        synchronization: str = "queues",
        skewed_shards: bool = False,
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
            interval=interval,
            update_order=update_order,
            synchronization=synchronization,
            skewed_shards=skewed_shards,
            on_peer_loss=on_peer_loss,
        )
        if skewed_shards and batch_shares is not None:
            raise ValueError(
                "`batch_shares` must be None with skewed_shards=True: steps weighted by rows move weights more or less "
                f"than velocities tell. Received: batch_shares={batch_shares!r}."
            )
        cluster = training_cluster(cluster_resolver, "HopStrategy")
        # A single rank accepts a graph or matrix of any size.
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
            skips_steps="" if skip is None else "HopStrategy skips iterations unless skip=None.",
            continue_without_lost=self._settings.continues_without_lost,
            min_ranks=min_ranks,
        )

    @property
    def topology(self) -> Topology:
        """The communication graph."""
        return self._topology

    def make_exchange(self, context: ExchangeContext) -> HopExchange:
        return HopExchange(context, topology=self._topology, settings=self._settings)

    def make_algorithm(self, group: Group) -> HopAlgorithm:
        return HopAlgorithm(group, self._settings, self.training.shares)


def _describe(argument: object, topology: Topology) -> str:
    """A description of the topology that ranks compare. It is short for any number of ranks."""
    digest = hashlib.sha256(np.round(topology.mixing_matrix, 6).tobytes()).hexdigest()[:16]
    return f"{argument if isinstance(argument, str) else 'mixing matrix'} {digest}"

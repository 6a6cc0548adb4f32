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

Lines 12 and 15 run in the training graph, by the user's optimizer whatever it is; the others in `HopExchange`, on the
communication thread, while line 12 computes. TokenQ(j -> i) is kept at i and filled by messages of j, so that no
remote dequeue is needed.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf

from hop_tf.arithmetic import weighted_differences
from hop_tf.collectives import BULK_LANE
from hop_tf.errors import HopError, ProtocolError
from hop_tf.exchange import Exchange, Incoming, Outgoing
from hop_tf.options import CommunicationOptions
from hop_tf.queues import TokenQueue, Update, UpdateQueue
from hop_tf.strategy import ExchangeStrategy, training_cluster
from hop_tf.topology import Topology, resolve
from hop_tf.transport.base import Message
from hop_tf.worker import ExchangeContext, Group

_HEADER = struct.Struct("<qq")  # session, iteration


class HopStrategy(ExchangeStrategy):
    """Decentralized training: each rank averages its parameters with its neighbors' in every step.

    In step k, rank i sends its parameters x_k,i to its out-neighbors, computes the gradient at x_k,i meanwhile, and
    then applies it to the weighted mean of its own and its in-neighbors' x_k:

        x_k+1,i = sum over j of W[j, i] x_k,j  +  the optimizer's step for the gradient at x_k,i

    No rank waits for more than its neighbors. Token queues keep neighbors at most `max_iteration_gap` steps apart; of
    any two ranks i is at most min(length(Path j->i), max_iteration_gap * length(Path i->j)) steps ahead of j
    (Theorem 2). Replicas differ slightly during training; `synchronize(model)` averages them at the end.

    Floating-point variables that are not trained but assigned in the training step (moving statistics) are averaged
    along. Optimizer slots stay local.

    Args:
      topology: The communication graph: a name ("ring", "ring_based", "double_ring", "complete", "hierarchical",
        "exponential"), a `hop_tf.Topology`, a mixing matrix (array) or a networkx graph. Default "ring_based". In a
        world of one it does not matter.
      max_iteration_gap: Most steps a rank may be ahead of an out-neighbor (the paper's max_ig), at least 1. A rank
        keeps up to (1 + max_iteration_gap) * |N_in| updates in memory. Default 8.
      cluster_resolver: Where the cluster is described. Default: `TF_CONFIG`.
      communication_options: Deadlines, credentials, records. Default: `CommunicationOptions()`.

    Raises:
      ValueError: If an argument is out of range or the topology does not fit the cluster.
      ClusterConfigError: If the cluster description is not valid.
      HopError: If this rank's address cannot be bound.

    References:
      Luo, Lin, Zhuo, Qian. Hop: Heterogeneity-aware Decentralized Training. ASPLOS 2019. Figure 7, Theorem 2.
    """

    def __init__(
        self,
        *,
        topology: str | Topology | np.ndarray | object = "ring_based",
        max_iteration_gap: int = 8,
        cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
    ):
        is_integer = isinstance(max_iteration_gap, int | np.integer) and not isinstance(max_iteration_gap, bool)
        if not is_integer or max_iteration_gap < 1:
            raise ValueError(
                "`max_iteration_gap` must be an integer of at least 1. "
                f"Received: max_iteration_gap={max_iteration_gap!r}."
            )
        cluster = training_cluster(cluster_resolver, "HopStrategy")
        # Alone, any graph will do.
        self._topology = resolve(topology if cluster.world_size > 1 else "complete", cluster.world_size, cluster.hosts)
        self._max_iteration_gap = int(max_iteration_gap)
        super().__init__(
            cluster=cluster,
            cluster_resolver=cluster_resolver,
            communication_options=communication_options,
            identity={
                "max_iteration_gap": str(max_iteration_gap),
                "topology": _describe(topology, self._topology),
            },
            neighbors={*self._topology.in_neighbors(cluster.rank), *self._topology.out_neighbors(cluster.rank)},
        )

    @property
    def topology(self) -> Topology:
        """The communication graph."""
        return self._topology

    def _make_exchange(self, context: ExchangeContext) -> HopExchange:
        return HopExchange(context, topology=self._topology, max_iteration_gap=self._max_iteration_gap)

    def _before_update(self, group: Group, values: Sequence[tf.Tensor], gradients: list) -> list:
        """Lines 11, 13, 14: adds (reduced - sent), so that what the optimizer did before, such as decay, stays."""
        group.submit(values)
        for variable, change in zip(group.variables, group.collect(gradients), strict=True):
            variable.assign_add(change)
        return gradients


def _describe(argument: object, topology: Topology) -> str:
    """What ranks compare: short, however many they are."""
    digest = hashlib.sha256(np.round(topology.mixing_matrix, 6).tobytes()).hexdigest()[:16]
    return f"{argument if isinstance(argument, str) else 'mixing matrix'} {digest}"


class HopExchange(Exchange):
    """Figure 7's communication at one rank.

    Args:
      context: Membership, packing and buffers of the group.
      topology: The communication graph.
      max_iteration_gap: The paper's max_ig.
    """

    def __init__(self, context: ExchangeContext, *, topology: Topology, max_iteration_gap: int):
        self._group = context.group
        self._packing = context.packing
        self._membership = context.membership
        self._pool = context.pool
        self._transport = context.membership.transport
        self._monitor = context.membership.monitor
        self._rank = self._membership.rank
        self._topology = topology
        self._max_iteration_gap = max_iteration_gap
        self._in_neighbors = topology.in_neighbors(self._rank)
        self._out_neighbors = topology.out_neighbors(self._rank)
        self._weights = topology.weights(self._rank)
        self._update_queue_name = f"updates/{self._group}"
        self._token_queue_name = f"tokens/{self._group}"
        self._num_late_updates = 0
        self.reset(context.session)
        self._transport.register(self._update_queue_name, self._on_update)
        self._transport.register(self._token_queue_name, self._on_token)

    def reset(self, session: int) -> None:
        with self._monitor:
            self._session = session
            self.iteration = 0
            self._sent_steps = 0
            self._known_departed: set[int] = set()
            self._updates = UpdateQueue(
                dtypes=self._packing.dtypes,
                num_senders=len(self._in_neighbors),
                max_iteration_gap=self._max_iteration_gap,
            )
            self._tokens = {j: self._new_token_queue(j) for j in self._out_neighbors}  # Line 5.

    def _new_token_queue(self, j: int) -> TokenQueue:
        longest = self._max_iteration_gap * (self._topology.shortest_path_length(j, self._rank) + 1)
        return TokenQueue(num_initial=self._max_iteration_gap - 1, capacity=longest)

    def step(self, outgoing: Outgoing) -> Incoming:
        k, x = outgoing.step, outgoing.buckets
        with self._monitor:
            self.iteration = k
        self._insert_tokens(k)  # Line 10.
        self._send(x, k)  # Line 11.
        received = self._recv(k)  # Line 13.
        change = self._reduce(x, received)  # Line 14.
        self._take_tokens(k)  # Line 17.
        return Incoming(k, outgoing.segment, change)

    def neutral(self, outgoing: Outgoing) -> Incoming:
        return Incoming(outgoing.step, outgoing.segment, tuple(np.zeros_like(x) for x in outgoing.buckets))

    def _insert_tokens(self, k: int) -> None:
        for j in self._in_neighbors:
            if self._membership.departure(j) is None:
                self._membership.send(j, self._token_queue_name, _HEADER.pack(self._session, k), lane=BULK_LANE)

    def _send(self, x: Sequence[np.ndarray], k: int) -> None:
        header = _HEADER.pack(self._session, k)
        for j in self._out_neighbors:
            if self._membership.departure(j) is None:
                self._membership.send(j, self._update_queue_name, header, x, lane=BULK_LANE)
        self._sent_steps = k + 1

    def _recv(self, k: int) -> list[Update]:
        def missing() -> list[int]:
            here = self._updates.senders(k)
            return [j for j in self._in_neighbors if j not in here and self._delivers(j, k)]

        self._membership.wait(missing, operation="receive update", step=k)
        with self._monitor:
            self._check_connected(k)
            return self._updates.dequeue(k)

    def _reduce(self, x: Sequence[np.ndarray], received: Sequence[Update]) -> tuple[np.ndarray, ...]:
        """The weighted mean, less x itself. What a departed neighbor would have sent counts as x."""
        changes = []
        weights = [self._weights[update.sender] for update in received]
        for bucket, own in enumerate(x):
            change = self._pool.take(own.nbytes).view(own.dtype)
            weighted_differences(own, [update.buckets[bucket] for update in received], weights, out=change)
            changes.append(change)
        return tuple(changes)

    def _take_tokens(self, k: int) -> None:
        def missing() -> list[int]:
            return [j for j, tokens in self._tokens.items() if not tokens and self._membership.departure(j) is None]

        self._membership.wait(missing, operation="acquire token", step=k)
        with self._monitor:
            for tokens in self._tokens.values():
                if tokens:
                    tokens.take()

    def _delivers(self, j: int, k: int) -> bool:
        return self._membership.delivers(j, self._group, k)

    def _check_connected(self, k: int) -> None:
        """Raises if ranks that ended before step k split the others into parts that would train apart."""
        departed = {j for j in self._membership.departed() if not self._delivers(j, k)} - {self._rank}
        if departed != self._known_departed:
            self._known_departed = departed
            if not self._topology.is_connected_without(departed):
                raise HopError(
                    f"rank {self._rank}, step {k}: ranks {sorted(departed)} have left, and the communication graph of "
                    "the others is not connected any more. Use a topology with more edges, or stop all ranks together."
                )

    @property
    def sent_steps(self) -> int:
        return self._sent_steps

    def counters(self) -> Mapping[str, float]:
        return {"late_updates": self._num_late_updates}

    def close(self) -> None:
        self._transport.unregister(self._update_queue_name)
        self._transport.unregister(self._token_queue_name)

    def _on_update(self, message: Message) -> None:
        session, iteration = self._parse(message, self._in_neighbors)
        with self._monitor:
            if session != self._session or iteration < self.iteration:
                self._num_late_updates += 1
                return
            if iteration > self.iteration + self._max_iteration_gap:
                raise ProtocolError(f"rank {message.sender} is at {iteration}, this rank at {self.iteration}.")
            self._updates.enqueue(Update(iteration, message.sender, self._packing.view(message.payload)))
            self._monitor.notify_all()

    def _on_token(self, message: Message) -> None:
        session, iteration = self._parse(message, self._out_neighbors)
        with self._monitor:
            if session == self._session:
                self._tokens[message.sender].put(iteration)
                self._monitor.notify_all()

    def _parse(self, message: Message, senders: Sequence[int]) -> tuple[int, int]:
        if message.sender not in senders or len(message.header) != _HEADER.size:
            raise ProtocolError(f"rank {message.sender} sent an unexpected message to {message.queue!r}.")
        return _HEADER.unpack(message.header)

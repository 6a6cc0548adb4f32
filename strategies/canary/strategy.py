"""Canary: decentralized training by sketched pieces of gradients, over several interfaces, without waiting.

Zhou, Wang, Lu, Xu, Sun, Guo. Canary: Decentralized Distributed Deep Learning Via Gradient Sketch and Partition in
Multi-Interface Networks. IEEE TPDS 2021. Worker i, in iteration k (sections 4 and 5):

    1.  gradients of a batch; colayers are ready from the last layer to the first          (section 4.3.2)
    2.  s = zeta - k, the iterations behind the fastest worker                             (Pseudocode 1, line 5)
    3.  if s is too large, and too few colayers were sent: the worker is overtime          (lines 19 and 22)
            it drops the other colayers, and pulls the state of the fastest worker         (section 5.3)
            (its optimizer forgets the step: see `hop_tf.strategies.canary.slots`)
    4.  otherwise, each colayer is sketched, and cut into pieces, which are sent           (Figures 12 to 14, Table 2)
    5.  pieces that have arrived are merged, and recorded in the gradient exchange index    (Figure 16)
    6.  the next iteration is k + 1, or zeta if zeta is larger

The paper leaves open what a worker sends if the optimizer has a state. Here the worker sends its optimizer's step,
divided by n. Every worker, including the sender, adds only the final sum of a piece. The rank that sums the piece up,
its root, sends out this sum. So replicas differ only by messages in flight. With SGD, with or without momentum, the
result is the same as with averaged gradients.

The paper also leaves open which weights a worker computes with while its own step is in flight. Here its own step
stands in for the mean: the worker computes with the merged weights plus its own steps that are not merged yet. These
count at their full size, not divided by n (`hop_tf.runtime.deltas`). With the merged weights alone, every step would
take effect an iteration or two late. That costs 10 to 20 points of accuracy with a momentum of 0.9.

Separate threads merge all the time: see `hop_tf.strategies.canary.exchange`. Synchronous training (BSP) averages the
gradients of each colayer by all-reduce on the same routes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from hop_tf import codecs
from hop_tf.arguments import identity_of
from hop_tf.collectives.all_reduce import ALGORITHMS
from hop_tf.options import CommunicationOptions, checked_options
from hop_tf.runtime.algorithm import Algorithm
from hop_tf.runtime.choices import NO_TIMES, refuse_late_determinism, settings_to_use, tell_choice
from hop_tf.runtime.choosing import AUTO
from hop_tf.runtime.exchange import Exchange
from hop_tf.runtime.gradient_algorithm import GradientAlgorithm
from hop_tf.runtime.gradients import GradientExchange, specs_beside, with_rows_first
from hop_tf.runtime.group import ExchangeContext, Group
from hop_tf.runtime.ways import Way
from hop_tf.strategies.canary import colayers
from hop_tf.strategies.canary.algorithm import CanaryAlgorithm
from hop_tf.strategies.canary.exchange import CanaryExchange
from hop_tf.strategies.canary.settings import CanarySettings
from hop_tf.strategy import ExchangeStrategy, training_cluster
from hop_tf.tensors.packing import TensorSpec

_SKIPS = "CanaryStrategy skips the batches that a slow rank has missed, unless consistency='bsp'."


class CanaryStrategy(ExchangeStrategy):
    """Training with sketched pieces of weight changes, over several interfaces. No rank waits for a slow one.

    At the same learning rate and momentum, accuracy is less than a point below synchronous training. If the ranks' data
    have different classes, accuracy is about 2 points below, because a rank's own step then says little about the
    others' steps.

    Variables are bundled into colayers. In each step, a rank sends its optimizer's change of a colayer's variables,
    divided by the number of ranks. The change travels in pieces on the routes of `algorithm`. Each piece is summed up
    on its way. The sum goes to all ranks, which merge it. Until then the rank's own step stands in for the sum.
    `consistency` says what happens to a rank that is late:

    - "ssp": a rank is overtime if it is more than `max_staleness` iterations behind the fastest one, with fewer than
      `min_colayers` colayers sent. It then drops the other colayers of its iteration. It takes the weights of the
      fastest rank, or of the second or third fastest, if those weights contain everything that was merged on this rank.
      Otherwise it keeps its own weights. Either way, it goes on with the iteration of the fastest rank, and skips the
      batches in between.
    - "async": as "ssp", but nothing is dropped.
    - "bsp": synchronous training. Gradients are averaged, colayer by colayer, before the optimizer gets them. The
      trained variables are equal to the bit on all ranks. If a rank ends early, the others go on without it. To make
      weights and slots equal again, call `synchronize(model)` before another `fit`. Ranks choose the algorithm by the
      durations of their first steps, and choose again if steps become slower or faster: see `PipeSGDStrategy`. Rank 0
      prints the choice on stderr.

    With "ssp" and "async", ranks wait for each other when `fit` ends, and end with the same weights, to the bit. During
    training replicas differ by the messages in flight. Changes that callbacks make to a rank's weights within `fit` are
    part of its next step. Keras constraints apply to the weights that a rank computes with, and to the final weights.
    With `use_ema`, each rank keeps a moving average of its own weights. `synchronize(model)` takes the mean of these
    averages over the ranks. Each rank has its own optimizer slots. Training needs `fit`, one optimizer, trained
    variables of 32 bits or more, and no `ema_overwrite_frequency`.

    Memory: three copies of the weights (merged, as the graph has them, and as they were before the step). Each step in
    flight takes a quarter of a copy with the sketch, and one copy otherwise. Moving statistics go with the last
    colayer, never through a codec.

    Args:
      algorithm: "mesh" (each rank sends to all others), "bcube:<alpha>,<beta>" (alpha^beta ranks with `beta`
        interfaces, each rank sends to beta (alpha - 1) others), or "tree:<children>" (few connections, one interface).
        With "bsp" also "ring" (each rank sends to one other). Default "auto": "mesh". With "bsp" and three ranks or
        more, "auto" may also become "ring", or the "bcube:<alpha>,<beta>" that fits `interfaces`. Ranks leave the mesh
        only if this saves at least 5 % of a step. With `codecs.LowRank`, or under
        `tf.config.experimental.enable_op_determinism()`, "auto" stays "mesh".
      consistency: As above. Default "ssp".
      max_staleness: s, in iterations; at least 0. Not used by "bsp". Default 16.
      min_colayers: p: a rank that has sent this many colayers may also send the others, however late it is. 0 is the
        same as "async". At most `num_colayers`. If the model has fewer colayers, all of them suffice. Not used by
        "bsp". Default None: all.
      num_colayers: k, the most colayers that variables are bundled into, at least 1. Default None: 10, and neighboring
        colayers of less than 256 KiB are joined. Convolutions and dense layers mostly stay apart.
      codec: Encodes messages: a `hop_tf.codecs.Codec`, or a name; None: values travel as they are. `codecs.TopK` needs
        consistency="bsp" and error feedback: otherwise the values that it does not select would be lost. With "bsp",
        `codecs.LowRank(rank=4, codec="sketch")` sends large kernels as factors, and the factors as sketches. Except
        with "bsp", the sketch encodes a colayer as a whole, on the device that computes the step. All other encoding is
        done in pieces on the CPU. Default "sketch".
      max_in_flight: On a mesh, the number of own iterations that a rank may have in flight, not yet merged. On other
        networks, each further hop on the way to a root adds one. At least 2, because one may be delayed by a slow rank
        while the next one is sent. If a message takes longer than this many iterations, ranks wait for it. Each
        iteration in flight takes memory. Not used by "bsp". Default 4.
      sync_interval: Once in this many iterations, every piece of the weights becomes its mean over all ranks. This
        removes differences from lost messages, and from changes that only one rank has made. At least 1, or None:
        never. If replicas differ, ranks send as many bytes as for one exchange in float32. If digests show that
        replicas are equal, ranks send almost nothing. Not used by "bsp". Default 50.
      interfaces: This machine's address on each of its interfaces: `beta` addresses for a BCube, otherwise one. With
        "bsp" and algorithm="auto", several addresses let ranks choose a BCube. If they choose another algorithm, only
        the first address is used. If an address cannot reach a rank, the cluster's address is used, with a warning.
        Replaces `CommunicationOptions.interfaces`. Default None: the value of that option.
      on_peer_loss: "raise": when a rank dies or cannot be reached, all ranks raise `PeerLostError`. "continue": the
        others go on without the rank, and share its rows of each batch. Its contributions that were not yet summed up
        are lost, and so are the other ranks' contributions that it was to sum up. If the same script is started again
        as that rank, its first `fit` skips the steps that it has missed. The rank takes weights and optimizer slots
        from the rank that is furthest ahead, and goes on from there. It raises `PeerLostError` if the others have ended
        without it. So does a rank that cannot end because another rank dies while all ranks end. With "bsp", the lost
        rank's last gradient is in the mean of a colayer on all other ranks or on none. For this, each rank keeps a copy
        of the last means. In a BCube that has lost a rank, the mean is computed as on a mesh. A rank that is started
        again joins between two steps, with weights that are equal to the others'. After a loss, `strategy.reduce` in a
        custom loop raises. Default None: "raise" for "bsp", otherwise "continue".
      min_ranks: With on_peer_loss="continue": the number of ranks that must remain, neither lost nor failed. With
        fewer, a rank raises `PeerLostError`, because other ranks may still train on the other side of a network
        partition. Default None: more than half of the ranks; 1 if there are two.
      patience_seconds: With consistency="bsp" and on_peer_loss="continue": the silence, in seconds, after which the
        others go on without a rank. The rank joins them again in the same `fit` when it wakes: see `PipeSGDStrategy`.
        At least 0.5, and less than `CommunicationOptions.timeout_seconds`. With "ssp" and "async" it must be None,
        because no rank waits for a silent one. Default None: a silent rank is lost after `timeout_seconds`, and raises
        when it wakes.
      batch_shares: The part of each global batch that a rank takes: a list with a positive number for each rank, such
        as [3, 1], or "auto": in proportion to speeds, which ranks measure and agree on (see `docs/data.md`). With
        "bsp", the mean gradient weights each rank by its number of rows in the step. Otherwise a rank sends its step
        multiplied by its part, instead of by 1 / n. So the sum moves the replicas as far as one step of the whole batch
        would. The rank's own step stands in at its full size. Default None: all parts are equal.
      devices: Names of this process's devices, as for `tf.distribute.MirroredStrategy`: a rank's batch is divided among
        them. Ranks may have different numbers of devices. Default: all GPUs that the process sees, or one CPU.
      cluster_resolver: The description of the cluster. Default: `TF_CONFIG`.
      communication_options: Deadlines, credentials, records. Default: `CommunicationOptions()`.

    Raises:
      TypeError: If `codec` is of another type.
      ValueError: If an argument is out of range, or `algorithm` does not fit the cluster.
      ClusterConfigError: If the cluster description is not valid.
      HopError: If this rank's address cannot be bound.

    References:
      Zhou et al. Canary: Decentralized Distributed Deep Learning Via Gradient Sketch and Partition in Multi-Interface
      Networks. IEEE TPDS 2021.
    """

    def __init__(
        self,
        *,
        algorithm: str = AUTO,
        consistency: str = "ssp",
        max_staleness: int = 16,
        min_colayers: int | None = None,
        num_colayers: int | None = None,
        codec: codecs.Codec | codecs.LowRank | str | None = "sketch",
        max_in_flight: int = 4,
        sync_interval: int | None = 50,
        interfaces: Sequence[str] | None = None,
        on_peer_loss: str | None = None,
        min_ranks: int | None = None,
        patience_seconds: float | None = None,
        batch_shares: Sequence[float] | str | None = None,
        devices: Sequence[str] | None = None,
        cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
    ):
        given = CanarySettings(
            algorithm=algorithm,
            consistency=consistency,
            max_staleness=max_staleness,
            min_colayers=min_colayers,
            num_colayers=num_colayers,
            codec=codec,
            max_in_flight=max_in_flight,
            sync_interval=sync_interval,
            on_peer_loss=on_peer_loss,
        )
        self._settings = settings_to_use(given)
        if patience_seconds is not None and not self._settings.is_synchronous:
            raise ValueError(
                "`patience_seconds` must be None unless consistency='bsp': otherwise no rank waits for a silent one. "
                f"Received: patience_seconds={patience_seconds!r}, consistency={consistency!r}."
            )
        options = checked_options(communication_options)
        if interfaces is not None:
            options = dataclasses.replace(options, interfaces=interfaces)
        self.in_lock_step = self.agrees_on_roster = self._settings.is_synchronous
        self.mixes_weights = not self.in_lock_step
        self.keeps_assignments = self.in_lock_step
        cluster = training_cluster(cluster_resolver, "CanaryStrategy")
        if cluster.world_size > 1:
            given.check_cluster(cluster.world_size, options)
        self._num_interfaces = len(options.interfaces or ())
        super().__init__(
            cluster=cluster,
            devices=devices,
            cluster_resolver=cluster_resolver,
            communication_options=options,
            batch_shares=batch_shares,
            identity={**identity_of(self._settings), "number of interfaces": str(self._num_interfaces)},
            skips_steps=_SKIPS if not self._settings.is_synchronous else "",
            continue_without_lost=self._settings.on_peer_loss == "continue",
            min_ranks=min_ranks,
            patience_seconds=patience_seconds,
        )
        if self._settings != given and given.chooses(self.world_size, self._num_interfaces):
            (way,) = self._settings.ways(self.world_size)
            self._tell(way, 1, NO_TIMES)

    def _tell(self, way: Way, width: int, text: str) -> None:
        """Reports the ranks' choice. A mesh and a ring use one interface."""
        arguments: dict[str, object] = {"algorithm": way.algorithm}
        if way.algorithm in ALGORITHMS and self._num_interfaces > 1:
            arguments["interfaces"] = list(self._options.interfaces[:1])
        tell_choice(self._recorder, way, text, arguments=arguments, is_chief=self.is_chief)

    @property
    def _chooses(self) -> bool:
        """True if ranks choose how they average."""
        return self._settings.chooses(self.world_size, self._num_interfaces)

    def specs_beside(self, trained: Sequence[tf.Variable]) -> Sequence[TensorSpec]:
        del trained
        if not self._settings.is_synchronous:
            return []
        admits, weighs_rows = self._settings.on_peer_loss == "continue", self.training.shares is not None
        return specs_beside(self.world_size, admits=admits, weighs_rows=weighs_rows, chooses=self._chooses)

    def make_exchange(self, context: ExchangeContext) -> Exchange:
        settings = self._settings
        num_beside = len(self.specs_beside(context.trained))
        specs = context.packing.specs[: len(context.packing.specs) - num_beside]
        members = colayers.bundle(specs, settings.num_colayers)
        if settings.is_synchronous:
            refuse_late_determinism(settings, chooses=self._chooses)
            members[-1].extend(range(len(specs), len(specs) + num_beside))
            members = with_rows_first(members, context.packing.specs)
            ways = settings.ways(self.world_size, self._num_interfaces)
            return GradientExchange(context, members, ways=ways, tell=self._tell)
        for variable in context.trained:
            if variable.dtype not in (tf.float32, tf.float64):
                raise ValueError(
                    "trained variables must be float32 or float64 unless consistency='bsp': rounding in smaller types "
                    f"lets ranks drift apart. Received: {variable.name} of {variable.dtype}."
                )
        shares = self.training.shares
        arguments = {} if shares is None else {"part_of": shares.part_of}
        return CanaryExchange(context, members, settings.asynchronous(len(members)), **arguments)

    def make_algorithm(self, group: Group) -> Algorithm:
        if self._settings.is_synchronous:
            return GradientAlgorithm(group, self.training.shares)
        return CanaryAlgorithm(group, drops=self._settings.drops)

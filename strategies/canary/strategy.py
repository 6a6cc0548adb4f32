"""Canary: decentralized training by sketched pieces of gradients, over several interfaces, without waiting.

Zhou, Wang, Lu, Xu, Sun, Guo. Canary: Decentralized Distributed Deep Learning Via Gradient Sketch and Partition in
Multi-Interface Networks. IEEE TPDS 2021. Worker i, in iteration k (sections 4 and 5):

    1.  gradients of a batch; colayers are ready from the last layer to the first          (section 4.3.2)
    2.  s = zeta - k, how far it is behind the fastest worker                              (Pseudocode 1, line 5)
    3.  if s is too large, and too few colayers have left: it is overtime                  (lines 19 and 22)
            what has not left is dropped, and the state of the fastest worker pulled       (section 5.3)
            (its optimizer forgets the step: see `hop_tf.strategies.canary.slots`)
    4.  else, each colayer is sketched, and cut into pieces, which are sent                (Figures 12 to 14, Table 2)
    5.  what has come of others' pieces is merged, and noted in the gradient exchange index  (Figure 16)
    6.  the next iteration is k + 1, or zeta, if that is more

The paper leaves open what a worker sends if the optimizer has a state. Here it is its optimizer's step, over n; and
everybody, the sender included, adds what the last one on a piece's way has sent out, and nothing before. So replicas
differ by what is under way only. With SGD, with or without momentum, that is the same as if gradients were averaged.

And it leaves open what a worker computes with while its own step is on its way. Here that stands in for the mean: a
worker computes with what is merged, and its own steps that are not merged yet, at their full size, over 1 and not n
(`hop_tf.runtime.averaging`). By what is merged alone every step would come an iteration or two late, which costs 10 to
20 points of accuracy with a momentum of 0.9.

Merging goes on all the time, on threads of its own: see `hop_tf.strategies.canary.exchange`. Synchronous training (BSP)
averages the gradients of each colayer by all-reduce on the same routes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hop_tf import codecs
from hop_tf.arguments import identity_of
from hop_tf.collectives import ALGORITHMS, AllReduce
from hop_tf.keras_hook.optimizers import ema_overwrite_frequency, scaled, slots_of
from hop_tf.options import CommunicationOptions, checked_options
from hop_tf.runtime.choices import NO_TIMES, refuse_late_determinism, settings_to_use, tell_choice, write_call
from hop_tf.runtime.choosing import AUTO
from hop_tf.runtime.exchange import Exchange
from hop_tf.runtime.gradients import (
    GradientExchange,
    specs_beside,
    submit_gradients,
    take_means,
    with_rows_first,
)
from hop_tf.runtime.group import ExchangeContext, Group
from hop_tf.runtime.meeting import meet_newcomers
from hop_tf.runtime.ways import Way
from hop_tf.strategies.canary import colayers
from hop_tf.strategies.canary.exchange import CanaryExchange
from hop_tf.strategies.canary.low_rank import LowRankMean, is_factorized
from hop_tf.strategies.canary.settings import CanarySettings
from hop_tf.strategies.canary.slots import SlotsBefore
from hop_tf.strategy import ExchangeStrategy, training_cluster
from hop_tf.tensors.packing import Packing, TensorSpec

_SKIPS = "CanaryStrategy, unless consistency='bsp', passes over the batches that a slow rank has missed."


class CanaryStrategy(ExchangeStrategy):
    """Training with sketched pieces of changes, over several interfaces; no rank waits for a slow one.

    It costs less than a point of accuracy against synchronous training, at the same learning rate and momentum; some 2
    points where each rank has data of other classes: there a rank's own step says little of the others'.

    Variables are bundled into colayers. In each step, a rank sends what its optimizer would add to a colayer's
    variables, over the number of ranks, in pieces on the routes of `algorithm`. Each piece is summed up on its way; the
    sum goes to all ranks, which merge it. Until then the rank's own step stands in for it. `consistency` says what
    happens to a rank that is late:

    - "ssp": a rank that is more than `max_staleness` iterations behind the fastest one, with fewer than `min_colayers`
      of the present iteration sent, drops the rest of it. It takes the weights of the fastest rank, or of one of the
      next two, if these hold all that was merged here; else it keeps its own. In any case it goes on with the iteration
      that the fastest rank is in; the batches in between are passed over.
    - "async": the same, and nothing is dropped.
    - "bsp": synchronous training. Gradients are averaged, colayer by colayer, before the optimizer gets them. What is
      trained is equal to the bit on all ranks. The others go on without a rank that ends early; before another `fit`,
      `synchronize(model)` makes weights and slots the same. Ranks choose the algorithm by what their first steps take,
      and again if steps take longer or shorter: see `PipeSGDStrategy`. Rank 0 says on stderr what was chosen.

    With "ssp" and "async", ranks wait for each other when `fit` ends, and end with the same weights, to the bit. During
    training replicas differ by what is under way. What callbacks do to a rank's weights within `fit` is part of its
    next step. Constraints apply to what a rank computes with, and in the end. `use_ema` averages the rank's own
    weights: `synchronize(model)` averages these. Optimizer slots stay the rank's own. Training takes `fit` and one
    optimizer, trained variables of 32 bits or more, and no `ema_overwrite_frequency`.

    Memory: three copies of the weights (merged, as the graph has them, and as they were before the step), and for each
    step under way what the graph has handed out: a quarter of a copy with the sketch, else one. Moving statistics go
    with the last colayer, never through a codec.

    Args:
      algorithm: "mesh" (everybody sends to everybody), "bcube:<alpha>,<beta>" (alpha^beta ranks with `beta` interfaces,
        each rank sends to beta (alpha - 1) others), "tree:<children>" (few connections, one interface), or with "bsp"
        "ring" (each rank sends to one other). Default "auto": "mesh". With "bsp", and three ranks or more, "ring", or
        the "bcube:<alpha>,<beta>" that `interfaces` are there for, if that saves at least 5 % of a step; not with
        `low_rank`, nor under `tf.config.experimental.enable_op_determinism()`.
      consistency: As above. Default "ssp".
      max_staleness: s, in iterations; at least 0. Of no matter to "bsp", nor is `min_colayers`. Default 16.
      min_colayers: p: from so many colayers on that have left, the others may follow, however late; 0 is "async".
        Default None: all colayers. At most `num_colayers`; fewer colayers, if a model has only these, suffice.
      num_colayers: k, the most colayers that variables are bundled into, at least 1. Default None: 10, and neighbors
        of less than 256 KiB are joined, mostly of convolutions or of dense layers only.
      codec: What is sent is encoded with this: a `hop_tf.codecs.Codec`, or a name; None: as it is. `codecs.TopK` takes
        consistency="bsp" and error feedback: else what it does not select would be lost. Colayers are sketched as a
        whole, on the device that computes the step; all else, and with "bsp", is encoded in pieces on processors.
        Default "sketch".
      max_in_flight: How many own iterations a rank may have under way, not merged, on a mesh; where the way to a root
        is longer, one more for each further message. At least 2: one is sent while one is held up for a slow rank.
        Where a message takes longer than so many iterations, ranks wait for it. Each takes memory. Of no matter to
        "bsp". Default 4.
      sync_interval: In so many iterations, every piece of the weights becomes the mean of that of all ranks once, which
        evens out what losses, or a change on one rank only, have done; at least 1, or None: never. Where replicas
        differ it takes as many bytes as one exchange in float32, and next to none where they do not: digests tell.
        Default 50. Without meaning for "bsp".
      low_rank: r, with "bsp" only: mean gradients of large dense kernels, and embeddings (16,384 values and more, where
        factors make four times fewer of them), go as factors of r columns, which ranks find together (PowerSGD) and the
        codec then shortens. What is lost is added to what is sent next; what is left over when `fit` ends goes with the
        first steps of the next one. For weights that are equal to the bit, processors must compute alike. Default None:
        they go as they are.
      interfaces: This machine's address on each of its interfaces: `beta` of a BCube, else one. With "bsp" and
        algorithm="auto", several are for the BCube that ranks may choose; if they do not, only the first one is used.
        Ranks that an address cannot reach are reached over that of the cluster, and a warning says so. See
        `CommunicationOptions.interfaces`, which this one takes the place of. Default None: as it says.
      on_peer_loss: "raise": when a rank dies or cannot be reached, all ranks raise `PeerLostError`. "continue": the
        others go on without it, and share its rows of each batch; what it has sent and nobody has summed up is lost,
        and so is what it was to sum up. If the same script is started again as that rank, its first `fit` passes over
        the steps that it has missed, takes weights and optimizer slots from the rank that is furthest, and goes on from
        there; it raises `PeerLostError` if the others have ended without it. So does one that cannot end as a rank has
        died in the moment in which all end. With "bsp", its gradients of the step in which it was lost are in the mean
        of a colayer on all of the others, or on none, and a copy of each last mean is kept for that; in a BCube that is
        not whole any more the mean is made as on a mesh. A rank that is started again joins between two steps, with
        weights that are equal to the others'. After a loss, `strategy.reduce` in a custom loop raises. Default None:
        "raise" for "bsp", else "continue".
      min_ranks: Where others go on: how many ranks must be left, neither lost nor failed. With fewer, a rank raises
        `PeerLostError`, since others may train on, on the other side of a cut. Default None: more than half of the
        ranks; 1 where there are two.
      patience_seconds: With consistency="bsp" and on_peer_loss="continue": silence after which the others leave a rank
        behind, which joins them again in the same `fit` when it wakes: see `PipeSGDStrategy`. It is at least 0.5, and
        less than `CommunicationOptions.timeout_seconds`. Otherwise no rank waits for a silent one. Default None: a
        silent rank is lost after `timeout_seconds`, and raises when it wakes.
      batch_shares: What part of each global batch a rank takes: a list with a positive number for each rank, such as
        [3, 1], or "auto": in proportion to speeds, which ranks measure and agree on (see `docs/data.md`). With "bsp",
        mean gradients count each rank as often as it has rows in the step. Otherwise a rank's step goes to the others
        times its part, in the place of 1 / n: the sum moves the replicas as far as one step of the whole batch does.
        Its own stands in at its full size. Default None: all parts are equal.
      devices: Names of this process's devices, as of `tf.distribute.MirroredStrategy`: a rank's batch is divided among
        them. Ranks may have different numbers of them. Default: all GPUs that the process sees, or one CPU.
      cluster_resolver: Where the cluster is described. Default: `TF_CONFIG`.
      communication_options: Deadlines, credentials, records. Default: `CommunicationOptions()`.

    Raises:
      TypeError: If `codec` is something else.
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
        codec: codecs.Codec | str | None = "sketch",
        max_in_flight: int = 4,
        sync_interval: int | None = 50,
        low_rank: int | None = None,
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
            low_rank=low_rank,
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
            neighbors=range(cluster.world_size),
            skips_steps=_SKIPS if not self._settings.is_synchronous else "",
            continue_without_lost=self._settings.on_peer_loss == "continue",
            min_ranks=min_ranks,
            patience_seconds=patience_seconds,
        )
        if self._settings != given and given.chooses(self.world_size, self._num_interfaces):
            (way,) = self._settings.ways(self.world_size)
            self._tell(way, 1, NO_TIMES)

    def _tell(self, way: Way, width: int, text: str) -> None:
        """Says what ranks have chosen. A mesh and a ring use one interface."""
        arguments = {"consistency": "bsp", "algorithm": way.algorithm}
        if way.algorithm in ALGORITHMS and self._num_interfaces > 1:
            arguments["interfaces"] = list(self._options.interfaces[:1])
        call = write_call("CanaryStrategy", **arguments)
        tell_choice(self._recorder, way, text, call=call, is_chief=self.is_chief)

    @property
    def _chooses(self) -> bool:
        """True if ranks choose how they average."""
        return self._settings.chooses(self.world_size, self._num_interfaces)

    def specs_beside(self) -> Sequence[TensorSpec]:
        if not self._settings.is_synchronous:
            return []
        admits, weighs_rows = self._settings.on_peer_loss == "continue", self.training.shares is not None
        return specs_beside(self.world_size, admits=admits, weighs_rows=weighs_rows, chooses=self._chooses)

    def make_exchange(self, context: ExchangeContext) -> Exchange:
        settings = self._settings
        num_beside = len(self.specs_beside())
        specs = context.packing.specs[: len(context.packing.specs) - num_beside]
        members = colayers.bundle(specs, settings.num_colayers)
        if settings.is_synchronous:
            refuse_late_determinism(settings, chooses=self._chooses)
            members[-1].extend(range(len(specs), len(specs) + num_beside))
            members = with_rows_first(members, context.packing.specs)
            return SynchronousExchange(
                context,
                members,
                settings.ways(self.world_size, self._num_interfaces),
                low_rank=settings.low_rank,
                tell=self._tell,
            )
        for variable in context.trained:
            if variable.dtype not in (tf.float32, tf.float64):
                raise ValueError(
                    "variables that are trained must be float32 or float64 unless consistency='bsp': the rounding of "
                    f"smaller ones lets ranks drift apart. Received: {variable.name} of {variable.dtype}."
                )
        shares = self.training.shares
        arguments = {} if shares is None else {"part_of": shares.part_of}
        return CanaryExchange(context, members, settings.asynchronous(len(members)), **arguments)

    def begin_training(self, groups: Sequence[Group]) -> None:
        if not self._settings.is_synchronous:
            for group in groups:
                group.exchange.changes.reset()  # What callbacks have loaded is what training begins with: no change.

    def before_update(self, group: Group, values: Sequence[tf.Tensor], gradients: list) -> tuple[list, Any]:
        if self._settings.is_synchronous:
            outgoing = submit_gradients(group, gradients, self.training.num_rows)
            step = group.read_step()
            means, _ = take_means(group, step, lambda segment: group.collect(outgoing, segment)[0])
            return scaled(group.optimizer(), means), None
        _check_averages(group.optimizer())
        return gradients, SlotsBefore(group.optimizer(), group.trained) if self._settings.drops else None

    def after_update(self, group: Group, slots: SlotsBefore | None) -> tf.Tensor:
        if self._settings.is_synchronous:
            return tf.constant(0, tf.int64)
        exchange = group.exchange

        def start() -> None:
            group.submit(exchange.changes.known(), exchange.start_segment)

        with tf.device("/cpu:0"):
            is_first = tf.equal(group.step, exchange.start_step)
        tf.cond(is_first, start, lambda: None)
        changes = dict(zip(exchange.order, exchange.changes.take(), strict=True))
        for colayer, members in enumerate(exchange.members):
            group.submit([changes[index] for index in members], colayer)
        weights, num_skipped = group.collect(list(changes.values()), exchange.merge_segment)
        exchange.changes.replace(weights)
        if slots is not None:
            with tf.control_dependencies([num_skipped]):
                slots.restore(exchange.colayers, exchange.num_left.value())
        return num_skipped

    def end_step(self, group: Group) -> None:
        if self._settings.is_synchronous:
            meet_newcomers(group)

    def common_optimizers(self, group: Group) -> Sequence[tuple]:
        if not self._settings.is_synchronous:
            return []
        return [(group.optimizer(), list(slots_of(group.optimizer(), group.trained).values()))]

    def finish_training(self, group: Group) -> None:
        exchange, step = group.exchange, int(group.step)
        if self._settings.is_synchronous or not step:
            return
        if step == int(exchange.start_step):  # It was started again so late that it has made no step.
            group.submit(exchange.changes.known(), exchange.start_segment)
        segment = exchange.finish_segment
        group.submit(exchange.changes.take(), segment)  # What callbacks have assigned since the last step.
        buckets, _ = group.take(group.read_step(), segment)
        exchange.changes.replace(exchange.parts[segment].unpack(buckets))
        group.constrain()


def _check_averages(optimizer: Any) -> None:
    """Raises ValueError if weights are to become their averages during training: merging knows of steps only."""
    frequency = ema_overwrite_frequency(optimizer)
    if frequency is not None:
        raise ValueError(
            "the optimizer's `ema_overwrite_frequency` must be None unless consistency='bsp': weights are the sum of "
            f"all ranks' steps, and no rank can replace them by its own average. Received: {frequency}."
        )


class SynchronousExchange(GradientExchange):
    """BSP: gradients are averaged colayer by colayer, and a step waits for all of them.

    Args:
      context: Membership, packing and buffers of the group.
      members: For each colayer, the indices of its variables.
      ways: How a colayer may be averaged.
      low_rank: Columns of the factors of large dense kernels. Default None: these go as they are.
      tell: As of `Autotuner`. Default: nobody is told.
    """

    def __init__(
        self,
        context: ExchangeContext,
        members: Sequence[Sequence[int]],
        ways: Sequence[Way],
        *,
        low_rank: int | None = None,
        tell: Callable[[Way, int, str], None] = lambda way, width, text: None,
    ):
        self._low_rank = low_rank
        super().__init__(context, members, ways=ways, tell=tell)

    def _make_mean(self, context: ExchangeContext, part: Packing, name: str, way: Way) -> AllReduce | LowRankMean:
        rank = self._low_rank
        if rank is None or not any(is_factorized(spec, rank) for spec in part.specs):
            return super()._make_mean(context, part, name, way)
        return LowRankMean(context, name, part, rank=rank, codec=way.codec, algorithm=way.algorithm)

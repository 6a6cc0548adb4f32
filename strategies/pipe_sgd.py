"""Pipe-SGD: synchronous training whose communication is hidden behind the computation of the next steps.

Li, Yu, Li, Avestimehr, Kim, Schwing. Pipe-SGD: A Decentralized Pipelined SGD Framework for Distributed Deep Net
Training. NeurIPS 2018. Algorithm 1, with pipeline width K, at each worker:

    computation thread                                      communication thread
     2  for t = 1 ... T:                                     1  g_sum[1 - K ... 0] = 0, ready
     3      wait until g_sum[t - K] is ready                 2  for t = 1 ... T:
     5      w[t] = w[t - 1] - lr g_sum[t - K]                3      wait until g_local[t] is ready
     7      forward pass of a batch                          4      g_sum[t] = AllReduce(g_local[t])
     8      g_local[t] = backward pass at w[t]               5      g_sum[t] is ready
    10      g_local[t] is ready

Keras updates at the end of a step. So the update of line 5 is that of the step before, and step t applies the gradient
of step t - (K - 1), after its own has been handed out: K = 1 is synchronous training (the paper's D-Sync). We take the
mean over the ranks for the sum. Lines 4 and 9 of the computation thread (the codec) run on the communication thread,
where they are hidden, too.

With L segments (pipelined gradient communication, Figure 2 (b)) the gradients of the last layers are handed out while
back-propagation goes on.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tensorflow as tf

from hop_tf import codecs
from hop_tf.arguments import check_choice, check_integer, identity_of
from hop_tf.collectives import ALGORITHMS, AllReduce
from hop_tf.exchange import Exchange, Incoming, Outgoing
from hop_tf.group import ExchangeContext, Group
from hop_tf.keras_hook import gradient_accumulation_steps, loss_scale, slots_of, unscaled
from hop_tf.options import CommunicationOptions
from hop_tf.packing import Packing
from hop_tf.strategy import ExchangeStrategy, training_cluster

_DRAINS = ("drop", "apply")


class PipeSGDStrategy(ExchangeStrategy):
    """Synchronous training with pipelined all-reduce.

    In step t each rank computes its gradient g_i[t], hands it to the communication thread, and applies the mean of an
    earlier step, which was reduced while it computed:

        w[t + 1] = w[t]  +  the optimizer's step for  (1 / n) sum over i of g_i[t - (K - 1)]

    With `pipeline_width` K = 2 a step takes max(update + compute, communicate) instead of their sum (Equations 2 and
    4); larger widths only make gradients older. K = 1 is synchronous training without a delay. The first K - 1 updates
    use gradients of zero. What is trained is equal to the bit on all ranks at every step.

    Of floating-point variables that are not trained but assigned in the training step before its update (moving
    statistics) the changes are averaged along with the same delay, never through a codec, and not dropped at the end of
    `fit`. Gradients are clipped, where the optimizer clips, before they are averaged (under a `LossScaleOptimizer`,
    after). Sparse gradients (`tf.IndexedSlices`) travel as dense ones.

    When a rank ends early, as by a callback of its own, the others go on without it; before another `fit`,
    `synchronize(model)` makes weights, slots and numbers of steps the same. When one is lost, all raise.

    Args:
      pipeline_width: K, the number of steps that are under way at a time; at least 1. Default 2.
      codec: What gradients are encoded with on their way: a `hop_tf.codecs.Codec`, or a name ("truncate16", "int8",
        "sketch"; `codecs.TopK(error_feedback=True)` for the largest only). It takes float32, bfloat16 and float16;
        gradients of other types travel as they are. Default None.
      num_segments: L, the number of parts that gradients are handed out in, those of the last layers first, so that
        they travel while back-propagation goes on. It costs L times the latency of an all-reduce (Equation 6), and is
        of use with K = 1, where computation takes most of a step: a wider pipe hides communication in any case.
        Default 1.
      warmup_steps: So many updates of the first `fit` after `compile` are made with K = 1: early gradients change
        fast. Default 0.
      algorithm: "mesh" (few messages after each other) or "ring" (few connections). Default "mesh".
      drain: What becomes of the K - 1 means that are not applied when `fit` ends: "drop", or "apply" (`fit` raises
        ValueError where the optimizer has `gradient_accumulation_steps`). Default "drop".
      cluster_resolver: Where the cluster is described. Default: `TF_CONFIG`.
      communication_options: Deadlines, credentials, records. Default: `CommunicationOptions()`.

    Raises:
      TypeError: If `codec` is something else.
      ValueError: If an argument is out of range, or `codec` is a `TopK` without error feedback.
      ClusterConfigError: If the cluster description is not valid.
      HopError: If this rank's address cannot be bound.

    References:
      Li, Yu, Li, Avestimehr, Kim, Schwing. Pipe-SGD: A Decentralized Pipelined SGD Framework for Distributed Deep Net
      Training. NeurIPS 2018. Algorithm 1, Equations 2 to 7.
    """

    def __init__(
        self,
        *,
        pipeline_width: int = 2,
        codec: codecs.Codec | str | None = None,
        num_segments: int = 1,
        warmup_steps: int = 0,
        algorithm: str = "mesh",
        drain: str = "drop",
        cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
    ):
        check_integer("pipeline_width", pipeline_width, at_least=1)
        check_integer("num_segments", num_segments, at_least=1)
        check_integer("warmup_steps", warmup_steps, at_least=0)
        check_choice("algorithm", algorithm, sorted(ALGORITHMS))
        check_choice("drain", drain, _DRAINS)
        codec = codecs.get(codec)
        if isinstance(codec, codecs.TopK) and not codec.error_feedback:
            raise ValueError(
                "`codec` must keep what it does not send: take hop_tf.codecs.TopK(error_feedback=True). Without it all "
                f"but {codec.ratio:.3g} of each gradient's values are lost. Received: codec={codec!r}."
            )
        self._settings = PipeSGDSettings(
            pipeline_width=int(pipeline_width),
            codec=codec,
            num_segments=int(num_segments),
            warmup_steps=int(warmup_steps),
            algorithm=algorithm,
            drain=drain,
        )
        cluster = training_cluster(cluster_resolver, "PipeSGDStrategy")
        super().__init__(
            cluster=cluster,
            cluster_resolver=cluster_resolver,
            communication_options=communication_options,
            identity=identity_of(self._settings),
            neighbors=range(cluster.world_size),
        )

    def _make_exchange(self, context: ExchangeContext) -> PipeSGDExchange:
        every = gradient_accumulation_steps(context.optimizer())
        if self._settings.drain == "apply" and every > 1:
            raise ValueError(
                "`drain` must be 'drop' where the optimizer accumulates gradients: what is applied when `fit` ends "
                "would count as a step of the next update. "
                f"Received: drain='apply', and an optimizer with gradient_accumulation_steps={every}."
            )
        return PipeSGDExchange(context, self._settings)

    def _before_update(self, group: Group, values: Sequence[tf.Tensor], gradients: list) -> tuple[list, None]:
        outgoing = submit_gradients(group, gradients)  # Line 10.

        def take_due(segment: int) -> list[tf.Tensor]:  # Line 3.
            return group.collect(outgoing, segment, lambda t, segment: self._take_due(group, t, segment))[0]

        return take_means(group, take_due), None

    def _after_update(self, group: Group, state: None) -> tf.Tensor:
        return tf.constant(0, tf.int64)

    def _take_due(self, group: Group, t: tf.Tensor, segment: int) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Takes the mean of step t - (K - 1); of t during warm-up; zeros while the pipe fills."""
        delay = self._settings.pipeline_width - 1
        if delay == 0:
            return group.take(t, segment)
        start = group.exchange.pipelined_from
        due = tf.where(t < start, t, t - delay)
        fills = tf.logical_and(t >= start, due < start)
        return tf.cond(fills, lambda: _zeros(group.exchange.parts[segment]), lambda: group.take(due, segment))

    def _common_slots(self, group: Group) -> Sequence[tf.Variable]:
        return list(slots_of(group.optimizer(), group.trained).values())

    def _finish_training(self, group: Group) -> None:
        for t in range(*group.exchange.in_flight(int(group.step))):

            def take(segment: int, t: int = t) -> list[tf.Tensor]:
                buckets, _ = group.take(tf.constant(t, tf.int64), segment)
                return group.exchange.parts[segment].unpack(buckets)

            means = take_means(group, take)
            if self._settings.drain == "apply":
                self._apply(group, means)


def submit_gradients(group: Group, gradients: Sequence) -> list[tf.Tensor]:
    """Hands out gradients, without the loss scale, and the changes of the carried variables; returns all of them."""
    outgoing = [*unscaled(group.optimizer(), gradients), *group.exchange.carried.take()]
    for segment, members in enumerate(group.exchange.members):
        group.submit([outgoing[index] for index in members], segment)
    return outgoing


def take_means(group: Group, take: Callable[[int], Sequence[tf.Tensor]]) -> list[tf.Tensor]:
    """Takes all segments, adds their changes to the carried variables, and returns gradients with the loss scale."""
    means: list = [None] * len(group.variables)
    for segment, members in enumerate(group.exchange.members):
        for index, mean in zip(members, take(segment), strict=True):
            means[index] = mean
    group.exchange.carried.add(means[group.num_trained :])
    means, scale = means[: group.num_trained], loss_scale(group.optimizer())
    return means if scale is None else [mean * tf.cast(scale, mean.dtype) for mean in means]


def _zeros(packing: Packing) -> tuple[list[tf.Tensor], tf.Tensor]:
    buckets = [tf.zeros([size], dtype) for size, dtype in zip(packing.sizes, packing.dtypes, strict=True)]
    return buckets, tf.constant(0, tf.int64)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipeSGDSettings:
    """What `PipeSGDStrategy` was told."""

    pipeline_width: int
    codec: codecs.Codec
    num_segments: int = 1
    warmup_steps: int = 0
    algorithm: str = "mesh"
    drain: str = "drop"


class PipeSGDExchange(Exchange):
    """The communication thread of Algorithm 1, at one rank.

    Args:
      context: Membership, packing and buffers of the group.
      settings: Those of the strategy.
      members: For each segment, the indices of its variables. Default: `num_segments` of about equal size.

    Attributes:
      carried: The changes of the variables that are carried along.
      members: For each segment, the indices of its variables.
      parts: For each segment, the packing of its variables.
      pipelined_from: int64 variable: the first step of the running session that is no warm-up.
    """

    def __init__(
        self, context: ExchangeContext, settings: PipeSGDSettings, members: Sequence[Sequence[int]] | None = None
    ):
        self._group = context.group
        self._membership = context.membership
        self._settings = settings
        self._exact = context.packing.exact
        self.members = members or _segments(context.packing, settings.num_segments)
        self.parts = [context.packing.part(indices) for indices in self.members]
        self.max_in_flight = settings.pipeline_width * len(self.parts)
        self._reductions = [self._make_mean(context, str(segment), part) for segment, part in enumerate(self.parts)]
        self.carried = context.carried
        self._sent_segments = 0
        self._communicate_seconds = 0.0
        with tf.init_scope(), tf.device("/cpu:0"):
            self.pipelined_from = tf.Variable(
                settings.warmup_steps, dtype=tf.int64, trainable=False, name="hop_tf_pipelined_from"
            )

    def _make_mean(self, context: ExchangeContext, name: str, part: Packing) -> AllReduce:
        """Makes what averages a segment."""
        return context.make_all_reduce(name, part, self._settings.codec, self._settings.algorithm)

    def reset(self, session: int) -> None:
        # How many steps each rank has made of a `fit` may differ. That there was one does not.
        self.pipelined_from.assign(0)
        self._sent_segments = 0
        self.carried.reset()
        for reduction in self._reductions:
            reduction.reset(session)

    def step(self, outgoing: Outgoing) -> Incoming:
        t, segment = outgoing.step, outgoing.segment
        number = t * len(self.parts) + segment
        start = time.perf_counter()
        means = self._reductions[segment].mean(  # Line 4.
            t, outgoing.buckets, lambda rank, _: self._membership.delivers(rank, self._group, number)
        )
        for mean, own, exact in zip(means, outgoing.buckets, self._exact, strict=True):
            if exact:  # What the variable has become since then stays.
                mean -= own
        self._sent_segments = number + 1
        self._communicate_seconds += time.perf_counter() - start
        return Incoming(t, segment, tuple(means))

    def neutral(self, outgoing: Outgoing) -> Incoming:
        return Incoming(outgoing.step, outgoing.segment, tuple(np.zeros_like(values) for values in outgoing.buckets))

    def in_flight(self, num_steps: int) -> tuple[int, int]:
        """The steps, from the first to before the last, whose means were not taken when so many steps were made."""
        delay = self._settings.pipeline_width - 1
        return max(num_steps - delay, min(int(self.pipelined_from), num_steps)), num_steps

    @property
    def sent_steps(self) -> int:
        return self._sent_segments

    def counters(self) -> Mapping[str, float]:
        """Where the communication thread's time goes.

        Returns:
          `communicate_seconds`, spent in all-reduce, and `codec_seconds`, the part of it spent on encoding, decoding
          and adding.
        """
        return {
            "communicate_seconds": self._communicate_seconds,
            "codec_seconds": sum(reduction.codec_seconds for reduction in self._reductions),
        }

    def close(self) -> None:
        for reduction in self._reductions:
            reduction.close()


def _segments(packing: Packing, num_segments: int) -> list[list[int]]:
    """Divides the tensors, the last ones first, into so many parts of about equal size; fewer if there are fewer."""
    num_bytes = [spec.num_elements * spec.dtype.size for spec in packing.specs]
    total, before = sum(num_bytes), 0
    segments: dict[int, list[int]] = {}
    # Untrained variables come last in a step.
    trained = [index for index, spec in enumerate(packing.specs) if not spec.exact]
    for index in reversed(trained):
        middle = before + num_bytes[index] / 2
        segments.setdefault(min(num_segments - 1, int(num_segments * middle / max(1, total))), []).append(index)
        before += num_bytes[index]
    parts = list(segments.values())
    parts[-1].extend(index for index, spec in enumerate(packing.specs) if spec.exact)
    return parts

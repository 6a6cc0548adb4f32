"""`PipeSGDExchange`: the communication thread of Pipe-SGD."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf

from hop_tf import codecs
from hop_tf.collectives import AllReduce
from hop_tf.keras_hook.optimizers import has_schedule, weight_decays
from hop_tf.runtime.exchange import Exchange, Incoming, Outgoing
from hop_tf.runtime.group import ExchangeContext
from hop_tf.runtime.rates import CommonRate
from hop_tf.runtime.replay import Replay
from hop_tf.tensors.packing import Packing


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipeSGDSettings:
    """What `PipeSGDStrategy` was told."""

    pipeline_width: int
    codec: codecs.Codec
    num_segments: int = 1
    warmup_steps: int = 0
    algorithm: str = "mesh"
    compensation: str = "replay"

    @property
    def delay(self) -> int:
        """How many steps late a mean is merged."""
        return self.pipeline_width - 1

    @property
    def replays(self) -> bool:
        """Whether own gradients stand in for means that are under way."""
        return self.delay > 0 and self.compensation == "replay"


class PipeSGDExchange(Exchange):
    """The communication thread of Algorithm 1, at one rank.

    Args:
      context: Membership, packing and buffers of the group.
      settings: Those of the strategy.
      members: For each segment, the indices of its variables. Default: `num_segments` of about equal size.

    Attributes:
      carried: The changes of the variables that are carried along.
      rate: The learning rate, which travels beside.
      replay: What a rank computes with; None where that is what is merged.
      delay: K - 1.
      members: For each segment, the indices of its variables.
      parts: For each segment, the packing of its variables.
      pipelined_from: int64 variable: the step of the running session with which the pipe began to fill.
    """

    def __init__(
        self, context: ExchangeContext, settings: PipeSGDSettings, members: Sequence[Sequence[int]] | None = None
    ):
        self._group = context.group
        self._membership = context.membership
        self._settings = settings
        self._exact = context.packing.exact
        self.delay = settings.delay
        self.members = members or _segments(context.packing, settings.num_segments)
        self.parts = [context.packing.part(indices) for indices in self.members]
        self.max_in_flight = settings.pipeline_width * len(self.parts)
        self._reductions = [self._make_mean(context, str(segment), part) for segment, part in enumerate(self.parts)]
        self.carried = context.carried
        optimizer, trained = context.optimizer(), context.trained
        self.replay = Replay(optimizer, trained, settings.delay) if settings.replays else None
        # Else weights have decayed by the own rate, or were computed with it.
        is_late = settings.replays or (settings.delay == 0 and not any(weight_decays(optimizer, trained)))
        adopts = is_late and not has_schedule(optimizer)
        self.rate = CommonRate(self._membership.rank, self._membership.world_size, adopts=adopts)
        self._rate_segment, self._rate_place = self._place_of(len(context.packing.specs) - 1)
        self._sent_segments = 0
        self._communicate_seconds = 0.0
        with tf.init_scope(), tf.device("/cpu:0"):
            self.pipelined_from = tf.Variable(
                settings.warmup_steps, dtype=tf.int64, trainable=False, name="hop_tf_pipelined_from"
            )

    def _make_mean(self, context: ExchangeContext, name: str, part: Packing) -> AllReduce:
        """Makes what averages a segment."""
        return context.make_all_reduce(name, part, self._settings.codec, self._settings.algorithm)

    def _place_of(self, index: int) -> tuple[int, tuple[int, slice]]:
        """The segment of a tensor, its bucket there, and where it lies in that."""
        segment = next(number for number, members in enumerate(self.members) if index in members)
        return segment, self.parts[segment].place(list(self.members[segment]).index(index))

    def begin_pipe(self, step: int) -> None:
        """Nothing is under way: what variables and slots are now is merged."""
        if self.replay is not None:
            self.pipelined_from.assign(step)
            self.replay.begin()

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
        if segment == self._rate_segment:
            bucket, where = self._rate_place
            self.rate.check(means[bucket][where], t)
        self._sent_segments = number + 1
        self._communicate_seconds += time.perf_counter() - start
        return Incoming(t, segment, tuple(means))

    def neutral(self, outgoing: Outgoing) -> Incoming:
        return Incoming(outgoing.step, outgoing.segment, tuple(np.zeros_like(values) for values in outgoing.buckets))

    def in_flight(self, num_steps: int) -> range:
        """The steps whose means were not taken when so many steps were made."""
        return range(max(num_steps - self.delay, min(int(self.pipelined_from), num_steps)), num_steps)

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

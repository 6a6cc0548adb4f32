"""`AveragingExchange`: a scheme whose ranks average what they hand out."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np

from hop_tf.codecs import Codec, Identity
from hop_tf.collectives import AllReduce
from hop_tf.runtime.exchange import Exchange, Incoming, Outgoing
from hop_tf.runtime.group import ExchangeContext


class AveragingExchange(Exchange):
    """Averages what each step hands out over the ranks that take part in it, by all-reduce.

    What comes back for a step is the mean of its buckets. A rank that has left is not waited for; the mean is then that
    of the others. `counters` has `communicate_seconds`, spent in all-reduce, and `codec_seconds`, the part of it spent
    on encoding, decoding and adding.

    Args:
      context: Membership, packing and buffers of the group.
      reductions: What averages; a scheme may take turns with several. Default: one, of `context.packing`.
      codec: What the default one encodes with. Default: nothing.
      algorithm: That of the default one; see `hop_tf.collectives.get_algorithm`. Default "mesh".
    """

    def __init__(
        self,
        context: ExchangeContext,
        reductions: Sequence[AllReduce] | None = None,
        *,
        codec: Codec | None = None,
        algorithm: str = "mesh",
    ):
        self._group = context.group
        self._membership = context.membership
        self._reductions = reductions or [
            context.make_all_reduce("mean", context.packing, codec or Identity(), algorithm)
        ]
        self._communicate_seconds = [0.0] * len(self._reductions)
        self._sent_rounds = 0

    def reset(self, session: int) -> None:
        self._sent_rounds = 0
        for reduction in self._reductions:
            reduction.reset(session)

    def step(self, outgoing: Outgoing) -> Incoming:
        means = self.mean(outgoing.step, outgoing.buckets)
        return Incoming(outgoing.step, outgoing.segment, tuple(means))

    def mean(
        self,
        number: int,
        buckets: Sequence[np.ndarray],
        *,
        turn: int | None = None,
        reduction: int = 0,
        **arguments,
    ) -> list[np.ndarray]:
        """The mean of these buckets over the ranks.

        Args:
          number: Of the round: how many times this rank has called before.
          buckets: The buckets.
          turn: How many means the reduction has made before. Default: `number`.
          reduction: Which one averages.
          **arguments: Further ones of `AllReduce.mean`.

        Returns:
          An array for each bucket, which the caller may write to.

        Blocks: until all ranks that take part have handed out theirs.
        """
        start = time.perf_counter()
        means = self._reductions[reduction].mean(
            number if turn is None else turn,
            buckets,
            lambda rank, _: self._membership.delivers(rank, self._group, number),
            **arguments,
        )
        self._communicate_seconds[reduction] += time.perf_counter() - start
        with self._membership.monitor:
            self._sent_rounds = max(self._sent_rounds, number + 1)
        return means

    def no_op(self, outgoing: Outgoing) -> Incoming:
        """This rank's own buckets, as if it were alone."""
        return Incoming(outgoing.step, outgoing.segment, tuple(map(np.array, outgoing.buckets)))

    @property
    def sent_rounds(self) -> int:
        return self._sent_rounds

    def counters(self) -> Mapping[str, float]:
        return {
            "communicate_seconds": sum(self._communicate_seconds),
            "codec_seconds": sum(reduction.codec_seconds for reduction in self._reductions),
        }

    def settle(self, deadline: float) -> None:
        for reduction in self._reductions:
            reduction.settle(deadline)

    def close(self) -> None:
        for reduction in self._reductions:
            reduction.close()

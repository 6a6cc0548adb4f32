"""`AveragingExchange`: a scheme whose ranks average what they hand out."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence

import numpy as np

from hop_tf.codecs import Codec, Identity
from hop_tf.collectives import AllReduce
from hop_tf.runtime.admissions import Admissions
from hop_tf.runtime.exchange import Exchange, Incoming, Outgoing
from hop_tf.runtime.group import ExchangeContext
from hop_tf.runtime.joiner import LockStepJoiner
from hop_tf.tensors import payloads


class AveragingExchange(Exchange, LockStepJoiner):
    """Averages what each step hands out over the ranks that take part in it, by all-reduce.

    What comes back for a step is the mean of its buckets. A rank that has left is not waited for; the mean is then that
    of the others. `counters` has `communicate_seconds`, spent in all-reduce, and `codec_seconds`, the part of it spent
    on encoding, decoding and adding.

    Args:
      context: Membership, packing and buffers of the group.
      reductions: What averages; a scheme may take turns with several. Default: one, of `context.packing`.
      codec: What the default one encodes with. Default: nothing.
      algorithm: That of the default one; see `hop_tf.collectives.get_algorithm`. Default "mesh".
      admissions: Who takes part from which step on, where ranks that were started again do. Default: they do not.
      votes_place: In which bucket their votes travel, and where there; see `Admissions.spec`.
      lead: So many steps after the one in whose mean all ranks know of a newcomer it takes part. Default 1.
    """

    def __init__(
        self,
        context: ExchangeContext,
        reductions: Sequence[AllReduce] | None = None,
        *,
        codec: Codec | None = None,
        algorithm: str = "mesh",
        admissions: Admissions | None = None,
        votes_place: tuple[int, slice] | None = None,
        lead: int = 1,
    ):
        self.admissions = admissions
        self.roster = context.roster
        self._votes_place = votes_place
        self._lead = lead
        self._group = context.group
        self._membership = context.membership
        self._reductions = reductions or [
            context.make_all_reduce("mean", context.packing, codec or Identity(), algorithm)
        ]
        self._communicate_seconds = [0.0] * len(self._reductions)
        self._sent_rounds = self._num_decided = 0

    def reset(self, session: int) -> None:
        self._sent_rounds = self._num_decided = 0
        for reduction in self._reductions:
            reduction.reset(session)
        if self.admissions is not None:
            self.admissions.reset(session)

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
        decides_of: int | None = None,
        **arguments,
    ) -> list[np.ndarray]:
        """The mean of these buckets over the ranks.

        Args:
          number: Of the round: how many times this rank has called before.
          buckets: The buckets.
          turn: How many means the reduction has made before. Default: `number`.
          reduction: Which one averages.
          decides_of: `Outgoing.step` of the values beside which ranks hand out what they decide by, such as votes; see
            `decide`. Default: nothing is decided.
          **arguments: Further ones of `AllReduce.mean`.

        Returns:
          An array for each bucket, which the caller may write to.

        Blocks: until all ranks that take part have handed out theirs.
        """
        start = time.perf_counter()
        if decides_of is not None and self.admissions is not None:
            buckets = with_values(buckets, self._votes_place, self.admissions.votes())
        means = self._reductions[reduction].mean(
            number if turn is None else turn,
            buckets,
            lambda rank, _: self._takes_part(rank, number),
            **arguments,
        )
        self._communicate_seconds[reduction] += time.perf_counter() - start
        with self._membership.monitor:
            self._sent_rounds = max(self._sent_rounds, number + 1)
        if decides_of is not None:
            # Several may be under way.
            self._membership.wait_until(lambda: self._num_decided >= decides_of, timeout_seconds=math.inf)
            self.decide(decides_of, means)
            with self._membership.monitor:
                self._num_decided = decides_of + 1
                self._membership.monitor.notify_all()
        return means

    def decide(self, number: int, means: Sequence[np.ndarray]) -> None:
        """Decides by the mean of what ranks have handed out for it, and puts the result in its place: admits newcomers.

        Called in the order of `Outgoing.step`, which is the number.
        """
        if self.admissions is not None:
            bucket, where = self._votes_place
            decided = self.admissions.decide(
                means[bucket][where], self.steps_of(number).start, lambda: self.choose_meeting(number)
            )
            means[bucket][where] = decided.ravel()

    def choose_meeting(self, number: int) -> int:
        """The step before which all ranks meet those whom they admit by the mean of this number."""
        return self.steps_of(number).start + self._lead

    def _takes_part(self, rank: int, number: int) -> bool:
        if self.admissions is not None:
            return self.admissions.takes_part(rank, number)
        return self._membership.delivers(rank, self._group, number)

    # Ranks that join late.

    def begin_at(self, step: int) -> None:
        self._num_decided = self.number_of(step)
        self._sent_rounds = self._num_decided * max(1, len(self.parts))
        for reduction in self._reductions:
            reduction.begin_at(step)

    def common_state(self) -> list[np.ndarray]:
        return [self.admissions.table(), *(payloads.joined(each.common_state()) for each in self._reductions)]

    def take_common_state(self, parts: Sequence[np.ndarray]) -> None:
        table, *of_reductions = parts
        self.admissions.take_table(table)
        for reduction, part in zip(self._reductions, of_reductions, strict=True):
            reduction.take_common_state(payloads.split(part))

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
        if self.admissions is not None:
            self.admissions.close()
        for reduction in self._reductions:
            reduction.close()


def with_values(buckets: Sequence[np.ndarray], place: tuple[int, slice], values: np.ndarray) -> list[np.ndarray]:
    """The buckets with these values in one place, as `Packing.place` tells it. A bucket without it is not copied."""
    buckets, (bucket, where) = list(buckets), place
    buckets[bucket] = buckets[bucket].copy()
    buckets[bucket][where] = values.ravel()
    return buckets

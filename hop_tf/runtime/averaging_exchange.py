"""`AveragingExchange`: a scheme whose ranks average the values of each step."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence

import numpy as np

from hop_tf.codecs import Codec, Identity
from hop_tf.collectives.mean import Mean
from hop_tf.runtime.admissions import Admissions, LockStepJoiner
from hop_tf.runtime.exchange import Exchange, Request, Result
from hop_tf.runtime.group import ExchangeContext
from hop_tf.tensors import payloads


class AveragingExchange(Exchange, LockStepJoiner):
    """Averages the buckets of each step over the ranks that take part in it, by all-reduce.

    The result of a step is the mean of its buckets. Ranks do not wait for a rank that has left. The mean is then that
    of the others. `counters` has `communicate_seconds`, spent in all-reduce, and `codec_seconds`, the part of it spent
    on encoding, decoding and adding.

    Args:
      context: Membership, packing and buffers of the group.
      reductions: The means to use. Default: one, for `context.packing`.
      codec: The codec of the default all-reduce. Default: no encoding.
      algorithm: The algorithm of the default all-reduce; see `hop_tf.collectives.get_algorithm`. Default "mesh".
      admissions: Admits ranks that were started again. Default: they do not take part.
      votes_place: The bucket of the votes, and their slice in it; see `Admissions.spec`.
      lead: Number of steps from the mean in which all ranks know a newcomer to the newcomer's first step. Default 1.
    """

    def __init__(
        self,
        context: ExchangeContext,
        reductions: Sequence[Mean] | None = None,
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

    def step(self, request: Request) -> Result:
        means = self.mean(request.step, request.buckets)
        return Result(request.step, request.segment, tuple(means))

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
          number: Number of the round: the number of this rank's earlier calls.
          buckets: The buckets.
          turn: The number of earlier means of the reduction. Default: `number`.
          reduction: Index of the reduction.
          decides_of: `Request.step` of the values, if votes or the like travel with them; see `decide`. Default: there
            is nothing to decide.
          **arguments: Further arguments of `Mean.mean`.

        Returns:
          An array for each bucket, which the caller may write to.

        Blocks: until all ranks that take part have sent their buckets.
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
            # Several means may be in flight.
            self._membership.wait_until(lambda: self._num_decided >= decides_of, timeout_seconds=math.inf)
            self.decide(decides_of, means)
            with self._membership.monitor:
                self._num_decided = decides_of + 1
                self._membership.monitor.notify_all()
        return means

    def decide(self, number: int, means: Sequence[np.ndarray]) -> None:
        """Admits newcomers by the mean of the ranks' votes, and replaces the votes in `means` by the decision.

        Called in the order of `number`, which is `Request.step`.
        """
        if self.admissions is not None:
            bucket, where = self._votes_place
            decided = self.admissions.decide(
                means[bucket][where], self.steps_of(number).start, lambda: self.choose_meeting(number)
            )
            means[bucket][where] = decided.ravel()

    def choose_meeting(self, number: int) -> int:
        """The step before which all ranks meet the newcomers that the mean with this number admits."""
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

    def no_op(self, request: Request) -> Result:
        """This rank's own buckets, as if it were alone."""
        return Result(request.step, request.segment, tuple(map(np.array, request.buckets)))

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
    """The buckets with these values at one place: see `Packing.place`. Only that bucket is copied."""
    buckets, (bucket, where) = list(buckets), place
    buckets[bucket] = buckets[bucket].copy()
    buckets[bucket][where] = values.ravel()
    return buckets

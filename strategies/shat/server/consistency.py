"""Consistency of a parameter server: when it applies a worker's push, and when it answers."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Collection, Mapping

from hop_tf.arguments import check_choice, check_integer


class Consistency(abc.ABC):
    """The rule by which a server applies and answers the pushes of workers.

    No method waits. A server asks again after every push, and after a worker has left.
    """

    @staticmethod
    def make(consistency: str, max_staleness: int) -> Consistency:
        """Returns the rule for the arguments of the strategy.

        Args:
          consistency: "async" (ASP), "ssp" or "bsp".
          max_staleness: The most pushes that a worker may be ahead with "ssp", at least 0.

        Raises:
          ValueError: If an argument has another value.
        """
        check_choice("consistency", consistency, ("async", "ssp", "bsp"))
        check_integer("max_staleness", max_staleness, at_least=0)
        if consistency == "ssp":
            return StaleSynchronous(max_staleness)
        return Asynchronous() if consistency == "async" else BulkSynchronous()

    @abc.abstractmethod
    def to_apply(self, pushed: Collection[int], clocks: Mapping[int, int]) -> Collection[int]:
        """Returns the workers whose pushes are to be applied now, as their mean. Empty if it is not yet time.

        Args:
          pushed: The workers whose pushes are there and not yet applied.
          clocks: For each worker that takes part, the number of its pushes that were applied.
        """

    @abc.abstractmethod
    def may_answer(self, worker: int, clocks: Mapping[int, int]) -> bool:
        """True if a worker whose last push was applied may be answered.

        Args:
          worker: The worker, which takes part.
          clocks: For each worker that takes part, the number of its pushes that were applied.
        """


@dataclasses.dataclass(frozen=True)
class Asynchronous(Consistency):
    """Each push is applied and answered at once (ASP, Hogwild)."""

    def to_apply(self, pushed: Collection[int], clocks: Mapping[int, int]) -> Collection[int]:
        return pushed

    def may_answer(self, worker: int, clocks: Mapping[int, int]) -> bool:
        return True


@dataclasses.dataclass(frozen=True)
class StaleSynchronous(Consistency):
    """Each push is applied at once. A worker more than `max_staleness` pushes ahead of the slowest one waits.

    Args:
      max_staleness: s, in pushes.

    References:
      Ho et al. More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server. NIPS 2013.
    """

    max_staleness: int

    def to_apply(self, pushed: Collection[int], clocks: Mapping[int, int]) -> Collection[int]:
        return pushed

    def may_answer(self, worker: int, clocks: Mapping[int, int]) -> bool:
        return clocks[worker] - min(clocks.values()) <= self.max_staleness


@dataclasses.dataclass(frozen=True)
class BulkSynchronous(Consistency):
    """The mean of all workers' pushes is applied as soon as all are there (PS-Sync).

    Clocks differ only if a server goes on from a snapshot that lacks an update to which some workers already had
    answers. The other workers then repeat their pushes of that update. The workers ahead wait for the next update.
    """

    def to_apply(self, pushed: Collection[int], clocks: Mapping[int, int]) -> Collection[int]:
        least = min(clocks.values(), default=0)
        due = {worker for worker, clock in clocks.items() if clock == least}
        return due if due <= set(pushed) else ()

    def may_answer(self, worker: int, clocks: Mapping[int, int]) -> bool:
        return True

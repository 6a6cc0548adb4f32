"""How far workers of a parameter server may be apart: when it applies a push, and when it answers."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Collection, Mapping

from hop_tf.arguments import check_choice, check_integer


class Consistency(abc.ABC):
    """When a server applies the pushes of workers, and when it answers them.

    Nothing here waits: a server looks again after every push, and whenever a worker has left.
    """

    @staticmethod
    def make(consistency: str, max_staleness: int) -> Consistency:
        """The policy that arguments of the strategy stand for.

        Args:
          consistency: "async" (ASP), "ssp" or "bsp".
          max_staleness: That of "ssp", in pushes, at least 0.

        Raises:
          ValueError: If they are something else.
        """
        check_choice("consistency", consistency, ("async", "ssp", "bsp"))
        check_integer("max_staleness", max_staleness, at_least=0)
        if consistency == "ssp":
            return StaleSynchronous(max_staleness)
        return Asynchronous() if consistency == "async" else BulkSynchronous()

    @abc.abstractmethod
    def to_apply(self, pushed: Collection[int], clocks: Mapping[int, int]) -> Collection[int]:
        """Whose pushes to apply now, by their mean; nobody's if it is not yet time.

        Args:
          pushed: Whose pushes are there and not yet applied.
          clocks: How many pushes of each worker that takes part were applied.
        """

    @abc.abstractmethod
    def may_answer(self, worker: int, clocks: Mapping[int, int]) -> bool:
        """Whether to answer a worker whose last push was applied.

        Args:
          worker: The worker, which takes part.
          clocks: How many pushes of each worker that takes part were applied.
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
    """Each push is applied at once; a worker more than `max_staleness` pushes ahead of the slowest one waits.

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
    """The mean of all workers' pushes is applied at once when all are there (PS-Sync).

    Clocks differ only where a server goes on from a snapshot that lacks an update which it had answered to some. The
    others then repeat their pushes of that update, and those that are ahead wait for the next one.
    """

    def to_apply(self, pushed: Collection[int], clocks: Mapping[int, int]) -> Collection[int]:
        least = min(clocks.values(), default=0)
        due = {worker for worker, clock in clocks.items() if clock == least}
        return due if due <= set(pushed) else ()

    def may_answer(self, worker: int, clocks: Mapping[int, int]) -> bool:
        return True

"""Recv and Reduce of Hop: which updates an iteration waits for, which it uses, and how much each of them counts.

`TaggedReception` is Figure 7 and, with backup workers, Figure 8; `NewestReception` is Figure 9 (bounded staleness) and,
with backup workers too, the hybrid. Both are called with the rank's monitor held, and never block.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence

from hop_tf.runtime.group import ExchangeContext
from hop_tf.strategies.hop.settings import HopSettings
from hop_tf.tensors.fifo import NewestUpdates, Update, UpdateQueue


class Reception(abc.ABC):
    """Updates on their way into iterations.

    Attributes:
      num_late: Updates dropped unused, because the rank was further when they came.
    """

    num_late = 0

    @abc.abstractmethod
    def put(self, update: Update) -> None:
        """Takes an update that has arrived; drops it where it comes too late for any iteration."""

    @abc.abstractmethod
    def missing(self, k: int, delivers: Callable[[int, int], bool]) -> list[int]:
        """The ranks that iteration k still waits for; empty if what is here will do.

        Args:
          k: The iteration.
          delivers: `delivers(j, iteration)`: whether rank j's updates up to that iteration have come or may still come.
        """

    @abc.abstractmethod
    def take(self, k: int) -> tuple[list[Update], list[float]]:
        """The updates that iteration k uses, in the order of their senders, and their weights.

        The rank's own parameters have the weight that is left to 1. What comes for iterations up to k is late now.
        """

    @abc.abstractmethod
    def take_newest(self, k: int, own_counts: bool) -> tuple[list[Update], list[float]]:
        """As `take` of the iteration before k, where in-neighbors may be further ahead than they are meant to be.

        Args:
          k: The iteration that follows. What is here for it stays.
          own_counts: Whether the rank's own parameters count: not where they are far too old.
        """

    @abc.abstractmethod
    def skip_to(self, k: int) -> None:
        """Drops what only iterations before k could use."""

    @abc.abstractmethod
    def forget(self, sender: int, newest: int) -> None:
        """Drops what is here of `sender`, which was started again; iterations up to `newest` need nothing of it."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """Updates in memory."""


class TaggedReception(Reception):
    """Updates of iteration k itself, from all in-neighbors but `num_backup_workers`; more, where they are there.

    Where this rank has no backup workers, each has its weight of the mixing matrix; the weight of a neighbor that has
    ended goes to the rank itself. Else what was received counts alike, the own parameters included (Figure 8).

    Args:
      settings: Of Hop.
      weights: The mixing matrix's column, by sender, without the rank itself.
      context: Packing and queues of the group.
    """

    def __init__(self, settings: HopSettings, weights: Mapping[int, float], context: ExchangeContext):
        self._weights = weights
        self._num_backup_workers = settings.num_backup_workers_of(context.membership.rank)
        self._queue = UpdateQueue(
            dtypes=context.packing.dtypes,
            num_senders=len(weights),
            max_iteration_gap=settings.gap,
            make_fifo=context.make_fifo,
        )
        self._next = 0  # The first iteration that has not been reduced.
        self._newest: dict[int, int] = {}  # Of what each sender has sent, dropped or not.
        self._gap = settings.gap
        # The newest update of each sender that is further ahead than the gap: it did not hear of this rank.
        self._far: dict[int, Update] = {}

    def put(self, update: Update) -> None:
        self._newest[update.sender] = update.iteration
        if update.iteration < self._next:
            self.num_late += 1
        elif update.iteration > self._next + self._gap:
            self.num_late += update.sender in self._far
            self._far[update.sender] = update
        else:
            self._queue.enqueue(update)

    def missing(self, k: int, delivers: Callable[[int, int], bool]) -> list[int]:
        here = self._queue.senders(k)
        absent = [j for j in self._weights if j not in here and not self._is_past(j, k) and delivers(j, k)]
        return absent if len(absent) > self._num_backup_workers else []

    def _is_past(self, j: int, k: int) -> bool:
        """Whether rank j will not send an update of iteration k any more: it has jumped over it."""
        return self._newest.get(j, -1) > k

    def take(self, k: int) -> tuple[list[Update], list[float]]:
        updates = self._queue.dequeue(k)
        self._next = k + 1
        self._bring_near()
        if self._num_backup_workers:
            return updates, [1 / (len(updates) + 1)] * len(updates)
        return updates, [self._weights[update.sender] for update in updates]

    def take_newest(self, k: int, own_counts: bool) -> tuple[list[Update], list[float]]:
        far, self._far = self._far, {}
        self.skip_to(k - 1)
        updates, _ = self.take(k - 1)
        for update in far.values():
            if update.iteration >= k:
                self.put(update)
        updates = list({**{update.sender: update for update in updates}, **far}.values())
        return updates, _equal_weights(len(updates), own_counts)

    def skip_to(self, k: int) -> None:
        self._next = k
        self.num_late += self._queue.drop_older(k)
        self._bring_near()

    def _bring_near(self) -> None:
        """Updates that were too far ahead may be of one of the next iterations by now."""
        if self._far:
            far, self._far = self._far, {}
            for update in far.values():
                self.put(update)

    def forget(self, sender: int, newest: int) -> None:
        self._newest.pop(sender, None)
        self._queue.drop_sender(sender)
        self._far.pop(sender, None)

    def __len__(self) -> int:
        return len(self._queue) + len(self._far)


class NewestReception(Reception):
    """The newest update of every in-neighbor, if it came since the last Reduce and is at most `max_staleness` old.

    Waits while the newest update ever received from more than `num_backup_workers` neighbors is older than that.
    Weights are those of Equation 2: iteration - (k - max_staleness) + 1 over their sum, where the rank's own parameters
    are of iteration k.

    Figure 9, line 6, would wait for a new update of every neighbor in every iteration, as max(size, 1) never is 0;
    section 4.4 asks for an update within the bound, "either received in the current iteration or in previous ones".

    Args:
      settings: Of Hop.
      senders: The in-neighbors.
      context: Packing and queues of the group.
    """

    def __init__(self, settings: HopSettings, senders: Sequence[int], context: ExchangeContext):
        self._max_staleness = settings.max_staleness
        self._num_backup_workers = settings.num_backup_workers_of(context.membership.rank)
        self._queue = NewestUpdates(dtypes=context.packing.dtypes, senders=senders, make_fifo=context.make_fifo)

    def put(self, update: Update) -> None:
        self.num_late += self._queue.enqueue(update)

    def missing(self, k: int, delivers: Callable[[int, int], bool]) -> list[int]:
        oldest = k - self._max_staleness
        stale = [j for j, newest in self._queue.newest.items() if newest < oldest and delivers(j, oldest)]
        return stale if len(stale) > self._num_backup_workers else []

    def take(self, k: int) -> tuple[list[Update], list[float]]:
        oldest = k - self._max_staleness
        received = self._queue.dequeue()
        updates = [update for update in received if update.iteration >= oldest]
        self.num_late += len(received) - len(updates)
        shares = [update.iteration - oldest + 1 for update in updates]
        total = sum(shares) + self._max_staleness + 1
        return updates, [share / total for share in shares]

    def take_newest(self, k: int, own_counts: bool) -> tuple[list[Update], list[float]]:
        updates = self._queue.dequeue()
        return updates, _equal_weights(len(updates), own_counts)

    def skip_to(self, k: int) -> None:
        """Nothing: `take` looks at the iterations."""

    def forget(self, sender: int, newest: int) -> None:
        self._queue.drop_sender(sender, newest)

    def __len__(self) -> int:
        return len(self._queue)


def _equal_weights(num_updates: int, own_counts: bool) -> list[float]:
    return [1 / max(1, num_updates + own_counts)] * num_updates


def make_reception(settings: HopSettings, weights: Mapping[int, float], context: ExchangeContext) -> Reception:
    """The one that the settings ask for. `weights` is the mixing matrix's column without the rank itself."""
    if settings.max_staleness:
        return NewestReception(settings, list(weights), context)
    return TaggedReception(settings, weights, context)

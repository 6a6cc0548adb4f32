"""Recv and Reduce of Hop: the updates that an iteration waits for, those that it uses, and their weights.

`TaggedReception` is Figure 7 and, with backup workers, Figure 8. `NewestReception` is Figure 9 (bounded staleness) and,
with backup workers too, the hybrid. Callers must hold the rank's monitor. No method blocks.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence

from hop_tf.runtime.group import ExchangeContext
from hop_tf.strategies.hop.settings import HopSettings
from hop_tf.tensors.fifo import NewestUpdates, Update, UpdateQueue


class Reception(abc.ABC):
    """The updates that were received and not yet used.

    Attributes:
      num_late: The number of updates that were dropped unused, because the rank was further ahead when they came.
    """

    num_late = 0

    @abc.abstractmethod
    def put(self, update: Update) -> None:
        """Takes an update that has arrived. Drops it if it is too late for any iteration."""

    @abc.abstractmethod
    def missing(self, k: int, delivers: Callable[[int, int], bool]) -> list[int]:
        """The ranks that iteration k still waits for. Empty if the updates here are enough.

        Args:
          k: The iteration.
          delivers: `delivers(j, iteration)` returns True if rank j's updates up to that iteration have come or can
            still come.
        """

    @abc.abstractmethod
    def take(self, k: int) -> tuple[list[Update], list[float]]:
        """Takes the updates that iteration k uses, in the order of their senders, and their weights.

        The weight of the rank's own parameters is 1 minus the sum of these weights. Updates of iterations up to k that
        come later count as late.
        """

    @abc.abstractmethod
    def take_newest(self, k: int, own_counts: bool) -> tuple[list[Update], list[float]]:
        """Takes the updates as `take(k - 1)` does, and those of in-neighbors that are further ahead than the bound.

        Args:
          k: The next iteration. Its updates stay here.
          own_counts: True if the rank's own parameters count. False if they are far too old.
        """

    @abc.abstractmethod
    def skip_to(self, k: int) -> None:
        """Drops updates that only iterations before k could use."""

    @abc.abstractmethod
    def forget(self, sender: int, newest: int) -> None:
        """Drops the updates of `sender`, which was started again. Iterations up to `newest` need no update of it."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """The number of updates in memory."""


class TaggedReception(Reception):
    """Uses updates of iteration k itself, from all in-neighbors except up to `num_backup_workers`.

    If this rank has no backup workers, each update has its weight from the mixing matrix. The weight of a neighbor that
    has ended goes to the rank itself. With backup workers, all received updates and the rank's own parameters have
    equal weights (Figure 8).

    Args:
      settings: The settings of Hop.
      weights: This rank's column of the mixing matrix, by sender, without the rank itself.
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
        self._newest: dict[int, int] = {}  # The iteration of each sender's newest update, dropped or not.
        self._gap = settings.gap
        # The newest update of each sender that is further ahead than the gap, because the sender did not hear from this
        # rank.
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
        """True if rank j has jumped over iteration k, and will send no update of it."""
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
        """Calls `put` again with the updates that were too far ahead: by now they may be near enough."""
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
    """Uses the newest update of each in-neighbor, if it came since the last Reduce and is at most `max_staleness` old.

    Waits while more than `num_backup_workers` neighbors have sent no update that is new enough. Weights are those of
    Equation 2: iteration - (k - max_staleness) + 1, divided by their sum. The rank's own parameters are of iteration k.

    Figure 9, line 6, would wait for a new update of every neighbor in every iteration, because max(size, 1) is never 0.
    Section 4.4 asks for an update within the bound, "either received in the current iteration or in previous ones".

    Args:
      settings: The settings of Hop.
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
        """Does nothing, because `take` looks at the iterations of updates."""

    def forget(self, sender: int, newest: int) -> None:
        self._queue.drop_sender(sender, newest)

    def __len__(self) -> int:
        return len(self._queue)


def _equal_weights(num_updates: int, own_counts: bool) -> list[float]:
    return [1 / max(1, num_updates + own_counts)] * num_updates


def make_reception(settings: HopSettings, weights: Mapping[int, float], context: ExchangeContext) -> Reception:
    """Returns the reception that the settings ask for. `weights` are as for `TaggedReception`."""
    if settings.max_staleness:
        return NewestReception(settings, list(weights), context)
    return TaggedReception(settings, weights, context)

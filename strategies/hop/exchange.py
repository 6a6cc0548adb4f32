"""The communication of Hop at one rank. See `hop_tf.strategies.hop`, whose line numbers are cited here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from hop_tf.errors import HopError, ProtocolError
from hop_tf.membership.session_queue import SessionQueue
from hop_tf.runtime.exchange import Exchange, Request, Result
from hop_tf.runtime.group import ExchangeContext
from hop_tf.runtime.joiner import Joiner
from hop_tf.strategies.hop.absence import Absence
from hop_tf.strategies.hop.arithmetic import weighted_differences
from hop_tf.strategies.hop.pacing import ITERATION, make_pacing
from hop_tf.strategies.hop.reception import make_reception
from hop_tf.strategies.hop.settings import HopSettings
from hop_tf.tensors.fifo import Update
from hop_tf.topology import Topology
from hop_tf.transport.base import BULK_LANE, Message

# Segments of a step: its start, the arrival of its gradient (only if stragglers are tolerated), and the renewal before
# a jump.
STEP, REDUCTION, RENEWAL = 0, 1, 2


class HopExchange(Exchange, Joiner):
    """The communication of Figure 7 at one rank, with Recv and Reduce of Figure 8 or 9 and the jumps of section 5.

    If a rank waits for all updates, the time of Recv and Reduce does not matter. They then overlap with the
    computation, and the segment `STEP` returns their result. If stragglers are tolerated, Recv and Reduce come after
    the gradient, as in the figures (`REDUCTION`). By then more updates have come, and a rank knows how far it has
    fallen behind.

    Args:
      context: Membership, packing and buffers of the group.
      topology: The communication graph.
      settings: The mechanisms.
    """

    def __init__(self, context: ExchangeContext, *, topology: Topology, settings: HopSettings):
        self._context = context
        self._group = context.group
        self._packing = context.packing
        self._membership = context.membership
        self._pool = context.pool
        self._monitor = context.membership.monitor
        self._rank = self._membership.rank
        self._topology = topology
        self._settings = settings
        self._in_neighbors = topology.in_neighbors(self._rank)
        self._out_neighbors = topology.out_neighbors(self._rank)
        self._queue = SessionQueue(context.membership, f"updates/{self._group}", context.session)
        self._absence = Absence(context.membership, self._group, settings)
        self._pacing = make_pacing(context, topology, settings, self._absence)
        self._num_late = self._num_withheld = self._num_jumps = self._num_skipped = self._num_passed = 0
        self._most_updates = 0
        self._begin(0)
        self._queue.start(self._on_update)

    def reset(self, session: int, start: int = 0) -> None:
        with self._monitor:
            self._num_late += self._reception.num_late
            self._queue.session = session
            self._pacing.reset(session, start)
            self._begin(start)

    def _begin(self, start: int) -> None:
        self._absence.reset()
        self._was_passed_by = self._has_followed = False
        self._offset = 0  # The number of iterations that the others have made without this rank.
        self.iteration = start - 1
        self._target = start  # The next iteration.
        self._sent_rounds = start
        self._sent: Sequence[np.ndarray] = ()  # The parameters sent in the iteration that is not reduced yet.
        self._known_departed: set[int] = set()
        # The neighbors that were present when this rank entered the iteration, and their incarnations.
        self._incarnations: dict[int, int] = {}
        # For each in-neighbor, the first iteration of which it sends an update. On a rank that has just joined,
        # infinity until `meet`.
        self._first = dict.fromkeys(self._in_neighbors, math.inf if start else 0)
        weights = self._topology.weights(self._rank)
        del weights[self._rank]
        self._reception = make_reception(self._settings, weights, self._context)
        self._reception.skip_to(start)

    @property
    def step_offset(self) -> int:
        return self._offset * self._settings.interval

    def steps_of(self, number: int) -> range:
        return range(number * self._settings.interval, (number + 1) * self._settings.interval)

    def number_of(self, step: int) -> int:
        # An iteration is submitted in its first step. So a later step counts as a part of the next iteration.
        return -(-step // self._settings.interval)

    def step(self, request: Request) -> Result | None:
        k, x, segment = request.step + self._offset, request.buckets, request.segment
        if segment == RENEWAL:
            return Result(request.step, RENEWAL, self._nothing() if self._has_followed else self._renew(x))
        if segment == STEP:
            self._enter(k)  # Line 10.
            self._pacing.wait_to_send(k)
            self._send(x, k)  # Line 11.
            if self._settings.tolerates_stragglers:
                self._sent = x
                return None
        else:
            x, self._sent = self._sent, ()
        self._has_followed = self._was_passed_by
        if self._has_followed:
            change, num_skipped = self._follow(x, k)
            return Result(request.step, segment, change, self._steps_to_skip(num_skipped))
        change = self._recv_and_reduce(x, k)  # Lines 13 and 14.
        self._pacing.reduced(k, self._incarnations)
        self._target = k + self._pacing.advance(k)  # Line 17.
        num_skipped = self._target - k - 1
        self._num_jumps += num_skipped > 0
        self._num_skipped += num_skipped
        return Result(request.step, segment, change, self._steps_to_skip(num_skipped))

    def _steps_to_skip(self, num_iterations: int) -> int:
        """The steps to skip after an iteration's first step, if the next `num_iterations` iterations are skipped."""
        return (num_iterations + 1) * self._settings.interval - 1 if num_iterations else 0

    def _follow(self, x: Sequence[np.ndarray], k: int) -> tuple[tuple[np.ndarray, ...], int]:
        """Continues at the iteration of the out-neighbors, because they have continued without this rank.

        Returns:
          The change towards the newest parameters of in-neighbors, and the number of skipped iterations. Without `skip`
          the number is 0, because these iterations are then part of `step_offset`.
        """
        num_iterations = self._pacing.advance(k, was_passed_by=True)
        self._target = k + num_iterations
        with self._monitor:
            self._was_passed_by = False
            self.iteration = self._target - 1
            updates, weights = self._reception.take_newest(
                self._target, own_counts=num_iterations <= self._settings.gap
            )
        self._num_passed += num_iterations - 1
        change = self._reduce(x, updates, weights)
        if self._settings.skip is not None:
            return change, num_iterations - 1
        self._offset += num_iterations - 1
        return change, 0

    def no_op(self, request: Request) -> Result | None:
        self._sent = ()
        if request.segment == STEP and self._settings.tolerates_stragglers:
            return None
        return Result(request.step, request.segment, self._nothing())

    def _nothing(self) -> tuple[np.ndarray, ...]:
        return tuple(self._packing.zeros())

    def _enter(self, k: int) -> None:
        while not self._try_to_enter(k):
            self._absence.wait(self._pacing.behind, operation="acquire token", step=k)
        self._pacing.enter(k, self._incarnations)

    def _try_to_enter(self, k: int) -> bool:
        neighbors = {*self._in_neighbors, *self._out_neighbors}
        with self._monitor:
            if self._pacing.behind():
                return False
            self.iteration = k
            self._incarnations = {j: self._membership.incarnation_of(j) for j in neighbors if self._is_present(j)}
            return True

    def _is_present(self, j: int) -> bool:
        return self._membership.departure(j) is None

    def _send(self, x: Sequence[np.ndarray], k: int) -> None:
        for j in self._out_neighbors:
            incarnation = self._incarnations.get(j)  # `admit` removes a rank that joins, maybe just now.
            if incarnation is None or not self._is_present(j):
                continue
            if self._pacing.known_iteration(j) > k + self._settings.max_staleness:
                self._num_withheld += 1  # The update would come too late (section 6.2).
                continue
            # A rank that tolerates stragglers does not need every update: a newer one replaces one still in the queue.
            self._num_withheld += self._queue.send(
                j,
                ITERATION.pack(k),
                x,
                lane=BULK_LANE,
                incarnation=incarnation,
                step=k,
                supersedes=self._settings.is_tolerated_by(j),
            )
        self._sent_rounds = k + 1

    def _recv_and_reduce(self, x: Sequence[np.ndarray], k: int) -> tuple[np.ndarray, ...]:
        def missing() -> list[int]:
            return self._reception.missing(k, self._delivers)

        self._absence.wait(missing, operation="receive update", step=k)
        with self._monitor:
            self._check_connected(k)
            updates, weights = self._reception.take(k)
        return self._reduce(x, updates, weights)

    def _reduce(
        self, x: Sequence[np.ndarray], updates: Sequence[Update], weights: Sequence[float]
    ) -> tuple[np.ndarray, ...]:
        """The weighted mean of updates and x, minus x. The weight of x is 1 minus the sum of the others."""
        changes = []
        for bucket, own in enumerate(x):
            change = self._pool.take(own.nbytes).view(own.dtype)
            weighted_differences(own, [update.buckets[bucket] for update in updates], weights, out=change)
            changes.append(change)
        return tuple(changes)

    def _renew(self, x: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
        """Before a jump: does Recv and Reduce of the iteration before the jump's target."""
        with self._monitor:
            self._reception.skip_to(self._target - 1)
        return self._recv_and_reduce(x, self._target - 1)

    def _delivers(self, j: int, k: int) -> bool:
        if self._absence.is_any() and self._absence.owes_updates(j):
            return False
        return k >= self._first[j] and self._membership.delivers(j, self._group, k)

    def _check_connected(self, k: int) -> None:
        """Raises HopError if ranks that ended before step k split the others into parts that would train separately."""
        departed = {j for j in self._membership.departed() if not self._membership.delivers(j, self._group, k)}
        if departed != self._known_departed:
            self._known_departed = departed
            # A rank that has missed steps is not checked. In a custom loop, it makes these steps alone, after the
            # others.
            if not self._offset and not self._topology.is_connected_without(departed):
                raise HopError(
                    f"rank {self._rank}, step {k}: ranks {sorted(departed)} have left, and the communication graph of "
                    "the others is no longer connected. Use a topology with more edges, or stop all ranks together."
                )

    # Ranks that join late. Ranks report the last step of their iteration, so that newcomers begin with the next
    # iteration.

    def begin_at(self, step: int) -> None:
        self.reset(self._queue.session, self.number_of(step))

    def meet(self, rank: int, step: int) -> None:
        k = step // self._settings.interval  # `step` is the last step of this iteration.
        if rank in self._out_neighbors:
            self._pacing.meet(rank, k)
        if rank in self._in_neighbors:
            first = self._first[rank]
            self._first[rank] = k + 1 if first == math.inf else max(first, k + 1)

    def admit(self, rank: int, step: int) -> int:
        own_step = self.steps_of(self.iteration)[-1]
        # A rank that is itself joining has no iteration yet, and `begin_at` resets its state. A rank that has ended may
        # be further from the newcomer's iteration than a rank that trains can be.
        if self._membership.joining or self._membership.has_left:
            return own_step
        self._absence.forget(rank)
        start = self.number_of(step)
        if rank in self._out_neighbors:
            self._pacing.admit(rank, start)
        if rank in self._in_neighbors:
            self._first[rank] = max(start, self.iteration + 1)
            self._reception.forget(rank, self._first[rank] - 1)
        self._incarnations.pop(rank, None)
        return own_step

    @property
    def sent_rounds(self) -> int:
        return self._sent_rounds

    @property
    def most_updates_in_memory(self) -> int:
        """The largest number so far of updates that were received but not yet used. At most (1 + max_ig) * |N_in|."""
        return self._most_updates

    def outcomes(self) -> Mapping[str, int]:
        return {
            "late": self._queue.num_dropped + self._num_late + self._reception.num_late,
            "dropped": self._num_withheld,
        }

    def counters(self) -> Mapping[str, float]:
        """The counts of updates and iterations. See `HopStrategy`."""
        return {
            "late_updates": self.outcomes()["late"],
            "withheld_updates": self._num_withheld,
            "jumps": self._num_jumps,
            "skipped_iterations": self._num_skipped,
            "silences": self._absence.num_passed_by,
            "missed_iterations": self._num_passed,
        }

    def close(self) -> None:
        self._queue.close()
        self._pacing.close()
        self._absence.close()

    def _on_update(self, message: Message) -> None:
        if message.sender not in self._in_neighbors or len(message.header) != ITERATION.size:
            raise message.unexpected()
        (iteration,) = ITERATION.unpack(message.header)
        departure = self._membership.departure(message.sender)
        is_lost = departure is not None and departure.lost
        if not is_lost:
            self._pacing.hear_update(message.sender, iteration)
        # No rank waits for updates of a lost rank, nor for a newcomer's updates from before its first iteration.
        if is_lost or math.inf > self._first[message.sender] > iteration:
            self._num_late += 1
            return
        if iteration > self.iteration + self._settings.gap:
            if not self._settings.is_tolerated_by(self._rank):
                raise ProtocolError(f"rank {message.sender} is at {iteration}, this rank at {self.iteration}.")
            self._was_passed_by = True  # The sender has heard nothing of this rank for some time.
        if self._absence.is_any():
            self._absence.hear(message.sender, is_near=iteration + self._settings.gap > self.iteration)
        self._reception.put(Update(iteration, message.sender, self._packing.view(message.payload)))
        self._most_updates = max(self._most_updates, len(self._reception))

"""`FlowControl`: a rank under Canary waits for communication and, after its own last step, for the others' last step.

It waits for a silent rank only at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from hop_tf.membership.session import Membership
from hop_tf.membership.silence import Silence
from hop_tf.strategies.canary.contributions import Contributions
from hop_tf.strategies.canary.held import Held
from hop_tf.strategies.canary.peers import Peers
from hop_tf.strategies.canary.pieces import PieceThread


class FlowControl:
    """The waits of one rank. Each method blocks until its condition is met. Errors are those of `Membership.wait`.

    Args:
      membership: Waits for ranks.
      peers: The state of the other ranks.
      contributions: The contributions in flight.
      threads: The threads that merge.
      held: Own contributions that are kept back.
      silence: The silent ranks.
      window: The number of own iterations that may be in flight.

    Attributes:
      num_waits: The number of iterations that began late because an inbox was full.
      num_window_waits: The number of iterations that began late because too many own iterations were in flight.
    """

    def __init__(
        self,
        membership: Membership,
        peers: Peers,
        contributions: Contributions,
        threads: Sequence[PieceThread],
        held: Held,
        silence: Silence,
        window: int,
    ):
        self._membership = membership
        self._monitor = membership.monitor
        self._peers = peers
        self._contributions = contributions
        self._threads = threads
        self._held = held
        self._silence = silence
        self._window = window
        self.num_waits = self.num_window_waits = 0

    def wait_for_window(self, k: int) -> None:
        """Waits until fewer than `window` own iterations are in flight. Waits for communication only."""
        with self._monitor:
            self.num_window_waits += bool(self._late_ranks())
        self._silence.wait(self._late_ranks, operation="receive the counts of merged steps", step=k)

    def wait_for_room(self, k: int) -> None:
        """Waits while any rank has received more than it may keep. Waits for merging only, never for a computation."""
        with self._monitor:
            self.num_waits += bool(self._without_room()) or not self._has_room()
        self._silence.wait(self._without_room, operation="merge the steps that it has received", step=k)
        self._wait_for_own_threads(self._has_room)

    def wait_to_send(self, k: int) -> None:
        """Waits until no contribution is kept back for a silent rank. Called at the end of a `fit`."""

        def silent_ranks() -> list[int]:
            self._silence.look_again()
            return self._held.silent_ranks()

        self._membership.wait(silent_ranks, operation="send the messages that it has kept back", step=k)

    def wait_for_others(self, k: int) -> None:
        """Waits until all ranks have made their last step, and everything sent is merged."""
        is_waiting = True
        while is_waiting:  # Goes on as long as messages are merged: others may have many steps left.
            num_before = self._num_messages()

            def late_without_progress(num_before: int = num_before) -> list[int]:
                return self._late() if self._num_messages() == num_before else []

            self._membership.wait(late_without_progress, operation="receive the last contributions", step=k)
            self._wait_for_own_threads(lambda: self._late() or not self._unsettled_ranks())
            with self._monitor:
                is_waiting = bool(self._late())

    def _late(self) -> list[int]:
        """The ranks that have not made their last step. If all have, those through which messages may still come."""
        self._silence.look_again()
        unsettled = self._others(self._unsettled_ranks())
        return [rank for rank in self._peers.present() if rank not in self._peers.done] or unsettled

    def _unsettled_ranks(self) -> set[int]:
        """Checks for ranks that have left. Returns the ranks through which messages of a piece may still come."""
        self._contributions.look_at_departures()
        return self._contributions.unsettled_ranks()

    def _late_ranks(self) -> list[int]:
        return self._others(self._contributions.late_ranks(self._window))

    def _without_room(self) -> list[int]:
        return [rank for rank in self._peers.without_room() if rank not in self._silence.ranks]

    def _others(self, ranks: set[int]) -> list[int]:
        return sorted(ranks - {self._membership.rank})

    def _wait_for_own_threads(self, condition: Callable[[], bool]) -> None:
        """Waits without a time limit for a condition that this rank's own threads bring about."""
        self._membership.wait_until(condition, math.inf)

    def _has_room(self) -> bool:
        return all(thread.has_room for thread in self._threads)

    def _num_messages(self) -> int:
        return sum(thread.num_messages for thread in self._threads)

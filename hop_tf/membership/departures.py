"""`Departures`: the ranks that no longer take part in the running session, and the incarnation of each rank.

Nothing here sends or waits. Methods that change the state are called with the rank's monitor held.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from hop_tf.membership import membership_pb2


@dataclasses.dataclass(frozen=True)
class Departure:
    """The departure of a rank.

    Attributes:
      sent_rounds: Number of rounds that the rank had sent, by exchange group.
      reason: The reason; "" if the rank has made all its steps.
      final: True if the rank has left for good.
      lost: True if others found that the rank was lost. The rank itself may not know of it.
      num_rounds: Number of rounds of the session that the rank had begun; see `Membership.begin_round`.
      failed: True if an exception has kept the rank from making its remaining rounds.
    """

    sent_rounds: Mapping[str, int]
    reason: str
    final: bool
    lost: bool = False
    num_rounds: int = 0
    failed: bool = False


class Departures:
    """The departures of others, as far as a rank knows them.

    Ranks enter a session together. If a rank is in a session or about to enter it, all other ranks have entered at
    least the previous session. So departures from still earlier sessions no longer matter.

    Attributes:
      session: The running session, or the session that the rank is about to enter.
      incarnations: Number of times that each rank has joined a running session. Ranks that never did are left out.
      version: A number that changes with the state. Code that caches a value derived from the state checks only this
        number.
    """

    def __init__(self):
        self.session = 0
        self.version = 0
        self.incarnations: dict[int, int] = {}
        self._left: dict[tuple[int, int], Departure] = {}  # By session and rank.
        self._gone: dict[int, Departure] = {}  # By rank: final departures only.

    def enter(self, session: int) -> None:
        """Called when the rank is about to enter `session`."""
        self.session = session
        self.version += 1
        self._left = {key: departure for key, departure in self._left.items() if not self._is_past(key[0])}

    def _is_past(self, session: int) -> bool:
        return session < self.session - 1

    def of(self, rank: int) -> Departure | None:
        """The departure of `rank` from the running session; None while it takes part."""
        return self._left.get((self.session, rank)) or self._gone.get(rank)

    def end_of(self, rank: int) -> Departure | None:
        """The final departure of `rank`; None if it may take part again."""
        return self._gone.get(rank)

    def ranks(self) -> set[int]:
        """The ranks that no longer take part in the running session."""
        # Iterates over a copy: the caller need not hold the monitor, so another thread may change the dictionary
        # meanwhile.
        return {rank for session, rank in list(self._left) if session == self.session} | set(self._gone)

    def lost(self) -> dict[int, Departure]:
        """The ranks that were lost and have not joined again."""
        return {rank: departure for rank, departure in sorted(self._gone.items()) if departure.lost}

    def delivers(self, rank: int, group: str, number: int) -> bool:
        """True if the messages of `rank` in round `number` of `group` have come or may still come."""
        departure = self.of(rank)
        return departure is None or number < departure.sent_rounds.get(group, 0)

    def incarnation_of(self, rank: int) -> int:
        """The number of times that `rank` has joined a running session."""
        return self.incarnations.get(rank, 0)

    def begin_incarnation(self, rank: int, incarnation: int) -> None:
        """Records a newer incarnation of `rank`, and forgets the departures of former incarnations."""
        if incarnation > self.incarnation_of(rank):
            self.incarnations[rank] = incarnation
            self.forget(rank)

    def forget(self, rank: int) -> None:
        """Forgets all departures of `rank`."""
        self.version += 1
        self._left = {key: departure for key, departure in self._left.items() if key[1] != rank}
        self._gone.pop(rank, None)

    def note(self, leave: membership_pb2.Leave) -> bool:
        """Records another rank's departure. Returns False if it is known, or from a former incarnation or session."""
        self.begin_incarnation(leave.rank, leave.incarnation)  # This may be the first news of the incarnation.
        if leave.incarnation < self.incarnation_of(leave.rank) or self._is_known(leave):
            return False
        departure = Departure(
            dict(leave.sent_rounds), leave.reason, leave.final, leave.lost, leave.num_rounds, leave.failed
        )
        self.version += 1
        key = (leave.session, leave.rank)
        if leave.lost or key not in self._left:
            self._left[key] = departure
        if leave.final:
            self._gone[leave.rank] = departure
        return True

    def _is_known(self, leave: membership_pb2.Leave) -> bool:
        gone = self._gone.get(leave.rank)
        if leave.lost:  # A loss counts even after a departure: messages in flight will never come.
            return gone is not None and gone.lost
        if leave.final:
            return gone is not None
        return self._is_past(leave.session) or (leave.session, leave.rank) in self._left

    def leave_of(self, rank: int, departure: Departure, incarnation: int | None = None) -> membership_pb2.Leave:
        """The message about a departure from the running session. Default incarnation: the known one."""
        return membership_pb2.Leave(
            rank=rank,
            session=self.session,
            sent_rounds=departure.sent_rounds,
            reason=departure.reason,
            final=departure.final,
            lost=departure.lost,
            num_rounds=departure.num_rounds,
            failed=departure.failed,
            incarnation=self.incarnation_of(rank) if incarnation is None else incarnation,
        )

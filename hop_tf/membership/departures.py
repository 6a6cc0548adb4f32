"""`Departures`: which ranks take part in the running session no more, and in which of its incarnations each rank is.

Nothing here sends or waits. What changes it is called with the rank's monitor held.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from hop_tf.membership import membership_pb2


@dataclasses.dataclass(frozen=True)
class Departure:
    """How a rank left.

    Attributes:
      sent_rounds: By exchange group, how many rounds were sent before.
      reason: Why; "" where the rank has made all its steps.
      final: Whether for good.
      lost: Whether it was lost, and knows nothing of this.
      num_rounds: How many rounds of the session it had begun; see `Membership.begin_round`.
      failed: Whether an exception has kept it from making the others.
    """

    sent_rounds: Mapping[str, int]
    reason: str
    final: bool
    lost: bool = False
    num_rounds: int = 0
    failed: bool = False


class Departures:
    """What a rank knows of the ends of others.

    Ranks enter a session together. So where one is in a session, or about to enter it, all others are in the one before
    at least: what happened in still earlier ones is of no matter to anyone.

    Attributes:
      session: The running session, or the one that the rank is about to enter.
      incarnations: How many times a rank has joined a session that was under way; ranks that never did are left out.
      version: Another number after each change. Who keeps what follows from the above needs to look at this only.
    """

    def __init__(self):
        self.session = 0
        self.version = 0
        self.incarnations: dict[int, int] = {}
        self._left: dict[tuple[int, int], Departure] = {}  # By session and rank.
        self._gone: dict[int, Departure] = {}  # For good.

    def enter(self, session: int) -> None:
        """The rank is about to enter `session`."""
        self.session = session
        self.version += 1
        self._left = {key: departure for key, departure in self._left.items() if not self._is_past(key[0])}

    def _is_past(self, session: int) -> bool:
        return session < self.session - 1

    def of(self, rank: int) -> Departure | None:
        """How `rank` left the running session; None while it takes part."""
        return self._left.get((self.session, rank)) or self._gone.get(rank)

    def end_of(self, rank: int) -> Departure | None:
        """How `rank` has ended for good; None where it may take part again."""
        return self._gone.get(rank)

    def ranks(self) -> set[int]:
        """Ranks that take part in the running session no more."""
        # Of a copy: whoever looks without the monitor must not meet a change.
        return {rank for session, rank in list(self._left) if session == self.session} | set(self._gone)

    def lost(self) -> dict[int, Departure]:
        """Ranks that were lost and have not joined again."""
        return {rank: departure for rank, departure in sorted(self._gone.items()) if departure.lost}

    def delivers(self, rank: int, group: str, number: int) -> bool:
        """Whether what `rank` sends in round `number` of `group` has come or may still come."""
        departure = self.of(rank)
        return departure is None or number < departure.sent_rounds.get(group, 0)

    def incarnation_of(self, rank: int) -> int:
        """How many times `rank` has joined a session that was under way."""
        return self.incarnations.get(rank, 0)

    def begin_incarnation(self, rank: int, incarnation: int) -> None:
        """What is known of the end of a former incarnation does not count any more."""
        if incarnation > self.incarnation_of(rank):
            self.incarnations[rank] = incarnation
            self.forget(rank)

    def forget(self, rank: int) -> None:
        """Forgets how `rank` has ended, in this session and for good."""
        self.version += 1
        self._left = {key: departure for key, departure in self._left.items() if key[1] != rank}
        self._gone.pop(rank, None)

    def note(self, leave: membership_pb2.Leave) -> bool:
        """Remembers the departure of another rank; False if it was known, of a former incarnation or long ago."""
        self.begin_incarnation(leave.rank, leave.incarnation)  # It may be the first news of that one.
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
        if leave.lost:  # Also after it had left: what it has sent and nobody received will never come.
            return gone is not None and gone.lost
        if leave.final:
            return gone is not None
        return self._is_past(leave.session) or (leave.session, leave.rank) in self._left

    def leave_of(self, rank: int, departure: Departure, incarnation: int | None = None) -> membership_pb2.Leave:
        """The message that tells of a departure from the running session; default: of the incarnation that is known."""
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

"""`StopAgreement`: synchronous ranks stop after the same step, if one of them is to stop.

A rank counts the steps that it has begun. A rank that is to stop tells the others its number, and begins no further
step before it has received their numbers. A rank that gets such a message sends its own number at once, from the thread
that takes the message. So each rank sends one number, and all ranks know the largest. They make their steps up to this
number, and stop.
"""

from __future__ import annotations

import struct

from hop_tf.membership.rounds import Rounds
from hop_tf.membership.session import Membership

_BEGUN = struct.Struct("<q")
_ROUND = 0  # A session has only one round.


class StopAgreement:
    """Agrees on the last step of a `fit` when a rank asks for it.

    Ranks do not wait for a rank that has left. While no rank asks, a step costs a comparison without a lock, and no
    message.

    Args:
      membership: Waiting and transport.

    Attributes:
      num_begun: Number of steps of the running `fit` that this rank has begun.
      rounds: The round in which ranks exchange their numbers of begun steps.
    """

    def __init__(self, membership: Membership):
        self._monitor = membership.monitor
        self._told: int | None = None  # The number of begun steps when this rank heard of the stop.
        self._last: int | None = None  # The number of steps that ranks have agreed on.
        self.num_begun = 0
        self.rounds = Rounds(membership, "the last step", answer=self._tell_begun)

    def reset(self, session: int) -> None:
        """Forgets everything, for a session that this rank is about to enter."""
        with self._monitor:
            self.rounds.reset(session)
            self._told = self._last = None
            self.num_begun = 0

    @property
    def is_asked(self) -> bool:
        """True if this rank, or another rank, is to stop."""
        return self._told is not None

    def begin_steps(self, number: int) -> bool:
        """Counts the next steps as begun. Returns False if this rank has to stop before them.

        Blocks: if a rank is to stop, until all ranks that take part have sent their numbers of begun steps. Does not
          block for steps that this rank's own number includes.

        Raises:
          HopError: As `Membership.wait` does.
        """
        # First count, then check. If another rank asks meanwhile, either the answer includes these steps, or the check
        # sees the request.
        self.num_begun += number
        if not self.is_asked:
            return True
        with self._monitor:
            if self._told >= self.num_begun:
                return True  # This rank's own number includes these steps, so the others wait for them.
            self.num_begun -= number
        if self.is_reached():
            return False
        self.num_begun += number  # This rank has already sent its number.
        return True

    def end_epoch(self, num_made: int) -> None:
        """Corrects the count at the end of an epoch: the data may have ended before a step that counted as begun."""
        with self._monitor:
            self.num_begun = num_made

    def ask(self) -> None:
        """Called when this rank is to stop. Does not block for long."""
        self.rounds.begin(_ROUND)

    def is_reached(self) -> bool:
        """True if this rank has made the last step that ranks have agreed on. Called only if `is_asked`.

        Blocks: as `begin_steps` does.

        Raises:
          HopError: As `begin_steps` does.
        """
        if self._last is None:
            self._last = max(_BEGUN.unpack(data)[0] for data in self.rounds.collect(_ROUND).values())
        return self.num_begun >= self._last

    def _tell_begun(self) -> bytes:
        """Called with the monitor held, when this rank or another one is the first to stop."""
        self._told = self.num_begun
        return _BEGUN.pack(self._told)

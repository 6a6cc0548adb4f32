"""`StopAgreement`: synchronous ranks stop after the same step, if one of them is to stop.

A rank counts the steps that it has begun. A rank that is to stop tells the others its number, and begins no further
step before it has received their numbers. A rank that gets such a message sends its own number at once, from the thread
that takes the message. So each rank sends one number, and all ranks know the largest. They make their steps up to this
number, and stop.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable

from hop_tf.membership import LeftBehind, Membership, SessionQueue
from hop_tf.runtime.epoch_agreement import EpochAgreement
from hop_tf.transport.base import Message

QUEUE = "stops"
_BEGUN = struct.Struct("<q")


class StopAgreement:
    """Agrees on the last step of a `fit` when a rank asks for it.

    Ranks do not wait for a rank that has left, or has made all of its steps. While no rank asks, a step costs a
    comparison without a lock, and no message.

    Args:
      membership: Waiting and transport.
      epochs: Knows which ranks take part.

    Attributes:
      num_begun: Number of steps of the running `fit` that this rank has begun.
    """

    def __init__(self, membership: Membership, epochs: EpochAgreement):
        self._membership = membership
        self._epochs = epochs
        self._queue = SessionQueue(membership, QUEUE, membership.session)
        self._told: dict[int, int] = {}  # By rank: its number of begun steps when it heard of the stop.
        self.num_begun = 0
        self._queue.start(self._on_message)

    def reset(self, session: int) -> None:
        """Forgets everything, for a session that this rank is about to enter."""
        with self._membership.monitor:
            self._queue.session = session
            self._told.clear()
            self.num_begun = 0

    @property
    def is_asked(self) -> bool:
        """True if this rank, or another rank, is to stop."""
        return self._membership.rank in self._told

    @property
    def sent_rounds(self) -> int:
        """For the message with which this rank leaves: the number of messages that it has sent to each other rank."""
        return int(self.is_asked)

    def begin_steps(self, number: int) -> bool:
        """Counts the next steps as begun. Returns False if this rank has to stop before them.

        Blocks: if a rank is to stop, until all ranks that take part have sent their numbers of begun steps. Does not
          block for steps that this rank's own number includes.

        Raises:
          HopError: As `Membership.wait` does.
        """
        # First count, then check. So a message that comes meanwhile either includes these steps, or is seen here.
        self.num_begun += number
        if not self._told:
            return True
        with self._membership.monitor:
            if not self.is_asked or self._told[self._membership.rank] >= self.num_begun:
                return True  # This rank's own number includes these steps, so the others wait for them.
            self.num_begun -= number
        if self.is_reached():
            return False
        self.num_begun += number  # This rank no longer sends this number.
        return True

    def end_epoch(self, num_made: int) -> None:
        """Corrects the count at the end of an epoch: the data may have ended before a step that counted as begun."""
        with self._membership.monitor:
            self.num_begun = num_made

    def ask(self) -> None:
        """Called when this rank is to stop. Does not block for long."""
        with self._membership.monitor:
            tell = None if self.is_asked else self._note_own()
        if tell is not None:
            tell()

    def is_reached(self) -> bool:
        """True if this rank has made the last step that ranks have agreed on. Called only if `is_asked`.

        Blocks: as `begin_steps` does.

        Raises:
          HopError: As `begin_steps` does.
        """
        with contextlib.suppress(LeftBehind):  # Then this rank uses the numbers that it has heard.
            self._membership.wait(
                lambda: [rank for rank in self._epochs.others if rank not in self._told and self._takes_part(rank)],
                operation="agree on the last step",
                step=self.num_begun,
            )
        with self._membership.monitor:
            return self.num_begun >= max(self._told.values())

    def _takes_part(self, rank: int) -> bool:
        return not self._epochs.has_ended(rank) and self._membership.delivers(rank, QUEUE, 0)

    def _note_own(self) -> Callable[[], None]:
        """Records the number of begun steps. Returns a function that tells the others. The monitor must be held."""
        num_begun = self._told[self._membership.rank] = self.num_begun
        ranks = [rank for rank in self._epochs.others if self._takes_part(rank)]

        def tell() -> None:
            for rank in ranks:
                self._membership.transport.connect(rank)  # From now on its silence counts.
                # Not interruptible: if this rank leaves meanwhile, the thread that takes messages must go on.
                self._queue.send(rank, _BEGUN.pack(num_begun), step=num_begun, interruptible=False)

        return tell

    def _on_message(self, message: Message) -> Callable[[], None] | None:
        if len(message.header) != _BEGUN.size:
            raise message.unexpected()
        (self._told[message.sender],) = _BEGUN.unpack(message.header)
        return None if self.is_asked or not self._epochs.takes_part else self._note_own()

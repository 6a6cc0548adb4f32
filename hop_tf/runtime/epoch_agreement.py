"""`EpochAgreement`: ranks exchange values at the end of an epoch.

A rank's *position* in a `fit` is the number of steps that it has made. A rank that has ended its epoch announces its
position with a value. Then it waits until each other rank has announced the same position, or is beyond it.

A rank that waits takes no step. Another rank may need that step to end its own epoch, which is longer. Both would wait
forever. So each announcement carries the rounds that the rank has made of each exchange. A rank that begins a further
round is beyond that position, and says so at once. So ranks need not know in advance how long an epoch is.
"""

from __future__ import annotations

import collections
import contextlib
import enum
import json
import struct
from collections.abc import Callable, Mapping

import numpy as np

from hop_tf.errors import MismatchError
from hop_tf.membership import LeftBehind, Membership, SessionQueue
from hop_tf.transport.base import Message

QUEUE = "epochs"

# The kind of a message, and a number. A value is followed by the rounds that its sender has made, as JSON.
_HEAD = struct.Struct("<Bq")
_NEVER = 1 << 62  # The number of a rank's last announcement: beyond all positions.


class _Kind(enum.IntEnum):
    BEGIN = 0
    VALUE = 1
    REACHED = 2  # The sender will announce nothing below the number.


class Moment(enum.IntEnum):
    """The subjects that ranks agree on at one position, in this order."""

    METRICS = 0
    STATES = 1
    SUMS = 2  # Only if ranks know different contributions to sums.
    STOP = 3


def _number_of(position: int, moment: int) -> int:
    return position * len(Moment) + moment


class EpochAgreement:
    """Brings each rank the values of the ranks that are at the same position.

    Ranks do not wait for a rank that has left. A process that joins the running session takes no part.

    Args:
      membership: Waiting and transport.
      rounds_made: Returns the number of rounds that this rank has made of each exchange, by name.
      has_begun: Given such a mapping of another rank, True if this rank has begun a round that the other one has not
        made. May be called from any thread.

    Attributes:
      takes_part: True if this rank agrees with others in the running session. All ranks or none must do so.
      is_asked: True if a rank waits for this one, which was not beyond that rank's position when it was asked. A thread
        that begins a round then calls `look_again`.
      sent_rounds: For the message with which this rank leaves: the number after its last announcement.
    """

    def __init__(
        self,
        membership: Membership,
        *,
        rounds_made: Callable[[], Mapping[str, int]] = dict,
        has_begun: Callable[[Mapping[str, int]], bool] = lambda rounds: False,
    ):
        self._membership = membership
        self._rounds_made = rounds_made
        self._has_begun = has_begun
        self.others = [rank for rank in range(membership.world_size) if rank != membership.rank]
        self._queue = SessionQueue(membership, QUEUE, membership.session)
        self._values: collections.defaultdict[int, dict[int, bytes]] = collections.defaultdict(dict)  # By number.
        self._reached: dict[int, int] = {}  # By rank: it announces nothing below this number.
        self._asking: dict[int, tuple[int, Mapping[str, int]]] = {}  # By rank: its number, and its rounds.
        self._incarnations: dict[int, int] = {}
        self.takes_part = self.is_asked = False
        self.sent_rounds = self._announced = 0  # `_announced` includes a value that is about to be sent.
        self._queue.start(self._on_message)

    def reset(self, session: int, *, takes_part: bool) -> None:
        """Forgets everything, for a session that this rank is about to enter."""
        with self._membership.monitor:
            self._queue.session = session
            self._values.clear()
            self._reached = dict.fromkeys(self.others, 0)
            self._asking.clear()
            self._incarnations = {rank: self._membership.incarnation_of(rank) for rank in self.others}
            self.takes_part, self.is_asked = takes_part, False
            self.sent_rounds = self._announced = 0

    def begin(self) -> None:
        """Tells the others that this rank takes part. A rank that does not take part then raises."""
        self._tell_all(_Kind.BEGIN, 0)

    def agree(self, position: int, moment: Moment, value: bytes) -> dict[int, bytes]:
        """The values of all ranks at this position, this rank's included: by rank, in the order of ranks.

        Args:
          position: Number of steps that this rank has made. It must not be less than in the previous call.
          moment: The moment at this position. It must be later than in an earlier call at this position.
          value: The value of this rank.

        Blocks: until each other rank has announced this position, is beyond it, or has left.

        Raises:
          HopError: As `Membership.wait` does.
        """
        number = _number_of(position, moment)
        with self._membership.monitor:  # The announcement answers ranks that wait for this number or an earlier one.
            self._asking = {rank: asked for rank, asked in self._asking.items() if asked[0] > number}
            self.is_asked = bool(self._asking)
            self._announced = number + 1
        rounds = json.dumps(dict(self._rounds_made())).encode()
        self._tell_all(_Kind.VALUE, number, rounds, value)
        self.sent_rounds = number + 1
        received = self._values[number]
        with contextlib.suppress(LeftBehind):  # Then this rank agrees with those that it has heard.
            self._membership.wait(
                lambda: [rank for rank in self.others if rank not in received and self._may_announce(rank, number)],
                operation="agree at the end of an epoch",
                step=position,
            )
        with self._membership.monitor:
            values = dict(sorted({**received, self._membership.rank: value}.items()))
            for old in [old for old in self._values if old <= number]:
                del self._values[old]
        return values

    def end(self) -> None:
        """Ends this rank's announcements: it may still have to wait for others, which must not wait for it."""
        self._tell_all(_Kind.REACHED, _NEVER)

    def has_ended(self, rank: int) -> bool:
        """True if `rank` has called `end`, or is another process than the one that began the session."""
        is_new = self._membership.incarnation_of(rank) != self._incarnations[rank]
        return is_new or self._reached[rank] == _NEVER

    def look_again(self) -> None:
        """Tells each waiting rank whose position this rank has passed that it has done so. Called from any thread."""
        with self._membership.monitor:
            passed = [rank for rank, (_, rounds) in self._asking.items() if self._has_begun(rounds)]
            numbers = {rank: self._asking.pop(rank)[0] for rank in passed}
            self.is_asked = bool(self._asking)
        for rank, number in numbers.items():
            self._tell_beyond(rank, number)

    def _may_announce(self, rank: int, number: int) -> bool:
        is_there = not self.has_ended(rank) and self._membership.delivers(rank, QUEUE, number)
        return is_there and self._reached[rank] <= number

    def _tell_beyond(self, rank: int, number: int) -> None:
        reached = _number_of(number // len(Moment) + 1, 0)
        with self._membership.monitor:  # `rank` goes on after this message, so this rank must not wait for it either.
            self._reached[rank] = max(self._reached[rank], reached)
            self._membership.monitor.notify_all()
        # Not interruptible: if this rank leaves meanwhile, the thread that takes messages must go on.
        self._tell(rank, _Kind.REACHED, reached, interruptible=False)

    def _tell_all(self, kind: _Kind, number: int, rounds: bytes = b"", value: bytes = b"") -> None:
        for rank in self.others:
            if not self.has_ended(rank) and self._membership.departure(rank) is None:
                self._tell(rank, kind, number, rounds, value)

    def _tell(
        self,
        rank: int,
        kind: _Kind,
        number: int,
        rounds: bytes = b"",
        value: bytes = b"",
        *,
        interruptible: bool = True,
    ) -> None:
        self._membership.transport.connect(rank)  # From now on its silence counts.
        header, payload = _HEAD.pack(kind, number) + rounds, [np.frombuffer(value, np.uint8)] if value else []
        self._queue.send(rank, header, payload, step=number // len(Moment), interruptible=interruptible)

    def _on_message(self, message: Message) -> Callable[[], None] | None:
        if not self.takes_part:
            raise MismatchError(
                f"rank {message.sender} averages its metrics, and rank {self._membership.rank} does not. "
                "Pass hop_tf.callbacks.MetricAverage to `fit` on all ranks, or on none."
            )
        if len(message.header) < _HEAD.size:
            raise message.unexpected()
        kind, number = _HEAD.unpack_from(message.header)
        sender = message.sender
        if kind == _Kind.VALUE:
            return self._on_value(sender, number, json.loads(message.header[_HEAD.size :]), message.payload.tobytes())
        if kind == _Kind.REACHED:
            self._reached[sender] = max(self._reached[sender], number)
        elif kind != _Kind.BEGIN:
            raise message.unexpected()
        return None

    def _on_value(self, sender: int, number: int, rounds: Mapping[str, int], value: bytes) -> Callable[[], None] | None:
        self._reached[sender] = max(self._reached[sender], number + 1)
        if number + 1 >= self._announced:
            self._values[number][sender] = value
        if number < self._announced:  # The announcement answers the sender.
            return None
        # In this order: a thread that begins a round first records it, and then checks if this rank is asked.
        self._asking[sender], self.is_asked = (number, rounds), True
        return self.look_again if self._has_begun(rounds) else None

"""When what a rank sends has left: one message after the other to each peer, and what goes to several ones at once."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Mapping

from hop_tf.tools.simulate.scheduler import Scheduler
from hop_tf.transport.base import Message

# What is less than this share of a time is an error of rounding.
_ROUNDING = 1e-9


@dataclasses.dataclass(eq=False)
class Sending:
    """A message that is to leave.

    Attributes:
      message: The message.
      peer: The receiver.
      lane: Of the message.
      num_bytes: How many bytes it stands for.
      put_at: When it was handed over.
      seconds: How long it takes on its link alone.
      card_seconds: How long it would occupy the sender's card if nothing else did, and its link was as fast.
      receiver: The receiver's process, where that is known.
      record: What both ends are to record; None: nothing.
      step: The step in which it was handed over.
      left: What is still to be sent of `card_seconds`.
      share: Of the card, which it has now.
    """

    message: Message
    peer: int
    lane: int | None
    num_bytes: int
    put_at: float
    seconds: float = 0.0
    card_seconds: float = 0.0
    receiver: object | None = None
    record: Mapping | None = None
    step: int = 0
    left: float = 0.0
    share: float = 0.0

    @property
    def most(self) -> float:
        """The share of the card that its link can use."""
        return min(1.0, self.card_seconds / self.seconds) if self.seconds else 1.0


class Wires:
    """What leaves a rank.

    To each peer, and on each lane, one message leaves after the other. Those that leave at the same time share the
    card, alike, but that none gets more than its link carries; what that one leaves over is for the others:

        share(i)  =  min(most(i), level),  where  sum over i of share(i)  =  1  if the card is what limits them

    Args:
      scheduler: The clock.
      begin: Called with a message when it begins to leave.
      end: Called when it has left.
    """

    def __init__(self, scheduler: Scheduler, begin: Callable[[Sending], None], end: Callable[[Sending], None]):
        self._scheduler = scheduler
        self._begin, self._end = begin, end
        # By peer and lane: the message that leaves, and those behind it.
        self._streams: dict[tuple[int, int | None], collections.deque[Sending]] = {}
        self._sharing: list[Sending] = []  # Those that leave, and occupy the card.
        self._shared_at = 0.0
        self._num_shared = 0  # What was foreseen before is void.
        self._is_due = False

    def put(self, sending: Sending) -> None:
        """Sends a message when it is its turn."""
        stream = self._streams.get((sending.peer, sending.lane))
        if stream is None:
            stream = self._streams[sending.peer, sending.lane] = collections.deque()
        stream.append(sending)
        if len(stream) == 1:
            self._start(stream)

    def waiting(self, peer: int, lane: int | None) -> Iterable[Sending]:
        """What has not begun to leave, the oldest first."""
        stream = self._streams.get((peer, lane), ())
        return (sending for place, sending in enumerate(stream) if place)

    def is_busy(self, peer: int) -> bool:
        """Whether something is to leave for this peer."""
        return any(stream and receiver == peer for (receiver, _), stream in self._streams.items())

    def stop(self) -> None:
        """Nothing begins to leave any more."""
        for stream in self._streams.values():
            while len(stream) > 1:
                stream.pop()

    def _start(self, stream: collections.deque[Sending]) -> None:
        while stream:
            sending = stream[0]
            self._begin(sending)
            if sending.card_seconds:
                sending.left = sending.card_seconds
                self._sharing.append(sending)
                self._share_soon()
                return
            if sending.seconds:
                self._scheduler.call_at(self._scheduler.now + sending.seconds, lambda: self._finish(stream))
                return
            self._end(stream.popleft())

    def _finish(self, stream: collections.deque[Sending]) -> None:
        self._end(stream.popleft())
        self._start(stream)

    # The card.

    def _share_soon(self) -> None:
        """When all that begins or ends now has."""
        if not self._is_due:
            self._is_due = True
            self._scheduler.call_at(self._scheduler.now, self._share)

    def _share(self) -> None:
        self._is_due = False
        self._advance()
        room = 1.0
        for place, sending in enumerate(sorted(self._sharing, key=lambda each: each.most)):
            sending.share = min(sending.most, room / (len(self._sharing) - place))
            room -= sending.share
        self._num_shared += 1
        if self._sharing:
            seconds = min(each.left / each.share for each in self._sharing)
            first = [each for each in self._sharing if each.left <= (seconds * (1 + _ROUNDING)) * each.share]
            number = self._num_shared
            self._scheduler.call_at(self._scheduler.now + seconds, lambda: self._leave(number, first))

    def _advance(self) -> None:
        elapsed, self._shared_at = self._scheduler.now - self._shared_at, self._scheduler.now
        for sending in self._sharing:
            sending.left = max(sending.left - elapsed * sending.share, sending.card_seconds * _ROUNDING)

    def _leave(self, number: int, first: list[Sending]) -> None:
        if number != self._num_shared:
            return
        self._advance()
        self._sharing = [each for each in self._sharing if each not in first]
        self._share_soon()
        for sending in first:
            self._finish(self._streams[sending.peer, sending.lane])

"""`Wires`: the times at which a rank's messages leave. Messages to one peer leave in turn. Peers share the card."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Mapping

from hop_tf.tools.simulate.scheduler import Scheduler
from hop_tf.transport.base import Message

# A difference below this share of a time is a rounding error.
_ROUNDING = 1e-9


@dataclasses.dataclass(eq=False)
class Sending:
    """A message that is to leave.

    Attributes:
      message: The message.
      peer: The receiver.
      lane: The lane of the message.
      num_bytes: The number of bytes that the message stands for.
      put_at: The time at which it was enqueued.
      seconds: The time that it takes on its link, if it has the card to itself.
      card_seconds: The time that it would occupy the sender's card, if it had the card to itself and its link was fast
        enough.
      receiver: The receiver's process, if that is known.
      record: The fields that both ends are to record, or None.
      step: The step in which it was enqueued.
      left: The rest of `card_seconds` that is still to be sent.
      share: Its present share of the card.
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
        """The share of the card that the message's link can use."""
        return min(1.0, self.card_seconds / self.seconds) if self.seconds else 1.0


class Wires:
    """The messages that leave a rank.

    To each peer, and on each lane, one message leaves after the other. Messages that leave at the same time have equal
    shares of the card. No message gets more than its link carries, and the others share the rest:

        share(i)  =  min(most(i), level),  where  sum over i of share(i)  =  1  if the card is the limit

    Args:
      scheduler: The clock.
      begin: Called with a message when it begins to leave.
      end: Called with a message when it has left.
    """

    def __init__(self, scheduler: Scheduler, begin: Callable[[Sending], None], end: Callable[[Sending], None]):
        self._scheduler = scheduler
        self._begin, self._end = begin, end
        # By peer and lane: the message that is being sent, and the messages behind it.
        self._streams: dict[tuple[int, int | None], collections.deque[Sending]] = {}
        self._sharing: list[Sending] = []  # The messages that leave and occupy the card.
        self._shared_at = 0.0
        self._num_shared = 0  # Events that were scheduled with an earlier number are void.
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
        """The messages that have not begun to leave, the oldest first."""
        stream = self._streams.get((peer, lane), ())
        return (sending for place, sending in enumerate(stream) if place)

    def is_busy(self, peer: int) -> bool:
        """True if a message to this peer has not left."""
        return any(stream and receiver == peer for (receiver, _), stream in self._streams.items())

    def stop(self) -> None:
        """Drops the messages that have not begun to leave."""
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
        """Shares the card anew, after all messages that begin or end at this time have done so."""
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

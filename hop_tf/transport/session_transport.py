"""Several sessions, one after the other or at the same time, on one transport."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from hop_tf.transport.base import Expected, Handler, PeerStatus, ToSend, Transport

_num_sessions: weakref.WeakKeyDictionary[Transport, int] = weakref.WeakKeyDictionary()


class SessionTransport(Transport):
    """The queues of one session on a transport, separate from those of earlier and later sessions.

    Messages for the next session are held until it is created. Messages for a session that has ended are dropped.

    Args:
      transport: The transport that carries the messages.
    """

    def __init__(self, transport: Transport):
        number = _num_sessions[transport] = _num_sessions.get(transport, 0) + 1
        self._transport = transport
        self._prefix = f"canary {number}/"
        self._queues: set[str] = set()

    @property
    def rank(self) -> int:
        return self._transport.rank

    @property
    def incarnation(self) -> str:
        return self._transport.incarnation

    def start(self) -> None:
        self._transport.start()

    def connect(self, peer: int) -> None:
        self._transport.connect(peer)

    def register(self, queue: str, handler: Handler) -> None:
        self._queues.add(queue)
        self._transport.register(self._prefix + queue, handler)

    def unregister(self, queue: str) -> None:
        self._queues.discard(queue)
        self._transport.unregister(self._prefix + queue)

    def end_session(self) -> None:
        """Ends the session: its later messages are dropped."""
        for queue in tuple(self._queues):
            self.unregister(queue)

    def send(self, peer: int, queue: str, *args, **kwargs) -> bool:
        return self._transport.send(peer, self._prefix + queue, *args, **kwargs)

    @property
    def can_swap(self) -> bool:
        return self._transport.can_swap

    def swap(
        self,
        queue: str,
        to_send: Sequence[ToSend],
        expected: Sequence[Expected],
        lane: int | None,
        send: Callable[[ToSend], object],
    ) -> list[np.ndarray | None]:
        return self._transport.swap(self._prefix + queue, to_send, expected, lane, send)

    def waiting_for(self, senders: Collection[int], lane: int | None) -> contextlib.AbstractContextManager[None]:
        return self._transport.waiting_for(senders, lane)

    def flush(self, peer: int, timeout_seconds: float) -> bool:
        return self._transport.flush(peer, timeout_seconds)

    def status(self, peer: int) -> PeerStatus:
        return self._transport.status(peer)

    def expect_return(self, peer: int) -> None:
        self._transport.expect_return(peer)

    def bytes_by_lane(self) -> Mapping[int, int]:
        return self._transport.bytes_by_lane()

    def counters(self) -> Mapping[str, int]:
        return self._transport.counters()

    def close(self) -> None:
        self._transport.close()

"""`SessionQueue`: messages that count in one session only."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from hop_tf.membership.waiting import Waiting
from hop_tf.transport.base import Expected, Handler, Message, ToSend

_HEAD = struct.Struct("<qq")  # The session, and the receiver's incarnation. The scheme's own header follows.


class SessionQueue:
    """A queue whose handler gets only messages of the running session, for this incarnation of the rank.

    Messages do not come too early: a rank announces that it is ready for a session only after its queues have entered
    the session. The transport drops messages of a former process of the sender.

    Attributes:
      session: The running session. Set with the monitor held.
      num_dropped: Number of messages of another session, or for another incarnation.
    """

    def __init__(self, membership: Waiting, name: str, session: int):
        self._membership = membership
        self._name = name
        self.session = session
        self.num_dropped = 0

    def start(self, handler: Handler) -> None:
        """Begins to take messages. The handler is called with the monitor held. Then all waiting threads are woken.

        A handler may return a function. This function is called without the monitor, so that it may send.
        """
        self._handler = handler
        self._membership.transport.register(self._name, self._on_message)

    def close(self) -> None:
        """Stops taking messages."""
        self._membership.transport.unregister(self._name)

    def send(
        self,
        rank: int,
        header: bytes,
        *arguments,
        incarnation: int | None = None,
        session: int | None = None,
        **keywords,
    ) -> bool:
        """Sends as `Membership.send` does, to this queue of `rank`. Defaults: the present incarnation and session."""
        incarnation = self._membership.incarnation_of(rank) if incarnation is None else incarnation
        head = _HEAD.pack(self.session if session is None else session, incarnation)
        return self._membership.send(rank, self._name, head + header, *arguments, **keywords)

    def swap(
        self, to_send: Sequence[ToSend], expected: Sequence[Expected], lane: int | None, **keywords
    ) -> list[np.ndarray | None]:
        """Does the same as `Transport.swap`, for messages of the running session. Changes their headers.

        Args:
          to_send: See `Transport.swap`.
          expected: See `Transport.swap`.
          lane: See `Transport.swap`.
          **keywords: Arguments of `Membership.send`, which sends a message that cannot be written at once.

        Returns:
          See `Transport.swap`.

        Raises:
          HopError: As `Membership.send` does. It may also raise `Interrupted`.
        """
        membership, session = self._membership, self.session
        head = _HEAD.pack(session, membership.incarnation)
        for message in expected:
            message.header = head + message.header
        for message in to_send:
            message.header = _HEAD.pack(session, membership.incarnation_of(message.peer)) + message.header

        def send(message: ToSend) -> None:
            membership.send(message.peer, self._name, message.header, message.payload, lane, **keywords)

        return membership.transport.swap(self._name, to_send, expected, lane, send)

    def _on_message(self, message: Message) -> None:
        if len(message.header) < _HEAD.size:
            raise message.unexpected()
        with self._membership.monitor:
            if _HEAD.unpack_from(message.header) != (self.session, self._membership.incarnation):
                self.num_dropped += 1
                return
            header = message.header[_HEAD.size :]
            answer = self._handler(Message(message.sender, message.queue, header, message.payload))
            self._membership.monitor.notify_all()
        if answer is not None:
            answer()

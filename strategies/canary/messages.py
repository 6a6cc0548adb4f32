"""What ranks under Canary tell each other, and how they send it."""

from __future__ import annotations

import contextlib
import enum
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from hop_tf.collectives import BULK_LANE
from hop_tf.errors import ProtocolError
from hop_tf.membership import Interrupted, SessionQueue
from hop_tf.transport.base import Message

# kind, piece, zeta, sequence, number of contributions
_HEAD = struct.Struct("<IIqqI")
_CONTRIBUTION = struct.Struct("<Iq")
CONTRIBUTION_BYTES = _CONTRIBUTION.size


class MessageKind(enum.IntEnum):
    """Of a message.

    Attributes:
      UP: Contributions to a piece, summed up, on the way to its root.
      DOWN: The sum that its root sends out.
      MARKED_DOWN: The same; with it, everybody begins a resync of the piece.
      DIGEST: Tells by few bytes whether a replica's values for a resync are those of others; empty where it has none.
      VALUES: Its root asks for the values.
      SNAPSHOT: A replica's values for a resync; empty where it has none.
      MEAN: The mean of the replicas' values; empty where these are alike.
      PULL: Asks for a replica's state.
      STATE: That state.
      DONE: The sender has made its last step; the contributions tell how often it has contributed to each colayer.
        To a rank that has joined later: none.
      MOVED: The sender contributes to this layout from now on; the payload is the key of the one before, if there was
        one, and the contributions tell the same of that.
      FULL: The sender has received more than it may keep: nobody is to begin an iteration before there is room. The
        piece is the number of its thread.
      ROOM: There is room again.
      END: Its root sends out nothing more of the piece than what it has, up to this number.
      HEARD: The sender has heard of this layout: its roots are to say when no more comes of it.
      MISSED: The sender has left out some sums of the piece, up to this number: the receiver was silent.
      ENDING: The sender is about to end; the key tells the incarnations of ranks that it knows of (see `ending`).
    """

    UP = 0
    DOWN = 1
    MARKED_DOWN = 2
    SNAPSHOT = 3
    MEAN = 4
    PULL = 5
    STATE = 6
    DONE = 7
    MOVED = 8
    END = 9
    FULL = 10
    ROOM = 11
    ENDING = 12
    HEARD = 13
    DIGEST = 14
    VALUES = 15
    MISSED = 16


_KINDS = {kind.value: kind for kind in MessageKind}
# Where contributions are counts and colayers.
COUNTING = (MessageKind.DONE, MessageKind.MOVED)


class Header(NamedTuple):
    """The header of a message.

    Attributes:
      kind: What it is.
      key: Names the layout that it is about.
      newest: zeta, as far as the sender knows.
      piece: Number of the piece.
      sequence: Of DOWN: its number among those of the root for the piece; of END and MISSED: the last such number;
        of a resync's messages: that of the resync.
      contributions: Ranks and iterations of what is summed up.
    """

    kind: MessageKind
    key: bytes
    newest: int
    piece: int = 0
    sequence: int = 0
    contributions: tuple[tuple[int, int], ...] = ()

    def pack(self) -> bytes:
        """The header's bytes."""
        head = _HEAD.pack(self.kind, self.piece, self.newest, self.sequence, len(self.contributions))
        return head + self.key + b"".join(_CONTRIBUTION.pack(*each) for each in self.contributions)

    @classmethod
    def unpack(cls, message: Message, world_size: int) -> Header:
        """Reads a message's header.

        Raises:
          ProtocolError: If it is none.
        """
        header = message.header
        start = _HEAD.size + world_size
        if len(header) < start:
            raise message.unexpected()
        kind, piece, newest, sequence, count = _HEAD.unpack(header[: _HEAD.size])
        if len(header) != start + count * _CONTRIBUTION.size or kind not in _KINDS:
            raise ProtocolError(f"rank {message.sender} sent a malformed message to {message.queue!r}.")
        kind, contributions = _KINDS[kind], tuple(_CONTRIBUTION.iter_unpack(header[start:]))
        if kind not in COUNTING and any(rank >= world_size for rank, _ in contributions):
            raise ProtocolError(f"rank {message.sender} sent contributions of ranks that there are not.")
        return cls(kind, header[_HEAD.size : start], newest, piece, sequence, contributions)


class Channel:
    """Sends a rank's messages.

    Args:
      queue: Where messages to other ranks go.
      newest: Gives zeta, as far as this rank knows.
    """

    def __init__(self, queue: SessionQueue, newest: Callable[[], int]):
        self._queue = queue
        self._newest = newest

    def header(
        self,
        kind: MessageKind,
        key: bytes,
        piece: int = 0,
        sequence: int = 0,
        contributions: tuple[tuple[int, int], ...] = (),
    ) -> Header:
        """The header of a message about a layout."""
        return Header(kind, key, self._newest(), piece, sequence, contributions)

    def send(self, rank: int, header: Header, payload: Sequence[np.ndarray] = (), level: int = 0) -> None:
        """Sends a message on the lane of an interface; drops it where the receiver, or this rank, has left."""
        with contextlib.suppress(Interrupted):
            lane, step = BULK_LANE + level, max(0, header.newest)
            self._queue.send(rank, header.pack(), payload, lane, step=step)

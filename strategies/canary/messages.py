"""The messages between ranks under Canary, and the channel that sends them."""

from __future__ import annotations

import contextlib
import enum
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from hop_tf.errors import ProtocolError
from hop_tf.membership.session_queue import SessionQueue
from hop_tf.membership.waiting import Interrupted
from hop_tf.transport.base import BULK_LANE, Message

# kind, piece, zeta, sequence, number of contributions
_HEAD = struct.Struct("<IIqqI")
_CONTRIBUTION = struct.Struct("<Iq")
CONTRIBUTION_BYTES = _CONTRIBUTION.size


class MessageKind(enum.IntEnum):
    """The kind of a message.

    Attributes:
      UP: Contributions to a piece, summed up, on the way to the piece's root.
      DOWN: The sum that the piece's root sends out.
      MARKED_DOWN: As DOWN. When this message arrives, each rank begins a resync of the piece.
      DIGEST: A short digest of a replica's values for a resync, to compare it with others. Empty if the replica has no
        values.
      VALUES: The piece's root asks for a replica's values.
      SNAPSHOT: A replica's values for a resync. Empty if the replica has none.
      MEAN: The mean of the replicas' values. Empty if all these values are equal.
      PULL: Asks for a replica's state.
      STATE: The replica's state, or empty if it has none to give.
      DONE: The sender has made its last step. The field `contributions` has the number of its contributions to each
        colayer. A message to a rank that joined after that step has no contributions.
      MOVED: The sender contributes to this layout from now on. The payload is the key of its previous layout, if there
        was one. The field `contributions` has the number of the sender's contributions to each colayer of the previous
        layout.
      FULL: The sender has received more than it may keep: no rank is to begin an iteration before there is room. The
        field `piece` is the number of the sender's thread.
      ROOM: The sender has room again. The field `piece` is the number of the sender's thread.
      END: The piece's root sends no further sums. The last one has this sequence number.
      HEARD: The sender knows this layout. The layout's roots are to announce its end.
      MISSED: The sender did not send some sums of the piece, up to this sequence number, because the receiver was
        silent.
      ENDING: The sender is about to end. The key has the incarnations of the ranks that the sender knows.
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
# The kinds whose contributions are pairs of a count and a colayer.
COUNTING = (MessageKind.DONE, MessageKind.MOVED)


class Header(NamedTuple):
    """The header of a message.

    Attributes:
      kind: The kind of message.
      key: The key of the message's layout.
      newest: zeta, as far as the sender knows.
      piece: The index of the piece.
      sequence: In DOWN: the number of the message among the root's messages of the piece. In END and MISSED: the last
        such number. In a resync's messages: the number of the resync.
      contributions: The ranks and iterations of the contributions in the sum.
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
          ProtocolError: If the header is malformed.
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
            raise ProtocolError(f"rank {message.sender} sent contributions of unknown ranks.")
        return cls(kind, header[_HEAD.size : start], newest, piece, sequence, contributions)


class Channel:
    """Sends a rank's messages.

    Args:
      queue: The queue of messages to other ranks.
      newest: Returns zeta, as far as this rank knows.
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
        """Sends a message on the lane of an interface. Drops it if the receiver, or this rank, has left."""
        with contextlib.suppress(Interrupted):
            lane, step = BULK_LANE + level, max(0, header.newest)
            self._queue.send(rank, header.pack(), payload, lane, step=step)

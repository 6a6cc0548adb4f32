"""`TreeCollectives`: broadcast, mean and gather along a binary tree of all ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from hop_tf.errors import PeerFailedError, PeerLostError, ProtocolError
from hop_tf.membership.session import Membership, tree_neighbors
from hop_tf.tensors import payloads
from hop_tf.transport.base import BULK_LANE, Message

_RANK = np.dtype("<i8")


class TreeCollectives:
    """Broadcast from rank 0, mean over all ranks, and gather, along a binary tree.

    Each rank sends and receives every array at most three times, for any number of ranks, and log2(world_size) messages
    follow each other. Meant for single events (initial values, a final average), and for small values.

    Args:
      membership: Waiting and transport.
    """

    def __init__(self, membership: Membership):
        self._membership = membership
        self._transport = membership.transport
        self._parent, self._children = tree_neighbors(membership.rank, membership.world_size)
        self._sent: dict[str, int] = {}

    def begin_session(self) -> None:
        """Called when the rank is about to enter a session: its operations count from 0."""
        self._sent.clear()

    @property
    def sent_rounds(self) -> dict[str, int]:
        """For `Membership.leave`: the number of operations of the session that this rank has sent, by name."""
        return dict(self._sent)

    def broadcast(self, name: str, payload: Sequence[np.ndarray], number: int | None = None) -> np.ndarray | None:
        """Gives every rank the bytes of rank 0.

        Args:
          name: Name of this operation, equal on all ranks. Never used twice, except with another `number`.
          payload: The arrays that rank 0 sends; ignored elsewhere. Do not modify them afterwards.
          number: Number of this operation among those of its name in the running session, from 0. A rank that leaves
            the session before it sends takes no part. Default: the operation belongs to no session.

        Returns:
          None on rank 0; elsewhere rank 0's bytes, 1-D uint8, read-only and 64-byte aligned.

        Blocks: until the parent in the tree has sent.

        Raises:
          HopError: As `Membership.wait` does. Also if the parent leaves before it has sent.
        """
        received = None
        if self._parent is not None:
            received = self._receive(f"broadcast/{name}", [self._parent], number)[self._parent]
            payload = [received]
        self._send(f"broadcast/{name}", self._children, payload, number)
        return received

    def mean(self, name: str, arrays: Sequence[np.ndarray], counts: bool = True) -> list[np.ndarray]:
        """Averages arrays over all ranks that count. The result is equal on all ranks, to the bit.

        A rank moves its mean towards a child's mean, in proportion to the number of ranks in the child's mean. So
        values that are equal on all ranks stay the same, to the bit.

        Args:
          name: Name of this operation, equal on all ranks, never used twice.
          arrays: Arrays of equal shapes and (float) dtypes on all ranks. Means are kept in float32 at least.
          counts: True if this rank's arrays count. At least one rank's must.

        Returns:
          The means, with the shapes and dtypes of `arrays`.

        Blocks: until all ranks take part.

        Raises:
          HopError: As `Membership.wait` does.
        """
        make = np.array if counts else np.zeros_like
        means = [make(a, dtype=np.promote_types(a.dtype, np.float32), order="C") for a in arrays]
        number = np.array(counts, np.float32)
        up = self._receive(f"reduce/{name}", self._children)
        for child in self._children:
            *others, of_child = _split(up[child], [*means, number])
            if of_child:
                number += of_child
                for mean, other in zip(means, others, strict=True):
                    mean += (other - mean) * (of_child / number)
        if self._parent is not None:
            self._send(f"reduce/{name}", [self._parent], [*means, number])
            means = _split(self._receive(f"mean/{name}", [self._parent])[self._parent], means)
        self._send(f"mean/{name}", self._children, means)
        return [mean.astype(a.dtype) for mean, a in zip(means, arrays, strict=True)]

    def gather(self, name: str, value: object) -> list | None:
        """Brings a small value of every rank to rank 0.

        Args:
          name: Name of this operation, equal on all ranks, never used twice.
          value: Any value that JSON can hold.

        Returns:
          On rank 0 the values in the order of ranks; elsewhere None.

        Blocks: until all ranks below this one in the tree take part.

        Raises:
          TypeError: If JSON cannot hold `value`.
          HopError: As `Membership.wait` does.
        """
        # Every rank refuses a value that JSON cannot hold.
        gathered = self._gather(name, np.frombuffer(json.dumps(value).encode(), np.uint8))
        return None if gathered is None else [json.loads(data.tobytes()) for data in gathered]

    def all_gather(self, name: str, data: bytes, number: int | None = None) -> list[bytes]:
        """Gives every rank each rank's bytes.

        Args:
          name: See `broadcast`.
          data: This rank's bytes.
          number: See `broadcast`.

        Returns:
          The bytes of all ranks, in the order of ranks.

        Blocks: until all ranks take part.

        Raises:
          HopError: As `Membership.wait` does. Also if a neighbor in the tree leaves before it has sent.
        """
        gathered = self._gather(name, np.frombuffer(data, np.uint8), number)
        received = self.broadcast(name, payloads.join(gathered) if gathered else (), number)
        return [part.tobytes() for part in (gathered if received is None else payloads.split(received))]

    def _gather(self, name: str, data: np.ndarray, number: int | None = None) -> list[np.ndarray] | None:
        """Returns the ranks' data, in the order of ranks, on rank 0; elsewhere None."""
        known = {self._membership.rank: data}
        for payload in self._receive(f"gather/{name}", self._children, number).values():
            ranks, *parts = payloads.split(payload)
            known.update(zip(ranks.view(_RANK).tolist(), parts, strict=True))
        if self._parent is None:
            return [known[rank] for rank in range(self._membership.world_size)]
        payload = payloads.join([np.array([*known], _RANK), *known.values()])
        self._send(f"gather/{name}", [self._parent], payload, number)
        return None

    def _queue(self, group: str, number: int | None) -> str:
        return group if number is None else f"{group}/{self._membership.session}.{number}"

    def _send(
        self, group: str, receivers: Sequence[int], payload: Sequence[np.ndarray], number: int | None = None
    ) -> None:
        for receiver in receivers:
            self._transport.send(receiver, self._queue(group, number), payload=payload, lane=BULK_LANE)
        if number is not None:
            self._sent[group] = number + 1

    def _receive(self, group: str, senders: Sequence[int], number: int | None = None) -> dict[int, np.ndarray]:
        """Receives one message from each sender."""
        queue = self._queue(group, number)
        inbox: dict[int, Message] = {}

        def on_message(message: Message) -> None:
            with self._membership.monitor:
                inbox[message.sender] = message
                self._membership.monitor.notify_all()

        def missing() -> list[int]:
            awaited = [sender for sender in senders if sender not in inbox]
            for sender in awaited if number is not None else ():
                # The news that a sender has left may overtake its message, which is on another lane.
                if not self._membership.delivers(sender, group, number):
                    departure = self._membership.departure(sender)
                    kind = PeerFailedError if departure.failed else PeerLostError
                    reason = departure.reason or (
                        "it has made all its steps. All ranks must make the same number of steps if a step needs the "
                        "values of all ranks."
                    )
                    raise kind(f"rank {self._membership.rank}: rank {sender} left before {queue!r}: {reason}")
            return awaited

        for sender in senders:  # From now on, the sender's silence counts as a loss.
            self._transport.connect(sender)
        self._transport.register(queue, on_message)
        try:
            self._membership.wait(missing, operation=f"receive {queue!r}")
        finally:
            self._transport.unregister(queue)
        return {sender: message.payload for sender, message in inbox.items()}


def _split(payload: np.ndarray, like: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Cuts bytes into arrays shaped as `like`."""
    if payload.nbytes != sum(a.nbytes for a in like):
        raise ProtocolError(f"expected {sum(a.nbytes for a in like)} bytes. Received: {payload.nbytes} bytes.")
    ends = np.cumsum([a.nbytes for a in like])
    return [payload[end - a.nbytes : end].view(a.dtype).reshape(a.shape) for a, end in zip(like, ends, strict=True)]

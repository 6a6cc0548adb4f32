"""`InProcessTransport`: the transport between ranks that are threads of one process, for tests."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence

import numpy as np

from hop_tf.errors import HopError
from hop_tf.options import CommunicationOptions
from hop_tf.records import Recorder
from hop_tf.tensors.buffers import BufferPool
from hop_tf.transport.base import Message, PeerStatus
from hop_tf.transport.framing import Outgoing
from hop_tf.transport.inbox import Inbox
from hop_tf.transport.outbox import Outbox
from hop_tf.transport.peer import Peer
from hop_tf.transport.queue_transport import QueueTransport

_ALIGNMENT_BYTES = 64
_INCARNATION = "in process"


class InProcessNetwork:
    """Connects the ranks of one process, and breaks their connections on demand.

    Args:
      num_ranks: Number of ranks.
    """

    def __init__(self, num_ranks: int):
        self.addresses = tuple(f"in-process:{rank}" for rank in range(num_ranks))
        self._changed = threading.Condition()
        self._transports: dict[int, InProcessTransport] = {}
        self._wanted: set[frozenset[int]] = set()
        self._cut: set[frozenset[int]] = set()

    def disconnect(self, rank: int, other: int) -> None:
        """Cuts the connection between two ranks. Messages wait until `reconnect`."""
        self._break([frozenset((rank, other))])

    def reconnect(self, rank: int, other: int) -> None:
        """Restores the connection between two ranks."""
        with self._changed:
            self._cut.discard(frozenset((rank, other)))
            self._changed.notify_all()

    def kill(self, rank: int) -> None:
        """Cuts a rank off from all others, as if its process had died."""
        self._break([frozenset((rank, other)) for other in range(len(self.addresses)) if other != rank])

    def join(self, transport: InProcessTransport) -> None:
        """Called when a rank begins to serve.

        Raises:
          HopError: If another transport serves as that rank.
        """
        with self._changed:
            if transport.rank in self._transports:
                raise HopError(f"rank {transport.rank}: cannot serve on {self.addresses[transport.rank]}: in use.")
            self._transports[transport.rank] = transport
            self._changed.notify_all()

    def leave(self, transport: InProcessTransport) -> None:
        """Called when a rank no longer serves."""
        with self._changed:
            if self._transports.get(transport.rank) is transport:
                self._note_life(transport.rank)
                del self._transports[transport.rank]
            self._changed.notify_all()

    def serves(self, rank: int) -> bool:
        """True if a transport serves as that rank now."""
        with self._changed:
            return rank in self._transports

    def want(self, rank: int, other: int) -> None:
        """Called when one of the two ranks wants the connection."""
        with self._changed:
            self._wanted.add(frozenset((rank, other)))

    def receiver(self, rank: int, peer: int) -> InProcessTransport | None:
        """The transport of `peer` that `rank` is connected to; None without a connection."""
        with self._changed:
            pair = frozenset((rank, peer))
            return self._transports.get(peer) if pair in self._wanted and pair not in self._cut else None

    def wait_receiver(self, rank: int, peer: int, ended: Callable[[], bool]) -> InProcessTransport | None:
        """Waits for the connection. Returns None if `ended()` is true first."""
        with self._changed:
            self._changed.wait_for(lambda: ended() or self.receiver(rank, peer) is not None)
            return None if ended() else self.receiver(rank, peer)

    def _break(self, pairs: Sequence[frozenset[int]]) -> None:
        with self._changed:
            for pair in pairs:
                self._note_life(*pair)
                self._cut.add(pair)
            transports = [transport for rank, transport in self._transports.items() if any(rank in p for p in pairs)]
        for transport in transports:
            transport.interrupt_links()

    def _note_life(self, *ranks: int) -> None:
        """Records, before a connection is cut, that both sides have heard of each other until now."""
        for transport in self._transports.values():
            for rank in ranks:
                if rank != transport.rank:
                    transport.status(rank)


class InProcessTransport(QueueTransport):
    """Named queues between ranks that are threads of one process.

    Payloads of one aligned array are not copied: the receiver sees the sender's memory, read-only.

    Args:
      rank: This rank.
      network: The network that connects the ranks.
      options: Deadlines.
      pool: Provides memory for copied payloads. Default: a pool of its own.
      on_error: See `QueueTransport`.
      on_restart: See `QueueTransport`. Threads are not restarted: it is never called.
      recorder: See `QueueTransport`.
      num_ranks: See `QueueTransport`.
    """

    def __init__(
        self,
        rank: int,
        network: InProcessNetwork,
        *,
        options: CommunicationOptions | None = None,
        pool: BufferPool | None = None,
        on_error: Callable[[BaseException], None] | None = None,
        on_restart: Callable[[int], None] | None = None,
        recorder: Recorder | None = None,
        num_ranks: int | None = None,
    ):
        options = options or CommunicationOptions()
        super().__init__(
            rank,
            network.addresses,
            options=options,
            on_error=on_error,
            on_restart=on_restart,
            recorder=recorder,
            num_ranks=num_ranks,
        )
        self._network = network
        self._pool = pool or BufferPool()
        self._links: list[_Link] = []

    @property
    def incarnation(self) -> str:
        return _INCARNATION

    def start(self) -> None:
        self._check_open()
        self._network.join(self)

    def status(self, peer: int) -> PeerStatus:
        known = self._peer(peer)
        connected = self._network.receiver(self._rank, peer) is not None
        if connected:
            known.is_incarnation(_INCARNATION)
            known.heard()
        problem = "" if connected else "not connected"
        return dataclasses.replace(super().status(peer), connected=connected, last_problem=problem)

    def interrupt_links(self) -> None:
        """Makes all links check the network again."""
        for link in list(self._links):
            link.outbox.interrupt()

    def inbox(self, sender: int, lane: int) -> Inbox:
        """The inbox for messages of `sender` on `lane`."""
        return self._dispatcher.inbox(sender, lane)

    def _watch(self, peer: Peer) -> None:
        self._network.want(self._rank, peer.rank)

    def _open_lane(self, peer: Peer, lane: int, outbox: Outbox) -> None:
        self._links.append(_Link(self._network, self._rank, peer, lane, outbox, self._pool))

    def _close_links(self, deadline: float) -> None:
        for link in self._links:
            link.closed = True
        self._network.leave(self)
        self._dispatcher.close(deadline)
        self._join([link.thread for link in self._links], deadline)


class _Link:
    """Carries the messages of one (sender, receiver, lane) on a thread of its own."""

    def __init__(self, network: InProcessNetwork, rank: int, peer: Peer, lane: int, outbox: Outbox, pool: BufferPool):
        self.outbox = outbox
        self.closed = False
        self._network = network
        self._rank = rank
        self._peer = peer
        self._lane = lane
        self._pool = pool
        self.thread = threading.Thread(target=self._run, name=f"hop_tf link {rank} to {peer}", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while (receiver := self._wait_receiver()) is not None:
            inbox = receiver.inbox(self._rank, self._lane)
            inbox_epoch, received_sequence = inbox.begin(self.outbox.first_sequence)
            epoch = self.outbox.resume(received_sequence)
            while self._is_connected_to(receiver) and (message := self.outbox.take(epoch)) is not None:
                sequence, is_recorded, message = message.sequence, message.is_recorded, self._convert(message)
                if not inbox.accept(inbox_epoch, sequence, message, is_recorded):
                    break
                del message
                self.outbox.acknowledge(epoch, sequence)

    def _wait_receiver(self) -> InProcessTransport | None:
        return self._network.wait_receiver(self._rank, self._peer.rank, lambda: self.closed)

    def _is_connected_to(self, receiver: InProcessTransport) -> bool:
        return not self.closed and self._network.receiver(self._rank, self._peer.rank) is receiver

    def _convert(self, message: Outgoing) -> Message:
        return Message(self._rank, message.queue.decode(), message.header, self._payload(message.payload))

    def _payload(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        if len(arrays) == 1 and arrays[0].ctypes.data % _ALIGNMENT_BYTES == 0:
            payload = arrays[0].view()
        else:
            payload = self._pool.take(sum(array.nbytes for array in arrays))
            if arrays:
                np.concatenate(arrays, out=payload)
        payload.flags.writeable = False
        return payload

"""What keeps neighbors of Hop from running away from each other: token queues, or NOTIFY-ACK.

Both tell a neighbor something small at one point of an iteration, and wait for that at another. A rank that has ended
is neither told nor waited for.
"""

from __future__ import annotations

import abc
import struct
from collections.abc import Sequence

from hop_tf.collectives import BULK_LANE
from hop_tf.errors import ProtocolError
from hop_tf.queues import TokenQueue
from hop_tf.strategies.hop_settings import HopSettings
from hop_tf.topology import Topology
from hop_tf.transport.base import Message
from hop_tf.worker import ExchangeContext

_HEADER = struct.Struct("<qqq")  # session, iteration, number of iterations


class Pacing(abc.ABC):
    """Bounds on the distance between neighbors.

    Args:
      context: Membership of the group.
      topology: The communication graph.
    """

    def __init__(self, context: ExchangeContext, topology: Topology):
        self._membership = context.membership
        self._monitor = context.membership.monitor
        rank = context.membership.rank
        self._in_neighbors = topology.in_neighbors(rank)
        self._out_neighbors = topology.out_neighbors(rank)
        self._queue_name = f"pace/{context.group}"
        self._make_fifo = context.make_fifo
        self._session = context.session

    def start(self) -> None:
        """Begins to take messages."""
        self._membership.transport.register(self._queue_name, self._on_message)

    def close(self) -> None:
        """Stops taking messages."""
        self._membership.transport.unregister(self._queue_name)

    @abc.abstractmethod
    def reset(self, session: int) -> None:
        """Forgets everything, for iteration 0 of `session`."""

    def enter(self, k: int, num_iterations: int) -> None:
        """The rank enters iteration k, `num_iterations` after the last one."""

    def wait_to_send(self, k: int) -> None:
        """Called before the Send of iteration k."""

    def reduced(self, k: int) -> None:
        """The updates of iteration k have been used."""

    def advance(self, k: int) -> int:
        """Waits until the rank may leave iteration k; returns by how many iterations it then is to advance."""
        return 1

    def known_iteration(self, j: int) -> int:
        """An iteration that out-neighbor j has reached, maybe passed."""
        return 0

    def _tell_in_neighbors(self, k: int, num_iterations: int) -> None:
        header = _HEADER.pack(self._session, k, num_iterations)
        for j in self._present(self._in_neighbors):
            self._membership.send(j, self._queue_name, header, lane=BULK_LANE)

    def _present(self, ranks: Sequence[int]) -> list[int]:
        return [j for j in ranks if self._membership.departure(j) is None]

    def _on_message(self, message: Message) -> None:
        if message.sender not in self._out_neighbors or len(message.header) != _HEADER.size:
            raise ProtocolError(f"rank {message.sender} sent an unexpected message to {message.queue!r}.")
        session, iteration, num_iterations = _HEADER.unpack(message.header)
        with self._monitor:
            if session == self._session:
                self._note(message.sender, iteration, num_iterations)
                self._monitor.notify_all()

    @abc.abstractmethod
    def _note(self, j: int, iteration: int, num_iterations: int) -> None:
        """Out-neighbor j has told of `iteration`."""


class TokenPacing(Pacing):
    """Token queues (section 4.2), and with them the jumps of stragglers (section 5)."""

    def __init__(self, context: ExchangeContext, topology: Topology, settings: HopSettings):
        super().__init__(context, topology)
        self._max_ig = settings.max_iteration_gap
        self._skip = settings.skip
        rank = context.membership.rank
        self._capacities = {j: self._max_ig * (topology.shortest_path_length(j, rank) + 1) for j in self._out_neighbors}
        self.reset(context.session)

    def reset(self, session: int) -> None:
        with self._monitor:
            self._session = session
            self._tokens = {  # Line 5.
                j: TokenQueue(num_initial=self._max_ig - 1, capacity=capacity, make_fifo=self._make_fifo)
                for j, capacity in self._capacities.items()
            }

    def enter(self, k: int, num_iterations: int) -> None:
        """Line 10: one token for every iteration that was entered, jumped over or not."""
        self._tell_in_neighbors(k, num_iterations)

    def advance(self, k: int) -> int:
        """Line 17: takes a token from every out-neighbor; if all are far ahead, as many as are jumped over."""

        def missing() -> list[int]:
            return [j for j in self._present(self._out_neighbors) if not self._tokens[j]]

        self._membership.wait(missing, operation="acquire token", step=k)
        with self._monitor:
            queues = [self._tokens[j] for j in self._present(self._out_neighbors)]
            num_iterations = self._jump(queues)
            for tokens in queues:
                tokens.take(num_iterations)
            return num_iterations

    def _jump(self, queues: Sequence[TokenQueue]) -> int:
        if self._skip is None or not queues:
            return 1
        return self._skip.jump(min(len(tokens) for tokens in queues) - self._max_ig)

    def known_iteration(self, j: int) -> int:
        return self._tokens[j].iteration

    def _note(self, j: int, iteration: int, num_iterations: int) -> None:
        self._tokens[j].put(iteration, num_iterations)


class NotifyAckPacing(Pacing):
    """NOTIFY-ACK (section 3.3): an update is sent when the receiver has used the one before."""

    def __init__(self, context: ExchangeContext, topology: Topology):
        super().__init__(context, topology)
        self.reset(context.session)

    def reset(self, session: int) -> None:
        with self._monitor:
            self._session = session
            self._acknowledged = dict.fromkeys(self._out_neighbors, -1)

    def wait_to_send(self, k: int) -> None:
        """Waits until every out-neighbor has used the update of iteration k - 1."""

        def missing() -> list[int]:
            return [j for j in self._present(self._out_neighbors) if self._acknowledged[j] < k - 1]

        self._membership.wait(missing, operation="receive acknowledgement", step=k)

    def reduced(self, k: int) -> None:
        """Tells every in-neighbor that its update of iteration k was used."""
        self._tell_in_neighbors(k, 1)

    def _note(self, j: int, iteration: int, num_iterations: int) -> None:
        self._acknowledged[j] = iteration


def make_pacing(context: ExchangeContext, topology: Topology, settings: HopSettings) -> Pacing:
    """The one that the settings ask for."""
    if settings.uses_notify_ack:
        return NotifyAckPacing(context, topology)
    return TokenPacing(context, topology, settings)

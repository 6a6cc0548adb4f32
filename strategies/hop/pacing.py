"""`Pacing`: the bound on the distance between neighbors of Hop, by token queues or NOTIFY-ACK.

At one point of an iteration, a rank sends its neighbors a small message, unless an update carries it. At another point
it waits for such messages. Ranks that have ended get no messages, and no rank waits for them. For a rank that joins
late, counting starts at the iteration in which it enters.
"""

from __future__ import annotations

import abc
import struct
from collections.abc import Mapping, Sequence

from hop_tf.membership.session_queue import SessionQueue
from hop_tf.runtime.group import ExchangeContext
from hop_tf.strategies.hop.absence import Absence
from hop_tf.strategies.hop.settings import HopSettings
from hop_tf.tensors.fifo import TokenQueue
from hop_tf.topology import Topology
from hop_tf.transport.base import Message

ITERATION = struct.Struct("<q")


class Pacing(abc.ABC):
    """Bounds on the distance between neighbors.

    Args:
      context: Membership of the group.
      topology: The communication graph.
      absence: Neighbors that are not waited for.
    """

    def __init__(self, context: ExchangeContext, topology: Topology, absence: Absence):
        self._absence = absence
        self._membership = context.membership
        self._monitor = context.membership.monitor
        rank = context.membership.rank
        self._in_neighbors = topology.in_neighbors(rank)
        self._out_neighbors = topology.out_neighbors(rank)
        self._told = self._in_neighbors  # The neighbors that get separate messages.
        self._queue = SessionQueue(context.membership, f"pace/{context.group}", context.session)
        self._begin(0)
        self._queue.start(self._on_message)

    def close(self) -> None:
        """Stops taking messages."""
        self._queue.close()

    def reset(self, session: int, start: int = 0) -> None:
        """Forgets everything. The rank is to enter iteration `start` of `session`."""
        with self._monitor:
            self._queue.session = session
            self._begin(start)

    @abc.abstractmethod
    def _begin(self, start: int) -> None:
        """Prepares for iteration `start`."""

    def behind(self) -> list[int]:
        """The out-neighbors that joined so far behind that this rank may not enter its next iteration yet."""
        return []

    def enter(self, k: int, incarnations: Mapping[int, int]) -> None:
        """Called when the rank enters iteration k. `incarnations`: those of the neighbors that are present."""

    def wait_to_send(self, k: int) -> None:
        """Called before the Send of iteration k."""

    def reduced(self, k: int, incarnations: Mapping[int, int]) -> None:
        """Called after the updates of iteration k were used. `incarnations` as in `enter`."""

    def advance(self, k: int, *, was_passed_by: bool = False) -> int:
        """Waits until the rank may leave iteration k. Returns the number of iterations by which it is to advance.

        Args:
          k: The iteration.
          was_passed_by: True if in-neighbors are further ahead than the bound, because this rank was silent.
        """
        del was_passed_by
        return 1

    def known_iteration(self, j: int) -> int:
        """An iteration that out-neighbor j has reached or passed."""
        return 0

    def hear_update(self, j: int, iteration: int) -> None:
        """Called when an update of in-neighbor j has come, which shows that j has entered `iteration`."""

    @abc.abstractmethod
    def admit(self, j: int, start: int) -> None:
        """Called when out-neighbor j joins. It is to enter iteration `start`."""

    @abc.abstractmethod
    def meet(self, j: int, k: int) -> None:
        """Called when this rank has joined. Out-neighbor j is in iteration k."""

    def _tell_in_neighbors(self, k: int, incarnations: Mapping[int, int]) -> None:
        for j in self._present(self._told):
            incarnation = incarnations.get(j)  # `admit` removes a rank that joins, maybe just now.
            if incarnation is not None:
                # On lane 0, because behind an update on a slow link, the message would delay a rank that does not need
                # that update. For an absent rank, the message supersedes earlier ones, because it contains their
                # information.
                self._queue.send(
                    j, ITERATION.pack(k), incarnation=incarnation, step=k, supersedes=self._absence.includes(j)
                )

    def _present(self, ranks: Sequence[int]) -> list[int]:
        return [j for j in ranks if self._membership.departure(j) is None]

    def _on_message(self, message: Message) -> None:
        if message.sender not in self._out_neighbors or len(message.header) != ITERATION.size:
            raise message.unexpected()
        self._note(message.sender, *ITERATION.unpack(message.header))

    @abc.abstractmethod
    def _note(self, j: int, iteration: int) -> None:
        """Records the iteration that out-neighbor j has announced."""


class TokenPacing(Pacing):
    """Token queues (section 4.2), and with them the jumps of stragglers (section 5).

    A rank sends its update of iteration k when it has entered k. If receivers wait for every update, an update also
    stands for a token. So a rank that is both in- and out-neighbor needs no separate messages for tokens.
    """

    def __init__(self, context: ExchangeContext, topology: Topology, settings: HopSettings, absence: Absence):
        self._max_ig = settings.max_iteration_gap
        self._skip = settings.skip
        self._has_surplus = settings.tolerates_stragglers
        # Theorem 2 for the longest possible path. When other ranks have ended, there may be no shorter one.
        self._capacity = self._max_ig * topology.world_size
        super().__init__(context, topology, absence)
        if not settings.tolerates_stragglers:
            self._told = [j for j in self._in_neighbors if j not in self._out_neighbors]

    def _begin(self, start: int) -> None:
        self._permitted = start  # The iteration up to which tokens were taken.
        self._tokens = {j: self._make_queue(-1) for j in self._out_neighbors}  # Line 5.

    def _make_queue(self, iteration: int) -> TokenQueue:
        """TokenQ(j -> i), if j is in `iteration`."""
        return TokenQueue(
            num_initial=iteration - self._permitted + self._max_ig,
            capacity=self._capacity,
            iteration=iteration,
        )

    def behind(self) -> list[int]:
        return [j for j in self._bound_by() if self._tokens[j].size < 0]

    def _bound_by(self) -> list[int]:
        """Out-neighbors whose tokens this rank needs."""
        present = self._present(self._out_neighbors)
        if not self._absence.is_any():
            return present
        return [j for j in present if not self._absence.owes_tokens(j)]

    def enter(self, k: int, incarnations: Mapping[int, int]) -> None:
        """Line 10: inserts a token for every iteration up to k, including those that were jumped over."""
        self._tell_in_neighbors(k, incarnations)

    def advance(self, k: int, *, was_passed_by: bool = False) -> int:
        """Line 17: takes one token from every out-neighbor; for a jump, one for each of its iterations."""

        def missing() -> list[int]:
            return [j for j in self._bound_by() if self._tokens[j].size <= 0]

        while True:
            self._absence.wait(missing, operation="acquire token", step=k)
            with self._monitor:
                if not missing():  # A rank may have joined since.
                    return self._take(k, was_passed_by)

    def _take(self, k: int, was_passed_by: bool) -> int:
        num_iterations = self._jump([self._tokens[j] for j in self._bound_by()], was_passed_by)
        for j in self._present(self._out_neighbors):
            self._tokens[j].take(num_iterations, may_owe=self._absence.owes_tokens(j))
        self._permitted = k + num_iterations
        return num_iterations

    def _jump(self, queues: Sequence[TokenQueue], was_passed_by: bool) -> int:
        if queues and was_passed_by:
            return max(1, min(tokens.size for tokens in queues) - self._max_ig)
        if self._skip is None or not queues:
            return 1
        # A jump needs updates of in-neighbors, which wait for this rank's tokens when they are max_ig iterations ahead.
        # In directed graphs, out-neighbors may be further ahead.
        num_behind = min(tokens.size for tokens in queues) - self._max_ig
        return min(self._skip.jump(num_behind), self._max_ig + 1)

    def known_iteration(self, j: int) -> int:
        return self._tokens[j].iteration

    def admit(self, j: int, start: int) -> None:
        """Makes a queue as if j was in the iteration before `start`."""
        self._tokens[j] = self._make_queue(start - 1)

    def meet(self, j: int, k: int) -> None:
        """Inserts the tokens of j up to iteration k. Tokens of a later iteration may have come first."""
        if k > self._tokens[j].iteration:
            self._put(j, k)

    def hear_update(self, j: int, iteration: int) -> None:
        if j in self._tokens and not self._has_surplus and iteration > self._tokens[j].iteration:
            self._put(j, iteration)

    def _note(self, j: int, iteration: int) -> None:
        self._put(j, iteration)
        if self._absence.is_any():
            self._absence.hear(j, is_near=self._tokens[j].size > 0)

    def _put(self, j: int, iteration: int) -> None:
        self._tokens[j].put(iteration, has_surplus=self._has_surplus)


class NotifyAckPacing(Pacing):
    """NOTIFY-ACK (section 3.3): a rank sends an update only after the receiver has used the previous one."""

    def _begin(self, start: int) -> None:
        del start
        self._acknowledged = dict.fromkeys(self._out_neighbors, -1)

    def wait_to_send(self, k: int) -> None:
        """Waits until every out-neighbor has used the update of iteration k - 1."""

        def missing() -> list[int]:
            return [j for j in self._present(self._out_neighbors) if self._acknowledged[j] < k - 1]

        self._membership.wait(missing, operation="receive acknowledgement", step=k)

    def reduced(self, k: int, incarnations: Mapping[int, int]) -> None:
        """Tells every in-neighbor that its update of iteration k was used."""
        self._tell_in_neighbors(k, incarnations)

    def admit(self, j: int, start: int) -> None:
        """Records that j will use no update before iteration `start`."""
        self._acknowledged[j] = start - 1

    def meet(self, j: int, k: int) -> None:
        """Records that j uses only this rank's updates of iterations after k."""
        self._acknowledged[j] = max(k, self._acknowledged[j])

    def _note(self, j: int, iteration: int) -> None:
        self._acknowledged[j] = max(iteration, self._acknowledged[j])


def make_pacing(context: ExchangeContext, topology: Topology, settings: HopSettings, absence: Absence) -> Pacing:
    """Returns the pacing that the settings ask for."""
    if settings.uses_notify_ack:
        return NotifyAckPacing(context, topology, absence)
    return TokenPacing(context, topology, settings, absence)

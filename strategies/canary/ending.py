"""The agreement of ranks under Canary on the set of ranks that end a `fit` together.

At the end, the weights become the mean of all replicas, and a rank that has this mean leaves. A rank that joins
meanwhile cannot be in the mean, because some ranks may have ended already. So each rank waits until all known ranks
have made their last step, and then announces the set of ranks it knows. It joins only the mean over exactly that set.
If an announcement names further ranks, the rank announces again. Otherwise all ranks have announced the same set, and
know it. A rank that joins later is too late, and learns so at its end.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from hop_tf.membership.session import Membership
from hop_tf.strategies.canary.contributions import Contributions
from hop_tf.strategies.canary.messages import Channel, MessageKind
from hop_tf.strategies.canary.peers import Peers, is_past


class Ending:
    """The end of one rank's `fit`.

    Args:
      membership: Waits for ranks.
      peers: The state of the other ranks.
      contributions: The contributions in flight.
      channel: Sends messages.
      wait_for_others: See `FlowControl.wait_for_others`.
      fill_gaps: `fill_gaps(k)` takes the state of another rank, if this rank lacks something.
    """

    def __init__(
        self,
        membership: Membership,
        peers: Peers,
        contributions: Contributions,
        channel: Channel,
        wait_for_others: Callable[[int], None],
        fill_gaps: Callable[[int], None],
    ):
        self._membership = membership
        self._peers = peers
        self._contributions = contributions
        self._channel = channel
        self._wait_for_others = wait_for_others
        self._fill_gaps = fill_gaps

    def agree(self, k: int) -> bytes:
        """Waits until the ranks that end together know each other, have made their last step, and merged everything.

        Returns:
          The incarnations of the ranks that end together: see `Peers.incarnations`. Ranks that have left do not count.

        Raises:
          HopError: As `Membership.wait` does.
        """
        while True:
            self._wait_for_others(k)
            self._fill_gaps(k)
            self._contributions.settle()
            incarnations = self._tell()
            self._wait(functools.partial(self._missing, incarnations), k)
            with self._membership.monitor:
                if not self._telling_of_more(incarnations):
                    return incarnations
            # Waits until this rank knows the further ranks, too.
            self._wait(lambda: self._telling_of_more(self._peers.incarnations()), k)

    def _tell(self) -> bytes:
        with self._membership.monitor:
            incarnations, others = self._peers.incarnations(), self._peers.present()
        header = self._channel.header(MessageKind.ENDING, incarnations)
        for rank in others:
            self._channel.send(rank, header)
        return incarnations

    def _missing(self, incarnations: bytes) -> list[int]:
        """The ranks that have not yet announced the same set. Empty if a rank has announced further ranks."""
        if self._telling_of_more(incarnations):
            return []
        return [rank for rank in self._peers.alive(incarnations) if self._peers.ending.get(rank) != incarnations]

    def _telling_of_more(self, incarnations: bytes) -> list[int]:
        """The ranks that have announced further ranks, which joined later."""
        return [
            rank for rank in self._peers.alive(incarnations) if is_past(incarnations, self._peers.ending.get(rank, b""))
        ]

    def _wait(self, missing, k: int) -> None:
        self._membership.wait(missing, operation="agree on the end", step=k)

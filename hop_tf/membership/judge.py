"""`Judge`: decides if a silent peer is lost, or if this rank is cut off. `Quorum`: counts the ranks that remain.

Nothing here waits, and nothing records that a rank is lost. Silent ranks may be asked if they are alive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from hop_tf.errors import PeerLostError
from hop_tf.membership.departures import Departures
from hop_tf.membership.patience import Patience
from hop_tf.options import CommunicationOptions
from hop_tf.transport.base import PeerStatus, Transport
from hop_tf.transport.deadlines import problem_of


class Quorum:
    """Counts the remaining ranks.

    Args:
      departures: The ranks that no longer take part.
      world_size: Number of ranks.
      min_ranks: The least number of remaining ranks. Lost and failed ranks do not count.
    """

    def __init__(self, departures: Departures, world_size: int, min_ranks: int):
        self._departures = departures
        self._world_size = world_size
        self._min_ranks = min_ranks

    def missing(self) -> dict[int, str]:
        """The ranks that are lost or have failed, with reasons."""
        departures = {rank: self._departures.of(rank) for rank in sorted(self._departures.ranks())}
        # A rank may have joined again meanwhile.
        return {rank: each.reason for rank, each in departures.items() if each and (each.lost or each.failed)}

    def too_few_without(self, num_unheard: int) -> str:
        """The error text if too few ranks would remain without `num_unheard` further ranks; otherwise ""."""
        num_left = self._world_size - len(self.missing()) - num_unheard
        if num_left >= self._min_ranks:
            return ""
        return f"{num_left} of {self._world_size} ranks are left, fewer than {self._min_ranks} (see min_ranks)."


class Verdict(NamedTuple):
    """The error that ends waiting for a peer, or None. `is_cut_off`: True if this rank is cut off."""

    error: Exception | None
    is_cut_off: bool = False


class Judge:
    """Decides how long to wait for a peer.

    Args:
      transport: Knows when each peer was last heard.
      options: Deadlines.
      departures: The ranks that no longer take part.
      quorum: The number of ranks that must remain.
      peers: The ranks that this rank communicates with directly.
      name_of: Returns a peer's name, for messages.
      can_go_on_without: `can_go_on_without(peer, step)` is true if the others would go on without that peer.
      patience: The patience with silent ranks, shorter than the deadlines of `options`. None: only these deadlines
        count.
    """

    def __init__(
        self,
        *,
        transport: Transport,
        options: CommunicationOptions,
        departures: Departures,
        quorum: Quorum,
        peers: Sequence[int],
        name_of: Callable[[int], str],
        can_go_on_without: Callable[[int, int | None], bool],
        patience: Patience | None,
    ):
        self._transport = transport
        self._options = options
        self._departures = departures
        self._quorum = quorum
        self._peers = peers
        self._name_of = name_of
        self._can_go_on_without = can_go_on_without
        self._patience = patience

    def verdict(
        self,
        peer: int,
        waited: float,
        operation: str,
        step: int | None,
        *,
        asks: bool = True,
        is_joining: bool = False,
    ) -> Verdict:
        """Decides if waiting for a peer ends.

        Args:
          peer: The peer.
          waited: Seconds waited so far.
          operation: The operation that waits, for error messages.
          step: The training step; None outside of a step.
          asks: See `Patience.discount`. If true, the monitor must be held.
          is_joining: True if this rank is about to join. Then the patience does not apply: if a joining rank reports
          that a peer is lost, the others ignore it.
        """
        end = self._departures.end_of(peer)
        status = self._status_of(peer, asks)
        can_go_on = self._can_go_on_without(peer, step)
        has_patience = self._patience is not None and can_go_on and not is_joining
        if has_patience and asks and status.silent_seconds >= self._patience.ask_seconds:
            self._statuses_of_present(asks)  # Asks all present ranks: their answers will show which rank is cut off.
        error = problem_of(
            status,
            None if end is None else end.reason,
            waited,
            self._options,
            rank=self._transport.rank,
            peer=self._name_of(peer),
            operation=operation,
            step=step,
            patience_seconds=self._patience.seconds if has_patience else None,
        )
        if status.failure is None and isinstance(error, PeerLostError) and can_go_on:
            return self._doubt(status, error, asks)
        return Verdict(error)

    def _doubt(self, status: PeerStatus, error: PeerLostError, asks: bool) -> Verdict:
        """Decides if a silent peer is lost. If this rank hears too few others to go on, it may itself be cut off.

        Messages of a rank that is cut off may still reach the others. So this rank does not report that the others are
        lost, but fails itself. With a patience, it first waits for `timeout_seconds`, because it may hear the others
        again and rejoin them.

        Returns:
          `error` if enough others are heard, or if the peer is lost for another reason than silence. Otherwise no error
          until all unheard peers have been silent for `timeout_seconds`. Then the error that this rank is cut off.
        """
        limit_seconds = self._options.timeout_seconds
        silence_seconds = limit_seconds if self._patience is None else self._patience.seconds
        present = self._statuses_of_present(asks)
        # Half of that time is enough: within it, a living rank is heard several times, or has been asked.
        unheard = [peer for peer, each in present.items() if each.silent_seconds > silence_seconds / 2]
        too_few = self._quorum.too_few_without(len(unheard))
        if not too_few or not status.was_silent_for(silence_seconds):
            return Verdict(error)
        if not all(present[peer].was_silent_for(limit_seconds) for peer in unheard):
            return Verdict(None)
        cut_off = PeerLostError(
            f"rank {self._transport.rank}: ranks {unheard} sent nothing for {limit_seconds:g} s. {too_few} The network "
            f"of this rank may be the one that fails. {error}"
        )
        return Verdict(cut_off, is_cut_off=True)

    def _statuses_of_present(self, asks: bool) -> dict[int, PeerStatus]:
        return {peer: self._status_of(peer, asks) for peer in self._peers if self._departures.of(peer) is None}

    def _status_of(self, rank: int, asks: bool) -> PeerStatus:
        status = self._transport.status(rank)
        return status if self._patience is None else self._patience.discount(rank, status, asks=asks)

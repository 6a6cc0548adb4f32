"""`Replicas`: the numbers of the replicas of all ranks. A replica is a device of a rank."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from absl import logging

_CLAIM = re.compile(r"(?P<number>\d+) devices of rank (?P<rank>\d+)")


class Replicas:
    """Numbers the replicas: rank by rank, and device by device in a rank.

    When a session begins, each rank claims its number of devices. Until then, a rank assumes that all ranks have as
    many devices as itself.

    Args:
      rank: This rank.
      world_size: Number of ranks.
      num_devices: Number of devices of this rank.
    """

    def __init__(self, rank: int, world_size: int, num_devices: int):
        self._rank = rank
        self._world_size = world_size
        self._num_devices = num_devices
        self._known: list[int] | None = None
        self._has_assumed = False

    @property
    def claims(self) -> list[str]:
        """The claim that tells the other ranks this rank's number of devices; empty for one device."""
        return [] if self._num_devices == 1 else [f"{self._num_devices} devices of rank {self._rank}"]

    def learn(self, claims: Iterable[str]) -> None:
        """Reads each rank's number of devices from the claims of all ranks."""
        told = [match for match in map(_CLAIM.fullmatch, claims) if match]
        of_ranks = {int(match["rank"]): int(match["number"]) for match in told}
        self._known = [of_ranks.get(rank, 1) for rank in range(self._world_size)]
        if self._has_assumed and len(set(self._known)) > 1:
            self._has_assumed = False
            logging.warning(
                "rank %d: ranks have %s devices. Before the first `fit`, or the first update of a custom loop, replica "
                "ids assume that all ranks have %d devices. Ids that the program read before may belong to other "
                "ranks, too. Use `strategy.rank` there.",
                *(self._rank, self._known, self._num_devices),
            )

    @property
    def first(self) -> int:
        """The number of this rank's first replica."""
        return sum(self._of_ranks()[: self._rank])

    @property
    def number(self) -> int:
        """The total number of replicas of all ranks."""
        return sum(self._of_ranks())

    def stream(self, device: int) -> int:
        """A number that no other replica has, even if numbers of devices differ; 0 for the first device of rank 0."""
        return device * self._world_size + self._rank

    def _of_ranks(self) -> Sequence[int]:
        self._has_assumed = self._has_assumed or self._known is None
        return self._known or [self._num_devices] * self._world_size

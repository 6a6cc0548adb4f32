"""What `CanaryStrategy` was told."""

from __future__ import annotations

import dataclasses

from hop_tf import codecs
from hop_tf.arguments import check_choice, check_integer, check_on_peer_loss
from hop_tf.collectives import Network, get_network
from hop_tf.options import CommunicationOptions
from hop_tf.strategies.canary.colayers import MOST_COLAYERS
from hop_tf.strategies.canary.exchange import AsyncSettings
from hop_tf.strategies.canary.gei import Thresholds, check_min_colayers

_CONSISTENCIES = ("ssp", "async", "bsp")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CanarySettings:
    """What `CanaryStrategy` was told; see there.

    Attributes:
      algorithm, codec, on_peer_loss: What the names and None stand for.

    Raises:
      TypeError: If `codec` is something else.
      ValueError: If a value is out of range, or does not go with another.
    """

    algorithm: str | Network
    consistency: str
    max_staleness: int
    min_colayers: int | None
    num_colayers: int | None
    codec: codecs.Codec | str | None
    max_in_flight: int
    sync_interval: int | None
    low_rank: int | None
    on_peer_loss: str | None

    def __post_init__(self):
        check_choice("consistency", self.consistency, _CONSISTENCIES)
        check_on_peer_loss(self.on_peer_loss)
        check_integer("max_staleness", self.max_staleness, at_least=0)
        check_integer("max_in_flight", self.max_in_flight, at_least=2)
        for name in ("num_colayers", "sync_interval", "low_rank"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), at_least=1)
        check_min_colayers(self.min_colayers, self.num_colayers or MOST_COLAYERS)
        object.__setattr__(self, "algorithm", get_network(self.algorithm))
        object.__setattr__(self, "codec", codecs.get(self.codec))
        self._check_consistency()
        default = "raise" if self.is_synchronous else "continue"
        object.__setattr__(self, "on_peer_loss", self.on_peer_loss or default)

    def _check_consistency(self) -> None:
        """Raises ValueError if something does not go with `consistency`."""
        if self.min_colayers and self.consistency == "async":
            raise ValueError(
                "`min_colayers` must be None or 0 with consistency='async', which drops nothing. "
                f"Received: min_colayers={self.min_colayers}."
            )
        if self.low_rank is not None and not self.is_synchronous:
            raise ValueError(
                "`low_rank` needs consistency='bsp': ranks find the factors of their mean gradient together. "
                f"Received: low_rank={self.low_rank}, consistency={self.consistency!r}."
            )
        # Who sums up a piece, and would keep the rest, changes: gradients would be lost.
        selects = isinstance(self.codec, codecs.TopK)
        if selects and not (self.codec.error_feedback and self.is_synchronous):
            raise ValueError(
                "`codec` must send something for every value, unless consistency='bsp' and error_feedback=True: what "
                f"is not selected would be lost. Received: codec={self.codec!r}, consistency={self.consistency!r}."
            )

    def check_interfaces(self, options: CommunicationOptions) -> None:
        """Raises ValueError unless there is an address for each of the algorithm's interfaces, or none at all."""
        needed = self.algorithm.num_levels
        if options.interfaces is not None and len(options.interfaces) != needed:
            raise ValueError(
                f"`interfaces` must be {needed} addresses, one for each interface of {self.algorithm}. "
                f"Received: interfaces={options.interfaces}."
            )

    @property
    def is_synchronous(self) -> bool:
        """Whether ranks wait for all bits of a row."""
        return self.consistency == "bsp"

    @property
    def drops(self) -> bool:
        """Whether what a rank has not sent in time is dropped."""
        return self.consistency == "ssp" and self.min_colayers != 0

    def asynchronous(self, num_colayers: int) -> AsyncSettings:
        """What the exchange is told, where there are so many colayers."""
        most = num_colayers if self.min_colayers is None else min(self.min_colayers, num_colayers)
        return AsyncSettings(
            network=self.algorithm,
            thresholds=Thresholds(self.max_staleness, 0 if self.consistency == "async" else most),
            codec=self.codec,
            sync_interval=self.sync_interval,
            max_in_flight=self.max_in_flight,
        )

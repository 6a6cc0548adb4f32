"""The settings of `CanaryStrategy`."""

from __future__ import annotations

import dataclasses

from hop_tf import codecs
from hop_tf.arguments import check_choice, check_integer, check_on_peer_loss
from hop_tf.collectives.networks import BCube, Mesh, Network, get_network
from hop_tf.options import CommunicationOptions
from hop_tf.runtime.choosing import AUTO, algorithms_to_try
from hop_tf.runtime.ways import Way
from hop_tf.strategies.canary.colayers import MOST_COLAYERS
from hop_tf.strategies.canary.exchange import AsyncSettings
from hop_tf.strategies.canary.gei import Thresholds, check_min_colayers

_CONSISTENCIES = ("ssp", "async", "bsp")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CanarySettings:
    """The arguments of `CanaryStrategy`, checked. See there.

    Attributes:
      algorithm: "auto", "ring", or the network that another name stands for.
      codec: The codec that a name or None stands for.
      on_peer_loss: The policy; never None.

    Raises:
      TypeError: If `codec` is of another type.
      ValueError: If a value is out of range, or does not fit with another one.
    """

    algorithm: str | Network
    consistency: str
    max_staleness: int
    min_colayers: int | None
    num_colayers: int | None
    codec: codecs.Codec | codecs.LowRank | str | None
    max_in_flight: int
    sync_interval: int | None
    on_peer_loss: str | None

    def __post_init__(self):
        check_choice("consistency", self.consistency, _CONSISTENCIES)
        check_on_peer_loss(self.on_peer_loss)
        check_integer("max_staleness", self.max_staleness, at_least=0)
        check_integer("max_in_flight", self.max_in_flight, at_least=2)
        for name in ("num_colayers", "sync_interval"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), at_least=1)
        check_min_colayers(self.min_colayers, self.num_colayers or MOST_COLAYERS)
        if self.algorithm != AUTO and not (self.algorithm == "ring" and self.is_synchronous):
            object.__setattr__(self, "algorithm", get_network(self.algorithm))
        object.__setattr__(self, "codec", codecs.get_for_means(self.codec))
        self._check_consistency()
        default = "raise" if self.is_synchronous else "continue"
        object.__setattr__(self, "on_peer_loss", self.on_peer_loss or default)

    def _check_consistency(self) -> None:
        """Raises ValueError if a setting does not go with `consistency`."""
        if self.min_colayers and self.consistency == "async":
            raise ValueError(
                "`min_colayers` must be None or 0 with consistency='async', which drops nothing. "
                f"Received: min_colayers={self.min_colayers}."
            )
        if self._factorizes and not self.is_synchronous:
            raise ValueError(
                "a `codec` of low rank needs consistency='bsp': ranks find the factors of their mean gradient together."
                f" Received: codec={self.codec!r}, consistency={self.consistency!r}."
            )
        # The rank that sums a piece up would keep the values that are not selected. When another rank takes over this
        # piece, they would be lost.
        selects = isinstance(self.codec, codecs.TopK)
        if selects and not (self.codec.error_feedback and self.is_synchronous):
            raise ValueError(
                "`codec` must send something for every value, unless consistency='bsp' and error_feedback=True. "
                f"Otherwise values that are not selected would be lost. Received: codec={self.codec!r}, "
                f"consistency={self.consistency!r}."
            )

    def check_cluster(self, world_size: int, options: CommunicationOptions) -> None:
        """Checks that the algorithm fits the cluster.

        Raises:
          ValueError: If the algorithm does not allow `world_size` ranks, or `options.interfaces` is given and does not
            have an address for each of the algorithm's interfaces.
        """
        self.network.check_world_size(world_size)
        if options.interfaces is None or self._bcubes(world_size, len(options.interfaces)):
            return
        needed = self.network.num_levels
        if len(options.interfaces) != needed:
            raise ValueError(
                f"`interfaces` must be {needed} addresses, one for each interface of {self._first}. "
                f"Received: interfaces={options.interfaces}."
            )

    # Averaging with "bsp".

    def ways(self, world_size: int, num_interfaces: int = 0) -> list[Way]:
        """The ways in which synchronous ranks may average a colayer. Ranks begin with the first one.

        Args:
          world_size: Number of ranks.
          num_interfaces: Number of addresses that each rank has given. Default 0.
        """
        if not self._chooses_algorithm:
            return [Way(self._first, self.codec)]
        algorithms = [*algorithms_to_try(AUTO, world_size), *map(str, self._bcubes(world_size, num_interfaces))]
        return [Way(algorithm, self.codec) for algorithm in algorithms]

    def chooses(self, world_size: int, num_interfaces: int = 0) -> bool:
        """True if ranks choose between several algorithms. The arguments are those of `ways`."""
        return self.is_synchronous and len(self.ways(world_size, num_interfaces)) > 1

    def without_times(self) -> CanarySettings:
        """The settings for ranks that do not choose by measured times: "mesh" in place of "auto"."""
        return dataclasses.replace(self, algorithm="mesh") if self._chooses_algorithm else self

    def _bcubes(self, world_size: int, num_interfaces: int) -> list[BCube]:
        """A list with the BCube that ranks may choose. Empty if their interfaces do not fit one."""
        if not self._chooses_algorithm or num_interfaces < 2:
            return []
        alpha = round(world_size ** (1 / num_interfaces))
        fits = alpha > 1 and alpha**num_interfaces == world_size
        return [BCube(alpha, num_interfaces)] if fits else []

    @property
    def _chooses_algorithm(self) -> bool:
        """True if ranks choose among the algorithms that fit. False with factors, which leave few bytes to save."""
        return self.algorithm == AUTO and self.is_synchronous and not self._factorizes

    @property
    def _factorizes(self) -> bool:
        """True if large kernels travel as factors."""
        return isinstance(self.codec, codecs.LowRank)

    @property
    def _first(self) -> str:
        """The algorithm that ranks begin with."""
        return str(self.network if self.algorithm == AUTO else self.algorithm)

    @property
    def network(self) -> Network:
        """The network of the algorithm's routes."""
        return self.algorithm if isinstance(self.algorithm, Network) else Mesh()

    @property
    def is_synchronous(self) -> bool:
        """True if ranks are synchronous: they wait for all bits of a row of the gradient exchange index."""
        return self.consistency == "bsp"

    @property
    def drops(self) -> bool:
        """True if a rank drops the colayers that it has not sent in time."""
        return self.consistency == "ssp" and self.min_colayers != 0

    def asynchronous(self, num_colayers: int) -> AsyncSettings:
        """The settings of the asynchronous exchange with `num_colayers` colayers."""
        most = num_colayers if self.min_colayers is None else min(self.min_colayers, num_colayers)
        return AsyncSettings(
            network=self.network,
            thresholds=Thresholds(self.max_staleness, 0 if self.consistency == "async" else most),
            codec=self.codec,
            sync_interval=self.sync_interval,
            max_in_flight=self.max_in_flight,
        )

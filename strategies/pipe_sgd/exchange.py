"""`PipeSGDExchange`: the communication thread of Pipe-SGD."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from hop_tf import codecs
from hop_tf.keras_hook.optimizers import is_sgd
from hop_tf.runtime.choosing import AUTO
from hop_tf.runtime.gradients import GradientExchange, with_rows_first
from hop_tf.runtime.group import ExchangeContext
from hop_tf.runtime.ways import Way, list_ways
from hop_tf.tensors.packing import Packing, TensorSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipeSGDSettings:
    """The settings of `PipeSGDStrategy`."""

    pipeline_width: int | str
    codec: codecs.Codec | codecs.LowRank | str
    num_segments: int = 1
    warmup_steps: int = 0
    algorithm: str = "mesh"
    compensation: str = "replay"
    on_peer_loss: str = "raise"

    def ways(self, world_size: int, specs: Sequence[TensorSpec] | None = None, *, factorizes: bool = True) -> list[Way]:
        """The ways in which gradients may be averaged. See `list_ways`."""
        return list_ways(self.algorithm, self.codec, world_size, specs, factorizes=factorizes)

    @property
    def widths(self) -> tuple[int, ...]:
        """K, or the widths that ranks choose from. Without a replay only 1, because a wider pipe costs accuracy."""
        if self.pipeline_width != AUTO:
            return (self.pipeline_width,)
        return (1, 2) if self.compensation == "replay" else (1,)

    def chooses(self, world_size: int) -> bool:
        """True if ranks choose between several settings."""
        return len(self.ways(world_size)) * len(self.widths) > 1

    def without_times(self) -> PipeSGDSettings:
        """The settings for ranks that do not choose by measured times."""
        way = self.ways(world_size=1)[0]
        return dataclasses.replace(self, pipeline_width=self.widths[0], codec=way.codec, algorithm=way.algorithm)

    @property
    def delay(self) -> int:
        """The largest K - 1: the largest number of steps by which means are merged late."""
        return max(self.widths) - 1

    @property
    def admits(self) -> bool:
        """True if ranks that were started again can join. For that, ranks must be able to merge all means in flight."""
        return self.on_peer_loss == "continue" and (self.delay == 0 or self.looks_ahead)

    @property
    def looks_ahead(self) -> bool:
        """True if own gradients stand in for means that are in flight."""
        return self.delay > 0 and self.compensation == "replay"


class PipeSGDExchange(GradientExchange):
    """The communication thread of Algorithm 1, at one rank.

    Args:
      context: Membership, packing and buffers of the group.
      settings: The settings of the strategy.
      tell: As for `Autotuner`.

    Attributes:
      settings: As given.
      width: The graph's K. If ranks choose K, it is 1 at first.
    """

    def __init__(
        self,
        context: ExchangeContext,
        settings: PipeSGDSettings,
        tell: Callable[[Way, int, str], None] = lambda way, width, text: None,
    ):
        self.settings = settings
        self.width = settings.widths[0]
        # Without a replay, a rank has computed its weights with its own learning rate.
        adopts_rate = None if self.delay == 0 else settings.looks_ahead
        membership, specs = context.membership, context.packing.specs
        # Low-rank factors delay a part of each gradient. Optimizers that divide by a gradient's size lose more accuracy
        # then.
        factorizes = is_sgd(context.optimizer())
        super().__init__(
            context,
            with_rows_first(_segments(context.packing, settings.num_segments), specs),
            ways=settings.ways(membership.world_size, specs, factorizes=factorizes),
            widths=settings.widths,
            tell=tell,
            adopts_rate=adopts_rate,
            delay=settings.delay,
        )
        self.max_in_flight = max(settings.widths) * len(self.parts)

    @property
    def delay(self) -> int:
        """K - 1: the number of steps by which means are merged late."""
        return self.width - 1

    def change_width(self, width: int) -> None:
        """Takes another K. Called between two steps, with all means merged."""
        self.width = width


def _segments(packing: Packing, num_segments: int) -> list[list[int]]:
    """Divides the tensors, the last ones first, into up to `num_segments` parts of about equal size."""
    num_bytes = [spec.num_elements * spec.dtype.size for spec in packing.specs]
    total, before = sum(num_bytes), 0
    segments: dict[int, list[int]] = {}
    # Untrained variables come last in a step.
    trained = [index for index, spec in enumerate(packing.specs) if not spec.exact]
    for index in reversed(trained):
        middle = before + num_bytes[index] / 2
        segments.setdefault(min(num_segments - 1, int(num_segments * middle / max(1, total))), []).append(index)
        before += num_bytes[index]
    parts = list(segments.values())
    parts[-1].extend(index for index, spec in enumerate(packing.specs) if spec.exact)
    return parts

"""`PipeSGDExchange`: the communication thread of Pipe-SGD."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import tensorflow as tf

from hop_tf import codecs
from hop_tf.runtime.choosing import AUTO
from hop_tf.runtime.gradients import GradientExchange, with_rows_first
from hop_tf.runtime.group import ExchangeContext
from hop_tf.runtime.replay import Replay, make_replay
from hop_tf.runtime.ways import Way, list_ways, num_encoded_bytes
from hop_tf.tensors.packing import Packing

# A step that no `fit` comes to.
_NEVER = 1 << 60


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipeSGDSettings:
    """What `PipeSGDStrategy` was told."""

    pipeline_width: int | str
    codec: codecs.Codec | str
    num_segments: int = 1
    warmup_steps: int = 0
    algorithm: str = "mesh"
    compensation: str = "replay"
    on_peer_loss: str = "raise"

    def ways(self, world_size: int, num_bytes: float = math.inf) -> list[Way]:
        """How gradients may be averaged; see `list_ways`."""
        return list_ways(self.algorithm, self.codec, world_size, num_bytes)

    @property
    def widths(self) -> tuple[int, ...]:
        """K, or those that ranks choose from. Without a replay a wider pipe costs accuracy: none is chosen."""
        if self.pipeline_width != AUTO:
            return (self.pipeline_width,)
        return (1, 2) if self.compensation == "replay" else (1,)

    def chooses(self, world_size: int) -> bool:
        """True if ranks choose between several settings."""
        return len(self.ways(world_size)) * len(self.widths) > 1

    def without_times(self) -> PipeSGDSettings:
        """The settings that ranks begin with, if nothing is to be chosen by times."""
        way = self.ways(world_size=1)[0]
        return dataclasses.replace(self, pipeline_width=self.widths[0], codec=way.codec, algorithm=way.algorithm)

    @property
    def delay(self) -> int:
        """The largest K - 1: means are merged up to so many steps late."""
        return max(self.widths) - 1

    @property
    def admits(self) -> bool:
        """Whether ranks that were started again take part again: not where what is under way cannot be merged."""
        return self.on_peer_loss == "continue" and (self.delay == 0 or self.replays)

    @property
    def replays(self) -> bool:
        """Whether own gradients stand in for means that are under way."""
        return self.delay > 0 and self.compensation == "replay"


class PipeSGDExchange(GradientExchange):
    """The communication thread of Algorithm 1, at one rank.

    Args:
      context: Membership, packing and buffers of the group.
      settings: Those of the strategy.
      tell: As of `Autotuner`.

    Attributes:
      width: K, as the graph has it. If ranks choose it, it is 1 at first.
      replay: What a rank computes with; None where that is what is merged.
      pipelined_from: int64 variable: the step of the running session with which the pipe began to fill.
    """

    def __init__(
        self,
        context: ExchangeContext,
        settings: PipeSGDSettings,
        tell: Callable[[Way, int, str], None] = lambda way, width, text: None,
    ):
        self.width = settings.widths[0]
        # Without a replay, weights were computed with the own rate.
        adopts_rate = None if self.delay == 0 else settings.replays
        membership, specs = context.membership, context.packing.specs
        super().__init__(
            context,
            with_rows_first(_segments(context.packing, settings.num_segments), specs),
            ways=settings.ways(membership.world_size, num_encoded_bytes(specs)),
            widths=settings.widths,
            tell=tell,
            adopts_rate=adopts_rate,
            delay=settings.delay,
        )
        self.max_in_flight = max(settings.widths) * len(self.parts)
        self._optimizer, self._trained, self._replays = context.optimizer, context.trained, settings.replays
        self._made_replays: dict[int, Replay] = {}  # By K: graphs that were traced with one keep it.
        self.replay = self._replay_of_width()
        with tf.init_scope(), tf.device("/cpu:0"):
            # Nothing is under way in a rank that joins, until it has.
            start = _NEVER if membership.joining else settings.warmup_steps
            self.pipelined_from = tf.Variable(start, dtype=tf.int64, trainable=False, name="hop_tf_pipelined_from")

    @property
    def delay(self) -> int:
        """K - 1: means are merged so many steps late."""
        return self.width - 1

    def change_width(self, width: int, step: int) -> None:
        """Takes another K, for the graph that is traced next. Called before `step`, when all means are merged."""
        self.width = width
        self.replay = self._replay_of_width()
        self.begin_pipe(step)

    def _replay_of_width(self) -> Replay | None:
        if not self._replays or self.delay == 0:
            return None
        if self.width not in self._made_replays:
            self._made_replays[self.width] = make_replay(self._optimizer(), self._trained, self.delay)
        return self._made_replays[self.width]

    def begin_at(self, step: int) -> None:
        super().begin_at(step)
        self.begin_pipe(step)

    def begin_pipe(self, step: int) -> None:
        """Nothing is under way: what variables and slots are now is merged."""
        if self.replay is not None:
            self.pipelined_from.assign(step)
            self.replay.begin()

    def reset(self, session: int) -> None:
        # How many steps each rank has made of a `fit` may differ. That there was one does not.
        self.pipelined_from.assign(_NEVER if self._membership.joining else 0)
        super().reset(session)

    def in_flight(self, num_steps: int) -> range:
        """The steps whose means were not taken when so many steps were made."""
        return range(max(num_steps - self.delay, min(int(self.pipelined_from), num_steps)), num_steps)


def _segments(packing: Packing, num_segments: int) -> list[list[int]]:
    """Divides the tensors, the last ones first, into so many parts of about equal size; fewer if there are fewer."""
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

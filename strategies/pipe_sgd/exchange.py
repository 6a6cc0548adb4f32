"""`PipeSGDExchange`: the communication thread of Pipe-SGD."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from hop_tf import codecs
from hop_tf.runtime.gradients import GradientExchange, with_rows_first
from hop_tf.runtime.group import ExchangeContext
from hop_tf.runtime.replay import make_replay
from hop_tf.tensors.packing import Packing

# A step that no `fit` comes to.
_NEVER = 1 << 60


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipeSGDSettings:
    """What `PipeSGDStrategy` was told."""

    pipeline_width: int
    codec: codecs.Codec
    num_segments: int = 1
    warmup_steps: int = 0
    algorithm: str = "mesh"
    compensation: str = "replay"
    on_peer_loss: str = "raise"

    @property
    def delay(self) -> int:
        """How many steps late a mean is merged."""
        return self.pipeline_width - 1

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

    Attributes:
      replay: What a rank computes with; None where that is what is merged.
      delay: K - 1.
      pipelined_from: int64 variable: the step of the running session with which the pipe began to fill.
    """

    def __init__(self, context: ExchangeContext, settings: PipeSGDSettings):
        optimizer, trained = context.optimizer(), context.trained
        self.delay = settings.delay
        # With "none" weights were computed with the own rate.
        adopts_rate = True if settings.replays else None if settings.delay == 0 else False
        super().__init__(
            context,
            with_rows_first(_segments(context.packing, settings.num_segments), context.packing.specs),
            codec=settings.codec,
            algorithm=settings.algorithm,
            adopts_rate=adopts_rate,
            delay=settings.delay,
        )
        self.max_in_flight = settings.pipeline_width * len(self.parts)
        self.replay = make_replay(optimizer, trained, settings.delay) if settings.replays else None
        with tf.init_scope(), tf.device("/cpu:0"):
            # Nothing is under way in a rank that joins, until it has.
            start = _NEVER if context.membership.joining else settings.warmup_steps
            self.pipelined_from = tf.Variable(start, dtype=tf.int64, trainable=False, name="hop_tf_pipelined_from")

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

"""`DTSExchange`: the half of DTS that averages windows."""

from __future__ import annotations

import dataclasses
import math

import keras

from hop_tf import codecs
from hop_tf.runtime.averaging_exchange import AveragingExchange
from hop_tf.runtime.exchange import Incoming, Outgoing
from hop_tf.runtime.group import ExchangeContext
from hop_tf.runtime.outer import OuterSteps
from hop_tf.strategies.dts.windows import Schedule


@dataclasses.dataclass(frozen=True, kw_only=True)
class DTSSettings:
    """What `DTSStrategy` was told."""

    delay: int
    interval: int
    codec: codecs.Codec
    algorithm: str
    outer_optimizer: str = "None"
    on_peer_loss: str = "raise"

    @property
    def schedule(self) -> Schedule:
        """When windows end, and when they are applied."""
        return Schedule(self.delay, self.interval)

    @property
    def selection(self) -> codecs.TopK | None:
        """Which part of a window is handed out."""
        return self.codec if isinstance(self.codec, codecs.TopK) else None


class DTSExchange(AveragingExchange):
    """Averages windows, several at a time.

    Args:
      context: Membership, packing and buffers of the group.
      settings: Those of the strategy.
      outer_optimizer: As of `OuterSteps`.

    Attributes:
      outer: The half in the graph.
      first_iteration: How many training steps the optimizer had seen when the running `fit` began.
    """

    def __init__(
        self,
        context: ExchangeContext,
        settings: DTSSettings,
        outer_optimizer: keras.optimizers.Optimizer | None = None,
    ):
        self.first_iteration = 0
        self._interval = settings.interval
        num_slots = settings.schedule.num_slots
        self.max_in_flight = self.num_threads = num_slots
        self.outer = OuterSteps(
            context.variables,
            context.values(),
            num_trained=len(context.trained),
            max_newer=num_slots - 1,
            optimizer=outer_optimizer,
        )
        # What a selection leaves out was left out in the graph.
        codec = settings.codec if settings.selection is None else settings.selection.selected()
        # What codecs keep for later windows belongs to a slot.
        reductions = [
            context.make_all_reduce(str(slot), context.packing, codec, settings.algorithm) for slot in range(num_slots)
        ]
        super().__init__(context, reductions)

    def reset(self, session: int) -> None:
        super().reset(session)
        self.outer.begin()

    def step(self, outgoing: Outgoing) -> Incoming:
        window = outgoing.step
        turn, slot = divmod(window, self.num_threads)
        means = self.mean(
            window,
            outgoing.buckets,
            turn=turn,
            reduction=slot,
            before_commit=lambda: self._commit(window),
            training_step=(window + 1) * self._interval - 1,
            codec_step=window,
        )
        return Incoming(window, 0, tuple(means))

    def _commit(self, window: int) -> None:
        """Windows are decided in order: if this rank leaves, it has taken part in all up to some window."""
        self._membership.wait_until(lambda: self._sent_rounds >= window, timeout_seconds=math.inf)
        with self._membership.monitor:
            self._sent_rounds = max(self._sent_rounds, window + 1)
            self._membership.monitor.notify_all()

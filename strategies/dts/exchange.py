"""`DTSExchange`: the half of DTS that averages windows."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping

import keras
import numpy as np

from hop_tf import codecs
from hop_tf.runtime.exchange import Exchange, Incoming, Outgoing
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

    @property
    def schedule(self) -> Schedule:
        """When windows end, and when they are applied."""
        return Schedule(self.delay, self.interval)

    @property
    def selection(self) -> codecs.TopK | None:
        """Which part of a window is handed out."""
        return self.codec if isinstance(self.codec, codecs.TopK) else None


class DTSExchange(Exchange):
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
        self._group = context.group
        self._membership = context.membership
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
        self._reductions = [
            context.make_all_reduce(str(slot), context.packing, codec, settings.algorithm) for slot in range(num_slots)
        ]
        self._communicate_seconds = [0.0] * num_slots
        self._num_committed = 0

    def reset(self, session: int) -> None:
        self._num_committed = 0
        self.outer.begin()
        for reduction in self._reductions:
            reduction.reset(session)

    def step(self, outgoing: Outgoing) -> Incoming:
        turn, slot = divmod(outgoing.step, len(self._reductions))
        start = time.perf_counter()
        means = self._reductions[slot].mean(
            turn,
            outgoing.buckets,
            lambda rank, _: self._membership.delivers(rank, self._group, outgoing.step),
            before_commit=lambda: self._commit(outgoing.step),
            training_step=(outgoing.step + 1) * self._interval - 1,
            codec_step=outgoing.step,
        )
        self._communicate_seconds[slot] += time.perf_counter() - start
        return Incoming(outgoing.step, 0, tuple(means))

    def _commit(self, window: int) -> None:
        """Windows are decided in order: if this rank leaves, it has taken part in all up to some window."""
        self._membership.wait_until(lambda: self._num_committed >= window, timeout_seconds=math.inf)
        with self._membership.monitor:
            self._num_committed = max(self._num_committed, window + 1)
            self._membership.monitor.notify_all()

    def neutral(self, outgoing: Outgoing) -> Incoming:
        return Incoming(outgoing.step, 0, tuple(map(np.array, outgoing.buckets)))

    @property
    def sent_steps(self) -> int:
        return self._num_committed

    def counters(self) -> Mapping[str, float]:
        """Where the communication threads' time goes.

        Returns:
          `communicate_seconds`, the sum of the windows' times, and `codec_seconds`, the part of it spent on encoding,
          decoding and adding.
        """
        return {
            "communicate_seconds": sum(self._communicate_seconds),
            "codec_seconds": sum(reduction.codec_seconds for reduction in self._reductions),
        }

    def close(self) -> None:
        for reduction in self._reductions:
            reduction.close()

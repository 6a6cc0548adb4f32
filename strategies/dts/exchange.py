"""`DTSExchange`: the half of DTS that averages windows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from hop_tf import codecs
from hop_tf.runtime.admissions import Admissions, find_spec
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


class WindowRows:
    """How many rows a rank has trained on in a window; of one without a step, in the one before."""

    def __init__(self):
        self._now, self._before = (
            tf.Variable(value, dtype=tf.float32, trainable=False, name="hop_tf_window_rows") for value in (0.0, 1.0)
        )

    def add(self, rows: tf.Tensor) -> None:
        """Emits the op that counts a step's rows."""
        self._now.assign_add(tf.cast(rows, tf.float32))

    def take(self) -> tf.Tensor:
        """Emits the ops that end a window; returns its rows."""
        with tf.device("/cpu:0"):
            rows = tf.where(self._now > 0, self._now, self._before)
            self._before.assign(rows)
            self._now.assign(0.0)
            return rows


class DTSExchange(AveragingExchange):
    """Averages windows, several at a time.

    Args:
      context: Membership, packing and buffers of the group.
      settings: Those of the strategy.
      outer_optimizer: As of `OuterSteps`.

    Attributes:
      outer: The half in the graph.
      first_iteration: How many training steps the optimizer had seen when the running `fit` began.
      first_window: int64 variable: windows before that one are merged.
      rows: What this rank has trained on since it has handed out a window.
    """

    def __init__(
        self,
        context: ExchangeContext,
        settings: DTSSettings,
        outer_optimizer: keras.optimizers.Optimizer | None = None,
    ):
        self.first_iteration = 0
        self._interval = self.steps_per_round = settings.interval
        self._schedule = settings.schedule
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
        place = find_spec(context.packing.specs)
        admissions = None
        if place is not None:
            admissions = Admissions(
                context.membership,
                context.group,
                context.session,
                interval=settings.interval,
                lead=num_slots * settings.interval,
            )
        super().__init__(
            context,
            reductions,
            admissions=admissions,
            votes_place=None if place is None else context.packing.place(place),
        )
        with tf.init_scope(), tf.device("/cpu:0"):
            self.first_window = tf.Variable(0, dtype=tf.int64, trainable=False, name="hop_tf_first_window")
            self.rows = WindowRows()

    def reset(self, session: int) -> None:
        super().reset(session)
        self.first_window.assign(0)
        self.outer.begin()

    def begin_at(self, step: int) -> None:
        window = step // self._interval
        self._sent_rounds = self._num_decided = window
        for slot, reduction in enumerate(self._reductions):
            reduction.begin_at(-((slot - window) // self.num_threads))  # Its first turn that is not before.
        self.first_window.assign(window)

    def common_state(self) -> list[np.ndarray]:
        return [*self.outer.merged(), *super().common_state()]

    def take_common_state(self, parts: Sequence[np.ndarray]) -> None:
        num_variables = len(parts) - 1 - len(self._reductions)
        super().take_common_state(parts[num_variables:])
        self.outer.begin_with(parts[:num_variables])

    def under_way(self, num_steps: int) -> range:
        """The windows that have ended when so many steps were made, and are not merged."""
        windows = self._schedule.under_way(num_steps)
        return range(max(windows.start, int(self.first_window)), windows.stop)

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
            votes_of=None if self.admissions is None else window,
        )
        return Incoming(window, 0, tuple(means))

    def _commit(self, window: int) -> None:
        """Windows are decided in order: if this rank leaves, it has taken part in all up to some window."""
        self._membership.wait_until(lambda: self._sent_rounds >= window, timeout_seconds=math.inf)
        with self._membership.monitor:
            self._sent_rounds = max(self._sent_rounds, window + 1)
            self._membership.monitor.notify_all()

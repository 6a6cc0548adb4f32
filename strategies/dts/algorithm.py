"""`DTSAlgorithm`: a worker's steps under DTS. See `hop_tf.strategies.dts.strategy`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from hop_tf.keras_hook.branches import when
from hop_tf.keras_hook.optimizers import ema_overwrite_frequency, is_adaptive, iterations_variable, tf_variables
from hop_tf.keras_hook.shares import BatchShares
from hop_tf.runtime.algorithm import Algorithm
from hop_tf.runtime.group import Group
from hop_tf.runtime.meeting import Meeting
from hop_tf.runtime.outer_optimizer import OuterOptimizer
from hop_tf.runtime.velocities import add_to_velocities
from hop_tf.strategies.dts.exchange import DTSExchange
from hop_tf.strategies.dts.lengths import StepLengths
from hop_tf.strategies.dts.windows import WARMUP, Schedule, largest


class WindowRows:
    """The rows that a rank has trained on in a window. A window without steps repeats the previous count."""

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


class DTSAlgorithm(Algorithm):
    """Makes steps of the rank's own optimizer, submits windows of changes, and merges their means D steps later.

    Args:
      group: The group, whose exchange is a `DTSExchange`.
      shares: The part of a batch that each rank takes, if windows count by rows. Default: all windows count equally.
      outer_optimizer: Returns the outer optimizer of the strategy's latest group, or None.
      broadcast: Gives rank 0's values to variables on all ranks.
    """

    def __init__(
        self,
        group: Group,
        shares: BatchShares | None = None,
        *,
        outer_optimizer: Callable[[], keras.optimizers.Optimizer | None],
        broadcast: Callable[[Iterable[tf.Variable]], None],
    ):
        super().__init__(group)
        self._settings = self.exchange.settings
        self._shares, self._outer_optimizer, self._broadcast = shares, outer_optimizer, broadcast
        self._first_iteration = 0  # The optimizer's step count at the start of the running `fit`.
        # Variables of 16 bits round small moves away. So such weights would never approach their targets.
        self._may_merge_gently = self._settings.may_merge_gently and all(v.dtype.size >= 4 for v in group.trained)
        self._operands = group.operands(joined=self._may_join)
        self._outer = self._make_outer()
        self._lengths = self._make_lengths()
        self._meeting = Meeting(group)
        with tf.init_scope(), tf.device("/cpu:0"):
            early = self._settings.warmup_steps
            self._delay, self._first_step, self._first_window, self._num_early = (
                tf.Variable(value, dtype=tf.int64, trainable=False, name=f"hop_tf_{name}")
                for name, value in (
                    ("delay", self._settings.delays[0]),
                    ("first_step", early),
                    ("first_window", early),
                    ("num_early", early),  # The steps of a warm-up; 0 when it is over.
                )
            )
            self._rows = WindowRows()
            assigned = tf.fill([group.num_trained], False)
            self._assigned = tf.Variable(assigned, trainable=False, name="hop_tf_assigned")

    def _make_lengths(self) -> StepLengths | None:
        optimizer, world_size = self.group.optimizer(), self.group.context.membership.world_size
        makes_steps_only = is_adaptive(optimizer) and not ema_overwrite_frequency(optimizer)
        lengthens = self._settings.may_lengthen and makes_steps_only and world_size > 1
        return StepLengths(self._settings.num_slots, world_size) if lengthens else None

    @property
    def _may_join(self) -> bool:
        """True if one rule merges all values. Small variables can then be joined, so that they cost little."""
        return self._outer_optimizer() is None and self._settings.selection is None

    def _make_outer(self) -> OuterOptimizer:
        return OuterOptimizer(
            self._operands.variables,
            self._operands.join(self.group.context.values()),
            num_trained=self._operands.num_trained,
            max_newer=self._settings.num_slots - 1,
            optimizer=self._outer_optimizer(),
            gently=self._may_merge_gently,
            skewed_shards=self._settings.skewed_shards,
        )

    @property
    def exchange(self) -> DTSExchange:
        """The group's exchange."""
        return self.group.exchange

    # The step.

    def before_update(self, values: Sequence[tf.Tensor], gradients: list) -> list:
        return gradients

    def after_update(self) -> tf.Tensor:
        with tf.device("/cpu:0"):
            num_steps = self.group.read_step() + 1
            schedule = self.schedule_at(num_steps)
            has_ended, ended = schedule.ended(num_steps)
            is_due, due = schedule.due(num_steps)
        if self._shares is not None:
            self._rows.add(self._shares.rows)

        when(has_ended, lambda: self._submit(ended))
        when(is_due, lambda: self._merge_due(schedule, num_steps, due))
        if self._settings.warmup_steps and self._may_merge_gently:
            with tf.device("/cpu:0"):
                warmup_ends = num_steps == self._num_early
            when(warmup_ends, lambda: self._outer.settle(self._settings.merges_at_ends))
        self._approach(num_steps)
        return super().after_update()

    def end_step(self) -> None:
        self._meeting.meet_if_due(self._settle)

    def _submit(self, window: tf.Tensor, *, counts: bool = True, everything: bool = False) -> None:
        selection = None if everything else self._settings.selection
        choose = functools.partial(largest, selection, window) if selection else None
        assigned = None
        if self._hears_of_assignments:
            with tf.device("/cpu:0"):
                assigned = self._operands.arrange(self._assigned.read_value())
                self._assigned.assign(tf.zeros_like(assigned))
        if self._lengths is not None:
            self._outer.multiply(self._lengths.factor(assigned))
        changes, weight = self._outer.take(choose, assigned), tf.constant([float(counts)])
        if self._lengths is not None:
            self._lengths.submit(window, changes[: self._operands.num_trained], assigned)
        if self._shares is not None and counts:
            rows = self._rows.take()
            changes, weight = [change * tf.cast(rows, change.dtype) for change in changes], weight * rows
        packing = self._operands.packing
        beside = packing.specs[len(changes) : -1]
        changes = [*changes, *(tf.zeros(spec.shape) for spec in beside)]  # The exchange fills them in.
        self.group.submit([*changes, weight], step=window, packing=packing)

    def _merge_due(self, schedule: Schedule, num_steps: tf.Tensor, due: tf.Tensor) -> None:
        """Emits the operations that merge a window, and begin another schedule if ranks have chosen one.

        Before another schedule begins, all windows in flight are merged. The mean of the last of them decides the
        schedule.
        """
        with tf.device("/cpu:0"):
            num_newer = schedule.num_newer
        means, width = self._merge(due, schedule)
        self._give(means, schedule, num_newer)
        if not self._changes_schedule:
            return
        with tf.device("/cpu:0"):
            changes = (width > 0) & (width != schedule.delay + 1)  # The width is 0 in an interrupted step.
            num_ended, has_newer = schedule.num_ended(num_steps), num_newer > 0

        def merge_newer() -> tf.Tensor:
            with tf.device("/cpu:0"):
                window = due + 1  # If ranks choose, only one window has ended since.
            return self._merge(window, schedule)[1]

        def begin() -> None:
            chosen = tf.cond(has_newer, merge_newer, lambda: width)
            with tf.device("/cpu:0"):
                self._begin_windows(num_steps, num_ended, tf.maximum(chosen, 1))
            self._outer.settle(self._settings.merges_at_ends)

        when(changes, begin)

    def _give(self, means: Sequence[tf.Tensor], schedule: Schedule, num_newer: int | tf.Tensor) -> None:
        """Emits the operations that move the variables after a window is merged.

        Args:
          means: As `OuterOptimizer.merge` has returned them.
          schedule: The schedule.
          num_newer: The number of windows that have ended after the merged one.
        """
        with tf.device("/cpu:0"):
            gently = self._merges_gently(schedule)
        if self._settings.skewed_shards:
            self._correct_velocities(means, schedule, num_newer)
        when(
            gently,
            lambda: self._outer.follow(means, self._num_gently(num_newer)),
            lambda: self._outer.give(num_newer, self._settings.merges_at_ends),
        )

    def _merge(
        self, window: tf.Tensor, schedule: Schedule, num_steps: int | None = None
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Emits the operations that merge a window. Weights stay as they are.

        Args:
          window: The window.
          schedule: Its schedule.
          num_steps: The number of steps of the window. Default: the schedule's interval.

        Returns:
          The mean changes, and the width that ranks have chosen, or 0.
        """
        (*means, share), _ = self.group.collect([], step=window, packing=self._operands.packing)
        width = tf.constant(0, tf.int64)
        if self.exchange.tuner is not None:
            *means, chosen = means
            with tf.device("/cpu:0"):
                width = tf.cast(chosen[0, 0], tf.int64)
        if self.exchange.admissions is not None:
            *means, decided = means
            with tf.device("/cpu:0"):
                self._meeting.note(decided[0], schedule.begin_of(window))
                self.group.context.roster.follow(decided[1] > 0)
        self._pass_window(schedule.interval if num_steps is None else num_steps)
        means = self._outer.merge(means, share[0])
        if self._lengths is not None:
            self._lengths.merge(window, means[: self._operands.num_trained])
        return means, width

    def _pass_window(self, num_steps: int | tf.Tensor) -> None:
        """Emits the operations that advance the merged values by a window, before its mean is added."""

    def _correct_velocities(self, means: Sequence[tf.Tensor], schedule: Schedule, num_newer: int | tf.Tensor) -> None:
        """Emits the operations that correct velocities by the mean change of the weights less the rank's own change.

        See `hop_tf.runtime.velocities`.
        """

        def factor_of(momentum: float) -> tf.Tensor:
            with tf.device("/cpu:0"):
                delay, interval = (tf.cast(each, tf.float32) for each in (schedule.delay, schedule.interval))
                return momentum**delay / interval

        moves = self._operands.split(self._outer.apart(means, num_newer))
        add_to_velocities(self.group, moves, factor_of)

    def _approach(self, num_steps: tf.Tensor) -> None:
        """Emits the operations that move weights towards the merged values at the end of a window."""
        with tf.device("/cpu:0"):
            schedule = self.schedule_at(num_steps)  # It may have begun with this step.
            gently = self._merges_gently(schedule)
            if gently is False:
                return
            ends = schedule.ended(num_steps)[0] & (num_steps > schedule.first_step) & gently
            num_in_flight = self._num_gently(schedule.num_ended(num_steps) - _num_merged(schedule, num_steps))
        follows_take = self._settings.selection is None
        when(ends, lambda: self._outer.approach(num_in_flight, schedule.interval, follows_take))

    def _num_gently(self, number: int | tf.Tensor) -> int | tf.Tensor:
        """A number of windows in flight, at least 1, under gentle merging: the int 1 if there can be only one."""
        return 1 if self._settings.num_slots == 2 else number

    def _merges_gently(self, schedule: Schedule) -> bool | tf.Tensor:
        return self._may_merge_gently and schedule.merges_gently

    def _settle(self) -> None:
        """Emits the operations that merge all windows in flight, at the end of a window."""
        with tf.device("/cpu:0"):
            now = self.group.read_step()
            schedule = self.schedule_at(now)
            num_ended, num_merged = schedule.num_ended(now), _num_merged(schedule, now)
        for num_newer in reversed(range(self._settings.num_slots - 1)):
            with tf.device("/cpu:0"):
                window = num_ended - 1 - num_newer
                is_in_flight = window >= num_merged
            when(is_in_flight, functools.partial(self._merge, window, schedule))
        self._outer.settle()
        self._begin_windows(now, num_ended)

    # Weights that the program assigns between two steps.

    @property
    def _hears_of_assignments(self) -> bool:
        return self._may_merge_gently or self._lengths is not None

    def watched(self) -> Sequence[tf.Variable]:
        return self.group.trained if self._hears_of_assignments else []

    def note_assigned(self, variables: Sequence[tf.Variable]) -> None:
        keys, num_steps = set(map(id, variables)), int(self.group.step)
        are_assigned = [id(variable) in keys for variable in self.group.trained]
        self._assigned.assign(tf.logical_or(self._assigned, are_assigned))
        schedule = self.known_schedule(num_steps + 1)
        if self._merges_gently(schedule):
            num_in_flight = len(schedule.in_flight(num_steps))
            self._outer.note_assigned(self._operands.arrange(tf.constant(are_assigned)), num_in_flight)

    def take_assigned(self, are_assigned: tf.Tensor, weights: Sequence[tf.Tensor]) -> tf.Tensor:
        with tf.device("/cpu:0"):
            now = self.group.read_step()
            schedule = self.schedule_at(now + 1)
            num_in_flight = schedule.num_ended(now) - _num_merged(schedule, now)
            arranged = self._operands.arrange(are_assigned)
        self._assigned.assign(tf.logical_or(self._assigned, are_assigned))
        when(self._merges_gently(schedule), lambda: self._outer.note_assigned(arranged, num_in_flight))
        return tf.constant(True)

    # The schedule.

    def schedule_at(self, num_steps: tf.Tensor) -> Schedule:
        """The schedule in the last of `num_steps` steps, as tensors. D and p are ints if they never change."""
        delay = self._delay.value() if self._changes_schedule else self._settings.delays[0]
        first_step, first_window = self._first_step.value(), self._first_window.value()
        present = Schedule(delay, self._settings.interval_of(delay), first_step, first_window)
        return self._or_warmup(present, num_steps) if self._settings.warmup_steps else present

    def _or_warmup(self, schedule: Schedule, num_steps: tf.Tensor) -> Schedule:
        is_over = num_steps > self._num_early

        def field(name: str) -> tf.Tensor:
            later, early = (tf.cast(getattr(each, name), tf.int64) for each in (schedule, WARMUP))
            return tf.where(is_over, later, early)

        return Schedule(*(field(each.name) for each in dataclasses.fields(Schedule)))

    def known_schedule(self, num_steps: int) -> Schedule:
        """The schedule of `schedule_at`, as Python numbers. Only for use outside of the graph."""
        present = self.schedule_at(tf.constant(num_steps, tf.int64))
        return Schedule(*map(int, (present.delay, present.interval, present.first_step, present.first_window)))

    @property
    def _changes_schedule(self) -> bool:
        """True if ranks choose D by measured times."""
        return len(self._settings.delays) > 1

    def _begin_windows(self, step: tf.Tensor, window: tf.Tensor, width: tf.Tensor | None = None) -> None:
        """Emits the operations that begin a schedule. Its width is D + 1. Default: the width of the least delay."""
        self._first_step.assign(step)
        self._first_window.assign(window)
        if self._settings.warmup_steps:
            self._num_early.assign(0)
        if self._changes_schedule:
            self._delay.assign(self._settings.delays[0] if width is None else width - 1)

    # Between steps.

    def begin(self) -> None:
        if (optimizer := self._outer.optimizer) is not None:
            self._broadcast(tf_variables(optimizer.variables))
        self._first_iteration = int(iterations_variable(self.group.optimizer()))
        membership = self.group.context.membership
        if self._settings.warmup_steps and membership.rank == 0 and not membership.joining:
            logging.info("The first %d steps are synchronous, as `warmup_steps` says.", self._settings.warmup_steps)

    def begin_session(self) -> None:
        self._assigned.assign(tf.zeros_like(self._assigned))
        self._meeting.begin_session()
        self._begin_windows(0, 0)
        self._outer.begin()

    def begin_training(self) -> None:
        self._first_iteration = int(iterations_variable(self.group.optimizer()))
        self._outer.begin()  # Callbacks may have changed weights.
        self._assigned.assign(tf.zeros_like(self._assigned))

    def finish(self) -> None:
        group = self.group
        num_steps, num_batches = int(group.step), int(iterations_variable(group.optimizer()))
        if not num_steps and num_batches == self._first_iteration:
            return  # The group has not trained. Others may have dropped it.
        schedule = self.known_schedule(num_steps)
        in_flight = schedule.in_flight(num_steps)
        # There is a last window even without further steps, because callbacks, and batches without an update, change
        # variables. A last window without steps has no weight in the mean, because ranks that go on may have a whole
        # window.
        self.exchange.end_windows()
        counts = not schedule.ended(num_steps)[0] or self._settings.selection is not None
        self._submit(tf.constant(in_flight.stop, tf.int64), counts=counts, everything=True)
        for window in in_flight:
            self._merge(tf.constant(window, tf.int64), schedule)
        last = in_flight.stop
        self._merge(tf.constant(last, tf.int64), schedule, num_steps - schedule.begin_of(last))
        self._outer.settle()
        group.constrain()

    def state(self) -> list[np.ndarray]:
        return self._outer.merged()

    def take_state(self, parts: Sequence[np.ndarray]) -> None:
        self._outer.begin_with(parts)

    def begin_at(self, step: int) -> None:
        self._begin_windows(step, self.exchange.number_of(step), self.exchange.width_at(step))

    def common_optimizers(self) -> Sequence[tuple]:
        outer = self._outer.optimizer
        if outer is None or outer is not self._outer_optimizer() or not outer.built:  # Replaced for a later model.
            return []
        return [(outer, tf_variables(outer.variables))]  # Ranks that have ended early lack some of its updates.

    def check_further(self, others: Sequence[Algorithm]) -> None:
        further, outer = [other for other in others if other is not self], self._outer.optimizer
        if outer is not None and further:
            raise ValueError(
                "`outer_optimizer` must be None if a step trains with several optimizers. Received: "
                f"{len(further) + 1} of them, and an outer {type(outer).__name__}."
            )


def _num_merged(schedule: Schedule, num_steps: tf.Tensor) -> tf.Tensor:
    """The number of windows that are merged when `num_steps` steps are complete."""
    return schedule.num_ended(tf.maximum(schedule.first_step, num_steps - schedule.delay))

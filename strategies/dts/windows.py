"""When DTS's windows end and are merged, how ranks change that, and which part of a window is handed out."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from hop_tf.codecs import TopK
from hop_tf.runtime.autotuning import Setting

# Each window under way has a thread and an all-reduce, and holds what it hands out.
MAX_WINDOWS = 100

# A threshold is sought among about so many values; all of them in models that have fewer.
_SAMPLE_SIZE = 1 << 17


def num_windows(delay: int, interval: int) -> int:
    """Most windows that are under way at a time: those of `delay` steps, and the last one of a `fit`."""
    return -(-delay // interval) + 1


@dataclasses.dataclass(frozen=True)
class Schedule:
    """When windows end, and when they are merged; numbers may be tensors.

    Window k ends when (k - k0 + 1) p steps more than n0 are complete, and is merged D steps later.

    Attributes:
      delay: D.
      interval: p.
      first_step: n0, the first step: windows before are merged when it begins. Default 0.
      first_window: k0, the first window. Default 0.
    """

    delay: int
    interval: int
    first_step: int = 0
    first_window: int = 0

    @property
    def num_slots(self) -> int:
        """Most windows that are under way at a time."""
        return num_windows(self.delay, self.interval)

    def ended(self, num_steps: int) -> tuple[bool, int]:
        """Tells if a window ends when so many steps are complete, and which one that is."""
        num_own = num_steps - self.first_step
        return num_own % self.interval == 0, self.num_ended(num_steps) - 1

    def due(self, num_steps: int) -> tuple[bool, int]:
        """Tells if a window is merged when so many steps are complete, and which one that is."""
        num_own = num_steps - self.delay - self.first_step
        return (num_own > 0) & (num_own % self.interval == 0), self.num_ended(num_steps - self.delay) - 1

    def num_ended(self, num_steps: int) -> int:
        """The number of windows that have ended when so many steps are complete."""
        return self.first_window + (num_steps - self.first_step) // self.interval

    def under_way(self, num_steps: int) -> range:
        """The windows that have ended by then and are not merged."""
        num_merged = self.num_ended(max(self.first_step, num_steps - self.delay))
        return range(num_merged, self.num_ended(num_steps))

    def begin_of(self, window: int) -> int:
        """The first training step of a window."""
        return self.first_step + (window - self.first_window) * self.interval

    def steps_of(self, window: int) -> range:
        """The training steps of a window."""
        return range(self.begin_of(window), self.begin_of(window + 1))

    @property
    def num_newer(self) -> int:
        """How many windows have ended after the one that is due."""
        return self.delay // self.interval

    @property
    def meeting_distance(self) -> int:
        """After so many steps what a window's mean tells is known to all, and a window ends: a multiple of p."""
        return -(-self.delay // self.interval) * self.interval


@dataclasses.dataclass(frozen=True)
class Course:
    """The schedule of some windows, and how they are averaged.

    Attributes:
      schedule: From its first window on.
      setting: The way, and the width, which is the schedule's.
      is_meeting: True if ranks that join begin with the schedule's first step.
    """

    schedule: Schedule
    setting: Setting
    is_meeting: bool = False


class Courses:
    """The settings that ranks have chosen for each window. They follow from means, so they are alike on all ranks.

    The choice by the mean of window k counts from the first window on that begins when window k is merged:

        k  +  the windows that have ended meanwhile  +  1

    If the schedule changes, its graph merges there what is under way, and goes by what the last of these means tells.

    Args:
      schedule_of: Returns, for a width, the schedule that begins at a step, with a window: `schedule_of(width, step,
        window)`.
      setting: The first one.
    """

    _NUM_KEPT = 2 * MAX_WINDOWS  # Of each window under way, and of those that follow.

    def __init__(self, schedule_of: Callable[[int, int, int], Schedule], setting: Setting):
        self._schedule_of = schedule_of
        self._first = setting
        self.begin()

    def begin(self) -> None:
        """Begins with step 0 and the first setting."""
        self._courses = [Course(self._schedule_of(self._first.width, 0, 0), self._first)]

    def of(self, window: int) -> Course:
        """That of a window."""
        for course in reversed(self._courses):
            if course.schedule.first_window <= window:
                return course
        return self._courses[0]

    def at(self, step: int) -> Course:
        """That of the window which a step is a part of."""
        for course in reversed(self._courses):
            if course.schedule.first_step <= step:
                return course
        return self._courses[0]

    @property
    def latest(self) -> Course:
        """That which counts in the end."""
        return self._courses[-1]

    def choose(self, window: int, setting: Setting) -> None:
        """The mean of a window tells this setting. Called in the order of windows."""
        present, latest = self.of(window), self.latest
        if latest.is_meeting and latest.schedule.first_window > window:
            return  # Windows begin anew there.
        if latest.schedule.first_window > window and self._changes_graph(present, latest):
            self._put(self._begun(setting, latest.schedule), replaces=True)
        elif setting != latest.setting:
            first_window = window + 1 + present.schedule.num_newer
            begin = present.schedule.steps_of(first_window).start
            self._put(Course(self._schedule_of(setting.width, begin, first_window), setting))

    def meet(self, window: int) -> int:
        """The mean of a window admits ranks. All meet where windows begin anew; returns the step.

        Called before `choose`.
        """
        present, latest = self.of(window), self.latest
        is_to_begin = latest.schedule.first_window > window
        if is_to_begin and (latest.is_meeting or self._changes_graph(present, latest)):
            self._put(self._begun(self._first, latest.schedule, is_meeting=True), replaces=True)
        else:
            step = present.schedule.steps_of(window).stop + present.schedule.meeting_distance
            schedule = self._schedule_of(self._first.width, step, present.schedule.num_ended(step))
            self._put(Course(schedule, self._first, is_meeting=True))
        return self.latest.schedule.first_step

    def _changes_graph(self, present: Course, latest: Course) -> bool:
        return latest.setting.width != present.setting.width

    def _begun(self, setting: Setting, schedule: Schedule, is_meeting: bool = False) -> Course:
        """One that begins where a schedule does."""
        return Course(self._schedule_of(setting.width, schedule.first_step, schedule.first_window), setting, is_meeting)

    def _put(self, course: Course, replaces: bool = False) -> None:
        kept = self._courses[: -1 if replaces else None]
        self._courses = [*kept, course][-self._NUM_KEPT :]

    # For a rank that joins.

    def state(self) -> np.ndarray:
        """The latest course, at a meeting."""
        schedule, setting = self.latest.schedule, self.latest.setting
        return np.array([*setting, schedule.first_step, schedule.first_window], np.int64)

    def take_state(self, state: np.ndarray) -> None:
        """Takes what another rank has given."""
        way, width, first_step, first_window = state.tolist()
        self._courses = [Course(self._schedule_of(width, first_step, first_window), Setting(way, width))]


def largest(selection: TopK, window: tf.Tensor, changes: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Emits the ops that tell where changes are among the largest: what a window hands out.

    Args:
      selection: How many are.
      window: The window's number.
      changes: float32 tensors.

    Returns:
      For each tensor, where. Lin et al. call it local accumulation.
    """
    sizes = [tf.abs(tf.cast(change, tf.float32)) for change in changes]
    values = tf.concat([tf.reshape(size, [-1]) for size in sizes], axis=0)
    sample = values[:: _next_prime(values.shape[0] // _SAMPLE_SIZE)]
    ratios = [selection.ratio_at(step) for step in range(selection.warmup_steps + 1)]
    ratio = tf.gather(ratios, tf.minimum(window, len(ratios) - 1))
    num_largest = tf.cast(tf.math.ceil(ratio * sample.shape[0]), tf.int32)
    threshold = tf.math.top_k(sample, num_largest).values[-1]
    return [~(size < threshold) for size in sizes]  # What is not a number is handed out.


def _next_prime(number: int) -> int:
    """A stride that meets all columns of a layer's kernel in turn; 1 for numbers below 2."""
    if number < 2:
        return 1
    while any(number % divisor == 0 for divisor in range(2, math.isqrt(number) + 1)):
        number += 1
    return number

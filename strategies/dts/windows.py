"""DTS's windows: the schedule of their ends and merges, changes of the schedule, and the selection of large changes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from hop_tf.codecs import TopK
from hop_tf.runtime.autotuning import Setting

# Each window in flight has a thread and an all-reduce, and keeps the submitted changes.
MAX_WINDOWS = 100

# A threshold is found from a sample of about this many values, or from all values if there are fewer.
_SAMPLE_SIZE = 1 << 17

# With shorter delays, merging at once costs as much accuracy as merging gently, or less.
_LEAST_GENTLE_DELAY = 3


def num_windows(delay: int, interval: int) -> int:
    """The largest number of windows in flight: those that end within `delay` steps, and the last one of a `fit`."""
    return -(-delay // interval) + 1


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The steps at which windows end and are merged. Numbers may be tensors.

    Window k ends when n0 + (k - k0 + 1) p steps are complete, and is merged D steps later.

    Attributes:
      delay: D.
      interval: p.
      first_step: n0, the first step. Earlier windows are merged before it begins. Default 0.
      first_window: k0, the first window. Default 0.
    """

    delay: int
    interval: int
    first_step: int = 0
    first_window: int = 0

    @property
    def num_slots(self) -> int:
        """The largest number of windows in flight at a time."""
        return num_windows(self.delay, self.interval)

    def ended(self, num_steps: int) -> tuple[bool, int]:
        """Returns True if a window ends after `num_steps` steps, and the window's number."""
        num_own = num_steps - self.first_step
        return num_own % self.interval == 0, self.num_ended(num_steps) - 1

    def due(self, num_steps: int) -> tuple[bool, int]:
        """Returns True if a window is merged after `num_steps` steps, and the window's number."""
        num_own = num_steps - self.delay - self.first_step
        return (num_own > 0) & (num_own % self.interval == 0), self.num_ended(num_steps - self.delay) - 1

    def num_ended(self, num_steps: int) -> int:
        """The number of windows that have ended when `num_steps` steps are complete."""
        return self.first_window + (num_steps - self.first_step) // self.interval

    def in_flight(self, num_steps: int) -> range:
        """The windows that have ended and are not merged when `num_steps` steps are complete."""
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
        """The number of windows that have ended after the window that is due."""
        return self.delay // self.interval

    @property
    def merges_gently(self) -> bool:
        """True if means may be merged gently. If windows are longer than the delay, they may not."""
        return (self.delay >= _LEAST_GENTLE_DELAY) & (self.interval <= self.delay)

    @property
    def meeting_distance(self) -> int:
        """The steps from a window's end to the meeting that its mean plans: D, rounded up to a multiple of p."""
        return -(-self.delay // self.interval) * self.interval


# Synchronous training: each step is a window, with the step's number, and is merged at once.
WARMUP = Schedule(delay=0, interval=1)


@dataclasses.dataclass(frozen=True)
class Course:
    """The schedule of some windows, and the way in which they are averaged.

    Attributes:
      schedule: The schedule, from its first window on.
      setting: The way to average, and the width of the schedule.
      is_meeting: True if ranks that join begin with the schedule's first step.
      is_warmup: True for the warm-up: the next course follows without a choice.
    """

    schedule: Schedule
    setting: Setting
    is_meeting: bool = False
    is_warmup: bool = False


class Courses:
    """The settings that ranks have chosen for each window. They follow from means, so they are equal on all ranks.

    The choice in the mean of window k takes effect with the first window that begins after the merge of window k:

        k  +  the windows that have ended meanwhile  +  1

    If the schedule changes, the graph first merges all windows in flight. The mean of the last one decides.

    Args:
      schedule_of: `schedule_of(width, step, window)` returns the schedule with this width that begins with this step
        and this window.
      setting: The first setting.
      warmup_steps: The number of steps before the first setting, each a window that is merged at once. Default 0.
    """

    _NUM_KEPT = 2 * MAX_WINDOWS  # For the windows in flight, and those that follow.

    def __init__(self, schedule_of: Callable[[int, int, int], Schedule], setting: Setting, warmup_steps: int = 0):
        self._schedule_of = schedule_of
        self._first = setting
        self.begin(warmup_steps)

    def begin(self, warmup_steps: int = 0) -> None:
        """Starts over at step 0. The first setting begins after `warmup_steps` steps."""
        self._courses = [Course(self._schedule_of(self._first.width, warmup_steps, warmup_steps), self._first)]
        if warmup_steps:
            self._courses.insert(0, Course(WARMUP, self._first, is_warmup=True))

    def of(self, window: int) -> Course:
        """The course of a window."""
        for course in reversed(self._courses):
            if course.schedule.first_window <= window:
                return course
        return self._courses[0]

    def at(self, step: int) -> Course:
        """The course of the window that a step belongs to."""
        for course in reversed(self._courses):
            if course.schedule.first_step <= step:
                return course
        return self._courses[0]

    @property
    def latest(self) -> Course:
        """The last course."""
        return self._courses[-1]

    def choose(self, window: int, setting: Setting) -> None:
        """Records the setting that the mean of a window has decided. Must be called in the order of windows."""
        present, latest = self.of(window), self.latest
        if present.is_warmup or (latest.is_meeting and latest.schedule.first_window > window):
            return  # At the meeting, windows start over with the first setting.
        if latest.schedule.first_window > window and self._changes_graph(present, latest):
            self._put(self._begun(setting, latest.schedule))
        elif setting != latest.setting:
            first_window = window + 1 + present.schedule.num_newer
            begin = present.schedule.steps_of(first_window).start
            self._put(Course(self._schedule_of(setting.width, begin, first_window), setting))

    def meet(self, window: int) -> int:
        """Plans a meeting, because a window's mean admits ranks. Windows start over there. Returns the meeting's step.

        A meeting ends a warm-up. Must be called before `choose`.
        """
        present, latest = self.of(window), self.latest
        is_to_begin = latest.schedule.first_window > window
        if is_to_begin and (latest.is_meeting or self._changes_graph(present, latest)):
            self._put(self._begun(self._first, latest.schedule, is_meeting=True))
        else:
            step = present.schedule.steps_of(window).stop + present.schedule.meeting_distance
            schedule = self._schedule_of(self._first.width, step, present.schedule.num_ended(step))
            self._put(Course(schedule, self._first, is_meeting=True))
        return self.latest.schedule.first_step

    def _changes_graph(self, present: Course, latest: Course) -> bool:
        return latest.setting.width != present.setting.width

    def _begun(self, setting: Setting, schedule: Schedule, is_meeting: bool = False) -> Course:
        """Returns a course that begins with the first step and window of a schedule."""
        return Course(self._schedule_of(setting.width, schedule.first_step, schedule.first_window), setting, is_meeting)

    def _put(self, course: Course) -> None:
        """Adds a course. It replaces those that would begin with its first window or later."""
        kept = [each for each in self._courses if each.schedule.first_window < course.schedule.first_window]
        self._courses = [*kept, course][-self._NUM_KEPT :]

    # For a rank that joins.

    def state(self) -> np.ndarray:
        """Returns the latest course as numbers, at a meeting."""
        schedule, setting = self.latest.schedule, self.latest.setting
        return np.array([*setting, schedule.first_step, schedule.first_window], np.int64)

    def take_state(self, state: np.ndarray) -> None:
        """Takes the course from another rank's `state`."""
        way, width, first_step, first_window = state.tolist()
        self._courses = [Course(self._schedule_of(width, first_step, first_window), Setting(way, width))]


def largest(selection: TopK, window: tf.Tensor, changes: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Emits the ops that select the largest changes, which a window sends. Lin et al. call this local accumulation.

    Args:
      selection: The ratio of changes that are selected.
      window: The window's number.
      changes: float32 tensors.

    Returns:
      For each tensor, a bool tensor that is True at the selected changes.
    """
    sizes = [tf.abs(tf.cast(change, tf.float32)) for change in changes]
    values = tf.concat([tf.reshape(size, [-1]) for size in sizes], axis=0)
    sample = values[:: _next_prime(values.shape[0] // _SAMPLE_SIZE)]
    ratios = [selection.ratio_at(step) for step in range(selection.warmup_steps + 1)]
    ratio = tf.gather(ratios, tf.minimum(window, len(ratios) - 1))
    num_largest = tf.cast(tf.math.ceil(ratio * sample.shape[0]), tf.int32)
    threshold = tf.math.top_k(sample, num_largest).values[-1]
    return [~(size < threshold) for size in sizes]  # NaN is selected.


def _next_prime(number: int) -> int:
    """The least prime that is at least `number`; 1 for 0 or 1. As a stride, it visits all columns of a kernel."""
    if number < 2:
        return 1
    while any(number % divisor == 0 for divisor in range(2, math.isqrt(number) + 1)):
        number += 1
    return number

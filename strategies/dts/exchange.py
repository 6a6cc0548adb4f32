"""`DTSExchange`: the half of DTS that averages windows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tensorflow as tf

from hop_tf import codecs
from hop_tf.collectives.alternatives import Alternatives
from hop_tf.runtime.admissions import Admissions, find_spec
from hop_tf.runtime.autotuning import Autotuner, Pace, Setting, Times
from hop_tf.runtime.averaging_exchange import AveragingExchange, with_values
from hop_tf.runtime.choosing import AUTO
from hop_tf.runtime.exchange import Request, Result
from hop_tf.runtime.group import ExchangeContext
from hop_tf.runtime.ways import Way, list_ways
from hop_tf.strategies.dts.windows import Course, Courses, Schedule
from hop_tf.tensors.packing import TensorSpec

# D and p, if there is an outer optimizer, or if no choice may depend on time.
_FIXED = 4
# The longest delay that ranks choose, as in Table 2 (a).
_MAX_DELAY = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class DTSSettings:
    """The settings of `DTSStrategy`.

    Attributes:
      interval: p, or "auto". With a given `delay`, "auto" becomes D, but at least 1.
      warmup_steps: The number of synchronous steps that come first: see `WARMUP`.
    """

    delay: int | str
    interval: int | str
    codec: codecs.Codec | codecs.LowRank | str
    algorithm: str
    outer_optimizer: str = "None"
    compensation: str = "gentle"
    skewed_shards: bool = False
    warmup_steps: int = 0
    on_peer_loss: str = "raise"

    def __post_init__(self):
        if self.delay != AUTO and self.interval == AUTO:
            object.__setattr__(self, "interval", max(1, self.delay))

    @property
    def delays(self) -> Sequence[int]:
        """D, or the delays that ranks choose from. If they choose, at most one window is in flight."""
        if self.delay != AUTO:
            return (self.delay,)
        return range(_MAX_DELAY + 1) if self.interval == AUTO else (0, self.interval)

    def interval_of(self, delay: int) -> int:
        """The steps of a window. With "auto", it ends when the previous window is merged. `delay` may be a tensor."""
        if self.interval != AUTO:
            return self.interval
        return max(1, delay) if isinstance(delay, int) else tf.maximum(delay, 1)

    @property
    def corrects_momentum(self) -> bool:
        """True if velocities are averaged, too."""
        return self.compensation == "momentum"

    @property
    def may_merge_gently(self) -> bool:
        """True if means are merged gently with the longest delay."""
        return self._is_gentle and self.schedule_of(self.delays[-1] + 1).merges_gently

    @property
    def may_lengthen(self) -> bool:
        """True if changes by adaptive optimizers are made longer; see `StepLengths`."""
        # A mean of low rank is shorter than the mean of all changes, so a ratio of lengths tells nothing.
        return self._is_gentle and self.selection is None and not isinstance(self.codec, codecs.LowRank)

    @property
    def _is_gentle(self) -> bool:
        # With an outer optimizer it is not: its momentum overshoots if weights lag.
        return self.compensation == "gentle" and self.outer_optimizer == "None"

    def schedule_of(self, width: int, first_step: int = 0, first_window: int = 0) -> Schedule:
        """The schedule with D = width - 1 that begins with this step and this window."""
        delay = width - 1
        return Schedule(delay, self.interval_of(delay), first_step, first_window)

    @property
    def num_slots(self) -> int:
        """The largest number of windows in flight at a time."""
        return max(self.schedule_of(delay + 1).num_slots for delay in self.delays)

    @property
    def merges_at_ends(self) -> bool:
        """True if a window is merged only when another one has just ended, with all its changes submitted."""
        schedules = [self.schedule_of(delay + 1) for delay in self.delays]
        return self.selection is None and all(each.delay % each.interval == 0 for each in schedules)

    def ways(self, world_size: int, specs: Sequence[TensorSpec] | None = None) -> list[Way]:
        """The ways to average windows; see `list_ways`. With a codec that selects values, "auto" is "mesh"."""
        algorithm = "mesh" if self.algorithm == AUTO and self.selection is not None else self.algorithm
        return list_ways(algorithm, self.codec, world_size, specs)

    def chooses(self, world_size: int) -> bool:
        """True if ranks choose between several settings."""
        return len(self.ways(world_size)) * len(self.delays) > 1

    def without_times(self) -> DTSSettings:
        """The settings for ranks that do not choose by measured times."""
        way = self.ways(world_size=1)[0]
        return dataclasses.replace(self.with_schedule(), codec=way.codec, algorithm=way.algorithm)

    def with_schedule(self) -> DTSSettings:
        """The settings, with a schedule that does not depend on times."""
        if self.delay != AUTO:
            return self
        return dataclasses.replace(self, delay=_FIXED, interval=_FIXED if self.interval == AUTO else self.interval)

    @property
    def selection(self) -> codecs.TopK | None:
        """The codec if it selects the values of a window to submit, otherwise None."""
        return self.codec if isinstance(self.codec, codecs.TopK) else None


class DTSExchange(AveragingExchange):
    """Averages windows, several at a time.

    If `Autotuner.spec` is among the tensors of the packing, ranks choose ways and schedules; see `Courses`.

    Args:
      context: Membership, packing and buffers of the group.
      settings: The settings of the strategy.
      tell: As for `Autotuner`.

    Attributes:
      settings: As given.
      tuner: Chooses settings, or None if all settings are given.
      pace: As for `Autotuner`.
    """

    pace: Pace | None = None

    def __init__(
        self,
        context: ExchangeContext,
        settings: DTSSettings,
        tell: Callable[[Way, int, str], None] = lambda way, width, text: None,
    ):
        self.settings = settings
        self.max_in_flight = self.num_threads = settings.num_slots
        membership, packing = context.membership, context.packing
        ways = settings.ways(membership.world_size, packing.specs)
        if settings.selection is not None:  # The graph has left out the other values.
            ways = [dataclasses.replace(way, codec=settings.selection.selected()) for way in ways]
        self.tuner, place = None, Autotuner.find_spec(packing.specs)
        widths = [delay + 1 for delay in settings.delays]
        if place is not None:
            self.tuner = Autotuner(
                ways,
                widths,
                rank=membership.rank,
                world_size=membership.world_size,
                tell=tell,
                pace=self.pace,
                interval_of=lambda width: settings.interval_of(width - 1),
                name_of=lambda width: "D = {0.delay}, p = {0.interval}".format(settings.schedule_of(width)),
                traces=False,
            )
            self._times_place = packing.place(place)
            self._clock = membership.monitor.now
        # By window: the start time of its exchange, and the exchange's duration.
        self._begun_at: dict[int, float] = {}
        self._exchange_seconds: dict[int, float] = {}
        self._is_ending = False
        self._courses = Courses(settings.schedule_of, Setting(0, widths[0]), settings.warmup_steps)
        place = find_spec(packing.specs)
        admissions = None
        if place is not None:
            admissions = Admissions(membership, context.group, context.session, first_round=self.number_of)
        # Codecs keep residuals for later windows, one per slot.
        slots = range(settings.num_slots)
        super().__init__(
            context,
            [context.make_mean(str(slot), packing, ways) for slot in slots],
            admissions=admissions,
            votes_place=None if place is None else packing.place(place),
        )

    def width_at(self, step: int) -> int:
        """D + 1 of the schedule that ranks have chosen for a step."""
        return self._courses.at(step).setting.width

    # Windows.

    def steps_of(self, number: int) -> range:
        return self._courses.of(number).schedule.steps_of(number)

    def number_of(self, step: int) -> int:
        return self._courses.at(step).schedule.num_ended(step)

    def reset(self, session: int) -> None:
        super().reset(session)
        self._courses.begin()
        if self.tuner is not None:
            self.tuner.begin(self._courses.latest.setting.width)
        self._begun_at.clear()
        self._exchange_seconds.clear()
        self._is_ending = False

    def begin_at(self, step: int) -> None:
        window = self.number_of(step)
        self._sent_rounds = self._num_decided = window
        for slot, reduction in enumerate(self._reductions):
            reduction.begin_at(-((slot - window) // self.num_threads))  # The slot's first turn from this window on.

    def common_state(self) -> list[np.ndarray]:
        own = [] if self.tuner is None else [self.tuner.state()]
        return [*super().common_state(), *own, self._courses.state()]

    def take_common_state(self, parts: Sequence[np.ndarray]) -> None:
        *parts, courses = parts
        self._courses.take_state(courses.copy().view(np.int64))
        if self.tuner is not None:
            *parts, state = parts
            self.tuner.take_state(state.copy().view(np.float64))
        super().take_common_state(parts)

    def step(self, request: Request) -> Result:
        window, buckets = request.step, request.buckets
        turn, slot = divmod(window, self.num_threads)
        if self.tuner is not None:
            # The graph has merged the window whose mean decides the course. Only a last window has to wait for that
            # mean.
            course = self._courses.of(window)
            least = window - course.schedule.num_newer
            self._membership.wait_until(lambda: self._num_decided >= least, timeout_seconds=math.inf)
            buckets = with_values(buckets, self._times_place, self._begin_timing(window, course))
            if isinstance(self._reductions[slot], Alternatives):
                self._reductions[slot].choose(course.setting.way)
        means = self.mean(
            window,
            buckets,
            turn=turn,
            reduction=slot,
            before_commit=lambda: self._commit(window),
            training_step=self.steps_of(window)[-1],
            codec_step=window,
            decides_of=None if self.admissions is self.tuner is None else window,
        )
        return Result(window, 0, tuple(means))

    def _commit(self, window: int) -> None:
        """Waits until earlier windows are committed.

        So a rank that leaves has taken part in all windows up to a certain one. In a mesh of two, the other rank may
        have a later window's mean, too. No third rank could have another mean.
        """
        self._membership.wait_until(lambda: self._sent_rounds >= window, timeout_seconds=math.inf)
        with self._membership.monitor:
            self._sent_rounds = max(self._sent_rounds, window + 1)
            self._membership.monitor.notify_all()

    def choose_meeting(self, number: int) -> int:
        return self._courses.meet(number)

    # Choosing by times.

    def end_windows(self) -> None:
        """Records that the last window of a `fit` follows. It may be shorter than others, so it is not measured."""
        self._is_ending = True

    def _begin_timing(self, window: int, course: Course) -> np.ndarray:
        """Called when the exchange of a window begins. Returns this rank's times of earlier windows, for the others.

        If several windows are in flight, their means arrive together. So a step's period is averaged over that many
        windows.

        Args:
          window: The window.
          course: Its course.
        """
        now, num_newer = self._clock(), course.schedule.num_newer
        self._begun_at[window] = now
        first = window - 1 - num_newer
        period = (now - self._begun_at.get(first, now)) / ((num_newer + 1) * course.schedule.interval)
        self._begun_at.pop(first - self.num_threads - 1, None)
        return self.tuner.own(Times(period, self._exchange_seconds.pop(first, 0.0)), self._is_ending)

    def _timed_setting(self, window: int) -> Setting | None:
        """The setting that a window's times belong to. None if they span several settings, or nothing was in flight."""
        course = self._courses.of(window)
        num_newer = course.schedule.num_newer
        num_before = num_newer + max(1, num_newer)  # The first steps have nothing to wait for.
        return None if window < course.schedule.first_window + num_before else course.setting

    def decide(self, number: int, means: Sequence[np.ndarray]) -> None:
        super().decide(number, means)
        if self.tuner is None:
            return
        self._exchange_seconds[number] = self._clock() - self._begun_at[number]
        bucket, where = self._times_place
        if not self._courses.of(number).is_warmup:  # Its times say nothing about windows in flight.
            self.tuner.hear(means[bucket][where], self._timed_setting(number))
        self._courses.choose(number, self.tuner.setting)
        # The graph reads the width when it merges this window.
        next_window = number + 1 + self._courses.of(number).schedule.num_newer
        means[bucket][where] = self._courses.of(next_window).setting.width

    def gauges(self) -> Mapping[str, float]:
        """The settings that ranks have chosen.

        Returns:
          `delay`: D; `interval`: p; others as for `Autotuner.gauges`. Empty if ranks do not choose.
        """
        if self.tuner is None:
            return {}
        schedule = self._courses.latest.schedule
        return {"delay": schedule.delay, "interval": schedule.interval, **self.tuner.gauges()}

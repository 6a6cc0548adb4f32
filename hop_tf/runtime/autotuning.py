"""`Autotuner`: chooses settings for averaging by measured times. All ranks make the same choice in the same step.

With the values of a step, each rank submits its times of the previous step. The mean of these times is equal to the bit
on all ranks, even if a rank is lost meanwhile. The choice is a function of such means only, so ranks need not ask each
other.

A candidate is a *way*, which is an algorithm with a codec, and a width K. A rank applies a mean K - 1 steps late. The
mean covers a round of p steps, and K may determine p. A step of a candidate takes

    K = 1       computing + communicating / p            (Pipe-SGD, Equation 2)
    K >= 2      max(computing, communicating / p)        (Equation 4)

A candidate that changes training more than another one must save `WORTHWHILE` of the other one's step. If both
candidates have a width above the least one, a smaller saving is enough, so that communication is hidden.

    exploring   Ranks try each way for a few steps at the least width. If communicating is short, they try only the
                first way. Before ranks choose a candidate other than the first, they try the first one again, because
                programs are slower at their beginning. They leave this out if the first one is slower by far.
    settled     Ranks keep their choice until its times have changed in two blocks of steps, or until other ranks take
                part. Then they explore again. But if no graph has to be traced, and the change is small, ranks choose
                another width by known times. If a larger width promises enough, ranks try it for a few steps. They do
                so when it would have saved the time for tracing its graph.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from hop_tf.runtime.choosing import WORTHWHILE, choose
from hop_tf.runtime.ways import Way
from hop_tf.tensors.packing import TensorSpec

# A candidate is faster by far if its step takes less than this share of another candidate's step.
_MUCH_FASTER = 0.5
# The cost of a wider pipe, as a multiple of the duration of a program's first step after its gradients are traced.
_TIMES_TRACING = 3
# Differences that may change the choice: a relative change of a step's times, and a factor between times of exchanges.
_CHANGE = 0.2
_BY_FAR = 1.7
_NEGLIGIBLE = 0.01
# Steps of a session that exploring may take: a number of steps, plus a share of all steps.
_FREE_STEPS, _SHARE_OF_STEPS = 100, 0.01
# A table with a column for each rank. The rows are the rank's two times, its state (one of the next two constants, or
# 0), and 1 + the index of its chosen setting, or 0.
_SPEC_NAME = "hop_tf_times"
_IS_NARROW, _IS_LATE = 1, 2
_LEAST_SECONDS = 1e-9  # A period of 0 stands for a rank that takes no part.


class Setting(NamedTuple):
    """A candidate: the index of a way, and a width, which is 1 + the number of steps by which a mean is late."""

    way: int
    width: int


class Times(NamedTuple):
    """Durations in seconds: of a step, from the start of an exchange to the next start, and of a round's exchange."""

    period: float
    exchange: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pace:
    """Numbers of steps to measure. Long steps need fewer measurements, because disturbances are short.

    Attributes:
      skipped: Number of steps after a change that are not measured. Twice as many before the first measurement, and
        with widths above 1.
      measured: Number of measured steps of each candidate.
      block: Number of steps of a block. The median of a block counts.
      long_seconds: If steps take longer, fewer are skipped and measured, in proportion. At least half as many are
        measured, except for the first candidate.
    """

    skipped: int = 2
    measured: int = 4
    block: int = 16
    long_seconds: float = 0.1

    def scaled(self, number: int, period: float) -> int:
        """The number of steps of a candidate: fewer, in proportion, if they take long."""
        return max(1, int(number * min(1.0, self.long_seconds / period)))


def _call_it_pipe(width: int) -> str:
    return f"K = {width}"


def _one_step(width: int) -> int:
    del width
    return 1


class Autotuner:
    """Chooses the settings of one exchange: see the module. Only the exchange's communication thread calls it.

    Args:
      ways: The ways, beginning with the one that changes training least.
      widths: The least width, and a larger one if ranks may choose it.
      rank: This rank.
      world_size: n.
      tell: Called with a way, a width, and a text about the duration of their step, when ranks have changed their
        choice.
      pace: The numbers of steps to measure.
      interval_of: Returns the number of steps of a round with a width. Default: one.
      name_of: Returns a width in words. Default: "K = 2".
      traces: True if another width needs another graph, which has to be traced. Default True.

    Attributes:
      setting: The setting of the next step.
      is_narrow: True if a wider pipe cannot reproduce this program.
    """

    def __init__(
        self,
        ways: Sequence[Way],
        widths: Sequence[int],
        *,
        rank: int,
        world_size: int,
        tell: Callable[[Way, int, str], None] = lambda way, width, text: None,
        pace: Pace | None = None,
        interval_of: Callable[[int], int] = _one_step,
        name_of: Callable[[int], str] = _call_it_pipe,
        traces: bool = True,
    ):
        self.ways, self._widths = ways, widths
        self._settings = [Setting(way, width) for width in widths for way in range(len(ways))]
        self._rank, self._world_size = rank, world_size
        self._tell, self._pace = tell, pace or Pace()
        self._interval_of, self._name_of, self._traces = interval_of, name_of, traces
        self.is_narrow = False
        self._settled: Setting | None = None
        self._tracing_seconds = 0.0
        self._results: dict[Setting, Times] = {}  # Medians.
        self._least: dict[Setting, Times] = {}
        self.setting = self._settings[0]
        self.begin(widths[0])

    @staticmethod
    def spec(world_size: int, dtype: tf.DType = tf.float64, *, exact: bool = False) -> TensorSpec:
        """The tensor that travels with a round's values. dtype and `exact` choose its bucket."""
        return TensorSpec(_SPEC_NAME, (4, world_size), dtype, exact, on_host=True)

    @staticmethod
    def find_spec(specs: Sequence[TensorSpec]) -> int | None:
        """The index of the tensor of `spec`; None if ranks choose nothing."""
        return next((index for index, spec in enumerate(specs) if spec.name == _SPEC_NAME), None)

    def begin(self, width: int) -> None:
        """Begins a session. In its first step, all ranks adopt the first rank's choice of the previous session.

        Args:
          width: The width of this rank's graph. It may differ between ranks. The way does not.
        """
        self._present: list[int] | None = None
        self._may_widen = len(self._widths) > 1
        self._num_steps = self._num_explored = 0
        self._begin_with(Setting(0, width))

    def state(self) -> np.ndarray:
        """The state for a rank that joins between two steps."""
        settled = -1 if self._settled is None else self._settings.index(self._settled)
        numbers = [self._settings.index(self.setting), settled, self._num_steps, self._num_explored]
        return np.array([*numbers, self._tracing_seconds], np.float64)

    def take_state(self, state: np.ndarray) -> None:
        """Takes the state of another rank. All ranks explore again, because other ranks take part now."""
        *numbers, self._tracing_seconds = state.tolist()
        setting, settled, self._num_steps, self._num_explored = map(int, numbers)
        self._settled = None if settled < 0 else self._settings[settled]
        self._present = []
        self._begin_with(self._settings[setting])

    def _begin_with(self, setting: Setting, is_exploring: bool = False) -> None:
        self._is_exploring = is_exploring
        self._begin_measuring(setting)

    def _begin_measuring(self, setting: Setting) -> None:
        self._age, self._is_late = 0, False
        self._heard: list[Times] = []  # The least times so far, if any.
        self.setting = setting
        # A program that has just begun is slow, and the first steps of a wider pipe wait for nothing.
        is_slow = self._is_exploring and not self._results
        self._num_skipped = self._pace.skipped * (2 if is_slow or self.setting.width > 1 else 1)
        self._measured: list[Times] = []

    def own(self, times: Times, is_late: bool = False) -> np.ndarray:
        """Returns the table that this rank sends with a step's values: its own column, and zeros.

        Args:
          times: The times of the previous step.
          is_late: True if the program does not have the chosen width yet. Default: it does.
        """
        settled = 0 if self._settled is None else 1 + self._settings.index(self._settled)
        table = np.zeros((4, self._world_size))
        state = _IS_NARROW if self.is_narrow else _IS_LATE if is_late else 0
        table[:, self._rank] = max(times.period, _LEAST_SECONDS), times.exchange, state, settled
        return table

    def hear(self, mean: np.ndarray, setting: Setting | None) -> None:
        """Takes the mean of the tables that ranks have submitted with a step, and chooses the next setting.

        Args:
          mean: The mean of `own` over the ranks.
          setting: The setting of the measured step, which may be from before a change. None if there were several.
        """
        if len(self._settings) == 1:
            return
        periods, exchanges, states, settled = mean.reshape(4, -1).tolist()
        present = [rank for rank, period in enumerate(periods) if period]
        states = {round(state * len(present)) for state in states}
        self._may_widen = len(self._widths) > 1 and _IS_NARROW not in states
        interval = self._interval_of(self.setting.width)
        self._num_steps += interval
        is_stale = setting != self.setting or self._is_late
        self._is_late = _IS_LATE in states
        self._age = 0 if self._is_late else self._age + 1
        if self._present is None:  # The first step of a session.
            self._tracing_seconds = max(self._tracing_seconds, sum(periods))
        if present != self._present:
            self._change_ranks(present, round(settled[present[0]] * len(present)))
            return
        self._num_explored += interval * self._is_exploring
        if self.setting.width > self._widths[0] and not self._may_widen:
            self._narrow()
            return
        if is_stale or self._is_late:
            return
        times = self._times([Times(periods[rank], exchanges[rank]) for rank in present])
        self._heard = [_least([times, *self._heard])]
        if self._age > self._num_rounds(self._scaled(self._num_skipped), at_least=2):
            self._measured.append(times)
            self._look()

    def _times(self, of_ranks: Sequence[Times]) -> Times:
        """The times of a step, computed from the ranks' times, each divided by the number of ranks.

        If ranks wait for the exchange, the slowest rank decides the duration of the rest of the step. That rank's own
        exchange looks short, because the values of the others may have arrived before. With two ranks, this happens to
        each in turn.
        """
        period = sum(times.period for times in of_ranks)
        if self.setting.width > 1:
            return Times(period, min(times.exchange for times in of_ranks) * len(of_ranks))
        interval = self._interval_of(1)
        computing = max(times.period - times.exchange / interval for times in of_ranks) * len(of_ranks)
        return Times(period, max(0.0, period - computing) * interval)

    def _scaled(self, number: int) -> int:
        """The number of steps: fewer if ranks explore and all steps so far took long."""
        if not self._is_exploring or not self._heard:
            return number
        return self._pace.scaled(number, self._heard[0].period)

    def _num_rounds(self, number: int, at_least: int) -> int:
        """The number of rounds of `number` steps."""
        return max(min(at_least, number), number // self._interval_of(self.setting.width))

    def _change_ranks(self, present: list[int], settled: int) -> None:
        is_first, self._present = self._present is None, present
        self._results, self._least = {}, {}  # Ranks may have different ones.
        if is_first:
            self._settled = self._settings[settled - 1] if settled else None
        if is_first and settled:
            self._settle(self._settled)
        else:
            self._explore()

    def _look(self) -> None:
        """Called after a measurement. Goes on to the next decision if there are enough measurements."""
        if self._is_exploring:
            if len(self._measured) >= self._num_rounds(self._num_to_measure(), at_least=1):
                self._note_results()
                self._try_next()
        elif len(self._measured) >= self._num_rounds(self._pace.block, at_least=3):
            self._compare_block()

    def _num_to_measure(self) -> int:
        """Returns the number of steps of this candidate to measure.

        One step may be enough to see that the first candidate is slower by far. If there is little to gain by another
        candidate, ranks measure the full number of steps. That costs nothing, because they train on meanwhile.
        """
        number = self._pace.measured
        is_first = not self._results
        if is_first and not self._has_to_hide(self._median()):
            return number
        return max(self._scaled(number), 1 if is_first else number // 2)

    def _note_results(self) -> None:
        """Keeps the measurements. If a setting is tried again, the better times count."""
        setting = self.setting
        before = [self._results[setting]] if setting in self._results else []
        self._results[setting] = _least([self._median(), *before])
        self._least[setting] = _least([*self._measured, *self._heard, *before])

    def _median(self) -> Times:
        return Times(*map(statistics.median, zip(*self._measured, strict=True)))

    def gauges(self) -> dict[str, float]:
        """The way of the next step, for `strategy.report()`.

        Returns:
          `uses_ring`: 1 or 0; `uses_bcube`, if it can be chosen: 1 or 0; `encoded_bytes_per_value`: 4 for a lossless
          float32.
        """
        way = self.ways[self.setting.way]
        kinds = {"ring", *(_kind(each) for each in self.ways)} - {"mesh"}
        uses = {f"uses_{kind}": float(kind == _kind(way)) for kind in sorted(kinds)}
        return {**uses, "encoded_bytes_per_value": way.codec.bytes_per_value}

    # Exploring.

    def _explore(self) -> None:
        """Begins to explore, unless exploring has already taken too many steps."""
        if self._num_explored >= _FREE_STEPS + _SHARE_OF_STEPS * self._num_steps:
            self._settle(self._settled or self._settings[0])
        else:
            self._results, self._least, self._is_tried_again = {}, {}, False
            self._begin_with(self._settings[0], is_exploring=True)

    def _try_next(self) -> None:
        first, tried = self._settings[0], self._results
        if not self._has_to_hide(self._results[first]):
            self._choose([first])
            return
        if (untried := self._untried()) is not None:
            self._try(untried)
            return
        candidates = self._candidates(self._may_widen)
        best = self._best(candidates)
        if best not in tried and not self._is_worth_tracing(best):
            candidates = self._candidates(may_widen=False)
            best = self._best(candidates)
        is_sure = self._is_much_faster(best, first)
        if best not in tried and (self._traces or not is_sure):
            self._try(best)
        elif best == first or self._is_tried_again or is_sure:
            self._choose(candidates)
        else:
            self._is_tried_again = True
            self._try(first)

    def _candidates(self, may_widen: bool) -> list[Setting]:
        """The settings whose ways were tried, with all widths or the least one."""
        widths = self._widths if may_widen else self._widths[:1]
        return [each for each in self._settings if each.width in widths and self._narrowed(each) in self._results]

    def _is_worth_tracing(self, wide: Setting) -> bool:
        """True if, in the steps so far, this setting would have saved the time that tracing its graph takes.

        Only savings beyond `WORTHWHILE` count, because the setting may save less than predicted.
        """
        if not self._traces:
            return True
        seconds = self._seconds(self._best(self._candidates(may_widen=False)))
        saved = (1 - WORTHWHILE) * seconds - self._seconds(wide)
        return saved * self._num_steps >= _TIMES_TRACING * self._tracing_seconds

    def _try_wide(self) -> None:
        """Tries a larger width if it is worth tracing by now."""
        if not self._results or len(self._widths) == 1 or self.setting.width > self._widths[0]:
            return
        best = self._best(self._candidates(self._may_widen))
        if best not in self._results and self._is_worth_tracing(best):
            self._is_exploring = True
            self._try(best)

    def _untried(self) -> Setting | None:
        """The next way to try, at the least width, or None.

        First, ranks try codecs with one algorithm, beginning with the codec that sends the least. They leave out a
        codec that would be too slow even if its exchange became shorter in proportion to its bytes. They try further
        algorithms unless another codec was faster by far.
        """
        narrow = [Setting(way, self._widths[0]) for way in range(len(self.ways))]
        tried = [each for each in narrow if each in self._results]

        def order(setting: Setting) -> tuple:
            way = self.ways[setting.way]
            return way.algorithm != self.ways[0].algorithm, way.codec.bytes_per_value

        for setting in sorted(narrow, key=order):
            alike = [each for each in tried if self.ways[each.way].codec == self.ways[setting.way].codec]
            is_hopeless = any(self._is_much_faster(other, each) for each in alike for other in tried)
            is_hopeless = is_hopeless or (not alike and self._is_too_long(setting, tried))
            if setting not in tried and not is_hopeless:
                return setting
        return None

    def _is_too_long(self, setting: Setting, tried: Sequence[Setting]) -> bool:
        """True if a codec that was not tried yet cannot be chosen with any width, because its bytes take too long.

        Compared with the first way, an exchange becomes shorter at most in proportion to its bytes. Another algorithm
        may be faster, but not by far.
        """
        way, first = self.ways[setting.way], self.ways[0]
        period, exchange = self._results[self._settings[0]]
        computing = period - exchange / self._interval_of(self._widths[0])
        exchange *= way.codec.bytes_per_value / first.codec.bytes_per_value

        def least(width: int) -> float:
            return _of_step(width, computing, exchange / self._interval_of(width))

        factor = 1 - WORTHWHILE if way.algorithm == first.algorithm else _MUCH_FASTER
        narrow = self._widths[:1]
        return all(
            min(self._seconds(Setting(other.way, width)) for other in tried for width in widths)
            < factor * min(map(least, widths))
            for widths in (narrow, self._widths if self._may_widen else narrow)
        )

    def _narrowed(self, setting: Setting) -> Setting:
        return Setting(setting.way, self._widths[0])

    def _try(self, setting: Setting) -> None:
        self._begin_measuring(setting)

    def _has_to_hide(self, times: Times) -> bool:
        """True if shorter communication than the first candidate's may save `WORTHWHILE` of a step."""
        width = self._widths[0]
        interval = self._interval_of(width)
        hides_all = width > 1 and width - 1 >= interval  # The next exchange begins when it is due.
        return times.exchange / interval / times.period > (1 - WORTHWHILE if hides_all else WORTHWHILE)

    def _is_much_faster(self, setting: Setting, other: Setting) -> bool:
        """True if `other` is slower by far, even if ranks tried `other` at the beginning of the program."""
        return self._seconds(setting) < _MUCH_FASTER * self._seconds(other, self._least)

    def _seconds(self, setting: Setting, results: Mapping[Setting, Times] | None = None) -> float:
        """The duration of a step: measured with a wider pipe, otherwise predicted.

        Args:
          setting: The candidate.
          results: Times of each candidate that was tried. Default: medians.
        """
        results = results or self._results
        if setting.width > 1 and setting in results:
            return results[setting].period
        narrow = [results[each] for each in results if each.width == 1]
        computing = statistics.median(times.period - times.exchange / self._interval_of(1) for times in narrow)

        def predicted(setting: Setting) -> float:
            exchange = results[Setting(setting.way, 1)].exchange
            return _of_step(setting.width, computing, exchange / self._interval_of(setting.width))

        if setting.width == 1:
            return predicted(setting)
        # A wide pipe may take longer than the model predicts: it makes further updates, and processors may be busy.
        wide = [each for each in results if each.width > 1]
        return predicted(setting) + max([0.0, *(results[each].period - predicted(each) for each in wide)])

    def _best(self, candidates: Sequence[Setting], results: Mapping[Setting, Times] | None = None) -> Setting:
        """The candidate to choose by `results`. Default: by the measured times."""

        def seconds(setting: Setting) -> float:
            return self._seconds(setting, results)

        def change(setting: Setting) -> tuple:
            return self.ways[setting.way].codec, setting.width > self._widths[0]

        return choose(candidates, seconds, change, lambda setting: self._seconds(setting, results or self._least))

    # Settled.

    def _choose(self, candidates: Sequence[Setting]) -> None:
        best = self._best(candidates)
        first = self._settings[0]
        text = f"{self._describe(best)}: {1e3 * self._seconds(best):.3g} ms a step"
        if best != first:
            text += f"; {self._describe(first)}: {1e3 * self._seconds(first):.3g} ms"
        is_new = best != self._settled
        self._settle(best)
        if is_new:
            self._tell(self.ways[best.way], best.width, text)

    def _describe(self, setting: Setting) -> str:
        """A setting in words."""
        width = "" if tuple(self._widths) == (1,) else f", {self._name_of(setting.width)}"
        return f"{self.ways[setting.way]}{width}"

    def _settle(self, setting: Setting) -> None:
        self._settled = setting
        self._begin_with(setting)
        self._basis: Times | None = None  # Of a step.
        self._has_changed = False

    def _narrow(self) -> None:
        """Returns to the least width, because a wider pipe cannot reproduce the program of a rank."""
        self._settle(self._narrowed(self.setting))
        text = f"{self._describe(self.setting)}: a wider pipe cannot reproduce the program"
        self._tell(self.ways[self.setting.way], self.setting.width, text)

    def _compare_block(self) -> None:
        """Chooses again after two blocks of steps whose times differ from the first block's."""
        period, exchange = self._median()
        times = Times(period, exchange / self._interval_of(self.setting.width))  # Both of a step.
        self._measured.clear()
        if self._basis is None:
            self._basis = times
            return
        longest = max(times.period, self._basis.period)
        differs = any(abs(now - then) > _CHANGE * longest for now, then in zip(times, self._basis, strict=True))
        differs = differs or self._would_choose_another(times)
        if differs and self._has_changed:
            self._answer(times)
        elif not differs:
            self._try_wide()
        self._has_changed = differs

    def _would_choose_another(self, times: Times) -> bool:
        """True if exchanges have become shorter or longer by far, and another setting is better with such exchanges.

        The times of whole steps may not show that a link has become faster, because an encoded exchange may be a small
        part of a step before and after that.
        """
        times_as_long = self._times_as_long(times).exchange
        if not _is_by_far(times_as_long):
            return False
        narrow = {each: found.exchange for each, found in self._results.items() if each.width == 1}
        results = {each: self._with_exchange(each, times_as_long * exchange) for each, exchange in narrow.items()}
        return bool(results) and self._best(self._candidates(self._may_widen), results) != self.setting

    def _times_as_long(self, times: Times) -> Times:
        """Present times divided by the first block's. Times below `_NEGLIGIBLE` of a step count as `_NEGLIGIBLE`."""
        least = _NEGLIGIBLE * max(times.period, self._basis.period)
        return Times(*(max(now, least) / max(then, least) for now, then in zip(times, self._basis, strict=True)))

    def _with_exchange(self, narrow: Setting, exchange: float) -> Times:
        """The times of a setting of width 1 if its exchange took `exchange` seconds."""
        period, before = self._results[narrow]
        return Times(period + (exchange - before) / self._interval_of(1), exchange)

    def _answer(self, times: Times) -> None:
        """Explores again. If times have not changed by far, and no width needs tracing, chooses a width at once."""
        is_by_far = any(map(_is_by_far, self._times_as_long(times)))
        narrow = self._narrowed(self.setting)
        waits = narrow == self.setting or narrow.width > 1
        if self._traces or is_by_far or waits or narrow not in self._results:
            self._explore()
            return
        exchange = times.exchange * self._interval_of(self.setting.width)
        self._results = {
            **{each: found for each, found in self._results.items() if each.width == 1},
            narrow: self._with_exchange(narrow, exchange),
            self.setting: Times(times.period, exchange),
        }
        self._least = dict(self._results)
        self._choose([each for each in self._candidates(self._may_widen) if each.way == self.setting.way])


def _of_step(width: int, computing: float, communicating: float) -> float:
    """The duration of a step: see the module."""
    return computing + communicating if width == 1 else max(computing, communicating)


def _is_by_far(times_as_long: float) -> bool:
    return not 1 / _BY_FAR < times_as_long < _BY_FAR


def _kind(way: Way) -> str:
    """The algorithm without its numbers."""
    return way.algorithm.partition(":")[0]


def _least(times: Sequence[Times]) -> Times:
    return Times(*map(min, zip(*times, strict=True)))

"""`GradientExchange`: averages gradients. `hop_tf.runtime.gradient_algorithm` has the graph's half."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tensorflow as tf

from hop_tf.collectives.alternatives import Alternatives
from hop_tf.keras_hook.optimizers import has_schedule, weight_decays
from hop_tf.runtime.admissions import Admissions, find_spec
from hop_tf.runtime.autotuning import Autotuner, Pace, Times
from hop_tf.runtime.averaging_exchange import AveragingExchange, with_values
from hop_tf.runtime.exchange import Request, Result
from hop_tf.runtime.graph_encoding import find_encoding
from hop_tf.runtime.group import ExchangeContext
from hop_tf.runtime.rates import CommonRate
from hop_tf.runtime.shares import refuse_float16
from hop_tf.runtime.ways import Way
from hop_tf.tensors.packing import TensorSpec


class GradientExchange(AveragingExchange):
    """Averages gradients, segment by segment. Changes of carried variables, and the learning rate, travel with them.

    If ranks have slices of different sizes, each sends its gradients times its number of rows, and sends this number in
    segment 0:

        mean = (sum of rows[r] gradient[r] over r) / (sum of rows[r] over r)

    The sum of the rows is over the ranks present in segment 0. If a rank is lost between two segments of a step, the
    divisor of the later segments still includes its rows. The divisor is the same on all ranks.

    The last tensors of the packing are those of `specs_beside`. If they include `Admissions.spec`, ranks that were
    started again are admitted, and a step ends with `Meeting.meet_if_due`.

    If they include `Autotuner.spec`, ranks choose a way to average, or a width, by the durations of steps.

    Args:
      context: Membership, packing and buffers of the group.
      members: For each segment, the indices of its variables.
      ways: The ways to average gradients. Several need `Autotuner.spec`.
      widths: See `Autotuner`. Default: 1 only.
      tell: See `Autotuner`. Default: does nothing.
      adopts_rate: True if the first rank's learning rate can replace a rank's own. Default: True without weight decay,
        because decay uses the rank's own rate before the rate is replaced. Always False if the rate has a schedule.
      delay: Number of steps by which a mean is applied late. Default 0.

    Attributes:
      rate: The learning rate.
      members: For each segment, the indices of its variables.
      parts: For each segment, the packing of its variables.
      tuner: Chooses a way and a width for each step; None if there is no choice.
      width: The width K of the graph.
      weighs_rows: True if ranks count in proportion to their rows.
      pace: See `Autotuner`.
    """

    width: int = 1
    pace: Pace | None = None

    def __init__(
        self,
        context: ExchangeContext,
        members: Sequence[Sequence[int]],
        *,
        ways: Sequence[Way],
        widths: Sequence[int] = (1,),
        tell: Callable[[Way, int, str], None] = lambda way, width, text: None,
        adopts_rate: bool | None = None,
        delay: int = 0,
    ):
        self.members = members
        self.parts = [context.packing.part(indices) for indices in members]
        self.max_in_flight = len(self.parts)
        rows = _find_rows(context.packing.specs)
        self.weighs_rows = rows is not None
        self._rows_place = None
        if self.weighs_rows:
            for way in ways:
                refuse_float16(context.packing.specs, way.codec)
            self._rows_place = self._place_of(rows)[1]
        self._own_scale = 1.0
        place = find_spec(context.packing.specs)
        self._votes_segment, votes_place = (None, None) if place is None else self._place_of(place)
        self._encoding = find_encoding(context, self.parts, ways)
        in_graph = self._encoding is not None
        super().__init__(
            context,
            [context.make_mean(str(number), part, ways, in_graph=in_graph) for number, part in enumerate(self.parts)],
            admissions=None if place is None else self._make_admissions(context),
            votes_place=votes_place,
            lead=delay + 1,
        )
        self._exact = context.packing.exact
        optimizer = context.optimizer()
        if adopts_rate is None:
            adopts_rate = not any(weight_decays(optimizer, context.trained))
        adopts_rate = adopts_rate and not has_schedule(optimizer)
        self.rate = CommonRate(context.membership.rank, context.membership.world_size, adopts=adopts_rate)
        self._rate_segment, self._rate_place = self._place_of(len(context.packing.specs) - 1)
        self.tuner, times = None, Autotuner.find_spec(context.packing.specs)
        if times is not None:
            rank, world_size = context.membership.rank, context.membership.world_size
            self.tuner = Autotuner(ways, widths, rank=rank, world_size=world_size, tell=tell, pace=self.pace)
            self._clock = context.membership.monitor.now
            self._times_segment, self._times_place = self._place_of(times)
            self._begin_timing()

    def _make_admissions(self, context: ExchangeContext) -> Admissions:
        return Admissions(
            context.membership, context.group, context.session, first_round=lambda step: step * len(self.parts)
        )

    def _place_of(self, index: int) -> tuple[int, tuple[int, slice]]:
        """The segment of a tensor, its bucket there, and its slice of the bucket."""
        segment = next(number for number, members in enumerate(self.members) if index in members)
        return segment, self.parts[segment].place(list(self.members[segment]).index(index))

    def reset(self, session: int) -> None:
        super().reset(session)
        if self.tuner is not None:
            self.tuner.begin(self.width)
            self._begin_timing()

    def common_state(self) -> list[np.ndarray]:
        own = [] if self.tuner is None else [self.tuner.state()]
        return [*super().common_state(), *own]

    def take_common_state(self, parts: Sequence[np.ndarray]) -> None:
        if self.tuner is not None:
            *parts, state = parts
            self.tuner.take_state(state.copy().view(np.float64))
            self._begin_timing()
        super().take_common_state(parts)

    def emit_encode(self, segment: int, buckets: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
        return buckets if self._encoding is None else self._encoding.emit_encode(segment, buckets)

    def emit_decode(self, segment: int, buckets: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
        return buckets if self._encoding is None else self._encoding.emit_decode(segment, buckets)

    def result_sizes(self, segment: int, sizes: Sequence[int]) -> Sequence[int]:
        return sizes if self._encoding is None else self._encoding.result_sizes(segment)

    def step(self, request: Request) -> Result:
        t, segment, buckets = request.step, request.segment, request.buckets
        begun_at = 0.0 if self.tuner is None else self._begin_segment(segment)
        number = t * len(self.parts) + segment
        decides_of = t if segment == self._votes_segment else None
        has_times = self.tuner is not None and segment == self._times_segment
        if has_times:
            buckets = with_values(buckets, self._times_place, self.tuner.own(self._times, self.is_to_change))
        means = self.mean(number, buckets, turn=t, reduction=segment, decides_of=decides_of)
        if self.weighs_rows and segment == 0:
            bucket, where = self._rows_place
            self._own_scale = float(means[bucket][where][0] / buckets[bucket][where][0])
        for mean, own, exact in zip(means, buckets, self._exact, strict=True):
            if exact:  # The graph adds the difference, so that later changes of the variable stay.
                mean -= own if self._own_scale == 1.0 else own * own.dtype.type(self._own_scale)
        if segment == self._rate_segment:
            bucket, where = self._rate_place
            self.rate.check(means[bucket][where], t)
        if has_times:
            bucket, where = self._times_place
            self.tuner.hear(means[bucket][where], self._setting_before)
            if (width := self.tuner.setting.width) != self.chosen_widths[-1][1]:
                self.chosen_widths.append((t, width))
        if self.tuner is not None:
            self._exchange_seconds += self._clock() - begun_at
        return Result(t, segment, tuple(means))

    # Choosing by times.

    @property
    def is_to_change(self) -> bool:
        """True if the graph has another width than ranks have chosen."""
        return self.tuner is not None and self.tuner.setting.width != self.width

    def chosen_width(self, step: int) -> int:
        """The width K that ranks have chosen by the mean of `step`. Equal on all ranks, also after later choices."""
        return next(width for at, width in reversed(self.chosen_widths) if at <= step)

    def _begin_timing(self) -> None:
        self.chosen_widths = [(-math.inf, self.tuner.setting.width)]  # Each with its first step.
        self._times = Times(0.0, 0.0)  # Of the last step.
        self._setting = self._setting_before = self.tuner.setting
        self._step_begun_at = self._clock()
        self._exchange_seconds = 0.0

    def gauges(self) -> Mapping[str, float]:
        """The settings that ranks have chosen.

        Returns:
          `pipeline_width`: K; others as in `Autotuner.gauges`. Empty if ranks do not choose.
        """
        return {} if self.tuner is None else {"pipeline_width": self.tuner.setting.width, **self.tuner.gauges()}

    def _begin_segment(self, segment: int) -> float:
        """For the first segment, ends the previous step and applies the chosen way. Returns the present time."""
        now = self._clock()
        if segment == 0:
            self._times = Times(now - self._step_begun_at, self._exchange_seconds)
            self._step_begun_at, self._exchange_seconds = now, 0.0
            self._setting_before, self._setting = self._setting, self.tuner.setting
            for reduction in self._reductions:
                if isinstance(reduction, Alternatives):
                    reduction.choose(self.tuner.setting.way)
        return now

    def no_op(self, request: Request) -> Result:
        part = self.parts[request.segment]
        kinds = zip(self.result_sizes(request.segment, part.sizes), part.dtypes, strict=True)
        zeros = tuple(np.zeros(size, dtype.as_numpy_dtype) for size, dtype in kinds)
        return Result(request.step, request.segment, zeros)


_ROWS = TensorSpec("hop_tf_rows", (1,), tf.float64, on_host=True)


def specs_beside(
    world_size: int, *, admits: bool, weighs_rows: bool = False, chooses: bool = False
) -> list[TensorSpec]:
    """The tensors that travel with a step's gradients.

    Args:
      world_size: Number of ranks.
      admits: True if ranks that were started again are to take part.
      weighs_rows: True if ranks count in proportion to their rows. Default False.
      chooses: True if ranks choose by times. Default False.
    """
    rows, newcomers, times = [_ROWS] * weighs_rows, [Admissions.spec(world_size)] * admits, [Autotuner.spec(world_size)]
    return [*rows, *newcomers, *times * chooses, CommonRate.spec(world_size)]


def _find_rows(specs: Sequence[TensorSpec]) -> int | None:
    return next((index for index, spec in enumerate(specs) if spec == _ROWS), None)


def with_rows_first(members: Sequence[list[int]], specs: Sequence[TensorSpec]) -> list[list[int]]:
    """The segments, with the rows in the first one, if rows travel. Their sum divides the means of all segments."""
    rows = _find_rows(specs)
    if rows is None:
        return list(members)
    first, *others = [[index for index in segment if index != rows] for segment in members]
    return [[*first, rows], *filter(None, others)]

"""`GradientExchange`: ranks that apply the same mean gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from hop_tf.codecs import Codec
from hop_tf.collectives import AllReduce
from hop_tf.keras_hook.optimizers import has_schedule, unscaled, weight_decays
from hop_tf.runtime.admissions import Admissions, find_spec
from hop_tf.runtime.averaging_exchange import AveragingExchange
from hop_tf.runtime.exchange import Incoming, Outgoing
from hop_tf.runtime.group import ExchangeContext, Group
from hop_tf.runtime.rates import CommonRate
from hop_tf.tensors.packing import Packing, TensorSpec


class GradientExchange(AveragingExchange):
    """Averages gradients, segment by segment. Changes of carried variables, and the learning rate, travel beside.

    The last tensors of the packing are those of `specs_beside`. Where these admit ranks that were started again, the
    end of a step is `meet_newcomers`.

    Args:
      context: Membership, packing and buffers of the group.
      members: For each segment, the indices of its variables.
      codec: What gradients are encoded with.
      algorithm: See `hop_tf.collectives.get_algorithm`.
      adopts_rate: Whether the first rank's learning rate can take the place of a rank's own. Default: where weights
        have not decayed by that one before. Never where the rate has a schedule.
      delay: How many steps late a mean is applied. Default 0.

    Attributes:
      carried: The changes of the variables that are carried along.
      rate: The learning rate.
      members: For each segment, the indices of its variables.
      parts: For each segment, the packing of its variables.
    """

    def __init__(
        self,
        context: ExchangeContext,
        members: Sequence[Sequence[int]],
        *,
        codec: Codec,
        algorithm: str,
        adopts_rate: bool | None = None,
        delay: int = 0,
    ):
        self.members = members
        self.parts = [context.packing.part(indices) for indices in members]
        self.max_in_flight = len(self.parts)
        self.carried = context.carried
        place = find_spec(context.packing.specs)
        self._votes_segment, votes_place = (None, None) if place is None else self._place_of(place)
        super().__init__(
            context,
            [self._make_mean(context, str(number), part, codec, algorithm) for number, part in enumerate(self.parts)],
            admissions=None if place is None else _make_admissions(context, len(self.parts), lead=delay + 1),
            votes_place=votes_place,
        )
        self._exact = context.packing.exact
        optimizer = context.optimizer()
        if adopts_rate is None:
            adopts_rate = not any(weight_decays(optimizer, context.trained))
        adopts_rate = adopts_rate and not has_schedule(optimizer)
        self.rate = CommonRate(context.membership.rank, context.membership.world_size, adopts=adopts_rate)
        self._rate_segment, self._rate_place = self._place_of(len(context.packing.specs) - 1)

    def _make_mean(self, context: ExchangeContext, name: str, part: Packing, codec: Codec, algorithm: str) -> AllReduce:
        """Makes what averages a segment."""
        return context.make_all_reduce(name, part, codec, algorithm)

    def _place_of(self, index: int) -> tuple[int, tuple[int, slice]]:
        """The segment of a tensor, its bucket there, and where it lies in that."""
        segment = next(number for number, members in enumerate(self.members) if index in members)
        return segment, self.parts[segment].place(list(self.members[segment]).index(index))

    def reset(self, session: int) -> None:
        super().reset(session)
        self.carried.reset()

    def begin_at(self, step: int) -> None:
        super().begin_at(step)
        self.carried.reset()

    def step(self, outgoing: Outgoing) -> Incoming:
        t, segment = outgoing.step, outgoing.segment
        number = t * len(self.parts) + segment
        votes_of = t if segment == self._votes_segment else None
        means = self.mean(number, outgoing.buckets, turn=t, reduction=segment, votes_of=votes_of)
        for mean, own, exact in zip(means, outgoing.buckets, self._exact, strict=True):
            if exact:  # What the variable has become since then stays.
                mean -= own
        if segment == self._rate_segment:
            bucket, where = self._rate_place
            self.rate.check(means[bucket][where], t)
        return Incoming(t, segment, tuple(means))

    def no_op(self, outgoing: Outgoing) -> Incoming:
        return Incoming(outgoing.step, outgoing.segment, tuple(np.zeros_like(values) for values in outgoing.buckets))


def _make_admissions(context: ExchangeContext, num_segments: int, lead: int) -> Admissions:
    return Admissions(context.membership, context.group, context.session, num_segments=num_segments, lead=lead)


def specs_beside(world_size: int, *, admits: bool) -> list[TensorSpec]:
    """What travels beside a step's gradients; `admits`: ranks that were started again are to take part."""
    return [*([Admissions.spec(world_size)] if admits else []), CommonRate.spec(world_size)]


def submit_gradients(group: Group, gradients: Sequence) -> list[tf.Tensor]:
    """Emits the ops that hand out a step's gradients, for a group with a `GradientExchange`.

    Args:
      group: The group.
      gradients: As the optimizer got them.

    Returns:
      What is handed out: gradients without the loss scale, changes of the carried variables, and the learning rate.
    """
    optimizer, exchange = group.optimizer(), group.exchange
    outgoing = [*unscaled(optimizer, gradients), *exchange.carried.take()]
    if exchange.admissions is not None:  # The exchange fills them in.
        outgoing.append(tf.zeros(group.packing.specs[-2].shape, tf.float64))
    outgoing.append(exchange.rate.own(optimizer))
    for segment, members in enumerate(exchange.members):
        group.submit([outgoing[index] for index in members], segment)
    return outgoing


def take_means(
    group: Group, step: tf.Tensor, take: Callable[[int], Sequence[tf.Tensor]]
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Emits the ops that take a step's means, and add the changes of carried variables.

    Args:
      group: The group.
      step: The step.
      take: Takes the tensors of a segment.

    Returns:
      The mean gradients, not scaled, and the learning rate that they are to be applied with.
    """
    exchange = group.exchange
    means: list = [None] * sum(map(len, exchange.members))
    for segment, members in enumerate(exchange.members):
        for index, mean in zip(members, take(segment), strict=True):
            means[index] = mean
    *means, rates = means
    if exchange.admissions is not None:
        *means, distances = means
        exchange.admissions.note_meeting(distances, step)
    exchange.carried.add(means[group.num_trained :])
    return means[: group.num_trained], exchange.rate.adopt(group.optimizer(), rates)

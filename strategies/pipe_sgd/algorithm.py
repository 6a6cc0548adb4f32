"""`PipelinedAlgorithm`: the computation thread of Pipe-SGD. See `hop_tf.strategies.pipe_sgd`."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import tensorflow as tf

from hop_tf.keras_hook.branches import when
from hop_tf.keras_hook.optimizers import gradient_accumulation_steps, iterations_variable, scaled, slots_of
from hop_tf.keras_hook.shares import BatchShares
from hop_tf.runtime.algorithm import Algorithm
from hop_tf.runtime.gradient_algorithm import GradientAlgorithm
from hop_tf.runtime.group import Group
from hop_tf.runtime.look_ahead import LookAhead, make_look_ahead
from hop_tf.strategies.pipe_sgd.exchange import PipeSGDExchange

# A step that no `fit` reaches.
_BEYOND = 1 << 60


class PipelinedAlgorithm(GradientAlgorithm):
    """Applies the mean of step t - (K - 1) in step t. Ranks may change K between two steps, so K may be 1, too.

    Args:
      group: The group, whose exchange is a `PipeSGDExchange`.
      shares: As for `GradientAlgorithm`.
    """

    def __init__(self, group: Group, shares: BatchShares | None = None):
        super().__init__(group, shares)
        self._look_aheads: dict[int, LookAhead] = {}  # By K, because a traced graph keeps its look-ahead.
        # The local look-ahead that a rank computes with; None if it computes with the merged weights.
        self._look_ahead = self._look_ahead_of_width()
        with tf.init_scope(), tf.device("/cpu:0"):
            # The step of the running session with which the pipe begins to fill. A rank that joins has nothing in
            # flight until it has joined.
            start = _BEYOND if group.context.membership.joining else self.exchange.settings.warmup_steps
            self._pipelined_from = tf.Variable(start, dtype=tf.int64, trainable=False, name="hop_tf_pipelined_from")

    @property
    def exchange(self) -> PipeSGDExchange:
        return self.group.exchange

    @property
    def _delay(self) -> int:
        return self.exchange.delay

    def _look_ahead_of_width(self) -> LookAhead | None:
        if not self.exchange.settings.looks_ahead or self._delay == 0:
            return None
        if self._delay not in self._look_aheads:
            self._look_aheads[self._delay] = make_look_ahead(self.group.optimizer(), self.group.trained, self._delay)
        return self._look_aheads[self._delay]

    # The step.

    def before_update(self, values: Sequence[tf.Tensor], gradients: list) -> list:
        outgoing = self._submit(gradients)  # Line 10.

        def take_due(segment: int) -> list[tf.Tensor]:  # Line 3.
            return self.group.collect(outgoing, segment, self._take_due)[0]

        is_synchronous = self._look_ahead is None
        if not is_synchronous and tf.executing_eagerly() and not self._look_ahead.has_begun:
            # It is too late to keep the values from before the group's first update: see `begin_eager_step`. Ranks
            # begin with rank 0's learning rate, so weights have decayed alike.
            self._pipelined_from.assign(1)
            is_synchronous = True
        means, rate = self._take_means(self._due(self.group.read_step()), take_due)
        if is_synchronous:
            return scaled(self.group.optimizer(), means)
        self._look_ahead.begin_once()
        with tf.device("/cpu:0"):
            has_filled = self.group.step >= self._pipelined_from + self._delay
        self._look_ahead.advance(has_filled, means, rate, outgoing[: self.group.num_trained])
        return gradients

    def end_step(self) -> None:
        self._meeting.meet_if_due(self._settle)

    def _settle(self) -> None:
        """Emits the operations that merge all means in flight, and begin with an empty pipe."""
        if self._look_ahead is None:
            return

        def merge(t: tf.Tensor) -> tf.Tensor:
            means, rate = self._take_means(t, functools.partial(self._take, t))
            self._look_ahead.merge(means, rate)
            return t + 1

        now = self.group.read_step()
        with tf.device("/cpu:0"):
            start = tf.maximum(now - self._delay, self._pipelined_from)
        tf.while_loop(lambda t: t < now, merge, [start])
        self._pipelined_from.assign(now)

    def _take(self, t: tf.Tensor, segment: int) -> list[tf.Tensor]:
        """Takes the mean of step t."""
        buckets, _ = self.group.take(t, segment)
        return self.group.unpack(buckets, segment)

    def _take_due(self, t: tf.Tensor, segment: int) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Takes the mean of step t - (K - 1), or of t during warm-up, or zeros while the pipe fills."""
        if self._delay == 0:
            return self.group.take(t, segment)
        start, due = self._pipelined_from, self._due(t)
        with tf.device("/cpu:0"):  # Both branches return buckets on the host. Their consumers copy them to a GPU once.
            fills = tf.logical_and(t >= start, due < start)
            return tf.cond(fills, lambda: self._zeros(segment), lambda: self.group.take(due, segment))

    def _zeros(self, segment: int) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Zeros in the place of a result. Encodings of zeros are zeros, too."""
        sizes, dtypes = self.group.result_sizes(segment), self.group.packing.dtypes
        return [tf.zeros([size], dtype) for size, dtype in zip(sizes, dtypes, strict=True)], tf.constant(0, tf.int64)

    def _due(self, t: tf.Tensor) -> tf.Tensor:
        """The step whose mean is taken in step t, if any."""
        with tf.device("/cpu:0"):
            return tf.where(t < self._pipelined_from, t, t - self._delay)

    # Between steps.

    def begin_session(self) -> None:
        super().begin_session()
        # In the first `fit`, ranks may have made different numbers of steps. But all have completed it, so warm-up is
        # over.
        self._pipelined_from.assign(_BEYOND if self.group.context.membership.joining else 0)

    def begin_at(self, step: int) -> None:
        super().begin_at(step)
        self._begin_pipe(step)

    def begin_eager_step(self) -> None:
        if int(self.group.step) == int(self._pipelined_from):
            self._begin_pipe()

    def begin_training(self) -> None:
        self._begin_pipe()

    def begin_epoch(self) -> None:
        self._begin_pipe()

    def _begin_pipe(self, step: int | None = None) -> None:
        """Begins with an empty pipe: the present variables and slots are the merged ones. Default: the present step."""
        if self._look_ahead is not None:
            self._pipelined_from.assign(int(self.group.step) if step is None else step)
            self._look_ahead.begin()

    def end_epoch(self) -> None:
        if self._look_ahead is not None:
            self.finish()
            self._begin_pipe()  # So that a second call merges nothing.

    def finish(self) -> None:
        count = iterations_variable(self.group.optimizer())
        num_batches = int(count)
        for t in self._in_flight():
            t = tf.constant(t, tf.int64)
            means, rate = self._take_means(t, functools.partial(self._take, t))
            if self._look_ahead is not None:
                self._look_ahead.merge(means, rate)
        if self._look_ahead is not None and gradient_accumulation_steps(self.group.optimizer()) > 1:
            count.assign(num_batches)  # Accumulated batches may wait for the next update.

    def abort(self) -> None:
        if self._look_ahead is not None and self._in_flight():
            self._look_ahead.restore()

    def _in_flight(self) -> range:
        """The steps whose means were not taken yet."""
        num_steps = int(self.group.step)
        return range(max(num_steps - self._delay, min(int(self._pipelined_from), num_steps)), num_steps)

    # Programs that do more than a plain step.

    def check_further(self, others: Sequence[Algorithm]) -> None:
        optimizer = self.group.optimizer()
        again = [other for other in others if other.group.optimizer() is optimizer]
        if not again or all(each.makes_way() for each in (self, *again)):
            return
        raise ValueError(
            "`compensation` must be 'none' if a step applies an optimizer several times, to parts of the variables: "
            "the optimizer has one count of steps for all of them. Apply it once, or use one optimizer for each part. "
            f"Received: compensation='replay', and {type(optimizer).__name__}, applied again."
        )

    def watched(self) -> Sequence[tf.Variable]:
        return [*self.group.trained, *slots_of(self.group.optimizer(), self.group.trained).values()]

    def makes_way(self) -> bool:
        """True if K is 1. If ranks choose K, it stays 1 from now on."""
        if self._look_ahead is not None:
            return False
        if self.exchange.tuner is not None:
            self.exchange.tuner.is_narrow = True
        return True

    def take_assigned(self, are_assigned: tf.Tensor, weights: Sequence[tf.Tensor]) -> tf.Tensor:
        with tf.device("/cpu:0"):
            is_merged = tf.equal(self.group.step, self._pipelined_from)  # Nothing is in flight.
        when(is_merged, lambda: self._look_ahead.take(weights))
        return is_merged

    def graph_key(self) -> int:
        return self.exchange.width

    def change_graph(self) -> bool:
        exchange = self.exchange
        if exchange.tuner is None or (len(exchange.chosen_widths) == 1 and not exchange.is_to_change):
            return False
        # Reads an earlier step's choice, because means of later steps may have arrived on some ranks only. All ranks
        # must change K in the same step, because updates with another K may differ in the last bit.
        step = int(self.group.step)
        width = exchange.chosen_width(step - exchange.width)
        if width == exchange.width or (width > 1 and exchange.tuner.is_narrow):
            return False
        self.finish()
        exchange.change_width(width)
        self._look_ahead = self._look_ahead_of_width()
        self._begin_pipe()
        return True

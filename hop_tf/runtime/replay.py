"""`Replay`: a rank computes where its own gradients would have led, until the mean gradients arrive.

    merged weights and slots are moved by the optimizer with mean gradients only, D steps late, alike on all ranks;
    a rank computes at what that optimizer makes, from there on, of its own gradients that are still under way

In step t, with g[s] a rank's own gradient of step s:

    1. merged: update(mean of g[t - D])
    2. weights, slots = those that are merged
    3. update(g[t - D + 1]) ... update(g[t])

These are D + 1 updates of the optimizer, for one copy more of weights and slots, and D - 1 gradients more. What is
merged is equal on all ranks, to the bit, at every step, whatever the optimizer.

With D = 1 and most of Keras's optimizers a twin has the merged state, and makes the first update: with many small
variables it costs next to nothing. Elsewhere the optimizer makes all of them, with its own variables.
"""

from __future__ import annotations

import abc
import weakref
from collections.abc import Sequence

import tensorflow as tf

from hop_tf.keras_hook.optimizers import gradient_accumulation_steps, iterations_variable, slots_of
from hop_tf.keras_hook.twins import Twin, has_twin
from hop_tf.keras_hook.updates import prepare_update, update
from hop_tf.runtime.averaging import Latest, assign_all, zeros_like


class Replay(abc.ABC):
    """The merged state of an optimizer's variables, and the own gradients that are not merged.

    Args:
      optimizer: The optimizer, built.
      variables: What it updates.

    Attributes:
      has_begun: True if there is a merged state.
    """

    def __init__(self, optimizer: object, variables: Sequence[tf.Variable]):
        self._optimizer = weakref.ref(optimizer)
        self._variables = variables
        self._slots = list(slots_of(optimizer, variables).values())
        self.has_begun = False

    def begin_once(self) -> None:
        """Begins with what the state is outside of the graph that is traced, unless it has begun.

        A tf.function that makes an optimizer's slots is traced again when they have values.
        """
        state = [*self._variables, *self._slots, iterations_variable(self._optimizer())]
        with tf.init_scope():
            if not self.has_begun and all(map(tf.compat.v1.is_variable_initialized, state)):
                self.begin()

    def begin(self) -> None:
        """Takes the present state for the merged one: nothing is under way. Outside of graphs."""
        self.has_begun = True
        self.take(self._variables)

    @abc.abstractmethod
    def take(self, weights: Sequence[tf.Tensor | tf.Variable]) -> None:
        """Emits the ops that take these weights, and the present slots, for the merged state."""

    @abc.abstractmethod
    def restore(self) -> None:
        """Emits the ops that forget own gradients: the state is the merged one."""

    @abc.abstractmethod
    def merge(self, mean: Sequence[tf.Tensor], rate: tf.Tensor) -> None:
        """Emits lines 1 and 2.

        Args:
          mean: The mean gradients, not scaled.
          rate: The learning rate of the step that they are from.
        """

    @abc.abstractmethod
    def advance(self, is_due: tf.Tensor, mean: Sequence[tf.Tensor], rate: tf.Tensor, own: Sequence[tf.Tensor]) -> None:
        """Emits lines 1 to 3, up to where the optimizer itself makes the last update; and what notes g[t].

        Args:
          is_due: True if there is a mean. Else only g[t] is noted.
          mean: As for `merge`.
          rate: As for `merge`.
          own: g[t], not scaled.
        """


def make_replay(optimizer: object, variables: Sequence[tf.Variable], delay: int) -> Replay:
    """The replay for an optimizer.

    Args:
      optimizer: The optimizer, built.
      variables: What it updates.
      delay: D, at least 1.
    """
    if delay == 1 and has_twin(optimizer, variables):
        return _TwinReplay(optimizer, variables)
    return _OwnReplay(optimizer, variables, delay)


class _TwinReplay(Replay):
    """A replay with D = 1, whose merged state is that of a twin."""

    def __init__(self, optimizer: object, variables: Sequence[tf.Variable]):
        super().__init__(optimizer, variables)
        self._twin = Twin(optimizer, variables)

    def take(self, weights: Sequence[tf.Tensor | tf.Variable]) -> None:
        self._twin.take(weights)

    def restore(self) -> None:
        self._twin.give()

    def merge(self, mean: Sequence[tf.Tensor], rate: tf.Tensor) -> None:
        self._twin.update(self._twin.join(mean), rate)
        self._twin.give()

    def advance(self, is_due: tf.Tensor, mean: Sequence[tf.Tensor], rate: tf.Tensor, own: Sequence[tf.Tensor]) -> None:
        del own  # The optimizer's own update has it.
        joined = self._twin.join(mean)

        def advance() -> None:
            self._twin.update(joined, rate)
            self._twin.give(decayed=True)  # As the optimizer has done that when it comes to the hooks.

        tf.cond(is_due, advance, lambda: None)


class _OwnReplay(Replay):
    """A replay whose updates the optimizer makes with its own variables.

    Variables share the memory of what is assigned to them, until one of them is changed: restoring and keeping a state
    copies nothing by itself.
    """

    def __init__(self, optimizer: object, variables: Sequence[tf.Variable], delay: int):
        super().__init__(optimizer, variables)
        self._state = [*variables, *self._slots, iterations_variable(optimizer)]
        self._merged = [zeros_like(variable) for variable in self._state]
        self._own = Latest(variables, delay - 1)

    def take(self, weights: Sequence[tf.Tensor | tf.Variable]) -> None:
        assign_all(self._merged, [*weights, *self._state[len(weights) :]])

    def restore(self) -> None:
        assign_all(self._state, self._merged)

    def merge(self, mean: Sequence[tf.Tensor], rate: tf.Tensor) -> None:
        self.restore()
        update(self._optimizer(), mean, self._variables, rate)
        self.take(self._variables)

    def advance(self, is_due: tf.Tensor, mean: Sequence[tf.Tensor], rate: tf.Tensor, own: Sequence[tf.Tensor]) -> None:
        def advance() -> None:
            self.merge(mean, rate)
            optimizer = self._optimizer()
            for gradients in self._own.all():
                update(optimizer, gradients, self._variables)
            # Of the batches whose gradients it accumulates, the optimizer is in the last one. Merged counts are of
            # updates.
            count, every = iterations_variable(optimizer), gradient_accumulation_steps(optimizer)
            count.assign(count - count % every + every - 1)
            prepare_update(optimizer, own, self._variables)

        tf.cond(is_due, advance, lambda: None)
        self._own.push(own)

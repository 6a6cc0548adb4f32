"""`LookAhead`: a local look-ahead. A rank applies its own gradients until the mean gradients arrive.

    The optimizer moves the merged weights and slots with mean gradients only, D steps late, equally on all ranks.
    A rank computes its gradients at weights that also include updates with its own gradients in flight.
    In other words, the rank replays its own recent gradients: `compensation="replay"`.

In step t, with g[s] a rank's own gradient of step s:

    1. merged: update(mean of g[t - D])
    2. weights, slots = the merged ones
    3. update(g[t - D + 1]) ... update(g[t])

These are D + 1 updates of the optimizer. They need one more copy of weights and slots, and D - 1 more gradients. The
merged state is equal on all ranks, to the bit, at every step, with any optimizer.

With D = 1 and most of Keras's optimizers, a twin holds the merged state and makes the first update. With many small
variables, this costs next to nothing. Otherwise the optimizer makes all updates, with its own variables.
"""

from __future__ import annotations

import abc
import weakref
from collections.abc import Sequence

import tensorflow as tf

from hop_tf.keras_hook.branches import when
from hop_tf.keras_hook.optimizers import gradient_accumulation_steps, iterations_variable, slots_of
from hop_tf.keras_hook.twins import Twin, has_twin
from hop_tf.keras_hook.updates import prepare_update, update
from hop_tf.runtime.deltas import ValueHistory, assign_all, zeros_like


class LookAhead(abc.ABC):
    """The merged state of an optimizer's variables, and this rank's gradients that are not merged yet.

    Args:
      optimizer: The optimizer, built.
      variables: The variables that it updates.

    Attributes:
      has_begun: True if there is a merged state.
    """

    def __init__(self, optimizer: object, variables: Sequence[tf.Variable]):
        self._optimizer = weakref.ref(optimizer)
        self._variables = variables
        self._slots = list(slots_of(optimizer, variables).values())
        self.has_begun = False

    def begin_once(self) -> None:
        """Begins with the present state, outside of the graph that is traced, unless the look-ahead has begun.

        Does nothing if a variable has no value yet: a tf.function that creates slots is traced again when they have
        values.
        """
        state = [*self._variables, *self._slots, iterations_variable(self._optimizer())]
        with tf.init_scope():
            if not self.has_begun and all(map(tf.compat.v1.is_variable_initialized, state)):
                self.begin()

    def begin(self) -> None:
        """Takes the present state as the merged state: no gradient is in flight. Outside of graphs."""
        self.has_begun = True
        self.take(self._variables)

    @abc.abstractmethod
    def take(self, weights: Sequence[tf.Tensor | tf.Variable]) -> None:
        """Emits the ops that take these weights, and the present slots, as the merged state."""

    @abc.abstractmethod
    def restore(self) -> None:
        """Emits the ops that forget this rank's own gradients: the state becomes the merged state."""

    @abc.abstractmethod
    def merge(self, mean: Sequence[tf.Tensor], rate: tf.Tensor) -> None:
        """Emits the ops of lines 1 and 2: see the module.

        Args:
          mean: The mean gradients, not scaled.
          rate: The learning rate of the step of these gradients.
        """

    @abc.abstractmethod
    def advance(self, is_due: tf.Tensor, mean: Sequence[tf.Tensor], rate: tf.Tensor, own: Sequence[tf.Tensor]) -> None:
        """Emits the ops of lines 1 to 3, except the last update, which the optimizer itself makes. Keeps g[t].

        Args:
          is_due: True if there is a mean. Otherwise only g[t] is kept.
          mean: As for `merge`.
          rate: As for `merge`.
          own: g[t], not scaled.
        """


def make_look_ahead(optimizer: object, variables: Sequence[tf.Variable], delay: int) -> LookAhead:
    """Returns the look-ahead for an optimizer.

    Args:
      optimizer: The optimizer, built.
      variables: The variables that it updates.
      delay: D, at least 1.
    """
    if delay == 1 and has_twin(optimizer, variables):
        return _TwinLookAhead(optimizer, variables)
    return _OwnLookAhead(optimizer, variables, delay)


class _TwinLookAhead(LookAhead):
    """A look-ahead with D = 1, whose merged state is that of a twin."""

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
            self._twin.give(decayed=True)  # The optimizer has applied the decay when it calls the hooks.

        when(is_due, advance, usually=True)


class _OwnLookAhead(LookAhead):
    """A look-ahead whose updates the optimizer makes with its own variables.

    Variables share memory with an assigned value until one of them changes. So restoring and keeping a state copies
    nothing by itself.
    """

    def __init__(self, optimizer: object, variables: Sequence[tf.Variable], delay: int):
        super().__init__(optimizer, variables)
        self._state = [*variables, *self._slots, iterations_variable(optimizer)]
        self._merged = [zeros_like(variable) for variable in self._state]
        self._own = ValueHistory(variables, delay - 1)

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
            # The optimizer is at the last of the batches whose gradients it accumulates. Merged counts are those of
            # whole updates.
            count, every = iterations_variable(optimizer), gradient_accumulation_steps(optimizer)
            count.assign(count - count % every + every - 1)
            prepare_update(optimizer, own, self._variables)

        when(is_due, advance, usually=True)
        self._own.push(own)

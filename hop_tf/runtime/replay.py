"""`Replay`: a rank computes where its own gradients would have led, until the mean gradients arrive.

    merged weights and slots are moved by the optimizer with mean gradients only, D steps late, alike on all ranks;
    a rank computes at what that optimizer makes, from there on, of its own gradients that are still under way

In step t, with g[s] a rank's own gradient of step s:

    1. weights, slots = those that are merged
    2. update(mean of g[t - D]); that is merged now
    3. update(g[t - D + 1]) ... update(g[t])

These are D + 1 updates of the optimizer, for one copy more of weights and slots, and D - 1 gradients more. What is
merged is equal on all ranks, to the bit, at every step, whatever the optimizer.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import tensorflow as tf

from hop_tf.keras_hook.optimizers import gradient_accumulation_steps, iterations_variable, slots_of
from hop_tf.keras_hook.updates import prepare_update, update
from hop_tf.runtime.averaging import Latest, assign_all, zeros_like


class Replay:
    """The merged state of an optimizer's variables, and the own gradients that are not merged.

    Variables share the memory of what is assigned to them, until one of them is changed: restoring and keeping a state
    copies nothing by itself.

    Args:
      optimizer: The optimizer, built.
      variables: What it updates.
      delay: D, at least 1.

    Attributes:
      has_begun: Whether there is a merged state.
    """

    def __init__(self, optimizer: object, variables: Sequence[tf.Variable], delay: int):
        self._optimizer = weakref.ref(optimizer)
        self._variables = variables
        slots = slots_of(optimizer, variables).values()
        self._state = [*variables, *slots, iterations_variable(optimizer)]
        self.has_begun = False
        self._merged = [zeros_like(variable) for variable in self._state]
        self._own = Latest(variables, delay - 1)

    def begin_once(self) -> None:
        """Begins with what the state is outside of the graph that is traced, unless it has begun.

        A tf.function that makes an optimizer's slots is traced again when they have values.
        """
        with tf.init_scope():
            if not self.has_begun and all(map(tf.compat.v1.is_variable_initialized, self._state)):
                self.begin()

    def begin(self) -> None:
        """Takes the present state for the merged one: nothing is under way. Outside of graphs."""
        self.has_begun = True
        self._keep_state()

    def _keep_state(self) -> None:
        assign_all(self._merged, self._state)

    def take(self, weights: Sequence[tf.Tensor]) -> None:
        """Emits the ops that take these weights, and the present slots, for the merged state."""
        assign_all(self._merged, [*weights, *self._state[len(weights) :]])

    def restore(self) -> None:
        """Emits the ops that forget own gradients: the state is the merged one."""
        assign_all(self._state, self._merged)

    def merge(self, mean: Sequence[tf.Tensor], rate: tf.Tensor) -> None:
        """Emits lines 1 and 2.

        Args:
          mean: The mean gradients, not scaled.
          rate: The learning rate of the step that they are from.
        """
        self.restore()
        update(self._optimizer(), mean, self._variables, rate)
        self._keep_state()

    def stand_in(self, own: Sequence[tf.Tensor]) -> None:
        """Emits line 3, up to where the optimizer itself makes the last of these updates.

        Args:
          own: g[t], not scaled.
        """
        optimizer = self._optimizer()
        for gradients in self._own.newest():
            update(optimizer, gradients, self._variables)
        # Of the batches whose gradients it accumulates, the optimizer is in the last one. Merged counts are of updates.
        count, every = iterations_variable(optimizer), gradient_accumulation_steps(optimizer)
        count.assign(count - count % every + every - 1)
        prepare_update(optimizer, own, self._variables)

    def keep(self, own: Sequence[tf.Tensor]) -> None:
        """Emits the ops that note g[t] for the next steps."""
        self._own.push(own)

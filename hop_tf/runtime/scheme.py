"""`Scheme`: the part that distinguishes one strategy from another, called while models are trained."""

from __future__ import annotations

import abc
from collections.abc import Hashable, Sequence
from typing import Any

import keras
import tensorflow as tf

from hop_tf.runtime.exchange import Exchange
from hop_tf.runtime.group import ExchangeContext, Group
from hop_tf.tensors.packing import TensorSpec


class Scheme(abc.ABC):
    """A scheme's part of the training graph, and its work between steps.

    Methods that emit are called while a training step is traced (or, with `run_eagerly`, in each step). The others are
    called outside of graphs. All but the first three have defaults.

    Attributes:
      mixes_weights: True if the scheme itself changes weights, for instance by averaging those of all ranks. False if
        ranks average gradients only.
      keeps_assignments: True if values that a step assigns to weights after the optimizer's update stay. False if the
        scheme makes updates again, or makes them elsewhere.
      takes_assignments: True if weights that a program assigns before the update, or between two steps, count. False if
        a second copy of the weights overwrites them.
      takes_between_epochs: True if weights that callbacks assign between two epochs of `fit` count in any case.
      in_lock_step: True if each rank waits for all others anyway, so that it may also wait in `strategy.reduce`.
      agrees_on_roster: True if ranks agree, through the exchanged means, on the ranks that share a batch. This matters
        when others take over the rows of a lost rank (see `Roster`). Otherwise each rank uses its own knowledge, and
        changes its slice when it hears of a loss, or of a return.
      settles_loops: True if `synchronize` merges updates in flight in a custom loop, as the end of `fit` does.
    """

    mixes_weights = True
    keeps_assignments = True
    takes_assignments = True
    takes_between_epochs = True
    in_lock_step = False
    agrees_on_roster = False
    settles_loops = False

    @abc.abstractmethod
    def make_exchange(self, context: ExchangeContext) -> Exchange:
        """Makes the scheme's `Exchange` for a new group."""

    @abc.abstractmethod
    def before_update(self, group: Group, values: Sequence[tf.Tensor], gradients: list) -> tuple[list, Any]:
        """Emits the scheme's ops before the optimizer updates the variables.

        Args:
          group: The exchange group of the optimizer.
          values: The values of `group.variables` when the step began.
          gradients: The local gradients, as the optimizer got them.

        Returns:
          The gradients for the optimizer to apply, and a state for `after_update`.
        """

    @abc.abstractmethod
    def after_update(self, group: Group, state: Any) -> tf.Tensor:
        """Emits the scheme's ops after the update.

        Args:
          group: The exchange group of the optimizer.
          state: The state that `before_update` has returned.

        Returns:
          int64 scalar: the number of training steps to skip (see `Incoming.num_skipped`).
        """

    def end_step(self, group: Group) -> None:
        """Emits the scheme's ops when all of a step is done, including what follows the update."""

    def specs_beside(self) -> Sequence[TensorSpec]:
        """The tensors that travel with a group's variables."""
        return ()

    def common_optimizers(self, group: Group) -> Sequence[tuple[keras.optimizers.Optimizer, Sequence[tf.Variable]]]:
        """Optimizers that update the group equally on all ranks, each with its slots, which `synchronize` averages."""
        return ()

    def watched(self, group: Group) -> Sequence[tf.Variable]:
        """The variables of which the scheme keeps a second copy. Called only if `takes_assignments` is False."""
        return group.trained

    def makes_way(self, group: Group) -> bool:
        """True if assigned weights count from now on. A scheme that may keep a second copy of them then keeps none.

        Called when the program assigns weights of a group: before the update, after it, or between two steps of `fit`.
        Also called for each custom loop.
        """
        return False

    def take_assigned(self, group: Group, weights: Sequence[tf.Tensor]) -> tf.Tensor:
        """Emits the ops that take weights that a custom loop has assigned between two steps.

        Args:
          group: The exchange group.
          weights: The trained weights at the start of the step.

        Returns:
          bool scalar: False if that is not possible.
        """
        return tf.constant(False)

    def graph_of(self, group: Group) -> Hashable:
        """A key that tells the scheme's graphs of a group apart: see `change_graph`."""
        return None

    def change_graph(self, group: Group) -> bool:
        """Changes the graph of the training step, eagerly, before a step of `fit`. Returns True if it has changed."""
        return False

    def check_new_group(self) -> None:
        """Raises ValueError if a group cannot be created now. Called before any message to other ranks."""

    def begin_group(self, group: Group) -> None:
        """Prepares a new group, eagerly, before its first step."""

    def check_further_group(self, group: Group, others: Sequence[Group]) -> None:
        """Raises ValueError if a group cannot be updated in the same step after these others (or itself)."""

    def begin_eager_step(self, group: Group) -> None:
        """Prepares an existing group for an eager step, in which no graph defines the order of operations."""

    def begin_training(self, groups: Sequence[Group]) -> None:
        """Prepares the existing groups, eagerly, before the first step of a `fit`."""

    def begin_epoch(self, group: Group) -> None:
        """Prepares an existing group, eagerly, before the first step of an epoch of `fit`."""

    def end_epoch(self, group: Group) -> None:
        """Prepares a group, eagerly, for validation and callbacks at the end of an epoch of `fit`."""

    def finish_training(self, group: Group) -> None:
        """Completes the work on a group, eagerly, when `fit` has made its last step."""

    def break_off(self, group: Group) -> None:
        """Cleans up a group, eagerly, when `fit` has failed. Must not wait for other ranks."""

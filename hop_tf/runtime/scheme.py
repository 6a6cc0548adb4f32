"""`Scheme`: what tells one strategy from another, and is asked while models are trained."""

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
    """A scheme's half of the training graph, and what it does between steps.

    Methods that emit are called while a training step is traced (or, with `run_eagerly`, in each step). The others are
    called outside of graphs. All but the first three may be left as they are.

    Attributes:
      mixes_weights: Whether weights become others than a rank's optimizer has made, as means of all ranks' weights do.
        Where ranks average gradients only, False.
      keeps_assignments: Whether what a step assigns to weights after the optimizer's update stays. Not so where updates
        are made again, or elsewhere.
      takes_assignments: True if weights that a program assigns before the update, or between two steps, count. False if
        a second copy of the weights takes their place.
      takes_between_epochs: True if weights that callbacks assign between two epochs of `fit` count all the same.
      in_lock_step: Whether each rank waits for all others anyhow, so that they may also do so for `strategy.reduce`.
      agrees_on_roster: Whether ranks find by the means that they exchange which ranks share a batch, where the others
        share the rows of one that is lost (see `Roster`). Otherwise each rank goes by what it knows of the others,
        and changes when it hears of a loss, or of a return.
      settles_loops: Whether `synchronize` merges what is under way in a custom loop, as the end of `fit` does.
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
        """Emits what the scheme does before the optimizer updates the variables.

        Args:
          group: The exchange group of the optimizer.
          values: What each of `group.variables` was when the step began.
          gradients: The local gradients, as the optimizer got them.

        Returns:
          The gradients that the optimizer is to apply, and what `after_update` is to know.
        """

    @abc.abstractmethod
    def after_update(self, group: Group, state: Any) -> tf.Tensor:
        """Emits what the scheme does after the update.

        Args:
          group: The exchange group of the optimizer.
          state: What `before_update` has returned.

        Returns:
          int64 scalar: how many training steps are to be passed over (see `Incoming.num_skipped`).
        """

    def end_step(self, group: Group) -> None:
        """Emits what the scheme does when all of a step is done, also what follows the update."""

    def specs_beside(self) -> Sequence[TensorSpec]:
        """What travels beside a group's variables."""
        return ()

    def common_optimizers(self, group: Group) -> Sequence[tuple[keras.optimizers.Optimizer, Sequence[tf.Variable]]]:
        """Optimizers that make the same updates of the group on all ranks, with what they remember of these."""
        return ()

    def watched(self, group: Group) -> Sequence[tf.Variable]:
        """The variables of which the scheme keeps a second copy. Asked only without `takes_assignments`."""
        return group.trained

    def makes_way(self, group: Group) -> bool:
        """True if from now on weights that the program assigns count, though the scheme may keep a second copy of them.

        Called when the program is seen to assign weights of a group, before the update, after it, or between two steps
        of `fit`; and for each custom loop.
        """
        return False

    def take_assigned(self, group: Group, weights: Sequence[tf.Tensor]) -> tf.Tensor:
        """Emits what takes weights that a custom loop has assigned between two steps.

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
        """Does, eagerly, before a step of `fit`, what makes the training step another one; True if it has."""
        return False

    def check_new_group(self) -> None:
        """Raises ValueError where a group cannot be made now: before others are asked for anything."""

    def begin_group(self, group: Group) -> None:
        """Does, eagerly, what a new group needs before its first step."""

    def check_further_group(self, group: Group, others: Sequence[Group]) -> None:
        """Raises ValueError where a group cannot be updated in the same step, after these others (or itself)."""

    def begin_eager_step(self, group: Group) -> None:
        """Does what a group that is there needs before an eager step, of which no graph tells what comes first."""

    def begin_training(self, groups: Sequence[Group]) -> None:
        """Does, eagerly, what the groups that are there need before the first step of a `fit`."""

    def begin_epoch(self, group: Group) -> None:
        """Does, eagerly, what a group that is there needs before the first step of an epoch of `fit`."""

    def end_epoch(self, group: Group) -> None:
        """Does, eagerly, what validation and callbacks at the end of an epoch of `fit` count on."""

    def finish_training(self, group: Group) -> None:
        """Does, eagerly, what is left when `fit` has made its last step."""

    def break_off(self, group: Group) -> None:
        """Does, eagerly, what is left when `fit` has failed; nothing of other ranks may be waited for."""

"""`Algorithm`: a strategy's half of the training graph. `Scheme`: makes this half and the other, the exchange."""

from __future__ import annotations

import abc
from collections.abc import Hashable, Sequence

import keras
import tensorflow as tf

from hop_tf.runtime.exchange import Exchange
from hop_tf.runtime.group import ExchangeContext, Group
from hop_tf.runtime.joiner import GraphState
from hop_tf.tensors.packing import TensorSpec


class Algorithm(GraphState, abc.ABC):
    """A strategy's half of the training graph for the variables of one optimizer, and its work between steps.

    The other half is an `Exchange`, on a thread of its own. In a step, Keras computes gradients. Then follow

        before_update  ->  the optimizer updates the variables  ->  after_update  ->  end_step

    Methods that emit operations are called while a training step is traced (or, with `run_eagerly`, in each step). The
    others are called outside of graphs. All but the first one have defaults.

    Args:
      group: The variables, and their way to the exchange.

    Attributes:
      group: As given.
    """

    def __init__(self, group: Group):
        self.group = group

    @abc.abstractmethod
    def before_update(self, values: Sequence[tf.Tensor], gradients: list) -> list:
        """Emits the operations before the optimizer updates the variables.

        Args:
          values: The values of `group.variables` when the step began.
          gradients: The local gradients, as the optimizer got them.

        Returns:
          The gradients for the optimizer to apply.
        """

    def after_update(self) -> tf.Tensor:
        """Emits the operations after the update.

        Returns:
          int64 scalar: the number of training steps to skip (see `Result.num_skipped`).
        """
        return tf.constant(0, tf.int64)

    def end_step(self) -> None:
        """Emits the operations at the end of a step, after the update and all that follows it."""

    # Between steps.

    def begin(self) -> None:
        """Prepares a new group, eagerly, before its first step."""

    def begin_session(self) -> None:
        """Prepares an existing group, eagerly, for step 0 of a session, or after the others left this rank behind."""

    def begin_training(self) -> None:
        """Prepares an existing group, eagerly, before the first step of a `fit`."""

    def begin_epoch(self) -> None:
        """Prepares an existing group, eagerly, before the first step of an epoch of `fit`."""

    def begin_eager_step(self) -> None:
        """Prepares an existing group for an eager step, in which no graph defines the order of operations."""

    def end_epoch(self) -> None:
        """Prepares the variables, eagerly, for validation and callbacks at the end of an epoch of `fit`."""

    def finish(self) -> None:
        """Completes the work, eagerly, when `fit` has made its last step."""

    def abort(self) -> None:
        """Cleans up, eagerly, when `fit` has failed. Must not wait for other ranks."""

    # Programs that do more than a plain step.

    def check_further(self, others: Sequence[Algorithm]) -> None:
        """Raises ValueError if the group cannot be updated in the same step after these other groups (or itself)."""

    def common_optimizers(self) -> Sequence[tuple[keras.optimizers.Optimizer, Sequence[tf.Variable]]]:
        """Optimizers, each with those slots that are equal on all ranks after `fit`. `synchronize` averages these."""
        return ()

    def watched(self) -> Sequence[tf.Variable]:
        """The variables whose assignments by the program the algorithm has to detect.

        Used if `Scheme.takes_assignments` is False, or `hears_of_assignments` is True.
        """
        return self.group.trained

    def makes_way(self) -> bool:
        """True if assigned weights count from now on, because the algorithm then keeps no second copy of them.

        Called when the program assigns weights of the group: before the update, after it, or between two steps of
        `fit`. Also called for each custom loop.
        """
        return False

    def note_assigned(self, variables: Sequence[tf.Variable]) -> None:
        """Called if the program has assigned variables between two steps of `fit`: see `Scheme.hears_of_assignments`.

        Args:
          variables: The variables, of this and of other groups.
        """

    def take_assigned(self, are_assigned: tf.Tensor, weights: Sequence[tf.Tensor]) -> tf.Tensor:
        """Emits the operations that take over values that a custom loop has assigned between two steps.

        Args:
          are_assigned: For each variable of `watched`, true if it was assigned.
          weights: The trained weights at the start of the step; empty if `Scheme.takes_assignments` is True.

        Returns:
          bool scalar: False if the algorithm cannot take them over.
        """
        return tf.constant(False)

    def graph_key(self) -> Hashable:
        """A key that tells the algorithm's graphs apart: see `change_graph`."""
        return None

    def change_graph(self) -> bool:
        """Changes the graph of the training step, eagerly, before a step of `fit`. Returns True if it has changed."""
        return False


class Scheme(abc.ABC):
    """Makes the two halves of each group of variables: an `Exchange`, and an `Algorithm` in the training graph.

    Attributes:
      mixes_weights: True if the scheme itself changes weights, for instance by averaging those of all ranks. False if
        ranks average gradients only.
      keeps_assignments: True if values that a step assigns to weights after the optimizer's update stay. False if the
        scheme repeats updates later, or makes them elsewhere, such as on a server.
      takes_assignments: True if weights that a program assigns before the update, or between two steps, count. False if
        a second copy of the weights overwrites them.
      hears_of_assignments: True if algorithms are told about assignments between two steps (by
        `Algorithm.note_assigned`, and in custom loops by `take_assigned`), even though such assignments count.
      takes_between_epochs: True if weights that callbacks assign between two epochs of `fit` count, even if
        `takes_assignments` is False.
      in_lock_step: True if each rank waits for all others anyway, so that it may also wait in `strategy.reduce`.
      agrees_on_roster: True if ranks agree, through the exchanged means, on the ranks that share a batch. This matters
        when others take over the rows of a lost rank (see `Roster`). Otherwise each rank uses its own knowledge, and
        changes its slice when it hears of a loss, or of a return.
      settles_loops: True if `synchronize` merges updates in flight in a custom loop, as the end of `fit` does.
    """

    mixes_weights = True
    keeps_assignments = True
    takes_assignments = True
    hears_of_assignments = False
    takes_between_epochs = True
    in_lock_step = False
    agrees_on_roster = False
    settles_loops = False

    @abc.abstractmethod
    def make_exchange(self, context: ExchangeContext) -> Exchange:
        """Makes the `Exchange` of a new group."""

    @abc.abstractmethod
    def make_algorithm(self, group: Group) -> Algorithm:
        """Makes the `Algorithm` of a new group, whose exchange exists."""

    def specs_beside(self, trained: Sequence[tf.Variable]) -> Sequence[TensorSpec]:
        """The tensors that travel with a group's variables.

        Args:
          trained: The variables that the optimizer updates.
        """
        del trained
        return ()

    def check_new_group(self) -> None:
        """Raises ValueError if a group cannot be created now. Called before any message to other ranks."""

    def begin_training(self, algorithms: Sequence[Algorithm]) -> None:
        """Prepares the existing groups, eagerly, before the first step of a `fit`."""
        for algorithm in algorithms:
            algorithm.begin_training()

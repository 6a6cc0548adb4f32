"""`Scheme`: the part that distinguishes one strategy from another."""

from __future__ import annotations

import abc
from collections.abc import Sequence

import tensorflow as tf

from hop_tf.runtime.algorithm import Algorithm
from hop_tf.runtime.exchange import Exchange
from hop_tf.runtime.group import ExchangeContext, Group
from hop_tf.tensors.packing import TensorSpec


class Scheme(abc.ABC):
    """Makes the two halves of each group of variables: an `Exchange`, and an `Algorithm` in the training graph.

    Attributes:
      mixes_weights: True if the scheme itself changes weights, for instance by averaging those of all ranks. False if
        ranks average gradients only.
      keeps_assignments: True if values that a step assigns to weights after the optimizer's update stay. False if the
        scheme makes updates again, or makes them elsewhere.
      takes_assignments: True if weights that a program assigns before the update, or between two steps, count. False if
        a second copy of the weights overwrites them.
      hears_of_assignments: True if algorithms hear of assignments between two steps although these count anyway
        (`Algorithm.note_assigned`, and in custom loops `take_assigned`).
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
        """Makes the `Algorithm` of a new group, whose exchange is made."""

    def specs_beside(self, trained: Sequence[tf.Variable]) -> Sequence[TensorSpec]:
        """The tensors that travel with a group's variables.

        Args:
          trained: Those that the optimizer updates.
        """
        del trained
        return ()

    def check_new_group(self) -> None:
        """Raises ValueError if a group cannot be created now. Called before any message to other ranks."""

    def begin_training(self, algorithms: Sequence[Algorithm]) -> None:
        """Prepares the existing groups, eagerly, before the first step of a `fit`."""
        for algorithm in algorithms:
            algorithm.begin_training()

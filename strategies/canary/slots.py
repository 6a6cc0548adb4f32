"""What an optimizer under Canary remembers of a step: nothing where the step was dropped.

A contribution is the optimizer's step, and a step of momentum holds the gradients of those before. If the velocity kept
what was dropped, the gradients of a rank that is overtime would be in all its later steps after all: with momentum m,
m of each of them, late. So velocities, and whatever else the optimizer keeps of a variable, become what they were
before the step, as in iterations that are passed over: what a rank contributes is what its optimizer makes of the
gradients that were not dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from hop_tf.keras_hook.optimizers import slots_of


class SlotsBefore:
    """The slots of some variables as they are when this is made, before a step. Emits the ops that read them.

    What an optimizer keeps of all variables together, such as its count of steps, is not among them.

    Args:
      optimizer: The optimizer, built.
      variables: The variables.
    """

    def __init__(self, optimizer: Any, variables: Sequence[tf.Variable]):
        slots = [(index, slot) for (_, index), slot in slots_of(optimizer, variables).items() if index is not None]
        self._slots = [(index, slot, slot.value()) for index, slot in slots]

    def restore(self, colayers: Mapping[int, int], num_left: tf.Tensor) -> None:
        """Emits the ops that undo the step of those colayers that have not left.

        Args:
          colayers: The colayer of each variable.
          num_left: int64 scalar: so many colayers have left, the first ones.
        """
        for colayer in sorted({colayers[index] for index, _, _ in self._slots}):

            def undo(colayer: int = colayer) -> None:
                for index, slot, value in self._slots:
                    if colayers[index] == colayer:
                        slot.assign(value)

            with tf.device("/cpu:0"):
                is_dropped = num_left <= colayer
            tf.cond(is_dropped, undo, lambda: None)

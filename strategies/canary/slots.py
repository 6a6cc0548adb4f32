"""`SlotsBefore`: an optimizer under Canary forgets a step that was dropped.

A contribution is the optimizer's step, and a step with momentum holds the gradients of earlier steps. If the velocity
kept dropped gradients, later steps of an overtime rank would still apply a part of each: with momentum m, the fraction
m of its total effect. So velocities and all other slots of a variable return to their values before the step, as if the
iteration was skipped. A rank's contributions then come only from gradients that were not dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from hop_tf.keras_hook.branches import when
from hop_tf.keras_hook.optimizers import slots_of


class SlotsBefore:
    """The slots of some variables before a step. The constructor emits the ops that read them.

    State that an optimizer keeps for all variables together, such as its count of steps, is not included.

    Args:
      optimizer: The optimizer, built.
      variables: The variables.
    """

    def __init__(self, optimizer: Any, variables: Sequence[tf.Variable]):
        slots = [(index, slot) for (_, index), slot in slots_of(optimizer, variables).items() if index is not None]
        self._slots = [(index, slot, slot.value()) for index, slot in slots]

    def restore(self, colayers: Mapping[int, int], num_left: tf.Tensor) -> None:
        """Emits the ops that undo the step of the colayers that were not sent.

        Args:
          colayers: The colayer of each variable.
          num_left: int64 scalar: the number of colayers that were sent. They are the first ones.
        """
        for colayer in sorted({colayers[index] for index, _, _ in self._slots}):

            def undo(colayer: int = colayer) -> None:
                for index, slot, value in self._slots:
                    if colayers[index] == colayer:
                        slot.assign(value)

            with tf.device("/cpu:0"):
                is_dropped = num_left <= colayer
            when(is_dropped, undo)

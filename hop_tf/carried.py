"""`CarriedChanges`: what a rank has changed of the variables that are exchanged beside those that are trained."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf


class CarriedChanges:
    """What this rank has changed of some variables, such as moving statistics, since it was asked last.

    Where the mean comes steps later, ranks exchange changes, not values: a difference between values would be there
    still when the next ones are sent, and be corrected once more for every step that is under way. All ranks add the
    mean of the changes in the place of their own: they stay together, but for what is under way.

    Args:
      variables: The variables.
      values: What they are when the first change is about to be made.

    Attributes:
      variables: The variables.
    """

    def __init__(self, variables: Sequence[tf.Variable], values: Sequence[tf.Tensor]):
        self.variables = variables
        with tf.init_scope():
            self._known = [tf.Variable(value, trainable=False, name="hop_tf_known") for value in values]

    def reset(self) -> None:
        """Emits the ops that forget changes which were made so far."""
        for variable, known in zip(self.variables, self._known, strict=True):
            known.assign(variable)

    def known(self) -> list[tf.Tensor]:
        """Emits the ops that read what the variables were before the changes that `take` would give."""
        return [known.read_value() for known in self._known]

    def take(self) -> list[tf.Tensor]:
        """Emits the ops that compute the changes since the last call."""
        changes = []
        for variable, known in zip(self.variables, self._known, strict=True):
            value = variable.read_value()
            changes.append(value - known)
            known.assign(value)
        return changes

    def add(self, changes: Sequence[tf.Tensor]) -> None:
        """Emits the ops that add changes which are not this rank's own."""
        for variable, known, change in zip(self.variables, self._known, changes, strict=True):
            variable.assign_add(change)
            known.assign_add(change)

"""`LateChanges`: averaging changes that arrive late, with a rank's own in their place until they do.

    what a rank computes with  =  what is merged, alike on all ranks  +  its own changes that are not merged yet

A rank changes its variables as it likes: by the steps of any optimizer, by moving statistics. Once in a while it takes
what it has changed since the last time, and hands that out. When the mean over all ranks arrives, maybe many steps
later, the rank takes its own part out and puts the mean in:

    w += mean(changes) - own changes

Meanwhile it computes at weights that hold its own changes at full size: the best guess of a mean that is not there yet.
Nothing else is corrected: no optimizer slot takes notice. For outer steps of DiLoCo these are the "eager updates" of
Kale, Douillard and Donchev, arXiv 2502.12996.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf


def assign_all(variables: Sequence[tf.Variable], values: Sequence) -> None:
    """Emits the ops that assign one value to each variable."""
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def read_all(variables: Sequence[tf.Variable]) -> list[tf.Tensor]:
    """Emits the ops that read variables: what they are now, whatever is assigned later."""
    return [variable.read_value() for variable in variables]


class Latest:
    """The latest few values of some variables, kept as long as others wait for them: all zeros at first.

    Args:
      variables: The variables.
      number: How many values of each; 0 keeps none.
    """

    def __init__(self, variables: Sequence[tf.Variable], number: int):
        self._kept = [[zeros_like(variable) for variable in variables] for _ in range(number)]

    def all(self) -> list[list[tf.Variable]]:
        """All values, the oldest first."""
        return self._kept

    def at(self, age: int | tf.Tensor) -> list[tf.Tensor]:
        """Emits the ops that read the values after which `age` others were pushed."""
        values = [functools.partial(read_all, kept) for kept in reversed(self._kept)]
        if isinstance(age, int):
            return values[age]()
        with tf.device("/cpu:0"):
            index = tf.cast(age, tf.int32)
        return tf.nest.flatten(tf.switch_case(index, values))

    def add_newest(
        self, number: int | tf.Tensor, values: Sequence[tf.Tensor], factors: Sequence[Sequence[tf.Tensor]] = ()
    ) -> list[tf.Tensor]:
        """Emits the ops that add the `number` values that were pushed last to others.

        Args:
          number: How many.
          values: To these.
          factors: What to multiply values with: those that were pushed last, those before, and so on; for each the
            factors of the first variables. Default 1.
        """
        sums = list(values)
        for age, kept in enumerate(reversed(self._kept)):
            add = functools.partial(_sums, sums, kept, factors[age] if factors else ())
            if isinstance(number, int):
                sums = add() if age < number else sums
                continue
            with tf.device("/cpu:0"):
                is_new = number > age
            sums = tf.cond(is_new, add, functools.partial(list, sums))
        return sums

    def push(self, values: Sequence[tf.Tensor]) -> None:
        """Emits the ops that drop the oldest values, for these."""
        for older, newer in zip(self._kept, [*self._kept[1:], values], strict=False):
            assign_all(older, newer)


def _sums(values: Sequence[tf.Tensor], others: Sequence[tf.Variable], factors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    others = [tf.cast(other, value.dtype) for value, other in zip(values, others, strict=True)]
    scaled = [tf.cast(factor, other.dtype) * other for factor, other in zip(factors, others, strict=False)]
    return [value + other for value, other in zip(values, [*scaled, *others[len(scaled) :]], strict=True)]


def zeros_like(variable: tf.Variable) -> tf.Variable:
    """A variable of zeros on the same device, outside of graphs."""
    with tf.init_scope(), tf.device(variable.device):
        return tf.Variable(tf.zeros(variable.shape, variable.dtype), trainable=False, name="hop_tf_kept")


class LateChanges:
    """The changes that this rank has made to some variables since the last call of `take`.

    Ranks exchange changes, not values: a difference between values would be there still when the next ones are sent,
    and be corrected once more for everything that is under way.

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
        return read_all(self._known)

    def count_from(self, values: Mapping[int, tf.Tensor]) -> None:
        """Emits the ops that make the next changes of some variables, by index, those since these values."""
        for index, value in values.items():
            self._known[index].assign(value)

    def multiply(self, factor: tf.Tensor, number: int) -> None:
        """Emits the ops that multiply the changes of the first `number` variables since the last call of `take`."""
        for variable, known in zip(self.variables[:number], self._known, strict=False):
            variable.assign_add(tf.cast(factor - 1, variable.dtype) * (variable - known))

    def take(self, choose: Callable[[list[tf.Tensor]], list] | None = None) -> list[tf.Tensor]:
        """Emits the ops that compute the changes since the last call.

        Args:
          choose: Takes all changes; returns, for each variable, where they are taken, or None for everywhere. Elsewhere
            they are zero, and left for the next call. Default: all are taken.

        Returns:
          The changes.
        """
        values = read_all(self.variables)
        changes = [value - known for value, known in zip(values, self._known, strict=True)]
        chosen = [None] * len(changes) if choose is None else choose(changes)
        for index, where in enumerate(chosen):
            if where is not None:
                values[index] = tf.where(where, values[index], self._known[index])
                changes[index] = tf.where(where, changes[index], tf.zeros_like(changes[index]))
            self._known[index].assign(values[index])
        return changes

    def add(self, changes: Sequence[tf.Tensor]) -> None:
        """Emits the ops that add changes which are not this rank's own, such as a mean less the own part of it."""
        for variable, known, change in zip(self.variables, self._known, changes, strict=True):
            variable.assign_add(change)
            known.assign_add(change)

    def replace(self, values: Sequence[tf.Tensor]) -> None:
        """Emits the ops that give the variables values which hold all own changes that were taken."""
        for variable, known, value in zip(self.variables, self._known, values, strict=True):
            variable.assign(value)
            known.assign(value)

    def rebase(self, values: Sequence[tf.Tensor]) -> None:
        """Emits the ops that give the variables these values, and on top what was changed since the last `take`."""
        for variable, known, value in zip(self.variables, self._known, values, strict=True):
            variable.assign(value + (variable - known))
            known.assign(value)

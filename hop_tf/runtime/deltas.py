"""`DeltaTracker`: the changes (deltas) of variables, for ranks that average changes and merge the mean late.

    weights that a rank computes with  =  merged weights, equal on all ranks  +  its own changes in flight

Anything may change the variables of a rank: steps of any optimizer, or moving statistics. From time to time, a rank
submits its changes since the last time. The mean over all ranks may arrive many steps later. The rank then replaces its
own changes by the mean:

    w += mean(changes) - own changes

Until then its weights hold its own changes at full size, as an estimate of the mean. The slots of optimizers are not
corrected. In DiLoCo, this rule is called "eager updates": Kale, Douillard and Donchev, arXiv 2502.12996.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf

from hop_tf.tensors.joined import JoinedVariables


def assign_all(variables: Sequence[tf.Variable], values: Sequence) -> None:
    """Emits the ops that assign one value to each variable."""
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def read_all(variables: Sequence[tf.Variable | JoinedVariables]) -> list[tf.Tensor]:
    """Emits the ops that read the present values of variables. Later assignments do not change the results."""
    return [variable.read_value() for variable in variables]


class ValueHistory:
    """The history of some variables: their latest values. All are zero at first.

    Args:
      variables: The variables.
      number: Number of values to keep of each variable. 0 keeps none.
    """

    def __init__(self, variables: Sequence[tf.Variable | JoinedVariables], number: int):
        self._kept = [[zeros_like(variable) for variable in variables] for _ in range(number)]

    def all(self) -> list[list[tf.Variable]]:
        """All values, the oldest first."""
        return self._kept

    def at(self, age: int | tf.Tensor) -> list[tf.Tensor]:
        """Emits the ops that read the values of one push: the push that is `age` pushes before the latest one."""
        values = [functools.partial(read_all, kept) for kept in reversed(self._kept)]
        if isinstance(age, int):
            return values[age]()
        with tf.device("/cpu:0"):
            index = tf.cast(age, tf.int32)
        return tf.nest.flatten(tf.switch_case(index, values))

    def add_newest(
        self, number: int | tf.Tensor, values: Sequence[tf.Tensor], scales: Sequence[Callable[[list], list]] = ()
    ) -> list[tf.Tensor]:
        """Emits the ops that add the latest `number` kept values to `values`.

        Args:
          number: Number of kept values to add.
          values: The values to add to, one for each variable.
          scales: For each kept value, beginning with the latest, a function that emits the ops that scale it. It takes
            and returns one tensor for each variable. Default: values are not scaled.
        """
        sums = list(values)
        for age, kept in enumerate(reversed(self._kept)):
            add = functools.partial(_sums, sums, kept, scales[age] if scales else list)
            if isinstance(number, int):
                sums = add() if age < number else sums
                continue
            with tf.device("/cpu:0"):
                is_new = number > age
            sums = tf.cond(is_new, add, functools.partial(list, sums))
        return sums

    def push(self, values: Sequence[tf.Tensor]) -> None:
        """Emits the ops that keep these values, and drop the oldest ones."""
        for older, newer in zip(self._kept, [*self._kept[1:], values], strict=False):
            assign_all(older, newer)


def _sums(values: Sequence[tf.Tensor], others: Sequence[tf.Variable], scale: Callable[[list], list]) -> list[tf.Tensor]:
    others = scale([tf.cast(other, value.dtype) for value, other in zip(values, others, strict=True)])
    return [value + other for value, other in zip(values, others, strict=True)]


def zeros_like(variable: tf.Variable | JoinedVariables) -> tf.Variable:
    """A variable of zeros on the same device, outside of graphs."""
    with tf.init_scope(), tf.device(variable.device):
        return tf.Variable(tf.zeros(variable.shape, variable.dtype), trainable=False, name="hop_tf_kept")


class DeltaTracker:
    """The changes of some variables on this rank since the last call of `take`.

    Ranks exchange changes, not values. With values, a difference between ranks would last until a mean is merged, and
    each message in flight would correct it again.

    Args:
      variables: The variables, which may be `JoinedVariables`.
      values: Their values before the first change.

    Attributes:
      variables: The variables.
    """

    def __init__(self, variables: Sequence[tf.Variable | JoinedVariables], values: Sequence[tf.Tensor]):
        self.variables = variables
        with tf.init_scope():
            self._known = [tf.Variable(value, trainable=False, name="hop_tf_known") for value in values]

    def reset(self) -> None:
        """Emits the ops that forget all changes so far."""
        for variable, known in zip(self.variables, self._known, strict=True):
            known.assign(variable.read_value())

    def known(self) -> list[tf.Tensor]:
        """Emits the ops that read the values from which changes are counted."""
        return read_all(self._known)

    def count_from(self, values: Mapping[int, tf.Tensor]) -> None:
        """Emits the ops that make the changes of some variables (by index) count from these values on."""
        for index, value in values.items():
            self._known[index].assign(value)

    def multiply(self, factor: tf.Tensor, number: int) -> None:
        """Emits the ops that multiply the changes of the first `number` variables since the last call of `take`."""
        for variable, known in zip(self.variables[:number], self._known, strict=False):
            variable.assign_add(tf.cast(factor - 1, variable.dtype) * (variable.read_value() - known))

    def take(self, choose: Callable[[list[tf.Tensor]], list] | None = None) -> list[tf.Tensor]:
        """Emits the ops that compute the changes since the last call.

        Args:
          choose: Takes all changes. Returns, for each variable, a mask of the values whose changes are taken, or None
            for all values. Other changes are zero in the result, and wait for the next call. Default: takes all.

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
        """Emits the ops that add changes by other ranks, such as a mean less this rank's own changes."""
        for variable, known, change in zip(self.variables, self._known, changes, strict=True):
            variable.assign_add(change)
            known.assign_add(change)

    def replace(self, values: Sequence[tf.Tensor]) -> None:
        """Emits the ops that assign new values. These contain all own changes that `take` has returned."""
        for variable, known, value in zip(self.variables, self._known, values, strict=True):
            variable.assign(value)
            known.assign(value)

    def rebase(self, values: Sequence[tf.Tensor]) -> None:
        """Emits the ops that assign these values plus the changes since the last `take`."""
        for variable, known, value in zip(self.variables, self._known, values, strict=True):
            variable.assign(value + (variable.read_value() - known))
            known.assign(value)

"""`Twin`: a second state of an optimizer and its variables, updated by the same rule.

An update costs some fifty operations for each variable, even for a small one. So small variables are joined to flat
vectors here, and each vector is updated as if it were one variable. The results are the same (except for the last bit
of a square root) for elementwise rules. Such a rule computes each value from its own gradient, weight and slots only,
as most of Keras's optimizers do.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from hop_tf.keras_hook.optimizers import (
    decays,
    gradient_accumulation_steps,
    iterations_variable,
    keras_variables,
    overwritten_by,
    slots_of,
    use_ema,
)
from hop_tf.keras_hook.updates import decayed_values, update

# Optimizers with elementwise rules. Others look at a whole variable, as Lamb does, or are a user's own.
_ELEMENTWISE = tuple(
    getattr(keras.optimizers, name)
    for name in ("SGD", "RMSprop", "Adam", "AdamW", "Adadelta", "Adagrad", "Adamax", "Lion")
)
# A larger variable stays separate: copying it would cost more than the saved operations.
_MAX_SMALL_VALUES = 1 << 14


def has_twin(optimizer: Any, variables: Sequence[tf.Variable]) -> bool:
    """True if a `Twin` makes the same updates as the optimizer."""
    of_keras = keras_variables(optimizer)
    return (
        type(optimizer) in _ELEMENTWISE
        and not use_ema(optimizer)
        and gradient_accumulation_steps(optimizer) == 1
        and not overwritten_by(optimizer, None)
        and all(index is not None for _, index in slots_of(optimizer, variables))
        and all(of_keras[id(variable)].constraint is None for variable in variables)
    )


class Twin:
    """A second state of an optimizer and its variables. All methods emit operations, or run them outside of graphs.

    The learning rate is the optimizer's, and the count of updates the twin's own.

    Args:
      optimizer: The optimizer, built, for which `has_twin` is true.
      variables: The variables that it updates.
    """

    def __init__(self, optimizer: Any, variables: Sequence[tf.Variable]):
        self._shapes = [variable.shape for variable in variables]
        self._have_decay = decays(optimizer, variables)
        self._groups = _groups(variables, self._have_decay)
        slots = slots_of(optimizer, variables)
        names = dict.fromkeys(name for name, _ in slots)
        # The optimizer's weights, then the variables of each slot.
        self._theirs = [list(variables), *([slots[name, i] for i in range(len(variables))] for name in names)]
        self._their_count = iterations_variable(optimizer)
        mine = [[self._make(kind, group) for group in self._groups] for kind in self._theirs]
        self._mine = [[variable.value for variable in kind] for kind in mine]
        with tf.init_scope(), tf.device(self._their_count.device):
            count = keras.Variable(0, dtype=self._their_count.dtype.name, trainable=False, name="hop_tf_count")
        self._count = count.value
        self._optimizer = weakref.ref(optimizer)
        groups_decay = [self._have_decay[first] for first, *_ in self._groups]
        self._attributes = {
            **dict(zip(names, mine[1:], strict=True)),
            "_iterations": count,
            "_trainable_variables": mine[0],
            "_trainable_variables_indices": {optimizer._var_key(each): index for index, each in enumerate(mine[0])},
            "_exclude_from_weight_decay_cache": dict(zip(map(optimizer._var_key, mine[0]), groups_decay, strict=True)),
        }

    def _make(self, kind: Sequence[tf.Variable], group: Sequence[int]) -> keras.Variable:
        """A variable of zeros with room for all variables of a group."""
        first = kind[group[0]]
        shape = first.shape if len(group) == 1 else [sum(self._shapes[index].num_elements() for index in group)]
        with tf.init_scope(), tf.device(first.device):
            return keras.Variable(tf.zeros(shape, first.dtype), trainable=False, name="hop_tf_twin")

    @property
    def weights(self) -> Sequence[tf.Variable]:
        """The twin's weights: flat vectors, and large variables."""
        return self._mine[0]

    def _moved(self) -> Any:
        """An optimizer of the twin's variables, with the present settings and learning rate of the original optimizer.

        Attributes are set without Keras's tracking, which would add them to the saved state of the original optimizer.
        """
        optimizer = self._optimizer()
        if decays(optimizer, self._theirs[0]) != self._have_decay:
            raise ValueError(
                "`exclude_from_weight_decay` must be called before the training begins. Received: a later call, for "
                f"{type(optimizer).__name__}."
            )
        moved = object.__new__(type(optimizer))
        vars(moved).update({**vars(optimizer), **self._attributes})
        for name in ("assign_add", "assign_sub"):  # Bound to the original optimizer: see `out_of_place`.
            vars(moved).pop(name, None)
        return moved

    def join(self, values: Sequence) -> list[tf.Tensor]:
        """Arranges values, one for each variable, in the same way as `weights`."""
        flat = tf.constant([-1])
        return [
            values[first]
            if not others
            else tf.concat([tf.reshape(tf.cast(values[i], weight.dtype), flat) for i in (first, *others)], 0)
            for (first, *others), weight in zip(self._groups, self.weights, strict=True)
        ]

    def _cut(self, joined: Sequence[tf.Tensor]) -> Iterator[tuple[int, tf.Tensor]]:
        """Undoes `join`: yields the index of each variable and its part."""
        shapes = {shape: tf.constant(shape, tf.int32) for shape in set(map(tuple, self._shapes))}  # Few are different.
        for group, value in zip(self._groups, joined, strict=True):
            if len(group) == 1:
                yield group[0], value
                continue
            pieces = tf.split(value, [self._shapes[index].num_elements() for index in group])
            for index, piece in zip(group, pieces, strict=True):
                yield index, tf.reshape(piece, shapes[tuple(self._shapes[index])])

    def take(self, weights: Sequence) -> None:
        """Copies these weights, and the optimizer's slots and count, into the twin."""
        for mine, theirs in zip(self._mine, [weights, *self._theirs[1:]], strict=True):
            for variable, value in zip(mine, self.join(theirs), strict=True):
                variable.assign(value)
        self._count.assign(self._their_count)

    def give(self, *, decayed: bool = False) -> None:
        """Copies the twin's state to the optimizer and its variables.

        Args:
          decayed: True to copy the weights after decoupled weight decay, the first part of an update.
        """
        values = [[variable.read_value() for variable in kind] for kind in self._mine]
        if decayed:
            values[0] = decayed_values(self._moved(), self.weights)
        for kind, theirs in zip(values, self._theirs, strict=True):
            for index, value in self._cut(kind):
                theirs[index].assign(value)
        self._their_count.assign(self._count)

    def update(self, joined: Sequence[tf.Tensor], rate: tf.Tensor | None = None) -> None:
        """Makes an update; see `hop_tf.keras_hook.updates.update`.

        Args:
          joined: Gradients, from `join`.
          rate: The learning rate that replaces a constant one. Default: the optimizer's.
        """
        update(self._moved(), joined, self.weights, rate)


def _groups(variables: Sequence[tf.Variable], have_decay: Sequence[bool]) -> list[list[int]]:
    """The indices of variables that share a flat vector: small ones of the same type, device and decay."""
    groups = {}
    for index, (variable, has_decay) in enumerate(zip(variables, have_decay, strict=True)):
        is_small = variable.shape.num_elements() <= _MAX_SMALL_VALUES
        key = (variable.dtype, variable.device, has_decay) if is_small else index
        groups.setdefault(key, []).append(index)
    return list(groups.values())

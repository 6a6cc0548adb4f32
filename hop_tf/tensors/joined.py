"""`JoinedVariables`: variables of a bucket as one flat variable.

A rule that computes each value from values at the same place only is the same for a flat vector. It then takes a few
operations, however many variables there are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from hop_tf.tensors.packing import Packing, TensorSpec


class JoinedVariables:
    """Several variables, one behind the other as in a bucket. Has those methods of `tf.Variable` that rules need.

    Args:
      variables: The variables, of one type.
      specs: Their specs, of one bucket.

    Attributes:
      variables: As given.
      spec: The spec of the flat vector, padding included. Its values lie in a bucket as those of the variables would.
      dtype: The type.
      shape: The shape of the flat vector.
      device: The device of the first one, where joined values are.
    """

    def __init__(self, variables: Sequence[tf.Variable], specs: Sequence[TensorSpec]):
        self.variables = variables
        self._packing = Packing(specs)
        (num_values,) = self._packing.sizes
        first, last = specs[0], specs[-1]
        self.spec = TensorSpec(f"{first.name} to {last.name}", (num_values,), first.dtype, first.exact)
        self.dtype, self.device = first.dtype, variables[0].device
        self.shape = tf.TensorShape([num_values])

    def join(self, values: Sequence[tf.Tensor]) -> tf.Tensor:
        """Emits the ops that join one value for each variable."""
        (joined,) = self._packing.pack(values)
        return joined

    def split(self, joined: tf.Tensor) -> list[tf.Tensor]:
        """Emits the ops that undo `join`."""
        return self._packing.unpack([joined])

    def spread(self, values: tf.Tensor) -> tf.Tensor:
        """Emits the ops that repeat a value for each variable at all of the variable's places."""
        ends = [self._packing.end(index) for index in range(len(self.variables))]
        return tf.gather(values, tf.searchsorted(ends, tf.range(ends[-1]), side="right"))

    def read_value(self) -> tf.Tensor:
        """Emits the ops that read the variables."""
        return self.join([variable.read_value() for variable in self.variables])

    def assign(self, value: tf.Tensor) -> None:
        """Emits the ops that assign all variables."""
        for variable, piece in zip(self.variables, self.split(value), strict=True):
            variable.assign(piece)

    def assign_add(self, value: tf.Tensor) -> None:
        """Emits the ops that add to all variables."""
        for variable, piece in zip(self.variables, self.split(value), strict=True):
            variable.assign_add(piece)


@dataclasses.dataclass(frozen=True)
class SeparateGroup:
    """The variables of a group, each by itself. See `JoinedGroup`."""

    variables: Sequence[tf.Variable]
    num_trained: int
    packing: Packing

    def join(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The values."""
        return list(values)

    def split(self, joined: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The values."""
        return list(joined)


class JoinedGroup:
    """The variables of a group, joined to as few as possible.

    Args:
      variables: The variables. The trained ones come first.
      num_trained: Number of trained ones.
      packing: The group's buckets. The variables are its first tensors.

    Attributes:
      variables: The joined variables. The trained ones come first.
      num_trained: Number of joined trained ones.
      packing: The same buckets, for one tensor for each of `variables`, and the other tensors of the group.
    """

    def __init__(self, variables: Sequence[tf.Variable], num_trained: int, packing: Packing):
        members: dict[tuple, list[int]] = {}
        for index, spec in enumerate(packing.specs[: len(variables)]):
            members.setdefault((index < num_trained, spec.dtype, spec.exact), []).append(index)
        self._members = list(members.values())
        self.variables = [
            JoinedVariables([variables[i] for i in each], [packing.specs[i] for i in each]) for each in self._members
        ]
        self.num_trained = sum(is_trained for is_trained, *_ in members)
        others = packing.specs[len(variables) :]
        self.packing = Packing([*(each.spec for each in self.variables), *others])

    def join(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Emits the ops that join one value for each variable."""
        pairs = zip(self.variables, self._members, strict=True)
        return [variable.join([values[i] for i in members]) for variable, members in pairs]

    def split(self, joined: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Emits the ops that undo `join`."""
        pieces = {}
        for variable, members, value in zip(self.variables, self._members, joined, strict=True):
            pieces.update(zip(members, variable.split(value), strict=True))
        return [pieces[i] for i in range(len(pieces))]

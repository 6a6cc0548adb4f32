"""`JoinedVariables`: variables of a bucket as one flat variable.

An elementwise update rule, which computes each value only from values at the same index, gives the same result on a
flat vector. It then takes a few operations, for any number of variables.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from hop_tf.tensors.packing import Packing, TensorSpec

# 4 MB of float32.
_MAX_VALUES = 1 << 20


class JoinedVariables:
    """Several variables, one behind the other as in a bucket. Has those methods of `tf.Variable` that rules need.

    Args:
      variables: The variables, of one type and on one device.
      specs: Their specs, of one bucket.

    Attributes:
      variables: As given.
      spec: The spec of the flat vector, padding included. In a bucket, it has the same layout as the variables.
      dtype: The type.
      shape: The shape of the flat vector.
      device: The device.
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
        """Emits the ops that repeat each variable's value for all elements of that variable."""
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


class JoinedGroup:
    """The variables of a group. Small variables that are neighbors in a bucket are joined.

    Args:
      variables: The variables. The trained ones come first.
      num_trained: Number of trained ones.
      packing: The group's buckets. The variables are its first tensors.
      max_values: Maximum number of values that are joined, because rules need room for all of them at a time. A larger
        variable stays separate. None: every variable stays separate.

    Attributes:
      variables: The variables, separate or joined. The trained ones come first.
      num_trained: Number of trained ones among these.
      packing: The same buckets, with one tensor for each of `variables`, and the other tensors of the group.
    """

    def __init__(
        self, variables: Sequence[tf.Variable], num_trained: int, packing: Packing, max_values: int | None = _MAX_VALUES
    ):
        specs = packing.specs[: len(variables)]
        trained = _neighbors(variables[:num_trained], specs[:num_trained], max_values)
        others = _neighbors(variables[num_trained:], specs[num_trained:], max_values)
        self._members = [*trained, *([num_trained + i for i in each] for each in others)]
        self.variables = [
            JoinedVariables([variables[i] for i in each], [specs[i] for i in each])
            if len(each) > 1
            else variables[each[0]]
            for each in self._members
        ]
        self.num_trained = len(trained)
        self._order = [i for each in trained for i in each]
        joined = [
            each.spec if isinstance(each, JoinedVariables) else specs[i]
            for each, (i, *_) in zip(self.variables, self._members, strict=True)
        ]
        self.packing = Packing([*joined, *packing.specs[len(variables) :]])

    def join(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Emits the ops that join one value for each variable."""
        return [
            each.join([values[i] for i in members]) if len(members) > 1 else values[members[0]]
            for each, members in zip(self.variables, self._members, strict=True)
        ]

    def split(self, joined: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Emits the ops that undo `join`."""
        pieces = {}
        for each, members, value in zip(self.variables, self._members, joined, strict=True):
            pieces.update(zip(members, each.split(value) if len(members) > 1 else [value], strict=True))
        return [pieces[i] for i in range(len(pieces))]

    def arrange(self, values: tf.Tensor) -> tf.Tensor:
        """Emits the ops that reorder values, one for each trained variable, to the order of the joined variables."""
        return values if self._order == sorted(self._order) else tf.gather(values, self._order)


def _neighbors(
    variables: Sequence[tf.Variable], specs: Sequence[TensorSpec], max_values: int | None
) -> list[list[int]]:
    """The indices of variables that may be joined: neighbors in a bucket, on one device, small enough together."""
    runs: list[list[int]] = []
    latest: dict[tuple, tuple[str, int, list[int]]] = {}  # By kind: device, number of values, and the latest run.
    for index, (variable, spec) in enumerate(zip(variables, specs, strict=True)):
        kind, num_values = (spec.dtype, spec.exact), spec.num_elements
        device, num_before, run = latest.get(kind, (None, 0, []))
        if max_values is None or device != variable.device or num_before + num_values > max_values:
            num_before, run = 0, []
            runs.append(run)
        run.append(index)
        latest[kind] = variable.device, num_before + num_values, run
    return runs

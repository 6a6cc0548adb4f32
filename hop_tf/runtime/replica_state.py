"""`ReplicaState`: a rank's variables, described for other ranks, and their values."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hop_tf.errors import MismatchError, ProtocolError
from hop_tf.keras_hook.updates import as_own_updates
from hop_tf.membership import membership_pb2
from hop_tf.tensors.packing import TensorSpec
from hop_tf.transport.base import Transport

_NUM_BATCHES = "the number of batches in an epoch"
_SAME_MODEL = "All ranks must build the same model, and optimizer, in the same order."
_SAME_DATA = (
    "`fit` needs the same data in batches of the same size on all ranks, because each rank trains on its part of a "
    "batch."
)


def spec_of(variable: tf.Variable) -> TensorSpec:
    """Name, shape and dtype of a variable."""
    return TensorSpec(getattr(variable, "path", variable.name), tuple(variable.shape.as_list()), variable.dtype)


def sign(what: str, optimizer: str, specs: Sequence[TensorSpec], num_batches: int = 0) -> bytes:
    """Describes variables and their use, so that ranks can compare.

    Args:
      what: The use, for instance the name of an exchange group.
      optimizer: `describe_optimizer` of the optimizer, if it matters.
      specs: The specs of the variables.
      num_batches: Number of batches in an epoch of the training data that ranks share; 0 if not known.
    """
    variables = [membership_pb2.Variable(name=s.name, dtype=s.dtype.name, shape=s.shape) for s in specs]
    signature = membership_pb2.GroupSignature(
        group=what, optimizer=optimizer, variables=variables, num_batches=num_batches
    )
    return signature.SerializeToString()


def describe_optimizer(optimizer: Any) -> str:
    """Class and settings of a Keras optimizer, as far as they can be compared between machines.

    Names do not count, because Keras numbers default names. Settings that are None do not count either.
    """
    settings = _comparable(optimizer.get_config())
    return f"{type(optimizer).__name__}({', '.join(f'{name}={value}' for name, value in settings.items())})"


def _comparable(value: Any) -> Any:
    """The numbers, strings and truth values in a configuration; None for other values."""
    if isinstance(value, Mapping):
        if value.get("class_name") == "__lambda__":  # Its code contains the path of the file.
            return "lambda"
        known = ((name, _comparable(each)) for name, each in sorted(value.items()) if name != "name")
        return {name: each for name, each in known if each is not None}
    if isinstance(value, (list, tuple)):
        return [_comparable(each) for each in value]
    if isinstance(value, float):
        return float(f"{value:.7g}")  # The precision of variables.
    return value if isinstance(value, (bool, int, str)) else None


def compare(transport: Transport, mine: bytes, other: int, theirs: bytes) -> None:
    """Compares the signature of rank `other` with this rank's.

    Raises:
      MismatchError: If the two differ.
      ProtocolError: If `theirs` is no signature.
    """
    try:
        theirs = membership_pb2.GroupSignature.FromString(theirs)
    except Exception as error:
        raise ProtocolError(f"rank {other} sent a malformed signature: {error}.") from error
    difference = _first_difference(theirs, membership_pb2.GroupSignature.FromString(mine))
    if difference:
        field, first, own = difference
        advice = _SAME_DATA if field == _NUM_BATCHES else _SAME_MODEL
        rank, address = transport.rank, transport.status(other).address
        raise MismatchError(
            f"rank {other} at {address} and rank {rank} disagree on {field}. Rank {other} has {first}, "
            f"rank {rank} has {own}. {advice}"
        )


def _first_difference(theirs, mine) -> tuple[str, str, str] | None:
    """The first field in which two signatures differ: (field, their value, my value)."""
    if theirs.group.split("-")[0] != mine.group.split("-")[0]:
        return "the order of operations", repr(theirs.group), repr(mine.group)
    if theirs.optimizer != mine.optimizer:
        return "the optimizer", theirs.optimizer, mine.optimizer
    if len(theirs.variables) != len(mine.variables):
        return "the number of variables", str(len(theirs.variables)), str(len(mine.variables))
    for index, (first, own) in enumerate(zip(theirs.variables, mine.variables, strict=True)):
        if first != own:
            return f"variable {index}", _in_words(first), _in_words(own)
    if theirs.group != mine.group:
        return "the groups of variables", repr(theirs.group), repr(mine.group)
    if theirs.num_batches != mine.num_batches:
        return _NUM_BATCHES, str(theirs.num_batches), str(mine.num_batches)
    return None


def _in_words(variable) -> str:
    return f"{variable.name!r} {variable.dtype}{list(variable.shape)}"


class ReplicaState:
    """All variables that begin with equal values on all ranks: weights, optimizer slots and counters.

    Variables are not kept alive. They are listed in the order in which they were added, the same on all ranks.

    Args:
      on_write: Called when this rank has taken over the values of another rank.
    """

    def __init__(self, on_write: Callable[[], None] = lambda: None):
        self._on_write = on_write
        # By identity, because variables cannot be hashed.
        self._known: dict[int, weakref.ref] = {}

    def add(self, variables: Iterable[tf.Variable]) -> list[tf.Variable]:
        """Adds the variables that are new, and returns them."""
        new = []
        for variable in variables:
            known = self._known.get(id(variable))
            if known is None or known() is not variable:
                self._known.pop(id(variable), None)
                self._known[id(variable)] = weakref.ref(variable)
                new.append(variable)
        return new

    def variables(self) -> list[tf.Variable]:
        """The variables that still exist."""
        variables = [known() for known in self._known.values()]
        return [variable for variable in variables if variable is not None]

    def signature(self, groups: str) -> bytes:
        """Describes the state together with these exchange groups; see `sign`."""
        return sign(groups, "", [spec_of(variable) for variable in self.variables()])

    def read(self) -> list[np.ndarray]:
        """The values, flat. They may share memory with the variables. Do not modify them."""
        return read(self.variables())

    def write(self, payload: np.ndarray) -> None:
        """Assigns the values that another rank has read, joined as bytes."""
        write(self.variables(), payload)
        self._on_write()


def read(variables: Sequence[tf.Variable]) -> list[np.ndarray]:
    """The variables' values, flat."""
    return [np.asarray(variable.read_value()).reshape(-1) for variable in variables]


def write(variables: Sequence[tf.Variable], payload: np.ndarray) -> None:
    """Assigns values that were read from such variables elsewhere, joined as bytes."""
    start = 0
    for variable in variables:
        spec = spec_of(variable)
        end = start + spec.num_elements * spec.dtype.size
        # A copy: otherwise the variable would keep the whole message's memory.
        value = payload[start:end].copy().view(spec.dtype.as_numpy_dtype)
        with as_own_updates():  # Not the program's: see `hop_tf.keras_hook.watched`.
            variable.assign(value.reshape(spec.shape))
        start = end

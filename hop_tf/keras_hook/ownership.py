"""The owners of a program's state: of the variables that no optimizer updates, and of the states of metrics.

Trained weights belong to the strategy. Everything else belongs to the program, and only the program knows how ranks
should combine it: a moving mean is averaged, a queue of features is not. Keras's own layers are known. For other state,
the program chooses by `add_weight(aggregation=...)` or by `hop_tf.state`.
"""

from __future__ import annotations

import dataclasses
import enum
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

_MARK = "hop_tf_state"


class Owner(enum.StrEnum):
    """The ways in which ranks share a state."""

    MEAN = "mean"
    SUM = "sum"
    MAX = "max"
    FIRST = "first"
    OWN = "own"


_OF_AGGREGATIONS = {
    tf.VariableAggregation.MEAN: Owner.MEAN,
    tf.VariableAggregation.SUM: Owner.SUM,
    tf.VariableAggregation.ONLY_FIRST_REPLICA: Owner.FIRST,
}
# Marked variables by `id`, because TensorFlow's variables cannot be hashed.
_marked: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def state(what: Any, owner: str) -> Any:
    """Sets the way in which ranks combine a state that no optimizer updates.

        self.teacher = hop_tf.state(build_network(), "mean")
        self.queue = hop_tf.state(self.add_weight(shape=(4096, 128), trainable=False), "own")

    Without a mark, `add_weight(aggregation=...)` decides ("mean", "sum", "only_first_replica"). Without either, the
    moving statistics of `BatchNormalization` are averaged, float8 scales become the maximum, and every other state
    stays the rank's own. See the tables in `docs/state.md`.

    Args:
      what: A variable of Keras or TensorFlow; a layer or a model, for all of its weights that no optimizer updates; a
        metric, for its states; or a list of these. Mark it before the first training step.
      owner: "mean": ranks average the state with every step, as a moving mean. The state must be floating-point.
        "sum": the changes of all ranks are added up, as in a count of rows. "max": the maximum, element by element.
        "first": rank 0's value. Ranks agree on "sum", "max" and "first" in `strategy.synchronize`. Ranks that always
        wait for each other (Pipe-SGD, DTS, Canary and SHAT with `consistency="bsp"`) also agree at the end of each
        epoch.
        "own": each rank keeps its own state. A model that rank 0 saves holds rank 0's state.
        A metric must have "sum": its states are added up over the ranks, and its result is that of all data.

    Returns:
      `what`.

    Raises:
      ValueError: If an argument is none of these.
    """
    known = [each.value for each in Owner]
    if owner not in known:
        raise ValueError(f"`owner` must be one of {known}. Received: owner={owner!r}.")
    for each in what if isinstance(what, (list, tuple)) else [what]:
        _check(each, Owner(owner))
        setattr(each, _MARK, Owner(owner))
        if _is_variable(each):
            _marked[id(each)] = each
    return what


def _check(what: Any, owner: Owner) -> None:
    if not _is_variable(what) and not isinstance(what, (keras.Layer, keras.Metric)):
        raise ValueError(
            "`what` must be a variable, a layer, a model, a metric, or a list of these. "
            f"Received: what={what!r} of type {type(what).__name__}."
        )
    if isinstance(what, keras.Metric) and owner is not Owner.SUM:
        raise ValueError(
            "`owner` of a metric must be 'sum': its states add up over the ranks. Without a mark, ranks average the "
            f"results of a metric. Received: owner={owner.value!r}, what={what.name!r}."
        )
    if _is_variable(what) and owner is Owner.SUM and _is_bool(what):
        raise ValueError(f"`owner` must not be 'sum' for a boolean state. Received: what={_path_of(what)!r}.")
    if _is_variable(what) and owner is Owner.MEAN and not _is_floating(what):
        raise ValueError(
            "`owner` must not be 'mean' for a state that is not floating-point. Take 'sum', 'max', 'first' or 'own'. "
            f"Received: owner='mean', what={_path_of(what)!r} of {tf.as_dtype(what.dtype).name}."
        )


def mark_of(what: Any) -> Owner | None:
    """The owner that `state` has set for a variable, a layer or a metric; None without a mark."""
    return getattr(what, _MARK, None)


@dataclasses.dataclass(frozen=True)
class State:
    """A variable, and the way in which ranks combine it.

    Attributes:
      variable: TensorFlow's variable.
      path: The variable's name for users, for instance "sequential/dense/kernel".
      owner: The way in which ranks combine the variable.
      is_statistic: True for a moving statistic of a layer of Keras: ranks average it if a step assigns it.
      is_told: True if the program sets the owner, or the variable is internal to one of Keras's own layers, such as the
        state of a stateful RNN.
      is_marked: True if `state` was called for the variable, or for a layer around it.
      is_trainable: True if Keras's `trainable` is true for the variable and for all layers around it.
      layer: The layer that holds the variable; None for a variable outside of the model.
    """

    variable: tf.Variable
    path: str
    owner: Owner
    is_statistic: bool
    is_told: bool
    is_marked: bool
    is_trainable: bool
    layer: keras.Layer | None


def states_of(model: keras.Model | None) -> list[State]:
    """All weights of a model, in an order that is the same on all ranks, and the marked variables outside of it.

    Args:
      model: The model. None gives marked variables only, as for a custom training loop.
    """
    found = {} if model is None else {id(each.variable): each for each in _walk(model, ())}
    # `valuerefs` is atomic: other threads may mark variables meanwhile.
    known = [variable for each in _marked.valuerefs() if (variable := each()) is not None]
    marked = [each for each in known if id(tf_variable(each)) not in found]
    beside = marked if model is None else [each for each in marked if not isinstance(each, keras.Variable)]
    return [*found.values(), *(_state(each, ()) for each in beside)]


def _walk(layer: keras.Layer, outer: Sequence[keras.Layer]) -> Iterator[State]:
    layers = (*outer, layer)
    for variable in (*layer._trainable_variables, *layer._non_trainable_variables):
        yield _state(variable, layers)
    for each in layer._layers:
        if all(each is not known for known in layers):
            yield from _walk(each, layers)


def _state(variable: Any, layers: Sequence[keras.Layer]) -> State:
    told = _told_owner(variable, layers)
    is_internal = bool(layers) and any(each is variable for each in layers[-1]._non_trainable_variables)
    is_statistic = told is None and is_internal and isinstance(layers[-1], keras.layers.BatchNormalization)
    is_of_keras = is_internal and type(layers[-1]).__module__.startswith("keras.src.")
    return State(
        variable=tf_variable(variable),
        path=_path_of(variable),
        owner=told or (Owner.MEAN if is_statistic else Owner.OWN),
        is_statistic=is_statistic,
        is_told=told is not None or is_of_keras,
        is_marked=any(mark_of(each) is not None for each in (variable, *layers)),
        is_trainable=all(each.trainable for each in (variable, *layers)),
        layer=layers[-1] if layers else None,
    )


def _told_owner(variable: Any, layers: Sequence[keras.Layer]) -> Owner | None:
    """The owner that the program sets: by a mark of the variable, its aggregation, or the innermost marked layer."""
    if (mark := mark_of(variable)) is not None:
        return mark
    if (owner := _OF_AGGREGATIONS.get(tf_variable(variable).aggregation)) is not None:
        if owner is Owner.SUM and _is_bool(variable):
            raise ValueError(
                "`aggregation` must not be 'sum' for a boolean state. Write `hop_tf.state(variable, 'max')`: then it "
                f"is true if it is true on any rank. Received: aggregation='sum', variable={_path_of(variable)!r}."
            )
        return owner if _can_have(variable, owner) else Owner.OWN
    marks = [mark for layer in layers if (mark := mark_of(layer)) is not None]
    if marks:
        return marks[-1] if _can_have(variable, marks[-1]) else Owner.OWN
    return Owner.MAX if getattr(variable, "overwrite_with_gradient", False) else None


def _can_have(variable: Any, owner: Owner) -> bool:
    """True if the dtype allows the owner: a mean needs floats, and booleans have no sum."""
    return not (owner is Owner.MEAN and not _is_floating(variable)) and not (owner is Owner.SUM and _is_bool(variable))


def tf_variable(variable: Any) -> tf.Variable:
    """The TensorFlow variable behind a Keras variable; any other variable itself."""
    return variable._value if isinstance(variable, keras.Variable) else variable


def _is_variable(what: Any) -> bool:
    return isinstance(what, (keras.Variable, tf.Variable))


def _is_floating(variable: Any) -> bool:
    return tf.as_dtype(variable.dtype).is_floating


def _is_bool(variable: Any) -> bool:
    return tf.as_dtype(variable.dtype).is_bool


def _path_of(variable: Any) -> str:
    return getattr(variable, "path", variable.name)

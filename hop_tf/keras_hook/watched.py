"""`Watch`: notices that a program assigns variables, in a training step or between two.

A callback, a custom loop, or a checkpoint may assign weights. A strategy that keeps a second copy of them would undo
that without a word.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from hop_tf.keras_hook.trace import StepTrace
from hop_tf.keras_hook.updates import own_updates

# Methods of TensorFlow's variables that change the value. The last one restores a checkpoint.
_CHANGING = (
    "assign",
    "assign_add",
    "assign_sub",
    "scatter_sub",
    "scatter_add",
    "scatter_max",
    "scatter_min",
    "scatter_mul",
    "scatter_div",
    "scatter_update",
    "batch_scatter_update",
    "_restore_from_tensors",
)
_WATCH = "_hop_tf_watch"
# What an assignment that was taken back may leave behind, over the largest value.
UNDONE = 1e-4
ROUNDING = {tf.bfloat16: 0.03, tf.float16: 0.004}


class Watch:
    """Notes which of some variables the program assigns.

    A variable that is watched gets a class of its own, whose methods tell the watch. A step costs nothing by that.
    A `tf.function` that assigns a variable between two steps sets a flag each time it runs.

    Attributes:
      trace: The latest training step: told of what it assigns, until it has ended.
    """

    def __init__(self):
        self.trace: StepTrace | None = None
        self._watched: dict[int, weakref.ref[tf.Variable]] = {}
        self._values: list[tuple[tf.Variable, tf.Tensor]] = []
        self._assigned: dict[int, weakref.ref[tf.Variable]] = {}
        self._in_graphs: dict[int, weakref.ref[tf.Variable]] = {}

    @functools.cached_property
    def flag(self) -> tf.Variable:
        """True if a variable was assigned since `forget`: for graphs. It is made when somebody first asks for it."""
        with tf.init_scope(), tf.device("/cpu:0"):
            return tf.Variable(bool(self._assigned), trainable=False, name="hop_tf_assigned")

    @property
    def _has_flag(self) -> bool:
        return "flag" in vars(self)

    def add(self, variables: Sequence[tf.Variable]) -> None:
        """Watches variables from now on, as long as they live."""
        self.add_in_steps(variables)
        self._watched.update({id(variable): weakref.ref(variable) for variable in variables})

    def add_in_steps(self, variables: Sequence[tf.Variable]) -> None:
        """Watches variables from now on, but only in training steps."""
        for variable in variables:
            if getattr(variable, _WATCH, None) is None:
                variable.__class__ = _watched(type(variable))
            setattr(variable, _WATCH, self)

    def note(self, variable: tf.Variable) -> None:
        """Called when a variable is about to be assigned."""
        if own_updates.runs:
            return
        if self.trace is not None and not self.trace.has_ended:
            self.trace.note_assignment(variable)
            return
        if id(variable) not in self._watched:
            return
        if not tf.executing_eagerly():
            self._in_graphs[id(variable)] = weakref.ref(variable)
            self.flag.assign(True)
            return
        self._assigned[id(variable)] = weakref.ref(variable)
        if self._has_flag:
            self.flag.assign(True)

    def assigned(self) -> list[tf.Variable]:
        """The variables that were assigned since `forget`; of those that a `tf.function` assigns, all that it does."""
        references = dict(self._assigned)
        if self._in_graphs and bool(self.flag):
            references |= self._in_graphs
        return [variable for each in references.values() if (variable := each()) is not None]

    def remember(self) -> None:
        """Keeps the values of now, for `changed`. Costs no memory until variables are assigned."""
        self._values = [(each(), each().read_value()) for each in self._watched.values() if each() is not None]

    def changed(self) -> list[tf.Variable]:
        """The variables that were assigned since `forget`, and are not what they were at `remember`, but for rounding.

        Weights that a callback swaps with their averages, and swaps back, are not quite the same.
        """
        assigned, values, self._values = {id(each) for each in self.assigned()}, self._values, []
        return [v for v, before in values if id(v) in assigned and not _are_alike(v.numpy(), before.numpy())]

    def forget(self) -> None:
        """What was assigned so far has been taken."""
        self._assigned.clear()
        if self._has_flag:
            self.flag.assign(False)


@functools.cache
def _watched(kind: type) -> type:
    """A subclass of a class of variables, whose methods tell the variable's watch."""
    methods = {name: _telling(name) for name in _CHANGING if hasattr(kind, name)}
    return type(kind.__name__, (kind,), {**methods, "__module__": kind.__module__, "__qualname__": kind.__qualname__})


def _telling(name: str) -> Callable:
    def method(self, *args, **kwargs):
        getattr(self, _WATCH).note(self)
        return getattr(super(type(self), self), name)(*args, **kwargs)

    return method


def _are_alike(now: np.ndarray, before: np.ndarray) -> bool:
    bound = ROUNDING.get(tf.as_dtype(before.dtype), UNDONE) * np.abs(before).max(initial=0)
    return not np.any(np.abs(now - before) > bound)

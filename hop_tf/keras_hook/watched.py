"""`Watch`: notices that a program assigns variables, in a training step or between two.

A callback, a custom loop, or a checkpoint may assign weights. A strategy that keeps a second copy of the weights would
silently undo the assignment.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence, Set

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
    "scatter_nd_update",
    "scatter_nd_add",
    "scatter_nd_sub",
    "scatter_nd_max",
    "scatter_nd_min",
    "_strided_slice_assign",  # `kernel[0:2].assign(...)`
    "_restore_from_tensors",
)
_WATCH = "_hop_tf_watch"
# The change that an undone assignment may leave behind, relative to the largest value.
UNDONE = 1e-4
ROUNDING = {tf.bfloat16: 0.03, tf.float16: 0.004}


class Watch:
    """Notes which of some variables the program assigns.

    A watched variable gets a subclass whose methods call the watch. That does not slow down a step. A `tf.function`
    that assigns a variable between two steps sets a flag each time it runs.

    Args:
      ignores_undone: True if a variable that gets its former value back, up to rounding, no longer counts as assigned.
        Assignments by a `tf.function` always count. Default False.
    """

    def __init__(self, *, ignores_undone: bool = False):
        self._ignores_undone = ignores_undone
        self._trace: weakref.ref[StepTrace] | None = None
        self._watched: dict[int, weakref.ref[tf.Variable]] = {}
        self._groups: weakref.WeakSet[WatchedGroup] = weakref.WeakSet()
        self._values: list[tuple[tf.Variable, tf.Tensor]] = []
        # Each with its value before the assignment, if undone assignments are ignored.
        self._assigned: dict[int, tuple[weakref.ref[tf.Variable], tf.Tensor | None]] = {}
        # For each variable that a `tf.function` assigns: a flag, true if the function has run since `forget`.
        self._in_functions: dict[int, tuple[weakref.ref[tf.Variable], tf.Variable]] = {}

    @property
    def trace(self) -> StepTrace | None:
        """The training step that is traced, or run eagerly; None between two steps."""
        trace = None if self._trace is None else self._trace()
        return None if trace is None or trace.has_ended else trace

    @trace.setter
    def trace(self, trace: StepTrace) -> None:
        self._trace = weakref.ref(trace)

    def add(self, variables: Sequence[tf.Variable]) -> WatchedGroup:
        """Watches variables from now on, as long as they live. Earlier assignments do not count."""
        self.listen(variables)
        self._watched.update({id(variable): _until_gone(self._watched, variable) for variable in variables})
        group = WatchedGroup(self, variables)
        self._groups.add(group)
        self._forget(set(group.keys))
        return group

    def listen(self, variables: Sequence[tf.Variable]) -> None:
        """Watches variables in training steps. A `tf.function` that assigns them between steps counts only after `add`.

        A `tf.function` is traced once, so the watch has to listen before a program traces the function.
        """
        for variable in variables:
            if getattr(variable, _WATCH, None) is None:
                variable.__class__ = _watched(type(variable))
            setattr(variable, _WATCH, self)

    def note(self, variable: tf.Variable) -> None:
        """Called when a variable is about to be assigned."""
        if own_updates.runs:
            return
        if (trace := self.trace) is not None:
            trace.note_assignment(variable)
        elif not tf.executing_eagerly():
            self._note_function(variable)
        elif id(variable) in self._watched:
            if not self._is_noted(id(variable)):
                before = variable.read_value() if self._ignores_undone else None
                self._assigned[id(variable)] = _until_gone(self._assigned, variable), before
            self._set_flags(variable)

    def _is_noted(self, key: int) -> bool:
        """True if a variable was assigned since `forget`, and its flags were not reset by a graph since then."""
        return key in self._assigned and all(bool(flags[index]) for flags, index in self._places(key))

    def note_value(self, variable: tf.Variable) -> None:
        """Called after a variable was assigned."""
        if not self._ignores_undone or own_updates.runs or not tf.executing_eagerly() or self.trace is not None:
            return
        _, before = self._assigned.get(id(variable), (None, None))
        if before is not None and _are_alike(variable.numpy(), before.numpy()):
            del self._assigned[id(variable)]
            self._set_flags(variable, is_assigned=False)

    def _note_function(self, variable: tf.Variable) -> None:
        with tf.init_scope():
            if not variable.is_initialized():
                return  # TensorFlow initializes a variable that a `tf.function` has created.
        if id(variable) not in self._in_functions:
            self._in_functions[id(variable)] = _until_gone(self._in_functions, variable), _make_flag(False)
        self._in_functions[id(variable)][1].assign(True)
        self._set_flags(variable)  # A graph that was traced earlier reads only these flags.

    def _set_flags(self, variable: tf.Variable, is_assigned: bool = True) -> None:
        for flags, index in self._places(id(variable)):
            flags.scatter_update(tf.IndexedSlices([is_assigned], [index]))

    def _places(self, key: int) -> list[tuple[tf.Variable, int]]:
        """The flags of each group that a variable belongs to, and the variable's index in them."""
        groups = [group for group in self._groups if group.has_flags and key in group.keys]
        return [(group.flags, group.keys.index(key)) for group in groups]

    def flags_of(self, keys: Iterable[int]) -> dict[int, tf.Variable]:
        """The flag of each of these watched variables that a `tf.function` assigns, by the variable's `id`."""
        if not self._in_functions:
            return {}
        return {key: self._in_functions[key][1] for key in keys if key in self._in_functions}

    def has_assigned(self, key: int) -> bool:
        """True if this variable was assigned since `forget`, outside of functions."""
        return key in self._assigned

    def assigned(self) -> list[tf.Variable]:
        """The watched variables that were assigned since `forget`."""
        if not self._assigned and not self._in_functions:
            return []
        watched = [self._in_functions[key] for key in self._watched.keys() & self._in_functions.keys()]
        in_functions = [each for each, flag in watched if bool(flag)]
        variables = [each() for each in (*(each for each, _ in self._assigned.values()), *in_functions)]
        return [each for each in variables if each is not None]

    def remember(self) -> None:
        """Keeps the present values for `changed`. Costs no memory until variables are assigned."""
        self._values = [(each(), each().read_value()) for each in self._watched.values() if each() is not None]

    def changed(self) -> list[tf.Variable]:
        """The variables that were assigned since `forget`, and have changed since `remember` by more than rounding.

        If a callback swaps weights with their averages, and swaps them back, the weights are not quite the same.
        """
        assigned, values, self._values = {id(each) for each in self.assigned()}, self._values, []
        return [v for v, before in values if id(v) in assigned and not _are_alike(v.numpy(), before.numpy())]

    def forget(self) -> None:
        """Forgets the assignments made so far: the scheme has handled them."""
        self._forget(self._watched.keys())

    def _forget(self, keys: Set[int]) -> None:
        for key in self._assigned.keys() & keys:
            del self._assigned[key]
        for group in self._groups:
            if group.has_flags and keys >= set(group.keys):
                group.flags.assign(tf.zeros_like(group.flags))
        for flag in self.flags_of(keys).values():
            flag.assign(False)


class WatchedGroup:
    """Watched variables whose assignments a scheme handles, or refuses, together.

    Attributes:
      keys: The `id`s of the variables, in their order.

    Args:
      watch: The watch of the variables.
      variables: The variables.
    """

    def __init__(self, watch: Watch, variables: Sequence[tf.Variable]):
        self._watch = watch
        self._variables = tuple(variables)  # As long as these live, no other object has the same `id`.
        self.keys = tuple(map(id, variables))

    @functools.cached_property
    def flags(self) -> tf.Variable:
        """For each variable, true if it was assigned since `forget`. Created when a graph first asks for it."""
        return _make_flag([self._watch.has_assigned(key) for key in self.keys])

    @property
    def has_flags(self) -> bool:
        """True if a graph has asked for the flags."""
        return "flags" in vars(self)

    def is_assigned(self) -> tf.Tensor:
        """Emits the ops that tell if at least one of the variables was assigned since `forget`."""
        of_functions = self._watch.flags_of(self.keys).values()
        return tf.reduce_any(tf.concat([self.flags, tf.stack(list(of_functions))], 0) if of_functions else self.flags)

    def are_assigned(self) -> tf.Tensor:
        """Emits the ops that tell, for each variable, if it was assigned since `forget`."""
        of_functions = self._watch.flags_of(self.keys)
        if not of_functions:
            return self.flags.read_value()
        return tf.logical_or(self.flags, tf.stack([of_functions.get(key, False) for key in self.keys]))

    def forget(self) -> None:
        """Emits the ops that reset the flags that `is_assigned` reads."""
        self.flags.assign(tf.zeros_like(self.flags))
        for flag in self._watch.flags_of(self.keys).values():
            flag.assign(False)


def _until_gone(kept: dict[int, object], variable: tf.Variable) -> weakref.ref[tf.Variable]:
    """A reference that removes the variable's entry from `kept` when the variable dies, because ids are reused."""
    key = id(variable)
    return weakref.ref(variable, lambda _: kept.pop(key, None))


def _make_flag(value: bool | Sequence[bool]) -> tf.Variable:
    with tf.init_scope(), tf.device("/cpu:0"):
        return tf.Variable(value, dtype=tf.bool, trainable=False, name="hop_tf_assigned")


@functools.cache
def _watched(kind: type) -> type:
    """A subclass of a class of variables. Its methods call the variable's watch."""
    methods = {name: _telling(name) for name in _CHANGING if hasattr(kind, name)}
    return type(kind.__name__, (kind,), {**methods, "__module__": kind.__module__, "__qualname__": kind.__qualname__})


def _telling(name: str) -> Callable:
    def method(self, *args, **kwargs):
        watch = getattr(self, _WATCH)
        watch.note(self)
        result = getattr(super(type(self), self), name)(*args, **kwargs)
        watch.note_value(self)
        return result

    return method


def _are_alike(now: np.ndarray, before: np.ndarray) -> bool:
    tolerance = ROUNDING.get(tf.as_dtype(before.dtype), UNDONE)
    now, before = (each.astype(np.float64) for each in (now, before))
    bound = tolerance * np.abs(before).max(initial=0, where=np.isfinite(before))
    return np.allclose(now, before, rtol=0, atol=bound, equal_nan=True)

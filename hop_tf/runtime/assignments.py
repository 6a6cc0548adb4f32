"""`Assignments`: refuses assignments to weights that a scheme would lose, because it keeps a second copy of them.

The second copy would silently overwrite the assigned weights.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Sequence

import tensorflow as tf

from hop_tf.keras_hook.branches import when
from hop_tf.keras_hook.trace import Assigned, StepTrace
from hop_tf.keras_hook.watched import ROUNDING, UNDONE, Watch, WatchedGroup
from hop_tf.runtime.algorithm import Algorithm, Scheme
from hop_tf.runtime.deltas import read_all

_TEXT = "weights were assigned"
_MOST_NAMES = 5


class Assignments:
    """Refuses assignments of a program that a scheme would lose. Does nothing under a scheme that keeps them all.

    Args:
      scheme: The scheme.
    """

    def __init__(self, scheme: Scheme):
        self._scheme = scheme
        self._hears = not scheme.takes_assignments or scheme.hears_of_assignments
        watches = self._hears or not scheme.keeps_assignments
        self._watch = Watch(ignores_undone=scheme.takes_assignments) if watches else None
        self._watched: weakref.WeakKeyDictionary[Algorithm, WatchedGroup] = weakref.WeakKeyDictionary()
        self._is_between_epochs = True

    def begin_step(self, trace: StepTrace, *, in_fit: bool) -> None:
        """Called when a step is traced, or run eagerly. `take_assigned` may need the weights before weight decay."""
        if self._watch is not None:
            self._watch.trace = trace
            trace.reads_before_decay = not in_fit and not self._scheme.takes_assignments

    def note_created(self, variable: tf.Variable) -> None:
        """Called when a variable that an optimizer may train was created in the scope."""
        if self._watch is not None:
            self._watch.listen([variable])

    def add(self, algorithm: Algorithm) -> None:
        """Watches the weights of a new group."""
        if self._hears and (variables := algorithm.watched()):
            self._watched[algorithm] = self._watch.add(variables)

    def begin_training(self) -> None:
        """Called when the scheme has taken over assignments made before a `fit`. Keeps weights as `end_epoch` does."""
        if self._watch is None:
            return
        self._watch.forget()
        if not self._scheme.takes_between_epochs:
            self._watch.remember()

    def end_fit(self) -> None:
        """Called when a `fit` has ended, even by an error in the middle of an epoch."""
        self._is_between_epochs = True

    def end_epoch(self) -> None:
        """Remembers the weights' values before callbacks may assign them, unless the scheme takes such assignments.

        Called before the scheme merges updates in flight, also if a callback evaluates the model within an epoch.
        Callbacks may evaluate again between two epochs. `leave_epoch_end` then checks their assignments.

        Raises:
          ValueError: If weights were assigned after a step: the merge would overwrite them.
        """
        if self._watch is None or self._is_between_epochs:
            return
        self.begin_batch()
        self._is_between_epochs = True
        if not self._scheme.takes_between_epochs:
            self._watch.remember()

    def leave_epoch_end(self, overwritten: Sequence[tf.Variable] = ()) -> None:
        """Called when an epoch begins, or the last one has ended.

        Args:
          overwritten: Weights whose assignments would not count on a single machine either.

        Raises:
          ValueError: If callbacks have changed weights since the end of the previous epoch, and the scheme does not
            take such changes.
        """
        if self._watch is None:
            return
        if self._scheme.takes_assignments:
            self._tell()
        if not self._scheme.takes_between_epochs:
            lost = {id(each): each for each in self._watch.changed()}
            for variable in overwritten:
                lost.pop(id(variable), None)
            self._refuse(list(lost.values()), "between two epochs, for example by a callback")
        self._watch.forget()

    def begin_batch(self) -> None:
        """Raises ValueError if weights were assigned between two steps of `fit`."""
        self._is_between_epochs = False
        self._tell()

    def _tell(self) -> None:
        if self._watch is None or not (assigned := self._watch.assigned()):
            return
        if self._scheme.takes_assignments:
            for algorithm in self._watched:
                algorithm.note_assigned(assigned)
        elif not all(algorithm.makes_way() for algorithm in self._watched):
            self._refuse(assigned, "between two training steps, for example by a callback")
        self._watch.forget()

    def end_loop(self) -> None:
        """Lets algorithms take the assignments of a custom loop after its last step. Called before they finish.

        Raises:
          ValueError: If an algorithm cannot take them: its second copy would overwrite these weights. A second call
            succeeds.
        """
        for algorithm, watched in self._watched.items():
            if not watched.is_assigned():
                continue
            are_assigned, trained = watched.are_assigned(), algorithm.group.trained
            watched.forget()
            if self._scheme.takes_assignments:
                algorithm.take_assigned(are_assigned, [])
            elif not (algorithm.makes_way() or algorithm.take_assigned(are_assigned, read_all(trained))):
                self._refuse(trained, "after the last training step, some of these")

    def check_step(self, algorithm: Algorithm, trace: StepTrace, *, in_fit: bool) -> None:
        """Emits the ops that fail if weights were assigned. Called right before the exchange of a step.

        Args:
          algorithm: The algorithm of the group that is about to exchange.
          trace: The step.
          in_fit: True for a step of `fit`. `begin_batch` then checks assignments between two steps.
        """
        if self._scheme.takes_assignments:
            if algorithm in self._watched and not in_fit:
                self._check_loop(algorithm, lambda: [])
            return
        trained = algorithm.group.trained
        assigned = trace.assigned_before_update(trained)
        if (assigned or not in_fit) and algorithm.makes_way():
            return
        self._check_before_update(assigned)
        if not in_fit:
            self._check_loop(algorithm, lambda: trace.before_decay(trained))

    def _check_before_update(self, assigned: Sequence[Assigned]) -> None:
        """Refuses assignments unless they are undone before the update, up to rounding.

        Sharpness-aware minimization undoes its assignments in this way.
        """
        error = self._describe([each.variable for each in assigned], "in a training step, before the update")
        for each in assigned:
            bound = ROUNDING.get(each.at_start.dtype, UNDONE) * tf.reduce_max(tf.abs(each.at_start))
            # Not <=: comparisons with nan are false, so that diverged training is not refused here.
            is_undone = tf.logical_not(tf.reduce_any(tf.abs(each.before_update - each.at_start) > bound))
            if not tf.executing_eagerly():
                tf.debugging.Assert(is_undone, [error])
            elif not is_undone:
                raise ValueError(error)

    def _check_loop(self, algorithm: Algorithm, read: Callable[[], Sequence[tf.Tensor]]) -> None:
        """Checks a custom loop in the graph, because only the graph knows when a step begins.

        Args:
          algorithm: The algorithm of the group.
          read: Emits the ops that read the weights for `Algorithm.take_assigned`.
        """
        watched = self._watched[algorithm]
        error = self._describe(algorithm.group.trained, "between two training steps, some of these") + self._advice

        def take_or_fail() -> None:
            with tf.device("/cpu:0"):
                are_assigned = watched.are_assigned()
            is_taken = algorithm.take_assigned(are_assigned, read())
            with tf.device("/cpu:0"), tf.control_dependencies([tf.debugging.Assert(is_taken, [error])]):
                watched.forget()

        with tf.device("/cpu:0"):
            is_assigned = watched.is_assigned()
        # Built into the step: if a function failed, the rest of the step would often be cancelled, and fail, before it.
        when(is_assigned, take_or_fail, usually=True)

    def _refuse(self, variables: Sequence[tf.Variable], when: str) -> None:
        if variables:
            raise ValueError(self._describe(variables, when) + self._advice)

    def _describe(self, variables: Sequence[tf.Variable], when: str) -> str:
        return (
            f"{_TEXT} {when}, on rank {self._scheme.rank}: {_names_of(variables)}. Under {type(self._scheme).__name__} "
            "these values would be lost, because merged weights are kept apart from the weights that a rank computes "
            "with. Use PipeSGDStrategy(pipeline_width=1), HopStrategy, DTSStrategy or CanaryStrategy."
        )

    @property
    def _advice(self) -> str:
        """The advice for callbacks and custom loops that assign weights between two steps."""
        if self._scheme.takes_between_epochs:
            return (
                " Or assign them in on_epoch_end or on_epoch_begin, on all ranks; in a custom loop, right after "
                "strategy.synchronize(model)."
            )
        return " Or assign them before `fit`, on rank 0: all ranks begin with its weights."


def refusal_in(error: tf.errors.OpError) -> str | None:
    """The text of the refusal that an operation has failed with; None if it has failed for another reason."""
    found = re.search(rf"assertion failed: \[({_TEXT}[^\]]*)\]", error.message)
    return None if found is None else found[1].replace("\\'", "'")


def refuse_assignments(scheme: Scheme, variables: Sequence[tf.Variable]) -> None:
    """Raises ValueError: a step has assigned these weights after their update."""
    raise ValueError(
        "a training step assigns weights after the optimizer has updated them, as by `weight.assign(...)`. Under "
        f"{type(scheme).__name__} these values would be lost, because updates are made again with values from other "
        "ranks, or on a server. Give the layer a constraint, as in Dense(8, "
        "kernel_constraint=keras.constraints.MaxNorm(1.0)). Or use HopStrategy, DTSStrategy, "
        "CanaryStrategy(consistency='bsp') or PipeSGDStrategy(pipeline_width=1). Received: an assignment to "
        f"{_names_of(variables)}."
    )


def _names_of(variables: Sequence[tf.Variable]) -> str:
    """The first few variables, for an error."""
    names = [repr(getattr(variable, "path", variable.name)) for variable in variables]
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more

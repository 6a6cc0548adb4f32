"""`Meeting`: the part of the graph in which synchronous ranks meet ranks that were started again."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from hop_tf.keras_hook.branches import when
from hop_tf.keras_hook.optimizers import tf_variables
from hop_tf.runtime.group import Group

_NEVER = -1  # Not 0: graphs may compare step 0 several times, if an update takes several batches.


class Meeting:
    """Gives newcomers the state, between two steps. Does nothing if the group's exchange admits no ranks.

    Args:
      group: The group, with an exchange that is a `LockStepJoiner`.
    """

    def __init__(self, group: Group):
        self._group = group
        self._at = None
        if group.exchange.admissions is not None:
            with tf.init_scope(), tf.device("/cpu:0"):
                self._at = tf.Variable(_NEVER, dtype=tf.int64, trainable=False, name="hop_tf_meet_at")

    def begin_session(self) -> None:
        """Forgets meetings of the previous session."""
        if self._at is not None:
            self._at.assign(_NEVER)

    def note(self, distances: tf.Tensor, step: tf.Tensor) -> None:
        """Emits the ops that record the distances that `Admissions.decide` has returned for a step."""
        distance = tf.cast(tf.reduce_max(distances), tf.int64)
        self._at.assign(tf.maximum(self._at, tf.where(distance > 0, step + distance, _NEVER)))

    def meet_if_due(self, settle: Callable[[], None] = lambda: None) -> None:
        """Emits, at the end of a step, the ops that meet newcomers if the next step is their first.

        Args:
          settle: Emits the ops that make the state equal on all ranks, with nothing in flight. Default: no ops, because
            the state is always equal.
        """
        if self._at is None:
            return
        group = self._group

        def meet() -> None:
            settle()
            self._at.assign(_NEVER)
            state = [*group.variables, *tf_variables(group.optimizer().variables)]
            group.meet([variable.read_value() for variable in state])

        with tf.device("/cpu:0"):
            is_due = tf.equal(group.step, self._at)
        when(is_due, meet)

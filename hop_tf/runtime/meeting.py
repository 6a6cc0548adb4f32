"""`meet_newcomers`: the part of the graph in which synchronous ranks meet ranks that were started again."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from hop_tf.keras_hook.optimizers import tf_variables
from hop_tf.runtime.group import Group


def meet_newcomers(group: Group, settle: Callable[[], None] = lambda: None) -> None:
    """Emits, at the end of a step, the ops that give newcomers the state if the next step is their first.

    Args:
      group: The group, with an exchange that is a `LockStepJoiner`.
      settle: Emits the ops that make the state equal on all ranks, with nothing in flight. Default: it always is.
    """
    admissions = group.exchange.admissions
    if admissions is None:
        return

    def meet() -> tf.Tensor:
        settle()
        admissions.meet_at.assign(0)
        state = [*group.variables, *tf_variables(group.optimizer().variables)]
        return group.meet([variable.read_value() for variable in state])

    with tf.device("/cpu:0"):
        is_due = tf.equal(group.step, admissions.meet_at)
    tf.cond(is_due, meet, lambda: tf.constant(0, tf.int64))

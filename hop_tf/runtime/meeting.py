"""`meet_newcomers`: what the graph does where ranks in lock step meet those that were started again."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from hop_tf.keras_hook.optimizers import tf_variables
from hop_tf.runtime.group import Group


def meet_newcomers(group: Group, settle: Callable[[], None] = lambda: None) -> None:
    """Emits, at the end of a step, what all ranks do before the first step of those that join: they give their state.

    Args:
      group: The group, with an exchange that is a `LockStepJoiner`.
      settle: Emits what makes the state equal on all ranks, and of nothing that is under way. Default: it is so anyhow.
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

"""Variables that are made while a step is traced."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

# The priority of the creator by which `tf.function` notices the variables that its function makes.
_TF_FUNCTION_PRIORITY = 50
_OWN = "hop_tf_"


def is_own(name: str | None) -> bool:
    """True if the name is that of a variable that a strategy keeps for itself: such names begin with `_OWN`."""
    return (name or "").startswith(_OWN)


def made_beside_the_trace() -> contextlib.AbstractContextManager:
    """A context in which a `tf.function` does not notice, while it is traced, variables that are created eagerly.

    A function that creates variables is traced twice, because their initial values may have to be lifted out of its
    graph. A step's variables (slots, metrics, a strategy's own variables) are created in `tf.init_scope`, with values
    that exist already. A second trace would change nothing, and would double the time until training begins.
    """
    return contextlib.nullcontext() if tf.executing_eagerly() else tf.variable_creator_scope(_make)


def _make(next_creator, **arguments: Any) -> tf.Variable:
    if not tf.executing_eagerly():
        return next_creator(**arguments)
    make = functools.partial(resource_variable_ops.default_variable_creator_v2, None)
    for priority, creator in tf.compat.v1.get_default_graph()._variable_creator_stack:
        if priority != _TF_FUNCTION_PRIORITY and creator is not _make:
            make = functools.partial(creator, make)
    return make(**arguments)

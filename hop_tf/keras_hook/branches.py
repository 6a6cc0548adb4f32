"""`when`: operations of a step that run only if a condition holds."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

# Functions with this attribute stay functions in the optimized graph.
_STAYS_A_FUNCTION = {"_noinline": True}


def when(
    condition: bool | tf.Tensor, emit: Callable[[], object], otherwise: Callable[[], object] | None = None
) -> None:
    """Emits operations that run if `condition` holds, and others that run if it does not.

    TensorFlow builds the operations of a `tf.cond` into the step. The step then visits all of them, even those that do
    not run. With many variables, these visits take as long as the step itself. Here a branch is a function, which costs
    nothing while it is not called. A call takes some 50 microseconds, so `tf.cond` is better for a few operations. With
    a GPU, branches are built into the step: a function's arguments would be copied to the GPU, and back if the host
    needs them.

    Args:
      condition: Bool scalar. If it is a Python bool, or if no graph is traced, only the branch that runs is emitted.
      emit: Emits the operations that run if `condition` holds.
      otherwise: Emits the operations that run if it does not. Default: none.
    """
    if isinstance(condition, bool):
        (emit if condition else otherwise or _nothing)()
    else:
        tf.cond(condition, _function(emit), _function(otherwise) if otherwise else _nothing)


def _nothing() -> None:
    """Emits nothing."""


def _function(emit: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        emit()

    if tf.executing_eagerly() or tf.config.list_logical_devices("GPU"):
        return run
    return tf.function(run, autograph=False, experimental_attributes=_STAYS_A_FUNCTION)

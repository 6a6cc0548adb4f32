"""`when`: operations of a step that run only if a condition holds."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

# Functions with this attribute stay functions in the optimized graph.
_STAYS_A_FUNCTION = {"_noinline": True}


def when(
    condition: bool | tf.Tensor,
    emit: Callable[[], object],
    otherwise: Callable[[], object] | None = None,
    *,
    usually: bool = False,
) -> None:
    """Emits operations that run if `condition` holds, and others that run if it does not.

    TensorFlow builds the operations of a `tf.cond` into the step. The step then visits all of them, even those that do
    not run. With many variables, these visits take as long as the step itself. A branch that usually does not run is a
    function here, which costs nothing while it is not called. A call takes some 50 microseconds, so `tf.cond` is better
    for a few operations. With a GPU, branches are built into the step: a function's arguments would be copied to the
    GPU, and back if the host needs them. Call this in the scope of the device that has the variables of the branches.

    Args:
      condition: Bool scalar. If it is a Python bool, or if no graph is traced, only the branch that runs is emitted.
      emit: Emits the operations that run if `condition` holds.
      otherwise: Emits the operations that run if it does not. Default: none.
      usually: True to build branches into the step: if the condition holds in most steps, or if a branch may fail. The
        error of a function may come after those of operations that it has cancelled. Default False.
    """
    if isinstance(condition, bool):
        (emit if condition else otherwise or _nothing)()
        return
    stays_a_function = not (usually or _has_gpu() or tf.executing_eagerly())
    branches = [_branch(each, stays_a_function) for each in (emit, otherwise or _nothing)]
    tf.cond(on_device(condition), *branches)


def on_device(condition: tf.Tensor) -> tf.Tensor:
    """Returns a condition for `tf.cond`, on the device of the present scope if that may be a GPU.

    A `tf.cond` begins where its condition is, after all earlier operations on the variables of its branches. If it
    began on the host, the host would wait for an event of the GPU for each variable.
    """
    return tf.identity(condition) if _has_gpu() else condition


def _has_gpu() -> bool:
    """True if TensorFlow sees a GPU."""
    return bool(tf.config.list_logical_devices("GPU"))


def _nothing() -> None:
    """Emits nothing."""


def _branch(emit: Callable[[], object], stays_a_function: bool) -> Callable[[], None]:
    def run() -> None:
        emit()

    if emit is _nothing or not stays_a_function:
        return run
    return tf.function(run, autograph=False, experimental_attributes=_STAYS_A_FUNCTION)

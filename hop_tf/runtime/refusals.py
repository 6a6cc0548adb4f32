"""What a program may not do under a scheme, and what it should do instead."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from hop_tf.keras_hook.optimizers import innermost, loss_scale
from hop_tf.keras_hook.shared_paths import has_callback
from hop_tf.keras_hook.trace import Assigned
from hop_tf.keras_hook.updates import follows_weights
from hop_tf.keras_hook.watched import ROUNDING, UNDONE, Watch
from hop_tf.runtime.scheme import Scheme

_MOST_NAMES = 5
_ASSIGNED = "weights were assigned"


def require_lock_step(scheme: Scheme, what: str) -> None:
    """Raises ValueError where ranks do not wait for each other; `what` was asked for, and takes that."""
    if not scheme.in_lock_step:
        name = type(scheme).__name__
        raise ValueError(
            f"{what} was asked for, as by `strategy.reduce`, `strategy.gather`, `all_reduce`, or a layer with "
            f"`synchronized=True`. Ranks would have to wait for the slowest of them, which {name} avoids. Use this "
            "rank's own value; outside of `fit`, `strategy.gather_reports(loss=float(loss))` brings all ranks' to "
            "rank 0. It works under PipeSGDStrategy, DTSStrategy, and Canary and SHAT with consistency='bsp'."
        )


def refuse_update(scheme: Scheme, optimizer) -> None:
    """Raises ValueError: a custom loop does not go through `run`, and would train on this rank alone."""
    raise ValueError(
        f"an optimizer made in the scope of {type(scheme).__name__} updated variables outside of "
        "`strategy.run`: nothing would be exchanged, and this rank would train alone. Run the training step by "
        "`strategy.run(train_step, args=(x, y))`, within a tf.function. An optimizer for this rank alone "
        "belongs in the scope of another strategy, such as tf.distribute.OneDeviceStrategy('/cpu:0'). "
        f"Received: an update by {type(optimizer).__name__}."
    )


def check_optimizer(scheme: Scheme, optimizer, *, refuses_nonfinite: bool) -> None:
    """Raises ValueError where what comes from other ranks would be gone with the optimizer's next update.

    So it does where values that are not finite are an error (`refuses_nonfinite`), but come up on purpose.
    """
    if refuses_nonfinite and loss_scale(optimizer) is not None:
        raise ValueError(
            "`on_nonfinite` must be 'warn' with a LossScaleOptimizer: gradients that overflow are how it finds its "
            "scale. Received: CommunicationOptions(on_nonfinite='raise')."
        )
    kind = type(innermost(optimizer))
    if scheme.mixes_weights and not follows_weights(kind):
        raise ValueError(
            f"{kind.__name__} computes weights anew from what it remembers, so that what "
            f"{type(scheme).__name__} brings from other ranks would be lost. Take another optimizer; or a "
            "strategy that averages gradients: PipeSGDStrategy, or CanaryStrategy(consistency='bsp')."
        )


def refuse_assignments(scheme: Scheme, variables: Sequence[tf.Variable]) -> None:
    """Raises ValueError if a step has assigned any weights after their update."""
    if variables:
        raise ValueError(
            "a training step assigns weights after the optimizer has updated them, as by `weight.assign(...)`. "
            f"Under {type(scheme).__name__} that would be lost: updates are made again with what comes from other "
            "ranks, or on a server. Give the layer a constraint, as in "
            "Dense(8, kernel_constraint=keras.constraints.MaxNorm(1.0)). Or take HopStrategy, DTSStrategy, "
            "CanaryStrategy(consistency='bsp') or PipeSGDStrategy(pipeline_width=1). "
            f"Received: an assignment to {_names_of(variables)}."
        )


def lost_assignments(scheme: Scheme, variables: Sequence[tf.Variable], when: str) -> str:
    """The error for weights that a program assigns, and that the scheme's second copy would take the place of.

    Args:
      scheme: The scheme.
      variables: What was assigned; or what may have been.
      when: When, for instance "between two training steps".
    """
    return (
        f"{_ASSIGNED} {when}: {_names_of(variables)}. Under {type(scheme).__name__} that would be lost: it "
        "keeps the weights of all ranks apart from those that a rank computes with. Take "
        "PipeSGDStrategy(pipeline_width=1), HopStrategy or DTSStrategy."
    )


def between_steps(scheme: Scheme) -> str:
    """What a callback or a custom loop can do under the scheme in the place of assignments between two steps."""
    if scheme.in_lock_step:
        return (
            " Or assign them in on_epoch_end or on_epoch_begin, on all ranks; in a custom loop, right after "
            "strategy.synchronize(model)."
        )
    return " Or assign them before `fit`, on rank 0: all ranks begin with its weights."


def refuse_between_steps(scheme: Scheme, variables: Sequence[tf.Variable]) -> None:
    """Raises ValueError if weights were assigned between two steps of `fit`."""
    if variables:
        error = lost_assignments(scheme, variables, "between two training steps, as by a callback")
        raise ValueError(error + between_steps(scheme))


def refuse_assigned(
    scheme: Scheme, watch: Watch, variables: Sequence[tf.Variable], take: Callable[[], tf.Tensor]
) -> None:
    """Emits the ops that fail if a custom loop has assigned weights between two steps.

    Args:
      scheme: The scheme.
      watch: Knows whether there was an assignment.
      variables: The weights that are watched.
      take: Emits what takes the assigned weights; returns False if that is not possible.
    """
    error = lost_assignments(scheme, variables, "between two training steps, some of these") + between_steps(scheme)

    def take_or_fail() -> tf.Tensor:
        is_taken = take()
        with tf.control_dependencies([tf.debugging.Assert(is_taken, [error])]):
            watch.flag.assign(False)
        return is_taken

    with tf.device("/cpu:0"):
        tf.cond(watch.flag, take_or_fail, lambda: tf.constant(True))


def refuse_before_update(scheme: Scheme, assigned: Sequence[Assigned]) -> None:
    """Emits the ops that fail if a step has assigned weights before their update, and not undone it; eagerly, raises.

    Perturbations that are taken back, as in sharpness-aware minimization, leave rounding behind.
    """
    error = lost_assignments(scheme, [each.variable for each in assigned], "in a training step, before the update")
    for each in assigned:
        bound = ROUNDING.get(each.at_start.dtype, UNDONE) * tf.reduce_max(tf.abs(each.at_start))
        # Not <=: a comparison with nan is false, and diverged training is another matter.
        is_undone = tf.logical_not(tf.reduce_any(tf.abs(each.before_update - each.at_start) > bound))
        if not tf.executing_eagerly():
            tf.debugging.Assert(is_undone, [error])
        elif not is_undone:
            raise ValueError(error)


def refusal_in(error: tf.errors.OpError) -> str | None:
    """The text of the refusal that an operation has failed with; None if it has failed by something else."""
    found = re.search(rf"assertion failed: \[({_ASSIGNED}[^\]]*)\]", error.message)
    return None if found is None else found[1].replace("\\'", "'")


def _names_of(variables: Sequence[tf.Variable]) -> str:
    names = [repr(getattr(variable, "path", variable.name)) for variable in variables]
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def refuse_to_restore(callbacks) -> None:
    """Raises ValueError where a callback would begin at a later epoch: then steps would not be the others'."""
    if has_callback(callbacks, keras.callbacks.BackupAndRestore):
        raise ValueError(
            "a rank that was started again takes its state from the others, and passes over the steps that it has "
            "missed: `BackupAndRestore` would begin at another step. Leave it out, or start all ranks again. "
            f"Received: callbacks={callbacks!r}."
        )

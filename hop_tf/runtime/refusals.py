"""Refusals of programs that a scheme cannot support, with advice."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import tensorflow as tf

from hop_tf.keras_hook.optimizers import innermost, loss_scale
from hop_tf.keras_hook.shared_paths import has_callback
from hop_tf.keras_hook.updates import follows_weights
from hop_tf.runtime.assignments import names_of
from hop_tf.runtime.scheme import Scheme


def require_lock_step(scheme: Scheme, what: str) -> None:
    """Raises ValueError if ranks do not wait for each other, as `what`, which was asked for, requires."""
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
    """Raises ValueError if the optimizer's next update would lose the values that come from other ranks.

    Also raises if values that are not finite are an error (`refuses_nonfinite`), but the optimizer makes them on
    purpose.
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
    """Raises ValueError: a step has assigned these weights after their update."""
    raise ValueError(
        "a training step assigns weights after the optimizer has updated them, as by `weight.assign(...)`. "
        f"Under {type(scheme).__name__} that would be lost: updates are made again with what comes from other "
        "ranks, or on a server. Give the layer a constraint, as in "
        "Dense(8, kernel_constraint=keras.constraints.MaxNorm(1.0)). Or take HopStrategy, DTSStrategy, "
        "CanaryStrategy(consistency='bsp') or PipeSGDStrategy(pipeline_width=1). "
        f"Received: an assignment to {names_of(variables)}."
    )


def refuse_to_restore(callbacks) -> None:
    """Raises ValueError if a callback would begin at a later epoch: its steps would differ from the others'."""
    if has_callback(callbacks, keras.callbacks.BackupAndRestore):
        raise ValueError(
            "a rank that was started again takes its state from the others, and passes over the steps that it has "
            "missed: `BackupAndRestore` would begin at another step. Leave it out, or start all ranks again. "
            f"Received: callbacks={callbacks!r}."
        )

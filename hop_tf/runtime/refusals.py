"""Refusals of programs that a scheme cannot support, with advice."""

from __future__ import annotations

import keras

from hop_tf.keras_hook.optimizers import innermost, loss_scale
from hop_tf.keras_hook.shared_paths import has_callback
from hop_tf.keras_hook.updates import follows_weights
from hop_tf.runtime.algorithm import Scheme


def require_lock_step(scheme: Scheme, what: str) -> None:
    """Raises ValueError if ranks do not wait for each other. `what` is the operation that needs such waits."""
    if not scheme.in_lock_step:
        name = type(scheme).__name__
        raise ValueError(
            f"the program asks for {what}, for example by `strategy.reduce`, `strategy.gather`, `all_reduce`, or a "
            f"layer with `synchronized=True`. Ranks would have to wait for the slowest rank, which {name} avoids. Use "
            "this rank's own value. Outside of `fit`, `strategy.gather_reports(loss=float(loss))` brings the values of "
            "all ranks to rank 0. Such calls work under PipeSGDStrategy, DTSStrategy, and Canary and SHAT with "
            "consistency='bsp'."
        )


def refuse_update(scheme: Scheme, optimizer) -> None:
    """Raises ValueError for an update outside of `strategy.run`: the custom loop would train this rank alone."""
    raise ValueError(
        f"an optimizer made in the scope of {type(scheme).__name__} updated variables outside of `strategy.run`, so "
        "this rank would train alone. Run the training step by `strategy.run(train_step, args=(x, y))`, within a "
        "tf.function. Create an optimizer for this rank alone in the scope of another strategy, such as "
        f"tf.distribute.OneDeviceStrategy('/cpu:0'). Received: an update by {type(optimizer).__name__}."
    )


def check_optimizer(scheme: Scheme, optimizer, *, refuses_nonfinite: bool) -> None:
    """Raises ValueError if the optimizer's next update would lose the values that come from other ranks.

    Also raises if values that are not finite are an error (`refuses_nonfinite`), but the optimizer makes them on
    purpose.
    """
    if refuses_nonfinite and loss_scale(optimizer) is not None:
        raise ValueError(
            "`on_nonfinite` must be 'warn' with a LossScaleOptimizer, because it finds its scale by gradients that "
            "overflow. Received: CommunicationOptions(on_nonfinite='raise')."
        )
    kind = type(innermost(optimizer))
    if scheme.mixes_weights and not follows_weights(kind):
        raise ValueError(
            f"{kind.__name__} recomputes weights from its own state, so the updates that {type(scheme).__name__} "
            "brings from other ranks would be lost. Use another optimizer, or a strategy that averages gradients: "
            "PipeSGDStrategy, or CanaryStrategy(consistency='bsp')."
        )


def refuse_to_restore(callbacks) -> None:
    """Raises ValueError if a callback would make `fit` begin at a later epoch than on the other ranks."""
    if has_callback(callbacks, keras.callbacks.BackupAndRestore):
        raise ValueError(
            "a restarted rank takes its state from the others, and skips the steps that it has missed. "
            "`BackupAndRestore` would begin at another step. Leave it out, or restart all ranks. Received: "
            f"callbacks={callbacks!r}."
        )

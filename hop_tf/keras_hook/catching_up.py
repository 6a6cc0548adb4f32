"""Holds back the callbacks of a restarted or late rank until the rank has caught up with the others.

Callbacks that take as long as the others' steps would keep the rank from catching up. They would also see metrics
without a value. For callbacks, the epoch in which the rank catches up begins with the first batch that the rank trains
on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras

from hop_tf.keras_hook.hooks import TrainingHooks
from hop_tf.keras_hook.shared_paths import flat_callbacks


@contextlib.contextmanager
def not_called_while_behind(callbacks: Any, hooks: TrainingHooks) -> Iterator[None]:
    """A context in which callbacks are not called for skipped batches, or for epochs in which all batches are skipped.

    Args:
      callbacks: The `callbacks` argument of `fit`.
      hooks: The hooks of the strategy. The session has begun.
    """
    with contextlib.ExitStack() as stack:
        is_needed = hooks.is_behind or hooks.may_fall_behind
        for callback in flat_callbacks(callbacks) if is_needed else ():
            if not isinstance(callback, keras.callbacks.History):
                calls = _Calls(callback, hooks)
                for name in ("on_epoch_begin", "on_train_batch_begin", "on_train_batch_end", "on_epoch_end"):
                    stack.enter_context(_replaced(callback, name, getattr(calls, name)))
        yield


@contextlib.contextmanager
def _replaced(callback: keras.callbacks.Callback, name: str, method: Callable) -> Iterator[None]:
    """Replaces a method of one callback. The callback may have the method as an attribute, as `LambdaCallback` does."""
    own = vars(callback).get(name)
    setattr(callback, name, method)
    try:
        yield
    finally:
        if own is None:
            delattr(callback, name)
        else:
            setattr(callback, name, own)


class _Calls:
    """Passes calls on to a callback, except those for skipped batches and epochs."""

    def __init__(self, callback: keras.callbacks.Callback, hooks: TrainingHooks):
        self._hooks = hooks
        self._begin_epoch = callback.on_epoch_begin
        self._begin_batch = callback.on_train_batch_begin
        self._end_batch = callback.on_train_batch_end
        self._end_epoch = callback.on_epoch_end
        self._untold: tuple | None = None  # The arguments of an `on_epoch_begin` that is not passed on yet.
        self._passes_over = True

    def on_epoch_begin(self, epoch, logs=None):
        self._untold = epoch, logs
        self._tell_epoch()

    def on_train_batch_begin(self, batch, logs=None):
        self._passes_over = self._hooks.is_behind
        self._tell_epoch()
        if not self._passes_over:
            self._begin_batch(batch, logs)

    def on_train_batch_end(self, batch, logs=None):
        if not self._passes_over:
            self._end_batch(batch, logs)

    def on_epoch_end(self, epoch, logs=None):
        if self._untold is None:
            self._end_epoch(epoch, logs)

    def _tell_epoch(self):
        if self._untold is not None and not self._hooks.is_behind:
            self._begin_epoch(*self._untold)
            self._untold = None

"""Updates of Keras's optimizers that a strategy makes itself."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from absl import logging
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from tensorflow.python.distribute import one_device_strategy

from hop_tf.keras_hook.branches import when
from hop_tf.keras_hook.optimizers import (
    assign_learning_rate,
    clipped,
    constrain,
    decays,
    gradient_accumulation_steps,
    innermost,
    keras_variables,
    learning_rate,
)
from hop_tf.tensors.finite import are_finite


class _OwnUpdates(threading.local):
    """Flags of this thread, set while `update` or `prepare_update` calls an optimizer. Hooks ignore such calls.

    Attributes:
      runs: True while the optimizer's update is a strategy's own.
      is_left_out: True while an optimizer does only what comes before its update.
    """

    runs = False
    is_left_out = False


own_updates = _OwnUpdates()


@contextlib.contextmanager
def as_own_updates() -> Iterator[None]:
    """A context in which this thread's updates are a strategy's own, and no part of a user's training step."""
    before, own_updates.runs = own_updates.runs, True
    try:
        yield
    finally:
        own_updates.runs = before


def update(
    optimizer: Any,
    gradients: Sequence[tf.Tensor],
    variables: Sequence[tf.Variable],
    rate: tf.Tensor | None = None,
) -> None:
    """Emits one complete update of some variables, as `optimizer.apply` makes it.

    The update includes decay, step, moving averages, constraints, and the count of steps. Gradients are neither scaled
    nor accumulated. For a `LossScaleOptimizer`, gradients must not be clipped yet: they are clipped here. If its
    gradients are not finite, the update is left out. No strategy's hooks see the update.

    Args:
      optimizer: The optimizer, built.
      gradients: One dense gradient for each variable.
      variables: Some of the variables that the optimizer updates.
      rate: The learning rate that replaces a constant one. Default: the optimizer's.
    """
    inner = innermost(optimizer)
    if inner is optimizer:
        _update(inner, gradients, variables, rate)
        return
    tf.cond(are_finite(gradients), lambda: _update(inner, clipped(inner, gradients), variables, rate), lambda: None)


def _update(
    inner: Any, gradients: Sequence[tf.Tensor], variables: Sequence[tf.Variable], rate: tf.Tensor | None
) -> None:
    own_rate = learning_rate(inner)
    if rate is not None:
        assign_learning_rate(inner, rate)
    _begin_update(inner, gradients, variables)
    if inner.use_ema:
        inner._update_model_variables_moving_average(inner._trainable_variables)
        if inner.ema_overwrite_frequency:
            is_due = tf.equal((inner.iterations + 1) % inner.ema_overwrite_frequency, 0)
            when(is_due, lambda: _overwrite_with_averages(inner))
    constrain(inner, variables)
    inner._iterations.assign_add(gradient_accumulation_steps(inner))
    if rate is not None:
        assign_learning_rate(inner, own_rate)


@functools.cache
def follows_weights(kind: type) -> bool:
    """True if optimizers of a class begin an update with the present weights.

    Ftrl does not: it computes weights anew from its slots, and loses values that came from other ranks. The test is an
    update of two weights that differ by 1, with equal gradients. It runs at once, even while a graph is traced.

    Args:
      kind: The class. The result is True if the test raises an error, as for a class that needs arguments.
    """
    with tf.init_scope(), as_own_updates(), _in_replica():
        # Named, because Keras numbers objects without a name: the test must not change the names of other objects.
        variable = keras.Variable([1.0, 2.0], name="tried")
        try:
            kind(name="tried").apply([tf.constant([0.1, 0.1])], [variable])
        except Exception as error:  # A user's optimizer may raise anything. Training will show if it works.
            logging.info("could not test the update rule of %s: %s: %s", kind.__name__, type(error).__name__, error)
            return True
        first, second = variable.numpy()
    return abs(second - first) > 0.5


def prepare_update(optimizer: Any, gradients: Sequence[tf.Tensor], variables: Sequence[tf.Variable]) -> None:
    """Emits the ops that `optimizer.apply` runs before it calls the hooks: decay, and Nadam's preparation of a step.

    Emits nothing for a `LossScaleOptimizer`, which does all of that after the hooks.
    """
    if innermost(optimizer) is not optimizer:
        return
    own_updates.is_left_out = True
    try:
        _begin_update(innermost(optimizer), gradients, variables)
    finally:
        own_updates.is_left_out = False


def decayed_values(optimizer: Any, variables: Sequence[tf.Variable]) -> list[tf.Tensor]:
    """The variables after decoupled weight decay, the first part of an update. For Keras's own optimizers."""
    values = [variable.read_value() for variable in variables]
    optimizer = innermost(optimizer)
    if optimizer.weight_decay is None:
        return values
    has_decay, rate = decays(optimizer, variables), learning_rate(optimizer)
    return [
        value - value * tf.cast(optimizer.weight_decay, value.dtype) * tf.cast(rate, value.dtype) if decay else value
        for value, decay in zip(values, has_decay, strict=True)
    ]


def _begin_update(optimizer: Any, gradients: Sequence[tf.Tensor], variables: Sequence[tf.Variable]) -> None:
    of_keras = keras_variables(optimizer)
    of_keras = [of_keras[id(variable)] for variable in variables]
    with as_own_updates(), _in_replica():
        optimizer._apply_weight_decay(of_keras)
        optimizer._backend_update_step(list(gradients), of_keras, optimizer.learning_rate)


@contextlib.contextmanager
def out_of_place(optimizer: Any) -> Iterator[None]:
    """Makes the optimizer's `assign_add` and `assign_sub` write to new memory.

    Strategies keep the values of variables from before an update. A variable shares its memory with the kept value, so
    an in-place update would first copy that memory. An optimizer that overrides these methods is left as it is.
    """
    kind = type(optimizer)
    if (kind.assign_add, kind.assign_sub) != (TFOptimizer.assign_add, TFOptimizer.assign_sub):
        yield
        return

    def assign_add(variable, value):
        if isinstance(value, tf.IndexedSlices):
            return type(optimizer).assign_add(optimizer, variable, value)
        return optimizer.assign(variable, variable + tf.cast(value, variable.dtype))

    def assign_sub(variable, value):
        if isinstance(value, tf.IndexedSlices):
            return type(optimizer).assign_sub(optimizer, variable, value)
        return optimizer.assign(variable, variable - tf.cast(value, variable.dtype))

    optimizer.assign_add, optimizer.assign_sub = assign_add, assign_sub
    try:
        yield
    finally:
        del optimizer.assign_add, optimizer.assign_sub


def _in_replica() -> contextlib.AbstractContextManager:
    """A replica context, which optimizers need even between two steps."""
    if tf.distribute.get_replica_context() is not None:
        return contextlib.nullcontext()
    return one_device_strategy._OneDeviceReplicaContext(tf.distribute.get_strategy())


def _overwrite_with_averages(optimizer: Any) -> None:
    for variable, average in zip(
        optimizer._trainable_variables, optimizer._model_variables_moving_average, strict=True
    ):
        variable.assign(average)

"""Wraps Keras's trainer, to observe the start and the end of `fit`, of its epochs, and of its validation."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import types
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer, TFEpochIterator
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.optimizers.loss_scale_optimizer import LossScaleOptimizer
from keras.src.trainers.trainer import Trainer
from tensorflow.python.distribute import distribute_lib

from hop_tf.keras_hook.backups import check_backups
from hop_tf.keras_hook.catching_up import not_called_while_behind
from hop_tf.keras_hook.context import Extended
from hop_tf.keras_hook.first_batch import build_from_first
from hop_tf.keras_hook.hooks import TrainingHooks
from hop_tf.keras_hook.optimizers import innermost, overwritten_by
from hop_tf.keras_hook.random_streams import wrap_random
from hop_tf.keras_hook.shuffling import shuffled_alike
from hop_tf.keras_hook.trace import has_no_call
from hop_tf.keras_hook.updates import own_updates


@functools.cache
def wrap_trainer() -> None:
    """Wraps Keras's `fit`, `evaluate` and `predict`, once. They change only for models under an `Extended`."""
    wrap_random()
    for name in ("fit", "evaluate", "predict"):
        setattr(TensorFlowTrainer, name, _wrapped(getattr(TensorFlowTrainer, name), is_fit=name == "fit"))
    Trainer.get_metrics_result = _wrapped_metrics(Trainer.get_metrics_result)
    TensorFlowTrainer._maybe_symbolic_build = _wrapped_build(TensorFlowTrainer._maybe_symbolic_build)
    TFEpochIterator.__init__ = _wrapped_iterator(TFEpochIterator.__init__)
    TFEpochIterator._enumerate_iterator = _wrapped_enumeration(TFEpochIterator._enumerate_iterator)
    TFOptimizer._backend_update_step = _wrapped_update(TFOptimizer._backend_update_step)
    for kind in (TFOptimizer, *filter(inspect.isclass, vars(keras.optimizers).values())):
        if "_apply_weight_decay" in vars(kind) and issubclass(kind, TFOptimizer):
            kind._apply_weight_decay = _wrapped_decay(kind._apply_weight_decay)
    BaseOptimizer.apply = _wrapped_apply(BaseOptimizer.apply)
    LossScaleOptimizer.apply = _applied_once(LossScaleOptimizer.apply)
    TFOptimizer._all_reduce_sum_gradients = _wrapped_all_reduce(TFOptimizer._all_reduce_sum_gradients)
    BaseOptimizer.finalize_variable_values = _wrapped_finalize(BaseOptimizer.finalize_variable_values)


# Strategies of several ranks that have not been shut down.
_clusters: weakref.WeakSet[tf.distribute.Strategy] = weakref.WeakSet()


def register_cluster(strategy: tf.distribute.Strategy) -> None:
    """Makes `fit` refuse models that were created under no strategy, from now on: users may forget the scope."""
    _clusters.add(strategy)


def forget_cluster(strategy: tf.distribute.Strategy) -> None:
    """Ends what `register_cluster` began."""
    _clusters.discard(strategy)


def _refuse_forgotten_scope(strategy: tf.distribute.Strategy, what: str) -> None:
    is_default = strategy is tf.distribute.get_strategy() and not tf.distribute.has_strategy()
    if is_default and (cluster := next(iter(_clusters), None)) is not None:
        raise ValueError(
            f"{what} was created outside of the scope of the {type(cluster).__name__} in use: it would train on this "
            "rank alone. Create it, or load it, within `strategy.scope()`. Compiling it there is not enough. To train "
            "it on this rank alone, create it in the scope of another strategy, such as "
            "tf.distribute.OneDeviceStrategy('/cpu:0')."
        )


class _Fits(threading.local):
    """The hooks of the strategies under which this thread runs a `fit`, the innermost last."""

    def __init__(self):
        self.hooks: list[TrainingHooks] = []


_fits = _Fits()


def _wrapped(method: Callable, is_fit: bool) -> Callable:
    signature = inspect.signature(method)

    @functools.wraps(method)
    def call(self, *args, **kwargs):
        strategy = self.distribute_strategy
        if not isinstance(strategy.extended, Extended):
            if is_fit:
                _refuse_forgotten_scope(strategy, "`fit` was called on a model that")
            return method(self, *args, **kwargs)
        hooks = strategy.extended.hooks
        bound = signature.bind(self, *args, **kwargs)
        given = bound.arguments
        if not is_fit:
            is_within_fit, is_evaluate = hooks in _fits.hooks, method.__name__ == "evaluate"
            if is_within_fit:
                hooks.end_epoch(self)
                if hooks.leaves_out_validation and is_evaluate and given.get("return_dict"):
                    return {}  # Other ranks' weights are about to replace these.
            is_validation = is_within_fit and is_evaluate
            with hooks.keras_call(), hooks.validation() if is_validation else contextlib.nullcontext():
                return method(self, *args, **kwargs)
        _adopt_optimizers(self, strategy)
        callbacks = given.get("callbacks")
        with (
            hooks.keras_call(),
            _fit(hooks, given.get("x"), callbacks),
            not_called_while_behind(callbacks, hooks),
            _between(callbacks, hooks, self) as extended,
        ):
            given["callbacks"] = extended
            check_backups(callbacks)
            with shuffled_alike(given, hooks.shuffle_seed), _undecorated(self):
                return method(*bound.args, **bound.kwargs)

    return call


def _adopt_optimizers(model: keras.Model, strategy: tf.distribute.Strategy) -> None:
    """Assigns `strategy` to the model's optimizers without a strategy, as from a `compile` outside of the scope."""
    for optimizer in [each for each in vars(model).values() if isinstance(each, BaseOptimizer)]:
        _adopt(optimizer, strategy)


def _adopt(optimizer: BaseOptimizer, strategy: tf.distribute.Strategy) -> None:
    """Assigns `strategy` to an optimizer that was created under no strategy.

    Otherwise TensorFlow refuses to create its slots in the scope: "Mixing different tf.distribute.Strategy objects".
    And Keras would add up gradients by itself, before the strategy does.
    """
    default = distribute_lib._get_default_strategy()
    for each in (optimizer, innermost(optimizer)):
        if each._distribution_strategy is default:
            each._distribution_strategy = strategy


@contextlib.contextmanager
def _undecorated(model: keras.Model) -> Iterator[None]:
    """Removes `@tf.function` from the model's `train_step`: `fit` compiles it, and nested functions must not update."""
    train_step = inspect.getattr_static(model, "train_step")
    if not isinstance(train_step, tf.types.experimental.PolymorphicFunction):
        yield
        return
    object.__setattr__(model, "train_step", types.MethodType(train_step.python_function, model))
    try:
        yield
    finally:
        object.__delattr__(model, "train_step")


class _First(keras.callbacks.Callback):
    """Tells a strategy that steps or an epoch have ended, before later callbacks see the model and the metrics."""

    async_safe = True  # Keras may read metrics late: this callback only counts steps.

    def __init__(self, hooks: TrainingHooks):
        super().__init__()
        self._hooks = hooks
        self._num_steps = 0  # Of the epoch, so far.
        self._logs: dict[str, Any] = {}  # Of the last epoch that has ended.

    def on_epoch_begin(self, epoch, logs=None):
        self._num_steps = 0

    def on_train_batch_end(self, batch, logs=None):
        self._num_steps = max(self._num_steps, batch + 1)  # Several threads may call this.
        self._hooks.end_batch(self._num_steps)

    def on_epoch_end(self, epoch, logs=None):
        self._hooks.end_epoch(self.model)
        self._hooks.average_metrics(logs, self._num_steps)
        self._logs = dict(logs)

    def on_train_end(self, logs=None):
        if logs:
            logs.update(self._logs)  # Keras passes this rank's own logs.


class _Last(keras.callbacks.Callback):
    """Tells a strategy that the callbacks before this one have run."""

    async_safe = True

    def __init__(self, hooks: TrainingHooks):
        super().__init__()
        self._hooks = hooks
        self._functions: dict[Hashable, Any] = {}  # The traced functions, by the keys of their graphs.

    def on_train_begin(self, logs=None):
        self._hooks.begin_training(self.model)

    def on_epoch_begin(self, epoch, logs=None):
        self._hooks.begin_epoch()

    def on_train_batch_begin(self, batch, logs=None):
        self._hooks.begin_batch()
        if (change := self._hooks.change_graph()) is not None:
            self._take_function(*change)
        if self.model.stop_training:
            self._hooks.ask_to_stop()

    def _take_function(self, before: Hashable, now: Hashable) -> None:
        """Makes Keras run another graph from now on. A graph that was not used before is traced."""
        self._functions[before] = self.model.train_function
        self.model.train_function = self._functions.get(now)
        self.model.make_train_function()

    def on_train_batch_end(self, batch, logs=None):
        if self.model.stop_training:
            self._hooks.ask_to_stop()

    def on_epoch_end(self, epoch, logs=None):
        self._hooks.agree_to_stop()


@contextlib.contextmanager
def _between(callbacks: Any, hooks: TrainingHooks, model: keras.Model) -> Iterator[Any]:
    """Yields the user's callbacks between `_First` and `_Last`."""
    first, last = _First(hooks), _Last(hooks)
    for each in (first, last):
        each.set_model(model)  # Keras sets the model of callbacks in a list, but not in a `CallbackList`.
    if not isinstance(callbacks, keras.callbacks.CallbackList):
        yield [first, *(tf.nest.flatten(callbacks) if callbacks is not None else ()), last]
        return
    callbacks.callbacks[:] = [first, *callbacks.callbacks, last]
    try:
        yield callbacks
    finally:
        callbacks.callbacks[:] = [each for each in callbacks.callbacks if each not in (first, last)]


@contextlib.contextmanager
def _fit(hooks: TrainingHooks, x: Any, callbacks: Any) -> Iterator[None]:
    with hooks.fit_session(x, callbacks):
        _fits.hooks.append(hooks)
        try:
            yield
        finally:
            _fits.hooks.pop()


def _wrapped_metrics(method: Callable) -> Callable:
    """Computes the metrics of a step once for all devices of the process."""

    @functools.wraps(method)
    def get_metrics_result(self):
        extended = self.distribute_strategy.extended
        return extended.of_process(lambda: method(self)) if isinstance(extended, Extended) else method(self)

    return get_metrics_result


def _wrapped_build(method: Callable) -> Callable:
    """Builds a model from the first batch, as Keras does under a strategy. A model without `call` is not called."""

    @functools.wraps(method)
    def build(self, iterator=None, data_batch=None):
        extended = self.distribute_strategy.extended
        if not isinstance(extended, Extended):
            method(self, iterator, data_batch)
        elif iterator is not None:
            build_from = None if has_no_call(self) else lambda batch: method(self, data_batch=batch)
            context, num_devices = extended.hooks.input_context, len(extended.worker_devices)
            build_from_first(build_from, iterator, self, context, num_devices, _rows_of_step(iterator))
        elif not has_no_call(self):
            method(self, data_batch=data_batch)

    return build


def _rows_of_step(iterator: TFEpochIterator) -> Callable[[Any], Any]:
    """A function that takes this rank's rows of a training batch. For validation and `predict`, it takes all rows."""
    hooks = iterator._hop_tf_trains
    return (lambda batch: batch) if hooks is None else hooks.own_rows


def _wrapped_iterator(method: Callable) -> Callable:
    """Reports the number of batches of the dataset that Keras creates, counts and distributes here."""

    @functools.wraps(method)
    def make(self, distribute_strategy=None, *args, **kwargs):
        method(self, distribute_strategy, *args, **kwargs)
        self._hop_tf_trains = None
        if isinstance(distribute_strategy.extended, Extended):
            hooks = distribute_strategy.extended.hooks
            is_first = hooks.count_batches(self._num_batches)
            self._hop_tf_trains = hooks if is_first and hooks in _fits.hooks else None

    return make


def _wrapped_enumeration(method: Callable) -> Callable:
    """Lets a strategy skip steps of an epoch, or end it. Callbacks cannot keep `fit` from making a step."""

    @functools.wraps(method)
    def enumerate_steps(self):
        steps = method(self)
        hooks = self._hop_tf_trains
        return steps if hooks is None else _until_stopped(steps, hooks, self)

    return enumerate_steps


def _until_stopped(steps: Iterator, hooks: TrainingHooks, epoch: TFEpochIterator) -> Iterator:
    size = epoch.steps_per_execution
    for step in steps:
        number = size if size == 1 else _size_of_execution(epoch)
        if not hooks.begin_steps(number):
            return
        *_, iterator = step
        if not hooks.pass_over(number, iterator.get_next):  # An OutOfRangeError ends the epoch, as a step's does.
            yield step


def _size_of_execution(epoch: TFEpochIterator) -> int:
    """The number of steps of the next execution: fewer than usual if the data has fewer batches left."""
    size, num_batches = epoch.steps_per_execution, epoch._num_batches
    num_before = epoch._steps_seen - size  # Keras counts full executions. `steps_per_epoch` shortens none of them.
    return min(size, num_batches - num_before) if num_batches else size


def _refuse_outside_step(optimizer: BaseOptimizer) -> None:
    strategy = optimizer._distribution_strategy
    if not isinstance(strategy.extended, Extended):
        _refuse_forgotten_scope(strategy, f"{type(optimizer).__name__}, which is asked for an update,")
    elif not strategy.extended.in_step:
        strategy.extended.hooks.refuse_update(optimizer)


def _wrapped_update(method: Callable) -> Callable:
    """Refuses updates outside of `run`: a custom loop with such updates would train this rank alone."""

    @functools.wraps(method)
    def update(self, *args, **kwargs):
        if not (own_updates.runs or own_updates.is_left_out):
            _refuse_outside_step(self)
        return method(self, *args, **kwargs)

    return update


def _wrapped_apply(method: Callable) -> Callable:
    @functools.wraps(method)
    def apply(self, *args, **kwargs):
        result = method(self, *args, **kwargs)
        if isinstance(self._distribution_strategy.extended, Extended):
            self._distribution_strategy.extended.note_update()
        return result

    return _applied_once(apply)


def _wrapped_decay(method: Callable) -> Callable:
    """Marks weight decay as a part of the update. Muon decays without a `merge_call` that would show it."""

    @functools.wraps(method)
    def decay(self, variables):
        extended = self._distribution_strategy.extended
        if own_updates.runs or not isinstance(extended, Extended):
            return method(self, variables)
        with extended.decaying(variables):
            return method(self, variables)

    return decay


def _applied_once(method: Callable) -> Callable:
    """Makes an optimizer apply gradients once for all devices of a process: the sums of their gradients."""

    @functools.wraps(method)
    def apply(self, grads, trainable_variables=None):
        strategy = tf.distribute.get_strategy()
        if isinstance(strategy.extended, Extended) and not tf.distribute.in_cross_replica_context():
            _adopt(self, strategy)  # A custom loop may have created it outside of the scope.
        extended = self._distribution_strategy.extended
        if not isinstance(extended, Extended):
            return method(self, grads, trainable_variables)
        variables = None if trainable_variables is None else list(trainable_variables)
        values = overwritten_by(innermost(self), variables)
        extended.apply_once(lambda sums: method(self, sums, variables), grads, values)

    return apply


def _wrapped_all_reduce(method: Callable) -> Callable:
    """Leaves out Keras's all-reduce, which would delay the first gradients. They are exchanged at the update."""

    @functools.wraps(method)
    def all_reduce(self, grads_and_vars):
        if isinstance(self._distribution_strategy.extended, Extended):
            return grads_and_vars
        return method(self, grads_and_vars)

    return all_reduce


def _wrapped_finalize(method: Callable) -> Callable:
    @functools.wraps(method)
    def call(self, *args, **kwargs):
        if _fits.hooks:
            _fits.hooks[-1].finish_training()
        return method(self, *args, **kwargs)

    return call

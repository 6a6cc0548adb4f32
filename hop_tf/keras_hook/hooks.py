"""`TrainingHooks`: the calls that a strategy gets while a model is trained."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Hashable
from typing import Any

import keras
import tensorflow as tf

from hop_tf.keras_hook.replicas import Replicas
from hop_tf.keras_hook.trace import StepTrace


class TrainingHooks(abc.ABC):
    """The calls that a strategy gets while its models are trained: `Extended.hooks`."""

    @abc.abstractmethod
    def fit_session(self, x: Any, callbacks: Any = None) -> contextlib.AbstractContextManager:
        """Surrounds `model.fit(x, callbacks=callbacks, ...)`."""

    @abc.abstractmethod
    def keras_call(self) -> contextlib.AbstractContextManager:
        """Surrounds `fit`, `evaluate` and `predict`."""

    @abc.abstractmethod
    def shard(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """This rank's part of a dataset that is to be distributed."""

    @abc.abstractmethod
    def own_rows(self, batch: Any) -> Any:
        """This rank's rows of the input of a model's `train_step`, if `shard` has left whole batches."""

    @abc.abstractmethod
    def take_whole(self, dataset: tf.data.Dataset) -> None:
        """Called with a dataset that is this rank's part already, so that ranks do not divide it again."""

    @property
    @abc.abstractmethod
    def is_inside_keras(self) -> bool:
        """True if `fit`, `evaluate` or `predict` runs."""

    @abc.abstractmethod
    def count_batches(self, number: int | None) -> bool:
        """Called after Keras distributed a dataset, with its number of batches, or None if Keras does not know it.

        Returns:
          True if that is the first dataset of a `fit`: the training data.
        """

    @property
    @abc.abstractmethod
    def num_loss_parts(self) -> int:
        """The number of partial losses whose gradients are added up; 1 if each rank has a whole loss."""

    @property
    @abc.abstractmethod
    def replicas(self) -> Replicas:
        """The numbers of the replicas of all ranks."""

    @property
    @abc.abstractmethod
    def shuffle_seed(self) -> int | None:
        """The seed for shuffles in the running `fit`; None if ranks may shuffle differently."""

    @property
    @abc.abstractmethod
    def input_context(self) -> tf.distribute.InputContext:
        """This rank among the input pipelines."""

    @abc.abstractmethod
    def enter_step(self, trace: StepTrace) -> None:
        """Called when `run(fn)` begins, before `fn`."""

    @abc.abstractmethod
    def exchange(self, optimizer: Any, trace: StepTrace, gradients: list, variables: list[tf.Variable]) -> list:
        """Called right before `optimizer` updates `variables`. Returns the gradients for the optimizer to apply."""

    @property
    @abc.abstractmethod
    def replaces_gradients(self) -> bool:
        """True if `exchange` may return other gradients. Otherwise it returns them unchanged."""

    @abc.abstractmethod
    def note_created(self, variable: tf.Variable) -> None:
        """Called after a variable that an optimizer may train was created in the scope."""

    @abc.abstractmethod
    def refuse_update(self, optimizer: Any) -> None:
        """Called when `optimizer`, which was created in the scope, updates variables outside of `run`. May raise."""

    @abc.abstractmethod
    def reduce(self, reduce_op: tf.distribute.ReduceOp, value: Any) -> Any:
        """The sum or mean of each rank's `value`, a tensor or a structure of them."""

    @abc.abstractmethod
    def gather(self, value: Any, axis: Any) -> Any:
        """Each rank's `value`, a tensor or a structure of them, concatenated along `axis`."""

    @abc.abstractmethod
    def after_update(self, optimizer: Any, trace: StepTrace, variables: list[tf.Variable]) -> None:
        """Called right after `optimizer` has updated `variables`. Follows every `exchange`."""

    @abc.abstractmethod
    def around_step(self, step: Callable[[], Any], arguments: Any, model: keras.Model) -> Any:
        """Called with a model's whole `train_step`, from `enter_step` to `leave_step`. Runs the step or skips it."""

    @property
    @abc.abstractmethod
    def is_behind(self) -> bool:
        """True if `fit` skips steps now, because this rank has yet to catch up with the others."""

    @property
    @abc.abstractmethod
    def leaves_out_validation(self) -> bool:
        """True if `fit` leaves out this epoch's validation: the rank is catching up, or made no step in this epoch."""

    @property
    @abc.abstractmethod
    def may_fall_behind(self) -> bool:
        """True if the others may continue without this rank, which then skips steps until it has caught up."""

    @abc.abstractmethod
    def leave_step(self, trace: StepTrace) -> None:
        """Called when `fn` has returned."""

    @abc.abstractmethod
    def begin_training(self, model: keras.Model) -> None:
        """Called when `fit` is about to make the first step of `model`, after the callbacks' `on_train_begin`."""

    @abc.abstractmethod
    def begin_epoch(self) -> None:
        """Called when an epoch of `fit` is about to begin, after the callbacks' `on_epoch_begin`."""

    @abc.abstractmethod
    def end_batch(self, num_steps: int) -> None:
        """Called when `fit` has made steps, before the callbacks. `num_steps` counts the epoch's steps so far."""

    @property
    @abc.abstractmethod
    def num_rows(self) -> tf.Tensor | None:
        """The weight of the traced step in sums over ranks: its number of rows. None if all ranks weigh the same."""

    @abc.abstractmethod
    def end_epoch(self, model: keras.Model) -> None:
        """Called when `fit` has made the last step of an epoch, before validation and callbacks. May be called twice.

        Args:
          model: The trained model, or a model that is about to `evaluate` or `predict` within `fit`. `evaluate` then
            resets the metrics of that model.
        """

    @abc.abstractmethod
    def begin_steps(self, number: int) -> bool:
        """Called when `fit` is about to take data for `number` steps. Returns False if `fit` must end before these."""

    @abc.abstractmethod
    def pass_over(self, number: int, take: Callable[[], Any]) -> bool:
        """If this rank skips the next steps, takes their data and returns True. Called after `begin_steps`.

        Args:
          number: Number of steps.
          take: Takes the data of one step. Raises `tf.errors.OutOfRangeError` if none is left.
        """

    @abc.abstractmethod
    def ask_to_stop(self) -> None:
        """Called when a callback has stopped the training within an epoch. May let training go on for some steps."""

    @abc.abstractmethod
    def agree_to_stop(self) -> None:
        """Called after the callbacks' `on_epoch_end`. May stop the training."""

    @abc.abstractmethod
    def begin_batch(self) -> None:
        """Called when `fit` is about to run a step, or several, after the callbacks' `on_train_batch_begin`."""

    @abc.abstractmethod
    def change_graph(self) -> tuple[Hashable, Hashable] | None:
        """Called after `begin_batch`.

        Returns:
          None to keep the training step's graph. Otherwise the keys of two graphs: the one used so far, and the one to
          use from now on.
        """

    @abc.abstractmethod
    def validation(self) -> contextlib.AbstractContextManager:
        """Surrounds `evaluate` within `fit`."""

    @abc.abstractmethod
    def average_metrics(self, logs: dict[str, Any], num_steps: int) -> None:
        """Called once with an epoch's metrics, before the callbacks. May change the metrics.

        Args:
          logs: The metrics, those of validation included.
          num_steps: Number of steps of the epoch, which may have been aborted. An execution of several steps counts in
            full.
        """

    @abc.abstractmethod
    def finish_training(self) -> None:
        """Called when `fit` has made its last step, before the variables get their final values."""

"""`StepSkipping`: skips training steps. Their batches are consumed, and nothing is computed.

So a rank that jumps over iterations ends its epochs with the others, and Keras sees as many steps as it asked for. The
same holds for a restarted rank that joins the others at their present step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from hop_tf.keras_hook.optimizers import gradient_accumulation_steps, iterations_variable, tf_variables
from hop_tf.keras_hook.trace import when_here


class StepSkipping:
    """Puts a condition around training steps.

    A skipped step advances the optimizer's iterations, which schedules follow. It returns the results of the last step
    that was made, so that metrics do not change. Metrics are nan until a step of the epoch is made. A restarted rank
    joins the others in the middle of an epoch. Its metrics of this epoch cover only the steps that it has made.

    Args:
      why: A sentence for errors: the reason for skipping steps, and a way to avoid it.
    """

    def __init__(self, why: str):
        self._why = why
        with tf.init_scope(), tf.device("/cpu:0"):
            self._num_left = tf.Variable(0, dtype=tf.int64, trainable=False, name="hop_tf_steps_to_skip")
            self._is_behind = tf.Variable(False, trainable=False, name="hop_tf_is_behind")
            self._has_no_metrics = tf.Variable(False, trainable=False, name="hop_tf_has_no_metrics")
        self._catch_up: Callable[[Any], tf.Tensor] | None = None
        self._takes_count = False
        self._passes_over_first = False
        self._optimizer: Any = None  # Of the step that was traced last.
        self._metrics: list[tf.Variable] = []
        self._outputs: _Outputs | None = None
        self._variables: dict[tuple, tf.Variable] = {}

    @property
    def has_no_metrics(self) -> bool:
        """True if all steps since the metrics were reset were skipped."""
        return bool(self._has_no_metrics)

    @property
    def is_behind(self) -> bool:
        """True if this rank skips steps until it has caught up with the others."""
        return bool(self._is_behind)

    def begin_session(self) -> None:
        """Forgets the steps that were left to skip when the last session ended."""
        self._num_left.assign(0)
        self._is_behind.assign(False)

    def note(self, optimizer: Any, *, in_fit: bool) -> None:
        """Called with the optimizer of the step that is being traced. `in_fit` is True for a step of `fit`.

        Raises:
          ValueError: If the step cannot be skipped: it is no step of `fit`, or it uses several optimizers.
        """
        if not in_fit:
            raise ValueError(
                f"{self._why} Only `fit` can skip steps; a custom loop and `train_on_batch` cannot. Train with `fit`, "
                "with a train_step of your own if needed."
            )
        if self._optimizer not in (None, optimizer):
            raise ValueError(
                f"{self._why} So a step must use one optimizer only, because several optimizers would skip different "
                f"steps. Received: {type(self._optimizer).__name__} and {type(optimizer).__name__} in one step."
            )
        self._optimizer = optimizer

    def let_catch_up(self, catch_up: Callable[[Any], tf.Tensor], *, takes_count: bool = False) -> None:
        """Called before the first step of a rank that may have to catch up: see `fall_behind`.

        Args:
          catch_up: Function of the optimizer. It emits ops that return the number of updates to skip next, an int64
            scalar, and that may change any variable.
          takes_count: True if the optimizer keeps the iterations that `catch_up` has assigned. Default False: the
            optimizer's iterations advance by the skipped steps.
        """
        self._catch_up = catch_up
        self._takes_count = takes_count

    def fall_behind(self) -> None:
        """Skips the rest of an update. Then skips as many updates as `catch_up` returns, until it returns 0.

        Called between two steps, which may belong to the same update, and after `let_catch_up`.
        """
        size = gradient_accumulation_steps(self._optimizer)
        self._num_left.assign(size - int(iterations_variable(self._optimizer)) % size)
        self._is_behind.assign(True)

    def begin_by_skipping(self, catch_up: Callable[[Any], tf.Tensor], *, takes_count: bool = False) -> None:
        """Does the same as `let_catch_up` and `fall_behind`, in a rank that has not made any step."""
        self.let_catch_up(catch_up, takes_count=takes_count)
        self._passes_over_first = True
        with tf.init_scope():  # Once, now: a graph would do it in every step.
            self._is_behind.assign(True)

    def skip(self, num_updates: tf.Tensor) -> None:
        """Emits the op that skips the steps of the next `num_updates` updates."""
        with tf.device("/cpu:0"):
            self._num_left.assign(num_updates * gradient_accumulation_steps(self._optimizer))

    def run(self, step: Callable[[], Any], arguments: Any, model: keras.Model) -> Any:
        """Emits `step`, or runs it eagerly, unless it is to be skipped. Returns its results.

        Args:
          step: The step.
          arguments: Its arguments. If no data is left, no step is counted as skipped.
          model: The model that it trains.
        """
        self._metrics = tf_variables(*(metric.variables for metric in model.metrics))
        if self._catch_up is not None and tf.executing_eagerly():
            raise ValueError(
                "`run_eagerly` must be False for a rank that joins a running job after a restart, and with "
                "`patience_seconds`."
            )
        with when_here(arguments):
            # In a graph both branches are traced, the step first: the other branch needs the results' structure.
            outputs = tf.cond(self._has_none_left(), lambda: self._take(step), self._pass_over)
        if self._passes_over_first:
            self._passes_over_first = False
            with tf.init_scope():
                self.skip(tf.constant(1, tf.int64))
        return self._outputs.unflatten(outputs)

    def _take(self, step: Callable[[], Any]) -> list[tf.Tensor]:
        self._optimizer = None
        tf.cond(self._has_no_metrics, lambda: self._fill_metrics(0.0, has_none=False), lambda: None)
        structure = step()
        leaves = tf.nest.flatten(structure, expand_composites=True)
        tensors = [tf.convert_to_tensor(leaf) for leaf in leaves if leaf is not None]
        self._outputs = _Outputs(structure, leaves, tensors, [self._kept(i, each) for i, each in enumerate(tensors)])
        return tensors

    def _kept(self, index: int, tensor: tf.Tensor) -> tf.Variable | None:
        """A variable with the value of the step's output `index`; None if its shape depends on the batch."""
        if not tensor.shape.is_fully_defined():
            return None
        # A function that is traced again must not create variables.
        key = index, tensor.dtype, tuple(tensor.shape)
        if key not in self._variables:
            with tf.init_scope(), tf.device("/cpu:0"):
                value = tf.fill(
                    tensor.shape, tf.constant(float("nan") if tensor.dtype.is_floating else 0, tensor.dtype)
                )
                self._variables[key] = tf.Variable(value, trainable=False, name="hop_tf_last_output")
        self._variables[key].assign(tensor)
        return self._variables[key]

    def _has_none_left(self) -> tf.Tensor:
        with tf.device("/cpu:0"):
            return self._num_left <= 0

    def _pass_over(self) -> list[tf.Tensor]:
        self._num_left.assign_sub(1)
        iterations = iterations_variable(self._optimizer)
        iterations.assign_add(1)
        if self._catch_up is not None:
            tf.cond(self._is_behind, lambda: self._fill_metrics(math.nan, has_none=True), lambda: None)
            tf.cond(self._has_none_left(), lambda: self._skip_on(iterations), lambda: None)
        if self._metrics:
            are_reset = tf.reduce_all([tf.reduce_all(tf.equal(variable, 0)) for variable in self._metrics])
            tf.cond(are_reset, lambda: self._fill_metrics(math.nan, has_none=True), lambda: None)
        return self._outputs.recall()

    def _skip_on(self, iterations: tf.Variable) -> None:
        num_passed = iterations.read_value()
        num_updates = self._catch_up(self._optimizer)
        self.skip(num_updates)
        self._is_behind.assign(num_updates > 0)
        if self._takes_count:
            return
        with tf.control_dependencies([num_updates]):
            iterations.assign(num_passed)  # `catch_up` may have assigned another rank's count.

    def _fill_metrics(self, value: float, *, has_none: bool = False) -> None:
        """Sets all floating-point metric states to a value. With `has_none`, the next step that runs resets them to 0.

        Integers cannot be nan. For these, `fit` puts nan into the logs of the epoch.
        """
        self._has_no_metrics.assign(has_none)
        for variable in [each for each in self._metrics if each.dtype.is_floating]:
            variable.assign(tf.fill(variable.shape, tf.constant(value, variable.dtype)))


@dataclasses.dataclass(frozen=True)
class _Outputs:
    """The results of the step that was traced last.

    Attributes:
      structure: The step's result.
      leaves: The leaves of the structure.
      tensors: The leaves that are not None, as tensors.
      kept: For each tensor, a variable that keeps its last value, or None.
    """

    structure: Any
    leaves: Sequence[Any]
    tensors: Sequence[tf.Tensor]
    kept: Sequence[tf.Variable | None]

    def recall(self) -> list[tf.Tensor]:
        """Emits the ops that return the kept tensors again. Tensors that were not kept are empty."""
        return [
            _empty(tensor) if variable is None else variable.read_value()
            for variable, tensor in zip(self.kept, self.tensors, strict=True)
        ]

    def unflatten(self, tensors: Sequence[tf.Tensor]) -> Any:
        """The structure of the step's result, with these tensors in it."""
        remaining = iter(tensors)
        leaves = [None if leaf is None else next(remaining) for leaf in self.leaves]
        return tf.nest.pack_sequence_as(self.structure, leaves, expand_composites=True)


def _empty(tensor: tf.Tensor) -> tf.Tensor:
    sizes = tensor.shape.as_list() if tensor.shape.rank is not None else [0]
    return tf.zeros([size or 0 for size in sizes], tensor.dtype)

"""`StepSkipping`: training steps that are passed over. Their batches are consumed, and nothing is computed.

So a rank that jumps over iterations ends its epochs with the others, and Keras sees as many steps as it asked for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from hop_tf.keras_hook import gradient_accumulation_steps, iterations_variable, when_here


class StepSkipping:
    """Puts a condition around training steps.

    A step that is passed over advances the optimizer's iterations, which schedules go by, and returns what the last
    one before returned: metrics stand still.
    """

    def __init__(self):
        with tf.init_scope(), tf.device("/cpu:0"):
            self._num_left = tf.Variable(0, dtype=tf.int64, trainable=False, name="hop_tf_steps_to_skip")
        self._optimizer: Any = None  # Of the step that was traced last.
        self._outputs: _Outputs | None = None
        self._variables: dict[tuple, tf.Variable] = {}

    def note(self, optimizer: Any, model: keras.Model | None) -> None:
        """The step that is being traced updates by `optimizer`.

        Raises:
          ValueError: If it cannot be passed over: it is a custom loop's, or it updates by several optimizers.
        """
        if model is None:
            raise ValueError(
                "iterations can be skipped under `fit` only: the steps of a custom loop cannot be passed over. Train "
                "with `fit`, with a train_step of your own if need be, or without skipping."
            )
        if self._optimizer not in (None, optimizer):
            raise ValueError(
                "iterations can be skipped where a step updates by one optimizer only: several would skip differently. "
                f"Received: {type(self._optimizer).__name__} and {type(optimizer).__name__} in one step."
            )
        self._optimizer = optimizer

    def skip(self, num_updates: tf.Tensor) -> None:
        """Emits the op that passes over the steps of the next `num_updates` updates."""
        self._num_left.assign(num_updates * gradient_accumulation_steps(self._optimizer))

    def run(self, step: Callable[[], Any], arguments: Any) -> Any:
        """Emits `step`, or runs it eagerly, unless it is to be passed over; returns what it returns.

        Args:
          step: The step.
          arguments: What it works on: where no data is left, nothing is passed over.
        """
        with when_here(arguments):
            # In a graph both branches are traced, the step first, so that its results are known when the other is.
            outputs = tf.cond(self._num_left <= 0, lambda: self._take(step), self._pass_over)
        return self._outputs.unflatten(outputs)

    def _take(self, step: Callable[[], Any]) -> list[tf.Tensor]:
        self._optimizer = None
        structure = step()
        leaves = tf.nest.flatten(structure, expand_composites=True)
        tensors = [tf.convert_to_tensor(leaf) for leaf in leaves if leaf is not None]
        self._outputs = _Outputs(structure, leaves, tensors, [self._kept(i, each) for i, each in enumerate(tensors)])
        return tensors

    def _kept(self, index: int, tensor: tf.Tensor) -> tf.Variable | None:
        """A variable with the value of the step's output `index`; None where its shape depends on the batch."""
        if not tensor.shape.is_fully_defined():
            return None
        # A function that is traced again must not make new ones.
        key = index, tensor.dtype, tuple(tensor.shape)
        if key not in self._variables:
            with tf.init_scope(), tf.device("/cpu:0"):
                zeros = tf.zeros(tensor.shape, tensor.dtype)
                self._variables[key] = tf.Variable(zeros, trainable=False, name="hop_tf_last_output")
        self._variables[key].assign(tensor)
        return self._variables[key]

    def _pass_over(self) -> list[tf.Tensor]:
        self._num_left.assign_sub(1)
        iterations_variable(self._optimizer).assign_add(1)
        return self._outputs.recall()


@dataclasses.dataclass(frozen=True)
class _Outputs:
    """What a step returned last.

    Attributes:
      structure: As the step returned it.
      leaves: What is in it.
      tensors: Those leaves that are not None.
      kept: A variable for each tensor, or None.
    """

    structure: Any
    leaves: Sequence[Any]
    tensors: Sequence[tf.Tensor]
    kept: Sequence[tf.Variable | None]

    def recall(self) -> list[tf.Tensor]:
        """Emits the ops that give the tensors again; those that were not kept, empty."""
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

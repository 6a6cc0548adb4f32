"""DTS as in its paper: means correct the velocity of SGD, too.

Distributed Training across the World. 2019. Equations 7 to 13. SGD with momentum m moves weights w and velocity v even
without gradients: they coast. In k such steps

    w  <-  w + f(k) v        f(k) = m + m^2 + ... + m^k, with Nesterov's momentum m f(k)
    v  <-  m^k v

Gradients add to that, and weights and velocity depend on gradients linearly. So the changes that a window's gradients
cause can be replaced D steps later: the correction coasts for these D steps.

    window ends:     own change of (w, v)  =  (w, v)  -  (w, v) at the window's start, which have coasted since
    D steps later:   (w, v)  <-  (w, v)  +  (mean change - own change), which has coasted for D steps

If gradients do not depend on weights, the result is that of synchronous training, for any D, p, and learning rates. The
paper's formulas have errors: in Equations 7 and 10 gradients coast one step too far in the velocity. Equation 13 has
m^D in the weights, but Equation 8 has a sum of powers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hop_tf.keras_hook.branches import when
from hop_tf.keras_hook.optimizers import Descent, descent_of, innermost, weight_decays
from hop_tf.runtime.deltas import read_all
from hop_tf.runtime.outer_optimizer import OuterOptimizer
from hop_tf.strategies.dts.algorithm import DTSAlgorithm
from hop_tf.strategies.dts.windows import Schedule
from hop_tf.tensors.packing import TensorSpec


def velocity_specs(trained: Sequence[tf.Variable]) -> list[TensorSpec]:
    """The tensors in which changes of velocities are sent."""
    return [TensorSpec(f"hop_tf/velocity_{i}", tuple(v.shape), v.dtype) for i, v in enumerate(trained)]


def checked_descent(optimizer: Any, trained: Sequence[tf.Variable]) -> Descent:
    """The rule by which an optimizer updates variables. Raises ValueError if velocities cannot be corrected."""
    descent = descent_of(optimizer, trained)
    is_plain = descent is not None and 0 < descent.momentum < 1 and not any(weight_decays(optimizer, trained))
    if not is_plain or min(variable.dtype.size for variable in trained) < 4:
        inner, dtypes = innermost(optimizer), sorted({variable.dtype.name for variable in trained})
        settings = ", ".join(f"{name}={getattr(inner, name, None)!r}" for name in ("momentum", "weight_decay"))
        raise ValueError(
            "`compensation` must not be 'momentum' unless the optimizer is keras.optimizers.SGD, with a momentum above "
            "0 and below 1, and without weight_decay. Variables must have 32 bits at least. Take 'gentle' for others. "
            f"Received: compensation='momentum', {type(inner).__name__}, {settings}, variables of {', '.join(dtypes)}."
        )
    return descent


class MomentumOuterOptimizer(OuterOptimizer):
    """`OuterOptimizer` of weights and their velocities.

    Merged values coast, and so do the values from which changes are counted.

    Args:
      descent: The result of `checked_descent`.
      variables: See `OuterOptimizer`, without the velocities. In changes and means, velocities follow these.
      values: See `OuterOptimizer`.
      num_trained: See `OuterOptimizer`.
      max_newer: See `OuterOptimizer`.

    Attributes:
      descent: As given.
    """

    def __init__(
        self,
        descent: Descent,
        variables: Sequence[tf.Variable],
        values: Sequence[tf.Tensor],
        *,
        num_trained: int,
        max_newer: int,
    ):
        with tf.init_scope():
            velocities = read_all(descent.velocities)
            with tf.device("/cpu:0"):
                self._age = tf.Variable(0, dtype=tf.int64, trainable=False, name="hop_tf_age")
        self.descent = descent
        super().__init__(
            [*variables, *descent.velocities],
            [*values, *velocities],
            num_trained=num_trained,
            max_newer=max_newer + 1,  # `apart` reads the window that is merged, too.
        )

    def begin_with(self, merged: Sequence[np.ndarray]) -> None:
        super().begin_with(merged)
        self._age.assign(0)

    def begin(self) -> None:
        super().begin()
        self._age.assign(0)

    def count_step(self) -> None:
        """Emits the op that counts a step of the optimizer."""
        with tf.device("/cpu:0"):
            self._age.assign_add(1)

    def take(
        self, choose: Callable[[list[tf.Tensor]], list] | None = None, assigned: tf.Tensor | None = None
    ) -> list[tf.Tensor]:
        self._let_known_coast()
        return super().take(choose, assigned)

    def let_merged_coast(self, num_steps: int | tf.Tensor) -> None:
        """Emits the ops that let the merged values coast by the steps of the window that is merged next."""
        for index, value in self._coasted(read_all(self._merged), num_steps).items():
            self._merged[index].assign(value)

    def correct(self, means: Sequence[tf.Tensor], num_newer: int | tf.Tensor, delay: int | tf.Tensor) -> None:
        """Emits the ops that replace this rank's changes in a window by their mean.

        Args:
          means: As `merge` has returned them.
          num_newer: The number of windows that have ended after the merged one.
          delay: The number of steps since the merged window's end.
        """
        self._let_known_coast()
        moves = self.apart(means, num_newer)
        for index, value in self._coasted(moves, delay).items():
            moves[index] = value
        self._changes.add([tf.cast(move, v.dtype) for move, v in zip(moves, self._variables, strict=True)])

    def _let_known_coast(self) -> None:
        with tf.device("/cpu:0"):
            age = self._age.value()  # `read_value` would copy it to a GPU.
        self._changes.count_from(self._coasted(self._changes.known(), age))
        with tf.device("/cpu:0"):
            self._age.assign(0)

    def _coasted(self, values: Sequence[tf.Tensor], num_steps: int | tf.Tensor) -> dict[int, tf.Tensor]:
        """The weights and velocities among `values` after `num_steps` steps without gradients, by index."""
        momentum, num_trained = self.descent.momentum, self._num_trained
        with tf.device("/cpu:0"):
            is_known = isinstance(num_steps, int)
            kept = momentum**num_steps if is_known else tf.constant(momentum) ** tf.cast(num_steps, tf.float32)
            moved = momentum * (1 - kept) / (1 - momentum) * (momentum if self.descent.nesterov else 1)
        first = len(values) - num_trained
        coasted = {}
        for i, (weight, velocity) in enumerate(zip(values[:num_trained], values[first:], strict=True)):
            coasted[i] = weight + tf.cast(moved, velocity.dtype) * velocity
            coasted[first + i] = tf.cast(kept, velocity.dtype) * velocity
        return coasted


class MomentumAlgorithm(DTSAlgorithm):
    """`DTSAlgorithm` whose windows change weights and velocities."""

    @property
    def _may_join(self) -> bool:
        return False  # Each velocity belongs to a variable.

    def _make_outer(self) -> MomentumOuterOptimizer:
        group = self.group
        return MomentumOuterOptimizer(
            checked_descent(group.optimizer(), group.trained),
            group.variables,
            group.context.values(),
            num_trained=group.num_trained,
            max_newer=self._settings.num_slots - 1,
        )

    def after_update(self) -> tf.Tensor:
        self._outer.count_step()
        return super().after_update()

    def _pass_window(self, num_steps: int | tf.Tensor) -> None:
        self._outer.let_merged_coast(num_steps)

    def _give(self, means: Sequence[tf.Tensor], schedule: Schedule, num_newer: int | tf.Tensor) -> None:
        when(
            schedule.delay == 0,
            lambda: self._outer.settle(follows_take=True),  # Nothing is in flight, so ranks are equal to the bit.
            lambda: self._outer.correct(means, num_newer, schedule.delay),
        )

    def common_optimizers(self) -> Sequence[tuple[keras.optimizers.Optimizer, Sequence[tf.Variable]]]:
        return [(self.group.optimizer(), self._outer.descent.velocities)]

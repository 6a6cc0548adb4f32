"""`OuterOptimizer`: local SGD and DiLoCo. Ranks train on their own, and merge their changes window by window.

    weights that a rank computes with  =  merged weights  +  its own changes of windows that are not merged yet

Each rank makes steps of its own optimizer. A window is a number of steps. At its end, each rank submits the changes of
the window. The mean over all ranks may arrive many steps later. The rank then merges the mean:

    merged  <-  merged + mean(changes)                    or     the outer optimizer's update with  -mean(changes)

Only means move the merged weights, so these are equal to the bit on all ranks. If no changes are in flight, the weights
of all ranks are equal, too. With windows of several steps and no delay this is local SGD. With an outer optimizer, it
is DiLoCo. With a delay in addition, it is the eager form of DiLoCo.

With a delay of several steps, this way of merging is unstable. When a mean arrives, later gradients of the rank have
already undone a part of its own changes. Replacing these changes undoes this part twice. Merging gently keeps ranks
closer together:

    slow     <-  slow + kappa mean(changes)                     when a window is merged
    slow     <-  slow + a_2 (merged - slow)                     when a window ends
    weights  ->  slow + kappa (own changes of windows that are not merged yet)

Own changes count in full until their window ends, and with a factor kappa after that. At the end of a window, weights
move as the slow values do, and in addition by a part a_1 of the distance to their target. With a = 1 - (1 - 1 / T)^p
for windows of p steps, a distance falls to 1/e in T steps. The slow values, too, are moved by means only. If kappa, T_1
and T_2 are 1, means are merged at once.

If the program has assigned a weight, the weight must stay: no distance to a target may remain. So the change of that
window is the assigned value less the merged value and the changes in flight. Its kappa is 1. The slow value is set so
that the weight stays. From earlier steps, only the part that this rank's weight held counts. For other weights, nothing
changes.

The calls at the end of a window, in this order: `multiply` if changes are scaled, `take`, then `merge` and `follow` for
a window that is due, then `approach`. To merge at once, `give` replaces `follow` and `approach`.

Memory, in copies of the model's weights: the merged weights, the weights at the end of the last window, and one for
each newer window that may be in flight. Merging gently takes one more.

References:
  Stich. Local SGD Converges Fast and Communicates Little. ICLR 2019. Douillard et al. DiLoCo: Distributed
  Low-Communication Training of Language Models. arXiv 2311.08105, 2023. Algorithm 1. Kale, Douillard, Donchev. Eager
  Updates for Overlapped Communication and Computation in DiLoCo. arXiv 2502.12996, 2025.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import keras
import numpy as np
import tensorflow as tf

from hop_tf.keras_hook.optimizers import clipped
from hop_tf.keras_hook.updates import as_own_updates, update
from hop_tf.runtime.deltas import DeltaTracker, ValueHistory, assign_all, read_all
from hop_tf.tensors import payloads
from hop_tf.tensors.joined import JoinedVariables

# kappa, T_1 (1 for skewed shards), and T_2, in steps. They were chosen for a perceptron with momentum 0.9.
_KAPPA, _T_1, _T_2 = 0.5, 10, 40


class OuterOptimizer:
    """The merged values of some variables, and this rank's own changes in addition.

    Args:
      variables: The variables, which may be `JoinedVariables`. The trained ones come first.
      values: Their values before the first change, equal on all ranks.
      num_trained: Number of trained variables. A Keras outer optimizer moves these only. Means are added to the others.
      max_newer: Largest number of windows that may have ended when an older one is merged.
      optimizer: The outer optimizer of Keras, not built. None: means are added.
      gently: True if `follow` and `approach` are called. Must be False with a Keras outer optimizer.
      skewed_shards: True if `apart` is called. Then T_1 is 1, because ranks with different data must not stay apart.

    Attributes:
      optimizer: The outer optimizer of Keras, or None.
    """

    def __init__(
        self,
        variables: Sequence[tf.Variable | JoinedVariables],
        values: Sequence[tf.Tensor],
        *,
        num_trained: int,
        max_newer: int,
        optimizer: keras.optimizers.Optimizer | None = None,
        gently: bool = False,
        skewed_shards: bool = False,
    ):
        self._variables = variables
        self._num_trained = num_trained
        self.optimizer = optimizer
        self._changes = DeltaTracker(variables, values)
        self._own = ValueHistory(variables, max_newer + skewed_shards)
        with tf.init_scope(), tf.device("/cpu:0"):
            # One for each trained variable, also within joined variables.
            self._num_kappas = sum(map(_num_members, variables[:num_trained]))
            kappas = tf.Variable(tf.fill([self._num_kappas], _KAPPA), trainable=False, name="hop_tf_kappas")
        self._kappas = ValueHistory([kappas], max_newer + 1 if gently else 0)
        self._t_1 = 1 if skewed_shards else _T_1
        # Names are the same even if the step is traced within a condition, as on a rank that joins.
        with tf.init_scope(), tf.name_scope(""):
            merged = [_merged(variable, value) for variable, value in zip(variables, values, strict=True)]
            if optimizer is not None:
                optimizer.build(merged[:num_trained])
        self._merged = [variable.value for variable in merged]
        # Moving statistics are merged at once, because they describe the present weights.
        self._slow = [_copy(each) for each in self._merged[:num_trained]] if gently else []

    def merged(self) -> list[np.ndarray]:
        """The merged values, as arrays. Do not modify them."""
        return [np.asarray(each.read_value()) for each in self._merged]

    def begin_with(self, merged: Sequence[np.ndarray]) -> None:
        """Takes over the merged values of another rank. The variables get these values, and no change is in flight."""
        with as_own_updates():  # Assignments, but not by the program.
            for each, variable, values in zip(self._merged, self._variables, merged, strict=True):
                each.assign(payloads.view(values.copy(), each.dtype.as_numpy_dtype, each.shape))
                variable.assign(tf.cast(each, variable.dtype))
        self._changes.reset()
        self._stop_approach()

    def begin(self) -> None:
        """Emits the ops that set the merged values to the variables' present values. No change is in flight then."""
        self._changes.reset()
        for merged, variable in zip(self._merged, self._variables, strict=True):
            merged.assign(tf.cast(variable.read_value(), merged.dtype))
        self._stop_approach()

    def multiply(self, factor: tf.Tensor) -> None:
        """Emits the ops that multiply the changes of trained variables in the window that ends."""
        self._changes.multiply(factor, self._num_trained)

    def take(
        self, choose: Callable[[list[tf.Tensor]], list] | None = None, assigned: tf.Tensor | None = None
    ) -> list[tf.Tensor]:
        """Emits the ops that end a window.

        Args:
          choose: As for `DeltaTracker.take`, for the trained variables. Other changes count in a later window.
          assigned: For each trained variable, True if the program has assigned it in the window (`note_assigned`).
            Joined variables count one by one. Default: none.

        Returns:
          This rank's changes of each variable.
        """

        def choose_all(changes: list[tf.Tensor]) -> list:
            others = changes[self._num_trained :]
            return [*choose(changes[: self._num_trained]), *(None for _ in others)]

        own = self._changes.take(choose and choose_all)
        self._own.push(own)
        if self._slow:
            with tf.device("/cpu:0"):
                kappas = tf.fill([self._num_kappas], _KAPPA)
                self._kappas.push([kappas if assigned is None else tf.where(assigned, 1.0, kappas)])
        return own

    def merge(self, means: Sequence[tf.Tensor], share: tf.Tensor | float = 1.0) -> list[tf.Tensor]:
        """Emits the ops that merge a window. Variables keep their values.

        Args:
          means: The mean over all ranks of the changes of each variable.
          share: The fraction of ranks whose windows have steps. Only these windows count, and the mean is divided by
            this fraction. If there are none, the mean is added unchanged, also with an outer optimizer.

        Returns:
          The means that were merged.
        """
        has_steps = share > 0
        factor = tf.where(has_steps, 1 / share, 1.0)
        means = [
            tf.cast(mean, merged.dtype) * tf.cast(factor, merged.dtype)
            for mean, merged in zip(means, self._merged, strict=True)
        ]
        self._move(means, has_steps)
        return means

    def apart(self, means: Sequence[tf.Tensor], num_newer: int | tf.Tensor) -> list[tf.Tensor]:
        """Emits the ops that subtract this rank's changes from the mean of a window.

        Args:
          means: As `merge` has returned them.
          num_newer: The number of windows that have ended after it.
        """
        own = self._own.at(num_newer)
        return [mean - tf.cast(each, mean.dtype) for mean, each in zip(means, own, strict=True)]

    def give(self, num_in_flight: int | tf.Tensor, follows_take: bool = False) -> None:
        """Emits the ops that assign the merged values plus own changes of windows in flight.

        Args:
          num_in_flight: The number of windows that have ended and are not merged.
          follows_take: True if `take` has just taken all changes, so that no later ones exist. Default False: later
            changes are kept.
        """
        self._assign(self._own.add_newest(num_in_flight, read_all(self._merged)), follows_take)

    def settle(self, follows_take: bool = False) -> None:
        """Emits the ops that assign the merged values. All windows must be merged. No distance to a target remains.

        Args:
          follows_take: As for `give`.
        """
        self.give(0, follows_take)
        self._stop_approach()

    def _assign(self, values: Sequence[tf.Tensor], follows_take: bool) -> None:
        give = self._changes.replace if follows_take else self._changes.rebase
        give([tf.cast(value, v.dtype) for value, v in zip(values, self._variables, strict=True)])

    # Merging gently.

    def follow(self, means: Sequence[tf.Tensor], num_newer: int | tf.Tensor) -> None:
        """Emits the ops that move the slow values after a window is merged.

        Args:
          means: As `merge` has returned them.
          num_newer: The number of windows that have ended after it.
        """
        with tf.device("/cpu:0"):
            (kappas,) = self._kappas.at(num_newer)
        _add(self._slow, self._scaled(kappas, means[: self._num_trained]))

    def note_assigned(self, are_assigned: tf.Tensor, num_in_flight: int | tf.Tensor) -> None:
        """Emits the ops that keep variables as the program has assigned them: no distance to a target remains.

        Args:
          are_assigned: As `assigned` of `take`.
          num_in_flight: As for `give`.
        """
        merged = read_all(self._merged)
        with tf.device("/cpu:0"):
            rest = [functools.partial(self._scaled, 1 - kappas) for (kappas,) in reversed(self._kappas.all())]
        whole, slow = (self._own.add_newest(num_in_flight, merged, scales) for scales in ((), rest))
        known = self._changes.known()
        for i, is_assigned in enumerate(map(_spread, self._variables, self._parts(are_assigned))):
            whole[i] = tf.where(is_assigned, tf.cast(whole[i], known[i].dtype), known[i])
            self._slow[i].assign(tf.where(is_assigned, slow[i], self._slow[i]))
        self._changes.count_from(dict(enumerate(whole[: self._num_trained])))

    def approach(self, num_in_flight: int | tf.Tensor, interval: int | tf.Tensor, follows_take: bool = False) -> None:
        """Emits the ops that move variables towards the merged values, after `take` and the merges of that step.

        Args:
          num_in_flight: As for `give`; at least 1.
          interval: The steps of a window.
          follows_take: As for `give`.
        """
        with tf.device("/cpu:0"):
            kappas = [each.read_value() for (each,) in reversed(self._kappas.all())]
            rest = 1 - kappas[0]
            a_1, a_2 = (_part(steps, interval) for steps in (self._t_1, _T_2))
        num = self._num_trained
        newest = self._scaled(rest, self._own.all()[-1][:num])
        known = self._changes.known()
        values = read_all(self._merged)
        moves = [tf.cast(a_2, slow.dtype) * (value - slow) for slow, value in zip(self._slow, values, strict=False)]
        values[:num] = [slow.assign_add(move) for slow, move in zip(self._slow, moves, strict=True)]
        scales = [functools.partial(self._scaled, each) for each in kappas]
        values = self._own.add_newest(num_in_flight, values, scales)
        for i, move in enumerate(moves):
            weights = tf.cast(known[i], move.dtype) - newest[i] + move
            values[i] = weights + tf.cast(a_1, move.dtype) * (values[i] - weights)
        self._assign(values, follows_take)

    def _scaled(self, factors: tf.Tensor, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The values, scaled by a factor for each trained variable. Values of other variables are unchanged."""
        scaled = [_scaled(*each) for each in zip(self._variables, self._parts(factors), values, strict=False)]
        return [*scaled, *values[self._num_trained :]]

    def _parts(self, values: tf.Tensor) -> list[tf.Tensor]:
        """Splits a vector with one value for each trained variable. The values of joined variables stay together."""
        with tf.device("/cpu:0"):
            return tf.split(values, list(map(_num_members, self._variables[: self._num_trained])))

    def _stop_approach(self) -> None:
        assign_all(self._slow, self._merged[: len(self._slow)])

    def _move(self, means: Sequence[tf.Tensor], has_steps: tf.Tensor) -> None:
        if self.optimizer is None:
            _add(self._merged, means)
            return
        trained, means_of_trained = self._merged[: self._num_trained], means[: self._num_trained]

        def make_step() -> None:
            gradients = clipped(self.optimizer, [-mean for mean in means_of_trained])
            update(self.optimizer, gradients, trained)

        tf.cond(has_steps, make_step, lambda: _add(trained, means_of_trained))
        _add(self._merged[self._num_trained :], means[self._num_trained :])


def _num_members(variable: tf.Variable | JoinedVariables) -> int:
    return len(variable.variables) if isinstance(variable, JoinedVariables) else 1


def _spread(variable: tf.Variable | JoinedVariables, values: tf.Tensor) -> tf.Tensor:
    """The value that `values` has for a variable. For joined variables, a vector that repeats each one's value."""
    return variable.spread(values) if isinstance(variable, JoinedVariables) else values[0]


def _scaled(variable: tf.Variable | JoinedVariables, factors: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
    factors = tf.cast(factors, value.dtype)
    if not isinstance(variable, JoinedVariables):
        return factors[0] * value
    with tf.device("/cpu:0"):
        are_equal = tf.reduce_all(factors == factors[0])  # As long as the program assigns nothing.
    return tf.cond(are_equal, lambda: factors[0] * value, lambda: variable.spread(factors) * value)


def _add(variables: Sequence[tf.Variable], values: Sequence[tf.Tensor]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign_add(value)


def _part(num_steps: int, interval: int | tf.Tensor) -> float | tf.Tensor:
    """The part of a distance that is covered in an interval, if the distance falls to 1/e in `num_steps` steps."""
    interval = tf.cast(interval, tf.float32) if tf.is_tensor(interval) else interval
    return 1 - (1 - 1 / num_steps) ** interval


def _copy(variable: tf.Variable) -> tf.Variable:
    with tf.init_scope(), tf.device(variable.device):
        return tf.Variable(variable.read_value(), trainable=False, name="hop_tf_slow")


def dtype_of_sums(variable: tf.Variable | JoinedVariables) -> tf.DType:
    """The type for sums of a variable's changes: at least float32, because smaller types lose small changes."""
    return variable.dtype if variable.dtype.size >= 4 else tf.float32


def _merged(variable: tf.Variable | JoinedVariables, value: tf.Tensor) -> keras.Variable:
    dtype = dtype_of_sums(variable)
    with tf.device(variable.device):
        return keras.Variable(tf.cast(value, dtype), dtype=dtype.name, trainable=False, name="hop_tf_merged")

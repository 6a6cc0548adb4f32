"""`OuterSteps`: ranks that train on their own, and merge what they have changed, window by window.

    weights a rank computes with  =  what is merged  +  its own changes of windows that are not merged yet

Ranks make steps of their own optimizers. A window is some steps; when it ends, each rank submits what it has changed
in it. When the mean over all ranks arrives, maybe many steps later, it is merged:

    merged  <-  merged + mean(changes)                    or     the outer optimizer's update with  -mean(changes)

The merged values are kept, and moved by means only. So it is equal to the bit on all ranks, and so are weights whenever
nothing of their own is left over. Without delay and with windows of several steps this is local SGD; with an outer
optimizer DiLoCo; with one and a delay its eager form.

With a delay of several steps that is unstable. When a mean arrives, the rank has already undone a part of its own
change by later gradients, so that this part is taken out twice. Merging gently keeps ranks nearer to each other:

    slow     <-  slow + kappa mean(changes)                     when a window is merged
    slow     <-  slow + a_2 (merged - slow)                     when a window ends
    weights  ->  slow + kappa (own changes of windows that are not merged yet)

Own changes count whole until their window ends, and kappa after that. At the end of a window weights move as the slow
values do, and a part a_1 of the way to where they should be. With a = 1 - (1 - 1 / T)^p, p steps a window, a distance
falls to 1/e in T steps. Slow values are moved by means only, too. kappa = 1, T_1 = T_2 = 1 is merging at once.

If the program has assigned a weight, nothing may be left to approach. So the change in that window is the assigned
value less what is merged and under way. Its kappa is 1. The slow value becomes what keeps the weight where it is. Of
steps before, only what this rank's weight held of them counts. Other weights keep theirs.

At the end of a window the order is `multiply`, if changes are made longer, and `take`, then `merge` and `follow` for a
window that is due, then `approach`. To merge at once, `give` replaces the last two.

Memory, in models: what is merged, what weights were when the last window ended, and one for each newer window that may
be under way; merging gently, one more.

References:
  Stich. Local SGD Converges Fast and Communicates Little. ICLR 2019. Douillard et al. DiLoCo: Distributed
  Low-Communication Training of Language Models. arXiv 2311.08105, 2023. Algorithm 1. Kale, Douillard, Donchev. Eager
  Updates for Overlapped Communication and Computation in DiLoCo. arXiv 2502.12996, 2025.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import keras
import numpy as np
import tensorflow as tf

from hop_tf.keras_hook.optimizers import clipped
from hop_tf.keras_hook.updates import as_own_updates, update
from hop_tf.runtime.averaging import LateChanges, Latest, assign_all, read_all
from hop_tf.tensors import payloads

# kappa, T_1 (for skewed shards 1), and T_2, in steps. They were chosen for a perceptron with momentum 0.9.
_KAPPA, _T_1, _T_2 = 0.5, 10, 40


class OuterSteps:
    """The merged values of some variables, and the changes that this rank has made besides.

    Args:
      variables: The variables; those that are trained come first.
      values: What they are when the first change is about to be made; equal on all ranks.
      num_trained: How many are trained. An outer optimizer moves these; the others take the mean.
      max_newer: Most windows that may have ended when an older one is merged.
      optimizer: The outer optimizer, not built; None: means are added.
      gently: True if `follow` and `approach` are called; not with an outer optimizer.
      skewed_shards: True if `apart` is called. Then T_1 is 1: ranks whose data differs must not stay apart.

    Attributes:
      optimizer: The outer optimizer.
    """

    def __init__(
        self,
        variables: Sequence[tf.Variable],
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
        self._changes = LateChanges(variables, values)
        self._own = Latest(variables, max_newer + skewed_shards)
        with tf.init_scope(), tf.device("/cpu:0"):
            kappas = tf.Variable(tf.fill([num_trained], _KAPPA), trainable=False, name="hop_tf_kappas")
        self._kappas = Latest([kappas], max_newer + 1 if gently else 0)
        self._t_1 = 1 if skewed_shards else _T_1
        # Names are the same where the step is traced within a condition, as that of a rank that joins.
        with tf.init_scope(), tf.name_scope(""):
            merged = [_merged(variable, value) for variable, value in zip(variables, values, strict=True)]
            if optimizer is not None:
                optimizer.build(merged[:num_trained])
        self._merged = [variable.value for variable in merged]
        # Moving statistics are merged at once: they tell what weights are now.
        self._slow = [_copy(each) for each in self._merged[:num_trained]] if gently else []

    def merged(self) -> list[np.ndarray]:
        """The merged values, as arrays. Do not modify them."""
        return [np.asarray(each.read_value()) for each in self._merged]

    def begin_with(self, merged: Sequence[np.ndarray]) -> None:
        """Takes over what is merged on another rank: variables are that, and nothing is under way."""
        with as_own_updates():  # Not the program's.
            for each, variable, values in zip(self._merged, self._variables, merged, strict=True):
                each.assign(payloads.view(values.copy(), each.dtype.as_numpy_dtype, each.shape))
                variable.assign(tf.cast(each, variable.dtype))
        self._changes.reset()
        self._stop_approach()

    def begin(self) -> None:
        """Emits the ops that take the variables as they are for what is merged: nothing is under way."""
        self._changes.reset()
        for merged, variable in zip(self._merged, self._variables, strict=True):
            merged.assign(tf.cast(variable, merged.dtype))
        self._stop_approach()

    def multiply(self, factor: tf.Tensor) -> None:
        """Emits the ops that multiply what the window that ends has changed in variables that are trained."""
        self._changes.multiply(factor, self._num_trained)

    def take(
        self, choose: Callable[[list[tf.Tensor]], list] | None = None, assigned: tf.Tensor | None = None
    ) -> list[tf.Tensor]:
        """Emits the ops that end a window.

        Args:
          choose: As of `LateChanges.take`, of the variables that are trained: what stays is changed in a later window.
          assigned: For each trained variable, True if the program has assigned it in the window (`note_assigned`).
            Default: none.

        Returns:
          The changes of each variable by this rank.
        """

        def choose_all(changes: list[tf.Tensor]) -> list:
            others = changes[self._num_trained :]
            return [*choose(changes[: self._num_trained]), *(None for _ in others)]

        own = self._changes.take(choose and choose_all)
        self._own.push(own)
        if self._slow:
            with tf.device("/cpu:0"):
                kappas = tf.fill([self._num_trained], _KAPPA)
                self._kappas.push([kappas if assigned is None else tf.where(assigned, 1.0, kappas)])
        return own

    def merge(self, means: Sequence[tf.Tensor], share: tf.Tensor | float = 1.0) -> list[tf.Tensor]:
        """Emits the ops that merge a window. Variables stay as they are.

        Args:
          means: The mean over all ranks of the changes of each variable.
          share: The share of the ranks whose window counts, because it has steps: these share the mean. If there are
            none, the mean is added as it is, also with an outer optimizer.

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

    def give(self, num_under_way: int | tf.Tensor, follows_take: bool = False) -> None:
        """Emits the ops that give the variables what is merged, and own changes of windows under way in addition.

        Args:
          num_under_way: The number of windows that have ended and are not merged.
          follows_take: True if `take` has just taken all changes, so that the variables have none of their own. Default
            False: these are kept.
        """
        self._assign(self._own.add_newest(num_under_way, read_all(self._merged)), follows_take)

    def settle(self, follows_take: bool = False) -> None:
        """Emits the ops that give the variables what is merged: all windows are, and nothing is left to approach.

        Args:
          follows_take: As of `give`.
        """
        self.give(0, follows_take)
        self._stop_approach()

    def _assign(self, values: Sequence[tf.Tensor], follows_take: bool) -> None:
        give = self._changes.replace if follows_take else self._changes.rebase
        give([tf.cast(value, v.dtype) for value, v in zip(values, self._variables, strict=True)])

    # Merging gently.

    def follow(self, means: Sequence[tf.Tensor], num_newer: int | tf.Tensor) -> None:
        """Emits the ops that move the slow values when a window was merged.

        Args:
          means: As `merge` has returned them.
          num_newer: The number of windows that have ended after it.
        """
        with tf.device("/cpu:0"):
            kappas = tf.unstack(*self._kappas.at(num_newer), self._num_trained)
        _add(self._slow, [tf.cast(kappa, mean.dtype) * mean for kappa, mean in zip(kappas, means, strict=False)])

    def note_assigned(self, are_assigned: Sequence[bool | tf.Tensor], num_under_way: int | tf.Tensor) -> None:
        """Emits the ops that leave nothing to approach in variables that the program has assigned.

        Args:
          are_assigned: For each trained variable, true if it was assigned.
          num_under_way: As of `give`.
        """
        merged = read_all(self._merged)
        with tf.device("/cpu:0"):
            rest = [tf.unstack(1 - kappas, self._num_trained) for (kappas,) in reversed(self._kappas.all())]
        whole, slow = (self._own.add_newest(num_under_way, merged, factors) for factors in ((), rest))
        known = self._changes.known()
        for i, is_assigned in enumerate(are_assigned):
            whole[i] = tf.where(is_assigned, tf.cast(whole[i], known[i].dtype), known[i])
            self._slow[i].assign(tf.where(is_assigned, slow[i], self._slow[i]))
        self._changes.count_from(dict(enumerate(whole[: self._num_trained])))

    def approach(self, num_under_way: int | tf.Tensor, interval: int | tf.Tensor, follows_take: bool = False) -> None:
        """Emits the ops that move variables towards what is merged, after `take` and the merges of that step.

        Args:
          num_under_way: As of `give`; at least 1.
          interval: The steps of a window.
          follows_take: As of `give`.
        """
        with tf.device("/cpu:0"):
            kappas = [tf.unstack(each, self._num_trained) for (each,) in reversed(self._kappas.all())]
            a_1, a_2 = (_part(steps, interval) for steps in (self._t_1, _T_2))
        num, newest = self._num_trained, self._own.all()[-1]
        known = self._changes.known()
        values = read_all(self._merged)
        moves = [tf.cast(a_2, slow.dtype) * (value - slow) for slow, value in zip(self._slow, values, strict=False)]
        values[:num] = [slow.assign_add(move) for slow, move in zip(self._slow, moves, strict=True)]
        values = self._own.add_newest(num_under_way, values, kappas)
        for i, move in enumerate(moves):
            weights = tf.cast(known[i], move.dtype) - tf.cast(1 - kappas[0][i], move.dtype) * newest[i] + move
            values[i] = weights + tf.cast(a_1, move.dtype) * (values[i] - weights)
        self._assign(values, follows_take)

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


def _add(variables: Sequence[tf.Variable], values: Sequence[tf.Tensor]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign_add(value)


def _part(num_steps: int, interval: int | tf.Tensor) -> float | tf.Tensor:
    """The part of a distance that is covered in an interval, if it falls to 1/e in so many steps."""
    interval = tf.cast(interval, tf.float32) if tf.is_tensor(interval) else interval
    return 1 - (1 - 1 / num_steps) ** interval


def _copy(variable: tf.Variable) -> tf.Variable:
    with tf.init_scope(), tf.device(variable.device):
        return tf.Variable(variable.read_value(), trainable=False, name="hop_tf_slow")


def dtype_of_sums(variable: tf.Variable) -> tf.DType:
    """The type to add changes of a variable in: float32 at least, as sums in a smaller type lose small changes."""
    return variable.dtype if variable.dtype.size >= 4 else tf.float32


def _merged(variable: tf.Variable, value: tf.Tensor) -> keras.Variable:
    dtype = dtype_of_sums(variable)
    with tf.device(variable.device):
        return keras.Variable(tf.cast(value, dtype), dtype=dtype.name, trainable=False, name="hop_tf_merged")

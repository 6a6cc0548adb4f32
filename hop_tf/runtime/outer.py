"""`OuterSteps`: ranks that train on their own, and merge what they have changed, window by window.

    weights a rank computes with  =  what is merged  +  its own changes of windows that are not merged yet

Ranks make steps of their own optimizers. A window is some steps; when it ends, each rank hands out what it has changed
in it. When the mean over all ranks arrives, maybe many steps later, it is merged:

    merged  <-  merged + mean(changes)                    or     the outer optimizer's update with  -mean(changes)

The merged values are kept, and moved by means only. So it is equal to the bit on all ranks, and so are weights whenever
nothing of their own is left over. Without delay and with windows of several steps this is local SGD; with an outer
optimizer DiLoCo; with one and a delay its eager form.

Memory, in models: what is merged, what weights were when the last window ended, and one for each newer window that may
be under way.

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
from hop_tf.keras_hook.updates import update
from hop_tf.runtime.averaging import LateChanges, Latest
from hop_tf.tensors import payloads


class OuterSteps:
    """The merged values of some variables, and the changes that this rank has made besides.

    Args:
      variables: The variables; those that are trained come first.
      values: What they are when the first change is about to be made; equal on all ranks.
      num_trained: How many are trained. An outer optimizer moves these; the others take the mean.
      max_newer: Most windows that may have ended when an older one is merged.
      optimizer: The outer optimizer, not built; None: means are added.

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
    ):
        self._variables = variables
        self._num_trained = num_trained
        self.optimizer = optimizer
        self._changes = LateChanges(variables, values)
        self._own = Latest(variables, max_newer)
        # Names are the same where the step is traced within a condition, as that of a rank that joins.
        with tf.init_scope(), tf.name_scope(""):
            merged = [_merged(variable, value) for variable, value in zip(variables, values, strict=True)]
            if optimizer is not None:
                optimizer.build(merged[:num_trained])
        self._merged = [variable.value for variable in merged]

    def merged(self) -> list[np.ndarray]:
        """The merged values, as arrays. Do not modify them."""
        return [np.asarray(each.read_value()) for each in self._merged]

    def begin_with(self, merged: Sequence[np.ndarray]) -> None:
        """Takes over what is merged on another rank: variables are that, and nothing is under way."""
        for each, variable, values in zip(self._merged, self._variables, merged, strict=True):
            each.assign(payloads.view(values.copy(), each.dtype.as_numpy_dtype, each.shape))
            variable.assign(tf.cast(each, variable.dtype))
        self._changes.reset()

    def begin(self) -> None:
        """Emits the ops that take the variables as they are for what is merged: nothing is under way."""
        self._changes.reset()
        for merged, variable in zip(self._merged, self._variables, strict=True):
            merged.assign(tf.cast(variable, merged.dtype))

    def take(self, choose: Callable[[list[tf.Tensor]], list] | None = None) -> list[tf.Tensor]:
        """Emits the ops that end a window.

        Args:
          choose: As of `LateChanges.take`, of the variables that are trained: what stays is changed in a later window.

        Returns:
          The changes of each variable by this rank.
        """

        def choose_all(changes: list[tf.Tensor]) -> list:
            others = changes[self._num_trained :]
            return [*choose(changes[: self._num_trained]), *(None for _ in others)]

        own = self._changes.take(choose and choose_all)
        self._own.push(own)
        return own

    def merge(
        self,
        means: Sequence[tf.Tensor],
        num_newer: int | tf.Tensor,
        share: tf.Tensor | float = 1.0,
        follows_take: bool = False,
    ) -> None:
        """Emits the ops that merge a window.

        Args:
          means: The mean over all ranks of the changes of each variable.
          num_newer: The number of windows that have ended after it.
          share: The share of the ranks whose window counts, because it has steps: these share the mean. If there are
            none, the mean is added as it is, also with an outer optimizer.
          follows_take: True if `take` has just taken all changes, so that the variables have none of their own. Default
            False: these are kept.
        """
        has_steps = share > 0
        factor = tf.where(has_steps, 1 / share, 1.0)
        means = [
            tf.cast(mean, merged.dtype) * tf.cast(factor, merged.dtype)
            for mean, merged in zip(means, self._merged, strict=True)
        ]
        self._move(means, has_steps)
        sums = self._own.add_newest(num_newer, [each.read_value() for each in self._merged])
        give = self._changes.replace if follows_take else self._changes.rebase
        give([tf.cast(total, v.dtype) for total, v in zip(sums, self._variables, strict=True)])

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


def _merged(variable: tf.Variable, value: tf.Tensor) -> keras.Variable:
    """In float32 at least: a mean can be less than a small type tells from nothing."""
    dtype = variable.dtype if variable.dtype.size >= 4 else tf.float32
    with tf.device(variable.device):
        return keras.Variable(tf.cast(value, dtype), dtype=dtype.name, trainable=False, name="hop_tf_merged")

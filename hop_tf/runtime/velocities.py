"""Corrects the velocities of SGD by the changes that averaging makes to weights.

If a rank's data is of one kind, its velocity leads to weights for that kind. Averaging moves the weights back, and the
velocity moves them away again. So the changes that averaging makes are added to the velocity, too. With momentum m, a
change that is D steps old counts with the factor m^D, as a gradient of that age would. Quasi-global momentum (Lin,
Karimireddy, Stich, Jaggi, ICML 2021) has the same aim. It makes the whole velocity from the differences of averaged
weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from hop_tf.keras_hook.optimizers import descent_of, innermost
from hop_tf.runtime.group import Group


def add_to_velocities(
    group: Group, moves: Sequence[tf.Tensor], factor_of: Callable[[float], float | tf.Tensor]
) -> None:
    """Emits the ops that add a part of the changes that averaging makes to the velocities of a group's optimizer.

    Args:
      group: The group.
      moves: The change that averaging makes to each trained variable. Further tensors are not used.
      factor_of: Returns the part, given the momentum.

    Raises:
      ValueError: If the optimizer is not SGD with momentum.
    """
    optimizer = group.optimizer()
    descent = descent_of(optimizer, group.trained)
    if descent is None or not descent.momentum:
        raise ValueError(
            "`skewed_shards` must be False unless the optimizer is keras.optimizers.SGD with momentum, whose velocity "
            f"averaging corrects. Received: skewed_shards=True, {innermost(optimizer)!r}."
        )
    factor = factor_of(descent.momentum)
    for velocity, move in zip(descent.velocities, moves, strict=False):
        velocity.assign_add(tf.cast(factor, velocity.dtype) * tf.cast(move, velocity.dtype))

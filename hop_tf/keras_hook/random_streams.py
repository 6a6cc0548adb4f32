"""Random numbers of training steps: each replica draws its own, although all replicas have the same seeds and states.

Replicas train on different rows. With the same seed, all of them would draw the same numbers. Row i of each replica
would get the same dropout mask, the same noise and the same augmentation. So each replica adds its own constant to the
seed of each draw in a training step. The constant is 0 for the first device of rank 0, which draws the same numbers as
without a strategy. The states of generators are left alone. They stay equal on all ranks, because they are saved and
restored.

Draws outside of training steps are equal on all ranks: initial weights, `Dataset.map` (which all ranks compute for
whole batches), `evaluate` and `predict`. A seed that is given for one draw is used unchanged.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import tensorflow as tf
from keras.src.random.seed_generator import SeedGenerator
from tensorflow.python.framework import random_seed

from hop_tf.keras_hook.context import Extended

# Keras takes seeds modulo 2^31 - 2, and TensorFlow modulo 2^31 - 1. The factor has no divisor in common with the
# smaller modulus, so that no two replicas have the same constant. It also makes neighbors' constants very different.
_MODULUS = 2**31 - 2
_FACTOR = 2654435761
_TF_MODULUS = 2**31 - 1


@functools.cache
def wrap_random() -> None:
    """Wraps the functions that draw seeds, once. They change only in training steps under an `Extended`."""
    SeedGenerator.next = _wrapped_next(SeedGenerator.next)
    random_seed.get_seed = _wrapped_get_seed(random_seed.get_seed)


def offset_of_replica() -> int:
    """The number that is added to seeds on the present replica; 0 outside of training steps."""
    extended = tf.distribute.get_strategy().extended
    return extended.stream * _FACTOR % _MODULUS if isinstance(extended, Extended) else 0


def _wrapped_next(method: Callable) -> Callable:
    """Offsets the seeds of Keras's generators: of layers, and of `keras.random` without a seed."""

    @functools.wraps(method)
    def draw(self, *args, **kwargs):
        seed, offset = method(self, *args, **kwargs), offset_of_replica()
        return seed + tf.constant([offset, 0], seed.dtype) if offset and tf.is_tensor(seed) else seed

    return draw


def _wrapped_get_seed(method: Callable) -> Callable:
    """Offsets the seeds of TensorFlow's stateful operations, if only the global seed is set."""

    @functools.wraps(method)
    def get_seed(op_seed):
        seed, of_operation = method(op_seed)
        is_global = op_seed is None and seed is not None
        return (seed + offset_of_replica()) % _TF_MODULUS if is_global else seed, of_operation

    return get_seed

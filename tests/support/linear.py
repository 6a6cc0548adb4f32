"""A linear model with a linear loss, for tests of schedules.

Gradients do not depend on the weights. So every schedule that loses no gradient ends with the weights of one process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import keras
import numpy as np

from support import linear_loss

BATCH_SIZE = 12
NUM_STEPS = 24  # Of two epochs.


@functools.cache
def data() -> tuple[np.ndarray, np.ndarray]:
    """The inputs and targets of an epoch."""
    random = np.random.default_rng(1)
    shape = (NUM_STEPS // 2 * BATCH_SIZE, 6)
    return random.normal(size=shape).astype(np.float32), random.normal(size=(shape[0], 2)).astype(np.float32)


def make_model() -> keras.Model:
    """Returns the model, which is not compiled."""
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(2, kernel_initializer="ones")])


def fit(
    make_optimizer: Callable, callbacks=(), epochs: int = 2, num_fits: int = 1, num_repeats: int = 1, **compile_args
) -> keras.Model:
    """Returns a trained model.

    Args:
      make_optimizer: Makes the optimizer.
      callbacks: Callbacks of `fit`.
      epochs: Epochs of each `fit`.
      num_fits: Calls of `fit`.
      num_repeats: An epoch has the rows of `data` so many times.
      **compile_args: Further arguments of `compile`.
    """
    model = make_model()
    model.compile(make_optimizer(), linear_loss, **compile_args)
    x, y = (np.tile(values, [num_repeats, 1]) for values in data())
    arguments = {"batch_size": BATCH_SIZE, "epochs": epochs, "shuffle": False, "verbose": 0}
    for _ in range(num_fits):
        model.fit(x, y, **arguments, callbacks=list(callbacks))
    return model


def fit_in(strategy, *args, **kwargs) -> keras.Model:
    """As `fit`, in the scope of a strategy."""
    with strategy.scope():
        return fit(*args, **kwargs)


@functools.cache
def weights_alone(make_optimizer: Callable, epochs: int = 2, num_fits: int = 1) -> list[np.ndarray]:
    """The weights that one process ends with. Tests with the same arguments share them: do not modify them."""
    return fit(make_optimizer, epochs=epochs, num_fits=num_fits).get_weights()

"""A small model and rows of two classes for each output, for tests of `fit` against rules that average by hand."""

from __future__ import annotations

import keras
import numpy as np

NUM_ROWS = 32


def data() -> tuple[np.ndarray, np.ndarray]:
    """Returns inputs and labels, which a test may change."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(NUM_ROWS, 6)).astype("float32")
    return x, (x @ rng.normal(size=(6, 2)) > 0).astype("float32")


def make_model() -> keras.Model:
    """Returns a model with the same initial weights each time. Sets all global seeds."""
    keras.utils.set_random_seed(7)
    return keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(5, activation="tanh"), keras.layers.Dense(2)])

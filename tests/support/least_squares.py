"""Least squares with a kernel of three rows, whose gradients NumPy computes for any rank and step."""

import functools

import numpy as np
import tensorflow as tf

BATCH_SIZE = 60
NUM_ROWS = 480


@functools.cache
def problem(num_outputs=4):
    """Returns inputs, targets and initial weights."""
    random = np.random.default_rng(0)
    x = random.normal(size=(NUM_ROWS, 3)).astype(np.float32)
    y = x @ random.normal(size=(3, num_outputs)) + random.normal(size=(NUM_ROWS, num_outputs))
    return x, y.astype(np.float32), random.normal(size=(3, num_outputs)).astype(np.float32)


def rows_of(step, rank, world_size):
    """The rows of a rank in a step."""
    start, share = step * BATCH_SIZE % NUM_ROWS, BATCH_SIZE // world_size
    return slice(start + rank * share, start + (rank + 1) * share)


def gradient_in(world_size, num_outputs=4):
    """Returns `gradient(rank, step, w)`, of the mean of `summed_square`."""
    x, y, _ = problem(num_outputs)

    def gradient(rank, step, w):
        rows = rows_of(step, rank, world_size)
        return 2 / (rows.stop - rows.start) * x[rows].T.astype(np.float64) @ (x[rows] @ w - y[rows])

    return gradient


def linear_gradient(step, rank=0, world_size=1):
    """The gradient of the mean of `linear_loss` for a rank, by default that for all ranks."""
    x, y, _ = problem()
    rows = rows_of(step, rank, world_size)
    return x[rows].astype(np.float64).T @ y[rows] / len(x[rows])


def summed_square(y_true, y_pred):
    """The loss."""
    return tf.reduce_sum(tf.square(y_true - y_pred), axis=-1)

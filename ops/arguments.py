"""Checks of the arguments of this package's functions, and constants that the implementations share."""

from __future__ import annotations

import numbers
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

MAX_VALUES = 2**31 - 1
FLOAT_TYPES = (tf.float32, tf.bfloat16, tf.float16)  # In the order of the C interface's HopTfType.
DEFAULT_BLOCK_SIZE = 512
NUM_CODES = 256  # The number of buckets of a sketch: a code is a byte.


def check_spacing(spacing: float) -> float:
    """Raises ValueError unless `spacing` is in range. Returns it as a float, rounded like a TensorFlow attribute."""
    rounded = float(np.float32(spacing)) if _is_a(numbers.Real, spacing) else 0.0
    if not 0 < rounded <= 1:
        raise ValueError(
            f"`spacing` must be a number above 0 (as float32) and at most 1. Received: spacing={spacing!r}."
        )
    return rounded


def check_block_size(block_size: int | None) -> int | None:
    """Raises ValueError unless `block_size` is None or a positive integer. Returns it as an int or None."""
    if block_size is None:
        return None
    if not _is_a(numbers.Integral, block_size) or not 1 <= block_size <= MAX_VALUES:
        raise ValueError(
            f"`block_size` must be None or an integer from 1 to {MAX_VALUES}. Received: block_size={block_size!r}."
        )
    return int(block_size)


def _is_a(kind: type, value: object) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def check_dtype(name: str, dtype: tf.DType, allowed: Sequence[tf.DType]) -> None:
    """Raises TypeError unless `dtype` is one of `allowed`."""
    if dtype not in allowed:
        names = ", ".join(each.name for each in allowed)
        raise TypeError(f"`{name}` must be of type {names}. Received: {name} of type {dtype.name}.")


def check_size(name: str, size: int) -> None:
    """Raises ValueError if there are more values than the kernels take."""
    if size > MAX_VALUES:
        raise ValueError(f"`{name}` must have at most {MAX_VALUES} values. Received: {size} values.")


def num_blocks(size: int, block_size: int | None) -> int:
    """The number of blocks: ceil(size / block_size). With `block_size` None, all values are one block."""
    return -(-size // (block_size or max(size, 1)))

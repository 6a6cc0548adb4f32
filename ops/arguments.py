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


def check_few_bits_block_size(block_size: int) -> int:
    """Raises ValueError unless `block_size` is a multiple of 8 from 8 to 1024. Returns it as an int."""
    if not _is_a(numbers.Integral, block_size) or not 8 <= block_size <= 1024 or block_size % 8:
        raise ValueError(f"`block_size` must be a multiple of 8 from 8 to 1024. Received: block_size={block_size!r}.")
    return int(block_size)


def check_bits(bits: int) -> int:
    """Raises ValueError unless `bits` is 2 or 4. Returns it as an int."""
    if not _is_a(numbers.Integral, bits) or bits not in (2, 4):
        raise ValueError(f"`bits` must be 2 or 4. Received: bits={bits!r}.")
    return int(bits)


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


def few_bits_sizes(size: int, block_size: int, bits: int) -> tuple[int, int]:
    """The number of scales, and the number of bytes of codes."""
    return num_blocks(size, block_size) * (4 // bits), -(-size * bits // 8)


def num_blocks(size: int, block_size: int | None) -> int:
    """The number of blocks: ceil(size / block_size). With `block_size` None, all values are one block."""
    return -(-size // (block_size or max(size, 1)))

"""The places of a vector's values of large magnitude."""

from __future__ import annotations

import numpy as np

from hop_tf.ops import native

# The number of values that are compared at a time, so that they stay in a core's cache.
_SCAN_VALUES = 1 << 17


def magnitudes(values: np.ndarray) -> np.ndarray:
    """Integers in the order of magnitudes: the bits of the numbers without signs. 0 gives 0. NaN gives the largest."""
    integers = np.dtype(f"i{values.itemsize}")
    return values.view(integers) & integers.type(np.iinfo(integers).max)


def reaching(values: np.ndarray, bound: int) -> np.ndarray:
    """Finds the values of large magnitude.

    Args:
      values: 1-D array of floating-point numbers of 2, 4 or 8 bytes.
      bound: The least integer of `magnitudes` to find, at least 1.

    Returns:
      The indices, in order: int64.
    """
    if native.kernels() is None:
        return _in_numpy(values, bound)
    values = np.ascontiguousarray(values)
    found = np.empty(min(values.size, _SCAN_VALUES), np.int64)
    number, parts = np.zeros(1, np.int64), []
    for begin in range(0, values.size, _SCAN_VALUES):
        part = values[begin : begin + _SCAN_VALUES]
        native.call(
            "SelectLarge",
            native.address(part), part.itemsize, part.size, bound, begin, native.address(found), native.address(number),
        )  # fmt: skip
        parts.append(found[: number[0]].copy())
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def _in_numpy(values: np.ndarray, bound: int) -> np.ndarray:
    starts = range(0, values.size, _SCAN_VALUES) or [0]
    return np.concatenate(
        [start + np.flatnonzero(magnitudes(values[start : start + _SCAN_VALUES]) >= bound) for start in starts]
    )

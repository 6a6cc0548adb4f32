"""Arithmetic on flat parameter vectors, outside of the graph."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# Small enough that a block of every operand stays in a core's cache, large enough to make NumPy's call cost vanish.
_BLOCK_ELEMENTS = 32768


def weighted_differences(
    own: np.ndarray, others: Sequence[np.ndarray], weights: Sequence[float], out: np.ndarray
) -> None:
    """Computes out = sum_j weights[j] * (others[j] - own), reading every operand from memory once.

    Args:
      own: 1-D float array.
      others: Arrays of the same size and dtype.
      weights: One factor for each of `others`.
      out: Array of the same size and dtype that takes the result. Dtypes narrower than float32 are summed in float32.
    """
    if not others:
        out.fill(0)
        return
    working_dtype = np.promote_types(own.dtype, np.float32)
    scratch, block_sum = np.empty((2, _BLOCK_ELEMENTS), working_dtype)
    for start in range(0, own.size, _BLOCK_ELEMENTS):
        block = slice(start, min(start + _BLOCK_ELEMENTS, own.size))
        length = block.stop - start
        total = out[block] if out.dtype == working_dtype else block_sum[:length]
        for index, (other, weight) in enumerate(zip(others, weights, strict=True)):
            term = scratch[:length] if index else total
            np.subtract(other[block], own[block], out=term, dtype=working_dtype)
            term *= weight
            if index:
                total += term
        if out.dtype != working_dtype:
            out[block] = total

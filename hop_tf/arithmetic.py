"""Arithmetic on flat parameter vectors, outside of the graph."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# Small enough that a block of every operand stays in a core's cache, large enough to make NumPy's call cost vanish.
_BLOCK_ELEMENTS = 16384


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
    working_dtype = np.promote_types(own.dtype, np.float32)
    block_sum = np.empty(_BLOCK_ELEMENTS, working_dtype)
    scratch = np.empty(_BLOCK_ELEMENTS, working_dtype)
    for start in range(0, own.size, _BLOCK_ELEMENTS):
        block = slice(start, min(start + _BLOCK_ELEMENTS, own.size))
        length = block.stop - start
        total, term = block_sum[:length], scratch[:length]
        total.fill(0)
        for other, weight in zip(others, weights, strict=True):
            np.subtract(other[block], own[block], out=term, dtype=working_dtype)
            term *= weight
            total += term
        out[block] = total

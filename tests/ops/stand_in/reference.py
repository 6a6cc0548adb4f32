"""The outputs that the operations must have, by the kernels for processors. Those kernels have tests of their own."""

from __future__ import annotations

import functools
import pathlib
import sys

import numpy as np

sys.path.append(str(pathlib.Path(__file__).resolve().parents[3] / "benchmarks"))
import cuda_data


class Reference:
    """One method for each operation, with the operation's inputs, attributes by name, and outputs in a tuple.

    Args:
      path: The library of the kernels.
    """

    def __init__(self, path: pathlib.Path):
        self._processor = cuda_data.Processor(path)

    def __getattr__(self, name):
        return functools.partial(self._compute, getattr(self._processor, name))

    def _compute(self, kernel, first, *others, **attributes):
        """Kernels take vectors, and a block size above 0. The first output has the shape of the first input."""
        if "block_size" in attributes:
            attributes["block_size"] = attributes["block_size"] or max(first.size, 1)
        results = kernel(*map(np.ravel, (first, *others)), **attributes)
        output, *more = results if isinstance(results, tuple) else (results,)
        return output.reshape(first.shape), *more

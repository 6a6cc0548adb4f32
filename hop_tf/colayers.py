"""Colayers: variables that Canary exchanges together.

References:
  Zhou et al. Canary: Decentralized Distributed Deep Learning Via Gradient Sketch and Partition in Multi-Interface
  Networks. IEEE TPDS 2021. Section 4.3.2.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hop_tf.packing import TensorSpec

# The kernels of dense layers have two dimensions, those of convolutions more; vectors go with the kernel before them.
_DENSE_DIMENSIONS = 2


def bundle(specs: Sequence[TensorSpec], num_colayers: int) -> list[list[int]]:
    """Divides tensors into colayers, those of the last layers first: in the order of back-propagation.

    Colayers are of consecutive tensors. Where a dense kernel follows a convolution's, or the other way round, a colayer
    ends, as long as there are colayers left for that; and then those with the most bytes are divided in the middle.
    What is carried along (`TensorSpec.exact`) goes with the last colayer, as it is known only at the end of a step.

    Args:
      specs: The tensors, in the order of the layers.
      num_colayers: Most colayers; at least 1.

    Returns:
      For each colayer the indices of its tensors, in descending order but for what is carried along; at least one,
      none empty.
    """
    trained = [index for index in reversed(range(len(specs))) if not specs[index].exact]
    runs = [list(run) for _, run in itertools.groupby(trained, key=_kinds(specs, trained).__getitem__)]
    while len(runs) > num_colayers:
        runs = _join_smallest(specs, runs)
    while len(runs) < num_colayers and (parts := _split_largest(specs, runs)) is not None:
        runs = parts
    runs = runs or [[]]
    runs[-1].extend(index for index, spec in enumerate(specs) if spec.exact)
    return runs


def num_bytes(specs: Sequence[TensorSpec], indices: Sequence[int]) -> int:
    """Bytes of these tensors."""
    return sum(specs[index].num_elements * specs[index].dtype.size for index in indices)


def _kinds(specs: Sequence[TensorSpec], trained: Sequence[int]) -> dict[int, bool]:
    """Whether each tensor belongs to a convolution."""
    kinds, kind = {}, False
    for index in sorted(trained):
        if len(specs[index].shape) >= _DENSE_DIMENSIONS:
            kind = len(specs[index].shape) > _DENSE_DIMENSIONS
        kinds[index] = kind
    return kinds


def _join_smallest(specs: Sequence[TensorSpec], runs: list[list[int]]) -> list[list[int]]:
    """Joins those two neighbors that make the smallest colayer."""
    pairs = itertools.pairwise(runs)
    sizes = [num_bytes(specs, [*first, *second]) for first, second in pairs]
    at = sizes.index(min(sizes))
    return [*runs[:at], [*runs[at], *runs[at + 1]], *runs[at + 2 :]]


def _split_largest(specs: Sequence[TensorSpec], runs: list[list[int]]) -> list[list[int]] | None:
    """Divides that colayer which can be divided and has the most bytes; None where none can be."""
    largest = max((run for run in runs if len(run) > 1), key=lambda run: num_bytes(specs, run), default=None)
    if largest is None:
        return None
    half = num_bytes(specs, largest) / 2
    cuts = range(1, len(largest))
    cut = min(cuts, key=lambda at: abs(num_bytes(specs, largest[:at]) - half))
    at = runs.index(largest)
    return [*runs[:at], largest[:cut], largest[cut:], *runs[at + 1 :]]

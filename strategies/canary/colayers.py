"""Colayers: variables that Canary exchanges together.

References:
  Zhou et al. Canary: Decentralized Distributed Deep Learning Via Gradient Sketch and Partition in Multi-Interface
  Networks. IEEE TPDS 2021. Section 4.3.2.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hop_tf.tensors.packing import TensorSpec

# The kernels of dense layers have two dimensions, those of convolutions more; vectors go with the kernel before them.
_DENSE_DIMENSIONS = 2
# Defaults.
MOST_COLAYERS, _LEAST_BYTES, _LEAST_BYTES_OF_KIND = 10, 2**18, 2**14

_Layer = list[int]


def bundle(specs: Sequence[TensorSpec], num_colayers: int | None) -> list[list[int]]:
    """Divides tensors into colayers, in the order of back-propagation: the last layers come first.

    A colayer has consecutive layers: kernels, each with the vectors (biases, scales) that follow it. Between
    convolutions and dense layers a new colayer begins, as long as `num_colayers` allows it. Then the largest colayers
    are divided in the middle, until there are `num_colayers`.

    By default neighbors with few bytes are joined, because small messages are mostly overhead. Convolutions and dense
    layers still stay apart, unless a colayer has less than 16 KiB. Gradients of convolutions are larger, and lose more
    if they share a sketch with many small values. Non-trainable state (`TensorSpec.exact`) goes with the last colayer,
    because it is known only at the end of a step.

    Args:
      specs: The tensors, in the order of the layers.
      num_colayers: The most colayers; at least 1. None: 10, and neighbors with less than 256 KiB are joined.

    Returns:
      For each colayer the indices of its tensors, in descending order, with the non-trainable state last. There is at
      least one colayer, and none is empty if there are tensors.
    """
    is_default, num_colayers = num_colayers is None, num_colayers or MOST_COLAYERS
    runs = [list(run) for _, run in itertools.groupby(_layers(specs), key=lambda layer: _convolves(specs, layer))]
    while len(runs) > num_colayers:
        runs = _join_smallest(specs, runs)
    while len(runs) < num_colayers and (parts := _split_largest(specs, runs)) is not None:
        runs = parts
    if is_default:
        runs = _join_small(specs, runs)
    colayers = [[index for layer in run for index in layer] for run in runs] or [[]]
    colayers[-1].extend(index for index, spec in enumerate(specs) if spec.exact)
    return colayers


def num_bytes(specs: Sequence[TensorSpec], indices: Sequence[int]) -> int:
    """The number of bytes of these tensors."""
    return sum(specs[index].num_elements * specs[index].dtype.size for index in indices)


def _layers(specs: Sequence[TensorSpec]) -> list[_Layer]:
    """The trained tensors of each layer, the last layer first. Vectors before the first kernel are a layer, too."""
    layers, vectors = [], []
    for index in reversed(range(len(specs))):
        if specs[index].exact:
            continue
        vectors.append(index)
        if len(specs[index].shape) >= _DENSE_DIMENSIONS:
            layers.append(vectors)
            vectors = []
    return [*layers, vectors] if vectors else layers


def _convolves(specs: Sequence[TensorSpec], layer: _Layer) -> bool:
    return len(specs[layer[-1]].shape) > _DENSE_DIMENSIONS


def _bytes_of(specs: Sequence[TensorSpec], run: Sequence[_Layer]) -> int:
    return sum(num_bytes(specs, layer) for layer in run)


def _join_smallest(specs: Sequence[TensorSpec], runs: list[list[_Layer]]) -> list[list[_Layer]]:
    """Joins the two neighbors that make the smallest colayer."""
    sizes = [_bytes_of(specs, [*first, *second]) for first, second in itertools.pairwise(runs)]
    return _joined(runs, sizes.index(min(sizes)))


def _join_small(specs: Sequence[TensorSpec], runs: list[list[_Layer]]) -> list[list[_Layer]]:
    """Joins small colayers with neighbors of the same kind, and very small ones with any neighbor."""
    kinds = itertools.groupby(runs, key=lambda run: _convolves(specs, run[0]))
    joined = [run for _, kind in kinds for run in _join_below(specs, list(kind), _LEAST_BYTES)]
    return _join_below(specs, joined, _LEAST_BYTES_OF_KIND)


def _join_below(specs: Sequence[TensorSpec], runs: list[list[_Layer]], least_bytes: int) -> list[list[_Layer]]:
    """Joins neighbors until each has at least `least_bytes` bytes, or only one colayer is left."""
    while len(runs) > 1 and min(_bytes_of(specs, run) for run in runs) < least_bytes:
        runs = _join_with_neighbor(specs, runs)
    return runs


def _join_with_neighbor(specs: Sequence[TensorSpec], runs: list[list[_Layer]]) -> list[list[_Layer]]:
    """Joins the smallest colayer and the smaller one of its neighbors."""
    sizes = [_bytes_of(specs, run) for run in runs]
    smallest = sizes.index(min(sizes))
    neighbors = [at for at in (smallest - 1, smallest + 1) if 0 <= at < len(runs)]
    return _joined(runs, min(smallest, min(neighbors, key=lambda at: sizes[at])))


def _joined(runs: list[list[_Layer]], at: int) -> list[list[_Layer]]:
    """Joins a colayer and the next one."""
    return [*runs[:at], [*runs[at], *runs[at + 1]], *runs[at + 2 :]]


def _split_largest(specs: Sequence[TensorSpec], runs: list[list[_Layer]]) -> list[list[_Layer]] | None:
    """Divides the largest colayer with several layers. Returns None if no colayer has several."""
    largest = max((run for run in runs if len(run) > 1), key=lambda run: _bytes_of(specs, run), default=None)
    if largest is None:
        return None
    half = _bytes_of(specs, largest) / 2
    cut = min(range(1, len(largest)), key=lambda at: abs(_bytes_of(specs, largest[:at]) - half))
    at = runs.index(largest)
    return [*runs[:at], largest[:cut], largest[cut:], *runs[at + 1 :]]

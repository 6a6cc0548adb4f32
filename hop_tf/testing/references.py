"""What all-reduces and codecs make of gradients, in NumPy: references for tests, written from their definitions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

_INT8_BLOCK = 512


def plain_mean(gradients: Sequence[np.ndarray]) -> np.ndarray:
    """The mean of all ranks' gradients."""
    return np.mean(gradients, axis=0)


def mesh_mean(codec: Callable[[np.ndarray], np.ndarray]) -> Callable[[Sequence[np.ndarray]], np.ndarray]:
    """The mean of a mesh: each value is encoded where it is computed, and the sum where it is owned.

    Args:
      codec: What encoding and decoding make of a vector.

    Returns:
      Takes all ranks' gradients.
    """

    def mean(gradients: Sequence[np.ndarray]) -> np.ndarray:
        size = gradients[0].size
        total = np.empty(size)
        num_blocks, world_size = -(-size // _INT8_BLOCK), len(gradients)
        ends = [min(size, num_blocks * i // world_size * _INT8_BLOCK) for i in range(world_size + 1)]
        for owner in range(world_size):
            where = slice(ends[owner], ends[owner + 1])
            parts = [g.ravel()[where] for g in gradients]
            parts = [part if rank == owner else codec(part) for rank, part in enumerate(parts)]
            total[where] = codec(np.mean(parts, axis=0))
        return total.reshape(gradients[0].shape)

    return mean


def truncate16(values: np.ndarray) -> np.ndarray:
    """The upper half of each float32."""
    return (values.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32).astype(np.float64)


def int8(values: np.ndarray) -> np.ndarray:
    """Whole multiples of a 127th of a block's largest magnitude."""
    blocks = np.pad(values, (0, -values.size % _INT8_BLOCK)).reshape(-1, _INT8_BLOCK)
    scales = np.maximum(np.abs(blocks).max(1, keepdims=True), 1e-30) / 127
    return (np.rint(blocks / scales) * scales).ravel()[: values.size]

"""The division of a model into shards, one for each server.

A part of a tensor is a range of its values in row-major order. The shards, in the order of the servers, contain the
tensors in their order. So a shard is a range of each bucket (`hop_tf.tensors.packing`) of the tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from hop_tf.tensors.packing import Packing, TensorSpec

SHARDINGS = ("memory", "layer", "none")
# The parts of a divided tensor begin at multiples of this many bytes, as tensors do in their buckets.
_ALIGNMENT_BYTES = 64
# An update takes a few times as much memory as its piece. A piece that fits into a processor's cache is also updated
# faster.
_MAX_PIECE_VALUES = 1 << 20


@dataclasses.dataclass(frozen=True)
class Piece:
    """The values [start, stop) of tensor number `index`."""

    index: int
    start: int
    stop: int


def plan_shards(
    specs: Sequence[TensorSpec], layers: Sequence[str], num_servers: int, sharding: str
) -> list[list[Piece]]:
    """Divides tensors among servers.

    Args:
      specs: The tensors.
      layers: For each tensor, the layer that it belongs to. The tensors of a layer follow each other.
      num_servers: Number of servers, at least 1.
      sharding: "memory": equal numbers of values, to within 64 bytes. Tensors may be divided. "layer": equal numbers of
        layers, to within one. "none": the first server has everything.

    Returns:
      For each server its pieces, none of them empty. With a small model, some servers have no pieces.

    References:
      Ko and Kim. SHAT: A Novel Asynchronous Training Algorithm That Provides Fast Model Convergence in Distributed Deep
      Learning. Applied Sciences 12(1), 2022. Section 3.3, Figure 3.
    """
    if sharding == "memory":
        return _by_values(specs, num_servers)
    firsts = [index for index, layer in enumerate(layers) if index == 0 or layer != layers[index - 1]]
    owners = [0] * len(firsts) if sharding == "none" else [i * num_servers // len(firsts) for i in range(len(firsts))]
    shards: list[list[Piece]] = [[] for _ in range(num_servers)]
    for first, last, owner in zip(firsts, [*firsts[1:], len(specs)], owners, strict=True):
        shards[owner].extend(
            Piece(index, 0, specs[index].num_elements) for index in range(first, last) if specs[index].num_elements
        )
    return shards


def _by_values(specs: Sequence[TensorSpec], num_servers: int) -> list[list[Piece]]:
    total = sum(spec.num_elements for spec in specs)
    ends = [total * (server + 1) // num_servers for server in range(num_servers)]
    shards: list[list[Piece]] = [[] for _ in range(num_servers)]
    before = server = 0
    for index, spec in enumerate(specs):
        step = max(1, _ALIGNMENT_BYTES // spec.dtype.size)
        start = 0
        while start < spec.num_elements:
            stop = min(spec.num_elements, -(-(ends[server] - before) // step) * step)
            if stop > start:
                shards[server].append(Piece(index, start, stop))
                start = stop
            if start < spec.num_elements:
                server += 1
        before += spec.num_elements
    return shards


def divide(pieces: Sequence[Piece]) -> list[Piece]:
    """Divides pieces into pieces of at most 2^20 values, for optimizers that do not look at whole tensors."""
    size = _MAX_PIECE_VALUES
    return [
        Piece(piece.index, start, min(start + size, piece.stop))
        for piece in pieces
        for start in range(piece.start, piece.stop, size)
    ]


class ShardPacking:
    """The places of a shard's pieces in the buckets of the whole model, and in the shard's own buckets.

    Args:
      whole: The packing of the model. Its first tensors are those that were divided.
      pieces: The pieces of the shard, not empty.

    Attributes:
      pieces: The pieces of the shard.
      packing: The shard's own buckets. Each is a range of a bucket of the model.
      ranges: For each bucket of the shard: the number of the model's bucket, and the range in that bucket.
    """

    def __init__(self, whole: Packing, pieces: Sequence[Piece]):
        self.pieces = tuple(pieces)
        specs = [whole.specs[piece.index] for piece in pieces]
        self.packing = Packing(
            [
                TensorSpec(spec.name, _shape_of(spec, piece), spec.dtype, spec.exact)
                for spec, piece in zip(specs, pieces, strict=True)
            ]
        )
        starts: dict[int, int] = {}
        for piece in pieces:
            bucket, where = whole.place(piece.index)
            starts.setdefault(bucket, where.start + piece.start)
        sizes = self.packing.sizes
        self.ranges = tuple(
            (bucket, slice(start, start + size)) for (bucket, start), size in zip(starts.items(), sizes, strict=True)
        )

    def cut(self, buckets: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Returns the shard's buckets, which share memory with the model's buckets."""
        return [buckets[bucket][where] for bucket, where in self.ranges]


def _shape_of(spec: TensorSpec, piece: Piece) -> tuple[int, ...]:
    is_whole = piece.stop - piece.start == spec.num_elements
    return spec.shape if is_whole else (piece.stop - piece.start,)

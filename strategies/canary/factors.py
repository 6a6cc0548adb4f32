"""Low-rank factors where training is not synchronous: each rank's own, and gathered where all else is summed up.

Synchronous ranks find the factors of their mean gradient together: see `hop_tf.strategies.canary.low_rank`. Here nobody
waits for anybody. A rank factorizes what it contributes to a large dense kernel, m x k, by one step of subspace
iteration, which begins where its step before has ended:

    M = contribution + E
    P = M Q', with Q' of its step before; then orthonormal columns
    Q = M^T P
    E = M - P Q^T, with the factors that the others decode: what is lost goes with its next contribution

The sum of what n ranks contribute has no factors of r columns. So a kernel is one piece, whose root sends out the
factors of all: n r (m + k) values in place of m k.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hop_tf.codecs import Codec, Identity
from hop_tf.errors import ProtocolError
from hop_tf.strategies.canary.low_rank import first_basis, is_factorized, orthonormal
from hop_tf.tensors.buffers import BufferPool
from hop_tf.tensors.packing import TensorSpec
from hop_tf.tensors.payloads import join, split


def kernels_last(specs: Sequence[TensorSpec], colayer: Sequence[int], rank: int | None, world_size: int) -> list[int]:
    """The variables of a colayer, those that go as factors behind the others; `rank` None: there are none."""
    return sorted(colayer, key=lambda index: goes_as_factors(specs[index], rank, world_size))


def goes_as_factors(spec: TensorSpec, rank: int | None, world_size: int) -> bool:
    """Whether contributions to a variable go as factors: where those of all ranks are not longer than the kernel."""
    return rank is not None and is_factorized(spec, rank, num_factors=world_size)


class KernelFactors:
    """What one rank contributes to a kernel, and what of that is still to be sent.

    Args:
      spec: The kernel.
      rank: r.
      codec: What factors are encoded with; short ones go as they are.
      min_encoded_values: Factors of fewer values are short.
      pool: Where large arrays come from.

    Attributes:
      lost: What is still to be sent, m x k: the sum of all contributions is that of what was encoded, and this; 0 after
        what is not finite.
    """

    def __init__(self, spec: TensorSpec, rank: int, codec: Codec, min_encoded_values: int, pool: BufferPool):
        self._sides = spec.shape
        self._rank = rank
        self._codecs = [Identity() if side * rank < min_encoded_values else codec for side in self._sides]
        self._pool = pool
        self.lost = np.zeros(spec.shape, np.float32)
        self._basis = first_basis(spec, rank)

    def encode(self, contribution: np.ndarray) -> np.ndarray:
        """The factors of a contribution and of what was lost before. See `gather`."""
        self.lost += self._matrix(contribution)
        basis = orthonormal(self.lost @ self._basis)
        factors = [np.ascontiguousarray(each, np.float32) for each in (basis, self.lost.T @ basis)]
        encoded = [codec.encode(each.ravel(), self._pool) for codec, each in zip(self._codecs, factors, strict=True)]
        product = self._product(encoded)
        if np.isfinite(product).all():
            self.lost -= product
            if factors[1].any():
                self._basis = factors[1]
        else:  # Training has diverged: another one with these variables may not.
            self.lost.fill(0)
        return gather(encoded, self._pool)

    def accumulate(self, data: np.ndarray, total: np.ndarray) -> None:
        """Adds the contributions of all whose factors were gathered.

        Args:
          data: What `gather` has given.
          total: The kernel's values, which may be padded.

        Raises:
          ProtocolError: If they are not factors of such a kernel.
        """
        self._matrix(total)[:] += self._product(split(data))

    def _product(self, encoded: Sequence[np.ndarray]) -> np.ndarray:
        if not encoded or len(encoded) % 2:
            raise ProtocolError(f"{len(encoded)} factors came, which are no pairs.")
        p, q = (self._decoded(axis, encoded[axis::2]) for axis in (0, 1))
        return p @ q.T

    def _decoded(self, axis: int, encoded: Sequence[np.ndarray]) -> np.ndarray:
        """The factors of one side, one beside the other."""
        side, factors = self._sides[axis], []
        for data in encoded:
            factors.append(np.empty(side * self._rank, np.float32))
            try:
                self._codecs[axis].decode(data, factors[-1])
            except ValueError as error:
                raise ProtocolError(f"factors of a kernel of {self._sides} came that are none: {error}") from error
        return np.hstack([each.reshape(side, self._rank) for each in factors])

    def _matrix(self, values: np.ndarray) -> np.ndarray:
        num_rows, num_columns = self._sides
        return values[: num_rows * num_columns].reshape(self._sides)


def gather(encoded: Sequence[np.ndarray], pool: BufferPool) -> np.ndarray:
    """Encoded factors, P and Q in turns, as one run of bytes, which `hop_tf.tensors.payloads.split` divides again."""
    parts = join(encoded)
    data = pool.take(sum(part.nbytes for part in parts))
    return np.concatenate(parts, out=data)

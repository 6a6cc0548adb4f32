"""Low-rank factors of large dense gradients: Case 1 of Canary's gradient sketch (section 4.3.1).

The mean gradient M of a dense kernel, m x k, goes as P Q^T, with P m x r and Q k x r: r (m + k) values in place of m k.
One step of subspace iteration finds them, and begins with the result of the previous step:

    M_i = gradient of rank i + E_i
    P   = mean of M_i Q', with Q' of the step before; then orthonormal columns
    Q   = mean of M_i^T P
    E_i = M_i - P (M_i^T P - e_i)^T        the loss, which is added in the next step

Both means are all-reduces of factors, which the codec shortens further. e_i is the loss of the codec in Q on rank i.
It becomes a part of E_i, because the next step has another P. The loss in P needs no memory, because any columns will
do. The paper factorizes by singular values. That costs more than the step it saves, and loses the smaller values. Ranks
find the factors together, so training is synchronous.

References:
  Vogels, Karimireddy, Jaggi. PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization. NeurIPS
  2019.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from hop_tf.codecs import Codec
from hop_tf.collectives.all_reduce import AllReduce
from hop_tf.runtime.group import ExchangeContext
from hop_tf.tensors import payloads
from hop_tf.tensors.packing import Packing, TensorSpec

# Other kernels travel as they are: those with fewer values, or with less reduction by factors.
_MIN_VALUES = 1 << 14
_MIN_REDUCTION = 4


def is_factorized(spec: TensorSpec, rank: int) -> bool:
    """True if a variable's gradient travels as factors of `rank` columns: the variable is a large dense kernel."""
    if spec.exact or len(spec.shape) != 2 or spec.dtype != tf.float32:
        return False
    return spec.num_elements >= max(_MIN_VALUES, _MIN_REDUCTION * rank * sum(spec.shape))


class LowRankMean:
    """Averages a colayer's gradients, those of large dense kernels as factors.

    Args:
      context: Membership, packing and buffers of the group.
      name: A name that is unique in the group and equal on all ranks.
      part: The packing of the colayer.
      rank: r.
      codec: Encodes factors and other gradients.
      algorithm: See `hop_tf.collectives.get_algorithm`.
    """

    def __init__(self, context: ExchangeContext, name: str, part: Packing, *, rank: int, codec: Codec, algorithm: str):
        self._part = part
        self._pool = context.pool
        self._kernels = [index for index, spec in enumerate(part.specs) if is_factorized(spec, rank)]
        self._others = [index for index in range(len(part.specs)) if index not in self._kernels]
        specs = [part.specs[index] for index in self._kernels]
        self._rest = part.part(self._others)
        self._p, self._q = (
            Packing([TensorSpec(spec.name, (spec.shape[axis], rank), spec.dtype) for spec in specs], part)
            for axis in (0, 1)
        )
        self._reductions = [
            context.make_all_reduce(f"{name}/{what}", packing, codec_of_part, algorithm)
            for what, packing, codec_of_part in (
                ("rest", self._rest, codec),
                ("p", self._p, codec.with_error_feedback(False)),
                ("q", self._q, codec.with_error_feedback(True)),
            )
        ]
        self._lost = [np.zeros(spec.shape, np.float32) for spec in specs]
        self._basis = [_first_basis(spec, rank) for spec in specs]

    def reset(self, session: int) -> None:
        """Prepares for step 0 of `session`. Keeps what earlier steps have lost."""
        for reduction in self._reductions:
            reduction.reset(session)

    @property
    def codec_seconds(self) -> float:
        """Time spent on encoding, decoding and adding."""
        return sum(reduction.codec_seconds for reduction in self._reductions)

    def mean(self, step: int, buckets: Sequence[np.ndarray], delivers: Callable[[int, int], bool]) -> list[np.ndarray]:
        """Averages over all ranks; arguments and errors as of `AllReduce.mean`.

        In a world of two, the other rank may leave in the middle of this step. Then some buckets may be the mean of
        both ranks, and others this rank's own.
        """
        is_committed = False

        def commit() -> None:  # A rank with one of the three means needs the other two over the same ranks.
            nonlocal is_committed
            is_committed = True

        def mean(reduction: AllReduce, vectors: Sequence[np.ndarray]) -> list[np.ndarray]:
            return reduction.mean(step, vectors, delivers, commit, is_committed=is_committed)

        rest, p, q = self._reductions
        result = [self._pool.take(values.nbytes).view(values.dtype) for values in buckets]
        for values in result:
            values.fill(0)
        means = mean(rest, self._gather(buckets))
        self._scatter(means, result)
        if not self._kernels:
            return result
        matrices = [
            self._matrix(buckets, kernel) + lost for kernel, lost in zip(self._kernels, self._lost, strict=True)
        ]
        products = [matrix @ basis for matrix, basis in zip(matrices, self._basis, strict=True)]
        bases = [_orthonormal(each) for each in self._factors(self._p, mean(p, _joined(self._p, products)))]
        own = [matrix.T @ basis for matrix, basis in zip(matrices, bases, strict=True)]
        factors = self._factors(self._q, mean(q, _joined(self._q, own)))
        lost_factors = self._factors(self._q, q.take_residuals())
        for number, kernel in enumerate(self._kernels):
            self._matrix(result, kernel)[:] = bases[number] @ factors[number].T
            if np.isfinite(factors[number]).all():  # Otherwise all ranks keep what they had.
                sent = own[number] - lost_factors[number]
                self._lost[number] = matrices[number] - bases[number] @ sent.T
                self._basis[number] = factors[number]
        return result

    def begin_at(self, step: int) -> None:
        """See `AllReduce.begin_at`."""
        for reduction in self._reductions:
            reduction.begin_at(step)

    def common_state(self) -> Sequence[np.ndarray]:
        """See `AllReduce.common_state`. The state is the factors Q from which the next step begins."""
        return self._basis

    def take_common_state(self, parts: Sequence[np.ndarray]) -> None:
        """See `AllReduce.take_common_state`."""
        self._basis = [
            payloads.view(part.copy(), np.float32, basis.shape) for part, basis in zip(parts, self._basis, strict=True)
        ]

    def settle(self, deadline: float) -> None:
        """See `AllReduce.settle`."""
        for reduction in self._reductions:
            reduction.settle(deadline)

    def close(self) -> None:
        """Stops taking messages."""
        for reduction in self._reductions:
            reduction.close()

    def _gather(self, buckets: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Returns the gradients that do not travel as factors, one vector for each bucket."""
        gathered = [np.zeros(size, values.dtype) for size, values in zip(self._rest.sizes, buckets, strict=True)]
        for number, index in enumerate(self._others):
            (bucket, source), (_, target) = self._part.place(index), self._rest.place(number)
            gathered[bucket][target] = buckets[bucket][source]
        return gathered

    def _scatter(self, means: Sequence[np.ndarray], result: Sequence[np.ndarray]) -> None:
        for number, index in enumerate(self._others):
            (bucket, target), (_, source) = self._part.place(index), self._rest.place(number)
            result[bucket][target] = means[bucket][source]

    def _matrix(self, buckets: Sequence[np.ndarray], kernel: int) -> np.ndarray:
        bucket, where = self._part.place(kernel)
        return buckets[bucket][where].reshape(self._part.specs[kernel].shape)

    def _factors(self, packing: Packing, means: Sequence[np.ndarray]) -> list[np.ndarray]:
        places = [packing.place(index) for index in range(len(packing.specs))]
        return [
            means[bucket][where].reshape(spec.shape).copy()
            for (bucket, where), spec in zip(places, packing.specs, strict=True)
        ]


def _joined(packing: Packing, factors: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Packs factors: one vector for each bucket."""
    buckets = packing.zeros()
    for index, factor in enumerate(factors):
        bucket, where = packing.place(index)
        buckets[bucket][where] = factor.ravel()
    return buckets


def _first_basis(spec: TensorSpec, rank: int) -> np.ndarray:
    """Q' of the first step, k x r: equal on all ranks."""
    seed = zlib.crc32(spec.name.encode())
    return np.random.default_rng(seed).normal(size=(spec.shape[1], rank)).astype(np.float32)


def _orthonormal(matrix: np.ndarray) -> np.ndarray:
    """Returns orthonormal columns that span the same space, or `matrix` itself if a value is not finite."""
    return np.linalg.qr(matrix)[0] if np.isfinite(matrix).all() else matrix

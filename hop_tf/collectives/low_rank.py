"""Means of large kernels as factors of low rank: Case 1 of Canary's gradient sketch (section 4.3.1).

The mean M of an m x k kernel is sent as P Q^T, with r (m + k) values instead of m k. P is m x r and Q is k x r.
One step of subspace iteration finds P and Q. It begins with the result of the previous step:

    M_i = value of rank i + E_i
    P   = mean of M_i Q', with Q' of the step before; both with orthonormal columns
    Q   = mean of M_i^T P
    E_i = M_i - P (M_i^T P - e_i)^T        the loss, which is added in the next step

Both means are all-reduces of factors, which the codec shortens further. All other values travel with P. e_i is the
codec's loss in rank i's part of Q. It becomes a part of E_i, because the next step has another P. Canary's paper
factorizes by singular values. That costs more than the step it saves, and loses the smaller values.

In this module a factor's columns are stored as rows: [r, m] and [r, k].

References:
  Vogels, Karimireddy, Jaggi. PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization. NeurIPS
  2019.
"""

from __future__ import annotations

import contextlib
import time
import zlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from hop_tf.codecs import Codec, LowRank
from hop_tf.collectives.mean import Mean
from hop_tf.ops import low_rank
from hop_tf.tensors import payloads
from hop_tf.tensors.buffers import BufferPool
from hop_tf.tensors.packing import Packing, TensorSpec


class LowRankMean(Mean):
    """Averages tensors, large kernels as factors.

    Args:
      packing: The buckets.
      codec: Selects the kernels to factorize, and encodes factors and other tensors.
      pool: Provides large arrays.
      make_all_reduce: `make_all_reduce(name, packing, codec)` makes an all-reduce.
    """

    def __init__(
        self,
        packing: Packing,
        codec: LowRank,
        pool: BufferPool,
        make_all_reduce: Callable[[str, Packing, Codec], Mean],
    ):
        self._packing = packing
        self._pool = pool
        self._kernels = [index for index, spec in enumerate(packing.specs) if codec.factorizes(spec)]
        self._others = [index for index in range(len(packing.specs)) if index not in self._kernels]
        specs = [packing.specs[index] for index in self._kernels]
        p, q = (
            [TensorSpec(spec.name, (codec.rank, spec.shape[axis]), spec.dtype) for spec in specs] for axis in (0, 1)
        )
        self._first = Packing([*(packing.specs[index] for index in self._others), *p], packing)
        self._second = Packing(q, packing)
        self._reductions = [
            make_all_reduce("p", self._first, codec.codec),
            make_all_reduce("q", self._second, codec.codec.with_error_feedback(True)),
        ]
        self._seconds = 0.0
        self._lost = [np.zeros(spec.shape, np.float32) for spec in specs]
        self._basis = [_first_basis(spec, codec.rank) for spec in specs]

    def reset(self, session: int) -> None:
        """Prepares for step 0 of `session`. Keeps the losses of earlier steps."""
        for reduction in self._reductions:
            reduction.reset(session)

    @property
    def codec_seconds(self) -> float:
        return self._seconds + sum(reduction.codec_seconds for reduction in self._reductions)

    def take_residuals(self) -> list[np.ndarray]:
        residuals = [np.zeros(size, np.float32) for size in self._packing.sizes]
        self._scatter(self._split(self._first, self._reductions[0].take_residuals()), residuals)
        for kernel, lost in zip(self._kernels, self._lost, strict=True):
            self._matrix(residuals, kernel)[:] = lost
            lost.fill(0)
        return residuals

    def mean(
        self,
        step: int,
        buckets: Sequence[np.ndarray],
        delivers: Callable[[int, int], bool],
        before_commit: Callable[[], None] = lambda: None,
        **arguments: int,
    ) -> list[np.ndarray]:
        """Averages over all ranks; arguments and errors as for `Mean.mean`.

        In a world of two, the other rank may leave in the middle of this step. Then some buckets may be the mean of
        both ranks, and others this rank's own.
        """
        is_committed = False

        def commit() -> None:  # A rank with the first mean needs the second one over the same ranks.
            nonlocal is_committed
            before_commit()
            is_committed = True

        def mean(reduction: Mean, vectors: Sequence[np.ndarray]) -> list[np.ndarray]:
            return reduction.mean(step, vectors, delivers, commit, is_committed=is_committed, **arguments)

        p, q = self._reductions
        with self._timed():
            matrices = self._corrected(buckets)
            products = [low_rank.times_vectors(*each) for each in zip(matrices, self._basis, strict=True)]
            others = [buckets[bucket][where] for bucket, where in map(self._packing.place, self._others)]
            vectors = self._joined(self._first, [*others, *products])
        first = mean(p, vectors)
        with self._timed():
            means = self._split(self._first, first)
            bases = means[len(others) :]
            are_finite = all(np.isfinite(values).all() for values in first)
            for basis in bases if are_finite else ():
                low_rank.orthonormalize(basis)
            own = [low_rank.vectors_times(*each) for each in zip(bases, matrices, strict=True)]
            vectors = self._joined(self._second, own)
        second = mean(q, vectors)
        with self._timed():
            factors = self._split(self._second, second)
            result = self._packing.take(self._pool)
            for values in result:
                values.fill(0)
            self._scatter(means, result)
            for number, kernel in enumerate(self._kernels):
                low_rank.add_product(bases[number], factors[number], self._matrix(result, kernel))
            lost = self._split(self._second, q.take_residuals())
            if are_finite and all(np.isfinite(values).all() for values in second):  # Otherwise all keep what they had.
                self._keep(matrices, bases, [mine - each for mine, each in zip(own, lost, strict=True)], factors)
        return result

    def _keep(self, matrices: list, bases: Sequence, sent: Sequence, factors: Sequence) -> None:
        """Keeps the values that this rank has not sent, and the factors from which the next step begins."""
        for matrix, basis, mine in zip(matrices, bases, sent, strict=True):
            low_rank.add_product(basis, mine, matrix, scale=-1.0)
        self._lost, self._basis = matrices, [factor.copy() for factor in factors]
        for basis in self._basis:  # Of length 1: otherwise P would be as small as the square of M.
            low_rank.orthonormalize(basis)

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - start

    def _corrected(self, buckets: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Returns the kernels' values plus the losses of earlier steps, as new arrays."""
        corrected = []
        for kernel, lost in zip(self._kernels, self._lost, strict=True):
            total = self._pool.take(lost.nbytes).view(np.float32).reshape(lost.shape)
            corrected.append(np.add(self._matrix(buckets, kernel), lost, out=total))
        return corrected

    def begin_at(self, step: int) -> None:
        for reduction in self._reductions:
            reduction.begin_at(step)

    def common_state(self) -> Sequence[np.ndarray]:
        """See `Mean.common_state`. The state is the factors Q from which the next step begins."""
        return self._basis

    def take_common_state(self, parts: Sequence[np.ndarray]) -> None:
        self._basis = [
            payloads.view(part.copy(), np.float32, basis.shape) for part, basis in zip(parts, self._basis, strict=True)
        ]

    def settle(self, deadline: float) -> None:
        for reduction in self._reductions:
            reduction.settle(deadline)

    def close(self) -> None:
        for reduction in self._reductions:
            reduction.close()

    def _scatter(self, values: Sequence[np.ndarray], result: Sequence[np.ndarray]) -> None:
        """Writes the tensors that do not travel as factors to their places. They come first in `values`."""
        for index, each in zip(self._others, values, strict=False):
            bucket, where = self._packing.place(index)
            result[bucket][where] = each.ravel()

    def _matrix(self, buckets: Sequence[np.ndarray], kernel: int) -> np.ndarray:
        bucket, where = self._packing.place(kernel)
        return buckets[bucket][where].reshape(self._packing.specs[kernel].shape)

    @staticmethod
    def _joined(packing: Packing, values: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Packs arrays: one vector for each bucket."""
        buckets = packing.zeros()
        for index, each in enumerate(values):
            bucket, where = packing.place(index)
            buckets[bucket][where] = each.ravel()
        return buckets

    @staticmethod
    def _split(packing: Packing, buckets: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The arrays in buckets, as views."""
        places = map(packing.place, range(len(packing.specs)))
        return [
            buckets[bucket][where].reshape(spec.shape)
            for (bucket, where), spec in zip(places, packing.specs, strict=True)
        ]


def _first_basis(spec: TensorSpec, rank: int) -> np.ndarray:
    """Q' of the first step: equal on all ranks."""
    seed = zlib.crc32(spec.name.encode())
    return np.random.default_rng(seed).normal(size=(rank, spec.shape[1])).astype(np.float32)

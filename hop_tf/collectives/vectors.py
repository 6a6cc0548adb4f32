"""The vectors of an all-reduce: cutting, encoding and summing them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Sequence

import numpy as np

from hop_tf.codecs import Codec, ErrorFeedback, Sparse
from hop_tf.codecs.base import float32_copy, take_float32
from hop_tf.records import Kind, Recorder, recorded
from hop_tf.tensors.buffers import BufferPool


def _timed(method: Callable) -> Callable:
    @functools.wraps(method)
    def call(self, *args):
        start = time.perf_counter()
        try:
            if self.recorder is None:  # The common case, without the cost of a context.
                return method(self, *args)
            with recorded(self.recorder, Kind.ENCODE):
                return method(self, *args)
        finally:
            self.seconds += time.perf_counter() - start

    return call


class Vector:
    """One of the vectors: cuts, encodes and sums it. For the arguments, see `AllReduce`.

    Attributes:
      seconds: Time spent on work for this vector alone. `Vectors` counts the rest.
      recorder: Records encoding, or None.
    """

    def __init__(
        self,
        size: int,
        codec: Codec,
        chunk_values: int,
        pool: BufferPool,
        passes_sums: bool,
        recorder: Recorder | None,
    ):
        self.recorder = recorder
        self._size = size
        self._codec = codec
        self._codec_of_parts = codec.for_sums if passes_sums else codec
        self._granularity = codec.granularity
        self._chunk_values = -(-chunk_values // self._granularity) * self._granularity
        self._feedback = ErrorFeedback(codec, size) if codec.error_feedback else None
        self._lost_pieces: list[tuple[np.ndarray, slice]] = []  # Losses of encodings in this attempt at a step.
        self._pool = pool
        self.seconds = 0.0
        self._pieces: dict[int, list[list[slice]]] = {}

    def pieces(self, num_ranks: int) -> list[list[slice]]:
        """The chunks of each rank's piece. Each piece has at least one chunk, which may be empty."""
        if num_ranks not in self._pieces:
            num_blocks = -(-self._size // self._granularity)
            ends = [min(self._size, num_blocks * i // num_ranks * self._granularity) for i in range(num_ranks + 1)]
            self._pieces[num_ranks] = [self._chunks(*bounds, self._chunk_values) for bounds in itertools.pairwise(ends)]
        return self._pieces[num_ranks]

    def whole(self) -> list[slice]:
        """The chunks of the whole vector: twice as long as usual, so as many as in half a vector."""
        return self._chunks(0, self._size, 2 * self._chunk_values)

    def _chunks(self, start: int, stop: int, num_values: int) -> list[slice]:
        starts = range(start, stop, num_values) or [start]
        return [slice(begin, min(begin + num_values, stop)) for begin in starts]

    def new_mean(self, values: np.ndarray) -> np.ndarray:
        """An array for the mean of vectors like `values`."""
        return self._pool.take(values.nbytes).view(values.dtype)

    def encode(self, values: np.ndarray, where: slice) -> np.ndarray:
        return self._encode(self._codec_of_parts, values[where], where)

    def encode_sum(self, values: np.ndarray, where: slice, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Encodes the sum of this rank's values and of encoded parts."""
        if self._feedback is None and len(parts) == 1:
            return self._codec_of_parts.reduce(parts[0], values[where], self._pool)
        total = self._codec_of_parts.total(parts, values[where], 1.0, self._pool)
        return self._encode(self._codec_of_parts, total, where)

    def encode_mean(self, values: np.ndarray, where: slice, parts: Sequence[np.ndarray], num_ranks: int) -> np.ndarray:
        """Encodes the sum of this rank's values and of encoded parts, divided by the number of ranks."""
        factor = 1 / num_ranks
        if self._feedback is None:
            total = self._codec_of_parts.total(parts, values[where], factor, self._pool)
            return self._codec.encode(total, self._pool)
        total = self._codec_of_parts.total(parts, values[where], 1.0, self._pool)
        return self._encode(self._codec, total, where, total.dtype.type(factor))

    def decode_mean(self, parts: Sequence[np.ndarray], result: np.ndarray, where: slice) -> None:
        """Writes the mean of encoded parts to a part of the result."""
        _write_to(result[where], lambda out: self._codec.decode_sum(parts, 1 / len(parts), out))

    def decode(self, data: np.ndarray, result: np.ndarray, where: slice) -> None:
        _write_to(result[where], lambda out: self._codec.decode(data, out))

    def corrected(self, values: np.ndarray) -> np.ndarray:
        """Begins an attempt at a step. Returns this rank's values to average, with residuals."""
        self._lost_pieces.clear()
        return values

    def sparse_codec(self, step: int, num_ranks: int) -> Sparse | None:
        """The codec for the whole vector in a step; None if the vector goes in pieces."""
        return None

    @_timed
    def end_step(self, mean: np.ndarray) -> None:
        """Called when the attempt has succeeded: all ranks have, or will have, this mean."""
        # Losses of attempts that were given up, or whose mean is not finite, do not carry over to the next step.
        if self._lost_pieces and np.isfinite(mean).all():
            for lost, where in self._lost_pieces:
                self._feedback.keep(lost, where)
        self._lost_pieces.clear()

    def take_residual(self) -> np.ndarray:
        """Removes and returns the residual that error feedback would add to the next vector; zeros without feedback."""
        return np.zeros(self._size, np.float32) if self._feedback is None else self._feedback.take()

    def _encode(self, codec: Codec, values: np.ndarray, where: slice, scale: float = 1.0) -> np.ndarray:
        if self._feedback is None:
            return codec.encode(values, self._pool)
        data, lost = self._feedback.try_encode(values, where, self._pool, scale)
        self._lost_pieces.append((lost, where))
        return data


def _write_to(result: np.ndarray, write: Callable[[np.ndarray], None]) -> None:
    """Calls `write` with the result, or with an array of float32 that is copied to a result of a smaller type."""
    if result.dtype in (np.float32, np.float64):
        write(result)
        return
    values = np.empty(result.size, np.float32)
    write(values)
    result[...] = values


Arrays = Sequence[np.ndarray]  # One for each of some vectors.
Where = Sequence[tuple[int, slice]]  # A chunk of several vectors: the number of each vector in it, and its slice.


class Vectors:
    """Vectors that travel together: their chunks with the same number are one message.

    The methods are those of `Vector`. A chunk has an array for each vector that has a part of it.

    Args:
      vectors: The vectors.

    Attributes:
      seconds: Time spent on encoding, decoding and adding.
      recorder: Records encoding, or None.
    """

    def __init__(self, vectors: Sequence[Vector]):
        self._vectors = vectors
        self.recorder = vectors[0].recorder
        self.seconds = 0.0
        self._pieces: dict[int, list[list[Where]]] = {}

    def pieces(self, num_ranks: int) -> list[list[Where]]:
        """The chunks of each rank's piece. Each piece has at least one chunk, which may be empty."""
        if num_ranks not in self._pieces:
            pieces = zip(*(vector.pieces(num_ranks) for vector in self._vectors), strict=True)
            self._pieces[num_ranks] = [_together(of_rank) for of_rank in pieces]
        return self._pieces[num_ranks]

    @functools.cached_property
    def whole(self) -> list[Where]:
        """The chunks of the whole vectors."""
        return _together([vector.whole() for vector in self._vectors])

    @_timed
    def encode(self, values: Arrays, where: Where) -> list[np.ndarray]:
        return [self._vectors[i].encode(values[i], part) for i, part in where]

    @_timed
    def encode_sum(self, values: Arrays, where: Where, received: Sequence[Arrays]) -> list[np.ndarray]:
        parts = zip(where, *received, strict=True)
        return [self._vectors[i].encode_sum(values[i], part, data) for (i, part), *data in parts]

    @_timed
    def encode_mean(self, values: Arrays, where: Where, received: Sequence[Arrays], num_ranks: int) -> list[np.ndarray]:
        parts = zip(where, *received, strict=True)
        return [self._vectors[i].encode_mean(values[i], part, data, num_ranks) for (i, part), *data in parts]

    @_timed
    def decode_mean(self, received: Sequence[Arrays], results: Arrays, where: Where) -> None:
        for (i, part), *data in zip(where, *received, strict=True):
            self._vectors[i].decode_mean(data, results[i], part)

    @_timed
    def decode(self, data: Arrays, results: Arrays, where: Where) -> None:
        for (i, part), of_vector in zip(where, data, strict=True):
            self._vectors[i].decode(of_vector, results[i], part)


def _together(chunks: Sequence[Sequence[slice]]) -> list[Where]:
    """Joins the chunks of several vectors: those with the same number become one chunk."""
    return [
        [(i, of_vector[number]) for i, of_vector in enumerate(chunks) if number < len(of_vector)]
        for number in range(max(map(len, chunks)))
    ]


class SparseVector(Vector):
    """A vector that is sent whole, as the selection of a sparse codec, in steps in which that takes fewer bytes.

    With error feedback, the loss of the whole vector is added to the next step's vector, whole or in pieces. With
    `TopK`, the loss is most of the vector. So a rank keeps the loss only when the step has ended: attempts that are
    given up have no effect. In steps whose mean is not finite, all ranks keep their previous residuals.
    """

    def __init__(self, size: int, codec: Sparse, *arguments):
        super().__init__(size, codec.dense, *arguments)
        self._sparse_codec = codec
        self._lost: np.ndarray | None = None
        self._lost_in_attempt: np.ndarray | None = None

    def sparse_codec(self, step: int, num_ranks: int) -> Sparse | None:
        codec = self._sparse_codec.at_step(step)
        return codec if goes_sparse(codec, num_ranks) else None

    @_timed
    def is_short(self, values: np.ndarray, codec: Sparse, num_ranks: int) -> bool:
        """True if the result of `corrected` is to go whole, as far as this rank knows."""
        share = max(codec.ratio, codec.share_of(values))
        return goes_sparse(dataclasses.replace(codec, ratio=share), num_ranks)

    @_timed
    def corrected(self, values: np.ndarray) -> np.ndarray:
        self._lost_in_attempt = None
        values = super().corrected(values)
        if self._lost is None:
            return values
        total = take_float32(values, self._pool)
        return np.add(values, self._lost, out=total, dtype=total.dtype)

    @_timed
    def encode_whole(self, values: np.ndarray, codec: Sparse) -> np.ndarray:
        """Encodes the result of `corrected`."""
        data = codec.encode(values, self._pool)
        if codec.error_feedback:
            # Without a residual, `values` is the caller's array, which must not be modified.
            lost = float32_copy(values, self._pool) if self._lost is None else values
            indices, sent = codec.entries(data, values.size, lost.dtype)
            with np.errstate(invalid="ignore"):  # inf - inf: see `end_step`.
                lost[indices] -= sent
            self._lost_in_attempt = lost
        return data

    @_timed
    def zeros(self, result: np.ndarray) -> np.ndarray:
        """Zeros in float32 at least. They are in `result` if its type is wide enough."""
        is_wide = result.dtype == np.promote_types(result.dtype, np.float32)
        total = result if is_wide else take_float32(result, self._pool)
        total.fill(0)
        return total

    @_timed
    def accumulate(self, data: np.ndarray, total: np.ndarray, codec: Sparse) -> None:
        """Adds the vector of a rank."""
        codec.accumulate(data, total)

    @_timed
    def finish(self, total: np.ndarray, result: np.ndarray, num_ranks: int) -> None:
        """Divides a sum by the number of ranks."""
        total *= total.dtype.type(1 / num_ranks)
        if total is not result:
            np.copyto(result, total)

    def end_step(self, mean: np.ndarray) -> None:
        super().end_step(mean)
        # If values are not finite, the selection and the mean are not finite either.
        if self._sparse_codec.error_feedback and np.isfinite(mean).all():
            self._lost = self._lost_in_attempt
        self._lost_in_attempt = None

    def take_residual(self) -> np.ndarray:
        residual = super().take_residual()
        if self._lost is not None:
            residual += self._lost
            self._lost = None
        return residual


class EncodedVector(Vector):
    """A vector that the training graph encodes, and whose mean it decodes: see `AllReduce`.

    The arrays for values and for the mean hold the bytes of their encodings. So a rank encodes only sums, and adds its
    own values as others would get them.
    """

    def encode(self, values: np.ndarray, where: slice) -> np.ndarray:
        return self._codec.cut(values.view(np.uint8), self._size, where, self._pool)

    def encode_sum(self, values: np.ndarray, where: slice, parts: Sequence[np.ndarray]) -> np.ndarray:
        return self._encode_total(values, where, parts, 1.0)

    def encode_mean(self, values: np.ndarray, where: slice, parts: Sequence[np.ndarray], num_ranks: int) -> np.ndarray:
        return self._encode_total(values, where, parts, 1 / num_ranks)

    def decode(self, data: np.ndarray, result: np.ndarray, where: slice) -> None:
        self._codec.paste(data, result.view(np.uint8), self._size, where)

    def _encode_total(self, values: np.ndarray, where: slice, parts: Sequence[np.ndarray], factor: float) -> np.ndarray:
        total = self._pool.take(4 * (where.stop - where.start)).view(np.float32)
        self._codec.decode_sum([self.encode(values, where), *parts], factor, total)
        return self._codec.encode(total, self._pool)


class EncodedPair(EncodedVector):
    """A vector that the training graphs of two ranks encode. No rank encodes their mean.

    So a rank gets both ranks' encodings instead, one behind the other in the order of ranks.
    """

    def new_mean(self, values: np.ndarray) -> np.ndarray:
        return self._pool.take(2 * values.nbytes).view(values.dtype)

    def decode_mean(self, parts: Sequence[np.ndarray], result: np.ndarray, where: slice) -> None:
        for part, of_rank in zip(parts, np.split(result.view(np.uint8), 2), strict=True):
            self._codec.paste(part, of_rank, self._size, where)


def goes_sparse(codec: Sparse, num_ranks: int) -> bool:
    """True if sending selections to all others takes at most as many bytes as sending dense vectors in pieces:

        (n - 1) codec.bytes_per_value  <=  2 (n - 1) / n  codec.dense.bytes_per_value

    All ranks get the same result, because the codec's ratio is equal on all ranks. A rank that has selected more tells
    the others.

    Args:
      codec: The codec of the step.
      num_ranks: n.
    """
    return num_ranks * codec.bytes_per_value <= 2 * codec.dense.bytes_per_value


def vector_class(codec: Codec, *, in_graph: bool, in_pair: bool) -> type[Vector]:
    """The member of `Vector` for a codec.

    Args:
      codec: See `AllReduce`.
      in_graph: See `AllReduce`.
      in_pair: True if two ranks send each other whole vectors.
    """
    if in_graph:
        return EncodedPair if in_pair else EncodedVector
    return SparseVector if isinstance(codec, Sparse) else Vector

"""All-reduce: the mean of vectors over all ranks, in every step.

A vector is cut into as many pieces as there are ranks, and a piece into chunks. While a chunk travels, the rank encodes
the next chunk and reduces one that has come. Several vectors travel together: their chunks with the same number are one
message.

    mesh   Each rank owns a piece. It gets the others' parts of the piece, and sends them the mean: two messages follow
           each other. In a world of two, ranks send each other whole vectors, in as many bytes but a single message,
           and each of them computes the mean.
    ring   Each piece goes around the ring, and every rank adds its own part. Then the mean goes around once more:
           2 (n - 1) messages follow each other, and a rank communicates with its two neighbors only.

In both, a rank sends 2 (n - 1) / n vectors, and encodes every piece once. On its way, a value is rounded twice in a
mesh, but only once in a world of two ranks. In a ring, it is rounded n times. All ranks decode the same encodings, so
that their results are equal to the bit. If the training graph encodes (`in_graph`), it rounds a rank's values before
the rank adds them, too.

A sparse codec selects different values on each rank, and their mean is less sparse. So every rank sends its whole
selection to all others, in one message. Each rank adds all selections, in the order of ranks. If that takes more bytes
than dense vectors in pieces (see `vectors.goes_sparse`), ranks average dense vectors as above instead. They encode
these with the sparse codec's codec for values. The same happens in a step in which a rank's selection is longer than
the codec's bound: an empty message tells the others.

The caller's `delivers` says from which step on a restarted rank takes part. It must be the same on all ranks.

When a rank leaves, the others agree on the first step without it (`Membership.delivers`). If they have begun this step
already, they begin it again without the rank. A rank that has sent a mean, or a sparse vector, ends the step before it
leaves, because others may have all they need. Before the rank sends such data, no rank can have a mean. A lost rank may
not have ended the step. Then the others find out if one of them has ended the step with the lost rank: see
`hop_tf.collectives.ended_steps`. In a mesh of two, a rank may leave although it has sent its vector: there is no third
rank that could have another mean. So a user who ends a program does not wait for the other rank.

References:
  Thakur, Rabenseifner, Gropp. Optimization of Collective Communication Operations in MPICH. IJHPCA 2005.
  Li et al. Pipe-SGD: A Decentralized Pipelined SGD Framework for Distributed Deep Net Training. NeurIPS 2018.
  Figures 2 (c) and 3.
"""

from __future__ import annotations

import abc
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

import numpy as np

from hop_tf.codecs import Codec, Sparse
from hop_tf.collectives.ended_steps import EndedSteps
from hop_tf.collectives.mean import Mean
from hop_tf.collectives.operation import Mailbox, Operation, Participants, RanksChanged
from hop_tf.collectives.vectors import Arrays, SparseVector, Vectors, Where, vector_class
from hop_tf.errors import ProtocolError
from hop_tf.membership.session import Membership
from hop_tf.tensors.buffers import BufferPool

# Values of a chunk. A chunk is large enough that Python costs little, and small enough that a piece has several chunks.
CHUNK_VALUES = 1 << 19

# In a world of two, a rank sends at most this many chunks more than it has received: 48 MiB. They fill a long link, but
# neither the mailbox nor the memory that two processes of one machine share.
_MAX_CHUNKS_AHEAD = 12

# The turn number of whole vectors, and the data that a rank sends if its vector is too long to go whole.
_WHOLE = (1 << 32) - 1
_TOO_LONG = np.empty(0, np.uint8)


class AllReduce(Mean):
    """Means by messages between the ranks.

    Attributes:
      passes_sums: True if ranks send sums of several ranks' values, too. False if they send only their own values, and
        means.
      takes_turns: True if `_reduce` always receives after its last send. Messages may then be held until the next
        receive: see `Operation.swaps`.

    Args:
      membership: Waiting and transport.
      name: Name of these vectors, equal on all ranks.
      sizes: Number of values of each vector.
      codecs: Codec of each vector. Lossy codecs take float32, bfloat16 and float16.
      pool: Provides large arrays.
      chunk_values: Values of a chunk; equal on all ranks.
      lane: Lane of messages, unless a network chooses one. Default None: as for `Transport.send`.
      recovers: True if the others go on with equal means when a rank is lost within a step, provided that `membership`
        goes on without lost ranks. A copy of the last means is kept for that. Default False: ranks that lack the lost
        rank's data raise.
      in_graph: For each vector, True if the training graph encodes it: `mean` then takes and returns the bytes of
        encodings, in arrays of any type. In a world of two, a mesh returns the encodings of both ranks, one behind the
        other, instead of one of the mean. The codecs of these vectors are divisible and have no error feedback, and
        `recovers` is False. The other ranks may do otherwise. Default: none is encoded.
    """

    passes_sums: ClassVar[bool] = True
    takes_turns: ClassVar[bool] = False

    def __init__(
        self,
        membership: Membership,
        name: str,
        *,
        sizes: Sequence[int],
        codecs: Sequence[Codec],
        pool: BufferPool,
        chunk_values: int = CHUNK_VALUES,
        lane: int | None = None,
        recovers: bool = False,
        in_graph: Sequence[bool] | None = None,
    ):
        self._membership = membership
        self._name = name
        self._pool = pool
        self._lane = lane
        self._mailbox = Mailbox(membership, f"all_reduce/{name}")
        self._ended_steps = EndedSteps(membership, name, pool) if recovers else None
        self._vectors = []
        for size, codec, encoded in zip(sizes, codecs, in_graph or [False] * len(sizes), strict=True):
            member = vector_class(codec, in_graph=encoded, in_pair=self._goes_both_ways)
            self._vectors.append(member(size, codec, chunk_values, pool, self.passes_sums, membership.recorder))
        self._participants: Participants | None = None  # Of the last attempt.
        self._joints: dict[tuple[int, ...], Vectors] = {}  # By the indices of the vectors that travel together.

    def reset(self, session: int) -> None:
        with self._membership.monitor:
            self._mailbox.clear(session)
            if self._ended_steps is not None:
                self._ended_steps.reset()

    def begin_at(self, step: int) -> None:
        self._mailbox.begin_at(step)

    def take_residuals(self) -> list[np.ndarray]:
        return [vector.take_residual() for vector in self._vectors]

    @property
    def codec_seconds(self) -> float:
        return sum(each.seconds for each in (*self._vectors, *self._joints.values()))

    def mean(
        self,
        step: int,
        vectors: Sequence[np.ndarray],
        delivers: Callable[[int, int], bool],
        before_commit: Callable[[], None] = lambda: None,
        *,
        is_committed: bool = False,
        training_step: int | None = None,
        codec_step: int | None = None,
    ) -> list[np.ndarray]:
        training_step = step if training_step is None else training_step
        codec_step = step if codec_step is None else codec_step
        for attempt in itertools.count():
            operation = Operation(
                self._membership,
                self._mailbox,
                step,
                delivers,
                before_commit,
                is_committed=is_committed,
                training_step=training_step,
                is_first=attempt == 0,
                recovers=self._ended_steps is not None,
                lane=self._lane,
                known=self._participants,
            )
            self._participants = operation.participants
            try:
                means = self._means(operation, vectors, codec_step)
                if self._ended_steps is not None:
                    self._ended_steps.end(operation, means)
            except RanksChanged:
                is_committed = operation.is_committed  # Others may have the mean of an earlier attempt.
                means = self._recovered(operation, vectors)
                if means is None:
                    continue
            except ValueError as error:
                raise ProtocolError(
                    f"rank {self._membership.rank}: cannot decode a part of the mean {self._name!r} in step "
                    f"{training_step}: {error}"
                ) from error
            for vector, mean in zip(self._vectors, means, strict=True):
                vector.end_step(mean)
            with self._membership.monitor:
                self._mailbox.forget(step)
            return means

    def _recovered(self, operation: Operation, vectors: Sequence[np.ndarray]) -> list[np.ndarray] | None:
        """The means of an attempt that has failed here, if another rank has them. The caller may write to them."""
        # Before this rank has committed, no rank has a mean with this rank's part. Without a loss, no rank lacks a mean
        # that others have.
        if self._ended_steps is None or not operation.is_committed or not operation.is_broken_by_loss():
            return None
        data = self._ended_steps.find(operation)
        if data is None:
            return None
        if data.nbytes != sum(values.nbytes for values in vectors):
            raise ProtocolError(f"expected the means {self._name!r}. Received: {data.nbytes} bytes.")
        means = []
        for values in vectors:
            mean = self._pool.take(values.nbytes)
            np.copyto(mean, data[: values.nbytes])
            means.append(mean.view(values.dtype))
            data = data[values.nbytes :]
        return means

    def _means(self, operation: Operation, vectors: Sequence[np.ndarray], codec_step: int) -> list[np.ndarray]:
        means = [vector.new_mean(values) for vector, values in zip(self._vectors, vectors, strict=True)]
        if len(operation.ranks) == 1:
            for vector, values, mean in zip(self._vectors, vectors, means, strict=True):
                if values.size:
                    np.copyto(mean.reshape(-1, values.size), vector.corrected(values))  # Of a pair, twice.
            return means
        together = []  # The other vectors go whole, or are empty. Ranks do not wait for empty ones.
        for index, (values, mean) in enumerate(zip(vectors, means, strict=True)):
            if values.size and not self._goes_whole(operation, index, values, mean, codec_step):
                together.append(index)
        if together:
            operation.begin(together)
            corrected = [self._vectors[index].corrected(vectors[index]) for index in together]
            joint = self._joint(tuple(together))
            is_small = all(len(piece) == 1 for piece in self._pieces(joint, len(operation.ranks)))
            operation.swaps = is_small and self.takes_turns and self._membership.transport.can_swap
            self._reduce(operation, joint, corrected, [means[index] for index in together])
        return means

    @property
    def _goes_both_ways(self) -> bool:
        """True if two ranks send each other whole vectors."""
        return False

    def _pieces(self, vectors: Vectors, num_ranks: int) -> Sequence[Sequence[Where]]:
        """The chunks of the pieces that ranks send."""
        return vectors.pieces(num_ranks)

    def _goes_whole(
        self, operation: Operation, index: int, values: np.ndarray, mean: np.ndarray, codec_step: int
    ) -> bool:
        """Averages a vector that a sparse codec shortens enough. Returns False if the vector is to go in pieces."""
        vector = self._vectors[index]
        codec = vector.sparse_codec(codec_step, len(operation.ranks))
        if codec is None:
            return False
        operation.begin([index])
        return self._gather(operation, vector, codec, values, mean)

    def _joint(self, indices: tuple[int, ...]) -> Vectors:
        if indices not in self._joints:
            self._joints[indices] = Vectors([self._vectors[index] for index in indices])
        return self._joints[indices]

    def _gather(
        self, operation: Operation, vector: SparseVector, codec: Sparse, values: np.ndarray, result: np.ndarray
    ) -> bool:
        """Sends an encoded vector whole to all others, and adds all ranks' vectors. False if one is too long."""
        ranks, mine = operation.ranks, operation.index
        values = vector.corrected(values)
        own, is_short = _TOO_LONG, vector.is_short(values, codec, len(ranks))
        if is_short:
            own = vector.encode_whole(values, codec)
            operation.commit()
        for offset in range(1, len(ranks)):  # Each rank begins with the next rank.
            operation.send(ranks[(mine + offset) % len(ranks)], _WHOLE, 0, [own])
        if not is_short:
            return False
        total = vector.zeros(result)
        for rank in ranks:
            data = own if rank == ranks[mine] else operation.receive([rank], _WHOLE, 0)[0][0]
            if not data.size:
                return False
            vector.accumulate(data, total, codec)
        vector.finish(total, result, len(ranks))
        return True

    @abc.abstractmethod
    def _reduce(self, operation: Operation, vectors: Vectors, values: Arrays, results: Arrays) -> None:
        """Sends and receives chunks until `results` hold the means."""

    def settle(self, deadline: float) -> None:
        if self._ended_steps is not None:
            self._ended_steps.settle(deadline)

    def close(self) -> None:
        self._mailbox.close()
        if self._ended_steps is not None:
            self._ended_steps.close()


class MeshAllReduce(AllReduce):
    """All-reduce over a mesh: see the module."""

    passes_sums = False
    takes_turns = True
    _SCATTER, _GATHER = 0, 1

    def _pieces(self, vectors: Vectors, num_ranks: int) -> Sequence[Sequence[Where]]:
        return [vectors.whole] if self._goes_both_ways else super()._pieces(vectors, num_ranks)

    @property
    def _goes_both_ways(self) -> bool:
        # Not for the last two ranks of a larger world: one could not tell if the other has ended a step with a lost
        # rank.
        return self._membership.world_size == 2

    def _reduce(self, operation: Operation, vectors: Vectors, values: Arrays, results: Arrays) -> None:
        if self._goes_both_ways:
            self._swap_whole(operation, vectors, values, results)
            return
        ranks, mine = operation.ranks, operation.index
        pieces = vectors.pieces(len(ranks))
        # Each rank begins with the next rank, so that not all ranks send to the same one at once.
        others = [(mine + offset) % len(ranks) for offset in range(1, len(ranks))]
        for chunk, owner, where in _by_chunk(pieces, others):
            operation.send(ranks[owner], self._SCATTER, chunk, vectors.encode(values, where))
        own = []
        for chunk, where in enumerate(pieces[mine]):
            parts = operation.receive([ranks[other] for other in reversed(others)], self._SCATTER, chunk)
            data = vectors.encode_mean(values, where, parts, len(ranks))
            operation.commit()
            for other in others:
                operation.send(ranks[other], self._GATHER, chunk, data)
            own.append((data, where))
        for chunk in range(max(len(pieces[owner]) for owner in others)):
            owners = [owner for owner in others if chunk < len(pieces[owner])]
            received = operation.receive([ranks[owner] for owner in owners], self._GATHER, chunk)
            for owner, data in zip(owners, received, strict=True):
                vectors.decode(data, results, pieces[owner][chunk])
        for data, where in own:
            vectors.decode(data, results, where)

    def _swap_whole(self, operation: Operation, vectors: Vectors, values: Arrays, results: Arrays) -> None:
        """Sends whole vectors to the only other rank, and averages both ranks' vectors."""
        other, chunks, own = 1 - operation.index, vectors.whole, {}
        ahead = min(_MAX_CHUNKS_AHEAD, len(chunks))
        for sent in range(len(chunks) + ahead):
            if sent < len(chunks):
                own[sent] = vectors.encode(values, chunks[sent])
                operation.send(other, self._SCATTER, sent, own[sent])
            if (ended := sent - ahead) >= 0:
                parts = [own.pop(ended), *operation.receive([other], self._SCATTER, ended)]
                # In the order of ranks, because the bits of a sum of two nans depend on it.
                vectors.decode_mean(parts if operation.index == 0 else parts[::-1], results, chunks[ended])
        # The other rank may have its mean already. But if this rank leaves, no third rank could have another one.
        operation.commit()


class RingAllReduce(AllReduce):
    """All-reduce over a ring: see the module."""

    takes_turns = True

    def _reduce(self, operation: Operation, vectors: Vectors, values: Arrays, results: Arrays) -> None:
        ranks, mine = operation.ranks, operation.index
        num_ranks = len(ranks)
        pieces = vectors.pieces(num_ranks)
        successor, predecessor = ranks[(mine + 1) % num_ranks], ranks[(mine - 1) % num_ranks]
        last = num_ranks - 1
        for turn in range(num_ranks):
            for chunk, where in enumerate(pieces[(mine - turn) % num_ranks]):
                received = operation.receive([predecessor], turn - 1, chunk) if turn else []
                if turn == 0:
                    data = vectors.encode(values, where)
                elif turn < last:
                    data = vectors.encode_sum(values, where, received)
                else:
                    data = vectors.encode_mean(values, where, received, num_ranks)
                    operation.commit()
                    vectors.decode(data, results, where)
                operation.send(successor, turn, chunk, data)
        for turn in range(last):
            for chunk, where in enumerate(pieces[(mine - turn) % num_ranks]):
                (data,) = operation.receive([predecessor], last + turn, chunk)
                if turn < last - 1:
                    operation.send(successor, num_ranks + turn, chunk, data)
                vectors.decode(data, results, where)


ALGORITHMS = {"mesh": MeshAllReduce, "ring": RingAllReduce}


def _by_chunk(pieces: Sequence[Sequence[Where]], owners: Sequence[int]) -> Iterator[tuple[int, int, Where]]:
    """Yields (number of the chunk, owner, where) for the pieces of `owners`. The first chunks of all come first."""
    for chunk in range(max(len(pieces[owner]) for owner in owners)):
        for owner in owners:
            if chunk < len(pieces[owner]):
                yield chunk, owner, pieces[owner][chunk]

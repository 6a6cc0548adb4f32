"""The gradient exchange index of Canary: the gradients that were merged here, and the ranks that are too far behind.

Colayers, iterations and ranks count from 0. The paper's worker (i) is rank i - 1, whose bit is 2^((i) - 1). The GEI
matrix has a row vector for each iteration, with an element for each colayer (Figure 16). An element is the sum of the
bits of all ranks, including this rank, whose gradient was merged on this rank.

References:
  Zhou, Wang, Lu, Xu, Sun, Guo. Canary: Decentralized Distributed Deep Learning Via Gradient Sketch and Partition in
  Multi-Interface Networks. IEEE TPDS 2021. Sections 5.2 and 5.3, Pseudocode 1.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from hop_tf.arguments import check_integer

_NONE = -1


def bit_of(rank: int) -> int:
    """The bit of a rank's gradient in an element of a row vector: the paper's 2^((i) - 1)."""
    return 1 << rank


def calc_staleness(newest: int, iteration: int) -> int:
    """The number of iterations behind the fastest rank: s = zeta - i (lines 4 to 6)."""
    return newest - iteration


def calc_proportion(row_vector: Sequence[int], rank: int) -> int:
    """The number of colayers of which the gradient of `rank` was exchanged (lines 7 to 17).

    The paper sums 2^z over these colayers in line 11 and compares the sum, bit by bit, with a number of colayers in
    line 22. This function returns the number of colayers.
    """
    return sum(bool(element & bit_of(rank)) for element in row_vector)


def check_staleness(staleness: int, threshold: int) -> bool:
    """True if a staleness is within the threshold s (lines 18 to 20)."""
    return staleness <= threshold


def check_proportion(proportion: int, threshold: int) -> bool:
    """True if `proportion` colayers suffice: at least the threshold p (lines 21 to 23)."""
    return proportion >= threshold


def check_min_colayers(min_colayers: int | None, num_colayers: int) -> None:
    """Raises ValueError unless `min_colayers` is None, or from 0 to k, the largest threshold p that can be reached."""
    if min_colayers is None:
        return
    check_integer("min_colayers", min_colayers, at_least=0)
    if min_colayers > num_colayers:
        raise ValueError(
            "`min_colayers` must be at most `num_colayers`: a step sends no more. Received: "
            f"min_colayers={min_colayers}, num_colayers={num_colayers}."
        )


@dataclasses.dataclass(frozen=True)
class Thresholds:
    """The thresholds beyond which a rank is overtime. It then drops the colayers that it has not sent.

    Attributes:
      max_staleness: s, in iterations; at least 0.
      min_colayers: p: a rank that has sent this many colayers may send the others, however late it is. 0: it may always
        send.

    Raises:
      ValueError: If a threshold is not an integer of at least 0.
    """

    max_staleness: int
    min_colayers: int

    def __post_init__(self):
        check_integer("max_staleness", self.max_staleness, at_least=0)
        check_integer("min_colayers", self.min_colayers, at_least=0)

    def is_overtime(self, staleness: int, proportion: int) -> bool:
        """True if a rank must drop its remaining colayers.

        Args:
          staleness: The number of iterations that the rank is behind.
          proportion: The number of colayers of its iteration that it has sent.
        """
        return not check_staleness(staleness, self.max_staleness) and not check_proportion(
            proportion, self.min_colayers
        )


@dataclasses.dataclass(frozen=True)
class GEIRows:
    """The rows of a matrix as arrays.

    Attributes:
      iterations: int64 [rows], ascending: the rows that are kept.
      bits: uint8 [rows, k, ceil(n / 8)]: the elements. The first byte has the bits of ranks 0 to 7.
      parts: int64 [m, 4]: for each incomplete gradient of a colayer, the iteration, rank and colayer, and the number of
        merged pieces.
      completed: int64 [n]: for each rank, the latest iteration of which all colayers were merged; -1 if there is none.
    """

    iterations: np.ndarray
    bits: np.ndarray
    parts: np.ndarray
    completed: np.ndarray


class GEIMatrix:
    """Q: one row vector for each iteration that still matters.

    A gradient is merged piece by piece. A bit is set when all pieces of the colayer were merged. The caller must merge
    each piece only once. Pieces of a row that was freed set no bit.

    A row is freed when every rank that has not ended has completed a later one. If a rank is stuck, the oldest row is
    freed when there are more than `max_rows` rows.

    Args:
      world_size: n.
      num_colayers: k.
      max_rows: Most rows that are kept; at least 1.

    Attributes:
      newest: zeta, the newest iteration that any rank is known to have started; -1 before the first.
    """

    def __init__(self, world_size: int, num_colayers: int, max_rows: int = 1024):
        check_integer("world_size", world_size, at_least=1)
        check_integer("num_colayers", num_colayers, at_least=1)
        check_integer("max_rows", max_rows, at_least=1)
        self._world_size = world_size
        self._num_colayers = num_colayers
        self._max_rows = max_rows
        self._rows: collections.OrderedDict[int, _Row] = collections.OrderedDict()
        self._completed = dict.fromkeys(range(world_size), _NONE)
        self._first = 0
        self.newest = _NONE

    def start(self, iteration: int) -> None:
        """Records that some rank has started `iteration`, and adds rows up to that iteration."""
        if iteration <= self.newest:
            return
        for new in range(max(self._first, self.newest + 1, iteration + 1 - self._max_rows), iteration + 1):
            self._rows[new] = _Row(self._num_colayers)
        self.newest = iteration
        self._free()

    def merge(self, rank: int, iteration: int, colayer: int, num_pieces: int = 1) -> None:
        """Records that a piece of a rank's gradient was merged.

        Args:
          rank: The rank.
          iteration: The iteration.
          colayer: The colayer.
          num_pieces: The number of pieces that the colayer has.
        """
        self.start(iteration)
        row = self._rows.get(iteration)
        if row is not None and row.add(rank, colayer, num_pieces):
            if rank in self._completed:  # Otherwise it is a late piece of a rank that has ended.
                self._completed[rank] = max(self._completed[rank], iteration)
            self._free()

    def completed(self, rank: int) -> int:
        """The latest iteration of which all colayers of a rank were merged; -1 if there is none."""
        return self._completed.get(rank, _NONE)

    def exclude(self, rank: int) -> None:
        """Stops keeping rows for a rank that has ended."""
        self._completed.pop(rank, None)
        self._free()

    def include(self, rank: int) -> None:
        """Keeps rows for a rank that has joined again."""
        self._completed.setdefault(rank, _NONE)

    def snapshot(self) -> GEIRows:
        """A copy of this matrix, which another matrix can take over. See `absorb`."""
        iterations = np.array(list(self._rows), np.int64)
        width = -(-self._world_size // 8)
        bits = b"".join(each.to_bytes(width, "little") for row in self._rows.values() for each in row.elements)
        parts = [
            (iteration, rank, colayer, count)
            for iteration, row in self._rows.items()
            for (rank, colayer), count in row.num_merged.items()
        ]
        completed = [self.completed(rank) for rank in range(self._world_size)]
        return GEIRows(
            iterations,
            np.frombuffer(bits, np.uint8).reshape(len(iterations), self._num_colayers, width),
            np.array(parts, np.int64).reshape(-1, 4),
            np.array(completed, np.int64),
        )

    def absorb(self, other: GEIRows) -> None:
        """Takes over the bits and counts of another matrix, because all that was merged there has now been merged here.

        Contributions that were merged here should have been merged there, too. Otherwise this matrix keeps only bits of
        iterations that are newer than all in the other matrix. Rows that were freed there are freed here.
        """
        if other.iterations.size:
            self._first = max(self._first, int(other.iterations[0]))
            self.start(int(other.iterations[-1]))
        for iteration, elements in zip(other.iterations.tolist(), other.bits, strict=True):
            if (row := self._rows.get(iteration)) is not None:
                row.elements = [int.from_bytes(each.tobytes(), "little") for each in elements]
                row.num_merged.clear()
        for iteration, rank, colayer, count in other.parts.tolist():
            if (row := self._rows.get(iteration)) is not None:
                row.num_merged[rank, colayer] = count
        for rank in self._completed:
            self._completed[rank] = max(self._completed[rank], int(other.completed[rank]))
        self._free()

    def row_vector(self, iteration: int) -> tuple[int, ...]:
        """The elements of an iteration, colayer 0 first. All are zero if the row does not exist yet, or was freed."""
        row = self._rows.get(iteration)
        return (0,) * self._num_colayers if row is None else tuple(row.elements)

    def matrix(self) -> Mapping[int, tuple[int, ...]]:
        """The rows that are kept, by iteration."""
        return {iteration: tuple(row.elements) for iteration, row in self._rows.items()}

    def staleness(self, iteration: int) -> int:
        """The number of iterations that `iteration` is behind the newest one."""
        return calc_staleness(self.newest, iteration)

    def proportion(self, iteration: int, rank: int) -> int:
        """The number of colayers of which a rank's gradient of `iteration` was merged."""
        return calc_proportion(self.row_vector(iteration), rank)

    def __len__(self) -> int:
        return len(self._rows)

    def _free(self) -> None:
        slowest = min(self._completed.values(), default=self.newest)
        self._first = max(slowest, self.newest + 1 - self._max_rows, self._first)
        while self._rows and next(iter(self._rows)) < self._first:
            self._rows.popitem(last=False)


class _Row:
    """A row vector, and the numbers of merged pieces of incomplete colayers."""

    def __init__(self, num_colayers: int):
        self.elements = [0] * num_colayers
        self.num_merged: collections.Counter[tuple[int, int]] = collections.Counter()  # By rank and colayer.

    def add(self, rank: int, colayer: int, num_pieces: int) -> bool:
        """Counts a piece. Returns True if the piece has completed the rank's gradient in all colayers."""
        self.num_merged[rank, colayer] += 1
        if self.num_merged[rank, colayer] < num_pieces:
            return False
        del self.num_merged[rank, colayer]
        self.elements[colayer] |= bit_of(rank)
        return calc_proportion(self.elements, rank) == len(self.elements)

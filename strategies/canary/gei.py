"""The gradient exchange index of Canary: whose gradients were merged here, and who is too far behind.

Colayers count from 0, iterations and ranks too; the paper's worker (i) is rank i - 1, whose bit is 2^((i) - 1). An
element of a GEI row vector is the sum of the bits of all ranks whose gradient of that colayer and iteration was merged
on this rank, its own included; the GEI matrix has a row for each iteration (Figure 16).

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
    """What a rank's gradient adds to an element of a row vector: the paper's 2^((i) - 1)."""
    return 1 << rank


def ranks_of(element: int) -> tuple[int, ...]:
    """The ranks whose bits are set, in order: for 233 they are 0, 3, 5, 6, 7, the paper's workers 1, 4, 6, 7, 8."""
    return tuple(rank for rank in range(element.bit_length()) if element & bit_of(rank))


def calc_staleness(newest: int, iteration: int) -> int:
    """How many iterations behind the fastest rank is: s = zeta - i (lines 4 to 6)."""
    return newest - iteration


def calc_proportion(row_vector: Sequence[int], rank: int) -> int:
    """Of how many colayers the gradient of `rank` was exchanged (lines 7 to 17).

    The paper sums 2^z over these colayers in line 11 and compares the sum, bit by bit, with a number of colayers in
    line 22. We take the number.
    """
    return sum(bool(element & bit_of(rank)) for element in row_vector)


def check_staleness(staleness: int, threshold: int) -> bool:
    """Whether a staleness is within the threshold s (lines 18 to 20)."""
    return staleness <= threshold


def check_proportion(proportion: int, threshold: int) -> bool:
    """Whether so many colayers suffice: at least the threshold p (lines 21 to 23)."""
    return proportion >= threshold


def check_min_colayers(min_colayers: int | None, num_colayers: int) -> None:
    """Raises ValueError unless `min_colayers` is None, or a threshold p that can be reached: at most k."""
    if min_colayers is None:
        return
    check_integer("min_colayers", min_colayers, at_least=0)
    if min_colayers > num_colayers:
        raise ValueError(
            f"`min_colayers` must be at most `num_colayers`: no more can leave. Received: min_colayers={min_colayers}, "
            f"num_colayers={num_colayers}."
        )


@dataclasses.dataclass(frozen=True)
class Thresholds:
    """When a rank is overtime, and what has not left by then is dropped.

    Attributes:
      max_staleness: s, in iterations; at least 0.
      min_colayers: p: from so many colayers on that have left, the others may follow, however late. 0: always.

    Raises:
      ValueError: If one is no integer of at least 0.
    """

    max_staleness: int
    min_colayers: int

    def __post_init__(self):
        check_integer("max_staleness", self.max_staleness, at_least=0)
        check_integer("min_colayers", self.min_colayers, at_least=0)

    def is_overtime(self, staleness: int, proportion: int) -> bool:
        """Whether a rank so far behind, of whose iteration so many colayers have left, must drop the others."""
        return not check_staleness(staleness, self.max_staleness) and not check_proportion(
            proportion, self.min_colayers
        )


@dataclasses.dataclass(frozen=True)
class GEIRows:
    """The rows of a matrix as arrays.

    Attributes:
      iterations: int64 [rows], ascending: which rows are kept.
      bits: uint8 [rows, k, ceil(n / 8)]: the elements, the bits of ranks 0 to 7 first.
      parts: int64 [m, 4]: iteration, rank, colayer, and how many of its pieces are there, where these are not all.
      completed: int64 [n]: of each rank the latest iteration of which all colayers are there; -1 if there is none.
    """

    iterations: np.ndarray
    bits: np.ndarray
    parts: np.ndarray
    completed: np.ndarray


class GEIMatrix:
    """Q: one row vector for each iteration that is of interest still.

    A gradient is merged piece by piece. A bit is set when all pieces of the colayer are there. Whoever merges them sees
    to it that each comes once. What comes for a row that was freed sets no bit any more.

    A row is freed when every rank that still counts has completed a later one. Where one does not, as one that is
    stuck, the oldest of more than `max_rows` rows is freed all the same.

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
        """Some rank has started `iteration`: there are rows up to that one."""
        if iteration <= self.newest:
            return
        for new in range(max(self._first, self.newest + 1, iteration + 1 - self._max_rows), iteration + 1):
            self._rows[new] = _Row(self._num_colayers)
        self.newest = iteration
        self._free()

    def merge(self, rank: int, iteration: int, colayer: int, num_pieces: int = 1) -> None:
        """A piece of a rank's gradient was merged.

        Args:
          rank: Whose.
          iteration: Of which iteration.
          colayer: Of which colayer.
          num_pieces: How many pieces the colayer has.
        """
        self.start(iteration)
        row = self._rows.get(iteration)
        if row is not None and row.add(rank, colayer, num_pieces):
            if rank in self._completed:  # Else it is a late one of a rank that has ended.
                self._completed[rank] = max(self._completed[rank], iteration)
            self._free()

    def completed(self, rank: int) -> int:
        """The latest iteration of which all colayers of a rank were merged; -1 if there is none."""
        return self._completed.get(rank, _NONE)

    def exclude(self, rank: int) -> None:
        """No row is kept for the sake of this rank any more: it has ended."""
        self._completed.pop(rank, None)
        self._free()

    def include(self, rank: int) -> None:
        """From now on rows are kept for the sake of this rank again: it has joined."""
        self._completed.setdefault(rank, _NONE)

    def snapshot(self) -> GEIRows:
        """What another matrix needs to know of this one. See `absorb`."""
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
        """All that was merged where another matrix is has been merged here: it takes its bits, and its incomplete ones.

        What was merged here should have been merged there, too: of what was not, bits of newer iterations than there
        are known stay. Rows that were freed there are freed here.
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
        """The elements of an iteration, colayer 0 first; all zero where there is no row, be it not yet or no more."""
        row = self._rows.get(iteration)
        return (0,) * self._num_colayers if row is None else tuple(row.elements)

    def matrix(self) -> Mapping[int, tuple[int, ...]]:
        """The rows that are kept, by iteration."""
        return {iteration: tuple(row.elements) for iteration, row in self._rows.items()}

    def staleness(self, iteration: int) -> int:
        """How far `iteration` is behind the newest one."""
        return calc_staleness(self.newest, iteration)

    def proportion(self, iteration: int, rank: int) -> int:
        """Of how many colayers a rank's gradient of `iteration` was merged."""
        return calc_proportion(self.row_vector(iteration), rank)

    def __len__(self) -> int:
        return len(self._rows)

    def _free(self) -> None:
        slowest = min(self._completed.values(), default=self.newest)
        self._first = max(slowest, self.newest + 1 - self._max_rows, self._first)
        while self._rows and next(iter(self._rows)) < self._first:
            self._rows.popitem(last=False)


class _Row:
    """A row vector, and the pieces of what is not complete yet."""

    def __init__(self, num_colayers: int):
        self.elements = [0] * num_colayers
        self.num_merged: collections.Counter[tuple[int, int]] = collections.Counter()  # By rank and colayer.

    def add(self, rank: int, colayer: int, num_pieces: int) -> bool:
        """Counts a piece; returns True if it has completed the rank's gradient, in all colayers."""
        self.num_merged[rank, colayer] += 1
        if self.num_merged[rank, colayer] < num_pieces:
            return False
        del self.num_merged[rank, colayer]
        self.elements[colayer] |= bit_of(rank)
        return calc_proportion(self.elements, rank) == len(self.elements)

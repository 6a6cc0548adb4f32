"""`BatchShares`: the part of each global batch that a rank takes."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence

import tensorflow as tf

AUTO = "auto"


class BatchShares:
    """Divides the rows of global batches among ranks, in proportion to a share of each rank.

    Let C[r] be the sum of the shares of ranks below r, and C the sum of all shares. Rank r of N takes the rows from
    n C[r] // C up to n C[r + 1] // C of a batch of n rows. A rank that would have no row takes the next row, and the
    ranks behind it begin later. A batch with fewer rows than ranks is shared equally: some ranks take the same row. So
    each rank can compute all slices from the shares. The share of an absent rank counts as zero.

    Args:
      given: A whole-numbered share for each rank, with a sum of at most 2^31; or `AUTO` for equal shares until others
        are assigned.
      rank: This rank.
      world_size: N.

    Attributes:
      is_automatic: True if shares change.
      rows: float64 scalar: weight of the step that is being traced (or run eagerly) in means over ranks. The weight is
        the step's number of rows. In a custom loop, this number is unknown, and the weight is `times_equal`.
      times_equal: float64 scalar: this rank's share in that step, divided by an equal share.
      times_mean: float64 scalar: this rank's share, divided by the mean share of the ranks that are present. All ranks
        count as present unless `fit` calls `note_departed`.
    """

    def __init__(self, given: Sequence[int] | str, rank: int, world_size: int):
        self.is_automatic = given == AUTO
        self._rank = rank
        self._world_size = world_size
        self._given = [1] * world_size if self.is_automatic else list(given)
        self.rows: tf.Tensor | float = 1.0
        self.times_equal: tf.Tensor | float = 1.0
        self.times_mean: tf.Tensor | float = 1.0
        self._mean_of_present = 1.0

    @functools.cached_property
    def variable(self) -> tf.Variable:
        """The shares, if they change. Not created in the constructor: the program may still configure devices."""
        with tf.init_scope(), tf.device("/cpu:0"):
            return tf.Variable(self._given, dtype=tf.int64, trainable=False, name="hop_tf_batch_shares")

    @functools.cached_property
    def _mean_variable(self) -> tf.Variable:
        with tf.init_scope(), tf.device("/cpu:0"):
            return tf.Variable(self._mean_of_present, dtype=tf.float64, trainable=False, name="hop_tf_mean_share")

    def note_departed(self, ranks: Collection[int]) -> None:
        """Called with the ranks that have left or failed. From the next step on, `times_mean` does not count them."""
        present = [rank for rank in range(self._world_size) if rank not in ranks]
        mean = self.total_part(present) * self._world_size / len(present) if ranks else 1.0
        if mean != self._mean_of_present:
            self._mean_of_present = mean
            self._mean_variable.assign(mean)

    def __str__(self) -> str:
        return AUTO if self.is_automatic else str(self._given)

    def assign(self, shares: Sequence[int]) -> None:
        """Changes the shares, for batches that are taken from now on."""
        self.variable.assign(shares)

    @property
    def of_ranks(self) -> list[int]:
        """The current shares."""
        return self.variable.numpy().tolist() if self.is_automatic else self._given

    def part_of(self, ranks: Collection[int]) -> float:
        """This rank's share, divided by the sum of the shares of `ranks`, which include this rank."""
        shares = self.of_ranks
        return shares[self._rank] / sum(shares[rank] for rank in ranks)

    def total_part(self, ranks: Collection[int]) -> float:
        """The part of a batch that these ranks take together."""
        shares = self.of_ranks
        return sum(shares[rank] for rank in ranks) / sum(shares)

    def read(self) -> tf.Tensor:
        """Emits the op that reads the shares."""
        return self.variable.read_value() if self.is_automatic else tf.constant(self._given, tf.int64)

    def begin_step(self, rows: int | tf.Tensor | None) -> None:
        """Emits the ops that compute `rows`, `times_equal` and `times_mean` for a step.

        Args:
          rows: Number of rows that this rank has of the batch; None in a custom loop.
        """
        with tf.device("/cpu:0"):
            shares = tf.cast(self.read(), tf.float64)
            self.times_equal = self._world_size * shares[self._rank] / tf.reduce_sum(shares)
            self.times_mean = self.times_equal / self._mean_variable
            self.rows = self.times_equal if rows is None else tf.cast(rows, tf.float64)

    def slice_of(self, num_rows: tf.Tensor, present: tf.Tensor | None = None) -> tuple[tf.Tensor, tf.Tensor]:
        """Emits the ops that compute this rank's slice of a batch.

        Args:
          num_rows: int64 scalar: n.
          present: int64 vector: 1 for each rank that shares the batch, 0 for the others. Default: all ranks share it.

        Returns:
          int64 scalars: the first row of the slice, and the row after its last.
        """
        rank, shares = self._rank, self.read()
        present = tf.ones_like(shares) if present is None else present
        # The number of ranks before each rank, and the sum of their shares. The last entries include all ranks.
        counts = tf.concat([[tf.constant(0, tf.int64)], tf.cumsum(present)], axis=0)
        ends = tf.concat([[tf.constant(0, tf.int64)], tf.cumsum(shares * present)], axis=0)
        bounds, num_ranks = num_rows * ends // ends[-1], counts[-1]

        def bound(r: int) -> tf.Tensor:  # Leaves at least one row to each rank before it and after it.
            first = counts[r] + tf.reduce_max((bounds - counts)[: r + 1])
            return tf.minimum(first, num_rows - (num_ranks - counts[r]))

        start, end = equal_slice(num_rows, counts[rank], num_ranks)
        has_enough = num_rows >= num_ranks
        return tf.where(has_enough, bound(rank), start), tf.where(has_enough, bound(rank + 1), end)


def equal_slice(num_rows: tf.Tensor, index: int | tf.Tensor, num_ranks: int | tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Emits the ops that compute slice `index` of `num_ranks` equal ones; see `BatchShares.slice_of`."""
    start = num_rows * index // num_ranks
    return start, tf.maximum(num_rows * (index + 1) // num_ranks, start + 1)

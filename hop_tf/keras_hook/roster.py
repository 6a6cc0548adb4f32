"""`Roster`: the ranks that share each batch, if other ranks take over the rows of a lost rank.

If ranks agree on the roster, `tf.data` delivers global batches, and the training step takes this rank's rows of them.
The step slices by the roster as updated by the previous steps, even if one execution makes several steps. So all ranks
change their slices in the same step. If ranks do not agree, `tf.data` slices ahead of the steps. A change then takes
effect only after the batches that were read ahead.
"""

from __future__ import annotations

import functools
from collections.abc import Collection

import tensorflow as tf

from hop_tf.keras_hook.shares import BatchShares, equal_slice

# An index beyond the last row of any batch.
_END = 1 << 62


class Roster:
    """The ranks that share the batches of the running `fit`.

    Args:
      rank: This rank.
      world_size: Number of ranks.
      shares: The part of a batch that each rank takes. Default: equal parts.

    Attributes:
      is_in_use: True if ranks share the batches that `fit` trains on. Otherwise a step takes all of its batch.
    """

    def __init__(self, rank: int, world_size: int, shares: BatchShares | None = None):
        self._rank = rank
        self._everybody = [1] * world_size
        self._missing: set[int] = set()  # The argument of the last `note_missing`.
        self._shares = shares
        self.is_in_use = False

    # Variables are not created in the constructor: the program may still configure devices.

    @functools.cached_property
    def variable(self) -> tf.Variable:
        """int64 vector: 1 for each rank that shares the batch that is sliced next, 0 for the others."""
        with tf.init_scope(), tf.device("/cpu:0"):
            return tf.Variable(self._everybody, dtype=tf.int64, trainable=False, name="hop_tf_roster")

    @functools.cached_property
    def _in_use_variable(self) -> tf.Variable:
        with tf.init_scope(), tf.device("/cpu:0"):
            return tf.Variable(self.is_in_use, trainable=False, name="hop_tf_roster_in_use")

    @property
    def present(self) -> list[int]:
        """1 for each rank that shares the batch that is sliced next, 0 for the others."""
        return self.variable.numpy().tolist()

    # Between steps.

    def begin_session(self) -> None:
        """Begins a session in which all ranks take part."""
        self._missing = set()
        self.variable.assign(self._everybody)

    def use(self, is_in_use: bool) -> None:
        """Sets `is_in_use`: from now on, ranks share the batches of `fit`, or each takes all of its batch."""
        if is_in_use != self.is_in_use:
            self.is_in_use = is_in_use
            self._in_use_variable.assign(is_in_use)

    def note_missing(self, ranks: set[int]) -> None:
        """Takes these ranks off this rank's roster: only the others share the batches that are sliced from now on."""
        if ranks != self._missing:
            self._missing = ranks
            self.variable.assign([int(rank not in ranks) for rank in range(len(self._everybody))])

    def admit(self, ranks: Collection[int]) -> None:
        """Lets these ranks share the next batch. Called while the training graph waits between two steps."""
        self.variable.scatter_nd_update([[rank] for rank in ranks], [1] * len(ranks))

    # In the graph.

    def growth(self) -> tf.Tensor:
        """Emits the ops that divide the size of this rank's slice by its size with all ranks present.

        The slice is that of the batch that is sliced next. A batch that was read ahead may have another slice.
        """
        shares = tf.constant(self._everybody, tf.int64) if self._shares is None else self._shares.read()
        part = tf.reduce_sum(self.variable * shares) / tf.reduce_sum(shares)
        return tf.where(self._in_use_variable.read_value(), 1 / part, 1.0)

    def follow(self, present: tf.Tensor) -> None:
        """Emits the ops that let only the ranks whose part is in a mean share the next batch.

        Args:
          present: For each rank, True if its part is in the mean. Equal on all ranks. If none is True, nothing changes.
        """
        with tf.device("/cpu:0"):
            present = tf.where(tf.reduce_any(present), tf.cast(present, tf.int64), self.variable)
            self.variable.assign(present)

    def slice_of(self, num_rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Emits the ops that compute this rank's slice of a batch, as `BatchShares.slice_of` does.

        Args:
          num_rows: int64 scalar.

        Returns:
          int64 scalars: the first row of the slice, and the row after its last.
        """
        if self._shares is not None:
            return self._shares.slice_of(num_rows, self.variable.read_value())
        ends = tf.cumsum(self.variable)
        return equal_slice(num_rows, ends[self._rank] - 1, ends[-1])

    def slice_in_step(self, num_rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Does the same as `slice_of` in a training step. If ranks do not share the batch, the slice is all of it."""
        start, end = self.slice_of(num_rows)
        is_in_use = self._in_use_variable.read_value()
        return tf.where(is_in_use, start, 0), tf.where(is_in_use, end, _END)

"""`Roster`: the ranks that share each batch, where others share the rows of a rank that is lost.

Where ranks agree on the roster, `tf.data` brings global batches, and the training step takes this rank's rows of them.
A batch that is sliced in the step is sliced by what the steps before have found, also where an execution makes several
steps. So ranks change in the same step. Elsewhere ranks do not change together anyhow: `tf.data` slices, ahead of the
steps, and a change takes effect as many batches later as were read ahead.
"""

from __future__ import annotations

import functools
from collections.abc import Collection

import tensorflow as tf

from hop_tf.keras_hook.shares import BatchShares, equal_slice

# Behind the last row of any batch.
_END = 1 << 62


class Roster:
    """The ranks that share the batches of the running `fit`.

    Args:
      rank: This rank.
      world_size: Number of ranks.
      shares: What part of a batch each rank takes. Default: ranks take equal parts.

    Attributes:
      is_in_use: Whether ranks share the batches that `fit` trains on. Otherwise a step takes all of its batch.
    """

    def __init__(self, rank: int, world_size: int, shares: BatchShares | None = None):
        self._rank = rank
        self._everybody = [1] * world_size
        self._missing: set[int] = set()  # As this rank has noted last.
        self._shares = shares
        self.is_in_use = False

    # Variables are not made in the constructor: programs may still choose their devices.

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
        """All ranks take part in the session that begins."""
        self._missing = set()
        self.variable.assign(self._everybody)

    def use(self, is_in_use: bool) -> None:
        """Ranks share, or do not share, the batches that `fit` trains on from now on."""
        if is_in_use != self.is_in_use:
            self.is_in_use = is_in_use
            self._in_use_variable.assign(is_in_use)

    def note_missing(self, ranks: set[int]) -> None:
        """These ranks, and no others, do not share batches that are sliced from now on, as far as this rank knows."""
        if ranks != self._missing:
            self._missing = ranks
            self.variable.assign([int(rank not in ranks) for rank in range(len(self._everybody))])

    def admit(self, ranks: Collection[int]) -> None:
        """These ranks share the next batch. Called while the training graph waits between two steps."""
        self.variable.scatter_nd_update([[rank] for rank in ranks], [1] * len(ranks))

    # In the graph.

    def growth(self) -> tf.Tensor:
        """Emits the ops that tell how many times this rank's slice is the one that it has when all ranks are there.

        That is the slice of the batch that is sliced next. A batch that was read ahead may have another.
        """
        shares = tf.constant(self._everybody, tf.int64) if self._shares is None else self._shares.read()
        part = tf.reduce_sum(self.variable * shares) / tf.reduce_sum(shares)
        return tf.where(self._in_use_variable.read_value(), 1 / part, 1.0)

    def follow(self, present: tf.Tensor) -> None:
        """Emits the ops that let those ranks share the next batch whose part is in a mean; nobody's: all stay.

        Args:
          present: For each rank, whether its part is; equal on all ranks.
        """
        with tf.device("/cpu:0"):
            present = tf.where(tf.reduce_any(present), tf.cast(present, tf.int64), self.variable)
            self.variable.assign(present)

    def slice_of(self, num_rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Emits the ops that compute this rank's slice of a batch, as of `BatchShares.slice_of`.

        Args:
          num_rows: int64 scalar.

        Returns:
          int64 scalars: its first row, and the one behind its last.
        """
        if self._shares is not None:
            return self._shares.slice_of(num_rows, self.variable.read_value())
        ends = tf.cumsum(self.variable)
        return equal_slice(num_rows, ends[self._rank] - 1, ends[-1])

    def slice_in_step(self, num_rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """As `slice_of`, in a training step, which may get a batch that is not shared: then, all of its rows."""
        start, end = self.slice_of(num_rows)
        is_in_use = self._in_use_variable.read_value()
        return tf.where(is_in_use, start, 0), tf.where(is_in_use, end, _END)

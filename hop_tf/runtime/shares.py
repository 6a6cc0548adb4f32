"""Measures the rows that ranks train on, and lets ranks agree on shares of a batch by their speeds.

A rank measures the time of a step from its batch to its gradients, without waiting for others. When all have made some
steps, and again whenever an epoch begins, each rank tells rank 0 its seconds per row. Rank 0 makes shares in proportion
to the ranks' speeds, and sends all ranks the same shares. All ranks wait for the new shares between two steps, so all
ranks change to them in the same step.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf
from absl import logging

from hop_tf.codecs import Codec, Identity, LowRank
from hop_tf.keras_hook.shares import BatchShares
from hop_tf.membership.rounds import Rounds
from hop_tf.tensors.packing import TensorSpec

# Steps before ranks agree for the first time in a `fit`, and the least number of steps for a measurement.
WARMUP_STEPS = 16
_MIN_STEPS = 4
# Number of steps for the median duration.
_NUM_LATEST = 64
# The sum of measured shares, and the relative change below which shares stay.
_TOTAL = 1 << 16
_TOLERANCE = 0.03

_SECONDS = struct.Struct("<d")
_SHARE = np.dtype("<i8")


def refuse_float16(specs: Sequence[TensorSpec], codec: Codec | LowRank) -> None:
    """Refuses float16 with weights by rows, because a value times thousands of rows often exceeds the range.

    Args:
      specs: The tensors to send.
      codec: The codec for them.

    Raises:
      ValueError: If a tensor travels as float16.
    """
    of_values = codec.codec if isinstance(codec, LowRank) else codec
    if of_values == Identity(dtype="float16") or any(spec.dtype == tf.float16 for spec in specs):
        raise ValueError(
            "`batch_shares` must be None if values travel as float16, because ranks multiply values by numbers of "
            f"rows, which often exceeds its range. Use bfloat16. Received: codec={codec!r}, and variables of the types "
            f"{sorted({spec.dtype.name for spec in specs})}."
        )


class RowStatistics:
    """Rows trained on, and the time that they take, counted by the training graph.

    Attributes:
      total: Number of rows that this rank has trained on; float64 variable.
    """

    def __init__(self):
        with tf.init_scope(), tf.device("/cpu:0"):
            self.total = tf.Variable(0.0, dtype=tf.float64, trainable=False, name="hop_tf_rows")
            self._started_at = tf.Variable(0.0, dtype=tf.float64, trainable=False, name="hop_tf_rows_started_at")
            self._number = tf.Variable(0, dtype=tf.int64, trainable=False, name="hop_tf_rows_number")
            latest = tf.zeros([_NUM_LATEST], tf.float64)
            self._latest = tf.Variable(latest, trainable=False, name="hop_tf_seconds_for_a_row")

    def count(self, rows: int | tf.Tensor) -> None:
        """Emits the op that counts a step's rows."""
        self.total.assign_add(tf.cast(rows, tf.float64))

    # The clock is read in functions: see `hop_tf.runtime.report`.

    def begin_step(self) -> tf.Tensor:
        """Emits the op that records the start of a step, when its batch is there. The rest of the step runs later."""
        with tf.device("/cpu:0"):
            return self._record_start()

    def end_step(self, rows: tf.Tensor, gradients: Sequence) -> None:
        """Emits the op that records the time when the gradients of a step with `rows` rows are there."""
        ready = [each for each in tf.nest.flatten(gradients, expand_composites=True) if each is not None]
        # This cast is outside of the context. Within it, only the cast would wait for the gradients, and not the
        # function.
        rows = tf.cast(rows, tf.float64)
        with tf.device("/cpu:0"), tf.control_dependencies([] if tf.executing_eagerly() else ready):
            self._record_end(rows)

    @tf.function(autograph=False)
    def _record_start(self) -> tf.Tensor:
        now = tf.timestamp()
        self._started_at.assign(now)
        return now

    @tf.function(autograph=False)
    def _record_end(self, rows: tf.Tensor) -> None:
        seconds = (tf.timestamp() - self._started_at) / rows
        self._latest.scatter_nd_update([[self._number % _NUM_LATEST]], [seconds])
        self._number.assign_add(1)

    def take_seconds_per_row(self) -> float:
        """The median of the steps since the last call. If these are too few, returns 0.0 and keeps them."""
        number = int(self._number)
        if number < _MIN_STEPS:
            return 0.0
        self._number.assign(0)
        return float(np.median(self._latest.numpy()[:number]))


def shares_of(seconds_per_row: Mapping[int, float], shares: Sequence[int]) -> list[int]:
    """Shares in proportion to the ranks' speeds, in whole numbers.

    Args:
      seconds_per_row: Seconds per row of the present ranks; 0.0 if not known.
      shares: The present shares. Shares of absent ranks stay. All shares stay if a speed is not known, or if none would
        change by much.

    Returns:
      The shares.
    """
    if not all(seconds_per_row.values()):
        return list(shares)
    speeds = {rank: 1 / seconds for rank, seconds in seconds_per_row.items()}
    parts = np.asarray(shares) / sum(shares)
    known = list(speeds)
    new = parts.copy()
    new[known] = np.array([*speeds.values()]) / sum(speeds.values()) * parts[known].sum()
    if np.all(np.abs(new / parts - 1) <= _TOLERANCE):
        return list(shares)
    return [max(1, round(_TOTAL * part)) for part in new]


def agree_on_shares(rounds: Rounds, position: int, shares: BatchShares, seconds_per_row: float) -> None:
    """Assigns the shares that rank 0 makes from all ranks' measurements. Called between two steps.

    Ranks agree at *positions* of a `fit`: 1 after the first steps of the first epoch, and 2 e when epoch e begins.
    If rank 0 has left, shares stay as they are.

    Args:
      rounds: The rounds, in which rank 0 decides.
      position: See above.
      shares: The shares to agree on.
      seconds_per_row: This rank's measurement; 0.0 without one.

    Blocks: as `Rounds.decide` does.

    Raises:
      HopError: As `Membership.wait` does.
    """

    def choose(measured: Mapping[int, bytes]) -> bytes:
        seconds = {rank: _SECONDS.unpack(data)[0] for rank, data in measured.items()}
        return np.array(shares_of(seconds, shares.of_ranks), _SHARE).tobytes()

    decision = rounds.decide(position, _SECONDS.pack(seconds_per_row), choose)
    new = shares.of_ranks if decision is None else np.frombuffer(decision, _SHARE).tolist()
    if new != shares.of_ranks:
        shares.assign(new)
        parts = ", ".join(f"{share / sum(new):.3f}" for share in new)
        logging.info("rank %d: ranks take these parts of a batch from now on: %s.", rounds.rank, parts)

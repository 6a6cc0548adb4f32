"""Measures the rows that ranks train on, and lets ranks agree on shares of a batch by their speeds.

A rank measures the time of a step from its batch to its gradients, without waiting for others. When all have made some
steps, and again whenever an epoch begins, each rank tells rank 0 its seconds per row. Rank 0 makes shares in proportion
to the ranks' speeds, and sends all ranks the same shares. All ranks wait for them between two steps, so all change in
the same step.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tensorflow as tf
from absl import logging

from hop_tf.codecs import Codec, Identity
from hop_tf.keras_hook.shares import BatchShares
from hop_tf.membership import LeftBehind, Membership, SessionQueue
from hop_tf.tensors.packing import TensorSpec
from hop_tf.transport.base import Message

QUEUE = "batch_shares"

# Steps before ranks agree for the first time in a `fit`, and the least number of steps for a measurement.
WARMUP_STEPS = 16
_MIN_STEPS = 4
# Steps in the median duration.
_NUM_LATEST = 64
# The sum of measured shares, and the relative change below which shares stay.
_TOTAL = 1 << 16
_TOLERANCE = 0.03

# The position of a rank that no longer agrees.
_ENDED = 1 << 62
_MEASURED = struct.Struct("<qd")  # The position, and seconds per row; 0 if not known.
_POSITION = struct.Struct("<q")  # In a decision the shares follow.
_SHARE = np.dtype("<i8")


def refuse_float16(specs: Sequence[TensorSpec], codec: Codec) -> None:
    """Refuses float16 with weights by rows: a value times thousands of rows is often beyond its range.

    Args:
      specs: The tensors to send.
      codec: The codec for them.

    Raises:
      ValueError: If a tensor travels as float16.
    """
    if codec == Identity(dtype="float16") or any(spec.dtype == tf.float16 for spec in specs):
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
        """Emits the op that records the start of a step, when its batch is there. The rest of the step comes after."""
        with tf.device("/cpu:0"):
            return self._record_start()

    def end_step(self, rows: tf.Tensor, gradients: Sequence) -> None:
        """Emits the op that records the time when the gradients of a step with `rows` rows are there."""
        ready = [each for each in tf.nest.flatten(gradients, expand_composites=True) if each is not None]
        rows = tf.cast(rows, tf.float64)  # Within the context, only this op would wait, and not the function.
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


class ShareAgreement:
    """Brings all ranks the shares that rank 0 makes from their measurements.

    Ranks agree at *positions* of a `fit`: 1 after the first steps of the first epoch, and 2 e when epoch e begins.
    Ranks do not wait for a rank that has left. If rank 0 has left, shares stay as they are. A process that was started
    again takes no part in the running `fit`, but takes shares that come.

    Args:
      membership: Waiting and transport.
      shares: The shares to agree on.

    Attributes:
      takes_part: True if this rank reports its measurements in the running session.
      sent_rounds: The position after the last one that this rank has sent to others in the running session.
    """

    def __init__(self, membership: Membership, shares: BatchShares):
        self._membership = membership
        self._shares = shares
        self._others = [rank for rank in range(membership.world_size) if rank != membership.rank]
        self._queue = SessionQueue(membership, QUEUE, membership.session)
        self._measured: dict[int, tuple[int, float]] = {}  # By rank: the latest position, and seconds per row.
        self._decided: tuple[int, list[int]] = (0, [])
        self._incarnations: dict[int, int] = {}
        self.takes_part = True
        self.sent_rounds = 0
        self._queue.start(self._on_message)

    def reset(self, session: int) -> None:
        """Forgets everything, for a session that this rank is about to enter."""
        with self._membership.monitor:
            self._queue.session = session
            self._measured.clear()
            self._decided = (0, [])
            self._incarnations = {rank: self._membership.incarnation_of(rank) for rank in self._others}
            self.sent_rounds = 0

    def agree(self, position: int, seconds_per_row: float) -> None:
        """Assigns the shares that all ranks get. Called between two steps.

        Args:
          position: See above.
          seconds_per_row: This rank's measurement; 0.0 without one.

        Blocks: until all ranks that take part have called this, and rank 0's answer has come.

        Raises:
          HopError: As `Membership.wait` does.
        """
        with contextlib.suppress(LeftBehind):  # Then it keeps the shares that it knows.
            if self.takes_part and self._membership.rank == 0:
                self._decide(position, seconds_per_row)
            elif self.takes_part:
                self._send(0, _MEASURED.pack(position, seconds_per_row), position)
                self._wait(lambda: [0] if self._decided[0] < position and self._counts(0, position) else [], position)
        self._assign()

    def end(self) -> None:
        """Ends this rank's part in the session's agreements, so that no rank waits for it while it waits for them."""
        if not self.takes_part:
            return
        if self._membership.rank == 0:
            self._tell(_ENDED, self._shares.of_ranks, self.sent_rounds)
        else:
            self._send(0, _MEASURED.pack(_ENDED, 0.0), self.sent_rounds)

    def _decide(self, position: int, seconds_per_row: float) -> None:
        decided, _ = self._decided

        def missing() -> list[int]:
            # A rank that waits for a decision counts, even at an earlier position: epochs may be shorter here.
            known = self._measured
            return [r for r in self._others if known.get(r, (0,))[0] <= decided and self._counts(r, position)]

        self._wait(missing, position)
        with self._membership.monitor:
            of_ranks = {rank: seconds for rank, (at, seconds) in self._measured.items() if at < _ENDED}
            of_ranks = {rank: seconds for rank, seconds in of_ranks.items() if self._is_there(rank)}
        self._decided = position, shares_of({0: seconds_per_row, **of_ranks}, self._shares.of_ranks)
        self._tell(*self._decided, position)

    def _tell(self, position: int, shares: Sequence[int], number: int) -> None:
        """Sends rank 0's decision to all."""
        header = _POSITION.pack(position) + np.array(shares, _SHARE).tobytes()
        with self._membership.monitor:
            present = [rank for rank in self._others if self._membership.departure(rank) is None]
        for rank in present:
            self._send(rank, header, number)

    def _assign(self) -> None:
        with self._membership.monitor:
            _, shares = self._decided
        if shares and shares != self._shares.of_ranks:
            self._shares.assign(shares)
            parts = ", ".join(f"{share / sum(shares):.3f}" for share in shares)
            logging.info("rank %d: ranks take these parts of a batch from now on: %s.", self._membership.rank, parts)

    def _send(self, rank: int, header: bytes, number: int) -> None:
        if self._membership.rank == 0 or self._counts(rank, number):
            self._membership.transport.connect(rank)  # From now on its silence counts.
            self._queue.send(rank, header, step=number)
        with self._membership.monitor:
            self.sent_rounds = number + 1

    def _wait(self, missing: Callable[[], list[int]], position: int) -> None:
        self._membership.wait(missing, operation="agree on batch shares", step=position)

    def _is_there(self, rank: int) -> bool:
        is_new = self._membership.incarnation_of(rank) != self._incarnations[rank]
        return not is_new and self._membership.departure(rank) is None

    def _counts(self, rank: int, position: int) -> bool:
        """True if `rank` takes part. Called with the monitor held, or where a race does no harm."""
        is_new = self._membership.incarnation_of(rank) != self._incarnations[rank]
        return not is_new and self._membership.delivers(rank, QUEUE, position)

    def _on_message(self, message: Message) -> None:
        header = message.header
        if message.sender == 0 and len(header) == _POSITION.size + self._membership.world_size * _SHARE.itemsize:
            (position,) = _POSITION.unpack_from(header)
            self._decided = position, np.frombuffer(header, _SHARE, offset=_POSITION.size).tolist()
        elif self._membership.rank == 0 and len(header) == _MEASURED.size:
            self._measured[message.sender] = _MEASURED.unpack(header)
        else:
            raise message.unexpected()

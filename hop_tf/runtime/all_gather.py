"""`AllGather`: gives every rank each rank's value, as an operation of a graph."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from hop_tf.errors import HopError
from hop_tf.membership.waiting import Interrupted
from hop_tf.tensors.host import runs_on_host

_CALL = struct.Struct("<q")
_IN_GRAPH = 0


class AllGather:
    """Emits ops that give every rank each rank's value. A thread communicates, so that no op blocks another.

    Values are gathered one after the other, in the order of the program's requests. All ranks have to request the same
    values. If a step is aborted, only some ranks may have made a request. So the number of calls outside of graphs
    travels with each value. If ranks are at different calls, the ops fail. The thread starts with the first value.

    Args:
      world_size: Number of ranks.
      gather: Takes this rank's bytes, and returns each rank's. Blocks.
      on_error: Called with an exception that `gather` has raised.
    """

    def __init__(
        self, world_size: int, gather: Callable[[bytes], Sequence[bytes]], on_error: Callable[[BaseException], None]
    ):
        self._world_size = world_size
        self._gather = gather
        self._on_error = on_error
        self._num_eager_calls = 0  # In the session.
        self._queues: tuple[tf.queue.FIFOQueue, tf.queue.FIFOQueue] | None = None
        self._thread = threading.Thread(target=self._run, name="hop_tf all-gather", daemon=True)

    def __call__(self, value: tf.Tensor) -> list[tf.Tensor]:
        """Emits the ops for a value.

        Args:
          value: The value, with the same dtype and number of dimensions on all ranks.

        Returns:
          The ranks' values, in the order of ranks.

        Blocks: (when run) until all ranks have made the request.

        Raises:
          tf.errors.InvalidArgumentError: When run, if a rank was lost, or has left. The text has the reason. Also after
            an aborted step, until the next session.
        """
        value = tf.convert_to_tensor(value)
        call = _IN_GRAPH
        if tf.executing_eagerly():
            call = self._num_eager_calls = self._num_eager_calls + 1
        with tf.init_scope():
            count, own, all_ranks = self._start()
        with tf.device("/cpu:0"):
            # Within a tf.function, ops on the same queue run in the order of the program.
            number = count.assign_add(1, read_value=True)
            with tf.control_dependencies([own.enqueue([number, call, tf.io.serialize_tensor(value)])]):
                answered, values, error = all_ranks.dequeue()
            # An aborted step may have left an answer in the queue.
            is_answer = tf.logical_and(tf.equal(error, ""), tf.equal(answered, number))
            check = tf.raw_ops.Assert(condition=is_answer, data=[error, answered, number])
            with tf.control_dependencies([check]):
                parts = tf.unstack(tf.ensure_shape(tf.identity(values), [self._world_size]))
            parts = [tf.io.parse_tensor(part, value.dtype) for part in parts]
        rank = value.shape.rank
        return [tf.ensure_shape(part, tf.TensorShape(None if rank is None else [None] * rank)) for part in parts]

    def reset(self) -> None:
        """Drops answers that were not taken, for a session that this rank is about to enter."""
        self._num_eager_calls = 0
        if self._queues is not None:
            _, all_ranks = self._queues
            for _ in range(int(all_ranks.size())):
                all_ranks.dequeue()

    def close(self) -> None:
        """Ends the thread."""
        if self._queues is not None:
            for queue in self._queues:
                queue.close(cancel_pending_enqueues=True)
            self._thread.join(timeout=5)

    def _start(self) -> tuple[tf.Variable, tf.queue.FIFOQueue, tf.queue.FIFOQueue]:
        if self._queues is None:
            with tf.device("/cpu:0"):
                self._count = tf.Variable(0, dtype=tf.int64, trainable=False, name="hop_tf_gathered")
                self._queues = (
                    tf.queue.FIFOQueue(1, [tf.int64, tf.int64, tf.string]),
                    tf.queue.FIFOQueue(1, [tf.int64, tf.string, tf.string]),
                )
            self._thread.start()
        return self._count, *self._queues

    @runs_on_host
    def _run(self) -> None:
        own, all_ranks = self._queues
        try:
            while True:
                number, call, data = own.dequeue()
                values, error = [], ""
                try:
                    calls, values = _split(self._gather(_CALL.pack(int(call)) + data.numpy()))
                    if len(set(calls)) > 1:
                        error = "a rank has aborted a step, so ranks no longer ask for the same values"
                except Interrupted:
                    error = "this rank has left the session"
                except HopError as raised:
                    error = f"{type(raised).__name__}: {raised}"
                    self._on_error(raised)
                all_ranks.enqueue([number, np.array(values, object), error])
        except (tf.errors.OutOfRangeError, tf.errors.CancelledError):
            pass  # `close` closed the queues.


def _split(gathered: Sequence[bytes]) -> tuple[list[int], list[bytes]]:
    """The call number of each rank, and its value."""
    return [_CALL.unpack_from(each)[0] for each in gathered], [each[_CALL.size :] for each in gathered]

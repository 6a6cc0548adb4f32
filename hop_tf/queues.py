"""`UpdateQueue` and `TokenQueue`: the two queues that Hop synchronizes with, on TensorFlow's `FIFOQueue`.

A TensorFlow queue can neither be searched nor dequeued with a deadline. So the tags of the entries are kept beside it,
and an entry is dequeued only when it is known to be there; all waiting is done by the caller (`Membership.wait`).
Every method is called with the rank's monitor held, and none blocks.

References:
  Luo, Lin, Zhuo, Qian. Hop: Heterogeneity-aware Decentralized Training. ASPLOS 2019, sections 4.1, 4.2 and 6.1.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from hop_tf.errors import ProtocolError


def enqueue_arrays(queue: tf.queue.QueueBase, components: Sequence) -> None:
    """Enqueues arrays as they are: 64-byte aligned ones are shared with TensorFlow, not copied.

    `FIFOQueue.enqueue` would convert, that is copy, each component first. A shared array must not be written to again.
    """
    tf.raw_ops.QueueEnqueueV2(handle=queue.queue_ref, components=list(components))


@dataclasses.dataclass(frozen=True)
class Update:
    """Parameters of `sender` at the start of its iteration `iteration`, one flat array per bucket."""

    iteration: int
    sender: int
    buckets: tuple[np.ndarray, ...]


class UpdateQueue:
    """UpdateQ(i): updates received and not yet used, tagged with (iteration, sender).

    `max_iteration_gap + 1` FIFO queues take turns like rotating registers: an update of iteration k lies in queue
    k mod (max_iteration_gap + 1). Together they never hold more than (1 + max_iteration_gap) * |N_in| updates.

    Args:
      dtypes: dtype of each bucket of an update.
      num_senders: |N_in|, this rank itself not counted.
      max_iteration_gap: How far a neighbor can be ahead.
    """

    def __init__(self, *, dtypes: Sequence[tf.DType], num_senders: int, max_iteration_gap: int):
        self._num_senders = num_senders
        num_queues = max_iteration_gap + 1
        self._queues = [tf.queue.FIFOQueue(max(1, num_senders), dtypes) for _ in range(num_queues)]
        self._tags = [collections.deque() for _ in range(num_queues)]

    def enqueue(self, update: Update) -> None:
        """Adds an update.

        Raises:
          ProtocolError: If the sender is further ahead than the gap allows, or has sent this iteration before.
        """
        tags = self._tags[update.iteration % len(self._tags)]
        tag = (update.iteration, update.sender)
        if tag in tags or len(tags) == self._num_senders:
            raise ProtocolError(
                f"rank {update.sender} sent an update of iteration {update.iteration} that there is no room for. "
                f"Waiting here: {sorted(tags)}."
            )
        enqueue_arrays(self._queues[update.iteration % len(self._queues)], update.buckets)
        tags.append(tag)

    def senders(self, iteration: int) -> set[int]:
        """Ranks whose update of `iteration` is here."""
        return {sender for tagged, sender in self._tags[iteration % len(self._tags)] if tagged == iteration}

    def dequeue(self, iteration: int) -> list[Update]:
        """Takes all updates of `iteration` that are here, in the order of their senders."""
        index = iteration % len(self._queues)
        updates = []
        for tagged, sender in self._tags[index]:
            if tagged != iteration:
                raise ProtocolError(f"an update of iteration {tagged} lies where {iteration} was expected.")
            components = self._queues[index].dequeue()
            buckets = components if isinstance(components, list) else [components]
            updates.append(Update(tagged, sender, tuple(np.asarray(bucket) for bucket in buckets)))
        self._tags[index].clear()
        return sorted(updates, key=lambda update: update.sender)

    def __len__(self) -> int:
        return sum(len(tags) for tags in self._tags)


class TokenQueue:
    """TokenQ(j -> i): permissions of out-neighbor j for this rank i to enter further iterations.

    Kept at i and filled by messages of j. Once both have started, Iter(j) - Iter(i) + max_iteration_gap tokens are here
    or on their way.

    Args:
      num_initial: Tokens at the start: max_iteration_gap - 1 (Fig. 7, line 5).
      capacity: Most tokens that can ever be here. As Theorem 2 bounds Iter(j) - Iter(i), that is
        max_iteration_gap * (length(Path_{j->i}) + 1). The path is the way back: j is an out-neighbor of i.
    """

    def __init__(self, *, num_initial: int, capacity: int):
        self._capacity = capacity
        self._queue = tf.queue.FIFOQueue(capacity, [tf.int64], shapes=[[]])
        self._size = 0
        for _ in range(num_initial):
            self.put(0)

    def put(self, iteration: int) -> None:
        """Adds the token that j inserts on entering `iteration`.

        Raises:
          ProtocolError: If there are more tokens than the protocol allows.
        """
        if self._size == self._capacity:
            raise ProtocolError(f"a token for iteration {iteration} came although {self._size} are here.")
        self._queue.enqueue(tf.constant(iteration, tf.int64))
        self._size += 1

    def take(self) -> int:
        """Removes the oldest token and returns the iteration it was inserted for."""
        if not self._size:
            raise ProtocolError("a token was taken from an empty queue.")
        self._size -= 1
        return int(self._queue.dequeue())

    def __len__(self) -> int:
        return self._size

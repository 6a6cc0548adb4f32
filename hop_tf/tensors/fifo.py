"""Hop's update queues and token queues, which synchronize ranks, on TensorFlow's `FIFOQueue`.

A TensorFlow queue can neither be searched nor dequeued with a deadline. So the tags of its entries are kept separately,
and an entry is dequeued only when it is known to be there. All waiting is done by the caller (`Membership.wait`).
Simulations of many ranks use `SimulatedFifo` instead. Every method is called with the rank's monitor held, and none
blocks.

References:
  Luo, Lin, Zhuo, Qian. Hop: Heterogeneity-aware Decentralized Training. ASPLOS 2019, sections 4 and 6.1.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from hop_tf.errors import ProtocolError
from hop_tf.tensors.host import on_host


def enqueue_arrays(queue: tf.queue.QueueBase, components: Sequence) -> None:
    """Enqueues arrays as they are: TensorFlow shares the memory of 64-byte aligned arrays, without a copy.

    `FIFOQueue.enqueue` would convert, that is copy, each component first. Do not modify a shared array. The arrays stay
    on the host, whichever thread calls this.
    """
    with on_host():
        tf.raw_ops.QueueEnqueueV2(handle=queue.queue_ref, components=list(components))


def dequeue(queue: tf.queue.QueueBase) -> list[tf.Tensor]:
    """Removes and returns the oldest entry. `FIFOQueue.dequeue` takes longer, for features that only graphs need."""
    with on_host():
        return tf.raw_ops.QueueDequeueV2(handle=queue.queue_ref, component_types=queue.dtypes)


class Fifo:
    """A TensorFlow FIFO queue in this process. Its entries are tuples of arrays.

    Args:
      capacity: Limit on the entries.
      dtypes: dtype of each array of an entry.
    """

    def __init__(self, capacity: int, dtypes: Sequence[tf.DType]):
        self._queue = tf.queue.FIFOQueue(capacity, dtypes)

    def put(self, entry: Sequence[np.ndarray]) -> None:
        """Adds an entry. There must be room. Do not modify the arrays afterwards."""
        enqueue_arrays(self._queue, entry)

    def take(self) -> tuple[np.ndarray, ...]:
        """Removes and returns the oldest entry. There must be one. The arrays are read-only."""
        return tuple(np.asarray(component) for component in dequeue(self._queue))  # `numpy` would copy.


class SimulatedFifo:
    """The same as `Fifo` without TensorFlow, which would take most of the time in simulations of hundreds of ranks."""

    def __init__(self, capacity: int, dtypes: Sequence[tf.DType]):
        self._capacity = capacity
        self._entries = collections.deque()

    def put(self, entry: Sequence[np.ndarray]) -> None:
        """See `Fifo`. If there is no room, this raises OverflowError, while `Fifo` would block forever."""
        if len(self._entries) == self._capacity:
            raise OverflowError(f"cannot put an entry into a full queue of {self._capacity} entries.")
        self._entries.append(tuple(entry))

    def take(self) -> tuple[np.ndarray, ...]:
        """See `Fifo`."""
        return self._entries.popleft()


MakeFifo = Callable[[int, Sequence[tf.DType]], Fifo | SimulatedFifo]


@dataclasses.dataclass(frozen=True)
class Update:
    """Parameters of `sender` at the start of its iteration `iteration`, one flat array per bucket."""

    iteration: int
    sender: int
    buckets: tuple[np.ndarray, ...]


class UpdateQueue:
    """UpdateQ(i): updates received and not yet used, tagged with (iteration, sender).

    `max_iteration_gap + 1` FIFO queues take turns like rotating registers: an update of iteration k lies in queue
    k mod (max_iteration_gap + 1). Together they hold at most (1 + max_iteration_gap) * |N_in| updates.

    Args:
      dtypes: dtype of each bucket of an update.
      num_senders: |N_in|, without this rank.
      max_iteration_gap: Number of iterations that a neighbor can be ahead.
      make_fifo: Makes the queues.
    """

    def __init__(
        self, *, dtypes: Sequence[tf.DType], num_senders: int, max_iteration_gap: int, make_fifo: MakeFifo = Fifo
    ):
        self._num_senders = num_senders
        num_queues = max_iteration_gap + 1
        self._queues = [make_fifo(max(1, num_senders), dtypes) for _ in range(num_queues)]
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
                f"rank {update.sender} sent an update of iteration {update.iteration}, but there is no room for it. "
                f"The queue holds iterations: {sorted(tags)}."
            )
        self._queues[update.iteration % len(self._queues)].put(update.buckets)
        tags.append(tag)

    def senders(self, iteration: int) -> set[int]:
        """The ranks whose update of `iteration` is here."""
        return {sender for tagged, sender in self._tags[iteration % len(self._tags)] if tagged == iteration}

    def dequeue(self, iteration: int) -> list[Update]:
        """Takes all updates of `iteration` that are here, in the order of their senders."""
        index = iteration % len(self._queues)
        updates = []
        for tagged, sender in self._tags[index]:
            if tagged != iteration:
                raise ProtocolError(
                    f"an update of iteration {tagged} is in the queue. Expected: iteration {iteration}."
                )
            updates.append(Update(tagged, sender, self._queues[index].take()))
        self._tags[index].clear()
        return sorted(updates, key=lambda update: update.sender)

    def drop_sender(self, sender: int) -> None:
        """Drops all updates of `sender`."""
        for queue, tags in zip(self._queues, self._tags, strict=True):
            for _ in range(len(tags)):
                tag, entry = tags.popleft(), queue.take()
                if tag[1] != sender:
                    queue.put(entry)
                    tags.append(tag)

    def drop_older(self, iteration: int) -> int:
        """Drops the updates of all iterations before `iteration`. Returns their number."""
        num_dropped = 0
        for queue, tags in zip(self._queues, self._tags, strict=True):
            while tags and tags[0][0] < iteration:  # All tags of one queue belong to one iteration.
                queue.take()
                tags.popleft()
                num_dropped += 1
        return num_dropped

    def __len__(self) -> int:
        return sum(len(tags) for tags in self._tags)


class NewestUpdates:
    """UpdateQ(i) under bounded staleness: each sender's newest update, if it was not used yet.

    Args:
      dtypes: dtype of each bucket of an update.
      senders: N_in, without this rank.
      make_fifo: Makes the queues.
    """

    def __init__(self, *, dtypes: Sequence[tf.DType], senders: Sequence[int], make_fifo: MakeFifo = Fifo):
        self._queues = {sender: make_fifo(1, dtypes) for sender in senders}
        self._waiting: dict[int, int] = {}
        # The iteration of the newest update ever received, iter_rcv of Figure 9.
        self.newest = dict.fromkeys(senders, -1)

    def enqueue(self, update: Update) -> bool:
        """Adds an update. Returns True if it has replaced an unused one.

        Raises:
          ProtocolError: If the update is not newer than its sender's previous update.
        """
        sender = update.sender
        if update.iteration <= self.newest[sender]:
            raise ProtocolError(
                f"rank {sender} sent an update of iteration {update.iteration} after one of {self.newest[sender]}."
            )
        superseded = sender in self._waiting
        if superseded:
            self._queues[sender].take()
        self._queues[sender].put(update.buckets)
        self._waiting[sender] = self.newest[sender] = update.iteration
        return superseded

    def drop_sender(self, sender: int, newest: int) -> None:
        """Drops the update of `sender`, if one is here, and sets the iteration of its last update to `newest`."""
        if self._waiting.pop(sender, None) is not None:
            self._queues[sender].take()
        self.newest[sender] = newest

    def dequeue(self) -> list[Update]:
        """Takes all updates that are here, in the order of the senders."""
        waiting, self._waiting = sorted(self._waiting.items()), {}
        return [Update(iteration, sender, self._queues[sender].take()) for sender, iteration in waiting]

    def __len__(self) -> int:
        return len(self._waiting)


class TokenQueue:
    """TokenQ(j -> i): permissions of out-neighbor j for this rank i to enter further iterations.

    The queue is kept at i and filled by messages from j. While i is in an iteration, the queue and messages in flight
    hold Iter(j) - Iter(i) + max_iteration_gap tokens. If a rank joins late, that number may be negative: this rank then
    owes the first tokens that come. Tokens are also owed if a rank has continued without the tokens of a silent rank
    (`take`). The silent rank may then get more tokens than it has room for (`put`). All tokens are alike, so they are
    only counted.

    Args:
      num_initial: Tokens at the start: max_iteration_gap - 1 (Fig. 7, line 5), if both start at iteration 0.
      capacity: Limit on the tokens here. Theorem 2 bounds Iter(j) - Iter(i), so the limit is
        max_iteration_gap * (length(Path_{j->i}) + 1). The path is the way back, because j is an out-neighbor of i. It
        gets longer if ranks on it leave.
      iteration: The iteration that j is in at the start.

    Raises:
      ProtocolError: If `num_initial` exceeds the capacity.
    """

    def __init__(self, *, num_initial: int, capacity: int, iteration: int = -1):
        if num_initial > capacity:
            raise ProtocolError(
                f"a token queue cannot begin with {num_initial} tokens in iteration {iteration}: it holds {capacity} "
                "tokens at most."
            )
        self._capacity = capacity
        self._iteration = iteration
        self._num_here, self._num_surplus, self._num_owed = max(0, num_initial), 0, max(0, -num_initial)

    @property
    def iteration(self) -> int:
        """The iteration in which j sent the newest token. By now, j is in that iteration or a later one."""
        return self._iteration

    @property
    def size(self) -> int:
        """The number of tokens here; negative if some are owed."""
        return self._num_here + self._num_surplus - self._num_owed

    def put(self, iteration: int, *, has_surplus: bool = False) -> None:
        """Adds the tokens that j inserts on entering `iteration`: one for every iteration since its previous tokens.

        Args:
          iteration: The iteration.
          has_surplus: True if tokens beyond the queue's capacity are counted as surplus. Otherwise they are an error.

        Raises:
          ProtocolError: If j has sent tokens for this iteration before, or more tokens than the protocol allows.
        """
        num_tokens = iteration - self._iteration
        if num_tokens <= 0 or (num_tokens > self._capacity - self.size and not has_surplus):
            raise ProtocolError(
                f"tokens for iteration {iteration} came after those for {self._iteration}. The queue holds {self.size} "
                f"tokens of {self._capacity}."
            )
        self._iteration = iteration
        num_paid = min(num_tokens, self._num_owed)
        self._num_owed -= num_paid
        num_kept = min(num_tokens - num_paid, self._capacity - self._num_here)
        self._num_surplus += num_tokens - num_paid - num_kept
        self._num_here += num_kept

    def take(self, num_tokens: int = 1, *, may_owe: bool = False) -> None:
        """Removes the oldest tokens. With `may_owe`, missing tokens are taken from those that come next.

        Raises:
          ProtocolError: If there are too few tokens, without `may_owe`.
        """
        if num_tokens > self.size and not may_owe:
            raise ProtocolError(f"cannot take {num_tokens} tokens of {self.size}.")
        num_kept = min(num_tokens, self._num_here)
        self._num_here -= num_kept
        num_surplus = min(num_tokens - num_kept, self._num_surplus)
        self._num_surplus -= num_surplus
        self._num_owed += num_tokens - num_kept - num_surplus

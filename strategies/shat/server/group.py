"""`ServedGroup`: what a server does about one exchange group: Algorithm 1, lines 10 to 25."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np

from hop_tf.errors import ProtocolError
from hop_tf.strategies.shat.server.consistency import Consistency
from hop_tf.strategies.shat.server.progress import Participant, Progress
from hop_tf.strategies.shat.server.shard import Shard
from hop_tf.strategies.shat.server.state import ShardState, weakly
from hop_tf.tensors.buffers import BufferPool
from hop_tf.tensors.packing import Packing


class ForgottenError(ProtocolError):
    """A worker has pushed that takes no part: it was lost, and the others go on without it."""


@dataclasses.dataclass(frozen=True)
class Gradient:
    """A push.

    Attributes:
      sequence: Its number among the worker's pushes of the session, from 1.
      buckets: The shard's: gradients, and, in those that are exact, the worker's values of what is carried. None where
        the worker only asks for the answer again.
      rate: The learning rate.
      is_applied: Whether to apply it.
      session: The session. Default: the first.
      weight: What it counts as much as in means of several.
    """

    sequence: int
    buckets: Sequence[np.ndarray] | None
    rate: float
    is_applied: bool = True
    session: int = 1
    weight: float = 1.0


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a worker gets for a push.

    Attributes:
      worker: The worker.
      sequence: Number of the push.
      buckets: The shard's buckets right after that push: the model, and the means of what is carried.
      num_others: c, the pushes of others that were applied since the worker's last answer.
      num_workers: n.
      is_missing: Whether the push has not arrived: it is to be sent again.
      session: Of the push.
      num_pushes: Pushes that were applied, of all workers.
      clock: The worker's.
    """

    worker: int
    sequence: int
    buckets: Sequence[np.ndarray] = ()
    num_others: int = 0
    num_workers: int = 0
    is_missing: bool = False
    session: int = 1
    num_pushes: int = 0
    clock: int = 0


class ServedGroup:
    """A shard and the workers that push to it. May be used by several threads.

    Each push is applied once: a worker's pushes are numbered, and one that comes again is only answered again, with the
    model of then. (Answers are not kept: that would be a model for each worker.) All methods that return answers are to
    be followed by sending them. Nothing here blocks but the lock, which is held while an update is made.

    Args:
      shard: The shard.
      packing: Its buckets.
      consistency: When to apply, and when to answer.
      pool: Where means are put. Default: a pool of its own.

    Attributes:
      training: Names the training; "" for one that has no name.
      num_assigned: How often the model was replaced in it.
      num_pushes: Pushes that were applied.
      num_steps_before: The most that one worker had sent when the session began.
    """

    def __init__(self, shard: Shard, packing: Packing, consistency: Consistency, pool: BufferPool | None = None):
        self._shard = shard
        self._pool = pool or BufferPool()
        self._consistency = consistency
        self._carried = [index for index, exact in enumerate(packing.exact) if exact]
        self._lock = threading.Lock()
        self._session = 1
        self._has_ended = False
        self._workers: dict[int, Participant] = {}
        self._processes: dict[int, str] = {}  # Also of workers that left.
        self._pushed: dict[int, Gradient] = {}
        self._statistics: dict[int, Gradient] = {}
        self._means: list[np.ndarray] = []
        self.training = ""
        self.num_assigned = 0
        self.num_pushes = 0
        self._num_steps = 0
        self.num_steps_before = 0
        # The buckets that were read last, until something changes.
        self._latest: Callable[[], list[np.ndarray] | None] = _nothing

    # Who takes part.

    def begin_session(self, workers: Iterable[int], session: int = 1) -> None:
        """All these workers take part from now on, and have not pushed yet. Pushes of other sessions are dropped."""
        with self._lock:
            self._session = session
            self.num_steps_before = self._num_steps
            self._workers = {worker: Participant(self._processes.get(worker, "")) for worker in workers}
            self._pushed.clear()
            self._statistics = {worker: v for worker, v in self._statistics.items() if worker in self._workers}
            self._latest = _nothing

    def join(self, worker: int, process: str = "") -> None:
        """A worker takes part from now on; nothing if that process of it did."""
        with self._lock:
            self._join(worker, process)

    def _join(self, worker: int, process: str) -> Participant:
        self._processes[worker] = process
        known = self._workers.get(worker)
        if known is None or known.process not in ("", process):
            clock = min((each.clock for other, each in self._workers.items() if other != worker), default=0)
            known = self._workers[worker] = Participant(clock=clock)
        known.process = process
        return known

    # Another process served the group before this one.

    def go_on(self, progress: Progress, workers: Collection[int]) -> None:
        """Goes on with a training, in the state that was assigned; of its workers, with these.

        What they have pushed since is not known here: `take_up` follows.
        """
        with self._lock:
            self.training = progress.training
            self._session = progress.session
            self.num_steps_before = progress.num_steps_before
            self.num_assigned = progress.num_assigned
            self._processes = {worker: known.process for worker, known in progress.workers.items()}
            self._workers = {
                worker: dataclasses.replace(known) for worker, known in progress.workers.items() if worker in workers
            }

    def take_up(self, worker: int, process: str, num_answered: int, clock: int) -> list[Answer]:
        """A worker goes on to take part; for the arguments see `Participant`.

        Returns:
          The answers that are due now.
        """
        with self._lock:
            known = self._join(worker, process)
            known.take_up(num_answered, clock)
            self._num_steps = max(self._num_steps, self.num_steps_before + known.clock)
            return self._advance()

    def remove(self, worker: int, *, is_lost: bool) -> list[Answer]:
        """A worker takes part no more.

        Args:
          worker: The worker.
          is_lost: Whether to forget its moving statistics, too.

        Returns:
          The answers to others that have waited for it.
        """
        with self._lock:
            self._workers.pop(worker, None)
            self._pushed.pop(worker, None)
            if is_lost:
                self._forget_statistics(worker)
                self._latest = _nothing
            return self._advance()

    def _forget_statistics(self, worker: int) -> None:
        values = self._statistics.pop(worker, None)
        if values is not None and not self._statistics:
            self._means = values.buckets  # Nobody else's are there to go on with.

    def end(self) -> None:
        """Takes no more pushes: `state` is the last one."""
        with self._lock:
            self._has_ended = True

    # Pushes.

    def push(self, worker: int, gradient: Gradient) -> list[Answer]:
        """Takes a push; returns the answers that are due now, to whomever.

        One of another session than the running one is dropped: its worker has left that, and awaits no answer. So is
        one that comes after `end`: another process answers it, if one takes the place of this one.

        Raises:
          ForgottenError: If the worker takes no part.
          ProtocolError: If it has left a push out.
        """
        with self._lock:
            if self._has_ended or gradient.session != self._session:
                return []
            known = self._workers.get(worker)
            if known is None:
                raise ForgottenError(f"the server goes on without rank {worker}.")
            if worker in self._pushed:
                return []
            if gradient.sequence == known.sequence:
                return [] if known.waits else [self._answer(worker, known.last_num_others, self._read())]
            if gradient.sequence != known.sequence + 1:
                raise ProtocolError(f"push {gradient.sequence} of rank {worker} came after {known.sequence}.")
            if gradient.buckets is None:
                return [Answer(worker, gradient.sequence, is_missing=True, session=self._session)]
            self._pushed[worker] = gradient
            self._latest = _nothing
            if self._carried:
                values = [np.array(gradient.buckets[index]) for index in self._carried]
                self._statistics[worker] = dataclasses.replace(gradient, buckets=values)
            return self._advance()

    def _advance(self) -> list[Answer]:
        """Applies and answers what is due."""
        clocks = {worker: known.clock for worker, known in self._workers.items()}
        if workers := self._consistency.to_apply(self._pushed.keys(), clocks):
            self._apply(workers)
        clocks = {worker: known.clock for worker, known in self._workers.items()}
        due = [
            worker
            for worker, known in self._workers.items()
            if known.waits and self._consistency.may_answer(worker, clocks)
        ]
        buckets = self._read() if due else []
        return [self._answer_now(worker, buckets) for worker in due]

    def _apply(self, workers: Collection[int]) -> None:
        self._latest = _nothing
        # In the order of the ranks: sums come out the same whoever was first.
        pushed = {worker: self._pushed.pop(worker) for worker in sorted(workers)}
        applied = {worker: gradient for worker, gradient in pushed.items() if gradient.is_applied}
        if applied:
            rate = next(iter(applied.values())).rate  # Of several (bsp), the lowest rank's.
            self._shard.apply(self._mean(list(applied.values())), rate)
        self.num_pushes += len(applied)
        for worker, known in self._workers.items():
            known.num_others += len(applied.keys() - {worker})
            if worker in pushed:
                known.sequence += 1
                known.clock += 1
                known.waits = True
                self._num_steps = max(self._num_steps, self.num_steps_before + known.clock)

    def _answer_now(self, worker: int, buckets: Sequence[np.ndarray]) -> Answer:
        known = self._workers[worker]
        known.waits = False
        known.last_num_others, known.num_others = known.num_others, 0
        return self._answer(worker, known.last_num_others, buckets)

    def _answer(self, worker: int, num_others: int, buckets: Sequence[np.ndarray]) -> Answer:
        return Answer(
            worker,
            self._workers[worker].sequence,
            buckets,
            num_others,
            num_workers=len(self._workers),
            session=self._session,
            num_pushes=self.num_pushes,
            clock=self._workers[worker].clock,
        )

    def _read(self) -> list[np.ndarray]:
        """The buckets; where nothing has changed since they were read last, and a message has them, the same ones."""
        buckets = self._latest()
        if buckets is None:
            buckets = self._read_anew()
            self._latest = weakly(buckets)
        return buckets

    def _read_anew(self) -> list[np.ndarray]:
        buckets = self._shard.read()
        statistics = [self._statistics[worker] for worker in sorted(self._statistics)]  # As gradients: by rank.
        means = self._mean(statistics) if statistics else self._means
        for index, mean in zip(self._carried, means, strict=True):
            buckets[index] = mean
        return buckets

    # The state.

    def state(self, *, with_slots: bool) -> ShardState:
        """All that is kept. Nobody writes to its arrays afterwards.

        At the end of a `fit`, when all workers ask for it, a server does not hold one for each: while nothing changes,
        all get the same arrays.
        """
        with self._lock:
            return ShardState(
                buckets=self._read(),
                slots=self._shard.slots() if with_slots else {},
                num_pushes=self.num_pushes,
                num_steps=self._num_steps,
                iterations=self._shard.iterations,
                progress=self._progress(),
            )

    def _progress(self) -> Progress:
        workers = {worker: dataclasses.replace(known) for worker, known in self._workers.items()}
        return Progress(self.training, self._session, self.num_steps_before, self.num_assigned, workers)

    @property
    def life(self) -> tuple[str, int, int]:
        """See `Progress.life`."""
        with self._lock:
            return self._progress().life

    def assign(self, state: ShardState) -> None:
        """Begins with that state."""
        with self._lock:
            self._assign(state.buckets)
            self._shard.assign_slots(state.slots)
            self._shard.iterations = state.iterations
            self.num_pushes = state.num_pushes
            self._num_steps = self.num_steps_before = state.num_steps

    def assign_model(self, buckets: Sequence[np.ndarray]) -> None:
        """Goes on with another model, and the optimizer as it is."""
        with self._lock:
            self._assign(buckets)
            self.num_assigned += 1

    def _assign(self, buckets: Sequence[np.ndarray]) -> None:
        self._latest = _nothing
        self._shard.assign(buckets)
        self._statistics.clear()
        self._means = [np.array(buckets[index]) for index in self._carried]

    def _mean(self, gradients: Sequence[Gradient]) -> list[np.ndarray]:
        """The mean of each bucket, summed in float32 at least; the only push itself where there is one."""
        if len(gradients) == 1:
            return list(gradients[0].buckets)
        weights = [gradient.weight for gradient in gradients]
        weights = None if len(set(weights)) == 1 else [weight / sum(weights) for weight in weights]
        return [self._mean_of(each, weights) for each in zip(*(g.buckets for g in gradients), strict=True)]

    def _mean_of(self, arrays: Sequence[np.ndarray], weights: Sequence[float] | None) -> np.ndarray:
        """The mean of some arrays; with weights, which add up to 1, it is their sum."""
        dtype = np.promote_types(arrays[0].dtype, np.float32)
        total = self._pool.take(arrays[0].size * dtype.itemsize).view(dtype)
        if weights is not None:
            np.multiply(arrays[0], weights[0], out=total, dtype=dtype)
            for array, weight in zip(arrays[1:], weights[1:], strict=True):
                total += array * dtype.type(weight)
            return total.astype(arrays[0].dtype, copy=False)
        np.add(arrays[0], arrays[1], out=total, dtype=dtype)
        for array in arrays[2:]:
            total += array
        total /= len(arrays)
        return total.astype(arrays[0].dtype, copy=False)


def _nothing() -> None:
    """Nothing was read, or it has changed."""

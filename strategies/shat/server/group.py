"""`ServedGroup`: one exchange group at a server. Algorithm 1, lines 10 to 25."""

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
    """Raised for a push of a worker that takes no part: it was lost, and the others go on without it."""


@dataclasses.dataclass(frozen=True)
class Gradient:
    """A push.

    Attributes:
      sequence: The number of the push among the worker's pushes of the session, from 1.
      buckets: The shard's buckets: gradients and, in exact ones, the worker's non-trainable state. None if the worker
        only asks for the answer again.
      rate: The learning rate.
      is_applied: True if the gradients are applied.
      session: The session. Default: the first.
      weight: The weight of the push in a mean of several. Default 1.
    """

    sequence: int
    buckets: Sequence[np.ndarray] | None
    rate: float
    is_applied: bool = True
    session: int = 1
    weight: float = 1.0


@dataclasses.dataclass(frozen=True)
class Answer:
    """The answer to a push.

    Attributes:
      worker: The worker.
      sequence: The number of the push.
      buckets: The shard's buckets when the push is answered: the model, and the means of the non-trainable state.
      num_others: c, the number of others' pushes that were applied since the worker's last answer.
      num_workers: n.
      is_missing: True if the push has not arrived. The worker is to send it again.
      session: The session of the push.
      num_pushes: The number of pushes of all workers that were applied.
      clock: The worker's clock.
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

    Each push is applied once: a worker's pushes are numbered. A push that comes again is only answered again, with the
    present model. (Answers are not kept, because that would take a model for each worker.) The caller of a method that
    returns answers must send them. Methods block only for the lock, which is held during an update.

    Args:
      shard: The shard.
      packing: The shard's buckets.
      consistency: The rule by which pushes are applied and answered.
      pool: The memory for means. Default: a pool of its own.
      steps_per_push: The number of a worker's steps whose sum is a push. Default 1.

    Attributes:
      training: The name of the training; "" if it has none.
      num_assigned: The number of times that the model was replaced in the training.
      num_pushes: The number of pushes that were applied.
      num_steps_before: The most steps that one worker had pushed when the session began.
    """

    def __init__(
        self,
        shard: Shard,
        packing: Packing,
        consistency: Consistency,
        pool: BufferPool | None = None,
        steps_per_push: int = 1,
    ):
        self._shard = shard
        self._pool = pool or BufferPool()
        self._consistency, self._steps_per_push = consistency, steps_per_push
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
        # Returns the buckets that were read last, or None after a change.
        self._latest: Callable[[], list[np.ndarray] | None] = _nothing

    # Workers that take part.

    def begin_session(self, workers: Iterable[int], session: int = 1) -> None:
        """Begins a session in which these workers take part. Pushes of other sessions are dropped from now on."""
        with self._lock:
            self._session = session
            self.num_steps_before = self._num_steps
            self._workers = {worker: Participant(self._processes.get(worker, "")) for worker in workers}
            self._pushed.clear()
            self._statistics = {worker: v for worker, v in self._statistics.items() if worker in self._workers}
            self._latest = _nothing

    def join(self, worker: int, process: str = "") -> None:
        """Lets a worker take part from now on. No effect if this process of the worker takes part already."""
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

    # After another process served the group.

    def go_on(self, progress: Progress, workers: Collection[int]) -> None:
        """Goes on with a training, from the assigned state, with those of its workers that are among `workers`.

        Pushes after the snapshot are unknown here, so `take_up` must follow for each worker.
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
        """Lets a worker of the earlier server process go on. For the arguments see `Participant.take_up`.

        Returns:
          The answers that are due now.
        """
        with self._lock:
            known = self._join(worker, process)
            known.take_up(num_answered, clock)
            self._count_steps(known)
            return self._advance()

    def remove(self, worker: int, *, is_lost: bool) -> list[Answer]:
        """Removes a worker, which no longer takes part.

        Args:
          worker: The worker.
          is_lost: True to forget the worker's moving statistics, too.

        Returns:
          The answers to other workers that have waited for this one.
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
            self._means = values.buckets  # No other worker's statistics are left.

    def end(self) -> None:
        """Stops taking pushes, so that `state` is the last state."""
        with self._lock:
            self._has_ended = True

    # Pushes.

    def push(self, worker: int, gradient: Gradient) -> list[Answer]:
        """Takes a push. Returns the answers that are due now, to any workers.

        A push of another session is dropped, because its worker has left that session and awaits no answer. A push
        after `end` is dropped, too: if another process takes the place of this one, that process answers it.

        Raises:
          ForgottenError: If the worker takes no part.
          ProtocolError: If the worker has left out a push.
        """
        with self._lock:
            if self._has_ended or gradient.session != self._session:
                return []
            known = self._workers.get(worker)
            if known is None:
                raise ForgottenError(f"the server continues without rank {worker}.")
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
        """Applies the pushes that are due, and returns the answers that are due."""
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
        # In the order of the ranks, so that sums do not depend on the order of arrival.
        pushed = {worker: self._pushed.pop(worker) for worker in sorted(workers)}
        applied = {worker: gradient for worker, gradient in pushed.items() if gradient.is_applied}
        if applied:
            rate = next(iter(applied.values())).rate  # With several pushes (bsp), the lowest rank's rate.
            self._shard.apply(self._mean(list(applied.values())), rate)
        self.num_pushes += len(applied)
        for worker, known in self._workers.items():
            known.num_others += len(applied.keys() - {worker})
            if worker in pushed:
                known.sequence += 1
                known.clock += 1
                known.waits = True
                self._count_steps(known)

    def _count_steps(self, known: Participant) -> None:
        self._num_steps = max(self._num_steps, self.num_steps_before + known.clock * self._steps_per_push)

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
        """Returns the buckets: the same arrays as last time, if nothing has changed and a message still holds them."""
        buckets = self._latest()
        if buckets is None:
            buckets = self._read_anew()
            self._latest = weakly(buckets)
        return buckets

    def _read_anew(self) -> list[np.ndarray]:
        buckets = self._shard.read()
        statistics = [self._statistics[worker] for worker in sorted(self._statistics)]  # By rank, as gradients.
        means = self._mean(statistics) if statistics else self._means
        for index, mean in zip(self._carried, means, strict=True):
            buckets[index] = mean
        return buckets

    # The state.

    def state(self, *, with_slots: bool) -> ShardState:
        """Returns the whole state. Its arrays do not change afterwards.

        While nothing changes, all callers get the same arrays. So when all workers ask for the state at the end of a
        `fit`, the server does not hold a copy for each.
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
        """Begins with a state."""
        with self._lock:
            self._assign(state.buckets)
            self._shard.assign_slots(state.slots)
            self._shard.iterations = state.iterations
            self.num_pushes = state.num_pushes
            self._num_steps = self.num_steps_before = state.num_steps

    def assign_model(self, buckets: Sequence[np.ndarray]) -> None:
        """Replaces the model. The optimizer stays as it is."""
        with self._lock:
            self._assign(buckets)
            self.num_assigned += 1

    def _assign(self, buckets: Sequence[np.ndarray]) -> None:
        self._latest = _nothing
        self._shard.assign(buckets)
        self._statistics.clear()
        self._means = [np.array(buckets[index]) for index in self._carried]

    def _mean(self, gradients: Sequence[Gradient]) -> list[np.ndarray]:
        """The mean of each bucket, summed in float32 at least. With one push, the buckets of this push."""
        if len(gradients) == 1:
            return list(gradients[0].buckets)
        weights = [gradient.weight for gradient in gradients]
        weights = None if len(set(weights)) == 1 else [weight / sum(weights) for weight in weights]
        return [self._mean_of(each, weights) for each in zip(*(g.buckets for g in gradients), strict=True)]

    def _mean_of(self, arrays: Sequence[np.ndarray], weights: Sequence[float] | None) -> np.ndarray:
        """The mean of some arrays, or with weights, which add up to 1, their weighted sum."""
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
    """Returns None: no buckets were read since the last change."""

"""How long a step takes where ranks are not alike: schedules, event by event, of what ranks wait for.

    lock_step_seconds       every rank waits for what all have sent: Pipe-SGD, DTS, synchronous Canary
    free_running_seconds    no rank waits for another one's computation: asynchronous Canary
    server_seconds          workers wait for servers alone: SHAT

Each takes the durations of steps, an array [n, T]: what rank r computes in its step t takes `durations[r, t]`, without
any waiting.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Callable

import numpy as np

from hop_tf.arguments import check_integer, check_share
from hop_tf.tools.timing.costs import check_not_negative

_NUM_ITERATIONS = 100  # Many more than it takes to settle.
_NUM_IN_A_ROW = 2  # As in `hop_tf.strategies.canary.pieces`.


def lock_step_seconds(
    durations: np.ndarray,
    *,
    delay: int = 0,
    interval: int = 1,
    sending_seconds: float = 0.0,
    latency_seconds: float = 0.0,
    own_share: float = 1.0,
) -> float:
    """Duration of a step where the mean over all ranks of a window of p steps is due D steps after its last one.

    With e(r, t) for the end of rank r's step t, and c(r, t) for what it computes:

        ready(w)  =  max over r of e(r, w)                              where the window's last step is w
        sent(w)   =  max(ready(w), sent(w - p)) + sending
        e(r, t)   =  max(e(r, t - 1) + c(r, t), sent(t - D) + latency)  where a mean is due at t

    D = 0 and p = 1 is synchronous training; D = K - 1 and p = 1 is Pipe-SGD. There the communication of one step begins
    when that of the last one has ended, so that all of it counts as sending. With D = 0 communication of which a part
    hides behind the computation counts as the part that does not.

    The last rank to be ready, r, waits for less: what others have sent each other is there, and r need not wait until
    all have what r itself sums up. It has a mean at the earliest after the share `own_share` of sending.

    Args:
      durations: Seconds, [n, T].
      delay: D.
      interval: p.
      sending_seconds: For how long a window occupies the links.
      latency_seconds: How much later its mean is there.
      own_share: As above; at most 1.

    Returns:
      Seconds: the mean of the second half of the steps; of a single one, what it takes.

    Raises:
      ValueError: If an argument is out of range, or there are no steps.
    """
    _check_durations(durations)
    check_integer("delay", delay, at_least=0)
    check_integer("interval", interval, at_least=1)
    check_not_negative("sending_seconds", sending_seconds)
    check_not_negative("latency_seconds", latency_seconds)
    check_share("own_share", own_share)
    now, free_at, means, ends = np.zeros(len(durations)), 0.0, {}, [0.0]
    for step, computing in enumerate(durations.T, start=1):
        now = now + computing
        if step % interval == 0:
            means[step] = _mean_there(now, free_at, sending_seconds, own_share) + latency_seconds
            free_at = max(float(now.max()), free_at) + sending_seconds
        now = np.maximum(now, means.pop(step - delay, 0.0))
        ends.append(now.mean())
    # Beginning and end are in the same phase of a window, where there is room for one.
    num_steps = durations.shape[1]
    num_counted = num_steps // 2 // interval * interval or max(1, num_steps - 1)
    return float(ends[-1] - ends[-1 - num_counted]) / num_counted


def _mean_there(ready: np.ndarray, free_at: float, sending_seconds: float, own_share: float) -> np.ndarray:
    """When each rank has the mean of a window."""
    before, last = np.sort(ready)[-2:] if len(ready) > 1 else np.repeat(ready, 2)
    there = np.full(len(ready), max(last, free_at) + sending_seconds)
    there[np.argmax(ready)] = max(last + own_share * sending_seconds, max(before, free_at) + sending_seconds)
    return there


def free_running_seconds(
    durations: np.ndarray,
    *,
    pushing_seconds: float = 0.0,
    sum_seconds: float = 0.0,
    latency_seconds: float = 0.0,
    max_in_flight: int = 4,
) -> tuple[float, float]:
    """Duration of an iteration where a rank that is behind goes on with the iteration that the fastest one is in.

    A rank pushes what it has computed, and goes on; only where as many of its iterations as `max_in_flight` are not
    merged yet it waits for one of them. What ranks push is summed up on all ranks, a piece on each. A sum goes to all
    as soon as all those have pushed that were in each of the last two; or when one pushes again. Batches of iterations
    that a rank passes over are not trained on.

    Args:
      durations: Seconds, [n, T].
      pushing_seconds: For how long what a rank pushes of an iteration occupies its link.
      sum_seconds: For how long a sum occupies the links of all.
      latency_seconds: When a message arrives, and others know that an iteration was begun.
      max_in_flight: As of `CanaryStrategy`.

    Returns:
      Seconds until the fastest rank enters the next iteration, the mean of the second half of the iterations; and the
      share of all batches of these that ranks have trained on until it is through.

    Raises:
      ValueError: If an argument is out of range, or there are no steps.
    """
    _check_durations(durations)
    check_integer("max_in_flight", max_in_flight, at_least=1)
    check_not_negative("pushing_seconds", pushing_seconds)
    check_not_negative("sum_seconds", sum_seconds)
    check_not_negative("latency_seconds", latency_seconds)
    return _FreeRunning(durations, pushing_seconds, sum_seconds, latency_seconds, max_in_flight).run()


class _FreeRunning:
    """Events of `free_running_seconds`."""

    def __init__(self, durations: np.ndarray, pushing: float, summing: float, latency: float, max_in_flight: int):
        self._durations, self._max_in_flight = durations, max_in_flight
        self._pushing, self._summing, self._latency = pushing, summing, latency
        num_ranks, self._num_iterations = durations.shape
        self._free_at = np.zeros(num_ranks)
        self._next = [0] * num_ranks
        self._num_in_flight = [0] * num_ranks
        self._held_back: dict[int, int] = {}  # By rank, the iteration that waits for one that is under way.
        self._begun_at: list[float] = []  # When the first rank was in an iteration, by iteration.
        self._num_made = np.zeros(self._num_iterations, int)
        self._in_a_row = [_NUM_IN_A_ROW] * num_ranks  # In how many of the last sums a rank was.
        self._sum: set[int] = set()  # Whose pushes have not been passed on yet.
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = itertools.count()
        self._is_through = False

    def run(self) -> tuple[float, float]:
        for rank in range(len(self._next)):
            self._at(0.0, self._begin, rank)
        while not self._is_through:
            now, _, event = heapq.heappop(self._events)
            event(now)
        half = self._num_iterations // 2
        num_counted = self._num_iterations - half
        share = self._num_made[half:].sum() / num_counted / len(self._next)
        return (now - self._begun_at[half]) / num_counted, float(share)

    def _at(self, time: float, event: Callable, *arguments) -> None:
        heapq.heappush(self._events, (time, next(self._numbers), lambda now: event(now, *arguments)))

    def _begin(self, now: float, rank: int) -> None:
        known = bisect.bisect_right(self._begun_at, now - self._latency) - 1
        iteration = max(self._next[rank], known)
        if iteration >= self._num_iterations:
            self._is_through = True
            return
        if iteration == len(self._begun_at):
            self._begun_at.append(now)
        self._next[rank] = iteration + 1
        self._num_made[iteration] += 1
        self._at(now + float(self._durations[rank, iteration]), self._push, rank, iteration)

    def _push(self, now: float, rank: int, iteration: int) -> None:
        if self._num_in_flight[rank] == self._max_in_flight:
            self._held_back[rank] = iteration
            return
        self._num_in_flight[rank] += 1
        self._free_at[rank] = max(now, self._free_at[rank]) + self._pushing
        self._at(self._free_at[rank] + self._latency, self._arrive, rank)
        self._at(now, self._begin, rank)

    def _arrive(self, now: float, rank: int) -> None:
        if rank in self._sum:
            self._pass_on(now)
        self._sum.add(rank)
        if all(other in self._sum for other, number in enumerate(self._in_a_row) if number >= _NUM_IN_A_ROW):
            self._pass_on(now)

    def _pass_on(self, now: float) -> None:
        self._in_a_row = [number + 1 if rank in self._sum else 0 for rank, number in enumerate(self._in_a_row)]
        self._free_at = np.maximum(now, self._free_at) + self._summing
        self._at(float(self._free_at.max()) + self._latency, self._merge, self._sum)
        self._sum = set()

    def _merge(self, now: float, members: set[int]) -> None:
        for rank in members:
            self._num_in_flight[rank] -= 1
            if rank in self._held_back:
                self._push(now, rank, self._held_back.pop(rank))


def server_seconds(
    durations: np.ndarray,
    *,
    num_servers: int,
    pushing_seconds: float,
    answering_seconds: float,
    round_trip_seconds: float = 0.0,
) -> float:
    """Time in which n workers that wait for servers alone train n batches.

    The links of m servers serve all that comes at once, and each that is there makes the others slower. Workers are out
    of step with each other. So, in the mean, a worker r finds on a server's link, on which its push takes D / m alone,
    as many of the others as are there at any time:

        wait(r)   =  D / m (1 + sum over q != r of wait(q) / cycle(q))        for pushes, and likewise for answers
        cycle(r)  =  mean over t of c(r, t) + round trip + (1 - 1 / m) (D + D') + wait(r) + wait'(r)

    That is the mean value analysis of a closed network of queues by Schweitzer's approximation. What does not go over
    the same server is taken to be sent at the same time: a worker's own link then binds.

    Args:
      durations: Seconds, [n, T].
      num_servers: m.
      pushing_seconds: How long a worker's push takes with links to itself [D].
      answering_seconds: The same of the answer [D'].
      round_trip_seconds: How long both take without any bytes.

    Returns:
      Seconds: n / (sum over r of 1 / cycle(r)), the harmonic mean.

    Raises:
      ValueError: If an argument is out of range, or there are no steps.

    References:
      Reiser, Lavenberg. Mean-Value Analysis of Closed Multichain Queuing Networks. Journal of the ACM 27(2), 1980.
      Schweitzer. Approximate Analysis of Multiclass Closed Networks of Queues. 1979.
    """
    _check_durations(durations)
    check_integer("num_servers", num_servers, at_least=1)
    for name, seconds in (
        ("pushing_seconds", pushing_seconds),
        ("answering_seconds", answering_seconds),
        ("round_trip_seconds", round_trip_seconds),
    ):
        check_not_negative(name, seconds)
    both_ways = np.array([[pushing_seconds], [answering_seconds]])
    at_a_server = both_ways / num_servers
    apart = durations.mean(axis=1) + round_trip_seconds + np.sum(both_ways - at_a_server)
    waits = np.broadcast_to(at_a_server, (2, len(durations)))
    for _ in range(_NUM_ITERATIONS):
        cycles = apart + waits.sum(axis=0)
        if not cycles.min() > 0:
            return 0.0
        present = waits / cycles
        waits = at_a_server * (1 + present.sum(axis=1, keepdims=True) - present)
    return float(len(cycles) / np.sum(1 / cycles))


def _check_durations(durations: np.ndarray) -> None:
    if np.ndim(durations) != 2 or not np.size(durations):
        raise ValueError(
            "`durations` must be an array [n, T] of at least one rank and one step. "
            f"Received: durations of shape {np.shape(durations)}."
        )

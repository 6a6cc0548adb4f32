"""Step times on links that are alike: schedules of the ranks' waits, event by event.

    lock_step_seconds       every rank waits for all others: Pipe-SGD, DTS, synchronous Canary
    non_computing_seconds   the same if ranks are alike, too, in closed form: quick enough to search through settings
    free_running_seconds    no rank waits for another one's computation: asynchronous Canary
    server_seconds          workers wait only for servers: SHAT

The input of a schedule is the durations of steps, an array [n, T]: rank r computes for `durations[r, t]` seconds in its
step t, without any waiting.

On links that differ, `hop_tf.simulate.training` runs the strategies' own protocols. Tests compare both on equal links.
A simulation sends every message, while a schedule needs only some numbers for each step of a rank.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Callable, Hashable, Sequence

import numpy as np

from hop_tf.arguments import check_integer
from hop_tf.tools.timing.costs import check_not_negative

_NUM_ITERATIONS = 100  # Many more than convergence takes.
_NUM_IN_A_ROW = 2  # As in `hop_tf.strategies.canary.pieces`.


def non_computing_seconds(
    *,
    compute_seconds: float,
    window_seconds: float,
    sending_seconds: float = 0.0,
    overlap_seconds: float = 0.0,
    delay: int = 0,
    interval: int = 1,
) -> float:
    """The time per step in which a rank does not compute, in the long run, if ranks are alike [DTS, Table 1].

    The larger of two terms, for latency and bandwidth:

        max(0, T_communicate - T_overlap - D T_compute) / (p q)     with q = floor(D / p) + 1
        max(0, T_send / p - T_compute)

    q is the number of windows in flight: while a rank waits for one window, the following ones come closer, too. With
    D < p the first line is the paper's. The paper leaves out the second line: with any delay, a window's bytes must
    leave while the next window's p steps are computed. With p = 1 and all communication as T_send, D = 0 is Pipe-SGD's
    Equation 2, and D > 0 its Equations 4 and 5.

    Args:
      compute_seconds: Duration of a step without any waiting [T_compute].
      window_seconds: Time from a window's end until its mean arrives, with idle links [T_communicate].
      sending_seconds: The part of `window_seconds` in which the links, or the codec, are occupied [T_send].
      overlap_seconds: The part of `window_seconds` during the last step's back-propagation [T_overlap].
      delay: Steps from a window's end until its mean is due [D, the paper's t].
      interval: Steps of a window [p].

    Returns:
      Seconds.

    Raises:
      ValueError: If an argument is out of range.
    """
    check_not_negative("compute_seconds", compute_seconds)
    check_not_negative("window_seconds", window_seconds)
    check_not_negative("sending_seconds", sending_seconds)
    check_not_negative("overlap_seconds", overlap_seconds)
    check_integer("delay", delay, at_least=0)
    check_integer("interval", interval, at_least=1)
    num_in_flight = delay // interval + 1
    latency = (window_seconds - overlap_seconds - delay * compute_seconds) / (interval * num_in_flight)
    return max(0.0, latency, sending_seconds / interval - compute_seconds)


def lock_step_seconds(
    durations: np.ndarray,
    *,
    delay: int = 0,
    interval: int = 1,
    sending_seconds: float = 0.0,
    latency_seconds: float = 0.0,
    num_turns: int = 1,
    shares_left: Sequence[float] = (0.0,),
) -> float:
    """Duration of a step if the mean over all ranks of a window of p steps is due D steps after the window's last step.

    With e(r, t) for the end of rank r's step t, and c(r, t) for its computation:

        ready(w)  =  max over r of e(r, w)                              for a window whose last step is w
        sent(w)   =  max(ready(w), sent(w - p)) + sending
        e(r, t)   =  max(e(r, t - 1) + c(r, t), sent(t - D) + latency)  if a mean is due at t

    D = 0 and p = 1 is synchronous training; D = K - 1 and p = 1 is Pipe-SGD. In Pipe-SGD the communication of a step
    begins when that of the previous step has ended, so all communication counts as sending.

    A window may take several turns, one after the other. The turns of all windows send their bytes in the order in
    which they begin. The bytes arrive a latency later, and then the window's next turn begins. So with several windows
    in flight, each window waits for the others' bytes once for each of its turns.

    Args:
      durations: Seconds, [n, T].
      delay: D.
      interval: p.
      sending_seconds: The time for which a window occupies the links.
      latency_seconds: The further time until the window's mean arrives, if no other window is in flight.
      num_turns: The number of turns of a window.
      shares_left: A window's vector leaves in equal segments, in this order. By segment, the share of the window's
        last step that is still to be computed when the segment is ready. Default: one segment, at the end of the step.

    Returns:
      Seconds: the mean over the second half of the steps, or the duration of a single step.

    Raises:
      ValueError: If an argument is out of range, or there are no steps.
    """
    _check_durations(durations)
    check_integer("delay", delay, at_least=0)
    check_integer("interval", interval, at_least=1)
    check_integer("num_turns", num_turns, at_least=1)
    check_not_negative("sending_seconds", sending_seconds)
    check_not_negative("latency_seconds", latency_seconds)
    links = _SharedLinks(num_turns, sending_seconds / len(shares_left), latency_seconds / len(shares_left))
    now, ends = [0.0] * len(durations), [0.0]
    for step, computing in enumerate(durations.T.tolist(), start=1):
        now = [begin + seconds for begin, seconds in zip(now, computing, strict=True)]
        if step % interval == 0:
            for segment, share in enumerate(shares_left):
                ready = max(end - share * seconds for end, seconds in zip(now, computing, strict=True))
                links.send((step, segment), ready)
        due = step - delay
        if due > 0 and due % interval == 0:
            there = links.arrival((due, len(shares_left) - 1))
            now = [max(end, there) for end in now]
        ends.append(sum(now) / len(now))
    # The counted steps are whole windows, if there are enough steps.
    num_steps = durations.shape[1]
    num_counted = num_steps // 2 // interval * interval or max(1, num_steps - 1)
    return (ends[-1] - ends[-1 - num_counted]) / num_counted


class _SharedLinks:
    """The links of ranks that average windows together. They carry the bytes of one turn after the other.

    Args:
      num_turns: The number of turns of a vector.
      sending_seconds: The time for which a vector occupies the links.
      latency_seconds: The latencies of all turns together.
    """

    def __init__(self, num_turns: int, sending_seconds: float, latency_seconds: float):
        self._num_turns = num_turns
        self._sending, self._latency = sending_seconds / num_turns, latency_seconds / num_turns
        self._free_at = 0.0
        self._turns: list[tuple[float, Hashable, int]] = []
        self._arrivals: dict[Hashable, float] = {}

    def send(self, vector: Hashable, ready: float) -> None:
        """Enqueues a vector that is ready on all ranks. Vectors are sent in order."""
        heapq.heappush(self._turns, (ready, vector, 1))

    def arrival(self, vector: Hashable) -> float:
        """The time at which the mean of a vector arrives.

        Vectors that are sent after this call must not be ready before that time.
        """
        while vector not in self._arrivals:
            begin, other, turn = heapq.heappop(self._turns)
            self._free_at = max(begin, self._free_at) + self._sending
            if turn < self._num_turns:
                heapq.heappush(self._turns, (self._free_at + self._latency, other, turn + 1))
            else:
                self._arrivals[other] = self._free_at + self._latency
        return self._arrivals.pop(vector)


def free_running_seconds(
    durations: np.ndarray,
    *,
    pushing_seconds: float = 0.0,
    sum_seconds: float = 0.0,
    latency_seconds: float = 0.0,
    max_in_flight: int = 4,
) -> tuple[float, float]:
    """Duration of an iteration if a rank that is behind continues with the fastest rank's iteration.

    A rank pushes its step and goes on. It waits only if `max_in_flight` of its iterations are not merged yet. Pushes
    are summed up on all ranks, a piece on each. A rank that was in each of the last two sums is regular. A sum goes to
    all ranks as soon as all regular ranks have pushed, or when a rank pushes again. Batches of iterations that a rank
    skips are not trained on.

    Args:
      durations: Seconds, [n, T].
      pushing_seconds: The time for which a rank's push of an iteration occupies its link.
      sum_seconds: The time for which a sum occupies the links of all ranks.
      latency_seconds: The time until a message arrives, and until others know that an iteration was begun.
      max_in_flight: As for `CanaryStrategy`.

    Returns:
      Two numbers. The first is the mean time, in seconds, until the fastest rank enters the next iteration, over the
      second half of the iterations. The second is the share of this half's batches that ranks have trained on when the
      fastest rank has finished.

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
    """The events of `free_running_seconds`."""

    def __init__(self, durations: np.ndarray, pushing: float, summing: float, latency: float, max_in_flight: int):
        self._durations, self._max_in_flight = durations, max_in_flight
        self._pushing, self._summing, self._latency = pushing, summing, latency
        num_ranks, self._num_iterations = durations.shape
        self._free_at = np.zeros(num_ranks)
        self._next = [0] * num_ranks
        self._num_in_flight = [0] * num_ranks
        self._held_back: dict[int, int] = {}  # By rank, the iteration that waits until an earlier one is merged.
        self._begun_at: list[float] = []  # By iteration, the time at which the first rank entered it.
        self._num_made = np.zeros(self._num_iterations, int)
        self._in_a_row = [_NUM_IN_A_ROW] * num_ranks  # By rank, the number of last sums in a row that it was in.
        self._sum: set[int] = set()  # The ranks whose pushes were not passed on yet.
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
    """Time in which n workers that wait only for servers train n batches.

    The links of m servers serve all pushes at once, and each push slows the others down. Workers are not synchronized.
    A push that has a server's link to itself takes D / m on it. On average, worker r finds as many other workers on the
    link as there are at a random time:

        wait(r)   =  D / m (1 + sum over q != r of wait(q) / cycle(q))        for pushes, and likewise for answers
        cycle(r)  =  mean over t of c(r, t) + round trip + (1 - 1 / m) (D + D') + wait(r) + wait'(r)

    This is the mean value analysis of a closed network of queues by Schweitzer's approximation. Pushes to different
    servers are assumed to be sent at the same time, so that a worker's own link is the limit.

    Args:
      durations: Seconds, [n, T].
      num_servers: m.
      pushing_seconds: The time of a worker's push that has the links to itself [D].
      answering_seconds: The time of an answer that has the links to itself [D'].
      round_trip_seconds: The time of a push and its answer without any bytes.

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

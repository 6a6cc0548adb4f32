"""How long a step takes where ranks are not alike: schedules, event by event, of what ranks wait for.

    lock_step_seconds       every rank waits for what all have sent: Pipe-SGD, DTS, synchronous Canary
    free_running_seconds    no rank waits for another one's computation: asynchronous Canary
    server_seconds          workers wait for servers alone: SHAT

Each takes the durations of steps, an array [n, T]: what rank r computes in its step t takes `durations[r, t]`, without
any waiting. (Hop, whose ranks wait for their neighbors, is simulated: `hop_tf.simulate`.)
"""

from __future__ import annotations

import bisect
import collections
import heapq

import numpy as np

from hop_tf.arguments import check_integer
from hop_tf.timing.costs import check_not_negative


def lock_step_seconds(
    durations: np.ndarray,
    *,
    delay: int = 0,
    interval: int = 1,
    sending_seconds: float = 0.0,
    latency_seconds: float = 0.0,
) -> float:
    """Duration of a step where the mean over all ranks of a window of p steps is due D steps after its last one.

    With e(r, t) for the end of rank r's step t, and c(r, t) for what it computes:

        ready(w)  =  max over r of e(r, w)                              where the window's last step is w
        sent(w)   =  max(ready(w), sent(w - p)) + sending
        e(r, t)   =  max(e(r, t - 1) + c(r, t), sent(t - D) + latency)  where a mean is due at t

    D = 0 and p = 1 is synchronous training; D = K - 1 and p = 1 is Pipe-SGD. There the communication of one step begins
    when that of the last one has ended, so that all of it counts as sending. With D = 0 communication of which a part
    hides behind the computation counts as the part that does not.

    Args:
      durations: Seconds, [n, T].
      delay: D.
      interval: p.
      sending_seconds: For how long a window occupies the links.
      latency_seconds: How much later its mean is there.

    Returns:
      Seconds: the mean of the second half of the steps.

    Raises:
      ValueError: If an argument is out of range.
    """
    check_integer("delay", delay, at_least=0)
    check_integer("interval", interval, at_least=1)
    check_not_negative("sending_seconds", sending_seconds)
    check_not_negative("latency_seconds", latency_seconds)
    now, free_at, means, ends = np.zeros(len(durations)), 0.0, {}, []
    for step, computing in enumerate(durations.T, start=1):
        now = now + computing
        if step % interval == 0:
            free_at = max(float(now.max()), free_at) + sending_seconds
            means[step] = free_at + latency_seconds
        now = np.maximum(now, means.pop(step - delay, 0.0))
        ends.append(now.mean())
    # Beginning and end are in the same phase of a window, where there is room for one.
    num_counted = len(ends) // 2 // interval * interval or len(ends) - 1
    return float(ends[-1] - ends[-1 - num_counted]) / num_counted


def free_running_seconds(
    durations: np.ndarray,
    *,
    latency_seconds: float = 0.0,
    sending_seconds: float = 0.0,
    merging_seconds: float = 0.0,
    max_in_flight: int = 4,
) -> tuple[float, float]:
    """Duration of an iteration where a rank that is behind goes on with the iteration that the fastest one is in.

    A rank hands out what it has computed, and goes on; only where as many of its iterations as `max_in_flight` are not
    merged yet it waits for the oldest one. Batches of iterations that it passes over are not trained on.

    Args:
      durations: Seconds, [n, T].
      latency_seconds: When the others know that an iteration was begun.
      sending_seconds: For how long an iteration's bytes occupy a rank's link.
      merging_seconds: How much later they are merged everywhere.
      max_in_flight: As of `CanaryStrategy`.

    Returns:
      Seconds until the fastest rank has gone through T iterations, over T; and the share of all batches that ranks
      have trained on until then.

    Raises:
      ValueError: If an argument is out of range.
    """
    check_integer("max_in_flight", max_in_flight, at_least=1)
    for name, seconds in (
        ("latency_seconds", latency_seconds),
        ("sending_seconds", sending_seconds),
        ("merging_seconds", merging_seconds),
    ):
        check_not_negative(name, seconds)
    num_ranks, num_iterations = durations.shape
    next_own, num_trained = [0] * num_ranks, [0] * num_ranks
    free_at = [0.0] * num_ranks
    under_way = [collections.deque() for _ in range(num_ranks)]
    begun_at: list[float] = []  # When the first rank was in an iteration, by iteration.
    turns = [(0.0, rank) for rank in range(num_ranks)]
    while True:
        now, rank = heapq.heappop(turns)
        iteration = max(next_own[rank], bisect.bisect_right(begun_at, now - latency_seconds) - 1)
        if iteration >= num_iterations:
            return now / num_iterations, sum(num_trained) / durations.size
        if iteration == len(begun_at):
            begun_at.append(now)
        end = now + float(durations[rank, iteration])
        if len(under_way[rank]) == max_in_flight:
            end = max(end, under_way[rank].popleft())
        free_at[rank] = max(end, free_at[rank]) + sending_seconds
        under_way[rank].append(free_at[rank] + merging_seconds)
        next_own[rank] = iteration + 1
        num_trained[rank] += 1
        heapq.heappush(turns, (end, rank))


def server_seconds(
    durations: np.ndarray,
    *,
    num_servers: int,
    pushing_seconds: float,
    answering_seconds: float,
    round_trip_seconds: float = 0.0,
) -> float:
    """Time in which n workers that wait for servers alone train n batches.

    Worker r pushes, and waits for the answer:

        cycle(r)  =  mean over t of c(r, t)  +  round trip  +  max(1, n / m) (pushing + answering)

    The links of m servers are shared by n workers. Workers that begin together stay together, since links serve all of
    them at once: so the formula takes them to push all at the same time. Where steps vary they do not, and up to the
    factor n / m of the communication is spared.

    Args:
      durations: Seconds, [n, T].
      num_servers: m.
      pushing_seconds: How long a worker's push takes on links of its own.
      answering_seconds: The same of the answer.
      round_trip_seconds: How long both take without any bytes.

    Returns:
      Seconds: n / (sum over r of 1 / cycle(r)), the harmonic mean.

    Raises:
      ValueError: If an argument is out of range.
    """
    check_integer("num_servers", num_servers, at_least=1)
    for name, seconds in (
        ("pushing_seconds", pushing_seconds),
        ("answering_seconds", answering_seconds),
        ("round_trip_seconds", round_trip_seconds),
    ):
        check_not_negative(name, seconds)
    shared = max(1.0, len(durations) / num_servers) * (pushing_seconds + answering_seconds)
    cycles = durations.mean(axis=1) + round_trip_seconds + shared
    return float(len(cycles) / np.sum(1 / cycles)) if cycles.min() > 0 else 0.0

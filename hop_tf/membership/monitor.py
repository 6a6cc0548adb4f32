"""`Monitor`: the lock, the clock and the waiting of one rank.

Schemes never touch threads, clocks or locks themselves. One monitor guards all state that a rank's threads share
(queues, the state of peers), and all waiting is `Monitor.wait`. So the same scheme runs on real threads in production,
and on a deterministic scheduler with a virtual clock in tests and simulations.
"""

from __future__ import annotations

import abc
import math
import threading
import time


class Monitor(abc.ABC):
    """One lock with one condition and a clock. Use as a context manager to hold the lock (reentrant)."""

    @abc.abstractmethod
    def now(self) -> float:
        """Seconds on this monitor's clock. Only differences have a meaning."""

    @abc.abstractmethod
    def __enter__(self) -> Monitor: ...

    @abc.abstractmethod
    def __exit__(self, *exc_info) -> None: ...

    @abc.abstractmethod
    def notify_all(self) -> None:
        """Wakes every `wait`. The lock must be held."""

    @abc.abstractmethod
    def wait(self, timeout_seconds: float, deadline: float = math.inf) -> None:
        """Releases the lock until notified, then takes it again. The lock must be held.

        Args:
          timeout_seconds: Longest wait without a notification. The caller then checks conditions that cause no
            notification.
          deadline: The latest end of the wait, on this clock.
        """


class ThreadMonitor(Monitor):
    """The monitor for production: a `threading.Condition` and the machine's monotonic clock."""

    def __init__(self):
        self._condition = threading.Condition()
        self._num_waiting = 0

    def now(self) -> float:
        return time.monotonic()

    def __enter__(self) -> ThreadMonitor:
        self._condition.acquire()
        return self

    def __exit__(self, *exc_info) -> None:
        self._condition.release()

    def notify_all(self) -> None:
        if self._num_waiting:  # Called for each message, usually while no thread waits.
            self._condition.notify_all()

    def wait(self, timeout_seconds: float, deadline: float = math.inf) -> None:
        self._num_waiting += 1
        try:
            self._condition.wait(max(0.0, min(timeout_seconds, deadline - self.now())))
        finally:
            self._num_waiting -= 1

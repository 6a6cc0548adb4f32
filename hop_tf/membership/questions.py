"""`Questions`: empty messages to silent ranks."""

from __future__ import annotations

import math

from absl import logging

from hop_tf.errors import HopError
from hop_tf.membership.monitor import Monitor
from hop_tf.transport.base import Transport


class Questions:
    """Asks ranks if they are there, by an empty message, which their transports acknowledge even during computation.

    Methods are called with the monitor held.

    Args:
      transport: The transport.
      monitor: Provides the clock.
      name: Name of the queue of empty messages, equal on all ranks.
    """

    def __init__(self, transport: Transport, monitor: Monitor, name: str):
        self._transport = transport
        self._monitor = monitor
        self._queue = f"question/{name}"
        self._asked_at: dict[int, float] = {}
        transport.register(self._queue, lambda message: None)

    def close(self) -> None:
        """Stops taking messages."""
        self._transport.unregister(self._queue)

    def forget(self) -> None:
        """Forgets all questions: each rank is asked again when it is silent."""
        self._asked_at.clear()

    def seconds_unanswered(self, rank: int, silent_seconds: float) -> float:
        """Returns the seconds since a rank was asked. If it was heard since then, asks it again and returns 0.

        Args:
          rank: The rank.
          silent_seconds: The seconds since it was heard.
        """
        now = self._monitor.now()
        waited = now - self._asked_at.get(rank, math.inf)
        if 0 <= waited <= silent_seconds:
            return waited
        self._asked_at[rank] = now
        try:
            self._transport.send(rank, self._queue, supersedes=True)  # This never blocks.
        except HopError as error:
            logging.info("rank %d: could not ask rank %d: %s", self._transport.rank, rank, error)
        return 0.0

"""`Patience`: the silence after which ranks go on without a silent rank. `Questions`: asks silent ranks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from absl import logging

from hop_tf.errors import HopError
from hop_tf.membership.monitor import Monitor
from hop_tf.transport.base import PeerStatus, Transport

_MOST_GAP_SECONDS = 1.0


class Questions:
    """Asks ranks if they are alive, by empty messages. Transports acknowledge these even while their ranks compute.

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
        """Returns the seconds since a rank was asked.

        If the rank was never asked, or was heard since then, this call asks it and returns 0.

        Args:
          rank: The rank.
          silent_seconds: The seconds since the rank was last heard.
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


class Patience:
    """Distinguishes silent ranks from ranks that this process could not hear because this process itself was stopped.

    A process that wakes finds all others silent until its threads have read the messages that came meanwhile. So only
    the silence since this process last woke up counts. A rank that is silent for a quarter of the patience is asked,
    and has the rest of the patience to answer. So even a short patience does not need frequent heartbeats.

    Args:
      seconds: Silence after which a rank is left behind.
      now: The monitor's clock.
      questions: Asks ranks.

    Attributes:
      seconds: As above.
      ask_seconds: Silence after which a rank is asked.
      look_seconds: Interval at which a waiting rank must check for silence.
    """

    def __init__(self, seconds: float, now: Callable[[], float], questions: Questions):
        self.seconds = seconds
        self.ask_seconds = self.look_seconds = seconds / 4
        # A process that has not checked any rank for this long may have been stopped itself.
        self._gap_seconds = min(2 * self.look_seconds, _MOST_GAP_SECONDS)
        self._now = now
        self._questions = questions
        self._looked_at = self._awake_since = now()

    def discount(self, rank: int, status: PeerStatus, *, asks: bool = True) -> PeerStatus:
        """Returns the `status` of a rank, with only the silence that counts; unchanged if the rank was never met.

        Args:
          rank: The rank.
          status: Its status, which was read just now.
          asks: True if the rank may be asked. Otherwise all silence since this process woke up counts: this process has
            sent messages to the rank, and the rank's transport acknowledges messages like questions.
        """
        now = self._now()
        if now - self._looked_at > self._gap_seconds:
            self._awake_since = now
            self._questions.forget()
        self._looked_at = now
        if not status.ever_connected:
            return status
        silent = min(status.silent_seconds, now - self._awake_since)
        if asks and silent > self.ask_seconds:
            unanswered = self._questions.seconds_unanswered(rank, status.silent_seconds)
            silent = min(silent, self.ask_seconds + unanswered)
        return dataclasses.replace(status, silent_seconds=silent)

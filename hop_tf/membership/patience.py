"""`Patience`: the time for which ranks that go on without a lost rank wait for a silent rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from hop_tf.membership.questions import Questions
from hop_tf.transport.base import PeerStatus

_MOST_GAP_SECONDS = 1.0


class Patience:
    """Distinguishes a silent rank from a rank that this process could not hear, because it was stopped itself.

    A process that wakes finds all others silent until its threads have read the messages that came meanwhile. So
    silence counts only since this process was last stopped. A rank that is silent for a quarter of the patience is
    asked, and has the rest of the patience to answer. So even a short patience does not need frequent heartbeats.

    Args:
      seconds: Silence after which a rank is left behind.
      now: The monitor's clock.
      questions: Asks ranks.

    Attributes:
      seconds: As above.
      ask_seconds: Silence after which a rank is asked.
      look_seconds: Interval at which a rank that waits has to check.
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
        """Returns the `status` of a rank, with the silence that counts. If a rank was never met, its status stays.

        Args:
          rank: The rank.
          status: Its status, which was read just now.
          asks: True if the rank may be asked. Otherwise all of its silence counts, because messages were sent to it.
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

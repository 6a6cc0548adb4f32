"""`Patience`: for how long ranks that go on without a lost rank wait for one that is silent."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from hop_tf.membership.questions import Questions
from hop_tf.transport.base import PeerStatus

_MOST_GAP_SECONDS = 1.0


class Patience:
    """Tells a silent rank from a rank that this process could not hear, because it was stopped itself.

    A process that wakes finds all others silent until its threads have read what they have sent meanwhile. So silence
    counts only from when this process was last stopped. A rank that is silent for a quarter of the patience is asked,
    and has the rest of it to answer. So heartbeats need not be as frequent as a short patience would need them.

    Args:
      seconds: Silence after which a rank is left behind.
      now: The monitor's clock.
      questions: Asks ranks.

    Attributes:
      seconds: As above.
      ask_seconds: Silence after which a rank is asked.
      look_seconds: How often a rank that waits has to look.
    """

    def __init__(self, seconds: float, now: Callable[[], float], questions: Questions):
        self.seconds = seconds
        self.ask_seconds = self.look_seconds = seconds / 4
        # A process that has looked at no other rank for so long may have been stopped itself.
        self._gap_seconds = min(2 * self.look_seconds, _MOST_GAP_SECONDS)
        self._now = now
        self._questions = questions
        self._looked_at = self._awake_since = now()

    def discount(self, rank: int, status: PeerStatus, *, asks: bool = True) -> PeerStatus:
        """Returns the `status` of a rank, with the silence that counts. A rank that was never met is left as it is.

        Args:
          rank: The rank.
          status: Its status, which was read just now.
          asks: Whether the rank may be asked. If not, all of its silence counts: it was sent something before.
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

"""`Patience`: for how long ranks that go on without a lost rank wait for one that is silent."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from hop_tf.membership.questions import Questions
from hop_tf.transport.base import PeerStatus

# Asked after half of the patience, a rank has the other half to answer. Others that are heard have done so after this
# part of it.
_ANSWER = 0.25
_MOST_GAP_SECONDS = 1.0


class Patience:
    """Tells a silent rank from a rank that this process could not hear, because it was stopped itself.

    A process that wakes finds all others silent until its threads have read what they have sent meanwhile. So silence
    counts only from when this process was last stopped. And a rank is silent only if it was asked in the first half of
    that time: heartbeats need not be as frequent as a short patience would have them.

    Args:
      seconds: Silence after which a rank is left behind.
      now: The monitor's clock.
      questions: Asks ranks.

    Attributes:
      seconds: As above.
      look_seconds: Who waits for a rank looks at it this often.
    """

    def __init__(self, seconds: float, now: Callable[[], float], questions: Questions):
        self.seconds = seconds
        self.look_seconds = seconds / 4
        # A process that has looked at no other rank for so long may have been stopped itself.
        self._gap_seconds = min(2 * self.look_seconds, _MOST_GAP_SECONDS)
        self._now = now
        self._questions = questions
        self._looked_at = self._awake_since = now()

    def discount(self, rank: int, status: PeerStatus) -> PeerStatus:
        """Returns the `status` of a rank, which was read just now. Of one that was met, silence counts as above."""
        now = self._now()
        if now - self._looked_at > self._gap_seconds:
            self._awake_since = now
        self._looked_at = now
        if not status.ever_connected:
            return status
        silent = min(status.silent_seconds, now - self._awake_since)
        if silent > self.seconds / 2:
            unanswered = self._questions.seconds_unanswered(rank, status.silent_seconds)
            silent = min(silent, self.seconds / 2 + unanswered)
        return dataclasses.replace(status, silent_seconds=silent)

    def is_uncertain(self, status: PeerStatus) -> bool:
        """True if the rank may be about to answer."""
        return 0 <= status.silent_seconds / self.seconds - 0.5 <= _ANSWER

    def is_unheard(self, status: PeerStatus) -> bool:
        """True if it ought to have been heard."""
        return status.silent_seconds / self.seconds - 0.5 > _ANSWER

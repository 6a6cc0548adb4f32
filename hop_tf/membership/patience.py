"""`Patience`: for how long ranks that go on without a lost rank wait for one that is silent."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from hop_tf.transport.base import PeerStatus

# A process that has looked at no other rank for so long may have been stopped itself.
_GAP_SECONDS = 1.0


class Patience:
    """Tells a silent rank from a rank that this process could not hear, because it was stopped itself.

    A process that wakes finds all others silent until its threads have read what they have sent meanwhile. So silence
    counts only from when this process was last stopped.

    Args:
      seconds: Silence after which a rank is left behind.
      now: The monitor's clock.

    Attributes:
      seconds: As above.
    """

    def __init__(self, seconds: float, now: Callable[[], float]):
        self.seconds = seconds
        self._now = now
        self._looked_at = self._awake_since = now()

    def discount(self, status: PeerStatus) -> PeerStatus:
        """Returns `status`, which was read just now. Of a peer that was met, silence counts as above."""
        now = self._now()
        if now - self._looked_at > _GAP_SECONDS:
            self._awake_since = now
        self._looked_at = now
        if not status.ever_connected:
            return status
        return dataclasses.replace(status, silent_seconds=min(status.silent_seconds, now - self._awake_since))

"""How a simulated rank, like a process, begins again after its death."""

from __future__ import annotations

from hop_tf.errors import PeerLostError
from hop_tf.membership import Membership
from hop_tf.runtime.joining import Joining
from hop_tf.tools.simulate.scheduler import Scheduler

_NUM_ATTEMPTS = 20


def catch_up(
    membership: Membership, joining: Joining, group: str, clock: Scheduler, *, attempt_seconds: float = 1.0
) -> int:
    """The first step of a process: the number of those passed over, where it was started again.

    One that cannot join, as all that it asks are dead too, tries again, like one with deadlines.

    Args:
      membership: That of the rank.
      joining: Its part in joining.
      group: Name of the group.
      clock: The virtual clock.
      attempt_seconds: How long after an attempt the next one follows. Default 1.

    Raises:
      PeerLostError: If 20 attempts fail.
    """
    num_passed = int(membership.joining)
    for attempts_left in reversed(range(_NUM_ATTEMPTS)):
        try:
            while num_skipped := joining.catch_up(group, num_passed):
                num_passed += num_skipped
            return num_passed
        except PeerLostError:
            if not membership.joining or not attempts_left:
                raise
            clock.sleep(attempt_seconds)

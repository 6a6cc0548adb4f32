"""`catch_up`: a simulated rank begins again after its death, like a restarted process."""

from __future__ import annotations

from hop_tf.errors import PeerLostError
from hop_tf.membership.session import Membership
from hop_tf.runtime.joining import Joining
from hop_tf.tools.simulate.scheduler import Scheduler

_NUM_ATTEMPTS = 20


def catch_up(
    membership: Membership, joining: Joining, group: str, clock: Scheduler, *, attempt_seconds: float = 1.0
) -> int:
    """Returns the first step of a process: 0, or after a restart the number of steps that it skips.

    If the process cannot join because all ranks that it asks are dead, too, it tries again, as with real deadlines.

    Args:
      membership: The rank's membership.
      joining: The rank's part in joining.
      group: Name of the group.
      clock: The virtual clock.
      attempt_seconds: The time from one attempt to the next. Default 1.

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

"""`FiniteCheck`: warns, once, that this rank sends values that are not finite, or raises an error."""

from __future__ import annotations

import threading

from absl import logging

from hop_tf.errors import HopError
from hop_tf.membership.session import Membership


class FiniteCheck:
    """Checks the values that a rank is about to send: a NaN of one rank soon spreads to all.

    Args:
      membership: The rank's membership.
      raises: True if such values are an error, raised before they are sent. Otherwise the first ones cause a warning.

    Attributes:
      num_steps: Number of steps with such values.
    """

    def __init__(self, membership: Membership, *, raises: bool):
        self.raises = raises
        self.num_steps = 0
        self._membership = membership
        self._lock = threading.Lock()
        self._latest: tuple[int, int] | None = None  # Session and step.

    def note(self, step: int) -> None:
        """Called when a step of the running session is about to send values that are not finite.

        Raises:
          HopError: If `raises` is set.
        """
        place = self._membership.session, step
        with self._lock:
            is_first, is_new = self._latest is None, self._latest != place
            self._latest = place
            self.num_steps += is_new
        text = (
            f"rank {self._membership.rank}, step {step}: this rank sends values that are not finite (NaN or infinite), "
            "and they may spread to all ranks. Check the data of this rank and the learning rate."
        )
        if self.raises:
            raise HopError(text)
        if is_first:
            logging.warning("%s This warning appears once. (A LossScaleOptimizer skips a step now and then.)", text)

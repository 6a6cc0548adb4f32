"""`FiniteCheck`: tells, once, that this rank sends values that are not finite, or ends the job for that."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import tensorflow as tf
from absl import logging

from hop_tf.errors import HopError
from hop_tf.membership import Membership
from hop_tf.tensors.finite import are_finite


class FiniteCheck:
    """Watches what a rank is about to send: a NaN of one rank soon is one of all.

    Args:
      membership: The rank among the others.
      raises: Whether such values are an error, before they are sent. Else a warning tells of the first ones.

    Attributes:
      num_steps: In how many steps there were some.
    """

    def __init__(self, membership: Membership, *, raises: bool):
        self.raises = raises
        self.num_steps = 0
        self._membership = membership
        self._lock = threading.Lock()
        self._latest: tuple[int, int] | None = None  # Session and step.

    def emit(self, step: tf.Tensor, tensors: Sequence[tf.Tensor]) -> tf.Tensor:
        """Emits the check of a step's tensors; returns what they are to be sent after.

        Raises:
          tf.errors.OpError: When executed, if values are an error; the text is that of the rank's failure.
        """

        def note() -> tf.Tensor:
            noted = tf.numpy_function(self._note, [step], tf.bool)
            return tf.ensure_shape(noted, [])

        return tf.cond(are_finite(tensors), lambda: tf.constant(True), note)

    def _note(self, step: np.ndarray) -> np.bool_:
        place = self._membership.session, int(step)
        with self._lock:
            is_first, is_new = self._latest is None, self._latest != place
            self._latest = place
            self.num_steps += is_new
        text = (
            f"rank {self._membership.rank}, step {int(step)}: this rank sends values that are not finite (NaN or "
            "infinite): all ranks may soon have some. Check its data and the learning rate."
        )
        if self.raises:
            error = HopError(text)
            self._membership.fail(error)
            raise error
        if is_first:
            logging.warning("%s It is told once. (With a LossScaleOptimizer a step now and then is left out.)", text)
        return np.bool_(False)

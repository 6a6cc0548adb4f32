"""When DTS's windows end and are merged, and which part of one is handed out."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import tensorflow as tf

from hop_tf.codecs import TopK
from hop_tf.timing.dts import num_windows

# A threshold is sought among about so many values; all of them in models that have fewer.
_SAMPLE_SIZE = 1 << 17


@dataclasses.dataclass(frozen=True)
class Schedule:
    """When windows end, and when they are merged; numbers may be tensors.

    Window k = 0, 1, ... ends when (k + 1) p steps are complete, and is merged D steps later.

    Attributes:
      delay: D.
      interval: p.
    """

    delay: int
    interval: int

    @property
    def num_slots(self) -> int:
        """Most windows that are under way at a time."""
        return num_windows(self.delay, self.interval)

    def ended(self, num_steps: int) -> tuple[bool, int]:
        """Whether a window ends when so many steps are complete, and which one that is."""
        return num_steps % self.interval == 0, num_steps // self.interval - 1

    def due(self, num_steps: int) -> tuple[bool, int]:
        """Whether a window is merged when so many steps are complete, and which one that is."""
        num_due = num_steps - self.delay
        return (num_due > 0) & (num_due % self.interval == 0), num_due // self.interval - 1

    def under_way(self, num_steps: int) -> range:
        """The windows that have ended by then and are not merged."""
        return range(max(0, num_steps - self.delay) // self.interval, num_steps // self.interval)

    @property
    def num_newer(self) -> int:
        """How many windows have ended after the one that is due."""
        return self.delay // self.interval


def largest(selection: TopK, window: tf.Tensor, changes: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Emits the ops that tell where changes are among the largest: what a window hands out.

    Args:
      selection: How many are.
      window: The window's number.
      changes: float32 tensors.

    Returns:
      For each tensor, where. Lin et al. call it local accumulation.
    """
    sizes = [tf.abs(tf.cast(change, tf.float32)) for change in changes]
    values = tf.concat([tf.reshape(size, [-1]) for size in sizes], axis=0)
    sample = values[:: _next_prime(values.shape[0] // _SAMPLE_SIZE)]
    ratios = [selection.ratio_at(step) for step in range(selection.warmup_steps + 1)]
    ratio = tf.gather(ratios, tf.minimum(window, len(ratios) - 1))
    num_largest = tf.cast(tf.math.ceil(ratio * sample.shape[0]), tf.int32)
    threshold = tf.math.top_k(sample, num_largest).values[-1]
    return [~(size < threshold) for size in sizes]  # What is not a number is handed out.


def _next_prime(number: int) -> int:
    """A stride that meets all columns of a layer's kernel in turn; 1 for numbers below 2."""
    if number < 2:
        return 1
    while any(number % divisor == 0 for divisor in range(2, math.isqrt(number) + 1)):
        number += 1
    return number

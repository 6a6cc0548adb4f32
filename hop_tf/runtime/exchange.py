"""`Exchange`: a scheme's communication. See `hop_tf.runtime.exchange_runner` for its place in a step."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf

from hop_tf.tensors.packing import Packing


@dataclasses.dataclass(frozen=True)
class Request:
    """Values that the graph submits: step, segment of the step (0 if there is only one), and a flat array per bucket.

    The arrays are the outputs of `Exchange.emit_encode`. They share memory with tensors, and are read-only.
    """

    step: int
    segment: int
    buckets: tuple[np.ndarray, ...]


@dataclasses.dataclass(frozen=True)
class Result:
    """The answer to a `Request` of the same step. The graph gets results in the order of the requests.

    The segment is that of the `Request`, or a further segment, which has a result but no request. `Exchange.parts` has
    the packing of its buckets. TensorFlow takes over the arrays: do not modify them afterwards. The rank skips the next
    `num_skipped` training steps. The next `Request` belongs to the step after them. The last `num_dropped` segments of
    the step were dropped: their values were not sent.
    """

    step: int
    segment: int
    buckets: tuple[np.ndarray, ...]
    num_skipped: int = 0
    num_dropped: int = 0


class Exchange(abc.ABC):
    """A scheme's communication for one group of variables: plain Python over arrays, queues and `Membership.wait`.

    Attributes:
      max_in_flight: Number of requests that the graph may submit before it takes the first one's result.
      num_threads: Number of calls of `step` that may run at the same time. Their results are delivered in order.
      parts: The packings of a step's segments, if each segment holds only some of the variables. Otherwise empty.
      step_offset: Number of steps that the others have made without this rank: its step k is their step
        k + step_offset. `fit` skips the batches of these steps.
    """

    max_in_flight: int = 1
    num_threads: int = 1
    step_offset: int = 0
    parts: Sequence[Packing] = ()

    def steps_of(self, number: int) -> range:
        """The training steps that are submitted with `Request.step` equal to `number`. Default: the step `number`."""
        return range(number, number + 1)

    def number_of(self, step: int) -> int:
        """The `Request.step` of the request that submits, or will submit, a training step. Default: `step`."""
        return step

    @abc.abstractmethod
    def reset(self, session: int) -> None:
        """Forgets everything and prepares for step 0 of `session`. Other ranks may send as soon as this returns."""

    def emit_encode(self, segment: int, buckets: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
        """Emits the ops that encode the graph's values, on their device. Default: values are not encoded.

        Args:
          segment: The segment.
          buckets: Its buckets.

        Returns:
          The vectors that `Request` gets instead: of the same types, and of any length.
        """
        del segment
        return buckets

    def emit_decode(self, segment: int, buckets: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
        """Emits the ops that decode a `Result`, on the device that uses it. Default: results are not encoded.

        Args:
          segment: The segment.
          buckets: The buckets of the result, of `result_sizes`.

        Returns:
          The buckets of the packing.
        """
        del segment
        return buckets

    def result_sizes(self, segment: int, sizes: Sequence[int]) -> Sequence[int]:
        """The number of elements of each bucket of a `Result`. Default: `sizes`, those of the packing."""
        del segment
        return sizes

    @abc.abstractmethod
    def step(self, request: Request) -> Result | None:
        """Runs the scheme for one step. Called once for every `Request`; in order, if there is only one thread.

        Blocks: on peers, by `Membership.wait`.

        Returns:
          The result for the graph; None if the result comes with a later segment.

        Raises:
          HopError: If a peer fails, or breaks the protocol.
          Interrupted: If this rank leaves the session.
        """

    @abc.abstractmethod
    def no_op(self, request: Request) -> Result | None:
        """The result that changes nothing, for an interrupted step. None if `step` returns None for the request."""

    @property
    @abc.abstractmethod
    def sent_rounds(self) -> int:
        """The number of rounds of the running session that this rank has sent. Others never wait for later ones.

        Others wait for a round by its number, see `Membership.delivers`. A round is the updates of a step, or the mean
        of a segment, a window or a whole `fit`. If no rank waits for another, a round is all that a step sends.
        """

    def goes_on_with(self, server: int) -> bool:
        """True if the exchange can continue although a restarted parameter server has lost its state."""
        del server
        return False

    def counters(self) -> Mapping[str, float]:
        """Counters for `strategy.report()`, added to the common ones: the sums over all past and present groups."""
        return {}

    def gauges(self) -> Mapping[str, float]:
        """Present values for `strategy.report()`: the maximum over the present groups."""
        return {}

    def outcomes(self) -> Mapping[str, int]:
        """Counts of the outcomes of updates so far, by the names of `hop_tf.records.events.OUTCOMES`.

        Skipped steps need not be included: `Result.num_skipped` counts them.
        """
        return {}

    def settle(self, deadline: float) -> None:
        """Waits until no rank needs anything from this exchange, which is about to end. Default: does not wait.

        Args:
          deadline: The latest end of the wait, on the monitor's clock.
        """

    def close(self) -> None:
        """Stops taking messages."""

"""`Mean`: means of the same vectors over the ranks, step by step."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence

import numpy as np


class Mean(abc.ABC):
    """Means of the same vectors, step by step."""

    @abc.abstractmethod
    def reset(self, session: int) -> None:
        """Prepares for step 0 of `session`. Residuals of codecs are kept."""

    @abc.abstractmethod
    def mean(
        self,
        step: int,
        vectors: Sequence[np.ndarray],
        delivers: Callable[[int, int], bool],
        before_commit: Callable[[], None] = lambda: None,
        *,
        is_committed: bool = False,
        training_step: int | None = None,
        codec_step: int | None = None,
    ) -> list[np.ndarray]:
        """Averages vectors over all ranks that take part in `step`.

        Args:
          step: Number of the step: 0, 1, 2, ... in each session, equal on all ranks.
          vectors: 1-D arrays, of the sizes given. They are read after this call returns. Do not modify them.
          delivers: `delivers(rank, step)` is True if `rank` takes part; see `Membership.delivers`.
          before_commit: Called before this rank sends anything with which others can complete a mean of this step. May
            block, and raise `Interrupted`. After `Interrupted`, no rank has a mean with this rank's part. In a mesh of
            two, it is called before this rank has its mean. The other rank may already have its own.
          is_committed: True if others may have data that belong together with this step's mean. Then `Interrupted` is
            not raised, and `before_commit` is not called. Default False.
          training_step: The step's number in errors. Default None: `step`.
          codec_step: The step's number for codecs whose settings change with time. Default None: `step`.

        Returns:
          The means, in the order of `vectors`, equal to the bit on all ranks. Sums are kept in float32 at least.

        Blocks: until all ranks that take part have sent their vectors. Does not block if all vectors are empty.

        Raises:
          HopError: As `Membership.wait` does.
          Interrupted: If this rank leaves the session before any rank can have a mean of this step. In a mesh of two,
            only this rank's own mean matters.
          ProtocolError: If the data of another rank cannot be decoded.
        """

    @abc.abstractmethod
    def take_residuals(self) -> list[np.ndarray]:
        """Removes and returns the residuals that error feedback would add to this rank's vectors of the next step.

        For algorithms that keep residuals in another form. The sum of all ranks' vectors so far is the sum of all means
        so far, times the number of ranks, plus all ranks' residuals.

        Returns:
          A residual for each vector, in float32: zeros if its codec has no error feedback.
        """

    @property
    @abc.abstractmethod
    def codec_seconds(self) -> float:
        """Time spent on encoding, decoding and adding."""

    @abc.abstractmethod
    def settle(self, deadline: float) -> None:
        """Waits until no rank can need this rank's means of its last step; see `EndedSteps.settle`."""

    @abc.abstractmethod
    def close(self) -> None:
        """Stops taking messages."""

    # For ranks that join.

    @abc.abstractmethod
    def begin_at(self, step: int) -> None:
        """Makes this restarted process take part from `step` on. The monitor must be held."""

    def common_state(self) -> Sequence[np.ndarray]:
        """The state between two steps that is equal on all ranks, and that a newcomer takes over. Default: none."""
        return ()

    def take_common_state(self, parts: Sequence[np.ndarray]) -> None:
        """Takes over another rank's `common_state`, as bytes."""

"""`Alternatives`: several ways to make the same means. Each step uses one of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hop_tf.collectives.mean import Mean
from hop_tf.tensors import payloads


class Alternatives(Mean):
    """Several means of which each step uses one. A member's residuals of error feedback go to the next member.

    Each member counts its own steps, and may keep the last means that it has made. If all ranks choose the same member
    in each step, their counts are equal.

    Args:
      members: The means, of the same vectors. Each has a name of its own.
    """

    def __init__(self, members: Sequence[Mean]):
        self._members = members
        self._steps = [0] * len(members)
        self._chosen = 0
        self._lost: Sequence[np.ndarray] = ()  # Residuals of members that were chosen before.

    def choose(self, index: int) -> None:
        """Makes this member compute the means from the next step on. Must be equal on all ranks."""
        if index != self._chosen:
            lost = self.take_residuals()
            self._lost = lost if any(each.any() for each in lost) else ()
            self._chosen = index

    def take_residuals(self) -> list[np.ndarray]:
        lost, self._lost = self._lost, ()
        residuals = self._members[self._chosen].take_residuals()
        return [old + new for old, new in zip(lost, residuals, strict=True)] if lost else residuals

    def mean(self, step: int, vectors: Sequence[np.ndarray], *arguments, **keywords) -> list[np.ndarray]:
        """See `Mean.mean`. A member counts its own steps, but errors and codecs use `step`."""
        keywords = {"training_step": step, "codec_step": step, **keywords}
        if self._lost:
            vectors = list(map(_with, vectors, self._lost))
        means = self._members[self._chosen].mean(self._steps[self._chosen], vectors, *arguments, **keywords)
        self._steps[self._chosen] += 1
        self._lost = ()
        return means

    def reset(self, session: int) -> None:
        self._steps = [0] * len(self._members)
        for member in self._members:
            member.reset(session)

    def begin_at(self, step: int) -> None:
        """See `Mean.begin_at`. Follows `take_common_state`, which sets each member's step."""
        del step
        for member, own_step in zip(self._members, self._steps, strict=True):
            member.begin_at(own_step)

    def common_state(self) -> Sequence[np.ndarray]:
        """See `Mean.common_state`. Includes each member's step."""
        states = (payloads.joined(member.common_state()) for member in self._members)
        return [np.array(self._steps, np.int64), *states]

    def take_common_state(self, parts: Sequence[np.ndarray]) -> None:
        steps, *of_members = parts
        self._steps = steps.copy().view(np.int64).tolist()
        for member, part in zip(self._members, of_members, strict=True):
            member.take_common_state(payloads.split(part))

    @property
    def codec_seconds(self) -> float:
        return sum(member.codec_seconds for member in self._members)

    def settle(self, deadline: float) -> None:
        for member in self._members:
            member.settle(deadline)

    def close(self) -> None:
        for member in self._members:
            member.close()


def _with(values: np.ndarray, lost: np.ndarray) -> np.ndarray:
    """The sum, in the values' type; `lost` is float32. Without a residual, as for float64, the values stay."""
    return (values.astype(np.float32) + lost).astype(values.dtype) if lost.any() else values

"""`Alternatives`: several ways to make the same means, of which each step takes one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from hop_tf.collectives.all_reduce import AllReduce
from hop_tf.tensors import payloads


def one_or_alternatives(
    name: str, ways: Sequence, make: Callable[[str, object], AllReduce]
) -> AllReduce | Alternatives:
    """Makes what averages in one of several ways.

    Args:
      name: Names it; equal on all ranks.
      ways: The ways.
      make: Makes what averages in one way: `make(name, way)`.
    """
    if len(ways) == 1:
        return make(name, ways[0])
    return Alternatives([make(f"{name}/{number}", way) for number, way in enumerate(ways)])


class Alternatives:
    """Used as an `AllReduce`. What the codec of one has lost, and would add to its next vectors, goes to the others.

    Each counts its own steps, and may keep the last means that it has made. Ranks that choose alike in each step count
    alike.

    Args:
      members: The ways, over the same vectors. They have names of their own.
    """

    def __init__(self, members: Sequence[AllReduce]):
        self._members = members
        self._steps = [0] * len(members)
        self._chosen = 0
        self._lost: Sequence[np.ndarray] = ()  # By the member that was chosen before.

    def choose(self, index: int) -> None:
        """From the next step on, this member makes the means; equal on all ranks."""
        if index != self._chosen:
            lost = self._members[self._chosen].take_residuals()
            if any(each.any() for each in lost):
                self._lost = [old + new for old, new in zip(self._lost, lost, strict=True)] if self._lost else lost
            self._chosen = index

    def mean(self, step: int, vectors: Sequence[np.ndarray], *arguments, **keywords) -> list[np.ndarray]:
        """As `AllReduce.mean`; a member counts its own steps, but errors and codecs go by `step`."""
        keywords = {"training_step": step, "codec_step": step, **keywords}
        if self._lost:
            vectors = list(map(_with, vectors, self._lost))
        means = self._members[self._chosen].mean(self._steps[self._chosen], vectors, *arguments, **keywords)
        self._steps[self._chosen] += 1
        self._lost = ()
        return means

    def reset(self, session: int) -> None:
        """As `AllReduce.reset`."""
        self._steps = [0] * len(self._members)
        for member in self._members:
            member.reset(session)

    def begin_at(self, step: int) -> None:
        """As `AllReduce.begin_at`; follows `take_common_state`, which tells each member's step."""
        del step
        for member, own_step in zip(self._members, self._steps, strict=True):
            member.begin_at(own_step)

    def common_state(self) -> Sequence[np.ndarray]:
        """As `AllReduce.common_state`."""
        states = (payloads.joined(member.common_state()) for member in self._members)
        return [np.array(self._steps, np.int64), *states]

    def take_common_state(self, parts: Sequence[np.ndarray]) -> None:
        """As `AllReduce.take_common_state`."""
        steps, *of_members = parts
        self._steps = steps.copy().view(np.int64).tolist()
        for member, part in zip(self._members, of_members, strict=True):
            member.take_common_state(payloads.split(part))

    @property
    def codec_seconds(self) -> float:
        """As `AllReduce.codec_seconds`."""
        return sum(member.codec_seconds for member in self._members)

    def settle(self, deadline: float) -> None:
        """As `AllReduce.settle`."""
        for member in self._members:
            member.settle(deadline)

    def close(self) -> None:
        """As `AllReduce.close`."""
        for member in self._members:
            member.close()


def _with(values: np.ndarray, lost: np.ndarray) -> np.ndarray:
    """The sum, of the values' type; lost is of float32. What has lost nothing is left alone, such as float64."""
    return (values.astype(np.float32) + lost).astype(values.dtype) if lost.any() else values

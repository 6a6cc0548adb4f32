"""Interfaces for joining a running session: `Joiner` of an exchange, `State` and `GraphState` of variables."""

from __future__ import annotations

import abc
from collections.abc import Sequence

import numpy as np


class State(abc.ABC):
    """The state that a newcomer takes from another rank."""

    @abc.abstractmethod
    def signature(self, groups: str) -> bytes:
        """Describes the state together with these exchange groups; see `hop_tf.runtime.replica_state.sign`."""

    @abc.abstractmethod
    def read(self) -> list[np.ndarray]:
        """The state's arrays. Do not modify them."""

    @abc.abstractmethod
    def write(self, payload: np.ndarray) -> None:
        """Takes over the arrays that another rank has read, joined as bytes."""


class GraphState:
    """The variables of a group's graph, as far as a newcomer needs them. By default there are none.

    All methods are called on a communication thread, without the monitor, between two steps, while the graph waits.
    `begin_at` may also be called in the program's thread, while the first step is traced.
    """

    def state(self) -> list[np.ndarray]:
        """The arrays that a newcomer takes over, besides those of `State`. Do not modify them."""
        return []

    def take_state(self, parts: Sequence[np.ndarray]) -> None:
        """Takes over another rank's `state`, as bytes. `begin_at` is called next."""

    def begin_at(self, step: int) -> None:
        """Prepares the graph to enter `step` of the running session, without having made the earlier steps."""


class Joiner(abc.ABC):
    """The part of an exchange that deals with newcomers. All methods are called with the rank's monitor held.

    Attributes:
      lets_join: True if a rank that was started again may take part again.
      is_synchronous: True if a newcomer enters between two steps, when all ranks meet: see `LockStepJoiner`.
    """

    lets_join: bool = True
    is_synchronous: bool = False

    @abc.abstractmethod
    def begin_at(self, step: int) -> None:
        """Prepares this rank to enter `step` of the running session, without having made the earlier steps."""

    @abc.abstractmethod
    def meet(self, rank: int, step: int) -> None:
        """Called after `begin_at`, when rank `rank` is in `step`, and sends this rank the messages of later steps."""

    @abc.abstractmethod
    def admit(self, rank: int, step: int) -> int:
        """Called when rank `rank` is to enter `step`, in a new process.

        Returns:
          The step that this rank is in. This rank sends the newcomer its messages of later steps.
        """

"""`Joiner` and `State`: what joining a session that is under way asks of an exchange, and of a rank's variables."""

from __future__ import annotations

import abc
from collections.abc import Sequence

import numpy as np

from hop_tf.keras_hook.roster import Roster
from hop_tf.runtime.admissions import Admissions


class State(abc.ABC):
    """What a newcomer takes from another rank."""

    @abc.abstractmethod
    def signature(self, groups: str) -> bytes:
        """What it consists of, beside these exchange groups; see `hop_tf.runtime.replica_state.sign`."""

    @abc.abstractmethod
    def read(self) -> list[np.ndarray]:
        """Its arrays. Nobody writes to them afterwards."""

    @abc.abstractmethod
    def write(self, payload: np.ndarray) -> None:
        """Takes over the arrays that another rank has read, joined as bytes."""


class Joiner(abc.ABC):
    """What an exchange does about newcomers. All are called with the rank's monitor held.

    Attributes:
      lets_join: Whether a rank that was started again takes part again.
    """

    lets_join: bool = True

    @abc.abstractmethod
    def begin_at(self, step: int) -> None:
        """This rank is to enter `step` of the running session, without having made the steps before."""

    @abc.abstractmethod
    def meet(self, rank: int, step: int) -> None:
        """Rank `rank` is in `step`, and sends to this rank what belongs to later ones. Follows `begin_at`."""

    @abc.abstractmethod
    def admit(self, rank: int, step: int) -> int:
        """Rank `rank` is to enter `step`, as another process than before.

        Returns:
          The step that this rank is in; what belongs to later ones it sends to the newcomer.
        """


class LockStepJoiner(Joiner):
    """What one does whose ranks are in lock step: there a newcomer enters between two steps, in which all meet.

    Attributes:
      admissions: Who takes part from which step on; None where nobody joins.
      roster: The ranks that share each batch; None where all ranks do, whoever is lost.
    """

    admissions: Admissions | None = None
    roster: Roster | None = None

    @property
    def lets_join(self) -> bool:
        return self.admissions is not None

    def meet(self, rank: int, step: int) -> None:
        pass

    def admit(self, rank: int, step: int) -> int:
        self.admissions.note(rank)
        return -1  # It takes part from a step on that is yet to be agreed on.

    @abc.abstractmethod
    def common_state(self) -> list[np.ndarray]:
        """What the exchange knows between two steps, and a newcomer takes over. Called without the monitor."""

    @abc.abstractmethod
    def take_common_state(self, parts: Sequence[np.ndarray]) -> None:
        """Takes over the bytes of what another rank has given. `begin_at` follows."""

"""`Admissions`: synchronous ranks agree on the first step in which a restarted rank takes part.

All ranks have to include a newcomer from the same step on. They agree on this step through the mean that they exchange
anyway. With the values of a step, each rank sends votes for the newcomers that it knows:

    votes[0, r] = i        if rank r is present as incarnation i and takes no part yet, otherwise 0
    votes[1, r] = i^2      in this case, otherwise 0; but -1 if r is the sender, to show whose values are in the mean

In the mean over the ranks, (mean of i)^2 equals the mean of i^2 only if all ranks have sent the same i. The mean of a
step is equal on all ranks, even if one is lost meanwhile. So all ranks make the same decision before they begin the
next step. The newcomer takes over the state before its first step, which is a later one.
"""

from __future__ import annotations

import abc
import struct
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import tensorflow as tf
from absl import logging

from hop_tf.errors import ProtocolError
from hop_tf.keras_hook.roster import Roster
from hop_tf.membership.session_queue import SessionQueue
from hop_tf.membership.waiting import Waiting
from hop_tf.runtime.joiner import Joiner
from hop_tf.tensors.packing import TensorSpec
from hop_tf.transport.base import Message

SPEC_NAME = "hop_tf_newcomers"
_HEADER = struct.Struct("<q")
_Process = tuple[int, int]  # Rank, incarnation.


class Admissions:
    """The ranks that take part in the steps of one exchange. Only methods that say so need the monitor held.

    Args:
      membership: The rank's membership.
      group: Name of the exchange group.
      session: The running session.
      first_round: Returns the number of a step's first round. Default: the step.

    Attributes:
      own_first_step: First step of this rank, if it was started again; None until another rank has sent this number.
    """

    def __init__(
        self,
        membership: Waiting,
        group: str,
        session: int,
        *,
        first_round: Callable[[int], int] = lambda step: step,
    ):
        self._membership = membership
        self._group = group
        self._first_round = first_round
        self._first_steps: dict[_Process, int] = {}
        self._known: set[_Process] = set()
        self.own_first_step: int | None = None
        self._queue = SessionQueue(membership, f"admissions/{group}", session)
        self._begin()
        self._queue.start(self._on_message)

    @staticmethod
    def spec(world_size: int, dtype: tf.DType = tf.float64, *, exact: bool = False) -> TensorSpec:
        """The tensor that travels with a step's values. dtype and `exact` choose its bucket."""
        return TensorSpec(SPEC_NAME, (2, world_size), dtype, exact, on_host=True)

    def reset(self, session: int) -> None:
        """Prepares for step 0 of a session, in which all ranks take part."""
        with self._membership.monitor:
            self._queue.session = session
            self._begin()

    def _begin(self) -> None:
        self._known.clear()
        self.own_first_step = None
        ranks = range(self._membership.world_size)
        known = self._membership.incarnations
        self._first_steps = {(rank, known.get(rank, 0)): 0 for rank in ranks}

    # For ranks that take part.

    def takes_part(self, rank: int, number: int) -> bool:
        """True if `rank` takes part in a round. With the monitor held."""
        first = self._first_steps.get((rank, self._membership.incarnation_of(rank)))
        has_begun = first is not None and number >= self._first_round(first)
        return has_begun and self._membership.delivers(rank, self._group, number)

    def note(self, rank: int) -> None:
        """Records that the present process of `rank` is to take part. With the monitor held."""
        self._known.add((rank, self._membership.incarnation_of(rank)))

    def _is_there(self, process: _Process) -> bool:
        rank, incarnation = process
        return self._membership.departure(rank) is None and self._membership.incarnation_of(rank) == incarnation

    def votes(self) -> np.ndarray:
        """The votes that this rank sends with the values of a step."""
        votes = np.zeros((2, self._membership.world_size))
        with self._membership.monitor:
            for rank, incarnation in self._known - self._first_steps.keys():
                if self._is_there((rank, incarnation)):
                    votes[:, rank] = incarnation, incarnation**2
        votes[1, self._membership.rank] = -1
        return votes

    def decide(self, mean: np.ndarray, step: int, first_step: Callable[[], int]) -> np.ndarray:
        """Admits the newcomers that all ranks know. Called in the order of steps.

        Args:
          mean: The mean of the votes of `step`.
          step: The step, or the first step of a round of several steps.
          first_step: Returns the first step of admitted ranks. Not called if other newcomers begin after `step` anyway:
            their first step is then used.

        Returns:
          Two rows. The first has, for each admitted rank, the number of steps from `step` to its first step; 0 for
          others. The second has 1 for each rank whose values are in the mean, 0 for others.
        """
        of_ranks, of_squares = mean.reshape(2, -1).astype(np.float64)
        num_ranks = len(of_ranks)
        # If a rank has sent another number, the variance is at least 1 / (2 n).
        is_known_to_all = (of_ranks > 0.5) & (of_squares - of_ranks**2 < 0.25 / num_ranks)
        newcomers = [(int(rank), round(float(of_ranks[rank]))) for rank in np.flatnonzero(is_known_to_all)]
        decided = np.stack([np.zeros(num_ranks), of_squares < 0])
        if not newcomers:
            return decided
        with self._membership.monitor:
            latest = max(self._first_steps.values())  # If this step is still to come, all ranks meet then anyway.
            begin = latest if latest > step else first_step()
            self._first_steps.update(dict.fromkeys(newcomers, begin))
        for rank, incarnation in newcomers:
            decided[0, rank] = begin - step
            logging.info("rank %d: rank %d takes part from step %d on.", self._membership.rank, rank, begin)
            self._queue.send(rank, _HEADER.pack(begin), incarnation=incarnation, step=step, interruptible=False)
        return decided

    def newcomers_of(self, step: int) -> list[int]:
        """The present ranks whose first step this is. With the monitor held."""
        return [process[0] for process in self._processes_of(step) if self._is_there(process)]

    def admitted_at(self, step: int) -> list[int]:
        """The ranks whose first step this is, lost ones included: equal on all ranks. With the monitor held."""
        return [process[0] for process in self._processes_of(step)]

    def _processes_of(self, step: int) -> list[_Process]:
        return [process for process, first in self._first_steps.items() if first == step > 0]

    # For a newcomer.

    def wait_for_first_step(self, ranks: Iterable[int]) -> None:
        """Waits until `own_first_step` is known, or until all of `ranks`, which train and agree on it, have left.

        Blocks: until then.

        Raises:
          HopError: As `Membership.wait` does.
        """
        membership = self._membership
        with membership.monitor:
            processes = [(rank, membership.incarnation_of(rank)) for rank in ranks]

        def missing() -> list[int]:
            is_told = self.own_first_step is not None
            return [] if is_told else [process[0] for process in processes if self._is_there(process)]

        membership.wait(missing, operation="be admitted", step=membership.num_rounds)

    def table(self) -> np.ndarray:
        """The first step of each process, for a newcomer: rows of rank, incarnation, step."""
        with self._membership.monitor:
            rows = [(*process, first) for process, first in self._first_steps.items()]
        return np.array(rows, np.int64)

    def take_table(self, data: np.ndarray) -> None:
        """Takes over another rank's `table`, as bytes. With the monitor held."""
        rows = data.copy().view(np.int64).reshape(-1, 3).tolist()
        self._first_steps = {(rank, incarnation): first for rank, incarnation, first in rows}

    def close(self) -> None:
        """Stops taking messages."""
        self._queue.close()

    def _on_message(self, message: Message) -> None:
        if len(message.header) != _HEADER.size:
            raise message.unexpected()
        (step,) = _HEADER.unpack(message.header)
        if self.own_first_step not in (None, step):
            raise ProtocolError(
                f"rank {self._membership.rank}: rank {message.sender} admits this rank at step {step}, and another "
                f"rank at {self.own_first_step}."
            )
        self.own_first_step = step


class LockStepJoiner(Joiner):
    """A joiner for synchronous ranks. A newcomer enters between two steps, when all ranks meet.

    Attributes:
      admissions: The ranks that take part, and their first steps; None if no rank can join.
      roster: The ranks that share each batch; None if all ranks share it, even lost ones.
    """

    is_synchronous = True
    admissions: Admissions | None = None
    roster: Roster | None = None

    @property
    def lets_join(self) -> bool:
        return self.admissions is not None

    def meet(self, rank: int, step: int) -> None:
        pass

    def admit(self, rank: int, step: int) -> int:
        self.admissions.note(rank)
        return -1  # Ranks have yet to agree on its first step.

    @abc.abstractmethod
    def common_state(self) -> list[np.ndarray]:
        """The exchange's state between two steps, which a newcomer takes over. Called without the monitor."""

    @abc.abstractmethod
    def take_common_state(self, parts: Sequence[np.ndarray]) -> None:
        """Takes over another rank's `common_state`, as bytes. `begin_at` is called next."""


def find_spec(specs: Sequence[TensorSpec]) -> int | None:
    """The index of the tensor of `Admissions.spec`; None if newcomers are not admitted."""
    return next((index for index, spec in enumerate(specs) if spec.name == SPEC_NAME), None)

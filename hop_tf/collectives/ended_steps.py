"""`EndedSteps`: lets ranks go on together when one is lost in the middle of an all-reduce.

When a rank is lost, some ranks may have all data to end a step with that rank, and others may not. If a remaining rank
has ended the step, the others take its means. If none has, all begin the step again without the lost rank. Each rank
whose attempt at a step is broken by a loss finds out which case it is:

    The rank tells all others that take part which ranks are lost, and asks them if they have ended the step.
    It takes the means of a rank that has ended it. If none has, it begins the step again.
    If a rank that takes part leaves or is lost meanwhile, the asking rank asks all once more.

The answer "not ended" is final. A rank that knows of a loss ends no further attempt with the lost rank (`end`), and
takes no means from it (`_on_means`). From then on, a step can only end in an attempt without the lost rank. Such an
attempt needs data from all ranks, including the asking rank, which sends none before all have answered.

So all ranks that go on have the same means of a step. Each rank's contribution is in these means once. Only a lost
rank's contribution may be missing. The last step's means are enough to answer: no rank ends a step before all remaining
ranks have ended the previous step. The means are kept even when the next session has begun, because a rank that has
ended early may be asked then. And no process exits before the others have ended its last step (`settle`).
"""

from __future__ import annotations

import dataclasses
import enum
import struct
from collections.abc import Callable, Collection, Sequence

import numpy as np

from hop_tf.collectives.operation import Operation, Participants
from hop_tf.errors import ProtocolError
from hop_tf.membership.session import Membership
from hop_tf.tensors.buffers import BufferPool
from hop_tf.transport.base import BULK_LANE, Message

# Kind, session, step, and a number: the question's number or, with means, the digest of their ranks.
_HEADER = struct.Struct("<BqqI")
_Place = tuple[int, int]  # Session, step.
# Interval at which a rank that is about to exit asks if the others have ended the step.
_PERIOD_SECONDS = 0.25


class _Kind(enum.IntEnum):
    """The kinds of messages: "have you ended this step?", the two answers, "give me its means", and the means."""

    QUESTION = 0
    NOT_ENDED = 1
    ENDED = 2
    REQUEST = 3
    MEANS = 4


@dataclasses.dataclass(frozen=True)
class _Ended:
    """A step that this rank has ended: its place, its processes, and its means, which must not be modified.

    `means` is empty if no rank can ask for them.
    """

    place: _Place
    participants: Participants
    means: Sequence[np.ndarray]


class EndedSteps:
    """The last step that this rank has ended, and questions to others about the present step.

    Args:
      membership: Waiting and transport.
      name: Name of the all-reduce.
      pool: Provides copies of means.
    """

    def __init__(self, membership: Membership, name: str, pool: BufferPool):
        self._membership = membership
        self._pool = pool
        self._queue = f"ended_steps/{name}"
        self._ended = _Ended((0, -1), Participants([], [], 0, are_stable=False), ())
        # The attempt that this rank asks about, the number of its latest question, and the answer of each rank.
        self._asked: Operation | None = None
        self._number = 0
        self._answers: dict[int, bool] = {}
        membership.transport.register(self._queue, self._on_message)

    def end(self, operation: Operation, means: Sequence[np.ndarray]) -> None:
        """Ends a step of which this rank has all means.

        Args:
          operation: The attempt.
          means: The means. They are copied, because callers may write to theirs.

        Raises:
          RanksChanged: If a rank that was to take part has left, or was lost. The step is not ended then.
        """
        # If one of two ranks is lost, no rank is left that could ask.
        copies = [self._copy(mean) for mean in means] if len(operation.ranks) > 2 else []
        with self._membership.monitor:
            operation.check_ranks()
            self._ended = _Ended(self._place_of(operation), operation.participants, copies)

    def _copy(self, mean: np.ndarray) -> np.ndarray:
        copy = self._pool.take(mean.nbytes).view(mean.dtype)
        np.copyto(copy, mean)
        return copy

    def reset(self) -> None:
        """Gives up this rank's question. The monitor must be held."""
        self._asked = None

    def find(self, operation: Operation) -> np.ndarray | None:
        """The means of a step, after the loss of a rank has broken this rank's attempt at it.

        Args:
          operation: The attempt.

        Returns:
          The bytes of all means, read-only, if a remaining rank has ended the step. Then this rank has ended it, too.
          Otherwise None: the remaining ranks may begin the step again.

        Blocks: until all ranks that take part have answered, or one of them has sent the means.

        Raises:
          HopError: As `Membership.wait` does.
          ProtocolError: If the step was ended with other ranks than those of the attempt.
        """
        place = self._place_of(operation)
        while True:
            others = self._ask(operation, place)
            self._wait(operation, place, others, self._unanswered)
            with self._membership.monitor:
                giver = next((rank for rank in others if self._answers.get(rank)), None)
            if giver is not None:
                self._membership.notify(giver, self._queue, _HEADER.pack(_Kind.REQUEST, *place, 0))
                self._wait(operation, place, others, lambda others, giver=giver: [giver])
            with self._membership.monitor:
                if self._ended.place == place:
                    return self._ended.means[0]
                if self._takes_part_still(operation, others):
                    self._asked = None
                    return None

    def _ask(self, operation: Operation, place: _Place) -> list[int]:
        """Asks all others that take part. Returns them, the next rank first, which spreads requests for means."""
        rank = self._membership.rank
        with self._membership.monitor:
            others = sorted(set(operation.present()) - {rank}, key=lambda other: (other < rank, other))
            self._asked = operation
            self._begin_question()
        for other in others:
            self._membership.tell_of_lost(other)  # On the question's lane, so that it arrives before the question.
        self._send_question(place, others)
        return others

    def _begin_question(self) -> None:
        """Begins a question, so that answers to former ones no longer count. The monitor must be held."""
        self._number += 1
        self._answers.clear()

    def _send_question(self, place: _Place, ranks: Sequence[int]) -> None:
        for rank in ranks:
            self._membership.notify(rank, self._queue, _HEADER.pack(_Kind.QUESTION, *place, self._number))

    def _unanswered(self, others: Sequence[int]) -> list[int]:
        """The ranks whose answers are awaited; none if one has answered that it has ended the step."""
        return [] if any(self._answers.values()) else [rank for rank in others if rank not in self._answers]

    def _wait(
        self, operation: Operation, place: _Place, others: Sequence[int], awaited: Callable[[Sequence[int]], list[int]]
    ) -> None:
        """Waits until no rank is awaited, this rank has the means, or a rank that takes part is gone."""

        def missing() -> list[int]:
            is_over = self._ended.place == place or not self._takes_part_still(operation, others)
            return [] if is_over else awaited(others)

        self._membership.wait(
            missing, operation="learn which rank has ended the step", step=operation.training_step, interruptible=False
        )

    def _takes_part_still(self, operation: Operation, others: Collection[int]) -> bool:
        """True if exactly the ranks that were asked, and this one, still take part."""
        return set(operation.present()) == {self._membership.rank, *others}

    def _place_of(self, operation: Operation) -> _Place:
        return self._membership.session, operation.step

    def settle(self, deadline: float) -> None:
        """Waits until all remaining ranks have ended this rank's last step: until then they may need this rank's means.

        Args:
          deadline: The latest end of the wait, on the monitor's clock.

        Blocks: while others are in that step. They already have all of this rank's data for it, so the wait lasts at
          most until they notice that another rank is lost.
        """
        membership, ended = self._membership, self._ended

        def awaited() -> list[int]:
            if not ended.means or membership.failure is not None or membership.session != ended.place[0]:
                return []
            others = [
                rank
                for rank, incarnation in ended.participants.processes
                if rank != membership.rank and membership.incarnation_of(rank) == incarnation
            ]
            there = [rank for rank in others if membership.departure(rank) is None]
            return [rank for rank in there if membership.listens(rank) and not self._answers.get(rank)]

        with membership.monitor:
            self._begin_question()  # Only once: a round trip may take longer than the interval of questions.
        while (others := awaited()) and membership.monitor.now() < deadline:
            self._send_question(ended.place, others)
            membership.wait_until(lambda: not awaited(), _PERIOD_SECONDS)

    def close(self) -> None:
        """Stops answering, and forgets the means."""
        self._membership.transport.unregister(self._queue)
        with self._membership.monitor:
            self._ended = dataclasses.replace(self._ended, means=())

    # Messages.

    def _on_message(self, message: Message) -> None:
        if len(message.header) != _HEADER.size or message.header[0] not in list(_Kind):
            raise message.unexpected()
        kind, session, step, number = _HEADER.unpack(message.header)
        if kind in (_Kind.QUESTION, _Kind.REQUEST):
            self._answer(message.sender, (session, step), kind, number)
            return
        with self._membership.monitor:
            if kind == _Kind.MEANS:
                self._on_means(message, (session, step), number)
            elif number == self._number:
                self._answers[message.sender] = kind == _Kind.ENDED
            self._membership.monitor.notify_all()

    def _answer(self, asker: int, place: _Place, kind: int, number: int) -> None:
        """Answers, without the monitor held, because sending means may block."""
        with self._membership.monitor:
            ended = self._ended
        if kind == _Kind.QUESTION:
            answer = _Kind.ENDED if ended.place >= place else _Kind.NOT_ENDED
            self._membership.notify(asker, self._queue, _HEADER.pack(answer, *place, number))
        elif ended.place == place and ended.means:
            # Otherwise the others have gone on without the asking rank, or this rank closes. The asker will hear of it.
            header = _HEADER.pack(_Kind.MEANS, *place, ended.participants.digest)
            self._membership.send(
                asker, self._queue, header, ended.means, BULK_LANE, step=place[1], interruptible=False
            )

    def _on_means(self, message: Message, place: _Place, digest: int) -> None:
        """Ends the step that this rank asks about, unless the sender was lost."""
        departure = self._membership.departure(message.sender)
        asked = self._asked
        if asked is None or self._place_of(asked) != place or (departure is not None and departure.lost):
            return
        if (message.sender, self._membership.incarnation_of(message.sender)) not in asked.participants.processes:
            return  # The sender was lost, and has joined again since.
        if asked.participants.digest != digest:
            raise ProtocolError(
                f"rank {self._membership.rank}: rank {message.sender} has ended step {place[1]} with other ranks. This "
                "rank has sent its part to a different set of ranks."
            )
        self._asked = None
        self._ended = _Ended(place, asked.participants, [message.payload])

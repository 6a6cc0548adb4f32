"""`Rounds`: ranks exchange small values between steps, and agree on a result.

Rounds of one name are numbered. In a round, each rank announces a value. Then it waits for each other rank, until that
rank has announced its own value, is in a later round, has ended its rounds, or has left.

A rank that waits takes no step. If another rank needs that step to reach its own next round, both would wait forever.
So each announcement carries the progress of its sender. A rank that has made more progress than the sender skips that
round, and tells the sender so at once. Ranks need not know in advance how many steps there are between two rounds.
"""

from __future__ import annotations

import collections
import contextlib
import enum
import json
import struct
from collections.abc import Callable, Mapping

import numpy as np

from hop_tf.membership.session import Membership
from hop_tf.membership.session_queue import SessionQueue
from hop_tf.membership.waiting import LeftBehind
from hop_tf.transport.base import Message

# The kind of a message, and a number. In the header of a value, the progress of its sender follows, as JSON.
_HEAD = struct.Struct("<Bq")
_NEVER = 1 << 62  # Beyond the numbers of all rounds.


class _Kind(enum.IntEnum):
    VALUE = 0
    REACHED = 1  # The sender will announce nothing below this number.


class Rounds:
    """The rounds of one name. All ranks exchange values with all others, or only with the root, which decides.

    Ranks do not wait for a rank that has left. A process that joins the running session takes no part.

    Args:
      membership: Waiting and transport.
      name: The subject of the rounds, for error messages. It also names their queue, and their exchange group in
        `Membership.leave`.
      root: The rank that decides; see `decide`. None: ranks call `gather`.
      answer: Called, with the monitor held, if another rank begins a round first. Returns this rank's value, which is
        then announced at once. None: each rank begins its rounds by itself.
      progress: Returns this rank's progress, for instance its number of steps by group.
      has_passed: Called with another rank's progress. Returns True if this rank has made more progress. May be called
        from any thread.

    Attributes:
      name: The argument.
      rank: This rank.
      others: The ranks that this one exchanges values with.
      is_asked: True if another rank waits for this one, and this rank had not made more progress when it was asked.
        While `is_asked` is true, a thread that makes progress calls `look_again`.
      sent_rounds: The number after this rank's last announcement, for the message with which this rank leaves.
    """

    def __init__(
        self,
        membership: Membership,
        name: str,
        *,
        root: int | None = None,
        answer: Callable[[], bytes] | None = None,
        progress: Callable[[], Mapping[str, int]] = dict,
        has_passed: Callable[[Mapping[str, int]], bool] = lambda progress: False,
    ):
        self._membership = membership
        self._root = root
        self._answer = answer
        self._progress = progress
        self._has_passed = has_passed
        self.name, self.rank = name, membership.rank
        others = set(range(membership.world_size)) - {self.rank}
        self.others = sorted(others if root in (None, self.rank) else {root})
        self._queue = SessionQueue(membership, name, membership.session)
        self.reset(membership.session)
        self._queue.start(self._on_message)

    def reset(self, session: int) -> None:
        """Forgets everything. Called when this rank is about to enter or join a session."""
        membership = self._membership
        with membership.monitor:
            self._queue.session = session
            self._values: collections.defaultdict[int, dict[int, bytes]] = collections.defaultdict(dict)  # By number.
            self._reached = dict.fromkeys(self.others, 0)  # By rank: it announces no lower number.
            self._asking: dict[int, tuple[int, Mapping[str, int]]] = {}  # By rank: its round, and its progress.
            self._incarnations = {rank: membership.incarnation_of(rank) for rank in self.others}
            self._own_incarnation = None if membership.joining else membership.incarnation
            self.is_asked = False
            self.sent_rounds = self._announced = 0  # `_announced` includes a value that is about to be sent.

    @property
    def takes_part(self) -> bool:
        """True unless this process has joined the running session."""
        return self._membership.incarnation == self._own_incarnation

    def gather(self, number: int, value: bytes) -> dict[int, bytes]:
        """Announces this rank's value of a round, and returns `collect(number)`. Numbers rise from call to call."""
        self._announce(number, value)
        return self.collect(number)

    def collect(self, number: int) -> dict[int, bytes]:
        """The values of all ranks in a round that this rank has begun, by rank in ascending order. Forgets the values.

        Blocks: until each other rank has announced its value, has skipped the round, has ended, or has left.

        Raises:
          HopError: As `Membership.wait` does.
        """
        with contextlib.suppress(LeftBehind):  # Then this rank uses the values that it has.
            self._wait(number, number)
        with self._membership.monitor:
            values = dict(sorted(self._values[number].items()))
            self._forget(number)
        return values

    def decide(self, number: int, value: bytes, choose: Callable[[Mapping[int, bytes]], bytes]) -> bytes | None:
        """The root's latest decision, or None if there is no new one. The root decides in the order of its own rounds.

        If a rank waits in an earlier round than the root's, the root counts that rank's value, and the rank takes the
        root's decision. If the root has left, there is no decision. A rank that takes no part returns the latest
        decision that has come.

        Args:
          number: The round. Numbers rise from call to call.
          value: The value of this rank.
          choose: Makes the decision from the values of the present ranks. Called on the root only.

        Blocks: until each present rank has begun a round since the last decision, and the root's decision has come.

        Raises:
          HopError: As `Membership.wait` does.
        """
        with contextlib.suppress(LeftBehind):  # Then this rank takes the latest decision that it knows.
            if self.takes_part and self.rank == self._root:
                self._wait(number, self.sent_rounds)
                with self._membership.monitor:
                    latest = self._latest()
                    present = [rank for rank in self.others if rank in latest and self._is_present(rank)]
                self._announce(number, choose({self.rank: value, **{rank: latest[rank] for rank in present}}))
            elif self.takes_part:
                self._announce(number, value)
                self._wait(number, number)
        with self._membership.monitor:
            decision = self._latest().get(self._root)
            self._forget(number)
        return decision

    def begin(self, number: int) -> None:
        """Begins a round with the value of `answer`, unless the round has begun. Does not block for long."""
        with self._membership.monitor:
            tell = self._answered(number) if number >= self._announced else None
        if tell is not None:
            tell()

    def end(self) -> None:
        """Ends this rank's announcements. The others no longer wait for this rank, even if it still waits for them."""
        self._tell_all(_Kind.REACHED, _NEVER)

    def has_ended(self, rank: int) -> bool:
        """True if `rank` has called `end`, or if a new process has taken its place in the session."""
        return self._is_new(rank) or self._reached[rank] == _NEVER

    def look_again(self) -> None:
        """Tells each waiting rank if this rank skips its round. Called from any thread."""
        with self._membership.monitor:
            passed = [rank for rank, (_, progress) in self._asking.items() if self._has_passed(progress)]
            numbers = {rank: self._asking.pop(rank)[0] for rank in passed}
            session, self.is_asked = self._queue.session, bool(self._asking)
            for rank, number in numbers.items():  # The other rank goes on after this message: do not wait for it.
                self._reached[rank] = max(self._reached[rank], number + 1)
            self._membership.monitor.notify_all()
        for rank, number in numbers.items():
            # Not interruptible: if this rank leaves meanwhile, the thread that takes messages must go on.
            self._tell(rank, _Kind.REACHED, number + 1, interruptible=False, session=session)

    def _announce(self, number: int, value: bytes) -> None:
        with self._membership.monitor:
            self._note_own(number, value)
        self._tell_all(_Kind.VALUE, number, value)
        self.sent_rounds = number + 1

    def _answered(self, number: int) -> Callable[[], None]:
        """Begins a round with the value of `answer`. Returns a function that tells the others."""
        value, session = self._answer(), self._queue.session  # The current session, even if the answer is sent later.
        self._note_own(number, value)
        self.sent_rounds = number + 1
        return lambda: self._tell_all(_Kind.VALUE, number, value, interruptible=False, session=session)

    def _note_own(self, number: int, value: bytes) -> None:
        """Records a value that is about to be sent. It answers all ranks that wait in this or an earlier round."""
        self._asking = {rank: asked for rank, asked in self._asking.items() if asked[0] > number}
        self.is_asked = bool(self._asking)
        self._announced = number + 1
        self._values[number][self.rank] = value

    def _wait(self, number: int, reached: int) -> None:
        """Waits until all others that may announce round `number` are beyond `reached`."""

        def missing() -> list[int]:
            awaited = [rank for rank in self.others if self._reached[rank] <= reached and not self._is_new(rank)]
            return [rank for rank in awaited if self._membership.delivers(rank, self.name, number)]

        self._membership.wait(missing, operation=f"agree on {self.name}", step=self._membership.num_rounds)

    def _latest(self) -> dict[int, bytes]:
        """The latest known value of each rank."""
        return {rank: value for number in sorted(self._values) for rank, value in self._values[number].items()}

    def _forget(self, number: int) -> None:
        for old in [old for old in self._values if old <= number]:
            del self._values[old]

    def _is_new(self, rank: int) -> bool:
        return self._membership.incarnation_of(rank) != self._incarnations[rank]

    def _is_present(self, rank: int) -> bool:
        return not self.has_ended(rank) and self._membership.departure(rank) is None

    def _tell_all(self, kind: _Kind, number: int, value: bytes = b"", **how) -> None:
        progress = json.dumps(dict(self._progress())).encode() if kind is _Kind.VALUE else b""
        is_root = self.rank == self._root  # The root tells its decisions to ranks that have joined, too.
        for rank in self.others:
            if self._membership.departure(rank) is None and (is_root or not self.has_ended(rank)):
                self._tell(rank, kind, number, progress, value, **how)

    def _tell(
        self,
        rank: int,
        kind: _Kind,
        number: int,
        progress: bytes = b"",
        value: bytes = b"",
        *,
        interruptible: bool = True,
        session: int | None = None,
    ) -> None:
        self._membership.transport.connect(rank)  # From now on its silence counts.
        header, payload = _HEAD.pack(kind, number) + progress, [np.frombuffer(value, np.uint8)] if value else []
        step = self._membership.num_rounds
        self._queue.send(rank, header, payload, step=step, interruptible=interruptible, session=session)

    def _on_message(self, message: Message) -> Callable[[], None] | None:
        header, sender = message.header, message.sender
        if len(header) < _HEAD.size or header[0] not in list(_Kind) or sender not in self.others:
            raise message.unexpected()
        kind, number = _HEAD.unpack_from(header)
        if kind == _Kind.REACHED:
            self._reached[sender] = max(self._reached[sender], number)
            return None
        self._reached[sender] = max(self._reached[sender], number + 1)
        self._values[number][sender] = message.payload.tobytes()
        if number < self._announced:  # This rank's own announcement answers the sender.
            return None
        if self._answer is not None:
            return self._answered(number)
        # `is_asked` is set before the progress is checked, so that no question is lost: a thread that makes progress
        # first records it, and then reads `is_asked`.
        progress = json.loads(header[_HEAD.size :])
        self._asking[sender], self.is_asked = (number, progress), True
        return self.look_again if self._has_passed(progress) else None

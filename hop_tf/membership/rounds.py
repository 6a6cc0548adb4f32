"""`Rounds`: ranks bring each other small values, between steps, and agree on their result.

Rounds of one name are numbered. In a round, each rank announces a value. Then it waits until each other rank has
announced its own value, or will not do so: that rank is in a later round, or has ended its rounds, or has left.

A rank that waits takes no step. Another rank may need that step to come to its own next round. Both would wait forever.
So each announcement carries the progress of its sender. A rank that makes more progress skips that round, and says so
at once. So ranks need not know in advance how many steps there are between two rounds.
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

# The kind of a message, and a number. A value is followed by the progress of its sender, as JSON.
_HEAD = struct.Struct("<Bq")
_NEVER = 1 << 62  # Beyond the numbers of all rounds.


class _Kind(enum.IntEnum):
    VALUE = 0
    REACHED = 1  # The sender will announce nothing below the number.


class Rounds:
    """The rounds of one name. All ranks exchange values with all others, or only with the root, which decides.

    Ranks do not wait for a rank that has left. A process that joins the running session takes no part.

    Args:
      membership: Waiting and transport.
      name: The subject, for errors. It also names the messages, and these rounds in `Membership.leave`.
      root: The rank that decides; see `decide`. None: ranks call `gather`.
      answer: Returns this rank's value if another rank begins a round first. This rank then announces the value at
        once. Called with the monitor held. None: each rank begins its rounds by itself.
      progress: Returns this rank's progress, for instance its number of steps by group.
      has_passed: Given another rank's progress, True if this rank has made more. May be called from any thread.

    Attributes:
      name: The argument.
      rank: This rank.
      others: The ranks that this one exchanges values with.
      is_asked: True if a rank waits for this one, which was not beyond that rank's progress when it was asked. A thread
        that makes progress then calls `look_again`.
      sent_rounds: For the message with which this rank leaves: the number after its last announcement.
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
        """Forgets everything, for a session that this rank is about to enter, or joins."""
        membership = self._membership
        with membership.monitor:
            self._queue.session = session
            self._values: collections.defaultdict[int, dict[int, bytes]] = collections.defaultdict(dict)  # By number.
            self._reached = dict.fromkeys(self.others, 0)  # By rank: it announces nothing below this number.
            self._asking: dict[int, tuple[int, Mapping[str, int]]] = {}  # By rank: its number, and its progress.
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
        """The values of all ranks in a round that this rank has begun: by rank, in the order of ranks. Forgets them.

        Blocks: until each other rank has announced its value, has skipped the round, has ended, or has left.

        Raises:
          HopError: As `Membership.wait` does.
        """
        with contextlib.suppress(LeftBehind):  # Then this rank agrees with those that it has heard.
            self._wait(number, number)
        with self._membership.monitor:
            values = dict(sorted(self._values[number].items()))
            self._forget(number)
        return values

    def decide(self, number: int, value: bytes, choose: Callable[[Mapping[int, bytes]], bytes]) -> bytes | None:
        """The root's latest decision; None without a new one. The root decides in the order of its own rounds.

        The root also counts the value of a rank that waits in an earlier round, and that rank takes a decision of a
        later round. If the root has left, there is no decision. A rank that takes no part gets decisions that come.

        Args:
          number: The round. Numbers rise from call to call.
          value: The value of this rank.
          choose: Makes the decision from the values of the present ranks. Called on the root only.

        Blocks: until each present rank has begun a round since the last decision, and the root's decision has come.

        Raises:
          HopError: As `Membership.wait` does.
        """
        with contextlib.suppress(LeftBehind):  # Then this rank takes a decision that it knows.
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
        """Begins a round with the value of `answer`, unless it has begun. Does not block for long."""
        with self._membership.monitor:
            tell = self._answered(number) if number >= self._announced else None
        if tell is not None:
            tell()

    def end(self) -> None:
        """Ends this rank's announcements: it may still have to wait for others, which must not wait for it."""
        self._tell_all(_Kind.REACHED, _NEVER)

    def has_ended(self, rank: int) -> bool:
        """True if `rank` has called `end`, or is another process than the one that began the session."""
        return self._is_new(rank) or self._reached[rank] == _NEVER

    def look_again(self) -> None:
        """Tells each waiting rank whose round this rank skips that it does so. Called from any thread."""
        with self._membership.monitor:
            passed = [rank for rank, (_, progress) in self._asking.items() if self._has_passed(progress)]
            numbers = {rank: self._asking.pop(rank)[0] for rank in passed}
            session, self.is_asked = self._queue.session, bool(self._asking)
            for rank, number in numbers.items():  # It goes on after this message, so this rank must not wait for it.
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
        value, session = self._answer(), self._queue.session  # The answer belongs to it, however late it is sent.
        self._note_own(number, value)
        self.sent_rounds = number + 1
        return lambda: self._tell_all(_Kind.VALUE, number, value, interruptible=False, session=session)

    def _note_own(self, number: int, value: bytes) -> None:
        """Records a value that is about to be sent. It answers ranks that wait for this round or an earlier one."""
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
        is_root = self.rank == self._root  # Then ranks that have joined get the decisions, too.
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
        if number < self._announced:  # The announcement answers the sender.
            return None
        if self._answer is not None:
            return self._answered(number)
        # In this order: a thread that makes progress first records it, and then checks if this rank is asked.
        progress = json.loads(header[_HEAD.size :])
        self._asking[sender], self.is_asked = (number, progress), True
        return self.look_again if self._has_passed(progress) else None

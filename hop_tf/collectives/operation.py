"""`Operation`: sends and receives the chunks of an all-reduce on one rank. See `hop_tf.collectives.all_reduce`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import struct
import zlib
from collections.abc import Callable, Collection, Sequence

import numpy as np

from hop_tf.errors import PeerLostError, ProtocolError
from hop_tf.membership.session_queue import SessionQueue
from hop_tf.membership.waiting import Waiting
from hop_tf.tensors import payloads
from hop_tf.transport.base import Expected, Message, ToSend

# Step, digest of the processes that take part, vector, turn, chunk.
_HEADER = struct.Struct("<qIIII")
_Attempt = tuple[int, int]  # Step, digest of the processes that take part.
_Key = tuple[int, int, int, int]  # Sender, vector, turn, chunk.
Data = Sequence[np.ndarray]  # An encoded chunk: a part of each of the vectors that travel together.


class RanksChanged(Exception):
    """A rank that was to take part has left, or was lost."""


@dataclasses.dataclass(frozen=True)
class Participants:
    """The processes that take part in an attempt, as far as a rank knows.

    Attributes:
      ranks: The ranks, in order.
      incarnations: The incarnation of each rank.
      version: `Membership.version`.
      are_stable: True if all ranks take part and none has left. The participants then stay the same while the version
        does.
    """

    ranks: list[int]
    incarnations: list[int]
    version: int
    are_stable: bool

    @property
    def processes(self) -> list[tuple[int, int]]:
        """Rank and incarnation of each process."""
        return list(zip(self.ranks, self.incarnations, strict=True))

    @functools.cached_property
    def digest(self) -> int:
        """A digest of the ranks and their incarnations."""
        return zlib.crc32(np.array([self.ranks, self.incarnations], np.int32).tobytes())


class Operation:
    """One attempt at one step, with the ranks that take part as far as this rank knows.

    Args:
      known: The participants of an earlier attempt, or None.

    Attributes:
      participants: The processes that take part.
      ranks: The ranks, in order.
      index: This rank's place in `ranks`.
      step: Number of the step.
      training_step: The step's number in errors.
      vector: Number of the present vector, or of the first of several.
      is_committed: True if others may have a mean of the step.
      swaps: True if this thread itself writes and reads messages when it can (see `Transport.swap`). Chunks are then
        sent with the next `receive`. False for large data, which should travel while this rank computes.

    Raises:
      PeerLostError: While receiving, if a rank that was to take part has ended the step in another attempt.
    """

    def __init__(
        self,
        membership: Waiting,
        mailbox: Mailbox,
        step: int,
        delivers: Callable[[int, int], bool],
        before_commit: Callable[[], None],
        *,
        is_committed: bool,
        training_step: int,
        is_first: bool,
        recovers: bool = False,
        lane: int | None = None,
        known: Participants | None = None,
    ):
        self._membership = membership
        self._mailbox = mailbox
        self.step = step
        self._delivers = delivers
        self._before_commit = before_commit
        self.training_step = training_step
        self._lane = lane
        membership.check()  # A single rank does not wait, and would not notice that the job has ended.
        with membership.monitor:
            self._version = membership.version
            is_known = known is not None and known.are_stable and known.version == self._version
            self.participants = known if is_known else self._participants_now()
            self.ranks = self.participants.ranks
            # With `recovers`, a rank begins an attempt only if no remaining rank has ended another one.
            self._ended = [] if recovers or is_known else self._may_end_without_this(is_first)
        self.index = self.ranks.index(membership.rank)
        self._attempt = (step, self.participants.digest)
        self.begin([0])
        self.is_committed = is_committed
        self.swaps = False
        self._to_send: list[ToSend] = []
        self._data: Data | None = None  # The last data sent, and its payload.
        self._payload: Data = ()

    def present(self) -> list[int]:
        """The ranks that take part, as far as this rank knows. This method and `check_ranks` need the monitor held."""
        rank = self._membership.rank
        return [r for r in range(self._membership.world_size) if r == rank or self._delivers(r, self.step)]

    def _participants_now(self) -> Participants:
        membership, ranks = self._membership, self.present()
        are_stable = len(ranks) == membership.world_size and not membership.departed()
        return Participants(ranks, self._incarnations_now(ranks), membership.version, are_stable)

    def _incarnations_now(self, ranks: Sequence[int]) -> list[int]:
        known = self._membership.incarnations
        return [known.get(rank, 0) for rank in ranks]

    def _has_changed(self) -> bool:
        """True if other ranks, or other processes, take part now. Cheap while `Membership.version` stays the same."""
        if (version := self._membership.version) == self._version:
            return False
        if self.present() != self.ranks or self._have_begun_again():
            return True
        self._version = version
        return False

    def _may_end_without_this(self, is_first: bool) -> list[int]:
        """The ranks that may end the step without this rank: those that have left before this attempt.

        If a rank was lost, and this is not the first attempt, the result is all ranks: others may have had the lost
        rank's data for the previous attempt. The result is used only until `commit`. From then on, others may have a
        mean by what this rank sends. Between two sessions the result is empty: all ranks have left the last session,
        and take part nevertheless.
        """
        if self._membership.has_left:
            return []
        departures = {rank: self._membership.departure(rank) for rank in range(self._membership.world_size)}
        if not is_first and any(departure is not None and departure.lost for departure in departures.values()):
            return self.ranks
        return [rank for rank in self.ranks if departures[rank] is not None]

    def commit(self) -> None:
        """Called before this rank sends anything from which another rank could get a mean of this step.

        After that, this rank ends the step even if it leaves. In a mesh of two, this method is called before this rank
        has its mean: see `hop_tf.collectives.all_reduce`.

        Raises:
          Interrupted: If this rank leaves before this call.
        """
        self._ended = []
        if not self.is_committed:
            self._membership.check_interrupted()
            self._before_commit()
            self.is_committed = True

    def send(self, rank: int, turn: int, chunk: int, data: Data, lane: int | None = None) -> None:
        """Sends a chunk. Default lane: the operation's."""
        header = _HEADER.pack(*self._attempt, self.vector, turn, chunk)
        payload = self._payload_of(data)
        if self.swaps:
            self._to_send.append(ToSend(rank, header, payload))
            return
        lane = self._lane if lane is None else lane
        self._mailbox.queue.send(rank, header, payload, lane, **self._how_to_send())

    def _payload_of(self, data: Data) -> Sequence[np.ndarray]:
        if data is not self._data:  # Often all ranks get the same data.
            self._data, self._payload = data, payloads.join(data) if self._several else data
        return self._payload

    def _how_to_send(self) -> dict[str, object]:
        return {"step": self.training_step, "interruptible": not self.is_committed}

    def key(self, sender: int, turn: int, chunk: int) -> _Key:
        """The key of a chunk that `receive_any` may take. `sender` is an index in `ranks`."""
        return self.ranks[sender], self.vector, turn, chunk

    def begin(self, vectors: Sequence[int]) -> None:
        """Begins the exchange of these vectors, given by their numbers: later chunks belong to them."""
        self.vector, *others = vectors
        self._several = bool(others)

    def receive(self, senders: Sequence[int], turn: int, chunk: int) -> list[Data]:
        """Takes the same chunk from several ranks."""
        keys = [(sender, self.vector, turn, chunk) for sender in senders]

        def missing() -> list[int]:
            there = self._mailbox.of(self._attempt)
            return [key[0] for key in keys if key not in there]

        taken = self._swap(keys) if self.swaps else None
        if taken is None:
            self._wait(missing)
        with self._membership.monitor:
            self._membership.check()
            self.check_ranks()
            taken = self._mailbox.take(self._attempt, keys) if taken is None else taken
        return [self._data_of(payload) for payload in taken]

    def _swap(self, keys: Sequence[_Key]) -> list[np.ndarray] | None:
        """Sends held chunks, and receives chunks. Returns None unless this thread has itself read all of them."""
        to_send, self._to_send = self._to_send, []
        return self._mailbox.swap(self._attempt, to_send, keys, self._lane, **self._how_to_send())

    def _data_of(self, payload: np.ndarray) -> Data:
        return payloads.split(payload) if self._several else [payload]

    def receive_any(self, keys: Collection[_Key]) -> tuple[_Key, Data]:
        """Takes the first of several chunks to arrive. Returns its key and its data."""

        def missing() -> list[int]:
            there = self._mailbox.of(self._attempt)
            return [] if any(key in there for key in keys) else sorted({key[0] for key in keys})

        self._wait(missing)
        with self._membership.monitor:
            self.check_ranks()
            there = self._mailbox.of(self._attempt)
            key = next(key for key in keys if key in there)
            (payload,) = self._mailbox.take(self._attempt, [key])
        return key, self._data_of(payload)

    def _wait(self, missing: Callable[[], list[int]]) -> None:
        def awaited() -> list[int]:
            if self._has_changed():
                return []
            ranks = missing()
            self._check_ended(ranks)
            return ranks

        with self._told_whom(missing):
            self._membership.wait(
                awaited,
                operation="receive a part of the mean",
                step=self.training_step,
                interruptible=not self.is_committed,
            )

    def _told_whom(self, missing: Callable[[], list[int]]) -> contextlib.AbstractContextManager[None]:
        """Tells the transport the ranks that this thread waits for. Next time, the thread can read from them itself."""
        if self.swaps:
            with self._membership.monitor:
                senders = missing()
            if senders:
                return self._membership.transport.waiting_for(senders, self._lane)
        return contextlib.nullcontext()

    def _check_ended(self, awaited: Collection[int]) -> None:
        """Raises PeerLostError if a rank has left with the mean of another attempt, which this rank cannot have."""
        for rank in awaited:
            if rank in self._ended and self._membership.departure(rank) is not None:
                raise PeerLostError(
                    f"rank {self._membership.rank}: rank {rank} has ended step {self.training_step} without this rank. "
                    "This rank had not joined yet, or lacks a message that a lost rank has sent to others."
                )

    def check_ranks(self) -> None:
        """Raises RanksChanged if a rank that was to take part has left, or was lost."""
        if self._has_changed():
            raise RanksChanged

    def is_broken_by_loss(self) -> bool:
        """True if a rank that was to take part was lost, even if it was started again since."""
        departures = [self._membership.departure(rank) for rank in self.ranks]
        is_lost = any(departure is not None and departure.lost for departure in departures)
        return is_lost or self._have_begun_again()

    def _have_begun_again(self) -> bool:
        return self._incarnations_now(self.ranks) != self.participants.incarnations


class Mailbox:
    """Messages of the running session that have come and were not taken yet.

    All methods except `swap` and `close` need the monitor held.
    """

    def __init__(self, membership: Waiting, name: str):
        self.queue = SessionQueue(membership, name, membership.session)
        self._first_step = 0
        self._membership = membership
        self._has_begun = not membership.joining
        self._messages: dict[_Attempt, dict[_Key, np.ndarray]] = {}
        self._num_bytes: dict[_Key, int] = {}  # Of chunks that were taken.
        self.queue.start(self._on_message)

    def of(self, attempt: _Attempt) -> Collection[_Key]:
        """The chunks of an attempt that are there."""
        return self._messages.get(attempt, ())

    def take(self, attempt: _Attempt, keys: Collection[_Key]) -> list[np.ndarray]:
        """Takes chunks that are there."""
        there = self._messages[attempt] if keys else {}
        taken = [there.pop(key) for key in keys]
        for key, payload in zip(keys, taken, strict=True):
            self._num_bytes[key] = payload.nbytes
        return taken

    def swap(
        self, attempt: _Attempt, to_send: Sequence[ToSend], keys: Collection[_Key], lane: int | None, **keywords
    ) -> list[np.ndarray] | None:
        """Makes this thread send chunks, and read missing ones, which it assumes to be as long as in the previous step.

        Returns:
          The chunks, if this thread has read all of them. Otherwise None: chunks that have come are in the mailbox.
        """
        there, session = self.of(attempt), self.queue.session
        missing = [key for key in keys if key not in there]
        if not self._num_bytes.keys() >= set(missing):
            missing = []
        expected = [Expected(key[0], _HEADER.pack(*attempt, *key[1:]), self._num_bytes[key]) for key in missing]
        if not to_send and not expected:
            return None
        payloads = self.queue.swap(to_send, expected, lane, **keywords)
        if len(payloads) == len(keys) and all(payload is not None for payload in payloads):
            return payloads
        with self._membership.monitor:
            for key, payload in zip(missing, payloads, strict=True):
                if payload is not None and self.queue.session == session:
                    self._messages.setdefault(attempt, {})[key] = payload
        return None

    def forget(self, step: int) -> None:
        """Drops remaining messages of `step` and earlier steps, from attempts that were given up."""
        self._first_step = step + 1
        for attempt in [attempt for attempt in self._messages if attempt[0] <= step]:
            del self._messages[attempt]

    def clear(self, session: int) -> None:
        self.queue.session = session
        self._first_step = 0
        self._has_begun = not self._membership.joining
        self._messages.clear()

    def begin_at(self, step: int) -> None:
        """Makes this restarted process take part from `step` on. Messages of later steps may have come already."""
        self.forget(step - 1)
        self._has_begun = True

    def close(self) -> None:
        self.queue.close()

    def _on_message(self, message: Message) -> None:
        if len(message.header) != _HEADER.size:
            raise message.unexpected()
        step, ranks, vector, turn, chunk = _HEADER.unpack(message.header)
        # No rank ends a step without this rank: others are in this step or the next.
        if step > self._first_step + 1 and self._has_begun:
            raise ProtocolError(f"rank {message.sender} is at step {step}, this rank at {self._first_step}.")
        if step >= self._first_step:
            self._messages.setdefault((step, ranks), {})[message.sender, vector, turn, chunk] = message.payload

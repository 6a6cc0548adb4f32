"""`Waiting`: a rank's waiting for others and sending to them, and the events that end a wait early."""

from __future__ import annotations

import abc
import collections
import math
from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np
from absl import logging

from hop_tf.errors import HopError, PeerLostError
from hop_tf.membership import membership_pb2
from hop_tf.membership.departures import Departure, Departures
from hop_tf.membership.judge import Judge, Quorum
from hop_tf.membership.monitor import Monitor
from hop_tf.membership.patience import Patience, Questions
from hop_tf.options import CommunicationOptions
from hop_tf.records import Kind, Recorder
from hop_tf.transport.base import PeerStatus, Transport
from hop_tf.transport.deadlines import is_dead

# Interval at which a waiting rank checks for silence. Unlike a message, silence wakes no thread.
_LIVENESS_PERIOD_SECONDS = 0.25
# Interval at which a rank that waits for its last messages to arrive checks if the receiver still listens.
_FLUSH_PERIOD_SECONDS = 0.1
# A wait is a stall after this fraction of `progress_timeout_seconds`, or after `timeout_seconds` if that is less.
_STALL_SHARE = 0.25


class Interrupted(Exception):
    """Not an error: the wait ended because this rank itself leaves the session."""


class LeftBehind(Interrupted):
    """Not an error: the wait ended because the others went on without this rank, which is to join them again."""


class _NoUse(Exception):
    """Not an error: sending ended because the message no longer has a receiver."""


class Waiting(abc.ABC):
    """All of a rank's waiting: for others, or for room for messages to them.

    A wait ends when the awaited messages have come, or when an awaited rank is lost. A wait also ends when this rank
    leaves the session (`interrupt`), or when the job fails (`fail`).

    Args:
      transport: The started transport.
      monitor: The rank's monitor.
      options: Deadlines.
      peers: Ranks that this rank communicates with directly.
      servers: Parameter servers, which are no ranks.
      world_size: Number of ranks.
      min_ranks: The least number of remaining ranks, this one included. Lost and failed ranks do not count.
      continue_without_lost: True if a rank that is lost within a step counts as one that has left. Otherwise the loss
        is an error.
      patience_seconds: Silence after which the others go on without a rank. The rank joins them again when it wakes.
        None: the timeouts of `options` count, and a rank that wakes after these timeouts fails.
      recorder: Records waits, losses and returns, or None.
      on_stall: Called, without the monitor held, with a description of a wait that has lasted a quarter of
        `progress_timeout_seconds`, or `timeout_seconds` if that is less. If several threads wait, only one calls it.
    """

    def __init__(
        self,
        *,
        transport: Transport,
        monitor: Monitor,
        options: CommunicationOptions,
        peers: Sequence[int],
        servers: Sequence[int],
        world_size: int,
        min_ranks: int,
        continue_without_lost: bool,
        patience_seconds: float | None,
        recorder: Recorder | None,
        on_stall: Callable[[str], None] | None,
    ):
        self.rank = transport.rank
        self.world_size = world_size
        self.peers = tuple(peers)
        self.servers = tuple(servers)
        self.monitor = monitor
        self.transport = transport
        self.recorder = recorder
        self.continue_without_lost = continue_without_lost
        # Number of rounds of the running session that this rank has begun; see `Membership.begin_round`.
        self.num_rounds = 0
        # This rank's incarnation. While this rank is joining, its next incarnation.
        self.incarnation = 0
        # True while this rank does not take part yet, because it was started again or left behind.
        self.joining = False
        # True if the others went on without this rank, so that its actions no longer matter to them.
        self.is_given_up = False
        self._options = options
        self._patience = None
        self._look_seconds = _LIVENESS_PERIOD_SECONDS
        if patience_seconds is not None:
            self._patience = Patience(patience_seconds, monitor.now, Questions(transport, monitor, "patience"))
            self._look_seconds = min(self._look_seconds, self._patience.look_seconds)
        self._departures = Departures()
        self._quorum = Quorum(self._departures, world_size, min_ranks)
        self._judge = Judge(
            transport=transport,
            options=options,
            departures=self._departures,
            quorum=self._quorum,
            peers=self.peers,
            name_of=self._name_of,
            can_go_on_without=self._can_go_on_without,
            patience=self._patience,
        )
        # Ranks that only this one has found to be lost. This rank may itself be the one that was stopped, or cut off.
        self._found_lost: set[int] = set()
        self._failure: BaseException | None = None
        # The first cause of the job's end, for the others' errors: the lost rank, not the rank that noticed.
        self._cause = ""
        self._interrupted = False
        self._on_stall = on_stall
        self._stall_seconds = min(_STALL_SHARE * options.progress_timeout_seconds, options.timeout_seconds)
        self._told_at = -math.inf
        self._num_looks = 0  # Calls of `look`.
        self._awaited: dict[object, frozenset[int]] = {}  # By running call of `wait`.
        self._wait_seconds: collections.Counter[int] = collections.Counter()  # By peer.

    @property
    @abc.abstractmethod
    def has_left(self) -> bool:
        """True if this rank no longer takes part in the session."""

    @abc.abstractmethod
    def _record(self, leave: membership_pb2.Leave) -> bool:
        """Remembers a departure. Returns False if it was known."""

    @abc.abstractmethod
    def _forward(self, leave: membership_pb2.Leave, learned_from: int | None = None) -> None:
        """Tells the others of a departure."""

    # The state of others.

    def departure(self, rank: int) -> Departure | None:
        """The departure of `rank` from the running session; None while it takes part."""
        return self._departures.of(rank)

    @property
    def session(self) -> int:
        """The number of the running session, or of the last one; from 1."""
        return self._departures.session

    @session.setter
    def session(self, session: int) -> None:
        self._departures.enter(session)

    @property
    def version(self) -> int:
        """A number that changes when the set of participating processes changes."""
        return self._departures.version

    def departed(self) -> set[int]:
        """The ranks that no longer take part in the running session."""
        return self._departures.ranks()

    def incarnation_of(self, rank: int) -> int:
        """The number of times that `rank` has joined a running session."""
        return self._departures.incarnations.get(rank, 0)

    @property
    def present_incarnation(self) -> int:
        """This rank's incarnation as others know it."""
        return self.incarnation - self.joining

    @property
    def incarnations(self) -> dict[int, int]:
        """The incarnation of each rank, this one included. Ranks that never joined may be left out."""
        return {**self._departures.incarnations, self.rank: self.present_incarnation}

    def delivers(self, rank: int, group: str, number: int) -> bool:
        """True if the messages of `rank` in round `number` of `group` have come or may still come; see `Exchange`."""
        return self._departures.delivers(rank, group, number)

    @property
    def awaited(self) -> list[int]:
        """The ranks, and servers, that this rank waits for at this moment."""
        with self.monitor:
            return sorted(set().union(*self._awaited.values()))

    def wait_seconds_by_peer(self) -> dict[str, float]:
        """The seconds that steps have waited for each rank ("rank_2") or server ("ps_0").

        If several were missing until the end of a wait, its time is divided equally among them. The times of threads
        that wait at the same time add up.
        """
        with self.monitor:
            seconds = sorted(self._wait_seconds.items())
        return {self._name_of(peer).replace(" ", "_"): each for peer, each in seconds}

    # Ending all waits.

    def interrupt(self) -> None:
        """Ends every `wait` of this rank with `Interrupted`, until the rank has left the session."""
        with self.monitor:
            self._interrupted = True
            self.monitor.notify_all()

    def fail(self, error: BaseException) -> None:
        """Ends every `wait` of this rank, now and later, with `error`. The first error is kept.

        The error is logged once, even if several threads fail with it.
        """
        with self.monitor:
            if str(error) != str(self._failure):
                logging.error("rank %d: %s: %s", self.rank, type(error).__name__, error)
            self._failure = self._failure or error
            self.monitor.notify_all()

    @property
    def failure(self) -> BaseException | None:
        """The error that ended this rank's part in the job, or None."""
        return self._failure

    @property
    def is_left_behind(self) -> bool:
        """True if the others went on without this rank, which is to join them again."""
        return isinstance(self._failure, LeftBehind)

    def check_interrupted(self) -> None:
        """Raises `Interrupted` if this rank leaves the session."""
        if self._interrupted:
            raise Interrupted

    def check(self) -> None:
        """Raises the error that ended the job, if any."""
        if self._failure is not None:
            raise self._failure

    # Waiting.

    def wait(
        self,
        missing: Callable[[], Collection[int]],
        *,
        operation: str,
        step: int | None = None,
        interruptible: bool = True,
        since: float | None = None,
    ) -> None:
        """Waits until no rank is missing.

        Args:
          missing: Called with the monitor held, after every change. Returns the ranks still awaited.
          operation: The operation that waits, for error messages.
          step: The training step, or None outside of a step.
          interruptible: True if `interrupt` ends the wait.
          since: Start of the wait, on the monitor's clock. Default: now.

        Blocks: until `missing()` is empty, because messages from these ranks have come, or the ranks have left.

        Raises:
          PeerLostError: If a missing rank was silent for `timeout_seconds`, or was restarted. If ranks go on without a
            lost rank, the call raises only if that rank is still missing after its loss is recorded.
          DeadlineExceededError: If a missing rank never appeared within `timeout_seconds`, or is alive but did not
            deliver within `progress_timeout_seconds`.
          HopError: If the job was aborted meanwhile.
          Interrupted: If this rank leaves the session itself.
        """
        entered = self.monitor.now()
        start = entered if since is None else since
        tells_at = start + self._stall_seconds if self._on_stall else math.inf
        call = object()
        try:
            while (event := self._wait(call, missing, start, operation, step, interruptible, tells_at)) is not None:
                if isinstance(event, membership_pb2.Leave):
                    self._forward(event, learned_from=None)
                else:
                    tells_at = math.inf
                    self._on_stall(event)
        finally:
            if call in self._awaited:
                self._end_wait(call, entered, counts=step is not None)

    def _end_wait(self, call: object, entered: float, *, counts: bool) -> None:
        """Forgets a call of `wait` that has slept. Counts its time for the peers that were missing until the end."""
        with self.monitor:
            peers = self._awaited.pop(call)
            if counts:
                seconds = (self.monitor.now() - entered) / len(peers)
                for peer in peers:
                    self._wait_seconds[peer] += seconds

    def wait_until(self, condition: Callable[[], object], timeout_seconds: float) -> bool:
        """Waits for a condition that depends on no particular rank.

        Args:
          condition: Called with the monitor held, after every change.
          timeout_seconds: Longest time to wait.

        Returns:
          True if `condition()` holds.

        Raises:
          HopError: If the job was aborted meanwhile.
          Interrupted: If this rank leaves the session itself.
        """
        with self.monitor:
            deadline = self.monitor.now() + timeout_seconds
            while not condition():
                self.check()
                self.check_interrupted()
                if self.monitor.now() >= deadline:
                    return False
                self.monitor.wait(self._look_seconds, deadline)
            return True

    def _wait(
        self, call, missing, start: float, operation: str, step: int | None, interruptible: bool, tells_at: float
    ) -> membership_pb2.Leave | str | None:
        """Waits until no rank is missing, or a rank is lost, or until `tells_at`.

        Returns:
          The message for the others about a lost rank, or the description of a stall, or None if no rank is missing.
        """
        begin, last, looked = None, -1, None
        with self.monitor:
            while True:
                self.check()  # Even if no rank is awaited: ranks do not wait for one that has given up.
                awaited = missing()
                if not awaited:
                    self._note_wait(begin, last, operation)
                    return None
                if self.recorder is not None and self.recorder.is_on:
                    begin, last = self.recorder.now() if begin is None else begin, next(iter(awaited))
                if interruptible:
                    self.check_interrupted()
                is_due = self._is_look_due(looked)
                if is_due:
                    looked = self.version, self._num_looks, self.monitor.now()
                for peer in awaited if is_due else ():
                    error = self._problem(peer, self.monitor.now() - start, operation, step)
                    if error is None:
                        continue
                    end = self._departures.end_of(peer)
                    is_known = end is not None and end.lost  # Its loss has not ended the wait, so the wait must fail.
                    if is_known or not self._goes_on_after(peer, step, error):
                        self._note_cause(peer, error)
                        raise error
                    self._found_lost.add(peer)
                    return self._depart(peer, error)
                if self.monitor.now() >= tells_at:
                    tells_at = math.inf
                    # Only one of several waiting threads reports.
                    if self.monitor.now() >= self._told_at + self._stall_seconds:
                        self._told_at = self.monitor.now()
                        self._note_wait(begin, last, operation)
                        return self._describe_stall(awaited, self.monitor.now() - start, operation, step)
                self._awaited[call] = frozenset(awaited)
                self.monitor.wait(self._look_seconds)

    def _is_look_due(self, looked: tuple[int, int, float] | None) -> bool:
        """True if a wait must now check all awaited ranks. Checks after each message would be n^2 checks for n ranks.

        Args:
          looked: Version, number of looks, and time of the last check. None: there was none.
        """
        if looked is None or looked[:2] != (self.version, self._num_looks):
            return True
        return self.monitor.now() >= looked[2] + self._look_seconds / 2

    def look(self) -> None:
        """Makes all waits check their awaited ranks now."""
        with self.monitor:
            self._num_looks += 1
            self.monitor.notify_all()

    def _note_wait(self, begin: float | None, peer: int, operation: str) -> None:
        if begin is not None:
            self.recorder.add(Kind.WAIT, begin, self.recorder.now() - begin, peer=peer, name=operation)

    def _describe_stall(self, awaited: Collection[int], waited: float, operation: str, step: int | None) -> str:
        peers = ", ".join(f"{self._name_of(peer)} ({_liveness(self.transport.status(peer))})" for peer in awaited)
        where = "" if step is None else f", step {step}"
        return (
            f"rank {self.rank}{where}: {operation}: it has waited {waited:.0f} s for {peers}. It waits up to "
            f"{self._options.progress_timeout_seconds:g} s for a rank that is alive (see progress_timeout_seconds)."
        )

    def _note_cause(self, peer: int, error: Exception) -> None:
        if self.is_given_up:
            self.fail(error)
        if isinstance(error, PeerLostError):
            self._cause = self._cause or f"{self._name_of(peer)} was lost: {error}"

    def _name_of(self, peer: int) -> str:
        return f"ps {self.servers.index(peer)}" if peer in self.servers else f"rank {peer}"

    def _depart(self, peer: int, error: PeerLostError) -> membership_pb2.Leave:
        """Records a lost rank as one that has left for good."""
        departure = Departure({}, str(error), final=True, lost=True, num_rounds=self.num_rounds)
        leave = self._departures.leave_of(peer, departure)
        self._record(leave)
        return leave

    def is_past_hope(self, peer: int) -> bool:
        """True if waiting for a peer would end now, because the peer is lost."""
        return self._problem(peer, 0.0, "", None) is not None

    def _problem(
        self, peer: int, waited: float, operation: str, step: int | None, *, asks: bool = True
    ) -> Exception | None:
        """The error that ends waiting for a peer; None if waiting may succeed. `asks`: see `Patience.discount`."""
        verdict = self._judge.verdict(peer, waited, operation, step, asks=asks, is_joining=self.joining)
        if verdict.is_cut_off:
            self.is_given_up = True
        return verdict.error

    # Sending.

    def send(
        self,
        peer: int,
        queue: str,
        header: bytes,
        payload: Sequence[np.ndarray] = (),
        lane: int | None = 0,
        *,
        step: int | None = None,
        interruptible: bool = True,
        supersedes: bool = False,
    ) -> bool:
        """Sends a message of a step, or drops it if the peer has left the session that this rank is in.

        Args:
          peer: The receiver.
          queue: See `Transport.send`.
          header: See `Transport.send`.
          payload: See `Transport.send`.
          lane: See `Transport.send`.
          step: The step, or None outside of a step. Ranks go on without a lost rank only within a step.
          interruptible: See `wait`.
          supersedes: See `Transport.send`.

        Returns:
          True if an older message was replaced.

        Blocks: as `Transport.send` does. The call also ends if the peer leaves or is lost, if this rank leaves the
          session, or if the job ends. The next `wait` raises the error that has ended the job.

        Raises:
          HopError: As `Transport.send` does.
          PeerLostError: If the peer was lost, and the others do not go on without it.
          Interrupted: If this rank leaves the session before there is room for the message.
        """
        start, incarnation = self.monitor.now(), self.incarnation_of(peer)

        def check() -> None:
            if interruptible:
                self.check_interrupted()
            # Between two sessions, all ranks have left the last one, and still send.
            if self._failure is not None or (self.departure(peer) is not None and not self.has_left):
                raise _NoUse
            problem = self._problem(peer, self.monitor.now() - start, f"send to {queue!r}", step, asks=False)
            if problem is not None:
                raise problem

        try:
            return self.transport.send(peer, queue, header, payload, lane, check=check, supersedes=supersedes)
        except _NoUse:
            pass
        except PeerLostError as error:
            if not self._goes_on_after(peer, step, error):
                self._note_cause(peer, error)
                raise
            self._go_on_without(peer, incarnation, error)
        return False

    def _goes_on_after(self, peer: int, step: int | None, error: Exception) -> bool:
        return not self.is_given_up and isinstance(error, PeerLostError) and self._can_go_on_without(peer, step)

    def _can_go_on_without(self, peer: int, step: int | None) -> bool:
        return step is not None and self.continue_without_lost and peer not in self.servers

    def _go_on_without(self, peer: int, incarnation: int, error: PeerLostError) -> None:
        with self.monitor:
            if self.departure(peer) is not None or self.incarnation_of(peer) != incarnation:
                return  # The loss was known already, or the peer has joined again since.
            self._found_lost.add(peer)
            leave = self._depart(peer, error)
        self._forward(leave)

    def send_to_newcomer(
        self, peer: int, queue: str, header: bytes, payload: Sequence[np.ndarray] = (), lane: int = 0
    ) -> None:
        """Sends a message to a process that is joining, or drops it if that process has died.

        Blocks: as `Transport.send` does. The call also ends if the peer is lost, or if this rank leaves the session.

        Raises:
          Interrupted: If this rank leaves the session before there is room for the message.
        """

        def check() -> None:
            self.check_interrupted()
            if self._failure is not None or is_dead(self.transport.status(peer)):
                raise _NoUse

        try:
            self.transport.send(peer, queue, header, payload, lane, check=check)
        except _NoUse:
            pass
        except HopError as error:
            logging.info("rank %d: could not send to %s of rank %d: %s", self.rank, queue, peer, error)

    def notify_peers(self, queue: str, data: bytes, *, except_for: Collection[int | None] = ()) -> None:
        """Sends a small message to every peer that can be reached. Does not block for long."""
        self._notify_all(self.peers, queue, data, except_for)

    def _notify_all(self, peers: Iterable[int], queue: str, data: bytes, except_for: Collection[int | None]) -> None:
        for peer in peers:
            if peer not in except_for:
                self.notify(peer, queue, data)

    def notify(self, peer: int, queue: str, data: bytes) -> None:
        """Sends a small message to a peer, if it can be reached. Does not block for long."""
        try:
            self.transport.send(peer, queue, data)
        except HopError as error:
            logging.info("rank %d: could not send to %s of rank %d: %s", self.rank, queue, peer, error)

    def flush(self, deadline: float) -> None:
        """Waits until messages have arrived at peers that still listen, or until `deadline`, on the monitor's clock."""
        for peer in (*self.peers, *self.servers):
            while self.listens(peer) and self.monitor.now() < deadline:
                if self.transport.flush(peer, _FLUSH_PERIOD_SECONDS):
                    break

    def listens(self, peer: int) -> bool:
        """True if a peer is connected, and was heard within `timeout_seconds`."""
        status = self.transport.status(peer)
        return status.connected and not status.was_silent_for(self._options.timeout_seconds)


def _liveness(status: PeerStatus) -> str:
    return f"heard {status.silent_seconds:.1f} s ago" if status.connected else "not connected"

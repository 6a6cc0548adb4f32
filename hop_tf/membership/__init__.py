"""`Membership`: who takes part in the running session, and the one place where a rank waits for others.

A *session* is one call of `fit` (or the life of a custom training loop). Ranks enter it together: each announces that
it is ready and waits for the peers it deals with. They leave it one by one, when their `fit` ends, normally or not;
the announcement is passed on by everyone, so that it reaches the ranks that are no peers of the leaver too. The others
go on without a rank that left. When a rank was lost (it died, or cannot be reached), those that notice tell the others;
whether they then go on without it or all raise, a scheme decides. When a rank gave up or disagreed (an *abort*), all
raise.

A rank that was lost or has ended can be started again. Its new process is told that a session is under way; how it
joins that one is in `hop_tf.runtime.joining`. Here, every new process that joins is one more *life* of the rank, so
that late news of an earlier one do no harm.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np
from absl import logging

from hop_tf.errors import HopError, PeerLostError, ProtocolError
from hop_tf.membership import membership_pb2
from hop_tf.membership.departures import Departure, Departures
from hop_tf.membership.monitor import Monitor
from hop_tf.options import CommunicationOptions
from hop_tf.transport.base import Message, Transport
from hop_tf.transport.deadlines import REFUSED_SECONDS, problem_of

_READY = "membership/ready"
_GATHERED = "membership/gathered"
LEAVE_QUEUE = "membership/leave"
# Silence, unlike messages, wakes nobody: how often a waiting rank looks at it.
_LIVENESS_PERIOD_SECONDS = 0.25
# How often a rank that waits for its last messages to arrive looks whether the receiver still listens.
_FLUSH_PERIOD_SECONDS = 0.1

_Parsed = TypeVar("_Parsed")


def tree_neighbors(rank: int, world_size: int) -> tuple[int | None, tuple[int, ...]]:
    """Parent (None for rank 0) and children of `rank` in the binary tree in which all ranks take part in something."""
    parent = (rank - 1) // 2 if rank else None
    children = tuple(child for child in (2 * rank + 1, 2 * rank + 2) if child < world_size)
    return parent, children


class Interrupted(Exception):
    """Not an error: waiting was ended because this rank itself leaves the session."""


class _NoUse(Exception):
    """Not an error: sending was ended because nobody takes the message any more."""


class Membership:
    """Sessions, departures and waiting, over a transport.

    Args:
      transport: The started transport.
      monitor: The rank's monitor.
      options: Deadlines.
      world_size: Number of ranks.
      peers: Ranks that this one deals with directly, beside its neighbors in the tree of `tree_neighbors`.
      continue_without_lost: Whether, within a step, a lost rank is one that has left. Otherwise it is an error.
      servers: Parameter servers, which are no ranks, hear of departures, and are an error when lost.
    """

    def __init__(
        self,
        *,
        transport: Transport,
        monitor: Monitor,
        options: CommunicationOptions,
        world_size: int,
        peers: Iterable[int],
        continue_without_lost: bool = False,
        servers: Sequence[int] = (),
    ):
        self.rank = transport.rank
        self.world_size = world_size
        self._parent, self._children = tree_neighbors(self.rank, world_size)
        tree = {*self._children, *(() if self._parent is None else (self._parent,))}
        self.peers = tuple(sorted({*peers, *tree} - {self.rank}))
        self.servers = tuple(servers)
        self.monitor = monitor
        self.transport = transport
        self._options = options
        self._continue_without_lost = continue_without_lost
        self._ready = dict.fromkeys(self.peers, 0)
        self._gathered = dict.fromkeys(self.peers, 0)
        self._departures = Departures()
        self._failure: BaseException | None = None
        self._interrupted = False
        # Whether the others went on without this rank: what it does is of no matter to them any more.
        self.is_given_up = False
        # This rank's life; while it is joining, the one that is to begin.
        self.life = 0
        self.joining = False
        self._begun_session = 0
        self._has_gathered = False
        self._left: membership_pb2.Leave | None = None
        transport.register(_READY, self._on_ready)
        transport.register(_GATHERED, self._on_gathered)
        transport.register(LEAVE_QUEUE, self._on_leave)

    @property
    def session(self) -> int:
        """The running session, or the last one; they count from 1."""
        return self._departures.session

    @session.setter
    def session(self, session: int) -> None:
        self._departures.enter(session)

    # Entering and leaving.

    def begin_session(self) -> None:
        """Enters the next session together with all ranks. Sets `joining` if it is under way.

        Blocks: until every rank is about to enter it too.

        Raises:
          HopError: If a peer cannot be reached, disagrees, or has left for good.
        """
        with self.monitor:
            self.session += 1
            self._left = None
            self._has_gathered = False
        for peer in self.peers:
            self.transport.connect(peer)
            self._tell_ready(peer)
        self._await(lambda: [peer for peer in self.peers if self._ready[peer] < self.session])
        # Peers may all be ready where others, further away, train already: they and this rank were restarted.
        self._await_gathered(self._children)
        if self._parent is not None and not self.joining:
            self._has_gathered = True
            self._tell_gathered(self._parent)
            self._await_gathered([self._parent])
        with self.monitor:
            self._begun_session = self.session
            newcomers = [peer for peer in self.peers if self.joining and self._ready[peer]]
        for peer in newcomers:
            self._tell_of_session(peer)
        if not self.joining:
            for child in self._children:
                self._tell_gathered(child)

    def _await_gathered(self, ranks: Sequence[int]) -> None:
        # One that was ready, and has left before all were, is no obstacle.
        self._await(lambda: [r for r in ranks if self._gathered[r] < self.session and self.departure(r) is None])

    def _await(self, missing: Callable[[], Collection[int]]) -> None:
        """Waits until nobody is missing any more, or the session proves to be under way."""
        self.wait(lambda: [] if self.joining else missing(), operation="start of training")

    def _tell_ready(self, peer: int) -> None:
        self.transport.send(peer, _READY, membership_pb2.Ready(session=self.session).SerializeToString())

    def _tell_gathered(self, peer: int) -> None:
        self.transport.send(peer, _GATHERED, membership_pb2.Gathered(session=self.session).SerializeToString())

    def leave(self, *, sent_steps: Mapping[str, int], reason: str, abort: bool = False, final: bool = False) -> None:
        """Tells everyone that this rank takes part in the running session no more. Does not block for long.

        Ends the effect of `interrupt`.

        Args:
          sent_steps: For each exchange group, how many steps' messages were sent.
          reason: Why, for the others' logs and errors.
          abort: The job cannot go on; everyone raises.
          final: This process does not train again.
        """
        self._interrupted = False
        message = membership_pb2.Leave(
            rank=self.rank,
            session=self.session,
            sent_steps=sent_steps,
            abort=abort,
            final=final,
            reason=reason,
            life=self.life,
        )
        self._left = message
        if not self.joining:  # Else nobody counts on this rank.
            self._pass_on(message)

    @property
    def has_left(self) -> bool:
        """Whether this rank takes part in the session no more."""
        return self._left is not None

    def flush(self, deadline: float) -> None:
        """Gives what was sent time to arrive where somebody still listens; until `deadline`, on the monitor's clock."""
        for peer in (*self.peers, *self.servers):
            while self._listens(peer) and self.monitor.now() < deadline:
                if self.transport.flush(peer, _FLUSH_PERIOD_SECONDS):
                    break

    def _listens(self, peer: int) -> bool:
        status = self.transport.status(peer)
        return status.connected and not status.was_silent_for(self._options.timeout_seconds)

    def interrupt(self) -> None:
        """Ends every `wait` of this rank with `Interrupted`, until it has left."""
        with self.monitor:
            self._interrupted = True
            self.monitor.notify_all()

    def fail(self, error: BaseException) -> None:
        """Ends every `wait` of this rank, now and later, with `error` (the first one is kept).

        It is logged, once, though several threads fail by it.
        """
        with self.monitor:
            if str(error) != str(self._failure):
                logging.error("rank %d: %s: %s", self.rank, type(error).__name__, error)
            self._failure = self._failure or error
            self.monitor.notify_all()

    @property
    def failure(self) -> BaseException | None:
        """What ended this rank's part in the job, if anything did."""
        return self._failure

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
    ) -> None:
        """Sends a message of a step, or drops it where the peer has left the session that this rank is in.

        Args:
          peer: The receiver.
          queue: As for `Transport.send`; so are header, payload and lane.
          header: Of the message.
          payload: Of the message.
          lane: Of the message.
          step: The step. As in `wait`, where ranks go on without a lost one, they do so within a step.
          interruptible: As in `wait`.

        Blocks: as `Transport.send`. That the peer leaves or is lost, that this rank leaves the session, and whatever
          ends the job end it too; the last one is raised by the next `wait`.

        Raises:
          HopError: As there.
          PeerLostError: If the peer was lost, and the others do not go on without it.
          Interrupted: If this rank leaves the session before there is room for the message.
        """
        start, life = self.monitor.now(), self.life_of(peer)

        def check() -> None:
            if interruptible:
                self._check_interrupted()
            # Between two sessions all have left the last one.
            if self._failure is not None or (self.departure(peer) is not None and not self.has_left):
                raise _NoUse
            problem = self._problem(peer, self.monitor.now() - start, f"send to {queue!r}", step)
            if problem is not None:
                raise problem

        try:
            self.transport.send(peer, queue, header, payload, lane, check=check)
        except _NoUse:
            pass
        except PeerLostError as error:
            if not self._can_go_on_without(peer, step):
                raise
            self._go_on_without(peer, life, error)

    def _can_go_on_without(self, peer: int, step: int | None) -> bool:
        return step is not None and self._continue_without_lost and peer not in self.servers

    def _go_on_without(self, peer: int, life: int, error: PeerLostError) -> None:
        with self.monitor:
            if self.departure(peer) is not None or self.life_of(peer) != life:
                return  # It was known already, or has joined again since.
            leave = self._depart(peer, error)
        self._pass_on(leave)

    def send_to_newcomer(
        self, peer: int, queue: str, header: bytes, payload: Sequence[np.ndarray] = (), lane: int = 0
    ) -> None:
        """Sends a message to a process that is joining, or drops it where that one has died.

        Blocks: as `Transport.send`. That the peer is lost and that this rank leaves the session end it.

        Raises:
          Interrupted: If this rank leaves the session before there is room for the message.
        """

        def check() -> None:
            self._check_interrupted()
            if self._failure is not None or self.transport.status(peer).was_refused_for(REFUSED_SECONDS):
                raise _NoUse

        try:
            self.transport.send(peer, queue, header, payload, lane, check=check)
        except _NoUse:
            pass
        except HopError as error:
            logging.info("rank %d: could not send to %s of rank %d: %s", self.rank, queue, peer, error)

    def _check_interrupted(self) -> None:
        if self._interrupted:
            raise Interrupted

    def tell_peers(self, queue: str, data: bytes, *, except_for: Collection[int | None] = ()) -> None:
        """Sends a small message to every peer that can be reached. Does not block for long."""
        self._tell_all(self.peers, queue, data, except_for)

    def _tell_all(self, peers: Iterable[int], queue: str, data: bytes, except_for: Collection[int | None]) -> None:
        for peer in peers:
            if peer not in except_for:
                self.tell(peer, queue, data)

    def tell(self, peer: int, queue: str, data: bytes) -> None:
        """Sends a small message to a peer, if it can be reached. Does not block for long."""
        try:
            self.transport.send(peer, queue, data)
        except HopError as error:
            logging.info("rank %d: could not send to %s of rank %d: %s", self.rank, queue, peer, error)

    # Ranks that were restarted.

    def on_restart(self, peer: int) -> None:
        """Another process has taken the place of `peer`: the one before is lost."""
        if peer not in (*self.peers, *self.servers):
            return  # Its peers tell of that, and may have told already that the new one takes part.
        with self.monitor:
            self._ready[peer] = self._gathered[peer] = 0
            departure, leave = self.departure(peer), None
            if self._begun_session and (departure is None or not departure.lost):
                leave = self._depart(peer, PeerLostError(f"rank {peer} was restarted"))
        if leave is not None:
            self._pass_on(leave, learned_from=peer)
        elif self.session and not self._begun_session:  # Nothing is lost yet: it can begin with the others.
            self._tell_ready(peer)
            if self._has_gathered and peer == self._parent:
                self._tell_gathered(peer)

    def _tell_of_session(self, newcomer: int) -> None:
        """Tells a rank that was restarted that the session is under way, and who takes part."""
        with self.monitor:
            leaves = [leave for leave in self._leaves() if leave.rank != newcomer]
            ready = membership_pb2.Ready(session=self.session, under_way=True, lives=self.lives)
        for leave in leaves:
            self.tell(newcomer, LEAVE_QUEUE, leave.SerializeToString())
        self.tell(newcomer, _READY, ready.SerializeToString())

    @property
    def present_life(self) -> int:
        """This rank's life as others know it."""
        return self.life - self.joining

    @property
    def lives(self) -> dict[int, int]:
        """`life_of` all ranks, this one included; ranks that never joined may be left out."""
        return {**self._departures.lives, self.rank: self.present_life}

    def life_of(self, rank: int) -> int:
        """How many times `rank` has joined a session that was under way."""
        return self._departures.life_of(rank)

    def _leaves(self) -> list[membership_pb2.Leave]:
        """What a newcomer must know of those that do not take part."""
        leave_of = self._departures.leave_of
        leaves = [leave_of(rank, self.departure(rank)) for rank in self.departed()]
        if self.joining:
            departure = Departure({}, "it is joining itself", final=True, lost=True)
            leaves.append(leave_of(self.rank, departure, life=self.present_life))
        elif self._left is not None:
            leaves.append(self._left)
        return leaves

    def joined(self) -> None:
        """This rank takes part from now on: it is joining no more."""
        self.joining = False

    def readmit(self, join: membership_pb2.Join) -> bool:
        """A rank that was restarted takes part; False if that is no news. The monitor must be held.

        It is none either while the transport knows a peer's former process only: what is sent to the new one would be
        dropped with what is on its way to that one. The new one tells this rank itself, and so it is met.
        """
        rank = join.rank
        if join.session != self.session or rank == self.rank or join.life <= self.life_of(rank):
            return False
        if rank in self.peers and self.transport.status(rank).incarnation not in (None, join.incarnation):
            return False
        self._departures.begin_life(rank, join.life)
        logging.info("rank %d: rank %d takes part again.", self.rank, rank)
        self.monitor.notify_all()
        return True

    # What is known of others.

    def departure(self, rank: int) -> Departure | None:
        """How `rank` left the running session; None while it takes part."""
        return self._departures.of(rank)

    def departed(self) -> set[int]:
        """Ranks that take part in the running session no more."""
        return self._departures.ranks()

    def require_all(self, operation: str) -> None:
        """Raises PeerLostError if a rank was lost, the others went on without it, and it has not joined again."""
        if self.joining:
            raise PeerLostError(
                f"rank {self.rank}: {operation} takes all ranks, and this one has not joined them again."
            )
        for rank, departure in self._departures.lost().items():
            raise PeerLostError(
                f"rank {self.rank}: {operation} takes all ranks, and rank {rank} was lost: {departure.reason}"
            )

    def delivers(self, rank: int, group: str, step: int) -> bool:
        """Whether `rank`'s messages of `step` in `group` have come or may still come."""
        return self._departures.delivers(rank, group, step)

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
        """Waits until no rank is missing any more.

        Args:
          missing: Called with the monitor held, after every change; returns the ranks still awaited.
          operation: What is awaited, for error messages.
          step: The training step, or None outside of a step.
          interruptible: Whether `interrupt` ends the waiting.
          since: When the waiting began, on the monitor's clock. Default: now.

        Blocks: until `missing()` is empty; messages from those ranks, or their departure, bring that about.

        Raises:
          PeerLostError: If a missing rank was silent for `timeout_seconds`, or was restarted. Where ranks go on without
            a lost one: if it is still missing then.
          DeadlineExceededError: If a missing rank never appeared within `timeout_seconds`, or is alive but did not
            deliver within `progress_timeout_seconds`.
          HopError: If the job was aborted meanwhile.
          Interrupted: If this rank leaves the session itself.
        """
        start = self.monitor.now() if since is None else since
        while (lost := self._wait(missing, start, operation, step, interruptible)) is not None:
            self._pass_on(lost, learned_from=None)

    def wait_until(self, condition: Callable[[], object], timeout_seconds: float) -> bool:
        """Waits for something that no particular rank is to bring about.

        Args:
          condition: Called with the monitor held, after every change.
          timeout_seconds: Longest time to wait.

        Returns:
          Whether `condition()` holds.

        Raises:
          HopError: If the job was aborted meanwhile.
          Interrupted: If this rank leaves the session itself.
        """
        with self.monitor:
            deadline = self.monitor.now() + timeout_seconds
            while not condition():
                self.check()
                self._check_interrupted()
                if self.monitor.now() >= deadline:
                    return False
                self.monitor.wait(_LIVENESS_PERIOD_SECONDS, deadline)
            return True

    def _wait(
        self, missing, start: float, operation: str, step: int | None, interruptible: bool
    ) -> membership_pb2.Leave | None:
        """Waits until nobody is missing, or a rank is lost; returns what to tell the others of that one."""
        with self.monitor:
            while True:
                self.check()  # Even if nobody is awaited: a rank that gave up is awaited no more.
                awaited = missing()
                if not awaited:
                    return None
                if interruptible:
                    self._check_interrupted()
                for peer in awaited:
                    error = self._problem(peer, self.monitor.now() - start, operation, step)
                    if error is None:
                        continue
                    end = self._departures.end_of(peer)
                    is_known = end is not None and end.lost  # And still it is waited for: there is no going on.
                    if is_known or not self._can_go_on_without(peer, step) or not isinstance(error, PeerLostError):
                        raise error
                    return self._depart(peer, error)
                self.monitor.wait(_LIVENESS_PERIOD_SECONDS)

    def _depart(self, peer: int, error: PeerLostError) -> membership_pb2.Leave:
        """Takes a lost rank for one that has left for good."""
        logging.error("rank %d goes on without rank %d: %s", self.rank, peer, error)
        leave = self._departures.leave_of(peer, Departure({}, str(error), final=True, lost=True))
        self._note(leave)
        return leave

    def check(self) -> None:
        """Raises what ended the job, if anything did."""
        if self._failure is not None:
            raise self._failure

    def _problem(self, peer: int, waited: float, operation: str, step: int | None) -> Exception | None:
        """Why to wait no longer; None if there is hope."""
        return problem_of(
            self.transport.status(peer),
            self._departures.end_of(peer),
            waited,
            self._options,
            rank=self.rank,
            peer=f"ps {self.servers.index(peer)}" if peer in self.servers else f"rank {peer}",
            operation=operation,
            step=step,
        )

    # Messages.

    def _on_ready(self, message: Message) -> None:
        ready = parse(membership_pb2.Ready, message)
        with self.monitor:
            is_news = self._ready[message.sender] < ready.session
            is_newcomer = is_news and not ready.under_way and ready.session <= self._begun_session
            if ready.under_way:
                self._learn_of_session(ready)
            else:
                self._ready[message.sender] = ready.session
            self.monitor.notify_all()
        if is_newcomer:
            self._tell_of_session(message.sender)

    def _on_gathered(self, message: Message) -> None:
        gathered = parse(membership_pb2.Gathered, message)
        with self.monitor:
            self._gathered[message.sender] = gathered.session
            self.monitor.notify_all()

    def _learn_of_session(self, ready: membership_pb2.Ready) -> None:
        """Others train already: this process was started again."""
        if self._begun_session and not self.joining:
            return  # And has joined by now.
        self.joining = True
        self.session = ready.session
        for rank, life in ready.lives.items():
            if rank != self.rank:
                self._departures.begin_life(rank, life)
        self.life = max(self.life, ready.lives.get(self.rank, 0) + 1)

    def _on_leave(self, message: Message) -> None:
        leave = parse(membership_pb2.Leave, message)
        if not 0 <= leave.rank < self.world_size:
            raise ProtocolError(f"rank {message.sender} announced that rank {leave.rank} leaves: no such rank.")
        if leave.rank == self.rank and leave.lost:
            if self._begun_session and leave.life == self.life:  # Else it is about an earlier process.
                self.is_given_up = True
                self.fail(PeerLostError(f"rank {self.rank}: the others went on without this rank: {leave.reason}"))
            return
        with self.monitor:
            news = self._note(leave)
        if news:
            self._pass_on(leave, learned_from=message.sender)

    def _note(self, leave: membership_pb2.Leave) -> bool:
        """Remembers a departure; False if it was known."""
        if leave.rank == self.rank or not self._departures.note(leave):
            return False
        if leave.abort and self._failure is None:
            reason = f"training ended because rank {leave.rank} gave up: {leave.reason}"
            self.fail(PeerLostError(f"rank {self.rank}: {reason}"))
        elif leave.reason:
            logging.info("rank %d: rank %d left session %d: %s", self.rank, leave.rank, leave.session, leave.reason)
        self.monitor.notify_all()
        return True

    def _pass_on(self, leave: membership_pb2.Leave, learned_from: int | None = None) -> None:
        # A lost rank may live after all.
        itself = None if leave.lost else leave.rank
        data = leave.SerializeToString()
        self._tell_all((*self.peers, *self.servers), LEAVE_QUEUE, data, except_for=(learned_from, itself))


def parse(message_type: type[_Parsed], message: Message) -> _Parsed:
    """The header of `message`; raises ProtocolError if it is none of that type."""
    try:
        return message_type.FromString(message.header)
    except Exception as error:
        raise ProtocolError(f"rank {message.sender} sent a malformed message to {message.queue!r}: {error}.") from error

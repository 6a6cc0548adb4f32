"""`Membership`: who takes part in the running session, and the one place where a rank waits for others.

A *session* is one call of `fit` (or the life of a custom training loop). Ranks enter it together: each announces that
it is ready and waits for the peers it deals with. They leave it one by one, when their `fit` ends, normally or not;
the announcement is passed on by everyone, so that it reaches the ranks that are no peers of the leaver too. The others
go on without a rank that left. When a rank was lost (it died, or cannot be reached), those that notice tell the others;
whether they then go on without it or all raise, a scheme decides. When a rank gave up or disagreed (an *abort*), all
raise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import numpy as np
from absl import logging

from hop_tf import membership_pb2
from hop_tf.errors import DeadlineExceededError, HopError, PeerLostError, ProtocolError, describe_failure
from hop_tf.monitor import Monitor
from hop_tf.options import CommunicationOptions
from hop_tf.transport.base import Message, Transport

_READY = "membership/ready"
_LEAVE = "membership/leave"
# Silence, unlike messages, wakes nobody: how often a waiting rank looks at it.
_LIVENESS_PERIOD_SECONDS = 0.25
# How long nobody may listen where a process did until it counts as dead: longer than a heartbeat takes.
_REFUSED_SECONDS = 2.0
# A peer ends only when all it has sent has arrived here; to reach its handler may take a moment more.
_HANDOVER_SECONDS = 5.0
_PROGRESS_ADVICE = "Check that rank's log: it is alive but does not deliver (see progress_timeout_seconds)."
_LOST_ADVICE = "Check whether that process runs and can be reached (see timeout_seconds)."


class Interrupted(Exception):
    """Not an error: waiting was ended because this rank itself leaves the session."""


@dataclasses.dataclass(frozen=True)
class Departure:
    """How a rank left: `sent_steps[group]` steps were sent before, why, whether for good, and whether it was lost."""

    sent_steps: Mapping[str, int]
    reason: str
    final: bool
    lost: bool = False


class Membership:
    """Sessions, departures and waiting, over a transport.

    Args:
      transport: The started transport.
      monitor: The rank's monitor.
      options: Deadlines.
      world_size: Number of ranks.
      peers: Ranks that this one deals with directly. Together they must connect the whole world.
      continue_without_lost: Whether, within a step, a lost rank is one that has left. Otherwise it is an error.
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
    ):
        self.rank = transport.rank
        self.world_size = world_size
        self.peers = tuple(sorted(set(peers) - {self.rank}))
        self.monitor = monitor
        self.transport = transport
        self.session = 0
        self._options = options
        self._continue_without_lost = continue_without_lost
        self._ready = dict.fromkeys(self.peers, 0)
        self._departures: dict[tuple[int, int], Departure] = {}
        self._gone: dict[int, Departure] = {}
        self._failure: BaseException | None = None
        self._interrupted = False
        transport.register(_READY, self._on_ready)
        transport.register(_LEAVE, self._on_leave)

    # Entering and leaving.

    def begin_session(self) -> None:
        """Enters the next session together with all peers.

        Blocks: until every peer has entered it too.

        Raises:
          HopError: If a peer cannot be reached, disagrees, or has left for good.
        """
        with self.monitor:
            self.session += 1
            ready = membership_pb2.Ready(session=self.session).SerializeToString()
        for peer in self.peers:
            self.transport.connect(peer)
            self.transport.send(peer, _READY, ready)

        def absent() -> list[int]:
            return [peer for peer in self.peers if self._ready[peer] < self.session]

        self.wait(absent, operation="start of training")

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
        )
        self._pass_on(message)

    def interrupt(self) -> None:
        """Ends every `wait` of this rank with `Interrupted`, until it has left."""
        with self.monitor:
            self._interrupted = True
            self.monitor.notify_all()

    def fail(self, error: BaseException) -> None:
        """Ends every `wait` of this rank, now and later, with `error` (the first one is kept)."""
        with self.monitor:
            self._failure = self._failure or error
            self.monitor.notify_all()

    @property
    def failure(self) -> BaseException | None:
        """What ended this rank's part in the job, if anything did."""
        return self._failure

    def send(self, peer: int, queue: str, header: bytes, payload: Sequence[np.ndarray] = (), lane: int = 0) -> None:
        """Sends a message of a step. As `Transport.send`, but to leave the session ends its blocking.

        Raises:
          HopError: As there.
          Interrupted: If this rank leaves the session before there is room for the message.
        """
        self.transport.send(peer, queue, header, payload, lane, check=self._check_interrupted)

    def _check_interrupted(self) -> None:
        if self._interrupted:
            raise Interrupted

    # What is known of others.

    def departure(self, rank: int) -> Departure | None:
        """How `rank` left the running session; None while it takes part."""
        return self._departures.get((self.session, rank)) or self._gone.get(rank)

    def departed(self) -> set[int]:
        """Ranks that take part in the running session no more."""
        return {rank for session, rank in self._departures if session == self.session} | set(self._gone)

    def require_all(self, operation: str) -> None:
        """Raises PeerLostError if a rank was lost, and the others went on without it."""
        for rank, departure in sorted(self._gone.items()):
            if departure.lost:
                raise PeerLostError(
                    f"rank {self.rank}: {operation} takes all ranks, and rank {rank} was lost: {departure.reason}"
                )

    def delivers(self, rank: int, group: str, step: int) -> bool:
        """Whether `rank`'s messages of `step` in `group` have come or may still come."""
        departure = self.departure(rank)
        return departure is None or step < departure.sent_steps.get(group, 0)

    # Waiting.

    def wait(self, missing: Callable[[], Collection[int]], *, operation: str, step: int | None = None) -> None:
        """Waits until no rank is missing any more.

        Args:
          missing: Called with the monitor held, after every change; returns the ranks still awaited.
          operation: What is awaited, for error messages.
          step: The training step, or None outside of a step.

        Blocks: until `missing()` is empty; messages from those ranks, or their departure, bring that about.

        Raises:
          PeerLostError: If a missing rank was silent for `timeout_seconds`, or was restarted.
          DeadlineExceededError: If a missing rank never appeared within `timeout_seconds`, or is alive but did not
            deliver within `progress_timeout_seconds`.
          HopError: If the job was aborted meanwhile.
          Interrupted: If this rank leaves the session itself.
        """
        start = self.monitor.now()
        while (lost := self._wait(missing, start, operation, step)) is not None:
            self._pass_on(lost, learned_from=None)

    def _wait(self, missing, start: float, operation: str, step: int | None) -> membership_pb2.Leave | None:
        """Waits until nobody is missing, or a rank is lost; returns what to tell the others of that one."""
        with self.monitor:
            while True:
                self.check()  # Even if nobody is awaited: a rank that gave up is awaited no more.
                awaited = missing()
                if not awaited:
                    return None
                self._check_interrupted()
                for peer in awaited:
                    error = self._problem(peer, self.monitor.now() - start, operation, step)
                    if error is None:
                        continue
                    if step is None or not self._continue_without_lost or not isinstance(error, PeerLostError):
                        raise error
                    return self._depart(peer, error)
                self.monitor.wait(_LIVENESS_PERIOD_SECONDS)

    def _depart(self, peer: int, error: PeerLostError) -> membership_pb2.Leave:
        """Takes a lost rank for one that has left for good."""
        logging.error("rank %d goes on without rank %d: %s", self.rank, peer, error)
        leave = membership_pb2.Leave(rank=peer, session=self.session, final=True, lost=True, reason=str(error))
        self._note(leave)
        return leave

    def check(self) -> None:
        """Raises what ended the job, if anything did."""
        if self._failure is not None:
            raise self._failure

    def _problem(self, peer: int, waited: float, operation: str, step: int | None) -> Exception | None:
        """Why to wait no longer; None if there is hope."""
        status = self.transport.status(peer)
        if status.failure is not None:
            return status.failure
        problem = f": {status.last_problem}" if status.last_problem else ""
        gone = self._gone.get(peer)
        if gone is not None and waited > _HANDOVER_SECONDS:
            error, state, advice = PeerLostError, f"it has ended: {gone.reason}", "Start the job again."
        elif gone is not None:
            return None
        elif status.refused_seconds > _REFUSED_SECONDS:
            error, state, advice = PeerLostError, "nobody listens there any more", _LOST_ADVICE
        elif status.silent_seconds > self._options.timeout_seconds and status.ever_connected:
            error, state, advice = PeerLostError, f"silent for {status.silent_seconds:.1f} s{problem}", _LOST_ADVICE
        elif status.silent_seconds > self._options.timeout_seconds:
            error, state, advice = DeadlineExceededError, f"it never appeared{problem}", _LOST_ADVICE
        elif waited > self._options.progress_timeout_seconds:
            error, state, advice = DeadlineExceededError, "it is alive", _PROGRESS_ADVICE
        else:
            return None
        return error(
            describe_failure(
                rank=self.rank,
                step=step,
                operation=operation,
                target=f"rank {peer} at {status.address}",
                seconds=waited,
                state=state,
                advice=advice,
            )
        )

    # Messages.

    def _on_ready(self, message: Message) -> None:
        ready = _parse(membership_pb2.Ready, message)
        with self.monitor:
            self._ready[message.sender] = max(self._ready.get(message.sender, 0), ready.session)
            self.monitor.notify_all()

    def _on_leave(self, message: Message) -> None:
        leave = _parse(membership_pb2.Leave, message)
        if not 0 <= leave.rank < self.world_size:
            raise ProtocolError(f"rank {message.sender} announced that rank {leave.rank} leaves: no such rank.")
        if leave.rank == self.rank and leave.lost:
            self.fail(PeerLostError(f"rank {self.rank}: the others went on without this rank: {leave.reason}"))
            return
        with self.monitor:
            news = self._note(leave)
        if news:
            self._pass_on(leave, learned_from=message.sender)

    def _note(self, leave: membership_pb2.Leave) -> bool:
        """Remembers a departure; False if it was known."""
        key = (leave.session, leave.rank)
        gone = self._gone.get(leave.rank)
        if leave.lost:  # Also after it had left: what it has sent and nobody received will never come.
            known = gone is not None and gone.lost
        else:
            known = gone is not None if leave.final else key in self._departures
        if known or leave.rank == self.rank:
            return False
        departure = Departure(dict(leave.sent_steps), leave.reason, leave.final, leave.lost)
        if leave.lost or key not in self._departures:
            self._departures[key] = departure
        if leave.final:
            self._gone[leave.rank] = departure
        if leave.abort and self._failure is None:
            self._failure = PeerLostError(
                f"rank {self.rank}: training ended because rank {leave.rank} gave up: {leave.reason}"
            )
        elif leave.reason:
            logging.info("rank %d: rank %d left session %d: %s", self.rank, leave.rank, leave.session, leave.reason)
        self.monitor.notify_all()
        return True

    def _pass_on(self, leave: membership_pb2.Leave, learned_from: int | None = None) -> None:
        data = leave.SerializeToString()
        for peer in self.peers:
            if peer != learned_from and (peer != leave.rank or leave.lost):  # A lost rank may live after all.
                try:
                    self.transport.send(peer, _LEAVE, data)
                except HopError as error:
                    logging.info(
                        "rank %d: could not tell rank %d that rank %d left: %s", self.rank, peer, leave.rank, error
                    )


def _parse(message_type, message: Message):
    try:
        return message_type.FromString(message.header)
    except Exception as error:
        raise ProtocolError(f"rank {message.sender} sent a malformed message to {message.queue!r}: {error}.") from error

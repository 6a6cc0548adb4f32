"""`Membership`: entering a session, leaving it, and joining it again."""

from __future__ import annotations

import collections
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TypeVar

from absl import logging

from hop_tf.errors import PeerFailedError, PeerLostError, ProtocolError
from hop_tf.membership import membership_pb2
from hop_tf.membership.departures import Departure
from hop_tf.membership.monitor import Monitor
from hop_tf.membership.waiting import LeftBehind, Waiting
from hop_tf.options import CommunicationOptions
from hop_tf.records import Kind, Recorder
from hop_tf.transport.base import Message, Transport

_READY = "membership/ready"
_GATHERED = "membership/gathered"
LEAVE_QUEUE = "membership/leave"

_Parsed = TypeVar("_Parsed")


def tree_neighbors(rank: int, world_size: int) -> tuple[int | None, tuple[int, ...]]:
    """Parent (None for rank 0) and children of `rank` in the binary tree over all ranks."""
    parent = (rank - 1) // 2 if rank else None
    children = tuple(child for child in (2 * rank + 1, 2 * rank + 2) if child < world_size)
    return parent, children


def relays(rank: int, world_size: int) -> list[int]:
    """The ranks at the distances 1, 2, 4, ... from `rank`, in both directions: at most 2 ceil(log2(world_size)).

    News that every rank passes on to its relays reaches all ranks, even if some ranks die. With up to five ranks, the
    relays are all other ranks.
    """
    distances = [sign << bit for bit in range((world_size - 1).bit_length()) for sign in (1, -1)]
    return sorted({(rank + distance) % world_size for distance in distances} - {rank})


class Membership(Waiting):
    """The ranks that take part in the running session, and waiting for them, over a transport.

    Args:
      transport: The started transport.
      monitor: The rank's monitor.
      options: Deadlines.
      world_size: Number of ranks.
      peers: Ranks that this rank communicates with, besides its neighbors in the tree of `tree_neighbors`. None, the
        default, stands for all ranks. It must then be None on all ranks.
      continue_without_lost: True if a rank that is lost within a step counts as one that has left. Otherwise the loss
        is an error.
      min_ranks: The least number of remaining ranks, this one included. Lost and failed ranks do not count. With fewer
        ranks, this rank raises. Default 1.
      servers: Parameter servers. They are not ranks, but are told of departures. Losing a server is an error.
      patience_seconds: See `Waiting`. Default None.
      recorder: See `Waiting`. Default None.
      on_stall: See `Waiting`. Default: does nothing.
      divides_anew: Returns True if the others take over the data of a rank that is lost or has left. Otherwise that
        data is left out. Default: returns False.
    """

    def __init__(
        self,
        *,
        transport: Transport,
        monitor: Monitor,
        options: CommunicationOptions,
        world_size: int,
        peers: Iterable[int] | None = None,
        continue_without_lost: bool = False,
        min_ranks: int = 1,
        servers: Sequence[int] = (),
        patience_seconds: float | None = None,
        recorder: Recorder | None = None,
        on_stall: Callable[[str], None] | None = None,
        divides_anew: Callable[[], bool] = lambda: False,
    ):
        rank = transport.rank
        self._parent, self._children = tree_neighbors(rank, world_size)
        tree = {*self._children, *(() if self._parent is None else (self._parent,))}
        super().__init__(
            transport=transport,
            monitor=monitor,
            options=options,
            peers=sorted({*(range(world_size) if peers is None else peers), *tree} - {rank}),
            servers=servers,
            world_size=world_size,
            min_ranks=min_ranks,
            continue_without_lost=continue_without_lost,
            patience_seconds=patience_seconds,
            recorder=recorder,
            on_stall=on_stall,
        )
        self.divides_anew = divides_anew
        self._all_are_peers = peers is None
        self._ready = dict.fromkeys(self.peers, 0)
        self._gathered = dict.fromkeys(self.peers, 0)
        # The seed of random choices that all ranks make alike in the running session.
        self.seed = 0
        # For each claimed name, its owner in the running session: the lowest rank that claims the name.
        self.owners: dict[str, int] = {}
        # Number of ranks that were lost, and of ranks that left a session by an exception, since this object was
        # created.
        self.num_lost = self.num_left = 0
        # Times that another rank has joined again in the middle of a session.
        self.num_joined = 0
        # Times that the others went on without this rank, and let it join them again.
        self.num_left_behind = 0
        self._lost_to: dict[int, set[int]] = {}  # For each server, the ranks that the server goes on without.
        self._missed: collections.Counter[int] = collections.Counter()  # Rounds missed by ranks that take part again.
        self._begun_session = 0
        self._has_gathered = False
        # Departures that this rank has heard of before its first session. They count only if all ranks begin that
        # session together. If this rank joins a running session instead, they happened before it took part.
        self._heard_early: list[membership_pb2.Leave] = []
        self._left: membership_pb2.Leave | None = None
        transport.register(_READY, self._on_ready)
        transport.register(_GATHERED, self._on_gathered)
        transport.register(LEAVE_QUEUE, self._on_leave)

    # Entering and leaving.

    def begin_session(self, seed: int = 0, claims: Iterable[str] = ()) -> None:
        """Enters the next session together with all ranks. Sets `joining` if the others are in a running session.

        Args:
          seed: Only rank 0's value counts: it becomes `self.seed` on all ranks. At least 0, below 2^63. Default 0.
          claims: Names that this rank claims for itself. Afterwards, `self.owners` maps each name, on all ranks, to the
            rank that got it.

        Blocks: until every rank is about to enter the session, too.

        Raises:
          HopError: If a peer cannot be reached, disagrees, or has left for good.
        """
        with self.monitor:
            self.session += 1
            self._left = None
            self._has_gathered = False
            self.num_rounds = 0
            self._missed.clear()
            self.seed, self.owners = seed, dict.fromkeys(claims, self.rank)
        for peer in self.peers:
            self.transport.connect(peer)
            self._tell_ready(peer)
        self._await(lambda: [peer for peer in self.peers if self._ready[peer] < self.session])
        # All peers may be ready although other ranks train already: then this rank and its peers were restarted.
        self._await_gathered(self._children)
        if self._parent is not None and not self.joining:
            self._has_gathered = True
            self._tell_gathered(self._parent)
            self._await_gathered([self._parent])
        with self.monitor:
            self._begun_session = self.session
            newcomers = [peer for peer in self.peers if self.joining and self._ready[peer]]
            for leave in () if self.joining else self._heard_early:
                self._note_end(leave)
            self._heard_early.clear()
        for peer in newcomers:
            self._tell_of_session(peer)
        if not self.joining:
            for child in self._children:
                self._tell_gathered(child)

    def _await_gathered(self, ranks: Sequence[int]) -> None:
        # Does not wait for a rank that was ready, and has left before all ranks were ready.
        self._await(lambda: [r for r in ranks if self._gathered[r] < self.session and self.departure(r) is None])

    def _await(self, missing: Callable[[], Collection[int]]) -> None:
        """Waits until no rank is missing, or the session turns out to be running already."""
        self.wait(lambda: [] if self.joining else missing(), operation="start of training")

    def _tell_ready(self, peer: int) -> None:
        self.transport.send(peer, _READY, membership_pb2.Ready(session=self.session).SerializeToString())

    def _tell_gathered(self, peer: int) -> None:
        gathered = membership_pb2.Gathered(session=self.session, seed=self.seed, owners=self.owners)
        self.transport.send(peer, _GATHERED, gathered.SerializeToString())

    def leave(
        self,
        *,
        sent_rounds: Mapping[str, int],
        reason: str,
        failed: bool = False,
        abort: bool = False,
        final: bool = False,
    ) -> None:
        """Tells the others that this rank no longer takes part in the running session. Does not block for long.

        Ends the effect of `interrupt`.

        Args:
          sent_rounds: For each exchange group, the number of rounds sent; see `Exchange`.
          reason: The reason, for the others' logs and errors; "" if this rank has made all its steps.
          failed: True if an exception has kept this rank from making all its steps. Then the others raise when they
            begin a step that this rank has not made, unless ranks go on without a lost rank.
          abort: True if the job cannot go on: all ranks raise.
          final: True if this process does not train again.
        """
        self._interrupted = False
        message = membership_pb2.Leave(
            rank=self.rank,
            session=self.session,
            sent_rounds=sent_rounds,
            abort=abort,
            final=final,
            reason=reason,
            incarnation=self.incarnation,
            num_rounds=self.num_rounds,
            failed=failed,
            cause=self._cause if abort else "",
        )
        self._left = message
        if isinstance(self._failure, PeerFailedError):
            self._failure = None  # The next session may begin with all ranks.
        elif self.is_left_behind:
            self._failure = PeerLostError(str(self._failure))  # It is too late to join the others.
        if not self.joining:  # Otherwise no rank counts on this one.
            self._forward(message)

    @property
    def has_left(self) -> bool:
        """True if this rank no longer takes part in the session."""
        return self._left is not None

    def begin_round(self, number: int) -> None:
        """Called when this rank begins a round of the session: a step, or a scheme's unit of several steps.

        Raises:
          PeerFailedError: If a rank has failed before this round, and ranks do not go on without a lost rank.
        """
        with self.monitor:
            self.num_rounds = max(self.num_rounds, number + 1)  # Threads and groups may begin rounds out of order.
            for rank in () if self.continue_without_lost else sorted(self.departed()):
                departure = self.departure(rank)
                if departure.failed and departure.num_rounds <= number:
                    raise PeerFailedError(
                        f"rank {self.rank}: rank {rank} has failed, and the other ranks do not continue without it: "
                        f"{departure.reason}"
                    )

    def hear_of_lost(self, server: int, lost: Mapping[int, str]) -> None:
        """Records the ranks that a parameter server goes on without, with reasons. Logs and counts new ones."""
        with self.monitor:
            known = set().union(*self._lost_to.values())
            self._lost_to[server] = set(lost)
            for rank in sorted(lost.keys() - known - {self.rank}):
                self.num_lost += 1
                self._note_event(Kind.LOSS, rank, lost[rank])
                logging.warning("rank %d: the servers continue without rank %d: %s", self.rank, rank, lost[rank])

    def missing(self) -> set[int]:
        """The ranks that do not make this rank's next step: they are lost, or have left after fewer steps."""
        missing = set().union(*self._lost_to.values())
        for rank in self.departed():
            departure = self.departure(rank)  # None if it has joined again meanwhile.
            if departure is not None and (departure.lost or departure.num_rounds <= self.num_rounds):
                missing.add(rank)
        return missing - {self.rank}

    def missed_share(self) -> dict[int, float]:
        """The fraction of this rank's rounds that each other rank has missed. Only ranks that have missed some."""
        with self.monitor:
            missed = collections.Counter(self._missed)
            for rank in self.departed():
                missed[rank] += self.num_rounds - self.departure(rank).num_rounds
            return {rank: number / self.num_rounds for rank, number in sorted(missed.items()) if number > 0}

    # Restarted ranks.

    def on_restart(self, peer: int) -> None:
        """Called when another process has taken the place of `peer`: the previous process is lost."""
        if peer not in (*self.peers, *self.servers):
            return  # The peers of that rank report the restart. They may have admitted the new process already.
        with self.monitor:
            self._ready[peer] = self._gathered[peer] = 0
            departure, leave = self.departure(peer), None
            if self._begun_session and (departure is None or not departure.lost):
                leave = self._depart(peer, PeerLostError(f"rank {peer} was restarted"))
        if leave is not None:
            self._forward(leave, learned_from=peer)
        elif self.session and not self._begun_session:  # Nothing is lost yet: the new process begins with the others.
            self._tell_ready(peer)
            if self._has_gathered and peer == self._parent:
                self._tell_gathered(peer)

    def _tell_of_session(self, newcomer: int) -> None:
        """Tells a restarted rank that the session is running, and the ranks that take part."""
        with self.monitor:
            leaves = [leave for leave in self._leaves() if leave.rank != newcomer]
            ready = membership_pb2.Ready(
                session=self.session,
                under_way=True,
                incarnations=self.incarnations,
                seed=self.seed,
                owners=self.owners,
            )
        for leave in leaves:
            self.notify(newcomer, LEAVE_QUEUE, leave.SerializeToString())
        self.notify(newcomer, _READY, ready.SerializeToString())

    def tell_of_lost(self, rank: int) -> None:
        """Tells a rank which ranks count as lost here. That rank hears of them before the next message on lane 0.

        Former processes of ranks that take part again count as lost, too. Does not block for long.
        """
        with self.monitor:
            lost = self._departures.lost()
            leaves = [self._departures.leave_of(*each) for each in lost.items()]
            former = Departure({}, "it was restarted", final=True, lost=True, num_rounds=self.num_rounds)
            for other, incarnation in self._departures.incarnations.items():
                if incarnation and other not in lost:
                    leaves.append(self._departures.leave_of(other, former, incarnation=incarnation - 1))
        for leave in leaves:
            self.notify(rank, LEAVE_QUEUE, leave.SerializeToString())

    def _leaves(self) -> list[membership_pb2.Leave]:
        """The messages that tell a newcomer about the ranks that do not take part."""
        leave_of = self._departures.leave_of
        leaves = [leave_of(rank, self.departure(rank)) for rank in self.departed()]
        if self.joining:
            departure = Departure({}, "it is joining itself", final=True, lost=True)
            leaves.append(leave_of(self.rank, departure, incarnation=self.present_incarnation))
        elif self._left is not None:
            leaves.append(self._left)
        return leaves

    def begin_again(self) -> None:
        """Makes this rank, which was left behind, join the session in the same way as a restarted process."""
        with self.monitor:
            self._failure, self.is_given_up, self.joining = None, False, True
            self.incarnation += 1
            for rank in self._found_lost:
                self._departures.forget(rank)
            self.num_lost -= len(self._found_lost)
            self._found_lost.clear()

    def joined(self) -> None:
        """Called when this rank takes part from now on, and is no longer joining."""
        with self.monitor:
            self.joining = False
            self._departures.version += 1  # `present_incarnation` has changed.

    def readmit(self, join: membership_pb2.Join) -> bool:
        """Admits a restarted rank. Returns False if there is nothing new to admit. The monitor must be held.

        Also returns False while the transport knows only the peer's previous process. Messages to the new process would
        be dropped together with the messages in flight to the previous process. The new process announces itself to
        this rank later.
        """
        rank = join.rank
        if join.session != self.session or rank == self.rank or join.incarnation <= self.incarnation_of(rank):
            return False
        if rank in self.peers and self.transport.status(rank).incarnation not in (None, join.transport_incarnation):
            return False
        departure = self.departure(rank)
        if departure is None:  # This rank has not heard yet that the former incarnation was lost.
            self.num_lost += 1
        elif join.first_steps:
            self._missed[rank] += max(0, min(join.first_steps.values()) - departure.num_rounds)
        self._departures.begin_incarnation(rank, join.incarnation)
        self.num_joined += 1
        self._note_event(Kind.JOIN, rank, "")
        logging.warning("rank %d: rank %d has rejoined.", self.rank, rank)
        self.monitor.notify_all()
        return True

    def require_all(self, operation: str) -> None:
        """Raises PeerLostError if a rank was lost, the others went on without it, and the rank has not joined again."""
        if self.joining:
            raise PeerLostError(f"rank {self.rank}: {operation} needs all ranks, and this rank has not rejoined them.")
        # Before the first session, losses do not count: ranks in a running session let this process join them.
        for rank, departure in self._departures.lost().items() if self._begun_session else ():
            raise PeerLostError(
                f"rank {self.rank}: {operation} needs all ranks, and rank {rank} was lost: {departure.reason}"
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
                if not self._begun_session:  # Earlier departures are of its former process.
                    self._departures.forget(message.sender)
                    self._heard_early = [leave for leave in self._heard_early if leave.rank != message.sender]
            self.monitor.notify_all()
        if is_newcomer:
            self._tell_of_session(message.sender)

    def _on_gathered(self, message: Message) -> None:
        gathered = parse(membership_pb2.Gathered, message)
        with self.monitor:
            self._gathered[message.sender] = gathered.session
            if message.sender == self._parent:
                self.seed, self.owners = gathered.seed, dict(gathered.owners)
            else:
                for claim, rank in gathered.owners.items():
                    self.owners[claim] = min(rank, self.owners.get(claim, rank))
            self.monitor.notify_all()

    def _learn_of_session(self, ready: membership_pb2.Ready) -> None:
        """Called when others train already, because this process was started again."""
        if self._begun_session and not self.joining:
            return  # This process has joined by now.
        self.joining = True
        self.session, self.seed, self.owners = ready.session, ready.seed, dict(ready.owners)
        for rank, incarnation in ready.incarnations.items():
            if rank != self.rank:
                self._departures.begin_incarnation(rank, incarnation)
        self.incarnation = max(self.incarnation, ready.incarnations.get(self.rank, 0) + 1)

    def _on_leave(self, message: Message) -> None:
        leave = parse(membership_pb2.Leave, message)
        if not 0 <= leave.rank < self.world_size:
            raise ProtocolError(
                f"rank {message.sender} announced that rank {leave.rank} leaves, but there is no such rank."
            )
        end = self._departures.end_of(message.sender)
        if leave.lost and end is not None and end.lost:
            return  # A rank that was frozen finds the others silent, although they are not lost.
        if leave.rank == self.rank and leave.lost:
            if self._begun_session and leave.incarnation == self.incarnation:  # Otherwise about an earlier process.
                self._hear_of_own_loss(f"rank {self.rank}: the other ranks continued without this rank: {leave.reason}")
            return
        with self.monitor:
            if leave.lost:
                self._found_lost.discard(leave.rank)
            news = self._record(leave)
        if news:
            self._forward(leave, learned_from=message.sender)

    def _hear_of_own_loss(self, text: str) -> None:
        with self.monitor:
            if self.is_left_behind:
                return
            self.is_given_up = True
            if self._patience is None or self.has_left or self._failure is not None:
                self.fail(PeerLostError(text))
                return
            logging.warning("%s This rank rejoins them.", text)
            self.num_left_behind += 1
            self._failure = LeftBehind(text)
            self.monitor.notify_all()

    def _record(self, leave: membership_pb2.Leave) -> bool:
        """Remembers a departure. Returns False if it was known."""
        if leave.rank == self.rank:
            return False
        is_news = self._departures.note(leave)
        # A rank may abort the job after it has left the session, as in `synchronize`.
        if not is_news and (self._failure is not None or not leave.abort):
            return False
        if leave.abort and self._failure is None:
            self._cause = self._cause or leave.cause or f"rank {leave.rank} gave up: {leave.reason}"
            self.fail(PeerLostError(f"rank {self.rank}: training ended because {self._cause}"))
        elif self._begun_session or self.joining:
            self._note_end(leave)
        else:
            self._heard_early.append(leave)
        self.monitor.notify_all()
        return True

    def _note_end(self, leave: membership_pb2.Leave) -> None:
        if leave.lost:
            self.num_lost += 1
            self._note_event(Kind.LOSS, leave.rank, leave.reason)
            self._note_missing(leave, "was lost")
        elif leave.reason and not leave.final and (self.continue_without_lost or not leave.failed):
            self.num_left += 1
            self._note_event(Kind.LEAVE, leave.rank, leave.reason)
            self._note_missing(leave, "has left")

    def _note_event(self, kind: Kind, rank: int, reason: str) -> None:
        if self.recorder is not None:
            self.recorder.add(kind, self.recorder.now(), peer=rank)
            self.recorder.add_line(kind.name.lower(), rank=rank, reason=reason)

    def _note_missing(self, leave: membership_pb2.Leave, what: str) -> None:
        """Logs that a rank is missing. Fails if too few ranks remain: the remaining ranks may be cut off."""
        if self._failure is not None or self._left is not None:
            return  # This rank itself does not go on.
        missing = self._quorum.missing()
        if too_few := self._quorum.too_few_without(0):
            reasons = "; ".join(f"rank {rank}: {reason}" for rank, reason in missing.items())
            self.is_given_up = True  # Other ranks that train on do so without this one.
            self.fail(
                PeerLostError(
                    f"rank {self.rank}: {too_few} The missing ranks may train on, on the other side of a network "
                    f"partition. Missing: {reasons}. Restart these ranks."
                )
            )
            return
        logging.warning(
            "rank %d: rank %d %s: %s The others %s its part of the data, 1/%d.%s",
            self.rank,
            leave.rank,
            what,
            leave.reason if leave.reason.endswith(".") else f"{leave.reason}.",
            "now share" if self.divides_anew() else "continue without",
            self.world_size,
            " This rank trains alone now." if len(missing) == self.world_size - 1 else "",
        )

    def _forward(self, leave: membership_pb2.Leave, learned_from: int | None = None) -> None:
        # A rank that counts as lost may be alive, and must hear that it counts as lost.
        itself = None if leave.lost else leave.rank
        data = leave.SerializeToString()
        self._notify_all(self._receivers_of(leave), LEAVE_QUEUE, data, except_for=(learned_from, itself))

    def _receivers_of(self, leave: membership_pb2.Leave) -> Sequence[int]:
        """The processes that this rank tells of a departure. Servers hear of it from the leaving rank alone."""
        if leave.rank == self.rank:
            return (*self.peers, *self.servers)
        if leave.lost or not self._all_are_peers:
            return self.peers
        # The leaving rank has told all ranks, unless it died meanwhile. If all passed the news on to all, the end of a
        # `fit` would take n^3 messages.
        return relays(self.rank, self.world_size)


def parse(message_type: type[_Parsed], message: Message) -> _Parsed:
    """Parses the header of `message`. Raises ProtocolError if the header is not of that type."""
    try:
        return message_type.FromString(message.header)
    except Exception as error:
        raise ProtocolError(f"rank {message.sender} sent a malformed message to {message.queue!r}: {error}.") from error

"""`Joining`: lets a rank that was started again take part in a running session.

The new process skips the steps that the others have made, on its own (`Membership.joining`), and repeatedly asks for
their positions. When it is near, it takes the state of the furthest peer at the start of that peer's next step k. The
newcomer announces to all that it enters step k + 1. Each of its peers makes room for the newcomer, and answers with its
own step. From then on, the peer sends the messages of later steps to the newcomer, too. When all present peers have
answered, the newcomer is one of them. Before that, no rank waits for the newcomer, and no rank stops.

All synchronous ranks have to include the newcomer from the same step on, and the newcomer needs the state of this step.
So the newcomer first announces its presence. The others agree on its first step (see `hop_tf.runtime.admissions`), and
tell the newcomer, which skips the earlier steps. Before the newcomer's first step, the others wait (`meet`) until it
has the state. This state is equal on all of them.
"""

from __future__ import annotations

import collections
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np
from absl import logging

from hop_tf.errors import HopError, MismatchError, PeerLostError
from hop_tf.membership import membership_pb2
from hop_tf.membership.session import Membership, parse
from hop_tf.runtime.joiner import GraphState, Joiner, State
from hop_tf.runtime.replica_state import compare
from hop_tf.tensors import payloads
from hop_tf.transport.base import BULK_LANE, Message

_JOIN = "joining/join"
_WELCOME = "joining/welcome"
_REQUEST = "joining/request"
_REPLY = "joining/reply"
_ARRIVED = "joining/arrived"
_ARRIVAL = struct.Struct("<qq")  # Session, incarnation of the sender.
# Skipping this many steps takes only a moment, for which the others may have to wait.
_NEAR_STEPS = 16
# The limit is for others whose steps are as fast as skipped steps, so that a newcomer never comes near.
_MAX_APPROACHES = 8
_RETRY_SECONDS = 0.1
_AHEAD_SECONDS = 0.02
_NOT_THERE = -1

_Exchange = TypeVar("_Exchange")


class Joining:
    """Both sides of joining, at one rank.

    Args:
      membership: The rank's membership.
      state: The state that newcomers take.
      timeout_seconds: Time for which a newcomer waits until one of its peers is present.

    Attributes:
      counts: Counts that are equal on all ranks, for instance of collectives. Newcomers take them over.
    """

    def __init__(self, membership: Membership, state: State, timeout_seconds: float):
        self._membership = membership
        self._monitor = membership.monitor
        self._transport = membership.transport
        self._state = state
        self._timeout_seconds = timeout_seconds
        self._exchanges: dict[str, Joiner] = {}
        self._graphs: dict[str, GraphState] = {}
        self._step = _NOT_THERE
        self._asking_for_state: list[int] = []
        self._replies: dict[int, tuple[membership_pb2.StateReply, np.ndarray]] = {}
        self._welcomed: set[int] = set()
        self._arrived: dict[int, int] = {}  # By rank: the incarnation that has last announced to have the state.
        self._joins: dict[int, membership_pb2.Join] = {}  # The latest message of every rank that has joined.
        self._num_approaches = 0
        self.counts: collections.Counter[str] = collections.Counter()
        for queue, handler in {
            _JOIN: self._on_join,
            _WELCOME: self._on_welcome,
            _REQUEST: self._on_request,
            _REPLY: self._on_reply,
            _ARRIVED: self._on_arrived,
        }.items():
            self._transport.register(queue, handler)

    def attach(self, group: str, make_exchange: Callable[[], _Exchange]) -> _Exchange:
        """Makes a group's exchange. An exchange that is a `Joiner` hears of all newcomers, including earlier ones.

        Args:
          group: Name of the group.
          make_exchange: Makes the exchange, which may take messages from then on.

        Returns:
          The exchange.

        Raises:
          PeerLostError: If this process was started again, and the scheme lets no rank join.
        """
        with self._monitor:  # The exchange must hear of newcomers before it takes messages from them.
            exchange = make_exchange()
            if not (isinstance(exchange, Joiner) and exchange.lets_join):
                if self._membership.joining:
                    exchange.close()
                    raise PeerLostError(
                        f"rank {self._membership.rank} was restarted and cannot join: the others train on without it, "
                        "and their strategy does not admit restarted ranks. Restart all ranks to train with this one."
                    )
                return exchange
            self._exchanges[group] = exchange
            welcomes = {join.rank: self._admit(join) for join in self._joins_of(group)}
        self._answer(welcomes)
        return exchange

    def connect(self, group: str, graph: GraphState) -> None:
        """Adds the state of a group's graph to the state that newcomers take."""
        with self._monitor:
            self._graphs[group] = graph

    def _graph_of(self, group: str) -> GraphState:
        with self._monitor:
            return self._graphs.get(group) or GraphState()  # There is none in simulations.

    def _joins_of(self, group: str) -> list[membership_pb2.Join]:
        """The join messages of present ranks."""
        return [join for join in self._joins.values() if group in join.first_steps and self._is_present(join)]

    def _is_present(self, join: membership_pb2.Join) -> bool:
        membership = self._membership
        is_latest = join.session == membership.session and join.incarnation == membership.incarnation_of(join.rank)
        return is_latest and membership.departure(join.rank) is None

    @property
    def is_to_begin_again(self) -> bool:
        """True if the others have left this rank behind, and `begin_again` was not called since."""
        return self._membership.is_left_behind

    def begin_again(self) -> None:
        """Makes this rank, which was left behind, join the others in the same way as a restarted process."""
        self._membership.begin_again()
        self.end_session()
        with self._monitor:
            for group, exchange in self._exchanges.items():
                exchange.reset(self._membership.session)
                for join in self._joins_of(group):  # Other ranks that join may need this rank's vote.
                    exchange.admissions.note(join.rank)

    def detach(self, group: str) -> None:
        """Forgets a group that has ended."""
        with self._monitor:
            self._exchanges.pop(group, None)
            self._graphs.pop(group, None)

    # The newcomer.

    def catch_up(self, group: str, position: int) -> int:
        """Called when the first `position` steps have been skipped.

        Returns:
          The number of further steps to skip before the next call, or, if the rank has joined, before its first
          training step. 0 if there is nothing to do.

        Blocks: until the others have answered.

        Raises:
          PeerLostError: If no peer is left.
          MismatchError: If the others train another model.
        """
        exchange = self._exchanges.get(group)
        if not self._membership.joining:
            return self._arrive(group, position) if exchange is not None and exchange.is_synchronous else 0
        while True:
            replies = self._ask(position)
            leader = max(replies, key=lambda rank: replies[rank].step)
            num_behind = replies[leader].step + 1 - position
            if num_behind < 0:  # A rank that was left behind may be ahead of all others.
                self._pause(_AHEAD_SECONDS)
                continue
            if num_behind > _NEAR_STEPS and self._num_approaches < _MAX_APPROACHES:
                self._num_approaches += 1
                return num_behind
            if exchange.is_synchronous:
                self._check_digest(
                    leader, replies[leader]
                )  # Now: once the others wait for this rank, its errors end their training, too.
                self._enter(group, position)
                return self._arrive(group, position)
            if (given := self._take_state(leader, position)) is not None:
                start = max(position, given[0] + 1)
                self._enter(group, start)
                logging.info("rank %d: joins at step %d.", self._membership.rank, start)
                return start - position

    def _pause(self, seconds: float) -> None:
        with self._monitor:
            self._monitor.wait(seconds, self._monitor.now() + seconds)

    def join_at_once(self, group: str) -> None:
        """Joins at step 0, for a scheme whose ranks have no state of their own, and need not make the same steps.

        Blocks: until the others have answered.
        """
        replies = self._request(self._present(), membership_pb2.StateRequest(), 0)
        for reply, _ in replies.values():
            self.counts |= collections.Counter(dict(reply.counts))
        self._enter(group, 0)
        logging.info("rank %d: joins.", self._membership.rank)

    def _check_digest(self, peer: int, reply: membership_pb2.StateReply) -> None:
        if reply.signature_digest != zlib.crc32(self._signature()):
            raise MismatchError(
                f"rank {self._membership.rank} was restarted and cannot join: rank {peer} trains another model, or "
                "uses other or more optimizers. Start the same script as before. A restarted rank joins in its first "
                "`fit`."
            )

    def _ask(self, position: int) -> dict[int, membership_pb2.StateReply]:
        """Asks the present peers for their steps. Returns the replies of those that train, which is at least one."""
        deadline = self._monitor.now() + self._timeout_seconds
        while True:
            # Lost peers may be joining as well.
            self._membership.wait_until(self._present, deadline - self._monitor.now())
            replies = self._request(self._present(), membership_pb2.StateRequest(), position)
            train = {rank: reply for rank, (reply, _) in replies.items() if reply.step != _NOT_THERE}
            if train:
                return train
            if self._monitor.now() >= deadline:
                raise PeerLostError(
                    f"rank {self._membership.rank} was restarted and cannot join: none of its peers "
                    f"{list(self._membership.peers)} still trains."
                )
            with self._monitor:
                self._monitor.wait(_RETRY_SECONDS, deadline)

    def _take_state(self, peer: int, position: int) -> tuple[int, np.ndarray] | None:
        """Takes over `peer`'s state.

        Returns:
          The step at whose start the peer has read the state, and the bytes that the exchange has added; None if the
          peer is gone.
        """
        replies = self._request([peer], membership_pb2.StateRequest(wants_state=True), position)
        if peer not in replies or not replies[peer][0].has_state:
            return None
        reply, payload = replies[peer]
        signature, arrays = payload[: reply.signature_bytes], payload[reply.signature_bytes :]
        try:
            compare(self._transport, self._signature(), peer, signature.tobytes())
        except MismatchError as error:
            raise MismatchError(f"{error} A restarted rank joins in its first `fit`.") from None
        self._state.write(arrays[: reply.state_bytes])
        self.counts = collections.Counter(dict(reply.counts))
        return reply.step, arrays[reply.state_bytes :]

    def _arrive(self, group: str, position: int) -> int:
        """Does the work of `catch_up` if ranks are synchronous and know this rank's new process."""
        exchange = self._exchanges[group]
        while (step := exchange.admissions.own_first_step) is None:
            exchange.admissions.wait_for_first_step(self._ask(position))
        if step > position:
            return step - position
        given = None
        while given is None:
            giver = min(self._ask(position))
            given = self._take_state(giver, position)
        _, added = given
        num_of_graph, *parts = payloads.split(added)
        num_of_exchange = len(parts) - int(num_of_graph.view(np.int64)[0])
        with self._monitor:
            exchange.take_common_state(parts[:num_of_exchange])
            exchange.begin_at(step)
            self._step = step - 1
        graph = self._graph_of(group)
        graph.take_state(parts[num_of_exchange:])
        graph.begin_at(step)
        arrival = _ARRIVAL.pack(self._membership.session, self._membership.incarnation)
        self._membership.notify_peers(_ARRIVED, arrival)
        logging.info("rank %d: joins at step %d.", self._membership.rank, step)
        self.meet(group, step)  # Others may join there, too.
        return 0

    def _signature(self) -> bytes:
        with self._monitor:
            return self._state.signature(" ".join(sorted(self._exchanges)))

    def _request(
        self, peers: Sequence[int], request: membership_pb2.StateRequest, position: int
    ) -> Mapping[int, tuple[membership_pb2.StateReply, np.ndarray]]:
        """Asks peers. Returns the answers of those that are still present."""
        with self._monitor:
            self._replies = {}
            asked = {peer: self._membership.incarnation_of(peer) for peer in peers}
        for peer in peers:
            self._membership.send(peer, _REQUEST, request.SerializeToString(), step=position)

        def missing() -> list[int]:
            # A new process of a peer, which has joined meanwhile, was not asked.
            there = [peer for peer in self._present() if asked.get(peer) == self._membership.incarnation_of(peer)]
            return [peer for peer in there if peer not in self._replies]

        self._membership.wait(missing, operation="receive state", step=position)
        with self._monitor:
            replies, self._replies = self._replies, {}
        return replies

    def _enter(self, group: str, step: int) -> None:
        """Takes part from `step` on. Synchronous ranks will tell this rank its first step instead."""
        membership, exchange = self._membership, self._exchanges[group]
        with self._monitor:
            self._welcomed = set()
            if not exchange.is_synchronous:
                self._step = step - 1
                exchange.begin_at(step)
            membership.joined()
        if not exchange.is_synchronous:
            self._graph_of(group).begin_at(step)
        join = membership_pb2.Join(
            rank=membership.rank,
            session=membership.session,
            incarnation=membership.incarnation,
            first_steps={group: step},
            transport_incarnation=membership.transport.incarnation,
            incarnations=membership.incarnations,
        )
        membership.notify_peers(_JOIN, join.SerializeToString())
        membership.wait(
            lambda: [peer for peer in self._present() if peer not in self._welcomed], operation="join", step=step
        )

    def _present(self) -> list[int]:
        return [peer for peer in self._membership.peers if self._membership.departure(peer) is None]

    # The others.

    def at_step(self, step: int) -> None:
        """Called when this rank begins `step`. Sends its state to newcomers that have asked for it.

        Raises:
          HopError: If this rank has left the session: the others would not hear of the step.
          PeerFailedError: See `Membership.begin_round`.
        """
        if self._membership.has_left:
            raise HopError(
                f"rank {self._membership.rank}: step {step} was made after the end of `fit`, outside of any session, "
                "so the others would not get its update. Continue by `fit`, or by a custom loop with another optimizer."
            )
        self._membership.begin_round(step)
        with self._monitor:
            self._step = step
            if any(exchange.is_synchronous for exchange in self._exchanges.values()):
                return  # Newcomers get the state when all ranks meet.
            asking, self._asking_for_state = self._asking_for_state, []
        if asking:
            self._give_state(asking, step)

    def meet(self, group: str, step: int) -> None:
        """Called when all steps before `step` are made and merged. Gives the state to ranks that begin with `step`.

        Blocks: until all of these have the state, or are lost.

        Raises:
          HopError: As `Membership.wait` does.
        """
        exchange = self._exchanges[group]
        if exchange.roster is not None:  # The roster is a part of the state that newcomers get.
            with self._monitor:
                admitted = exchange.admissions.admitted_at(step)
            exchange.roster.admit(admitted)

        def awaited() -> list[int]:
            incarnation_of = self._membership.incarnation_of
            newcomers = exchange.admissions.newcomers_of(step)
            return [rank for rank in newcomers if self._arrived.get(rank) != incarnation_of(rank)]

        def asking() -> list[int]:
            return [rank for rank in awaited() if rank in self._asking_for_state]

        while True:
            operation = "bring a restarted rank to this step"
            self._membership.wait(lambda: [] if asking() else awaited(), operation=operation, step=step)
            with self._monitor:
                ranks = asking()
                self._asking_for_state = [rank for rank in self._asking_for_state if rank not in ranks]
            if not ranks:
                return
            of_graph = self._graph_of(group).state()
            added = [np.array([len(of_graph)]), *exchange.common_state(), *of_graph]
            self._give_state(ranks, step, payloads.join(added))

    def _give_state(self, ranks: Sequence[int], step: int, added: Sequence[np.ndarray] = ()) -> None:
        signature, arrays = np.frombuffer(self._signature(), np.uint8), self._state.read()
        reply = membership_pb2.StateReply(
            step=step,
            has_state=True,
            signature_bytes=signature.size,
            state_bytes=sum(array.nbytes for array in arrays),
            counts=self.counts,
        )
        for rank in ranks:
            payload = [signature, *arrays, *added]
            self._membership.send_to_newcomer(rank, _REPLY, reply.SerializeToString(), payload, lane=BULK_LANE)

    def end_session(self) -> None:
        """Called when this rank stops training. Ranks that have asked for its state learn this from its departure."""
        with self._monitor:
            self._step = _NOT_THERE
            self._asking_for_state = []
            self._num_approaches = 0

    # Messages.

    def _on_request(self, message: Message) -> None:
        request = parse(membership_pb2.StateRequest, message)
        with self._monitor:
            is_there = not (self._membership.joining or self._membership.is_left_behind)
            step = self._step if is_there else _NOT_THERE
            if request.wants_state and step != _NOT_THERE:
                self._asking_for_state.append(message.sender)
                self._monitor.notify_all()
                return
            digest = 0 if step == _NOT_THERE else zlib.crc32(self._signature())
        reply = membership_pb2.StateReply(step=step, counts=self.counts, signature_digest=digest)
        self._membership.notify(message.sender, _REPLY, reply.SerializeToString())

    def _on_reply(self, message: Message) -> None:
        reply = parse(membership_pb2.StateReply, message)
        with self._monitor:
            self._replies[message.sender] = reply, message.payload
            self._monitor.notify_all()

    def _on_arrived(self, message: Message) -> None:
        if len(message.header) != _ARRIVAL.size:
            raise message.unexpected()
        session, incarnation = _ARRIVAL.unpack(message.header)
        with self._monitor:
            if session == self._membership.session:
                self._arrived[message.sender] = incarnation
            self._monitor.notify_all()

    def _on_join(self, message: Message) -> None:
        join = parse(membership_pb2.Join, message)
        membership = self._membership
        with self._monitor:
            if not membership.readmit(join):
                return
            self._joins[join.rank] = join
            # This rank needs no welcome from a newcomer that knows this rank's present process.
            if join.incarnations.get(membership.rank, 0) == membership.incarnation:
                self._welcomed.add(join.rank)
            welcome = self._admit(join)
        membership.notify_peers(_JOIN, message.header, except_for=(message.sender, join.rank))
        self._answer({join.rank: welcome})

    def _admit(self, join: membership_pb2.Join) -> membership_pb2.Welcome | None:
        """Makes room for a newcomer. Returns None if this rank lacks a group: it answers when it makes the group."""
        if not join.first_steps.keys() <= self._exchanges.keys():
            return None
        steps = {group: self._exchanges[group].admit(join.rank, step) for group, step in join.first_steps.items()}
        return membership_pb2.Welcome(
            incarnation=join.incarnation, steps=steps, sender_incarnation=self._membership.present_incarnation
        )

    def _answer(self, welcomes: Mapping[int, membership_pb2.Welcome | None]) -> None:
        for rank, welcome in welcomes.items():
            if welcome is not None and rank in self._membership.peers:
                self._membership.notify(rank, _WELCOME, welcome.SerializeToString())

    def _on_welcome(self, message: Message) -> None:
        welcome = parse(membership_pb2.Welcome, message)
        with self._monitor:
            if welcome.incarnation != self._membership.incarnation:
                return
            is_present = welcome.sender_incarnation == self._membership.incarnation_of(message.sender)
            for group, step in welcome.steps.items():
                if group in self._exchanges and is_present:  # Otherwise the sender itself has rejoined meanwhile.
                    self._exchanges[group].meet(message.sender, step)
            self._welcomed.add(message.sender)
            self._monitor.notify_all()

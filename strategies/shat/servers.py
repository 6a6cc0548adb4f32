"""`Servers`: what a worker asks the parameter servers, and how it waits for their answers."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from absl import logging

from hop_tf.collectives import BULK_LANE
from hop_tf.errors import HopError, MismatchError, PeerLostError
from hop_tf.membership import Interrupted, parse
from hop_tf.runtime.group import ExchangeContext
from hop_tf.strategies.shat.requests import Configuration, Request
from hop_tf.strategies.shat.server import parameter_server_pb2 as pb
from hop_tf.strategies.shat.server.server import CONFIGURE, CONFIGURED, PREFIX, PULL, PULLED, PUSH, REPLY
from hop_tf.strategies.shat.shards import ShardView
from hop_tf.tensors import payloads
from hop_tf.transport.base import Message

# For each queue of requests, that of the answers, without the group, and their type.
_ANSWERS = {CONFIGURE: (CONFIGURED, pb.Configured), PUSH: (REPLY, pb.Reply), PULL: (PULLED, pb.Pulled)}
# An answer that has not come for so long is asked for again, or later where answers take longer.
_RETRY_SECONDS = 10.0

# By server: the message and its payload.
Answers = dict[int, tuple[object, np.ndarray]]


class Servers:
    """The servers of a group.

    A server that was restarted is configured again, and then gets the request once more that is under way. Until the
    first push is answered, a worker has all that it needs to begin anew. From then on it needs a snapshot, and is told
    which pushes were answered: what it has applied of the others is in the snapshot, and the rest is lost.

    Args:
      context: Membership and name of the group.
      shards: What each server that has something to keep does keep.

    Attributes:
      shards: The same.
      session: The running session.
      is_configured: Whether the servers keep the group.
      num_retries: How often a request was sent again.
    """

    def __init__(self, context: ExchangeContext, shards: Sequence[ShardView]):
        self._membership = context.membership
        self._group = context.group
        self.shards = shards
        self.session = context.session
        self.is_configured = False
        self.num_retries = 0
        # What each server was told to keep, without states once a push was answered; those that have forgotten it.
        self._configurations: dict[int, Configuration] = {}
        self._is_new = True
        self._restarted: set[int] = set()
        # In the session: how many pushes were answered, and whether the servers may have heard of it from this rank.
        self._num_answered = 0
        self._has_entered = False
        # Of each server that has answered what it keeps: whether that came from a snapshot.
        self._is_under_way: dict[int, bool] = {}
        self._received: dict[str, Answers] = {queue: {} for queue in _ANSWERS}
        self._retry_seconds = _RETRY_SECONDS
        for queue in _ANSWERS:
            self._membership.transport.register(self._answers_to(queue), functools.partial(self._on_answer, queue))

    def begin_session(self, session: int) -> None:
        """This rank is about to enter a session."""
        with self._membership.monitor:
            self.session, self._num_answered, self._has_entered = session, 0, False
            for shard in self.shards:
                shard.clock = 0

    def close(self) -> None:
        """Takes no more answers."""
        for queue in _ANSWERS:
            self._membership.transport.unregister(self._answers_to(queue))

    def _answers_to(self, queue: str) -> str:
        return f"{PREFIX}/{self._group}/{_ANSWERS[queue][0]}"

    def _on_answer(self, queue: str, message: Message) -> None:
        answer = parse(_ANSWERS[queue][1], message)
        with self._membership.monitor:
            self._received[queue][message.sender] = answer, message.payload
            self._membership.monitor.notify_all()

    @contextlib.contextmanager
    def giving_up_alone(self) -> Iterator[None]:
        """Whoever loses a server does not end the others' training: they see for themselves whether it is there."""
        try:
            yield
        except PeerLostError:
            self._membership.is_given_up = True
            raise

    def name(self, server: int) -> str:
        """How messages name a server: its index and address."""
        address = self._membership.transport.status(server).address
        return f"ps {self._membership.servers.index(server)} at {address}"

    # Requests.

    def call(self, request: Request) -> Answers:
        """Asks all servers of a request, and takes their answers as `receive` does."""
        for shard in request.shards:
            self.send(request, shard)
        return self.receive(request)

    def send(self, request: Request, shard: ShardView, is_missing: bool = True) -> None:
        """Sends a request to a server; `is_missing` as in `Request.message`."""
        self._has_entered = True
        header, payload = request.message(shard, is_missing)
        self._membership.send(shard.server, request.queue, header, payload, lane=BULK_LANE, step=request.step)

    def receive(self, request: Request) -> Answers:
        """Takes the answers to a request that was sent; sends it again where it, or the answer, was lost.

        Blocks: until all servers have answered.

        Raises:
          HopError: As `Membership.wait`, and where a restarted server cannot be configured again.
          Interrupted: As there.
        """
        monitor = self._membership.monitor
        since = monitor.now()
        retry_at = since + self._retry_seconds if request.retries else math.inf
        has_repeated = False
        while True:
            self._await(request, since, retry_at)
            if restarted := self.reconfigure(request):
                for shard in restarted:
                    self.send(request, shard)
                continue
            answers, missing = self._take(request)
            if not missing:
                break
            for shard, is_missing in missing.items():
                self.send(request, shard, is_missing)
            self.num_retries += len(missing)
            has_repeated = True
            if not all(missing.values()):
                # Where answers are only slow, one for each time that they were asked for would slow them down more.
                self._retry_seconds *= 2
            retry_at = monitor.now() + self._retry_seconds
        if request.retries and not has_repeated:
            self._retry_seconds = max(_RETRY_SECONDS, 2 * (monitor.now() - since))
        return answers

    def _await(self, request: Request, since: float, retry_at: float) -> None:
        """Waits until all answers are there, or something is to be sent again."""
        membership = self._membership

        def awaited() -> list[int]:
            if membership.monitor.now() >= retry_at or self._lacking(request) or self._restarted_of(request):
                return []
            servers = [shard.server for shard in self._absent(request)]
            # What became of one that has left, servers know better: they have what it had for them, or say so.
            sources = [rank for rank in request.sources if membership.departure(rank) is None]
            return [*servers, *sources] if servers else []

        membership.wait(awaited, operation=request.operation, step=request.step, since=since)

    def _take(self, request: Request) -> tuple[Answers, dict[ShardView, bool]]:
        """All answers; or else the servers whose answers are missing, and whether they lack the request."""
        with self._membership.monitor:
            received = self._received[request.queue]
            absent, lacking = self._absent(request), self._lacking(request)
            missing = {shard: shard not in absent for shard in request.shards if shard in absent or shard in lacking}
            if not missing:
                self._received[request.queue] = {}
                if request.queue == PUSH:
                    self._note_answers(request, received)
                return received, {}
            for shard in missing:
                received.pop(shard.server, None)
            return {}, missing

    def _note_answers(self, request: Request, answers: Answers) -> None:
        """Remembers what a server is to be told that is started again. The monitor must be held."""
        self._num_answered = request.step + 1
        for shard in self.shards:
            reply, _ = answers[shard.server]
            shard.num_pushes, shard.clock = reply.num_pushes, reply.clock

    def _absent(self, request: Request) -> list[ShardView]:
        """Servers that have not answered. The monitor must be held."""
        received = self._received[request.queue]
        return [s for s in request.shards if s.server not in received or not request.is_answer(received[s.server][0])]

    def _lacking(self, request: Request) -> list[ShardView]:
        """Servers that have answered that they have got no request. The monitor must be held."""
        received = self._received[request.queue]
        absent = self._absent(request)
        answered = [shard for shard in request.shards if shard not in absent]
        return [shard for shard in answered if getattr(received[shard.server][0], "is_missing", False)]

    def _restarted_of(self, request: Request) -> set[int]:
        """Servers of a request that were restarted. The monitor must be held."""
        return self._restarted & {shard.server for shard in request.shards}

    # Configuration, and servers that were restarted.

    def configure(self, configuration: Callable[[ShardView], Configuration], sources: Sequence[int]) -> Answers:
        """Tells the servers what to keep, and takes their state; blocks and raises as `GroupState.configure`.

        Args:
          configuration: Describes it to a server.
          sources: The other ranks that the servers have their state from.
        """
        with self._membership.monitor:
            self._is_new = True
            self._received[CONFIGURE] = {}
        request = self._configure_request(self.shards, sources)
        for shard in self.shards:
            shard.training = ""
            self._configurations[shard.server] = configuration(shard)
            self.send(request, shard)
        for rank in sources:
            self._membership.transport.connect(rank)
        answers = self._check_configured(self.receive(request))
        for shard in self.shards:
            shard.num_assigned = answers[shard.server][0].num_assigned
        self.is_configured = True
        return answers

    def _configure_request(self, shards: Sequence[ShardView], sources: Sequence[int] = ()) -> Request:
        return Request(
            queue=CONFIGURE,
            operation="receive state",
            message=lambda shard, is_missing: (b"", self._configuration(shard)),
            is_answer=lambda answer: answer.session == self.session,
            shards=shards,
            sources=sources,
        )

    def _configuration(self, shard: ShardView) -> Sequence[np.ndarray]:
        """The payload that configures a server now."""
        configuration = self._configurations[shard.server]
        with self._membership.monitor:
            now = pb.Configure(session=self.session, training=shard.training)
            now.MergeFrom(configuration.description)
            if not self._is_new:
                now.resumes, now.has_left = True, self._membership.has_left
                now.num_answered, now.clock = self._num_answered, shard.clock
                now.has_state = now.joins = False
        description = np.frombuffer(now.SerializeToString(deterministic=True), np.uint8)
        return payloads.join([description, *configuration.state])

    def _check_configured(self, answers: Answers) -> Answers:
        for server, (answer, _) in answers.items():
            if answer.error:
                error = MismatchError if answer.is_mismatch else HopError
                raise error(f"rank {self._membership.rank}: {self.name(server)}: {answer.error}")
            if not answer.is_resumed:
                self._is_under_way[server] = answer.is_under_way
            if answer.has_snapshots:
                self._membership.transport.expect_return(server)
        for shard in self.shards:
            if shard.server in answers:
                answer, _ = answers[shard.server]
                shard.training, shard.has_snapshots = answer.training, answer.has_snapshots
        self._check_snapshots()
        return answers

    def _check_snapshots(self) -> None:
        """All servers have gone on from snapshots, or none has."""
        with_snapshot, without = (
            [f"ps {shard.index}" for shard in self.shards if self._is_under_way.get(shard.server) is is_under_way]
            for is_under_way in (True, False)
        )
        if with_snapshot and without:
            raise HopError(
                f"rank {self._membership.rank}: {', '.join(with_snapshot)} went on from a snapshot, and "
                f"{', '.join(without)} found none: the model would be one half trained, the other new. Start the job "
                "again when the missing snapshots are in their directory, or remove the others to begin anew."
            )

    def goes_on_with(self, server: int) -> bool:
        """See `Exchange.goes_on_with`."""
        shard = next((shard for shard in self.shards if shard.server == server), None)
        if shard is None or not self._configurations:
            return True  # It keeps nothing that it could have lost.
        with self._membership.monitor:
            if not (self._is_new or shard.has_snapshots):
                return False
            self._restarted.add(server)
            self._forget_answers(server)
            self._membership.monitor.notify_all()
            is_new = self._is_new
        if self._has_entered and not is_new:
            self._announce(shard)
        return True

    def _announce(self, shard: ShardView) -> None:
        """Tells a server at once how far this rank is: it may have no request for long, and others may wait for it."""
        try:
            self.send(self._configure_request([shard]), shard)
        except (HopError, Interrupted) as error:  # The next request finds out, if there is one.
            logging.info("rank %d: could not configure %s: %s", self._membership.rank, self.name(shard.server), error)

    def resume(self) -> None:
        """Configures servers again that were restarted; blocks and raises as `configure`."""
        with self.giving_up_alone():
            self._configure_again(self._take_restarted(self.shards))

    def reconfigure(self, request: Request) -> list[ShardView]:
        """Configures those servers of a request again that were restarted; blocks and raises as `configure`.

        Args:
          request: What they are to be sent next. What they have answered to it before does not count.

        Returns:
          What they keep.
        """
        shards = self._take_restarted(request.shards)  # Others are for the request that this one is part of.
        if request.queue != CONFIGURE:
            self._configure_again(shards)  # They take no push before they have a state.
        with self._membership.monitor:
            for shard in shards:
                self._forget_answers(shard.server)
        return shards

    def _take_restarted(self, of: Sequence[ShardView]) -> list[ShardView]:
        with self._membership.monitor:
            shards = [shard for shard in of if shard.server in self._restarted]
            self._restarted -= {shard.server for shard in shards}
        return shards

    def _configure_again(self, shards: Sequence[ShardView]) -> None:
        if shards:
            answers = self._check_configured(self.call(self._configure_request(shards)))
            for shard in shards:
                self._note_restart(shard, answers[shard.server][0])

    def _forget_answers(self, server: int) -> None:
        """What it has answered before does not count. The monitor must be held."""
        for received in self._received.values():
            received.pop(server, None)

    def _note_restart(self, shard: ShardView, answer: pb.Configured) -> None:
        """Says what is lost where a server goes on from a snapshot."""
        if not answer.is_resumed:
            return  # It has begun anew.
        rank, name = self._membership.rank, self.name(shard.server)
        if answer.num_assigned < shard.num_assigned:
            raise HopError(
                f"rank {rank}: {name} was started again, and its snapshot is older than the model that it was given "
                "before this `fit`. Start the job again."
            )
        num_lost = max(0, shard.num_pushes - answer.num_pushes)
        logging.warning(
            "rank %d: %s was started again, and goes on from its snapshot of %d pushes. %d later ones that this rank "
            "knows of are lost.",
            *(rank, name, answer.num_pushes, num_lost),
        )
        shard.num_restarts += 1
        shard.num_pushes_lost += num_lost
        shard.num_pushes = answer.num_pushes

    def end_configuration(self) -> None:
        """A push was answered: from now on, a server that is restarted has lost what it has learned since its snapshot.

        Raises:
          PeerLostError: If one was restarted since that writes none.
        """
        if not self._is_new:
            return
        with self._membership.monitor:
            self._is_new = False
            self._configurations = {s: dataclasses.replace(c, state=()) for s, c in self._configurations.items()}
            self._received[CONFIGURE] = {}  # Nobody takes one that came late: its `fit` was interrupted.
            lost = [shard for shard in self.shards if shard.server in self._restarted and not shard.has_snapshots]
        if lost:
            raise PeerLostError(
                f"rank {self._membership.rank}: a parameter server was restarted right after it had answered the "
                "first push, and has lost that. Start the job again."
            )

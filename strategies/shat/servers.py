"""`Servers`: what a worker asks the parameter servers, and how it waits for their answers."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from hop_tf.collectives import BULK_LANE
from hop_tf.errors import HopError, MismatchError, PeerLostError
from hop_tf.membership import parse
from hop_tf.runtime.group import ExchangeContext
from hop_tf.strategies.shat.server import parameter_server_pb2 as pb
from hop_tf.strategies.shat.server.server import CONFIGURE, CONFIGURED, PREFIX, PULL, PULLED, PUSH, REPLY
from hop_tf.strategies.shat.shards import ShardView
from hop_tf.transport.base import Message

# For each queue of requests, that of the answers, without the group, and their type.
_ANSWERS = {CONFIGURE: (CONFIGURED, pb.Configured), PUSH: (REPLY, pb.Reply), PULL: (PULLED, pb.Pulled)}
# An answer that has not come for so long is asked for again, or later where answers take longer.
_RETRY_SECONDS = 10.0

# By server: the message and its payload.
Answers = dict[int, tuple[object, np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Request:
    """What some servers are asked, each of which answers.

    Attributes:
      queue: Where servers take it: CONFIGURE, PUSH or PULL of `hop_tf.strategies.shat.server.server`.
      operation: What is awaited, for error messages.
      message: `message(shard, is_missing)` gives header and payload; `is_missing` is False where the server may have
        got the request before.
      is_answer: Whether what a server has answered is about this request.
      shards: What the servers that are asked keep.
      sources: Ranks that servers wait for: while an answer is missing they must be there, or leave properly.
      step: The training step, where it is of one.
      retries: Whether to ask again where an answer takes long.
    """

    queue: str
    operation: str
    message: Callable[[ShardView, bool], tuple[bytes, Sequence[np.ndarray]]]
    is_answer: Callable[[object], bool]
    shards: Sequence[ShardView]
    sources: Sequence[int] = ()
    step: int | None = None
    retries: bool = False


class Servers:
    """The servers of a group.

    Until the first push is answered, a worker has all that a server needs that was restarted: it configures that one
    again, and then repeats its request.

    Args:
      context: Membership and name of the group.
      shards: What each server that has something to keep does keep.

    Attributes:
      shards: The same.
      session: The running session.
      is_configured: Whether the servers keep the group.
    """

    def __init__(self, context: ExchangeContext, shards: Sequence[ShardView]):
        self._membership = context.membership
        self._group = context.group
        self.shards = shards
        self.session = context.session
        self.is_configured = False
        # What each server was told to keep, until the first push is answered, and in which session; those that have
        # forgotten it since.
        self._configurations: dict[int, Sequence[np.ndarray]] = {}
        self._configuration_session = 0
        self._restarted: set[int] = set()
        # Of each server that has answered what it keeps: whether that came from a snapshot.
        self._is_under_way: dict[int, bool] = {}
        self._received: dict[str, Answers] = {queue: {} for queue in _ANSWERS}
        self._retry_seconds = _RETRY_SECONDS
        for queue in _ANSWERS:
            self._membership.transport.register(self._answers_to(queue), functools.partial(self._on_answer, queue))

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
                return received, {}
            for shard in missing:
                received.pop(shard.server, None)
            return {}, missing

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

    def configure(self, payload_of: Callable[[ShardView], Sequence[np.ndarray]], sources: Sequence[int]) -> Answers:
        """Tells the servers what to keep, and takes their state; blocks and raises as `GroupState.configure`.

        Args:
          payload_of: Describes it to a server.
          sources: The other ranks that the servers have their state from.
        """
        self._configuration_session = self.session
        request = self._configure_request(self.shards, sources)
        for shard in self.shards:
            self._configurations[shard.server] = payload_of(shard)
            self.send(request, shard)
        for rank in sources:
            self._membership.transport.connect(rank)
        answers = self._check_configured(self.receive(request))
        self.is_configured = True
        return answers

    def _configure_request(self, shards: Sequence[ShardView], sources: Sequence[int] = ()) -> Request:
        return Request(
            queue=CONFIGURE,
            operation="receive state",
            message=lambda shard, is_missing: (b"", self._configurations[shard.server]),
            is_answer=lambda answer: answer.session == self._configuration_session,
            shards=shards,
            sources=sources,
        )

    def _check_configured(self, answers: Answers) -> Answers:
        for server, (answer, _) in answers.items():
            if answer.error:
                error = MismatchError if answer.is_mismatch else HopError
                raise error(f"rank {self._membership.rank}: {self.name(server)}: {answer.error}")
        self._is_under_way |= {server: answer.is_under_way for server, (answer, _) in answers.items()}
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
        if all(shard.server != server for shard in self.shards):
            return True  # It keeps nothing that it could have lost.
        with self._membership.monitor:
            if self._configurations:
                self._restarted.add(server)
                self._membership.monitor.notify_all()
            return bool(self._configurations) or not self.is_configured

    def reconfigure(self, request: Request) -> list[ShardView]:
        """Configures servers again that were restarted; blocks and raises as `configure`.

        Args:
          request: What they are to be sent next. What they have answered to it before does not count.

        Returns:
          What they keep.
        """
        with self._membership.monitor:
            restarted = self._restarted_of(request)  # Others are for the request that this one is part of.
            self._restarted -= restarted
        shards = [shard for shard in self.shards if shard.server in restarted]
        if shards and request.queue != CONFIGURE:
            # They take no push before they have rank 0's state.
            self._check_configured(self.call(self._configure_request(shards)))
        with self._membership.monitor:
            for shard in shards:
                self._received[request.queue].pop(shard.server, None)
        return shards

    def end_configuration(self) -> None:
        """A push was answered: from now on, a server that is restarted has lost what it has learned.

        Raises:
          PeerLostError: If one was restarted since.
        """
        with self._membership.monitor:
            self._configurations.clear()
            self._received[CONFIGURE] = {}  # Nobody takes one that came late: its `fit` was interrupted.
            if self._restarted:
                raise PeerLostError(
                    f"rank {self._membership.rank}: a parameter server was restarted right after it had answered the "
                    "first push, and has lost that. Start the job again."
                )

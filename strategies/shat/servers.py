"""`Servers`: a worker's requests to the parameter servers, and the wait for their answers."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from absl import logging

from hop_tf.errors import HopError, MismatchError, PeerLostError
from hop_tf.membership.session import parse
from hop_tf.membership.waiting import Interrupted
from hop_tf.runtime.group import ExchangeContext
from hop_tf.strategies.shat.server import parameter_server_pb2 as pb
from hop_tf.strategies.shat.server.server import CONFIGURE, CONFIGURED, PREFIX, PULL, PULLED, PUSH, REPLY
from hop_tf.strategies.shat.shards import ShardView
from hop_tf.tensors import payloads
from hop_tf.transport.base import BULK_LANE, Message

# For each queue of requests, the queue of answers, without the group, and the type of answers.
_ANSWERS = {CONFIGURE: (CONFIGURED, pb.Configured), PUSH: (REPLY, pb.Reply), PULL: (PULLED, pb.Pulled)}
# An answer that takes longer than this is asked for again. The time grows if answers take longer.
_RETRY_SECONDS = 10.0

# By server: the message and its payload.
Answers = dict[int, tuple[object, np.ndarray]]


@dataclasses.dataclass(frozen=True)
class ServerRequest:
    """A request to some servers, each of which answers.

    Attributes:
      queue: The servers' queue: CONFIGURE, PUSH or PULL of `hop_tf.strategies.shat.server.server`.
      operation: The awaited operation, for error messages.
      message: `message(shard, is_missing)` returns header and payload. `is_missing` is False if the server may have the
        request already.
      is_answer: `is_answer(answer)` returns True if a server's answer is to this request.
      shards: The shards of the servers that are asked.
      sources: Ranks that the servers wait for. While an answer is missing, these ranks must be running or have left
        properly.
      step: The training step, or None if the request belongs to none.
      retries: True to ask again if an answer takes long.
    """

    queue: str
    operation: str
    message: Callable[[ShardView, bool], tuple[bytes, Sequence[np.ndarray]]]
    is_answer: Callable[[object], bool]
    shards: Sequence[ShardView]
    sources: Sequence[int] = ()
    step: int | None = None
    retries: bool = False


@dataclasses.dataclass(frozen=True)
class Configuration:
    """The group that a server is to keep.

    Attributes:
      description: The description of the group.
      state: The state to begin with. Empty if another rank gives it.
    """

    description: pb.Configure
    state: Sequence[np.ndarray]


class Servers:
    """The servers of a group.

    A server that was restarted is configured again, and then gets the present request once more. Until the first push
    is answered, a worker has all that the server needs to begin anew. From then on the server needs a snapshot. The
    worker tells the server which pushes were answered. Answered pushes that are missing in the snapshot are lost.

    Args:
      context: Membership and name of the group.
      shards: The shard of each server that has one.

    Attributes:
      shards: The shard of each server that has one.
      session: The running session.
      is_configured: True if the servers keep the group.
      num_retries: The number of requests that were sent again.
    """

    def __init__(self, context: ExchangeContext, shards: Sequence[ShardView]):
        self._membership = context.membership
        self._group = context.group
        self.shards = shards
        self.session = context.session
        self.is_configured = False
        self.num_retries = 0
        # The configuration of each server, without states after the first answered push.
        self._configurations: dict[int, Configuration] = {}
        self._is_new = True
        self._restarted: set[int] = set()  # Servers that have forgotten their configuration.
        # In the session: the number of answered pushes, and True if this rank has sent anything to the servers.
        self._num_answered = 0
        self._has_entered = False
        # For each server that has answered: True if its first state was not rank 0's, but for example a snapshot's.
        self._is_under_way: dict[int, bool] = {}
        self._received: dict[str, Answers] = {queue: {} for queue in _ANSWERS}
        self._retry_seconds = _RETRY_SECONDS
        for queue in _ANSWERS:
            self._membership.transport.register(self._answers_to(queue), functools.partial(self._on_answer, queue))

    def begin_session(self, session: int) -> None:
        """Prepares for a session that this rank is about to enter."""
        with self._membership.monitor:
            self.session, self._num_answered, self._has_entered = session, 0, False
            for shard in self.shards:
                shard.clock = 0

    def close(self) -> None:
        """Stops taking answers."""
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
        """Lets only this rank give up if a server is lost. The other ranks find out for themselves."""
        try:
            yield
        except PeerLostError:
            self._membership.is_given_up = True
            raise

    def name(self, server: int) -> str:
        """The name of a server in error messages: its index and address."""
        address = self._membership.transport.status(server).address
        return f"ps {self._membership.servers.index(server)} at {address}"

    # Requests.

    def call(self, request: ServerRequest) -> Answers:
        """Sends a request to all its servers, and takes their answers as `receive` does."""
        for shard in request.shards:
            self.send(request, shard)
        return self.receive(request)

    def send(self, request: ServerRequest, shard: ShardView, is_missing: bool = True) -> None:
        """Sends a request to a server. For `is_missing` see `ServerRequest.message`."""
        self._has_entered = True
        header, payload = request.message(shard, is_missing)
        self._membership.send(shard.server, request.queue, header, payload, lane=BULK_LANE, step=request.step)

    def receive(self, request: ServerRequest) -> Answers:
        """Takes the answers to a request that was sent. Sends the request again if it, or an answer, was lost.

        Blocks: until all servers have answered.

        Raises:
          HopError: As `Membership.wait` does, or if a restarted server cannot be configured again.
          Interrupted: As `Membership.wait` does.
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
                # The answers may only be slow. Then each further request would slow them down more.
                self._retry_seconds *= 2
            retry_at = monitor.now() + self._retry_seconds
        if request.retries and not has_repeated:
            self._retry_seconds = max(_RETRY_SECONDS, 2 * (monitor.now() - since))
        return answers

    def _await(self, request: ServerRequest, since: float, retry_at: float) -> None:
        """Waits until all answers are there, or something is to be sent again."""
        membership = self._membership

        def awaited() -> list[int]:
            if membership.monitor.now() >= retry_at or self._lacking(request) or self._restarted_of(request):
                return []
            servers = [shard.server for shard in self._absent(request)]
            # Ranks that have left are not awaited: the servers have their state, or report that it is missing.
            sources = [rank for rank in request.sources if membership.departure(rank) is None]
            return [*servers, *sources] if servers else []

        membership.wait(awaited, operation=request.operation, step=request.step, since=since)

    def _take(self, request: ServerRequest) -> tuple[Answers, dict[ShardView, bool]]:
        """Takes all answers, if they are there.

        Returns:
          All answers and an empty dict, or an empty dict and the shards whose servers' answers are missing. For each of
          these shards, the value is True if the server lacks the request.
        """
        with self._membership.monitor:
            received = self._received[request.queue]
            absent, lacking = self._absent(request), self._lacking(request)
            missing = {shard: shard not in absent for shard in request.shards if shard in absent or shard in lacking}
            if not missing:
                self._received[request.queue] = {}
                if request.queue == PUSH:
                    self._note_answers(received)
                return received, {}
            for shard in missing:
                received.pop(shard.server, None)
            return {}, missing

    def _note_answers(self, answers: Answers) -> None:
        """Records the progress that a server needs if it is started again. The monitor must be held."""
        for shard in self.shards:
            reply, _ = answers[shard.server]
            self._num_answered = reply.sequence
            shard.num_pushes, shard.clock = reply.num_pushes, reply.clock

    def _absent(self, request: ServerRequest) -> list[ShardView]:
        """The shards of servers that have not answered. The monitor must be held."""
        received = self._received[request.queue]
        return [s for s in request.shards if s.server not in received or not request.is_answer(received[s.server][0])]

    def _lacking(self, request: ServerRequest) -> list[ShardView]:
        """The shards of servers that have answered that they lack the request. The monitor must be held."""
        received = self._received[request.queue]
        absent = self._absent(request)
        answered = [shard for shard in request.shards if shard not in absent]
        return [shard for shard in answered if getattr(received[shard.server][0], "is_missing", False)]

    def _restarted_of(self, request: ServerRequest) -> set[int]:
        """The servers of a request that were restarted. The monitor must be held."""
        return self._restarted & {shard.server for shard in request.shards}

    # Configuration, and servers that were restarted.

    def configure(self, configuration: Callable[[ShardView], Configuration], sources: Sequence[int]) -> Answers:
        """Tells the servers the group that they are to keep, and takes their state.

        Blocks and raises as `GroupState.configure` does.

        Args:
          configuration: `configuration(shard)` returns the configuration of a server.
          sources: The other ranks that the servers get their state from.
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

    def _configure_request(self, shards: Sequence[ShardView], sources: Sequence[int] = ()) -> ServerRequest:
        return ServerRequest(
            queue=CONFIGURE,
            operation="receive state",
            message=lambda shard, is_missing: (b"", self._configuration(shard)),
            is_answer=lambda answer: answer.session == self.session,
            shards=shards,
            sources=sources,
        )

    def _configuration(self, shard: ShardView) -> Sequence[np.ndarray]:
        """Returns the payload that configures a server now."""
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
        """Raises HopError if some servers have gone on from snapshots and others have not."""
        with_snapshot, without = (
            [f"ps {shard.index}" for shard in self.shards if self._is_under_way.get(shard.server) is is_under_way]
            for is_under_way in (True, False)
        )
        if with_snapshot and without:
            raise HopError(
                f"rank {self._membership.rank}: {', '.join(with_snapshot)} resumed from a snapshot, and "
                f"{', '.join(without)} found none: one part of the model would be trained, the other new. Restore the "
                "missing snapshots, or remove the others to start over. Then start the job again."
            )

    def goes_on_with(self, server: int) -> bool:
        """See `Exchange.goes_on_with`."""
        shard = next((shard for shard in self.shards if shard.server == server), None)
        if shard is None or not self._configurations:
            return True  # The server keeps nothing that it could have lost.
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
        """Tells a server at once the progress of this rank.

        This rank's next request may come late, and meanwhile other ranks may wait for this rank at the server.
        """
        try:
            self.send(self._configure_request([shard]), shard)
        except (HopError, Interrupted) as error:  # The next request finds out, if there is one.
            logging.info("rank %d: could not configure %s: %s", self._membership.rank, self.name(shard.server), error)

    def resume(self) -> None:
        """Configures restarted servers again. Blocks and raises as `configure` does."""
        with self.giving_up_alone():
            self._configure_again(self._take_restarted(self.shards))

    def reconfigure(self, request: ServerRequest) -> list[ShardView]:
        """Configures the restarted servers of a request again. Blocks and raises as `configure` does.

        Args:
          request: The request that the servers get next. Their earlier answers to it are dropped.

        Returns:
          The shards of these servers.
        """
        shards = self._take_restarted(request.shards)  # An outer request, if there is one, handles other servers.
        if request.queue != CONFIGURE:
            self._configure_again(shards)  # A server takes no push before it has a state.
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
        """Drops the answers of a server. The monitor must be held."""
        for received in self._received.values():
            received.pop(server, None)

    def _note_restart(self, shard: ShardView, answer: pb.Configured) -> None:
        """Counts and logs the pushes that are lost when a server goes on from a snapshot.

        Raises:
          HopError: If the snapshot is older than the model that the server was given before this `fit`.
        """
        if not answer.is_resumed:
            return  # The server has begun anew.
        rank, name = self._membership.rank, self.name(shard.server)
        if answer.num_assigned < shard.num_assigned:
            raise HopError(
                f"rank {rank}: {name} was restarted, and its snapshot is older than the model that it got before this "
                "`fit`. Start the job again."
            )
        num_lost = max(0, shard.num_pushes - answer.num_pushes)
        logging.warning(
            "rank %d: %s was restarted, and resumes from its snapshot of %d pushes. %d later pushes that this rank "
            "knows of are lost.",
            *(rank, name, answer.num_pushes, num_lost),
        )
        shard.num_restarts += 1
        shard.num_pushes_lost += num_lost
        shard.num_pushes = answer.num_pushes

    def end_configuration(self) -> None:
        """Records the first answer to a push. From now on, a restarted server loses all pushes since its snapshot.

        Raises:
          PeerLostError: If a server without snapshots was restarted meanwhile.
        """
        if not self._is_new:
            return
        with self._membership.monitor:
            self._is_new = False
            self._configurations = {s: dataclasses.replace(c, state=()) for s, c in self._configurations.items()}
            self._received[CONFIGURE] = {}  # Late answers to a `fit` that was interrupted are not needed.
            lost = [shard for shard in self.shards if shard.server in self._restarted and not shard.has_snapshots]
        if lost:
            raise PeerLostError(
                f"rank {self._membership.rank}: a parameter server was restarted right after it had answered the first "
                "push, and has lost that push. Start the job again."
            )

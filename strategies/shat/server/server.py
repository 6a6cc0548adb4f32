"""`ParameterServer`: takes the messages of workers, and answers."""

from __future__ import annotations

import collections
import functools
import threading
from collections.abc import Mapping, Sequence

import numpy as np
from absl import logging

from hop_tf.errors import HopError, MismatchError, ProtocolError
from hop_tf.membership import membership_pb2
from hop_tf.membership.session import LEAVE_QUEUE, parse
from hop_tf.strategies.shat.server import parameter_server_pb2 as pb
from hop_tf.strategies.shat.server.configured import ConfiguredGroup
from hop_tf.strategies.shat.server.group import Answer, ForgottenError
from hop_tf.strategies.shat.server.snapshots import Snapshots
from hop_tf.strategies.shat.server.state import ShardState
from hop_tf.tensors import payloads
from hop_tf.tensors.buffers import BufferPool
from hop_tf.transport.base import BULK_LANE, Handler, Message, Transport

# Prefix of the queues at a server, and with the group's name behind it, of those at a worker.
PREFIX = "parameter_server"
CONFIGURE, PUSH, PULL, ASSIGN, BEGIN, RETIRE = (
    f"{PREFIX}/{name}" for name in ("configure", "push", "pull", "assign", "begin", "retire")
)
CONFIGURED, REPLY, PULLED = "configured", "reply", "pulled"
# The rank whose model the servers begin with.
_FIRST = 0
_NO_STATE = "rank 0 left before the servers had its model. Start the job again."
_NOT_TRAINED = (
    "this process was restarted, and would train another model than the others: its variables have other names, or the "
    "others are in a later `fit` with another optimizer. Restart it with the same script, or restart the whole job."
)


class ParameterServer:
    """Serves shards to workers.

    Handlers of messages block only for a moment, for other pushes to the same shard. The first answers of a session
    wait for a snapshot. Slow work (making a group, writing it to a file) does not hold the server's lock, for which all
    handlers wait.

    Memory, in vectors as long as the server's part of the model, with W workers and an optimizer that has s slots (SGD
    0, Adam 2): (1 + s) + max(W + 1, s + 2). The first term is the state. W + 1 is a push or an answer for each worker,
    and both for the worker whose push is being applied. s + 2 is, at the start, rank 0's message with its state (1 +
    s), and the answer to it (1), which all workers share. In addition:

    - temporary memory of an update: a few times 4 MiB, or the largest variable if the optimizer looks at whole tensors;
      glibc may keep this memory, up to 64 MiB in a thread (MALLOC_ARENA_MAX);
    - s for a state in flight to a worker or a file, if an update comes meanwhile, because TensorFlow then copies the
      slots;
    - 1 with a lossy codec, for the decoded push;
    - up to W - 1 if threads are delayed between an answer and the release of its push.

    Args:
      transport: The transport. The server takes its messages from now on.
      num_workers: Ranks 0 to num_workers - 1 are workers.
      pool: The transport's memory for messages. Default: a pool of its own.
      snapshots: The snapshots to which states are written, and from which groups begin. Default: none.
    """

    def __init__(
        self,
        *,
        transport: Transport,
        num_workers: int,
        pool: BufferPool | None = None,
        snapshots: Snapshots | None = None,
    ):
        self._transport = transport
        self._pool = pool or BufferPool()
        self._snapshots = snapshots
        self._lock = threading.RLock()
        self._groups: dict[str, ConfiguredGroup] = {}
        # Held while a group is made and gets its first state. Always taken before the server's lock.
        self._making: collections.defaultdict[str, threading.Lock] = collections.defaultdict(threading.Lock)
        self._session = 0
        # True if rank 0 has assigned the models that it changed before the session, and the pulls that wait for that.
        self._has_begun = False
        self._waiting_pulls: list[Message] = []
        self._first_has_pushed = False  # In this session. A push of rank 0 means that it has configured its groups.
        # Workers that have ended for good, and workers that were lost, with the reasons. Lost workers may come back.
        self._ended: set[int] = set()
        self._lost: dict[int, str] = {}
        # Workers that have left the running session.
        self._left: set[int] = set()
        # The last session that each worker has left, which the others may not have entered yet.
        self._last_left: dict[int, int] = {}
        # Workers that were started again and take no part yet.
        self._restarted: set[int] = set()
        self._workers = range(num_workers)
        for queue, handler in {
            CONFIGURE: self._on_configure,
            PUSH: self._on_push,
            PULL: self._on_pull,
            ASSIGN: self._on_assign,
            BEGIN: self._on_begin,
            RETIRE: self._on_retire,
            LEAVE_QUEUE: self._on_leave,
        }.items():
            transport.register(queue, functools.partial(_guarded, handler))

    @property
    def is_done(self) -> bool:
        """True if all workers have ended or were lost."""
        with self._lock:
            return len(self._ended | self._lost.keys()) == len(self._workers)

    @property
    def has_served(self) -> bool:
        """True if a worker has ended by itself."""
        with self._lock:
            return bool(self._ended)

    @property
    def lost(self) -> Mapping[int, str]:
        """The workers that were lost, with the reasons."""
        with self._lock:
            return dict(self._lost)

    @property
    def present(self) -> list[int]:
        """The workers that have not ended and were not lost."""
        with self._lock:
            return [worker for worker in self._workers if worker not in self._ended and worker not in self._lost]

    def forget(self, worker: int, reason: str) -> None:
        """Records that a worker was lost. The others go on without it."""
        with self._lock:
            if worker in self._lost:
                return
            logging.error("the server continues without rank %d: %s", worker, reason)
            self._lost[worker] = reason
        self._remove(worker, is_lost=True)

    def restarted(self, worker: int) -> None:
        """Records that a new process has taken a lost worker's place. The process takes part when it asks to."""
        self._remove(worker, is_lost=True)
        with self._lock:
            self._lost.pop(worker, None)
            self._ended.discard(worker)
            self._left.add(worker)
            self._last_left.pop(worker, None)
            self._restarted.add(worker)
        self._answer_due_pulls()

    def take_snapshots(self, *, final: bool = False) -> None:
        """Writes the states that are due. With `final`, writes all states that have changed."""
        if self._snapshots is not None:
            with self._lock:
                groups = {name: configured.group for name, configured in self._groups.items() if configured.has_state}
            for name, group in groups.items():
                self._snapshots.write(name, group, final=final)

    def end(self) -> None:
        """Stops taking pushes, and writes the states that have changed since the last snapshots."""
        with self._lock:
            groups = [configured.group for configured in self._groups.values()]
        for group in groups:
            group.end()
        self.take_snapshots(final=True)

    # Workers that come and go.

    def _enter(self, session: int) -> None:
        """Enters a session at its first message, other than a farewell, from any worker. The lock must be held."""
        if session > self._session:
            self._begin_session(session)

    def _begin_session(self, session: int) -> None:
        self._session = session
        self._has_begun = self._first_has_pushed = False
        self._waiting_pulls.clear()  # Their senders have left the previous session.
        self._left = {worker for worker, last in self._last_left.items() if last >= session}
        self._restarted.clear()
        workers = [worker for worker in self.present if worker not in self._left]
        for configured in self._groups.values():
            configured.group.begin_session(workers, session)

    def _on_leave(self, message: Message) -> None:
        leave = parse(membership_pb2.Leave, message)
        if leave.lost:
            return  # The server finds out itself if that rank is lost.
        if leave.rank != message.sender:
            return
        with self._lock:
            self._last_left[leave.rank] = leave.session
            if leave.final:
                self._ended.add(leave.rank)
            if leave.session >= self._session:
                self._left.add(leave.rank)
            elif not leave.final:
                return
        self._remove(leave.rank, is_lost=False)

    def _remove(self, worker: int, *, is_lost: bool) -> None:
        with self._lock:
            retired = self._take_retired_groups()
            groups = dict(self._groups)
            if worker == _FIRST:
                self._give_up_waiting()
        self._end_groups(retired)
        self._answer_due_pulls()
        for name, configured in groups.items():
            self._send_answers(name, configured, configured.group.remove(worker, is_lost=is_lost))

    def _give_up_waiting(self) -> None:
        """Refuses the workers that wait for a model, because rank 0 will not give it. The lock must be held."""
        for name, configured in self._groups.items():
            if not configured.has_state:
                for worker in configured.take_waiting():
                    self._refuse(worker, pb.Configure(group=name, session=self._session), _NO_STATE, False)

    # Groups.

    def _on_configure(self, message: Message) -> None:
        parts = payloads.split(message.payload)
        configure = parse(pb.Configure, message._replace(header=parts[0].tobytes()))
        with self._lock:
            if not configure.has_left and self._has_gone(message.sender, configure.session):
                return  # The worker's farewell has overtaken this message.
            if message.sender in self._restarted and self._have_all_restarted(configure.session):
                self._last_left.clear()  # The entries are of earlier processes.
                self._begin_session(configure.session)
                for configured in self._groups.values():
                    configured.go_on_with_new_workers()
            self._enter(configure.session)
            making = self._making[configure.group]
        try:
            with making:
                configured, ready, answers = self._configure(message.sender, configure, parts[1:])
        except Exception as error:  # The worker raises any error that prevents the group here.
            logging.exception("the server cannot configure group %s for rank %d.", configure.group, message.sender)
            text = str(error) if isinstance(error, HopError) else f"{type(error).__name__}: {error}"
            for worker in (message.sender, *self._take_waiting(configure.group)):
                self._refuse(worker, configure, text, isinstance(error, MismatchError))
            return
        self._tell_state(configure, configured, ready)
        if configure.resumes:
            self._tell_configured(message.sender, configure, configured)
        self._send_answers(configure.group, configured, answers)

    def _have_all_restarted(self, session: int) -> bool:
        """True if all workers were started again, as the one that enters `session` was. The lock must be held.

        Restarted workers count sessions from 1. This worker has met the others, but the server may hear of them later.
        So a session number below the server's is enough.
        """
        return session < self._session or self._restarted.issuperset(self.present)

    def _tell_state(self, configure: pb.Configure, configured: ConfiguredGroup, workers: Sequence[int]) -> None:
        # Before the first push, all workers have rank 0's slots.
        with_slots = configured.is_under_way or configured.group.num_pushes > 0
        state = configured.group.state(with_slots=with_slots) if workers else None
        for worker in workers:
            self._tell_configured(worker, configure, configured, state.to_parts())

    def _tell_configured(
        self, worker: int, configure: pb.Configure, configured: ConfiguredGroup, parts: Sequence[np.ndarray] = ()
    ) -> None:
        answer = configured.describe(configure.session)
        answer.has_snapshots = self._snapshots is not None
        self._send(worker, f"{PREFIX}/{configure.group}/{CONFIGURED}", answer, parts)

    def _has_gone(self, worker: int, session: int) -> bool:
        """True if a worker has ended, or has left a session. The lock must be held."""
        has_left = session <= self._last_left.get(worker, 0)
        return worker in self._ended or has_left

    def _configure(
        self, worker: int, configure: pb.Configure, parts: Sequence[np.ndarray]
    ) -> tuple[ConfiguredGroup, list[int], list[Answer]]:
        """Makes the group if it is new, and begins with rank 0's state or the snapshot's.

        Returns:
          The group, the workers that are to get its state, and the answers to pushes that are due now.
        """
        configured = self._find_or_make(worker, configure)
        configured.check_goes_on(configure)
        configured.compare(worker, configure)
        answers = []
        with self._lock:
            if configure.resumes and configure.session < self._session:
                pass  # The message is about a session that is over.
            elif configure.has_left:
                self._left.add(worker)
                answers = configured.group.remove(worker, is_lost=False)
            elif not self._has_gone(worker, configure.session):  # The worker may have left meanwhile.
                answers = self._take_in(worker, configure, configured)
        if configure.has_state and not configured.has_state:
            configured.begin(ShardState.from_parts(parts, configured.packing))
        with self._lock:
            return configured, configured.take_waiting() if configured.has_state else [], answers

    def _find_or_make(self, worker: int, configure: pb.Configure) -> ConfiguredGroup:
        """Returns the group, and makes it if it is new. The group's lock in `_making` must be held."""
        with self._lock:
            configured = self._groups.get(configure.group)
            if configured is None and worker in self._restarted and self._first_has_pushed:
                raise MismatchError(_NOT_TRAINED)  # No worker would send the model.
        if configured is not None:
            return configured
        configured, state = ConfiguredGroup(configure, self._pool), None
        if self._snapshots is not None:
            state = self._snapshots.read(configure.group, configured.signature, configured.packing)
            configured.restore(state)
        with self._lock:
            workers = [w for w in self.present if w not in self._left or w == worker]
            configured.enter(configure, state, workers, self._session)
            configured.check_goes_on(configure)  # Before the group is kept: a worker that begins anew must not find it.
            self._groups[configure.group] = configured
        return configured

    def _take_in(self, worker: int, configure: pb.Configure, configured: ConfiguredGroup) -> list[Answer]:
        """Lets a worker take part in the group. The worker may wait for its state. The lock must be held."""
        self._left.discard(worker)
        self._restarted.discard(worker)
        if self._lost.pop(worker, None) is not None:
            logging.info("the server continues with rank %d, which is alive after all.", worker)
        answers = configured.take_in(worker, configure)
        has_state = configured.has_state or configure.has_state
        if not has_state and (_FIRST in self._left or _FIRST not in self.present):
            raise HopError(_NO_STATE)
        return answers

    def _take_waiting(self, group: str) -> list[int]:
        with self._lock:
            return self._groups[group].take_waiting() if group in self._groups else []

    def _refuse(self, worker: int, configure: pb.Configure, error: str, is_mismatch: bool) -> None:
        answer = pb.Configured(session=configure.session, error=error, is_mismatch=is_mismatch)
        self._send(worker, f"{PREFIX}/{configure.group}/{CONFIGURED}", answer)

    def _on_retire(self, message: Message) -> None:
        retire = parse(pb.Retire, message)
        with self._lock:
            if retire.group in self._groups:
                self._groups[retire.group].retired.add(message.sender)
            retired = self._take_retired_groups()
        self._end_groups(retired)

    def _take_retired_groups(self) -> dict[str, ConfiguredGroup]:
        """Removes and returns the groups that no present worker needs any longer. The lock must be held."""
        present = set(self.present)
        names = [name for name, each in self._groups.items() if each.retired and each.retired >= present]
        return {name: self._groups.pop(name) for name in names}

    def _end_groups(self, groups: Mapping[str, ConfiguredGroup]) -> None:
        if self._snapshots is not None:
            for name, configured in groups.items():
                self._snapshots.write(name, configured.group, final=True)

    def _find(self, group: str) -> ConfiguredGroup:
        with self._lock:
            if group not in self._groups:
                raise ProtocolError(f"the server has no group {group!r}.")
            return self._groups[group]

    # Pushes and pulls.

    def _on_push(self, message: Message) -> None:
        push = parse(pb.Push, message)
        with self._lock:
            self._enter(push.session)
            is_current = push.session == self._session and message.sender not in self._left
            if is_current and message.sender == _FIRST:
                self._first_has_pushed = True
                self._has_begun = True  # This process may have been started after rank 0's announcement.
        if not is_current:
            return  # The worker has left meanwhile, and awaits no answer. If it leaves later, the group notices.
        self._answer_due_pulls()
        try:
            configured = self._find(push.group)
            answers = configured.group.push(message.sender, configured.gradient_of(push, message.payload))
        except (ProtocolError, ValueError) as error:
            logging.error("the server refuses a push of rank %d: %s", message.sender, error)
            is_forgotten = isinstance(error, ForgottenError)
            refusal = pb.Reply(
                session=push.session, sequence=push.sequence, error=str(error), is_forgotten=is_forgotten
            )
            self._send(message.sender, f"{PREFIX}/{push.group}/{REPLY}", refusal)
            return
        self._send_answers(push.group, configured, answers)
        if self._snapshots is not None:
            self._snapshots.write(push.group, configured.group)

    def _send_answers(self, name: str, configured: ConfiguredGroup, answers: Sequence[Answer]) -> None:
        if not answers:
            return
        num_failures, error = 0, ""
        if self._snapshots is not None:
            self._snapshots.write_first(name, configured.group)
            num_failures, error = self._snapshots.failures(name)
        for answer in answers:
            reply = pb.Reply(
                session=answer.session,
                sequence=answer.sequence,
                num_others=answer.num_others,
                num_workers=answer.num_workers,
                is_missing=answer.is_missing,
                num_snapshot_failures=num_failures,
                snapshot_error=error,
                lost=self.lost,
                num_pushes=answer.num_pushes,
                clock=answer.clock,
            )
            self._send(answer.worker, f"{PREFIX}/{name}/{REPLY}", reply, answer.buckets)

    def _on_pull(self, message: Message) -> None:
        pull = parse(pb.Pull, message)
        with self._lock:
            self._enter(pull.session)
            if pull.session:
                self._waiting_pulls.append(message)
        if pull.session:
            self._answer_due_pulls()
        else:
            self._answer_pull(message)

    def _answer_due_pulls(self) -> None:
        """Answers the pulls that wait for rank 0's models, once these have come or can no longer come."""
        with self._lock:
            if not self._has_begun and _FIRST in self.present and _FIRST not in self._left:
                return
            pulls, self._waiting_pulls = self._waiting_pulls, []
        for pull in pulls:
            self._answer_pull(pull)

    def _answer_pull(self, message: Message) -> None:
        pull = parse(pb.Pull, message)
        queue = f"{PREFIX}/{pull.group}/{PULLED}"
        try:
            state = self._find(pull.group).group.state(with_slots=True)
        except ProtocolError as error:
            self._send(message.sender, queue, pb.Pulled(number=pull.number, error=str(error)))
            return
        self._send(message.sender, queue, pb.Pulled(number=pull.number), state.to_parts())

    def _on_assign(self, message: Message) -> None:
        assign = parse(pb.Assign, message)
        with self._lock:
            self._enter(assign.session)  # First, so that no push of the previous session follows the new model.
        configured = self._find(assign.group)
        configured.group.assign_model(configured.view(payloads.split(message.payload)))

    def _on_begin(self, message: Message) -> None:
        begin = parse(pb.Begin, message)
        with self._lock:
            self._enter(begin.session)
            if message.sender != _FIRST or begin.session != self._session:
                return
            self._has_begun = True
        self._answer_due_pulls()

    def _send(self, worker: int, queue: str, answer: object, parts: Sequence[np.ndarray] = ()) -> None:
        payload = payloads.join(parts) if parts else ()
        try:
            self._transport.send(worker, queue, answer.SerializeToString(), payload, lane=BULK_LANE)
        except HopError as error:  # The worker is gone; `forget` follows.
            logging.info("the server could not send to %s of rank %d: %s", queue, worker, error)


def _guarded(handler: Handler, message: Message) -> None:
    """Handles a message. Logs and drops a message that breaks the protocol."""
    try:
        handler(message)
    except ProtocolError as error:
        logging.error("the server drops a message to %r of rank %d: %s", message.queue, message.sender, error)

"""The worker's side of SHAT outside of the training graph: Algorithm 1, lines 5 and 6."""

from __future__ import annotations

import collections
import contextlib
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import tensorflow as tf

from hop_tf import payloads
from hop_tf.arguments import identity_of
from hop_tf.collectives import BULK_LANE
from hop_tf.errors import HopError, MismatchError, PeerLostError, ProtocolError
from hop_tf.exchange import Exchange, Incoming, Outgoing
from hop_tf.joining import Joiner
from hop_tf.keras_hook import (
    check_loss_scaling,
    decays,
    num_updates,
    optimizer_class,
    paths,
    serialized_for_server,
    set_num_updates,
    slots_of,
)
from hop_tf.membership import Membership, parse
from hop_tf.parameter_server import parameter_server_pb2 as pb
from hop_tf.parameter_server import wire
from hop_tf.parameter_server.server import (
    ASSIGN,
    BEGIN,
    CONFIGURE,
    CONFIGURED,
    PREFIX,
    PULL,
    PULLED,
    PUSH,
    REPLY,
    RETIRE,
)
from hop_tf.parameter_server.shard import is_elementwise
from hop_tf.parameter_server.sharding import Piece, plan_shards
from hop_tf.parameter_server.state import ShardState
from hop_tf.strategies.shat_settings import ShatSettings
from hop_tf.strategies.shat_shards import ShardView
from hop_tf.transport.base import Message
from hop_tf.worker import ExchangeContext

# What travels beside the variables: to the servers, the first two of these; from them, the weight alpha of each.
RATE, IS_APPLIED = 0, 1
NUM_BESIDE = 2
# An answer that has not come for so long is asked for again, or later where answers take longer.
_RETRY_SECONDS = 10.0


class ShatExchange(Exchange, Joiner):
    """Pushes gradients to the servers, and brings their model and its weight back.

    Args:
      context: Membership, packing and buffers of the group.
      settings: Those of the strategy.

    Attributes:
      shards: What each server that has something to keep does keep.
      is_configured: Whether the servers keep the group.
      last_session: The session of the latest push; 0 before the first one.

    Raises:
      ValueError: If the optimizer does not go with the settings.
    """

    def __init__(self, context: ExchangeContext, settings: ShatSettings):
        self._group = context.group
        self._session = context.session
        self._membership = context.membership
        self._packing = context.packing
        self._pool = context.pool
        self._settings = settings
        self._optimizer = context.optimizer
        self._trained = context.trained
        self._carried = context.carried.variables
        servers = self._membership.servers
        optimizer = context.optimizer()
        check_loss_scaling(optimizer)
        _check_sharding(optimizer_class(optimizer), settings.sharding, len(servers))
        self.shards = [
            ShardView(index, server, context, pieces, settings)
            for index, (server, pieces) in enumerate(zip(servers, self._plan(optimizer, len(servers)), strict=True))
            if pieces
        ]
        self.is_configured = False
        self.last_session = 0
        # What each server was told to keep, until the first push is answered; those that have forgotten it since.
        self._configures: dict[int, list[np.ndarray]] = {}
        self._restarted: set[int] = set()
        self._received: dict[str, dict[int, tuple[object, np.ndarray]]] = collections.defaultdict(dict)
        self._num_sent = 0
        self._num_pulls = 0
        self._retry_seconds = _RETRY_SECONDS
        self._known_model = 0
        self._communicate_seconds = 0.0
        self._latest: dict[int, tuple[int, float]] = {}
        for name, message_type in {CONFIGURED: pb.Configured, REPLY: pb.Reply, PULLED: pb.Pulled}.items():
            self._membership.transport.register(self._queue(name), self._receiver(name, message_type))

    def _plan(self, optimizer: object, num_servers: int) -> list[list[Piece]]:
        specs = self._packing.specs[: len(self._trained)]
        layers = [path.rpartition("/")[0] for path in paths(optimizer, self._trained)]
        shards = plan_shards(specs, layers, num_servers, self._settings.sharding)
        first = len(self._trained)
        shards[0].extend(
            Piece(first + i, 0, self._packing.specs[first + i].num_elements) for i in range(len(self._carried))
        )
        return shards

    # Beginning and end.

    def configure(self, *, joins: bool) -> None:
        """Tells the servers what to keep, and takes over their state, if that is another one than rank 0's.

        Args:
          joins: Whether this process was started again.

        Blocks: until the servers have rank 0's state, or that of their snapshots.

        Raises:
          MismatchError: If another rank wants something else.
          HopError: If a server cannot do it.
        """
        description = pb.Configure(
            group=self._group,
            session=self._session,
            settings=identity_of(self._settings),
            optimizer=serialized_for_server(self._optimizer()),
            codec=wire.codec_to_json(self._settings.codec),
            has_state=self._membership.rank == 0 and not joins,
        )
        decay = [*decays(self._optimizer(), self._trained), *(False for _ in self._carried)]
        model, slots = self._read_model(), self._read_slots()
        for shard in self.shards:
            parts = [np.frombuffer(shard.describe(description, decay), np.uint8)]
            if description.has_state:
                parts += shard.state_of(model, slots, num_updates(self._optimizer())).to_parts()
            self._configures[shard.server] = payloads.join(parts)
            self._send_configure(shard)
        # It is rank 0 that the servers have their state from.
        sources = () if joins or self._membership.rank == 0 else (0,)
        for rank in sources:
            self._membership.transport.connect(rank)
        answers = self._await_configured(self.shards, sources)
        self.is_configured = True
        self._write(answers)
        if joins or any(answer.is_under_way for answer, _ in answers.values()):
            num_steps = max(state.num_steps for state in self._states(answers).values())
            set_num_updates(self._optimizer(), num_steps)

    def _send_configure(self, shard: ShardView) -> None:
        self._membership.send(shard.server, CONFIGURE, b"", self._configures[shard.server], lane=BULK_LANE)

    def _await_configured(
        self, shards: Sequence[ShardView], sources: Sequence[int] = ()
    ) -> dict[int, tuple[pb.Configured, np.ndarray]]:
        answers = self._await(
            CONFIGURED,
            "receive state",
            lambda answer: answer.session == self._session,
            self._send_configure,
            sources=sources,
            shards=shards,
        )
        for answer, _ in answers.values():
            if answer.error:
                error = MismatchError if answer.is_mismatch else HopError
                raise error(f"rank {self._membership.rank}: {answer.error}")
        return answers

    def goes_on_with(self, server: int) -> bool:
        with self._membership.monitor:
            if self._configures:
                self._restarted.add(server)
                self._membership.monitor.notify_all()
            return bool(self._configures) or not self.is_configured

    def pull(self, *, after_offers: bool = False) -> None:
        """Takes over the servers' model and slots.

        Args:
          after_offers: Whether to take those that the servers have when rank 0 has made its offers of the session.

        Blocks: until the servers have sent them; with `after_offers` also until rank 0 has called `tell_of_offers`, or
          the servers know that it will not.

        Raises:
          HopError: If a server was lost.
        """
        self._num_pulls += 1
        number = self._num_pulls
        session = self._session if after_offers else 0
        header = pb.Pull(group=self._group, number=number, session=session).SerializeToString()

        def ask(shard: ShardView) -> None:
            self._membership.send(shard.server, PULL, header, lane=BULK_LANE)

        with self._without_others():
            for shard in self.shards:
                ask(shard)
            answers = self._await(PULLED, "receive state", lambda answer: answer.number == number, ask)
        for answer, _ in answers.values():
            if answer.error:
                raise HopError(f"rank {self._membership.rank}: {answer.error}")
        self._write(answers)

    def offer(self) -> None:
        """Gives the servers rank 0's model, where that was changed since it was theirs."""
        if self._membership.rank != 0:
            return
        buckets = self._read_model()
        digest = self._digest(buckets)
        if digest != self._known_model:
            self._known_model = digest
            header = pb.Assign(group=self._group, session=self._session).SerializeToString()
            for shard in self.shards:
                payload = payloads.join(shard.cut(buckets))
                self._membership.send(shard.server, ASSIGN, header, payload, lane=BULK_LANE)

    def keep_model(self) -> None:
        """What this rank's variables hold now is no model for the servers, though it is not theirs."""
        if self._num_sent:
            self._known_model = self._digest(self._read_model())

    def reset(self, session: int) -> None:
        self._session = session
        self._num_sent = 0

    def close(self) -> None:
        for name in (CONFIGURED, REPLY, PULLED):
            self._membership.transport.unregister(self._queue(name))
        if self._optimizer() is not None:
            return  # Not the group ends, but this rank: the others may go on, and the servers' last snapshots are due.
        header = pb.Retire(group=self._group).SerializeToString()
        for shard in self.shards:
            self._membership.tell(shard.server, RETIRE, header)

    # Steps.

    def step(self, outgoing: Outgoing) -> Incoming:
        start = time.perf_counter()
        with self._without_others():
            incoming = self._step(outgoing)
        self._communicate_seconds += time.perf_counter() - start
        return incoming

    @contextlib.contextmanager
    def _without_others(self) -> Iterator[None]:
        """Whoever loses a server does not end the others' training: they see for themselves whether it is there."""
        try:
            yield
        except PeerLostError:
            self._membership.is_given_up = True
            raise

    def _step(self, outgoing: Outgoing) -> Incoming:
        sequence = outgoing.step + 1
        rate, is_applied = self._beside(outgoing.buckets)[: IS_APPLIED + 1]
        push = pb.Push(
            group=self._group,
            session=self._session,
            sequence=sequence,
            rate=rate,
            is_applied=bool(is_applied),
        )
        self._mend(REPLY, lambda shard: None)
        for shard in self.shards:  # Line 5.
            payload = payloads.join(shard.encode(outgoing.buckets))
            self._send(shard, push, payload, outgoing.step)
        self._num_sent = sequence
        self.last_session = self._session

        def is_answer(reply: pb.Reply) -> bool:
            return reply.session == self._session and reply.sequence == sequence

        def ask_again(shard: ShardView, is_missing: bool = True) -> None:
            # What was sent is still there: it is sent again only where it has not arrived.
            again = pb.Push(asks_again=not is_missing)
            again.MergeFrom(push)
            payload = payloads.join(shard.encoded) if is_missing else ()
            self._send(shard, again, payload, outgoing.step)

        answers = self._await(
            REPLY, f"receive model of push {sequence}", is_answer, ask_again, step=outgoing.step, retries=True
        )  # Line 6.
        for answer, _ in answers.values():
            if answer.error:
                error = PeerLostError if answer.is_forgotten else ProtocolError
                raise error(f"rank {self._membership.rank}: a parameter server has refused a push: {answer.error}")
        with self._membership.monitor:
            self._configures.clear()
            if self._restarted:
                raise PeerLostError(
                    f"rank {self._membership.rank}: a parameter server was restarted right after it had answered the "
                    "first push, and has lost that. Start the job again."
                )
        incoming = self._merge(outgoing, answers)
        for shard in self.shards:
            shard.encoded = []
        return incoming

    def _send(self, shard: ShardView, push: pb.Push, payload: Sequence[np.ndarray], step: int) -> None:
        shard.bytes_sent += sum(array.nbytes for array in payload)
        self._membership.send(shard.server, PUSH, push.SerializeToString(), payload, lane=BULK_LANE, step=step)

    def _merge(self, outgoing: Outgoing, answers: Mapping[int, tuple[pb.Reply, np.ndarray]]) -> Incoming:
        """The servers' model, the weight of each, and how far the carried variables are from their means."""
        buckets = self._new_buckets()
        for shard in self.shards:
            reply, payload = answers[shard.server]
            shard.bytes_received += payload.nbytes
            for (bucket, where), values in zip(shard.ranges, shard.decode(payload), strict=True):
                buckets[bucket][where] = values
                if self._packing.exact[bucket]:
                    buckets[bucket][where] -= outgoing.buckets[bucket][where]
            weight = self._settings.weight(reply.num_others, reply.num_workers)
            self._beside(buckets)[shard.index] = weight
            self._latest[shard.index] = (reply.num_others, weight)
        return Incoming(outgoing.step, outgoing.segment, tuple(buckets))

    def neutral(self, outgoing: Outgoing) -> Incoming:
        return Incoming(outgoing.step, outgoing.segment, tuple(self._new_buckets()))

    def _new_buckets(self) -> list[np.ndarray]:
        buckets = []
        for size, dtype in zip(self._packing.sizes, self._packing.dtypes, strict=True):
            bucket = self._pool.take(size * dtype.size).view(dtype.as_numpy_dtype)
            bucket.fill(0)
            buckets.append(bucket)
        return buckets

    def _beside(self, buckets: Sequence[np.ndarray]) -> np.ndarray:
        bucket, start = self._packing.place_of(len(self._packing.specs) - 1)
        return buckets[bucket][start : start + self._packing.specs[-1].num_elements]

    def spread(self, weights: tf.Tensor, index: int) -> tf.Tensor:
        """Emits the ops that give each value of a trained variable the weight of its server.

        Args:
          weights: One for each server.
          index: The variable's.

        Returns:
          A scalar, or a tensor in the shape of the variable where several servers keep it.
        """
        spec = self._packing.specs[index]
        owners = [(shard.index, size) for shard in self.shards for size in shard.sizes_of(index)]
        if len(owners) <= 1:
            return weights[owners[0][0] if owners else 0]
        servers, sizes = zip(*owners, strict=True)
        return tf.reshape(tf.repeat(tf.gather(weights, servers), sizes), spec.shape)

    # Waiting for servers.

    def _queue(self, name: str) -> str:
        return f"{PREFIX}/{self._group}/{name}"

    def _receiver(self, name: str, message_type: type) -> Callable[[Message], None]:
        def receive(message: Message) -> None:
            answer = parse(message_type, message)
            with self._membership.monitor:
                self._received[name][message.sender] = answer, message.payload
                self._membership.monitor.notify_all()

        return receive

    def _await(
        self,
        name: str,
        operation: str,
        is_answer: Callable[[object], bool],
        ask_again: Callable[..., None],
        *,
        step: int | None = None,
        retries: bool = False,
        sources: Sequence[int] = (),
        shards: Sequence[ShardView] | None = None,
    ) -> dict[int, tuple[object, np.ndarray]]:
        """Takes every server's answer, or those of `shards`. While one is missing, `sources` must be there, too."""
        membership, received = self._membership, self._received[name]
        shards = self.shards if shards is None else shards
        since = membership.monitor.now()
        retry_at = since + self._retry_seconds if retries else float("inf")
        has_asked = False

        def absent() -> list[int]:
            return [s.server for s in shards if s.server not in received or not is_answer(received[s.server][0])]

        def awaited() -> list[int]:
            servers = absent()
            return [*servers, *sources] if servers else []

        def lacking() -> list[int]:
            """Servers that have answered that they have got nothing."""
            return [server for server, (answer, _) in received.items() if getattr(answer, "is_missing", False)]

        while True:
            membership.wait(
                lambda at=retry_at: [] if membership.monitor.now() >= at or lacking() or self._restarted else awaited(),
                operation=operation,
                step=step,
                since=since,
            )
            if self._mend(name, ask_again):
                continue
            with membership.monitor:
                missing = dict.fromkeys(lacking(), True)
                missing.update(dict.fromkeys(absent(), False))
                for server in missing:
                    received.pop(server, None)
                if not missing:
                    answers = dict(received)
                    received.clear()
                    break
            for shard in self.shards:
                if shard.server in missing:
                    ask_again(shard, missing[shard.server])
            has_asked = True
            if not all(missing.values()):
                # Where answers are only slow, one for each time that they were asked for would slow them down more.
                self._retry_seconds *= 2
            retry_at = membership.monitor.now() + self._retry_seconds
        if retries and not has_asked:
            self._retry_seconds = max(_RETRY_SECONDS, 2 * (membership.monitor.now() - since))
        return answers

    def _mend(self, name: str, ask_again: Callable[[ShardView], None]) -> bool:
        """Begins again with servers that were started again; returns whether there were any.

        Args:
          name: Of the answers that are awaited.
          ask_again: Sends what they answer.
        """
        with self._membership.monitor:
            restarted, self._restarted = self._restarted, set()
        shards = [shard for shard in self.shards if shard.server in restarted]
        if name != CONFIGURED and shards:
            for shard in shards:
                self._send_configure(shard)
            self._await_configured(shards)  # They take no push before they have rank 0's state.
        with self._membership.monitor:
            for shard in shards:
                self._received[name].pop(shard.server, None)
        for shard in shards:
            ask_again(shard)
        return bool(shards)

    # The group's variables.

    def _read_model(self) -> list[np.ndarray]:
        """All buckets, as they are."""
        values = [variable.read_value() for variable in (*self._trained, *self._carried)]
        beside = self._packing.specs[-1]
        return [np.asarray(b) for b in self._packing.pack([*values, tf.zeros(beside.shape, beside.dtype)])]

    def _read_slots(self) -> dict[tuple[str, int | None], np.ndarray]:
        slots = slots_of(self._optimizer(), self._trained)
        # Those that are made in the step that is being traced have no values yet: they begin alike anyhow.
        return {
            key: np.asarray(slot.read_value())
            for key, slot in slots.items()
            if tf.compat.v1.is_variable_initialized(slot)
        }

    def _states(self, answers: Mapping[int, tuple[object, np.ndarray]]) -> dict[int, ShardState]:
        return {
            shard.server: ShardState.from_parts(payloads.split(answers[shard.server][1]), shard.packing)
            for shard in self.shards
        }

    def _write(self, answers: Mapping[int, tuple[object, np.ndarray]]) -> None:
        """Assigns the servers' state to the variables."""
        states = self._states(answers)
        buckets = self._new_buckets()
        slots = slots_of(self._optimizer(), self._trained)
        values = {key: self._value_of(slot) for key, slot in slots.items()} if self._have_slots(states) else {}
        for shard in self.shards:
            state = states[shard.server]
            for (bucket, where), part in zip(shard.ranges, state.buckets, strict=True):
                buckets[bucket][where] = part
            shard.put_slots(state.slots, values)
        tensors = self._packing.unpack([tf.constant(bucket) for bucket in buckets])
        for variable, tensor in zip((*self._trained, *self._carried), tensors[:-1], strict=True):
            variable.assign(tensor)
        for key, value in values.items():
            slots[key].assign(value)
        self._known_model = self._digest(buckets)

    def _value_of(self, slot: tf.Variable) -> np.ndarray:
        """A copy, for the servers' values: of those that are made in the step that is being traced there is none."""
        is_there = tf.compat.v1.is_variable_initialized(slot)
        return slot.numpy() if is_there else np.zeros(slot.shape, slot.dtype.as_numpy_dtype)

    def _have_slots(self, states: Mapping[int, ShardState]) -> bool:
        return any(state.slots for state in states.values())

    def _digest(self, buckets: Sequence[np.ndarray]) -> int:
        digest = 0
        for shard in self.shards:
            for (bucket, _), values in zip(shard.ranges, shard.cut(buckets), strict=True):
                if not self._packing.exact[bucket]:
                    digest = zlib.crc32(np.ascontiguousarray(values).view(np.uint8), digest)
        return digest

    # Newcomers. A rank's step is of no matter to others.

    def begin_at(self, step: int) -> None:
        del step

    def meet(self, rank: int, step: int) -> None:
        del rank, step

    def admit(self, rank: int, step: int) -> int:
        del rank
        return step

    # Records.

    @property
    def sent_steps(self) -> int:
        return self._num_sent

    def counters(self) -> Mapping[str, float]:
        """What went to and came from each server, and where the communication thread's time goes.

        Returns:
          `communicate_seconds`, from a push to its answer, and for each server with a shard `shard_<s>_bytes_sent` and
          `shard_<s>_bytes_received`, without headers.
        """
        totals: dict[str, float] = {"communicate_seconds": self._communicate_seconds}
        for shard in self.shards:
            totals[f"shard_{shard.index}_bytes_sent"] = shard.bytes_sent
            totals[f"shard_{shard.index}_bytes_received"] = shard.bytes_received
        return totals

    @property
    def latest(self) -> Iterable[tuple[int, float]]:
        """For each shard c and alpha of the latest answer."""
        return list(self._latest.values())


def tell_of_offers(membership: Membership) -> None:
    """Tells the servers that rank 0 has offered the models of all groups that it has changed before the session."""
    header = pb.Begin(session=membership.session).SerializeToString()
    for server in membership.servers:
        membership.send(server, BEGIN, header, lane=BULK_LANE)  # On this lane it comes after what was assigned.


def _check_sharding(optimizer: type, sharding: str, num_servers: int) -> None:
    if sharding == "memory" and num_servers > 1 and not is_elementwise(optimizer):
        raise ValueError(
            f"`sharding` must be 'layer' or 'none' with {optimizer.__name__}: an optimizer that may look at a whole "
            "tensor cannot update parts of it on several servers. Received: sharding='memory'."
        )

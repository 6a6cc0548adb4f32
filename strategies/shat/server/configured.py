"""`ConfiguredGroup`: an exchange group at a server, and the configuration that workers have sent."""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import tensorflow as tf

from hop_tf.errors import HopError, MismatchError
from hop_tf.strategies.shat.server import parameter_server_pb2 as pb
from hop_tf.strategies.shat.server import wire
from hop_tf.strategies.shat.server.consistency import Consistency
from hop_tf.strategies.shat.server.encoding import Encoding
from hop_tf.strategies.shat.server.group import Answer, Gradient, ServedGroup
from hop_tf.strategies.shat.server.shard import Shard
from hop_tf.strategies.shat.server.state import ShardState
from hop_tf.tensors import payloads
from hop_tf.tensors.buffers import BufferPool
from hop_tf.tensors.packing import Packing, TensorSpec


class ConfiguredGroup:
    """A group with its configuration.

    Args:
      configure: The first worker's configuration.
      pool: The memory for buckets that are received or sent.

    Attributes:
      group: The group.
      packing: The shard's buckets.
      waiting: Workers that have configured the group and wait for its state.
      retired: Workers that no longer need the group.
      has_state: True if the group has a state.
      is_under_way: True if the state is not rank 0's, but for example a snapshot's.
      num_resumed: The number of pushes in the snapshot, if this process replaces an earlier one in the middle of a
        training. Otherwise None.
      signature: Bytes that are equal for snapshots of the same model.
    """

    def __init__(self, configure: pb.Configure, pool: BufferPool):
        self._first = configure
        self.packing = Packing(
            [TensorSpec(p.name, tuple(p.shape), tf.as_dtype(p.dtype), p.is_carried) for p in configure.pieces]
        )
        self._shard = Shard(self.packing, configure.optimizer, [piece.decays for piece in configure.pieces], pool)
        settings = configure.settings
        consistency = Consistency.make(settings["consistency"], int(settings["max_staleness"]))
        self.group = ServedGroup(self._shard, self.packing, consistency, pool, int(settings["interval"]))
        self._encoding = Encoding(self.packing, wire.codec_from_json(configure.codec), pool)
        self._plain = Encoding.plain(self.packing)
        self.waiting: list[int] = []
        self.retired: set[int] = set()
        self.has_state = self.is_under_way = False
        self.num_resumed: int | None = None
        self.signature = pb.Configure(pieces=configure.pieces).SerializeToString(deterministic=True)

    def restore(self, state: ShardState | None) -> None:
        """Begins with the state of a snapshot, if there is one.

        Raises:
          MismatchError: If the snapshot is of an optimizer with other slots.
        """
        if state is not None:
            slots = self._shard.slots()
            if state.slots.keys() != slots.keys():
                raise MismatchError(
                    "the snapshot is of another optimizer, or of another `pushes` of SHATParameterServerStrategy: with "
                    "'steps', the default, servers keep no slots. Give the strategy the same ones, or choose another "
                    f"directory. Received: {_names(state.slots)} in the snapshot, {_names(slots)} in the optimizer."
                )
            self.begin(state)
            self.is_under_way = True

    def enter(self, configure: pb.Configure, state: ShardState | None, workers: Collection[int], session: int) -> None:
        """Enters the running session, of a new training or of the snapshot's training.

        Args:
          configure: The configuration of the first worker that this process hears from.
          state: The state that `restore` has taken over, or None.
          workers: The workers that take part in the session.
          session: The session.
        """
        if state is None or not _is_of_its_training(state, configure):
            self.group.training = _new_name()
            self.group.begin_session(workers, session)
            return
        self.num_resumed = state.num_pushes
        self.group.go_on(state.progress, workers)
        if session > state.progress.session:
            self.group.begin_session(workers, session)

    def take_in(self, worker: int, configure: pb.Configure) -> list[Answer]:
        """Lets a worker take part from now on. Returns the answers that are due now."""
        self.retired.discard(worker)  # An earlier process of the worker had retired.
        if not configure.resumes:
            self.waiting.append(worker)
        if self.num_resumed is not None:
            return self.group.take_up(worker, configure.process, configure.num_answered, configure.clock)
        self.group.join(worker, configure.process)
        return []

    def describe(self, session: int) -> pb.Configured:
        """Returns the answer to a worker that has configured the group in a session."""
        return pb.Configured(
            session=session,
            is_under_way=self.is_under_way,
            num_steps_before=self.group.num_steps_before,
            training=self.group.training,
            is_resumed=self.num_resumed is not None,
            num_pushes=self.num_resumed or 0,
            num_assigned=self.group.num_assigned,
        )

    def begin(self, state: ShardState) -> None:
        """Begins with a state."""
        self.group.assign(state)
        self.has_state = True

    def go_on_with_new_workers(self) -> None:
        """Begins a new training, because all workers are new processes. A state with pushes is kept for it."""
        self.has_state = self.is_under_way = self.group.num_pushes > 0
        self.group.training, self.num_resumed = _new_name(), None

    def take_waiting(self) -> list[int]:
        """Returns the workers that wait for the state, and forgets them."""
        waiting, self.waiting = self.waiting, []
        return waiting

    def check_goes_on(self, configure: pb.Configure) -> None:
        """Raises HopError if a worker goes on with a training that this server process does not know."""
        if configure.resumes and configure.training != self.group.training:
            raise HopError(
                "it was restarted, and has no snapshot of this training, so its state is lost. Start the job again: "
                "servers resume from the last snapshots, if there are any."
            )

    def compare(self, worker: int, configure: pb.Configure) -> None:
        """Raises MismatchError if a worker's configuration differs from the first worker's."""
        for field in sorted({*self._first.settings, *configure.settings}):
            first, other = self._first.settings.get(field, ""), configure.settings.get(field, "")
            if first != other:
                raise MismatchError(
                    f"rank {worker} disagrees on option {field!r}: {other!r} there, {first!r} elsewhere."
                )
        first, other = _fields(self._first.optimizer), _fields(configure.optimizer)
        for field in [field for field in {**first, **other} if first.get(field) != other.get(field)]:
            raise MismatchError(
                f"rank {worker} disagrees on {field!r} of the optimizer: {other.get(field)!r} there, "
                f"{first.get(field)!r} elsewhere."
            )
        for mine, theirs in zip(self._first.pieces, configure.pieces, strict=False):
            if mine != theirs:
                raise MismatchError(f"rank {worker} disagrees on a variable: {theirs} there, {mine} elsewhere.")
        if len(self._first.pieces) != len(configure.pieces):
            raise MismatchError(
                f"rank {worker} disagrees on the number of variables: {len(configure.pieces)} there, "
                f"{len(self._first.pieces)} elsewhere."
            )

    def gradient_of(self, push: pb.Push, payload: np.ndarray) -> Gradient:
        """Decodes a push."""
        encoding = self._plain if push.is_plain else self._encoding
        buckets = None if push.asks_again else encoding.decode(payloads.split(payload))
        return Gradient(push.sequence, buckets, push.rate, push.is_applied, push.session, push.weight or 1.0)

    def view(self, parts: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The buckets of a message that was not encoded."""
        return self._plain.decode(parts)


def _is_of_its_training(state: ShardState, configure: pb.Configure) -> bool:
    """True if a worker takes part in the training of a state, or joins workers that do."""
    training = state.progress.training
    return bool(training) and (configure.joins or configure.training == training)


def _new_name() -> str:
    return secrets.token_hex(8)


def _names(slots: Mapping[tuple[str, int | None], np.ndarray]) -> str:
    return ", ".join(sorted({repr(name) for name, _ in slots})) or "nothing"


def _fields(optimizer: str) -> dict[str, object]:
    """The class name and the settings of an optimizer in JSON."""
    description = json.loads(optimizer)
    return {"class_name": description["class_name"], **description["config"]}

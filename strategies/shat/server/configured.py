"""`ConfiguredGroup`: an exchange group at a server, and what workers have asked it to be."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf

from hop_tf.errors import MismatchError
from hop_tf.strategies.shat.server import parameter_server_pb2 as pb
from hop_tf.strategies.shat.server import wire
from hop_tf.strategies.shat.server.consistency import Consistency
from hop_tf.strategies.shat.server.encoding import Encoding
from hop_tf.strategies.shat.server.group import Gradient, ServedGroup
from hop_tf.strategies.shat.server.shard import Shard
from hop_tf.strategies.shat.server.state import ShardState
from hop_tf.tensors import payloads
from hop_tf.tensors.buffers import BufferPool
from hop_tf.tensors.packing import Packing, TensorSpec


class ConfiguredGroup:
    """A group, and what it was configured with.

    Args:
      configure: From the first worker.
      pool: Where the shard's buckets are put on their way.

    Attributes:
      group: The group.
      packing: The shard's buckets.
      waiting: Workers that have configured it and wait for its state.
      retired: Workers that have no use for it any more.
      has_state: Whether it has one.
      is_under_way: Whether that is another one than the workers have.
      signature: What tells whether a snapshot is of the same model.
    """

    def __init__(self, configure: pb.Configure, pool: BufferPool):
        self._first = configure
        self.packing = Packing(
            [TensorSpec(p.name, tuple(p.shape), tf.as_dtype(p.dtype), p.is_carried) for p in configure.pieces]
        )
        self._shard = Shard(self.packing, configure.optimizer, [piece.decays for piece in configure.pieces], pool)
        settings = configure.settings
        consistency = Consistency.make(settings["consistency"], int(settings["max_staleness"]))
        self.group = ServedGroup(self._shard, self.packing, consistency, pool)
        self._encoding = Encoding(self.packing, wire.codec_from_json(configure.codec), pool)
        self.waiting: list[int] = []
        self.retired: set[int] = set()
        self.has_state = self.is_under_way = False
        self.signature = pb.Configure(pieces=configure.pieces).SerializeToString(deterministic=True)

    def restore(self, state: ShardState | None) -> None:
        """Begins with the state of a snapshot, if there is one.

        Raises:
          MismatchError: If it is of an optimizer that remembers something else.
        """
        if state is not None:
            slots = self._shard.slots()
            if state.slots.keys() != slots.keys():
                raise MismatchError(
                    "the snapshot is of another optimizer. Remove it, or choose another directory. Received: "
                    f"{_names(state.slots)} in the snapshot, {_names(slots)} in the optimizer."
                )
            self.begin(state)
            self.is_under_way = True

    def begin(self, state: ShardState) -> None:
        """Begins with a state."""
        self.group.assign(state)
        self.has_state = True

    def go_on_with_new_workers(self) -> None:
        """All workers are new processes: what the former ones have taught it is not theirs, and goes on."""
        self.has_state = self.is_under_way = self.group.num_pushes > 0

    def take_waiting(self) -> list[int]:
        """Those to whom to tell the state. Whoever asks later finds it under way."""
        waiting, self.waiting = self.waiting, []
        return waiting

    def compare(self, worker: int, configure: pb.Configure) -> None:
        """Raises MismatchError where a worker wants something else than the first one."""
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
        """What a push brings."""
        buckets = None if push.asks_again else self._encoding.decode(payloads.split(payload))
        return Gradient(push.sequence, buckets, push.rate, push.is_applied, push.session)

    def view(self, parts: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Buckets that were not encoded."""
        return Encoding.plain(self.packing).decode(parts)


def _names(slots: Mapping[tuple[str, int | None], np.ndarray]) -> str:
    return ", ".join(sorted({repr(name) for name, _ in slots})) or "nothing"


def _fields(optimizer: str) -> dict[str, object]:
    """What an optimizer in JSON consists of."""
    description = json.loads(optimizer)
    return {"class_name": description["class_name"], **description["config"]}

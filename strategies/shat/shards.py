"""`ShardView`: a server's part of the model, as a worker of SHAT sees it. `make_shards` divides the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from hop_tf.keras_hook.optimizers import optimizer_class, paths
from hop_tf.runtime.group import ExchangeContext
from hop_tf.strategies.shat.server import parameter_server_pb2 as pb
from hop_tf.strategies.shat.server.encoding import Encoding
from hop_tf.strategies.shat.server.shard import is_elementwise
from hop_tf.strategies.shat.server.sharding import Piece, ShardPacking, divide, plan_shards
from hop_tf.strategies.shat.server.state import ShardState
from hop_tf.strategies.shat.settings import ShatSettings
from hop_tf.tensors import payloads
from hop_tf.tensors.packing import Packing


class ShardView:
    """A server's part of the model, seen from a worker.

    Args:
      index: The server's index among the servers.
      server: The server's number in the cluster.
      context: The context of the group.
      pieces: The pieces that the server keeps.
      settings: The settings of the strategy.

    Attributes:
      packing: The shard's buckets.
      ranges: The places of these buckets in the group's buckets.
      encoded: The latest push, encoded; empty after its answer.
      bytes_sent: The bytes of pushes.
      bytes_received: The bytes of answers.
      num_snapshot_failures: The number of snapshots that the server could not write, by its latest answer.
      snapshot_error: The reason why the last snapshot could not be written, or empty if it could.
      has_snapshots: True if the server writes snapshots, and so may die and be started again.
      training: The server's name for the training; "" until the server has sent it.
      num_pushes: The number of pushes of all workers that the server had applied at its latest answer.
      num_assigned: The number of times that the server was given another model.
      clock: This worker's clock at the server, by the server's latest answer.
      num_restarts: The number of times that the server was started again and went on from a snapshot.
      num_pushes_lost: The number of pushes, of all workers, that these restarts have lost, as far as this worker knows.
    """

    def __init__(
        self, index: int, server: int, context: ExchangeContext, pieces: Sequence[Piece], settings: ShatSettings
    ):
        self.index = index
        self.server = server
        self._pieces = pieces
        self._place = ShardPacking(context.packing, pieces)
        self._num_elements = [spec.num_elements for spec in context.packing.specs]
        self.packing: Packing = self._place.packing
        self.ranges = self._place.ranges
        self._encoding = Encoding(self.packing, settings.lossiest, context.pool)
        self._plain = Encoding.plain(self.packing)
        self.encoded: list[np.ndarray] = []
        self.bytes_sent = self.bytes_received = 0
        self.num_snapshot_failures = 0
        self.snapshot_error = ""
        self.has_snapshots = False
        self.training = ""
        self.num_pushes = self.num_assigned = self.clock = 0
        self.num_restarts = self.num_pushes_lost = 0

    def describe(self, common: pb.Configure, decay: Sequence[bool]) -> pb.Configure:
        """Describes the shard to its server: the common settings with the shard's pieces."""
        description = pb.Configure()
        description.CopyFrom(common)
        for piece, spec in zip(self._pieces, self.packing.specs, strict=True):
            description.pieces.add(
                name=spec.name,
                dtype=spec.dtype.name,
                shape=spec.shape,
                decays=decay[piece.index],
                is_carried=spec.exact,
            )
        return description

    def cut(self, buckets: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The shard's part of buckets."""
        return self._place.cut(buckets)

    def put(self, part: Sequence[np.ndarray], buckets: list[np.ndarray]) -> None:
        """Writes the shard's part into buckets. A part that is a whole bucket replaces the bucket."""
        for (bucket, where), values in zip(self.ranges, part, strict=True):
            if values.size == buckets[bucket].size:
                buckets[bucket] = values
            else:
                buckets[bucket][where] = values

    def encode(self, buckets: Sequence[np.ndarray], *, is_applied: bool, is_plain: bool) -> None:
        """Encodes the shard's part of buckets into `encoded`, which is pushed; without the codec if `is_plain`."""
        encoding = self._plain if is_plain else self._encoding
        self.encoded = encoding.encode(self.cut(buckets), is_applied=is_applied)

    def decode(self, payload: np.ndarray) -> list[np.ndarray]:
        """Decodes the answer to a push: the shard's part of the model."""
        return self._plain.decode(payloads.split(payload))

    def decode_state(self, payload: np.ndarray) -> ShardState:
        """Decodes the state that a server has sent."""
        return ShardState.from_parts(payloads.split(payload), self.packing)

    def state_of(
        self, model: Sequence[np.ndarray], slots: Mapping[tuple[str, int | None], np.ndarray], iterations: int
    ) -> ShardState:
        """Returns the shard's part of a state whose slots are keyed by variables."""
        own = {(name, None): value for (name, index), value in slots.items() if index is None}
        names = dict.fromkeys(name for name, _ in slots)
        for number, piece in enumerate(self._pieces):
            for name in names:
                if (value := slots.get((name, piece.index))) is not None:
                    own[name, number] = value.reshape(-1)[piece.start : piece.stop] if self._cuts(piece) else value
        return ShardState(buckets=self.cut(model), slots=own, num_steps=iterations, iterations=iterations)

    def put_slots(
        self, own: Mapping[tuple[str, int | None], np.ndarray], slots: dict[tuple[str, int | None], np.ndarray]
    ) -> None:
        """Writes the shard's slots into the slots of the variables."""
        for (name, number), value in own.items():
            if number is None:
                slots[name, None] = value
                continue
            piece = self._pieces[number]
            if self._cuts(piece):
                slots[name, piece.index].reshape(-1)[piece.start : piece.stop] = value
            else:
                slots[name, piece.index] = value

    def size_of(self, index: int) -> int:
        """The number of values of a variable in the shard. They are contiguous."""
        return sum(piece.stop - piece.start for piece in self._pieces if piece.index == index)

    def _cuts(self, piece: Piece) -> bool:
        return piece.stop - piece.start != self._num_elements[piece.index]


def make_shards(context: ExchangeContext, settings: ShatSettings) -> list[ShardView]:
    """Divides a group's variables among the servers.

    Returns:
      The shards of the servers that have one. The first shard also has the non-trainable state.

    Raises:
      ValueError: If the settings do not allow the optimizer.
    """
    optimizer, servers = context.optimizer(), context.membership.servers
    is_divisible = settings.pushes_steps_of(optimizer) or is_elementwise(optimizer_class(optimizer))
    if not is_divisible:
        _check_sharding(optimizer_class(optimizer), settings.sharding, len(servers))
    num_trained, specs = len(context.trained), context.packing.specs
    layers = [path.rpartition("/")[0] for path in paths(optimizer, context.trained)]
    plan = plan_shards(specs[:num_trained], layers, len(servers), settings.sharding)
    if is_divisible:
        plan = [divide(pieces) for pieces in plan]
    carried = range(num_trained, num_trained + len(context.carried.variables))
    plan[0].extend(Piece(index, 0, specs[index].num_elements) for index in carried)
    return [
        ShardView(index, server, context, pieces, settings)
        for index, (server, pieces) in enumerate(zip(servers, plan, strict=True))
        if pieces
    ]


def _check_sharding(optimizer: type, sharding: str, num_servers: int) -> None:
    if sharding == "memory" and num_servers > 1:
        raise ValueError(
            f"`sharding` must be 'layer' or 'none' with {optimizer.__name__}: an optimizer that may look at a whole "
            "tensor cannot update parts of it on several servers. Received: sharding='memory'."
        )

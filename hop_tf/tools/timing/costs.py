"""The costs of a step's computation and communication."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from hop_tf.arguments import check_choice, check_integer
from hop_tf.codecs import Codec, Identity, Sparse
from hop_tf.collectives.vectors import goes_sparse

FLOAT32_BYTES = 4
# Predictions are not more accurate than this. If two settings differ by less, the one that changes training less is
# chosen.
RESOLUTION = 0.02
# A backward pass takes about twice as long as a forward pass.
FORWARD_SHARE = 1 / 3
ALGORITHMS = ("mesh", "ring")  # The algorithms of `hop_tf.collectives` that the models know.
_WAYS = (*ALGORITHMS, "all_gather")


@dataclasses.dataclass(frozen=True, kw_only=True)
class NetworkCosts:
    """The costs of communication.

    Attributes:
      latency_seconds: Time until the first byte of a message arrives [alpha].
      seconds_per_byte: Time that a rank takes to send a byte, while it receives one [beta].
      reduce_seconds_per_byte: Time to add a byte of float32 [gamma].
      synchronization_seconds: Time until all ranks have begun an all-reduce [S].
      mesh_slowdown: The time of a byte in a mesh, in which all others send to a rank at once, relative to a ring. It is
        above 1 if links then drop packets, as slow ones with short queues do. It is below 1 if one connection does not
        fill a link, or one of the ring's links is slower than the others.

    Raises:
      ValueError: If a cost is negative.
    """

    latency_seconds: float
    seconds_per_byte: float
    reduce_seconds_per_byte: float = 0.0
    synchronization_seconds: float = 0.0
    mesh_slowdown: float = 1.0

    def __post_init__(self):
        for field in dataclasses.fields(self):
            check_not_negative(field.name, getattr(self, field.name))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """The computation of a step.

    Attributes:
      update_seconds: Duration of the optimizer's update [l_up].
      forward_seconds: Duration of the forward pass [l_for].
      backward_seconds: Duration of the backward pass [l_back].

    Raises:
      ValueError: If a duration is negative.
    """

    update_seconds: float = 0.0
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0

    def __post_init__(self):
        for field in dataclasses.fields(self):
            check_not_negative(field.name, getattr(self, field.name))

    @classmethod
    def of_computing(cls, seconds: float, update_seconds: float = 0.0) -> Step:
        """Returns a step whose forward and backward pass take `seconds` together, one third and two thirds."""
        forward = FORWARD_SHARE * seconds
        return cls(update_seconds=update_seconds, forward_seconds=forward, backward_seconds=seconds - forward)

    @property
    def seconds(self) -> float:
        """The duration of update, forward and backward pass together [l_up + l_comp]."""
        return self.update_seconds + self.forward_seconds + self.backward_seconds


def communication_seconds(
    network: NetworkCosts,
    *,
    world_size: int,
    num_bytes: float,
    num_segments: int = 1,
    algorithm: str = "ring",
    bytes_per_byte: float = 1.0,
    codec_seconds_per_byte: float = 0.0,
) -> float:
    """Duration of the all-reduce of a step [l_comm; the second arguments of Pipe-SGD's Equations 5 and 6].

        L R alpha  +  max(2 (p - 1) / p n beta r, c n)  +  a n gamma  +  L S

    A ring takes R = 2 (p - 1) messages one after the other, a mesh R = 2, and both add a = (p - 1) / p of the bytes. In
    a mesh of two, ranks send each other whole vectors: R = 1, a = 1. Without a codec (r = 1, c = 0) and with a
    ring this is the paper's formula. A codec works while earlier chunks travel (Figure 3 (b)), so the longer of the two
    counts. Sparse vectors travel by an all-gather. It has R = 1, and a rank sends and adds (p - 1) r n bytes. In a mesh
    beta is `mesh_slowdown` times as long.

    Args:
      network: The costs of communication.
      world_size: Number of ranks [p].
      num_bytes: Size of the gradients as float32 [n].
      num_segments: Parts that are reduced one after the other [L].
      algorithm: "ring", "mesh" or "all_gather".
      bytes_per_byte: Encoded bytes per byte of float32 [r].
      codec_seconds_per_byte: Time for which a rank encodes and decodes, per byte of the gradients [c].

    Returns:
      Seconds; 0 in a world of one.

    Raises:
      ValueError: If an argument is out of range.
    """
    check_integer("num_segments", num_segments, at_least=1)
    check_not_negative("num_bytes", num_bytes)
    check_not_negative("codec_seconds_per_byte", codec_seconds_per_byte)
    way = route(algorithm, world_size, bytes_per_byte)
    if world_size == 1:
        return 0.0
    seconds_per_byte = network.seconds_per_byte * (network.mesh_slowdown if algorithm == "mesh" else 1.0)
    return (
        num_segments * (way.num_messages * network.latency_seconds + network.synchronization_seconds)
        + num_bytes * max(way.sent * seconds_per_byte, codec_seconds_per_byte)
        + num_bytes * way.added * network.reduce_seconds_per_byte
    )


def sent_bytes(num_bytes: float, *, world_size: int, algorithm: str = "ring", bytes_per_byte: float = 1.0) -> float:
    """Bytes that a rank sends in an all-reduce, and receives. Arguments and errors as for `communication_seconds`."""
    check_not_negative("num_bytes", num_bytes)
    return num_bytes * route(algorithm, world_size, bytes_per_byte).sent


@dataclasses.dataclass(frozen=True, kw_only=True)
class AllReduceCosts:
    """The costs of an all-reduce.

    Attributes:
      sent_bytes: The bytes that a rank sends, and receives.
      num_turns: The number of messages that follow each other [R].
      seconds: Its duration with idle links [l_comm].
      sending_seconds: The part of `seconds` in which the links, or the codec, are occupied.
    """

    sent_bytes: float
    num_turns: int
    seconds: float
    sending_seconds: float


def all_reduce(
    network: NetworkCosts,
    codec: Codec,
    *,
    world_size: int,
    num_bytes: float,
    algorithm: str,
    bytes_per_value: float = FLOAT32_BYTES,
    **more,
) -> AllReduceCosts:
    """The costs of an all-reduce with a codec.

    Args:
      network: The costs of communication.
      codec: The codec.
      world_size: Number of ranks.
      num_bytes: Size of the vector as float32.
      algorithm: "mesh" or "ring", for vectors that are not sparse.
      bytes_per_value: Bytes of a value that does not pass through a codec.
      **more: Further arguments of `communication_seconds`.

    Raises:
      ValueError: If an argument is out of range.
    """
    way, bytes_per_byte = way_of(codec, algorithm, world_size, bytes_per_value)
    of_vector = {"world_size": world_size, "num_bytes": num_bytes, "algorithm": way, "bytes_per_byte": bytes_per_byte}
    at_once = dataclasses.replace(network, latency_seconds=0.0, synchronization_seconds=0.0)
    seconds, sending_seconds = (communication_seconds(each, **of_vector, **more) for each in (network, at_once))
    return AllReduceCosts(
        sent_bytes=sent_bytes(**of_vector),
        num_turns=route(way, world_size, bytes_per_byte).num_messages,
        seconds=seconds,
        sending_seconds=sending_seconds,
    )


def way_of(codec: Codec, algorithm: str, world_size: int, bytes_per_value: float) -> tuple[str, float]:
    """The algorithm and the size of vectors that an all-reduce encodes with `codec`.

    Args:
      codec: The codec.
      algorithm: "mesh" or "ring", for vectors that are not sparse.
      world_size: Number of ranks.
      bytes_per_value: Bytes of a value without a codec.

    Returns:
      The algorithm of the vectors, and encoded bytes per byte of float32.

    Raises:
      ValueError: If an argument is out of range.
    """
    check_choice("algorithm", algorithm, ALGORITHMS)
    check_not_negative("bytes_per_value", bytes_per_value)
    if isinstance(codec, Identity):
        encoded = bytes_per_value if codec == Identity() else codec.bytes_per_value
        if algorithm == "ring":  # On half of their way, vectors are at least float32: see `Codec.for_sums`.
            encoded = (encoded + max(encoded, FLOAT32_BYTES)) / 2
        return algorithm, encoded / FLOAT32_BYTES
    if isinstance(codec, Sparse):
        if goes_sparse(codec, world_size):
            return "all_gather", codec.bytes_per_value / FLOAT32_BYTES
        codec = codec.dense
    return algorithm, codec.bytes_per_value / FLOAT32_BYTES


@dataclasses.dataclass(frozen=True)
class Route:
    """The route of a vector: messages that follow each other, and bytes sent and added per byte of float32."""

    num_messages: int
    sent: float
    added: float


def route(algorithm: str, world_size: int, bytes_per_byte: float = 1.0) -> Route:
    """The route of a vector. Arguments and errors as for `communication_seconds`."""
    check_integer("world_size", world_size, at_least=1)
    check_choice("algorithm", algorithm, _WAYS)
    check_not_negative("bytes_per_byte", bytes_per_byte)
    others = world_size - 1
    if algorithm == "all_gather":
        return Route(1, others * bytes_per_byte, others * bytes_per_byte)
    if algorithm == "mesh" and world_size == 2:
        return Route(1, bytes_per_byte, 1.0)
    num_messages = 2 * others if algorithm == "ring" else 2
    return Route(num_messages, 2 * others / world_size * bytes_per_byte, others / world_size)


def scaling_efficiency(step: Step, step_seconds: float) -> float:
    """Pipe-SGD's Equation 7: the speed of p ranks, divided by p times one rank's speed.

    Args:
      step: The computation of a step, which is the whole step in a world of one.
      step_seconds: Duration of a step of p ranks.

    Returns:
      (l_up + l_comp) / step_seconds; 1 if a step takes no time.
    """
    return step.seconds / step_seconds if step_seconds > 0 else 1.0


def check_codec_names(names: Iterable[str]) -> list[str]:
    """Returns the names as a list. Raises ValueError if there are none."""
    names = list(names)
    if not names:
        raise ValueError(f"`codec_names` must name at least one codec. Received: codec_names={names!r}.")
    return names


def check_not_negative(name: str, value: float) -> None:
    """Raises ValueError if a time or size is negative or nan."""
    if not value >= 0:
        raise ValueError(f"`{name}` must not be negative. Received: {name}={value!r}.")

"""Measures the time of all-reduce, compared with PyTorch's gloo and TensorFlow's RING.

    python benchmarks/benchmark_allreduce.py --world_sizes=2,4 --megabytes=1,25,100 --links=loopback,1e9
    python benchmarks/benchmark_allreduce.py --world_sizes=4 --megabytes=40 --links=5e8 --interfaces=2 \
        --members='mesh/identity,"bcube:2,2/identity"'  # a BCube over two interfaces

Ranks are processes: on loopback, or on hosts of an emulated network (`network`, which needs root). A link is given as
bits per second each way. Each process holds all members, which take turns within every round. So a busy machine slows
all of them. A round's time is that of the slowest rank, from a common start. Shown are medians, and gloo's time in the
same rounds over that of the member: above 1 is faster than gloo.

    mesh, ring    hop_tf's, with the codec behind the slash
    gloo          torch.distributed.all_reduce (if PyTorch is installed: the package `torch`)
    RING          tf.distribute.MultiWorkerMirroredStrategy, CommunicationImplementation.RING

The line before has the bytes that a rank sends, and the least time that the link needs for them.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import peers
import ranks
import results
import tensorflow as tf
from absl import app, flags

from hop_tf import codecs
from hop_tf.collectives import get_algorithm
from hop_tf.membership.monitor import ThreadMonitor
from hop_tf.membership.session import Membership
from hop_tf.options import CommunicationOptions
from hop_tf.tensors.buffers import BufferPool
from hop_tf.transport.tcp_transport import TcpTransport

_WORLD_SIZES = flags.DEFINE_list("world_sizes", ["2", "4"], "Numbers of ranks.")
_MEGABYTES = flags.DEFINE_list("megabytes", ["1", "25", "100"], "Sizes of the vector, in MiB of float32.")
_LINKS = flags.DEFINE_list("links", ["loopback", "10e9", "1e9", "100e6"], "loopback, or bits per second.")
_MEMBERS = flags.DEFINE_list(
    "members",
    [
        *(f"{way}/{codec}" for way in ("mesh", "ring") for codec in ("identity", "truncate16", "int8", "sketch")),
        "gloo",
        "RING",
    ],
    "What to measure.",
)
_INTERFACES = flags.DEFINE_integer("interfaces", 1, "Interfaces of a rank, of which a BCube uses all.", lower_bound=1)
_ROUNDS = flags.DEFINE_integer("rounds", 7, "Rounds, after one to warm up.", lower_bound=1)
_MAX_SECONDS = flags.DEFINE_float("max_seconds", 60.0, "Begin no further round of a case so long after the first.")

_MIB = 1 << 20
_TIMEOUT_SECONDS = 600
_CHECKED_VALUES = 10000


class Member:
    """One rank of a way to all-reduce: `mean` returns the mean over ranks in a form for `np.asarray`."""

    def prepare(self, values: np.ndarray) -> None:
        """Takes the values in the form of a training step. Not timed."""
        self._values = values

    def close(self) -> None:
        """Releases the member's resources."""


class Ours(Member):
    """`hop_tf.collectives`, over the transport that strategies use."""

    def __init__(self, name: str, rank: int, addresses: list[str], size: int, interfaces: list[str] | None = None):
        algorithm, codec = name.split("/")
        options = CommunicationOptions(
            timeout_seconds=_TIMEOUT_SECONDS, interfaces=interfaces if algorithm.startswith("bcube") else None
        )
        pool = BufferPool()
        self._transport = TcpTransport(rank, addresses, identity={}, options=options, pool=pool)
        self._membership = Membership(
            transport=self._transport,
            monitor=ThreadMonitor(),
            options=options,
            world_size=len(addresses),
            peers=range(len(addresses)),
        )
        self._reduction = get_algorithm(algorithm)(
            self._membership, "benchmark", sizes=[size], codecs=[codecs.get(codec)], pool=pool
        )
        self._reduction.reset(1)
        self._transport.start()
        self._membership.begin_session()
        self._step = 0

    def mean(self) -> np.ndarray:
        (mean,) = self._reduction.mean(self._step, [self._values], lambda rank, step: True)
        self._step += 1
        return mean

    def close(self) -> None:
        for peer in self._membership.peers:
            self._transport.flush(peer, 10)
        self._transport.close()


class Gloo(Member):
    """torch.distributed."""

    def __init__(self, name: str, rank: int, addresses: list[str], size: int, interfaces: list[str] | None = None):
        self._torch = peers.join_gloo(rank, addresses)

    def mean(self) -> Any:
        # In place, as users call it. The copy is made in `prepare`, which is not timed.
        self._torch.distributed.all_reduce(self._tensor)
        return self._tensor.div_(self._torch.distributed.get_world_size())

    def prepare(self, values: np.ndarray) -> None:
        """Copies the values, because the sum replaces them."""
        self._tensor = self._torch.from_numpy(values.copy())

    def close(self) -> None:
        self._torch.distributed.destroy_process_group()


class Ring(Member):
    """tf.distribute's collective all-reduce between workers."""

    def __init__(self, name: str, rank: int, addresses: list[str], size: int, interfaces: list[str] | None = None):
        self._strategy = peers.mirrored_strategy(rank, addresses)
        mean = tf.distribute.ReduceOp.MEAN

        @tf.function(input_signature=[tf.TensorSpec([size], tf.float32)])
        def run(values):
            return self._strategy.run(
                lambda v: tf.distribute.get_replica_context().all_reduce(mean, tf.identity(v)), args=(values,)
            )

        self._run = run

    def prepare(self, values: np.ndarray) -> None:
        """Makes a tensor of the values, as a training step has them."""
        self._tensor = tf.convert_to_tensor(values)

    def mean(self) -> Any:
        return self._run(self._tensor)


_CLASSES = {"gloo": Gloo, "RING": Ring}


# In each rank.


def _measure(case: Mapping, rank: int) -> dict[str, list[float]]:
    """Returns the seconds of each round for each member, at this rank."""
    size = case["bytes"] // 4
    values = _values(rank, size)
    addresses, interfaces = case["addresses"], case["interfaces"] and case["interfaces"][rank]
    members, world_size = {}, len(addresses[0])
    # RING must be made before TensorFlow has done anything.
    for index, name in sorted(enumerate(case["members"]), key=lambda item: item[1] != "RING"):
        members[name] = _CLASSES.get(name, Ours)(name, rank, addresses[index], size, interfaces)
    barrier = Ours("mesh/identity", rank, addresses[-1], 1)
    for name, member in members.items():  # Warms up, and checks that the results are right.
        _, mean = _timed_mean(member, barrier, values)
        _check(name, np.asarray(mean), world_size, size)
        del mean
    seconds: dict[str, list[float]] = {name: [] for name in members}
    start = time.monotonic()
    for _ in range(case["rounds"]):
        for name, member in members.items():
            seconds[name].append(_timed_mean(member, barrier, values)[0])
        barrier.prepare(np.float32([time.monotonic() - start]))
        if barrier.mean()[0] > case["max_seconds"]:
            break
    for member in [*members.values(), barrier]:
        member.close()
    return seconds


def _timed_mean(member: Member, barrier: Member, values: np.ndarray) -> tuple[float, Any]:
    """Returns the seconds that a member takes from a common start, and its result."""
    member.prepare(values)
    barrier.prepare(np.float32([0.0]))
    barrier.mean()
    begin = time.monotonic()
    mean = member.mean()
    return time.monotonic() - begin, mean


def _values(rank: int, size: int) -> np.ndarray:
    """Returns the values of a rank."""
    return np.random.default_rng(rank).normal(size=size).astype(np.float32)


def _check(name: str, mean: np.ndarray, world_size: int, size: int) -> None:
    """Raises RuntimeError if some values, from all parts of the vector, are not the mean."""
    part = slice(0, size, -(-size // _CHECKED_VALUES))
    expected = np.mean([_values(rank, size)[part] for rank in range(world_size)], axis=0)
    error = np.sqrt(np.mean((mean[part] - expected) ** 2) / np.mean(expected**2))
    if error > 0.1:
        raise RuntimeError(f"{name} is wrong: relative error {error:.3f}.")


# In the parent.


def _measure_case(link: str, world_size: int, megabytes: str, members: Sequence[str]) -> None:
    num_bytes = int(float(megabytes) * _MIB)
    # The bytes that a rank sends, and receives, in float32. Loopback, with busy cores, counts as 1 Gbit/s.
    traffic = 2 * (world_size - 1) / world_size * num_bytes
    at_best = traffic * 8 / (1e9 if link == ranks.LOOPBACK else float(link))
    # The start, rounds until the time is up, the warm-up, and one more round: of each member four times the least time.
    timeout = 300 + _MAX_SECONDS.value + 2 * len(members) * 4 * at_best
    case = {"bytes": num_bytes, "members": members, "rounds": _ROUNDS.value, "max_seconds": _MAX_SECONDS.value}
    about = {"num_interfaces": _INTERFACES.value, "num_ports": len(members) + 1, "timeout_seconds": timeout}
    of_ranks = ranks.run(_measure, case, world_size, link, **about)
    # A round's time is that of its slowest rank.
    seconds = {name: np.max([of_rank[name] for of_rank in of_ranks], axis=0) for name in members}
    print(f"{traffic / 1e6:.4g} MB of float32 from each rank" + f": {at_best:.3f} s" * (link != ranks.LOOPBACK))
    for name, of_rounds in seconds.items():
        over = {"gloo / it": np.array(seconds["gloo"]) / of_rounds} if "gloo" in seconds else {}
        results.show(f"{link} {world_size} {megabytes} {name}", {"seconds": of_rounds, **over})


def main(_: list[str]) -> None:
    members = list(_MEMBERS.value)
    if "gloo" in members and not peers.is_installed("torch"):
        print("gloo is left out: PyTorch is not installed.")
        members.remove("gloo")
    sizes = map(int, _WORLD_SIZES.value)
    for link, world_size, megabytes in itertools.product(_LINKS.value, sizes, _MEGABYTES.value):
        _measure_case(link, world_size, megabytes, members)


if __name__ == "__main__":
    app.run(main)

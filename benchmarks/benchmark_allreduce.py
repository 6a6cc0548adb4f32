"""Measures the time of all-reduce, compared with PyTorch's gloo.

    python benchmarks/benchmark_allreduce.py --world_sizes=2,4 --megabytes=1,25,100 --links=loopback,1e9

Ranks are processes: on loopback, or on hosts of an emulated network (`network`, which needs root). A link is given as
bits per second each way. Each process holds all members, which take turns within every round. So a busy machine slows
all of them. A round's time is that of the slowest rank, from a common start. The table shows medians, the number of
rounds, and gloo's time in the same rounds over that of the member: above 1 is faster than gloo.

    mesh, ring    hop_tf's, with the codec behind the slash
    gloo          torch.distributed.all_reduce (if PyTorch is installed: the package `torch`)
"""

from __future__ import annotations

import abc
import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import peers
import ranks
import results
from absl import app, flags

_WORLD_SIZES = flags.DEFINE_list("world_sizes", ["2", "4"], "Numbers of ranks.")
_MEGABYTES = flags.DEFINE_list("megabytes", ["1", "25", "100"], "Sizes of the vector, in MiB of float32.")
_LINKS = flags.DEFINE_list("links", ["loopback", "10e9", "1e9", "100e6"], "loopback, or bits per second.")
_MEMBERS = flags.DEFINE_list(
    "members",
    ["mesh/identity", "ring/identity", "mesh/int8", "ring/int8", "gloo"],
    "What to measure.",
)
_ROUNDS = flags.DEFINE_integer("rounds", 7, "Rounds, after one to warm up.", lower_bound=1)

_MIB = 1 << 20
_TIMEOUT_SECONDS = 600
_CHECKED_VALUES = 10000


class Member(abc.ABC):
    """One rank of a way to all-reduce."""

    def prepare(self, values: np.ndarray) -> None:
        """Takes the values in the form of a training step. Not timed."""

    @abc.abstractmethod
    def mean(self, values: np.ndarray) -> Any:
        """Returns the mean over ranks of `values`, which were prepared last, in a form for `np.asarray`."""

    def close(self) -> None:
        """Releases the member's resources."""


class Ours(Member):
    """`hop_tf.collectives`, over the transport that strategies use."""

    def __init__(self, name: str, rank: int, addresses: list[str], size: int):
        from hop_tf import codecs
        from hop_tf.collectives import ALGORITHMS
        from hop_tf.membership import Membership
        from hop_tf.membership.monitor import ThreadMonitor
        from hop_tf.options import CommunicationOptions
        from hop_tf.tensors.buffers import BufferPool
        from hop_tf.transport import TcpTransport

        algorithm, codec = name.split("/")
        options = CommunicationOptions(timeout_seconds=_TIMEOUT_SECONDS)
        pool = BufferPool()
        self._transport = TcpTransport(rank, addresses, identity={}, options=options, pool=pool)
        self._membership = Membership(
            transport=self._transport,
            monitor=ThreadMonitor(),
            options=options,
            world_size=len(addresses),
            peers=range(len(addresses)),
        )
        self._reduction = ALGORITHMS[algorithm](
            self._membership, "benchmark", sizes=[size], dtypes=[np.float32], codecs=[codecs.get(codec)], pool=pool
        )
        self._reduction.reset(1)
        self._transport.start()
        self._membership.begin_session()
        self._step = 0

    def mean(self, values: np.ndarray) -> np.ndarray:
        (mean,) = self._reduction.mean(self._step, [values], lambda rank, step: True)
        self._step += 1
        return mean

    def close(self) -> None:
        for peer in self._membership.peers:
            self._transport.flush(peer, 10)
        self._transport.close()


class Gloo(Member):
    """torch.distributed."""

    def __init__(self, name: str, rank: int, addresses: list[str], size: int):
        self._torch = peers.join_gloo(rank, addresses)

    def mean(self, values: np.ndarray) -> Any:
        # In place, as users call it. The copy is made in `prepare`, which is not timed.
        self._torch.distributed.all_reduce(self._tensor)
        return self._tensor.div_(self._torch.distributed.get_world_size())

    def prepare(self, values: np.ndarray) -> None:
        """Copies the values, because the sum replaces them."""
        self._tensor = self._torch.from_numpy(values.copy())

    def close(self) -> None:
        self._torch.distributed.destroy_process_group()


# In each rank.


def _measure(case: Mapping, rank: int) -> dict[str, list[float]]:
    """Returns the seconds of each round for each member, at this rank."""
    size = case["bytes"] // 4
    values = _values(rank, size)
    addresses = case["addresses"]
    members, world_size = {}, len(addresses[0])
    for index, name in enumerate(case["members"]):
        members[name] = (Gloo if name == "gloo" else Ours)(name, rank, addresses[index], size)
    barrier = Ours("mesh/identity", rank, addresses[-1], 1)
    for name, member in members.items():  # Warms up, and checks that the results are right.
        _, mean = _timed_mean(member, barrier, values)
        _check(name, np.asarray(mean), world_size, size)
        del mean
    seconds: dict[str, list[float]] = {name: [] for name in members}
    for _ in range(case["rounds"]):
        for name, member in members.items():
            seconds[name].append(_timed_mean(member, barrier, values)[0])
    for member in [*members.values(), barrier]:
        member.close()
    return seconds


def _timed_mean(member: Member, barrier: Member, values: np.ndarray) -> tuple[float, Any]:
    """Returns the seconds that a member takes from a common start, and its result."""
    member.prepare(values)
    barrier.mean(np.float32([0.0]))
    begin = time.monotonic()
    mean = member.mean(values)
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


def _measure_case(members: Sequence[str], link: str, world_size: int, megabytes: str) -> None:
    """Prints and keeps the times of the members. A round's time is that of its slowest rank."""
    num_bytes = int(float(megabytes) * _MIB)
    case = {"bytes": num_bytes, "members": members, "rounds": _ROUNDS.value}
    of_ranks = ranks.run(__file__, case, world_size, link, num_ports=len(members) + 1, timeout_seconds=3600)
    print(f"\n{link}, {world_size} ranks, {megabytes} MiB\n  {'':16s} {'seconds':>9s} {'GB/s':>7s} {'gloo / it':>10s}")
    seconds = {name: np.max([of_rank[name] for of_rank in of_ranks], axis=0) for name in members}
    for name, of_rounds in seconds.items():
        results.note("seconds", f"{link} {world_size} {megabytes} {name}", of_rounds)
        median, sent = np.median(of_rounds), 2 * (world_size - 1) / world_size * num_bytes
        ratio = f"{np.median(seconds['gloo']) / median:10.2f}" if "gloo" in seconds else ""
        print(f"  {name:16s} {median:9.4f} {sent / median / 1e9:7.2f} {ratio}", flush=True)


def main(argv) -> None:
    del argv
    members = list(_MEMBERS.value)
    if "gloo" in members and not peers.is_installed("torch"):
        print("gloo is left out: PyTorch is not installed.")
        members.remove("gloo")
    for link, world_size, megabytes in itertools.product(_LINKS.value, map(int, _WORLD_SIZES.value), _MEGABYTES.value):
        _measure_case(members, link, world_size, megabytes)


if __name__ == "__main__":
    ranks.serve(_measure)
    app.run(main)

"""Networks: the routes on which the pieces of a vector are gathered from all ranks, and spread to all.

A vector is cut into as many pieces as a network has *routes*. A route is a tree over all ranks. A piece goes up the
tree, each rank adds its own part, and the root has the sum. The sum goes down the same tree. A rank and its parent are
neighbors in the network, and the edge between them has a *level*: the interface that it uses.

    mesh           n routes. The root of route q is rank q, and all others are its children: two steps.
    bcube(a, b)    n = a^b ranks. The digits of a rank to base a are its address: W(i, j) is rank a i + j. Ranks that
                   differ in one digit only, the l-th from the right, are a cube of level l, on interface l. There are b
                   threads with n routes each. The route of thread t and root q sets the digits t, t + 1, ... (modulo b)
                   one after the other to those of q. So b threads use b interfaces in each of 2 b steps (Table 2).
    tree(a)        n routes. The root of route q is rank q. Each rank has at most a children. One interface, as in a
                   FatTree, and 2 log_a(n) steps between few neighbors.

References:
  Zhou et al. Canary: Decentralized Distributed Deep Learning Via Gradient Sketch and Partition in Multi-Interface
  Networks. IEEE TPDS 2021. Section 4.4, Table 2, Figures 13 and 14.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import re
from collections.abc import Iterable, Sequence

_PATTERN = re.compile(r"(?P<kind>[a-z]+)(?::(?P<numbers>\d+(,\d+)*))?")
_MAX_LEVELS, _MAX_RANKS = 16, 2**16
_RULE = "`algorithm` must be 'mesh', 'bcube:<alpha>,<beta>', 'tree' or 'tree:<children>'"


@dataclasses.dataclass(frozen=True)
class Route:
    """A tree over ranks.

    Attributes:
      root: The rank that has the sum.
      thread: Number of the network's thread that the piece belongs to.
      parents: The parent of every rank; None for the root.
      levels: For every rank, the interface of the edge to its parent; 0 for the root.
    """

    root: int
    thread: int
    parents: tuple[int | None, ...]
    levels: tuple[int, ...]

    @functools.cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """The children of every rank, in order."""
        children = [[] for _ in self.parents]
        for rank, parent in enumerate(self.parents):
            if parent is not None:
                children[parent].append(rank)
        return tuple(map(tuple, children))

    @property
    def depth(self) -> int:
        """The number of messages that follow each other on the way up."""
        return max(map(self.num_hops, range(len(self.parents))))

    def num_hops(self, rank: int) -> int:
        """The number of edges from `rank` to the root."""
        return len(list(self.path(rank)))

    def path(self, rank: int) -> Iterable[int]:
        """The ranks on the way from `rank` to the root, without `rank` itself."""
        while (rank := self.parents[rank]) is not None:
            yield rank


class Network(abc.ABC):
    """A network: see the module. Equal settings make equal networks.

    Attributes:
      num_levels: Number of interfaces of a rank.
    """

    num_levels: int = 1

    @abc.abstractmethod
    def routes(self, world_size: int) -> tuple[Route, ...]:
        """The routes among `world_size` ranks."""

    def check_world_size(self, world_size: int) -> None:
        """Raises ValueError if the network cannot have `world_size` ranks."""

    def routes_among(self, num_ranks: int) -> tuple[Route, ...]:
        """The routes among `num_ranks` ranks; those of a mesh if the network cannot have that number."""
        return (self if self.can_have(num_ranks) else Mesh()).routes(num_ranks)

    def can_have(self, num_ranks: int) -> bool:
        """True if the network can have `num_ranks` ranks."""
        return num_ranks >= 1


@dataclasses.dataclass(frozen=True)
class Mesh(Network):
    """A network in which all ranks are neighbors."""

    @functools.cache  # noqa: B019 (of small, frozen objects)
    def routes(self, world_size: int) -> tuple[Route, ...]:
        levels = (0,) * world_size
        return tuple(
            Route(root, 0, tuple(None if rank == root else root for rank in range(world_size)), levels)
            for root in range(world_size)
        )

    def __str__(self) -> str:
        return "mesh"


@dataclasses.dataclass(frozen=True)
class BCube(Network):
    """BCube(alpha, beta).

    Attributes:
      alpha: Number of ports of a switch, which is the number of ranks of a cube; at least 1.
      beta: Number of levels; at least 1.

    Raises:
      ValueError: If a number is below 1, or there are more than 16 levels or 65,536 ranks.
    """

    alpha: int
    beta: int

    def __post_init__(self):
        if self.alpha < 1 or self.beta < 1:
            raise ValueError(f"{_RULE}, with numbers of at least 1. Received: algorithm='{self}'.")
        # Checks the exponent first: a large power would take hours.
        if self.beta > _MAX_LEVELS or self.alpha**self.beta > _MAX_RANKS:
            raise ValueError(
                f"`algorithm` must have at most {_MAX_LEVELS} levels and {_MAX_RANKS} ranks. "
                f"Received: algorithm='{self}'."
            )

    @property
    def num_levels(self) -> int:
        return self.beta

    def can_have(self, num_ranks: int) -> bool:
        return num_ranks == self.alpha**self.beta

    def check_world_size(self, world_size: int) -> None:
        if not self.can_have(world_size):
            raise ValueError(
                f"`algorithm` must have as many ranks as the cluster: bcube:alpha,beta has alpha^beta. "
                f"Received: algorithm='{self}' with {self.alpha**self.beta} ranks in a cluster of {world_size}."
            )

    def address(self, rank: int) -> tuple[int, ...]:
        """The digits of a rank, the highest level's first: W(i, j) for two levels."""
        return tuple(self.digit(rank, level) for level in reversed(range(self.beta)))

    def rank(self, address: Sequence[int]) -> int:
        """The rank with an address."""
        if len(address) != self.beta or not all(0 <= digit < self.alpha for digit in address):
            raise ValueError(
                f"`address` must be {self.beta} digits from 0 to {self.alpha - 1}. Received: address={tuple(address)}."
            )
        return functools.reduce(lambda number, digit: number * self.alpha + digit, address, 0)

    def digit(self, rank: int, level: int) -> int:
        """A rank's digit at a level: its place in its cube of that level."""
        return rank // self.alpha**level % self.alpha

    def cube(self, rank: int, level: int) -> tuple[int, ...]:
        """The ranks of the cube of this level that contains `rank`, including `rank`, in the order of their places."""
        place = self.alpha**level
        first = rank - self.digit(rank, level) * place
        return tuple(first + digit * place for digit in range(self.alpha))

    def cubes(self, level: int) -> tuple[tuple[int, ...], ...]:
        """All cubes of a level, in order: <level, 0>, <level, 1>, ..."""
        firsts = [rank for rank in range(self.alpha**self.beta) if self.digit(rank, level) == 0]
        return tuple(self.cube(rank, level) for rank in firsts)

    @functools.cache  # noqa: B019
    def routes(self, world_size: int) -> tuple[Route, ...]:
        self.check_world_size(world_size)
        return tuple(self._route(thread, root) for thread in range(self.beta) for root in range(world_size))

    def _route(self, thread: int, root: int) -> Route:
        parents, levels = [], []
        for rank in range(self.alpha**self.beta):
            order = ((thread + turn) % self.beta for turn in range(self.beta))
            level = next((each for each in order if self.digit(rank, each) != self.digit(root, each)), None)
            parents.append(None if level is None else self.cube(rank, level)[self.digit(root, level)])
            levels.append(level or 0)
        return Route(root, thread, tuple(parents), tuple(levels))

    def __str__(self) -> str:
        return f"bcube:{self.alpha},{self.beta}"


@dataclasses.dataclass(frozen=True)
class Tree(Network):
    """Trees with few children, for ranks with a single interface, as in a FatTree.

    Attributes:
      num_children: The largest number of children of a rank; at least 1.
    """

    num_children: int = 2

    def __post_init__(self):
        if self.num_children < 1:
            raise ValueError(f"{_RULE}, with numbers of at least 1. Received: algorithm='{self}'.")

    @functools.cache  # noqa: B019
    def routes(self, world_size: int) -> tuple[Route, ...]:
        return tuple(self._route(root, world_size) for root in range(world_size))

    def _route(self, root: int, world_size: int) -> Route:
        places = [(rank - root) % world_size for rank in range(world_size)]
        parents = [(root + (place - 1) // self.num_children) % world_size if place else None for place in places]
        return Route(root, 0, tuple(parents), (0,) * world_size)

    def __str__(self) -> str:
        return f"tree:{self.num_children}"


def get_network(algorithm: str) -> Network:
    """The network that `algorithm` describes.

    Args:
      algorithm: "mesh", "bcube:<alpha>,<beta>", "tree" (two children) or "tree:<children>".

    Returns:
      The network.

    Raises:
      ValueError: If there is no such network.
    """
    match = _PATTERN.fullmatch(algorithm.replace(" ", "")) if isinstance(algorithm, str) else None
    numbers = [int(number) for number in (match["numbers"] or "").split(",") if number] if match else []
    member, counts = {"mesh": (Mesh, (0,)), "bcube": (BCube, (2,)), "tree": (Tree, (0, 1))}.get(
        match["kind"] if match else None, (None, ())
    )
    if len(numbers) not in counts:
        raise ValueError(f"{_RULE}. Received: algorithm={algorithm!r}.")
    return member(*numbers)

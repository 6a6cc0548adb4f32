"""Communication graphs for decentralized training, and the weights of the averages.

Along an edge j -> i, rank j sends its parameters to rank i, which averages them with the weight W[j, i]. Ranks that
keep averaging converge to the mean of their initial values, because W is doubly stochastic and the graph is strongly
connected.

References:
  Luo, Lin, Zhuo, Qian. Hop: Heterogeneity-aware Decentralized Training. ASPLOS 2019. Figures, sections etc. cited below
    are from this paper.
  Xiao, Boyd. Fast linear iterations for distributed averaging. Systems & Control Letters 53, 2004.
  Ying et al. Exponential Graph is Provably Efficient for Decentralized Deep Training. NeurIPS 2021.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

import networkx as nx
import numpy as np

_NAMES = ("ring", "ring_based", "double_ring", "complete", "exponential", "hierarchical")
_SUM_TOLERANCE = 1e-6  # A matrix that was computed in float32 satisfies this tolerance.


class Topology:
    """A communication graph and its mixing matrix. Immutable; made by a class method or by `resolve`.

    If all ranks have the same number of in-neighbors, all weights are 1 / (number of in-neighbors + 1), Equation 1. An
    undirected graph with different degrees d gets Metropolis-Hastings weights (Xiao, Boyd), which keep W doubly
    stochastic: 1 / (1 + max(d_i, d_j)) for an edge, and the remainder for the rank itself.

    When rank d departs, rank i counts its own parameters in place of d's, with the weight W[d, i]. Columns still sum to
    1; row i sums to 1 - W[i, d] + W[d, i]. If W is symmetric, as for all undirected graphs here, W stays doubly
    stochastic. Otherwise, as for `exponential` and directed graphs, the remaining ranks still converge to a common
    value. This is a weighted mean, to which some ranks contribute more than others.

    Args:
      mixing_matrix: Array [n, n] of finite, non-negative values; [j, i] is the weight of rank j's parameters at rank i.
        Positive on the diagonal; columns and rows sum to 1 within 1e-6. Positive entries are the edges. The array is
        copied.
      name: The name that `repr` shows.

    Raises:
      ValueError: If `mixing_matrix` breaks one of these rules, or the graph is not strongly connected.
    """

    def __init__(self, mixing_matrix: np.ndarray, *, name: str = "custom"):
        self._name = name
        self._mixing_matrix = _checked_mixing_matrix(mixing_matrix)
        self._mixing_matrix.flags.writeable = False
        edges = np.where(np.eye(self.world_size, dtype=bool), 0, self._mixing_matrix)
        self._graph = nx.freeze(nx.from_numpy_array(edges, create_using=nx.DiGraph))
        if missing := _missing_path(self._graph):
            raise ValueError(f"`mixing_matrix` must be strongly connected. Received: mixing_matrix with {missing}.")

    @classmethod
    def ring(cls, world_size: int) -> Topology:
        """Ranks in a circle: each exchanges with the rank before it and the rank after it (Figure 11, 1).

        Args:
          world_size: Number of ranks, at least 1.

        Returns:
          The topology. With up to 3 ranks, the topology is complete.

        Raises:
          ValueError: If `world_size` is no positive integer.
        """
        return cls._from_adjacency(_circulant(_checked_world_size(world_size), (1, -1)), name="ring")

    @classmethod
    def ring_based(cls, world_size: int) -> Topology:
        """A ring in which each rank also exchanges with the most distant rank, or the two most distant (Figure 11, 2).

        Args:
          world_size: Number of ranks, at least 1.

        Returns:
          The topology. With up to 5 ranks, the topology is complete.

        Raises:
          ValueError: If `world_size` is no positive integer.
        """
        return cls._from_adjacency(_ring_based(_checked_world_size(world_size)), name="ring_based")

    @classmethod
    def double_ring(cls, world_size: int) -> Topology:
        """Two `ring_based` graphs, on the lower and the upper half of the ranks, joined node to node (Figure 11, 3).

        Args:
          world_size: Number of ranks, at least 1.

        Returns:
          The topology.

        Raises:
          ValueError: If `world_size` is no positive integer.
        """
        lower, upper = np.array_split(np.arange(_checked_world_size(world_size)), 2)
        adjacency = np.zeros((world_size, world_size), bool)
        for half in (lower, upper):
            adjacency[np.ix_(half, half)] = _ring_based(len(half))
        # If `world_size` is odd, the lower half has one more rank. It is joined to the first rank of the upper half.
        for rank, peer in zip(lower, itertools.cycle(upper), strict=False):
            adjacency[rank, peer] = adjacency[peer, rank] = True
        return cls._from_adjacency(adjacency, name="double_ring")

    @classmethod
    def complete(cls, world_size: int) -> Topology:
        """Every rank exchanges with every other rank: each step averages over all ranks.

        Args:
          world_size: Number of ranks, at least 1.

        Returns:
          The topology.

        Raises:
          ValueError: If `world_size` is no positive integer.
        """
        return cls._from_adjacency(np.ones([_checked_world_size(world_size)] * 2, bool), name="complete")

    @classmethod
    def exponential(cls, world_size: int) -> Topology:
        """A directed graph: rank i sends to the ceil(log2(n)) ranks i + 1, i + 2, i + 4, ... modulo n (Ying et al.).

        Args:
          world_size: Number of ranks, at least 1.

        Returns:
          The topology.

        Raises:
          ValueError: If `world_size` is no positive integer.
        """
        offsets = [2**m for m in range((_checked_world_size(world_size) - 1).bit_length())]
        return cls._from_adjacency(_circulant(world_size, offsets), name="exponential")

    @classmethod
    def hierarchical(cls, hosts: Sequence[str]) -> Topology:
        """All-to-all inside a host, a ring among hosts, for hosts with a slower network between them (Figure 21, c).

        A host's last rank exchanges with the next host's first rank. In a step, two updates enter a host and two leave
        it, at different ranks if the host has several. The departure of one rank never splits the graph.

        Args:
          hosts: The name of each rank's host. The hosts form the ring in order of first appearance.

        Returns:
          The topology of `len(hosts)` ranks. With one host, the topology is complete.

        Raises:
          ValueError: If `hosts` is no list of names, or empty.
        """
        is_list = isinstance(hosts, Sequence) and not isinstance(hosts, str)
        if not is_list or not hosts or not all(isinstance(host, str) for host in hosts):
            raise ValueError(f"`hosts` must be a list with the host of each rank. Received: hosts={hosts!r}.")
        members = [[rank for rank, host in enumerate(hosts) if host == name] for name in dict.fromkeys(hosts)]
        adjacency = np.zeros((len(hosts), len(hosts)), bool)
        for ranks, next_ranks in zip(members, members[1:] + members[:1], strict=True):
            adjacency[np.ix_(ranks, ranks)] = True
            adjacency[ranks[-1], next_ranks[0]] = adjacency[next_ranks[0], ranks[-1]] = True
        return cls._from_adjacency(adjacency, name="hierarchical")

    @classmethod
    def from_matrix(cls, mixing_matrix: np.ndarray) -> Topology:
        """A user's own weights.

        Args:
          mixing_matrix: Array [n, n]; see the class for the rules.

        Returns:
          The topology, whose edges are the positive entries.

        Raises:
          ValueError: If `mixing_matrix` breaks a rule.
        """
        return cls(mixing_matrix, name="matrix")

    @classmethod
    def from_networkx(cls, graph: nx.Graph) -> Topology:
        """A user's own graph, with the weights that the class describes.

        Args:
          graph: Nodes 0..n-1 are the ranks. Undirected, or directed with the same number of in- and out-edges at all
            ranks. Self-loops, parallel edges and edge attributes do not count: pass your own weights to `from_matrix`.

        Returns:
          The topology.

        Raises:
          TypeError: If `graph` is no networkx graph.
          ValueError: If `graph` breaks one of these rules, or is not strongly connected.
        """
        if not isinstance(graph, nx.Graph):
            raise TypeError(f"`graph` must be a networkx graph. Received: graph={graph!r}.")
        if not len(graph) or set(graph) != set(range(len(graph))):
            raise ValueError(f"`graph` must have nodes 0..n-1, the ranks. Received: graph with nodes {list(graph)}.")
        if missing := _missing_path(graph):
            raise ValueError(f"`graph` must be strongly connected. Received: graph with {missing}.")
        return cls._from_adjacency(nx.to_numpy_array(graph, range(len(graph)), weight=None) > 0, name="graph")

    @classmethod
    def _from_adjacency(cls, adjacency: np.ndarray, *, name: str) -> Topology:
        adjacency = adjacency & ~np.eye(len(adjacency), dtype=bool)  # Self-loops do not count.
        num_in, num_out = adjacency.sum(axis=0), adjacency.sum(axis=1)
        if np.ptp([num_in, num_out]) and not np.array_equal(adjacency, adjacency.T):  # Irregular and directed.
            raise ValueError(
                "`graph` must be undirected, or have equally many in- and out-edges at all ranks. Otherwise weights by "
                "neighbors' degrees are not doubly stochastic: pass a mixing matrix instead. Received: graph with "
                f"{num_in.tolist()} in-edges and {num_out.tolist()} out-edges at ranks 0, 1, ..."
            )
        weights = adjacency / (1 + np.maximum.outer(num_in, num_in))  # Uniform if the graph is regular.
        np.fill_diagonal(weights, 1 - weights.sum(axis=0))
        return cls(weights, name=name)

    @property
    def world_size(self) -> int:
        """Number of ranks, n."""
        return len(self._mixing_matrix)

    @property
    def mixing_matrix(self) -> np.ndarray:
        """Read-only float64 array [n, n]; [j, i] is W_ji of Figure 1, the weight of rank j's update at rank i."""
        return self._mixing_matrix

    def in_neighbors(self, rank: int) -> tuple[int, ...]:
        """Ranks that send to `rank`, sorted, without `rank`. The paper's N_in includes it: `1 / |N_in|` in Figure 4."""
        return tuple(sorted(self._graph.predecessors(self._checked_rank(rank))))

    def out_neighbors(self, rank: int) -> tuple[int, ...]:
        """Ranks that `rank` sends to, sorted, without `rank`."""
        return tuple(sorted(self._graph.successors(self._checked_rank(rank))))

    def weights(self, rank: int) -> dict[int, float]:
        """The weight at `rank` of every update that it averages, by sender, including its own. Weights sum to 1."""
        column = self._mixing_matrix[:, self._checked_rank(rank)].tolist()
        return {sender: weight for sender, weight in enumerate(column) if weight}

    def shortest_path_length(self, source: int, target: int) -> int:
        """Number of edges of the shortest directed path, the paper's length(Path_source->target); 0 to itself."""
        return nx.shortest_path_length(self._graph, self._checked_rank(source), self._checked_rank(target))

    @property
    def diameter(self) -> int:
        """The largest shortest path length: the number of steps until every rank's update has reached all others."""
        return nx.diameter(self._graph)

    def is_doubly_stochastic(self, atol: float = _SUM_TOLERANCE) -> bool:
        """True if all columns and rows of the mixing matrix sum to 1 within `atol`. Always true at the default."""
        return bool(np.allclose([self._mixing_matrix.sum(axis=axis) for axis in (0, 1)], 1, rtol=0, atol=atol))

    @property
    def spectral_gap(self) -> float:
        """`|lambda_1(W)| - |lambda_2(W)|`, from 0 to 1: the larger, the fewer steps until ranks agree. 1 for one rank.

        This is the definition of Section 7.3.6. The values printed there (0.6667, 0.2682, 0.2688) result if W has no
        self-loops and eigenvalues keep their sign. This W has self-loops, as in Equation 1.
        """
        moduli = np.sort(np.abs(np.linalg.eigvals(self._mixing_matrix)))
        return float(moduli[-1] - moduli[-2]) if self.world_size > 1 else 1.0

    def max_iteration_gap_bound(self, i: int, j: int, max_iteration_gap: int) -> int:
        """The maximum lead, in steps, of rank i over rank j in standard training with token queues: Theorem 2.

        min(length(Path_j->i), max_iteration_gap * length(Path_i->j)); `max_iteration_gap`, max_ig, is at least 1.
        """
        if not isinstance(max_iteration_gap, int | np.integer) or max_iteration_gap < 1:
            raise ValueError(
                f"`max_iteration_gap` must be a positive integer. Received: max_iteration_gap={max_iteration_gap!r}."
            )
        return min(self.shortest_path_length(j, i), max_iteration_gap * self.shortest_path_length(i, j))

    def is_connected_without(self, departed: Collection[int]) -> bool:
        """True if the ranks that are not in `departed` still reach each other, or if at most one is left."""
        remaining = self._graph.subgraph(set(self._graph).difference(departed))
        return len(remaining) <= 1 or nx.is_strongly_connected(remaining)

    def to_networkx(self) -> nx.DiGraph:
        """A copy of the graph, without self-loops. An edge j -> i has the attribute `weight`, W[j, i]."""
        return self._graph.copy()

    def describe(self) -> str:
        """One line: updates sent in a step (edges), steps until all ranks are reached (diameter), convergence (gap)."""
        return f"{self!r}: {self._graph.size()} edges, diameter {self.diameter}, spectral gap {self.spectral_gap:.4f}"

    def __repr__(self) -> str:
        return f"Topology({self._name!r}, world_size={self.world_size})"

    def _checked_rank(self, rank: int) -> int:
        if rank not in range(self.world_size):
            raise ValueError(f"`rank` must be in [0, {self.world_size}). Received: rank={rank}.")
        return rank


def resolve(topology: object, world_size: int, hosts: Sequence[str] | None = None) -> Topology:
    """Turns a user's argument into a `Topology` of `world_size` ranks.

    Args:
      topology: "ring", "ring_based", "double_ring", "complete", "exponential" or "hierarchical"; a `Topology`, which is
        returned unchanged; a networkx graph; or a mixing matrix.
      world_size: Number of ranks.
      hosts: The host of each rank, for "hierarchical".

    Returns:
      The topology.

    Raises:
      ValueError: If the name is unknown, the topology has another number of ranks, or the graph cannot be used.
      TypeError: If `topology` is none of these.
    """
    _checked_world_size(world_size)
    if isinstance(topology, str):
        if topology not in _NAMES:
            raise ValueError(f"`topology` must be one of {', '.join(_NAMES)}. Received: topology={topology!r}.")
        topology = getattr(Topology, topology)(hosts if topology == "hierarchical" else world_size)
    elif isinstance(topology, nx.Graph):
        topology = Topology.from_networkx(topology)
    elif isinstance(topology, list | tuple) or hasattr(topology, "__array__"):
        topology = Topology.from_matrix(topology)
    if not isinstance(topology, Topology):
        raise TypeError(f"`topology` must be a name, Topology, graph or matrix. Received: topology={topology!r}.")
    if topology.world_size != world_size:
        raise ValueError(f"`topology` must have world_size={world_size} ranks. Received: topology={topology!r}.")
    return topology


def _checked_world_size(world_size: int) -> int:
    if not isinstance(world_size, int | np.integer) or isinstance(world_size, bool) or world_size < 1:
        raise ValueError(f"`world_size` must be a positive integer. Received: world_size={world_size!r}.")
    return int(world_size)


def _checked_mixing_matrix(mixing_matrix: object) -> np.ndarray:
    try:
        matrix = np.asarray(mixing_matrix).astype(np.float64, casting="same_kind")
    except (TypeError, ValueError) as error:  # Strings, complex numbers, rows of different lengths.
        raise ValueError(f"`mixing_matrix` must be real numbers. Received: mixing_matrix={mixing_matrix}.") from error
    if fault := _fault(matrix):
        raise ValueError(
            "`mixing_matrix` must be square, finite, non-negative, positive on the diagonal, and doubly stochastic: "
            f"columns and rows sum to 1 within {_SUM_TOLERANCE}. Received: mixing_matrix with {fault}."
        )
    return matrix


def _fault(matrix: np.ndarray) -> str | None:
    """Describes a fault of a mixing matrix and its place; None without a fault."""
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not matrix.size:
        return f"shape {matrix.shape}"
    allowed = np.isfinite(matrix) & np.where(np.eye(len(matrix), dtype=bool), matrix > 0, matrix >= 0)
    if not allowed.all():
        j, i = np.argwhere(~allowed)[0]
        return f"[{j}, {i}]={matrix[j, i]}"
    for axis, line in enumerate(("column", "row")):
        sums = matrix.sum(axis=axis)
        worst = np.abs(sums - 1).argmax()
        if abs(sums[worst] - 1) > _SUM_TOLERANCE:
            return f"{line} {worst} summing to {sums[worst]:.8g}"
    return None


def _missing_path(graph: nx.Graph) -> str | None:
    """Names two ranks without a path between them; None if rank 0 reaches all ranks and all reach rank 0."""
    if unreached := set(graph) - {0} - nx.descendants(graph, 0):
        return f"no path from rank 0 to rank {min(unreached)}"
    unheard = set(graph) - {0} - nx.ancestors(graph, 0)
    return f"no path from rank {min(unheard)} to rank 0" if unheard else None


def _circulant(size: int, offsets: Sequence[int]) -> np.ndarray:
    """Adjacency of the edges i -> i + offset modulo `size`; offsets that are equal modulo `size` make one edge."""
    adjacency = np.zeros((size, size), bool)
    for offset in offsets:
        adjacency |= np.roll(np.eye(size, dtype=bool), offset, axis=1)
    return adjacency


def _ring_based(size: int) -> np.ndarray:
    return _circulant(size, (1, -1, size // 2, -(size // 2)))

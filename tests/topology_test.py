"""Topologies: mixing matrices and spectral gaps against closed forms, paths against Floyd-Warshall, refusals."""

import math
import os
import subprocess
import sys

import networkx as nx
import numpy as np
from absl.testing import absltest, parameterized
from hypothesis import given, settings
from hypothesis import strategies as st

from hop_tf.topology import Topology, resolve

_NAMES = ("ring", "ring_based", "double_ring", "complete", "exponential", "hierarchical")


def _by_name(name, world_size):
    return resolve(name, world_size, hosts=[f"host{rank // 2}" for rank in range(world_size)])


def _edges(topology):
    return {(j, i) for j in range(topology.world_size) for i in topology.out_neighbors(j)}


@st.composite
def _connected_graphs(draw, max_world_size=12):
    """A random tree and random edges on top."""
    world_size = draw(st.integers(1, max_world_size))
    rank = st.integers(0, world_size - 1)
    graph = nx.empty_graph(world_size)
    graph.add_edges_from((draw(st.integers(0, child - 1)), child) for child in range(1, world_size))
    graph.add_edges_from(draw(st.lists(st.tuples(rank, rank), max_size=2 * world_size)))
    return graph


@st.composite
def _circulant_digraphs(draw, max_world_size=16):
    """Edges i -> i + offset, strongly connected because the offsets' common divisor with the size is 1."""
    world_size = draw(st.integers(2, max_world_size))
    offsets = draw(st.sets(st.integers(1, world_size - 1), min_size=1))
    if math.gcd(world_size, *offsets) > 1:
        offsets.add(1)
    edges = [(rank, (rank + offset) % world_size) for rank in range(world_size) for offset in offsets]
    return nx.DiGraph(edges), offsets


class FactoriesTest(parameterized.TestCase):
    def test_ring_based(self):
        topology = Topology.ring_based(16)
        self.assertEqual(topology.in_neighbors(3), (2, 4, 11))
        self.assertEqual(topology.out_neighbors(0), (1, 8, 15))
        self.assertEqual(Topology.ring_based(7).in_neighbors(0), (1, 3, 4, 6))  # Two ranks are the most distant.

    def test_double_ring(self):
        topology = Topology.double_ring(16)
        self.assertEqual(topology.in_neighbors(0), (1, 4, 7, 8))
        self.assertEqual(topology.in_neighbors(11), (3, 10, 12, 15))

    def test_double_ring_of_odd_size(self):
        topology = Topology.double_ring(9)  # A ring-based graph of ranks 0..4, which is complete, and one of 5..8.
        self.assertEqual(topology.in_neighbors(3), (0, 1, 2, 4, 8))
        self.assertEqual(topology.in_neighbors(4), (0, 1, 2, 3, 5))
        self.assertEqual(topology.in_neighbors(5), (0, 4, 6, 7, 8))

    def test_exponential_is_directed(self):
        topology = Topology.exponential(8)
        self.assertEqual(topology.out_neighbors(6), (0, 2, 7))
        self.assertEqual(topology.in_neighbors(6), (2, 4, 5))
        self.assertEqual(len(Topology.exponential(9).out_neighbors(0)), 4)

    def test_hierarchical(self):
        topology = Topology.hierarchical(["a", "b", "a", "c", "b", "a"])  # a: 0 2 5, b: 1 4, c: 3.
        edges = {(0, 2), (0, 5), (2, 5), (1, 4)} | {(5, 1), (4, 3), (3, 0)}
        self.assertEqual(_edges(topology), edges | {(i, j) for j, i in edges})

    @parameterized.parameters(("aaaaa", Topology.complete(5)), ("abcde", Topology.ring(5)))
    def test_hierarchical_at_the_extremes(self, hosts, expected):
        np.testing.assert_array_equal(Topology.hierarchical(list(hosts)).mixing_matrix, expected.mixing_matrix)

    @settings(deadline=None)
    @given(hosts=st.lists(st.sampled_from("abcd"), min_size=1, max_size=9))
    def test_hierarchical_survives_any_one_departure(self, hosts):
        topology = Topology.hierarchical(hosts)
        for rank in range(len(hosts)):
            self.assertTrue(topology.is_connected_without([rank]))

    @parameterized.product(name=_NAMES, world_size=list(range(1, 10)))
    def test_every_name_works_at_every_size(self, name, world_size):
        topology = _by_name(name, world_size)
        self.assertEqual(topology.world_size, world_size)
        self.assertTrue(topology.is_doubly_stochastic(atol=1e-12))
        self.assertGreater(topology.spectral_gap, 0)
        for rank in range(world_size):
            self.assertNotIn(rank, topology.in_neighbors(rank))
            self.assertEqual(set(topology.weights(rank)), {rank, *topology.in_neighbors(rank)})

    @parameterized.product(name=_NAMES, world_size=[1, 2, 3])
    def test_small_worlds_are_complete(self, name, world_size):
        np.testing.assert_allclose(
            _by_name(name, world_size).mixing_matrix, np.full((world_size, world_size), 1 / world_size), rtol=1e-15
        )

    @parameterized.named_parameters(
        ("ring", "ring", nx.cycle_graph(4)),
        ("ring_based", "ring_based", nx.complete_graph(4)),
        ("double_ring", "double_ring", nx.Graph([(0, 1), (2, 3), (0, 2), (1, 3)])),
        ("complete", "complete", nx.complete_graph(4)),
        ("exponential", "exponential", nx.DiGraph((i, (i + k) % 4) for i in range(4) for k in (1, 2))),
        ("hierarchical", "hierarchical", nx.Graph([(0, 1), (2, 3), (1, 2), (3, 0)])),
    )
    def test_world_of_4(self, name, graph):
        self.assertEqual(_edges(_by_name(name, 4)), set(graph.to_directed().edges))


class MixingMatrixTest(parameterized.TestCase):
    def test_metropolis_hastings_on_a_path(self):
        topology = Topology.from_networkx(nx.path_graph(3))
        np.testing.assert_allclose(topology.mixing_matrix, np.array([[2, 1, 0], [1, 1, 1], [0, 1, 2]]) / 3)

    @settings(deadline=None)
    @given(graph=_connected_graphs())
    def test_undirected_graphs(self, graph):
        topology = Topology.from_networkx(graph)
        matrix = topology.mixing_matrix
        self.assertTrue(topology.is_doubly_stochastic(atol=1e-12))
        np.testing.assert_array_equal(matrix, matrix.T)
        self.assertTrue(np.all(np.diag(matrix) > 0))
        self.assertEqual(_edges(topology), {(j, i) for j, i in graph.to_directed().edges if j != i})

    @settings(deadline=None)
    @given(graph_and_offsets=_circulant_digraphs())
    def test_circulant_digraphs(self, graph_and_offsets):
        graph, offsets = graph_and_offsets
        topology = Topology.from_networkx(graph)
        self.assertTrue(topology.is_doubly_stochastic(atol=1e-12))
        self.assertEqual(_edges(topology), set(graph.edges))
        for rank in range(topology.world_size):
            weights = topology.weights(rank)
            self.assertEqual(set(weights), {rank} | {(rank - offset) % topology.world_size for offset in offsets})
            np.testing.assert_allclose(list(weights.values()), 1 / (len(offsets) + 1))

    @settings(deadline=None)
    @given(graph=_connected_graphs())
    def test_averaging_ends_at_the_mean(self, graph):
        topology = Topology.from_networkx(graph)
        x = np.random.default_rng(0).normal(size=topology.world_size)
        mixed = np.linalg.matrix_power(topology.mixing_matrix.T, 10_000) @ x
        np.testing.assert_allclose(mixed, np.full_like(x, x.mean()), atol=1e-8)

    @parameterized.parameters(
        (Topology.ring(5), True), (Topology.from_networkx(nx.star_graph(4)), True), (Topology.exponential(5), False)
    )
    def test_a_departure_keeps_symmetric_weights_doubly_stochastic(self, topology, expected):
        """Rank 0 departs; what it would have sent, ranks replace by their own parameters."""
        matrix = topology.mixing_matrix
        left = matrix[1:, 1:] + np.diag(matrix[0, 1:])
        np.testing.assert_allclose(left.sum(axis=0), 1)
        np.testing.assert_allclose(left.sum(axis=1), 1 - matrix[1:, 0] + matrix[0, 1:])
        self.assertEqual(np.allclose(left.sum(axis=1), 1), expected)

    def test_columns_are_receivers(self):
        """Doubly stochastic, not symmetric: 0 gives 1 the weight 0.3, and gets from it 0.1."""
        topology = Topology.from_matrix([[0.6, 0.3, 0.1], [0.1, 0.6, 0.3], [0.3, 0.1, 0.6]])
        self.assertEqual(topology.weights(1), {0: 0.3, 1: 0.6, 2: 0.1})

    def test_float32_matrices_are_accepted(self):
        topology = Topology.from_matrix(Topology.ring(7).mixing_matrix.astype(np.float32))
        self.assertEqual(topology.mixing_matrix.dtype, np.float64)
        self.assertTrue(topology.is_doubly_stochastic())
        self.assertFalse(topology.is_doubly_stochastic(atol=1e-12))

    def test_is_immutable(self):
        matrix = np.full((2, 2), 0.5)
        topology = Topology.from_matrix(matrix)
        matrix[0, 0] = 7
        topology.weights(0)[0] = 7
        topology.to_networkx().remove_edge(0, 1)
        with self.assertRaisesRegex(ValueError, "read-only"):
            topology.mixing_matrix[0, 0] = 7
        with self.assertRaises(AttributeError):
            topology.mixing_matrix = matrix
        np.testing.assert_array_equal(topology.mixing_matrix, np.full((2, 2), 0.5))
        self.assertEqual(topology.out_neighbors(0), (1,))


class SpectralGapTest(parameterized.TestCase):
    @parameterized.parameters(3, 4, 5, 8, 16, 33)
    def test_ring(self, world_size):
        expected = 1 - (1 + 2 * math.cos(2 * math.pi / world_size)) / 3
        self.assertAlmostEqual(Topology.ring(world_size).spectral_gap, expected, places=12)

    @parameterized.parameters(1, 2, 3, 8, 20)
    def test_complete(self, world_size):
        self.assertAlmostEqual(Topology.complete(world_size).spectral_gap, 1.0, places=12)

    @parameterized.parameters(2, 4, 6, 8, 10, 16, 24, 64)
    def test_exponential(self, world_size):
        expected = 2 / (1 + math.ceil(math.log2(world_size)))
        self.assertAlmostEqual(Topology.exponential(world_size).spectral_gap, expected, places=12)

    @parameterized.parameters(1, 2, 3, 5)
    def test_hypercube(self, dimension):
        graph = nx.convert_node_labels_to_integers(nx.hypercube_graph(dimension))
        self.assertAlmostEqual(Topology.from_networkx(graph).spectral_gap, 2 / (dimension + 1), places=12)

    @parameterized.parameters(8, 16, 20)
    def test_ring_based(self, world_size):
        """Eigenvalues of a circulant matrix are the Fourier transform of its row."""
        eigenvalues = [(1 + 2 * math.cos(2 * math.pi * k / world_size) + (-1) ** k) / 4 for k in range(1, world_size)]
        expected = 1 - max(map(abs, eigenvalues))
        self.assertAlmostEqual(Topology.ring_based(world_size).spectral_gap, expected, places=12)

    def test_directed_ring_has_complex_eigenvalues(self):
        """(1 + w^k) / 2 with w a root of unity; of modulus |cos(pi k / n)|."""
        graph = nx.cycle_graph(5, create_using=nx.DiGraph)
        self.assertAlmostEqual(Topology.from_networkx(graph).spectral_gap, 1 - math.cos(math.pi / 5), places=12)

    @parameterized.parameters((Topology.ring_based(8), 0.6667), (Topology.hierarchical(list("aaaabbcc")), 0.2688))
    def test_graphs_of_the_paper(self, topology, printed):
        """Figure 21 prints these for (a) and (c): without self-loops, and eigenvalues with their sign."""
        adjacency = nx.to_numpy_array(topology.to_networkx(), weight=None)
        second, first = np.sort(np.linalg.eigvals(adjacency / adjacency.sum(axis=0)).real)[-2:]
        self.assertEqual(round(first - second, 4), printed)


class PathsTest(parameterized.TestCase):
    @settings(deadline=None)
    @given(graph=st.one_of(_connected_graphs(), _circulant_digraphs().map(lambda pair: pair[0])))
    def test_lengths_equal_floyd_warshall(self, graph):
        topology = Topology.from_networkx(graph)
        expected = nx.floyd_warshall_numpy(graph, nodelist=range(len(graph)), weight=None)
        actual = [[topology.shortest_path_length(j, i) for i in range(len(graph))] for j in range(len(graph))]
        np.testing.assert_array_equal(actual, expected)
        self.assertEqual(topology.diameter, expected.max())

    @parameterized.parameters(("ring", 1, 0), ("ring", 7, 3), ("ring", 16, 8), ("exponential", 16, 4))
    def test_diameter(self, name, world_size, diameter):
        self.assertEqual(resolve(name, world_size).diameter, diameter)

    @parameterized.parameters((1, 1), (2, 2), (3, 3), (4, 3), (100, 3))
    def test_theorem_2_on_a_directed_ring(self, max_iteration_gap, bound):
        """0 -> 1 -> 2 -> 3 -> 0. Rank 0 hears of 1 over three edges, which Theorem 1 allows; 1 gives 0 its tokens."""
        topology = Topology.from_networkx(nx.cycle_graph(4, create_using=nx.DiGraph))
        self.assertEqual(topology.max_iteration_gap_bound(0, 1, max_iteration_gap), bound)
        self.assertEqual(topology.max_iteration_gap_bound(1, 0, max_iteration_gap), 1)
        self.assertEqual(topology.max_iteration_gap_bound(2, 2, max_iteration_gap), 0)

    def test_theorem_2_on_undirected_graphs_is_theorem_1(self):
        topology = Topology.from_networkx(nx.path_graph(6))
        for i in range(6):
            for j in range(6):
                self.assertEqual(topology.max_iteration_gap_bound(i, j, max_iteration_gap=5), abs(i - j))

    @parameterized.parameters(0, -1, 1.5, "3", None)
    def test_theorem_2_refuses_gaps(self, max_iteration_gap):
        with self.assertRaisesRegex(ValueError, r"`max_iteration_gap` must be a positive integer\. Received: "):
            Topology.ring(4).max_iteration_gap_bound(0, 1, max_iteration_gap)

    def test_is_connected_without(self):
        ring = Topology.ring(6)
        self.assertTrue(ring.is_connected_without([]))
        self.assertTrue(ring.is_connected_without({2, 3}))
        self.assertFalse(ring.is_connected_without({0, 3}))
        self.assertTrue(ring.is_connected_without({0, 1, 2, 3, 4}))
        self.assertTrue(ring.is_connected_without(range(6)))
        directed_ring = Topology.from_networkx(nx.cycle_graph(6, create_using=nx.DiGraph))
        self.assertFalse(directed_ring.is_connected_without([0]))


class ResolveTest(parameterized.TestCase):
    def test_a_topology_is_returned_as_it_is(self):
        topology = Topology.ring(4)
        self.assertIs(resolve(topology, 4), topology)

    @parameterized.named_parameters(
        ("name", "ring"),
        ("array", Topology.ring(5).mixing_matrix),
        ("list", Topology.ring(5).mixing_matrix.tolist()),
        ("graph", nx.cycle_graph(5)),
        ("directed_graph", nx.cycle_graph(5).to_directed()),
        ("multigraph_with_self_loops", nx.MultiGraph([*nx.cycle_graph(5).edges, (0, 1), (2, 2)])),
        ("networkx_copy", Topology.ring(5).to_networkx()),
    )
    def test_accepts(self, topology):
        resolved = resolve(topology, 5)
        np.testing.assert_allclose(resolved.mixing_matrix, Topology.ring(5).mixing_matrix, rtol=1e-15)

    def test_weights_survive_the_way_through_networkx(self):
        topology = Topology.from_matrix([[0.7, 0.3, 0.0], [0.0, 0.7, 0.3], [0.3, 0.0, 0.7]])
        graph = topology.to_networkx()
        self.assertEqual(graph.edges[0, 1]["weight"], 0.3)
        self.assertEqual(set(graph.edges), {(0, 1), (1, 2), (2, 0)})

    def test_describe(self):
        self.assertEqual(repr(Topology.ring(8)), "Topology('ring', world_size=8)")
        self.assertEqual(
            Topology.ring(8).describe(), "Topology('ring', world_size=8): 16 edges, diameter 4, spectral gap 0.1953"
        )

    @parameterized.named_parameters(
        ("unknown_name", "rings", r"`topology` must be one of ring, .*, hierarchical\. Received: topology='rings'\."),
        ("other_size", Topology.ring(4), r"world_size=3 ranks\. Received: topology=Topology\('ring', world_size=4\)\."),
        ("matrix_of_other_size", np.eye(1), r"`topology` must have world_size=3 ranks\."),
        ("no_hosts", "hierarchical", r"`hosts` must be a list with the host of each rank\. Received: hosts=None\."),
    )
    def test_refuses(self, topology, message):
        with self.assertRaisesRegex(ValueError, message):
            resolve(topology, 3)

    @parameterized.parameters(None, 3.5, b"ring", (Topology.ring,), Topology)
    def test_refuses_other_types(self, topology):
        with self.assertRaisesRegex(TypeError, r"`topology` must be a name, .*\. Received: topology="):
            resolve(topology, 3)

    @parameterized.parameters(0, -1, 2.0, "4", None, True)
    def test_refuses_world_size(self, world_size):
        message = r"`world_size` must be a positive integer\. Received: world_size="
        with self.assertRaisesRegex(ValueError, message):
            resolve("ring", world_size)
        for name in ("ring", "ring_based", "double_ring", "complete", "exponential"):
            factory = getattr(Topology, name)
            with self.assertRaisesRegex(ValueError, message):
                factory(world_size)

    def test_refuses_hosts_of_another_number_of_ranks(self):
        with self.assertRaisesRegex(ValueError, r"world_size=3 ranks\. Received: .*'hierarchical', world_size=2"):
            resolve("hierarchical", 3, hosts=["a", "b"])

    @parameterized.parameters("localhost", ([],), 3, None, ([1, 2],), ([["a"]],))
    def test_refuses_hosts(self, hosts):
        with self.assertRaisesRegex(ValueError, r"`hosts` must be a list .*\. Received: hosts="):
            Topology.hierarchical(hosts)


class RefusedMatricesTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("not_square", np.ones((2, 3)) / 2, r"must be square.*with shape \(2, 3\)\."),
        ("empty", [], r"with shape \(0,\)\."),
        ("negative", [[1.5, -0.5], [-0.5, 1.5]], r"non-negative.*with \[0, 1\]=-0\.5\."),
        ("three_axes", np.ones((1, 1, 1)), r"must be square.*with shape \(1, 1, 1\)\."),
        ("no_axis", np.float32(1), r"must be square.*with shape \(\)\."),
        ("nan", [[0.5, 0.5], [0.5, np.nan]], r"finite.*with \[1, 1\]=nan\."),
        ("infinite", [[0.5, np.inf], [0.5, 0.5]], r"finite.*with \[0, 1\]=inf\."),
        ("none", [[None]], r"must be real numbers\."),
        ("adjacency", [[0, 1], [1, 0]], r"positive on the diagonal.*with \[0, 0\]=0\.0\."),
        ("columns", [[0.6, 0.5], [0.4, 0.6]], r"doubly stochastic.*with column 1 summing to 1\.1\."),
        ("rows", [[0.5, 0.5, 0.2], [0.4, 0.4, 0.1], [0.1, 0.1, 0.7]], r"with row 0 summing to 1\.2\."),
        (
            "unconnected",
            np.eye(3),
            r"strongly connected\. Received: mixing_matrix with no path from rank 0 to rank 1\.",
        ),
        ("ragged", [[0.5, 0.5], [0.5]], r"must be real numbers\. Received: mixing_matrix=\[\[0\.5, 0\.5\], \[0\.5\]\]"),
        ("complex", np.eye(1) * 1j, r"must be real numbers\."),
        ("strings", [["a"]], r"must be real numbers\. Received: mixing_matrix=\[\['a'\]\]\."),
    )
    def test_refuses(self, matrix, message):
        with self.assertRaisesRegex(ValueError, r"`mixing_matrix` " + ".*" + message):
            Topology.from_matrix(matrix)


class RefusedGraphsTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("names", nx.Graph([("a", "b")]), r"must have nodes 0\.\.n-1, .*graph with nodes \['a', 'b'\]\."),
        ("gap_in_names", nx.Graph([(1, 2)]), r"graph with nodes \[1, 2\]\."),
        ("empty", nx.Graph(), r"graph with nodes \[\]\."),
        ("in_two_parts", nx.Graph([(0, 1), (2, 3)]), r"strongly connected\. .*no path from rank 0 to rank 2\."),
        ("one_way_out", nx.DiGraph([(0, 1), (1, 2)]), r"strongly connected\. .*no path from rank 1 to rank 0\."),
        ("isolated", nx.empty_graph(2), r"no path from rank 0 to rank 1\."),
        (
            "irregular_and_directed",
            nx.DiGraph([(0, 1), (1, 2), (2, 0), (0, 2)]),
            r"must be undirected, or have equally many .*\[1, 1, 2\] in-edges and \[2, 1, 1\] out-edges",
        ),
        (
            "balanced_but_irregular",
            nx.DiGraph([(0, 1), (1, 2), (2, 0), (0, 3), (3, 0)]),
            r"must be undirected, .*\[2, 1, 1, 1\] in-edges and \[2, 1, 1, 1\] out-edges",
        ),
    )
    def test_refuses(self, graph, message):
        with self.assertRaisesRegex(ValueError, r"`graph` .*" + message):
            Topology.from_networkx(graph)

    def test_refuses_other_types(self):
        with self.assertRaisesRegex(TypeError, r"`graph` must be a networkx graph\. Received: graph=3\."):
            Topology.from_networkx(3)

    @parameterized.parameters(-1, 4, 1.5)
    def test_refuses_ranks(self, rank):
        topology = Topology.ring(4)
        message = rf"`rank` must be in \[0, 4\)\. Received: rank={rank}\."
        for query in (topology.in_neighbors, topology.out_neighbors, topology.weights):
            with self.assertRaisesRegex(ValueError, message):
                query(rank)
        with self.assertRaisesRegex(ValueError, message):
            topology.shortest_path_length(0, rank)


class ImportTest(absltest.TestCase):
    def test_needs_no_tensorflow(self):
        code = "import sys, hop_tf.topology; sys.exit('tensorflow' in sys.modules or 'keras' in sys.modules)"
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env=environment)


if __name__ == "__main__":
    absltest.main()

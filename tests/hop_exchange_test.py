"""HopExchange against a NumPy reference, on a virtual clock: no processes, no Keras, random delays."""

import networkx as nx
import numpy as np
import tensorflow as tf
from absl.testing import parameterized
from hypothesis import given, settings
from hypothesis import strategies as st

from hop_tf.errors import HopError
from hop_tf.exchange import Outgoing
from hop_tf.packing import Packing, TensorSpec
from hop_tf.simulate import VirtualCluster
from hop_tf.strategies.hop import HopExchange
from hop_tf.topology import Topology, resolve
from hop_tf.worker import ExchangeContext

_DIMENSION = 5
_LEARNING_RATE = 0.05


def _least_squares(world_size, seed):
    """Each rank's own problem: gradient(rank, x) of the mean squared error."""
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(world_size, 8, _DIMENSION))
    targets = rng.normal(size=(world_size, 8))
    return lambda rank, x: 2 / 8 * features[rank].T @ (features[rank] @ x - targets[rank])


def _reference(topology, gradient, x0, num_steps):
    """Figure 7 without queues: x_k+1,i = sum_j W_ji x_k,j - eta g_i(x_k,i), all ranks in step."""
    x = np.tile(x0, (topology.world_size, 1))
    for _ in range(num_steps):
        steps = np.stack([gradient(rank, x[rank]) for rank in range(topology.world_size)])
        x = topology.mixing_matrix.T @ x - _LEARNING_RATE * steps
    return x


class _Run:
    """Trains on a virtual cluster and records what each rank does."""

    def __init__(self, topology, gradient, *, num_steps, max_iteration_gap, seed, stop_at=None):
        world_size = topology.world_size
        self.topology = topology
        self.x = np.zeros((world_size, _DIMENSION), np.float32)
        self.largest_gap = np.full((world_size, world_size), -np.inf)
        self.late_updates = 0
        self._gradient = gradient
        self._num_steps = {rank: (stop_at or {}).get(rank, num_steps) for rank in range(world_size)}
        self._max_iteration_gap = max_iteration_gap
        self._rng = np.random.default_rng(seed)
        link_times = self._rng.exponential(size=(world_size, world_size))
        self._cluster = VirtualCluster(world_size, lambda a, b, n: link_times[a, b] * self._rng.random())
        self._mean_compute = self._rng.exponential(size=world_size)
        self._running = {}
        self._packing = Packing([TensorSpec("x", (_DIMENSION,), tf.float32)])

    def run(self):
        self._cluster.run(self._train)
        return self

    def _train(self, rank):
        membership = self._cluster.memberships[rank]
        context = ExchangeContext("g", 1, self._packing, membership, self._cluster.pool)
        exchange = HopExchange(context, topology=self.topology, max_iteration_gap=self._max_iteration_gap)
        membership.begin_session()
        self._running[rank] = exchange
        for step in range(self._num_steps[rank]):
            self._step(rank, step, exchange)
        del self._running[rank]
        self.late_updates += exchange.counters()["late_updates"]
        membership.leave(sent_steps={"g": exchange.sent_steps}, reason="done")

    def _step(self, rank, step, exchange):
        clock = self._cluster.scheduler
        start = clock.now
        gradient = self._gradient(rank, self.x[rank].astype(np.float64))
        bucket = np.zeros(self._packing.sizes[0], np.float32)
        bucket[:_DIMENSION] = self.x[rank]
        exchange.iteration = step
        self._record_gaps()
        incoming = exchange.step(Outgoing(step, 0, (bucket,)))
        computed_at = start + self._mean_compute[rank] * self._rng.exponential()
        clock.sleep(max(0.0, computed_at - clock.now))
        self.x[rank] += incoming.buckets[0][:_DIMENSION] - np.float32(_LEARNING_RATE) * gradient.astype(np.float32)

    def _record_gaps(self):
        for i, at_i in self._running.items():
            for j, at_j in self._running.items():
                self.largest_gap[i, j] = max(self.largest_gap[i, j], at_i.iteration - at_j.iteration)


def _random_topology(rng, max_world_size=10):
    world_size = int(rng.integers(2, max_world_size + 1))
    tree = nx.random_labeled_tree(world_size, seed=int(rng.integers(2**31)))
    for a, b in rng.integers(world_size, size=(world_size, 2)):
        if a != b:
            tree.add_edge(int(a), int(b))
    return resolve(tree, world_size)


class HopExchangeTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.named_parameters(
        ("ring_of_3", "ring", 3),
        ("complete_4", "complete", 4),
        ("exponential_8", "exponential", 8),
        ("double_ring_8", "double_ring", 8),
    )
    def test_equals_figure_7(self, name, world_size):
        topology = resolve(name, world_size)
        gradient = _least_squares(world_size, seed=1)
        run = _Run(topology, gradient, num_steps=40, max_iteration_gap=4, seed=2).run()
        expected = _reference(topology, gradient, np.zeros(_DIMENSION), num_steps=40)
        self.assertAllClose(run.x, expected, rtol=1e-5, atol=1e-5)
        self.assertEqual(run.late_updates, 0)

    def test_mean_equals_closed_form_for_linear_loss(self):
        slopes = np.random.default_rng(3).normal(size=(6, _DIMENSION))
        run = _Run(resolve("ring", 6), lambda rank, x: slopes[rank], num_steps=50, max_iteration_gap=3, seed=4).run()
        self.assertAllClose(run.x.mean(axis=0), -_LEARNING_RATE * 50 * slopes.mean(axis=0), rtol=1e-5, atol=1e-5)

    @settings(max_examples=40, deadline=None)
    @given(seed=st.integers(0, 2**31), max_iteration_gap=st.integers(1, 5))
    def test_gap_stays_within_theorem_2(self, seed, max_iteration_gap):
        rng = np.random.default_rng(seed)
        topology = _random_topology(rng)
        run = _Run(
            topology,
            lambda rank, x: x,
            num_steps=20,
            max_iteration_gap=max_iteration_gap,
            seed=int(rng.integers(2**31)),
        ).run()
        for i in range(topology.world_size):
            for j in range(topology.world_size):
                bound = topology.max_iteration_gap_bound(i, j, max_iteration_gap)
                self.assertLessEqual(run.largest_gap[i, j], bound)

    def test_gap_of_theorem_1_is_reached(self):
        """The bound is tight, so that the test above can fail: a slow rank at the end of a path of 4."""
        topology = resolve(nx.path_graph(4), 4)
        run = _Run(topology, lambda rank, x: x, num_steps=12, max_iteration_gap=8, seed=5)
        run._mean_compute = np.array([1000.0, 1e-3, 1e-3, 1e-3])
        run.run()
        self.assertEqual(run.largest_gap[3, 0], topology.shortest_path_length(0, 3))

    def test_tokens_bind_where_paths_do_not(self):
        """On a directed ring 0 -> 1 -> 2 -> 0, Theorem 1 lets 0 be 2 ahead of 1; max_ig=1 allows 1."""
        topology = resolve(nx.DiGraph([(0, 1), (1, 2), (2, 0)]), 3)
        for max_iteration_gap, largest in ((1, 1), (4, 2)):
            run = _Run(topology, lambda rank, x: x, num_steps=12, max_iteration_gap=max_iteration_gap, seed=6)
            run._mean_compute = np.array([1e-3, 1000.0, 1e-3])
            run.run()
            self.assertEqual(run.largest_gap[0, 1], largest)

    def test_goes_on_without_a_rank_that_leaves(self):
        topology = resolve("complete", 4)
        gradient = _least_squares(4, seed=7)
        run = _Run(topology, gradient, num_steps=30, max_iteration_gap=4, seed=8, stop_at={2: 10}).run()
        x = np.zeros((4, _DIMENSION))
        for step in range(30):
            weights = topology.mixing_matrix.copy()
            if step >= 10:  # Its weight goes to the receiver itself.
                weights[np.diag_indices(4)] += weights[2]
                weights[2] = 0
            x_next = weights.T @ x - _LEARNING_RATE * np.stack([gradient(r, x[r]) for r in range(4)])
            x = np.where((np.arange(4) == 2)[:, None] & (step >= 10), x, x_next)
        self.assertAllClose(run.x, x, rtol=1e-5, atol=1e-5)

    def test_a_departure_that_splits_the_graph_is_an_error(self):
        topology = resolve(nx.path_graph(3), 3)
        run = _Run(topology, lambda rank, x: x, num_steps=30, max_iteration_gap=4, seed=9, stop_at={1: 10})
        with self.assertRaisesRegex(HopError, r"ranks \[1\] have left"):
            run.run()

    def test_the_end_of_training_splits_nothing(self):
        run = _Run(resolve("ring", 8), lambda rank, x: x, num_steps=20, max_iteration_gap=4, seed=10).run()
        self.assertAllClose(run.x, np.zeros_like(run.x))


class TopologyArgumentTest(tf.test.TestCase):
    def test_topology_objects_are_used_as_given(self):
        topology = resolve("ring", 5)
        self.assertIsInstance(topology, Topology)
        self.assertIs(resolve(topology, 5), topology)


if __name__ == "__main__":
    tf.test.main()

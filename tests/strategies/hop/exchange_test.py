"""HopExchange against a NumPy reference, on a virtual clock: no processes, no Keras, random delays."""

import networkx as nx
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized
from hypothesis import given, settings
from hypothesis import strategies as st

import hop_tf
from hop_tf.errors import HopError
from hop_tf.tools.simulate import Problem
from hop_tf.topology import Topology, resolve

_DIMENSION = 5
_LEARNING_RATE = 0.05


def _least_squares(world_size, seed):
    """Returns `gradient(rank, x)` of the mean squared error of each rank's own problem."""
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


def _run(topology, gradient, *, num_steps, seed, max_iteration_gap=4, mean_compute=None):
    """Trains in random time: links and ranks of different speeds, no two steps alike."""
    rng = np.random.default_rng(seed)
    world_size = topology.world_size
    link_times = rng.exponential(size=(world_size, world_size))
    mean_compute = rng.exponential(size=world_size) if mean_compute is None else mean_compute
    return hop_tf.simulate.hop(
        topology=topology,
        world_size=world_size,
        num_steps=num_steps,
        compute=lambda rank: iter(mean_compute[rank] * rng.exponential(size=1000)),
        link_seconds=lambda a, b, num_bytes: link_times[a, b] * rng.random(),
        problem=Problem(
            np.zeros(_DIMENSION, np.float32),
            lambda rank, step, x: -_LEARNING_RATE * gradient(rank, x.astype(np.float64)),
        ),
        max_iteration_gap=max_iteration_gap,
    )


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
        run = _run(topology, gradient, num_steps=40, seed=2)
        expected = _reference(topology, gradient, np.zeros(_DIMENSION), num_steps=40)
        self.assertAllClose(run.parameters, expected, rtol=1e-5, atol=1e-5)
        self.assertEqual([counters["late_updates"] for counters in run.counters], [0] * world_size)

    def test_mean_equals_closed_form_for_linear_loss(self):
        slopes = np.random.default_rng(3).normal(size=(6, _DIMENSION))
        run = _run(resolve("ring", 6), lambda rank, x: slopes[rank], num_steps=50, max_iteration_gap=3, seed=4)
        self.assertAllClose(
            run.parameters.mean(axis=0), -_LEARNING_RATE * 50 * slopes.mean(axis=0), rtol=1e-5, atol=1e-5
        )

    @settings(max_examples=40, deadline=None)
    @given(seed=st.integers(0, 2**31), max_iteration_gap=st.integers(1, 5))
    @pytest.mark.stress
    def test_gap_stays_within_theorem_2(self, seed, max_iteration_gap):
        rng = np.random.default_rng(seed)
        topology = _random_topology(rng)
        run = _run(
            topology,
            lambda rank, x: x,
            num_steps=20,
            max_iteration_gap=max_iteration_gap,
            seed=int(rng.integers(2**31)),
        )
        for i in range(topology.world_size):
            for j in range(topology.world_size):
                bound = topology.max_iteration_gap_bound(i, j, max_iteration_gap)
                self.assertLessEqual(run.largest_gap[i, j], bound)

    def test_tokens_bind_where_paths_do_not(self):
        """On a directed ring 0 -> 1 -> 2 -> 0, Theorem 1 lets 0 be 2 ahead of 1; max_ig=1 allows 1."""
        topology = resolve(nx.DiGraph([(0, 1), (1, 2), (2, 0)]), 3)
        for max_iteration_gap, largest in ((1, 1), (4, 2)):
            run = _run(
                topology,
                lambda rank, x: x,
                num_steps=12,
                max_iteration_gap=max_iteration_gap,
                seed=6,
                mean_compute=np.array([1e-3, 1000.0, 1e-3]),
            )
            self.assertEqual(run.largest_gap[0, 1], largest)

    def test_goes_on_without_a_rank_that_leaves(self):
        topology = resolve("complete", 4)
        gradient = _least_squares(4, seed=7)
        run = _run(topology, gradient, num_steps=[30, 30, 10, 30], seed=8)
        x = np.zeros((4, _DIMENSION))
        for step in range(30):
            weights = topology.mixing_matrix.copy()
            if step >= 10:  # Its weight goes to the receiver itself.
                weights[np.diag_indices(4)] += weights[2]
                weights[2] = 0
            x_next = weights.T @ x - _LEARNING_RATE * np.stack([gradient(r, x[r]) for r in range(4)])
            x = np.where((np.arange(4) == 2)[:, None] & (step >= 10), x, x_next)
        self.assertAllClose(run.parameters, x, rtol=1e-5, atol=1e-5)

    def test_a_straggler_jumps_right_after_the_step_that_was_slow(self):
        run = hop_tf.simulate.hop(
            topology="complete",
            world_size=3,
            num_steps=12,
            compute=lambda rank: iter([5.5 if rank == 0 else 1.0, *[1.0] * 11]),
            num_backup_workers=1,
            skip=hop_tf.SkipIterations(),
        )
        self.assertAllEqual(run.entered_seconds[0, :7], [0.0, *[np.nan] * 4, 5.5, 6.5])

    @parameterized.parameters({"num_backup_workers": 1}, {"max_staleness": 1})
    def test_what_comes_before_the_gradient_is_averaged(self, **settings):
        """Rank 0 does not need the update of rank 2, which comes while rank 0 computes, but averages it, too."""
        run = hop_tf.simulate.hop(
            topology="complete",
            world_size=3,
            num_steps=[2, 2, 2],
            compute=lambda rank: iter([1.0 + 0.1 * rank, 1.0]),
            link_seconds=lambda sender, receiver, num_bytes: 0.5 if sender == 2 and num_bytes else 0.0,
            problem=Problem(np.zeros(1, np.float32), lambda rank, step, x: np.ones(1) * (rank == 2 and step == 0)),
            **settings,
        )
        self.assertAllClose(run.parameters[0], [1 / 3])

    def test_tokens_have_room_where_ranks_that_leave_lengthen_paths(self):
        num_steps = [40] * 8
        num_steps[4] = num_steps[6] = 1
        run = hop_tf.simulate.hop(
            topology="exponential",
            world_size=8,
            num_steps=num_steps,
            compute=lambda rank: iter([1e6 if rank == 0 else 1.0 + 0.01 * rank] * 100),
            max_iteration_gap=2,
            num_backup_workers=2,
            on_peer_loss="raise",
        )
        self.assertAllEqual(np.isfinite(run.finished_seconds), [True] * 8)

    def test_a_departure_that_splits_the_graph_is_an_error(self):
        topology = resolve(nx.path_graph(3), 3)
        with self.assertRaisesRegex(HopError, r"ranks \[1\] have left"):
            _run(topology, lambda rank, x: x, num_steps=[30, 10, 30], seed=9)

    def test_the_end_of_training_splits_nothing(self):
        run = _run(resolve("ring", 8), lambda rank, x: x, num_steps=20, seed=10)
        self.assertAllClose(run.parameters, np.zeros_like(run.parameters))


class TopologyArgumentTest(tf.test.TestCase):
    def test_topology_objects_are_used_as_given(self):
        topology = resolve("ring", 5)
        self.assertIsInstance(topology, Topology)
        self.assertIs(resolve(topology, 5), topology)


if __name__ == "__main__":
    tf.test.main()

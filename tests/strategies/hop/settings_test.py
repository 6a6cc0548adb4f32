"""Tests of Hop's settings: valid combinations, and refused ones."""

import networkx as nx
import tensorflow as tf
from absl.testing import parameterized

import hop_tf
from hop_tf.strategies.hop.settings import HopSettings, SkipIterations
from hop_tf.topology import resolve

_SKIP_AT_5 = SkipIterations(trigger=5)


class SkipIterationsTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        {"max_jump": 1}, {"max_jump": 2.0}, {"max_jump": None}, {"trigger": 1}, {"trigger": True}, {"trigger": "2"}
    )
    def test_refuses(self, **arguments):
        ((name, value),) = arguments.items()
        with self.assertRaisesRegex(
            ValueError, f"`{name}` must be an integer of at least 2. Received: {name}={value!r}"
        ):
            SkipIterations(**arguments)

    def test_jumps_from_the_trigger_on_and_no_further_than_allowed(self):
        skip = SkipIterations(max_jump=5, trigger=3)
        self.assertEqual([skip.jump(num_behind) for num_behind in (-4, 0, 2, 3, 5, 6)], [1, 1, 1, 3, 5, 5])


class HopSettingsTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        ({"max_iteration_gap": 0}, "`max_iteration_gap` must be an integer from 1 to 1000"),
        ({"max_iteration_gap": 1001}, "`max_iteration_gap` must be an integer from 1 to 1000"),
        ({"max_iteration_gap": None, "max_staleness": 2}, "There is no unlimited gap, because a rank keeps room for"),
        ({"num_backup_workers": -1}, "`num_backup_workers` must be an integer of at least 0"),
        ({"num_backup_workers": 0.5}, "`num_backup_workers` must be an integer of at least 0"),
        ({"num_backup_workers": []}, "`num_backup_workers` must be an integer of at least 0, or a list of these"),
        ({"num_backup_workers": [1, -1]}, r"one for each rank. Received: num_backup_workers=\[1, -1\]."),
        ({"num_backup_workers": (0, 0), "skip": SkipIterations()}, "`skip` needs backup workers or staleness"),
        ({"max_staleness": -2}, "`max_staleness` must be an integer of at least 0"),
        ({"max_staleness": None}, "`max_staleness` must be an integer of at least 0"),
        ({"update_order": "random"}, "`update_order` must be one of parallel, serial"),
        ({"synchronization": "tokens"}, "`synchronization` must be one of queues, notify_ack"),
        ({"synchronization": None}, "`synchronization` must be one of queues, notify_ack"),
        ({"on_peer_loss": "ignore"}, "`on_peer_loss` must be one of None, raise, continue"),
        ({"skip": True, "num_backup_workers": 1}, "`skip` must be a hop_tf.SkipIterations or None"),
        ({"skip": SkipIterations()}, "`skip` needs backup workers or staleness"),
        ({"skip": _SKIP_AT_5, "num_backup_workers": 1, "max_iteration_gap": 4}, "at most max_iteration_gap: no rank"),
        ({"skip": _SKIP_AT_5, "max_staleness": 3}, r"at most max_staleness \+ 1 without backup workers: a neighbor"),
        ({"synchronization": "notify_ack", "num_backup_workers": 1}, "`synchronization` must be 'queues' with backup"),
        ({"synchronization": "notify_ack", "max_staleness": 1}, "`synchronization` must be 'queues' with backup"),
    )
    def test_refuses(self, settings, message):
        ((name, value), *_) = settings.items()
        with self.assertRaisesRegex(ValueError, message) as raised:
            HopSettings(**settings)
        self.assertIn(f"{name}={value!r}", str(raised.exception).partition("Received: ")[2])

    @parameterized.parameters(
        {"skip": _SKIP_AT_5, "num_backup_workers": 1, "max_iteration_gap": 5},
        {"skip": _SKIP_AT_5, "max_staleness": 4},
        {"skip": _SKIP_AT_5, "max_staleness": 1, "num_backup_workers": 1},
    )
    def test_takes_triggers_that_are_just_reached(self, **settings):
        result = hop_tf.simulate.hop(
            topology="ring",
            world_size=4,
            num_steps=30,
            compute=lambda rank: iter([10.0 if rank == 2 else 1.0] * 30),
            **settings,
        )
        self.assertGreater(result.counters[2]["jumps"], 0)

    @parameterized.parameters((2, 2), (2, 3))
    def test_warns_where_ranks_wait_for_tokens_before_staleness_matters(self, gap, staleness):
        with self.assertLogs("absl", "WARNING") as logs:
            HopSettings(max_iteration_gap=gap, max_staleness=staleness)
        self.assertIn(f"max_iteration_gap={gap} is not above max_staleness={staleness}", logs.output[0])

    def test_warns_of_nothing_else(self):
        with self.assertNoLogs("absl", "WARNING"):
            HopSettings(max_iteration_gap=3, max_staleness=2, num_backup_workers=1, skip=SkipIterations())


class TopologyTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        ("ring", 4, 3, 0),
        ("complete", 2, 2, 0),
        (nx.Graph([(0, 1), (1, 2), (2, 0), (2, 3)]), 4, 2, 3),
    )
    def test_more_backup_workers_than_neighbors(self, topology, world_size, num_backup_workers, rank):
        topology = resolve(topology, world_size)
        num_in = len(topology.in_neighbors(rank)) + 1
        message = (
            f"`num_backup_workers` must be less.*={num_backup_workers}, where rank {rank} has {num_in} in Topology"
        )
        with self.assertRaisesRegex(ValueError, message):
            HopSettings(num_backup_workers=num_backup_workers).check_topology(topology)
        HopSettings(num_backup_workers=num_in - 1).check_topology(topology)

    @parameterized.parameters(
        ({"num_backup_workers": 1}, nx.star_graph(3), True),
        ({"max_staleness": 2}, nx.star_graph(3), True),
        ({"max_staleness": 2}, [[0.5, 0.25, 0.25], [0.25, 0.5, 0.25], [0.25, 0.25, 0.5]], True),
        ({}, nx.star_graph(3), False),
        ({"num_backup_workers": 1}, "exponential", False),
        ({"max_staleness": 2}, "ring_based", False),
    )
    def test_warns_where_weights_are_not_used(self, settings, topology, warns):
        topology = resolve(topology, 3 if isinstance(topology, list) else 4)
        with self.assertLogs("absl", "WARNING") if warns else self.assertNoLogs("absl", "WARNING") as logs:
            HopSettings(**settings).check_topology(topology)
        if warns:
            self.assertIn("has unequal weights, but backup workers and staleness ignore them", logs.output[0])

    def test_a_number_for_each_rank(self):
        settings = HopSettings(num_backup_workers=[1, 0, 2])
        self.assertEqual([settings.num_backup_workers_of(rank) for rank in range(3)], [1, 0, 2])
        self.assertEqual([settings.is_tolerated_by(rank) for rank in range(3)], [True, False, True])
        settings.check_topology(resolve("complete", 3))
        with self.assertRaisesRegex(ValueError, r"one for each of the 4 ranks. Received: .*=\(1, 0, 2\)"):
            settings.check_topology(resolve("complete", 4))
        with self.assertRaisesRegex(ValueError, r"must be less.*=\(1, 0, 3\), where rank 2 has 3 in Topology"):
            HopSettings(num_backup_workers=[1, 0, 3]).check_topology(resolve("complete", 3))

    def test_alone_any_number_will_do(self):
        HopSettings(num_backup_workers=3).check_topology(resolve("complete", 1))


if __name__ == "__main__":
    tf.test.main()

"""Tests every mechanism of Hop against a reference, event by event, and the bounds of Table 1, in random schedules.

`HOP_TF_NUM_SCHEDULES` is the number of random schedules. A quarter of them is compared with the reference.
"""

import dataclasses
import math
import os

import networkx as nx
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import hop_tf
from hop_tf.strategies.hop.settings import HopSettings
from hop_tf.tools.emulation import ComputeEmulation, Slowdown
from hop_tf.tools.simulate import Fault, Problem
from hop_tf.tools.simulate.hop_training import Job
from hop_tf.topology import resolve

_NUM_SCHEDULES = int(os.environ.get("HOP_TF_NUM_SCHEDULES", "80"))
_DIMENSION = 3
# Large graphs take most of the time. Only ranks that make many steps can get far ahead of a slow one.
_SMALL = {"max_world_size": 12, "max_steps": 11}
_LARGE = {"max_world_size": 32, "max_steps": 11}
_LONG = {"max_world_size": 8, "max_steps": 40, "has_straggler": True}
_SIZES = (_LARGE, _LONG, _SMALL, _SMALL)


def _settings(rng, topology):
    """Returns a random combination of mechanisms that is valid for the graph."""
    max_ig = int(rng.integers(1, 7))
    staleness = int(rng.choice([0, 0, 1, 2, 5]))
    fewest = min(len(topology.in_neighbors(rank)) for rank in range(topology.world_size))
    backup = min(int(rng.choice([0, 0, 1, 2])), fewest)
    if backup and rng.random() < 0.5:  # Each rank has its own number. At least one number is positive.
        backup = [int(rng.integers(0, len(topology.in_neighbors(rank)) + 1)) for rank in range(topology.world_size)]
        backup[rng.integers(topology.world_size)] = fewest
    settings = {"max_iteration_gap": max_ig, "max_staleness": staleness, "num_backup_workers": backup}
    settings["update_order"] = str(rng.choice(["parallel", "parallel", "serial"]))
    if (staleness or backup) and max_ig >= 2 and rng.random() < 0.6:
        most_behind = max_ig if backup else min(max_ig, staleness + 1)
        trigger = int(rng.integers(2, most_behind + 1))
        settings["skip"] = hop_tf.SkipIterations(max_jump=int(rng.integers(2, 12)), trigger=trigger)
    if not (staleness or backup) and rng.random() < 0.3:
        settings["synchronization"] = "notify_ack"
    return settings


def _graph(rng, max_world_size):
    """Returns a random connected graph, or a regular directed one."""
    world_size = int(rng.integers(2, max_world_size + 1))
    kind = rng.random()
    if kind < 0.15:
        return resolve("exponential", world_size)
    if kind < 0.35:
        return _circulant(world_size, rng)
    graph = nx.random_labeled_tree(world_size, seed=int(rng.integers(2**31)))
    for a, b in rng.integers(world_size, size=(int(rng.integers(2 * world_size)), 2)):
        if a != b:
            graph.add_edge(int(a), int(b))
    return resolve(graph, world_size)


def _circulant(world_size, rng):
    """Returns a graph in which ranks send over the same one to three distances, and 1 if needed to connect all."""
    distances = {int(d) for d in rng.integers(1, world_size, size=int(rng.integers(1, 4)))}
    if math.gcd(world_size, *distances) > 1:
        distances.add(1)
    return _directed(world_size, distances)


def _directed(world_size, distances):
    edges = [(i, (i + distance) % world_size) for i in range(world_size) for distance in distances]
    return resolve(nx.DiGraph(edges), world_size)


@dataclasses.dataclass
class _Schedule:
    """Random times of computations and links. Some ranks and steps are much slower than others."""

    topology: hop_tf.Topology
    settings: dict
    num_steps: int
    durations: np.ndarray  # [n, num_steps], in the order in which a rank computes.
    links: np.ndarray  # [n, n]
    changes: np.ndarray  # [n, num_steps, d]: each rank's changes, which do not depend on its parameters.

    @classmethod
    def draw(cls, seed, max_world_size=10, max_steps=24, has_straggler=False):
        rng = np.random.default_rng(seed)
        topology = _graph(rng, max_world_size)
        shape = topology.world_size, int(rng.integers(8, max_steps))
        ranks = rng.exponential(size=(shape[0], 1)) + 0.1
        if has_straggler:
            ranks[rng.integers(shape[0])] = 1000.0
        durations = ranks * np.where(rng.random(shape) < 0.1, 6.0, 1.0) * (0.5 + rng.random(shape))
        links = rng.exponential(0.3, size=(shape[0], shape[0]))
        changes = rng.normal(size=(*shape, _DIMENSION))
        return cls(topology, _settings(rng, topology), shape[1], durations, links, changes)

    def simulate(self, seen=None):
        """Simulates hop_tf. `seen[rank, step]` gets the parameters at the start of each iteration."""

        def change(rank, step, x):
            if seen is not None:
                seen[rank, step] = x
            return self.changes[rank, step]

        return hop_tf.simulate.hop(
            topology=self.topology,
            world_size=self.topology.world_size,
            num_steps=self.num_steps,
            compute=lambda rank: iter(self.durations[rank]),
            link_seconds=lambda a, b, num_bytes: self.links[a, b],
            problem=Problem(np.zeros(_DIMENSION, np.float32), change),
            **self.settings,
        )


class _Reference:
    """Figures 7, 8, 9 and section 5: ranks are coroutines that yield the conditions they wait for. Float64, no queues.

    An event is the arrival of a message at a rank, or the end of a rank's computation. After all events of one time,
    every rank goes on whose condition is true.
    """

    def __init__(self, schedule):
        self.schedule = schedule
        settings = schedule.settings
        self.max_ig = settings["max_iteration_gap"]
        self.staleness = settings["max_staleness"]
        self.num_backup = np.broadcast_to(settings["num_backup_workers"], schedule.topology.world_size)
        self.skip = settings.get("skip")
        self.serial = settings["update_order"] == "serial"
        self.notify_ack = settings.get("synchronization") == "notify_ack"
        topology = schedule.topology
        self.n = topology.world_size
        self.w = topology.mixing_matrix
        self.n_in = [topology.in_neighbors(i) for i in range(self.n)]
        self.n_out = [topology.out_neighbors(i) for i in range(self.n)]
        # All ranks also form a binary tree, in which they find out that all are there.
        tree = [{(i - 1) // 2, 2 * i + 1, 2 * i + 2} & set(range(self.n)) - {i} for i in range(self.n)]
        self.peers = [{*self.n_in[i], *self.n_out[i], *tree[i]} for i in range(self.n)]
        # Every rank passes news of a rank's end on to its peers, so news take the shortest path.
        links = [(i, j, schedule.links[i, j]) for i in range(self.n) for j in self.peers[i]]
        peers = nx.DiGraph()
        peers.add_weighted_edges_from(links)
        self.news_seconds = dict(nx.all_pairs_dijkstra_path_length(peers))
        self.starts = self._starts(schedule.links)
        self.now = 0.0
        self.events = []  # (time, function to call)
        self.received = [[] for _ in range(self.n)]  # (sender, iteration, x), not used yet.
        self.newest = np.full((self.n, self.n), -1)  # [j, i]: iteration of the newest update of j that came to i.
        self.tokens = np.full((self.n, self.n), self.max_ig - 1)  # [j, i]: TokenQ(j -> i).size()
        self.told = np.zeros((self.n, self.n), int)  # [j, i]: Iter(j) as far as i has heard.
        self.acknowledged = np.full((self.n, self.n), -1)  # [j, i]: the last update of i that j has used, as i knows.
        self.ended = np.full((self.n, self.n), False)  # [j, i]: i knows that j has ended.
        self.x = np.full_like(schedule.changes, np.nan)  # Parameters at the start of an iteration.
        self.entered = np.full_like(schedule.durations, np.nan)
        self.final = np.empty((self.n, _DIMENSION))

    def _starts(self, links):
        """Returns start times: readiness goes up the tree to rank 0, and back down when all ranks are ready."""
        ready = [max(links[j, i] for j in self.peers[i]) for i in range(self.n)]
        for child in reversed(range(1, self.n)):
            parent = (child - 1) // 2
            ready[parent] = max(ready[parent], ready[child] + links[child, parent])
        for child in range(1, self.n):
            parent = (child - 1) // 2
            ready[child] = ready[parent] + links[parent, child]
        return ready

    def run(self):
        ranks = {i: self._rank(i) for i in range(self.n)}
        waiting_for = {i: next(ranks[i]) for i in ranks}
        while waiting_for:
            self.events.sort(key=lambda event: event[0])
            if not self.events:
                raise AssertionError(f"the reference is stuck at {self.now}")
            self.now = self.events[0][0]
            while self.events and self.events[0][0] == self.now:
                self.events.pop(0)[1]()
            able = True
            while able:
                able = [i for i, condition in waiting_for.items() if condition()]
                for i in able:
                    try:
                        waiting_for[i] = ranks[i].send(None)
                    except StopIteration:
                        del waiting_for[i]
        return self

    def _at(self, time, happen):
        self.events.append((time, happen))

    def _post(self, i, j, happen):
        self._at(self.now + self.schedule.links[i, j], happen)

    def _rank(self, i):
        yield from self._until(self.starts[i])
        x, k, last = np.zeros(_DIMENSION), 0, -1
        for duration in self.schedule.durations[i]:
            if k < self.schedule.num_steps:
                self.x[i, k], self.entered[i, k] = x, self.now
                x, jump = yield from self._iteration(i, k, k - last, x, self.now + duration)
                last, k = k, k + jump
        self.final[i] = x
        for j in range(self.n):
            self._at(self.now + self.news_seconds[i][j], lambda j=j: self.ended.__setitem__((i, j), True))

    def _iteration(self, i, k, num_entered, x, done):
        """Returns the parameters of the next iteration, and its distance."""
        learned = self.schedule.changes[i, k]
        if self.serial:
            yield from self._until(done)
            x = x + learned
        self._enter(i, k, num_entered)
        if self.notify_ack:
            yield lambda: all(self.ended[j, i] or self.acknowledged[j, i] >= k - 1 for j in self.n_out[i])
        self._send(i, k, x)
        tolerates_stragglers = self.staleness or self.num_backup.any()
        if tolerates_stragglers and not self.serial:
            yield from self._until(done)
        yield lambda: self._can_reduce(i, k)
        x = self._reduce(i, k, x)
        jump = 1
        if not self.notify_ack:
            yield lambda: all(self.ended[j, i] or self.tokens[j, i] >= 1 for j in self.n_out[i])
            jump = self._take_tokens(i)
        if not self.serial:
            if not tolerates_stragglers:
                yield from self._until(done)
            x = x + learned
        if jump > 1:
            target = k + jump - 1
            yield lambda: self._can_reduce(i, target)
            x = self._reduce(i, target, x)
        return x, jump

    def _until(self, time):
        self._at(time, lambda: None)
        yield lambda: self.now >= time

    def _enter(self, i, k, num_iterations):
        def arrive(j):
            self.tokens[i, j] += num_iterations
            self.told[i, j] = k

        for j in self.n_in[i]:
            if not self.notify_ack and not self.ended[j, i]:
                self._post(i, j, lambda j=j: arrive(j))

    def _send(self, i, k, x):
        def arrive(j):
            self.newest[i, j] = k
            self.received[j].append((i, k, x))

        for j in self.n_out[i]:
            if not self.ended[j, i] and self.told[j, i] - self.staleness <= k:  # Section 6.2.
                self._post(i, j, lambda j=j: arrive(j))

    def _can_reduce(self, i, k):
        if self.staleness:  # Section 4.4.
            lacking = [j for j in self.n_in[i] if self.newest[j, i] < k - self.staleness]
            lacking = [j for j in lacking if not self._has_ended_before(j, i, k - self.staleness)]
        else:
            here = {sender for sender, iteration, _ in self.received[i] if iteration == k}
            lacking = [j for j in self.n_in[i] if j not in here and not self._has_ended_before(j, i, k)]
        return len(lacking) <= self.num_backup[i]

    def _has_ended_before(self, j, i, k):
        return self.ended[j, i] and self.schedule.num_steps <= k

    def _reduce(self, i, k, x):
        used, kept = {}, []
        for sender, iteration, value in self.received[i]:
            if self.staleness:
                if iteration >= k - self.staleness:
                    used[sender] = (iteration, value)  # The newest one, because they come in order.
            elif iteration == k:
                used[sender] = (iteration, value)
            elif iteration > k:
                kept.append((sender, iteration, value))
        self.received[i] = kept
        if self.notify_ack:
            for j in self.n_in[i]:
                if not self.ended[j, i]:
                    self._post(i, j, lambda j=j: self.acknowledged.__setitem__((i, j), k))
        if self.staleness:  # Equation 2; the own parameters are of iteration k.
            weights = {j: iteration - (k - self.staleness) + 1 for j, (iteration, _) in used.items()}
            weights[i] = self.staleness + 1
        elif self.num_backup[i]:  # Figure 8, line 13.
            weights = dict.fromkeys([*used, i], 1)
        else:  # The mixing matrix. The rank itself replaces those that have ended.
            weights = {j: self.w[j, i] for j in used}
            weights[i] = 1 - sum(weights.values())
        total = sum(weights.values())
        return sum(weight * (x if j == i else used[j][1]) for j, weight in weights.items()) / total

    def _take_tokens(self, i):
        present = [j for j in self.n_out[i] if not self.ended[j, i]]
        jump = 1
        if self.skip is not None and present:
            behind = min(self.tokens[j, i] for j in present) - self.max_ig
            if behind >= self.skip.trigger:
                jump = min(behind, self.skip.max_jump, self.max_ig + 1)
        for j in present:
            self.tokens[j, i] -= jump
        return int(jump)


class ReferenceTest(tf.test.TestCase):
    @pytest.mark.slow
    def test_equals_the_reference_event_by_event(self):
        num_jumps = num_late = num_withheld = 0
        num_schedules = _NUM_SCHEDULES // 4  # The reference takes long.
        for seed in range(num_schedules):
            schedule = _Schedule.draw(seed)
            with self.subTest(seed=seed, settings=schedule.settings, topology=schedule.topology):
                reference = _Reference(schedule).run()
                seen = np.full_like(schedule.changes, np.nan)
                result = schedule.simulate(seen)
                np.testing.assert_allclose(result.entered_seconds, reference.entered, rtol=1e-9)
                np.testing.assert_allclose(seen, reference.x, rtol=1e-5, atol=1e-5)
                np.testing.assert_allclose(result.parameters, reference.final, rtol=1e-5, atol=1e-5)
            num_jumps += sum(each["jumps"] for each in result.counters)
            num_late += sum(each["late_updates"] for each in result.counters)
            num_withheld += sum(each["withheld_updates"] for each in result.counters)
        # Otherwise the schedules would not test the mechanisms.
        self.assertGreater(min(num_jumps, num_late, num_withheld), num_schedules // 4)


class BoundsTest(tf.test.TestCase, parameterized.TestCase):
    @pytest.mark.stress
    def test_gaps_and_memory_stay_within_table_1(self):
        num_reached = 0
        for seed in range(_NUM_SCHEDULES):
            schedule = _Schedule.draw(10**6 + seed, **_SIZES[seed % len(_SIZES)])
            with self.subTest(seed=seed, settings=schedule.settings, topology=schedule.topology):
                result = schedule.simulate()
                excess = result.largest_gap - _table_1(schedule)
                self.assertLessEqual(excess.max(), 0)
                num_reached += np.count_nonzero((excess == 0) & (result.largest_gap > 0))
                num_in = np.array([len(schedule.topology.in_neighbors(i)) for i in range(len(result.most_updates))])
                limit = (1 + schedule.settings["max_iteration_gap"]) * num_in
                self.assertLessEqual((result.most_updates - limit).max(), 0)
        self.assertGreater(num_reached, _NUM_SCHEDULES)  # Otherwise the bounds would be too loose.

    # The bounds are tight, so that the test above can fail: the first rank of a path is slow.
    @parameterized.named_parameters(
        ("standard", {}, [0, 1, 2, 3]),
        ("staleness", {"max_staleness": 2}, [0, 3, 6, 9]),
        ("staleness_with_tokens", {"max_staleness": 2, "max_iteration_gap": 3}, [0, 3, 6, 9]),
        ("backup", {"num_backup_workers": 1, "max_iteration_gap": 4}, [0, 4, 8, 12]),
        ("hybrid", {"num_backup_workers": 1, "max_staleness": 2, "max_iteration_gap": 4}, [0, 4, 8, 12]),
        # Not quite reached: rank 2 cannot send its update of iteration 2, because rank 1 has not used the previous one.
        ("notify_ack", {"synchronization": "notify_ack"}, [0, 1, 2, 2]),
    )
    def test_gaps_of_table_1_are_reached(self, settings, expected):
        result = hop_tf.simulate.hop(
            topology=nx.path_graph(4),
            world_size=4,
            num_steps=20,
            compute=lambda rank: iter([1e6 if rank == 0 else 1.0] * 20),
            **settings,
        )
        self.assertAllEqual(result.largest_gap[:, 0], expected)

    def test_the_bound_of_memory_is_reached(self):
        """The first rank is slow. Its neighbors' updates of five iterations wait there, and the rank waits for none."""
        for faults in ((), [Fault(0, 45.0, 100.0)]):  # Started again when the others have ended, it gets none.
            result = hop_tf.simulate.hop(
                topology="complete",
                world_size=3,
                num_steps=40,
                compute=lambda rank: iter([50.0 if rank == 0 else 1.0] * 40),
                num_backup_workers=1,
                max_iteration_gap=4,
                faults=faults,
            )
            self.assertEqual(result.most_updates[0], (1 + 4) * 2)

    def test_who_jumps_in_a_directed_graph_stays_where_in_neighbors_are(self):
        """The rank's out-neighbors are further ahead than its in-neighbors can get, because these wait for the rank."""
        result = hop_tf.simulate.hop(
            topology=_directed(8, (1, 3)),
            world_size=8,
            num_steps=40,
            compute=lambda rank: iter([6.5 if rank == 0 else 1.0] * 40),
            num_backup_workers=1,
            max_iteration_gap=2,
            skip=hop_tf.SkipIterations(max_jump=10),
        )
        self.assertGreater(result.largest_gap[1, 0], 3)
        entered = np.flatnonzero(np.isfinite(result.entered_seconds[0]))
        self.assertEqual(np.diff(entered).max(), 3)  # max_iteration_gap + 1

    def test_notify_ack_holds_the_sender_back(self):
        """On a directed ring 0 -> 1 -> 2 -> 0, rank 0 gets 2 ahead of a slow rank 1 (section 3.3)."""
        result = hop_tf.simulate.hop(
            topology=nx.DiGraph([(0, 1), (1, 2), (2, 0)]),
            world_size=3,
            num_steps=10,
            compute=lambda rank: iter([1e6 if rank == 1 else 1.0] * 10),
            synchronization="notify_ack",
        )
        self.assertEqual(result.largest_gap[0, 1], 2)


class FrozenTest(tf.test.TestCase, parameterized.TestCase):
    """Rank 1 stands still for ten seconds. Meanwhile the others make a hundred steps."""

    def _job(self, topology, world_size, num_steps=200, freezes=((1, 3.03, 10.0),), durations=None, **settings):
        def change(rank, step, x):
            return 0.1 * (np.arange(_DIMENSION, dtype=np.float32) - x)

        durations = 0.1 * np.ones((world_size, num_steps)) if durations is None else durations
        job = Job(
            topology=resolve(topology, world_size),
            settings=HopSettings(**settings),
            num_steps=[num_steps] * world_size,
            compute=lambda rank: iter(durations[rank]),
            link_seconds=lambda a, b, num_bytes: 0.001,
            problem=Problem(np.zeros(_DIMENSION, np.float32), change),
            limit_seconds=1e4,
        )
        for rank, begin, seconds in freezes:
            job.cluster.scheduler.call_at(begin, lambda rank=rank, seconds=seconds: job.cluster.freeze(rank, seconds))
        return job

    @parameterized.parameters(
        ("ring", 4, {"num_backup_workers": 1}),
        ("ring", 4, {"max_staleness": 4}),
        ("ring_based", 6, {"max_staleness": 3, "num_backup_workers": 1, "update_order": "serial"}),
        ("exponential", 6, {"num_backup_workers": 1}),
        ("ring", 2, {"num_backup_workers": 1}),
        ("ring", 4, {"num_backup_workers": 1, "skip": hop_tf.SkipIterations()}),
        ("ring", 4, {"max_staleness": 4, "skip": hop_tf.SkipIterations()}),
        ("ring", 4, {"num_backup_workers": 1, "interval": 4}),
    )
    def test_the_others_do_not_wait(self, topology, world_size, settings):
        """The frozen rank owes its tokens. It continues at the others' step, and skips the steps that it has missed."""
        result = self._job(topology, world_size, **settings).run()
        others, interval = [rank for rank in range(world_size) if rank != 1], settings.get("interval", 1)
        self.assertAllLess(result.finished_seconds[others], 20.0 + 0.05 * 10.0)
        self.assertLess(result.finished_seconds[1], 20.5 + 0.1 * (interval - 1))  # It follows at the next iteration.
        self.assertBetween(result.counters[1]["missed_iterations"] * interval, 93 - interval, 100)
        self.assertEqual(sum(result.counters[rank]["missed_iterations"] for rank in others), 0)
        self.assertAllClose(result.parameters, np.tile(np.arange(_DIMENSION), (world_size, 1)), atol=1e-3)
        # Beside the bound of Table 1: of each in-neighbor the newest update, which is further ahead.
        self.assertAllLessEqual(result.most_updates, (1 + 8 + 1) * (world_size - 1))

    def test_what_is_sent_to_a_silent_rank_gives_way(self):
        """Newer updates and tokens replace older ones: one of each waits, however long the rank is silent."""
        job = self._job("ring", 4, num_backup_workers=1)
        sends = []
        for rank in (0, 2):
            transport = job.cluster.memberships[rank].transport

            def send(peer, *arguments, send=transport.send, **keywords):
                if peer == 1 and 4.0 < job.cluster.scheduler.now < 13.0:
                    sends.append(keywords["supersedes"])
                return send(peer, *arguments, **keywords)

            transport.send = send
        job.run()
        self.assertGreater(len(sends), 300)
        self.assertTrue(all(sends))

    def test_who_needs_all_updates_is_waited_for(self):
        """Rank 1 has no backup workers, so newer updates could not replace those that it has missed."""
        result = self._job("ring", 4, num_backup_workers=[1, 0, 1, 1]).run()
        self.assertAllGreater(result.finished_seconds, 29.0)
        self.assertEqual(sum(counters["missed_iterations"] for counters in result.counters), 0)

    @pytest.mark.slow
    def test_random_schedules(self):
        """Several ranks freeze, also at the same time and repeatedly: all train to the end, in bounded memory."""
        num_missed = 0
        for seed in range(_NUM_SCHEDULES):
            schedule = _Schedule.draw([8, seed], **_SMALL)
            rng = np.random.default_rng([8, seed])
            settings = HopSettings(**schedule.settings)
            if not settings.tolerates_stragglers:
                continue
            world_size, num_steps = schedule.topology.world_size, schedule.num_steps
            end = schedule.durations.sum(axis=1).min()
            freezes = [
                (int(rng.integers(world_size)), rng.uniform(0, end), rng.exponential(end))
                for _ in range(rng.integers(1, 4))
            ]
            with self.subTest(seed=seed, settings=schedule.settings, topology=schedule.topology):
                job = self._job(
                    schedule.topology, world_size, num_steps, freezes, schedule.durations, **schedule.settings
                )
                result = job.run()
                self.assertAllLess(result.finished_seconds, np.inf)
                num_in = np.array([len(schedule.topology.in_neighbors(i)) for i in range(world_size)])
                self.assertLessEqual((result.most_updates - (settings.gap + 2) * num_in).max(), 0)
                num_missed += sum(counters["missed_iterations"] for counters in result.counters)
        self.assertGreater(num_missed, 0)


class WorthTest(tf.test.TestCase, parameterized.TestCase):
    """Tests the speedup of the mechanisms over the standard, with 16 ranks and max_iteration_gap 8."""

    _SETTINGS = (
        {"num_backup_workers": 1},
        {"max_staleness": 5},
        {"num_backup_workers": 1, "max_staleness": 5},
        {"num_backup_workers": 1, "max_staleness": 5, "skip": hop_tf.SkipIterations()},
    )

    @parameterized.parameters(
        ("ring", (1.3, 1.35, 1.4, 1.6)),
        ("ring_based", (1.3, 1.4, 1.45, 1.7)),
        ("double_ring", (1.3, 1.4, 1.45, 1.7)),
    )
    @pytest.mark.stress
    def test_random_slowdowns(self, topology, required):
        ratios = []
        for seed in range(3):
            compute = ComputeEmulation(step_seconds=1.0, slowdowns=(Slowdown.parse("random:6x"),), seed=seed)
            standard, *others = (self._speed(topology, compute, settings) for settings in ({}, *self._SETTINGS))
            ratios.append(np.divide(others, standard))
        self.assertAllGreater(np.mean(ratios, axis=0) - required, 0)

    @pytest.mark.slow
    def test_a_straggler_that_jumps_holds_nobody_up(self):
        compute = ComputeEmulation(step_seconds=1.0, slowdowns=(Slowdown.parse("5:4x"),))
        self.assertLess(self._speed("ring_based", compute, {}), 0.27)
        settings = {"num_backup_workers": 1, "skip": hop_tf.SkipIterations(max_jump=10)}
        self.assertGreater(self._speed("ring_based", compute, settings), 1 / 1.15)

    def _speed(self, topology, compute, settings):
        result = hop_tf.simulate.hop(topology=topology, world_size=16, num_steps=80, compute=compute, **settings)
        return result.iterations_per_second.mean()

    @pytest.mark.slow
    def test_hundreds_of_ranks(self):
        result = hop_tf.simulate.hop(
            topology="ring_based", world_size=120, num_steps=5, compute=lambda rank: iter([1.0 + (rank == 9)] * 5)
        )
        # A rank at distance two from the slow rank notices it two steps later.
        self.assertEqual(result.finished_seconds[9], 10.0)
        self.assertEqual(result.finished_seconds[40], 5.0)


def _table_1(schedule):
    """Returns the upper bounds of Iter(i) - Iter(j), array [n, n]."""
    settings, topology = schedule.settings, schedule.topology
    lengths = np.zeros((topology.world_size, topology.world_size))  # [a, b]: length(Path_a->b)
    for a, to in nx.all_pairs_shortest_path_length(topology.to_networkx()):
        for b, length in to.items():
            lengths[a, b] = length
    backward = (2 if settings.get("synchronization") == "notify_ack" else settings["max_iteration_gap"]) * lengths
    if settings["num_backup_workers"]:
        return backward  # No rank waits for all of its in-neighbors.
    return np.minimum((settings["max_staleness"] + 1) * lengths.T, backward)


def _simulate(**arguments):
    defaults = {"topology": "ring", "world_size": 4, "num_steps": 3, "compute": lambda rank: iter([1.0] * 3)}
    return hop_tf.simulate.hop(**{**defaults, **arguments})


class ArgumentsTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        ({"skip": hop_tf.SkipIterations()}, "`skip` needs backup workers or staleness"),
        ({"num_steps": [3, 3]}, r"one for each of 4 ranks\. Received: num_steps=\[3, 3\]"),
        ({"num_steps": [3] * 6}, "one for each of 4 ranks"),
        ({"num_steps": [3, 3, 3, -1]}, "`num_steps` must be an integer of at least 0. Received: num_steps=-1"),
        ({"num_steps": 2.5}, "`num_steps` must be an integer of at least 0. Received: num_steps=2.5"),
        ({"num_steps": 5}, "`compute` must last as long as a rank trains. Received: none for step 3 of rank "),
        ({"num_steps": 5, "update_order": "serial"}, "Received: none for step 3 of rank "),
        (
            {"compute": lambda rank: iter([1.0, -1.0])},
            "`compute` must be .* Received: compute=-1.0 for step 1 of rank ",
        ),
        ({"compute": lambda rank: iter([np.nan])}, "`compute` must be a finite number of seconds"),
        ({"link_seconds": lambda a, b, num_bytes: a - 2.0}, "`link_seconds` must be .*=-2.0 from rank 0 to rank 1"),
        ({"faults": [Fault(9, 1.0)]}, r"`faults` must be of ranks in \[0, 4\). Received: faults with Fault\(rank=9"),
        ({"faults": [Fault(-1, 1.0)]}, "`faults` must be of ranks in"),
    )
    def test_refuses(self, arguments, message):
        with self.assertRaisesRegex(ValueError, message):
            _simulate(**arguments)

    @parameterized.parameters(
        ({"seconds": -1.0}, "`seconds` must be a finite number of seconds, at least 0. Received: seconds=-1.0"),
        ({"seconds": 1.0, "restart_seconds": np.inf}, "`restart_seconds` must be a finite number of seconds"),
    )
    def test_refuses_faults(self, arguments, message):
        with self.assertRaisesRegex(ValueError, message):
            Fault(rank=1, **arguments)

    @parameterized.parameters(np.int64(3), [np.array([3, 3, 3, 3])])
    def test_steps_may_come_from_numpy(self, num_steps):
        self.assertAllEqual(_simulate(num_steps=num_steps).finished_seconds, [3.0] * 4)

    def test_a_run_depends_on_its_arguments_only(self):
        schedule = _Schedule.draw(5)
        first, second = schedule.simulate(), schedule.simulate()
        self.assertAllEqual(first.entered_seconds, second.entered_seconds)
        self.assertAllEqual(first.parameters, second.parameters)


if __name__ == "__main__":
    tf.test.main()

"""Ranks of Hop that die and come back, in simulation: nobody waits for ever, and all who are left train to the end.

`HOP_TF_NUM_SCHEDULES` says how many schedules are drawn, a tenth of them with deaths. From 1000 on, a rank is also
killed at every event of the small jobs below, else at some.
"""

import os
import re
from unittest import mock

import networkx as nx
import numpy as np
import tensorflow as tf
from absl import logging
from absl.testing import parameterized

import hop_tf
from hop_tf.errors import DeadlineExceededError, HopError, MismatchError, PeerLostError
from hop_tf.simulate import Fault, Problem, hop_training
from hop_tf.simulate.hop_training import Job
from hop_tf.strategies.hop_settings import HopSettings
from hop_tf.topology import resolve

_NUM_SCHEDULES = int(os.environ.get("HOP_TF_NUM_SCHEDULES", "200"))
_NUM_RANDOM = max(50, _NUM_SCHEDULES // 10)
_EVERY = 1 if _NUM_SCHEDULES >= 1000 else 23
_TARGET = np.arange(1, 4)
_MODES = {
    "standard": {"on_peer_loss": "continue"},
    "notify_ack": {"on_peer_loss": "continue", "synchronization": "notify_ack"},
    "serial": {"on_peer_loss": "continue", "update_order": "serial"},
    "backup": {"num_backup_workers": 1},
    "staleness": {"max_staleness": 3},
    "hybrid_with_skip": {"num_backup_workers": 1, "max_staleness": 2, "skip": hop_tf.SkipIterations(max_jump=5)},
}


def _approach(rank, step, x):
    """A third of the way: after 12 steps less than a hundredth is left of it."""
    return (_TARGET - x) / 3


class _Case:
    """A job whose ranks are unequal, and how they die."""

    def __init__(self, seed):
        rng = np.random.default_rng(seed)
        self.mode = str(rng.choice(list(_MODES)))
        self.world_size = int(rng.integers(3, 10))
        self.num_steps = 40
        self.settings = {**_MODES[self.mode], "max_iteration_gap": int(rng.integers(3, 9))}
        self.topology = resolve(str(rng.choice(["complete", "ring", "exponential"])), self.world_size)
        slowness = 0.1 + rng.exponential(0.5, size=(self.world_size, 1))
        self.durations = slowness * np.where(rng.random((self.world_size, 500)) < 0.1, 6.0, 1.0)
        self.links = rng.exponential(0.05, size=(self.world_size, self.world_size))
        self.faults = [
            Fault(
                rank=int(rng.integers(self.world_size)),
                seconds=float(rng.uniform(1, 25)),
                restart_seconds=float(rng.uniform(0.05, 8)) if rng.random() < 0.8 else None,
            )
            for _ in range(int(rng.integers(1, 5)))
        ]

    def run(self):
        return hop_tf.simulate.hop(
            topology=self.topology,
            world_size=self.world_size,
            num_steps=self.num_steps,
            compute=lambda rank: iter(self.durations[rank]),
            link_seconds=lambda sender, receiver, num_bytes: self.links[sender, receiver],
            problem=Problem(np.zeros(3, np.float32), _approach),
            faults=self.faults,
            **self.settings,
        )

    def falls_apart(self, error):
        """Whether that error says so, and is right, as networkx sees it."""
        match = re.search(r"ranks \[([\d, ]+)\] have left, and the communication graph .* not connected", str(error))
        if match is None:
            return False
        left = {int(rank) for rank in match[1].split(",")}
        graph = nx.DiGraph(
            (i, j) for i in range(self.world_size) for j in self.topology.out_neighbors(i) if not {i, j} & left
        )
        graph.add_nodes_from(set(range(self.world_size)) - left)
        return not nx.is_strongly_connected(graph)


class RandomFaultsTest(tf.test.TestCase):
    def test_all_who_are_left_train_to_the_end(self):
        self.enter_context(logging_disabled())
        num_finished = num_back = 0
        for seed in range(_NUM_RANDOM):
            case = _Case(seed)
            with self.subTest(seed=seed, mode=case.mode, faults=case.faults):
                try:
                    result = case.run()
                except HopError as error:
                    self.assertTrue(case.falls_apart(error), error)
                    continue
                dead = {fault.rank for fault in case.faults}
                finished = set(np.flatnonzero(np.isfinite(result.finished_seconds)))
                self.assertGreaterEqual(finished, set(range(case.world_size)) - dead)
                self.assertAllClose(result.parameters[sorted(finished)], [_TARGET] * len(finished), atol=0.3)
                num_in = np.array([len(case.topology.in_neighbors(rank)) for rank in range(case.world_size)])
                limit = (1 + case.settings["max_iteration_gap"]) * num_in
                self.assertLessEqual((result.most_updates - limit).max(), 0)
                num_finished += 1
                num_back += len(finished & dead)
        # Not nearly all of it fell apart or came too late.
        self.assertGreater(num_finished, 0.8 * _NUM_RANDOM)
        self.assertGreater(num_back, 0.5 * _NUM_RANDOM)


class EveryStateTest(tf.test.TestCase, parameterized.TestCase):
    """A rank of four is killed between two events, with and without a restart."""

    @parameterized.product(mode=list(_MODES), topology=["ring", "complete"])
    def test_no_state_is_a_trap(self, mode, topology):
        self.enter_context(logging_disabled())
        num_events = self._run(mode, topology).scheduler.num_events
        outcomes = set()
        for number in range(1, num_events, _EVERY):
            for restart_seconds in (None, 0.3, 4.0):
                victim = number % 4
                with self.subTest(event=number, victim=victim, restart_seconds=restart_seconds):
                    outcomes.add(self._result_of(mode, topology, number, victim, restart_seconds))
        self.assertLessEqual(outcomes, {"finished", "not started"})
        self.assertIn("finished", outcomes)

    def _result_of(self, mode, topology, number, victim, restart_seconds):
        try:
            job = self._run(mode, topology, number, victim, restart_seconds)
        except (DeadlineExceededError, PeerLostError) as error:
            self.assertIn("start of training on rank", str(error))
            return "not started"
        finished = np.isfinite(job.result.finished_seconds)
        self.assertTrue(np.all(finished | (np.arange(4) == victim)))
        self.assertAllClose(job.result.parameters[finished], [_TARGET] * finished.sum(), atol=1.0)
        return "finished"

    def _run(self, mode, topology, number=None, victim=None, restart_seconds=None):
        job = Job(
            topology=resolve(topology, 4),
            settings=HopSettings(**_MODES[mode], max_iteration_gap=4),
            num_steps=[12] * 4,
            compute=lambda rank: iter(np.full(100, 0.3 + 0.2 * (rank == 3))),
            link_seconds=lambda sender, receiver, num_bytes: 0.02 + 0.01 * sender,
            problem=Problem(np.zeros(3, np.float32), _approach),
        )
        if number is not None:
            job.cluster.scheduler.call_before_event(number, lambda: job.kill(victim, restart_seconds))
        job.result = job.run()
        job.scheduler = job.cluster.scheduler
        return job


class ScenarioTest(tf.test.TestCase, parameterized.TestCase):
    """Deaths and returns that were traps once."""

    def setUp(self):
        super().setUp()
        self.enter_context(logging_disabled())

    def _job(self, topology, world_size, settings, compute=lambda rank: iter([1.0] * 200), **arguments):
        return Job(
            topology=resolve(topology, world_size),
            settings=HopSettings(**settings),
            num_steps=[60] * world_size,
            compute=compute,
            link_seconds=lambda sender, receiver, num_bytes: 0.01 + 0.001 * sender,
            problem=Problem(np.zeros(3, np.float32), _approach),
            **arguments,
        )

    def _check_all_finish(self, job, faults):
        for fault in faults:
            job.cluster.scheduler.call_at(
                fault.seconds, lambda fault=fault: job.kill(fault.rank, fault.restart_seconds)
            )
        result = job.run()
        self.assertTrue(np.isfinite(result.finished_seconds).all())
        self.assertAllClose(result.parameters, [_TARGET] * len(result.parameters), atol=0.01)

    def test_joins_between_stragglers_that_jump(self):
        """Both neighbors decide to jump when they have sent their state, and have not heard of the newcomer yet."""
        graph = nx.Graph([(5, 2), (2, 0), (0, 1), (1, 3), (3, 4), (4, 5)])
        settings = {"num_backup_workers": 1, "skip": hop_tf.SkipIterations(max_jump=10, trigger=2)}
        for seconds in (3.0, 6.0):
            job = self._job(graph, 6, settings, lambda rank: iter([4.0 if rank in (2, 4) else 1.0] * 200))
            self._check_all_finish(job, [Fault(5, seconds, 2.3)])

    @parameterized.parameters(*_MODES)
    def test_joins_while_a_neighbor_has_not_made_its_group(self, mode):
        for world_size in (6, 12):
            job = self._job("ring", world_size, _MODES[mode], tracing_seconds=lambda rank: 20.0 * (rank == 3))
            self._check_all_finish(job, [Fault(2, 1.0, 0.3)])

    def test_a_newcomer_that_numbers_its_groups_otherwise(self):
        """As where the others train with their second optimizer."""
        job = self._job("ring", 4, {"on_peer_loss": "continue"})
        job.cluster.scheduler.call_at(5.0, lambda: job.kill(2, 1.0))
        patch = mock.patch.object(hop_training, "_GROUP", "0-ab")
        job.cluster.scheduler.call_at(5.5, patch.start)
        self.addCleanup(patch.stop)
        with self.assertRaisesRegex(MismatchError, "order of operations.* joins in its first `fit`"):
            job.run()


def logging_disabled():
    """Each of these deaths would be logged by everyone."""
    return _Verbosity(logging.FATAL)


class _Verbosity:
    def __init__(self, verbosity):
        self._verbosity = verbosity

    def __enter__(self):
        self._former = logging.get_verbosity()
        logging.set_verbosity(self._verbosity)

    def __exit__(self, *exc_info):
        logging.set_verbosity(self._former)


if __name__ == "__main__":
    tf.test.main()

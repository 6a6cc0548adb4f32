"""Tests of Hop's ranks that die and come back, in simulation: none waits for ever, and all others train to the end.

`HOP_TF_NUM_SCHEDULES` is the number of random schedules.
"""

import collections
import os
import re
from unittest import mock

import networkx as nx
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import hop_tf
from hop_tf.errors import DeadlineExceededError, HopError, MismatchError, PeerLostError
from hop_tf.strategies.hop.settings import HopSettings
from hop_tf.tensors import fifo as queues
from hop_tf.tools.simulate import Fault, Problem, rank_loops
from hop_tf.tools.simulate.hop_training import Job
from hop_tf.topology import resolve
from support import IS_STRESS
from support.logs import logging_disabled

_NUM_SCHEDULES = int(os.environ.get("HOP_TF_NUM_SCHEDULES", "50"))
_STRIDE = 5 if IS_STRESS else 37  # Events between the deaths in two successive runs of the small jobs.
_TARGET = np.arange(1, 4)
_MODES = {
    "standard": {"on_peer_loss": "continue"},
    "notify_ack": {"on_peer_loss": "continue", "synchronization": "notify_ack"},
    "serial": {"on_peer_loss": "continue", "update_order": "serial"},
    "backup": {"num_backup_workers": 1},
    "staleness": {"max_staleness": 3},
    "backup_with_skip": {"num_backup_workers": 1, "skip": hop_tf.SkipIterations(max_jump=5)},
    "serial_backup_with_skip": {
        "num_backup_workers": 1,
        "skip": hop_tf.SkipIterations(),
        "update_order": "serial",
    },
    "hybrid_with_skip": {"num_backup_workers": 1, "max_staleness": 2, "skip": hop_tf.SkipIterations(max_jump=5)},
    "staleness_with_skip": {"max_staleness": 3, "skip": hop_tf.SkipIterations(max_jump=5)},
    "serial_staleness": {"max_staleness": 3, "update_order": "serial"},
    "two_backups": {"num_backup_workers": 2},
    "interval": {"on_peer_loss": "continue", "interval": 3},
    "interval_backup_with_skip": {"num_backup_workers": 1, "skip": hop_tf.SkipIterations(max_jump=5), "interval": 2},
}


def _topology(kind, world_size):
    """Resolves a kind as `resolve` does. "directed": a rank sends to two ranks, and few of these send back."""
    if kind != "directed":
        return resolve(kind, world_size)
    distances = (1, 3 if world_size > 4 else 2)
    return resolve(nx.DiGraph([(i, (i + d) % world_size) for i in range(world_size) for d in distances]), world_size)


class _ObservedJob(Job):
    """A job that records every rank's parameters at each step, and the first parameters of newcomers.

    Attributes:
      newcomers: (rank, step, parameters) of each rank's first step after a restart.
      num_events_to_begin: Number of events until all ranks were in their first step.
      result: The result of `run`.
    """

    def __init__(self, *, settings, num_steps, **arguments):
        problem = Problem(np.zeros(3, np.float32), self._change)
        super().__init__(settings=settings, num_steps=num_steps, problem=problem, **arguments)
        self.newcomers = []
        self.num_events_to_begin = 0
        self._is_serial, self._interval = settings.update_order == "serial", settings.interval
        self._states = collections.defaultdict(list)  # By step; with the times.
        self._restarted = set()
        self._waiting = set(range(len(num_steps)))

    def run(self):
        self.result = super().run()
        return self.result

    def _restart(self, rank):
        super()._restart(rank)
        self._restarted.add(rank)

    def _change(self, rank, step, x):
        """Returns a third of the distance to the target: after 12 steps less than a hundredth is left."""
        self._note(rank, step, x)
        change = ((_TARGET - x) / 3).astype(np.float32)
        given = x + change if self._is_serial else x  # The state that others get on request.
        self._states[step].append((self.cluster.scheduler.now, given))
        return change

    def _note(self, rank, step, x):
        if rank in self._restarted:
            self._restarted.remove(rank)
            self.newcomers.append((rank, step, x))
        if rank in self._waiting:
            self._waiting.remove(rank)
            self.num_events_to_begin = self.cluster.scheduler.num_events

    def began_elsewhere(self, step, x):
        """True if `x` was a rank's state in the iteration before `step`, or earlier if the furthest rank had ended."""
        states = [state for _, state in self._states[max(step - self._interval, 0)]]
        first_end = np.nanmin(self.result.finished_seconds, initial=np.inf)
        for earlier in range(step - 1):
            states += [state for seconds, state in self._states[earlier] if seconds > first_end]
        return any(np.array_equal(x, state) for state in states)


class _Case:
    """A job of unequal ranks, and their deaths."""

    def __init__(self, seed):
        rng = np.random.default_rng(seed)
        self.mode = str(rng.choice(list(_MODES)))
        self.world_size = int(rng.integers(3, 10))
        self.num_steps = [40] * self.world_size
        if rng.random() < 0.3:
            self.num_steps[rng.integers(self.world_size)] = int(rng.integers(5, 40))
        self.settings = HopSettings(**_MODES[self.mode], max_iteration_gap=int(rng.integers(2, 9)))
        self.topology = _topology(str(rng.choice(["complete", "ring", "exponential", "directed"])), self.world_size)
        slowness = 0.1 + rng.exponential(0.5, size=(self.world_size, 1))
        self.durations = slowness * np.where(rng.random((self.world_size, 500)) < 0.1, 6.0, 1.0)
        self.links = rng.exponential(0.05, size=(self.world_size, self.world_size))
        self.tracing_seconds = np.where(rng.random(self.world_size) < 0.1, rng.exponential(10), 0.0)
        self.faults = [
            Fault(
                rank=int(rng.integers(self.world_size)),
                seconds=float(rng.uniform(2, 25)),
                restart_seconds=float(rng.uniform(0.05, 8)) if rng.random() < 0.8 else None,
                reaches=None if rng.random() < 0.5 else np.flatnonzero(rng.random(self.world_size) < 0.5).tolist(),
            )
            for _ in range(int(rng.integers(1, 5)))
        ]
        self.is_narrow = bool(rng.random() < 0.5)  # If True, messages wait for each other.
        self._rng = rng

    def run(self):
        job = _ObservedJob(
            topology=self.topology,
            settings=self.settings,
            num_steps=self.num_steps,
            compute=lambda rank: iter(self.durations[rank]),
            link_seconds=lambda sender, receiver, num_bytes: 2 * self._rng.random() * self.links[sender, receiver],
            sending_seconds=(lambda sender, receiver, num_bytes: self.links[sender, receiver])
            if self.is_narrow
            else None,
            tracing_seconds=lambda rank: self.tracing_seconds[rank],
        )
        for fault in self.faults:
            job.schedule(fault)
        job.run()
        return job

    def falls_apart(self, error):
        """True if the error says that the graph has fallen apart, and networkx agrees."""
        match = re.search(
            r"ranks \[([\d, ]+)\] have left, and the communication graph .* no longer connected", str(error)
        )
        if match is None:
            return False
        left = {int(rank) for rank in match[1].split(",")}
        graph = nx.DiGraph(
            (i, j) for i in range(self.world_size) for j in self.topology.out_neighbors(i) if not {i, j} & left
        )
        graph.add_nodes_from(set(range(self.world_size)) - left)
        return not nx.is_strongly_connected(graph)


class RandomFaultsTest(tf.test.TestCase):
    @pytest.mark.stress
    def test_all_who_are_left_train_to_the_end(self):
        self.enter_context(logging_disabled())
        num_finished = num_back = 0
        for seed in range(_NUM_SCHEDULES):
            case = _Case(seed)
            with self.subTest(seed=seed, mode=case.mode, faults=case.faults):
                try:
                    job = case.run()
                except HopError as error:
                    self.assertTrue(case.falls_apart(error), error)
                    continue
                dead = {fault.rank for fault in case.faults}
                finished = set(np.flatnonzero(np.isfinite(job.result.finished_seconds)))
                self.assertGreaterEqual(finished, set(range(case.world_size)) - dead)
                self._check_parameters(case, job, finished)
                self._check_bounds(case, job.result, dead)
                num_finished += 1
                num_back += len(job.newcomers)
        # Only some jobs fell apart or came too late.
        self.assertGreater(num_finished, 0.7 * _NUM_SCHEDULES)
        self.assertGreater(num_back, 0.5 * _NUM_SCHEDULES)

    def _check_parameters(self, case, job, finished):
        for rank, step, x in job.newcomers:
            self.assertTrue(job.began_elsewhere(step, x), f"rank {rank} began step {step} with {x}")
        whole = [rank for rank in sorted(finished) if case.num_steps[rank] == 40]
        for rank in whole:  # Empty if all died before one of them was back.
            self.assertAllClose(job.result.parameters[rank], _TARGET, atol=0.3)

    def _check_bounds(self, case, result, dead):
        """Checks the bounds of memory, and of the gap between neighbors that were there all the time."""
        for rank in range(case.world_size):
            limit = (1 + case.settings.max_iteration_gap) * len(case.topology.in_neighbors(rank))
            self.assertLessEqual(result.most_updates[rank], limit)
        for rank in set(range(case.world_size)) - dead:
            for neighbor in set(case.topology.out_neighbors(rank)) - dead:
                most = (case.settings.gap + 1) * case.settings.interval - 1
                self.assertLessEqual(result.largest_gap[rank, neighbor], most)


class EveryStateTest(tf.test.TestCase, parameterized.TestCase):
    """A rank of four is killed between two events, with and without a restart."""

    @parameterized.parameters(
        *(("ring", mode) for mode in _MODES),
        *(("complete", mode) for mode in _MODES),
        *(("directed", mode) for mode in _MODES if "skip" in mode or "backup" in mode),
    )
    @pytest.mark.stress(after=1)
    @pytest.mark.slow(after=5)
    def test_no_state_is_a_trap(self, topology, mode):
        self.enter_context(logging_disabled())
        job = self._run(mode, topology)
        num_events = job.cluster.scheduler.num_events
        outcomes = set()
        for number in range(1, num_events, _STRIDE):
            victim = number % 4
            for turn, restart_seconds in enumerate((None, 0.3, 4.0)):
                # The rank's last messages reach all, none, or one of its neighbors.
                reaches = (None, [], [(victim + 1) % 4])[(number + turn) % 3]
                death = victim, restart_seconds, reaches
                with self.subTest(event=number, death=death):
                    may_fail = number <= job.num_events_to_begin
                    outcomes.add(self._result_of(mode, topology, number, death, may_fail))
        self.assertLessEqual(outcomes, {"finished", "not started"})
        self.assertIn("finished", outcomes)

    def _result_of(self, mode, topology, number, death, may_fail):
        victim = death[0]
        try:
            job = self._run(mode, topology, number, death)
        except (DeadlineExceededError, PeerLostError) as error:
            self.assertTrue(may_fail, error)
            self.assertIn("start of training on rank", str(error))
            return "not started"
        finished = np.isfinite(job.result.finished_seconds)
        self.assertTrue(np.all(finished | (np.arange(4) == victim)))
        self.assertAllClose(job.result.parameters[finished], [_TARGET] * finished.sum(), atol=0.3)
        for rank, step, x in job.newcomers:
            self.assertEqual(rank, victim)
            self.assertTrue(not step or job.began_elsewhere(step, x), f"rank {rank} began step {step} with {x}")
        return "finished"

    def _run(self, mode, topology, number=None, death=()):
        job = _ObservedJob(
            topology=_topology(topology, 4),
            settings=HopSettings(**_MODES[mode], max_iteration_gap=4),
            num_steps=[12] * 4,
            compute=lambda rank: iter(np.full(100, 0.3 + 0.2 * (rank == 3))),
            link_seconds=lambda sender, receiver, num_bytes: 0.02 + 0.01 * sender,
        )
        if number is not None:
            job.cluster.scheduler.call_before_event(number, lambda: job.kill(*death))
        job.run()
        return job


class ScenarioTest(tf.test.TestCase, parameterized.TestCase):
    """Tests of deaths and returns that have caused errors before."""

    def setUp(self):
        super().setUp()
        self.enter_context(logging_disabled())

    def _job(
        self,
        topology,
        world_size,
        settings,
        compute=lambda rank: iter([1.0] * 200),
        num_steps=None,
        link_seconds=lambda sender, receiver, num_bytes: 0.01 + 0.001 * sender,
        **arguments,
    ):
        return _ObservedJob(
            topology=resolve(topology, world_size),
            settings=HopSettings(**settings),
            num_steps=num_steps or [60] * world_size,
            compute=compute,
            link_seconds=link_seconds,
            **arguments,
        )

    def _check_all_finish(self, job, faults):
        for fault in faults:
            job.schedule(fault)
        result = job.run()
        self.assertTrue(np.isfinite(result.finished_seconds).all())
        self.assertAllClose(result.parameters, [_TARGET] * len(result.parameters), atol=0.01)

    def test_joins_between_stragglers_that_jump(self):
        """Both neighbors have sent their state, and decide to jump before they hear of the newcomer."""
        graph = nx.Graph([(5, 2), (2, 0), (0, 1), (1, 3), (3, 4), (4, 5)])
        settings = {"num_backup_workers": 1, "skip": hop_tf.SkipIterations(max_jump=10, trigger=2)}
        for seconds in (3.0, 6.0):
            job = self._job(graph, 6, settings, lambda rank: iter([4.0 if rank in (2, 4) else 1.0] * 200))
            self._check_all_finish(job, [Fault(5, seconds, 2.3)])

    @parameterized.parameters(*_MODES)
    @pytest.mark.stress(after=1)
    def test_joins_while_a_neighbor_has_not_made_its_group(self, mode):
        for world_size in (6, 12):
            job = self._job("ring", world_size, _MODES[mode], tracing_seconds=lambda rank: 20.0 * (rank == 3))
            self._check_all_finish(job, [Fault(2, 1.0, 0.3)])

    @parameterized.named_parameters(("hears_of_it", 0.0), ("heard_of_it_before_its_first_step", 5.0))
    def test_one_that_is_joining_hears_of_a_neighbor_that_joins(self, tracing_seconds):
        """The session is longer than a queue has room for tokens: TensorFlow's queues hold 12."""
        self.enter_context(mock.patch.object(rank_loops, "SimulatedFifo", queues.Fifo))
        settings = {"on_peer_loss": "continue", "max_iteration_gap": 2}
        job = self._job("ring", 6, settings, tracing_seconds=lambda rank: tracing_seconds * (rank == 2))
        self._check_all_finish(job, [Fault(1, 40.0, 2.5), Fault(2, 40.0, 3.0)])

    def test_news_of_one_that_joins_overtake_it(self):
        """A rank that has ended hears of a joined neighbor from others before it hears from the new process."""
        for seconds in (0.3, 1.5):
            job = self._job(
                "complete",
                4,
                {"num_backup_workers": 1},
                num_steps=[60, 60, 20, 60],
                link_seconds=lambda a, b, num_bytes, seconds=seconds: seconds if (a, b) == (1, 2) else 0.01,
            )
            self._check_all_finish(job, [Fault(1, 40.0, 2.5)])

    def test_one_that_has_ended_hears_of_a_neighbor_that_joins(self):
        """The newcomer is behind by more iterations than a queue has room for tokens."""
        settings = {"on_peer_loss": "continue", "max_iteration_gap": 2}
        job = self._job("ring", 4, settings, num_steps=[60, 60, 20, 60])
        self._check_all_finish(job, [Fault(1, 40.0, 2.5)])
        self.assertGreater(job.newcomers[0][1], 40)

    def test_a_newcomer_that_numbers_its_groups_otherwise(self):
        """Happens if the others train with their second optimizer."""
        job = self._job("ring", 4, {"on_peer_loss": "continue"})
        job.cluster.scheduler.call_at(5.0, lambda: job.kill(2, 1.0))
        patch = mock.patch.object(rank_loops, "GROUP", "0-ab")
        job.cluster.scheduler.call_at(5.5, patch.start)
        self.addCleanup(patch.stop)
        with self.assertRaisesRegex(MismatchError, "order of operations.* joins in its first `fit`"):
            job.run()


if __name__ == "__main__":
    tf.test.main()

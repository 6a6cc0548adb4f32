"""Tests of a SHAT server that dies during training, and goes on from its snapshot after a restart."""

import dataclasses
import random
import tempfile
import threading
import time
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import hop_tf
from hop_tf.errors import HopError
from hop_tf.strategies.shat.server import snapshots as snapshots_module
from hop_tf.strategies.shat.server.group import ServedGroup
from shat_threads import NUM_VALUES, RATE, SETTINGS, ShatThreads


def _becomes_true(condition):
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def _group(server):
    with server._lock:
        (configured,) = server._groups.values()
    return configured.group


class ServerRestartTest(tf.test.TestCase, parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self._directory = self.enterContext(tempfile.TemporaryDirectory())

    def _options(self, **arguments):
        """Returns options that write a snapshot after each push, or, with `every_seconds`, only after the first."""
        return hop_tf.SnapshotOptions(directory=self._directory, **(arguments or {"every_pushes": 1}))

    def _only_first(self):
        return self._options(every_seconds=1e6)

    def _start(self, num_workers, num_servers, snapshots=None, consistency="async", **arguments):
        settings = dataclasses.replace(SETTINGS, consistency=consistency, max_staleness=1, mixing="asp")
        return self.enterContext(
            ShatThreads(
                num_workers,
                num_servers,
                settings=[settings] * num_workers,
                snapshots=snapshots or self._options(),
                **arguments,
            )
        )

    def _wait_for_snapshot(self, server, num_pushes):
        histories = server._snapshots._histories
        self.assertTrue(_becomes_true(lambda: [h.num_pushes for h in histories.values()] == [num_pushes]))

    def _configure(self, threads):
        threads.run(lambda rank, worker: worker.exchange.state.configure(joins=False))

    def _counters(self, worker):
        counters = worker.exchange.counters()
        return counters["server_restarts"], counters["pushes_lost"]

    @parameterized.parameters((None, 0), (10, 0), (None, 17))
    @pytest.mark.stress(but=1)
    def test_nothing_is_lost_of_what_is_in_the_snapshot(self, answer_lost_at, num_pulls):
        """Results are equal, to the bit, to those without the restart, also if an answer was lost with the server."""
        values = np.random.default_rng(0).normal(size=20).astype(np.float32)

        def train(dies_after):
            self._directory = self.enterContext(tempfile.TemporaryDirectory())
            threads = self._start(1, 2, make_optimizer=lambda: keras.optimizers.Adam(RATE))
            (worker,), (first, _) = threads.workers, threads.servers
            self._configure(threads)
            restarts, models = [], []

            def restart_unanswered(name, configured, answers):
                if not restarts and answers and answers[0].sequence == answer_lost_at:
                    first._snapshots.write(name, configured.group, final=True)
                    restarts.append(threads.restart_server(0))
                else:
                    send_answers(name, configured, answers)

            send_answers = first._send_answers
            if dies_after is not None and answer_lost_at:
                first._send_answers = restart_unanswered
            for step, value in enumerate(values):
                models.append(worker.push(step, value)[0])
                if step == dies_after and not answer_lost_at:
                    self._wait_for_snapshot(first, step + 1)
                    restarts.append(threads.restart_server(0))
                    for _ in range(num_pulls):  # The first requests to the new server, if any.
                        worker.exchange.state.pull()
            worker.exchange.state.pull()
            self.assertEqual(restarts, [] if dies_after is None else [[True]])
            self.assertEqual(self._counters(worker), (len(restarts), 0))
            return (
                np.array(models),
                worker.variable.numpy(),
                int(threads.servers[0]._groups["0-group"].group.num_pushes),
            )

        models, final, num_pushes = train(9)
        undisturbed = train(None)
        self.assertAllEqual(models, undisturbed[0])
        self.assertAllEqual(final, undisturbed[1])
        self.assertEqual(num_pushes, undisturbed[2])

    def test_what_came_after_the_snapshot_is_lost_and_counted_and_told_once(self):
        threads = self._start(1, 2, snapshots=self._only_first())
        (worker,) = threads.workers
        self._configure(threads)
        for step in range(10):
            worker.push(step, 1.0)
        self.assertEqual(threads.restart_server(1), [True])
        with self.assertLogs("absl", "WARNING") as logs:
            model, _ = worker.push(10, 1.0)
            worker.push(11, 1.0)
        self.assertLen(logs.output, 1)
        self.assertRegex(
            logs.output[0],
            r"rank 0: ps 1 at in-process:2 was restarted, and resumes from its snapshot of 1 pushes. 9 later "
            "pushes that this rank knows of are lost",
        )
        self.assertEqual(self._counters(worker), (1, 9))
        half = NUM_VALUES // 2
        self.assertAllClose(model[:10], np.full(10, 1.0 - 11 * RATE))
        self.assertAllClose(model[-10:], np.full(10, 1.0 - 2 * RATE))
        self.assertLen(np.unique(model[:half]), 1)
        self.assertEqual(threads.restart_server(1), [True])
        worker.push(12, 1.0)
        self.assertEqual(self._counters(worker), (2, 11))

    def test_it_may_die_again_while_it_is_configured(self):
        threads = self._start(1, 1)
        (worker,) = threads.workers
        self._configure(threads)
        worker.push(0, 1.0)
        servers = worker.exchange._servers
        receive, requests = servers.receive, []

        def meanwhile(request):
            requests.append(request)
            if len(requests) == 2:
                self.assertEqual(threads.restart_server(0), [True])
            return receive(request)

        self.assertEqual(threads.restart_server(0), [True])
        with mock.patch.object(servers, "receive", meanwhile):
            worker.exchange.state.pull()
        self.assertLen(requests, 2)
        self.assertAllEqual(worker.variable, np.full(NUM_VALUES, 1.0 - RATE))

    def test_bulk_synchronous_workers_repeat_an_update_that_only_some_were_answered(self):
        """No worker waits for the one that is ahead, because that one may wait for the others' metrics of an epoch."""
        threads = self._start(2, 1, snapshots=self._only_first(), consistency="bsp")
        (server,) = threads.servers
        self._configure(threads)
        send, has_died, both_done = server._send, threading.Event(), threading.Barrier(2)

        def send_to_rank_0_only(worker, queue, answer, parts=()):
            if not queue.endswith("reply") or answer.sequence != 3 or worker == 0:
                send(worker, queue, answer, parts)

        server._send = send_to_rank_0_only
        models = {}

        def body(rank, worker):
            for step in range(5):
                if rank == 0 and step == 3:
                    self.assertEqual(threads.restart_server(0), [True, True])
                    has_died.set()
                    both_done.wait(60)  # As ranks wait at the end of an epoch.
                models[rank], _ = worker.push(step, float(rank + 1))
                if rank == 1 and step == 2:
                    both_done.wait(60)

        threads.run(body)
        self.assertTrue(has_died.is_set())
        # Update 1 is in the snapshot, 3 is of rank 1 alone, then 4 and 5. Update 2 and rank 0's part of 3 are lost.
        self.assertAllEqual(models[0], np.full(NUM_VALUES, 1.0 - RATE * (1.5 + 2.0 + 1.5 + 1.5)))
        self.assertAllEqual(models[0], models[1])
        self.assertEqual([self._counters(worker) for worker in threads.workers], [(1, 4), (1, 2)])

    def test_stale_synchronous_workers_keep_their_distance(self):
        """Rank 0, one push ahead, waits when the server dies. The new server lets rank 0 wait as long as necessary."""
        threads = self._start(2, 1, consistency="ssp")
        self._configure(threads)
        order, rank_0_waits = [], threading.Event()

        def body(rank, worker):
            if rank == 0:
                for step in range(2):
                    worker.push(step, 1.0)
                    order.append(("answered", step))
            else:
                self.assertTrue(_becomes_true(lambda: _group(threads.servers[0])._workers[0].waits))
                self._wait_for_snapshot(threads.servers[0], 2)
                self.assertEqual(threads.restart_server(0), [True, True])
                self.assertTrue(_becomes_true(lambda: bool(threads.servers[0]._groups)))
                rank_0_waits.set()
                order.append(("pushes", 0))
                worker.push(0, 1.0)

        threads.run(body)
        self.assertEqual(order, [("answered", 0), ("pushes", 0), ("answered", 1)])
        self.assertEqual(_group(threads.servers[0]).num_pushes, 3)

    def test_who_has_left_the_session_takes_its_model_and_holds_nobody(self):
        threads = self._start(2, 1, consistency="bsp")
        self._configure(threads)
        first, second = threads.workers
        threads.run(lambda rank, worker: worker.push(0, 1.0))
        self._wait_for_snapshot(threads.servers[0], 2)
        membership = second.exchange._membership
        membership.session = 1
        membership.leave(sent_rounds={}, reason="")
        self.assertTrue(_becomes_true(lambda: 1 in threads.servers[0]._left))
        self.assertEqual(threads.restart_server(0), [True, True])
        model, _ = first.push(1, 1.0)
        self.assertAllEqual(model, np.full(NUM_VALUES, 1.0 - 2 * RATE))
        second.exchange.state.pull()
        self.assertAllEqual(second.variable, model)
        first.push(2, 1.0)
        self.assertEqual(_group(threads.servers[0])._workers.keys(), {0})

    def test_pushes_of_an_earlier_process_of_a_worker_are_not_taken_for_its_own(self):
        threads = self._start(2, 1, snapshots=self._only_first())
        self._configure(threads)
        first, second = threads.workers
        for step in range(3):
            second.push(step, 1.0)
        first.push(0, 1.0)
        threads.servers[0]._snapshots.write("0-group", _group(threads.servers[0]), final=True)
        threads.servers[0].restarted(1)
        with mock.patch.object(type(second.exchange._membership.transport), "incarnation", "another"):
            second.exchange.reset(1)
            second.exchange.state.configure(joins=True)
        second.push(0, 1.0)
        self.assertEqual(threads.restart_server(0), [True, True])
        model, _ = second.push(1, 1.0)  # The former process has made three.
        self.assertAllEqual(model, np.full(NUM_VALUES, 1.0 - 5 * RATE))
        self.assertEqual(self._counters(second), (1, 1))

    def test_who_joins_at_the_same_time_does_not_end_the_training(self):
        """A joining worker may be there before the others have noticed the server's restart."""
        threads = self._start(2, 1)
        self._configure(threads)
        first, second = threads.workers
        first.push(0, 1.0)
        self._wait_for_snapshot(threads.servers[0], 1)
        self.assertEqual(threads.restart_server(0), [True, True])
        second.exchange.state.configure(joins=True)
        self.assertAllEqual(second.variable, np.full(NUM_VALUES, 1.0 - RATE))
        first.push(1, 1.0)
        model, _ = second.push(0, 1.0)
        self.assertAllEqual(model, np.full(NUM_VALUES, 1.0 - 3 * RATE))

    def test_who_was_not_answered_yet_goes_on_with_those_who_were(self):
        threads = self._start(2, 2)
        self._configure(threads)
        first, second = threads.workers
        first.push(0, 1.0)
        for server in threads.servers:
            self._wait_for_snapshot(server, 1)
        self.assertEqual(threads.restart_server(0), [True, True])
        second.push(0, 1.0)
        model, _ = first.push(1, 1.0)
        self.assertAllEqual(model, np.full(NUM_VALUES, 1.0 - 3 * RATE))

    def _fails(self, worker, message, step=1):
        with self.assertRaisesRegex(HopError, rf"rank 0: ps 0 at in-process:\d:? .*{message}"):
            worker.push(step, 1.0)

    def test_without_a_snapshot_of_the_training_it_is_an_error(self):
        lost = "it was restarted, and has no snapshot of this training.*Start the job again"
        for make_unusable in ("no file", "another directory", "another training"):
            with self.subTest(make_unusable), tempfile.TemporaryDirectory() as self._directory:
                threads = self._start(1, 1)
                (worker,) = threads.workers
                self._configure(threads)
                worker.push(0, 1.0)
                self._wait_for_snapshot(threads.servers[0], 1)
                options = None
                if make_unusable == "no file":
                    snapshots_module.os.remove(threads.servers[0]._snapshots.path("0-group"))
                elif make_unusable == "another directory":
                    options = hop_tf.SnapshotOptions(directory=self.enterContext(tempfile.TemporaryDirectory()))
                else:
                    _group(threads.servers[0]).training = "another"
                    threads.servers[0]._snapshots.write("0-group", _group(threads.servers[0]), final=True)
                    worker.push(1, 1.0)
                    self._wait_for_snapshot(threads.servers[0], 2)
                self.assertEqual(threads.restart_server(0, options), [True])
                self._fails(worker, lost, step=2 if make_unusable == "another training" else 1)

    def test_a_server_that_writes_none_is_an_error_when_it_was_started_again(self):
        with ShatThreads(1, 1) as threads:
            self._configure(threads)
            threads.workers[0].push(0, 1.0)
            self.assertEqual(threads.restart_server(0), [False])

    def test_a_snapshot_of_an_earlier_fit_lacks_no_more_than_pushes(self):
        threads = self._start(1, 1, snapshots=self._only_first())
        (worker,) = threads.workers
        self._configure(threads)
        for step in range(3):
            worker.push(step, 1.0)
        worker.exchange.reset(2)
        self.assertEqual(threads.restart_server(0), [True])
        model, _ = worker.push(0, 1.0)
        self.assertAllEqual(model, np.full(NUM_VALUES, 1.0 - 2 * RATE))
        self.assertEqual(self._counters(worker), (1, 2))

    def test_the_first_push_of_each_fit_is_in_a_snapshot_before_it_is_answered(self):
        threads = self._start(1, 1, snapshots=self._only_first())
        (worker,) = threads.workers
        self._configure(threads)
        num_pushes = 0
        for session in (1, 2, 3):
            worker.exchange.reset(session)
            for step in range(2):
                worker.push(step, 1.0)
                num_pushes += 1
                if step == 0:
                    (history,) = threads.servers[0]._snapshots._histories.values()
                    self.assertEqual(history.num_pushes, num_pushes)

    def test_a_model_that_was_changed_after_the_snapshot_is_an_error(self):
        threads = self._start(1, 1)
        (worker,) = threads.workers
        self._configure(threads)
        worker.push(0, 1.0)
        self._wait_for_snapshot(threads.servers[0], 1)
        worker.exchange.reset(2)
        worker.variable.assign(np.full(NUM_VALUES, 7.0, np.float32))
        self.assertEqual(threads.restart_server(0), [True])
        worker.exchange.state.offer()  # The new process has the model now.
        model, _ = worker.push(0, 1.0)
        self.assertAllEqual(model, np.full(NUM_VALUES, 7.0 - RATE))
        worker.exchange.reset(3)
        (server,) = threads.servers
        worker.push(0, 1.0)
        server.take_snapshots(final=True)  # The snapshot is of this session, and still lacks the model.
        worker.variable.assign(np.full(NUM_VALUES, 9.0, np.float32))
        worker.exchange.state.offer()
        self.assertTrue(_becomes_true(lambda: _group(server).num_assigned == 2))
        self.assertEqual(threads.restart_server(0), [True])
        self._fails(worker, "its snapshot is older than the model that it got.*Start the job again")

    @parameterized.parameters("async", "ssp", "bsp")
    @pytest.mark.stress(but=1)
    def test_each_push_counts_once_or_is_lost_with_servers_that_die_at_any_time(self, consistency):
        num_workers, num_steps, generator = 3, 150, random.Random(0)
        snapshots = self._options(every_pushes=7)
        lost, take_up = set(), ServedGroup.take_up

        def noted(group, worker, process, num_answered, clock):
            lost.update((worker, number) for number in range(group._workers[worker].sequence, num_answered))
            return take_up(group, worker, process, num_answered, clock)

        with mock.patch.object(ServedGroup, "take_up", noted):
            threads = self._start(num_workers, 1, snapshots=snapshots, consistency=consistency)
            self._configure(threads)
            steps, restarts = [0] * num_workers, []

            def body(rank, worker):
                for step in range(num_steps):
                    worker.push(step, 1.0)
                    steps[rank] = step + 1
                    if rank == 0 and step in due:
                        restarts.append(threads.restart_server(0))

            due = set(generator.sample(range(num_steps - 1), 6))
            threads.run(body)
        self.assertEqual(restarts, [[True] * num_workers] * 6)
        self.assertEqual(steps, [num_steps] * num_workers)
        self.assertNotEmpty(lost)
        # A worker that has made all its steps may tell the new server its last answer a moment later.
        group = _group(threads.servers[0])
        self.assertTrue(_becomes_true(lambda: group.num_pushes == num_workers * num_steps - len(lost)))


if __name__ == "__main__":
    tf.test.main()

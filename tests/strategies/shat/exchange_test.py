"""Tests of SHAT's workers and servers without training: threads over a network that breaks, and a virtual clock."""

import collections
import dataclasses
import random
import threading
import time
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from hop_tf.errors import DeadlineExceededError, HopError, MismatchError, PeerLostError
from hop_tf.membership import waiting
from hop_tf.membership.monitor import ThreadMonitor
from hop_tf.options import CommunicationOptions
from hop_tf.strategies.shat import servers as shat_servers
from hop_tf.strategies.shat.server import parameter_server_pb2 as pb
from hop_tf.strategies.shat.server import server as server_module
from hop_tf.strategies.shat.server import sharding
from hop_tf.strategies.shat.server.configured import ConfiguredGroup
from hop_tf.strategies.shat.server.group import ServedGroup
from hop_tf.strategies.shat.server.server import PUSH, REPLY, ParameterServer
from hop_tf.strategies.shat.state import announce_offers
from hop_tf.tensors import payloads
from hop_tf.tools.simulate import VirtualCluster
from hop_tf.transport.base import Message
from hop_tf.transport.in_process import InProcessTransport
from shat_threads import GROUP, NUM_VALUES, RATE, SETTINGS, ShatThreads, ShatWorker


class _Lossy(InProcessTransport):
    """A transport that loses some messages and repeats others, unlike any transport of hop_tf."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._random = random.Random(self.rank)

    def send(self, peer, queue, *args, **kwargs):
        fate = self._random.random() if queue == PUSH or queue.endswith(REPLY) else 1.0
        if fate < 0.02:
            return
        super().send(peer, queue, *args, **kwargs)
        if fate < 0.12:
            super().send(peer, queue, *args, **kwargs)


class _ConnectionResets:
    """Cuts connections between workers and servers now and then, for a moment each."""

    def __init__(self, threads, num_workers, num_servers):
        self._network = threads.network
        self._pairs = [(w, num_workers + s) for w in range(num_workers) for s in range(num_servers)]
        self._stop = threading.Event()
        self.num_resets = 0
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *exc_info):
        self._stop.set()
        self._thread.join()

    def _run(self):
        generator = random.Random(0)
        while not self._stop.wait(generator.uniform(0, 0.02)):
            pair = generator.choice(self._pairs)
            self._network.disconnect(*pair)
            self._stop.wait(generator.uniform(0, 0.01))
            self._network.reconnect(*pair)
            self.num_resets += 1


def _train(threads, num_pushes):
    """Lets all workers push random integers; returns their sums, each weighted with its rate."""
    values = np.random.default_rng(0).integers(-8, 9, (len(threads.workers), num_pushes))

    def body(rank, worker):
        worker.exchange.state.configure(joins=False)
        for step, value in enumerate(values[rank]):
            worker.push(step, float(value), rate=0.5 if value % 2 else 0.25)

    threads.run(body)
    return (values * np.where(values % 2, 0.5, 0.25)).sum()


class ExactlyOnceTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(500, 2500)
    @pytest.mark.stress
    def test_pushes_while_connections_break(self, num_pushes):
        num_workers, num_servers = 4, 1
        with ShatThreads(num_workers, num_servers) as threads:
            with _ConnectionResets(threads, num_workers, num_servers) as resets:
                total = _train(threads, num_pushes)
            self.assertGreater(resets.num_resets, num_pushes / 100)
            for worker in threads.workers:
                worker.exchange.state.pull()
                # Sums of multiples of 1/4 that are not large are exact in float32.
                self.assertAllEqual(worker.variable, np.full(NUM_VALUES, 1.0 - total))
            for server in threads.servers:
                (configured,) = server._groups.values()
                self.assertEqual(configured.group.num_pushes, num_workers * num_pushes)

    @parameterized.parameters(150, 3400)
    @pytest.mark.stress(after=1)
    @pytest.mark.slow
    def test_messages_that_are_lost_or_repeated(self, num_pushes):
        """A push may be asked for, sent again, and dropped as a duplicate, but is applied once."""
        num_workers, num_servers = 3, 2
        counts = collections.Counter()
        push = ServedGroup.push

        def counted(group, worker, gradient):
            known = group._workers[worker].sequence
            counts["asked for" if gradient.buckets is None else "new" if gradient.sequence > known else "again"] += 1
            answers = push(group, worker, gradient)
            counts["missing"] += sum(answer.is_missing for answer in answers)
            return answers

        with (
            mock.patch.object(shat_servers, "_RETRY_SECONDS", 0.01),
            mock.patch.object(waiting, "_LIVENESS_PERIOD_SECONDS", 0.01),  # The interval at which due retries are seen.
            mock.patch.object(ServedGroup, "push", counted),
            ShatThreads(num_workers, num_servers, _Lossy) as threads,
        ):
            total = _train(threads, num_pushes)
            threads.workers[0].exchange.state.pull()
            self.assertAllEqual(threads.workers[0].variable, np.full(NUM_VALUES, 1.0 - total))
            for server in threads.servers:
                self.assertEqual(_pushes(server), num_workers * num_pushes)
        for what in ("new", "again", "asked for", "missing"):
            self.assertGreater(counts[what], 0, counts)


class ConfigureTest(tf.test.TestCase, parameterized.TestCase):
    def _errors(self, settings):
        errors = []
        with ShatThreads(2, 1, settings=settings) as threads:

            def body(rank, worker):
                try:
                    worker.exchange.state.configure(joins=False)
                except HopError as error:
                    errors.append(error)

            threads.run(body)
        return errors

    def test_workers_that_disagree(self):
        error, *_ = self._errors([SETTINGS, dataclasses.replace(SETTINGS, mixing="asp")])
        self.assertIsInstance(error, MismatchError)
        self.assertRegex(str(error), r"rank . disagrees on option 'mixing': '.*' there, '.*' elsewhere")
        self.assertIn("'asp'", str(error))
        self.assertIn("'shat'", str(error))

    def test_an_optimizer_that_the_server_does_not_know(self):
        class Mine(keras.optimizers.SGD):
            pass

        settings = dataclasses.replace(SETTINGS, sharding="layer")
        with ShatThreads(1, 1) as threads:
            membership = threads.workers[0].exchange._membership
            threads.workers[0].exchange.close()
            worker = ShatWorker(membership, settings, lambda: Mine(RATE))
            with self.assertRaisesRegex(HopError, "Mine"):
                worker.exchange.state.configure(joins=False)

    @parameterized.parameters("Lamb", "Muon", "Adafactor")
    def test_optimizers_of_whole_tensors_are_not_divided(self, name):
        make = lambda: getattr(keras.optimizers, name)()  # noqa: E731
        with ShatThreads(1, 2) as threads:
            membership = threads.workers[0].exchange._membership
            with self.assertRaisesRegex(ValueError, f"`sharding` must be 'layer' or 'none' with {name}.*'memory'"):
                ShatWorker(membership, SETTINGS, make)
            ShatWorker(membership, dataclasses.replace(SETTINGS, sharding="layer"), make)

    def test_a_group_that_is_made_keeps_no_push_waiting(self):
        """The creation of rank 1's second group lasts until rank 0 has got an answer in the first one."""
        answered = threading.Event()

        def make(configure, pool):
            if configure.group != GROUP and not answered.wait(20):
                raise HopError("a push to the other group has waited for this one to be made")
            return ConfiguredGroup(configure, pool)

        with ShatThreads(2, 1) as threads:
            threads.run(lambda rank, worker: worker.exchange.state.configure(joins=False))
            second = [ShatWorker(worker.exchange._membership, group="1-group") for worker in threads.workers]

            def body(rank, worker):
                if rank == 1:
                    second[1].exchange.state.configure(joins=False)
                else:
                    self.assertTrue(_comes_true(lambda: server_module.ConfiguredGroup.call_count))
                    worker.push(0, 1.0)
                    answered.set()
                    second[0].exchange.state.configure(joins=False)
                second[rank].push(0, 2.0)

            with mock.patch.object(server_module, "ConfiguredGroup", side_effect=make):
                threads.run(body)
            for worker, total in ((threads.workers[1], 1.0), (second[1], 4.0)):
                worker.exchange.state.pull()
                self.assertAllEqual(worker.variable, np.full(NUM_VALUES, 1.0 - total * RATE))

    def test_who_joins_takes_the_server_s_model_and_schedule(self):
        with ShatThreads(2, 2) as threads:
            second = threads.workers[1]
            for worker in threads.workers:
                worker.optimizer.iterations.assign(100)  # As after loading a trained model.
            _train_and_join_again(threads)
            self.assertAllEqual(second.variable, np.full(NUM_VALUES, 1.0 - 10 * RATE))
            self.assertEqual(int(second.optimizer.iterations), 105)
            model, _ = second.push(0, 1.0)
            self.assertAllEqual(model, np.full(NUM_VALUES, 1.0 - 11 * RATE))

    @parameterized.parameters(16, 32, 1 << 20)
    @pytest.mark.stress(but=2)
    def test_who_joins_takes_the_server_s_slots(self, piece_values):
        """With its own new slots, and the servers' count of steps, Adam's steps would be 3 times too long."""
        self.enterContext(mock.patch.object(sharding, "_MAX_PIECE_VALUES", piece_values))
        settings = [SETTINGS] * 2
        with ShatThreads(2, 2, settings=settings, make_optimizer=lambda: keras.optimizers.Adam(RATE)) as threads:
            first, second = threads.workers
            _train_and_join_again(threads)
            # 10 equal gradients: m = 1 - 0.9^10, v = 1 - 0.999^10.
            self.assertAllClose(second.optimizer._momentums[0], np.full(NUM_VALUES, 1 - 0.9**10), rtol=1e-5)
            self.assertAllClose(second.optimizer._velocities[0], np.full(NUM_VALUES, 1 - 0.999**10), rtol=1e-4)
            first.exchange.state.pull()
            self.assertAllEqual(first.optimizer._momentums[0], second.optimizer._momentums[0])

    def test_slots_of_a_worker_that_joins_begin_anew_where_steps_are_pushed(self):
        """With the servers' count of steps, Adam would take new slots for complete. A schedule goes on."""
        settings = [dataclasses.replace(SETTINGS, pushes="steps")] * 2
        schedule = keras.optimizers.schedules.PolynomialDecay(1.0, 10, end_learning_rate=0.0)
        with ShatThreads(2, 2, settings=settings, make_optimizer=lambda: keras.optimizers.Adam(schedule)) as threads:
            second = threads.workers[1].optimizer
            _train_and_join_again(threads)
            self.assertEqual(int(second.iterations), 0)
            self.assertAllClose(second.learning_rate, 0.5)  # After 5 of 10 steps.
            copy = keras.optimizers.deserialize(keras.optimizers.serialize(second))
            self.assertAllClose(copy.learning_rate, 0.5)


def _train_and_join_again(threads):
    """Lets two workers push five gradients of 1 each, then restarts the second worker, which joins."""

    def body(rank, worker):
        worker.exchange.state.configure(joins=False)
        for step in range(5):
            worker.push(step, 1.0)

    threads.run(body)
    for server in threads.servers:
        server.restarted(1)
    threads.workers[1].exchange.state.configure(joins=True)


class _Clock(ThreadMonitor):
    """A clock that goes on without delay when a thread waits. Then it calls `on_tick(seconds)`."""

    def __init__(self, on_tick):
        super().__init__()
        self._seconds = 0.0
        self._on_tick = on_tick

    def now(self):
        return self._seconds

    def wait(self, timeout_seconds):
        self._seconds += timeout_seconds
        self._on_tick(self._seconds)


class RetryTest(tf.test.TestCase):
    def test_slow_answers_are_not_asked_for_again_and_again(self):
        """Answers take 100 s. The worker waits 10, 20, 40 and 80 s before it asks again, and then long enough."""
        asked_at, pushed_at = [], []

        def send(server, queue, header, payload, **kwargs):
            push = pb.Push.FromString(header)
            (asked_at if push.asks_again else pushed_at).append(monitor.now())
            self.assertNotEqual(push.asks_again, bool(payload))

        def answer(seconds):
            if seconds >= pushed_at[-1] + 100:
                reply = pb.Reply(session=1, sequence=len(pushed_at), num_workers=1)
                buckets = packing.zeros()
                worker.exchange._servers._received[PUSH][1] = reply, np.concatenate(payloads.join(buckets))

        with ShatThreads(1, 1) as threads:
            (worker,) = threads.workers
            packing = worker.exchange.shards[0].packing
            monitor = worker.exchange._membership.monitor = _Clock(answer)
            with mock.patch.object(worker.exchange._membership, "send", send):
                for step in range(5):
                    worker.push(step, 1.0)
        self.assertEqual(asked_at, [10.0, 30.0, 70.0, 180.0])
        self.assertEqual(pushed_at, [100.0 * step for step in range(5)])

    def test_an_older_push_that_was_missing_says_nothing_about_this_one(self):
        """A server that is asked twice reports a missing push twice. The second report comes after the next push."""
        num_sent = 0

        def send(*args, **kwargs):
            nonlocal num_sent
            num_sent += 1
            self.assertLessEqual(num_sent, 3)
            received = worker.exchange._servers._received[PUSH]
            received[1] = pb.Reply(session=1, sequence=num_sent - 1, is_missing=True), np.zeros(0, np.uint8)

        def answer(seconds):
            reply = pb.Reply(session=1, sequence=num_sent, num_workers=1)
            worker.exchange._servers._received[PUSH][1] = reply, np.concatenate(payloads.join(packing.zeros()))

        with ShatThreads(1, 1) as threads:
            (worker,) = threads.workers
            packing = worker.exchange.shards[0].packing
            worker.exchange._membership.monitor = _Clock(answer)
            with mock.patch.object(worker.exchange._membership, "send", send):
                for step in range(3):
                    worker.push(step, 1.0)
        self.assertEqual(num_sent, 3)


class SessionsTest(tf.test.TestCase):
    """Tests of a server with workers that leave, come late, or are all restarted."""

    def setUp(self):
        super().setUp()
        options = CommunicationOptions(timeout_seconds=30, progress_timeout_seconds=10)
        self.enterContext(mock.patch("shat_threads.OPTIONS", options))

    def _leave(self, threads, rank, session):
        """Lets `rank` leave, and waits until the server has heard of it."""
        membership = threads.workers[rank].exchange._membership
        membership.session = session
        membership.leave(sent_rounds={}, reason="")
        server = threads.servers[0]
        self.assertTrue(_comes_true(lambda: rank in server._left))

    def test_who_leaves_a_session_before_its_first_message_is_not_waited_for(self):
        settings = dataclasses.replace(SETTINGS, consistency="bsp")
        with ShatThreads(2, 1, settings=[settings] * 2) as threads:
            self._leave(threads, 1, session=1)
            first = threads.workers[0]
            first.exchange.state.configure(joins=False)
            model, _ = first.push(0, 2.0)
            self.assertAllEqual(model, np.full(NUM_VALUES, 1.0 - 2 * RATE))
            self._leave(threads, 0, session=1)
            self._leave(threads, 1, session=2)
            first.exchange.reset(2)
            model, _ = first.push(0, 1.0)
            self.assertAllEqual(model, np.full(NUM_VALUES, 1.0 - 3 * RATE))

    def test_who_leaves_the_next_session_while_others_are_in_this_one(self):
        """As if its second `fit` were interrupted at once: others get answers, and do not wait for that rank."""
        settings = dataclasses.replace(SETTINGS, consistency="bsp")
        with ShatThreads(2, 1, settings=[settings] * 2) as threads:
            threads.run(lambda rank, worker: worker.exchange.state.configure(joins=False))
            for session in (1, 2):
                self._leave(threads, 1, session)
            first = threads.workers[0]
            for session in (1, 2):
                first.exchange.reset(session)
                model, _ = first.push(0, 1.0)
                self.assertAllEqual(model, np.full(NUM_VALUES, 1.0 - session * RATE))

    def test_a_later_session_begins_with_what_rank_0_has_assigned_or_without_it(self):
        with ShatThreads(2, 2) as threads:
            first, second = threads.workers
            threads.run(lambda rank, worker: worker.exchange.state.configure(joins=False))
            self._pulls_when(threads, 2, lambda: self._offer(first, 5.0))
            self.assertAllEqual(second.variable, np.full(NUM_VALUES, 5.0))
            # The rank may first offer its model, or be lost, before or after others have asked.
            self._begin_session(threads, 3)
            self._offer(first, 7.0)
            second.exchange.state.pull(after_offers=True)
            self.assertAllEqual(second.variable, np.full(NUM_VALUES, 7.0))
            second.variable.assign(0 * second.variable)
            self._pulls_when(threads, 4, lambda: [server.forget(0, "the test says so") for server in threads.servers])
            self._begin_session(threads, 5)
            second.exchange.state.pull(after_offers=True)
            self.assertAllEqual(second.variable, np.full(NUM_VALUES, 7.0))

    def _begin_session(self, threads, session):
        for worker in threads.workers:
            worker.exchange._membership.session = session
            worker.exchange.reset(session)

    def _offer(self, worker, value):
        worker.variable.assign(np.full(NUM_VALUES, value, np.float32))
        worker.exchange.state.offer()
        announce_offers(worker.exchange._membership)

    def _pulls_when(self, threads, session, act):
        """Lets the second worker pull, and calls `act()` when all servers know that, before any has answered."""
        self._begin_session(threads, session)

        def body(rank, worker):
            if rank:
                worker.exchange.state.pull(after_offers=True)
            else:
                self.assertTrue(_comes_true(lambda: all(server._waiting_pulls for server in threads.servers)))
                act()

        threads.run(body)

    def test_a_push_that_the_next_session_overtakes_is_dropped(self):
        """The server has accepted the push for the running session, which ends before the group gets the push."""
        with ShatThreads(1, 1) as threads:
            (server,), (worker,) = threads.servers, threads.workers
            worker.exchange.state.configure(joins=False)
            (configured,) = server._groups.values()
            gradient_of = configured.gradient_of

            def overtaken(push, payload):
                with server._lock:
                    server._enter(2)
                return gradient_of(push, payload)

            payload = payloads.join([np.ones(size, np.float32) for size in configured.packing.sizes])
            push = pb.Push(group=GROUP, session=1, sequence=1, rate=RATE, is_applied=True).SerializeToString()
            with mock.patch.object(configured, "gradient_of", overtaken):
                server._on_push(Message(0, PUSH, push, np.concatenate(payload)))
            self.assertEqual(configured.group.num_pushes, 0)
            worker.exchange.reset(2)
            model, _ = worker.push(0, 3.0)
            self.assertAllEqual(model, np.full(NUM_VALUES, 1.0 - 3 * RATE))

    def test_who_comes_when_it_was_given_up_takes_part(self):
        with ShatThreads(1, 1) as threads:
            (server,), (worker,) = threads.servers, threads.workers
            server.forget(0, "it never appeared")
            self.assertTrue(server.is_done)
            worker.exchange.state.configure(joins=False)
            self.assertFalse(server.is_done)
            self.assertEqual(server.present, [0])

    def test_a_group_is_kept_for_who_was_started_again_after_it_had_retired_it(self):
        with ShatThreads(2, 1) as threads:
            (server,), (first, second) = threads.servers, threads.workers
            threads.run(lambda rank, worker: worker.exchange.state.configure(joins=False))
            (configured,) = server._groups.values()
            second.exchange.state.retire()
            self.assertTrue(_comes_true(lambda: configured.retired))
            server.restarted(1)
            second.exchange.state.configure(joins=True)
            first.exchange.state.retire()
            self.assertTrue(_comes_true(lambda: 0 in configured.retired))
            model, _ = second.push(0, 1.0)
            self.assertAllEqual(model, np.full(NUM_VALUES, 1.0 - RATE))

    def test_workers_that_were_all_started_again_begin_to_count_sessions_anew(self):
        with ShatThreads(2, 1) as threads:
            (server,), workers = threads.servers, threads.workers
            self._train_in_session_3(threads)
            workers[0].push(0, 1.0)
            self._start_again(server, workers)
            threads.run(lambda rank, worker: worker.exchange.state.configure(joins=False))
            self.assertEqual([int(worker.optimizer.iterations) for worker in workers], [1, 1])  # The servers' steps.
            model, _ = workers[1].push(0, 1.0)
            self.assertAllEqual(model, np.full(NUM_VALUES, 1.0 - 2 * RATE))

    def test_who_is_started_again_when_the_others_have_left_trains_without_them(self):
        settings = dataclasses.replace(SETTINGS, consistency="bsp")
        with ShatThreads(2, 1, settings=[settings] * 2) as threads:
            threads.run(lambda rank, worker: worker.exchange.state.configure(joins=False))
            self._leave(threads, 1, session=1)
            threads.servers[0].restarted(0)
            first = threads.workers[0]
            first.exchange.state.configure(joins=True)
            model, _ = first.push(0, 1.0)
            self.assertAllEqual(model, np.full(NUM_VALUES, 1.0 - RATE))

    def test_who_is_started_again_with_another_model_is_told(self):
        """No worker would give the servers the values of that model."""
        with ShatThreads(2, 1) as threads:
            threads.run(lambda rank, worker: worker.exchange.state.configure(joins=False))
            threads.workers[0].push(0, 1.0)
            threads.servers[0].restarted(1)
            other = ShatWorker(threads.workers[1].exchange._membership, group="0-other")
            with self.assertRaisesRegex(
                MismatchError, r"rank 1: ps 0 at \S+: this process was restarted, and would train"
            ):
                other.exchange.state.configure(joins=True)
            model, _ = threads.workers[0].push(1, 1.0)
            self.assertAllEqual(model, np.full(NUM_VALUES, 1.0 - 2 * RATE))

    def _start_again(self, server, workers):
        for rank, worker in enumerate(workers):
            server.restarted(rank)
            worker.exchange.reset(1)

    def _train_in_session_3(self, threads):
        for worker in threads.workers:
            worker.exchange.reset(3)
        threads.run(lambda rank, worker: worker.exchange.state.configure(joins=False))

    def test_the_server_hears_of_one_of_the_new_processes_when_another_one_has_configured_it(self):
        with ShatThreads(2, 1) as threads:
            (server,), workers = threads.servers, threads.workers
            self._train_in_session_3(threads)
            workers[0].push(0, 1.0)
            for rank, worker in enumerate(workers):
                server.restarted(rank)
                worker.exchange.reset(1)
                worker.exchange.state.configure(joins=False)
            for number, worker in enumerate(workers, 2):
                model, _ = worker.push(0, 1.0)
                self.assertAllEqual(model, np.full(NUM_VALUES, 1.0 - number * RATE))

    def test_workers_that_were_all_started_again_before_the_first_push_begin_with_rank_0_s_new_model(self):
        with ShatThreads(2, 1) as threads:
            (server,), workers = threads.servers, threads.workers
            self._train_in_session_3(threads)
            self._start_again(server, workers)
            workers[0].variable.assign(np.full(NUM_VALUES, 5.0, np.float32))
            threads.run(lambda rank, worker: worker.exchange.state.configure(joins=False))
            self.assertAllEqual(workers[1].variable, np.full(NUM_VALUES, 5.0))

    def test_rank_0_has_gone_before_it_has_given_its_model(self):
        with ShatThreads(2, 1) as threads:
            threads.servers[0].forget(0, "the test says so")
            self._fails_to_configure(threads.workers[1])

    def test_rank_0_goes_before_it_has_given_its_model(self):
        with ShatThreads(2, 1) as threads:
            (server,) = threads.servers

            def forget():
                _comes_true(lambda: server._groups)
                server.forget(0, "the test says so")

            thread = threading.Thread(target=forget)
            thread.start()
            self._fails_to_configure(threads.workers[1])
            thread.join()

    def _fails_to_configure(self, worker):
        with self.assertRaisesRegex(HopError, r"rank 1: ps 0 at \S+: rank 0 left before the servers had"):
            worker.exchange.state.configure(joins=False)


def _comes_true(condition):
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


class RestartedServerTest(tf.test.TestCase):
    """Until its first push is answered, a worker has all that a server needs to begin again."""

    def _restart(self, threads, index):
        """Restarts a server without its state; returns for each worker if it goes on."""
        server = threads.servers[index]
        with server._lock:
            server._groups.clear()
            server._begin_session(0)
        return [worker.exchange.goes_on_with(len(threads.workers) + index) for worker in threads.workers]

    def test_is_initialized_again_before_the_first_push_is_answered(self):
        settings = dataclasses.replace(SETTINGS, consistency="bsp")
        with ShatThreads(2, 2, settings=[settings] * 2) as threads:
            servers = threads.servers
            self.assertEqual(self._restart(threads, 0), [True, True])  # Nothing was sent yet.

            def body(rank, worker):
                if rank == 0:
                    worker.variable.assign(np.full(NUM_VALUES, 3.0, np.float32))
                    # The other worker waits for this rank's model. Later it has pushed, and this one is about to.
                    self.assertTrue(_comes_true(lambda: _waiting(servers[0])))
                    self.assertEqual(self._restart(threads, 0), [True, True])
                    self.assertTrue(_comes_true(lambda: _waiting(servers[0])))
                    worker.exchange.state.configure(joins=False)
                    self.assertTrue(_comes_true(lambda: all(map(_pushed, servers))))
                    for index in range(len(servers)):
                        self.assertEqual(self._restart(threads, index), [True, True])
                else:
                    worker.exchange.state.configure(joins=False)
                model, _ = worker.push(0, float(rank))
                self.assertAllEqual(model, np.full(NUM_VALUES, 3.0 - 0.5 * RATE))
                worker.push(1, 1.0)

            threads.run(body)
            self.assertEqual([_pushes(server) for server in servers], [4, 4])
            self.assertEqual(self._restart(threads, 0), [False, False])

    def test_is_initialized_again_in_a_later_session(self):
        with ShatThreads(1, 1) as threads:
            (worker,) = threads.workers
            worker.exchange.state.configure(joins=False)
            worker.exchange.reset(2)  # After a `fit` that has ended before its first push.
            self.assertEqual(self._restart(threads, 0), [True])
            model, _ = worker.push(0, 1.0)
            self.assertAllEqual(model, np.full(NUM_VALUES, 1.0 - RATE, np.float32))

    def test_does_not_wait_to_be_told_again_that_rank_0_has_begun(self):
        """The process that rank 0 has told is gone. Rank 1 has not begun yet, and asks the new one."""
        options = CommunicationOptions(timeout_seconds=30, progress_timeout_seconds=10)
        with ShatThreads(2, 1, options=options) as threads:
            threads.run(lambda rank, worker: worker.exchange.state.configure(joins=False))
            for worker in threads.workers:
                worker.exchange._membership.session = 2
                worker.exchange.reset(2)
            announce_offers(threads.workers[0].exchange._membership)
            self.assertTrue(_comes_true(lambda: threads.servers[0]._has_begun))
            self.assertEqual(self._restart(threads, 0), [True, True])

            def body(rank, worker):
                if rank:
                    worker.variable.assign(np.zeros(NUM_VALUES, np.float32))
                    worker.exchange.state.pull(after_offers=True)
                else:
                    worker.push(0, 0.0)

            threads.run(body)
            self.assertAllEqual(threads.workers[1].variable, np.ones(NUM_VALUES))

    def test_another_one_is_initialized_again_that_was_restarted_meanwhile(self):
        """The other server restarts while the first is configured. The request in flight is repeated to both."""
        with ShatThreads(1, 2) as threads:
            (worker,) = threads.workers
            worker.exchange.state.configure(joins=False)
            servers = worker.exchange._servers
            receive, requests = servers.receive, []

            def meanwhile(request):
                requests.append(request)
                if len(requests) == 2:
                    self.assertEqual(self._restart(threads, 1), [True])
                return receive(request)

            self.assertEqual(self._restart(threads, 0), [True])
            with mock.patch.object(servers, "receive", meanwhile):
                worker.exchange.state.pull()
            self.assertLen(requests, 3)
            self.assertAllEqual(worker.variable, np.ones(NUM_VALUES))
            model, _ = worker.push(0, 1.0)
            self.assertAllEqual(model, np.full(NUM_VALUES, 1.0 - RATE, np.float32))

    def test_one_that_keeps_nothing_has_lost_nothing(self):
        settings = dataclasses.replace(SETTINGS, sharding="none")
        with ShatThreads(1, 2, settings=[settings]) as threads:
            (worker,) = threads.workers
            worker.exchange.state.configure(joins=False)
            self.assertEqual(self._restart(threads, 1), [True])
            worker.push(0, 1.0)
            self.assertEqual(self._restart(threads, 1), [True])
            model, _ = worker.push(1, 1.0)
            self.assertAllEqual(model, np.full(NUM_VALUES, 1.0 - 2 * RATE))
            self.assertEqual(self._restart(threads, 0), [False])


def _groups(server):
    with server._lock:
        return list(server._groups.values())


def _waiting(server):
    return any(configured.waiting for configured in _groups(server))


def _pushed(server):
    return any(configured.group._pushed for configured in _groups(server))


def _pushes(server):
    return sum(configured.group.num_pushes for configured in _groups(server))


class LostTest(tf.test.TestCase):
    def test_a_lost_server_is_an_error(self):
        options = CommunicationOptions(timeout_seconds=1)
        with ShatThreads(1, 2, options=options) as threads:
            (worker,) = threads.workers
            worker.exchange.state.configure(joins=False)
            worker.push(0, 1.0)
            threads.network.kill(2)
            with self.assertRaisesRegex(PeerLostError, r"rank 0, step 1: receive model of push 2 on ps 1 at "):
                worker.push(1, 1.0)

    def test_who_waits_for_a_slow_worker_is_told_that_it_is_not_the_server(self):
        options = CommunicationOptions(timeout_seconds=30, progress_timeout_seconds=1)
        settings = dataclasses.replace(SETTINGS, consistency="bsp")
        with ShatThreads(2, 1, settings=[settings] * 2, options=options) as threads:
            threads.run(lambda rank, worker: worker.exchange.state.configure(joins=False))
            with self.assertRaisesRegex(
                DeadlineExceededError, r"push 1 \(which comes when slower workers have pushed\) on"
            ):
                threads.workers[0].push(0, 1.0)

    def test_without_rank_0_servers_have_no_state(self):
        options = CommunicationOptions(timeout_seconds=1)
        with ShatThreads(2, 1, options=options) as threads:
            threads.network.kill(0)
            with self.assertRaisesRegex(HopError, r"rank 1: receive state on rank 0 at .* failed after 1\.\d s"):
                threads.workers[1].exchange.state.configure(joins=False)

    def test_the_others_go_on_without_a_lost_worker(self):
        settings = dataclasses.replace(SETTINGS, consistency="bsp")
        with ShatThreads(2, 1, settings=[settings] * 2) as threads:

            def body(rank, worker):
                worker.exchange.state.configure(joins=False)
                worker.push(0, float(rank))
                if rank == 0:
                    threads.servers[0].forget(1, "the test says so")
                    worker.push(1, 4.0)

            threads.run(body)
            threads.workers[0].exchange.state.pull()
            self.assertAllEqual(threads.workers[0].variable, np.full(NUM_VALUES, 1 - RATE * (0.5 + 4)))
            self.assertEqual(threads.workers[0].exchange._membership.num_lost, 1)
            with self.assertRaisesRegex(PeerLostError, "continues without rank 1"):
                threads.workers[1].push(1, 1.0)
            self.assertTrue(threads.workers[1].exchange._membership.is_given_up)


class VirtualTimeTest(tf.test.TestCase, parameterized.TestCase):
    """Tests on a virtual clock, on which runs are reproducible."""

    def _run(self, num_workers, num_steps, settings, seconds_of, link_seconds=None):
        """Runs workers; returns (time of the answer, rank, step, weight) for each push."""
        cluster = VirtualCluster(num_workers, link_seconds, num_servers=1)
        ParameterServer(transport=cluster.servers[0], num_workers=num_workers)
        answers = []

        def body(rank):
            worker = ShatWorker(cluster.memberships[rank], settings)
            worker.exchange.state.configure(joins=False)
            for step in range(num_steps):
                cluster.scheduler.sleep(seconds_of(rank, step))
                _, weights = worker.push(step, 1.0)
                answers.append((cluster.scheduler.now, rank, step, float(weights[0])))

        cluster.run(body)
        return answers

    @parameterized.parameters(1, 4)
    def test_the_weight_tells_how_far_behind_a_worker_is(self, interval):
        """Rank 0 takes 10 times as long: with n = 4, its c is 30, and that of the others 2 or 3 (Equation 4).

        A push of several steps mixes as often at a time.
        """

        def weight_of(count):
            return 1 - (4 / count / np.log(4)) ** interval

        settings = dataclasses.replace(SETTINGS, pushes="steps", interval=interval) if interval > 1 else SETTINGS
        answers = self._run(4, 12, settings, lambda rank, step: 10.0 if rank == 0 else 1.0 + 0.001 * rank)
        slow = [weight for _, rank, step, weight in answers if rank == 0 and step == 0]
        self.assertAllClose(slow, [weight_of(27)], atol=0.05)
        fast = {round(weight, 6) for _, rank, step, weight in answers if rank and 0 < step < 8}
        self.assertLessEqual(fast, {0.0, round(weight_of(3), 6)})

    def test_rank_0_ends_before_a_slow_worker_has_the_model(self):
        """The slow worker gets the model from the servers."""
        cluster = VirtualCluster(2, lambda a, b, n: 20.0 if (a, b) == (2, 1) else 0.1, num_servers=1, limit_seconds=100)
        ParameterServer(transport=cluster.servers[0], num_workers=2)
        models = {}

        def body(rank):
            membership = cluster.memberships[rank]
            membership.begin_session()
            worker = ShatWorker(membership)
            worker.exchange.state.configure(joins=False)
            models[rank], _ = worker.push(0, 1.0)
            membership.leave(sent_rounds={}, reason="done", final=True)

        cluster.run(body)
        for rank in range(2):
            self.assertAllEqual(models[rank], np.full(NUM_VALUES, 1.0 - (1 + rank) * RATE))

    @parameterized.parameters((0,), (2,), (2, {"pushes": "steps", "interval": 3}))
    def test_staleness_bounds_the_distance_under_random_delays(self, staleness, others=()):
        generator = np.random.default_rng(staleness)
        settings = dataclasses.replace(SETTINGS, consistency="ssp", max_staleness=staleness, **dict(others))
        delays = generator.exponential(size=(3, 20))
        answers = self._run(
            3, 20, settings, lambda rank, step: delays[rank, step], lambda *_: generator.uniform(0, 0.3)
        )
        num_answered = np.zeros(3, int)
        for _, rank, step, _ in sorted(answers):
            num_answered[rank] = step + 1
            # The slowest worker's push was applied, but its answer may be in flight.
            self.assertLessEqual(num_answered[rank] - num_answered.min(), staleness + 1)


if __name__ == "__main__":
    tf.test.main()

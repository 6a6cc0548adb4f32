"""Tests of sessions, groups and collectives of two `RankRuntime`s. Most tests run both in this process."""

import concurrent.futures
import contextlib
import gc
import os
import socket
import threading
from unittest import mock

import grpc
import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import hop_tf
from hop_tf.cluster import Cluster
from hop_tf.errors import DeadlineExceededError, HopError, MismatchError, PeerFailedError, PeerLostError
from hop_tf.membership import membership_pb2
from hop_tf.options import STACKS_VARIABLE, CommunicationOptions
from hop_tf.runtime.algorithm import Algorithm
from hop_tf.runtime.exchange import Exchange, Result
from hop_tf.runtime.rank_runtime import RankRuntime
from hop_tf.runtime.report import StepStatistics
from hop_tf.tools.processes.local_cluster import PortReservation
from hop_tf.tools.testing import MultiProcessRunner
from support import error_of

_DEADLINE_SECONDS = 30.0


class _Nothing(Algorithm):
    def before_update(self, values, gradients):
        return gradients


class Echo(Exchange):
    """An exchange that returns its buckets and counts the steps, without messages to other ranks."""

    def __init__(self):
        self.session = 0
        self._sent_rounds = 0
        self._num_steps = 0

    def reset(self, session):
        self.session = session
        self._sent_rounds = 0

    def step(self, request):
        self._sent_rounds = request.step + 1
        self._num_steps += 1
        return Result(request.step, request.segment, tuple(np.array(bucket) for bucket in request.buckets))

    def no_op(self, request):
        return Result(request.step, request.segment, tuple(np.zeros_like(bucket) for bucket in request.buckets))

    @property
    def sent_rounds(self):
        return self._sent_rounds

    def counters(self):
        return {"echoes": self._num_steps}

    def gauges(self):
        return {"latest": self._sent_rounds}


class Stuck(Echo):
    """An exchange whose step blocks until `go_on` is set, whatever happens to the session."""

    def __init__(self):
        super().__init__()
        self.has_begun = threading.Event()
        self.go_on = threading.Event()

    def step(self, request):
        self.has_begun.set()
        self.go_on.wait(_DEADLINE_SECONDS)
        return super().step(request)


class Optimizer:
    """Stands for an optimizer: an object with settings that can be garbage-collected."""

    def __init__(self, **settings):
        self._settings = settings

    def get_config(self):
        return self._settings


def _variable(value, name="v", dtype=None):
    return tf.Variable(value, name=name, dtype=dtype)


def _exchange_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("hop_tf exchange")]


class _TwoRanksTestCase(tf.test.TestCase, parameterized.TestCase):
    """Two runtimes, and a thread for each to call them on."""

    options = CommunicationOptions(timeout_seconds=_DEADLINE_SECONDS)
    make_scheme = Echo
    continue_without_lost = False

    def setUp(self):
        super().setUp()
        reservation = self.enter_context(contextlib.closing(PortReservation(2)))
        addresses = tuple(f"127.0.0.1:{port}" for port in reservation.ports)
        reservation.release()
        self.exchanges = ([], [])
        self.runtimes = [self._make_runtime(Cluster(addresses, rank)) for rank in range(2)]
        self.threads = self.enter_context(concurrent.futures.ThreadPoolExecutor(2))
        self.addCleanup(self.on_both, lambda rank, runtime: runtime.close("the test is over"))

    def _make_runtime(self, cluster):
        def make_exchange(context):
            exchange = self.make_scheme()
            self.exchanges[cluster.rank].append(exchange)
            exchange.reset(context.session)
            return exchange

        return RankRuntime(
            cluster=cluster,
            options=self.options,
            identity={},
            neighbors=[1 - cluster.rank],
            make_exchange=make_exchange,
            make_algorithm=_Nothing,
            continue_without_lost=self.continue_without_lost,
        )

    def on_both(self, call):
        """Runs `call(rank, runtime)` on both ranks at once; returns both results, or raises the error of one."""
        futures = [self.threads.submit(call, rank, runtime) for rank, runtime in enumerate(self.runtimes)]
        concurrent.futures.wait(futures, _DEADLINE_SECONDS)
        return [future.result(0) for future in futures]

    def begin_session(self):
        self.on_both(lambda rank, runtime: runtime.begin_session())

    def add_groups(self, make_variables, make_optimizer=lambda rank: Optimizer()):
        """Adds a group on both ranks; returns the optimizers and the groups."""
        optimizers = [make_optimizer(rank) for rank in range(2)]

        def add_group(rank, runtime):
            algorithm = runtime.add_group(
                optimizer=optimizers[rank],
                trained=make_variables(rank),
                carried=[],
                carried_values=[],
                statistics=StepStatistics(),
            )
            return algorithm.group

        return optimizers, self.on_both(add_group)


class StuckTest(_TwoRanksTestCase):
    options = CommunicationOptions(timeout_seconds=1.0, progress_timeout_seconds=3.0)
    make_scheme = Stuck

    def setUp(self):
        super().setUp()
        self.begin_session()
        _, (self.group, _) = self.add_groups(lambda rank: [_variable([0.0])])
        self.group.submit([tf.constant([0.0])])
        self.stuck = self.exchanges[0][0]
        self.addCleanup(self.stuck.go_on.set)
        self.assertTrue(self.stuck.has_begun.wait(_DEADLINE_SECONDS))

    @parameterized.parameters((None, HopError), (ValueError("bad input"), None))
    @pytest.mark.stress(but=1)
    def test_the_other_rank_hears_of_a_thread_that_does_not_come_to_rest(self, own_error, raised):
        with self.assertRaises(raised) if raised else contextlib.nullcontext():
            self.runtimes[0].end_session(own_error)
        self._check_that_the_other_rank_hears()

    @parameterized.parameters(None, ValueError("bad input"))
    def test_ctrl_c_ends_waiting_for_a_thread(self, own_error):
        """The other rank relies on messages that the thread has not sent."""
        ctrl_c = mock.patch.object(self.group.runner, "drain", side_effect=KeyboardInterrupt)
        with ctrl_c, self.assertRaises(KeyboardInterrupt):
            self.runtimes[0].end_session(own_error)
        self._check_that_the_other_rank_hears()

    def _check_that_the_other_rank_hears(self):
        self.assertFalse(self.runtimes[0].in_session)
        with self.assertRaisesRegex(PeerLostError, "rank 0 gave up"):
            self.runtimes[1].membership.wait(lambda: [0], operation="hear of it")


class StallTest(_TwoRanksTestCase):
    options = CommunicationOptions(timeout_seconds=_DEADLINE_SECONDS, progress_timeout_seconds=2.0)

    def setUp(self):
        path = os.path.join(self.get_temp_dir(), "stacks")
        self.enter_context(mock.patch.dict(os.environ, {STACKS_VARIABLE: path}))
        super().setUp()
        self.path = path

    def test_who_waits_for_long_says_for_whom_and_where(self):
        with self.assertLogs("absl", "WARNING") as logs, self.assertRaises(DeadlineExceededError):
            self.runtimes[0].membership.wait(lambda: [1], operation="receive update", step=3)
        (message,) = [record.getMessage() for record in logs.records if record.levelname == "WARNING"]
        self.assertRegex(message, r"rank 0, step 3: receive update: it has waited \d+ s for rank 1 .*stacks")
        self.assertIn(self.path, message)
        with open(self.path) as file:
            stacks = file.read()
        self.assertIn("receive update", stacks)
        self.assertIn(f'File "{__file__}"', stacks)  # The stack of this thread, which is in `wait`.


class SlowTest(_TwoRanksTestCase):
    options = CommunicationOptions(timeout_seconds=1.0)
    make_scheme = Stuck

    def test_a_thread_may_take_longer_than_a_silent_peer(self):
        """As in a large all-reduce over a slow link, whose mean others may have. It completes, and the job goes on."""
        self.begin_session()
        _, (group, _) = self.add_groups(lambda rank: [_variable([0.0])])
        group.submit([tf.constant([0.0])])
        slow = self.exchanges[0][0]
        self.addCleanup(slow.go_on.set)
        self.assertTrue(slow.has_begun.wait(_DEADLINE_SECONDS))
        threading.Timer(2.5, slow.go_on.set).start()
        self.runtimes[0].end_session(ValueError("bad input"))
        other = self.runtimes[1].membership
        self.assertTrue(other.wait_until(lambda: other.departure(0) is not None, _DEADLINE_SECONDS))
        self.assertEqual(other.departure(0).sent_rounds[group.name], 1)

    def test_what_was_sent_may_take_longer_than_a_silent_peer(self):
        """As with the last means over a slow link. A process that ends before they have arrived would end the job."""
        self.begin_session()
        taken = threading.Event()
        self.addCleanup(taken.set)
        first, second = (runtime.membership for runtime in self.runtimes)
        second.transport.register("slow", lambda message: taken.wait(_DEADLINE_SECONDS))
        first.send(1, "slow", b"", lane=1)
        threading.Timer(2.5, taken.set).start()
        self.runtimes[0].close("done")
        self.assertTrue(taken.is_set())


class ContinuingTest(_TwoRanksTestCase):
    """Tests of ranks that go on without a lost rank, and therefore without a failed one."""

    continue_without_lost = True

    def test_a_rank_that_fails_is_told_of_and_what_is_missed_counted(self):
        self.begin_session()
        first, second = (runtime.membership for runtime in self.runtimes)
        second.num_rounds = 20
        with self.assertLogs(level="WARNING") as logs:
            self.runtimes[1].end_session(ValueError("bad input"))
            first.wait(lambda: [] if first.departure(1) else [1], operation="hear of it")
            first.num_rounds = 50
            self.runtimes[0].end_session(None)
        self.assertIsNone(first.failure)
        self.assertEqual(self.runtimes[0].counters()["ranks_left"], 1)
        self.assertLen(logs.output, 2)
        self.assertIn("rank 0: rank 1 has left: ValueError: bad input. The others", logs.output[0])
        self.assertIn("continue without its part of the data, 1/2.", logs.output[0])
        self.assertIn(
            "30 % of the data of this training were left out, because ranks have missed steps: rank 1 60 %.",
            logs.output[1],
        )

    def test_who_makes_as_many_steps_misses_none(self):
        self.begin_session()
        first, second = (runtime.membership for runtime in self.runtimes)
        first.num_rounds = second.num_rounds = 20
        with self.assertNoLogs(level="WARNING"):
            self.runtimes[1].end_session(None)
            first.wait(lambda: [] if first.departure(1) else [1], operation="hear of it")
            self.runtimes[0].end_session(None)
        self.assertEqual(first.missed_share(), {})


class OneWayTest(_TwoRanksTestCase):
    """Rank 1 reaches rank 0, but rank 0 does not reach rank 1. Rank 1's heartbeats must not hide that."""

    options = CommunicationOptions(timeout_seconds=2.0)

    def test_is_an_error_on_both_that_names_the_direction(self):
        # Packets to this port are dropped, because no process accepts connections, and the backlog is full.
        blocked = self.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        self.enter_context(socket.create_connection(blocked.getsockname()))
        first = self.runtimes[0]._transport
        host, port = blocked.getsockname()
        first._open_channel = lambda peer: grpc.insecure_channel(f"{host}:{port}")
        errors = self.on_both(lambda rank, runtime: error_of(runtime.begin_session))
        for rank, error in enumerate(errors):
            self.assertIsInstance(error, PeerLostError)
            self.assertRegex(str(error), f"rank {rank}: .* on rank {1 - rank} at 127.0.0.1:")
        self.assertRegex(str(errors[0]), r"it is heard, but rank 0 has not reached it for \d+\.\d s")
        self.assertRegex(str(errors[1]), r"it is heard, but has not reached rank 1 for \d+\.\d s")
        self.assertIn("Check firewalls", str(errors[0]))


class SessionTest(_TwoRanksTestCase):
    @parameterized.parameters(ValueError("bad input"), SystemExit(3), MemoryError())
    def test_who_begins_a_round_that_a_failed_rank_has_not_made_raises(self, error):
        self.begin_session()
        first, second = (runtime.membership for runtime in self.runtimes)
        second.begin_round(4)
        self.runtimes[1].end_session(error)
        first.wait(lambda: [] if first.departure(1) else [1], operation="hear of it")
        first.begin_round(4)
        name = type(error).__name__
        with self.assertRaisesRegex(PeerFailedError, f"rank 0: rank 1 has failed, .* without it: {name}") as raised:
            first.begin_round(5)
        self.runtimes[0].end_session(raised.exception)
        self.begin_session()  # The error belonged to that session only.
        first.begin_round(5)
        self.assertEqual(self.runtimes[0].counters()["ranks_left"], 0)

    @parameterized.parameters(KeyboardInterrupt(), SystemExit(), SystemExit(0))
    def test_a_rank_that_was_asked_to_end_leaves_the_other_running(self, error):
        self.begin_session()
        self.runtimes[1].end_session(error)
        self._check_goes_on(type(error).__name__)

    def _check_goes_on(self, reason):
        membership = self.runtimes[0].membership
        membership.wait(lambda: [] if membership.departure(1) else [1], operation="hear of it")
        self.assertStartsWith(membership.departure(1).reason, reason)
        self.assertIsNone(membership.failure)
        self.assertEqual(self.runtimes[0].counters()["ranks_left"], 1)

    def test_a_rank_without_a_step_keeps_its_place_among_the_collectives(self):
        """As in a `fit` that has nothing left to do after a restore, on one rank."""
        variable = [_variable([float(rank)]) for rank in range(2)]
        self.begin_session()
        self.runtimes[0].collectives.broadcast_initial_values([_variable([1.0])])  # Rank 0 does not wait.
        self.on_both(lambda rank, runtime: runtime.end_session(None))
        self.on_both(lambda rank, runtime: runtime.collectives.average([variable[rank]]))
        self.assertAllEqual(variable[0], [0.5])
        self.assertAllEqual(variable[1], [0.5])
        self.begin_session()
        self.on_both(
            lambda rank, runtime: runtime.collectives.broadcast_initial_values([variable[rank], _variable([rank])])
        )

    def test_a_broken_job_ends_on_all_ranks(self):
        self.begin_session()
        first, second = self.runtimes
        second.end_session(PeerLostError("rank 2 is gone"))
        with self.assertRaisesRegex(PeerLostError, "because rank 1 gave up: PeerLostError: rank 2 is gone"):
            first.membership.wait(lambda: [1], operation="receive")
        with self.assertRaises(PeerLostError):  # Raises again: the job cannot go on.
            first.begin_session()

    def test_sessions_number_the_same_steps_again(self):
        self.begin_session()
        _, groups = self.add_groups(lambda rank: [_variable([1.0, 2.0])])
        for session in (1, 2):
            self.assertEqual([exchanges[0].session for exchanges in self.exchanges], [session, session])
            for group in groups:
                group.submit([tf.constant([3.0, 4.0])])
                (result,), _num_skipped = group.collect([])
                group.end_step()
                self.assertAllEqual(result, [3.0, 4.0])
                self.assertEqual(int(group.step), 1)
            self.on_both(lambda rank, runtime: runtime.end_session(None))
            self.begin_session()
            self.assertEqual([int(group.step) for group in groups], [0, 0])

    def test_a_rank_that_joins_a_later_session_records_and_agrees_in_it(self):
        runtime = self.runtimes[0]
        runtime._recorder = mock.Mock()
        membership = runtime.membership
        self.enter_context(mock.patch.object(membership, "begin_session", lambda *_: setattr(membership, "session", 7)))
        with mock.patch.object(runtime.epoch_ends, "reset") as reset:
            runtime.begin_session()
        self.assertEqual(runtime._recorder.begin_session.mock_calls, [mock.call(1), mock.call(7)])
        self.assertEqual(reset.mock_calls, [mock.call(1), mock.call(7)])

    def test_nothing_begins_after_close(self):
        self.on_both(lambda rank, runtime: runtime.close("done"))
        with self.assertRaisesRegex(HopError, "was shut down"):
            self.runtimes[0].begin_session()

    def test_close_ends_all_threads(self):
        before = set(threading.enumerate())
        self.begin_session()
        self.add_groups(lambda rank: [_variable([1.0])])
        self.assertLen(_exchange_threads(), 2)
        self.on_both(lambda rank, runtime: runtime.close("done"))
        self.on_both(lambda rank, runtime: runtime.close("again"))
        new = [t.name for t in set(threading.enumerate()) - before if t.name.startswith("hop_tf")]
        self.assertEmpty(new)


class GroupTest(_TwoRanksTestCase):
    def setUp(self):
        super().setUp()
        self.begin_session()

    @parameterized.named_parameters(
        (
            "number",
            [([1.0], "v"), ([2.0], "w")],
            [([1.0], "v")],
            r"the number of variables. Rank 0 has 2, rank 1 has 1\.",
        ),
        (
            "shape",
            [([1.0], "v"), ([[1.0, 2.0]], "w")],
            [([1.0], "v"), ([1.0, 2.0], "w")],
            r"variable 1. Rank 0 has 'w:0' float32\[1, 2\], rank 1 has 'w:0' float32\[2\]\.",
        ),
        (
            "name",
            [([1.0], "v")],
            [([1.0], "u")],
            r"variable 0. Rank 0 has 'v:0' float32\[1\], rank 1 has 'u:0' float32\[1\]\.",
        ),
    )
    def test_other_variables_are_refused(self, variables_0, variables_1, message):
        specs = (variables_0, variables_1)
        with self.assertRaisesRegex(MismatchError, rf"rank 0 at \S+ and rank 1 disagree on {message}"):
            self.add_groups(lambda rank: [_variable(value, name) for value, name in specs[rank]])

    def test_another_dtype_is_refused(self):
        dtypes = (tf.float32, tf.float64)
        with self.assertRaisesRegex(MismatchError, r"Rank 0 has 'v:0' float32\[1\], rank 1 has 'v:0' float64\[1\]"):
            self.add_groups(lambda rank: [_variable([1.0], dtype=dtypes[rank])])

    def test_another_optimizer_is_refused(self):
        message = r"the optimizer. Rank 0 has Optimizer\(momentum=0.9\), rank 1 has Optimizer\(momentum=0.5\)"
        with self.assertRaisesRegex(MismatchError, message):
            self.add_groups(lambda rank: [_variable([1.0])], lambda rank: Optimizer(momentum=(0.9, 0.5)[rank]))

    @pytest.mark.slow
    def test_forgotten_groups_end_with_the_session(self):
        """As after each of five calls of `compile`. Threads must not pile up, and counts must not be lost."""
        for number in range(5):
            optimizers, groups = self.add_groups(lambda rank: [_variable([1.0])])
            for group in groups:
                group.submit([tf.constant([3.0])])
                group.collect([])
            del optimizers, groups, group
            gc.collect()
            self.on_both(lambda rank, runtime: runtime.end_session(None))
            self.begin_session()
            self.assertEmpty(_exchange_threads())
            self.assertEqual([runtime.counters()["echoes"] for runtime in self.runtimes], [number + 1] * 2)
            self.assertNotIn("latest", self.runtimes[0].counters())

    def test_counters_are_summed_over_groups_and_gauges_are_not(self):
        _optimizers, groups = self.add_groups(lambda rank: [_variable([1.0])])
        _others, _ = self.add_groups(lambda rank: [_variable([1.0])])
        for group in groups:
            for _ in range(2):
                group.submit([tf.constant([3.0])])
                group.collect([])
                group.end_step()
        for runtime in self.runtimes:
            counters = runtime.counters()
            self.assertEqual((counters["echoes"], counters["latest"]), (2, 2))

    def test_groups_in_use_stay(self):
        optimizers, _ = self.add_groups(lambda rank: [_variable([1.0])])
        self.on_both(lambda rank, runtime: runtime.end_session(None))
        self.begin_session()
        self.assertLen(_exchange_threads(), len(optimizers))


def _error_of(call):
    try:
        call()
    except HopError as error:
        return error
    return None


class CollectivesTest(_TwoRanksTestCase):
    def setUp(self):
        super().setUp()
        self.begin_session()

    def test_all_start_with_the_values_of_rank_0(self):
        variables = [[_variable([10.0 * rank + 1, 2.0]), _variable(rank + 5, "n")] for rank in range(2)]
        self.on_both(lambda rank, runtime: runtime.collectives.broadcast_initial_values(variables[rank]))
        for vector, scalar in variables:
            self.assertAllEqual(vector, [1.0, 2.0])
            self.assertAllEqual(scalar, 5)

    def test_each_variable_takes_them_once(self):
        variables = [[_variable([float(rank)])] for rank in range(2)]
        self.on_both(lambda rank, runtime: runtime.collectives.broadcast_initial_values(variables[rank]))
        variables[1][0].assign([7.0])
        new = [[_variable([rank + 3.0])] for rank in range(2)]
        self.on_both(lambda rank, runtime: runtime.collectives.broadcast_initial_values(variables[rank] + new[rank]))
        self.assertAllEqual(variables[1][0], [7.0])
        self.assertAllEqual(new[1][0], [3.0])

    def test_average(self):
        variables = [[_variable([[1.0, 2.0], [3.0, 4.0 + rank]]), _variable(rank, "n")] for rank in range(2)]
        self.on_both(lambda rank, runtime: runtime.collectives.average(variables[rank]))
        for rank, (matrix, integer) in enumerate(variables):
            self.assertAllEqual(matrix, [[1.0, 2.0], [3.0, 4.5]])
            self.assertAllEqual(integer, rank)

    @parameterized.parameters(((60, 54), 4.5), ((60, 53), 4.0), ((20, 60), 5.0), ((0, 0), 4.5))
    def test_who_is_left_behind_does_not_count(self, num_rounds, expected):
        for runtime, number in zip(self.runtimes, num_rounds, strict=True):
            runtime.membership.num_rounds = number
        variables = [[_variable([4.0 + rank])] for rank in range(2)]
        self.on_both(lambda rank, runtime: runtime.collectives.average(variables[rank]))
        for (variable,) in variables:
            self.assertAllEqual(variable, [expected])

    def test_average_of_different_models_ends_on_all_ranks(self):
        variables = [[_variable([1.0])], [_variable([1.0, 2.0])]]
        errors = self.on_both(lambda rank, runtime: _error_of(lambda: runtime.collectives.average(variables[rank])))
        self.assertIsInstance(errors[1], MismatchError)
        self.assertIsInstance(errors[0], PeerLostError)
        self.assertRegex(
            str(errors[0]), r"rank 1 gave up: MismatchError: rank 0 at \S+ and rank 1 disagree on variable 0"
        )

    def test_gather(self):
        values = self.on_both(lambda rank, runtime: runtime.collectives.gather({"rank": rank}))
        self.assertEqual(values, [[{"rank": 0}, {"rank": 1}], None])


def _compile_five_times():
    """Fits under five optimizers; returns the number of exchange threads during each fit."""
    strategy = hop_tf.HopStrategy(topology="ring")
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
    counts = []
    for _ in range(5):
        with strategy.scope():
            model.compile("adam", "mse")
        count = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: counts.append(len(_exchange_threads())))
        model.fit(np.ones((8, 3), "float32"), np.ones((8, 1), "float32"), batch_size=4, verbose=0, callbacks=[count])
    strategy.shutdown()
    return counts


class GivenUpTest(_TwoRanksTestCase):
    def test_a_rank_that_others_gave_up_does_not_end_the_job(self):
        """Rank 0 stands for a rank that hears rank 1's farewell before it hears that rank 1 was lost."""
        self.begin_session()
        lost = membership_pb2.Leave(rank=1, session=1, lost=True, final=True, reason="silent")
        first, second = (runtime.membership for runtime in self.runtimes)
        first.notify(1, "membership/leave", lost.SerializeToString())
        with self.assertRaisesRegex(PeerLostError, "continued without this rank: silent") as raised:
            second.wait_until(lambda: False, _DEADLINE_SECONDS)
        self.runtimes[1].end_session(raised.exception)
        self.assertTrue(first.wait_until(lambda: first.departure(1) is not None, _DEADLINE_SECONDS))
        first.check()


class RecompileTest(tf.test.TestCase):
    @pytest.mark.stress
    def test_threads_do_not_pile_up(self):
        """Only the optimizer of the last fit may remain until the garbage collector runs."""
        with MultiProcessRunner(_compile_five_times, num_workers=2) as runner:
            values = runner.join().raise_for_errors().values
        for counts in values:
            self.assertLen(counts, 5)
            self.assertLessEqual(max(counts), 2)


if __name__ == "__main__":
    tf.test.main()

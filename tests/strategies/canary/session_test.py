"""Table 3's methods between ranks that are threads."""

import gc
import threading
import time
import weakref
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import hop_tf
from hop_tf.errors import DeadlineExceededError, HopError, PeerLostError
from hop_tf.transport.grpc_transport import GrpcTransport
from hop_tf.transport.in_process import InProcessTransport
from hop_tf.transport.tcp_transport import TcpTransport
from support.transports import TransportTestMixin, wait_until

_SHORT = hop_tf.CommunicationOptions(progress_timeout_seconds=0.3)


class CanarySessionTest(TransportTestMixin, tf.test.TestCase, parameterized.TestCase):
    def _run(self, world_size, body, of_rank=lambda rank: {}, **arguments):
        """Calls `body(session)` on every rank; returns the results. `of_rank(rank)` are a rank's further arguments."""

        def run(transport):
            own = {**arguments, **of_rank(transport.rank)}
            with hop_tf.CanarySession(transport, world_size, **own) as session:
                return body(session)

        return self._run_on(self.start(world_size), run)

    def _run_on(self, transports, body):
        """Calls `body(transport)` for every rank on a thread of its own; returns the results."""
        world_size, results, errors = len(transports), {}, []

        def run(transport):
            try:
                results[transport.rank] = body(transport)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=run, args=(transport,)) for transport in transports]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        if errors:
            raise errors[0]
        return [results[rank] for rank in range(world_size)]

    @parameterized.parameters(("mesh", 3), ("bcube:2,2", 4), ("tree", 3))
    def test_all_reduce(self, network, world_size):
        def body(session):
            results = []
            for step in range(3):
                tensor = np.full((2, 3), session.rank + 10 * step, np.float32)
                results.append(session.all_reduce(tensor, iteration=step))
            return np.array(results), session.gei_matrix()

        for means, matrix in self._run(world_size, body, algorithm=network):
            expected = np.arange(3) * 10 + (world_size - 1) / 2
            self.assertAllClose(means, np.broadcast_to(expected[:, np.newaxis, np.newaxis], (3, 2, 3)))
            self.assertEqual(matrix, {2: (2**world_size - 1,)})  # Earlier rows are complete, and freed.

    def test_by_levels(self):
        """The paper's example, in a BCube(2, 2): of one cube, of the lowest level, and of both."""

        def body(session):
            tensor = np.array([float(session.rank)])
            own_cube = (1, session.rank % 2)
            return [
                session.all_reduce(tensor, cube=own_cube)[0],
                session.all_reduce(tensor, piece_level=1)[0],
                session.all_reduce(tensor, piece_level=2)[0],
            ]

        self.assertEqual(
            self._run(4, body, algorithm="bcube:2,2"), [[1, 0.5, 1.5], [2, 0.5, 1.5], [1, 2.5, 1.5], [2, 2.5, 1.5]]
        )

    def test_all_gather(self):
        def body(session):
            tensor = np.arange(7.0) * 10**session.rank
            return session.all_gather(tensor), session.all_gather(tensor, pieces=7)

        results = self._run(3, body)
        whole = np.arange(7.0) * 111
        for rank, (piece, pieces) in enumerate(results):
            self.assertAllEqual(piece, np.array_split(whole, 3)[rank])
            self.assertAllEqual(pieces, whole[rank::3])

    def test_all_gather_in_a_cube(self):
        def body(session):
            cube = (0, session.rank // 2)
            return session.all_gather(np.array([1.0, 10.0]) * (1 + session.rank), cube=cube).tolist()

        self.assertEqual(self._run(4, body, algorithm="bcube:2,2"), [[3.0], [30.0], [7.0], [70.0]])

    @parameterized.product(level=(0, 1), codec=(None, "int8", hop_tf.codecs.TopK(ratio=0.01, error_feedback=True)))
    def test_a_cube_talks_on_the_interface_of_its_level(self, level, codec):
        """Also if a codec sends all selected values to all ranks."""
        own_lane, other_lane = ((1, 2), (2, 1))[level]

        def body(transport):
            with hop_tf.CanarySession(transport, 4, algorithm="bcube:2,2", codec=codec) as session:
                cube = (level, (session.rank // 2, session.rank % 2)[level])
                session.all_reduce(np.ones(2))  # Uses both interfaces.
                sent = []
                for collective in (session.all_gather, session.all_reduce):
                    before = transport.bytes_by_lane()
                    collective(np.arange(3000, dtype=np.float32), cube=cube)
                    after = transport.bytes_by_lane()
                    sent.append({each: after[each] - before.get(each, 0) for each in (1, 2)})
                return sent

        for gathered, reduced in self._run_on(self.start(4), body):
            self.assertBetween(gathered[own_lane], 6000, 6100)
            self.assertGreater(reduced[own_lane], 100)
            self.assertEqual((gathered[other_lane], reduced[other_lane]), (0, 0))

    def test_cubes_call_as_often_as_they_like(self):
        """Only the ranks of a cube must agree on the calls in their cube, and all ranks on calls of all."""

        def body(session):
            index, tensor = session.rank // 2, np.full(4, 1.0 + session.rank)
            for _ in range(1 + 2 * index):
                session.all_gather(tensor, cube=(0, index))
                session.all_reduce(tensor, cube=(0, index))
            gathered = session.all_gather(tensor)
            return gathered[0], session.all_gather(tensor, cube=(0, index))[0], session.all_reduce(tensor)[0]

        results = self._run(4, body, algorithm="bcube:2,2", options=_SHORT)
        self.assertEqual(results, [(10, 3, 2.5), (10, 3, 2.5), (10, 7, 2.5), (10, 7, 2.5)])

    def test_all_gather_of_integers(self):
        for (sums,) in self._run(2, lambda session: [session.all_gather(np.full(4, 1 << 30, np.int32))]):
            self.assertEqual(sums.tolist(), [1 << 31, 1 << 31])

    @parameterized.parameters((np.int32, "int32"), (np.bool_, "bool"), (np.complex64, "complex64"), ("U3", "str96"))
    def test_all_reduce_refuses_what_has_no_mean(self, dtype, name):
        session = hop_tf.CanarySession(self.start(1)[0], 1)
        with self.assertRaisesRegex(ValueError, rf"`tensor` must have floating-.*astype.* Received: .* type {name}\."):
            session.all_reduce(np.zeros(3, dtype))

    @parameterized.parameters(np.float16, np.float64, tf.bfloat16.as_numpy_dtype)
    def test_all_reduce_of_other_floating_point_types(self, dtype):
        def body(session):
            return session.all_reduce(np.full(3, session.rank, dtype))

        for mean in self._run(2, body, codec="int8"):  # Int8 encodes float32 only.
            self.assertEqual(mean.dtype, dtype)
            self.assertEqual(mean.tolist(), [0.5] * 3)

    def test_all_reduce_encodes(self):
        """float32 values are encoded with the session's codec, and are as exact as the codec."""
        values = np.linspace(-1.0, 1.0, 4096, dtype=np.float32)

        def run(codec):
            def body(transport):
                with hop_tf.CanarySession(transport, 2, codec=codec) as session:
                    before = transport.bytes_by_lane()[1]
                    mean = session.all_reduce(values * (1 + session.rank))
                    return mean, transport.bytes_by_lane()[1] - before

            return self._run_on(self.start(2), body)

        (exact, exact_bytes), _ = run(None)
        (mean, num_bytes), (other, _) = run("int8")
        self.assertAllClose(exact, 1.5 * values)
        self.assertLess(num_bytes, 0.3 * exact_bytes)
        self.assertAllEqual(mean, other)
        self.assertNotAllClose(mean, exact, atol=1e-5)
        self.assertAllClose(mean, exact, atol=0.03)

    @parameterized.parameters(InProcessTransport, TcpTransport, GrpcTransport)
    def test_sessions_follow_each_other(self, member):
        """Sessions share a transport. A rank may begin its next one late, or early while others are in the last one."""
        self.member, both = member, threading.Barrier(2)

        def use(session, number):
            tensor = np.full(2, 10.0 * number + session.rank)
            return session.all_reduce(tensor)[0], session.all_gather(tensor)[0]

        def run(transport):
            means = []
            with hop_tf.CanarySession(transport, 2) as session:
                means.append(use(session, 0))
                if session.rank == 1:
                    both.wait(60)  # The other has left,
                    num_messages = transport.counters()["messages_received"]
                    both.wait(60)
                    wait_until(lambda: transport.counters()["messages_received"] > num_messages)  # and is back.
            if session.rank == 0:
                both.wait(60)
                both.wait(60)
            with hop_tf.CanarySession(transport, 2) as session:
                means.append(use(session, 1))
            if session.rank == 0:
                time.sleep(0.3)
            with hop_tf.CanarySession(transport, 2) as session:
                means.append(use(session, 2))
            return means

        for means in self._run_on(self.start(2), run):
            self.assertEqual(means, [(0.5, 1), (10.5, 21), (20.5, 41)])

    def test_sessions_beside_each_other(self):
        def run(transport):
            first, second = hop_tf.CanarySession(transport, 2), hop_tf.CanarySession(transport, 2, num_colayers=2)
            with first, second:
                tensor = np.full(3, float(first.rank))
                return second.all_reduce(tensor)[0], first.all_reduce(2 * tensor)[0]

        self.assertEqual(self._run_on(self.start(2), run), [(0.5, 1), (0.5, 1)])

    def test_a_session_after_one_that_has_failed(self):
        def run(transport):
            with (
                self.assertRaises(HopError),
                hop_tf.CanarySession(transport, 2, num_colayers=1 + transport.rank),
            ):
                pass
            with hop_tf.CanarySession(transport, 2) as session:
                return session.all_reduce(np.full(3, float(session.rank)))[0]

        self.assertEqual(self._run_on(self.start(2), run), [0.5, 0.5])

    def test_a_rank_that_does_not_come_in_time(self):
        """The late rank gets an error. Both ranks take part in the next session."""
        gave_up = threading.Event()

        def run(transport):
            if transport.rank == 0:
                with self.assertRaises(DeadlineExceededError), hop_tf.CanarySession(transport, 2, options=_SHORT):
                    pass
                gave_up.set()
            else:
                gave_up.wait(60)
                with (
                    self.assertRaisesRegex(PeerLostError, "rank 0 gave up: DeadlineExceededError"),
                    hop_tf.CanarySession(transport, 2),
                ):
                    pass
            with hop_tf.CanarySession(transport, 2) as session:
                return session.all_reduce(np.full(3, float(session.rank)))[0]

        self.assertEqual(self._run_on(self.start(2), run), [0.5, 0.5])

    def test_nothing_is_left_of_a_session_on_its_transport(self):
        session = hop_tf.CanarySession(self.start(1)[0], 1)
        with session:
            session.all_reduce(np.zeros(3))
        held = weakref.ref(session)
        del session
        gc.collect()
        self.assertIsNone(held())

    def test_is_not_entered_twice(self):
        session = hop_tf.CanarySession(self.start(1)[0], 1)
        with session, self.assertRaisesRegex(HopError, "can be entered only once. Create another session."), session:
            pass
        with (
            self.assertRaisesRegex(HopError, "a session can be entered only once. Create another session."),
            session,
        ):
            pass

    @parameterized.parameters(1, 2)
    def test_collectives_take_a_session_that_runs(self, world_size):
        """Before and after the session a call raises an error at once."""

        def run(transport):
            session = hop_tf.CanarySession(transport, world_size)
            self._check_refuses_collectives(session)
            with session:
                session.all_reduce(np.zeros(3))
            self._check_refuses_collectives(session)

        self._run_on(self.start(world_size), run)

    def _check_refuses_collectives(self, session):
        for collective in (session.all_reduce, session.all_gather):
            with self.assertRaisesRegex(HopError, "call collectives of a session within"):
                collective(np.zeros(3))

    @pytest.mark.slow
    def test_who_ends_early_is_said_to_have(self):
        """Other ranks get the error if they wait already, and if they begin to wait later."""
        for begins_first, message in (
            (True, "rank 0 .*it has ended: it has ended the session"),
            (False, r"rank 1: ranks \[0\] have ended the session, and take part in no"),
        ):

            def body(session, begins_first=begins_first):
                membership = session._membership
                if session.rank == 1:
                    if not begins_first:
                        wait_until(lambda: membership.departure(0))
                    session.all_gather(np.zeros(3))
                elif begins_first:
                    wait_until(lambda: session._calls_there[1])

            with self.assertRaisesRegex(PeerLostError, message):
                self._run(2, body)

    @parameterized.parameters(
        ({"options": 3}, "`options` must be a hop_tf.CommunicationOptions or None. Received: options=3."),
        ({"monitor": 3}, "`monitor` must be a hop_tf.membership.monitor.Monitor or None. Received: monitor=3."),
    )
    def test_arguments_of_another_type(self, arguments, message):
        with self.assertRaisesRegex(TypeError, message):
            hop_tf.CanarySession(self.start(1)[0], 1, **arguments)

    @parameterized.parameters(
        (lambda session: session.begin_iteration("a"), "`iteration` must be an integer of at least 0.*'a'"),
        (lambda session: session.begin_iteration(-3), "`iteration` must be"),
        (lambda session: session.gei_row_vector(-1), "`iteration` must be"),
        (lambda session: session.calc_staleness("x"), "`iteration` must be"),
        (lambda session: session.calc_proportion((1,), rank=2), "`rank` must be .* at most 1. Received: rank=2."),
        (lambda session: session.check_staleness("x"), "`staleness` must be an integer. Received: staleness='x'"),
        (lambda session: session.check_staleness(1, -1), "`threshold` must be"),
        (lambda session: session.check_proportion(-1), "`proportion` must be"),
        (lambda session: session.check_proportion(1, "x"), "`threshold` must be"),
    )
    def test_arguments_out_of_range(self, call, message):
        with self.assertRaisesRegex(ValueError, message):
            call(hop_tf.CanarySession(self.start(2)[0], 2))

    def test_the_end_waits_until_what_was_sent_has_arrived(self):
        """Closing the transport afterwards loses no message that others wait for."""
        flushed = []
        original = InProcessTransport.flush

        def flush(transport, peer, timeout_seconds):
            is_done = original(transport, peer, timeout_seconds)
            flushed.append((transport.rank, peer, is_done))
            return is_done

        with mock.patch.object(InProcessTransport, "flush", flush):
            self._run(2, lambda session: session.all_reduce(np.zeros(3)))
        self.assertContainsSubset([(0, 1, True), (1, 0, True)], flushed)

    def test_consistency_controller(self):
        def body(session):
            session.begin_iteration(20)
            session.all_reduce(np.zeros(1), iteration=3, colayer=1)
            row = session.gei_row_vector(3)
            staleness, proportion = session.calc_staleness(3), session.calc_proportion(row)
            checks = session.check_staleness(staleness), session.check_proportion(proportion)
            own = session.check_staleness(staleness, 17), session.check_proportion(proportion, 1)
            return row, staleness, proportion, checks, own

        for result in self._run(2, body, num_colayers=2):
            self.assertEqual(result, ((0, 0b11), 17, 1, (False, False), (True, True)))

    def test_the_index_notes_who_took_part(self):
        """By default, `calc_proportion` is about this rank."""

        def body(session):
            session.all_reduce(np.zeros(1), cube=(1, session.rank % 2), iteration=0)
            session.all_reduce(np.zeros(1), piece_level=1, iteration=1)
            rows = [session.gei_row_vector(iteration) for iteration in range(2)]
            proportions = [session.calc_proportion((0b0100,)), session.calc_proportion((0b0100,), 2)]
            return rows, proportions

        results = self._run(4, body, algorithm="bcube:2,2")
        self.assertEqual(
            [rows for rows, _ in results],
            [[(0b0101,), (0b0011,)], [(0b1010,), (0b0011,)], [(0b0101,), (0b1100,)], [(0b1010,), (0b1100,)]],
        )
        self.assertEqual([proportions for _, proportions in results], [[0, 1], [0, 1], [1, 1], [0, 1]])

    @parameterized.parameters(
        ({"cube": (0, 1)}, r"`cube` must be \(level, index\) of one that rank 0 is in. Received: cube=\(0, 1\)."),
        ({"cube": (2, 0)}, "`cube` must be .* Received: cube="),
        ({"cube": (0,)}, r"`cube` must be .* Received: cube=\(0,\)."),
        ({"cube": 3}, "`cube` must be .* Received: cube=3."),
        ({"cube": ("a", 0)}, "`cube` must be .* Received: cube="),
        ({"cube": (0, 0), "piece_level": 2}, r"give only one of them. Received: cube=\(0, 0\), piece_level=2."),
        ({"piece_level": 3}, "`piece_level` must be at most 2. Received: piece_level=3."),
        ({"iteration": 0, "colayer": 1}, "`colayer` must be an integer of at least 0 and at most 0. .* colayer=1."),
        ({"iteration": 0, "colayer": -1}, "`colayer` must be an integer of at least 0"),
        ({"iteration": -1}, "`iteration` must be an integer of at least 0. Received: iteration=-1."),
    )
    def test_refuses(self, arguments, message):
        session = hop_tf.CanarySession(self.start(4)[0], 4, algorithm="bcube:2,2")
        with self.assertRaisesRegex(ValueError, message):
            session.all_reduce(np.zeros(1), **arguments)

    @parameterized.parameters(("algorithm", "mesh", "tree:2"), ("num_colayers", 1, 2), ("codec", "int8", "sketch"))
    def test_refuses_other_settings_of_a_rank(self, name, *values):
        """Otherwise ranks would wait for messages that never come, or misread them."""
        with self.assertRaisesRegex(HopError, f"rank [01]: rank [01] has other settings: .*{name}=.* there, "):
            self._run(2, lambda session: None, lambda rank: {name: values[rank]})

    @parameterized.named_parameters(
        ("shape", lambda session: session.all_reduce(np.zeros(3 + session.rank)), r"all_reduce\(float64\[4\], mesh, "),
        (
            "dtype",
            lambda session: session.all_reduce(np.zeros(3, (np.float64, np.float32)[session.rank])),
            r"all_reduce\(float32\[3\], mesh, ranks=\(0, 1\)\)",
        ),
        (
            "collective",
            lambda session: (session.all_reduce, session.all_gather)[session.rank](np.zeros(3)),
            r"all_gather\(float64\[3\], pieces=2, ranks=\(0, 1\)\)",
        ),
    )
    def test_refuses_another_call_of_a_rank(self, call, of_rank_1):
        """Also after calls that were the same on all ranks."""
        errors = []

        def body(session):
            for _ in range(2):
                session.all_reduce(np.zeros(3))
            try:
                call(session)
            except HopError as error:
                errors.append(str(error))
                raise

        with self.assertRaises(HopError):
            self._run(2, body)
        self.assertLen(errors, 2)
        expected = f"rank 0: rank 1 has called {of_rank_1}.*, but this rank has called all_reduce|rank 1: rank 0 has"
        for error in errors:
            self.assertRegex(error, expected)

    @parameterized.named_parameters(
        ("gather", lambda session: session.all_gather(np.ones(*((8, np.float32), (4, np.float64))[session.rank]))),
        ("reduce", lambda session: session.all_reduce(np.ones(((4,), (2, 2))[session.rank]))),
    )
    def test_returns_no_values_of_another_call(self, call):
        """Even if values have the expected size, and arrive before the description of the other rank's call."""
        on_call = hop_tf.CanarySession._on_call

        def take_its_time(session, message):
            time.sleep(0.3)
            on_call(session, message)

        results = []
        with (
            mock.patch.object(hop_tf.CanarySession, "_on_call", take_its_time),
            self.assertRaisesRegex(HopError, r"rank \d: rank \d has called all_.*, but this rank has called all_"),
        ):
            self._run(2, lambda session: results.append(call(session)))
        self.assertEmpty(results)

    def test_refuses_a_threshold_out_of_reach(self):
        with self.assertRaisesRegex(ValueError, "`min_colayers` must be at most.* min_colayers=3, num_colayers=2."):
            hop_tf.CanarySession(self.start(1)[0], 1, num_colayers=2, min_colayers=3)


if __name__ == "__main__":
    tf.test.main()

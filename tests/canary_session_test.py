"""Table 3's methods between ranks that are threads."""

import threading
import time
from unittest import mock

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import hop_tf
from hop_tf.errors import HopError
from hop_tf.testing.transports import TransportTestMixin
from hop_tf.transport import InProcessTransport


class CanarySessionTest(TransportTestMixin, tf.test.TestCase, parameterized.TestCase):
    def _run(self, world_size, body, of_rank=lambda rank: {}, **arguments):
        """What `body(session)` returns on every rank; `of_rank(rank)` are further arguments of a rank."""
        transports, results, errors = self.start(world_size), {}, []

        def run(transport):
            try:
                own = {**arguments, **of_rank(transport.rank)}
                with hop_tf.CanarySession(transport, world_size, **own) as session:
                    results[transport.rank] = body(session)
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

        for means, matrix in self._run(world_size, body, network=network):
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
            self._run(4, body, network="bcube:2,2"), [[1, 0.5, 1.5], [2, 0.5, 1.5], [1, 2.5, 1.5], [2, 2.5, 1.5]]
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

        self.assertEqual(self._run(4, body, network="bcube:2,2"), [[3.0], [30.0], [7.0], [70.0]])

    def test_the_end_waits_until_what_was_sent_has_arrived(self):
        """Whoever closes the transport behind it loses nothing that others wait for."""
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

    @parameterized.parameters(
        ({"cube": (0, 1)}, "`cube` must be one that rank 0 is in. Received: cube=\\(0, 1\\)."),
        ({"cube": (2, 0)}, "`cube` must be one that rank 0 is in."),
        ({"cube": (0,)}, "`cube` must be one that rank 0 is in. Received: cube=\\(0,\\)."),
        ({"piece_level": 3}, "`piece_level` must be at most 2. Received: piece_level=3."),
        ({"iteration": 0, "colayer": 1}, "`colayer` must be an integer of at least 0 and at most 0. .* colayer=1."),
        ({"iteration": 0, "colayer": -1}, "`colayer` must be an integer of at least 0"),
        ({"iteration": -1}, "`iteration` must be an integer of at least 0. Received: iteration=-1."),
    )
    def test_refuses(self, arguments, message):
        session = hop_tf.CanarySession(self.start(4)[0], 4, network="bcube:2,2")
        with self.assertRaisesRegex(ValueError, message):
            session.all_reduce(np.zeros(1), **arguments)

    @parameterized.parameters(("network", "mesh", "tree:2"), ("num_colayers", 1, 2), ("codec", "int8", "sketch"))
    def test_refuses_other_settings_of_a_rank(self, name, *values):
        """Ranks would wait for each other's messages, or read them wrongly."""
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
        """Also after calls that were alike."""
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
        expected = f"rank 0: rank 1 has called {of_rank_1}.*, where this rank has called all_reduce|rank 1: rank 0 has"
        for error in errors:
            self.assertRegex(error, expected)

    @parameterized.named_parameters(
        ("gather", lambda session: session.all_gather(np.ones(*((8, np.float32), (4, np.float64))[session.rank]))),
        ("reduce", lambda session: session.all_reduce(np.ones(((4,), (2, 2))[session.rank]))),
    )
    def test_returns_no_values_of_another_call(self, call):
        """Though as many bytes come as are awaited, and before the word of what they are for."""
        on_call = hop_tf.CanarySession._on_call

        def take_its_time(session, message):
            time.sleep(0.3)
            on_call(session, message)

        results = []
        with (
            mock.patch.object(hop_tf.CanarySession, "_on_call", take_its_time),
            self.assertRaisesRegex(HopError, r"rank \d: rank \d has called all_.*, where this rank has called all_"),
        ):
            self._run(2, lambda session: results.append(call(session)))
        self.assertEmpty(results)

    def test_refuses_a_threshold_out_of_reach(self):
        with self.assertRaisesRegex(ValueError, "`min_colayers` must be at most.* min_colayers=3, num_colayers=2."):
            hop_tf.CanarySession(self.start(1)[0], 1, num_colayers=2, min_colayers=3)


if __name__ == "__main__":
    tf.test.main()

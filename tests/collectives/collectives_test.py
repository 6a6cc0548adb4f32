"""Tree collectives, on a virtual clock."""

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from hop_tf.collectives import TreeCollectives
from hop_tf.errors import DeadlineExceededError, PeerLostError, ProtocolError
from hop_tf.membership.monitor import ThreadMonitor
from hop_tf.membership.session import Membership, tree_neighbors
from hop_tf.options import CommunicationOptions
from hop_tf.tools.simulate import VirtualCluster
from hop_tf.transport.grpc_transport import GrpcTransport
from support.transports import TransportTestMixin


def _run(world_size, operation):
    """Runs `operation(collectives, rank)` on all ranks, entered at different times; returns the results by rank."""
    rng = np.random.default_rng(world_size)
    cluster = VirtualCluster(world_size, lambda sender, receiver, num_bytes: rng.random())
    results = {}

    def body(rank):
        cluster.memberships[rank].begin_session()
        cluster.scheduler.sleep(rng.random())
        results[rank] = operation(TreeCollectives(cluster.memberships[rank]), rank)

    cluster.run(body)
    return [results[rank] for rank in range(world_size)]


class TreeCollectivesTest(tf.test.TestCase, parameterized.TestCase):
    def test_tree_reaches_everyone_once(self):
        parents = {child: rank for rank in range(20) for child in tree_neighbors(rank, 20)[1]}
        self.assertCountEqual(parents, range(1, 20))
        self.assertTrue(all(tree_neighbors(child, 20)[0] == parent for child, parent in parents.items()))

    @parameterized.parameters(1, 2, 3, 5, 8)
    def test_broadcast(self, world_size):
        def operation(collectives, rank):
            return collectives.broadcast("b", [np.full(3, rank + 7, np.int32), np.full(2, 0.5)])

        results = _run(world_size, operation)
        expected = np.full(3, 7, np.int32).tobytes() + np.full(2, 0.5).tobytes()
        self.assertIsNone(results[0])
        self.assertTrue(all(result.tobytes() == expected for result in results[1:]))

    @parameterized.product(world_size=[1, 2, 3, 5, 8], dtype=["float32", "float64", "float16"])
    def test_mean(self, world_size, dtype):
        values = np.random.default_rng(0).normal(size=(world_size, 4, 3))

        def operation(collectives, rank):
            return collectives.mean("m", [values[rank].astype(dtype), np.full((), rank, "float32")])

        results = _run(world_size, operation)
        for matrix, scalar in results:
            self.assertEqual((matrix.dtype, matrix.shape, scalar.shape), (np.dtype(dtype), (4, 3), ()))
            self.assertAllClose(matrix, values.mean(axis=0), atol=1e-3 if dtype == "float16" else 1e-6)
            self.assertAllEqual(matrix, results[0][0])
            self.assertAllClose(scalar, (world_size - 1) / 2)

    @parameterized.parameters((3, (0, 2)), (5, (4,)), (2, (1,)))
    def test_mean_of_those_that_count(self, world_size, counted):
        def operation(collectives, rank):
            value = np.full(2, rank if rank in counted else np.nan, np.float32)
            return collectives.mean("m", [value], rank in counted)

        for (mean,) in _run(world_size, operation):
            self.assertAllEqual(mean, [np.mean(counted)] * 2)

    @parameterized.product(world_size=[3, 5, 7, 11], dtype=["float16", "float32", "float64"])
    def test_what_is_equal_stays_equal_to_the_bit(self, world_size, dtype):
        values = np.random.default_rng(world_size).normal(size=(world_size, 1000))
        values[:, :900] = values[0, :900]
        values = values.astype(dtype)
        for (mean,) in _run(world_size, lambda collectives, rank: collectives.mean("m", [values[rank]])):
            self.assertAllEqual(mean[:900], values[0, :900])
            self.assertAllClose(mean, values.astype("float64").mean(axis=0), atol=1e-3 if dtype == "float16" else 1e-6)

    def test_gather(self):
        results = _run(6, lambda collectives, rank: collectives.gather("g", {"rank": rank}))
        self.assertEqual(results[0], [{"rank": rank} for rank in range(6)])
        self.assertEqual(results[1:], [None] * 5)

    @parameterized.parameters(1, 2, 6)
    def test_all_gather(self, world_size):
        data = [bytes(range(rank)) for rank in range(world_size)]
        for number in (None, 0):
            results = _run(world_size, lambda collectives, rank, it=number: collectives.all_gather("a", data[rank], it))
            self.assertEqual(results, [data] * world_size)

    def test_arrays_of_another_size_are_an_error(self):
        with self.assertRaisesRegex(ProtocolError, "expected .* bytes. Received: "):
            _run(2, lambda collectives, rank: collectives.mean("m", [np.zeros(3 + rank, np.float32)]))

    def test_rank_0_may_leave_before_it_sends(self):
        cluster = VirtualCluster(2)

        def body(rank):
            membership = cluster.memberships[rank]
            membership.begin_session()
            if rank == 0:
                membership.leave(sent_rounds={}, reason="ValueError: bad data")
            else:
                TreeCollectives(membership).broadcast("b", [], number=0)

        with self.assertRaisesRegex(PeerLostError, "rank 0 left before 'broadcast/b/1.0': ValueError: bad data"):
            cluster.run(body)

    def test_what_was_sent_may_come_after_the_news_that_its_sender_has_left(self):
        cluster = VirtualCluster(3, lambda sender, receiver, num_bytes: 2.0 if num_bytes > 1000 else 1.0)
        values = np.arange(1000, dtype=np.float32)
        received = {}

        def body(rank):
            membership = cluster.memberships[rank]
            membership.begin_session()
            collectives = TreeCollectives(membership)
            for number in range(2 if rank else 1):
                try:
                    received[rank, number] = collectives.broadcast("b", [values], number)
                except PeerLostError as error:
                    received[rank, number] = str(error)
            if rank == 0:
                membership.leave(sent_rounds=collectives.sent_rounds, reason="")

        cluster.run(body)
        for rank in (1, 2):
            self.assertAllEqual(received[rank, 0].view(np.float32), values)
            self.assertIn("rank 0 left before 'broadcast/b/1.1'", received[rank, 1])


class AbsenceTest(TransportTestMixin, tf.test.TestCase):
    member = GrpcTransport

    def test_a_rank_that_never_appears_is_an_error(self):
        """Also where nothing was sent to it, so that nothing has connected this rank with it."""
        options = CommunicationOptions(timeout_seconds=1, progress_timeout_seconds=30)
        transport = self.start_at(0, self.addresses(2), options=options)
        membership = Membership(transport=transport, monitor=ThreadMonitor(), options=options, world_size=2, peers=[1])
        with self.assertRaisesRegex(DeadlineExceededError, "receive 'gather/g' .*rank 1 .*it never appeared"):
            TreeCollectives(membership).gather("g", None)


if __name__ == "__main__":
    tf.test.main()

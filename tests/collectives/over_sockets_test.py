"""All-reduces between threads that talk over sockets, as processes do."""

import concurrent.futures
import itertools

import numpy as np
import pytest
from absl.testing import absltest, parameterized

from hop_tf import codecs
from hop_tf.collectives import get_algorithm
from hop_tf.membership.monitor import ThreadMonitor
from hop_tf.membership.session import Membership
from hop_tf.options import CommunicationOptions
from hop_tf.tensors.buffers import BufferPool
from hop_tf.transport.tcp_transport import TcpTransport
from support.transports import TransportTestMixin

_NUM_RANKS = 4
_OPTIONS = CommunicationOptions()


class OverSocketsTest(TransportTestMixin, parameterized.TestCase):
    member = TcpTransport

    @parameterized.parameters(
        *itertools.product(("mesh", "ring", "bcube:2,2", "tree"), ((5,), (200_000, 3), (0, 70), (3_000_000,)))
    )
    @pytest.mark.slow(after=1)
    def test_means(self, algorithm, sizes):
        """Of one vector or two; of one chunk, of several, and of nothing; without shared memory in half of them."""
        transports = self.start(_NUM_RANKS, shares_memory=len(sizes) == 1)
        rng = np.random.default_rng(0)
        num_steps = 4 if sum(sizes) > 1_000_000 else 12
        vectors = [rng.standard_normal((_NUM_RANKS, num_steps, size), np.float32) for size in sizes]

        def run(transport):
            rank = transport.rank
            peers = [peer for peer in range(_NUM_RANKS) if peer != rank]
            membership = Membership(
                transport=transport, monitor=ThreadMonitor(), options=_OPTIONS, world_size=_NUM_RANKS, peers=peers
            )
            membership.begin_session()
            all_reduce = get_algorithm(algorithm)(
                membership,
                "means",
                sizes=sizes,
                codecs=[codecs.Identity()] * len(sizes),
                pool=BufferPool(),
            )
            steps = ([vector[rank, step] for vector in vectors] for step in range(num_steps))
            means = [all_reduce.mean(step, values, lambda *_: True) for step, values in enumerate(steps)]
            for peer in peers:
                self.assertTrue(transport.flush(peer, 60))
            all_reduce.close()
            return means

        with concurrent.futures.ThreadPoolExecutor(_NUM_RANKS) as pool:
            of_ranks = list(pool.map(run, transports))
        for step, index in itertools.product(range(num_steps), range(len(sizes))):
            means = [of_rank[step][index] for of_rank in of_ranks]
            np.testing.assert_allclose(means[0], vectors[index][:, step].mean(axis=0), rtol=1e-4, atol=1e-6)
            for other in means[1:]:
                np.testing.assert_array_equal(other, means[0])


if __name__ == "__main__":
    absltest.main()

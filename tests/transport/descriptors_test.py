"""The limit on descriptors, which connections to many peers may pass."""

import resource
from unittest import mock

from absl.testing import absltest, parameterized

from hop_tf.transport import descriptors
from hop_tf.transport.grpc_transport import GrpcTransport

_NO_LIMIT = resource.RLIM_INFINITY


class DescriptorsTest(parameterized.TestCase):
    def _limit(self, soft, hard):
        """Makes this the limit. Returns the mock of the call that changes it."""
        limits = [(soft, hard)]
        self.enterContext(mock.patch.object(resource, "getrlimit", lambda kind: limits[-1]))
        return self.enterContext(
            mock.patch.object(resource, "setrlimit", side_effect=lambda _, new: limits.append(new))
        )

    @parameterized.parameters(
        (7, 1024, 4096, None),
        (200, 1024, 4096, 2200),
        (1000, 1024, 4096, 4096),
        (1000, 1024, _NO_LIMIT, 10200),
        (1000, 4096, 4096, None),
        (1000, _NO_LIMIT, _NO_LIMIT, None),
    )
    def test_the_limit_rises_as_far_as_needed_and_allowed(self, num_peers, soft, hard, expected):
        change = self._limit(soft, hard)
        descriptors.raise_limit(num_peers)
        self.assertEqual([call.args[1] for call in change.mock_calls], [] if expected is None else [(expected, hard)])

    def test_a_limit_that_the_system_keeps_is_no_error(self):
        self._limit(1024, 4096).side_effect = ValueError("not allowed to raise maximum limit")
        descriptors.raise_limit(1000)
        self.assertEqual(descriptors.limit(), 1024)

    def test_a_rank_with_too_many_peers_warns_once(self):
        self._limit(255, 255)
        transport = GrpcTransport(0, [f"127.0.0.1:{port}" for port in range(20000, 20100)], identity={})
        self.enterContext(mock.patch.object(transport, "_add_link"))
        with self.assertLogs("absl", "WARNING") as logs:
            for peer in range(1, 10):
                transport.connect(peer)
        transport.close()
        (line,) = logs.output
        self.assertIn("connections to 6 processes take about 260, and its limit is 255", line)
        self.assertIn("`ulimit -n 1190`", line)


if __name__ == "__main__":
    absltest.main()

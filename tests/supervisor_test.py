"""`hop_tf supervise`: what it reads of ranks, and how it shows that."""

import contextlib
import io
import json
import subprocess
import sys
import time
from unittest import mock

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from hop_tf import supervisor
from hop_tf.options import CommunicationOptions
from hop_tf.testing.transports import TransportTestMixin
from hop_tf.transport import GrpcTransport, TcpTransport


def _run(*argv):
    """The exit code, and what was printed."""
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        code = supervisor.main(argv)
    return code, out.getvalue(), errors.getvalue()


class SupervisorTest(TransportTestMixin, tf.test.TestCase, parameterized.TestCase):
    member = TcpTransport

    def _serve(self, num_ranks=2, options=None):
        addresses = self.addresses(num_ranks)
        for rank in range(num_ranks):
            transport = self.start_at(rank, addresses, options=options or CommunicationOptions())
            counters = {"steps": 10 + rank, "iteration": np.int64(12), "wait_seconds": 1.25, "bytes_received": 2e6}
            lanes = {"bytes_sent_on_lane_0": 5, "bytes_sent_on_lane_1": 1e6, "bytes_sent_on_lane_2": 3e6}
            transport.serve_reports(lambda counters=counters, lanes=lanes: {**counters, **lanes})
        return addresses

    @parameterized.parameters(TcpTransport, GrpcTransport)
    def test_json(self, member):
        self.member = member
        addresses = self._serve()
        code, out, _ = _run(*addresses, "--json", "--count=2", "--interval=0.01")
        self.assertEqual(code, 0)
        for line in out.splitlines():
            ranks = json.loads(line)["ranks"]
            self.assertEqual([each["rank"] for each in ranks], [0, 1])
            self.assertEqual([each["steps"] for each in ranks], [10, 11])
            self.assertEqual(ranks[0]["bytes_sent_on_lane_2"], 3e6)
        self.assertLen(out.splitlines(), 2)

    def test_table(self):
        addresses = self._serve()
        code, out, _ = _run(*addresses, "--count=1")
        self.assertEqual(code, 0)
        for text in ("iteration", "overtime", "1.0 3.0", "1.2 s", "11"):
            self.assertIn(text, out)

    def test_plain_table(self):
        with mock.patch.dict("sys.modules", {"rich.console": None}):
            code, out, _ = _run(*self._serve(), "--count=1")
        self.assertEqual(code, 0)
        self.assertIn("1.0 3.0 MB", out)
        self.assertLen({len(line) for line in out.splitlines()}, 1)

    def test_addresses_of_the_cluster(self):
        config = json.dumps({"cluster": {"worker": list(self._serve())}})
        with mock.patch.dict("os.environ", {"TF_CONFIG": config}):
            _, out, _ = _run("--json", "--count=1")
        self.assertLen(json.loads(out)["ranks"], 2)

    def test_a_rank_that_does_not_answer(self):
        served, missing = self._serve(1), self.addresses(1)
        _, out, _ = _run(*served, *missing, "--json", "--count=1")
        ranks = json.loads(out)["ranks"]
        self.assertNotIn("problem", ranks[0])
        self.assertIn("unavailable", ranks[1]["problem"])

    def test_nobody_answers(self):
        (address,) = self.addresses(1)
        code, _, errors = _run(address, "--timeout=0.1", "--interval=0.05")
        self.assertEqual(code, 1)
        self.assertIn(f"no rank answers. {address}: unavailable", errors)

    @mock.patch.object(supervisor, "_END_SECONDS", 0.3)
    def test_ends_with_the_job(self):
        """Not at the first look that nobody answers, though it takes longer by itself than silence may last."""
        addresses = self.addresses(1)
        transport = self.start_at(0, addresses)
        reports = iter([{"steps": 1}, None, {"steps": 2}])

        def report():
            values = next(reports, None)
            if values is None:
                time.sleep(0.4)
                raise RuntimeError("the test's rank is busy, or has ended")
            return values

        transport.serve_reports(report)
        code, out, _ = _run(*addresses, "--json", "--interval=0.01")
        self.assertEqual(code, 0)
        self.assertEqual([json.loads(line)["ranks"][0]["steps"] for line in out.splitlines()], [1, 2])

    def test_ends_with_who_reads_it(self):
        command = [sys.executable, "-m", "hop_tf", "supervise", *self._serve(), "--json", "--interval=0.01"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            self.assertLen(json.loads(process.stdout.readline())["ranks"], 2)
            process.stdout.close()
            self.assertNotIn(b"Traceback", process.stderr.read())
        self.assertEqual(process.returncode, 0)

    def test_token(self):
        addresses = self._serve(1, CommunicationOptions(cluster_token="secret"))
        for argv in ((), ("--token=guess",)):
            code, _, errors = _run(*addresses, *argv, "--timeout=0.1", "--interval=0.05")
            self.assertEqual(code, 1)
            self.assertIn("unauthenticated: wrong cluster token", errors)
        self.assertEqual(_run(*addresses, "--token=secret", "--count=1")[0], 0)
        with mock.patch.dict("os.environ", {"HOP_TF_CLUSTER_TOKEN": "secret"}):
            self.assertEqual(_run(*addresses, "--count=1")[0], 0)

    def test_arguments(self):
        with mock.patch.dict("os.environ", {"TF_CONFIG": "{}"}), self.assertRaises(SystemExit):
            _run()
        with self.assertRaises(SystemExit):
            _run("127.0.0.1:1", "--interval=0")

    @parameterized.parameters(
        (["127.0.0.1"], "", "'127.0.0.1'"),
        (["127.0.0.1:99999"], "", "ports from 1 to 65535. Received: '127.0.0.1:99999'"),
        (["127.0.0.1:1", "--interval=nan"], "", "--interval and --timeout must be positive"),
        (["127.0.0.1:1", "--tls_private_key=key"], "", "must be given together"),
        ([], "", "name the ranks' addresses"),
        ([], "{nonsense", "TF_CONFIG must be JSON with the lists of a cluster's tasks. Received: {nonsense"),
        ([], "[]", "TF_CONFIG must be JSON"),
        ([], '{"cluster": {"worker": "a:1"}}', "Addresses must be 'host:port'"),
    )
    def test_says_what_is_wrong(self, argv, config, message):
        """With argparse's exit code, and at once: nobody is asked."""
        errors = io.StringIO()
        self.enter_context(mock.patch.dict("os.environ", {"TF_CONFIG": config}))
        with contextlib.redirect_stderr(errors), self.assertRaises(SystemExit) as exit_code:
            supervisor.main(argv)
        self.assertEqual(exit_code.exception.code, 2)
        self.assertIn(message, errors.getvalue())


if __name__ == "__main__":
    tf.test.main()

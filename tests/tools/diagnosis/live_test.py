"""Tests of `diagnose` with the reports of a running job's ranks."""

import collections
import contextlib
import io
import itertools
import json
import threading

import tensorflow as tf
from absl.testing import absltest, parameterized

from hop_tf.options import CommunicationOptions
from hop_tf.tools.commands import diagnose as command
from hop_tf.tools.diagnosis import diagnose_reports
from hop_tf.transport.tcp_transport import TcpTransport
from support.transports import TransportTestMixin

_SECONDS = 20.0


def _reports(waited, usual=(0.1, 0.1, 0.1), **others):
    """Two reports of each rank, between which it has made 100 steps of 200 ms, and has waited for that long."""
    before = [{"rank": rank, "steps": 10, "wait_seconds": 5.0, "bytes_sent": 1e6} for rank in range(len(waited))]
    after = [
        {
            "rank": rank,
            "steps": 110,
            "wait_seconds": 5.0 + seconds,
            "bytes_sent": 1e6 + 25e6,
            "compute_seconds": usual[rank],
            **others,
        }
        for rank, seconds in enumerate(waited)
    ]
    return before, after


class LiveTest(parameterized.TestCase):
    def diagnose(self, before, after, awaited=None):
        return "\n".join(diagnose_reports(before, after, _SECONDS, awaited or {}))

    def test_a_slow_rank(self):
        """Ranks 0 and 2 have waited for half of the time, rank 1 never."""
        awaited = {0: collections.Counter({1: 9, 2: 1})}
        text = self.diagnose(*_reports((10, 0, 10), usual=(0.1, 0.2, 0.1)), awaited)
        self.assertIn("A step takes 200 ms, the mean of 300 steps in 20 s.", text)
        self.assertIn("rank 0: 50% computing and other work of its own, 50% waiting for others", text)
        self.assertIn("most often for rank 1. It sends 10 Mbit/s.", text)
        self.assertIn("rank 1 is the slowest: on its own, a step takes 200 ms, of the others 100 ms.", text)
        self.assertIn("slow in most of its latest steps.", text)
        self.assertIn("log_dir", text)

    def test_a_rank_that_is_slow_now_and_then(self):
        text = self.diagnose(*_reports((10, 5, 10)))
        self.assertIn("rank 1 is the slowest: on its own, a step takes 150 ms", text)
        self.assertIn("It is slow now and then", text)

    def test_ranks_that_are_alike(self):
        text = self.diagnose(*_reports((1, 1.2, 0.8)))
        self.assertIn("All ranks take about as long on their own.", text)

    def test_what_came_of_updates(self):
        text = self.diagnose(*_reports((1, 1, 1), late_updates=20, skipped_iterations=0))
        self.assertIn("60 updates came too late, 0.2 for each step of a rank.", text)
        self.assertNotIn("skipped", text)

    def test_ranks_that_do_not_answer(self):
        before, after = _reports((10, 0, 10))
        after[1] = {"rank": 1, "problem": "unavailable: gone"}
        text = self.diagnose(before, after)
        self.assertIn("rank 1 does not answer: unavailable: gone", text)
        self.assertIn("A step takes 200 ms, the mean of 200 steps", text)

    def test_parameter_servers(self):
        """Of two ranks and two servers, one of which does not answer."""
        before, after = _reports((10, 0, 0), num_ranks=2)
        servers = {"rank": 2, "num_ranks": 2, "bytes_sent": 0}, {"rank": 2, "num_ranks": 2, "bytes_sent": 25e6}
        gone = {"rank": 3, "problem": "unavailable: gone"}
        before, after = [*before[:2], servers[0], gone], [*after[:2], servers[1], gone]
        text = self.diagnose(before, after, {0: collections.Counter({2: 9, 1: 1})})
        self.assertIn("ps 1 does not answer: unavailable: gone", text)
        self.assertIn("A step takes 200 ms, the mean of 200 steps", text)
        self.assertIn("rank 0: 50% computing and other work of its own, 50% waiting for others, most", text)
        self.assertIn("most often for ps 0. It sends", text)
        self.assertIn("ps 0 sends 10 Mbit/s.", text)
        self.assertNotIn("rank 2", text)
        text = self.diagnose(before, before, {0: collections.Counter({2: 1}), 1: collections.Counter({3: 1})})
        self.assertIn("rank 0 waits for ps 0.\nrank 1 waits for ps 1.", text)

    def test_a_job_that_stands_still(self):
        before, _ = _reports((10, 0, 10))
        text = self.diagnose(before, before, {0: collections.Counter({1: 3})})
        self.assertIn("No rank that answers has ended a step in 20 s", text)
        self.assertIn("rank 0 waits for rank 1.", text)

    @parameterized.parameters(
        (["localhost:1", "nowhere"], "host:port"),
        (["localhost:1", "--html=page.html"], "--html takes records"),
        (["localhost:1", "--seconds=0"], "--seconds must be positive"),
    )
    def test_arguments(self, arguments, message):
        errors = io.StringIO()
        with contextlib.redirect_stderr(errors), self.assertRaises(SystemExit):
            command.main(arguments)
        self.assertIn(message, errors.getvalue())


class CommandTest(TransportTestMixin, tf.test.TestCase):
    member = TcpTransport

    def run_command(self, *arguments):
        out, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            code = command.main(arguments)
        return code, out.getvalue(), errors.getvalue()

    def test_ranks_are_asked(self):
        """Each look finds ten more steps."""
        addresses = self.addresses(2)
        for rank in range(2):
            transport = self.start_at(rank, addresses, options=CommunicationOptions(cluster_token="t" * 16))
            looks, lock = itertools.count(1), threading.Lock()

            def report(looks=looks, lock=lock, rank=rank):
                with lock:
                    steps = 10 * next(looks)
                return {"steps": steps, "wait_seconds": 0.0, "waits_for": [1 - rank], "bytes_sent": 0}

            transport.serve_reports(report)
        silent = self.addresses(1)
        code, out, errors = self.run_command(*addresses, *silent, "--seconds=0.5", "--token", "t" * 16)
        self.assertEqual(code, 0, errors)
        self.assertRegex(out, r"A step takes .* the mean of \d+ steps in")
        self.assertIn("rank 1: 100% computing", out)
        self.assertIn("rank 2 does not answer: unavailable", out)

    def test_nobody_answers(self):
        code, _, errors = self.run_command(*self.addresses(1), "--seconds=0.01")
        self.assertEqual(code, 1)
        self.assertIn("no rank answers", errors)
        self.assertNotIn("Traceback", json.dumps(errors))


if __name__ == "__main__":
    absltest.main()

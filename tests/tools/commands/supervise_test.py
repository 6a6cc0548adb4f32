"""`hop_tf supervise`: what it reads of ranks, and how it shows that."""

import contextlib
import io
import json
import re
import subprocess
import sys
import threading
import time
from concurrent import futures
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import hop_tf
from hop_tf.options import CommunicationOptions
from hop_tf.tools.commands import supervise as supervisor
from hop_tf.transport.grpc_transport import GrpcTransport
from hop_tf.transport.tcp_transport import TcpTransport
from support.transports import TransportTestMixin, wait_until


def _run(*argv):
    """The exit code, and what was printed."""
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        code = supervisor.main(argv)
    return code, out.getvalue(), errors.getvalue()


def _table(*argv):
    """The rows of the table that is shown once: what is under which title. With or without `rich`."""
    code, out, errors = _run(*argv, "--count=1")
    assert code == 0, errors
    lines = [line.strip() for line in out.splitlines() if re.search(r"\w", line)]  # Others are borders.
    titles, *rows = [[cell for cell in re.split(r"\s{2,}|\s*[│┃]\s*", line) if cell] for line in lines]
    return [dict(zip(titles, row, strict=True)) for row in rows]


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

    @parameterized.parameters("rich.console", "nothing")
    def test_what_is_under_which_title(self, lacking):
        self.enter_context(mock.patch.dict("sys.modules", {lacking: None}))
        report = {
            "steps": 11,
            "iteration": 22,
            "staleness": 33,
            "proportion": 44,
            "overtime_drops": 55,
            "wait_seconds": 6.6,
            "waits_for": [2, 5],
            "bytes_received": 7.7e6,
            "bytes_sent": 1e6,
            "bytes_sent_on_lane_0": 2e6,
            "bytes_sent_on_lane_1": 8.8e6,
            "bytes_sent_on_lane_2": 9.9e6,
        }
        addresses = self.addresses(1)
        self.start_at(0, addresses).serve_reports(lambda: report)
        expected = {
            "rank": "0",
            "steps": "11",
            "iteration": "22",
            "behind": "33",
            "colayers sent": "44",
            "overtime drops": "55",
            "waited": "6.6 s",
            "waits for": "2, 5",
            "sent by lane": "8.8 9.9 MB",
            "received": "7.7 MB",
        }
        self.assertEqual(_table(*addresses), [expected])

    def test_behind(self):
        """The column is the strategy's staleness. Without one, it is the distance to the furthest rank, if known."""
        addresses, missing = self.addresses(4), self.addresses(1)
        reports = [{"iteration": 7}, {"iteration": 9}, {"iteration": 4, "staleness": 2}, {}]
        for rank, report in enumerate(reports):
            self.start_at(rank, addresses).serve_reports(lambda report=report: report)
        rows = _table(*addresses)
        self.assertEqual([row["behind"] for row in rows], ["2", "0", "2", "-"])
        _, out, _ = _run(*addresses, *missing, "--json", "--count=1")
        ranks = json.loads(out)["ranks"]
        self.assertEqual([rank.get("behind") for rank in ranks], [2, 0, 2, None, None])

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
        """One look without an answer does not end it, although that look takes longer than the permitted silence."""
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
        """The command fails at once with argparse's exit code, without asking a rank."""
        errors = io.StringIO()
        self.enter_context(mock.patch.dict("os.environ", {"TF_CONFIG": config}))
        with contextlib.redirect_stderr(errors), self.assertRaises(SystemExit) as exit_code:
            supervisor.main(argv)
        self.assertEqual(exit_code.exception.code, 2)
        self.assertIn(message, errors.getvalue())


# What only grows while a rank trains, and stands still where both ranks wait.
_COUNTED = ("steps", "iteration", "overtime_drops", "wait_seconds", "bytes_received", "bytes_sent_on_lane_1")


class CanaryTest(TransportTestMixin, tf.test.TestCase):
    """Tests that the table and the JSON show the reports of two ranks that train.

    The ranks wait for each other before each of the first five batches. Before its fifth batch rank 1 also waits until
    rank 0 has come to its tenth. Rank 0 waits there until rank 1 has looked.
    """

    def setUp(self):
        super().setUp()
        self._addresses = self.addresses(2)
        self._strategies = {}
        self._both = threading.Barrier(2)

    def _report(self, rank):
        return self._strategies[rank].report()

    def _look(self):
        """Returns the rows of the table, the ranks in JSON, and the ranks' own reports before and after."""
        before = [self._report(rank) for rank in range(2)]
        rows = _table(*self._addresses)
        code, out, _ = _run(*self._addresses, "--json", "--count=1")
        self.assertEqual(code, 0)
        return rows, json.loads(out)["ranks"], before, [self._report(rank) for rank in range(2)]

    def _look_while_they_train(self):
        """Rank 0 has made nine steps. Rank 1 has made four and knows how far rank 0 is."""
        wait_until(lambda: self._report(1)["staleness"] >= 5)
        look = rows, ranks, _, _ = self._look()
        self._check(look)
        self.assertEqual([row["steps"] for row in rows], ["9", "4"])
        self.assertEqual([row["iteration"] for row in rows], ["9", "4"])
        self.assertEqual([row["colayers sent"] for row in rows], ["2", "2"])
        self.assertEqual([row["overtime drops"] for row in rows], ["0", "0"])
        self.assertIn(rows[0]["behind"], ("0", "1"))  # It counts from the iteration that is about to begin.
        self.assertIn(rows[1]["behind"], ("5", "6"))
        self.assertEqual([rank["proportion"] for rank in ranks], [2, 2])
        self.assertEqual([rank["iteration"] for rank in ranks], [9, 4])

    def _look_at_the_end(self):
        """Rank 1 was overtime in its fifth step, at least."""
        look = rows, ranks, _, _ = self._look()
        self._check(look)
        self.assertEqual([row["iteration"] for row in rows], ["12", "12"])
        self.assertEqual(rows[0]["overtime drops"], "0")
        self.assertGreaterEqual(int(rows[1]["overtime drops"]), 2)
        self.assertLess(ranks[1]["steps"], 12)
        for row in rows:
            self.assertGreater(float(row["received"].split()[0]), 0)

    def _check(self, look):
        """Checks that the shown numbers lie between the ranks' reports before and after."""
        for rank, (row, shown, before, after) in enumerate(zip(*look, strict=True)):
            self.assertEqual((row["rank"], shown["rank"]), (str(rank), rank))
            for name in _COUNTED:
                self.assertBetween(shown[name], before[name], after[name])
            self.assertEqual(shown["behind"], shown["staleness"])
            for title, name in (("steps", "steps"), ("iteration", "iteration"), ("overtime drops", "overtime_drops")):
                self.assertBetween(int(row[title]), before[name], after[name])
            self.assertEqual(row["colayers sent"], f"{before['proportion']}")
            for title, name, unit in (
                ("waited", "wait_seconds", 1),
                ("sent by lane", "bytes_sent_on_lane_1", 1e6),
                ("received", "bytes_received", 1e6),
            ):
                self.assertBetween(float(row[title].split()[0]), before[name] / unit - 0.06, after[name] / unit + 0.06)

    def _begin(self, rank, batch):
        if batch <= 4:
            self._both.wait(60)
        if (rank, batch) in ((0, 9), (1, 4)):
            self._both.wait(60)
            if rank == 1:
                self._look_while_they_train()
            self._both.wait(60)

    def _train(self, rank):
        cluster = tf.train.ClusterSpec({"worker": list(self._addresses)})
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(cluster, "", "worker", rank)
        strategy = self._strategies[rank] = hop_tf.CanaryStrategy(
            codec=None, num_colayers=2, max_staleness=3, cluster_resolver=resolver
        )
        try:
            with strategy.scope():
                model = keras.Sequential([keras.Input((200,)), keras.layers.Dense(200), keras.layers.Dense(200)])
                model.compile(keras.optimizers.SGD(1e-4), "mse")
            begin = keras.callbacks.LambdaCallback(on_train_batch_begin=lambda batch, logs: self._begin(rank, batch))
            x = np.ones((24, 200), np.float32)
            model.fit(x, x, batch_size=2, shuffle=False, verbose=0, callbacks=[begin])
            self._both.wait(60)
            if rank == 0:
                self._look_at_the_end()
            self._both.wait(60)
        except BaseException:
            self._both.abort()
            raise
        finally:
            strategy.shutdown()

    @pytest.mark.slow
    def test_what_is_shown(self):
        with futures.ThreadPoolExecutor() as executor:
            ranks = [executor.submit(self._train, rank) for rank in range(2)]
        failures = [failure for rank in ranks if (failure := rank.exception()) is not None]
        for failure in failures:  # The other rank only tells that it was left alone.
            if not isinstance(failure, threading.BrokenBarrierError | hop_tf.errors.HopError):
                raise failure
        self.assertEmpty(failures)


if __name__ == "__main__":
    tf.test.main()

"""The command line of `hop_tf serve`. That it serves is in `shat_processes_test.py`."""

import contextlib
import io
import json
import os
import pathlib
import tempfile
from unittest import mock

import tensorflow as tf
from absl.testing import parameterized

import hop_tf
from hop_tf.cluster import Cluster
from hop_tf.errors import DeadlineExceededError
from hop_tf.strategies.shat.server import service
from hop_tf.tools.commands import serve
from hop_tf.transport.reports import ReportReader
from support.transports import DEADLINE_SECONDS, reserved_addresses


def _run(*arguments, tf_config=None):
    """The exit code, and what was printed."""
    output = io.StringIO()
    environment = {"TF_CONFIG": json.dumps(tf_config)} if tf_config else {}
    with mock.patch.dict(os.environ, environment), contextlib.redirect_stderr(output):
        try:
            code = serve.main(arguments)
        except SystemExit as error:
            code = error.code
    return code, output.getvalue()


class ServeTest(tf.test.TestCase, parameterized.TestCase):
    def test_takes_options(self):
        directory = self.enterContext(tempfile.TemporaryDirectory())
        token = pathlib.Path(directory) / "token"
        token.write_text("secret\n")
        arguments = ["--timeout_seconds=7", "--data_plane=grpc", f"--cluster_token_file={token}"]
        arguments += ["--snapshot_dir=there", "--snapshot_seconds=5", "--snapshot_pushes=9"]
        with mock.patch.object(service, "serve") as called:
            self.assertEqual(_run(*arguments), (0, ""))
        ((cluster,), given) = called.call_args
        self.assertEqual(cluster.world_size, 1)
        self.assertEqual(
            given["options"],
            hop_tf.CommunicationOptions(timeout_seconds=7, data_plane="grpc", cluster_token="secret"),
        )
        self.assertEqual(given["snapshots"], hop_tf.SnapshotOptions(directory="there", every_seconds=5, every_pushes=9))

    @parameterized.parameters(
        ("--timeout_seconds=-1", "`timeout_seconds` must be"),
        ("--snapshot_dir=there --snapshot_pushes=0", "`every_pushes` must be"),
        ("--snapshot_pushes=9", "need --snapshot_dir"),
        ("--snapshot_seconds=60", "need --snapshot_dir"),
        ("--cluster_token_file=/none", "/none"),
        ("--tls_private_key=key.pem", "must be given together"),
        ("--unknown", "unrecognized arguments"),
    )
    def test_refuses(self, arguments, message):
        code, output = _run(*arguments.split())
        self.assertEqual(code, 2)
        self.assertIn(message, output)

    def test_refuses_a_cluster_without_workers(self):
        config = {"cluster": {"ps": ["localhost:2"]}, "task": {"type": "ps", "index": 0}}
        code, output = _run(tf_config=config)
        self.assertEqual(code, 1)
        self.assertRegex(
            output, r"ClusterConfigError: The cluster must have a `worker` or `chief` task\. Received: .*ps"
        )

    def test_waits_until_its_name_is_known(self):
        config = {"cluster": {"worker": ["a:1"], "ps": ["b:2", "c:3"]}, "task": {"type": "ps", "index": 1}}
        unknown = DeadlineExceededError("c is not known")
        with mock.patch.object(serve, "check_own_name", side_effect=unknown) as check:
            code, output = _run("--timeout_seconds=7", tf_config=config)
        check.assert_called_once_with(("a:1", "b:2", "c:3"), 2, 7.0)
        self.assertEqual(code, 1)
        self.assertIn("DeadlineExceededError: c is not known", output)

    def test_a_server_tells_its_counters(self):
        worker, server = self.enterContext(reserved_addresses(2))
        config = {"cluster": {"worker": [worker], "ps": [server]}, "task": {"type": "ps", "index": 0}}
        with mock.patch.dict(os.environ, {"TF_CONFIG": json.dumps(config)}):
            cluster = Cluster.from_resolver()
        served = service._Service(cluster, hop_tf.CommunicationOptions(), hop_tf.SnapshotOptions())
        self.addCleanup(served.close)
        reader = ReportReader(server)
        self.addCleanup(reader.close)
        report = reader.read(DEADLINE_SECONDS)
        self.assertEqual((report["rank"], report["num_ranks"], report["bytes_sent"]), (1, 1, 0))

    def test_serves_on_tasks_of_type_ps_only(self):
        config = {"cluster": {"worker": ["localhost:1"], "ps": ["localhost:2"]}, "task": {"type": "worker", "index": 0}}
        code, output = _run(tf_config=config)
        self.assertEqual(code, 1)
        self.assertIn("ClusterConfigError: a parameter server must be a task of type 'ps'. Received: ", output)


if __name__ == "__main__":
    tf.test.main()

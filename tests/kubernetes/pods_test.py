"""The programs of the manifests in examples/kubernetes/, with the names and variables that pods have."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import unittest

import pytest
import yaml
from absl.testing import absltest

import kubernetes_pods
import private_network
from hop_tf.tools.processes.group import ProcessServer  # noqa: F401  (tells that processes are started)
from support import start_program

_ROOT = pathlib.Path(__file__).parents[2]
_SECONDS = 240.0
_REASON = private_network.reason_to_skip("openssl")
_TOKEN = "a secret"


@pytest.mark.stress
@unittest.skipIf(_REASON, _REASON)
class PodsTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        self.directory = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        for name in ("backup", "snapshots", "tls", "token"):
            (self.directory / name).mkdir()
        (self.directory / "token" / "token").write_text(_TOKEN)

    def enter_network(self, names):
        """Makes a network with an address for each of these names."""
        addresses = {name: f"10.0.0.{number}" for number, name in enumerate(names, start=1)}
        self.network = private_network.PrivateNetwork(str(self.directory), addresses)
        self.addCleanup(self.network.close)

    def words(self, command):
        """A command of a pod, where its volumes and its working directory are in this test's place."""
        text = json.dumps(command)
        for path in ("/backup", "/snapshots", "/tls", "/token"):
            text = text.replace(f"={path}", f"={self.directory}{path}")
        return json.loads(text.replace("examples/cluster.py", str(_ROOT / "examples" / "cluster.py")))

    def environment(self, pod):
        return {
            **{name: value for name, value in os.environ.items() if name != "TF_CONFIG"},
            "PATH": f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join([str(_ROOT), *filter(None, sys.path)]),
            "TF_CPP_MIN_LOG_LEVEL": "3",
            **pod.environment({"train-token": {"token": _TOKEN}}),
        }

    def start(self, pod, *arguments):
        """Starts a pod's program; `arguments` come behind its own."""
        command = [*self.network.inside, *self.words(pod.container["args"]), *arguments]
        return start_program(self, command, env=self.environment(pod), stderr=subprocess.STDOUT)

    def wait_until_alive(self, pod, process):
        """Until the pod's liveness probe succeeds, as it must before its program ends."""
        words = self.words(pod.container["livenessProbe"]["exec"]["command"])
        command = [*self.network.inside, *(word.replace("--timeout=10", "--timeout=0.1") for word in words)]
        deadline = time.monotonic() + _SECONDS
        while True:
            probe = subprocess.run(command, env=self.environment(pod), capture_output=True, text=True)
            if probe.returncode == 0:
                (report,) = json.loads(probe.stdout)["ranks"]
                return report
            if process.poll() is not None or time.monotonic() > deadline:
                self.fail(f"never alive: {probe.stderr}\n{process.stdout.read()}")
            time.sleep(1)

    def outputs(self, processes):
        """Returns the output of each program, all of which must succeed."""
        printed = [process.communicate(timeout=_SECONDS)[0] for process in processes]
        for process, text in zip(processes, printed, strict=True):
            self.assertEqual(process.returncode, 0, text)
        return printed

    def test_indexed_job(self):
        objects = kubernetes_pods.read("indexed_job.yaml")
        text = yaml.safe_dump_all(objects).replace("[0-3]", "[0-1]")
        objects = list(yaml.safe_load_all(text))
        (job,) = kubernetes_pods.find(objects, "Job")
        job["spec"].update(completions=2, parallelism=2)
        pods = kubernetes_pods.pods_of(objects)
        self.enter_network([f"{pod.hostname}.{pod.domain}" for pod in pods])
        processes = [self.start(pod, "--epochs=20") for pod in pods]
        self.assertEqual(self.wait_until_alive(pods[1], processes[1])["rank"], 1)
        printed, _ = self.outputs(processes)
        self.assertIn("2 ranks, accuracy: 0.", printed)

    def test_servers_with_tls(self):
        text = (kubernetes_pods.FOLDER / "shat.yaml").read_text()
        config = {
            "worker": ["train-0.train.default.svc:7400"],
            "ps": ["train-ps-0.train-ps.default.svc:7400"],
        }
        pods = kubernetes_pods.pods_of(list(yaml.safe_load_all(text)))
        server, worker = pods[0], pods[2]
        for pod in (server, worker):
            for entry in pod.container["env"]:
                if entry["name"] == "TF_CONFIG":
                    task = entry["value"].partition('"task"')[2]
                    entry["value"] = f'{{"cluster": {json.dumps(config)}, "task"{task}'
        self.make_certificate()
        self.enter_network([f"{pod.hostname}.{pod.domain}.default.svc" for pod in (server, worker)])
        served, trained = self.start(server), self.start(worker, "--epochs=20")
        self.assertEqual(self.wait_until_alive(worker, trained)["rank"], 0)
        _, printed = self.outputs([served, trained])
        self.assertIn("1 ranks, accuracy: 0.", printed)
        self.assertNotEmpty(list((self.directory / "snapshots").iterdir()))

    def make_certificate(self):
        """By the commands in docs/kubernetes.md, but for `kubectl`."""
        page = (_ROOT / "docs" / "kubernetes.md").read_text()
        (block,) = (block for block in page.split("```bash\n")[1:] if "openssl req" in block)
        commands, _, _ = block.partition("kubectl")
        subprocess.run(["sh", "-ec", commands], cwd=self.directory / "tls", check=True, capture_output=True)


if __name__ == "__main__":
    absltest.main()

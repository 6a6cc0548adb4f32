"""The examples of two sites: a training over an emulated ocean, and the program that makes one."""

import json
import os
import pathlib
import runpy
import subprocess
import sys
import tempfile
import unittest

import pytest
from absl.testing import absltest

from hop_tf.tools.testing import MultiProcessRunner, network
from hop_tf.tools.testing.network.namespaces import enter

_EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
_REASON = network.available()
_ROUND_TRIP_SECONDS = 0.2
_PRINT_CLUSTER = """
import os, socket, sys
interfaces = ",".join(name for _, name in socket.if_nameindex())
sys.stdout.write(f"{os.environ['TF_CONFIG']} {interfaces}\\n")  # At once: the other rank prints, too.
sys.exit(int(sys.argv[1]))
"""


def _run(hosts, addresses):
    """Trains on this rank's host; the process has a single thread before."""
    config = json.loads(os.environ["TF_CONFIG"])
    rank = config["task"]["index"]
    with open(hosts[rank]) as host:
        enter(host.fileno())
    config["cluster"]["worker"] = [f"{address}:2222" for address in addresses]
    os.environ["TF_CONFIG"] = json.dumps(config)
    sys.argv[:] = ["two_sites.py", "--epochs=3"]
    names = runpy.run_path(str(_EXAMPLES / "two_sites.py"), run_name="__main__")
    names["strategy"].shutdown()
    return names["history"].history, names["model"].get_weights(), names["report"]


@unittest.skipIf(_REASON is not None, f"needs an emulated network ({_REASON})")
class OceanTest(absltest.TestCase):
    @pytest.mark.stress
    def test_two_sites(self):
        """They learn, end with the same weights, and do not wait for an answer in each step."""
        with network.EmulatedNetwork(2, round_trip_seconds=_ROUND_TRIP_SECONDS) as ocean:
            hosts = [ocean.command(host, [])[1].removeprefix("--net=") for host in range(2)]
            with MultiProcessRunner(_run, 2, args=(hosts, ocean.addresses), timeout_seconds=240) as runner:
                values = runner.join().raise_for_errors().values
        for history, weights, report in values:
            self.assertLess(history["loss"][-1], history["loss"][0])
            self.assertGreater(history["val_accuracy"][-1], 0.5)  # Chance is 0.1.
            for mine, other in zip(weights, values[0][1], strict=True):
                self.assertEqual(mine.tobytes(), other.tobytes())
            self.assertEqual(report["steps"], 3 * 63)
            self.assertLess(report["wait_seconds"], report["steps"] * _ROUND_TRIP_SECONDS / 2)

    @pytest.mark.slow
    def test_starts_a_script_on_two_hosts(self):
        completed = self._start("0", "--round_trip_seconds=0.01")
        self.assertEqual(completed.returncode, 0, completed.stderr)
        self.assertLen(completed.stdout.splitlines(), 2)
        for rank in range(2):
            task = json.dumps({"type": "worker", "index": rank})
            self.assertIn(f'"task": {task}}} lo,eth0\n', completed.stdout)

    @pytest.mark.slow
    def test_fails_if_the_script_fails(self):
        completed = self._start("3")
        self.assertIn(" lo,eth0", completed.stdout)  # It was started.
        self.assertEqual(completed.returncode, 1)

    def _start(self, argument, *options):
        with tempfile.TemporaryDirectory() as folder:
            script = os.path.join(folder, "script.py")
            pathlib.Path(script).write_text(_PRINT_CLUSTER)
            return subprocess.run(
                [sys.executable, str(_EXAMPLES / "emulated_ocean.py"), *options, script, argument],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                capture_output=True,
                text=True,
                timeout=120,
            )


if __name__ == "__main__":
    absltest.main()

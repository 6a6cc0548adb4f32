"""Ranks that other launchers have started train together."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import textwrap

import pytest
from absl.testing import absltest, parameterized

import hop_tf
from hop_tf.tools.processes.group import ProcessServer  # noqa: F401  (tells that processes are started)
from hop_tf.tools.processes.local_cluster import PortReservation
from support import start_program

_TIMEOUT_SECONDS = 240
_SCRIPT = """
    import keras
    import numpy as np
    import hop_tf

    resolver = hop_tf.cluster_from_environment(timeout_seconds=200)
    options = hop_tf.CommunicationOptions(timeout_seconds=200)
    strategy = hop_tf.PipeSGDStrategy(cluster_resolver=resolver, communication_options=options)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
    x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
    model.fit(x, x[:, :1], batch_size=16, epochs=2, verbose=0)
    weights = ",".join(str(value) for value in model.get_weights()[0].ravel())
    with open(f"result_{strategy.rank}_of_{strategy.world_size}", "w") as file:
        file.write(weights)
"""


class LaunchersTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.directory = self.enter_context(tempfile.TemporaryDirectory())
        self.script = os.path.join(self.directory, "script.py")
        with open(self.script, "w") as file:
            file.write(textwrap.dedent(_SCRIPT))
        reservation = self.enter_context(PortReservation(1))
        reservation.release()
        self.port = str(reservation.ports[0])
        left_out = ("TF_CONFIG", "RANK", "WORLD_SIZE")
        self.environment = {name: value for name, value in os.environ.items() if name not in left_out}
        self.environment.update(
            PYTHONPATH=os.path.dirname(os.path.abspath(hop_tf.__path__[0])),
            TF_CPP_MIN_LOG_LEVEL="3",
            HOP_TF_CLUSTER_TOKEN="a secret",
            OMP_NUM_THREADS="1",
        )

    def start(self, command, **variables):
        environment = {**self.environment, **variables}
        return start_program(self, command, cwd=self.directory, env=environment, stderr=subprocess.STDOUT)

    def check(self, processes):
        for process in processes:
            output, _ = process.communicate(timeout=_TIMEOUT_SECONDS)
            self.assertEqual(process.returncode, 0, output)
        names = sorted(name for name in os.listdir(self.directory) if name.startswith("result"))
        self.assertEqual(names, ["result_0_of_2", "result_1_of_2"])
        results = []
        for name in names:
            with open(os.path.join(self.directory, name)) as file:
                results.append(file.read())
        self.assertEqual(results[0], results[1])

    @pytest.mark.stress
    def test_variables_of_torchrun(self):
        master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self.port, "WORLD_SIZE": "2"}
        self.check([self.start([sys.executable, self.script], RANK=str(rank), **master) for rank in range(2)])

    @parameterized.parameters("mpirun.openmpi", "mpirun.mpich")
    @pytest.mark.stress(after=1)
    def test_mpirun(self, program):
        if shutil.which(program) is None:
            self.skipTest(f"{program} is not installed")
        variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self.port}
        if program.endswith("openmpi"):
            command = [program, "--oversubscribe"]
            for name, value in variables.items():
                command += ["-x", f"{name}={value}"]
            command += ["--allow-run-as-root"] if os.geteuid() == 0 else []
        else:
            command = [program]
            for name, value in variables.items():
                command += ["-genv", name, value]
        self.check([self.start([*command, "-np", "2", sys.executable, self.script])])


if __name__ == "__main__":
    absltest.main()

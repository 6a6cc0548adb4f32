"""Training under a real Slurm: its daemons run on this machine, two nodes in a network of their own."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import sys
import tempfile
import textwrap
import unittest

import pytest
from absl.testing import absltest, parameterized

import slurm_daemons
from hop_tf.tools.processes.group import ProcessServer  # noqa: F401  (tells that processes are started)

_ROOT = pathlib.Path(__file__).parents[3]
_EXAMPLES = _ROOT / "examples"
_DIGITS = _EXAMPLES / "digits.py"
_TRAINING_SECONDS = 240.0
_REASON = slurm_daemons.reason_to_skip()

# What a task reads from Slurm's variables, and where it really is.
_PROBE = """
    import dataclasses, json, os
    from hop_tf.tools.launchers.slurm import read_slurm
    print(json.dumps({**dataclasses.asdict(read_slurm(os.environ)), "node": os.environ["SLURMD_NODENAME"]}))
"""

# Trains for three epochs; at its first start, rank 1 stays in the second one.
_PROGRAM = """
    import os, pathlib, time
    import keras, numpy as np
    import hop_tf

    class Stay(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            print("epoch", epoch, flush=True)
            if epoch == 1 and strategy.rank == 1 and "SLURM_RESTART_COUNT" not in os.environ:
                pathlib.Path("stays").touch()
                time.sleep(600)

    options = hop_tf.CommunicationOptions(timeout_seconds=200, cluster_token=os.environ["HOP_TF_CLUSTER_TOKEN"])
    resolver = hop_tf.cluster_from_environment(timeout_seconds=200)
    print("addresses", resolver.cluster_spec().as_dict()["worker"], flush=True)
    strategy = hop_tf.PipeSGDStrategy(cluster_resolver=resolver, communication_options=options)
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
    x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
    callbacks = [hop_tf.callbacks.AtomicBackupAndRestore("backup"), Stay()]
    model.fit(x, x[:, :1], batch_size=16, epochs=3, verbose=0, callbacks=callbacks)
    print("weights", model.get_weights()[0].ravel().tolist(), flush=True)
"""

# Task 1 fails at the job's first start, when both have printed.
_FAILS_ONCE = """
    import os, time
    print("token", os.environ["HOP_TF_CLUSTER_TOKEN"], flush=True)
    if "SLURM_RESTART_COUNT" not in os.environ:
        time.sleep(1 if os.environ["SLURM_PROCID"] == "1" else 600)
        raise SystemExit(3)
"""


class _SlurmTest(parameterized.TestCase):
    """Has a cluster, a directory where programs run, and variables for them."""

    @classmethod
    def start_cluster(cls, enter):
        """Starts a cluster; `enter` enters contexts, which end it."""
        cls.directory = pathlib.Path(enter(tempfile.TemporaryDirectory()))
        for name, text in (("probe.py", _PROBE), ("program.py", _PROGRAM), ("fails.py", _FAILS_ONCE)):
            (cls.directory / name).write_text(textwrap.dedent(text))
        cls.cluster = enter(contextlib.closing(slurm_daemons.SlurmCluster(str(cls.directory))))
        cls.variables = {
            "PYTHON": sys.executable,
            "PYTHONPATH": os.pathsep.join([str(_ROOT), *filter(None, sys.path)]),
            "TF_CPP_MIN_LOG_LEVEL": "3",
        }


@unittest.skipIf(_REASON, _REASON)
class StepsTest(_SlurmTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.start_cluster(cls.enterClassContext)

    @parameterized.parameters(
        ("-N2 -n2",),
        ("-N2 -n5",),  # Four, and one.
        ("-N2 -n5 --distribution=cyclic",),
        ("-N2 --ntasks-per-node=3 --distribution=block:cyclic",),
        ("-N2 -n5 --distribution=pack",),
        ("-w node2 -n3",),
    )
    @pytest.mark.stress(after=1)
    def test_tasks_know_where_all_are(self, options):
        places = self.probe(options)
        addresses = places[0]["addresses"]
        self.assertLen(set(addresses), len(places))
        for place, address in zip(places, addresses, strict=True):
            self.assertEqual(place["addresses"], addresses)
            self.assertEqual(address.split(":")[0], place["node"])

    @parameterized.parameters(
        ("-N2 -n6 --distribution=plane=2",),
        ("-w node2 -n2 : -w node1 -n1",),
    )
    @pytest.mark.stress(but=1)
    def test_tasks_meet_where_the_first_one_is(self, options):
        places = self.probe(options)
        for place in places:
            self.assertIsNone(place["addresses"])
            self.assertEqual(place["master"], places[0]["master"])
        self.assertEqual(places[0]["master"][0], places[0]["node"])

    def probe(self, options):
        """Returns the place that each task has read, ordered by task number."""
        printed = self.cluster.run("srun", *options.split(), sys.executable, "probe.py", **self.variables)
        places = sorted(map(json.loads, printed.splitlines()), key=lambda place: place["number"])
        self.assertEqual([place["number"] for place in places], list(range(places[0]["num_processes"])))
        for node in slurm_daemons.NODES:
            own = [place for place in places if place["node"] == node]
            self.assertEqual([place["local_number"] for place in own], list(range(len(own))))
            self.assertEqual({place["num_local"] for place in own}, {len(own)} if own else set())
        return places


@pytest.mark.stress
@unittest.skipIf(_REASON, _REASON)
class JobsTest(_SlurmTest):
    def setUp(self):
        super().setUp()
        self.start_cluster(self.enterContext)

    def log_of(self, job):
        path = self.directory / f"hop_tf_{job}.log"
        return path.read_text() if path.exists() else ""

    def wait_for(self, job, state):
        def has_come():
            now = self.cluster.state_of(job)
            self.assertNotIn(now, {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"} - {state}, self.log_of(job))
            return now == state

        self.cluster.wait_until(has_come, f"job {job} is {state}; its log:\n{self.log_of(job)}", _TRAINING_SECONDS)

    def lines(self, job, word):
        """Returns the texts that tasks have printed after a word, by task: `srun --label` numbers the lines."""
        found = {}
        for line in self.log_of(job).splitlines():
            task, _, text = line.partition(": ")
            if text.startswith(word):
                found.setdefault(task, []).append(text.removeprefix(word).strip())
        return found

    def test_jobs_train_and_start_again(self):
        """One trains, one loses a node, one has a task that fails: together, as most of it is waiting."""
        on_nodes = ("--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1")
        cpu, gpu = (str(_EXAMPLES / "slurm" / f"{name}.sbatch") for name in ("cpu", "gpu"))
        loses_node = self.cluster.submit(*on_nodes, cpu, "program.py", **self.variables)
        self.cluster.wait_until((self.directory / "stays").exists, "rank 1 stays", _TRAINING_SECONDS)
        self.cluster.kill_node("node2")
        self.wait_for(loses_node, "PENDING")
        self.cluster.start_node("node2")
        digits = self.cluster.submit(*on_nodes, "--gpus-per-node=2", gpu, str(_DIGITS), "--epochs=1", **self.variables)
        fails = self.cluster.submit(*on_nodes, cpu, "fails.py", **self.variables)
        for job in (fails, digits, loses_node):
            self.wait_for(job, "COMPLETED")

        self.assertRegex(self.log_of(digits), r"0: accuracy of the consensus model: 0\.[2-9]")
        self.assertRegex(self.log_of(digits), r"│ 1 +│ 22 +│")

        self.assertRegex(self.log_of(fails), r"(?m)^srun has ended with exit code \d+: restart 1 of 3$")
        tokens = self.lines(fails, "token")
        self.assertEqual(tokens["0"], tokens["1"])
        self.assertLen(set(tokens["0"]), 2)

        first, second = self.lines(loses_node, "addresses")["1"]
        self.assertNotEqual(first, second)  # Other ports.
        for task in ("0", "1"):  # It goes on from the backup of the first epoch.
            self.assertEqual(self.lines(loses_node, "epoch")[task], ["0", "1", "1", "2"])
        weights = self.lines(loses_node, "weights")
        self.assertEqual(weights["0"], weights["1"])


if __name__ == "__main__":
    absltest.main()

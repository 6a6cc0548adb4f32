"""`hop_tf.cluster_from_environment`."""

import json
import os
from unittest import mock

import tensorflow as tf
from absl.testing import parameterized

import hop_tf
from hop_tf.cluster import Cluster
from hop_tf.errors import ClusterConfigError
from hop_tf.tools.launchers import environment

_SLURM = {
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_PROCID": "3",
    "HOP_TF_FIRST_PORT": "3000",
}
_RANK = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "node1", "MASTER_PORT": "4000"}
_CONFIG = json.dumps({"cluster": {"worker": ["a:1", "b:1"], "ps": ["c:1"]}, "task": {"type": "worker", "index": 1}})


class EnvironmentTest(tf.test.TestCase, parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.check_own_name = self.enter_context(mock.patch.object(environment, "check_own_name"))

    def cluster(self, variables, **arguments):
        """The cluster, with these variables and no others; and what the log says."""
        with mock.patch.dict(os.environ, variables, clear=True), self.assertLogs("absl", "INFO") as logs:
            cluster = Cluster.from_resolver(hop_tf.cluster_from_environment(**arguments))
            self.environ = dict(os.environ)
        self.assertLen(logs.output, 1)
        return cluster, logs.output[0]

    def test_slurm(self):
        cluster, said = self.cluster(_SLURM)
        self.assertEqual(cluster.addresses, ("node1:3000", "node1:3001", "node2:3000", "node2:3001"))
        self.assertEqual((cluster.rank, cluster.world_size), (3, 4))
        self.assertIn("started by srun (Slurm): this is worker 3 of 4 processes, at node2:3001", said)

    @parameterized.parameters(("0", "worker", 0), ("1", "worker", 1), ("2", "ps", 0), ("3", "ps", 1))
    def test_the_last_processes_are_servers(self, number, task_type, task_id):
        cluster, said = self.cluster({**_SLURM, "SLURM_PROCID": number}, num_ps=2)
        self.assertEqual((cluster.task_type, cluster.task_id), (task_type, task_id))
        self.assertEqual(cluster.addresses, ("node1:3000", "node1:3001"))
        self.assertEqual(cluster.ps_addresses, ("node2:3000", "node2:3001"))
        self.assertIn(f"this is {task_type} {task_id} of 4", said)

    @parameterized.parameters(0, 1)
    def test_tf_config_goes_before_all(self, num_ps):
        cluster, said = self.cluster({"TF_CONFIG": _CONFIG, **_SLURM, **_RANK}, num_ps=num_ps)
        self.assertEqual((cluster.addresses, cluster.rank), (("a:1", "b:1"), 1))
        self.assertIn("TF_CONFIG: this is worker 1 of 3 processes, at b:1", said)
        self.check_own_name.assert_called_once_with(("a:1", "b:1", "c:1"), 1, 60.0)

    def test_addresses_go_before_other_launchers(self):
        variables = {"HOP_TF_ADDRESSES": "train-[0-3].train:7400", "JOB_COMPLETION_INDEX": "2"}
        cluster, said = self.cluster({**variables, **_SLURM, **_RANK}, num_ps=1, timeout_seconds=7)
        self.assertEqual(cluster.addresses, ("train-0.train:7400", "train-1.train:7400", "train-2.train:7400"))
        self.assertEqual((cluster.ps_addresses, cluster.rank), (("train-3.train:7400",), 2))
        self.assertIn("started by a launcher that sets HOP_TF_ADDRESSES: this is worker 2 of 4", said)
        self.check_own_name.assert_called_once_with(tuple(f"train-{i}.train:7400" for i in range(4)), 2, 7)

    def test_the_number_of_servers_contradicts_tf_config(self):
        with self.assertRaisesRegex(ClusterConfigError, "Received: num_ps=2, and 1 such tasks"):
            self.cluster({"TF_CONFIG": _CONFIG}, num_ps=2)

    def test_a_malformed_tf_config(self):
        with self.assertRaisesRegex(ClusterConfigError, "TF_CONFIG must be valid JSON"):
            self.cluster({"TF_CONFIG": "{", **_SLURM})

    @parameterized.parameters({}, {"TF_CONFIG": " "}, {"TF_CONFIG": "{}"}, {"SLURM_JOB_ID": "1"})
    def test_nothing_is_a_world_of_one(self, **variables):
        cluster, said = self.cluster(variables, num_ps=1)
        self.assertEqual((cluster.world_size, cluster.rank), (1, 0))
        self.assertIn("started by no known launcher: this process trains alone", said)

    def test_a_batch_script_of_slurm_without_srun(self):
        variables = {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}
        cluster, said = self.cluster(variables)
        self.assertEqual((cluster.world_size, cluster.rank), (1, 0))
        self.assertIn("trains alone. This Slurm job has 4 tasks: use srun.", said)

    def test_a_launcher_of_one_process(self):
        cluster, said = self.cluster({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"})
        self.assertEqual((cluster.world_size, cluster.rank), (1, 0))
        self.assertIn("mpirun (Open MPI), for one process: this process trains alone", said)

    @parameterized.parameters(None, "given")
    def test_processes_meet_once(self, token):
        addresses, port = ["node1:5", "node2:6", "[::2]:7"], mock.Mock()
        variables = {**_RANK, "HOP_TF_CLUSTER_TOKEN": "set"}
        with (
            mock.patch.dict(environment._met, clear=True),
            mock.patch.object(environment, "meet", return_value=(addresses, port)) as meet,
        ):
            for _ in range(2):
                cluster, said = self.cluster(variables, num_ps=1, cluster_token=token, timeout_seconds=7)
                self.assertEqual((cluster.addresses, cluster.ps_addresses), (("node1:5", "node2:6"), ("[::2]:7",)))
                self.assertIn("started by torchrun: this is worker 1 of 3 processes, at node2:6", said)
            meet.assert_called_once_with(mock.ANY, num_ps=1, token=token or "set", timeout_seconds=7)
        port.close.assert_not_called()

    @parameterized.parameters(
        ("2", "0,1,2,3", "1"), ("2", "4,7", "7"), ("3", "4,7", "4"), ("3", "5", "5"), ("1", "", "")
    )
    def test_processes_of_a_machine_share_its_gpus(self, number, visible, chosen):
        variables = {**_SLURM, "SLURM_STEP_TASKS_PER_NODE": "1,3", "CUDA_VISIBLE_DEVICES": visible}
        self.cluster({**variables, "SLURM_PROCID": number})
        self.assertEqual(self.environ["CUDA_VISIBLE_DEVICES"], chosen)

    def test_servers_get_no_gpu(self):
        self.cluster({**_SLURM, "CUDA_VISIBLE_DEVICES": "0,1"}, num_ps=1)
        self.assertEqual(self.environ["CUDA_VISIBLE_DEVICES"], "-1")

    @parameterized.parameters(-1, 1.5, True)
    def test_refuses_numbers_of_servers(self, num_ps):
        with self.assertRaisesRegex(ValueError, "`num_ps` must be an integer"):
            hop_tf.cluster_from_environment(num_ps=num_ps)

    def test_all_processes_are_servers(self):
        with self.assertRaisesRegex(ClusterConfigError, r"less than .*, 4 by srun.*Received: num_ps=4"):
            self.cluster(_SLURM, num_ps=4)

    @parameterized.parameters(-1.0, float("nan"), float("inf"))
    def test_refuses_durations(self, seconds):
        with self.assertRaisesRegex(ValueError, "`timeout_seconds` must be"):
            hop_tf.cluster_from_environment(timeout_seconds=seconds)


if __name__ == "__main__":
    tf.test.main()

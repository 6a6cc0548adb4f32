"""Tests of the description of a cluster on one machine."""

from __future__ import annotations

import json
import socket
from unittest import mock

from absl.testing import absltest, parameterized

from hop_tf.options import DEVICES_VARIABLE
from hop_tf.tools.processes import local_cluster
from hop_tf.tools.processes.local_cluster import PortReservation, ProcessError, Task


class TasksTest(parameterized.TestCase):
    def test_lists_workers_first(self):
        tasks = local_cluster.make_tasks(num_workers=2, num_ps=1)
        self.assertEqual([str(task) for task in tasks], ["worker 0", "worker 1", "ps 0"])
        self.assertEqual(tasks[2].file_stem, "ps_0")

    @parameterized.parameters((0, 0, "num_workers=0"), (1, -1, "num_ps=-1"))
    def test_refuses_numbers(self, num_workers, num_ps, received):
        with self.assertRaisesRegex(ValueError, f"Received: {received}"):
            local_cluster.make_tasks(num_workers=num_workers, num_ps=num_ps)

    def test_tf_config_describes_the_cluster_and_the_task(self):
        tasks = local_cluster.make_tasks(num_workers=2, num_ps=1)
        configs = local_cluster.make_tf_configs(tasks, [f"127.0.0.1:{port}" for port in (11001, 11002, 11003)])
        cluster = {"worker": ["127.0.0.1:11001", "127.0.0.1:11002"], "ps": ["127.0.0.1:11003"]}
        self.assertEqual(
            json.loads(configs[Task("worker", 1)]), {"cluster": cluster, "task": {"type": "worker", "index": 1}}
        )
        self.assertEqual(json.loads(configs[Task("ps", 0)])["task"], {"type": "ps", "index": 0})

    def test_without_servers_the_cluster_has_no_such_tasks(self):
        configs = local_cluster.make_tf_configs(local_cluster.make_tasks(num_workers=1), ["127.0.0.1:11001"])
        self.assertEqual(json.loads(configs[Task("worker", 0)])["cluster"], {"worker": ["127.0.0.1:11001"]})


class EnvironmentTest(parameterized.TestCase):
    @parameterized.parameters((16, 4, "4", "4"), (2, 4, "1", "2"), (7, 2, "3", "3"))
    def test_workers_share_the_cores(self, num_cores, num_workers, share, inter_op):
        with mock.patch.object(local_cluster, "available_cores", return_value=num_cores):
            limits = local_cluster.thread_limits(num_workers)
        self.assertEqual(
            limits,
            {"OMP_NUM_THREADS": share, "TF_NUM_INTRAOP_THREADS": share, "TF_NUM_INTEROP_THREADS": inter_op},
        )

    def test_what_the_user_set_stays(self):
        base = {"OMP_NUM_THREADS": "7", "MINE": "1", "TF_CONFIG": "old"}
        environment = local_cluster.task_environments([Task("worker", 0)], [11001], base)[Task("worker", 0)]
        self.assertEqual(environment["OMP_NUM_THREADS"], "7")
        self.assertEqual(environment["MINE"], "1")
        self.assertEqual(json.loads(environment["TF_CONFIG"])["task"], {"type": "worker", "index": 0})

    def test_several_gpus_are_given_in_turn(self):
        environments = local_cluster.gpu_assignments(3, {"CUDA_VISIBLE_DEVICES": "2,GPU-5"})
        self.assertEqual([env["CUDA_VISIBLE_DEVICES"] for env in environments], ["2", "GPU-5", "2"])
        self.assertEqual([env["TF_FORCE_GPU_ALLOW_GROWTH"] for env in environments], ["true"] * 3)

    def test_a_gpu_per_worker_is_not_shared(self):
        self.assertEqual(
            local_cluster.gpu_assignments(2, {"CUDA_VISIBLE_DEVICES": "0,1"}),
            [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}],
        )

    @parameterized.parameters(
        (2, "", ["0,1", "2,3"]),
        (3, "", ["0", "1", "2"]),
        (2, "1", ["0", "1"]),
        (3, "2", ["0,1", "2,3", "0,1"]),
        (1, "4", [None]),  # It sees all of them in any case.
    )
    def test_workers_share_the_gpus(self, num_workers, number, expected):
        base = {"CUDA_VISIBLE_DEVICES": "0,1,2,3", DEVICES_VARIABLE: number}
        environments = local_cluster.gpu_assignments(num_workers, base)
        self.assertEqual([env.get("CUDA_VISIBLE_DEVICES") for env in environments], expected)
        is_shared = num_workers * int(number or 1) > 4
        self.assertEqual(["TF_FORCE_GPU_ALLOW_GROWTH" in env for env in environments], [is_shared] * num_workers)

    def test_refuses_more_gpus_than_there_are(self):
        with self.assertRaisesRegex(ProcessError, f"{DEVICES_VARIABLE}=3 .--devices_per_worker., and 2 GPUs"):
            local_cluster.gpu_assignments(1, {"CUDA_VISIBLE_DEVICES": "0,1", DEVICES_VARIABLE: "3"})

    def test_one_gpu_is_shared(self):
        with mock.patch.object(local_cluster.glob, "glob", return_value=["/dev/nvidia0"]):
            environments = local_cluster.gpu_assignments(2, {"TF_FORCE_GPU_ALLOW_GROWTH": "false"})
        self.assertEqual(environments, [{"TF_FORCE_GPU_ALLOW_GROWTH": "false"}] * 2)

    @parameterized.parameters(("0,1", "-1"), ("", ""))
    def test_parameter_servers_leave_gpus_to_workers(self, visible, of_server):
        tasks = local_cluster.make_tasks(num_workers=2, num_ps=1)
        found = local_cluster.task_environments(tasks, [11001, 11002, 11003], {"CUDA_VISIBLE_DEVICES": visible})
        self.assertEqual(found[Task("ps", 0)]["CUDA_VISIBLE_DEVICES"], of_server)
        self.assertEqual(found[Task("worker", 1)]["CUDA_VISIBLE_DEVICES"], "1" if visible else "")

    @parameterized.parameters("", "-1")
    def test_without_gpus_nothing_is_set(self, visible):
        self.assertEqual(local_cluster.gpu_assignments(2, {"CUDA_VISIBLE_DEVICES": visible}), [{}, {}])


class PortReservationTest(absltest.TestCase):
    def test_ports_are_held_until_released(self):
        with PortReservation(8) as reservation:
            self.assertLen(set(reservation.ports), 8)
            for port in reservation.ports:
                self.assertFalse(_can_bind(port))
            reservation.release()
            for port in reservation.ports:
                self.assertTrue(_can_bind(port))

    def test_outgoing_connections_do_not_use_them(self):
        with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
            first = int(file.read().split()[0])
        with PortReservation(8) as reservation:
            self.assertLess(max(reservation.ports), first)

    def test_released_ports_are_not_given_to_another_job(self):
        with PortReservation(4) as first:
            first.release()
            with _candidates([*first.ports, 31999]), PortReservation(1) as second:
                self.assertEqual(second.ports, (31999,))
        with _candidates(first.ports), PortReservation(1) as third:
            self.assertEqual(third.ports, first.ports[:1])

    def test_without_free_ports_there_is_an_error(self):
        expected = self.assertRaisesRegex(local_cluster.ProcessError, "fewer than 2 free TCP ports")
        with PortReservation(1) as first, _candidates(first.ports), expected:
            PortReservation(2)


def _can_bind(port):
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def _candidates(ports):
    return mock.patch.object(local_cluster, "_candidate_ports", side_effect=lambda: iter(ports))


if __name__ == "__main__":
    absltest.main()

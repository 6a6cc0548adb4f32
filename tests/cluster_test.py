"""Reading the cluster description."""

import json
import os
from unittest import mock

import tensorflow as tf
from absl.testing import parameterized

from hop_tf.cluster import Cluster
from hop_tf.errors import ClusterConfigError


def _from_tf_config(config):
    text = config if isinstance(config, str) else json.dumps(config)
    with mock.patch.dict(os.environ, {"TF_CONFIG": text}):
        return Cluster.from_resolver()


def _workers(*addresses):
    return {"cluster": {"worker": list(addresses)}, "task": {"type": "worker", "index": 0}}


def _task(index):
    return {**_TWO, "task": {"type": "worker", "index": index}}


_TWO = {"cluster": {"worker": ["a:1", "b:1"]}}


class ClusterTest(tf.test.TestCase, parameterized.TestCase):
    def test_no_tf_config_is_a_world_of_one(self):
        with mock.patch.dict(os.environ):
            os.environ.pop("TF_CONFIG", None)
            cluster = Cluster.from_resolver()
        self.assertEqual((cluster.world_size, cluster.rank), (1, 0))

    def test_workers_are_ranked_in_order(self):
        cluster = _from_tf_config(
            {"cluster": {"worker": ["a:1", "b:2", "c:3"]}, "task": {"type": "worker", "index": 2}}
        )
        self.assertEqual(cluster.addresses, ("a:1", "b:2", "c:3"))
        self.assertEqual(cluster.rank, 2)
        self.assertEqual(cluster.hosts, ("a", "b", "c"))

    def test_chief_is_rank_0_and_servers_have_no_rank(self):
        tasks = {"chief": ["a:1"], "worker": ["b:2"], "ps": ["c:3"]}
        chief = _from_tf_config({"cluster": tasks, "task": {"type": "chief", "index": 0}})
        worker = _from_tf_config({"cluster": tasks, "task": {"type": "worker", "index": 0}})
        server = _from_tf_config({"cluster": tasks, "task": {"type": "ps", "index": 0}})
        self.assertEqual((chief.rank, worker.rank, server.rank), (0, 1, None))
        self.assertEqual(server.ps_addresses, ("c:3",))

    def test_any_resolver_will_do(self):
        spec = tf.train.ClusterSpec({"worker": ["a:1", "b:2"]})
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(spec, task_type="worker", task_id=1)
        self.assertEqual(Cluster.from_resolver(resolver).rank, 1)

    def test_refuses_what_is_no_resolver(self):
        with self.assertRaisesRegex(TypeError, "`cluster_resolver` must be .*Received: cluster_resolver='worker:1'"):
            Cluster.from_resolver("worker:1")

    def test_slurm_without_gpus(self):
        variables = {
            "SLURM_STEP_NODELIST": "node[1-2]",
            "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
            "SLURM_STEP_NUM_TASKS": "4",
            "SLURM_PROCID": "3",
        }
        with mock.patch.dict(os.environ, variables):
            resolver = tf.distribute.cluster_resolver.SlurmClusterResolver(
                gpus_per_node=2, gpus_per_task=1, auto_set_gpu=False
            )
            cluster = Cluster.from_resolver(resolver)
        self.assertEqual((cluster.rank, cluster.world_size), (3, 4))
        self.assertEqual(cluster.addresses[2:], ("node2:8888", "node2:8889"))

    @parameterized.parameters(None, 1.7, True, -1, 2, "x")
    def test_the_index_of_any_resolver_is_checked(self, index):
        resolver = mock.Mock(tf.distribute.cluster_resolver.ClusterResolver, task_type="worker", task_id=index)
        resolver.cluster_spec.return_value = tf.train.ClusterSpec({"worker": ["a:1", "b:2"]})
        with self.assertRaisesRegex(ClusterConfigError, f"must be one of the cluster's.*index={index!r}"):
            Cluster.from_resolver(resolver)

    def test_one_string_twice(self):
        address = "a:1"
        resolver = mock.Mock(tf.distribute.cluster_resolver.ClusterResolver, task_type="worker", task_id=0)
        resolver.cluster_spec.return_value.as_dict.return_value = {"worker": [address, address]}
        with self.assertRaisesRegex(ClusterConfigError, "'a:1' and 'a:1', which are the same"):
            Cluster.from_resolver(resolver)

    @parameterized.parameters("1", 1)
    def test_indices_may_be_written_as_strings(self, index):
        self.assertEqual(_from_tf_config(_task(index)).rank, 1)

    @parameterized.parameters(
        ("[::1]:1", "[fe80::1%eth0]:1"),
        ("127.0.0.1:1", "127.0.0.2:1"),
        ("a_b:1", "a_b:2"),
        ("ä.example:1", "10.0.0.1:1"),
    )
    def test_accepts_addresses(self, *addresses):
        self.assertEqual(_from_tf_config(_workers(*addresses)).addresses, addresses)

    @parameterized.named_parameters(
        ("not_json", "{", "valid JSON"),
        ("unknown_task", {"cluster": {"worker": ["a:1"], "evaluator": ["b:1"]}}, "evaluate on a rank.*'evaluator'"),
        ("no_cluster", {"task": {"type": "worker", "index": 1}}, "index=1, and no cluster"),
        ("cluster_is_empty", {"cluster": {}, "task": {"type": "worker", "index": 1}}, "index=1, and no cluster"),
        ("no_cluster_for_the_first", {"task": {"type": "worker", "index": 0}}, "index=0, and no cluster"),
        ("misspelled", {"clusters": {"worker": ["a:1", "b:1"]}}, "must be named 'cluster'. Received: 'clusters'"),
        ("index_too_large", {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 2}}, "index=2"),
        ("no_task", {"cluster": {"worker": ["a:1", "b:1"]}}, "task type=None"),
        ("no_port", {"cluster": {"worker": ["a", "b:1"]}, "task": {"type": "worker", "index": 0}}, "host:port"),
        ("twice", {"cluster": {"worker": ["a:1", "a:1"]}, "task": {"type": "worker", "index": 0}}, "a:1"),
        ("no_object", [], r"must be a JSON object\. Received: TF_CONFIG=\[\]"),
        ("cluster_is_a_list", {"cluster": []}, r"`cluster` entry .* must map .* Received: cluster=\[\]\."),
        ("cluster_is_null", {"cluster": None}, "Received: cluster=None"),
        ("string_of_tasks", {"cluster": {"worker": "a:1"}}, r"lists of 'host:port'.*cluster=\{'worker': 'a:1'\}"),
        ("number_as_address", {"cluster": {"worker": [1]}}, r"cluster=\{'worker': \[1\]\}"),
        ("named_tasks", {"cluster": {"worker": {"x": "a:1"}}}, r"cluster=\{'worker': \{'x': 'a:1'\}\}"),
        ("gap", {"cluster": {"worker": {"0": "a:1", "2": "b:1"}}}, "numbered from 0"),
        ("task_is_a_string", {**_TWO, "task": "worker"}, "Received: task='worker'"),
        ("index_is_a_word", _task("x"), r"integer index.*Received: task=\{'type': 'worker', 'index': 'x'\}"),
        ("index_is_a_fraction", _task(1.7), "'index': 1.7"),
        ("index_is_a_boolean", _task(True), "'index': True"),
        ("index_is_negative", _task(-1), "'index': -1"),
        ("index_is_null", _task(None), "'index': None"),
        ("index_in_other_digits", _task("²"), "'index': '²'"),
        ("scheme", _workers("http://a:1", "b:1"), r"without a scheme.*Received: worker='http://a:1'"),
        ("port_in_other_digits", _workers("a:²", "b:1"), "worker='a:²'"),
        ("port_0", _workers("a:0", "b:1"), "ports from 1 to 65535.*worker='a:0'"),
        ("port_too_large", _workers("a:65536", "b:1"), "worker='a:65536'"),
        ("user", _workers("me@a:1", "b:1"), "worker='me@a:1'"),
        ("bare_ipv6", _workers("::1:80", "b:1"), "IPv6 in brackets.*worker='::1:80'"),
        ("space", _workers("a:1 ", "b:1"), "worker='a:1 '"),
        ("loopback", _workers("localhost:1", "127.0.0.1:1"), "'localhost:1' and '127.0.0.1:1', which are the same"),
        ("loopback_6", _workers("localhost:1", "[0::1]:1"), "which are the same"),
        ("letter_case", _workers("Host.a:1", "host.A.:01"), "which are the same"),
        ("across_types", {"cluster": {"worker": ["a:1"], "ps": ["a:1"]}}, "'a:1' and 'a:1'"),
        ("two_chiefs", {"cluster": {"chief": ["a:1", "b:1"]}, "task": {"type": "chief", "index": 0}}, "at most one"),
        ("no_worker", {"cluster": {"ps": ["a:1"]}, "task": {"type": "ps", "index": 0}}, "`worker` or `chief`"),
    )
    def test_refuses(self, config, message):
        with self.assertRaisesRegex(ClusterConfigError, message):
            _from_tf_config(config)


class ServersTest(tf.test.TestCase):
    def test_numbers_of_servers_go_on_where_ranks_end(self):
        spec = tf.train.ClusterSpec({"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1", "e:1"]})
        numbers = {}
        for task_type, task_id in (("chief", 0), ("worker", 1), ("ps", 0), ("ps", 1)):
            resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(spec, task_type=task_type, task_id=task_id)
            cluster = Cluster.from_resolver(resolver)
            numbers[task_type, task_id] = cluster.number
            self.assertEqual(cluster.all_addresses, ("a:1", "b:1", "c:1", "d:1", "e:1"))
            self.assertEqual(list(cluster.servers), [3, 4])
        self.assertEqual(list(numbers.values()), [0, 2, 3, 4])


if __name__ == "__main__":
    tf.test.main()

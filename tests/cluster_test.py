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

    @parameterized.named_parameters(
        ("not_json", "{", "valid JSON"),
        ("unknown_task", {"cluster": {"worker": ["a:1"], "evaluator": ["b:1"]}}, "evaluator"),
        ("index_too_large", {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 2}}, "index=2"),
        ("no_task", {"cluster": {"worker": ["a:1", "b:1"]}}, "task type=None"),
        ("no_port", {"cluster": {"worker": ["a", "b:1"]}, "task": {"type": "worker", "index": 0}}, "host:port"),
        ("twice", {"cluster": {"worker": ["a:1", "a:1"]}, "task": {"type": "worker", "index": 0}}, "a:1"),
        ("two_chiefs", {"cluster": {"chief": ["a:1", "b:1"]}, "task": {"type": "chief", "index": 0}}, "at most one"),
        ("no_worker", {"cluster": {"ps": ["a:1"]}, "task": {"type": "ps", "index": 0}}, "`worker` or `chief`"),
    )
    def test_refuses(self, config, message):
        with self.assertRaisesRegex(ClusterConfigError, message):
            _from_tf_config(config)


if __name__ == "__main__":
    tf.test.main()

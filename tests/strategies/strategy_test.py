"""Tests of the strategies' base class: its refusals, and a world of one. `hop/fit_test.py` tests several ranks."""

import contextlib
import json
import os
import socket
import tempfile
import threading
from unittest import mock

import keras
import networkx as nx
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import hop_tf
from hop_tf.errors import ClusterConfigError, PeerLostError
from hop_tf.tools.testing import MultiProcessRunner
from support import MEMBERS, error_of


def _tf_config(task_type, index, **cluster):
    return mock.patch.dict(
        os.environ, TF_CONFIG=json.dumps({"cluster": cluster, "task": {"type": task_type, "index": index}})
    )


class Separate(keras.Model):
    """Two variables that one optimizer updates one after the other, with zero gradients."""

    def __init__(self, rank):
        super().__init__()
        self.first = self.add_weight(shape=(2,), initializer=keras.initializers.Constant(rank), name="first")
        self.second = self.add_weight(shape=(2,), initializer=keras.initializers.Constant(rank), name="second")

    def train_step(self, data):
        for weight in (self.first, self.second):
            # Ranks move apart, and the exchange brings them together again.
            weight.assign_add(tf.fill([2], tf.cast(tf.distribute.get_strategy().rank, tf.float32)))
            self.optimizer.apply([tf.zeros([2])], [weight])
        return {"loss": 0.0}


def train_parts_with_one_optimizer():
    strategy = hop_tf.HopStrategy(topology="complete")
    with strategy.scope():
        model = Separate(strategy.rank)
        model.built = True
        model.compile(keras.optimizers.SGD(0.0))
        model.optimizer.build(model.trainable_variables)
    model.fit(np.zeros((4, 1), "float32"), batch_size=2, epochs=3, verbose=0)
    strategy.shutdown()
    return [np.asarray(weight) for weight in (model.first, model.second)]


class Counting(keras.Sequential):
    """Counts the rows that it trains on. Must run eagerly."""

    num_rows = 0

    def train_step(self, data):
        self.num_rows += len(data[0])
        return super().train_step(data)


def count_rows():
    """Returns the number of rows, of 8, that this rank trains on, by the form of the data for `fit`."""
    strategy = hop_tf.HopStrategy(topology="complete")
    dataset = tf.data.Dataset.from_tensor_slices((np.ones((8, 1), "float32"), np.ones((8, 1), "float32"))).batch(4)
    rows = {}
    for name, data in (("dataset", dataset), ("distributed", strategy.experimental_distribute_dataset(dataset))):
        with strategy.scope():
            model = Counting([keras.layers.Input((1,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse", run_eagerly=True)
        model.fit(data, verbose=0)
        rows[name] = model.num_rows
    strategy.shutdown()
    return rows


class TwoRanksTest(tf.test.TestCase):
    @pytest.mark.stress
    def test_one_optimizer_may_update_variables_in_parts(self):
        with MultiProcessRunner(train_parts_with_one_optimizer, num_workers=2) as runner:
            ranks = runner.join().raise_for_errors().values
        # In each of 6 steps rank 1 adds 1, rank 0 nothing, and both take the mean: 0.5 more. Both began at rank 0's 0.
        for weights in ranks:
            self.assertAllClose(weights, [[3.0, 3.0], [3.0, 3.0]])

    @pytest.mark.stress
    def test_a_distributed_dataset_is_sliced_once(self):
        with MultiProcessRunner(count_rows, num_workers=2) as runner:
            for rows in runner.join().raise_for_errors().values:
                self.assertEqual(rows, {"dataset": 4, "distributed": 4})


class OnChiefOnlyTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters("synchronize", "fit", "gather_reports")
    @pytest.mark.stress
    def test_what_all_ranks_have_to_call(self, what):
        def run(strategy):
            x = np.ones((4, 1), np.float32)
            with strategy.scope():
                model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
                model.compile("sgd", "mse")
            model.fit(x, x, batch_size=2, verbose=0)
            if not strategy.is_chief:
                return strategy.shutdown()
            calls = {
                "synchronize": lambda: strategy.synchronize(model),
                "fit": lambda: model.fit(x, x, batch_size=2, verbose=0),
                "gather_reports": strategy.gather_reports,
            }
            return error_of(calls[what])

        error, _ = MEMBERS["pipe_sgd"].run(run)
        self.assertIsInstance(error, PeerLostError)
        self.assertRegex(str(error), f"rank 1 .* has ended: .* All ranks must call `(strategy.)?{what}`")


class RefusalsTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        hop_tf.HopStrategy,
        hop_tf.PipeSGDStrategy,
        hop_tf.DTSStrategy,
        hop_tf.CanaryStrategy,
        hop_tf.SHATParameterServerStrategy,
    )
    def test_options_of_another_type(self, make_strategy):
        message = (
            "`communication_options` must be a hop_tf.CommunicationOptions or None. Received: .*'timeout_seconds': 3"
        )
        with self.assertRaisesRegex(TypeError, message):
            make_strategy(communication_options={"timeout_seconds": 3})
        with self.assertRaisesRegex(TypeError, "`cluster_resolver` must be .* Received: cluster_resolver='x'"):
            make_strategy(cluster_resolver="x")

    @parameterized.parameters(1, 2)
    def test_a_parameter_server_is_no_rank(self, num_workers):
        workers = [f"localhost:{port}" for port in range(1000, 1000 + num_workers)]
        with (
            _tf_config("ps", 0, worker=workers, ps=["localhost:999"]),
            self.assertRaisesRegex(ClusterConfigError, "HopStrategy runs in tasks of type 'chief' and 'worker'"),
        ):
            hop_tf.HopStrategy()

    @parameterized.parameters(0, -1, 1.5, "2", True, None)
    def test_a_gap_that_is_no_positive_integer(self, gap):
        with self.assertRaisesRegex(ValueError, f"`max_iteration_gap` must be an integer .*Received: .*={gap!r}"):
            hop_tf.HopStrategy(max_iteration_gap=gap)

    def test_a_gap_may_come_from_numpy(self):
        hop_tf.HopStrategy(max_iteration_gap=np.int64(3)).shutdown()

    @parameterized.parameters(
        ({"topology": "ring", "num_backup_workers": 3}, "`num_backup_workers` must be less than a rank's number"),
        ({"topology": nx.Graph([(0, 1), (2, 3)])}, "`graph` must be strongly connected"),
        ({"synchronization": "notify_ack", "max_staleness": 1}, "`synchronization` must be 'queues' with backup"),
    )
    def test_what_hop_cannot_train_with(self, arguments, message):
        """Other cases are in `hop/settings_test` and `topology_test`."""
        addresses = [f"localhost:{port}" for port in range(1000, 1004)]
        with _tf_config("worker", 0, worker=addresses), self.assertRaisesRegex(ValueError, message):
            hop_tf.HopStrategy(**arguments)

    def test_a_model_without_weights_cannot_be_synchronized(self):
        strategy = hop_tf.HopStrategy()
        self.addCleanup(strategy.shutdown)
        with self.assertRaisesRegex(ValueError, "`model` must be built"):
            strategy.synchronize(keras.Sequential([keras.layers.Dense(1)]))

    def test_a_log_dir_that_cannot_be_written_is_a_warning(self):
        with tempfile.NamedTemporaryFile() as file:
            options = hop_tf.CommunicationOptions(log_dir=os.path.join(file.name, "logs"))
            with self.assertLogs("absl", "WARNING") as logs:
                strategy = hop_tf.HopStrategy(communication_options=options)
            self.addCleanup(strategy.shutdown)
            self.assertIn(f"{file.name} is not a directory. Training continues, without", logs.output[0])
            self.assertNotIn("hop_tf report", [thread.name for thread in threading.enumerate()])
            with strategy.scope():
                model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
                model.compile("sgd", "mse")
            model.fit(np.ones((4, 1)), np.ones((4, 1)), verbose=0)
            self.assertEqual(strategy.report()["steps"], 1)


class RestartedTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.named_parameters(
        ("list", lambda callback: [keras.callbacks.Callback(), callback]),
        ("alone", lambda callback: callback),
        ("callback_list", lambda callback: keras.callbacks.CallbackList([callback])),
    )
    def test_a_rank_that_joins_cannot_restore_a_backup(self, wrap):
        with (
            _tf_config("worker", 0, worker=["localhost:1000", "localhost:1001"]),
            mock.patch("hop_tf.strategy.RankRuntime") as runtime,
        ):
            strategy = hop_tf.HopStrategy(topology="complete")
        self.addCleanup(strategy.shutdown)
        runtime.return_value.configure_mock(joining=True, in_session=False)
        with strategy.scope():
            model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        x = np.ones((4, 1), "float32")
        callbacks = wrap(keras.callbacks.BackupAndRestore(self.get_temp_dir()))
        with self.assertRaisesRegex(ValueError, "`BackupAndRestore` would begin at another step"):
            model.fit(x, x, 2, 1, 0, callbacks)
        runtime.return_value.end_session.assert_called_once()


class OwnNameTest(parameterized.TestCase):
    @parameterized.parameters("pipe_sgd", "shat")
    def test_a_loopback_address_is_refused_before_others_are_waited_for(self, name):
        """Debian's /etc/hosts has such an address. The others could not reach this machine at the address they know."""
        known = {"node1": "127.0.1.1", "node2": "10.0.0.2", "node3": "10.0.0.3"}

        def look_up(host, *arguments, **keywords):
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (known[host], 0))]

        servers = {"ps": ["node3:7400"]} if name == "shat" else {}
        make = hop_tf.SHATParameterServerStrategy if servers else hop_tf.PipeSGDStrategy
        with (
            _tf_config("worker", 0, worker=["node1:7400", "node2:7400"], **servers),
            mock.patch.object(socket, "getaddrinfo", look_up),
            self.assertRaisesRegex(ClusterConfigError, "node1, the name of this process's machine, must resolve to an"),
        ):
            make()


class WorldOfOneTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(True, "auto", False)
    @pytest.mark.stress(after=1)
    @pytest.mark.slow
    def test_trains_as_plain_keras(self, jit_compile):
        x, y = np.ones((8, 3), "float32"), np.ones((8, 1), "float32")

        def train(scope):
            keras.utils.set_random_seed(0)
            with scope:
                model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
                model.compile("adam", "mse", jit_compile=jit_compile)
            model.fit(x, y, batch_size=4, epochs=3, verbose=0)
            return model.get_weights()

        strategy = hop_tf.HopStrategy()
        self.addCleanup(strategy.shutdown)
        for weight, expected in zip(train(strategy.scope()), train(contextlib.nullcontext()), strict=True):
            self.assertAllClose(weight, expected, rtol=1e-6, atol=1e-7)

    def test_knows_the_names_of_topologies(self):
        with self.assertRaisesRegex(ValueError, "`topology` must be one of .* Received: topology='rings'"):
            hop_tf.HopStrategy(topology="rings")

    def test_takes_the_topology_of_a_larger_world(self):
        strategy = hop_tf.HopStrategy(topology=np.full((4, 4), 0.25))
        self.addCleanup(strategy.shutdown)
        self.assertEqual(strategy.world_size, 1)


class LargeWorldTest(tf.test.TestCase):
    def test_what_ranks_compare_is_short(self):
        """Every greeting contains this description."""
        num_ranks = 300
        identities = []
        for topology in ("ring_based", np.full((num_ranks, num_ranks), 1 / num_ranks)):
            with (
                _tf_config("worker", 0, worker=[f"localhost:{1000 + rank}" for rank in range(num_ranks)]),
                mock.patch("hop_tf.strategy.RankRuntime") as runtime,
            ):
                hop_tf.HopStrategy(topology=topology).shutdown()
            identities.append(runtime.call_args.kwargs["identity"]["option topology"])
        self.assertTrue(all(len(identity) < 100 for identity in identities))
        self.assertNotEqual(*identities)


if __name__ == "__main__":
    tf.test.main()

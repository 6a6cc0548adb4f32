"""The parts of hop_tf.tools.ray, without a cluster."""

import contextlib
import importlib.util
import json
import os
import pathlib
import tempfile
import types
import unittest
import unittest.mock

import keras
import numpy as np
from absl.testing import absltest, parameterized

import hop_tf
from hop_tf.tools.processes.local_cluster import PortReservation, ProcessError, hold_port

_HAS_RAY = importlib.util.find_spec("ray") is not None
if _HAS_RAY:
    import ray.train

    from hop_tf.tools.ray import ClusterConfig, ReportCheckpointCallback, backend, reports, worker

_NEEDS_RAY = unittest.skipUnless(_HAS_RAY, "needs the extra `ray`: ray cannot be imported")
_NUM_ROWS, _BATCH_SIZE = 32, 8


def _fit(callbacks, epochs, initial_epoch=0):
    """Trains a model that is the same in each call, as the first one of a process.

    Returns:
      The model, and the epochs that it has made.
    """
    reports._has_begun = False
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    x = np.random.default_rng(0).normal(size=(_NUM_ROWS, 4)).astype("float32")
    history = model.fit(
        x,
        x[:, :1],
        batch_size=_BATCH_SIZE,
        shuffle=False,
        epochs=epochs,
        initial_epoch=initial_epoch,
        verbose=0,
        callbacks=callbacks,
    )
    return model, history.epoch


@_NEEDS_RAY
class ReportCheckpointCallbackTest(parameterized.TestCase):
    """With what Ray Train offers its workers, in this process."""

    def setUp(self):
        super().setUp()
        self.folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
        self.reports = []
        self.checkpoint = None
        fakes = {
            "report": self.report,
            "get_checkpoint": lambda: self.checkpoint,
            "get_context": lambda: types.SimpleNamespace(get_world_rank=lambda: 0),
        }
        for name, fake in fakes.items():
            self.enter_context(unittest.mock.patch.object(ray.train, name, fake))

    def report(self, metrics, checkpoint=None):
        self.reports.append((metrics, checkpoint is not None))
        if checkpoint is not None:
            self.checkpoint = ray.train.Checkpoint(checkpoint.to_directory(self.folder / f"{len(self.reports)}"))

    def in_attempt(self, name, is_rejoining):
        attempt = worker.Attempt(name, is_rejoining)
        return unittest.mock.patch.object(worker, "_attempt", attempt)

    def test_reports_each_epoch(self):
        _fit([ReportCheckpointCallback(checkpoint_epochs=2)], epochs=3)
        self.assertEqual([metrics["epoch"] for metrics, _ in self.reports], [0, 1, 2, 2])
        self.assertEqual([has_checkpoint for _, has_checkpoint in self.reports], [False, True, False, False])
        saved = keras.models.load_model(os.path.join(self.checkpoint.path, "model.keras"))
        self.assertEqual(int(saved.optimizer.iterations), 2 * _NUM_ROWS // _BATCH_SIZE)
        self.assertIsInstance(self.reports[0][0]["loss"], float)

    def test_without_checkpoints(self):
        _fit([ReportCheckpointCallback(checkpoint_epochs=None)], epochs=2)
        self.assertIsNone(self.checkpoint)
        self.assertLen(self.reports, 3)

    @parameterized.parameters(True, False)
    def test_goes_on_from_the_checkpoint(self, save_weights_only):
        whole, _ = _fit([], epochs=5)
        _fit([ReportCheckpointCallback(save_weights_only=save_weights_only)], epochs=3)
        model, epochs = _fit([ReportCheckpointCallback(save_weights_only=save_weights_only)], epochs=5)
        self.assertEqual(epochs, [3, 4])
        for value, expected in zip(model.get_weights(), whole.get_weights(), strict=True):
            np.testing.assert_allclose(value, expected, rtol=1e-5)  # Momentum goes on, too.

    @parameterized.parameters(True, False)
    def test_a_second_fit_begins_anew(self, has_own_callback):
        _fit([ReportCheckpointCallback()], epochs=3)
        callback = ReportCheckpointCallback()
        model, _ = _fit([callback], epochs=5)
        callback = ReportCheckpointCallback() if has_own_callback else callback
        history = model.fit(np.ones((8, 4)), np.ones((8, 1)), epochs=2, verbose=0, callbacks=[callback])
        self.assertEqual(history.epoch, [0, 1])

    def test_who_joins_counts_as_the_others(self):
        """They have begun at epoch 3, and have made a checkpoint since; the model comes from them, not from it."""
        with self.in_attempt("first", False):
            _fit([ReportCheckpointCallback()], epochs=3)
        with self.in_attempt("second", False):
            _fit([ReportCheckpointCallback()], epochs=5)
        fresh, _ = _fit([], epochs=6, initial_epoch=3)
        with self.in_attempt("second", True):
            model, epochs = _fit([ReportCheckpointCallback()], epochs=6)
        self.assertEqual(epochs, [3, 4, 5])
        for value, expected in zip(model.get_weights(), fresh.get_weights(), strict=True):
            np.testing.assert_array_equal(value, expected)

    def test_who_joins_before_a_checkpoint_counts_as_the_others(self):
        with self.in_attempt("first", False):
            _fit([ReportCheckpointCallback()], epochs=3)
        with self.in_attempt("second", True):
            _, epochs = _fit([ReportCheckpointCallback()], epochs=5)
        self.assertEqual(epochs, [3, 4])

    def test_a_fit_that_raises_leaves_no_epoch_behind(self):
        class Failing(keras.callbacks.Callback):
            def on_train_batch_begin(self, batch, logs=None):
                raise OSError("failed on purpose")

        _fit([ReportCheckpointCallback()], epochs=3)
        failing = Failing()
        with self.assertRaisesRegex(OSError, "failed on purpose"):
            _fit([ReportCheckpointCallback(), failing], epochs=5)
        history = failing.model.fit(np.ones((8, 4)), np.ones((8, 1)), epochs=2, verbose=0)
        self.assertEqual(history.epoch, [0, 1])

    def test_a_checkpoint_of_another_kind(self):
        (self.folder / "other").mkdir()
        (self.folder / "other" / "weights").touch()
        self.checkpoint = ray.train.Checkpoint(self.folder / "other")
        with self.assertRaisesRegex(hop_tf.errors.HopError, r"training_state.json. Received: one with \['weights'\]"):
            _fit([ReportCheckpointCallback()], epochs=1)

    def test_other_ranks_follow(self):
        """`fit` raises the error that ended the thread that follows rank 0: otherwise rank 0 would wait for ever."""

        def report(metrics):
            self.reports.append(metrics)
            if len(self.reports) == 3:
                raise OSError("Ray is gone")

        context = types.SimpleNamespace(get_world_rank=lambda: 1)
        with (
            unittest.mock.patch.object(ray.train, "get_context", lambda: context),
            unittest.mock.patch.object(ray.train, "report", report),
            unittest.mock.patch.object(reports, "_follower", None),
            self.assertRaisesRegex(OSError, "Ray is gone"),
        ):
            reports._follow()
            reports._follower.join(60)
            _fit([ReportCheckpointCallback()], epochs=1)
        self.assertEqual(self.reports, [{}] * 3)

    def test_refuses(self):
        with self.assertRaisesRegex(ValueError, "checkpoint_epochs.*Received: checkpoint_epochs=0"):
            ReportCheckpointCallback(checkpoint_epochs=0)
        with self.assertRaisesRegex(ValueError, "save_weights_only"):
            ReportCheckpointCallback(save_weights_only=1)


class _Group:
    """Workers that are functions of this process."""

    def __init__(self, places, resources):
        self._places = places  # Rank and host of each.
        self._resources = resources
        self.environments = {}

    def __len__(self):
        return len(self._places)

    def get_resources_per_worker(self):
        return self._resources

    def execute(self, function):
        return [self.execute_single(index, function) for index in range(len(self))]

    def execute_single(self, index, function):
        rank, host = self._places[index]
        return {worker.reserve_address: f"{host}:{1000 + rank}", worker.own_rank: rank, worker.own_host: host}[function]

    def execute_single_async(self, index, function, environment, **keywords):
        with (
            unittest.mock.patch.dict(os.environ, {"OMP_NUM_THREADS": "1"}, clear=True),
            unittest.mock.patch.object(worker, "_attempt", None),
            unittest.mock.patch.object(worker, "_port", contextlib.nullcontext()),  # As after `reserve_address`.
        ):
            function(environment, **keywords)
            self.environments[index] = dict(os.environ)
        return worker.current_attempt()


@_NEEDS_RAY
class BackendTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.enter_context(unittest.mock.patch.object(ray, "get", lambda calls: calls))

    def start(self, restart, resources=None):
        self.group = _Group([(0, "a"), (1, "a"), (2, "b")], resources or {"CPU": 1})
        config = ClusterConfig(restart=restart)
        started = object.__new__(config.backend_cls)  # A call would give the one that it has given before.
        started.__init__()
        started.on_start(self.group, config)
        return started, config

    def test_workers_are_ranks(self):
        self.start("group")
        environments = self.group.environments
        for rank, environment in environments.items():
            tf_config = json.loads(environment["TF_CONFIG"])
            self.assertEqual(tf_config["cluster"], {"worker": ["a:1000", "a:1001", "b:1002"]})
            self.assertEqual(tf_config["task"], {"type": "worker", "index": rank})
            self.assertEqual(environment["OMP_NUM_THREADS"], "1")  # As Ray has set it.
            self.assertIn("TF_NUM_INTRAOP_THREADS", environment)
        (token,) = {environment["HOP_TF_CLUSTER_TOKEN"] for environment in environments.values()}
        self.assertGreaterEqual(len(token), 32)

    def test_each_attempt_has_a_token_of_its_own(self):
        started, config = self.start("group")
        tokens = {self.group.environments[0]["HOP_TF_CLUSTER_TOKEN"]}
        started.on_shutdown(self.group, config)
        started.on_start(self.group, config)
        tokens.add(self.group.environments[0]["HOP_TF_CLUSTER_TOKEN"])
        self.assertLen(tokens, 2)

    @parameterized.parameters(({"CPU": 1}, "-1", None), ({"GPU": 0.5}, None, "true"), ({"GPU": 1}, None, None))
    def test_gpus(self, resources, visible, growth):
        self.start("group", resources)
        environment = self.group.environments[0]
        self.assertEqual(environment.get("CUDA_VISIBLE_DEVICES"), visible)
        self.assertEqual(environment.get("TF_FORCE_GPU_ALLOW_GROWTH"), growth)

    def test_a_worker_takes_the_place_of_another(self):
        started, config = self.start("worker")
        one = _Group([(2, "b")], {"CPU": 1})
        started.on_shutdown(one, config)
        started.on_start(one, config)
        self.assertEqual(one.environments[0], self.group.environments[2])

    def test_a_process_that_is_started_again_keeps_its_port(self):
        """No other job's: it listens there later only."""
        self.enter_context(unittest.mock.patch.object(worker, "_port", None))
        with PortReservation(1) as first:
            (port,) = first.ports
        config = {"cluster": {"worker": ["a:1"], "ps": [f"b:{port}"]}, "task": {"type": "ps", "index": 0}}
        worker.keep_port({"TF_CONFIG": json.dumps(config)})
        with contextlib.closing(worker._port):
            worker.keep_port({})  # It has one.
            with self.assertRaisesRegex(ProcessError, f"Port {port} .* is reserved for another job"):
                hold_port(port)
        hold_port(port).close()

    def test_a_worker_elsewhere_cannot_take_its_place(self):
        started, config = self.start("worker")
        with self.assertRaisesRegex(hop_tf.errors.HopError, "rank 2 was restarted on c, because its node b is gone"):
            started.on_start(_Group([(2, "c")], {"CPU": 1}), config)

    def test_what_ray_starts_again(self):
        self.assertFalse(ClusterConfig().backend_cls.has_replica_groups)
        self.assertTrue(ClusterConfig(restart="worker").backend_cls.has_replica_groups)

    def test_an_older_ray_starts_all_again(self):
        with (
            unittest.mock.patch.object(backend, "Backend", object),
            self.assertRaisesRegex(ValueError, "`restart` must be 'group' with Ray"),
        ):
            ClusterConfig(restart="worker")

    @parameterized.parameters(
        ({"restart": "none"}, ValueError, "restart"),
        ({"num_ps": -1}, ValueError, "num_ps"),
        ({"server_options": {}}, TypeError, "`server_options` must be a hop_tf.CommunicationOptions"),
        ({"snapshots": "/path"}, TypeError, "`snapshots` must be a hop_tf.SnapshotOptions"),
    )
    def test_refuses(self, arguments, error, message):
        with self.assertRaisesRegex(error, message):
            ClusterConfig(**arguments)


if __name__ == "__main__":
    absltest.main()

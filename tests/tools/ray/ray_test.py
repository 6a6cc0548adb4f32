"""Ranks that are workers of Ray Train, on a Ray cluster of this machine."""

import importlib.util
import json
import os
import pathlib
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
import unittest
import unittest.mock

import keras
import psutil
import pytest
from absl.testing import absltest, parameterized

import hop_tf
from hop_tf.tools.processes.group import ProcessServer  # noqa: F401  (tells that processes are started)

_HAS_RAY = importlib.util.find_spec("ray") is not None
_ENVIRONMENT = {
    "RAY_AUTH_TOKEN": secrets.token_hex(32),  # Otherwise Ray writes one to the home folder.
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
_EXAMPLE = pathlib.Path(__file__).parents[3] / "examples" / "ray_digits.py"
_TIMEOUT_SECONDS = 200.0
_SLOW_STEP_SECONDS = 2.0
_BATCH_SIZE = 64
_NUM_ROWS = 1280
_EPOCHS = (8, 7, 8)  # By rank, where ranks need not make equally many.
_STEPS_PER_EPOCH = _NUM_ROWS // _BATCH_SIZE

if _HAS_RAY:
    import ray
    import ray.cloudpickle
    import ray.train
    from ray.train.tensorflow import TensorflowTrainer

    from hop_tf.tools.ray import ClusterConfig, ReportCheckpointCallback

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Workers cannot import tests.


def _data():
    from sklearn.datasets import load_digits  # Workers get what it gives.

    digits = load_digits()
    return digits.images.reshape(-1, 64).astype("float32") / 16.0, digits.target


def _options():
    return hop_tf.CommunicationOptions(
        cluster_token=os.environ["HOP_TF_CLUSTER_TOKEN"], timeout_seconds=_TIMEOUT_SECONDS
    )


class _Life(keras.callbacks.Callback):
    """Records the epochs of one of a rank's processes, and lets the process end.

    Args:
      folder: Folder for the files of all processes, one for each that has begun `fit`.
      rank: This rank.
      at_step: Called after each step with the number of steps and the number of the rank's earlier processes.
    """

    def __init__(self, folder, rank, at_step):
        super().__init__()
        self._at_step = at_step
        self._number = len(list(pathlib.Path(folder).glob(f"life_{rank}_*")))
        self._path = pathlib.Path(folder) / f"life_{rank}_{self._number}"
        self._num_steps = 0
        self.seen = {"epochs": [], "pid": os.getpid()}

    def on_train_begin(self, logs=None):
        self.write()

    def on_epoch_begin(self, epoch, logs=None):
        self.seen["epochs"].append(epoch)

    def on_train_batch_end(self, batch, logs=None):
        self._num_steps += 1
        self._at_step(self._num_steps, self._number)

    def write(self, **more):
        self.seen.update(more)
        unfinished = self._path.with_suffix(".part")
        unfinished.write_text(json.dumps(self.seen))
        unfinished.rename(self._path)


def _train(strategy, config, at_step, epochs):
    """Trains digits; leaves what it has seen."""
    x, y = config["data"]
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.layers.Input((64,)),
                keras.layers.Dense(32, activation="relu"),
                keras.layers.Dense(10, activation="softmax"),
            ]
        )
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "sparse_categorical_crossentropy", metrics=["accuracy"])
    life = _Life(config["folder"], strategy.rank, at_step)
    model.fit(
        x[:_NUM_ROWS],
        y[:_NUM_ROWS],
        batch_size=_BATCH_SIZE,
        epochs=epochs,
        verbose=0,
        callbacks=[life, ReportCheckpointCallback()],
    )
    life.write(
        accuracy=model.evaluate(x[_NUM_ROWS:], y[_NUM_ROWS:], verbose=0)[1],
        iterations=int(model.optimizer.iterations),
        weights=[float(value) for value in model.get_weights()[-1]],
        report={name: value for name, value in strategy.report().items() if isinstance(value, int | float)},
        keras=keras.__version__,
        environment={name: value for name, value in os.environ.items() if name.startswith(("TF_", "CUDA_"))},
    )


def _is_there(path, seconds):
    """True if the file exists within the given time."""
    deadline = time.monotonic() + seconds
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return path.exists()


def _listening_on(port):
    """The process that does."""
    connections = psutil.net_connections("tcp")
    (pid,) = {each.pid for each in connections if each.laddr.port == port and each.status == psutil.CONN_LISTEN}
    return pid


def _lose_a_rank(config):
    """A rank is killed in the second epoch. The others wait for its next life in the third.

    Then they go on slowly until it has joined them, which it does between two of their steps. However slow the machine
    is, the rank first prepares its own: at full pace, the others could have ended by then.
    """
    os.environ["HOP_TF_STEP_SECONDS"] = "0.02"  # Skipping a step takes less.
    strategy = hop_tf.HopStrategy(on_peer_loss="continue", communication_options=_options())
    victim = config["victim"]
    folder = pathlib.Path(config["folder"])
    is_back, has_joined = folder / f"life_{victim}_1", folder / "has_joined"

    def at_step(num_steps, life):
        if strategy.rank == victim:
            if (num_steps, life) == (_STEPS_PER_EPOCH + 5, 0):
                os.kill(os.getpid(), signal.SIGKILL)
            if life:
                has_joined.touch()
        elif num_steps >= 2 * _STEPS_PER_EPOCH + 5:
            if not _is_there(is_back, _TIMEOUT_SECONDS):
                raise TimeoutError(f"rank {victim} was not started again in time")
            _is_there(has_joined, _SLOW_STEP_SECONDS)

    _train(strategy, config, at_step, epochs=_EPOCHS[strategy.rank])


def _fail_on_rank_1(config):
    strategy = hop_tf.PipeSGDStrategy(communication_options=_options())

    def at_step(num_steps, life):
        if strategy.rank == 1 and num_steps == 2 * _STEPS_PER_EPOCH + 3 and life == 0:
            raise ValueError("failed on purpose")

    _train(strategy, config, at_step, epochs=5)


def _lose_server(config):
    """The server is killed in the second epoch; Ray starts it again."""
    strategy = hop_tf.SHATParameterServerStrategy(communication_options=_options())

    (address,) = json.loads(os.environ["TF_CONFIG"])["cluster"]["ps"]

    def at_step(num_steps, life):
        if strategy.rank == 0 and num_steps == _STEPS_PER_EPOCH + 5:
            os.kill(_listening_on(int(address.rpartition(":")[2])), signal.SIGKILL)

    _train(strategy, config, at_step, epochs=5)


_NEEDS_RAY = unittest.skipUnless(_HAS_RAY, "needs the extra `ray`: ray cannot be imported")


@_NEEDS_RAY
class RayTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.folder = self.enter_context(tempfile.TemporaryDirectory())
        self.enter_context(unittest.mock.patch.dict(os.environ, _ENVIRONMENT))
        # The paths of Ray's sockets must be short.
        session = self.enter_context(tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True))
        self.addCleanup(ray.shutdown)
        ray.init(
            num_cpus=3,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="error",
            object_store_memory=80 << 20,
            _node_ip_address="127.0.0.1",
            _temp_dir=session,
        )

    def fit(self, train_loop, cluster, num_workers=2, max_failures=0, **config):
        trainer = TensorflowTrainer(
            train_loop,
            train_loop_config={"folder": self.folder, "data": _data(), **config},
            tensorflow_config=cluster,
            scaling_config=ray.train.ScalingConfig(num_workers=num_workers),
            run_config=ray.train.RunConfig(
                storage_path=os.path.join(self.folder, "storage"),
                failure_config=ray.train.FailureConfig(max_failures=max_failures),
            ),
        )
        return trainer.fit()

    def lives(self, rank):
        names = sorted(pathlib.Path(self.folder).glob(f"life_{rank}_?"))
        return [json.loads(name.read_text()) for name in names]

    def check_checkpoint(self, result, epochs):
        self.assertEqual(result.metrics["epoch"], epochs - 1)
        with result.checkpoint.as_directory() as directory:
            model = keras.models.load_model(os.path.join(directory, "model.keras"))
        x, y = _data()
        _, accuracy = model.evaluate(x[_NUM_ROWS:], y[_NUM_ROWS:], verbose=0)
        self.assertGreater(accuracy, 0.5)  # Chance is 0.1.

    @parameterized.parameters((1, 2), (0, 3))
    @pytest.mark.stress(after=1)
    def test_a_killed_worker_joins_the_others(self, victim, num_workers):
        cluster = ClusterConfig(restart="worker")
        result = self.fit(_lose_a_rank, cluster, num_workers=num_workers, max_failures=1, victim=victim)
        for rank in range(num_workers):
            *_, life = lives = self.lives(rank)
            self.assertLen(lives, 1 + (rank == victim))
            first_epoch = life["epochs"][0]
            self.assertEqual(life["epochs"], list(range(first_epoch, _EPOCHS[rank])))
            if rank == victim:
                self.assertGreaterEqual(first_epoch, 2)
            else:
                self.assertEqual((first_epoch, life["report"]["ranks_lost"]), (0, 1))
            self.assertEqual(life["iterations"], _EPOCHS[rank] * _STEPS_PER_EPOCH)
            self.assertGreater(life["accuracy"], 0.5)  # Chance is 0.1.
            self.assertEqual(life["keras"], keras.__version__)
            self.assertNotIn("TF_USE_LEGACY_KERAS", life["environment"])
            self.assertIn("TF_NUM_INTRAOP_THREADS", life["environment"])
            self.assertEqual(life["environment"]["CUDA_VISIBLE_DEVICES"], "-1")
        self.check_checkpoint(result, epochs=_EPOCHS[0])

    @pytest.mark.stress
    def test_all_workers_go_on_from_the_last_checkpoint(self):
        result = self.fit(_fail_on_rank_1, ClusterConfig(), max_failures=1)
        seconds = []
        for rank in range(2):
            _, second = self.lives(rank)
            self.assertEqual(second["epochs"], [2, 3, 4])
            self.assertEqual(second["iterations"], 5 * _STEPS_PER_EPOCH)
            seconds.append(second)
        self.assertEqual(seconds[0]["weights"], seconds[1]["weights"])
        self.check_checkpoint(result, epochs=5)

    @pytest.mark.stress
    def test_an_exception_is_told(self):
        with self.assertRaises(ray.train.WorkerGroupError) as raised:
            self.fit(_fail_on_rank_1, ClusterConfig())
        self.assertIn("failed on purpose", str(raised.exception))
        self.assertIsInstance(raised.exception.worker_failures[1], ValueError)

    @pytest.mark.stress
    def test_a_server_is_started_again(self):
        snapshots = hop_tf.SnapshotOptions(directory=os.path.join(self.folder, "snapshots"), every_pushes=5)
        result = self.fit(_lose_server, ClusterConfig(num_ps=1, snapshots=snapshots))
        for rank in range(2):
            (life,) = self.lives(rank)
            self.assertEqual(life["epochs"], list(range(5)))
            self.assertEqual(life["report"]["server_restarts"], 1)
        self.check_checkpoint(result, epochs=5)

    @pytest.mark.stress
    def test_no_room_for_servers(self):
        os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = "2"
        with self.assertRaisesRegex(ray.train.TrainingFailedError, "waited 2 s for room for 2 parameter servers"):
            self.fit(_lose_server, ClusterConfig(num_ps=2))


@_NEEDS_RAY
class ExampleTest(absltest.TestCase):
    @pytest.mark.stress
    def test_digits(self):
        folder = self.enter_context(tempfile.TemporaryDirectory())
        program = subprocess.run(
            [sys.executable, str(_EXAMPLE), "--epochs=2", f"--storage={folder}"],
            env=os.environ | _ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
        )
        self.assertEqual(program.returncode, 0, program.stdout)
        (accuracy,) = re.findall(r"accuracy after epoch 2: ([\d.]+)", program.stdout)
        self.assertGreater(float(accuracy), 0.3)  # Chance is 0.1.


if __name__ == "__main__":
    absltest.main()

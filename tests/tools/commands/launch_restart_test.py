"""`hop_tf launch --restart` with training: all ranks begin anew, or one joins the others, or a server comes back."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import tempfile
import textwrap
from unittest import mock

import keras
import numpy as np
import pytest
from absl.testing import absltest

import hop_tf
from hop_tf import __main__ as command_line
from hop_tf.tools.commands import launch  # noqa: F401  (tells that processes are started)

_TIMEOUT_SECONDS = 240

_HEADER = """
    import json, os, signal, time
    import keras
    import numpy as np
    import hop_tf

    task = json.loads(os.environ["TF_CONFIG"])["task"]
    rank, name = task["index"], f"{task['type']}_{task['index']}"
    is_first = not os.path.exists(f"started_{name}")
    with open(f"started_{name}", "w") as file:
        file.write(str(os.getpid()))
    options = hop_tf.CommunicationOptions(timeout_seconds=60)
    x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")

    def make_model(strategy):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
        return model

    class At(keras.callbacks.Callback):
        def __init__(self, call):
            super().__init__()
            self._call = call
            self._num_steps = 0

        def on_train_batch_end(self, batch, logs=None):
            self._num_steps += 1
            self._call(self._num_steps)

    def fit(model, call, num_epochs):
        callbacks = [At(call)]
        history = model.fit(
            x, x[:, :1], batch_size=8, epochs=num_epochs, shuffle=False, verbose=0, callbacks=callbacks
        )
        weights = [weight.tolist() for weight in model.get_weights()]
        print("result", json.dumps([history.epoch, weights]))
"""

_ALL_FAIL = """
    strategy = hop_tf.PipeSGDStrategy(pipeline_width=1, communication_options=options)

    def call(num_steps):
        if is_first and rank == 1 and num_steps == 11:
            os.kill(os.getpid(), signal.SIGKILL)

    fit(make_model(strategy), call, 3)
"""

_JOINS = """
    strategy = hop_tf.HopStrategy(on_peer_loss="continue", communication_options=options)
    model = make_model(strategy)

    def call(num_steps):
        if rank == 1 and is_first and num_steps == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1 and not is_first and not strategy.training.runtime.joining:
            open("joined", "w").close()
        if rank == 0 and num_steps > 5 and not os.path.exists("joined"):
            time.sleep(0.1)

    if rank == 1 and not is_first:
        open("about_to_join", "w").close()

    def wait_and_call(num_steps):
        while rank == 0 and num_steps == 5 and not os.path.exists("about_to_join"):
            time.sleep(0.01)  # The launcher ends a job that takes too long.
        call(num_steps)

    fit(model, wait_and_call, 50)
"""


_SERVER = """
    snapshots = None
    if os.environ.get("SNAPSHOTS"):
        snapshots = hop_tf.SnapshotOptions(directory="snapshots", every_pushes=1)
    options = hop_tf.CommunicationOptions(timeout_seconds=200)  # To start a process takes long on a busy machine.
    strategy = hop_tf.SHATParameterServerStrategy(snapshots=snapshots, communication_options=options)

    def call(num_steps):
        if rank == 0 and is_first and num_steps == 11:
            with open("started_ps_0") as file:
                os.kill(int(file.read()), getattr(signal, os.environ["SIGNAL"]))

    fit(make_model(strategy), call, 3)
"""


class LaunchRestartTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        self.directory = self.enter_context(tempfile.TemporaryDirectory())
        root = os.path.dirname(os.path.abspath(hop_tf.__path__[0]))
        self.enter_context(mock.patch.dict(os.environ, PYTHONPATH=root, TF_CPP_MIN_LOG_LEVEL="3"))

    def run_job(self, code, *flags, num_workers=2):
        """The exit code, the results of all ranks, and launch.json."""
        folder = tempfile.mkdtemp(dir=self.directory)
        script, log_dir = os.path.join(folder, "script.py"), os.path.join(folder, "logs")
        with open(script, "w") as file:
            file.write(textwrap.dedent(_HEADER) + textwrap.dedent(code))
        stream = io.StringIO()
        flags = [
            f"--log_dir={log_dir}",
            f"--timeout_seconds={_TIMEOUT_SECONDS}",
            f"--num_workers={num_workers}",
            *flags,
        ]
        with contextlib.redirect_stdout(stream), contextlib.chdir(folder):
            exit_code = command_line.main(["launch", *flags, script])
        output = stream.getvalue()
        with open(os.path.join(log_dir, "launch.json")) as file:
            summary = json.load(file)
        found = {rank: json.loads(result) for rank, result in re.findall(r"\[worker (\d)\] result (.*)", output)}
        self.assertLen(found, num_workers, output)
        return exit_code, [found[str(rank)] for rank in range(num_workers)], summary

    @pytest.mark.stress
    def test_a_job_whose_ranks_all_fail_with_one_begins_anew(self):
        exit_code, results, summary = self.run_job(_ALL_FAIL, "--restart=3")
        self.assertEqual(exit_code, 0)
        self.assertEqual(results[0], results[1])
        self.assert_expected(results[0][1])
        first, second = ([(each["exit_code"], each["signal"]) for each in t["earlier"]] for t in summary["tasks"])
        self.assertEqual(first[0], (1, None))
        self.assertEqual(second[0], (-9, "SIGKILL"))

    @pytest.mark.stress
    def test_a_killed_rank_joins_the_others(self):
        exit_code, results, summary = self.run_job(_JOINS, "--restart=1")
        self.assertEqual(exit_code, 0)
        self.assertEqual([epochs for epochs, _ in results], [list(range(50))] * 2)
        self.assertEqual([task["restarts"] for task in summary["tasks"]], [0, 1])

    def assert_expected(self, weights):
        """They are what plain Keras learns."""
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
        x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
        model.fit(x, x[:, :1], batch_size=8, epochs=3, shuffle=False, verbose=0)
        for values, expected in zip(weights, model.get_weights(), strict=True):
            np.testing.assert_allclose(values, expected, rtol=1e-4)

    def _run_with_server(self, **environment):
        """Returns the exit code, the weights, and the numbers of restarts of the worker and of the server."""
        with mock.patch.dict(os.environ, environment):
            exit_code, (result,), summary = self.run_job(_SERVER, "--restart=1", "--num_ps=1", num_workers=1)
        worker, server = (task["restarts"] for task in summary["tasks"])
        return exit_code, result[1], worker, server

    @pytest.mark.slow
    @pytest.mark.stress
    def test_a_server_with_snapshots_comes_back_into_the_training(self):
        exit_code, weights, *restarts = self._run_with_server(SNAPSHOTS="1", SIGNAL="SIGTERM")
        self.assertEqual(exit_code, 0)
        self.assertEqual(restarts, [0, 1])
        self.assert_expected(weights)

    @pytest.mark.stress
    def test_with_a_server_without_snapshots_the_job_begins_anew(self):
        exit_code, weights, num_worker_restarts, num_server_restarts = self._run_with_server(SIGNAL="SIGKILL")
        self.assertEqual(exit_code, 0)
        self.assertEqual(num_worker_restarts, 1)
        self.assertGreaterEqual(num_server_restarts, 1)
        self.assert_expected(weights)

    @pytest.mark.stress
    def test_a_killed_rank_joins_others_in_lock_step(self):
        code = _JOINS.replace("HopStrategy", "PipeSGDStrategy")
        exit_code, [(epochs, weights), of_newcomer], summary = self.run_job(code, "--restart=1")
        self.assertEqual((exit_code, epochs), (0, list(range(50))))
        self.assertEqual(of_newcomer, [epochs, weights])  # To the bit.
        self.assertEqual([task["restarts"] for task in summary["tasks"]], [0, 1])


if __name__ == "__main__":
    absltest.main()

"""Tests of SHAT between processes: servers that end by themselves, and killed workers and servers."""

import itertools
import json
import os
import pathlib
import re
import signal
import tempfile
import textwrap
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import hop_tf
from hop_tf.tools.testing import MultiProcessRunner

_BATCH_SIZE = 6
_NUM_STEPS = 40
_NUM_EPOCHS = 3
_RATE = 0.01
_STEP_SECONDS = 0.02
_TIMEOUT_SECONDS = 20
# Timeout for tests of losses; and limit until all have reported them, also on a busy machine: half of the default.
_IMPATIENT_SECONDS = 4
_CONTRACT_SECONDS = _IMPATIENT_SECONDS + 26
_FOREVER = 10**6


class _Announce(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        print("step", batch, flush=True)


def _model(strategy, loss=lambda y, y_pred: tf.reduce_sum(y_pred, -1)):
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(9, use_bias=False, kernel_initializer="zeros")])
        # The gradient of each weight is the mean of its input, whatever the weights are.
        model.compile(keras.optimizers.SGD(_RATE), loss=loss)
    return model


def _run(
    snapshot_dir=None,
    num_epochs=_NUM_EPOCHS,
    every_pushes=10,
    consistency="async",
    timeout_seconds=_TIMEOUT_SECONDS,
    interval=1,
):
    """Trains on ones: each push subtracts `_RATE` from each weight, so weights show the number of pushes.

    With an interval above 1, each step that was pushed subtracts a part of that.
    """
    os.environ["HOP_TF_STEP_SECONDS"] = str(_STEP_SECONDS)
    strategy = hop_tf.SHATParameterServerStrategy(
        pushes="gradients" if interval == 1 else "steps",
        interval=interval,
        consistency=consistency,
        snapshots=snapshot_dir and hop_tf.SnapshotOptions(directory=snapshot_dir, every_pushes=every_pushes),
        communication_options=hop_tf.CommunicationOptions(timeout_seconds=timeout_seconds),
    )
    model = _model(strategy)
    x = np.ones((_BATCH_SIZE * _NUM_STEPS, 4), "float32")
    error = ""
    try:
        model.fit(x, x, batch_size=_BATCH_SIZE, epochs=num_epochs, verbose=0, callbacks=[_Announce()])
        strategy.synchronize(model)
    except hop_tf.errors.HopError as raised:
        error = f"{type(raised).__name__}: {raised}"
    report = strategy.report()
    strategy.shutdown()
    weights = model.get_weights()[0]
    return float(-weights.mean() / _RATE), float(np.ptp(weights)), report["steps"], error


def _run_with_restarts(snapshot_dir, consistency="async", every_pushes=10, interval=1):
    """Trains as `_run`; returns the pushes in the weights, the losses, and the numbers of restarts and lost pushes."""
    os.environ["HOP_TF_STEP_SECONDS"] = str(_STEP_SECONDS)
    strategy = hop_tf.SHATParameterServerStrategy(
        pushes="gradients" if interval == 1 else "steps",
        interval=interval,
        consistency=consistency,
        snapshots=hop_tf.SnapshotOptions(directory=snapshot_dir, every_pushes=every_pushes),
        communication_options=hop_tf.CommunicationOptions(timeout_seconds=3 * _TIMEOUT_SECONDS),
    )
    model = _model(strategy)
    x = np.ones((_BATCH_SIZE * _NUM_STEPS, 4), "float32")
    history = model.fit(x, x, batch_size=_BATCH_SIZE, epochs=_NUM_EPOCHS, verbose=0, callbacks=[_Announce()])
    strategy.synchronize(model)
    report = strategy.report()
    strategy.shutdown()
    # The numbers of pushes in the weights of each server.
    pushes = np.unique(np.round(-model.get_weights()[0] / _RATE, 2))
    return pushes.tolist(), history.history["loss"], report["server_restarts"], report["pushes_lost"]


def _stop(gates, name):
    """Stops at a named pipe until the test opens it, too."""
    path = f"{gates}/{name}"
    os.mkfifo(path)
    print("stops at", name, flush=True)
    with open(path):
        pass


def _stop_before_the_first_push(gates):
    """Trains as `_run`. Stops before servers hear of a model, and again before the first push to the model."""
    strategy = hop_tf.SHATParameterServerStrategy(
        pushes="gradients", communication_options=hop_tf.CommunicationOptions(timeout_seconds=_TIMEOUT_SECONDS)
    )
    steps = itertools.count()

    def compute():
        if next(steps) == 0:
            _stop(gates, f"step of {strategy.rank}")
        return np.float32(1)

    def loss(y, y_pred):  # A factor: without it there is no gradient to push.
        return tf.reduce_sum(y_pred, -1) * tf.reshape(tf.numpy_function(compute, [], tf.float32), ())

    model = _model(strategy, loss)
    _stop(gates, f"start of {strategy.rank}")
    x = np.ones((_BATCH_SIZE * _NUM_STEPS, 4), "float32")
    model.fit(x, x, batch_size=_BATCH_SIZE, verbose=0)
    strategy.synchronize(model)
    strategy.shutdown()
    return model.get_weights()[0]


def _train_until_it_fails(consistency, num_epochs, fault=""):
    """Trains as `_run` with short deadlines; prints the error, or that there was none."""
    is_server = json.loads(os.environ["TF_CONFIG"])["task"]["type"] == "ps"
    if is_server and fault == "absent":
        return
    strategy = hop_tf.SHATParameterServerStrategy(
        pushes="gradients",
        consistency=consistency,
        max_staleness=3,
        communication_options=hop_tf.CommunicationOptions(
            timeout_seconds=_IMPATIENT_SECONDS,
            cluster_token="another" if is_server and fault == "token" else "the job's",
        ),
    )
    model = _model(strategy)
    x = np.ones((_BATCH_SIZE * _NUM_STEPS, 4), "float32")
    print("begins", flush=True)
    try:
        model.fit(x, x, batch_size=_BATCH_SIZE, epochs=num_epochs, verbose=0, callbacks=[_Announce()])
        print("has trained", flush=True)
    except hop_tf.errors.HopError as error:
        print(f"raised {type(error).__name__}: {' '.join(str(error).split())}", flush=True)
    strategy.shutdown()
    print("is gone", flush=True)


def _restart_server(runner, index):
    """Restarts a server as soon as it has ended."""
    deadline = time.monotonic() + _TIMEOUT_SECONDS
    while True:
        try:
            return runner.restart(index, task_type="ps")
        except RuntimeError:  # The server still runs.
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


class ShatProcessesTest(tf.test.TestCase, parameterized.TestCase):
    @pytest.mark.stress
    def test_servers_end_when_the_workers_are_done(self):
        with MultiProcessRunner(_run, num_workers=2, num_ps=2, args=(None, 1)) as runner:
            results = runner.join().raise_for_errors()
        for num_pushes, spread, _, error in results.values:
            self.assertEqual(error, "")
            self.assertAllClose(num_pushes, 2 * _NUM_STEPS, rtol=1e-4)
            self.assertAllClose(spread, 0.0, atol=1e-6)
        self.assertEqual([result.exit_code for result in results.ps], [0, 0])
        self.assertEqual([result.value for result in results.ps], [None, None])  # Servers return nothing.

    @parameterized.parameters(("async", 1), ("bsp", 1), ("async", 7))
    @pytest.mark.stress(after=1)
    @pytest.mark.slow
    def test_a_killed_worker_is_not_waited_for_and_joins_again(self, consistency, interval):
        num_epochs = 4 * _NUM_EPOCHS  # The others train on until the worker is back, also on a busy machine.
        args = (None, num_epochs, None, consistency, _TIMEOUT_SECONDS, interval)
        with MultiProcessRunner(_run, num_workers=3, num_ps=1, args=args) as runner:
            runner.wait_for_output(2, "step 10")
            runner.kill(2)
            runner.restart(2)
            results = runner.join().raise_for_errors()
        values, num_steps_each = results.values, _NUM_STEPS * num_epochs
        self.assertEqual([error for *_, error in values], [""] * 3)
        self.assertEqual([num_steps for _, _, num_steps, _ in values], [num_steps_each] * 3)
        # Updates: each push of both of its incarnations, or each step of all, in part with it alone at the end.
        least, most = (3 * num_steps_each + 10, 3 * num_steps_each + _NUM_STEPS)
        if consistency == "bsp":
            least, most = num_steps_each + 10, 2 * num_steps_each
        if interval > 1:  # A step counts a third, and half while the others are alone.
            least, most = num_steps_each, most / 2
        for num_updates, spread, *_ in values:
            self.assertBetween(num_updates, least, most)
            self.assertAllClose(spread, 0.0, atol=1e-6)
        if interval == 1:
            self.assertAllClose(values[0][0], round(values[0][0]), atol=0.05)

    # A server that is asked to end writes a last snapshot, so that only pushes in flight are lost. A server that dies
    # within the first interval has the snapshot of the first push.
    @parameterized.parameters((signal.SIGKILL, 10, 10), (signal.SIGTERM, 10, 0), (signal.SIGKILL, _FOREVER, _FOREVER))
    @pytest.mark.stress
    def test_a_server_that_ends_is_an_error_and_its_next_incarnation_goes_on(self, signum, every_pushes, most_lost):
        directory = self.enterContext(tempfile.TemporaryDirectory())
        exit_code = -signum if signum == signal.SIGKILL else 128 + signum
        args = (directory, 50, every_pushes, "async", _IMPATIENT_SECONDS)
        with MultiProcessRunner(_run, num_workers=2, num_ps=2, args=args) as runner:
            runner.wait_for_output(0, "step 30")
            runner.send_signal(1, signum, task_type="ps")
            results = runner.join()
        self.assertEqual([result.exit_code for result in results.ps], [0, exit_code])
        for *_, error in results.values:
            self.assertRegex(error, r"^PeerLostError: .*(ps 1 at \S+ failed .* not started again in time|gave up)")
        num_steps = [num_steps for _, _, num_steps, _ in results.values]
        with MultiProcessRunner(_run, num_workers=2, num_ps=2, args=(directory, 1)) as runner:
            results = runner.join().raise_for_errors()
        ((num_pushes, spread, _, error), _) = results.values
        self.assertEqual(error, "")
        # The mean over both shards, which have lost at most those pushes, and the ones in flight.
        before = num_pushes - 2 * _NUM_STEPS
        self.assertBetween(before, sum(num_steps) - most_lost - 3, sum(num_steps) + 2)
        self.assertLess(spread / _RATE, most_lost + 3)

    @parameterized.parameters(
        (signal.SIGKILL, "async", 1),
        (signal.SIGTERM, "async", 1),
        (signal.SIGKILL, "bsp", 1),
        (signal.SIGKILL, "ssp", 1),
        (signal.SIGKILL, "async", 5),
    )
    @pytest.mark.stress
    def test_a_server_that_is_started_again_goes_on_with_the_training(self, signum, consistency, interval):
        directory = self.enterContext(tempfile.TemporaryDirectory())
        args = (directory, consistency, 10 if interval == 1 else 2, interval)
        with MultiProcessRunner(_run_with_restarts, num_workers=2, num_ps=2, args=args) as runner:
            runner.wait_for_output(0, "step 30")
            runner.send_signal(1, signum, task_type="ps")
            _restart_server(runner, 1)
            runner.wait_for_output(0, "ps 1 at .* was restarted, and resumes from its snapshot of [1-9]")
            results = runner.join().raise_for_errors()
        num_steps = _NUM_STEPS * _NUM_EPOCHS
        is_half = consistency == "bsp" or interval > 1  # Of two workers, each step counts half, or two are one update.
        num_updates = num_steps if is_half else 2 * num_steps
        for _, losses, num_restarts, _ in results.values:
            self.assertEqual(num_restarts, 1)
            self.assertLess(losses[-1], losses[0])
        (pushes, *_, known), (others, *_, known_by_other) = results.values
        self.assertEqual(pushes, others)
        self.assertAllClose(pushes[-1], num_updates, atol=0.1)
        # A rank knows of those before its last answer, and repeats what was not answered.
        num_lost = max(known, known_by_other) / (2 if is_half else 1)
        self.assertAllClose(num_updates - pushes[0], num_lost * interval, atol=2.1 * interval)
        self.assertLessEqual(num_lost, 0 if signum == signal.SIGTERM else 12)

    @pytest.mark.slow
    @pytest.mark.stress
    def test_a_server_that_is_started_again_without_snapshots_is_an_error(self):
        with MultiProcessRunner(_run, num_workers=2, num_ps=1, args=(None, 50)) as runner:
            for rank in range(2):
                runner.wait_for_output(rank, "step 10")
            runner.kill(0, task_type="ps")
            runner.restart(0, task_type="ps")
            results = runner.join()
        for *_, error in results.values:
            self.assertRegex(error, "^PeerLostError: .*(no process listens there|was restarted, and has lost its)")

    @pytest.mark.stress
    def test_a_server_that_is_restarted_before_the_first_push_is_initialized_again(self):
        gates = self.enterContext(tempfile.TemporaryDirectory())
        with MultiProcessRunner(_stop_before_the_first_push, num_workers=2, num_ps=2, args=(gates,)) as runner:
            for server, place in enumerate(("start", "step")):
                for rank in range(2):
                    runner.wait_for_output(rank, f"stops at {place} of {rank}")
                runner.kill(server, task_type="ps")
                runner.restart(server, task_type="ps")
                for rank in range(2) if place == "step" else ():  # Before, it may never have met the first process.
                    runner.wait_for_output(rank, f"rank {2 + server} .*was restarted")
                for rank in range(2):
                    with open(f"{gates}/{place} of {rank}", "w"):
                        pass
            results = runner.join().raise_for_errors()
        for weights in results.values:
            self.assertAllClose(weights, np.full((4, 9), -2 * _NUM_STEPS * _RATE), rtol=1e-4)

    @pytest.mark.stress(after=1)
    @pytest.mark.slow
    def test_a_killed_server_is_an_error_within_the_deadline(self):
        """If round trips are long, the deadline is twice the timeout, and not `progress_timeout_seconds`, an hour."""
        with MultiProcessRunner(_run, num_workers=2, num_ps=2, args=(None, 50)) as runner:
            for rank in range(2):
                runner.wait_for_output(rank, "step 10")
            runner.kill(1, task_type="ps")
            results = runner.join()
        for rank, (*_, error) in enumerate(results.values):
            pattern = (
                rf"^PeerLostError: rank {rank}, step \d+: receive model of push \d+ on ps 1 at 127\S* failed after "
            )
            self.assertRegex(error, pattern)
            self.assertLess(float(re.search(pattern + r"(\S+) s ", error)[1]), 2 * _TIMEOUT_SECONDS)

    @pytest.mark.slow
    @pytest.mark.stress
    def test_a_frozen_server_is_an_error(self):
        with MultiProcessRunner(_train_until_it_fails, 2, num_ps=1, args=("async", _FOREVER)) as runner:
            for rank in range(2):
                runner.wait_for_output(rank, "step 10")
            runner.pause(0, task_type="ps")
            self._wait_for_errors(
                runner, r"PeerLostError: rank {rank}, step \d+: receive model of push \d+ on ps 0 at 127.*\(silent for"
            )
            runner.kill(0, task_type="ps")
            runner.join()

    def _wait_for_errors(self, runner, error):
        """Checks that every worker raises in time an error that names the server and the cause, and ends."""
        deadline = time.monotonic() + _CONTRACT_SECONDS
        for rank in range(2):
            for pattern in ("raised .*" + error.replace("{rank}", str(rank)), "is gone"):
                runner.wait_for_output(rank, pattern, deadline - time.monotonic())

    @parameterized.parameters(
        ("absent", r"DeadlineExceededError: rank \d: .* on ps 0 at 127.*\(it never appeared"),
        ("token", r"DeadlineExceededError: rank \d: .* on ps 0 at 127"),
    )
    @pytest.mark.stress(after=1)
    @pytest.mark.slow
    def test_a_server_that_was_not_started_or_is_of_another_job_is_an_error(self, fault, error):
        with MultiProcessRunner(_train_until_it_fails, 2, num_ps=1, args=("async", 1, fault)) as runner:
            for rank in range(2):
                runner.wait_for_output(rank, "begins")
            self._wait_for_errors(runner, error)
            results = runner.join()
        self.assertEqual([result.exit_code for result in results.workers], [0, 0])
        for result in results.workers:  # The server may have been refused, and have ended, before a worker was.
            self.assertEqual("cluster token" in result.output, fault == "token")

    @parameterized.parameters("ssp", "async")
    @pytest.mark.stress
    def test_the_others_go_on_without_a_frozen_worker(self, consistency):
        with MultiProcessRunner(_train_until_it_fails, 2, num_ps=1, args=(consistency, 5)) as runner:
            runner.wait_for_output(1, "step 10")
            runner.pause(1)
            runner.wait_for_output(0, "continues without rank 1", _CONTRACT_SECONDS, task_type="ps")
            runner.wait_for_output(0, "has trained")
            runner.resume(1)
            runner.wait_for_output(1, "raised PeerLostError: rank 1.*(continues without rank 1|ps 0 at 127)")
            results = runner.join().raise_for_errors()
        self.assertEqual(results.ps[0].exit_code, 0)

    @pytest.mark.slow
    def test_serves_on_the_command_line(self):
        script = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory())) / "script.py"
        script.write_text(
            textwrap.dedent(
                f"""
                import json, os, sys
                sys.path.insert(0, {os.path.dirname(os.path.abspath(__file__))!r})
                if json.loads(os.environ["TF_CONFIG"])["task"]["type"] == "ps":
                    from hop_tf.__main__ import main
                    sys.exit(main(["serve", "--timeout_seconds={_TIMEOUT_SECONDS}"]))
                import {pathlib.Path(__file__).stem} as test
                print("value", json.dumps(test._run(None, 1)))
                """
            )
        )
        with MultiProcessRunner(script, num_workers=1, num_ps=1) as runner:
            results = runner.join().raise_for_errors()
        value = json.loads(re.search("^value (.*)$", results[0].output, re.MULTILINE)[1])
        self.assertAllClose(value[0], _NUM_STEPS, rtol=1e-4)
        self.assertEqual(value[3], "")


if __name__ == "__main__":
    tf.test.main()

"""Emulated compute in the training graph, alone, under HopStrategy, and from the launcher."""

import contextlib
import io
import itertools
import json
import os
import pathlib
import tempfile
import textwrap
import threading
import time
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import hop_tf
from hop_tf.runtime.plugins import requested_plugins
from hop_tf.strategies.hop.exchange import HopExchange
from hop_tf.tools.commands import launch
from hop_tf.tools.emulation import ComputeEmulation
from hop_tf.tools.emulation.compute import EmulatedCompute
from hop_tf.tools.testing import MultiProcessRunner

_DEADLINE_SECONDS = 150.0
# Clocks differ a little: the delay is measured on another one than the test's.
_CLOCK_TOLERANCE_SECONDS = 1e-3
_NUM_ROWS = 32
_BATCH_SIZE = 4
_NUM_STEPS = _NUM_ROWS // _BATCH_SIZE

# How Keras runs a training step.
_MODES = {
    "graph": {},
    "steps_per_execution": {"steps_per_execution": 4},
    "eagerly": {"run_eagerly": True},
}


def _fit(strategy, on_batch_end=None, **compile_args):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", **compile_args)
    callbacks = [keras.callbacks.LambdaCallback(on_train_batch_end=on_batch_end)] if on_batch_end else []
    x, y = np.ones((_NUM_ROWS, 4), "float32"), np.ones((_NUM_ROWS, 1), "float32")
    model.fit(x, y, batch_size=_BATCH_SIZE, verbose=0, callbacks=callbacks)


class EmulatedComputeTest(tf.test.TestCase, parameterized.TestCase):
    def make(self, durations):
        compute = EmulatedCompute(iter(durations))
        self.addCleanup(compute.close)
        return compute

    @parameterized.named_parameters(("eagerly", lambda step: step), ("in_a_graph", tf.function))
    def test_delays_gradients(self, decorate):
        compute = self.make([0.02, 0.08, 0.04])
        step = decorate(lambda: compute.delay(tf.timestamp(), [tf.constant([1.0, 2.0])]))
        for duration in (0.02, 0.08, 0.04):
            start = time.monotonic()
            (gradient,) = step()
            self.assertGreaterEqual(time.monotonic() - start, duration - _CLOCK_TOLERANCE_SECONDS)
            self.assertAllEqual(gradient, [1.0, 2.0])

    def test_delays_every_step_of_a_loop_in_a_graph(self):
        compute = self.make(itertools.repeat(0.01))

        @tf.function
        def run():
            total = tf.constant(0.0)
            for _ in tf.range(10):
                (gradient,) = compute.delay(tf.timestamp(), [tf.constant(1.0)])
                total += gradient
            return total

        run.get_concrete_function()
        start = time.monotonic()
        self.assertEqual(float(run()), 10.0)
        self.assertGreaterEqual(time.monotonic() - start, 0.1 - _CLOCK_TOLERANCE_SECONDS)

    def test_counts_from_the_start_of_the_step(self):
        """Real computation is a part of the emulated time: of an hour, a twentieth of a second is left."""
        compute = self.make([3600.05])
        start = time.monotonic()
        compute.delay(tf.timestamp() - 3600, [tf.constant(1.0)])
        self.assertGreaterEqual(time.monotonic() - start, 0.05 - _CLOCK_TOLERANCE_SECONDS)

    def test_gradients_keep_their_form(self):
        compute = self.make(itertools.repeat(0.0))
        sparse = tf.IndexedSlices(tf.ones([2, 3]), tf.constant([4, 1]), tf.constant([5, 3]))

        @tf.function
        def step():
            return compute.delay(tf.timestamp(), [tf.ones([2]), None, sparse])

        for dense, nothing, slices in (step(), compute.delay(tf.timestamp(), [tf.ones([2]), None, sparse])):
            self.assertAllEqual(dense, [1.0, 1.0])
            self.assertIsNone(nothing)
            self.assertIsInstance(slices, tf.IndexedSlices)
            self.assertAllEqual(slices.indices, [4, 1])
            self.assertAllEqual(slices.dense_shape, [5, 3])

    def test_other_operations_do_not_wait(self):
        """Operations that do not need the gradients run during the delay: here such an operation ends the delay."""
        released = threading.Event()
        compute = self.make(_duration_after(released))

        @tf.function
        def step():
            (gradient,) = compute.delay(tf.timestamp(), [tf.constant(1.0)])
            tf.numpy_function(released.set, [], [])
            return gradient

        self.assertEqual(float(step()), 1.0)
        self.assertTrue(released.is_set())

    def test_close_ends_the_thread(self):
        compute = self.make(itertools.repeat(0.0))
        compute.delay(tf.timestamp(), [tf.constant(1.0)])
        compute.close()
        compute.close()
        self.assertNotIn("hop_tf emulated compute", [thread.name for thread in threading.enumerate()])


def _duration_after(event):
    """One duration, given out when `event` has happened."""
    if not event.wait(_DEADLINE_SECONDS):
        raise TimeoutError("the event did not happen.")
    yield 0.0


class EnvironmentTest(tf.test.TestCase, parameterized.TestCase):
    def test_nothing_is_emulated_by_default(self):
        self.assertEmpty(requested_plugins(0, 1))

    @parameterized.parameters(*_MODES)
    @pytest.mark.stress(but=2)
    def test_a_world_of_one(self, mode):
        """From the end of one batch to that of the next, every step in between takes the emulated time."""
        ends = []
        environment = ComputeEmulation(step_seconds=0.02).to_environment()
        with mock.patch.dict(os.environ, environment):
            strategy = hop_tf.HopStrategy()
        self.addCleanup(strategy.shutdown)
        _fit(strategy, on_batch_end=lambda batch, logs: ends.append(time.monotonic()), **_MODES[mode])
        steps_per_batch = _MODES[mode].get("steps_per_execution", 1)
        self.assertLen(ends, _NUM_STEPS // steps_per_batch)
        for first, second in itertools.pairwise(ends):
            self.assertGreaterEqual(second - first, 0.02 * steps_per_batch - _CLOCK_TOLERANCE_SECONDS)


class _Gate:
    """Durations of 0 s, each given out only when one more of the neighbor's updates has come."""

    def __init__(self):
        self._arrived = threading.Semaphore(0)
        self.num_passed = 0
        self.num_missed = 0

    def watch(self, exchange_class):
        """Notices the updates that exchanges of that class get."""
        on_update = exchange_class._on_update

        def notice(exchange, message):
            on_update(exchange, message)
            self._arrived.release()

        return mock.patch.object(exchange_class, "_on_update", notice)

    def __iter__(self):
        while True:
            if self._arrived.acquire(timeout=10.0):
                self.num_passed += 1
            else:
                self.num_missed += 1
            yield 0.0


def _hold_gradients_until_the_neighbor_has_sent(mode):
    gate = _Gate()
    with gate.watch(HopExchange):
        strategy = hop_tf.HopStrategy(topology="ring")
        strategy.training._plugins = [EmulatedCompute(iter(gate))]
        _fit(strategy, **_MODES[mode])
        strategy.shutdown()
    return gate.num_passed, gate.num_missed


class SendTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters("steps_per_execution", "graph")
    @pytest.mark.stress
    def test_parameters_leave_while_gradients_are_held_back(self, mode):
        """Each rank holds its gradients of step k back until the other's x_k is there: both must have left before."""
        with MultiProcessRunner(_hold_gradients_until_the_neighbor_has_sent, num_workers=2, args=(mode,)) as runner:
            values = runner.join().raise_for_errors().values
        self.assertEqual(values, [(_NUM_STEPS, 0)] * 2)


_SCRIPT = """
    import json, os
    import keras
    import numpy as np
    import hop_tf

    strategy = hop_tf.HopStrategy(topology="complete")
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(np.ones((60, 4), "float32"), np.ones((60, 1), "float32"), batch_size=6, verbose=0)
    reports = strategy.gather_reports()
    if strategy.is_chief:
        with open(os.environ["REPORTS"], "w") as file:
            json.dump(reports, file)
    strategy.shutdown()
"""


class LaunchTest(tf.test.TestCase):
    @pytest.mark.stress
    def test_the_report_shows_the_slow_rank(self):
        """Rank 0 waits for rank 1, and rank 1 does not wait."""
        directory = self.enter_context(tempfile.TemporaryDirectory())
        script, reports_path = os.path.join(directory, "script.py"), os.path.join(directory, "reports.json")
        pathlib.Path(script).write_text(textwrap.dedent(_SCRIPT))
        flags = ["--num_workers=2", "--step_seconds=0.02", "--slowdown=1:15x", f"--timeout_seconds={_DEADLINE_SECONDS}"]
        environment = {"REPORTS": reports_path, "PYTHONPATH": os.pathsep.join(launch.sys.path)}
        output = io.StringIO()
        with mock.patch.dict(os.environ, environment), contextlib.redirect_stdout(output):
            exit_code = launch.main([f"--log_dir={directory}/logs", *flags, script])
        self.assertEqual(exit_code, 0, output.getvalue())
        with open(reports_path) as file:
            reports = json.load(file)
        self.assertEqual([report["steps"] for report in reports], [10, 10])
        waits = [report["wait_seconds"] for report in reports]
        self.assertEqual(np.argmin(waits), 1, waits)
        with open(os.path.join(directory, "logs", "launch.json")) as file:
            summary = json.load(file)
        self.assertEqual(summary["cpu_busy_period"], "steps")
        self.assertEqual(summary["emulation"]["slowdowns"], ["1:15x"])


if __name__ == "__main__":
    tf.test.main()

"""Tests of a rank's counters, also in a real TensorBoard."""

import functools
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import urllib.parse
import urllib.request
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

import hop_tf
from disks import mounted_disk
from hop_tf.cluster import Cluster
from hop_tf.options import CommunicationOptions
from hop_tf.records import Kind, Recorder
from hop_tf.runtime.curves import find_curve
from hop_tf.runtime.report import ReportWriter, StepStatistics, static_identity
from hop_tf.tools.testing import MultiProcessRunner
from support.transports import wait_until

_DEADLINE_SECONDS = 90.0
# As TensorBoard sorts them, those of Hop.
_GROUPS = [f"hop_tf {name}" for name in ("milliseconds of a step", "network", "outcomes", "processes")]
_BYTES_SENT = "hop_tf network/bytes sent per step"
_TENSORBOARD_SECONDS = 240.0  # It imports TensorFlow in several processes.


class StaticIdentityTest(tf.test.TestCase):
    def test_names_what_ranks_must_agree_on(self):
        identity = static_identity("HopStrategy", Cluster(("a:1", "b:2"), 0), {"max_iteration_gap": "8"})
        self.assertEqual(identity["cluster"], "a:1,b:2")
        self.assertEqual(identity["strategy"], "HopStrategy")
        self.assertEqual(identity["option max_iteration_gap"], "8")
        self.assertEqual(identity["version of tensorflow"], ".".join(tf.__version__.split(".")[:2]))
        self.assertEqual(identity["version of keras"], ".".join(keras.__version__.split(".")[:2]))
        self.assertEqual(identity["version of hop_tf"], hop_tf.__version__)

    def test_is_the_same_on_all_ranks(self):
        identities = [static_identity("S", Cluster(("a:1", "b:2"), rank), {}) for rank in range(2)]
        self.assertEqual(identities[0], identities[1])


class StepStatisticsTest(tf.test.TestCase):
    def test_is_zero_before_the_first_step(self):
        self.assertEqual(StepStatistics().counters(), {"steps": 0, "wait_seconds": 0.0, "compute_seconds": 0.0})

    def test_counts_steps_eagerly_and_in_graphs(self):
        statistics = StepStatistics()
        statistics.count_step()
        tf.function(statistics.count_step)()
        self.assertEqual(statistics.counters()["steps"], 2)

    def test_counts_the_time_from_ready_to_done(self):
        """As in a training step, the result comes through a queue, later than the gradient, and is checked."""
        results = tf.queue.FIFOQueue(1, [tf.float32], shapes=[[]])
        statistics = StepStatistics()

        @tf.function
        def step(gradient):
            result = results.dequeue()
            with tf.control_dependencies([tf.debugging.Assert(result > 0, [result])]):
                result = tf.identity(result)
            statistics.count_wait([2 * gradient], [result])

        step.get_concrete_function(tf.constant(1.0))
        for expected in (0.02, 0.04):
            answer = threading.Thread(target=self._answer, args=(statistics, results, statistics._state.ready_at + 0))
            answer.start()
            step(tf.constant(1.0))
            answer.join()
            self.assertGreaterEqual(statistics.counters()["wait_seconds"], expected)

    def _answer(self, statistics, results, last):
        """Sends a result 0.02 s after the statistics have noted the gradient of a new step."""
        deadline = time.monotonic() + _DEADLINE_SECONDS
        while statistics._state.ready_at == last and time.monotonic() < deadline:
            time.sleep(0.001)
        start = time.time()
        while time.time() < start + 0.02:
            time.sleep(0.001)
        results.enqueue(1.0)

    def test_tells_the_recorder_the_times_of_each_step(self):
        """Also of steps in a loop of the graph, as `steps_per_execution` makes them."""
        statistics, taken = self.make_recorded()
        run = self.make_steps(statistics)
        begin = time.time()
        run(100, 4)
        events = [*taken(is_final=False), *taken(is_final=True)]
        end = time.time()
        of_kinds = [[each for each in events if each["kind"] == kind] for kind in (Kind.COMPUTE, Kind.RESULT)]
        for computed, result in zip(*of_kinds, strict=True):
            self.assertEqual(computed["step"], result["step"])
            self.assertGreaterEqual(computed["seconds"], 0.01)
            self.assertGreaterEqual(result["seconds"], 0.02)
            self.assertGreaterEqual(computed["begin"], begin)
            end_of_step = result["begin"] + result["seconds"]
            self.assertLessEqual(computed["begin"] + computed["seconds"] + 0.02, end_of_step + 1e-6)  # Floats round.
            begin = end_of_step - 1e-6
        self.assertLessEqual(begin, end)
        self.assertEqual([int(each["step"]) for each in of_kinds[0]], [100, 101, 102, 103])
        self.assertEqual([len(taken(is_final)) for is_final in (True, False)], [0, 0])
        run(104, 1)
        self.assertEqual({int(each["step"]) for each in taken(is_final=True)}, {104})
        statistics._recorder.drop.assert_called_with(0)

    def test_tells_the_recorder_the_latest_steps_where_it_asks_late(self):
        statistics, taken = self.make_recorded()

        @tf.function
        def run(last):
            for step in tf.range(last):
                statistics.count_start()
                statistics.count_gradients([step], step)

        run(tf.constant(20_000, tf.int64))
        steps = [int(each["step"]) for each in taken(is_final=True)]
        self.assertEqual(steps, list(range(20_000 - len(steps), 20_000)))
        self.assertGreaterEqual(len(steps), 8000)
        statistics._recorder.drop.assert_called_once_with(20_000 - len(steps))

    def make_recorded(self):
        """Returns statistics, and a function that returns the events for their recorder."""
        sources = []
        recorder = mock.Mock(add_source=sources.append, records=lambda step: True)
        recorder.make_events = functools.partial(Recorder.make_events, mock.Mock(session=1))
        statistics = StepStatistics(recorder)
        return statistics, lambda is_final: sources[0](is_final)

    def make_steps(self, statistics):
        """Returns `run(first, count)`, which makes steps that each compute for 0.01 s and then wait for 0.02 s."""
        gradients, results = (tf.queue.FIFOQueue(1, [tf.float32], shapes=[[]]) for _ in range(2))

        @tf.function
        def run(first, last):
            for step in tf.range(first, last):
                statistics.count_start()
                gradient = gradients.dequeue()
                statistics.count_gradients([gradient], step)
                with tf.control_dependencies([gradient]):
                    result = results.dequeue()
                statistics.count_wait([gradient], [result])

        run.get_concrete_function(*[tf.TensorSpec([], tf.int64)] * 2)
        state, num_starts = statistics._state, 0
        noted = [state.ready_at, state._of_step[1]] if statistics._recorder is not None else [state.ready_at]

        def feed(count):
            """Feeds each gradient and result when the graph has noted the previous one."""
            nonlocal num_starts
            for _ in range(count):
                num_starts += 1
                wait_until(lambda least=num_starts: state._num_starts >= least)
                time.sleep(0.01)
                ready_at = time.time()
                gradients.enqueue(1.0)
                wait_until(lambda since=ready_at: min(map(float, noted)) >= since)
                time.sleep(0.02)
                results.enqueue(1.0)

        def run_fed(first, count):
            feeding = threading.Thread(target=feed, args=(count,))
            feeding.start()
            run(tf.constant(first, tf.int64), tf.constant(first + count, tf.int64))
            feeding.join()

        return run_fed

    @pytest.mark.slow
    def test_computing_is_what_is_left_of_a_step_without_waiting(self):
        statistics = StepStatistics()
        run = self.make_steps(statistics)
        run(0, 1)
        self.assertEmpty(statistics.latest_seconds())
        run(1, 3)
        self.assertLen(statistics.latest_seconds(), 3)
        begin = time.time()
        run(4, 66)
        latest, elapsed = statistics.latest_seconds(), time.time() - begin
        self.assertLen(latest, 64)
        self.assertGreaterEqual(latest.min(), 0.01 - 1e-6)
        self.assertLessEqual(latest.sum() + 64 * 0.02, elapsed)
        self.assertEqual(statistics.counters()["compute_seconds"], np.median(latest))


class ReportWriterTest(tf.test.TestCase, parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.directory = self.enter_context(tempfile.TemporaryDirectory())
        self.called = threading.Semaphore(0)
        self.counters = {"rank": 3, "steps": 0, "bytes_sent": 0}

    def report(self):
        self.called.release()
        return dict(self.counters)

    def make_writer(self, **options):
        writer = ReportWriter(self.report, CommunicationOptions(**options), rank=3)
        self.addCleanup(writer.close)
        return writer

    def records(self):
        """Returns (step, tag, value) of everything written."""
        records = []
        (file,) = os.listdir(os.path.join(self.directory, "rank_3"))
        for event in tf.compat.v1.train.summary_iterator(os.path.join(self.directory, "rank_3", file)):
            for value in event.summary.value:
                records.append((event.step, value.tag, float(tf.make_ndarray(value.tensor))))
        return records

    def test_writes_nothing_without_a_directory(self):
        before = threading.active_count()
        writer = self.make_writer()
        writer.write()
        self.assertEqual(threading.active_count(), before)
        writer.close()
        self.assertFalse(self.called.acquire(blocking=False))

    def test_writes_rates_at_their_step(self):
        writer = self.make_writer(log_dir=self.directory, report_interval_seconds=3600)
        self.counters.update(steps=5, bytes_sent=100)
        writer.write()
        self.counters.update(steps=9, bytes_sent=300)
        writer.close()
        self.assertEqual(self.records(), [(5, _BYTES_SENT, 20.0), (9, _BYTES_SENT, 50.0)])

    def test_writes_what_tensorboard_would_also_where_it_is_not_installed(self):
        """TensorFlow 2.21 for processors does not install TensorBoard."""
        with mock.patch.dict(sys.modules, {"tensorboard": None, "tensorboard.summary.v2": None}):
            with self.assertRaisesRegex(Exception, "TensorBoard is not installed"):
                tf.summary.scalar("name", 1.0, step=0)
            self.counters["steps"] = 1
            self.make_writer(log_dir=self.directory, report_interval_seconds=3600).close()
        self.assertEqual(self.records(), [(1, _BYTES_SENT, 0.0)])

    def test_close_writes_once(self):
        self.counters["steps"] = 1
        writer = self.make_writer(log_dir=self.directory, report_interval_seconds=3600)
        writer.close()
        writer.close()
        self.assertLen(self.records(), 1)
        self.assertNotIn("hop_tf report", [thread.name for thread in threading.enumerate()])

    def test_writes_now_and_then(self):
        self.make_writer(log_dir=self.directory, report_interval_seconds=0.001)
        for _ in range(3):
            self.assertTrue(self.called.acquire(timeout=_DEADLINE_SECONDS))

    @parameterized.parameters(
        ({}, 1000, "No space left on device"),  # Full in the middle.
        ({"num_inodes": 1}, 1, "No space left on device"),
        ({"is_read_only": True}, 1, "Read-only file system"),
    )
    def test_a_disk_that_cannot_be_written_to_ends_the_records_with_one_warning(self, disk, most_writes, reason):
        self.enter_context(mounted_disk(self.directory, **disk))
        self.counters["ranks_lost"] = 0  # Is written without a step, too.
        with self.assertLogs("absl", "WARNING") as logs:
            writer = self.make_writer(log_dir=self.directory, report_interval_seconds=3600)
            for _ in range(most_writes):
                writer.write()
            writer.close()
        (line,) = logs.output
        self.assertIn(f"Cannot write to the files in {self.directory}/rank_3 (`log_dir`): ", line)
        self.assertIn(f"{reason}. Training continues, without", line)
        self.assertNotIn("hop_tf report", [thread.name for thread in threading.enumerate()])

    def test_a_directory_that_cannot_be_made_is_a_warning(self):
        path = os.path.join(self.directory, "file")
        open(path, "w").close()
        with self.assertLogs("absl", "WARNING") as logs:
            writer = self.make_writer(log_dir=os.path.join(path, "logs"))
            writer.write()
            writer.close()
        (line,) = logs.output
        self.assertIn(f"{path} is not a directory. Training continues, without", line)

    def test_goes_on_after_a_report_that_fails(self):
        self.enter_context(mock.patch.object(self, "report", side_effect=self._fail))
        with self.assertLogs("absl", "ERROR") as logs:
            writer = self.make_writer(log_dir=self.directory, report_interval_seconds=0.001)
            for _ in range(3):
                self.assertTrue(self.called.acquire(timeout=_DEADLINE_SECONDS))
        self.assertIn("no counters today", logs.output[0])
        writer.close()

    def _fail(self):
        self.called.release()
        raise KeyError("no counters today")


def _train(log_dir):
    """Fits a small model with records; returns the report."""
    keras.utils.set_random_seed(0)
    options = hop_tf.CommunicationOptions(log_dir=log_dir, report_interval_seconds=0.1)
    strategy = hop_tf.HopStrategy(topology="ring", communication_options=options)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(np.ones((16, 4), "float32"), np.ones((16, 1), "float32"), batch_size=4, verbose=0)
    report = strategy.report()
    strategy.shutdown()
    return report


class _TensorBoard:
    """A TensorBoard process, asked by HTTP."""

    def __init__(self, log_dir, output_path):
        self._deadline = time.monotonic() + _TENSORBOARD_SECONDS
        self._output_path = output_path
        command = [sys.executable, "-m", "tensorboard.main", "--logdir", log_dir, "--host=127.0.0.1", "--port=0"]
        with open(output_path, "w") as output:
            self._process = subprocess.Popen([*command, "--reload_interval=1"], stdout=output, stderr=subprocess.STDOUT)

    def get(self, path, accept, **query):
        """Asks until `accept(answer)` is true, and returns the answer."""
        answer = None
        while not accept(answer):
            if time.monotonic() > self._deadline or self._process.poll() is not None:
                raise AssertionError(f"TensorBoard answered {answer}; it printed:\n{self._printed()}")
            answer = self._ask(path, query)
        return answer

    def _ask(self, path, query):
        address = re.search(r"http://\S+/", self._printed())
        try:
            if address is not None:
                url = f"{address.group()}data/plugin/scalars/{path}?{urllib.parse.urlencode(query)}"
                with urllib.request.urlopen(url, timeout=10) as response:
                    return json.load(response)
        except OSError:
            pass  # Not ready yet, or no such run yet.
        time.sleep(0.1)
        return None

    def _printed(self):
        with open(self._output_path) as output:
            return output.read()

    def close(self):
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)


@unittest.skipIf(importlib.util.find_spec("tensorboard") is None, "needs the package tensorboard")
class TensorBoardTest(tf.test.TestCase):
    @pytest.mark.stress
    def test_shows_the_counters_of_every_rank(self):
        directory = self.enter_context(tempfile.TemporaryDirectory())
        log_dir = os.path.join(directory, "logs")
        board = _TensorBoard(log_dir, os.path.join(directory, "output"))  # Starts while the ranks train.
        self.addCleanup(board.close)
        with MultiProcessRunner(_train, num_workers=2, args=(log_dir,)) as runner:
            reports = runner.join().raise_for_errors().values

        shown = {f"rank_{rank}": self._tags(report) for rank, report in enumerate(reports)}
        tags = board.get(
            "tags", lambda answer: answer and all(shown[run] <= answer.get(run, {}).keys() for run in shown)
        )
        self.assertCountEqual(tags, shown)
        for run, report in zip(shown, reports, strict=True):
            self.assertEqual(sorted({tag.partition("/")[0] for tag in tags[run]}), _GROUPS)
            descriptions = {tag: each["description"] for tag, each in tags[run].items()}
            self.assertIn("Bytes of the messages that this rank sends: headers and values.", descriptions[_BYTES_SENT])
            self.assertNotIn("", descriptions.values())

            # A point is (wall time, step, value); the last one is written on shutdown.
            def is_of_the_end(points):
                return points and points[-1][1] == 4

            points = board.get("scalars", is_of_the_end, run=run, tag=_BYTES_SENT)
            steps = np.diff([0, *(step for _, step, _ in points)])
            total = np.dot(steps, [value for *_, value in points])
            self.assertAllClose(total, report["bytes_sent"], rtol=0.2)  # `shutdown` sends some more.

    def _tags(self, report):
        """Returns the tags of a report's counters, and of the time of a whole step."""
        curves = [find_curve(name) for name in report if name not in ("rank", "steps")]
        return {"hop_tf milliseconds of a step/all", *(curve.tag for curve in curves)}


if __name__ == "__main__":
    tf.test.main()

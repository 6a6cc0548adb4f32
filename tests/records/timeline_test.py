"""The trace of a job: its format, its arrows, and that it tells what has happened."""

import collections
import json
import pathlib
import tempfile
import threading
from unittest import mock

import keras
import numpy as np
import perfetto
import pytest
import tensorflow as tf
from absl.testing import parameterized

import hop_tf
from hop_tf.records import Kind, recorder
from hop_tf.records.events import NONE
from hop_tf.records.log import read_job
from hop_tf.records.timeline import to_trace
from hop_tf.tools.commands import timeline as command
from hop_tf.tools.testing import InProcessCluster, MultiProcessRunner
from support import MEMBERS, NUM_RANKS

_NUM_STEPS = 12


def _train(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3)])
        model.compile("sgd", "mse")
    x, y = np.ones((4 * _NUM_STEPS, 4), "float32"), np.ones((4 * _NUM_STEPS, 3), "float32")
    batch_size = 4 if strategy.world_size == 1 else 4 // strategy.world_size * strategy.world_size
    model.fit(x, y, batch_size=batch_size, validation_data=(x[:4], y[:4]), verbose=0)
    return strategy.report()


def _train_in_process(log_dir):
    options = hop_tf.CommunicationOptions(log_dir=log_dir)
    _train(strategy := hop_tf.SHATParameterServerStrategy(communication_options=options))
    strategy.shutdown()


def check_format(test, trace):
    """Checks what the format demands: see `hop_tf.records.timeline`."""
    json.dumps(trace, allow_nan=False)
    named, last, arrows, open_until = set(), -1.0, collections.defaultdict(dict), {}
    for event in trace["traceEvents"]:
        test.assertIn(event["ph"], ("M", "X", "s", "f", "C", "i"))
        test.assertIsInstance(event["pid"], int)
        test.assertIsInstance(event["name"], str)
        if event["ph"] == "M":
            named.add((event["pid"], event.get("tid")))
            continue
        test.assertGreaterEqual(event["ts"], last)  # In order, from 0 on.
        test.assertGreaterEqual(event["ts"], 0.0)
        for name in {"ts", "dur"} & event.keys():
            test.assertEqual(event[name], round(event[name], 3))  # Perfetto counts nanoseconds.
        last = event["ts"]
        if event["ph"] != "C":
            test.assertIsInstance(event["tid"], int)
            test.assertIn((event["pid"], event["tid"]), named)
        if event["ph"] == "X":
            test.assertGreater(event["dur"], 0.0)
            # Slices of a track lie one behind the other, or one within the other.
            ends = open_until.setdefault((event["pid"], event["tid"]), [])
            while ends and ends[-1] <= event["ts"]:
                ends.pop()
            if ends:
                test.assertLessEqual(event["ts"] + event["dur"], ends[-1] + 1e-6)
            ends.append(event["ts"] + event["dur"])
        if event["ph"] in "sf":
            test.assertNotIn(event["ph"], arrows[event["id"]])
            arrows[event["id"]][event["ph"]] = event
    slices = {(event["pid"], event["tid"], event["ts"]) for event in trace["traceEvents"] if event["ph"] == "X"}
    for ends in arrows.values():
        test.assertCountEqual(ends, "sf")
        test.assertLessEqual(ends["s"]["ts"], ends["f"]["ts"])
        for end in ends.values():
            test.assertIn((end["pid"], end["tid"], end["ts"]), slices)
    return arrows


def check_job(test, job, num_servers):
    """Checks that all steps are there, and both ends of all messages, on one clock."""
    test.assertLen(job.ranks, len(job.processes) - num_servers)
    for process in job.ranks:
        recorded = [int(each["step"]) for each in process.of_kind(Kind.COMPUTE) if each["step"] != NONE]
        test.assertEqual(recorded, sorted(recorded))
        outcomes = [(process.text(each), int(each["number"])) for each in process.of_kind(Kind.OUTCOME)]
        num_skipped = sum(number for name, number in outcomes if name == "skipped")
        test.assertLen({*recorded}, _NUM_STEPS - num_skipped)
        computed, steps = process.of_kind(Kind.COMPUTE), process.of_kind(Kind.STEP)
        test.assertLen(steps, _NUM_STEPS)
        test.assertLen(process.of_kind(Kind.VALIDATION), 1)
        test.assertNotEmpty(process.of_kind(Kind.EXCHANGE))
        for event, step in zip(computed, steps, strict=True) if not num_skipped else ():
            test.assertLessEqual(step["begin"], event["begin"])
            # Floats of 32 bits round.
            test.assertLessEqual(event["begin"] + event["seconds"], step["begin"] + step["seconds"] + 1e-4)
    test.assertNotEmpty(job.transfers)
    # Who is last to end leaves the farewells of others unread.
    test.assertLessEqual(job.num_unmatched, 4 * len(job.processes))
    least = collections.defaultdict(lambda: np.inf)
    for each in job.transfers:
        test.assertGreaterEqual(each.come_at, each.sent_at)
        pair = each.sender, each.receiver
        least[pair] = min(least[pair], each.come_at - each.sent_at)
    for (sender, receiver), seconds in least.items():
        if (receiver, sender) in least:  # By NTP's formula.
            test.assertLess(abs(seconds - least[receiver, sender]) / 2, 1e-3)


class TimelineTest(tf.test.TestCase, parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.directory = self.enter_context(tempfile.TemporaryDirectory())
        self.options = hop_tf.CommunicationOptions(log_dir=self.directory)

    def trace(self):
        self.assertEqual(command.main([self.directory]), 0)
        return json.loads(pathlib.Path(self.directory, "trace.json").read_text())

    def train_with_servers(self):
        def make(cluster_resolver):
            return hop_tf.SHATParameterServerStrategy(
                cluster_resolver=cluster_resolver, communication_options=self.options
            )

        InProcessCluster(4, make, num_ps=2).run(_train)
        return read_job(self.directory)

    @pytest.mark.stress
    def test_four_ranks_and_servers(self):
        job = self.train_with_servers()
        check_job(self, job, num_servers=2)
        arrows = check_format(self, self.trace())
        self.assertLen(arrows, len(job.transfers))
        names = [process.name for process in job.processes]
        self.assertEqual(names, ["rank 0", "rank 1", "rank 2", "rank 3", "ps 0", "ps 1"])
        ways = {(ends["s"]["pid"], ends["f"]["pid"]) for ends in arrows.values()}
        for rank in range(4):
            for server in (4, 5):
                self.assertContainsSubset({(rank, server), (server, rank)}, ways)

    @pytest.mark.stress(after=0)
    def test_four_ranks_and_servers_in_processes(self):
        with MultiProcessRunner(_train_in_process, 4, num_ps=2, args=(self.directory,)) as runner:
            runner.join().raise_for_errors()
        job = read_job(self.directory)
        check_job(self, job, num_servers=2)
        self.assertEqual([process.clock_error_seconds for process in job.processes], [0.0] * 6)
        check_format(self, self.trace())

    @pytest.mark.skipif(bool(perfetto.missing()), reason=perfetto.missing())
    def test_perfetto_opens_it(self):
        job = self.train_with_servers()
        trace = self.trace()
        answers = perfetto.ask(
            pathlib.Path(self.directory, "trace.json"),
            {
                "processes": "select name as value from process where name is not null order by name",
                "slices": "select count(*) as value from slice",
                "arrows": "select count(*) as value from flow",
                "errors": "select name as value from stats where severity in ('error', 'data_loss') and value > 0",
            },
        )
        names = {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}
        num_slices = sum(event["ph"] in "Xi" for event in trace["traceEvents"])  # An instant is one without a duration.
        self.assertEqual(
            answers,
            {
                "processes": sorted(names),
                "slices": [str(num_slices)],
                "arrows": [str(len(job.transfers))],
                "errors": [],
            },
        )

    @parameterized.parameters(*MEMBERS)
    @pytest.mark.stress(but=1)
    @pytest.mark.slow
    def test_every_strategy_has_the_same_keys(self, name):
        MEMBERS[name].run(_train, options=self.options)
        job = read_job(self.directory)
        check_job(self, job, num_servers=MEMBERS[name].num_ps)
        check_format(self, self.trace())
        kinds = set().union(*({Kind(int(kind)).name for kind in each.events["kind"]} for each in job.ranks))
        expected = {"STEP", "COMPUTE", "EXCHANGE", "SEND", "RECEIVE", "WAIT", "VALIDATION", "SESSION"}
        self.assertContainsSubset(expected, kinds)
        self.assertContainsSubset(kinds, {kind.name for kind in Kind})

    @pytest.mark.stress
    def test_a_disk_that_hangs_holds_up_no_training(self):
        """Two calls of `fit`, the first of which ends while it hangs, and the end of the job."""
        opened = threading.Event()
        self.addCleanup(opened.set)
        self.enter_context(mock.patch.object(recorder, "CLOSE_SECONDS", 0.1))
        write = mock.patch.object(recorder.Recorder, "_write_bytes", lambda *_: opened.wait())
        with write, self.assertLogs("absl", "WARNING") as logs:
            reports = MEMBERS["pipe_sgd"].run(lambda strategy: [_train(strategy) for _ in range(2)], self.options)
        self.assertEqual([last["steps"] for _, last in reports], [2 * _NUM_STEPS] * NUM_RANKS)
        self.assertLen([line for line in logs.output if "events are lost" in line], NUM_RANKS)

    def test_no_records(self):
        self.assertEqual(command.main([self.directory]), 1)

    def test_a_job_of_nothing(self):
        options = hop_tf.CommunicationOptions(log_dir=self.directory)
        MEMBERS["hop"].run(lambda strategy: None, options=options)
        check_format(self, to_trace(read_job(self.directory)))


if __name__ == "__main__":
    tf.test.main()

"""Tests of reading recorded files: jobs, clocks, and both ends of messages."""

import pathlib
import tempfile
import time
from unittest import mock

import numpy as np
from absl.testing import absltest

from hop_tf.records import Kind, make_recorder, recorder
from hop_tf.records.log import join_restarts, read_job


def _about(clock, now):
    return {"time": now, "clock": clock}


class LogTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        self.directory = self.enter_context(tempfile.TemporaryDirectory())

    def make(self, rank, clock="clock"):
        with mock.patch.object(recorder, "_clock_name", lambda: clock):
            made = make_recorder(
                pathlib.Path(self.directory) / f"rank_{rank}", number=rank, num_ranks=2, num_servers=0, strategy="S"
            )
        self.addCleanup(made.close)
        return made

    def test_the_last_job_counts(self):
        for _ in range(2):
            made = [self.make(rank) for rank in range(2)]
            for each in made:
                each.close()
        job = read_job(self.directory)
        self.assertLen(job.processes, 2)
        self.assertLen(list(pathlib.Path(self.directory).glob("*/events.*.jsonl")), 4)

    def test_a_process_that_was_started_again_is_of_the_same_job(self):
        other, former = self.make(0), self.make(1)
        former.close()
        made = self.make(1)
        made.close()
        other.close()
        self.assertEqual(
            [process.name for process in read_job(self.directory).processes], ["rank 0", "rank 1", "rank 1 (restarted)"]
        )

    def test_processes_of_a_rank_are_joined(self):
        """Rank 1 is restarted twice. Each process numbers its names anew."""
        other, now = self.make(0), time.time()
        for number, names in enumerate((["a", "b"], ["b", "c"], ["c", "a"])):
            made = self.make(1)
            made.add_line("group", name="0-group", num_values=5)
            for name in names:
                made.add(Kind.WAIT, now + number, peer=0, name=name)
            made.add(Kind.SEND, now + number, peer=0, number=number)
            other.add(Kind.RECEIVE, now + number, peer=1, number=number)
            made.close()
        other.close()
        job = read_job(self.directory)
        self.assertEqual([each.sender for each in job.transfers], [1, 2, 3])
        joined = join_restarts(job)
        self.assertEqual([process.name for process in joined.processes], ["rank 0", "rank 1 (restarted 2 times)"])
        process = joined.processes[1]
        self.assertEqual([process.text(event) for event in process.of_kind(Kind.WAIT)], [*"abbcca"])
        self.assertEqual([line["num_values"] for line in process.lines if line["kind"] == "group"], [5])
        self.assertEqual([(each.sender, each.receiver) for each in joined.transfers], [(1, 0)] * 3)
        self.assertLen(process.starts, 3)

    def test_a_rank_that_was_started_again_on_another_machine(self):
        """The clock of rank 1's first machine is 1000 s behind rank 0's. The second machine's clock is 500 s behind."""
        now, made = time.time(), []
        for rank, clock, ahead in ((0, "a", 0.0), (1, "b", -1000.0), (1, "c", -500.0)):
            with mock.patch.object(recorder, "_describe_process", lambda _, c=clock, s=ahead: _about(c, now + s)):
                made.append(self.make(rank))
        for offset in (-1000.0, -500.0):
            made[0].note_clock(1, offset, 0.01)
            made[0].flush(is_final=True)
        for each in made:
            each.add(Kind.SEND, now)
            each.close()
        begins = [process.events["begin"][0] - now for process in read_job(self.directory).processes]
        np.testing.assert_allclose(begins, [0.0, 1000.0, 500.0], atol=0.02)

    def test_a_message_that_was_sent_again(self):
        """The connection broke while the first message was in flight. An earlier process had used the number before."""
        sender, receiver = self.make(0), self.make(1)
        now = time.time()
        message = {"lane": 1, "name": "queue", "num_bytes": 10, "number": 1}
        for begin in (now, now + 1, now + 2, now + 9):
            sender.add(Kind.SEND, begin, peer=1, step=int(begin - now), **message)
        receiver.add(Kind.RECEIVE, now + 0.5, peer=0, **message)
        receiver.add(Kind.RECEIVE, now + 3, peer=0, **message)
        for each in (sender, receiver):
            each.close()
        job = read_job(self.directory)
        self.assertEqual([each.step for each in job.transfers], [0, 2])
        self.assertEqual(job.num_unmatched, 2)

    def test_two_clocks(self):
        """Rank 1's clock is 100 s ahead, by heartbeats of both."""
        one, other = self.make(0, "a"), self.make(1, "b")
        one.note_clock(1, 100.0, 0.01)
        one.note_clock(1, 250.0, 0.9)  # Its round trip is longer.
        other.note_clock(0, -100.004, 0.02)
        now = time.time()
        one.add(Kind.SEND, now, peer=1, number=1)
        other.add(Kind.RECEIVE, now + 100.05, peer=0, number=1)
        for each in (one, other):
            each.close()
        job = read_job(self.directory)
        (transfer,) = job.transfers
        self.assertAlmostEqual(transfer.come_at - transfer.sent_at, 0.05, delta=0.005)
        self.assertEqual(job.processes[0].clock_error_seconds, 0.0)
        self.assertAlmostEqual(job.processes[1].clock_error_seconds, 0.005)

    def test_another_format(self):
        self.make(0).close()
        (path,) = pathlib.Path(self.directory).glob("rank_0/events.0.jsonl")
        path.write_text(path.read_text().replace('"format": 1', '"format": 99'))
        with self.assertRaisesRegex(ValueError, "has format 99, and this hop_tf reads format 1"):
            read_job(self.directory)


if __name__ == "__main__":
    absltest.main()

"""Tests of records of transports: both ends of the same messages, and the offsets of peers' clocks."""

import json
import pathlib
import tempfile
import time
from unittest import mock

import numpy as np
from absl.testing import absltest

from hop_tf.records import Kind, make_recorder
from hop_tf.records.log import read_job
from hop_tf.transport import grpc_server
from hop_tf.transport.grpc_transport import GrpcTransport
from hop_tf.transport.in_process import InProcessTransport
from hop_tf.transport.tcp_transport import TcpTransport
from support.transports import TransportTestMixin, wait_until


class RecordsContract(TransportTestMixin):
    """Tests of the records of every transport."""

    def setUp(self):
        super().setUp()
        self.directory = self.enter_context(tempfile.TemporaryDirectory())
        self.recorders = [
            make_recorder(pathlib.Path(self.directory) / f"rank_{rank}", number=rank, num_ranks=2, num_servers=0)
            for rank in range(2)
        ]
        for each in self.recorders:
            self.addCleanup(each.close)

    def start_recorded(self):
        transports = self.make()
        for transport, recorder in zip(transports, self.recorders, strict=True):
            transport.recorder = transport._dispatcher.recorder = recorder
            transport.start()
        return transports

    def read(self, transports):
        for transport in transports:
            transport.close()
        for recorder in self.recorders:
            recorder.close()
        return read_job(self.directory)

    def test_messages(self):
        sender, receiver = transports = self.start_recorded()
        collector = self.register(receiver)
        self.recorders[0].begin_step(4)
        arrays = [np.zeros(size, np.uint8) for size in (0, 10, 3 << 20)]
        for lane, array in enumerate(arrays):
            sender.send(1, "queue", b"header", [array], lane=lane)
        collector.wait(3)
        self.assertTrue(sender.flush(1, 60.0))
        job = self.read(transports)
        self.assertEqual(job.num_unmatched, 0)
        messages = sorted(job.transfers, key=lambda each: each.lane)
        self.assertEqual([each.num_bytes for each in messages], [6 + array.size for array in arrays])
        self.assertEqual(
            {(each.sender, each.receiver, each.queue, each.step) for each in messages}, {(0, 1, "queue", 4)}
        )
        for each in messages:
            self.assertLessEqual(each.put_at, each.sent_at)
            self.assertLess(each.sent_at, each.come_at)

    def test_what_the_sender_leaves_out_the_receiver_leaves_out(self):
        sender, receiver = transports = self.start_recorded()
        collector = self.register(receiver)
        for step in (0, 1056, 1088):  # The one in the middle is left out.
            self.recorders[0].begin_step(step)
            sender.send(1, "queue", b"header")
        collector.wait(3)
        self.assertTrue(sender.flush(1, 60.0))
        job = self.read(transports)
        self.assertEqual([(each.step, each.number) for each in job.transfers], [(0, 1), (1088, 3)])
        self.assertEqual(job.num_unmatched, 0)

    def test_who_follows_records_what_answers_recorded_messages(self):
        sender, receiver = transports = self.start_recorded()
        self.recorders[1].follows = True
        answers = self.register(sender, "answer")
        receiver.register("queue", lambda message: receiver.send(0, "answer", message.header))
        for number, step in enumerate((1056, 1088)):
            self.recorders[0].begin_step(step)
            sender.send(1, "queue", b"header")
            answers.wait(number + 1)
        self.assertTrue(sender.flush(1, 60.0) and receiver.flush(0, 60.0))
        job = self.read(transports)
        self.assertEqual([(each.sender, each.number) for each in job.transfers], [(0, 2), (1, 2)])

    def test_how_long_a_handler_takes(self):
        sender, receiver = transports = self.start_recorded()
        gate = self.make_gate()
        receiver.register("queue", gate)
        sender.send(1, "queue", b"header")
        gate.entered.wait(60.0)
        entered = time.time()
        while time.time() < entered + 0.05:
            time.sleep(0.01)
        gate.opened.set()
        self.assertTrue(sender.flush(1, 60.0))
        (received,) = self.read(transports).processes[1].of_kind(Kind.RECEIVE)
        self.assertGreaterEqual(received["seconds"], 0.05)


class InProcessRecordsTest(RecordsContract, absltest.TestCase):
    member = InProcessTransport


class GrpcRecordsTest(RecordsContract, absltest.TestCase):
    member = GrpcTransport

    def test_clocks(self):
        """The clock of who answers is 1000 s ahead: the heartbeats tell that, but for half of a round trip."""
        sender, receiver = transports = self.start_recorded()
        ahead = mock.Mock(time=lambda: time.time() + 1000)
        self.enter_context(mock.patch.object(grpc_server, "time", ahead))
        sender.connect(1)
        wait_until(lambda: self.recorders[0]._clocks)
        transports[0].close()
        self.recorders[0].close()
        lines = pathlib.Path(self.directory, "rank_0", "events.0.jsonl").read_text().splitlines()
        (line,) = [line for line in map(json.loads, lines) if line["kind"] == "clock"]
        self.assertAlmostEqual(line["offset"], 1000.0, delta=line["round_trip"] / 2 + 1e-3)
        self.assertEqual(line["peer"], 1)
        del receiver


class TcpRecordsTest(GrpcRecordsTest):
    member = TcpTransport


if __name__ == "__main__":
    absltest.main()

"""The contract of `Transport`, which every member passes: messages and handlers. See also transport_peers_test.py."""

import functools
import threading

import numpy as np
from absl.testing import absltest

from hop_tf.errors import HopError
from hop_tf.tensors.buffers import BufferPool
from hop_tf.transport.grpc_transport import GrpcTransport
from hop_tf.transport.in_process import InProcessTransport
from hop_tf.transport.outbox import MAX_MESSAGES
from hop_tf.transport.tcp_transport import TcpTransport
from support.transports import DEADLINE_SECONDS, Collector, TransportTestMixin, wait_until


def number(index):
    return index.to_bytes(4, "little")


class MessageContract(TransportTestMixin):
    """Tests of the promises of `Transport` about messages and handlers."""

    # Messages.

    def test_delivers_a_message(self):
        sender, receiver = self.start()
        collector = self.register(receiver)
        sender.send(1, "queue", b"header", [np.arange(5, dtype=np.int32)])
        (message,) = collector.wait(1)
        self.assertEqual((message.sender, message.queue, message.header), (0, "queue", b"header"))
        np.testing.assert_array_equal(message.payload.view(np.int32), np.arange(5))

    def test_payload_is_read_only_aligned_bytes(self):
        sender, receiver = self.start()
        collector = self.register(receiver)
        array = np.arange(1000, dtype=np.float32)
        for payload in ([array], [array[1:]], [array[3:10], array], []):
            sender.send(1, "queue", payload=payload)
        for message in collector.wait(4):
            self.assertEqual(message.payload.dtype, np.uint8)
            self.assertEqual(message.payload.ndim, 1)
            self.assertFalse(message.payload.flags.writeable)
            self.assertEqual(message.payload.ctypes.data % 64, 0)

    def test_payload_is_the_concatenation_of_arrays(self):
        sender, receiver = self.start()
        collector = self.register(receiver)
        # Sizes around the length of a chunk, empty and scalar arrays, and one that is not contiguous.
        generator = np.random.default_rng(1)
        sizes = (1, 0, (1 << 20) - 7, 1 << 20, 3, (1 << 21) + 1)
        arrays = [generator.integers(0, 256, size, dtype=np.uint8) for size in sizes]
        arrays += [np.float64(2.5), np.arange(12, dtype=np.int16).reshape(3, 4).T]
        sender.send(1, "queue", payload=arrays)
        (message,) = collector.wait(1)
        self.assertEqual(message.payload.tobytes(), b"".join(np.asarray(array).tobytes() for array in arrays))

    def test_delivers_payloads_of_any_size(self):
        sender, receiver = self.start()
        collector = self.register(receiver)
        data = np.random.default_rng(1).integers(0, 256, (1 << 20) + 100, dtype=np.uint8)
        sizes = [0, 1, 63, 64, 65, (1 << 20) - 40, (1 << 20) - 36, (1 << 20) - 1, 1 << 20, data.size]
        for size in sizes:
            sender.send(1, "queue", number(size), [data[:size]])
        for size, message in zip(sizes, collector.wait(len(sizes)), strict=True):
            self.assertEqual(message.header, number(size))
            np.testing.assert_array_equal(message.payload, data[:size])

    def test_delivers_a_big_message(self):
        sender, receiver = self.start()
        collector = self.register(receiver)
        data = np.arange(25_000_000, dtype=np.int32)
        sender.send(1, "queue", payload=[data])
        (message,) = collector.wait(1)
        self.assertTrue(np.array_equal(message.payload.view(np.int32), data))

    def test_empty_message_and_header_only(self):
        sender, receiver = self.start()
        collector = self.register(receiver)
        sender.send(1, "queue")
        sender.send(1, "queue", b"x" * (1 << 16))
        sender.send(1, "queue", payload=[np.empty(0, np.float32)])
        self.assertEqual([len(message.header) for message in collector.wait(3)], [0, 1 << 16, 0])
        self.assertEqual([message.payload.size for message in collector.messages], [0, 0, 0])

    def test_refuses_what_cannot_be_sent(self):
        sender, _ = self.start()
        for arguments in (
            {"peer": 0, "queue": "queue"},
            {"peer": 2, "queue": "queue"},
            {"peer": -1, "queue": "queue"},
            {"peer": 1, "queue": ""},
            {"peer": 1, "queue": "q" * 256},
            {"peer": 1, "queue": "queue", "lane": -1},
            {"peer": 1, "queue": "queue", "lane": 16},
            {"peer": 1, "queue": "queue", "header": bytes((1 << 16) + 1)},
        ):
            with self.subTest(**arguments), self.assertRaisesRegex(ValueError, "Received: "):
                sender.send(**arguments)

    # Order.

    def test_keeps_the_order_of_a_lane(self):
        sender, receiver = self.start()
        collector = self.register(receiver)
        generator = np.random.default_rng(1)
        sizes = generator.choice([0, 10, 1000, 300_000, 1_500_000], 300, p=[0.4, 0.3, 0.2, 0.08, 0.02])
        for index, size in enumerate(sizes):
            sender.send(1, "queue", number(index), [np.full(size, index % 251, np.uint8)])
        messages = collector.wait(len(sizes))
        self.assertEqual([message.header for message in messages], [number(i) for i in range(len(sizes))])
        for index, message in enumerate(messages):
            np.testing.assert_array_equal(message.payload, np.full(sizes[index], index % 251, np.uint8))

    def test_keeps_the_order_across_queues_of_a_lane(self):
        sender, receiver = self.start()
        collector = Collector()
        for queue in ("a", "b"):
            receiver.register(queue, collector)
        for index in range(100):
            sender.send(1, "ab"[index % 3 == 0], number(index))
        self.assertEqual([message.header for message in collector.wait(100)], [number(i) for i in range(100)])

    def test_lanes_do_not_wait_for_each_other(self):
        sender, receiver = self.start()
        gate, collector = self.make_gate(), self.register(receiver)
        receiver.register("blocked", gate)
        sender.send(1, "blocked", lane=1)
        self.assertTrue(gate.entered.wait(DEADLINE_SECONDS))
        for index in range(10):
            sender.send(1, "queue", number(index), lane=0)
        collector.wait(10)

    def test_messages_without_a_lane_arrive_once_each(self):
        sender, receiver = self.start()
        collector = self.register(receiver)
        sizes = np.random.default_rng(1).choice([0, 10, 300_000, 1_500_000], 60)
        for index, size in enumerate(sizes):
            sender.send(1, "queue", number(index), [np.full(size, index, np.uint8)], lane=None)
        messages = sorted(collector.wait(len(sizes)), key=lambda message: message.header[0])
        self.assertEqual([message.header for message in messages], [number(i) for i in range(len(sizes))])
        for index, message in enumerate(messages):
            np.testing.assert_array_equal(message.payload, np.full(sizes[index], index, np.uint8))

    def test_interleaves_many_senders_threads_and_lanes(self):
        transports = self.start(num_ranks=3)
        collector = self.register(transports[2])

        def send(rank, lane):
            for index in range(100):
                transports[rank].send(2, "queue", number(index), [np.full(index + 1, lane, np.uint8)], lane=lane)

        threads = [threading.Thread(target=send, args=(rank, lane)) for rank in (0, 1) for lane in (0, 1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_SECONDS)
        messages = collector.wait(600)
        lanes = {(rank, lane): [] for rank in (0, 1) for lane in (0, 1, 2)}
        for message in messages:
            lanes[message.sender, message.payload[0]].append(message.header)
        for headers in lanes.values():
            self.assertEqual(headers, [number(index) for index in range(100)])

    def test_handlers_of_a_lane_run_one_at_a_time(self):
        sender, receiver = self.start()
        collector, running, overlaps = Collector(), threading.Lock(), []

        def handle(message):
            if not running.acquire(blocking=False):
                overlaps.append(message)
                return
            collector(message)
            running.release()

        for index in range(50):
            sender.send(1, "ab"[index % 2], number(index))
        receiver.register("a", handle)
        for index in range(50, 100):
            sender.send(1, "ab"[index % 2], number(index))
        receiver.register("b", handle)
        collector.wait(100)
        self.assertEmpty(overlaps)

    # Handlers.

    def test_holds_messages_until_there_is_a_handler(self):
        sender, receiver = self.start()
        for index in range(20):
            sender.send(1, "late", number(index))
        self.assertTrue(sender.flush(1, DEADLINE_SECONDS))
        collector = self.register(receiver, "late")
        for index in range(20, 40):
            sender.send(1, "late", number(index))
        self.assertEqual([message.header for message in collector.wait(40)], [number(i) for i in range(40)])

    def test_holds_a_bounded_number_of_messages(self):
        sender, receiver = self.start()
        limit = 1024
        threads = [threading.Thread(target=self._send_many, args=(sender, "late", limit + 100))]
        threads[0].start()
        wait_until(lambda: receiver.counters()["messages_received"] == limit)
        self.assertFalse(sender.flush(1, 0.05))
        collector = self.register(receiver, "late")
        messages = collector.wait(limit + 100)
        self.assertEqual([message.header for message in messages], [number(i) for i in range(limit + 100)])
        threads[0].join(DEADLINE_SECONDS)

    def _send_many(self, sender, queue, count):
        for index in range(count):
            sender.send(1, queue, number(index))

    def test_delivers_nothing_after_unregister(self):
        sender, receiver = self.start()
        before = self.register(receiver)
        sender.send(1, "queue", b"first")
        before.wait(1)
        receiver.unregister("queue")
        sender.send(1, "queue", b"second")
        self.assertTrue(sender.flush(1, DEADLINE_SECONDS))
        after = self.register(receiver)
        sender.send(1, "queue", b"third")
        self.assertEqual([message.header for message in after.wait(1)], [b"third"])
        self.assertLen(before.messages, 1)

    def test_drops_what_is_held_for_a_queue_that_is_unregistered(self):
        sender, receiver = self.start()
        sender.send(1, "queue", b"first")
        self.assertTrue(sender.flush(1, DEADLINE_SECONDS))
        receiver.unregister("queue")
        after = self.register(receiver)
        sender.send(1, "queue", b"second")
        self.assertEqual([message.header for message in after.wait(1)], [b"second"])

    def test_a_blocked_handler_stops_only_its_sender(self):
        transports = self.start(num_ranks=3)
        gate, collector = self.make_gate(), self.register(transports[2])
        transports[2].register("blocked", gate)
        transports[0].send(2, "blocked")
        self.assertTrue(gate.entered.wait(DEADLINE_SECONDS))
        transports[0].send(2, "queue", b"from 0")
        transports[1].send(2, "queue", b"from 1")
        self.assertEqual([message.header for message in collector.wait(1)], [b"from 1"])
        gate.opened.set()
        self.assertEqual([message.header for message in collector.wait(2)], [b"from 1", b"from 0"])

    def test_send_blocks_when_too_much_is_in_flight(self):
        sender, receiver = self.start()
        gate = self.make_gate()
        receiver.register("queue", gate)
        sent = []

        def send():
            for index in range(2 * MAX_MESSAGES):
                sender.send(1, "queue")
                sent.append(index)

        thread = threading.Thread(target=send)
        thread.start()
        self.assertTrue(gate.entered.wait(DEADLINE_SECONDS))
        wait_until(lambda: len(sent) >= MAX_MESSAGES)
        # One is in the handler; those before it were acknowledged.
        self.assertLessEqual(len(sent), MAX_MESSAGES + 1)
        gate.opened.set()
        thread.join(DEADLINE_SECONDS)
        self.assertLen(sent, 2 * MAX_MESSAGES)
        self.assertTrue(sender.flush(1, DEADLINE_SECONDS))

    def test_what_supersedes_takes_the_place_of_what_waits(self):
        """And neither blocks nor takes the place of messages to other queues, or of what is being sent."""
        sender, receiver = self.start()
        gate, collector = self.make_gate(), self.register(receiver)
        receiver.register("gate", gate)
        sender.send(1, "gate")
        self.assertTrue(gate.entered.wait(DEADLINE_SECONDS))
        superseded, payload = [], np.zeros(8 << 20, np.uint8)  # More than a socket takes.
        for index in range(2 * MAX_MESSAGES):
            if index == 10:
                sender.send(1, "queue", b"other")
            superseded.append(sender.send(1, "newest", number(index), [payload], supersedes=True))
        newest = self.register(receiver, "newest")
        gate.opened.set()
        self.assertTrue(sender.flush(1, DEADLINE_SECONDS))
        self.assertEqual([message.header for message in collector.wait(1)], [b"other"])
        kept = [index for index, given_way in enumerate(superseded[1:]) if not given_way] + [len(superseded) - 1]
        self.assertEqual([message.header for message in newest.messages], [number(index) for index in kept])
        self.assertLess(len(kept), 10)
        self.assertEqual(sender.counters()["messages_sent"], len(kept) + 2)

    def test_check_ends_a_blocked_send(self):
        sender, receiver = self.start()
        gate = self.make_gate()
        receiver.register("queue", gate)

        def refuse():
            raise KeyError("enough")

        sent = 0
        with self.assertRaisesRegex(KeyError, "enough"):
            while sent <= 2 * MAX_MESSAGES:
                sender.send(1, "queue", check=refuse)
                sent += 1
        self.assertGreaterEqual(sent, MAX_MESSAGES)
        gate.opened.set()
        self.assertTrue(sender.flush(1, DEADLINE_SECONDS))

    def test_handlers_may_send_and_register(self):
        transports = self.start()
        collector = self.register(transports[0], "answer")

        def handle(message):
            transports[1].register("later", lambda later: transports[1].send(0, "answer", later.header))
            transports[1].send(0, "answer", message.header)

        transports[1].register("question", handle)
        transports[0].send(1, "question", b"1")
        transports[0].send(1, "later", b"2")
        self.assertEqual([message.header for message in collector.wait(2)], [b"1", b"2"])

    def test_a_failing_handler_is_reported(self):
        errors = Collector()
        sender, receiver = self.start(on_error=errors)
        collector = self.register(receiver)

        def fail(message):
            raise KeyError("broken")

        receiver.register("broken", fail)
        with self.assertLogs("absl", "ERROR"):
            sender.send(1, "broken")
            self.assertIsInstance(errors.wait(1)[0], KeyError)
        with self.assertRaisesRegex(HopError, "rank 1.*KeyError.*broken"):
            receiver.send(0, "queue")
        self.assertIsInstance(receiver.status(0).failure, HopError)
        self.assertIsNone(sender.status(1).failure)
        sender.send(1, "queue", b"goes on")
        collector.wait(1)

    # Memory.

    def test_memory_is_not_used_again_while_a_view_lives(self):
        pool = BufferPool()
        sender, receiver = self.start(pool=pool)
        collector = self.register(receiver)
        data = np.random.default_rng(1).integers(0, 256, (5, 100_003), dtype=np.uint8)
        for row in data:
            sender.send(1, "queue", payload=[row[:1], row[1:]])
        views = [message.payload[1000:] for message in collector.wait(len(data))]
        collector.messages.clear()
        for _ in range(20):
            sender.send(1, "queue", payload=[np.zeros(1, np.uint8), np.zeros(100_002, np.uint8)])
        collector.wait(20)
        for row, view in zip(data, views, strict=True):
            np.testing.assert_array_equal(view, row[1000:])

    def test_memory_is_used_again(self):
        pool = BufferPool()
        sender, receiver = self.start(pool=pool)
        count, done = [], threading.Event()

        def handle(message):
            count.append(message.payload.size)
            if len(count) == 50:
                done.set()

        receiver.register("queue", handle)
        for _ in range(50):
            sender.send(1, "queue", payload=[np.zeros(1, np.uint8), np.zeros(100_002, np.uint8)])
            self.assertTrue(sender.flush(1, DEADLINE_SECONDS))
        self.assertTrue(done.wait(DEADLINE_SECONDS))
        wait_until(lambda: pool.live_bytes == 0)
        self.assertLess(pool.free_bytes, 5 * 100_002)


class InProcessTransportTest(MessageContract, absltest.TestCase):
    member = InProcessTransport

    def test_an_aligned_payload_is_not_copied(self):
        sender, receiver = self.start()
        collector = self.register(receiver)
        array = BufferPool().take(1000)
        sender.send(1, "queue", payload=[array])
        self.assertEqual(collector.wait(1)[0].payload.ctypes.data, array.ctypes.data)
        self.assertTrue(array.flags.writeable)


class GrpcTransportTest(MessageContract, absltest.TestCase):
    member = GrpcTransport


class TcpTransportTest(MessageContract, absltest.TestCase):
    member = TcpTransport


class TcpTransportBetweenMachinesTest(MessageContract, absltest.TestCase):
    member = functools.partial(TcpTransport, shares_memory=False)


if __name__ == "__main__":
    absltest.main()

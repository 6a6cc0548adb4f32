"""Messages that the thread which waits for them reads itself, and those that it leaves to the connection's thread."""

import contextlib
import itertools
import socket
import threading
import time
import unittest.mock

import numpy as np
from absl.testing import absltest, parameterized

from hop_tf.errors import ProtocolError
from hop_tf.ops import frames
from hop_tf.tensors.buffers import BufferPool
from hop_tf.testing.transports import Collector, TransportTestMixin
from hop_tf.transport import TcpTransport, borrowed, framing, tcp_transport
from hop_tf.transport.base import BULK_LANE, Expected
from hop_tf.transport.checksum import Checksums, NoChecksums
from hop_tf.transport.connection import Connection
from hop_tf.transport.framing import FrameKind, Outgoing
from hop_tf.transport.inbox import Dispatcher
from hop_tf.transport.peer import Peer
from hop_tf.transport.shared_memory import PeerMemory
from hop_tf.transport.tcp_server import Lane

_KEY = bytes(range(32))
_BLOCK = 4096


def _payload(num_bytes):
    return np.random.default_rng(num_bytes).integers(0, 256, num_bytes, np.uint8)


def _frames(checksums, *payloads, first=1, queue=b"queue", header=b"header", ack_requested=False):
    """The frames of messages that follow each other, as one string of bytes for each."""
    messages = [
        Outgoing(
            first + number,
            queue,
            header,
            [payload] if payload.size else [],
            len(header) + payload.size,
            ack_requested,
        )
        for number, payload in enumerate(payloads)
    ]
    return [b"".join(framing.encode_message(message, checksums)) for message in messages]


class _End:
    """A lane, and the socket at its other end.

    Attributes:
      lane: The lane.
      far: The socket.
      delivered: What the queue's handler gets.
    """

    def __init__(self, stack, checksums=Checksums):
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.far = stack.enter_context(socket.create_connection(server.getsockname()))
        connection = Connection(server.accept()[0])
        stack.callback(connection.close)
        connection.end_greeting(sent=checksums(_KEY), received=checksums(_KEY))
        self.delivered = Collector()
        self.errors = []
        dispatcher = Dispatcher(on_error=self.errors.append)
        dispatcher.register("queue", self.delivered)
        inbox = dispatcher.inbox(0, BULK_LANE)
        epoch, _ = inbox.begin(1)
        self.lane = Lane(connection, Peer(0, "host:1"), inbox, epoch, BufferPool())

    def receive(self, *lengths, header=b"header"):
        """Borrows the lane for each message in turn, whether it is lent or not."""
        return [borrowed.receive([self.lane], b"queue", [Expected(0, header, length)])[0] for length in lengths]

    def acknowledged(self):
        """The number in the next acknowledgement."""
        data = self.far.recv(framing.HEAD_BYTES + 8, socket.MSG_WAITALL)
        frame = framing.decode(data, 8)
        assert frame.kind == FrameKind.ACKNOWLEDGE
        return frame.sequence


class _Case(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        if not frames.receives_frames():
            self.skipTest("the native library was not built")
        self.stack = self.enter_context(contextlib.ExitStack())


class ReceiveTest(_Case):
    def setUp(self):
        super().setUp()
        for limit in ("_IDLE_MILLISECONDS", "_TOTAL_MILLISECONDS"):  # A busy machine sends late.
            self.enter_context(unittest.mock.patch.object(borrowed, limit, 60_000))

    @parameterized.product(
        num_bytes=[0, 1, 20, _BLOCK - 1, _BLOCK, _BLOCK + 1, 64 * _BLOCK, 200 * _BLOCK + 5],
        checksums=[Checksums, lambda key: NoChecksums()],
    )
    def test_expected_messages(self, num_bytes, checksums):
        end = _End(self.stack, checksums)
        payloads = [_payload(num_bytes), _payload(3), _payload(num_bytes)]
        sender = threading.Thread(target=lambda: end.far.sendall(b"".join(_frames(checksums(_KEY), *payloads))))
        sender.start()
        for payload in payloads:
            (received,) = end.receive(payload.size)
            np.testing.assert_array_equal(received, payload)
            self.assertFalse(received.flags.writeable)
            self.assertEqual(received.ctypes.data % 64, 0)
        sender.join()
        self.assertEmpty(end.delivered.messages)

    def test_in_the_order_in_which_they_come(self):
        ends = [_End(self.stack) for _ in range(3)]
        payloads = [_payload(2 * _BLOCK + rank) for rank in range(3)]

        def send():
            for rank in (2, 0, 1):
                (data,) = _frames(Checksums(_KEY), payloads[rank])
                for begin in range(0, len(data), 1000):
                    ends[rank].far.sendall(data[begin : begin + 1000])
                    time.sleep(0.001)

        sender = threading.Thread(target=send)
        sender.start()
        expected = [Expected(0, b"header", payload.size) for payload in payloads]
        received = borrowed.receive([end.lane for end in ends], b"queue", expected)
        sender.join()
        for payload, each in zip(payloads, received, strict=True):
            np.testing.assert_array_equal(each, payload)

    def test_what_does_not_come_is_left_to_the_lane(self):
        self.enter_context(unittest.mock.patch.object(borrowed, "_IDLE_MILLISECONDS", 10))
        payload = _payload(_BLOCK + 1)
        (data,) = _frames(Checksums(_KEY), payload)
        for sent in (0, 1, framing.HEAD_BYTES, framing.HEAD_BYTES + 11, len(data) - 9, len(data) - 1):
            with self.subTest(sent=sent), contextlib.ExitStack() as self.stack:
                here, late = _End(self.stack), _End(self.stack)
                here.far.sendall(data)
                late.far.sendall(data[:sent])
                expected = [Expected(0, b"header", payload.size)] * 2
                received = borrowed.receive([here.lane, late.lane], b"queue", expected)
                np.testing.assert_array_equal(received[0], payload)
                self.assertIsNone(received[1])
                late.far.sendall(data[sent:])
                self.assertTrue(late.lane.take_message())
                np.testing.assert_array_equal(late.delivered.messages[0].payload, payload)

    @parameterized.parameters(
        ({"header": b"hEader"}, 20),
        ({"header": b"a longer header, and then some"}, 20),
        ({"header": b""}, 20),
        ({"queue": b"other"}, 20),
        ({}, 19),
        ({}, 21),
        ({}, 0),
        ({}, 10 * _BLOCK),
    )
    def test_another_message_is_left_to_the_lane(self, difference, num_bytes):
        end, sums = _End(self.stack), Checksums(_KEY)
        first, other, last = _payload(20), _payload(num_bytes), _payload(7)
        frames = _frames(sums, first) + _frames(sums, other, first=2, **difference) + _frames(sums, last, first=3)
        end.far.sendall(b"".join(frames))
        (received,) = end.receive(20)
        np.testing.assert_array_equal(received, first)
        self.assertEqual(end.receive(20, 7), [None, None])
        self.assertTrue(end.lane.take_message() and end.lane.take_message())
        self.assertEmpty(end.errors)
        messages = end.delivered.messages
        if "queue" not in difference:
            np.testing.assert_array_equal(messages[0].payload, other)
            self.assertEqual(messages[0].header, difference.get("header", b"header"))
        np.testing.assert_array_equal(messages[-1].payload, last)

    def test_every_bit_that_changes(self):
        payload = _payload(20)
        (data,) = _frames(Checksums(_KEY), payload)
        for number in range(8 * len(data)):
            changed = bytearray(data)
            changed[number // 8] ^= 1 << number % 8
            with contextlib.ExitStack() as self.stack:
                end = _End(self.stack)
                end.far.sendall(changed)
                self.assertEqual(end.receive(20), [None])
                with self.assertRaises(ProtocolError):
                    end.lane.take_message()

    def test_bits_that_change_in_blocks(self):
        payload = _payload(3 * _BLOCK + 9)
        (data,) = _frames(Checksums(_KEY), payload)
        for place in range(len(data) - payload.size - 8, len(data), 997):
            changed = bytearray(data)
            changed[place] ^= 4
            with contextlib.ExitStack() as self.stack:
                end = _End(self.stack)
                end.far.sendall(changed)
                self.assertEqual(end.receive(payload.size), [None])
                with self.assertRaises(ProtocolError):
                    end.lane.take_message()

    def test_a_frame_out_of_its_order(self):
        """Each checksum counts the frames before."""
        end = _End(self.stack)
        first, second = _frames(Checksums(_KEY), _payload(20), _payload(20))
        end.far.sendall(first + first)
        self.assertIsNotNone(end.receive(20)[0])
        self.assertEqual(end.receive(20), [None])
        with self.assertRaises(ProtocolError):
            end.lane.take_message()
        self.assertNotEqual(first, second)

    @parameterized.parameters(0, 1, 60, 5000)
    def test_the_connection_ends(self, num_bytes):
        end = _End(self.stack)
        (data,) = _frames(Checksums(_KEY), _payload(9000))
        end.far.sendall(data[:num_bytes])
        end.far.shutdown(socket.SHUT_WR)
        self.assertEqual(end.receive(9000), [None])
        if num_bytes:
            with self.assertRaises(ConnectionResetError):
                end.lane.take_message()
        else:
            self.assertFalse(end.lane.take_message())

    def test_another_connection_has_begun(self):
        end = _End(self.stack)
        end.far.sendall(_frames(Checksums(_KEY), _payload(20))[0])
        end.lane._inbox.begin(1)
        self.assertEqual(end.receive(20), [None])

    def test_acknowledgements_are_owed(self):
        end = _End(self.stack)
        frames = _frames(Checksums(_KEY), *[_payload(20)] * 18, ack_requested=True)
        end.far.sendall(b"".join(frames))
        end.receive(*[20] * 18)
        self.assertEqual(end.acknowledged(), 16)
        with self.assertRaises(BlockingIOError):
            end.far.recv(1, socket.MSG_DONTWAIT)

    def test_they_are_made_when_no_more_messages_come(self):
        end = _End(self.stack)
        end.far.sendall(b"".join(_frames(Checksums(_KEY), *[_payload(20)] * 2, ack_requested=True)))
        self.assertIsNotNone(end.receive(20)[0])
        self.assertTrue(end.lane.take_message())
        thread = threading.Thread(target=end.lane.take_message)  # Of a third one.
        thread.start()
        self.assertEqual(end.acknowledged(), 2)
        end.far.shutdown(socket.SHUT_WR)
        thread.join()

    def test_large_messages_are_acknowledged_soon(self):
        end = _End(self.stack)
        frames = _frames(Checksums(_KEY), *[_payload(1 << 20)] * 4, ack_requested=True)
        sender = threading.Thread(target=lambda: end.far.sendall(b"".join(frames)))
        sender.start()
        end.receive(*[1 << 20] * 4)
        sender.join()
        self.assertEqual(end.acknowledged(), 4)


class TransportTest(TransportTestMixin, _Case):
    member = TcpTransport

    def _exchange(self, num_messages, disturb=lambda receiver, number: None, num_bytes=500):
        """Rank 0 sends messages, for which rank 1 waits. Returns how many it has read itself, after those checks."""
        sender, receiver = self.start()
        kept = {}
        changed = threading.Condition()

        def handle(message):
            with changed:
                kept[message.header] = message.payload
                changed.notify_all()

        receiver.register("queue", handle)
        headers = [f"{number:06}".encode() for number in range(num_messages)]
        go_on = threading.Semaphore(2)

        def send():
            for number, header in enumerate(headers):
                go_on.acquire()
                disturb(receiver, number)
                sender.send(1, "queue", header, [_payload(num_bytes + number % 3)], lane=BULK_LANE)

        thread = threading.Thread(target=send)
        thread.start()
        num_read = 0
        for number, header in enumerate(headers):
            if header not in kept:
                (payload,) = receiver.receive_now("queue", [Expected(0, header, num_bytes + number % 3)], BULK_LANE)
                if payload is not None:
                    num_read += 1
                    kept[header] = payload
            if header not in kept:
                with receiver.waiting_for([0], BULK_LANE), changed:
                    self.assertTrue(changed.wait_for(lambda header=header: header in kept, 60))
            np.testing.assert_array_equal(kept[header], _payload(num_bytes + number % 3))
            go_on.release()
        thread.join()
        self.assertTrue(sender.flush(1, 60))
        self.assertEqual(sorted(kept), headers)
        self.assertEqual(receiver.counters()["messages_received"], num_messages)
        return num_read

    # Small ones, and those that go through shared memory.
    @parameterized.parameters(500, 200_000)
    def test_most_messages_are_read_by_who_waits(self, num_bytes):
        self.assertGreater(self._exchange(500, num_bytes=num_bytes), 10)

    @parameterized.parameters(500, 200_000)
    def test_none_is_lost_when_connections_break(self, num_bytes):
        def disturb(receiver, number):
            if number % 40 == 39:
                for server in receiver._sockets:
                    for lane in list(server._lanes.values()):
                        lane.end()

        self._exchange(400, disturb, num_bytes)

    def test_none_is_lost_where_a_place_cannot_be(self):
        find, calls = PeerMemory.payload, itertools.count(1)

        def fail_now_and_then(memory, place):
            return find(memory, place if next(calls) % 20 else bytes(16))

        with unittest.mock.patch.object(PeerMemory, "payload", fail_now_and_then):
            self.assertGreater(self._exchange(300, num_bytes=200_000), 10)

    def test_large_and_small_messages_do_not_mix(self):
        """The connection's thread writes the large ones, and the sender the small ones; never both at a time."""
        sender, receiver = self.start()
        collector = Collector()
        receiver.register("queue", collector)
        with self.assertNoLogs("absl", "WARNING"):
            for number in range(20):
                sender.send(1, "queue", b"", [_payload(12 << 20)], lane=BULK_LANE)
                for _ in range(3):
                    sender.send(1, "queue", b"", [_payload(100)], lane=BULK_LANE)
                collector.wait(4 * number + 4)
        self.assertEqual([message.payload.size for message in collector.messages], [12 << 20, 100, 100, 100] * 20)

    def test_other_messages_come_soon(self):
        """Those that nobody expects, on a lane that is lent."""
        sender, receiver = self.start()
        collector = Collector()
        receiver.register("queue", collector)
        for number in range(20):
            with receiver.waiting_for([0], BULK_LANE):
                sender.send(1, "queue", b"", [_payload(10)], lane=BULK_LANE)
                collector.wait(number + 1)

    def test_nothing_is_borrowed_where_there_is_no_native_code(self):
        _, receiver = self.start()
        with unittest.mock.patch.object(frames, "receives_frames", lambda: False):
            tcp_transport._borrowing.cache_clear()
            self.addCleanup(tcp_transport._borrowing.cache_clear)
            self.assertEqual(receiver.receive_now("queue", [Expected(0, b"", 1)], None), [None])


if __name__ == "__main__":
    absltest.main()

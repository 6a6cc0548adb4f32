"""Messages that a thread writes and reads by itself, and those that it leaves to the connections' threads."""

import concurrent.futures
import contextlib
import itertools
import socket
import sys
import threading
import time
import unittest.mock

import numpy as np
import pytest
from absl.testing import absltest, parameterized

from hop_tf.errors import ProtocolError
from hop_tf.ops import frames
from hop_tf.tensors.buffers import BufferPool
from hop_tf.transport import framing, swapping, tcp_transport
from hop_tf.transport.base import BULK_LANE, Expected, ToSend
from hop_tf.transport.checksum import Checksums, NoChecksums
from hop_tf.transport.connection import Connection
from hop_tf.transport.framing import FrameKind, Outgoing
from hop_tf.transport.inbox import Dispatcher
from hop_tf.transport.outbox import Outbox
from hop_tf.transport.peer import Peer
from hop_tf.transport.shared_memory import PeerMemory
from hop_tf.transport.swapping import Letter
from hop_tf.transport.tcp_server import Lane
from hop_tf.transport.tcp_transport import TcpTransport
from support.transports import Collector, TransportTestMixin, wait_until

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


def _read(lanes, expected):
    return swapping.read(swapping.await_all(lanes, b"queue", expected), lanes)


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
        return [_read([self.lane], [Expected(0, header, length)])[0] for length in lengths]

    def acknowledged(self):
        """The number in the next acknowledgement."""
        data = self.far.recv(framing.HEAD_BYTES + 8, socket.MSG_WAITALL)
        frame = framing.decode(data, 8)
        assert frame.kind == FrameKind.ACKNOWLEDGE
        return frame.sequence


class _Case(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        if not frames.exchanges_frames():
            self.skipTest("the native library was not built")
        self.stack = self.enter_context(contextlib.ExitStack())


class ReceiveTest(_Case):
    def setUp(self):
        super().setUp()
        for limit in ("_IDLE_MILLISECONDS", "_TOTAL_MILLISECONDS"):  # A busy machine sends late.
            self.enter_context(unittest.mock.patch.object(swapping, limit, 60_000))

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
        received = _read([end.lane for end in ends], expected)
        sender.join()
        for payload, each in zip(payloads, received, strict=True):
            np.testing.assert_array_equal(each, payload)

    def test_what_does_not_come_is_left_to_the_lane(self):
        self.enter_context(unittest.mock.patch.object(swapping, "_IDLE_MILLISECONDS", 10))
        payload = _payload(_BLOCK + 1)
        (data,) = _frames(Checksums(_KEY), payload)
        for sent in (0, 1, framing.HEAD_BYTES, framing.HEAD_BYTES + 11, len(data) - 9, len(data) - 1):
            with self.subTest(sent=sent), contextlib.ExitStack() as self.stack:
                here, late = _End(self.stack), _End(self.stack)
                here.far.sendall(data)
                late.far.sendall(data[:sent])
                expected = [Expected(0, b"header", payload.size)] * 2
                received = _read([here.lane, late.lane], expected)
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
                expected = [Expected(0, header, num_bytes + number % 3)]
                (payload,) = receiver.swap("queue", (), expected, BULK_LANE, self.fail)
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
    def test_messages_are_read_by_who_waits(self, num_bytes):
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
        """Other messages than the expected ones also come soon on a lane that is lent."""
        sender, receiver = self.start()
        collector = Collector()
        receiver.register("queue", collector)
        for number in range(20):
            with receiver.waiting_for([0], BULK_LANE):
                sender.send(1, "queue", b"", [_payload(10)], lane=BULK_LANE)
                collector.wait(number + 1)

    def test_nothing_is_borrowed_where_there_is_no_native_code(self):
        _, receiver = self.start()
        with unittest.mock.patch.object(frames, "exchanges_frames", lambda: False):
            tcp_transport._swapping.cache_clear()
            self.addCleanup(tcp_transport._swapping.cache_clear)
            self.assertEqual(receiver.swap("queue", (), [Expected(0, b"", 1)], None, self.fail), [None])


class SwapTest(TransportTestMixin, _Case):
    """Ranks that all send to each other, and receive, round after round, as in an all-reduce."""

    member = TcpTransport

    def _run(self, sizes, num_ranks=2, disturb=lambda transport, number: None, **arguments):
        """In each round each rank sends messages of a size to all others. Returns the share that `swap` has read."""
        transports = self.start(num_ranks, **arguments)
        with concurrent.futures.ThreadPoolExecutor(num_ranks) as pool:
            num_read = sum(pool.map(lambda transport: self._run_rank(transport, sizes, num_ranks, disturb), transports))
        for transport in transports:
            for peer in {*range(num_ranks)} - {transport.rank}:
                self.assertTrue(transport.flush(peer, 60))
        counters = [transport.counters() for transport in transports]
        for kind in ("messages", "bytes"):
            sent, received = (sum(each[f"{kind}_{what}"] for each in counters) for what in ("sent", "received"))
            self.assertEqual(received, sent)
        return num_read / (len(sizes) * num_ranks * (num_ranks - 1))

    def _run_rank(self, transport, sizes, num_ranks, disturb):
        others = [rank for rank in range(num_ranks) if rank != transport.rank]
        came = {}
        changed = threading.Condition()

        def handle(message):
            with changed:
                came[message.sender, message.header] = message.payload
                changed.notify_all()

        def send(message):
            transport.send(message.peer, "queue", message.header, message.payload, BULK_LANE)

        transport.register("queue", handle)
        num_read = 0
        for number, size in enumerate(sizes):
            disturb(transport, number)
            header = f"{number:06}".encode()
            to_send = [ToSend(other, header, _parts(transport.rank, number, size)) for other in others]
            there = [other for other in others if (other, header) in came]
            expected = [Expected(other, header, size) for other in others if other not in there]
            payloads = transport.swap("queue", to_send, expected, BULK_LANE, send)
            for each, payload in zip(expected, payloads, strict=True):
                if payload is not None:
                    num_read += 1
                    came[each.sender, header] = payload
            keys = {(other, header) for other in others}
            if missing := keys - came.keys():
                with transport.waiting_for([sender for sender, _ in missing], BULK_LANE), changed:
                    self.assertTrue(changed.wait_for(lambda keys=keys: keys <= came.keys(), 60))
            for other in others:
                np.testing.assert_array_equal(came[other, header], np.concatenate(_parts(other, number, size)))
        return num_read

    @parameterized.product(size=[0, 7, 5000, 300_000], num_ranks=[2, 3], shares_memory=[True, False])
    @pytest.mark.slow(after=1)
    def test_messages_are_swapped(self, size, num_ranks, shares_memory):
        """Most are on an idle machine; on a busy one, lanes' threads take many that come before `swap` is called."""

        def compute(transport, number):
            time.sleep(0.001)

        self.assertGreater(self._run([size] * 100, num_ranks, compute, shares_memory=shares_memory), 0.05)

    @parameterized.parameters(True, False)
    def test_of_any_size(self, shares_memory):
        """Larger ones than fit into sockets: all ranks write and read at the same time."""
        sizes = np.random.default_rng(0).choice([0, 1, 4095, 4096, 70_000, 300_000, 9_000_000], 40)
        self._run([int(size) for size in sizes], 3, shares_memory=shares_memory)

    @parameterized.parameters(True, False)
    @pytest.mark.slow
    def test_connections_break(self, shares_memory):
        def disturb(transport, number):
            if number % 20 == 10 + transport.rank:
                for server in transport._sockets:
                    for lane in list(server._lanes.values()):
                        lane.end()

        self._run([300_000, 20, 2_000_000] * 50, 3, disturb, shares_memory=shares_memory)

    def test_others_send_on_the_same_lane(self):
        collectors = {}

        def disturb(transport, number):
            if number == 0:
                collectors[transport.rank] = Collector()
                transport.register("other", collectors[transport.rank])
            if number % 3 == 0:
                arguments = (1 - transport.rank, "other", str(number).encode(), (), BULK_LANE)
                threads.append(threading.Thread(target=transport.send, args=arguments))
                threads[-1].start()

        threads = []
        self._run([50_000] * 90, 2, disturb)
        for thread in threads:
            thread.join()
        for collector in collectors.values():
            self.assertLen(collector.wait(30), 30)

    def test_calls_of_python_code(self):
        """A budget: of a round in which all is swapped, for each message that goes and one that comes."""
        calls = [[], []]

        def disturb(transport, number):
            time.sleep(0.001)  # As if it computed.
            calls[transport.rank].append(0)

            def count(frame, event, argument):
                if event == "call" and frame.f_globals["__name__"].startswith("hop_tf."):
                    calls[transport.rank][-1] += 1

            sys.setprofile(count)

        self._run([5000] * 60, 2, disturb)
        for of_rank in calls:
            self.assertBetween(min(of_rank), 20, 60)

    def test_a_peer_that_does_not_read(self):
        """The rest is left to the connection's thread; what follows waits behind it."""
        sender, receiver = self.start(shares_memory=False)
        go_on, came = threading.Event(), Collector()

        def handle(message):
            if message.header == b"first":
                go_on.wait(60)
            came(message)

        receiver.register("queue", handle)
        sender.send(1, "queue", b"first", lane=BULK_LANE)
        wait_until(lambda: receiver.counters()["messages_received"] == 1)
        refused = []
        for size in (30_000_000, 10):
            sender.swap("queue", [ToSend(1, b"", [_payload(size)])], (), BULK_LANE, refused.append)
        self.assertLen(refused, 1)
        go_on.set()
        messages = came.wait(2)
        np.testing.assert_array_equal(messages[1].payload, _payload(30_000_000))
        sender.swap("queue", [ToSend(1, b"last", [])], (), BULK_LANE, self.fail)
        self.assertEqual(came.wait(3)[2].header, b"last")

    def test_letters_go_though_another_message_fails(self):
        first, *others = self.start(3)
        collector = Collector()
        for other in others:
            other.register("queue", collector)
        first.send(1, "queue", b"", lane=BULK_LANE)
        collector.wait(1)  # Now that connection is there, and the other one is not.

        def fail(message):
            self.assertEqual(message.peer, 2)
            raise ConnectionError

        self.assertTrue(first.flush(1, 60))
        with self.assertRaises(ConnectionError):
            first.swap("queue", [ToSend(peer, b"both", []) for peer in (1, 2)], (), BULK_LANE, fail)
        self.assertEqual(collector.wait(2)[1].header, b"both")

    def test_a_letter_is_ended_before_what_is_awaited_comes(self):
        """So that other threads can send to that peer."""
        first, second = self.start()
        collector = Collector()
        second.register("queue", collector)
        second.send(0, "queue", b"", lane=BULK_LANE)
        first.send(1, "queue", b"", lane=BULK_LANE)
        collector.wait(1)
        outbox = first._outboxes[1, BULK_LANE]
        self.assertTrue(first.flush(1, 60))
        read, was_writing = swapping.read, []

        def note(*arguments):
            was_writing.append(outbox._is_writing)
            return read(*arguments)

        with unittest.mock.patch.object(swapping, "read", note):
            first.swap("queue", [ToSend(1, b"letter", [])], [], BULK_LANE, self.fail)
        self.assertEqual(was_writing, [False])
        self.assertEqual(collector.wait(2)[1].header, b"letter")

    def test_a_lack_of_memory(self):
        """The connection is made anew, and the message comes."""
        first, second = self.start()
        collector = Collector()
        second.register("queue", collector)
        first.send(1, "queue", b"first", lane=BULK_LANE)
        self.assertTrue(first.flush(1, 60))
        lack = unittest.mock.patch.object(Connection, "begin_frame", side_effect=MemoryError)
        with lack, self.assertRaises(MemoryError):
            first.swap("queue", [ToSend(1, b"second", [])], [], BULK_LANE, self.fail)
        first.send(1, "queue", b"third", lane=BULK_LANE)
        self.assertEqual([message.header for message in collector.wait(3)], [b"first", b"second", b"third"])

    def test_frames_are_what_python_writes(self):
        """Head, text, payload in several pieces, checksum."""
        for checksums in (Checksums, lambda key: NoChecksums()):
            for lengths in ((), (5,), (4096,), (100, 4096, 3, 4097, 9000), (4000, 96, 1)):
                with self.subTest(lengths=lengths), contextlib.ExitStack() as stack:
                    end = _End(stack, checksums)
                    outbox = Outbox()
                    epoch = outbox.resume(0)
                    outbox.write_at_once(epoch, self.fail, end.lane.connection)
                    payload = [_payload(length) for length in lengths]
                    written, expected = b"", b""
                    python = checksums(_KEY)
                    for _ in range(3):
                        begun = outbox.begin_message(b"queue", b"header", payload, 6 + sum(lengths))
                        swapping.write([Letter(outbox, *begun, swapping.pieces_of(payload))], ())
                        expected += b"".join(framing.encode_message(begun[0], python))
                    while len(written) < len(expected):
                        written += end.far.recv(1 << 20)
                    self.assertEqual(written, expected)


def _parts(sender, number, num_bytes):
    """Returns a payload of `num_bytes` bytes, in parts."""
    data = np.random.default_rng([sender, number]).integers(0, 256, num_bytes, np.uint8)
    return np.split(data, [num_bytes // 3, num_bytes // 2])


if __name__ == "__main__":
    absltest.main()

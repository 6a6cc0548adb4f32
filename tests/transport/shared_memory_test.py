"""Memory that processes of one machine share: its blocks, who may open it, and what goes through it."""

import errno
import gc
import os
import pathlib
import socket
import tempfile
import threading
import unittest.mock

import numpy as np
from absl.testing import absltest, parameterized

from hop_tf.errors import ProtocolError
from hop_tf.tools.testing import MultiProcessRunner
from hop_tf.transport import control_pb2
from hop_tf.transport.shared_memory import MIN_PAYLOAD_BYTES, PeerMemory, SharedMemory
from hop_tf.transport.tcp_transport import TcpTransport
from support.transports import Collector, Proxy, TransportTestMixin, wait_until

_SIZE = 1 << 16


def _payload(num_bytes, seed=0):
    return np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8)


def _mapped():
    """The address ranges of this process that belong to memory for payloads."""
    lines = pathlib.Path("/proc/self/maps").read_text().splitlines()
    ranges = (line.split()[0].split("-") for line in lines if "/memfd:hop_tf payloads" in line)
    return [(int(begin, 16), int(end, 16)) for begin, end in ranges]


def _is_shared(payload):
    return any(begin <= payload.ctypes.data < end for begin, end in _mapped())


def _num_files():
    links = []
    for name in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:  # That of the list itself.
            continue
    return sum("memfd:hop_tf" in link for link in links)


class _Case(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        if not hasattr(os, "memfd_create"):
            self.skipTest("this system has no memory without a name")


class _ConnectedCase(_Case):
    """Both ends of a connection, and memory of the near one."""

    def setUp(self):
        super().setUp()
        server = self.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.near = self.enter_context(socket.create_connection(server.getsockname()))
        self.far = self.enter_context(server.accept()[0])
        self.memory = SharedMemory(_SIZE)
        self.addCleanup(self.memory.close_file)


class BlocksTest(_ConnectedCase):
    def setUp(self):
        super().setUp()
        self.peer = PeerMemory.open(self.memory.offer(self.near), self.far)
        self.memory.close_file()

    def _put(self, num_bytes, seed=0):
        place = self.memory.put([_payload(num_bytes, seed)], num_bytes)
        return None if place is None else self.peer.payload(place)

    def test_a_payload_is_what_was_put(self):
        first, second = _payload(1000), _payload(2001, 1)
        received = self.peer.payload(self.memory.put([first, second], 3001))
        np.testing.assert_array_equal(received, np.concatenate([first, second]))
        self.assertFalse(received.flags.writeable)
        self.assertEqual(received.ctypes.data % 64, 0)

    def test_a_block_is_kept_as_long_as_a_view(self):
        view = self._put(30_000)[7:20]
        self.assertIsNotNone(other := self._put(30_000, 1))
        self.assertIsNone(self._put(30_000, 2))
        np.testing.assert_array_equal(view, _payload(30_000)[7:20])
        del view
        self.assertIsNotNone(third := self._put(30_000, 3))
        np.testing.assert_array_equal(other, _payload(30_000, 1))
        np.testing.assert_array_equal(third, _payload(30_000, 3))

    def test_blocks_in_any_order(self):
        """Random lengths and lifetimes: nothing that is in use is written to, and all is free again in the end."""
        random, held = np.random.default_rng(1), {}
        num_full = 0
        for seed in range(2000):
            num_bytes = int(random.integers(1, 12_000))
            payload = self._put(num_bytes, seed)
            if payload is None:
                num_full += 1
            else:
                held[seed] = payload
            if payload is None or random.random() < 0.4:
                for one in random.choice(list(held), min(3, len(held)), replace=False):
                    np.testing.assert_array_equal(held[one], _payload(held[one].size, int(one)))
                    del held[one]
            del payload
        self.assertGreater(num_full, 10)
        held.clear()
        self.assertIsNotNone(self._put(_SIZE - 128))
        self.assertIsNone(self._put(_SIZE - 127))

    def test_no_page_is_touched_that_the_system_cannot_give(self):
        self.memory._mapped = unittest.mock.Mock(**{"madvise.side_effect": OSError(errno.ENOMEM, "no memory")})
        self.assertIsNone(self._put(1000))
        self.memory._mapped.madvise.side_effect = OSError(errno.EINVAL, "not known")
        self.assertIsNotNone(self._put(1000))

    def test_a_fork_frees_nothing(self):
        payload = self._put(40_000)
        with unittest.mock.patch.object(os, "getpid", lambda: 1):
            del payload
        self.assertIsNone(self._put(40_000))

    @parameterized.parameters((0, 1), (64, 1), (129, 1), (_SIZE, 1), (128, _SIZE), (1 << 63, 1 << 63), (_SIZE + 64, 0))
    def test_places_that_cannot_be(self, begin, num_bytes):
        with self.assertRaisesRegex(ProtocolError, f"{num_bytes} bytes at {begin} cannot be in a memory of {_SIZE}"):
            self.peer.payload(begin.to_bytes(8, "little") + num_bytes.to_bytes(8, "little"))


class OfferTest(_ConnectedCase):
    def _opened(self, **fields):
        offer = self.memory.offer(self.near)
        changed = control_pb2.SharedMemory(
            **{field.name: value for field, value in offer.ListFields()} | fields,
        )
        return PeerMemory.open(changed, self.far)

    def test_the_offer_is_taken(self):
        self.assertIsNotNone(self._opened())

    @parameterized.parameters(
        {"nonce": bytes(32)},
        {"nonce": b""},
        {"num_bytes": _SIZE - 128},
        {"num_bytes": 2 * _SIZE},
        {"num_bytes": 0},
        {"process": 0},
        {"process": 1 << 40},
        {"file": 9999},
        {"sender_address": "('127.0.0.1', 1)"},
        {"receiver_address": "('127.0.0.1', 1)"},
    )
    def test_an_offer_that_is_wrong(self, **fields):
        self.assertIsNone(self._opened(**fields))

    def test_other_files_are_left_alone(self):
        """A pipe, which would block; a file; a memory of another kind, or one that could shrink under the reader."""
        reading, writing = os.pipe()
        self.addCleanup(os.close, reading)
        self.addCleanup(os.close, writing)
        ordinary = self.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        ordinary.truncate(_SIZE)
        another = os.memfd_create("another")
        self.addCleanup(os.close, another)
        shrinking = os.memfd_create("hop_tf payloads")
        self.addCleanup(os.close, shrinking)
        nonce = bytes(32)
        for file in (another, shrinking):
            os.ftruncate(file, _SIZE)
        for file in (reading, writing, ordinary.fileno(), another, shrinking):
            self.assertIsNone(self._opened(file=file, nonce=nonce))

    def test_no_memory_leads_to_another_machine(self):
        elsewhere = unittest.mock.Mock(
            **{"getsockname.return_value": ("10.0.0.1", 1), "getpeername.return_value": ("10.0.0.2", 2)}
        )
        self.assertIsNone(SharedMemory.make(elsewhere))
        self.assertIsNotNone(made := SharedMemory.make(self.near))
        made.close_file()

    def test_a_system_that_has_none(self):
        with unittest.mock.patch.object(os, "memfd_create", side_effect=OSError("not permitted")):
            self.assertIsNone(SharedMemory.make(self.near))


class TransportTest(TransportTestMixin, _Case):
    member = TcpTransport

    def test_large_payloads_go_through_it(self):
        sender, receiver = self.start()
        collector = self.register(receiver)
        for num_bytes in (100, MIN_PAYLOAD_BYTES - 1, MIN_PAYLOAD_BYTES, 5_000_000):
            sender.send(1, "queue", payload=[_payload(num_bytes)])
        payloads = [message.payload for message in collector.wait(4)]
        self.assertEqual([_is_shared(payload) for payload in payloads], [False, False, True, True])
        for payload in payloads:
            np.testing.assert_array_equal(payload, _payload(payload.size))

    def test_not_if_a_proxy_stands_between(self):
        addresses = self.addresses(2)
        receiver = self.start_at(1, addresses)
        proxy = Proxy.before_socket(receiver)
        self.addCleanup(proxy.close)
        collector = self.register(receiver)
        self.start_at(0, addresses).send(1, "queue", payload=[_payload(200_000)])
        self.assertFalse(_is_shared(collector.wait(1)[0].payload))

    def test_what_finds_no_room_goes_through_the_socket(self):
        """The receiver keeps all that it gets."""
        sender, receiver = self.start()
        collector = self.register(receiver)
        for seed in range(80):
            sender.send(1, "queue", payload=[_payload(1 << 20, seed)])
        payloads = [message.payload for message in collector.wait(80)]
        shared = [_is_shared(payload) for payload in payloads]
        self.assertIn(True, shared)
        self.assertIn(False, shared)
        for seed, payload in enumerate(payloads):
            np.testing.assert_array_equal(payload, _payload(1 << 20, seed))

    def test_payloads_live_longer_than_the_connection(self):
        sender, receiver = self.start()
        collector = self.register(receiver)
        sender.send(1, "queue", payload=[_payload(200_000)], lane=1)
        (message,) = collector.wait(1)
        receiver._sockets[0]._lanes[0, 1].end()
        sender.send(1, "queue", payload=[_payload(200_000, 1)], lane=1)
        collector.wait(2)
        sender.close()
        receiver.close()
        np.testing.assert_array_equal(message.payload, _payload(200_000))

    def test_an_impossible_place_ends_the_connection(self):
        """For the thread that has borrowed it as well: the message comes again."""
        sender, receiver = self.start()
        collector = self.register(receiver)
        find, places = PeerMemory.payload, []

        def fail_once(memory, place):
            places.append(place)
            return find(memory, place if len(places) > 1 else bytes(16))

        with unittest.mock.patch.object(PeerMemory, "payload", fail_once):
            sender.send(1, "queue", payload=[_payload(200_000)])
            np.testing.assert_array_equal(collector.wait(1)[0].payload, _payload(200_000))
        self.assertLen(collector.messages, 1)

    def test_nothing_stays_behind(self):
        gc.collect()
        before = _num_files() + len(_mapped())
        sender, receiver = self.start()
        collector = self.register(receiver)
        sender.send(1, "queue", payload=[_payload(200_000)])
        self.assertTrue(_is_shared(collector.wait(1)[0].payload))
        collector.messages.clear()
        sender.close()
        receiver.close()
        del sender, receiver

        def is_gone():
            gc.collect()
            return _num_files() + len(_mapped()) <= before

        wait_until(is_gone)


def _send_and_stay(addresses, num_bytes):
    transport = TcpTransport(0, addresses, identity=TransportTestMixin.identity)
    transport.start()
    transport.send(1, "queue", payload=[_payload(num_bytes)])
    threading.Event().wait()


class KilledSenderTest(TransportTestMixin, _Case):
    member = TcpTransport

    def test_its_payload_is_still_whole(self):
        addresses = self.addresses(2)
        receiver = self.start_at(1, addresses)
        collector = Collector()
        receiver.register("queue", collector)
        runner = self.enter_context(MultiProcessRunner(_send_and_stay, 1, args=(addresses, 3_000_000)))
        (message,) = collector.wait(1)
        self.assertTrue(_is_shared(message.payload))
        runner.kill(0)
        wait_until(lambda: not receiver.status(0).connected)
        np.testing.assert_array_equal(message.payload, _payload(3_000_000))


if __name__ == "__main__":
    absltest.main()

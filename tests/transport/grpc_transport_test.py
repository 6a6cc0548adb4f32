"""Tests of transports between processes beyond the contract: broken connections, addresses, and exit."""

import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from unittest import mock

import grpc
import numpy as np
import pytest
from absl.testing import absltest, parameterized

import hop_tf
from hop_tf.errors import HopError, MismatchError, PeerLostError
from hop_tf.options import CommunicationOptions
from hop_tf.transport.grpc_link import GrpcLink, _Connection
from hop_tf.transport.grpc_transport import GrpcTransport
from hop_tf.transport.handshake import CONTROL_LANE
from hop_tf.transport.outbox import Outbox
from hop_tf.transport.peer import Peer
from hop_tf.transport.tcp_transport import TcpTransport
from support.transports import (
    DEADLINE_SECONDS,
    Collector,
    Proxy,
    TransportTestMixin,
    split_address,
    wait_until,
)


def number(index):
    return index.to_bytes(4, "little")


class DeadPeerTest(TransportTestMixin, absltest.TestCase):
    member = GrpcTransport

    def test_nobody_listens_any_more(self):
        first, second = self.start()
        self.check_works(first, second)
        self.assertEqual(first.status(1).refused_seconds, 0)
        second.close()
        wait_until(lambda: first.status(1).refused_seconds > 0)

    def test_one_that_has_gone_costs_next_to_nothing(self):
        """The remaining ranks train on, and a channel of gRPC costs as much as a small step."""
        num_opened, open_channel = [], GrpcTransport._open_channel
        with mock.patch.object(
            GrpcTransport, "_open_channel", lambda *args: (num_opened.append(1), open_channel(*args))[1]
        ):
            first, second = self.start()
            self.check_works(first, second)
            second.close()
            wait_until(lambda: first.status(1).was_refused_for(0.5))
            num_before = len(num_opened)
            wait_until(lambda: first.status(1).was_refused_for(2.0))
            self.assertLen(num_opened, num_before)

    def test_a_peer_that_was_never_there_may_come(self):
        first = self.start_at(0, self.addresses(2))
        first.connect(1)
        wait_until(lambda: first.status(1).last_problem)
        self.assertEqual(first.status(1).refused_seconds, 0)


class RefusalTest(TransportTestMixin, absltest.TestCase):
    member = GrpcTransport

    def test_a_refusal_arrives_though_the_refuser_closes_at_once(self):
        addresses = self.addresses(2)
        refuser, refused = (
            self.member(rank, addresses, identity={**self.identity, "option": str(rank)}) for rank in range(2)
        )
        self.addCleanup(refuser.close)
        self.addCleanup(refused.close)
        check_hello, streams_closed = refuser._handshake.check_hello, threading.Event()
        close_streams = refuser._streams.close

        def check_and_close(*args):
            try:
                return check_hello(*args)
            finally:  # As where a strategy is shut down because of that.
                closing = threading.Thread(target=refuser.close)
                closing.start()
                self.addCleanup(closing.join)
                streams_closed.wait(DEADLINE_SECONDS)

        def close():
            close_streams()
            streams_closed.set()

        with (
            mock.patch.object(refuser._handshake, "check_hello", check_and_close),
            mock.patch.object(refuser._streams, "close", close),
        ):
            refuser.start()
            refused.start()
            refused.connect(0)
            wait_until(lambda: refused.status(0).failure is not None)
        self.assertIsInstance(refused.status(0).failure, MismatchError)


class GarbageTest(TransportTestMixin, absltest.TestCase):
    member = GrpcTransport

    @pytest.mark.slow
    def test_calls_end_without_the_garbage_collector(self):
        """Calls that are left to the collector at the interpreter's end may wait for a lock that is never released."""
        gc.collect()
        gc.disable()
        self.addCleanup(gc.enable)
        before = len(self._calls())
        first, second = self.start()
        self.check_works(first, second)
        second.close()  # Calls are aborted, and new ones find no listener.
        wait_until(lambda: first.status(1).refused_seconds > 0)
        first.close()
        wait_until(lambda: len(self._calls()) <= before)

    def _calls(self):
        return [each for each in gc.get_objects() if issubclass(type(each), grpc.Call)]


class BrokenConnectionTest(TransportTestMixin, absltest.TestCase):
    member = GrpcTransport

    def start_with_proxies(self, **arguments):
        """Rank 0 reaches rank 1 through a proxy for each of its ports; the last one passes messages on."""
        addresses = self.addresses(2)
        receiver = self.start_at(1, addresses, **arguments)
        proxies = [self._make_proxy(addresses[1])]
        if self.member is TcpTransport:
            proxies.append(self._make_proxy(f"127.0.0.1:{receiver._handshake.socket_port}"))
            receiver._handshake.socket_port = split_address(proxies[1].address)[1]
        sender = self.start_at(0, [addresses[0], proxies[0].address], **arguments)
        return proxies, sender, receiver

    def _make_proxy(self, target):
        proxy = Proxy(target)
        self.addCleanup(proxy.close)
        return proxy

    def test_nothing_is_lost_or_doubled_when_connections_break(self):
        proxies, sender, receiver = self.start_with_proxies()
        collector = self.register(receiver)
        generator = np.random.default_rng(1)
        sizes = generator.choice([0, 1000, 400_000, 3_000_000], 200, p=[0.5, 0.3, 0.1, 0.1])
        payloads = [generator.integers(0, 256, size, dtype=np.uint8) for size in sizes]
        for index, payload in enumerate(payloads):
            sender.send(1, "queue", number(index), [payload], lane=index % 2)
            if index % 20 == 10:
                # Somewhere within the messages in flight.
                before = proxies[-1].num_bytes
                wait_until(lambda before=before: proxies[-1].num_bytes > before or sender.flush(1, 0.0))
                for proxy in proxies:
                    proxy.cut()
        messages = collector.wait(len(sizes))
        self.assertTrue(sender.flush(1, DEADLINE_SECONDS))
        self.assertLen(collector.messages, len(sizes))
        for lane in (0, 1):
            found = [message for message in messages if message.header[0] % 2 == lane]
            self.assertEqual([message.header for message in found], [number(i) for i in range(lane, len(sizes), 2)])
        for message in messages:
            np.testing.assert_array_equal(message.payload, payloads[int.from_bytes(message.header, "little")])
        self.assertEqual(receiver.counters()["bytes_received"], sender.counters()["bytes_sent"])

    def test_a_message_is_not_repeated_when_its_acknowledgement_is_lost(self):
        proxies, sender, receiver = self.start_with_proxies()
        collector, entered, opened = Collector(), threading.Event(), threading.Event()
        self.addCleanup(opened.set)

        def handle(message):
            collector(message)
            entered.set()
            opened.wait(DEADLINE_SECONDS)

        receiver.register("queue", handle)
        for index in range(3):
            sender.send(1, "queue", number(index))
        self.assertTrue(entered.wait(DEADLINE_SECONDS))
        for proxy in proxies:
            proxy.cut()
        opened.set()
        self.assertTrue(sender.flush(1, DEADLINE_SECONDS))
        self.assertEqual([message.header for message in collector.messages], [number(i) for i in range(3)])

    def test_silence_on_an_open_connection_is_seen_on_both_sides(self):
        proxies, sender, receiver = self.start_with_proxies(options=CommunicationOptions(timeout_seconds=0.5))
        collector = self.register(receiver)
        sender.send(1, "queue", b"before")
        collector.wait(1)
        for proxy in proxies:
            proxy.pause()
        wait_until(lambda: sender.status(1).silent_seconds > 0.5 and receiver.status(0).silent_seconds > 0.5)
        sender.send(1, "queue", b"during")
        for proxy in proxies:
            proxy.resume()
        wait_until(lambda: sender.status(1).silent_seconds < 0.2 and receiver.status(0).silent_seconds < 0.2)
        self.assertEqual([message.header for message in collector.wait(2)], [b"before", b"during"])
        self.assertIsNone(sender.status(1).failure)

    @pytest.mark.slow
    @pytest.mark.stress(but=1)
    def test_a_frozen_process_is_silent(self):
        addresses = self.addresses(2)
        options = CommunicationOptions(timeout_seconds=0.5)
        transport = self.start_at(0, addresses, options=options)
        process = self.enterContext(
            _python(f"""
                options = CommunicationOptions(timeout_seconds=0.5)
                transport = {self.member.__name__}(1, {addresses}, identity={self.identity}, options=options)
                transport.start()
                sys.stdin.read()
            """)
        )
        transport.connect(1)
        wait_until(lambda: transport.status(1).connected)
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: transport.status(1).silent_seconds > 0.5)
        process.send_signal(signal.SIGCONT)
        wait_until(lambda: transport.status(1).silent_seconds < 0.2)

    def test_a_killed_process_is_seen_and_a_new_one_is_told_from_it(self):
        addresses = self.addresses(2)
        transport = self.start_at(0, addresses)
        program = f"""
            transport = {self.member.__name__}(1, {addresses}, identity={self.identity})
            transport.start()
            transport.connect(0)
            while transport.status(0).failure is None:
                time.sleep(0.01)
            print(type(transport.status(0).failure).__name__, transport.status(0).failure)
            transport.close()
        """
        transport.connect(1)
        with _python(program) as process:
            wait_until(lambda: transport.status(1).connected)
            process.kill()
        wait_until(lambda: not transport.status(1).connected)
        self.assertIsNone(transport.status(1).failure)
        with _python(program) as process:
            wait_until(lambda: transport.status(1).failure is not None)
            output, _ = process.communicate(timeout=DEADLINE_SECONDS)
        self.assertIsInstance(transport.status(1).failure, PeerLostError)
        self.assertRegex(str(transport.status(1).failure), f"rank 0: rank 1 at {addresses[1]} was restarted")
        self.assertRegex(output, f"PeerLostError rank 1: rank 0 at {addresses[0]} .* this process was restarted")
        with self.assertRaisesRegex(PeerLostError, "was restarted"):
            transport.send(1, "queue")


class TcpBrokenConnectionTest(BrokenConnectionTest):
    member = TcpTransport


class AddressTest(TransportTestMixin, absltest.TestCase):
    member = TcpTransport

    def test_a_port_in_use(self):
        addresses = self.addresses(2)
        with (
            socket.create_server(split_address(addresses[0])),
            self.assertRaisesRegex(HopError, f"rank 0: cannot serve on {addresses[0]}: Address already in use"),
        ):
            self.start_at(0, addresses)

    def test_a_port_that_this_process_uses_already(self):
        addresses = self.addresses(2)
        first = self.start_at(0, addresses)
        for address in (addresses[0], addresses[0].replace("127.0.0.1", "localhost")):
            message = rf"rank 0: cannot serve on {address}: this process serves there already.*`shutdown\(\)`"
            with self.assertRaisesRegex(HopError, message):
                self.start_at(0, [address, addresses[1]])
        first.close()
        self.start_at(0, addresses)

    def test_an_address_of_another_machine(self):
        with self.assertRaisesRegex(HopError, r"cannot serve on 192\.0\.2\.1:1234: Cannot assign requested address"):
            self.start_at(0, ["192.0.2.1:1234", "192.0.2.2:1234"])

    def test_a_name_that_does_not_exist(self):
        with self.assertRaisesRegex(HopError, r"cannot serve on no-such-host\.invalid:1234: "):
            self.start_at(0, ["no-such-host.invalid:1234", "192.0.2.2:1234"])

    def test_names_are_resolved(self):
        addresses = [address.replace("127.0.0.1", "localhost") for address in self.addresses(2)]
        first, second = (self.start_at(rank, addresses) for rank in (0, 1))
        self.check_works(first, second)

    def test_close_releases_the_port(self):
        addresses = self.addresses(2)
        for _ in range(5):
            transports = [self.start_at(rank, addresses) for rank in (0, 1)]
            self.check_works(*transports)
            for transport in transports:
                transport.close()
            for address in addresses:
                with socket.create_server(split_address(address)):
                    pass

    def test_cannot_start_twice(self):
        (first, _) = self.start()
        with self.assertRaisesRegex(HopError, "started before"):
            first.start()


class ExitTest(TransportTestMixin, absltest.TestCase):
    """The interpreter exits at once although `close` was never called."""

    member = GrpcTransport

    def check_exits(self, program, code=0):
        """Runs a program with a transport of rank 0. Rank 1 is dead, rank 2 alive."""
        addresses = self.addresses(3)
        peer = self.start_at(2, addresses)
        peer.register("blocked", self.make_gate())
        make = f"transport = {self.member.__name__}(0, {addresses}, identity={self.identity})"
        with _python(f"{make}\n{_dedent(program)}") as process:
            process.communicate(timeout=DEADLINE_SECONDS)
            self.assertEqual(process.returncode, code)

    def test_without_a_start(self):
        self.check_exits("")

    def test_idle(self):
        self.check_exits("transport.start()")

    def test_dead_peer(self):
        self.check_exits("transport.start(); transport.send(1, 'queue', payload=[np.ones(1000)])")

    @pytest.mark.slow
    @pytest.mark.stress(but=1)
    def test_open_streams(self):
        self.check_exits("""
            transport.start()
            transport.send(2, 'queue')
            assert transport.flush(2, 30)
            transport.send(2, 'blocked', payload=[np.ones(10_000_000)])
            transport.send(1, 'queue')
        """)

    @pytest.mark.slow
    @pytest.mark.stress(but=1)
    def test_exception(self):
        self.check_exits("transport.start(); transport.send(2, 'queue'); transport.flush(2, 30); sys.exit(3)", code=3)


class TcpExitTest(ExitTest):
    member = TcpTransport


_PRELUDE = """
import sys, time
import numpy as np
from hop_tf.options import CommunicationOptions
from hop_tf.transport.grpc_transport import GrpcTransport
from hop_tf.transport.tcp_transport import TcpTransport
"""


def _dedent(program):
    lines = [line for line in program.splitlines() if line.strip()]
    indent = min((len(line) - len(line.lstrip()) for line in lines), default=0)
    return "\n".join(line[indent:] for line in lines)


@contextlib.contextmanager
def _python(program):
    """Runs a program in a process of its own."""
    root = str(Path(hop_tf.__file__).parents[1])
    process = subprocess.Popen(
        [sys.executable, "-c", _PRELUDE + _dedent(program)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


class HeartbeatTest(parameterized.TestCase):
    @parameterized.parameters((False, [1] * 13), (True, [1, 1, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1]))
    def test_few_where_the_peer_is_heard_anyway(self, is_heard, expected):
        """After the first three, which measure the way, four of five are spared."""
        peer, outbox = Peer(1, "host:1"), Outbox()
        link = GrpcLink(peer=peer, lane=CONTROL_LANE, outbox=outbox, handshake=None, on_error=None, open_channel=None)
        connection, sent = _Connection(outbox), []

        def wait_ended(timeout_seconds):
            sent.append(0)
            return len(sent) > len(expected)

        with mock.patch.object(connection, "wait_ended", wait_ended):
            if is_heard:
                self.enterContext(mock.patch.object(Peer, "was_heard_within", return_value=True))
            for _ in link._heartbeats(connection, 0.2):
                sent[-1] = 1
        self.assertEqual(sent[:-1], expected)
        self.assertLen(connection.pinged_at, sum(expected))

    def test_was_heard_within(self):
        peer = Peer(1, "host:1")
        self.assertFalse(peer.was_heard_within(100))
        peer.heard()
        self.assertTrue(peer.was_heard_within(100))
        self.assertFalse(peer.was_heard_within(0))


if __name__ == "__main__":
    absltest.main()

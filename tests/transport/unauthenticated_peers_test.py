"""Tests that processes that reach a port but are no ranks do no lasting harm."""

import contextlib
import errno
import socket
import threading
import time
import unittest.mock

import grpc
from absl.testing import absltest

from hop_tf.transport import framing, proof, unauthenticated_peers
from hop_tf.transport.connection import Connection
from hop_tf.transport.daemon_executor import DaemonExecutor
from hop_tf.transport.framing import FrameKind
from hop_tf.transport.reports import REPORT_METHOD, ReportReader
from hop_tf.transport.tcp_transport import TcpTransport
from hop_tf.transport.unauthenticated_peers import (
    MAX_UNAUTHENTICATED,
    GuessRateLimiter,
    UnauthenticatedPeers,
    source_of,
)
from support.transports import (
    DEADLINE_SECONDS,
    TransportTestMixin,
    make_hello,
    split_address,
    wait_until,
)


class StrangersTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        self.unauthenticated = UnauthenticatedPeers()
        self.ended = []

    def enter(self, source, name):
        self.assertTrue(self.unauthenticated.expect())
        return self.unauthenticated.enter(source, lambda: self.ended.append(name))

    def test_the_oldest_of_the_source_that_has_most_makes_way(self):
        self.enter("first", "lonely")
        for number in range(MAX_UNAUTHENTICATED - 1):
            self.enter("crowd", number)
        self.assertEmpty(self.ended)
        self.enter("another", "lonely, too")
        self.assertEqual(self.ended, [0])
        for _ in range(5):
            self.enter("crowd", "more")
        self.assertEqual(self.ended, [0, 1, 2, 3, 4, 5])
        self.assertLen(self.unauthenticated, MAX_UNAUTHENTICATED)

    def test_no_more_are_expected_while_those_that_were_ended_are_still_there(self):
        entered = [self.enter("crowd", number) for number in range(MAX_UNAUTHENTICATED)]
        while self.unauthenticated.expect():
            entered.append(self.unauthenticated.enter("crowd", lambda: None))
        self.assertLen(entered, 2 * MAX_UNAUTHENTICATED)
        self.unauthenticated.leave(entered[0])
        self.assertTrue(self.unauthenticated.expect())
        self.assertFalse(self.unauthenticated.expect())
        self.unauthenticated.expect_less()
        self.assertTrue(self.unauthenticated.expect())

    def test_they_are_ended_when_their_time_is_over(self):
        watcher = threading.Thread(target=self.unauthenticated.watch)
        watcher.start()
        with unittest.mock.patch.object(unauthenticated_peers, "GREETING_SECONDS", 0.01):
            late, gone = self.enter("a", "late"), self.enter("a", "gone")
            self.unauthenticated.leave(gone)
        wait_until(lambda: self.ended)
        patient = self.enter("a", "patient")
        self.unauthenticated.close()
        watcher.join(DEADLINE_SECONDS)
        self.assertEqual(self.ended, ["late", "patient"])
        self.assertEqual((late.problem, patient.problem), ("no greeting came in time", ""))
        self.assertFalse(self.unauthenticated.expect())

    def test_sources(self):
        self.assertEqual(source_of("10.0.0.7:80"), "10.0.0.7")
        self.assertEqual(source_of("ipv4:10.0.0.7:80"), "10.0.0.7")
        self.assertEqual(source_of("ipv6:%5B::ffff:10.0.0.7%5D:80"), "10.0.0.7")
        self.assertEqual(source_of("ipv6:%5B2001:db8::1:2:3:4%5D:80"), source_of("2001:db8::5:80"))
        self.assertNotEqual(source_of("[2001:db8:0:1::1]:80"), source_of("[2001:db8:0:2::1]:80"))
        self.assertEqual(source_of("unix:/tmp/a"), "unix")


class GuessLimitTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        self.now = 100.0
        self.enterContext(unittest.mock.patch.object(time, "monotonic", lambda: self.now))
        self.guesses = GuessRateLimiter()

    def failures(self, source):
        count = 0
        while self.guesses.take(source):
            count += 1
        return count

    def test_failures_are_limited_for_each_source(self):
        self.assertEqual(self.failures("one"), 20)
        self.assertEqual(self.failures("other"), 20)
        self.now += 3.0
        self.assertEqual(self.failures("one"), 15)
        self.now += 1000.0
        self.assertEqual(self.failures("one"), 20)

    def test_who_knows_the_token_is_not(self):
        for _ in range(100):
            self.assertTrue(self.guesses.take("one"))
            self.guesses.give_back("one")

    def test_it_takes_little_memory(self):
        for number in range(5000):
            self.guesses.take(str(number))
        self.assertLen(self.guesses._left, 1024)


class ExecutorTest(absltest.TestCase):
    def test_without_threads(self):
        executor = DaemonExecutor("test")
        with unittest.mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread")):
            self.assertFalse(executor.try_reserve())
            with self.assertRaisesRegex(RuntimeError, "the system allows no more"):
                executor.submit(lambda: None)
        self.assertEmpty(executor.threads)
        self.assertTrue(executor.try_reserve())
        with unittest.mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread")):
            self.assertEqual(executor.submit(lambda: 7).result(DEADLINE_SECONDS), 7)

    def test_threads_that_are_not_used_end(self):
        executor = DaemonExecutor("test")
        executor.try_reserve()
        (thread,) = executor.threads
        executor.close()
        thread.join(DEADLINE_SECONDS)
        self.assertEmpty(executor.threads)


class FloodTest(TransportTestMixin, absltest.TestCase):
    member = TcpTransport

    def connect(self, transport):
        """A connection to a transport's socket."""
        end = socket.create_connection(("127.0.0.1", transport._handshake.socket_port), DEADLINE_SECONDS)
        self.addCleanup(end.close)
        return end

    def check_takes_part(self, addresses, others, rank):
        """A rank that has come late can talk with the others."""
        late = self.start_at(rank, addresses)
        for other in others:
            self.check_works(late, other)
            self.check_works(other, late)

    def test_accepting_goes_on_when_there_were_no_descriptors(self):
        accept, problems = socket.socket.accept, [errno.EMFILE, errno.ENFILE, errno.ECONNABORTED, errno.EMFILE]

        def accept_later(listener):
            if problems:
                raise OSError(problems.pop(), "as the test wants it")
            return accept(listener)

        with (
            unittest.mock.patch.object(socket.socket, "accept", accept_later),
            self.assertLogs("absl", "WARNING") as logs,
        ):
            first, second = self.start()
            self.check_works(second, first)
        self.assertEmpty(problems)
        self.assertRegex(logs.output[0], "accepts no connection for now: .*as the test wants it")
        self.assertIsNone(first.status(1).failure)

    def test_accepting_goes_on_when_there_were_no_threads(self):
        first, second = self.start()
        self.check_works(second, first)
        with unittest.mock.patch.object(first._executor, "try_reserve", return_value=False):
            self.assertEmpty(self.connect(first).recv(1))
            with grpc.insecure_channel(first._address) as channel:
                call = channel.stream_stream(REPORT_METHOD)(iter(()), timeout=DEADLINE_SECONDS)
                with self.assertRaises(grpc.RpcError) as caught:
                    next(call)
                self.assertEqual(caught.exception.code(), grpc.StatusCode.UNIMPLEMENTED)
        self.check_works(second, first)
        self.connect(first).close()
        self.assertEqual(ReportReader(first._address).read(DEADLINE_SECONDS), {"rank": 0})

    def test_connections_that_drip(self):
        """They take more than there are places for, send a byte now and then, and keep no rank out."""
        addresses = self.addresses(2)
        first = self.start_at(0, addresses)
        ends = [self.connect(first) for _ in range(MAX_UNAUTHENTICATED + 10)]
        over = threading.Event()

        def drip():
            hello, _ = make_hello(proof.new_challenge())
            for byte in hello:
                for end in ends:
                    with contextlib.suppress(OSError):
                        end.send(bytes([byte]))
                if over.wait(0.05):
                    return

        dripping = threading.Thread(target=drip)
        dripping.start()
        self.addCleanup(dripping.join)
        self.addCleanup(over.set)
        self.check_takes_part(addresses, [first], 1)

    def test_a_greeting_as_a_whole_has_a_time_limit(self):
        (first, _) = self.start()
        with unittest.mock.patch.object(unauthenticated_peers, "GREETING_SECONDS", 0.3):
            end = self.connect(first)
            Connection(end).read_frame()
        head = framing.encode_head(FrameKind.HELLO, header=framing.MAX_HEADER_BYTES)
        deadline = time.monotonic() + DEADLINE_SECONDS
        with self.assertRaises(OSError):  # At this pace the hello would take 20 minutes.
            for byte in head + bytes(framing.MAX_HEADER_BYTES):
                self.assertLess(time.monotonic(), deadline)
                end.send(bytes([byte]))
                threading.Event().wait(0.02)

    def test_calls_that_say_nothing_take_few_threads(self):
        """Report calls and streams alike; reports can be read meanwhile, and ranks come in."""
        addresses = self.addresses(2)
        first = self.start_at(0, addresses)
        before = threading.active_count()
        for _ in range(40):
            self.addCleanup(_half_open_calls(addresses[0]).close)
        wait_until(lambda: len(first._unauthenticated) == MAX_UNAUTHENTICATED)
        self.assertLess(threading.active_count(), before + 3 * MAX_UNAUTHENTICATED)
        self.assertEqual(ReportReader(addresses[0]).read(DEADLINE_SECONDS), {"rank": 0})
        self.check_takes_part(addresses, [first], 1)


def _half_open_calls(address):
    """A connection with eight report calls whose requests never come: HTTP/2 by hand, which takes no thread here."""
    end = socket.create_connection(split_address(address), DEADLINE_SECONDS)
    end.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _http_frame(4, 0, 0, b""))
    for number in range(8):
        end.sendall(_http_frame(1, 4, 2 * number + 1, _HEADERS))
    return end


def _http_frame(kind, flags, stream, payload):
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def _literal(name, value):
    return b"\x00" + b"".join(bytes([len(text)]) + text.encode() for text in (name, value))


_HEADERS = b"".join(
    _literal(name, value)
    for name, value in (
        (":method", "POST"),
        (":scheme", "http"),
        (":path", REPORT_METHOD),
        (":authority", "rank"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
    )
)

if __name__ == "__main__":
    absltest.main()

"""Tests of the sockets of `TcpTransport`."""

import contextlib
import errno
import socket
import threading
import unittest.mock

import numpy as np
from absl.testing import absltest, parameterized

from hop_tf.errors import HopError
from hop_tf.options import CommunicationOptions
from hop_tf.transport import control_pb2, framing, tcp_link, unauthenticated_peers
from hop_tf.transport.checksum import Checksums
from hop_tf.transport.connection import SO_MAX_PACING_RATE, Connection
from hop_tf.transport.framing import FrameKind
from hop_tf.transport.grpc_transport import GrpcTransport
from hop_tf.transport.tcp_link import TcpLink
from hop_tf.transport.tcp_transport import TcpTransport
from support.transports import (
    DEADLINE_SECONDS,
    Proxy,
    TransportTestMixin,
    make_hello,
    parse_reply,
    split_address,
    wait_until,
)


class TcpTransportTest(TransportTestMixin, parameterized.TestCase):
    member = TcpTransport

    def connect(self, transport):
        """A connection to a transport's socket."""
        end = socket.create_connection(("127.0.0.1", transport._handshake.socket_port), DEADLINE_SECONDS)
        self.addCleanup(end.close)
        return end

    def greet(self, end, token=None, **fields):
        """Says hello; returns the answer and the session."""
        hello, session = make_hello(Connection(end).read_frame().header, token, **fields)
        end.sendall(hello)
        return parse_reply(Connection(end).read_frame().header), session

    def check_ends(self, end):
        """Checks that the connection ends, and that only a challenge comes before."""
        with contextlib.suppress(ConnectionError):
            while data := end.recv(1000):
                self.assertEqual(framing.decode(data).kind, FrameKind.CHALLENGE)

    def test_messages_travel_over_the_socket(self):
        addresses = self.addresses(2)
        receiver = self.start_at(1, addresses)
        proxy = Proxy.before_socket(receiver)
        self.addCleanup(proxy.close)
        collector = self.register(receiver)
        self.start_at(0, addresses).send(1, "queue", payload=[np.zeros(1_000_000, np.uint8)])
        collector.wait(1)
        self.assertGreater(proxy.num_bytes, 1_000_000)

    def test_falls_back_to_grpc(self):
        addresses = self.addresses(3)
        receiver = self.start_at(1, addresses)
        receiver._handshake.socket_port = split_address(addresses[2])[1]
        with self.assertLogs("absl", "INFO") as logs:
            self.check_works(self.start_at(0, addresses), receiver)
        self.assertRegex("\n".join(logs.output), f"No socket to rank 1 at {addresses[1]}, port .*refused.* over gRPC")

    def test_comes_back_to_the_socket(self):
        """A reset while the port cannot be reached: messages go over gRPC until it can; all arrive, once, in order."""
        first, second = self.start()
        collector = self.register(second)
        connect, write, reachable, written = TcpLink._connect, Connection._pieces_of, threading.Event(), []

        def connect_if_reachable(link, host, port):
            if not reachable.is_set():
                raise ConnectionResetError("unreachable")
            return connect(link, host, port)

        def pieces_of(connection, message):
            written.append(message.header)
            return write(connection, message)

        first.send(1, "queue", b"0", [np.zeros(1000, np.uint8)], lane=1)
        collector.wait(1)
        self.enter_context(unittest.mock.patch.object(tcp_link, "_RETRY_SECONDS", 0.01))
        self.enter_context(unittest.mock.patch.object(TcpLink, "_connect", connect_if_reachable))
        self.enter_context(unittest.mock.patch.object(Connection, "_pieces_of", pieces_of))
        (server,) = second._sockets
        server._lanes[0, 1].end()
        with self.assertLogs("absl", "INFO") as logs:
            first.send(1, "queue", b"1", [np.zeros(1000, np.uint8)], lane=1)
            collector.wait(2)  # Of an ended socket nothing arrives.
        self.assertRegex("\n".join(logs.output), "No socket to rank 1 .*unreachable. Lane 1 goes over gRPC")
        self.assertIsNone(server.lane(0, 1))
        reachable.set()
        wait_until(lambda: server.lane(0, 1) is not None)
        first.send(1, "queue", b"2", [np.zeros(1000, np.uint8)], lane=1)
        self.assertEqual([message.header for message in collector.wait(3)], [b"0", b"1", b"2"])
        self.assertIn(b"2", written)
        self.assertTrue(first.flush(1, DEADLINE_SECONDS))

    def test_a_socket_that_was_not_used_is_closed_with_the_link(self):
        arguments = dict.fromkeys(("peer", "lane", "outbox", "handshake", "on_error", "open_channel"))
        link = TcpLink(**{**arguments, "peer": unittest.mock.Mock(failure=None)})
        link._made = made = unittest.mock.Mock()
        link.close()
        link.start()
        link.thread.join(DEADLINE_SECONDS)
        made.close.assert_called_once_with()

    def test_goes_on_where_the_system_does_not_pace(self):
        def refuse(level, option, value):
            if option == SO_MAX_PACING_RATE:
                raise OSError(errno.ENOPROTOOPT, "Protocol not available")

        end = unittest.mock.Mock(**{"setsockopt.side_effect": refuse})
        Connection(end).limit_rate(1e6)
        self.assertEqual(end.setsockopt.call_args.args[1], SO_MAX_PACING_RATE)

    @parameterized.product(num_bytes=[100_000, 1_000_000], at_once=[False, True])
    def test_a_message_is_whole_where_the_system_takes_a_part(self, num_bytes, at_once):
        """The rest of a partly written frame is sent, wherever the frame was cut."""
        payload = np.arange(num_bytes, dtype=np.uint8)
        message = framing.Outgoing(1, b"queue", b"header", [payload], payload.nbytes + 6)
        start, sums = framing.encode_start(message), []
        for num_taken in (0, 1, len(start), num_bytes - 1, num_bytes, num_bytes + 3, num_bytes + len(start)):
            sent, takes = bytearray(), iter([num_taken] if num_taken or at_once else ())

            def sendmsg(pieces, *arguments, sent=sent, takes=takes):
                data = b"".join(pieces)
                taken = min(next(takes, len(data)), len(data))
                if not taken:
                    raise BlockingIOError
                sent += data[:taken]
                return taken

            end = unittest.mock.Mock()
            end.sendall.side_effect = lambda data, flags=0, sent=sent: sent.extend(data)
            end.sendmsg.side_effect = sendmsg
            connection = Connection(end)
            connection.end_greeting(sent=Checksums(bytes(32)), received=Checksums(bytes(32)))
            if at_once:
                connection.write_rest(connection.try_write_message(message))
            else:
                connection.write_message(message)
            self.assertEqual(sent[: len(start)], start)
            self.assertEqual(sent[len(start) : -8], payload.tobytes())
            sums.append(bytes(sent[-8:]))
        self.assertLen(set(sums), 1)

    def test_talks_with_a_peer_without_sockets(self):
        addresses = self.addresses(2)
        first = TcpTransport(0, addresses, identity=self.identity)
        second = GrpcTransport(1, addresses, identity=self.identity)
        for transport in (first, second):
            self.addCleanup(transport.close)
            transport.start()
        self.check_works(first, second)
        self.check_works(second, first)

    def test_interfaces(self):
        """Each lane from lane 1 on has its own: connections come from there, and go to the receiver's."""
        addresses = self.addresses(2)
        of_ranks = (("127.0.0.2", "127.0.0.3"), ("127.0.0.4", "127.0.0.5"))
        transports = [
            self.start_at(rank, addresses, options=CommunicationOptions(interfaces=interfaces))
            for rank, interfaces in enumerate(of_ranks)
        ]
        collector = self.register(transports[1])
        for lane in range(4):
            transports[0].send(1, "queue", b"header", [np.zeros(lane, np.uint8)], lane=lane)
        collector.wait(4)
        ends = {}
        for server in transports[1]._sockets:
            for (_, lane), lane_of in server._lanes.items():
                ends[lane] = lane_of.connection._socket.getpeername()[0], lane_of.connection._socket.getsockname()[0]
        self.assertEqual(ends[1], ("127.0.0.2", "127.0.0.4"))
        self.assertEqual(ends[2], ("127.0.0.3", "127.0.0.5"))
        self.assertEqual(ends[0], ends[3])  # They have none.
        self.assertEqual(transports[0].bytes_by_lane(), {lane: len(b"header") + lane for lane in range(4)})

    def test_an_interface_of_another_machine(self):
        options = CommunicationOptions(interfaces=("203.0.113.1",))
        with self.assertRaisesRegex(HopError, "rank 0: cannot serve on interface 203.0.113.1: "):
            self.start_at(0, self.addresses(2), options=options)

    def test_an_interface_that_cannot_be_reached(self):
        """Messages for that interface go over gRPC, and a warning names it."""
        addresses = self.addresses(3)
        first, second = (
            self.start_at(rank, addresses, options=CommunicationOptions(interfaces=("127.0.0.2",))) for rank in range(2)
        )
        second._handshake.interface_addresses = (addresses[2],)  # No process listens there.
        collector = self.register(second)
        with self.assertLogs("absl", "WARNING") as logs:
            first.send(1, "queue", b"header", [np.zeros(4, np.uint8)], lane=1)
            collector.wait(1)
        self.assertRegex(
            "\n".join(logs.output),
            f"No socket from interface 127.0.0.2 to rank 1 at {addresses[1]}: .*refused.* Lane 1",
        )

    def test_close_releases_the_sockets_port(self):
        for _ in range(5):
            first, second = self.start()
            self.check_works(first, second)
            ports = [transport._handshake.socket_port for transport in (first, second)]
            for transport in (first, second):
                transport.close()
            for port in ports:
                with socket.create_server(("127.0.0.1", port)):
                    pass

    def test_a_wrong_token_is_refused(self):
        first, second = self.start(options=CommunicationOptions(cluster_token="secret"))
        self.check_works(second, first)
        end = self.connect(first)
        reply, _ = self.greet(end, "guess")
        self.assertEqual(reply, control_pb2.HelloReply(refusal=control_pb2.BAD_TOKEN))
        self.check_ends(end)
        self.assertEqual(first.counters()["connections_refused"], 1)
        self.assertIsNone(first.status(1).failure)
        self.check_works(second, first)

    def test_garbage_instead_of_a_greeting(self):
        first, second = self.start(incarnation="known")
        self.check_works(second, first)
        for count, data in enumerate(
            (
                b"GET / HTTP/1.1\r\n\r\n" + bytes(100),
                np.random.default_rng(1).bytes(100_000),
                framing.encode(FrameKind.PING),
                framing.encode(FrameKind.HELLO, body=b"\xff" * 20),
            )
        ):
            with self.subTest(data=data[:20]):
                end = self.connect(first)
                with contextlib.suppress(OSError):  # It may have been closed already.
                    end.sendall(data)
                    end.shutdown(socket.SHUT_WR)
                self.check_ends(end)
                wait_until(lambda count=count: first.counters()["connections_refused"] == count + 1)
        self.check_works(second, first)

    def test_the_control_lane_is_refused(self):
        first, second = self.start(incarnation="known")
        end = self.connect(first)
        end.sendall(make_hello(Connection(end).read_frame().header, lane=16)[0])
        self.check_ends(end)
        wait_until(lambda: first.counters()["connections_refused"] == 1)
        self.check_works(second, first)

    def test_garbage_on_a_lane(self):
        first, second = self.start(incarnation="known")
        self.check_works(second, first)
        collector = self.register(first)

        def head(kind=FrameKind.MESSAGE, sequence=1, payload=0, header=0, queue=1):
            return framing.encode_head(kind, sequence=sequence, payload=payload, header=header, queue=queue)

        cases = {
            "random": b"garbage" * 10,
            "a ping": head(kind=FrameKind.PING, queue=0),
            "no queue": head(queue=0),
            "queue is not UTF-8": head(queue=2) + b"\xff\xff",
            "payload beyond its limit": head(payload=2**60) + b"q",
            "header beyond its limit": head(header=2**31) + b"q",
            "sequence number 2 before 1": head(sequence=2) + b"q",
            "wrong checksum": head() + b"q" + bytes(8),
        }
        for count, (name, data) in enumerate(cases.items()):
            with self.subTest(name):
                end = self.connect(first)
                _, session = self.greet(end, lane=7)
                end.sendall(data + (b"" if name == "wrong checksum" else session.checksums("client").of(data)))
                self.check_ends(end)
                wait_until(lambda count=count: first.counters()["connections_refused"] == count + 1)
        self.assertEmpty(collector.messages)
        self.assertIsNone(first.status(1).failure)
        self.check_works(second, first)

    def test_a_connection_that_ends_without_a_word_is_no_matter(self):
        """A rank that leaves while it connects does so."""
        first, second = self.start()
        end = self.connect(first)
        end.shutdown(socket.SHUT_WR)
        self.check_ends(end)
        self.assertEqual(first.counters()["connections_refused"], 0)
        self.check_works(second, first)

    def test_a_connection_counts_until_all_that_came_on_it_is_delivered(self):
        """So a process that has died is not taken for dead before."""
        first, _ = self.start(incarnation="known")
        gate = self.make_gate()
        first.register("queue", gate)
        end = self.connect(first)
        _, session = self.greet(end, lane=7)
        head = framing.encode_head(FrameKind.MESSAGE, sequence=1, queue=5) + b"queue"
        end.sendall(head + session.checksums("client").of(head))
        end.close()
        self.assertTrue(gate.entered.wait(DEADLINE_SECONDS))
        self.assertTrue(first.status(1).connected)
        gate.opened.set()
        wait_until(lambda: not first.status(1).connected)

    def test_connections_that_say_nothing_are_closed(self):
        with unittest.mock.patch.object(unauthenticated_peers, "GREETING_SECONDS", 0.01):
            first, second = self.start()
            self.check_ends(self.connect(first))
            wait_until(lambda: first.counters()["connections_refused"] == 1)
        self.check_works(second, first)

    def test_a_connection_takes_the_place_of_the_earlier_one(self):
        first, _ = self.start(incarnation="known")
        ends = []
        for _ in range(3):
            ends.append(self.connect(first))
            self.assertEqual(self.greet(ends[-1], lane=7)[0].refusal, control_pb2.ACCEPTED)
        for end in ends[:-1]:
            self.check_ends(end)


if __name__ == "__main__":
    absltest.main()

"""Peers that are far away, behind links that are slow and fail for a while: a slow link is not a dead one."""

import contextlib
import json
import math
import os
import pathlib
import socket
import struct
import subprocess
import sys
import threading
import unittest
from unittest import mock

import numpy as np
import pytest
from absl.testing import absltest, parameterized

import hop_tf
from hop_tf.errors import PeerLostError
from hop_tf.options import CommunicationOptions
from hop_tf.tools.testing import network
from hop_tf.transport import lanes
from hop_tf.transport.base import PeerStatus
from hop_tf.transport.connection import SO_MAX_PACING_RATE, Connection
from hop_tf.transport.deadlines import problem_of
from hop_tf.transport.grpc_transport import GrpcTransport
from hop_tf.transport.in_process import InProcessTransport
from hop_tf.transport.lanes import LinkShares, num_lanes
from hop_tf.transport.peer import Peer
from hop_tf.transport.tcp_transport import TcpTransport
from support.transports import DEADLINE_SECONDS, TransportTestMixin, split_address, wait_until

_REASON = network.available()
_needs_network = unittest.skipIf(_REASON is not None, f"needs an emulated network ({_REASON})")

_LANE = 1


def number(index):
    return index.to_bytes(4, "little")


class DeadlineTest(parameterized.TestCase):
    @parameterized.parameters(
        # Limit in seconds, round trip, longest silence that is borne: limit + min(limit, 8 round trips).
        (10.0, 0.0, 10.0),
        (10.0, 0.25, 12.0),
        (10.0, 1.0, 18.0),
        (10.0, 100.0, 20.0),
        (2.0, 1.0, 4.0),
    )
    def test_far_peers_have_more_time(self, limit, round_trip, borne):
        for field, was_beyond in (
            ("silent_seconds", PeerStatus.was_silent_for),
            ("refused_seconds", PeerStatus.was_refused_for),
        ):
            fields = {"address": "host:123", "connected": True, "silent_seconds": 0.0, "incarnation": "known"}
            fields["round_trip_seconds"] = round_trip
            self.assertFalse(was_beyond(PeerStatus(**{**fields, field: borne}), limit))
            self.assertTrue(was_beyond(PeerStatus(**{**fields, field: borne + 0.001}), limit))

    def problem(self, **fields):
        status = PeerStatus(**{"address": "host:123", "connected": True, "incarnation": "known", **fields})
        options = CommunicationOptions(timeout_seconds=10)
        return problem_of(status, None, 11.0, options, rank=0, peer=1, operation="wait", step=7)

    def test_a_peer_is_lost_later_where_it_is_far_away(self):
        self.assertIsInstance(self.problem(silent_seconds=11.0), PeerLostError)
        self.assertIsNone(self.problem(silent_seconds=11.0, round_trip_seconds=0.277))
        self.assertIsInstance(self.problem(silent_seconds=12.3, round_trip_seconds=0.277), PeerLostError)
        self.assertIsInstance(self.problem(silent_seconds=0.0, refused_seconds=2.1), PeerLostError)
        self.assertIsNone(self.problem(silent_seconds=0.0, refused_seconds=2.1, round_trip_seconds=0.277))

    def test_a_process_whose_connections_are_closed_and_where_nobody_listens_is_dead_at_once(self):
        self.assertIsInstance(self.problem(silent_seconds=0.1, refused_seconds=0.01, connected=False), PeerLostError)
        self.assertIsNone(self.problem(silent_seconds=0.1, refused_seconds=0.01))
        self.assertIsNone(self.problem(silent_seconds=0.1, connected=False))

    def test_a_peer_that_may_return_is_waited_for_as_one_that_is_silent(self):
        self.assertIsNone(self.problem(silent_seconds=9.0, refused_seconds=8.0, may_return=True))
        error = self.problem(silent_seconds=10.1, refused_seconds=9.1, may_return=True)
        self.assertIsInstance(error, PeerLostError)
        self.assertIn("silent for 10.1 s). It was not started again in time (see timeout_seconds).", str(error))
        peer = Peer(1, "host:123")
        self.assertFalse(peer.status().may_return)

    def test_round_trips(self):
        peer = Peer(1, "host:123")
        self.assertEqual(peer.status().round_trip_seconds, 0.0)
        self.assertEqual(peer.least_round_trip_seconds, 0.0)
        for seconds in (2.0, 1.0, 1.875):
            peer.record_round_trip(seconds)
        self.assertEqual(peer.status().round_trip_seconds, 1.875)  # 2, then 2 - 1/8, then no change
        self.assertEqual(peer.least_round_trip_seconds, 1.0)


class LinkSharesTest(parameterized.TestCase):
    @parameterized.parameters(
        # ceil(T * R / 8 / N / 3 MiB), at least 1 and at most 8.
        (0.0, 100e6, 3, 1),
        (0.277, 100e6, 3, 1),
        (0.277, 100e6, 1, 2),
        (1.0, 100e6, 3, 2),
        (1.0, 100e6, 1, 4),
        (1.0, 10e6, 1, 1),
        (0.277, 1e9, 3, 4),
        (1.0, 1e9, 3, 8),
    )
    def test_how_many_there_are(self, round_trip, bandwidth, num_peers, expected):
        self.assertEqual(num_lanes(round_trip, bandwidth, num_peers), expected)

    def test_who_shares_the_link(self):
        """Peers that took turns with this one in what was large: in a ring that follows a mesh there are none."""
        shares = LinkShares(8.0)

        def num_sharing(*peers, num_bytes=100_000):
            found = []
            for peer in peers:
                with mock.patch.object(lanes, "num_lanes", return_value=2) as count:
                    share = shares.of(peer, 0.1, num_bytes)
                found.append(count.call_args.args[2])
                self.assertEqual(share.bytes_per_second, 1.0 / found[-1] / 2)
            return found

        self.assertEqual(num_sharing(1, 2, 3), [1, 2, 3])
        self.assertEqual(num_sharing(1, 2, 3, num_bytes=100), [3, 3, 3])
        self.assertEqual(num_sharing(1, 2, 3, 1), [3, 3, 3, 3])
        self.assertEqual(num_sharing(1, 1, 1), [3, 1, 1])

    def test_one_lane_is_not_limited(self):
        self.assertEqual(LinkShares(8.0).of(1, 0.1, 100), lanes.Share(1, math.inf))


class LanesTest(TransportTestMixin, parameterized.TestCase):
    """Messages without a lane."""

    member = InProcessTransport

    def test_far_messages_do_not_wait_for_each_other(self):
        self.enter_context(mock.patch.object(Peer, "least_round_trip_seconds", 0.5))  # Two lanes.
        sender, receiver = self.start()
        gate, collector = self.make_gate(), self.register(receiver)
        receiver.register("blocked", gate)
        sender.send(1, "blocked", payload=[np.zeros(1000, np.uint8)], lane=None)
        self.assertTrue(gate.entered.wait(DEADLINE_SECONDS))
        for index in range(20):
            sender.send(1, "queue", number(index), lane=None)
        messages = collector.wait(20)
        self.assertEqual([message.header for message in messages], [number(i) for i in range(20)])
        gate.opened.set()
        self.assertTrue(sender.flush(1, DEADLINE_SECONDS))
        self.assertEqual(set(sender._outboxes), {(1, _LANE), (1, _LANE + 1)})

    def test_near_messages_keep_to_one_lane(self):
        self.enter_context(mock.patch.object(Peer, "least_round_trip_seconds", 0.001))
        sender, receiver = self.start()
        collector = self.register(receiver)
        for index in range(20):
            sender.send(1, "queue", number(index), [np.zeros(100_000, np.uint8)], lane=None)
        self.assertEqual([message.header for message in collector.wait(20)], [number(i) for i in range(20)])
        self.assertEqual(set(sender._outboxes), {(1, _LANE)})


class TcpLanesTest(LanesTest):
    member = TcpTransport

    def test_several_lanes_send_as_much_as_the_link_carries(self):
        self.enter_context(mock.patch.object(Peer, "least_round_trip_seconds", 0.5))  # Two lanes.
        limits = {}

        def limit_rate(connection, bytes_per_second):
            original(connection, bytes_per_second)
            option = connection._socket.getsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, struct.calcsize("@L"))
            limits.setdefault(connection, []).append(struct.unpack("@L", option)[0])

        original = Connection.limit_rate
        self.enter_context(mock.patch.object(Connection, "limit_rate", limit_rate))
        sender, receiver = self.start()
        collector = self.register(receiver)
        for index in range(20):
            sender.send(1, "queue", number(index), [np.zeros(100_000, np.uint8)], lane=None)
        collector.wait(20)
        self.assertLen(limits, 2)
        for of_connection in limits.values():
            self.assertEqual(of_connection[-1], 100e6 / 8 / 2)


class GrpcLanesTest(LanesTest):
    member = GrpcTransport


class SlowLinkTest(TransportTestMixin, absltest.TestCase):
    """Two ranks in this process, with proxies between them."""

    member = TcpTransport

    def start_apart(self, timeout_seconds, **links):
        """Two started transports that reach each other over an emulated link."""
        self.net = self.enter_context(network.Proxy(2, **links))
        addresses = self.addresses(2)
        options = CommunicationOptions(timeout_seconds=timeout_seconds)
        transports = []
        for rank in (0, 1):
            seen = [
                self.net.address(peer, rank, split_address(address)[1]) if peer != rank else address
                for peer, address in enumerate(addresses)
            ]
            transports.append(self.start_at(rank, seen, options=options))
        if self.member is TcpTransport:
            for transport in transports:
                handshake = transport._handshake
                seen = self.net.address(transport.rank, 1 - transport.rank, handshake.socket_port)
                handshake.socket_port = split_address(seen)[1]
        for transport in transports:
            transport.connect(1 - transport.rank)
        for transport in transports:
            wait_until(lambda transport=transport: transport.status(1 - transport.rank).round_trip_seconds)
        return transports

    @contextlib.contextmanager
    def never_lost(self, transports, timeout_seconds):
        """Fails if a rank takes the other one for lost meanwhile."""
        lost, ended = [], threading.Event()

        def watch():
            while not ended.wait(0.02):
                for transport in transports:
                    status = transport.status(1 - transport.rank)
                    if status.was_silent_for(timeout_seconds) or status.was_refused_for(timeout_seconds):
                        lost.append(status)

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(DEADLINE_SECONDS)
        self.assertEmpty(lost)

    def test_the_round_trip_is_measured(self):
        for transport in self.start_apart(10.0, round_trip_seconds=0.2):
            status = transport.status(1 - transport.rank)
            self.assertGreaterEqual(status.round_trip_seconds, 0.2)
            self.assertGreaterEqual(transport._peers[1 - transport.rank].least_round_trip_seconds, 0.2)

    @pytest.mark.slow
    def test_a_stall_costs_time_and_nothing_else(self):
        timeout_seconds = 6.0
        links = {"bandwidth_bits_per_second": 8e6, "round_trip_seconds": 0.1, "jitter_seconds": 0.02}
        sender, receiver = self.start_apart(timeout_seconds, **links)
        collector = self.register(receiver)
        payloads = [np.random.default_rng(index).bytes(size) for index, size in enumerate((1_000_000, 10, 700_000, 0))]
        with self.never_lost((sender, receiver), timeout_seconds):
            for index, payload in enumerate(payloads):
                if index == 2:  # Between messages.
                    collector.wait(2)
                    self.net.stall(1, 2.0)
                sender.send(1, "queue", number(index), [np.frombuffer(payload, np.uint8)], lane=_LANE)
                if index == 0:  # Within one: it takes a second.
                    threading.Event().wait(0.3)
                    self.net.stall(1, 2.0)
            messages = collector.wait(len(payloads))
        self.assertEqual([message.header for message in messages], [number(i) for i in range(len(payloads))])
        self.assertEqual([message.payload.tobytes() for message in messages], payloads)
        self.assertTrue(sender.flush(1, DEADLINE_SECONDS))
        for transport in (sender, receiver):
            self.assertIsNone(transport.status(1 - transport.rank).failure)

    def test_a_link_that_stays_cut_is_reported(self):
        sender, receiver = self.start_apart(1.0, round_trip_seconds=0.02)
        collector = self.register(receiver)
        sender.send(1, "queue", lane=_LANE)
        collector.wait(1)
        self.net.cut(0, other=1)
        with self.assertRaisesRegex(PeerLostError, "send on rank 1 at .*silent for"):
            while True:
                sender.send(1, "queue", lane=_LANE)
        wait_until(lambda: receiver.status(0).was_silent_for(1.0))
        # It is not too late for the transport itself.
        self.net.restore(0, other=1)
        wait_until(lambda: not sender.status(1).was_silent_for(1.0) and not receiver.status(0).was_silent_for(1.0))

    def test_heartbeats_do_not_wait_behind_messages(self):
        # A heartbeat every 0.2 s, and a message that takes 3 s.
        sender, receiver = self.start_apart(1.0, bandwidth_bits_per_second=8e6, round_trip_seconds=0.05)
        collector = self.register(receiver)
        sender.send(1, "queue", payload=[np.zeros(3_000_000, np.uint8)], lane=_LANE)
        num_heard, previous = 0, 0.0
        while not sender.flush(1, 0.01):
            silent_seconds = sender.status(1).silent_seconds
            num_heard += silent_seconds < previous
            previous = silent_seconds
        self.assertGreaterEqual(num_heard, 4)
        collector.wait(1)


class GrpcSlowLinkTest(SlowLinkTest):
    member = GrpcTransport


# Rank 0 sends messages in order, and others without. Rank 1 says when each has come, and both say whether they have
# taken the other one for lost.
_PROGRAM = """
import json, sys, threading
import numpy as np
from hop_tf.options import CommunicationOptions
from support.transports import wait_until
from hop_tf.transport.grpc_transport import GrpcTransport
from hop_tf.transport.tcp_transport import TcpTransport

case = json.loads(sys.argv[1])
rank, sizes = case["rank"], case["sizes"]
options = CommunicationOptions(timeout_seconds=case["timeout_seconds"])
member = {"GrpcTransport": GrpcTransport, "TcpTransport": TcpTransport}[case["member"]]
transport = member(rank, case["addresses"], identity={}, options=options)
received, lost, done = [], [], threading.Event()

def payload(index):
    return np.random.default_rng(index).integers(0, 256, sizes[index], np.uint8)

def handle(message):
    index = int.from_bytes(message.header, "little")
    received.append((index, bool(np.array_equal(message.payload, payload(index)))))
    print(json.dumps({"received": index}) + "\\n", end="", flush=True)  # At once: other lanes print, too.
    if len(received) == len(sizes):
        done.set()

def watch():
    while not done.wait(0.05):
        status = transport.status(1 - rank)
        if status.ever_connected and status.was_silent_for(options.timeout_seconds):
            lost.append(status.silent_seconds)

transport.register("queue", handle)
transport.start()
transport.connect(1 - rank)
wait_until(lambda: transport.status(1 - rank).round_trip_seconds)
watching = threading.Thread(target=watch)
watching.start()
if rank == 0:
    for index in range(len(sizes)):
        transport.send(1, "queue", index.to_bytes(4, "little"), [payload(index)], lane=None if index % 2 else 0)
    flushed = transport.flush(1, 60.0)
    done.set()
else:
    flushed = done.wait(60.0)
    sys.stdin.read()
watching.join()
num_lanes = sum(" lane " in thread.name for thread in threading.enumerate())
result = {"flushed": flushed, "lost": lost, "num_lanes": num_lanes}
print(json.dumps({**result, "messages": received, "counters": dict(transport.counters())}), flush=True)
transport.close()
"""


@_needs_network
class FarAwayTest(parameterized.TestCase):
    @parameterized.parameters(("TcpTransport", "stall"), ("GrpcTransport", "cut"))
    @pytest.mark.stress
    def test_five_seconds_without_a_link(self, member, failure):
        sizes = [10, 3_000_000] * 14
        links = {"bandwidth_bits_per_second": 1e8, "round_trip_seconds": 0.277, "jitter_seconds": 0.01, "reorder": True}
        with network.EmulatedNetwork(2, **links) as net:
            case = {"member": member, "sizes": sizes, "timeout_seconds": 10.0}
            case["addresses"] = [f"{address}:20000" for address in net.addresses]
            receiver, sender = (self.start(net, {**case, "rank": rank}) for rank in (1, 0))
            lines = [json.loads(receiver.stdout.readline()) for _ in range(20)]
            if failure == "stall":
                net.stall(1, 5.0)
            else:
                net.cut(1)
                threading.Event().wait(5.0)
                net.restore(1)
            sent = json.loads(sender.communicate(timeout=DEADLINE_SECONDS)[0])
            output, _ = receiver.communicate(timeout=DEADLINE_SECONDS)
        *others, taken = [json.loads(line) for line in output.splitlines()]
        self.assertTrue(sent["flushed"] and taken["flushed"])
        self.assertEmpty(sent["lost"] + taken["lost"])
        self.assertLen(lines + others, len(sizes))
        messages = [tuple(message) for message in taken["messages"]]
        in_order = [message for message in messages if message[0] % 2 == 0]
        self.assertEqual(in_order, [(index, True) for index in range(0, len(sizes), 2)])
        self.assertEqual(sorted(messages), [(index, True) for index in range(len(sizes))])
        self.assertEqual(taken["counters"]["bytes_received"], sent["counters"]["bytes_sent"])
        # Of heartbeats, lane 0, and the others: the more the longer round trips take, as on a machine that is busy.
        self.assertGreaterEqual(sent["num_lanes"], 1 + 1 + num_lanes(0.277, 1e8, 1))

    def start(self, net, case):
        root = str(pathlib.Path(hop_tf.__file__).parents[1])
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        command = [sys.executable, "-c", _PROGRAM, json.dumps(case)]
        return self.enter_context(net.popen(case["rank"], command, env=environment, **pipes))


if __name__ == "__main__":
    absltest.main()

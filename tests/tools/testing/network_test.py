"""The emulated network of `hop_tf.tools.testing.network`: rates, delays, failures, and that nothing is left behind."""

import contextlib
import hashlib
import itertools
import math
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import unittest
from unittest import mock

import psutil
import pytest
from absl.testing import absltest, parameterized

from hop_tf.tools.testing import network

# How long what must happen may take on a busy machine.
_DEADLINE_SECONDS = 20.0

_REASON = network.available()
_needs_network = unittest.skipIf(_REASON is not None, f"needs an emulated network ({_REASON})")

# Makes a network with a process in it, says so, and waits.
_OWNER = """
import signal, sys
from hop_tf.tools.testing import network
signal.signal(signal.SIGINT, signal.default_int_handler)
net = network.EmulatedNetwork(2, relay=True).__enter__()
net.popen(1, ["sleep", "1000"])
print("ready", flush=True)
sys.stdin.read()
"""

# Starts a process that leaves its session and outlives it, and prints its id.
_DETACHING = """
import subprocess
print(subprocess.Popen(["sleep", "1000"], start_new_session=True).pid, flush=True)
"""


def _payload(num_bytes):
    return random.Random(num_bytes).randbytes(num_bytes)


@contextlib.contextmanager
def _connected(net, near=0, far=1):
    with network.connected(net, near, far) as ends:
        for end in ends:
            end.settimeout(_DEADLINE_SECONDS)
        yield ends


def _transfer(near, far, payload):
    """Sends a payload from one end of a connection to the other. Returns what arrives, and in how many seconds."""
    start = time.perf_counter()
    sender = threading.Thread(target=near.sendall, args=(payload,))
    sender.start()
    arrived = bytearray()
    while len(arrived) < len(payload):
        part = far.recv(1 << 20)
        if not part:
            break
        arrived += part
    sender.join()
    return arrived, time.perf_counter() - start


def _wait_for_end(processes):
    """Waits for processes to end. Returns those that do not."""
    deadline = time.monotonic() + _DEADLINE_SECONDS
    while (alive := [process for process in processes if _is_alive(process)]) and time.monotonic() < deadline:
        time.sleep(0.01)
    return alive


def _is_alive(process):
    """True if a process runs. A zombie process does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _members(namespace):
    """The ids of the processes inside of a network namespace."""
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{pid}/ns/net").st_ino == namespace:
                found.append(pid)
    return found


class LinksTest(parameterized.TestCase):
    @parameterized.parameters(
        (0, {}, "num_hosts=0"),
        (251, {}, "num_hosts=251"),
        (2, {"bandwidth_bits_per_second": 0}, "bandwidth_bits_per_second=0"),
        (2, {"bandwidth_bits_per_second": float("nan")}, "bandwidth_bits_per_second=nan"),
        (2, {"bandwidth_bits_per_second": [1e6]}, r"bandwidth_bits_per_second=\[1000000.0\]"),
        (2, {"bandwidth_bits_per_second": [1e6, -1]}, r"bandwidth_bits_per_second=\[1000000.0, -1\]"),
        (2, {"round_trip_seconds": -0.1}, "round_trip_seconds=-0.1"),
        (2, {"round_trip_seconds": float("inf")}, "round_trip_seconds=inf"),
        (2, {"one_way_seconds": [[0, 1]]}, r"one_way_seconds=\[\[0, 1\]\]"),
        (2, {"one_way_seconds": [[0, 1], [1]]}, r"one_way_seconds=\[\[0, 1\], \[1\]\]"),
        (2, {"one_way_seconds": [[0, -1], [1, 0]]}, r"one_way_seconds=\[\[0, -1\], \[1, 0\]\]"),
        (2, {"round_trip_seconds": 0.1, "one_way_seconds": [[0, 1], [1, 0]]}, "round_trip_seconds=0.1"),
        (2, {"jitter_seconds": -1}, "jitter_seconds=-1"),
        (2, {"queue_bytes": 1000}, "queue_bytes=1000"),
    )
    def test_refuses(self, num_hosts, links, received):
        for kind in (network.Links, network.EmulatedNetwork, network.Proxy):
            with self.assertRaisesRegex(ValueError, rf"must .*Received: {received}\.$"):
                kind(num_hosts, **links)

    @parameterized.parameters(
        ({"max_socket_bytes": 1}, "max_socket_bytes=1"),
        ({"relay": False, "round_trip_seconds": 0.1}, "relay=False"),
        ({"num_interfaces": 0}, "num_interfaces=0"),
        ({"num_interfaces": 2, "relay": True}, "num_interfaces=2"),
        ({"num_interfaces": 2, "round_trip_seconds": 0.1}, "num_interfaces=2"),
    )
    def test_network_refuses(self, arguments, received):
        with self.assertRaisesRegex(ValueError, rf"must .*Received: {received}\.$"):
            network.EmulatedNetwork(2, **arguments)

    def test_one_value_holds_for_all(self):
        links = network.Links(2, bandwidth_bits_per_second=8e6, round_trip_seconds=0.5)
        self.assertEqual(links.rates, [8e6, 8e6])
        self.assertEqual(links.delays, [[0.25, 0.25], [0.25, 0.25]])

    def test_ring_of_four_sites(self):
        delays = network.ring_delays(4, 0.01)
        self.assertEqual(delays[0], [0, 0.01, 0.02, 0.01])
        self.assertEqual(delays[3], [0.01, 0.02, 0.01, 0])

    def test_four_sites_across_the_world(self):
        delays = network.site_delays()
        pairs = list(itertools.combinations(range(4), 2))
        for a, b in pairs:
            self.assertEqual(delays[a][b], delays[b][a])
        self.assertEqual([delays[site][site] for site in range(4)], [0.0] * 4)
        round_trips = {(network.SITES[a], network.SITES[b]): 2 * delays[a][b] for a, b in pairs}
        self.assertEqual(max(round_trips, key=round_trips.get), ("Tokyo", "London"))
        self.assertAlmostEqual(max(round_trips.values()), 0.277)
        self.assertAlmostEqual(sum(2 * delays[site][(site + 1) % 4] for site in range(4)), 0.479)
        self.assertEqual(network.Links(4, one_way_seconds=delays).delays, delays)

    def test_queue_holds_what_is_on_the_way(self):
        links = network.Links(2, bandwidth_bits_per_second=(8e9, 8e6), one_way_seconds=[[0, 0.03], [0.06, 0]])
        self.assertEqual(links.queue_limit(1), 100_000)  # 90 ms and 10 ms of 1 MB/s
        self.assertEqual(links.queue_limit(0), 64 << 20)
        self.assertEqual(network.Links(2, bandwidth_bits_per_second=1e6).queue_limit(0), 65536)


class AvailableTest(absltest.TestCase):
    def test_a_bundle_fits_into_the_bucket(self):
        for rate in (1e6, 10e6, 100e6, 300e6, 500e6, 1e9, 10e9):
            links = network.Links(2, bandwidth_bits_per_second=rate)
            bundle = links.bundle_limit(0)
            num_frames = math.ceil(bundle / 1448)
            self.assertGreaterEqual(links.bucket_bytes(0), bundle + num_frames * (14 + 52))
            self.assertLessEqual(links.bucket_bytes(0), max(rate / 8 / 1000, bundle) * 1.05 + 2 * 1514)

    def test_names_a_missing_program(self):
        with mock.patch.object(shutil, "which", return_value=None):
            self.assertEqual(network.available(), "the command ip is missing (package iproute2)")

    def test_network_says_why_not(self):
        with (
            mock.patch.object(network.namespaced, "available", return_value="no devices"),
            self.assertRaisesRegex(RuntimeError, "create a network here: no devices"),
            network.EmulatedNetwork(2),
        ):
            self.fail("It has been entered.")

    def test_emulate_takes_what_there_is(self):
        with mock.patch.object(network, "available", return_value=None):
            self.assertIsInstance(network.emulate(2), network.EmulatedNetwork)
        with mock.patch.object(network, "available", return_value="no devices"), self.assertLogs() as logs:
            self.assertIsInstance(network.emulate(2, relay=True), network.Proxy)
        self.assertIn("no devices", logs.output[0])


@_needs_network
class NetworkTest(parameterized.TestCase):
    def enter(self, *args, **kwargs):
        return self.enter_context(network.EmulatedNetwork(*args, **kwargs))

    def datagram_socket(self, net, host):
        with net.inside(host):
            end = self.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        end.bind((net.addresses[host], 0))
        end.settimeout(_DEADLINE_SECONDS)
        return end

    @parameterized.parameters(0.002, 0.1)
    def test_round_trip(self, round_trip):
        net = self.enter(2, round_trip_seconds=round_trip)
        self.assertTrue(net.relayed)
        with _connected(net) as ends:
            seconds = network.measure_round_trips(*ends, count=5)
        self.assertGreaterEqual(min(seconds), round_trip)
        self.assertLess(min(seconds), round_trip + 0.5)

    def test_pairs_have_delays_of_their_own(self):
        net = self.enter(3, one_way_seconds=[[0, 0.01, 0.2], [0.01, 0, 0], [0.1, 0, 0]])
        with _connected(net, 0, 1) as ends:
            self.assertBetween(min(network.measure_round_trips(*ends, count=5)), 0.02, 0.29)
        with _connected(net, 0, 2) as ends:
            self.assertGreaterEqual(min(network.measure_round_trips(*ends, count=1)), 0.3)

    def test_bytes_arrive_in_order_at_the_links_rate(self):
        rate, payload = 50e6, _payload(2_000_000)
        net = self.enter(2, bandwidth_bits_per_second=rate, round_trip_seconds=0.02)
        with _connected(net) as ends:
            arrived, seconds = _transfer(*ends, payload)
        self.assertEqual(hashlib.sha256(arrived).digest(), hashlib.sha256(payload).digest())
        self.assertGreater(seconds, 8 * len(payload) / rate)
        self.assertLess(seconds, 10.0)

    def test_bytes_arrive_in_order_though_packets_do_not(self):
        net = self.enter(2, bandwidth_bits_per_second=100e6, jitter_seconds=0.005, reorder=True)
        with _connected(net) as ends:
            arrived, _ = _transfer(*ends, _payload(500_000))
        self.assertEqual(bytes(arrived), _payload(500_000))

    def test_jitter_alone_does_not_reorder(self):
        net = self.enter(2, jitter_seconds=0.02)
        near, far = self.datagram_socket(net, 0), self.datagram_socket(net, 1)
        for index in range(100):
            near.sendto(bytes([index]), far.getsockname())
        self.assertEqual([far.recv(1)[0] for _ in range(100)], [*range(100)])

    def test_kernel_limits_rates(self):
        rate, payload = 50e6, _payload(2_000_000)
        net = self.enter(2, bandwidth_bits_per_second=rate)
        if net.relayed:
            self.skipTest("The kernel lacks tbf.")
        with _connected(net) as ends:
            arrived, seconds = _transfer(*ends, payload)
        self.assertEqual(hashlib.sha256(arrived).digest(), hashlib.sha256(payload).digest())
        self.assertGreater(seconds, 8 * len(payload) / rate)
        self.assertLess(seconds, 10.0)

    def test_hosts_have_several_interfaces(self):
        rate, payload = 50e6, _payload(1_000_000)
        try:
            net = self.enter(2, bandwidth_bits_per_second=rate, num_interfaces=2)
        except RuntimeError as error:
            self.skipTest(f"The kernel lacks something: {error}")
        self.assertEqual(net.addresses, tuple(first for first, _ in net.interfaces))
        _, second = net.interfaces[1]
        with net.inside(1):
            server = self.enter_context(socket.create_server((second, 0)))
        with net.inside(0):
            near = self.enter_context(socket.create_connection(server.getsockname(), _DEADLINE_SECONDS))
        far = self.enter_context(server.accept()[0])
        before = self.received_bytes(net, 1)
        arrived, seconds = _transfer(near, far, payload)
        self.assertEqual(arrived, payload)
        self.assertGreater(seconds, 8 * len(payload) / rate)
        after = self.received_bytes(net, 1)
        self.assertGreater(after["eth1"] - before["eth1"], len(payload))
        self.assertLess(after["eth0"] - before["eth0"], len(payload) / 10)

    def received_bytes(self, net, host):
        lines = subprocess.check_output(net.command(host, ["cat", "/proc/net/dev"]), text=True).splitlines()[2:]
        return {name.strip(): int(numbers.split()[0]) for name, numbers in (line.split(":") for line in lines)}

    @parameterized.parameters(False, True)
    @pytest.mark.stress(but=2)
    def test_hosts_have_rates_of_their_own(self, relay):
        net = self.enter(3, bandwidth_bits_per_second=(1e9, 1e9, 5e6), relay=relay)
        for near, far in ((0, 2), (2, 1)):
            with _connected(net, near, far) as ends:
                _, seconds = _transfer(*ends, _payload(250_000))
            self.assertGreater(seconds, 8 * 250_000 / 5e6)
        with _connected(net, 0, 1) as ends:
            _, seconds = _transfer(*ends, _payload(5_000_000))
        self.assertLess(seconds, 8 * 5_000_000 / 5e6)

    def test_full_queue_drops(self):
        net = self.enter(2, bandwidth_bits_per_second=2e6, queue_bytes=65536, relay=True)
        near, far = self.datagram_socket(net, 0), self.datagram_socket(net, 1)
        for index in range(200):
            near.sendto(bytes([index]) * 1400, far.getsockname())
        arrived = [far.recv(1400)[0] for _ in range(45)]  # a frame has 1442 bytes
        self.assertEqual(arrived, [*range(45)])
        self.assertBetween(net.statistics().num_dropped, 100, 155)

    def test_stall_delays_and_loses_nothing(self):
        net = self.enter(2, bandwidth_bits_per_second=100e6, round_trip_seconds=0.01)
        with _connected(net) as ends:
            network.measure_round_trips(*ends, count=1)
            start = time.perf_counter()
            net.stall(1, 0.5)
            arrived, _ = _transfer(*ends, _payload(500_000))
            self.assertGreaterEqual(time.perf_counter() - start, 0.5)
        self.assertEqual(bytes(arrived), _payload(500_000))

    def test_stall_keeps_datagrams_in_order(self):
        net = self.enter(2, relay=True)
        near, far = self.datagram_socket(net, 0), self.datagram_socket(net, 1)
        start = time.perf_counter()
        net.stall(0, 0.2)
        net.stall(0, 0.4)
        net.stall(0, 0.1)
        for index in range(20):
            near.sendto(bytes([index]), far.getsockname())
        self.assertEqual([far.recv(1)[0] for _ in range(20)], [*range(20)])
        self.assertGreaterEqual(time.perf_counter() - start, 0.4)
        self.assertEqual(net.statistics().num_dropped, 0)

    def test_stall_of_a_pair_spares_the_others(self):
        net = self.enter(3, relay=True)
        with _connected(net, 0, 1) as stalled, _connected(net, 0, 2) as others, _connected(net, 2, 1) as more:
            net.stall(0, 1000.0, other=1)
            network.measure_round_trips(*others, count=1)
            network.measure_round_trips(*more, count=1)
            stalled[0].send(b".")
            stalled[1].settimeout(0.2)
            with self.assertRaises(TimeoutError):
                stalled[1].recv(1)

    def test_cut_stops_and_restore_resumes(self):
        net = self.enter(2, round_trip_seconds=0.01)
        with _connected(net) as (near, far):
            net.cut(1)
            near.send(b"1")
            far.settimeout(0.3)
            with self.assertRaises(TimeoutError):
                far.recv(1)
            net.restore(1)
            far.settimeout(_DEADLINE_SECONDS)
            self.assertEqual(far.recv(1), b"1")

    def test_cut_drops_what_is_on_the_way(self):
        net = self.enter(2, round_trip_seconds=0.2)
        near, far = self.datagram_socket(net, 0), self.datagram_socket(net, 1)
        near.sendto(b"1", far.getsockname())
        net.cut(0, other=1)
        near.sendto(b"2", far.getsockname())
        time.sleep(0.3)
        net.restore(0, other=1)
        near.sendto(b"3", far.getsockname())
        self.assertEqual(far.recv(1), b"3")

    def test_failures_need_a_relay(self):
        net = self.enter(2)
        if net.relayed:
            self.skipTest("The kernel lacks tbf.")
        for act in (lambda: net.stall(0, 1.0), lambda: net.cut(0), lambda: net.restore(0), net.statistics):
            with self.assertRaisesRegex(RuntimeError, "relay=True"):
                act()

    def test_refuses_what_is_not_there(self):
        net = self.enter(2, relay=True)
        for act in (lambda: net.command(2, ["true"]), lambda: net.cut(-1), lambda: net.stall(0, 1.0, other=2)):
            with self.assertRaisesRegex(ValueError, r"must be 0 to 1\. Received: host=-?\d\.$"):
                act()
        with self.assertRaisesRegex(ValueError, r"Received: seconds=-1\.$"):
            net.stall(0, -1)

    def test_processes_run_inside_of_their_hosts(self):
        net = self.enter(2)
        server = "import socket, sys; s = socket.create_server((sys.argv[1], 5000)); print(1, flush=True); s.accept()"
        argv = [sys.executable, "-c", server, net.addresses[1]]
        process = net.popen(1, argv, stdout=subprocess.PIPE)
        self.enter_context(process.stdout)
        process.stdout.readline()
        self.assertEqual(psutil.Process(process.pid).cmdline(), argv)
        with net.inside(0), socket.create_connection((net.addresses[1], 5000), _DEADLINE_SECONDS):
            self.assertEqual(process.wait(_DEADLINE_SECONDS), 0)

    def test_sockets_may_grow(self):
        net = self.enter(2, max_socket_bytes=123 << 20)
        for name in ("tcp_rmem", "tcp_wmem"):
            values = subprocess.check_output(net.command(1, ["cat", f"/proc/sys/net/ipv4/{name}"]))
            self.assertEqual(int(values.split()[2]), 123 << 20)


@_needs_network
class LeavesNothingTest(parameterized.TestCase):
    @parameterized.parameters(False, True)
    def test_after_an_exception(self, relay):
        interfaces, earlier = socket.if_nameindex(), psutil.Process().children()
        with self.assertRaises(ZeroDivisionError), network.EmulatedNetwork(2, relay=relay) as net:
            with net.inside(1):
                namespace = os.stat("/proc/thread-self/ns/net").st_ino
                self.assertNotEqual(socket.if_nameindex(), interfaces)
            with net.popen(1, [sys.executable, "-c", _DETACHING], stdout=subprocess.PIPE) as process:
                detached = psutil.Process(int(process.stdout.readline()))
            self.assertEqual(_members(namespace), [detached.pid])
            self.assertEqual(socket.if_nameindex(), interfaces)
            children = set(psutil.Process().children()) - set(earlier)
            raise ZeroDivisionError
        self.assertEmpty(_wait_for_end([detached, *children]))
        self.assertEmpty(_members(namespace))
        self.assertEqual(socket.if_nameindex(), interfaces)

    @parameterized.parameters(signal.SIGINT, signal.SIGTERM, signal.SIGKILL, None)
    @pytest.mark.stress(but=2)
    def test_when_its_owner_ends(self, signum):
        argv = [sys.executable, "-c", _OWNER]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        with subprocess.Popen(argv, env=environment, **pipes) as owner:
            self.assertEqual(owner.stdout.readline(), b"ready\n")
            processes = psutil.Process(owner.pid).children(recursive=True)
            self.assertLen(processes, 2)
            if signum is not None:
                owner.send_signal(signum)
        self.assertEmpty(_wait_for_end(processes))

    def test_is_of_no_use_afterwards(self):
        with network.EmulatedNetwork(2, relay=True) as net:
            pass
        net.close()
        with self.assertRaisesRegex(RuntimeError, "within"):
            net.command(0, ["true"])
        with self.assertRaisesRegex(RuntimeError, "is closed"):
            net.cut(0)


class ProxyTest(absltest.TestCase):
    def enter(self, *args, **kwargs):
        return self.enter_context(network.Proxy(*args, **kwargs))

    def test_round_trip(self):
        net = self.enter(2, one_way_seconds=[[0, 0.01], [0.05, 0]])
        with _connected(net) as ends:
            seconds = network.measure_round_trips(*ends, count=5)
        self.assertGreaterEqual(min(seconds), 0.06)
        self.assertLess(min(seconds), 0.6)

    def test_bytes_arrive_in_order_at_the_links_rate(self):
        rate, payload = 50e6, _payload(2_000_000)
        net = self.enter(2, bandwidth_bits_per_second=rate, round_trip_seconds=0.02, jitter_seconds=0.002)
        with _connected(net) as ends:
            arrived, seconds = _transfer(*ends, payload)
        self.assertEqual(hashlib.sha256(arrived).digest(), hashlib.sha256(payload).digest())
        self.assertGreater(seconds, 8 * len(payload) / rate)
        self.assertLess(seconds, 10.0)

    def test_stall_delays(self):
        net = self.enter(2)
        with _connected(net) as ends:
            start = time.perf_counter()
            net.stall(0, 0.3)
            network.measure_round_trips(*ends, count=1)
            self.assertGreaterEqual(time.perf_counter() - start, 0.3)

    def test_cut_stops_and_restore_resumes(self):
        net = self.enter(3)
        with _connected(net, 0, 1) as (near, far), _connected(net, 0, 2) as others:
            net.cut(0, other=1)
            near.send(b"1")
            network.measure_round_trips(*others, count=1)
            far.settimeout(0.1)
            with self.assertRaises(TimeoutError):
                far.recv(1)
            net.restore(0, other=1)
            far.settimeout(_DEADLINE_SECONDS)
            self.assertEqual(far.recv(1), b"1")

    def test_ends_of_connections_pass(self):
        net = self.enter(2, round_trip_seconds=0.01)
        with _connected(net) as (near, far):
            near.shutdown(socket.SHUT_WR)
            self.assertEqual(far.recv(1), b"")
            far.send(b"1")
            self.assertEqual(near.recv(1), b"1")

    def test_closes_what_is_refused(self):
        net = self.enter(2)
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        address = net.address(of=1, seen_from=0, port=port)
        self.assertEqual(net.address(1, 0, port), address)
        place = ("127.0.0.1", int(address.split(":")[1]))
        with socket.create_connection(place, _DEADLINE_SECONDS) as end, contextlib.suppress(ConnectionResetError):
            self.assertEqual(end.recv(1), b"")

    def test_leaves_nothing(self):
        threads = threading.active_count()
        with network.Proxy(2, round_trip_seconds=0.1) as net, _connected(net) as (near, far):
            process = net.popen(0, ["sleep", "1000"])
            near.send(b"1")
            net.close()
            with contextlib.suppress(ConnectionResetError):
                self.assertEqual(far.recv(1), b"")
        self.assertEqual(process.returncode, -signal.SIGKILL)
        self.assertEqual(threading.active_count(), threads)
        with self.assertRaisesRegex(RuntimeError, "within"):
            net.address(1, 0, 80)


if __name__ == "__main__":
    absltest.main()

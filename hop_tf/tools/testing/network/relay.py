"""The relay: carries packets between the devices of hosts."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import heapq
import os
import select
import struct
import time
from collections.abc import Callable, Sequence

from . import orders
from .links import ETHERNET_HEADER_BYTES, MAX_BUNDLE_BYTES, TCP_HEADERS_BYTES, Links
from .paths import Path, TokenBucket, make_paths

_BATCH_PACKETS = 64

# The kernel's header in front of a packet (struct virtio_net_hdr): flags, kind of bundle, length of the headers, bytes
# of each segment, and two fields for the checksum that is still to be filled in.
BUNDLE_HEADER = struct.Struct("=BBHHHH")


@dataclasses.dataclass(frozen=True)
class RelayStatistics:
    """The statistics of a relay so far.

    Attributes:
      num_packets: The number of packets that it delivered. A bundle counts as one.
      num_dropped: The number of packets that found a queue full.
      max_late_seconds: The longest time by which a packet was delivered too late. More than a few milliseconds mean
        that the machine was too busy for the settings.
      processor_seconds: The processor time that it took.
    """

    num_packets: int
    num_dropped: int
    max_late_seconds: float
    processor_seconds: float


class Relay:
    """Carries packets between devices, and obeys the owner of the network.

    Without devices it only waits for orders.

    Args:
      links: The links.
      devices: The hosts' TUN devices. Empty if the kernel carries the packets.
    """

    def __init__(self, links: Links, devices: Sequence[int]):
        self._devices = {device: host for host, device in enumerate(devices)}
        self._outputs = list(devices)
        self._queue_limits = [links.queue_limit(host) for host in range(links.num_hosts)]
        self._uplinks = [TokenBucket(*each) for each in zip(links.rates, self._queue_limits, strict=True)]
        self._downlinks = [TokenBucket(*each) for each in zip(links.rates, self._queue_limits, strict=True)]
        self._paths = make_paths(links)
        # Time, a number that orders events of the same time, a function, and its arguments.
        self._events: list[tuple[float, int, Callable, tuple]] = []
        self._num_events = 0
        self._num_packets = 0
        self._num_dropped = 0
        self._max_late_seconds = 0.0
        self._start_processor_seconds = time.process_time()

    def run(self) -> None:
        """Runs until the owner closes the network or is gone."""
        while True:
            timeout = max(0.0, self._events[0][0] - time.monotonic()) if self._events else None
            # Unlike epoll, select can wait for less than a millisecond.
            readable, _, _ = select.select([0, *self._outputs], [], [], timeout)
            for descriptor in readable:
                if descriptor:
                    self._take(descriptor)
                elif not self._obey(orders.receive()):
                    return
            self._do_what_is_due()

    def _obey(self, order: dict | None) -> bool:
        """Obeys an order. Returns False if the order was the last one."""
        if order is None or order["order"] == "close":
            return False
        if order["order"] == "statistics":
            orders.send(dataclasses.asdict(self._statistics()))
            return True
        until = time.monotonic() + order["seconds"]
        for source, target in order["pairs"]:
            path = self._paths[source][target]
            path.fail(order["order"], until)
            self._schedule(path.stalled_until, self._release, path)
        orders.send({})
        return True

    def _statistics(self) -> RelayStatistics:
        return RelayStatistics(
            num_packets=self._num_packets,
            num_dropped=self._num_dropped,
            max_late_seconds=self._max_late_seconds,
            processor_seconds=time.process_time() - self._start_processor_seconds,
        )

    def _schedule(self, due: float, action: Callable, *arguments) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (due, self._num_events, action, arguments))

    def _do_what_is_due(self) -> None:
        now, events = time.monotonic(), self._events
        while events and events[0][0] <= now:
            due, _, action, arguments = heapq.heappop(events)
            action(due, *arguments)

    def _take(self, device: int) -> None:
        """Takes the packets that a host has sent."""
        source = self._devices[device]
        with contextlib.suppress(BlockingIOError):
            for _ in range(_BATCH_PACKETS):
                packet = os.read(device, MAX_BUNDLE_BYTES + 1024)
                path = self._find_path(source, packet)
                if path is not None:
                    self._send_up(source, path, packet)

    def _find_path(self, source: int, packet: bytes) -> Path | None:
        """Finds the path by the last byte of the IPv4 address. Returns None for other addresses, such as multicast."""
        header = BUNDLE_HEADER.size
        if packet[header] >> 4 != 4 or packet[header + 16 : header + 19] != b"\x0a\x00\x00":
            return None
        target = packet[header + 19] - 1
        return self._paths[source][target] if 0 <= target < len(self._outputs) else None

    def _send_up(self, source: int, path: Path, packet: bytes) -> None:
        size = num_wire_bytes(packet)
        sent = self._uplinks[source].pass_time(time.monotonic(), size)
        if sent is None:
            self._num_dropped += 1
        else:
            self._schedule(path.arrival(sent), self._arrive, path, packet, size)

    def _arrive(self, now: float, path: Path, packet: bytes, size: int) -> None:
        """Handles the arrival of a packet at the target host's link."""
        if path.cut:
            return
        if path.stalled_until > now:
            return self._hold(path, packet, size)
        passed = self._downlinks[path.target].pass_time(now, size)
        if passed is None:
            self._num_dropped += 1
        else:
            self._schedule(passed, self._deliver, path, packet)

    def _hold(self, path: Path, packet: bytes, size: int) -> None:
        if path.held_bytes + size > self._queue_limits[path.target]:
            self._num_dropped += 1
        else:
            path.held.append((packet, size))
            path.held_bytes += size

    def _release(self, now: float, path: Path) -> None:
        """Releases the packets that a stall has held, unless the stall continues."""
        if path.stalled_until <= now:
            held, path.held, path.held_bytes = path.held, collections.deque(), 0
            for packet, size in held:
                self._arrive(now, path, packet, size)

    def _deliver(self, due: float, path: Path, packet: bytes) -> None:
        if path.cut:
            return
        self._max_late_seconds = max(self._max_late_seconds, time.monotonic() - due)
        self._num_packets += 1
        # The host's device may be full or, when the host is being removed, down. Then the packet is lost.
        with contextlib.suppress(OSError):
            os.write(self._outputs[path.target], packet)


def num_wire_bytes(packet: bytes) -> int:
    """Returns the bytes of the Ethernet frames that carry a packet, or a bundle of segments."""
    _, kind, _, segment, _, _ = BUNDLE_HEADER.unpack_from(packet)
    size = len(packet) - BUNDLE_HEADER.size
    num_frames = 1
    if kind and segment:
        num_frames = -(-max(1, size - TCP_HEADERS_BYTES) // segment)
    return size + num_frames * ETHERNET_HEADER_BYTES + (num_frames - 1) * TCP_HEADERS_BYTES

"""An emulated network on one Linux machine: hosts of their own, limited rates, delays, and failures.

    with network.EmulatedNetwork(4, bandwidth_bits_per_second=1e9, round_trip_seconds=0.1) as net:
        process = net.popen(2, [sys.executable, "train.py"])  # may listen at net.addresses[2]
        with net.inside(0):
            connection = socket.create_connection((net.addresses[2], 5000))
        net.stall(2, 3.0)

Every host is a network namespace with one link to a switch. A link has a rate in each direction, a pair of hosts has a
delay in each direction. Who carries the packets:

- Without delays, the kernel: a pair of virtual Ethernet devices for each host, a bridge, and `tbf` for the rates.
- With delays, a relay: a process that reads packets from a TUN device of each host, keeps them as long as the network
  would, and writes them to the device of the host they are for. Segments of a TCP stream come in bundles of up to
  64 KiB, as they do to a network card. So it needs no `netem`, which many kernels lack, and links can fail as well. It
  has one core: enough for a few Gbit/s of TCP, or for some 50,000 small packets per second.

In both, a link is a token bucket behind a queue that drops what does not fit. A rate counts Ethernet frames of up to
1514 bytes: a TCP stream gets 95.6% of it. TCP is the machine's own, with its congestion control and its limits.

Nothing is visible outside. The namespaces have no names and last as long as the one process that holds them. That
process ends with the one that made the network, however that ends, and takes along every process inside of them.

Requires root. Without it, `Proxy` is a network of sorts for TCP; `emulate` takes what there is.

`python benchmarks/benchmark_network.py` measures some networks beside what was asked for.
"""

from __future__ import annotations

import logging

from .links import SITES, Links, ring_delays, site_delays
from .measurement import connected, measure_rate, measure_round_trips
from .namespaced import EmulatedNetwork
from .namespaces import available
from .proxy import Proxy
from .relay import RelayStatistics

__all__ = [
    "SITES",
    "EmulatedNetwork",
    "Links",
    "Proxy",
    "RelayStatistics",
    "available",
    "connected",
    "emulate",
    "measure_rate",
    "measure_round_trips",
    "ring_delays",
    "site_delays",
]


def emulate(
    num_hosts: int, *, max_socket_bytes: int | None = None, relay: bool | None = None, **links
) -> EmulatedNetwork | Proxy:
    """Returns an `EmulatedNetwork`, or a `Proxy` where there can be none, which is logged. Not started yet.

    Args:
      num_hosts: Number of hosts.
      max_socket_bytes: As `EmulatedNetwork` takes it. No matter to a proxy.
      relay: As `EmulatedNetwork` takes it. No matter to a proxy.
      **links: As `Links` takes them.
    """
    reason = available()
    if reason is None:
        return EmulatedNetwork(num_hosts, max_socket_bytes=max_socket_bytes, relay=relay, **links)
    logging.warning("The network is emulated by proxies: %s.", reason)
    return Proxy(num_hosts, **links)

"""An emulated network on one Linux machine: separate hosts, limited rates, delays, and failures.

    with network.EmulatedNetwork(4, bandwidth_bits_per_second=1e9, round_trip_seconds=0.1) as net:
        process = net.popen(2, [sys.executable, "train.py"])  # may listen at net.addresses[2]
        with net.inside(0):
            connection = socket.create_connection((net.addresses[2], 5000))
        net.stall(2, 3.0)

Every host is a network namespace with one link to a switch. A link has a rate in each direction, and a pair of hosts
has a delay in each direction. The links' delays determine what carries the packets:

- Without delays, the kernel: a pair of virtual Ethernet devices for each host, a bridge, and `tbf` for the rates.
- With delays, a relay: a process that reads packets from a TUN device of each host, keeps them as long as the network
  would, and writes them to the device of the target host. Segments of a TCP stream come in bundles of up to 64 KiB, as
  they do to a network card. The relay needs no `netem`, which many kernels lack, and can also let links fail. It uses
  one core: enough for a few Gbit/s of TCP, or for some 50,000 small packets per second.

In both cases, a link is a token bucket behind a queue that drops packets when it is full. A rate counts Ethernet frames
of up to 1514 bytes: a TCP stream gets 95.6% of it. TCP is the machine's own, with its congestion control and limits.

Nothing is visible outside. The namespaces have no names and last as long as the keeper, the one process that holds
them. The keeper ends with the process that made the network, even if the latter is killed. The keeper then kills every
process inside the namespaces.

The network requires root. Without root, `Proxy` is a substitute for TCP. `emulate` returns the one that is available.
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
    """Returns an `EmulatedNetwork`, not started. If this machine cannot have one, logs this and returns a `Proxy`.

    Args:
      num_hosts: Number of hosts.
      max_socket_bytes: See `EmulatedNetwork`. A proxy ignores it.
      relay: See `EmulatedNetwork`. A proxy ignores it.
      **links: The arguments of `Links`.
    """
    reason = available()
    if reason is None:
        return EmulatedNetwork(num_hosts, max_socket_bytes=max_socket_bytes, relay=relay, **links)
    logging.warning("The network is emulated by proxies: %s.", reason)
    return Proxy(num_hosts, **links)

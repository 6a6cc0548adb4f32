"""Compares emulated networks with the requested rates and round trips, over TCP, and measures the relay's cost.

    python benchmarks/benchmark_network.py --seconds=1

Needs root.
"""

from __future__ import annotations

import math
import statistics
import sys
import time

from absl import app, flags

from hop_tf.tools.testing import network
from hop_tf.tools.testing.network.links import TCP_SHARE

_SECONDS = flags.DEFINE_float("seconds", 1.0, "Seconds for each rate, besides 8 round trips.")

_CHECKS = (
    # bits per second, round trip in seconds, relay
    (math.inf, 0.0, False),
    (10e9, 0.0, False),
    (1e9, 0.0, False),
    (100e6, 0.0, False),
    (10e6, 0.0, False),
    (math.inf, 0.0, True),
    (1e9, 0.0, True),
    (1e9, 0.001, True),
    (1e9, 0.02, True),
    (100e6, 0.1, True),
    (10e6, 0.3, True),
    (10e6, 1.0, True),
)


def _check(seconds: float) -> None:
    """Prints requested and measured values."""
    titles = [
        "",
        "Mbit/s asked",
        "TCP at most",
        "measured",
        "ms asked",
        "measured",
        "relay CPU %",
        "late ms",
        "dropped",
    ]
    print(" ".join(f"{title:>12}" for title in titles))
    for rate, round_trip, relay in _CHECKS:
        window = None if math.isinf(rate) else max(4 << 20, int(4 * rate / 8 * round_trip))
        links = {"bandwidth_bits_per_second": rate, "round_trip_seconds": round_trip}
        with network.EmulatedNetwork(2, relay=relay, max_socket_bytes=window, **links) as net:
            print(" ".join(_check_network(net, rate, round_trip, seconds)), flush=True)


def _check_network(net: network.EmulatedNetwork, rate: float, round_trip: float, seconds: float) -> list[str]:
    start = time.perf_counter()
    with network.connected(net) as ends:
        round_trips = network.measure_round_trips(*ends, count=int(max(3, min(200, 1 / (round_trip + 1e-9)))))
    with network.connected(net) as ends:
        found = network.measure_rate(*ends, seconds=seconds + 8 * round_trip)
    elapsed = time.perf_counter() - start
    values = [rate / 1e6, TCP_SHARE * rate / 1e6, found / 1e6]
    values += [round_trip * 1e3, statistics.median(round_trips) * 1e3]
    if net.relayed:
        did = net.statistics()
        values += [100 * did.processor_seconds / elapsed, did.max_late_seconds * 1e3, did.num_dropped]
    return [f"{'relay' if net.relayed else 'kernel':>12}", *(f"{value:>12.2f}" for value in values)]


def main(argv) -> None:
    del argv
    reason = network.available()
    if reason is not None:
        sys.exit(f"Cannot create a network here: {reason}.")
    _check(_SECONDS.value)


if __name__ == "__main__":
    app.run(main)

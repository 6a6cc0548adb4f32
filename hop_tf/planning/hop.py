"""What a step takes under `HopStrategy`: its own protocol, simulated with the links and steps of a measurement."""

from __future__ import annotations

import numpy as np

from hop_tf.simulate.hop_training import HopSimulation, simulate_hop
from hop_tf.timing import NetworkCosts
from hop_tf.topology import Topology

_HEADER_BYTES = 24  # What is longer is an update.


def simulate(
    durations: np.ndarray, network: NetworkCosts, *, topology: Topology, num_bytes: float, **settings
) -> HopSimulation:
    """Trains for as many steps as there are durations.

    A rank sends to all its neighbors at once, which share its link. Tokens take the latency only.

    Args:
      durations: Seconds of the ranks' steps, [n, T].
      network: What communication costs.
      topology: The graph.
      num_bytes: Size of the parameters.
      **settings: Of `HopStrategy`.

    Returns:
      The record.
    """

    def sending_seconds(sender: int, receiver: int, message_bytes: int) -> float:
        if message_bytes <= _HEADER_BYTES:
            return 0.0
        return len(topology.out_neighbors(sender)) * num_bytes * network.seconds_per_byte

    return simulate_hop(
        topology=topology,
        world_size=durations.shape[0],
        num_steps=durations.shape[1],
        compute=lambda rank: iter(durations[rank].tolist()),
        link_seconds=lambda sender, receiver, message_bytes: network.latency_seconds,
        sending_seconds=sending_seconds,
        **settings,
    )

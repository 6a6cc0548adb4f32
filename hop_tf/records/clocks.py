"""The offsets between the clocks of machines, from the round trips of heartbeats.

A rank sends a heartbeat at t0 by its own clock. At t1 it gets the answer, with the time s on the peer's clock. The peer
read its clock between t0 and t1. NTP's formula takes the middle, and is wrong by at most half of the round trip:

    offset  =  s - (t0 + t1) / 2

Of many round trips, the shortest ones give the most exact offsets. Clocks drift apart by some millionths, so the offset
at a given time is interpolated. Processes of one system share its clock.

Reference: D. Mills, "Internet Time Synchronization: the Network Time Protocol", IEEE Transactions on Communications 39
(1991), section 4.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import networkx as nx
import numpy as np

# A sample of two clocks counts if its round trip is at most this many times the shortest one.
_MOST_TIMES_SHORTEST = 2.0


def offset_of(there: float, received_at: float, round_trip_seconds: float) -> float:
    """The peer's clock minus this clock. The peer's answer, with its time `there`, arrived at `received_at`."""
    return there - (received_at - round_trip_seconds / 2)


@dataclasses.dataclass(frozen=True)
class Sample:
    """The measurement of one heartbeat.

    Attributes:
      time: Time on the sender's clock.
      offset_seconds: Offset of the peer's clock; see the module.
      round_trip_seconds: Time until the answer came.
    """

    time: float
    offset_seconds: float
    round_trip_seconds: float

    @property
    def there(self) -> float:
        """The same time on the peer's clock."""
        return self.time + self.offset_seconds


class Clocks:
    """Converts the times of several clocks to one of them.

    Args:
      names: For each process (any key), the name of its clock.
      samples: For each pair of processes, the measurements of the first one's heartbeats to the second.

    Attributes:
      errors: For each clock name, the largest possible error of its times in seconds: half of the sum of the shortest
        round trips on the path to the first clock. If no samples lead to a clock, its times are not converted, and its
        error is infinite.
    """

    def __init__(self, names: Mapping[object, str], samples: Mapping[tuple[object, object], Sequence[Sample]]):
        self._names = dict(names)
        self._pairs: dict[tuple[str, str], list[Sample]] = {}
        for (one, other), of_pair in samples.items():
            if one in names and other in names and names[one] != names[other]:
                self._pairs.setdefault((names[one], names[other]), []).extend(of_pair)
        graph = nx.Graph()
        graph.add_nodes_from(self._names.values())
        for (one, other), of_pair in self._pairs.items():
            shortest = min(sample.round_trip_seconds for sample in of_pair)
            known = graph.get_edge_data(one, other, {"weight": np.inf})["weight"]
            graph.add_edge(one, other, weight=min(shortest, known))
        self._first = next(iter(self._names.values()), "")
        lengths, self._paths = nx.single_source_dijkstra(graph, self._first) if self._names else ({}, {})
        self.errors = {name: lengths.get(name, np.inf) / 2 for name in self._names.values()}

    def align(self, process: object, times: np.ndarray) -> np.ndarray:
        """Converts times on a process's clock to times on the first process's clock."""
        path = self._paths.get(self._names[process], ())[::-1]
        aligned = np.asarray(times, np.float64)
        for here, there in itertools.pairwise(path):
            aligned = aligned + self._offsets(here, there, aligned)
        return aligned

    def _offsets(self, here: str, there: str, times: np.ndarray) -> np.ndarray:
        """The offsets of clock `there` from clock `here`, at times on clock `here`."""
        samples = [(s.time, s.offset_seconds, s.round_trip_seconds) for s in self._pairs.get((here, there), ())]
        for sample in self._pairs.get((there, here), ()):
            samples.append((sample.there, -sample.offset_seconds, sample.round_trip_seconds))
        samples.sort()
        when, offsets, round_trips = np.array(samples).T
        good = round_trips <= _MOST_TIMES_SHORTEST * round_trips.min()
        return np.interp(times, when[good], offsets[good])
